"""F25: a barrier made where a tensor used to be works, since its words are cleared on all ranks first."""

from case_ranks import spawn

import peertile as pt
import peertile.language as T


@pt.kernel
def meet(b: T.Barrier):
    for _ in T.range(3):
        b.sync()


def ranks(group):
    offsets = []
    with pt.SymmetricHeap(group, 1 << 18) as heap:
        for size in (1000, 400, 8000):
            a = heap.empty((size,), pt.u8)
            a.copy_from([255] * size)
            group.barrier("filled")
            offsets.append(a.offset)
            heap.free(a)
            b = heap.barrier(programs=4)
            offsets.append(heap._offset(b.storages[0]))
            meet.grid(4)(b).sync()
            heap.free(b)
    return offsets


def test_a_barrier_on_dirty_bytes():
    for offsets in spawn(ranks, 3):
        assert offsets[::2] == offsets[1::2]  # the same place was given again
