"""Lowering of accesses that are no plain blocks: gather, scatter, ordered tiles, asynchronous stores."""

from __future__ import annotations

from peertile.backends.cuda import ptx
from peertile.backends.cuda.memory import block_of, by_swap, expand, padding_text, to_memory, to_register
from peertile.backends.cuda.state import Emitter, View, lowers, tile_of
from peertile.ir import ops
from peertile.ir.core import Value
from peertile.ir.types import TileType
from peertile.memory_model import Cmp

__all__: list[str] = []

_UNTIL = {ops.Compare.AT_LEAST: Cmp.AT_LEAST, ops.Compare.NE: Cmp.NE}
MAX_PACK = 8
"""Elements of a patient load that a thread has in flight: more would cost registers and gain nothing."""


def _gathered(
    e: Emitter, view: View, chosen: Value, indices: list[Value], axis: int, shape: tuple[int, ...]
) -> tuple[str, str]:
    """(pointers, mask) of a tile whose axis `axis` follows the index tile."""
    index = e.let_own("index", f"{e.typed(chosen)}.to(tl.int64)")
    rank = len(shape)
    pointers, mask = block_of(e, view, indices, shape, skip=axis)
    inside = expand(f"(({index} >= 0) & ({index} < {view.extents[axis]}))", axis, rank)
    at = e.let(f"{view.pointer}_at", f"{pointers} + {expand(index, axis, rank)} * {view.strides[axis]}")
    return at, inside if mask is None else f"{inside} & {mask}"


@lowers(ops.Gather)
def _gather(e: Emitter, op: ops.Gather) -> None:
    view, t = e.view(op.operands[0]), tile_of(op.result)
    e.before_read(view.root)
    at, mask = _gathered(e, view, op.operands[1], op.operands[2:], op.attrs["axis"], t.shape)
    other = padding_text(op.attrs["padding"], t.dtype)
    e.define(op.result, to_register(f"tl.load({at}, mask={mask}, other={other})", t.dtype))


@lowers(ops.Scatter)
def _scatter(e: Emitter, op: ops.Scatter) -> None:
    view, t, axis = e.view(op.operands[0]), tile_of(op.operands[1]), op.attrs["axis"]
    e.before_write(view.root)
    at, mask = _gathered(e, view, op.operands[2], op.operands[3:], axis, t.shape)
    # Threads store in any order: of equal indices only the last one does.
    last = e.let_own("last", e.call("_is_last", e.variable(op.operands[2]), str(t.shape[axis])))
    mask = f"{mask} & {expand(last, axis, t.rank)}"
    e.w.line(f"tl.store({at}, {to_memory(e.typed(op.operands[1]), t.dtype)}, mask={mask})")


@lowers(ops.TileLoad)
def _tile_load(e: Emitter, op: ops.TileLoad) -> None:
    view, t, order = e.view(op.operands[0]), tile_of(op.result), op.attrs["order"]
    e.before_read(view.root)
    scope = e.scope(op.attrs["scope"], view.type.space)
    pointers, mask = block_of(e, view, op.operands[1:], t.shape)
    bits = t.dtype.itemsize * 8
    awaited = _awaited(op)
    if awaited is not None and bits >= 32:
        pack = max(1, min(MAX_PACK, t.numel // e.lanes))
        until, value = awaited
        function, operands = ptx.patient_load_tile(order, scope, bits, pack, until), [e.typed(value)]
    else:
        function, operands = ptx.load_tile(order, scope, bits), []
    e.define(op.result, by_swap(e, function, pointers, operands, mask, TileType(t.dtype, t.shape), "value"))
    if order.acquires:
        e.barrier()


def _awaited(op: ops.TileLoad) -> tuple[Cmp, Value] | None:
    """What the loop around a load waits for its elements to reach, or to differ from, where it does nothing else until
    they do: then each thread may well look again at its own elements. A load may always come later, so this is right
    for any loop."""
    assert op.parent is not None
    if not isinstance(op.parent.parent, ops.Loop):
        return None
    for other in op.parent.ops:
        if isinstance(other, ops.CompareOp) and other.operands[0] is op.result and other.attrs["fn"] in _UNTIL:
            return _UNTIL[other.attrs["fn"]], other.operands[1]
    return None


@lowers(ops.TileStore)
def _tile_store(e: Emitter, op: ops.TileStore) -> None:
    view, t, order = e.view(op.operands[0]), tile_of(op.operands[1]), op.attrs["order"]
    if order.releases:
        e.barrier()
    e.before_write(view.root)
    scope = e.scope(op.attrs["scope"], view.type.space)
    value = e.typed(op.operands[1])
    pointers, mask = block_of(e, view, op.operands[2:], t.shape)
    function = ptx.store_tile(order, scope, t.dtype.itemsize * 8)
    e.w.line(by_swap(e, function, pointers, [value], mask, TileType(t.dtype, t.shape), ""))


@lowers(ops.AsyncStore)
def _async_store(e: Emitter, op: ops.AsyncStore) -> None:
    """Stored at once: a transfer may be done before it is waited for."""
    view, t = e.view(op.operands[0]), tile_of(op.operands[1])
    e.before_write(view.root)
    value = to_memory(e.typed(op.operands[1]), t.dtype)
    pointers, mask = block_of(e, view, op.operands[2:], t.shape)
    e.w.line(f"tl.store({pointers}, {value})" if mask is None else f"tl.store({pointers}, {value}, mask={mask})")
    e.values[op.result] = None


@lowers(ops.WaitTransfer)
def _wait_transfer(e: Emitter, op: ops.WaitTransfer) -> None:
    """What the threads stored comes before what any of them does next."""
    e.barrier()
