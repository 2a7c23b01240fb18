"""The meaning of views of views, of gathers and scatters, and of tiles accessed with an order.

A derived view is a view of the same storage: numpy shares it, so every access through it is one of the memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from peertile.errors import InternalError
from peertile.ir import ops
from peertile.ir.core import Op
from peertile.ir.types import TileType, ViewType
from peertile.meaning.accesses import PADDING, check_inside, element_of, origin_of
from peertile.meaning.memory import SymmetricRef, ViewRef
from peertile.meaning.numbers import Array, satisfies
from peertile.meaning.program import Event, EventKind, Program, Steps
from peertile.meaning.registry import evaluates

__all__: list[str] = []


# ---------------------------------------------------------------- views of views


@evaluates(ops.ViewStride)
def view_stride(program: Program, op: Op, view: ViewRef | SymmetricRef) -> Any:
    ref = view if isinstance(view, ViewRef) else view.views[view.rank]
    return np.int64(ref.array.strides[op.attrs["axis"]] // max(ref.array.itemsize, 1))


def _derived(op: Op, view: ViewRef, array: Array) -> ViewRef:
    t = op.result.type
    assert isinstance(t, ViewType)
    if array.size and not np.shares_memory(array, view.array):
        raise InternalError(f"{op.NAME}: the view has gaps, though it was checked to have none")
    return replace(view, type=t, array=array)


@evaluates(ops.ViewSlice)
def view_slice(program: Program, op: Op, view: ViewRef, *numbers: Any) -> ViewRef:
    rank = view.array.ndim
    starts, extents, steps = ([int(n) for n in numbers[k * rank : (k + 1) * rank]] for k in range(3))
    box = tuple(slice(a, a + n * s, s) for a, n, s in zip(starts, extents, steps, strict=True))
    found = view.array[box]
    if found.shape != tuple(extents):
        raise InternalError(f"{op.NAME}: {list(extents)} elements from {starts} by {steps} are not in {view.extents}")
    return _derived(op, view, found)


@evaluates(ops.ViewPermute)
def view_permute(program: Program, op: Op, view: ViewRef) -> ViewRef:
    return _derived(op, view, view.array.transpose(op.attrs["axes"]))


@evaluates(ops.ViewReshape)
def view_reshape(program: Program, op: Op, view: ViewRef, *extents: Any) -> ViewRef:
    return _derived(op, view, view.array.reshape([int(n) for n in extents]))


# ---------------------------------------------------------------- gather and scatter


def _around(op: Op, view: ViewRef, indices: tuple[Any, ...], shape: tuple[int, ...]) -> list[int]:
    """The first element along each axis; 0 along the axis whose slices are chosen."""
    axis, rest, found = op.attrs["axis"], iter(indices), []
    for k, (n, size) in enumerate(zip(view.extents, shape, strict=True)):
        index = 0 if k == axis else int(next(rest))
        if k != axis:
            check_inside(op, f"tile index of axis {k}", index, max(-(-n // size), 1))
        found.append(index * size)
    return found


@evaluates(ops.Gather)
def gather(program: Program, op: Op, view: ViewRef, chosen: Array, *indices: Any) -> Array:
    t, axis = op.result.type, op.attrs["axis"]
    assert isinstance(t, TileType)
    origin = _around(op, view, indices, t.shape)
    padding = np.asarray(PADDING[op.attrs["padding"]]).astype(t.dtype.numpy)[()]
    tile = np.full(t.shape, padding, t.dtype.numpy)
    thin = (*t.shape[:axis], 1, *t.shape[axis + 1 :])
    for k, index in enumerate(int(n) for n in chosen):
        if 0 <= index < view.extents[axis]:
            at = [*origin[:axis], index, *origin[axis + 1 :]]
            part = program.memory.load_tile(program, op, view, at, thin, padding)
            tile[(slice(None),) * axis + (slice(k, k + 1),)] = part
    return tile


@evaluates(ops.Scatter)
def scatter(program: Program, op: Op, view: ViewRef, tile: Array, chosen: Array, *indices: Any) -> None:
    axis = op.attrs["axis"]
    origin = _around(op, view, indices, tile.shape)
    for k, index in enumerate(int(n) for n in chosen):
        if 0 <= index < view.extents[axis]:
            at = [*origin[:axis], index, *origin[axis + 1 :]]
            part = tile[(slice(None),) * axis + (slice(k, k + 1),)]
            program.memory.store_tile(program, op, view, at, part)


# ---------------------------------------------------------------- tiles with an order, and asynchronous ones


@evaluates(ops.TileLoad, steps=True)
def tile_load(program: Program, op: Op, view: ViewRef, *indices: Any) -> Steps:
    t = op.result.type
    assert isinstance(t, TileType)
    origin = origin_of(op, view, indices, t.shape)
    yield Event(EventKind.ACCESS, program, op)
    return program.memory.load_tile(program, op, view, origin, t.shape, t.dtype.numpy.type(0))


@evaluates(ops.TileStore, steps=True)
def tile_store(program: Program, op: Op, view: ViewRef, tile: Array, *indices: Any) -> Steps:
    origin = origin_of(op, view, indices, tile.shape)
    yield Event(EventKind.ACCESS, program, op)
    program.memory.store_tile(program, op, view, origin, tile)


@evaluates(ops.AsyncStore)
def async_store(program: Program, op: Op, view: ViewRef, tile: Array, *indices: Any) -> Any:
    # At once is one of the moments that the model allows; a memory with history looks at the op.
    program.memory.store_tile(program, op, view, origin_of(op, view, indices, tile.shape), tile)
    return op


@evaluates(ops.WaitTransfer, steps=True)
def wait_transfer(program: Program, op: Op, *transfers: Any) -> Steps:
    yield Event(EventKind.FENCE, program, op)
    program.memory.fence(program, op)


@evaluates(ops.WaitAny, steps=True)
def wait_any(program: Program, op: Op, *values: Any) -> Steps:
    assert isinstance(op, ops.WaitAny)
    words, at = [], 0
    while at < len(values):
        view, expected = values[at], values[at + 1]
        end = at + 2 + view.array.ndim
        words.append((view, element_of(op, view, values[at + 2 : end]), expected))
        at = end
    while True:
        first, *others = (Event(EventKind.WAIT, program, op, *word) for word in words)
        yield replace(first, others=tuple(others))
        for k, (view, index, expected) in enumerate(words):
            seen = program.memory.word_load(program, op, view, index)
            if satisfies(op.attrs["cmp"], seen, expected, view.type.dtype):
                return np.int64(k)
