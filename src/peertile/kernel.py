"""Kernels: capture a function, specialise it on its arguments, compile.

A `KernelFunction` is made by `@pt.kernel`; calling it gives a lazy `LaunchOp` (`launch.py`). One specialisation is
compiled per combination of argument types and constants, once (single flight), and kept. Nothing here knows a target
beyond asking its backend for a binary and its driver to launch it.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, Protocol, overload

import numpy as np

from peertile.backends.binary import Compiled
from peertile.binding import (
    Bound,
    Grid,
    GroupLike,
    KernelInput,
    KernelOutput,
    LazyArgument,
    Ready,
    Specialization,
    bind_one,
    scalar,
)
from peertile.captures import snapshot
from peertile.errors import ArgumentError, CompileError, LaunchError
from peertile.ir.types import Type
from peertile.kept_launch import KeptLaunch
from peertile.language.annotations import REQUIRED, ConstOf, KernelParam, Role, read_signature
from peertile.launch import NO_BULK, DeferredLaunchOp, LaunchOp, loaded
from peertile.recognise import constant, letters, recogniser
from peertile.runtime.argument import Argument, Use
from peertile.runtime.device import Device
from peertile.runtime.linking import kinds, when_linked
from peertile.runtime.registry import current_device
from peertile.runtime.site import OUTSIDE, call_site, is_outside
from peertile.runtime.tensor import Partition, Tensor

__all__ = ["Grid", "KernelFunction", "KernelInput", "KernelOutput", "LaunchOp", "Specialization", "kernel"]


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
    def without_bulk(self, compiler: Compiler) -> Compiler: ...


@functools.cache
def _compiler() -> Compilers:
    """The compiler, loaded at the first compilation: frontend, passes and backend are most of the package,
    and a program that only inspects, waits or coordinates must not pay for them at import."""
    compiler: Any = importlib.import_module("peertile.direct")
    return compiler  # type: ignore[no-any-return]


# Looking a member up on its enumeration costs as much as comparing two strings.
_SHARED, _EXCLUSIVE, _CONST, _SCALAR = Role.SHARED, Role.EXCLUSIVE, Role.CONST, Role.SCALAR
_GROUPED = frozenset({Role.PEER, Role.MULTICAST, Role.SIGNAL, Role.COUNTER, Role.BARRIER, Role.MAILBOX})


_new: Any = object.__new__

_MOST_READY = 1024
"""Launches of a kernel that are remembered, each with its block of arguments: some hundred bytes."""


class KernelFunction:
    """A kernel: call it with arguments for a lazy op; `grid(n)` where no partition gives the grid.

    Raises CompileError (at the first launch of a combination of types) with the source line and a caret.
    """

    # What native code reads (`native_calls.py`) has places of its own; all else is in the dict, as of a function.
    __slots__ = ("__dict__", "__weakref__", "defaults", "letters", "ready")

    def __init__(self, fn: FunctionType, *, unsafe: bool = False) -> None:
        self.fn = fn
        self.unsafe = unsafe
        self.name = fn.__name__
        self.params = read_signature(fn, unsafe=unsafe)
        self._index = {p.name: k for k, p in enumerate(self.params)}
        self._known = recogniser(self.params)
        self.ready: dict[tuple[Any, ...], Ready] = {}
        """What launches found out, by the serials of their arguments, their constants and their grid."""
        self.letters = None if self._known is None else letters(self.params)
        self.defaults = tuple(p.default for p in self.params if p.default is not REQUIRED)
        self._specializations: dict[tuple[Any, ...], Specialization] = {}
        self._compile_count = 0
        # Held while a specialisation is compiled, so that concurrent launches compile it once.
        self._lock = threading.Lock()
        functools.update_wrapper(self, fn)

    def __repr__(self) -> str:
        return f"<kernel {self.name}>"

    def __reduce__(self) -> str:
        """By name, as functions are pickled and copied."""
        return self.fn.__qualname__

    def _called(self, *args: Any, **kwargs: Any) -> LaunchOp:
        key = None
        if self._known is not None:
            try:
                key, given, uses = self._known(None, *args, **kwargs)
                ready = self.ready.get(key)
                if ready is not None and uses[0].storage.device.compiler is ready.compiler:
                    # As the constructor does, without its call: building an op is counted in nanoseconds.
                    op: LaunchOp = _new(LaunchOp)
                    op._spent = False
                    frame = sys._getframe(1)
                    code = frame.f_code
                    outside = is_outside(code.co_filename)
                    op._site = (code, frame.f_lasti) if outside else call_site(2)
                    op.kernel = self
                    op.given = given
                    op.uses = uses
                    op._ready = ready
                    op._bound = op._key = None
                    return op
            except (TypeError, AttributeError, ValueError):
                # An argument of another kind, or missing, which is told below; or no caller in Python.
                key = None
        return self._op(args, kwargs, None, key)

    __call__ = _called

    def _op(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], grid: Grid | None, key: tuple[Any, ...] | None
    ) -> LaunchOp:
        try:
            given, bound = self.bind(args, kwargs, grid)
        except LazyArgument:
            return DeferredLaunchOp(self, args, kwargs, grid)
        return LaunchOp(self, given, bound, bound.uses, None, key)

    def remember(self, key: tuple[Any, ...], ready: Ready) -> None:
        """Keep what a launch with the same arguments need not find out again."""
        if len(self.ready) >= _MOST_READY:
            self.ready.clear()
        self.ready[key] = ready

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
        loaded(self.specialize(bound), bound.device)

    def grid(self, *extents: int) -> Callable[..., LaunchOp]:
        """Launch over a grid of 1 to 3 axes: `kernel.grid(64)(args)`."""
        if not 1 <= len(extents) <= 3 or not all(isinstance(n, int | np.integer) and n >= 0 for n in extents):
            raise ArgumentError(f"grid: expected 1 to 3 integers >= 0, got {extents!r}")
        full: Grid = (*extents, 1, 1)[:3]  # type: ignore[assignment]

        def call(*args: Any, **kwargs: Any) -> LaunchOp:
            key = None
            if self._known is not None:
                try:
                    key, given, uses = self._known(full, *args, **kwargs)
                    ready = self.ready.get(key)
                    if ready is not None and uses[0].storage.device.compiler is ready.compiler:
                        return LaunchOp(self, given, None, uses, ready)
                except (TypeError, AttributeError):
                    key = None
            return self._op(args, kwargs, full, key)

        return call

    @property
    def compile_count(self) -> int:
        """Number of specialisations compiled so far in this process."""
        return self._compile_count

    # ---------------------------------------------------------------- binding

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any], grid: Grid | None) -> tuple[tuple[Any, ...], Bound]:
        """Match arguments with parameters and find the grid: the values given, and what they are bound to. Changes
        nothing on an error."""
        params = self.params
        if len(args) > len(params):
            raise ArgumentError(f"{self.name}: expected at most {len(params)} arguments, got {len(args)}")
        values: list[Any] | tuple[Any, ...] = args if type(args) is tuple else tuple(args)
        if kwargs or len(values) < len(params):
            values = [*values, *[REQUIRED] * (len(params) - len(values))]
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
                value = values[k] = param.default  # type: ignore[index]  # a list, as something was left out
            role = param.role
            if role is _CONST:
                try:
                    hash(value)
                except TypeError:
                    raise ArgumentError(
                        f"{param.name}: expected a value that can be hashed, as code is compiled for it (T.Const), "
                        f"got {value!r}; pass a tuple for a list"
                    ) from None
                declared = ConstOf(param.const_type)
                if declared.type is not None and not declared.takes(value):
                    raise ArgumentError(f"{param.name}: expected a value for {declared}, got {value!r}")
                consts[param.name] = value
                key.append(constant(value))
                continue
            kind = type(value)
            if role is _SHARED and kind is Tensor:  # by far the most, hence without a call
                argument = value._shared or value.shared_argument()
            elif role is _EXCLUSIVE and kind is Partition:
                argument = value.exclusive_argument()
            elif role is _SCALAR and kind is int:
                argument = scalar(param.name, value, param.dtype)
            else:
                argument = bind_one(param, value, keep)
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
        compiler = device.compiler
        if compiler is not None:
            key.append(compiler)
        elif device.target is not None:
            key.append(device.target)
        bound = Bound(
            params,
            arguments,
            consts,
            tuple(key),
            grid,
            device,
            compiler,
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

    def specialize(self, bound: Bound) -> Specialization:
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

    def known(self, bound: Bound) -> Specialization | None:
        """The compiled form, if it was compiled before."""
        return self._specializations.get(bound.key)

    def _compile(self, bound: Bound) -> Specialization:
        runtime = [p for p in self.params if p.role is not Role.CONST]
        types = {p.name: a.type for p, a in zip(runtime, bound.arguments, strict=True)}
        assert bound.grid is not None
        rank = 1 if bound.grid[1] == bound.grid[2] == 1 else 3
        compiler = bound.compiler
        if compiler is None and bound.device.target is not None:
            compiler = _compiler().for_arch(bound.device.target, descriptors=bound.key[-1] is not NO_BULK)
        elif bound.key[-1] is NO_BULK:
            compiler = _compiler().without_bulk(compiler)
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
        captures = snapshot(self.fn, consts.values())
        if compiler is None:
            compiler = _compiler() if arch is None else _compiler().for_arch(arch)
        return Specialization(
            compiler.compile_function(self.fn, self.name, self.unsafe, types, consts, grid_rank, groups),
            captures,
            types.values(),
        )


def _number_groups(params: tuple[KernelParam, ...], values: Sequence[Any]) -> dict[str, int]:
    """Which group each parameter belongs to, where there are several: `T.rank()` then has no meaning."""
    numbers: dict[int, int] = {}
    found: dict[str, int] = {}
    for param, value in zip(params, values, strict=True):
        if param.role in _GROUPED:
            group = bind_one(param, value, []).group
            if group is not None:
                found[param.name] = numbers.setdefault(id(group), len(numbers))
    return found


def _call_natively() -> None:
    """Kernels are called in native code from here on, where that can be (`native_calls.py`)."""
    module: Any = importlib.import_module("peertile.native_calls")
    method = module.native_call(KernelFunction, KernelFunction._called.__name__, OUTSIDE)
    if method is not None:
        KernelFunction.__call__ = method  # type: ignore[method-assign]


kinds.launch, kinds.kept, kinds.specialization = LaunchOp, KeptLaunch, Specialization
when_linked.append(_call_natively)


def _ignore(owner: object) -> None:
    """The binding retains what it needs elsewhere."""


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
