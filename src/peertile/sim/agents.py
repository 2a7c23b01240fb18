"""Agents: whoever accesses memory. A program, the engine of a stream, a host thread, a strand of tokens.

An agent holds a clock and what fences need to know. When it runs is a `Task`'s business.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

from peertile.memory_model import Proxy, Scope
from peertile.sim.clocks import Clock, join

if TYPE_CHECKING:
    from peertile.sim.sites import Site

__all__ = ["Agent", "Denied", "Kind"]


NO_LENSES: Final[dict[Proxy, int]] = {}
"""Of most agents: shared, never written."""


class Kind(Enum):
    """What an agent is."""

    PROGRAM = "program"
    STREAM = "stream"
    HOST = "host"
    STRAND = "strand"
    TRANSFER = "transfer"
    """An asynchronous store: starts with what its program had done, joins whoever waits for it."""


class Denied:
    """An order that an agent may have hoped for and did not get: where, and why."""

    __slots__ = ("site", "why")

    def __init__(self, site: Site, why: str) -> None:
        self.site = site
        self.why = why


class Agent:
    """One agent. `clock[entry]` is its own epoch; `steps` counts the synchronising operations it has passed.

    `fenced` is what its last fence covers, for relaxed writes after it; `pending` what its relaxed reads saw, for
    a fence to come. `released` and `denied` are for reports."""

    __slots__ = (
        "clock", "denied", "entry", "fenced", "fenced_scope", "is_host", "kind", "label", "lenses", "pending",
        "program", "rank", "released", "steps",
    )  # fmt: skip

    def __init__(self, kind: Kind, rank: int, entry: int, label: str, program: int = -1) -> None:
        self.kind = kind
        self.rank = rank
        self.entry = entry
        self.label = label
        self.program = program
        self.is_host = kind is Kind.HOST
        self.clock: Clock = {entry: 1}
        self.fenced: Clock | None = None
        self.fenced_scope: Scope | None = None
        self.pending: Clock | None = None
        self.steps = 0
        self.released: tuple[int, Site | None] | None = None
        self.denied: Denied | None = None
        self.lenses: dict[Proxy, int] = NO_LENSES
        """The agent's own entry for each proxy that it has gone through."""

    def where(self) -> str:
        """The agent in words."""
        if self.program >= 0:
            return f"program {self.program} of {self.label} on rank {self.rank}"
        return f"{self.label} of rank {self.rank}"

    def launched(self) -> str:
        """Where the host launched it, "launched at file:line"; empty for who is no part of a launch."""
        return ""

    def try_again(self) -> bool:
        """Nobody can go on: whether this agent does, which only a loop that polls may."""
        return False

    def release(self, site: Site | None) -> Clock:
        """What the agent has done and knows so far; its later accesses belong to a new epoch."""
        clock = self.clock
        snapshot = dict(clock)
        epoch = clock[self.entry]
        clock[self.entry] = epoch + 1
        self.released = (epoch, site)
        return snapshot

    def acquire(self, other: Clock) -> None:
        join(self.clock, other)

    def fence(self, scope: Scope, site: Site | None) -> None:
        """Orders all before with all after: makes relaxed writes to come releases, relaxed reads before acquires."""
        if self.pending is not None:
            join(self.clock, self.pending)
            self.pending = None
        self.fenced = self.release(site)
        self.fenced_scope = scope
