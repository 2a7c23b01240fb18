"""Benchmarks of one GPU: gemm, add, softmax, rmsnorm, reduce, attention, launch, graph, compile, against torch.

torch has to be installed: it is the other side. Times of the device are taken by events of each side's own stream, in
rounds that alternate, over several input sets that are together larger than the cache; small work of both sides is
replayed from graphs. Every result is compared with a float64 reference first, in outputs that held NaN before, and NaN
never passes. A limit is the other side's time over the speed that is wanted. No time is asserted.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from peertile.cli import bench_kernels as k
from peertile.creation import empty, from_dlpack, full, zeros
from peertile.dtypes import DType, bf16, f8e4m3, f16, f32
from peertile.errors import UnsupportedError
from peertile.ir.ops import Precision
from peertile.library import layers
from peertile.library.attention import attention as attend
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
    importlib.import_module("torch._dynamo").config.cache_size_limit = 64  # a compilation for each shape
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
        self, name: str, ours: Sequence[Callable[[], DeviceOp[Any]]], others: dict[str, Sequence[Callable[[], Any]]],
        about_us: float, wanted: float,
    ) -> list[Figure]:  # fmt: skip
        """Microseconds of a call, medians, beside the fastest of the others; the calls of a side take turns. All are
        replayed from graphs where a call may take the device less time than it takes the host to enqueue it. `wanted`
        is how many times as fast as the other ours should be."""
        repeat = max(3, min(100, int(20_000 / about_us)))
        sides: dict[str, Callable[[], float]] = {}
        if about_us < 200:
            sides["peertile"] = self._recorded(ours, repeat)
            sides |= {other: self._their_recorded(calls, repeat) for other, calls in others.items()}
        else:
            sides["peertile"] = partial(self._our_us, ours, repeat)
            sides |= {other: partial(self._their_us, calls, repeat) for other, calls in others.items()}
        times: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(ROUNDS):
            for side, run in sides.items():
                times[side].append(run())
        us = {side: statistics.median(values) for side, values in times.items()}
        best = min(others, key=lambda other: us[other])
        return [Figure(name, us["peertile"], "us", ROUNDS, us[best] / wanted, best, us[best])]

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

    def _their_recorded(self, calls: Sequence[Callable[[], Any]], repeat: int) -> Callable[[], float]:
        torch = self.torch
        start, end = self.theirs
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in calls:
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            kept = [calls[n % len(calls)]() for n in range(repeat)]

        def us(_kept: Any = kept) -> float:
            graph.replay()
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            return float(start.elapsed_time(end)) * 1e3 / repeat

        return us

    def check(self, name: str, got: Any, want: Any, bound: float) -> None:
        """AssertionError unless `got` is within `bound` of the float64 `want`, in the norm, and holds no NaN."""
        got = got.double()
        assert not self.torch.isnan(got).any(), f"{name}: NaN in the result"
        error = float((got - want).norm() / want.norm())
        assert error <= bound, f"{name}: relative error {error:.2e}, at most {bound:.0e}"


_TORCH: Final = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "f8e4m3": "float8_e4m3fn"}


def _product(
    b: _Bench, d: DType, m: int, n: int, inner: int, wanted: float, *, tf32: bool = False
) -> list[Figure]:  # fmt: skip
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
        {"cuBLAS by torch": call},
        2 * m * n * inner / 6e8 + 30,
        wanted,
    )
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.cuda.empty_cache()
    return found


def gemm() -> list[Figure]:
    """Products against cuBLAS: squares, few rows, fp8 and tf32."""
    b = _Bench()
    squares = [f for n in (4096, 8192, 16384) for d in (bf16, f16) for f in _product(b, d, n, n, n, 0.98)]
    mean = statistics.geometric_mean(f.median / f.baseline_median for f in squares if f.baseline_median)
    found = [*squares, Figure("gemm.squares.geometric_mean", mean, "of cuBLAS's time", len(squares), limit=1.0)]
    for m in (16, 64, 256):
        found += _product(b, bf16, m, 8192, 8192, 0.97)
    found += _product(b, f8e4m3, 8192, 8192, 8192, 0.92)
    found += _product(b, f32, 8192, 8192, 8192, 0.92, tf32=True)
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
        {"torch.add": [lambda: torch.add(x, y, out=z)]},
        3 * n * d.itemsize / 4e6,
        0.99,
    )


WIDTHS: Final = (1024, 2048, 4096, 8192, 16384)
SHAPES: Final = [(d, rows, width) for d in (f32, bf16) for rows in (4096, 16384) for width in WIDTHS]


ROTATED: Final = 200_000_000
"""Bytes of inputs, and of outputs, that calls take in turn: four times the cache of an H200. torch's graph has an
output for each call; with one for all, ours would find the lines in the cache that it writes over."""


def _rotated(b: _Bench, d: DType, rows: int, width: int) -> tuple[list[Any], list[Tensor]]:
    """Inputs, several and so many that none is found in the cache, and as many outputs of ours, full of NaN."""
    t = getattr(b.torch, _TORCH[d.name])
    count = max(3, -(-ROTATED // (rows * width * d.itemsize)))
    xs = [(b.torch.randn(rows, width, device="cuda") * 4).to(t) for _ in range(count)]
    b.torch.cuda.synchronize()
    return xs, [full((rows, width), math.nan, d) for _ in range(count)]


def softmax() -> list[Figure]:
    """Softmax of rows against torch.compile."""
    b = _Bench()
    compiled = b.torch.compile(lambda x: b.torch.softmax(x, 1), dynamic=False)
    return [figure for shape in SHAPES for figure in _softmax(b, compiled, *shape)]


def _softmax(b: _Bench, compiled: Callable[[Any], Any], d: DType, rows: int, width: int) -> list[Figure]:
    torch, (xs, zs) = b.torch, _rotated(b, d, rows, width)
    ours, name = [b.tensor(x) for x in xs], f"softmax.{d.name}.{rows}x{width}"
    layers.softmax(ours[0], out=zs[0]).sync_on(b.stream)
    b.check(name, torch.from_dlpack(zs[0]), torch.softmax(xs[0].double(), 1), BOUNDS[d.name])
    compiled(xs[0])
    return b.compare(
        name,
        [partial(layers.softmax, x, out=z) for x, z in zip(ours, zs, strict=True)],
        {"torch.compile": [partial(compiled, x) for x in xs]},
        2 * d.itemsize * rows * width / 3e6 + 5,
        1.0,
    )


def rmsnorm() -> list[Figure]:
    """RMSNorm of rows against torch.compile."""
    b = _Bench()
    compiled = b.torch.compile(_norm, dynamic=False)
    return [figure for shape in SHAPES for figure in _rmsnorm(b, compiled, *shape)]


def _exact_norm(x: Any, gain: Any) -> Any:
    return x * (x * x).mean(1, keepdim=True).add(1e-6).rsqrt() * gain


def _norm(x: Any, gain: Any) -> Any:
    return _exact_norm(x.float(), gain.float()).to(x.dtype)


def _rmsnorm(b: _Bench, compiled: Callable[[Any, Any], Any], d: DType, rows: int, width: int) -> list[Figure]:
    torch, (xs, zs) = b.torch, _rotated(b, d, rows, width)
    g = torch.randn(width, device="cuda").to(xs[0].dtype)
    torch.cuda.synchronize()
    gain, ours, name = b.tensor(g), [b.tensor(x) for x in xs], f"rmsnorm.{d.name}.{rows}x{width}"
    layers.rms_norm(ours[0], gain, out=zs[0]).sync_on(b.stream)
    b.check(name, torch.from_dlpack(zs[0]), _exact_norm(xs[0].double(), g.double()), BOUNDS[d.name])
    compiled(xs[0], g)
    return b.compare(
        name,
        [partial(layers.rms_norm, x, gain, out=z) for x, z in zip(ours, zs, strict=True)],
        {"torch.compile": [partial(compiled, x, g) for x in xs]},
        2 * d.itemsize * rows * width / 3e6 + 5,
        1.0,
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
        {"torch.sum": [lambda: torch.sum(x, dtype=torch.float32)]},
        n * d.itemsize / 4e6,
        0.95,
    )


HEADS, HEAD = 16, 128


def attention() -> list[Figure]:
    """Causal attention against the fastest of torch's backends."""
    b = _Bench()
    return [figure for tokens in (4096, 8192, 16384) for figure in _attention(b, tokens)]


def _attention(b: _Bench, tokens: int) -> list[Figure]:
    torch = b.torch
    sets = [
        [torch.randn(1, HEADS, tokens, HEAD, device="cuda").to(torch.bfloat16) for _ in range(3)] for _ in range(2)
    ]  # fmt: skip
    torch.cuda.synchronize()
    ours = [[b.tensor(x) for x in three] for three in sets]
    z, name = full((1, HEADS, tokens, HEAD), math.nan, bf16), f"attention.bf16.causal.1x{HEADS}x{tokens}x{HEAD}"
    attend(*ours[0], causal=True, out=z).sync_on(b.stream)
    got = torch.from_dlpack(z)
    assert not torch.isnan(got).any(), f"{name}: not all was written"
    for head in (0, HEADS - 1):
        q, k, v = (x[0, head].double() for x in sets[0])
        for first in range(0, tokens, 4096):
            score = q[first : first + 4096] @ k.t() / HEAD**0.5
            at = torch.arange(first, first + len(score), device="cuda")[:, None]
            score.masked_fill_(torch.arange(tokens, device="cuda")[None] > at, -math.inf)
            b.check(name, got[0, head, first : first + 4096], torch.softmax(score, -1) @ v, BOUNDS["bf16"])
    kernels: Any = importlib.import_module("torch.nn.attention")

    def call(backend: Any, three: Sequence[Any]) -> Any:
        with kernels.sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(*three, is_causal=True)

    backends = {"cuDNN": kernels.SDPBackend.CUDNN_ATTENTION, "flash": kernels.SDPBackend.FLASH_ATTENTION}
    return b.compare(
        name,
        [partial(attend, *three, causal=True, out=z) for three in ours],
        {f"{other} by torch": [partial(call, backend, three) for three in sets] for other, backend in backends.items()},
        2 * HEADS * tokens**2 * HEAD / 5e8,
        0.9,
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


_COMPILE: Final = """
import importlib, time
import peertile as pt
pt.use_device(pt.open_device(pt.DriverKind.CUDA))
a, c = pt.tensor_spec((8192, 8192), pt.bf16), pt.tensor_spec((8192, 8192), pt.bf16)
gemm = importlib.import_module("peertile.library.gemm")
part = c.partition((128, 256)).persistent(swizzle=8)
begin = time.perf_counter()
gemm.gemm_persistent(part, a, a, BK=64, STAGES=4).compiled()
print((time.perf_counter() - begin) * 1e3)
"""


def compiling() -> list[Figure]:
    """The GEMM's kernel, in a process of its own each, with byte code in place, as an installed package has it: from
    nothing, and from the cache on disk."""
    times: dict[str, list[float]] = {"from_nothing": [], "from_disk": []}
    with tempfile.TemporaryDirectory(prefix="peertile-bench-") as code:
        cached = {"PYTHONPYCACHEPREFIX": code, "PYTHONDONTWRITEBYTECODE": ""}
        for turn in range(4):  # the first one writes the byte code
            with tempfile.TemporaryDirectory(prefix="peertile-bench-") as folder:
                for name in times:
                    done = subprocess.run(
                        [sys.executable, "-c", _COMPILE], env={**os.environ, **cached, "PEERTILE_CACHE_DIR": folder},
                        capture_output=True, text=True, timeout=120, check=True,
                    )  # fmt: skip
                    if turn:
                        times[name].append(float(done.stdout.split()[-1]))
    return [
        Figure(f"compile.gemm.{name}", statistics.median(times[name]), "ms", len(times[name]), limit=limit)
        for name, limit in (("from_nothing", 1500.0), ("from_disk", 15.0))
    ]


CUDA: dict[str, Callable[[], list[Figure]]] = {
    "launch": launch, "graph": graph, "compile": compiling, "gemm": gemm, "add": add, "reduce": reduce,
    "softmax": softmax, "rmsnorm": rmsnorm, "attention": attention,
}  # fmt: skip
