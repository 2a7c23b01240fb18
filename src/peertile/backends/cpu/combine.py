"""Lowering of folds and scans by a function of the kernel's: its block is emitted for vectors of elements.

The axis is brought to the front in scratch, so that one vector holds as many independent folds; along the axis
elements are combined from the first to the last, which is the order of the meaning, to the bit.
"""

from __future__ import annotations

from peertile.backends.cpu import arith
from peertile.backends.cpu.convert import Batch, cast, constant, each
from peertile.backends.cpu.evaluate import Coordinate, Evaluator, Mode, counted_loop, element_type
from peertile.backends.cpu.groups import register_bits
from peertile.backends.cpu.lower import Lowering, lowers
from peertile.backends.cpu.nodes import BufferNode, Cell, MapNode, Node, ScalarNode, resolve
from peertile.backends.cpu.text import LLVM, vector
from peertile.dtypes import DType
from peertile.errors import InternalError
from peertile.ir import ops
from peertile.ir.core import Block, Op, Value
from peertile.ir.types import TileType

__all__ = ["axis_to"]


def _dtype(value: Value) -> DType:
    assert isinstance(value.type, TileType)
    return value.type.dtype


def _emit_block(lo: Lowering, block: Block, lanes: int, args: list[Batch]) -> list[Batch]:
    """The elementwise ops of a combining block on vectors; what it yields."""
    f = lo.f
    known: dict[Value, Batch] = dict(zip(block.args, args, strict=True))
    for op in block.ops:
        x = [known[v] for v in op.operands]
        if isinstance(op, ops.Yield):
            return x
        d = _dtype(op.result)
        match op:
            case ops.Const():
                found = [constant(op.attrs["value"], d, lanes)]
            case ops.UnaryOp():
                found = arith.unary(f, lo.library, op.attrs["fn"], d, lanes, x[0])
            case ops.BinaryOp():
                found = arith.binary(f, lo.library, op.attrs["fn"], d, lanes, x[0], x[1])
            case ops.CompareOp():
                found = arith.compare(f, op.attrs["fn"], _dtype(op.operands[0]), lanes, x[0], x[1])
            case ops.Select():
                found = arith.select(f, d, lanes, x[0], x[1], x[2])
            case ops.Fma():
                found = arith.fma(f, d, lanes, x[0], x[1], x[2])
            case ops.Cast():
                source = _dtype(op.operands[0])
                found = cast(f, x[0], source, d, lanes, op.attrs["rounding"], op.attrs["saturate"])
            case ops.Bitcast():
                a, b = LLVM[_dtype(op.operands[0]).name], LLVM[d.name]
                found = x[0] if a == b else each(f, f"bitcast {vector(a, lanes)} {{}} to {vector(b, lanes)}", x[0])
            case _:
                raise InternalError(f"cpu backend: {op.NAME} in a combining block")
        known[op.result] = found
    raise InternalError("cpu backend: a combining block without a yield")


def axis_to(lo: Lowering, node: Node, axis: int, place: int) -> BufferNode:
    """`node` in scratch, dense, with `axis` moved to be axis `place` (0, or -1 for the last)."""
    node = resolve(node)
    if isinstance(node, Cell):
        lo.flush()
        node = resolve(node)
    rank = len(node.shape)
    order = [k for k in range(rank) if k != axis]
    order.insert(0 if place == 0 else rank - 1, axis)
    if order != list(range(rank)):
        inverse = [order.index(k) for k in range(rank)]
        node = lo.new(MapNode(node, tuple(node.shape[k] for k in order), tuple(inverse)))
    return lo.keep_now(node)


class _Fold:
    """What folds and scans share: operands in scratch as [n, rest], and the loop along the axis."""

    def __init__(self, lo: Lowering, op: Op) -> None:
        self.lo, self.op = lo, op
        axis = op.attrs["axis"]
        t = op.operands[0].type
        assert isinstance(t, TileType)
        self.n = t.shape[axis]
        self.rest = t.numel // self.n
        self.others = t.shape[:axis] + t.shape[axis + 1 :]
        self.sources: list[BufferNode] = []
        for v in op.operands:
            kept = axis_to(lo, lo.node(v), axis, 0)
            self.sources.append(BufferNode(kept.buffer, kept.dtype, (self.n, self.rest)))
        lo.flush()
        self.dtypes = [s.dtype for s in self.sources]
        bits = max(register_bits(d) for d in self.dtypes)
        self.lanes = min(self.rest, max(lo.target.vector_bits // bits, 1))

    def at(self, row: Coordinate, column: str) -> tuple[Coordinate, Coordinate]:
        return row, Coordinate(column, 0, int(self.lanes > 1))

    def load(self, row: Coordinate, column: str) -> list[Batch]:
        evaluator = Evaluator(self.lo, self.lanes, Mode(True), {})
        return [evaluator.values(s, [self.at(row, column)]) for s in self.sources]

    def store(self, to: list[BufferNode], row: Coordinate, column: str, values: list[str]) -> None:
        evaluator = Evaluator(self.lo, self.lanes, Mode(True), {})
        for node, value in zip(to, values, strict=True):
            evaluator.store_scratch(node, self.at(row, column), value, self.lanes)

    def combine(self, first: list[str], second: list[Batch]) -> list[str]:
        found = _emit_block(self.lo, self.op.blocks[0], self.lanes, [*([x] for x in first), *second])
        return [x[0] for x in found]


@lowers(ops.ReduceWith)
def _reduce_with(lo: Lowering, op: ops.ReduceWith) -> None:
    fold = _Fold(lo, op)
    to = [lo.tile_buffer(d, (1, fold.rest)) for d in fold.dtypes]
    scalars: list[str] = []

    def column(base: str, _: list[str]) -> list[str]:
        first = [x[0] for x in fold.load(Coordinate("0"), base)]

        def row(index: str, total: list[str]) -> list[str]:
            return fold.combine(total, fold.load(Coordinate(index, 1), base))

        inits = [(element_type(d, fold.lanes), x) for d, x in zip(fold.dtypes, first, strict=True)]
        total = counted_loop(lo.f, fold.n - 1, 1, inits, row) if fold.n > 1 else first
        if fold.others:
            fold.store(to, Coordinate("0"), base, total)
        else:
            scalars.extend(total)
        return []

    counted_loop(lo.f, fold.rest, fold.lanes, [], column)
    for k, result in enumerate(op.results):
        d = fold.dtypes[k]
        node: Node = BufferNode(to[k].buffer, d, fold.others) if fold.others else ScalarNode(d, (), scalars[k])
        lo.define(result, node)


@lowers(ops.ScanWith)
def _scan_with(lo: Lowering, op: ops.ScanWith) -> None:
    fold = _Fold(lo, op)
    n, backwards = fold.n, op.attrs["reverse"]
    to = [lo.tile_buffer(d, (n, fold.rest)) for d in fold.dtypes]
    start = Coordinate("0", n - 1 if backwards else 0)

    def column(base: str, _: list[str]) -> list[str]:
        first = [x[0] for x in fold.load(start, base)]
        fold.store(to, start, base, first)

        def row(index: str, total: list[str]) -> list[str]:
            here = Coordinate(index, 1)
            if backwards:
                here = Coordinate("0", n - 2) if index == "0" else Coordinate(lo.f.value(f"sub i64 {n - 2}, {index}"))
            total = fold.combine(total, fold.load(here, base))
            fold.store(to, here, base, total)
            return total

        if n > 1:
            inits = [(element_type(d, fold.lanes), x) for d, x in zip(fold.dtypes, first, strict=True)]
            counted_loop(lo.f, n - 1, 1, inits, row)
        return []

    counted_loop(lo.f, fold.rest, fold.lanes, [], column)
    axis = op.attrs["axis"]
    for result, node in zip(op.results, to, strict=True):
        t = result.type
        assert isinstance(t, TileType)
        lo.define(result, BufferNode(node.buffer, t.dtype, t.shape, _strides(t.shape, axis)))


def _strides(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """Strides of a tile that lies dense with `axis` in front."""
    strides, step = [0] * len(shape), 1
    for k in reversed([axis, *(k for k in range(len(shape)) if k != axis)]):
        strides[k] = step
        step *= shape[k]
    return tuple(strides)
