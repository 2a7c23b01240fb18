"""A step of the decoder example at batch 1 beside the same step in torch, as its own compiled graph, on one thread.

Layers of the shapes of Qwen2.5 0.5B, fewer of them, and the example's own small ones; random weights. Each token is
decoded by both, by turns, and the scores are compared. Needs torch and a C++ compiler, which `torch.compile` calls.
Prints a record: benchmarks/records/README.md.

    python benchmarks/decode_throughput.py > benchmarks/records/2026-11-30-decode-zen5x2.json
"""

# ruff: noqa: ANN001, ANN201, ANN202, E402
# The number of threads is read when a library is imported. Annotated like the example that is measured: not at all.

import importlib.util
import json
import os
import statistics
import sys
import time
from pathlib import Path

for variable in ("PEERTILE_CPU_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

import numpy as np
import torch
import torch.nn.functional as F

import peertile as pt
from peertile.cli.bench import record
from peertile.library.collectives import Collectives
from peertile.testing.measure import Figure

EXAMPLE = Path(__file__).parents[1] / "examples" / "decode_loop.py"
MODELS = {
    "qwen_0.5b_4_layers": (
        {"LAYERS": 4, "HEADS": 14, "GROUPS": 2, "DIM": 64, "INNER": 4864, "WORDS": 16384, "HIDDEN": 896},
        40,
    ),
    "example": ({}, 100),
}
"""What is changed of the example's shapes, and how many tokens are decoded."""
UNTIMED = 4


def example(shapes):
    """The example as a module, with other shapes."""
    spec = importlib.util.spec_from_file_location("decode_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    vars(module).update(shapes)
    return module


def torch_step(m, weights):
    """The same step in torch: packed projections, a cache that is written in place, fused attention."""
    torch.set_num_threads(1)
    w = [{name: torch.from_numpy(array) for name, array in layer.items()} for layer in weights["layers"]]
    for layer in w:
        layer["qkv"] = torch.cat([layer[name] for name in "qkv"], 1).t().contiguous()
        layer["bias"] = torch.cat([layer[f"{name}_bias"] for name in "qkv"])
        layer["both"] = torch.cat([layer["gate"], layer["up"]], 1).t().contiguous()
        layer["out"], layer["less"] = (layer[name].t().contiguous() for name in ("project", "down"))
    words, head = torch.from_numpy(weights["words"]), torch.from_numpy(weights["head"]).t().contiguous()
    last = torch.from_numpy(weights["last"])
    caches = [[torch.zeros(1, m.GROUPS, m.CAPACITY, m.DIM) for _ in range(2)] for _ in w]
    angle = np.arange(m.CAPACITY)[:, None] * m.BASE ** (-np.arange(0, m.DIM, 2) / m.DIM)
    cosine, sine = (torch.from_numpy(np.tile(f(angle), 2).astype(np.float32)) for f in (np.cos, np.sin))
    at = torch.arange(m.CAPACITY)

    def norm(x, gain):
        return F.rms_norm(x, (m.HIDDEN,), gain, 1e-6)

    def turned(x, position):
        half = m.DIM // 2
        other = torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * cosine[position] + other * sine[position]

    def step(token, position):
        x = words[token]
        seen = (at <= position)[None, None, None]
        for layer, (keys, values) in zip(w, caches, strict=True):
            packed = F.linear(norm(x, layer["before"]), layer["qkv"], layer["bias"]).view(1, -1, 1, m.DIM)
            q, k, v = packed.split([m.HEADS, m.GROUPS, m.GROUPS], 1)
            keys.index_copy_(2, position, turned(k, position))
            values.index_copy_(2, position, v)
            context = F.scaled_dot_product_attention(turned(q, position), keys, values, attn_mask=seen, enable_gqa=True)
            x = x + F.linear(context.view(1, -1), layer["out"])
            gate, up = F.linear(norm(x, layer["between"]), layer["both"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer["less"])
        return F.linear(norm(x, last), head)

    compiled = torch.compile(step, dynamic=False, options={"freezing": True})

    @torch.inference_mode()
    def run(token, position):
        return compiled(torch.tensor([token]), torch.tensor([position])).numpy()[0]

    return run


def figure(name, shapes, count):
    m = example(shapes)
    weights = m.random_weights(np.random.default_rng(3), m.LAYERS)
    theirs = torch_step(m, weights)
    times, token = ([], []), 1
    with Collectives(pt.init()) as comm:
        ours = m.Step(comm.group, comm, weights)
        for position in range(count + UNTIMED):
            results = []
            for run, spent in zip((ours.run, theirs), times, strict=True):
                start = time.perf_counter()
                results.append(run(token, position))
                spent.append((time.perf_counter() - start) * 1e3)
            np.testing.assert_allclose(*results, atol=1e-4 * np.abs(results[1]).max())
            token = int(results[0].argmax())
    mine, other = (statistics.median(spent[UNTIMED:]) for spent in times)
    label = f"decode.{name}.one_token"
    return Figure(label, mine, "ms", count, limit=other / 0.9, baseline="torch.compile", baseline_median=other)


def main():
    figures = [figure(name, *how) for name, how in MODELS.items()]
    print(json.dumps(record(figures, "python benchmarks/decode_throughput.py"), indent=1))


if __name__ == "__main__":
    main()
