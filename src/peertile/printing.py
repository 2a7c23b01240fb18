"""Turns what kernels printed into lines for a person. The format is the same on every target.

A record's payload is its operands one after another, each as its elements in row-major order, padded to
8 bytes; `Place.what` lists their types. One line per record: `[rank 1, program 5] prefix value …`.
"""

from __future__ import annotations

import sys
from math import prod

import numpy as np

from peertile.backends.binary import Place
from peertile.dtypes import dtype_named
from peertile.runtime.driver import PrintSink

__all__ = ["format_record", "sink_for"]


def format_record(place: Place, rank: int | None, program: int, payload: bytes) -> str:
    """The line of one record."""
    where = f"program {program}" if rank is None else f"rank {rank}, program {program}"
    parts = [place.message] if place.message else []
    at = 0
    for text in filter(None, place.what.split("; ")):
        name, _, extents = text.partition("[")
        dtype = dtype_named(name)
        shape = tuple(int(n) for n in extents.rstrip("]").split(",")) if extents else ()
        nbytes = prod(shape) * dtype.itemsize
        values = np.frombuffer(payload[at : at + nbytes], dtype.numpy).reshape(shape)
        if dtype.is_float and dtype.bits < 32:
            values = values.astype(np.float32)
        parts.append(np.array2string(values, separator=", ", threshold=64) if shape else str(values[()]))
        at += (nbytes + 7) // 8 * 8
    return f"[{where}] {' '.join(parts)}"


def sink_for(places: tuple[Place, ...], rank: int | None) -> PrintSink | None:
    """What a driver calls with the records of a launch; None for a kernel that prints nothing."""
    if not any(place.kind == "print" for place in places):
        return None

    def sink(program: int, place: int, payload: bytes) -> None:
        if sys.stdout is None:  # of a process without a console: `print` says nothing there either
            return
        # One write, so that lines of ranks in threads stay whole. What the terminal cannot show fails no operation.
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        line = format_record(places[place], rank, program, payload) + "\n"
        sys.stdout.write(line.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()

    return sink
