"""Check the language and the runtime on a GPU: `PYTHONPATH=src python3 benchmarks/device/check_cuda_language.py`.

Kernels through the public API against numpy, faults by class and line, streams, graphs and futures, random kernels
against their meaning, what a launch costs, and products of matrices against torch. Every step is a process of its own
with a bound, and every part of a step is guarded, so that nothing that fails or hangs hides anything else. Prints one
JSON object; under 4 minutes. Needs cuda-bindings, triton, numpy and ml_dtypes; torch for the products; pytest for the
tests of the package.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import io
import json
import math
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import numpy as np  # noqa: E402

import peertile as pt  # noqa: E402
import peertile.language as T  # noqa: E402

TOTAL_S = 230.0
Json = dict[str, Any]
Array = Any


def attempt(function: Callable[[], Any]) -> Any:
    """What a part of a step gives, or what it raised."""
    try:
        return function()
    except BaseException as error:
        last = [line.strip() for line in traceback.format_exc().splitlines() if line.startswith("  File ")]
        return {"error": f"{type(error).__name__}: {str(error)[:700]}", "at": last[-4:]}


def parts(table: dict[str, Callable[[], Any]]) -> Json:
    """Each part of a step, told as it ends, so that a process that dies leaves what it did."""
    found: Json = {}
    for name, function in table.items():
        begin = time.perf_counter()
        outcome = attempt(function)
        found[name] = "ok" if outcome is None else outcome
        print(json.dumps({"part": name, "found": found[name], "s": round(time.perf_counter() - begin, 2)}), flush=True)
    return found


def gpu() -> pt.Device:
    kind = os.environ.get("PEERTILE_CHECK_DEVICE", "cuda")  # the script itself is tried on cpu
    device = pt.open_device(pt.DriverKind(kind))
    pt.use_device(device)
    return device


def random(*shape: int, seed: int = 1) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def close(got: Array, want: Array, rtol: float, atol: float = 0.0) -> None:
    np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(want, np.float64), rtol=rtol, atol=atol)


# ---------------------------------------------------------------- kernels


@pt.kernel
def vector_add(z: T.Exclusive, x: T.Shared, y: T.Shared) -> None:
    z.store(x.load_like(z) + y.load_like(z))


@pt.kernel
def scale(z: T.Exclusive, x: T.Shared, by: T.f32, plus: T.i32, TWICE: T.Const[bool] = False) -> None:
    value = x.load_like(z) * by + plus.astype(T.f32)
    if TWICE:
        value = value + value
    z.store(value)


@pt.kernel
def chain(z: T.Exclusive, x: T.Shared, y: T.Shared) -> None:
    a, b = x.load_like(z), y.load_like(z)
    z.store(T.exp(a * b - a) * 0.5 + b)


@pt.kernel
def softmax(z: T.Exclusive, x: T.Shared, N: T.Const[int]) -> None:
    row = x.load((T.program_id(0), 0), z.tile_shape, padding=T.Padding.NEG_INF)
    weight = T.exp(row - T.max(row, axis=1, keepdims=True))
    z.store(weight / T.sum(weight, axis=1, keepdims=True))


@pt.kernel
def row_softmax(z: T.Exclusive, x: T.Shared) -> None:
    row = x.load_like(z)
    weight = T.exp(row - T.max(row, axis=1, keepdims=True))
    z.store(weight / T.sum(weight, axis=1, keepdims=True))


@pt.kernel
def row_sums(z: T.Exclusive, x: T.Shared, W: T.Const[int]) -> None:
    total = T.zeros((z.tile_shape[0],), T.f32)
    m = T.program_id(0)
    for k in T.range(x.num_tiles((z.tile_shape[0], W))[1]):
        total = total + T.sum(x.load((m, k), (z.tile_shape[0], W)), axis=1)
    z.store(total)


@pt.kernel
def matmul(c: T.Exclusive, a: T.Shared, b: T.Shared, BK: T.Const[int] = 64) -> None:
    for tile in c.tiles():
        m, n = tile.index
        BM, BN = tile.tile_shape
        acc = T.zeros((BM, BN), T.f32)
        for k in T.range(a.num_tiles((BM, BK))[1], stages=3):
            acc = T.mma(a.load((m, k), (BM, BK)), b.load((k, n), (BK, BN)), acc)
        tile.store(acc.astype(c.dtype))


@pt.kernel
def positive(z: T.Exclusive, x: T.Shared) -> None:
    value = x.load_like(z)
    T.assert_(T.min(value, axis=0) > 0, "x must be positive")  # noqa: PT009
    z.store(value)


@pt.kernel
def beyond(z: T.Exclusive, x: T.Shared, i: T.i64) -> None:
    z.store(x.load((i,), z.tile_shape))


@pt.kernel
def talk(z: T.Exclusive, x: T.Shared) -> None:
    T.print_("x is", x.load_like(z), T.program_id(0))
    z.store(x.load_like(z))


# ---------------------------------------------------------------- steps


def step_info() -> Json:
    begin = time.perf_counter()
    device = gpu()
    found: Json = {"open_s": round(time.perf_counter() - begin, 3), "device": device.name, "target": device.target}
    found["capabilities"] = {k: str(v) for k, v in device.capabilities._asdict().items()}
    found["persistent_programs"] = device.persistent_programs
    x = pt.asarray(random(1000))
    z = pt.zeros(1000, pt.f32)
    for name in ("first_compile_s", "second_s"):
        begin = time.perf_counter()
        vector_add(z.partition(256), x, x).sync()
        found[name] = round(time.perf_counter() - begin, 4)
    close(z.numpy(), 2 * x.numpy(), 0)
    again = pt.kernel(vector_add.fn)
    begin = time.perf_counter()
    again(z.partition(256), x, x).sync()
    found["from_cache_s"] = round(time.perf_counter() - begin, 4)
    found["stages"] = attempt(lambda: sorted(again(z.partition(256), x, x).compiled().compiled.stages()))
    found["memory"] = str(device.memory())
    return found


def step_language() -> Json:
    device = gpu()

    def additions() -> None:
        for d, rtol in ((pt.f32, 0), (pt.f64, 0), (pt.f16, 0), (pt.bf16, 0), (pt.i32, 0), (pt.u8, 0)):
            for n in (1, 255, 256, 100_003):
                values = random(n) * 20
                x, y = pt.asarray(values, d), pt.asarray(values[::-1].copy(), d)
                z = pt.zeros(n, d)
                vector_add(z.partition(256), x, y).sync()
                with np.errstate(all="ignore"):
                    want = (x.numpy() + y.numpy()).astype(d.numpy)
                close(z.numpy(), want, rtol)

    def scalars() -> None:
        x, z = pt.asarray(random(1000)), pt.zeros(1000, pt.f32)
        for twice in (False, True):
            scale(z.partition(128), x, 2.5, -3, TWICE=twice).sync()
            close(z.numpy(), (x.numpy() * np.float32(2.5) - 3) * (2 if twice else 1), 1e-6, 1e-6)

    def views() -> None:
        a = random(20, 30)
        x, z = pt.asarray(a), pt.zeros((20, 30), pt.f32)
        view = z[4:14:1, 0:12]
        scale(view.partition((4, 4)), x, 2.0, 0).sync()
        want = np.zeros((20, 30), np.float32)
        want[4:14, 0:12] = a[:10, :12] * 2
        close(z.numpy(), want, 0)

    def creation() -> None:
        close(pt.arange(5).numpy(), range(5), 0)
        close(pt.eye(3).numpy(), np.eye(3), 0)
        close(pt.linspace(0, 1, 5).numpy(), np.linspace(0, 1, 5), 1e-6)
        assert 0 <= pt.rand(1000, seed=1).numpy().min() <= pt.rand(1000, seed=1).numpy().max() < 1
        assert abs(pt.randn(100_000, seed=1).numpy().mean()) < 0.02
        assert pt.full((3, 4), 7, pt.i8).numpy().tolist() == [[7] * 4] * 3
        assert pt.full(9, 2.5, pt.f64).numpy().tolist() == [2.5] * 9
        a = random(100, 7)
        x = pt.asarray(a)
        close(pt.dup(x).numpy(), a, 0)
        close(pt.convert(x, pt.bf16).numpy(), a, 4e-3)
        x.copy_from(a * 2)
        close(x.numpy(), a * 2, 0)

    def chained() -> None:
        a, b = random(5000), random(5000, seed=2)
        z = pt.zeros(5000, pt.f32)
        chain(z.partition(1024), pt.asarray(a), pt.asarray(b)).sync()
        wide = a.astype(np.float64), b.astype(np.float64)
        close(z.numpy(), np.exp(wide[0] * wide[1] - wide[0]) * 0.5 + wide[1], 1e-5, 1e-5)

    def softmaxes() -> None:
        for rows, n in ((17, 1000), (64, 1024), (5, 4096), (3, 8192)):
            x = random(rows, n) * 4
            width = 1 << (n - 1).bit_length()
            z = pt.zeros((rows, n), pt.f32)
            softmax(z.partition((1, width)), pt.asarray(x), N=n).sync()
            e = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
            close(z.numpy(), e / e.sum(1, keepdims=True), 1e-5, 1e-9)

    def sums() -> None:
        x = random(300, 1000)
        z = pt.zeros(300, pt.f32)
        row_sums(z.partition(64), pt.asarray(x), W=128).sync()
        close(z.numpy(), x.astype(np.float64).sum(1), 1e-4, 1e-4)

    def product(d: pt.DType, tile: tuple[int, int]) -> Callable[[], Any]:
        def run() -> Any:
            worst = 0.0
            bound = {"f32": 2e-6, "f16": 2e-3, "bf16": 1e-2}[d.name]
            for m, n, k in ((256, 256, 256), (515, 700, 300), (64, 1000, 40), (1, 8, 8)):
                a, b = pt.asarray(random(m, k), d), pt.asarray(random(k, n, seed=2), d)
                c = pt.full((m, n), math.nan, d)
                matmul(c.partition(tile).persistent(swizzle=8), a, b).sync()
                want = a.numpy().astype(np.float64) @ b.numpy().astype(np.float64)
                error = np.linalg.norm(c.numpy().astype(np.float64) - want) / np.linalg.norm(want)
                assert error < bound, (m, n, k, float(error))
                worst = max(worst, float(error))
            return {"relative_error": f"{worst:.2e}"}

        return run

    def prints() -> None:
        said = io.StringIO()
        x, z = pt.asarray(np.arange(8, dtype=np.float32)), pt.zeros(8, pt.f32)
        with contextlib.redirect_stdout(said):
            talk(z.partition(4), x).sync()
        assert sorted(said.getvalue().splitlines()) == [
            "[program 0] x is [0., 1., 2., 3.] 0", "[program 1] x is [4., 5., 6., 7.] 1",
        ], said.getvalue()  # fmt: skip

    def far_strides() -> Any:
        """Extents that bulk copies cannot take: an empty axis of a product's input."""
        a, b, c = pt.zeros((8, 0), pt.bf16), pt.zeros((0, 64), pt.bf16), pt.full((8, 64), 3, pt.bf16)
        matmul(c.partition((64, 64)).persistent(), a, b).sync()
        assert not c.numpy().astype(np.float32).any()

    return parts(
        {
            "additions": additions, "scalars": scalars, "views": views, "creation": creation, "chained": chained,
            "softmaxes": softmaxes, "sums": sums, "matmul_bf16": product(pt.bf16, (128, 256)),
            "matmul_f16": product(pt.f16, (128, 128)), "matmul_f32": product(pt.f32, (64, 64)), "prints": prints,
            "empty_axis": far_strides, "closed": device.close,
        }
    )  # fmt: skip


def step_faults() -> Json:
    device = gpu()

    def line(kernel: Any, offset: int) -> int:
        first: int = kernel.fn.__code__.co_firstlineno
        return first + offset

    def fails(kind: type[Exception], run: Callable[[], Any], text: str) -> Any:
        try:
            run()
        except kind as error:
            if text not in str(error):
                raise AssertionError(str(error)) from error
            return error
        raise AssertionError(f"expected {kind.__name__}, got no error")

    def asserted() -> Any:
        values = np.ones(1024, np.float32)
        values[700] = -1
        x, z = pt.asarray(values), pt.zeros(1024, pt.f32)
        error = fails(pt.KernelAssert, lambda: positive(z.partition(256), x).sync(), "x must be positive")
        assert (error.place.program, error.place.loc.line) == (2, line(positive, 3)), error.place
        x.copy_from(np.ones(1024, np.float32))
        positive(z.partition(256), x).sync()  # the stream goes on, and so does the context
        assert z.numpy().tolist() == [1.0] * 1024
        return {"text": str(error)[:300]}

    def out_of_bounds() -> Any:
        x, z = pt.asarray(random(1024)), pt.zeros(256, pt.f32)
        beyond(z.partition(256), x, 3).sync()
        close(z.numpy(), x.numpy()[768:], 0)
        error = fails(pt.OutOfBounds, lambda: beyond(z.partition(256), x, 4).sync(), "got 4, limit 4")
        assert error.place.loc.line == line(beyond, 2), error.place
        return {"text": str(error)[:300]}

    def timeout() -> Any:
        word = pt.zeros(1, pt.u32)
        begin = time.perf_counter()
        error = fails(pt.WaitTimeout, lambda: pt.op.wait_eq(word, 1, timeout_s=0.2).sync(), "last seen 0")
        return {"text": str(error)[:200], "s": round(time.perf_counter() - begin, 3)}

    def skipped() -> None:
        stream = device.stream("failing")
        x, z = pt.asarray(-np.ones(256, np.float32)), pt.zeros(256, pt.f32)
        future = positive(z.partition(256), x).submit(stream)
        fails(pt.DeviceFault, lambda: future.wait(10), "x must be positive")
        x.copy_from(np.ones(256, np.float32))
        positive(z.partition(256), x).sync_on(stream)

    return parts({"assert": asserted, "bounds": out_of_bounds, "timeout": timeout, "submitted": skipped})


def step_runtime() -> Json:
    device = gpu()

    def signals() -> None:
        word, a, b = pt.zeros(1, pt.u32), device.stream("a"), device.stream("b")
        x, z = pt.asarray(random(256)), pt.zeros(256, pt.f32)
        vector_add.warm_up(z.partition(256), x, x)  # loading a module may wait for what runs
        held = pt.op.wait_eq(word, 1, timeout_s=10).submit(a)
        future = vector_add(z.partition(256), x, x).submit(a)
        assert not a.is_idle()
        pt.op.set_signal(word, 1).sync_on(b)
        held.wait(10)
        future.wait(10)
        close(z.numpy(), 2 * x.numpy(), 0)

    def many() -> None:
        streams = [device.stream(f"s{k}") for k in range(4)]
        x = pt.asarray(random(100_000))
        outs = [pt.zeros(100_000, pt.f32) for _ in range(16)]
        futures = [vector_add(z.partition(1024), x, x).submit(streams[k % 4]) for k, z in enumerate(outs)]
        for future in futures:
            future.wait(10)
        for z in outs:
            close(z.numpy(), 2 * x.numpy(), 0)

    def awaited() -> None:
        x, z = pt.asarray(random(1000)), pt.zeros(1000, pt.f32)

        async def main() -> None:
            for _ in range(20):
                await vector_add(z.partition(256), x, x)

        asyncio.run(main())
        close(z.numpy(), 2 * x.numpy(), 0)

    def graphs() -> None:
        stream = device.stream("captured")
        x, y, z = pt.asarray(random(1000)), pt.zeros(1000, pt.f32), pt.zeros(1000, pt.f32)
        with pt.capture(stream, "two adds") as scope:
            scope.record(vector_add(y.partition(256), x, x))
            scope.record(vector_add(z.partition(256), y, x))
        graph = scope.graph
        for _ in range(3):
            graph.launch().sync_on(stream)
        close(z.numpy(), 3 * x.numpy(), 1e-6)

    def chained_ops() -> None:
        x = pt.asarray(random(1000))
        y, z = pt.zeros(1000, pt.f32), pt.zeros(1000, pt.f32)
        vector_add(y.partition(256), x, x).then(lambda *_: vector_add(z.partition(256), y, x)).sync()
        close(z.numpy(), 3 * x.numpy(), 1e-6)

    return parts({"signals": signals, "many": many, "awaited": awaited, "graphs": graphs, "chained_ops": chained_ops})


def step_random() -> Json:
    """Random kernels of the differential tests, against the numpy meaning, through our driver."""
    from peertile.backends.cuda.compile import compile_kernel
    from peertile.ir.text import parse_kernel, print_kernel
    from peertile.ir.types import PointerType, ViewType
    from peertile.meaning.grid import run_grid
    from peertile.passes.pipeline import run_pipeline
    from peertile.runtime.driver import LaunchOptions, Status
    from peertile.testing.programs import differences, random_kernel

    device = gpu()
    driver: Any = device.driver
    stream = driver.create_stream()

    class Placed:
        """An array on the device: the range that it spans, with its strides and its alignment to 64."""

        def __init__(self, x: Array) -> None:
            self.x = x
            low, high = np.lib.array_utils.byte_bounds(x) if x.size else (x.ctypes.data, x.ctypes.data)
            self.low, self.nbytes = low, high - low
            self.memory = driver.allocate(self.nbytes + 128)
            self.at = self.memory + low % 64  # what is aligned on the host is aligned there
            if self.nbytes:
                assert driver.wait(driver.copy(stream, self.at, low, self.nbytes), 10) is Status.DONE
            item = x.dtype.itemsize
            self.words = [self.at + x.ctypes.data - low, *x.shape, *(s // item for s in x.strides)]

        def back(self) -> Array:
            raw = np.empty(max(self.nbytes, 1), np.uint8)
            if self.nbytes:
                assert driver.wait(driver.copy(stream, raw.ctypes.data, self.at, self.nbytes), 10) is Status.DONE
            driver.free(self.memory)
            return np.ndarray(self.x.shape, self.x.dtype, raw.data, self.x.ctypes.data - self.low, self.x.strides)

    def slots(t: Any, value: Any, placed: Any) -> list[int]:
        if isinstance(t, ViewType):
            words: list[int] = placed.words
            return words
        if isinstance(t, PointerType):
            return [placed.words[0]]
        raw = np.asarray(value).astype(t.dtype.numpy).tobytes()
        if t.dtype.is_float:
            return [int.from_bytes(raw.ljust(8, b"\0"), "little", signed=True)]
        return [struct.unpack("<q", struct.pack("<Q", int(value) % (1 << 64)))[0]]

    def one(seed: int) -> str | None:
        program = random_kernel(seed)
        if program.ranks > 1:  # of one device alone
            return "several ranks"
        kernel = run_pipeline(parse_kernel(print_kernel(program.kernel)))
        expected = program.make_args()
        outcome = run_grid(kernel, program.grid, expected)
        args = program.make_args()
        assert device.target is not None
        binary = compile_kernel(kernel, device.target)
        module = driver.load_module(binary)
        placed = [Placed(a) if isinstance(a, np.ndarray) else None for a in args]
        words = [w for v, a, p in zip(kernel.params, args, placed, strict=True) for w in slots(v.type, a, p)]
        options = LaunchOptions(f"seed {seed}", 2 * 10**9)
        block = struct.pack(f"<{len(words)}q", *words)
        record = driver.launch_sync(stream, module, (program.grid, 1, 1), block, options)
        found = [a if p is None else p.back() for a, p in zip(args, placed, strict=True)]
        driver.unload_module(module)
        if (record is not None) != bool(outcome.faults):
            return f"fault {record}, meaning {outcome.faults}"
        wrong = [] if record is not None else differences(program, found, expected)
        return str(wrong)[:500] if wrong else None

    first = int(os.environ.get("PEERTILE_CHECK_SEED", str(int(time.time()) % 100_000)))
    begin, count = time.perf_counter(), 0
    failed: dict[Any, Any] = {}
    while time.perf_counter() - begin < float(os.environ.get("PEERTILE_CHECK_RANDOM_S", "75")) and count < 1000:
        outcome = attempt(lambda: one(first + count))  # noqa: B023
        if outcome == "several ranks":
            first += 1
            continue
        if outcome is not None:
            failed[first + count] = outcome
        count += 1
        if count % 20 == 0:
            print(json.dumps({"part": "random", "found": {"count": count, "failed": failed}}), flush=True)
        if driver.lost is not None:
            failed["lost"] = str(driver.lost)
            break
    return {"count": count, "first": first, "failed": failed, "s": round(time.perf_counter() - begin, 1)}


def per_call_us(function: Callable[[], Any], count: int, end: Callable[[], Any], rounds: int = 9) -> Json:
    times, whole = [], []
    for _ in range(rounds):
        begin = time.perf_counter_ns()
        for _ in range(count):
            function()
        times.append((time.perf_counter_ns() - begin) / count / 1000)
        end()
        whole.append((time.perf_counter_ns() - begin) / count / 1000)
    return {
        "host_median_us": round(statistics.median(times), 2), "best_us": round(min(times), 2),
        "with_end_us": round(statistics.median(whole), 2),
    }  # fmt: skip


def step_cost() -> Json:
    device = gpu()
    stream = device.stream("cost")
    x, z = pt.zeros(256, pt.f32), pt.zeros(256, pt.f32)
    part = z.partition(256)
    vector_add(part, x, x).sync()

    def graph_us() -> Any:
        with pt.capture(stream, "chain") as scope:
            for _ in range(200):
                scope.record(vector_add(part, x, x))
        graph = scope.graph
        graph.launch().sync_on(stream)
        replay = per_call_us(lambda: graph.launch().sync_on(stream), 20, stream.sync, 5)
        return {"per_kernel_us": round(replay["host_median_us"] / 200, 3)}

    def await_us() -> Any:
        async def main() -> Json:
            times = []
            for _ in range(300):
                begin = time.perf_counter_ns()
                await vector_add(part, x, x)
                times.append((time.perf_counter_ns() - begin) / 1000)
            return {"median_us": round(statistics.median(times), 2)}

        return asyncio.run(main())

    def submit() -> None:
        vector_add(part, x, x).submit(stream)

    def chain_of(count: int) -> Any:
        op: Any = vector_add(part, x, x)
        for _ in range(count - 1):
            op = op.then(lambda *_: vector_add(part, x, x))
        return op

    return parts(
        {
            "build_op": lambda: per_call_us(lambda: vector_add(part, x, x), 500, lambda: None),
            "sync": lambda: per_call_us(lambda: vector_add(part, x, x).sync(), 200, lambda: None),
            "sync_on": lambda: per_call_us(lambda: vector_add(part, x, x).sync_on(stream), 200, lambda: None),
            "submit": lambda: per_call_us(submit, 100, stream.sync),
            "chain_of_20": lambda: per_call_us(lambda: chain_of(20).sync_on(stream), 10, lambda: None),
            "await": await_us, "graph_of_200": graph_us,
            "asarray_4KiB": lambda: per_call_us(lambda: pt.asarray(np.zeros(1024, np.float32)), 100, lambda: None),
            "numpy_4KiB": lambda: per_call_us(lambda: x.numpy(), 100, lambda: None),
            "profile": lambda: profile(lambda: vector_add(part, x, x).sync_on(stream)),
            "profile_submit": lambda: profile(submit),
            "driver_prepared": lambda: driver_us(device, stream, vector_add(part, x, x)),
        }
    )  # fmt: skip


def driver_us(device: pt.Device, stream: pt.Stream, op: Any) -> Json:
    """The driver's own part of a launch, of a chain of 100, and of a launch with its end."""
    driver: Any = device.driver
    binary = op.compiled().binary
    module = driver.load_module(binary)
    options = pt.runtime.driver.LaunchOptions("cost", 10**9)
    prepared = driver.prepare_launch(module, (1, 1, 1), options)
    memory = driver.allocate(1024)
    block = struct.pack("<3q", memory, 256, 1) * 3
    chain = [(prepared, block)] * 100
    handle = stream.handle
    return {
        "launch": per_call_us(lambda: driver.launch_prepared(handle, prepared, block), 100, stream.sync),
        "chain_of_100": per_call_us(lambda: driver.launch_many(handle, chain), 2, stream.sync),
        "run": per_call_us(lambda: driver.run_prepared(handle, prepared, block), 200, lambda: None),
    }  # fmt: skip


def profile(function: Callable[[], Any], count: int = 500) -> list[str]:
    """The functions that take most of the time of a call."""
    import cProfile
    import pstats

    seen = cProfile.Profile()
    seen.enable()
    for _ in range(count):
        function()
    seen.disable()
    text = io.StringIO()
    pstats.Stats(seen, stream=text).sort_stats("tottime").print_stats(14)
    return [" ".join(line.split()) for line in text.getvalue().splitlines() if "/" in line or "{" in line][:14]


def step_speed() -> Json:
    """Interleaved with torch, by the wall clock over calls that are enqueued together; medians."""
    torch: Any = importlib.import_module("torch")
    device = gpu()
    stream = device.stream("speed")
    torch.backends.cuda.matmul.allow_tf32 = False

    def seconds(functions: dict[str, tuple[Callable[[], Any], Callable[[], Any]]], repeat: int) -> dict[str, float]:
        found: dict[str, list[float]] = {name: [] for name in functions}
        for round_ in range(9):
            for name, (call, end) in functions.items():
                begin = time.perf_counter()
                for _ in range(repeat if round_ else 2):
                    call()
                end()
                if round_:
                    found[name].append((time.perf_counter() - begin) / repeat)
        return {name: statistics.median(values) for name, values in found.items()}

    def against(ours: Callable[[], Any], theirs: Callable[[], Any], repeat: int) -> Json:
        found = seconds({"torch": (theirs, torch.cuda.synchronize), "peertile": (ours, stream.sync)}, repeat)
        return {
            "torch_ms": round(found["torch"] * 1e3, 4), "peertile_ms": round(found["peertile"] * 1e3, 4),
            "ratio": round(found["torch"] / found["peertile"], 4),
        }  # fmt: skip

    def product(d: Any, td: Any, m: int, n: int, k: int, tile: tuple[int, int], repeat: int) -> Callable[[], Any]:
        def run() -> Any:
            ta, tb = (torch.randn(*s, device="cuda").to(td) for s in ((m, k), (k, n)))
            tc = torch.empty(m, n, device="cuda", dtype=td)
            torch.cuda.synchronize()
            a, b = pt.from_dlpack(ta), pt.from_dlpack(tb)
            c = pt.full((m, n), math.nan, d)
            part = c.partition(tile).persistent(swizzle=8)
            matmul(part, a, b).sync()
            want = ta.double() @ tb.double() if m * n * k < 1 << 34 else None
            found = against(lambda: matmul(part, a, b).submit(stream), lambda: torch.matmul(ta, tb, out=tc), repeat)
            got = torch.from_dlpack(c).double()
            assert not torch.isnan(got).any()
            if want is not None:
                found["error"] = f"{float((got - want).norm() / want.norm()):.2e}"
            found["tflops"] = round(2 * m * n * k / found["peertile_ms"] / 1e9, 1)
            return found

        return run

    def add(d: Any, td: Any, n: int) -> Callable[[], Any]:
        def run() -> Any:
            ta, tb = (torch.randn(n, device="cuda").to(td) for _ in range(2))
            tz = torch.empty_like(ta)
            torch.cuda.synchronize()
            x, y, z = pt.from_dlpack(ta), pt.from_dlpack(tb), pt.empty(n, d)
            part = z.partition(2048)
            vector_add(part, x, y).sync()
            return against(lambda: vector_add(part, x, y).submit(stream), lambda: torch.add(ta, tb, out=tz), 5)

        return run

    def rows(m: int, n: int) -> Callable[[], Any]:
        def run() -> Any:
            tx = torch.randn(m, n, device="cuda")
            tz = torch.empty_like(tx)
            torch.cuda.synchronize()
            x, z = pt.from_dlpack(tx), pt.empty((m, n), pt.f32)
            part = z.partition((1, n))
            row_softmax(part, x).sync()
            return against(lambda: row_softmax(part, x).submit(stream), lambda: torch.softmax(tx, 1, out=tz), 10)

        return run

    big = (128, 256)
    return parts(
        {
            "gemm_bf16_4096": product(pt.bf16, torch.bfloat16, 4096, 4096, 4096, big, 40),
            "gemm_f16_4096": product(pt.f16, torch.float16, 4096, 4096, 4096, big, 40),
            "gemm_bf16_8192": product(pt.bf16, torch.bfloat16, 8192, 8192, 8192, big, 10),
            "gemm_f16_8192": product(pt.f16, torch.float16, 8192, 8192, 8192, big, 10),
            "gemm_bf16_64x8192x8192": product(pt.bf16, torch.bfloat16, 64, 8192, 8192, (64, 64), 100),
            "add_f32": add(pt.f32, torch.float32, 1 << 28), "add_bf16": add(pt.bf16, torch.bfloat16, 1 << 28),
            "softmax_4096x4096": rows(4096, 4096), "softmax_16384x8192": rows(16384, 8192),
        }
    )  # fmt: skip


PLUGIN = """
import os, sys
from unittest import mock

try:
    import hypothesis
except ImportError:  # none of these tests draws anything
    sys.modules["hypothesis"] = mock.MagicMock()

import pytest
import peertile as pt

device = pt.open_device(pt.DriverKind(os.environ.get("PEERTILE_CHECK_DEVICE", "cuda")))

# The default of every thread, those that tests start too.
from peertile.runtime.registry import _registry
_registry.devices[pt.DriverKind.CPU, 0] = device

def pytest_runtest_logreport(report):
    # At once, since the whole may be ended before it is through.
    if report.failed:
        text = getattr(getattr(report.longrepr, "reprcrash", None), "message", str(report.longrepr)[-300:])
        print("\\nFAILED", report.nodeid, " ".join(str(text).split())[:260], flush=True)
"""


def step_tests() -> Json:
    """The tests of the package on the GPU, as far as the machine has what they need: what passed and what failed."""
    files = [
        "tests/kernel/test_launch.py", "tests/kernel/test_control.py", "tests/kernel/test_arithmetic.py",
        "tests/kernel/test_folds.py", "tests/kernel/test_pieces.py", "tests/runtime/test_streams.py",
        "tests/runtime/test_ops.py", "tests/runtime/test_graphs.py",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "peertile_on_gpu.py").write_text(PLUGIN)
        # Not the package's own settings, which ask for plugins that the machine may lack.
        (Path(folder) / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
        env = os.environ | {"PYTHONPATH": os.pathsep.join([folder, str(ROOT / "src"), str(ROOT)])}
        command = [
            sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=no", "-s", "-c", f"{folder}/pytest.ini",
            "--rootdir", str(ROOT), "-p", "no:cacheprovider", "-p", "peertile_on_gpu", "-W", "ignore", *files,
        ]  # fmt: skip
        done = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            out, _ = done.communicate(timeout=float(os.environ.get("PEERTILE_CHECK_TESTS_S", "45")))
        except subprocess.TimeoutExpired:
            done.kill()
            out, _ = done.communicate()
    lines = out.splitlines()
    short = [line[:360] for line in lines if line.startswith(("FAILED ", "ERROR", "E "))]
    return {"end": lines[-1] if lines else "", "failed": short[:60], "progress": [x for x in lines if "%]" in x][-3:],
            "tail": [] if short else [x[:200] for x in lines[-12:]], "exit": done.returncode}  # fmt: skip


# ---------------------------------------------------------------- running them

STEPS: dict[str, tuple[Callable[[], Json], float]] = {
    "info": (step_info, 40), "language": (step_language, 70), "faults": (step_faults, 40),
    "runtime": (step_runtime, 40), "cost": (step_cost, 40), "speed": (step_speed, 75), "random": (step_random, 95),
    "tests": (step_tests, 55),
}  # fmt: skip


def run_step(name: str, bound_s: float) -> Any:
    command = [sys.executable, "-X", "faulthandler", __file__, "--step", name]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = process.communicate(timeout=bound_s)
        how = f"exit {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        how = f"no end within {bound_s:.0f} s"
    messages = []
    for line in out.splitlines():
        with contextlib.suppress(ValueError):
            messages.append(json.loads(line))
    whole = [m["whole"] for m in messages if isinstance(m, dict) and "whole" in m]
    if whole:
        return whole[-1]
    done = {m["part"]: m["found"] for m in messages if isinstance(m, dict) and "part" in m}
    return {"error": how, "done": done, "err": err[-1500:]}


def main(names: list[str]) -> None:
    begin = time.monotonic()
    found: Json = {}
    for name in names:
        bound = STEPS[name][1]
        left = TOTAL_S - (time.monotonic() - begin)
        if left < 5:
            found[name] = {"error": "no time left"}
            continue
        start = time.monotonic()
        found[name] = run_step(name, min(bound, left))
        took = round(time.monotonic() - start, 1)
        print(f"{name}: {took} s: {json.dumps(found[name], default=str)}", file=sys.stderr, flush=True)
    found["total_s"] = round(time.monotonic() - begin, 1)
    text = json.dumps(found, indent=1, default=str)
    if os.environ.get("OUT"):
        (Path(os.environ["OUT"]) / "check_cuda_language.json").write_text(text)
    print(text)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--step"]:
        print(json.dumps({"whole": attempt(STEPS[sys.argv[2]][0])}, default=str), flush=True)
        sys.stdout.flush()
        os._exit(0)  # not through finalisers: a hung driver must not keep what was found
    else:
        main(sys.argv[1:] or list(STEPS))
