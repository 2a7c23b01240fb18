"""Words on views of memory: tiles of exclusive, shared and peer parameters. Single words are in `impl_words.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import peertile.language as T
from peertile.frontend.convert import broadcast_to, constant, flag_arg, index_scalar, shape_arg
from peertile.frontend.groups import check_range, num_ranks_of, rank_of
from peertile.frontend.impl_tiles import enum_arg, known_tuple
from peertile.frontend.orders import order_arg, scope_of_atomic
from peertile.frontend.registry import implements
from peertile.frontend.scope import Build
from peertile.frontend.values import (
    NONE,
    Abstract,
    Exclusive,
    ExclusiveTile,
    Known,
    Peer,
    Tile,
    TilesIterator,
    Tup,
    View,
    describe,
)
from peertile.ir import ops
from peertile.ir.core import Value
from peertile.ir.ops import Padding
from peertile.ir.types import INDEX, SymmetricType, TileType, ViewType
from peertile.memory_model import Order, Rmw

__all__ = [
    "atomic_rmw", "index_args", "load_tile", "num_tiles", "padding_arg", "peer_view", "shape_for", "store_tile",
    "tile_to_store", "writable",
]  # fmt: skip

_PADDING: Final = "a T.Padding, such as T.Padding.NEG_INF"


def num_tiles(b: Build, view: Value, shape: Sequence[int]) -> tuple[Value, ...]:
    """Number of tiles of `shape` along each axis."""
    return tuple(b.builder.value(ops.NumTiles, (view,), INDEX, axis=k, size=n) for k, n in enumerate(shape))


def padding_arg(b: Build, value: Abstract, dtype: T.DType, role: str) -> Padding:
    """A padding that the dtype has."""
    padding = enum_arg(b, value, Padding, f"{role}: padding", _PADDING)
    assert isinstance(padding, Padding)
    if padding is not Padding.ZERO and not dtype.is_float:
        b.fail(
            f"{role}: padding: {padding.value} needs a float dtype, got {dtype.name}; load, then select with T.where"
        )
    if padding in (Padding.INF, Padding.NEG_INF) and dtype.name == "f8e4m3":
        b.fail(f"{role}: padding: f8e4m3 has no infinity, got {padding.value}; load, cast, then select with T.where")
    return padding


def index_args(b: Build, value: Abstract, rank: int, role: str, what: str = "a tile index") -> list[Value]:
    """One i64 per axis; an int alone is the index of a view of one axis."""
    items = value.items if isinstance(value, Tup) else (value,)
    if len(items) != rank:
        b.fail(f"{role}: index: expected {what} per axis ({rank} of them), got {len(items)}")
    return [index_scalar(b, item, f"{role}: index {k}") for k, item in enumerate(items)]


def _load(b: Build, view: Value, index: Sequence[Value], shape: tuple[int, ...], padding: Padding) -> Tile:
    t = view.type
    assert isinstance(t, ViewType)
    return Tile(b.builder.value(ops.Load, (view, *index), TileType(t.dtype, shape), padding=padding))


def tile_to_store(b: Build, value: Abstract, t: ViewType, shape: tuple[int, ...] | None, name: str) -> Value:
    """The tile of a store, of exactly the view's dtype and the given shape (None: the tile's own)."""
    role = f"store to `{name}`"
    if isinstance(value, Known) and isinstance(value.value, bool | int | float):
        if shape is None:
            b.fail(
                f"{role}: expected a tile, got {describe(value)}; write T.full(shape, {value.value!r}, {name}.dtype)"
            )
        return constant(b, value.value, t.dtype, shape)
    if not isinstance(value, Tile):
        b.fail(f"{role}: expected a tile, got {describe(value)}")
    if value.type.dtype != t.dtype and not value.weak:
        b.fail(f"{role}: expected dtype {t.dtype.name}, got {value.type}; convert it with .astype({name}.dtype)")
    if shape is None:
        if value.type.rank != t.rank:
            b.fail(f"{role}: expected a tile of {t.rank} axes, got {value.type}")
        return value.value
    if value.type.is_scalar:
        return broadcast_to(b, value.value, shape)
    if value.type.shape != shape:
        b.fail(
            f"{role}: expected a tile of shape {known_shape(shape)}, got {value.type}; "
            "T.reshape or T.broadcast it first"
        )
    return value.value


def known_shape(shape: tuple[int, ...]) -> str:
    """A shape in an error message."""
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


# ---------------------------------------------------------------- exclusive


def _own_index(b: Build, z: ExclusiveTile, what: str) -> tuple[Value, ...]:
    if isinstance(z, Exclusive) and z.partition.persistent:
        b.fail(
            f"`{z.name}.{what}`: expected a tile, got the whole persistent partition, of which a program has several "
            f"tiles; write `for tile in {z.name}.tiles():` and use `tile.{what}`"
        )
    return z.index


def _exclusive(self: Abstract) -> ExclusiveTile:
    assert isinstance(self, ExclusiveTile)
    return self


@implements(T.ExclusiveTile.index)
def _tile_index(b: Build, self: Abstract) -> Abstract:
    return Tup(tuple(map(Tile, _own_index(b, _exclusive(self), "index"))))


@implements(T.ExclusiveTile.tile_shape)
def _tile_tile_shape(b: Build, self: Abstract) -> Abstract:
    return known_tuple(_exclusive(self).partition.tile_shape)


def _extents(b: Build, view: Value) -> Tup:
    t = view.type
    assert isinstance(t, ViewType | SymmetricType)
    return Tup(tuple(Tile(b.builder.value(ops.Extent, (view,), INDEX, axis=k)) for k in range(t.rank)))


@implements(T.ExclusiveTile.shape)
def _exclusive_shape(b: Build, self: Abstract) -> Abstract:
    return _extents(b, _exclusive(self).view)


@implements(T.ExclusiveTile.dtype)
def _exclusive_dtype(b: Build, self: Abstract) -> Abstract:
    return Known(_exclusive(self).type.dtype)


@implements(T.ExclusiveTile.ndim)
def _exclusive_ndim(b: Build, self: Abstract) -> Abstract:
    return Known(_exclusive(self).type.rank)


@implements(T.ExclusiveTile.load)
def _exclusive_load(b: Build, self: Abstract, padding: Abstract) -> Abstract:
    z = _exclusive(self)
    index = _own_index(b, z, "load()")
    pad = padding_arg(b, padding, z.type.dtype, f"load from `{z.name}`")
    return _load(b, z.view, index, z.partition.tile_shape, pad)


@implements(T.ExclusiveTile.store)
def _exclusive_store(b: Build, self: Abstract, tile: Abstract) -> Abstract:
    z = _exclusive(self)
    index = _own_index(b, z, "store(...)")
    value = tile_to_store(b, tile, z.type, z.partition.tile_shape, z.name)
    b.builder.emit(ops.Store, (z.view, value, *index))
    return NONE


@implements(T.Exclusive.tiles)
def _tiles(
    b: Build, self: Abstract, dealt: Abstract = NONE, down: Abstract = NONE, even: Abstract = NONE
) -> Abstract:  # fmt: skip
    assert isinstance(self, Exclusive)
    is_down = down != NONE and flag_arg(b, down, f"`{self.name}.tiles`: down")
    is_even = even != NONE and flag_arg(b, even, f"`{self.name}.tiles`: even")
    if dealt == NONE:
        return TilesIterator(self, None, is_down, is_even)
    if not self.partition.persistent:
        b.fail(
            f"`{self.name}.tiles`: dealt: expected a persistent partition, whose programs have several tiles; "
            "leave dealt out, or make the partition persistent"
        )
    return TilesIterator(self, index_scalar(b, dealt, f"`{self.name}.tiles`: dealt"), is_down, is_even)


@implements(T.Exclusive.num_tiles)
def _exclusive_num_tiles(b: Build, self: Abstract) -> Abstract:
    z = _exclusive(self)
    return Tup(tuple(map(Tile, num_tiles(b, z.view, z.partition.tile_shape))))


# ---------------------------------------------------------------- shared views and peers


def _view(self: Abstract) -> View:
    assert isinstance(self, View)
    return self


@implements(T.Shared.shape)
def _view_shape(b: Build, self: Abstract) -> Abstract:
    return _extents(b, _view(self).value)


@implements(T.Shared.dtype)
def _view_dtype(b: Build, self: Abstract) -> Abstract:
    return Known(_view(self).type.dtype)


@implements(T.Shared.ndim)
def _view_ndim(b: Build, self: Abstract) -> Abstract:
    return Known(_view(self).type.rank)


def shape_for(b: Build, value: Abstract, rank: int, role: str) -> tuple[int, ...]:
    """The shape of a tile of a view of `rank` axes."""
    shape = shape_arg(b, value, f"{role}: shape")
    if len(shape) != rank:
        b.fail(f"{role}: shape: expected {rank} extents, one per axis, got {known_shape(shape)}")
    return shape


@implements(T.Shared.load)
def load_tile(b: Build, self: Abstract, index: Abstract, shape: Abstract, padding: Abstract) -> Abstract:
    view = _view(self)
    role = f"load from `{view.name}`"
    extents = shape_for(b, shape, view.type.rank, role)
    indices = index_args(b, index, view.type.rank, role)
    return _load(b, view.value, indices, extents, padding_arg(b, padding, view.type.dtype, role))


@implements(T.Shared.load_like)
def _view_load_like(b: Build, self: Abstract, tile: Abstract, padding: Abstract) -> Abstract:
    view = _view(self)
    role = f"load from `{view.name}`"
    if not isinstance(tile, ExclusiveTile):
        b.fail(
            f"{role}: load_like: expected an exclusive parameter or a tile of one, got {describe(tile)}; "
            f"use {view.name}.load(index, shape)"
        )
    index = _own_index(b, tile, "index")
    if len(index) != view.type.rank:
        b.fail(
            f"{role}: load_like: expected a view of {view.type.rank} axes, got `{tile.name}` of {len(index)}; "
            f"use {view.name}.load(index, shape)"
        )
    return _load(b, view.value, index, tile.partition.tile_shape, padding_arg(b, padding, view.type.dtype, role))


@implements(T.Shared.num_tiles)
def _view_num_tiles(b: Build, self: Abstract, shape: Abstract) -> Abstract:
    view = _view(self)
    extents = shape_for(b, shape, view.type.rank, f"`{view.name}.num_tiles`")
    return Tup(tuple(map(Tile, num_tiles(b, view.value, extents))))


def writable(b: Build, view: View, what: str) -> None:
    if not view.type.writable:
        if view.peer:
            b.fail(f"{what} `{view.name}`: expected T.Peer, which reads and writes, got T.Peer[T.read]")
        b.fail(f"{what} `{view.name}`: expected T.Exclusive or T.Peer, got T.Shared, which is only read")


@implements(T.View.store)
def store_tile(b: Build, self: Abstract, index: Abstract, tile: Abstract) -> Abstract:
    view = _view(self)
    writable(b, view, "store to")
    value = tile_to_store(b, tile, view.type, None, view.name)
    indices = index_args(b, index, view.type.rank, f"store to `{view.name}`")
    b.builder.emit(ops.Store, (view.value, value, *indices))
    return NONE


def atomic_rmw(b: Build, rmw: Rmw, dtype: T.DType, role: str) -> Rmw:
    """The kind of read-modify-write for a dtype; an addition of floats is ADDF."""
    if dtype.is_bool or (dtype.is_float and dtype.bits == 8):
        b.fail(f"{role}: {dtype.name} has no atomics; use i32 or f32")
    if dtype.is_float and rmw is Rmw.ADD:
        return Rmw.ADDF
    if dtype.is_float and rmw not in (Rmw.ADDF, Rmw.MIN, Rmw.MAX, Rmw.XCHG):
        b.fail(f"{role}: {rmw.value} takes integers, got {dtype.name}; floats take add, min, max and xchg")
    if not dtype.is_float and rmw is Rmw.ADDF:
        b.fail(f"{role}: addf takes floats, got {dtype.name}; integers take add")
    return rmw


@implements(T.View.atomic_add)
def _view_atomic_add(
    b: Build, self: Abstract, index: Abstract, tile: Abstract, order: Abstract, scope: Abstract
) -> Abstract:
    return _view_atomic(b, self, index, Known(Rmw.ADD), tile, order, scope)


@implements(T.View.atomic)
def _view_atomic(
    b: Build, self: Abstract, index: Abstract, rmw: Abstract, tile: Abstract, order: Abstract, scope: Abstract
) -> Abstract:
    view = _view(self)
    role = f"atomic on `{view.name}`"
    writable(b, view, "atomic on")
    kind = atomic_rmw(b, enum_arg(b, rmw, Rmw, f"{role}: rmw", "a T.Rmw, such as T.Rmw.MAX"), view.type.dtype, role)
    value = tile_to_store(b, tile, view.type, None, view.name)
    indices = index_args(b, index, view.type.rank, role)
    o = order_arg(b, order, role, (Order.RELAXED, Order.ACQUIRE, Order.RELEASE, Order.ACQ_REL))
    s = scope_of_atomic(b, scope, view.type.space, role)
    b.builder.emit(ops.TileAtomic, (view.value, value, *indices), rmw=kind, order=o, scope=s)
    return NONE


def _peer(self: Abstract) -> Peer:
    assert isinstance(self, Peer)
    return self


def peer_view(b: Build, peer: Peer, rank: Value) -> View:
    """The part of a symmetric parameter on `rank`, checked to be a rank unless it is one by construction."""
    check_range(b, rank, lambda: num_ranks_of(b, peer.value), "peer rank out of range", b.proven_ranks)
    return View(peer.name, b.builder.value(ops.PeerView, (peer.value, rank), peer.type.view), peer=True, rank=rank)


@implements(T.Peer.at)
def _peer_at(b: Build, self: Abstract, rank: Abstract) -> Abstract:
    peer = _peer(self)
    return peer_view(b, peer, index_scalar(b, rank, f"`{peer.name}.at`: rank"))


@implements(T.Peer.local)
def _peer_local(b: Build, self: Abstract) -> Abstract:
    return peer_view(b, _peer(self), rank_of(b, _peer(self).value))


@implements(T.Peer.rank)
def _peer_rank(b: Build, self: Abstract) -> Abstract:
    return Tile(rank_of(b, _peer(self).value))


@implements(T.Peer.num_ranks)
def _peer_num_ranks(b: Build, self: Abstract) -> Abstract:
    return Tile(num_ranks_of(b, _peer(self).value))


@implements(T.Peer.shape)
def _peer_shape(b: Build, self: Abstract) -> Abstract:
    return _extents(b, _peer(self).value)


@implements(T.Peer.dtype)
def _peer_dtype(b: Build, self: Abstract) -> Abstract:
    return Known(_peer(self).type.dtype)


@implements(T.Peer.ndim)
def _peer_ndim(b: Build, self: Abstract) -> Abstract:
    return Known(_peer(self).type.rank)
