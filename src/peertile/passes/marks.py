"""Puts marks into a kernel, so that a timeline shows what its programs do: where they begin and end, wait, and are
about to release a word. Changes nothing else, and is no part of the usual pipeline: kernels are compiled with it only
while a timeline is recorded.

Runs last, on primitives: what a signal, a barrier or a mailbox is made of is told by its words. The kernel gets two
more parameters behind its own: the address of the buffer of marks, and the number of the launch.
"""

from __future__ import annotations

from typing import Final

from peertile.dtypes import i64
from peertile.ir import ops
from peertile.ir.core import Block, Builder, Kernel, Op, Value, walk
from peertile.ir.ops import Compare, Moment
from peertile.ir.types import INDEX, PointerType, TileType, ViewType
from peertile.memory_model import Scope
from peertile.passes.rewrite import Scalars

__all__ = ["MARK_PARAMS", "mark_moments"]

MARK_PARAMS: Final = ("timeline_buffer", "timeline_number")
_LOADS: Final = (ops.PtrLoad, ops.WordLoad)
_Word = tuple[Value, Value, list[Value]]


def mark_moments(kernel: Kernel) -> Kernel:
    """Adds the marks, in place; returns `kernel`."""
    _Marks(kernel).put()
    return kernel


class _Marks:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.names = dict(zip(kernel.params, kernel.param_names, strict=True))
        body, first = kernel.body, len(kernel.body.args)
        added = []
        for k, name in enumerate(MARK_PARAMS):
            while name in kernel.param_names:
                name += "_"
            added.append(name)
            body.args.append(Value(INDEX, body, first + k, name))
        kernel.param_names = (*kernel.param_names, *added)
        self.head = tuple(body.args[first:])

    def put(self) -> None:
        body = self.kernel.body
        for op in list(walk(body)):
            if isinstance(op, ops.Return):
                self.before(op, Moment.END)
            elif isinstance(op, ops.Wait):
                word = (op.operands[0], op.operands[1], op.operands[2:])
                self.before(op, Moment.WAIT, op.attrs["what"], word)
                self.behind(op, op.attrs["what"], word)
            elif isinstance(op, ops.WaitAny):
                self.before(op, Moment.WAIT, op.attrs["what"])
                self.behind_any(op)
            elif isinstance(op, ops.WaitTransfer):
                self.before(op, Moment.WAIT, "a transfer")
                self.behind(op, "a transfer")
            elif isinstance(op, ops.AsyncStore):
                self.before(op, Moment.COPY, self.name(op.operands[0]))
            elif isinstance(op, ops.Suspend):
                self.polls(op)
            else:
                released = _released(op)
                if released is not None:
                    self.before(op, Moment.NOTIFY, self.name(released[0]), released)
        self.mark(Builder(body, self.kernel.loc, body.ops[0] if body.ops else None), Moment.BEGIN)
        if body.terminator is None:
            self.mark(Builder(body, self.kernel.loc), Moment.END)

    def polls(self, op: Op) -> None:
        """A loop that polls: `op` stands in front of it, or at its back edges."""
        block = op.parent
        assert block is not None
        if op.attrs["continues"]:
            return
        loop = block.ops[block.ops.index(op) + 1]
        inside = list(walk(loop.blocks[0]))
        word: _Word | None = None
        for load in inside:
            if isinstance(load, _LOADS) and load.attrs["order"].acquires:
                at = load.operands[:1] if isinstance(load, ops.PtrLoad) else load.operands
                if _is_word(at[0]) and not any(v.op in inside or _is_argument(v, loop) for v in at):
                    zero = Builder(block, op.loc, op).value(ops.Const, (), INDEX, value=0)
                    word = (at[0], zero, list(at[1:]))
                    break
        what = "a loop that polls" if word is None else self.name(word[0])
        self.before(op, Moment.WAIT, what, word)
        self.behind(loop, what, word)

    def before(self, op: Op, moment: Moment, what: str = "", word: _Word | None = None) -> None:
        assert op.parent is not None
        self.mark(Builder(op.parent, op.loc, op), moment, what, word)

    def behind(self, op: Op, what: str, word: _Word | None = None) -> None:
        self.mark(_behind(op), Moment.WAITED, what, word)

    def behind_any(self, op: ops.WaitAny) -> None:
        s = Scalars(_behind(op))
        for k, word in enumerate(op.words()):

            def mark(word: _Word = word) -> None:
                self.mark(s.b, Moment.WAITED, op.attrs["what"], word)

            s.when(s.compare(Compare.EQ, op.result, k), mark)

    def mark(self, b: Builder, moment: Moment, what: str = "", word: _Word | None = None) -> None:
        operands = list(self.head)
        if word is not None:
            operands += [word[0], _as_index(b, word[1]), *word[2]]
        b.emit(ops.Mark, operands, moment=moment, what=what)

    def name(self, word: Value) -> str:
        """The parameter that a word belongs to, in the user's words."""
        value = word
        while value not in self.names and value.op is not None and value.op.operands:
            value = value.op.operands[0]
        return self.names.get(value, value.hint) or "a word"


def _behind(op: Op) -> Builder:
    block = op.parent
    assert block is not None
    at = block.ops.index(op) + 1
    return Builder(block, op.loc, block.ops[at] if at < len(block.ops) else None)


def _is_argument(value: Value, loop: Op) -> bool:
    """Whether it changes from trip to trip: an argument of the loop's own block, or of one inside."""
    owner = value.owner
    while isinstance(owner, Block):
        if owner.parent is loop:
            return True
        owner = owner.parent.parent if owner.parent is not None else None  # type: ignore[assignment]
    return False


def _is_word(value: Value) -> bool:
    t = value.type
    return isinstance(t, ViewType) or (isinstance(t, PointerType) and not t.shape)


def _released(op: Op) -> _Word | None:
    """The word that an op releases to others, and the value that it gets, or that is added."""
    if not isinstance(op, ops.WordStore | ops.WordRmw | ops.PtrStore | ops.PtrRmw | ops.PtrCas):
        return None
    if not op.attrs["order"].releases or op.attrs["scope"] is Scope.PROGRAM or not _is_word(op.operands[0]):
        return None
    value = op.operands[2 if isinstance(op, ops.PtrCas) else 1]
    return op.operands[0], value, op.operands[2:] if isinstance(op, ops.WordStore | ops.WordRmw) else []


def _as_index(b: Builder, value: Value) -> Value:
    """A word's value as a number of 64 bits; 0 for what is no integer."""
    t = value.type
    if not isinstance(t, TileType) or not t.dtype.is_int or t.shape:
        return b.value(ops.Const, (), INDEX, value=0)
    if t.dtype is i64:
        return value
    return b.value(ops.Bitcast if t.dtype.bits == 64 else ops.Cast, (value,), INDEX)
