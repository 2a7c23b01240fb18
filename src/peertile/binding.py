"""What a call of a kernel is made of: each argument bound to its parameter, and all of them together. Compiles nothing
and launches nothing.

A host object becomes an `Argument` by the role of its parameter; objects of one's own take part through the protocols
here.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np

from peertile.backends.binary import Compiled
from peertile.backends.marks import MARK
from peertile.captures import Snapshot
from peertile.dtypes import DType, from_numpy
from peertile.errors import ArgumentError, PeertileError
from peertile.ir.types import Access, PointerType, TileType, Type
from peertile.language.annotations import KernelParam, Role
from peertile.runtime.argument import Argument, Use, canonical
from peertile.runtime.device import Device
from peertile.runtime.driver import LaunchOptions, ModuleHandle, PreparedLaunch
from peertile.runtime.op import DeviceOp
from peertile.runtime.tensor import FP8_LARGEST, Partition, Tensor

__all__ = [
    "Bound",
    "ChannelArgument",
    "Grid",
    "GroupLike",
    "KernelInput",
    "KernelOutput",
    "LazyArgument",
    "MulticastArgument",
    "PeerArgument",
    "Ready",
    "Specialization",
    "bind_one",
    "scalar",
]

Grid = tuple[int, int, int]


class PeerArgument(Protocol):
    """Host objects that a `T.Peer` parameter takes."""

    def peer_argument(self, access: Access) -> Argument: ...


class MulticastArgument(Protocol):
    """Host objects that a `T.Multicast` parameter takes."""

    def multicast_argument(self) -> Argument: ...


class ChannelArgument(Protocol):
    """Host objects that `T.Signal`, `T.Counter`, `T.Barrier` and `T.Mailbox` parameters take."""

    def channel_argument(self) -> Argument: ...


class KernelInput(Protocol):
    """Objects of one's own that a `T.Shared` parameter takes: the launch reads the tensor that they give.

    `retain(owner)` keeps an object alive until every launch of the binding is over (in a graph: as long as the
    graph), beside the tensor's own memory.
    """

    def kernel_input(self, retain: Callable[[object], None]) -> Tensor:
        """The tensor to read."""


class KernelOutput(Protocol):
    """Objects of one's own that a `T.Exclusive` parameter takes: the launch writes the partition that they give."""

    def kernel_output(self, retain: Callable[[object], None]) -> Partition:
        """The partition to write."""


class GroupLike(Protocol):
    """What a launch needs of a group of ranks."""

    @property
    def serial(self) -> int:
        """Never 0 and never used again: what is kept per group must not be found by a later one."""

    @property
    def rank(self) -> int: ...
    @property
    def abort_address(self) -> int: ...
    def check(self) -> None: ...
    def fail(self, cause: str) -> None: ...
    def failure(self) -> PeertileError | None: ...


class Specialization:
    """One compiled form of a kernel, and where it is loaded (`modules`, `options`: per device and group)."""

    __slots__ = (
        "binary", "captures", "compiled", "extent_checks", "has_pointers", "is_marked", "may_change", "modules",
        "most_ns", "ns_per_program", "options", "prepared", "timed",
    )  # fmt: skip

    def __init__(self, compiled: Compiled, captures: Snapshot, types: Iterable[Type]) -> None:
        self.compiled = compiled
        # What every launch looks at, in the form that costs it least.
        self.extent_checks = [(c.lhs, c.lhs_axis, c.lhs_size, c.rhs, c.rhs_axis, c.rhs_size) for c in compiled.checks]
        self.has_pointers = any(type(t) is PointerType for t in types)
        self.captures = captures
        self.is_marked = any(place.kind == MARK for place in compiled.binary.places)
        self.may_change = any(captures)
        self.binary = compiled.binary
        self.modules: dict[int, ModuleHandle] = {}
        self.options: dict[int, LaunchOptions] = {}
        self.prepared: dict[tuple[Grid, int, int], PreparedLaunch] = {}
        """What the driver has checked and looked up for a grid, a device and a group."""
        # How long launches took: `await` does what is known to be brief on the thread that it has.
        self.ns_per_program: float | None = None
        self.most_ns = 1 << 62
        self.timed = 0

    def took(self, ns: int, programs: int) -> None:
        """A launch was timed on the thread that ran it."""
        self.timed += 1
        mean = ns / max(programs, 1)
        self.ns_per_program = mean if self.ns_per_program is None else min(self.ns_per_program, mean)


class Ready(NamedTuple):
    """All that a launch needs but the leases, as a launch with the same arguments found it out before.

    It holds no storage: the packed block names addresses that are the arguments' as long as those exist.
    """

    spec: Specialization
    prepared: PreparedLaunch
    args: bytes
    maker: tuple[Any, ...]
    """How its fault is told, as `ExecutionContext.makers` has it."""
    compiler: Any
    """Of the device, when this was found out."""


class Bound:
    """Arguments of one call, bound and packed. It holds none of the user's handles, whose views end when the user
    drops them: a submission keeps it."""

    __slots__ = (
        "arguments", "compiler", "consts", "device", "grid", "group", "groups", "keep", "key", "packed", "params",
        "spec", "uses",
    )  # fmt: skip

    def __init__(
        self,
        params: tuple[KernelParam, ...],
        arguments: list[Argument],
        consts: dict[str, Any],
        key: tuple[Any, ...],
        grid: Grid | None,
        device: Device,
        compiler: Any,
        group: GroupLike | None,
        groups: dict[str, int] | None,
        keep: list[Any],
        uses: list[Use],
    ) -> None:
        """`compiler` is the device's own, if it had one, when `key` was made: the two go together."""
        self.keep = keep
        self.compiler = compiler
        self.groups = groups
        self.params = params
        self.arguments = arguments
        self.consts = consts
        self.key = key
        self.grid = grid
        self.device = device
        self.group = group
        self.uses = uses
        # The words as passed, once they are known to launch: arguments do not change, so a repeated launch of
        # one binding does not check and join them again.
        self.packed: bytes | None = None
        self.spec: Specialization | None = None


_SCALAR_FORMAT = {
    "bool": "<?7x", "i8": "<q", "i16": "<q", "i32": "<q", "i64": "<q", "u8": "<Q", "u16": "<Q", "u32": "<Q",
    "u64": "<Q", "f32": "<f4x", "f64": "<d", "f16": "<e6x",
}  # fmt: skip


_INTEGERS: dict[tuple[str, int], Argument] = {}
_MOST_INTEGERS = 4096
"""Integers that were passed as scalars, with their dtypes: sizes and counts come again and again."""


def scalar(name: str, value: Any, dtype: DType | None) -> Argument:
    """A scalar argument; without a declared dtype, int is i64, float f32, and numpy scalars their own."""
    if type(value) is not int or dtype is None:
        return _any_scalar(name, value, dtype)
    found = _INTEGERS.get((dtype.name, value))
    if found is None:
        found = _any_scalar(name, value, dtype)
        if len(_INTEGERS) >= _MOST_INTEGERS:
            _INTEGERS.clear()
        _INTEGERS[dtype.name, value] = found
    return found


def _any_scalar(name: str, value: Any, dtype: DType | None) -> Argument:
    if dtype is None:
        if isinstance(value, bool):
            dtype = from_numpy(np.bool_)
        elif isinstance(value, int):
            dtype = from_numpy(np.int64)
        elif isinstance(value, float):
            dtype = from_numpy(np.float32)
        elif isinstance(value, np.generic):
            dtype = from_numpy(value.dtype)
        else:
            raise ArgumentError(f"{name}: expected a number, got {type(value).__name__}")
    kinds: Any = (bool, int, float, np.generic) if dtype.is_float else (bool, int, np.integer, np.bool_)
    number: Any = value
    if not isinstance(number, kinds):
        raise ArgumentError(f"{name}: expected a number that fits {dtype}, got {value!r}")
    if dtype.is_int and not dtype.min <= int(number) <= dtype.max:
        raise ArgumentError(f"{name}: expected {dtype.min} to {dtype.max} for {dtype}, got {value}")
    try:
        words = _scalar_words(number, dtype)
    except OverflowError:
        most = FP8_LARGEST.get(dtype.name) or float(np.finfo(np.float32 if dtype.name == "bf16" else dtype.numpy).max)
        raise ArgumentError(
            f"{name}: expected {-most:g} to {most:g} for {dtype}, or an infinity, got {_shortened(value)}"
        ) from None
    return Argument(canonical(TileType(dtype)), words, (), None)


def _scalar_words(number: Any, dtype: DType) -> bytes:
    """The eight bytes that pass `number`; OverflowError if it is finite and `dtype` has no such number."""
    if dtype.name in _SCALAR_FORMAT:
        cast: Any = float if dtype.is_float else bool if dtype.is_bool else int
        return struct.pack(_SCALAR_FORMAT[dtype.name], cast(number))
    real = float(number)
    with np.errstate(all="ignore"):
        narrow = np.asarray(real, np.float32).astype(dtype.numpy)
    if math.isfinite(real) and not math.isfinite(float(narrow)):
        raise OverflowError
    return narrow.tobytes().ljust(8, b"\0")


def _shortened(value: Any) -> str:
    """A number as text; of an int with thousands of digits, which Python refuses to print, only how many bits."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)


class LazyArgument(Exception):
    """An argument is an operation that has not run."""


def _wrong(param: KernelParam, expected: str, value: Any) -> ArgumentError:
    if isinstance(value, DeviceOp):
        raise LazyArgument
    kind = type(value)
    name = kind.__name__
    if name == "Tensor" and kind is not Tensor:  # torch's: say whose, and how it becomes one of ours
        name = f"one of {kind.__module__.partition('.')[0]}; pt.from_dlpack(tensor) is that memory as one of ours"
    return ArgumentError(f"{param.name}: expected {expected}, got {name}")


def bind_one(param: KernelParam, value: Any, keep: list[Any]) -> Argument:
    """The argument for a run-time parameter; ArgumentError says what the role takes."""
    role = param.role
    if role is Role.SHARED:
        if isinstance(value, Tensor):
            return value.shared_argument()
        if hasattr(value, "kernel_input"):
            own: KernelInput = value
            return own.kernel_input(keep.append).shared_argument()
        local = getattr(value, "local", None)
        if isinstance(local, Tensor):
            return local.shared_argument()
        raise _wrong(param, "a Tensor (T.Shared); make one with pt.asarray", value)
    if role is Role.EXCLUSIVE:
        if isinstance(value, Partition):
            return value.exclusive_argument()
        if hasattr(value, "kernel_output"):
            target: KernelOutput = value
            return target.kernel_output(keep.append).exclusive_argument()
        raise _wrong(param, "a partition (T.Exclusive); write tensor.partition(tile_shape)", value)
    if role is Role.ACCUMULATE:
        if isinstance(value, Tensor):
            return value.accumulate_argument()
        raise _wrong(param, "a Tensor (T.Accumulate); make one with pt.zeros", value)
    if role is Role.SCALAR:
        if isinstance(value, DeviceOp):
            raise LazyArgument
        return scalar(param.name, value, param.dtype)
    if role is Role.PEER:
        if hasattr(value, "peer_argument"):
            peer: PeerArgument = value
            return peer.peer_argument(param.access or Access.READ_WRITE)
        raise _wrong(param, "a SymmetricTensor (T.Peer); make one with heap.empty", value)
    if role is Role.MULTICAST:
        if hasattr(value, "multicast_argument"):
            several: MulticastArgument = value
            return several.multicast_argument()
        raise _wrong(param, "a MulticastTensor (T.Multicast); make one with heap.multicast", value)
    if role is Role.POINTER:
        if hasattr(value, "pointer_argument"):
            argument: Argument = value.pointer_argument()
            return argument
        raise _wrong(param, "a pointer (T.Pointer); write tensor.pointer()", value)
    if hasattr(value, "channel_argument"):
        channel: ChannelArgument = value
        bound = channel.channel_argument()
        got = type(bound.type).__name__.removesuffix("Type").lower()
        if got == role.value:
            return bound
        raise ArgumentError(f"{param.name}: expected a {role.value} (T.{role.value.capitalize()}), got a {got}")
    raise _wrong(param, f"a {role.value} (T.{role.value.capitalize()}) of a symmetric heap", value)
