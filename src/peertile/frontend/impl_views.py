"""Views of views: slice, permute, reshape, partition with steps, tiles at an element, gather. Each checks that it stays
inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import peertile.language as T
from peertile.frontend.convert import constant, index_scalar, int_arg, int_tuple_arg
from peertile.frontend.impl_memory import index_args, load_tile, padding_arg, shape_for, store_tile, tile_to_store
from peertile.frontend.impl_memory import writable as require_writable
from peertile.frontend.impl_tiles import known_tuple
from peertile.frontend.registry import implements
from peertile.frontend.scope import Build
from peertile.frontend.values import NONE, Abstract, GatherView, Known, Tile, TileView, Tup, View, describe
from peertile.ir import ops
from peertile.ir.core import Value
from peertile.ir.ops import Binary, CheckKind, Compare
from peertile.ir.types import BOOL, INDEX, MAX_TENSOR_RANK, TileType, ViewType

__all__ = ["slice_view"]


def _view(self: Abstract) -> View:
    assert isinstance(self, View)
    return self


def _derived(t: ViewType, rank: int, unit_stride: tuple[bool, ...] = ()) -> ViewType:
    """The type of a view of the same memory, with the promises that are left."""
    return ViewType(t.dtype, rank, t.access, t.space, None, unit_stride)


def extent_of(b: Build, view: Value, axis: int) -> Value:
    """An extent of a view; of a slice, the one that it was made with."""
    if isinstance(view.op, ops.ViewSlice):
        rank = len(view.op.operands) // 3
        return view.op.operands[1 + rank + axis]
    return b.builder.value(ops.Extent, (view,), INDEX, axis=axis)


def _binary(b: Build, fn: Binary, x: Value, y: Value) -> Value:
    known = tuple(v.op.attrs["value"] if isinstance(v.op, ops.Const) else None for v in (x, y))
    if (fn is Binary.MUL and known[1] == 1) or (fn is Binary.ADD and known[1] == 0):
        return x
    if (fn is Binary.MUL and known[0] == 1) or (fn is Binary.ADD and known[0] == 0):
        return y
    return b.builder.value(ops.BinaryOp, (x, y), INDEX, fn=fn)


def _check(b: Build, condition: Value, message: str, got: Value, limit: Value) -> None:
    b.builder.emit(ops.Check, (condition, got, limit), kind=CheckKind.BOUNDS, message=message)


def _compare(b: Build, fn: Compare, x: Value, y: Value) -> Value:
    return b.builder.value(ops.CompareOp, (x, y), BOOL, fn=fn)


def _numbers(b: Build, value: Abstract, rank: int, role: str, least: int) -> list[Value]:
    """One i64 per axis; constants below `least` are refused."""
    items = value.items if isinstance(value, Tup) else (value,)
    if len(items) != rank:
        b.fail(f"{role}: expected one per axis ({rank} of them), got {len(items)}")
    for k, item in enumerate(items):
        if isinstance(item, Known) and isinstance(item.value, int) and item.value < least:
            b.fail(f"{role} {k}: expected {least} or more, got {item.value}")
    return [index_scalar(b, item, f"{role} {k}") for k, item in enumerate(items)]


def slice_view(b: Build, view: View, starts: Sequence[Value], extents: Sequence[Value], steps: Sequence[Value]) -> View:
    """The slice, unchecked."""
    t = view.type
    kept = tuple(
        u and isinstance(s.op, ops.Const) and s.op.attrs["value"] == 1
        for u, s in zip(t.unit_stride, steps, strict=True)
    )
    value = b.builder.value(ops.ViewSlice, (view.value, *starts, *extents, *steps), _derived(t, t.rank, kept))
    return replace(view, value=value)


@implements(T.Shared.slice)
def _slice(b: Build, self: Abstract, start: Abstract, extent: Abstract, step: Abstract) -> Abstract:
    view = _view(self)
    role, rank = f"slice of `{view.name}`", view.type.rank
    starts = _numbers(b, start, rank, f"{role}: start", 0)
    extents = _numbers(b, extent, rank, f"{role}: extent", 0)
    ones = Tup(tuple(Known(1) for _ in range(rank)))
    steps = _numbers(b, ones if step == NONE else step, rank, f"{role}: step", 1)
    zero, one = constant(b, 0, T.i64), constant(b, 1, T.i64)
    for k, (a, n, s) in enumerate(zip(starts, extents, steps, strict=True)):
        # start >= 0, step >= 1, extent >= 0, and start + (extent - 1) · step < the extent of the view; an empty
        # slice may lie anywhere. All are small enough not to wrap, which is checked first.
        whole = extent_of(b, view.value, k)
        bound = constant(b, 1 << 31, T.i64)
        sound = _compare(b, Compare.GE, a, zero)
        for condition in (
            _compare(b, Compare.GE, n, zero),
            _compare(b, Compare.GE, s, one),
            _compare(b, Compare.LT, s, bound),
            _compare(b, Compare.LE, n, whole),
            _compare(b, Compare.LE, a, whole),
        ):
            sound = b.builder.value(ops.BinaryOp, (sound, condition), BOOL, fn=Binary.AND)
        trips = b.builder.value(ops.BinaryOp, (n, one), INDEX, fn=Binary.SUB)
        last = _binary(b, Binary.ADD, a, _binary(b, Binary.MUL, trips, s))
        inside = _compare(b, Compare.LT, last, whole)
        empty = _compare(b, Compare.EQ, n, zero)
        inside = b.builder.value(ops.BinaryOp, (inside, empty), BOOL, fn=Binary.OR)
        sound = b.builder.value(ops.BinaryOp, (sound, inside), BOOL, fn=Binary.AND)
        wrong = f"{role} reaches outside of axis {k}, or has a start or extent below 0 or a step below 1; last element"
        _check(b, sound, wrong, last, whole)
    return slice_view(b, view, starts, extents, steps)


@implements(T.Shared.permute)
def _permute(b: Build, self: Abstract, axes: Abstract) -> Abstract:
    view = _view(self)
    t = view.type
    order = int_tuple_arg(b, axes, f"permute `{view.name}`: axes")
    if sorted(order) != list(range(t.rank)):
        b.fail(f"permute `{view.name}`: axes: expected each of 0 to {t.rank - 1} once, got {order}")
    unit = tuple(t.unit_stride[k] for k in order)
    return replace(view, value=b.builder.value(ops.ViewPermute, (view.value,), _derived(t, t.rank, unit), axes=order))


@implements(T.Shared.reshape)
def _reshape(b: Build, self: Abstract, shape: Abstract) -> Abstract:
    view = _view(self)
    t, role = view.type, f"reshape `{view.name}`"
    items = shape.items if isinstance(shape, Tup) else (shape,)
    if not 1 <= len(items) <= MAX_TENSOR_RANK:
        b.fail(f"{role}: expected 1 to {MAX_TENSOR_RANK} extents, got {len(items)}")
    extents = _numbers(b, Tup(tuple(items)), len(items), f"{role}: extent", 0)
    one = constant(b, 1, T.i64)
    # No gaps: each stride is the product of the extents behind it, unless there is nothing along its axis.
    step = one
    for axis in reversed(range(t.rank)):
        extent = extent_of(b, view.value, axis)
        if not (axis == t.rank - 1 and t.unit_stride[axis]):
            stride = b.builder.value(ops.ViewStride, (view.value,), INDEX, axis=axis)
            dense = _compare(b, Compare.EQ, stride, step)
            single = _compare(b, Compare.LE, extent, one)
            whole = b.builder.value(ops.BinaryOp, (dense, single), BOOL, fn=Binary.OR)
            message = f"{role}: expected elements without gaps, axis {axis} has a stride of its own"
            _check(b, whole, message, stride, step)
        step = _binary(b, Binary.MUL, step, extent)
    zero = constant(b, 0, T.i64)
    count, sound = one, []
    for extent in extents:
        # Extents of a caller may be anything: a product that wraps could meet the number of elements by chance.
        before, count = count, _binary(b, Binary.MUL, count, extent)
        sound.append(_compare(b, Compare.GE, extent, zero))
        if count is not extent:
            high = b.builder.value(ops.BinaryOp, (before, extent), INDEX, fn=Binary.MULHI)
            sound += [_compare(b, Compare.EQ, high, zero), _compare(b, Compare.GE, count, zero)]
    equal = _compare(b, Compare.EQ, count, step)
    for condition in sound:
        equal = b.builder.value(ops.BinaryOp, (equal, condition), BOOL, fn=Binary.AND)
    _check(b, equal, f"{role}: expected extents of 0 or more, for as many elements as it has; elements", count, step)
    unit = (*(False for _ in extents[1:]), True)
    value = b.builder.value(ops.ViewReshape, (view.value, *extents), _derived(t, len(extents), unit))
    return replace(view, value=value)


# ---------------------------------------------------------------- partitions


@implements(T.Shared.partition)
def _partition(b: Build, self: Abstract, shape: Abstract, step: Abstract) -> Abstract:
    view = _view(self)
    role = f"partition of `{view.name}`"
    extents = shape_for(b, shape, view.type.rank, role)
    steps = extents if step == NONE else int_tuple_arg(b, step, f"{role}: step")
    if len(steps) != len(extents):
        b.fail(f"{role}: step: expected one per axis ({len(extents)} of them), got {len(steps)}")
    for k, n in enumerate(steps):
        if n < 1:
            b.fail(f"{role}: step {k}: expected 1 or more, got {n}")
    return TileView(view, extents, steps)


def _tile_view(self: Abstract) -> TileView:
    assert isinstance(self, TileView)
    return self


@implements(T.TileView.tile_shape)
def _tile_view_shape(b: Build, self: Abstract) -> Abstract:
    return known_tuple(_tile_view(self).shape)


@implements(T.TileView.num_tiles)
def _tile_view_num_tiles(b: Build, self: Abstract) -> Abstract:
    tiles = _tile_view(self)
    value = tiles.view.value
    return Tup(
        tuple(Tile(b.builder.value(ops.NumTiles, (value,), INDEX, axis=k, size=n)) for k, n in enumerate(tiles.step))
    )


def _own_tile(b: Build, tiles: TileView, index: Abstract, role: str, what: str = "tile index") -> tuple[View, Abstract]:
    """The view whose tile is meant, and the tile's index in it."""
    if tiles.step == tiles.shape:
        return tiles.view, index
    # A tile that begins anywhere is tile 0 of what begins there; its start is checked against the steps.
    view = tiles.view
    starts, extents = [], []
    zero, one = constant(b, 0, T.i64), constant(b, 1, T.i64)
    indices = index_args(b, index, len(tiles.shape), role, f"a {what}" if what == "tile index" else f"an {what}")
    for k, (i, step) in enumerate(zip(indices, tiles.step, strict=True)):
        count = b.builder.value(ops.NumTiles, (view.value,), INDEX, axis=k, size=step)
        most = b.builder.value(ops.BinaryOp, (count, one), INDEX, fn=Binary.MAX)
        low, high = _compare(b, Compare.GE, i, zero), _compare(b, Compare.LT, i, most)
        inside = b.builder.value(ops.BinaryOp, (low, high), BOOL, fn=Binary.AND)
        _check(b, inside, f"{role}: {what} of axis {k} is out of bounds", i, most)
        start = _binary(b, Binary.MUL, i, constant(b, step, T.i64))
        starts.append(start)
        extents.append(b.builder.value(ops.BinaryOp, (extent_of(b, view.value, k), start), INDEX, fn=Binary.SUB))
    part = slice_view(b, view, starts, extents, [one] * len(starts))
    return part, Tup(tuple(Known(0) for _ in starts))


@implements(T.TileView.load)
def _tile_view_load(b: Build, self: Abstract, index: Abstract, padding: Abstract) -> Abstract:
    tiles = _tile_view(self)
    view, at = _own_tile(b, tiles, index, f"load from a partition of `{tiles.view.name}`")
    return load_tile(b, view, at, known_tuple(tiles.shape), padding)


@implements(T.TileView.store)
def _tile_view_store(b: Build, self: Abstract, index: Abstract, tile: Abstract) -> Abstract:
    tiles = _tile_view(self)
    role = f"store to a partition of `{tiles.view.name}`"
    for k, (n, step) in enumerate(zip(tiles.shape, tiles.step, strict=True)):
        if step < n:
            b.fail(f"{role}: expected tiles that do not overlap, got a step of {step} for an extent of {n} on axis {k}")
    value = tile_to_store(b, tile, tiles.view.type, tiles.shape, tiles.view.name)
    view, at = _own_tile(b, tiles, index, role)
    return store_tile(b, view, at, Tile(value))


def _at_element(b: Build, view: View, offset: Abstract, shape: tuple[int, ...], role: str) -> tuple[View, Abstract]:
    """The view and index of a tile that begins at an element: a tile of a partition with steps of one."""
    return _own_tile(b, TileView(view, shape, (1,) * len(shape)), offset, role, "element offset")


@implements(T.Shared.load_at)
def _load_at(b: Build, self: Abstract, offset: Abstract, shape: Abstract, padding: Abstract) -> Abstract:
    view = _view(self)
    role = f"load_at from `{view.name}`"
    extents = shape_for(b, shape, view.type.rank, role)
    part, at = _at_element(b, view, offset, extents, role)
    return load_tile(b, part, at, known_tuple(extents), padding)


@implements(T.View.store_at)
def _store_at(b: Build, self: Abstract, offset: Abstract, tile: Abstract) -> Abstract:
    view = _view(self)
    role = f"store_at to `{view.name}`"
    require_writable(b, view, "store to")
    value = tile_to_store(b, tile, view.type, None, view.name)
    assert isinstance(value.type, TileType)
    part, at = _at_element(b, view, offset, value.type.shape, role)
    return store_tile(b, part, at, Tile(value))


# ---------------------------------------------------------------- gather and scatter


@implements(T.Shared.gather)
def _gather(b: Build, self: Abstract, indices: Abstract, axis: Abstract) -> Abstract:
    view = _view(self)
    role = f"gather of `{view.name}`"
    if not isinstance(indices, Tile) or indices.type.rank != 1 or not indices.type.dtype.is_int:
        b.fail(f"{role}: indices: expected a tile of integers of one axis, got {describe(indices)}")
    k = int_arg(b, axis, f"{role}: axis")
    if not 0 <= k < view.type.rank:
        b.fail(f"{role}: axis: expected 0 to {view.type.rank - 1}, got {k}")
    return GatherView(view, indices.value, k)


def _gather_index(b: Build, g: GatherView, index: Abstract, shape: tuple[int, ...], role: str) -> list[Value]:
    """Tile indices beside the axis of the gather."""
    t = g.indices.type
    assert isinstance(t, TileType)
    if shape[g.axis] != t.numel:
        b.fail(f"{role}: extent {g.axis}: expected {t.numel}, the number of indices, got {shape[g.axis]}")
    items = index.items if isinstance(index, Tup) else (index,)
    if len(items) == len(shape) and items[g.axis] != Known(0):
        b.fail(f"{role}: index {g.axis}: expected 0, as the indices choose along this axis, got another")
    values = index_args(b, index, len(shape), role)
    del values[g.axis]
    return values


@implements(T.GatherView.load)
def _gather_load(b: Build, self: Abstract, index: Abstract, shape: Abstract, padding: Abstract) -> Abstract:
    assert isinstance(self, GatherView)
    view = self.view
    role = f"load from a gather of `{view.name}`"
    extents = shape_for(b, shape, view.type.rank, role)
    others = _gather_index(b, self, index, extents, role)
    fill = padding_arg(b, padding, view.type.dtype, role)
    t = TileType(view.type.dtype, extents)
    return Tile(b.builder.value(ops.Gather, (view.value, self.indices, *others), t, axis=self.axis, padding=fill))


@implements(T.GatherView.store)
def _gather_store(b: Build, self: Abstract, index: Abstract, tile: Abstract) -> Abstract:
    assert isinstance(self, GatherView)
    view = self.view
    require_writable(b, view, "scatter to")
    value = tile_to_store(b, tile, view.type, None, view.name)
    assert isinstance(value.type, TileType)
    others = _gather_index(b, self, index, value.type.shape, f"scatter to `{view.name}`")
    b.builder.emit(ops.Scatter, (view.value, value, self.indices, *others), axis=self.axis)
    return NONE
