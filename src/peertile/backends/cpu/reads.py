"""What a virtual tile reads when it is computed, and whether at its own position. Asked by the hazard rules."""

from __future__ import annotations

from typing import NamedTuple

from peertile.backends.cpu.nodes import Buffer, BufferNode, LoadNode, Node, View, resolve
from peertile.ir import ops
from peertile.ir.core import Value
from peertile.ir.ops import Binary
from peertile.ir.types import Access

__all__ = ["are_apart", "buffers_below", "is_shared", "loads_below", "reads_below"]

_DEPTH = 8
"""Sums inside each other that are looked at."""
_MOST_FACTOR = 1 << 16
"""A rank is less than 2^31, so that no multiple of it up to here wraps."""


def is_shared(view: View) -> bool:
    """Whether anything but the program's own stores may change what a load of `view` gives."""
    return not (view.root and view.type.access is Access.READ)


def are_apart(a: View, b: View) -> bool:
    """Whether two views are parts of one symmetric object on ranks that differ, whichever rank this is: `x.local` and
    `x.at(1 - x.rank)`. Parts of different objects may overlap, as windows of one tensor do."""
    if a.part is None or b.part is None or a.part[0] is not b.part[0]:
        return False
    difference = _sum(_linear(a.part[1], _DEPTH), _linear(b.part[1], _DEPTH), -1)
    distance = difference.pop(None, 0)
    if not difference:
        return distance != 0
    ((unknown, factor),) = difference.items() if len(difference) == 1 else ((None, 0),)
    # The own rank is any number, so only its multiples are known.
    return isinstance(unknown, _OwnRank) and 1 < abs(factor) <= _MOST_FACTOR and distance % factor != 0


class _OwnRank(NamedTuple):
    """This rank in the group of an object."""

    object: Value


def _linear(value: Value, depth: int) -> dict[object, int]:
    """A whole number as a sum of multiples: of own ranks, of other values, and (None) of 1."""
    op = value.op
    if isinstance(op, ops.Const):
        return {None: int(op.attrs["value"])}
    if isinstance(op, ops.Rank):
        return {_OwnRank(op.operands[0]): 1}
    if isinstance(op, ops.BinaryOp) and depth:
        left, right = (_linear(v, depth - 1) for v in op.operands)
        fn = op.attrs["fn"]
        if fn in (Binary.ADD, Binary.SUB):
            return _sum(left, right, 1 if fn is Binary.ADD else -1)
        if fn is Binary.MUL and (left.keys() <= {None} or right.keys() <= {None}):
            known, other = (left, right) if left.keys() <= {None} else (right, left)
            return _sum({}, other, known.get(None, 0))
    return {value: 1}


def _sum(a: dict[object, int], b: dict[object, int], times: int) -> dict[object, int]:
    """a + times * b."""
    found = dict(a)
    for key, n in b.items():
        found[key] = found.get(key, 0) + times * n
    return {key: n for key, n in found.items() if n}


def loads_below(node: Node) -> list[tuple[LoadNode, bool]]:
    """Loads that a node reads, each with whether it is read at the node's own position."""
    return [(n, same) for n, same in _below(node) if isinstance(n, LoadNode)]


def reads_below(node: Node) -> list[tuple[BufferNode, bool]]:
    """Scratch that a node reads, as of `loads_below`."""
    return [(n, same) for n, same in _below(node) if isinstance(n, BufferNode)]


def _below(node: Node) -> list[tuple[Node, bool]]:
    found: list[tuple[Node, bool]] = []
    seen: set[tuple[int, bool]] = set()
    stack = [(node, True)]
    shape = node.shape
    while stack:
        n, same = stack.pop()
        n = resolve(n)
        if (id(n), same) in seen:
            continue
        seen.add((id(n), same))
        if not n.children:
            # Scratch seen through other strides, a transposed square say, is read elsewhere than it is written.
            here = not isinstance(n, BufferNode) or n.is_dense
            found.append((n, same and here and n.shape == shape))
        stack.extend((c, same and not n.moves(c)) for c in n.children)
    return found


def buffers_below(node: Node, stop: set[int]) -> set[Buffer]:
    """Scratch that a node reads, not looking below the nodes in `stop`."""
    found: set[Buffer] = set()
    seen: set[int] = set()
    stack = [node]
    while stack:
        n = resolve(stack.pop())
        if id(n) in seen or id(n) in stop:
            continue
        seen.add(id(n))
        if isinstance(n, BufferNode):
            found.add(n.buffer)
        stack.extend(n.children)
    return found
