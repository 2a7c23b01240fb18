"""Loads the native runtime once per process and gives its functions as ctypes callables."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any, Final

from peertile.backends.cpu import jit
from peertile.runtime.drivers.cpu_native import native_module
from peertile.runtime.drivers.cpu_native_python import builtin, symbol_of
from peertile.runtime.drivers.object_files import kept_object

__all__ = ["Native", "native"]

_P: Final = ctypes.c_void_p
_I: Final = ctypes.c_int64


class Native:
    """The exported functions of the native runtime.

    Those that may run programs or sleep let go of the interpreter lock; the others take well under a microsecond and
    keep it. What is called for every operation is called as a builtin (`cpu_native_python.py`), the rest through
    ctypes: the loops of threads, which end where they are when the process does.
    """

    def __init__(self, symbols: dict[str, int]) -> None:
        def free(name: str, result: Any, *params: Any) -> Callable[..., Any]:
            return ctypes.CFUNCTYPE(result, *params)(symbols[name])

        def held(name: str, result: Any, *params: Any) -> Callable[..., Any]:
            return ctypes.PYFUNCTYPE(result, *params)(symbols[name])

        def fast(name: str) -> Callable[..., int]:
            return builtin(name, symbols[symbol_of(name)])

        self.worker_loop = free("worker_loop", None, _P, _P)
        self.stop_workers = held("stop_workers", None, _P)
        self.stream_loop = free("stream_loop", _I, _P, _I)
        self.take_fault = held("take_fault", _I, _P)
        # (stream, slot, slice_ns): run what the slot holds here and now
        self.run_inline = fast("run_inline")
        # (stream, slot, header, args, arena, slice_ns)
        self.run_launch = fast("run_launch")
        # (stream, slot, table, nodes, arena, slice_ns)
        self.run_graph = fast("run_graph")
        # (stream, sequence, slice_ns, help)
        self.host_wait = fast("host_wait")
        # (stream, slot): the sequence number
        self.submit = fast("submit")
        # (stream, slot, header, args, arena): the sequence number
        self.submit_launch = fast("submit_launch")
        # (stream)
        self.wake_stream = fast("wake_stream")
        # (address): the word there; what was written before it is seen from here on
        self.acquired = fast("acquired")
        # (address, value): whoever acquires the value sees what was written before
        self.release = fast("release")


_lock: Final = threading.Lock()
_native: Native | None = None


def native() -> Native:
    """The native runtime; compiled or read from the disk at the first call."""
    global _native
    with _lock:
        if _native is None:
            module = native_module()
            payload = kept_object("cpu-runtime", module.text())
            _native = Native(jit.load_object(payload, module.exports))
        return _native
