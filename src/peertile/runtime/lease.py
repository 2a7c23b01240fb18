"""Leases: which operation may use which bytes until when. Decides conflicts; never waits for a device.

An operation takes one lease on all byte ranges that it uses before it is enqueued; its submission gives the
lease back when a ticket proves completion. Rules:

- work on one stream is ordered, and so is work on a stream that has waited for an event recorded behind the
  other work: neither ever conflicts;
- reads share; any other overlap with work still running on another stream is refused at once, and the error
  names both operations, both streams and both source lines;
- channels (signals, counters, barriers, mailboxes) are taken exclusively: one launch at a time, since two
  launches would count the same epochs;
- peer-visible objects are kept alive, no more: their accesses are ordered by the program's own signals;
- an exclusive use needs bytes that the user has not lent out as a view or a frozen share.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from peertile.errors import LeaseError
from peertile.runtime.driver import Status, Ticket
from peertile.runtime.site import Site, describe

if TYPE_CHECKING:
    from peertile.runtime.argument import Use
    from peertile.runtime.storage import Storage
    from peertile.runtime.stream import Stream

__all__ = ["Lease", "LeaseTable", "check_unique"]


class Lease:
    """The right of one operation on one stream to use its byte ranges, until its ticket is not pending.

    `ticket` is None while the operation is being enqueued, or runs on the thread of its caller.
    """

    __slots__ = ("name", "site", "stream", "ticket", "uses")

    def __init__(self, name: str, stream: Stream, site: Site | None, uses: Sequence[Use]) -> None:
        self.name = name
        self.stream = stream
        self.site = site
        self.uses = uses
        self.ticket: Ticket | None = None

    @property
    def holder(self) -> Lease:
        """Who to wait for."""
        return self

    def is_done(self) -> bool:
        """Whether a ticket proves that the operation has left its stream; takes no lock of ours."""
        ticket = self.ticket
        return ticket is not None and self.stream.device.driver.query(ticket) is not Status.PENDING

    def wait_done(self) -> None:
        """Block until the operation has left its stream, however it ended."""
        driver = self.stream.device.driver
        # Without a ticket it is running on another thread: whatever that stream does now ends no earlier.
        driver.wait(self.ticket or driver.last_ticket(self.stream.handle))


_lock = threading.RLock()
"""Guards every storage's `leases` list, of all devices, since devices can share a storage. Nothing of ours is
locked under it. It may be taken again by the thread that has it: collection can run anywhere, and finalisers of
the user may call us."""


class LeaseTable:
    """The leases on a device's storages."""

    __slots__ = ("lock",)

    def __init__(self) -> None:
        self.lock = _lock

    def acquire(self, name: str, stream: Stream, site: Site | None, uses: Sequence[Use]) -> Lease:
        """One lease on all of `uses`, or LeaseError and nothing changed."""
        lease = Lease(name, stream, site, uses)
        with self.lock:
            for use in uses:
                storage = use.storage
                if storage.closed is not None:
                    storage.check_alive(name)
                holders = storage.holders
                if holders and (len(holders) > 1 or stream not in holders):
                    self._check(storage, use, lease)
                if storage.borrows and use.exclusive:
                    check_unique(use, f"{name} on {stream.name} ({describe(site)})")
            for use in uses:
                storage = use.storage
                storage.leases.append(lease)
                storage.holders[stream] = storage.holders.get(stream, 0) + 1
                if use.channel:
                    storage.channel_stream = stream
        return lease

    def release(self, leases: Sequence[Lease]) -> None:
        """Give leases back; giving one back twice is harmless."""
        with self.lock:
            for lease in leases:
                for use in lease.uses:
                    storage = use.storage
                    try:
                        storage.leases.remove(lease)  # near the front: work ends in the order it was enqueued
                    except ValueError:
                        continue
                    left = storage.holders[lease.stream] - 1
                    if left:
                        storage.holders[lease.stream] = left
                    else:
                        del storage.holders[lease.stream]

    def conflicting_stream(self, uses: Sequence[Use]) -> Stream | None:
        """A stream whose running work conflicts with `uses`: an operation that may choose goes there."""
        with self.lock:
            for use in uses:
                for other in use.storage.leases:
                    if _conflict(use.storage, use, other) and not other.is_done():
                        return other.stream
        return None

    def _check(self, storage: Storage, use: Use, lease: Lease) -> None:
        stream = lease.stream
        for other in storage.leases:
            if other.stream is stream or not _conflict(storage, use, other):
                continue
            if other.ticket is not None and stream.seen.get(other.stream.id, 0) >= other.ticket.sequence:
                continue
            if not other.is_done():
                raise LeaseError(_message(use, lease, other))


def _conflict(storage: Storage, use: Use, other: Lease) -> bool:
    """Whether `use` and a use of `other` must be ordered."""
    for theirs in other.uses:
        if theirs.storage is not storage or theirs.end <= use.start or use.end <= theirs.start:
            continue
        if use.channel or theirs.channel:
            return True
        if not use.lifetime_only and not theirs.lifetime_only and (use.writes or theirs.writes):
            return True
    return False


def check_unique(use: Use, who: str) -> None:
    """LeaseError if the user holds a view or a frozen share of what is to be written."""
    borrow = use.storage.borrowed(use.start, use.end, use.exempt)
    if borrow is not None:
        del borrow
        gc.collect()  # a handle in a circle, of an exception's traceback for instance, is not held by anybody
        borrow = use.storage.borrowed(use.start, use.end, use.exempt)
    if borrow is not None:
        raise LeaseError(
            f"lease: {who} would write {use.storage.name}, but {borrow.what} of it, made at "
            f"{describe(borrow.site)}, is still held; let go of it first, or write through it"
        )


def _message(use: Use, lease: Lease, other: Lease) -> str:
    theirs = next(u for u in other.uses if _conflict(use.storage, use, _single(other, u)))
    wants = "use as a channel" if use.channel else "write" if use.writes else "read"
    has = "uses it as a channel" if theirs.channel else "writes it" if theirs.writes else "reads it"
    return (
        f"lease: {lease.name} on {lease.stream.name} ({describe(lease.site)}) would {wants} {use.storage.name}, "
        f"but {other.name} on {other.stream.name} ({describe(other.site)}) still {has}; "
        "wait for that operation, order the streams with an event, or run both on one stream"
    )


def _single(lease: Lease, use: Use) -> Lease:
    return Lease(lease.name, lease.stream, lease.site, (use,))
