"""Greedy decoding, one token at a time: a step of a small Qwen-like decoder, recorded once and replayed as one graph.

Random weights; grouped-query attention with biases, rotary positions, RMS norms, SwiGLU. The graph reads its token,
position and length from device memory, so that each replay sees the cache grow; `update` puts them there. Heads and
columns are split over the ranks, and two all-reduces in a layer sum what they computed.

    peertile run examples/decode_loop.py --ranks 2
"""

import time

import numpy as np

import peertile as pt
from peertile.library.attention import cache_append, decode_attention, rope, rope_tables
from peertile.library.collectives import Collectives
from peertile.library.layers import embedding, linear, rms_norm, swiglu

LAYERS, HEADS, GROUPS, DIM, INNER, WORDS = 3, 8, 4, 32, 688, 1000
HIDDEN, CAPACITY, STEPS = HEADS * DIM, 128, 12
BASE = 1_000_000.0  # of the rotary positions
CHECK = {"steps": 2, "layers": 1}


def random_weights(rng, count):
    """The whole model of `count` layers, as numpy arrays; linear maps [inputs, outputs]."""

    def matrix(rows, columns):
        return (rng.standard_normal((rows, columns)) / rows**0.5).astype(np.float32)

    def vector(size, middle=0.0):
        return (middle + 0.1 * rng.standard_normal(size)).astype(np.float32)

    layers = [
        {
            "before": vector(HIDDEN, 1.0),
            "q": matrix(HIDDEN, HEADS * DIM), "q_bias": vector(HEADS * DIM),
            "k": matrix(HIDDEN, GROUPS * DIM), "k_bias": vector(GROUPS * DIM),
            "v": matrix(HIDDEN, GROUPS * DIM), "v_bias": vector(GROUPS * DIM),
            "project": matrix(HEADS * DIM, HIDDEN),
            "between": vector(HIDDEN, 1.0),
            "gate": matrix(HIDDEN, INNER), "up": matrix(HIDDEN, INNER), "down": matrix(INNER, HIDDEN),
        }
        for _ in range(count)
    ]  # fmt: skip
    return {
        "words": matrix(WORDS, HIDDEN),
        "last": vector(HIDDEN, 1.0),
        "head": matrix(HIDDEN, WORDS),
        "layers": layers,
    }


class Step:
    """One rank's part of the decoder: `run(token, position)` gives the scores of the next token."""

    def __init__(self, group, comm, weights):
        self.stream = pt.current_device().stream("decoder")
        self.given = pt.zeros(3, pt.i64)  # in one piece, so that one copy brings it
        self.token, self.position, self.length = (self.given[k : k + 1] for k in range(3))
        self.logits = pt.empty((1, WORDS), pt.f32)
        self.tables = rope_tables(CAPACITY, DIM, base=BASE)
        n, r = group.size, group.rank
        groups = slice(GROUPS * r // n, GROUPS * (r + 1) // n)
        self.groups = groups.stop - groups.start
        self.heads = self.groups * (HEADS // GROUPS)
        kept = slice(groups.start * DIM, groups.stop * DIM)
        asked = slice(*(edge * (HEADS // GROUPS) for edge in (kept.start, kept.stop)))
        inner = slice(INNER * r // n, INNER * (r + 1) // n)
        x, y = pt.empty((1, HIDDEN), pt.f32), pt.empty((1, HIDDEN), pt.f32)
        normed = pt.empty((1, HIDDEN), pt.f32)
        ops = [embedding(pt.asarray(weights["words"]), self.token, out=x)]
        for w in weights["layers"]:
            ops += self.attended(comm, x, normed, y, w, asked, kept, r == 0)
            ops += self.fed(comm, y, normed, x, w, inner, r == 0)
        ops += [
            rms_norm(x, pt.asarray(weights["last"]), out=normed),
            linear(normed, pt.asarray(weights["head"]), out=self.logits),
        ]
        self.graph = pt.zip(*ops).graph_on(self.stream)

    def attended(self, comm, x, normed, y, w, asked, kept, adds):
        """y = x + attention of the normed x; `adds`: this rank adds what the sum over ranks must hold once."""
        parts = [("q", asked), ("k", kept), ("v", kept)]
        weight = pt.asarray(np.concatenate([w[name][:, part] for name, part in parts], 1))
        bias = pt.asarray(np.concatenate([w[f"{name}_bias"][part] for name, part in parts]))
        packed = pt.empty(weight.shape[1], pt.f32)
        turning = self.heads + self.groups
        turned = pt.empty(turning * DIM, pt.f32)
        asking = self.heads * DIM
        keys, values = (pt.zeros((1, self.groups, CAPACITY, DIM), pt.f32) for _ in range(2))
        context = pt.empty((1, self.heads, DIM), pt.f32)
        return [
            rms_norm(x, pt.asarray(w["before"]), out=normed),
            linear(normed, weight, bias, out=packed.reshape(1, weight.shape[1])),
            rope(
                packed[: turning * DIM].reshape(1, turning, 1, DIM),
                self.tables,
                self.position.reshape(1, 1),
                out=turned.reshape(1, turning, 1, DIM),
            ),
            cache_append(keys, turned[asking:].reshape(1, self.groups, DIM), self.position),
            cache_append(values, packed[turning * DIM :].reshape(1, self.groups, DIM), self.position),
            decode_attention(turned[:asking].reshape(1, self.heads, DIM), keys, values, self.length, out=context),
            linear(
                context.reshape(1, self.heads * DIM),
                pt.asarray(w["project"][asked]),
                residual=x if adds else None,
                out=y,
            ),
            *self.summed(comm, y),
        ]

    def fed(self, comm, x, normed, y, w, inner, adds):
        """y = x + the feed-forward layer of the normed x."""
        width = inner.stop - inner.start
        wide = pt.empty(2 * width, pt.f32)
        gate, up = wide[:width].reshape(1, width), wide[width:].reshape(1, width)
        product = pt.empty(gate.shape, pt.f32)
        both = pt.asarray(np.concatenate([w["gate"][:, inner], w["up"][:, inner]], 1))
        return [
            rms_norm(x, pt.asarray(w["between"]), out=normed),
            linear(normed, both, out=wide.reshape(1, 2 * width)),
            swiglu(gate, up, out=product),
            linear(product, pt.asarray(w["down"][inner]), residual=x if adds else None, out=y),
            *self.summed(comm, y),
        ]

    @staticmethod
    def summed(comm, y):
        """y = its sum over the ranks; one rank alone has nothing to do."""
        return [comm.all_reduce(y, y)] if comm.group.size > 1 else []

    def run(self, token, position):
        self.graph.update(pt.op.copy(np.array([token, position, position + 1]), to=self.given))
        self.graph.launch().sync_on(self.stream)
        return self.logits.numpy()[0]


def reference(weights, tokens):
    """Scores after the last of `tokens`, by definition: all positions at once, in f64."""

    def norm(x, gain):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * gain

    def turn(x):
        angle = np.arange(len(tokens))[:, None] * BASE ** (-np.arange(0, DIM, 2) / DIM)
        z = (x[..., : DIM // 2] + 1j * x[..., DIM // 2 :]) * np.exp(1j * angle)
        return np.concatenate([z.real, z.imag], -1)

    x = weights["words"][tokens].astype(np.float64)
    for w in weights["layers"]:
        n = norm(x, w["before"])
        q, k, v = (
            (n @ w[name] + w[f"{name}_bias"]).reshape(len(tokens), -1, DIM).swapaxes(0, 1) for name in ("q", "k", "v")
        )
        q, k, v = turn(q), np.repeat(turn(k), HEADS // GROUPS, 0), np.repeat(v, HEADS // GROUPS, 0)
        score = q @ k.swapaxes(1, 2) / DIM**0.5 + np.where(np.tri(len(tokens)), 0, -np.inf)
        weight = np.exp(score - score.max(-1, keepdims=True))
        context = weight / weight.sum(-1, keepdims=True) @ v
        x = x + context.swapaxes(0, 1).reshape(len(tokens), -1) @ w["project"]
        n = norm(x, w["between"])
        gate = n @ w["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (n @ w["up"])) @ w["down"]
    return norm(x[-1], weights["last"]) @ weights["head"]


@pt.program
def main(group, steps=STEPS, layers=LAYERS):
    if group.size > GROUPS:
        raise SystemExit(f"decode_loop: expected at most {GROUPS} ranks, a group of heads for each, got {group.size}")
    weights = random_weights(np.random.default_rng(3), layers)  # the same on every rank, which keeps its part
    tokens = [1]
    with Collectives(group) as comm:
        step = Step(group, comm, weights)
        step.run(tokens[0], 0)  # compiles
        spent = 0.0
        for position in range(steps):
            start = time.perf_counter()
            logits = step.run(tokens[position], position)
            spent += time.perf_counter() - start
            want = reference(weights, tokens)
            np.testing.assert_allclose(logits, want, atol=1e-4 * np.abs(want).max())
            tokens.append(int(logits.argmax()))
        graph = step.graph
        if group.rank == 0:
            print(f"{steps} tokens, {spent / steps * 1e6:.0f} µs each: {' '.join(map(str, tokens[1:9]))} ...")
            print(f"decode_loop: {steps} replays of {graph.nodes} nodes on {group.size} ranks are right")


if __name__ == "__main__":
    pt.run(main)
