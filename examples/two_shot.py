"""Peer tier: a two-shot all-reduce with explicit signals. Every rank sums its share of the tiles from
all ranks and writes the sums to all ranks."""

import numpy as np

import peertile as pt
import peertile.language as T


@pt.kernel
def two_shot(out: T.Peer, x: T.Peer[T.read], ready: T.Signal, B: T.Const[int]):
    me, n = x.rank, x.num_ranks
    tiles = x.local.num_tiles((B,))[0]
    ready.notify()  # this program, to its counterpart on every peer: release, system scope
    ready.wait()  # every source: acquire; epochs count by themselves, one word per source
    for t in T.range(T.program_id(0) * n + me, tiles, T.num_programs(0) * n):  # my share of the tiles
        acc = T.zeros((B,), T.f32)
        for r in T.ranks():  # same order on every rank
            acc += x.at(r).load((t,), (B,))
        for r in T.ranks():
            out.at(r).store((t,), acc.astype(out.dtype))
    ready.notify()  # nobody reuses x or reads out before everybody is here
    ready.wait()


def contribution(rank, n):
    return np.random.default_rng(100 + rank).standard_normal(n).astype(np.float32)


@pt.program
def main(group):
    n = 200_001  # the last tile is partial
    with pt.SymmetricHeap(group, size_bytes=16 << 20) as heap:
        x, out = heap.empty((n,), pt.f32), heap.empty((n,), pt.f32)
        ready = heap.signal()
        x.copy_from(contribution(group.rank, n))
        expected = np.zeros(n, np.float32)
        for rank in range(group.size):
            expected += contribution(rank, n)
        for _ in range(3):
            out.copy_from(np.full(n, np.nan, np.float32))
            group.barrier("outputs are poisoned")
            two_shot.grid(8)(out, x, ready, B=4096).sync()
            assert np.array_equal(out.numpy(), expected), "sums differ"
    if group.rank == 0:
        print(f"two_shot: {n} f32 sums over {group.size} ranks are right, to the bit")


if __name__ == "__main__":
    pt.run(main)
