"""Rewrites mailbox ops into primitives: the protocol of docs/concepts/mailbox.md, step by step.

Expects IR that keeps the mailbox rules (`mailbox_rules.py`); leaves no mailbox op. By those rules the
number of rounds that are posted and not collected is the same on every way to an op, so it is a
number of this pass: the round of a post is what the program's own `arrived` word says, the round of a
collect that many less. Nothing else is kept, so relaunch, other grids and replay need no care.

Words: `arrived` is epoch << 24 | signature, `freed` epoch << 24. They are compared by their signed
difference, which makes epochs compare modulo 2^40; the signature below cannot tip a comparison,
since what is waited for has zeros there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Final

from peertile.errors import OutOfBounds
from peertile.ir import ops
from peertile.ir.core import Block, Builder, Kernel, Op, Value, walk
from peertile.ir.ops import Binary, Bounds, CheckKind, Compare
from peertile.ir.types import BOOL, INDEX, Link, MailboxType, TileType
from peertile.passes.protocols import WORD, Emitter, name_of
from peertile.passes.rewrite import replace_values

__all__ = ["expand_mailboxes"]

SIGNATURE_BITS: Final = 24
SIGNATURE_MASK: Final = (1 << SIGNATURE_BITS) - 1
EMPTY: Final = 1 << SIGNATURE_BITS
"""Set in the signature kept beside a slot whose link has no tile in this round."""


@dataclass(frozen=True, slots=True)
class _Round:
    """A round: its epoch, the channel, and the row of its slots (channel · depth + epoch mod depth)."""

    epoch: Value
    channel: Value
    row: Value


@dataclass(frozen=True, slots=True)
class _State:
    """What is known of a mailbox at a point of the kernel."""

    outstanding: int = 0
    posting: _Round | None = None
    collecting: _Round | None = None


_States = dict[Value, _State]


def expand_mailboxes(kernel: Kernel) -> Kernel:
    """Expands all mailbox ops, in place; returns `kernel`."""
    _Expansion(kernel).block(kernel.body, {})
    return kernel


class _Expansion:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        # Where no round is opened by hand, every link has a tile in every round.
        self.rounds = {op.operands[0] for op in walk(kernel.body) if isinstance(op, ops.BoxRound)}
        self.replacements: dict[Value, Value] = {}

    def block(self, block: Block, states: _States) -> _States | None:
        """Expands `block` entered with `states`; the states at its end, None if it does not fall through."""
        for op in list(block.ops):
            if isinstance(op, ops.If):
                ends = [self.block(inner, dict(states)) for inner in op.blocks]
                # Both arms agree where both fall through (rule B2).
                states = next((s for s in ends if s is not None), states)
            elif op.blocks:
                # A loop's body leaves the state it found (rule B3).
                for inner in op.blocks:
                    self.block(inner, dict(states))
            elif isinstance(op, _MAILBOX_OPS):
                box = op.operands[0]
                e = _Box(Builder(block, op.loc, op), self.kernel, box, box in self.rounds)
                states[box] = e.expand(op, states.get(box, _State()), self.replacements)
                block.ops.remove(op)
        if block.parent is None:
            replace_values(self.kernel, self.replacements)
        return states if isinstance(block.terminator, ops.Yield) else None


class _Box(Emitter):
    """The steps of the protocol on one mailbox, at one point of the kernel."""

    def __init__(self, builder: Builder, kernel: Kernel, box: Value, rounds: bool) -> None:
        super().__init__(builder, kernel)
        assert isinstance(box.type, MailboxType)
        self.type = box.type
        self.box = box
        self.rounds = rounds
        self.arrived = self.field(box, "arrived")
        self.me = self.rank(self.arrived)
        self.links = self.field(box, "links") if self.type.linked else None

    # -- links

    def has(self, rank: Value, link: Link) -> Value:
        """Whether there is such a link between this rank and `rank`."""
        assert self.links is not None
        word = self.binary(Binary.AND, self.load(self.links, rank), int(link))
        return self.compare(Compare.NE, word, 0)

    def linked(self, rank: Value, link: Link, body: Callable[[], None]) -> None:
        """body() where there is such a link: everywhere, unless the mailbox has links of its own."""
        if self.links is None:
            body()
        else:
            self.when(self.has(rank, link), body)

    def linked_peers(self, link: Link, body: Callable[[Value], None]) -> None:
        self.peers(self.arrived, lambda rank: self.linked(rank, link, lambda: body(rank)))

    def expand(self, op: Op, state: _State, replacements: dict[Value, Value]) -> _State:
        """Emits what `op` means in `state`; returns the state after it."""
        if isinstance(op, ops.BoxPost):
            r = self.begin()
            self.linked_peers(Link.SENDS, lambda rank: self.deliver(r, op.operands[1], rank))
            self.linked(self.me, Link.SENDS, lambda: self.put(r, op.operands[1], self.me))
            self.close(r)
            return replace(state, outstanding=state.outstanding + 1)
        if isinstance(op, ops.BoxPut):
            r = self.known(op, state.posting, "an open round")
            self.check_rank(op.operands[2], self.arrived, name_of(self.box))
            self.check_receiver(op.operands[2])
            self.put(r, op.operands[1], op.operands[2])
            return state
        if isinstance(op, ops.BoxFlush):
            r = self.known(op, state.posting, "an open round")
            self.linked_peers(Link.SENDS, lambda rank: self.announce(r, rank))
            self.close(r)
            return replace(state, outstanding=state.outstanding + 1, posting=None)
        if isinstance(op, ops.BoxCollect):
            op.require(state.outstanding > 0, "expected a round that was posted and not collected")
            return replace(state, collecting=self.round(state.outstanding))
        if isinstance(op, ops.BoxTake):
            tile, present = self.take(self.known(op, state.collecting, "a round being collected"), op.operands[1])
            replacements |= {op.results[0]: tile, op.results[1]: present}
            return state
        if isinstance(op, ops.BoxRelease):
            r = self.known(op, state.collecting, "a round being collected")
            if self.type.acknowledged:
                self.acknowledge(r)
            return replace(state, outstanding=state.outstanding - 1, collecting=None)
        r = self.begin()
        self.mark_empty(r)
        return replace(state, posting=r)

    @staticmethod
    def known(op: Op, round: _Round | None, what: str) -> _Round:
        op.require(round is not None, f"expected {what}")
        assert round is not None
        return round

    # -- rounds

    def round(self, back: int) -> _Round:
        """The round `back` before the next one to be posted; that one's number is in the own word."""
        channel = self.program(self.kernel.grid_rank)
        own = self.load(self.at(self.arrived, self.me), channel, self.me)
        epoch = self.binary(Binary.SHR, own, SIGNATURE_BITS)
        # Near the wrap this borrows into the high bits; they are shifted or masked out wherever it is used.
        epoch = self.sub(epoch, back) if back else epoch
        slot = self.bitcast(self.binary(Binary.AND, epoch, self.type.depth - 1), INDEX)
        return _Round(epoch, channel, self.add(self.mul(channel, self.type.depth), slot))

    def begin(self) -> _Round:
        """The next round, once its slots may be written."""
        r = self.round(0)
        if self.type.acknowledged:
            # In the first `depth` rounds this asks for less than zero, which zero satisfies.
            last_use = self.shifted(self.add(self.sub(r.epoch, self.type.depth), 1))
            freed = self.at(self.field(self.box, "freed"), self.me)
            what = f"{name_of(self.box)} (slot given back)"
            self.linked_peers(
                Link.SENDS_ACKNOWLEDGED, lambda rank: self.wait(freed, last_use, r.channel, rank, what=what)
            )
        return r

    def shifted(self, epoch: Value) -> Value:
        return self.binary(Binary.SHL, epoch, SIGNATURE_BITS)

    def signature(self) -> Value:
        """This launch's own signature, as a word."""
        word = self.bitcast(self.field(self.box, "signature"), WORD)
        return self.binary(Binary.AND, word, SIGNATURE_MASK)

    # -- posting

    def deliver(self, r: _Round, tile: Value, rank: Value) -> None:
        self.put(r, tile, rank)
        self.announce(r, rank)

    def check_receiver(self, rank: Value) -> None:
        """A put goes along a link; elsewhere nobody would collect it."""
        if self.links is not None:
            message = (
                f"mailbox {name_of(self.box)}: put: expected a rank that receives from this one, got rank "
                f"{OutOfBounds.GOT}; make the mailbox with that link (links=), or put to a rank that it has a link to"
            )
            operands = self.has(rank, Link.SENDS), rank, self.num_ranks(self.arrived)
            self.b.emit(ops.Check, operands, kind=CheckKind.BOUNDS, message=message)

    def put(self, r: _Round, tile: Value, rank: Value) -> None:
        """Writes a tile, and the signature beside it, into this rank's slot on `rank`."""
        data = self.field(self.box, "data")
        flat = self.b.value(ops.Reshape, (tile,), self.flat())
        row = self.data_row(r, self.me)
        self.b.emit(ops.Store, (self.at(data, rank), flat, row, self.const(0)), bounds=Bounds.PROVEN)
        self.sign(r, self.signature(), rank)

    def sign(self, r: _Round, word: Value, rank: Value) -> None:
        self.store(self.at(self.field(self.box, "signatures"), rank), word, r.row, self.me)

    def mark_empty(self, r: _Round) -> None:
        word = self.binary(Binary.OR, self.signature(), EMPTY)
        self.linked_peers(Link.SENDS, lambda rank: self.sign(r, word, rank))
        self.sign(r, word, self.me)

    def announce(self, r: _Round, rank: Value) -> None:
        self.release(self.at(self.arrived, rank), self.arrival(r), r.channel, self.me)

    def arrival(self, r: _Round) -> Value:
        return self.binary(Binary.OR, self.shifted(self.add(r.epoch, 1)), self.signature())

    def close(self, r: _Round) -> None:
        """The own word, last: it is the number of rounds posted, and this program alone reads it."""
        self.store(self.at(self.arrived, self.me), self.arrival(r), r.channel, self.me)

    # -- collecting

    def take(self, r: _Round, source: Value) -> tuple[Value, Value]:
        """The tile of `source` and whether there is one: not without a link, nor in a round that left it empty."""
        if self.links is None:
            return self.arrival_of(r, source)
        then, other = Block(), Block()
        with self.b.at(then):
            self.b.emit(ops.Yield, self.arrival_of(r, source))
        with self.b.at(other):
            self.b.emit(ops.Yield, (self.no_tile(), self.b.value(ops.Const, (), BOOL, value=False)))
        types = TileType(self.type.dtype, self.type.tile_shape), BOOL
        op = self.b.emit(ops.If, (self.has(source, Link.RECEIVES),), types, (then, other))
        return op.results[0], op.results[1]

    def arrival_of(self, r: _Round, source: Value) -> tuple[Value, Value]:
        """Waits for the round of `source`, compares signatures, loads the tile."""
        name = name_of(self.box)
        self.wait(self.at(self.arrived, self.me), self.shifted(self.add(r.epoch, 1)), r.channel, source, what=name)
        signed = self.load(self.at(self.field(self.box, "signatures"), self.me), r.row, source)
        got = self.bitcast(self.binary(Binary.AND, signed, SIGNATURE_MASK), INDEX)
        expected = self.bitcast(self.signature(), INDEX)
        self.b.emit(
            ops.Check, (self.compare(Compare.EQ, got, expected), got, expected),
            kind=CheckKind.SIGNATURE, message=f"{name}: two ranks post from kernels or arguments that do not match",
        )  # fmt: skip
        if not self.rounds:
            return self.tile(r, source), self.true()
        present = self.compare(Compare.EQ, self.binary(Binary.AND, signed, EMPTY), 0)
        return self.tile_if(present, r, source), present

    def flat(self) -> TileType:
        return TileType(self.type.dtype, (1, prod(self.type.tile_shape)))

    def data_row(self, r: _Round, source: Value) -> Value:
        return self.add(self.mul(r.row, self.num_ranks(self.arrived)), source)

    def tile(self, r: _Round, source: Value) -> Value:
        view = self.at(self.field(self.box, "data"), self.me)
        row = self.data_row(r, source)
        flat = self.b.value(ops.Load, (view, row, self.const(0)), self.flat(), bounds=Bounds.PROVEN)
        return self.b.value(ops.Reshape, (flat,), TileType(self.type.dtype, self.type.tile_shape))

    def tile_if(self, present: Value, r: _Round, source: Value) -> Value:
        """The tile, or zeros where the link has none: its slot may never have been written."""
        then, other = Block(), Block()
        with self.b.at(then):
            self.b.emit(ops.Yield, (self.tile(r, source),))
        with self.b.at(other):
            self.b.emit(ops.Yield, (self.no_tile(),))
        t = TileType(self.type.dtype, self.type.tile_shape)
        return self.b.emit(ops.If, (present,), (t,), (then, other)).result

    def no_tile(self) -> Value:
        t = TileType(self.type.dtype)
        value = 0.0 if t.dtype.is_float else False if t.dtype.is_bool else 0
        zero = self.b.value(ops.Const, (), t, value=value)
        return self.b.value(ops.Broadcast, (zero,), TileType(self.type.dtype, self.type.tile_shape))

    def acknowledge(self, r: _Round) -> None:
        """Gives every source its slot back."""
        freed, word = self.field(self.box, "freed"), self.shifted(self.add(r.epoch, 1))
        self.linked_peers(
            Link.RECEIVES_ACKNOWLEDGED,
            lambda rank: self.release(self.at(freed, rank), word, r.channel, self.me),
        )


_MAILBOX_OPS: Final = (
    ops.BoxPost, ops.BoxRound, ops.BoxPut, ops.BoxFlush, ops.BoxCollect, ops.BoxTake, ops.BoxRelease,
)  # fmt: skip
