"""One execution of an operation on one stream: what it leases, keeps alive and has enqueued.

Ownership belongs to the submission, never to a handle that the user can drop. Everything an operation uses is
registered here *before* it is enqueued, and released when a ticket proves completion, however the execution
ended. Nothing here waits inside an event loop; `future.py` does that.

    OPEN ──seal──> SEALED ──last ticket not pending──> DONE, released
      └──exception──> abandoned: sealed behind whatever the stream holds now
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

from peertile.errors import DeviceFault, PeertileError, UnsupportedError, UsageError, WaitTimeout
from peertile.runtime.driver import (
    DriverDevice,
    FaultKind,
    FaultRecord,
    PreparedLaunch,
    Status,
    StreamHandle,
    Ticket,
)
from peertile.runtime.lease import Lease
from peertile.runtime.site import Site
from peertile.runtime.stream import leak

if TYPE_CHECKING:
    from peertile.runtime.argument import Use
    from peertile.runtime.linking import Links
    from peertile.runtime.recording import Recording
    from peertile.runtime.stream import Event, Stream

__all__ = ["CAPTURING", "ExecutionContext", "Maker", "execution", "explain", "outside_execution", "refuse_recorded"]

Maker = tuple[Any, ...]
"""(function, *arguments): `function(record, *arguments)` is the user's error for a fault record."""

_Launch = tuple[PreparedLaunch, bytes, "Lease | None", Maker]

_BATCH: Final = 8
"""Launches of a chain that reach the driver together."""


class _Execution(threading.local):
    """What the calling thread is in the middle of executing; None outside. This is the execution lock: an
    operation that is executed inside another one would race its streams against each other."""

    inside: str | None = None


execution = _Execution()


CAPTURING: Final = "the capture of "
"""How `execution.inside` begins in the block of a capture."""


def outside_execution(name: str) -> None:
    """UsageError if the calling thread is inside a closure, a custom operation or a capture."""
    if execution.inside is not None:
        instead = (
            "return the operation from the closure instead, or use then_unchecked, whose closure is yours to order"
        )
        if execution.inside.startswith(CAPTURING):
            instead = "record the operation with `record` of the scope that pt.capture gives, or run it before or after"
        raise UsageError(f"{name}: nested execution inside {execution.inside}; {instead}")


def refuse_recorded(name: str, stream: Stream) -> NoReturn:
    """UsageError: what is captured from a stream goes through its capture."""
    raise UsageError(f"{name}: {stream.name} is being captured; end the capture first, or use another stream")


class Submission:
    """What a stream holds until it is over: how it is waited for, how its end is proven and told, once."""

    __slots__ = ("error", "is_finished", "name", "stream")

    name: str
    stream: Stream
    is_finished: bool
    error: PeertileError | None

    def _ticket(self) -> Ticket | None:
        """What was enqueued last; None: nothing."""
        raise NotImplementedError

    def _told(self, failing: FaultRecord) -> PeertileError:
        """The error for the operation that failed first."""
        raise NotImplementedError

    def release(self) -> None:
        """Give back what it owns; only when nothing enqueued can still use it."""
        raise NotImplementedError

    def wait(self, timeout_s: float | None = None) -> PeertileError | None:
        """Block until everything has left the stream; the error, if it failed. WaitTimeout at the bound."""
        if not self.is_finished:
            ticket = self._ticket()
            if ticket is not None and self.stream.device.driver.wait(ticket, timeout_s) is Status.PENDING:
                raise WaitTimeout(
                    f"{self.name}: expected to complete within {timeout_s:g} s, still running; wait longer",
                    op=self.name,
                )
        return self.finish()

    def finish(self) -> PeertileError | None:
        """Completion is proven: find the error, release what is owned. The same answer each time."""
        if not self.is_finished:
            self.error = self._find_error()
            self.is_finished = True
            self.release()
        return self.error

    def _find_error(self) -> PeertileError | None:
        """The error of the first operation that failed. Takes the fault: what is enqueued later runs."""
        ticket = self._ticket()
        if ticket is None:
            return None
        driver = self.stream.device.driver
        status = driver.query(ticket)
        if status is Status.DONE:
            return None
        record = driver.fault(ticket)
        if record is None:
            return None
        driver.take_fault(self.stream.handle)
        return self._told(record if status is Status.FAULTED or record.cause is None else record.cause)


class ExecutionContext(Submission):
    """What an operation sees when it is executed; a custom operation gets it in `execute`.

    `retain(...)` keeps objects alive until the work is over, `lease(...)` takes the right to use byte ranges,
    `note(...)` registers what was enqueued on `driver` with `handle`. `run(op)` executes an operation in place.
    """

    __slots__ = (
        "__weakref__",
        "_driver",
        "_last",
        "_tail",
        "_tail_name",
        "batch",
        "depends",
        "device",
        "first",
        "gathers",
        "gives_up_leases",
        "handle",
        "host_pending",
        "is_sealed",
        "keep",
        "leases",
        "makers",
        "on_caller",
        "recording",
        "site",
    )

    def __init__(self, name: str, stream: Stream, *, on_caller: bool, recording: Recording | None = None) -> None:
        if stream.recording is not recording:
            refuse_recorded(name, stream)
        device = stream.device
        self.name = name
        self.stream = stream
        self.device = device
        self._driver: DriverDevice = device.driver
        self.handle = stream.handle
        self.on_caller = on_caller
        self.recording = recording
        self.keep: list[Any] = []
        self.leases: list[Lease] = []
        self.makers: dict[int, Maker] | None = None
        self.depends: list[ExecutionContext] | None = None
        self.gathers = False
        self.batch: list[_Launch] = []
        self.first = 0
        # What was enqueued last: a ticket, or the number and name of a launch that none was made for.
        self._last: Ticket | None = None
        self._tail = 0
        self._tail_name = ""
        self.host_pending = False
        self.gives_up_leases = False
        self.site: Site | None = None
        """Where the operation being executed was made."""
        self.error: PeertileError | None = None
        self.is_finished = False
        self.is_sealed = False

    @property
    def last(self) -> Ticket | None:
        """What was enqueued last."""
        if self._tail:
            self._last, self._tail = Ticket(self.handle, self._tail, self._tail_name), 0
        return self._last

    @last.setter
    def last(self, ticket: Ticket | None) -> None:
        self._last, self._tail = ticket, 0

    @property
    def driver(self) -> DriverDevice:
        """The driver of the device; everything that was executed before has been enqueued."""
        if self.batch:
            self.flush()
        return self._driver

    # ---------------------------------------------------------------- for operations

    def retain(self, *owners: Any) -> None:
        """Keep objects alive until the work is over; in a capture, as long as the graph."""
        (self.keep if self.recording is None else self.recording.keep).extend(owners)

    def keep_launch(self, maker: Maker) -> None:
        """Keep what a launch is told by, its binary and arguments among it; outside of a capture `launch` does."""
        if self.recording is not None:
            self.recording.keep.append(maker)
        elif self.on_caller:
            self.keep.append(maker)

    def lease(self, uses: Sequence[Use], name: str, site: Site | None = None) -> Lease | None:
        """Take the right to use byte ranges, before enqueueing what uses them. LeaseError names both sides.

        In a capture nothing is taken now: each replay does, on its own stream; the result is None.
        """
        recording = self.recording
        if recording is not None:
            for use in uses:
                use.storage.check_alive(name)
            recording.uses.extend(uses)
            return None
        if self.gives_up_leases:  # what other submissions hold on the same uses is not ours to give up
            uses = [use.again() for use in uses]
        leases = self.leases
        if leases and self.device.leases.again(leases[-1], name, site or self.site, uses):
            return leases[-1]
        lease = self.device.leases.acquire(name, self.stream, site or self.site, uses)
        leases.append(lease)
        return lease

    def launch(self, prepared: PreparedLaunch, args: bytes, lease: Lease | None, maker: Maker) -> None:
        """Enqueue a launch: at once, or in a zip with those that follow. Operations of a zip reach the driver a few at
        a time, which is cheaper than one by one. Before any code of the user's runs, a closure for instance, all is
        enqueued (`flush`): it may take long, and it may wait for the very work that was put off."""
        if self.gathers:
            self.batch.append((prepared, args, lease, maker))
            if len(self.batch) >= _BATCH:
                self.flush()
            return
        if self.recording is not None:
            self.note(self._driver.launch_prepared(self.handle, prepared, args), lease, maker)
            return
        sequence = self._driver.enqueue(self.handle, prepared, args)
        # As `note` does, without the call.
        if not self.first:
            self.first = sequence
        self._tail, self._tail_name = sequence, prepared.options.name
        if lease is not None:
            lease.sequence = sequence
        if self.makers is None:
            self.makers = {sequence: maker}
        else:
            self.makers[sequence] = maker

    def links(self) -> Links | None:
        """What does an operation's launch in one go, where the driver can and there is nothing else to do for it."""
        if self.recording is not None or self.on_caller or self.gives_up_leases:
            return None
        return self._driver.links

    def enqueue_leased(self, prepared: PreparedLaunch, args: bytes, maker: Maker) -> None:
        """After `LinkCode.LEASED`: enqueue the launch that the last lease was entered for."""
        self.launch(prepared, args, self.leases[-1], maker)

    def gather(self) -> bool:
        """Let launches go together from here on, in a zip; whether that was not so before. Not in a capture."""
        before = self.gathers
        self.gathers = self.recording is None
        return self.gathers and not before

    def flush(self) -> None:
        """Enqueue what `launch` has put off."""
        batch, self.batch = self.batch, []
        if len(batch) == 1:
            prepared, args, lease, maker = batch[0]
            self.note(self._driver.launch_prepared(self.handle, prepared, args), lease, maker)
        elif batch:
            launches = [(prepared, args) for prepared, args, _, _ in batch]
            sequences = self._driver.launch_many(self.handle, launches)
            if not self.first:
                self.first = sequences[0]
            makers = self.makers
            if makers is None:
                makers = self.makers = {}
            for sequence, (_, _, lease, maker) in zip(sequences, batch, strict=True):
                if lease is not None:
                    lease.sequence = sequence
                makers[sequence] = maker
            self._tail, self._tail_name = sequences[-1], batch[-1][0].options.name

    def give_back(self, lease: Lease | None) -> None:
        """What ran on the calling thread is over, though more may follow."""
        if lease is not None:
            self.device.leases.release((lease,))
            self.leases.remove(lease)

    def note(self, ticket: Ticket, lease: Lease | None = None, maker: Maker | None = None) -> None:
        """Register an enqueued operation, the lease it works under, and how its fault is told."""
        recording = self.recording
        if recording is not None:
            if maker is not None:
                recording.makers[recording.nodes] = maker
            recording.nodes += 1
            return
        if not self.first:
            self.first = ticket.sequence
        self.last = ticket
        if lease is not None:
            lease.sequence = ticket.sequence
        if maker is not None:
            if self.makers is None:
                self.makers = {}
            self.makers[ticket.sequence] = maker

    def run(self, op: Any) -> Any:
        """Execute another operation here: on this stream, after what was enqueued, owned by this submission."""
        return op._enter(self)

    def require(self, check: Callable[[], object]) -> None:
        """`check()` now, and before every replay if this is a capture."""
        check()
        if self.recording is not None:
            self.recording.checks.append(check)

    def refuse_capture(self, name: str, why: str) -> None:
        """UnsupportedError in a capture: the operation cannot be a node of a graph."""
        if self.recording is not None:
            raise UnsupportedError(f"{name}: cannot be captured into {self.recording.name}: {why}")

    def order_behind(self, event: Event) -> None:
        """Order what follows behind an event of another stream."""
        if self.batch:
            self.flush()
        self.note(event.order(self.stream))

    def depend_on(self, producer: ExecutionContext) -> None:
        """What follows uses the work of another submission: its errors are told by that one."""
        if self.depends is None:
            self.depends = []
        self.depends.append(producer)

    def settle_host(self) -> None:
        """Host memory that a copy writes is complete before a closure sees it."""
        if not self.host_pending:
            return
        self.refuse_capture(self.name, "a closure would see host memory that nothing has written yet")
        driver = self.driver
        if self.last is not None:
            driver.wait(self.last)
            error = self._find_error()
            if error is not None:
                raise error
        self.host_pending = False

    # ---------------------------------------------------------------- completion

    def seal(self) -> None:
        """Everything is enqueued, at the latest now."""
        if self.batch:
            self.flush()
        self.is_sealed = True

    def is_done(self) -> bool:
        """Whether everything enqueued has left the stream."""
        if self.is_finished:
            return True
        if not self.is_sealed:
            return False
        last = self.last
        return last is None or self._driver.query(last) is not Status.PENDING

    def _ticket(self) -> Ticket | None:
        return self.last

    def last_on(self, handle: StreamHandle) -> int | None:
        """The number of what was enqueued last, if that is on the stream `handle`; None where it is not."""
        if self._tail:
            return self._tail
        last = self._last
        return None if last is None or last.stream is not handle else last.sequence

    def ended(self) -> Sequence[Lease]:
        """It is over: leases that are to be given back. What was kept alive is let go of."""
        leases, self.leases, self.keep = self.leases, [], []
        return leases

    def release(self) -> None:
        """Give back leases and what was kept alive; only when nothing enqueued can still use it."""
        if self.leases:
            self.device.leases.release(self.leases)
            self.leases = []
        if self.keep:
            self.keep = []

    def abandon(self) -> None:
        """The execution ended part way: what was enqueued keeps what it owns until the last operation of the
        stream has left it, which is later than ours, hence safe."""
        try:
            self.batch = []  # what was not enqueued never will be
            self.last = self._driver.last_ticket(self.handle)
            self.seal()
            if self.is_done():
                self.release()
            elif self not in self.stream.inflight:
                self.stream.admit(self)
        except UsageError:
            # The driver refuses every call: the device is gone, or this is one of its callbacks. If it took
            # anything before, nothing proves that it is done with our memory.
            if self.last is None:
                self.release()
            else:
                leak(self)

    # ---------------------------------------------------------------- faults

    def _told(self, failing: FaultRecord) -> PeertileError:
        last = self.last
        assert last is not None
        for other in self.depends or ():  # work of another submission that this one uses: it knows best
            error = other.finish() if other.is_done() else None
            if error is not None:
                return error
        maker = None if self.makers is None else self.makers.get(failing.sequence)
        if maker is not None:
            error = maker[0](failing, *maker[1:])
            assert isinstance(error, PeertileError)
            return error
        mine = self.first <= failing.sequence <= last.sequence
        return explain(failing, None if mine else self.name)


def explain(record: FaultRecord, skipped: str | None = None) -> PeertileError:
    """The error for a record that no kernel explains. `skipped` names what did not run because of it."""
    root = record
    while root.kind is FaultKind.SKIPPED and root.cause is not None:
        root = root.cause
    if skipped is not None or root is not record:
        name = skipped or record.op
        return DeviceFault(f"{name} did not run because {root.op} failed", op=name)
    cause = record.error
    if isinstance(cause, PeertileError):
        return cause
    if cause is not None:
        error = DeviceFault(f"{type(cause).__name__}: {cause}", op=record.op)
        error.__cause__ = cause
        return error
    if record.kind is FaultKind.WAIT_TIMEOUT:
        return WaitTimeout(
            f"a wait reached its bound: {record.waited}",
            op=record.op,
            slot=record.slot,
            expected=record.limit,
            seen=record.got,
        )
    return DeviceFault(f"{record.kind.name.lower()}", op=record.op)
