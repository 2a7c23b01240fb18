"""Statements of random kernels on a multicast object: one address that reaches every rank's part.

They stand where those of `program_exchange.py` do. What a rank writes lies in a row of its own, or is combined into a
row of the program by a reduction whose order changes nothing; it is read by a load-reduce behind a meeting of the
ranks, and nothing is written again before another one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from peertile.dtypes import DType, dtype_named
from peertile.ir import ops
from peertile.ir.core import Value
from peertile.ir.ops import Binary
from peertile.ir.types import INDEX, MulticastType, TileType
from peertile.memory_model import Order, Rmw, Scope
from peertile.testing.program_exchange import LINE, Exchanges
from peertile.testing.program_values import LIMIT, V

__all__ = ["MULTICAST_DTYPES", "Multicasts", "rows_of_multicast"]

MULTICAST_DTYPES: Final = tuple(map(dtype_named, ops.MULTICAST_DTYPES))
_COMMUTING: Final = (Rmw.ADD, Rmw.MIN, Rmw.MAX, Rmw.UMIN, Rmw.UMAX, Rmw.AND, Rmw.OR, Rmw.XOR)
_STORES: Final = (Order.WEAK, Order.RELAXED, Order.RELEASE)


def rows_of_multicast(ranks: int) -> int:
    """Rows of a program: one that each rank writes alone, and one that all combine into."""
    return ranks + 1


class Multicasts(Exchanges):
    """Adds its statements to those of `Exchanges`."""

    def exchanges(self) -> list[Callable[[], V | None]]:
        return [*super().exchanges(), *([self.by_multicast] * 3 if "mc" in self.named else [])]

    def by_multicast(self) -> V | None:
        """A row to all parts, and what all parts have in it as one."""
        mc = self.named["mc"]
        assert isinstance(mc.type, MulticastType)
        dtype, t = mc.type.dtype, TileType(mc.type.dtype, (1, LINE))
        parts = self.b.value(ops.Field, (mc,), mc.type.fields["data"], field="data")
        me = self.emit(ops.Rank, (parts,), INDEX)
        first = self.emit(ops.BinaryOp, (self.program, self.index(rows_of_multicast(self.ranks))), INDEX, fn=Binary.MUL)
        mine = self.emit(ops.BinaryOp, (first, me), INDEX, fn=Binary.ADD)
        common = self.emit(ops.BinaryOp, (first, self.index(self.ranks)), INDEX, fn=Binary.ADD)
        self._write(mc, dtype, t, mine)
        combines = dtype.is_int and self.r.random() < 0.5
        if combines:
            rmw = self.r.choice([f for f in _COMMUTING if dtype.name in ops.REDUCTIONS[f]])
            self._reduce(mc, self._exact(t), common, rmw)
        if dtype.is_int and self.r.random() < 0.4:
            # One word of the rows above: added to where all may, stored where this rank alone does.
            add = combines and rmw is Rmw.ADD and self.r.random() < 0.7
            word = self.convert(self.fixed(()), dtype)
            at = (common if add else mine, self.index(self.r.randrange(LINE)))
            self.b.emit(ops.MulticastSignal, (mc, word.value, *at), add=add)
        self._meet()
        rows = [self.emit(ops.BinaryOp, (first, self.index(k)), INDEX, fn=Binary.ADD) for k in range(self.ranks)]
        for row in [*rows, common] if dtype.is_int else rows:
            self._combine(mc, t, row)
        self._meet()
        return None

    def _write(self, mc: Value, dtype: DType, t: TileType, row: Value) -> None:
        """This rank's own row, by a store, a bulk store, or a reduction into what it set before."""
        at, tile = (row, self.index(0)), self._exact(t)
        kind = self.r.randrange(5)
        if kind == 0:
            order = self.r.choice(_STORES)
            scope = None if order is Order.WEAK else Scope.SYSTEM
            self.b.emit(ops.MulticastStore, (mc, tile.value, *at), order=order, scope=scope)
            return
        self.b.emit(ops.MulticastBulk, (mc, tile.value, *at))
        if kind == 1:
            return
        more = self._exact(t)
        bulk = [f for f, allowed in ops.BULK_REDUCTIONS.items() if dtype.name in allowed]
        if bulk and self.r.random() < 0.7:
            self.b.emit(ops.MulticastBulk, (mc, more.value, *at), rmw=self.r.choice(bulk))
        else:
            rmw = self.r.choice([f for f, allowed in ops.REDUCTIONS.items() if dtype.name in allowed])
            self._reduce(mc, more, row, rmw)

    def _reduce(self, mc: Value, tile: V, row: Value, rmw: Rmw) -> None:
        order = self.r.choice((Order.RELAXED, Order.RELEASE))
        self.b.emit(ops.MulticastReduce, (mc, tile.value, row, self.index(0)), rmw=rmw, order=order, scope=Scope.SYSTEM)

    def _combine(self, mc: Value, t: TileType, row: Value) -> None:
        """A row of all parts as one. Of floats every part holds the same by now: no order of the ranks changes it."""
        rmw = self.r.choice([f for f, allowed in ops.LOAD_REDUCTIONS.items() if t.dtype.name in allowed])
        order = self.r.choice((Order.WEAK, Order.RELAXED, Order.ACQUIRE))
        scope = None if order is Order.WEAK else Scope.SYSTEM
        found = self.b.value(ops.MulticastLoad, (mc, row, self.index(0)), t, rmw=rmw, order=order, scope=scope)
        bound = 2 * self.ranks * LIMIT[t.dtype.name] if t.dtype.is_float else 0.0
        self.pool.append(self.settled(V(self.emit(ops.Reshape, (found,), t.with_shape((LINE,))), bound)))
