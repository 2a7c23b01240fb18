"""Memory of the cpu driver: device memory from anonymous maps, and segments that other processes can map.

Nothing here is ever given back by garbage collection: native threads may still be inside it when the interpreter
goes away. A segment has no name in any file system, so a process that dies leaves nothing behind.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
import threading
from bisect import bisect_left, insort
from collections import deque
from typing import Final

from peertile.errors import AllocationError, ArgumentError, UsageError
from peertile.runtime.driver import MemoryStats, SegmentHandle, ShareHandle, ShareKind
from peertile.runtime.unnamed import unnamed_file

__all__ = [
    "PAGE",
    "Heap",
    "Segment",
    "Segments",
    "available_bytes",
    "extend",
    "map_anonymous",
    "physical_bytes",
    "place",
    "protect",
    "unmap",
]

ALIGN: Final = 64
PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_HUGE: Final = 2 << 20
_ARENA: Final = 64 << 20
_KEEP: Final = 1 << 30  # whole free arenas are kept up to this much, so that big tensors are not faulted in anew
POISON: Final = 0xDB

_LINUX: Final = sys.platform == "linux"
_NO_ACCESS, _READ_WRITE = 0, 3
_SHARED, _PRIVATE = 1, 2
_ANONYMOUS: Final = 0x20 if _LINUX else 0x1000
_NORESERVE: Final = 0x4000 if _LINUX else 0x40
_POPULATE: Final = 0x8000 if _LINUX else 0
_FIXED: Final = 0x10
_MADV_HUGEPAGE: Final = 14

_libc: Final = ctypes.CDLL(None, use_errno=True)
_mmap: Final = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_munmap: Final = _libc.munmap
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_mprotect: Final = _libc.mprotect
_mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_madvise: Final = _libc.madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def physical_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * PAGE


def available_bytes() -> int:
    """What can be had without swapping; the machine's memory where the system does not say."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except OSError:
        pass
    return physical_bytes()


def _round(n: int, to: int) -> int:
    return (n + to - 1) // to * to


def map_anonymous(nbytes: int) -> int:
    """Address of zeroed memory, committed as it is touched; 0 when there is none."""
    address = _mapped(None, nbytes, _READ_WRITE, _PRIVATE | _ANONYMOUS | _NORESERVE)
    if address and _LINUX and nbytes >= _HUGE:
        _madvise(address, nbytes, _MADV_HUGEPAGE)  # a hint: first touch is 9 times faster with huge pages
    return address


def _mapped(at: int | None, nbytes: int, rights: int, flags: int, fd: int = -1) -> int:
    """Address of a mapping; 0 where the system refuses, and errno says why."""
    address = _mmap(at, nbytes, rights, flags, fd, 0)
    return 0 if address is None or address == ctypes.c_void_p(-1).value else int(address)


def _error() -> OSError:
    """What the system refused last."""
    return OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def unmap(address: int, nbytes: int) -> None:
    _munmap(address, nbytes)


def place(nbytes: int, *, at: int | None = None, fd: int = -1) -> int:
    """Address of a mapping that nobody may access yet, at `at` if given, in place of what is there: of the file `fd`,
    or of nothing, which only keeps the addresses. OSError."""
    flags = _PRIVATE | _ANONYMOUS | _NORESERVE if fd < 0 else _SHARED
    address = _mapped(at, nbytes, _NO_ACCESS, flags | (0 if at is None else _FIXED), fd)
    if not address:
        raise _error()
    return address


def protect(address: int, nbytes: int, *, is_allowed: bool) -> None:
    """Give or take the right to load and store. OSError."""
    if _mprotect(address, nbytes, _READ_WRITE if is_allowed else _NO_ACCESS):
        raise _error()


class Heap:
    """Best-fit allocator over anonymous arenas.

    Invariants: free blocks never touch within one arena; a block never spans two arenas.
    """

    def __init__(self, limit: int, *, poison: bool, device: str) -> None:
        self.limit = limit
        self.poison = poison
        self.device = device
        self._lock = threading.Lock()  # protects all below but `_used` and `_freed`; nothing is taken under it
        self._freed: deque[tuple[int, int]] = deque()  # given back, not yet in the free list
        self._arenas: dict[int, int] = {}  # start -> size
        self._used: dict[int, int] = {}  # start -> size
        self._free: list[tuple[int, int]] = []  # (size, start), sorted
        self._starts: dict[int, int] = {}  # free start -> size
        self._ends: dict[int, int] = {}  # free end -> start
        self._in_use = self._peak = self._reserved = 0

    def allocate(self, nbytes: int) -> int:
        if nbytes < 0:
            raise ArgumentError(f"nbytes: expected an integer >= 0, got {nbytes}")
        size = max(_round(nbytes, ALIGN), ALIGN)
        with self._lock:
            self._settle()
            if self._in_use + size > self.limit:
                raise self.no_memory(nbytes)
            at = bisect_left(self._free, (size, 0))
            if at == len(self._free):
                self._grow(size, nbytes)
                at = bisect_left(self._free, (size, 0))
            have, start = self._free[at]
            self._drop(start, have)
            if have > size:
                self._put(start + size, have - size)
            self._used[start] = size
            self._in_use += size
            self._peak = max(self._peak, self._in_use)
        if self.poison:
            ctypes.memset(start, POISON, size)
        return start

    def free(self, address: int) -> None:
        """Never blocks: garbage collection may call it while this very thread holds the lock. Then the holder,
        or the next one, does the rest."""
        size = self._used.pop(address, None)
        if size is None:
            raise UsageError(f"free: expected an address that allocate gave and that is not free, got {address:#x}")
        if self.poison:
            ctypes.memset(address, POISON, size)
        self._freed.append((address, size))
        if self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()

    def _settle(self) -> None:
        while self._freed:
            address, size = self._freed.popleft()
            self._in_use -= size
            start, end = address, address + size
            if start in self._ends and start not in self._arenas:
                start = self._ends[start]
                self._drop(start, address - start)
            if end in self._starts and end not in self._arenas:
                more = self._starts[end]
                self._drop(end, more)
                end += more
            if self._arenas.get(start) == end - start and self._reserved - self._in_use > _KEEP:
                del self._arenas[start]
                self._reserved -= end - start
                unmap(start, end - start)
            else:
                self._put(start, end - start)

    def stats(self) -> MemoryStats:
        with self._lock:
            self._settle()
            return MemoryStats(self._in_use, self._peak, self._reserved, self.limit, len(self._used))

    def release(self) -> None:
        """Give back everything, in use or not."""
        with self._lock:
            for start, size in self._arenas.items():
                unmap(start, size)
            self._arenas, self._used, self._free, self._starts, self._ends = {}, {}, [], {}, {}
            self._in_use = self._reserved = 0

    def _grow(self, size: int, asked: int) -> None:
        arena = _round(size, _HUGE) if size > _ARENA // 2 else _ARENA
        start = map_anonymous(arena) or (map_anonymous(arena := _round(size, PAGE)))
        if not start:
            raise self.no_memory(asked)
        self._arenas[start] = arena
        self._reserved += arena
        self._put(start, arena)

    def _put(self, start: int, size: int) -> None:
        insort(self._free, (size, start))
        self._starts[start] = size
        self._ends[start + size] = start

    def _drop(self, start: int, size: int) -> None:
        del self._free[bisect_left(self._free, (size, start))]
        del self._starts[start]
        del self._ends[start + size]

    def no_memory(self, asked: int) -> AllocationError:
        return AllocationError(
            f"memory of {self.device}: asked for {asked} bytes, {self._in_use} of {self.limit} are in use, "
            f"{self.limit - self._in_use} are free; free some tensors or use smaller ones"
        )


class Segment(SegmentHandle):
    """A shared segment: one descriptor, mapped at most once in this process."""

    __slots__ = ("address", "fd", "key", "mapped", "users")

    def __init__(self, nbytes: int, fd: int, key: bytes) -> None:
        self.nbytes = nbytes
        self.fd = fd
        self.key = key
        self.address = 0
        self.mapped = 0  # bytes mapped
        self.users = 1  # devices of this process that hold it


_PAYLOAD: Final = struct.Struct("<16sQQ")  # process token, number, bytes


class Segments:
    """Shared segments of one process. A segment of this process is mapped once, whoever imports it, so that all
    ranks of a process see it at one address (a second mapping would be the alias proxy)."""

    def __init__(self) -> None:
        self._token = os.urandom(16)
        self._next = 0
        # Protects the table, the counts and the mapping of segments; re-entrant, as garbage collection may free one.
        self._lock = threading.RLock()
        self._live: dict[bytes, Segment] = {}

    def create(self, nbytes: int) -> Segment:
        if nbytes <= 0:
            raise ArgumentError(f"nbytes: expected an integer > 0, got {nbytes}")
        available = available_bytes()
        if nbytes > available:
            raise _no_segment(nbytes, available)
        fd = unnamed_file("peertile")
        try:
            extend(fd, _round(nbytes, PAGE))
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise _no_segment(nbytes, available, error.strerror) from error
            raise
        with self._lock:
            self._next += 1
            segment = Segment(nbytes, fd, _PAYLOAD.pack(self._token, self._next, nbytes))
            self._live[segment.key] = segment
        try:
            self.map(segment)
        except AllocationError:
            self.free(segment)
            raise
        return segment

    def export(self, segment: Segment) -> ShareHandle:
        _open(segment)
        return ShareHandle(ShareKind.FD, segment.key, (segment.fd,))

    def import_(self, share: ShareHandle) -> Segment:
        if share.kind is not ShareKind.FD or len(share.payload) != _PAYLOAD.size or len(share.fds) != 1:
            raise ArgumentError(
                f"share: expected a handle of kind fd with {_PAYLOAD.size} bytes and one descriptor, got kind "
                f"{share.kind.value} with {len(share.payload)} bytes and {len(share.fds)} descriptors"
            )
        token, _, nbytes = _PAYLOAD.unpack(share.payload)
        (fd,) = share.fds
        with self._lock:
            own = self._live.get(share.payload)
            if own is not None:
                own.users += 1
                if fd != own.fd:  # it went out over a socket and came back as a new descriptor
                    os.close(fd)
                return own
        if token == self._token:
            raise UsageError("share: expected the handle of a live segment, got one of a segment that was freed")
        size = os.fstat(fd).st_size
        if size < nbytes:
            raise ArgumentError(f"share: expected a descriptor of at least {nbytes} bytes, got one of {size}")
        segment = Segment(nbytes, fd, share.payload)
        with self._lock:
            self._live[segment.key] = segment
        return segment

    def map(self, segment: Segment) -> int:
        _open(segment)
        with self._lock:
            if not segment.mapped:
                size = _round(segment.nbytes, PAGE)
                address = _mapped(None, size, _READ_WRITE, _SHARED | _POPULATE, segment.fd)
                if not address:
                    raise AllocationError(
                        f"segment: cannot map {size} bytes: {os.strerror(ctypes.get_errno())}; use a smaller heap"
                    )
                segment.address, segment.mapped = address, size
            return segment.address

    def unmap(self, segment: Segment) -> None:
        """Unmaps when the last device of this process lets go of it, or when the only one asks."""
        _open(segment)
        with self._lock:
            if segment.users == 1:
                self._unmap(segment)

    def free(self, segment: Segment) -> None:
        _open(segment)
        with self._lock:
            segment.users -= 1
            if segment.users == 0:
                self._unmap(segment)
                os.close(segment.fd)
                segment.fd = -1
                del self._live[segment.key]

    @staticmethod
    def _unmap(segment: Segment) -> None:
        if segment.mapped:
            unmap(segment.address, segment.mapped)
            segment.address = segment.mapped = 0


def _open(segment: Segment) -> None:
    if segment.fd < 0:
        raise UsageError("segment: expected a live segment, got one that was freed")


def _no_segment(nbytes: int, available: int, reason: str | None = None) -> AllocationError:
    """`reason`: the system's, where it refused although there seemed to be enough."""
    if reason:
        return AllocationError(
            f"segment: asked for {nbytes} bytes of shared memory, and the system refused: {reason}; use a smaller "
            "heap, or raise what limits it (ulimit -f, the memory of the container)"
        )
    return AllocationError(
        f"segment: asked for {nbytes} bytes of shared memory, {available} are free on this machine; use a smaller heap"
    )


def extend(fd: int, nbytes: int) -> None:
    """Give a new file so many bytes, and have the memory now: without that, running out of it is a SIGBUS at a store
    much later. OSError."""
    if _LINUX:
        os.posix_fallocate(fd, 0, nbytes)
    else:
        os.ftruncate(fd, nbytes)
