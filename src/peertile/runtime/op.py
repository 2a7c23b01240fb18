"""Lazy device operations: what `kernel(args)` returns. Nothing runs until one is executed, once.

Execution goes through an `ExecutionContext`: it names the stream, registers what must stay alive and
leased, and collects tickets. Ownership belongs to the submission, never to a handle that the user can
drop: a `Submission` keeps storages, modules and leases until a ticket proves completion.

    READY ──sync / submit──> SPENT        a second execution is a UsageError
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from peertile.errors import PeertileError, UsageError
from peertile.runtime.device import Device, Stream
from peertile.runtime.driver import FaultRecord, Status, Ticket
from peertile.runtime.lease import Lease

__all__ = ["DeviceOp", "ExecutionContext", "Submission", "live_submissions"]

T = TypeVar("T")

FaultMaker = Callable[[FaultRecord], PeertileError]
"""Turns a driver's fault record into the error that the user sees."""


class ExecutionContext:
    """One execution of an op on one stream. `on_caller` lets launches run on the calling thread."""

    __slots__ = ("_done", "fault_maker", "keep", "leases", "name", "on_caller", "stream", "tickets")

    def __init__(self, name: str, stream: Stream, *, on_caller: bool) -> None:
        self.name = name
        self.stream = stream
        self.on_caller = on_caller
        self.keep: list[Any] = []
        self.leases: list[Lease] = []
        self.tickets: list[Ticket] = []
        self.fault_maker: dict[int, FaultMaker] = {}
        self._done = False

    @property
    def stream_id(self) -> int:
        return self.stream.id

    @property
    def stream_name(self) -> str:
        return self.stream.name

    def is_done(self) -> bool:
        """Whether everything enqueued has left the stream; takes no lock."""
        if self._done:
            return True
        query = self.stream.device.driver.query
        # Tickets of one stream complete in order, so the last one speaks for all.
        if self.tickets and query(self.tickets[-1]) is Status.PENDING:
            return False
        return bool(self.tickets)

    def wait_done(self) -> None:
        """Block until everything enqueued has left the stream, however it ended."""
        if self.tickets and not self._done:
            self.stream.device.driver.wait(self.tickets[-1])

    def add_ticket(self, ticket: Ticket, fault_maker: FaultMaker | None) -> None:
        """Register an enqueued operation and how its fault is told."""
        self.tickets.append(ticket)
        if fault_maker is not None:
            self.fault_maker[ticket.sequence] = fault_maker

    def release(self) -> None:
        """Completion is proven: give back leases and what was kept alive."""
        self._done = True
        if self.leases:
            self.stream.device.leases.release(self.leases)
            self.leases = []
        self.keep.clear()

    def first_fault(self) -> PeertileError | None:
        """The error of the first operation that failed, once all have left the stream."""
        driver = self.stream.device.driver
        for ticket in self.tickets:
            record = driver.fault(ticket)
            if record is not None:
                # The stream goes on: what was enqueued before the take is skipped, later work runs.
                driver.take_fault(self.stream.handle)
                return self.explain(record, ticket)
        return None

    def explain(self, record: FaultRecord, ticket: Ticket) -> PeertileError:
        """The user's error for a fault record."""
        maker = self.fault_maker.get(ticket.sequence)
        if maker is not None:
            return maker(record)
        from_driver = record.error
        if isinstance(from_driver, PeertileError):
            return from_driver
        return UsageError(f"{ticket.name} failed: {record}")


class _Live:
    """Submissions that nobody has waited for yet; they own their leases, so they must not be collected."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.pending: set[ExecutionContext] = set()

    def add(self, context: ExecutionContext) -> None:
        with self.lock:
            self.pending.add(context)

    def discard(self, context: ExecutionContext) -> None:
        with self.lock:
            self.pending.discard(context)

    def sweep(self) -> int:
        """Release the submissions that have completed; the number still running."""
        with self.lock:
            done = [c for c in self.pending if c.is_done()]
            self.pending.difference_update(done)
            running = len(self.pending)
        for context in done:
            context.release()
        return running


_live = _Live()


def live_submissions() -> int:
    """Number of submissions that are still running, after releasing those that are not."""
    return _live.sweep()


class Submission(Generic[T]):
    """An op that was enqueued. Dropping it neither cancels nor waits: the work owns what it uses."""

    __slots__ = ("_context", "_error", "_result", "_settled")

    def __init__(self, context: ExecutionContext, result: T) -> None:
        self._context = context
        self._result = result
        self._error: PeertileError | None = None
        self._settled = False

    def is_done(self) -> bool:
        """Whether the work has left its stream, without blocking."""
        return self._settled or self._context.is_done()

    def wait(self, timeout_s: float | None = None) -> T:
        """Block until the work is done and return the result. DeviceFault if it failed, WaitTimeout at the bound."""
        if not self._settled:
            context = self._context
            if context.tickets:
                status = context.stream.device.driver.wait(context.tickets[-1], timeout_s)
                if status is Status.PENDING:
                    raise UsageError(f"{context.name}: still running after {timeout_s:g} s; wait longer")
            self._error = context.first_fault()
            self._settled = True
            _live.discard(context)
            context.release()
        if self._error is not None:
            raise self._error
        return self._result


class DeviceOp(ABC, Generic[T]):
    """A lazy operation on a device, used once.

    `sync()` runs it on the default stream and returns its result; `sync_on(stream)` on a given one;
    `submit(stream)` enqueues it and returns a `Submission`, so that several can be in flight.
    """

    __slots__ = ("_spent",)

    def __init__(self) -> None:
        self._spent = False

    @property
    @abstractmethod
    def name(self) -> str:
        """Names the operation in errors."""

    @property
    @abstractmethod
    def device(self) -> Device:
        """The device it runs on."""

    @abstractmethod
    def _execute(self, context: ExecutionContext) -> T:
        """Enqueue on the context's stream and return the result's handles. Called once."""

    def _spend(self) -> None:
        if self._spent:
            raise UsageError(f"{self.name}: an op is used once, and this one was; build a new one by calling again")
        self._spent = True

    def sync(self) -> T:
        """Run on the device's default stream and wait for the end."""
        return self.sync_on(self.device.default_stream)

    def sync_on(self, stream: Stream) -> T:
        """Run on `stream` and wait for the end; on an idle stream the calling thread does the work."""
        self._spend()
        context = ExecutionContext(self.name, stream, on_caller=True)
        try:
            result = self._execute(context)
        except BaseException:
            _abandon(context)
            raise
        if context.tickets:
            return Submission(context, result).wait()
        context.release()
        return result

    def submit(self, stream: Stream | None = None) -> Submission[T]:
        """Enqueue on `stream` (default: the device's default stream) and return at once."""
        self._spend()
        _live.sweep()
        context = ExecutionContext(self.name, stream or self.device.default_stream, on_caller=False)
        _live.add(context)
        try:
            result = self._execute(context)
        except BaseException:
            _live.discard(context)
            _abandon(context)
            raise
        return Submission(context, result)


def _abandon(context: ExecutionContext) -> None:
    """An execution failed part way (or was interrupted): what was enqueued keeps its leases until the last
    operation of the stream has left it, which is later than ours, hence safe."""
    context.tickets.append(context.stream.device.driver.last_ticket(context.stream.handle))
    if context.is_done():
        context.release()
    else:
        _live.add(context)
