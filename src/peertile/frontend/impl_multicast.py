"""Words of `T.Multicast`: load-reduce, reduce, store, bulk store, signals. What no fabric could do is refused here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import peertile.language as T
from peertile.frontend.convert import constant, flag_arg, index_scalar, to_dtype
from peertile.frontend.groups import check_range, num_ranks_of, rank_of
from peertile.frontend.impl_memory import index_args, num_tiles, shape_for
from peertile.frontend.impl_tiles import enum_arg, tuple_text
from peertile.frontend.orders import order_arg, scope_of_access
from peertile.frontend.registry import implements
from peertile.frontend.scope import Build
from peertile.frontend.values import (
    NONE,
    Abstract,
    Known,
    Multicast,
    MulticastPointer,
    MulticastTiles,
    Tile,
    Token,
    Tup,
    describe,
)
from peertile.ir import ops
from peertile.ir.core import Value
from peertile.ir.ops import (
    BULK_ALIGN,
    BULK_REDUCTIONS,
    LOAD_REDUCTIONS,
    MULTICAST_DTYPES,
    REDUCTIONS,
    Binary,
    Bounds,
    CheckKind,
    Compare,
)
from peertile.ir.types import BOOL, INDEX, Space, TileType, TokenType
from peertile.memory_model import Order, Rmw

__all__: list[str] = []


def _multicast(self: Abstract) -> Multicast:
    assert isinstance(self, Multicast)
    return self


def _tiles(self: Abstract) -> MulticastTiles:
    assert isinstance(self, MulticastTiles)
    return self


# ---------------------------------------------------------------- facts of the tensor


@implements(T.Multicast.rank)
def _rank(b: Build, self: Abstract) -> Abstract:
    return Tile(rank_of(b, _multicast(self).value))


@implements(T.Multicast.num_ranks)
def _num_ranks(b: Build, self: Abstract) -> Abstract:
    return Tile(num_ranks_of(b, _multicast(self).value))


@implements(T.Multicast.shape)
def _shape(b: Build, self: Abstract) -> Abstract:
    x = _multicast(self)
    if x.extent is not None:
        return Tup((Tile(x.extent),))
    return Tup(tuple(Tile(b.builder.value(ops.Extent, (x.value,), INDEX, axis=k)) for k in range(x.type.rank)))


@implements(T.Multicast.dtype)
def _dtype(b: Build, self: Abstract) -> Abstract:
    return Known(_multicast(self).type.dtype)


@implements(T.Multicast.ndim)
def _ndim(b: Build, self: Abstract) -> Abstract:
    return Known(_multicast(self).type.rank)


@implements(T.Multicast.num_tiles)
def _num_tiles(b: Build, self: Abstract, shape: Abstract) -> Abstract:
    x = _multicast(self)
    extents = shape_for(b, shape, x.type.rank, f"`{x.name}.num_tiles`")
    if x.extent is not None:
        return Tup((Tile(_divided(b, x.extent, extents[0])),))
    return Tup(tuple(map(Tile, num_tiles(b, x.value, extents))))


@implements(T.Multicast.partition)
def _partition(b: Build, self: Abstract, shape: Abstract, in_bounds: Abstract) -> Abstract:
    x = _multicast(self)
    role = f"partition of the multicast `{x.name}`"
    t = x.type
    if t.dtype.name not in MULTICAST_DTYPES:
        b.fail(f"{role}: dtype: expected one of {', '.join(MULTICAST_DTYPES)}, got {t.dtype.name}")
    extents = shape_for(b, shape, t.rank, role)
    promises = tuple(flag_arg(b, p, f"{role}: in_bounds") for p in _per_axis(b, in_bounds, t.rank, role))
    nbytes = TileType(t.dtype, extents).numel * t.dtype.itemsize
    if nbytes % 4:
        b.fail(
            f"{role}: expected tiles of a multiple of 4 bytes, got {tuple_text(extents)} of {t.dtype.name}: {nbytes}"
        )
    if t.dtype.bits == 16:
        units = [k for k, unit in enumerate(t.unit_stride) if unit]
        if len(units) != 1:
            b.fail(
                f"{role}: {t.dtype.name} needs exactly one axis of stride 1, along which pairs lie, got {len(units)}"
            )
        if extents[units[0]] % 2:
            b.fail(
                f"{role}: {t.dtype.name} needs an even extent along axis {units[0]}, where pairs lie, "
                f"got {tuple_text(extents)}"
            )
    if x.offset is None or x.extent is None:
        return MulticastTiles(x, extents, promises)
    # Tiles of the view are tiles of the whole object: none is cut, so where they begin and end is checked.
    (size,) = extents
    for what, value in (("begins", x.offset), ("ends", x.extent)):
        rest = b.builder.value(ops.BinaryOp, (value, constant(b, size, T.i64)), INDEX, fn=Binary.REM)
        whole = b.builder.value(ops.CompareOp, (rest, constant(b, 0, T.i64)), BOOL, fn=Compare.EQ)
        message = f"{role}: the view {what} inside a tile of {size}, and a part of a tile is not clipped"
        b.builder.emit(ops.Check, (whole, value, constant(b, size, T.i64)), kind=CheckKind.BOUNDS, message=message)
    return MulticastTiles(x, extents, promises, _divided(b, x.offset, size), _divided(b, x.extent, size))


def _divided(b: Build, value: Value, size: int) -> Value:
    return b.builder.value(ops.BinaryOp, (value, constant(b, size, T.i64)), INDEX, fn=Binary.QUOT)


def _per_axis(b: Build, value: Abstract, rank: int, role: str) -> tuple[Abstract, ...]:
    if not isinstance(value, Tup):
        return (value,) * rank
    if len(value.items) != rank:
        b.fail(f"{role}: in_bounds: expected a bool, or one per axis ({rank} of them), got {len(value.items)}")
    return value.items


# ---------------------------------------------------------------- tiles


def _reduction(b: Build, value: Abstract, dtype: T.DType, table: dict[Rmw, frozenset[str]], role: str) -> Rmw:
    """A reduction that the element type has; an addition of floats is ADDF."""
    rmw = enum_arg(b, value, Rmw, f"{role}: reduction", "a T.Rmw, such as T.add")
    assert isinstance(rmw, Rmw)
    if dtype.is_float and rmw is Rmw.ADD:
        rmw = Rmw.ADDF
    allowed = table.get(rmw, frozenset())
    if dtype.name not in allowed:
        names = ", ".join(n for n in MULTICAST_DTYPES if n in allowed)
        takes = f"takes {names}" if names else "is none of this operation"
        b.fail(f"{role}: reduction: {rmw.value} {takes}, got {dtype.name}{_way(rmw, dtype, table)}")
    return rmw


def _way(rmw: Rmw, dtype: T.DType, table: dict[Rmw, frozenset[str]]) -> str:
    """What to do instead, where there is something."""
    other = {Rmw.MIN: Rmw.UMIN, Rmw.MAX: Rmw.UMAX}.get(rmw)
    if other is not None and dtype.name == "u64" and "u64" in table.get(other, ()):
        return f"; {rmw.value} compares as signed, use T.Rmw.{other.name}"
    return ""


def _place(b: Build, tiles: MulticastTiles, index: Abstract, role: str) -> tuple[list[Value], Bounds]:
    """Tile indices; where the caller promises that they are inside, nothing is left to find out."""
    rank = tiles.tensor.type.rank
    values = index_args(b, index, rank, role)
    if tiles.base is not None and tiles.count is not None:
        if not tiles.in_bounds[0]:
            count = tiles.count
            check_range(b, values[0], lambda: count, f"{role}: tile index out of range", constants=False)
        values = [b.builder.value(ops.BinaryOp, (values[0], tiles.base), INDEX, fn=Binary.ADD)]
    if all(tiles.in_bounds):
        return values, Bounds.PROVEN
    return values, Bounds.UNKNOWN


def _tile_of(b: Build, tiles: MulticastTiles, tile: Abstract, role: str) -> Value:
    t = tiles.tensor.type
    value = to_dtype(b, tile, t.dtype, f"{role}: tile") if isinstance(tile, Known) else None
    if value is None:
        if not isinstance(tile, Tile):
            b.fail(f"{role}: tile: expected a tile, got {describe(tile)}")
        value = tile.value
    want = TileType(t.dtype, tiles.shape)
    got = value.type
    assert isinstance(got, TileType)
    if got.dtype != t.dtype:
        b.fail(f"{role}: tile: expected {want}, got {got}; convert it with .astype({tiles.tensor.name}.dtype)")
    if got.is_scalar:
        return b.builder.value(ops.Broadcast, (value,), want)
    if got != want:
        b.fail(f"{role}: tile: expected {want}, got {got}")
    return value


@implements(T.MulticastTiles.multimem_load_reduce)
def _load_reduce(
    b: Build, self: Abstract, index: Abstract, reduction: Abstract, order: Abstract, scope: Abstract
) -> Abstract:
    tiles = _tiles(self)
    x = tiles.tensor
    role = f"multimem_load_reduce of `{x.name}`"
    rmw = _reduction(b, reduction, x.type.dtype, LOAD_REDUCTIONS, role)
    o = order_arg(b, order, role, (Order.WEAK, Order.RELAXED, Order.ACQUIRE))
    s = scope_of_access(b, scope, Space.PEER, o, role)
    indices, bounds = _place(b, tiles, index, role)
    t = TileType(x.type.dtype, tiles.shape)
    return Tile(b.builder.value(ops.MulticastLoad, (x.value, *indices), t, rmw=rmw, order=o, scope=s, bounds=bounds))


@implements(T.MulticastTiles.multimem_reduce)
def _reduce(
    b: Build, self: Abstract, index: Abstract, reduction: Abstract, tile: Abstract, order: Abstract, scope: Abstract
) -> Abstract:
    tiles = _tiles(self)
    x = tiles.tensor
    role = f"multimem_reduce of `{x.name}`"
    rmw = _reduction(b, reduction, x.type.dtype, REDUCTIONS, role)
    value = _tile_of(b, tiles, tile, role)
    o = order_arg(b, order, role, (Order.RELAXED, Order.RELEASE))
    s = scope_of_access(b, scope, Space.PEER, o, role)
    indices, bounds = _place(b, tiles, index, role)
    b.builder.emit(ops.MulticastReduce, (x.value, value, *indices), rmw=rmw, order=o, scope=s, bounds=bounds)
    return NONE


@implements(T.MulticastTiles.multimem_store)
def _store(b: Build, self: Abstract, index: Abstract, tile: Abstract, order: Abstract, scope: Abstract) -> Abstract:
    tiles = _tiles(self)
    x = tiles.tensor
    role = f"multimem_store to `{x.name}`"
    value = _tile_of(b, tiles, tile, role)
    o = order_arg(b, order, role, (Order.WEAK, Order.RELAXED, Order.RELEASE))
    s = scope_of_access(b, scope, Space.PEER, o, role)
    indices, bounds = _place(b, tiles, index, role)
    b.builder.emit(ops.MulticastStore, (x.value, value, *indices), order=o, scope=s, bounds=bounds)
    return NONE


@implements(T.MulticastTiles.multimem_bulk_store)
def _bulk_store(b: Build, self: Abstract, index: Abstract, tile: Abstract, reduction: Abstract) -> Abstract:
    tiles = _tiles(self)
    x = tiles.tensor
    role = f"multimem_bulk_store to `{x.name}`"
    rmw = None if reduction == NONE else _reduction(b, reduction, x.type.dtype, BULK_REDUCTIONS, role)
    nbytes = TileType(x.type.dtype, tiles.shape).numel * x.type.dtype.itemsize
    if nbytes % BULK_ALIGN or nbytes >= 1 << 32:
        b.fail(f"{role}: expected tiles of a multiple of {BULK_ALIGN} bytes below 2^32, got {nbytes} bytes")
    if not x.type.unit_stride or not x.type.unit_stride[-1] or any(n != 1 for n in tiles.shape[:-1]):
        b.fail(
            f"{role}: expected tiles of one contiguous range, an extent along the last axis (of stride 1) alone, "
            f"got {tuple_text(tiles.shape)}"
        )
    if x.type.align < BULK_ALIGN:
        b.fail(f"{role}: expected memory aligned to {BULK_ALIGN} bytes, got {x.type.align or 'no promise of it'}")
    value = _tile_of(b, tiles, tile, role)
    indices, bounds = _place(b, tiles, index, role)
    b.builder.emit(ops.MulticastBulk, (x.value, value, *indices), rmw=rmw, bounds=bounds)
    return NONE


# ---------------------------------------------------------------- words


@implements(T.Multicast.multimem_signal)
def _signal(b: Build, self: Abstract, value: Abstract, index: Abstract) -> Abstract:
    return _emit_signal(b, _multicast(self), value, index, add=False)


@implements(T.Multicast.multimem_signal_add)
def _signal_add(b: Build, self: Abstract, value: Abstract, index: Abstract) -> Abstract:
    return _emit_signal(b, _multicast(self), value, index, add=True)


def _emit_signal(b: Build, x: Multicast, value: Abstract, index: Abstract, *, add: bool) -> Abstract:
    role = f"multimem_signal{'_add' if add else ''} on `{x.name}`"
    t = x.type
    words = [n for n in MULTICAST_DTYPES if n[0] in "iu"]
    if t.dtype.name not in words:
        b.fail(f"{role}: expected words of {', '.join(words)}, got {t.dtype.name}")
    number = to_dtype(b, value, t.dtype, f"{role}: value")
    if number.type != TileType(t.dtype):
        b.fail(f"{role}: value: expected a scalar {t.dtype.name}, got {number.type}")
    if index == NONE:
        index = Tup(tuple(Known(0) for _ in range(t.rank)))
    indices = index_args(b, index, t.rank, role, "an element index")
    for k, v in enumerate(indices):

        def extent(axis: int = k) -> Value:
            return b.builder.value(ops.Extent, (x.value,), INDEX, axis=axis)

        text = f"{role}: element index {k} out of range"
        check_range(b, v, extent if x.extent is None else _known(x.extent), text, constants=False)
    if x.offset is not None:
        indices = [b.builder.value(ops.BinaryOp, (indices[0], x.offset), INDEX, fn=Binary.ADD)]
    b.builder.emit(ops.MulticastSignal, (x.value, number, *indices), add=add)
    return NONE


def _known(value: Value) -> Callable[[], Value]:
    return lambda: value


# ---------------------------------------------------------------- addresses, and the fence between two of them


@implements(T.unsafe.multicast)
def _classify(b: Build, pointer: Abstract) -> Abstract:
    if not isinstance(pointer, MulticastPointer):
        b.fail(
            f"T.unsafe.multicast: pointer: expected a multicast mapping, as MulticastTensor.pointer() gives, got "
            f"{describe(pointer)}; saying so makes none of it"
        )
    return replace(pointer, classified=True)


@implements(T.unsafe.multicast_view)
def _view(b: Build, pointer: Abstract, extent: Abstract) -> Abstract:
    role = "T.unsafe.multicast_view"
    if not isinstance(pointer, MulticastPointer) or not pointer.classified:
        b.fail(f"{role}: pointer: expected T.unsafe.multicast(pointer), got {describe(pointer)}")
    count = index_scalar(b, extent, f"{role}: extent")
    offset = constant(b, 0, T.i64) if pointer.offset is None else pointer.offset
    return Multicast(pointer.name, pointer.value, offset, count)


@implements(T.unsafe.fence_alias)
def _fence_alias(b: Build, token: Abstract) -> Abstract:
    if token == NONE:
        b.builder.emit(ops.FenceAlias)
        return NONE
    if not isinstance(token, Token):
        b.fail(
            "T.unsafe.fence_alias: token: expected a token, from T.unsafe.token() or an operation, "
            f"got {describe(token)}"
        )
    return Token(b.builder.value(ops.FenceAlias, (token.value,), TokenType()))
