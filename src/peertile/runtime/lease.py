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
from typing import TYPE_CHECKING, Protocol

from peertile.errors import LeaseError
from peertile.runtime.driver import Status, Ticket
from peertile.runtime.site import Site, describe
from peertile.runtime.storage import changes

if TYPE_CHECKING:
    from peertile.runtime.argument import Use
    from peertile.runtime.storage import Storage
    from peertile.runtime.stream import Stream

__all__ = ["Claim", "Lease", "LeaseTable", "check_unique", "claims_lock"]


class Claim(Protocol):
    """Who uses bytes: a lease, or a submission that is its own (`launched.py`)."""

    name: str
    sequence: int
    stream: Stream
    site: Site | None
    uses: Sequence[Use]
    left: int
    """Entries of `Storage.claims` that are still its own: later work of its stream takes them over one by one."""
    size: int
    """Entries that it made."""

    @property
    def holder(self) -> Claim:
        """Who to wait for."""

    def is_done(self) -> bool:
        """Whether the driver says that the operation has left its stream; takes no lock of ours."""

    def wait_done(self) -> None:
        """Block until the operation has left its stream, however it ended."""


class Lease:
    """The right of one operation on one stream to use its byte ranges, until the stream has got past it.

    `sequence` is the operation's number in its stream; 0 while it is being enqueued, or runs on the thread of its
    caller.
    """

    __slots__ = ("left", "name", "sequence", "site", "size", "stream", "uses")

    def __init__(self, name: str, stream: Stream, site: Site | None, uses: Sequence[Use]) -> None:
        self.name = name
        self.stream = stream
        self.site = site
        self.uses = uses
        self.sequence = 0
        self.left = self.size = 0

    @property
    def holder(self) -> Claim:
        """Who to wait for."""
        return self

    def _ticket(self) -> Ticket:
        return Ticket(self.stream.handle, self.sequence, self.name)

    def is_done(self) -> bool:
        """Whether the driver says that the operation has left its stream; takes no lock of ours."""
        return self.sequence != 0 and self.stream.device.driver.query(self._ticket()) is not Status.PENDING

    def wait_done(self) -> None:
        """Block until the operation has left its stream, however it ended."""
        driver = self.stream.device.driver
        # Without a number it is running on another thread: whatever that stream does now ends no earlier.
        driver.wait(self._ticket() if self.sequence else driver.last_ticket(self.stream.handle))


claims_lock = threading.RLock()
"""Guards every storage's `claims`, of all devices, since devices can share a storage. Nothing of ours is
locked under it. It may be taken again by the thread that has it: collection can run anywhere, and finalisers of
the user may call us."""


class _Claiming:
    """Whether a lease is being entered: a finaliser may give others back meanwhile, on the same thread."""

    active = False


_claiming = _Claiming()


class LeaseTable:
    """The leases on a device's storages."""

    __slots__ = ("lock",)

    def __init__(self) -> None:
        self.lock = claims_lock

    def acquire(self, name: str, stream: Stream, site: Site | None, uses: Sequence[Use]) -> Lease:
        """One lease on all of `uses`, or LeaseError and nothing changed."""
        lease = Lease(name, stream, site, uses)
        self.claim(lease)
        return lease

    def claim(self, lease: Claim) -> None:
        """Enter a lease for all of its uses, or LeaseError and nothing changed."""
        stream, uses = lease.stream, lease.uses
        with self.lock:
            for use in uses:
                storage = use.storage
                claims = storage.claims
                # By far the most: nobody uses the storage, or this stream alone, which is ordered.
                if (
                    (claims and (stream not in claims or len(claims) != 1))
                    or storage.closed is not None
                    or use.channel
                    or (use.exclusive and storage.borrows)
                ):
                    self._check_all(lease)
                    break
            _claiming.active = True  # what is found below stays where it is
            lease.left = len(uses)
            for use in uses:
                claims = use.storage.claims
                held = claims.get(stream)
                if held is None:
                    if claims:  # of another stream, which had the storage to itself
                        changes.note()
                    claims[stream] = {use: lease}
                    continue
                before = held.get(use)
                if before is not None:
                    before.left -= 1
                held[use] = lease
            lease.size = lease.left
            _claiming.active = False

    def again(self, lease: Lease, name: str, site: Site | None, uses: Sequence[Use]) -> bool:
        """Whether a lease of the same submission goes on as that of its next operation: for the same uses, of which
        nobody else has taken one over or made one in the meantime."""
        with self.lock:
            if lease.left != lease.size or lease.uses != uses:
                return False
            for use in uses:
                storage = use.storage
                if len(storage.claims) != 1 or storage.closed is not None or (use.exclusive and storage.borrows):
                    return False
            lease.name, lease.site, lease.sequence = name, site, 0
            return True

    def _check_all(self, lease: Claim) -> None:
        """LeaseError if a use of the lease conflicts with another."""
        stream = lease.stream
        for use in lease.uses:
            storage = use.storage
            if storage.closed is not None:
                storage.check_alive(lease.name)
            claims = storage.claims
            if claims and (len(claims) > 1 or stream not in claims):
                self._check(storage, use, lease)
            if storage.borrows and use.exclusive:
                check_unique(use, f"{lease.name} on {stream.name} ({describe(lease.site)})")
        for use in lease.uses:
            if use.channel:
                use.storage.channel_stream = stream

    def release(self, leases: Sequence[Claim]) -> None:
        """Give leases back; giving one back twice is harmless."""
        with self.lock:
            for lease in leases:
                uses, lease.uses = lease.uses, ()
                if not lease.left:
                    continue
                stream = lease.stream
                lease.left = 0
                for use in uses:
                    claims = use.storage.claims
                    held = claims.get(stream)
                    if held is not None and held.get(use) is lease:
                        del held[use]
                        if not held and not _claiming.active:
                            del claims[stream]

    def conflicting_stream(self, uses: Sequence[Use]) -> Stream | None:
        """A stream whose running work conflicts with `uses`: an operation that may choose goes there."""
        with self.lock:
            for use in uses:
                for stream, held in use.storage.claims.items():
                    for theirs, other in held.items():
                        if _conflict(use, theirs) and not other.is_done():
                            return stream
        return None

    def _check(self, storage: Storage, use: Use, lease: Claim) -> None:
        stream = lease.stream
        for holder, held in storage.claims.items():
            if holder is stream:
                continue
            seen = stream.seen.get(holder.id, 0)
            for theirs, other in held.items():
                if not _conflict(use, theirs) or 0 < other.sequence <= seen:
                    continue
                if not other.is_done():
                    raise LeaseError(_message(use, lease, theirs, other))


def _conflict(use: Use, theirs: Use) -> bool:
    """Whether two uses must be ordered. By address: storages of foreign memory may overlap, and share their claims."""
    if theirs.high <= use.low or use.high <= theirs.low:
        return False
    if use.channel or theirs.channel:
        return True
    return not use.lifetime_only and not theirs.lifetime_only and (use.writes or theirs.writes)


def check_unique(use: Use, who: str) -> None:
    """LeaseError if the user holds a view or a frozen share of what is to be written."""
    borrow = use.storage.borrowed(use.low, use.high, use.exempt)
    if borrow is not None:
        del borrow
        gc.collect()  # a handle in a circle, of an exception's traceback for instance, is not held by anybody
        borrow = use.storage.borrowed(use.low, use.high, use.exempt)
    if borrow is not None:
        raise LeaseError(
            f"lease: {who} would write {use.storage.name}, but {borrow.what} of it, made at "
            f"{describe(borrow.site)}, is still held; let go of it first, or write through it"
        )


def _message(use: Use, lease: Claim, theirs: Use, other: Claim) -> str:
    wants = "use as a channel" if use.channel else "write" if use.writes else "read"
    has = "uses it as a channel" if theirs.channel else "writes it" if theirs.writes else "reads it"
    return (
        f"lease: {lease.name} on {lease.stream.name} ({describe(lease.site)}) would {wants} {use.storage.name}, "
        f"but {other.name} on {other.stream.name} ({describe(other.site)}) still {has}; "
        "wait for that operation, order the streams with an event, or run both on one stream"
    )
