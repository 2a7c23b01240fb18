"""Host threads of the machine: ordinary Python that blocks, as greenlets that the machine switches to.

A host is an agent and a task. It runs until it waits for something, `block`, which parks it and switches back.
What belongs to its rank alone is put in place by `Machine.show` before each stretch that it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from greenlet import GreenletExit, greenlet  # type: ignore[import-untyped]

from peertile.sim.agents import Agent, Kind
from peertile.sim.machine import Call, Found, Machine, Task
from peertile.sim.verdicts import Waiter

__all__ = ["Call", "Host"]

SWALLOWED: Final = 100
"""How many calls a host may make though it was told to end. Then it is left where it stands."""

_left: list[Any] = []
"""Greenlets that were left. Whoever forgets one ends it, which is what it does not allow: never collected, so held by
the process and by no machine."""


class Host(Agent):
    """The main thread of a rank."""

    __slots__ = (
        "at", "body", "done", "error", "failed", "is_left", "machine", "next_call", "parked", "ready", "result",
        "swallowed", "thread", "told", "waiting_for",
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
        self.next_call = Call.START
        self.failed: Callable[[BaseException], None] | None = None
        """Called with what the host thread raised."""
        self.told: BaseException | None = None
        """What the host thread was told to end by, while the others go on."""
        self.swallowed = 0
        self.is_left = False
        """It did not end, whatever it was told, and does not run any more."""
        self.thread: Any = None
        self.parked: Any = None
        """The greenlet to go on with: `thread`, or one of the program's own that waits within it."""
        machine.begin(self)
        if body is not None:
            self.thread = self.parked = greenlet(self._main)
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
        if machine.show is not None:
            machine.show(self.rank)
        machine.host = self
        try:
            self.thread.parent = greenlet.getcurrent()
            self.parked.switch()
        finally:
            machine.host = None
        if self.is_left:
            self._over()
            assert self.told is not None
            raise self.told
        if self.thread.dead:
            self._over()
            if isinstance(self.error, Found | KeyboardInterrupt):
                raise self.error
            if self.error is not None and not machine.stopping and self.failed is not None:
                self.failed(self.error)

    def _over(self) -> None:
        self.thread = self.parked = None  # a dead one still holds what it ran, out of sight of the collector
        self.ready = False
        self.done = True

    def step(self, call: Call) -> None:
        """A place where others may go first; `call` is what the host does next."""
        self.next_call = call
        if call is Call.ASKS:
            self.machine.asked()
        self._switch()

    def block(self, waiters: list[Task], reason: Callable[[], Waiter]) -> None:
        """Park until somebody wakes `waiters`; `reason` tells why, for a deadlock."""
        waiters.append(self)
        self.waiting_for = reason
        self.ready = False
        self.next_call = Call.RESUMES
        self._switch()
        self.waiting_for = None

    def _switch(self) -> None:
        if self.machine.stopping or self.told is not None:
            self.went_on()
            raise GreenletExit
        parent = self.thread.parent
        self.parked = greenlet.getcurrent()
        parent.switch()

    def condition(self, word: Any) -> tuple[Any, Any, int] | None:
        return None

    def waits(self) -> Waiter | None:
        if self.waiting_for is None:
            return Waiter(self.where(), "its turn")
        waiter, line_of = self.waiting_for(), self.machine.line_of
        at = line_of(self.parked.gr_frame) if line_of is not None and self.parked is not None else ""
        return waiter if not at or at in waiter.what else replace(waiter, launched=f"at {at}")

    def went_on(self) -> None:
        """The thread calls the machine though it was told to end: in its cleanup, or for ever."""
        self.swallowed += 1
        if self.swallowed > SWALLOWED:
            self._leave()

    def tell(self, error: BaseException) -> None:
        """Ends the thread, which runs now, by `error`. One that was told before, and caught that, is left where it
        stands, and the machine raises what it was told first."""
        if self.told is None:
            self.told = error
            raise error
        self._leave()

    def _leave(self) -> None:
        """Never to come back: the thread catches whatever would end it, in a loop."""
        parent = self.thread.parent
        if parent is greenlet.getcurrent():  # a signal, just before or behind a stretch of the thread
            return
        _left.extend((self.thread, greenlet.getcurrent()))
        self.is_left = True
        parent.switch()

    def leave(self) -> None:
        """Instead of `stop`, of a thread that is known not to end."""
        if self.thread:
            _left.extend((self.thread, self.parked))
        self._over()

    def stop(self) -> None:
        """End the thread where it stands: its cleanup runs, and may not wait."""
        if self.thread is None or not self.thread:  # ended, or never started
            self.thread = self.parked = None
            return
        if self.machine.show is not None:
            self.machine.show(self.rank)
        self.machine.host = self
        try:
            self.thread.parent = greenlet.getcurrent()
            self.parked.throw()
        finally:
            self.machine.host = None
            self.thread = self.parked = None
