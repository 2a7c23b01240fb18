"""Casts as LLVM IR: every pair of dtypes, with the rounding and saturation that ops.Cast states.

f64 and integers become floats narrower than f32 through f32, as the op says. Values come and go as batches
(one per unrolled vector) in register form: bf16 and fp8 are integers. Everything is emitted breadth-first
over the batch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from peertile.backends.cpu.text import LLVM, Function, literal, splat_literal, vector
from peertile.dtypes import DType, f16, f32, f64, i8, i16, i32, u8
from peertile.ir.ops import Rounding

__all__ = ["Batch", "cast", "constant", "each", "narrow", "widen"]

Batch = list[str]


def each(f: Function, template: str, *columns: Sequence[str] | str) -> Batch:
    """Emit `template` for every member of the batch; a plain string stands for every member alike."""
    n = max(len(c) for c in columns if not isinstance(c, str))
    rows = [[c if isinstance(c, str) else c[k] for c in columns] for k in range(n)]
    return [f.value(template.format(*row)) for row in rows]


def constant(value: int | float | bool, dtype: DType, lanes: int) -> str:
    """A constant of every lane (without its type)."""
    return splat_literal(literal(value, dtype), LLVM[dtype.name], lanes)


def _intrinsic(name: str, lanes: int, *types: str) -> str:
    return f"@llvm.{name}." + ".".join(f"v{lanes}{t}" if lanes > 1 else t for t in types)


def intrinsic(name: str, dtype: DType, lanes: int) -> str:
    """The name of an intrinsic overloaded on one register type."""
    kind = {"half": "f16", "float": "f32", "double": "f64"}.get(LLVM[dtype.name], LLVM[dtype.name])
    return _intrinsic(name, lanes, kind)


def widen(f: Function, x: Batch, dtype: DType, lanes: int) -> Batch:
    """f16, bf16, fp8 to f32, exactly. f32 and f64 are returned as they are."""
    v32, vf = vector("i32", lanes), vector("float", lanes)
    if dtype.name == "f16":
        return _soft_half(f, x, lanes) if f.soft_half else each(f, f"fpext {vector('half', lanes)} {{}} to {vf}", x)
    if dtype.name == "bf16":
        z = each(f, f"zext {vector('i16', lanes)} {{}} to {v32}", x)
        z = each(f, f"shl {v32} {{}}, {constant(16, i32, lanes)}", z)
        return each(f, f"bitcast {v32} {{}} to {vf}", z)
    if dtype.name == "f8e5m2":
        # fp8 e5m2 is the upper byte of an f16.
        v16 = vector("i16", lanes)
        z = each(f, f"zext {vector('i8', lanes)} {{}} to {v16}", x)
        z = each(f, f"shl {v16} {{}}, {constant(8, i16, lanes)}", z)
        return widen(f, each(f, f"bitcast {v16} {{}} to {vector('half', lanes)}", z), f16, lanes)
    if dtype.name == "f8e4m3":
        # Exponent and mantissa put in place give the value times 2^-120, denormals included.
        z = each(f, f"zext {vector('i8', lanes)} {{}} to {v32}", x)
        sign = each(f, f"and {v32} {{}}, {constant(0x80, i32, lanes)}", z)
        sign = each(f, f"shl {v32} {{}}, {constant(24, i32, lanes)}", sign)
        rest = each(f, f"and {v32} {{}}, {constant(0x7F, i32, lanes)}", z)
        is_nan = each(f, f"icmp eq {v32} {{}}, {constant(0x7F, i32, lanes)}", rest)
        rest = each(f, f"shl {v32} {{}}, {constant(20, i32, lanes)}", rest)
        value = each(f, f"bitcast {v32} {{}} to {vf}", rest)
        value = each(f, f"fmul {vf} {{}}, {constant(2.0**120, f32, lanes)}", value)
        value = _select(f, is_nan, [constant(math.nan, f32, lanes)] * len(x), value, "float", lanes)
        bits = each(f, f"bitcast {vf} {{}} to {v32}", value)
        bits = each(f, f"or {v32} {{}}, {{}}", bits, sign)
        return each(f, f"bitcast {v32} {{}} to {vf}", bits)
    return x


def _select(f: Function, c: Batch, a: Batch, b: Batch, element: str, lanes: int) -> Batch:
    t = vector(element, lanes)
    return each(f, f"select {vector('i1', lanes)} {{}}, {t} {{}}, {t} {{}}", c, a, b)


def narrow(f: Function, x: Batch, to: DType, lanes: int) -> Batch:
    """f32 to f16, bf16, fp8, to nearest even. f32 is returned as it is."""
    if to.name == "f16":
        if f.soft_half:
            bits = _to_small(f, x, to, lanes)
            return each(f, f"bitcast {vector('i16', lanes)} {{}} to {vector('half', lanes)}", bits)
        return each(f, f"fptrunc {vector('float', lanes)} {{}} to {vector('half', lanes)}", x)
    if to.name == "bf16":
        return _to_bf16(f, x, lanes)
    if to.bits == 8:
        return _to_small(f, x, to, lanes)
    return x


def _to_bf16(f: Function, x: Batch, lanes: int) -> Batch:
    v32, vf = vector("i32", lanes), vector("float", lanes)
    bits = each(f, f"bitcast {vf} {{}} to {v32}", x)
    upper = each(f, f"lshr {v32} {{}}, {constant(16, i32, lanes)}", bits)
    odd = each(f, f"and {v32} {{}}, {constant(1, i32, lanes)}", upper)
    odd = each(f, f"add {v32} {{}}, {constant(0x7FFF, i32, lanes)}", odd)
    rounded = each(f, f"add {v32} {{}}, {{}}", bits, odd)
    rounded = each(f, f"lshr {v32} {{}}, {constant(16, i32, lanes)}", rounded)
    # A NaN could round to infinity: keep its upper bits and make it quiet.
    is_nan = each(f, f"fcmp uno {vf} {{}}, {constant(0.0, f32, lanes)}", x)
    quiet = each(f, f"or {v32} {{}}, {constant(0x40, i32, lanes)}", upper)
    result = _select(f, is_nan, quiet, rounded, "i32", lanes)
    return each(f, f"trunc {v32} {{}} to {vector('i16', lanes)}", result)


def _soft_half(f: Function, x: Batch, lanes: int) -> Batch:
    """f16 to f32 on processors without an instruction for it, where LLVM would call a library that may be absent."""
    v32, vf, v1 = vector("i32", lanes), vector("float", lanes), vector("i1", lanes)
    h = each(f, f"bitcast {vector('half', lanes)} {{}} to {vector('i16', lanes)}", x)
    z = each(f, f"zext {vector('i16', lanes)} {{}} to {v32}", h)
    sign = each(f, f"and {v32} {{}}, {constant(0x8000, i32, lanes)}", z)
    sign = each(f, f"shl {v32} {{}}, {constant(16, i32, lanes)}", sign)
    rest = each(f, f"and {v32} {{}}, {constant(0x7FFF, i32, lanes)}", z)
    special = each(f, f"icmp uge {v32} {{}}, {constant(0x7C00, i32, lanes)}", rest)
    rest = each(f, f"shl {v32} {{}}, {constant(13, i32, lanes)}", rest)
    value = each(f, f"bitcast {v32} {{}} to {vf}", rest)
    value = each(f, f"fmul {vf} {{}}, {constant(2.0**112, f32, lanes)}", value)
    bits = each(f, f"bitcast {vf} {{}} to {v32}", value)
    full = each(f, f"or {v32} {{}}, {constant(0x7F800000, i32, lanes)}", rest)
    bits = each(f, f"select {v1} {{}}, {v32} {{}}, {v32} {{}}", special, full, bits)
    bits = each(f, f"or {v32} {{}}, {{}}", bits, sign)
    return each(f, f"bitcast {v32} {{}} to {vf}", bits)


# Mantissa bits, exponent bias, the code that everything larger becomes, the code of NaN.
_SMALL = {"f8e4m3": (3, 7, 0x7E, 0x7F), "f8e5m2": (2, 15, 0x7B, 0x7E), "f16": (10, 15, 0x7C00, 0x7E00)}


def _to_small(f: Function, x: Batch, to: DType, lanes: int) -> Batch:
    """f32 to a small float, as its bits. fp8 saturates, f16 becomes infinite."""
    v32, vf, v1 = vector("i32", lanes), vector("float", lanes), vector("i1", lanes)
    mantissa, bias, largest, nan = _SMALL[to.name]
    shift = 23 - mantissa
    bits = each(f, f"bitcast {vf} {{}} to {v32}", x)
    sign = each(f, f"lshr {v32} {{}}, {constant(32 - to.bits, i32, lanes)}", bits)
    sign = each(f, f"and {v32} {{}}, {constant(1 << (to.bits - 1), i32, lanes)}", sign)
    size = each(f, f"and {v32} {{}}, {constant(0x7FFFFFFF, i32, lanes)}", bits)
    # Normal: round to nearest even on the bits, then move the exponent's bias.
    odd = each(f, f"lshr {v32} {{}}, {constant(shift, i32, lanes)}", size)
    odd = each(f, f"and {v32} {{}}, {constant(1, i32, lanes)}", odd)
    normal = each(f, f"add {v32} {{}}, {constant((1 << (shift - 1)) - 1, i32, lanes)}", size)
    normal = each(f, f"add {v32} {{}}, {{}}", normal, odd)
    normal = each(f, f"lshr {v32} {{}}, {constant(shift, i32, lanes)}", normal)
    normal = each(f, f"sub {v32} {{}}, {constant((127 - bias) << mantissa, i32, lanes)}", normal)
    # Denormal: adding a number whose last bit is the smallest denormal makes the adder round.
    magic = 2.0 ** (23 + 1 - bias - mantissa)
    plain = each(f, f"bitcast {v32} {{}} to {vf}", size)
    denormal = each(f, f"fadd {vf} {{}}, {constant(magic, f32, lanes)}", plain)
    denormal = each(f, f"bitcast {vf} {{}} to {v32}", denormal)
    magic_bits = (127 + 23 + 1 - bias - mantissa) << 23
    denormal = each(f, f"sub {v32} {{}}, {constant(magic_bits, i32, lanes)}", denormal)
    is_small = each(f, f"icmp ult {v32} {{}}, {constant((127 + 1 - bias) << 23, i32, lanes)}", size)
    code = _select(f, is_small, denormal, normal, "i32", lanes)
    # From the infinity of f32 upwards only NaNs; below, everything beyond the largest saturates.
    is_big = each(f, f"icmp ugt {v32} {{}}, {constant(largest, i32, lanes)}", code)
    code = _select(f, is_big, [constant(largest, i32, lanes)] * len(x), code, "i32", lanes)
    is_nan = each(f, f"icmp ugt {v32} {{}}, {constant(0x7F800000, i32, lanes)}", size)
    code = each(f, f"select {v1} {{}}, {v32} {constant(nan, i32, lanes)}, {v32} {{}}", is_nan, code)
    code = each(f, f"or {v32} {{}}, {{}}", code, sign)
    return each(f, f"trunc {v32} {{}} to {vector(f'i{to.bits}', lanes)}", code)


_FLOAT_RANK = {"f8e4m3": 0, "f8e5m2": 0, "f16": 1, "bf16": 1, "f32": 2, "f64": 3}


_LARGEST = {"f16": 65504.0, "bf16": 3.3895313892515355e38, "f32": 3.4028234663852886e38, "f64": sys.float_info.max}


def _float_to_float(
    f: Function, x: Batch, a: DType, to: DType, lanes: int, rounding: Rounding, saturate: bool
) -> Batch:
    if saturate and to.name in _LARGEST:
        # Clipped where the largest number of the result is exact: an infinity becomes that one, not the source's.
        if to.bits == 64:
            return _clip(f, _float_nearest(f, x, a, to, lanes), to, _LARGEST[to.name], lanes)
        x, a = (x, a) if a.bits == 64 else (widen(f, x, a, lanes), f32)
        x = _clip(f, x, a, _LARGEST[to.name], lanes)
        if a == to:
            return x
    elif to.bits == 8 and rounding not in (Rounding.DEFAULT, Rounding.NEAREST):
        # What saturates is exact then; else the step upwards from the largest number would make it a NaN.
        x = _clip(f, x, a, 448.0 if to.name == "f8e4m3" else 57344.0, lanes)
    near = _float_nearest(f, x, a, to, lanes)
    exact = _FLOAT_RANK[to.name] > _FLOAT_RANK[a.name]
    if exact or rounding in (Rounding.DEFAULT, Rounding.NEAREST):
        return near
    return _direct(f, x, near, a, to, lanes, rounding)


def _clip(f: Function, x: Batch, a: DType, largest: float, lanes: int) -> Batch:
    """x between -largest and largest; NaN stays. An infinity of a narrower type becomes its largest number."""
    if a.bits < 32:
        largest = min(largest, _LARGEST.get(a.name, 57344.0))
        return narrow(f, _clip(f, widen(f, x, a, lanes), f32, largest, lanes), a, lanes)
    if a.name == "f32":
        largest = min(largest, _LARGEST["f32"])
    t, v1 = vector(LLVM[a.name], lanes), vector("i1", lanes)
    for condition, limit in (("ogt", largest), ("olt", -largest)):
        c = constant(limit, a, lanes)
        outside = each(f, f"fcmp {condition} {t} {{}}, {c}", x)
        x = each(f, f"select {v1} {{}}, {t} {c}, {t} {{}}", outside, x)
    return x


def _float_nearest(f: Function, x: Batch, a: DType, to: DType, lanes: int) -> Batch:
    if a.name == "f64":
        return narrow(f, each(f, f"fptrunc {vector('double', lanes)} {{}} to {vector('float', lanes)}", x), to, lanes)
    wide = widen(f, x, a, lanes)
    if to.name == "f64":
        return each(f, f"fpext {vector('float', lanes)} {{}} to {vector('double', lanes)}", wide)
    return narrow(f, wide, to, lanes)


def _direct(f: Function, x: Batch, near: Batch, a: DType, to: DType, lanes: int, rounding: Rounding) -> Batch:
    """From the nearest value to the one that `rounding` asks for, one step of the last place away at most."""
    up_type = f64 if a.name == "f64" else f32
    wide, back = (
        (x, _float_nearest(f, near, to, f64, lanes))
        if a.name == "f64"
        else (widen(f, x, a, lanes), widen(f, near, to, lanes))
    )
    t = vector(LLVM[up_type.name], lanes)
    bits_type = {8: i8, 16: i16, 32: i32}[to.bits]
    vb = vector(LLVM[bits_type.name], lanes)
    bits = near if LLVM[to.name] == LLVM[bits_type.name] else each(
        f, f"bitcast {vector(LLVM[to.name], lanes)} {{}} to {vb}", near
    )  # fmt: skip
    negative = each(f, f"icmp slt {vb} {{}}, {constant(0, bits_type, lanes)}", bits)
    above, below = each(f, f"fcmp ogt {t} {{}}, {{}}", back, wide), each(f, f"fcmp olt {t} {{}}, {{}}", back, wide)
    v1 = vector("i1", lanes)
    # `away`: the step goes away from zero. Towards zero otherwise; `step` says whether there is one.
    if rounding is Rounding.UP:
        step, away = below, each(f, f"xor {v1} {{}}, {splat_literal('true', 'i1', lanes)}", negative)
    elif rounding is Rounding.DOWN:
        step, away = above, negative
    else:
        step, away = _select(f, negative, below, above, "i1", lanes), [splat_literal("false", "i1", lanes)] * len(x)
    delta = _select(
        f, away, [constant(1, bits_type, lanes)] * len(x), [constant(-1, bits_type, lanes)] * len(x),
        LLVM[bits_type.name], lanes,
    )  # fmt: skip
    delta = _select(f, step, delta, [constant(0, bits_type, lanes)] * len(x), LLVM[bits_type.name], lanes)
    bits = each(f, f"add {vb} {{}}, {{}}", bits, delta)
    if LLVM[to.name] == LLVM[bits_type.name]:
        return bits
    return each(f, f"bitcast {vb} {{}} to {vector(LLVM[to.name], lanes)}", bits)


_ROUND = {Rounding.NEAREST: "roundeven", Rounding.UP: "ceil", Rounding.DOWN: "floor"}


def _float_to_int(f: Function, x: Batch, a: DType, to: DType, lanes: int, rounding: Rounding) -> Batch:
    wide, t = (x, f64) if a.name == "f64" else (widen(f, x, a, lanes), f32)
    if rounding in _ROUND:
        v = vector(LLVM[t.name], lanes)
        wide = each(f, f"call {v} {intrinsic(_ROUND[rounding], t, lanes)}({v} {{}})", wide)
    name = "fptosi.sat" if to.is_signed else "fptoui.sat"
    call = _intrinsic(name, lanes, f"i{to.bits}", f"f{t.bits}")
    return each(f, f"call {vector(LLVM[to.name], lanes)} {call}({vector(LLVM[t.name], lanes)} {{}})", wide)


def _int_to_float(f: Function, x: Batch, a: DType, to: DType, lanes: int) -> Batch:
    instruction = "sitofp" if a.is_signed else "uitofp"
    vi = vector(LLVM[a.name], lanes)
    if to.name in ("f32", "f64"):
        return each(f, f"{instruction} {vi} {{}} to {vector(LLVM[to.name], lanes)}", x)
    return narrow(f, each(f, f"{instruction} {vi} {{}} to {vector('float', lanes)}", x), to, lanes)


def _int_to_int(f: Function, x: Batch, a: DType, to: DType, lanes: int, saturate: bool) -> Batch:
    va, vt = vector(LLVM[a.name], lanes), vector(LLVM[to.name], lanes)
    if saturate:
        low, high = max(a.min, to.min), min(a.max, to.max)
        s = "s" if a.is_signed else "u"
        if low > a.min:
            x = each(f, f"call {va} {intrinsic(s + 'max', a, lanes)}({va} {{}}, {va} {constant(low, a, lanes)})", x)
        if high < a.max:
            x = each(f, f"call {va} {intrinsic(s + 'min', a, lanes)}({va} {{}}, {va} {constant(high, a, lanes)})", x)
    if a.bits == to.bits:
        return x
    if a.bits > to.bits:
        return each(f, f"trunc {va} {{}} to {vt}", x)
    return each(f, f"{'sext' if a.is_signed else 'zext'} {va} {{}} to {vt}", x)


def cast(
    f: Function, x: Batch, a: DType, to: DType, lanes: int,
    rounding: Rounding = Rounding.DEFAULT, saturate: bool = False,
) -> Batch:  # fmt: skip
    """Value conversion of a batch from `a` to `to`."""
    if a == to:
        return x
    if to.is_bool:
        if a.is_float:
            wide, t = (x, f64) if a.name == "f64" else (widen(f, x, a, lanes), f32)
            return each(f, f"fcmp une {vector(LLVM[t.name], lanes)} {{}}, {constant(0.0, t, lanes)}", wide)
        return each(f, f"icmp ne {vector(LLVM[a.name], lanes)} {{}}, {constant(0, a, lanes)}", x)
    if a.is_bool:
        base = to if to.is_int else u8
        ints = each(f, f"zext {vector('i1', lanes)} {{}} to {vector(LLVM[base.name], lanes)}", x)
        return ints if to.is_int else _int_to_float(f, ints, u8, to, lanes)
    if a.is_float:
        return (
            _float_to_float(f, x, a, to, lanes, rounding, saturate)
            if to.is_float
            else _float_to_int(f, x, a, to, lanes, rounding)
        )
    if not to.is_float:
        return _int_to_int(f, x, a, to, lanes, saturate)
    if saturate and to.bits < 32:
        return _float_to_float(f, _int_to_float(f, x, a, f32, lanes), f32, to, lanes, rounding, saturate)
    return _int_to_float(f, x, a, to, lanes)
