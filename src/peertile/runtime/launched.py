"""One launch that was submitted alone: its own lease and its own submission, in one object.

It is what an `ExecutionContext` with one launch would be, for the case that is counted in nanoseconds: the context
knows of chains, captures and batches, this knows of none. It owns what the launch uses until a sequence number proves
the end.

    enqueuing (sequence 0) ──> IN FLIGHT ──the stream has passed it──> DONE, released
      └──exception──> abandoned: behind whatever the stream holds now
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from peertile.errors import PeertileError, UsageError
from peertile.runtime.context import Maker, Submission, explain
from peertile.runtime.driver import DriverDevice, FaultRecord, Status, StreamHandle, Ticket
from peertile.runtime.stream import leak

if TYPE_CHECKING:
    from peertile.runtime.argument import Use
    from peertile.runtime.device import Device
    from peertile.runtime.lease import Claim
    from peertile.runtime.site import Site
    from peertile.runtime.standing import Standing
    from peertile.runtime.stream import Stream

__all__ = ["Launched"]

_NOTHING = -1
"""The sequence number of a launch that was never enqueued, on a stream that never held anything."""


class Launched(Submission):
    """See the module docstring. `maker`: how its fault is told, as `ExecutionContext.makers` has it."""

    __slots__ = (
        "__weakref__", "kept", "left", "maker", "sequence", "site", "size", "uses",
    )  # fmt: skip

    def __init__(self, name: str, stream: Stream, site: Site | None, uses: Sequence[Use], maker: Maker) -> None:
        self.name = name
        self.stream = stream
        self.site = site
        self.uses = uses
        self.maker = maker
        self.sequence = 0
        self.left = self.size = 0
        self.kept: Standing | None = None
        """The lease of its owner, where it has none itself; its uses are kept alive all the same."""
        self.is_finished = False
        self.error: PeertileError | None = None

    # ---------------------------------------------------------------- as a submission

    host_pending = False
    """No memory of the host is written by it."""

    def settle_host(self) -> None:
        """Nothing to wait for."""

    @property
    def device(self) -> Device:
        return self.stream.device

    @property
    def driver(self) -> DriverDevice:
        return self.stream.device.driver

    @property
    def is_sealed(self) -> bool:
        """Whether it is enqueued."""
        return self.sequence != 0

    @property
    def last(self) -> Ticket | None:
        """The launch."""
        return Ticket(self.stream.handle, self.sequence, self.name) if self.sequence > 0 else None

    def last_on(self, handle: StreamHandle) -> int | None:
        """Its number, on the stream `handle`, which is its own."""
        return self.sequence

    def is_done(self) -> bool:
        """Whether it has left its stream."""
        if self.is_finished:
            return True
        sequence = self.sequence
        if sequence == 0:
            return False
        stream = self.stream
        driver = stream.device.driver
        return (
            sequence == _NOTHING
            or sequence <= driver.completed(stream.handle)
            or driver.query(Ticket(stream.handle, sequence, self.name)) is not Status.PENDING
        )

    def _ticket(self) -> Ticket | None:
        return Ticket(self.stream.handle, self.sequence, self.name) if self.sequence > 0 else None

    def ended(self) -> Sequence[Claim]:
        """It is over: what is to be given back."""
        if self.left:
            return (self,)
        self.uses, self.kept = (), None  # later launches have taken all over
        return ()

    def release(self) -> None:
        """Give back what it owns; only when it can no longer be using it."""
        if self.left:
            self.stream.device.leases.release((self,))
        else:
            self.uses, self.kept = (), None

    def wait(self, timeout_s: float | None = None) -> PeertileError | None:
        """As any submission, at once where the stream is known to have passed it without a fault: of launches that
        follow each other closely the first wait finds out about many."""
        if not self.is_finished and self.sequence > 0:
            stream = self.stream
            if stream.device.driver.is_sound(stream.handle, self.sequence):
                self.is_finished = True
                if self.left:
                    self.release()
                else:
                    self.uses, self.kept = (), None
                return None
        return super().wait(timeout_s)

    def abandon(self) -> None:
        """Its enqueuing ended part way: it keeps what it owns until the last operation of the stream has left it."""
        driver = self.driver
        try:
            self.sequence = driver.last_ticket(self.stream.handle).sequence or _NOTHING
            if self.is_done():
                self.release()
        except UsageError:
            # The driver refuses every call: the device is gone, or this is one of its callbacks.
            if self.sequence > 0:
                leak(self)
            else:
                self.sequence = _NOTHING
                self.is_finished = True
                self.release()

    def _told(self, failing: FaultRecord) -> PeertileError:
        if failing.sequence == self.sequence:
            error = self.maker[0](failing, *self.maker[1:])
            assert isinstance(error, PeertileError)
            return error
        return explain(failing, self.name)

    # ---------------------------------------------------------------- as a lease

    @property
    def holder(self) -> Claim:
        """Who to wait for."""
        return self

    def wait_done(self) -> None:
        """Block until it has left its stream, however it ended."""
        driver, handle = self.driver, self.stream.handle
        # Without a number it is being enqueued by another thread: whatever that stream does now ends no earlier.
        if self.sequence > 0:
            driver.wait(Ticket(handle, self.sequence, self.name))
        elif self.sequence == 0:
            driver.wait(driver.last_ticket(handle))
