"""Words of a signal that only this program uses, kept in registers.

How often a program told a peer, or waited for one, is a word in the memory of the device, so that the next launch goes
on from there. Within a launch it would be read again each time, from afar: an acquire empties the nearest cache, and
the read is in the way of the next release. Where all uses of such a field in a kernel are of one word, it is read once
and a variable holds it since; stores go to memory as before. Never changes what another program sees.
"""

from __future__ import annotations

from typing import Any

from peertile.backends.cuda.state import Emitter, Own, Root, View
from peertile.backends.cuda.words import address_of
from peertile.ir import ops
from peertile.ir.core import Block, Op, Value, walk
from peertile.ir.types import ViewType
from peertile.memory_model import Order

__all__ = ["plan", "prepare"]


def plan(e: Emitter) -> None:
    """Finds the words."""
    names = dict(zip(e.kernel.params, e.kernel.param_names, strict=True))
    found: dict[Root, list[tuple[Op, Op]]] = {}
    for top in e.kernel.body.ops:
        for op in walk(_alone(top)):
            for value in op.operands:
                field = value.op
                if isinstance(field, ops.Field) and isinstance(value.type, ViewType) and field.operands[0] in names:
                    found.setdefault((names[field.operands[0]], field.attrs["field"]), []).append((top, op))
    for root, uses in found.items():
        words = [op for _, op in uses]
        weak = all(isinstance(op, ops.WordLoad | ops.WordStore) and op.attrs["order"] is Order.WEAK for op in words)
        if not weak or not any(isinstance(op, ops.WordLoad) for op in words):
            continue
        keys = {tuple(_key(v) for v in _indices(op)) for op in words}
        if len(keys) == 1 and None not in next(iter(keys)):
            e.own[root] = Own(*uses[0])


def _alone(op: Op) -> Block:
    """A block that has just this op, for a walk."""
    block = Block()
    block.ops = [op]
    return block


def _indices(op: Op) -> list[Value]:
    return list(op.operands[1 if isinstance(op, ops.WordLoad) else 2 :])


def _key(value: Value) -> Any:
    """Equal for values that are equal wherever they are computed; None for others."""
    op = value.op
    if op is None:
        return None if value.owner.parent is not None else ("parameter", value.index)
    if op.effects or op.blocks or len(op.results) != 1:
        return None
    below = tuple(_key(v) for v in op.operands)
    return None if None in below else (op.NAME, str(sorted(op.attrs.items(), key=str)), str(op.result.type), below)


def prepare(e: Emitter, op: Op) -> None:
    """Reads what `op`, of the kernel's own block, is the first to use."""
    for own in e.own.values():
        if own.first is op and not own.name:
            for value in (own.use.operands[0], *_indices(own.use)):
                _compute(e, value)
            own.name = e.let_own("own", _read(e, e.view(own.use.operands[0]), _indices(own.use)))


def _read(e: Emitter, view: View, indices: list[Value]) -> str:
    """The word, or 0 where an index is outside: what checks the index comes behind."""
    inside = [
        f"({e.text(i)} >= 0) & ({e.text(i)} < {extent})"
        for i, extent in zip(indices, view.extents, strict=True)
        if not e.is_literal(i)
    ]
    mask = f", mask={' & '.join(inside)}, other=0" if inside else ""
    return f"tl.load({address_of(e, view, indices)}{mask})"


def _compute(e: Emitter, value: Value) -> None:
    """Computes a value ahead of its place; there it is computed again, and nobody minds."""
    if value not in e.values and value.op is not None:
        for operand in value.op.operands:
            _compute(e, operand)
        e.op(value.op)
