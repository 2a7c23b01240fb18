"""F74: heaps and graphs that come and go leave no mapping, no descriptor and no byte behind."""

import gc
import os
from pathlib import Path

import pytest
from case_ranks import spawn

import peertile as pt
from peertile.library.collectives import Collectives


def counts():
    maps = Path("/proc/self/maps").read_text()
    return sum("peertile" in line for line in maps.splitlines()), len(os.listdir("/proc/self/fd"))


def counted(group, cycle, times):
    """What is held before and after. Rank 0 looks alone, while no other rank is in the middle of something, as looking
    takes a descriptor too."""
    found = []
    for more in (1, times):
        for _ in range(more):
            cycle()
        group.barrier("alone")
        if group.rank == 0:
            gc.collect()
            found.append((counts(), pt.current_device().memory().in_use))
        group.barrier("counted")
    return found


def ranks(group):
    def cycle():
        with pt.SymmetricHeap(group, 1 << 18) as heap:
            heap.zeros((16,), pt.f32)
            heap.mailbox(tile=16, dtype=pt.f32, programs=1)

    return counted(group, cycle, 30)


def test_thirty_heaps_later_nothing_is_left():
    before, after = spawn(ranks, 2)[0]
    assert after == before


def graphs(group):
    with Collectives(group, programs=1, slot_bytes=4096) as comm:
        stream = pt.current_device().stream("graphs")

        def cycle():
            x = pt.full((8,), 1.0, pt.f32)
            graph = comm.all_reduce(x).graph_on(stream)
            graph.launch().sync_on(stream)
            assert graph.take_output().numpy().tolist() == [2.0] * 8

        return counted(group, cycle, 40)


@pytest.mark.slow
def test_forty_graphs_of_a_collective_later_nothing_is_left():
    before, after = spawn(graphs, 2)[0]
    assert after == before
