"""Python's operators on abstract values: constants are computed, tiles emit ops. No control flow.

`and`, `or`, `not` and conditions live in `control.py`: they may have to branch.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from peertile.dtypes import i64
from peertile.frontend.convert import broadcast_to, cast, constant, pair
from peertile.frontend.scope import Build
from peertile.frontend.values import Abstract, Known, MulticastPointer, Pointer, Tile, Tup, describe, is_number
from peertile.ir import ops
from peertile.ir.core import Value
from peertile.ir.ops import Binary, Compare, Unary
from peertile.ir.types import BOOL, PointerType, TileType

__all__ = ["as_value", "binary", "compare", "compare_tiles", "elementwise", "negate", "unary"]

_SYMBOLS: Final[dict[type[ast.operator], tuple[str, Callable[[Any, Any], Any], Binary | None]]] = {
    ast.Add: ("+", operator.add, Binary.ADD),
    ast.Sub: ("-", operator.sub, Binary.SUB),
    ast.Mult: ("*", operator.mul, Binary.MUL),
    ast.Div: ("/", operator.truediv, Binary.DIV),
    ast.FloorDiv: ("//", operator.floordiv, Binary.FLOORDIV),
    ast.Mod: ("%", operator.mod, Binary.MOD),
    ast.Pow: ("**", operator.pow, Binary.POW),
    ast.BitAnd: ("&", operator.and_, Binary.AND),
    ast.BitOr: ("|", operator.or_, Binary.OR),
    ast.BitXor: ("^", operator.xor, Binary.XOR),
    ast.LShift: ("<<", operator.lshift, Binary.SHL),
    ast.RShift: (">>", operator.rshift, Binary.SHR),
    ast.MatMult: ("@", operator.matmul, None),
}

_COMPARES: Final[dict[type[ast.cmpop], tuple[str, Callable[[Any, Any], Any], Compare]]] = {
    ast.Eq: ("==", operator.eq, Compare.EQ),
    ast.NotEq: ("!=", operator.ne, Compare.NE),
    ast.Lt: ("<", operator.lt, Compare.LT),
    ast.LtE: ("<=", operator.le, Compare.LE),
    ast.Gt: (">", operator.gt, Compare.GT),
    ast.GtE: (">=", operator.ge, Compare.GE),
}

_FLOAT_ONLY: Final = frozenset({Binary.DIV, Binary.POW, Binary.ATAN2})
_INT_ONLY: Final = frozenset(
    {Binary.FLOORDIV, Binary.MOD, Binary.QUOT, Binary.REM, Binary.SHL, Binary.SHR, Binary.MULHI}
)
_BITS: Final = frozenset({Binary.AND, Binary.OR, Binary.XOR})
_FLOAT_WAY: Final = {
    Binary.FLOORDIV: "; use T.floor(a / b)",
    Binary.MOD: "; write a - T.floor(a / b) * b for the remainder of a rounding down",
}
_MAX_CONSTANT_BITS: Final = 4096


def as_value(value: Abstract) -> Any:
    """The Python value of a constant, tuples included; raises TypeError where it is not all known."""
    if isinstance(value, Known):
        return value.value
    if isinstance(value, Tup):
        return tuple(as_value(item) for item in value.items)
    raise TypeError(describe(value))


def _from_value(value: Any) -> Abstract:
    return Tup(tuple(_from_value(v) for v in value)) if isinstance(value, tuple) else Known(value)


def _is_weak(value: Abstract) -> bool:
    return is_number(value) or (isinstance(value, Tile) and value.weak)


def _result(value: Value, *operands: Abstract) -> Tile:
    """A tile that stays weak while all it came from was."""
    return Tile(value, weak=all(map(_is_weak, operands)))


def elementwise(b: Build, fn: Binary, left: Abstract, right: Abstract, role: str) -> Tile:
    """`fn` of two operands after promotion and broadcasting, with the dtype rules stated as errors."""
    x, y = pair(b, left, right, role)
    t = x.type
    assert isinstance(t, TileType)
    d = t.dtype
    if fn in _FLOAT_ONLY and not d.is_float:
        way = "use // to round down, or convert with .astype(T.f32)" if fn is Binary.DIV else "use .astype(T.f32)"
        b.fail(f"{role}: expected floats, got {d.name}; {way}")
    if fn in _INT_ONLY and not d.is_int:
        way = _FLOAT_WAY.get(fn, "") if d.is_float else ""
        b.fail(f"{role}: expected integers, got {d.name}{way}")
    if fn in _BITS and d.is_float:
        b.fail(f"{role}: expected integers or bool, got {d.name}; bitcast first if the bits are meant")
    if fn not in _BITS and d.is_bool:
        b.fail(f"{role}: expected numbers, got bool; convert with .astype(T.i32)")
    if d.is_float and d.bits == 8:
        b.fail(f"{role}: {d.name} has no arithmetic; convert with .astype(T.f32) and back")
    return _result(b.builder.value(ops.BinaryOp, (x, y), t, fn=fn), left, right)


def binary(b: Build, op: type[ast.operator], left: Abstract, right: Abstract) -> Abstract:
    """`left op right`."""
    symbol, fold, fn = _SYMBOLS[op]
    if isinstance(left, MulticastPointer) or isinstance(right, MulticastPointer):
        return _multicast_arithmetic(b, symbol, left, right)
    if isinstance(left, Pointer) or isinstance(right, Pointer):
        return _pointer_arithmetic(b, symbol, left, right)
    if isinstance(left, Known | Tup) and isinstance(right, Known | Tup) and fn is not None:
        folded = _fold(b, symbol, fold, left, right)
        if folded is not None:
            return folded
    if fn is None:
        b.fail("`@`: expected an elementwise operator; use T.mma(a, b, acc)")
    if fn is Binary.POW and isinstance(right, Known) and isinstance(left, Tile) and left.type.dtype.is_int:
        return _integer_power(b, left, right)
    return elementwise(b, fn, left, right, f"`{symbol}`")


def _fold(b: Build, symbol: str, fold: Callable[[Any, Any], Any], left: Abstract, right: Abstract) -> Abstract | None:
    try:
        x, y = as_value(left), as_value(right)
    except TypeError:
        if symbol == "+" and isinstance(left, Tup) and isinstance(right, Tup):
            return Tup(left.items + right.items)
        b.fail(f"`{symbol}`: expected numbers or tiles, got {describe(left)} and {describe(right)}")
    if symbol in ("**", "<<") and isinstance(x, int) and isinstance(y, int):
        bits = x.bit_length() * y if symbol == "**" else x.bit_length() + y
        if bits > _MAX_CONSTANT_BITS:
            b.fail(f"`{symbol}`: the constant {x} {symbol} {y} has more than {_MAX_CONSTANT_BITS} bits")
    try:
        value = fold(x, y)
    except (TypeError, ValueError, ArithmeticError) as error:
        b.fail(f"`{symbol}`: {describe(left)} and {describe(right)}: {error}")
    return _from_value(value)


def _integer_power(b: Build, base: Tile, exponent: Known) -> Tile:
    n = exponent.value
    if not isinstance(n, int) or isinstance(n, bool) or not 0 <= n <= 64:
        b.fail(f"`**`: an integer tile takes a constant exponent from 0 to 64, got {describe(exponent)}")
    result: Tile | None = None
    square = base
    while n:
        if n & 1:
            result = square if result is None else elementwise(b, Binary.MUL, result, square, "`**`")
        n >>= 1
        if n:
            square = elementwise(b, Binary.MUL, square, square, "`**`")
    return result or Tile(constant(b, 1, base.type.dtype, base.type.shape))


def _multicast_arithmetic(b: Build, symbol: str, left: Abstract, right: Abstract) -> MulticastPointer:
    """A multicast address some elements on: it stays one address of all ranks' parts, never a tile of addresses."""
    if symbol == "+" and isinstance(right, MulticastPointer):
        left, right = right, left
    number = isinstance(right, Known) and is_number(right) and isinstance(right.value, int)
    scalar = isinstance(right, Tile) and right.type.is_scalar and right.type.dtype.is_int
    if symbol not in ("+", "-") or not isinstance(left, MulticastPointer) or not (number or scalar):
        b.fail(
            f"`{symbol}`: expected a multicast address and a scalar integer offset, got {describe(left)} and "
            f"{describe(right)}; view the elements with T.unsafe.multicast_view(pointer, extent), and cut the view"
        )
    if isinstance(right, Known):
        right = Tile(constant(b, right.value, i64))
    assert isinstance(right, Tile)
    step = cast(b, right.value, i64)
    zero = constant(b, 0, i64) if left.offset is None else left.offset
    fn = ops.Binary.ADD if symbol == "+" else ops.Binary.SUB
    return replace(left, offset=b.builder.value(ops.BinaryOp, (zero, step), step.type, fn=fn))


def _pointer_arithmetic(b: Build, symbol: str, left: Abstract, right: Abstract) -> Pointer:
    if symbol == "+" and isinstance(right, Pointer) and not isinstance(left, Pointer):
        left, right = right, left
    if symbol not in ("+", "-") or not isinstance(left, Pointer) or isinstance(right, Pointer):
        b.fail(
            f"`{symbol}`: expected a pointer and an integer offset, got {describe(left)} and {describe(right)}; "
            "pointers take + and - of integers, counted in elements"
        )
    if is_number(right):
        assert isinstance(right, Known)
        if not isinstance(right.value, int):
            b.fail(f"`{symbol}`: expected an integer offset, got {describe(right)}")
        right = Tile(constant(b, right.value, i64))
    if not isinstance(right, Tile) or not right.type.dtype.is_int:
        b.fail(f"`{symbol}`: expected an integer offset, got {describe(right)}")
    offset = right.value
    if symbol == "-":
        # Widened first: the negative of an unsigned or of the smallest signed offset would wrap.
        wide = cast(b, offset, i64)
        offset = b.builder.value(ops.UnaryOp, (wide,), wide.type, fn=Unary.NEG)
    from_shape, to_shape = left.type.shape, right.type.shape
    shape = from_shape
    if from_shape != to_shape:
        if from_shape and to_shape and from_shape != to_shape:
            b.fail(
                f"`{symbol}`: pointers {left.type} and offsets {right.type}: expected one shape, "
                "or a scalar on one side"
            )
        shape = from_shape or to_shape
    pointer = left.value
    p = left.type
    if p.shape != shape:
        pointer = b.builder.value(ops.PtrBroadcast, (pointer,), PointerType(p.dtype, shape, p.space))
    return Pointer(
        b.builder.value(ops.PtrOffset, (pointer, broadcast_to(b, offset, shape)), PointerType(p.dtype, shape, p.space))
    )


# ---------------------------------------------------------------- unary

_UNARY: Final[dict[type[ast.unaryop], tuple[str, Callable[[Any], Any]]]] = {
    ast.USub: ("-", operator.neg),
    ast.UAdd: ("+", operator.pos),
    ast.Invert: ("~", operator.invert),
}


def negate(b: Build, value: Abstract) -> Abstract:
    """`-value`."""
    return unary(b, ast.USub, value)


def unary(b: Build, op: type[ast.unaryop], value: Abstract) -> Abstract:
    """`-x`, `+x`, `~x` (`not x` is a condition)."""
    symbol, fold = _UNARY[op]
    if isinstance(value, Known) and is_number(value):
        try:
            return Known(fold(value.value))
        except TypeError as error:
            b.fail(f"`{symbol}`: {describe(value)}: {error}")
    if not isinstance(value, Tile):
        b.fail(f"`{symbol}`: expected a number or a tile, got {describe(value)}")
    t = value.type
    if symbol == "+":
        return value
    if symbol == "~" and t.dtype.is_float:
        b.fail(f"`~`: expected integers or bool, got {t.dtype.name}; bitcast first if the bits are meant")
    if symbol == "-" and t.dtype.is_bool:
        b.fail("`-`: expected numbers, got bool; convert with .astype(T.i32), or use ~ for not")
    if symbol == "-" and t.dtype.is_float and t.dtype.bits == 8:
        b.fail(f"`-`: {t.dtype.name} has no arithmetic; convert with .astype(T.f32) and back")
    fn = Unary.NEG if symbol == "-" else Unary.NOT
    return _result(b.builder.value(ops.UnaryOp, (value.value,), t, fn=fn), value)


# ---------------------------------------------------------------- comparison


def compare_tiles(b: Build, fn: Compare, left: Abstract, right: Abstract, role: str) -> Tile:
    """Elementwise comparison after promotion and broadcasting."""
    x, y = pair(b, left, right, role)
    t = x.type
    assert isinstance(t, TileType)
    if fn is Compare.AT_LEAST and not t.dtype.is_int:
        b.fail(f"{role}: expected integers, got {t.dtype.name}")
    return Tile(b.builder.value(ops.CompareOp, (x, y), BOOL.with_shape(t.shape), fn=fn))


def compare(b: Build, op: ast.cmpop, left: Abstract, right: Abstract) -> Abstract:
    """`left op right`, one link of a chain."""
    match op:
        case ast.Is() | ast.IsNot():
            return _is(b, left, right, isinstance(op, ast.IsNot))
        case ast.In() | ast.NotIn():
            return _in(b, left, right, isinstance(op, ast.NotIn))
    symbol, fold, fn = _COMPARES[type(op)]
    if isinstance(left, Known | Tup) and isinstance(right, Known | Tup):
        try:
            return Known(bool(fold(as_value(left), as_value(right))))
        except TypeError as error:
            b.fail(f"`{symbol}`: {describe(left)} and {describe(right)}: {error}")
    if left == Known(None) or right == Known(None):
        b.fail(f"`{symbol}`: {describe(left)} and {describe(right)}; test for None with `is`")
    return compare_tiles(b, fn, left, right, f"`{symbol}`")


def _is(b: Build, left: Abstract, right: Abstract, negated: bool) -> Known:
    if Known(None) not in (left, right):
        if not (isinstance(left, Known) and isinstance(right, Known)) or is_number(left) or is_number(right):
            b.fail(f"`is`: expected None or a dtype on one side, got {describe(left)} and {describe(right)}; use ==")
        return Known((left.value is right.value) != negated)
    # A run-time value is never None, so this is decided while compiling.
    return Known((left == right) != negated)


def _in(b: Build, left: Abstract, right: Abstract, negated: bool) -> Known:
    try:
        return Known((as_value(left) in as_value(right)) != negated)
    except TypeError:
        b.fail(f"`in`: expected compile-time values, got {describe(left)} and {describe(right)}; write comparisons")
