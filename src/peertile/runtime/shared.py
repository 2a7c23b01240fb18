"""A tensor that several devices of one process use in kernels at once: `tensor.share_with(devices)`.

The buffer stays where it is; nothing is copied and no group is made. Nothing orders the accesses of different
devices but the kernels themselves, as for every peer memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from peertile.errors import ArgumentError, UnsupportedError
from peertile.ir.types import Access
from peertile.runtime.argument import Argument, Use, pack_words, symmetric_type

if TYPE_CHECKING:
    from peertile.runtime.device import Device
    from peertile.runtime.tensor import Tensor

__all__ = ["SharedTensor", "share"]


class SharedTensor:
    """A tensor shared between devices, as the argument of `T.Peer` on each of them.

    In a kernel it has one part, wherever it runs: `x.local` and `x.at(0)` are the buffer, `x.num_ranks` is 1.
    """

    __slots__ = ("_arguments", "_table", "devices", "tensor")

    def __init__(self, tensor: Tensor, devices: tuple[Device, ...]) -> None:
        self.tensor = tensor
        self.devices = devices
        owner: Any = tensor.device
        # Every device reads the one table: host memory of the process that all of them can load.
        self._table = owner.asarray(np.array([0, 1, tensor.storage.address], np.int64))
        self._arguments: dict[Access, Argument] = {}

    def __repr__(self) -> str:
        return f"SharedTensor({self.tensor!r}, {len(self.devices)} devices)"

    @property
    def peer_atomics(self) -> bool:
        """Whether atomics of every device that shares the buffer are atomic for all; on one device always."""
        drivers = {d.driver.identity for d in self.devices}
        return len(drivers) == 1 or all(d.capabilities.peer_atomics for d in self.devices)

    @property
    def local(self) -> Tensor:
        """The tensor itself."""
        return self.tensor

    def numpy(self) -> np.ndarray[Any, np.dtype[Any]]:
        """A host copy."""
        return self.tensor.numpy()

    def peer_argument(self, access: Access) -> Argument:
        """How it is passed as `T.Peer`; made once per access."""
        if access not in self._arguments:
            t = self.tensor
            start, end = t.byte_range()
            writes = access is not Access.READ
            use = Use(t.storage, start, end, writes=writes, lifetime_only=True, devices=self.devices)
            words = pack_words((self._table.address, t.offset, *t.shape, *t.strides))
            align = 64 if t.address % 64 == 0 else 0
            kind = symmetric_type(t.dtype, t.shape, t.strides, access, align)
            self._arguments[access] = Argument(kind, words, (use,), self, t.shape)
        return self._arguments[access]


def share(tensor: Tensor, devices: Sequence[Device]) -> SharedTensor:
    """Let `devices` (and the tensor's own) pass `tensor` as `T.Peer`."""
    own: Any = tensor.device
    if isinstance(devices, str) or not isinstance(devices, Iterable):
        raise ArgumentError(f"share_with(devices): expected a sequence of devices, got {devices!r}; write [device]")
    devices = tuple(devices)
    everybody = (own, *(d for d in devices if d is not own))
    if len(set(map(id, everybody))) != len(everybody):
        raise ArgumentError("share_with: expected each device once, got one twice")
    for device in everybody[1:]:
        if not hasattr(device, "driver"):
            raise ArgumentError(f"share_with: expected devices of this process, got {type(device).__name__}")
        if not device.driver.accessible(tensor.storage.address, max(tensor.storage.nbytes, 1)):
            raise UnsupportedError(f"share_with: {device.name} cannot reach the memory of {own.name}")
    return SharedTensor(tensor, everybody)
