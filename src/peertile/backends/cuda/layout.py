"""How a launch passes its arguments to a cubin: one buffer of 8-byte words. Calls no driver.

    word 0 … n_slots-1     the argument block, as every backend gets it (`Type.slots`)
    then                   grid0, grid1, grid2, abort word, fault record, timeout in ns, launch words, print buffer
    then                   global scratch, profile scratch (Triton's own last two parameters)

Every parameter of the kernel is one word wide and aligned to its width, so the buffer is the parameter block: it can
be given to cuLaunchKernel as CU_LAUNCH_PARAM_BUFFER_POINTER, or word by word as kernelParams. The launch is
(programs, 1, 1) blocks of (32 · num_warps, 1, 1) threads; the grid's shape travels in the words.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["HIDDEN_WORDS", "LaunchContext", "LaunchLayout"]

HIDDEN_WORDS: Final = 10
_HIDDEN: Final = struct.Struct("<10Q")
_MAX_EXTENT: Final = (1 << 31) - 1
_MAX_STRIDE: Final = 1 << 36


@dataclass(frozen=True, slots=True)
class LaunchContext:
    """What a launch passes beside the argument block. Addresses are of the device; `abort`, `fault` and `launch` are
    never 0: an i32, a record of 128 bytes, and u64[8] that are zero when the launch starts."""

    grid: tuple[int, int, int]
    abort: int
    fault: int
    timeout_ns: int
    launch: int
    print: int = 0
    scratch: int = 0

    @property
    def programs(self) -> int:
        """Blocks to launch."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    def words(self) -> bytes:
        """The words after the argument block."""
        return _HIDDEN.pack(
            *self.grid, self.abort, self.fault, self.timeout_ns, self.launch, self.print, self.scratch, 0
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LaunchLayout:
    """Parameters of one kernel.

    `extents` and `strides` are slots that bulk copies (TMA) read as 32-bit extents and 40-bit strides: where
    `fits` is false, compile with `CudaOptions(descriptors=False)` and launch that. `scratch_per_program` bytes of
    global scratch are needed for each program, at multiples of `scratch_align`.
    """

    n_slots: int
    extents: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    scratch_per_program: int = 0
    scratch_align: int = 1

    @property
    def n_words(self) -> int:
        return self.n_slots + HIDDEN_WORDS

    def pack(self, args: bytes, context: LaunchContext) -> bytes:
        """The parameter buffer of a launch with this argument block."""
        if len(args) != 8 * self.n_slots:
            raise ValueError(f"args: expected {8 * self.n_slots} bytes for {self.n_slots} slots, got {len(args)}")
        return args + context.words()

    def fits(self, args: bytes) -> bool:
        """Whether the extents and strides of this argument block are ones that bulk copies can take."""
        if not self.extents:
            return True
        words = struct.unpack(f"<{len(args) // 8}q", args)  # marks have slots behind those, which the driver gives
        # What is empty is not copied.
        return all(0 <= words[k] <= _MAX_EXTENT for k in self.extents) and all(
            1 <= words[k] <= _MAX_STRIDE for k in self.strides
        )

    def bounds(self) -> tuple[tuple[int, int], ...]:
        """(slot, most) of each word that `fits` takes for certain from 1 to `most`: an extent may also be 0."""
        return (*((k, _MAX_EXTENT) for k in self.extents), *((k, _MAX_STRIDE) for k in self.strides))

    def scratch_bytes(self, programs: int) -> int:
        """Bytes of global scratch that a launch of so many programs needs."""
        return self.scratch_per_program * programs

    def to_json(self) -> dict[str, Any]:
        return {
            "n_slots": self.n_slots, "extents": list(self.extents), "strides": list(self.strides),
            "scratch_per_program": self.scratch_per_program, "scratch_align": self.scratch_align,
        }  # fmt: skip

    @staticmethod
    def from_json(data: dict[str, Any]) -> LaunchLayout:
        return LaunchLayout(
            data["n_slots"], tuple(data["extents"]), tuple(data["strides"]), data["scratch_per_program"],
            data["scratch_align"],
        )  # fmt: skip
