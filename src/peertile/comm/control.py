"""The control words of a job: one shared segment with a block for each group, and nothing else.

A block holds the abort word that every waiting kernel polls, who failed and why, the group's
generation, and the state of each rank. No file is ever named: the segment is an anonymous memory
file (processes) or plain memory (threads of one process), so nothing can stay behind.

Invariant: one writer. The coordinator (coordinator.py) writes every block. Only when it is gone do
the ranks that are left write, and then all of them the same bytes. So no compare-and-swap is needed,
which Python could not do on shared memory.

Segment: 64 bytes of header (magic, ranks, blocks, bytes of a block; i64), padding to a page, blocks.
Block, in bytes from its start::

    0   abort word, i32: 0, or 1 once the group has failed     4   rank that failed, i32 (-1: none)
    8   generation, i64: number of recoveries                  16  length of the cause, i64
    64  cause, utf-8, 960 bytes                                1024 + 64 r  rank r: pid, state, epoch (i64)
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from enum import IntEnum

from peertile.errors import AllocationError, InternalError, PeerFailed
from peertile.runtime.ordering import in_order
from peertile.runtime.unnamed import unnamed_file

__all__ = ["ControlBlock", "RankState", "Segment"]

MAGIC = 0x5045_4552_5449_4C01  # "PEERTIL", layout 1
BLOCKS = 1024  # groups alive at once; pages are only taken when touched
CAUSE_BYTES = 960
_HEADER = struct.Struct("4q")
_CAUSE_AT = 64
_RANKS_AT = 1024
_PAGE = 4096


class RankState(IntEnum):
    """Where a rank of a group stands; it only ever moves down this list."""

    ABSENT = 0
    ALIVE = 1
    LEFT = 2
    DEAD = 3


class Segment:
    """The memory of all control blocks of a job. It stays mapped as long as anyone holds it."""

    def __init__(self, memory: mmap.mmap, fd: int | None) -> None:
        magic, self.ranks, self.blocks, self.block_bytes = _HEADER.unpack_from(memory, 0)
        if magic != MAGIC:
            raise InternalError(f"control segment: expected magic {MAGIC:#x}, got {magic:#x}")
        self.memory = memory
        self.fd = fd
        # The export keeps the mapping in place: closing it under a running kernel raises instead of unmapping.
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))

    @classmethod
    def create(cls, ranks: int, *, shared: bool) -> Segment:
        """A zeroed segment for a job of `ranks`; `shared` gives it a descriptor to send to other processes."""
        block_bytes = -(-(_RANKS_AT + 64 * ranks) // _PAGE) * _PAGE
        total = _PAGE + BLOCKS * block_bytes
        fd: int | None = None
        if shared:
            fd = unnamed_file("peertile-control")
            os.ftruncate(fd, total)
            memory = mmap.mmap(fd, total)
        else:
            memory = mmap.mmap(-1, total)
        _HEADER.pack_into(memory, 0, MAGIC, ranks, BLOCKS, block_bytes)
        return cls(memory, fd)

    @classmethod
    def attach(cls, fd: int) -> Segment:
        """The segment behind a received descriptor, which is closed: the mapping is enough."""
        memory = mmap.mmap(fd, os.fstat(fd).st_size)
        os.close(fd)
        return cls(memory, None)

    def block(self, index: int) -> ControlBlock:
        if not 0 <= index < self.blocks:
            raise AllocationError(f"control segment: all {self.blocks} blocks are in use")
        return ControlBlock(self, index)

    def close_fd(self) -> None:
        """Ends the sending side once every rank has the segment; the mapping stays."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class ControlBlock:
    """The control words of one group. Reading takes no lock; the module says who writes."""

    def __init__(self, segment: Segment, index: int) -> None:
        self.segment = segment
        self.index = index
        self._at: int = segment.address + _PAGE + index * segment.block_bytes

    @property
    def abort_address(self) -> int:
        """Address of the abort word in this process, for kernels to poll."""
        return self._at

    @property
    def aborted(self) -> bool:
        return self._int(0).value != 0

    @property
    def generation(self) -> int:
        return int(self._long(8).value)

    def failure(self) -> PeerFailed | None:
        """Who failed and why; None while all is well."""
        if not self.aborted:
            return None
        in_order()  # the cause is not looked at before the abort word
        text = ctypes.string_at(self._at + _CAUSE_AT, self._long(16).value)
        return PeerFailed(self._int(4).value, text.decode("utf-8", "replace"))

    def reset(self, generation: int) -> None:
        """A block without a failure, at `generation`. Expects that nobody waits in the generation before."""
        self._int(4).value = -1
        self._long(16).value = 0
        self._long(8).value = generation
        self._int(0).value = 0

    def fail(self, rank: int, cause: str) -> None:
        """Publishes a failure: the cause first, then the abort word. The first failure wins."""
        if self.aborted:
            return
        text = cause.encode("utf-8", "replace")[:CAUSE_BYTES].decode("utf-8", "ignore").encode()
        ctypes.memmove(self._at + _CAUSE_AT, text, len(text))
        self._long(16).value = len(text)
        self._int(4).value = rank
        in_order()  # who sees the abort word sees the cause
        self._int(0).value = 1

    def rank(self, index: int) -> tuple[int, RankState, int]:
        """(pid, state, epoch) of a rank; its epoch is the number of collective calls it has arrived at."""
        at = _RANKS_AT + 64 * index
        return self._long(at).value, RankState(self._long(at + 8).value), self._long(at + 16).value

    def set_rank(self, index: int, pid: int, state: RankState, epoch: int) -> None:
        at = _RANKS_AT + 64 * index
        self._long(at).value, self._long(at + 8).value, self._long(at + 16).value = pid, state, epoch

    # One aligned store or load each: ctypes copies a word by its size, where a slice copies bytes.
    def _int(self, offset: int) -> ctypes.c_int32:
        return ctypes.c_int32.from_address(self._at + offset)

    def _long(self, offset: int) -> ctypes.c_int64:
        return ctypes.c_int64.from_address(self._at + offset)
