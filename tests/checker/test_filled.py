"""What the checker says about rounds of `T.put_filled` and `T.take_filled`, whose flag is the payload itself."""

from pathlib import Path

import numpy as np

import peertile as pt
import peertile.language as T
from peertile.checker.check import check
from peertile.sim.verdicts import VerdictKind
from peertile.testing.check import assert_clean

N = 4


@pt.kernel
def send(words: T.Peer, out: T.Exclusive, ROUNDS: T.Const[int]):
    """Rank 0 fills the places of rank 1, which takes them; nothing tells rank 0 that a place is empty again."""
    for k in range(ROUNDS):
        if words.rank == 0:
            T.put_filled(T.full((N,), k + 1, T.u32), words, (0,), rank=1)
        else:
            out.store(T.take_filled(words, (N,), (0,)))


@pt.kernel
def acknowledged(words: T.Peer, taken: T.Signal, ROUNDS: T.Const[int]):
    for k in range(ROUNDS):
        if words.rank == 0:
            T.put_filled(T.full((N,), k + 1, T.u32), words, (0,), rank=1)
            taken.wait(1)
        else:
            got = T.take_filled(words, (N,), (0,))
            T.assert_(T.min(got) == T.u32(k + 1), "the payload")
            taken.notify(to=0)


@pt.kernel
def exchanged(words: T.Peer, FENCED: T.Const[bool], ROUNDS: T.Const[int]):
    """Both fill and take, in two places by turns: a word of the next round tells that those of this one were taken."""
    other = 1 - words.rank
    for k in range(ROUNDS):
        if FENCED:
            T.sync_system()
        T.put_filled(T.full((N,), k + 1, T.u32), words, (k % 2,), rank=other)
        got = T.take_filled(words, (N,), (k % 2,))
        T.assert_(T.min(got) == T.u32(k + 1), "the payload")


@pt.kernel
def beside(words: T.Peer, x: T.Peer, out: T.Exclusive):
    if words.rank == 0:
        x.at(1).store((0,), T.full((N,), 5, T.u32))
        T.put_filled(T.full((N,), 1, T.u32), words, (0,), rank=1)
    else:
        T.take_filled(words, (N,), (0,))
        out.store(x.local.load((0,), (N,)))


def places(group, heap, n: int = N, empty: int = 0xFFFFFFFF):
    words = heap.zeros((n,), pt.u32)
    words.copy_from(np.full(n, empty, np.uint32))
    group.barrier("places are empty")
    return words


def sent(rounds: int, empty: int = 0xFFFFFFFF):
    def main(group) -> None:
        with pt.SymmetricHeap(group, size_bytes=1 << 14) as heap:
            out = pt.zeros((N,), pt.u32)
            send(places(group, heap, empty=empty), out.partition(N), ROUNDS=rounds).sync()
            assert rounds > 1 or group.rank == 0 or out.numpy().tolist() == [1] * N

    return main


def in_turns(fenced: bool, rounds: int):
    def main(group) -> None:
        with pt.SymmetricHeap(group, size_bytes=1 << 14) as heap:
            exchanged.grid(1)(places(group, heap, 2 * N), FENCED=fenced, ROUNDS=rounds).sync()

    return main


def line(text: str) -> str:
    lines = Path(__file__).read_text().split("\n")
    return f"{__file__}:{next(k for k, there in enumerate(lines, 1) if text in there)}"


def test_one_round_is_clean_on_every_schedule() -> None:
    report = check(sent(1), 2, exhaustive=True, limit=100)
    assert report.clean, str(report)
    assert report.statement().startswith("all schedules: ")


def test_a_place_that_is_filled_again_without_an_order_is_reported_on_every_schedule() -> None:
    """As what it is, or as what came of it: a word that was emptied after it was filled again never comes."""
    verdicts = [check(sent(2), 2, schedules=1, seed=seed).verdicts[0] for seed in range(12)]
    assert {verdict.kind for verdict in verdicts} == {VerdictKind.WORD, VerdictKind.DEADLOCK}
    for verdict in verdicts:
        if verdict.kind is VerdictKind.WORD:
            assert verdict.headline == "word: words[0] on rank 1: two stores to it are not ordered"
            agents = sorted(access.agent for access in verdict.accesses())
            assert agents == ["program 0 of send on rank 0", "program 0 of send on rank 1"]
            assert {access.launched for access in verdict.accesses()} == {f"launched at {line('send(places(group')}"}


def test_places_that_were_not_emptied_before_first_use_show_by_what_was_taken() -> None:
    """They hold what could be a payload: only what the program asserts of it can tell."""
    (verdict,) = check(sent(1, empty=0), 2, schedules=20).verdicts
    assert verdict.headline.startswith("host: rank 1 raised AssertionError")


def test_a_place_that_is_filled_again_once_its_reader_has_told_is_clean() -> None:
    def main(group) -> None:
        with pt.SymmetricHeap(group, size_bytes=1 << 14) as heap:
            acknowledged.grid(1)(places(group, heap), heap.signal(slots=1), ROUNDS=4).sync()

    assert_clean(main, 2, schedules=20)


def test_two_places_by_turns_need_a_fence_from_the_third_round_on() -> None:
    assert_clean(in_turns(True, 4), 2, schedules=10)
    assert_clean(in_turns(False, 2), 2, schedules=10)
    for seed in range(5):
        (verdict,) = check(in_turns(False, 3), 2, schedules=1, seed=seed).verdicts
        assert verdict.headline.endswith("two stores to it are not ordered")


def test_what_is_never_sent_is_a_deadlock_with_the_place_that_is_empty() -> None:
    def main(group) -> None:
        with pt.SymmetricHeap(group, size_bytes=1 << 14) as heap:
            words, out = places(group, heap), pt.zeros((N,), pt.u32)
            if group.rank == 1:
                send(words, out.partition(N), ROUNDS=1).sync()

    (verdict,) = check(main, 2, schedules=1).verdicts
    assert verdict.kind is VerdictKind.DEADLOCK
    assert "program 0 of send on rank 1 waits for words[0] on rank 1 ne 4294967295; last saw 4294967295" in str(verdict)


def test_a_filled_tile_orders_nothing_but_itself() -> None:
    def main(group) -> None:
        with pt.SymmetricHeap(group, size_bytes=1 << 14) as heap:
            x, out = heap.zeros((N,), pt.u32), pt.zeros((N,), pt.u32)
            beside(places(group, heap), x, out.partition(N)).sync()

    (verdict,) = check(main, 2, schedules=5).verdicts
    assert verdict.headline == "race: two accesses of x of rank 1, elements [0:4], are not ordered"
