"""Lowering of views and of tiles of memory: peer views, fields, load, store, tile atomics."""

from __future__ import annotations

from collections.abc import Callable

from peertile.backends.cpu.atomics import atomic_rmw
from peertile.backends.cpu.evaluate import ORIGIN, Coordinate, Evaluator, Mode, counted_loop
from peertile.backends.cpu.groups import StoreSink, tile_access
from peertile.backends.cpu.lower import Lowering, Record, Symmetric, lowers
from peertile.backends.cpu.nodes import BufferNode, LoadNode, Node, ScalarNode, View, resolve
from peertile.backends.cpu.reads import buffers_below
from peertile.ir import ops
from peertile.ir.core import Op, Value
from peertile.ir.types import TileType, ViewType


@lowers(ops.PeerView)
def _peer_view(lo: Lowering, op: ops.PeerView) -> None:
    f = lo.f
    symmetric = lo.values[op.operands[0]]
    assert isinstance(symmetric, Symmetric)
    rank = lo.scalar(op.operands[1])
    word = f.value(f"add i64 {rank}, 2")
    address = f.value(f"getelementptr inbounds i64, ptr {symmetric.table}, i64 {word}")
    base = f.value(f"load ptr, ptr {address}, align 8")
    pointer = f.value(f"getelementptr i8, ptr {base}, i64 {symmetric.offset}")
    t = op.result.type
    assert isinstance(t, ViewType)
    key, part = (id(symmetric), rank), (symmetric, op.operands[1])
    lo.define(op.result, View(t, pointer, symmetric.extents, symmetric.strides, "", key, part))


@lowers(ops.Field)
def _field(lo: Lowering, op: ops.Field) -> None:
    record = lo.values[op.operands[0]]
    assert isinstance(record, Record)
    lo.define(op.result, record.fields[op.attrs["field"]])


def _origin(lo: Lowering, indices: list[Value], shape: tuple[int, ...]) -> tuple[str, ...]:
    """First element of a tile. Equal indices give equal registers, so that a store is seen to overwrite just
    what was loaded."""
    return tuple(lo.scaled(lo.scalar(v), n) for v, n in zip(indices, shape, strict=True))


@lowers(ops.Load)
def _load(lo: Lowering, op: ops.Load) -> None:
    view = lo.values[op.operands[0]]
    assert isinstance(view, View)
    t = op.result.type
    assert isinstance(t, TileType)
    origin = _origin(lo, op.operands[1:], t.shape)
    lo.before_load(view)
    lo.define(op.result, lo.new(LoadNode(view, t.shape, origin, op.attrs["padding"])))


@lowers(ops.Store)
def _store(lo: Lowering, op: ops.Store) -> None:
    store(lo, op)


def store(lo: Lowering, op: Op, *, is_async: bool = False) -> None:
    """A store of a tile; `is_async` where somebody waits for its end before anybody reads it."""
    view = lo.values[op.operands[0]]
    assert isinstance(view, View)
    node = lo.node(op.operands[1])
    origin = _origin(lo, op.operands[2:], node.shape)
    node = lo.store_operand(view, origin, resolve(node))
    lo.before_write(view, origin, node)
    lo.add_sink(StoreSink(resolve(node), view, origin, is_async))


@lowers(ops.TileAtomic)
def _tile_atomic(lo: Lowering, op: ops.TileAtomic) -> None:
    view = lo.values[op.operands[0]]
    assert isinstance(view, View)
    node = lo.node(op.operands[1])
    origin = _origin(lo, op.operands[2:], node.shape)
    lo.order_point()
    node = in_registers_or_scratch(lo, node)
    lo.before_write(None)
    order = op.attrs["order"]
    if order.releases:
        lo.stream_fence()
    tile = tile_access(lo.f, view, node.shape, origin)
    f = lo.f

    def one(p: tuple[Coordinate, ...]) -> None:
        evaluator = Evaluator(lo, 1, Mode(False), {})
        (value,) = evaluator.values(node, [p])
        count = evaluator.count(tile, p)
        inside = f.value(f"icmp sgt i64 {count}, 0")
        yes, no = f.block("inside"), f.block("outside")
        f.cond_br(inside, yes, no)
        f.place(yes)
        address = evaluator._row(tile, p)
        atomic_rmw(lo, op.attrs["rmw"], view.type.dtype, address, value, order)
        f.br(no)
        f.place(no)

    element_loop(lo, node.shape, one)


def in_registers_or_scratch(lo: Lowering, node: Node) -> Node:
    """What a loop over single elements can read at any place: a register or dense scratch."""
    node = resolve(node)
    if isinstance(node, BufferNode | ScalarNode):
        return node
    if not node.shape:
        return ScalarNode(node.dtype, (), lo.register(node))
    return lo.keep_now(node)


def element_loop(
    lo: Lowering, shape: tuple[int, ...], body: Callable[[tuple[Coordinate, ...]], None]
) -> None:  # fmt: skip
    """`body` at every element, in row-major order, one at a time."""

    def nest(axis: int, at: list[Coordinate]) -> None:
        if axis == len(shape):
            body(tuple(at))
            return

        def inner(index: str, _: list[str]) -> list[str]:
            nest(axis + 1, [*at, Coordinate(index) if index != "0" else ORIGIN])
            return []

        counted_loop(lo.f, shape[axis], 1, [], inner)

    nest(0, [])


def writable(lo: Lowering, op: Op, value: Value) -> BufferNode:
    """Dense scratch with the elements of an operand of `op`, which `op` may write: the operand's own where nobody
    else reads that, else a copy."""
    node = lo.node(value)
    later = lo.last_use[value] > lo.now
    if isinstance(node, BufferNode) and node.is_dense and not later and op.operands.count(value) == 1:
        others = [n for v, n in lo.live() if v is not value]
        if not any(node.buffer in buffers_below(n, set()) for n in others):
            return node
    # Into scratch of its own, which the operand's node is not bound to: tiles not computed yet may still read that.
    copy = lo.tile_buffer(node.dtype, node.shape)
    lo.keep_into(node, copy)
    lo.flush()
    return copy
