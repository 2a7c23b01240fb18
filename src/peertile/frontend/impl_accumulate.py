"""Words on a T.Accumulate parameter: atomic updates by tiles, relaxed and of device scope, and nothing else."""

from __future__ import annotations

import peertile.language as T
from peertile.frontend.convert import shape_arg
from peertile.frontend.impl_memory import atomic_rmw, index_args, num_tiles
from peertile.frontend.impl_tiles import enum_arg, tuple_text
from peertile.frontend.registry import implements
from peertile.frontend.scope import Build
from peertile.frontend.values import NONE, Abstract, Accumulate, Known, Tile, Tup, describe
from peertile.ir import ops
from peertile.ir.types import INDEX
from peertile.memory_model import Rmw, Scope

__all__: list[str] = []


def _accumulate(self: Abstract) -> Accumulate:
    assert isinstance(self, Accumulate)
    return self


@implements(T.Accumulate.shape)
def _shape(b: Build, self: Abstract) -> Abstract:
    h = _accumulate(self)
    return Tup(tuple(Tile(b.builder.value(ops.Extent, (h.value,), INDEX, axis=k)) for k in range(h.type.rank)))


@implements(T.Accumulate.dtype)
def _dtype(b: Build, self: Abstract) -> Abstract:
    return Known(_accumulate(self).type.dtype)


@implements(T.Accumulate.ndim)
def _ndim(b: Build, self: Abstract) -> Abstract:
    return Known(_accumulate(self).type.rank)


@implements(T.Accumulate.num_tiles)
def _num_tiles(b: Build, self: Abstract, shape: Abstract) -> Abstract:
    h = _accumulate(self)
    role = f"`{h.name}.num_tiles`: shape"
    extents = shape_arg(b, shape, role)
    if len(extents) != h.type.rank:
        b.fail(f"{role}: expected {h.type.rank} extents, one per axis, got {tuple_text(extents)}")
    return Tup(tuple(map(Tile, num_tiles(b, h.value, extents))))


@implements(T.Accumulate.atomic_add)
def _atomic_add(b: Build, self: Abstract, index: Abstract, tile: Abstract) -> Abstract:
    return _atomic(b, self, index, Known(Rmw.ADD), tile)


@implements(T.Accumulate.atomic)
def _atomic(b: Build, self: Abstract, index: Abstract, rmw: Abstract, tile: Abstract) -> Abstract:
    h = _accumulate(self)
    role = f"atomic on `{h.name}`"
    given = enum_arg(b, rmw, Rmw, f"{role}: rmw", "a T.Rmw, such as T.Rmw.MAX")
    if given is Rmw.XCHG:
        b.fail(f"{role}: rmw: expected a function that combines, got xchg, whose last writer is not fixed")
    kind = atomic_rmw(b, given, h.type.dtype, role)
    if not isinstance(tile, Tile):
        b.fail(f"{role}: expected a tile, got {describe(tile)}")
    if tile.type.dtype != h.type.dtype:
        b.fail(f"{role}: expected dtype {h.type.dtype.name}, got {tile.type}; convert it with .astype({h.name}.dtype)")
    if tile.type.rank != h.type.rank:
        b.fail(f"{role}: expected a tile of {h.type.rank} axes, got {tile.type}")
    indices = index_args(b, index, h.type.rank, role)
    b.builder.emit(ops.TileAtomic, (h.value, tile.value, *indices), rmw=kind, scope=Scope.DEVICE)
    return NONE
