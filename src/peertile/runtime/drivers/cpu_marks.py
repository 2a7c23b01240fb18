"""The function by which kernels on cpu write a mark, and buffers for marks. Native code of its own: nothing of it is
loaded before the first timeline, and the runtime that launches kernels is the same with and without.
"""

from __future__ import annotations

import functools
import sys
from typing import Final

from peertile.backends.cpu import jit
from peertile.backends.marks import HEAD_WORDS, RECORD_WORDS, MarkHead, MarkRecord
from peertile.runtime.drivers.cpu_emit import Module
from peertile.runtime.drivers.object_files import kept_object

__all__ = ["mark_function"]

_NAME: Final = "peertile_mark"


def _module() -> Module:
    m = Module()
    m.declare("clock_gettime", "i32", "i32", "ptr")
    if sys.platform == "linux":
        m.declare("sched_getcpu", "i32")
    f = m.define(_NAME, "void", "ptr b, i64 tag, i64 number, i64 program, i64 address, i64 value", exported=True)
    b = f["b"]
    with f.if_(f.load(b, MarkHead.OPEN, order="monotonic").eq(0)):
        f.ret()
    time = f.buffer(2)
    f.call("clock_gettime", 1 if sys.platform == "linux" else 8, time)
    count = f.rmw("add", b, MarkHead.COUNT, 1)
    at = f.at(b, (count & f.load(b, MarkHead.MASK)) * RECORD_WORDS + HEAD_WORDS)
    # Who reads must not take the old number for that of the new record while this one is half written: a fence, as a
    # store that releases would let what follows be seen before it.
    f.store(at, MarkRecord.NUMBER, 0, order="monotonic")
    f.line("fence release")
    f.store(at, MarkRecord.TIME, f.load(time) * 1_000_000_000 + f.load(time, 1), order="monotonic")
    for word, name in (
        (MarkRecord.TAG, "tag"), (MarkRecord.LAUNCH, "number"), (MarkRecord.PROGRAM, "program"),
        (MarkRecord.ADDRESS, "address"), (MarkRecord.VALUE, "value"),
    ):  # fmt: skip
        f.store(at, word, f[name], order="monotonic")
    if sys.platform == "linux":
        f.store(at, MarkRecord.WHERE, f.call("sched_getcpu").to("i64"), order="monotonic")
    f.store(at, MarkRecord.NUMBER, count + 1, order="release")
    f.ret()
    return m


@functools.cache
def mark_function() -> int:
    """Its address; compiled, or read from the disk, at the first call."""
    module = _module()
    return jit.load_object(kept_object("cpu-marks", module.text()), module.exports)[_NAME]
