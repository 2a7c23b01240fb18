"""Words for random numbers, written out in operations that every target rounds alike. No op of their own.

Constants: Philox from Salmon et al. (2011), table 2; the inverse error function from Giles, "Approximating the
erfinv function" (GPU Computing Gems, 2011), single precision; the logarithm's polynomial from Cephes' `logf`.
"""

from __future__ import annotations

from typing import Final

import peertile.language as T
from peertile.dtypes import DType, b1, f32, i32, i64, u32, u64
from peertile.frontend.convert import broadcast_to, cast, constant, tile_arg
from peertile.frontend.registry import implements
from peertile.frontend.scope import Build
from peertile.frontend.values import Abstract, Tile, Tup
from peertile.ir import ops
from peertile.ir.core import Value
from peertile.ir.ops import Binary, Compare, Unary
from peertile.ir.types import TileType

__all__: list[str] = []

_ROUNDS: Final = 10
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85


def _binary(b: Build, fn: Binary, x: Value, y: Value | int | float) -> Value:
    t = x.type
    assert isinstance(t, TileType)
    other = y if isinstance(y, Value) else constant(b, y, t.dtype, t.shape)
    return b.builder.value(ops.BinaryOp, (x, other), t, fn=fn)


def _integers(b: Build, value: Abstract, role: str) -> Value:
    """An integer tile as u64."""
    tile = tile_arg(b, value, role)
    if not tile.type.dtype.is_int:
        b.fail(f"{role}: expected integers, got {tile.type}; convert with .astype(T.i64)")
    return cast(b, tile.value, u64)


def _halves(b: Build, x: Value) -> tuple[Value, Value]:
    """The lower and the upper 32 bits."""
    return cast(b, x, u32), cast(b, _binary(b, Binary.SHR, x, 32), u32)


def _philox(b: Build, role: str, seed: Abstract, offset: Abstract) -> list[Value]:
    key, counter = _integers(b, seed, f"{role}: seed"), _integers(b, offset, f"{role}: offset")
    k, c = key.type, counter.type
    assert isinstance(k, TileType)
    assert isinstance(c, TileType)
    if not k.is_scalar:
        b.fail(f"{role}: seed: expected an integer scalar, got a tile of shape {k.shape}; give tiles their own offsets")
    k0, k1 = _halves(b, key)
    low, high = _halves(b, counter)
    zero = constant(b, 0, u32, c.shape)
    words = [low, high, zero, zero]
    for step in range(_ROUNDS):
        if step:
            # Keys are scalars: these additions are done once, or while compiling.
            k0, k1 = _binary(b, Binary.ADD, k0, _W0), _binary(b, Binary.ADD, k1, _W1)
        hi0, lo0 = (_binary(b, fn, words[0], _M0) for fn in (Binary.MULHI, Binary.MUL))
        hi1, lo1 = (_binary(b, fn, words[2], _M1) for fn in (Binary.MULHI, Binary.MUL))
        first = _binary(b, Binary.XOR, _binary(b, Binary.XOR, hi1, words[1]), broadcast_to(b, k0, c.shape))
        third = _binary(b, Binary.XOR, _binary(b, Binary.XOR, hi0, words[3]), broadcast_to(b, k1, c.shape))
        words = [first, lo1, third, lo0]
    return words


@implements(T.rand_bits)
def _rand_bits(b: Build, seed: Abstract, offset: Abstract) -> Abstract:
    return Tile(_philox(b, "T.rand_bits", seed, offset)[0])


@implements(T.rand_bits4)
def _rand_bits4(b: Build, seed: Abstract, offset: Abstract) -> Abstract:
    return Tup(tuple(map(Tile, _philox(b, "T.rand_bits4", seed, offset))))


def _upper24(b: Build, role: str, seed: Abstract, offset: Abstract) -> Value:
    return _binary(b, Binary.SHR, _philox(b, role, seed, offset)[0], 8)


@implements(T.rand)
def _rand(b: Build, seed: Abstract, offset: Abstract) -> Abstract:
    bits = _upper24(b, "T.rand", seed, offset)
    return Tile(_binary(b, Binary.MUL, cast(b, bits, f32), 2.0**-24))


# ---------------------------------------------------------------- the normal distribution

_LOG: Final = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
    2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_CENTRAL: Final = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503, -0.00417768164,
    0.246640727, 1.50140941,
)  # fmt: skip
_TAIL: Final = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047,
    1.00167406, 2.83297682,
)  # fmt: skip
_SQRT2: Final = 1.4142135623730951


def _polynomial(b: Build, x: Value, coefficients: tuple[float, ...]) -> Value:
    """Horner's rule by fma, from the highest power."""
    t = x.type
    assert isinstance(t, TileType)
    total = constant(b, coefficients[0], t.dtype, t.shape)
    for c in coefficients[1:]:
        total = b.builder.value(ops.Fma, (total, x, constant(b, c, t.dtype, t.shape)), t)
    return total


def _bitcast(b: Build, x: Value, d: DType) -> Value:
    t = x.type
    assert isinstance(t, TileType)
    return b.builder.value(ops.Bitcast, (x,), t.with_dtype(d))


def _log(b: Build, x: Value) -> Value:
    """ln x of normal positive f32."""
    t = x.type
    assert isinstance(t, TileType)
    # x = m · 2^e with m in [√½, √2), by arithmetic on the bits: those of √½ are taken off and put back.
    root = 0x3F3504F3
    shifted = _binary(b, Binary.SUB, _bitcast(b, x, i32), root)
    e = _binary(b, Binary.SHR, shifted, 23)
    mantissa = _binary(b, Binary.ADD, _binary(b, Binary.AND, shifted, 0x7FFFFF), root)
    m = _binary(b, Binary.SUB, _bitcast(b, mantissa, f32), 1.0)
    scale = cast(b, e, f32)
    square = _binary(b, Binary.MUL, m, m)
    y = _binary(b, Binary.MUL, _binary(b, Binary.MUL, _polynomial(b, m, _LOG), m), square)
    y = b.builder.value(ops.Fma, (scale, constant(b, _LN2_LOW, f32, t.shape), y), t)
    y = b.builder.value(ops.Fma, (square, constant(b, -0.5, f32, t.shape), y), t)
    return b.builder.value(ops.Fma, (scale, constant(b, _LN2_HIGH, f32, t.shape), _binary(b, Binary.ADD, m, y)), t)


@implements(T.randn)
def _randn(b: Build, seed: Abstract, offset: Abstract) -> Abstract:
    bits = _upper24(b, "T.randn", seed, offset)
    # 2k + 1 - 2^24 for k of 24 bits: odd, below 2^24 in size, and so exact as f32. Never ±1.
    odd = _binary(b, Binary.SUB, _binary(b, Binary.ADD, cast(b, bits, i64), cast(b, bits, i64)), (1 << 24) - 1)
    x = _binary(b, Binary.MUL, cast(b, odd, f32), 2.0**-24)
    t = x.type
    assert isinstance(t, TileType)
    one = constant(b, 1.0, f32, t.shape)
    rest = _binary(b, Binary.MUL, _binary(b, Binary.SUB, one, x), _binary(b, Binary.ADD, one, x))
    log = _log(b, rest)
    w = b.builder.value(ops.UnaryOp, (log,), t, fn=Unary.NEG)
    central = _polynomial(b, _binary(b, Binary.SUB, w, 2.5), _CENTRAL)
    root = b.builder.value(ops.UnaryOp, (_binary(b, Binary.MAX, w, 0.0),), t, fn=Unary.SQRT)
    tail = _polynomial(b, _binary(b, Binary.SUB, root, 3.0), _TAIL)
    near = b.builder.value(ops.CompareOp, (w, constant(b, 5.0, f32, t.shape)), t.with_dtype(b1), fn=Compare.LT)
    chosen = b.builder.value(ops.Select, (near, central, tail), t)
    return Tile(_binary(b, Binary.MUL, _binary(b, Binary.MUL, chosen, x), _SQRT2))
