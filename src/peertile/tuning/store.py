"""What tuning has found, on disk: one JSON file for each question, written whole or not at all. Measures nothing.

A file answers exactly the question whose digest is its name: what is tuned, its source, the candidates, the key, the
machine, the ranks. One whose question differs, or that cannot be read, is as good as none. A disk that cannot be
written costs measuring again, never a failure.
"""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from peertile.backends.cpu.target import host_target
from peertile.captures import chains
from peertile.config import config, warn_of_cache
from peertile.kernel import KernelFunction

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["FORMAT", "Question", "Store", "provenance", "source_of"]

FORMAT = 1
_PLAIN = bool | int | float | complex | str | bytes | None
_PARTS = ("backends", "frontend", "ir", "language", "library", "passes", "runtime", "comm")

Question = dict[str, Any]
Record = dict[str, Any]


class Store:
    """Records in `folder`; None for `tuning` in the folder of compiled kernels. With PEERTILE_CACHE_MAX_MB=0 and no
    folder named, nothing is read or written."""

    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder = folder

    @property
    def folder(self) -> Path | None:
        """Where records lie; None where none are kept."""
        from pathlib import Path  # takes 3 ms, which `import peertile` does not pay

        if self._folder is not None:
            return Path(self._folder)
        return config().cache_dir / "tuning" if config().cache_max_bytes else None

    def path(self, question: Question) -> Path | None:
        """The file that answers `question`, whether or not it exists."""
        folder = self.folder
        if folder is None:
            return None
        name = "".join(c if c.isalnum() else "-" for c in str(question["name"]))[-60:].strip("-")
        return folder / f"{name}-{_key_of(_words(question))}.json"

    def read(self, question: Question) -> Record | None:
        """The record of `question`, finished or not."""
        import json  # takes 2 ms, which `import peertile` does not pay

        path = self.path(question)
        if path is None:
            return None
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        same = isinstance(record, dict) and record.get("format") == FORMAT and record.get("question") == question
        return record if same else None

    def write(self, question: Question, record: Record) -> None:
        """Put the record in place of the one before."""
        import json
        import tempfile

        path = self.path(question)
        if path is None:
            return
        temporary = ""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd, temporary = tempfile.mkstemp(prefix=".tuning-", dir=path.parent)
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                json.dump({"format": FORMAT, "question": question} | record, file, indent=1)
            os.replace(temporary, path)
        except OSError as error:
            if temporary:
                with suppress(OSError):
                    os.unlink(temporary)
            warn_of_cache(path.parent, error.strerror or str(error))

    def forget(self, question: Question) -> None:
        """Delete the record."""
        path = self.path(question)
        if path is not None:
            with suppress(OSError):
                path.unlink(missing_ok=True)


def _key_of(parts: Iterable[str]) -> str:
    """The digest of `parts`, whose order matters and whose borders count."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()[:40]


def _words(question: Question) -> Iterable[str]:
    for name in sorted(question):
        yield name
        yield repr(question[name])


def provenance() -> dict[str, Any]:
    """Where and with what figures are taken: machine, versions, date. For people; a record is found by its question."""
    import platform
    from importlib.metadata import PackageNotFoundError, version
    from pathlib import Path

    def of(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "not installed"

    model = platform.machine()  # `processor()` starts a process to ask
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return {
        "machine": {"host": platform.node(), "arch": host_target().arch, "cpu": model, "cores": os.cpu_count()},
        "versions": {name: of(name) for name in ("peertile", "numpy", "llvmlite")}
        | {"python": platform.python_version()},
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def source_of(functions: Iterable[Callable[..., Any] | None]) -> str:
    """A digest of the code of `functions`, of every function and kernel of theirs that their names reach, of the plain
    values they name, and of the files of this package that compile and run them. It may change where nothing that
    matters did (a measurement too many), not the other way round, but for what hides behind other objects."""
    parts: list[str] = [_package()]
    pending = [f.fn if isinstance(f, KernelFunction) else f for f in functions if f is not None]
    seen: set[int] = set()
    while pending:
        function = pending.pop()
        if not isinstance(function, FunctionType):  # a method, a partial, a callable object: by name
            parts.append(f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function))}")
            inner = getattr(function, "__func__", getattr(function, "func", None))
            if inner is not None:
                pending.append(inner)
            continue
        if id(function) in seen:
            continue
        seen.add(id(function))
        parts += _code(function.__code__)
        scope = dict(function.__globals__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # assigned later by the enclosing function
                scope[name] = cell.cell_contents
        names = {*(chain[0] for chain in chains(function.__code__)), *function.__code__.co_freevars}
        for name in sorted(names):
            value = scope.get(name)
            value = value.fn if isinstance(value, KernelFunction) else value
            if isinstance(value, FunctionType) and not (value.__module__ or "").startswith("peertile."):
                pending.append(value)
            elif isinstance(value, _PLAIN) and name in scope:
                parts.append(f"{name} = {value!r}")
    return _key_of(parts)


def _code(code: CodeType) -> Iterable[str]:
    yield f"{code.co_code.hex()} {code.co_names} {code.co_varnames}"
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _code(const)
        else:
            yield repr(const)


@functools.cache
def _package() -> str:
    """The files of this package that decide how fast something is: their names and sizes and times."""
    from pathlib import Path

    root = Path(__file__).parent.parent
    files = sorted(path for part in _PARTS for path in (root / part).rglob("*.py"))
    return _key_of(f"{p.relative_to(root)} {p.stat().st_size} {p.stat().st_mtime_ns}" for p in files)
