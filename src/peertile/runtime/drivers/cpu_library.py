"""Loads the native runtime once per process and gives its functions as ctypes callables.

The object code is kept on disk under the hash of its text, so that only the first process of a machine compiles.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from peertile.backends.cpu import jit
from peertile.config import config, warn_of_cache
from peertile.runtime.drivers.cpu_native import native_module
from peertile.runtime.drivers.cpu_native_python import builtin, symbol_of

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Native", "native"]

_P: Final = ctypes.c_void_p
_I: Final = ctypes.c_int64
_DIGEST: Final = 32  # bytes of sha256


def _sha256(data: bytes) -> Any:
    import hashlib  # takes 2 ms, which `import peertile` does not pay

    return hashlib.sha256(data)


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


_lock: Final = threading.Lock()
_native: Native | None = None


def native() -> Native:
    """The native runtime; compiled or read from the disk at the first call."""
    global _native
    with _lock:
        if _native is None:
            module = native_module()
            text = module.text()
            path = _path(text)
            payload = _read(path)
            if payload is None:
                payload = jit.compile_text(text, level=2)
                _write(path, payload)
            _native = Native(jit.load_object(payload, module.exports))
        return _native


def _path(text: str) -> Path | None:
    if config().cache_max_bytes == 0:
        return None
    key = "\n".join([jit.llvmlite_version(), jit.host_cpu(), jit.host_features(), text])
    return config().cache_dir / f"cpu-runtime-{_sha256(key.encode()).hexdigest()[:24]}.o"


def _read(path: Path | None) -> bytes | None:
    """The object in the file, if it is whole: it begins with the digest of the rest."""
    if path is None:
        return None
    try:
        data = path.read_bytes()
    except OSError:
        return None
    payload = data[_DIGEST:]
    return payload if _sha256(payload).digest() == data[:_DIGEST] else None


def _write(path: Path | None, payload: bytes) -> None:
    """Put the object in place in one step, as other processes may do the same. A full disk is no error."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        import tempfile  # slow to import, and only a cold start writes

        fd, temporary = tempfile.mkstemp(dir=path.parent)
    except OSError as error:
        warn_of_cache(path.parent, error.strerror)
        return
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(_sha256(payload).digest() + payload)
        os.replace(temporary, path)
    except OSError:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
