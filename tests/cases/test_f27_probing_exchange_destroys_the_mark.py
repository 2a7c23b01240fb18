"""F27: who probes a word by an exchange overwrites the mark it waits for; a compare-and-swap does not."""

import pytest
from case_ranks import alone

import peertile as pt
import peertile.language as T
from peertile.errors import KernelAssert

pytestmark = pytest.mark.any_device


@pt.kernel(unsafe=True)
def by_exchange(word: T.Pointer, LIMIT: T.Const[int] = 1000):
    old, t = T.unsafe.atomic_rmw(word, T.Rmw.XCHG, T.i32(1), order=T.acq_rel, scope=T.device)
    if old == 0:
        T.unsafe.atomic_rmw(word, T.Rmw.XCHG, T.i32(2), order=T.acq_rel, scope=T.device, token=t)
    else:
        seen = T.i32(0)
        for _ in T.range(LIMIT):
            seen, t = T.unsafe.atomic_rmw(word, T.Rmw.XCHG, T.i32(3), order=T.acq_rel, scope=T.device, token=t)
            if seen == 2:
                break
        T.assert_(seen == 2, "the mark is gone: the waiter has overwritten the word it waits for")


@pt.kernel(unsafe=True)
def by_swap(word: T.Pointer, LIMIT: T.Const[int] = 1000):
    old, t = T.unsafe.atomic_cas(word, T.i32(0), T.i32(1), order=T.acq_rel, scope=T.device)
    if old == 0:
        T.unsafe.atomic_rmw(word, T.Rmw.XCHG, T.i32(2), order=T.acq_rel, scope=T.device, token=t)
    else:
        seen = T.i32(0)
        for _ in T.range(LIMIT):
            seen, t = T.unsafe.load_ptr(word, order=T.acquire, scope=T.device, token=t)
            if seen == 2:
                break
        T.assert_(seen == 2, "the mark is gone")


@pytest.mark.native_only
def test_the_second_one_to_come_never_finds_the_mark():
    with alone():
        word = pt.zeros((1,), pt.i32)
        by_exchange.grid(1)(word.pointer()).sync()
        with pytest.raises(KernelAssert, match="the waiter has overwritten the word it waits for"):
            by_exchange.grid(1)(word.pointer()).sync()


def test_compare_and_swap_leaves_it():
    word = pt.zeros((1,), pt.i32)
    by_swap.grid(1)(word.pointer()).sync()
    by_swap.grid(1)(word.pointer()).sync()
    assert word.numpy().tolist() == [2]
