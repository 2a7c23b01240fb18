"""One program instance: the interpreter of tile IR. It knows blocks and values; what an op means is
registered in `meaning.registry`, when it runs is decided by a scheduler, memory is a `Memory`.

A program is a generator. It yields an `Event` before every operation at which another agent may act
first (ordered accesses, waits, fences, suspension) and performs the operation when it is resumed, so
a scheduler that picks the next program at each event produces every interleaving that matters.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import prod
from typing import Any, NamedTuple

from peertile.errors import InternalError
from peertile.ir import ops
from peertile.ir.core import Block, Kernel, Op, Value
from peertile.meaning.memory import Memory, ViewRef
from peertile.meaning.numbers import satisfies
from peertile.meaning.registry import MEANINGS

__all__ = ["End", "Event", "EventKind", "Program", "Steps", "run_program"]


class EventKind(Enum):
    """Why a program stopped."""

    ACCESS = "access"
    """An access with an order comes next."""
    FENCE = "fence"
    WAIT = "wait"
    """Not to be resumed before `ready`."""
    SUSPEND = "suspend"
    """At the back edge of a loop that polls."""


@dataclass(frozen=True, slots=True, eq=False)
class Event:
    """A point at which another agent may act; `view`, `index`, `expected` describe a wait's word."""

    kind: EventKind
    program: Program
    op: Op
    view: ViewRef | None = None
    index: tuple[int, ...] = ()
    expected: Any = None
    others: tuple[Event, ...] = ()
    """Further words of a wait that ends when any of them is satisfied."""

    @property
    def ready(self) -> bool:
        """Whether resuming can make progress."""
        if any(other.ready for other in self.others):
            return True
        if self.kind is not EventKind.WAIT or self.view is None:
            return True
        seen = self.program.memory.peek(self.view, self.index)
        return satisfies(self.op.attrs["cmp"], seen, self.expected, self.view.type.dtype)


class End(NamedTuple):
    """How a block ended: its terminator and the terminator's operands."""

    op: Op
    values: tuple[Any, ...]


Steps = Generator[Event, None, Any]


@dataclass(slots=True, eq=False)
class Program:
    """The state of one program instance."""

    kernel: Kernel
    memory: Memory
    index: int
    """Linear program index; axis 0 of the grid changes fastest."""
    grid: tuple[int, int, int]
    rank: int
    launch_words: ViewRef
    printed: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    env: dict[Value, Any] = field(default_factory=dict)

    @property
    def ids(self) -> tuple[int, int, int]:
        n0, n1, _ = self.grid
        return self.index % n0, self.index // n0 % n1, self.index // (n0 * n1)

    @property
    def num_programs(self) -> int:
        return prod(self.grid)

    def run(self, block: Block, args: Sequence[Any]) -> Generator[Event, None, End]:
        """Runs `block` to its terminator, or to the end of an outer block that something inside left."""
        env = self.env
        env.update(zip(block.args, args, strict=True))
        for op in block.ops:
            meaning = MEANINGS.get(type(op))
            if meaning is None:
                raise InternalError(f"{op.NAME} has no meaning of its own: expand protocols first")
            result = meaning.fn(self, op, *[env[v] for v in op.operands])
            if meaning.steps:
                result = yield from result
            if type(result) is End:
                return result
            if len(op.results) == 1:
                env[op.results[0]] = result
            elif op.results:
                env.update(zip(op.results, result, strict=True))
        raise InternalError(f"a block of {self.kernel.name} has no terminator")


def run_program(program: Program, args: Sequence[Any]) -> Iterator[Event]:
    """The events of `program` called with `args` (one value per parameter), to its end.

    Raises `ProgramFault` where a check fails. Whoever resumes it does so under
    `np.errstate(all="ignore")`: overflow and NaN are values here.
    """
    end = yield from program.run(program.kernel.body, args)
    if not isinstance(end.op, ops.Return):
        raise InternalError(f"{program.kernel.name} ended with {end.op.NAME}")
