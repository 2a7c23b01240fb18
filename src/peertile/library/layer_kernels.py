"""Kernels of the layers that are not attention, in the public language: linear maps, norms, softmax, gates, lookups.

Every kernel computes in f32, whatever its tensors hold, and rounds once, when it stores. One program owns whole rows
where a row has to be known as a whole (softmax, norms, pooling): its tile is the next power of two, and what is
beyond the row is kept out of sums and maxima. Nothing here checks shapes or chooses tiles: `layers.py` does.
"""

# Kernels: tiles have operators in the kernel language, not in Python.

from __future__ import annotations

from typing import Any

import peertile.language as T
from peertile.kernel import kernel

__all__ = [
    "cache_append", "embedding", "layer_norm", "linear", "linear_row", "mean_pool", "rms_norm", "rope", "softmax",
    "swiglu",
]  # fmt: skip


LOG2_E = 1.4426950408889634


def activated(x: Any, name: str) -> Any:
    """The activation `name` of an f32 tile; its exact form: gelu is x Φ(x), by erf."""
    if name == "relu":
        return T.maximum(x, 0.0)
    if name == "gelu":
        return 0.5 * x * (1.0 + T.erf(x * 0.7071067811865476))
    if name == "silu":
        return x * T.sigmoid(x)
    return x


def finished(acc: Any, bias: Any, residual: Any, tile: Any, name: str, is_biased: bool, is_added: bool) -> Any:
    """activation(acc + bias) + residual, of a tile of the result."""
    if is_biased:
        acc = acc + bias.load((tile.index[1],), (tile.tile_shape[1],)).astype(T.f32)
    acc = activated(acc, name)
    if is_added:
        acc = acc + residual.load_like(tile).astype(T.f32)
    return acc


@kernel
def linear(
    y: T.Exclusive, x: T.Shared, w: T.Shared, bias: T.Shared, residual: T.Shared, BK: T.Const[int],
    STAGES: T.Const[int], ACTIVATION: T.Const[str], BIASED: T.Const[bool], ADDED: T.Const[bool],
) -> None:  # fmt: skip
    """y = activation(x @ w + bias) + residual, tile after tile of y."""
    for tile in y.tiles():
        m, n = tile.index
        BM, BN = tile.tile_shape
        acc = T.zeros((BM, BN), T.f32)
        for k in T.range(x.num_tiles((BM, BK))[1], stages=STAGES):
            acc = T.mma(x.load((m, k), (BM, BK)), w.load((k, n), (BK, BN)), acc)
        acc = finished(acc, bias, residual, tile, ACTIVATION, BIASED, ADDED)
        tile.store(acc.astype(y.dtype))


@kernel
def linear_row(
    y: T.Exclusive, x: T.Shared, w: T.Shared, bias: T.Shared, residual: T.Shared, BK: T.Const[int],
    STAGES: T.Const[int], ACTIVATION: T.Const[str], BIASED: T.Const[bool], ADDED: T.Const[bool],
) -> None:  # fmt: skip
    """As linear for one row: nothing but reading w, by many programs of few columns each, without a matrix unit."""
    m, n = y.index
    BN = y.tile_shape[1]
    acc = T.zeros((BK, BN), T.f32)
    for k in T.range(x.num_tiles((1, BK))[1], stages=STAGES):
        row = T.reshape(x.load((m, k), (1, BK)), (BK, 1)).astype(T.f32)
        acc = T.fma(T.broadcast(row, (BK, BN)), w.load((k, n), (BK, BN)).astype(T.f32), acc)
    out = finished(T.sum(acc, axis=0)[None, :], bias, residual, y, ACTIVATION, BIASED, ADDED)
    y.store(out.astype(y.dtype))


@kernel
def softmax(z: T.Exclusive, x: T.Shared) -> None:
    """z = e^(x - max x) / Σ e^(x - max x) along rows; a program owns whole rows."""
    row = x.load_like(z, padding=T.Padding.NEG_INF).astype(T.f32)
    weight = T.exp2((row - T.max(row, axis=1, keepdims=True)) * LOG2_E)
    z.store((weight * (1.0 / T.sum(weight, axis=1, keepdims=True))).astype(z.dtype))


def row_with(x: Any, residual: Any, z: Any, is_added: bool) -> Any:
    """x + residual as f32, where the tile of z is."""
    row = x.load_like(z).astype(T.f32)
    if is_added:
        row = row + residual.load_like(z).astype(T.f32)
    return row


@kernel
def layer_norm(
    z: T.Exclusive, x: T.Shared, residual: T.Shared, gain: T.Shared, bias: T.Shared, epsilon: T.f32,
    ADDED: T.Const[bool], BIASED: T.Const[bool],
) -> None:  # fmt: skip
    """z = (u - mean u) / √(var u + ε) · gain + bias of each row of u = x + residual; two passes, for precision."""
    W = z.tile_shape[1]
    row = row_with(x, residual, z, ADDED)
    width = z.shape[1]
    scale = 1.0 / width.astype(T.f32)
    off = row - T.sum(row, axis=1, keepdims=True) * scale
    off = T.where((T.iota(W) < width)[None, :], off, 0.0)
    spread = T.rsqrt(T.sum(off * off, axis=1, keepdims=True) * scale + epsilon)
    out = off * spread * gain.load((0,), (W,)).astype(T.f32)
    if BIASED:
        out = out + bias.load((0,), (W,)).astype(T.f32)
    z.store(out.astype(z.dtype))


@kernel
def rms_norm(
    z: T.Exclusive, x: T.Shared, residual: T.Shared, gain: T.Shared, epsilon: T.f32, ADDED: T.Const[bool],
    AGAIN: T.Const[bool] = False, EARLY: T.Const[bool] = False, SCALED: T.Const[bool] = False,
) -> None:  # fmt: skip
    """z = u / √(mean u² + ε) · gain of each row of u = x + residual. AGAIN: a row is loaded twice, the second time from
    a cache, and not held meanwhile. EARLY: the gain is on its way while the row is folded.
    SCALED: the inverse of the width is formed meanwhile, not a quotient for each row behind it."""
    row = row_with(x, residual, z, ADDED)
    if EARLY:
        factor = gain.load((0,), (z.tile_shape[1],))
    if SCALED:
        scale = 1.0 / z.shape[1].astype(T.f32)
    mean = T.sum(row * row, axis=1, keepdims=True)
    if SCALED:
        mean = mean * scale
    else:
        mean = mean / z.shape[1].astype(T.f32)
    if AGAIN:
        row = row_with(x, residual, z, ADDED)
    if not EARLY:
        factor = gain.load((0,), (z.tile_shape[1],))
    out = row * T.rsqrt(mean + epsilon) * factor.astype(T.f32)
    z.store(out.astype(z.dtype))


@kernel
def swiglu(z: T.Exclusive, gate: T.Shared, up: T.Shared) -> None:
    """z = gate · σ(gate) · up."""
    g = gate.load_like(z).astype(T.f32)
    root = T.rsqrt(1.0 + T.exp(-g))  # σ(g) is its square, which takes less than a division
    z.store((g * (root * root) * up.load_like(z).astype(T.f32)).astype(z.dtype))


@kernel
def rope(
    z: T.Exclusive, x: T.Shared, cosine: T.Shared, sine: T.Shared, positions: T.Shared, PAIRED: T.Const[bool],
    WHOLE: T.Const[bool],
) -> None:  # fmt: skip
    """z = x · cos + (x of the partner) · sin, both looked up by position, once for all heads of a tile; the sign is in
    the table of sines. WHOLE: a tile is one half of its heads, whose partners are the other half."""
    b, h, t, j = z.index
    H, BT, D = z.tile_shape[1], z.tile_shape[2], z.tile_shape[3]
    at = T.reshape(positions.load((b, t), (1, BT)), (BT,))
    inside = t * BT + T.iota(BT) < z.shape[2]
    is_known = T.all((at >= 0) & (at < cosine.shape[0]) | ~inside)
    T.assert_(is_known, "rope: expected positions within the tables")  # noqa: PT009 - a word of kernels
    rows = T.reshape(x.load_like(z).astype(T.f32), (H, BT, D))
    if WHOLE:  # read twice, the second time from a cache, rather than moved between threads
        other = T.reshape(x.load((b, h, t, 1 - j), z.tile_shape).astype(T.f32), (H, BT, D))
    else:
        column = T.iota(D)
        if PAIRED:
            partner = column ^ 1
        else:
            half = z.shape[3] // 2
            partner = T.where(column < half, column + half, T.maximum(column - half, 0))
        other = T.take(rows, T.broadcast(partner[None, None, :], (H, BT, D)), axis=2)
    c = T.reshape(cosine.gather(at).load((0, j), (BT, D)), (1, BT, D))
    s = T.reshape(sine.gather(at).load((0, j), (BT, D)), (1, BT, D))
    z.store(T.reshape(rows * c + other * s, (1, H, BT, D)).astype(z.dtype))


@kernel
def embedding(z: T.Exclusive, table: T.Shared, ids: T.Shared) -> None:
    """z[i] = table[ids[i]]."""
    i, j = z.index
    BI = z.tile_shape[0]
    chosen = ids.load((i,), (BI,))
    inside = i * BI + T.iota(BI) < z.shape[0]
    is_known = T.all((chosen >= 0) & (chosen < table.shape[0]) | ~inside)
    T.assert_(is_known, "embedding: expected ids of rows of the table")  # noqa: PT009 - a word of kernels
    z.store(table.gather(chosen).load((0, j), z.tile_shape).astype(z.dtype))


@kernel
def mean_pool(
    z: T.Exclusive, x: T.Shared, mask: T.Shared, epsilon: T.f32, BT: T.Const[int], UNIT: T.Const[bool],
) -> None:  # fmt: skip
    """z[b] = the mean of the rows of x[b] whose mask is not 0, over its length with UNIT; one program for each b."""
    b, _ = z.index
    W = z.tile_shape[1]
    total, count = T.zeros((W,), T.f32), T.zeros((BT,), T.f32)
    for t in T.range(x.num_tiles((1, BT, W))[1]):
        counted = T.reshape(mask.load((b, t), (1, BT)), (BT,)) != 0
        rows = T.reshape(x.load((b, t, 0), (1, BT, W)), (BT, W)).astype(T.f32)
        total = total + T.sum(T.where(counted[:, None], rows, 0.0), axis=0)
        count = count + T.where(counted, 1.0, 0.0)
    mean = total / T.maximum(T.sum(count, axis=0), 1.0)
    if UNIT:
        mean = mean / T.maximum(T.sqrt(T.sum(mean * mean, axis=0)), epsilon)
    z.store(T.reshape(mean, (1, W)).astype(z.dtype))


@kernel
def cache_append(cache: T.Exclusive, rows: T.Shared, positions: T.Shared) -> None:
    """cache[b, h, positions[b]] = rows[b, h]; only the program that owns the place touches memory."""
    b, h, t, _ = cache.index
    BT, D = cache.tile_shape[2], cache.tile_shape[3]
    at = T.reshape(positions.load((b,), (1,)), ()).astype(T.i64)
    is_inside = (at >= 0) & (at < cache.shape[2])
    T.assert_(is_inside, "cache_append: expected a position within the cache")  # noqa: PT009 - a word of kernels
    if (at >= t * BT) & (at < t * BT + BT):
        row = T.reshape(rows.load((b, h, 0), (1, 1, D)), (1, D)).astype(cache.dtype)
        old = T.reshape(cache.load(), (BT, D))
        new = T.where((t * BT + T.iota(BT) == at)[:, None], row, old)
        cache.store(T.reshape(new, (1, 1, BT, D)))
