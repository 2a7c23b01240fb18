"""A flag is cleared on a stream and the hosts meet, but nobody waits for the stream: the fill may wipe out the peer's
signal."""

import numpy as np

import peertile as pt
import peertile.language as T

CHECK = {"ranks": 2}


@pt.kernel
def send(x: T.Peer, flag: T.Peer):
    if x.rank == 0:
        x.at(1).store((0,), T.full((64,), 1.0, T.f32))
        T.st(flag, 1, (0,), rank=1, order=T.release)
    else:
        T.wait_ge(flag, 1, (0,))


@pt.program
def main(group):
    stream = pt.current_device().stream("work")
    with pt.SymmetricHeap(group, size_bytes=1 << 16) as heap:
        x, flag = heap.zeros((64,), pt.f32), heap.empty((1,), pt.u64)
        pt.op.fill(flag.local, 0).submit(stream)
        group.barrier("cleared")
        send.grid(1)(x, flag).sync_on(stream)
        group.barrier("sent")
        print(float(np.sum(x.numpy())))


if __name__ == "__main__":
    pt.run(main)
