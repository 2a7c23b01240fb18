"""The repaired twin of early_reuse.py: nobody goes on before everybody has read."""

import numpy as np

import peertile as pt
import peertile.language as T

CHECK = {"ranks": 2}


@pt.kernel
def gather(out: T.Exclusive, x: T.Peer[T.read], ready: T.Signal):
    ready.notify()
    ready.wait()
    acc = T.zeros((64,), T.f32)
    for r in T.ranks():
        acc += x.at(r).load((0,), (64,))
    out.store(acc)
    ready.notify()
    ready.wait()


@pt.program
def main(group):
    with pt.SymmetricHeap(group, size_bytes=1 << 16) as heap:
        x, ready = heap.zeros((64,), pt.f32), heap.signal(slots=1)
        out = pt.empty((64,), pt.f32)
        for step in range(2):
            x.copy_from(np.full(64, step + group.rank, np.float32))
            gather(out.partition(64), x, ready).sync()
        print(float(out.numpy()[0]))


if __name__ == "__main__":
    pt.run(main)
