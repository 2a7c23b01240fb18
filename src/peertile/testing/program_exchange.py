"""Statements of random kernels in which programs and ranks hand each other what they made.

They stand at the top level of a kernel alone, so that every program of every rank comes to each of them. What is
handed over is fixed to the bit and read in an order of its own, so that any schedule gives one answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from peertile.ir import ops
from peertile.ir.core import Value
from peertile.ir.ops import Binary
from peertile.ir.types import BOOL, INDEX, MailboxType, SymmetricType, TileType, TransferType, ViewType
from peertile.memory_model import Order, Rmw, Scope
from peertile.testing.program_memory import Memory
from peertile.testing.program_values import LIMIT, MATH, V

__all__ = ["LINE", "Exchanges"]

LINE: Final = 16
"""Elements of a tile that is handed over."""


class Exchanges(Memory):
    """Adds its statements to those of `Memory`."""

    ranks = 1
    grid: int

    def exchanges(self) -> list[Callable[[], V | None]]:
        """What this kernel may do together with others."""
        found = [self.share] if "h" in self.named else []
        return found + ([self.by_words, self.by_words, self.by_mailbox] if "m" in self.named else [])

    def _line(self, view: ViewType | SymmetricType, rank: int = 2) -> TileType:
        return TileType(view.dtype, (1,) * (rank - 1) + (LINE,))

    def _exact(self, t: TileType) -> V:
        v = self.convert(self.fixed(t.shape), t.dtype)
        return self.clamp(v, LIMIT[t.dtype.name]) if t.dtype in MATH else v

    def _seen(self, value: Value, t: TileType) -> None:
        bound = LIMIT[t.dtype.name] * 2 if t.dtype.is_float else 0.0
        flat = self.emit(ops.Reshape, (value,), t.with_shape((LINE,)))
        self.pool.append(V(flat, bound))

    def share(self) -> V | None:
        """A row for the other programs of this device, and that of a neighbour."""
        h = self.named["h"]
        assert isinstance(h.type, ViewType)
        t = self._line(h.type)
        self.b.emit(ops.Store, (h, self._exact(t).value, self.program, self.index(0)))
        self.b.emit(ops.SyncPrograms)
        n = self.emit(ops.NumPrograms, (), INDEX)
        next_one = self.emit(ops.BinaryOp, (self.program, self.index(self.r.randint(1, 3))), INDEX, fn=Binary.ADD)
        neighbour = self.emit(ops.BinaryOp, (next_one, n), INDEX, fn=Binary.REM)
        self._seen(self.emit(ops.Load, (h, neighbour, self.index(0)), t), t)
        self.b.emit(ops.SyncPrograms)
        return None

    def _row(self, rank: Value) -> Value:
        """The row of what `rank` sends to this program: ranks of one program lie together."""
        first = self.emit(ops.BinaryOp, (self.program, self.index(self.ranks)), INDEX, fn=Binary.MUL)
        return self.emit(ops.BinaryOp, (first, rank), INDEX, fn=Binary.ADD)

    def by_words(self) -> V | None:
        """A row to the same program of every rank, one of the objects that order, and what came from all."""
        m = self.named["m"]
        assert isinstance(m.type, SymmetricType)
        me, t = self.emit(ops.Rank, (m,), INDEX), self._line(m.type)
        row, tile = self._row(me), self._exact(t)
        # Which rank goes first is known at run time, so that all start somewhere else.
        n = self.emit(ops.NumRanks, (m,), INDEX)
        for k in range(self.ranks):
            turn = self.emit(ops.BinaryOp, (me, self.index(k)), INDEX, fn=Binary.ADD)
            there = self.emit(ops.BinaryOp, (turn, n), INDEX, fn=Binary.REM)
            self._send(self.b.value(ops.PeerView, (m, there), m.type.view), tile, row)
        self._meet()
        mine = self.b.value(ops.PeerView, (m, me), m.type.view)
        for k in range(self.ranks):
            at = (self._row(self.index(k)), self.index(0))
            if self.r.random() < 0.5:
                self._seen(self.emit(ops.Load, (mine, *at), t), t)
            else:
                attrs = {"order": Order.ACQUIRE, "scope": Scope.SYSTEM}
                self._seen(self.emit(ops.TileLoad, (mine, *at), t, **attrs), t)
        self._meet()
        return None

    def _send(self, view: Value, tile: V, row: Value) -> None:
        at = (row, self.index(0))
        kind = self.r.randrange(4)
        if kind == 0:
            self.b.emit(ops.Store, (view, tile.value, *at))
        elif kind == 1:
            self.b.emit(ops.TileStore, (view, tile.value, *at), order=Order.RELEASE, scope=Scope.SYSTEM)
        elif kind == 2:
            transfer = self.b.value(ops.AsyncStore, (view, tile.value, *at), TransferType())
            self.b.emit(ops.WaitTransfer, (transfer,))
        else:
            # What is there is overwritten: the old value must not matter.
            self.b.emit(ops.Store, (view, self.const(0, tile.type).value, *at))
            rmw = Rmw.ADDF if tile.dtype.is_float else self.r.choice([Rmw.ADD, Rmw.OR, Rmw.XOR, Rmw.XCHG])
            self.b.emit(ops.TileAtomic, (view, tile.value, *at), rmw=rmw, order=Order.RELAXED, scope=Scope.SYSTEM)

    def _meet(self) -> None:
        """This program of all ranks has come here, and what it stored before is seen behind it."""
        zero = self.program
        kind = self.r.randrange(5)
        if kind == 0:
            self.b.emit(ops.Notify, (self.named["signal"], zero))
            self.b.emit(ops.WaitSignal, (self.named["signal"], zero))
        elif kind == 1:
            one = self.index(1)
            for k in range(self.ranks):
                self.b.emit(ops.CounterAdd, (self.named["counter"], zero, one, self.index(k)))
            self.b.emit(ops.CounterWait, (self.named["counter"], zero, self.index(self.ranks)))
        elif kind == 2:
            self.b.emit(ops.BarrierSync, (self.named["barrier"],))
        elif kind == 3:
            self.b.emit(ops.BarrierArrive, (self.named["barrier"],))
            self.statements(1)
            self.b.emit(ops.BarrierWait, (self.named["barrier"],))
        else:
            self.b.emit(ops.BarrierSync, (self.named["barrier"],), all_programs=True)

    def by_mailbox(self) -> V | None:
        """A round of the mailbox: one tile for all, or one for each of some ranks."""
        box = self.named["box"]
        assert isinstance(box.type, MailboxType)
        t = TileType(box.type.dtype, box.type.tile_shape)
        if self.r.random() < 0.5:
            self.b.emit(ops.BoxPost, (box, self._exact(t).value))
        else:
            self.b.emit(ops.BoxRound, (box,))
            for rank in self.r.sample(range(self.ranks), self.r.randint(0, self.ranks)):
                self.b.emit(ops.BoxPut, (box, self._exact(t).value, self.index(rank)))
            self.b.emit(ops.BoxFlush, (box,))
        self.b.emit(ops.BoxCollect, (box,))
        for rank in range(self.ranks):
            tile, present = self.b.emit(ops.BoxTake, (box, self.index(rank)), (t, BOOL)).results
            kept = self.emit(ops.Broadcast, (present,), BOOL.with_shape(t.shape))
            self._seen(self.emit(ops.Select, (kept, tile, self.const(1, t).value), t), t)
        self.b.emit(ops.BoxRelease, (box,))
        return None

    def together(self, makers: Sequence[Callable[[], V | None]]) -> None:
        """Some of the statements that all programs come to."""
        for _ in range(self.r.randint(1, 3)):
            self.r.choice(makers)()
            self.statements(self.r.randint(1, 3))
