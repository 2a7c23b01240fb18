"""Streams and events of a device, and the submissions in flight on each. Runs no operation itself.

A stream knows what it is ordered behind: `seen` maps another stream to the sequence number of its last
operation that work enqueued here from now on is ordered after. An event carries such a map from the stream
that records it to the one that waits for it, which is how leases tell ordered work from overlapping work.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from typing import TYPE_CHECKING, Self

from peertile.errors import ArgumentError, DeviceFault, UsageError, WaitTimeout
from peertile.runtime.checks import not_pickled
from peertile.runtime.driver import EventHandle, Status, StreamHandle, Ticket

if TYPE_CHECKING:
    from peertile.runtime.context import ExecutionContext
    from peertile.runtime.device import Device
    from peertile.runtime.launched import Launched
    from peertile.runtime.lease import Claim
    from peertile.runtime.recording import Recording

__all__ = ["Event", "Stream", "abandon", "check_stream", "leaked_submissions", "live_streams", "live_submissions"]

_ids = itertools.count(1)

_RETIRE_AT = 16
"""Submissions on a stream, more than were left the last time, at which a new one lets go of those that are over:
asking costs as much as enqueueing."""


class _Live:
    """Streams with submissions that are not known to be over. Submissions own what they use and are owned from
    here: a stream, its submissions and their memory would otherwise be one circle that collection may take."""

    def __init__(self) -> None:
        self.streams: set[Stream] = set()
        self.leaked: list[ExecutionContext | Launched] = []
        """Submissions whose completion cannot be proven: they keep what they own for ever, and are counted."""


_live = _Live()
live_streams = _live.streams


class Stream:
    """A queue of operations of one device that run in order; two streams run at the same time.

    >>> import peertile as pt
    >>> stream = pt.current_device().stream("copies")
    >>> x = pt.op.zeros((4,), pt.f32).sync_on(stream)
    >>> stream.sync()
    """

    __slots__ = (
        "__weakref__", "_append", "device", "handle", "id", "inflight", "lock", "name", "priority", "recording",
        "retire_at", "seen",
    )  # fmt: skip

    __reduce_ex__ = not_pickled

    def __init__(self, device: Device, name: str, priority: int = 0) -> None:
        self.device = device
        self.handle: StreamHandle = device.driver.create_stream(priority)
        self.id = next(_ids)
        self.name = name
        device.streams[self.id] = self
        self.priority = priority
        self.seen: dict[int, int] = {}
        self.inflight: deque[ExecutionContext | Launched] = deque()
        self._append = self.inflight.append
        self.retire_at = _RETIRE_AT
        self.recording: Recording | None = None
        """What is being captured from this stream."""
        self.lock = threading.RLock()
        """Held by whoever takes from `inflight`; taken again by a thread that has it when collection runs a finaliser
        that calls us."""

    def __repr__(self) -> str:
        return f"Stream({self.name} of {self.device.name})"

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, TypeError):
            self.device.discard("destroy_stream", self.handle)

    def sync(self, timeout_s: float | None = None) -> None:
        """Wait until everything enqueued has run. DeviceFault if the stream has failed and nobody was told yet;
        WaitTimeout after `timeout_s`."""
        driver = self.device.driver
        ticket = driver.last_ticket(self.handle)
        if driver.wait(ticket, timeout_s) is Status.PENDING:
            raise WaitTimeout(
                f"{self.name}: expected to be idle within {timeout_s:g} s, {ticket.name} is still running",
                op=ticket.name,
            )
        with self.lock:
            contexts = list(self.inflight)
        error = next((e for e in (c.finish() for c in contexts if c.is_done()) if e is not None), None)
        self.retire()
        if error is not None:
            raise error
        record = driver.take_fault(self.handle)
        if record is not None:
            raise DeviceFault(f"{record.op} failed: {record.kind.name.lower()}", op=record.op)

    def is_idle(self) -> bool:
        """Whether everything enqueued has left the stream."""
        driver = self.device.driver
        return driver.query(driver.last_ticket(self.handle)) is not Status.PENDING

    def record(self, event: Event | None = None) -> Event:
        """An event (a new one by default) that means this point of the stream."""
        target = event or Event(self.device)
        target.record(self)
        return target

    def wait(self, event: Event) -> Self:
        """What is enqueued from now on runs after the event's last record. UsageError if it was never recorded."""
        event.order(self)
        return self

    # ---------------------------------------------------------------- submissions

    def admit(self, context: ExecutionContext | Launched) -> None:
        """Own a submission until it is known to be over. Before anything of it is enqueued."""
        inflight = self.inflight
        if len(inflight) >= self.retire_at:
            with self.lock:
                self._retire_known()
                self.retire_at = len(inflight) + _RETIRE_AT
        # Without the lock: whoever finds the queue empty and forgets the stream looks again afterwards.
        inflight.append(context)
        _live.streams.add(self)

    def _retire_known(self) -> None:
        """Release the submissions that the driver knows to be over without asking the device; `lock` is held."""
        inflight, handle = self.inflight, self.handle
        completed = self.device.driver.completed(handle)
        over: list[Claim] = []
        while inflight:
            context = inflight[0]
            if not context.is_sealed or not completed:
                break
            sequence = context.last_on(handle)
            if sequence is None:
                break
            if sequence > completed:
                self.device.leases.release(over)
                return
            inflight.popleft()
            over += context.ended()
        self.device.leases.release(over)
        self.retire()

    def retire(self) -> int:
        """Release the submissions that are over; the number of those that are not."""
        inflight = self.inflight
        with self.lock:
            while inflight:
                context = inflight[0]
                try:
                    if not context.is_done():
                        break
                except UsageError:  # the device was closed, or belongs to the process that forked this one
                    _live.leaked.append(context)
                else:
                    context.release()
                inflight.popleft()
            if not inflight:
                _live.streams.discard(self)
                if inflight:  # another thread submits
                    _live.streams.add(self)
            return len(inflight)


def live_submissions(device: Device | None = None) -> int:
    """Number of submissions (of `device`, or of all) still running, after releasing those that are not.

    >>> import peertile as pt
    >>> pt.live_submissions(pt.current_device())
    0
    """
    streams = [s for s in list(_live.streams) if device is None or s.device is device]
    return sum(stream.retire() for stream in streams)


def leaked_submissions() -> int:
    """Number of submissions whose completion could not be proven; what they use is kept for ever."""
    return len(_live.leaked)


def leak(context: ExecutionContext | Launched) -> None:
    """Keep everything that a submission owns: nothing proves that the device is done with it."""
    _live.leaked.append(context)


def abandon(device: Device) -> None:
    """Forget the submissions of a device that has ended, as a simulated one does with its run: nothing runs there any
    more that could use what they own."""
    for stream in [s for s in list(_live.streams) if s.device is device]:
        with stream.lock:
            stream.inflight.clear()
            _live.streams.discard(stream)
    _live.leaked[:] = [context for context in _live.leaked if context.device is not device]


def check_stream(role: str, stream: object) -> None:
    """ArgumentError for anything that is no stream."""
    if not isinstance(stream, Stream):
        raise ArgumentError(f"{role}: stream: expected a Stream, as Device.stream gives, got {stream!r}")


class Event:
    """A point in a stream that other streams, and the host, can wait for.

    A wait means the record enqueued last before it; an event that was never recorded is a UsageError.

    >>> import peertile as pt
    >>> a, b = pt.current_device().stream("a"), pt.current_device().stream("b")
    >>> x = pt.zeros((4,), pt.f32)
    >>> future = pt.op.fill(x, 1).submit(a)
    >>> _ = b.wait(a.record())
    >>> pt.op.fill(x, 2).sync_on(b)
    >>> x.numpy().tolist()
    [2.0, 2.0, 2.0, 2.0]
    """

    __slots__ = ("__weakref__", "_clock", "device", "handle", "stream", "ticket")

    def __init__(self, device: Device) -> None:
        self.device = device
        self.handle: EventHandle = device.driver.create_event()
        self._clock: dict[int, int] = {}
        self.stream: Stream | None = None
        self.ticket: Ticket | None = None

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, TypeError):
            self.device.discard("destroy_event", self.handle)

    def record(self, stream: Stream) -> Ticket:
        """Let the event mean this point of `stream`."""
        ticket = self.device.driver.record_event(stream.handle, self.handle)
        clock = dict(stream.seen)
        clock[stream.id] = ticket.sequence
        self._clock, self.stream, self.ticket = clock, stream, ticket
        return ticket

    def order(self, stream: Stream) -> Ticket:
        """Order what `stream` gets from now on behind the event."""
        clock = self._clock
        ticket = stream.device.driver.wait_event(stream.handle, self.handle)
        for other, sequence in clock.items():  # after the wait is enqueued: leases look here
            if other != stream.id and stream.seen.get(other, 0) < sequence:
                stream.seen[other] = sequence
        return ticket

    def is_done(self) -> bool:
        """Whether the last record has run."""
        driver = self.device.driver
        return driver.query(driver.event_ticket(self.handle)) is not Status.PENDING

    def sync(self, timeout_s: float | None = None) -> None:
        """Block until the last record has run; WaitTimeout after `timeout_s`."""
        driver = self.device.driver
        if driver.wait(driver.event_ticket(self.handle), timeout_s) is Status.PENDING:
            raise WaitTimeout(f"event: expected to have run within {timeout_s:g} s, still pending", op="event")
