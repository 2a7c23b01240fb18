"""Every mistake on the list gives our exception with its whole message; with two ranks the other one is let go, the
status is not zero, and neither a process nor a segment is left."""

import os
import re
import subprocess
import sys
import time
import uuid
from pathlib import Path

import bad_inputs
import pytest
from case_ranks import alone, spawn

import peertile as pt
from peertile import errors

FILE = bad_inputs.__file__


def at(function, text):
    """The line of `function` in which `text` stands, and how a message shows it, with its caret."""
    source = Path(FILE).read_text().splitlines()
    start = next(k for k, line in enumerate(source) if line.startswith(f"def {function}("))
    end = next(k for k in range(start + 1, len(source)) if not source[k])
    number = max(k for k in range(start + 1, end) if text in source[k])
    line = source[number].strip()
    begin = line.rindex(text)
    return number + 1, f"  {FILE}:{number + 1} in {function}\n    {line}\n    {' ' * begin}{'^' * len(text)}"


def compile_error(function, message, text):
    return errors.CompileError, f"{message}\n{at(function, text)[1]}"


def fault(function, message, text, rank=""):
    line, where = at(function, text)
    return errors.OutOfBounds, f"{message} ({rank}program 0, {FILE}:{line}) in {function}\n{where}"


def line_of(function, text):
    return at(function, text)[0]


EXPECTED = {
    "wrong_dtype": compile_error(
        "add",
        "store to `z`: expected dtype f32, got f64[8]; convert it with .astype(z.dtype)",
        "z.store(x.load_like(z) + y.load_like(z))",
    ),
    "wrong_rank": compile_error(
        "matrix", "load from `x`: shape: expected 1 extents, one per axis, got (1, 8)", "x.load((0, 0), (1, 8))"
    ),
    "wrong_grid": (
        errors.ArgumentError,
        "add: the grid (3, 1, 1) disagrees with the partition of z, which gives 2 programs; leave .grid(...) out",
    ),
    "wrong_partition": (
        errors.ArgumentError, "partition: expected 1 tile extents for shape (16,), got 2 in (4, 4)"
    ),
    "aliasing_outputs": (
        errors.LaunchError,
        "two_outputs: exclusive argument a overlaps b in a tensor f32[16]; pass separate tensors, or disjoint slices",
    ),
    "out_of_bounds_proven": compile_error(
        "past_the_end",
        "load: tile index of axis 0 of x: expected 0 or more, got -1; tile indices count from the beginning of the "
        "view",
        "x.load((-1,), (4,))",
    ),
    "out_of_bounds_met": fault(
        "pick", "tile index of axis 0 of x is out of bounds: got 2, limit 2", "x.load((index,), (4,))"
    ),
    "unsupported_python": compile_error(
        "with_block",
        "open: cannot be called inside a kernel; use the host: a kernel reads and writes memory only",
        'open("file")',
    ),
    "unknown_name": compile_error("no_name", "`not_there` is not defined", "not_there"),
    "type_changes_over_a_branch": compile_error(
        "two_types",
        f"Type of `tile` depends on path taken: f32[8] (line {line_of('two_types', 'T.f32')}) vs. i32[8] "
        f"(line {line_of('two_types', 'T.i32)')})",
        "tile",
    ),
    "peer_out_of_range": fault(
        "no_such_peer", "peer rank out of range: got 7, limit 1", "x.at(rank)", rank="rank 0, "
    ),
    "slot_out_of_range": fault(
        "no_such_slot", "slot of signal `s` out of range: got 4, limit 4", "s[slot]", rank="rank 0, "
    ),
    "too_many_programs": (
        errors.LaunchError,
        "meet: its 67108864 programs wait for each other and must be resident at once, cpu:0 holds 8192 of them; use "
        "a grid of at most 8192 programs",
    ),
    "heap_too_small": (
        errors.AllocationError,
        "SymmetricHeap: tensor f32[1048576] asks for 4194304 bytes, 1024 of 1048576 are in use and 1047296 fit "
        "at most; make the heap larger",
    ),
    "no_shared_memory": (
        errors.AllocationError,
        "segment: asked for 16777216 bytes of shared memory, and the system refused: File too large; use a smaller "
        "heap, or raise what limits it (ulimit -f, the memory of the container)",
    ),
}  # fmt: skip
UNEQUAL = (
    "ranks disagree about SymmetricHeap allocation: rank 0: 'tensor f32[8]'; rank 1: 'tensor f32[16]'. It must be the "
    "same on every rank"
)


@pytest.mark.parametrize("name", EXPECTED)
def test_the_whole_message_says_what_where_and_what_to_do(name):
    kind, message = EXPECTED[name]
    with alone() as heap:
        given = bad_inputs.Given(heap)
        with pytest.raises(kind) as caught:
            bad_inputs.MISTAKES[name](given)
        assert str(caught.value) == message
        if heap.group.failure() is not None:
            heap.group.recover()
        bad_inputs.add(bad_inputs.vector().partition(8), bad_inputs.vector(), bad_inputs.vector()).sync()


def allocate(group):
    """What each rank is told of an allocation that differs on one."""
    with pt.SymmetricHeap(group, 1 << 20) as heap:
        try:
            bad_inputs.unequal_allocation(bad_inputs.Given(heap))
        except errors.SymmetryError as error:
            return str(error)
    return "nothing"


@pytest.mark.sentence("PR-20")
def test_an_allocation_that_differs_on_one_rank_is_told_to_all():
    assert spawn(allocate, 2) == [UNEQUAL] * 2


def kept_segments(before):
    """Segments that are new since `before` and stay: another worker's test may have one of its own for a moment."""
    end = time.monotonic() + 10
    while (left := {n for n in set(os.listdir("/dev/shm")) - before if "peertile" in n}) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def leftovers(token):
    """Processes that inherited `token`, but for this one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes()
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if token.encode() in environment and command:
            found.append(command)
    return found


@pytest.mark.sentence("PR-33")
@pytest.mark.sentence("PR-36")
@pytest.mark.slow
@pytest.mark.parametrize("name", bad_inputs.MISTAKES)
def test_the_other_rank_is_let_go_and_nothing_is_left(name):
    token = uuid.uuid4().hex
    segments = set(os.listdir("/dev/shm"))
    command = [sys.executable, "-m", "peertile", "run", FILE, "--ranks", "2", "--", name]
    done = subprocess.run(
        command, env=os.environ | {"BAD_INPUT_RUN": token}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1, done.stderr
    message = UNEQUAL if name == "unequal_allocation" else EXPECTED[name][1]
    message = message.replace("rank 0, program", "rank 1, program").replace("got 7, limit 1", "got 7, limit 2")
    for line in message.splitlines():
        pattern = re.escape(line)
        if name == "heap_too_small":  # two ranks need more words
            pattern = re.sub(r"1024|1047296", lambda _: r"\d+", pattern)
        assert re.search(pattern, done.stderr), done.stderr
    if name not in bad_inputs.COLLECTIVE:
        assert done.stdout == "rank 0 was released\n"
    assert leftovers(token) == []
    assert kept_segments(segments) == set()
