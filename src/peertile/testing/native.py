"""Runs tile IR natively on numpy arrays: the other side of a differential test.

Expects IR as a frontend makes it, or already passed through the pipeline; packs the argument block by the slots of
the parameter types. Arrays are used in place on cpu, which addresses host memory, and copied there and back on a GPU
and on the simulated machine.
Several ranks, on cpu alone, are launches on streams of their own in this process.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from peertile.backends.cpu.compile import compile_kernel
from peertile.backends.cuda.compile import compile_kernel as compile_for_gpu
from peertile.backends.rehearsed import rehearsed
from peertile.config import config
from peertile.errors import ArgumentError
from peertile.ir.core import Kernel
from peertile.ir.types import ObjectType, PointerType, SymmetricType, TileType, Type, ViewType
from peertile.meaning import PerRank
from peertile.runtime.device import Device
from peertile.runtime.driver import FaultRecord, LaunchOptions, LoadableBinary, PrintSink
from peertile.runtime.drivers.sim import SimDevice
from peertile.sim.binary import compiled

__all__ = ["pack_argument", "run_native"]


def pack_argument(t: Type, value: Any, rank: int = 0, keep: list[Any] | None = None) -> bytes:
    """The slots of one argument on `rank`: arrays for views and pointers, numbers for scalars, a `PerRank` of arrays
    for a symmetric object, a mapping for a communication object. Tables that the slots point at go to `keep`, which
    has to live as long as the launch."""
    if isinstance(t, ObjectType):
        return b"".join(pack_argument(ft, value[name], rank, keep) for name, ft in t.fields.items())
    if isinstance(t, SymmetricType):
        arrays = value if isinstance(value, PerRank) else (value,)
        if keep is None:
            raise ArgumentError(f"keep: expected a list for the table of {t}, got none")
        table = np.array([rank, len(arrays), *(a.ctypes.data for a in arrays)], np.int64)
        keep.append(table)
        return struct.pack("<2q", table.ctypes.data, 0) + _extents(arrays[rank])
    own = value[rank] if isinstance(value, PerRank) else value
    if isinstance(t, ViewType):
        return struct.pack("<q", own.ctypes.data) + _extents(own)
    if isinstance(t, PointerType):
        return struct.pack("<q", own.ctypes.data)
    if isinstance(t, TileType):
        scalar = np.asarray(own).astype(t.dtype.numpy)
        if t.dtype.is_int:
            return struct.pack("<q" if t.dtype.is_signed else "<Q", int(scalar))
        return scalar.tobytes().ljust(8, b"\0")
    raise ArgumentError(f"argument: expected a view, pointer, object or scalar, got {t}")


def _extents(array: np.ndarray[Any, np.dtype[Any]]) -> bytes:
    """Extents, then strides in elements."""
    return struct.pack(f"<{2 * array.ndim}q", *array.shape, *(s // array.itemsize for s in array.strides))


def run_native(
    kernel: Kernel,
    grid: int | tuple[int, int, int],
    args: Sequence[Any],
    device: Device,
    *,
    ranks: int = 1,
    timeout_s: float = 10.0,
    on_print: Sequence[PrintSink] = (),
) -> FaultRecord | None:
    """Compile `kernel` (after the pipeline) for `device`, run it on `args` and wait; the first fault, if there was one.

    An argument is what `run_grid` takes. `on_print` has one sink for each rank, or none.
    """
    options = LaunchOptions(kernel.name, int(timeout_s * 1e9))
    shape = (grid, 1, 1) if isinstance(grid, int) else grid
    driver = device.driver
    if isinstance(driver, SimDevice) or device.target is not None:
        if ranks != 1:
            raise ArgumentError(f"ranks: expected 1 on {device}, got {ranks}")
        options = options._replace(on_print=on_print[0] if on_print else None)
        binary: LoadableBinary
        if device.target is None:
            types = {name: v.type for name, v in zip(kernel.param_names, kernel.params, strict=True)}
            binary = compiled(kernel, types).binary
        else:
            made = compile_for_gpu(kernel, device.target, keep=True)
            binary = made if config().rehearse is None else rehearsed(compile_kernel(kernel), made)
        return _run_on_copies(kernel, binary, shape, args, device, options)
    module = driver.load_module(compile_kernel(kernel))
    streams = [driver.create_stream() for _ in range(ranks)]
    keep: list[Any] = []
    try:
        tickets = []
        for rank, stream in enumerate(streams):
            block = b"".join(pack_argument(p.type, a, rank, keep) for p, a in zip(kernel.params, args, strict=True))
            if on_print:
                options = options._replace(on_print=on_print[rank])
            tickets.append(driver.launch(stream, module, shape, block, options))
        for ticket in tickets:
            driver.wait(ticket)
        return next(filter(None, map(driver.fault, tickets)), None)
    finally:
        for stream in streams:
            driver.destroy_stream(stream)
        driver.unload_module(module)


def _run_on_copies(
    kernel: Kernel, binary: LoadableBinary, grid: tuple[int, int, int], args: Sequence[Any], device: Device,
    options: LaunchOptions,
) -> FaultRecord | None:  # fmt: skip
    """The same with copies of the arrays on the device, which go back into the arrays after the launch."""
    module = device.driver.load_module(binary)
    copies = _Copies(device)
    try:
        block = b"".join(copies.pack(p.type, a) for p, a in zip(kernel.params, args, strict=True))
        record = device.driver.launch_sync(device.default_stream.handle, module, grid, block, options)
        copies.fetch()
        return record
    finally:
        device.driver.unload_module(module)
        copies.free()


class _Copies:
    """The arrays of the arguments of one rank on a device: memory that arguments share here, they share there."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._placed: dict[int, _Placed] = {}
        self._table = np.array([0, 1, 0, 0], np.int64)  # kernels read two bases before they know how many there are

    def pack(self, t: Type, value: Any) -> bytes:
        """The slots of one argument. By the type and not the value: a scalar may come as an array of rank 0."""
        if isinstance(t, ObjectType):
            return b"".join(self.pack(ft, value[name]) for name, ft in t.fields.items())
        if isinstance(t, TileType):
            return pack_argument(t, value)
        own = value[0] if isinstance(value, PerRank) else value
        address = self._address(own)
        if isinstance(t, SymmetricType):
            # Of one heap, which begins at address 0: the fields of an object have one table, as they have in a launch.
            return struct.pack("<2q", self._address(self._table), address) + _extents(own)
        return struct.pack("<q", address) + (b"" if isinstance(t, PointerType) else _extents(own))

    def _address(self, array: np.ndarray[Any, np.dtype[Any]]) -> int:
        whole = array
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        place = self._placed.get(id(whole))  # which the place keeps alive
        if place is None:
            place = self._placed[id(whole)] = _Placed(self._device, whole)
        return place.address_of(array)

    def fetch(self) -> None:
        """Bring the bytes back."""
        for place in self._placed.values():
            place.fetch()

    def free(self) -> None:
        for place in self._placed.values():
            self._device.driver.free(place.memory)


class _Placed:
    """The bytes that an array spans, on a device: aligned there as here, since kernels are told about alignment."""

    def __init__(self, device: Device, array: np.ndarray[Any, np.dtype[Any]]) -> None:
        self._device = device
        self._array = array
        low, high = byte_bounds(array) if array.size else (array.ctypes.data, array.ctypes.data)
        self._low, self._nbytes = low, high - low
        self.memory = device.driver.allocate(self._nbytes + 128)
        self._at = self.memory + low % 64
        self._move(self._at, low)

    def _move(self, dst: int, src: int) -> None:
        if self._nbytes:
            driver = self._device.driver
            self._device.wait_ticket(driver.copy(self._device.default_stream.handle, dst, src, self._nbytes))

    def address_of(self, array: np.ndarray[Any, np.dtype[Any]]) -> int:
        """Where the first element of a view of it is."""
        return self._at + array.ctypes.data - self._low

    def fetch(self) -> None:
        """Bring the bytes back."""
        self._move(self._low, self._at)
