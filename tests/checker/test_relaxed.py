"""Relaxed tiles in kernels: replaced values that were there before an element was a word, and fences in front of them."""

import pytest

import peertile as pt
import peertile.language as T
from peertile.checker.check import check
from peertile.sim.verdicts import VerdictKind


@pt.kernel
def add_and_flag(x: T.Peer, flag: T.Peer, FENCE: T.Const[bool]):
    """The flag says nothing of the tile, unless fences are on both sides."""
    if x.rank == 0:
        x.at(1).atomic((0,), T.Rmw.ADD, T.full((4,), 1, T.i32))
        if FENCE:
            T.sync_system()
        T.st(flag, T.i32(1), (0,), rank=1, order=T.relaxed)
    else:
        T.wait_eq(flag, T.i32(1), (0,), order=T.relaxed)
        if FENCE:
            T.sync_system()
        T.assert_(T.ld(x, (3,), order=T.relaxed) == 1, "an old value")


def adds(fence: bool):
    def main(group) -> None:
        with pt.SymmetricHeap(group, size_bytes=1 << 14) as heap:
            x, flag = heap.zeros((4,), pt.i32), heap.zeros((1,), pt.i32)
            add_and_flag.grid(1)(x, flag, FENCE=fence).sync()

    return main


def test_an_element_that_was_no_word_yet_may_still_be_read_as_it_was() -> None:
    report = check(adds(False), 2, exhaustive=True)
    assert [verdict.headline for verdict in report.verdicts] == ["fault: an old value"]
    assert any(check(adds(False), 2, schedules=1, seed=seed).verdicts for seed in range(40))


def test_behind_fences_on_both_sides_it_may_not() -> None:
    report = check(adds(True), 2, exhaustive=True)
    assert report.clean, str(report)
    assert report.exploration.complete


@pt.kernel
def fenced_atomic(x: T.Peer, count: T.Peer, out: T.Exclusive, FENCE: T.Const[bool]):
    if x.rank == 0:
        x.at(1).store((0,), T.full((16,), 1.0, T.f32))
        if FENCE:
            T.sync_system()
        count.at(1).atomic((0,), T.Rmw.ADD, T.full((4,), 1, T.i32))
    else:
        T.wait_ge(count, T.i32(1), (0,))
        out.store(x.local.load((0,), (16,)))


@pytest.mark.parametrize("exhaustive", [False, True])
@pytest.mark.parametrize("fence", [False, True])
def test_a_relaxed_atomic_of_a_tile_behind_a_fence_is_a_release(fence: bool, exhaustive: bool) -> None:
    def main(group) -> None:
        with (
            pt.SymmetricHeap(group, size_bytes=1 << 14) as heap,
            pt.SymmetricHeap(group, size_bytes=1 << 14) as counts,  # of which nothing is a word before
        ):
            x, count, out = heap.zeros((16,), pt.f32), counts.zeros((4,), pt.i32), pt.zeros((16,), pt.f32)
            group.barrier("ready")
            fenced_atomic(x, count, out.partition(16), FENCE=fence).sync()

    report = check(main, 2, schedules=20, exhaustive=exhaustive)
    assert [v.kind for v in report.verdicts] == ([] if fence else [VerdictKind.RACE]), str(report)


@pt.kernel
def three_old_values(x: T.Peer, flag: T.Peer):
    if x.rank == 0:
        for k in range(3):
            T.st(x, T.i32(1), (k,), rank=1, order=T.relaxed)
        T.st(flag, T.i32(1), (0,), rank=1, order=T.relaxed)
    else:
        T.wait_eq(flag, T.i32(1), (0,), order=T.relaxed)
        a, b = T.ld(x, (0,), order=T.relaxed), T.ld(x, (1,), order=T.relaxed)
        T.assert_(a + b + T.ld(x, (2,), order=T.relaxed) > 0, "all of them are old")


def test_old_values_of_several_words_may_be_read_one_behind_the_other() -> None:
    def main(group) -> None:
        with pt.SymmetricHeap(group, size_bytes=1 << 14) as heap:
            three_old_values.grid(1)(heap.zeros((4,), pt.i32), heap.zeros((1,), pt.i32)).sync()

    report = check(main, 2, exhaustive=True)
    assert [verdict.headline for verdict in report.verdicts] == ["fault: all of them are old"]


@pt.kernel
def progress(out: T.Exclusive, x: T.Peer, done: T.Peer, LEAST: T.Const[int]):
    """Rank 0 says how far it has come; rank 1 reads as far as it was told, or, with `LEAST` 1, one further."""
    if x.rank == 0:
        for k in T.static_range(2):
            x.at(1).store((k,), T.full((8,), k + 1, T.i32))
            T.st(done, k + 1, (0,), rank=1, order=T.release)
        out.store(T.zeros((8,), T.i32))
    else:
        told = T.wait_ge(done.local, 1, (0,))
        if told >= LEAST:
            out.store(x.local.load((1,), (8,)))
        else:
            out.store(x.local.load((0,), (8,)))


@pytest.mark.parametrize("exhaustive", [False, True])
@pytest.mark.parametrize("least", [1, 2])
def test_what_a_wait_tells_is_what_it_is_ordered_after(least: int, exhaustive: bool) -> None:
    seen = set()

    def main(group) -> None:
        with pt.SymmetricHeap(group, size_bytes=1 << 14) as heap:
            x, done, out = heap.zeros((16,), pt.i32), heap.zeros((1,), pt.i32), pt.zeros((8,), pt.i32)
            progress(out.partition(8), x, done, LEAST=least).sync()
            if group.rank == 1:
                seen.add(out.numpy()[0])

    report = check(main, 2, schedules=30, exhaustive=exhaustive)
    assert report.clean == (least == 2), str(report)
    assert report.exploration.unconfirmed == 0
    if least == 2:
        assert seen == {1, 2}
    else:
        assert "x of rank 1, elements [8:16]" in str(report.verdicts[0])
