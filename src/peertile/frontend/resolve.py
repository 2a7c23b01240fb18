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

__all__ = ["BUILTINS", "ONLY_MATH", "did_you_mean", "known_attribute", "lift", "lookup"]

BUILTINS: Final[dict[str, Any]] = {
    name: getattr(builtins, name)
    for name in ("abs", "bool", "divmod", "float", "int", "len", "max", "min", "range", "round", "sum")
}
"""Builtins that a kernel may call, on compile-time values."""

ONLY_MATH: Final = frozenset(f for f in (getattr(math, n) for n in dir(math)) if isinstance(f, BuiltinFunctionType))
"""Functions of Python's `math`, computed at compile time."""


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
            b.fail(f"`{obj.__name__}` has no `{name}`{did_you_mean(name, getattr(obj, '__all__', dir(obj)))}")
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
