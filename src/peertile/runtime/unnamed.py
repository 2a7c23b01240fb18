"""Files in memory that no path leads to: what processes share, and nothing of which stays when they end."""

from __future__ import annotations

import importlib
import os
from typing import Any

__all__ = ["unnamed_file"]


def unnamed_file(label: str) -> int:
    """Descriptor of a new, empty one, which processes that are started do not inherit. `label` is what Linux shows in
    its lists of mappings."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(label, os.MFD_CLOEXEC)
    try:
        # What `multiprocessing` makes shared memory by: its own module gives names that stay.
        shared: Any = importlib.import_module("_posixshmem")
    except ImportError:
        return _unlinked_file()
    # Other systems give shared memory a name, and there is no way around it: it is gone by the next line. The bound
    # for names is 31 bytes on macOS.
    name = f"/pt-{os.urandom(10).hex()}"
    fd: int = shared.shm_open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode=0o600)
    shared.shm_unlink(name)
    os.set_inheritable(fd, False)
    return fd


def _unlinked_file() -> int:
    """On a disk, where the system writes it to now and then: slower, but the same."""
    import tempfile  # only where there is nothing else, and slow to import

    fd, path = tempfile.mkstemp(prefix="peertile-")
    os.unlink(path)
    return fd
