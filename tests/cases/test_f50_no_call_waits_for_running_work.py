"""While a kernel waits for a word, the host makes streams, allocates, frees and launches, on cpu also compiles and loads
(CUDA loads code when it likes): nothing of that waits for the kernel, so the launch that ends the wait is reached."""

import pytest
from host_cases import device

import peertile as pt
import peertile.language as T

pytestmark = pytest.mark.any_device


@pt.kernel
def wait_for_word(out: T.Exclusive, word: T.Peer[T.read]):
    T.wait_eq(word.local, T.i32(1), index=(0,))
    out.store(T.full((1,), 1, T.i32))


@pt.kernel
def set_word(word: T.Peer):
    T.st(word.local, T.i32(1), index=(0,), order=T.release)


def test_nothing_that_the_host_does_waits_for_a_kernel_that_spins():
    with pt.SymmetricHeap(pt.init(), size_bytes=1 << 20) as heap:
        word, out = heap.zeros((1,), pt.i32), pt.zeros(1, pt.i32)
        if device().target is not None:
            set_word.grid(1)(heap.zeros((1,), pt.i32)).sync()
        future = wait_for_word(out.partition(1), word).submit(device().stream())
        other = device().stream()
        big = [pt.empty(1 << 20, pt.f32) for _ in range(8)]
        del big
        event = other.record()
        event.sync(20)
        assert not future.is_done()
        set_word.grid(1)(word).sync_on(other)  # on cpu compiled and loaded now
        future.wait(20)
        assert out.numpy().tolist() == [1]
