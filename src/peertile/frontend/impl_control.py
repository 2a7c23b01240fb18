"""Words for ids, ranges, checks and output, as values: what a `for` does with a range is in `statements.py`."""

from __future__ import annotations

import peertile.language as T
from peertile.dtypes import b1
from peertile.frontend.control import truth
from peertile.frontend.convert import constant, int_arg, tile_arg, unify
from peertile.frontend.groups import group_object, num_ranks_of, rank_of
from peertile.frontend.registry import implements
from peertile.frontend.scope import Build
from peertile.frontend.values import (
    NONE,
    Abstract,
    Known,
    RangeIterator,
    RanksIterator,
    StaticIterator,
    Tile,
    describe,
    is_number,
)
from peertile.ir import ops
from peertile.ir.core import Value
from peertile.ir.ops import Binary, CheckKind, Compare, Unary
from peertile.ir.types import BOOL, INDEX, TileType

__all__ = ["static_range"]


def _axis(b: Build, value: Abstract, role: str) -> int:
    axis = int_arg(b, value, f"{role}: axis")
    if axis not in (0, 1, 2):
        b.fail(f"{role}: axis: expected 0, 1 or 2, got {axis}")
    return axis


@implements(T.program_id)
def _program_id(b: Build, axis: Abstract) -> Abstract:
    return Tile(b.builder.value(ops.ProgramId, (), INDEX, axis=_axis(b, axis, "T.program_id")))


@implements(T.num_programs)
def _num_programs(b: Build, axis: Abstract) -> Abstract:
    return Tile(b.builder.value(ops.NumPrograms, (), INDEX, axis=_axis(b, axis, "T.num_programs")))


@implements(T.rank)
def _rank(b: Build) -> Abstract:
    return Tile(rank_of(b, group_object(b, "T.rank()")))


@implements(T.num_ranks)
def _num_ranks(b: Build) -> Abstract:
    return Tile(num_ranks_of(b, group_object(b, "T.num_ranks()")))


@implements(T.ranks)
def _ranks(b: Build) -> Abstract:
    return RanksIterator(peers=False)


@implements(T.peers)
def _peers(b: Build) -> Abstract:
    return RanksIterator(peers=True)


def _is_positive(value: Value) -> bool:
    """Whether a step is positive by construction: products and sums of counts and positive constants.

    Wrap-around is left aside: a count of programs or ranks is far below 2^31.
    """
    op = value.op
    match op:
        case ops.Const():
            return bool(op.attrs["value"] > 0)
        case ops.NumPrograms() | ops.NumRanks():
            return True
        case ops.BinaryOp() if op.attrs["fn"] in (Binary.MUL, Binary.ADD, Binary.MAX):
            return all(_is_positive(v) for v in op.operands)
    return False


@implements(T.range)
def _range(b: Build, lo: Abstract, hi: Abstract, step: Abstract, stages: Abstract) -> Abstract:
    role = "T.range"
    if hi == NONE:
        lo, hi = Known(0), lo
    if step == NONE:
        step = Known(1)
    for name, v in (("lo", lo), ("hi", hi), ("step", step)):
        ok = isinstance(v, Known) and isinstance(v.value, int) and not isinstance(v.value, bool)
        if not ok and not (isinstance(v, Tile) and v.type.is_scalar and v.type.dtype.is_int):
            b.fail(f"{role}: {name}: expected an integer scalar, got {describe(v)}")
    if step == Known(0):
        b.fail(f"{role}: step: expected an integer other than 0, got 0")
    is_down = isinstance(step, Known) and step.value < 0
    if is_down:
        assert isinstance(step, Known)
        step = Known(-step.value)
    n_stages = int_arg(b, stages, f"{role}: stages")
    if n_stages < 1:
        b.fail(f"{role}: stages: expected 1 or more, got {n_stages}")
    low, high, by = unify(b, (lo, hi, step), role)
    if isinstance(by.op, ops.Const) is False and not _is_positive(by):
        t = by.type
        assert isinstance(t, TileType)
        ok_value = b.builder.value(ops.CompareOp, (by, constant(b, 0, t.dtype)), BOOL, fn=Compare.GT)
        b.builder.emit(
            ops.Check, (ok_value,), kind=CheckKind.ASSERT, message="T.range: a run-time step must be positive"
        )
    if is_down:
        low, high = (b.builder.value(ops.UnaryOp, (v,), v.type, fn=Unary.NOT) for v in (low, high))
    return RangeIterator(low, high, by, n_stages, is_down)


def static_range(b: Build, role: str, args: list[Abstract]) -> StaticIterator:
    """An unrolled range from compile-time ints."""
    values = [int_arg(b, a, f"{role}: {name}") for a, name in zip(args, ("lo", "hi", "step"), strict=False)]
    if len(values) == 3 and values[2] == 0:
        b.fail(f"{role}: step: expected an int other than 0, got 0")
    return StaticIterator(range(*values))


@implements(T.static_range)
def _static_range(b: Build, lo: Abstract, hi: Abstract, step: Abstract) -> Abstract:
    args = [Known(0), lo] if hi == NONE else [lo, hi]
    return static_range(b, "T.static_range", args if step == NONE else [*args, step])


def _message(b: Build, value: Abstract, role: str) -> str:
    if isinstance(value, Known) and isinstance(value.value, str):
        return value.value
    b.fail(f"{role}: message: expected a str known at compile time, got {describe(value)}")


@implements(T.static_assert)
def _static_assert(b: Build, condition: Abstract, message: Abstract) -> Abstract:
    text = _message(b, message, "T.static_assert")
    held = truth(b, condition, "T.static_assert")
    if not isinstance(held, bool):
        b.fail(f"T.static_assert: expected a compile-time condition, got {describe(condition)}; use T.assert_")
    if not held:
        b.fail(f"T.static_assert: {text or 'the condition is false'}")
    return NONE


@implements(T.assert_)
def _assert(b: Build, condition: Abstract, message: Abstract) -> Abstract:
    text = _message(b, message, "T.assert_")
    if isinstance(condition, Tile) and condition.type.shape and condition.type.dtype.is_bool:
        b.fail(f"T.assert_: expected a bool scalar, got a tile {condition.type}; reduce it with T.all")
    held = truth(b, condition, "T.assert_")
    value = constant(b, held, b1) if isinstance(held, bool) else held
    b.builder.emit(ops.Check, (value,), kind=CheckKind.ASSERT, message=text)
    return NONE


@implements(T.print_)
def _print(b: Build, *values: Abstract) -> Abstract:
    text: list[str] = []
    operands: list[Value] = []
    for v in values:
        if isinstance(v, Known) and not (operands and is_number(v)):
            if operands:
                b.fail(f"T.print_: expected text in front of the values, got {describe(v)} behind one; use two calls")
            text.append(str(v.value))
        else:
            operands.append(tile_arg(b, v, "T.print_").value)
    b.builder.emit(ops.Print, operands, prefix=" ".join(text))
    return NONE
