"""The models of the examples in torch, for benchmarks to stand beside: what a careful user writes, with packed
projections, fused attention, and caches that are written in place. Compiles nothing and times nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def encoder(torch: Any, config: Any, weights: Any, place: str = "cpu") -> Callable[[Any], Any]:
    """f(numbers of words: texts x tokens) -> vectors: texts x hidden, of length 1."""
    F = torch.nn.functional
    w = {name: torch.from_numpy(array.copy()).to(place) for name, array in weights.items()}
    for k in range(config.layers):
        parts = [f"encoder.layer.{k}.attention.self.{part}" for part in ("query", "key", "value")]
        for kind in ("weight", "bias"):
            w[f"{k}.qkv.{kind}"] = torch.cat([w[f"{part}.{kind}"] for part in parts])

    def dense(x: Any, name: str) -> Any:
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def norm(x: Any, name: str) -> Any:
        return F.layer_norm(x, (config.hidden,), w[f"{name}.weight"], w[f"{name}.bias"], config.epsilon)

    def encode(ids: Any) -> Any:
        batch, tokens = ids.shape
        x = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.position_embeddings.weight"][:tokens]
        x = norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
        for k in range(config.layers):
            name = f"encoder.layer.{k}"
            heads = dense(x, f"{k}.qkv").view(batch, tokens, 3, config.heads, config.dim).permute(2, 0, 3, 1, 4)
            context = F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(batch, tokens, config.hidden)
            x = norm(x + dense(context, f"{name}.attention.output.dense"), f"{name}.attention.output.LayerNorm")
            wide = F.gelu(dense(x, f"{name}.intermediate.dense"))
            x = norm(x + dense(wide, f"{name}.output.dense"), f"{name}.output.LayerNorm")
        return F.normalize(x.mean(1))

    return encode


class Decoder:
    """A step of the decoder of one token; `m` is the example's module, with its shapes."""

    def __init__(self, torch: Any, m: Any, weights: Any, place: str = "cpu") -> None:
        self.torch, self.m = torch, m

        def there(array: Any) -> Any:
            return torch.from_numpy(np.ascontiguousarray(array)).to(place)

        self.layers = [
            {
                "before": there(layer["before"]), "between": there(layer["between"]),
                "qkv": there(np.concatenate([layer[name] for name in "qkv"], 1).T),
                "bias": there(np.concatenate([layer[f"{name}_bias"] for name in "qkv"])),
                "both": there(np.concatenate([layer["gate"], layer["up"]], 1).T),
                "out": there(layer["project"].T), "less": there(layer["down"].T),
            }
            for layer in weights["layers"]
        ]  # fmt: skip
        self.words, self.head, self.last = there(weights["words"]), there(weights["head"].T), there(weights["last"])
        self.caches = [
            [torch.zeros(1, m.GROUPS, m.CAPACITY, m.DIM, device=place) for _ in range(2)] for _ in self.layers
        ]
        angle = np.arange(m.CAPACITY)[:, None] * m.BASE ** (-np.arange(0, m.DIM, 2) / m.DIM)
        self.cosine, self.sine = (there(np.tile(f(angle), 2).astype(np.float32)) for f in (np.cos, np.sin))
        self.at = torch.arange(m.CAPACITY, device=place)

    def norm(self, x: Any, gain: Any) -> Any:
        return self.torch.nn.functional.rms_norm(x, (self.m.HIDDEN,), gain, 1e-6)

    def turned(self, x: Any, position: Any) -> Any:
        half = self.m.DIM // 2
        other = self.torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * self.cosine[position] + other * self.sine[position]

    def layer(self, x: Any, layer: Any, keys: Any, values: Any, position: Any) -> Any:
        F, m = self.torch.nn.functional, self.m
        seen = (self.at <= position)[None, None, None]
        packed = F.linear(self.norm(x, layer["before"]), layer["qkv"], layer["bias"]).view(1, -1, 1, m.DIM)
        q, k, v = packed.split([m.HEADS, m.GROUPS, m.GROUPS], 1)
        keys.index_copy_(2, position, self.turned(k, position))
        values.index_copy_(2, position, v)
        q = self.turned(q, position)
        context = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=True)
        x = x + F.linear(context.view(1, -1), layer["out"])
        gate, up = F.linear(self.norm(x, layer["between"]), layer["both"]).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, layer["less"])

    def step(self, token: Any, position: Any, layer: Callable[..., Any] | None = None) -> Any:
        """Scores of the next token. `layer`: what stands for the method of that name, compiled for instance."""
        x = self.words[token]
        for weights, (keys, values) in zip(self.layers, self.caches, strict=True):
            x = (layer or self.layer)(x, weights, keys, values, position)
        return self.torch.nn.functional.linear(self.norm(x, self.last), self.head)
