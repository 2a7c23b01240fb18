"""Virtual memory by hand on cpu: files in memory, mapped where the user wants them. Keeps no books: the order of the
calls is `peertile.vmm`'s business."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

from peertile.errors import AllocationError, ArgumentError
from peertile.runtime.driver import DriverDevice, Pages, ShareHandle, ShareKind
from peertile.runtime.drivers.cpu_memory import PAGE, available_bytes, extend, place, protect, unmap
from peertile.runtime.unnamed import unnamed_file

__all__ = ["CpuPages"]

_LENGTH: Final = 8


class CpuPages(Pages):
    """A handle is a descriptor of a file that no path leads to; access is the process's, whichever device asks."""

    def __init__(self, name: str) -> None:
        self._name = name

    def granularity(self, kind: ShareKind) -> int:
        return PAGE

    def create(self, nbytes: int, kind: ShareKind) -> Any:
        free = available_bytes()
        if nbytes > free:
            raise AllocationError(f"memory: asked for {nbytes} bytes, {free} are free on {self._name}; ask for less")
        fd = unnamed_file("peertile")
        try:
            extend(fd, nbytes)
        except OSError as error:
            os.close(fd)
            raise _refused("memory", nbytes, error) from error
        return fd

    def release(self, handle: Any) -> None:
        os.close(handle)

    def export(self, handle: Any, nbytes: int, kind: ShareKind) -> ShareHandle:
        return ShareHandle(ShareKind.FD, nbytes.to_bytes(_LENGTH, "little"), (os.dup(handle),))

    def import_(self, share: ShareHandle) -> tuple[Any, int]:
        nbytes = int.from_bytes(share.payload, "little")
        size = os.fstat(share.fds[0]).st_size
        if size < nbytes:
            raise ArgumentError(f"share: expected a descriptor of at least {nbytes} bytes, got one of {size}")
        return share.fds[0], nbytes

    def reserve(self, nbytes: int, alignment: int) -> int:
        # The system aligns to pages alone: take more, and give back what is before and behind.
        spare = max(alignment - PAGE, 0)
        try:
            taken = place(nbytes + spare)
        except OSError as error:
            raise _refused("addresses", nbytes, error) from error
        address = -(-taken // alignment) * alignment
        if address > taken:
            unmap(taken, address - taken)
        if taken + spare > address:
            unmap(address + nbytes, taken + spare - address)
        return address

    def unreserve(self, address: int, nbytes: int) -> None:
        unmap(address, nbytes)

    def map(self, address: int, nbytes: int, handle: Any) -> None:
        try:
            place(nbytes, at=address, fd=handle)
        except OSError as error:
            raise _refused("mapping", nbytes, error) from error

    def unmap(self, address: int, nbytes: int) -> None:
        # Reserved again in one step: unmapped first, another thread could be given the addresses.
        try:
            place(nbytes, at=address)
        except OSError as error:
            raise _refused("unmapping", nbytes, error) from error

    def set_access(
        self, address: int, nbytes: int, allowed: Sequence[DriverDevice], forbidden: Sequence[DriverDevice]
    ) -> None:
        try:
            protect(address, nbytes, is_allowed=bool(allowed))
        except OSError as error:
            raise _refused("access", nbytes, error) from error


def _refused(what: str, nbytes: int, error: OSError) -> AllocationError:
    return AllocationError(f"{what}: asked for {nbytes} bytes, and the system refused: {error.strerror}; ask for less")
