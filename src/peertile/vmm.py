"""Virtual memory by hand: physical memory, addresses and mappings as objects of their own, on cpu and on GPUs.

A heap or a pool does this for you. By hand it is for what they do not do: one memory at two addresses, memory that
grows behind one address range, memory of several devices side by side. The life of a mapping::

    PhysicalMemory ──┐
                     ├─ map ─> Mapping ── tensor, allow, forbid ── unmap ─> free the addresses, release the memory
    Reservation ─────┘

Tensors of a mapping are leased like any other, so a mapping ends no sooner than the kernels that use it. Two mappings
of one memory are two tensors to the leases: what orders accesses through one and through the other is yours
(`T.unsafe.fence_alias` within a kernel, the order of a stream between kernels).
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from math import prod
from types import TracebackType
from typing import Any, Self

from peertile.dtypes import DType
from peertile.errors import ArgumentError, PeertileError, UnsupportedError, UsageError
from peertile.runtime.checks import check_dtype, check_integer, not_pickled
from peertile.runtime.device import Device
from peertile.runtime.driver import Pages, ShareHandle, ShareKind, cannot_share
from peertile.runtime.interop import tensor_from_address
from peertile.runtime.registry import current_device
from peertile.runtime.storage import Storage
from peertile.runtime.tensor import Tensor, normal_shape

__all__ = ["Mapping", "PhysicalMemory", "Reservation", "ShareHandle", "granularity"]

_lock = threading.RLock()  # protects every book of this module; held during calls of the system


def granularity(device: Device | None = None, share: ShareKind = ShareKind.FD) -> int:
    """Bytes that sizes and places of memory are multiples of: a page on cpu, usually 2 MiB on a GPU.

    `share` is how the memory could reach another process. UnsupportedError where the device has no such memory.

    >>> from peertile import vmm
    >>> vmm.granularity() % 4096
    0
    """
    found = device or current_device()
    return _pages(found, share).granularity(share)


class _Book:
    """Ends once: by name, at the end of a `with`, or with the last reference."""

    __reduce_ex__ = not_pickled
    _is_over = False
    device: Device
    """Whose memory or addresses it is."""

    def _end(self) -> None:
        raise NotImplementedError

    def _end_by_name(self) -> None:
        _end_late()
        self._end()

    def _check_open(self, what: str, over: str) -> None:
        if self._is_over:
            raise UsageError(f"{what}: expected one that is in use, got one that was {over}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_by_name()

    def __del__(self) -> None:
        # Collection runs anywhere: inside a capture, which would see this, and inside any lock of ours, even one that
        # whoever holds `_lock` waits for. So nothing is waited for here.
        with contextlib.suppress(AttributeError, TypeError, PeertileError):
            if self._is_over:
                return
            if self.device.open_captures or not _lock.acquire(blocking=False):
                _late.append(self)
                return
            try:
                self._drop()
            finally:
                _lock.release()

    def _drop(self) -> None:
        # What is collected is used by nobody: leases hold tensors, tensors mappings, and mappings the rest. At the end
        # of the process parts may be gone already; in a forked child the driver refuses, and the parent goes on.
        with contextlib.suppress(AttributeError, TypeError, PeertileError):
            self._end()


_late: deque[_Book] = deque()
"""What was collected where it could not be ended."""


def _end_late() -> None:
    """End what was collected; for calls by name, which hold no lock of ours."""
    for _ in range(len(_late)):
        try:
            book = _late.popleft()
        except IndexError:  # another thread was faster
            return
        if book.device.open_captures:
            _late.append(book)
            continue
        with _lock:
            book._drop()


class _Part(_Book):
    """One of the two parts of mappings: it ends only where it is in none."""

    def _check_unmapped(self) -> None:
        """UsageError while it is in a mapping."""
        raise NotImplementedError

    def _give_back(self) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        with _lock:
            if self._is_over:
                return
            self._check_unmapped()
            self._is_over = True
            self._give_back()


class PhysicalMemory(_Part):
    """At least `nbytes` bytes of memory of one device, without an address. Contents undefined.

    `nbytes` is rounded up to the device's `granularity`. `share` is how it can reach another process, if ever.
    AllocationError if there is not enough, UnsupportedError where the device has no such memory.

    >>> import peertile as pt
    >>> from peertile import vmm
    >>> memory = vmm.PhysicalMemory(1000)
    >>> window = vmm.Reservation(2 * memory.nbytes)
    >>> low, high = window.map(memory), window.map(memory, at=memory.nbytes)  # one memory at two addresses
    >>> _ = low.tensor(4, pt.i32).copy_from([1, 2, 3, 4])
    >>> high.tensor(4, pt.i32).numpy().tolist()
    [1, 2, 3, 4]
    """

    def __init__(self, nbytes: int, *, device: Device | None = None, share: ShareKind = ShareKind.FD) -> None:
        self._is_over = True  # until there is something to give back
        check_integer("nbytes", nbytes, 1)
        _end_late()
        self.device = device or current_device()
        self.share = share
        self._pages = _pages(self.device, share)
        self.nbytes = _rounded(nbytes, self._pages.granularity(share))
        self._handle = self._pages.create(self.nbytes, share)
        self._begin()

    def _begin(self) -> None:
        self._mappings = 0
        self._shared: ShareHandle | None = None
        self._is_over = False

    @classmethod
    def from_share(cls, share: ShareHandle, *, device: Device | None = None) -> Self:
        """The memory that another process exported: the same bytes, not a copy. Takes over `share.fds`; the other
        process may release its own handle. ArgumentError if `share` is no handle of such memory."""
        found = device or current_device()
        pages = _pages(found, share.kind)
        wanted = 1 if share.kind is ShareKind.FD else 0
        if len(share.fds) != wanted or len(share.payload) < 8:
            raise ArgumentError(
                f"share: expected a handle that `PhysicalMemory.export` gave, with {wanted} descriptors, got one with "
                f"{len(share.fds)} and {len(share.payload)} bytes"
            )
        memory = cls.__new__(cls)
        memory._is_over = True
        memory.device, memory.share, memory._pages = found, share.kind, pages
        memory._handle, memory.nbytes = pages.import_(share)
        memory._begin()
        return memory

    def __repr__(self) -> str:
        return f"PhysicalMemory({self.nbytes} bytes, {self.device.name})"

    def export(self) -> ShareHandle:
        """What another process makes `from_share` of. Its descriptors stay this memory's; valid until `release`."""
        with _lock:
            self._check_open("PhysicalMemory.export", "released")
            if self._shared is None:
                self._shared = self._pages.export(self._handle, self.nbytes, self.share)
            return self._shared

    def release(self) -> None:
        """Give the memory back; again: nothing. UsageError while it is mapped."""
        self._end_by_name()

    def _check_unmapped(self) -> None:
        if self._mappings:
            raise UsageError(
                f"PhysicalMemory.release: expected memory that is mapped nowhere, got memory with {self._mappings} "
                "mappings; unmap them first"
            )

    def _give_back(self) -> None:
        if self._shared is not None:
            for fd in self._shared.fds:
                os.close(fd)
        self._pages.release(self._handle)


class Reservation(_Part):
    """At least `nbytes` bytes of addresses that nothing else gets, with nothing behind them until something is mapped.

    `nbytes` is rounded up to the device's `granularity`; the beginning is a multiple of it and of `alignment`, a power
    of two. AllocationError if there are not enough addresses.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        alignment: int = 1,
        device: Device | None = None,
        share: ShareKind = ShareKind.FD,
    ) -> None:
        self._is_over = True
        check_integer("nbytes", nbytes, 1)
        if check_integer("alignment", alignment, 1) & (alignment - 1):
            raise ArgumentError(f"alignment: expected a power of two, got {alignment}")
        _end_late()
        self.device = device or current_device()
        self._pages = _pages(self.device, share)
        self.grain = self._pages.granularity(share)
        self.nbytes = _rounded(nbytes, self.grain)
        self.address = self._pages.reserve(self.nbytes, max(alignment, self.grain))
        self._mappings: dict[int, int] = {}  # offset -> bytes
        self._is_over = False

    def __repr__(self) -> str:
        return f"Reservation({self.nbytes} bytes at {self.address:#x}, {self.device.name})"

    def map(self, memory: PhysicalMemory, at: int = 0, devices: Sequence[Device] | None = None) -> Mapping:
        """All of `memory` at `address + at`, for `devices` (default: the memory's own) to load and store.

        Memory of another device may be mapped as well, where the two are connected. ArgumentError for a place that is
        no multiple of the granularity, outside the reservation or taken; nothing is mapped then.
        """
        return Mapping(self, memory, at, (memory.device,) if devices is None else tuple(devices))

    def free(self) -> None:
        """Give the addresses back; again: nothing. UsageError while something is mapped there."""
        self._end_by_name()

    def _check_unmapped(self) -> None:
        if self._mappings:
            places = ", ".join(f"{offset} ({nbytes} bytes)" for offset, nbytes in sorted(self._mappings.items()))
            raise UsageError(
                f"Reservation.free: expected addresses with nothing mapped, got mappings at {places}; unmap them first"
            )

    def _give_back(self) -> None:
        self._pages.unreserve(self.address, self.nbytes)


class Mapping(_Book):
    """`PhysicalMemory` behind addresses of a `Reservation`; made by `Reservation.map`.

    `address` is where it begins, `nbytes` how long it is; `devices` may load and store there.
    """

    def __init__(self, reservation: Reservation, memory: PhysicalMemory, at: int, devices: tuple[Device, ...]) -> None:
        self._is_over = True
        check_integer("at", at)
        _end_late()
        with _lock:
            reservation._check_open("Reservation.map: reservation", "freed")
            memory._check_open("Reservation.map: memory", "released")
            _check_devices("Reservation.map", memory.device, (reservation.device, *devices))
            nbytes, grain = memory.nbytes, reservation.grain
            if at % grain:
                raise ArgumentError(f"Reservation.map: at: expected a multiple of {grain} bytes, got {at}")
            if nbytes % grain:
                raise ArgumentError(
                    f"Reservation.map: memory: expected a multiple of {grain} bytes, got {nbytes}; make both for one "
                    "device and one way of sharing"
                )
            if at + nbytes > reservation.nbytes:
                raise ArgumentError(
                    f"Reservation.map: at: expected room for {nbytes} bytes in {reservation.nbytes}, got {at}"
                )
            for offset, size in list(reservation._mappings.items()):
                if at < offset + size and offset < at + nbytes:
                    raise ArgumentError(
                        f"Reservation.map: at: expected addresses with nothing mapped, got {at}, where [{offset}, "
                        f"{offset + size}) is; unmap that first"
                    )
            self.reservation = reservation
            self.memory = memory
            self.device = memory.device
            self.nbytes = nbytes
            self.address = reservation.address + at
            self._at = at
            self._storages: weakref.WeakSet[Storage] = weakref.WeakSet()
            self._pages = memory._pages
            self._pages.map(self.address, nbytes, memory._handle)
            try:
                self._pages.set_access(self.address, nbytes, [d.driver for d in devices], [])
            except BaseException:
                self._pages.unmap(self.address, nbytes)
                raise
            self.devices = tuple(dict.fromkeys(devices))
            reservation._mappings[at] = nbytes
            memory._mappings += 1
            self._is_over = False

    def __repr__(self) -> str:
        return f"Mapping({self.nbytes} bytes at {self.address:#x}, {', '.join(d.name for d in self.devices)})"

    def allow(self, *devices: Device) -> None:
        """`devices` may load and store here as well. UnsupportedError where one cannot reach the memory."""
        with _lock:
            self._check_open("Mapping.allow", "unmapped")
            _check_devices("Mapping.allow", self.device, devices)
            allowed = tuple(dict.fromkeys((*self.devices, *devices)))
            self._pages.set_access(self.address, self.nbytes, [d.driver for d in allowed], [])
            self.devices = allowed

    def forbid(self, *devices: Device) -> None:
        """`devices` may no longer load and store here: waits for what they do here, and ends their tensors."""
        with _lock:
            self._check_open("Mapping.forbid", "unmapped")
            _check_devices("Mapping.forbid", self.device, devices)
            gone = tuple(d for d in self.devices if d in devices)
            self.devices = tuple(d for d in self.devices if d not in devices)  # no more tensors
        try:
            self._settle(devices)
            with _lock:
                self._check_open("Mapping.forbid", "unmapped")
                allowed = [d.driver for d in self.devices]
                self._pages.set_access(self.address, self.nbytes, allowed, [d.driver for d in gone])
        except BaseException:
            self.devices = tuple(dict.fromkeys((*self.devices, *gone)))
            raise

    def tensor(
        self, shape: int | Sequence[int], dtype: DType, *, offset: int = 0, device: Device | None = None
    ) -> Tensor:
        """A tensor over the bytes from `offset` on, for `device` (default: the first that may access). It keeps the
        mapping alive.

        ArgumentError if it reaches beyond the mapping or is not aligned to its elements, UsageError if the device has
        no access.
        """
        dims = normal_shape(shape)
        check_dtype(dtype)
        check_integer("offset", offset)
        size = prod(dims) * dtype.itemsize
        with _lock:
            self._check_open("Mapping.tensor", "unmapped")
            if offset + size > self.nbytes:
                raise ArgumentError(
                    f"Mapping.tensor: {dtype}{list(dims)}: expected {size} bytes from {offset} on within "
                    f"{self.nbytes}, got {offset + size - self.nbytes} beyond"
                )
            found = device or next(iter(self.devices), self.device)
            if found not in self.devices:
                raise UsageError(f"Mapping.tensor: expected a device with access, got {found.name}; `allow` it first")
            tensor = tensor_from_address(found, self.address + offset, dims, dtype, None, self, None, "a mapping's")
            self._storages.add(tensor.storage)
            return tensor

    def unmap(self) -> None:
        """Wait for what runs here, end the tensors, and take the memory away; again: nothing. The addresses stay
        reserved."""
        self._end_by_name()

    def _end(self) -> None:
        with _lock:
            if self._is_over:
                return
            self._is_over = True  # no more tensors
        try:
            self._settle(None)
            with _lock:
                self._pages.unmap(self.address, self.nbytes)
                del self.reservation._mappings[self._at]
                self.memory._mappings -= 1
        except BaseException:
            self._is_over = False
            raise

    def _settle(self, devices: Sequence[Device] | None) -> None:
        """Nothing runs on the tensors of `devices` (None: all), and they are over. Waits, so never with the lock held:
        what runs may wait for a rank in another thread of this process."""
        with _lock:
            storages = [s for s in self._storages if devices is None or s.device in devices]
        for storage in storages:
            storage.wait_done()
            storage.close("unmapped" if devices is None else "taken from its device")
            storage.wait_done()  # what another thread began in between


def _pages(device: Device, share: ShareKind) -> Pages:
    if not isinstance(device, Device):
        raise ArgumentError(f"device: expected a Device, got {device!r}")
    if share not in (ShareKind.FD, ShareKind.FABRIC):
        raise ArgumentError(f"share: expected ShareKind.FD or ShareKind.FABRIC, got {share}")
    pages = device.driver.pages()
    if isinstance(pages, str):
        raise UnsupportedError(f"vmm: {pages}")
    if share not in device.capabilities.shares:
        raise cannot_share("vmm", device.name, share, device.capabilities.shares)
    return pages


def _check_devices(what: str, own: Device, devices: Sequence[Any]) -> None:
    for device in devices:
        if not isinstance(device, Device) or device.driver.kind is not own.driver.kind:
            got = device.name if isinstance(device, Device) else repr(device)
            raise ArgumentError(f"{what}: expected devices of {own.driver.kind.value}, got {got}")


def _rounded(nbytes: int, grain: int) -> int:
    return -(-nbytes // grain) * grain
