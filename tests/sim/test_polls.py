"""Loops that poll: which of them wait, and what exhaustive exploration leaves out of them, against plain search."""

from random import Random

import numpy as np
import pytest
from tests.sim.truth import as_case, deadlocks, is_racy, random_programs

import peertile as pt
import peertile.language as T
from peertile.checker.check import check
from peertile.sim import exhaust as search
from peertile.sim.explore import exhaust, explore
from peertile.sim.scripts import Cell, script_case
from peertile.sim.verdicts import VerdictKind

# ---------------------------------------------------------------- against ground truth


@pytest.mark.slow
@pytest.mark.parametrize("words", ["chain", "adds"])
@pytest.mark.feature("C8", "sim")
def test_all_schedules_of_polls_agree_with_all_interleavings(words: str, seed: int) -> None:
    random = Random(seed)
    for _ in range(60):
        programs = random_programs(random, words=words, agents=2, length=5)
        report = exhaust(as_case(programs, polls=True), 3000)
        assert report.complete or report.verdicts
        kinds = [verdict.kind for verdict in report.verdicts]
        if is_racy(programs) and deadlocks(programs):
            # The search ends at the first verdict, and the run that it looks at first may show the other one.
            assert kinds in ([VerdictKind.RACE], [VerdictKind.DEADLOCK]), programs
        elif is_racy(programs):
            assert kinds == [VerdictKind.RACE], programs
        elif deadlocks(programs):
            assert kinds == [VerdictKind.DEADLOCK], programs
        else:
            assert kinds == [], (programs, str(report.verdicts[0]))


class _Plain(search._Path):
    """A path that learns nothing from polls."""

    def spins(self, *_) -> None:
        pass

    def among(self, *_) -> None:
        pass


def outcomes(case, gets: list, path: type, monkeypatch, limit: int = 20_000) -> tuple[set, int]:
    """What the programs read in all schedules, and how many were run; a deadlock is an outcome, too."""
    monkeypatch.setattr(search, "_Path", path)
    found, looking = set(), search.Exhaustive()
    for runs in range(limit):
        run = looking.next()
        if run is None:
            return found, runs
        gets.clear()
        outcome = run.run(case)
        if not run.pruned:
            stuck = outcome.verdict is not None and outcome.verdict.kind
            found.add((stuck, tuple(sorted((k, tuple(got)) for k, got in gets))))
    raise AssertionError(f"more than {limit} runs")


def random_pollers(random: Random):
    """Two programs of puts, adds, reads and polls of two words; each reads at its end what the words hold for it."""
    plans = []
    put = {"F": 0, "G": 0}
    for k in range(2):
        plan, own = [], "FG"[k]
        for _ in range(random.randint(1, 3)):
            kind = random.choice(["put", "put", "get", "poll"])
            if kind == "put":
                put[own] += 1
                plan.append(("put", own, put[own]))
            else:
                plan.append((kind, random.choice("FG"), random.randint(1, 2)))
        plans.append(plan)
    return plans


def polling_case(plans, gets: list):
    cells = {name: Cell(name) for name in "FG"}

    def body(k, plan):
        def run(p):
            gets.append((k, p.got))
            for kind, name, value in plan:
                if kind == "put":
                    yield from p.put(cells[name], value)
                elif kind == "get":
                    yield from p.get(cells[name])
                else:
                    p.got.append((yield from p.poll(cells[name], value)))
            for name in "FG":
                yield from p.get(cells[name])

        return run

    return script_case([body(k, plan) for k, plan in enumerate(plans)])


@pytest.mark.slow
@pytest.mark.parametrize("programs", [15, pytest.param(100, marks=pytest.mark.long)])
@pytest.mark.feature("C8", "sim")
def test_leaving_out_polls_in_vain_loses_no_outcome(programs: int, seed: int, monkeypatch) -> None:
    random, fewer = Random(seed), 0
    for _ in range(programs):
        plans, gets = random_pollers(random), []
        every, plain = outcomes(polling_case(plans, gets), gets, _Plain, monkeypatch)
        some, runs = outcomes(polling_case(plans, gets), gets, _PATH, monkeypatch)
        assert some == every, plans
        assert runs <= plain
        fewer += runs < plain
    assert fewer > 0


_PATH = search._Path

# ---------------------------------------------------------------- which loops wait


@pt.kernel(unsafe=True)
def counts(flag: T.Pointer, out: T.Pointer, N: T.Const[int]):
    trips, how = T.i32(0), T.i32(0)
    for _ in T.range(N):
        seen, _t = T.unsafe.load_ptr(flag, order=T.acquire, scope=T.system)
        trips += 1
        if seen == 1:
            how = T.i32(1)
            break
    T.unsafe.store_ptr(out, trips, order=T.weak)
    T.unsafe.store_ptr(out + 1, how, order=T.weak)


@pytest.mark.sentence("MM-74")
def test_a_loop_of_few_trips_counts_them_and_waits_for_nobody() -> None:
    def main(group) -> None:
        flag, out = pt.zeros((1,), pt.u32), pt.zeros((2,), pt.i32)
        counts.grid(1)(flag.pointer(), out.pointer(), N=10).sync()
        assert out.numpy().tolist() == [10, 0]

    assert check(main, 1, schedules=3).clean
    report = check(main, 1, exhaustive=True)
    assert report.clean
    assert report.exploration.complete


@pt.kernel
def bounded(out: T.Exclusive, x: T.Peer, LIMIT: T.Const[int]):
    n = T.i32(0)
    while T.ld(x.local, (0,), order=T.acquire) == 0:
        n += 1
        if n == LIMIT:
            break
    out.store(T.full((1,), n, T.i32))


def bounded_by_hand(limit: int):
    def main(group) -> None:
        with pt.SymmetricHeap(group, size_bytes=4096) as heap:
            out = pt.zeros((1,), pt.i32)
            bounded(out.partition(1), heap.zeros((4,), pt.i32), LIMIT=limit).sync()
            assert out.numpy()[0] == limit

    return main


def test_a_bound_that_is_kept_by_hand_ends_a_loop_once_nobody_else_can_go_on() -> None:
    assert check(bounded_by_hand(100), 1, schedules=3).clean


@pytest.mark.sentence("MM-74")
def test_a_loop_of_many_trips_that_come_to_nothing_waits_for_ever() -> None:
    (verdict,) = check(bounded_by_hand(1 << 20), 1, schedules=1).verdicts
    assert verdict.kind is VerdictKind.DEADLOCK
    assert "x[0] on rank 0 to change: it polls" in str(verdict)


@pt.kernel
def sums(out: T.Exclusive, x: T.Peer):
    total = T.i32(0)
    while total < 2000:
        total += T.ld(x.local, (0,), order=T.acquire)
    out.store(T.full((1,), total, T.i32))


@pytest.mark.sentence("MM-74")
def test_a_loop_that_makes_something_of_what_it_reads_again_does_not_wait() -> None:
    def main(group) -> None:
        with pt.SymmetricHeap(group, size_bytes=4096) as heap:
            x, out = heap.zeros((4,), pt.i32), pt.zeros((1,), pt.i32)
            x.copy_from(np.ones(4, np.int32))
            sums(out.partition(1), x).sync()
            assert out.numpy()[0] == 2000

    assert check(main, 1, schedules=2).clean


@pt.kernel
def looks_around(out: T.Exclusive, x: T.Peer):
    found = T.i64(-1)
    for k in T.range(x.local.shape[0]):
        if T.ld(x.local, (k,), order=T.acquire) == 1:
            found = k
            break
    out.store(T.full((1,), found, T.i64))


def test_a_loop_that_reads_another_word_in_every_trip_does_not_wait() -> None:
    def main(group) -> None:
        with pt.SymmetricHeap(group, size_bytes=1 << 14) as heap:
            x, out = heap.zeros((500,), pt.i32), pt.zeros((1,), pt.i64)
            x.copy_from((np.arange(500) == 400).astype(np.int32))
            looks_around(out.partition(1), x).sync()
            assert out.numpy()[0] == 400

    assert check(main, 1, schedules=2).clean


def test_what_was_written_before_a_loop_does_not_make_its_first_trip_useful() -> None:
    f, g = Cell("F"), Cell("G")

    def first(p):
        yield from p.put(g, 1)
        yield from p.poll(f, 1)

    def second(p):
        yield from p.put(f, 1)
        yield from p.poll(g, 1)

    report = exhaust(script_case([first, second]), 100)
    assert report.complete
    assert report.schedules <= 4
    assert explore(script_case([first, second]), 20).clean
