"""Rewrites multicast ops into loops over the ranks' parts, where no mapping of the fabric does them. In place.

Runs behind the bounds pass: what an index may be is known of the object, and holds for every part. Accesses keep
their proxy, so the checker sees a second way to the memory on every target. The ranks are taken in their order, which
gives the same bits on all of them. Where the object has a mapping (`MulticastType.hardware`) its ops stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from peertile.dtypes import DType, f32, i32, i64, u32, u64
from peertile.ir import ops
from peertile.ir.core import Block, Builder, Kernel, Op, Value, walk
from peertile.ir.ops import Binary, Bounds
from peertile.ir.types import INDEX, MulticastType, TileType
from peertile.memory_model import Order, Proxy, Rmw, Scope
from peertile.passes.protocols import Emitter

__all__ = ["expand_multicast"]


def expand_multicast(kernel: Kernel) -> Kernel:
    """Expands every multicast op of an object without hardware; returns `kernel`."""
    if any(isinstance(v.type, MulticastType) for v in kernel.params):
        _block(kernel, kernel.body)
        _facts(kernel)
    return kernel


def _facts(kernel: Kernel) -> None:
    """Extents are those of the parts: no backend asks a multicast object itself for them."""
    for op in list(walk(kernel.body)):
        if isinstance(op, ops.Extent | ops.NumTiles | ops.ViewStride) and isinstance(
            op.operands[0].type, MulticastType
        ):
            assert op.parent is not None
            e = Emitter(Builder(op.parent, op.loc, op), kernel)
            op.operands[0] = e.field(op.operands[0], "data")


def _block(kernel: Kernel, block: Block) -> None:
    for op in list(block.ops):
        for inner in op.blocks:
            _block(kernel, inner)
        expand = _EXPANSIONS.get(type(op))
        t = op.operands[0].type if op.operands else None
        if expand is not None and isinstance(t, MulticastType) and not t.hardware:
            e = _Parts(Builder(block, op.loc, op), kernel)
            result = expand(e, op)
            if result is not None:
                for user in walk(kernel.body):
                    user.operands = [result if v is op.result else v for v in user.operands]
            block.ops.remove(op)


class _Parts(Emitter):
    """Loops over all ranks, this one among them."""

    def data(self, op: Op) -> tuple[Value, Value]:
        """The parts, and how many ranks have one."""
        data = self.field(op.operands[0], "data")
        return data, self.num_ranks(data)

    def each(self, op: Op, body: Callable[[Value], None]) -> None:
        """body(view of a rank's part) for every rank, beginning with this one so that they do not all reach for one."""
        data, n = self.data(op)
        me = self.rank(data)

        def one(k: Value) -> None:
            rank = self.add(me, k)
            past = self.compare(ops.Compare.GE, rank, n)
            body(self.at(data, self.b.value(ops.Select, (past, self.sub(rank, n), rank), INDEX)))

        self.loop(0, n, one)


def _load(e: _Parts, op: Op) -> Value:
    t = op.result.type
    assert isinstance(t, TileType)
    data, n = e.data(op)
    rmw = op.attrs["rmw"]
    wide = TileType(f32, t.shape) if t.dtype.bits == 16 and rmw is Rmw.ADDF else t

    def part(rank: Value) -> Value:
        operands = (e.at(data, rank), *op.operands[1:])
        # A weak load-reduce assumes that nobody writes meanwhile.
        if op.attrs["order"] is Order.WEAK:
            tile = e.b.value(ops.Load, operands, t, bounds=Bounds.PROVEN, proxy=Proxy.MULTICAST)
        else:
            order, scope = op.attrs["order"], op.attrs["scope"]
            tile = e.b.value(
                ops.TileLoad, operands, t, bounds=Bounds.PROVEN, order=order, scope=scope, proxy=Proxy.MULTICAST
            )
        return tile if wide == t else e.b.value(ops.Cast, (tile,), wide)

    first = part(e.const(0))
    block = Block((INDEX, wide), ("rank", "sum"))
    with e.b.at(block):
        e.b.emit(ops.Continue, (_combine(e, rmw, block.args[1], part(block.args[0])),))
    loop = e.b.emit(ops.For, (e.const(1), n, e.const(1), first), (wide,), (block,))
    return loop.result if wide == t else e.b.value(ops.Cast, (loop.result,), t)


_BINARY: Final = {
    Rmw.ADD: Binary.ADD, Rmw.ADDF: Binary.ADD, Rmw.AND: Binary.AND, Rmw.OR: Binary.OR, Rmw.XOR: Binary.XOR,
    Rmw.MIN: Binary.MIN, Rmw.MAX: Binary.MAX, Rmw.UMIN: Binary.MIN, Rmw.UMAX: Binary.MAX,
}  # fmt: skip
_SIGNED: Final[dict[int, DType]] = {32: i32, 64: i64}
_UNSIGNED: Final[dict[int, DType]] = {32: u32, 64: u64}


def _combine(e: _Parts, rmw: Rmw, x: Value, y: Value) -> Value:
    """x and y combined; MIN and MAX of integers compare as signed, UMIN and UMAX as unsigned, whatever the dtype."""
    t = x.type
    assert isinstance(t, TileType)
    compared = t
    if t.dtype.is_int and rmw in (Rmw.MIN, Rmw.MAX):
        compared = t.with_dtype(_SIGNED[t.dtype.bits])
    elif rmw in (Rmw.UMIN, Rmw.UMAX):
        compared = t.with_dtype(_UNSIGNED[t.dtype.bits])
    found = e.b.value(ops.BinaryOp, (e.bitcast(x, compared), e.bitcast(y, compared)), compared, fn=_BINARY[rmw])
    return e.bitcast(found, t)


def _reduce(e: _Parts, op: Op) -> None:
    _update(e, op, op.attrs["rmw"], op.attrs["order"], op.attrs["scope"])


def _update(e: _Parts, op: Op, rmw: Rmw, order: Order, scope: Scope | None) -> None:
    """An atomic update of every part, the same bits with the same compare as the fabric makes."""

    def part(view: Value) -> None:
        e.b.emit(
            ops.TileAtomic, (view, *op.operands[1:]),
            rmw=rmw, order=order, scope=scope, bounds=Bounds.PROVEN, proxy=Proxy.MULTICAST,
        )  # fmt: skip

    e.each(op, part)


def _store(e: _Parts, op: Op) -> None:
    order, scope = op.attrs["order"], op.attrs["scope"]

    def part(view: Value) -> None:
        operands = (view, *op.operands[1:])
        if order is Order.WEAK:
            e.b.emit(ops.Store, operands, bounds=Bounds.PROVEN, proxy=Proxy.MULTICAST)
        else:
            e.b.emit(ops.TileStore, operands, bounds=Bounds.PROVEN, order=order, scope=scope, proxy=Proxy.MULTICAST)

    e.each(op, part)


def _bulk(e: _Parts, op: Op) -> None:
    if op.attrs["rmw"] is not None:
        _update(e, op, op.attrs["rmw"], Order.RELAXED, Scope.SYSTEM)
        return

    def part(view: Value) -> None:
        e.b.emit(ops.Store, (view, *op.operands[1:]), bounds=Bounds.PROVEN, proxy=Proxy.MULTICAST)

    e.each(op, part)


def _signal(e: _Parts, op: Op) -> None:
    def part(view: Value) -> None:
        operands = (view, *op.operands[1:])
        order, scope, proxy = Order.RELEASE, Scope.SYSTEM, Proxy.MULTICAST
        if op.attrs["add"]:
            t = op.operands[1].type
            e.b.value(ops.WordRmw, operands, t, rmw=Rmw.ADD, order=order, scope=scope, proxy=proxy)
        else:
            e.b.emit(ops.WordStore, operands, order=order, scope=scope, proxy=proxy)

    e.each(op, part)


_EXPANSIONS: Final[dict[type[Op], Callable[[_Parts, Op], Value | None]]] = {
    ops.MulticastLoad: _load,
    ops.MulticastReduce: _reduce,
    ops.MulticastStore: _store,
    ops.MulticastBulk: _bulk,
    ops.MulticastSignal: _signal,
}
