"""Lowering of constants, ids and elementwise functions, by the exact rules of `ir.ops`.

Floats narrower than f32 are added, subtracted and multiplied as they are (rounding once is the same as through
f32) and go through f32 for everything else. Contraction to fma is off; `fma` is asked for by name.
"""

from __future__ import annotations

from typing import Final

from peertile.backends.cuda.spelling import BITS, REGISTER, UNSIGNED, literal
from peertile.backends.cuda.state import Emitter, Expr, Ranks, Symmetric, View, lowers, tile_of
from peertile.dtypes import DType, Kind, f32
from peertile.ir import ops
from peertile.ir.core import Value
from peertile.ir.ops import Binary, Compare, Unary
from peertile.ir.types import ViewType

__all__: list[str] = []


@lowers(ops.Const)
def _const(e: Emitter, op: ops.Const) -> None:
    dtype, value = tile_of(op.result).dtype, op.attrs["value"]
    text = None if dtype.is_bool else literal(value, dtype)
    if text is not None:
        e.values[op.result] = Expr(text, is_literal=True)
    else:
        e.define(op.result, e.constant(value, dtype))


# ---------------------------------------------------------------- ids and extents


@lowers(ops.ProgramId)
def _program_id(e: Emitter, op: ops.ProgramId) -> None:
    axis = op.attrs["axis"]
    e.values[op.result] = Expr(e.program_ids[axis]) if axis < e.kernel.grid_rank else Expr("0", is_literal=True)


@lowers(ops.NumPrograms)
def _num_programs(e: Emitter, op: ops.NumPrograms) -> None:
    e.set(op.result, f"_grid{op.attrs['axis']}")


def _ranks(e: Emitter, value: Value) -> Ranks:
    symmetric = e.values[value]
    assert isinstance(symmetric, Symmetric)
    return e.ranks[symmetric.table]


@lowers(ops.Rank)
def _rank(e: Emitter, op: ops.Rank) -> None:
    e.set(op.result, _ranks(e, op.operands[0]).rank)


@lowers(ops.NumRanks)
def _num_ranks(e: Emitter, op: ops.NumRanks) -> None:
    e.set(op.result, _ranks(e, op.operands[0]).size)


def _extents(e: Emitter, value: Value) -> tuple[str, ...]:
    view = e.values[value]
    assert isinstance(view, View | Symmetric)
    return view.extents


@lowers(ops.Extent)
def _extent(e: Emitter, op: ops.Extent) -> None:
    e.values[op.result] = _index(_extents(e, op.operands[0])[op.attrs["axis"]])


def _index(text: str) -> Expr:
    return Expr(text, is_literal=text.lstrip("-").isdigit())


@lowers(ops.NumTiles)
def _num_tiles(e: Emitter, op: ops.NumTiles) -> None:
    extent = _extents(e, op.operands[0])[op.attrs["axis"]]
    e.define(op.result, _tiles(e, extent, op.attrs["size"]))


def _tiles(e: Emitter, extent: str, size: int) -> str:
    extent = f"tl.full((), {extent}, tl.int64)" if extent.isdigit() else extent
    return e.call("_cdiv", extent, str(size))


@lowers(ops.TileIndex)
def _tile_index(e: Emitter, op: ops.TileIndex) -> None:
    view = e.view(op.operands[0])
    assert isinstance(view.type, ViewType)
    partition = view.type.partition
    assert partition is not None
    shape = partition.tile_shape
    rest = e.variable(op.operands[1])
    swizzled = partition.swizzle > 1 and len(shape) >= 2
    first = 2 if swizzled else 1
    for axis in reversed(range(first, len(shape))):
        if partition.single and partition.single[axis]:
            e.values[op.results[axis]] = _index("0")
            continue
        count = e.let_own("tiles", _tiles(e, view.extents[axis], shape[axis]))
        e.define(op.results[axis], f"{rest} % {count}")
        rest = e.let_own("rest", f"{rest} // {count}")
    if not swizzled:
        e.set(op.results[0], rest)
        return
    m, n = (e.let_own("tiles", _tiles(e, view.extents[k], shape[k])) for k in (0, 1))
    group = e.let_own("group", f"{rest} // ({n} * {partition.swizzle})")
    inside = e.let_own("inside", f"{rest} % ({n} * {partition.swizzle})")
    names = [e.names.fresh(op.results[k].hint, "i") for k in (0, 1)]
    call = e.call("_swizzled", inside, m, n, f"{group} * {partition.swizzle}", str(partition.swizzle))
    e.w.line(f"{', '.join(names)} = {call}")
    for result, name in zip(op.results, names, strict=False):
        e.set(result, name)


@lowers(ops.Iota)
def _iota(e: Emitter, op: ops.Iota) -> None:
    t = tile_of(op.result)
    text = f"tl.arange(0, {t.shape[0]})"
    e.define(op.result, text if t.dtype.name == "i32" else f"{text}.to({REGISTER[t.dtype.name]})")


# ---------------------------------------------------------------- functions of one operand

_LIBRARY: Final = {
    Unary.EXP: "exp", Unary.EXP2: "exp2", Unary.LOG: "log", Unary.LOG2: "log2", Unary.RSQRT: "rsqrt", Unary.SIN: "sin",
    Unary.COS: "cos", Unary.TAN: "tan", Unary.SINH: "sinh", Unary.COSH: "cosh", Unary.TANH: "tanh", Unary.ERF: "erf",
    Unary.FLOOR: "floor", Unary.CEIL: "ceil", Unary.ROUND: "rint",
}  # fmt: skip


def widened(e: Emitter, text: str, dtype: DType) -> tuple[str, DType]:
    """A float expression as f32 where it is narrower."""
    return (f"{text}.to(tl.float32)", f32) if dtype.bits < 32 else (text, dtype)


def narrowed(text: str, dtype: DType) -> str:
    return f"({text}).to({REGISTER[dtype.name]})" if dtype.bits < 32 else text


def _sign(dtype: DType) -> int:
    return -(1 << (dtype.bits - 1))


@lowers(ops.UnaryOp)
def _unary(e: Emitter, op: ops.UnaryOp) -> None:
    fn, dtype = op.attrs["fn"], tile_of(op.result).dtype
    x = e.variable(op.operands[0])
    if fn is Unary.NOT:
        # Its own complement for a bool, all ones for integers: `~` of an unsigned tile depends on Triton's version.
        e.define(op.result, f"{x} == 0" if dtype.is_bool else f"{x} ^ {-1 if dtype.is_signed else dtype.max}")
    elif fn is Unary.NEG:
        text = f"0 - {x}" if dtype.is_int else e.call("_flip_sign", x, BITS[dtype.bits], str(_sign(dtype)))
        e.define(op.result, text)
    elif fn is Unary.ABS:
        if dtype.is_float:
            e.define(op.result, e.call("_drop_sign", x, BITS[dtype.bits], str(-_sign(dtype) - 1)))
        elif dtype.is_signed:
            e.define(op.result, f"tl.where({x} < 0, 0 - {x}, {x})")
        else:
            e.alias(op.result, op.operands[0])
    else:
        wide, wide_dtype = widened(e, x, dtype)
        if fn is Unary.EXP2 and dtype.bits == 32 and _is_above(op.operands[0], -126):
            e.define(op.result, e.call("_exp2_normal", wide))
            return
        e.define(op.result, narrowed(_float_unary(e, fn, wide, wide_dtype), dtype))


def _is_above(value: Value, least: float) -> bool:
    """Whether a tile is the maximum of something and a constant of `least` or more."""
    op = value.op
    if not isinstance(op, ops.BinaryOp) or op.attrs["fn"] is not Binary.MAX:
        return False
    sides = (_under(side).op for side in op.operands)
    return any(isinstance(side, ops.Const) and side.attrs["value"] >= least for side in sides)


def _flushed_power(op: ops.Select) -> Value | None:
    """The exponent where small powers of two are replaced by zero: `where(x < -126, 0, exp2(x))` of f32."""
    # Only constants may be repeated: a comparison or a power that is would be of another shape than the result.
    less, zero, power = op.operands[0].op, _under(op.operands[1]).op, op.operands[2].op
    if not (isinstance(less, ops.CompareOp) and less.attrs["fn"] is Compare.LT and isinstance(zero, ops.Const)):
        return None
    if not (isinstance(power, ops.UnaryOp) and power.attrs["fn"] is Unary.EXP2 and zero.attrs["value"] == 0):
        return None
    x, least = power.operands[0], _under(less.operands[1]).op
    is_same = less.operands[0] is x and isinstance(least, ops.Const) and least.attrs["value"] == -126
    return x if is_same and tile_of(x).dtype.name == "f32" else None


def _under(value: Value) -> Value:
    """What a value repeats."""
    while isinstance(value.op, ops.Broadcast | ops.Reshape):
        value = value.op.operands[0]
    return value


def _float_unary(e: Emitter, fn: Unary, x: str, dtype: DType) -> str:
    if fn is Unary.SQRT:
        return f"tl.sqrt_rn({x})" if dtype.bits == 32 else f"libdevice.sqrt({x})"
    if fn is Unary.SIGMOID:
        return e.call("_sigmoid_f32" if dtype.bits == 32 else "_sigmoid", x)
    return f"libdevice.{_LIBRARY[fn]}({x})"


# ---------------------------------------------------------------- functions of two operands

_OPERATOR: Final = {
    Binary.ADD: "+", Binary.SUB: "-", Binary.MUL: "*", Binary.AND: "&", Binary.OR: "|", Binary.XOR: "^",
}  # fmt: skip
_COMPARE: Final = {
    Compare.EQ: "==", Compare.NE: "!=", Compare.LT: "<", Compare.LE: "<=", Compare.GT: ">", Compare.GE: ">=",
}  # fmt: skip
_SIGNED: Final = {
    Binary.QUOT: "_quot", Binary.REM: "_rem", Binary.FLOORDIV: "_floordiv", Binary.MOD: "_mod",
    Binary.SHL: "_shl", Binary.SHR: "_sar",
}  # fmt: skip
_UNSIGNED: Final = {
    Binary.QUOT: "_uquot", Binary.REM: "_urem", Binary.FLOORDIV: "_uquot", Binary.MOD: "_urem",
    Binary.SHL: "_shl", Binary.SHR: "_shr",
}  # fmt: skip


def _pair(e: Emitter, a: Value, b: Value) -> tuple[str, str]:
    """Operands of an operator: at most one may be a literal, the other gives the type."""
    if e.is_literal(a) and e.is_literal(b):
        return e.variable(a), e.text(b)
    return _signed_literal(e, a), _signed_literal(e, b)


def _signed_literal(e: Emitter, v: Value) -> str:
    text = e.text(v)
    return f"({text})" if text.startswith("-") else text


@lowers(ops.BinaryOp)
def _binary(e: Emitter, op: ops.BinaryOp) -> None:
    fn, dtype = op.attrs["fn"], tile_of(op.result).dtype
    a, b = op.operands
    if fn in _OPERATOR:
        x, y = _pair(e, a, b)
        e.define(op.result, f"{x} {_OPERATOR[fn]} {y}")
    elif dtype.is_float:
        e.define(op.result, _float_binary(e, fn, a, b, dtype))
    elif fn in (Binary.MIN, Binary.MAX):
        e.define(op.result, f"tl.{'minimum' if fn is Binary.MIN else 'maximum'}({e.typed(a)}, {e.typed(b)})")
    else:
        e.define(op.result, _int_binary(e, fn, a, b, dtype))


def _float_binary(e: Emitter, fn: Binary, a: Value, b: Value, dtype: DType) -> str:
    (x, wide), (y, _) = widened(e, e.typed(a), dtype), widened(e, e.typed(b), dtype)
    if fn in (Binary.MIN, Binary.MAX):
        # In f32, since Triton's own would give f32 for bf16 without being asked; exact either way.
        return narrowed(e.call("_min" if fn is Binary.MIN else "_max", x, y), dtype)
    if fn is Binary.DIV:
        return narrowed(f"tl.div_rn({x}, {y})" if wide.bits == 32 else f"{x} / {y}", dtype)
    return narrowed(f"libdevice.{'pow' if fn is Binary.POW else 'atan2'}({x}, {y})", dtype)


def _int_binary(e: Emitter, fn: Binary, a: Value, b: Value, dtype: DType) -> str:
    divisor = _literal_int(e, b)
    if divisor is not None and fn in _SIGNED:
        text = _by_constant(e, fn, e.typed(a), divisor, dtype)
        if text is not None:
            return text
    x, y = e.typed(a), e.typed(b)
    if fn in (Binary.SHL, Binary.SHR):
        name = (_SIGNED if dtype.is_signed else _UNSIGNED)[fn]
        return e.call(name, x, y, UNSIGNED[dtype.bits], str(dtype.bits))
    if fn is Binary.MULHI:
        return _mulhi(e, x, y, dtype)
    return e.call((_SIGNED if dtype.is_signed else _UNSIGNED)[fn], x, y)


def _literal_int(e: Emitter, v: Value) -> int | None:
    return int(e.text(v)) if e.is_literal(v) else None


def _by_constant(e: Emitter, fn: Binary, x: str, c: int, dtype: DType) -> str | None:
    """Division and shifts by a constant that needs none of the guards."""
    if fn in (Binary.SHL, Binary.SHR):
        return f"{x} {'<<' if fn is Binary.SHL else '>>'} {c}" if 0 <= c < dtype.bits else None
    if c <= 0:
        return None
    power = c & (c - 1) == 0
    if not dtype.is_signed or fn in (Binary.QUOT, Binary.REM):
        return f"{x} {'//' if fn in (Binary.QUOT, Binary.FLOORDIV) else '%'} {c}"
    if power:
        return f"{x} >> {c.bit_length() - 1}" if fn is Binary.FLOORDIV else f"{x} & {c - 1}"
    return None


def _mulhi(e: Emitter, x: str, y: str, dtype: DType) -> str:
    if dtype.bits == 64:
        return f"tl.umulhi({x}, {y})" if dtype.kind is Kind.UINT else e.call("_mulhi64", x, y)
    wide = (BITS if dtype.is_signed else UNSIGNED)[2 * dtype.bits]
    return e.call("_mulhi_narrow", x, y, wide, str(dtype.bits))


@lowers(ops.CompareOp)
def _compare(e: Emitter, op: ops.CompareOp) -> None:
    fn, dtype = op.attrs["fn"], tile_of(op.operands[0]).dtype
    x, y = _pair(e, *op.operands)
    if fn is Compare.AT_LEAST:
        difference = f"({x} - {y})"
        if not dtype.is_signed:
            difference += f".to({BITS[dtype.bits]}, bitcast=True)"
        e.define(op.result, f"{difference} >= 0")
        return
    if dtype.is_bool and fn not in (Compare.EQ, Compare.NE):
        x, y = f"{x}.to(tl.int32)", f"{y}.to(tl.int32)"
    if dtype.is_float and dtype.bits == 8:
        x, y = (f"{e.typed(v)}.to(tl.float32)" for v in op.operands)
    e.define(op.result, f"{x} {_COMPARE[fn]} {y}")


@lowers(ops.Select)
def _select(e: Emitter, op: ops.Select) -> None:
    exponent = _flushed_power(op)
    if exponent is not None:
        e.define(op.result, e.call("_exp2_flushed", e.typed(exponent)))
        return
    c, a, b = (e.typed(v) for v in op.operands)
    dtype = tile_of(op.result).dtype
    if dtype.is_float and dtype.bits == 8:
        a, b = (f"{x}.to(tl.int8, bitcast=True)" for x in (a, b))
        e.define(op.result, f"tl.where({c}, {a}, {b}).to({REGISTER[dtype.name]}, bitcast=True)")
    else:
        e.define(op.result, f"tl.where({c}, {a}, {b})")


@lowers(ops.Fma)
def _fma(e: Emitter, op: ops.Fma) -> None:
    dtype = tile_of(op.result).dtype
    a, b, c = (widened(e, e.typed(v), dtype)[0] for v in op.operands)
    e.define(op.result, narrowed(f"tl.fma({a}, {b}, {c})", dtype))
