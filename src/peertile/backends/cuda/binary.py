"""A compiled kernel for a GPU: the cubin, and everything that a launch of it needs to know. No compiling here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from peertile.backends.binary import Binary
from peertile.backends.cuda.layout import LaunchLayout

__all__ = ["CudaBinary"]


@dataclass(frozen=True, slots=True)
class CudaBinary(Binary):
    """`payload` is a cubin whose entry point is `entry`; programs are blocks of `num_warps` · 32 threads.

    `shared_bytes` is the dynamic shared memory to ask for; above 48 KiB the driver must be told before the first
    launch. `layout` makes the kernel's parameters out of an argument block. `overlap`: the kernel itself waits for what
    is in front of it in its stream, so that it may be started before that has ended. `tells`: it stores 1 in the word
    behind its fault record's eight when it begins.
    """

    num_warps: int = 4
    shared_bytes: int = 0
    layout: LaunchLayout = LaunchLayout(0)  # noqa: RUF009 - frozen and never changed
    overlap: bool = False
    tells: bool = False

    @property
    def threads(self) -> int:
        """Threads of a program."""
        return 32 * self.num_warps

    def fits(self, args: bytes) -> bool:
        """Whether the bulk copies (TMA) of the kernel can take the extents and strides of these arguments."""
        return self.layout.fits(args)

    def to_bytes(self) -> bytes:
        """As `Binary.to_bytes`, with one more line for what only a GPU needs."""
        extra = {
            "num_warps": self.num_warps,
            "shared_bytes": self.shared_bytes,
            "layout": self.layout.to_json(),
            "overlap": self.overlap,
            "tells": self.tells,
        }
        return json.dumps(extra, separators=(",", ":")).encode() + b"\n" + Binary.to_bytes(self)

    @staticmethod
    def from_bytes(data: bytes) -> CudaBinary:
        """The inverse of `to_bytes`; ValueError or KeyError if it is not one."""
        line, rest = data.split(b"\n", 1)
        extra: dict[str, Any] = json.loads(line)
        base = Binary.from_bytes(rest)
        return CudaBinary(
            base.target, base.entry, base.payload, base.scratch_bytes, base.waits, base.places, base.n_slots, {},
            extra["num_warps"], extra["shared_bytes"], LaunchLayout.from_json(extra["layout"]),
            extra["overlap"], extra["tells"],
        )  # fmt: skip
