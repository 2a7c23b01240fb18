"""A pool of a device's memory: blocks that were given back are kept for the next taker, up to a threshold.

Off by default (threshold 0): the cpu driver's allocator is one already. Invariant: a block is in the pool only
when no lease is on it, since a storage gives it back when it is collected; so no block needs a stream's order.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from peertile.errors import ArgumentError

if TYPE_CHECKING:
    from peertile.runtime.driver import DriverDevice

__all__ = ["MemoryPool", "PoolStats"]

_SMALLEST = 256


class PoolStats(NamedTuple):
    """Blocks and bytes of a pool: kept for reuse now, handed out again, and taken from the driver."""

    cached_bytes: int
    cached_blocks: int
    hits: int
    misses: int
    release_threshold: int


class MemoryPool:
    """Memory of one device. `release_threshold`: bytes of free blocks that are kept; what is above goes back.

    >>> import peertile as pt
    >>> pt.current_device().pool.stats().release_threshold
    0
    """

    def __init__(self, driver: DriverDevice) -> None:
        self._driver = driver
        self._threshold = 0
        # Appending to and popping from a deque is atomic: blocks come back from finalisers, where no lock may be taken.
        self._free: dict[int, deque[int]] = {}
        self._hits = self._misses = 0
        self._lock = threading.RLock()
        """Guards the counters and the dict of `_free`."""

    @property
    def release_threshold(self) -> int:
        """Bytes of free blocks that are kept."""
        return self._threshold

    @release_threshold.setter
    def release_threshold(self, nbytes: int) -> None:
        if nbytes < 0:
            raise ArgumentError(f"release_threshold: expected bytes >= 0, got {nbytes}")
        self._threshold = nbytes
        self.trim(nbytes)

    def take(self, nbytes: int) -> tuple[int, Callable[[int], None]]:
        """Address of `nbytes` of memory, and how to give it back. AllocationError."""
        if not self._threshold:
            return self._driver.allocate(nbytes), self._driver.free
        size = _class_of(nbytes)
        with self._lock:
            blocks = self._free.setdefault(size, deque())
            if blocks:
                self._hits += 1
                address = blocks.popleft()
                self._driver.lend(address, size)
                return address, partial(self._give, size)
            self._misses += 1
        return self._driver.allocate(size), partial(self._give, size)

    def _give(self, size: int, address: int) -> None:
        if self._cached() + size <= self._threshold:
            self._driver.take_back(address, size)
            self._free[size].append(address)
        else:
            self._driver.free(address)

    def _cached(self) -> int:
        return sum(size * len(blocks) for size, blocks in list(self._free.items()))

    def trim(self, keep_bytes: int = 0) -> None:
        """Give free blocks back to the driver, largest first, until at most `keep_bytes` are kept."""
        with self._lock:
            for size in sorted(self._free, reverse=True):
                blocks = self._free[size]
                while blocks and self._cached() > keep_bytes:
                    self._driver.free(blocks.popleft())

    def stats(self) -> PoolStats:
        """What is kept and how often it was of use."""
        with self._lock:
            blocks = sum(len(b) for b in self._free.values())
            return PoolStats(self._cached(), blocks, self._hits, self._misses, self._threshold)


def _class_of(nbytes: int) -> int:
    """The size of block for `nbytes`: an eighth of its power of two apart, so that little is lost."""
    if nbytes <= _SMALLEST:
        return _SMALLEST
    step = max(1 << (nbytes.bit_length() - 4), 64)
    return -(-nbytes // step) * step
