"""F76: two groups of different members each have memory of their own, also when their calls interleave."""

import numpy as np
from case_ranks import spawn

import peertile as pt
import peertile.language as T


@pt.kernel
def total(out: T.Exclusive, x: T.Shared, box: T.Mailbox):
    box.post(x.load_like(out))
    acc = T.zeros(out.tile_shape, out.dtype)
    for part in box.collect():
        acc += part
    out.store(acc)


def ranks(group):
    evens = group.subgroup((0, 2))
    groups = [g for g in (group, evens) if g is not None]
    heaps = [pt.SymmetricHeap(g, 1 << 18) for g in groups]
    boxes = [h.mailbox(tile=64, dtype=pt.i64, programs=2) for h in heaps]
    x = pt.asarray(np.full(128, 1 + group.rank))
    for turn in range(10):
        for g, box in zip(groups, boxes, strict=True):
            if turn % 3 or g is group:
                out = pt.zeros((128,), pt.i64)
                total(out.partition(64), x, box).sync()
                members = range(group.size) if g is group else (0, 2)
                assert set(out.numpy().tolist()) == {sum(1 + r for r in members)}
    for heap in reversed(heaps):
        heap.close()
    return True


def test_interleaved_sums_are_right_for_both():
    assert all(spawn(ranks, 4))
