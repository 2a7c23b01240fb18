"""What hosts of checked programs do beside their work: they end, look at clocks, wait for the real world, read, print,
import, log. What the machine cannot do is an error with its line; what one rank does, no other sees."""

import atexit
import gc
import json
import logging
import os
import queue
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
import warnings
from pathlib import Path
from unittest import mock

import greenlet
import numpy as np
import pytest

import peertile as pt
import peertile.language as T
from peertile.checker.check import check
from peertile.checker.host_calls import ONE_THREAD, REAL_WORLD, THE_END
from peertile.checker.program import CannotCheck
from peertile.sim.verdicts import VerdictKind
from peertile.testing.check import assert_clean


@pytest.fixture
def program(tmp_path):
    """Writes a program file and gives its path."""

    def write(text: str, name: str = "program.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    return write


def refused(main, ranks: int = 1, **options) -> str:
    with pytest.raises(CannotCheck) as caught:
        check(main, ranks, schedules=1, **options)
    return str(caught.value)


def line(function, text: str) -> str:
    """`file:line` of the first line of `function` that contains `text`."""
    lines = Path(__file__).read_text().split("\n")
    first = function.__code__.co_firstlineno
    return f"{__file__}:{next(k for k in range(first, len(lines) + 1) if text in lines[k - 1])}"


def command(path: Path, *options: str) -> subprocess.CompletedProcess:
    words = [sys.executable, "-m", "peertile", "check", str(path), "--schedules", "2", *options]
    return subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)


@pt.kernel
def meet(ready: T.Signal):
    ready.notify()
    ready.wait()


# ---------------------------------------------------------------- a program that is none, or does nothing


def test_a_file_that_runs_nothing_is_not_clean(program) -> None:
    path = program("print('not a program of ranks')\n")
    assert refused(path) == (
        f"{path}: nothing was checked, as it neither joined the group of its ranks, by pt.init() or pt.run(main), nor "
        "used a device"
    )


def test_a_main_that_nothing_calls_is_named(program) -> None:
    path = program("import peertile as pt\n\n@pt.program\ndef work(group):\n    group.barrier('a')\n")
    assert refused(path) == (
        f"{path}: nothing was checked, as it marks work with @pt.program, but nothing calls it; add "
        '`if __name__ == "__main__": pt.run(work)`, or arguments for it as CHECK = {...}'
    )


@pytest.mark.parametrize("text", ["pt.init()", "pt.zeros((4,), pt.f32)", "pt.run(lambda group: None)"])
def test_a_group_or_a_device_is_something_to_check(program, text: str) -> None:
    assert check(program(f"import peertile as pt\n{text}\n"), 2, schedules=1).clean


def test_a_file_that_python_does_not_take_cannot_be_checked(program) -> None:
    path = program("def f(:\n")
    assert refused(path) == f"check: program: expected a file of Python, got SyntaxError: invalid syntax ({path}:1)"
    path.write_bytes(b"x = '\xff'\n")
    assert refused(path).startswith("check: program: expected a file of Python, got SyntaxError: ")


def test_what_cannot_be_imported_cannot_be_checked(program) -> None:
    path = program("import peertile as pt\nimport is_not_there\n")
    assert refused(path) == (
        f"rank 0: cannot be checked, as it got ModuleNotFoundError: No module named 'is_not_there' ({path}:2)"
    )
    program("x = (\n", "broken_helper.py")
    path = program("import broken_helper\n")
    assert refused(path) == (
        f"rank 0: cannot be checked, as it got SyntaxError: '(' was never closed (broken_helper.py, line 1) ({path}:1)"
    )


def test_a_program_that_asks_for_other_ranks_names_them(program) -> None:
    path = program("import peertile as pt\n\npt.run(lambda group: group.barrier('a'), 3)\n")
    assert refused(path, 2) == (
        "rank 0: cannot be checked on 2 ranks, as the program asks for 3; check it with --ranks 3"
    )
    assert check(path, 3, schedules=1).clean


@pytest.mark.feature("D1", "sim")
def test_check_may_be_computed_and_declare_ranks_alone(program) -> None:
    program("SMALL = 5\n", "sizes_of_program.py")
    path = program(
        """
        import os
        import peertile as pt
        from sizes_of_program import SMALL

        CHECK = {"ranks": 3, "n": SMALL + len(os.environ.get("NOT_SET", ""))}

        @pt.program
        def main(group, n):
            assert (group.size, n) == (3, 5)
        """
    )
    assert check(path, schedules=1).ranks == 3
    for text in ("pt.init().barrier('a')", "if __name__ == '__main__':\n    pt.run(lambda group: group.barrier('a'))"):
        assert check(program(f"import peertile as pt\nCHECK = {{'ranks': 3}}\n{text}\n"), schedules=1).ranks == 3
    assert check(program("import peertile as pt\nCHECKPOINT = 'CHECK'\npt.init()\n"), schedules=1).ranks == 2
    path = program("import peertile as pt\nCHECK = {'n': 3}\npt.init()\n")
    assert refused(path) == (
        f"{path}: CHECK gives arguments for the main function, so expected one function marked with @pt.program, got 0"
    )
    path = program("import peertile as pt\nCHECK = {'m': 3}\n\n@pt.program\ndef work(group, n):\n    pass\n")
    assert refused(path) == (
        f"{path}: CHECK: expected arguments of work(group, n), got m: missing a required argument: 'n'"
    )


# ---------------------------------------------------------------- the end of a rank, and of the process


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("os._exit(0)", "os._exit"),
        ("os.abort()", "os.abort"),
        ("os.execv('/bin/true', ['true'])", "os.execv"),
        ("os.execlpe('true', 'true', {})", "os.execve"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "os.kill"),
        ("signal.raise_signal(signal.SIGTERM)", "signal.raise_signal"),
    ],
)
def test_what_would_end_the_checker_is_an_error_with_its_line(program, text: str, what: str) -> None:
    path = program(
        f"""
        import contextlib, os, signal
        import peertile as pt

        @pt.program
        def main(group):
            with contextlib.suppress(Exception):  # it counts all the same
                {text}

        pt.run(main)
        """
    )
    assert refused(path, 2) == f"{what}: cannot be checked, as {THE_END} ({path}:8)"


@pytest.mark.parametrize(
    ("text", "what", "why"),
    [
        ("os._exit(0)", "os._exit", THE_END),
        ("multiprocessing.get_context('fork').Process(target=os._exit, args=(0,)).start()", "os.fork", ONE_THREAD),
        ("multiprocessing.get_context('spawn').Process(target=print).start()", "starting a process", ONE_THREAD),
        ("_thread.start_new_thread(print, ())", "_thread.start_new_thread", ONE_THREAD),
    ],
)
def test_the_command_has_a_status_of_its_own_whatever_ends_a_rank(program, text: str, what: str, why: str) -> None:
    path = program(
        f"""
        import _thread, multiprocessing, os
        import peertile as pt

        @pt.program
        def main(group):
            if group.rank == 1:
                {text}

        if __name__ == "__main__":
            pt.run(main)
        """
    )
    done = command(path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"peertile: {what}: cannot be checked, as {why} ({path}:8)\n"


def test_new_ranks_are_refused(program) -> None:
    path = program("import peertile as pt\n\ndef f(group):\n    pass\n\npt.spawn(f, 2)\n")
    assert refused(path) == (
        "starting ranks: cannot be checked, as peertile check --ranks N runs the program on the ranks it has "
        f"({path}:6)"
    )


def test_a_rank_that_ends_early_is_named_like_one_that_returned(program) -> None:
    path = program(
        """
        import sys
        import peertile as pt

        group = pt.init()
        if group.rank == 1:
            sys.exit()
        group.barrier("the others")
        """
    )
    (verdict,) = check(path, 2, schedules=1).verdicts
    assert verdict.kind is VerdictKind.COLLECTIVE
    assert verdict.headline.startswith("collective: rank 1 has ended, and rank 0 calls barrier(the others)")


def test_what_is_registered_for_the_end_is_done_at_the_end_of_the_rank() -> None:
    done = []

    def main(group) -> None:
        atexit.register(done.append, (group.rank, "first"))
        atexit.register(done.append, (group.rank, "last"))
        atexit.register(print)
        atexit.unregister(print)
        done.append((group.rank, "works"))

    assert_clean(main, 1, schedules=1)
    assert done == [(0, "works"), (0, "last"), (0, "first")]


def test_signals_that_a_rank_sends_itself_reach_its_handlers() -> None:
    def main(group) -> None:
        seen = []
        signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
        signal.raise_signal(signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.raise_signal(signal.SIGHUP)
        assert seen == [signal.SIGTERM] * 2
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    assert_clean(main, 2, schedules=2)


# ---------------------------------------------------------------- time, and the real world


def assert_clean_at_once(main) -> None:
    """Two ranks are clean, and nobody waits for what only the machine's clock says."""
    start = time.perf_counter()
    assert_clean(main, 2, schedules=2)
    assert time.perf_counter() - start < 20


def test_who_only_looks_at_a_clock_sees_it_go_on() -> None:
    def main(group) -> None:
        for clock, ticks in ((time.monotonic, 3600), (time.perf_counter_ns, 10**9), (time.time, 0.5)):
            start = clock()
            while clock() - start < ticks:
                pass

    assert_clean_at_once(main)


def test_bounds_of_queues_and_locks_are_the_machines() -> None:
    def main(group) -> None:
        start = time.monotonic()
        with pytest.raises(queue.Empty):
            queue.Queue().get(timeout=100)
        lock = threading.Lock()
        with lock:
            assert lock.locked()
            assert not lock.acquire(blocking=False)
            assert not lock.acquire(timeout=100)
            group.barrier("held")
        assert lock.acquire(timeout=1)
        assert 200 <= time.monotonic() - start < 202

    assert_clean_at_once(main)


def test_a_lock_that_nobody_gives_back_is_a_deadlock_with_its_line() -> None:
    def main(group) -> None:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()

    (verdict,) = check(main, 1, schedules=1).verdicts
    assert str(verdict) == (
        "deadlock: 1 agent waits and nobody is left who could let it go on\n"
        f"  the host thread of rank 0 waits for a lock that is not free ({__file__}:{main.__code__.co_firstlineno + 3})\n"
        "  replay: --seed 0 or --choices z0"
    )


def test_a_read_that_nobody_can_serve_is_an_error_with_its_line() -> None:
    def main(group) -> None:
        reads, writes = os.pipe()
        os.write(writes, b"x")
        assert os.read(reads, 1) == b"x"
        try:
            os.read(reads, 1)
        finally:
            os.close(reads)
            os.close(writes)

    where = f"{__file__}:{main.__code__.co_firstlineno + 5}"
    assert refused(main) == f"os.read: cannot be checked, as {REAL_WORLD} ({where})"


@pytest.mark.parametrize("form", ["computes", "catches", "waits"])
def test_a_host_that_does_not_come_back_is_an_error_with_its_line(form: str) -> None:
    def computes(group) -> None:
        while True:
            group.rank  # noqa: B018

    def catches(group) -> None:
        while True:
            try:
                while True:
                    group.rank  # noqa: B018
            except Exception:
                pass

    def waits(group) -> None:
        queue.SimpleQueue().get()

    main = locals()[form]
    before, timer = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    text = refused(main, host_seconds=0.2)
    why = "it ran for 0.2 s without letting others go on; --host-seconds N allows more"
    assert text.startswith(f"the host thread of rank 0: cannot be checked, as {why} ({__file__}:")
    first = main.__code__.co_firstlineno
    assert first < int(text.rstrip(")").split(":")[-1]) <= first + 5
    assert signal.getsignal(signal.SIGALRM) is before
    left, interval = signal.getitimer(signal.ITIMER_REAL)
    assert interval == timer[1]
    assert timer[0] - 10 < left <= timer[0]  # somebody else's bound goes on


@pt.kernel
def never_ends(z: T.Exclusive, n: T.i64):
    k = n
    while k > 0:
        k = k + 1 - 1
    z.store(T.full((16,), 1.0, T.f32))


def test_a_kernel_that_does_not_end_is_an_error_with_its_launch() -> None:
    def main(group) -> None:
        never_ends(pt.zeros((16,), pt.f32).partition(16), 1).sync()

    assert refused(main, host_seconds=0.2) == (
        "program 0 of never_ends on rank 0: cannot be checked, as it ran for 0.2 s without letting others go on; "
        f"--host-seconds N allows more (launched at {line(main, 'never_ends')})"
    )


def test_a_bound_of_somebody_else_acts_though_the_timer_is_in_use() -> None:
    class Over(BaseException):
        pass

    running: list[bool] = []

    def over(number, frame) -> None:  # again and again: where it comes too early, in a finaliser say, it is lost
        if running:
            running.clear()
            raise Over

    def main(group) -> None:
        running.append(True)
        while True:
            group.rank  # noqa: B018

    before, timer = signal.signal(signal.SIGALRM, over), signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    try:
        with pytest.raises(Over):
            check(main, 1, schedules=1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, before)


def test_who_asks_again_and_again_lets_time_pass() -> None:
    def main(group) -> None:
        with pt.SymmetricHeap(group, size_bytes=1 << 14) as heap:
            ready = heap.signal(slots=1)
            if group.rank == 1:
                time.sleep(1000)
            future = meet.grid(1)(ready).submit(pt.current_device().stream("s"))
            while not future.poll():
                pass

    assert_clean(main, 2, schedules=5)


def test_a_bound_that_the_program_gives_passes_once_nobody_can_go_on() -> None:
    tries = []

    def main(group) -> None:
        with pt.SymmetricHeap(group, size_bytes=1 << 14) as heap:
            ready = heap.signal(slots=1)
            if group.rank == 1:
                time.sleep(5)
            future = meet.grid(1)(ready).submit(pt.current_device().stream("s"))
            for _ in range(10):
                try:
                    future.wait(timeout_s=1.0)
                    break
                except pt.WaitTimeout:
                    tries.append(group.rank)

    assert_clean(main, 2, schedules=1)
    assert 4 <= tries.count(0) <= 5
    assert 1 not in tries


# ---------------------------------------------------------------- streams


def test_standard_streams_are_real_ones() -> None:
    def main(group) -> None:
        sys.stdout.buffer.write(b"bytes\n")
        sys.stdout.flush()
        print("text", file=sys.stderr)
        assert (sys.stdout.encoding, sys.stdout.isatty(), sys.stdout.name) == ("utf-8", False, "<stdout>")
        assert sys.stdin.buffer.readable()
        sys.stdout.reconfigure(line_buffering=False)
        sys.__stdout__.write("no line end")

    report = assert_clean(main, 1, schedules=1)
    assert report.output == "bytes\ntext\nno line end"


def test_input_is_an_error_with_its_line() -> None:
    for ask in (lambda group: input("? "), lambda group: sys.stdin.buffer.read(1), lambda group: next(sys.stdin)):
        where = f"{__file__}:{ask.__code__.co_firstlineno}"
        assert refused(ask) == f"reading from standard input: cannot be checked, as {REAL_WORLD} ({where})"


def test_a_stream_that_one_rank_replaces_or_closes_stays_that_of_the_others() -> None:
    def main(group) -> None:
        if group.rank == 0:
            sys.stdout.close()
            sys.stdout = None
        group.barrier("closed")
        if group.rank == 1:
            print("still there")

    before = sys.stdout
    assert assert_clean(main, 2, schedules=2).output == "still there\n"
    assert sys.stdout is before


def test_of_a_long_output_the_first_part_is_kept() -> None:
    def main(group) -> None:
        for _ in range(3):
            print("x" * 1_000_000)

    output = assert_clean(main, 1, schedules=1).output
    assert output.endswith("x\n... and 1951427 bytes more\n")
    assert len(output) < 1_100_000


def test_what_was_printed_before_an_error_is_part_of_the_report(program) -> None:
    path = program(
        """
        import argparse
        import peertile as pt

        parser = argparse.ArgumentParser()
        parser.add_argument("--size", type=int)
        size = parser.parse_args().size
        pt.init()
        """
    )
    assert check(path, 2, schedules=1, argv=["--size", "3"]).clean
    report = check(path, 2, schedules=1, argv=["--size", "x y"])
    assert str(report).startswith(
        "host: rank 0 raised SystemExit: 2\n"
        f"  {path}:7 in <module>: size = parser.parse_args().size\n"
        "  replay: --seed 0 or --choices z0\n\n"
        "printed: usage: program.py [-h] [--size SIZE]\n"
        "         program.py: error: argument --size: invalid int value: 'x y'\n\n"
        f"again: peertile check {path} --ranks 2 --choices z0 -- --size 'x y'\n\n"
    )


def test_what_goes_past_the_streams_does_not_mix_with_the_report(program) -> None:
    path = program("import os\nimport peertile as pt\n\npt.init()\nos.write(1, b'raw\\n')\n")
    done = command(path, "--json", "--ranks", "1")
    assert (done.returncode, done.stderr) == (0, "raw\n" * 2)
    assert json.loads(done.stdout)["clean"]


# ---------------------------------------------------------------- what belongs to one rank


def test_paths_folders_loggers_and_filters_are_a_ranks_own(program, tmp_path) -> None:
    for rank in range(2):
        (tmp_path / f"of_{rank}").mkdir()
        program(f"WHO = {rank}\n", f"of_{rank}/who_am_i.py")
    path = program(
        f"""
        import logging, os, sys, warnings
        import peertile as pt

        @pt.program
        def main(group):
            own = {str(tmp_path)!r} + f"/of_{{group.rank}}"
            sys.path.insert(0, own)
            os.chdir(own)
            sys.argv = ["other", str(group.rank)]
            logging.basicConfig(level=logging.DEBUG if group.rank else logging.ERROR)
            logging.getLogger("app").addHandler(logging.NullHandler())
            warnings.simplefilter("ignore" if group.rank else "error")
            os.environb[b"MINE"] = str(group.rank).encode()
            group.barrier("all have")
            import who_am_i
            assert who_am_i.WHO == group.rank
            assert os.getcwd() == own and os.path.exists("who_am_i.py")
            assert sys.argv[1] == str(group.rank)
            assert len(logging.root.handlers) == len(logging.getLogger("app").handlers) == 1
            assert logging.root.isEnabledFor(logging.INFO) == bool(group.rank)
            assert warnings.filters[0][0] == ("ignore" if group.rank else "error")
            assert os.environ["MINE"] == str(group.rank)

        pt.run(main)
        """
    )
    before = os.getcwd(), list(sys.path), list(logging.root.handlers), logging.root.level, list(warnings.filters)
    report = check(path, 2, schedules=5)
    assert report.clean, str(report)
    assert before == (
        os.getcwd(), list(sys.path), list(logging.root.handlers), logging.root.level, list(warnings.filters)
    )  # fmt: skip
    assert "MINE" not in os.environ
    assert "who_am_i" not in sys.modules


def test_modules_of_a_package_without_a_file_are_a_ranks_own(program) -> None:
    program("state = []\n", "plain/state_of.py")
    path = program(
        """
        import peertile as pt
        import plain.state_of

        group = pt.init()
        plain.state_of.state.append(group.rank)
        group.barrier("all have")
        from plain import state_of
        assert state_of is plain.state_of and state_of.state == [group.rank]
        """
    )
    assert check(path, 3, schedules=5).clean


def test_an_environment_below_the_folder_of_the_program_is_a_library(program, tmp_path) -> None:
    installed = tmp_path / ".venv" / "lib" / "site-packages"
    installed.mkdir(parents=True)
    (installed / "installed_there.py").write_text(
        "import peertile as pt\nheld = []\n\ndef wait(group):\n    held.append(1)\n    input()\n"
    )
    path = program(
        f"""
        import sys
        import peertile as pt

        sys.path.append({str(installed)!r})
        import installed_there

        installed_there.wait(pt.init())
        """
    )
    try:
        assert refused(path) == f"reading from standard input: cannot be checked, as {REAL_WORLD} ({path}:8)"
        assert sys.modules["installed_there"].held == [1]
    finally:
        sys.modules.pop("installed_there", None)


def test_what_a_rank_puts_in_the_place_of_a_function_stays_its_own() -> None:
    def main(group) -> None:
        if group.rank == 0:
            with mock.patch("time.time", return_value=7.0), mock.patch.dict(os.environ, {"MINE": "a"}):
                group.barrier("patched")
                assert (time.time(), os.environ["MINE"]) == (7.0, "a")
            time.sleep = None  # type: ignore[assignment]
            group.barrier("gone")
            assert time.sleep is None
        else:
            group.barrier("patched")
            assert time.time() < 1.0
            assert "MINE" not in os.environ
            group.barrier("gone")
            time.sleep(1.0)

    before = time.sleep
    assert_clean(main, 2, schedules=5)
    assert time.sleep is before


def test_settings_of_the_interpreter_do_not_reach_the_next_schedule() -> None:
    def main(group) -> None:
        assert gc.isenabled()
        assert sys.getrecursionlimit() == before[1]
        gc.disable()
        sys.setrecursionlimit(before[1] + 100 + group.rank)
        group.barrier("all have")
        assert not gc.isenabled()
        assert sys.getrecursionlimit() == before[1] + 100 + group.rank

    before = gc.isenabled(), sys.getrecursionlimit()
    assert_clean(main, 2, schedules=5)
    assert (gc.isenabled(), sys.getrecursionlimit()) == before


def test_log_files_and_caught_warnings_are_a_ranks_own(tmp_path) -> None:
    def main(group) -> None:
        file = tmp_path / f"log_{group.rank}"
        logging.basicConfig(filename=file, filemode="w", level=logging.INFO, format="%(name)s %(message)s")
        log = logging.getLogger("a.b")
        log.info("first of %d", group.rank)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            group.barrier("all have")
            warnings.warn(f"of {group.rank}", stacklevel=1)
        log.info("last")
        logging.shutdown()
        assert file.read_text() == f"a.b first of {group.rank}\na.b last\n"
        assert [str(warning.message) for warning in caught] == [f"of {group.rank}"]

    assert_clean(main, 2, schedules=5)


def test_a_greenlet_of_the_programs_own_may_wait() -> None:
    def main(group) -> None:
        def inner() -> str:
            outer = greenlet.getcurrent().parent
            outer.switch("before")
            group.barrier("inside")
            return f"after on {group.rank}"

        other = greenlet.greenlet(inner)
        assert other.switch() == "before"
        assert other.switch() == f"after on {group.rank}"
        assert other.dead

    assert_clean(main, 3, schedules=5)


def test_numbers_without_a_seed_are_the_same_at_every_run_and_differ_by_rank() -> None:
    seen = []

    def main(group) -> None:
        random.seed()
        np.random.seed()
        numbers = random.random(), np.random.rand(), random.Random().random(), np.random.default_rng().random()
        seen.append((group.rank, numbers, uuid.uuid4(), os.urandom(8)))

    check(main, 2, schedules=1)
    check(main, 2, schedules=1)
    first, second = sorted(seen[:2]), sorted(seen[2:])
    assert first == second
    assert not {first[0][1][k] for k in range(4)} & {first[1][1][k] for k in range(4)}
    assert len({first[0][2], first[1][2]}) == 2
    assert random.Random().random() != random.Random().random()


# ---------------------------------------------------------------- faults that the program catches


@pt.kernel
def is_zero(z: T.Exclusive, k: T.i64):
    T.assert_(k == 0, "k is zero")
    z.store(T.full((16,), 1.0, T.f32))


def goes_on_after_a_fault(group) -> None:
    z = pt.zeros((16,), pt.f32)
    with pytest.raises(pt.KernelAssert, match="k is zero"):
        is_zero(z.partition(16), 1).sync()
    is_zero(z.partition(16), 0).sync()
    assert z.numpy()[0] == 1.0


def recovers(group) -> None:
    with pt.SymmetricHeap(group, size_bytes=1 << 14) as heap:
        ready = heap.signal(slots=1)
        with pytest.raises(pt.PeerFailed if group.rank else pt.WaitTimeout):
            group.barrier("b") if group.rank else meet.grid(1)(ready).sync()
        group.recover()
        meet.grid(1)(ready).sync()


def test_a_fault_ends_a_schedule_though_the_program_would_catch_it() -> None:
    (verdict,) = check(goes_on_after_a_fault, 1, schedules=1).verdicts
    assert str(verdict) == (
        "fault: k is zero\n"
        "  program 0 of is_zero on rank 0\n"
        f"    {line(is_zero.__wrapped__, 'T.assert_')} in is_zero\n"
        '      T.assert_(k == 0, "k is zero")\n'
        "      ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^\n"
        f"  launched at {line(goes_on_after_a_fault, '1).sync')}\n"
        "  replay: --seed 0 or --choices z0"
    )
    (verdict,) = check(recovers, 2, schedules=1).verdicts
    assert verdict.kind is VerdictKind.DEADLOCK


def test_faults_can_be_followed_to_their_hosts() -> None:
    assert_clean(goes_on_after_a_fault, 2, schedules=5, follow_faults=True)
    report = assert_clean(recovers, 2, schedules=10, follow_faults=True)
    assert "a kernel that fails, or waits in vain, is reported only where its host lets the error pass" in str(report)


def test_a_followed_fault_that_nobody_catches_is_an_error_of_its_rank() -> None:
    def main(group) -> None:
        is_zero(pt.zeros((16,), pt.f32).partition(16), 1).sync()

    (verdict,) = check(main, 1, schedules=1, follow_faults=True).verdicts
    assert verdict.headline.startswith("host: rank 0 raised KernelAssert: assertion failed: k is zero (program 0, ")


# ---------------------------------------------------------------- what a report says


def test_a_report_says_which_schedules_it_is_about(program) -> None:
    def clean(group) -> None:
        with pt.SymmetricHeap(group, size_bytes=1 << 14) as heap:
            ready = heap.signal(slots=1)
            meet.grid(1)(ready).sync()
            meet.grid(1)(ready).sync()

    def covered(**options) -> str:
        return check(clean, 2, **options).statement().split("\n")[0]

    assert covered(schedules=1) == "1 random schedule from seed 0 of an unknown total"
    assert covered(schedules=2, seed=7) == "2 random schedules from seed 7 of an unknown total"
    assert covered(choices=(0, 1)) == "the one schedule of --choices z1.1, of an unknown total"
    assert covered(choices=(9, 1)) == (
        "the one schedule of --choices 9.1, of an unknown total; from choice 0 on they are not those of this program "
        "under these options"
    )
    assert covered(exhaustive=True, limit=1) == (
        "1 schedule of an exhaustive search, which gave up at its limit of 1, of an unknown total"
    )


def test_a_fault_of_an_exhaustive_search_tells_how_to_repeat_it() -> None:
    path = Path(__file__).parents[2] / "examples" / "racy" / "equality_wait.py"
    report = check(path, exhaustive=True, resident=64, argv=["a b"])
    assert not report.exploration.complete
    schedules = report.exploration.schedules
    runs = "1 schedule" if schedules == 1 else f"{schedules} schedules"
    assert report.statement().startswith(
        f"{runs} of an exhaustive search, which ended at the first fault, of an unknown total\n"
    )
    (verdict,) = report.verdicts
    choices = str(verdict.replay).removeprefix("--choices ")
    assert report.command == f"peertile check {path} --ranks 2 --resident 64 --choices {choices} -- 'a b'"
    assert report.as_dict()["again"] == report.command
    again = check(path, choices=verdict.replay.choices, resident=64)
    assert [str(found) for found in again.verdicts] == [str(verdict)]
    assert again.exploration.misfit is None


def waits_somewhere_else(over):
    """Waits, sleeps and looks at clocks, as threads of the process do that have nothing to do with a program."""
    found = []
    while not over.is_set():
        try:
            threading.Event().wait(1e-4)
            time.sleep(1e-4)
            queue.Queue().put(time.monotonic())
        except BaseException as error:
            found.append(error)
    return found


def test_other_threads_of_the_process_go_on_as_if_nothing_was_checked():
    def main(group):
        done = threading.Event()
        done.set()
        for k in range(40):
            x = pt.full((4,), k, pt.f32)
            assert done.wait(0.5)
            time.sleep(0.01)
            assert x.numpy().tolist() == [k] * 4

    over, found = threading.Event(), []
    thread = threading.Thread(target=lambda: found.append(waits_somewhere_else(over)))
    thread.start()
    try:
        reports = [check(main, 2, schedules=3) for _ in range(2)]
    finally:
        over.set()
        thread.join(20)
    assert [report.clean for report in reports] == [True, True]
    assert len({report.exploration.steps for report in reports}) == 1
    assert found == [[]]
