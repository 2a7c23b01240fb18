"""Numbers and tiles into the type that is needed: constants, casts, broadcasting, promotion. No syntax.

A Python number adapts to the tile it meets and is checked to fit; alone an int becomes i64, a float f32.
Two tiles are promoted by `dtypes.promote` and broadcast as in numpy, aligned on the right.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Final

from peertile.dtypes import DType, b1, f32, i64, promote
from peertile.frontend.scope import Build
from peertile.frontend.values import Abstract, Known, Tile, Tup, describe, is_number
from peertile.ir import ops
from peertile.ir.core import Value
from peertile.ir.ops import Rounding
from peertile.ir.types import MAX_TILE_ELEMENTS, MAX_TILE_RANK, TileType

__all__ = [
    "axis_number",
    "broadcast_shapes",
    "broadcast_to",
    "cast",
    "constant",
    "default_dtype",
    "dtype_arg",
    "flag_arg",
    "index_scalar",
    "int_arg",
    "int_tuple_arg",
    "number",
    "pair",
    "shape_arg",
    "tile_arg",
    "to_dtype",
    "unify",
]


def default_dtype(value: bool | int | float) -> DType:
    """The dtype of a Python number that meets no tile."""
    return b1 if isinstance(value, bool) else i64 if isinstance(value, int) else f32


def number(value: bool | int | float, dtype: DType) -> bool | int | float | None:
    """`value` as an element of `dtype` (floats rounded to it), None where it does not fit.

    A float never becomes an integer, not even 2.0: that is a cast, to be written.
    """
    if dtype.is_bool:
        return value if isinstance(value, bool) else None
    if dtype.is_int:
        if isinstance(value, float):
            return None
        return int(value) if dtype.min <= int(value) <= dtype.max else None
    try:
        wide = float(value)
    except OverflowError:
        return None
    if math.isnan(wide) or math.isinf(wide):
        return wide if dtype.name != "f8e4m3" or math.isnan(wide) else None
    if dtype.bits == 64:
        return wide
    import numpy as np

    with np.errstate(over="ignore"):  # overflow is found below, not warned about
        rounded = float(dtype.numpy.type(wide))
    return rounded if math.isfinite(rounded) else None


def constant(b: Build, value: bool | int | float, dtype: DType, shape: tuple[int, ...] = ()) -> Value:
    """A constant of `dtype`; CompileError where `value` does not fit."""
    fitted = number(value, dtype)
    if fitted is None:
        if isinstance(value, float) and not dtype.is_float:
            b.fail(f"the float {value!r} meets {dtype.name}; cast the tile first, with .astype(T.f32), or write an int")
        if dtype.is_int:
            limits = f"{dtype.min} to {dtype.max}"
            b.fail(f"{value!r} does not fit {dtype.name} ({limits}); cast the tile to a wider dtype with .astype(...)")
        b.fail(f"{value!r} does not fit {dtype.name}; cast the tile to a wider dtype with .astype(...)")
    return broadcast_to(b, b.builder.value(ops.Const, (), TileType(dtype), value=fitted), shape)


def cast(b: Build, value: Value, dtype: DType, rounding: Rounding = Rounding.DEFAULT, saturate: bool = False) -> Value:
    """`value` with elements of `dtype`; itself where it has them."""
    t = value.type
    assert isinstance(t, TileType)
    if t.dtype == dtype:
        return _finite(b, value, t) if saturate and dtype.is_float else value
    return b.builder.value(ops.Cast, (value,), t.with_dtype(dtype), rounding=rounding, saturate=saturate)


_LARGEST: Final = {"f32": 3.4028234663852886e38, "f64": sys.float_info.max}


def _finite(b: Build, value: Value, t: TileType) -> Value:
    """`value` with the largest number in place of infinity; the op that casts changes nothing within one type."""
    if t.dtype.bits < 32:
        return cast(b, cast(b, value, f32), t.dtype, saturate=True)
    for fn, sign in ((ops.Binary.MIN, 1), (ops.Binary.MAX, -1)):
        limit = constant(b, sign * _LARGEST[t.dtype.name], t.dtype, t.shape)
        value = b.builder.value(ops.BinaryOp, (value, limit), t, fn=fn)
    return value


def to_dtype(b: Build, value: Abstract, dtype: DType, role: str) -> Value:
    """`value` as a tile of `dtype` without loss: a number that fits, or a tile that promotes to it."""
    if is_number(value):
        assert isinstance(value, Known)
        return constant(b, value.value, dtype)
    if isinstance(value, Tile):
        if value.weak and value.type.dtype != dtype:
            b.adaptations += 1
        if value.weak or promote(value.type.dtype, dtype) == dtype:
            return cast(b, value.value, dtype)
        b.fail(f"{role}: expected {dtype.name}, got {value.type}; convert it with .astype(T.{dtype.name})")
    b.fail(f"{role}: expected {dtype.name}, got {describe(value)}")


def broadcast_shapes(b: Build, a: tuple[int, ...], c: tuple[int, ...], role: str) -> tuple[int, ...]:
    """The common shape of two tiles, aligned on the right."""
    rank = max(len(a), len(c))
    left, right = (1,) * (rank - len(a)) + a, (1,) * (rank - len(c)) + c
    shape = []
    for x, y in zip(left, right, strict=True):
        if x != y and 1 not in (x, y):
            b.fail(
                f"{role}: shapes {_shape(a)} and {_shape(c)} do not broadcast (aligned on the right, {x} meets {y}); "
                "reshape one of them, or insert an axis with T.expand_dims"
            )
        shape.append(max(x, y))
    if math.prod(shape) > MAX_TILE_ELEMENTS:
        b.fail(
            f"{role}: shapes {_shape(a)} and {_shape(c)} broadcast to {_shape(tuple(shape))}: expected at most "
            f"{MAX_TILE_ELEMENTS} elements in a tile, got {math.prod(shape)}; use smaller tiles, and more of them"
        )
    return tuple(shape)


def _shape(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def broadcast_to(b: Build, value: Value, shape: tuple[int, ...]) -> Value:
    """`value` repeated to `shape`, which it is known to broadcast to."""
    t = value.type
    assert isinstance(t, TileType)
    if t.shape == shape:
        return value
    if t.shape and t.rank < len(shape):
        wide = (1,) * (len(shape) - t.rank) + t.shape
        value = b.builder.value(ops.Reshape, (value,), t.with_shape(wide))
        if wide == shape:
            return value
    return b.builder.value(ops.Broadcast, (value,), t.with_shape(shape))


def tile_arg(b: Build, value: Abstract, role: str, dtype: DType | None = None) -> Tile:
    """`value` as a tile; a Python number becomes a constant of `dtype` or of its own default."""
    if isinstance(value, Tile):
        return value
    if is_number(value):
        assert isinstance(value, Known)
        return Tile(constant(b, value.value, dtype or default_dtype(value.value)))
    b.fail(f"{role}: expected a tile or a number, got {describe(value)}{_hint(value)}")


def _hint(value: Abstract) -> str:
    if isinstance(value, Tup):
        return "; a tuple is no tile: index it first"
    name = getattr(value, "name", None)
    return f"; load from it first, as in {name}.load(...)" if name is not None else ""


def unify(b: Build, values: Sequence[Abstract], role: str) -> list[Value]:
    """Tiles of one dtype and shape from tiles and numbers: what an elementwise function needs."""
    for v in values:
        if not isinstance(v, Tile) and not is_number(v):
            b.fail(f"{role}: expected tiles or numbers, got {describe(v)}{_hint(v)}")
    tiles = [v for v in values if isinstance(v, Tile)]
    numbers = [v.value for v in values if isinstance(v, Known)]
    firm = [t for t in tiles if not t.weak]
    dtype = _common_dtype(b, firm or tiles, numbers, role)
    if tiles and not firm and dtype.is_int and any(isinstance(n, float) for n in numbers):
        dtype = f32
    shape: tuple[int, ...] = ()
    for t in tiles:
        shape = broadcast_shapes(b, shape, t.type.shape, role)
    out = []
    for v in values:
        if isinstance(v, Tile):
            if v.weak and v.type.dtype != dtype:
                b.adaptations += 1
            out.append(broadcast_to(b, cast(b, v.value, dtype), shape))
        else:
            assert isinstance(v, Known)
            out.append(constant(b, v.value, dtype, shape))
    return out


def _common_dtype(b: Build, tiles: list[Tile], numbers: list[bool | int | float], role: str) -> DType:
    if not tiles:
        has_float = any(isinstance(n, float) for n in numbers)
        return f32 if has_float else b1 if all(isinstance(n, bool) for n in numbers) else i64
    dtype = tiles[0].type.dtype
    for t in tiles[1:]:
        joined = promote(dtype, t.type.dtype)
        if joined is None:
            b.fail(
                f"{role}: no common type of {dtype.name} and {t.type.dtype.name}; "
                f"convert one side, as in .astype(T.{t.type.dtype.name})"
            )
        dtype = joined
    if dtype.is_bool:
        # A number joins bool tiles as it would stand alone.
        for n in numbers:
            if not isinstance(n, bool):
                dtype = f32 if isinstance(n, float) or dtype is f32 else i64
    return dtype


def pair(b: Build, left: Abstract, right: Abstract, role: str) -> tuple[Value, Value]:
    """Two operands promoted and broadcast."""
    x, y = unify(b, (left, right), role)
    return x, y


def index_scalar(b: Build, value: Abstract, role: str) -> Value:
    """An i64 scalar from an integer."""
    if isinstance(value, Known) and isinstance(value.value, int) and not isinstance(value.value, bool):
        return constant(b, value.value, i64)
    if isinstance(value, Tile) and value.type.is_scalar and value.type.dtype.is_int:
        return cast(b, value.value, i64)
    if isinstance(value, Tile) and value.type.dtype.is_int:
        b.fail(f"{role}: expected an integer scalar, got {value.type}; a tile of indices needs one access each")
    b.fail(f"{role}: expected an integer scalar, got {describe(value)}")


# ---------------------------------------------------------------- compile-time arguments


def int_arg(b: Build, value: Abstract, role: str) -> int:
    """A compile-time int."""
    if isinstance(value, Known) and isinstance(value.value, int) and not isinstance(value.value, bool):
        return value.value
    if isinstance(value, Tile):
        b.fail(
            f"{role}: expected an int known at compile time, got the run-time value {value.type}; make it T.Const[int]"
        )
    b.fail(f"{role}: expected an int known at compile time, got {describe(value)}")


def axis_number(b: Build, axis: int, rank: int, role: str) -> int:
    """An axis from 0, of one that may count from the last."""
    if not -rank <= axis < rank:
        allowed = f"{-rank} to {rank - 1}" if rank else "none for a scalar"
        b.fail(f"{role}: expected an axis from {allowed}, got {axis}")
    return axis % rank


def flag_arg(b: Build, value: Abstract, role: str) -> bool:
    """A compile-time bool."""
    if isinstance(value, Known) and isinstance(value.value, bool):
        return value.value
    b.fail(f"{role}: expected True or False known at compile time, got {describe(value)}")


def int_tuple_arg(b: Build, value: Abstract, role: str) -> tuple[int, ...]:
    """A tuple of compile-time ints; one int counts as a tuple of one."""
    if isinstance(value, Tup):
        return tuple(int_arg(b, item, f"{role}[{k}]") for k, item in enumerate(value.items))
    return (int_arg(b, value, role),)


def shape_arg(b: Build, value: Abstract, role: str) -> tuple[int, ...]:
    """The shape of a tile: compile-time powers of two, at most 6 of them and at most 2**20 as a product."""
    shape = int_tuple_arg(b, value, role)
    for k, n in enumerate(shape):
        if n <= 0:
            b.fail(f"{role}: extent {k}: expected a positive power of two, got {n}")
        if n & (n - 1):
            b.fail(
                f"{role}: extent {k}: expected a power of two, got {n}; use the next one, {1 << n.bit_length()}: "
                "partial tiles are padded on load and clipped on store"
            )
    if len(shape) > MAX_TILE_RANK:
        b.fail(f"{role}: expected at most {MAX_TILE_RANK} axes, got {len(shape)}")
    if math.prod(shape) > MAX_TILE_ELEMENTS:
        b.fail(
            f"{role}: expected at most {MAX_TILE_ELEMENTS} elements in a tile, got {math.prod(shape)} in "
            f"{_shape(shape)}; use smaller tiles, and more of them"
        )
    return shape


def dtype_arg(b: Build, value: Abstract, role: str) -> DType:
    """A dtype; Python's bool means T.b1."""
    if isinstance(value, Known):
        if isinstance(value.value, DType):
            return value.value
        if value.value is bool:
            return b1
    b.fail(f"{role}: expected a dtype such as T.f32, got {describe(value)}")
