"""Devices and streams as the user sees them, over a driver. No kernels and no ranks here.

A `Device` owns a driver's device, its lease table and a default stream. Reading and writing tensors
from the host goes through the default stream's rules: it waits for what still writes the bytes.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np

from peertile.config import config
from peertile.dtypes import DType
from peertile.errors import ArgumentError, DeviceFault, UsageError, WaitTimeout
from peertile.runtime.driver import Capabilities, DriverDevice, MemoryStats, Status, StreamHandle, Ticket
from peertile.runtime.lease import LeaseTable
from peertile.runtime.storage import Storage
from peertile.runtime.tensor import Tensor, array_for, normal_shape

__all__ = ["Device", "Stream"]

_stream_ids = itertools.count(1)


class Stream:
    """A queue of operations of one device that run in order; two streams run at the same time."""

    __slots__ = ("__weakref__", "device", "handle", "id", "name")

    def __init__(self, device: Device, name: str, priority: int = 0) -> None:
        self.device = device
        self.handle: StreamHandle = device.driver.create_stream(priority)
        self.id = next(_stream_ids)
        self.name = name

    def __repr__(self) -> str:
        return f"Stream({self.name} of {self.device.name})"

    def sync(self, timeout_s: float | None = None) -> None:
        """Wait until everything enqueued has run; WaitTimeout after `timeout_s`."""
        self.device.wait_ticket(self.device.driver.last_ticket(self.handle), timeout_s)


class Device:
    """One device of this process. `name` is e.g. "cpu:0".

    `persistent_programs` is how many programs a persistent partition gets by default.
    """

    def __init__(self, driver: DriverDevice) -> None:
        self.driver = driver
        self.name = f"{driver.kind.value}:{driver.ordinal}"
        self.capabilities: Capabilities = driver.capabilities
        self.leases = LeaseTable()
        self.default_stream = Stream(self, "the default stream")
        self._names = itertools.count(1)
        self._closed = False
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Device({self.name})"

    @property
    def persistent_programs(self) -> int:
        """Four programs per executor: enough to even out uneven tiles, few enough to stay cheap."""
        return 4 * self.capabilities.executors

    def stream(self, name: str | None = None, priority: int = 0) -> Stream:
        """A new stream; `name` is for errors."""
        self._check_open()
        return Stream(self, name or f"stream {next(self._names)}", priority)

    def memory(self) -> MemoryStats:
        """Bytes in use, peak, reserved and free."""
        return self.driver.memory_stats()

    def close(self) -> None:
        """Release the device; tensors on it can no longer be used."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.driver.close()

    # ---------------------------------------------------------------- tensors

    def allocate(self, nbytes: int, name: str) -> Storage:
        """New memory, freed when the last tensor and lease on it are gone."""
        self._check_open()
        return Storage(self, self.driver.allocate(nbytes), nbytes, release=self.driver.free, name=name)

    def empty(self, shape: Any, dtype: DType) -> Tensor:
        """A tensor with undefined contents."""
        dims = normal_shape(shape)
        if not isinstance(dtype, DType):
            raise ArgumentError(f"dtype: expected a peertile dtype such as pt.f32, got {dtype!r}")
        count = 1
        for n in dims:
            count *= n
        return Tensor(self.allocate(count * dtype.itemsize, f"a tensor {dtype}{list(dims)}"), dtype, dims)

    def asarray(self, source: Any, dtype: DType | None = None) -> Tensor:
        """A new tensor with a copy of `source` (anything numpy can read), converted to `dtype`."""
        array, target = array_for(source, dtype)
        tensor = self.empty(array.shape, target)
        self._host_copy(tensor.address, array.ctypes.data, tensor.nbytes, "pt.asarray")
        return tensor

    def read_tensor(self, tensor: Tensor) -> np.ndarray[Any, np.dtype[Any]]:
        """A host copy, after whatever still writes the tensor has completed."""
        tensor.storage.check_alive("Tensor.numpy")
        self._settle(tensor, writes=False)
        start, end = tensor.byte_range()
        raw = np.empty(end - start, np.uint8)
        self._host_copy(raw.ctypes.data, tensor.storage.address + start, raw.nbytes, "Tensor.numpy")
        strides = tuple(s * tensor.dtype.itemsize for s in tensor.strides)
        # Not as_strided, which goes through the dtype's name: numpy reads the one of f8e5m2 as a float of one byte.
        view = np.ndarray(tensor.shape, tensor.dtype.numpy, raw, tensor.offset - start, strides)
        return view if tensor.is_contiguous else view.copy()

    def write_tensor(self, tensor: Tensor, source: np.ndarray[Any, np.dtype[Any]]) -> None:
        """Replace the elements by `source`, after whatever still uses the tensor has completed."""
        tensor.storage.check_alive("Tensor.copy_from")
        self._settle(tensor, writes=True)
        array = np.ascontiguousarray(source, dtype=tensor.dtype.numpy)
        if tensor.is_contiguous:
            self._host_copy(tensor.address, array.ctypes.data, tensor.nbytes, "Tensor.copy_from")
            return
        item = tensor.dtype.itemsize
        for index in np.ndindex(*tensor.shape[:-1]):
            row = tensor.address + item * sum(i * s for i, s in zip(index, tensor.strides, strict=False))
            step = tensor.strides[-1] * item
            for k in range(tensor.shape[-1]):
                self._host_copy(row + k * step, array[index].ctypes.data + k * item, item, "Tensor.copy_from")

    def _settle(self, tensor: Tensor, writes: bool) -> None:
        """Wait for the submissions whose leases conflict with host access to the tensor's bytes."""
        start, end = tensor.byte_range()
        for lease in list(tensor.storage.leases):
            use = lease.use
            # A kernel that holds the storage as peer memory may be waiting for this very access.
            if not use.lifetime_only and use.end > start and use.start < end and (writes or use.writes):
                lease.holder.wait_done()

    def _host_copy(self, dst: int, src: int, nbytes: int, name: str) -> None:
        if nbytes:
            ticket = self.driver.copy(self.default_stream.handle, dst, src, nbytes, name=name, on_caller=True)
            self.wait_ticket(ticket)

    # ---------------------------------------------------------------- completion

    def wait_ticket(self, ticket: Ticket, timeout_s: float | None = None) -> None:
        """Block until the operation has run. DeviceFault if it failed or was skipped."""
        bound = config().wait_timeout_s * 2 if timeout_s is None else timeout_s
        status = self.driver.wait(ticket, bound)
        if status is Status.PENDING:
            raise WaitTimeout(f"{ticket.name}: expected to complete within {bound:g} s, still running", op=ticket.name)
        if status is Status.DONE:
            return
        fault = self.driver.fault(ticket)
        raise DeviceFault(f"{ticket.name} did not complete: {fault}", op=ticket.name)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"{self.name} was closed; open a new device")
