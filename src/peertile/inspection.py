"""Compile a kernel from a description of its arguments, and show every stage. Runs nothing.

A description is NAME=VALUE: a tensor `x=f32[1000,64]`, a partition `z=f32[1000]/256` (`/128x64` for two
axes, `/256p` persistent), a mailbox `box=bf16[4096]` (`box=bf16[4096]:1` for depth 1), a scalar or a
constant `B=64` (`DT=bf16` for a dtype). Tensors are taken as contiguous and 64-byte aligned.
"""

from __future__ import annotations

import importlib.util
import inspect as python_inspect
import re
import sys
from ast import literal_eval
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from peertile.dtypes import DType, dtype_named, f32, i64
from peertile.errors import ArgumentError
from peertile.ir.types import (
    Access,
    BarrierType,
    CounterType,
    MailboxType,
    Partition,
    PointerType,
    SignalType,
    Space,
    TileType,
    Type,
)
from peertile.kernel import KernelFunction
from peertile.language.annotations import ConstOf, KernelParam, Role
from peertile.runtime.argument import canonical, multicast_type, symmetric_type, view_type
from peertile.runtime.tensor import contiguous_strides

__all__ = ["Description", "Signature", "describe", "load_kernel"]

_TENSOR = re.compile(
    r"^(?P<dtype>\w+)\[(?P<shape>\d+(?:\s*,\s*\d+)*)\](?:/(?P<tile>\d+(?:x\d+)*)(?P<persistent>p?))?(?::(?P<depth>\d+))?(?P<fabric>@fabric)?$"
)


@dataclass(frozen=True)
class Signature:
    """Parameter types and constants of one specialisation."""

    types: dict[str, Type]
    consts: dict[str, Any]

    @staticmethod
    def parse(kernel: KernelFunction, texts: list[str]) -> Signature:
        """The signature that `texts` describe; ArgumentError for a parameter that is missing or misread."""
        given: dict[str, str] = {}
        for text in texts:
            name, equals, value = text.partition("=")
            if not equals:
                raise ArgumentError(f"argument: expected NAME=VALUE, got {text!r}")
            given[name.strip()] = value.strip()
        types: dict[str, Type] = {}
        consts: dict[str, Any] = {}
        for param in kernel.params:
            text_of = given.pop(param.name, None)
            if param.role is Role.CONST:
                if text_of is None and param.required:
                    raise ArgumentError(f"{param.name}: expected a constant such as {param.name}=64, got nothing")
                consts[param.name] = param.default if text_of is None else _constant(param, text_of)
            else:
                types[param.name] = canonical(_type(param, text_of))
        if given:
            raise ArgumentError(f"argument: {kernel.name} has no parameter {', '.join(given)}")
        return Signature(types, consts)


def _constant(param: KernelParam, text: str) -> Any:
    """What a T.Const parameter gets: a Python literal, a dtype or a member of an enum by its name, a text as it is."""
    kind = param.const_type
    value: Any = text
    if kind is DType:
        return dtype_named(text.rpartition(".")[2])
    try:
        if isinstance(kind, type) and issubclass(kind, Enum):
            value = kind[text.rpartition(".")[2]]
        elif kind is not str or text[:1] in ("'", '"'):
            value = literal_eval(text)
    except (ValueError, SyntaxError, KeyError):  # it stays a text, unless it names a dtype
        with suppress(ArgumentError):
            value = dtype_named(text.rpartition(".")[2]) if kind is None else text
    if kind is not None and not ConstOf(kind).takes(value):
        raise ArgumentError(f"{param.name}: expected a value for {ConstOf(kind)}, got {text!r}")
    return value


def _type(param: KernelParam, text: str | None) -> Type:
    simple: dict[Role, Type] = {
        Role.SIGNAL: SignalType(),
        Role.COUNTER: CounterType(),
        Role.BARRIER: BarrierType(),
    }
    if param.role in simple:
        return simple[param.role]
    if param.role is Role.SCALAR:
        if param.dtype is not None:
            return TileType(param.dtype)
        return TileType(dtype_named(text) if text and text.isalnum() and not text.isdigit() else i64)
    if param.role is Role.POINTER:
        return PointerType(dtype_named(text) if text else f32)
    match = _TENSOR.match(text or "")
    if match is None:
        got = text or "nothing"
        raise ArgumentError(f"{param.name}: expected a tensor such as {param.name}=f32[1000,64], got {got}")
    dtype = dtype_named(match["dtype"])
    shape = tuple(int(n) for n in match["shape"].split(","))
    strides = contiguous_strides(shape)
    if param.role is Role.MAILBOX:
        depth = int(match["depth"] or 2)
        return MailboxType(dtype, shape, depth, depth < 2)
    if param.role is Role.PEER:
        return symmetric_type(dtype, shape, strides, param.access or Access.READ_WRITE, 64)
    if param.role is Role.MULTICAST:
        return multicast_type(dtype, shape, strides, 64, hardware=match["fabric"] is not None)
    if param.role is Role.EXCLUSIVE:
        if not match["tile"]:
            raise ArgumentError(f"{param.name}: expected a partition such as {param.name}={text}/256, got no tile")
        tile = tuple(int(n) for n in match["tile"].split("x"))
        return view_type(dtype, 0, shape, strides, Access.READ_WRITE, Partition(tile, bool(match["persistent"])))
    if param.role is Role.ACCUMULATE:
        return view_type(dtype, 0, shape, strides, Access.WRITE, space=Space.DEVICE)
    return view_type(dtype, 0, shape, strides, Access.READ)


@dataclass(frozen=True)
class Description:
    """Every stage of one specialisation as text, and how its bounds are known."""

    name: str
    stages: dict[str, str]
    bounds: dict[str, int]
    waits: bool
    scratch_bytes: int
    payload: bytes = field(default=b"", repr=False)
    """The machine code: an object file, or a cubin."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "bounds": self.bounds,
            "waits": self.waits,
            "scratch_bytes": self.scratch_bytes,
            "stages": self.stages,
        }


def describe(kernel: KernelFunction, signature: Signature, arch: str | None = None) -> Description:
    """Compile `kernel` for `signature` and collect every stage as text: for this processor, or for GPUs of `arch`."""
    compiled = kernel.compile_types(signature.types, signature.consts, arch=arch).compiled
    stages = {"source": python_inspect.getsource(kernel.fn), **compiled.stages()}
    binary = compiled.binary
    return Description(kernel.name, stages, compiled.bounds, binary.waits, binary.scratch_bytes, binary.payload)


def load_kernel(target: str) -> KernelFunction:
    """The kernel named by `FILE.py:KERNEL`; the file is imported under a name of its own."""
    path_text, _, name = target.rpartition(":") if not Path(target).is_file() else (target, "", "")
    path = Path(path_text)
    if not path.is_file():
        raise ArgumentError(f"kernel: expected FILE.py:KERNEL with an existing file, got {target!r}")
    spec = importlib.util.spec_from_file_location(f"_peertile_inspected_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not isinstance(found, KernelFunction):
        names = [n for n, v in vars(module).items() if isinstance(v, KernelFunction)]
        raise ArgumentError(f"kernel: expected {path}:KERNEL with one of {', '.join(names) or 'none'}, got {target!r}")
    return found
