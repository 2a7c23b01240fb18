"""F74: heaps that come and go leave no mapping and no descriptor behind."""

import os
from pathlib import Path

from case_ranks import spawn

import peertile as pt


def counts():
    maps = Path("/proc/self/maps").read_text()
    return sum("peertile" in line for line in maps.splitlines()), len(os.listdir("/proc/self/fd"))


def ranks(group):
    """Alone at the ends of the count, so that no other rank is in the middle of something."""

    def cycle():
        with pt.SymmetricHeap(group, 1 << 18) as heap:
            heap.zeros((16,), pt.f32)
            heap.mailbox(tile=16, dtype=pt.f32, programs=1)

    cycle()
    group.barrier("first")
    before = counts() if group.rank == 0 else None  # one at a time: looking takes a descriptor too
    group.barrier("counted")
    for _ in range(30):
        cycle()
    group.barrier("last")
    after = counts() if group.rank == 0 else None
    group.barrier("counted again")
    return before, after


def test_thirty_heaps_later_nothing_is_left():
    for before, after in spawn(ranks, 2):
        assert after == before
