"""Safe communication: an all-reduce through a mailbox, without a fence in sight."""

import numpy as np

import peertile as pt
import peertile.language as T

CHECK = {"n": 40_000}


@pt.kernel
def all_reduce(out: T.Exclusive, x: T.Shared, box: T.Mailbox):
    for tile in out.tiles():
        box.post(x.load_like(tile))  # to every rank; the slot is theirs to read now
        acc = T.zeros(tile.tile_shape, T.f32)
        for part in box.collect():  # rank 0 … n-1, each once it has arrived: the same sum everywhere
            acc += part
        tile.store(acc.astype(out.dtype))  # the slots went back at their last use


def contribution(rank, n):
    return np.random.default_rng(rank).standard_normal(n).astype(np.float32)


@pt.program
def main(group, n=1 << 18):
    with pt.SymmetricHeap(group, size_bytes=64 << 20) as heap:
        box = heap.mailbox(tile=4096, dtype=pt.bf16, programs=16, depth=2)
        x = pt.asarray(contribution(group.rank, n), dtype=pt.bf16)
        y = pt.full(x.shape, float("nan"), x.dtype)
        for _ in range(3):  # epochs live in the heap: the same mailbox serves any number of launches
            all_reduce(y.partition(4096).persistent(programs=16), x, box).sync()
        got = y.numpy()
        everyone = [contribution(r, n).astype(x.dtype.numpy).astype(np.float32) for r in range(group.size)]
        expected = np.zeros(n, np.float32)
        for part in everyone:
            expected += part
        assert np.array_equal(got, expected.astype(x.dtype.numpy)), "sums differ"
        digests = group.exchange(got.tobytes()[:4096], "compare sums")
        assert all(d == digests[0] for d in digests), "ranks differ"
    if group.rank == 0:
        print(f"all_reduce: {n} bf16 sums over {group.size} ranks are right, to the bit on every rank")


if __name__ == "__main__":
    pt.run(main)
