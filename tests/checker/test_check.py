"""Whole programs: isolation of ranks, replay, reports, exit statuses, and honest limits."""

import gc
import json
import os
import sys
import textwrap
import time
import weakref
from collections import OrderedDict
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import peertile as pt
import peertile.language as T
from peertile.checker import program as checked
from peertile.checker.check import check
from peertile.checker.program import CannotCheck, ProgramCase
from peertile.cli.check import check as check_command
from peertile.errors import ArgumentError
from peertile.sim.choices import RandomChooser
from peertile.sim.verdicts import VerdictKind, read_choices
from peertile.testing.check import assert_clean, assert_reports
from peertile.testing.fences import copy_kernel

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def program(tmp_path):
    """Writes a program file and gives its path."""

    def write(text: str, name: str = "program.py") -> Path:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return write


@pt.kernel
def add_one(z: T.Exclusive, x: T.Shared):
    z.store(x.load_like(z) + 1.0)


@pt.kernel
def exchange(out: T.Exclusive, x: T.Peer[T.read], ready: T.Signal):
    ready.notify()
    ready.wait()
    out.store(x.at(1 - x.rank).load((0,), (64,)))
    ready.notify()
    ready.wait()


def two_ranks(group) -> None:
    with pt.SymmetricHeap(group, size_bytes=1 << 16) as heap:
        x, ready = heap.zeros((64,), pt.f32), heap.signal(slots=1)
        out = pt.empty((64,), pt.f32)
        for step in range(3):
            x.copy_from(np.full(64, 10 * step + group.rank, np.float32))
            exchange(out.partition(64), x, ready).sync()
            assert out.numpy()[0] == 10 * step + 1 - group.rank


@pytest.mark.slow
@pytest.mark.feature("C1", "sim")
def test_a_function_of_the_group_is_checked() -> None:
    report = assert_clean(two_ranks, 2, schedules=50)
    assert report.exploration.schedules == 50


def test_a_kernel_that_is_checked_again_is_compiled_once(monkeypatch) -> None:
    made = []
    compile_function = checked.compile_function

    def counted(fn, name, *arguments):
        made.append(name)
        return compile_function(fn, name, *arguments)

    monkeypatch.setattr(checked, "compile_function", counted)
    monkeypatch.setattr(checked, "_kept", OrderedDict())
    for seed in range(3):
        assert check(two_ranks, 2, schedules=1, seed=seed).clean
    assert made == ["exchange"]
    for _ in range(2):  # mutants are of their case alone
        assert ProgramCase(two_ranks, 2, change=copy_kernel).run(RandomChooser(0)).verdict is None
    assert check(two_ranks, 2, schedules=1).clean
    assert made == ["exchange"] * 3


def test_a_kernel_with_a_constant_that_cannot_be_written_down_is_of_its_case_alone(monkeypatch) -> None:
    def times(by: float):
        def product(x):
            return x * by

        return product

    @pt.kernel
    def changed(z: T.Exclusive, x: T.Shared, change: T.Const):
        z.store(change(x.load_like(z)))

    monkeypatch.setattr(checked, "_kept", OrderedDict())
    for by in (2.0, 3.0):

        def main(group, by=by) -> None:
            x, z = pt.ones(8, pt.f32), pt.zeros(8, pt.f32)
            changed(z.partition(8), x, times(by)).sync()
            assert z.numpy().tolist() == [by] * 8

        report = check(main, 1, schedules=1)
        assert report.clean, str(report)
    assert not checked._kept  # a function may lie where another one lay


@pytest.mark.slow
def test_local_kernels_give_their_values() -> None:
    def main(group) -> None:
        x = pt.asarray(np.arange(100, dtype=np.float32))
        z = pt.empty((100,), pt.f32)
        add_one(z.partition(16), x).sync()
        assert z.numpy().tolist() == [k + 1.0 for k in range(100)]
        stream = pt.current_device().stream()
        add_one(z.partition(16), x).sync_on(stream)

    assert_clean(main, 3, schedules=5)


def test_every_rank_has_its_own_modules_environment_and_arguments(program) -> None:
    program("state = []\n", "helper_of_program.py")
    path = program(
        """
        import os, sys
        import peertile as pt
        import helper_of_program

        state = []

        @pt.program
        def main(group):
            assert os.environ["RANK"] == str(group.rank), os.environ["RANK"]
            assert sys.modules["__main__"].main is main
            os.environ["MINE"] = str(group.rank)
            state.append(group.rank)
            helper_of_program.state.append(group.rank)
            group.barrier("all have written")
            assert os.environ["MINE"] == str(group.rank)
            assert os.getenv("MINE") == str(group.rank)
            assert state == [group.rank]
            assert helper_of_program.state == [group.rank]
            assert sys.modules["helper_of_program"] is helper_of_program
            assert sys.argv[1:] == ["--size", "3"]

        if __name__ == "__main__":
            pt.run(main)
        """
    )
    before = dict(os.environ), list(sys.argv), list(sys.path), sys.modules["__main__"]
    report = check(path, 3, schedules=10, argv=["--size", "3"])
    assert report.clean, str(report)
    assert (dict(os.environ), list(sys.argv), list(sys.path), sys.modules["__main__"]) == before
    assert "helper_of_program" not in sys.modules


def test_the_clock_is_the_machines() -> None:
    def main(group) -> None:
        start = time.monotonic()
        time.sleep(1000.0)
        assert 1000 <= time.monotonic() - start < 1001
        assert time.perf_counter() >= start + 1000

    start = time.perf_counter()
    assert_clean(main, 2, schedules=2)
    assert time.perf_counter() - start < 20


def test_the_same_seed_gives_the_same_clock() -> None:
    seen = []

    def main(group) -> None:
        group.barrier("meet")
        seen.append((group.rank, time.time_ns()))

    check(main, 3, schedules=1, seed=4)
    check(main, 3, schedules=1, seed=4)
    assert seen[:3] == seen[3:]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("threading.Thread(target=print).start()", "threading.Thread.start"),
        ("subprocess.run(['true'])", "subprocess.Popen"),
        ("os.fork()", "os.fork"),
    ],
)
def test_an_unsupported_call_is_an_error_with_its_line(program, line: str, what: str) -> None:
    path = program(
        f"""
        import os, subprocess, threading
        import peertile as pt

        @pt.program
        def main(group):
            {line}

        pt.run(main)
        """
    )
    with pytest.raises(CannotCheck) as caught:
        check(path, 2, schedules=1)
    assert str(caught.value) == (
        f"{what}: cannot be checked, as the simulated machine has one thread for each rank ({path}:7)"
    )


def test_what_a_rank_raises_is_a_verdict_with_its_lines(program) -> None:
    path = program(
        """
        import peertile as pt

        @pt.program
        def main(group):
            group.barrier("start")
            if group.rank == 1:
                raise ValueError("no luck")
            group.barrier("end")

        pt.run(main)
        """
    )
    (verdict,) = check(path, 2, schedules=1).verdicts
    assert verdict.headline == "host: rank 1 raised ValueError: no luck"
    assert verdict.body[-1] == f'{path}:8 in main: raise ValueError("no luck")'


def test_different_collectives_are_named_on_both_sides() -> None:
    def main(group) -> None:
        if group.rank == 0:
            group.barrier("one")
        else:
            group.exchange(b"", "two")

    verdict = assert_reports(VerdictKind.COLLECTIVE, main, 2, schedules=1)
    assert "barrier(one)" in str(verdict)
    assert "exchange(two)" in str(verdict)


def test_a_collective_that_a_rank_never_makes_is_a_deadlock() -> None:
    @pt.kernel
    def never(word: T.Signal):
        word.wait()

    def main(group) -> None:
        with pt.SymmetricHeap(group, size_bytes=1 << 14) as heap:
            signal = heap.signal(slots=1)
            if group.rank == 0:
                never.grid(1)(signal).sync()
            group.barrier("after")

    verdict = assert_reports(VerdictKind.DEADLOCK, main, 2, schedules=1)
    assert "the other ranks in barrier(after); arrived: 1" in str(verdict)
    assert "word.arrived[0, 1] on rank 0 at_least 1" in str(verdict)


def test_subgroups_that_meet_in_a_circle_are_a_deadlock_that_names_them() -> None:
    def main(group) -> None:
        one, two, three = (group.subgroup(ranks) for ranks in ((0, 1), (1, 2), (0, 2)))
        first, second = {0: (one, three), 1: (two, one), 2: (three, two)}[group.rank]
        first.barrier("met")
        second.barrier("met")

    verdict = assert_reports(VerdictKind.DEADLOCK, main, 3, schedules=1)
    at = f"{__file__}:{main.__code__.co_firstlineno + 3}"
    assert str(verdict) == (
        "deadlock: 3 agents wait and nobody is left who could let them go on\n"
        "  the host thread of rank 0 waits for the other ranks in barrier(met) of the group of world ranks 0, 1; "
        f"arrived: 0\n    at {at}\n"
        "  the host thread of rank 1 waits for the other ranks in barrier(met) of the group of world ranks 1, 2; "
        f"arrived: 1\n    at {at}\n"
        "  the host thread of rank 2 waits for the other ranks in barrier(met) of the group of world ranks 0, 2; "
        f"arrived: 2\n    at {at}\n"
        "  replay: --seed 0 or --choices z0"
    )


def test_subgroups_work() -> None:
    def main(group) -> None:
        part = group.subgroup((0, 2))
        if part is not None:
            assert part.exchange(bytes([group.rank]), "ranks") == [b"\0", b"\2"]

    assert_clean(main, 3, schedules=10)


def test_check_gives_small_arguments_and_ranks(program) -> None:
    path = program(
        """
        import peertile as pt

        CHECK = {"ranks": 3, "n": 5}

        @pt.program
        def main(group, n=1_000_000_000):
            assert (group.size, n) == (3, 5)

        if __name__ == "__main__":
            pt.run(main)
        """
    )
    report = check(path, schedules=2)
    assert report.clean, str(report)
    assert report.ranks == 3


def test_a_program_of_plain_statements_is_checked(program) -> None:
    path = program(
        """
        import numpy as np
        import peertile as pt

        group = pt.init()
        got = group.exchange(str(group.rank).encode(), "ranks")
        assert got == [str(r).encode() for r in range(group.size)]
        """
    )
    assert check(path, 4, schedules=5).clean


def test_memory_in_use_after_free_is_reported() -> None:
    def main(group) -> None:
        x = pt.asarray(np.ones(16, np.float32))
        z = pt.empty((16,), pt.f32)
        pt.current_device().driver.free(x.address)
        add_one(z.partition(16), x).sync()

    verdict = assert_reports(VerdictKind.LIFETIME, main, 1, schedules=1)
    line = main.__code__.co_firstlineno + 3
    assert verdict.headline == f"use after free: x of rank 0 was freed by the host of rank 0 at {__file__}:{line}"


def test_memory_that_only_copies_have_reached_is_told_in_bytes_of_its_own() -> None:
    def main(group) -> None:
        with pt.SymmetricHeap(group, size_bytes=1 << 14) as heap:
            heap.zeros((100,), pt.f32)
            x, got = heap.zeros((8,), pt.f32), np.zeros(4, np.float32)
            x.copy_from(np.ones(8, np.float32))
            pt.op.copy(x.at(1 - group.rank)[4:], to=got).sync()

    verdict = assert_reports(VerdictKind.RACE, main, 2, schedules=3)
    assert verdict.headline.startswith("race: two accesses of symmetric memory of rank ")
    assert verdict.headline.endswith(", bytes [16:32], are not ordered")


def test_what_was_covered_is_part_of_every_report() -> None:
    report = check(two_ranks, 2, schedules=3)
    text = str(report)
    assert text.startswith("two_ranks: no fault found on 2 ranks")
    assert "3 random schedules from seed 0 of an unknown total" in text
    assert "the engine of bulk copies inside one device is not modelled" in text
    assert "kernels of one device on different streams run side by side" in text


@pytest.mark.feature("C8", "sim")
def test_an_exhaustive_check_says_so() -> None:
    def main(group) -> None:
        group.barrier("meet")

    report = check(main, 2, exhaustive=True)
    assert report.exploration.complete
    assert report.statement().startswith("all schedules: 1 run covers every order of synchronising operations\n")
    assert not check(two_ranks, 2, exhaustive=True, limit=3).exploration.complete


def test_a_file_is_compiled_under_its_own_future_statements_and_its_dataclasses_find_their_module(program) -> None:
    body = """
        from dataclasses import dataclass
        from typing import ClassVar

        import peertile as pt

        CHECK = {}

        @dataclass
        class Config:
            layers: int
            kinds: ClassVar[int] = 2

        @pt.program
        def main(group):
            assert Config.__annotations__["layers"] == KIND

        if __name__ == "__main__":
            pt.run(main)
        """
    for text, kind in (("", "int"), ("from __future__ import annotations\n", "'int'")):
        report = check(program(text + textwrap.dedent(body).replace("KIND", kind)), 2, schedules=2)
        assert report.clean, str(report)


@pytest.mark.slow
def test_a_run_leaves_nothing_of_its_machine_behind() -> None:
    def main(group) -> None:
        stream = pt.current_device().stream("left alone")
        pt.op.fill(pt.zeros((4,), pt.f32), 1).submit(stream)  # nobody waits for it

    case = ProgramCase(main, 2)
    machines = [weakref.ref(case.run(seed=seed).machine) for seed in range(4)]
    gc.collect()
    assert [machine() is not None for machine in machines[:-1]] == [False] * 3


def test_a_library_that_is_imported_under_the_checker_does_not_keep_the_clock_of_a_rank(tmp_path, monkeypatch) -> None:
    (tmp_path / "keeps_a_clock.py").write_text("from time import monotonic\nimport time\nassert time.time() < 1e6\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def main(group) -> None:
        import keeps_a_clock  # noqa: F401

    try:
        assert check(main, 2, schedules=1).clean
        assert sys.modules["keeps_a_clock"].monotonic is time.monotonic
    finally:
        sys.modules.pop("keeps_a_clock", None)


def test_arguments_are_checked() -> None:
    with pytest.raises(ArgumentError, match=r"expected a Python file, got 'nowhere\.py', which is not a file"):
        check("nowhere.py")


# ---------------------------------------------------------------- the command


def run_command(*arguments: str):
    app = typer.Typer()
    app.command()(check_command)
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.feature("C7", "sim")
def test_the_command_exits_with_one_for_a_fault_and_zero_without() -> None:
    found = run_command(str(EXAMPLES / "racy" / "missing_acquire.py"))
    assert found.exit_code == 1
    assert "race: two accesses of x of rank 1, elements [0:64], are not ordered" in found.output
    assert run_command(str(EXAMPLES / "racy" / "missing_acquire_fixed.py"), "--schedules", "5").exit_code == 0


def test_the_command_prints_json_and_replays() -> None:
    path = str(EXAMPLES / "racy" / "counting.py")
    result = run_command(path, "--json", "--schedules", "5")
    data = json.loads(result.output)
    assert (data["ranks"], data["clean"]) == (3, False)
    (verdict,) = data["verdicts"]
    assert verdict["kind"] == "race"
    assert [a["object"] for a in verdict["accesses"]] == ["x of rank 0", "x of rank 0"]
    assert read_choices(verdict["choices"]) is not None
    again = run_command(path, "--json", "--choices", verdict["choices"])
    assert json.loads(again.output)["verdicts"][0]["headline"] == verdict["headline"]
    assert run_command(path, "--choices", "x").exit_code != 0


# ---------------------------------------------------------------- the correct examples


NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))


@pytest.mark.slow
@pytest.mark.feature("C1", "sim")
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_correct_examples_are_silent(name: str, ranks: int) -> None:
    """On many schedules: the test below, and benchmarks/many_schedules.py, whose record has 1,000 of each."""
    report = check(EXAMPLES / f"{name}.py", ranks, schedules=10)
    assert report.clean, str(report)
    assert report.exploration.unconfirmed == 0


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_correct_examples_are_silent_on_a_hundred_schedules(name: str, ranks: int) -> None:
    report = check(EXAMPLES / f"{name}.py", ranks, schedules=100)
    assert report.clean, str(report)
    assert report.exploration.unconfirmed == 0


# ---------------------------------------------------------------- the page


class _Structure(HTMLParser):
    """Counts elements by tag and class, and checks that they are closed."""

    VOID = frozenset({"meta", "circle", "line", "path", "rect"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.count: dict[tuple[str, str], int] = {}
        self.links: list[str] = []

    def handle_starttag(self, tag, attrs) -> None:
        given = dict(attrs)
        self.count[tag, given.get("class") or ""] = self.count.get((tag, given.get("class") or ""), 0) + 1
        self.links += [v for k, v in attrs if k in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()


def structure(text: str) -> _Structure:
    found = _Structure()
    found.feed(text)
    assert found.open == []
    return found


@pytest.mark.feature("C7", "sim")
def test_the_page_draws_lanes_edges_and_the_race() -> None:
    report = check(EXAMPLES / "racy" / "missing_acquire.py", schedules=3, traced=True)
    text = report.page()
    found = structure(text)
    assert found.links == []
    assert found.count["g", "fault"] == 2
    assert found.count["text", "rank"] == 2
    assert 2 <= found.count["line", "lane"] <= len(report.trace.lanes)
    assert 'id="left-out"' in text  # what set the program up
    assert found.count["path", "edge"] >= 1
    assert "race: two accesses of x of rank 1" in text
    assert "<script" not in text


def test_the_page_marks_who_waits_for_ever() -> None:
    report = check(EXAMPLES / "racy" / "lost_notify.py", schedules=1, traced=True)
    found = structure(report.page())
    assert found.count["g", "fault"] >= 2
    assert "waits for ever" in report.page()


def test_the_command_writes_the_page(tmp_path) -> None:
    target = tmp_path / "report.html"
    path = str(EXAMPLES / "racy" / "counting_fixed.py")
    assert run_command(path, "--schedules", "1", "--html", str(target)).exit_code == 0
    assert structure(target.read_text()).count["text", "rank"] == 3


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a file that is always full")
@pytest.mark.parametrize(("name", "status"), [("counting_fixed", 2), ("lost_notify", 1)])
def test_a_page_that_cannot_be_written_loses_no_verdict(name, status) -> None:
    found = run_command(str(EXAMPLES / "racy" / f"{name}.py"), "--schedules", "1", "--html", "/dev/full")
    assert found.exit_code == status
    assert ("no fault found" if status == 2 else "deadlock:") in found.stdout
    assert found.stderr == (
        "peertile: check: --html, --timeline: cannot be written ([Errno 28] No space left on device)\n"
    )
