"""A range of device memory and who may free it. Knows nothing of dtypes or shapes.

Invariant: the memory is freed at most once, and never while a lease on it is held: a submission holds
its leases, a lease holds its storage, so a storage with work in flight cannot be collected.

A storage also knows its *borrows*: the views and frozen shares that the user still holds. Writing a range
exclusively needs a range that nobody borrows.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from peertile.errors import UsageError
from peertile.runtime.checks import not_pickled
from peertile.runtime.site import Site

if TYPE_CHECKING:
    from peertile.runtime.argument import Use
    from peertile.runtime.lease import Claim
    from peertile.runtime.stream import Stream

__all__ = ["Borrow", "Storage", "changes"]

_keys = itertools.count(1)


class _Changes:
    """Whether anything changed of what standing leases found out about their storages: that one stream alone uses them,
    that none is closed, none lent out. `mark` is then another object, which costs one look for any number of them; an
    object and no count, since what two threads add to one can be lost."""

    __slots__ = ("mark",)

    def __init__(self) -> None:
        self.mark = object()

    def note(self) -> None:
        """Something changed, of any storage."""
        self.mark = object()


changes = _Changes()


class Borrow:
    """A view or frozen share of the bytes at addresses [low, high) that the user holds. It ends when its last handle
    goes."""

    __slots__ = ("__weakref__", "high", "key", "low", "site", "what")

    def __init__(self, low: int, high: int, what: str, site: Site | None) -> None:
        self.key = next(_keys)
        self.low = low
        self.high = high
        self.what = what
        self.site = site


class Storage:
    """`nbytes` bytes at `address`; `release` frees them, `owner` is kept alive instead where it is None."""

    __slots__ = (
        "__weakref__",
        "_release",
        "address",
        "borrows",
        "channel_stream",
        "claims",
        "closed",
        "device",
        "name",
        "nbytes",
        "owner",
    )

    __reduce_ex__ = not_pickled

    def __init__(
        self,
        device: Any,
        address: int,
        nbytes: int,
        *,
        release: Callable[[int], None] | None,
        owner: Any = None,
        name: str = "storage",
    ) -> None:
        self.device = device
        self.address = address
        self.nbytes = nbytes
        self.name = name
        self.owner = owner
        self.claims: dict[Stream, dict[Use, Claim]] = {}
        """Who uses which bytes: for each stream, the last lease on each use. A stream runs in order, so the last one
        stands for those before it, and work of one stream needs no look at them at all. Storages that overlap
        (`aliases.py`) have one dict."""
        self.borrows: dict[int, weakref.ref[Borrow]] = {}
        self.channel_stream: Stream | None = None
        """Where the words of a channel were used last: operations that name no stream follow."""
        self.closed: str | None = None
        self._release = release

    @property
    def leases(self) -> list[Claim]:
        """The leases that are held, of each stream and each way of using the bytes the last."""
        return list(dict.fromkeys(lease for held in list(self.claims.values()) for lease in list(held.values())))

    def wait_done(self) -> None:
        """Until what holds the leases now has ended; within the bound of a wait."""
        for lease in self.leases:
            lease.holder.wait_done()

    def borrow(self, start: int, end: int, what: str, site: Site | None) -> Borrow:
        """Note a new view or share of bytes [start, end); it is forgotten when the result is collected."""
        borrow = Borrow(self.address + start, self.address + end, what, site)
        # Popping from a dict is atomic, so the callback is safe at whatever point collection happens. Of storages that
        # turn out to overlap later, the dict may be another one by then: a dead reference there counts for nothing.
        self.borrows[borrow.key] = weakref.ref(borrow, partial(_forget, self.borrows, borrow.key))
        changes.note()
        return borrow

    def borrowed(self, low: int, high: int, exempt: tuple[int, ...]) -> Borrow | None:
        """A live borrow of bytes at addresses [low, high) that is not among `exempt`."""
        for key, ref in list(self.borrows.items()):
            borrow = ref()
            if borrow is None:
                self.borrows.pop(key, None)
            elif key not in exempt and borrow.low < high and low < borrow.high:
                return borrow
        return None

    def close(self, reason: str) -> None:
        """End the storage: later use raises UsageError with `reason`. The memory goes at once."""
        if self.closed is None:
            self.closed = reason
            changes.note()
            self._free()

    def check_alive(self, user: str) -> None:
        """UsageError if the storage was closed."""
        if self.closed is not None:
            raise UsageError(f"{user}: {self.name} was {self.closed}; use it before that")

    def _free(self) -> None:
        release, self._release = self._release, None
        if release is not None and self.nbytes:
            release(self.address)

    def __del__(self) -> None:
        # Module teardown may have taken the driver's parts away, and the process is going anyway; and in a forked
        # child the memory is the parent's, whose driver refuses.
        with contextlib.suppress(AttributeError, TypeError, UsageError):
            self._free()


def _forget(borrows: dict[int, weakref.ref[Borrow]], key: int, ref: weakref.ref[Borrow]) -> None:
    borrows.pop(key, None)
