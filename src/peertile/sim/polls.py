"""Which loops of a kernel poll, and on what a trip of one depends. Runs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from peertile.ir import ops
from peertile.ir.core import Effect, Op, Value, walk
from peertile.ir.ops import Binary
from peertile.ir.types import TokenType
from peertile.memory_model import Order

__all__ = ["Polling", "polling"]

_STRONG_READS: Final = (ops.WordLoad, ops.WordRmw, ops.PtrLoad, ops.PtrRmw, ops.PtrCas)
_TELLING: Final = frozenset({Effect.READ, Effect.WRITE, Effect.WAIT, Effect.OUTPUT})


@dataclass(frozen=True, slots=True)
class Polling:
    """A loop that reads words with an order and does not wait for them."""

    moving: tuple[Value, ...]
    """What it carries from trip to trip, and uses, beside tokens and its own counters."""
    free: tuple[Value, ...] | None
    """What a trip uses from outside, where it is one read of one place and what is made of it: then these, what it
    carries and the number that it reads decide what comes of it. None where more does."""


def polling(loop: Op, carried: Sequence[Value]) -> Polling | None:
    """How a loop that carries these values polls; None if it does not."""
    inside = [op for block in loop.blocks for op in walk(block)]
    reads = [op for op in inside if isinstance(op, _STRONG_READS) and op.attrs["order"] is not Order.WEAK]
    if not reads:
        return None
    made = {v for op in inside for v in op.results} | {v for op in inside for b in op.blocks for v in b.args}
    used = {v: None for op in inside for v in op.operands if v not in made}
    args = [v for v in loop.blocks[0].args if not isinstance(v.type, TokenType)]
    moving = tuple(v for v in carried if v in used and v in args and not _counts(loop, v))
    counting = any(v in used and v not in moving for v in args)
    other = [op for op in inside if op is not reads[0] and op.EFFECTS & _TELLING and not isinstance(op, ops.Suspend)]
    nested = any(isinstance(op, ops.For | ops.Loop) for op in inside)
    if len(reads) > 1 or other or counting or nested:
        return Polling(moving, None)
    return Polling(moving, tuple(v for v in used if v not in args and not isinstance(v.type, TokenType)))


def _counts(loop: Op, value: Value) -> bool:
    """Whether a carried integer grows by the same number in every trip."""
    place = loop.blocks[0].args.index(value) - isinstance(loop, ops.For)
    for end in walk(loop.blocks[0]):
        if isinstance(end, ops.Continue) and ops.enclosing_loop(end) is loop:
            step = end.operands[place].op
            if not (isinstance(step, ops.BinaryOp) and step.attrs["fn"] in (Binary.ADD, Binary.SUB)):
                return False
            if step.operands[0] is not value or not isinstance(step.operands[1].op, ops.Const):
                return False
    return True
