"""Lowering of views of views, of gathers and scatters, and of tiles that are accessed with an order.

A derived view is registers alone: address, extents and strides. It keeps the root of what it was made from, so
that the hazard rules see both as one memory.
"""

from __future__ import annotations

from dataclasses import replace

from peertile.backends.cpu.atomics import atomic_load, atomic_store
from peertile.backends.cpu.evaluate import Coordinate, Evaluator, Mode, Position, counted_loop
from peertile.backends.cpu.groups import KeepSink, StoreSink, tile_access
from peertile.backends.cpu.lower import Lowering, Symmetric, lowers
from peertile.backends.cpu.memory import element_loop, in_registers_or_scratch, store
from peertile.backends.cpu.nodes import Buffer, BufferNode, LoadNode, Node, ScalarNode, View, row_major
from peertile.backends.cpu.text import LLVM, MEMORY, add, mul
from peertile.backends.cpu.words import address_of, pause, satisfied, suspend, widened
from peertile.dtypes import DType
from peertile.ir import ops
from peertile.ir.core import Op, Value
from peertile.ir.types import TileType, ViewType

SPINS = 8
"""As of a single wait."""
START_WORD = 4
"""Word of the promise that says since when a program waits."""


# ---------------------------------------------------------------- views of views


@lowers(ops.ViewStride)
def _stride(lo: Lowering, op: ops.ViewStride) -> None:
    view = lo.values[op.operands[0]]
    assert isinstance(view, View | Symmetric)
    lo.define_scalar(op.result, view.strides[op.attrs["axis"]])


def _derived(lo: Lowering, op: Op, pointer: str, extents: tuple[str, ...], strides: tuple[str, ...]) -> None:
    view = lo.values[op.operands[0]]
    t = op.result.type
    assert isinstance(t, ViewType)
    # A key of its own: two derived views are the same place for certain only if they are the same value.
    lo.define(op.result, View(t, pointer, extents, strides, view.root, op, view.part))


@lowers(ops.ViewSlice)
def _slice(lo: Lowering, op: ops.ViewSlice) -> None:
    view, f = lo.values[op.operands[0]], lo.f
    rank = view.type.rank
    registers = [lo.scalar(v) for v in op.operands[1:]]
    starts, extents, steps = registers[:rank], registers[rank : 2 * rank], registers[2 * rank :]
    offset = "0"
    for start, stride in zip(starts, view.strides, strict=True):
        offset = add(f, offset, mul(f, start, stride))
    pointer = view.pointer
    if offset != "0":
        pointer = f.value(f"getelementptr {MEMORY[view.type.dtype.name]}, ptr {pointer}, i64 {offset}")
    strides = tuple(mul(f, stride, step) for stride, step in zip(view.strides, steps, strict=True))
    _derived(lo, op, pointer, tuple(extents), strides)


@lowers(ops.ViewPermute)
def _permute(lo: Lowering, op: ops.ViewPermute) -> None:
    view, axes = lo.values[op.operands[0]], op.attrs["axes"]
    _derived(lo, op, view.pointer, tuple(view.extents[k] for k in axes), tuple(view.strides[k] for k in axes))


@lowers(ops.ViewReshape)
def _reshape(lo: Lowering, op: ops.ViewReshape) -> None:
    view, f = lo.values[op.operands[0]], lo.f
    extents = tuple(lo.scalar(v) for v in op.operands[1:])
    strides, step = [], "1"
    for extent in reversed(extents):
        strides.append(step)
        step = mul(f, step, extent)
    _derived(lo, op, view.pointer, extents, tuple(reversed(strides)))


# ---------------------------------------------------------------- gather and scatter


def _chosen(lo: Lowering, indices: Node, k: str) -> str:
    """Element k of the tile of indices, as i64."""
    (index,) = Evaluator(lo, 1, Mode(True), {}).values(indices, [(Coordinate(k),)])
    if indices.dtype.bits == 64:
        return index
    extend = "sext" if indices.dtype.is_signed else "zext"
    return lo.f.value(f"{extend} {LLVM[indices.dtype.name]} {index} to i64")


def _at(lo: Lowering, view: View, axis: int, index: str) -> View:
    """The slice of `view` at `index` of an axis, which keeps an extent of 1, or 0 where there is no such slice."""
    f, extent = lo.f, view.extents[axis]
    low, high = f.value(f"icmp sge i64 {index}, 0"), f.value(f"icmp slt i64 {index}, {extent}")
    inside = f.value(f"and i1 {low}, {high}")
    safe = f.value(f"select i1 {inside}, i64 {index}, i64 0")
    offset = mul(f, safe, view.strides[axis])
    pointer = f.value(f"getelementptr {MEMORY[view.type.dtype.name]}, ptr {view.pointer}, i64 {offset}")
    one = f.value(f"zext i1 {inside} to i64")
    extents = (*view.extents[:axis], one, *view.extents[axis + 1 :])
    return replace(view, pointer=pointer, extents=extents, key=None)


def _others(lo: Lowering, indices: list[Value], axis: int, shape: tuple[int, ...]) -> tuple[str, ...]:
    """First element of the tile along each axis; 0 along `axis`, where slices are chosen."""
    rest = iter(indices)
    return tuple("0" if k == axis else lo.scaled(lo.scalar(next(rest)), n) for k, n in enumerate(shape))


def _thin(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], 1, *shape[axis + 1 :])


def _rows(lo: Lowering, tile: BufferNode, axis: int, k: str) -> BufferNode:
    """Slice k of a tile in scratch."""
    bytes_ = tile.strides[axis] * tile.dtype.itemsize
    pointer = lo.f.value(f"getelementptr i8, ptr {tile.address}, i64 {mul(lo.f, k, bytes_)}")
    buffer = Buffer(tile.buffer.offset, tile.buffer.bytes, pointer, True)
    return BufferNode(buffer, tile.dtype, _thin(tile.shape, axis), tile.strides)


@lowers(ops.Gather)
def _gather(lo: Lowering, op: ops.Gather) -> None:
    view, axis = lo.values[op.operands[0]], op.attrs["axis"]
    t = op.result.type
    assert isinstance(t, TileType)
    indices = in_registers_or_scratch(lo, lo.node(op.operands[1]))
    origin = _others(lo, op.operands[2:], axis, t.shape)
    lo.before_load(view)
    lo.flush()
    # Rows go to scratch as vectors; where the last axis is chosen, one element at a time with that axis first.
    last = axis == len(t.shape) - 1 and axis > 0
    order = (axis, *(k for k in range(len(t.shape)) if k != axis)) if last else tuple(range(len(t.shape)))
    dense = tuple(t.shape[k] for k in order)
    to = lo.tile_buffer(t.dtype, dense)
    strides = [0] * len(order)
    for k, stride in zip(order, row_major(dense), strict=True):
        strides[k] = stride
    tile = BufferNode(to.buffer, t.dtype, t.shape, tuple(strides))

    def row(k: str, _: list[str]) -> list[str]:
        part = _at(lo, view, axis, _chosen(lo, indices, k))
        load = LoadNode(part, _thin(t.shape, axis), origin, op.attrs["padding"])
        load.block = lo.block
        lo.add_sink(KeepSink(load, _rows(lo, tile, axis, k), False))
        lo.flush()
        return []

    counted_loop(lo.f, t.shape[axis], 1, [], row)
    lo.define(op.result, tile)


@lowers(ops.Scatter)
def _scatter(lo: Lowering, op: ops.Scatter) -> None:
    view, axis = lo.values[op.operands[0]], op.attrs["axis"]
    lo.order_point()
    node = in_registers_or_scratch(lo, lo.node(op.operands[1]))
    indices = in_registers_or_scratch(lo, lo.node(op.operands[2]))
    origin = _others(lo, op.operands[3:], axis, node.shape)
    lo.before_write(view)
    lo.flush()

    def row(k: str, _: list[str]) -> list[str]:
        part = _at(lo, view, axis, _chosen(lo, indices, k))
        if isinstance(node, BufferNode):
            value: Node = _rows(lo, node, axis, k)
        else:
            assert isinstance(node, ScalarNode)
            value = ScalarNode(node.dtype, _thin(node.shape, axis), node.register)
        lo.add_sink(StoreSink(value, part, origin))
        lo.flush()
        return []

    counted_loop(lo.f, node.shape[axis], 1, [], row)


# ---------------------------------------------------------------- tiles with an order


@lowers(ops.TileLoad)
def _tile_load(lo: Lowering, op: ops.TileLoad) -> None:
    view, f = lo.values[op.operands[0]], lo.f
    t = op.result.type
    assert isinstance(t, TileType)
    origin = tuple(lo.scaled(lo.scalar(v), n) for v, n in zip(op.operands[1:], t.shape, strict=True))
    lo.order_point()
    tile = tile_access(f, view, t.shape, origin)
    to = lo.tile_buffer(t.dtype, t.shape)

    def one(p: Position) -> None:
        evaluator = Evaluator(lo, 1, Mode(False), {})
        inside = f.value(f"icmp sgt i64 {evaluator.count(tile, p)}, 0")
        # What lies outside is read from scratch, which nobody else sees, and dropped.
        address = f.value(f"select i1 {inside}, ptr {evaluator._row(tile, p)}, ptr {lo.dummy}")
        value = atomic_load(lo, t.dtype, address, op.attrs["order"])
        value = f.value(f"select i1 {inside}, {LLVM[t.dtype.name]} {value}, {LLVM[t.dtype.name]} {_zero(t.dtype)}")
        evaluator.store_scratch(to, p, value, 1)

    element_loop(lo, t.shape, one)
    lo.define(op.result, BufferNode(to.buffer, t.dtype, t.shape))


def _zero(dtype: DType) -> str:
    return "0.0" if LLVM[dtype.name] in ("float", "double", "half", "bfloat") else "0"


@lowers(ops.TileStore)
def _tile_store(lo: Lowering, op: ops.TileStore) -> None:
    view, f = lo.values[op.operands[0]], lo.f
    node = lo.node(op.operands[1])
    origin = tuple(lo.scaled(lo.scalar(v), n) for v, n in zip(op.operands[2:], node.shape, strict=True))
    lo.order_point()
    node = in_registers_or_scratch(lo, node)
    lo.before_write(None)
    order = op.attrs["order"]
    if order.releases:
        lo.stream_fence()
    tile = tile_access(f, view, node.shape, origin)

    def one(p: Position) -> None:
        evaluator = Evaluator(lo, 1, Mode(False), {})
        (value,) = evaluator.values(node, [p])
        inside = f.value(f"icmp sgt i64 {evaluator.count(tile, p)}, 0")
        address = f.value(f"select i1 {inside}, ptr {evaluator._row(tile, p)}, ptr {lo.dummy}")
        atomic_store(lo, view.type.dtype, address, value, order)

    element_loop(lo, node.shape, one)


@lowers(ops.AsyncStore)
def _async_store(lo: Lowering, op: ops.AsyncStore) -> None:
    # Around the caches: what is given to an agent of its own is for somebody else, and between cores that share
    # no cache, memory is two to three times faster than fetching lines that the other one has written.
    lo.stores_around = True
    store(lo, op, is_async=True)
    lo.define(op.result, None)


@lowers(ops.WaitTransfer)
def _wait_transfer(lo: Lowering, op: ops.WaitTransfer) -> None:
    lo.order_point()
    lo.stream_fence()


# ---------------------------------------------------------------- one of several words


@lowers(ops.WaitAny)
def _wait_any(lo: Lowering, op: ops.WaitAny) -> None:
    """Looks at the words in turn and sleeps without naming one: the executor resumes it every round."""
    f, order, cmp = lo.f, op.attrs["order"], op.attrs["cmp"]
    lo.order_point()
    words = []
    for view_value, expected, indices in op.words():
        view = lo.values[view_value]
        words.append((view.type.dtype, address_of(lo, view, indices), lo.scalar(expected)))
    place = lo.place(op, "wait", what=op.attrs["what"])
    # The time counts from here, however often it is resumed.
    began = f.value(f"getelementptr inbounds i64, ptr {lo.promise}, i64 {START_WORD}")
    f.emit(f"store i64 0, ptr {began}, align 8")
    look, done = f.block("look"), f.block("satisfied")
    source = f.br(look)
    f.place(look)
    left = f.phi(look, "i64")
    left.add(str(SPINS), source)
    which = f.phi(done, "i64")
    for k, (dtype, address, expected_register) in enumerate(words):
        value = atomic_load(lo, dtype, address, order)
        holds = satisfied(lo, cmp, dtype, value, expected_register)
        other = f.block("unsatisfied")
        which.add(str(k), f.cond_br(holds, done, other))
        f.place(other)
    fewer = f.value(f"sub i64 {left.name}, 1")
    again = f.value(f"icmp sgt i64 {fewer}, 0")
    spin, sleep = f.block("spin"), f.block("sleep")
    f.cond_br(again, spin, sleep)
    f.place(spin)
    pause(lo)
    left.add(fewer, f.br(look))
    f.place(sleep)
    dtype, _, expected_register = words[0]
    wanted = widened(lo, dtype, expected_register)
    suspend(lo, ["0", wanted, "0", "0", None, str(place), "0", "0"])
    left.add("0", f.br(look))
    f.place(done)
    lo.define_scalar(op.result, which.name)
