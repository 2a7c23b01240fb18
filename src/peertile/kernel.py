"""Kernels: capture a function, specialise it on its arguments, compile, pack, launch.

A `KernelFunction` is made by `@pt.kernel`; calling it gives a lazy `LaunchOp`. One specialisation is
compiled per combination of argument types and constants, once (single flight), and kept. Nothing here
knows a target beyond asking its backend for a binary and its driver to launch it.
"""

from __future__ import annotations

import functools
import importlib
import math
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any, Protocol, overload

import numpy as np

from peertile.backends.binary import Compiled
from peertile.captures import Snapshot, snapshot
from peertile.config import config
from peertile.dtypes import DType, from_numpy
from peertile.errors import (
    ArgumentError,
    CompileError,
    DeviceFault,
    FaultPlace,
    KernelAssert,
    LaunchError,
    OutOfBounds,
    PeertileError,
    SignatureMismatch,
    UsageError,
    WaitTimeout,
)
from peertile.ir.types import Access, MailboxType, PointerType, TileType, Type
from peertile.language.annotations import REQUIRED, KernelParam, Role, read_signature
from peertile.printing import sink_for
from peertile.runtime.argument import Argument, Use, canonical, pack_words
from peertile.runtime.context import ExecutionContext, execution, explain, outside_execution
from peertile.runtime.device import Device
from peertile.runtime.driver import FaultKind, FaultRecord, LaunchOptions, ModuleHandle, PreparedLaunch
from peertile.runtime.op import DeviceOp
from peertile.runtime.registry import current_device
from peertile.runtime.site import call_site
from peertile.runtime.stream import Stream
from peertile.runtime.tensor import FP8_LARGEST, Partition, Tensor
from peertile.source import Loc

__all__ = ["Grid", "KernelFunction", "KernelInput", "KernelOutput", "LaunchOp", "Specialization", "kernel"]

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


class Compiler(Protocol):
    """What kernels ask of the compiler (direct.py, which asks compiler.py)."""

    def compile_function(
        self,
        fn: FunctionType,
        name: str,
        unsafe: bool,
        types: dict[str, Type],
        consts: dict[str, Any],
        grid_rank: int = 1,
        groups: dict[str, int] | None = None,
    ) -> Compiled: ...


class Compilers(Compiler, Protocol):
    """The same for this processor, and one for each architecture of a GPU."""

    def for_arch(self, arch: str, *, descriptors: bool = True) -> Compiler: ...


@functools.cache
def _compiler() -> Compilers:
    """The compiler, loaded at the first compilation: frontend, passes and backend are most of the package,
    and a program that only inspects, waits or coordinates must not pay for them at import."""
    compiler: Any = importlib.import_module("peertile.direct")
    return compiler  # type: ignore[no-any-return]


class Specialization:
    """One compiled form of a kernel, and where it is loaded (`modules`, `options`: per device and group)."""

    __slots__ = (
        "binary", "captures", "compiled", "extent_checks", "has_pointers", "modules", "most_ns", "ns_per_program",
        "options", "prepared", "timed",
    )  # fmt: skip

    def __init__(self, compiled: Compiled, captures: Snapshot, types: Iterable[Type]) -> None:
        self.compiled = compiled
        # What every launch looks at, in the form that costs it least.
        self.extent_checks = [(c.lhs, c.lhs_axis, c.lhs_size, c.rhs, c.rhs_axis, c.rhs_size) for c in compiled.checks]
        self.has_pointers = any(type(t) is PointerType for t in types)
        self.captures = captures
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


class _Bound:
    """Arguments of one call, bound and packed. It holds none of the user's handles, whose views end when the user
    drops them: a submission keeps it."""

    __slots__ = (
        "arguments", "consts", "device", "grid", "group", "groups", "keep", "key", "packed", "params", "spec", "uses",
    )  # fmt: skip

    def __init__(
        self,
        params: tuple[KernelParam, ...],
        arguments: list[Argument],
        consts: dict[str, Any],
        key: tuple[Any, ...],
        grid: Grid | None,
        device: Device,
        group: GroupLike | None,
        groups: dict[str, int] | None,
        keep: list[Any],
        uses: list[Use],
    ) -> None:
        self.keep = keep
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


_INTS: dict[str, tuple[Type, struct.Struct, int, int]] = {}
"""For each integer dtype that was passed as a scalar: its type, how it is packed, and its range."""


def _scalar(name: str, value: Any, dtype: DType | None) -> Argument:
    """A scalar argument; without a declared dtype, int is i64, float f32, and numpy scalars their own."""
    if type(value) is int and dtype is not None and dtype.is_int:  # by far the most
        known = _INTS.get(dtype.name)
        if known is None:
            packer = struct.Struct(_SCALAR_FORMAT[dtype.name])
            known = _INTS[dtype.name] = (canonical(TileType(dtype)), packer, dtype.min, dtype.max)
        kind, packer, least, most = known
        if least <= value <= most:
            return Argument(kind, packer.pack(value), (), None)
    return _any_scalar(name, value, dtype)


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


class _LazyArgument(Exception):
    """An argument is an operation that has not run."""


def _wrong(param: KernelParam, expected: str, value: Any) -> ArgumentError:
    if isinstance(value, DeviceOp):
        raise _LazyArgument
    return ArgumentError(f"{param.name}: expected {expected}, got {type(value).__name__}")


def _bind_one(param: KernelParam, value: Any, keep: list[Any]) -> Argument:
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
            raise _LazyArgument
        return _scalar(param.name, value, param.dtype)
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


# Looking a member up on its enumeration costs as much as comparing two strings.
_SHARED, _EXCLUSIVE, _CONST = Role.SHARED, Role.EXCLUSIVE, Role.CONST
_GROUPED = frozenset({Role.PEER, Role.MULTICAST, Role.SIGNAL, Role.COUNTER, Role.BARRIER, Role.MAILBOX})


class KernelFunction:
    """A kernel: call it with arguments for a lazy op; `grid(n)` where no partition gives the grid.

    Raises CompileError (at the first launch of a combination of types) with the source line and a caret.
    """

    def __init__(self, fn: FunctionType, *, unsafe: bool = False) -> None:
        self.fn = fn
        self.unsafe = unsafe
        self.name = fn.__name__
        self.params = read_signature(fn, unsafe=unsafe)
        self._index = {p.name: k for k, p in enumerate(self.params)}
        self._specializations: dict[tuple[Any, ...], Specialization] = {}
        self._compile_count = 0
        # Held while a specialisation is compiled, so that concurrent launches compile it once.
        self._lock = threading.Lock()
        functools.update_wrapper(self, fn)

    def __repr__(self) -> str:
        return f"<kernel {self.name}>"

    def __call__(self, *args: Any, **kwargs: Any) -> LaunchOp:
        return self._op(args, kwargs, None)

    def _op(self, args: tuple[Any, ...], kwargs: dict[str, Any], grid: Grid | None) -> LaunchOp:
        try:
            given, bound = self.bind(args, kwargs, grid)
        except _LazyArgument:
            return _DeferredLaunchOp(self, args, kwargs, grid)
        return LaunchOp(self, given, bound)

    def warm_up(self, *args: Any, grid: int | tuple[int, ...] | None = None, **kwargs: Any) -> None:
        """Compile and load for arguments like these, and run nothing. Tensors may be described (`pt.tensor_spec`).

        >>> import peertile as pt
        >>> from peertile.cli.bench_kernels import vector_add
        >>> x = pt.tensor_spec((1000,), pt.f32)
        >>> vector_add.warm_up(x.partition(128), x, x)
        """
        full: Grid | None = None
        if grid is not None:
            full = (*((grid,) if isinstance(grid, int) else grid), 1, 1)[:3]  # type: ignore[assignment]
        _, bound = self.bind(args, kwargs, full)
        _loaded(self.specialize(bound), bound.device)

    def grid(self, *extents: int) -> Callable[..., LaunchOp]:
        """Launch over a grid of 1 to 3 axes: `kernel.grid(64)(args)`."""
        if not 1 <= len(extents) <= 3 or not all(isinstance(n, int | np.integer) and n >= 0 for n in extents):
            raise ArgumentError(f"grid: expected 1 to 3 integers >= 0, got {extents!r}")
        full: Grid = (*extents, 1, 1)[:3]  # type: ignore[assignment]

        def call(*args: Any, **kwargs: Any) -> LaunchOp:
            return self._op(args, kwargs, full)

        return call

    @property
    def compile_count(self) -> int:
        """Number of specialisations compiled so far in this process."""
        return self._compile_count

    # ---------------------------------------------------------------- binding

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any], grid: Grid | None) -> tuple[tuple[Any, ...], _Bound]:
        """Match arguments with parameters and find the grid: the values given, and what they are bound to. Changes
        nothing on an error."""
        params = self.params
        if len(args) > len(params):
            raise ArgumentError(f"{self.name}: expected at most {len(params)} arguments, got {len(args)}")
        values: list[Any] = list(args)
        if kwargs or len(values) < len(params):
            values += [REQUIRED] * (len(params) - len(values))
            for name, value in kwargs.items():
                at = self._index.get(name)
                if at is None:
                    raise ArgumentError(f"{self.name}: no parameter {name!r}; it has {', '.join(self._index)}")
                if values[at] is not REQUIRED:
                    raise ArgumentError(f"{self.name}: parameter {name!r} was given twice")
                values[at] = value
        arguments: list[Argument] = []
        consts: dict[str, Any] = {}
        key: list[Any] = []
        device: Device | None = None
        group: GroupLike | None = None
        groups: dict[str, int] | None = None
        shared: list[tuple[KernelParam, Use]] = []
        keep: list[Any] = []
        uses: list[Use] = []
        has_rows = False
        inferred: tuple[int, str] | None = None
        for k, param in enumerate(params):
            value = values[k]
            if value is REQUIRED:
                if param.default is REQUIRED:
                    raise ArgumentError(f"{self.name}: parameter {param.name!r} ({param.role.value}) was not given")
                value = param.default
            role = param.role
            if role is _CONST:
                try:
                    hash(value)
                except TypeError:
                    raise ArgumentError(
                        f"{param.name}: expected a value that can be hashed, as code is compiled for it (T.Const), "
                        f"got {value!r}; pass a tuple for a list"
                    ) from None
                consts[param.name] = value
                key.append((type(value), value))
                continue
            kind = type(value)
            if role is _SHARED and kind is Tensor:  # by far the most, hence without a call
                argument = value._shared or value.shared_argument()
            else:
                argument = _bind_one(param, value, keep)
            arguments.append(argument)
            if argument.keep is not None:
                keep.append(argument.keep)
            has_rows = has_rows or argument.max_programs is not None
            key.append(id(argument.type))
            if argument.group is not None and argument.group is not group:
                groups = _number_groups(params, values) if group is not None and groups is None else groups
                group = argument.group
            if role is _EXCLUSIVE:
                programs = argument.programs
                if programs is None:
                    programs = value.grid() if kind is Partition else value.kernel_output(_ignore).grid()
                if inferred is not None and inferred[0] != programs:
                    raise ArgumentError(
                        f"{self.name}: partitions disagree about the grid: {inferred[1]} has {inferred[0]} programs, "
                        f"{param.name} has {programs}; cut them into equally many tiles"
                    )
                inferred = (programs, param.name)
            for use in argument.uses:
                uses.append(use)
                if use.devices:
                    shared.append((param, use))
                elif device is None:
                    device = use.storage.device
                elif use.storage.device is not device:
                    raise ArgumentError(
                        f"{self.name}: {param.name} is on {use.storage.device.name}, other arguments on {device.name}; "
                        "copy it to one device"
                    )
        if shared:
            device = current_device() if device is None else device
            for param, use in shared:
                if device not in use.devices:
                    raise ArgumentError(
                        f"{self.name}: {param.name} is not shared with {device.name}, where this launch runs; "
                        "name that device in share_with"
                    )
        if grid is not None and inferred is not None and grid != (inferred[0], 1, 1):
            raise ArgumentError(
                f"{self.name}: the grid {grid} disagrees with the partition of {inferred[1]}, which gives "
                f"{inferred[0]} programs; leave .grid(...) out"
            )
        if grid is None and inferred is not None:
            grid = (inferred[0], 1, 1)
        if grid is None:
            raise ArgumentError(f"{self.name}: no partition gives the grid; write {self.name}.grid(n)(...)")
        if has_rows:
            self._check_rows(arguments, grid)
        # A grid of one axis is compiled for: its program index is one word, not a sum over three axes.
        key.append(1 if grid[1] == grid[2] == 1 else 3)
        if groups is not None:
            key.append(tuple(groups.items()))
        if device is None:
            device = current_device()
        if device.compiler is not None:
            key.append(device.compiler)
        elif device.target is not None:
            key.append(device.target)
        bound = _Bound(
            params,
            arguments,
            consts,
            tuple(key),
            grid,
            device,
            group,
            groups,
            keep,
            uses,
        )
        return tuple(values), bound

    def _check_rows(self, arguments: list[Argument], grid: Grid) -> None:
        programs = grid[0] * grid[1] * grid[2]
        for k, argument in enumerate(arguments):
            if argument.max_programs is not None and programs > argument.max_programs:
                param = [p for p in self.params if p.role is not Role.CONST][k]
                raise LaunchError(
                    f"{self.name}: the grid has {programs} programs, but the {param.role.value} {param.name} was made "
                    f"for {argument.max_programs}; make it with programs={programs}, or launch fewer programs"
                )

    # ---------------------------------------------------------------- compiling

    def specialize(self, bound: _Bound) -> Specialization:
        """The compiled form for these argument types; compiled at most once."""
        found = self._specializations.get(bound.key)
        if found is not None and found.captures.is_current():
            return found
        with self._lock:
            found = self._specializations.get(bound.key)
            if found is None or not found.captures.is_current():
                found = self._compile(bound)
                self._compile_count += 1
                self._specializations[bound.key] = found
        return found

    def _compile(self, bound: _Bound) -> Specialization:
        runtime = [p for p in self.params if p.role is not Role.CONST]
        types = {p.name: a.type for p, a in zip(runtime, bound.arguments, strict=True)}
        assert bound.grid is not None
        rank = 1 if bound.grid[1] == bound.grid[2] == 1 else 3
        compiler = bound.device.compiler
        if compiler is None and bound.device.target is not None:
            compiler = _compiler().for_arch(bound.device.target, descriptors=bound.key[-1] is not _NO_BULK)
        return self.compile_types(types, bound.consts, rank, bound.groups, compiler)

    def compile_types(
        self,
        types: dict[str, Type],
        consts: dict[str, Any],
        grid_rank: int = 1,
        groups: dict[str, int] | None = None,
        compiler: Compiler | None = None,
        arch: str | None = None,
    ) -> Specialization:
        """Compile for parameter types instead of arguments, for this processor or GPUs of `arch`: for warm-up and
        inspection. Not kept."""
        captures = snapshot(self.fn)
        if compiler is None:
            compiler = _compiler() if arch is None else _compiler().for_arch(arch)
        return Specialization(
            compiler.compile_function(self.fn, self.name, self.unsafe, types, consts, grid_rank, groups),
            captures,
            types.values(),
        )


def _number_groups(params: tuple[KernelParam, ...], values: list[Any]) -> dict[str, int]:
    """Which group each parameter belongs to, where there are several: `T.rank()` then has no meaning."""
    numbers: dict[int, int] = {}
    found: dict[str, int] = {}
    for param, value in zip(params, values, strict=True):
        if param.role in _GROUPED:
            group = _bind_one(param, value, []).group
            if group is not None:
                found[param.name] = numbers.setdefault(id(group), len(numbers))
    return found


def _signature(name: str, bound: _Bound, steering: frozenset[str] | None) -> int:
    """24 bits that differ between launches that do not match: kernel, grid, scalars and extents."""
    state = zlib.crc32(name.encode())
    state = zlib.crc32(struct.pack("<3q", *(bound.grid or (0, 0, 0))), state)
    runtime = (p for p in bound.params if p.role is not Role.CONST)
    for param, argument in zip(runtime, bound.arguments, strict=True):
        if steering is not None and param.name not in steering:
            continue
        if argument.extents:
            state = zlib.crc32(pack_words(argument.extents), state)
        elif param.role is Role.SCALAR:
            state = zlib.crc32(argument.words, state)
    for const in bound.consts.items():
        state = zlib.crc32(repr(const).encode(), state)
    # Zero is what fresh words hold, so it stands for nobody.
    return (state ^ state >> 24) & 0xFFFFFF or 1


def _ignore(owner: object) -> None:
    """The binding retains what it needs elsewhere."""


def _loaded(spec: Specialization, device: Device) -> ModuleHandle:
    module = spec.modules.get(device.serial)
    if module is None:
        module = spec.modules[device.serial] = device.driver.load_module(spec.binary)
    return module


_NO_BULK = "without bulk copies"
"""At the end of a specialisation's key: for arguments that `Binary.fits` refused."""
_PREPARED_GRIDS = 1024
_TIMED_LAUNCHES = 8
"""Launches of a specialisation that are timed: enough to know it, few enough to cost nothing."""
_TRY_NS = 500_000
"""A launch that took less than this with all hand-overs may be tried on the thread of an event loop."""
_UNKNOWN_NS = 1 << 62


class LaunchOp(DeviceOp[tuple[Any, ...]]):
    """A lazy launch. Its result is the tuple of its arguments, in the form they were given."""

    __slots__ = ("bound", "given", "kernel")

    def __init__(self, kernel: KernelFunction, given: tuple[Any, ...], bound: _Bound) -> None:
        # As DeviceOp.__init__ does, without the call: building an op is counted in nanoseconds.
        self._spent = False
        self._site = call_site(4)
        self.kernel = kernel
        self.given = given
        self.bound = bound

    @property
    def name(self) -> str:
        """Names the operation in errors."""
        return self.kernel.name

    @property
    def device(self) -> Device:
        """The device it runs on."""
        return self.bound.device

    @property
    def arity(self) -> int | None:
        """Number of results: one for each parameter."""
        return len(self.kernel.params)

    @property
    def is_unit(self) -> bool:
        """Whether `Graph.update` takes it."""
        return True

    def compiled(self) -> Specialization:
        """The specialisation that this launch uses, compiled now if need be; runs nothing."""
        return self.kernel.specialize(self.bound)

    def preferred_stream(self) -> Stream | None:
        """Where its channel was used last, else where something it uses is still in use."""
        busy = False
        for use in self.bound.uses:
            storage = use.storage
            if use.channel and storage.channel_stream is not None:
                return storage.channel_stream
            if storage.claims:
                busy = True
        return self.bound.device.leases.conflicting_stream(self.bound.uses) if busy else None

    def _expected_ns(self) -> int:
        spec = self.kernel._specializations.get(self.bound.key)
        if spec is None or spec.binary.waits:
            return _UNKNOWN_NS
        n0, n1, n2 = self.bound.grid or (1, 1, 1)
        if spec.ns_per_program is not None:
            return int(spec.ns_per_program * n0 * n1 * n2)
        return 0 if spec.most_ns < _TRY_NS else _UNKNOWN_NS

    def _took(self, ns: int) -> None:
        spec = self.kernel._specializations.get(self.bound.key)
        if spec is not None:
            spec.most_ns = min(spec.most_ns, ns)

    def _prepare(self) -> tuple[Specialization, PreparedLaunch, bytes]:
        """All checks of a launch, and what the driver needs. Changes nothing on the device."""
        kernel, bound = self.kernel, self.bound
        spec = bound.spec
        if spec is None or not spec.captures.is_current():
            spec = bound.spec = kernel.specialize(bound)
        device, group = bound.device, bound.group
        args = bound.packed
        if args is None:
            args = _pack(kernel.name, spec, bound)
            if device.target is not None and not spec.binary.fits(args):
                bound.key = (*bound.key, _NO_BULK)
                spec = bound.spec = kernel.specialize(bound)
                args = _pack(kernel.name, spec, bound)
            bound.packed = args
        grid = bound.grid
        assert grid is not None
        prepared = spec.prepared.get((grid, device.serial, 0 if group is None else group.serial))
        if prepared is None:
            prepared = _prepared(kernel.name, spec, device, group, grid)
        return spec, prepared, args

    def sync_on(self, stream: Stream) -> tuple[Any, ...]:
        """Run on `stream` and wait for the end; on an idle stream the calling thread does the work."""
        if execution.inside is not None:
            outside_execution(self.kernel.name)
        if self._spent:
            self._spend()
        self._spent = True
        return self._run_to_end(stream)

    def _run_to_end(self, stream: Stream) -> tuple[Any, ...]:
        bound = self.bound
        device = bound.device
        if stream.recording is not None or stream.device is not device:
            return super()._run_to_end(stream)
        # The shortest way: what the general one does, without a context, since nothing stays in flight.
        if bound.group is not None:
            bound.group.check()
        spec, prepared, args = self._prepare()
        leases = device.leases
        lease = leases.acquire(self.kernel.name, stream, self._site, bound.uses)
        try:
            if spec.timed < _TIMED_LAUNCHES:
                start = time.perf_counter_ns()
                record = device.driver.run_prepared(stream.handle, prepared, args)
                spec.took(time.perf_counter_ns() - start, math.prod(prepared.grid))
            else:
                record = device.driver.run_prepared(stream.handle, prepared, args)
        except BaseException:
            # Interrupted, the launch may go on in its stream: it owns what it uses until that is over.
            context = ExecutionContext(self.kernel.name, stream, on_caller=True)
            context.leases.append(lease)
            context.retain(spec, *bound.keep)
            context.abandon()
            raise
        leases.release((lease,))
        if record is not None:
            raise _explain(record, spec, bound, self.kernel.name, bound.group)
        return self.given

    def _execute(self, context: ExecutionContext) -> tuple[Any, ...]:
        bound = self.bound
        group = bound.group
        if group is not None:
            context.require(group.check)
        spec, prepared, args = self._prepare()
        name = self.kernel.name
        lease = context.lease(bound.uses, name, self._site)
        if bound.keep:
            context.retain(spec, *bound.keep)
        else:
            context.retain(spec)
        if context.on_caller:
            driver = context.driver
            start = time.perf_counter_ns()
            record = driver.run_prepared(context.handle, prepared, args)
            spec.took(time.perf_counter_ns() - start, math.prod(prepared.grid))
            context.give_back(lease)
            if record is not None:
                raise _explain(record, spec, bound, name, group)
        else:
            context.launch(prepared, args, lease, (_explain, spec, bound, name, group))
        return self.given


class _DeferredLaunchOp(LaunchOp):
    """A launch with arguments that are operations themselves: bound when they have run, on the same stream."""

    __slots__ = ("_args", "_grid", "_kwargs")

    def __init__(
        self, kernel: KernelFunction, args: tuple[Any, ...], kwargs: dict[str, Any], grid: Grid | None
    ) -> None:
        self._spent = False
        self._site = call_site(4)
        self.kernel = kernel
        self._args = args
        self._kwargs = kwargs
        self._grid = grid
        first: Device | None = None
        for op in self._lazy():
            if first is None:
                first = op.device
            elif op.device is not first:
                raise ArgumentError(
                    f"{kernel.name}: expected arguments of one device, got operations on {first.name} and "
                    f"{op.device.name}; copy to one device"
                )
        for op in self._lazy():
            op._spend()

    def _lazy(self) -> list[DeviceOp[Any]]:
        return [v for v in (*self._args, *self._kwargs.values()) if isinstance(v, DeviceOp)]

    @property
    def device(self) -> Device:
        return self._lazy()[0].device

    def compiled(self) -> Specialization:
        raise UsageError(f"{self.kernel.name}: its arguments have not run, so their types are not known; sync it first")

    def preferred_stream(self) -> Stream | None:
        return next((s for s in (op.preferred_stream() for op in self._lazy()) if s is not None), None)

    def _expected_ns(self) -> int:
        return _UNKNOWN_NS

    def _took(self, ns: int) -> None:
        """What the arguments took is in it: it says nothing about the launch."""

    def _run_to_end(self, stream: Stream) -> tuple[Any, ...]:
        return DeviceOp._run_to_end(self, stream)

    def _execute(self, context: ExecutionContext) -> tuple[Any, ...]:
        def done(value: Any) -> Any:
            return value._execute(context) if isinstance(value, DeviceOp) else value

        args = [done(v) for v in self._args]
        kwargs = {name: done(v) for name, v in self._kwargs.items()}
        try:
            self.given, self.bound = self.kernel.bind(args, kwargs, self._grid)
        except _LazyArgument:
            raise ArgumentError(
                f"{self.kernel.name}: an argument is an operation whose result is an operation; use then"
            ) from None
        return super()._execute(context)


def _prepared(name: str, spec: Specialization, device: Device, group: GroupLike | None, grid: Grid) -> PreparedLaunch:
    """What the driver keeps of launches over `grid`; asked for once, or again after a thousand other grids."""
    module = spec.modules.get(device.serial) or _loaded(spec, device)
    key = 0 if group is None else group.serial
    options = spec.options.get(key)
    if options is None:
        options = spec.options[key] = LaunchOptions(
            name,
            int(config().wait_timeout_s * 1e9),
            group.abort_address if group is not None else 0,
            spec.binary.waits,
            sink_for(spec.binary.places, group.rank if group is not None else None),
        )
    prepared = device.driver.prepare_launch(module, grid, options)
    if len(spec.prepared) >= _PREPARED_GRIDS:
        spec.prepared.clear()
    spec.prepared[grid, device.serial, key] = prepared
    return prepared


def _pack(name: str, spec: Specialization, bound: _Bound) -> bytes:
    """The words of all arguments, after the checks that a launch makes of them."""
    uses, arguments = bound.uses, bound.arguments
    for use in uses:
        if use.exclusive and len(uses) > 1:
            _check_exclusive(name, bound, use)
    # S1: relations between extents that the bounds pass left to the launcher.
    for lhs, lhs_axis, lhs_size, rhs, rhs_axis, rhs_size in spec.extent_checks:
        need, have = -(-arguments[lhs].extents[lhs_axis] // lhs_size), -(-arguments[rhs].extents[rhs_axis] // rhs_size)
        if need > have:
            _refuse_extents(name, spec, bound)
    if spec.compiled.program_slots:
        _check_slots(name, spec, bound)
    if spec.compiled.whole_tiles:
        _check_whole_tiles(name, spec, bound)
    if spec.has_pointers:
        for argument in arguments:
            if type(argument.type) is PointerType and argument.keep is not None:
                argument.keep.check_launch(name)
    if not spec.compiled.has_mailbox:
        return b"".join([a.words for a in arguments])
    number = _signature(name, bound, spec.compiled.steering)
    signature = struct.pack("<q", number)
    for argument in arguments:
        labels = getattr(argument.keep, "labels", None)
        if labels is not None:
            labels.note(number, _label(name, bound))
    return b"".join(a.words + signature if isinstance(a.type, MailboxType) else a.words for a in arguments)


def _label(name: str, bound: _Bound) -> str:
    """A launch in the words of a person, as short as it may be told from another."""
    assert bound.grid is not None
    programs = bound.grid[0] * bound.grid[1] * bound.grid[2]
    return f"{name} over {programs} program{'s' if programs != 1 else ''}"


def _mismatch(record: FaultRecord, bound: _Bound, name: str) -> str:
    """Who posted what, as far as the tables of the launch's mailboxes know."""
    here = _label(name, bound)
    for argument in bound.arguments:
        labels = getattr(argument.keep, "labels", None)
        found = labels.find(record.got) if labels is not None else None
        if found is not None:
            rank, label = found
            if label == here:
                label += " with other scalars, constants or extents"
            return f"rank {rank} posted from {label}, this rank runs {here}"
    return f"a peer posted from another kernel, grid or arguments (signature {record.got:#08x}); this rank runs {here}"


def _check_exclusive(name: str, bound: _Bound, use: Use) -> None:
    """S2: the bytes of an exclusive argument are used by no other argument of the launch."""
    low, high = use.low, use.high
    itself = True
    for other in bound.uses:
        # By address, not by storage: memory of somebody else's may be wrapped twice.
        if other.high <= low or high <= other.low:
            continue
        if other is use and itself:  # a second time it is the same partition, given twice
            itself = False
            continue
        names = [p.name for p in bound.params if p.role is not Role.CONST]
        owners = [(n, u) for n, argument in zip(names, bound.arguments, strict=True) for u in argument.uses]
        mine = next(n for n, u in owners if u is use)
        theirs = next(n for n, u in owners if u is other and n != mine)
        raise LaunchError(
            f"{name}: exclusive argument {mine} overlaps {theirs} in {use.storage.name}; "
            "pass separate tensors, or disjoint slices"
        )


def _refuse_extents(name: str, spec: Specialization, bound: _Bound) -> None:
    """LaunchError for the first check of extents that does not hold."""
    for check in spec.compiled.checks:
        lhs, rhs = bound.arguments[check.lhs].extents, bound.arguments[check.rhs].extents
        have, need = -(-rhs[check.rhs_axis] // check.rhs_size), -(-lhs[check.lhs_axis] // check.lhs_size)
        if need > have:
            names = [p.name for p in bound.params if p.role is not Role.CONST]
            left, right = names[check.lhs], names[check.rhs]
            raise LaunchError(
                f"{name}: {check.description}: {right} axis {check.rhs_axis} has {have} tiles of {check.rhs_size} "
                f"(extent {rhs[check.rhs_axis]}), but {need} are used, as {left} axis {check.lhs_axis} has "
                f"{need} tiles of {check.lhs_size} (extent {lhs[check.lhs_axis]}); pass tensors whose extents agree"
            )


def _check_whole_tiles(name: str, spec: Specialization, bound: _Bound) -> None:
    """A multicast access clips nothing: every tile of its partition lies inside as a whole."""
    for whole in spec.compiled.whole_tiles:
        extent = bound.arguments[whole.param].extents[whole.axis]
        if extent % whole.size == 0 and (extent or not whole.some):
            continue
        param = [p for p in bound.params if p.role is not Role.CONST][whole.param].name
        got = f"got {extent}" if extent else "got an empty one"
        raise LaunchError(
            f"{name}: the multicast {param}: expected an extent of axis {whole.axis} of whole tiles of {whole.size}, "
            f"{got}; a partly overlapping tile is not clipped, so pad the tensor or choose a smaller tile"
        )


def _check_slots(name: str, spec: Specialization, bound: _Bound) -> None:
    """A program of a signal or counter takes the slot of its own index unless it names one: all must exist."""
    assert bound.grid is not None
    programs = bound.grid[0] * bound.grid[1] * bound.grid[2]
    for k in spec.compiled.program_slots:
        slots = bound.arguments[k].slots
        if slots is not None and programs > slots:
            param = [p for p in bound.params if p.role is not Role.CONST][k]
            raise LaunchError(
                f"{name}: the grid has {programs} programs, each with the slot of its index, but the "
                f"{param.role.value} {param.name} has {slots} slots; make it with slots={programs}, launch fewer "
                f"programs, or name the slot with {param.name}[k]"
            )


def _explain(
    record: FaultRecord, spec: Specialization, bound: _Bound, op: str, group: GroupLike | None
) -> PeertileError:
    """The user's error for a device's fault record; marks the group broken, so that no peer waits in vain."""
    error = _explain_alone(record, spec, bound, op, group)
    if group is not None and group.failure() is None:
        group.fail(f"{type(error).__name__}: {error.message if isinstance(error, DeviceFault) else error}")
    return error


def _explain_alone(
    record: FaultRecord, spec: Specialization, bound: _Bound, op: str, group: GroupLike | None
) -> PeertileError:
    if record.kind is FaultKind.ABORTED and group is not None:
        failure = group.failure()
        if failure is not None:
            return failure
    rank = group.rank if group is not None else None
    if record.kind is FaultKind.SKIPPED or record.error is not None:
        return explain(record, op if record.kind is FaultKind.SKIPPED else None)
    place = spec.binary.places[record.place] if 0 <= record.place < len(spec.binary.places) else None
    loc: Loc | None = place.loc.user if place is not None and place.loc is not None else None
    where = FaultPlace(rank, record.program if record.program >= 0 else None, loc)
    text = place.message if place is not None else ""
    if record.kind is FaultKind.ASSERT:
        return KernelAssert(f"assertion failed: {text}", op=op, place=where)
    if record.kind is FaultKind.BOUNDS:
        return OutOfBounds(f"{text}: got {record.got}, limit {record.limit}", op=op, place=where)
    if record.kind is FaultKind.SIGNATURE:
        return SignatureMismatch(
            f"mailbox: {_mismatch(record, bound, op)}; launch the same kernel with the same grid and scalars on every "
            "rank",
            op=op,
            place=where,
        )
    if record.kind is FaultKind.WAIT_TIMEOUT:
        what = (place.what if place is not None else "") or "a word"
        return WaitTimeout(
            f"wait for {what}, slot {record.slot}: nothing came within {config().wait_timeout_s:g} s; "
            f"expected {record.limit}, last seen {record.got}",
            op=op,
            place=where,
            slot=record.slot,
            expected=record.limit,
            seen=record.got,
        )
    return DeviceFault(f"{record.kind.name.lower()}: {record.error or 'no further detail'}", op=op, place=where)


@overload
def kernel(fn: Callable[..., object], /) -> KernelFunction: ...
@overload
def kernel(*, unsafe: bool = False) -> Callable[[Callable[..., object]], KernelFunction]: ...
def kernel(
    fn: Callable[..., object] | None = None, /, *, unsafe: bool = False
) -> KernelFunction | Callable[[Callable[..., object]], KernelFunction]:
    """Make a kernel of a Python function: `@pt.kernel` or `@pt.kernel(unsafe=True)`.

    Every parameter is annotated with a role of `peertile.language` or a scalar dtype. The body is compiled,
    never run by Python. See docs/tutorial.

    >>> import numpy as np, peertile as pt
    >>> x = pt.asarray(np.ones(8, np.float32))
    >>> x.size
    8
    """
    if fn is None:
        return functools.partial(_kernel, unsafe)
    return _kernel(unsafe, fn)


def _kernel(unsafe: bool, fn: Callable[..., object]) -> KernelFunction:
    if not isinstance(fn, FunctionType):
        raise CompileError(f"kernel: expected a Python function, got {type(fn).__name__}")
    return KernelFunction(fn, unsafe=unsafe)
