"""F15: words of signals, counters, barriers and mailboxes are zero on every rank before anybody can use them."""

import pytest
from case_ranks import spawn

import peertile as pt
import peertile.language as T

pytestmark = pytest.mark.any_device


@pt.kernel
def at_once(s: T.Signal, c: T.Counter, b: T.Barrier, x: T.Peer):
    s.notify()
    for r in T.ranks():
        c.add(1, to=r)
    s.wait()
    c.wait(x.num_ranks)
    b.sync()


def ranks(group):
    """Dirty bytes are freed, and given again as words that are used without any rendezvous of the program's own."""
    with pt.SymmetricHeap(group, 1 << 18) as heap:
        for _ in range(20):
            dirty = heap.empty((20_000,), pt.u64)
            dirty.copy_from([2**64 - 1] * 20_000)
            group.barrier("dirty")
            heap.free(dirty)
            s, c, b = heap.signal(slots=8), heap.counter(slots=8), heap.barrier(programs=8)
            x = heap.empty((1,), pt.i64)
            at_once.grid(8)(s, c, b, x).sync()
            for item in (s, c, b, x):
                heap.free(item)
    return True


@pytest.mark.sentence("MB-13")
def test_words_made_of_dirty_memory_work_at_once():
    assert all(spawn(ranks, 3))
