"""Lowering of pieces of tiles: take, extract, insert."""

from __future__ import annotations

from peertile.backends.cpu.elementwise import ready, tile_type
from peertile.backends.cpu.lower import Lowering, lowers
from peertile.backends.cpu.memory import writable
from peertile.backends.cpu.nodes import BufferNode, ScalarNode, TakeNode
from peertile.backends.cpu.reads import buffers_below
from peertile.backends.cpu.text import MEMORY, add, mul
from peertile.ir import ops
from peertile.ir.core import Value


@lowers(ops.Take)
def _take(lo: Lowering, op: ops.Take) -> None:
    x, index = ready(lo, lo.node(op.operands[0])), ready(lo, lo.node(op.operands[1]))
    if isinstance(x, ScalarNode):
        lo.define(op.result, ScalarNode(x.dtype, tile_type(op).shape, x.register))
        return
    source = x if isinstance(x, BufferNode) else lo.keep_now(x)
    lo.define(op.result, lo.new(TakeNode(source, index, op.attrs["axis"])))


def piece_of(
    lo: Lowering, whole: BufferNode, shape: tuple[int, ...], indices: list[Value]
) -> BufferNode:  # fmt: skip
    """The piece at a tile index, each counted modulo the number of pieces (a power of two)."""
    offset = "0"
    for value, m, n, stride in zip(indices, shape, whole.shape, whole.strides, strict=True):
        if m < n:
            inside = lo.f.value(f"and i64 {lo.scalar(value)}, {n // m - 1}")
            offset = add(lo.f, offset, mul(lo.f, inside, m * stride))
    if offset == "0":
        return BufferNode(whole.buffer, whole.dtype, shape, whole.strides, whole.address)
    address = lo.f.value(f"getelementptr inbounds {MEMORY[whole.dtype.name]}, ptr {whole.address}, i64 {offset}")
    return BufferNode(whole.buffer, whole.dtype, shape, whole.strides, address)


@lowers(ops.Extract)
def _extract(lo: Lowering, op: ops.Extract) -> None:
    x, shape = ready(lo, lo.node(op.operands[0])), tile_type(op).shape
    if isinstance(x, ScalarNode):
        lo.define(op.result, ScalarNode(x.dtype, shape, x.register))
        return
    source = x if isinstance(x, BufferNode) else lo.keep_now(x)
    lo.define(op.result, piece_of(lo, source, shape, op.operands[1:]))


@lowers(ops.Insert)
def _insert(lo: Lowering, op: ops.Insert) -> None:
    lo.flush()
    whole = writable(lo, op, op.operands[0])
    piece = lo.node(op.operands[1])
    if whole.buffer in buffers_below(piece, set()):
        piece = lo.keep_now(piece)
    lo.keep_into(piece, piece_of(lo, whole, piece.shape, op.operands[2:]))
    lo.flush()
    lo.define(op.result, BufferNode(whole.buffer, whole.dtype, whole.shape))
