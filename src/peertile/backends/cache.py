"""Compiled code on disk, addressed by what it was made from. Knows no target and imports no compiler.

An entry is a file named by its key: the digest of its content, then the content. Entries are put in place by
renaming, so readers (other processes too) see a whole file or none; a file that fails its digest is deleted
and made again. A key is made once, however many threads and processes ask at the same time (single flight): ranks start
together and want the same kernels, and on fewer cores than ranks each would compile for all the others' time. The size
bound is kept by deleting what was used longest ago, which means a look at the whole folder: not at each entry but once
in 1/64 of the bound, so that one process exceeds it never, and many at once by little. A disk that cannot be read or
written costs time, never a failure.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple

from peertile.config import config, warn_of_cache

try:
    import fcntl
except ImportError:  # not a Unix: no locks between processes
    fcntl = None  # type: ignore[assignment]

__all__ = ["CacheStats", "DiskCache", "default_cache", "key_of"]

SUFFIX: Final = ".kernel"
_MAKING: Final = ".making-"
_LOCK: Final = ".lock-"
_DIGEST: Final = 32
_SLACK: Final = 64
_ABANDONED_S: Final = 3600.0
"""A temporary file this old belongs to a process that died."""
_OTHERS_S: Final = 120.0
"""So long another process may take to make an entry; then this one makes it too (the other may be stopped). A process
that dies lets go at once."""


class CacheStats(NamedTuple):
    """What happened so far in this process. Every request is a hit (disk), a join or a miss; `corrupt` ones are
    misses too. `joins` waited for another thread that was making the same entry; what another process made is a hit."""

    hits: int = 0
    misses: int = 0
    joins: int = 0
    corrupt: int = 0
    evicted: int = 0


def key_of(parts: Iterable[str]) -> str:
    """The key of what is made from `parts`, whose order matters and whose borders count."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()[:40]


class _Flight:
    """One entry being made: those who wait, and how it ended."""

    __slots__ = ("content", "done", "error")

    def __init__(self) -> None:
        self.done = threading.Event()
        self.content: bytes | None = None
        self.error: BaseException | None = None


class DiskCache:
    """Entries in `folder`, at most `max_bytes` of them; with `max_bytes` 0 nothing is read or written."""

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int) -> None:
        self.folder = os.fspath(folder)
        self.max_bytes = max_bytes
        self._lock = threading.Lock()  # protects `_flights` and `_stats`; held for a look-up, never over I/O
        self._flights: dict[str, _Flight] = {}
        self._stats = CacheStats()
        self._unseen: int | None = None  # bytes written since the last look at the folder

    @property
    def stats(self) -> CacheStats:
        with self._lock:
            return self._stats

    def get(self, key: str, make: Callable[[], bytes]) -> bytes:
        """The entry of `key`, made by `make` if there is none. What `make` raises is raised to all who asked."""
        with self._lock:
            flight = self._flights.get(key)
            mine = flight is None
            if flight is None:
                flight = self._flights[key] = _Flight()
            else:
                self._stats = self._stats._replace(joins=self._stats.joins + 1)
        if not mine:
            flight.done.wait()
            if flight.error is not None:
                raise flight.error
            assert flight.content is not None
            return flight.content
        try:
            flight.content = self._find_or_make(key, make)
            return flight.content
        except BaseException as error:
            flight.error = error
            raise
        finally:
            with self._lock:
                del self._flights[key]
            flight.done.set()

    def _count(self, *, hits: int = 0, misses: int = 0, corrupt: int = 0, evicted: int = 0) -> None:
        with self._lock:
            s = self._stats
            self._stats = CacheStats(
                s.hits + hits, s.misses + misses, s.joins, s.corrupt + corrupt, s.evicted + evicted
            )

    def _find_or_make(self, key: str, make: Callable[[], bytes]) -> bytes:
        path = os.path.join(self.folder, key + SUFFIX)
        if not self.max_bytes:
            self._count(misses=1)
            return make()
        found = self._read(path)
        if found is None:
            with self._alone(key):
                found = self._read(path)  # another process may have made it meanwhile
                if found is None:
                    content = make()
                    self._count(misses=1)
                    self._write(path, content)
                    return content
        self._count(hits=1)
        return found

    @contextmanager
    def _alone(self, key: str) -> Iterator[None]:
        """While other processes wait that want the same entry. Best effort: where files cannot be locked, each makes
        its own. Keys lock files of their own, so who makes one entry can ask for another."""
        path = os.path.join(self.folder, f"{_LOCK}{key}")
        fd = _locked(path)
        try:
            yield
        finally:
            if fd is not None and fcntl is not None:
                # Unlinked while locked: who waits with the old file finds the entry, who comes later finds it first.
                _unlink(path)
                # Said, not left to closing: a child that was forked meanwhile has the file open, too.
                with suppress(OSError):
                    fcntl.flock(fd, fcntl.LOCK_UN)
                os.close(fd)

    def _read(self, path: str) -> bytes | None:
        try:
            with open(path, "rb", buffering=0) as file:
                data = file.readall()
        except OSError:
            return None
        content = data[_DIGEST:]
        if len(data) < _DIGEST or hashlib.sha256(content).digest() != data[:_DIGEST]:
            self._count(corrupt=1)
            _unlink(path)
            return None
        with suppress(OSError):  # a folder that may only be read still serves
            os.utime(path)  # the time of last use, which eviction goes by
        return content

    def _write(self, path: str, content: bytes) -> None:
        if len(content) + _DIGEST > self.max_bytes - self.max_bytes // _SLACK:
            return
        import tempfile  # takes 3 ms, which a hit does not pay

        try:
            os.makedirs(self.folder, exist_ok=True)
            fd, temporary = tempfile.mkstemp(prefix=_MAKING, dir=self.folder)
        except OSError as error:
            warn_of_cache(self.folder, error.strerror)
            return
        try:
            with os.fdopen(fd, "wb") as file:
                digest = hashlib.sha256(content).digest()
                file.write(digest + content)
            os.replace(temporary, path)
        except OSError:
            _unlink(temporary)
            return
        if self._is_due(len(content) + _DIGEST, digest[0] / 256):
            self._evict(path)

    def _is_due(self, written: int, share: float) -> bool:
        """Whether it is time to look at the folder. A process begins somewhere (`share`) between two looks, so that
        many that write little each look as often together as one that writes much."""
        slack = self.max_bytes // _SLACK
        with self._lock:
            self._unseen = (int(share * slack) if self._unseen is None else self._unseen) + written
            if self._unseen < slack:
                return False
            self._unseen = 0
        return True

    def _evict(self, keep: str) -> None:
        """Delete entries, used longest ago first, until the bound is kept up to the next look; the one just written
        stays."""
        limit = self.max_bytes - self.max_bytes // _SLACK
        entries: list[tuple[float, int, str]] = []
        now = time.time()
        try:
            with os.scandir(self.folder) as listing:
                for entry in listing:
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except OSError:
                        continue  # another process deleted it meanwhile
                    if entry.name.endswith(SUFFIX):
                        entries.append((status.st_mtime, status.st_size, entry.path))
                    elif entry.name.startswith((_MAKING, _LOCK)) and now - status.st_mtime > _ABANDONED_S:
                        _unlink(entry.path)
        except OSError:
            return
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries, key=lambda e: e[0]):
            if total <= limit:
                return
            if path != keep:
                _unlink(path)
                total -= size
                self._count(evicted=1)


def _unlink(path: str) -> None:
    with suppress(OSError):  # another process may have done it
        os.unlink(path)


def _locked(path: str) -> int | None:
    """Descriptor of the file, locked; None if that cannot be had within the bound."""
    if fcntl is None:
        return None
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    end = time.monotonic() + _OTHERS_S
    pause_s = 0.001
    is_locked = False
    try:
        while time.monotonic() <= end:
            with suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_locked = True
                break
            time.sleep(pause_s)  # the system has no wait for a lock with a bound
            pause_s = min(2 * pause_s, 0.02)
    except OSError:
        pass  # a file system without locks
    finally:
        if not is_locked:
            os.close(fd)
    return fd if is_locked else None


_default: DiskCache | None = None
_default_lock = threading.Lock()  # protects the first use of `_default`


def default_cache() -> DiskCache:
    """The cache that the environment names."""
    global _default
    with _default_lock:
        if _default is None:
            _default = DiskCache(config().cache_folder, config().cache_max_bytes)
        return _default
