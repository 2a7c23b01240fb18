"""F11: after quiet a put is done for everybody, also for a rank that hears of it through another one."""

import pytest
from case_ranks import spawn

import peertile as pt
import peertile.language as T

pytestmark = pytest.mark.any_device


@pt.kernel
def through_a_third(x: T.Peer, y: T.Peer, out: T.Exclusive, turn: T.i64):
    me = x.rank
    seen = T.i64(turn)
    if me == 0:
        T.put(T.full((1,), turn, T.i64), x, rank=1, wait=False)
        T.quiet()
        T.st(y, turn, (0,), rank=2, order=T.release)
    elif me == 2:
        T.wait_ge(y, turn, (0,))
        seen = T.sum(T.get(x, (1,), rank=1), axis=0)
    out.store(T.full((1,), seen, T.i64))


def ranks(group):
    wrong = 0
    with pt.SymmetricHeap(group, 1 << 20) as heap:
        x, y, out = heap.zeros((1,), pt.i64), heap.zeros((1,), pt.i64), pt.zeros((1,), pt.i64)
        for turn in range(1, 101):
            through_a_third(x, y, out.partition(1), turn).sync()
            wrong += int(out.numpy()[0]) != turn
            group.barrier("next turn")
    return wrong


@pytest.mark.sentence("MM-34")
def test_the_third_rank_always_sees_the_put():
    assert spawn(ranks, 3) == [0, 0, 0]
