"""Object code of the drivers' own native functions, kept on disk under the hash of its text, so that only the first
process of a machine compiles them. Kernels are kept elsewhere (`backends/cache.py`).
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from peertile.backends.cpu import jit
from peertile.config import config, warn_of_cache

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["kept_object"]

_DIGEST: Final = 32  # bytes of sha256


def _sha256(data: bytes) -> Any:
    import hashlib  # takes 2 ms, which `import peertile` does not pay

    return hashlib.sha256(data)


def kept_object(name: str, text: str) -> bytes:
    """The object of a module of LLVM text, compiled or read from the disk; `name` begins the name of its file."""
    path = _path(name, text)
    payload = _read(path)
    if payload is None:
        payload = jit.compile_text(text, level=2)
        _write(path, payload)
    return payload


def _path(name: str, text: str) -> Path | None:
    if config().cache_max_bytes == 0:
        return None
    key = "\n".join([jit.llvmlite_version(), jit.host_cpu(), jit.host_features(), text])
    return config().cache_dir / f"{name}-{_sha256(key.encode()).hexdigest()[:24]}.o"


def _read(path: Path | None) -> bytes | None:
    """The object in the file, if it is whole: it begins with the digest of the rest."""
    if path is None:
        return None
    try:
        data = path.read_bytes()
    except OSError:
        return None
    payload = data[_DIGEST:]
    return payload if _sha256(payload).digest() == data[:_DIGEST] else None


def _write(path: Path | None, payload: bytes) -> None:
    """Put the object in place in one step, as other processes may do the same. A full disk is no error."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        import tempfile  # slow to import, and only a cold start writes

        fd, temporary = tempfile.mkstemp(dir=path.parent)
    except OSError as error:
        warn_of_cache(path.parent, error.strerror)
        return
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(_sha256(payload).digest() + payload)
        os.replace(temporary, path)
    except OSError:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
