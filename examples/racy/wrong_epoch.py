"""The reader waits for one notify of two and reads what only the second one publishes. It looks right whenever the
writer is ahead: the race is reported on every schedule all the same."""

import numpy as np

import peertile as pt
import peertile.language as T

CHECK = {"ranks": 2}


@pt.kernel
def stages(x: T.Peer, total: T.Exclusive, ready: T.Signal):
    if x.rank == 0:
        x.at(1).store((0,), T.full((64,), 1.0, T.f32))
        ready.notify()
        x.at(1).store((1,), T.full((64,), 2.0, T.f32))
        ready.notify()
    else:
        ready.wait()
        total.store(x.local.load((0,), (64,)) + x.local.load((1,), (64,)))


@pt.program
def main(group):
    with pt.SymmetricHeap(group, size_bytes=1 << 16) as heap:
        x, ready = heap.zeros((128,), pt.f32), heap.signal(slots=1)
        total = pt.zeros((64,), pt.f32)
        stages(x, total.partition(64), ready).sync()
        if group.rank == 1:
            print(float(np.sum(total.numpy())))


if __name__ == "__main__":
    pt.run(main)
