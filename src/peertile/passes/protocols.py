"""Rewrites signals, counters, barriers and launch-wide synchronisation (`ops.EXPANDED`) into primitives.

Mailbox ops are in `mailbox.py`. Expects verified IR; leaves verified IR without expanded ops. Every
op that replaces another keeps its location, so a wait that never ends shows the line of the user.

All epochs are u64 words that only go up and are compared wrap-safe. Words that this rank alone uses
(`sent`, `seen`, `base`, `passed`) are weak: one program uses a row, in program order, and the next
launch comes after this one. Words that cross ranks are released and acquired at system scope.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from peertile.dtypes import u64
from peertile.ir import ops
from peertile.ir.core import Block, Builder, Kernel, Op, Value
from peertile.ir.ops import Binary, CheckKind, Compare
from peertile.ir.types import INDEX, Access, MulticastType, ObjectType, Space, SymmetricType, TileType, ViewType
from peertile.memory_model import Cmp, Order, Rmw, Scope
from peertile.passes.rewrite import Scalars, constant_of

__all__ = ["WORD", "Emitter", "expand_signals", "name_of"]

WORD: Final = TileType(u64)
LAUNCH_WORDS: Final = ViewType(u64, 1, Access.READ_WRITE, Space.DEVICE)


class Emitter(Scalars):
    """What every protocol is made of: words of a field, loops over ranks, ordered accesses."""

    def __init__(self, builder: Builder, kernel: Kernel) -> None:
        super().__init__(builder)
        self.kernel = kernel

    def field(self, obj: Value, name: str) -> Value:
        t = obj.type
        assert isinstance(t, ObjectType)
        return self.b.value(ops.Field, (obj,), t.fields[name], field=name)

    def rank(self, words: Value) -> Value:
        return self.b.value(ops.Rank, (words,), INDEX)

    def num_ranks(self, words: Value) -> Value:
        return self.b.value(ops.NumRanks, (words,), INDEX)

    def at(self, words: Value, rank: Value) -> Value:
        """The view of a symmetric field on `rank`."""
        t = words.type
        assert isinstance(t, SymmetricType)
        return self.b.value(ops.PeerView, (words, rank), t.view)

    def peers(self, words: Value, body: Callable[[Value], None]) -> None:
        """body(peer) for every other rank, staggered so that ranks do not all reach for one."""
        me, n = self.rank(words), self.num_ranks(words)

        def one(k: Value) -> None:
            peer = self.add(me, k)
            past = self.compare(Compare.GE, peer, n)
            body(self.b.value(ops.Select, (past, self.sub(peer, n), peer), INDEX))

        self.loop(1, n, one)

    def load(self, view: Value, *index: Value) -> Value:
        """A weak read of a word that this program alone writes, or that an acquire came before."""
        return self.b.value(ops.WordLoad, (view, *index), WORD, order=Order.WEAK, scope=None)

    def store(self, view: Value, value: Value, *index: Value) -> None:
        self.b.emit(ops.WordStore, (view, value, *index), order=Order.WEAK, scope=None)

    def release(self, view: Value, value: Value, *index: Value) -> None:
        self.b.emit(ops.WordStore, (view, value, *index), order=Order.RELEASE, scope=Scope.SYSTEM)

    def wait(self, view: Value, value: Value, *index: Value, what: str, scope: Scope = Scope.SYSTEM) -> None:
        """Until the word has reached `value`, wrap-safe; what follows is ordered after it."""
        self.b.value(
            ops.Wait, (view, value, *index), WORD, cmp=Cmp.AT_LEAST, order=Order.ACQUIRE, scope=scope, what=what
        )

    def cross(self) -> None:
        """In a kernel with a multicast parameter: what was done through either address comes before what follows,
        through either."""
        if any(isinstance(v.type, MulticastType) for v in self.kernel.params):
            self.b.emit(ops.FenceAlias)

    def check_inside(self, index: Value, limit: Value, message: str) -> None:
        self.b.emit(ops.Check, (self.inside(index, limit), index, limit), kind=CheckKind.BOUNDS, message=message)

    def check_slot(self, slot: Value, words: Value, obj: Value) -> None:
        """Slots are checked, but for the program index itself: the launcher compares it with the rows."""
        if not _is_program(slot):
            rows = self.b.value(ops.Extent, (words,), INDEX, axis=0)
            self.check_inside(slot, rows, f"slot of {name_of(obj)} is out of bounds")
            return
        names = dict(zip(self.kernel.params, self.kernel.param_names, strict=True))
        if obj in names:
            self.kernel.facts.setdefault("program_slots", set()).add(names[obj])

    def check_rank(self, rank: Value, words: Value, name: str) -> None:
        if not _is_rank(rank):
            self.check_inside(rank, self.num_ranks(words), f"rank of {name} is out of bounds")


def _is_program(v: Value) -> bool:
    """Whether `v` is made of ids and counts of programs alone, as the index of a program is."""
    op = v.op
    if isinstance(op, ops.BinaryOp) and op.attrs["fn"] in (Binary.ADD, Binary.MUL):
        return all(map(_is_program, op.operands))
    return isinstance(op, ops.ProgramId | ops.NumPrograms)


def _is_rank(v: Value) -> bool:
    """Whether `v` is a rank by construction: one's own, the variable of a loop over ranks, or modulo their number."""
    op = v.op
    if op is None:
        loop = v.owner.parent if isinstance(v.owner, Block) else None
        if not isinstance(loop, ops.For) or v.index != 0:
            return False
        low, high = loop.operands[:2]
        first = constant_of(low)
        return isinstance(high.op, ops.NumRanks) and (_is_rank(low) if first is None else first >= 0)
    if isinstance(op, ops.BinaryOp) and op.attrs["fn"] is Binary.MOD:
        return isinstance(op.operands[1].op, ops.NumRanks)
    return isinstance(op, ops.Rank)


def expand_signals(kernel: Kernel) -> Kernel:
    """Expands everything but the mailbox ops, in place; returns `kernel`."""
    _expand_block(kernel, kernel.body)
    return kernel


def _expand_block(kernel: Kernel, block: Block) -> None:
    for op in list(block.ops):
        for inner in op.blocks:
            _expand_block(kernel, inner)
        expand = _EXPANSIONS.get(type(op))
        if expand is not None:
            expand(Emitter(Builder(block, op.loc, op), kernel), op)
            block.ops.remove(op)


def name_of(value: Value) -> str:
    return value.hint or str(value.type)


def _to_peers(e: Emitter, op: Op, words: Value, body: Callable[[Value], None]) -> None:
    """body(rank) for the rank that `op` names (operand 2), checked, or for every peer."""
    if len(op.operands) > 2:
        e.check_rank(op.operands[2], words, name_of(op.operands[0]))
        body(op.operands[2])
    else:
        e.peers(words, body)


def _notify(e: Emitter, op: Op) -> None:
    signal, slot = op.operands[:2]
    arrived, sent = e.field(signal, "arrived"), e.field(signal, "sent")
    e.check_slot(slot, arrived, signal)
    me = e.rank(arrived)
    e.cross()

    def to(rank: Value) -> None:
        # The own word last: a release waits for what was stored before it.
        epoch = e.add(e.load(sent, slot, rank), 1)
        e.release(e.at(arrived, rank), epoch, slot, me)
        e.store(sent, epoch, slot, rank)

    _to_peers(e, op, arrived, to)


def _wait_signal(e: Emitter, op: Op) -> None:
    signal, slot = op.operands[:2]
    arrived, seen = e.field(signal, "arrived"), e.field(signal, "seen")
    e.check_slot(slot, arrived, signal)
    mine = e.at(arrived, e.rank(arrived))

    def source(rank: Value) -> None:
        # The own word before the wait, whose time hides the store; a wait that fails poisons the words anyhow.
        epoch = e.add(e.load(seen, slot, rank), 1)
        e.store(seen, epoch, slot, rank)
        e.wait(mine, epoch, slot, rank, what=name_of(signal))

    _to_peers(e, op, arrived, source)
    e.cross()


def _counter_add(e: Emitter, op: Op) -> None:
    counter, slot, amount, rank = op.operands
    count = e.field(counter, "count")
    e.check_rank(rank, count, name_of(counter))
    e.check_slot(slot, count, counter)
    there = e.at(count, rank)
    e.cross()
    e.b.value(
        ops.WordRmw, (there, e.bitcast(amount, WORD), slot, e.const(0)), WORD,
        rmw=Rmw.ADD, order=Order.RELEASE, scope=Scope.SYSTEM,
    )  # fmt: skip


def _counter_wait(e: Emitter, op: Op) -> None:
    counter, slot, n = op.operands
    count, base = e.field(counter, "count"), e.field(counter, "base")
    e.check_slot(slot, count, counter)
    zero = e.const(0)
    target = e.add(e.load(base, slot, zero), e.bitcast(n, WORD))
    e.wait(e.at(count, e.rank(count)), target, slot, zero, what=name_of(counter))
    e.store(base, target, slot, zero)
    e.cross()


def _barrier_sync(e: Emitter, op: Op) -> None:
    (barrier,) = op.operands
    if not op.attrs["all_programs"]:
        _meet(e, barrier, e.program(e.kernel.grid_rank))
        return
    # The programs of a rank hand what they did to program 0, which meets its counterparts: releases
    # are cumulative. Row 0 then counts these rounds too, on every rank alike.
    _sync_programs(e, op)
    first = e.compare(Compare.EQ, e.program(e.kernel.grid_rank), 0)
    e.when(first, lambda: _meet(e, barrier, e.const(0)))
    _sync_programs(e, op)


def _meet(e: Emitter, barrier: Value, row: Value) -> None:
    """Row `row` of all ranks arrives and leaves."""
    _arrive(e, barrier, row)
    _leave(e, barrier, row)


def _arrive(e: Emitter, barrier: Value, row: Value) -> None:
    """Tells every rank; the epoch counts on only when it is waited for, so both halves find the same one."""
    arrived, passed = e.field(barrier, "arrived"), e.field(barrier, "passed")
    epoch = e.add(e.load(passed, row, e.const(0)), 1)
    me = e.rank(arrived)
    e.cross()
    e.peers(arrived, lambda rank: e.release(e.at(arrived, rank), epoch, row, me))


def _leave(e: Emitter, barrier: Value, row: Value) -> None:
    arrived, passed = e.field(barrier, "arrived"), e.field(barrier, "passed")
    zero = e.const(0)
    epoch = e.add(e.load(passed, row, zero), 1)
    mine = e.at(arrived, e.rank(arrived))
    e.peers(arrived, lambda rank: e.wait(mine, epoch, row, rank, what=name_of(barrier)))
    e.store(passed, epoch, row, zero)
    e.cross()


def _barrier_arrive(e: Emitter, op: Op) -> None:
    _arrive(e, op.operands[0], e.program(e.kernel.grid_rank))


def _barrier_wait(e: Emitter, op: Op) -> None:
    _leave(e, op.operands[0], e.program(e.kernel.grid_rank))


def _sync_programs(e: Emitter, op: Op) -> None:
    """A ticket on word 0: whoever draws ticket a waits until its round of n tickets is complete."""
    n = e.bitcast(e.num_programs(e.kernel.grid_rank), WORD)
    words = e.b.value(ops.LaunchWords, (), LAUNCH_WORDS)
    zero = e.const(0)
    e.cross()
    ticket = e.b.value(
        ops.WordRmw, (words, e.const(1, WORD), zero), WORD, rmw=Rmw.ADD, order=Order.ACQ_REL, scope=Scope.DEVICE
    )
    target = e.mul(e.add(e.binary(Binary.QUOT, ticket, n), 1), n)
    e.wait(words, target, zero, what="sync_programs", scope=Scope.DEVICE)
    e.cross()


_EXPANSIONS: Final[dict[type[Op], Callable[[Emitter, Op], None]]] = {
    ops.Notify: _notify,
    ops.WaitSignal: _wait_signal,
    ops.CounterAdd: _counter_add,
    ops.CounterWait: _counter_wait,
    ops.BarrierSync: _barrier_sync,
    ops.BarrierArrive: _barrier_arrive,
    ops.BarrierWait: _barrier_wait,
    ops.SyncPrograms: _sync_programs,
}
