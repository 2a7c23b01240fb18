"""Lowering of unsafe ops: tiles of raw pointers, and tokens (which have no run-time form here).

A pointer is carried as its address (u64). Accesses run one element at a time, in program order, which is one
of the orders that the tokens allow.
"""

from __future__ import annotations

from collections.abc import Callable

from peertile.backends.cpu.atomics import atomic_cas, atomic_load, atomic_rmw, atomic_store
from peertile.backends.cpu.convert import Batch, constant, each
from peertile.backends.cpu.elementwise import broadcast
from peertile.backends.cpu.evaluate import Evaluator, Mode, Position
from peertile.backends.cpu.lower import Lowering, lowers
from peertile.backends.cpu.memory import element_loop, in_registers_or_scratch
from peertile.backends.cpu.nodes import BufferNode, Node, ScalarNode
from peertile.backends.cpu.text import LLVM, vector
from peertile.dtypes import DType, i64, u64
from peertile.ir import ops
from peertile.ir.core import Op, Value
from peertile.ir.types import PointerType
from peertile.memory_model import Order


@lowers(ops.NewToken, ops.JoinTokens)
def _token(lo: Lowering, op: Op) -> None:
    lo.define(op.result, None)


@lowers(ops.PtrOffset)
def _offset(lo: Lowering, op: ops.PtrOffset) -> None:
    pointers, offsets = lo.node(op.operands[0]), lo.node(op.operands[1])
    t = op.result.type
    assert isinstance(t, PointerType)
    source, size = offsets.dtype, t.dtype.itemsize

    def emit(lanes: int, x: list[Batch]) -> Batch:
        v = vector("i64", lanes)
        index = x[1]
        if source.bits < 64:
            extend = "sext" if source.is_signed else "zext"
            index = each(lo.f, f"{extend} {vector(LLVM[source.name], lanes)} {{}} to {v}", index)
        index = each(lo.f, f"mul {v} {{}}, {constant(size, i64, lanes)}", index)
        return each(lo.f, f"add {v} {{}}, {{}}", x[0], index)

    lo.define(op.result, lo.element(u64, (pointers, offsets), 2, emit))


@lowers(ops.PtrBroadcast)
def _broadcast(lo: Lowering, op: ops.PtrBroadcast) -> None:
    t = op.result.type
    assert isinstance(t, PointerType)
    lo.define(op.result, broadcast(lo, lo.node(op.operands[0]), t.shape))


@lowers(ops.Unicast)
def _unicast(lo: Lowering, op: ops.Unicast) -> None:
    lo.define(op.result, lo.node(op.operands[0]))


Access = Callable[[str, list[str]], str | None]


def _access(lo: Lowering, op: Op, operands: list[Value], dtype: DType, order: Order, one: Access) -> None:
    """Run `one(address, values)` for every element whose mask is set. A result tile goes to results[0];
    where the mask is off it gets values[0] (the fill of a load)."""
    if order is Order.WEAK and type(op) is ops.PtrLoad:
        lo.before_load(None)
    else:
        lo.order_point()
    nodes = [in_registers_or_scratch(lo, lo.node(v)) for v in operands]
    mask = in_registers_or_scratch(lo, lo.node(op.operands[len(operands)])) if op.attrs["masked"] else None
    if type(op) is not ops.PtrLoad:
        lo.before_write(None)
    lo.flush()
    shape = nodes[0].shape
    gives = len(op.results) == 2
    result = lo.tile_buffer(dtype, shape) if gives and shape else None
    f = lo.f
    scalar_result: list[str] = []

    def element(p: Position) -> None:
        evaluator = Evaluator(lo, 1, Mode(True), {})
        read = [evaluator.values(n, [p])[0] for n in nodes]
        on = "true" if mask is None else evaluator.values(mask, [p])[0]
        if on == "true":  # a mask known to be set leaves no way around the access
            old = one(f.value(f"inttoptr i64 {read[0]} to ptr"), read[1:])
        else:
            yes, join = f.block("on"), f.block("join")
            source = f.cond_br(on, yes, join)
            f.place(yes)
            old = one(f.value(f"inttoptr i64 {read[0]} to ptr"), read[1:])
            last = f.br(join)
            f.place(join)
            if old is not None:
                phi = f.phi(join, LLVM[dtype.name])
                phi.add(old, last)
                phi.add(read[1], source)
                old = phi.name
        if old is not None:
            if result is not None:
                evaluator.store_scratch(result, p, old, 1)
            else:
                scalar_result.append(old)

    element_loop(lo, shape, element)
    if gives:
        node: Node = result if result is not None else ScalarNode(dtype, (), scalar_result[0])
        lo.define(op.results[0], BufferNode(node.buffer, dtype, shape) if isinstance(node, BufferNode) else node)
    lo.define(op.results[-1], None)


def _dtype(op: Op) -> DType:
    t = op.operands[0].type
    assert isinstance(t, PointerType)
    return t.dtype


@lowers(ops.PtrLoad)
def _load(lo: Lowering, op: ops.PtrLoad) -> None:
    dtype, order = _dtype(op), op.attrs["order"]

    def one(address: str, _: list[str]) -> str:
        return atomic_load(lo, dtype, address, order)

    _access(lo, op, op.operands[:2], dtype, order, one)


@lowers(ops.PtrStore)
def _store(lo: Lowering, op: ops.PtrStore) -> None:
    dtype, order = _dtype(op), op.attrs["order"]

    def one(address: str, values: list[str]) -> None:
        atomic_store(lo, dtype, address, values[0], order)

    _access(lo, op, op.operands[:2], dtype, order, one)


@lowers(ops.PtrRmw)
def _rmw(lo: Lowering, op: ops.PtrRmw) -> None:
    dtype, order = _dtype(op), op.attrs["order"]

    def one(address: str, values: list[str]) -> str:
        return atomic_rmw(lo, op.attrs["rmw"], dtype, address, values[0], order)

    _access(lo, op, op.operands[:2], dtype, order, one)


@lowers(ops.PtrCas)
def _cas(lo: Lowering, op: ops.PtrCas) -> None:
    dtype, order = _dtype(op), op.attrs["order"]

    def one(address: str, values: list[str]) -> str:
        return atomic_cas(lo, dtype, address, values[0], values[1], order)

    _access(lo, op, op.operands[:3], dtype, order, one)
