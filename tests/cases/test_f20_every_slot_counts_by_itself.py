"""F20: with another signal slot in every turn, each wait is for the first epoch of its own slot, not for a parity."""

import numpy as np
from case_ranks import spawn

import peertile as pt
import peertile.language as T


@pt.kernel
def one_slot_each(x: T.Peer, s: T.Signal, out: T.Exclusive):
    for k in T.range(4):
        if x.rank == 0:
            T.put(T.full((1, 16), k + 5, T.i64), x, (k, 0), rank=1)
            s[k].notify(to=1)
        else:
            s[k].wait(0)
            tile = x.local.load((k, 0), (1, 16))
            T.assert_(T.min(T.min(tile, axis=1), axis=0) == k + 5, "the slot of this turn had not come")
    out.store(x.local.load((0, 0), (4, 16)))


def ranks(group):
    with pt.SymmetricHeap(group, 1 << 20) as heap:
        for _ in range(10):
            x, s = heap.zeros((4, 16), pt.i64), heap.signal(slots=4)
            out = pt.zeros((4, 16), pt.i64)
            one_slot_each(x, s, out.partition((4, 16))).sync()
            group.barrier("done")
            heap.free(x)
    return out.numpy()


def test_fresh_slots_wait_for_their_first_epoch():
    np.testing.assert_array_equal(spawn(ranks, 2)[1], np.arange(4)[:, None] + np.full((4, 16), 5))
