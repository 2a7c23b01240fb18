"""Tensors over memory that somebody else owns: DLPack, array interfaces, bare addresses. Copies nothing.

The owner stays alive while the tensor, a launch or a graph uses the memory. Two tensors over the same bytes are leased
as one memory. What others do with it meanwhile is not ordered by leases: synchronise before handing memory over, in
both directions.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from peertile.dtypes import DType, from_numpy
from peertile.errors import ArgumentError, UnsupportedError
from peertile.runtime.aliases import join
from peertile.runtime.device import Device
from peertile.runtime.dlpack import capsule_of, dlpack_device, import_capsule
from peertile.runtime.storage import Storage
from peertile.runtime.tensor import Tensor, contiguous_strides, normal_shape

__all__ = ["foreign_array", "tensor_from_address", "tensor_from_foreign"]


def tensor_from_address(
    device: Device,
    address: int,
    shape: int | Sequence[int],
    dtype: DType,
    strides: Sequence[int] | None,
    owner: object,
    release: Callable[[int], None] | None,
    what: str,
) -> Tensor:
    """A tensor over [address, ...). `owner` is kept alive, or `release(address)` is called once at the end."""
    dims = normal_shape(shape)
    steps = contiguous_strides(dims) if strides is None else tuple(int(s) for s in strides)
    if len(steps) != len(dims):
        raise ArgumentError(f"strides: expected {len(dims)} for shape {dims}, got {steps}")
    if any(s < 0 for s in steps):
        raise ArgumentError(f"strides: expected elements >= 0, got {steps}; copy the array first")
    size = prod(dims)
    if size and address <= 0:
        raise ArgumentError(f"address: expected the address of {size} elements, got {address}")
    if address % dtype.itemsize:
        raise ArgumentError(
            f"address: expected one aligned to {dtype.itemsize} bytes for {dtype}, got {address:#x} "
            f"({address % dtype.itemsize} bytes off)"
        )
    last = sum((n - 1) * s for n, s in zip(dims, steps, strict=True)) if size else -1
    nbytes = (last + 1) * dtype.itemsize
    if size and not device.driver.accessible(address, nbytes):
        raise ArgumentError(f"address: {device.name} cannot reach {nbytes} bytes at {address:#x}")
    storage = Storage(device, address, nbytes, release=release, owner=owner, name=f"{what} {dtype}{list(dims)}")
    if isinstance(owner, Tensor):
        join(owner.storage)
    join(storage)
    return Tensor(storage, dtype, dims, steps)


def foreign_array(device: Device, source: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """A host copy of an array of another library that numpy does not read: of bf16 or fp8, or on a GPU."""
    if source.__dlpack_device__()[0] != 1:
        return tensor_from_foreign(device, source).numpy()
    foreign = import_capsule(capsule_of(source))
    shape, size = foreign.shape, foreign.dtype.itemsize
    steps = foreign.strides or contiguous_strides(shape)
    elements = 1 + sum((n - 1) * step for n, step in zip(shape, steps, strict=True)) if prod(shape) else 0
    raw: Any = (ctypes.c_uint8 * (elements * size)).from_address(foreign.address)
    return np.ndarray(shape, foreign.dtype.numpy, raw, 0, tuple(step * size for step in steps)).copy()


def tensor_from_foreign(device: Device, source: Any) -> Tensor:
    """A tensor over an array of another library."""
    if isinstance(source, Tensor):
        return source
    if isinstance(source, np.ndarray):  # by its own interface: DLPack of numpy has no bf16 and no fp8
        if dlpack_device(device)[0] != 1:
            raise UnsupportedError(f"from_dlpack: {device.name} cannot use host memory in place; use pt.asarray")
        if not source.flags.writeable:
            raise ArgumentError("from_dlpack: expected an array that can be written, got a read-only one; copy it")
        dtype = from_numpy(source.dtype)
        if any(s % dtype.itemsize for s in source.strides):
            raise ArgumentError(f"from_dlpack: expected strides of whole elements, got {source.strides} bytes")
        steps = tuple(s // dtype.itemsize for s in source.strides) or (1,)
        shape = source.shape or (1,)
        return tensor_from_address(device, source.ctypes.data, shape, dtype, steps, source, None, "numpy array")
    if not hasattr(source, "__dlpack__"):
        if hasattr(source, "__cuda_array_interface__"):
            raise UnsupportedError(f"from_dlpack: {device.name} cannot use CUDA memory; move the array to the host")
        raise ArgumentError(f"from_dlpack: expected an object with __dlpack__, got {type(source).__name__}")
    where = tuple(source.__dlpack_device__())
    if where != dlpack_device(device):
        raise UnsupportedError(
            f"from_dlpack: {device.name} is DLPack device {dlpack_device(device)}, the array is on {where}; "
            "move it there first"
        )
    foreign = import_capsule(capsule_of(source))
    shape = foreign.shape or (1,)
    strides = foreign.strides if foreign.shape else (1,)
    return tensor_from_address(
        device, foreign.address, shape, foreign.dtype, strides, foreign.owner, None, "DLPack array"
    )
