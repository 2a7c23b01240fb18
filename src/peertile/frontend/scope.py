"""The state of one compilation: builder, functions being inlined, environments, regions. No op is emitted
here beyond what the builder is told; no syntax is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final, NoReturn

from peertile.errors import CompileError
from peertile.frontend.values import Abstract
from peertile.ir.core import Block, Builder, Op, Value
from peertile.source import Loc

if TYPE_CHECKING:
    import ast

    from peertile.frontend.parse import ParsedFunction

__all__ = [
    "MAX_EXPRESSION_DEPTH",
    "TOO_DEEP",
    "Binding",
    "Build",
    "Env",
    "Exit",
    "Flow",
    "Function",
    "NeedsLoop",
    "NeedsTrips",
    "Region",
    "RegionKind",
]


MAX_EXPRESSION_DEPTH: Final = 200
"""Three frames of Python each, of the thousand that there are."""
TOO_DEEP: Final = (
    f"expression nests too deeply: expected at most {MAX_EXPRESSION_DEPTH} operations in one expression, each on the "
    "result of the one before, got more; name parts of it"
)


class Flow(Enum):
    """How a list of statements ends."""

    NEXT = "next"
    """Control goes on."""
    ENDED = "ended"
    """The block has its terminator; nothing after is reachable."""
    STATIC_BREAK = "static_break"
    STATIC_CONTINUE = "static_continue"
    """Out of, or to the next trip of, the innermost unrolled loop."""
    RETURNED = "returned"
    """A helper returned in the block it was entered in."""


@dataclass(frozen=True, slots=True)
class Binding:
    """What a variable is, and where it was bound."""

    value: Abstract
    loc: Loc | None


Env = dict[str, Binding]


@dataclass(slots=True)
class Exit:
    """A path out of a region: its environment and its terminator, whose operands are filled in later."""

    env: Env
    op: Op


class RegionKind(Enum):
    """What encloses a statement, inside its function."""

    LOOP = "loop"
    COLLECT = "collect"
    UNROLLED = "unrolled"
    TRIP = "trip"
    """A trip of an unrolled loop that run-time conditions may leave: a loop of the IR that runs once."""
    ROUND = "round"
    HELPER = "helper"
    """The one-trip loop that a helper with early returns is wrapped in."""


@dataclass(slots=True)
class Region:
    """A loop, a round, or a helper's one-trip loop. `block` is the block it was entered in."""

    kind: RegionKind
    block: Block
    box: str = ""
    breaks: list[Exit] = field(default_factory=list)
    continues: list[Exit] = field(default_factory=list)


class NeedsTrips(Exception):
    """An unrolled loop is left under a run-time condition: compile it again, each trip inside a one-trip loop."""

    def __init__(self, region: Region) -> None:
        self.region = region
        super().__init__()


class NeedsLoop(Exception):
    """A helper returned from inside control flow: compile it again inside a one-trip loop."""

    def __init__(self, function: Function) -> None:
        self.function = function
        super().__init__()


@dataclass(slots=True)
class Function:
    """A function being compiled: the kernel, or a helper inlined into it."""

    fn: FunctionType
    parsed: ParsedFunction
    env: Env
    assigned: dict[str, int]
    entry: Block
    inlined_at: Loc | None = None
    is_kernel: bool = False
    wrapped: bool = False
    regions: list[Region] = field(default_factory=list)
    returned: Abstract | None = None
    depth: int = 0
    """Expressions that are being evaluated, each inside the one before."""

    @property
    def name(self) -> str:
        return self.fn.__name__


class Build:
    """One kernel being built. `evaluate` and `inline` are set by `build.py`, so that the modules of the
    frontend form no import cycle: calls need statements (helpers) and statements need calls."""

    def __init__(
        self, body: Block, *, name: str, unsafe: bool, grid_rank: int, groups: Mapping[str, int] | None = None
    ) -> None:
        self.name = name
        self.unsafe = unsafe
        self.grid_rank = grid_rank
        self.groups = groups
        self.builder = Builder(body)
        self.blocks: list[Block] = [body]
        self.functions: list[Function] = []
        self.params: dict[str, Abstract] = {}
        self.proven_ranks: set[Value] = set()
        """Values that are a rank by construction; a `check` is left out for them."""
        self.captures: dict[str, Any] = {}
        self.notes: dict[str, None] = {}
        self.needs_loop: set[tuple[object, Loc | None]] = set()
        """Calls, by code and place, whose helper returns from inside control flow. Remembered, since a call
        is compiled again with whatever is around it, and trying both ways each time would double per level."""
        self.returning: dict[ast.AST, bool] = {}
        """Whether a loop's body contains a `return`, by its node."""
        self.adaptations = 0
        """How often a weak tile took the dtype of what it met; see `merge.Carried`."""
        self.run_block: Callable[[Build, list[ast.stmt]], Flow]
        self.inline: Callable[[Build, FunctionType, list[Abstract], dict[str, Abstract]], Abstract]

    @property
    def function(self) -> Function:
        return self.functions[-1]

    @property
    def env(self) -> Env:
        return self.function.env

    @env.setter
    def env(self, env: Env) -> None:
        self.function.env = env

    @property
    def here(self) -> Loc | None:
        return self.builder.loc

    def loc(self, node: ast.AST) -> Loc:
        return self.function.parsed.loc(node, self.function.inlined_at)

    def fail(
        self, message: str, at: ast.AST | Loc | None = None, notes: tuple[tuple[str, Loc | None], ...] = ()
    ) -> NoReturn:
        """Raise a CompileError at a node, a place, or the place being compiled."""
        loc = at if isinstance(at, Loc) else self.loc(at) if at is not None else self.here
        raise CompileError(message, loc, notes)

    @contextmanager
    def locate(self, node: ast.AST) -> Iterator[None]:
        """Ops emitted inside get the place of `node`."""
        saved = self.builder.loc
        self.builder.loc = self.loc(node)
        try:
            yield
        finally:
            self.builder.loc = saved

    @contextmanager
    def nested(self, node: ast.AST) -> Iterator[None]:
        """One level of an expression; a depth that Python's own stack may not hold is refused."""
        function = self.function
        function.depth += 1
        try:
            if function.depth > MAX_EXPRESSION_DEPTH:
                self.fail(TOO_DEEP, node)
            yield
        finally:
            function.depth -= 1

    @contextmanager
    def inside(self, block: Block) -> Iterator[None]:
        """Append to `block`, which will be nested in the current one."""
        self.blocks.append(block)
        try:
            with self.builder.at(block):
                yield
        finally:
            self.blocks.pop()

    @contextmanager
    def before(self, op: Op) -> Iterator[None]:
        """Insert in front of `op`, wherever it is."""
        builder = self.builder
        saved = builder.block, builder.anchor, builder.loc
        assert op.parent is not None
        builder.block, builder.anchor, builder.loc = op.parent, op, op.loc
        try:
            yield
        finally:
            builder.block, builder.anchor, builder.loc = saved

    def visible(self, value: Value) -> bool:
        """Whether `value` is defined in the current block or around it."""
        owner = value.owner
        block = owner.parent if isinstance(owner, Op) else owner
        return any(block is b for b in self.blocks)

    def bind(self, name: str, value: Abstract, loc: Loc | None = None) -> None:
        self.env[name] = Binding(value, loc or self.here)
