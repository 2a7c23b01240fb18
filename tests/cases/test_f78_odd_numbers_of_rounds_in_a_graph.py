"""A graph with an odd number of rounds over two staging slots: which slot a round uses is counted on the device, not
frozen when it was captured, so replays and eager launches mix."""

import numpy as np
import pytest
from host_cases import device

import peertile as pt
import peertile.language as T

pytestmark = pytest.mark.any_device


@pt.kernel
def round_trip(z: T.Exclusive, box: T.Mailbox):
    box.post(z.load() + 1)
    total = T.zeros(z.tile_shape, z.dtype)
    for part in box.collect():
        total += part
    z.store(total)


@pytest.mark.feature("H12", "cpu")
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_rounds_count_on_from_replay_to_replay(rounds):
    stream = device().stream()
    with pt.SymmetricHeap(pt.init(), size_bytes=1 << 20) as heap:
        box = heap.mailbox(tile=8, dtype=pt.f32, programs=2, depth=2)
        z = pt.zeros(16, pt.f32)
        with pt.capture(stream) as scope:
            for _ in range(rounds):
                scope.record(round_trip(z.partition(8), box))
        for _ in range(4):
            scope.graph.launch().sync_on(stream)
        round_trip(z.partition(8), box).sync()
        np.testing.assert_array_equal(z.numpy(), np.full(16, 4 * rounds + 1))
        del scope
