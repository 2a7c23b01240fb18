"""What the arithmetic words of tile IR mean, on numpy arrays. No ops, no memory, no program.

Floats narrower than f32 compute in f32 and round once per operation. Functions that no processor
rounds correctly (exp, pow, …) compute in f64, so this is the value that a target approximates.
Callers run under `np.errstate(all="ignore")`: overflow and NaN are values here, not warnings.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from peertile.dtypes import DType, Kind, f32, u8
from peertile.ir.ops import Binary, Compare, Fold, Rounding, Unary
from peertile.memory_model import Cmp, Rmw

__all__ = ["Array", "apply_rmw", "binary", "cast", "compare", "fma", "fold", "satisfies", "unary", "widen"]

Array = npt.NDArray[Any]


def widen(x: Array) -> Array:
    """Narrow floats as f32; everything else as it is."""
    return x.astype(np.float32) if _is_narrow(x) else x


def _is_narrow(x: Array) -> bool:
    return x.dtype.itemsize < 4 and x.dtype.kind not in "biu"


def _unsigned(d: DType) -> np.dtype[Any]:
    return np.dtype(f"uint{d.itemsize * 8}")


def _signed(d: DType) -> np.dtype[Any]:
    return np.dtype(f"int{d.itemsize * 8}")


# ---------------------------------------------------------------- elementwise functions

_erf = np.frompyfunc(math.erf, 1, 1)


def _sigmoid(x: Array) -> Array:
    """By the exponential of -|x|, which cannot overflow: exact to the end of the small numbers."""
    e = np.exp(-np.abs(x))
    return np.asarray(np.where(x < 0, e, 1.0) / (1.0 + e))


_UNARY: Final[dict[Unary, Callable[[Array], Array]]] = {
    Unary.EXP: np.exp,
    Unary.EXP2: np.exp2,
    Unary.LOG: np.log,
    Unary.LOG2: np.log2,
    Unary.SQRT: np.sqrt,
    Unary.RSQRT: lambda x: 1 / np.sqrt(x),
    Unary.SIN: np.sin,
    Unary.COS: np.cos,
    Unary.TAN: np.tan,
    Unary.SINH: np.sinh,
    Unary.COSH: np.cosh,
    Unary.TANH: np.tanh,
    Unary.ERF: lambda x: np.asarray(_erf(x), np.float64),
    Unary.SIGMOID: _sigmoid,
    Unary.FLOOR: np.floor,
    Unary.CEIL: np.ceil,
    Unary.ROUND: np.rint,
}


def unary(fn: Unary, x: Array, d: DType) -> Array:
    """`fn` of each element."""
    if fn is Unary.NOT:
        return np.invert(x)
    if d.is_float and fn in (Unary.NEG, Unary.ABS):
        # By the sign bit, so that NaN and zero obey too.
        sign = _unsigned(d).type(1 << (d.bits - 1))
        bits = np.asarray(x).view(_unsigned(d))
        return np.asarray(bits ^ sign if fn is Unary.NEG else bits & ~sign).view(d.numpy)
    if fn is Unary.NEG:
        return np.negative(x)
    if fn is Unary.ABS:
        return np.abs(x)
    return _narrow(_UNARY[fn](x.astype(np.float64)), d)


def _narrow(x: Array, d: DType) -> Array:
    """An f64 result as `d`, through f32 where `d` is narrower than that."""
    return (x.astype(np.float32) if d.bits < 32 else x).astype(d.numpy)


_FLOAT_BINARY: Final[dict[Binary, Callable[[Array, Array], Array]]] = {
    Binary.ADD: np.add,
    Binary.SUB: np.subtract,
    Binary.MUL: np.multiply,
    Binary.DIV: np.divide,
    Binary.MIN: np.minimum,
    Binary.MAX: np.maximum,
}


def binary(fn: Binary, a: Array, b: Array, d: DType) -> Array:
    """`fn` of each pair of elements of dtype `d`."""
    if not d.is_float:
        return _INT_BINARY[fn](a, b, d)
    if fn in _FLOAT_BINARY:
        return _FLOAT_BINARY[fn](widen(a), widen(b)).astype(d.numpy)
    wide = np.power if fn is Binary.POW else np.arctan2
    return _narrow(wide(a.astype(np.float64), b.astype(np.float64)), d)


def _floordiv(a: Array, b: Array, d: DType) -> Array:
    return np.where(b == 0, d.numpy.type(0), np.floor_divide(a, np.where(b == 0, d.numpy.type(1), b)))


def _mod(a: Array, b: Array, d: DType) -> Array:
    return np.where(b == 0, a, np.remainder(a, np.where(b == 0, d.numpy.type(1), b)))


def _quot(a: Array, b: Array, d: DType) -> Array:
    # Flooring and truncating differ by one where the signs differ and something remains.
    rounded_down = np.asarray((_mod(a, b, d) != 0) & (b != 0) & ((a < 0) != (b < 0)))
    return np.asarray(np.add(_floordiv(a, b, d), rounded_down.astype(d.numpy)))


def _rem(a: Array, b: Array, d: DType) -> Array:
    return np.subtract(a, np.multiply(_quot(a, b, d), b))


def _shift_in_range(b: Array, d: DType) -> Array:
    return np.asarray(np.less(np.asarray(b).astype(_unsigned(d)), d.bits))


def _shl(a: Array, b: Array, d: DType) -> Array:
    inside = _shift_in_range(b, d)
    return np.where(inside, np.left_shift(a, np.where(inside, b, d.numpy.type(0))), d.numpy.type(0))


def _shr(a: Array, b: Array, d: DType) -> Array:
    # A shift by width - 1 of a signed number is its sign; of an unsigned one, one more step gives 0.
    inside = _shift_in_range(b, d)
    shifted: Array = np.right_shift(a, np.where(inside, b, d.numpy.type(d.bits - 1)))
    return shifted if d.is_signed else np.where(inside, shifted, d.numpy.type(0))


def _mulhi(a: Array, b: Array, d: DType) -> Array:
    wide = np.asarray(a).astype(object) * np.asarray(b).astype(object)
    return np.asarray(wide >> d.bits).astype(d.numpy)


_INT_BINARY: Final[dict[Binary, Callable[[Array, Array, DType], Array]]] = {
    Binary.ADD: lambda a, b, d: np.add(a, b),
    Binary.SUB: lambda a, b, d: np.subtract(a, b),
    Binary.MUL: lambda a, b, d: np.multiply(a, b),
    Binary.FLOORDIV: _floordiv,
    Binary.MOD: _mod,
    Binary.QUOT: _quot,
    Binary.REM: _rem,
    Binary.MIN: lambda a, b, d: np.minimum(a, b),
    Binary.MAX: lambda a, b, d: np.maximum(a, b),
    Binary.AND: lambda a, b, d: np.bitwise_and(a, b),
    Binary.OR: lambda a, b, d: np.bitwise_or(a, b),
    Binary.XOR: lambda a, b, d: np.bitwise_xor(a, b),
    Binary.SHL: _shl,
    Binary.SHR: _shr,
    Binary.MULHI: _mulhi,
}

_COMPARE: Final[dict[Compare, Callable[[Array, Array], Array]]] = {
    Compare.EQ: np.equal,
    Compare.NE: np.not_equal,
    Compare.LT: np.less,
    Compare.LE: np.less_equal,
    Compare.GT: np.greater,
    Compare.GE: np.greater_equal,
}


def compare(fn: Compare, a: Array, b: Array, d: DType) -> Array:
    """`fn` of each pair of elements of dtype `d`, as bool."""
    if fn is Compare.AT_LEAST:
        return np.asarray(np.greater_equal(np.subtract(a, b).astype(_signed(d)), 0))
    return _COMPARE[fn](widen(a), widen(b))


_WAIT: Final[dict[Cmp, Callable[[int, int], bool]]] = {
    Cmp.EQ: operator.eq,
    Cmp.NE: operator.ne,
    Cmp.GE: operator.ge,
    Cmp.LE: operator.le,
    Cmp.GT: operator.gt,
    Cmp.LT: operator.lt,
}


def satisfies(cmp: Cmp, value: Any, expected: Any, d: DType) -> bool:
    """Whether a wait for `value cmp expected` is over. On Python ints: a scheduler asks very often."""
    if cmp is Cmp.AT_LEAST:
        return (int(value) - int(expected)) % (1 << d.bits) < 1 << (d.bits - 1)
    return _WAIT[cmp](int(value), int(expected))


def fma(a: Array, b: Array, c: Array, d: DType) -> Array:
    """a · b + c, rounded once (to f32 first, where `d` is narrower)."""
    if d.bits < 64:
        # The product of two f32 is exact in f64; the sum is rounded to odd, so that rounding it again
        # to f32 gives what rounding the exact sum gives.
        product, c64 = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
        return _narrow(_add_to_odd(product, c64), d) if d.bits < 32 else _add_to_odd(product, c64).astype(np.float32)
    return _fma64(a, b, c)


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def _two_product(a: Array, b: Array) -> tuple[Array, Array]:
    p = a * b
    a1, b1 = a * 134217729.0, b * 134217729.0
    a1, b1 = a1 - (a1 - a), b1 - (b1 - b)
    a2, b2 = a - a1, b - b1
    return p, ((a1 * b1 - p) + a1 * b2 + a2 * b1) + a2 * b2


def _add_to_odd(a: Array, b: Array) -> Array:
    """a + b rounded to the neighbour with an odd last bit unless exact (Boldo and Melquiond)."""
    s, error = _two_sum(a, b)
    even = (np.asarray(s).view(np.int64) & 1) == 0
    toward = np.where(error > 0, np.inf, -np.inf)
    return np.where(np.isfinite(s) & (error != 0) & even, np.nextafter(s, toward), s)


def _fma64(a: Array, b: Array, c: Array) -> Array:
    ph, pl = _two_product(a, b)
    sh, sl = _two_sum(c, pl)
    vh, vl = _two_sum(ph, sh)
    exact = vh + _add_to_odd(sl, vl)
    # Splitting overflows for huge numbers: there the plain formula stands (one rounding more).
    # An exact zero has the sign of the plain formula, which is then exact too.
    return np.where(np.isfinite(exact) & (exact != 0), exact, a * b + c)


# ---------------------------------------------------------------- folding

_FOLD: Final[dict[Fold, Callable[..., Array]]] = {
    Fold.ADD: np.add.reduce,
    Fold.MUL: np.multiply.reduce,
    Fold.MAX: np.maximum.reduce,
    Fold.MIN: np.minimum.reduce,
    Fold.AND: np.bitwise_and.reduce,
    Fold.OR: np.bitwise_or.reduce,
    Fold.XOR: np.bitwise_xor.reduce,
}


def fold(fn: Fold, x: Array, axis: int, d: DType) -> Array:
    """Folds `axis` away. Sums and products of floats are folded in f64 and rounded at the end: a target
    may differ by n · eps · sum of |x|, with eps of f32 for narrower floats before its last rounding."""
    if d.is_float and fn in (Fold.ADD, Fold.MUL):
        return _narrow(_FOLD[fn](x.astype(np.float64), axis=axis), d)
    if fn in (Fold.ADD, Fold.MUL):
        return np.asarray(_FOLD[fn](x, axis=axis, dtype=x.dtype))
    return np.asarray(_FOLD[fn](widen(x), axis=axis)).astype(d.numpy)


# ---------------------------------------------------------------- conversion


def cast(x: Array, src: DType, dst: DType, rounding: Rounding = Rounding.DEFAULT, saturate: bool = False) -> Array:
    """`x` of dtype `src` as `dst`: the rules are in the docstring of `ops.Cast`."""
    if src == dst:
        return x
    if dst.is_bool:
        return np.not_equal(widen(x), 0)
    if src.is_bool:
        x, src = x.astype(np.uint8), u8
    if dst.is_int:
        return _float_to_int(x, dst, rounding) if src.is_float else _int_to_int(x, src, dst, saturate)
    if src.is_int and dst.bits < 32:
        x, src = x.astype(np.float32), f32
    if src.is_int:
        return x.astype(dst.numpy)
    return _float_to_float(x, dst, rounding, saturate)


def _int_to_int(x: Array, src: DType, dst: DType, saturate: bool) -> Array:
    if saturate:
        low, high = max(src.min, dst.min), min(src.max, dst.max)
        x = np.clip(x, src.numpy.type(low), src.numpy.type(high))
    return x.astype(dst.numpy)


_TO_INTEGRAL: Final[dict[Rounding, Callable[[Array], Array]]] = {
    Rounding.DEFAULT: np.trunc,
    Rounding.ZERO: np.trunc,
    Rounding.NEAREST: np.rint,
    Rounding.UP: np.ceil,
    Rounding.DOWN: np.floor,
}


def _float_to_int(x: Array, dst: DType, rounding: Rounding) -> Array:
    r = _TO_INTEGRAL[rounding](x.astype(np.float64))
    # 2^63 - 1 is no f64: compare with the power of two above it.
    too_big, too_small = r >= float(dst.max + 1), r <= float(dst.min)
    inside = np.where(too_big | too_small | np.isnan(r), 0.0, r).astype(dst.numpy)
    return np.where(too_big, dst.numpy.type(dst.max), np.where(too_small, dst.numpy.type(dst.min), inside))


def _float_to_float(x: Array, dst: DType, rounding: Rounding, saturate: bool) -> Array:
    wide = x.astype(np.float64)
    if saturate or dst.bits == 8:
        limit = _largest(dst)
        wide = np.clip(wide, -limit, limit)
    nearest = _narrow(wide, dst)
    if rounding in (Rounding.DEFAULT, Rounding.NEAREST) or dst.bits == 64:
        return nearest
    back = nearest.astype(np.float64)
    if rounding is Rounding.ZERO:
        wrong = np.abs(back) > np.abs(wide)
        up = wide < 0
    else:
        up = np.broadcast_to(rounding is Rounding.UP, np.shape(wide))
        wrong = np.where(up, back < wide, back > wide)
    return np.where(wrong, _neighbour(nearest, dst, up), nearest)


def _largest(d: DType) -> float:
    """The largest finite number of a float type."""
    if d.numpy.kind == "f" and d.bits in (16, 32, 64):
        return float(np.finfo(d.numpy).max)
    return {"bf16": 3.3895313892515355e38, "f8e4m3": 448.0, "f8e5m2": 57344.0}[d.name]


def _neighbour(x: Array, d: DType, up: Array) -> Array:
    """The next number of a float type above (or below) each element; through the bit pattern, which
    counts upwards with the magnitude."""
    bits = np.asarray(x).view(_unsigned(d)).astype(np.int64)
    sign = 1 << (d.bits - 1)
    key = np.where(bits >= sign, -(bits - sign), bits) + np.where(up, 1, -1)
    # Zero keeps the sign of where it was stepped to from.
    key = np.where((key == 0) & (bits >= sign), sign, key)
    return np.where(key < 0, sign - key, key).astype(_unsigned(d)).view(d.numpy)


# ---------------------------------------------------------------- atomic combination


def apply_rmw(kind: Rmw, old: Array, value: Array, d: DType) -> Array:
    """What an atomic read-modify-write leaves behind, for elements of dtype `d`."""
    if kind is Rmw.XCHG:
        return value
    if kind in (Rmw.ADD, Rmw.ADDF):
        return binary(Binary.ADD, old, value, d)
    if kind in (Rmw.AND, Rmw.OR, Rmw.XOR):
        return binary(Binary(kind.value), old, value, d)
    least = kind in (Rmw.MIN, Rmw.UMIN)
    if d.kind is Kind.FLOAT:
        return binary(Binary.MIN if least else Binary.MAX, old, value, d)
    as_type = _signed(d) if kind in (Rmw.MIN, Rmw.MAX) else _unsigned(d)
    a, b = np.asarray(old).view(as_type), np.asarray(value).view(as_type)
    return np.asarray(np.minimum(a, b) if least else np.maximum(a, b)).view(d.numpy)
