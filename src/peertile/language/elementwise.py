"""Elementwise functions of tiles and scalars. Signatures and formulas; no bodies.

Functions of one float take f16, bf16, f32 and f64 and give the same type; integers and fp8 are cast
first. Functions of two arguments promote and broadcast them as operators do.
"""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

from typing import Any

from peertile.language.folds import NanRule
from peertile.language.tiles import Operand, Tile
from peertile.language.word import word

__all__ = [
    "abs",
    "at_least",
    "atan2",
    "cdiv",
    "ceil",
    "clamp",
    "cos",
    "cosh",
    "erf",
    "exp",
    "exp2",
    "floor",
    "fma",
    "log",
    "log2",
    "maximum",
    "minimum",
    "mod",
    "mulhi",
    "pow",
    "quot",
    "rem",
    "round",
    "rsqrt",
    "sigmoid",
    "sin",
    "sinh",
    "sqrt",
    "tan",
    "tanh",
]


@word
def exp(x: Operand) -> Tile:
    """result[i] = e^x[i].

    Example::

        T.exp(t)
    """


@word
def exp2(x: Operand) -> Tile:
    """result[i] = 2^x[i].

    Example::

        T.exp2(t)
    """


@word
def log(x: Operand) -> Tile:
    """result[i] = ln x[i].

    Example::

        T.log(t)
    """


@word
def log2(x: Operand) -> Tile:
    """result[i] = log₂ x[i].

    Example::

        T.log2(t)
    """


@word
def sqrt(x: Operand) -> Tile:
    """result[i] = √x[i], rounded correctly.

    Example::

        T.sqrt(t)
    """


@word
def rsqrt(x: Operand) -> Tile:
    """result[i] = 1 / √x[i].

    Example::

        T.rsqrt(t)
    """


@word
def sin(x: Operand) -> Tile:
    """result[i] = sin x[i], x in radians.

    Example::

        T.sin(t)
    """


@word
def cos(x: Operand) -> Tile:
    """result[i] = cos x[i], x in radians.

    Example::

        T.cos(t)
    """


@word
def tan(x: Operand) -> Tile:
    """result[i] = tan x[i], x in radians.

    Example::

        T.tan(t)
    """


@word
def sinh(x: Operand) -> Tile:
    """result[i] = sinh x[i].

    Example::

        T.sinh(t)
    """


@word
def cosh(x: Operand) -> Tile:
    """result[i] = cosh x[i].

    Example::

        T.cosh(t)
    """


@word
def tanh(x: Operand) -> Tile:
    """result[i] = tanh x[i].

    Example::

        T.tanh(t)
    """


@word
def erf(x: Operand) -> Tile:
    """result[i] = 2/√π ∫₀^x[i] e^(-u²) du.

    Example::

        T.erf(t)
    """


@word
def sigmoid(x: Operand) -> Tile:
    """result[i] = 1 / (1 + e^(-x[i])).

    Example::

        T.sigmoid(t)
    """


@word
def floor(x: Operand) -> Tile:
    """result[i] = the largest integer <= x[i], as a float.

    Example::

        T.floor(t)
    """


@word
def ceil(x: Operand) -> Tile:
    """result[i] = the smallest integer >= x[i], as a float.

    Example::

        T.ceil(t)
    """


@word
def round(x: Operand) -> Tile:
    """result[i] = x[i] rounded to the nearest integer, halves to even, as a float.

    Example::

        T.round(t)
    """


@word
def abs(x: Operand) -> Tile:
    """result[i] = |x[i]|; the most negative integer stays itself.

    Example::

        T.abs(t)
    """


@word
def minimum(a: Any, b: Any, nan: NanRule = NanRule.PROPAGATE) -> Tile:
    """result[i] = min(a[i], b[i]); NaN if either is NaN, or with `T.NanRule.IGNORE` only if both are.

    Example::

        T.minimum(t, 1.0)
    """


@word
def maximum(a: Any, b: Any, nan: NanRule = NanRule.PROPAGATE) -> Tile:
    """result[i] = max(a[i], b[i]); NaN if either is NaN, or with `T.NanRule.IGNORE` only if both are.

    Example::

        T.maximum(t, 0.0)
    """


@word
def clamp(x: Any, lo: Any, hi: Any) -> Tile:
    """result[i] = min(max(x[i], lo[i]), hi[i]); NaN if any is NaN.

    Example::

        T.clamp(t, -1.0, 1.0)
    """


@word
def fma(a: Any, b: Any, c: Any) -> Tile:
    """result[i] = a[i] · b[i] + c[i], rounded once. Floats.

    Example::

        T.fma(t, 2.0, t)
    """


@word
def pow(a: Any, b: Any) -> Tile:
    """result[i] = a[i] ^ b[i]. Floats.

    Example::

        T.pow(t, 3.0)
    """


@word
def atan2(y: Any, x: Any) -> Tile:
    """result[i] = the angle of the point (x[i], y[i]), from -π to π. Floats.

    Example::

        T.atan2(t, 2.0)
    """


@word
def mod(a: Any, b: Any) -> Tile:
    """result[i] = a[i] - b[i] · ⌊a[i] / b[i]⌋, as `%`: the sign of b. Integers; a[i] where b[i] = 0.

    Example::

        T.mod(n, 8)
    """


@word
def rem(a: Any, b: Any) -> Tile:
    """result[i] = a[i] - b[i] · trunc(a[i] / b[i]): the sign of a, as in C. Integers; a[i] where b[i] = 0.

    Example::

        T.rem(n, 8)
    """


@word
def quot(a: Any, b: Any) -> Tile:
    """result[i] = trunc(a[i] / b[i]), towards zero, as in C. Integers; 0 where b[i] = 0.

    Example::

        T.quot(n, 8)
    """


@word
def cdiv(a: Any, b: Any) -> Tile:
    """result[i] = ⌈a[i] / b[i]⌉. Integers; compile-time values give a compile-time value.

    Example::

        T.cdiv(n, 64)
    """


@word
def mulhi(a: Any, b: Any) -> Tile:
    """result[i] = the high half of the full product a[i] · b[i]. Integers.

    Example::

        T.mulhi(n, n)
    """


@word
def at_least(a: Any, b: Any) -> Tile:
    """result[i] = whether a[i] - b[i], wrapped and read as signed, is >= 0.

    The comparison for epochs: it stays right when they wrap. Integers of one type.

    Example::

        T.at_least(T.u32(5), T.u32(3))
    """
