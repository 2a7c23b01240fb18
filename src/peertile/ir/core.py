"""Data structures of tile IR: values, ops, blocks, kernels, and the builder. No op is defined here.

SSA with structured control flow: an op owns blocks, a block ends in one terminator, and a value is
visible in the blocks nested below its definition. `break`, `continue` and `return` are terminators
that may end any block inside a loop, so an `if` arm need not yield.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Self

from peertile.errors import VerifyError
from peertile.ir.types import Type
from peertile.source import Loc

__all__ = ["Attr", "Block", "Builder", "Effect", "Kernel", "Op", "Value", "walk"]

# Attribute values: int, float, bool, str, None, Enum, DType, or tuples of them.
Attr = Any


class Effect(Enum):
    """What an op does beside its results. An op may have several."""

    READ = "read"
    WRITE = "write"
    WAIT = "wait"
    """May suspend the program until another agent acts."""
    FENCE = "fence"
    """Orders memory around it (notify, fence, barrier)."""
    CONTROL = "control"
    """Transfers control, or may leave the kernel."""
    OUTPUT = "output"
    """Visible to a person."""


class Value:
    """The result of an op or an argument of a block. Identity is the name; `hint` is for printing."""

    __slots__ = ("hint", "index", "owner", "type")

    def __init__(self, type: Type, owner: Op | Block, index: int, hint: str = "") -> None:
        self.type = type
        self.owner = owner
        self.index = index
        self.hint = hint

    @property
    def op(self) -> Op | None:
        """The op that made this value; None for a block argument."""
        return self.owner if isinstance(self.owner, Op) else None

    def __repr__(self) -> str:
        return f"<Value %{self.hint or self.index}: {self.type}>"


class Op:
    """Base of every op. Subclasses declare NAME, OPERANDS, RESULTS, ATTRS, EFFECTS, N_BLOCKS and a verify rule.

    Results are typed by the constructor (`result_types`), never inferred later, so that text and
    passes need no inference.
    """

    NAME: ClassVar[str] = ""
    ATTRS: ClassVar[dict[str, Any]] = {}
    """Attribute names, each with its default; `...` means required."""
    OPERANDS: ClassVar[tuple[int, int | None]] = (0, 0)
    """Fewest and most operands; None: no bound. The verifier checks it before `verify`."""
    RESULTS: ClassVar[tuple[int, int | None]] = (0, 0)
    """Fewest and most results."""
    EFFECTS: ClassVar[frozenset[Effect]] = frozenset()
    N_BLOCKS: ClassVar[int] = 0
    TERMINATOR: ClassVar[bool] = False

    __slots__ = ("attrs", "blocks", "loc", "operands", "parent", "results")

    def __init__(
        self,
        operands: Sequence[Value] = (),
        result_types: Sequence[Type] = (),
        attrs: dict[str, Attr] | None = None,
        blocks: Sequence[Block] = (),
        loc: Loc | None = None,
    ) -> None:
        self.operands = list(operands)
        self.attrs: dict[str, Attr] = {**{k: v for k, v in self.ATTRS.items() if v is not ...}, **(attrs or {})}
        self.blocks = list(blocks)
        self.results = [Value(t, self, i) for i, t in enumerate(result_types)]
        self.loc = loc
        self.parent: Block | None = None
        for block in self.blocks:
            block.parent = self

    def __getattr__(self, name: str) -> Any:
        # Only reached for names that are no slot: attributes of the op read like fields.
        if not name.startswith("_"):
            try:
                return self.attrs[name]
            except KeyError:
                pass
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    @property
    def result(self) -> Value:
        (value,) = self.results
        return value

    @property
    def effects(self) -> frozenset[Effect]:
        """Own effects and those of nested ops."""
        if not self.blocks:
            return self.EFFECTS
        found = set(self.EFFECTS)
        for block in self.blocks:
            for op in block.ops:
                found |= op.effects
        return frozenset(found)

    def verify(self) -> None:
        """Raise through `fail` if a rule of this op is broken. Operand dominance is checked elsewhere."""

    def fail(self, message: str) -> None:
        raise VerifyError(f"{self.NAME}: {message}", self.loc)

    def require(self, condition: bool, message: str) -> None:
        if not condition:
            self.fail(message)

    def __repr__(self) -> str:
        return f"<{self.NAME} {self.attrs}>"


class Block:
    """A list of ops ending in a terminator, with typed arguments."""

    __slots__ = ("args", "ops", "parent")

    def __init__(self, arg_types: Sequence[Type] = (), hints: Sequence[str] = ()) -> None:
        names = [*hints, *[""] * (len(arg_types) - len(hints))]
        self.args = [Value(t, self, i, names[i]) for i, t in enumerate(arg_types)]
        self.ops: list[Op] = []
        self.parent: Op | None = None

    @property
    def terminator(self) -> Op | None:
        return self.ops[-1] if self.ops and self.ops[-1].TERMINATOR else None

    def append(self, op: Op) -> Op:
        op.parent = self
        self.ops.append(op)
        return op


@dataclass
class Kernel:
    """A kernel: a name, typed parameters and a body block whose arguments are the parameters.

    `facts` holds what passes found out (counts of proven and residual bounds checks, for instance);
    it is not part of the meaning and not in the text form.
    """

    name: str
    param_names: tuple[str, ...]
    body: Block
    unsafe: bool = False
    grid_rank: int = 1
    loc: Loc | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def params(self) -> list[Value]:
        return self.body.args

    @property
    def waits(self) -> bool:
        """Whether a program may have to wait for another agent."""
        return any(Effect.WAIT in op.effects for op in self.body.ops)


def walk(block: Block) -> Iterator[Op]:
    """Every op of `block` and of the blocks nested in it, outer before inner."""
    for op in list(block.ops):
        yield op
        for inner in op.blocks:
            yield from walk(inner)


class Builder:
    """Appends ops at a point of a block; `loc` is given to every op that has none.

    `insert` before `anchor` where set, else at the end of `block`.
    """

    def __init__(self, block: Block, loc: Loc | None = None, anchor: Op | None = None) -> None:
        self.block = block
        self.loc = loc
        self.anchor = anchor

    def add(self, op: Op) -> Op:
        if op.loc is None:
            op.loc = self.loc
        if self.anchor is None:
            return self.block.append(op)
        op.parent = self.block
        self.block.ops.insert(self.block.ops.index(self.anchor), op)
        return op

    def emit(
        self,
        cls: type[Op],
        operands: Sequence[Value] = (),
        result_types: Sequence[Type] = (),
        blocks: Sequence[Block] = (),
        **attrs: Attr,
    ) -> Op:
        return self.add(cls(operands, result_types, attrs, blocks, self.loc))

    def value(self, cls: type[Op], operands: Sequence[Value], result_type: Type, **attrs: Attr) -> Value:
        """Append an op with one result and return it."""
        return self.emit(cls, operands, (result_type,), **attrs).result

    @contextmanager
    def at(self, block: Block) -> Iterator[Self]:
        """Append to the end of `block` inside the context."""
        saved = self.block, self.anchor
        self.block, self.anchor = block, None
        try:
            yield self
        finally:
            self.block, self.anchor = saved
