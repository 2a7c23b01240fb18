"""Lazy constructors of operations, `pt.op`: each call makes a `DeviceOp`, and nothing has run.

Values are made by fills, by copies, or by kernels written here in the public language. Numbers that are computed
(`arange`, `randn`, …) are computed on the host when the operation runs, so they are the same on every target.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast, overload

import numpy as np

import peertile.language as T
from peertile.dtypes import DType, f32, from_numpy
from peertile.errors import AllocationError, ArgumentError
from peertile.kernel import KernelFunction, kernel
from peertile.memory_model import Cmp
from peertile.runtime.checks import check_dtype, check_finite, check_integer
from peertile.runtime.context import ExecutionContext
from peertile.runtime.device import Device
from peertile.runtime.op import DeviceOp, FunctionOp
from peertile.runtime.rawlaunch import RawLaunch, RawLaunchTemplate
from peertile.runtime.registry import current_device
from peertile.runtime.signals import set_signal_op, wait_eq_op
from peertile.runtime.tensor import FP8_LARGEST, Tensor, converted, host_array, normal_shape

__all__ = [
    "RawLaunch",
    "RawLaunchTemplate",
    "arange",
    "convert",
    "copy",
    "dup",
    "empty",
    "eye",
    "fill",
    "full",
    "host",
    "linspace",
    "ones",
    "rand",
    "randn",
    "set_signal",
    "value",
    "wait_eq",
    "with_context",
    "zeros",
]

Shape = int | Sequence[int]
Array = np.ndarray[Any, np.dtype[Any]]
U = TypeVar("U")

_TILE = 1024


def convert_elements(z: T.Exclusive, x: T.Shared) -> None:
    """z = x, converted to the element type of z. A kernel, made at its first use: imports stay light."""
    z.store(x.load_like(z).astype(z.dtype))


@functools.cache
def _conversion() -> KernelFunction:
    return kernel(convert_elements)


def _on(device: Device | None) -> Device:
    return current_device() if device is None else device


def pattern_of(number: Any, dtype: DType) -> int:
    """The bytes of `number` as `dtype`, converted as `astype` in a kernel does: a float becomes the nearest integer
    towards zero within the range, NaN becomes 0, integers wrap, fp8 saturates, other floats overflow to infinity."""
    check_dtype(dtype)
    if isinstance(number, np.ndarray) and number.ndim == 0:
        number = number[()]
    given: Any = number
    if isinstance(number, np.generic) and number.dtype.kind in "biufV":
        given = number.item() if number.dtype.kind != "V" else float(number)  # V: bf16 and fp8, which are not numpy's
    if not isinstance(given, bool | int | float):
        raise ArgumentError(f"value: expected a number, got {number!r}")
    if isinstance(given, int) and not -(1 << 63) <= given < 1 << 64:
        raise ArgumentError(f"value: expected an integer of at most 64 bits, got one of {given.bit_length()} bits")
    if dtype.is_bool:
        return int(given != 0)
    if dtype.is_int:
        if isinstance(given, float):
            given = (
                0
                if math.isnan(given)
                else dtype.max
                if given >= dtype.max
                else dtype.min
                if given <= dtype.min
                else given
            )
        return int(given) & ((1 << dtype.bits) - 1)
    with np.errstate(all="ignore"):
        if dtype.bits < 32 or not isinstance(given, float):
            given = np.float64(given) if dtype.bits == 64 else np.float32(given)
        limit = FP8_LARGEST.get(dtype.name)
        if limit is not None:
            given = np.clip(given, -limit, limit)
        return int.from_bytes(np.asarray(given).astype(dtype.numpy).tobytes(), "little")


def _tile_of(tensor: Tensor) -> tuple[int, ...]:
    last = 1 << max(tensor.shape[-1] - 1, 0).bit_length()
    return (*(1,) * (len(tensor.shape) - 1), min(last, _TILE))


# -------------------------------------------------------------------- values and memory


def value(result: U, *, device: Device | None = None) -> DeviceOp[U]:
    """No work: the result is `result`. The beginning of a chain.

    >>> import peertile as pt
    >>> pt.op.value(3).map(lambda n: n + 1).sync()
    4
    """
    return FunctionOp("value", _on(device), lambda context: result)


def empty(shape: Shape, dtype: DType, *, device: Device | None = None) -> DeviceOp[Tensor]:
    """A tensor with undefined contents, allocated when the operation runs.

    >>> import peertile as pt
    >>> pt.op.empty((2, 3), pt.bf16).sync().shape
    (2, 3)
    """
    where, dims = _on(device), normal_shape(shape)
    check_dtype(dtype)
    return FunctionOp("empty", where, lambda context: where.empty(dims, dtype))


def full(shape: Shape, number: float | int | bool, dtype: DType, *, device: Device | None = None) -> DeviceOp[Tensor]:
    """A tensor with every element `number`, converted to `dtype` as `astype` in a kernel does.

    >>> import peertile as pt
    >>> pt.op.full(3, 7, pt.i32).sync().numpy().tolist()
    [7, 7, 7]
    """
    return _filled("full", shape, number, dtype, device)


def zeros(shape: Shape, dtype: DType, *, device: Device | None = None) -> DeviceOp[Tensor]:
    """A tensor of zeros.

    >>> import peertile as pt
    >>> pt.op.zeros(2, pt.f32).sync().numpy().tolist()
    [0.0, 0.0]
    """
    return _filled("zeros", shape, 0, dtype, device)


def ones(shape: Shape, dtype: DType, *, device: Device | None = None) -> DeviceOp[Tensor]:
    """A tensor of ones.

    >>> import peertile as pt
    >>> pt.op.ones(2, pt.i8).sync().numpy().tolist()
    [1, 1]
    """
    return _filled("ones", shape, 1, dtype, device)


def _filled(name: str, shape: Shape, number: Any, dtype: DType, device: Device | None) -> DeviceOp[Tensor]:
    where, dims = _on(device), normal_shape(shape)
    pattern = pattern_of(number, dtype)

    def run(context: ExecutionContext) -> Tensor:
        tensor = where.empty(dims, dtype)
        _fill_now(context, name, tensor, pattern)
        return tensor

    return FunctionOp(name, where, run)


def _fill_now(context: ExecutionContext, name: str, tensor: Tensor, pattern: int) -> None:
    if not tensor.size:
        return
    lease = context.lease((tensor.write_use(),), name)
    ticket = context.driver.fill(
        context.handle,
        tensor.address,
        pattern,
        tensor.dtype.itemsize,
        tensor.size,
        name=name,
        on_caller=context.on_caller,
    )
    context.note(ticket, lease)


def fill(tensor: Tensor, number: float | int | bool) -> DeviceOp[None]:
    """Every element of `tensor` becomes `number`.

    >>> import peertile as pt
    >>> x = pt.empty(2, pt.f32)
    >>> pt.op.fill(x, 5).sync()
    >>> x.numpy().tolist()
    [5.0, 5.0]
    """
    _check_tensor("fill", tensor)
    tensor.write_use()
    if not tensor.is_contiguous:
        flat = full(tensor.shape, number, tensor.dtype, device=tensor.device)
        return _UnitOp("fill", flat.then(lambda x: _conversion()(tensor.partition(_tile_of(tensor)), x)))
    pattern = pattern_of(number, tensor.dtype)
    return FunctionOp("fill", tensor.device, lambda context: _fill_now(context, "fill", tensor, pattern), is_unit=True)


class _UnitOp(DeviceOp[None]):
    """An operation whose result is of no use."""

    __slots__ = ("_name", "_op")

    def __init__(self, name: str, op: DeviceOp[Any]) -> None:
        super().__init__()
        op._spend()
        self._name = name
        self._op = op

    @property
    def name(self) -> str:
        return self._name

    @property
    def device(self) -> Device:
        return self._op.device

    @property
    def is_unit(self) -> bool:
        return True

    def _execute(self, context: ExecutionContext) -> None:
        self._op._execute(context)


def _check_tensor(name: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        raise ArgumentError(f"{name}: expected a tensor, got {type(tensor).__name__}; make one with pt.asarray")


# -------------------------------------------------------------------- computed on the host


def arange(
    start: float, stop: float | None = None, step: float = 1, *, dtype: DType = f32, device: Device | None = None
) -> DeviceOp[Tensor]:
    """start, start + step, … below stop, as numpy.arange.

    >>> import peertile as pt
    >>> pt.op.arange(3, dtype=pt.i32).sync().numpy().tolist()
    [0, 1, 2]
    """
    for role, number in (("start", start), ("step", step), ("stop", start if stop is None else stop)):
        check_finite(f"arange: {role}", number)
    if step == 0:
        raise ArgumentError("arange: step: expected a number other than 0, got 0")
    first, last = (0, start) if stop is None else (start, stop)
    return _computed("arange", lambda: np.arange(first, last, step), dtype, device)


def linspace(
    start: float, stop: float, count: int, *, dtype: DType = f32, device: Device | None = None
) -> DeviceOp[Tensor]:
    """`count` numbers from start to stop, both included.

    >>> import peertile as pt
    >>> pt.op.linspace(0, 1, 3).sync().numpy().tolist()
    [0.0, 0.5, 1.0]
    """
    check_finite("linspace: start", start)
    check_finite("linspace: stop", stop)
    check_integer("linspace: count", count)
    return _computed("linspace", lambda: np.linspace(start, stop, count), dtype, device)


def eye(rows: int, columns: int | None = None, *, dtype: DType = f32, device: Device | None = None) -> DeviceOp[Tensor]:
    """Ones on the diagonal, zeros elsewhere.

    >>> import peertile as pt
    >>> pt.op.eye(2).sync().numpy().tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    check_integer("eye: rows", rows)
    if columns is not None:
        check_integer("eye: columns", columns)
    return _computed("eye", lambda: np.eye(rows, columns), dtype, device)


def rand(shape: Shape, *, seed: int, dtype: DType = f32, device: Device | None = None) -> DeviceOp[Tensor]:
    """Uniform numbers in [0, 1): the same for a seed on every target and rank (Philox).

    >>> import peertile as pt
    >>> bool((pt.op.rand(100, seed=1).sync().numpy() < 1).all())
    True
    """
    dims = normal_shape(shape)
    check_integer("rand: seed", seed)
    return _computed("rand", lambda: np.random.Generator(np.random.Philox(seed)).random(dims), dtype, device)


def randn(shape: Shape, *, seed: int, dtype: DType = f32, device: Device | None = None) -> DeviceOp[Tensor]:
    """Normal numbers of mean 0 and deviation 1: the same for a seed on every target and rank (Philox).

    >>> import peertile as pt
    >>> pt.op.randn((2, 2), seed=1).sync().shape
    (2, 2)
    """
    dims = normal_shape(shape)
    check_integer("randn: seed", seed)
    return _computed("randn", lambda: np.random.Generator(np.random.Philox(seed)).standard_normal(dims), dtype, device)


def _computed(name: str, compute: Callable[[], Array], dtype: DType, device: Device | None) -> DeviceOp[Tensor]:
    where = _on(device)
    check_dtype(dtype)

    def run(context: ExecutionContext) -> Tensor:
        try:
            with np.errstate(all="ignore"):  # a number beyond the range of dtype is infinity there, and no warning
                array = np.ascontiguousarray(compute().astype(dtype.numpy))
        except (MemoryError, OverflowError, ValueError) as error:
            # numpy says ValueError ("Maximum allowed size exceeded") where even the count does not fit a word.
            raise AllocationError(
                f"{name}: numbers: expected as many as fit the memory of this machine, where they are computed, got "
                f"more ({error}); ask for fewer, or compute them in a kernel"
            ) from None
        tensor = where.empty(array.shape, dtype)
        _upload(context, name, tensor, array)
        return tensor

    return FunctionOp(name, where, run)


# -------------------------------------------------------------------- copies


def _upload(context: ExecutionContext, name: str, tensor: Tensor, array: Array) -> None:
    """Enqueue the copy of a contiguous host array, which the submission keeps alive."""
    if not tensor.size:
        return
    lease = context.lease((tensor.write_use(),), name)
    context.retain(array)
    ticket = context.driver.copy(
        context.handle, tensor.address, array.ctypes.data, array.nbytes, name=name, on_caller=context.on_caller
    )
    context.note(ticket, lease)


def _download(context: ExecutionContext, name: str, tensor: Tensor, array: Array) -> None:
    if not tensor.size:
        return
    lease = context.lease((tensor.read_use(),), name)
    context.retain(array)
    ticket = context.driver.copy(
        context.handle, array.ctypes.data, tensor.address, array.nbytes, name=name, on_caller=context.on_caller
    )
    context.note(ticket, lease)
    context.host_pending = True


class _HostSource:
    """A host array on its way to a device: a copy of it, or the array itself, closed to writing meanwhile."""

    def __init__(self, source: Any, dtype: DType | None, *, snapshot: bool) -> None:
        given = host_array(source)
        self.dtype = from_numpy(given.dtype) if dtype is None else check_dtype(dtype)
        shaped = given.reshape(1) if given.ndim == 0 else given
        array = converted(shaped, self.dtype)
        if snapshot and np.may_share_memory(array, given):
            array = array.copy()
        self.array = array
        self._reopen = not snapshot and array.flags.writeable and np.may_share_memory(array, given)
        if self._reopen:
            array.flags.writeable = False

    def __del__(self) -> None:
        if self._reopen:
            self.array.flags.writeable = True


@overload
def copy(source: Tensor, *, name: str = ...) -> DeviceOp[Array]: ...
@overload
def copy(
    source: Any, *, dtype: DType | None = ..., device: Device | None = ..., snapshot: bool = ..., name: str = ...
) -> DeviceOp[Tensor]: ...
@overload
def copy(source: Any, *, to: Tensor | Array, snapshot: bool = ..., name: str = ...) -> DeviceOp[None]: ...
def copy(
    source: Any,
    *,
    to: Tensor | Array | None = None,
    dtype: DType | None = None,
    device: Device | None = None,
    snapshot: bool = True,
    name: str = "copy",
) -> DeviceOp[Any]:
    """Copy between host and device, or on a device.

    Without `to`, across: a tensor gives a numpy array, complete before any closure sees it; a host array gives a
    tensor. With `to`, into what exists: array to tensor, tensor to array, tensor to tensor of the same dtype and
    shape. A host source is copied when the operation is *made* (`snapshot=True`), or used in place and closed to
    writing until the copy is over (`snapshot=False`).

    >>> import numpy as np, peertile as pt
    >>> x = pt.op.copy(np.float32([1, 2])).sync()
    >>> y = pt.empty(2, pt.f32)
    >>> pt.op.copy(x, to=y).sync()
    >>> pt.op.copy(y).sync().tolist()
    [1.0, 2.0]
    """
    if isinstance(source, Tensor):
        if to is None:
            return _to_host(source, name)
        return _to_tensor(source, to, name) if isinstance(to, Tensor) else _into_array(source, to, name)
    if to is None:
        held = _HostSource(source, dtype, snapshot=snapshot)
        where = _on(device)

        def run(context: ExecutionContext) -> Tensor:
            tensor = where.empty(held.array.shape, held.dtype)
            context.retain(held)
            _upload(context, name, tensor, held.array)
            return tensor

        return FunctionOp(name, where, run)
    if not isinstance(to, Tensor):
        raise ArgumentError(f"copy: expected a tensor on one side, got {type(source).__name__} and {type(to).__name__}")
    to.write_use()
    held = _HostSource(source, to.dtype, snapshot=snapshot)
    if held.array.shape != to.shape:
        raise ArgumentError(f"copy: expected a source of shape {to.shape}, got {held.array.shape}")
    if not to.is_contiguous:
        staged = copy(held.array, device=to.device, snapshot=False, name=name)
        return _UnitOp(name, staged.then(lambda x: _conversion()(to.partition(_tile_of(to)), x)))

    def upload(context: ExecutionContext) -> None:
        context.retain(held)
        _upload(context, name, to, held.array)

    return FunctionOp(name, to.device, upload, is_unit=True)


def _to_host(source: Tensor, name: str) -> DeviceOp[Array]:
    if not source.is_contiguous:
        return dup(source).then(lambda dense: _to_host(dense, name))

    def run(context: ExecutionContext) -> Array:
        array = np.empty(source.shape, source.dtype.numpy)
        _download(context, name, source, array)
        return array

    return FunctionOp(name, source.device, run)


def _into_array(source: Tensor, to: Any, name: str) -> DeviceOp[None]:
    if not isinstance(to, np.ndarray) or not to.flags.c_contiguous or not to.flags.writeable:
        raise ArgumentError("copy: expected a contiguous numpy array that can be written as the destination")
    if to.shape != source.shape or to.dtype != source.dtype.numpy:
        raise ArgumentError(
            f"copy: expected a destination {source.dtype}{list(source.shape)}, got {to.dtype}{list(to.shape)}"
        )
    if not source.is_contiguous:
        return _UnitOp(name, dup(source).then(lambda dense: _into_array(dense, to, name)))
    return FunctionOp(name, source.device, lambda context: _download(context, name, source, to), is_unit=True)


def _to_tensor(source: Tensor, to: Tensor, name: str) -> DeviceOp[None]:
    if to.shape != source.shape or to.dtype is not source.dtype:
        raise ArgumentError(
            f"copy: expected a destination {source.dtype}{list(source.shape)}, got {to.dtype}{list(to.shape)}; "
            "convert changes element types"
        )
    if to.device is not source.device and not (
        to.device.capabilities.host_addressable and source.device.capabilities.host_addressable
    ):
        raise ArgumentError(
            f"copy: {to.device.name} and {source.device.name} do not reach each other; copy through the host"
        )
    use = to.write_use()
    if not (to.is_contiguous and source.is_contiguous):
        return _UnitOp(name, _conversion()(to.partition(_tile_of(to)), source))
    (start, end), other = to.byte_range(), source.byte_range()
    if to.storage is source.storage and start < other[1] and other[0] < end:
        raise ArgumentError(f"copy: source and destination overlap in {to.storage.name}; copy through another tensor")

    def run(context: ExecutionContext) -> None:
        if not source.size:
            return
        lease = context.lease((use, source.read_use()), name)
        ticket = context.driver.copy(
            context.handle, to.address, source.address, to.nbytes, name=name, on_caller=context.on_caller
        )
        context.note(ticket, lease)

    return FunctionOp(name, to.device, run, is_unit=True)


def dup(tensor: Tensor) -> DeviceOp[Tensor]:
    """A new tensor with the same elements, without gaps.

    >>> import peertile as pt
    >>> pt.op.dup(pt.ones(2, pt.f32)).sync().numpy().tolist()
    [1.0, 1.0]
    """
    _check_tensor("dup", tensor)

    def run(context: ExecutionContext) -> Tensor:
        fresh = tensor.device.empty(tensor.shape, tensor.dtype)
        context.run(_to_tensor(tensor, fresh, "dup"))
        return fresh

    return FunctionOp("dup", tensor.device, run)


def convert(tensor: Tensor, dtype: DType) -> DeviceOp[Tensor]:
    """A new tensor with the elements converted to `dtype`, as `astype` in a kernel does.

    >>> import peertile as pt
    >>> pt.op.convert(pt.ones(2, pt.f32), pt.i32).sync().numpy().tolist()
    [1, 1]
    """
    _check_tensor("convert", tensor)

    def run(context: ExecutionContext) -> Tensor:
        fresh = tensor.device.empty(tensor.shape, dtype)
        if tensor.size:
            context.run(_conversion()(fresh.partition(_tile_of(fresh)), tensor))
        return fresh

    return FunctionOp("convert", tensor.device, run)


# -------------------------------------------------------------------- host functions, contexts, words


def host(function: Callable[..., object], *args: Any, device: Device | None = None) -> DeviceOp[None]:
    """Call `function(*args)` on a thread of the driver, in the order of the stream. It may not use peertile.

    What it raises fails the stream: a DeviceFault from it. In a graph it is called at every replay.

    >>> import peertile as pt
    >>> seen = []
    >>> pt.op.host(seen.append, 1).sync()
    >>> seen
    [1]
    """
    if not callable(function):
        raise ArgumentError(f"host: expected a function, got {type(function).__name__}")
    name = f"host function {getattr(function, '__name__', type(function).__name__)}"

    def run(context: ExecutionContext) -> None:
        def call() -> None:
            function(*args)

        context.note(context.driver.callback(context.handle, call, name=name))

    return FunctionOp(name, _on(device), run, is_unit=True)


def with_context(build: Callable[[ExecutionContext], DeviceOp[U]], *, device: Device | None = None) -> DeviceOp[U]:
    """The operation that `build` makes of the execution context: when the stream has to be known.

    >>> import peertile as pt
    >>> pt.op.with_context(lambda context: pt.op.value(context.stream.name)).sync_on(
    ...     pt.current_device().stream("here")
    ... )
    'here'
    """

    def run(context: ExecutionContext) -> U:
        context.flush()
        op = build(context)
        if not isinstance(op, DeviceOp):
            raise ArgumentError(f"with_context: expected an operation, got {type(op).__name__}")
        return cast("U", context.run(op))

    return FunctionOp("with_context", _on(device), run)


def set_signal(tensor: Tensor, number: int) -> DeviceOp[None]:
    """The stream stores the unsigned 32-bit `number` into the first word of an i32 or u32 tensor: release, system.

    >>> import peertile as pt
    >>> word = pt.zeros(1, pt.u32)
    >>> pt.op.set_signal(word, 7).sync()
    >>> word.numpy().tolist()
    [7]
    """
    return set_signal_op(tensor, number)


def wait_eq(tensor: Tensor, number: int, *, width: int = 32, timeout_s: float | None = None) -> DeviceOp[None]:
    """The stream goes on once the first word of `tensor` equals `number`: acquire, system.

    32 bits of an i32 or u32 tensor, or `width=64` of an i64 or u64 one. WaitTimeout after `timeout_s` (default
    PEERTILE_WAIT_TIMEOUT_S).

    >>> import peertile as pt
    >>> word = pt.full(1, 3, pt.u32)
    >>> pt.op.wait_eq(word, 3).sync()
    """
    return wait_eq_op(tensor, number, width=width, timeout_s=timeout_s, cmp=Cmp.EQ)
