"""The host side of a launch: building, submitting, chains, graphs, awaiting, overlap, memory. Asserts no time.

Every figure has its other side in the same run: a loop of compiled code that calls the same native function from one
thread, `sync` beside `await`, or the work alone beside the work and the host together.
"""

from __future__ import annotations

import asyncio
import ctypes
import statistics
import time
from collections.abc import Callable
from typing import Any, cast

import numpy as np

import peertile.language as T
from peertile.backends.cpu import jit
from peertile.comm.group import Group, RankModel
from peertile.comm.launcher import spawn
from peertile.comm.symmetric import SymmetricHeap
from peertile.creation import asarray, empty
from peertile.dtypes import f32, u32
from peertile.errors import UnsupportedError
from peertile.kernel import LaunchOp, kernel
from peertile.library.collectives import Collectives
from peertile.op import fill, set_signal, wait_eq
from peertile.runtime.future import DeviceFuture
from peertile.runtime.op import zip as zip_ops
from peertile.runtime.reactor import reactor
from peertile.runtime.registry import current_device
from peertile.runtime.stream import Stream, live_submissions
from peertile.testing.measure import Figure

__all__ = ["bench_pipeline"]

CHAIN = 100
CHAIN_US, REPLAY_US = 10.0, 1.0
IN_FLIGHT = 10_000
MANY = 1_000_000
HOST_US = 1000.0
CALLS = 20
"""All-reduces in one graph."""


@kernel
def spin(z: T.Exclusive, steps: T.i32) -> None:
    """As many dependent steps of arithmetic as asked for: a kernel that takes as long as one likes."""
    tile = z.load()
    for _ in T.range(steps):
        tile = tile * 0.5 + 1.0
    z.store(tile)


_LOOP = """
define i64 @peertile_bench_loop(ptr %f, ptr %args, ptr %ctx, ptr %scratch, i64 %times) {
entry:
  br label %head
head:
  %k = phi i64 [ 0, %entry ], [ %next, %body ]
  %more = icmp slt i64 %k, %times
  br i1 %more, label %body, label %exit
body:
  call void %f(ptr %args, ptr %ctx, i64 0, i64 1, ptr %scratch)
  %next = add i64 %k, 1
  br label %head
exit:
  ret i64 0
}
"""


class NativeLoop:
    """Calls the compiled kernel of a launch of one program, over and over, from one thread and with no runtime."""

    def __init__(self, op: LaunchOp) -> None:
        binary = op.compiled().binary
        entry = f"{binary.entry}_range"
        function = jit.load_object(binary.payload, [entry])[entry]
        address = jit.load_object(jit.compile_text(_LOOP), ["peertile_bench_loop"])["peertile_bench_loop"]
        self._loop = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_void_p] * 4, ctypes.c_int64)(address)
        args = b"".join(a.words for a in op.bound.arguments)
        # As the driver lays them out: everything at the begin of a cache line.
        self._memory = np.zeros(64 + len(args) // 8 + 128 + binary.scratch_bytes // 8, np.int64)
        base = -self._memory.ctypes.data % 64 // 8
        words, context, block = base, base + 32, base + 64
        scratch = block + (len(args) // 8 + 7) // 8 * 8
        at = self._memory.ctypes.data
        self._memory[block : block + len(args) // 8] = np.frombuffer(args, np.int64)
        self._memory[context : context + 10] = (
            1,
            1,
            1,
            1,
            at + 8 * words,
            at + 8 * words,
            1 << 40,
            0,
            at + 8 * words,
            0,
        )
        self._call = (function, *(at + 8 * word for word in (block, context, scratch)))

    def __call__(self, times: int) -> None:
        self._loop(*self._call, times)


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _paired(calls: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Median of what each call returns, one of each per round."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            found[name].append(call())
    return {name: statistics.median(values) for name, values in found.items()}


def _steps_for(microseconds: float) -> int:
    """How many steps of `spin` take so long, on this machine now."""
    z = empty((256,), f32)
    probe = 4096
    loop = NativeLoop(spin(z.partition(256), probe))
    loop(10)
    best = min(_timed(lambda: loop(20)) / 20 for _ in range(20))
    return max(1, round(probe * microseconds * 1e-6 / best))


def _build_and_submit(stream: Stream) -> list[Figure]:
    """Nanoseconds of making a lazy launch, and of enqueueing it; the stream works meanwhile."""
    x, z = asarray(np.ones(256, np.float32)), empty((256,), f32)
    calls, rounds = 200, 60

    def build() -> list[LaunchOp]:
        return [spin(z.partition(256), 1) for _ in range(calls)]

    spin(z.partition(256), 1).sync_on(stream)
    built, submitted, synced = [], [], []
    for _ in range(rounds):
        start = time.perf_counter()
        ops = build()
        middle = time.perf_counter()
        futures = [op.submit(stream) for op in ops]
        end = time.perf_counter()
        stream.sync()
        del futures
        start2 = time.perf_counter()
        for _ in range(calls):
            spin(z.partition(256), 1).sync_on(stream)
        synced.append((time.perf_counter() - start2) / calls)
        built.append((middle - start) / calls)
        submitted.append((end - middle) / calls)
    del x
    sync_us = statistics.median(synced) * 1e6
    medians = {"build": (built, 4.0), "submit": (submitted, 5.0)}
    return [
        Figure(
            f"pipeline.{name}",
            statistics.median(values) * 1e6,
            "us",
            rounds * calls,
            limit=limit,
            baseline="build and sync_on",
            baseline_median=sync_us,
        )
        for name, (values, limit) in medians.items()
    ]


def _chains(stream: Stream) -> list[Figure]:
    """A chain of kernels, built before, against a compiled loop over the same native function; so is a graph."""
    z = empty((256,), f32)
    part = z.partition(256)
    figures = []
    steps = _steps_for(CHAIN_US)
    native = NativeLoop(spin(part, steps))

    def zipped() -> float:
        op = zip_ops(*[spin(part, steps) for _ in range(CHAIN)])
        return _timed(lambda: op.sync_on(stream))

    def chained() -> float:
        first, *others = [spin(part, steps) for _ in range(CHAIN)]
        op: Any = first
        for other in others:
            op = op.then(lambda *_, other=other: other)
        return _timed(lambda: op.sync_on(stream))

    calls = {"zip": zipped, "then": chained, "native": lambda: _timed(lambda: native(CHAIN))}
    repeats = 61
    median = _paired(calls, repeats)
    loop_us = median["native"] * 1e6
    for name in ("then", "zip"):
        figures.append(
            Figure(
                f"pipeline.chain.{name}",
                median[name] * 1e6,
                "us",
                repeats,
                limit=1.3 * loop_us,
                baseline=f"compiled loop, {CHAIN} kernels of {loop_us / CHAIN:.1f} us",
                baseline_median=loop_us,
            )
        )
    steps = _steps_for(REPLAY_US)
    native = NativeLoop(spin(part, steps))
    graph = zip_ops(*[spin(part, steps) for _ in range(CHAIN)]).graph_on(stream)
    repeats = 501
    median = _paired(
        {
            "graph": lambda: _timed(lambda: graph.launch().sync_on(stream)),
            "native": lambda: _timed(lambda: native(CHAIN)),
        },
        repeats,
    )
    loop_us = median["native"] * 1e6
    figures.append(
        Figure(
            "pipeline.graph.replay",
            median["graph"] * 1e6,
            "us",
            repeats,
            limit=1.1 * loop_us,
            baseline=f"compiled loop, {CHAIN} kernels of {loop_us / CHAIN:.2f} us",
            baseline_median=loop_us,
        )
    )
    return figures


def _reduce_rank(group: Group) -> dict[str, float]:
    """Seconds of a 1 KiB all-reduce on one rank: in a graph of many, in a graph of its own, and not in a graph."""
    found = {}
    with Collectives(group) as comm, SymmetricHeap(group, size_bytes=1 << 16) as heap:
        x, out = heap.empty((256,), f32), heap.empty((256,), f32)
        x.copy_from(np.full(256, 1.0 + group.rank, np.float32))
        stream = current_device().stream("all-reduce")

        def reduce() -> Any:
            return comm.all_reduce(x, out)

        reduce().sync_on(stream)
        many = zip_ops(*[reduce() for _ in range(CALLS)]).graph_on(stream)
        one = reduce().graph_on(stream)
        calls: dict[str, tuple[Callable[[], object], int]] = {
            "many": (lambda: many.launch().sync_on(stream), CALLS),
            "one": (lambda: one.launch().sync_on(stream), 1),
            "eager": (lambda: reduce().sync_on(stream), 1),
        }
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(15):
            for name, (call, count) in calls.items():
                group.barrier("bench")
                for _ in range(10):
                    call()
                batch = 400 // count
                start = time.perf_counter()
                for _ in range(batch):
                    call()
                times[name].append((time.perf_counter() - start) / (batch * count))
        assert (out.numpy() == group.size * (group.size + 1) / 2).all(), "sums differ"
        found = {name: statistics.median(values) for name, values in times.items()}
    return found


def _all_reduce() -> list[Figure]:
    """Two ranks as processes."""
    own = spawn(_reduce_rank, 2, (), model=RankModel.PROCESSES, timeout_s=60.0)[0]
    return [
        Figure(
            f"pipeline.allreduce.1KiB.{name}",
            own[key] * 1e6,
            "us",
            15,
            limit=limit,
            baseline="all-reduce without a graph",
            baseline_median=own["eager"] * 1e6,
        )
        for name, key, limit in ((f"graph_of_{CALLS}", "many", 3.0), ("graph_of_1", "one", None))
    ]


def _awaiting() -> list[Figure]:
    """`await` beside `sync`, of a launch that fits the default spin; then very many futures at once."""
    z = empty((256,), f32)

    async def main() -> tuple[float, float]:
        awaited, synced = [], []
        for k in range(3000):
            start = time.perf_counter()
            await spin(z.partition(256), 1)
            middle = time.perf_counter()
            spin(z.partition(256), 1).sync()
            if k >= 200:
                awaited.append(middle - start)
                synced.append(time.perf_counter() - middle)
        return statistics.median(awaited), statistics.median(synced)

    latency, sync = asyncio.run(main())
    figures = [
        Figure(
            "pipeline.await",
            latency * 1e6,
            "us",
            2800,
            limit=1.3 * sync * 1e6,
            baseline="sync",
            baseline_median=sync * 1e6,
        )
    ]

    stream, other = current_device().stream("held"), current_device().stream("release")
    word = empty((1,), u32)

    async def one(future: DeviceFuture[Any]) -> None:
        await future

    async def crowd() -> None:
        """Nothing runs before every future is awaited: more of them than there are slots."""
        await fill(word, 0)
        hold = wait_eq(word, 1).submit(stream)
        futures = [spin(z.partition(256), 1).submit(stream) for _ in range(IN_FLIGHT)]
        tasks = [asyncio.ensure_future(one(future)) for future in (cast("DeviceFuture[Any]", hold), *futures)]
        await asyncio.sleep(0)
        await set_signal(word, 1).submit(other)
        await asyncio.gather(*tasks)

    def settled() -> int:
        live_submissions()
        return current_device().memory().in_use

    asyncio.run(crowd())
    before = settled()
    seconds = [_timed(lambda: asyncio.run(crowd())) for _ in range(3)]
    grown = settled() - before
    end = time.monotonic() + 5.0
    found = reactor()
    while not found.is_parked and time.monotonic() < end:
        time.sleep(0.001)
    figures += [
        Figure("pipeline.futures", statistics.median(seconds) / IN_FLIGHT * 1e6, "us", 3 * IN_FLIGHT),
        Figure("pipeline.futures.device_memory_grown", grown, "bytes", 3, limit=0.0),
        Figure("pipeline.futures.reactor_not_parked", float(not found.is_parked), "count", 1, limit=0.0),
    ]
    return figures


def _overlap(stream: Stream) -> list[Figure]:
    """How much of the host's work between two replays is not hidden behind the device's."""
    z = empty((256,), f32)
    steps = _steps_for(20.0)
    graph = zip_ops(*[spin(z.partition(256), steps) for _ in range(CHAIN)]).graph_on(stream)

    def host() -> None:
        end = time.perf_counter() + HOST_US * 1e-6
        while time.perf_counter() < end:
            pass

    def together() -> None:
        future = graph.launch().submit(stream)
        host()
        future.wait()

    repeats = 101
    median = _paired(
        {
            "device": lambda: _timed(lambda: graph.launch().submit(stream).wait()),
            "together": lambda: _timed(together),
        },
        repeats,
    )
    exposed = (median["together"] - median["device"]) * 1e6
    return [
        Figure(
            "pipeline.overlap.exposed",
            max(exposed, 0.0),
            "us",
            repeats,
            limit=0.1 * HOST_US,
            baseline=f"host work between replays of {median['device'] * 1e6:.0f} us",
            baseline_median=HOST_US,
        )
    ]


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * 4096
    except OSError:
        raise UnsupportedError("resident memory: expected /proc/self/statm, which this system lacks") from None


def _very_many(stream: Stream) -> list[Figure]:
    """A million operations in a loop, most of them in flight beside others: memory of the device and the process."""
    z = empty((256,), f32)

    def loop(count: int) -> None:
        future = None
        for k in range(count):
            future = spin(z.partition(256), 1).submit(stream)
            if k % 256 == 255:
                future.wait()
        if future is not None:
            future.wait()

    loop(MANY // 20)
    device, process = current_device().memory().in_use, _resident_bytes()
    seconds = _timed(lambda: loop(MANY))
    grown = current_device().memory().in_use - device
    return [
        Figure("pipeline.million.each", seconds / MANY * 1e6, "us", MANY),
        Figure("pipeline.million.device_memory_grown", grown, "bytes", MANY, limit=0.0),
        Figure("pipeline.million.process_memory_grown", (_resident_bytes() - process) / 2**20, "MiB", MANY, limit=2.0),
    ]


def bench_pipeline() -> list[Figure]:
    """What the host costs: building and submitting, chains, replays, awaiting, overlap, and memory over many calls."""
    stream = current_device().stream("pipeline")
    return [
        *_build_and_submit(stream),
        *_chains(stream),
        *_all_reduce(),
        *_awaiting(),
        *_overlap(stream),
        *_very_many(stream),
    ]
