"""The library's models and tools on one GPU: the embedding with published weights, the decoder's step as one graph,
linear maps of one row, tensors of torch, autotuning. Each is right against float64 first, and timed beside torch.

    PYTHONPATH=src:. python3 benchmarks/device/bench_cuda_models.py [--limit S] [--out FILE] [SECTION ...]
    PYTHONPATH=src:. python3 benchmarks/device/bench_cuda_models.py --pack FILE

Sections: embed, embed_compiled, embed_shared and fused_shared (two and three ranks, threads, on one GPU), decode,
decode_beside, rows, few, interop, tuning; each may have its bound in seconds, as SECTION=SECONDS. Published weights
come from the package that the example uses or, where PEERTILE_BENCH_WEIGHTS names it, from a file that `--pack` made:
the weights rounded to f16, the rows of the words that are used, and what the weights themselves give, in float64, which
has to come out.
Options and output are those of bench_cuda_library.py. Makes no multicast object and changes no setting of a GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import bench_cuda_library as bench
import numpy as np
import torch_models
import turns

import peertile as pt
from peertile.library import layer_kernels, layers
from peertile.library import products as products_module
from peertile.library.collectives import Collectives
from peertile.tuning import Rules

Bench, Json, SHRINK, PLACE, case, guarded, is_wanted = (
    bench.Bench, bench.Json, bench.SHRINK, bench.PLACE, bench.case, bench.guarded, bench.is_wanted,
)  # fmt: skip
ROOT = bench.ROOT
SHAPES = ((32, 128), (8, 32), (1, 16))
"""Texts, and tokens of each, that are timed."""
MORE_TEXTS = (
    "", "naïve café, 東京! " * 10, "The quick brown fox jumps over the lazy dog.", "How do I reset my password?",
    "Steps to recover an account whose password was lost", "x",
    "GPUs share memory over a fast link, and kernels signal each other.",
)  # fmt: skip


def loaded(path: str) -> ModuleType:
    """A file of this tree as a module."""
    name = f"models_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def tell(section: str, **found: Any) -> None:
    print(json.dumps({"section": section, **found}), flush=True)


# ---------------------------------------------------------------- the embedding


def pack(path: Path) -> None:
    """Write the published weights as a file that fits where only small ones do."""
    example: Any = loaded("examples/embed.py")
    reference: Any = importlib.import_module("tests.layers.test_embed")
    config, weights, tokenize = example.published()
    texts = [tokenize(text) for text in (*example.TEXTS, *MORE_TEXTS)]
    # Others too, for the texts that are timed.
    others = np.random.default_rng(11).choice(np.arange(1000, 30000), 1500, replace=False)
    used = np.unique(np.concatenate([*texts, others]))
    kept: dict[str, Any] = {
        "config": np.array([config.layers, config.heads, config.hidden, config.inner, config.epsilon]),
        "want": np.array([reference.bert(config, weights, ids) for ids in texts]),
        "lengths": np.array([len(ids) for ids in texts]),
        "tokens": np.searchsorted(used, np.concatenate(texts)),
    }
    for name, array in weights.items():
        rows = array[used] if name == "embeddings.word_embeddings.weight" else array
        kept[f"w.{name}"] = rows.astype(np.float16)
    np.savez_compressed(path, **kept)


def model() -> tuple[Any, Any, list[list[int]], Any, str]:
    """Configuration, weights, texts, what they give, and where all that comes from."""
    example: Any = loaded("examples/embed.py")
    reference: Any = importlib.import_module("tests.layers.test_embed")
    named = os.environ.get("PEERTILE_BENCH_WEIGHTS")
    if named:
        held = np.load(named)
        whole = [float(v) for v in held["config"]]
        config = example.Config(*(int(v) for v in whole[:4]), whole[4])
        weights = {name[2:]: held[name].astype(np.float32) for name in held.files if name.startswith("w.")}
        ends = np.cumsum(held["lengths"])
        texts = [part.tolist() for part in np.split(held["tokens"], ends[:-1])]
        return config, weights, texts, held["want"], "published, rounded to f16"
    found = example.published()
    if found is not None:
        config, weights, tokenize = found
        texts = [tokenize(text) for text in (*example.TEXTS, *MORE_TEXTS)]
        kind = "published"
    else:
        config = example.Config(6, 12, 384, 1536, 1e-12)
        weights = example.random_weights(np.random.default_rng(5), config, 2000, 512)
        rng = np.random.default_rng(6)
        texts = [rng.integers(0, 2000, n).tolist() for n in (12, 37, 5)]
        kind = "random"
    return config, weights, texts, np.array([reference.bert(config, weights, ids) for ids in texts]), kind


def embed(b: Bench) -> None:
    """One rank: right, and beside the same model in torch, eager and compiled, each as a CUDA graph."""
    example: Any = loaded("examples/embed.py")
    config, weights, texts, want, kind = model()
    comm = Collectives(b.group)
    encoder = example.Encoder(b.group, comm, config, weights)

    def right() -> Json:
        got = encoder.encode(texts).copy()
        cosine = float(np.abs(1 - np.sum(want * got, 1)).max())
        assert cosine < 1e-3, cosine
        return {"weights": kind, "texts": len(texts), "one_minus_cosine": cosine}

    case(b, "embed", f"{b.group.size} ranks", right)
    _beside_torch(b, encoder, config, weights, is_compiled=False)
    comm.close()


def embed_compiled(b: Bench) -> None:
    """Beside torch.compile too, which takes long to begin."""
    example: Any = loaded("examples/embed.py")
    config, weights, *_ = model()
    with Collectives(b.group) as comm:
        _beside_torch(b, example.Encoder(b.group, comm, config, weights), config, weights, is_compiled=True)


def _beside_torch(b: Bench, encoder: Any, config: Any, weights: Any, *, is_compiled: bool) -> None:
    words = len(weights["embeddings.word_embeddings.weight"])
    for batch, tokens in SHAPES:

        def one(batch: int = batch, tokens: int = tokens) -> Json:
            return _encoded(b, encoder, config, weights, words, batch, tokens, is_compiled=is_compiled)

        case(b, "embed", f"{batch}x{tokens}", one)


def _encoded(
    b: Bench, encoder: Any, config: Any, weights: Any, words: int, batch: int, tokens: int, *, is_compiled: bool
) -> Json:
    torch = b.torch
    texts = np.random.default_rng(7).integers(0, words, (batch, tokens))
    mine = encoder.encode(texts.tolist()).copy()
    graph = encoder.steps[batch, tokens][0]
    ids = torch.from_numpy(texts).to(PLACE)
    eager = torch_encoder(b, config, weights)
    theirs = eager(ids).cpu().numpy()
    cosine = float(np.abs(1 - np.sum(theirs * mine, 1)).max())
    assert cosine < 1e-5, cosine
    compiled = torch.compile(eager, dynamic=False)
    candidates: dict[str, Any] = {
        "peertile": lambda: replays(b, encoder.stream, graph),
        "torch": lambda: b.graph_of_theirs([lambda: eager(ids)], 1),
    }
    if is_compiled:
        candidates["torch.compile"] = lambda: b.graph_of_theirs([lambda: compiled(ids)], 1)
    us = b.compare(candidates)
    spent = []
    for _ in range(20):
        begin = time.perf_counter()
        encoder.encode(texts.tolist())
        spent.append((time.perf_counter() - begin) * 1e6)
    others = [t for name, t in us.items() if name != "peertile" and isinstance(t, float)]
    return {
        "us": us, "one_minus_cosine_to_torch": cosine, "encode_us": round(statistics.median(spent), 1),
        "texts_per_s": round(batch / us["peertile"] * 1e6), "ratio": round(min(others) / us["peertile"], 3),
    }  # fmt: skip


def replays(b: Bench, stream: Any, graph: Any) -> Callable[[int], float]:
    """f(repeats) -> microseconds of a replay."""
    if PLACE != "cuda":
        return bench._clocked([lambda: graph.launch().sync_on(stream)], 1)
    replay = turns.replayed(b.device, stream, graph)
    return lambda repeats: replay(10 * repeats)


def torch_encoder(b: Bench, config: Any, weights: Any) -> Any:
    """The model in torch, f32, with its own fused attention."""
    encoded = torch_models.encoder(b.torch, config, weights, PLACE)

    def encode(ids: Any) -> Any:
        with b.torch.no_grad():
            return encoded(ids)

    return encode


def embed_shared(b: Bench) -> None:
    """Ranks that are threads of one process on one GPU, in a process of their own."""
    for ranks in (2, 3):

        def one(ranks: int = ranks) -> Json:
            command = [sys.executable, __file__, "--shared", str(ranks)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=40, check=False)
            assert done.returncode == 0, done.stderr[-600:]
            found: Json = json.loads(done.stdout.splitlines()[-1])
            return found

        case(b, "embed_shared", f"{ranks} ranks", one)


def shared(ranks: int) -> None:
    """Print what `ranks` threads on one GPU give."""
    example: Any = loaded("examples/embed.py")
    config, weights, texts, want, kind = model()

    def rank(group: pt.Group) -> Any:
        with Collectives(group) as comm:
            encoder = example.Encoder(group, comm, config, weights)
            return [encoder.encode(part).copy() for part in (texts, texts[:1], texts)]

    said = pt.spawn(rank, ranks, model=pt.RankModel.THREADS, timeout_s=30)
    assert all(np.array_equal(a, c) for other in said[1:] for a, c in zip(said[0], other, strict=True))
    assert np.array_equal(said[0][0], said[0][2])
    cosine = float(np.abs(1 - np.sum(want * said[0][0], 1)).max())
    assert cosine < 1e-3, cosine
    print(json.dumps({"weights": kind, "one_minus_cosine": cosine, "same_bits": True}), flush=True)
    sys.stdout.flush()
    os._exit(0)


def fused_shared(b: Bench) -> None:
    """The programs of the fused kernels, by ranks that are threads on one GPU; a process for each program, three at a
    time."""
    small: Any = importlib.import_module("tests.fused.fused_programs")
    jobs = [(ranks, name) for ranks in (2, 3) for name in small.PROGRAMS if is_wanted(f"{name}, {ranks} ranks")]

    def run(job: tuple[int, str]) -> Json:
        command = [sys.executable, __file__, "--fused", str(job[0]), job[1]]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=25, check=False)
        except subprocess.TimeoutExpired:
            return {"error": "no end within 25 s"}
        if done.returncode:
            return {"error": done.stderr[-900:]}
        return {"ok": True, "seconds": float(done.stdout.splitlines()[-1])}

    with ThreadPoolExecutor(3) as pool:
        for (ranks, name), found in zip(jobs, pool.map(run, jobs), strict=True):
            b.tell(section="fused_shared", case=f"{name}, {ranks} ranks", **found)


def fused(ranks: int, name: str) -> None:
    small: Any = importlib.import_module("tests.fused.fused_programs")
    program = small.PROGRAMS[name]
    begin = time.perf_counter()
    said = pt.spawn(lambda group: program(group, seed=1), ranks, model=pt.RankModel.THREADS, timeout_s=25)
    assert all(said)
    print(round(time.perf_counter() - begin, 2), flush=True)
    os._exit(0)


# ---------------------------------------------------------------- the decoder

QWEN: Json = {"LAYERS": 24, "HEADS": 14, "GROUPS": 2, "DIM": 64, "INNER": 4864, "WORDS": 16384, "HIDDEN": 896}
"""Shapes of Qwen2.5 0.5B; of its 151936 words so many."""


def decode(b: Bench) -> None:
    case(b, "decode", "example", lambda: _decoded(b, {}, 40, is_compared=False))
    shapes = QWEN if SHRINK == 1 else QWEN | {"LAYERS": 2}
    for is_compared in (False, True):

        def one(is_compared: bool = is_compared) -> Json:
            return _decoded(b, shapes, 40 if SHRINK == 1 else 4, is_compared=is_compared)

        case(b, "decode", "qwen_0.5b beside torch" if is_compared else "qwen_0.5b", one)


def decode_beside(b: Bench) -> None:
    """Beside torch alone, whose compiler takes most of the time."""
    shapes = QWEN if SHRINK == 1 else QWEN | {"LAYERS": 2}
    case(b, "decode", "qwen_0.5b beside torch", lambda: _decoded(b, shapes, 40 if SHRINK == 1 else 4, is_compared=True))


def _decoded(b: Bench, shapes: Json, count: int, *, is_compared: bool) -> Json:
    m: Any = loaded("examples/decode_loop.py")
    vars(m).update(shapes)
    weights = m.random_weights(np.random.default_rng(3), min(m.LAYERS, 3))
    # Random numbers take long: layers repeat, in memory of their own each.
    weights["layers"] = [weights["layers"][k % len(weights["layers"])] for k in range(m.LAYERS)]
    theirs = TorchStep(b, m, weights) if is_compared else None
    nbytes = 4 * sum(array.size for layer in weights["layers"] for array in layer.values()) + weights["head"].nbytes
    with Collectives(b.group) as comm:
        step = m.Step(b.group, comm, weights)
        token, worst, tokens, off = 1, 0.0, [1], math.nan
        times: dict[str, list[float]] = {"peertile": [], "torch.compile": []}
        runs = {"peertile": step.run} | ({} if theirs is None else {"torch.compile": theirs.run})
        for position in range(count):
            results = {}
            for name, run in runs.items():
                begin = time.perf_counter()
                results[name] = run(token, position).copy()
                times[name].append((time.perf_counter() - begin) * 1e6)
            got = results["peertile"]
            if theirs is not None:
                other = results["torch.compile"]
                worst = max(worst, float(np.abs(got - other).max() / np.abs(other).max()))
                assert worst < 1e-3, worst
            elif position == 2:
                want = m.reference(weights, tokens)
                off = float(np.abs(got - want).max() / np.abs(want).max())
                assert off < 1e-4, off
            token = int(got.argmax())
            tokens.append(token)
        candidates: dict[str, Any] = {"peertile": lambda: replays(b, step.stream, step.graph)}
        if theirs is not None:
            candidates["torch.compile"] = lambda: theirs.replays
        us = b.compare(candidates)
        nodes = step.graph.nodes
    token_us = {name: round(statistics.median(spent[2:]), 1) for name, spent in times.items() if spent}
    found: Json = {
        "us_of_a_replay": us, "us_a_token": token_us, "tokens_per_s": round(1e6 / token_us["peertile"]),
        "nodes": nodes, "layers": m.LAYERS, "GB/s of all weights": round(nbytes / us["peertile"] / 1000),
    }  # fmt: skip
    if theirs is None:
        return {**found, "to_f64": off}
    ratios = {
        "ratio": round(token_us["torch.compile"] / token_us["peertile"], 3),
        "ratio_of_replays": round(us["torch.compile"] / us["peertile"], 3),
    }
    return {**found, **ratios, "to_torch": worst}


class TorchStep:
    """The step in torch: every layer through one compiled function, and all of it as one CUDA graph, whose token and
    position are copied in front of each replay."""

    def __init__(self, b: Bench, m: Any, weights: Json) -> None:
        torch = b.torch
        decoder = torch_models.Decoder(torch, m, weights, PLACE)
        compiled = torch.compile(decoder.layer, dynamic=False)
        self.token, self.position = (torch.zeros(1, dtype=torch.int64, device=PLACE) for _ in range(2))

        def step() -> Any:
            with torch.no_grad():
                return decoder.step(self.token, self.position, compiled)

        self.eager = step
        if PLACE != "cuda":
            self.replays = bench._clocked([step], 1)
            return
        kept: list[Any] = []
        self.graph = turns.torch_graph(torch, [step], 1, kept)
        (self.scores,) = kept
        self.host = torch.empty(2, 1, dtype=torch.int64, pin_memory=True)
        replay = turns.torch_replayed(torch, self.graph)
        self.replays = lambda repeats: replay(10 * repeats)

    def run(self, token: int, position: int) -> Any:
        """Scores of the next token, on the host."""
        if PLACE != "cuda":
            self.token.fill_(token)
            self.position.fill_(position)
            return self.eager().numpy()[0]
        self.host[0, 0], self.host[1, 0] = token, position
        self.token.copy_(self.host[0], non_blocking=True)
        self.position.copy_(self.host[1], non_blocking=True)
        self.graph.replay()
        return self.scores.cpu().numpy()[0]


# ---------------------------------------------------------------- linear maps of one row


ROWS = [(896, 1152), (896, 896), (896, 9728), (4864, 896), (896, 16384)]
"""Inner extents and columns of the decoder's products."""
WIDE_DEEP_STAGES = (
    (8, 512, 1), (8, 512, 3), (8, 1024, 1), (16, 256, 1), (16, 256, 3), (16, 512, 1), (32, 128, 1), (32, 128, 4),
    (64, 64, 3),
)  # fmt: skip
COLUMNS_DEEP_STAGES = ((2, 2048, 1), (4, 1024, 1), (8, 512, 1), (8, 512, 3))
"""Of weights that lie by columns."""


def rows(b: Bench) -> None:
    """Ways to multiply one row by a weight, beside the one that is chosen, and torch."""
    for dtype in ("float32", "bfloat16"):
        for k, n in ROWS[: None if dtype == "float32" else 4]:
            case(b, "rows", f"{dtype} {k}x{n}", lambda k=k, n=n, d=dtype: _row(b, k // SHRINK, n // SHRINK, d))  # type: ignore[misc]


def _row(b: Bench, k: int, n: int, dtype: str) -> Json:
    kind = getattr(b.torch, dtype)
    size = kind.itemsize

    def way(wide: int, deep: int, stages: int) -> Any:
        consts = {"BK": deep * 4 // size, "STAGES": stages, "ACTIVATION": "none", "BIASED": False, "ADDED": False}
        return lambda x, w, z: layer_kernels.linear_row(z.partition((1, wide)), x, w, w, x, **consts)

    ways = {f"{w}x{d}, {s} stages": (way(w, d, s), False) for w, d, s in WIDE_DEEP_STAGES}
    ways |= {f"by columns {w}x{d}, {s} stages": (way(w, d, s), True) for w, d, s in COLUMNS_DEEP_STAGES}
    return _linear(b, 1, k, n, kind, ways)


FEW = [(16, 384, 1152), (16, 1536, 384), (256, 384, 1152), (256, 1536, 384), (4096, 384, 1536)]
"""Rows, inner extents and columns of the embedding's products."""
TILES = (
    (16, 16, 64), (16, 32, 64), (16, 64, 32), (32, 32, 32), (32, 64, 32), (64, 32, 32), (64, 64, 32), (64, 64, 16),
    (64, 128, 16), (128, 64, 16), (128, 128, 16),
)  # fmt: skip


ROW_WAYS = ((8, 512), (16, 256), (32, 128))
"""Columns and depth of a row in a program's hands."""
THRICE = ((64, 64, 32), (128, 64, 32), (128, 128, 32))
"""Tiles of products on tensor cores with three products of 10 bits for one of f32."""
KERNELS: dict[tuple[int, ...], Any] = {}


def few(b: Bench) -> None:
    """Tiles of f32 products of some rows, beside the one that is chosen, and torch."""
    plain = {"STAGES": 3, "ACTIVATION": "none", "BIASED": False, "ADDED": False}

    def tiled(tile: tuple[int, int, int]) -> Any:
        part = tile[:2]
        return lambda x, w, z: layer_kernels.linear(
            z.partition(part).persistent(swizzle=8), x, w, w, x, BK=tile[2], **plain
        )

    def by_row(wide: int, deep: int) -> Any:
        consts = plain | {"STAGES": 1, "BK": deep}
        return lambda x, w, z: layer_kernels.linear_row(z.partition((1, wide)), x, w, w, x, **consts)

    def thrice(tile: tuple[int, int, int]) -> Any:
        kernel = KERNELS.setdefault(tile, pt.kernel(layer_kernels.linear.fn))

        def op(x: Any, w: Any, z: Any) -> Any:
            return kernel(z.partition(tile[:2]).persistent(swizzle=8), x, w, w, x, BK=tile[2], **plain)

        return op

    for m, k, n in FEW:

        def one(m: int = m, k: int = k, n: int = n) -> Json:
            ways = {f"{'x'.join(map(str, tile))}": (tiled(tile), False) for tile in TILES}
            if m <= 16:
                ways |= {f"by rows {w}x{d}": (by_row(w, d), False) for w, d in ROW_WAYS}
            else:
                ways |= {f"tf32x3 {'x'.join(map(str, tile))}": (thrice(tile), False) for tile in THRICE}
            with bench.compiled_with(f32_mma="tf32x3") if m > 16 else contextlib.nullcontext():
                return _linear(b, m, k // SHRINK, n // SHRINK, b.torch.float32, ways)

        case(b, "few", f"float32 {m}x{n}x{k}", one)


def _linear(b: Bench, m: int, k: int, n: int, kind: Any, ways: dict[str, tuple[Any, bool]]) -> Json:
    torch = b.torch
    x, z = b.randn(m, k, dtype=kind), b.poisoned(m, n, dtype=kind)
    size = x.element_size()
    count = max(2, min(24, (160 << 20) // (k * n * size))) if m == 1 else 2  # of one row, more than the cache holds
    ws = [b.randn(k, n, dtype=kind) for _ in range(count)]
    turned = [w.t().contiguous() for w in ws]
    own, out, factors = b.ours(x), b.ours(z), [b.ours(w) for w in ws]
    columns = [b.ours(w).permute(1, 0) for w in turned]
    want = x.double() @ ws[0].double()
    bound = 1e-5 if kind == torch.float32 else 1e-2
    calls = 2 * count if PLACE == "cuda" else 1

    def made(op: Any, weights: Any) -> Any:
        def make() -> Any:
            z.fill_(math.nan)
            b.settle()
            op(own, weights[0], out).sync()
            error = b.error(z, want)
            assert error < bound, error
            return b.graph_of_ours([lambda w=w: op(own, w, out) for w in weights], calls)

        return make

    candidates: dict[str, Any] = {"chosen": made(lambda x, w, z: layers.linear(x, w, out=z), factors)}
    candidates |= {name: made(op, columns if by_columns else factors) for name, (op, by_columns) in ways.items()}
    F = torch.nn.functional
    candidates["torch"] = lambda: b.graph_of_theirs([lambda w=w: F.linear(x, w) for w in turned], calls)
    us = b.compare(candidates, 3)
    right = {name: t for name, t in us.items() if isinstance(t, float) and name != "torch"}
    best = min(right, key=lambda name: right[name])
    found: Json = {"us": us, "best": best, "best_ratio": round(us["torch"] / right[best], 3)}
    if isinstance(us["chosen"], float):
        found["ratio"] = round(us["torch"] / us["chosen"], 3)
        found["GB/s" if m == 1 else "TFLOP/s"] = round(
            (k * n * size / 1e3 if m == 1 else 2e-6 * m * k * n) / us["chosen"], 1
        )
    return found


# ---------------------------------------------------------------- tensors of torch


def interop(b: Bench) -> None:
    """Torch's tensors where they lie, after what its streams have to do, with gradients."""
    torch = b.torch
    ptt: Any = importlib.import_module("peertile.torch")

    def places() -> Json:
        x = b.randn(1000, 3, dtype=torch.float32)
        ours = ptt.from_torch(x)
        assert ours.address == x.data_ptr()
        assert torch.from_dlpack(ours).data_ptr() == x.data_ptr()
        x[5, 1] = 7.0
        b.settle()
        assert ours.numpy()[5, 1] == 7.0
        ours.copy_from(np.full((1000, 3), 2.0, np.float32))
        assert float(x.sum()) == 6000.0
        y = ptt.all_reduce(x, b.group)
        assert y is x
        return {"ok": True}

    def streams() -> Json:
        """A queue of slow work in front of each call: what is read too early is NaN."""
        if PLACE != "cuda":
            return {"ok": True}
        a = b.randn(4096, 4096, dtype=torch.float32) / 64
        w = b.randn(64, 4096, dtype=torch.float32)
        wrong = 0
        for stream in (torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()):
            torch.cuda.synchronize()
            with torch.cuda.stream(stream), torch.no_grad():
                x = torch.full_like(a, math.nan)
                for _ in range(8):
                    step = a @ a
                x.copy_(step)
                z = ptt.linear(x, w)
                after = z * 2  # torch goes on at once
                want = x.double() @ w.double().t()
                wrong += not bool(((after / 2 - want).abs().max() < 1e-2 * want.abs().max()).item())
        assert wrong == 0, wrong
        return {"ok": True, "streams": 3}

    def gradients() -> Json:
        worst: Json = {}
        for dtype, bound in ((torch.float32, 1e-5), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)):
            for activation in ptt.Activation:
                leaves = [(b.randn(*s) / 4).to(dtype).requires_grad_() for s in ((2, 37, 70), (19, 70), (19,))]
                wide = [t.detach().double().requires_grad_() for t in leaves]
                y = ptt.linear(*leaves, activation=activation)
                inner = torch.nn.functional.linear(*wide)
                if activation is ptt.Activation.RELU:
                    # Rounding takes some elements over the kink: the gradient is that of the side they came out on.
                    exact = inner * (y.detach() > 0)
                elif activation is ptt.Activation.NONE:
                    exact = inner
                else:
                    exact = getattr(torch.nn.functional, activation.value)(inner)
                up = torch.randn_like(exact)
                got = torch.autograd.grad(y, leaves, up.to(dtype))
                expected = torch.autograd.grad(exact, wide, up.to(dtype).double())
                for mine, theirs in zip((y.detach(), *got), (exact.detach(), *expected), strict=True):
                    assert mine.dtype == dtype
                    off = float((mine.double() - theirs).abs().max() / theirs.abs().max())
                    assert off < bound, (dtype, activation, off)
                    worst[str(dtype)] = max(worst.get(str(dtype), 0.0), off)
        return {"worst": worst}

    def differences() -> Json:
        leaves = [
            torch.randn(*s, dtype=torch.float64, device=PLACE, requires_grad=True) for s in ((3, 5), (4, 5), (4,))
        ]
        for activation in ptt.Activation:
            assert torch.autograd.gradcheck(lambda *a, f=activation: ptt.linear(*a, activation=f), leaves)
        return {"ok": True}

    def training() -> Json:
        torch.manual_seed(3)
        x, target = b.randn(64, 10, dtype=torch.float32), b.randn(64, 1, dtype=torch.float32)
        start = [b.randn(*s, dtype=torch.float32) / 4 for s in ((16, 10), (16,), (1, 16), (1,))]

        def losses(first: Any, second: Any) -> list[float]:
            weights = [t.clone().requires_grad_() for t in start]
            optimizer = torch.optim.SGD(weights, lr=0.05)
            found = []
            for _ in range(20):
                optimizer.zero_grad()
                loss = (second(first(x, *weights[:2]), *weights[2:]) - target).pow(2).mean()
                loss.backward()
                optimizer.step()
                found.append(loss.item())
            return found

        F = torch.nn.functional
        ours = losses(lambda *a: ptt.linear(*a, activation=ptt.Activation.SILU), ptt.linear)
        theirs = losses(lambda *a: F.silu(F.linear(*a)), F.linear)
        off = max(abs(p - q) / q for p, q in zip(ours, theirs, strict=True))
        assert off < 1e-4, off
        assert ours[-1] < ours[0]
        return {"relative_difference_of_losses": off}

    for name, function in (
        ("in place", places), ("after torch's streams", streams), ("gradients", gradients),
        ("gradients by differences", differences), ("training", training),
    ):  # fmt: skip
        case(b, "interop", name, function)


# ---------------------------------------------------------------- autotuning


def tuning(b: Bench) -> None:
    """A product's tiles: one winner, kept, found again by another process, taken up after an interruption."""
    with tempfile.TemporaryDirectory() as folder:
        case(b, "tuning", "measured", lambda: _tuned(b, folder))
        case(b, "tuning", "found again", lambda: _again(folder, "found"))
        case(b, "tuning", "interrupted and taken up", lambda: _again(f"{folder}/other", "resume"))


WAYS = [
    products_module.Way((64, 64), 64, 3),
    products_module.Way((128, 64), 64, 4, is_persistent=False),
    products_module.Way((128, 128), 64, 4),
    products_module.Way((128, 256), 64, 4),
    products_module.Way((256, 128), 64, 4),
]


def _product(folder: str, stop_after: int | None = None) -> tuple[Any, tuple[Any, ...], list[int]]:
    """The tuned product and its arguments, and a list that counts its calls."""
    calls, last = [0], [stop_after]  # in a list: a plain value that a function names is part of its source

    def product(way: Any, a: Any, w: Any, z: Any) -> Any:
        calls[0] += 1
        if calls[0] == last[0]:
            raise KeyboardInterrupt
        return products_module._launched(a, w, z, way, {"BK": way.inner, "STAGES": way.stages, "TF32": False})

    m, n, k = (extent // SHRINK for extent in (2048, 4096, 4096))
    rng = np.random.default_rng(1)
    a, w = (pt.asarray(rng.standard_normal(s).astype(np.float32), pt.bf16) for s in ((m, k), (k, n)))
    z = pt.zeros((m, n), pt.bf16)
    tuned = pt.autotune(
        candidates=WAYS, key=lambda a, w, z: (a.shape, w.shape, a.dtype), name="product", folder=folder,
        rules=Rules(budget_s=25.0),
        reference=lambda a, w, z: a.numpy().astype(np.float32) @ w.numpy().astype(np.float32),
    )(product)  # fmt: skip
    return tuned, (a, w, z), calls


def _tuned(b: Bench, folder: str) -> Json:
    begin = time.perf_counter()
    tuned, arguments, calls = _product(folder)
    found = tuned.decide(*arguments)
    spent = time.perf_counter() - begin
    assert found.is_new
    assert float(np.abs(arguments[2].numpy().astype(np.float32)).max()) == 0.0, "what the arguments held is put back"
    best = min(found.seconds.values())
    tied = [name for name, s in found.seconds.items() if s <= 1.05 * best]
    record = json.loads(found.path.read_text())
    finalists = [k for k, rounds in record["final"].items() if rounds]
    listed = [repr(way) for way in WAYS]
    assert found.name == min(tied, key=listed.index), (found.name, tied)
    tuned(*arguments).sync()
    return {
        "s": round(spent, 2), "calls": calls[0], "winner": found.name, "dropped": found.dropped,
        "within_5_percent": tied, "finalists": len(finalists),
        "us": {name: round(s * 1e6, 2) for name, s in found.seconds.items()},
        "measured": record["measured"][0]["machine"],
    }  # fmt: skip


def _again(folder: str, how: str) -> Json:
    """In another process, twice."""
    found = []
    for _ in range(2 if how == "resume" else 1):
        command = [sys.executable, __file__, f"--{how}", folder]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr[-600:]
        found.append(json.loads(done.stdout.splitlines()[-1]))
    if how == "resume":
        assert found[0]["interrupted"], found
        assert found[1]["runs"] == 2, found
    else:
        assert not found[0]["is_new"], found
        assert found[0]["calls"] == 0, found
    return {"processes": found}


def found_again(folder: str) -> None:
    tuned, arguments, calls = _product(folder)
    found = tuned.decide(*arguments)
    print(json.dumps({"is_new": found.is_new, "winner": found.name, "calls": calls[0]}), flush=True)
    os._exit(0)


def resumed(folder: str) -> None:
    """The first process is interrupted while it measures; the second one ends what it began."""
    path = Path(folder)
    is_first = not path.exists()
    tuned, arguments, calls = _product(folder, stop_after=60 if is_first else None)
    try:
        found = tuned.decide(*arguments)
    except KeyboardInterrupt:
        record = json.loads(next(path.glob("*.json")).read_text())
        kept = {"interrupted": True, "winner": record["winner"], "verified": len(record["verdicts"]), "calls": calls[0]}
        print(json.dumps(kept), flush=True)
        os._exit(0)
    record = json.loads(found.path.read_text())
    print(json.dumps({"winner": found.name, "runs": len(record["measured"]), "calls": calls[0]}), flush=True)
    os._exit(0)


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "embed": embed, "embed_compiled": embed_compiled, "embed_shared": embed_shared,
    "fused_shared": fused_shared, "decode": decode, "decode_beside": decode_beside, "rows": rows, "few": few,
    "interop": interop, "tuning": tuning,
}  # fmt: skip


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--pack"]:
        pack(Path(arguments[1]))
    elif arguments[:1] == ["--shared"]:
        shared(int(arguments[1]))
    elif arguments[:1] == ["--fused"]:
        fused(int(arguments[1]), arguments[2])
    elif arguments[:1] == ["--found"]:
        found_again(arguments[1])
    elif arguments[:1] == ["--resume"]:
        resumed(arguments[1])
    else:
        bench.SECTIONS.update(SECTIONS)
        bench.SILENT_S = 120  # torch.compile takes long, and Python 3.12 may die of looking at a thread that runs
        options = [word for word in arguments if word.startswith("--")]
        named = [w for k, w in enumerate(arguments) if not w.startswith("--") and arguments[k - 1] not in options]
        bench.main(arguments if named else [*arguments, *SECTIONS])


if __name__ == "__main__":
    main(sys.argv[1:])
