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
from peertile.runtime.site import Site

if TYPE_CHECKING:
    from peertile.runtime.argument import Use
    from peertile.runtime.lease import Lease
    from peertile.runtime.stream import Stream

__all__ = ["Borrow", "Storage"]

_keys = itertools.count(1)


class Borrow:
    """A view or frozen share of bytes [start, end) that the user holds. It ends when its last handle goes."""

    __slots__ = ("__weakref__", "end", "key", "site", "start", "what")

    def __init__(self, start: int, end: int, what: str, site: Site | None) -> None:
        self.key = next(_keys)
        self.start = start
        self.end = end
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
        self.claims: dict[Stream, dict[Use, Lease]] = {}
        """Who uses which bytes: for each stream, the last lease on each use. A stream runs in order, so the last one
        stands for those before it, and work of one stream needs no look at them at all."""
        self.borrows: dict[int, weakref.ref[Borrow]] = {}
        self.channel_stream: Stream | None = None
        """Where the words of a channel were used last: operations that name no stream follow."""
        self.closed: str | None = None
        self._release = release

    @property
    def leases(self) -> list[Lease]:
        """The leases that are held, of each stream and each way of using the bytes the last."""
        return list(dict.fromkeys(lease for held in list(self.claims.values()) for lease in list(held.values())))

    def borrow(self, start: int, end: int, what: str, site: Site | None) -> Borrow:
        """Note a new view or share of the user's; it is forgotten when the result is collected."""
        borrow = Borrow(start, end, what, site)
        # Popping from a dict is atomic, so the callback is safe at whatever point collection happens.
        self.borrows[borrow.key] = weakref.ref(borrow, partial(_forget, self.borrows, borrow.key))
        return borrow

    def borrowed(self, start: int, end: int, exempt: tuple[int, ...]) -> Borrow | None:
        """A live borrow of bytes of [start, end) that is not among `exempt`."""
        for key, ref in list(self.borrows.items()):
            borrow = ref()
            if borrow is not None and key not in exempt and borrow.start < end and start < borrow.end:
                return borrow
        return None

    def close(self, reason: str) -> None:
        """End the storage: later use raises UsageError with `reason`. The memory goes at once."""
        if self.closed is None:
            self.closed = reason
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
