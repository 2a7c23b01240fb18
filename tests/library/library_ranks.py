"""Rank functions of the collective tests. No pytest here: every rank imports this."""

import itertools
import os
import signal
import threading
import time

import numpy as np

import peertile as pt
import peertile.language as T
from peertile.errors import PeertileError
from peertile.library.collectives import GPU_SLOT_BYTES, SLOT_BYTES, Collectives
from peertile.library.experts import Experts
from peertile.library.fused import FusedProducts
from peertile.library.reductions import ReduceOp
from peertile.library.ring_attention import RingAttention
from peertile.library.selection import Algorithm

COUNTS = (0, 1, 2, 7, 64, 1000, 4097)
CPU_ALGORITHMS = (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT, Algorithm.PIPELINED, Algorithm.FLAGGED, Algorithm.RING)
BIG = 40_001


def vector(rank, n, dtype=pt.f32):
    """Small integers: their sums are exact in every type and every order."""
    low = -4 if dtype.is_signed else 0
    return np.random.default_rng(1000 + rank).integers(low, 5, n).astype(np.float32).astype(dtype.numpy)


def device_vector(rank, n, dtype=pt.f32):
    return pt.asarray(vector(rank, n, dtype), dtype)


def room(size_bytes):
    """Of a heap that communicators share with a test's tensors: on a GPU they stage more, for more programs."""
    return size_bytes + ((1 << 29) if pt.current_device().target is not None else 0)


def junk(n, dtype):
    return pt.full((n,), 77, dtype)


def fold(parts, op):
    """What the collective promises, by numpy: rank order, f16 and bf16 in f32, integers wrap."""
    dtype = parts[0].dtype
    wide = np.float32 if dtype.itemsize < 4 and dtype.kind not in "iub" else dtype
    acc = parts[0].astype(wide)
    function = {"prod": np.multiply, "min": np.minimum, "max": np.maximum}.get(op.value, np.add)
    with np.errstate(all="ignore"):
        for part in parts[1:]:
            acc = function(acc, part.astype(wide))
        if op is ReduceOp.AVG:
            acc = acc / wide(len(parts)) if callable(wide) else acc / acc.dtype.type(len(parts))
        return acc.astype(dtype)


def same(got, expected, what=""):
    """Equal to the bit, but for the bits of a NaN."""
    assert got.dtype == expected.dtype, what
    assert got.shape == expected.shape, what
    if got.dtype.kind in "iub":
        np.testing.assert_array_equal(got, expected, err_msg=what)
        return
    nan = np.isnan(expected.astype(np.float64))
    assert np.array_equal(np.isnan(got.astype(np.float64)), nan), what
    bits = f"u{got.dtype.itemsize}"
    np.testing.assert_array_equal(got.view(bits)[~nan], expected.view(bits)[~nan], err_msg=what)


def usable(algorithm, n, dtype=pt.f32):
    if algorithm is Algorithm.FLAGGED:
        return n <= 256 and dtype.itemsize in (2, 4)
    if algorithm is Algorithm.ONE_SHOT:
        on_gpu = pt.current_device().driver.kind is pt.DriverKind.CUDA
        return n * dtype.itemsize <= (GPU_SLOT_BYTES if on_gpu else SLOT_BYTES) // 2
    return algorithm is not Algorithm.RING or dtype.itemsize >= 4 or dtype.is_int


def all_reduces(group, counts, algorithm, programs=None):
    """Out of place, in place, twice in a row, with buffers overwritten as soon as a call returns."""
    me, n = group.rank, group.size
    with Collectives(group, programs=programs) as comm:
        for count in counts:
            if not usable(algorithm, count):
                continue
            parts = [vector(r, count) for r in range(n)]
            expected, what = fold(parts, ReduceOp.SUM), f"{algorithm} {count}"
            x, out = pt.asarray(parts[me], pt.f32), junk(count, pt.f32)
            for _ in range(2):
                x.copy_from(parts[me])
                assert comm.all_reduce(x, out, algorithm=algorithm).sync() is out
                x.copy_from(np.full(count, np.nan, np.float32))
                same(out.numpy(), expected, what)
                x.copy_from(parts[me])
                comm.all_reduce(x, x, algorithm=algorithm).sync()
                same(x.numpy(), expected, f"{what} in place")
                x.copy_from(np.full(count, np.nan, np.float32))
    return True


def symmetric_all_reduces(group, counts, algorithm):
    me, n = group.rank, group.size
    with pt.SymmetricHeap(group, size_bytes=room(16 << 20)) as heap, Collectives(heap) as comm:
        for count in counts:
            parts = [vector(r, count) for r in range(n)]
            expected, what = fold(parts, ReduceOp.SUM), f"{algorithm} {count}"
            x, out = heap.empty((count,), pt.f32), heap.empty((count,), pt.f32)
            for _ in range(2):
                for a, b in ((x, out), (x, x)):
                    if not usable(algorithm, count) or (a is b and algorithm is Algorithm.ONE_SHOT):
                        continue
                    a.copy_from(parts[me])
                    comm.all_reduce(a, b, algorithm=algorithm).sync()
                    same(b.numpy(), expected, what)
                    # Nobody may still read x, so it can be overwritten at once.
                    x.copy_from(np.full(count, np.nan, np.float32))
                local = junk(count, pt.f32)
                x.copy_from(parts[me])
                comm.all_reduce(x, local, algorithm=algorithm if usable(algorithm, count) else None).sync()
                same(local.numpy(), expected, f"{what} to a local tensor")
            heap.free(x)
            heap.free(out)
    return True


def reductions(group, names, algorithms, count=70):
    """Every reduction of every dtype that has it."""
    me, n = group.rank, group.size
    with Collectives(group) as comm:
        for name, op, algorithm in itertools.product(names, ReduceOp, algorithms):
            dtype = getattr(pt, name)
            if (op is ReduceOp.AVG and not dtype.is_float) or not usable(algorithm, count, dtype):
                continue
            parts = [vector(r, count, dtype) for r in range(n)]
            out = junk(count, dtype)
            comm.all_reduce(pt.asarray(parts[me], dtype), out, op, algorithm=algorithm).sync()
            expected = fold(parts, op)
            same(out.numpy(), expected, f"{name} {op} {algorithm}")
    return True


def moves(group, counts, name="f32", programs=None):
    """All-gather, all-to-all, reduce-scatter, broadcast and reduce, of user and symmetric tensors, twice."""
    me, n, dtype = group.rank, group.size, getattr(pt, name)
    reduces = not (dtype.is_float and dtype.bits == 8) and not dtype.is_bool
    with pt.SymmetricHeap(group, size_bytes=room(32 << 20)) as heap, Collectives(heap, programs=programs) as comm:
        for count in counts:
            parts = [vector(r, count, dtype) for r in range(n)]
            wide = [vector(10 + r, count * n, dtype) for r in range(n)]
            x, w = heap.empty((count,), dtype), heap.empty((n * count,), dtype)
            spoiled = np.full(n * count, 3).astype(dtype.numpy)
            for a, b in ((junk(count, dtype), junk(n * count, dtype)), (x, w)) * 2:
                a.copy_from(parts[me])
                b.copy_from(wide[me])
                ops = [comm.all_gather(a), comm.all_to_all(b)]
                if reduces:
                    ops.append(comm.reduce_scatter(b))
                results = [op.sync() for op in ops]
                a.copy_from(spoiled[:count])
                b.copy_from(spoiled)
                got = [r.numpy().reshape(-1) for r in results]
                mine = slice(me * count, (me + 1) * count)
                same(got[0], np.concatenate(parts), f"all_gather {count}")
                same(got[1], np.concatenate([v[mine] for v in wide]), f"all_to_all {count}")
                if reduces:
                    same(got[2], fold([v[mine] for v in wide], ReduceOp.SUM), f"reduce_scatter {count}")
            heap.free(x)
            heap.free(w)
            for root in {0, n - 1}:
                a, out = pt.asarray(parts[me], dtype), junk(count, dtype)
                comm.broadcast(a, out, root=root).sync()
                same(out.numpy(), parts[root], f"broadcast {count}")
                comm.broadcast(a, root=root).sync()
                a_now = a.numpy()
                same(a_now, parts[root], f"broadcast in place {count}")
                if reduces:
                    a.copy_from(parts[me])
                    total = comm.reduce(a, root=root).sync()
                    if me == root:
                        same(total.numpy(), fold(parts, ReduceOp.SUM), f"reduce {count}")
            comm.barrier().sync()
    return True


def uneven(group, shares, name="f32"):
    """Gather, and scatter back; then shares that differ for every pair of ranks."""
    me, n, dtype = group.rank, group.size, getattr(pt, name)
    parts = [vector(r, shares[r], dtype) for r in range(n)]
    with Collectives(group) as comm:
        for _ in range(2):
            whole = comm.all_gather_v(pt.asarray(parts[me], dtype), shares).sync()
            same(whole.numpy(), np.concatenate(parts), "all_gather_v")
            back = comm.reduce_scatter_v(whole, shares, op=ReduceOp.MAX).sync()
            same(back.numpy(), parts[me], "reduce_scatter_v")
            sends = [[(5 * i + 3 * j) % 7 * 700 for j in range(n)] for i in range(n)]
            rows = [vector(20 + r, sum(sends[r]), dtype) for r in range(n)]
            got = comm.all_to_all_v(pt.asarray(rows[me], dtype), sends[me], [sends[r][me] for r in range(n)]).sync()
            pieces = [rows[r][sum(sends[r][:me]) : sum(sends[r][: me + 1])] for r in range(n)]
            same(got.numpy(), np.concatenate(pieces), "all_to_all_v")
    return True


def everything(group):
    """A little of each, for ranks whose kernels are compiled in every process."""
    shares = [18, 19, 18, 18, *[5] * group.size][: group.size]
    return (
        all_reduces(group, (7, 4097), None)
        and symmetric_all_reduces(group, (BIG,), None)
        and moves(group, (70,))
        and uneven(group, shares)
        and stress(group, 1, 40)
    )


def told(error):
    """What a test compares of an error: its type and the first line of its message."""
    return type(error).__name__, str(error).splitlines()[0]


def caught(call):
    try:
        call()
    except PeertileError as error:
        return told(error)
    return None


def wait_until_failed(group, bound_s=20.0):
    """Poll, bounded, until the group has failed."""
    end = time.monotonic() + bound_s
    while group.failure() is None:
        assert time.monotonic() < end, "the group did not fail in time"
        time.sleep(0.002)


class Stalls:
    """Latches that hold one rank at one point: it goes on only once every other rank has done what it can."""

    def __init__(self, ranks):
        self.ranks = ranks
        self.ahead = [threading.Event() for _ in range(ranks)]

    def hold(self, rank, bound_s=20.0):
        for other, event in enumerate(self.ahead):
            assert other == rank or event.wait(bound_s), f"rank {other} did not come"
            event.clear()

    def arrive(self, rank):
        self.ahead[rank].set()


def stalled(group, stalls, algorithm, rounds):
    """In round k rank k mod n enters its call only after all others have submitted theirs."""
    me, n, count = group.rank, group.size, 200
    with Collectives(group) as comm:
        x, out = junk(count, pt.f32), junk(count, pt.f32)
        for k in range(rounds):
            x.copy_from(vector(me, count) + k)
            op = comm.all_reduce(x, out, algorithm=algorithm)
            if k % n == me:
                stalls.hold(me)
                op.sync()
            else:
                running = op.submit()
                stalls.arrive(me)
                running.wait()
            x.copy_from(np.full(count, np.nan, np.float32))
            same(out.numpy(), sum(vector(r, count) + k for r in range(n)).astype(np.float32), f"round {k}")
    return True


SIZES = (0, 1, 5, 64, 300, 4096, 20_000)
DRAWN = (
    *(f"all_reduce {a.value}" for a in CPU_ALGORITHMS),
    *("all_reduce", "all_reduce in place", "all_reduce symmetric", "all_gather", "broadcast", "reduce", "barrier"),
    *("reduce_scatter", "all_to_all", "all_gather_v", "reduce_scatter_v", "all_to_all_v"),
)


def stress(group, seed, rounds):
    """Random collectives of random sizes with random delays between them; the same draw on every rank. Sums of
    values that round, so that only the promised order gives the bits that are asked for. How often each was drawn."""
    me, n = group.rank, group.size
    shared, own = np.random.default_rng(seed), np.random.default_rng((seed, me))
    pools = [
        np.random.default_rng((seed, 99, r)).standard_normal(n * 20_000 + 1000).astype(np.float32) for r in range(n)
    ]
    whole = [np.random.default_rng((seed, 98, r)).integers(-9, 9, 21_000).astype(np.float32) for r in range(n)]
    drawn = dict.fromkeys(DRAWN, 0)

    def total(parts):
        return fold(parts, ReduceOp.SUM)

    with pt.SymmetricHeap(group, size_bytes=room(40 << 20)) as heap, Collectives(heap) as comm:
        sx, so = heap.empty((4096,), pt.f32), heap.empty((4096,), pt.f32)
        for k in range(rounds):
            kind, count = DRAWN[int(shared.integers(len(DRAWN)))], int(shared.choice(SIZES))
            start, root = int(shared.integers(1000)), int(shared.integers(n))
            drawn[kind] += 1
            delay = own.random()
            if delay < 0.1:
                end = time.perf_counter() + delay * 0.01
                while time.perf_counter() < end:
                    pass
            what = f"round {k}: {kind} of {count}, root {root}"
            if kind.endswith("_v"):
                stress_uneven(comm, kind, count, root, [p[start:] for p in pools], what)
                continue
            each = n if kind in ("reduce_scatter", "all_to_all") else 1
            source = whole if kind == "all_reduce ring" else pools
            parts = [p[start : start + count * each] for p in source]
            mine = slice(me * count, (me + 1) * count)
            if kind == "all_reduce symmetric":
                parts = [p[start : start + 4096] for p in pools]
                sx.copy_from(parts[me])
                comm.all_reduce(sx, so).sync()
                same(so.numpy(), total(parts), what)
                sx.copy_from(np.full(4096, np.nan, np.float32))
                continue
            x = pt.asarray(parts[me], pt.f32)
            if kind == "barrier":
                comm.barrier().sync()
            elif kind == "all_reduce in place":
                comm.all_reduce(x, x).sync()
                same(x.numpy(), total(parts), what)
            elif kind.startswith("all_reduce"):
                chosen = next((a for a in CPU_ALGORITHMS if kind.endswith(a.value)), None)
                chosen = chosen if chosen is not None and usable(chosen, count) else None
                same(comm.all_reduce(x, algorithm=chosen).sync().numpy(), total(parts), what)
            elif kind == "all_gather":
                same(comm.all_gather(x).sync().numpy(), np.stack(parts), what)
            elif kind == "broadcast":
                same(comm.broadcast(x, root=root).sync().numpy(), parts[root], what)
            elif kind == "reduce":
                got = comm.reduce(x, root=root).sync()
                if me == root:
                    same(got.numpy(), total(parts), what)
            elif kind == "reduce_scatter":
                same(comm.reduce_scatter(x).sync().numpy().reshape(-1), total([p[mine] for p in parts]), what)
            else:
                got = comm.all_to_all(x).sync().numpy().reshape(-1)
                same(got, np.concatenate([p[mine] for p in parts]), what)
    return drawn


def stress_uneven(comm, kind, count, root, pools, what):
    """One of the collectives with shares that differ, some of them 0."""
    me, n = comm.group.rank, comm.group.size
    shares = [count * ((r + root) % 3) // 2 for r in range(n)]
    starts = [sum(shares[:r]) for r in range(n)]
    mine = slice(starts[me], starts[me] + shares[me])
    if kind == "all_gather_v":
        got = comm.all_gather_v(pt.asarray(pools[me][: shares[me]], pt.f32), shares).sync()
        same(got.numpy(), np.concatenate([p[:c] for p, c in zip(pools, shares, strict=True)]), what)
    elif kind == "reduce_scatter_v":
        got = comm.reduce_scatter_v(pt.asarray(pools[me][: sum(shares)], pt.f32), shares).sync()
        same(got.numpy(), fold([p[mine] for p in pools], ReduceOp.SUM), what)
    else:
        x = pt.asarray(pools[me][: sum(shares)], pt.f32)
        got = comm.all_to_all_v(x, shares, [shares[me]] * n).sync()
        same(got.numpy(), np.concatenate([p[mine] for p in pools]), what)


# ---------------------------------------------------------------- values


def specials(group, algorithm, rows):
    """`rows[r]` is what rank r gives. The bits of MIN, MAX and SUM that each rank got."""
    results = []
    with Collectives(group) as comm:
        for name in ("f32", "bf16") if algorithm is Algorithm.ONE_SHOT else ("f32",):
            dtype = getattr(pt, name)
            if not usable(algorithm, len(rows[0]), dtype):
                continue
            x = pt.asarray(np.array(rows[group.rank]), dtype)
            for op in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.SUM):
                got = comm.all_reduce(x, op=op, algorithm=algorithm).sync().numpy()
                results.append((name, op.name, got.astype(np.float64).tolist()))
    return results


def random_sums(group, count, algorithm, name):
    """Bytes of a sum whose rounding depends on the order, twice, and of the rank-order sum."""
    dtype = getattr(pt, name)
    parts = [
        np.random.default_rng(r).standard_normal(count).astype(np.float32).astype(dtype.numpy)
        for r in range(group.size)
    ]
    x = pt.asarray(parts[group.rank], dtype)
    with Collectives(group) as comm:
        got = [comm.all_reduce(x, algorithm=algorithm).sync().numpy().tobytes() for _ in range(2)]
    return got, fold(parts, ReduceOp.SUM).tobytes()


# ---------------------------------------------------------------- disagreement


CALLS = {
    "count": lambda comm, r: comm.all_reduce(device_vector(r, 8 - 2 * (r == 1))),
    "count zero": lambda comm, r: comm.all_reduce(device_vector(r, 8 * (r != 1))),
    "dtype": lambda comm, r: comm.all_reduce(device_vector(r, 8, pt.bf16 if r == 1 else pt.f32)),
    "reduction": lambda comm, r: comm.all_reduce(device_vector(r, 8), op=ReduceOp.MAX if r == 1 else ReduceOp.SUM),
    "algorithm": lambda comm, r: comm.all_reduce(
        device_vector(r, 8), algorithm=Algorithm.TWO_SHOT if r == 1 else Algorithm.ONE_SHOT
    ),
    "collective": lambda comm, r: comm.barrier() if r == 1 else comm.all_reduce(device_vector(r, 8)),
    "root": lambda comm, r: comm.broadcast(device_vector(r, 8), root=int(r == 1)),
    "gather count": lambda comm, r: comm.all_gather(device_vector(r, 8 - (r == 1))),
    "scatter count": lambda comm, r: comm.reduce_scatter(device_vector(r, group_size(comm) * (8 - (r == 1)))),
    "flagged count": lambda comm, r: comm.all_reduce(device_vector(r, 8 - (r == 1)), algorithm=Algorithm.FLAGGED),
    "pairs": lambda comm, r: comm.all_to_all_v(
        device_vector(r, group_size(comm) + (r == 1)), [1 + (r == 1), *[1] * (group_size(comm) - 1)], [1] * group_size(comm)
    ),
}  # fmt: skip


def group_size(comm):
    return comm.group.size


def disagrees(group, what, checked):
    """One rank calls otherwise; then, after recovery, all call the same and it is right."""
    n = group.size
    with Collectives(group, checked=checked) as comm:
        first = caught(lambda: CALLS[what](comm, group.rank).sync())
        if not checked:
            wait_until_failed(group)
            group.recover()
        for algorithm in (Algorithm.ONE_SHOT, Algorithm.FLAGGED, Algorithm.TWO_SHOT):
            got = comm.all_reduce(device_vector(group.rank, 8), algorithm=algorithm).sync()
            same(got.numpy(), fold([vector(r, 8) for r in range(n)], ReduceOp.SUM), str(algorithm))
        same(comm.all_gather(device_vector(group.rank, 3)).sync().numpy(), np.stack([vector(r, 3) for r in range(n)]))
    return first


def side_by_side(group):
    """Two communicators in turns, then on two streams at once; one communicator on two streams is refused."""
    me, n = group.rank, group.size
    device = pt.current_device()
    a, b = device.stream("a"), device.stream("b")
    expected = fold([vector(r, 300) for r in range(n)], ReduceOp.SUM)
    with Collectives(group) as one, Collectives(group) as two:
        for k in range(4):
            comm = (one, two)[k % 2]
            same(comm.all_reduce(device_vector(me, 300)).sync().numpy(), expected)
        x, y = device_vector(me, 300), device_vector(me, 300)
        first, second = one.all_reduce(x, x).submit(a), two.all_reduce(y, y).submit(b)
        same(second.wait().numpy(), expected)
        same(first.wait().numpy(), expected)
    return True


def two_streams(group):
    """A communicator that waits for its peers on one stream is refused on another."""
    device = pt.current_device()
    a, b = device.stream("a"), device.stream("b")
    with Collectives(group) as comm:
        x, y = device_vector(group.rank, 8), device_vector(group.rank, 8)
        group.barrier("ready")
        error = None
        if group.rank == 0:
            running = comm.all_reduce(x, x).submit(a)
            error = caught(lambda: comm.all_reduce(y, y).submit(b))
            group.barrier("tried")
            running.wait()
        else:
            group.barrier("tried")
            comm.all_reduce(x, x).sync()
        return error


def subgroups(group):
    """Overlapping groups, each with a communicator and staging of its own, interleaved."""
    evens, ends = group.subgroup(tuple(range(0, group.size, 2))), group.subgroup((group.size - 1, 0))
    comms = [None if sub is None else Collectives(sub) for sub in (group, evens, ends)]
    for k in range(3):
        for sub, comm in zip((group, evens, ends), comms, strict=True):
            if comm is None:
                continue
            got = comm.all_reduce(device_vector(group.rank + k, 100)).sync()
            same(got.numpy(), fold([vector(r + k, 100) for r in sub.world_ranks], ReduceOp.SUM))
    for comm in comms:
        if comm is not None:
            comm.close()
    return True


def life(group):
    """Close twice, use after close, memory given back to the heap."""
    with pt.SymmetricHeap(group, size_bytes=room(16 << 20)) as heap:
        before = heap._arena.in_use
        comm = Collectives(heap)
        x = device_vector(group.rank, 8)
        op = comm.all_reduce(x, x)
        comm.close()
        comm.close()
        errors = [caught(op.sync), caught(lambda: comm.all_reduce(x, x).sync()), caught(lambda: comm.barrier().sync())]
        assert heap._arena.in_use == before
        with Collectives(heap) as again:
            again.barrier().sync()
    return errors


def unequal_communicators(group):
    return caught(lambda: Collectives(group, slot_bytes=1 << (16 + group.rank)))


# ---------------------------------------------------------------- ranks that go away


def every_collective(comm, sx=None):
    """A call of each collective, and of each way to all-reduce, by name. Equal on all ranks; results do not matter.
    `sx`: a symmetric tensor of 30,000 f32 to use."""
    group, n = comm.group, comm.group.size
    count, wide = 30_000, 30_000 * n
    x, y, small = (pt.full((c,), 1 + group.rank, pt.f32) for c in (count, wide, 200))
    shares = [100 * (r + 1) for r in range(n)]
    mine, whole = pt.full((shares[group.rank],), 1, pt.f32), pt.full((sum(shares),), 1, pt.f32)
    sx = sx or comm.heap.zeros((count,), pt.f32)
    # What goes through one slot alone, which is a sixteenth on a GPU.
    short = (Algorithm.FLAGGED, Algorithm.ONE_SHOT) if comm.slot_bytes < 1 << 18 else (Algorithm.FLAGGED,)
    calls = {
        f"all_reduce {a.value}": lambda a=a: comm.all_reduce(small if a in short else x, algorithm=a)
        for a in Algorithm
        if a in CPU_ALGORITHMS
    }
    return calls | {
        "all_reduce in place": lambda: comm.all_reduce(x, x, ReduceOp.MAX, algorithm=Algorithm.PIPELINED),
        "all_reduce symmetric": lambda: comm.all_reduce(sx, sx, ReduceOp.MAX),
        "reduce_scatter": lambda: comm.reduce_scatter(y),
        "all_gather": lambda: comm.all_gather(x),
        "all_to_all": lambda: comm.all_to_all(y),
        "broadcast": lambda: comm.broadcast(x, root=n - 1),
        "reduce": lambda: comm.reduce(x, root=0),
        "barrier": comm.barrier,
        "all_gather_v": lambda: comm.all_gather_v(mine, shares),
        "reduce_scatter_v": lambda: comm.reduce_scatter_v(whole, shares),
        "all_to_all_v": lambda: comm.all_to_all_v(
            y, [100 * r if r != group.rank else wide - 100 * (sum(range(n)) - r) for r in range(n)],
            [100 * group.rank if r != group.rank else wide - 100 * (sum(range(n)) - r) for r in range(n)],
        ),
    }  # fmt: skip


COLLECTIVES = (
    *(f"all_reduce {a.value}" for a in CPU_ALGORITHMS),
    *("all_reduce in place", "all_reduce symmetric", "reduce_scatter", "all_gather", "all_to_all", "broadcast"),
    *("reduce", "barrier", "all_gather_v", "reduce_scatter_v", "all_to_all_v"),
)


def dies(group, victim, kind, folder):
    """The same collective again and again, until `victim` kills itself in the middle of one. Each of the others
    leaves in `folder` what it got and how many seconds after the kill."""
    with pt.SymmetricHeap(group, size_bytes=room(48 << 20)) as heap, Collectives(heap) as comm:
        call = every_collective(comm)[kind]
        for _ in range(3):
            call().sync()
        group.barrier("warm")
        killed = os.path.join(folder, "killed")
        if group.rank == victim:

            def kill():
                with open(killed, "w") as file:
                    file.write(repr(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)

            threading.Timer(0.02, kill).start()
        end = time.monotonic() + 60
        try:
            while time.monotonic() < end:
                call().sync()
        except PeertileError as error:
            now = time.monotonic()
            with open(killed) as file:
                late = now - float(file.read())
            with open(os.path.join(folder, str(group.rank)), "w") as file:
                file.write(repr((type(error).__name__, getattr(error, "rank", None), str(error), late)))
            raise


class Boom(Exception):
    """What a user's code may raise between two collectives."""


def raises_in_each(group, victim):
    """In each collective in turn `victim` raises instead of joining; then all recover and it works again. What each
    call ended with, by name."""
    found = {}
    with pt.SymmetricHeap(group, size_bytes=room(16 << 20)) as heap:
        sx = heap.zeros((30_000,), pt.f32)
        before = heap._arena.in_use
        for kind in COLLECTIVES:
            try:
                with Collectives(heap) as comm:
                    call = every_collective(comm, sx)[kind]
                    call().sync()
                    if group.rank == victim:
                        raise Boom(kind)
                    call().sync()
            except (PeertileError, Boom) as error:
                found[kind] = type(error).__name__, getattr(error, "rank", None), str(error)
            wait_until_failed(group)
            group.recover()
            assert heap._arena.in_use == before, "the closed communicator keeps memory"
            with Collectives(heap) as comm:
                got = comm.all_reduce(device_vector(group.rank, 100)).sync().numpy()
                same(got, fold([vector(r, 100) for r in range(group.size)], ReduceOp.SUM), kind)
    return found


# ---------------------------------------------------------------- kernels of single cases


@pt.kernel
def sum_rounds(out: T.Exclusive, box: T.Mailbox, rounds: T.i32):
    """Rounds inside one launch through a mailbox: the slots alternate by themselves."""
    total = T.zeros(out.tile_shape, T.i64)
    for e in T.range(rounds):
        box.post(T.full((1,), 10 * e + T.rank(), T.i64))
        seen = T.zeros((1,), T.i64)
        for part in box.collect():
            seen += part
        total = total * 3 + seen
    out.store(total)


def short_waits(seconds=1.0):
    return pt_config()._replace(wait_timeout_s=seconds)


def pt_config():
    from peertile.config import config

    return config()


def too_small_for_a_communicator(group):
    """Each kind of communicator, in a heap of ever more bytes until it fits: a failure leaves nothing of it there."""
    kinds = {
        "Collectives": lambda heap: Collectives(heap, programs=1, slot_bytes=8192),
        "FusedProducts": lambda heap: FusedProducts(heap, staging_bytes=1 << 12, workers=1),
        "Experts": lambda heap: Experts(heap, experts=4, rows=64, width=16, top_k=2, dtype=pt.f32, workers=1),
        "RingAttention": lambda heap: RingAttention(heap, staging_bytes=1 << 12, workers=1),
    }
    failed = dict.fromkeys(kinds, 0)
    for name, make in kinds.items():
        for kib in (4, 8, 12, 16, 24, 32, 64, 128, 256, 512, 4096):
            with pt.SymmetricHeap(group, size_bytes=kib << 10) as heap:
                try:
                    with make(heap):
                        break
                except pt.AllocationError:
                    failed[name] += 1
                whole = heap.empty(((kib << 10) - 256,), pt.u8)  # all but what lies behind each object
                assert whole.offset == 0
    return failed


def outlives_its_heap(group):
    """Communicators whose heap is closed before them: one is closed then, one after the group has recovered."""
    heap = pt.SymmetricHeap(group, size_bytes=16 << 20)
    first, second = (Collectives(heap, programs=1, slot_bytes=8192) for _ in range(2))
    heap.close()
    first.close()
    group.barrier("closed")
    if group.rank == 0:
        group.fail("a test")
    while group.failure() is None:
        time.sleep(0)
    group.recover(timeout_s=20)
    try:
        second.all_reduce(pt.ones(3, pt.f32)).sync()
    except PeertileError as error:
        said = type(error).__name__
    second.close()
    group.barrier("in step")
    return said
