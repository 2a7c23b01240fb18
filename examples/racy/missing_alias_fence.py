"""What one address wrote is read by the multicast one without an alias fence. `peertile check` shows the race."""

import numpy as np

import peertile as pt
import peertile.language as T

CHECK = {"ranks": 2}


@pt.kernel(unsafe=True)
def send(x: T.Multicast, own: T.Peer, flag: T.Peer, out: T.Peer):
    if x.rank == 0:
        own.local.store((0,), T.full((64,), 1.0, T.f32))
        T.st(flag, 1, (0,), rank=1, order=T.release)
    else:
        T.wait_ge(flag, 1, (0,), order=T.acquire)
        out.local.store((0,), x.partition((64,)).multimem_load_reduce((0,), T.add))


@pt.program
def main(group):
    with pt.SymmetricHeap(group, size_bytes=1 << 16) as heap:
        x, flag = heap.multicast((64,), pt.f32), heap.zeros((1,), pt.u64)
        out = heap.zeros((64,), pt.f32)
        x.copy_from(np.zeros(64, np.float32))
        group.barrier("x is zero everywhere")
        send.grid(1)(x, x, flag, out).sync()
        if group.rank == 1:
            assert np.array_equal(out.numpy(), np.ones(64, np.float32))
        group.barrier("nobody leaves early")


if __name__ == "__main__":
    pt.run(main)
