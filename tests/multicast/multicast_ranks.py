"""What each rank of the multicast tests runs. Kernels are the public language; values come from a seed and the rank."""

import numpy as np

import peertile as pt
import peertile.language as T

SIZE, TILE, PROGRAMS = 128, 16, 2


@pt.kernel
def load_reduce(out: T.Exclusive, x: T.Multicast, ready: T.Signal, R: T.Const, ORDER: T.Const, B: T.Const[int]):
    ready.notify()
    ready.wait()
    share = x.partition((B,))
    for z in out.tiles():
        z.store(share.multimem_load_reduce(z.index, R, order=ORDER))


@pt.kernel
def reduce(x: T.Multicast, mine: T.Shared, ready: T.Signal, R: T.Const, ORDER: T.Const, B: T.Const[int]):
    ready.notify()
    ready.wait()
    share = x.partition((B,))
    for i in T.range(T.program_id(0), x.num_tiles((B,))[0], T.num_programs(0)):
        share.multimem_reduce((i,), R, mine.load((i,), (B,)), order=ORDER)
    ready.notify()
    ready.wait()


@pt.kernel
def store(x: T.Multicast, mine: T.Shared, ready: T.Signal, ORDER: T.Const, BULK: T.Const[bool], B: T.Const[int]):
    """Every rank writes the tiles of its turn into every part."""
    ready.notify()
    ready.wait()
    share = x.partition((B,))
    first, step = T.program_id(0) * x.num_ranks + x.rank, T.num_programs(0) * x.num_ranks
    for i in T.range(first, x.num_tiles((B,))[0], step):
        tile = mine.load((i,), (B,))
        if BULK:
            share.multimem_bulk_store((i,), tile)
        else:
            share.multimem_store((i,), tile, order=ORDER)
    ready.notify()
    ready.wait()


@pt.kernel
def bulk_reduce(x: T.Multicast, mine: T.Shared, ready: T.Signal, R: T.Const, B: T.Const[int]):
    ready.notify()
    ready.wait()
    share = x.partition((B,))
    for i in T.range(T.program_id(0), x.num_tiles((B,))[0], T.num_programs(0)):
        share.multimem_bulk_store((i,), mine.load((i,), (B,)), R)
    ready.notify()
    ready.wait()


@pt.kernel
def signals(words: T.Multicast, ready: T.Signal):
    ready.notify()
    ready.wait()
    if words.rank == 0:
        words.multimem_signal(41)
    words.multimem_signal_add((words.rank + 1).astype(words.dtype), index=1)
    ready.notify()
    ready.wait()


@pt.kernel
def all_reduce(x: T.Multicast, ready: T.Signal, B: T.Const[int]):
    ready.notify()
    ready.wait()
    share = x.partition((B,))
    for i in T.range(T.program_id(0) * x.num_ranks + x.rank, x.num_tiles((B,))[0], T.num_programs(0) * x.num_ranks):
        share.multimem_store((i,), share.multimem_load_reduce((i,), T.add))
    ready.notify()
    ready.wait()


def values(dtype, rank, seed, count=SIZE):
    """Fresh numbers of rank `rank`: small for floats, so that sums of them are exact; every bit for integers."""
    random = np.random.default_rng((seed, rank))
    if dtype.is_float:
        return random.integers(-30, 30, count).astype(np.float32).astype(dtype.numpy)
    info = np.iinfo(dtype.numpy)
    return random.integers(info.min, info.max, count, dtype=dtype.numpy, endpoint=True)


def combined(rmw, parts, dtype):
    """The reduction of all parts, as the memory model says it."""
    if rmw is T.Rmw.ADD:
        with np.errstate(over="ignore"):
            if dtype.is_float and dtype.bits == 16:
                return np.sum([p.astype(np.float32) for p in parts], axis=0).astype(dtype.numpy)
            return np.add.reduce(parts, dtype=dtype.numpy)
    if rmw in (T.Rmw.AND, T.Rmw.OR, T.Rmw.XOR):
        return {T.Rmw.AND: np.bitwise_and, T.Rmw.OR: np.bitwise_or, T.Rmw.XOR: np.bitwise_xor}[rmw].reduce(parts)
    best = np.minimum if rmw in (T.Rmw.MIN, T.Rmw.UMIN) else np.maximum
    if dtype.is_float:
        return best.reduce([p.astype(np.float32) for p in parts]).astype(dtype.numpy)
    sign = "u" if rmw in (T.Rmw.UMIN, T.Rmw.UMAX) else ""
    kind = np.dtype(f"{sign}int{dtype.bits}")
    return best.reduce([p.view(kind) for p in parts], dtype=kind).view(dtype.numpy)


def _heap(group):
    return pt.SymmetricHeap(group, 1 << 20)


def load_reduces(rank, cases, seed):
    """Every rank reads the reduction of all parts, the same bits on each."""
    group = pt.init()
    with _heap(group) as heap:
        ready = heap.signal(slots=PROGRAMS)
        for name, rmw, order in cases:
            dtype = getattr(pt, name)
            x = heap.multicast((SIZE,), dtype)
            x.copy_from(values(dtype, group.rank, seed))
            out = pt.empty((SIZE,), dtype)
            out.copy_from(np.full(SIZE, 77).astype(dtype.numpy))
            z = out.partition(TILE).persistent(PROGRAMS)
            load_reduce(z, x, ready, R=rmw, ORDER=order, B=TILE).sync()
            expected = combined(rmw, [values(dtype, r, seed) for r in range(group.size)], dtype)
            np.testing.assert_array_equal(out.numpy().view(np.uint8), expected.view(np.uint8), f"{name} {rmw} {order}")
            group.barrier()
            heap.free(x)
    return True


def reduces(rank, cases, seed, bulk=False):
    """Every rank combines its numbers into all parts."""
    group = pt.init()
    with _heap(group) as heap:
        ready = heap.signal(slots=PROGRAMS)
        for name, rmw, order in cases:
            dtype = getattr(pt, name)
            x = heap.multicast((SIZE,), dtype)
            x.copy_from(values(dtype, 100, seed))
            group.barrier()
            mine = pt.asarray(values(dtype, group.rank, seed))
            if bulk:
                bulk_reduce.grid(PROGRAMS)(x, mine, ready, R=rmw, B=TILE).sync()
            else:
                reduce.grid(PROGRAMS)(x, mine, ready, R=rmw, ORDER=order, B=TILE).sync()
            parts = [values(dtype, r, seed) for r in (100, *range(group.size))]
            np.testing.assert_array_equal(x.numpy(), combined(rmw, parts, dtype), f"{name} {rmw} {order}")
            group.barrier()
            heap.free(x)
    return True


def stores(rank, cases, seed, bulk=False):
    """Every part holds the tiles of every rank's turn."""
    group = pt.init()
    with _heap(group) as heap:
        ready = heap.signal(slots=PROGRAMS)
        for name, order in cases:
            dtype = getattr(pt, name)
            x = heap.multicast((SIZE,), dtype)
            x.copy_from(values(dtype, 100, seed))
            group.barrier()
            mine = pt.asarray(values(dtype, group.rank, seed))
            store.grid(PROGRAMS)(x, mine, ready, ORDER=order, BULK=bulk, B=TILE).sync()
            expected = np.concatenate(
                [values(dtype, i % group.size, seed)[i * TILE : (i + 1) * TILE] for i in range(SIZE // TILE)]
            )
            np.testing.assert_array_equal(x.numpy(), expected, f"{name} {order}")
            group.barrier()
            heap.free(x)
    return True


def signal_words(rank, dtypes):
    group = pt.init()
    with _heap(group) as heap:
        ready = heap.signal(slots=1)
        for name in dtypes:
            dtype = getattr(pt, name)
            words = heap.multicast((4,), dtype)
            words.copy_from(np.array([9, 100, 7, 7], dtype.numpy))
            group.barrier()
            signals.grid(1)(words, ready).sync()
            total = group.size * (group.size + 1) // 2
            assert words.numpy().tolist() == [41, 100 + total, 7, 7], name
            group.barrier()
            heap.free(words)
    return True


def all_reduces(rank, name, count, tile, seed):
    """Program 7 of the documentation, its result and that every rank has the same bits."""
    group = pt.init()
    with _heap(group) as heap:
        dtype = getattr(pt, name)
        ready = heap.signal(slots=4)
        x = heap.multicast((count,), dtype)
        for k in range(3):
            x.copy_from(values(dtype, group.rank, seed + k, count))
            group.barrier()
            all_reduce.grid(4)(x, ready, B=tile).sync()
            got = x.numpy()
            parts = [values(dtype, r, seed + k, count) for r in range(group.size)]
            np.testing.assert_array_equal(got, combined(T.add, parts, dtype))
            assert len(set(group.exchange(got.tobytes(), "bits"))) == 1
    return True
