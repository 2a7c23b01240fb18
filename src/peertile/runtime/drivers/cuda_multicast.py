"""Multicast objects of the NVIDIA driver: one address through which a switch of the fabric reaches many GPUs.

The only module that names the driver's multicast functions, and it calls none of them unless the user opted in
(PEERTILE_MULTICAST=1) and no veto is set: making such an object on a system where it is not permitted can take GPUs
out of service, so asking is not a probe. What the memory behind it is for is `comm/multicast.py`'s business.

Life of an object, which every process follows with the others between the steps::

    create (one) / import ──> add_device (all) ──> bind (all) ──> map (all) ──> free: unmap, unbind, release
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, Final, Protocol

from peertile.config import Config
from peertile.errors import UsageError
from peertile.runtime.driver import ShareHandle, ShareKind
from peertile.runtime.drivers.cuda_api import CudaApi, CudaError

__all__ = ["MulticastCalls", "MulticastObject", "MulticastObjects", "MulticastState", "consent_refusal"]

MIN_CAPABILITY: Final = 9
MIN_DRIVER: Final = 12010
KINDS: Final = (ShareKind.FABRIC, ShareKind.FD)


def consent_refusal(settings: Config) -> str | None:
    """Why this process may not use the fabric's multicast at all; None where the user opted in. Asks no driver."""
    if settings.multicast_veto is not None:
        return f"{settings.multicast_veto} forbids it"
    if not settings.multicast:
        return "PEERTILE_MULTICAST=1 is not set"
    return None


class MulticastCalls:
    """The driver's multicast functions, plain numbers in and out; CudaError for what the driver refuses."""

    def __init__(self) -> None:
        self._d: Any = importlib.import_module("cuda.bindings.driver")
        kinds = self._d.CUmemAllocationHandleType
        self._handle_types = {
            ShareKind.FD: kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            ShareKind.FABRIC: kinds.CU_MEM_HANDLE_TYPE_FABRIC,
        }

    def _ok(self, call: str, result: Any) -> Any:
        code, *values = result
        if code != self._d.CUresult.CUDA_SUCCESS:
            _, text = self._d.cuGetErrorString(code)
            raise CudaError(call, code.name, text.decode() if text else "no text")
        return values[0] if values else None

    def _properties(self, nbytes: int, count: int, kind: ShareKind) -> Any:
        properties = self._d.CUmulticastObjectProp()
        properties.numDevices = count
        properties.size = nbytes
        properties.handleTypes = int(self._handle_types[kind])
        properties.flags = 0
        return properties

    def granularity(self, nbytes: int, count: int, kind: ShareKind) -> int:
        """What sizes and offsets of an object of `count` devices are multiples of."""
        flag = self._d.CUmulticastGranularity_flags.CU_MULTICAST_GRANULARITY_MINIMUM
        properties = self._properties(nbytes, count, kind)
        return int(self._ok("cuMulticastGetGranularity", self._d.cuMulticastGetGranularity(properties, flag)))

    def create(self, nbytes: int, count: int, kind: ShareKind) -> Any:
        return self._ok("cuMulticastCreate", self._d.cuMulticastCreate(self._properties(nbytes, count, kind)))

    def add_device(self, handle: Any, device: Any) -> None:
        self._ok("cuMulticastAddDevice", self._d.cuMulticastAddDevice(handle, device))

    def bind(self, handle: Any, memory: Any, nbytes: int) -> None:
        """The physical memory `memory`, from its beginning, behind the object."""
        self._ok("cuMulticastBindMem", self._d.cuMulticastBindMem(handle, 0, memory, 0, nbytes, 0))

    def unbind(self, handle: Any, device: Any, nbytes: int) -> None:
        self._ok("cuMulticastUnbind", self._d.cuMulticastUnbind(handle, device, 0, nbytes))


class MulticastState(Enum):
    """How far an object has come in this process."""

    NEW = "new"
    ADDED = "added"
    BOUND = "bound"
    MAPPED = "mapped"
    FREED = "freed"


_STEPS: Final = {
    "add_device": MulticastState.NEW,
    "bind": MulticastState.ADDED,
    "map": MulticastState.BOUND,
}


class MulticastObject:
    """An object as one process knows it."""

    __slots__ = ("address", "fd", "handle", "kind", "nbytes", "state")

    def __init__(self, handle: Any, nbytes: int, kind: ShareKind) -> None:
        self.handle = handle
        self.nbytes = nbytes
        self.kind = kind
        self.address = 0
        self.fd = -1
        self.state = MulticastState.NEW

    def at(self, step: str) -> None:
        """UsageError unless `step` is the next one."""
        wanted = _STEPS[step]
        if self.state is not wanted:
            raise UsageError(
                f"multicast object: {step}: expected an object that is {wanted.value}, got one that is "
                f"{self.state.value}; every device is added before any memory is bound, and bound before it is mapped"
            )


class Memory(Protocol):
    """What is bound: a segment made by virtual memory management."""

    handle: Any
    size: int


class MulticastObjects:
    """Makes and takes apart the multicast objects of one device."""

    def __init__(
        self, calls: MulticastCalls, using: Callable[[], AbstractContextManager[CudaApi]], device: Any
    ) -> None:
        """`using`: the device's context is current inside, and errors of the driver leave as ours."""
        self._calls = calls
        self._using = using
        self._device = device

    def refusal(self) -> str | None:
        """Why the device has no multicast; None if it has. Reads attributes, makes nothing."""
        device = self._device
        with self._using() as api:
            name = api.device_name(device)
            if api.attribute(device, "COMPUTE_CAPABILITY_MAJOR") < MIN_CAPABILITY:
                return f"{name} is older than sm_{MIN_CAPABILITY}0"
            version = api.driver_version()
            if version < MIN_DRIVER:
                have, need = (f"{v // 1000}.{v % 1000 // 10}" for v in (version, MIN_DRIVER))
                return f"the NVIDIA driver supports CUDA {have}, multicast needs {need}"
            return (
                None if api.attribute(device, "MULTICAST_SUPPORTED") else f"{name} has no multicast; it needs NVSwitch"
            )

    def aligned_size(self, nbytes: int, count: int, kind: ShareKind) -> int:
        """`nbytes` rounded up to what an object of `count` devices can have."""
        with self._using():
            grain = self._calls.granularity(max(nbytes, 1), count, kind)
        return -(-nbytes // grain) * grain

    def create(self, nbytes: int, count: int, kind: ShareKind) -> MulticastObject:
        """A new object of `nbytes` (aligned) for `count` devices. One process makes it, the others import it."""
        with self._using():
            return MulticastObject(self._calls.create(nbytes, count, kind), nbytes, kind)

    def export(self, made: MulticastObject) -> ShareHandle:
        """What another process needs to import the object."""
        with self._using() as api:
            value = api.export_memory(made.handle, made.kind)
        if isinstance(value, bytes):
            return ShareHandle(made.kind, value, ())
        os.set_inheritable(value, False)
        made.fd = value
        return ShareHandle(made.kind, b"", (value,))

    def import_(self, share: ShareHandle, nbytes: int) -> MulticastObject:
        """The object behind a handle; takes over `share.fds`."""
        try:
            with self._using() as api:
                handle = api.import_memory(share.fds[0] if share.fds else share.payload, share.kind)
        finally:
            for fd in share.fds:
                os.close(fd)
        return MulticastObject(handle, nbytes, share.kind)

    def add_device(self, known: MulticastObject) -> None:
        """This device takes part. Every device is added before any memory is bound."""
        known.at("add_device")
        with self._using():
            self._calls.add_device(known.handle, self._device)
        known.state = MulticastState.ADDED

    def bind(self, known: MulticastObject, memory: Memory) -> None:
        """This device's memory behind the object: only after all devices were added."""
        known.at("bind")
        with self._using():
            self._calls.bind(known.handle, memory.handle, known.nbytes)
        known.state = MulticastState.BOUND

    def map(self, known: MulticastObject) -> int:
        """The address of the object in this process. Used only after every rank has mapped."""
        known.at("map")
        with self._using() as api:
            address = api.reserve(known.nbytes, self._calls.granularity(known.nbytes, 1, known.kind))
            try:
                api.map(address, known.nbytes, known.handle)
                try:
                    api.set_access(address, known.nbytes, [self._device])
                except CudaError:
                    api.unmap(address, known.nbytes)
                    raise
            except CudaError:
                api.free_reservation(address, known.nbytes)
                raise
        known.address = address
        known.state = MulticastState.MAPPED
        return address

    def free(self, known: MulticastObject) -> None:
        """Back through every step that was made, whatever of it fails; the first failure is raised at the end."""
        state, known.state = known.state, MulticastState.FREED
        if state is MulticastState.FREED:
            return
        errors: list[CudaError] = []

        def attempt(call: Callable[..., None], *args: Any) -> None:
            try:
                call(*args)
            except CudaError as error:
                errors.append(error)

        with self._using() as api:
            if state is MulticastState.MAPPED:
                attempt(api.unmap, known.address, known.nbytes)
                attempt(api.free_reservation, known.address, known.nbytes)
            if state in (MulticastState.MAPPED, MulticastState.BOUND):
                attempt(self._calls.unbind, known.handle, self._device, known.nbytes)
            attempt(api.release_memory, known.handle)
            known.address = 0
            if known.fd >= 0:
                os.close(known.fd)
                known.fd = -1
            if errors:
                raise errors[0]
