"""The reader polls the flag with order relaxed: seeing it orders nothing. `peertile check` shows the race."""

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
        T.wait_ge(flag, 1, (0,), order=T.relaxed)
        x.local.store((1,), x.local.load((0,), (64,)) * 2.0)


@pt.program
def main(group):
    with pt.SymmetricHeap(group, size_bytes=1 << 16) as heap:
        x, flag = heap.zeros((128,), pt.f32), heap.zeros((1,), pt.u64)
        send.grid(1)(x, flag).sync()
        if group.rank == 1:
            assert np.array_equal(x.numpy()[64:], np.full(64, 2.0, np.float32))


if __name__ == "__main__":
    pt.run(main)
