"""Which memory operations may not change places: facts for backends. Changes no op.

Program order is the rule (docs/concepts/memory-model.md); a backend may let an operation pass another
only where nobody can tell. `conflicts` decides that for two ops, `predecessors` for a block. Alias
classes: parameters that are not Peer keep the promise that nothing else reaches their storage, since
the launcher refuses overlapping Exclusive arguments and leases keep writers away from Shared ones.
Raw pointers promise nothing. Errs towards order: may keep two ops in order that could be swapped,
never the other way.
"""

from __future__ import annotations

from collections.abc import Iterator

from peertile.ir import ops
from peertile.ir.core import Block, Effect, Kernel, Op, Value, walk
from peertile.ir.types import Space, ViewType
from peertile.passes.rewrite import leaving

__all__ = ["conflicts", "order_memory", "predecessors"]

_MEMORY = frozenset({Effect.READ, Effect.WRITE})
_ORDERING = frozenset({Effect.WAIT, Effect.FENCE})


def conflicts(a: Op, b: Op) -> bool:
    """Whether `a` and `b` must stay in their order. Symmetric; an op with blocks counts all inside it."""
    if a.blocks or b.blocks:
        return any(conflicts(x, y) for x in _leaves(a) for y in _leaves(b))
    ea, eb = a.effects, b.effects
    if not ea or not eb:
        return False
    # What orders, suspends or may leave the kernel stays in place among everything with an effect:
    # an access must not be seen that a failed check in front of it would have prevented.
    if (ea | eb) & _ORDERING or Effect.CONTROL in ea or Effect.CONTROL in eb:
        return True
    if Effect.OUTPUT in ea or Effect.OUTPUT in eb:
        return Effect.OUTPUT in ea and Effect.OUTPUT in eb
    if Effect.WRITE not in ea and Effect.WRITE not in eb:
        return False
    return _may_alias(a, b)


def _leaves(op: Op) -> Iterator[Op]:
    """The ops without blocks inside `op`, but for terminators that lead no further than out of `op`."""
    if not op.blocks:
        yield op
        return
    ends = set(leaving(op))
    for block in op.blocks:
        for inner in walk(block):
            if not inner.blocks and (not inner.TERMINATOR or inner in ends):
                yield inner


def _may_alias(a: Op, b: Op) -> bool:
    x, y = a.operands[0], b.operands[0]
    tx, ty = x.type, y.type
    if not isinstance(tx, ViewType) or not isinstance(ty, ViewType):
        return True
    if tx.space is Space.LOCAL or ty.space is Space.LOCAL:
        return _root(x) is _root(y) and not _disjoint(a, b)
    return not (_root(x) is _root(y) and _disjoint(a, b) and x is y)


def _root(view: Value) -> Value:
    """The parameter that `view` is a part of."""
    while view.op is not None and view.op.operands:
        view = view.op.operands[0]
    return view


def _disjoint(a: Op, b: Op) -> bool:
    """Whether both reach one view at tiles of equal shape, or at words, whose constant indices differ."""
    if a.operands[0] is not b.operands[0]:
        return False
    (shape_a, index_a), (shape_b, index_b) = _place(a), _place(b)
    if shape_a != shape_b:
        return False
    for x, y in zip(index_a, index_b, strict=True):
        if isinstance(x.op, ops.Const) and isinstance(y.op, ops.Const) and x.op.attrs["value"] != y.op.attrs["value"]:
            return True
    return False


def _place(op: Op) -> tuple[object, list[Value]]:
    if isinstance(op, ops.Load | ops.TileLoad):
        return getattr(op.result.type, "shape", None), op.operands[1:]
    if isinstance(op, ops.Store | ops.TileAtomic | ops.TileStore | ops.AsyncStore):
        return getattr(op.operands[1].type, "shape", None), op.operands[2:]
    if isinstance(op, ops.Gather | ops.Scatter):
        # Its indices are not known: no two places of it are known to differ.
        return op, []
    # Words count elements: None stands for the shape of one.
    return None, op.operands[1 if isinstance(op, ops.WordLoad) else 2 :]


def predecessors(block: Block) -> dict[Op, tuple[Op, ...]]:
    """For every op of `block` (not of nested blocks) that touches memory: the earlier ones it must follow."""
    found: dict[Op, tuple[Op, ...]] = {}
    earlier: list[Op] = []
    for op in block.ops:
        if not op.effects:
            continue
        if op.effects & (_MEMORY | _ORDERING):
            found[op] = tuple(e for e in earlier if conflicts(e, op))
        earlier.append(op)
    return found


def order_memory(kernel: Kernel) -> Kernel:
    """Leaves `facts["order"]`: for each op on memory, the earlier ops of its block it must follow."""
    facts: dict[Op, tuple[Op, ...]] = predecessors(kernel.body)
    for op in walk(kernel.body):
        for block in op.blocks:
            facts |= predecessors(block)
    kernel.facts["order"] = facts
    return kernel
