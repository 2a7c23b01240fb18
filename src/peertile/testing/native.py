"""Runs tile IR natively on numpy arrays: the other side of a differential test. One rank, cpu only.

Expects IR as a frontend makes it, or already passed through the pipeline; packs the argument block by
the slots of the parameter types. Arrays are used in place: the cpu device addresses host memory.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from peertile.backends.cpu.compile import compile_kernel
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
    """Compile `kernel` (after the pipeline), run it on `args` and wait; the fault, if there was one."""
    module = device.driver.load_module(compile_kernel(kernel))
    block = b"".join(pack_argument(p.type, a) for p, a in zip(kernel.params, args, strict=True))
    options = LaunchOptions(kernel.name, int(timeout_s * 1e9))
    shape = (grid, 1, 1) if isinstance(grid, int) else grid
    try:
        return device.driver.launch_sync(device.default_stream.handle, module, shape, block, options)
    finally:
        device.driver.unload_module(module)
