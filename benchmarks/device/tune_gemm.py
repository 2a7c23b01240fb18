"""Which tile and which split a matrix product of each shape wants on a GPU, against cuBLAS through torch in one run.

    PYTHONPATH=src:. python3 benchmarks/device/tune_gemm.py --compile DIR     # here, without a GPU: the binaries
    PYTHONPATH=src:. python3 benchmarks/device/tune_gemm.py --run DIR         # there: measures what DIR holds

Two steps, since compiling takes longer than measuring. Every candidate is checked against torch in float64 before it
is timed; times are of the device (events), medians over rounds that alternate with cuBLAS, over several second
factors, so that none is found in the cache. Prints a line for each candidate and writes all as JSON.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import statistics
import struct
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import peertile as pt
from peertile.backends.cuda.binary import CudaBinary
from peertile.backends.cuda.compile import compile_kernel
from peertile.backends.cuda.target import CudaOptions
from peertile.frontend.build import build_kernel
from peertile.library import gemm as kernels
from peertile.passes.pipeline import run_pipeline

ROTATE = 3
"""Second factors that take turns."""


class Candidate(NamedTuple):
    """A way to make a product of one shape."""

    dtype: str
    m: int
    n: int
    k: int
    tile: tuple[int, int, int]
    stages: int
    warps: int
    split: int = 1
    flatten: bool = False
    descriptors: bool = True
    swizzle: int = 8
    tf32: bool = False

    @property
    def name(self) -> str:
        bm, bn, bk = self.tile
        flags = (
            ("_flat" if self.flatten else "") + ("" if self.descriptors else "_ptr") + ("_tf32" if self.tf32 else "")
        )
        flags += f"_g{self.swizzle}" if self.swizzle != 8 else ""
        return (
            f"{self.dtype}_{self.m}x{self.n}x{self.k}_{bm}x{bn}x{bk}_s{self.stages}_w{self.warps}_k{self.split}{flags}"
        )


def candidates() -> list[Candidate]:
    found: list[Candidate] = []

    def skinny(m: int, tiles: list[tuple[tuple[int, int, int], int, int, int]], **more: Any) -> None:
        found.extend(Candidate("bf16", m, 8192, 8192, t, s, w, k, **more) for t, s, w, k in tiles)

    skinny(16, [((16, 64, 128), 5, 4, 1)], descriptors=False)
    skinny(64, [((64, 64, 128), 4, 4, 1)], descriptors=False)
    skinny(256, [((128, 128, 64), 4, 4, 1), ((128, 128, 64), 5, 4, 1), ((128, 128, 64), 6, 4, 1),
                 ((128, 128, 64), 5, 8, 1), ((128, 128, 32), 8, 4, 1)])  # fmt: skip
    for d in ("bf16", "f16"):
        for st, fl in ((3, True), (4, True), (4, False)):
            found.append(Candidate(d, 4096, 4096, 4096, (128, 256, 64), st, 8, flatten=fl))
    for st in (3, 4):
        found.append(Candidate("f16", 8192, 8192, 8192, (128, 256, 64), st, 8, flatten=True))
    found.append(Candidate("f8e4m3", 8192, 8192, 8192, (128, 256, 128), 4, 8, flatten=True))
    for t, st, fl in (((128, 256, 32), 3, True), ((128, 256, 32), 4, True), ((128, 128, 32), 5, True),
                      ((128, 256, 32), 3, False)):  # fmt: skip
        found.append(Candidate("f32", 8192, 8192, 8192, t, st, 8, flatten=fl, tf32=True))
    return found


def specified(c: Candidate) -> list[tuple[str, Any, dict[str, Any], tuple[Any, ...]]]:
    """(name, kernel, constants, arguments as descriptions) of each launch of a candidate."""
    d = getattr(pt, c.dtype)
    out = pt.bf16 if d is pt.f8e4m3 else d
    bm, bn, bk = c.tile
    a, b, z = pt.tensor_spec((c.m, c.k), d), pt.tensor_spec((c.k, c.n), d), pt.tensor_spec((c.m, c.n), out)
    if c.dtype == "f8e4m3":  # as cuBLAS wants it: the second factor by columns
        b = pt.tensor_spec((c.n, c.k), d).permute((1, 0))
    consts = {"BK": bk, "STAGES": c.stages, "TF32": c.tf32}
    if c.tf32:
        b = pt.tensor_spec((c.n, c.k), d).permute((1, 0))
    if c.split == 1:
        part = z.partition((bm, bn)).persistent(swizzle=c.swizzle) if c.m > 1024 else z.partition((bm, bn))
        return [("whole", kernels.gemm_persistent if c.m > 1024 else kernels.gemm, consts, (part, a, b))]
    p = pt.tensor_spec((c.split, c.m, c.n), pt.f32)
    rows = min(bm, 16)
    return [
        ("part", kernels.gemm_part, consts, (p.partition((1, bm, bn)), a, b)),
        ("fold", kernels.gemm_fold, {"S": c.split}, (z.partition((rows, 256)), p)),
    ]


def compiled(c: Candidate) -> list[CudaBinary]:
    found = []
    for name, kernel, consts, args in specified(c):
        of = [x.exclusive_argument() if hasattr(x, "exclusive_argument") else x.shared_argument() for x in args]
        types = {p.name: x.type for p, x in zip(kernel.params, of, strict=False)}
        ir = run_pipeline(build_kernel(kernel.fn, types, consts, name=kernel.name))
        whole = name != "fold"
        options = CudaOptions(
            num_warps=c.warps if whole else None, num_stages=c.stages if whole else None, flatten=c.flatten and whole,
            descriptors=c.descriptors,
        )  # fmt: skip
        found.append(compile_kernel(ir, "sm_90", options=options))
    return found


def compile_all(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for c in candidates():
        begin = time.perf_counter()
        if (folder / f"{c.name}.0").exists():
            continue
        try:
            for k, binary in enumerate(compiled(c)):
                (folder / f"{c.name}.{k}").write_bytes(binary.to_bytes())
                print(c.name, k, f"{time.perf_counter() - begin:.1f} s", binary.shared_bytes, flush=True)
        except Exception as error:
            print(c.name, "refused:", str(error)[:160], flush=True)


# ---------------------------------------------------------------- there


def words(*tensors: Any) -> bytes:
    return b"".join(struct.pack(f"<{1 + 2 * len(s)}q", p, *s, *st) for p, s, st in tensors)


class Runner:
    def __init__(self, folder: Path) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.folder = folder
        self.device: Any = pt.open_device(pt.DriverKind.CUDA)
        self.driver = self.device.driver
        self.stream = self.driver.create_stream()
        self.inputs: dict[Any, Any] = {}

    def made(self, c: Candidate) -> Any:
        """(a, the second factors, the torch call, its result in float64) of a shape, kept until the next shape."""
        torch, key = self.torch, (c.dtype, c.m, c.n, c.k)
        if key in self.inputs:
            return self.inputs[key]
        self.inputs.clear()
        torch.cuda.empty_cache()
        t = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "f8e4m3": torch.float8_e4m3fn}[c.dtype]
        a = torch.randn(c.m, c.k, device="cuda").to(t)
        if c.dtype == "f8e4m3":
            bs = [torch.randn(c.n, c.k, device="cuda").to(t).t() for _ in range(ROTATE)]
            one = torch.ones((), device="cuda")

            def call(b: Any) -> Any:
                return torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        else:
            bs = [torch.randn(c.k, c.n, device="cuda").to(t) for _ in range(ROTATE)]
            if c.tf32:  # by columns, which `products.matmul` makes first
                bs = [x.t().contiguous().t() for x in bs]
            z = torch.empty(c.m, c.n, device="cuda", dtype=t)

            def call(b: Any) -> Any:
                return torch.matmul(a, b, out=z)

        torch.backends.cuda.matmul.allow_tf32 = c.tf32
        rows = min(c.m, 256)
        want = a[:rows].double() @ bs[0].double()
        self.inputs[key] = (a, bs, call, want)
        return self.inputs[key]

    def launches(self, c: Candidate, a: Any, bs: list[Any]) -> Any:
        torch, driver = self.torch, self.driver
        half = {"bf16": torch.bfloat16, "f16": torch.float16, "f8e4m3": torch.bfloat16}
        z = torch.full((c.m, c.n), math.nan, device="cuda", dtype=half.get(c.dtype, torch.float32))
        partials = torch.full((c.split, c.m, c.n), math.nan, device="cuda") if c.split > 1 else None
        bm, bn, _ = c.tile
        tiles = -(-c.m // bm) * -(-c.n // bn)

        def of(x: Any) -> Any:
            return x.data_ptr(), tuple(x.shape), tuple(x.stride())

        binaries = [
            CudaBinary.from_bytes((self.folder / f"{c.name}.{k}").read_bytes()) for k in range(1 if c.split == 1 else 2)
        ]
        modules = [driver.load_module(b) for b in binaries]
        options = pt.runtime.driver.LaunchOptions("gemm", 10**10)
        sequences = []
        first = min(tiles, driver.capabilities.executors) if c.m > 1024 else tiles * c.split
        plans = [driver.prepare_launch(modules[0], (first, 1, 1), options)]
        if c.split > 1:
            rows = min(bm, 16)
            plans.append(driver.prepare_launch(modules[1], (-(-c.m // rows) * -(-c.n // 256), 1, 1), options))
        for b in bs:
            if c.split == 1:
                sequences.append([(plans[0], words(of(z), of(a), of(b)))])
            else:
                sequences.append([
                    (plans[0], words(of(partials), of(a), of(b))), (plans[1], words(of(z), of(partials))),
                ])  # fmt: skip
        return z, sequences, modules, partials

    def measure(self, c: Candidate) -> dict[str, Any]:
        torch, driver = self.torch, self.driver
        a, bs, call, want = self.made(c)
        z, sequences, modules, _partials = self.launches(c, a, bs)
        torch.cuda.synchronize()
        driver.launch_many(self.stream, sequences[0])
        if driver.wait(driver.last_ticket(self.stream), 20).value != "done":
            return {"name": c.name, "failed": str(driver.take_fault(self.stream))}
        got = z[: len(want)].double()
        error = float((got - want).norm() / want.norm())
        assert not torch.isnan(z.double()).any(), "not all was written"
        flops = 2 * c.m * c.n * c.k
        repeat = max(3, min(60, int(6e-3 / (flops / 6e14 + 4e-5))))
        ours, theirs = [], []
        events = driver.create_event(), driver.create_event()
        marks = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(7):
            driver.launch_many(self.stream, sequences[0])
            driver.record_event(self.stream, events[0])
            chain = [x for k in range(repeat) for x in sequences[k % ROTATE]]
            driver.launch_many(self.stream, chain)
            driver.wait(driver.record_event(self.stream, events[1]), 30)
            ours.append(driver.elapsed_ns(*events) / repeat / 1e3)
            call(bs[0])
            marks[0].record()
            for k in range(repeat):
                call(bs[k % ROTATE])
            marks[1].record()
            torch.cuda.synchronize()
            theirs.append(marks[0].elapsed_time(marks[1]) * 1e3 / repeat)
        us, them = statistics.median(ours), statistics.median(theirs)
        for module in modules:
            driver.unload_module(module)
        return {
            "name": c.name, "us": round(us, 2), "cublas_us": round(them, 2), "ratio": round(them / us, 4),
            "tflops": round(flops / us / 1e6, 1), "error": f"{error:.2e}",
        }  # fmt: skip


def run_all(folder: Path, bound_s: float) -> None:
    runner = Runner(folder)
    begin, found = time.monotonic(), []
    for c in candidates():
        if not (folder / f"{c.name}.0").exists():
            continue
        if time.monotonic() - begin > bound_s:
            print("no time left", flush=True)
            break
        try:
            found.append(runner.measure(c))
        except Exception as error:
            last = traceback.format_exc().splitlines()[-3:]
            found.append({"name": c.name, "failed": f"{type(error).__name__}: {str(error)[:300]}", "at": last})
        print(json.dumps(found[-1]), flush=True)
        if os.environ.get("OUT"):
            (Path(os.environ["OUT"]) / "tune_gemm.json").write_text(json.dumps(found, indent=1))
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "--compile":
        compile_all(Path(sys.argv[2]))
    else:
        run_all(Path(sys.argv[2]), float(os.environ.get("PEERTILE_TUNE_S", "75")))
