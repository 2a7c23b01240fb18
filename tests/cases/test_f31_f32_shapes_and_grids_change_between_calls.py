"""F31, F32: rounds of one mailbox pair up whatever the size of the data and the grid of each call are."""

import numpy as np
from case_ranks import spawn

import peertile as pt
import peertile.language as T


@pt.kernel
def total(out: T.Exclusive, x: T.Shared, box: T.Mailbox):
    for tile in out.tiles():
        box.post(x.load_like(tile))
        acc = T.zeros(tile.tile_shape, out.dtype)
        for part in box.collect():
            acc += part
        tile.store(acc)


def ranks(group, calls):
    with pt.SymmetricHeap(group, 1 << 20) as heap:
        box = heap.mailbox(tile=64, dtype=pt.i64, programs=8)
        for n, programs in calls:
            x, out = pt.asarray(np.arange(n) + group.rank), pt.zeros((n,), pt.i64)
            total(out.partition(64).persistent(programs=programs), x, box).sync()
            expected = sum(np.arange(n) + r for r in range(group.size))
            np.testing.assert_array_equal(out.numpy(), expected)
    return True


def test_f31_a_smaller_call_after_a_larger_one():
    assert all(spawn(ranks, 4, [(4096, 8), (1024, 8), (4096, 8), (1, 8), (4096, 8)]))


def test_f32_the_grid_changes_from_call_to_call():
    assert all(spawn(ranks, 2, [(128, 2), (128, 1), (128, 2), (640, 5), (640, 1), (640, 8)] * 3))
