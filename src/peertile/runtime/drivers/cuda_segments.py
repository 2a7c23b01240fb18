"""Segments of the cuda driver: device memory that other processes and other devices can map.

Three kinds: FD (virtual memory management, the handle is a POSIX descriptor), FABRIC (the same, the handle is bytes
and reaches other hosts) and IPC (legacy CUDA IPC). A segment is mapped once in a process, at one address for all its
devices: a second mapping would be the alias proxy. Multicast objects are never made.
"""

from __future__ import annotations

import os
import secrets
import struct
import threading
from typing import Any, Final, Protocol

from peertile.errors import AllocationError, ArgumentError, UnsupportedError, UsageError
from peertile.runtime.driver import SegmentHandle, ShareHandle, ShareKind
from peertile.runtime.drivers.cuda_api import CudaApi, CudaError
from peertile.runtime.drivers.cuda_waits import STREAM_WAITS

__all__ = ["CudaSegment", "Segments"]

_BLOB: Final = 64
_PAYLOAD: Final = struct.Struct(f"<16sQQQ{_BLOB}s")  # process token, number, bytes, mapped bytes, handle
_SIZED: Final = (ShareKind.FD, ShareKind.FABRIC)


class Owner(Protocol):
    """What a segment needs of a device."""

    api: CudaApi
    handle: Any
    name: str
    context_number: int

    def busy(self) -> bool: ...
    def zero(self, address: int, nbytes: int) -> None: ...


class CudaSegment(SegmentHandle):
    """`users` counts the devices of this process that hold it; `devices` are those that may access it."""

    __slots__ = ("address", "blob", "devices", "fd", "granted", "handle", "key", "kind", "own", "size", "users")

    def __init__(self, nbytes: int, size: int, kind: ShareKind, *, own: bool) -> None:
        self.nbytes = nbytes
        self.size = size
        self.kind = kind
        self.own = own  # made here, not imported
        self.handle: Any = None
        self.address = 0
        self.fd = -1
        self.blob = b""
        self.key = b""
        self.users = 1
        self.devices: list[Owner] = []
        self.granted = 0  # of `devices`, the first that have access to the mapping


class Segments:
    """The segments of one process."""

    def __init__(self) -> None:
        self._token = secrets.token_bytes(16)
        self._next = 0
        self._lock = threading.RLock()  # protects the tables and every mapping; held during driver calls
        self._live: dict[bytes, CudaSegment] = {}
        self._late: list[CudaSegment] = []  # freed while work was running: unmapping now could wait for it

    # ------------------------------------------------------------------------------------------------ life

    def create(self, device: Owner, nbytes: int, kind: ShareKind) -> CudaSegment:
        if nbytes <= 0:
            raise ArgumentError(f"nbytes: expected an integer > 0, got {nbytes}")
        with self._lock:
            self.reap()
            grain = device.api.granularity(device.handle, kind) if kind in _SIZED else 256
            segment = CudaSegment(nbytes, -(-nbytes // grain) * grain, kind, own=True)
            segment.devices.append(device)
            try:
                if kind is ShareKind.IPC:
                    segment.address = device.api.allocate_ipc(segment.size)
                    segment.granted = 1
                else:
                    segment.handle = device.api.create_memory(device.handle, segment.size, kind)
                self._map(segment)
                device.zero(segment.address, segment.size)
            except CudaError as error:
                self._destroy(segment)
                if error.out_of_memory:
                    free = device.api.memory_info()[0]
                    raise AllocationError(
                        f"segment: asked for {nbytes} bytes of shared memory, {free} are free on {device.name}; "
                        "use a smaller heap"
                    ) from error
                raise
            self._next += 1
            segment.key = self._token + struct.pack("<Q", self._next)
            self._live[segment.key] = segment
            return segment

    def export(self, segment: CudaSegment) -> ShareHandle:
        _open(segment)
        with self._lock:
            api = segment.devices[0].api
            if segment.kind is ShareKind.FD and segment.fd < 0:
                fd = api.export_memory(segment.handle, segment.kind)
                assert isinstance(fd, int)
                os.set_inheritable(fd, False)
                segment.fd = fd
            elif segment.kind is ShareKind.FABRIC and not segment.blob:
                blob = api.export_memory(segment.handle, segment.kind)
                assert isinstance(blob, bytes)
                segment.blob = blob
            elif segment.kind is ShareKind.IPC and not segment.blob:
                segment.blob = api.export_ipc(segment.address)
            token, number = segment.key[:16], int.from_bytes(segment.key[16:], "little")
            payload = _PAYLOAD.pack(token, number, segment.nbytes, segment.size, segment.blob)
            return ShareHandle(segment.kind, payload, (segment.fd,) if segment.kind is ShareKind.FD else ())

    def import_(self, device: Owner, share: ShareHandle) -> CudaSegment:
        wanted = 1 if share.kind is ShareKind.FD else 0
        known = share.kind in (*_SIZED, ShareKind.IPC)
        if not known or len(share.payload) != _PAYLOAD.size or len(share.fds) != wanted:
            raise ArgumentError(
                f"share: expected a handle of kind fd, ipc or fabric with {_PAYLOAD.size} bytes and {wanted} "
                f"descriptors, got kind {share.kind.value} with {len(share.payload)} bytes and {len(share.fds)} "
                "descriptors"
            )
        token, number, nbytes, size, blob = _PAYLOAD.unpack(share.payload)
        key = token + struct.pack("<Q", number)
        with self._lock:
            self.reap()
            own = self._live.get(key)
            if own is not None:
                self._join(own, device)
                if share.fds and share.fds[0] != own.fd:  # it went out over a socket and came back
                    os.close(share.fds[0])
                return own
            if token == self._token:
                raise UsageError("share: expected the handle of a live segment, got one of a segment that was freed")
            segment = CudaSegment(nbytes, size, share.kind, own=False)
            segment.devices.append(device)
            segment.key, segment.blob = key, blob
            try:
                if share.kind in _SIZED:
                    segment.handle = device.api.import_memory(share.fds[0] if share.fds else blob, share.kind)
            finally:
                if share.fds:  # the imported handle keeps the memory, the descriptor is not needed any more
                    os.close(share.fds[0])
            self._live[key] = segment
            return segment

    def _join(self, segment: CudaSegment, device: Owner) -> None:
        """One more device of this process uses the segment."""
        if device not in segment.devices:
            if segment.kind is ShareKind.IPC:
                raise UnsupportedError(
                    f"share: an ipc segment is mapped by one device of a process, and {segment.devices[0].name} has "
                    f"it already; make the segment with kind fd to map it on {device.name} as well"
                )
            segment.devices.append(device)
        segment.users += 1

    def map(self, segment: CudaSegment) -> int:
        _open(segment)
        with self._lock:
            self._map(segment)
            return segment.address

    def _map(self, segment: CudaSegment) -> None:
        api = segment.devices[0].api
        if not segment.address:
            if segment.kind is ShareKind.IPC:
                segment.address = api.open_ipc(segment.blob)
                segment.granted = 1
                return
            grain = api.granularity(segment.devices[0].handle, segment.kind)
            address = api.reserve(segment.size, grain)
            try:
                api.map(address, segment.size, segment.handle)
            except CudaError:
                api.free_reservation(address, segment.size)
                raise
            segment.address = address
        if segment.kind in _SIZED and segment.granted < len(segment.devices):
            # Two ranks on one GPU have a device object each.
            handles = {int(d.handle): d.handle for d in segment.devices}
            api.set_access(segment.address, segment.size, list(handles.values()))
            segment.granted = len(segment.devices)

    def unmap(self, segment: CudaSegment) -> None:
        """While its devices are busy, or others of this process hold the segment, the mapping stays."""
        _open(segment)
        with self._lock:
            if segment.users == 1 and not segment.own and not any(d.busy() for d in segment.devices):
                self._unmap(segment)

    def free(self, segment: CudaSegment) -> None:
        _open(segment)
        with self._lock:
            segment.users -= 1
            if segment.users == 0:
                del self._live[segment.key]
                self._late.append(segment)
            self.reap()

    def reap(self) -> None:
        """Unmap what was freed, once no work runs on the devices that could access it."""
        with self._lock:
            ready = [s for s in self._late if not any(d.busy() for d in s.devices)]
            for segment in ready:
                self._late.remove(segment)
                self._destroy(segment)

    def leave(self, device: Owner) -> None:
        """The device is being closed, and is idle: let go of all that only it uses."""
        with self._lock:
            self.reap()
            for segment in [s for s in self._live.values() if s.devices == [device]]:
                segment.users = 0
                del self._live[segment.key]
                self._destroy(segment)

    # ------------------------------------------------------------------------------------------------ memory

    def _unmap(self, segment: CudaSegment) -> None:
        if not segment.address:
            return
        api = segment.devices[0].api
        address, segment.address, segment.granted = segment.address, 0, 0
        if segment.kind is not ShareKind.IPC:
            api.unmap(address, segment.size)
            api.free_reservation(address, segment.size)
            return
        with STREAM_WAITS.alone(segment.devices[0].context_number):
            if segment.own:
                api.free_ipc(address)
            else:
                api.close_ipc(address)

    def _destroy(self, segment: CudaSegment) -> None:
        self._unmap(segment)
        if segment.handle is not None:
            segment.devices[0].api.release_memory(segment.handle)
            segment.handle = None
        if segment.fd >= 0:
            os.close(segment.fd)
            segment.fd = -1


def _open(segment: CudaSegment) -> None:
    if segment.users == 0:
        raise UsageError("segment: expected a live segment, got one that was freed")
