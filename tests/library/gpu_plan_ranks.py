"""Rank functions of the tests of the collectives for GPUs. No pytest here: every rank imports this."""

import ml_dtypes
import numpy as np
from library_ranks import room

import peertile as pt
from peertile.errors import DeviceFault, PeerFailed
from peertile.library.collectives import Collectives
from peertile.library.cuda_collectives import Family, GpuPlans, Shape, heap_bytes
from peertile.library.reductions import ReduceOp
from peertile.library.selection import Algorithm

SHAPES = [
    Shape(Algorithm.FLAGGED, 8, 64), Shape(Algorithm.FLAGGED, 3, 256),
    Shape(Algorithm.PUSHED, 8, 64), Shape(Algorithm.PUSHED, 3, 512),
]  # fmt: skip
FILLED = [Shape(Algorithm.FILLED, 8, 32), Shape(Algorithm.FILLED, 3, 128)]


def integers(rank, count, seed):
    """Values whose sums are exact in bf16 too."""
    return np.random.default_rng((seed, rank)).integers(-30, 30, count).astype(np.float32)


def everything(group, dtype_name, counts, seed):
    """Every collective in every shape, in turn on one set of channels: a mix-up of turns would show."""
    dtype, n, me = getattr(pt, dtype_name), group.size, group.rank
    with pt.SymmetricHeap(group, size_bytes=heap_bytes(n, 8) + (1 << 20)) as heap:
        plans = GpuPlans(heap, 8)
        for count in counts:
            every = [integers(r, count * n, seed) for r in range(n)]
            rows = [e.reshape(n, count) for e in every]
            if dtype.is_float and count * dtype.itemsize % 8 == 0:
                for shape in FILLED:
                    x, out = pt.asarray(rows[me][0], dtype), pt.full((count,), 77, dtype)
                    plans.all_reduce(shape, x, out, ReduceOp.SUM).sync()
                    same(out, sum(r[0] for r in rows))
                    plans.all_reduce(shape, None, x, ReduceOp.MAX).sync()
                    same(x, np.max([r[0] for r in rows], axis=0))
            for shape in SHAPES:
                x, out = pt.asarray(rows[me][0], dtype), pt.full((count,), 77, dtype)
                plans.all_reduce(shape, x, out, ReduceOp.SUM).sync()
                same(out, sum(r[0] for r in rows))
                same(x, rows[me][0])
                plans.all_reduce(shape, None, x, ReduceOp.MAX).sync()
                same(x, np.max([r[0] for r in rows], axis=0))
                x, out = pt.asarray(every[me], dtype), pt.full((count,), 77, dtype)
                plans.reduce_scatter(shape, x, out, ReduceOp.SUM).sync()
                same(out, sum(r[me] for r in rows))
                x, out = pt.asarray(rows[me][0], dtype), pt.full((n * count,), 77, dtype)
                plans.gather(shape, x, out, each=False).sync()
                same(out, np.concatenate([r[0] for r in rows]))
                x, out = pt.asarray(every[me], dtype), pt.full((n * count,), 77, dtype)
                plans.gather(shape, x, out, each=True).sync()
                same(out, np.concatenate([r[me] for r in rows]))
    return True


def same(tensor, want):
    np.testing.assert_array_equal(tensor.numpy().astype(np.float64), want)


def replays(group, algorithm, replays):
    """A captured all-reduce goes on where the last launch ended, whatever ran in between."""
    n = group.size
    shape = Shape(Algorithm(algorithm), 4, 128)
    stream = pt.current_device().stream("captured")
    with pt.SymmetricHeap(group, size_bytes=heap_bytes(n, 8) + (1 << 20)) as heap:
        plans = GpuPlans(heap, 8)
        x, out = pt.zeros((1000,), pt.f32), pt.zeros((1000,), pt.f32)
        with pt.capture(stream, "three all-reduces") as scope:
            for _ in range(3):
                scope.record(plans.all_reduce(shape, x, out, ReduceOp.SUM))
        for k in range(replays):
            x.copy_from(integers(group.rank, 1000, k))
            if k % 2:
                plans.all_reduce(shape, x, out, ReduceOp.PROD).sync_on(stream)
            scope.graph.launch().sync_on(stream)
            same(out, sum(integers(r, 1000, k) for r in range(n)))
    return True


def rounded_once(group, algorithm, seed):
    """bf16 sums have the bits of the exact sum rounded once, for two ranks; every rank has the same."""
    rng = [np.random.default_rng((seed, r)) for r in range(group.size)]
    every = [g.standard_normal(4000).astype(ml_dtypes.bfloat16) for g in rng]
    with pt.SymmetricHeap(group, size_bytes=heap_bytes(group.size, 8) + (1 << 20)) as heap:
        out = pt.empty((4000,), pt.bf16)
        x = pt.asarray(every[group.rank], pt.bf16)
        GpuPlans(heap, 8).all_reduce(Shape(Algorithm(algorithm), 8, 256), x, out, ReduceOp.SUM).sync()
        got = out.numpy()
    exact = sum(e.astype(np.float64) for e in every)
    bound = np.abs(exact) * 2.0**-8 + 1e-30
    assert (np.abs(got.astype(np.float64) - exact) <= bound).all()
    return got.tobytes()


def through_the_communicator(group, dtype_name, seed):
    """What a communicator on GPUs does, with the kernels on whatever device there is: any count, in place, symmetric
    tensors, views that begin at no word."""
    dtype, n, me = getattr(pt, dtype_name), group.size, group.rank
    with pt.SymmetricHeap(group, size_bytes=room(heap_bytes(n, 8) + (48 << 20))) as heap:
        comm = Collectives(heap, programs=2)
        comm._gpu = comm._gpu or GpuPlans(heap, 8)
        for count in (1, 2, 7, 64, 1001, 40_000):
            rows = [integers(r, n * count, seed + count).reshape(n, count) for r in range(n)]
            for start in (0, 1):
                whole = pt.zeros((n * count + 1,), dtype)
                x = whole[start : start + count]
                x.copy_from(rows[me][0])
                same(comm.all_reduce(x).sync(), sum(r[0] for r in rows))
                same(comm.all_gather(x).sync(), np.stack([r[0] for r in rows]))
                comm.all_reduce(x, x, ReduceOp.MIN).sync()
                same(x, np.min([r[0] for r in rows], axis=0))
                y = whole[start : start + n * count]
                y.copy_from(rows[me].reshape(-1))
                same(comm.reduce_scatter(y).sync(), sum(r[me] for r in rows))
                same(comm.all_to_all(y).sync(), np.concatenate([r[me] for r in rows]))
                if n > 1:
                    part = y[me * count : (me + 1) * count]
                    comm.reduce_scatter(y, part).sync()
                    same(part, sum(r[me] for r in rows))
        s, t = heap.empty((1000,), dtype), heap.empty((1000,), dtype)
        rows = [integers(r, 1000, seed) for r in range(n)]
        s.copy_from(rows[me])
        comm.all_reduce(s, t).sync()
        same(t, sum(rows))
        comm.all_reduce(s, s).sync()
        same(s, sum(rows))
        comm.close()
    return True


def too_small(group):
    """In heaps of ever more bytes until it fits: whoever makes plans gets to know all that they had made."""
    failed = 0
    for kib in range(64, 8192, 192):
        with pt.SymmetricHeap(group, size_bytes=kib << 10) as heap:
            made = []

            def own(item, made=made):
                made.append(item)
                return item

            try:
                GpuPlans(heap, 2, own=own)
            except pt.AllocationError:
                failed += len(made) > 0
            else:
                return failed
            finally:
                for item in made:
                    heap.free(item)
                assert heap._arena.in_use == 0
    return failed


def shapes(group):
    """How messages of some sizes are cut."""
    with pt.SymmetricHeap(group, size_bytes=heap_bytes(group.size, 8) + (1 << 20)) as heap:
        plans = GpuPlans(heap, 8)
        asked = [
            (Family.ALL_REDUCE, 0, pt.bf16), (Family.ALL_REDUCE, 4096, pt.bf16), (Family.ALL_REDUCE, 4096, pt.f64),
            (Family.ALL_REDUCE, 4098, pt.bf16), (Family.ALL_REDUCE, 64 << 20, pt.bf16),
            (Family.ALL_GATHER, 4096, pt.f8e4m3), (Family.ALL_GATHER, 4098, pt.bf16), (Family.ALL_TO_ALL, 4 << 20, pt.f32),
        ]  # fmt: skip
        return [plans.shape(*a) for a in asked]


def called_differently(group, algorithm, same_op):
    """Rank 1 folds by another operation, or another number of elements, than the others."""
    with pt.SymmetricHeap(group, size_bytes=heap_bytes(group.size, 8) + (1 << 20)) as heap:
        plans = GpuPlans(heap, 8)
        shape = Shape(Algorithm(algorithm), 4, 128)
        odd = group.rank == 1
        count = 300 + 8 * (odd and same_op)
        op = ReduceOp.MAX if odd and not same_op else ReduceOp.SUM
        x, out = pt.zeros((count,), pt.f32), pt.full((count,), 77, pt.f32)
        try:
            plans.all_reduce(shape, x, out, op).sync()
        except PeerFailed as error:
            found = f"PeerFailed: {error.cause.partition(':')[0]}"
        except DeviceFault as error:
            found = type(error).__name__
        else:
            found = "no error"
        group.recover()
        plans.recover()
        group.barrier("all are back")
        x, out = pt.full((300,), group.rank + 1, pt.f32), pt.empty((300,), pt.f32)
        plans.all_reduce(shape, x, out, ReduceOp.SUM).sync()
        same(out, group.size * (group.size + 1) // 2)
        return found
