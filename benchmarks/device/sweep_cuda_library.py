"""Ways to run attention, a product of few rows, wide norms and a product with an all-reduce, beside what is now chosen.

    PYTHONPATH=src:. python3 benchmarks/device/sweep_cuda_library.py [--ranks N] [--limit S] [--out FILE] [SECTION ...]

`PEERTILE_SWEEP_ONLY` chooses among the ways.

One GPU: attention (beside the fastest of torch's backends), skinny and squares (beside cuBLAS), norms (beside
torch.compile).
Two (`--ranks 2`): reduce (beside cuBLAS + NCCL, and cuBLAS alone). Each way is built, checked against float64 with
outputs full of NaN, and timed in turns with the others, as in bench_cuda_library.py, whose options these are. Prints a
JSON line for each way, and at the end of a section a table: microseconds, and times as fast as the peer.
Makes no multicast object and changes no setting of a GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import bench_cuda_library as bench

import peertile as pt
import peertile.language as T
from peertile.library import attention as heads
from peertile.library import attention_kernels, gemm, layer_kernels, layers
from peertile.library.collectives import Collectives
from peertile.library.products import matmul

Bench, Json, Call, SHRINK, PLACE = bench.Bench, bench.Json, bench.Call, bench.SHRINK, bench.PLACE
BOUND = 1e-2
"""Relative error from which on a way is wrong: bf16 rounds by 4e-3 at most."""


@dataclass
class Ways:
    """What was measured of one case: {way: microseconds}, and the peers'."""

    title: str
    rows: list[tuple[str, float | str]] = field(default_factory=list)

    def table(self, peers: dict[str, float]) -> str:
        best = min(peers.values(), default=math.nan)
        width = max([len(name) for name, _ in self.rows], default=0)
        lines = [f"{self.title}; peers: {', '.join(f'{n} {us:.2f} us' for n, us in peers.items())}"]
        for name, us in sorted(self.rows, key=lambda row: (isinstance(row[1], str), row[1])):
            said = us if isinstance(us, str) else f"{us:9.2f} us  {best / us:6.3f}"
            lines.append(f"  {name:{width}}  {said}")
        return "\n".join(lines)


@contextlib.contextmanager
def _compiled(options: Json) -> Iterator[None]:
    """As `bench.compiled_with`; nothing changes for a way without options."""
    with bench.compiled_with(**options) if options else contextlib.nullcontext():
        yield


ONLY = "PEERTILE_SWEEP_ONLY"
"""Names of the ways to try, by regular expression: what may hang is tried in a process of its own."""


def _is_wanted(name: str) -> bool:
    return re.search(os.environ.get(ONLY, ""), name) is not None


def sweep(
    b: Bench, section: str, title: str, ways: dict[str, Callable[[], Json]], peers: dict[str, Callable[[], Any]]
) -> None:
    """Runs each way as a case that gives {"us": {"peertile": …}, "relative_error": …}, then the table."""
    ways = {name: way for name, way in ways.items() if _is_wanted(name)}
    found = Ways(title)
    theirs = {name: us for name, us in b.compare(peers).items() if isinstance(us, float)}
    for name, way in ways.items():

        def one(way: Callable[[], Json] = way, name: str = name) -> Json:
            result = way()
            us, error = result["us"].get("peertile"), result["relative_error"]
            right = error < BOUND  # a NaN is not
            found.rows.append((name, us if right and isinstance(us, float) else f"wrong: {error}" if not right else us))
            if isinstance(us, float) and theirs:
                result["ratio"] = round(min(theirs.values()) / us, 3)
            return {**result, "right": right}

        bench.case(b, section, f"{title}: {name}", one)
    b.tell(section=section, case=title, peers=theirs)
    if not b.group.rank:
        print(found.table(theirs), flush=True)


# ---------------------------------------------------------------- attention

FOUR, EIGHT = {"num_warps": 4}, {"num_warps": 8}
DIVIDED = {**FOUR, "specialize": True}
"""Of the groups of warps that share a loop one loads and two multiply, so that weights are formed meanwhile."""
ATTENTION: dict[str, Json] = {
    "flat 128 x 128, 2 buffers, divided": {"rows": 128, "keys": 128, "stages": 2, "options": DIVIDED},
    "flat 128 x 64, 3 buffers, divided": {"rows": 128, "keys": 64, "stages": 3, "options": DIVIDED},
    "flat 128 x 64, 4 buffers, divided": {"rows": 128, "keys": 64, "stages": 4, "options": DIVIDED},
    "diagonal 128 x 128, 2 buffers": {"rows": 128, "keys": 128, "stages": 2, "options": EIGHT},
    "diagonal 128 x 64, 3 buffers": {"rows": 128, "keys": 64, "stages": 3, "options": EIGHT},
    "two loops 128 x 128, 2 buffers": {"rows": 128, "keys": 128, "stages": 2, "options": EIGHT},
    "flat 128 x 128, 2 buffers, one loop": {"rows": 128, "keys": 128, "stages": 2, "options": EIGHT},
    "flat 128 x 128, 2 buffers, divided, in turn": {
        "rows": 128, "keys": 128, "stages": 2, "options": DIVIDED, "in turn": True
    },
    "flat 128 x 64, 3 buffers, divided, in turn": {
        "rows": 128, "keys": 64, "stages": 3, "options": DIVIDED, "in turn": True
    },
}  # fmt: skip
"""The kernel (`attend_flat`, `attend_diagonal` below, `attend`), rows, keys and buffers of a program, and what it is
compiled with; in turn: by as many programs as are resident."""


@pt.kernel
def attend_diagonal(
    o: T.Exclusive, q: T.Shared, k: T.Shared, v: T.Shared, scale: T.f32, BK: T.Const[int], CAUSAL: T.Const[bool],
    STAGES: T.Const[int] = 2,
) -> None:  # fmt: skip
    """As attend_flat for as many keys as queries: blocks at the diagonal come first, and the loop compares nothing."""
    BQ, D = o.tile_shape[0], o.tile_shape[2]
    for tile in o.tiles(down=True):
        i, h, _ = tile.index
        head = T.minimum(h, T.maximum(q.num_tiles((1, BQ, D))[0] - 1, 0))
        group = T.minimum(h // (q.shape[0] // k.shape[0]), T.maximum(k.num_tiles((1, BK, D))[0] - 1, 0))
        group = T.minimum(group, T.maximum(v.num_tiles((1, BK, D))[0] - 1, 0))
        query = T.reshape(q.load((head, i, 0), (1, BQ, D)), (BQ, D))
        best = T.full((BQ, 1), float("-inf"), T.f32)
        norm = T.zeros((BQ, 1), T.f32)
        acc = T.zeros((BQ, D), T.f32)
        last = k.num_tiles((1, BK, D))[1] - 1
        for n in T.static_range(BQ // BK):
            j = T.minimum(i * (BQ // BK) + n, last)
            score = T.mma(query, T.transpose(T.reshape(k.load((group, j, 0), (1, BK, D)), (BK, D))))
            seen = n * BK + T.iota(BK, T.i32)[None, :] <= T.iota(BQ, T.i32)[:, None]
            value = T.reshape(v.load((group, j, 0), (1, BK, D)), (BK, D))
            best, norm, acc = _with_block(T.where(seen, score, float("-inf")), value, scale, best, norm, acc)
        for j in T.range(T.minimum(i * (BQ // BK), last), stages=STAGES):
            score = T.mma(query, T.transpose(T.reshape(k.load((group, j, 0), (1, BK, D)), (BK, D))))
            value = T.reshape(v.load((group, j, 0), (1, BK, D)), (BK, D))
            best, norm, acc = _with_block(score, value, scale, best, norm, acc)
        out = acc * (1.0 / norm)
        tile.store(out.astype(o.dtype)[:, None, :])


def _with_block(
    score: T.Tile, value: T.Tile, scale: T.Tile, best: T.Tile, norm: T.Tile, acc: T.Tile
) -> tuple[T.Tile, T.Tile, T.Tile]:
    """What is kept of queries that each have seen a key before or do so now, and a block more."""
    peak = T.maximum(best, T.max(score, axis=1, keepdims=True) * scale)
    weight = attention_kernels.power(T.fma(score, scale, -peak))
    kept = T.exp2(best - peak)
    norm = norm * kept + T.sum(weight, axis=1, keepdims=True)
    return peak, norm, T.mma(weight.astype(value.dtype), value, acc * kept)


KERNELS = {"flat": attention_kernels.attend_flat, "diagonal": attend_diagonal, "two loops": attention_kernels.attend}
MADE: dict[str, Any] = {}
"""A kernel for each way, compiled once."""


def attention(b: Bench) -> None:
    for tokens in (4096 // SHRINK, 16384 // SHRINK**2, 8192 // SHRINK):
        _attention(b, 16, tokens, 128)


def _attention(b: Bench, number: int, tokens: int, dim: int) -> None:
    torch = b.torch
    sets = [
        [b.randn(1, number, tokens, dim) for _ in range(3)] + [b.poisoned(1, number, tokens, dim)] for _ in range(2)
    ]
    own = [[b.ours(t) for t in four] for four in sets]
    flat = [[t.reshape(number, tokens, dim) for t in four] for four in own]
    flops = 2 * number * tokens * tokens * dim
    calls = max(2, min(16, int(4000 / (flops / 5e8))))
    scale = dim**-0.5 / math.log(2)

    def error() -> float:
        worst, some = 0.0, min(tokens, 4096)
        for h in (0, number - 1):
            q, k, v = (t[0, h].double() for t in sets[0][:3])
            for first in sorted({0, tokens - some}):
                score = q[first : first + some] @ k.t() / dim**0.5
                at = torch.arange(first, first + some, device=PLACE)[:, None]
                score = score.masked_fill(torch.arange(tokens, device=PLACE)[None] > at, -math.inf)
                want = torch.softmax(score, -1) @ v
                worst = max(worst, b.error(sets[0][3][0, h, first : first + some], want))
        return math.nan if bool(torch.isnan(sets[0][3]).any()) else worst

    def run(op: Callable[[int], Any]) -> Json:
        sets[0][3].fill_(math.nan)
        b.settle()
        op(0).sync()
        wrong = error()
        us = b.compare({"peertile": lambda: b.graph_of_ours([lambda k=k: op(k) for k in range(2)], calls)}, 5)
        found = {"us": us, "relative_error": wrong, "same_bits": same_bits(op)}
        if isinstance(us["peertile"], float):
            found["TFLOP/s"] = round(flops / us["peertile"] / 1e6)
        return found

    def same_bits(op: Callable[[int], Any]) -> int:
        """How many runs of a hundred give the bits of the first one."""
        first = None
        count = 0
        for _ in range(100 if PLACE == "cuda" else 3):
            sets[0][3].fill_(math.nan)
            b.settle()
            op(0).sync()
            first = sets[0][3].clone() if first is None else first
            count += bool(torch.equal(first, sets[0][3]))
        return count

    def of(name: str, way: Json) -> Json:
        which = next(key for key in KERNELS if name.startswith(key))
        attend = MADE.setdefault(name, pt.kernel(KERNELS[which].fn))
        sizes = {"BK": way["keys"], "STAGES": way["stages"], "CAUSAL": True}

        def op(k: int) -> Any:
            if which == "two loops":
                part = own[k][3].permute(2, 0, 1, 3).partition((way["rows"], 1, 1, None))
                return attend(part, *own[k][:3], own[k][0], scale, BOUNDED=False, NEGATED=False, **sizes)
            part = flat[k][3].permute(1, 0, 2).partition((way["rows"], 1, None))
            if way.get("in turn"):
                part = part.persistent(programs=b.device.persistent_programs)
            queries = flat[k][0]
            if which == "flat":
                queries = queries.reshape(number * tokens, dim)
            return attend(part, queries, *flat[k][1:3], scale, **sizes)

        with _compiled(way["options"]):
            return run(op)

    ways: dict[str, Callable[[], Json]] = {
        "what is chosen": lambda: run(lambda k: heads.attention(*own[k][:3], causal=True, out=own[k][3]))
    }
    ways |= {name: lambda n=name, w=way: of(n, w) for name, way in ATTENTION.items()}  # type: ignore[misc]
    kernel = importlib.import_module("torch.nn.attention")

    def theirs(which: str) -> Any:
        def call(s: Any) -> Any:
            with kernel.sdpa_kernel(getattr(kernel.SDPBackend, which)):
                return torch.nn.functional.scaled_dot_product_attention(*s[:3], is_causal=True)

        return b.graph_of_theirs([lambda s=s: call(s) for s in sets], calls)

    backends = ("CUDNN_ATTENTION", "FLASH_ATTENTION") if PLACE == "cuda" else ()
    peers = {which: lambda w=which: theirs(w) for which in backends}  # type: ignore[misc]
    sweep(b, "attention", f"causal bf16 1x{number}x{tokens}x{dim}", ways, peers)


# ---------------------------------------------------------------- products of few rows

SKINNY: dict[str, Json] = {
    "128 x 128 x 64, 4 buffers, divided": {"tile": (128, 128), "inner": 64, "stages": 4, "options": DIVIDED},
    "128 x 128 x 64, 5 buffers, divided": {"tile": (128, 128), "inner": 64, "stages": 5, "options": DIVIDED},
    "128 x 128 x 128, 3 buffers, divided": {"tile": (128, 128), "inner": 128, "stages": 3, "options": DIVIDED},
    "128 x 128 x 64, 5 buffers, 4 warps": {"tile": (128, 128), "inner": 64, "stages": 5, "options": FOUR},
    "the same, plain stores": {"tile": (128, 128), "inner": 64, "stages": 5, "options": FOUR, "bulk": "ab"},
    "the same, bulk copies of b alone": {"tile": (128, 128), "inner": 64, "stages": 5, "options": FOUR, "bulk": "b"},
    "128 x 128 x 64, 5 buffers, 8 warps": {"tile": (128, 128), "inner": 64, "stages": 5, "options": EIGHT},
    "so, plain stores": {"tile": (128, 128), "inner": 64, "stages": 5, "options": EIGHT, "bulk": "ab"},
    "128 x 128 x 64, 6 buffers, 4 warps": {"tile": (128, 128), "inner": 64, "stages": 6, "options": FOUR},
    "128 x 128 x 64, 6 buffers, 8 warps": {"tile": (128, 128), "inner": 64, "stages": 6, "options": EIGHT},
    "256 x 64 x 64, 5 buffers, 4 warps": {"tile": (256, 64), "inner": 64, "stages": 5, "options": FOUR, "bulk": "ab"},
}  # fmt: skip
"""Of `gemm`, a program for each tile. Two rows of tiles read b twice, the second time from a cache. `bulk` names the
factors with bulk copies: each takes a descriptor that every program makes before it begins."""


@contextlib.contextmanager
def bulk_copies_of(names: str) -> Iterator[None]:
    """Kernels that are compiled within the context have bulk copies of these parameters alone."""
    memory: Any = importlib.import_module("peertile.backends.cuda.memory")
    found = memory._bulk_axes
    memory._bulk_axes = lambda view, *rest: found(view, *rest) if view.hint in tuple(names) else None
    try:
        yield
    finally:
        memory._bulk_axes = found


def skinny(b: Bench) -> None:
    m, n, k = 256, 8192 // SHRINK, 8192 // SHRINK
    a, ws = b.randn(m, k), [b.randn(k, n) for _ in range(bench.ROTATE)]
    z, other = b.poisoned(m, n), b.poisoned(m, n)
    own, factors, out = b.ours(a), [b.ours(w) for w in ws], b.ours(z)
    want = a.double() @ ws[0].double()
    calls = bench.calls_for(2 * m * n * k / 6e8 + 10)

    def run(op: Callable[[Any], Any]) -> Json:
        z.fill_(math.nan)
        b.settle()
        op(factors[0]).sync()
        wrong = b.error(z, want)
        us = b.compare({"peertile": lambda: b.graph_of_ours([lambda w=w: op(w) for w in factors], calls)})
        return {"us": us, "relative_error": wrong}

    def of(way: Json) -> Json:
        made = pt.kernel(gemm.gemm.fn)
        with _compiled(way["options"]), bulk_copies_of(way.get("bulk", "abc")):
            return run(lambda w: made(out.partition(way["tile"]), own, w, BK=way["inner"], STAGES=way["stages"]))

    ways: dict[str, Callable[[], Json]] = {"what is chosen": lambda: run(lambda w: matmul(own, w, out))}
    ways |= {name: lambda way=way: of(way) for name, way in SKINNY.items()}  # type: ignore[misc]
    peers = {"cuBLAS": lambda: b.graph_of_theirs([lambda w=w: b.torch.matmul(a, w, out=other) for w in ws], calls)}
    sweep(b, "skinny", f"bf16 {m}x{n}x{k}", ways, peers)


# ---------------------------------------------------------------- square products

SQUARES: dict[str, Json] = {
    f"{stages} buffers, rows of {rows}": {"tile": (128, 256), "inner": 64, "stages": stages, "swizzle": rows}
    for stages in (3, 4) for rows in (8, 12, 16)
}  # fmt: skip
"""Of `gemm_persistent`: buffers of the loop, and how many rows of tiles are walked column by column, which says how
much of the factors the resident programs read together."""


def squares(b: Bench) -> None:
    for n in (16384 // SHRINK**2, 8192 // SHRINK, 4096 // SHRINK):
        _square(b, n)


def _square(b: Bench, n: int) -> None:
    """Each way takes turns with cuBLAS, and its ratio is to that: the GPU's clock follows its power, so that two that
    run one after the other cannot be compared. What is chosen is measured again at the end, to show what that does."""
    a, ws = b.randn(n, n), [b.randn(n, n) for _ in range(2)]
    z, other = b.poisoned(n, n), b.poisoned(n, n)
    own, factors, out = b.ours(a), [b.ours(w) for w in ws], b.ours(z)
    some = slice(n - min(n, 300), n)
    want = a[some].double() @ ws[0].double()
    calls = max(2, int(30000 / (2 * n**3 / 7e8))) if SHRINK == 1 else 1
    found: list[tuple[float, str]] = []

    def run(name: str, op: Callable[[Any], Any]) -> Json:
        z.fill_(math.nan)
        b.settle()
        op(factors[0]).sync()
        wrong = math.nan if bool(b.torch.isnan(z).any()) else b.error(z[some], want)
        sides = {
            "peertile": lambda: b.graph_of_ours([lambda w=w: op(w) for w in factors], calls),
            "cuBLAS": lambda: b.graph_of_theirs([lambda w=w: b.torch.matmul(a, w, out=other) for w in ws], calls),
        }
        us = b.compare(sides, 7)
        ratio = round(us["cuBLAS"] / us["peertile"], 4)
        found.append((ratio if wrong < BOUND else math.nan, name))
        return {"us": us, "relative_error": wrong, "ratio": ratio, "right": wrong < BOUND}

    def of(name: str, way: Json) -> Json:
        made = MADE.setdefault(f"square {name}", pt.kernel(gemm.gemm_persistent.fn))
        part = out.partition(way["tile"]).persistent(swizzle=way["swizzle"])
        with _compiled(EIGHT):
            return run(name, lambda w: made(part, own, w, BK=way["inner"], STAGES=way["stages"]))

    def chosen(name: str) -> Json:
        return run(name, lambda w: matmul(own, w, out))

    ways: dict[str, Callable[[], Json]] = {"what is chosen": lambda: chosen("what is chosen")}
    ways |= {name: lambda n=name, w=way: of(n, w) for name, way in SQUARES.items() if _is_wanted(name)}  # type: ignore[misc]
    ways["what is chosen, again"] = lambda: chosen("what is chosen, again")
    for name, way in ways.items():
        bench.case(b, "squares", f"bf16 {n}^3: {name}", way)
    print(f"bf16 {n}^3", flush=True)
    for ratio, name in sorted(found, reverse=True):
        print(f"  {name:30} {ratio:6.3f}", flush=True)


# ---------------------------------------------------------------- norms and softmax of whole rows


@contextlib.contextmanager
def rewritten(changes: tuple[tuple[str, str], ...]) -> Iterator[None]:
    """Kernels that are compiled within the context have these expressions of their Triton source replaced, to try what
    the compiler does not do yet."""
    module: Any = importlib.import_module("peertile.backends.cuda.triton_compile")
    found = module.written

    def written(source: str, entry: str) -> Path:
        for pattern, text in changes:
            source = re.sub(pattern, text, source, flags=re.MULTILINE)
        return Path(found(source, entry))

    module.written = written
    try:
        yield
    finally:
        module.written = found


ONCE = (r"^(.*tl\.load\(x_at, .*)\)$", r'\1, eviction_policy="evict_first")')
STREAMED = (r"^(.*tl\.store\(z_at, .*)\)$", r'\1, cache_modifier=".cs")')
HINTS: dict[str, tuple[tuple[str, str], ...]] = {
    "": (), ", x evicted first": (ONCE,), ", x evicted first, z streamed": (ONCE, STREAMED),
}  # fmt: skip
ROWS: dict[tuple[str, str, int], tuple[tuple[int, int], ...]] = {
    ("rms_norm", "f32", 16384): ((1, 8), (1, 16), (1, 32)),
    ("rms_norm", "f32", 4096): ((1, 8), (1, 16), (1, 32)),
    ("rms_norm", "f32", 1024): ((1, 4), (1, 2), (2, 4), (2, 8)),
    ("softmax", "f32", 1024): ((1, 4), (1, 2), (2, 4), (4, 4)),
    ("rms_norm", "bf16", 16384): ((1, 8), (1, 16)),
    ("rms_norm", "bf16", 4096): ((1, 4), (1, 8), (1, 16)),
    ("rms_norm", "bf16", 1024): ((1, 2), (1, 4), (2, 4), (4, 4)),
    ("softmax", "bf16", 1024): ((1, 4), (2, 4), (4, 4)),
}
"""Of a kernel, a type and a width: rows of a tile and warps of a program."""


def norms(b: Bench) -> None:
    for (kernel, name, width), ways in ROWS.items():
        _rows(b, 16384 // SHRINK, width // SHRINK, kernel, name, ways)


def _rows(b: Bench, rows: int, width: int, kernel: str, name: str, tiles: tuple[tuple[int, int], ...]) -> None:
    torch = b.torch
    dtype = {"bf16": torch.bfloat16, "f32": torch.float32}[name]
    xs, zs = ([make(rows, width, dtype=dtype) for _ in range(3)] for make in (b.randn, b.poisoned))
    gain = b.randn(width, dtype=dtype)
    own = b.ours(gain)
    pairs = [(b.ours(x), b.ours(z)) for x, z in zip(xs, zs, strict=True)]
    nbytes = 2 * rows * width * dtype.itemsize
    calls = bench.calls_for(nbytes / 3.5e6 + 2)
    is_norm, some = kernel == "rms_norm", slice(rows - min(rows, 300), rows)
    exact = xs[0][some].double()
    if is_norm:
        want = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-6) * gain.double()
    else:
        want = torch.softmax(exact, 1)

    def run(op: Callable[[Any, Any], Any]) -> Json:
        zs[0].fill_(math.nan)
        b.settle()
        op(*pairs[0]).sync()
        wrong = math.nan if bool(torch.isnan(zs[0]).any()) else b.error(zs[0][some], want)
        us = b.compare({"peertile": lambda: b.graph_of_ours([lambda p=p: op(*p) for p in pairs], calls)}, 5)
        found: Json = {"us": us, "relative_error": wrong}
        return found | ({"GB/s": round(nbytes / us["peertile"] / 1000)} if us.get("peertile") else {})

    def chosen(x: Any, z: Any) -> Any:
        return layers.rms_norm(x, own, out=z) if is_norm else layers.softmax(x, out=z)

    def of(high: int, warps: int, hint: tuple[tuple[str, str], ...]) -> Json:
        made = pt.kernel((layer_kernels.rms_norm if is_norm else layer_kernels.softmax).fn)
        more, consts = ((own, 1e-6), {"ADDED": False}) if is_norm else ((), {})

        def op(x: Any, z: Any) -> Any:
            return made(z.partition((high, None)), x, *((x,) if is_norm else ()), *more, **consts)

        with _compiled({"num_warps": warps}), rewritten(hint):
            return run(op)

    ways: dict[str, Callable[[], Json]] = {"what is chosen": lambda: run(chosen)}
    for high, warps in tiles:
        for said, hint in HINTS.items():
            ways[f"{high} x {width}, {warps} warps{said}"] = lambda h=high, w=warps, r=hint: of(h, w, r)  # type: ignore[misc]

    def plain(x: Any, g: Any) -> Any:
        if not is_norm:
            return torch.softmax(x, 1)
        f = x.float()
        return (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + 1e-6) * g.float()).to(x.dtype)

    compiled = torch.compile(plain, dynamic=False)
    peers = {"torch.compile": lambda: b.graph_of_theirs([lambda x=x: compiled(x, gain) for x in xs], calls)}
    sweep(b, "norms", f"{kernel} {name} {rows}x{width}", ways, peers)


# ---------------------------------------------------------------- products with an all-reduce

REDUCE: dict[str, Json] = {
    "two launches": {"behind": True},
    "one launch": {},
    "16 x 64 x 256": {"tile": (16, 64, 256)},
    "16 x 32 x 128, two programs a multiprocessor": {"tile": (16, 32, 128), "movers": 8, "workers": 248},
    "16 x 32 x 256, two programs a multiprocessor": {"tile": (16, 32, 256), "movers": 8, "workers": 248},
    "16 x 64 x 128, one program left out": {"tile": (16, 64, 128), "movers": 1, "workers": 131},
    "16 x 32 x 256, one program left out": {"tile": (16, 32, 256), "movers": 1, "workers": 131},
    "64 x 32 x 128": {"tile": (64, 32, 128)},
    "64 x 64 x 128": {"tile": (64, 64, 128)},
    "with signals": {"flagged": False},
}
"""Options of `FusedProducts`; behind: with a communicator of collectives, which adds behind the product. In one launch
all programs have their parts at about the same time, and then wait for a flight over the link: with two of them on a
multiprocessor one computes meanwhile."""


def reduce(b: Bench) -> None:
    for k, n in bench.SCATTER:
        for m in (1, 16, 64):
            _reduce(b, m, n, k)


def _reduce(b: Bench, m: int, n: int, k: int) -> None:
    torch, inner = b.torch, k // b.group.size
    a, ws = b.randn(m, inner), [b.randn(inner, n) for _ in range(bench.ROTATE)]
    z, part = b.poisoned(m, n), b.poisoned(m, n)
    own, factors, out = b.ours(a), [b.ours(w) for w in ws], b.ours(z)
    want = a.double() @ ws[0].double()
    torch.distributed.all_reduce(want)

    def of(options: Json) -> Json:
        z.fill_(math.nan)
        b.settle()
        behind = options.get("behind", False)
        more = {name: value for name, value in options.items() if name != "behind"}
        with (
            Collectives(b.group) as comm,
            bench._communicator(b, 16 * bench.MIB, {**more, "collectives": comm if behind else None}) as fused,
        ):
            fused.matmul_all_reduce(own, factors[0], out).sync()
            wrong = b.error(z, want)
            us = b.compare({
                "peertile": lambda: b.graph_of_ours(
                    [lambda w=w: fused.matmul_all_reduce(own, w, out) for w in factors], 30)
            })  # fmt: skip
            b.group.barrier("end")
        return {"us": us, "relative_error": wrong}

    def sequence(w: Any) -> None:
        torch.matmul(a, w, out=part)
        torch.distributed.all_reduce(part)

    peers = {
        "sequence": lambda: b.graph_of_theirs([lambda w=w: sequence(w) for w in ws], 30),
        "GEMM": lambda: b.graph_of_theirs([lambda w=w: torch.matmul(a, w, out=part) for w in ws], 30),
    }
    ways = {name: lambda o=options: of(o) for name, options in REDUCE.items()}  # type: ignore[misc]
    sweep(b, "reduce", f"GEMM+all-reduce {m}x{n}x{k}", ways, peers)


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "attention": attention, "skinny": skinny, "squares": squares, "norms": norms, "reduce": reduce,
}  # fmt: skip
bench.SECTIONS, bench.ALONE, bench.TOGETHER = SECTIONS, ["attention", "skinny", "squares", "norms"], ["reduce"]

if __name__ == "__main__":
    bench.main(sys.argv[1:])
