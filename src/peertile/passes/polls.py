"""Makes suspension points of loops that poll by hand, so that whoever they wait for can run. Moves no access.

A loop polls if it reads the same place with an order in every trip and writes nothing: it can only go on once
another agent has written. Where this pass is wrong about that (a loop that sums what it reads, say) it costs time
and changes no meaning. The first suspension, in front of the loop, begins the time that its bound is counted in.
"""

from __future__ import annotations

from peertile.ir import ops
from peertile.ir.core import Builder, Effect, Kernel, Op, Value, walk
from peertile.ir.types import TokenType
from peertile.memory_model import Order

__all__ = ["suspend_polls"]

_LOADS = (ops.PtrLoad, ops.WordLoad, ops.TileLoad)


def suspend_polls(kernel: Kernel) -> Kernel:
    """Puts a `suspend` in front of every loop that polls and at its back edges, in place; returns `kernel`."""
    for loop in [op for op in walk(kernel.body) if isinstance(op, ops.For | ops.Loop)]:
        if not _polls(loop):
            continue
        assert loop.parent is not None
        Builder(loop.parent, loop.loc, loop).emit(ops.Suspend)
        for end in [op for op in walk(loop.blocks[0]) if isinstance(op, ops.Continue)]:
            if ops.enclosing_loop(end) is loop:
                assert end.parent is not None
                Builder(end.parent, loop.loc, end).emit(ops.Suspend, continues=True)
    return kernel


def _polls(loop: Op) -> bool:
    inside = list(walk(loop.blocks[0]))
    if any(op.EFFECTS & {Effect.WRITE, Effect.OUTPUT, Effect.WAIT} for op in inside):
        return False
    # What changes from trip to trip, but for tokens, and whatever is computed from it.
    moving: set[Value] = {a for a in loop.blocks[0].args if not isinstance(a.type, TokenType)}
    found = False
    for op in inside:
        depends = any(v in moving for v in op.operands)
        if isinstance(op, _LOADS) and op.attrs["order"] is not Order.WEAK:
            found |= not depends
        if depends and not isinstance(op, _LOADS):
            moving.update(r for r in op.results if not isinstance(r.type, TokenType))
        for block in op.blocks:
            if depends or isinstance(op, ops.For | ops.Loop):
                moving.update(a for a in block.args if not isinstance(a.type, TokenType))
    return found
