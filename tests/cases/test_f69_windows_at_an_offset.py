"""F69: a put into a window that begins inside its allocation lands at its own place, by every way of putting."""

import numpy as np
import pytest
from case_ranks import spawn

import peertile as pt
import peertile.language as T

pytestmark = pytest.mark.any_device


@pt.kernel
def by_tile(x: T.Peer, v: T.Shared, s: T.Signal):
    if x.rank == 0:
        T.put(v.load((0,), (16,)), x.at(1).slice((2048,), (2048,)), (1,))
        s.notify(to=1)
    else:
        s.wait(0)


@pt.kernel
def by_view(x: T.Peer, v: T.Shared, s: T.Signal):
    if x.rank == 0:
        T.put(v, x.at(1).slice((2048,), (2048,)).slice((16,), (16,)), signal=s)
    else:
        s.wait(0)


@pt.kernel
def by_words(x: T.Peer, v: T.Shared, s: T.Signal):
    if x.rank == 0:
        window = x.at(1).slice((2048,), (2048,))
        for k in T.range(16):
            T.st(window, T.sum(v.load((k,), (1,)), axis=0).astype(T.u8), (16 + k,))
        s.notify(to=1)
    else:
        s.wait(0)


def ranks(group, kernel):
    with pt.SymmetricHeap(group, 1 << 20) as heap:
        heap.empty((100,), pt.u8)  # the allocation itself does not begin at 0 either
        x, s = heap.zeros((4096,), pt.u8), heap.signal(slots=1)
        kernel.grid(1)(x, pt.asarray(np.arange(1, 17), pt.u8), s).sync()
        group.barrier("done")
        return x.numpy()


@pytest.mark.parametrize("kernel", [by_tile, by_view, by_words], ids=lambda k: k.name)
def test_the_bytes_are_at_2064_and_nowhere_else(kernel):
    expected = np.zeros(4096, np.uint8)
    expected[2064:2080] = np.arange(1, 17)
    np.testing.assert_array_equal(spawn(ranks, 2, kernel)[1], expected)
