"""Job slots of the cpu driver pass from launch to launch while workers still look at them."""

import numpy as np
import pytest

import peertile as pt
import peertile.language as T

PROGRAMS, TILE = 64, 1024


@pt.kernel
def through_a_mailbox(z: T.Exclusive, x: T.Shared, box: T.Mailbox):
    box.post(x.load_like(z))
    for part in box.collect():
        z.store(part + 1.0)


@pt.kernel
def plain(z: T.Exclusive, x: T.Shared):
    z.store(T.tanh(x.load_like(z)) * 0.0 + x.load_like(z))


@pytest.mark.slow
def test_a_worker_that_ends_a_launch_takes_up_one_of_another_kind_in_the_same_slot():
    """A worker that ended the last program of a waiting launch claimed a chunk of the plain launch that had its slot
    next, and ran it as a waiting one; and the other way round."""
    n = PROGRAMS * TILE
    x, y, z = (pt.asarray(np.zeros(n, np.float32)) for _ in range(3))
    stream = pt.current_device().stream("slots")
    group = pt.init()
    with pt.SymmetricHeap(group, size_bytes=4 << 20) as heap:
        box = heap.mailbox(tile=TILE, dtype=pt.f32, programs=PROGRAMS)
        steps = []
        for _ in range(40):
            steps += [
                plain(y.partition(TILE), x),
                through_a_mailbox(z.partition(TILE), y, box),
                plain(x.partition(TILE), z),
            ]
        graph = pt.zip(*steps).graph_on(stream)
        for _ in range(50):
            graph.launch().sync_on(stream)
        assert np.array_equal(x.numpy(), np.full(n, 40 * 50, np.float32))
