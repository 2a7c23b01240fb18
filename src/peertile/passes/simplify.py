"""Constant folding, canonical forms, peepholes, sharing of equal scalars, dead code. Effects stay as they are.

Folding follows the rules of `ops.Binary` with Python integers and must agree with the evaluator (a
test compares them). Floats are folded only where no rounding is involved. Expects and leaves verified IR.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from peertile.dtypes import DType
from peertile.ir import ops
from peertile.ir.core import Block, Builder, Effect, Kernel, Op, Value, walk
from peertile.ir.ops import Binary, Compare, Unary
from peertile.ir.types import TileType
from peertile.passes.rewrite import constant_of, leaving, replace_values

__all__ = ["fold_binary", "fold_compare", "simplify"]


def simplify(kernel: Kernel) -> Kernel:
    """Simplifies `kernel` in place until nothing changes; returns it."""
    changed = True
    while changed:
        changed = _rewrite(kernel)
        changed |= _share(kernel)
        changed |= _remove_dead(kernel)
    return kernel


# ---------------------------------------------------------------- folding


def _wrap(value: int, d: DType) -> int:
    value &= (1 << d.bits) - 1
    return value - (1 << d.bits) if d.is_signed and value >> (d.bits - 1) else value


def _quot(a: int, b: int) -> int:
    if b == 0:
        return 0
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


def _shr(a: int, b: int, d: DType) -> int:
    return a >> min(b % (1 << d.bits), d.bits)


def _shl(a: int, b: int, d: DType) -> int:
    count = b % (1 << d.bits)
    return a << count if count < d.bits else 0


_FOLDS: Final[dict[Binary, Callable[[int, int, DType], int]]] = {
    Binary.ADD: lambda a, b, d: a + b,
    Binary.SUB: lambda a, b, d: a - b,
    Binary.MUL: lambda a, b, d: a * b,
    Binary.FLOORDIV: lambda a, b, d: a // b if b else 0,
    Binary.MOD: lambda a, b, d: a % b if b else a,
    Binary.QUOT: lambda a, b, d: _quot(a, b),
    Binary.REM: lambda a, b, d: a - _quot(a, b) * b,
    Binary.MIN: lambda a, b, d: min(a, b),
    Binary.MAX: lambda a, b, d: max(a, b),
    Binary.AND: lambda a, b, d: a & b,
    Binary.OR: lambda a, b, d: a | b,
    Binary.XOR: lambda a, b, d: a ^ b,
    Binary.SHL: _shl,
    Binary.SHR: _shr,
    Binary.MULHI: lambda a, b, d: (a * b) >> d.bits,
}


def fold_binary(fn: Binary, a: int, b: int, d: DType) -> int | bool:
    """`fn` of two constants of an integer dtype or bool."""
    if d.is_bool:
        return bool(_FOLDS[fn](int(a), int(b), d))
    return _wrap(_FOLDS[fn](a, b, d), d)


_COMPARES: Final[dict[Compare, Callable[[Any, Any], bool]]] = {
    Compare.EQ: lambda a, b: a == b,
    Compare.NE: lambda a, b: a != b,
    Compare.LT: lambda a, b: a < b,
    Compare.LE: lambda a, b: a <= b,
    Compare.GT: lambda a, b: a > b,
    Compare.GE: lambda a, b: a >= b,
}


def fold_compare(fn: Compare, a: int, b: int, d: DType) -> bool:
    """`fn` of two constants of an integer dtype or bool."""
    if fn is Compare.AT_LEAST:
        return (a - b) % (1 << d.bits) < 1 << (d.bits - 1)
    return _COMPARES[fn](a, b)


_EXACT: Final = {"f64": 1 << 53, "f32": 1 << 24, "f16": 1 << 11, "bf16": 1 << 8, "f8e4m3": 16, "f8e5m2": 8}
"""Integers up to this magnitude are numbers of each float type."""


def _fold_cast(value: int | float | bool, src: DType, dst: DType, saturate: bool) -> int | float | bool | None:
    if isinstance(value, float):
        return None
    value = int(value)
    if dst.is_bool:
        return value != 0
    if dst.is_int:
        return max(dst.min, min(value, dst.max)) if saturate else _wrap(value, dst)
    return float(value) if abs(value) <= _EXACT[dst.name] else None


# ---------------------------------------------------------------- peepholes

_COMMUTATIVE: Final = frozenset(
    {Binary.ADD, Binary.MUL, Binary.MIN, Binary.MAX, Binary.AND, Binary.OR, Binary.XOR, Binary.MULHI}
)
_ZERO_RIGHT: Final = frozenset({Binary.ADD, Binary.SUB, Binary.OR, Binary.XOR, Binary.SHL, Binary.SHR})
_ONE_RIGHT: Final = frozenset({Binary.MUL, Binary.FLOORDIV, Binary.QUOT})
_SAME: Final = frozenset({Binary.AND, Binary.OR, Binary.MIN, Binary.MAX})

# A rule gives the value that an op's result is replaced by, or None.


def _tile(value: Value) -> TileType:
    assert isinstance(value.type, TileType)
    return value.type


def _const(op: Op, value: int | float | bool, t: TileType) -> Value:
    assert op.parent is not None
    return Builder(op.parent, op.loc, op).value(ops.Const, (), t, value=value)


def _binary(op: Op) -> Value | None:
    t, fn = _tile(op.result), op.attrs["fn"]
    x, y = op.operands
    a, b = constant_of(x), constant_of(y)
    if t.dtype.is_float:
        return x if fn in (Binary.MUL, Binary.DIV) and b == 1 else None
    if isinstance(a, int) and isinstance(b, int):
        return _const(op, fold_binary(fn, a, b, t.dtype), t)
    if a is not None and fn in _COMMUTATIVE:
        op.operands = [y, x]
        x, y, b = y, x, a
    if b is not None and not t.dtype.is_bool:
        if b == 0 and fn in _ZERO_RIGHT:
            return x
        if b == 1 and fn in _ONE_RIGHT:
            return x
        if b == 0 and fn in (Binary.MUL, Binary.AND):
            return y
    if b is not None and t.dtype.is_bool and fn in (Binary.AND, Binary.OR):
        return x if b is (fn is Binary.AND) else y
    if x is y and fn in _SAME:
        return x
    if x is y and t.is_scalar and fn in (Binary.SUB, Binary.XOR):
        return _const(op, False if t.dtype.is_bool else 0, t)
    return None


def _compare(op: Op) -> Value | None:
    d = _tile(op.operands[0]).dtype
    a, b = (constant_of(v) for v in op.operands)
    if isinstance(a, int) and isinstance(b, int):
        return _const(op, fold_compare(op.attrs["fn"], a, b, d), _tile(op.result))
    return None


def _unary(op: Op) -> Value | None:
    fn, x = op.attrs["fn"], op.operands[0]
    d, a = _tile(x).dtype, constant_of(x)
    if fn in (Unary.NOT, Unary.NEG) and isinstance(x.op, ops.UnaryOp) and x.op.attrs["fn"] is fn:
        return x.op.operands[0]
    if fn is Unary.NOT and isinstance(a, int):
        return _const(op, not a if d.is_bool else _wrap(~a, d), _tile(op.result))
    if fn is Unary.NEG and isinstance(a, int) and not d.is_float:
        return _const(op, _wrap(-a, d), _tile(op.result))
    return None


def _select(op: Op) -> Value | None:
    condition, a, b = op.operands
    known = constant_of(condition)
    if known is not None:
        return a if known else b
    return a if a is b else None


def _cast(op: Op) -> Value | None:
    x, src, dst = op.operands[0], _tile(op.operands[0]), _tile(op.result)
    if src == dst:
        return x
    value = constant_of(x)
    if value is None:
        return None
    folded = _fold_cast(value, src.dtype, dst.dtype, op.attrs["saturate"])
    return None if folded is None else _const(op, folded, dst)


def _bitcast(op: Op) -> Value | None:
    x, dst = op.operands[0], _tile(op.result)
    if x.type == dst:
        return x
    value = constant_of(x)
    if isinstance(value, int) and _tile(x).dtype.is_int and dst.dtype.is_int:
        return _const(op, _wrap(value, dst.dtype), dst)
    if isinstance(x.op, ops.Bitcast) and x.op.operands[0].type == dst:
        return x.op.operands[0]
    return None


def _same_shape(op: Op) -> Value | None:
    return op.operands[0] if op.operands[0].type == op.result.type else None


def _reshape(op: Op) -> Value | None:
    x = op.operands[0]
    if isinstance(x.op, ops.Reshape):
        op.operands = [x.op.operands[0]]
    return _same_shape(op)


def _permute(op: Op) -> Value | None:
    axes, x = op.attrs["axes"], op.operands[0]
    if isinstance(x.op, ops.Permute):
        inner = x.op.attrs["axes"]
        axes = op.attrs["axes"] = tuple(inner[k] for k in axes)
        op.operands = [x.op.operands[0]]
    return op.operands[0] if axes == tuple(range(len(axes))) else None


_RULES: Final[dict[type[Op], Callable[[Op], Value | None]]] = {
    ops.BinaryOp: _binary,
    ops.CompareOp: _compare,
    ops.UnaryOp: _unary,
    ops.Select: _select,
    ops.Cast: _cast,
    ops.Bitcast: _bitcast,
    ops.Broadcast: _same_shape,
    ops.Reshape: _reshape,
    ops.Permute: _permute,
}


def _rewrite(kernel: Kernel) -> bool:
    """One walk of the rules; whether anything changed."""
    replacements: dict[Value, Value] = {}

    def visit(block: Block) -> bool:
        changed = False
        for op in list(block.ops):
            op.operands = [replacements.get(v, v) for v in op.operands]
            for inner in op.blocks:
                changed |= visit(inner)
            rule = _RULES.get(type(op))
            value = rule(op) if rule is not None else None
            if value is not None and value is not op.result:
                replacements[op.result] = value
                block.ops.remove(op)
                changed = True
            elif isinstance(op, ops.If):
                changed |= _take_arm(block, op, replacements)
            elif isinstance(op, ops.Check) and constant_of(op.operands[0]) is True:
                block.ops.remove(op)
                changed = True
        return changed

    changed = visit(kernel.body)
    replace_values(kernel, replacements)
    return changed


def _take_arm(block: Block, op: Op, replacements: dict[Value, Value]) -> bool:
    """Puts the arm that a constant condition chooses in the place of the `if`, if it falls through."""
    known = constant_of(op.operands[0])
    if known is None:
        return False
    arm = op.blocks[0 if known else 1]
    end = arm.terminator
    if not isinstance(end, ops.Yield):
        return False
    at = block.ops.index(op)
    for inner in arm.ops:
        inner.parent = block
    block.ops[at : at + 1] = arm.ops[:-1]
    replacements |= dict(zip(op.results, end.operands, strict=True))
    return True


# ---------------------------------------------------------------- sharing and dead code


def _is_pure(op: Op) -> bool:
    return not op.blocks and not op.TERMINATOR and not op.effects


def _key(op: Op) -> tuple[Any, ...]:
    # repr, since -0.0 == 0.0 and nan != nan.
    attrs = tuple((k, repr(v)) for k, v in sorted(op.attrs.items()))
    return (type(op), tuple(id(v) for v in op.operands), attrs, tuple(v.type for v in op.results))


def _share(kernel: Kernel) -> bool:
    """One op for equal pure scalar ops, where the first is visible, and one check of one condition. Tiles
    are left to the backend: keeping one alive may cost more than making it again."""
    replacements: dict[Value, Value] = {}
    changed = False

    def visit(block: Block, known: dict[tuple[Any, ...], Op], checked: set[Value]) -> None:
        """`known` and `checked` are what they were when it returns."""
        nonlocal changed
        kept: list[Op] = []
        keys: list[tuple[Any, ...]] = []
        conditions: list[Value] = []
        for op in block.ops:
            op.operands = [replacements.get(v, v) for v in op.operands]
            isolated = isinstance(op, ops.ReduceWith | ops.ScanWith)
            for inner in op.blocks:
                visit(inner, {} if isolated else known, checked)
            if isinstance(op, ops.Check):
                # What was true on the way here still is: a value never changes.
                if op.operands[0] not in checked:
                    checked.add(op.operands[0])
                    conditions.append(op.operands[0])
                    kept.append(op)
                continue
            tiles = any(isinstance(v.type, TileType) and not v.type.is_scalar for v in op.results)
            if not _is_pure(op) or tiles or isinstance(op, ops.NewToken):
                kept.append(op)
                continue
            key = _key(op)
            first = known.setdefault(key, op)
            if first is op:
                keys.append(key)
                kept.append(op)
            else:
                replacements.update(zip(op.results, first.results, strict=True))
        changed |= len(kept) < len(block.ops)
        block.ops[:] = kept
        for key in keys:
            del known[key]
        checked.difference_update(conditions)

    visit(kernel.body, {}, set())
    return changed


def _remove_dead(kernel: Kernel) -> bool:
    """Removes ops without effect whose results nobody uses, inner first."""
    uses: dict[Value, int] = {}
    for op in walk(kernel.body):
        for v in op.operands:
            uses[v] = uses.get(v, 0) + 1
    removed = False

    def visit(block: Block) -> None:
        nonlocal removed
        kept: list[Op] = []
        for op in reversed(block.ops):
            if any(uses.get(v, 0) for v in op.results) or not _removable(op):
                for inner in reversed(op.blocks):
                    visit(inner)
                kept.append(op)
                continue
            for gone in (op, *(o for inner in op.blocks for o in walk(inner))):
                for v in gone.operands:
                    uses[v] -= 1
        removed |= len(kept) < len(block.ops)
        block.ops[:] = reversed(kept)

    visit(kernel.body)
    return removed


def _removable(op: Op) -> bool:
    """Whether nobody can tell that `op` is gone, given that its results are unused. A `loop` may never end."""
    if op.TERMINATOR or isinstance(op, ops.Loop | ops.Suspend):
        return False
    if not op.blocks or isinstance(op, ops.ReduceWith | ops.ScanWith):
        return not op.effects
    if not isinstance(op, ops.If | ops.For):
        return False
    endless = any(isinstance(inner, ops.Check | ops.Loop) for block in op.blocks for inner in walk(block))
    return op.effects <= {Effect.CONTROL} and not endless and not any(True for _ in leaving(op))
