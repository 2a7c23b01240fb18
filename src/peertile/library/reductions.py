"""Reductions: what they mean, for which element types, and the kernel helpers that apply them. No communication.

Every collective that reduces starts with the value of one rank and folds the others in one by one, so a sum
of one rank keeps its bits (-0.0 stays -0.0) and no identity element can leak into a result.
"""

from __future__ import annotations

from enum import Enum

import peertile.language as T
from peertile.dtypes import DType, f32
from peertile.errors import ArgumentError

__all__ = ["ReduceOp", "accumulator", "check_reduction", "finish", "fold"]


class ReduceOp(Enum):
    """How the values of the ranks become one. MIN and MAX give NaN if any value is NaN, in any order.

    AVG is the sum divided by the number of ranks, floats alone. Integers wrap.
    """

    SUM = "sum"
    PROD = "prod"
    MIN = "min"
    MAX = "max"
    AVG = "avg"


def check_reduction(name: str, op: ReduceOp, dtype: DType) -> None:
    """ArgumentError where `op` has no meaning for `dtype`: never a sum of bytes that are no numbers."""
    if not isinstance(op, ReduceOp):
        raise ArgumentError(f"{name}: op: expected a ReduceOp, such as ReduceOp.SUM, got {op!r}")
    if dtype.is_float and dtype.bits == 8:
        raise ArgumentError(
            f"{name}: op: {op.name} is not defined for {dtype}; convert to bf16 or f32 first "
            "(all_gather, broadcast and all_to_all take fp8)"
        )
    if dtype.is_bool:
        raise ArgumentError(f"{name}: op: {op.name} is not defined for bool; convert to u8: MIN is and, MAX is or")
    if op is ReduceOp.AVG and not dtype.is_float:
        raise ArgumentError(f"{name}: op: AVG is not defined for {dtype}; take SUM and divide, or convert to f32")


def accumulator(dtype: DType) -> DType:
    """The type that values are folded in: f32 for f16 and bf16, else their own."""
    return f32 if dtype.is_float and dtype.bits < 32 else dtype


def fold(a: T.Tile, b: T.Tile, op: ReduceOp) -> T.Tile:
    """a and b as one. `op` is known while compiling."""
    if op is ReduceOp.PROD:
        return a * b
    if op is ReduceOp.MIN:
        return T.minimum(a, b)
    if op is ReduceOp.MAX:
        return T.maximum(a, b)
    return a + b


def finish(a: T.Tile, n: T.Tile, op: ReduceOp) -> T.Tile:
    """The result out of the folded values of `n` ranks."""
    if op is ReduceOp.AVG:
        return a / n.astype(a.dtype)
    return a
