"""The state of lowering one kernel: values, pending group, scratch, hazards, order. Ops register elsewhere.

Lowering walks the ops once. Tiles stay virtual (nodes.py); sinks collect in one pending group which is
emitted (`flush`) when something needs its results, when a sink does not fit it, or at an ordering point.

Invariant: a virtual load is evaluated where memory still holds what it held at the load's own place.
`before_write` and `order_point` keep (copy to scratch) what would break it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from peertile.backends.binary import Place
from peertile.backends.cpu.evaluate import ORIGIN, Evaluator, Mode, TileAccess
from peertile.backends.cpu.groups import Group, KeepSink, ReduceSink, Sink, StoreSink, emit_group, tile_access
from peertile.backends.cpu.liveness import Liveness, ops_of
from peertile.backends.cpu.mathlib import Library
from peertile.backends.cpu.nodes import (
    CHEAP,
    Buffer,
    BufferNode,
    Cell,
    ElementNode,
    Emit,
    LoadNode,
    MapNode,
    Node,
    ScalarNode,
    View,
    resolve,
    walk,
)
from peertile.backends.cpu.reads import are_apart, buffers_below, is_shared, loads_below, reads_below
from peertile.backends.cpu.target import CpuTarget
from peertile.backends.cpu.text import Function, is_literal, mul
from peertile.dtypes import DType
from peertile.errors import InternalError
from peertile.ir import ops
from peertile.ir.core import Block, Effect, Kernel, Op, Value
from peertile.ir.types import TileType, ViewType

__all__ = ["LOWERINGS", "Lowering", "Symmetric", "lowers"]

MAX_DEPTH = 60
"""Deeper expressions are cut by keeping an inner node: bounds Python's recursion and the loop bodies."""
DUMMY_BYTES = 64
"""Scratch begins with bytes that nobody reads, for accesses that must not happen."""
_FETCH_BYTES, _FETCH_LIMIT = 2 << 10, 256 << 10
"""Sizes of a tile whose successor is fetched ahead: shorter ones the processor foresees, longer ones crowd out the
tile at hand."""
MANY_STORES = 32
"""Kernels of more stores do without stores around the caches: each of those is a loop of its own, and LLVM takes time
that grows with the square of the loops of a function."""
STREAM_BYTES = 4 << 20
"""Outputs of at least this size are stored around the caches: slower below 1 MiB, 0.7 of the time from 4 MiB on."""

LoweringRule = Callable[["Lowering", Any], None]
LOWERINGS: Final[dict[type[Op], LoweringRule]] = {}


def lowers(*classes: type[Op]) -> Callable[[LoweringRule], LoweringRule]:
    """Registers the lowering of ops."""

    def register(rule: LoweringRule) -> LoweringRule:
        for cls in classes:
            LOWERINGS[cls] = rule
        return rule

    return register


@dataclass(eq=False, slots=True)
class Symmetric:
    """A symmetric object at run time."""

    table: str
    offset: str
    extents: tuple[str, ...]
    strides: tuple[str, ...]
    type: Any


@dataclass(eq=False, slots=True)
class Record:
    """A communication object at run time: its fields."""

    fields: dict[str, object]


@dataclass(eq=False, slots=True)
class Scratch:
    """Static offsets of tiles in the scratch block."""

    base: str = "%scratch"
    size: int = DUMMY_BYTES
    taken: list[Buffer] = field(default_factory=list)


class Lowering:
    """Lowers the ops of one kernel into `f`. Also the host that groups and evaluators talk to."""

    def __init__(self, kernel: Kernel, target: CpuTarget, f: Function) -> None:
        self.kernel = kernel
        self.target = target
        self.f = f
        self.library = Library(target.features)
        self.helpers: dict[str, str] = {}
        self.places: list[Place] = []
        self.values: dict[Value, Any] = {}
        self._tiles: dict[Value, Node] = {}
        self.scratch = Scratch()
        self.group: Group | None = None
        self.block: Block = kernel.body
        self.frames: list[Any] = []
        self.locals: list[str] = []
        self.streams: dict[str, str] = {}
        # Whether stores that came before, in the text or around a loop, may have gone around the caches.
        self.stores_around = _stores_in_loops(kernel)
        self.leave = f.block("leave")
        self.entry = f.entry
        self.program = "%p"
        self.promise = ""
        self.give_up = f.block("give_up")
        self.waits = kernel.waits
        self._fresh: list[Buffer] = []
        self._context: dict[int, str] = {}
        self._scaled: dict[tuple[Block, str, int], str] = {}
        self.protected: set[Buffer] = set()
        liveness = Liveness(kernel)
        self.at, self.end = liveness.at, liveness.end
        self.uses, self.last_use = liveness.uses, liveness.last_use
        self.now = 0
        self._n_stores = sum(isinstance(op, ops.Store) for op in ops_of(kernel.body))
        self._loaded_views = {
            op.operands[0]
            for op in ops_of(kernel.body)
            if isinstance(op, ops.Load | ops.TileAtomic | ops.WordLoad | ops.Gather | ops.TileLoad)
        }

    # ------------------------------------------------------------ values

    def live(self, after: int | None = None) -> Iterator[tuple[Value, Node]]:
        """Values that are virtual or in scratch and used at or after `after` (now, if None)."""
        # Lowering never goes back: what is dead now stays so, and is forgotten, or a long kernel would pay for all of
        # it at each of its ops.
        last, now = self.last_use, self.now
        for value in [v for v in self._tiles if last.get(v, 0) < now]:
            del self._tiles[value]
        bound = now if after is None else after
        for value, node in list(self._tiles.items()):
            if last.get(value, 0) >= bound:
                yield value, resolve(node)

    def new(self, node: Node) -> Node:
        node.block = self.block
        if node.depth > MAX_DEPTH and not isinstance(node, MapNode):
            return self.keep_now(node)
        return node

    def node(self, value: Value) -> Node:
        node = self.values[value]
        assert isinstance(node, Node), value
        return resolve(node)

    def define(self, value: Value, node: object) -> None:
        self.values[value] = node
        if isinstance(node, Node):
            self._tiles[value] = node

    def define_scalar(self, value: Value, register: str) -> None:
        t = value.type
        assert isinstance(t, TileType)
        self.define(value, ScalarNode(t.dtype, t.shape, register))

    def scalar(self, value: Value) -> str:
        """The register of a scalar value; emits what is pending if that is what it waits for."""
        return self.register(self.node(value))

    def register(self, node: Node) -> str:
        node = resolve(node)
        if isinstance(node, ScalarNode):
            return node.register
        if any(isinstance(n, Cell) for n in walk(node)):
            self.flush()
            node = resolve(node)
            if isinstance(node, ScalarNode):
                return node.register
        tiles: dict[int, TileAccess] = {}
        for n in walk(node):
            if isinstance(n, LoadNode):
                tiles[id(n)] = tile_access(self.f, n.view, n.shape, n.origin)
        evaluator = Evaluator(self, 1, Mode(False), tiles)
        (register,) = evaluator.values(node, [(ORIGIN,) * len(node.shape)])
        if node.block is self.block:
            node.forward = ScalarNode(node.dtype, node.shape, register)
        return register

    def scaled(self, register: str, n: int) -> str:
        """register · n, emitted once per block."""
        key = (self.block, register, n)
        if key not in self._scaled:
            self._scaled[key] = mul(self.f, register, n)
        return self._scaled[key]

    def element(self, dtype: DType, children: tuple[Node, ...], cost: int, emit: Emit) -> Node:
        """An elementwise node; computed at once where all of its operands are registers."""
        children = tuple(resolve(c) for c in children)
        if all(isinstance(c, ScalarNode) for c in children):
            registers = [[c.register] for c in children if isinstance(c, ScalarNode)]
            (register,) = emit(1, registers)
            return ScalarNode(dtype, children[0].shape, register)
        return self.new(ElementNode(dtype, children, cost, emit))

    # ------------------------------------------------------------ scratch

    def allocate(self, size: int, pinned: bool = False) -> Buffer:
        """A free piece of scratch. What no live value refers to is free."""
        used = self._used_buffers()
        self.scratch.taken = [b for b in self.scratch.taken if b.pinned or b in used]
        size = (size + 63) & ~63
        offset = DUMMY_BYTES
        for b in sorted(self.scratch.taken, key=lambda b: b.offset):
            if b.offset - offset >= size:
                break
            offset = max(offset, b.offset + b.bytes)
        with self.at_entry():
            pointer = self.f.value(f"getelementptr inbounds i8, ptr {self.scratch.base}, i64 {offset}")
        buffer = Buffer(offset, size, pointer, pinned)
        self.scratch.taken.append(buffer)
        self.scratch.size = max(self.scratch.size, offset + size)
        self._fresh.append(buffer)
        return buffer

    def _used_buffers(self) -> set[Buffer]:
        seen: set[int] = set()
        used = set(self._fresh)
        for _, node in self.live():
            used |= {n.buffer for n in walk(node, seen) if isinstance(n, BufferNode)}
        if self.group is not None:
            for sink in self.group.sinks:
                used |= {n.buffer for n in walk(sink.node, seen) if isinstance(n, BufferNode)}
                to = getattr(sink, "to", None)
                if to is not None:
                    used.add(to.buffer)
        return used

    def tile_buffer(self, dtype: DType, shape: tuple[int, ...], pinned: bool = False) -> BufferNode:
        size = dtype.itemsize
        for n in shape:
            size *= n
        return BufferNode(self.allocate(size, pinned), dtype, shape)

    # ------------------------------------------------------------ the pending group

    def add_sink(self, sink: Sink) -> None:
        if any(isinstance(n, Cell) for n in walk(sink.node)):
            self.flush()
            sink.node = resolve(sink.node)
        if self.group is not None and not self.group.takes(sink):
            self.flush()
            sink.node = resolve(sink.node)
        if self.group is None:
            self.group = Group(sink.node.shape)
        self.group.add(sink)

    def flush(self) -> None:
        """Emit the pending group, keeping what is needed later and costly to compute again."""
        group, self.group = self.group, None
        if group is None:
            return
        self.group = group  # for the allocator: its buffers are in use
        seen: set[int] = set()
        nodes = [n for s in group.sinks for n in walk(s.node, seen)]
        for n in nodes:
            if isinstance(n, ElementNode) and not n.shape:
                self.group = None
                self.register(n)
                self.group = group
        kept = {id(s.node) for s in group.sinks if isinstance(s, KeepSink)}
        for node in self._worth_keeping(group, {id(n) for n in nodes}, kept):
            kept.add(id(node))
            group.add(KeepSink(node, None, True))
        for sink in group.sinks:
            if isinstance(sink, KeepSink) and sink.to is None:
                sink.to = self._in_place(group, sink, kept) or self.tile_buffer(sink.node.dtype, sink.node.shape)
            elif isinstance(sink, ReduceSink) and sink.cell.numel > 1:
                sink.to = self.tile_buffer(sink.cell.dtype, sink.cell.shape)
        self.group = None
        emit_group(self, group)
        for sink in group.sinks:
            if isinstance(sink, KeepSink):
                sink.result = sink.to
                if sink.bind and sink.node.block is self.block and sink.node is not sink.to:
                    sink.node.forward = sink.to

    def _worth_keeping(self, group: Group, inside: set[int], kept: set[int]) -> list[Node]:
        found: list[Node] = []
        seen: set[int] = set()
        stack = [node for _, node in self.live()]
        while stack:
            node = resolve(stack.pop())
            if id(node) in seen or id(node) in kept:
                continue
            seen.add(id(node))
            if (
                id(node) in inside
                and isinstance(node, ElementNode)
                and node.cost > CHEAP
                and node.shape == group.shape
                and node.shape
                and node.block is self.block
            ):
                found.append(node)
                continue
            stack.extend(node.children)
        return found

    def _in_place(self, group: Group, sink: KeepSink, kept: set[int]) -> BufferNode | None:
        """The scratch of an operand that nobody reads afterwards, if every read of it is at the same position."""
        candidates = [
            n
            for n in walk(sink.node)
            if isinstance(n, BufferNode) and n.is_dense and n.dtype == sink.node.dtype and n.shape == sink.node.shape
        ]
        if not candidates:
            return None
        taken = {s.to.buffer for s in group.sinks if isinstance(s, KeepSink | ReduceSink) and s.to is not None}
        # A value of an outer block stays the expression that it is, and is computed again from what it reads.
        sent = {id(s.node) for s in group.sinks if isinstance(s, KeepSink) and s.bind and s.node.block is self.block}
        later: set[Buffer] = set()
        for _, node in self.live():
            later |= buffers_below(node, kept & sent)
        for n in candidates:
            # What was allocated for the op at hand, it may read again, and nobody else knows of it.
            if n.buffer in later or n.buffer in taken or n.buffer in self.protected or n.buffer in self._fresh:
                continue
            if all(same for s in group.sinks for m, same in reads_below(s.node) if m.buffer is n.buffer):
                return BufferNode(n.buffer, n.dtype, n.shape)
        return None

    def keep_now(self, node: Node) -> BufferNode:
        """The elements of `node` in scratch, dense in row-major order."""
        node = resolve(node)
        if isinstance(node, BufferNode) and node.is_dense:
            return node
        # A node without a block (a splat, say) may have been made further out than here: others that see it must
        # not be sent to scratch that only this block fills.
        sink = KeepSink(node, None, node.block is self.block)
        self.add_sink(sink)
        self.flush()
        assert isinstance(sink.result, BufferNode)
        return sink.result

    def keep_into(self, node: Node, to: BufferNode) -> None:
        """Compute `node` into given scratch; the value itself stays as it is."""
        self.add_sink(KeepSink(resolve(node), to, False))

    # ------------------------------------------------------------ order

    def conflicts(self, a: View, b: View | None) -> bool:
        """Whether the two may be the same memory. None is a raw pointer: it may be anything."""
        if b is None:
            return True
        if a.root and b.root:
            return a.root == b.root
        return not a.root and not b.root and not are_apart(a, b)

    def before_load(self, view: View | None) -> None:
        """Emit pending stores that the load may read."""
        if self.group is None:
            return
        stores = [s.view for s in self.group.sinks if isinstance(s, StoreSink)]
        if any(view is None or self.conflicts(s, view) for s in stores):
            self.flush()

    def before_write(self, view: View | None, origin: tuple[str, ...] = (), node: Node | None = None) -> None:
        """Keep the loads that the write may overwrite. The pending group stays pending only if the store may
        join it: everything it loads from there is loaded at the same position."""

        def same_place(load: LoadNode, same_position: bool) -> bool:
            return (
                view is not None and node is not None and same_position and load.view.key == view.key
                and load.origin == origin and load.shape == node.shape
            )  # fmt: skip

        for _, root in self.live(self.now + 1):
            if any(self.conflicts(n.view, view) for n in walk(root) if isinstance(n, LoadNode)):
                self.add_sink(KeepSink(root, None, True))
        if self.group is None:
            return
        if view is None:
            self.flush()
            return
        for sink in self.group.sinks:
            for load, same in loads_below(sink.node):
                if self.conflicts(load.view, view) and not same_place(load, same):
                    self.flush()
                    return
            if isinstance(sink, StoreSink) and self.conflicts(sink.view, view):
                self.flush()
                return

    def store_operand(self, view: View, origin: tuple[str, ...], node: Node) -> Node:
        """`node`, or a copy of it where its own loads overlap the store other than element by element."""
        for load, same in loads_below(node):
            if self.conflicts(load.view, view) and not (
                same and load.view.key == view.key and load.origin == origin and load.shape == node.shape
            ):
                return self.keep_now(node)
        return node

    def order_point(self) -> None:
        """Everything before has happened: stores are emitted, loads of memory that others write are done."""
        for _, root in self.live():
            if any(is_shared(n.view) for n in walk(root) if isinstance(n, LoadNode)):
                self.add_sink(KeepSink(root, None, True))
        self.flush()

    def emit_stores(self) -> None:
        """Emit the pending group if it writes memory: in front of ops that may leave the kernel."""
        if self.group is not None and any(isinstance(s, StoreSink) for s in self.group.sinks):
            self.flush()

    def enter_nested(self, op: Op) -> None:
        """Before blocks of `op`: what they would compute again, or read too late, is kept."""
        self.flush()
        start, end = self.at[op], self.end[op]
        writes, ordered = self._effects_below(op)
        for value, root in list(self.live()):
            for n in walk(root):
                if isinstance(n, ElementNode) and not n.shape:
                    self.register(n)
            root = resolve(root)
            if isinstance(root, BufferNode | ScalarNode):
                continue
            loads = [n.view for n in walk(root) if isinstance(n, LoadNode)]
            used_inside = any(start < u < end for u in self.uses[value])
            stale = any(self.conflicts(v, w) for v in loads for w in writes) or (
                ordered and any(is_shared(v) for v in loads)
            )
            if stale or (used_inside and root.cost > CHEAP):
                self.add_sink(KeepSink(root, None, True))
        self.flush()

    def _effects_below(self, op: Op) -> tuple[list[View | None], bool]:
        writes: list[View | None] = []
        ordered = False
        for block in op.blocks:
            for inner in ops_of(block):
                own = inner.EFFECTS if inner.blocks else inner.effects
                ordered = ordered or bool(own & {Effect.FENCE, Effect.WAIT})
                if Effect.WRITE in own:
                    target = inner.operands[0]
                    known = self._origin_of(target)
                    if isinstance(known, View):
                        writes.append(known)
                    elif isinstance(target.type, ViewType):
                        # Made inside the blocks of a symmetric object: a peer view, never LOCAL.
                        writes.append(View(target.type, "", (), (), ""))
                    else:
                        writes.append(None)
        return writes, ordered

    def _origin_of(self, view: Value) -> Any:
        """What a view is, or is made from, as far as it is lowered already."""
        while view not in self.values and view.op is not None and view.op.operands:
            view = view.op.operands[0]
        return self.values.get(view)

    # ------------------------------------------------------------ the host of groups

    @property
    def dummy(self) -> str:
        return self.scratch.base

    def alias(self, root: str) -> str:
        """Metadata of an access to a LOCAL parameter: it aliases no other parameter and no scratch."""
        if not root:
            return ""
        if root not in self.locals:
            self.locals.append(root)
        k = self.locals.index(root)
        return f", !alias.scope !{_SCOPES + 3 * k + 1}, !noalias !{_SCOPES + 3 * k + 2}"

    def scratch_alias(self) -> str:
        return self.alias("scratch")

    def metadata(self) -> str:
        """Definitions of the metadata that code refers to."""
        lines = [
            '!0 = !{!"branch_weights", i32 1000, i32 1}',
            '!1 = !{!"branch_weights", i32 1, i32 1000}',
            "!2 = !{i32 1}",
            f'!3 = distinct !{{!3, !"peertile {self.kernel.name}"}}',
        ]
        scopes = [_SCOPES + 3 * k for k in range(len(self.locals))]
        for k, scope in enumerate(scopes):
            lines.append(f'!{scope} = distinct !{{!{scope}, !3, !"{self.locals[k]}"}}')
            lines.append(f"!{scope + 1} = !{{!{scope}}}")
            lines.append(f"!{scope + 2} = !{{{', '.join(f'!{s}' for s in scopes if s != scope)}}}")
        return "\n".join(lines) + "\n"

    def stream_flag(self, view: View) -> str | None:
        """Whether stores to the view go around the caches; None if that is never useful."""
        if not view.root or view.type.partition is None or self._n_stores > MANY_STORES or self._is_loaded(view):
            return None
        if view.root not in self.streams:
            with self.at_entry():
                size = str(view.type.dtype.itemsize)
                for extent in view.extents:
                    size = self.f.value(f"mul i64 {size}, {extent}")
                self.streams[view.root] = self.f.value(f"icmp uge i64 {size}, {STREAM_BYTES}")
        return self.streams[view.root]

    def next_tile(self, load: LoadNode) -> str | None:
        """How many elements further the tile lies that the next program of this thread is likely to load, where it
        is worth fetching now: while a tile is read that is near already, and memory has nothing to do. None elsewhere.

        Programs follow each other along the last axis of a view that has more than one tile there, else along the one
        before. A guess: fetching what nobody reads, or what lies behind the view, costs time and nothing else.
        """
        size = load.numel * load.dtype.itemsize
        if self.waits or self.block is not self.kernel.body or not load.is_near:
            return None
        if not _FETCH_BYTES <= size <= _FETCH_LIMIT or all(is_literal(x) for x in load.origin):
            return None
        f, view = self.f, load.view
        ahead = mul(f, view.strides[-1], load.shape[-1])
        if len(load.shape) > 1:
            below = mul(f, view.strides[-2], load.shape[-2])
            wide = f.value(f"icmp sgt i64 {view.extents[-1]}, {load.shape[-1]}")
            ahead = f.value(f"select i1 {wide}, i64 {ahead}, i64 {below}")
        return ahead

    def _is_loaded(self, view: View) -> bool:
        return any(self.values.get(v) is view for v in self._loaded_views)

    def stream_fence(self) -> None:
        """In front of a release: stores around the caches are not ordered by it on x86."""
        if (self.streams or self.stores_around) and self.target.is_x86:
            self.f.emit("call void @llvm.x86.sse.sfence()")

    # ------------------------------------------------------------ the launch

    def context_word(self, word: int) -> str:
        """A word of the launch context that does not change while the launch runs."""
        if word not in self._context:
            with self.at_entry():
                address = self.f.value(f"getelementptr inbounds i64, ptr %ctx, i64 {word}")
                self._context[word] = self.f.value(f"load i64, ptr {address}, align 8")
        return self._context[word]

    def context_pointer(self, word: int) -> str:
        with self.at_entry():
            address = self.f.value(f"getelementptr inbounds i64, ptr %ctx, i64 {word}")
            return self.f.value(f"load ptr, ptr {address}, align 8")

    def grid(self, axis: int) -> str:
        """Number of programs along a grid axis."""
        return self.context_word(axis)

    def program_index(self, axis: int) -> str:
        """Index of this program along a grid axis; axis 0 is the fastest."""
        if self.kernel.grid_rank == 1:
            return self.program if axis == 0 else "0"
        index = self.program
        for k in range(axis):
            index = self.f.value(f"udiv i64 {index}, {self.grid(k)}")
        return index if axis == 2 else self.f.value(f"urem i64 {index}, {self.grid(axis)}")

    def helper_fault(self) -> str:
        """Name of the function that records a fault of this launch, unless one is recorded already."""
        name = "record_fault"
        self.helpers[name] = _FAULT.replace("NAME", name)
        return name

    # ------------------------------------------------------------ walking

    @contextmanager
    def at_entry(self) -> Iterator[None]:
        """Emit into the block that runs once, in front of everything."""
        saved, self.f.current = self.f.current, self.entry
        try:
            yield
        finally:
            self.f.current = saved

    def place(self, op: Op, kind: str, message: str = "", what: str = "") -> int:
        self.places.append(Place(op.loc, message, what, kind))
        return len(self.places) - 1

    def lower_block(self, block: Block) -> None:
        """Lower the ops of a block up to its terminator; the block that is current afterwards may be
        terminated."""
        outer, self.block = self.block, block
        for op in block.ops:
            self.now = self.at[op]
            rule = LOWERINGS.get(type(op))
            if rule is None:
                raise InternalError(
                    f"cpu backend: no lowering of {op.NAME}; known are {sorted(c.NAME for c in LOWERINGS)}"
                )
            rule(self, op)
            self._fresh = []
            if self.f.current.terminated:
                break
        else:
            self.flush()
        self.group = None
        self.block = outer


def _stores_in_loops(kernel: Kernel) -> bool:
    """Whether a release may follow a store that stands behind it in the text."""

    def found(block: Block, inside: bool) -> bool:
        for op in block.ops:
            if inside and isinstance(op, ops.Store | ops.AsyncStore):
                t = op.operands[0].type
                if isinstance(op, ops.AsyncStore) or (isinstance(t, ViewType) and t.partition is not None):
                    return True
            if any(found(inner, inside or isinstance(op, ops.For | ops.Loop)) for inner in op.blocks):
                return True
        return False

    return found(kernel.body, False)


_SCOPES = 4  # number of the first metadata node of alias scopes

_FAULT = """
define internal void @NAME(ptr %ctx, i64 %kind, i64 %program, i64 %place, i64 %got, i64 %limit) cold noinline nounwind {
  %where = getelementptr inbounds i64, ptr %ctx, i64 5
  %record = load ptr, ptr %where, align 8
  %claim = cmpxchg ptr %record, i64 0, i64 1 acq_rel monotonic, align 8
  %mine = extractvalue { i64, i1 } %claim, 1
  br i1 %mine, label %write, label %done
write:
  %p1 = getelementptr inbounds i64, ptr %record, i64 1
  store i64 %kind, ptr %p1, align 8
  %p2 = getelementptr inbounds i64, ptr %record, i64 2
  store i64 %program, ptr %p2, align 8
  %p3 = getelementptr inbounds i64, ptr %record, i64 3
  store i64 %place, ptr %p3, align 8
  %p4 = getelementptr inbounds i64, ptr %record, i64 4
  store i64 %got, ptr %p4, align 8
  %p5 = getelementptr inbounds i64, ptr %record, i64 5
  store i64 %limit, ptr %p5, align 8
  store atomic i64 2, ptr %record release, align 8
  br label %done
done:
  ret void
}
"""
