"""One execution of an operation for many users, on any threads and streams. Knows no combinators.

NEW ──first user──> RUNNING ──> DONE or FAILED, for good
"""

from __future__ import annotations

import threading
from enum import Enum
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from peertile.errors import PeertileError, UsageError
from peertile.runtime.context import ExecutionContext, explain
from peertile.runtime.driver import Status, Ticket
from peertile.runtime.recording import Recording
from peertile.runtime.stream import Event

if TYPE_CHECKING:
    from peertile.runtime.op import DeviceOp

__all__ = ["Shared"]

T = TypeVar("T")


class _State(Enum):
    NEW = "new"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class Shared(Generic[T]):
    """See the module docstring.

    `changed` guards all below; while RUNNING, the thread that runs holds nothing, and others wait.
    """

    def __init__(self, op: DeviceOp[T]) -> None:
        self.op = op
        self.changed = threading.Condition()
        self.state = _State.NEW
        self.thread = 0
        self.result: T = cast("T", None)
        self.error: BaseException | None = None
        self.producer: ExecutionContext | None = None
        self.ticket: Ticket | None = None
        self.event: Event | None = None
        self.recording: Recording | None = None

    def use(self, context: ExecutionContext) -> T:
        """The result, with `context` ordered behind the work."""
        with self.changed:
            while self.state is _State.RUNNING:
                if self.thread == threading.get_ident():
                    raise UsageError(f"{self.op.name}: a shared operation cannot use itself")
                self.changed.wait(0.05)
            if self.state is _State.NEW:
                self.state, self.thread = _State.RUNNING, threading.get_ident()
                first = True
            else:
                first = False
        if first:
            return self._run(context)
        if self.error is not None:
            raise self.error
        self._order(context)
        return self.result

    def _run(self, context: ExecutionContext) -> T:
        state = _State.FAILED
        try:
            context.flush()
            before = context.last
            self.result = self.op._execute(context)
            context.flush()
            self.recording = context.recording
            if context.recording is None and context.last is not before:
                self.producer, self.ticket = context, context.last
                if context.last is not None and context.driver.query(context.last) is Status.PENDING:
                    # Now, not when somebody asks: what comes behind may wait for that somebody.
                    self.event = context.stream.record()
            state = _State.DONE
            return self.result
        except BaseException as error:
            self.error = error
            raise
        finally:
            with self.changed:
                self.state = state
                self.changed.notify_all()

    def _order(self, context: ExecutionContext) -> None:
        if self.recording is not context.recording and self.recording is not None:
            raise UsageError(
                f"{self.op.name}: this shared operation was recorded into {self.recording.name} and has no result "
                "outside it; build another one"
            )
        producer, ticket = self.producer, self.ticket
        if producer is None or ticket is None or producer is context:
            return
        driver = producer.device.driver
        status = driver.query(ticket)
        if status is Status.DONE:
            return
        if status is not Status.PENDING:
            record = driver.fault(ticket)
            error: PeertileError | None = producer.finish() if producer.is_done() else None
            assert record is not None
            raise error or explain(record, self.op.name)
        context.refuse_capture(self.op.name, "it was started outside and is not over; sync it first")
        context.depend_on(producer)
        if producer.stream is not context.stream:
            assert self.event is not None
            context.order_behind(self.event)
        elif context.last is None:
            context.note(ticket)
