"""Native runtime of the cpu driver, the doors from Python: functions that Python calls as its own builtins.

A call through ctypes costs 60 ns and 50 more for each argument, which is most of an enqueued launch; a builtin costs
some 20 ns and 10. Each entry takes its arguments out of the objects, gives up the interpreter lock where the function
may run programs or sleep, and calls it. Only functions of CPython's stable ABI are used. Nothing is checked beyond
the types of the objects: the callers are in this package.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

from peertile.runtime.drivers.cpu_emit import Module, Value

__all__ = ["ENTRIES", "builtin", "emit_entries", "method", "symbol_of"]

ENTRIES: Final[dict[str, tuple[str, bool]]] = {
    "run_inline": ("iii", True),
    "run_launch": ("iisbii", True),
    "run_graph": ("iiiiii", True),
    "host_wait": ("iiii", True),
    "submit": ("ii", False),
    "submit_launch": ("iisbi", False),
    "wake_stream": ("i", False),
    "acquired": ("i", False),
    "release": ("ii", False),
}
"""Name of the function: its arguments and whether it is called without the interpreter lock. `i` is an integer or an
address, `s` a bytes object passed as its address, `b` one passed as its address and its length."""

_FASTCALL: Final = 0x80
_KEYWORDS: Final = 0x02


def symbol_of(name: str) -> str:
    """What the entry of a function is called in the object."""
    return f"python_{name}"


def emit_entries(m: Module) -> None:
    m.declare("PyLong_AsLongLong", "i64", "ptr")
    m.declare("PyLong_FromLongLong", "ptr", "i64")
    m.declare("PyBytes_AsString", "ptr", "ptr")
    m.declare("PyBytes_Size", "i64", "ptr")
    m.declare("PyErr_Occurred", "ptr")
    m.declare("PyEval_SaveThread", "ptr")
    m.declare("PyEval_RestoreThread", "void", "ptr")
    for name, (codes, releases) in ENTRIES.items():
        _emit(m, name, codes, releases=releases)


def _emit(m: Module, name: str, codes: str, *, releases: bool) -> None:
    f = m.define(symbol_of(name), "ptr", "ptr self, ptr args, i64 count", exported=True)
    result, params = m.signatures[name]
    values: list[Value] = []
    for k, code in enumerate(codes):
        item = f.load(f["args"], k, "ptr")
        if code == "i":
            values.append(f.call("PyLong_AsLongLong", item))
        else:
            values.append(f.call("PyBytes_AsString", item))
            if code == "b":
                values.append(f.call("PyBytes_Size", item))
    with f.if_(f.call("PyErr_Occurred").to("i64").ne(0)):
        f.ret(f.value(0, "ptr"))
    if releases:
        thread = f.call("PyEval_SaveThread")
    got = f.call(name, *[v.to(t) for v, t in zip(values, params, strict=True)])
    if releases:
        f.call("PyEval_RestoreThread", thread)
    f.ret(f.call("PyLong_FromLongLong", f.value(0) if result == "void" else got))


class _MethodDef(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    ]


_definitions: Final[list[_MethodDef]] = []  # what is made of a definition refers to it for as long as it lives


def _defined(name: str, address: int, flags: int) -> int:
    """Address of the definition of the entry at `address`, for CPython."""
    definition = _MethodDef(name.encode(), address, flags, None)
    _definitions.append(definition)
    return ctypes.addressof(definition)


def builtin(name: str, address: int) -> Callable[..., int]:
    """The entry at `address` as an object that Python calls."""
    new: Any = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(
        ("PyCFunction_NewEx", ctypes.pythonapi)
    )
    function: Callable[..., int] = new(_defined(name, address, _FASTCALL), None, None)
    return function


def method(cls: type, name: str, address: int) -> Any:
    """The entry at `address`, which takes names of arguments as well, as a method of instances of `cls`."""
    new: Any = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.c_void_p)(
        ("PyDescr_NewMethod", ctypes.pythonapi)
    )
    return new(cls, _defined(name, address, _FASTCALL | _KEYWORDS))
