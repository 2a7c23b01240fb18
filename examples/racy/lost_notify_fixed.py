"""The repaired twin of lost_notify.py."""

import numpy as np

import peertile as pt
import peertile.language as T

CHECK = {"ranks": 2}


@pt.kernel
def meet(out: T.Exclusive, x: T.Peer[T.read], ready: T.Signal):
    if x.rank < 2:
        ready.notify()
    ready.wait()
    out.store(x.at(1 - x.rank).load((0,), (64,)))


@pt.program
def main(group):
    with pt.SymmetricHeap(group, size_bytes=1 << 16) as heap:
        x, ready = heap.zeros((64,), pt.f32), heap.signal(slots=1)
        out = pt.empty((64,), pt.f32)
        meet(out.partition(64), x, ready).sync()
        print(float(np.sum(out.numpy())))


if __name__ == "__main__":
    pt.run(main)
