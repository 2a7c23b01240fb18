"""Kernels that gradients of linear maps need, in the public language: products of any float type, activations and
their derivatives, sums over rows. Nothing here checks shapes or chooses tiles: `gradients.py` does.

ACC is the type that is computed in: f64 for f64, f32 for everything else. Values are rounded once, when stored.
"""

# Kernels: tiles have operators in the kernel language, not in Python.

from __future__ import annotations

from typing import Any

import peertile.language as T
from peertile.dtypes import DType
from peertile.kernel import kernel

__all__ = ["activate", "activation_gradient", "add_bias", "column_sum", "product"]


def _normal_below(x: Any) -> Any:
    """Φ(x), the share of a normal distribution below x."""
    return 0.5 * (1.0 + T.erf(x * 0.7071067811865476))


@kernel
def product(c: T.Exclusive, a: T.Shared, b: T.Shared, BK: T.Const[int], ACC: T.Const[DType]) -> None:
    """c = a @ b, tile after tile of c."""
    for tile in c.tiles():
        m, n = tile.index
        BM, BN = tile.tile_shape
        acc = T.zeros((BM, BN), ACC)
        for k in T.range(a.num_tiles((BM, BK))[1]):
            acc = T.mma(a.load((m, k), (BM, BK)), b.load((k, n), (BK, BN)), acc)
        tile.store(acc.astype(c.dtype))


@kernel
def add_bias(z: T.Exclusive, bias: T.Shared, ACC: T.Const[DType]) -> None:
    """z = z + bias, the bias along the rows."""
    _, n = z.index
    z.store((z.load().astype(ACC) + bias.load((n,), (z.tile_shape[1],)).astype(ACC)).astype(z.dtype))


@kernel
def activate(z: T.Exclusive, x: T.Shared, ACTIVATION: T.Const[str], ACC: T.Const[DType]) -> None:
    """z = activation(x)."""
    u = x.load_like(z).astype(ACC)
    if ACTIVATION == "relu":
        z.store(T.maximum(u, 0.0).astype(z.dtype))
    elif ACTIVATION == "gelu":
        z.store((u * _normal_below(u)).astype(z.dtype))
    else:
        z.store((u * T.sigmoid(u)).astype(z.dtype))


@kernel
def activation_gradient(
    z: T.Exclusive, dy: T.Shared, x: T.Shared, ACTIVATION: T.Const[str], ACC: T.Const[DType]
) -> None:
    """z = dy · activation'(x); relu'(0) = 0."""
    u, d = x.load_like(z).astype(ACC), dy.load_like(z).astype(ACC)
    if ACTIVATION == "relu":
        z.store(T.where(u > 0.0, d, 0.0).astype(z.dtype))
    elif ACTIVATION == "gelu":
        slope = _normal_below(u) + u * T.exp(u * u * -0.5) * 0.3989422804014327
        z.store((d * slope).astype(z.dtype))
    else:
        s = T.sigmoid(u)
        z.store((d * s * (1.0 + u * (1.0 - s))).astype(z.dtype))


@kernel
def column_sum(z: T.Exclusive, x: T.Shared, BM: T.Const[int], ACC: T.Const[DType]) -> None:
    """z = Σ of the rows of x, in order."""
    (n,) = z.index
    BN = z.tile_shape[0]
    total = T.zeros((BN,), ACC)
    for m in T.range(x.num_tiles((BM, BN))[0]):
        total = total + T.sum(x.load((m, n), (BM, BN)).astype(ACC), axis=0)
    z.store(total.astype(z.dtype))
