"""What a virtual tile reads when it is computed, and whether at its own position. Asked by the hazard rules."""

from __future__ import annotations

from peertile.backends.cpu.nodes import Buffer, BufferNode, LoadNode, Node, View, resolve
from peertile.ir.types import Access

__all__ = ["buffers_below", "is_shared", "loads_below", "reads_below"]


def is_shared(view: View) -> bool:
    """Whether anything but the program's own stores may change what a load of `view` gives."""
    return not (view.root and view.type.access is Access.READ)


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
