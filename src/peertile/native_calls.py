"""Calling a kernel in native code: the operation of a launch like one that was made before.

What `KernelFunction.__call__` does in Python for tensors, partitions, integers and constants is most of a small launch
in a chain. This does the same, and calls the Python method for whatever is less simple or wrong. It takes the method's
place once launches are posted natively, in a process with a GPU; without the slots that it needs (`objects.py`) it
leaves the method where it is.
"""

from __future__ import annotations

import sys
from typing import Any

from peertile.binding import Ready
from peertile.launch import LaunchOp
from peertile.recognise import CONST, EXCLUSIVE, SCALAR, SHARED
from peertile.runtime.argument import Argument, Use
from peertile.runtime.drivers.cpu_emit import Function, Value, Var
from peertile.runtime.drivers.cpu_native_python import method
from peertile.runtime.drivers.object_code import ObjectWriter
from peertile.runtime.objects import TYPE_WORD, NotFoundError, is_locked_globally
from peertile.runtime.storage import Storage
from peertile.runtime.tensor import Partition, Tensor

__all__ = ["native_call"]


def native_call(cls: type, instead: str, outside: dict[str, bool]) -> Any:
    """A method for `cls` to be called by, or None. It reads of an instance: `letters`, one for each parameter, or None
    where it may not try; `defaults`, of the last parameters; `ready`, by what launches are known by. `instead` names
    the method for everything else; `outside` says of files whether they are outside of this package."""
    if not is_locked_globally():
        return None
    try:
        w = _Writer(cls, instead, outside)
        w.slow()
        w.fast()
        w.call()
        symbols = w.compiled("kernel-calls")
    except NotFoundError:
        return None
    return method(cls, "__call__", symbols["python_call"])


class _Writer(ObjectWriter):
    def __init__(self, cls: type, instead: str, outside: dict[str, bool]) -> None:
        super().__init__()
        self.cls, self.instead, self.outside = cls, instead, outside

    def slow(self) -> None:
        """Have Python do it."""
        f = self.m.define("slow", "ptr", "ptr self, ptr args, i64 count, ptr names")
        instead = f.call("PyObject_GetAttr", f["self"], self.constant(f, self.instead))
        with f.if_(instead.to("i64").eq(0)):
            f.ret(0)
        result = f.call("PyObject_Vectorcall", instead, f["args"], f["count"], f["names"])
        f.call("Py_DecRef", instead)
        f.ret(result)

    def _or_none(self, f: Function, condition: Value, *owned: Value) -> None:
        """Leave with null unless, letting go of what is owned."""
        with f.if_(condition) as branch:
            pass
        with branch.otherwise():
            for thing in owned:
                f.call("Py_DecRef", thing)
            f.ret(0)

    def fast(self) -> None:
        """The same, or null where it is not so simple; nothing has changed then. An error is set where a value of the
        user's raised one when it was looked for."""
        f = self.m.define("fast", "ptr", "ptr self, ptr args, i64 count, ptr names")
        kernel, args, count = f["self"], f["args"], f["count"]
        ok = self._or_none
        ok(f, f["names"].to("i64").eq(0))
        ok(f, self.is_a(f, kernel, self.cls))
        letters = self.get(f, kernel, self.cls, "letters")
        ok(f, self.is_a(f, letters, bytes))
        text = f.call("PyBytes_AsString", letters)
        n = f.call("PyBytes_Size", letters)
        defaults = self.get(f, kernel, self.cls, "defaults")
        ok(f, self.is_a(f, defaults, tuple))
        first = n - f.call("PyTuple_Size", defaults)
        ok(f, count <= n)
        ok(f, count >= first)
        given = f.call("PyTuple_New", n)
        ok(f, given.to("i64").ne(0))
        total, parts = f.var("i64", 0), f.var("i64", 1)
        with f.range(n) as k:
            thing = f.var("ptr", 0)
            with f.if_(k < count) as branch:
                thing.set(f.load(args, k, "ptr"))
            with branch.otherwise():
                thing.set(f.call("PyTuple_GetItem", defaults, k - first))
            value = thing.v
            f.call("Py_IncRef", value)
            f.call("PyTuple_SetItem", given, k, value)
            letter = f.load(f.offset(text, k), 0, "i8").to("i64")
            argument = f.var("ptr", 0)
            with f.if_(letter.eq(SHARED)):
                ok(f, self.is_a(f, value, Tensor), given)
                argument.set(self.get(f, value, Tensor, "_shared"))
            with f.if_(letter.eq(EXCLUSIVE)):
                ok(f, self.is_a(f, value, Partition), given)
                argument.set(self.get(f, value, Partition, "bound"))
                parts.add(1)
            with f.if_(letter.eq(SCALAR)):
                ok(f, self.is_a(f, value, int), given)
            with f.if_(argument.v.to("i64").ne(0)):
                ok(f, self.is_a(f, argument.v, Argument), given)
                uses = self.get(f, argument.v, Argument, "uses")
                ok(f, self.is_a(f, uses, tuple), given)
                total.add(f.call("PyTuple_Size", uses))
            parts.add(1)
        ok(f, total.v > 0, given)
        key, uses = f.call("PyTuple_New", parts), f.call("PyTuple_New", total)
        at, used = f.var("i64", 1), f.var("i64", 0)
        none = self.constant(f, None)
        f.call("Py_IncRef", none)
        f.call("PyTuple_SetItem", key, 0, none)
        with f.range(n) as k:
            value = f.call("PyTuple_GetItem", given, k)
            letter = f.load(f.offset(text, k), 0, "i8").to("i64")
            with f.if_(letter.eq(SHARED)):
                self._bound(f, self.get(f, value, Tensor, "_shared"), key, at, uses, used)
            with f.if_(letter.eq(EXCLUSIVE)):
                self._bound(f, self.get(f, value, Partition, "bound"), key, at, uses, used)
                self._take(f, key, at, self.get(f, value, Partition, "programs"))
            with f.if_(letter.eq(SCALAR)):
                self._take(f, key, at, value)
            with f.if_(letter.eq(CONST)):
                with f.if_(self.is_a(f, value, int)) as branch:
                    self._take(f, key, at, value)
                with branch.otherwise():  # 1, 1.0 and True differ
                    pair = f.call("PyTuple_New", 2)
                    kind = f.load(value, TYPE_WORD, "ptr")
                    place = f.var("i64", 0)
                    self._take(f, pair, place, kind)
                    self._take(f, pair, place, value)
                    f.call("PyTuple_SetItem", key, at, pair)
                    at.add(1)
        known = self.get(f, kernel, self.cls, "ready")
        ok(f, self.is_a(f, known, dict), given, uses, key)
        ready = f.call("PyDict_GetItemWithError", known, key)
        with f.if_(ready.to("i64").ne(0)):
            f.call("Py_IncRef", ready)  # a collection below may run code that has the kernel forget it
        f.call("Py_DecRef", key)
        ok(f, ready.to("i64").ne(0), given, uses)
        owned = given, uses, ready
        ok(f, self.is_a(f, ready, Ready), *owned)
        use = f.call("PyTuple_GetItem", uses, 0)
        ok(f, self.is_a(f, use, Use), *owned)
        storage = self.get(f, use, Use, "storage")
        ok(f, self.is_a(f, storage, Storage), *owned)
        compiler = f.call(
            "PyObject_GetAttr", self.get(f, storage, Storage, "device"), self.constant(f, sys.intern("compiler"))
        )
        with f.if_(compiler.to("i64").eq(0)):
            for part in owned:
                f.call("Py_DecRef", part)
            f.ret(0)
        f.call("Py_DecRef", compiler)  # the device has it
        ok(f, compiler.to("i64").eq(f.call("PyTuple_GetItem", ready, 4).to("i64")), *owned)
        site = self._site(f, *owned)
        op = f.call("PyType_GenericAlloc", self.constant(f, LaunchOp), 0)
        ok(f, op.to("i64").ne(0), *owned, site)
        for slot, part in (("given", given), ("uses", uses), ("_site", site), ("_ready", ready)):
            self.fill(f, op, LaunchOp, slot, part)
            f.call("Py_DecRef", part)
        self.fill(f, op, LaunchOp, "kernel", kernel)
        self.fill(f, op, LaunchOp, "_spent", self.constant(f, False))
        self.fill(f, op, LaunchOp, "_bound", none)
        self.fill(f, op, LaunchOp, "_key", none)
        f.ret(op)

    def _site(self, f: Function, *owned: Value) -> Value:
        """Where the caller is, as `call_site` has it; leaves where that is in this package."""
        frame = f.call("PyEval_GetFrame")
        self._or_none(f, frame.to("i64").ne(0), *owned)
        code = f.call("PyFrame_GetCode", frame)
        name = f.call("PyObject_GetAttr", code, self.constant(f, sys.intern("co_filename")))
        self._or_none(f, name.to("i64").ne(0), *owned, code)
        found = f.call("PyDict_GetItem", self.constant(f, self.outside), name)
        f.call("Py_DecRef", name)
        self._or_none(f, self.same(f, found, True), *owned, code)
        site = f.call("PyTuple_New", 2)
        f.call("PyTuple_SetItem", site, 0, code)
        at = f.call("PyFrame_GetLasti", frame).to("i64", signed=True)
        f.call("PyTuple_SetItem", site, 1, f.call("PyLong_FromLongLong", at))
        return site

    @staticmethod
    def _take(f: Function, into: Value, at: Var, thing: Value) -> None:
        """The next item of a tuple."""
        f.call("Py_IncRef", thing)
        f.call("PyTuple_SetItem", into, at, thing)
        at.add(1)

    def _bound(self, f: Function, argument: Value, key: Value, at: Var, uses: Value, used: Var) -> None:
        """What an argument adds to the key, and to the uses."""
        self._take(f, key, at, self.get(f, argument, Argument, "serial"))
        own = self.get(f, argument, Argument, "uses")
        with f.range(f.call("PyTuple_Size", own)) as k:
            self._take(f, uses, used, f.call("PyTuple_GetItem", own, k))

    def call(self) -> None:
        """(kernel, *arguments): the operation."""
        f = self.m.define("python_call", "ptr", "ptr self, ptr args, i64 count, ptr names", exported=True)
        made = f.call("fast", f["self"], f["args"], f["count"], f["names"])
        with f.if_(made.to("i64").ne(0)):
            f.ret(made)
        with f.if_(f.call("PyErr_Occurred").to("i64").ne(0)):
            # What the method tries again after; anything else, Ctrl-C for instance, is the caller's.
            again = f.var("i64", 0)
            for kind in (TypeError, AttributeError, ValueError):
                again.add(f.call("PyErr_ExceptionMatches", self.constant(f, kind)).to("i64"))
            with f.if_(again.v.eq(0)):
                f.ret(0)
            f.call("PyErr_Clear")
        f.ret(f.call("slow", f["self"], f["args"], f["count"], f["names"]))
