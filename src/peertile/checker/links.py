"""The group of simulated ranks: the real coordinator, reached by host threads that the machine parks.

Collective calls are edges between hosts. Nothing here times out: a call that can never end is a deadlock.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence

from peertile.comm.control import ControlBlock, Segment
from peertile.comm.coordinator import RECOVER, Arrive, Coordinator, Leave, Reply, Request
from peertile.sim.clocks import Clock, join
from peertile.sim.hosts import Call, Host
from peertile.sim.machine import Machine, Task
from peertile.sim.trace import Deed
from peertile.sim.verdicts import Waiter

__all__ = ["SimHub", "SimLink"]


class SimHub:
    """The coordinator of the ranks of one machine."""

    def __init__(self, machine: Machine, ranks: int) -> None:
        self.machine = machine
        self.segment = Segment.create(ranks, shared=False)
        self.pids = (os.getpid(),) * ranks
        self.coordinator = Coordinator(self.pids, self.segment, self._deliver, os.close)
        self._replies: dict[tuple[int, int], Reply] = {}
        self._waiters: dict[tuple[int, int], list[Task]] = {}
        self._clocks: dict[tuple[int, int, int], Clock] = {}
        self._arrived: dict[tuple[int, int, int], dict[int, str]] = {}
        self.last: dict[int, str] = {}
        """The last collective call of each rank, and where it was made."""
        self.left: set[int] = set()
        """Ranks whose program has ended."""

    def _deliver(self, rank: int, reply: Reply, fds: tuple[int, ...]) -> None:
        self._replies[rank, reply.ticket] = reply
        self.machine.wake_all(self._waiters.get((rank, reply.ticket), []))

    def call(self, host: Host, rank: int, request: Arrive) -> Reply:
        """Arrives for `rank`, and parks its host until the reply."""
        host.step(Call.MEETS)
        # Ranks come to a recovery from different calls.
        number = -1 if request.call == RECOVER else request.sequence
        meeting = (request.group, request.generation, number)
        known = self._clocks.setdefault(meeting, {})
        join(known, host.release(None))
        arrived = self._arrived.setdefault(meeting, {})
        arrived[rank] = request.call
        place = self.machine.where() if self.machine.where is not None else ""
        of = f" of {self.coordinator.name_of(request.group)}" if request.group else ""
        self.last[rank] = f"{request.call}{of}{place and f', at {place}'}"
        if self.machine.trace is not None:
            self.machine.trace.add(host, f"calls {request.call}", deed=Deed.WAIT)
        self.coordinator.handle(rank, request, (), 0.0)
        key = (rank, request.ticket)
        if key not in self._replies:

            def reason() -> Waiter:
                there = ", ".join(str(r) for r in sorted(arrived))
                return Waiter(host.where(), f"the other ranks in {request.call}{of}; arrived: {there}")

            host.block(self._waiters.setdefault(key, []), reason)
        self._waiters.pop(key, None)
        host.acquire(known)
        if self.machine.trace is not None:
            self.machine.trace.add(host, f"leaves {request.call}", deed=Deed.WAITED)
        return self._replies.pop(key)

    def calls(self) -> tuple[str, ...]:
        """What each rank did last, for people."""
        return tuple(
            f"rank {rank}: its program has ended; before that {self.last.get(rank, 'no collective call')}"
            if rank in self.left
            else f"rank {rank}: {self.last.get(rank, 'no collective call yet')}"
            for rank in range(self.machine.ranks)
        )

    def tell(self, rank: int, request: Request) -> None:
        if isinstance(request, Leave) and not self.machine.stopping:
            self.left.add(rank)
        self.coordinator.handle(rank, request, (), 0.0)


class SimLink:
    """A rank's connection."""

    def __init__(self, hub: SimHub, rank: int, host: Host) -> None:
        self._hub = hub
        self._rank = rank
        self._host = host
        self.segment = hub.segment
        self.pids = hub.pids
        self.tickets: Iterator[int] = itertools.count()
        self.closed = False

    def call(self, request: Arrive, fds: Sequence[int]) -> tuple[Reply, list[int]]:
        return self._hub.call(self._host, self._rank, request), []

    def tell(self, request: Request) -> None:
        self._hub.tell(self._rank, request)

    def watch(self, block: ControlBlock, host: int) -> None:
        """The coordinator lives as long as its ranks."""

    def close(self) -> None:
        self.closed = True
        self._hub.tell(self._rank, Leave())
