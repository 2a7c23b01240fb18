"""Attention and what surrounds it, as lazy operations: whole sequences, one step against a cache, rotary positions.

Tensors are [batch, heads, tokens, dim], any strides, so that heads of a packed product are views of it. Each function
checks its arguments, chooses tiles and gives a `DeviceOp` whose result is the output. All arithmetic is in
attention_kernels.py and layer_kernels.py, in the public language; nothing here waits or copies.
"""

from __future__ import annotations

from enum import Enum
from math import log, sqrt
from typing import Any

import numpy as np

from peertile.backends.cuda.divided import can_divide
from peertile.dtypes import f32
from peertile.errors import ArgumentError
from peertile.library import attention_kernels, layer_kernels
from peertile.library.layers import FLOATS, INDICES, check_tensor, output, power_of_two
from peertile.op import value
from peertile.runtime.device import Device
from peertile.runtime.driver import DriverKind
from peertile.runtime.op import DeviceOp
from peertile.runtime.registry import current_device
from peertile.runtime.tensor import Tensor

__all__ = ["RotaryPairs", "attention", "cache_append", "decode_attention", "rope", "rope_tables"]

WIDEST_HEAD = 512
"""Elements of the widest head: a program holds its queries, its sums and a block of keys and of values."""
LOG2_E = 1.0 / log(2.0)


class RotaryPairs(Enum):
    """Which elements rotary positions turn together: i with i + dim/2, or 2i with 2i + 1."""

    HALVES = "halves"
    NEIGHBOURS = "neighbours"


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    lengths: Tensor | None = None,
    scale: float | None = None,
    out: Tensor | None = None,
) -> DeviceOp[Tensor]:
    """out = softmax(scale · q kᵀ) v for each batch and head, without a matrix of scores in memory.

    q [batch, heads, queries, dim] or [batch · heads, queries, dim]; k and v the same with `keys` tokens, and with a
    number of heads that divides that of q (heads of q share them in order); dim up to 512. f32, f16 or bf16, one
    dtype; sums are f32. `scale` is 1/√dim by default. `causal`: query i sees keys up to i + keys - queries.
    `lengths` [batch] i32 or i64: keys from there on are unseen, whatever they hold; it is read when the operation
    runs. A query that sees no key gives 0. ArgumentError for what does not fit together.

    Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", 2022.

    >>> import numpy as np, peertile as pt
    >>> from peertile.library.attention import attention
    >>> x = pt.asarray(np.eye(4, dtype=np.float32).reshape(1, 4, 4))
    >>> attention(x, x, x, causal=True).sync().numpy()[0, 0].tolist()
    [1.0, 0.0, 0.0, 0.0]
    """
    q4, k4, v4, length, y = _attention_arguments("attention", q, k, v, lengths, out)
    if not y.size:
        return value(y, device=q.device)
    number = _scale("attention", scale, q4.shape[3])
    op = _attend(_with_heads(y), q4, k4, v4, length, number, is_causal=bool(causal))
    return op.map(lambda *_: y)


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    *,
    scale: float | None = None,
    out: Tensor | None = None,
) -> DeviceOp[Tensor]:
    """out = the attention of one query row for each head to the first `lengths[b]` tokens of a cache.

    q and out [batch, heads, dim]; keys and values [batch, groups, capacity, dim], groups a divisor of heads (each
    group is read once for its heads); lengths [batch] i32 or i64, read when the operation runs, so that a recorded
    graph sees the cache grow. Otherwise as `attention`.

    >>> import numpy as np, peertile as pt
    >>> from peertile.library.attention import decode_attention
    >>> cache = pt.asarray(np.arange(4, dtype=np.float32).reshape(1, 1, 4, 1))
    >>> one, length = pt.zeros((1, 1, 1), pt.f32), pt.asarray(np.array([3]))
    >>> decode_attention(one, cache, cache, length).sync().numpy().tolist()
    [[[1.0]]]
    """
    check_tensor("decode_attention", "q", q, FLOATS, ("batch", "heads", "dim"))
    batch, heads, dim = q.shape
    check_tensor("decode_attention", "keys", keys, (q.dtype,), (batch, "groups", "capacity", dim), q.device)
    check_tensor("decode_attention", "values", values, (q.dtype,), keys.shape, q.device)
    check_tensor("decode_attention", "lengths", lengths, INDICES, (batch,), q.device)
    groups = keys.shape[1]
    _check_head("decode_attention", heads, groups, dim)
    y = output("decode_attention", out, q.shape, q.dtype, q.device)
    if not y.size:
        return value(y, device=q.device)
    number = _scale("decode_attention", scale, dim)
    # The heads of a group are the rows of one tile: each key is read once for all of them.
    shared = heads // groups
    q4, y4 = (_grouped(t, groups, shared) for t in (q, y))
    op = _attend(y4, q4, keys, values, lengths, number, is_causal=False)
    return op.map(lambda *_: y)


def _grouped(t: Tensor, groups: int, shared: int) -> Tensor:
    batch, _, dim = t.shape
    over_batch, over_heads, over_dim = t.strides
    return t.strided((batch, groups, shared, dim), (over_batch, over_heads * shared, over_heads, over_dim))


def _attend(
    y: Tensor, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, scale: float, *, is_causal: bool
) -> DeviceOp[Any]:
    if lengths is None and scale >= 0 and _is_flat(y, q, k, v, is_causal=is_causal):
        # Without gaps batches and heads are one axis, and so are they and the queries.
        o, keys3, values3 = (t.reshape(t.shape[0] * t.shape[1], *t.shape[2:]) for t in (y, k, v))
        return attention_kernels.attend_flat(
            o.permute(1, 0, 2).partition((FLAT_ROWS, 1, None)), q.reshape(q.size // q.shape[3], q.shape[3]), keys3,
            values3, scale * LOG2_E, BK=FLAT_KEYS, CAUSAL=is_causal, STAGES=2,
        )  # fmt: skip
    rows, keys = 64, 128
    if q.device.driver.kind is DriverKind.CUDA:
        rows, keys = (64, 64) if q.dtype.itemsize == 2 else (32, 32)  # f32 is multiplied without tensor cores
        if q.dtype.itemsize == 2 and q.shape[3] <= 128 and q.shape[2] > 64:
            rows, keys = 128, 64
    rows, keys = min(power_of_two(q.shape[2]), rows), min(power_of_two(k.shape[2]), keys)
    # Unread without lengths: any tensor will do, and the queries are there.
    return attention_kernels.attend(
        y.permute(2, 0, 1, 3).partition((rows, 1, 1, None)), q, k, v, q if lengths is None else lengths,
        abs(scale) * LOG2_E, BK=keys, CAUSAL=is_causal, BOUNDED=lengths is not None, NEGATED=scale < 0,
        STAGES=3 if rows == 128 else 2,
    )  # fmt: skip


FLAT_ROWS, FLAT_KEYS = 128, 128
"""Queries of a program and keys of a block where groups of warps share the loop over keys."""


def _is_flat(y: Tensor, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> bool:
    """Whether groups of warps can share the loop over keys: on tensor cores, whole tiles, no gaps."""
    queries, dim = q.shape[2:]
    if q.dtype.itemsize != 2 or dim != 128 or not queries or queries % FLAT_ROWS or not can_divide(q.device.target):
        return False
    return (is_causal or k.shape[2] % FLAT_KEYS == 0) and all(t.is_contiguous for t in (y, q, k, v))


def _with_heads(t: Tensor) -> Tensor:
    """[batch, heads, tokens, dim] of a tensor that may lack the heads."""
    if len(t.shape) == 4:
        return t
    batch, tokens, dim = t.shape
    return t.strided((batch, 1, tokens, dim), (t.strides[0], 0, *t.strides[1:]))


def _attention_arguments(
    layer: str, q: Any, k: Any, v: Any, lengths: Any, out: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    has_heads = not isinstance(q, Tensor) or len(q.shape) != 3
    check_tensor(
        layer, "q", q, FLOATS, ("batch", "heads", "queries", "dim") if has_heads else ("batch", "queries", "dim")
    )
    batch, dim = q.shape[0], q.shape[-1]
    like = (batch, "groups", "keys", dim) if has_heads else (batch, "keys", dim)
    check_tensor(layer, "k", k, (q.dtype,), like, q.device)
    check_tensor(layer, "v", v, (q.dtype,), k.shape, q.device)
    if lengths is not None:
        check_tensor(layer, "lengths", lengths, INDICES, (batch,), q.device)
    _check_head(layer, q.shape[1] if has_heads else 1, k.shape[1] if has_heads else 1, dim)
    y = output(layer, out, q.shape, q.dtype, q.device)
    return _with_heads(q), _with_heads(k), _with_heads(v), lengths, y


def _check_head(layer: str, heads: int, groups: int, dim: int) -> None:
    if dim > WIDEST_HEAD:
        raise ArgumentError(f"{layer}: q: expected heads of at most {WIDEST_HEAD} elements, got {dim}")
    if groups == 0 or heads % groups:
        raise ArgumentError(
            f"{layer}: k: expected a number of heads that divides the {heads} of q, got {groups}; "
            "heads of q share those of k and v in order"
        )


def _scale(layer: str, scale: Any, dim: int) -> float:
    if scale is None:
        return 1.0 / sqrt(dim)
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise ArgumentError(f"{layer}: scale: expected a number, got {scale!r}")
    return float(scale)


# -------------------------------------------------------------------- rotary positions


def rope_tables(
    positions: int,
    dim: int,
    *,
    base: float = 10_000.0,
    pairs: RotaryPairs = RotaryPairs.HALVES,
    device: Device | None = None,
) -> tuple[Tensor, Tensor]:
    """The tables of cosines and signed sines that `rope` looks positions up in: [positions, dim] f32 each.

    Angle of pair i at position p: p · base^(-2i/dim). Computed once, on the host, in f64: an f32 angle would be wrong
    by 0.004 at position 100000. The sine is negative for the first element of a pair.

    >>> from peertile.library.attention import rope_tables
    >>> cosine, sine = rope_tables(2, 4)
    >>> sine.numpy().astype(float).round(3).tolist()
    [[-0.0, -0.0, 0.0, 0.0], [-0.841, -0.01, 0.841, 0.01]]
    """
    _check_pairs("rope_tables", pairs)
    if not isinstance(positions, int) or positions < 1:
        raise ArgumentError(f"rope_tables: positions: expected an integer >= 1, got {positions!r}")
    if not isinstance(dim, int) or dim < 2 or dim % 2:
        raise ArgumentError(f"rope_tables: dim: expected an even integer >= 2, got {dim!r}")
    angle = np.arange(positions)[:, None] * float(base) ** (-np.arange(0, dim, 2) / dim)
    cosine, sine = np.cos(angle), np.sin(angle)
    if pairs is RotaryPairs.HALVES:
        tables = np.concatenate([cosine, cosine], 1), np.concatenate([-sine, sine], 1)
    else:
        tables = np.repeat(cosine, 2, 1), np.stack([-sine, sine], 2).reshape(positions, dim)
    where = current_device() if device is None else device
    first, second = (where.asarray(table, f32) for table in tables)
    return first, second


def rope(
    x: Tensor,
    tables: tuple[Tensor, Tensor],
    positions: Tensor,
    *,
    pairs: RotaryPairs = RotaryPairs.HALVES,
    out: Tensor | None = None,
) -> DeviceOp[Tensor]:
    """out = x with each pair of elements turned by the angle of its token's position (Su et al., 2021).

    x and out [batch, heads, tokens, dim], any strides; tables as `rope_tables` makes them, for dim and `pairs`;
    positions [batch, tokens] i32 or i64, read when the operation runs. A position beyond the tables ends the launch
    with KernelAssert.

    >>> import numpy as np, peertile as pt
    >>> from peertile.library.attention import rope, rope_tables
    >>> x = pt.asarray(np.array([1.0, 0.0], np.float32).reshape(1, 1, 1, 2))
    >>> at = pt.asarray(np.array([[1]]))
    >>> rope(x, rope_tables(2, 2), at).sync().numpy().ravel().astype(float).round(3).tolist()
    [0.54, 0.841]
    """
    _check_pairs("rope", pairs)
    check_tensor("rope", "x", x, FLOATS, ("batch", "heads", "tokens", "dim"))
    batch, _, tokens, dim = x.shape
    if dim % 2:
        raise ArgumentError(f"rope: x: expected an even number of elements in a head, got {dim}")
    if not isinstance(tables, tuple) or len(tables) != 2:
        raise ArgumentError(f"rope: tables: expected what rope_tables gives, got {type(tables).__name__}")
    cosine, sine = tables
    check_tensor("rope", "cosines", cosine, (f32,), ("positions", dim), x.device)
    check_tensor("rope", "sines", sine, (f32,), cosine.shape, x.device)
    check_tensor("rope", "positions", positions, INDICES, (batch, tokens), x.device)
    z = output("rope", out, x.shape, x.dtype, x.device)
    if not z.size:
        return value(z, device=x.device)
    paired = pairs is RotaryPairs.NEIGHBOURS
    whole = not paired and power_of_two(dim) == dim
    heads = min(power_of_two(x.shape[1]), 4)
    part = z.partition((1, heads, min(power_of_two(tokens), 16), dim // 2 if whole else None))
    op = layer_kernels.rope(part, x, cosine, sine, positions, PAIRED=paired, WHOLE=whole)
    return op.map(lambda *_: z)


def _check_pairs(layer: str, pairs: Any) -> None:
    if not isinstance(pairs, RotaryPairs):
        raise ArgumentError(f"{layer}: pairs: expected a RotaryPairs, got {pairs!r}")


# -------------------------------------------------------------------- cache


def cache_append(cache: Tensor, rows: Tensor, positions: Tensor) -> DeviceOp[Tensor]:
    """cache[b, h, positions[b]] = rows[b, h]; the result is the cache, changed in place.

    cache [batch, heads, capacity, dim] and rows [batch, heads, dim] of one dtype; positions [batch] i32 or i64, read
    when the operation runs. A position outside the cache ends the launch with KernelAssert.

    >>> import numpy as np, peertile as pt
    >>> from peertile.library.attention import cache_append
    >>> cache, row = pt.zeros((1, 1, 3, 1), pt.f32), pt.ones((1, 1, 1), pt.f32)
    >>> cache_append(cache, row, pt.asarray(np.array([1]))).sync().numpy().ravel().tolist()
    [0.0, 1.0, 0.0]
    """
    check_tensor("cache_append", "cache", cache, FLOATS, ("batch", "heads", "capacity", "dim"))
    batch, heads, capacity, dim = cache.shape
    check_tensor("cache_append", "rows", rows, (cache.dtype,), (batch, heads, dim), cache.device)
    check_tensor("cache_append", "positions", positions, INDICES, (batch,), cache.device)
    if not cache.size:
        return value(cache, device=cache.device)
    part = cache.partition((1, 1, min(power_of_two(capacity), 64), None))
    return layer_kernels.cache_append(part, rows, positions).map(lambda *_: cache)
