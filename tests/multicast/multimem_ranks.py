"""What each rank of the tests of multicast collectives runs. No pytest."""

import numpy as np
from multicast_ranks import combined, values

import peertile as pt
import peertile.language as T
from peertile.library.collectives import Collectives
from peertile.library.multimem import MulticastCollectives
from peertile.library.reductions import ReduceOp
from peertile.library.selection import Algorithm


def everything(rank, name, share, seed):
    """Each collective with fresh values; the bits of all that has to be equal on every rank."""
    group = pt.init()
    dtype, n = getattr(pt, name), group.size
    count = share * n
    bits = b""
    with pt.SymmetricHeap(group, 1 << 22) as heap:
        c = MulticastCollectives(heap, programs=3)
        x, words = heap.multicast((count,), dtype), heap.multicast((4,), pt.u64)
        words.copy_from(np.zeros(4, np.uint64))
        for turn in range(3):
            parts = [values(dtype, r, seed + turn, count) for r in range(n)]
            total = combined(T.add, parts, dtype)
            x.copy_from(parts[group.rank])
            group.barrier()
            c.all_reduce(x).sync()
            np.testing.assert_array_equal(x.numpy(), total)
            bits += x.numpy().tobytes()
            x.copy_from(parts[group.rank])
            out = pt.empty((share,), dtype)
            group.barrier()
            c.reduce_scatter(out, x).sync()
            np.testing.assert_array_equal(out.numpy(), total[group.rank * share : (group.rank + 1) * share])
            group.barrier()
            mine = pt.asarray(parts[group.rank][:share])
            c.all_gather(x, mine).sync()
            np.testing.assert_array_equal(x.numpy(), np.concatenate([p[:share] for p in parts]))
            bits += x.numpy().tobytes()
            c.signal(words, group.rank + 1, index=1, add=True).sync()
            group.barrier()
            assert words.numpy()[1] == (turn + 1) * n * (n + 1) // 2
            group.barrier()
    return bits


def extrema(rank, name, op, seed):
    group = pt.init()
    dtype = getattr(pt, name)
    rmw = T.Rmw.MIN if op is ReduceOp.MIN else T.Rmw.MAX
    with pt.SymmetricHeap(group, 1 << 20) as heap:
        c = MulticastCollectives(heap)
        x = heap.multicast((256,), dtype)
        x.copy_from(values(dtype, group.rank, seed, 256))
        group.barrier()
        c.all_reduce(x, op).sync()
        expected = combined(rmw, [values(dtype, r, seed, 256) for r in range(group.size)], dtype)
        np.testing.assert_array_equal(x.numpy(), expected)
    return True


def closed_communicators(group):
    """What a communicator leaves in the heap of a multicast tensor that it has reduced, if it has a heap of its own,
    shares that heap, or the group has failed before it is closed."""
    with pt.SymmetricHeap(group, 1 << 29) as heap:
        x = heap.multicast((64,), pt.f32)
        x.copy_from(np.ones(64, np.float32))
        group.barrier("written")
        before, kept = heap._arena.in_use, []
        for where in (group, heap, group):
            comm = Collectives(where, programs=1, slot_bytes=8192)
            comm.all_reduce(x, x, algorithm=Algorithm.MULTIMEM).sync()
            if len(kept) == 2:
                group.barrier("all are done")
                group.fail("a test")
                comm.close()
                group.recover(timeout_s=20)
            comm.close()
            kept.append(heap._arena.in_use - before)
    return kept
