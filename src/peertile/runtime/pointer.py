"""Raw addresses as arguments of unsafe kernels. They are checked and leased at launch; nothing is read here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from peertile.dtypes import DType
from peertile.errors import ArgumentError
from peertile.ir.types import PointerType
from peertile.runtime.argument import Argument, Use, canonical, pack_words
from peertile.runtime.storage import Storage

if TYPE_CHECKING:
    from peertile.runtime.device import Device

__all__ = ["Pointer", "pointer_to"]


class Pointer:
    """The argument of `T.Pointer`: `nbytes` bytes at `address`, elements of `dtype`. Keeps their storage alive.

    Made by `tensor.pointer()` or `pt.pointer(...)`. A launch leases the bytes for as long as it runs; who reads
    and writes them meanwhile is the program's own business.
    """

    __slots__ = ("_argument", "address", "dtype", "nbytes", "storage")

    def __init__(self, storage: Storage, address: int, dtype: DType, nbytes: int, *, foreign: bool = False) -> None:
        self.storage = storage
        self.address = address
        self.dtype = dtype
        self.nbytes = nbytes
        start = address - storage.address
        use = Use(storage, start, start + nbytes, writes=True, lifetime_only=True)
        keep = self if foreign else None
        self._argument = Argument(canonical(PointerType(dtype)), pack_words((address,)), (use,), keep)

    def __repr__(self) -> str:
        return f"Pointer({self.dtype}, {self.address:#x}, {self.nbytes} bytes)"

    def pointer_argument(self) -> Argument:
        """How it is passed to a kernel."""
        return self._argument

    def check_launch(self, kernel: str) -> None:
        """ArgumentError unless the device can reach the bytes; asked for addresses that are not ours."""
        device: Device = self.storage.device
        if not device.driver.accessible(self.address, self.nbytes):
            raise ArgumentError(
                f"{kernel}: pointer {self.address:#x}: expected {self.nbytes} bytes that {device.name} may load and "
                "store, got an address range that is not mapped so; keep its owner alive, or copy the data"
            )


def pointer_to(device: Device, address: int, dtype: DType, nbytes: int, owner: Any = None) -> Pointer:
    """A pointer to memory that somebody else allocated; `owner` is kept alive with it."""
    if not isinstance(address, int) or address <= 0:
        raise ArgumentError(f"address: expected a positive integer, got {address!r}")
    if not isinstance(dtype, DType):
        raise ArgumentError(f"dtype: expected a peertile dtype such as pt.f32, got {dtype!r}")
    if not isinstance(nbytes, int) or nbytes < dtype.itemsize:
        raise ArgumentError(f"nbytes: expected at least one element of {dtype} ({dtype.itemsize}), got {nbytes!r}")
    if address % dtype.itemsize:
        raise ArgumentError(
            f"address: expected a multiple of {dtype.itemsize}, the size of {dtype}, got {address:#x}; "
            "atomic accesses need it"
        )
    # No lease can wait for it, and nothing frees it: the storage stands for memory that is not ours.
    storage = Storage(device, address, nbytes, release=None, owner=owner, name=f"memory at {address:#x}")
    return Pointer(storage, address, dtype, nbytes, foreign=True)
