"""Ranks that record different numbers of shared buffers: their tables would no longer name the same ones.

A buffer that peers reach exists on every rank or on none, so the number is compared where it arises, at its
allocation, and never by pairing addresses afterwards. How many operations a rank records is its own affair.
"""

import re

import numpy as np
import pytest
from case_ranks import spawn, told

import peertile as pt
import peertile.language as T

pytestmark = pytest.mark.any_device


@pt.kernel
def gather(z: T.Exclusive, x: T.Peer, done: T.Signal):
    done.notify()
    done.wait()
    total = T.zeros(z.tile_shape, z.dtype)
    for rank in T.ranks():
        total += x.at(rank).load((0,), z.tile_shape)
    z.store(total)
    done.notify()
    done.wait()  # the next replay fills what the others read here


def program(group, together, replays=2):
    """Record one or two buffers as a graph, replay it, and give back what was gathered."""
    with pt.SymmetricHeap(group, 1 << 16) as heap:
        stream = pt.current_device().stream("recorded")
        seen = heap.signal(slots=1)
        z = pt.zeros(8, pt.f32)
        buffers = [heap.empty((8,), pt.f32)]
        with pt.capture(stream) as scope:
            if together or group.rank == 0:
                buffers.append(heap.empty((8,), pt.f32))
            for k, buffer in enumerate(buffers[: 2 - group.rank]):  # rank 1 records fewer of its own
                scope.record(pt.op.fill(buffer.local, 10 * k + group.rank + 1))
            scope.record(gather(z.partition(8), buffers[0], seen))
        group.barrier("everything is recorded")
        for _ in range(replays):
            scope.graph.launch().sync_on(stream)
        found = z.numpy()
        group.barrier("everybody has read")
        del scope
        return found


def rank(group, together):
    try:
        return program(group, together)
    except pt.PeertileError as error:
        return told(error)


@pytest.mark.feature("H12", "cpu")
def test_the_ranks_are_told_where_they_differ() -> None:
    text = (
        "ranks disagree about a collective call of the world group: rank 0: agree(SymmetricHeap allocation); rank 1: "
        "barrier(everything is recorded). Every rank must make the same calls with the same arguments in the same "
        "order"
    )
    # Which call of the group it was depends on how its heap is made, on which this test does not lean.
    ranks = [
        (kind, re.sub(r"collective call \d+ of", "a collective call of", said)) for kind, said in spawn(rank, 2, False)
    ]
    assert ("SymmetryError", text) in ranks
    assert set(ranks) <= {("SymmetryError", text), ("PeerFailed", f"rank 0 failed: SymmetryError: {text}")} | {
        ("PeerFailed", f"rank 1 failed: SymmetryError: {text}")
    }


@pytest.mark.feature("H12", "cpu")
def test_as_many_buffers_on_every_rank_are_clean_however_much_each_records() -> None:
    for found in spawn(rank, 2, True):
        np.testing.assert_array_equal(found, np.full(8, 3, np.float32))
