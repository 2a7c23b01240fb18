"""Statements of random kernels on memory of one program's own: ordered tiles, scattered slices, words, pointers.

Each program keeps to its own rows of the arrays here, so that any order of programs gives one answer, and what it
stores is fixed to the bit. What programs and ranks say to each other is in `program_exchange.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from peertile.dtypes import DType, f32, f64, i32, i64, u32, u64
from peertile.ir import ops
from peertile.ir.core import Block, Op, Value
from peertile.ir.ops import Binary, CheckKind, Compare, Padding
from peertile.ir.types import BOOL, INDEX, PointerType, Space, TileType, TokenType, TransferType, ViewType
from peertile.memory_model import Cmp, Order, Rmw, Scope
from peertile.testing.program_folds import Folds
from peertile.testing.program_values import MATH, V

__all__ = ["CELLS", "OWN_ROWS", "POINTED", "POINTED_DTYPES", "Memory"]

OWN_ROWS: Final = 8
"""Rows of the scratch array "s" that each program owns, of as many elements as fit its tile."""
CELLS: Final = 8
"""Elements of such a row."""
POINTED: Final = 16
"""Elements of the array "q" that each program reaches through its pointers."""
POINTED_DTYPES: Final = (i32, i64, u32, u64, f32, f64)
_BOUND: Final = 4.0
"""Magnitude of what these arrays hold."""
_WRITES: Final = (Order.RELAXED, Order.RELEASE)
_READS: Final = (Order.RELAXED, Order.ACQUIRE)
_UPDATES: Final = (Order.RELAXED, Order.ACQUIRE, Order.RELEASE, Order.ACQ_REL)


class Memory(Folds):
    """Adds its statements to those of `Folds`."""

    program: Value
    words: DType
    token: Value | None = None
    """The last token of the kernel's top level; unsafe operations are drawn there alone."""

    def moving(self) -> list[Callable[[], V | None]]:
        return [*super().moving(), self.keep, self.scattered, self.sized]

    def more(self) -> list[Callable[[], V | None]]:
        unsafe = [self.pointed, self.pointed] if "q" in self.named else []
        fences = [self.fenced] if "ordered" in self.forms else []
        waits = [self.awaited, self.awaited_any, self.polled_word] if self.words.is_int else []
        return [*super().more(), *(waits if "waits" in self.forms else []), self.checked, *fences, *unsafe]

    @property
    def forms(self) -> frozenset[str]:
        """Which of the rarer forms this kernel may take."""
        return frozenset()

    # -- an array of rows of one's own

    def own(self) -> Value:
        """This program's rows of "s", as a view."""
        start = self._times(self.program, OWN_ROWS)
        s = self.named["s"]
        assert isinstance(s.type, ViewType)
        plain = ViewType(s.type.dtype, 2, s.type.access, s.type.space)
        numbers = [start, *map(self.index, (0, OWN_ROWS, CELLS, 1, 1))]
        view = self.b.value(ops.ViewSlice, (s, *numbers), plain)
        if self.r.random() < 0.3:
            return self.b.value(ops.ViewPermute, (view,), plain, axes=(1, 0))
        return view

    def _times(self, x: Value, n: int) -> Value:
        return self.emit(ops.BinaryOp, (x, self.index(n)), INDEX, fn=Binary.MUL)

    def exact(self, t: TileType) -> V:
        """A value of this type, fixed to the bit and within the bound of these arrays."""
        v = self.convert(self.fixed(t.shape), t.dtype)
        return self.clamp(v, _BOUND) if t.dtype in MATH else v

    def keep(self) -> V | None:
        """A tile to one's own rows, and one from there."""
        view = self.own()
        assert isinstance(view.type, ViewType)
        t = TileType(view.type.dtype, self.r.choice([(2, 4), (4, 8), (8, 8), (1, 16)]))
        tile = self.exact(t)
        at = self._tile_of(t)
        scope = self.r.choice([Scope.DEVICE, Scope.SYSTEM, Scope.PROGRAM])
        kind, ordered = self.r.randrange(4), "ordered" in self.forms
        if kind == 0 or not ordered:
            self.b.emit(ops.Store, (view, tile.value, *at))
        elif kind == 1:
            self.b.emit(ops.TileStore, (view, tile.value, *at), order=self.r.choice(_WRITES), scope=scope)
        elif kind == 2:
            transfer = self.b.value(ops.AsyncStore, (view, tile.value, *at), TransferType())
            self.b.emit(ops.WaitTransfer, [transfer] * self.r.randrange(2))
        elif t.dtype.is_int:
            rmw = self.r.choice([k for k in Rmw if k is not Rmw.ADDF])
            self.b.emit(ops.TileAtomic, (view, tile.value, *at), rmw=rmw, order=self.r.choice(_UPDATES), scope=scope)
        at = self._tile_of(t)
        if ordered and self.r.random() < 0.5:
            value = self.emit(ops.TileLoad, (view, *at), t, order=self.r.choice(_READS), scope=scope)
        else:
            value = self.emit(ops.Load, (view, *at), t)
        return V(value, _BOUND if t.dtype.is_float else 0.0)

    def _tile_of(self, t: TileType) -> list[Value]:
        return [self.index(self.r.randrange(max(8 // n, 1))) for n in t.shape]

    def scattered(self) -> V | None:
        """Slices of a tile to places of one's own rows that a tile of indices names, and back by a gather."""
        view = self.own()
        assert isinstance(view.type, ViewType)
        t = TileType(view.type.dtype, self.r.choice([(4, 8), (8, 4), (2, 2)]))
        axis = self.r.randrange(2)
        line = TileType(self.r.choice([i32, i64]), (t.shape[axis],))
        places = self.emit(ops.Iota, (), line)
        fn = self.r.choice([Binary.ADD, Binary.XOR, Binary.AND, Binary.MUL])
        chosen = self.emit(ops.BinaryOp, (places, self.const(self.r.randint(-2, 5), line).value), line, fn=fn)
        rest = [self.index(self.r.randrange(8 // t.shape[1 - axis]))]
        tile = self.exact(t)
        self.b.emit(ops.Scatter, (view, tile.value, chosen, *rest), axis=axis)
        padding = self.r.choice([Padding.ZERO, Padding.NEG_ZERO]) if t.dtype.is_float else Padding.ZERO
        value = self.emit(ops.Gather, (view, chosen, *rest), t, axis=axis, padding=padding)
        return V(value, _BOUND if t.dtype.is_float else 0.0)

    def sized(self) -> V | None:
        """An extent, a distance or a number of tiles."""
        view = self.named[self.r.choice([n for n, v in self.named.items() if isinstance(v.type, ViewType)])]
        assert isinstance(view.type, ViewType)
        axis = self.r.randrange(view.type.rank)
        kind = self.r.randrange(4)
        if kind == 0:
            return V(self.emit(ops.Extent, (view,), INDEX, axis=axis))
        if kind == 1:
            return V(self.emit(ops.NumTiles, (view,), INDEX, axis=axis, size=self.r.choice([1, 4, 16])))
        if kind == 2:
            return V(self.emit(ops.ViewStride, (view,), INDEX, axis=axis))
        return V(self.emit(ops.NumPrograms, (), INDEX))

    # -- words of one's own that already say what is waited for

    def _word(self, order: Order = Order.WEAK, scope: Scope | None = None) -> Value:
        return self.emit(ops.WordLoad, (self.named["w"], self.program), TileType(self.words), order=order, scope=scope)

    def awaited(self) -> V | None:
        cmp = self.r.choice([Cmp.EQ, Cmp.GE, Cmp.LE])
        seen = self._word(Order.ACQUIRE, Scope.DEVICE)
        operands = (self.named["w"], seen, self.program)
        return V(self.emit(ops.Wait, operands, TileType(self.words), cmp=cmp, scope=Scope.DEVICE))

    def awaited_any(self) -> V | None:
        """Of the same word twice, the second is the one that is satisfied, or the first of both."""
        seen = self._word(Order.RELAXED, Scope.SYSTEM)
        other = self.emit(
            ops.BinaryOp, (seen, self.const(1, TileType(self.words)).value), TileType(self.words), fn=Binary.XOR
        )
        first = self.r.choice([seen, other])
        w = self.named["w"]
        operands = (w, first, self.program, w, seen, self.program)
        return V(self.emit(ops.WaitAny, operands, INDEX, cmp=Cmp.EQ, scope=Scope.SYSTEM))

    def polled_word(self) -> V | None:
        """A loop that polls by hand."""
        seen, block = self._word(), Block()
        with self.b.at(block):
            now = self._word(self.r.choice(_READS), Scope.DEVICE)
            same = self.emit(ops.CompareOp, (now, seen), BOOL, fn=Compare.EQ)
            self.leave_if(same, ops.Break)
            self.b.emit(ops.Continue)
        self.b.emit(ops.Loop, (), [], (block,))
        self.b.emit(ops.Fence, scope=Scope.DEVICE)
        return None

    def leave_if(self, condition: Value, cls: type[Op], values: Sequence[Value] = ()) -> None:
        leave, stay = Block(), Block()
        with self.b.at(leave):
            self.b.emit(cls, values)
        with self.b.at(stay):
            self.b.emit(ops.Yield)
        self.b.emit(ops.If, (condition,), blocks=(leave, stay))

    def fenced(self) -> V | None:
        self.b.emit(ops.Fence, scope=self.r.choice([Scope.DEVICE, Scope.SYSTEM]))
        return None

    def checked(self) -> V | None:
        """A check that holds, and sometimes a line printed."""
        n = self._times(self.program, 2)
        ok = self.emit(ops.CompareOp, (n, self.program), BOOL, fn=Compare.GE)
        kind = self.r.choice([CheckKind.ASSERT, CheckKind.BOUNDS])
        self.b.emit(ops.Check, (ok, *[n, self.program][: self.r.randrange(3)]), kind=kind, message="twice is more")
        if "prints" in self.forms:
            self.b.emit(ops.Print, [self.fixed().value for _ in range(self.r.randrange(3))], prefix="here")
        return None

    # -- pointers, each operation behind the one before

    def pointed(self) -> V | None:
        """One operation through pointers to this program's part of "q", ordered by the token of the last."""
        q = self.named["q"]
        assert isinstance(q.type, PointerType)
        d, shape = q.type.dtype, self.r.choice([(), (4,), (16,), (4, 4)])
        start = V(self._times(self.program, POINTED))
        pointer = q
        if shape:
            pointer = self.b.value(ops.PtrBroadcast, (q,), PointerType(d, shape, q.type.space))
            line = TileType(i64, (16 if shape == (4, 4) else shape[0],))
            places = V(self.emit(ops.Iota, (), line))
            if shape == (4, 4):
                places = V(self.emit(ops.Reshape, (places.value,), line.with_shape(shape)))
            offset = self.binary_exact(Binary.ADD, self.broadcast(start, shape), places, 0.0).value
        else:
            offset = start.value
        pointer = self.b.value(ops.PtrOffset, (pointer, offset), pointer.type)
        scopes = [Scope.DEVICE, Scope.SYSTEM]
        if self.r.random() < 0.3:
            pointer = self.b.value(ops.Unicast, (pointer,), PointerType(d, shape, Space.PEER))
            scopes = [Scope.SYSTEM]
        masked, t = self.r.random() < 0.4, TileType(d, shape)
        tail: list[Value] = [self.condition(shape).value] if masked else []
        if self.token is None:
            self.token = self.b.value(ops.NewToken, (), TokenType())
        elif self.r.random() < 0.2:
            self.token = self.b.value(ops.JoinTokens, [self.token] * self.r.randint(1, 2), TokenType())
        elif self.r.random() < 0.1:
            self.token = self.b.value(ops.FenceAlias, (self.token,), TokenType())
        tail.append(self.token)
        attrs: dict[str, Any] = {"masked": masked, "ordered": True}
        kinds = [ops.PtrLoad, ops.PtrStore, ops.PtrRmw, *([ops.PtrCas] if d.is_int else [])]
        cls = self.r.choice(kinds)
        orders = {ops.PtrLoad: (Order.WEAK, *_READS), ops.PtrStore: (Order.WEAK, *_WRITES)}.get(cls, _UPDATES)
        order = self.r.choice(orders)
        attrs |= {"order": order, "scope": None if order is Order.WEAK else self.r.choice(scopes)}
        value = self.exact(t)
        if cls is ops.PtrStore:
            self.token = self.b.value(cls, (pointer, value.value, *tail), TokenType(), **attrs)
            return None
        first: tuple[Value, ...] = (pointer, value.value)
        if cls is ops.PtrCas:
            first = (pointer, self.exact(t).value, value.value)
        elif cls is ops.PtrRmw:
            kinds_of = (Rmw.MIN, Rmw.MAX, Rmw.XCHG) if d.is_float else tuple(k for k in Rmw if k is not Rmw.ADDF)
            attrs["rmw"] = self.r.choice(kinds_of)
            if d.is_float:  # no zeros of both signs
                first = (pointer, self.clamp(self.plus_one(self.clamp(value, 2.0)), _BOUND).value)
        found, self.token = self.b.emit(cls, (*first, *tail), (t, TokenType()), **attrs).results
        if masked and cls is not ops.PtrLoad:  # what is masked off is undefined
            found = self.emit(ops.Select, (tail[0], found, self.const(1, t).value), t)
        return V(found, _BOUND if d.is_float else 0.0)
