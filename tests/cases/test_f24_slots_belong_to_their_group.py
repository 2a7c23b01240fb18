"""F24: overlapping groups have words of their own, so a signal of one never ends a wait on the other."""

import pytest
from case_ranks import spawn

import peertile as pt
import peertile.language as T


@pt.kernel
def tell(s: T.Signal, x: T.Peer, value: T.i64, to: T.i64):
    if value > 0:
        T.put(T.full((1,), value, T.i64), x, rank=to)
    s.notify(to=to)


@pt.kernel
def hear(s: T.Signal, x: T.Peer, out: T.Exclusive, source: T.i64):
    s.wait(source)
    out.store(x.local.load((0,), (1,)))


def ranks(group):
    """Ranks 0 and 2 both signal rank 1, each in a group of its own; rank 0 is late."""
    first, second = group.subgroup((0, 1)), group.subgroup((2, 1))
    found = None
    heaps = [pt.SymmetricHeap(g, 1 << 18) if g is not None else None for g in (first, second)]
    objects = [(h.signal(slots=1), h.zeros((1,), pt.i64)) if h is not None else None for h in heaps]
    if group.rank == 2:
        tell.grid(1)(*objects[1], 0, 1).sync()
    group.barrier("the other group's signal is there")
    if group.rank == 0:
        tell.grid(1)(*objects[0], 42, 1).sync()
    if group.rank == 1:
        out = pt.zeros((1,), pt.i64)
        hear(*objects[0], out.partition(1), 0).sync()
        found = int(out.numpy()[0])
        hear(*objects[1], out.partition(1), 0).sync()
    for heap in heaps:
        if heap is not None:
            heap.close()
    return found


@pytest.mark.slow
def test_the_wait_is_for_the_rank_of_its_own_group():
    for _ in range(3):
        assert spawn(ranks, 3) == [None, 42, None]
