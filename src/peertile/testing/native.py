"""Runs tile IR natively on numpy arrays: the other side of a differential test. One rank.

Expects IR as a frontend makes it, or already passed through the pipeline; packs the argument block by the slots of
the parameter types. Arrays are used in place on cpu, which addresses host memory, and copied there and back on a GPU.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from peertile.backends.cpu.compile import compile_kernel
from peertile.backends.cuda.compile import compile_kernel as compile_for_gpu
from peertile.errors import ArgumentError
from peertile.ir.core import Kernel
from peertile.ir.types import PointerType, TileType, Type, ViewType
from peertile.runtime.device import Device
from peertile.runtime.driver import FaultRecord, LaunchOptions

__all__ = ["pack_argument", "run_native"]


def pack_argument(t: Type, value: Any) -> bytes:
    """The slots of one argument: views and pointers are arrays, scalars are numbers."""
    if isinstance(t, ViewType):
        strides = (s // value.itemsize for s in value.strides)
        return struct.pack(f"<{1 + 2 * t.rank}q", value.ctypes.data, *value.shape, *strides)
    if isinstance(t, PointerType):
        return struct.pack("<q", value.ctypes.data)
    if isinstance(t, TileType):
        scalar = np.asarray(value).astype(t.dtype.numpy)
        if t.dtype.is_int:
            return struct.pack("<q" if t.dtype.is_signed else "<Q", int(scalar))
        return scalar.tobytes().ljust(8, b"\0")
    raise ArgumentError(f"argument: expected a view, pointer or scalar, got {t}")


def run_native(
    kernel: Kernel, grid: int | tuple[int, int, int], args: Sequence[Any], device: Device, *, timeout_s: float = 10.0
) -> FaultRecord | None:
    """Compile `kernel` (after the pipeline) for `device`, run it on `args` and wait; the fault, if there was one."""
    options = LaunchOptions(kernel.name, int(timeout_s * 1e9))
    shape = (grid, 1, 1) if isinstance(grid, int) else grid
    if device.target is not None:
        return _run_on_gpu(kernel, shape, args, device, options)
    module = device.driver.load_module(compile_kernel(kernel))
    block = b"".join(pack_argument(p.type, a) for p, a in zip(kernel.params, args, strict=True))
    try:
        return device.driver.launch_sync(device.default_stream.handle, module, shape, block, options)
    finally:
        device.driver.unload_module(module)


def _run_on_gpu(
    kernel: Kernel, grid: tuple[int, int, int], args: Sequence[Any], device: Device, options: LaunchOptions
) -> FaultRecord | None:
    """The same with copies of the arrays on the device, which go back into the arrays after the launch."""
    assert device.target is not None
    module = device.driver.load_module(compile_for_gpu(kernel, device.target))
    placed = [_Placed(device, a) if isinstance(a, np.ndarray) else None for a in args]
    try:
        block = b"".join(
            pack_argument(p.type, a) if place is None else place.pack(p.type)
            for p, a, place in zip(kernel.params, args, placed, strict=True)
        )
        record = device.driver.launch_sync(device.default_stream.handle, module, grid, block, options)
        for place in placed:
            if place is not None:
                place.fetch()
        return record
    finally:
        device.driver.unload_module(module)
        for place in placed:
            if place is not None:
                device.driver.free(place.memory)


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

    def pack(self, t: Type) -> bytes:
        """The slots of the argument."""
        array = self._array
        address = self._at + array.ctypes.data - self._low
        if isinstance(t, PointerType):
            return struct.pack("<q", address)
        strides = (s // array.itemsize for s in array.strides)
        return struct.pack(f"<{1 + 2 * array.ndim}q", address, *array.shape, *strides)

    def fetch(self) -> None:
        """Bring the bytes back."""
        self._move(self._low, self._at)
