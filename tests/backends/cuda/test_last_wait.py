"""A kernel that waits lets the next launch begin behind its last wait, and nowhere before."""

import re

import pytest
from tests.backends.cuda.test_collective_kernels import kernel_of
from tests.backends.cuda.util import body_of

import peertile as pt
import peertile.language as T
from peertile.backends.cuda.emit import emit_kernel
from peertile.backends.cuda.target import CudaOptions

ALWAYS = "_let_in(tl.full((), True, tl.int1), _launched)"


@pt.kernel
def waits_once(out: T.Exclusive, ready: T.Signal) -> None:
    ready.notify(to=0)
    ready.wait(0)
    out.store(out.load() + 1)


@pt.kernel
def waits_in_a_loop(out: T.Exclusive, words: T.Peer, n: T.i64) -> None:
    for k in T.range(n):
        T.wait_ge(words.local, k, (0,))
        out.store(out.load() + 1)
    out.store(out.load() * 2)


@pt.kernel
def waits_in_two_loops(out: T.Exclusive, words: T.Peer, n: T.i64) -> None:
    for tile in out.tiles():
        for k in T.range(3):
            T.wait_ge(words.local, k + n, (0,))
        tile.store(tile.load() + 1)


@pt.kernel
def waits_in_one_arm(out: T.Exclusive, words: T.Peer, n: T.i64) -> None:
    if n > 0:
        T.wait_ge(words.local, n, (0,))
        out.store(out.load() + 1)
    else:
        out.store(out.load() + 2)


@pt.kernel
def waits_and_does_nothing_else_there(out: T.Exclusive, words: T.Peer, n: T.i64) -> None:
    if n > 0:
        T.wait_ge(words.local, n, (0,))
    out.store(out.load() + 1)


@pt.kernel
def leaves_its_loop(out: T.Exclusive, words: T.Peer, n: T.i64) -> None:
    for k in T.range(n):
        T.wait_ge(words.local, k, (0,))
        if k > 3:
            break
    out.store(out.load() + 1)


@pt.kernel
def polls_by_hand(out: T.Exclusive, words: T.Peer) -> None:
    seen = T.ld(words.local, (0,), order=T.acquire)
    while seen == 0:
        seen = T.ld(words.local, (0,), order=T.acquire)
    out.store(out.load() + 1)


@pt.kernel
def prints(out: T.Exclusive, words: T.Peer) -> None:
    T.wait_ge(words.local, 1, (0,))
    T.print_("here")
    out.store(out.load() + 1)


@pt.kernel
def waits_for_nobody(out: T.Exclusive) -> None:
    out.store(out.load() + 1)


@pytest.fixture(scope="module")
def launched():
    """f(kernel, …) -> the lines of its Triton source without comments, for a few words and a tensor in tiles."""
    with pt.SymmetricHeap(pt.init(), 1 << 20) as heap:
        words, ready, out = heap.zeros((4,), pt.i64), heap.signal(slots=1), pt.zeros((1024,), pt.f32)

        def op(kernel):
            cut = (
                out.partition(256).persistent(programs=2)
                if "tiles" in kernel.fn.__code__.co_names
                else out.partition(1024)
            )
            given = {"words": words, "ready": ready, "n": 5}
            named = [p.name for p in kernel.params[1:]]
            return kernel(cut, *(given[name] for name in named))

        yield op


def lines_of(op, arch="sm_90", **options):
    body = body_of(emit_kernel(kernel_of(op), arch, CudaOptions(**options)).source, op.kernel.name)
    return [line for line in body.splitlines() if not line.strip().startswith("#")]


def depth(line):
    return len(line) - len(line.lstrip())


def places(lines, *words):
    """The lines that have each of the words: (index, indentation)."""
    return [[(k, depth(line)) for k, line in enumerate(lines) if word in line] for word in words]


def test_without_a_loop_it_stands_right_behind_the_last_wait(launched):
    lines = lines_of(launched(waits_once))
    lets, waited, stored = places(lines, "_let_in(", "_wait_", "tl.store(out_at")
    assert len(lets) == 1
    assert waited[-1][0] < lets[0][0] < stored[0][0]
    assert lines[lets[0][0]].strip() == ALWAYS


def test_in_a_loop_it_is_for_the_last_trip(launched):
    lines = lines_of(launched(waits_in_a_loop))
    lets, waited, stored = places(lines, "_let_in(", "_wait_", "tl.store(out_at")
    assert len(lets) == 1
    assert waited[-1][0] < lets[0][0] < stored[0][0]
    # The trip is the last one under the condition by which the loop ends.
    (run,) = (line.strip() for line in lines if re.search(r"_run = _run & \(.*> ", line))
    assert (
        f"_let_in({re.search(r'(_run & )(.*)( & _alive)', run)[2].replace(' > ', ' <= ')}, _launched)"
        == lines[lets[0][0]].strip()
    )


def test_in_loops_in_loops_all_are_in_their_last_trip(launched):
    lines = lines_of(launched(waits_in_two_loops))
    lets, waited, stored = places(lines, "_let_in(", "_wait_", "tl.store(out_at")
    assert len(lets) == 1
    assert waited[-1][0] < lets[0][0] < stored[0][0]
    assert lines[lets[0][0]].count(" <= ") == 2
    assert " & " in lines[lets[0][0]]


def test_each_arm_that_goes_on_has_a_place_of_its_own(launched):
    lines = lines_of(launched(waits_in_one_arm))
    lets, waited, stored, other = places(lines, "_let_in(", "_wait_", "tl.store(out_at", "else:")
    assert [lines[k].strip() for k, _ in lets] == [ALWAYS, ALWAYS]
    assert waited[-1][0] < lets[0][0] < stored[0][0] < other[0][0] < lets[1][0] < stored[1][0]


def test_behind_a_branch_that_does_no_more_there_is_one_place_for_both_ways(launched):
    lines = lines_of(launched(waits_and_does_nothing_else_there))
    branch, lets, waited, stored = places(lines, "if v", "_let_in(", "_wait_", "tl.store(out_at")
    assert len(lets) == 1
    assert waited[-1][0] < lets[0][0] < stored[0][0]
    assert lets[0][1] == branch[0][1]


@pytest.mark.parametrize("kernel", [leaves_its_loop, polls_by_hand], ids=lambda k: k.name)
def test_a_loop_that_may_be_left_at_any_time_is_passed_as_a_whole(launched, kernel):
    lines = lines_of(launched(kernel))
    loop, lets, stored = places(lines, "while _run", "_let_in(", "tl.store(out_at")
    assert len(lets) == 1
    assert lets[0][1] <= loop[0][1] + 4  # a guard may stand around it
    assert lines[lets[0][0]].strip() == ALWAYS
    end = next(k for k in range(loop[0][0] + 1, len(lines)) if depth(lines[k]) <= loop[0][1])
    assert end <= lets[0][0] < stored[0][0]


def test_nothing_is_let_in_where_the_next_launch_is_not_early_or_was_let_in_before(launched):
    assert not places(lines_of(launched(waits_for_nobody)), "_let_in(")[0]  # at its beginning already
    assert not places(lines_of(launched(prints)), "_let_in(")[0]  # the host takes what is printed in between
    assert not places(lines_of(launched(waits_once), "sm_80"), "_let_in(")[0]
    assert not places(lines_of(launched(waits_once), overlap=False), "_let_in(")[0]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("kernel", [waits_once, waits_for_nobody, prints], ids=lambda k: k.name)
def test_what_is_launched_early_waits_for_the_launch_in_front_before_anything_else(launched, kernel, arch):
    op = launched(kernel)
    made = emit_kernel(kernel_of(op), arch)
    lines = lines_of(op, arch)
    follows, touches = places(lines, "_follow", "tl.store(")
    assert made.overlap == bool(follows) == (arch != "sm_80" and kernel is not prints)
    assert touches
    assert not follows or follows[0] < touches[0]
