"""Finds compiled kernels on disk without compiling anything: no frontend, no passes, no LLVM. Loads the
compiler only when it does not find one.

The key is made of what a compilation reads: the code of the function and of every function, constant and
enum that its names reach, the parameter types and constants, the processor, and the identity of the
compiler itself. It may take in more than the kernel uses (a miss too many, never a wrong hit); where a
name reaches an object whose value it cannot write down, the kernel is compiled by the longer way.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, Protocol

import numpy as np

from peertile.backends.binary import Binary, Compiled
from peertile.backends.cache import default_cache, key_of
from peertile.backends.cpu import jit
from peertile.backends.cpu.target import host_target
from peertile.backends.cuda.binary import CudaBinary
from peertile.captures import attribute, chains
from peertile.config import config
from peertile.dtypes import DType
from peertile.ir.types import Type

__all__ = [
    "CpuCompiler", "CudaCompiler", "RehearsalCompiler", "compile_function", "fingerprint", "for_arch", "marking",
    "without_bulk", "written",
]  # fmt: skip

_OWN = "peertile."
_FOLDERS = ("", "ir", "language", "frontend", "passes", "backends")


class _Compiler(Protocol):
    """compiler.py as seen from here."""

    def compile_function(
        self,
        fn: FunctionType,
        name: str,
        unsafe: bool,
        types: dict[str, Type],
        consts: dict[str, Any],
        grid_rank: int = 1,
        groups: dict[str, int] | None = None,
        arch: str | None = None,
        descriptors: bool = True,
        marks: bool = False,
    ) -> Compiled: ...


@functools.cache
def _compiler() -> _Compiler:
    compiler: Any = importlib.import_module("peertile.compiler")
    return compiler  # type: ignore[no-any-return]


def _marked(marks: bool) -> tuple[str, ...]:
    """Of a key: kernels without marks are found as they always were."""
    return ("marks",) if marks else ()


class CpuCompiler(NamedTuple):
    """Compiles for this processor. `marks`: for a timeline."""

    marks: bool = False

    def compile_function(
        self,
        fn: FunctionType,
        name: str,
        unsafe: bool,
        types: dict[str, Type],
        consts: dict[str, Any],
        grid_rank: int = 1,
        groups: dict[str, int] | None = None,
    ) -> Compiled:
        """`fn` compiled for these types and constants: from the cache if it is there, else made and kept."""

        def make() -> Compiled:
            return _compiler().compile_function(fn, name, unsafe, types, consts, grid_rank, groups, marks=self.marks)

        def where() -> tuple[str, ...]:
            host = host_target().key, jit.llvmlite_version(), jit.PASSES, _identity("backends/cpu")
            return *_marked(self.marks), *host

        return _found_or_made(make, where, Binary.from_bytes, fn, name, unsafe, types, consts, grid_rank, groups)


compile_function = CpuCompiler().compile_function


class CudaCompiler(NamedTuple):
    """Compiles for GPUs of one architecture, with or without bulk copies; what `Device.target` names."""

    arch: str
    descriptors: bool = True
    marks: bool = False

    def compile_function(
        self,
        fn: FunctionType,
        name: str,
        unsafe: bool,
        types: dict[str, Type],
        consts: dict[str, Any],
        grid_rank: int = 1,
        groups: dict[str, int] | None = None,
    ) -> Compiled:
        """As of `CpuCompiler`."""

        def make() -> Compiled:
            return _compiler().compile_function(
                fn, name, unsafe, types, consts, grid_rank, groups, self.arch, self.descriptors, self.marks
            )

        def where() -> tuple[str, ...]:
            return *_marked(self.marks), f"{self.arch} {self.descriptors}", _triton(), _identity("backends/cuda")

        return _found_or_made(make, where, CudaBinary.from_bytes, fn, name, unsafe, types, consts, grid_rank, groups)


class RehearsalCompiler(NamedTuple):
    """Compiles for GPUs, and for this processor, where a rehearsal runs what it compiled."""

    gpu: CudaCompiler

    def compile_function(
        self,
        fn: FunctionType,
        name: str,
        unsafe: bool,
        types: dict[str, Type],
        consts: dict[str, Any],
        grid_rank: int = 1,
        groups: dict[str, int] | None = None,
    ) -> Compiled:
        """As of `CpuCompiler`; the stages are those of the GPU."""
        made = self.gpu.compile_function(fn, name, unsafe, types, consts, grid_rank, groups)
        here = CpuCompiler(self.gpu.marks).compile_function(fn, name, unsafe, types, consts, grid_rank, groups)
        assert isinstance(made.binary, CudaBinary)
        pairs: Any = importlib.import_module("peertile.backends.rehearsed")  # takes 1 ms, which only a rehearsal pays
        return made._replace(binary=pairs.rehearsed(here.binary, made.binary))


def for_arch(arch: str, *, descriptors: bool = True, marks: bool = False) -> CudaCompiler | RehearsalCompiler:
    """The compiler for GPUs of `arch`."""
    compiler = CudaCompiler(arch, descriptors, marks)
    return compiler if config().rehearse is None else RehearsalCompiler(compiler)


def marking(arch: str | None) -> CpuCompiler | CudaCompiler | RehearsalCompiler:
    """The compiler of a device while a timeline is recorded: for GPUs of `arch`, or for this processor."""
    return CpuCompiler(marks=True) if arch is None else for_arch(arch, marks=True)


def without_bulk(compiler: CpuCompiler | CudaCompiler | RehearsalCompiler) -> CudaCompiler | RehearsalCompiler:
    """The same compiler, which keeps bulk copies out of GPU code."""
    if isinstance(compiler, RehearsalCompiler):
        return RehearsalCompiler(compiler.gpu._replace(descriptors=False))
    assert isinstance(compiler, CudaCompiler)
    return compiler._replace(descriptors=False)


@functools.cache
def _triton() -> str:
    """Which triton would compile, without loading it."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return "none"
    stat = os.stat(spec.origin)
    return f"{spec.origin} {stat.st_size} {stat.st_mtime_ns}"


def _found_or_made(
    make: Callable[[], Compiled],
    where: Callable[[], tuple[str, ...]],
    read: Callable[[bytes], Binary],
    fn: FunctionType,
    name: str,
    unsafe: bool,
    types: dict[str, Type],
    consts: dict[str, Any],
    grid_rank: int,
    groups: dict[str, int] | None,
) -> Compiled:
    parts = fingerprint(fn)
    values = written(tuple(consts.items()))
    if parts is None or values is None:
        return make()
    signature = "; ".join(f"{parameter}: {t}" for parameter, t in types.items())
    made: list[Compiled] = []

    def content() -> bytes:
        made.append(make())
        return made[0].to_bytes()

    key = key_of(("direct", name, str(unsafe), f"{grid_rank} {groups}", signature, values, *where(), *parts))
    data = default_cache().get(key, content)
    if made:
        return made[0]
    # The stages are for people: made again by the compiler when somebody looks.
    return Compiled.from_bytes(data, lambda: make().stages(), read)


@functools.cache
def _identity(backend: str) -> str:
    """The compiler's own files: names, sizes and times, since a version number does not change with an edit."""
    root = os.path.dirname(os.path.abspath(__file__))
    parts = [sys.version]
    for folder in (*_FOLDERS, backend):
        with os.scandir(os.path.join(root, folder)) as entries:
            files = sorted((e.name, e.stat()) for e in entries if e.name.endswith(".py"))
        parts += [f"{folder}/{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in files]
    return "\n".join(parts)


def fingerprint(fn: FunctionType) -> tuple[str, ...] | None:
    """What the meaning of a kernel function depends on, written down; None where something cannot be."""
    parts: list[str] = []
    pending, seen = [fn], {fn}
    while pending:
        function = pending.pop()
        parts.append("\n".join(_code(function.__code__)))
        names = set(_names(function.__code__))
        for name, value in _reached(function, names):
            # What exec defines in a bare namespace has no module.
            if isinstance(value, FunctionType) and not _is_compilers(value.__module__ or ""):
                parts.append(f"{name} is {value.__qualname__}")
                if value not in seen:
                    seen.add(value)
                    pending.append(value)
                continue
            text = written(value)
            if text is None:
                return None
            parts.append(f"{name} = {text}")
        text = written((function.__defaults__, tuple(sorted((function.__kwdefaults__ or {}).items()))))
        if text is None:
            return None
        parts.append(text)
    return tuple(parts)


def _is_compilers(module: str) -> bool:
    """Whether it is in `_FOLDERS`, whose files are in the key. Helpers of the library's kernels, say, are not."""
    first, *rest = module.split(".")
    return f"{first}." == _OWN and (len(rest) == 1 or rest[0] in _FOLDERS)


def _code(code: CodeType) -> Iterator[str]:
    """A code object: what it does and where its lines are."""
    yield f"{code.co_filename}:{code.co_firstlineno} {code.co_code.hex()} {code.co_linetable.hex()}"
    yield f"{code.co_names} {code.co_varnames} {code.co_freevars} {code.co_cellvars}"
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _code(const)
        else:
            yield repr(const)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    yield from code.co_freevars
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _names(const)


def _reached(function: FunctionType, names: set[str]) -> Iterator[tuple[str, Any]]:
    """(name, value) of every global, closure variable and module attribute that the function may mean."""
    scope = dict(function.__globals__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            scope[name] = cell.cell_contents
        except ValueError:  # assigned later by the enclosing function
            continue
    loaded = {*chains(function.__code__), *((name,) for name in function.__code__.co_freevars)}
    for name, *attributes in sorted(loaded):
        if name not in scope:
            continue
        value, path = scope[name], name
        while isinstance(value, ModuleType) and attributes and not f"{value.__name__}.".startswith(_OWN):
            yield path, _Named(value.__name__)
            path = f"{path}.{attributes[0]}"
            value = attribute(value, attributes.pop(0))
        if isinstance(value, ModuleType):
            yield from _reached_in(path, value, names, set())
        else:
            yield path, value


def _reached_in(name: str, module: ModuleType, names: set[str], seen: set[ModuleType]) -> Iterator[tuple[str, Any]]:
    """What the function may mean by a module that goes by a name of its own: attributes of it, and of modules in it."""
    yield name, _Named(module.__name__)
    if module in seen or f"{module.__name__}.".startswith(_OWN):
        return
    seen.add(module)
    for part in sorted(names):
        inner = vars(module).get(part)
        if isinstance(inner, ModuleType):
            yield from _reached_in(f"{name}.{part}", inner, names, seen)
        elif inner is not None:
            yield f"{name}.{part}", inner


class _Named(str):
    """The name of something whose definition is covered elsewhere."""


def written(value: Any) -> str | None:
    """A text that is equal exactly for equal values; None for objects that have none."""
    if isinstance(value, _Named | bool | int | float | complex | str | bytes | None):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, np.generic):
        return f"{value.dtype} {value.tobytes().hex()}"
    if isinstance(value, DType):
        return f"dtype {value.name}"
    if isinstance(value, Enum):
        return f"{type(value).__module__}.{type(value).__qualname__}.{value.name} = {value.value!r}"
    if isinstance(value, tuple):
        parts = [written(item) for item in value]
        return None if None in parts else f"({', '.join(map(str, parts))})"
    if isinstance(value, type) and issubclass(value, Enum):
        return f"{value.__module__}.{value.__qualname__}: {[(m.name, repr(m.value)) for m in value]}"
    module = getattr(value, "__module__", None) or ""
    if module.startswith(_OWN) or module == "builtins":
        # Words of the language and builtins: what they mean is in the compiler, whose identity is in the key.
        return f"{module}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return None
