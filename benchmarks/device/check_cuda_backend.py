"""Checks the cuda backend on a GPU, without our driver: compiles kernels, launches them through cuda.bindings with
`LaunchLayout`, compares with the numpy meaning or float64, and times GEMM, addition and softmax against torch.

    PYTHONPATH=src:. python benchmarks/device/check_cuda_backend.py [--json FILE] [--only NAME ...] [--seed N]

Needs torch, triton, cuda-bindings, numpy and ml_dtypes. Every wait on the device is bounded; an alarm ends the whole
after 9 minutes. The exit status is 0 only if every check passed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import signal
import statistics
import struct
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
from cuda.bindings import driver as cu
from tests.backends.cuda.util import MODES, N, casts, elementwise, numbers, pieces_of, same

from peertile.backends.cuda.binary import CudaBinary
from peertile.backends.cuda.compile import compile_kernel
from peertile.backends.cuda.layout import LaunchContext
from peertile.backends.cuda.target import CudaOptions
from peertile.dtypes import ALL_DTYPES, DType, bf16, dtype_named, f16, f32
from peertile.ir.core import Kernel
from peertile.ir.text import parse_kernel, print_kernel
from peertile.ir.types import PointerType, TileType, ViewType
from peertile.meaning.grid import run_grid
from peertile.passes.pipeline import run_pipeline
from peertile.testing.programs import differences, random_kernel

ARCH = "sm_{}{}".format(*torch.cuda.get_device_capability())
SMS = torch.cuda.get_device_properties(0).multi_processor_count
TORCH = {
    "f32": torch.float32, "f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16,
    "f8e4m3": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2, "i8": torch.int8, "i32": torch.int32,
}  # fmt: skip
SECONDS = 540
TIMEOUT_NS = 20_000_000
POISON = 0xA5


def ok(result: tuple[Any, ...]) -> Any:
    """The value of a driver call; RuntimeError with the driver's name for an error."""
    status, *rest = result
    if status != cu.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"cuda driver: {status}")
    return rest[0] if len(rest) == 1 else rest


class Kern:
    """A loaded kernel and what its launches share."""

    def __init__(self, binary: CudaBinary) -> None:
        self.binary = binary
        self.module = ok(cu.cuModuleLoadData(np.frombuffer(binary.payload, np.uint8).ctypes.data))
        self.function = ok(cu.cuModuleGetFunction(self.module, binary.entry.encode()))
        if binary.shared_bytes > 48 << 10:
            attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            ok(cu.cuFuncSetAttribute(self.function, attribute, binary.shared_bytes))
        self.abort = torch.zeros(4, dtype=torch.int32, device="cuda")
        self.fault = torch.zeros(16, dtype=torch.int64, device="cuda")
        self.launch_words = torch.zeros(8, dtype=torch.int64, device="cuda")
        self.print = torch.zeros(1 << 13, dtype=torch.int64, device="cuda")
        self.scratch = torch.empty(0, dtype=torch.uint8, device="cuda")

    def bind(self, grid: tuple[int, ...], words: list[int]) -> Callable[[], None]:
        """A function that launches with these arguments."""
        extents = (*grid, 1, 1)[:3]
        programs = int(np.prod(extents))
        need = self.binary.layout.scratch_bytes(programs)
        if need > self.scratch.numel():
            self.scratch = torch.empty(need, dtype=torch.uint8, device="cuda")
        self.print.zero_()
        self.print[0] = self.print.numel() * 8 - 16
        args = struct.pack(f"<{len(words)}q", *words)
        assert self.binary.layout.fits(args), "compile with descriptors=False for these extents"
        context = LaunchContext(
            extents, self.abort.data_ptr(), self.fault.data_ptr(), TIMEOUT_NS, self.launch_words.data_ptr(),
            self.print.data_ptr(), self.scratch.data_ptr() if need else 0,
        )  # fmt: skip
        packed = self.binary.layout.pack(args, context)
        buffer = ctypes.create_string_buffer(packed, len(packed))
        base = ctypes.addressof(buffer)
        pointers = (ctypes.c_void_p * self.binary.layout.n_words)(
            *(base + 8 * k for k in range(self.binary.layout.n_words))
        )
        stream = torch.cuda.current_stream().cuda_stream
        threads, shared = self.binary.threads, self.binary.shared_bytes

        def launch(keep: Any = (buffer, pointers)) -> None:
            ok(cu.cuLaunchKernel(
                self.function, programs, 1, 1, threads, 1, 1, shared, stream, ctypes.addressof(pointers), 0
            ))  # fmt: skip

        return launch


class Placed:
    """A numpy array on the device: the range of memory it spans, so that its strides stay what they are."""

    def __init__(self, x: np.ndarray) -> None:
        low, high = np.lib.array_utils.byte_bounds(x)
        span = max(high - low, 1)
        raw = (
            np.frombuffer((ctypes.c_uint8 * span).from_address(low), np.uint8).copy()
            if x.size
            else np.zeros(1, np.uint8)
        )
        # 64 bytes of room keep the alignment that the type may promise.
        self.memory = torch.empty(span + 64, dtype=torch.uint8, device="cuda")
        self.start = x.ctypes.data - low + (low - x.ctypes.data) % 64 if x.size else 0
        self.shift = self.start - (x.ctypes.data - low) if x.size else 0
        self.memory[self.shift : self.shift + len(raw)].copy_(torch.from_numpy(raw))
        self.shape, self.bytes, self.dtype = x.shape, x.strides, x.dtype

    def data_ptr(self) -> int:
        return self.memory.data_ptr() + self.start

    def stride(self) -> tuple[int, ...]:
        return tuple(s // self.dtype.itemsize for s in self.bytes)

    def back(self) -> np.ndarray:
        raw = self.memory.cpu().numpy()
        return np.ndarray(self.shape, self.dtype, raw.data, self.start, self.bytes).copy()


def words_of(t: Any, arg: Any) -> list[int]:
    if isinstance(t, ViewType):
        return [arg.data_ptr(), *arg.shape, *arg.stride()]
    if isinstance(t, PointerType):
        return [arg.data_ptr()]
    assert isinstance(t, TileType)
    raw = np.asarray(arg).astype(t.dtype.numpy).tobytes()
    if t.dtype.is_float:
        return [int.from_bytes(raw.ljust(8, b"\0"), "little", signed=True)]
    return [struct.unpack("<q", struct.pack("<Q", int(arg) % (1 << 64)))[0]]


def run(kernel: Kernel, grid: int | tuple[int, ...], args: list[Any], **options: Any) -> tuple[list[Any], Kern]:
    """Launches once on copies of `args`; arrays come back."""
    kern = Kern(compile_kernel(kernel, ARCH, options=CudaOptions(**options)))
    device = [Placed(a) if isinstance(a, np.ndarray) else a for a in args]
    words = [w for v, a in zip(kernel.params, device, strict=True) for w in words_of(v.type, a)]
    kern.bind(grid if isinstance(grid, tuple) else (grid,), words)()
    torch.cuda.synchronize()
    return [a.back() if isinstance(a, Placed) else a for a in device], kern


def agree(kernel: Kernel, grid: int, args: list[Any], outputs: list[str], tolerance: float | None = None) -> str:
    got, kern = run(kernel, grid, args)
    want = [a.copy() if isinstance(a, np.ndarray) else a for a in args]
    run_grid(kernel, grid, want)
    assert int(kern.fault[0]) == 0, kern.fault.tolist()
    for name in outputs:
        k = kernel.param_names.index(name)
        d = kernel.params[k].type.dtype
        wrong = np.argwhere(~same(got[k], want[k], d, tolerance))[:3]
        assert len(wrong) == 0, f"{name} at {wrong.tolist()}: " + ", ".join(
            f"{got[k][tuple(i)]} for {want[k][tuple(i)]}" for i in wrong
        )
    return f"{len(outputs)} outputs agree"


def poisoned(shape: Any, d: DType) -> np.ndarray:
    return np.frombuffer(bytes([POISON]) * (int(np.prod(shape)) * d.itemsize), d.numpy).reshape(shape).copy()


def facts(x: torch.Tensor) -> str:
    """The promises of a view type about a tensor, as the runtime makes them."""
    unit = ", ".join(str(int(s == 1)) for s in x.stride())
    divides = [n % 16 == 0 and all(s == 1 or s % 16 == 0 for s in x.stride()) for n in x.shape]
    align = ", align=64" if x.data_ptr() % 64 == 0 else ""
    return f"unit=[{unit}]{align}, divisible=[{', '.join('16' if d else '1' for d in divides)}]"


# ---------------------------------------------------------------- kernels

ADD = """
kernel @vector_add(%z: view<{d}, 1, read_write, tile=[{n}], {zf}>, %x: view<{d}, 1, read, {xf}>,
                   %y: view<{d}, 1, read, {yf}>) {{
  %p = program_id() : i64
  %i = tile_index(%z, %p) : i64
  %a = load(%x, %i, bounds=Bounds.launch) : {d}[{n}]
  %b = load(%y, %i, bounds=Bounds.launch) : {d}[{n}]
  %c = binary(%a, %b, fn=Binary.add) : {d}[{n}]
  store(%z, %c, %i, bounds=Bounds.proven)
  return()
}}
"""

GEMM = """
kernel @matmul(%c: view<{d}, 2, read_write, tile=[{m}, {n}], persistent, swizzle={swizzle}, {cf}>,
               %a: view<{d}, 2, read, {af}>, %b: view<{d}, 2, read, {bf}>) {{
  %p = program_id() : i64
  %np = num_programs() : i64
  %tm = num_tiles(%c, axis=0, size={m}) : i64
  %tn = num_tiles(%c, axis=1, size={n}) : i64
  %total = binary(%tm, %tn, fn=Binary.mul) : i64
  %nk = num_tiles(%a, axis=1, size={k}) : i64
  %zero = const(value=0) : i64
  %one = const(value=1) : i64
  %fz = const(value=0.0) : f32
  for(%p, %total, %np) (%lin: i64) {{
    %i, %j = tile_index(%c, %lin) : i64, i64
    %acc0 = broadcast(%fz) : f32[{m}, {n}]
    %acc = for(%zero, %nk, %one, %acc0, stages={stages}) : f32[{m}, {n}] (%kk: i64, %acc1: f32[{m}, {n}]) {{
      %ta = load(%a, %i, %kk, bounds=Bounds.proven) : {d}[{m}, {k}]
      %tb = load(%b, %kk, %j, bounds=Bounds.launch) : {d}[{k}, {n}]
      %acc2 = mma(%ta, %tb, %acc1) : f32[{m}, {n}]
      continue(%acc2)
    }}
    {out}
    store(%c, %out, %i, %j, bounds=Bounds.proven)
    continue()
  }}
  return()
}}
"""

SOFTMAX = """
kernel @softmax(%z: view<f32, 2, read_write, tile=[1, {n}], {zf}>, %x: view<f32, 2, read, {xf}>) {{
  %p = program_id() : i64
  %i, %j = tile_index(%z, %p) : i64, i64
  %a = load(%x, %i, %j, padding=Padding.neg_inf, bounds=Bounds.launch) : f32[1, {n}]
  %m = reduce(%a, fn=Fold.max, axis=1) : f32[1]
  %m1 = reshape(%m) : f32[1, 1]
  %mb = broadcast(%m1) : f32[1, {n}]
  %d = binary(%a, %mb, fn=Binary.sub) : f32[1, {n}]
  %e = unary(%d, fn=Unary.exp) : f32[1, {n}]
  %s = reduce(%e, fn=Fold.add, axis=1) : f32[1]
  %s1 = reshape(%s) : f32[1, 1]
  %sb = broadcast(%s1) : f32[1, {n}]
  %q = binary(%e, %sb, fn=Binary.div) : f32[1, {n}]
  store(%z, %q, %i, %j, bounds=Bounds.proven)
  return()
}}
"""

FLOW = """
kernel @flow(%z: view<f32, 1, read_write, unit=[1]>, %n: i64, %mode: i64) {
  %p = program_id() : i64
  %zero = const(value=0) : i64
  %one = const(value=1) : i64
  %two = const(value=2) : i64
  %fz = const(value=1.0) : f32
  %acc0 = broadcast(%fz) : f32[64]
  %acc = for(%zero, %n, %one, %acc0) : f32[64] (%k: i64, %a: f32[64]) {
    %rem = binary(%k, %two, fn=Binary.mod) : i64
    %odd = compare(%rem, %one, fn=Compare.eq) : bool
    if(%odd) {
      continue(%a)
    } else {
      yield()
    }
    %q = binary(%k, %p, fn=Binary.add) : i64
    %big = compare(%q, %mode, fn=Compare.gt) : bool
    if(%big) {
      break(%a)
    } else {
      yield()
    }
    %bad = compare(%q, %two, fn=Compare.eq) : bool
    if(%bad) {
      return()
    } else {
      yield()
    }
    %kf = cast(%q) : f32
    %kb = broadcast(%kf) : f32[64]
    %a2 = binary(%a, %kb, fn=Binary.add) : f32[64]
    continue(%a2)
  }
  store(%z, %acc, %p, bounds=Bounds.proven)
  return()
}
"""

# Every program adds a ticket, waits for all, then reads what its neighbour wrote before: a grid barrier.
BARRIER = """
kernel @barrier(%z: view<f32, 1, read_write, device, unit=[1]>, %x: view<f32, 1, read_write, device, unit=[1]>) {
  %p = program_id() : i64
  %np = num_programs() : i64
  %zero = const(value=0) : i64
  %one = const(value=1) : i64
  %one_u = const(value=1) : u64
  %pf = cast(%p) : f32
  %t = broadcast(%pf) : f32[256]
  store(%x, %t, %p, bounds=Bounds.proven)
  %words = launch_words() : view<u64, 1, read_write, device>
  %ticket = word_rmw(%words, %one_u, %zero, rmw=Rmw.add, order=Order.acq_rel, scope=Scope.device) : u64
  %want = bitcast(%np) : u64
  %seen = wait(%words, %want, %zero, cmp=Cmp.at_least, scope=Scope.device, what="barrier") : u64
  %next = binary(%p, %one, fn=Binary.add) : i64
  %at = binary(%next, %np, fn=Binary.rem) : i64
  %got = load(%x, %at, bounds=Bounds.proven) : f32[256]
  store(%z, %got, %p, bounds=Bounds.proven)
  return()
}
"""

STUCK = """
kernel @stuck(%w: view<u64, 2, read_write, device, unit=[0, 1]>, %z: view<f32, 1, read_write, unit=[1]>) {
  %p = program_id() : i64
  %one = const(value=1) : i64
  %want = const(value=9) : u64
  %seen = wait(%w, %want, %p, %one, cmp=Cmp.at_least, scope=Scope.system, what="stuck") : u64
  %f = const(value=1.0) : f32
  %t = broadcast(%f) : f32[32]
  store(%z, %t, %p, bounds=Bounds.proven)
  return()
}
"""

CHECKED = """
kernel @checked(%z: view<f32, 1, read_write, unit=[1]>, %limit: i64) {
  %p = program_id() : i64
  %ok = compare(%p, %limit, fn=Compare.lt) : bool
  check(%ok, %p, %limit, kind=CheckKind.bounds, message="program is out of bounds")
  %one = const(value=1.0) : f32
  %t = broadcast(%one) : f32[32]
  store(%z, %t, %p, bounds=Bounds.proven)
  return()
}
"""

HISTOGRAM = """
kernel @histogram(%h: view<{d}, 1, read_write, device, unit=[1]>, %v: {d}) {{
  %p = program_id() : i64
  %zero = const(value=0) : i64
  %t = broadcast(%v) : {d}[64]
  tile_atomic(%h, %t, %zero, rmw=Rmw.{rmw}, scope=Scope.device, bounds=Bounds.proven)
  return()
}}
"""

PRINT = """
kernel @prints(%x: view<f32, 1, read, unit=[1]>) {
  %p = program_id() : i64
  %zero = const(value=0) : i64
  %t = load(%x, %zero, bounds=Bounds.proven) : f32[8]
  print(%p, %t, prefix="x is")
  return()
}
"""


# ---------------------------------------------------------------- checks


def check_vector_add(rng: np.random.Generator) -> str:
    for d in (f32, f16, bf16):
        for n in (1, 255, 256, 100_003):
            x, y = (rng.standard_normal(n).astype(np.float32).astype(d.numpy) for _ in range(2))
            text = ADD.format(d=d, n=256, zf="unit=[1], align=64", xf="unit=[1], align=64", yf="unit=[1]")
            agree(parse_kernel(text), -(-n // 256), [poisoned(n + 64, d)[:n], x, y], ["z"])
    return "f32 f16 bf16 with tails"


def gemm_kernel(d: DType, c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **config: Any) -> Kernel:
    tile = {"m": 128, "n": 256, "k": 64, "stages": 3, "swizzle": 8} | config
    out = "%out = cast(%acc) : " + f"{d}[{tile['m']}, {tile['n']}]"
    text = GEMM.format(d=d, cf=facts(c), af=facts(a), bf=facts(b), out=out, **tile)
    return parse_kernel(text if d != f32 else text.replace(out + "\n", "").replace("%out,", "%acc,"))


def launch_gemm(
    d: DType, c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, options: CudaOptions, **config: Any
) -> Any:
    kernel = gemm_kernel(d, c, a, b, **config)
    kern = Kern(compile_kernel(kernel, ARCH, options=options))
    words = [w for x in (c, a, b) for w in words_of(kernel.params[0].type, x)]
    launch = kern.bind((SMS,), words)
    launch.kern = kern  # type: ignore[attr-defined]
    return launch


def check_gemm(rng: np.random.Generator) -> str:
    worst = {}
    small = {"m": 64, "n": 64, "k": 32}
    for d in (bf16, f16, f32, dtype_named("f8e5m2"), dtype_named("f8e4m3")):
        for m, n, k in ((512, 512, 512), (1040, 528, 272), (333, 257, 129), (64, 1000, 40)):
            for transposed in (False, True):
                tile = small if d == f32 or d.bits == 8 else {}
                a = torch.randn(m, k, device="cuda").to(TORCH[d.name])
                b = torch.randn(k, n, device="cuda").to(TORCH[d.name])
                b = b.t().contiguous().t() if transposed else b
                c = torch.empty(m, n, device="cuda", dtype=TORCH[d.name])
                c.view(torch.uint8).fill_(POISON)
                if d.bits == 8:
                    a, b = (x.float().clamp(-4, 4).to(TORCH[d.name]) for x in (a, b))
                launch_gemm(d, c, a, b, CudaOptions(), **tile)()
                torch.cuda.synchronize()
                want = a.float().double() @ b.float().double()
                scale = a.float().double().abs() @ b.float().double().abs() + 1e-30
                bound = {"f32": 1e-6, "f16": 1e-3, "bf16": 8e-3, "f8e4m3": 0.07, "f8e5m2": 0.13}[d.name]
                got = c.float().double()
                assert not torch.isnan(got).any(), (d, m, n, k)
                error = float(((got - want).abs() / (scale * 1e-2 + want.abs())).max())
                # Rounding of the result is relative to it; what cancels inside is relative to the sum of magnitudes.
                assert error < 2 * bound + 1e-3, (str(d), m, n, k, transposed, error)
                worst[d.name] = max(worst.get(d.name, 0), error)
    return json.dumps(worst)


def check_softmax(rng: np.random.Generator) -> str:
    for rows, n in ((17, 1000), (64, 1024), (5, 4096), (3, 4097)):
        x = rng.standard_normal((rows, n)).astype(np.float32) * 4
        width = 1 << (n - 1).bit_length()
        text = SOFTMAX.format(n=width, zf="unit=[0, 1], align=64", xf="unit=[0, 1], align=64")
        got, _ = run(parse_kernel(text), rows, [poisoned((rows, n), f32), x])
        wide = x.astype(np.float64)
        want = np.exp(wide - wide.max(1, keepdims=True))
        want /= want.sum(1, keepdims=True)
        np.testing.assert_allclose(got[0], want, rtol=1e-5, atol=1e-9)
    return "4 shapes"


def check_functions(rng: np.random.Generator) -> str:
    for d in ALL_DTYPES:
        kernel, size = elementwise(d), 64 * N
        args = [numbers(rng, d), numbers(rng, d), np.zeros(size, d.numpy), np.zeros(size, bool)]
        tolerance = {"f32": 4e-6, "f64": 1e-13}.get(d.name)
        try:
            agree(kernel, 1, args, ["z", "c"], tolerance)
        except AssertionError as error:
            raise AssertionError(f"{d}: {error}") from None
    return f"{len(ALL_DTYPES)} dtypes"


def check_casts(rng: np.random.Generator) -> str:
    for d in ALL_DTYPES:
        args = [numbers(rng, d), *(np.zeros(MODES * N, o.numpy) for o in ALL_DTYPES)]
        try:
            agree(casts(d, ALL_DTYPES), 1, args, [f"to_{o}" for o in ALL_DTYPES], 0)
        except AssertionError as error:
            raise AssertionError(f"{d}: {error}") from None
    return f"{len(ALL_DTYPES)} × {len(ALL_DTYPES)}, every rounding"


def check_random(rng: np.random.Generator) -> str:
    """Random kernels of the differential tests, for at most 100 s."""
    begin, count, first = time.perf_counter(), 0, int(rng.integers(1 << 20))
    while time.perf_counter() - begin < 100 and count < 200:
        program = random_kernel(first + count)
        text = print_kernel(program.kernel)
        kernel = run_pipeline(parse_kernel(text))
        expected = program.make_args()
        outcome = run_grid(kernel, program.grid, expected)
        found, kern = run(kernel, program.grid, program.make_args())
        faulted = int(kern.fault[0]) != 0
        assert faulted == bool(outcome.faults), f"seed {first + count}: {kern.fault.tolist()}\n{text}"
        wrong = [] if faulted else differences(program, found, expected)
        assert not wrong, f"seed {first + count}: {wrong}\n{text}"
        count += 1
    return f"{count} kernels from seed {first}"


def check_flow(rng: np.random.Generator) -> str:
    for n in (0, 1, 5, 40):
        for mode in (-1, 3, 30, 100):
            agree(parse_kernel(FLOW), 8, [np.full(512, -7, np.float32), n, mode], ["z"])
    return "break, continue, return"


def check_barrier(rng: np.random.Generator) -> str:
    for programs in (1, 2, SMS):
        got, kern = run(parse_kernel(BARRIER), programs, [np.zeros(256 * programs, np.float32)] * 2)
        assert int(kern.fault[0]) == 0, kern.fault.tolist()
        want = np.repeat((np.arange(programs) + 1) % programs, 256)
        assert (got[0] == want).all()
    return f"up to {SMS} programs"


def check_faults(rng: np.random.Generator) -> str:
    begin = time.perf_counter()
    got, kern = run(parse_kernel(STUCK), 4, [np.array([[0, 9]] * 3 + [[0, 2]], np.uint64), np.zeros(128, np.float32)])
    seconds = time.perf_counter() - begin
    state, kind, program, place, seen, expected, _, slot = kern.fault[:8].tolist()
    assert (state, kind, program, place, seen, expected, slot) == (2, 4, 3, 0, 2, 9, 3), kern.fault.tolist()
    assert got[1].tolist() == [1.0] * 96 + [0.0] * 32
    got, kern = run(parse_kernel(CHECKED), 8, [np.zeros(256, np.float32), 5])
    state, kind, program, place, number, limit = kern.fault[:6].tolist()
    assert (state, kind, place, limit) == (2, 2, 0, 5), kern.fault.tolist()
    assert program == number >= 5
    assert got[0].tolist() == [1.0] * 160 + [0.0] * 96
    return f"timeout and check recorded, {seconds:.2f} s with the compile"


def check_atomics(rng: np.random.Generator) -> str:
    cases = {"add": ("i32", 3), "addf": ("f32", 0.5), "max": ("i8", 5), "min": ("f32", -2.0), "umax": ("u16", 9),
             "or": ("u8", 6), "xor": ("u64", 5)}  # fmt: skip
    for rmw, (name, value) in cases.items():
        d = dtype_named(name)
        kernel = parse_kernel(HISTOGRAM.format(d=d, rmw=rmw))
        agree(kernel, 37, [np.ones(60, d.numpy), value], ["h"])
    for rmw, name in (("add", "u8"), ("add", "i16"), ("addf", "f16"), ("addf", "bf16"), ("addf", "f64")):
        d = dtype_named(name)
        agree(parse_kernel(HISTOGRAM.format(d=d, rmw=rmw)), 37, [np.zeros(60, d.numpy), 1], ["h"])
    return f"{len(cases) + 5} kinds"


def check_pieces(rng: np.random.Generator) -> str:
    """Take, extract, insert, sort, folds by a function: all of them for several dtypes."""
    for d in (f32, f16, bf16, *(dtype_named(n) for n in ("bool", "i8", "u8", "u32", "i64", "u64", "f64"))):
        n = 64
        kernel = pieces_of(d)
        keys = numbers(rng, d, n)
        keys = np.where(rng.integers(0, 2, n) == 0, keys, keys[rng.integers(0, n)]).astype(d.numpy)
        index = rng.integers(-20, 20, n).astype(np.int32)
        try:
            agree(kernel, 1, [keys, index, poisoned(512, d), np.zeros(512, np.int32), 3], ["z", "w"], 0)
        except AssertionError as error:
            raise AssertionError(f"{d}: {error}") from None
    return "10 dtypes"


def check_print(rng: np.random.Generator) -> str:
    _, kern = run(parse_kernel(PRINT), 3, [np.arange(8, dtype=np.float32)])
    raw = kern.print.cpu().numpy().tobytes()
    seen = set()
    for k in range(3):
        record = raw[16 + 56 * k :][:56]
        program, place, nbytes = struct.unpack_from("<QII", record)
        assert (place, nbytes) == (0, 40)
        assert struct.unpack_from("<q8f", record, 16) == (program, *range(8))
        seen.add(program)
    assert seen == {0, 1, 2}
    return "3 records"


def check_far_offsets(rng: np.random.Generator) -> str:
    """Elements beyond 2^31 of a view, and bytes beyond 2^32."""
    n = (1 << 31) + 1000
    x = torch.zeros(n, dtype=torch.int8, device="cuda")
    x[-5:] = 7
    z = torch.full((256,), 99, dtype=torch.int8, device="cuda")
    kernel = parse_kernel("""
kernel @far(%z: view<i8, 1, read_write, unit=[1]>, %x: view<i8, 1, read, unit=[1]>, %i: i64) {
  %zero = const(value=0) : i64
  %t = load(%x, %i, bounds=Bounds.proven) : i8[256]
  store(%z, %t, %zero, bounds=Bounds.proven)
  return()
}
""")
    kern = Kern(compile_kernel(kernel, ARCH))
    last = (n - 1) // 256
    kern.bind((1,), [*words_of(kernel.params[0].type, z), *words_of(kernel.params[1].type, x), last])()
    torch.cuda.synchronize()
    inside = n - last * 256
    assert z.tolist() == [0] * (inside - 5) + [7] * 5 + [0] * (256 - inside)
    return f"{n} elements"


# ---------------------------------------------------------------- times


def times_of(functions: dict[str, Callable[[], Any]], rounds: int = 15, repeat: int = 3) -> dict[str, float]:
    """Median milliseconds of each, measured in turn so that clocks drift for all alike."""
    found: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        for _ in range(3):
            function()
    torch.cuda.synchronize()
    for _ in range(rounds):
        for name, function in functions.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(repeat):
                function()
            end.record()
            end.synchronize()
            found[name].append(begin.elapsed_time(end) / repeat)
    return {name: statistics.median(values) for name, values in found.items()}


def time_gemm(rng: np.random.Generator) -> dict[str, Any]:
    table: dict[str, Any] = {}
    configs: dict[str, tuple[CudaOptions, dict[str, int]]] = {
        "128x256x64 s3": (CudaOptions(), {}),
        "128x256x64 s3 flat": (CudaOptions(flatten=True), {}),
        "128x256x64 s4": (CudaOptions(), {"stages": 4}),
        "128x128x64 s4": (CudaOptions(), {"n": 128, "stages": 4}),
        "128x256x64 s3 swizzle 16": (CudaOptions(), {"swizzle": 16}),
        "128x256x64 s3 pointers": (CudaOptions(descriptors=False), {}),
    }
    for d in (bf16, f16):
        for size in (4096, 8192):
            a, b = (torch.randn(size, size, device="cuda", dtype=TORCH[d.name]) for _ in range(2))
            c = torch.empty(size, size, device="cuda", dtype=TORCH[d.name])
            functions: dict[str, Callable[[], Any]] = {"torch": lambda a=a, b=b, c=c: torch.matmul(a, b, out=c)}
            used = configs if d == bf16 else {"128x256x64 s3": configs["128x256x64 s3"]}
            for name, (options, config) in used.items():
                functions[name] = launch_gemm(d, c, a, b, options, **config)
            flops = 2 * size**3
            found = times_of(functions)
            table[f"{d} {size}"] = {
                name: {"tflops": round(flops / ms / 1e9, 1), "ratio": round(found["torch"] / ms, 4)}
                for name, ms in found.items()
            }
    return table


def time_add(rng: np.random.Generator) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for d, n in ((f32, 1 << 29), (bf16, 1 << 29)):
        x, y = (torch.randn(n, device="cuda", dtype=TORCH[d.name]) for _ in range(2))
        z = torch.empty_like(x)
        functions: dict[str, Callable[[], Any]] = {"torch": lambda x=x, y=y, z=z: torch.add(x, y, out=z)}
        for tile in (256, 1024, 2048, 4096):
            text = ADD.format(d=d, n=tile, zf=facts(z), xf=facts(x), yf=facts(y))
            kernel = parse_kernel(text)
            for warps in (None, 4, 8):
                kern = Kern(compile_kernel(kernel, ARCH, options=CudaOptions(num_warps=warps)))
                words = [w for t in (z, x, y) for w in words_of(kernel.params[0].type, t)]
                functions[f"{tile} w{warps or 'auto'}"] = kern.bind((n // tile,), words)
        found = times_of(functions, 9, 1)
        table[str(d)] = {
            name: {"gb_s": round(3 * n * d.itemsize / ms / 1e6), "ratio": round(found["torch"] / ms, 4)}
            for name, ms in found.items()
        }
    return table


def time_softmax(rng: np.random.Generator) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for rows, n in ((4096, 1024), (4096, 4096), (16384, 16384)):
        x = torch.randn(rows, n, device="cuda")
        z = torch.empty_like(x)
        functions: dict[str, Callable[[], Any]] = {"torch": lambda x=x, z=z: torch.softmax(x, 1, out=z)}
        kernel = parse_kernel(SOFTMAX.format(n=n, zf=facts(z), xf=facts(x)))
        for warps in (None, 4, 8, 16):
            kern = Kern(compile_kernel(kernel, ARCH, options=CudaOptions(num_warps=warps)))
            words = [w for t in (z, x) for w in words_of(kernel.params[0].type, t)]
            functions[f"w{warps or 'auto'}"] = kern.bind((rows,), words)
        found = times_of(functions, 9, 2)
        table[f"{rows}x{n}"] = {name: round(found["torch"] / ms, 4) for name, ms in found.items()}
    return table


CHECKS = {name.removeprefix("check_"): f for name, f in list(globals().items()) if name.startswith("check_")}
TIMES = {name: f for name, f in list(globals().items()) if name.startswith("time_")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", default=None, help="where to write the summary, beside standard output")
    parser.add_argument("--only", nargs="*", default=None, help="names of checks and times to run")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    signal.alarm(SECONDS)
    torch.zeros(1, device="cuda")  # makes the context current in this thread
    torch.backends.cuda.matmul.allow_tf32 = False
    summary: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(), "arch": ARCH, "torch": torch.__version__, "triton": triton.__version__,
        "driver": ok(cu.cuDriverGetVersion()), "python": platform.python_version(), "seed": options.seed,
    }  # fmt: skip
    failed = []
    for kind, table in (("checks", CHECKS), ("times", TIMES)):
        summary[kind] = {}
        for name, function in table.items():
            if options.only is not None and name not in options.only:
                continue
            begin = time.perf_counter()
            try:
                outcome: Any = function(np.random.default_rng(options.seed))
            except Exception as error:
                failed.append(name)
                outcome = f"FAILED {type(error).__name__}: {str(error)[:600]}"
                traceback.print_exc(limit=-3)
            summary[kind][name] = outcome
            print(f"{name}: {outcome} ({time.perf_counter() - begin:.1f} s)", flush=True)
    summary["failed"] = failed
    text = json.dumps(summary, indent=1, ensure_ascii=False)
    print(text)
    if options.json:
        with open(options.json, "w") as file:
            file.write(text + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
