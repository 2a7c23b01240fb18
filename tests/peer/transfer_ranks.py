"""Kernels and rank functions of the tests of transfers, polls and remote atomics. No pytest here."""

import numpy as np

import peertile as pt
import peertile.language as T
from peertile.meaning.numbers import apply_rmw
from peertile.memory_model import Rmw

SIZES = (0, 1, 2, 3, 7, 63, 64, 65, 1000, 1023, 1024, 1025, 4097)


@pt.kernel
def push_view(x: T.Shared, p: T.Peer, ready: T.Signal, start: T.i64):
    """The whole of x into the next rank's part, from element `start` on, then its signal."""
    to = (p.rank + 1) % p.num_ranks
    T.put(x, p.at(to).slice((start,), x.shape), signal=ready)
    ready.wait((p.rank + p.num_ranks - 1) % p.num_ranks)


@pt.kernel
def pull_view(p: T.Peer, q: T.Peer, ready: T.Signal, start: T.i64):
    """The next rank's part into one's own."""
    ready.notify()
    ready.wait()
    source = (p.rank + 1) % p.num_ranks
    T.get(p.at(source).slice((start,), (p.shape[0] - start,)), to=q.local.slice((start,), (q.shape[0] - start,)))
    ready.notify()
    ready.wait()


@pt.kernel
def push_tiles(x: T.Shared, p: T.Peer, done: T.Signal, WAIT: T.Const[bool], QUIET: T.Const[bool]):
    """Tile by tile into the next rank's part, with a handle for each, or one wait for all."""
    to = (p.rank + 1) % p.num_ranks
    for k in T.range(x.num_tiles((64,))[0]):
        handle = T.put(x.load((k,), (64,)), p, (k,), rank=to, wait=WAIT, granularity=T.Granularity.WARP, unroll=2)
        if not WAIT and not QUIET:
            T.wait_put(handle)
    if QUIET:
        T.quiet()
    done[1].notify(to=to)
    done[1].wait((p.rank + p.num_ranks - 1) % p.num_ranks)


@pt.kernel
def get_tiles(out: T.Exclusive, p: T.Peer[T.read], r: T.i64):
    out.store(T.get(p, out.tile_shape, out.index, rank=r, padding=T.Padding.NAN))


@pt.kernel
def flagged_round(out: T.Exclusive, x: T.Shared, words: T.Peer, first: T.u32, rounds: T.i32):
    """Every rank sends each tile to every rank, `rounds` times over two places; the sum of all that came."""
    me, n = words.rank, words.num_ranks
    i = out.index[0]
    acc = T.zeros(out.tile_shape, out.dtype)
    for k in T.range(rounds):
        epoch = first + k.astype(T.u32)
        row = (k % 2).astype(T.i64) * n
        for r in T.ranks():
            tile = T.reshape(x.load_like(out), (1, out.tile_shape[0]))
            T.put_flagged(tile, words, (row + me, i), epoch=epoch, rank=r)
        for r in T.ranks():
            got = T.take_flagged(words, (1, out.tile_shape[0]), (row + r, i), epoch=epoch, dtype=out.dtype)
            acc += T.reshape(got, out.tile_shape)
    out.store(acc)


@pt.kernel
def filled_round(out: T.Exclusive, x: T.Shared, words: T.Peer, rounds: T.i32):
    """Every rank sends each tile to every rank, `rounds` times over four places; the sum of all that came, in words."""
    me, n = words.rank, words.num_ranks
    i = out.index[0]
    acc = T.zeros(out.tile_shape, out.dtype)
    for k in T.range(rounds):
        row = (k % 4).astype(T.i64) * n
        tile = T.reshape(x.load_like(out), (1, out.tile_shape[0]))
        for r in T.ranks():
            T.put_filled(tile + k.astype(out.dtype), words, (row + me, i), rank=r)
        for r in T.ranks():
            acc += T.reshape(T.take_filled(words, (1, out.tile_shape[0]), (row + r, i)), out.tile_shape)
    out.store(acc)


@pt.kernel
def first_of(out: T.Exclusive, words: T.Peer, order: T.Shared):
    """Rank 0 takes one word of each other rank as they come; the others store theirs in turn."""
    me = words.rank
    seen = T.i64(0)
    if me == 0:
        for k in T.range(2):
            which = T.wait_any((words, 1, (2 * k,)), (words, 1, (2 * k + 1,)))
            seen = seen * 10 + which
            T.st(words, 1, (4,), rank=1, order=T.release)
            T.st(words, 1, (4,), rank=2, order=T.release)
    else:
        for k in T.range(2):
            turn = T.sum(order.load((k,), (1,)), axis=0)
            if turn == me - 1:
                T.st(words, 1, (2 * k + me - 1,), rank=0, order=T.release)
            T.wait_ge(words, 1, (4,))
    out.store(T.full((1,), seen, T.i64))


@pt.kernel
def everybody_combines(x: T.Shared, p: T.Peer, b: T.Barrier, KIND: T.Const):
    """Each rank combines its tile into every rank's part."""
    b.sync()
    for r in T.ranks():
        p.at(r).atomic((0,), KIND, x.load((0,), (64,)), scope=T.device)
    b.sync()


@pt.kernel
def split(out: T.Exclusive, x: T.Peer, b: T.Barrier, rounds: T.i32):
    """Between arriving and waiting there is work that nobody waits for."""
    bad, work = T.i64(0), T.i64(0)
    for k in T.range(rounds):
        x.local.store((0,), T.full((1,), b.rank * 1000 + k, T.i64))
        b.arrive()
        work += T.sum(T.iota(16) * k, axis=0)
        b.wait()
        for r in T.ranks():
            bad += T.where(T.sum(x.at(r).load((0,), (1,)), axis=0) == r * 1000 + k, 0, 1)
        b.sync()
    out.store(T.full((1,), bad + T.minimum(work, 0) + b.num_ranks, T.i64))


@pt.kernel
def fenced(x: T.Peer, flags: T.Peer, out: T.Exclusive, rounds: T.i32):
    """Relaxed words with a fence on both sides."""
    me, n = x.rank, x.num_ranks
    to, source = (me + 1) % n, (me + n - 1) % n
    bad = T.i64(0)
    for k in T.range(rounds):
        x.at(to).store((0,), T.full((16,), me * 100 + k, T.i64))
        T.sync_system()
        T.st(flags, 2 * k + 1, (0,), rank=to)
        T.wait_ge(flags, 2 * k + 1, (0,), order=T.relaxed)
        T.sync_system()
        bad += T.sum(T.where(x.local.load((0,), (16,)) == source * 100 + k, 0, 1), axis=0)
        T.st(flags, 2 * k + 2, (1,), rank=source, order=T.release)
        T.wait_ge(flags, 2 * k + 2, (1,))
    out.store(T.full((1,), bad, T.i64))


def vector(rank, n, dtype=np.float32):
    return (np.arange(n) % 97 + 100 * rank).astype(dtype)


def views_are_put(group, sizes):
    with pt.SymmetricHeap(group, size_bytes=1 << 20) as heap:
        p, ready = heap.zeros((5000,), pt.f32), heap.signal(slots=2)
        before = (group.rank - 1) % group.size
        for n in sizes:
            for start in (0, 1, 5):
                p.copy_from(np.full(5000, -1, np.float32))
                group.barrier("clean")
                push_view.grid(1)(pt.asarray(vector(group.rank, n)), p, ready, start).sync()
                expected = np.full(5000, -1, np.float32)
                expected[start : start + n] = vector(before, n)
                np.testing.assert_array_equal(p.numpy(), expected)
                group.barrier("checked")
    return True


def views_are_got(group):
    with pt.SymmetricHeap(group, size_bytes=1 << 20) as heap:
        p, q, ready = heap.zeros((3001,), pt.u8), heap.zeros((3001,), pt.u8), heap.signal()
        p.copy_from(vector(group.rank, 3001, np.uint8))
        for start in (0, 3, 3001):
            q.copy_from(np.zeros(3001, np.uint8))
            group.barrier("filled")
            pull_view.grid(1)(p, q, ready, start).sync()
            expected = vector((group.rank + 1) % group.size, 3001, np.uint8)
            expected[:start] = 0
            np.testing.assert_array_equal(q.numpy(), expected)
    return True


def tiles_are_put(group, wait, quiet):
    with pt.SymmetricHeap(group, size_bytes=1 << 20) as heap:
        p, done = heap.zeros((1000,), pt.f32), heap.signal(slots=2)
        push_tiles.grid(1)(pt.asarray(vector(group.rank, 1000)), p, done, WAIT=wait, QUIET=quiet).sync()
        np.testing.assert_array_equal(p.numpy(), vector((group.rank - 1) % group.size, 1000))
        group.barrier("checked")
        out = pt.zeros((100,), pt.f32)
        get_tiles(out.partition(64), p, (group.rank + 1) % group.size).sync()
        np.testing.assert_array_equal(out.numpy(), vector(group.rank, 100))
        group.barrier("read")
    return True


def flagged_sums(group, dtype_name, first, rounds):
    dtype = getattr(pt, dtype_name)
    with pt.SymmetricHeap(group, size_bytes=1 << 20) as heap:
        words = heap.zeros((2 * group.size, 100), pt.u64)
        words.copy_from(np.full(words.shape, (first - 1) % 2**32 << 32, np.uint64))
        group.barrier("armed")
        out = pt.zeros((100,), dtype)
        x = (np.arange(100) % 5 + group.rank).astype(dtype.numpy)
        flagged_round(out.partition(32), pt.asarray(x, dtype), words, first, rounds).sync()
        expected = sum(np.arange(100) % 5 + r for r in range(group.size)) * rounds
        np.testing.assert_array_equal(out.numpy().astype(np.int64), expected)
        group.barrier("done")
    return True


def filled_sums(group, dtype_name, rounds):
    dtype = getattr(pt, dtype_name)
    with pt.SymmetricHeap(group, size_bytes=1 << 20) as heap:
        words = heap.empty((4 * group.size, 100), dtype)
        empty = np.full(words.shape, np.iinfo(dtype.numpy).max, dtype.numpy)
        words.copy_from(empty)
        group.barrier("empty")
        out = pt.zeros((100,), dtype)
        x = (np.arange(100) * 7 + group.rank).astype(dtype.numpy)
        filled_round(out.partition(32), pt.asarray(x, dtype), words, rounds).sync()
        expected = sum((np.arange(100) * 7 + r) * rounds + rounds * (rounds - 1) // 2 for r in range(group.size))
        np.testing.assert_array_equal(out.numpy().astype(np.int64), expected)
        group.barrier("done")
        np.testing.assert_array_equal(words.numpy(), empty)  # as it was, for the next launch
    return True


def full_word(group):
    """A word that means an empty place goes as another, and comes."""
    with pt.SymmetricHeap(group, size_bytes=1 << 20) as heap:
        words = heap.empty((4 * group.size, 32), pt.u32)
        words.copy_from(np.full(words.shape, 2**32 - 1, np.uint32))
        group.barrier("empty")
        out = pt.zeros((32,), pt.u32)
        x = np.full(32, 2**32 - 1, np.uint32)
        filled_round(out.partition(32), pt.asarray(x, pt.u32), words, 1).sync()
        group.barrier("done")
    return out.numpy().tolist() == [(group.size * (2**32 - 2)) % 2**32] * 32


def firsts(group, order):
    with pt.SymmetricHeap(group, size_bytes=1 << 20) as heap:
        words = heap.zeros((5,), pt.i32)
        out = pt.zeros((1,), pt.i64)
        first_of(out.partition(1), words, pt.asarray(np.array(order))).sync()
        group.barrier("done")
    return int(out.numpy()[0])


def combines(group, cases):
    """Every (kind, dtype): what is left is what numpy folds, in any order."""
    with pt.SymmetricHeap(group, size_bytes=1 << 20) as heap:
        b = heap.barrier()
        for name, kind_name in cases:
            dtype, kind = getattr(pt, name), Rmw(kind_name)
            p = heap.empty((50,), dtype)
            rng = np.random.default_rng(7)
            start = _numbers(rng, dtype)
            parts = [_numbers(rng, dtype) for _ in range(group.size)]
            p.copy_from(start)
            everybody_combines.grid(1)(pt.asarray(parts[group.rank], dtype), p, b, KIND=kind).sync()
            got = p.numpy()
            if kind is Rmw.XCHG:
                assert all(any(g == part[k] for part in parts) for k, g in enumerate(got)), (name, kind_name)
            else:
                expected = start
                for part in parts:
                    expected = apply_rmw(kind, expected, part, dtype)
                np.testing.assert_array_equal(got, expected, err_msg=f"{name} {kind_name}")
            group.barrier("checked")
            heap.free(p)
    return True


def _numbers(rng, dtype):
    """Numbers whose sums are exact in any order; the whole range where integers only wrap or compare."""
    if dtype.is_float:
        return rng.integers(-8, 9, 50).astype(np.float32).astype(dtype.numpy)
    return rng.integers(dtype.min, dtype.max, 50, dtype=dtype.numpy, endpoint=True)


def splits(group, rounds):
    with pt.SymmetricHeap(group, size_bytes=1 << 20) as heap:
        x, b, out = heap.zeros((1,), pt.i64), heap.barrier(programs=1), pt.zeros((1,), pt.i64)
        for _ in range(2):
            split(out.partition(1), x, b, rounds).sync()
    return int(out.numpy()[0])


def fences(group, rounds):
    with pt.SymmetricHeap(group, size_bytes=1 << 20) as heap:
        x, flags, out = heap.zeros((16,), pt.i64), heap.zeros((2,), pt.i32), pt.zeros((1,), pt.i64)
        fenced(x, flags, out.partition(1), rounds).sync()
        group.barrier("done")
    return int(out.numpy()[0])


@pt.kernel
def chunks(out: T.Exclusive, x: T.Peer[T.read], ready: T.Signal):
    """One wait per chunk: slot k says that chunk k of a source is there."""
    (k,) = out.index
    acc = T.zeros(out.tile_shape, T.f32)
    for r in T.ranks():
        if r != x.rank:
            ready[k].wait(r)
        acc += x.at(r).load((k,), out.tile_shape)
    out.store(acc)


def stream_writes(group):
    """The host fills chunks and lets the stream be the writer of the signal's slots."""
    device = pt.current_device()
    with pt.SymmetricHeap(group, size_bytes=1 << 20) as heap:
        x, ready = heap.zeros((256,), pt.f32), heap.signal(slots=4)
        stream = device.stream("side")
        for step in range(2):
            group.barrier("may be written")
            x.copy_from(np.full(256, group.rank + step, np.float32))
            for k in range(4):
                for to in range(group.size):
                    if to != group.rank:
                        address, epoch = ready.next_word(k, to)
                        device.driver.write_value(stream.handle, address, epoch, 64)
            out = pt.zeros((256,), pt.f32)
            chunks(out.partition(64), x, ready).sync()
            np.testing.assert_array_equal(out.numpy(), sum(r + step for r in range(group.size)))
            group.barrier("read")
    return True
