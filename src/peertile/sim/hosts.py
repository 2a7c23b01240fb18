"""Host threads of the machine: ordinary Python that blocks, as greenlets that the machine switches to.

A host is an agent and a task. It runs until it waits for something, `block`, which parks it and switches back.
`enter` and `leave` are called around every stretch that it runs: what belongs to its rank alone goes in and out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from greenlet import GreenletExit, greenlet  # type: ignore[import-untyped]

from peertile.sim.agents import Agent, Kind
from peertile.sim.machine import Found, Machine, Task
from peertile.sim.verdicts import Waiter

__all__ = ["Host"]


class Host(Agent):
    """The main thread of a rank."""

    __slots__ = (
        "at", "body", "done", "enter", "error", "failed", "leave", "machine", "ready", "result", "thread",
        "waiting_for",
    )  # fmt: skip

    def __init__(self, machine: Machine, rank: int, body: Callable[[], Any] | None = None) -> None:
        super().__init__(Kind.HOST, rank, machine.entry("host", rank), "the host thread")
        self.machine = machine
        self.body = body
        self.ready = body is not None
        self.done = False
        self.at: Any = None
        self.waiting_for: Callable[[], Waiter] | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.enter: Callable[[], None] | None = None
        self.leave: Callable[[], None] | None = None
        self.failed: Callable[[BaseException], None] | None = None
        """Called with what the host thread raised."""
        self.thread: Any = None
        machine.begin(self)
        if body is not None:
            self.thread = greenlet(self._main)
            machine.add(self)

    def _main(self) -> None:
        assert self.body is not None
        try:
            self.result = self.body()
        except BaseException as error:
            self.error = error

    def run(self) -> None:
        self.steps += 1
        machine = self.machine
        if self.enter is not None:
            self.enter()
        machine.host = self
        try:
            self.thread.parent = greenlet.getcurrent()
            self.thread.switch()
        finally:
            machine.host = None
            if self.leave is not None:
                self.leave()
        if self.thread.dead:
            self.ready = False
            self.done = True
            if isinstance(self.error, Found):
                raise self.error
            if self.error is not None and not machine.stopping and self.failed is not None:
                self.failed(self.error)

    def step(self) -> None:
        """A place where others may go first."""
        self._switch()

    def block(self, waiters: list[Task], reason: Callable[[], Waiter]) -> None:
        """Park until somebody wakes `waiters`; `reason` tells why, for a deadlock."""
        waiters.append(self)
        self.waiting_for = reason
        self.ready = False
        self._switch()
        self.waiting_for = None

    def _switch(self) -> None:
        if self.machine.stopping:
            raise GreenletExit
        parent = self.thread.parent
        parent.switch()

    def condition(self, word: Any) -> tuple[Any, Any, int] | None:
        return None

    def waits(self) -> Waiter | None:
        if self.waiting_for is None:
            return Waiter(self.where(), "its turn")
        return self.waiting_for()

    def stop(self) -> None:
        """End the thread where it stands: its cleanup runs, and may not wait."""
        if self.thread is None or self.thread.dead or not self.thread:  # ended, or never started
            return
        if self.enter is not None:
            self.enter()
        self.machine.host = self
        try:
            self.thread.parent = greenlet.getcurrent()
            self.thread.throw()
        finally:
            self.machine.host = None
            if self.leave is not None:
                self.leave()
