"""Leases: which submission may use which bytes until when. Decides conflicts; never waits for a device.

A submission takes a lease on every byte range it uses before anything is enqueued, and gives them
back when a ticket proves completion. Rules: work on one stream is ordered, so it never conflicts;
reads share; any other overlap with work that is still running on another stream is refused at once,
naming both operations. Channels (signals, counters, barriers, mailboxes) are taken exclusively: one
launch at a time, since two launches would count the same epochs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from peertile.errors import LeaseError
from peertile.runtime.argument import Use

if TYPE_CHECKING:
    from peertile.runtime.storage import Storage

__all__ = ["Holder", "Lease", "LeaseTable"]


class Holder(Protocol):
    """What holds leases: a submission."""

    @property
    def name(self) -> str:
        """Names the operation for people."""

    @property
    def stream_id(self) -> int:
        """Identity of the stream it runs on."""

    @property
    def stream_name(self) -> str:
        """Names the stream for people."""

    def is_done(self) -> bool:
        """Whether a ticket proves that the operation has completed."""

    def wait_done(self) -> None:
        """Block until it has completed, however it ended."""


@dataclass(slots=True, eq=False)
class Lease:
    """The right of `holder` to use one byte range."""

    use: Use
    holder: Holder


class LeaseTable:
    """The leases of one device. `lock` guards every storage's `leases` list; nothing is called under it
    but `is_done` of a holder, which takes no lock."""

    __slots__ = ("lock",)

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def acquire(self, holder: Holder, uses: Iterable[Use]) -> list[Lease]:
        """Take a lease for each use, or none: LeaseError names the two operations and streams."""
        taken: list[Lease] = []
        with self.lock:
            for use in uses:
                storage = use.storage
                storage.check_alive(holder.name)
                if storage.leases:
                    blocking = self._conflict(storage, use, holder)
                    if blocking is not None:
                        for lease in taken:
                            lease.use.storage.leases.remove(lease)
                        raise LeaseError(self._message(use, holder, blocking))
                lease = Lease(use, holder)
                storage.leases.append(lease)
                taken.append(lease)
        return taken

    def release(self, leases: Iterable[Lease]) -> None:
        """Give leases back; giving one back twice is harmless."""
        with self.lock:
            for lease in leases:
                held = lease.use.storage.leases
                if lease in held:
                    held.remove(lease)

    def _conflict(self, storage: Storage, use: Use, holder: Holder) -> Lease | None:
        for lease in storage.leases:
            if lease.holder is holder or lease.holder.stream_id == holder.stream_id:
                continue
            other = lease.use
            if other.end <= use.start or use.end <= other.start:
                continue
            if use.channel or other.channel:
                if not lease.holder.is_done():
                    return lease
                continue
            if use.lifetime_only or other.lifetime_only or not (use.writes or other.writes):
                continue
            if not lease.holder.is_done():
                return lease
        return None

    @staticmethod
    def _message(use: Use, holder: Holder, blocking: Lease) -> str:
        wants = "use as a channel" if use.channel else "write" if use.writes else "read"
        has = "uses it as a channel" if blocking.use.channel else "writes it" if blocking.use.writes else "reads it"
        return (
            f"lease: {holder.name} on {holder.stream_name} would {wants} {use.storage.name}, "
            f"but {blocking.holder.name} on {blocking.holder.stream_name} still {has}; "
            "wait for that operation, or run both on one stream"
        )
