"""What happened in a run, for pictures: events of agents in order, and the edges that waits made. Filled on request."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from peertile.sim.agents import Agent
from peertile.source import Loc

__all__ = ["Deed", "Event", "Trace", "Work"]


class Deed(Enum):
    """What an agent does, as timelines tell it. Of a stream: begins and ends an operation; of a host: calls the others
    and leaves them."""

    OTHER = "other"
    BEGIN = "begin"
    END = "end"
    WAIT = "wait"
    WAITED = "waited"
    RELEASE = "release"


class Work(Enum):
    """What an operation of a stream is."""

    OTHER = "other"
    LAUNCH = "launch"
    GRAPH = "graph"
    COPY = "copy"
    FILL = "fill"
    HOST = "host"
    WRITE = "write"
    WAIT = "wait"
    EVENT = "event"


@dataclass(slots=True)
class Event:
    """One event: who (`lane` is its clock entry), after how many synchronising operations of its own, and what.

    `label` names the agent at that time, `program` is its index; of a program's beginning `stream` is its stream, and
    `work` is what a stream does."""

    lane: int
    step: int
    what: str
    loc: Loc | None = None
    deed: Deed = Deed.OTHER
    label: str = ""
    program: int = -1
    stream: str = ""
    work: Work = Work.OTHER


@dataclass
class Trace:
    """Events in the order of the run; `lanes` name the agents; `edges` are pairs of event numbers."""

    events: list[Event] = field(default_factory=list)
    lanes: dict[int, tuple[int, str]] = field(default_factory=dict)
    edges: list[tuple[int, int]] = field(default_factory=list)

    def add(
        self, agent: Agent, what: str, loc: Loc | None = None, after: int = -1, deed: Deed = Deed.OTHER,
        stream: str = "", work: Work = Work.OTHER,
    ) -> int:  # fmt: skip
        """Appends an event; `after` is the event that it is ordered after by a wait. Its number."""
        if agent.entry not in self.lanes:
            self.lanes[agent.entry] = (agent.rank, agent.where())
        number = len(self.events)
        self.events.append(Event(agent.entry, agent.steps, what, loc, deed, agent.label, agent.program, stream, work))
        if after >= 0:
            self.edges.append((after, number))
        return number
