"""The meaning of folds and scans by a function of the kernel's, of sorting, and of pieces of tiles. No memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from peertile.ir import ops
from peertile.ir.core import Op
from peertile.ir.types import TileType
from peertile.meaning.numbers import Array, widen
from peertile.meaning.program import Program, Steps
from peertile.meaning.registry import evaluates

__all__: list[str] = []


def _result(op: Op, values: Sequence[Any]) -> Any:
    """Values as `Program.run` takes them: one alone, or a tuple."""
    return values[0] if len(op.results) == 1 else tuple(values)


def _combined(program: Program, op: Op, first: Sequence[Array], second: Sequence[Array]) -> Steps:
    """The block applied to whole slices at once: it holds elementwise ops only."""
    end = yield from program.run(op.blocks[0], (*first, *second))
    return [np.broadcast_to(v, np.shape(x)) for v, x in zip(end.values, first, strict=True)]


@evaluates(ops.ReduceWith, steps=True)
def reduce_with(program: Program, op: Op, *tiles: Array) -> Steps:
    """From the first element to the last."""
    slices = [np.moveaxis(x, op.attrs["axis"], 0) for x in tiles]
    total = [s[0] for s in slices]
    for k in range(1, len(slices[0])):
        total = yield from _combined(program, op, total, [s[k] for s in slices])
    return _result(op, total)


@evaluates(ops.ScanWith, steps=True)
def scan_with(program: Program, op: Op, *tiles: Array) -> Steps:
    axis, backwards = op.attrs["axis"], op.attrs["reverse"]
    slices = [np.moveaxis(x, axis, 0) for x in tiles]
    order = list(range(len(slices[0])))[:: -1 if backwards else 1]
    total = [s[order[0]] for s in slices]
    found = [[t] for t in total]
    for k in order[1:]:
        total = yield from _combined(program, op, total, [s[k] for s in slices])
        for row, value in zip(found, total, strict=True):
            row.append(value)
    return _result(op, [np.stack(rows[:: -1 if backwards else 1], axis) for rows in found])


@evaluates(ops.Sort)
def sort(program: Program, op: Op, key: Array, *others: Array) -> Any:
    axis, n = op.attrs["axis"], key.shape[op.attrs["axis"]]
    wide = widen(key)
    if op.attrs["descending"]:
        # Sorted from the far end and turned round: so equal keys, and NaN among them, keep their order.
        order = n - 1 - np.flip(np.argsort(np.flip(wide, axis), axis, kind="stable"), axis)
    else:
        order = np.argsort(wide, axis, kind="stable")
    return _result(op, [np.take_along_axis(x, order, axis) for x in (key, *others)])


@evaluates(ops.Take)
def take(program: Program, op: Op, x: Array, index: Array) -> Any:
    axis = op.attrs["axis"]
    # Wrapping to 64 bits first keeps the remainder, since extents are powers of two.
    return np.take_along_axis(x, index.astype(np.int64) % x.shape[axis], axis)


def _piece(x: Array, shape: tuple[int, ...], indices: Sequence[Any]) -> tuple[slice, ...]:
    starts = [int(k) % (n // m) * m for k, n, m in zip(indices, x.shape, shape, strict=True)]
    return tuple(slice(at, at + m) for at, m in zip(starts, shape, strict=True))


@evaluates(ops.Extract)
def extract(program: Program, op: Op, x: Array, *indices: Any) -> Any:
    t = op.result.type
    assert isinstance(t, TileType)
    return x[_piece(x, t.shape, indices)]


@evaluates(ops.Insert)
def insert(program: Program, op: Op, x: Array, piece: Array, *indices: Any) -> Any:
    whole = np.array(x)
    whole[_piece(x, piece.shape, indices)] = piece
    return whole
