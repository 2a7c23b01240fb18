"""Benchmarks of one GPU: gemm, add, softmax, rmsnorm, reduce, launch, graph, against torch in the same run.

torch has to be installed: it is the other side. Times of the device are taken by events of each side's own stream, in
rounds that alternate, over several input sets that are together larger than the cache; every result is compared with
a float64 reference first, in outputs that held NaN before, and NaN never passes. No time is asserted.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from peertile.cli import bench_kernels as k
from peertile.creation import empty, from_dlpack, full, zeros
from peertile.dtypes import DType, bf16, f8e4m3, f16, f32
from peertile.errors import UnsupportedError
from peertile.ir.ops import Precision
from peertile.library.products import matmul
from peertile.runtime.capture import capture
from peertile.runtime.op import DeviceOp
from peertile.runtime.op import zip as zip_ops
from peertile.runtime.registry import current_device
from peertile.runtime.stream import Event, Stream
from peertile.runtime.tensor import Tensor
from peertile.testing.measure import Figure

__all__ = ["CUDA"]

ROUNDS: Final = 9
BOUNDS: Final = {"f32": 1e-5, "tf32": 2e-3, "f16": 2e-3, "bf16": 8e-3, "f8e4m3": 8e-3}
"""Largest relative error, by the type that the result is rounded to or the factors are kept in."""


def _torch() -> Any:
    if importlib.util.find_spec("torch") is None:
        raise UnsupportedError("bench --device cuda: expected torch, the other side, got none; pip install torch")
    torch: Any = importlib.import_module("torch")
    torch.backends.cuda.matmul.allow_tf32 = False
    return torch


class _Bench:
    """One stream of ours, and the default one of torch, unless there is no other side (`alone`): torch in the process
    makes Python itself slower, which is most of what a launch costs."""

    def __init__(self, *, alone: bool = False) -> None:
        torch: Any = None if alone else _torch()
        self.torch = torch
        self.device = current_device()
        self.stream: Stream = self.device.stream("bench")
        self.marks = Event(self.device), Event(self.device)
        self.theirs = [] if alone else [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def tensor(self, x: Any) -> Tensor:
        """The same memory as a tensor of ours; fp8 travels as bytes, which is what DLPack has for it."""
        return from_dlpack(x)

    def compare(
        self, name: str, ours: Sequence[Callable[[], DeviceOp[Any]]], theirs: Sequence[Callable[[], Any]], other: str,
        about_us: float,
    ) -> list[Figure]:  # fmt: skip
        """Microseconds of a call of each side, medians; the calls of a side take turns. Ours are replayed from a graph
        where a call may take the device less time than it takes the host to enqueue it."""
        repeat = max(3, min(100, int(20_000 / about_us)))
        replay = self._recorded(ours, repeat) if about_us < 200 else None
        us, them = [], []
        for _ in range(ROUNDS):
            us.append(self._our_us(ours, repeat) if replay is None else replay())
            them.append(self._their_us(theirs, repeat))
        return [
            Figure(
                name, statistics.median(us), "us", ROUNDS, baseline=other, baseline_median=statistics.median(them)
            )
        ]  # fmt: skip

    def _recorded(self, calls: Sequence[Callable[[], DeviceOp[Any]]], repeat: int) -> Callable[[], float]:
        """Microseconds of a call within a graph of `repeat` calls."""
        with capture(self.stream, "calls") as scope:
            for n in range(repeat):
                scope.record(calls[n % len(calls)]())
        graph = scope.graph
        start, end = self.marks

        def us() -> float:
            graph.launch().submit(self.stream)
            self.stream.record(start)
            graph.launch().submit(self.stream)
            self.stream.record(end)
            self.stream.sync()
            return self.device.driver.elapsed_ns(start.handle, end.handle) / repeat / 1e3

        return us

    def _our_us(self, calls: Sequence[Callable[[], DeviceOp[Any]]], repeat: int) -> float:
        start, end = self.marks
        for call in calls:  # the device is busy while the rest is enqueued
            call().submit(self.stream)
        self.stream.record(start)
        for n in range(repeat):
            calls[n % len(calls)]().submit(self.stream)
        self.stream.record(end)
        self.stream.sync()
        return self.device.driver.elapsed_ns(start.handle, end.handle) / repeat / 1e3

    def _their_us(self, calls: Sequence[Callable[[], Any]], repeat: int) -> float:
        start, end = self.theirs
        for call in calls:
            call()
        start.record()
        for n in range(repeat):
            calls[n % len(calls)]()
        end.record()
        self.torch.cuda.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / repeat

    def check(self, name: str, got: Any, want: Any, bound: float) -> None:
        """AssertionError unless `got` is within `bound` of the float64 `want`, in the norm, and holds no NaN."""
        got = got.double()
        assert not self.torch.isnan(got).any(), f"{name}: NaN in the result"
        error = float((got - want).norm() / want.norm())
        assert error <= bound, f"{name}: relative error {error:.2e}, at most {bound:.0e}"


_TORCH: Final = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "f8e4m3": "float8_e4m3fn"}


def _product(b: _Bench, d: DType, m: int, n: int, inner: int, *, tf32: bool = False) -> list[Figure]:
    torch = b.torch
    t = getattr(torch, _TORCH[d.name])
    name = f"gemm.{'tf32' if tf32 else d.name}.{m}x{n}x{inner}"
    sets = 3 if n * inner * d.itemsize < 1 << 30 else 1
    a = torch.randn(m, inner, device="cuda").to(t)
    if d is f8e4m3:
        others = [torch.randn(n, inner, device="cuda").to(t).t() for _ in range(sets)]
        one = torch.ones((), device="cuda")
        out_t, out = torch.bfloat16, bf16
        call = [
            lambda x=x: torch._scaled_mm(a, x, scale_a=one, scale_b=one, out_dtype=out_t) for x in others
        ]  # fmt: skip
    else:
        others = [torch.randn(inner, n, device="cuda").to(t) for _ in range(sets)]
        z = torch.empty(m, n, device="cuda", dtype=t)
        out_t, out = t, d
        call = [lambda x=x: torch.matmul(a, x, out=z) for x in others]
    torch.cuda.synchronize()
    ours_a, ours_b = b.tensor(a), [b.tensor(x) for x in others]
    c = full((m, n), math.nan, out)
    precision = Precision.TF32 if tf32 else Precision.IEEE
    torch.backends.cuda.matmul.allow_tf32 = tf32
    matmul(ours_a, ours_b[0], out=c, precision=precision).sync_on(b.stream)
    rows = min(m, 512)
    got = torch.from_dlpack(c)
    assert not torch.isnan(got).any(), f"{name}: not all was written"
    b.check(name, got[:rows], a[:rows].double() @ others[0].double(), BOUNDS["tf32" if tf32 else d.name])
    found = b.compare(
        name,
        [partial(matmul, ours_a, x, c, precision=precision) for x in ours_b],
        call,
        "cuBLAS by torch",
        2 * m * n * inner / 6e8 + 30,
    )
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.cuda.empty_cache()
    return found


def gemm() -> list[Figure]:
    """Products against cuBLAS: squares, few rows, fp8 and tf32."""
    b = _Bench()
    found: list[Figure] = []
    for n in (4096, 8192, 16384):
        for d in (bf16, f16):
            found += _product(b, d, n, n, n)
    for m in (16, 64, 256):
        found += _product(b, bf16, m, 8192, 8192)
    found += _product(b, f8e4m3, 8192, 8192, 8192)
    found += _product(b, f32, 8192, 8192, 8192, tf32=True)
    return found


def add() -> list[Figure]:
    """z = x + y at 2^29 elements."""
    b = _Bench()
    return [figure for d in (f32, bf16) for figure in _add(b, d)]


def _add(b: _Bench, d: DType) -> list[Figure]:
    torch, n = b.torch, 1 << 29
    t = getattr(torch, _TORCH[d.name])
    x, y = torch.randn(n, device="cuda").to(t), torch.randn(n, device="cuda").to(t)
    z = torch.empty_like(x)
    torch.cuda.synchronize()
    ours_x, ours_y, c = b.tensor(x), b.tensor(y), full(n, math.nan, d)
    part = c.partition(2048)
    k.vector_add(part, ours_x, ours_y).sync_on(b.stream)
    assert torch.equal(torch.from_dlpack(c), (x.double() + y.double()).to(t)), f"add.{d}: differs"
    return b.compare(
        f"add.{d.name}.2^29",
        [lambda: k.vector_add(part, ours_x, ours_y)],
        [lambda: torch.add(x, y, out=z)],
        "torch.add",
        3 * n * d.itemsize / 4e6,
    )


SHAPES: Final = [(rows, width) for rows in (4096, 16384) for width in (1024, 4096, 16384)]


def _inputs(b: _Bench, rows: int, width: int) -> list[Any]:
    """So many that none is found in the cache."""
    xs = [b.torch.randn(rows, width, device="cuda") * 4 for _ in range(3 if rows * width < 1 << 27 else 1)]
    b.torch.cuda.synchronize()
    return xs


def softmax() -> list[Figure]:
    """Softmax of rows, f32, against torch.compile."""
    b = _Bench()
    compiled = b.torch.compile(lambda x: b.torch.softmax(x, 1), dynamic=False)
    return [figure for shape in SHAPES for figure in _softmax(b, compiled, *shape)]


def _softmax(b: _Bench, compiled: Callable[[Any], Any], rows: int, width: int) -> list[Figure]:
    torch, xs = b.torch, _inputs(b, rows, width)
    z = full((rows, width), math.nan, f32)
    part, ours = z.partition((1, width)), [b.tensor(x) for x in xs]
    k.softmax(part, ours[0]).sync_on(b.stream)
    b.check(f"softmax.{rows}x{width}", torch.from_dlpack(z), torch.softmax(xs[0].double(), 1), 1e-6)
    compiled(xs[0])
    return b.compare(
        f"softmax.f32.{rows}x{width}",
        [partial(k.softmax, part, x) for x in ours],
        [partial(compiled, x) for x in xs],
        "torch.compile",
        8 * rows * width / 3e6 + 5,
    )


def rmsnorm() -> list[Figure]:
    """RMSNorm of rows, f32, against torch.compile."""
    b = _Bench()
    compiled = b.torch.compile(_norm, dynamic=False)
    return [figure for shape in SHAPES for figure in _rmsnorm(b, compiled, *shape)]


def _norm(x: Any, gain: Any) -> Any:
    return x * (x * x).mean(1, keepdim=True).add(1e-6).rsqrt() * gain


def _rmsnorm(b: _Bench, compiled: Callable[[Any, Any], Any], rows: int, width: int) -> list[Figure]:
    torch, xs = b.torch, _inputs(b, rows, width)
    g = torch.randn(1, width, device="cuda")
    torch.cuda.synchronize()
    z = full((rows, width), math.nan, f32)
    part, gain, ours = z.partition((1, width)), b.tensor(g), [b.tensor(x) for x in xs]
    k.rmsnorm(part, ours[0], gain, 1 / width).sync_on(b.stream)
    b.check(f"rmsnorm.{rows}x{width}", torch.from_dlpack(z), _norm(xs[0].double(), g.double()), 1e-6)
    compiled(xs[0], g)
    return b.compare(
        f"rmsnorm.f32.{rows}x{width}",
        [partial(k.rmsnorm, part, x, gain, 1 / width) for x in ours],
        [partial(compiled, x, g) for x in xs],
        "torch.compile",
        8 * rows * width / 3e6 + 5,
    )


def _total(b: _Bench, x: Tensor) -> Callable[[], DeviceOp[Tensor]]:
    """The sum of x in two passes: a part for each of so many programs, then their sum."""
    programs = 8 * b.device.capabilities.executors
    parts, z = empty(programs, f32), empty(1, f32)
    first, last = parts.partition(1), z.partition(1)
    width = 1 << (programs - 1).bit_length()

    def call() -> DeviceOp[Tensor]:
        whole = k.partial_sums(first, x, B=4096).then(lambda *_: k.whole_sum(last, parts, W=width))
        return whole.map(lambda *_: z)

    return call


def reduce() -> list[Figure]:
    """The sum of 2^29 elements."""
    b = _Bench()
    return [figure for d in (f32, bf16) for figure in _reduce(b, d)]


def _reduce(b: _Bench, d: DType) -> list[Figure]:
    torch, n = b.torch, 1 << 29
    x = torch.rand(n, device="cuda").to(getattr(torch, _TORCH[d.name]))
    torch.cuda.synchronize()
    call = _total(b, b.tensor(x))
    b.check(f"reduce.{d}", torch.from_dlpack(call().sync_on(b.stream)), x.double().sum().reshape(1), 1e-6)
    return b.compare(
        f"reduce.{d.name}.2^29",
        [call],
        [lambda: torch.sum(x, dtype=torch.float32)],
        "torch.sum",
        n * d.itemsize / 4e6,
    )


def _host_us(call: Callable[[], Any], count: int, end: Callable[[], Any]) -> float:
    """Median over rounds of the host's microseconds for one of `count` calls."""
    times = []
    for _ in range(ROUNDS + 2):
        begin = time.perf_counter_ns()
        for _ in range(count):
            call()
        times.append((time.perf_counter_ns() - begin) / count / 1e3)
        end()
    return statistics.median(times[2:])


def launch() -> list[Figure]:
    """Host time of a small kernel, building included: submitted, in a chain (`then`, and `zip`, which one compiled loop
    submits), awaited, synchronised."""
    b = _Bench(alone=True)
    x, z = zeros(256, f32), zeros(256, f32)
    part = z.partition(256)

    def op() -> DeviceOp[Any]:
        return k.vector_add(part, x, x)

    op().sync_on(b.stream)

    def chain() -> None:
        whole: Any = op()
        for _ in range(49):
            whole = whole.then(lambda *_: op())
        whole.submit(b.stream)

    def together() -> None:
        zip_ops(*[op() for _ in range(50)]).submit(b.stream)

    async def awaited() -> float:
        times = []
        for _ in range(300):
            begin = time.perf_counter_ns()
            await op()
            times.append((time.perf_counter_ns() - begin) / 1e3)
        return statistics.median(times)

    sync = _host_us(lambda: op().sync_on(b.stream), 200, lambda: None)
    return [
        Figure("launch.submit", _host_us(lambda: op().submit(b.stream), 100, b.stream.sync), "us", ROUNDS, limit=9.0),
        Figure("launch.chain_of_50", _host_us(chain, 2, b.stream.sync) / 50, "us", ROUNDS, limit=5.0),
        Figure("launch.zip_of_50", _host_us(together, 2, b.stream.sync) / 50, "us", ROUNDS, limit=5.0),
        Figure("launch.sync", sync, "us", ROUNDS),
        Figure("launch.await", asyncio.run(awaited()), "us", 300, limit=1.2 * sync),
    ]


def graph() -> list[Figure]:
    """Replay of 500 small kernels, by events."""
    b = _Bench(alone=True)
    x, z = zeros(256, f32), zeros(256, f32)
    part, count = z.partition(256), 500
    k.vector_add(part, x, x).sync_on(b.stream)
    with capture(b.stream, "small kernels") as scope:
        for _ in range(count):
            scope.record(k.vector_add(part, x, x))
    whole = scope.graph
    times = []
    for _ in range(ROUNDS):
        whole.launch().sync_on(b.stream)
        start, end = b.marks
        b.stream.record(start)
        whole.launch().submit(b.stream)
        b.stream.record(end)
        b.stream.sync()
        times.append(b.device.driver.elapsed_ns(start.handle, end.handle) / count / 1e3)
    return [Figure("graph.small_kernel", statistics.median(times), "us", ROUNDS, limit=1.3)]


CUDA: dict[str, Callable[[], list[Figure]]] = {
    "gemm": gemm, "add": add, "softmax": softmax, "rmsnorm": rmsnorm, "reduce": reduce, "launch": launch,
    "graph": graph,
}  # fmt: skip
