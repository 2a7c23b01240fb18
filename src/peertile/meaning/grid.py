"""Runs a whole grid, on one rank or several, under a schedule: the evaluator as tests use it.

It executes expanded IR on plain numbers (`NumpyMemory`) and reports faults as values. It is not the
checker: no races, no stale values, no streams.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import prod
from typing import Any

import numpy as np

from peertile.dtypes import u64
from peertile.errors import ArgumentError, LaunchError
from peertile.ir.core import Kernel
from peertile.ir.types import (
    Access,
    ObjectType,
    PointerType,
    Space,
    SymmetricType,
    TileType,
    Type,
    ViewType,
)
from peertile.meaning.faults import Fault, FaultKind, ProgramFault
from peertile.meaning.memory import Memory, NumpyMemory, ObjectRef, SymmetricRef, ViewRef
from peertile.meaning.numbers import Array
from peertile.meaning.program import Event, EventKind, Program, run_program

__all__ = ["Outcome", "PerRank", "Printed", "Schedule", "run_grid"]

LAUNCH_WORDS = ViewType(u64, 1, Access.READ_WRITE, Space.DEVICE)


class Schedule(Enum):
    """Who goes next among those who can."""

    ROUND_ROBIN = "round_robin"
    RANDOM = "random"
    SKEWED = "skewed"
    """By random priorities that change now and then: some programs run far ahead, others stall."""


class PerRank(tuple[Any, ...]):
    """An argument with one value per rank: `PerRank([x0, x1])`."""


@dataclass(frozen=True, slots=True)
class Printed:
    """One line that a kernel printed."""

    rank: int
    program: int
    prefix: str
    values: tuple[Array, ...]


@dataclass(slots=True)
class Outcome:
    """What a run left beside the memory it wrote."""

    faults: list[Fault] = field(default_factory=list)
    printed: list[Printed] = field(default_factory=list)
    steps: int = 0
    """Events that were passed."""


def run_grid(
    kernel: Kernel,
    grid: int | Sequence[int],
    args: Sequence[Any],
    *,
    ranks: int = 1,
    schedule: Schedule = Schedule.ROUND_ROBIN,
    seed: int = 0,
    max_steps: int = 1_000_000,
    memory: Memory | None = None,
) -> Outcome:
    """Runs every program of `kernel` on every rank; arrays among `args` are written in place.

    An argument is a number for a scalar, an array (any strides) for a view or a pointer, a `PerRank` of
    arrays for a symmetric object, a mapping from field to these for a communication object (see
    `meaning.objects`), or a `PerRank` of any of them. After the first fault, programs leave at their
    next wait. A run longer than `max_steps` events ends with a fault for every unfinished wait.
    """
    n0, n1, n2 = (*((grid,) if isinstance(grid, int) else tuple(grid)), 1, 1)[:3]
    extents = (n0, n1, n2)
    memory = NumpyMemory() if memory is None else memory
    if len(args) != len(kernel.params):
        raise ArgumentError(f"args: expected {len(kernel.params)} for {kernel.name}, got {len(args)}")
    agents = []
    for rank in range(ranks):
        bound = [
            _bind(value.type, arg, name, rank, ranks, memory)
            for name, value, arg in zip(kernel.param_names, kernel.params, args, strict=True)
        ]
        check_launch(kernel, bound)
        words = ViewRef(LAUNCH_WORDS, np.zeros(8, np.uint64), "launch words", rank)
        for index in range(prod(extents)):
            program = Program(kernel, memory, index, extents, rank, words)
            agents.append(_Agent(program, run_program(program, bound)))
    with np.errstate(all="ignore"):
        return _Scheduler(agents, schedule, seed, max_steps).run()


def check_launch(kernel: Kernel, bound: Sequence[Any]) -> None:
    """Evaluates the facts that the bounds pass left to the launch; LaunchError for one that fails."""
    by_name = dict(zip(kernel.param_names, bound, strict=True))
    for check in kernel.facts.get("launch_checks", ()):
        lhs = _tiles(by_name[check.lhs], check.lhs_axis, check.lhs_size)
        rhs = _tiles(by_name[check.rhs], check.rhs_axis, check.rhs_size)
        if lhs > rhs:
            raise LaunchError(f"{check.description}: got {lhs} and {rhs} tiles")
    for whole in kernel.facts.get("whole_tiles", ()):
        extent = by_name[whole.name].fields["data"].views[0].extents[whole.axis]
        if extent % whole.size or (whole.some and not extent):
            raise LaunchError(
                f"{whole.name}: expected whole tiles of {whole.size} along axis {whole.axis}, got {extent}"
            )


def _tiles(x: ViewRef | SymmetricRef, axis: int, size: int) -> int:
    extents = x.extents if isinstance(x, ViewRef) else x.views[x.rank].extents
    return -(-extents[axis] // size)


# ---------------------------------------------------------------- arguments


def _bind(t: Type, arg: Any, name: str, rank: int, ranks: int, memory: Memory) -> Any:
    """The run-time value of a parameter on `rank`."""
    if isinstance(t, SymmetricType):
        arrays = arg if isinstance(arg, PerRank) else (arg,)
        if len(arrays) != ranks:
            raise ArgumentError(f"{name}: expected one array for each of {ranks} ranks, got {len(arrays)}")
        return SymmetricRef(t, tuple(_view(t.view, a, name, r) for r, a in enumerate(arrays)), rank)
    if isinstance(t, ObjectType):
        if not isinstance(arg, Mapping):
            raise ArgumentError(f"{name}: expected a mapping from field to arrays for {t}, got {type(arg).__name__}")
        return ObjectRef(t, {f: _bind(ft, arg[f], f"{name}.{f}", rank, ranks, memory) for f, ft in t.fields.items()})
    own = arg[rank] if isinstance(arg, PerRank) else arg
    if isinstance(t, ViewType):
        return _view(t, own, name, rank)
    if isinstance(t, PointerType):
        return np.int64(memory.address(own, t))
    assert isinstance(t, TileType)
    return np.asarray(own).astype(t.dtype.numpy)[()]


def _view(t: ViewType, array: Any, name: str, rank: int) -> ViewRef:
    if not isinstance(array, np.ndarray) or array.dtype != t.dtype.numpy or array.ndim != t.rank:
        got = f"{array.dtype} of rank {array.ndim}" if isinstance(array, np.ndarray) else type(array).__name__
        raise ArgumentError(f"{name}: expected an array of {t.dtype} of rank {t.rank}, got {got}")
    return ViewRef(t, array, name, rank)


# ---------------------------------------------------------------- scheduling


@dataclass(slots=True, eq=False)
class _Agent:
    program: Program
    events: Iterator[Event]
    event: Event | None = None
    done: bool = False
    priority: float = 0.0

    @property
    def ready(self) -> bool:
        return not self.done and (self.event is None or self.event.ready)


class _Scheduler:
    def __init__(self, agents: list[_Agent], schedule: Schedule, seed: int, max_steps: int) -> None:
        self.agents = agents
        self.schedule = schedule
        self.random = random.Random(seed)
        self.max_steps = max_steps
        self.outcome = Outcome()

    def run(self) -> Outcome:
        outcome = self.outcome
        while True:
            ready = [a for a in self.agents if a.ready]
            if not ready:
                break
            if outcome.steps >= self.max_steps:
                break
            self.advance(self.choose(ready))
        kind = FaultKind.DEADLOCK if outcome.steps < self.max_steps else FaultKind.STEP_LIMIT
        for agent in self.agents:
            if not agent.done:
                outcome.faults.append(_unfinished(agent, kind))
        for agent in self.agents:
            p = agent.program
            outcome.printed += [Printed(p.rank, p.index, prefix, values) for prefix, values in p.printed]
        return outcome

    def choose(self, ready: list[_Agent]) -> _Agent:
        if self.schedule is Schedule.ROUND_ROBIN:
            # By position: it walks on even as the list of ready agents changes.
            return ready[self.outcome.steps % len(ready)]
        if self.schedule is Schedule.RANDOM:
            return self.random.choice(ready)
        if self.outcome.steps == 0 or self.random.random() < 1 / 16:
            for agent in self.agents:
                agent.priority = self.random.random()
        return max(ready, key=lambda agent: agent.priority)

    def advance(self, agent: _Agent) -> None:
        """Lets `agent` run to its next event."""
        self.outcome.steps += 1
        try:
            agent.event = next(agent.events)
            # As on a device: after a fault nobody waits any longer.
            if self.outcome.faults and agent.event.kind in (EventKind.WAIT, EventKind.SUSPEND):
                agent.done = True
        except StopIteration:
            agent.done = True
        except ProgramFault as e:
            agent.done = True
            p = agent.program
            self.outcome.faults.append(Fault(e.kind, e.message, p.rank, p.index, e.op.loc, e.got, e.limit))
            for other in self.agents:
                if other.event is not None and other.event.kind in (EventKind.WAIT, EventKind.SUSPEND):
                    other.done = True


def _unfinished(agent: _Agent, kind: FaultKind) -> Fault:
    """The fault of an agent that a deadlock or the step limit caught."""
    p, event = agent.program, agent.event
    if event is None or event.view is None:
        where = event.op.NAME if event is not None else "its start"
        return Fault(kind, f"did not end: stopped at {where}", p.rank, p.index, event.op.loc if event else None)
    seen = int(p.memory.peek(event.view, event.index))
    name = event.op.attrs["what"] or event.view.name
    index = ", ".join(map(str, event.index))
    return Fault(
        kind,
        f"waits for {name}[{index}] {event.op.attrs['cmp'].value} {int(event.expected)}, last saw {seen}",
        p.rank, p.index, event.op.loc, seen, int(event.expected), event.index[0] if event.index else None,
    )  # fmt: skip
