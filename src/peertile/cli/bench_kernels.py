"""The kernels of the benchmarks."""

from __future__ import annotations

import peertile.language as T
from peertile.kernel import kernel

__all__ = ["chain", "matmul", "partial_sums", "rmsnorm", "softmax", "vector_add", "whole_sum"]


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


@kernel
def partial_sums(z: T.Exclusive, x: T.Shared, B: T.Const[int]) -> None:
    """z[p] = the sum, in f32, of every P-th tile of x from tile p on; P programs, one for each element of z."""
    acc = T.zeros((B,), T.f32)
    for k in T.range(T.program_id(0), x.num_tiles((B,))[0], T.num_programs(0)):
        acc = acc + x.load((k,), (B,)).astype(T.f32)
    z.store(T.reshape(T.sum(acc, axis=0), (1,)))


@kernel
def whole_sum(z: T.Exclusive, x: T.Shared, W: T.Const[int]) -> None:
    """z = the sum of x, which one program loads as a tile of W."""
    z.store(T.reshape(T.sum(x.load((0,), (W,)), axis=0), (1,)))
