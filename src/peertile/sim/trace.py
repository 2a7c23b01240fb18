"""What happened in a run, for pictures: events of agents in order, and the edges that waits made. Filled on request."""

from __future__ import annotations

from dataclasses import dataclass, field

from peertile.sim.agents import Agent
from peertile.source import Loc

__all__ = ["Event", "Trace"]


@dataclass(slots=True)
class Event:
    """One event: who (`lane` is its clock entry), after how many synchronising operations of its own, and what."""

    lane: int
    step: int
    what: str
    loc: Loc | None = None


@dataclass
class Trace:
    """Events in the order of the run; `lanes` name the agents; `edges` are pairs of event numbers."""

    events: list[Event] = field(default_factory=list)
    lanes: dict[int, tuple[int, str]] = field(default_factory=dict)
    edges: list[tuple[int, int]] = field(default_factory=list)

    def add(self, agent: Agent, what: str, loc: Loc | None = None, after: int = -1) -> int:
        """Appends an event; `after` is the event that it is ordered after by a wait. Its number."""
        if agent.entry not in self.lanes:
            self.lanes[agent.entry] = (agent.rank, agent.where())
        number = len(self.events)
        self.events.append(Event(agent.entry, agent.steps, what, loc))
        if after >= 0:
            self.edges.append((after, number))
        return number
