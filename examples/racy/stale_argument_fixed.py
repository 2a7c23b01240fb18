"""The repaired twin of stale_argument.py: a signal counts its rounds in device memory, over launches and replays."""

import numpy as np

import peertile as pt
import peertile.language as T

CHECK = {"ranks": 2}


@pt.kernel
def swap(out: T.Exclusive, x: T.Peer, source: T.Shared, ready: T.Signal):
    x.local.store((0,), source.load((0,), (64,)))
    ready.notify()
    ready.wait()
    out.store(x.at(1 - x.rank).load((0,), (64,)))
    ready.notify()
    ready.wait()


@pt.program
def main(group):
    stream = pt.current_device().stream("graph")
    with pt.SymmetricHeap(group, size_bytes=1 << 16) as heap:
        x, ready = heap.zeros((64,), pt.f32), heap.signal(slots=1)
        source, out = pt.zeros((64,), pt.f32), pt.zeros((64,), pt.f32)
        graph = swap(out.partition(64), x, source, ready).graph_on(stream)
        for replay in range(2):
            pt.op.copy(np.full(64, 10.0 * replay + group.rank, np.float32), to=source).sync_on(stream)
            graph.launch().sync_on(stream)
        print(float(out.numpy()[0]))


if __name__ == "__main__":
    pt.run(main)
