"""F26: every synchronising call waits: none is an empty body."""

import threading

import pytest
from case_ranks import spawn

import peertile as pt
import peertile.language as T

pytestmark = pytest.mark.any_device


@pt.kernel
def barrier(b: T.Barrier, c: T.Counter, s: T.Signal):
    b.sync()


@pt.kernel
def counter(b: T.Barrier, c: T.Counter, s: T.Signal):
    c.add(1, to=(c.rank + 1) % c.num_ranks)
    c.wait(1)


@pt.kernel
def signal(b: T.Barrier, c: T.Counter, s: T.Signal):
    s.notify()
    s.wait()


@pt.kernel
def all_programs(b: T.Barrier, c: T.Counter, s: T.Signal):
    b.sync_all()


@pt.kernel
def halves(b: T.Barrier, c: T.Counter, s: T.Signal):
    b.arrive()
    b.wait()


def ranks(group, kernel, late, came):
    with pt.SymmetricHeap(group, 1 << 20) as heap:
        b, c, s = heap.barrier(), heap.counter(), heap.signal()
        if group.rank == 1:
            came.wait(20)  # rank 0 is inside by then, or about to be
            late.set()
        else:
            came.set()
        kernel.grid(2)(b, c, s).sync()
        return late.is_set()


@pytest.mark.parametrize("kernel", [barrier, counter, signal, all_programs, halves], ids=lambda k: k.name)
def test_the_first_rank_waits_for_the_late_one(kernel):
    late, came = threading.Event(), threading.Event()
    assert spawn(ranks, 2, kernel, late, came) == [True, True]
