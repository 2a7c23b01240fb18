"""A put that nobody has waited for reads the memory that it copies from: writing there is a race, reading is not."""

import pytest

import peertile as pt
import peertile.language as T
from peertile.checker.check import check
from peertile.sim.verdicts import VerdictKind


@pt.kernel
def put_and_go_on(x: T.Peer, source: T.Peer, done: T.Signal, WRITES: T.Const[bool], WAITS: T.Const[bool]):
    handle = T.put(source.local, x, rank=1 - x.rank, wait=False)
    if WAITS:
        T.wait_put(handle)
    if WRITES:
        source.local.store((0,), T.full((16,), 2.0, T.f32))
    else:
        T.assert_(T.all(source.local.load((0,), (16,)) == 0.0), "the source")
    T.quiet()
    done.notify()
    done.wait()


def program(writes: bool, waits: bool):
    def main(group) -> None:
        with pt.SymmetricHeap(group, size_bytes=1 << 14) as heap:
            x, source = heap.zeros((16,), pt.f32), heap.zeros((16,), pt.f32)
            put_and_go_on.grid(1)(x, source, heap.signal(slots=1), WRITES=writes, WAITS=waits).sync()

    return main


@pytest.mark.parametrize(("writes", "waits"), [(False, False), (False, True), (True, True)])
def test_the_source_of_a_put_may_be_read_and_written_once_it_was_waited_for(writes: bool, waits: bool) -> None:
    report = check(program(writes, waits), 2, schedules=10)
    assert report.clean, str(report)
    assert report.exploration.unconfirmed == 0


@pytest.mark.sentence("MM-34")
@pytest.mark.parametrize("exhaustive", [False, True])
def test_writing_the_source_of_a_put_that_may_be_under_way_is_a_race(exhaustive: bool) -> None:
    (verdict,) = check(program(True, False), 2, schedules=1, exhaustive=exhaustive).verdicts
    assert verdict.kind is VerdictKind.RACE
    told = str(verdict)
    for rank in range(2):
        told = told.replace(f"rank {rank}", "rank R")
    assert "program 0 of put_and_go_on on rank R reads (weak) source of rank R [0:16]\n" in told
    assert "program 0 of put_and_go_on on rank R writes (weak) source of rank R [0:16]\n" in told
    assert (
        "  missing: nothing waits for the asynchronous store before the other access\n"
        "  repair: put T.wait_put(...) of its handle, or T.quiet(), in front of what comes after it\n"
    ) in told


@pt.kernel
def put_of_a_tile(x: T.Peer, source: T.Peer, done: T.Signal):
    """What is in registers has no place that somebody could write."""
    T.put(source.local.load((0,), (16,)), x, (0,), rank=1 - x.rank, wait=False)
    source.local.store((0,), T.full((16,), 2.0, T.f32))
    T.quiet()
    done.notify()
    done.wait()


def test_a_put_of_a_tile_has_no_source() -> None:
    def main(group) -> None:
        with pt.SymmetricHeap(group, size_bytes=1 << 14) as heap:
            x, source = heap.zeros((16,), pt.f32), heap.zeros((16,), pt.f32)
            put_of_a_tile.grid(1)(x, source, heap.signal(slots=1)).sync()

    report = check(main, 2, schedules=10)
    assert report.clean, str(report)


@pt.kernel
def put_and_tell(x: T.Peer, source: T.Peer, go: T.Signal, QUIET: T.Const[bool]):
    """The next rank writes the source as soon as it is told to."""
    if x.rank == 0:
        T.put(source.local, x, rank=1, wait=False)
        if QUIET:
            T.quiet()
        go.notify(to=1)
    else:
        go.wait(0)
        source.at(0).store((0,), T.full((16,), 2.0, T.f32))


@pytest.mark.parametrize("quiet", [False, True])
def test_another_rank_may_write_the_source_once_the_put_was_waited_for(quiet: bool) -> None:
    def main(group) -> None:
        with pt.SymmetricHeap(group, size_bytes=1 << 14) as heap:
            x, source = heap.zeros((16,), pt.f32), heap.zeros((16,), pt.f32)
            put_and_tell.grid(1)(x, source, heap.signal(slots=1), QUIET=quiet).sync()

    report = check(main, 2, schedules=5)
    assert [v.kind for v in report.verdicts] == ([] if quiet else [VerdictKind.RACE]), str(report)
