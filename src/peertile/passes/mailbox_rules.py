"""The static rules of mailboxes, B1 to B6 of docs/concepts/mailbox.md, on IR. Changes nothing but `facts`.

Expects mailbox ops as the frontend or the text form gives them, before `expand_mailboxes`. Two analyses:
*states* (posts outstanding, round open, tiles held) along every path, and *uniformity*: which values are
equal on all ranks, so that all ranks do the same mailbox operations in the same order. B7, which speaks of
names, is the frontend's.

`facts["steering"]` gets the parameters (scalars by value, views by their extents) that decide how many
rounds there are; the launch puts them into the mailbox's signature.

Approximation of uniformity: a value counts as rank-dependent once anything it came from is. It may refuse
a program that is right; it accepts none that is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final, NoReturn

from peertile.errors import CompileError
from peertile.ir import ops
from peertile.ir.core import Block, Kernel, Op, Value
from peertile.ir.types import MailboxType

__all__ = ["check_mailbox_rules"]

_BOX_OPS: Final = (
    ops.BoxPost, ops.BoxRound, ops.BoxPut, ops.BoxFlush, ops.BoxCollect, ops.BoxTake, ops.BoxRelease,
)  # fmt: skip

_VERB: Final[dict[type[Op], str]] = {
    ops.BoxPost: "post",
    ops.BoxRound: "round",
    ops.BoxPut: "put",
    ops.BoxFlush: "the end of a round",
    ops.BoxCollect: "collect",
    ops.BoxTake: "take",
    ops.BoxRelease: "release",
}

_UNEQUAL: Final[dict[type[Op], str]] = {
    ops.Rank: "the number of this rank",
    ops.Load: "a loaded value",
    ops.WordLoad: "a loaded word",
    ops.WordRmw: "the old value of an atomic",
    ops.Wait: "a word waited for",
    ops.BoxTake: "a collected tile",
    ops.PtrLoad: "a value loaded through a pointer",
    ops.PtrRmw: "the old value of an atomic",
    ops.PtrCas: "the old value of an atomic",
}


def check_mailbox_rules(kernel: Kernel, *, posts_ahead: int = 1) -> None:
    """Raise CompileError, with the line, for the first mailbox operation that breaks a rule.

    `posts_ahead` is w: how many rounds may be posted and not collected, unless the mailbox allows more.
    """
    if not any(isinstance(v.type, MailboxType) for v in kernel.params):
        return
    _States(kernel, posts_ahead).run()
    _Uniformity(kernel).run()


def _name(kernel: Kernel, box: Value) -> str:
    for name, value in zip(kernel.param_names, kernel.params, strict=True):
        if value is box:
            return name
    raise CompileError("mailbox: expected a parameter of the kernel (rule B7), got another value")


# ---------------------------------------------------------------- states: B1, B2, B3, B5, B6


@dataclass(frozen=True, slots=True)
class _State:
    """One mailbox at a point of the kernel. `last` is the op that made it so, for the message only."""

    outstanding: int = 0
    open: bool = False
    held: bool = False
    last: Op | None = field(default=None, compare=False)
    puts: dict[int, Op] = field(default_factory=dict, compare=False)
    """Puts of the open round that are certain to have been run, by the number of their rank's value."""

    def __str__(self) -> str:
        if self.open:
            return "a round not sent yet"
        if self.held:
            return "tiles held"
        if self.outstanding == 0:
            return "nothing outstanding"
        return f"{self.outstanding} round{'s' if self.outstanding > 1 else ''} outstanding"


_Snapshot = dict[Value, _State]


@dataclass(slots=True)
class _LoopExits:
    """What reaches the back edge and the way out of a loop, with the op that leads there."""

    continues: list[tuple[Op, _Snapshot]] = field(default_factory=list)
    breaks: list[tuple[Op, _Snapshot]] = field(default_factory=list)


class _States:
    def __init__(self, kernel: Kernel, posts_ahead: int) -> None:
        self.kernel = kernel
        self.posts_ahead = posts_ahead
        self.loops: list[_LoopExits] = []
        self.numbers: dict[Value, int] = {}
        self.expressions: dict[tuple[object, ...], int] = {}

    def number(self, value: Value) -> int:
        """Equal numbers are equal values: of the same constant, or computed in the same way from the same."""
        return self.numbers.setdefault(value, len(self.numbers))

    def learn(self, op: Op) -> None:
        """Numbers the results of an op that only computes; operands have theirs, so this does not recurse."""
        attributes = tuple(sorted((name, repr(v)) for name, v in op.attrs.items()))
        types = tuple(str(r.type) for r in op.results)
        key = (type(op), attributes, types, *(self.number(v) for v in op.operands))
        for k, result in enumerate(op.results):
            self.numbers[result] = self.expressions.setdefault((k, *key), self.number(result))

    def run(self) -> None:
        boxes = [v for v in self.kernel.params if isinstance(v.type, MailboxType)]
        self.block(self.kernel.body, {box: _State() for box in boxes})

    def fail(self, box: Value, op: Op, text: str, last: Op | None = None, note: str = "") -> NoReturn:
        notes = ((note, last.loc),) if last is not None and note else ()
        raise CompileError(f"mailbox `{_name(self.kernel, box)}`: {text}", op.loc, notes)

    def block(self, block: Block, states: _Snapshot) -> _Snapshot | None:
        """The states behind a block, None where control does not get there."""
        current: _Snapshot | None = dict(states)
        for op in block.ops:
            if current is None:
                return None  # what follows is unreachable
            current = self.op(op, current)
        return current

    def op(self, op: Op, states: _Snapshot) -> _Snapshot | None:
        match op:
            case ops.If():
                return self.branch(op, states)
            case ops.For() | ops.Loop():
                return self.loop(op, states)
            case ops.Continue():
                self.loops[-1].continues.append((op, states))
                return None
            case ops.Break():
                self.loops[-1].breaks.append((op, states))
                return None
            case ops.Return():
                self.leave(op, states)
                return None
        if isinstance(op, _BOX_OPS):
            box = op.operands[0]
            _name(self.kernel, box)
            states = {**states, box: self.step(op, box, states)}
        elif op.results and not op.blocks and not op.effects:
            self.learn(op)
        return states

    def step(self, op: Op, box: Value, states: _Snapshot) -> _State:
        """The state of `box` after one of its operations (rules B1 and B6)."""
        state = states[box]
        verb = _VERB[type(op)]
        holder = next((b for b, s in states.items() if s.held), None)
        if holder is not None and not (holder is box and isinstance(op, ops.BoxTake | ops.BoxRelease)):
            name = _name(self.kernel, holder)
            self.fail(
                box,
                op,
                f"{verb} inside the loop over `{name}.collect()` (rule B6): expected no mailbox operation before the "
                f"loop has ended, got {verb}; move it behind the loop",
                states[holder].last,
                "the loop begins here",
            )
        name = _name(self.kernel, box)
        match op:
            case ops.BoxPost() | ops.BoxRound():
                if state.open:
                    self.fail(
                        box,
                        op,
                        f"{verb} inside a round of it (rule B1): expected r.put(tile, to=rank), got {verb}; "
                        "end the with statement first",
                        state.last,
                        "the round begins here",
                    )
                assert isinstance(box.type, MailboxType)
                ahead = max(self.posts_ahead, box.type.posts_ahead)
                if state.outstanding >= ahead:
                    self.fail(
                        box,
                        op,
                        f"{verb} with {state} (rule B1): expected fewer than {ahead}; "
                        f"collect first, with `for part in {name}.collect():`",
                        state.last,
                        "the round that is outstanding was posted here",
                    )
                if isinstance(op, ops.BoxPost):
                    return _State(state.outstanding + 1, last=op)
                return replace(state, open=True, last=op, puts={})
            case ops.BoxPut():
                if not state.open:
                    self.fail(
                        box,
                        op,
                        f"put outside a round (rule B1): expected an open round, got {state}; write "
                        f"`with {name}.round() as r:` around it",
                    )
                rank = self.number(op.operands[2])
                if rank in state.puts:
                    self.fail(
                        box,
                        op,
                        "put to a rank that has its tile of this round (MB-25): expected one put for each rank and "
                        "round, got a second, which would replace the first; choose the tile before the put, or send "
                        "it in a round of its own",
                        state.puts[rank],
                        "the first was put here",
                    )
                return replace(state, puts={**state.puts, rank: op})
            case ops.BoxFlush():
                return _State(state.outstanding + 1, last=op)
            case ops.BoxCollect():
                if state.open or state.outstanding == 0:
                    self.fail(
                        box,
                        op,
                        f"collect with {state} (rule B1): expected a round that was posted; post a tile first, with "
                        f"`{name}.post(tile)`, or end the round",
                    )
                return _State(state.outstanding - 1, held=True, last=op)
            case ops.BoxTake():
                if not state.held:
                    self.fail(box, op, f"take with {state} (rule B1): expected it inside a collect, got one outside")
                return state
        return _State(state.outstanding, last=op)

    def leave(self, op: Op, states: _Snapshot) -> None:
        """Rule B5, at every return and at the end."""
        for box, state in states.items():
            if state != _State():
                name = _name(self.kernel, box)
                self.fail(
                    box,
                    op,
                    f"the kernel ends here with {state} (rule B5): expected nothing outstanding; "
                    f"collect it before, with `for part in {name}.collect():`",
                    state.last,
                    "it is so since here",
                )

    def branch(self, op: Op, states: _Snapshot) -> _Snapshot | None:
        """Rule B2: both arms that fall through leave the same state."""
        ends = [end for end in (self.block(b, states) for b in op.blocks) if end is not None]
        if not ends:
            return None
        for box in states:
            first, last = ends[0][box], ends[-1][box]
            if first != last:
                self.fail(
                    box,
                    op,
                    f"the arms of this `if` leave it in different states (rule B2): expected the same behind both, got "
                    f"{first} and {last}; post and collect in one arm, or do both in front of the if",
                )
        return _certain(ends)

    def loop(self, op: Op, states: _Snapshot) -> _Snapshot | None:
        """Rules B2 and B3: a trip leaves the state it found, and so does every way out."""
        exits = _LoopExits()
        self.loops.append(exits)
        self.block(op.blocks[0], states)
        self.loops.pop()
        for box in states:
            for _, end in exits.continues:
                if end[box] != states[box]:
                    name = _name(self.kernel, box)
                    self.fail(
                        box,
                        op,
                        f"a trip of this loop leaves it in another state than it found (rule B3): expected "
                        f"{states[box]}, got {end[box]}; let each trip collect what it posts, with "
                        f"`for part in {name}.collect():`",
                        end[box].last,
                        "it is so since here",
                    )
        ways = list(exits.breaks)
        if isinstance(op, ops.For):
            ways.append((op, states))
        if not ways:
            return None
        for box in states:
            expected = ways[-1][1][box]
            for end_op, end in ways[:-1]:
                if end[box] != expected:
                    self.fail(
                        box,
                        end_op,
                        f"this way out of the loop leaves it in another state than the others (rule B2): expected "
                        f"{expected}, got {end[box]}; collect before leaving",
                        end[box].last,
                        "it is so since here",
                    )
        return _certain([end for _, end in reversed(ways)])


def _certain(ends: list[_Snapshot]) -> _Snapshot:
    """Paths that meet in the same states: the first, with the puts that all of them have done."""
    first, *others = ends
    if not others:
        return first
    return {
        box: replace(state, puts={n: op for n, op in state.puts.items() if all(n in end[box].puts for end in others)})
        for box, state in first.items()
    }


# ---------------------------------------------------------------- uniformity: B4


@dataclass(frozen=True, slots=True)
class _Fact:
    """What a value, or a place, depends on: `origin` is set when it may differ between ranks."""

    origin: Op | None = None
    params: frozenset[str] = frozenset()

    def __or__(self, other: _Fact) -> _Fact:
        return _Fact(self.origin or other.origin, self.params | other.params)


_EQUAL: Final = _Fact()


@dataclass(slots=True)
class _Escapes:
    """Ways out of a block other than its end, by how far they lead, with what they depend on."""

    returns: _Fact = _EQUAL
    breaks: _Fact = _EQUAL
    continues: _Fact = _EQUAL

    def all(self) -> _Fact:
        return self.returns | self.breaks | self.continues

    def take(self, other: _Escapes) -> None:
        self.returns |= other.returns
        self.breaks |= other.breaks
        self.continues |= other.continues


class _Uniformity:
    """Facts only grow, so repeating the walk until none does ends; then one more walk checks."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.facts: dict[Value, _Fact] = {}
        self.grew = False
        self.checking = False
        self.steering: frozenset[str] = frozenset()

    def run(self) -> None:
        for name, value in zip(self.kernel.param_names, self.kernel.params, strict=True):
            self.facts[value] = _Fact(None, frozenset({name}))
        self.grew = True
        while self.grew:
            self.grew = False
            self.block(self.kernel.body, _EQUAL)
        self.checking = True
        self.block(self.kernel.body, _EQUAL)
        names = dict(zip(self.kernel.params, self.kernel.param_names, strict=True))
        # A mailbox's own fields steer nothing: their shapes are the mailbox's.
        boxes = {names[v] for v in self.kernel.params if isinstance(v.type, MailboxType)}
        self.kernel.facts["steering"] = self.steering - boxes

    def fact(self, values: Iterable[Value]) -> _Fact:
        found = _EQUAL
        for value in values:
            found |= self.facts.get(value, _EQUAL)
        return found

    def learn(self, value: Value, fact: _Fact) -> None:
        old = self.facts.get(value, _EQUAL)
        new = old | fact
        if new != old:
            self.facts[value] = new
            self.grew = True

    def block(self, block: Block, control: _Fact) -> _Escapes:
        """Facts of a block that is run under `control`; how it is left."""
        escapes = _Escapes()
        for op in block.ops:
            here = control | escapes.all()
            match op:
                case ops.If():
                    escapes.take(self.branch(op, here))
                case ops.For() | ops.Loop():
                    escapes.take(self.loop(op, here))
                case ops.Return():
                    escapes.returns |= here
                case ops.Break():
                    escapes.breaks |= here
                case ops.Continue():
                    escapes.continues |= here
                case _:
                    self.plain(op, here)
        return escapes

    def plain(self, op: Op, control: _Fact) -> None:
        # A put inside a round is free: the end of the round releases every link, with or without a tile.
        if isinstance(op, _BOX_OPS) and not isinstance(op, ops.BoxPut) and self.checking:
            self.check(op, control)
        fact = self.fact(op.operands)
        if isinstance(op, ops.Extent | ops.NumTiles | ops.NumRanks):
            # A fact of the object, whichever rank's part is asked.
            fact = _Fact(None, fact.params)
        if type(op) in _UNEQUAL:
            fact = _Fact(op) | fact  # itself first: the nearest reason is the clearest
        for result in op.results:
            self.learn(result, fact)

    def branch(self, op: Op, control: _Fact) -> _Escapes:
        condition = self.fact(op.operands)
        escapes = _Escapes()
        for block in op.blocks:
            escapes.take(self.block(block, control | condition))
            end = block.terminator
            if isinstance(end, ops.Yield):
                for result, value in zip(op.results, end.operands, strict=True):
                    self.learn(result, condition | self.fact((value,)))
        return escapes

    def loop(self, op: Op, control: _Fact) -> _Escapes:
        bounds = self.fact(op.operands[:3]) if isinstance(op, ops.For) else _EQUAL
        initial = op.operands[3:] if isinstance(op, ops.For) else op.operands
        (body,) = op.blocks
        carried = body.args[1:] if isinstance(op, ops.For) else body.args
        if isinstance(op, ops.For):
            self.learn(body.args[0], bounds)
        for arg, value in zip(carried, initial, strict=True):
            self.learn(arg, self.fact((value,)))
        inside = self.quietly(body, control | bounds)
        # Who breaks or returns makes no later trip, so all of the body depends on it; and which value a
        # trip hands on depends on where it continued.
        trips = bounds | inside.breaks | inside.returns
        escapes = self.block(body, control | trips)
        for arg in carried:
            self.learn(arg, escapes.continues if escapes.continues.origin is not control.origin else _EQUAL)
        results: list[_Fact] = [trips] * len(op.results)
        for end in _ends(body):
            if isinstance(end, ops.Continue):
                for arg, value in zip(carried, end.operands, strict=True):
                    self.learn(arg, self.fact((value,)))
            else:
                results = [fact | self.fact((v,)) for fact, v in zip(results, end.operands, strict=True)]
        for k, result in enumerate(op.results):
            fact = results[k] | (self.fact((carried[k],)) if isinstance(op, ops.For) else _EQUAL)
            self.learn(result, fact)
        return _Escapes(returns=escapes.returns)

    def quietly(self, body: Block, control: _Fact) -> _Escapes:
        """Walks a body without checking, to know how it is left."""
        checking, self.checking = self.checking, False
        try:
            return self.block(body, control)
        finally:
            self.checking = checking

    def check(self, op: Op, control: _Fact) -> None:
        """Rule B4 for one mailbox operation."""
        self.steering |= control.params
        if control.origin is None:
            return
        name, verb = _name(self.kernel, op.operands[0]), _VERB[type(op)]
        raise CompileError(
            f"mailbox `{name}`: {verb} depends on {_UNEQUAL[type(control.origin)]}, which differs between ranks (rule "
            "B4): expected every rank to get here equally often, deciding by constants, scalar arguments, extents, "
            "num_ranks, num_programs and program_id alone; do it on every rank, and decide what to send or to use",
            op.loc,
            (("this is where it comes from", control.origin.loc),),
        )


def _ends(body: Block) -> list[Op]:
    """The `break` and `continue` ops of a loop, not those of loops inside it."""
    found: list[Op] = []
    for op in body.ops:
        if isinstance(op, ops.Break | ops.Continue):
            found.append(op)
        elif isinstance(op, ops.If):
            for block in op.blocks:
                found += _ends(block)
    return found
