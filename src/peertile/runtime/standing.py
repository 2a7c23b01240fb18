"""The lease of one who does the same on the same stream again and again. Decides no conflicts: `lease.py` does.

Entering the claims of each storage and leaving them again is most of what a small launch costs on the host. A standing
lease stays in the claims between two uses and *rests*: whoever looks at it then finds an operation that is over. To use
it once more takes one look, whether anything changed anywhere (`storage.changes`), else one at each of its storages.

    RESTING ──enter──> HELD ──leave──> RESTING        dropped with its owner
                             └──enqueued───> UNDER WAY ──the stream has passed it──> RESTING
                             ^─────enter───────┘
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from peertile.runtime.lease import Lease, claims_lock
from peertile.runtime.storage import changes

if TYPE_CHECKING:
    from peertile.runtime.argument import Use
    from peertile.runtime.driver import StreamHandle
    from peertile.runtime.launched import Launched
    from peertile.runtime.site import Site
    from peertile.runtime.storage import Storage
    from peertile.runtime.stream import Stream

__all__ = ["Resting", "Standing"]


class Resting(Lease):
    """A lease that is held while `active`, and while its stream has not passed `sequence`, the last operation that was
    enqueued under it."""

    __slots__ = ("active",)

    def __init__(self, name: str, stream: Stream, site: Site | None, uses: Sequence[Use]) -> None:
        super().__init__(name, stream, site, uses)
        self.active = False

    def is_done(self) -> bool:
        return not self.active and (self.sequence <= 0 or super().is_done())

    def wait_done(self) -> None:
        if self.active or self.sequence > 0:
            super().wait_done()


class Standing:
    """A lease on `uses` for operations of `stream`: one at a time that runs on the thread of its caller (`enter`,
    `leave`), or any number, each enqueued behind the last (`submit`). What was enqueued keeps this object until it is
    over."""

    __slots__ = ("_mark", "_storages", "_uses", "lease")

    def __init__(self, name: str, stream: Stream, uses: Sequence[Use]) -> None:
        self.lease = Resting(name, stream, None, ())
        self._uses = tuple(uses)
        self._mark: object = None
        """What `changes` had when the storages were looked at."""
        found: dict[Storage, bool] = {}
        for use in uses:
            found[use.storage] = found.get(use.storage, False) or use.exclusive
        self._storages = tuple(found.items())

    def enter(self, site: Site | None, name: str | None = None) -> bool:
        """Whether it is held now, by what is called `name`; False while another thread holds it, or what was enqueued
        under it has to keep what is left of it. LeaseError as for a new lease."""
        lease = self.lease
        with claims_lock:
            if lease.active:
                return False
            # Entries that later work of the stream took over are missing in `left`.
            if lease.left == len(self._uses):
                mark = changes.mark
                if mark is not self._mark:
                    for storage, is_written in self._storages:
                        if len(storage.claims) != 1 or storage.closed is not None or (is_written and storage.borrows):
                            break  # another stream's work, an end, a borrow: to be looked at properly
                    else:
                        self._mark = mark
                if mark is self._mark:
                    if name is not None:
                        lease.name = name
                    lease.site = site
                    lease.active = True
                    lease.sequence = 0
                    return True
            if not lease.is_done():
                return False  # and what is left of it is told of as what is under way, not as this
            if name is not None:
                lease.name = name
            lease.site = site
            lease.sequence = 0
            leases = lease.stream.device.leases
            leases.release((lease,))
            lease.uses = self._uses
            leases.claim(lease)
            lease.active = True
        return True

    def leave(self) -> bool:
        """The operation is over; whether it can be entered again."""
        self.lease.active = False
        return True

    def submit(self, launched: Launched, enqueue: Callable[[StreamHandle, Any, Any], int], what: Any, how: Any) -> None:
        """Enqueue what `launched` stands for, by `enqueue`, which gives its number: under this lease, or under one of
        its own where this is in use. LeaseError as for a new lease. Whatever interrupts it may leave the operation in
        its stream, so what it uses stays its own until all that the stream holds by then is over."""
        stream = launched.stream
        stands = False
        try:
            stream.admit(launched)
            stands = self.enter(launched.site, launched.name)
            if stands:
                launched.kept = self
            else:
                stream.device.leases.claim(launched)
            launched.sequence = sequence = enqueue(stream.handle, what, how)
        except BaseException:
            launched.abandon()
            sequence = max(launched.sequence, 0)  # negative: neither it nor anything before it is enqueued
            raise
        finally:
            if stands:
                lease = self.lease
                lease.sequence = sequence
                lease.active = False

    def __del__(self) -> None:
        # What is in the claims keeps the storages alive, which hold the claims. Of an interrupted operation, whose
        # lease is held still, the submission gives it back.
        with contextlib.suppress(AttributeError, TypeError):  # the modules are gone
            if not self.lease.active:
                self.lease.stream.device.leases.release((self.lease,))
