"""F29: a reader that takes `finished` first, and progress then, always ends with the last progress."""

import pytest
from case_ranks import spawn

import peertile as pt
import peertile.language as T

pytestmark = pytest.mark.any_device


@pt.kernel
def report(words: T.Peer, out: T.Exclusive, turn: T.i64):
    if words.rank == 0:
        T.st(words, 2 * turn + 1, (0,), rank=1, order=T.release)
        T.st(words, 2 * turn + 2, (0,), rank=1, order=T.release)
        T.st(words, turn + 1, (1,), rank=1, order=T.release)
        out.store(T.full((1,), 2 * turn + 2, T.i64))
    else:
        T.wait_ge(words, turn + 1, (1,))
        out.store(T.full((1,), T.ld(words, (0,), order=T.acquire), T.i64))


def ranks(group):
    wrong = 0
    with pt.SymmetricHeap(group, 1 << 20) as heap:
        words, out = heap.zeros((2,), pt.i64), pt.zeros((1,), pt.i64)
        for turn in range(200):
            report(words, out.partition(1), turn).sync()
            wrong += int(out.numpy()[0]) != 2 * turn + 2
            group.barrier("next turn")
    return wrong


@pytest.mark.feature("P4", "cpu")
def test_the_final_progress_is_the_last():
    assert spawn(ranks, 2) == [0, 0]
