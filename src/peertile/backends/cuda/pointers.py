"""Lowering of raw pointers and tokens (unsafe kernels).

Weak accesses are Triton's own; ordered ones are PTX, each element by exactly one thread. Tokens have no run-time
form: accesses are emitted in program order, which is stronger than what tokens ask for.
"""

from __future__ import annotations

from peertile.backends.cuda import ptx
from peertile.backends.cuda.memory import as_word, by_swap, from_word, native_rmw, to_memory, to_register
from peertile.backends.cuda.spelling import shape_text
from peertile.backends.cuda.state import RAW, Emitter, lowers
from peertile.backends.cuda.target import check_rmw, emulated_rmw
from peertile.ir import ops
from peertile.ir.core import Op
from peertile.ir.types import PointerType, TileType
from peertile.memory_model import Order, Scope

__all__: list[str] = []


@lowers(ops.NewToken, ops.JoinTokens)
def _token(e: Emitter, op: Op) -> None:
    e.tokens(op.results)


@lowers(ops.PtrOffset)
def _offset(e: Emitter, op: ops.PtrOffset) -> None:
    e.define(op.result, f"{e.text(op.operands[0])} + {e.typed(op.operands[1])}")


@lowers(ops.PtrBroadcast)
def _broadcast(e: Emitter, op: ops.PtrBroadcast) -> None:
    t = op.result.type
    assert isinstance(t, PointerType)
    if op.operands[0].type == t:
        e.alias(op.result, op.operands[0])
    else:
        e.define(op.result, f"tl.broadcast_to({e.text(op.operands[0])}, {shape_text(t.shape)})")


@lowers(ops.Unicast)
def _unicast(e: Emitter, op: ops.Unicast) -> None:
    e.alias(op.result, op.operands[0])


def _parts(e: Emitter, op: Op, tail: int) -> tuple[PointerType, str, str | None]:
    """(pointer type, pointers, mask)."""
    t = op.operands[0].type
    assert isinstance(t, PointerType)
    mask = e.typed(op.operands[tail]) if op.attrs["masked"] else None
    return t, e.text(op.operands[0]), mask


def _scope(e: Emitter, op: Op, t: PointerType) -> Scope:
    return e.scope(op.attrs["scope"], t.space)


@lowers(ops.PtrLoad)
def _load(e: Emitter, op: ops.PtrLoad) -> None:
    t, pointers, mask = _parts(e, op, 2)
    order = op.attrs["order"]
    e.tokens(op.results)
    e.before_read(RAW)
    value = op.results[0]
    fill = e.typed(op.operands[1])
    if order is Order.WEAK:
        masked = "" if mask is None else f", mask={mask}, other={to_memory(fill, t.dtype)}"
        e.define(value, to_register(f"tl.load({pointers}{masked})", t.dtype))
        return
    scope = _scope(e, op, t)
    bits = t.dtype.itemsize * 8
    if not t.shape and mask is None:
        e.call("_or")
        e.define(value, from_word(e.call_ptx(ptx.load_elected(order, scope, bits), pointers, str(e.lanes)), t.dtype))
    else:
        function = ptx.load_tile(order, scope, bits)
        text = by_swap(e, function, pointers, [], mask, TileType(t.dtype, t.shape), "value")
        e.define(value, text if mask is None else f"tl.where({mask}, {text}, {fill})")
    if order.acquires:
        e.barrier()


@lowers(ops.PtrStore)
def _store(e: Emitter, op: ops.PtrStore) -> None:
    t, pointers, mask = _parts(e, op, 2)
    order = op.attrs["order"]
    e.tokens(op.results)
    value = e.typed(op.operands[1])
    if order.releases:
        e.barrier()
    e.before_write(RAW)
    if order is Order.WEAK:
        masked = "" if mask is None else f", mask={mask}"
        e.w.line(f"tl.store({pointers}, {to_memory(value, t.dtype)}{masked})")
        return
    scope = _scope(e, op, t)
    bits = t.dtype.itemsize * 8
    if not t.shape and mask is None:
        e.w.line(e.call_ptx(ptx.store_elected(order, scope, bits), pointers, as_word(value, t.dtype)))
    else:
        function = ptx.store_tile(order, scope, bits)
        e.w.line(by_swap(e, function, pointers, [value], mask, TileType(t.dtype, t.shape), ""))


@lowers(ops.PtrRmw)
def _rmw(e: Emitter, op: ops.PtrRmw) -> None:
    t, pointers, mask = _parts(e, op, 2)
    kind, order = op.attrs["rmw"], op.attrs["order"]
    check_rmw(kind, t.dtype, e.arch, op.loc)
    e.tokens(op.results)
    scope = _scope(e, op, t)
    if order.releases:
        e.barrier()
    e.before_write(RAW, kind)
    value = e.typed(op.operands[1])
    if emulated_rmw(kind, t.dtype):
        function = ptx.rmw_tile(kind, t.dtype, order, scope)
        text = by_swap(e, function, pointers, [value], mask, TileType(t.dtype, t.shape), "old")
    else:
        text = native_rmw(kind, t.dtype, pointers, value, mask, order.value, scope)
        text = from_word(text, t.dtype) if kind.value in ("min", "max", "umin", "umax") else text
    if op.results[0] in e.used:
        e.define(op.results[0], text)
    else:
        e.w.line(text)
        e.set(op.results[0], "_unused")
    if order.acquires:
        e.barrier()


@lowers(ops.PtrCas)
def _cas(e: Emitter, op: ops.PtrCas) -> None:
    t, pointers, mask = _parts(e, op, 3)
    order = op.attrs["order"]
    bits = t.dtype.itemsize * 8
    if bits == 8:
        raise e.fail(op, f"atomic_cas: {t.dtype} has no compare-and-swap on a GPU; use 16, 32 or 64 bits")
    e.tokens(op.results)
    if order.releases:
        e.barrier()
    e.before_write(RAW)
    operands = [e.typed(v) for v in op.operands[1:3]]
    function = ptx.cas_tile(order, _scope(e, op, t), bits)
    text = by_swap(e, function, pointers, operands, mask, TileType(t.dtype, t.shape), "old")
    e.define(op.results[0], text)
    if order.acquires:
        e.barrier()
