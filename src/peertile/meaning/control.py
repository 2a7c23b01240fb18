"""The meaning of control flow, checks and output."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from peertile.ir import ops
from peertile.ir.core import Op
from peertile.meaning.faults import FaultKind, ProgramFault
from peertile.meaning.program import End, Event, EventKind, Program, Steps
from peertile.meaning.registry import evaluates

__all__: list[str] = []


def _results(op: Op, values: tuple[Any, ...]) -> Any:
    """Values as `Program.run` takes them: one alone, or a tuple."""
    return values[0] if len(op.results) == 1 else values


@evaluates(ops.For, steps=True)
def for_(program: Program, op: Op, lo: Any, hi: Any, step: Any, *carried: Any) -> Steps:
    # Python ints: the trip count is that of the mathematical range, so a last step cannot wrap.
    for k in range(int(lo), int(hi), int(step)):
        end = yield from program.run(op.blocks[0], (np.asarray(k).astype(lo.dtype)[()], *carried))
        if isinstance(end.op, ops.Return):
            return end
        carried = end.values
        if isinstance(end.op, ops.Break):
            break
    return _results(op, carried)


@evaluates(ops.Loop, steps=True)
def loop(program: Program, op: Op, *carried: Any) -> Steps:
    while True:
        end = yield from program.run(op.blocks[0], carried)
        if isinstance(end.op, ops.Return):
            return end
        if isinstance(end.op, ops.Break):
            return _results(op, end.values)
        carried = end.values


@evaluates(ops.If, steps=True)
def if_(program: Program, op: Op, condition: Any) -> Steps:
    end = yield from program.run(op.blocks[0 if condition else 1], ())
    return _results(op, end.values) if isinstance(end.op, ops.Yield) else end


@evaluates(ops.Yield, ops.Continue, ops.Break, ops.Return)
def terminator(program: Program, op: Op, *values: Any) -> End:
    return End(op, values)


@evaluates(ops.Suspend, steps=True)
def suspend(program: Program, op: Op) -> Steps:
    yield Event(EventKind.SUSPEND, program, op)


_FAULTS: Final = {
    ops.CheckKind.ASSERT: FaultKind.ASSERT,
    ops.CheckKind.BOUNDS: FaultKind.BOUNDS,
    ops.CheckKind.SIGNATURE: FaultKind.SIGNATURE,
}


@evaluates(ops.Check)
def check(program: Program, op: Op, condition: Any, *numbers: Any) -> None:
    if not condition:
        got, limit = ([int(n) for n in numbers] + [None, None])[:2]
        raise ProgramFault(_FAULTS[op.attrs["kind"]], op.attrs["message"], op, got, limit)


@evaluates(ops.Print)
def print_(program: Program, op: Op, *values: Any) -> None:
    program.printed.append((op.attrs["prefix"], tuple(np.array(v) for v in values)))


@evaluates(ops.Mark)
def mark(program: Program, op: Op, *values: Any) -> None:
    """Nothing that a result depends on."""
