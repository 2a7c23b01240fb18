"""Eager constructors of tensors on the current device. Lazy forms are ops of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from peertile.dtypes import DType
from peertile.runtime.pointer import Pointer, pointer_to
from peertile.runtime.registry import current_device
from peertile.runtime.tensor import Tensor, normal_shape

__all__ = ["asarray", "empty", "full", "ones", "pointer", "zeros"]

Shape = int | Sequence[int]


def asarray(source: Any, dtype: DType | None = None) -> Tensor:
    """A new tensor with a copy of `source` (anything numpy reads), converted to `dtype` as numpy would.

    >>> import peertile as pt
    >>> pt.asarray([1, 2, 3], pt.f32).numpy().tolist()
    [1.0, 2.0, 3.0]
    """
    return current_device().asarray(source, dtype)


def empty(shape: Shape, dtype: DType) -> Tensor:
    """A tensor with undefined contents: `shape` elements (rank 1 to 4) of `dtype`.

    >>> import peertile as pt
    >>> pt.empty((2, 3), pt.bf16).shape
    (2, 3)
    """
    return current_device().empty(shape, dtype)


def full(shape: Shape, value: float | int | bool, dtype: DType) -> Tensor:
    """A tensor with every element `value`, converted to `dtype`.

    >>> import peertile as pt
    >>> pt.full(3, 7, pt.i32).numpy().tolist()
    [7, 7, 7]
    """
    tensor = empty(shape, dtype)
    device = tensor.device
    pattern = int.from_bytes(np.asarray(value).astype(dtype.numpy).tobytes(), "little")
    if tensor.size:
        ticket = device.driver.fill(
            device.default_stream.handle,
            tensor.address,
            pattern,
            dtype.itemsize,
            tensor.size,
            name="pt.full",
            on_caller=True,
        )
        device.wait_ticket(ticket)
    return tensor


def zeros(shape: Shape, dtype: DType) -> Tensor:
    """A tensor of zeros.

    >>> import peertile as pt
    >>> pt.zeros((2, 2), pt.f32).numpy().sum()
    np.float32(0.0)
    """
    return full(normal_shape(shape), 0, dtype)


def ones(shape: Shape, dtype: DType) -> Tensor:
    """A tensor of ones.

    >>> import peertile as pt
    >>> pt.ones(4, pt.f64).numpy().sum()
    np.float64(4.0)
    """
    return full(normal_shape(shape), 1, dtype)


def pointer(address: int, dtype: DType, nbytes: int, *, owner: Any = None) -> Pointer:
    """A `T.Pointer` argument for memory that somebody else allocated: `nbytes` bytes at `address`.

    Checked at launch to be accessible to the device; `owner` is kept alive as long as it is used.

    >>> import numpy as np, peertile as pt
    >>> x = np.zeros(4, np.float32)
    >>> pt.pointer(x.ctypes.data, pt.f32, x.nbytes, owner=x).nbytes
    16
    """
    return pointer_to(current_device(), address, dtype, nbytes, owner)
