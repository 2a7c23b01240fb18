"""Each rank writes five words into a peer's tensor that has room for four of each: the last one is outside."""

import numpy as np

import peertile as pt
import peertile.language as T

CHECK = {"ranks": 2}


@pt.kernel
def scatter(x: T.Peer, rows: T.i64):
    peer = 1 - x.rank
    for k in T.range(rows):
        T.st(x, k, (x.rank * 4 + k,), rank=peer, order=T.relaxed)


@pt.program
def main(group):
    with pt.SymmetricHeap(group, size_bytes=1 << 16) as heap:
        x = heap.zeros((8,), pt.i64)
        scatter.grid(1)(x, 5).sync()
        group.barrier("written")
        print(int(np.sum(x.numpy())))


if __name__ == "__main__":
    pt.run(main)
