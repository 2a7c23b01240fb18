"""The meaning of ops on values: constants, ids, elementwise functions, shapes, mma. No memory."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from peertile.dtypes import DType
from peertile.ir import ops
from peertile.ir.core import Op, Value
from peertile.ir.types import TileType
from peertile.meaning import numbers
from peertile.meaning.memory import SymmetricRef, ViewRef
from peertile.meaning.numbers import Array
from peertile.meaning.program import Program
from peertile.meaning.registry import evaluates

__all__: list[str] = []


def _type(value: Value) -> TileType:
    assert isinstance(value.type, TileType)
    return value.type


def _dtype(value: Value) -> DType:
    return _type(value).dtype


@evaluates(ops.Const)
def const(program: Program, op: Op) -> Any:
    return np.asarray(op.attrs["value"]).astype(_dtype(op.result).numpy)[()]


@evaluates(ops.ProgramId)
def program_id(program: Program, op: Op) -> Any:
    return np.int64(program.ids[op.attrs["axis"]])


@evaluates(ops.NumPrograms)
def num_programs(program: Program, op: Op) -> Any:
    return np.int64(program.grid[op.attrs["axis"]])


@evaluates(ops.Rank)
def rank(program: Program, op: Op, x: SymmetricRef) -> Any:
    return np.int64(x.rank)


@evaluates(ops.NumRanks)
def num_ranks(program: Program, op: Op, x: SymmetricRef) -> Any:
    return np.int64(len(x.views))


def extents_of(x: ViewRef | SymmetricRef) -> tuple[int, ...]:
    return x.extents if isinstance(x, ViewRef) else x.views[x.rank].extents


@evaluates(ops.Extent)
def extent(program: Program, op: Op, x: ViewRef | SymmetricRef) -> Any:
    return np.int64(extents_of(x)[op.attrs["axis"]])


@evaluates(ops.NumTiles)
def num_tiles(program: Program, op: Op, x: ViewRef | SymmetricRef) -> Any:
    return np.int64(-(-extents_of(x)[op.attrs["axis"]] // op.attrs["size"]))


@evaluates(ops.TileIndex)
def tile_index(program: Program, op: Op, view: ViewRef, linear: Any) -> Any:
    partition = view.type.partition
    assert partition is not None
    tiles = [-(-n // size) for n, size in zip(view.extents, partition.tile_shape, strict=True)]
    index = delinearize(int(linear), tiles, partition.swizzle)
    return tuple(np.int64(k) for k in index) if len(index) != 1 else np.int64(index[0])


def delinearize(linear: int, tiles: list[int], swizzle: int) -> list[int]:
    """Row-major; with a swizzle, the first two axes go by groups of `swizzle` rows of tiles, column by
    column inside a group (the last group may have fewer rows). Further axes stay innermost."""
    if swizzle == 1 or len(tiles) < 2:
        index = []
        for n in reversed(tiles):
            index.append(linear % max(n, 1))
            linear //= max(n, 1)
        return index[::-1]
    inner = prod(tiles[2:])
    outer, rest = divmod(linear, max(inner, 1))
    group, within = divmod(outer, max(swizzle * tiles[1], 1))
    rows = min(swizzle, tiles[0] - group * swizzle)
    return [group * swizzle + within % rows, within // rows, *delinearize(rest, tiles[2:], 1)]


@evaluates(ops.Iota)
def iota(program: Program, op: Op) -> Any:
    t = _type(op.result)
    return np.arange(t.shape[0], dtype=np.int64).astype(t.dtype.numpy)


@evaluates(ops.UnaryOp)
def unary(program: Program, op: Op, x: Array) -> Any:
    return numbers.unary(op.attrs["fn"], x, _dtype(op.result))


@evaluates(ops.BinaryOp)
def binary(program: Program, op: Op, a: Array, b: Array) -> Any:
    return numbers.binary(op.attrs["fn"], a, b, _dtype(op.result))


@evaluates(ops.CompareOp)
def compare(program: Program, op: Op, a: Array, b: Array) -> Any:
    return numbers.compare(op.attrs["fn"], a, b, _dtype(op.operands[0]))


@evaluates(ops.Select)
def select(program: Program, op: Op, condition: Array, a: Array, b: Array) -> Any:
    return np.where(condition, a, b)


@evaluates(ops.Fma)
def fma(program: Program, op: Op, a: Array, b: Array, c: Array) -> Any:
    return numbers.fma(a, b, c, _dtype(op.result))


@evaluates(ops.Cast)
def cast(program: Program, op: Op, x: Array) -> Any:
    src, dst = _dtype(op.operands[0]), _dtype(op.result)
    return numbers.cast(x, src, dst, op.attrs["rounding"], op.attrs["saturate"])


@evaluates(ops.Bitcast)
def bitcast(program: Program, op: Op, x: Array) -> Any:
    return np.asarray(x).view(_dtype(op.result).numpy)


# ---------------------------------------------------------------- shape


@evaluates(ops.Broadcast)
def broadcast(program: Program, op: Op, x: Array) -> Any:
    return np.broadcast_to(x, _type(op.result).shape)


@evaluates(ops.Reshape)
def reshape(program: Program, op: Op, x: Array) -> Any:
    return np.reshape(x, _type(op.result).shape)


@evaluates(ops.Permute)
def permute(program: Program, op: Op, x: Array) -> Any:
    return np.transpose(x, op.attrs["axes"])


@evaluates(ops.Reduce)
def reduce(program: Program, op: Op, x: Array) -> Any:
    return numbers.fold(op.attrs["fn"], x, op.attrs["axis"], _dtype(op.result))


@evaluates(ops.Mma)
def mma(program: Program, op: Op, a: Array, b: Array, acc: Array) -> Any:
    """Accumulates in f64 (in i64 for integers, so that i32 wraps) and rounds once; a target may differ by
    K · eps of the accumulator · sum of |a·b|."""
    wide = np.float64 if _dtype(op.result).is_float else np.int64
    return (a.astype(wide) @ b.astype(wide) + acc.astype(wide)).astype(acc.dtype)
