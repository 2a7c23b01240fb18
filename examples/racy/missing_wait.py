"""Nobody waits before reading what the peer wrote: a notify alone orders nothing."""

import numpy as np

import peertile as pt
import peertile.language as T

CHECK = {"ranks": 2}


@pt.kernel
def swap(out: T.Peer, ready: T.Signal):
    peer = 1 - out.rank
    out.at(peer).store((0,), T.full((64,), 1.0, T.f32))
    ready.notify()
    out.local.store((1,), out.local.load((0,), (64,)) + 1.0)


@pt.program
def main(group):
    with pt.SymmetricHeap(group, size_bytes=1 << 16) as heap:
        out, ready = heap.zeros((128,), pt.f32), heap.signal(slots=1)
        swap.grid(1)(out, ready).sync()
        print(float(np.sum(out.numpy())))


if __name__ == "__main__":
    pt.run(main)
