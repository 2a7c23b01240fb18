"""Elementwise ops as LLVM IR, breadth-first over a batch of vectors: unary, binary, compare, fma, folds.

f16, bf16 are widened to f32 for each op and rounded after each op, so that results agree with the meaning
of the op whatever is fused with it. No memory access here.
"""

from __future__ import annotations

import math

from peertile.backends.cpu.convert import Batch, constant, each, intrinsic, narrow, widen
from peertile.backends.cpu.mathlib import Library
from peertile.backends.cpu.text import LLVM, Function, vector
from peertile.dtypes import DType, f32
from peertile.ir.ops import Binary, Compare, Fold, Unary

__all__ = ["FOLD_BINARY", "binary", "compare", "fma", "fold", "halves", "identity", "select", "splat", "unary"]

_DIRECT = {
    Unary.SQRT: "sqrt", Unary.FLOOR: "floor", Unary.CEIL: "ceil", Unary.ROUND: "roundeven", Unary.ABS: "fabs",
}  # fmt: skip


def _call_wide(
    f: Function, library: Library, fn: Unary | Binary, dtype: DType, lanes: int, *columns: Batch
) -> Batch:  # fmt: skip
    """Call a routine once for the whole batch: LLVM splits the wide vector op by op, which interleaves the
    dependency chains of the batch."""
    n = len(columns[0])
    element = LLVM[dtype.name]
    if n == 1 or lanes == 1:
        name = library.require(fn, dtype.name, lanes)
        t = vector(element, lanes)
        arguments = ", ".join(f"{t} {{}}" for _ in columns)
        return each(f, f"call {t} @{name}({arguments})", *columns)
    if n & (n - 1) or n * lanes > 64:
        half = n - 1 if n & 1 else n // 2
        first = _call_wide(f, library, fn, dtype, lanes, *[c[:half] for c in columns])
        return first + _call_wide(f, library, fn, dtype, lanes, *[c[half:] for c in columns])
    name = library.require(fn, dtype.name, lanes * n)
    t = vector(element, lanes * n)
    joined = [_join(f, c, element, lanes) for c in columns]
    result = f.value(f"call {t} @{name}({', '.join(f'{t} {j}' for j in joined)})")
    return [_part(f, result, element, lanes, k, n) for k in range(n)]


def _join(f: Function, parts: Batch, element: str, lanes: int) -> str:
    while len(parts) > 1:
        t = vector(element, lanes)
        mask = ", ".join(f"i32 {k}" for k in range(2 * lanes))
        parts = [
            f.value(f"shufflevector {t} {a}, {t} {b}, <{2 * lanes} x i32> <{mask}>")
            for a, b in zip(parts[::2], parts[1::2], strict=True)
        ]
        lanes *= 2
    return parts[0]


def _part(f: Function, whole: str, element: str, lanes: int, k: int, n: int) -> str:
    t = vector(element, lanes * n)
    mask = ", ".join(f"i32 {k * lanes + i}" for i in range(lanes))
    return f.value(f"shufflevector {t} {whole}, {t} poison, <{lanes} x i32> <{mask}>")


def unary(f: Function, library: Library, fn: Unary, dtype: DType, lanes: int, x: Batch) -> Batch:
    t = vector(LLVM[dtype.name], lanes)
    if fn is Unary.NOT:
        return each(f, f"xor {t} {{}}, {constant(True if dtype.is_bool else -1, dtype, lanes)}", x)
    if not dtype.is_float:
        if fn is Unary.NEG:
            return each(f, f"sub {t} {constant(0, dtype, lanes)}, {{}}", x)
        assert fn is Unary.ABS
        if not dtype.is_signed:
            return x
        return each(f, f"call {t} {intrinsic('abs', dtype, lanes)}({t} {{}}, i1 false)", x)
    if fn in (Unary.NEG, Unary.ABS) and dtype.name not in ("f32", "f64", "f16"):
        sign = 1 << (dtype.bits - 1)
        if fn is Unary.NEG:
            return each(f, f"xor {t} {{}}, {_bits(sign, dtype, lanes)}", x)
        return each(f, f"and {t} {{}}, {_bits(sign - 1, dtype, lanes)}", x)
    if fn is Unary.NEG:
        return each(f, f"fneg {t} {{}}", x)
    if dtype.bits < 32:
        return narrow(f, unary(f, library, fn, f32, lanes, widen(f, x, dtype, lanes)), dtype, lanes)
    if fn in _DIRECT:
        return each(f, f"call {t} {intrinsic(_DIRECT[fn], dtype, lanes)}({t} {{}})", x)
    return _call_wide(f, library, fn, dtype, lanes, x)


def _bits(value: int, dtype: DType, lanes: int) -> str:
    from_width = {8: "i8", 16: "i16"}[dtype.bits]
    signed = value - (1 << dtype.bits) if value >> (dtype.bits - 1) else value
    return f"splat ({from_width} {signed})" if lanes > 1 else str(signed)


_INT = {
    Binary.ADD: "add", Binary.SUB: "sub", Binary.MUL: "mul",
    Binary.AND: "and", Binary.OR: "or", Binary.XOR: "xor",
}  # fmt: skip
_FLOAT = {Binary.ADD: "fadd", Binary.SUB: "fsub", Binary.MUL: "fmul", Binary.DIV: "fdiv"}


def binary(
    f: Function, library: Library, fn: Binary, dtype: DType, lanes: int, a: Batch, b: Batch
) -> Batch:  # fmt: skip
    t = vector(LLVM[dtype.name], lanes)
    if not dtype.is_float:
        if fn in _INT:
            return each(f, f"{_INT[fn]} {t} {{}}, {{}}", a, b)
        return _int_binary(f, fn, dtype, lanes, a, b)
    if dtype.bits < 32:
        wide = binary(f, library, fn, f32, lanes, widen(f, a, dtype, lanes), widen(f, b, dtype, lanes))
        return narrow(f, wide, dtype, lanes)
    if fn in _FLOAT:
        return each(f, f"{_FLOAT[fn]} {t} {{}}, {{}}", a, b)
    if fn in (Binary.MIN, Binary.MAX):
        # `a < b ? a : b` is one instruction and gives b where either is NaN; only NaN in a is left.
        v1 = vector("i1", lanes)
        less = each(f, f"fcmp {'olt' if fn is Binary.MIN else 'ogt'} {t} {{}}, {{}}", a, b)
        pick = each(f, f"select {v1} {{}}, {t} {{}}, {t} {{}}", less, a, b)
        is_nan = each(f, f"fcmp uno {t} {{}}, {{}}", a, a)
        return each(f, f"select {v1} {{}}, {t} {{}}, {t} {{}}", is_nan, a, pick)
    return _call_wide(f, library, fn, dtype, lanes, a, b)


def _int_binary(f: Function, fn: Binary, dtype: DType, lanes: int, a: Batch, b: Batch) -> Batch:
    t, v1 = vector(LLVM[dtype.name], lanes), vector("i1", lanes)
    signed = dtype.is_signed
    s = "s" if signed else "u"
    zero = constant(0, dtype, lanes)
    if fn in (Binary.MIN, Binary.MAX):
        return each(f, f"call {t} {intrinsic(s + fn.value, dtype, lanes)}({t} {{}}, {t} {{}})", a, b)
    if fn in (Binary.SHL, Binary.SHR):
        last = constant(dtype.bits - 1, dtype, lanes)
        # A shift by the width or more is poison in LLVM: clamp it, and give 0 where it was clamped.
        amount = each(f, f"call {t} {intrinsic('umin', dtype, lanes)}({t} {{}}, {t} {last})", b)
        instruction = "shl" if fn is Binary.SHL else "ashr" if signed else "lshr"
        result = each(f, f"{instruction} {t} {{}}, {{}}", a, amount)
        if instruction == "ashr":
            return result
        inside = each(f, f"icmp ule {t} {{}}, {last}", b)
        return each(f, f"select {v1} {{}}, {t} {{}}, {t} {zero}", inside, result)
    if fn is Binary.MULHI:
        wide = vector(f"i{dtype.bits * 2}", lanes)
        extend = "sext" if signed else "zext"
        x, y = each(f, f"{extend} {t} {{}} to {wide}", a), each(f, f"{extend} {t} {{}} to {wide}", b)
        product = each(f, f"mul {wide} {{}}, {{}}", x, y)
        by = f"splat (i{dtype.bits * 2} {dtype.bits})" if lanes > 1 else str(dtype.bits)
        high = each(f, f"lshr {wide} {{}}, {by}", product)
        return each(f, f"trunc {wide} {{}} to {t}", high)
    # Division: no trap on 0 nor on min / -1; both are divided by 1 instead.
    is_zero = each(f, f"icmp eq {t} {{}}, {zero}", b)
    bad = is_zero
    if signed:
        low = each(f, f"icmp eq {t} {{}}, {constant(dtype.min, dtype, lanes)}", a)
        minus = each(f, f"icmp eq {t} {{}}, {constant(-1, dtype, lanes)}", b)
        overflow = each(f, f"and {v1} {{}}, {{}}", low, minus)
        bad = each(f, f"or {v1} {{}}, {{}}", is_zero, overflow)
    divisor = each(f, f"select {v1} {{}}, {t} {constant(1, dtype, lanes)}, {t} {{}}", bad, b)
    quotient = each(f, f"{s}div {t} {{}}, {{}}", a, divisor)
    product = each(f, f"mul {t} {{}}, {{}}", quotient, divisor)
    remainder = each(f, f"sub {t} {{}}, {{}}", a, product)
    if fn in (Binary.FLOORDIV, Binary.MOD) and signed:
        differs = each(f, f"xor {t} {{}}, {{}}", remainder, divisor)
        differs = each(f, f"icmp slt {t} {{}}, {zero}", differs)
        some = each(f, f"icmp ne {t} {{}}, {zero}", remainder)
        fix = each(f, f"and {v1} {{}}, {{}}", differs, some)
        less = each(f, f"sext {v1} {{}} to {t}", fix)
        quotient = each(f, f"add {t} {{}}, {{}}", quotient, less)
        more = each(f, f"select {v1} {{}}, {t} {{}}, {t} {zero}", fix, divisor)
        remainder = each(f, f"add {t} {{}}, {{}}", remainder, more)
    if fn in (Binary.FLOORDIV, Binary.QUOT):
        return each(f, f"select {v1} {{}}, {t} {zero}, {t} {{}}", is_zero, quotient)
    return each(f, f"select {v1} {{}}, {t} {{}}, {t} {{}}", is_zero, a, remainder)


_FCMP = {
    Compare.EQ: "oeq", Compare.NE: "une", Compare.LT: "olt",
    Compare.LE: "ole", Compare.GT: "ogt", Compare.GE: "oge",
}  # fmt: skip


def compare(f: Function, fn: Compare, dtype: DType, lanes: int, a: Batch, b: Batch) -> Batch:
    t = vector(LLVM[dtype.name], lanes)
    if dtype.is_float:
        if dtype.bits < 32:
            a, b, t = widen(f, a, dtype, lanes), widen(f, b, dtype, lanes), vector("float", lanes)
        return each(f, f"fcmp {_FCMP[fn]} {t} {{}}, {{}}", a, b)
    if fn is Compare.AT_LEAST:
        difference = each(f, f"sub {t} {{}}, {{}}", a, b)
        return each(f, f"icmp sge {t} {{}}, {constant(0, dtype, lanes)}", difference)
    condition = fn.value if fn in (Compare.EQ, Compare.NE) else ("s" if dtype.is_signed else "u") + fn.value
    return each(f, f"icmp {condition} {t} {{}}, {{}}", a, b)


def fma(f: Function, dtype: DType, lanes: int, a: Batch, b: Batch, c: Batch) -> Batch:
    if dtype.bits < 32:
        wide = [widen(f, x, dtype, lanes) for x in (a, b, c)]
        return narrow(f, fma(f, f32, lanes, *wide), dtype, lanes)
    t = vector(LLVM[dtype.name], lanes)
    return each(f, f"call {t} {intrinsic('fma', dtype, lanes)}({t} {{}}, {t} {{}}, {t} {{}})", a, b, c)


def select(f: Function, dtype: DType, lanes: int, c: Batch, a: Batch, b: Batch) -> Batch:
    t = vector(LLVM[dtype.name], lanes)
    return each(f, f"select {vector('i1', lanes)} {{}}, {t} {{}}, {t} {{}}", c, a, b)


def splat(f: Function, dtype: DType, lanes: int, x: str) -> str:
    """A scalar register in every lane."""
    element = LLVM[dtype.name]
    if lanes == 1:
        return x
    t = vector(element, lanes)
    one = f.value(f"insertelement {t} poison, {element} {x}, i64 0")
    return f.value(f"shufflevector {t} {one}, {t} poison, <{lanes} x i32> zeroinitializer")


FOLD_BINARY = {
    Fold.ADD: Binary.ADD, Fold.MUL: Binary.MUL, Fold.MAX: Binary.MAX, Fold.MIN: Binary.MIN,
    Fold.AND: Binary.AND, Fold.OR: Binary.OR, Fold.XOR: Binary.XOR,
}  # fmt: skip


def identity(fn: Fold, dtype: DType) -> int | float | bool:
    """What folding starts from."""
    if fn in (Fold.ADD, Fold.OR, Fold.XOR):
        return False if dtype.is_bool else 0.0 if dtype.is_float else 0
    if fn is Fold.MUL:
        return 1.0 if dtype.is_float else 1
    if fn is Fold.AND:
        return True if dtype.is_bool else -1 & ((1 << dtype.bits) - 1)
    if dtype.is_float:
        return -math.inf if fn is Fold.MAX else math.inf
    return dtype.min if fn is Fold.MAX else dtype.max


def halves(f: Function, x: str, element: str, lanes: int) -> tuple[str, str]:
    """The lower and the upper half of a vector."""
    if lanes == 2:
        low, high = (f.value(f"extractelement <2 x {element}> {x}, i64 {k}") for k in (0, 1))
        return low, high
    return _part(f, x, element, lanes // 2, 0, 2), _part(f, x, element, lanes // 2, 1, 2)


def fold(f: Function, library: Library, fn: Fold, dtype: DType, lanes: int, x: str) -> str:
    """Folds the lanes of one vector by halves; a fixed order."""
    element = LLVM[dtype.name]
    while lanes > 1:
        half = lanes // 2
        low, high = halves(f, x, element, lanes)
        (x,) = binary(f, library, FOLD_BINARY[fn], dtype, half, [low], [high])
        lanes = half
    return x
