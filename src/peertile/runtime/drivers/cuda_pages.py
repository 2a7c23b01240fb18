"""Virtual memory by hand on a GPU: the NVIDIA driver's calls for physical memory, addresses and access, one to one.
Keeps no books: the order of the calls is `peertile.vmm`'s business."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

from peertile.errors import AllocationError
from peertile.runtime.driver import DriverDevice, Pages, ShareHandle, ShareKind
from peertile.runtime.drivers.cuda_api import CudaApi, CudaError

__all__ = ["CudaPages"]

_LENGTH: Final = 8


class CudaPages(Pages):
    """Calls for the memory of one GPU; `using` makes its context current."""

    def __init__(self, using: Callable[[], AbstractContextManager[CudaApi]], device: Any, name: str) -> None:
        self._using = using
        self._device = device
        self._name = name

    def granularity(self, kind: ShareKind) -> int:
        with self._using() as api:
            return api.granularity(self._device, kind)

    def create(self, nbytes: int, kind: ShareKind) -> Any:
        with self._using() as api:
            try:
                return api.create_memory(self._device, nbytes, kind)
            except CudaError as error:
                if not error.out_of_memory:
                    raise
                free = api.memory_info()[0]
                raise AllocationError(
                    f"memory: asked for {nbytes} bytes, {free} are free on {self._name}; ask for less"
                ) from error

    def release(self, handle: Any) -> None:
        with self._using() as api:
            api.release_memory(handle)

    def export(self, handle: Any, nbytes: int, kind: ShareKind) -> ShareHandle:
        size = nbytes.to_bytes(_LENGTH, "little")
        with self._using() as api:
            value = api.export_memory(handle, kind)
        if isinstance(value, bytes):
            return ShareHandle(kind, size + value)
        os.set_inheritable(value, False)
        return ShareHandle(kind, size, (value,))

    def import_(self, share: ShareHandle) -> tuple[Any, int]:
        with self._using() as api:
            value = share.fds[0] if share.fds else share.payload[_LENGTH:]
            handle = api.import_memory(value, share.kind)
        if share.fds:  # the handle keeps the memory
            os.close(share.fds[0])
        return handle, int.from_bytes(share.payload[:_LENGTH], "little")

    def reserve(self, nbytes: int, alignment: int) -> int:
        with self._using() as api:
            try:
                return api.reserve(nbytes, alignment)
            except CudaError as error:
                if not error.out_of_memory:
                    raise
                raise AllocationError(
                    f"addresses: asked for {nbytes} bytes, and {self._name} has no range of so many; ask for less"
                ) from error

    def unreserve(self, address: int, nbytes: int) -> None:
        with self._using() as api:
            api.free_reservation(address, nbytes)

    def map(self, address: int, nbytes: int, handle: Any) -> None:
        with self._using() as api:
            api.map(address, nbytes, handle)

    def unmap(self, address: int, nbytes: int) -> None:
        with self._using() as api:
            api.unmap(address, nbytes)

    def set_access(
        self, address: int, nbytes: int, allowed: Sequence[DriverDevice], forbidden: Sequence[DriverDevice]
    ) -> None:
        with self._using() as api:
            for devices, is_allowed in ((allowed, True), (forbidden, False)):
                if devices:
                    handles = [getattr(device, "handle") for device in devices]  # noqa: B009 - of cuda alone
                    api.set_access(address, nbytes, handles, is_allowed=is_allowed)
