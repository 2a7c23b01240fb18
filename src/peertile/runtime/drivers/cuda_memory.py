"""Memory of the cuda driver: device memory from a pool, and pinned host memory for staging and for control words.

Nothing here waits for running work: device memory comes stream-ordered from a stream that runs nothing else, and
pinned memory is kept until the device is closed. Small blocks are cut from slabs of mapped memory, which costs no call
of the NVIDIA driver and, unlike memory of a pool, holds words that streams themselves write and wait for. Segments are
in `cuda_segments.py`.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from peertile.errors import AllocationError, ArgumentError, UsageError
from peertile.runtime.driver import MemoryStats, ShareKind
from peertile.runtime.drivers.cuda_api import CudaApi, CudaError

__all__ = ["CONTROL_ALIGN", "Heap", "Pinned", "SideStream", "words_at"]

CONTROL_ALIGN: Final = 64
_ALIGN: Final = 512
_SLAB: Final = 8 << 20
_SMALL: Final = 64 << 10  # largest block that is cut from a slab
_LEAST: Final = 256
_BOUND_S: Final = 30.0


def words_at(address: int, nbytes: int) -> memoryview:
    """Host memory as signed 8-byte words; nobody frees it when the view goes."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B").cast("q")


class Pinned:
    """Blocks of pinned host memory, a power of two bytes each, cut from slabs and used again.

    `take` may call the driver, `give` never does.
    """

    def __init__(self, api: CudaApi, slab: int = _SLAB) -> None:
        self._api = api
        self._slab = slab
        self._lock = threading.RLock()  # protects all below; garbage collection may `give` while it is held
        self._free: dict[int, list[int]] = {}
        self._sizes: dict[int, int] = {}
        self._slabs: list[int] = []
        self._at = self._end = 0

    def take(self, nbytes: int) -> int:
        """Address of at least `nbytes`, aligned to 64 and on the host and on every device the same."""
        size = 1 << max(nbytes - 1, CONTROL_ALIGN - 1).bit_length()
        with self._lock:
            free = self._free.get(size)
            if free:
                return free.pop()
            if size >= self._slab:
                address = self._allocate(size)
            else:
                if self._at + size > self._end:
                    self._at = self._allocate(self._slab)
                    self._end = self._at + self._slab
                address = self._at
                self._at += size
            self._sizes[address] = size
            return address

    def _allocate(self, nbytes: int) -> int:
        try:
            address = self._api.allocate_host(nbytes)
        except CudaError as error:
            if not error.out_of_memory:
                raise
            raise AllocationError(
                f"pinned host memory: asked for {nbytes} bytes, the system has none ({error}); copy less at a time"
            ) from error
        self._slabs.append(address)
        return address

    def give(self, address: int) -> None:
        with self._lock:
            self._free.setdefault(self._sizes[address], []).append(address)

    def release(self) -> None:
        """Give back everything, in use or not; waits for running work."""
        for address in self._slabs:
            self._api.free_host(address)
        self._slabs.clear()


class SideStream:
    """A stream of the driver's own, for what must not wait for any stream of the user."""

    def __init__(self, api: CudaApi, priority: int) -> None:
        self._api = api
        self.cu = api.create_stream(priority)
        self.lock = threading.RLock()  # held by the thread that uses the stream

    def settle(self) -> None:
        """Wait, within a bound, for what was enqueued here; called with `lock` held."""
        if self._api.stream_idle(self.cu):
            return
        end = time.monotonic() + _BOUND_S
        pause = 0.0
        while not self._api.stream_idle(self.cu):
            if time.monotonic() > end:
                raise UsageError(
                    f"cuda: expected the device to do a fill or copy of the driver within {_BOUND_S:g} s, it is still "
                    "busy; programs that never end occupy all of it"
                )
            time.sleep(pause)
            pause = min(pause + 1e-5, 1e-3)


class Slabs:
    """Blocks of device memory, a power of two bytes each, cut from mapped slabs and used again; kept to the end."""

    def __init__(self, api: CudaApi, device: Any) -> None:
        self._api = api
        self._readers = [device]  # devices that may access the slabs; the first owns them
        self._size = max(api.granularity(device, ShareKind.FD), _SLAB)
        self._free: dict[int, list[int]] = {}
        self._slabs: list[tuple[int, Any]] = []
        self._at = self._end = 0

    @property
    def reserved(self) -> int:
        """Bytes held from the system."""
        return self._size * len(self._slabs)

    def take(self, size: int) -> int:
        """Address of `size` bytes, which is a power of two and what the block is aligned to."""
        free = self._free.get(size)
        if free:
            return free.pop()
        at = -(-self._at // size) * size
        if at + size > self._end:
            at = self._map()
        self._at = at + size
        return at

    def _map(self) -> int:
        api, size = self._api, self._size
        handle = api.create_memory(self._readers[0], size, ShareKind.FD)
        address = api.reserve(size, 0)
        api.map(address, size, handle)
        api.set_access(address, size, self._readers)
        self._slabs.append((address, handle))
        self._end = address + size
        return address

    def give(self, address: int, size: int) -> None:
        self._free.setdefault(size, []).append(address)

    def grant(self, device: Any) -> None:
        """Another device may access what is in the slabs, now and later."""
        self._readers.append(device)
        for address, _ in self._slabs:
            self._api.set_access(address, self._size, [device])

    def release(self) -> None:
        """Give everything back, in use or not; waits for running work."""
        for address, handle in self._slabs:
            self._api.unmap(address, self._size)
            self._api.free_reservation(address, self._size)
            self._api.release_memory(handle)
        self._slabs.clear()


class Heap:
    """Device memory of one device. `mapped` is whether the device has memory that can be mapped, for small blocks."""

    def __init__(self, api: CudaApi, device: Any, side: SideStream, limit: int, name: str, *, mapped: bool) -> None:
        self.limit = limit
        self._api = api
        self._side = side
        self._name = name
        self.pool = api.create_pool(device, (1 << 64) - 1)
        self._slabs = Slabs(api, device) if mapped else None
        self._small: dict[int, int] = {}  # blocks that came from the slabs
        self._lock = threading.Lock()  # protects the counts; nothing is taken under it
        self._used: dict[int, int] = {}
        self._freed: deque[tuple[int, int]] = deque()  # (address, bytes) given back, not yet to the pool
        self._in_use = self._peak = 0

    def allocate(self, nbytes: int) -> int:
        if nbytes < 0:
            raise ArgumentError(f"nbytes: expected an integer >= 0, got {nbytes}")
        self.settle()
        small = self._slabs is not None and nbytes <= _SMALL
        size = 1 << max(nbytes - 1, _LEAST - 1).bit_length() if small else -(-nbytes // _ALIGN) * _ALIGN
        size = max(size, _LEAST)
        if self._in_use + size > self.limit:
            raise self._no_memory(nbytes, None)
        address = self._take_small(size, nbytes) if small else self.take(size, nbytes)
        with self._lock:
            self._used[address] = size
            self._in_use += size
            self._peak = max(self._peak, self._in_use)
        return address

    def take(self, size: int, asked: int | None = None) -> int:
        """Memory that the statistics do not count: the driver's own. It can be used from any stream at once."""
        with self._side.lock:
            try:
                address = self._api.allocate(self.pool, size, self._side.cu)
            except CudaError as error:
                if not error.out_of_memory:
                    raise
                raise self._no_memory(size if asked is None else asked, error) from error
            self._side.settle()
            return address

    def _take_small(self, size: int, asked: int) -> int:
        assert self._slabs is not None
        with self._side.lock:
            try:
                address = self._slabs.take(size)
            except CudaError as error:
                if not error.out_of_memory:
                    raise
                raise self._no_memory(asked, error) from error
            self._small[address] = size
            return address

    def give(self, address: int) -> None:
        """Give back what `take` gave."""
        with self._side.lock:
            size = self._small.pop(address, 0)
            if size:
                assert self._slabs is not None
                self._slabs.give(address, size)
            else:
                self._api.free(address, self._side.cu)

    def grant(self, device: Any) -> None:
        """Let another device access this memory."""
        with self._side.lock:
            self._api.set_pool_access(self.pool, [device])
            if self._slabs is not None:
                self._slabs.grant(device)

    def reserved(self) -> int:
        """Bytes held from the system, in use or kept for later."""
        return self._api.pool_reserved(self.pool) + (0 if self._slabs is None else self._slabs.reserved)

    def release(self) -> None:
        """Give everything back to the system, at the end."""
        if self._slabs is not None:
            self._slabs.release()
        self._api.destroy_pool(self.pool)

    def free(self, address: int) -> None:
        """Never calls the driver: garbage collection may call it anywhere. `settle` does the rest."""
        size = self._used.pop(address, None)
        if size is None:
            raise UsageError(f"free: expected an address that allocate gave and that is not free, got {address:#x}")
        self._freed.append((address, size))

    def settle(self) -> None:
        """Hand to the pool what was freed."""
        while self._freed:
            try:
                address, size = self._freed.popleft()
            except IndexError:  # another thread was faster
                return
            with self._lock:
                self._in_use -= size
            self.give(address)

    def stats(self, reserved: Callable[[], int]) -> MemoryStats:
        with self._lock:
            return MemoryStats(self._in_use, self._peak, reserved(), self.limit, len(self._used))

    def _no_memory(self, asked: int, error: CudaError | None) -> AllocationError:
        free = self.limit - self._in_use
        others = ""
        if error is not None:
            free = min(free, self._api.memory_info()[0])
            others = " (other programs and libraries share the device)"
        return AllocationError(
            f"memory of {self._name}: asked for {asked} bytes, {self._in_use} of {self.limit} are in use, "
            f"{free} are free{others}; free some tensors or use smaller ones"
        )
