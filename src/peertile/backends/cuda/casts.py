"""Lowering of casts: saturating where tile IR saturates, rounded as asked, NaN by rule."""

from __future__ import annotations

from typing import Final

from peertile.backends.cuda.spelling import BITS, REGISTER
from peertile.backends.cuda.state import Emitter, lowers, tile_of
from peertile.dtypes import DType, f32, f64, u8
from peertile.ir import ops
from peertile.ir.ops import Rounding

__all__: list[str] = []

LARGEST: Final = {
    "f16": 65504.0, "bf16": 3.3895313892515355e38, "f32": 3.4028234663852886e38, "f64": 1.7976931348623157e308,
    "f8e4m3": 448.0, "f8e5m2": 57344.0,
}  # fmt: skip
"""The largest finite number of each float type; exact in f32 but for f64's own."""

_DIRECTION: Final = {Rounding.UP: 1, Rounding.DOWN: -1, Rounding.ZERO: 0}
_INTEGRAL: Final = {Rounding.NEAREST: "rint", Rounding.UP: "ceil", Rounding.DOWN: "floor"}


@lowers(ops.Bitcast)
def _bitcast(e: Emitter, op: ops.Bitcast) -> None:
    a, r = tile_of(op.operands[0]).dtype, tile_of(op.result).dtype
    if a == r:
        e.alias(op.result, op.operands[0])
    else:
        e.define(op.result, f"{e.typed(op.operands[0])}.to({REGISTER[r.name]}, bitcast=True)")


@lowers(ops.Cast)
def _cast(e: Emitter, op: ops.Cast) -> None:
    src, dst = tile_of(op.operands[0]).dtype, tile_of(op.result).dtype
    if src == dst:
        e.alias(op.result, op.operands[0])
        return
    x = e.variable(op.operands[0])
    e.define(op.result, _converted(e, x, src, dst, op.attrs["rounding"], op.attrs["saturate"]))


def _to(x: str, dtype: DType) -> str:
    return f"{x}.to({REGISTER[dtype.name]})"


def _converted(e: Emitter, x: str, src: DType, dst: DType, rounding: Rounding, saturate: bool) -> str:
    if dst.is_bool:
        wide = _to(x, f32) if src.is_float and src.bits == 8 else x
        return f"{wide} != 0"
    if src.is_bool:
        # A bool as a byte is 0 or 1; wider integers and floats from there.
        x, src = (_to(x, u8), u8) if dst.is_float else (x, src)
        if not dst.is_float:
            return _to(x, dst)
    if dst.is_int:
        return _float_to_int(e, x, src, dst, rounding) if src.is_float else _int_to_int(x, src, dst, saturate)
    if src.is_int:
        if dst.bits >= 32:
            return _to(x, dst)
        x, src = e.let_own("wide", _to(x, f32)), f32
    return _float_to_float(e, x, src, dst, rounding, saturate)


def _int_to_int(x: str, src: DType, dst: DType, saturate: bool) -> str:
    if saturate:
        # Written as selects: Triton's clamp takes floats alone.
        if src.max > dst.max:
            x = f"tl.where({x} > {dst.max}, {dst.max}, {x})"
        if src.min < dst.min:
            x = f"tl.where({x} < {dst.min}, {dst.min}, {x})"
    return _to(x, dst)


def _float_to_int(e: Emitter, x: str, src: DType, dst: DType, rounding: Rounding) -> str:
    if src.bits < 32:
        x, src = _to(x, f32), f32
    if rounding in _INTEGRAL:
        x = f"libdevice.{_INTEGRAL[rounding]}({x})"
    # Truncation is what the conversion itself does: comparing before it gives the same saturation.
    return e.call("_float_to_int", x, REGISTER[dst.name], str(dst.min), str(dst.max), repr(float(dst.max + 1)))


def _float_to_float(e: Emitter, x: str, src: DType, dst: DType, rounding: Rounding, saturate: bool) -> str:
    directed = rounding in _DIRECTION
    if dst.bits > src.bits:
        wide = _to(x, f32) if src.bits == 8 else x
        if not saturate:
            return _to(wide, dst)
        # Nothing finite can overflow, but an infinity saturates all the same.
        clamped = e.call("_clamp_keep_nan", wide if dst.bits < 32 else _to(wide, dst), repr(LARGEST[dst.name]))
        return _to(clamped, dst) if dst.bits < 32 else clamped
    if src.bits < 32:
        x, src = e.let_own("wide", _to(x, f32)), f32
    if saturate or dst.bits == 8:
        x = e.let_own("wide", e.call("_clamp_keep_nan", x, repr(LARGEST[dst.name])))
    nearest = _nearest(x, src, dst)
    if not directed:
        return nearest
    near = e.let_own("near", nearest)
    back = e.let_own("back", _back(near, dst, src))
    sign = 1 << (dst.bits - 1)
    return e.call("_directed", x, near, back, BITS[dst.bits], str(sign), str(_DIRECTION[rounding]))


def _nearest(x: str, src: DType, dst: DType) -> str:
    if src == f64 and dst.bits < 32:
        return _to(_to(x, f32), dst)
    return _to(x, dst)


def _back(x: str, dst: DType, src: DType) -> str:
    return _to(_to(x, f32), src) if src == f64 and dst.bits < 32 else _to(x, src)
