"""A range of device memory and who may free it. Knows nothing of dtypes or shapes.

Invariant: the memory is freed at most once, and never while a lease on it is held: a submission holds
its leases, a lease holds its storage, so a storage with work in flight cannot be collected.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from peertile.errors import UsageError

if TYPE_CHECKING:
    from peertile.runtime.lease import Lease

__all__ = ["Storage"]


class Storage:
    """`nbytes` bytes at `address`; `release` frees them, `owner` is kept alive instead where it is None."""

    __slots__ = ("__weakref__", "_release", "address", "closed", "device", "leases", "name", "nbytes", "owner")

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
        self.leases: list[Lease] = []
        self.closed: str | None = None
        self._release = release

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
        # Module teardown may have taken the driver's parts away; the process is going anyway.
        with contextlib.suppress(AttributeError, TypeError):
            self._free()
