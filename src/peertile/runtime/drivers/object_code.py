"""Functions in native code that look at our own objects: how they are written. Compiles no kernels, decides nothing.

They run with the interpreter lock, call functions of CPython's stable ABI and a few others that every CPython exports,
and find the slots of our classes where `objects.py` found them. A reference that a slot gives is borrowed.
"""

from __future__ import annotations

import ctypes
from typing import Final

from peertile.backends.cpu import jit
from peertile.runtime.drivers.cpu_emit import Function, Module, Value
from peertile.runtime.drivers.object_files import kept_object
from peertile.runtime.objects import TYPE_WORD, held_word, slot_word

__all__ = ["ObjectWriter"]

_TABLE: Final = "things"


class ObjectWriter:
    """Writes functions that look at objects. `m` is their module."""

    def __init__(self) -> None:
        self.m = Module()
        self.held = held_word()
        self._things: list[object] = []
        """Objects that the code knows."""
        self._addresses: list[int] = []
        self._words: dict[tuple[type, str], int] = {}
        for name, result, params in (
            ("PyTuple_GetItem", "ptr", "ptr i64"), ("PyTuple_Size", "i64", "ptr"), ("PyList_Size", "i64", "ptr"),
            ("PyList_GetItem", "ptr", "ptr i64"), ("PyList_Append", "i32", "ptr ptr"), ("PyList_New", "ptr", "i64"),
            ("PyDict_Size", "i64", "ptr"), ("PyDict_GetItem", "ptr", "ptr ptr"), ("PyDict_New", "ptr", ""),
            ("PyDict_SetItem", "i32", "ptr ptr ptr"), ("PySet_Size", "i64", "ptr"),
            ("PyLong_AsLongLong", "i64", "ptr"), ("PyLong_FromLongLong", "ptr", "i64"),
            ("PyBytes_AsString", "ptr", "ptr"), ("PyBytes_Size", "i64", "ptr"),
            ("PyType_GenericAlloc", "ptr", "ptr i64"), ("Py_IncRef", "void", "ptr"), ("Py_DecRef", "void", "ptr"),
            ("PyErr_Clear", "void", ""), ("PyTuple_New", "ptr", "i64"), ("PyTuple_SetItem", "i32", "ptr i64 ptr"),
            ("PyObject_GetAttr", "ptr", "ptr ptr"), ("PyEval_GetFrame", "ptr", ""), ("PyFrame_GetCode", "ptr", "ptr"),
            ("PyFrame_GetLasti", "i32", "ptr"), ("PyErr_Occurred", "ptr", ""), ("PyObject_Size", "i64", "ptr"),
            ("PySet_Add", "i32", "ptr ptr"), ("PyObject_Vectorcall", "ptr", "ptr ptr i64 ptr"),
            ("PyDict_GetItemWithError", "ptr", "ptr ptr"), ("PyErr_ExceptionMatches", "i32", "ptr"),
            ("PyFunction_GetCode", "ptr", "ptr"),
        ):  # fmt: skip
            self.m.declare(name, result, *params.split())

    # ---------------------------------------------------------------- objects

    def word(self, cls: type, name: str) -> int:
        key = cls, name
        if key not in self._words:
            self._words[key] = slot_word(cls, name)
        return self._words[key]

    def get(self, f: Function, thing: Value, cls: type, name: str) -> Value:
        """What a slot has; borrowed."""
        return f.load(thing, self.word(cls, name), "ptr")

    def number(self, f: Function, thing: Value, cls: type, name: str) -> Value:
        return f.call("PyLong_AsLongLong", self.get(f, thing, cls, name))

    def put(self, f: Function, thing: Value, cls: type, name: str, value: Value) -> None:
        """Put an object there, which must have something there already that is kept elsewhere, or a plain number, a
        name or None: letting go of it must not run code."""
        at = self.word(cls, name)
        old = f.load(thing, at, "ptr")
        f.call("Py_IncRef", value)
        f.store(thing, at, value, "ptr")
        f.call("Py_DecRef", old)

    def fill(self, f: Function, thing: Value, cls: type, name: str, value: Value) -> None:
        """The same for a slot that is empty."""
        f.call("Py_IncRef", value)
        f.store(thing, self.word(cls, name), value, "ptr")

    def constant(self, f: Function, thing: object) -> Value:
        """An object of this process. The code loads its address from a table, so that the text, and with it the kept
        object code, is the same in every process."""
        self._things.append(thing)
        return self.address(f, id(thing))

    def address(self, f: Function, address: int) -> Value:
        """The same for what is no object."""
        if address not in self._addresses:
            self._addresses.append(address)
        return f.load(Value(f, "ptr", f"@{_TABLE}"), self._addresses.index(address), "ptr")

    def same(self, f: Function, a: Value, b: object) -> Value:
        """Whether `a` is the object `b`."""
        return a.to("i64").eq(self.constant(f, b).to("i64"))

    def is_a(self, f: Function, thing: Value, cls: type) -> Value:
        return self.same(f, f.load(thing, TYPE_WORD, "ptr"), cls)

    @staticmethod
    def unless(f: Function, condition: Value, answer: int = 0) -> None:
        """Leave unless."""
        with f.if_(condition) as branch:
            pass
        with branch.otherwise():
            f.ret(answer)

    def free(self, f: Function, lock: Value) -> Value:
        """Whether nobody holds an RLock."""
        return f.load(lock, self.held).eq(0)

    def compiled(self, name: str) -> dict[str, int]:
        """Addresses of the exported functions; `name` is what the object file is called. The code is never unmapped,
        and neither are its objects let go of."""
        count = len(self._addresses)
        text = f"@{_TABLE} = global [{max(count, 1)} x i64] zeroinitializer\n{self.m.text()}"
        symbols = jit.load_object(kept_object(name, text), [*self.m.exports, _TABLE])
        ctypes.memmove(symbols.pop(_TABLE), (ctypes.c_int64 * count)(*self._addresses), 8 * count)
        _kept.append(self._things)
        return symbols


_kept: Final[list[object]] = []
