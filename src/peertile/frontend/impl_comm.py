"""Words of communication: signals, counters, barriers, mailboxes. Emits the ops that `passes.protocols` expands."""

from __future__ import annotations

import peertile.language as T
from peertile.frontend.convert import flag_arg, index_scalar
from peertile.frontend.groups import check_range, num_ranks_of, rank_of
from peertile.frontend.impl_tiles import known_tuple
from peertile.frontend.registry import implements
from peertile.frontend.scope import Build
from peertile.frontend.values import (
    NONE,
    Abstract,
    Barrier,
    CollectIterator,
    Counter,
    CounterSlot,
    Known,
    Mailbox,
    Round,
    RoundContext,
    Signal,
    SignalSlot,
    Tile,
    describe,
)
from peertile.ir import ops
from peertile.ir.core import Value
from peertile.ir.ops import CheckKind, Compare
from peertile.ir.types import BOOL, INDEX, ObjectType

__all__ = ["linear_program", "notify_rank"]


def linear_program(b: Build) -> Value:
    """The program index: of a grid with several axes, the first runs fastest."""
    index = b.builder.value(ops.ProgramId, (), INDEX, axis=0)
    if b.grid_rank == 1:
        return index
    stride = b.builder.value(ops.NumPrograms, (), INDEX, axis=0)
    for axis in range(1, b.grid_rank):
        here = b.builder.value(ops.ProgramId, (), INDEX, axis=axis)
        scaled = b.builder.value(ops.BinaryOp, (here, stride), INDEX, fn=ops.Binary.MUL)
        index = b.builder.value(ops.BinaryOp, (index, scaled), INDEX, fn=ops.Binary.ADD)
        if axis + 1 < b.grid_rank:
            count = b.builder.value(ops.NumPrograms, (), INDEX, axis=axis)
            stride = b.builder.value(ops.BinaryOp, (stride, count), INDEX, fn=ops.Binary.MUL)
    return index


def _slot(b: Build, slot: Abstract, value: Value, name: str, kind: str) -> Value:
    """A named slot, checked to exist, or the program index, which the launch checks once for the whole grid."""
    if slot == NONE:
        return linear_program(b)
    index = index_scalar(b, slot, f"`{name}`: slot")
    t = value.type
    assert isinstance(t, ObjectType)
    field = "arrived" if kind == "signal" else "count"

    def slots() -> Value:
        words = b.builder.value(ops.Field, (value,), t.fields[field], field=field)
        return b.builder.value(ops.Extent, (words,), INDEX, axis=0)

    check_range(b, index, slots, f"slot of {kind} `{name}` out of range")
    return index


def _rank(b: Build, rank: Abstract, value: Value, role: str) -> Value:
    index = index_scalar(b, rank, role)
    check_range(b, index, lambda: num_ranks_of(b, value), f"{role} out of range", b.proven_ranks)
    return index


# ---------------------------------------------------------------- signals


@implements(T.Signal.__getitem__)
def _signal_slot(b: Build, self: Abstract, slot: Abstract) -> Abstract:
    assert isinstance(self, Signal)
    return SignalSlot(self, _slot(b, slot, self.value, self.name, "signal"))


@implements(T.Signal.rank)
def _signal_rank(b: Build, self: Abstract) -> Abstract:
    assert isinstance(self, Signal)
    return Tile(rank_of(b, self.value))


@implements(T.Signal.num_ranks)
def _signal_num_ranks(b: Build, self: Abstract) -> Abstract:
    assert isinstance(self, Signal)
    return Tile(num_ranks_of(b, self.value))


@implements(T.Signal.notify)
def _notify(b: Build, self: Abstract, to: Abstract, slot: Abstract) -> Abstract:
    assert isinstance(self, Signal)
    return _emit_notify(b, self, _slot(b, slot, self.value, self.name, "signal"), to)


@implements(T.SignalSlot.notify)
def _notify_slot(b: Build, self: Abstract, to: Abstract) -> Abstract:
    assert isinstance(self, SignalSlot)
    return _emit_notify(b, self.signal, self.slot, to)


def notify_rank(b: Build, signal: Signal | SignalSlot, rank: Value) -> None:
    """Notifies one rank, which is known to be one, at the named slot or the program's own."""
    own = signal if isinstance(signal, Signal) else signal.signal
    slot = signal.slot if isinstance(signal, SignalSlot) else linear_program(b)
    b.builder.emit(ops.Notify, (own.value, slot, rank))


def _emit_notify(b: Build, signal: Signal, slot: Value, to: Abstract) -> Abstract:
    rank = () if to == NONE else (_rank(b, to, signal.value, f"`{signal.name}.notify`: rank"),)
    b.builder.emit(ops.Notify, (signal.value, slot, *rank))
    return NONE


@implements(T.Signal.wait)
def _wait(b: Build, self: Abstract, rank: Abstract, slot: Abstract) -> Abstract:
    assert isinstance(self, Signal)
    return _emit_wait(b, self, _slot(b, slot, self.value, self.name, "signal"), rank)


@implements(T.SignalSlot.wait)
def _wait_slot(b: Build, self: Abstract, rank: Abstract) -> Abstract:
    assert isinstance(self, SignalSlot)
    return _emit_wait(b, self.signal, self.slot, rank)


def _emit_wait(b: Build, signal: Signal, slot: Value, rank: Abstract) -> Abstract:
    source = () if rank == NONE else (_rank(b, rank, signal.value, f"`{signal.name}.wait`: rank"),)
    b.builder.emit(ops.WaitSignal, (signal.value, slot, *source))
    return NONE


# ---------------------------------------------------------------- counters and barriers


@implements(T.Counter.__getitem__)
def _counter_slot(b: Build, self: Abstract, slot: Abstract) -> Abstract:
    assert isinstance(self, Counter)
    return CounterSlot(self, _slot(b, slot, self.value, self.name, "counter"))


@implements(T.Counter.rank)
def _counter_rank(b: Build, self: Abstract) -> Abstract:
    assert isinstance(self, Counter)
    return Tile(rank_of(b, self.value))


@implements(T.Counter.num_ranks)
def _counter_num_ranks(b: Build, self: Abstract) -> Abstract:
    assert isinstance(self, Counter)
    return Tile(num_ranks_of(b, self.value))


@implements(T.Counter.add)
def _add(b: Build, self: Abstract, n: Abstract, to: Abstract, slot: Abstract) -> Abstract:
    assert isinstance(self, Counter)
    return _emit_add(b, self, _slot(b, slot, self.value, self.name, "counter"), n, to)


@implements(T.CounterSlot.add)
def _add_slot(b: Build, self: Abstract, n: Abstract, to: Abstract) -> Abstract:
    assert isinstance(self, CounterSlot)
    return _emit_add(b, self.counter, self.slot, n, to)


def _emit_add(b: Build, counter: Counter, slot: Value, n: Abstract, to: Abstract) -> Abstract:
    amount = _amount(b, n, f"`{counter.name}.add`: n")
    rank = _rank(b, to, counter.value, f"`{counter.name}.add`: rank")
    b.builder.emit(ops.CounterAdd, (counter.value, slot, amount, rank))
    return NONE


def _amount(b: Build, n: Abstract, role: str) -> Value:
    if isinstance(n, Known) and isinstance(n.value, int) and n.value < 0:
        b.fail(f"{role}: expected 0 or more, got {n.value}; a counter only grows")
    value = index_scalar(b, n, role)
    if not isinstance(value.op, ops.Const | ops.NumRanks):
        zero = b.builder.value(ops.Const, (), INDEX, value=0)
        grows = b.builder.value(ops.CompareOp, (value, zero), BOOL, fn=Compare.GE)
        b.builder.emit(ops.Check, (grows,), kind=CheckKind.ASSERT, message=f"{role}: a counter only grows")
    return value


@implements(T.Counter.wait)
def _counter_wait(b: Build, self: Abstract, n: Abstract, slot: Abstract) -> Abstract:
    assert isinstance(self, Counter)
    return _emit_counter_wait(b, self, _slot(b, slot, self.value, self.name, "counter"), n)


@implements(T.CounterSlot.wait)
def _counter_wait_slot(b: Build, self: Abstract, n: Abstract) -> Abstract:
    assert isinstance(self, CounterSlot)
    return _emit_counter_wait(b, self.counter, self.slot, n)


def _emit_counter_wait(b: Build, counter: Counter, slot: Value, n: Abstract) -> Abstract:
    b.builder.emit(ops.CounterWait, (counter.value, slot, _amount(b, n, f"`{counter.name}.wait`: n")))
    return NONE


@implements(T.Barrier.rank)
def _barrier_rank(b: Build, self: Abstract) -> Abstract:
    assert isinstance(self, Barrier)
    return Tile(rank_of(b, self.value))


@implements(T.Barrier.num_ranks)
def _barrier_num_ranks(b: Build, self: Abstract) -> Abstract:
    assert isinstance(self, Barrier)
    return Tile(num_ranks_of(b, self.value))


@implements(T.Barrier.arrive)
def _barrier_arrive(b: Build, self: Abstract) -> Abstract:
    assert isinstance(self, Barrier)
    b.builder.emit(ops.BarrierArrive, (self.value,))
    return NONE


@implements(T.Barrier.wait)
def _barrier_wait(b: Build, self: Abstract) -> Abstract:
    assert isinstance(self, Barrier)
    b.builder.emit(ops.BarrierWait, (self.value,))
    return NONE


@implements(T.Barrier.sync)
def _barrier_sync(b: Build, self: Abstract) -> Abstract:
    assert isinstance(self, Barrier)
    b.builder.emit(ops.BarrierSync, (self.value,), all_programs=False)
    return NONE


@implements(T.Barrier.sync_all)
def _barrier_sync_all(b: Build, self: Abstract) -> Abstract:
    assert isinstance(self, Barrier)
    b.builder.emit(ops.BarrierSync, (self.value,), all_programs=True)
    return NONE


# ---------------------------------------------------------------- mailboxes


def _mailbox(self: Abstract) -> Mailbox:
    assert isinstance(self, Mailbox)
    return self


@implements(T.Mailbox.tile_shape)
def _box_tile_shape(b: Build, self: Abstract) -> Abstract:
    return known_tuple(_mailbox(self).type.tile_shape)


@implements(T.Mailbox.dtype)
def _box_dtype(b: Build, self: Abstract) -> Abstract:
    return Known(_mailbox(self).type.dtype)


@implements(T.Mailbox.rank)
def _box_rank(b: Build, self: Abstract) -> Abstract:
    return Tile(rank_of(b, _mailbox(self).value))


@implements(T.Mailbox.num_ranks)
def _box_num_ranks(b: Build, self: Abstract) -> Abstract:
    return Tile(num_ranks_of(b, _mailbox(self).value))


def _box_tile(b: Build, box: Mailbox, value: Abstract, role: str) -> Value:
    t = box.type
    expected = f"{t.dtype.name}[{', '.join(map(str, t.tile_shape))}]"
    if not isinstance(value, Tile):
        b.fail(f"{role}: expected a tile {expected}, got {describe(value)}")
    if value.type.dtype != t.dtype:
        b.fail(f"{role}: expected a tile {expected}, got {value.type}; convert it with .astype({box.name}.dtype)")
    if value.type.shape != t.tile_shape:
        b.fail(
            f"{role}: expected a tile {expected}, got {value.type}; "
            "reshape it, or make the mailbox with that tile shape"
        )
    return value.value


@implements(T.Mailbox.post)
def _post(b: Build, self: Abstract, tile: Abstract) -> Abstract:
    box = _mailbox(self)
    b.builder.emit(ops.BoxPost, (box.value, _box_tile(b, box, tile, f"`{box.name}.post`")))
    return NONE


@implements(T.Mailbox.round)
def _round(b: Build, self: Abstract) -> Abstract:
    return RoundContext(_mailbox(self))


@implements(T.Mailbox.collect)
def _collect(b: Build, self: Abstract, sources: Abstract) -> Abstract:
    box = _mailbox(self)
    return CollectIterator(box, flag_arg(b, sources, f"`{box.name}.collect`: sources"))


@implements(T.Round.put)
def _round_put(b: Build, self: Abstract, tile: Abstract, to: Abstract) -> Abstract:
    assert isinstance(self, Round)
    box = self.box
    value = _box_tile(b, box, tile, f"put into a round of `{box.name}`")
    rank = _rank(b, to, box.value, f"put into a round of `{box.name}`: rank")
    b.builder.emit(ops.BoxPut, (box.value, value, rank))
    return NONE
