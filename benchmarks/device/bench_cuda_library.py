"""The library's kernels on GPUs: right against float64, and their times beside torch, cuBLAS and NCCL, in one run.

    PYTHONPATH=src:. python3 benchmarks/device/bench_cuda_library.py [--ranks N] [--limit S] [--out FILE] [SECTION ...]

One GPU (`--ranks 1`): softmax, rms_norm, swiglu, rope, attention, matmul, fft, programs, decode, embed.
Two (`--ranks 2`, a process for each): gather, scatter, reduce, experts, programs, embed, decode.
Every section has its own bound in seconds, as SECTION=SECONDS; a section that fails says why and the next one begins.
PEERTILE_BENCH_ONLY is a regular expression for the names of cases.
Each case is checked on fresh random numbers with outputs full of NaN before it is timed; the sides take turns; times
are medians in microseconds, of the slower rank. Prints a JSON line for each case, and appends it to FILE. Needs torch.
Makes no multicast object and changes no setting of a GPU.
"""

# ruff: noqa: B023 - what is made in a loop is called in the same trip

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import importlib
import importlib.util
import json
import math
import os
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(Path(__file__).parent)]
os.environ.setdefault("PEERTILE_DEVICE", "cuda")
os.environ.setdefault("PEERTILE_WAIT_TIMEOUT_S", "8")
os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}

import numpy as np  # noqa: E402
import turns  # noqa: E402
from turns import Json, Late, guarded  # noqa: E402

import peertile as pt  # noqa: E402
import peertile.language as T  # noqa: E402
from peertile.backends.cuda.target import CudaOptions  # noqa: E402
from peertile.ir.core import walk  # noqa: E402
from peertile.ir.ops import Check  # noqa: E402
from peertile.library import attention as heads  # noqa: E402
from peertile.library import gemm, layer_kernels, layers  # noqa: E402
from peertile.library import products as products_module  # noqa: E402
from peertile.library.collectives import Collectives  # noqa: E402
from peertile.library.experts import Experts  # noqa: E402
from peertile.library.fft import Fourier  # noqa: E402
from peertile.library.fused import FusedProducts  # noqa: E402
from peertile.library.products import matmul  # noqa: E402

Call = Callable[[], Any]
MIB = 1 << 20
PLACE = "cuda" if os.environ["PEERTILE_DEVICE"] == "cuda" else "cpu"
SHRINK = 1 if PLACE == "cuda" else 16
"""Extents are divided by it: on cpu the script itself is tried, and nothing is measured."""
ONLY = os.environ.get("PEERTILE_BENCH_ONLY", "")
"""Cases that are wanted, by what their names hold; all of them without it."""
SILENT_S = 30
"""After so long in one case every rank says on standard error where it is, and again as often."""
ROTATE = 3
"""Sets of inputs that take turns, so that none is found in the cache."""


class Bench:
    """One rank's side: what both libraries need, and turns of timing that all ranks take together."""

    def __init__(self, group: pt.Group, out: Path | None) -> None:
        self.group, self.out = group, out
        self.device = pt.current_device()
        self.stream = self.device.stream("bench")
        self.torch: Any = importlib.import_module("torch")
        torch = self.torch
        ordinal = self.device.driver.ordinal
        if PLACE == "cuda":
            torch.cuda.set_device(ordinal)
        importlib.import_module("torch._dynamo").config.cache_size_limit = 64  # a compilation for each shape
        torch.manual_seed(1 + group.rank)
        if group.size > 1:
            torch.distributed.init_process_group(
                "nccl" if PLACE == "cuda" else "gloo",
                init_method=f"tcp://127.0.0.1:{os.environ.get('PEERTILE_BENCH_PORT', '29763')}",
                rank=group.rank, world_size=group.size,
                **({"device_id": torch.device("cuda", ordinal)} if PLACE == "cuda" else {}),
            )  # fmt: skip
        self.begin = time.monotonic()
        self.deadline = math.inf

    # ---------------------------------------------------------------- telling

    def tell(self, **found: Any) -> None:
        if self.group.rank:
            return
        line = json.dumps({**found, "s": round(time.monotonic() - self.begin, 1)}, default=str)
        print(line, flush=True)
        if self.out is not None:
            with self.out.open("a") as file:
                file.write(line + "\n")

    def on_time(self) -> None:
        """Late, on every rank, once a rank has used the section's time."""
        if any(self.group.exchange(b"1" if time.monotonic() > self.deadline else b"", "late")):
            raise Late

    # ---------------------------------------------------------------- values

    def randn(self, *shape: int, dtype: Any = None, scale: float = 1.0) -> Any:
        torch = self.torch
        return (torch.randn(*shape, device=PLACE) * scale).to(torch.bfloat16 if dtype is None else dtype)

    def poisoned(self, *shape: int, dtype: Any = None) -> Any:
        torch = self.torch
        return torch.full(shape, math.nan, device=PLACE, dtype=torch.bfloat16 if dtype is None else dtype)

    def ours(self, t: Any) -> pt.Tensor:
        """The same memory as a tensor of peertile."""
        self.settle()
        return pt.from_dlpack(t)

    def settle(self) -> None:
        if PLACE == "cuda":
            self.torch.cuda.synchronize()

    def error(self, got: Any, want: Any) -> float:
        """‖got − want‖ / ‖want‖ in float64; NaN where something was not written."""
        self.settle()
        return float((got.double() - want).norm() / want.norm())

    # ---------------------------------------------------------------- timing

    def graph_of_ours(self, ops: Sequence[Any], calls: int) -> Callable[[int], float]:
        """f(repeats) -> microseconds a call, of `calls` calls in a graph, through `ops` in turn."""
        if PLACE != "cuda":
            return _clocked([lambda op=op: op().sync() for op in ops], calls)
        with pt.capture(self.stream, "bench") as scope:
            for k in range(calls):
                scope.record(ops[k % len(ops)]())
        scope.graph.launch().sync_on(self.stream)
        return turns.per_call(turns.replayed(self.device, self.stream, scope.graph), calls)

    def graph_of_theirs(self, functions: Sequence[Call], calls: int) -> Callable[[int], float]:
        if PLACE != "cuda":
            return _clocked(functions, calls)
        kept: list[Any] = []
        graph = turns.torch_graph(self.torch, functions, calls, kept)
        graph.replay()
        self.torch.cuda.synchronize()
        return turns.per_call(turns.torch_replayed(self.torch, graph, kept, functions), calls)

    def compare(self, candidates: dict[str, Callable[[], Callable[[int], float]]], rounds: int = 7) -> Json:
        """Medians in microseconds, of the slower rank; the candidates take turns."""
        return turns.compare(self.group, candidates, rounds, 2)


def _clocked(functions: Sequence[Call], calls: int) -> Callable[[int], float]:
    def run(_repeats: int) -> float:
        begin = time.perf_counter()
        for k in range(calls):
            functions[k % len(functions)]()
        return (time.perf_counter() - begin) / calls * 1e6

    return run


def calls_for(us: float) -> int:
    """Calls in a graph, so that one replay takes about 4 ms."""
    return max(ROTATE, min(40, int(4000 / us))) if PLACE == "cuda" else 1


def is_wanted(name: str) -> bool:
    return not ONLY or re.search(ONLY, name) is not None


def case(b: Bench, section: str, name: str, function: Callable[[], Json]) -> None:
    """A case, with what went wrong on whichever rank; all ranks go on together."""
    if not is_wanted(name):
        return
    b.on_time()
    group = b.group
    # What ends this process may come from outside: was a kernel compiled, or waited for?
    faulthandler.dump_traceback_later(SILENT_S, repeat=True)
    try:
        found = function()
        group.barrier(f"case {name}")
    except Exception as error:
        found = guarded(_raiser(error))
        if group.size > 1:
            if group.failure() is None:
                group.fail(str(found["error"]))
            group.recover()
    wrong = [json.loads(e) for e in group.exchange(json.dumps(found.get("error")).encode(), f"case {name}")]
    if any(wrong):
        found = {**found, "error": wrong}
    faulthandler.cancel_dump_traceback_later()
    b.tell(section=section, case=name, **found)
    if PLACE == "cuda":
        b.torch.cuda.empty_cache()


def _raiser(error: Exception) -> Callable[[], Any]:
    def again() -> Any:
        raise error

    return again


# ---------------------------------------------------------------- one GPU: rows

WIDTHS = tuple(w // SHRINK for w in (1024, 4096, 16384, 2048, 8192))
ROWS = (4096 // SHRINK, 16384 // SHRINK)


def softmax(b: Bench) -> None:
    torch = b.torch
    compiled = torch.compile(lambda x: torch.softmax(x, -1), dynamic=False)
    for width in WIDTHS:
        for rows in ROWS:
            case(b, "softmax", f"bf16 {rows}x{width}", lambda r=rows, w=width: _softmax(b, compiled, r, w))  # type: ignore[misc]


def _softmax(b: Bench, compiled: Any, rows: int, width: int) -> Json:
    torch = b.torch
    xs = [b.randn(rows, width) for _ in range(ROTATE)]
    zs = [b.poisoned(rows, width) for _ in range(ROTATE)]
    pairs = [(b.ours(x), b.ours(z)) for x, z in zip(xs, zs, strict=True)]
    layers.softmax(pairs[0][0], out=pairs[0][1]).sync()
    error = b.error(zs[0], torch.softmax(xs[0].double(), -1))
    calls = calls_for(2 * rows * width * 2 / 3.5e6 + 2)
    us = b.compare({
        "peertile": lambda: b.graph_of_ours([lambda p=p: layers.softmax(p[0], out=p[1]) for p in pairs], calls),
        "torch.compile": lambda: b.graph_of_theirs([lambda x=x: compiled(x) for x in xs], calls),
    })  # fmt: skip
    return {"us": us, "relative_error": error, **_rates(us, "torch.compile", 2 * rows * width * 2)}


def _rates(us: Json, peer: str, nbytes: int) -> Json:
    mine, theirs = us.get("peertile"), us.get(peer)
    found: Json = {}
    if isinstance(mine, float):
        found["GB/s"] = round(nbytes / mine / 1000)
        if isinstance(theirs, float):
            found["ratio"] = round(theirs / mine, 3)
    return found


def rms_norm(b: Bench) -> None:
    torch = b.torch

    def plain(x: Any, g: Any) -> Any:
        f = x.float()
        return (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + 1e-6) * g.float()).to(x.dtype)

    compiled = torch.compile(plain, dynamic=False)

    def one(rows: int, width: int) -> Json:
        xs = [b.randn(rows, width) for _ in range(ROTATE)]
        zs = [b.poisoned(rows, width) for _ in range(ROTATE)]
        gain = b.randn(width)
        own = b.ours(gain)
        pairs = [(b.ours(x), b.ours(z)) for x, z in zip(xs, zs, strict=True)]
        layers.rms_norm(pairs[0][0], own, out=pairs[0][1]).sync()
        d = xs[0].double()
        error = b.error(zs[0], d * torch.rsqrt(d.square().mean(-1, keepdim=True) + 1e-6) * gain.double())
        calls = calls_for(2 * rows * width * 2 / 3.5e6 + 2)
        us = b.compare({
            "peertile": lambda: b.graph_of_ours(
                [lambda p=p: layers.rms_norm(p[0], own, out=p[1]) for p in pairs], calls),
            "torch.compile": lambda: b.graph_of_theirs([lambda x=x: compiled(x, gain) for x in xs], calls),
        })  # fmt: skip
        return {"us": us, "relative_error": error, **_rates(us, "torch.compile", 2 * rows * width * 2)}

    for width in WIDTHS:
        for rows in ROWS:
            case(b, "rms_norm", f"bf16 {rows}x{width}", lambda r=rows, w=width: one(r, w))  # type: ignore[misc]


def swiglu(b: Bench) -> None:
    torch = b.torch
    compiled = torch.compile(lambda g, u: torch.nn.functional.silu(g.float()).mul(u.float()).to(g.dtype), dynamic=False)

    def one(rows: int, width: int) -> Json:
        ins = [(b.randn(rows, width), b.randn(rows, width), b.poisoned(rows, width)) for _ in range(ROTATE)]
        own = [tuple(b.ours(t) for t in three) for three in ins]
        layers.swiglu(own[0][0], own[0][1], out=own[0][2]).sync()
        g, u = ins[0][0].double(), ins[0][1].double()
        error = b.error(ins[0][2], g * torch.sigmoid(g) * u)
        nbytes = 3 * rows * width * 2
        calls = calls_for(nbytes / 3.5e6 + 2)
        us = b.compare({
            "peertile": lambda: b.graph_of_ours([lambda o=o: layers.swiglu(o[0], o[1], out=o[2]) for o in own], calls),
            "torch.compile": lambda: b.graph_of_theirs([lambda i=i: compiled(i[0], i[1]) for i in ins], calls),
        })  # fmt: skip
        return {"us": us, "relative_error": error, **_rates(us, "torch.compile", nbytes)}

    for rows, width in ((ROWS[0], 14336 // SHRINK), (ROWS[1], 4096 // SHRINK)):
        case(b, "swiglu", f"bf16 {rows}x{width}", lambda r=rows, w=width: one(r, w))  # type: ignore[misc]


def rope(b: Bench) -> None:
    torch = b.torch

    def plain(x: Any, c: Any, s: Any) -> Any:
        half = x.shape[-1] // 2
        f = x.float()
        return (f * c + torch.cat([f[..., half:], f[..., :half]], -1) * s).to(x.dtype)

    compiled = torch.compile(plain, dynamic=False)

    def one(number: int, tokens: int, dim: int) -> Json:
        ins = [(b.randn(1, number, tokens, dim), b.poisoned(1, number, tokens, dim)) for _ in range(ROTATE)]
        own = [tuple(b.ours(t) for t in two) for two in ins]
        tables = heads.rope_tables(tokens, dim)
        positions = pt.asarray(np.arange(tokens)[None], pt.i64)
        heads.rope(own[0][0], tables, positions, out=own[0][1]).sync()
        c, s = (torch.from_numpy(np.asarray(t.numpy())).to(PLACE) for t in tables)
        d = ins[0][0].double()
        want = d * c.double() + torch.cat([d[..., dim // 2 :], d[..., : dim // 2]], -1) * s.double()
        error = b.error(ins[0][1], want)
        nbytes = 2 * number * tokens * dim * 2
        calls = calls_for(nbytes / 3.5e6 + 2)
        us = b.compare({
            "peertile": lambda: b.graph_of_ours(
                [lambda o=o: heads.rope(o[0], tables, positions, out=o[1]) for o in own], calls),
            "torch.compile": lambda: b.graph_of_theirs([lambda i=i: compiled(i[0], c, s) for i in ins], calls),
        })  # fmt: skip
        return {"us": us, "relative_error": error, **_rates(us, "torch.compile", nbytes)}

    case(b, "rope", "bf16 1x32x8192x128", lambda: one(32, 8192 // SHRINK, 128))


# ---------------------------------------------------------------- one GPU: attention and products


def attention(b: Bench) -> None:
    for tokens in (4096 // SHRINK, 8192 // SHRINK, 16384 // SHRINK**2):
        case(b, "attention", f"causal bf16 1x16x{tokens}x128", lambda t=tokens: _attention(b, 16, t, 128))  # type: ignore[misc]


def _attention(b: Bench, number: int, tokens: int, dim: int) -> Json:
    torch = b.torch
    sets = [
        [b.randn(1, number, tokens, dim) for _ in range(3)] + [b.poisoned(1, number, tokens, dim)] for _ in range(2)
    ]
    own = [[b.ours(t) for t in four] for four in sets]
    heads.attention(*own[0][:3], causal=True, out=own[0][3]).sync()
    worst = 0.0
    for h in (0, number - 1):
        q, k, v = (t[0, h].double() for t in sets[0][:3])
        for first in range(0, tokens, 4096):
            score = q[first : first + 4096] @ k.t() / dim**0.5
            at = torch.arange(first, first + len(score), device=PLACE)[:, None]
            score = score.masked_fill(torch.arange(tokens, device=PLACE)[None] > at, -math.inf)
            worst = max(worst, b.error(sets[0][3][0, h, first : first + 4096], torch.softmax(score, -1) @ v))
            del score
    flops = 2 * number * tokens * tokens * dim
    calls = max(2, min(16, int(4000 / (flops / 5e8))))
    candidates: dict[str, Any] = {
        "peertile": lambda: b.graph_of_ours(
            [lambda o=o: heads.attention(*o[:3], causal=True, out=o[3]) for o in own], calls)
    }  # fmt: skip
    kernel = importlib.import_module("torch.nn.attention")
    for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):

        def theirs(which: str = backend) -> Any:
            def call(s: Any) -> Any:
                with kernel.sdpa_kernel(getattr(kernel.SDPBackend, which)):
                    return torch.nn.functional.scaled_dot_product_attention(*s[:3], is_causal=True)

            return b.graph_of_theirs([lambda s=s: call(s) for s in sets], calls)

        candidates[backend] = theirs
    us = b.compare(candidates)
    found: Json = {"us": us, "relative_error": worst}
    mine, others = us.get("peertile"), [v for k, v in us.items() if k != "peertile" and isinstance(v, float)]
    if isinstance(mine, float):
        found["TFLOP/s"] = round(flops / mine / 1e6)
        if others:
            found["ratio"] = round(min(others) / mine, 3)
    return found


def products(b: Bench) -> None:
    shapes = [(256, 8192, 8192), (16, 8192, 8192), (64, 8192, 8192), (2048, 5120, 8192), (2048, 8192, 4096)]
    for m, n, k in ((m, n // SHRINK, k // SHRINK) for m, n, k in shapes):
        case(b, "matmul", f"bf16 {m}x{n}x{k}", lambda m=m, n=n, k=k: _product(b, m, n, k))  # type: ignore[misc]


def _product(b: Bench, m: int, n: int, k: int) -> Json:
    a, ws = b.randn(m, k), [b.randn(k, n) for _ in range(ROTATE)]
    z, other = b.poisoned(m, n), b.poisoned(m, n)
    own, factors, out = b.ours(a), [b.ours(w) for w in ws], b.ours(z)
    matmul(own, factors[0], out).sync()
    error = b.error(z[:512], a[:512].double() @ ws[0].double())
    calls = calls_for(2 * m * n * k / 6e8 + 10)
    us = b.compare({
        "peertile": lambda: b.graph_of_ours([lambda w=w: matmul(own, w, out) for w in factors], calls),
        "cuBLAS": lambda: b.graph_of_theirs([lambda w=w: b.torch.matmul(a, w, out=other) for w in ws], calls),
    })  # fmt: skip
    found: Json = {"us": us, "relative_error": error}
    if isinstance(us["peertile"], float) and isinstance(us["cuBLAS"], float):
        rate = 2 * m * n * k / us["peertile"] / 1e6
        found |= {"ratio": round(us["cuBLAS"] / us["peertile"], 3), "TFLOP/s": round(rate)}
    return found


@contextlib.contextmanager
def compiled_with(**options: Any) -> Iterator[None]:
    """Kernels that are compiled within the context have these `CudaOptions`, and are neither kept nor found on disk."""
    compile_module: Any = importlib.import_module("peertile.backends.cuda.compile")
    direct: Any = importlib.import_module("peertile.direct")
    made, found = compile_module.compile_kernel, direct._found_or_made

    def compile_kernel(kernel: Any, arch: str = "sm_90", *, options: Any = None, keep: bool = False) -> Any:
        more = dataclasses.replace(options or CudaOptions(), **changes)
        return made(kernel, arch, options=more)

    changes = options
    compile_module.compile_kernel, direct._found_or_made = compile_kernel, lambda make, *_: make()
    try:
        yield
    finally:
        compile_module.compile_kernel, direct._found_or_made = made, found


@contextlib.contextmanager
def without_checks() -> Iterator[None]:
    """Kernels that are compiled within the context check nothing, which nothing but a measurement may want."""
    compile_module: Any = importlib.import_module("peertile.backends.cuda.compile")
    made = compile_module.compile_kernel

    def compile_kernel(kernel: Any, arch: str = "sm_90", *, options: Any = None, keep: bool = False) -> Any:
        for op in [op for op in walk(kernel.body) if isinstance(op, Check)]:
            op.parent.ops.remove(op)
        return made(kernel, arch, options=options)

    with compiled_with():
        compile_module.compile_kernel = compile_kernel
        yield


@pt.kernel
def paged_copy(z: T.Exclusive, x: T.Shared, pages: T.Shared) -> None:
    """Tiles of x in the order of a table: their indices are known in the kernel alone."""
    m, n = z.index
    z.store(x.load((T.ld(pages, (m,)), n), z.tile_shape))


@pt.kernel
def paged_product(z: T.Exclusive, x: T.Shared, w: T.Shared, pages: T.Shared, BK: T.Const[int]) -> None:
    """z = the rows of x in the order of a table, times w."""
    m, n = z.index
    BM, BN = z.tile_shape
    acc = T.zeros((BM, BN), T.f32)
    at = T.ld(pages, (m,))
    for k in T.range(x.num_tiles((BM, BK))[1], stages=4):
        acc = T.mma(x.load((at, k), (BM, BK)), w.load((k, n), (BK, BN)), acc)
    z.store(acc.astype(z.dtype))


def checked(b: Bench) -> None:
    """Kernels that check in the kernel, beside the same without their checks."""
    torch = b.torch
    rows, width = 32768 // SHRINK, 4096 // SHRINK
    x, z = b.randn(rows, width), b.poisoned(rows, width)
    own, out = b.ours(x), b.ours(z)
    pages = b.ours(torch.randperm(rows // 4, device=PLACE))
    blocks = b.ours(torch.randperm(rows // 128, device=PLACE))
    ids = b.ours(torch.randint(0, rows, (rows,), device=PLACE))
    w = b.ours(b.randn(width, width))
    tables = heads.rope_tables(rows, 128)
    places = b.ours(torch.arange(rows, device=PLACE)[None])
    q, turned = (t.reshape(1, rows * width // 128 // rows, rows, 128) for t in (own, out))

    def cases(mark: str) -> dict[str, Callable[[], Any]]:
        copy, product, look, turn = (
            pt.kernel(k.fn) for k in (paged_copy, paged_product, layer_kernels.embedding, layer_kernels.rope)
        )
        return {
            f"paged copy{mark}": lambda: copy(out.partition((4, min(1024, width))), own, pages),
            f"paged product{mark}": lambda: product(out.partition((128, 256)), own, w, blocks, BK=64),
            f"embedding{mark}": lambda: look(out.partition((8, 256)), own, ids),
            f"rope{mark}": lambda: turn(
                turned.partition((1, 4, 16, 64)), q, *tables, places, PAIRED=False, WHOLE=True),
        }  # fmt: skip

    def one() -> Json:
        with compiled_with():
            plain = cases("")
            for op in plain.values():
                op().sync()
        with without_checks():
            bare = cases(", unchecked")
            for op in bare.values():
                op().sync()
        us = b.compare({name: lambda op=op: b.graph_of_ours([op], 8) for name, op in (plain | bare).items()}, 11)  # type: ignore[misc]
        slower = {name: round(us[name] / us[f"{name}, unchecked"], 4) for name in plain}
        return {"us": us, "checked_of_unchecked": slower}

    case(b, "checked", f"bf16 {rows}x{width}", one)


TILES: dict[tuple[int, int, int], list[Json]] = {
    (256, 8192, 8192): [
        {"tile": (128, 128), "inner": 64, "stages": 5, "is_persistent": False},
        {"tile": (256, 128), "inner": 64, "stages": 4, "split": 2},
        {"tile": (128, 256), "inner": 64, "stages": 4, "split": 2},
        {"tile": (256, 64), "inner": 64, "stages": 5, "is_persistent": False},
        {"tile": (64, 256), "inner": 64, "stages": 5, "is_persistent": False},
        {"tile": (128, 128), "inner": 128, "stages": 3, "is_persistent": False},
    ],
    (2048, 5120, 8192): [
        {"tile": (128, 256), "inner": 64, "stages": 4},
        {"tile": (128, 128), "inner": 64, "stages": 5, "is_persistent": False},
        {"tile": (128, 128), "inner": 64, "stages": 4},
        {"tile": (256, 128), "inner": 64, "stages": 4},
        {"tile": (64, 256), "inner": 64, "stages": 5},
        {"tile": (256, 64), "inner": 64, "stages": 5},
    ],
    (2048, 8192, 4096): [
        {"tile": (256, 128), "inner": 64, "stages": 4},
        {"tile": (128, 128), "inner": 64, "stages": 4},
    ],
    (8192, 5120, 8192): [
        {"tile": (128, 256), "inner": 64, "stages": 4},
        {"tile": (256, 128), "inner": 64, "stages": 4},
    ],
}


def tiles(b: Bench) -> None:
    """Ways to cut a product, beside the one that the table has."""
    for (m, n, k), ways_of in TILES.items():
        n, k = n // SHRINK, k // SHRINK
        a, ws, z, other = b.randn(m, k), [b.randn(k, n) for _ in range(ROTATE)], b.poisoned(m, n), b.poisoned(m, n)
        own, factors, out = b.ours(a), [b.ours(w) for w in ws], b.ours(z)
        want = a[:256].double() @ ws[0].double()
        calls = calls_for(2 * m * n * k / 6e8 + 10)
        cublas = b.graph_of_theirs([lambda w=w: b.torch.matmul(a, w, out=other) for w in ws], calls)  # type: ignore[misc]
        for way in ways_of:
            square = way["tile"] in ((128, 128), (256, 64), (64, 256))
            for warps in (4, 8) if square else (None,):

                def one(way: Json = way, warps: int | None = warps) -> Json:
                    chosen = products_module.Way(**way)
                    kernels = [
                        pt.kernel(k.fn) for k in (gemm.gemm, gemm.gemm_persistent, gemm.gemm_part, gemm.gemm_fold)
                    ]
                    saved = gemm.gemm, gemm.gemm_persistent, gemm.gemm_part, gemm.gemm_fold
                    gemm.gemm, gemm.gemm_persistent, gemm.gemm_part, gemm.gemm_fold = kernels
                    consts = {"BK": chosen.inner, "STAGES": chosen.stages, "TF32": False}
                    try:
                        with compiled_with(num_warps=warps):
                            products_module._launched(own, factors[0], out, chosen, consts).sync()
                            error = b.error(z[:256], want)
                            us = b.compare({
                                "peertile": lambda: b.graph_of_ours(
                                    [lambda w=w: products_module._launched(own, w, out, chosen, consts)
                                     for w in factors], calls),
                                "cuBLAS": lambda: cublas,
                            }, 5)  # fmt: skip
                    finally:
                        gemm.gemm, gemm.gemm_persistent, gemm.gemm_part, gemm.gemm_fold = saved
                    return {"us": us, "relative_error": error, "ratio": round(us["cuBLAS"] / us["peertile"], 3)}

                case(b, "tiles", f"{m}x{n}x{k} {way} warps {warps}", one)


@contextlib.contextmanager
def bulk_from(elements: int) -> Iterator[None]:
    """Kernels that are compiled within the context use bulk copies from so many elements of a product on."""
    module: Any = importlib.import_module("peertile.backends.cuda.memory")
    saved, module._WORTH_BULK = module._WORTH_BULK, elements
    try:
        yield
    finally:
        module._WORTH_BULK = saved


def attention_tiles(b: Bench) -> None:
    """Ways to cut attention."""
    module: Any = importlib.import_module("peertile.library.attention_kernels")
    made: dict[tuple[int, ...], Any] = {}
    for tokens in (4096 // SHRINK, 16384 // SHRINK**2):
        sets = [[b.randn(1, 16, tokens, 128) for _ in range(3)] + [b.poisoned(1, 16, tokens, 128)] for _ in range(2)]
        own = [[b.ours(t) for t in four] for four in sets]
        flops = 2 * 16 * tokens * tokens * 128
        for rows, keys, stages, warps, registers in (
            (128, 64, 3, 8, None),
            (128, 64, 2, 8, 128),
            (64, 64, 2, 4, None),
            (64, 64, 3, 4, None),
            (64, 32, 4, 4, None),
            (64, 32, 3, 4, 160),
            (64, 128, 2, 4, None),
        ):  # fmt: skip

            def one(
                rows: int = rows,
                keys: int = keys,
                stages: int = stages,
                warps: int = warps,
                most: int | None = registers,
            ) -> Json:
                attend = made.setdefault((rows, keys, stages, warps, most or 0), pt.kernel(module.attend.fn))

                def op(o: Any) -> Any:
                    y = o[3].permute(2, 0, 1, 3).partition((rows, 1, 1, None))
                    return attend(
                        y, *o[:3], o[0], 128**-0.5 / math.log(2), BK=keys, CAUSAL=True, BOUNDED=False, NEGATED=False,
                        STAGES=stages,
                    )  # fmt: skip

                with compiled_with(num_warps=warps, num_stages=stages, max_registers=most), bulk_from(2048):
                    op(own[0]).sync()
                    us = b.compare({"peertile": lambda: b.graph_of_ours([lambda o=o: op(o) for o in own], 4)}, 5)
                q, k, v, got = (t[0, 3, :2048].double() for t in sets[0])
                later = b.torch.ones(len(q), len(q), device=PLACE).triu(1).bool()
                score = (q @ k.t() / 128**0.5).masked_fill(later, -math.inf)
                error = b.error(got, b.torch.softmax(score, -1) @ v)
                return {"us": us, "relative_error": error, "TFLOP/s": round(flops / us["peertile"] / 1e6)}

            case(b, "attention_tiles", f"{tokens}: {rows} x {keys}, {stages} stages, {warps} warps, {registers}", one)


def row_warps(b: Bench) -> None:
    """Warps and rows of a program for kernels that own whole rows."""
    for width, tile_rows in ((16384, (1,)), (8192, (1,)), (4096, (1, 2)), (1024, (2, 4, 8))):
        xs, zs = ([make(16384 // SHRINK, width) for _ in range(ROTATE)] for make in (b.randn, b.poisoned))
        gain = b.ours(b.randn(width))
        pairs = [(b.ours(x), b.ours(z)) for x, z in zip(xs, zs, strict=True)]
        for name in ("rms_norm", "softmax"):
            for rows in tile_rows:
                for warps in (8, 16, 4):

                    def one(name: str = name, rows: int = rows, warps: int = warps) -> Json:
                        made = pt.kernel(getattr(layer_kernels, name).fn)

                        def op(p: Any) -> Any:
                            part = p[1].partition((rows, None))
                            if name == "softmax":
                                return made(part, p[0])
                            return made(part, p[0], p[0], gain, 1e-6, ADDED=False)

                        with compiled_with(num_warps=warps):
                            us = b.compare(
                                {"peertile": lambda: b.graph_of_ours([lambda p=p: op(p) for p in pairs], 6)}, 5
                            )
                        return {"us": us, "GB/s": round(4 * 16384 * width / us["peertile"] / 1000)}

                    case(b, "row_warps", f"{name} 16384x{width}, {rows} rows, {warps} warps", one)


@contextlib.contextmanager
def emitted_with(change: Callable[[str], str]) -> Iterator[None]:
    """Kernels that are compiled within the context have their Triton source changed."""
    compile_module: Any = importlib.import_module("peertile.backends.cuda.compile")
    emit = compile_module.emit_kernel

    def emit_kernel(*arguments: Any, **options: Any) -> Any:
        emitted = emit(*arguments, **options)
        emitted.source = "\n".join(change(line) for line in emitted.source.split("\n"))
        return emitted

    compile_module.emit_kernel = emit_kernel
    try:
        yield
    finally:
        compile_module.emit_kernel = emit


def row_hints(b: Bench) -> None:
    """What hints for the caches do for rows that are read and written once."""

    def once_stored(line: str) -> str:
        return re.sub(r"^( *tl\.store\(.*)\)$", r'\1, cache_modifier=".cs")', line)

    def once_loaded(line: str) -> str:
        return re.sub(r"(tl\.load\(x_at, .*)\)$", r'\1, eviction_policy="evict_first")', line)

    hints = {
        "none": lambda s: s,
        "stores": once_stored,
        "loads": once_loaded,
        "both": lambda s: once_loaded(once_stored(s)),
    }
    for width in (16384, 8192, 1024):
        xs, zs = ([make(16384 // SHRINK, width) for _ in range(ROTATE)] for make in (b.randn, b.poisoned))
        gain = b.ours(b.randn(width))
        pairs = [(b.ours(x), b.ours(z)) for x, z in zip(xs, zs, strict=True)]
        for hint, change in hints.items():
            for warps in (8, 16) if width > 1024 else (4,):

                def one(change: Any = change, warps: int = warps) -> Json:
                    made = pt.kernel(layer_kernels.rms_norm.fn)

                    def op(p: Any) -> Any:
                        return made(
                            p[1].partition((1 if width > 1024 else 4, None)), p[0], p[0], gain, 1e-6, ADDED=False
                        )

                    with compiled_with(num_warps=warps), emitted_with(change):
                        us = b.compare({"peertile": lambda: b.graph_of_ours([lambda p=p: op(p) for p in pairs], 6)}, 5)
                    return {"us": us, "GB/s": round(4 * 16384 * width / us["peertile"] / 1000)}

                case(b, "row_hints", f"rms_norm 16384x{width}, {hint}, {warps} warps", one)


def fft(b: Bench) -> None:
    torch = b.torch

    def one(rows: int, length: int) -> Json:
        x, y = (b.randn(rows, length, dtype=torch.float32) for _ in range(2))
        u, v = (b.poisoned(rows, length, dtype=torch.float32) for _ in range(2))
        own = [b.ours(t) for t in (x, y, u, v)]
        fourier = Fourier(length)
        fourier.forward(own[0], own[1], (own[2], own[3])).sync()
        want = torch.fft.fft(torch.complex(x.double(), y.double()))
        error = max(b.error(u, want.real), b.error(v, want.imag))
        z = torch.complex(x, y)
        us = b.compare({
            "peertile": lambda: b.graph_of_ours(
                [lambda: fourier.forward(own[0], own[1], (own[2], own[3]))], calls_for(60)),
            "cuFFT": lambda: b.graph_of_theirs([lambda: torch.fft.fft(z)], calls_for(60)),
        })  # fmt: skip
        return {"us": us, "relative_error": error, **_rates(us, "cuFFT", 4 * rows * length * 4)}

    for rows, length in ((16384, 256), (4096, 1024), (1024, 4096), (256, 16384)):
        case(b, "fft", f"{rows}x{length}", lambda r=rows, n=length: one(r, n))  # type: ignore[misc]


# ---------------------------------------------------------------- two GPUs: products with communication

GATHER = [(8192 // SHRINK, 10240 // SHRINK), (8192 // SHRINK, 57344 // SHRINK)]
"""Inner extent and all columns of the products of a 70B model that follow a gather: queries, keys and values; gates."""
SCATTER = [(8192 // SHRINK, 8192 // SHRINK), (28672 // SHRINK, 8192 // SHRINK)]
"""All of the inner extent, and columns, of those that end in a reduction: after attention; down."""


def ways(b: Bench) -> list[tuple[str, Json]]:
    """How fused products are tried: name and options of the communicator."""
    text = os.environ.get("PEERTILE_BENCH_WAYS")
    return [(name, options) for name, options in json.loads(text).items()] if text else [("", {})]


def _communicator(b: Bench, nbytes: int, options: Json) -> FusedProducts:
    more = dict(options)
    if "tile" in more:
        more["tile"] = tuple(more["tile"])
    more.setdefault("partials", "bf16")
    more["partials"] = getattr(pt, more["partials"])
    return FusedProducts(b.group, staging_bytes=nbytes, **more)


def gather(b: Bench) -> None:
    for m in (2048 // SHRINK, 8192 // SHRINK):
        for k, n in GATHER:
            for name, options in ways(b):
                label = f"all-gather+GEMM {m}x{n}x{k} {name}"
                case(b, "gather", label, lambda m=m, n=n, k=k, o=options: _gather(b, m, n, k, o))  # type: ignore[misc]


def _gather(b: Bench, m: int, n: int, k: int, options: Json) -> Json:
    torch, size, me = b.torch, b.group.size, b.group.rank
    columns, own_rows = n // size, m // size
    a, ws = b.randn(own_rows, k), [b.randn(k, columns) for _ in range(2)]
    every = torch.empty(m, k, dtype=a.dtype, device=PLACE)
    torch.distributed.all_gather_into_tensor(every, a)
    z, other = b.poisoned(m, columns), b.poisoned(m, columns)
    own, factors, out = b.ours(a), [b.ours(w) for w in ws], b.ours(z)
    with _communicator(b, m * k * 2, options) as fused:
        fused.all_gather_matmul(own, factors[0], out).sync()
        error = max(
            b.error(z[r : r + 256], every[r : r + 256].double() @ ws[0].double()) for r in (0, own_rows - 256, m - 256)
        )
        error = max(error, math.nan if bool(torch.isnan(z).any()) else 0.0)
        calls = max(2, min(12, int(5000 / (2 * m * columns * k / 6e8))))

        def sequence(w: Any) -> None:
            torch.distributed.all_gather_into_tensor(every, a)
            torch.matmul(every, w, out=other)

        us = b.compare({
            "peertile": lambda: b.graph_of_ours(
                [lambda w=w: fused.all_gather_matmul(own, w, out) for w in factors], calls),
            "sequence": lambda: b.graph_of_theirs([lambda w=w: sequence(w) for w in ws], calls),
            "GEMM": lambda: b.graph_of_theirs([lambda w=w: torch.matmul(every, w, out=other) for w in ws], calls),
            "NCCL": lambda: b.graph_of_theirs([lambda: torch.distributed.all_gather_into_tensor(every, a)], calls),
        })  # fmt: skip
        b.group.barrier("end")
    return {"us": us, "relative_error": error, "rank": me, **_hidden(us)}


def _hidden(us: Json) -> Json:
    """How many times as fast as the sequence, and how many times the longer of its parts it takes."""
    if not all(isinstance(us.get(name), float) for name in ("peertile", "sequence", "GEMM", "NCCL")):
        return {}
    longest = max(us["GEMM"], us["NCCL"])
    return {"ratio": round(us["sequence"] / us["peertile"], 3), "of_longest": round(us["peertile"] / longest, 3)}


def scatter(b: Bench) -> None:
    for m in (2048 // SHRINK, 8192 // SHRINK):
        for k, n in SCATTER:
            for name, options in ways(b):
                label = f"GEMM+reduce-scatter {m}x{n}x{k} {name}"
                case(b, "scatter", label, lambda m=m, n=n, k=k, o=options: _scatter(b, m, n, k, o))  # type: ignore[misc]


def _scatter(b: Bench, m: int, n: int, k: int, options: Json) -> Json:
    torch, size = b.torch, b.group.size
    inner, rows = k // size, m // size
    a, ws = b.randn(m, inner), [b.randn(inner, n) for _ in range(2)]
    z, part, other = b.poisoned(rows, n), b.poisoned(m, n), b.poisoned(rows, n)
    own, factors, out = b.ours(a), [b.ours(w) for w in ws], b.ours(z)
    with _communicator(b, (m + 512) * n * 4, options) as fused:
        fused.matmul_reduce_scatter(own, factors[0], out).sync()
        want = a.double() @ ws[0].double()
        torch.distributed.all_reduce(want)
        error = b.error(z, want[rows * b.group.rank : rows * (b.group.rank + 1)])
        del want
        calls = max(2, min(12, int(5000 / (2 * m * n * inner / 6e8))))

        def sequence(w: Any) -> None:
            torch.matmul(a, w, out=part)
            torch.distributed.reduce_scatter_tensor(other, part)

        us = b.compare({
            "peertile": lambda: b.graph_of_ours(
                [lambda w=w: fused.matmul_reduce_scatter(own, w, out) for w in factors], calls),
            "sequence": lambda: b.graph_of_theirs([lambda w=w: sequence(w) for w in ws], calls),
            "GEMM": lambda: b.graph_of_theirs([lambda w=w: torch.matmul(a, w, out=part) for w in ws], calls),
            "NCCL": lambda: b.graph_of_theirs([lambda: torch.distributed.reduce_scatter_tensor(other, part)], calls),
        })  # fmt: skip
        b.group.barrier("end")
    return {"us": us, "relative_error": error, **_hidden(us)}


def reduce(b: Bench) -> None:
    for k, n in SCATTER:
        for m in (1, 16, 64, 4):
            for name, options in ways(b):
                label = f"GEMM+all-reduce {m}x{n}x{k} {name}"
                case(b, "reduce", label, lambda m=m, n=n, k=k, o=options: _reduce(b, m, n, k, dict(o)))  # type: ignore[misc]


def _reduce(b: Bench, m: int, n: int, k: int, options: Json) -> Json:
    """With the communicator of collectives that a program has anyhow; with {"together": true} in one launch."""
    torch, size = b.torch, b.group.size
    inner = k // size
    a, ws = b.randn(m, inner), [b.randn(inner, n) for _ in range(ROTATE)]
    z, part = b.poisoned(m, n), b.poisoned(m, n)
    own, factors, out = b.ours(a), [b.ours(w) for w in ws], b.ours(z)
    together = options.pop("together", False)
    with (
        Collectives(b.group) as comm,
        _communicator(b, 16 * MIB, {"collectives": None if together else comm, **options}) as fused,
    ):
        fused.matmul_all_reduce(own, factors[0], out).sync()
        want = a.double() @ ws[0].double()
        torch.distributed.all_reduce(want)
        error = b.error(z, want)
        calls = 30

        def sequence(w: Any) -> None:
            torch.matmul(a, w, out=part)
            torch.distributed.all_reduce(part)

        us = b.compare({
            "peertile": lambda: b.graph_of_ours(
                [lambda w=w: fused.matmul_all_reduce(own, w, out) for w in factors], calls),
            "sequence": lambda: b.graph_of_theirs([lambda w=w: sequence(w) for w in ws], calls),
            "GEMM": lambda: b.graph_of_theirs([lambda w=w: torch.matmul(a, w, out=part) for w in ws], calls),
            "NCCL": lambda: b.graph_of_theirs([lambda: torch.distributed.all_reduce(part)], calls),
        })  # fmt: skip
        b.group.barrier("end")
    return {"us": us, "relative_error": error, **_hidden(us)}


# ---------------------------------------------------------------- two GPUs: experts


def experts(b: Bench) -> None:
    for rows, width, number, top_k in (
        (4096 // SHRINK, 7168, 64, 8), (8192 // SHRINK, 4096, 16, 2), (1024 // SHRINK, 7168, 64, 8),
    ):  # fmt: skip
        label = f"{rows} rows of {width}, {number} experts, top {top_k}"
        case(b, "experts", label, lambda r=rows, w=width, e=number, t=top_k: _experts(b, r, w, e, t))  # type: ignore[misc]


def _experts(b: Bench, rows: int, width: int, number: int, top_k: int) -> Json:
    torch, size, me = b.torch, b.group.size, b.group.rank
    x = b.randn(rows, width)
    ids = torch.rand(rows, number, device=PLACE).topk(top_k, -1).indices.contiguous()
    weights = torch.rand(rows, top_k, device=PLACE)
    places = 4 * rows * top_k * size // number

    def made(partials: pt.DType | None) -> Experts:
        return Experts(
            b.group,
            experts=number,
            rows=rows,
            width=width,
            top_k=top_k,
            dtype=pt.bf16,
            places=places,
            partials=partials,
        )

    # With two choices or more for each rank it pays to add them before they are sent.
    with made(pt.bf16 if top_k >= 2 * size else None) as moe, made(None) as plain:
        own, chosen, factors = b.ours(x), b.ours(ids), b.ours(weights)
        z = b.poisoned(rows, width)
        out = b.ours(z)
        sent = moe.dispatch(own, chosen).sync()
        held = torch.from_dlpack(sent.rows.local)
        counts = torch.from_dlpack(sent.counts).ravel().tolist()
        everything = [torch.empty_like(x) for _ in range(size)]
        choices = [torch.empty_like(ids) for _ in range(size)]
        torch.distributed.all_gather(everything, x)
        torch.distributed.all_gather(choices, ids)
        right = True
        for e in range(moe.on_rank):
            want = torch.cat([everything[r][(choices[r] == me * moe.on_rank + e).any(-1)] for r in range(size)])
            right = right and counts[e] == len(want) and bool((held[e * places : e * places + counts[e]] == want).all())
        errors = {}
        for name, ways in (("combine", moe), ("combine, nothing added first", plain)):
            z.fill_(math.nan)
            b.settle()
            ways.combine(ways.dispatch(own, chosen).sync(), factors, out=out).sync()
            errors[name] = b.error(z, x.double() * weights.double().sum(-1, keepdim=True))
        there = int((ids // moe.on_rank != me).sum())
        # A rank's row is sent to another one once, whatever it chose there.
        once = sum(int((ids // moe.on_rank == r).any(-1).sum()) for r in range(size) if r != me)

        def combined(ways: Experts) -> Callable[[int], float]:
            last = ways.dispatch(own, chosen).sync()
            return b.graph_of_ours([lambda: ways.combine(last, factors, out=out)], 4)

        # One after the other: without graphs each dispatch overwrites what the last one sent.
        us = b.compare({"combine": lambda: combined(moe), "combine, nothing added first": lambda: combined(plain)})
        us |= b.compare({"dispatch": lambda: b.graph_of_ours([lambda: moe.dispatch(own, chosen)], 4)})
        mine, peer = (torch.ones((64 << 20) // SHRINK**2, dtype=torch.int32, device=PLACE) for _ in range(2))
        copied = b.compare({
            "us": lambda: b.graph_of_theirs([lambda: torch.distributed.all_to_all_single(peer, mine)], 2),
        })  # fmt: skip
        b.group.barrier("end")
    nbytes = there * width * 2
    rates = {f"{k} GB/s": round(nbytes / v / 1000, 1) for k, v in us.items() if isinstance(v, float)}
    found: Json = {"us": us, "right": right, "relative_error": errors["combine"], "relative_errors": errors, **rates}
    found |= {"bytes_to_peer": nbytes, "bytes_on_the_link": once * width * 2}
    return {**found, "nccl_all_to_all_256MiB": copied}


# ---------------------------------------------------------------- whole programs


def loaded(name: str) -> ModuleType:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[f"example_{name}"] = module
    spec.loader.exec_module(module)
    return module


def programs(b: Bench) -> None:
    """The programs that the tests run on every target, at their sizes."""
    small: Any = importlib.import_module("tests.fused.fused_programs")
    for name, program in small.PROGRAMS.items():
        case(b, "programs", name, lambda p=program: {"ok": p(b.group)})  # type: ignore[misc]


def large(b: Bench) -> None:
    """The same programs at larger, uneven sizes."""
    small: Any = importlib.import_module("tests.fused.fused_programs")
    large: dict[str, Callable[[], Any]] = {
        "gathered bf16": lambda: small.gathered_product(
            b.group, (300, 515), 1000, 520, "bf16", staging_bytes=8 * MIB, movers=4),
        "gathered f16 few": lambda: small.gathered_product(
            b.group, (1, 0), 256, 64, "f16", staging_bytes=MIB),
        "scattered bf16": lambda: small.scattered_product(
            b.group, (300, 200), (512, 264), 520, "bf16", staging_bytes=16 * MIB),
        "scattered bf16 partials": lambda: small.scattered_product(
            b.group, (300, 200), (512, 264), 520, "bf16", staging_bytes=16 * MIB, partials=pt.bf16),
        "reduced bf16": lambda: small.reduced_product(b.group, 17, (512, 264), 520, "bf16", staging_bytes=8 * MIB),
        "ring bf16": lambda: small.ring(b.group, (200, 333), 2, 1, 64, "bf16", True, movers=2),
        "ring f32": lambda: small.ring(b.group, (65, 64), 2, 1, 32, "f32", False),
    }  # fmt: skip
    for name, function in large.items():
        case(b, "large", name, lambda f=function: {"ok": f()})  # type: ignore[misc]


def embed(b: Bench) -> None:
    """The embedding example's encoder with random weights of the published shapes, against numpy in float64."""
    example: Any = loaded("embed")
    reference: Any = importlib.import_module("tests.layers.test_embed")

    def one() -> Json:
        config = example.Config(6, 12, 384, 1536, 1e-12)
        weights = example.random_weights(np.random.default_rng(5), config, 2000, 512)
        rng = np.random.default_rng(6)
        texts = [rng.integers(0, 2000, n).tolist() for n in (12, 37, 5)]
        with Collectives(b.group) as comm:
            encoder = example.Encoder(b.group, comm, config, weights)
            got = encoder.encode(texts).copy()
            want = np.array([reference.bert(config, weights, ids) for ids in texts])
            cosine = float(np.abs(1 - np.sum(want * got, 1)).max())
            again = [rng.integers(0, 2000, 128).tolist() for _ in range(32)]
            encoder.encode(again)
            graph = encoder.steps[32, 128][0]
            times = []
            for _ in range(5):
                b.group.barrier("turn")
                begin = time.perf_counter()
                for _ in range(10):
                    graph.launch().sync_on(encoder.stream)
                times.append((time.perf_counter() - begin) / 10 * 1e6)
        assert cosine < 1e-3, cosine
        return {"one_minus_cosine": cosine, "us_32_texts_of_128": round(statistics.median(times), 1)}

    case(b, "embed", f"random weights, {b.group.size} ranks", one)


def decode(b: Bench) -> None:
    """The decoder's step as one graph: the example's own check, and a model of the shapes of a Qwen 0.5B."""
    example: Any = loaded("decode_loop")

    def small() -> Json:
        example.main.fn(b.group) if hasattr(example.main, "fn") else example.main(b.group)
        return {"ok": True}

    case(b, "decode", f"example, {b.group.size} ranks", small)


def interop(b: Bench) -> None:
    """The library on torch tensors, with gradients, against torch itself."""
    torch = b.torch
    ptt: Any = importlib.import_module("peertile.torch")
    dist, size, me = torch.distributed, b.group.size, b.group.rank

    def near(got: Any, want: Any, bound: float) -> float:
        error = b.error(got, want.double())
        assert error < bound, error
        return error

    def collectives() -> Json:
        x = b.randn(100_003, dtype=torch.float32)
        theirs = x.clone()
        if size > 1:
            dist.all_reduce(theirs)
        return {"relative_error": near(ptt.all_reduce(x.clone(), b.group), theirs, 1e-6)}

    def maps() -> Json:
        x, w, bias = b.randn(96, 256), b.randn(512, 256), b.randn(512)
        for t in (x, w, bias):
            t.requires_grad_()
        ours = ptt.linear(x, w, bias, activation=ptt.Activation.GELU)
        up = b.randn(96, 512)
        grads = torch.autograd.grad(ours, (x, w, bias), up)
        exact = [t.detach().double().requires_grad_() for t in (x, w, bias)]
        want = torch.nn.functional.gelu(torch.nn.functional.linear(*exact))
        expected = torch.autograd.grad(want, exact, up.double())
        errors = [near(ours.detach(), want.detach(), 1e-2)]
        errors += [near(g, e, 2e-2) for g, e in zip(grads, expected, strict=True)]
        return {"relative_error": max(errors)}

    def split() -> Json:
        x, w = b.randn(64, 256).requires_grad_(), b.randn(128, 256).requires_grad_()
        rows = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(rows, x.detach())
        got = ptt.gather_linear(x, w, group=b.group)
        up = b.randn(64 * size, 128)
        gx, gw = torch.autograd.grad(got, (x, w), up)
        whole = torch.cat(rows).double()
        want_x = up.double() @ w.detach().double()
        dist.all_reduce(want_x)
        errors = [
            near(got.detach(), whole @ w.detach().double().t(), 1e-2),
            near(gw, up.double().t() @ whole, 2e-2),
            near(gx, want_x[64 * me : 64 * me + 64], 2e-2),
        ]
        reduced = ptt.linear_reduce(x.detach(), w.detach(), group=b.group)
        want = x.detach().double() @ w.detach().double().t()
        dist.all_reduce(want)
        scattered = ptt.linear_scatter(torch.cat(rows), w.detach(), group=b.group)
        total = whole @ w.detach().double().t()
        dist.all_reduce(total)
        errors += [near(reduced, want, 2e-2), near(scattered, total[64 * me : 64 * me + 64], 2e-2)]
        return {"relative_error": max(errors)}

    case(b, "interop", "all_reduce", collectives)
    case(b, "interop", "linear with gradients", maps)
    if size > 1:
        case(b, "interop", "linear maps over ranks", split)


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "softmax": softmax, "rms_norm": rms_norm, "swiglu": swiglu, "rope": rope, "attention": attention,
    "matmul": products, "fft": fft, "gather": gather, "scatter": scatter, "reduce": reduce, "experts": experts,
    "programs": programs, "embed": embed, "decode": decode, "tiles": tiles, "attention_tiles": attention_tiles,
    "row_warps": row_warps, "checked": checked, "large": large, "row_hints": row_hints, "interop": interop,
}  # fmt: skip
ALONE = ["attention", "matmul", "softmax", "rms_norm", "swiglu", "rope", "fft", "programs", "embed", "decode"]
TOGETHER = ["programs", "gather", "scatter", "reduce", "experts", "embed", "decode"]


def rank_main(group: pt.Group, names: list[str], limit_s: float, out: Path | None) -> None:
    b = Bench(group, out)
    b.tell(section="ready", device=b.device.capabilities.name, ranks=group.size, torch=b.torch.__version__)
    for entry in names:
        name, _, bound = entry.partition("=")
        left = limit_s - (time.monotonic() - b.begin)
        b.deadline = time.monotonic() + min(left, float(bound or 60))
        try:
            SECTIONS[name](b)
        except Late:
            b.tell(section=name, late=True)
        except Exception as error:
            b.tell(section=name, error=f"{type(error).__name__}: {str(error)[:500]}", at=traceback.format_exc()[-600:])
    b.settle()
    group.barrier("end")
    group.close()
    sys.stdout.flush()
    os._exit(0)  # not through the finalisers of two libraries on one GPU


def main(arguments: list[str]) -> None:
    options = {"--ranks": "1", "--limit": "1e9", "--out": ""}
    names: list[str] = []
    rest = iter(arguments)
    for word in rest:
        if word in options:
            options[word] = next(rest)
        else:
            names.append(word)
    ranks = int(options["--ranks"])
    out = Path(options["--out"]) if options["--out"] else None
    names = names or (ALONE if ranks == 1 else TOGETHER)

    def entry(group: pt.Group) -> None:
        rank_main(group, names, float(options["--limit"]), out)

    pt.run(entry, ranks=ranks)


if __name__ == "__main__":
    main(sys.argv[1:])
