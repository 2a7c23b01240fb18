"""Launches that native code makes: a kernel over a grid made ready, and what the host knows of those under way.

Each launch has a slot: a fault record in pinned memory, and launch words on the device. Calls no driver.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Final

from peertile.runtime.driver import FaultKind, FaultRecord, Grid, LaunchOptions, PreparedLaunch
from peertile.runtime.drivers.cuda_memory import words_at
from peertile.runtime.drivers.cuda_native import Plan

if TYPE_CHECKING:
    from peertile.runtime.drivers.cuda import CudaDevice

__all__ = ["BLOCK_SLOTS", "FAULT_WORDS", "LAUNCH_BYTES", "MAX_PROGRAMS", "Block", "CudaLaunch", "Launches", "Slot"]

BLOCK_SLOTS: Final = 1024
FAULT_WORDS: Final = 16
LAUNCH_BYTES: Final = 64
MAX_PROGRAMS: Final = (1 << 31) - 1


class Block:
    """Fault records (pinned) and launch words (of the device) for so many launches, each used by one at a time."""

    __slots__ = ("address", "faults", "live", "used", "words")

    def __init__(self, device: CudaDevice, slots: int = BLOCK_SLOTS) -> None:
        nbytes = slots * FAULT_WORDS * 8
        self.address = device.pinned.take(nbytes)
        ctypes.memset(self.address, 0, nbytes)
        self.faults = words_at(self.address, nbytes)
        self.words = device.heap.take(slots * LAUNCH_BYTES)
        self.used = 0
        self.live = 0


class Slot:
    """One launch's fault record and launch words."""

    __slots__ = ("at", "block")

    def __init__(self, block: Block, index: int) -> None:
        self.block = block
        self.at = index * FAULT_WORDS

    @property
    def fault_address(self) -> int:
        return self.block.address + 8 * self.at

    @property
    def words_address(self) -> int:
        return self.block.words + self.at // FAULT_WORDS * LAUNCH_BYTES

    def failed(self) -> bool:
        return self.block.faults[self.at] != 0

    def collect(self, op: str, sequence: int) -> FaultRecord | None:
        """The fault recorded here, which is cleared."""
        faults, at = self.block.faults, self.at
        if not faults[at]:
            return None
        kind, program, place, got, limit, address, slot = faults[at + 1 : at + 8]
        faults[at] = 0
        return FaultRecord(FaultKind(kind), op, sequence, program, place, got, limit, address, slot)


class CudaLaunch(PreparedLaunch):
    """A kernel over a grid with its options, and the words of its plan. `plain`: native code may launch it."""

    __slots__ = ("address", "n_bytes", "name", "plain", "words")

    def __init__(
        self, module: Any, grid: Grid, options: LaunchOptions, abort: int, timeout_ns: int, resident: int, *,
        blocking: bool = False,
    ) -> None:  # fmt: skip
        """`resident`: most programs that can be resident at once. `blocking`: a launch returns when it has ended."""
        super().__init__(module, grid, options)
        self.name = options.name
        self.n_bytes: int = module.n_bytes
        n0, n1, n2 = grid
        programs = n0 * n1 * n2
        waits = module.waits
        most = resident if waits or options.cooperative else MAX_PROGRAMS
        self.plain = (
            options.on_print is None and n0 > 0 and n1 > 0 and 0 < programs <= most and not (blocking and waits)
        )
        checks = [word for pair in module.layout.bounds() for word in pair]
        self.words = words = (ctypes.c_int64 * (Plan.CHECKS + len(checks)))()
        values = {
            Plan.FUNCTION: int(module.function), Plan.N_BYTES: module.n_bytes, Plan.THREADS: module.threads,
            Plan.SHARED: module.shared, Plan.WAITS: int(waits), Plan.PROGRAMS: programs, Plan.GRID0: n0,
            Plan.GRID1: n1, Plan.GRID2: n2, Plan.ABORT: abort, Plan.TIMEOUT: timeout_ns,
            # One program is resident as soon as it runs.
            Plan.COOPERATIVE: int((waits or options.cooperative) and programs > 1),
            Plan.OVERLAP: int(module.overlap and not waits), Plan.TELLS: int(module.tells),
            Plan.N_CHECKS: len(checks) // 2, Plan.SCRATCH_BYTES: module.scratch * programs,
        }  # fmt: skip
        for index, value in values.items():
            words[index] = value
        words[Plan.CHECKS :] = checks
        self.address = ctypes.addressof(words)


class Launches:
    """Launches one behind the other that have slots one behind the other: `first` to `last`, from slot `at` on. The
    block is in use as long as this is kept (`close` says that it is not any more)."""

    __slots__ = ("at", "block", "first", "ops")

    def __init__(self, first: int, block: Block, at: int) -> None:
        self.first = first
        self.block = block
        self.at = at
        self.ops: list[CudaLaunch] = []
        block.live += 1

    @property
    def last(self) -> int:
        return self.first + len(self.ops) - 1

    def close(self) -> None:
        self.block.live -= 1

    def take(self, through: int) -> list[tuple[int, FaultRecord]]:
        """Those up to `through` have run: forget them; their faults."""
        n = min(through, self.last) - self.first + 1
        if n <= 0:
            return []
        first, at, block = self.first, self.at, self.block
        failed = []
        if any(block.faults[at * FAULT_WORDS : (at + n) * FAULT_WORDS : FAULT_WORDS]):
            for k in range(n):
                record = Slot(block, at + k).collect(self.ops[k].name, first + k)
                if record is not None:
                    failed.append((first + k, record))
        del self.ops[:n]
        self.at = at + n
        self.first = first + n
        return failed
