"""Lowering of `mma`: where its operands lie, and calls of the matrix kernels.

An operand that is a tile of a view is read where it is, without a copy, when it is wholly inside its view with
unit stride; a transposed B is handed to the kernel as such. The accumulator is updated in place when nobody
else reads it, so that a loop over K copies nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from peertile.backends.cpu.evaluate import counted_loop
from peertile.backends.cpu.groups import tile_access
from peertile.backends.cpu.lower import Lowering, lowers
from peertile.backends.cpu.memory import writable
from peertile.backends.cpu.microkernel import plan_matmul
from peertile.backends.cpu.nodes import BufferNode, Cell, LoadNode, MapNode, Node, resolve
from peertile.backends.cpu.text import MEMORY, add
from peertile.ir import ops
from peertile.ir.core import Value


@dataclass(frozen=True, slots=True)
class Matrix:
    """Address, row stride and batch stride (elements, i64) of a matrix with unit column stride."""

    pointer: str
    row: str
    batch: str
    transposed: bool = False


def _swap(node: Node) -> Node | None:
    """The operand of a transposition of the last two axes, if `node` is one."""
    if isinstance(node, MapNode):
        rank = len(node.shape)
        swapped = (*range(rank - 2), rank - 1, rank - 2)
        if node.axes == swapped and len(node.child.shape) == rank:
            return resolve(node.child)
    return None


def _scratch_matrix(node: BufferNode, transposed: bool) -> Matrix | None:
    strides = node.strides[::-1]
    column, row = (strides[1], strides[0]) if transposed else (strides[0], strides[1])
    if column != 1:
        return None
    batch = strides[2] if len(strides) > 2 else 0
    return Matrix(node.address, str(row), str(batch), transposed)


def _view_matrix(lo: Lowering, node: LoadNode, transposed: bool) -> Matrix:
    """A tile read where it is; copied to scratch on the way where it sticks out of the view or is strided."""
    f, view = lo.f, node.view
    tile = tile_access(f, view, node.shape, node.origin)
    rank = len(node.shape)
    conditions = [
        f.value(f"icmp sle i64 {add(f, node.origin[axis], extent)}, {view.extents[axis]}")
        for axis, extent in enumerate(node.shape)
    ]
    if view.strides[-1] != "1" and node.shape[-1] > 1:
        conditions.append(f.value(f"icmp eq i64 {view.strides[-1]}, 1"))
    batch = view.strides[0] if rank > 2 else "0"
    inside = conditions[0]
    for c in conditions[1:]:
        inside = f.value(f"and i1 {inside}, {c}")
    copy, ready = f.block("copy"), f.block("ready")
    source = f.cond_br(inside, ready, copy, likely=True)
    f.place(copy)
    kept = lo.tile_buffer(node.dtype, node.shape)
    lo.keep_into(node, kept)
    lo.flush()
    last = f.br(ready)
    f.place(ready)
    found = []
    dense = _scratch_matrix(kept, False)
    assert dense is not None
    for t, here, there in (
        ("ptr", tile.base, dense.pointer), ("i64", view.strides[-2], dense.row), ("i64", batch, dense.batch),
    ):  # fmt: skip
        phi = f.phi(ready, t)
        phi.add(here, source)
        phi.add(there, last)
        found.append(phi.name)
    return Matrix(found[0], found[1], found[2], transposed)


def _operand(lo: Lowering, value: Value, may_swap: bool) -> Matrix:
    node = lo.node(value)
    if isinstance(node, Cell):
        lo.flush()
        node = resolve(node)
    if isinstance(node, BufferNode):
        found = _scratch_matrix(node, False) or (_scratch_matrix(node, True) if may_swap else None)
        if found is not None:
            return found
    if isinstance(node, LoadNode):
        return _view_matrix(lo, node, False)
    inner = _swap(node) if may_swap else None
    if isinstance(inner, LoadNode):
        return _view_matrix(lo, inner, True)
    found = _scratch_matrix(lo.keep_now(node), False)
    assert found is not None
    return found


@lowers(ops.Mma)
def _mma(lo: Lowering, op: ops.Mma) -> None:
    f = lo.f
    t = lo.node(op.operands[0])
    m, k = t.shape[-2:]
    n = lo.node(op.operands[1]).shape[-1]
    lo.flush()
    a = _operand(lo, op.operands[0], False)
    b = _operand(lo, op.operands[1], True)
    acc = writable(lo, op, op.operands[2])
    lo.flush()
    plan = plan_matmul(t.dtype.name, m, n, k, lo.target.features, b_transposed=b.transposed)
    lo.helpers[plan.run_name] = plan.text
    scratch = lo.allocate(plan.scratch_bytes).pointer if plan.scratch_bytes else "null"
    batches = acc.shape[0] if len(acc.shape) == 3 else 1
    c_batch = str(acc.strides[0]) if batches > 1 else "0"

    def one(index: str, _: list[str]) -> list[str]:
        def at(pointer: str, stride: str, element: str) -> str:
            if index == "0" or stride == "0":
                return pointer
            offset = f.value(f"mul i64 {index}, {stride}")
            return f.value(f"getelementptr {element}, ptr {pointer}, i64 {offset}")

        c_ptr = at(acc.buffer.pointer, c_batch, MEMORY[acc.dtype.name])
        a_ptr, b_ptr = (at(x.pointer, x.batch, MEMORY[t.dtype.name]) for x in (a, b))
        f.emit(
            f"call void @{plan.run_name}(ptr {c_ptr}, i64 {acc.strides[-2]}, ptr {a_ptr}, i64 {a.row}, "
            f"ptr {b_ptr}, i64 {b.row}, ptr {scratch})"
        )
        return []

    counted_loop(f, batches, 1, [], one)
    lo.define(op.result, BufferNode(acc.buffer, acc.dtype, acc.shape))
