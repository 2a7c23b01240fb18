"""Launches of the cuda driver from operation to ring in native code: leases and all that the host keeps of a launch.

Posting a launch for the device's feeder takes some 50 ns (`cuda_native_feeding.py`); in Python, entering its lease and
noting who made it takes thirty times that. Here functions do both for the common case, with the interpreter lock held
throughout, so that nothing else of Python runs meanwhile: `link`, for an operation of a chain or zip, `post`, for one
submitted alone, and `resubmit`, for one that its owner keeps. They do what `LaunchOp._execute`, `LaunchOp.submitted_at`
and `KeptLaunch.submitted` do, and refuse (nothing has changed then) whatever is less simple: another stream's work,
memory that is lent out, a stream that is behind, no feeder awake, somebody who holds one of the locks. Only functions
of CPython's stable ABI are called; where the slots of our own classes are is found out by trying (`objects.py`), and
without that there are no such functions.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Final

from peertile.runtime.argument import Use
from peertile.runtime.context import ExecutionContext
from peertile.runtime.drivers.cpu_emit import Function, Value, Var
from peertile.runtime.drivers.cpu_native_python import builtin
from peertile.runtime.drivers.cuda_launches import CudaLaunch, Launches
from peertile.runtime.drivers.cuda_native import CLOSELY
from peertile.runtime.drivers.cuda_stream import LOOK_MASK, CudaStream
from peertile.runtime.drivers.object_code import ObjectWriter
from peertile.runtime.future import DeviceFuture
from peertile.runtime.launched import Launched
from peertile.runtime.lease import Lease, claims_lock
from peertile.runtime.linking import LinkCode, Links, kinds, when_linked
from peertile.runtime.objects import NotFoundError, is_locked_globally
from peertile.runtime.standing import Resting, Standing
from peertile.runtime.storage import Storage, changes
from peertile.runtime.stream import Stream, live_streams

if TYPE_CHECKING:
    from peertile.runtime.drivers.cuda_native import Native

__all__ = ["links"]

_DONE, _LOOK, _LEASED = int(LinkCode.DONE), int(LinkCode.LOOK), int(LinkCode.LEASED)


class _Writer(ObjectWriter):
    """Writes the functions for launches that are instances of `launch`; `post` is the address of `cuda_post`."""

    def __init__(self, launch: type, kept: type, specialization: type, post: int) -> None:
        super().__init__()
        self.launch = launch
        self.kept = kept
        self.specialization = specialization
        self.post = post

    # ---------------------------------------------------------------- functions

    def claim(self) -> None:
        """Enter a lease on all of `uses` for `stream`, as `LeaseTable.claim` does: what its entries replaced, to be let
        go of when all is done, or null and nothing has changed. The words are where the lease counts its entries.

        Nothing that may start a collection, and with it code of the user's, comes behind the last look."""
        m = self.m
        f = m.define("claim", "ptr", "ptr stream, ptr uses, ptr lease, i64 left, i64 size, ptr handle, ptr prepared")
        n = f.call("PyTuple_Size", f["uses"])
        olds = f.call("PyList_New", 0)
        spares = f.var("i64", 0)
        with f.if_(olds.to("i64").eq(0)):
            f.ret(0)
        with f.range(n) as k:  # dicts for storages that nobody uses
            storage = self.get(f, f.call("PyTuple_GetItem", f["uses"], k), Use, "storage")
            with f.if_(f.call("PyDict_Size", self.get(f, storage, Storage, "claims")).eq(0)):
                new = f.call("PyDict_New")
                with f.if_(new.to("i64").ne(0)):
                    f.call("PyList_Append", olds, new)
                    f.call("Py_DecRef", new)
                spares.add(1)
        with f.if_(f.call("look", f["stream"], f["uses"], spares, f["handle"], f["prepared"]).ne(1)):
            f.call("Py_DecRef", olds)
            f.ret(0)
        left, spare = f.var("i64", n), f.var("i64", 0)
        with f.range(n) as k:
            use = f.call("PyTuple_GetItem", f["uses"], k)
            claims = self.get(f, self.get(f, use, Use, "storage"), Storage, "claims")
            held = f.call("PyDict_GetItem", claims, f["stream"])
            with f.if_(held.to("i64").eq(0)) as branch:
                new = f.call("PyList_GetItem", olds, spare)
                spare.add(1)
                f.call("PyDict_SetItem", new, use, f["lease"])
                f.call("PyDict_SetItem", claims, f["stream"], new)
            with branch.otherwise():
                before = f.call("PyDict_GetItem", held, use)
                with f.if_(before.to("i64").ne(0)):
                    with f.if_(before.to("i64").eq(f["lease"].to("i64"))) as own:
                        left.add(-1)
                    with own.otherwise():
                        f.call("PyList_Append", olds, before)
                        at = self.is_a(f, before, Launched).select(
                            self.word(Launched, "left"), self.word(Lease, "left")
                        )
                        old = f.load(before, at, "ptr")
                        less = f.call("PyLong_FromLongLong", f.call("PyLong_AsLongLong", old) - 1)
                        f.store(before, at, less, "ptr")
                        f.call("Py_DecRef", old)
                f.call("PyDict_SetItem", held, use, f["lease"])
        count = f.call("PyLong_FromLongLong", left)
        for name in ("left", "size"):
            old = f.load(f["lease"], f[name], "ptr")
            f.call("Py_IncRef", count)
            f.store(f["lease"], f[name], count, "ptr")
            f.call("Py_DecRef", old)
        f.call("Py_DecRef", count)
        f.ret(olds)

    def look(self) -> None:
        """Whether a lease can be entered and a launch posted, with so many dicts for storages that nobody uses."""
        f = self.m.define("look", "i64", "ptr stream, ptr uses, i64 spares, ptr handle, ptr prepared")
        self.unless(f, f.call("open", f["handle"], f["prepared"]))
        missing = f.var("i64", 0)
        with f.range(f.call("PyTuple_Size", f["uses"])) as k:
            use = f.call("PyTuple_GetItem", f["uses"], k)
            storage = self.get(f, use, Use, "storage")
            self._may_use(f, use, storage)
            self.unless(f, self.same(f, self.get(f, use, Use, "channel"), False))
            claims = self.get(f, storage, Storage, "claims")
            streams = f.call("PyDict_Size", claims)
            with f.if_(streams.eq(0)) as branch:
                missing.add(1)
            with branch.otherwise():
                self.unless(f, streams.eq(1))
                held = f.call("PyDict_GetItem", claims, f["stream"])
                self.unless(f, held.to("i64").ne(0))
                before = f.call("PyDict_GetItem", held, use)
                with f.if_(before.to("i64").ne(0)):
                    known = self.is_a(f, before, Lease).select(1, 0)
                    for cls in (Resting, Launched):
                        known = known | self.is_a(f, before, cls).select(1, 0)
                    self.unless(f, known.ne(0))
        self.unless(f, missing.v <= f["spares"])
        f.ret(1)

    def _may_use(self, f: Function, use: Value, storage: Value) -> None:
        """Leave where a storage is closed, or lent out to somebody who would see what the use writes."""
        self.unless(f, self.same(f, self.get(f, storage, Storage, "closed"), None))
        with f.if_(self.same(f, self.get(f, use, Use, "exclusive"), False)) as branch:
            pass
        with branch.otherwise():
            self.unless(f, f.call("PyDict_Size", self.get(f, storage, Storage, "borrows")).eq(0))

    def posted(self) -> None:
        """Post a launch and take note of it, as `CudaDevice.enqueue` does: what `cuda_post` says; 0: it is not."""
        f = self.m.define("posted", "i64", "ptr handle, ptr prepared, ptr args")
        number = f.call_address(
            self.address(f, self.post), "i64",
            self.number(f, f["handle"], CudaStream, "lane_address").to("ptr"),
            self.number(f, f["prepared"], CudaLaunch, "address").to("ptr"),
            f.call("PyBytes_AsString", f["args"]), f.call("PyBytes_Size", f["args"]),
        )  # fmt: skip
        self.unless(f, number > 0)
        run = self.get(f, f["handle"], CudaStream, "run")
        f.call("PyList_Append", self.get(f, run, Launches, "ops"), f["prepared"])
        self.put(f, f["handle"], CudaStream, "name", self.get(f, f["prepared"], CudaLaunch, "name"))
        f.ret(number)

    def open(self) -> None:
        """Whether launches can be posted on a stream now, this one among them, with nobody else at it."""
        f = self.m.define("open", "i1", "ptr handle, ptr prepared")
        self.unless(f, self.is_a(f, f["handle"], CudaStream))
        self.unless(f, self.is_a(f, f["prepared"], CudaLaunch))
        self.unless(f, self.same(f, self.get(f, f["prepared"], CudaLaunch, "plain"), True))
        self.unless(f, self.is_a(f, self.get(f, f["handle"], CudaStream, "run"), Launches))
        self.unless(f, self.free(f, self.get(f, f["handle"], CudaStream, "lock")))
        self.unless(f, self.free(f, self.constant(f, claims_lock)))
        self.unless(f, f.call("PySet_Size", self.get(f, f["handle"], CudaStream, "host_threads")).eq(0))
        f.ret(1)

    def _ready(self, f: Function, op: Value, ready: Value) -> tuple[Value, Value, Value, Value]:
        """What is ready of an operation: the launch, its arguments, how its fault is told; and its uses. Leaves unless
        it is a launch like one that was made before."""
        self.unless(f, self.same(f, self.get(f, op, self.launch, "_bound"), None))
        with f.if_(self.same(f, ready, None)):
            f.ret(0)
        self.unless(f, f.call("current", f.call("PyTuple_GetItem", ready, 0)))
        uses = self.get(f, op, self.launch, "uses")
        self.unless(f, self.is_a(f, uses, tuple))
        n = f.call("PyTuple_Size", uses)
        self.unless(f, n > 0)
        with f.range(n) as k:
            use = f.call("PyTuple_GetItem", uses, k)
            self.unless(f, self.is_a(f, use, Use))
            self.unless(f, self.is_a(f, self.get(f, use, Use, "storage"), Storage))
        prepared, args, maker = (f.call("PyTuple_GetItem", ready, k) for k in (1, 2, 3))
        return prepared, args, maker, uses

    def _end(self, f: Function, number: Value) -> None:
        """Return whether the driver wants to look."""
        f.ret(self._goes_on(number).select(_DONE, _LOOK))

    @staticmethod
    def _goes_on(number: Value) -> Value:
        """Whether the driver need not look after the launch with this number."""
        return ((number < CLOSELY).select(1, 0) & (number & LOOK_MASK).ne(0).select(1, 0)).ne(0)

    def _plain(self, f: Function, number: Value) -> Value:
        """The number of a launch as an object, which the caller lets go of."""
        return f.call("PyLong_FromLongLong", (number < CLOSELY).select(number, number - CLOSELY))

    def _own_ready(self, f: Function) -> Value:
        """What is ready of the operation, which the caller lets go of: a collection may run code that has the operation
        made ready anew. Leaves unless it is a launch."""
        self.unless(f, self.is_a(f, f["op"], self.launch))
        ready = self.get(f, f["op"], self.launch, "_ready")
        f.call("Py_IncRef", ready)
        return ready

    def link(self) -> None:
        """An operation of a context: see `Links`. It is spent from the beginning, whatever code a collection runs."""
        f = self.m.define("link", "i64", "ptr context, ptr op, ptr spent")
        context, op, spent = f["context"], f["op"], f["spent"]
        self.unless(f, self.is_a(f, context, ExecutionContext))
        ready = self._own_ready(f)
        code = f.var("i64", 0)
        with f.if_(self.get(f, op, self.launch, "_spent").to("i64").eq(spent.to("i64"))):
            self.put(f, op, self.launch, "_spent", self.constant(f, True))
            code.set(f.call("link_spent", context, op, ready))
            with f.if_(code.v.eq(0)):
                self.put(f, op, self.launch, "_spent", spent)
        f.call("Py_DecRef", ready)
        f.ret(code)

    def link_spent(self) -> None:
        """The same for one that is spent."""
        C = ExecutionContext
        f = self.m.define("link_spent", "i64", "ptr context, ptr op, ptr ready")
        context, op = f["context"], f["op"]
        prepared, args, maker, uses = self._ready(f, op, f["ready"])
        handle, stream = self.get(f, context, C, "handle"), self.get(f, context, C, "stream")
        self.unless(f, f.call("open", handle, prepared))
        storage = self.get(f, f.call("PyTuple_GetItem", uses, 0), Use, "storage")
        device = self.get(f, storage, Storage, "device")
        self.unless(f, device.to("i64").eq(self.get(f, context, C, "device").to("i64")))
        with f.if_(self.same(f, self.get(f, context, C, "makers"), None)):
            made = f.call("PyDict_New")
            self.put(f, context, C, "makers", made)
            f.call("Py_DecRef", made)
        name, site = self.get(f, prepared, CudaLaunch, "name"), self.get(f, op, self.launch, "_site")
        leases = self.get(f, context, C, "leases")
        have = f.call("PyList_Size", leases)
        lease, olds = f.var("ptr", 0), f.var("ptr", 0)
        with f.if_(have > 0):
            last = f.call("PyList_GetItem", leases, have - 1)
            with f.if_(f.call("again", last, uses)):
                # Making the dict may have run code, hence another look.
                self.unless(f, f.call("open", handle, prepared))
                lease.set(last)
        with f.if_(lease.v.to("i64").eq(0)):
            new = f.call("PyType_GenericAlloc", self.constant(f, Lease), 0)
            self.unless(f, new.to("i64").ne(0))
            zero = f.call("PyLong_FromLongLong", 0)
            for slot, value in (
                ("name", name), ("site", site), ("stream", stream), ("uses", uses), ("sequence", zero), ("left", zero),
                ("size", zero),
            ):  # fmt: skip
                self.fill(f, new, Lease, slot, value)
            f.call("Py_DecRef", zero)
            left, size = self.word(Lease, "left"), self.word(Lease, "size")
            olds.set(f.call("claim", stream, uses, new, left, size, handle, prepared))
            with f.if_(olds.v.to("i64").eq(0)):
                f.call("Py_DecRef", new)
                f.ret(0)
            f.call("PyList_Append", leases, new)
            f.call("Py_DecRef", new)
            lease.set(new)
        posted = f.var("i64", 0)
        # Behind launches of a zip that were put off it is put off as well.
        with f.if_(f.call("PyList_Size", self.get(f, context, C, "batch")).eq(0)):
            posted.set(f.call("posted", handle, prepared, args))
        number = posted.v
        with f.if_(number.ne(0)) as branch:
            plain = self._plain(f, number)
            with f.if_(self.number(f, context, C, "first").eq(0)):
                self.put(f, context, C, "first", plain)
            self.put(f, context, C, "_tail", plain)
            self.put(f, context, C, "_tail_name", name)
            self.put(f, lease.v, Lease, "sequence", plain)
            f.call("PyDict_SetItem", self.get(f, context, C, "makers"), plain, maker)
            f.call("Py_DecRef", plain)
        with branch.otherwise():  # as while it is being enqueued
            zero = f.call("PyLong_FromLongLong", 0)
            self.put(f, lease.v, Lease, "sequence", zero)
            f.call("Py_DecRef", zero)
        self.put(f, lease.v, Lease, "name", name)
        self.put(f, lease.v, Lease, "site", site)
        self._drop(f, olds)
        with f.if_(number.eq(0)):
            f.ret(_LEASED)
        self._end(f, number)

    @staticmethod
    def _drop(f: Function, olds: Var) -> None:
        """Let go of what entries replaced; last, since it may run finalisers."""
        with f.if_(olds.v.to("i64").ne(0)):
            f.call("Py_DecRef", olds.v)

    def again(self) -> None:
        """As `LeaseTable.again`: whether a lease goes on as that of the next operation."""
        f = self.m.define("again", "i1", "ptr lease, ptr uses")
        lease = f["lease"]
        self.unless(f, self.is_a(f, lease, Lease))
        self.unless(f, self.number(f, lease, Lease, "left").eq(self.number(f, lease, Lease, "size")))
        own = self.get(f, lease, Lease, "uses")
        self.unless(f, self.is_a(f, own, tuple))
        n = f.call("PyTuple_Size", f["uses"])
        self.unless(f, f.call("PyTuple_Size", own).eq(n))
        with f.range(n) as k:
            use = f.call("PyTuple_GetItem", f["uses"], k)
            self.unless(f, use.to("i64").eq(f.call("PyTuple_GetItem", own, k).to("i64")))
            self.unless(f, self.is_a(f, use, Use))
            storage = self.get(f, use, Use, "storage")
            self.unless(f, self.is_a(f, storage, Storage))
            self.unless(f, f.call("PyDict_Size", self.get(f, storage, Storage, "claims")).eq(1))
            self._may_use(f, use, storage)
        f.ret(1)

    def post_one(self) -> None:
        """An operation that is its own submission: see `Links`."""
        f = self.m.define("post", "i64", "ptr launched, ptr op")
        self.unless(f, self.is_a(f, f["launched"], Launched))
        ready = self._own_ready(f)
        code = f.call("post_ready", f["launched"], f["op"], ready)
        f.call("Py_DecRef", ready)
        f.ret(code)

    def post_ready(self) -> None:
        """The same with what is ready of it."""
        f = self.m.define("post_ready", "i64", "ptr launched, ptr op, ptr ready")
        launched, op = f["launched"], f["op"]
        prepared, args, _, uses = self._ready(f, op, f["ready"])
        stream = self.get(f, launched, Launched, "stream")
        self.unless(f, self.is_a(f, stream, Stream))
        storage = self.get(f, f.call("PyTuple_GetItem", uses, 0), Use, "storage")
        device = self.get(f, storage, Storage, "device")
        self.unless(f, device.to("i64").eq(self.get(f, stream, Stream, "device").to("i64")))
        handle = self.get(f, stream, Stream, "handle")
        left, size = self.word(Launched, "left"), self.word(Launched, "size")
        olds = f.var("ptr", f.call("claim", stream, uses, launched, left, size, handle, prepared))
        self.unless(f, olds.v.to("i64").ne(0))
        number = f.call("posted", handle, prepared, args)
        with f.if_(number.eq(0)):
            self._drop(f, olds)
            f.ret(_LEASED)
        plain = self._plain(f, number)
        self.put(f, launched, Launched, "sequence", plain)
        f.call("Py_DecRef", plain)
        self._drop(f, olds)
        self._end(f, number)

    def current(self) -> None:
        """As `Snapshot.is_current`: whether what a kernel sees of the outside is what it was compiled with."""
        f = self.m.define("current", "i1", "ptr spec")
        with f.if_(self.same(f, self.get(f, f["spec"], self.specialization, "may_change"), False)):
            f.ret(1)
        captures = self.get(f, f["spec"], self.specialization, "captures")
        names, cells, helpers = (f.call("PyTuple_GetItem", captures, k) for k in range(3))
        self.unless(f, f.call("PyTuple_Size", cells).eq(0))
        with f.range(f.call("PyTuple_Size", names)) as k:
            name = f.call("PyTuple_GetItem", names, k)
            namespace, key, value = (f.call("PyTuple_GetItem", name, j) for j in range(3))
            self.unless(f, f.call("PyDict_GetItem", namespace, key).to("i64").eq(value.to("i64")))
        with f.range(f.call("PyTuple_Size", helpers)) as k:
            helper = f.call("PyTuple_GetItem", helpers, k)
            function, code = (f.call("PyTuple_GetItem", helper, j) for j in range(2))
            self.unless(f, f.call("PyFunction_GetCode", function).to("i64").eq(code.to("i64")))
        f.ret(1)

    def resubmit(self) -> None:
        """A kept launch once more: see `Links`. What may start a collection comes before the last look."""
        f = self.m.define("resubmit", "ptr", "ptr kept, ptr stream, ptr site, ptr result")
        kept, stream = f["kept"], f["stream"]
        self.unless(f, self.is_a(f, kept, self.kept))
        self.unless(f, self.is_a(f, stream, Stream))
        launch = self.get(f, kept, self.kept, "launch")
        self.unless(f, self.is_a(f, launch, self.launch))
        launched = f.call("PyType_GenericAlloc", self.constant(f, Launched), 0)
        self.unless(f, launched.to("i64").ne(0))
        future = f.call("PyType_GenericAlloc", self.constant(f, DeviceFuture), 0)
        number, known = f.var("i64", 0), f.var("ptr", 0)
        with f.if_(future.to("i64").ne(0)):
            standing = self.get(f, kept, self.kept, "_standing")
            with f.if_(f.call("stands", standing, stream)):
                known.set(f.call("ready", launch))
                with f.if_(known.v.to("i64").ne(0)):
                    handle = self.get(f, stream, Stream, "handle")
                    prepared, args = (f.call("PyTuple_GetItem", known, k) for k in (1, 2))
                    with f.if_(f.call("open", handle, prepared)):
                        number.set(f.call("posted", handle, prepared, args))
        with f.if_(number.v.eq(0)):
            f.call("Py_DecRef", launched)
            f.call("Py_DecRef", future)
            f.ret(0)
        prepared, maker = (f.call("PyTuple_GetItem", known, k) for k in (1, 3))
        standing = self.get(f, kept, self.kept, "_standing")
        lease = self.get(f, standing, Standing, "lease")
        plain, zero = self._plain(f, number.v), f.call("PyLong_FromLongLong", 0)
        none, no = self.constant(f, None), self.constant(f, False)
        for slot, value in (
            ("name", self.get(f, prepared, CudaLaunch, "name")), ("stream", stream), ("site", f["site"]),
            ("uses", self.get(f, standing, Standing, "_uses")), ("maker", maker), ("sequence", plain), ("left", zero),
            ("size", zero), ("kept", standing), ("is_finished", no), ("error", none),
        ):  # fmt: skip
            self.fill(f, launched, Launched, slot, value)
        self.put(f, lease, Resting, "sequence", plain)
        self.put(f, lease, Resting, "site", f["site"])
        # The stream owns it from here on, as `Stream.admit` has it.
        given = f.buffer(1)
        f.store(given, 0, launched, "ptr")
        appended = f.call("PyObject_Vectorcall", self.get(f, stream, Stream, "_append"), given, 1, f.value(0, "ptr"))
        f.call("Py_DecRef", appended)
        f.call("PySet_Add", self.constant(f, live_streams), stream)
        for slot, value in (
            ("_op", none), ("_policy", none), ("_error", none), ("_stream", stream), ("_context", launched),
            ("_result", f["result"]),
        ):  # fmt: skip
            self.fill(f, future, DeviceFuture, slot, value)
        for owned in (launched, plain, zero):
            f.call("Py_DecRef", owned)
        with f.if_(self._goes_on(number.v)) as branch:
            pass
        with branch.otherwise():
            handle = self.get(f, stream, Stream, "handle")
            method = f.call("PyObject_GetAttr", handle, self.constant(f, sys.intern("linked")))
            looked = f.call("PyObject_Vectorcall", method, given, 0, f.value(0, "ptr"))
            f.call("Py_DecRef", method)
            with f.if_(looked.to("i64").eq(0)):
                f.call("Py_DecRef", future)
                f.ret(0)
            f.call("Py_DecRef", looked)
        f.ret(future)

    def ready(self) -> None:
        """What is ready of a kept launch, borrowed, if it is current; null if not."""
        f = self.m.define("ready", "ptr", "ptr launch")
        ready = self.get(f, f["launch"], self.launch, "_ready")
        with f.if_(self.same(f, ready, None)):
            f.ret(0)
        self.unless(f, f.call("current", f.call("PyTuple_GetItem", ready, 0)))
        f.ret(ready)

    def stands(self) -> None:
        """Whether a standing lease is held by nobody, and nothing has changed since it was entered last: as
        `Standing.enter` finds at its first look. And whether the stream need not let go of what is over first."""
        f = self.m.define("stands", "i1", "ptr standing, ptr stream")
        standing, stream = f["standing"], f["stream"]
        self.unless(f, self.is_a(f, standing, Standing))
        lease = self.get(f, standing, Standing, "lease")
        self.unless(f, self.is_a(f, lease, Resting))
        self.unless(f, self.same(f, self.get(f, lease, Resting, "active"), False))
        mark = self.get(f, self.constant(f, changes), type(changes), "mark")
        self.unless(f, self.get(f, standing, Standing, "_mark").to("i64").eq(mark.to("i64")))
        count = f.call("PyTuple_Size", self.get(f, standing, Standing, "_uses"))
        self.unless(f, self.number(f, lease, Resting, "left").eq(count))
        self.unless(f, stream.to("i64").eq(self.get(f, lease, Resting, "stream").to("i64")))
        waiting = f.call("PyObject_Size", self.get(f, stream, Stream, "inflight"))
        self.unless(f, waiting < self.number(f, stream, Stream, "retire_at"))
        self.unless(f, self.same(f, self.get(f, stream, Stream, "recording"), None))
        f.ret(1)

    def push(self) -> None:
        """A launch alone: see `Links`."""
        f = self.m.define("push", "i64", "ptr handle, ptr prepared, ptr args")
        self.unless(f, f.call("open", f["handle"], f["prepared"]))
        f.ret(f.call("posted", f["handle"], f["prepared"], f["args"]))

    def doors(self) -> None:
        """The entries from Python."""
        for name, count in (("link", 3), ("post", 2), ("push", 3)):
            f = self.m.define(f"python_{name}", "ptr", "ptr self, ptr args, i64 count", exported=True)
            f.ret(f.call("PyLong_FromLongLong", f.call(name, *[f.load(f["args"], k, "ptr") for k in range(count)])))
        f = self.m.define("python_resubmit", "ptr", "ptr self, ptr args, i64 count", exported=True)
        made = f.call("resubmit", *[f.load(f["args"], k, "ptr") for k in range(4)])
        with f.if_(made.to("i64").eq(0)):
            with f.if_(f.call("PyErr_Occurred").to("i64").ne(0)):
                f.ret(0)
            none = self.constant(f, None)
            f.call("Py_IncRef", none)
            f.ret(none)
        f.ret(made)


_lock: Final = threading.Lock()
_made: Final[list[Links | None]] = []


def links(native: Native) -> Links | None:
    """The functions, compiled at the first call of a process; None where they cannot be."""
    with _lock:
        if not _made:
            _made.append(_compiled(native))
        return _made[0]


def _compiled(native: Native) -> Links | None:
    launch, kept, specialization = kinds.launch, kinds.kept, kinds.specialization
    if launch is None or kept is None or specialization is None or not is_locked_globally():
        return None
    try:
        w = _Writer(launch, kept, specialization, native.post)
        for write in (
            w.current,
            w.posted,
            w.open,
            w.look,
            w.claim,
            w.again,
            w.link_spent,
            w.link,
            w.post_ready,
            w.post_one,
            w.push,
            w.stands,
            w.ready,
            w.resubmit,
            w.doors,
        ):
            write()
    except NotFoundError:
        return None
    symbols = w.compiled("cuda-links")
    for also in when_linked:
        also()
    return Links(*(builtin(name, symbols[f"python_{name}"]) for name in ("link", "post", "push", "resubmit")))
