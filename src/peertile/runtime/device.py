"""Devices as the user sees them, over a driver. No kernels and no ranks here.

A `Device` owns a driver's device, its lease table, its pool, a default stream and a scheduling policy.
Reading and writing tensors from the host waits for what still uses the bytes.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from typing import Any

import numpy as np

from peertile.config import config
from peertile.dtypes import DType
from peertile.errors import AllocationError, UsageError, WaitTimeout
from peertile.runtime.checks import check_dtype, not_pickled
from peertile.runtime.context import explain, outside_execution
from peertile.runtime.driver import Capabilities, DriverDevice, MemoryStats, Status, Ticket
from peertile.runtime.lease import LeaseTable, check_unique
from peertile.runtime.pool import MemoryPool
from peertile.runtime.reactor import reactor
from peertile.runtime.schedule import RoundRobin, SchedulingPolicy
from peertile.runtime.storage import Storage
from peertile.runtime.stream import Stream, live_submissions
from peertile.runtime.tensor import Tensor, array_for, converted, normal_shape

__all__ = ["Device", "Stream"]

_serials = itertools.count(1)


class Device:
    """One device of this process. `name` is e.g. "cpu:0".

    `persistent_programs` is how many programs a persistent partition gets by default.
    """

    __reduce_ex__ = not_pickled

    def __init__(self, driver: DriverDevice) -> None:
        self.serial = next(_serials)  # never used again, unlike id(): what is kept per device is found by it
        self.driver = driver
        self.name = f"{driver.kind.value}:{driver.ordinal}"
        self.capabilities: Capabilities = driver.capabilities
        self.leases = LeaseTable()
        self.pool = MemoryPool(driver)
        self.compiler: Any = None
        """What kernels launched here are compiled with; None for the compiler of the device's target."""
        self.marks = b""
        """What kernels that are compiled with marks get behind their arguments (see `peertile.timelines`)."""
        self.target: str | None = getattr(driver, "arch", None)
        """What kernels launched here are compiled for: a GPU's architecture ("sm_90"), None for this processor."""
        self.brief_ns = 1 << 62
        """The least time that a launch took which its caller waited for: what any takes, whatever its kernel does."""
        self.open_captures = 0
        self.streams: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()
        """By their ids: a set of weak references cannot be looked through while another thread adds to it."""
        self._graveyard: deque[tuple[str, Any]] = deque()
        self._names = itertools.count(1)
        self._closed = False
        self._lock = threading.RLock()
        self._policy: SchedulingPolicy | None = None
        self.default_stream = Stream(self, "the default stream")

    def __repr__(self) -> str:
        return f"Device({self.name})"

    @property
    def persistent_programs(self) -> int:
        """On cpu four programs per thread: enough to even out uneven tiles, few enough to stay cheap. On a GPU one per
        multiprocessor: a program that goes through tiles wants all of its shared memory."""
        return (1 if self.target is not None else 4) * self.capabilities.executors

    @property
    def policy(self) -> SchedulingPolicy:
        """Where operations go that name no stream: round robin over four streams, unless set."""
        policy = self._policy
        if policy is None:
            with self._lock:
                policy = self._policy
                if policy is None:
                    policy = self._policy = RoundRobin(self)
        return policy

    @policy.setter
    def policy(self, policy: SchedulingPolicy) -> None:
        self._policy = policy

    def stream(self, name: str | None = None, priority: int = 0) -> Stream:
        """A new stream; `name` is for errors. Priorities run from capabilities.stream_priorities[0], the least."""
        self._check_open()
        if not self.open_captures:  # which would see the questions
            live_submissions(self)  # streams that nobody has any more end with their last submission
        self.drain()
        return Stream(self, name or f"stream {next(self._names)}", priority)

    def memory(self) -> MemoryStats:
        """Bytes in use, peak, reserved and free, after letting go of submissions that are over."""
        live_submissions()
        return self.driver.memory_stats()

    def close(self) -> None:
        """Release the device; tensors on it can no longer be used. LaunchError while operations are pending."""
        with self._lock:
            if self._closed:
                return
            live_submissions()  # what is over holds nothing back; what is not, the driver refuses to close under
            reactor().forget(self)
            self.driver.close()
            self._closed = True

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def discard(self, destroy: str, handle: Any) -> None:
        """Destroy a handle later, with the driver's function of that name: called by finalisers, which may run
        inside a capture, a lock or a forked child."""
        self._graveyard.append((destroy, handle))

    def drain(self) -> None:
        """Destroy what finalisers left, unless a capture is open, which would see it."""
        while self._graveyard and not self.open_captures:
            try:
                destroy, handle = self._graveyard.popleft()
            except IndexError:  # another thread was faster
                return
            if not self._closed:
                getattr(self.driver, destroy)(handle)

    # ---------------------------------------------------------------- tensors

    def allocate(self, nbytes: int, name: str) -> Storage:
        """New memory, freed when the last tensor and lease on it are gone."""
        self._check_open()
        pool = self.pool
        try:
            address, release = pool.take(nbytes)
        except AllocationError:
            # What nobody waited for yet, and what the pool keeps, may be enough.
            live_submissions()
            pool.trim()
            address, release = pool.take(nbytes)
        return Storage(self, address, nbytes, release=release, name=name)

    def empty(self, shape: Any, dtype: DType) -> Tensor:
        """A tensor with undefined contents."""
        dims = normal_shape(shape)
        check_dtype(dtype)
        count = 1
        for n in dims:
            count *= n
        return Tensor(self.allocate(count * dtype.itemsize, f"a tensor {dtype}{list(dims)}"), dtype, dims)

    def asarray(self, source: Any, dtype: DType | None = None) -> Tensor:
        """A new tensor with a copy of `source` (anything numpy can read), converted to `dtype`."""
        outside_execution("pt.asarray")
        array, target = array_for(source, dtype)
        tensor = self.empty(array.shape, target)
        self._host_copy(tensor.address, array.ctypes.data, tensor.nbytes, "pt.asarray")
        return tensor

    def read_tensor(self, tensor: Tensor) -> np.ndarray[Any, np.dtype[Any]]:
        """A host copy, after whatever still writes the tensor has completed."""
        outside_execution("Tensor.numpy")
        tensor.storage.check_alive("Tensor.numpy")
        self.settle(tensor, writes=False)
        start, end = tensor.byte_range()
        raw = np.empty(end - start, np.uint8)
        self._host_copy(raw.ctypes.data, tensor.storage.address + start, raw.nbytes, "Tensor.numpy")
        strides = tuple(s * tensor.dtype.itemsize for s in tensor.strides)
        # Not as_strided, which goes through the dtype's name: numpy reads the one of f8e5m2 as a float of one byte.
        view = np.ndarray(tensor.shape, tensor.dtype.numpy, raw, tensor.offset - start, strides)
        return view if tensor.is_contiguous else view.copy()

    def write_tensor(self, tensor: Tensor, source: np.ndarray[Any, np.dtype[Any]]) -> None:
        """Replace the elements by `source`, after whatever still uses the tensor has completed."""
        outside_execution("Tensor.copy_from")
        tensor.storage.check_alive("Tensor.copy_from")
        if tensor.storage.borrows:
            check_unique(tensor.write_use(), "Tensor.copy_from")
        self.settle(tensor, writes=True)
        array = converted(source, tensor.dtype)
        if tensor.is_contiguous:
            self._host_copy(tensor.address, array.ctypes.data, tensor.nbytes, "Tensor.copy_from")
            return
        item = tensor.dtype.itemsize
        for index in np.ndindex(*tensor.shape[:-1]):
            row = tensor.address + item * sum(i * s for i, s in zip(index, tensor.strides, strict=False))
            step = tensor.strides[-1] * item
            for k in range(tensor.shape[-1]):
                self._host_copy(row + k * step, array[index].ctypes.data + k * item, item, "Tensor.copy_from")

    def settle(self, tensor: Tensor, writes: bool) -> None:
        """Wait for the submissions whose leases conflict with host access to the tensor's bytes."""
        start, end = tensor.byte_range()
        low, high = tensor.storage.address + start, tensor.storage.address + end
        for held in list(tensor.storage.claims.values()):
            for use, lease in list(held.items()):
                # A kernel that holds the storage as peer memory may be waiting for this very access.
                if use.high > low and use.low < high and not use.lifetime_only and (writes or use.writes):
                    lease.wait_done()

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
        record = self.driver.fault(ticket)
        self.driver.take_fault(ticket.stream)
        if record is not None:
            raise explain(record, ticket.name if status is Status.SKIPPED else None)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"{self.name} was closed; open a new device")
