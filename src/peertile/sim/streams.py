"""Streams of the machine: queues whose operations run in order, each an agent of its own, and host threads.

An operation starts after what its stream has done and what the host knew when it enqueued it. `Operation.start`
says whether it has ended at once; if not it will call `Stream.finish` when it has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

from peertile.sim.agents import Agent, Kind
from peertile.sim.clocks import Clock, join
from peertile.sim.machine import Machine, Task
from peertile.sim.trace import Deed, Work
from peertile.sim.verdicts import Waiter

__all__ = ["ANYTHING", "Operation", "Reach", "Stream"]


Reach = tuple[int, ...] | None
"""Objects, by their address, that the beginning of an operation accesses; None: nobody knows. For exploration."""
ANYTHING: Final[Reach] = None


class Operation:
    """One enqueued operation. `clock` is what the host knew; `after` what the stream knew at its end."""

    __slots__ = ("after", "before", "calls", "clock", "name", "reach", "sequence", "state", "waiters", "work")

    def __init__(self, name: str) -> None:
        self.name = name
        self.sequence = 0
        self.clock: Clock = {}
        self.before: Clock = {}
        self.after: Clock | None = None
        self.state: Any = None
        self.waiters: list[Task] = []
        self.reach: Reach = ANYTHING
        self.calls: list[Callable[[], None]] = []
        """Called once it is over."""
        self.work = Work.OTHER

    def start(self, stream: Stream) -> bool:
        """Begin; True if it has ended already."""
        raise NotImplementedError

    def waits(self, stream: Stream) -> Waiter | None:
        """Why it has not ended; None where the tasks it started say so themselves."""
        return None


class Call(Operation):
    """An operation that is one Python call, with the stream as its agent."""

    __slots__ = ("function",)

    def __init__(self, name: str, function: Callable[[Stream], None]) -> None:
        super().__init__(name)
        self.function = function

    def start(self, stream: Stream) -> bool:
        self.function(stream)
        return True


class Stream(Agent):
    """A queue and the engine that works on it; an agent and a task."""

    __slots__ = ("at", "busy", "done", "ending", "machine", "number", "queue", "ready")

    def __init__(self, machine: Machine, rank: int, number: int, name: str) -> None:
        super().__init__(Kind.STREAM, rank, machine.entry("stream", rank, number), name)
        self.machine = machine
        self.number = number
        self.queue: deque[Operation] = deque()
        self.busy: Operation | None = None
        self.ending: Operation | None = None
        self.ready = False
        self.done = False
        self.at: Any = None
        machine.begin(self)
        machine.add(self)

    def enqueue(self, operation: Operation, clock: Clock | None = None) -> None:
        operation.clock = {} if clock is None else dict(clock)
        self.machine.asks = 0  # whoever gives work does not wait for time to pass
        self.queue.append(operation)
        if self.busy is None:
            self.machine.wake(self)

    def run(self) -> None:
        self.steps += 1
        ending, self.ending = self.ending, None
        if ending is not None:
            self.finish(ending)
            return
        operation = self.busy
        if operation is None:
            if not self.queue:  # a wait that timed out ended here before the turn that it had been woken for
                self.ready = False
                return
            operation = self.busy = self.queue.popleft()
            join(self.clock, operation.clock)
            if self.machine.trace is not None:
                self.machine.trace.add(self, f"starts {operation.name}", deed=Deed.BEGIN, work=operation.work)
        if operation.start(self):
            park = self.machine.park
            if park is not None and park.holds(self):  # its completion is a synchronising operation, too
                self.ending = operation
            else:
                self.finish(operation)
        else:
            self.ready = False

    def finish(self, operation: Operation) -> None:
        """The running operation has ended: the next one may start, and whoever waits for this one goes on."""
        # What comes later is not covered by what waits for this: a new epoch.
        operation.after = self.release(None)
        if self.machine.trace is not None:
            self.machine.trace.add(self, f"has done {operation.name}", deed=Deed.END, work=operation.work)
        self.busy = None
        if self.machine.over is not None:
            self.machine.over(self.rank)
        self.machine.wake_all(operation.waiters)
        for call in operation.calls:
            call()
        if self.queue:
            self.machine.wake(self)
        else:
            self.ready = False

    def condition(self, word: Any) -> tuple[Any, Any, int] | None:
        return None

    def waits(self) -> Waiter | None:
        if self.busy is not None:
            return self.busy.waits(self)
        return None
