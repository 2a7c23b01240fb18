"""Virtual tiles: expressions that are computed only where something needs their elements.

A node has a shape and gives its element at any coordinates. Elementwise ops and index maps (broadcast,
permute, reshape by axes of extent 1) cost nothing until a sink is emitted. No LLVM text is written here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from peertile.backends.cpu.convert import Batch
from peertile.dtypes import DType
from peertile.ir.core import Value
from peertile.ir.ops import Padding
from peertile.ir.types import ViewType

__all__ = [
    "Buffer", "BufferNode", "Cell", "ElementNode", "Emit", "IotaNode", "LoadNode", "MapNode", "Node", "ScalarNode",
    "TakeNode", "View", "resolve", "row_major", "walk",
]  # fmt: skip

CHEAP = 3
"""Up to this cost a node is computed again at each use instead of being kept in scratch."""


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a dense tile, in elements."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


@dataclass(eq=False)
class View:
    """A view at run time: registers of its address, extents and strides. `root` says what it is part of."""

    type: ViewType
    pointer: str
    extents: tuple[str, ...]
    strides: tuple[str, ...]
    root: str
    """Name of the parameter for LOCAL views, which alias no other parameter; "" where nothing is promised."""
    key: object = None
    """Equal for views that are the same place for certain."""
    part: tuple[object, Value] | None = None
    """Of a symmetric object's part: which object, and the rank that it lies on."""


@dataclass(eq=False)
class Buffer:
    """A piece of scratch of `bytes`. Pinned buffers belong to a loop and are freed by it alone."""

    offset: int
    bytes: int
    pointer: str
    pinned: bool = False


class Node:
    """Base. `forward` is set once the node has been computed: read that instead. `block` is the IR block
    whose lowering made the node: only there may `forward` be set, since elsewhere it may not have run."""

    __slots__ = ("block", "cost", "depth", "dtype", "forward", "shape")

    def __init__(self, dtype: DType, shape: tuple[int, ...], cost: int = 0, depth: int = 0) -> None:
        self.dtype = dtype
        self.shape = shape
        self.cost = cost
        self.depth = depth
        self.forward: Node | None = None
        self.block: object = None

    @property
    def children(self) -> tuple[Node, ...]:
        return ()

    def moves(self, child: Node) -> bool:
        """Whether `child` is read at other positions than our own."""
        return False

    @property
    def numel(self) -> int:
        n = 1
        for e in self.shape:
            n *= e
        return n


def resolve(node: Node) -> Node:
    """What stands for `node` now."""
    while node.forward is not None:
        node = node.forward
    return node


class ScalarNode(Node):
    """A scalar register in every element."""

    __slots__ = ("register",)

    def __init__(self, dtype: DType, shape: tuple[int, ...], register: str) -> None:
        super().__init__(dtype, shape)
        self.register = register


class IotaNode(Node):
    """The coordinate along the only axis."""

    __slots__ = ()


class LoadNode(Node):
    """A tile of a view, not loaded yet. `origin` is the first element along each axis (i64 registers). `is_near`: a
    group before has read all of it, so that it is in a cache where it fits."""

    __slots__ = ("is_near", "origin", "padding", "view")

    def __init__(
        self, view: View, shape: tuple[int, ...], origin: tuple[str, ...], padding: Padding
    ) -> None:  # fmt: skip
        super().__init__(view.type.dtype, shape, 1, 1)
        self.view = view
        self.origin = origin
        self.padding = padding
        self.is_near = False


class BufferNode(Node):
    """Elements in scratch at offset sum(coordinate · stride) from `address` (a register: of the buffer, or of a
    piece of it)."""

    __slots__ = ("address", "buffer", "strides")

    def __init__(
        self,
        buffer: Buffer,
        dtype: DType,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
        address: str | None = None,
    ) -> None:
        super().__init__(dtype, shape)
        self.buffer = buffer
        self.strides = row_major(shape) if strides is None else strides
        self.address = buffer.pointer if address is None else address

    @property
    def is_dense(self) -> bool:
        """Whether it is the whole buffer in row-major order."""
        return self.address == self.buffer.pointer and all(
            s == d for s, d, n in zip(self.strides, row_major(self.shape), self.shape, strict=True) if n > 1
        )


Emit = Callable[[int, list[Batch]], Batch]
"""Given lanes and one batch per child, emits the op and gives its batch."""


class ElementNode(Node):
    """An elementwise op of children of the same shape."""

    __slots__ = ("_children", "emit")

    def __init__(self, dtype: DType, children: tuple[Node, ...], cost: int, emit: Emit) -> None:
        total = cost + sum(c.cost for c in children)
        super().__init__(dtype, children[0].shape, min(total, 1 << 20), 1 + max(c.depth for c in children))
        self._children = children
        self.emit = emit

    @property
    def children(self) -> tuple[Node, ...]:
        return self._children


class MapNode(Node):
    """Axis k of the child is at our coordinate `axes[k]`, or at 0 where that is None."""

    __slots__ = ("axes", "child")

    def __init__(self, child: Node, shape: tuple[int, ...], axes: tuple[int | None, ...]) -> None:
        super().__init__(child.dtype, shape, child.cost, child.depth + 1)
        self.child = child
        self.axes = axes

    @property
    def children(self) -> tuple[Node, ...]:
        return (self.child,)

    def moves(self, child: Node) -> bool:
        return self.child.shape != self.shape or self.axes != tuple(range(len(self.shape)))


class TakeNode(Node):
    """Along `axis`, the element of scratch that an index (modulo the extent) names."""

    __slots__ = ("axis", "index", "source")

    def __init__(self, source: BufferNode, index: Node, axis: int) -> None:
        super().__init__(source.dtype, index.shape, index.cost + 4, index.depth + 1)
        self.source = source
        self.index = index
        self.axis = axis

    @property
    def children(self) -> tuple[Node, ...]:
        return (self.index, self.source)

    def moves(self, child: Node) -> bool:
        return child is self.source


class Cell(Node):
    """The result of a reduction whose group has not been emitted yet; afterwards `forward` is set."""

    __slots__ = ()


def walk(node: Node, seen: set[int] | None = None) -> Iterator[Node]:
    """Every distinct node below `node` that still has to be computed, and the leaves it reads."""
    seen = set() if seen is None else seen
    stack = [node]
    while stack:
        n = resolve(stack.pop())
        if id(n) in seen:
            continue
        seen.add(id(n))
        yield n
        stack.extend(n.children)
