"""Eager constructors of tensors on the current device. The lazy forms are in `op.py`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from peertile import op
from peertile.dtypes import DType, f32
from peertile.errors import ArgumentError, UsageError
from peertile.runtime.checks import check_dtype
from peertile.runtime.context import outside_execution
from peertile.runtime.interop import foreign_array, tensor_from_address, tensor_from_foreign
from peertile.runtime.pointer import Pointer, pointer_to
from peertile.runtime.registry import current_device
from peertile.runtime.storage import Storage
from peertile.runtime.tensor import Tensor, host_array, normal_shape

__all__ = [
    "arange",
    "asarray",
    "convert",
    "dup",
    "empty",
    "eye",
    "from_address",
    "from_dlpack",
    "full",
    "linspace",
    "ones",
    "pointer",
    "rand",
    "randn",
    "tensor_spec",
    "zeros",
]

Shape = int | Sequence[int]


def asarray(source: Any, dtype: DType | None = None) -> Tensor:
    """A new tensor with a copy of `source`, converted to `dtype` as `astype` in a kernel does.

    `source` is anything that numpy reads, or an array with DLPack: one of torch, also in bf16, fp8, or on the GPU.

    >>> import peertile as pt
    >>> pt.asarray([1, 2, 3], pt.f32).numpy().tolist()
    [1.0, 2.0, 3.0]
    """
    device = current_device()
    if hasattr(source, "__dlpack__") and not isinstance(source, np.ndarray | Tensor):
        try:
            array = host_array(source)
        except (TypeError, RuntimeError):  # what torch says of bf16, fp8 and GPUs
            array = None
        source = foreign_array(device, source) if array is None or array.dtype.hasobject else array
    return device.asarray(source, dtype)


def empty(shape: Shape, dtype: DType) -> Tensor:
    """A tensor with undefined contents: `shape` elements (rank 1 to 4) of `dtype`.

    >>> import peertile as pt
    >>> pt.empty((2, 3), pt.bf16).shape
    (2, 3)
    """
    return current_device().empty(shape, dtype)


def full(shape: Shape, value: float | int | bool, dtype: DType) -> Tensor:
    """A tensor with every element `value`, converted to `dtype` as `astype` in a kernel does: towards zero
    and within the range for integers, NaN to 0; integers wrap, fp8 saturates. An integer has at most 64 bits.

    >>> import peertile as pt
    >>> pt.full(3, 7, pt.i32).numpy().tolist()
    [7, 7, 7]
    """
    outside_execution("pt.full")
    pattern = op.pattern_of(value, dtype)
    tensor = empty(shape, dtype)
    device = tensor.device
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


def arange(start: float, stop: float | None = None, step: float = 1, *, dtype: DType = f32) -> Tensor:
    """start, start + step, … below stop, as numpy.arange.

    >>> import peertile as pt
    >>> pt.arange(3, dtype=pt.i32).numpy().tolist()
    [0, 1, 2]
    """
    return op.arange(start, stop, step, dtype=dtype).sync()


def linspace(start: float, stop: float, count: int, *, dtype: DType = f32) -> Tensor:
    """`count` numbers from start to stop, both included.

    >>> import peertile as pt
    >>> pt.linspace(0, 1, 3).numpy().tolist()
    [0.0, 0.5, 1.0]
    """
    return op.linspace(start, stop, count, dtype=dtype).sync()


def eye(rows: int, columns: int | None = None, *, dtype: DType = f32) -> Tensor:
    """Ones on the diagonal, zeros elsewhere.

    >>> import peertile as pt
    >>> pt.eye(2).numpy().tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    return op.eye(rows, columns, dtype=dtype).sync()


def rand(shape: Shape, *, seed: int, dtype: DType = f32) -> Tensor:
    """Uniform numbers in [0, 1), the same for a seed on every target and rank.

    >>> import peertile as pt
    >>> pt.rand(100, seed=1).numpy().max() < 1
    np.True_
    """
    return op.rand(shape, seed=seed, dtype=dtype).sync()


def randn(shape: Shape, *, seed: int, dtype: DType = f32) -> Tensor:
    """Normal numbers of mean 0 and deviation 1, the same for a seed on every target and rank.

    >>> import peertile as pt
    >>> pt.randn((2, 2), seed=1).shape
    (2, 2)
    """
    return op.randn(shape, seed=seed, dtype=dtype).sync()


def dup(tensor: Tensor) -> Tensor:
    """A new tensor with the same elements, without gaps.

    >>> import peertile as pt
    >>> pt.dup(pt.ones(2, pt.f32)).numpy().tolist()
    [1.0, 1.0]
    """
    return op.dup(tensor).sync()


def convert(tensor: Tensor, dtype: DType) -> Tensor:
    """A new tensor with the elements converted to `dtype`, as `astype` in a kernel does.

    >>> import peertile as pt
    >>> pt.convert(pt.ones(2, pt.f32), pt.i32).numpy().tolist()
    [1, 1]
    """
    return op.convert(tensor, dtype).sync()


def from_dlpack(source: Any) -> Tensor:
    """A tensor over the memory of an array of another library (torch, cupy, numpy, …): no copy, both see writes.

    The array stays alive while the memory is in use here. Other libraries' work is not ordered with ours:
    synchronise before handing memory over. The other way, `torch.from_dlpack(tensor)` takes a tensor of ours.

    >>> import numpy as np, peertile as pt
    >>> a = np.zeros(3, np.float32)
    >>> x = pt.from_dlpack(a)
    >>> pt.op.fill(x, 2).sync()
    >>> a.tolist()
    [2.0, 2.0, 2.0]
    """
    return tensor_from_foreign(current_device(), source)


def from_address(
    address: int,
    shape: Shape,
    dtype: DType,
    *,
    owner: object = None,
    release: Callable[[int], None] | None = None,
    is_unowned: bool = False,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """A tensor over memory at `address`. Exactly one says who owns it: `owner`, an object that is kept alive;
    `release`, called once with the address when the memory is no longer used; or `is_unowned=True`: it outlives us.

    >>> import numpy as np, peertile as pt
    >>> a = np.arange(3, dtype=np.int32)
    >>> pt.from_address(a.ctypes.data, 3, pt.i32, owner=a).numpy().tolist()
    [0, 1, 2]
    """
    if (owner is not None) + (release is not None) + is_unowned != 1:
        raise ArgumentError("from_address: expected exactly one of owner, release and is_unowned=True")
    return tensor_from_address(current_device(), address, shape, dtype, strides, owner, release, "memory at an address")


_NOWHERE = 1 << 61  # beyond every address space; each description has a range of its own, so that none overlap
_descriptions = itertools.count()


class _NoStorage(Storage):
    """Describes memory that does not exist."""

    __slots__ = ()

    def check_alive(self, user: str) -> None:
        raise UsageError(f"{user}: expected a tensor, got a description made by tensor_spec; it holds no data")


def tensor_spec(shape: Shape, dtype: DType) -> Tensor:
    """A description of a tensor, without memory: what `kernel.warm_up` compiles for. It can be cut and viewed.

    >>> import peertile as pt
    >>> pt.tensor_spec((100, 100), pt.f32).partition((16, 16)).num_tiles
    (7, 7)
    """
    dims = normal_shape(shape)
    check_dtype(dtype)
    address = _NOWHERE + next(_descriptions) % (1 << 20) * (1 << 41)
    storage = _NoStorage(current_device(), address, prod(dims) * dtype.itemsize, release=None, name="a description")
    storage.closed = "made to describe"
    return Tensor(storage, dtype, dims)
