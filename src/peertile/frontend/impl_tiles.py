"""Words on tiles: creation, elementwise functions, casts, shape, mma. No memory, no control, no folds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import peertile.language as T
from peertile.dtypes import DType, b1
from peertile.frontend.convert import (
    axis_number,
    broadcast_shapes,
    broadcast_to,
    cast,
    constant,
    default_dtype,
    dtype_arg,
    flag_arg,
    int_arg,
    int_tuple_arg,
    pair,
    shape_arg,
    tile_arg,
    to_dtype,
    unify,
)
from peertile.frontend.operators import compare_tiles, elementwise
from peertile.frontend.registry import implements
from peertile.frontend.scope import Build
from peertile.frontend.values import NONE, Abstract, Known, MulticastPointer, Pointer, Tile, Tup, describe, is_number
from peertile.ir import ops
from peertile.ir.ops import Binary, Compare, Precision, Rounding, Unary
from peertile.ir.types import MAX_TILE_RANK, TileType
from peertile.language.folds import NanRule

__all__ = ["enum_arg", "known_tuple", "least", "nan_arg", "tuple_text", "typed"]


def known_tuple(values: tuple[int, ...]) -> Tup:
    """A tuple of compile-time ints."""
    return Tup(tuple(map(Known, values)))


def enum_arg(b: Build, value: Abstract, cls: type, role: str, example: str) -> Any:
    """A member of an enum of the language."""
    if isinstance(value, Known) and isinstance(value.value, cls):
        return value.value
    b.fail(f"{role}: expected {example}, got {describe(value)}")


# ---------------------------------------------------------------- creation


def typed(b: Build, dtype: DType, value: Abstract) -> Abstract:
    """`T.f32(value)`: a typed constant, or a cast."""
    if is_number(value):
        assert isinstance(value, Known)
        return Tile(constant(b, value.value, dtype))
    if isinstance(value, Tile):
        return Tile(cast(b, value.value, dtype))
    b.fail(f"T.{dtype.name}(...): expected a number or a tile, got {describe(value)}")


@implements(T.zeros)
def _zeros(b: Build, shape: Abstract, dtype: Abstract) -> Abstract:
    return _filled(b, "T.zeros", shape, dtype, 0)


@implements(T.ones)
def _ones(b: Build, shape: Abstract, dtype: Abstract) -> Abstract:
    return _filled(b, "T.ones", shape, dtype, 1)


def _filled(b: Build, role: str, shape: Abstract, dtype: Abstract, value: int) -> Tile:
    d = dtype_arg(b, dtype, f"{role}: dtype")
    return Tile(constant(b, bool(value) if d.is_bool else value, d, shape_arg(b, shape, f"{role}: shape")))


@implements(T.full)
def _full(b: Build, shape: Abstract, value: Abstract, dtype: Abstract) -> Abstract:
    extents = shape_arg(b, shape, "T.full: shape")
    d = None if dtype == NONE else dtype_arg(b, dtype, "T.full: dtype")
    tile = tile_arg(b, value, "T.full: value", d)
    if not tile.type.is_scalar:
        b.fail(f"T.full: value: expected a scalar, got {tile.type}; use T.broadcast")
    scalar = tile.value if d is None else to_dtype(b, tile, d, "T.full: value")
    return Tile(broadcast_to(b, scalar, extents))


@implements(T.iota)
def _iota(b: Build, n: Abstract, dtype: Abstract) -> Abstract:
    shape = shape_arg(b, n, "T.iota: n")
    d = dtype_arg(b, dtype, "T.iota: dtype")
    if len(shape) != 1:
        b.fail(f"T.iota: n: expected one int, got {describe(n)}")
    if not d.is_int:
        b.fail(f"T.iota: dtype: expected an integer dtype, got {d.name}; convert with .astype(T.{d.name})")
    if shape[0] - 1 > d.max:
        b.fail(f"T.iota: {shape[0]} elements do not fit {d.name}, whose largest number is {d.max}")
    return Tile(b.builder.value(ops.Iota, (), TileType(d, shape)))


# ---------------------------------------------------------------- elementwise

_FLOAT_WORDS: Final[dict[Unary, Any]] = {
    Unary.EXP: T.exp, Unary.EXP2: T.exp2, Unary.LOG: T.log, Unary.LOG2: T.log2, Unary.SQRT: T.sqrt,
    Unary.RSQRT: T.rsqrt, Unary.SIN: T.sin, Unary.COS: T.cos, Unary.TAN: T.tan, Unary.SINH: T.sinh,
    Unary.COSH: T.cosh, Unary.TANH: T.tanh, Unary.ERF: T.erf, Unary.SIGMOID: T.sigmoid,
    Unary.FLOOR: T.floor, Unary.CEIL: T.ceil, Unary.ROUND: T.round,
}  # fmt: skip

_BINARY_WORDS: Final[dict[Binary, tuple[Any, str]]] = {
    Binary.POW: (T.pow, "T.pow"),
    Binary.MOD: (T.mod, "T.mod"),
    Binary.REM: (T.rem, "T.rem"),
    Binary.QUOT: (T.quot, "T.quot"),
    Binary.MULHI: (T.mulhi, "T.mulhi"),
}


def _float_tile(b: Build, role: str, value: Abstract) -> Tile:
    """A float tile of more than 8 bits; a Python number counts as f32."""
    if isinstance(value, Known) and is_number(value) and not isinstance(value.value, bool):
        value = Known(float(value.value))
    tile = tile_arg(b, value, role)
    d = tile.type.dtype
    if not d.is_float or d.bits == 8:
        b.fail(f"{role}: expected f16, bf16, f32 or f64, got {tile.type}; convert with .astype(T.f32)")
    return tile


def _float_word(fn: Unary) -> Callable[[Build, Abstract], Abstract]:
    def emit(b: Build, x: Abstract) -> Abstract:
        tile = _float_tile(b, f"T.{fn.value}", x)
        return Tile(b.builder.value(ops.UnaryOp, (tile.value,), tile.type, fn=fn))

    return emit


for _fn, _word in _FLOAT_WORDS.items():
    implements(_word)(_float_word(_fn))


def _implements_binary(word: Any, fn: Binary, role: str) -> None:
    # The word's second parameter is called b, and so is the build in every implementation: bound by place.
    @implements(word)
    def emit(build: Build, a: Abstract, b: Abstract) -> Abstract:
        return elementwise(build, fn, a, b, role)


for _binary, (_word, _role) in _BINARY_WORDS.items():
    _implements_binary(_word, _binary, _role)


def least(b: Build, fn: Binary, x: Abstract, y: Abstract, rule: NanRule, role: str) -> Tile:
    """MIN or MAX of two operands by a NaN rule."""
    both = elementwise(b, fn, x, y, role)
    if rule is NanRule.PROPAGATE or not both.type.dtype.is_float:
        return both
    left, right = pair(b, x, y, role)
    is_nan = [
        Tile(b.builder.value(ops.CompareOp, (v, v), both.type.with_dtype(b1), fn=Compare.NE)) for v in (left, right)
    ]
    first = b.builder.value(ops.Select, (is_nan[1].value, left, both.value), both.type)
    return Tile(b.builder.value(ops.Select, (is_nan[0].value, right, first), both.type))


def nan_arg(b: Build, value: Abstract, role: str) -> NanRule:
    """A NaN rule."""
    rule = enum_arg(b, value, NanRule, f"{role}: nan", "a T.NanRule, such as T.NanRule.IGNORE")
    assert isinstance(rule, NanRule)
    return rule


@implements(T.minimum)
def _minimum(build: Build, a: Abstract, b: Abstract, nan: Abstract) -> Abstract:
    return least(build, Binary.MIN, a, b, nan_arg(build, nan, "T.minimum"), "T.minimum")


@implements(T.maximum)
def _maximum(build: Build, a: Abstract, b: Abstract, nan: Abstract) -> Abstract:
    return least(build, Binary.MAX, a, b, nan_arg(build, nan, "T.maximum"), "T.maximum")


@implements(T.atan2)
def _atan2(b: Build, y: Abstract, x: Abstract) -> Abstract:
    return elementwise(b, Binary.ATAN2, y, x, "T.atan2")


@implements(T.abs)
def _abs(b: Build, x: Abstract) -> Abstract:
    tile = tile_arg(b, x, "T.abs")
    if tile.type.dtype.is_bool:
        b.fail("T.abs: expected numbers, got bool; convert with .astype(T.i32)")
    return Tile(b.builder.value(ops.UnaryOp, (tile.value,), tile.type, fn=Unary.ABS))


@implements(T.clamp)
def _clamp(b: Build, x: Abstract, lo: Abstract, hi: Abstract) -> Abstract:
    above = elementwise(b, Binary.MAX, x, lo, "T.clamp: x and lo")
    return elementwise(b, Binary.MIN, above, hi, "T.clamp: x and hi")


@implements(T.fma)
def _fma(build: Build, a: Abstract, b: Abstract, c: Abstract) -> Abstract:
    values = unify(build, (a, b, c), "T.fma")
    t = values[0].type
    assert isinstance(t, TileType)
    if not t.dtype.is_float or t.dtype.bits == 8:
        build.fail(f"T.fma: expected f16, bf16, f32 or f64, got {t.dtype.name}; write a * b + c for integers")
    return Tile(build.builder.value(ops.Fma, values, t))


@implements(T.at_least)
def _at_least(build: Build, a: Abstract, b: Abstract) -> Abstract:
    return compare_tiles(build, Compare.AT_LEAST, a, b, "T.at_least")


@implements(T.cdiv)
def _cdiv(build: Build, a: Abstract, b: Abstract) -> Abstract:
    role = "T.cdiv"
    if isinstance(a, Known) and isinstance(b, Known):
        n, d = int_arg(build, a, f"{role}: a"), int_arg(build, b, f"{role}: b")
        if d == 0:
            build.fail(f"{role}: b: expected a divisor other than 0, got 0")
        return Known(-(-n // d))
    # ⌊a / b⌋, one more where there is a remainder: neither a + b - 1 nor -a, which may wrap.
    quotient = elementwise(build, Binary.FLOORDIV, a, b, role)
    remainder = elementwise(build, Binary.MOD, a, b, role)
    more = compare_tiles(build, Compare.NE, remainder, Known(0), role)
    return elementwise(build, Binary.ADD, quotient, Tile(cast(build, more.value, quotient.type.dtype)), role)


@implements(T.where)
def _where(build: Build, condition: Abstract, a: Abstract, b: Abstract) -> Abstract:
    if isinstance(condition, Known) and isinstance(condition.value, bool):
        condition = tile_arg(build, condition, "T.where: condition")
    if not isinstance(condition, Tile) or not condition.type.dtype.is_bool:
        build.fail(f"T.where: condition: expected bool, got {describe(condition)}; compare it, as in `x != 0`")
    x, y = pair(build, a, b, "T.where")
    assert isinstance(x.type, TileType)
    shape = broadcast_shapes(build, condition.type.shape, x.type.shape, "T.where")
    operands = [broadcast_to(build, v, shape) for v in (condition.value, x, y)]
    return Tile(build.builder.value(ops.Select, operands, x.type.with_shape(shape)))


# ---------------------------------------------------------------- casts and shape


def _tile_self(b: Build, value: Abstract, role: str) -> Tile:
    return tile_arg(b, value, role)


@implements(T.Tile.astype)
def _astype(b: Build, self: Abstract, dtype: Abstract, rounding: Abstract, saturate: Abstract) -> Abstract:
    tile = _tile_self(b, self, "astype")
    d = dtype_arg(b, dtype, "astype: dtype")
    mode = enum_arg(b, rounding, Rounding, "astype: rounding", "a T.Rounding, such as T.Rounding.NEAREST")
    if mode is not Rounding.DEFAULT and not tile.type.dtype.is_float:
        b.fail(f"astype: rounding: only floats round as asked, got {tile.type} with {mode.value}; leave it out")
    return Tile(cast(b, tile.value, d, mode, flag_arg(b, saturate, "astype: saturate")))


@implements(T.Tile.bitcast)
def _bitcast_method(b: Build, self: Abstract, dtype: Abstract) -> Abstract:
    return _bitcast(b, self, dtype)


@implements(T.bitcast)
def _bitcast(b: Build, x: Abstract, dtype: Abstract) -> Abstract:
    tile = _tile_self(b, x, "bitcast")
    d = dtype_arg(b, dtype, "bitcast: dtype")
    if d.bits != tile.type.dtype.bits:
        have = tile.type.dtype
        b.fail(f"bitcast: expected a dtype of {have.bits} bits for {have.name}, got {d.name} of {d.bits} bits")
    if d == tile.type.dtype:
        return tile
    return Tile(b.builder.value(ops.Bitcast, (tile.value,), tile.type.with_dtype(d)))


@implements(T.Tile.shape)
def _tile_shape(b: Build, self: Abstract) -> Abstract:
    return known_tuple(_tile_self(b, self, "shape").type.shape)


@implements(T.Tile.dtype)
def _tile_dtype(b: Build, self: Abstract) -> Abstract:
    if isinstance(self, Known):
        return Known(default_dtype(self.value))
    return Known(_tile_self(b, self, "dtype").type.dtype)


@implements(T.Tile.ndim)
def _tile_ndim(b: Build, self: Abstract) -> Abstract:
    return Known(_tile_self(b, self, "ndim").type.rank)


@implements(T.Tile.T)
def _tile_transposed(b: Build, self: Abstract) -> Abstract:
    return _transpose(b, self, Known(-2), Known(-1))


@implements(T.Tile.reshape)
def _reshape_method(b: Build, self: Abstract, *shape: Abstract) -> Abstract:
    one = shape[0] if len(shape) == 1 else Tup(tuple(shape))
    return _reshape(b, self, one)


@implements(T.reshape)
def _reshape(b: Build, x: Abstract, shape: Abstract) -> Abstract:
    tile = tile_arg(b, x, "reshape")
    extents = shape_arg(b, shape, "reshape: shape")
    to = tile.type.with_shape(extents)
    if to.numel != tile.type.numel:
        b.fail(f"reshape: expected a shape of {tile.type.numel} elements for {tile.type}, got {tuple_text(extents)}")
    return tile if to == tile.type else Tile(b.builder.value(ops.Reshape, (tile.value,), to))


def tuple_text(values: tuple[int, ...]) -> str:
    """A tuple in an error message."""
    return str(tuple(values))


@implements(T.permute)
def _permute(b: Build, x: Abstract, axes: Abstract) -> Abstract:
    tile = tile_arg(b, x, "T.permute")
    rank = tile.type.rank
    order = tuple(axis_number(b, a, rank, "T.permute: axes") for a in int_tuple_arg(b, axes, "T.permute: axes"))
    if sorted(order) != list(range(rank)):
        b.fail(f"T.permute: axes: expected each of 0 to {rank - 1} once for {tile.type}, got {tuple_text(order)}")
    to = tile.type.with_shape(tuple(tile.type.shape[k] for k in order))
    return Tile(b.builder.value(ops.Permute, (tile.value,), to, axes=order))


@implements(T.transpose)
def _transpose(b: Build, x: Abstract, axis0: Abstract, axis1: Abstract) -> Abstract:
    tile = tile_arg(b, x, "T.transpose")
    rank = tile.type.rank
    if rank < 2:
        b.fail(f"T.transpose: expected a tile of at least 2 axes, got {tile.type}")
    i = axis_number(b, int_arg(b, axis0, "T.transpose: axis0"), rank, "T.transpose: axis0")
    j = axis_number(b, int_arg(b, axis1, "T.transpose: axis1"), rank, "T.transpose: axis1")
    order = list(range(rank))
    order[i], order[j] = j, i
    return _permute(b, tile, known_tuple(tuple(order)))


@implements(T.broadcast)
def _broadcast(b: Build, x: Abstract, shape: Abstract) -> Abstract:
    tile = tile_arg(b, x, "T.broadcast")
    extents = shape_arg(b, shape, "T.broadcast: shape")
    if broadcast_shapes(b, tile.type.shape, extents, "T.broadcast") != extents:
        b.fail(
            f"T.broadcast: {tile.type} has axes that the shape {tuple_text(extents)} lacks; reduce or index them first"
        )
    return Tile(broadcast_to(b, tile.value, extents))


@implements(T.expand_dims)
def _expand_dims(b: Build, x: Abstract, axis: Abstract) -> Abstract:
    tile = tile_arg(b, x, "T.expand_dims")
    rank = tile.type.rank + 1
    if rank > MAX_TILE_RANK:
        b.fail(f"T.expand_dims: expected a tile of at most {MAX_TILE_RANK - 1} axes, got {tile.type}")
    k = axis_number(b, int_arg(b, axis, "T.expand_dims: axis"), rank, "T.expand_dims: axis")
    shape = tile.type.shape
    return Tile(b.builder.value(ops.Reshape, (tile.value,), tile.type.with_shape((*shape[:k], 1, *shape[k:]))))


# ---------------------------------------------------------------- mma


@implements(T.mma)
def _mma(build: Build, a: Abstract, b: Abstract, acc: Abstract, precision: Abstract) -> Abstract:
    for role, v in (("a", a), ("b", b)):
        if not isinstance(v, Tile) or v.type.rank not in (2, 3):
            build.fail(f"T.mma: {role}: expected a tile of 2 or 3 axes, got {describe(v)}")
    assert isinstance(a, Tile)
    assert isinstance(b, Tile)
    x, y = a.type, b.type
    if x.dtype != y.dtype:
        build.fail(f"T.mma: expected a and b of one dtype, got {x} and {y}; convert one with .astype(...)")
    if x.rank != y.rank or x.shape[:-2] != y.shape[:-2]:
        build.fail(f"T.mma: expected equal batch axes, got {x} and {y}")
    if x.shape[-1] != y.shape[-2]:
        build.fail(f"T.mma: inner extents differ: a is {x}, b is {y}, {x.shape[-1]} meets {y.shape[-2]}")
    allowed = ops.MMA_TYPES.get(x.dtype.name)
    if allowed is None:
        build.fail(f"T.mma: no mma of {x.dtype.name}; it takes {', '.join(ops.MMA_TYPES)}")
    shape = (*x.shape[:-1], y.shape[-1])
    if acc == NONE:
        want = T.i32 if allowed == ("i32",) else T.f64 if allowed == ("f64",) else T.f32
        acc = Tile(constant(build, 0, want, shape))
    if not isinstance(acc, Tile):
        build.fail(f"T.mma: acc: expected a tile, got {describe(acc)}")
    if acc.type.dtype.name not in allowed or acc.type.shape != shape:
        build.fail(f"T.mma: acc: expected {allowed[0]}[{', '.join(map(str, shape))}] for {x} @ {y}, got {acc.type}")
    mode = enum_arg(build, precision, Precision, "T.mma: precision", "a T.Precision, such as T.Precision.TF32")
    if mode is Precision.TF32 and x.dtype.name != "f32":
        build.fail(f"T.mma: precision: T.Precision.TF32 is for f32, got {x.dtype.name}; leave it out")
    return Tile(build.builder.value(ops.Mma, (a.value, b.value, acc.value), acc.type, precision=mode))


@implements(T.Pointer.dtype)
def _pointer_dtype(b: Build, self: Abstract) -> Abstract:
    assert isinstance(self, Pointer | MulticastPointer)
    return Known(self.type.dtype)


@implements(T.Pointer.shape)
def _pointer_shape(b: Build, self: Abstract) -> Abstract:
    assert isinstance(self, Pointer | MulticastPointer)
    return known_tuple(self.type.shape if isinstance(self, Pointer) else ())
