"""Lowering of ops that compute values: constants, ids, elementwise, casts, shapes, reductions."""

from __future__ import annotations

from peertile.backends.cpu import arith
from peertile.backends.cpu.convert import cast, each
from peertile.backends.cpu.groups import ReduceSink
from peertile.backends.cpu.lower import Lowering, Symmetric, lowers
from peertile.backends.cpu.nodes import BufferNode, Cell, Emit, IotaNode, MapNode, Node, ScalarNode, View, resolve
from peertile.backends.cpu.text import LLVM, literal, vector
from peertile.ir import ops
from peertile.ir.core import Op
from peertile.ir.ops import Binary, Unary
from peertile.ir.types import TileType, ViewType

TRANSCENDENTAL = 8
"""Cost of a math function beside 1 for an addition."""
_PLAIN_UNARY = {Unary.NEG, Unary.NOT, Unary.ABS, Unary.FLOOR, Unary.CEIL, Unary.ROUND}
_PLAIN_BINARY = set(Binary) - {
    Binary.DIV, Binary.FLOORDIV, Binary.MOD, Binary.QUOT, Binary.REM, Binary.POW, Binary.ATAN2,
}  # fmt: skip


def tile_type(op: Op, k: int = 0) -> TileType:
    t = op.results[k].type
    assert isinstance(t, TileType)
    return t


@lowers(ops.Const)
def _const(lo: Lowering, op: ops.Const) -> None:
    lo.define_scalar(op.result, literal(op.attrs["value"], tile_type(op).dtype))


@lowers(ops.ProgramId)
def _program_id(lo: Lowering, op: ops.ProgramId) -> None:
    lo.define_scalar(op.result, lo.program_index(op.attrs["axis"]))


@lowers(ops.NumPrograms)
def _num_programs(lo: Lowering, op: ops.NumPrograms) -> None:
    lo.define_scalar(op.result, lo.grid(op.attrs["axis"]))


@lowers(ops.Rank, ops.NumRanks)
def _rank(lo: Lowering, op: ops.Rank) -> None:
    symmetric = lo.values[op.operands[0]]
    assert isinstance(symmetric, Symmetric)
    word = 0 if type(op) is ops.Rank else 1
    address = lo.f.value(f"getelementptr inbounds i64, ptr {symmetric.table}, i64 {word}")
    lo.define_scalar(op.result, lo.f.value(f"load i64, ptr {address}, align 8"))


@lowers(ops.Extent)
def _extent(lo: Lowering, op: ops.Extent) -> None:
    lo.define_scalar(op.result, lo.values[op.operands[0]].extents[op.attrs["axis"]])


def num_tiles(lo: Lowering, extent: str, size: int) -> str:
    more = lo.f.value(f"add nuw nsw i64 {extent}, {size - 1}")
    return lo.f.value(
        f"lshr i64 {more}, {size.bit_length() - 1}" if size & (size - 1) == 0 else f"udiv i64 {more}, {size}"
    )


@lowers(ops.NumTiles)
def _num_tiles(lo: Lowering, op: ops.NumTiles) -> None:
    extent = lo.values[op.operands[0]].extents[op.attrs["axis"]]
    lo.define_scalar(op.result, num_tiles(lo, extent, op.attrs["size"]))


@lowers(ops.TileIndex)
def _tile_index(lo: Lowering, op: ops.TileIndex) -> None:
    f = lo.f
    view = lo.values[op.operands[0]]
    assert isinstance(view, View)
    assert isinstance(view.type, ViewType)
    assert view.type.partition is not None
    partition = view.type.partition
    counts = [num_tiles(lo, e, s) for e, s in zip(view.extents, partition.tile_shape, strict=True)]
    rest = lo.scalar(op.operands[1])
    found: list[str] = []
    first = 2 if partition.swizzle > 1 and len(counts) >= 2 else 1
    for count in reversed(counts[first:]):
        found.append(f.value(f"urem i64 {rest}, {count}"))
        rest = f.value(f"udiv i64 {rest}, {count}")
    if first == 1:
        found.append(rest)
    else:
        # Group g has rows [g·s, min((g+1)·s, m)) of tiles, walked column by column.
        m, n = counts[:2]
        per_group = f.value(f"mul i64 {n}, {partition.swizzle}")
        group = f.value(f"udiv i64 {rest}, {per_group}")
        inside = f.value(f"urem i64 {rest}, {per_group}")
        start = f.value(f"mul i64 {group}, {partition.swizzle}")
        left = f.value(f"sub i64 {m}, {start}")
        rows = f.value(f"call i64 @llvm.smin.i64(i64 {left}, i64 {partition.swizzle})")
        row = f.value(f"urem i64 {inside}, {rows}")
        found += [f.value(f"udiv i64 {inside}, {rows}"), f.value(f"add i64 {start}, {row}")]
    for result, register in zip(op.results, reversed(found), strict=True):
        lo.define_scalar(result, register)


@lowers(ops.Iota)
def _iota(lo: Lowering, op: ops.Iota) -> None:
    t = tile_type(op)
    lo.define(op.result, lo.new(IotaNode(t.dtype, t.shape)))


# ---------------------------------------------------------------- elementwise


def emitter(lo: Lowering, op: Op) -> tuple[int, Emit]:
    """Cost of an elementwise op, and how its batches are computed from those of its operands."""
    f, fn = lo.f, op.attrs.get("fn")
    t = op.result.type
    first = op.operands[0].type
    assert isinstance(t, TileType)
    assert isinstance(first, TileType)
    dtype, source = t.dtype, first.dtype
    if isinstance(op, ops.UnaryOp):
        cost = 1 if fn in _PLAIN_UNARY else TRANSCENDENTAL
        return cost, lambda lanes, x: arith.unary(f, lo.library, op.attrs["fn"], dtype, lanes, x[0])
    if isinstance(op, ops.BinaryOp):
        cost = 1 if fn in _PLAIN_BINARY else TRANSCENDENTAL
        return cost, lambda lanes, x: arith.binary(f, lo.library, op.attrs["fn"], dtype, lanes, x[0], x[1])
    if isinstance(op, ops.CompareOp):
        return 1, lambda lanes, x: arith.compare(f, op.attrs["fn"], source, lanes, x[0], x[1])
    if isinstance(op, ops.Select):
        return 1, lambda lanes, x: arith.select(f, dtype, lanes, x[0], x[1], x[2])
    if isinstance(op, ops.Fma):
        return 1, lambda lanes, x: arith.fma(f, dtype, lanes, x[0], x[1], x[2])
    if isinstance(op, ops.Cast):
        rounding, saturate = op.attrs["rounding"], op.attrs["saturate"]
        return 1, lambda lanes, x: cast(f, x[0], source, dtype, lanes, rounding, saturate)
    assert isinstance(op, ops.Bitcast), op
    a, b = LLVM[source.name], LLVM[dtype.name]
    if a == b:
        return 0, lambda lanes, x: x[0]
    return 0, lambda lanes, x: each(f, f"bitcast {vector(a, lanes)} {{}} to {vector(b, lanes)}", x[0])


@lowers(ops.UnaryOp, ops.BinaryOp, ops.CompareOp, ops.Select, ops.Fma, ops.Cast, ops.Bitcast)
def _elementwise(lo: Lowering, op: Op) -> None:
    cost, emit = emitter(lo, op)
    children = tuple(lo.node(v) for v in op.operands)
    lo.define(op.result, lo.element(tile_type(op).dtype, children, cost, emit))


# ---------------------------------------------------------------- shapes


def ready(lo: Lowering, node: Node) -> Node:
    """`node`, emitted if it is a reduction still pending."""
    if isinstance(resolve(node), Cell):
        lo.flush()
    return resolve(node)


def broadcast(lo: Lowering, node: Node, shape: tuple[int, ...]) -> Node:
    node = ready(lo, node)
    if node.shape == shape:
        return node
    if isinstance(node, ScalarNode):
        return ScalarNode(node.dtype, shape, node.register)
    if not node.shape:
        return ScalarNode(node.dtype, shape, lo.register(node))
    if node.cost > 2 and node.numel < _numel(shape):
        node = lo.keep_now(node)
    axes = tuple(None if n == 1 else k for k, n in enumerate(node.shape))
    return lo.new(MapNode(node, shape, axes))


def _numel(shape: tuple[int, ...]) -> int:
    n = 1
    for e in shape:
        n *= e
    return n


@lowers(ops.Broadcast)
def _broadcast(lo: Lowering, op: ops.Broadcast) -> None:
    lo.define(op.result, broadcast(lo, lo.node(op.operands[0]), tile_type(op).shape))


@lowers(ops.Reshape)
def _reshape(lo: Lowering, op: ops.Reshape) -> None:
    node, shape = ready(lo, lo.node(op.operands[0])), tile_type(op).shape
    lo.define(op.result, reshape(lo, node, shape))


def reshape(lo: Lowering, node: Node, shape: tuple[int, ...]) -> Node:
    if node.shape == shape:
        return node
    if isinstance(node, ScalarNode):
        return ScalarNode(node.dtype, shape, node.register)
    if not shape or not node.shape:
        # One element: a register.
        return ScalarNode(node.dtype, shape, lo.register(node))
    if isinstance(node, BufferNode) and node.is_dense:
        return BufferNode(node.buffer, node.dtype, shape)
    if [n for n in node.shape if n > 1] == [n for n in shape if n > 1]:
        wide = iter([k for k, n in enumerate(shape) if n > 1])
        return lo.new(MapNode(node, shape, tuple(None if n == 1 else next(wide) for n in node.shape)))
    kept = lo.keep_now(node)
    return BufferNode(kept.buffer, kept.dtype, shape)


@lowers(ops.Permute)
def _permute(lo: Lowering, op: ops.Permute) -> None:
    node, axes = ready(lo, lo.node(op.operands[0])), op.attrs["axes"]
    shape = tile_type(op).shape
    if isinstance(node, ScalarNode):
        lo.define(op.result, ScalarNode(node.dtype, shape, node.register))
    elif isinstance(node, BufferNode):
        lo.define(op.result, BufferNode(node.buffer, node.dtype, shape, tuple(node.strides[k] for k in axes)))
    else:
        inverse = [0] * len(axes)
        for k, axis in enumerate(axes):
            inverse[axis] = k
        lo.define(op.result, lo.new(MapNode(node, shape, tuple(inverse))))


# ---------------------------------------------------------------- reductions


@lowers(ops.Reduce)
def _reduce(lo: Lowering, op: ops.Reduce) -> None:
    node, axis = lo.node(op.operands[0]), op.attrs["axis"]
    t = tile_type(op)
    if node.shape[axis] == 1:
        lo.define(op.result, reshape(lo, ready(lo, node), t.shape))
        return
    cell = Cell(t.dtype, t.shape)
    lo.new(cell)
    lo.add_sink(ReduceSink(node, op.attrs["fn"], axis, cell))
    lo.define(op.result, cell)
