"""Names and attributes of Python objects: locals, closure, globals, builtins, modules. No ops.

A kernel captures constants only. What it captured is recorded in `Build.captures`, since a kernel compiled
with one value of a global is another kernel than with the next.
"""

from __future__ import annotations

import builtins
import difflib
import math
from collections.abc import Iterable
from enum import Enum
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Final

import numpy as np

from peertile.dtypes import DType
from peertile.frontend.scope import Build
from peertile.frontend.values import Abstract, Known, Poison, Tup
from peertile.language.word import KernelOnly, word_of

__all__ = ["BUILTINS", "ONLY_MATH", "did_you_mean", "here", "known_attribute", "lift", "lookup"]

BUILTINS: Final[dict[str, Any]] = {
    name: getattr(builtins, name)
    for name in ("abs", "bool", "divmod", "float", "int", "len", "max", "min", "range", "round", "sum")
}
"""Builtins that a kernel may call, on compile-time values."""

ONLY_MATH: Final = frozenset(f for f in (getattr(math, n) for n in dir(math)) if isinstance(f, BuiltinFunctionType))
"""Functions of Python's `math`, computed at compile time."""


_HERE: Final = {
    "arange": "T.iota(n)", "dot": "T.mma(a, b, acc)", "matmul": "T.mma(a, b, acc)", "mean": "T.sum(tile, axis) / n",
    "relu": "T.maximum(tile, 0.0)", "absolute": "T.abs(tile)", "clip": "T.clamp(tile, lo, hi)",
    "concatenate": "T.cat((a, b), axis)", "concat": "T.cat((a, b), axis)", "trans": "T.transpose(tile)",
    "zeros_like": "T.zeros(tile.shape, tile.dtype)", "ones_like": "T.ones(tile.shape, tile.dtype)",
    "full_like": "T.full(tile.shape, value, tile.dtype)", "select": "T.where(condition, a, b)",
    "isnan": "tile != tile", "nan": "float('nan')", "inf": "float('inf')", "log1p": "T.log(1.0 + tile)",
    "expm1": "T.exp(tile) - 1.0", "constexpr": "T.Const", "load": "x.load(index, shape) of a parameter",
    "store": "z.store(tile) of a parameter", "atomic_add": "h.atomic_add(index, tile) of a T.Accumulate or T.Peer",
    "to": "tile.astype(dtype)", "type": "tile.astype(dtype)", "cast": "tile.astype(dtype)",
    "view": "tile.reshape(shape), or tile.bitcast(dtype)", "size": "tile.shape", "float": "tile.astype(T.f32)",
    "half": "tile.astype(T.f16)", "bfloat16": "T.bf16", "float8_e4m3fn": "T.f8e4m3", "float8_e5m2": "T.f8e5m2",
    "bool": "T.b1", "bool_": "T.b1", **{f"float{n}": f"T.f{n}" for n in (16, 32, 64)},
    **{f"{long}{n}": f"T.{short}{n}" for long, short in (("int", "i"), ("uint", "u")) for n in (8, 16, 32, 64)},
}  # fmt: skip
"""Words of other array languages, and what is written here."""


def here(name: str) -> str:
    """ "; write `x`" for a word of another language, or nothing."""
    return f"; write {_HERE[name]}" if name in _HERE else ""


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """ "; did you mean `x`?" for the nearest candidate, or nothing."""
    found = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.7)
    return f"; did you mean `{found[0]}`?" if found else ""


def lift(b: Build, obj: Any, role: str) -> Abstract:
    """A Python object as a compile-time value; CompileError for one that a kernel cannot hold."""
    match obj:
        case bool() | int() | float() | str() | None | DType() | Enum() | ModuleType() | type():
            return Known(obj)
        case np.bool_() | np.integer() | np.floating():
            return Known(obj.item())
        case tuple():
            return Tup(tuple(lift(b, item, role) for item in obj))
        case FunctionType() | BuiltinFunctionType():
            return Known(obj)
        case list() | dict() | set() | bytearray() | np.ndarray():
            b.fail(
                f"{role}: expected a constant, got a {type(obj).__name__}, which can change between launches; "
                "make it a tuple, or pass it as an argument"
            )
    if callable(obj):
        return Known(obj)
    b.fail(f"{role}: expected a constant, got {type(obj).__name__}; pass it as a parameter of the kernel")


def lookup(b: Build, name: str) -> Abstract:
    """What `name` means where it is read."""
    function = b.function
    binding = function.env.get(name)
    if binding is not None:
        if isinstance(binding.value, Poison):
            b.fail(binding.value.message, notes=binding.value.notes)
        return binding.value
    if name in function.assigned:
        b.fail(
            f"`{name}` has no value here: it is assigned at line {function.assigned[name]}, which has not run on this "
            "path; assign it before"
        )
    fn = function.fn
    found, obj = _captured(fn, name)
    if not found:
        visible = [*function.env, *function.assigned, *fn.__globals__, *BUILTINS, *fn.__code__.co_freevars]
        b.fail(f"`{name}` is not defined{did_you_mean(name, (n for n in visible if not n.startswith('<')))}")
    value = lift(b, obj, f"`{name}`, captured from outside the kernel")
    if isinstance(obj, bool | int | float | str | None | tuple | DType | Enum):
        b.captures[f"{fn.__module__}.{fn.__qualname__}:{name}"] = obj
    return value


def _captured(fn: FunctionType, name: str) -> tuple[bool, Any]:
    if name in fn.__code__.co_freevars:
        cell = (fn.__closure__ or ())[fn.__code__.co_freevars.index(name)]
        try:
            return True, cell.cell_contents
        except ValueError:
            return False, None
    if name in fn.__globals__:
        return True, fn.__globals__[name]
    if hasattr(builtins, name):
        return True, getattr(builtins, name)
    return False, None


def known_attribute(b: Build, obj: Any, name: str) -> Abstract:
    """Attribute `name` of a compile-time Python object."""
    if isinstance(obj, ModuleType):
        if not hasattr(obj, name):
            way_out = here(name) if obj.__name__ == "peertile.language" else ""
            way_out = way_out or did_you_mean(name, getattr(obj, "__all__", dir(obj)))
            b.fail(f"`{obj.__name__}` has no `{name}`{way_out}")
        found = getattr(obj, name)
        word = word_of(found)
        if word is not None and word.unsafe and not b.unsafe:
            b.fail(
                f"T.{word.name} in the kernel `{b.name}`, which is not unsafe; mark it @pt.kernel(unsafe=True), "
                "or use T.Peer, signals or a mailbox"
            )
        value = lift(b, found, f"`{obj.__name__}.{name}`")
        if isinstance(found, bool | int | float | str | tuple):
            b.captures[f"{obj.__name__}:{name}"] = found
        return value
    if isinstance(obj, type) and issubclass(obj, Enum):
        if name not in obj.__members__:
            b.fail(f"{obj.__name__} has no member `{name}`{did_you_mean(name, obj.__members__)}")
        return Known(obj[name])
    if isinstance(obj, DType) and name in ("bits", "itemsize", "is_bool", "is_float", "is_int", "is_signed", "name"):
        return Known(getattr(obj, name))
    if isinstance(obj, DType) and name in ("min", "max"):
        if not obj.is_int:
            b.fail(f"{obj.name}.{name}: only integer dtypes have it; write float('inf')")
        return Known(getattr(obj, name))
    if isinstance(obj, type) and issubclass(obj, KernelOnly):
        b.fail(f"T.{obj.__name__} is an annotation of kernel parameters; inside a kernel use the parameter itself")
    shown = getattr(obj, "__name__", None) or repr(obj)
    b.fail(f"`.{name}` of {shown}: not available inside a kernel")
