"""Words that cut tiles up, join them and gather from them. No memory, no control flow."""

from __future__ import annotations

from collections.abc import Sequence

import peertile.language as T
from peertile.dtypes import b1, i32, i64, u32, u64
from peertile.frontend.convert import axis_number, broadcast_to, cast, constant, index_scalar, int_arg, shape_arg
from peertile.frontend.groups import check_range
from peertile.frontend.impl_folds import index_along
from peertile.frontend.impl_tiles import tuple_text
from peertile.frontend.registry import implements
from peertile.frontend.scope import Build
from peertile.frontend.values import Abstract, Tile, Tup, describe
from peertile.ir import ops
from peertile.ir.core import Value
from peertile.ir.ops import Binary, CheckKind, Compare, Fold
from peertile.ir.types import BOOL, INDEX, MAX_TILE_RANK, TileType

__all__: list[str] = []


def _tile(b: Build, x: Abstract, role: str) -> Tile:
    if not isinstance(x, Tile):
        b.fail(f"{role}: expected a tile, got {describe(x)}")
    return x


def _axis(b: Build, value: Abstract, rank: int, role: str) -> int:
    return axis_number(b, int_arg(b, value, f"{role}: axis"), rank, f"{role}: axis")


# ---------------------------------------------------------------- joining


@implements(T.cat)
def _cat(b: Build, tiles: Abstract, axis: Abstract) -> Abstract:
    role = "T.cat"
    if not isinstance(tiles, Tup):
        b.fail(f"{role}: tiles: expected a tuple of tiles, got {describe(tiles)}")
    found = [_tile(b, x, f"{role}: tiles") for x in tiles.items]
    if not found or len(found) & (len(found) - 1):
        b.fail(f"{role}: tiles: expected a number that is a power of two, got {len(found)}; add tiles of padding")
    for x in found[1:]:
        if x.type != found[0].type:
            b.fail(
                f"{role}: tiles: expected one type, got {found[0].type} and {x.type}; convert or reshape one of them"
            )
    t = found[0].type
    k = _axis(b, axis, t.rank, role)
    if t.rank == MAX_TILE_RANK and len(found) > 1:
        b.fail(f"{role}: tiles: expected at most {MAX_TILE_RANK - 1} axes, got {t}")
    values = [x.value for x in found]
    while len(values) > 1:
        values = [_join(b, x, y, k) for x, y in zip(values[::2], values[1::2], strict=True)]
    return Tile(values[0])


def _join(b: Build, x: Value, y: Value, axis: int) -> Value:
    """Two tiles one behind the other: chosen between along a new axis of 2, which then joins the axis. Elementwise
    and so fused with what uses it, on every target."""
    t = x.type
    assert isinstance(t, TileType)
    thin = (*t.shape[:axis], 1, *t.shape[axis:])
    both = (*t.shape[:axis], 2, *t.shape[axis:])
    wide = [broadcast_to(b, b.builder.value(ops.Reshape, (v,), t.with_shape(thin)), both) for v in (x, y)]
    which = index_along(b, both, axis)
    zero = constant(b, 0, i64, both)
    first = b.builder.value(ops.CompareOp, (which, zero), TileType(b1, both), fn=Compare.EQ)
    chosen = b.builder.value(ops.Select, (first, *wide), t.with_shape(both))
    long = (*t.shape[:axis], 2 * t.shape[axis], *t.shape[axis + 1 :])
    return b.builder.value(ops.Reshape, (chosen,), t.with_shape(long))


# ---------------------------------------------------------------- pieces


def _indices(b: Build, index: Abstract, whole: TileType, piece: tuple[int, ...], role: str) -> list[Value]:
    """One tile index per axis, each known or checked to be in range."""
    items = index.items if isinstance(index, Tup) else (index,)
    if len(piece) != whole.rank or any(m > n for m, n in zip(piece, whole.shape, strict=False)):
        b.fail(f"{role}: expected a piece no larger than {whole}, of as many axes, got {tuple_text(piece)}")
    if len(items) != whole.rank:
        b.fail(f"{role}: index: expected a tile index per axis ({whole.rank} of them), got {len(items)}")
    found = []
    for k, (item, n, m) in enumerate(zip(items, whole.shape, piece, strict=True)):
        value = index_scalar(b, item, f"{role}: index {k}")
        limit = n // m
        known = value.op.attrs["value"] if isinstance(value.op, ops.Const) else None
        if known is not None and not 0 <= known < limit:
            b.fail(f"{role}: index {k}: expected 0 to {limit - 1}, got {known}")
        if known is None:
            check_range(b, value, lambda limit=limit: constant(b, limit, i64), f"{role}: index {k} out of range")  # type: ignore[misc]
        found.append(value)
    return found


@implements(T.extract)
def _extract(b: Build, x: Abstract, index: Abstract, shape: Abstract) -> Abstract:
    role = "T.extract"
    tile, piece = _tile(b, x, role), shape_arg(b, shape, f"{role}: shape")
    indices = _indices(b, index, tile.type, piece, role)
    return Tile(b.builder.value(ops.Extract, (tile.value, *indices), tile.type.with_shape(piece)))


@implements(T.insert)
def _insert(b: Build, x: Abstract, piece: Abstract, index: Abstract) -> Abstract:
    role = "T.insert"
    tile, part = _tile(b, x, role), _tile(b, piece, f"{role}: piece")
    if part.type.dtype != tile.type.dtype:
        b.fail(f"{role}: piece: expected dtype {tile.type.dtype.name}, got {part.type}; convert it with .astype(...)")
    indices = _indices(b, index, tile.type, part.type.shape, role)
    return Tile(b.builder.value(ops.Insert, (tile.value, part.value, *indices), tile.type))


# ---------------------------------------------------------------- gathering


def _is_inside(value: Value, limit: int, depth: int = 0) -> bool:
    """Whether every element is in 0 … limit - 1 by construction."""
    t, op = value.type, value.op
    assert isinstance(t, TileType)
    if t.dtype.kind is T.u8.kind and t.dtype.max < limit:
        return True
    if op is None or depth > 16:
        return False
    operands: Sequence[Value] = op.operands
    match op:
        case ops.Const():
            return 0 <= int(op.attrs["value"]) < limit
        case ops.Iota():
            return t.numel <= limit
        case ops.Reshape() | ops.Broadcast() | ops.Permute() | ops.Extract() | ops.Take():
            return _is_inside(operands[0], limit, depth + 1)
        case ops.Sort():
            return _is_inside(operands[value.index], limit, depth + 1)
        case ops.Select():
            return all(_is_inside(v, limit, depth + 1) for v in operands[1:])
        case ops.BinaryOp() if op.attrs["fn"] is Binary.AND:
            return any(_is_inside(v, limit, depth + 1) for v in operands)
        case ops.BinaryOp() if op.attrs["fn"] in (Binary.FLOORDIV, Binary.QUOT, Binary.MOD, Binary.SHR):
            # Of two numbers that are not negative, neither of these exceeds the first one.
            return _is_inside(operands[0], limit, depth + 1) and _is_inside(operands[1], 1 << 62, depth + 1)
    return False


def _take_from(b: Build, x: Value, index: Value, axis: int) -> Tile:
    t, i = x.type, index.type
    assert isinstance(t, TileType)
    assert isinstance(i, TileType)
    return Tile(b.builder.value(ops.Take, (x, index), i.with_dtype(t.dtype), axis=axis))


@implements(T.take)
def _take(b: Build, x: Abstract, index: Abstract, axis: Abstract) -> Abstract:
    role = "T.take"
    tile, places = _tile(b, x, role), _tile(b, index, f"{role}: index")
    k = _axis(b, axis, tile.type.rank, role)
    if not places.type.dtype.is_int:
        b.fail(f"{role}: index: expected integers, got {places.type}; convert with .astype(T.i32)")
    want = (*tile.type.shape[:k], *places.type.shape[k : k + 1], *tile.type.shape[k + 1 :])
    if places.type.rank != tile.type.rank or places.type.shape != want:
        b.fail(
            f"{role}: index: expected the extents of {tile.type} but for axis {k}, got {places.type}; T.broadcast it"
        )
    limit = tile.type.shape[k]
    if not _is_inside(places.value, limit):
        # As unsigned, of which a negative one is greater than any in range: the greatest tells, and is reported.
        signed, bits = (i64, u64) if places.type.dtype.bits == 64 else (i32, u32)
        is_signed = places.type.dtype.min < 0
        found = cast(b, cast(b, places.value, signed) if is_signed else places.value, bits)
        for a in reversed(range(places.type.rank)):
            to = TileType(bits, places.type.shape[:a])
            found = b.builder.value(ops.Reduce, (found,), to, fn=Fold.MAX, axis=a)
        inside = b.builder.value(ops.CompareOp, (found, constant(b, limit, bits)), BOOL, fn=Compare.LT)
        got = cast(b, cast(b, found, signed) if is_signed else found, i64)
        numbers = got, constant(b, limit, i64)
        b.builder.emit(ops.Check, (inside, *numbers), kind=CheckKind.BOUNDS, message=f"{role}: index out of range")
    return _take_from(b, tile.value, places.value, k)


@implements(T.flip)
def _flip(b: Build, x: Abstract, axis: Abstract) -> Abstract:
    tile = _tile(b, x, "T.flip")
    k = _axis(b, axis, tile.type.rank, "T.flip")
    places = index_along(b, tile.type.shape, k)
    last = constant(b, tile.type.shape[k] - 1, i64, tile.type.shape)
    turned = b.builder.value(ops.BinaryOp, (last, places), INDEX.with_shape(tile.type.shape), fn=Binary.SUB)
    return _take_from(b, tile.value, turned, k)
