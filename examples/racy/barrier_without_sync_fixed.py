"""The repaired twin of barrier_without_sync.py: the kernel has ended before the hosts meet."""

import numpy as np

import peertile as pt
import peertile.language as T

CHECK = {"ranks": 2}


@pt.kernel
def fill(out: T.Exclusive):
    out.store(T.full((64,), 1.0, T.f32))


@pt.kernel
def fetch(out: T.Exclusive, x: T.Peer[T.read]):
    out.store(x.at(1 - x.rank).load((0,), (64,)))


@pt.program
def main(group):
    with pt.SymmetricHeap(group, size_bytes=1 << 16) as heap:
        x = heap.zeros((64,), pt.f32)
        out = pt.empty((64,), pt.f32)
        running = fill(x.partition(64)).submit()
        running.wait()
        group.barrier("filled")
        fetch(out.partition(64), x).sync()
        running.wait()
        assert np.array_equal(out.numpy(), np.ones(64, np.float32))
        group.barrier("read")


if __name__ == "__main__":
    pt.run(main)
