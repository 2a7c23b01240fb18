"""Machine code kept by what it was made from, whoever made it: another process, another Python, another machine.

`direct.py` finds a kernel by the function that was written, which is quick and belongs to one installation. What is
kept here is found by the source that Triton gets, so a folder that was filled on a machine without a GPU serves those
that have one: nothing of Triton is loaded where all is found. It knows no kernel functions and makes no source.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from peertile.backends.cache import DiskCache, key_of
from peertile.backends.cuda.emit import Emitted
from peertile.backends.cuda.target import CudaOptions
from peertile.backends.cuda.triton_compile import Compiled, PassFailure, compile_source, triton_options
from peertile.config import config
from peertile.errors import InternalError

__all__ = ["compile_kept", "kept"]

_FOLDER: Final = "cubins"
_SETTINGS: Final = (
    "TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH", "PTXAS_OPTIONS", "DISABLE_PTXAS_OPT", "DISABLE_LLVM_OPT",
    "TRITON_DISABLE_LINE_INFO", "TRITON_MOCK_PTX_VERSION", "TRITON_LIBDEVICE_PATH", "TRITON_KERNEL_OVERRIDE",
)  # fmt: skip
"""What Triton reads that changes the machine code."""


ENDING_S: Final = 20.0
"""How long the end of the process waits for compilers, at most."""


class _Compilers:
    """Who compiles now. The end of a process destroys what Triton looks its settings up in, and a thread that compiles
    then (a rank that was given up, say) aborts the process: so the end waits for it, and no other begins."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Also of a process that was forked, in which no other thread runs."""
        self._changed = threading.Condition()
        self._running = 0
        self._ended = False

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        with self._changed:
            if self._ended:
                raise InternalError("cuda: the process is ending, and compiles nothing any more")
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def end(self) -> None:
        """Wait for those that run; refuse those that come."""
        with self._changed:
            self._ended = True
            self._changed.wait_for(lambda: not self._running, ENDING_S)


_compilers = _Compilers()
atexit.register(_compilers.end)
os.register_at_fork(after_in_child=_compilers.begin)


@functools.cache
def kept() -> DiskCache:
    """The cache of machine code: a folder of its own, which can be copied as it is."""
    return DiskCache(config().cache_dir / _FOLDER, config().cache_max_bytes)


def compile_kept(emitted: Emitted, arch: str, options: CudaOptions) -> Compiled:
    """As `compile_source`, from the cache if it is there, else made and kept. What comes from the cache has no stages
    but the source. That a pass breaks down is kept, too: it takes as long to find out as a binary."""
    key = _key(emitted, arch, options)
    made: list[Compiled | PassFailure] = []

    def make() -> bytes:
        try:
            with _compilers.one():
                compiled = compile_source(emitted, arch, options)
        except PassFailure as error:
            made.append(error)
            at = next((k for k, loc in enumerate(emitted.lines) if loc == error.loc), None)
            said = error.message.partition(" (emitted source: ")[0]  # which lies where it was compiled
            return json.dumps({"failed": said, "at": at}).encode() + b"\n"
        made.append(compiled)
        return _to_bytes(compiled)

    data = kept().get(key, make)
    result = made[0] if made else _from_bytes(data, emitted)
    if isinstance(result, PassFailure):
        raise result
    return result


def _to_bytes(compiled: Compiled) -> bytes:
    head = [
        compiled.entry, compiled.shared_bytes, compiled.scratch_bytes, compiled.scratch_align, compiled.num_warps,
    ]  # fmt: skip
    return json.dumps({"made": head}).encode() + b"\n" + compiled.cubin


def _from_bytes(data: bytes, emitted: Emitted) -> Compiled | PassFailure:
    line, cubin = data.split(b"\n", 1)
    head: dict[str, Any] = json.loads(line)
    if "failed" in head:
        return PassFailure(head["failed"], None if head["at"] is None else emitted.lines[head["at"]])
    entry, shared, scratch, align, warps = head["made"]
    return Compiled(entry, cubin, shared, scratch, align, warps, {"triton": emitted.source})


def _key(emitted: Emitted, arch: str, options: CudaOptions) -> str:
    parameters = "; ".join(f"{p.name}: {p.type} {p.divisibility}" for p in emitted.parameters)
    passed = sorted(triton_options(emitted, options).items())
    return key_of(("cubin", arch, emitted.source, emitted.entry, parameters, repr(passed), *_compiler()))


@functools.cache
def _compiler() -> tuple[str, ...]:
    """What turns source into machine code: our modules that do so, Triton, and what it is told beside."""
    # Their content and not their time: the same package may be installed anywhere.
    here = [Path(__file__).with_name(name) for name in ("triton_compile.py", "ahead.py")]
    own = hashlib.sha256(b"".join(path.read_bytes() for path in here if path.exists())).hexdigest()
    return own, _triton(), *(f"{name}={_setting(name)}" for name in _SETTINGS if name in os.environ)


def _triton() -> str:
    """Version of the installed Triton, without loading it. Its assembler comes with it."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return "none"
    origin = Path(spec.origin)
    found = re.search(r"^__version__ = ['\"]([^'\"]+)['\"]", origin.read_text(), re.MULTILINE)
    # A version number does not change with an edit, so a tree that is worked on counts by its place and time.
    installed = any(part in ("site-packages", "dist-packages") for part in origin.parts)
    if found is not None and installed:
        return found[1]
    stat = origin.stat()
    return f"{origin} {stat.st_size} {stat.st_mtime_ns}"


def _setting(name: str) -> str:
    """The value; of a file, which one."""
    value = os.environ[name]
    try:
        stat = os.stat(value)
    except OSError:
        return value
    return f"{value} {stat.st_size} {stat.st_mtime_ns}"
