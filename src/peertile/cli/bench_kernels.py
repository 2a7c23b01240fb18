"""The kernels of the benchmarks."""

from __future__ import annotations

import peertile.language as T
from peertile.kernel import kernel

__all__ = ["chain", "matmul", "rmsnorm", "softmax", "vector_add"]


@kernel
def vector_add(z: T.Exclusive, x: T.Shared, y: T.Shared) -> None:
    """z = x + y."""
    z.store(x.load_like(z) + y.load_like(z))


@kernel
def chain(z: T.Exclusive, x: T.Shared, y: T.Shared) -> None:
    """z = exp(x * y - x) * 0.5 + y, five operations in one pass."""
    a, b = x.load_like(z), y.load_like(z)
    z.store(T.exp(a * b - a) * 0.5 + b)


@kernel
def matmul(c: T.Exclusive, a: T.Shared, b: T.Shared, BK: T.Const[int] = 256) -> None:
    """c = a @ b, one tile of c at a time."""
    for tile in c.tiles():
        m, n = tile.index
        BM, BN = tile.tile_shape
        acc = T.zeros((BM, BN), T.f32)
        for k in T.range(a.num_tiles((BM, BK))[1], stages=3):
            acc = T.mma(a.load((m, k), (BM, BK)), b.load((k, n), (BK, BN)), acc)
        tile.store(acc.astype(c.dtype))


@kernel
def softmax(z: T.Exclusive, x: T.Shared) -> None:
    """Softmax of each row; a program owns whole rows."""
    row = x.load_like(z)
    weight = T.exp(row - T.max(row, axis=1, keepdims=True))
    z.store(weight / T.sum(weight, axis=1, keepdims=True))


@kernel
def rmsnorm(z: T.Exclusive, x: T.Shared, gain: T.Shared, inverse_width: T.f32) -> None:
    """Each row over its root mean square, times a gain per column."""
    row = x.load_like(z)
    mean = T.sum(row * row, axis=1, keepdims=True) * inverse_width
    z.store(row * T.rsqrt(mean + 1e-6) * gain.load((0, 0), (1, z.tile_shape[1])))
