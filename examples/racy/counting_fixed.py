"""The repaired twin of counting.py: it waits for both."""

import numpy as np

import peertile as pt
import peertile.language as T

CHECK = {"ranks": 3}


@pt.kernel
def collect(x: T.Peer, out: T.Exclusive, arrived: T.Counter):
    if x.rank > 0:
        x.at(0).store((x.rank - 1,), T.full((64,), 1.0, T.f32))
        arrived.add(1, to=0)
    else:
        arrived.wait(2)
        out.store(x.local.load((0,), (64,)) + x.local.load((1,), (64,)))


@pt.program
def main(group):
    with pt.SymmetricHeap(group, size_bytes=1 << 16) as heap:
        x, arrived = heap.zeros((128,), pt.f32), heap.counter(slots=1)
        out = pt.zeros((64,), pt.f32)
        collect(x, out.partition(64), arrived).sync()
        print(float(np.sum(out.numpy())))


if __name__ == "__main__":
    pt.run(main)
