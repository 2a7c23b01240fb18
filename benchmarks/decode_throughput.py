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
import torch_models

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
    """The same step in torch, compiled as a whole."""
    torch.set_num_threads(1)
    decoder = torch_models.Decoder(torch, m, weights)
    compiled = torch.compile(decoder.step, dynamic=False, options={"freezing": True})

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
