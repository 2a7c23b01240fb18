"""Groups: consecutive sinks over one iteration space, emitted as one loop nest.

A sink is what needs elements: a store to a view, a copy to scratch, a reduction. All values of a trip are
computed before its first store, so a sink may write the scratch that another sink of the group reads at the
same position. Nothing here decides *when* a group is emitted; see lower.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from peertile.backends.cpu import arith
from peertile.backends.cpu.convert import Batch, constant, narrow, widen
from peertile.backends.cpu.evaluate import (
    ORIGIN,
    Coordinate,
    Evaluator,
    Host,
    Mode,
    Position,
    TileAccess,
    counted_loop,
    element_type,
)
from peertile.backends.cpu.mathlib import Library
from peertile.backends.cpu.nodes import BufferNode, Cell, LoadNode, Node, ScalarNode, View, resolve, walk
from peertile.backends.cpu.target import CpuTarget
from peertile.backends.cpu.text import Block, Function, add, mul
from peertile.dtypes import DType, f32
from peertile.ir.ops import Fold

__all__ = ["Group", "GroupHost", "KeepSink", "ReduceSink", "Sink", "StoreSink", "emit_group"]

UNROLL = 4
"""Vectors per trip. More chains in flight hide latency: 5.7 ns/element at 1, 2.25 at 4, 1.75 at 6 for a chain
of 100 ops, while compile time grows with it."""
MANY_NODES = 128
"""Bodies of more nodes unroll half as much, and of four times as many not at all: compile time."""


@dataclass(eq=False, slots=True)
class KeepSink:
    """Copies a tile to scratch. With `bind`, the node itself is read from there afterwards; without, the
    scratch is a place of its own (a carried value's) and the node stays virtual."""

    node: Node
    to: BufferNode | None
    bind: bool
    result: BufferNode | None = None


@dataclass(eq=False, slots=True)
class StoreSink:
    """Writes a tile to a view; around the caches where that can be done, if it was given to an agent of its own."""

    node: Node
    view: View
    origin: tuple[str, ...]
    is_async: bool = False


@dataclass(eq=False, slots=True)
class ReduceSink:
    """Folds `axis` of a tile; `cell` gets the result. `to` is where it goes unless it is one register."""

    node: Node
    fn: Fold
    axis: int
    cell: Cell
    to: BufferNode | None = None


Sink = KeepSink | StoreSink | ReduceSink


@dataclass(eq=False, slots=True)
class Group:
    """Sinks over `shape`; `axis` is that of the reductions, if there are any."""

    shape: tuple[int, ...]
    axis: int | None = None
    sinks: list[Sink] = field(default_factory=list)

    def takes(self, sink: Sink) -> bool:
        """Whether the sink has the shape and reduction axis of the group."""
        if sink.node.shape != self.shape:
            return False
        return not isinstance(sink, ReduceSink) or self.axis in (None, sink.axis)

    def add(self, sink: Sink) -> None:
        self.sinks.append(sink)
        if isinstance(sink, ReduceSink):
            self.axis = sink.axis


class GroupHost(Host, Protocol):
    """What emitting a group needs from the lowering."""

    library: Library
    target: CpuTarget

    def stream_flag(self, view: View) -> str | None: ...

    def next_tile(self, load: LoadNode) -> str | None: ...


def register_bits(dtype: DType) -> int:
    """Width that an element takes while it is computed with."""
    return 8 if dtype.is_bool else max(dtype.bits, 32) if dtype.is_float else dtype.bits


def emit_group(host: GroupHost, group: Group) -> None:
    """Emit the loop nest of `group` and set `forward` of the cells of its reductions."""
    nest = _Nest(host, group)
    nest.emit()
    for node in nest.nodes:
        if isinstance(node, LoadNode):
            node.is_near = True


class _Nest:
    def __init__(self, host: GroupHost, group: Group) -> None:
        self.host = host
        self.f: Function = host.f
        self.group = group
        self.shape = group.shape
        self.nodes = self._all_nodes()
        wide = [k for k, n in enumerate(self.shape) if n > 1]
        self.vector_axis = wide[-1] if wide else None
        self.reduces = [s for s in group.sinks if isinstance(s, ReduceSink)]
        self._plan(wide)

    def _all_nodes(self) -> list[Node]:
        seen: set[int] = set()
        return [n for s in self.group.sinks for n in walk(s.node, seen)]

    def _plan(self, wide: list[int]) -> None:
        bits = max((register_bits(n.dtype) for n in self.nodes if not isinstance(n, ScalarNode)), default=32)
        v = self.vector_axis
        extent = 1 if v is None else self.shape[v]
        self.lanes = min(self.host.target.lanes(max(bits, 8)), extent, 64)
        count = len(self.nodes)
        limit = UNROLL if count <= MANY_NODES else UNROLL // 2 if count <= 4 * MANY_NODES else 1
        self.columns = min(limit, extent // self.lanes)
        axis = self.group.axis
        self.inner_axis = axis if axis is not None and axis != v else None
        outer = [k for k in wide if k not in (v, self.inner_axis)]
        self.row_axis = outer[-1] if outer else None
        self.rows = 1
        if self.row_axis is not None:
            self.rows = min(max(limit // self.columns, 1), self.shape[self.row_axis])
        self.outer = outer

    # ------------------------------------------------------------ in front of the loops

    def emit(self) -> None:
        f = self.f
        tiles: dict[int, TileAccess] = {}
        for node in self.nodes:
            if isinstance(node, LoadNode):
                tiles[id(node)] = tile = self._tile(node.view, node.shape, node.origin)
                tile.ahead = self.host.next_tile(node)
        for sink in self.group.sinks:
            if isinstance(sink, StoreSink):
                tiles[id(sink)] = self._tile(sink.view, sink.node.shape, sink.origin)
        self.tiles = tiles
        self._limit()
        stream = self._stream_condition()
        if stream is None:
            registers = self._nest(None)
        else:
            fast, plain, done = f.block("stream"), f.block("plain"), f.block("done")
            f.cond_br(stream, fast, plain)
            results = []
            for block, mode in ((fast, Mode(True, True)), (plain, None)):
                f.place(block)
                registers = self._nest(mode)
                results.append((registers, f.br(done)))
            f.place(done)
            registers = self._join(results, done)
        for sink, register in zip([s for s in self.reduces if s.to is None], registers, strict=True):
            sink.cell.forward = ScalarNode(sink.cell.dtype, sink.cell.shape, register)
        for sink in self.reduces:
            if sink.to is not None:
                sink.cell.forward = sink.to

    def _join(self, results: list[tuple[list[str], Block]], done: Block) -> list[str]:
        scalars = [s for s in self.reduces if s.to is None]
        out = []
        for k, sink in enumerate(scalars):
            phi = self.f.phi(done, element_type(sink.cell.dtype, 1))
            for registers, block in results:
                phi.add(registers[k], block)
            out.append(phi.name)
        return out

    def _tile(self, view: View, shape: tuple[int, ...], origin: tuple[str, ...]) -> TileAccess:
        return tile_access(self.f, view, shape, origin)

    def _moving_axis(self, access: TileAccess, node: LoadNode | None) -> int | None:
        """The axis of the access that the vector axis of the nest runs along (None: it does not move)."""
        if node is None:
            return self.vector_axis
        return self._axis_of.get(id(node))

    def _map_axes(self) -> None:
        """For each load, which of its axes is the vector axis. A load reached along two paths with different
        axes gets its last wide one; both are then checked to be strided, which only costs speed."""
        from_axis: dict[int, int | None] = {}
        conflict: set[int] = set()

        def visit(node: Node, axis: int | None) -> None:
            node = resolve(node)
            key = id(node)
            if key in from_axis:
                if from_axis[key] == axis:
                    return
                conflict.add(key)
                if from_axis[key] is not None and axis is None:
                    return
            from_axis[key] = axis
            mapping = getattr(node, "axes", None)
            for child in node.children:
                if mapping is None:
                    visit(child, axis)
                else:
                    inner = [k for k, a in enumerate(mapping) if a is not None and a == axis and axis is not None]
                    visit(child, inner[0] if inner else None)

        for sink in self.group.sinks:
            visit(sink.node, self.vector_axis)
        self._axis_of = from_axis
        self._conflicts = conflict

    def _limit(self) -> None:
        """Find out where tiles may be partial. No promise makes that unnecessary: an extent that is a multiple of
        the tile's may still be 0. `self.limit` is how far along the vector axis all of them are
        inside their views, with unit stride where vectors go: a register, or None if they always are. Along
        other axes the whole tile counts: a tile that sticks out there has limit -1."""
        f = self.f
        self._map_axes()
        whole: dict[tuple[str, ...], str] = {}
        bounds: dict[tuple[str, ...], str] = {}
        loads = {id(n): n for n in self.nodes if isinstance(n, LoadNode)}
        for tile_key, access in self.tiles.items():
            view, node = access.view, loads.get(tile_key)
            moving = self._moving_axis(access, node) if self.lanes > 1 else None
            if moving is not None and access.shape[moving] == 1:
                moving = None
            for axis, extent in enumerate(access.shape):
                fact = (view.extents[axis], access.origin[axis], str(extent))
                if axis == moving:
                    if fact not in bounds:
                        bounds[fact] = f.value(f"sub i64 {view.extents[axis]}, {access.origin[axis]}")
                elif fact not in whole:
                    end = add(f, access.origin[axis], extent)
                    whole[fact] = f.value(f"icmp sle i64 {end}, {view.extents[axis]}")
            if moving is not None:
                stride = view.strides[moving]
                if node is not None and id(node) in self._conflicts:
                    whole["never",] = "false"
                elif stride != "1" and (stride,) not in whole:
                    whole[stride,] = f.value(f"icmp eq i64 {stride}, 1")
        self.limit: str | None = None
        self.inside = "true"
        if not whole and not bounds:
            return
        extent = 1 if self.vector_axis is None else self.shape[self.vector_axis]
        limit = str(extent)
        for bound in bounds.values():
            limit = f.value(f"call i64 @llvm.smin.i64(i64 {limit}, i64 {bound})")
        for condition in whole.values():
            limit = f.value(f"select i1 {condition}, i64 {limit}, i64 -1")
        self.limit = limit
        self.inside = f.value(f"icmp sge i64 {limit}, {extent}")

    def _stream_condition(self) -> str | None:
        """Register that says whether stores should go around the caches, or None if no store can."""
        f = self.f
        stores = [s for s in self.group.sinks if isinstance(s, StoreSink)]
        if not stores or len(self.nodes) > 4 * MANY_NODES:
            return None
        result: str | None = None
        for sink in stores:
            flag = "true" if sink.is_async else self.host.stream_flag(sink.view)
            size = self.lanes * sink.view.type.dtype.itemsize
            if sink.view.type.dtype.is_bool or self.lanes == 1 or size < 16:
                return None
            if flag is None:
                continue  # of two stores in one loop the other may
            self.tiles[id(sink)].streams = True
            address = f.value(f"ptrtoint ptr {self.tiles[id(sink)].base} to i64")
            for axis, stride in enumerate(sink.view.strides):
                if axis != self.vector_axis and sink.node.shape[axis] > 1:
                    address = f.value(f"or i64 {address}, {mul(f, stride, sink.view.type.dtype.itemsize)}")
            low = f.value(f"and i64 {address}, {size - 1}")
            aligned = f.value(f"icmp eq i64 {low}, 0")
            both = f.value(f"and i1 {aligned}, {flag}")
            result = both if result is None else f.value(f"and i1 {result}, {both}")
        if result is None or self.inside == "true":
            return result
        return f.value(f"and i1 {result}, {self.inside}")

    # ------------------------------------------------------------ the loops

    def _nest(self, mode: Mode | None) -> list[str]:
        """Emit all loops once, in a mode or (None) asking at each trip whether it is inside; gives the registers
        of the reductions that have no scratch."""
        self.mode = Mode(True) if mode is None and self.limit is None else mode
        return self._outer(list(self.outer), [ORIGIN] * len(self.shape))

    def _outer(self, axes: list[int], at: list[Coordinate]) -> list[str]:
        if not axes:
            return self._vectors(at)
        axis = axes[0]
        step = self.rows if axis == self.row_axis else 1

        def body(index: str, _: list[str]) -> list[str]:
            inner = list(at)
            inner[axis] = Coordinate(index)
            self._outer(axes[1:], inner)
            return []

        if self.shape[axis] == step and step == 1:
            return self._outer(axes[1:], at)
        counted_loop(self.f, self.shape[axis], step, [], body)
        return []

    def _positions(self, at: list[Coordinate], index: str) -> list[Position]:
        """Positions of one trip: unrolled rows outside, columns inside."""
        positions = []
        for row in range(self.rows):
            for column in range(self.columns):
                p = list(at)
                if self.row_axis is not None:
                    p[self.row_axis] = Coordinate(at[self.row_axis].base, row)
                if self.vector_axis is not None:
                    p[self.vector_axis] = Coordinate(index, column * self.lanes, int(self.lanes > 1))
                positions.append(tuple(p))
        return positions

    def _vectors(self, at: list[Coordinate]) -> list[str]:
        v = self.vector_axis
        extent = 1 if v is None else self.shape[v]
        step = self.lanes * self.columns
        along_vectors = self.reduces if self.inner_axis is None else []
        inits = [x for s in along_vectors for x in self._inits(s)]

        def body(index: str, carried: list[str]) -> list[str]:
            positions = self._positions(at, index)
            if self.mode is not None:
                return self._columns(positions, carried, self.mode)
            f = self.f
            end = add(f, index, step)
            inside = f.value(f"icmp sle i64 {end}, {self.limit}")
            full, edge, join = f.block("full"), f.block("edge"), f.block("join")
            f.cond_br(inside, full, edge, likely=True)
            ends: list[tuple[list[str], Block]] = []
            for block, mode in ((full, Mode(True)), (edge, Mode(False))):
                f.place(block)
                totals = self._columns(positions, carried, mode)
                ends.append((totals, f.br(join)))
            f.place(join)
            joined = []
            for k, (t, _) in enumerate(inits):
                phi = f.phi(join, t)
                for totals, source in ends:
                    phi.add(totals[k], source)
                joined.append(phi.name)
            return joined

        totals = counted_loop(self.f, extent, step, inits, body)
        return self._finish_rows(at, totals) if along_vectors else []

    def _columns(self, positions: list[Position], carried: list[str], mode: Mode) -> list[str]:
        """One trip along the vector axis; a reduction along another axis is a loop inside it."""
        if self.inner_axis is None:
            return self._trip(positions, carried, mode)
        axis = self.inner_axis
        start = [x for s in self.reduces for x in self._inits(s)]

        def inner(row: str, accumulators: list[str]) -> list[str]:
            moved = []
            for p in positions:
                q = list(p)
                q[axis] = Coordinate(row)
                moved.append(tuple(q))
            return self._trip(moved, accumulators, mode)

        totals = counted_loop(self.f, self.shape[axis], 1, start, inner)
        self._finish_columns(positions, totals)
        return []

    def _accumulator(self, sink: ReduceSink) -> DType:
        """Narrow floats are summed in f32 and rounded once."""
        d = sink.node.dtype
        return f32 if d.is_float and d.bits < 32 else d

    def _inits(self, sink: ReduceSink) -> list[tuple[str, str]]:
        dtype = self._accumulator(sink)
        start = constant(arith.identity(sink.fn, dtype), dtype, self.lanes)
        return [(element_type(dtype, self.lanes), start)] * (self.rows * self.columns)

    def _trip(self, positions: list[Position], carried: list[str], mode: Mode) -> list[str]:
        evaluator = Evaluator(self.host, self.lanes, mode, self.tiles)
        values: list[Batch] = [evaluator.values(s.node, positions) for s in self.group.sinks]
        n = len(positions)
        totals: list[str] = []
        for sink, batch in zip(self.group.sinks, values, strict=True):
            if isinstance(sink, ReduceSink):
                dtype = self._accumulator(sink)
                wide = widen(self.f, batch, sink.node.dtype, self.lanes) if dtype != sink.node.dtype else batch
                now, carried = carried[:n], carried[n:]
                totals += arith.binary(
                    self.f, self.host.library, arith.FOLD_BINARY[sink.fn], dtype, self.lanes, now, wide
                )
        for sink, batch in zip(self.group.sinks, values, strict=True):
            for p, value in zip(positions, batch, strict=True):
                if isinstance(sink, KeepSink):
                    assert sink.to is not None
                    evaluator.store_scratch(sink.to, p, value, self.lanes)
                elif isinstance(sink, StoreSink):
                    evaluator.store_tile(self.tiles[id(sink)], p, value, self.lanes)
        return totals

    def _finish_rows(self, at: list[Coordinate], totals: list[str]) -> list[str]:
        """Fold the accumulators of each row and its lanes, and put the result where it belongs."""
        registers = []
        n = self.rows * self.columns
        evaluator = Evaluator(self.host, 1, Mode(True), {})
        for sink in self.reduces:
            mine, totals = totals[:n], totals[n:]
            dtype = self._accumulator(sink)
            rows = [mine[r * self.columns : (r + 1) * self.columns] for r in range(self.rows)]
            while len(rows[0]) > 1:
                half = len(rows[0]) // 2
                left, right = [x for r in rows for x in r[:half]], [x for r in rows for x in r[half:]]
                flat = arith.binary(
                    self.f, self.host.library, arith.FOLD_BINARY[sink.fn], dtype, self.lanes, left, right
                )
                rows = [flat[r * half : (r + 1) * half] for r in range(self.rows)]
            for r, (total,) in enumerate(rows):
                x = arith.fold(self.f, self.host.library, sink.fn, dtype, self.lanes, total)
                if dtype != sink.node.dtype:
                    (x,) = narrow(self.f, [x], sink.node.dtype, 1)
                if sink.to is None:
                    registers.append(x)
                    continue
                p = list(at)
                if self.row_axis is not None:
                    p[self.row_axis] = Coordinate(at[self.row_axis].base, r)
                evaluator.store_scratch(sink.to, self._without(p, sink.axis), x, 1)
        return registers

    def _finish_columns(self, positions: list[Position], totals: list[str]) -> None:
        n = len(positions)
        evaluator = Evaluator(self.host, self.lanes, Mode(True), {})
        for sink in self.reduces:
            mine, totals = totals[:n], totals[n:]
            if self._accumulator(sink) != sink.node.dtype:
                mine = narrow(self.f, mine, sink.node.dtype, self.lanes)
            assert sink.to is not None
            for p, x in zip(positions, mine, strict=True):
                evaluator.store_scratch(sink.to, self._without(list(p), sink.axis), x, self.lanes)

    def _without(self, p: list[Coordinate], axis: int) -> Position:
        return tuple(c for k, c in enumerate(p) if k != axis)


def tile_access(f: Function, view: View, shape: tuple[int, ...], origin: tuple[str, ...]) -> TileAccess:
    """The tile at `origin`, with its address computed here."""
    offset = "0"
    for start, stride in zip(origin, view.strides, strict=True):
        offset = add(f, offset, mul(f, start, stride))
    access = TileAccess(view, shape, origin, view.pointer)
    if offset != "0":
        access.base = f.value(f"getelementptr {access.element}, ptr {view.pointer}, i64 {offset}")
    return access
