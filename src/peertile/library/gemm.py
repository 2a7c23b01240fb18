"""The kernels of matrix products, in the public language: whole products, and products split along the inner axis.

A split product (`gemm_part`, then `gemm_fold`) keeps a GPU busy where the result has fewer tiles than there are
multiprocessors: each program makes one tile of one share of the inner axis, and the shares are added in order, so
that the result is the same on every run. Nothing here chooses among them: `products.py` does, by a measured table.
"""

# Kernels: tiles have operators in the kernel language, not in Python.

from __future__ import annotations

import peertile.language as T
from peertile.kernel import kernel

__all__ = ["gemm", "gemm_fold", "gemm_part", "gemm_persistent", "gemm_tailed", "gemm_wide", "turn"]


def product(
    a: T.Shared, b: T.Shared, m: T.Tile, n: T.Tile, first: T.Tile | int, stop: T.Tile | int, BM: int, BN: int,
    BK: int, STAGES: int, TF32: bool,
) -> T.Tile:  # fmt: skip
    """Tile (m, n) of a @ b, f32, over the tiles `first` to `stop` of the inner axis."""
    acc = T.zeros((BM, BN), T.f32)
    for k in T.range(first, stop, stages=STAGES):
        acc = T.mma(
            a.load((m, k), (BM, BK)), b.load((k, n), (BK, BN)), acc,
            precision=T.Precision.TF32 if TF32 else T.Precision.IEEE,
        )  # fmt: skip
    return acc


def wide_product(
    a: T.Shared, b: T.Shared, side: T.Shared, m: T.Tile, n: T.Tile, first: T.Tile | int, stop: T.Tile, left: T.Tile,
    right: T.Tile, BM: int, BN: int, BS: int, BK: int, STAGES: int,
) -> tuple[T.Tile, T.Tile]:  # fmt: skip
    """Tile (m, n) of a @ b and of a @ side over a part of the inner axis, added to what there was."""
    for k in T.range(first, stop, stages=STAGES):
        rows = a.load((m, k), (BM, BK))
        left = T.mma(rows, b.load((k, n), (BK, BN)), left)
        right = T.mma(rows, side.load((k, n), (BK, BS)), right)
    return left, right


@kernel
def gemm(
    c: T.Exclusive, a: T.Shared, b: T.Shared, BK: T.Const[int] = 64, STAGES: T.Const[int] = 3,
    TF32: T.Const[bool] = False,
) -> None:  # fmt: skip
    """c = a @ b, a program for each tile of c."""
    m, n = c.index
    BM, BN = c.tile_shape
    acc = product(a, b, m, n, 0, a.num_tiles((BM, BK))[1], BM, BN, BK, STAGES, TF32)
    c.store(acc.astype(c.dtype))


@kernel
def gemm_persistent(
    c: T.Exclusive, a: T.Shared, b: T.Shared, BK: T.Const[int] = 64, STAGES: T.Const[int] = 3,
    TF32: T.Const[bool] = False,
) -> None:  # fmt: skip
    """c = a @ b by as many programs as are resident, each through tiles in swizzled order."""
    for tile in c.tiles():
        m, n = tile.index
        BM, BN = tile.tile_shape
        acc = product(a, b, m, n, 0, a.num_tiles((BM, BK))[1], BM, BN, BK, STAGES, TF32)
        tile.store(acc.astype(c.dtype))


@kernel
def gemm_tailed(
    c: T.Exclusive, tail: T.Exclusive, a: T.Shared, rest: T.Shared, b: T.Shared, BK: T.Const[int] = 64,
    STAGES: T.Const[int] = 3, TF32: T.Const[bool] = False,
) -> None:  # fmt: skip
    """c = a @ b and tail = rest @ b, of smaller tiles, which go to the programs that have had one tile less of c first,
    so that all end at about the same time."""
    for tile in c.tiles():
        m, n = tile.index
        BM, BN = tile.tile_shape
        acc = product(a, b, m, n, 0, a.num_tiles((BM, BK))[1], BM, BN, BK, STAGES, TF32)
        tile.store(acc.astype(c.dtype))
    for tile in tail.tiles(dealt=c.num_tiles()[0] * c.num_tiles()[1]):
        m, n = tile.index
        BM, BN = tile.tile_shape
        acc = product(rest, b, m, n, 0, rest.num_tiles((BM, BK))[1], BM, BN, BK, STAGES, TF32)
        tile.store(acc.astype(tail.dtype))


@kernel
def gemm_wide(
    c: T.Exclusive, edge: T.Exclusive, a: T.Shared, b: T.Shared, side: T.Shared, BK: T.Const[int] = 32,
    STAGES: T.Const[int] = 7,
) -> None:  # fmt: skip
    """c = a @ b and edge = a @ side, which have as many tiles: one of each is made in one go, and each tile of a is
    loaded once for both."""
    for tile, more in zip(c.tiles(), edge.tiles(), strict=False):
        m, n = tile.index
        BM, BN = tile.tile_shape
        BS = more.tile_shape[1]
        left, right = T.zeros((BM, BN), T.f32), T.zeros((BM, BS), T.f32)
        steps = a.num_tiles((BM, BK))[1]
        left, right = wide_product(a, b, side, m, n, 0, steps, left, right, BM, BN, BS, BK, STAGES)
        tile.store(left.astype(c.dtype))
        more.store(right.astype(edge.dtype))


@kernel
def turn(z: T.Exclusive, x: T.Shared) -> None:
    """z = the transpose of x."""
    m, n = z.index
    z.store(T.permute(x.load((n, m), (z.tile_shape[1], z.tile_shape[0])), (1, 0)))


@kernel
def gemm_part(
    p: T.Exclusive, a: T.Shared, b: T.Shared, BK: T.Const[int] = 64, STAGES: T.Const[int] = 3,
    TF32: T.Const[bool] = False,
) -> None:  # fmt: skip
    """p[s] = the part of a @ b from share s of the inner axis; p [shares, rows, columns] f32, tiles (1, BM, BN)."""
    s, m, n = p.index
    BM, BN = p.tile_shape[1], p.tile_shape[2]
    steps = a.num_tiles((BM, BK))[1]
    share = (steps + p.shape[0] - 1) // p.shape[0]
    stop = T.minimum(s * share + share, steps)
    acc = product(a, b, m, n, s * share, stop, BM, BN, BK, STAGES, TF32)
    p.store(T.reshape(acc, (1, BM, BN)))


@kernel
def gemm_fold(c: T.Exclusive, p: T.Shared, S: T.Const[int]) -> None:
    """c = the sum of p over its first axis, of S shares, in order."""
    m, n = c.index
    BM, BN = c.tile_shape
    acc = T.zeros((BM, BN), T.f32)
    for s in T.static_range(S):
        acc = acc + T.reshape(p.load((s, m, n), (1, BM, BN)), (BM, BN))
    c.store(acc.astype(c.dtype))
