"""The round of an exchange is a number that the host passes: a graph bakes it in, and in the second replay the wait is
satisfied by what the first one wrote."""

import numpy as np

import peertile as pt
import peertile.language as T

CHECK = {"ranks": 2}


@pt.kernel
def swap(out: T.Exclusive, x: T.Peer, source: T.Shared, flag: T.Peer, colour: T.i64):
    x.local.store((0,), source.load((0,), (64,)))
    T.st(flag, colour, (0,), rank=1 - x.rank, order=T.release)
    T.wait_ge(flag, colour, (0,))
    out.store(x.at(1 - x.rank).load((0,), (64,)))


@pt.program
def main(group):
    stream = pt.current_device().stream("graph")
    with pt.SymmetricHeap(group, size_bytes=1 << 16) as heap:
        x, flag = heap.zeros((64,), pt.f32), heap.zeros((1,), pt.i64)
        source, out = pt.zeros((64,), pt.f32), pt.zeros((64,), pt.f32)
        graph = swap(out.partition(64), x, source, flag, 1).graph_on(stream)
        for replay in range(2):
            pt.op.copy(np.full(64, 10.0 * replay + group.rank, np.float32), to=source).sync_on(stream)
            graph.launch().sync_on(stream)
        print(float(out.numpy()[0]))


if __name__ == "__main__":
    pt.run(main)
