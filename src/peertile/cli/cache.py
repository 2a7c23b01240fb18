"""`peertile cache list|clear|path`: what the disk cache of compiled kernels holds. It writes nothing but deletions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from peertile.config import config
from peertile.errors import ArgumentError

__all__ = ["CacheEntry", "cache", "entries"]

cache = typer.Typer(help="The disk cache of compiled kernels.", no_args_is_help=True)
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One file of the cache."""

    name: str
    size_bytes: int
    used: str  # when it was last written or read, as far as the file system says


def entries(folder: Path) -> list[CacheEntry]:
    """The files of the cache, by name. A file that another process removes meanwhile is left out."""
    found = []
    for path in sorted(folder.rglob("*")) if folder.is_dir() else []:
        try:
            if path.is_symlink() or not path.is_file():
                continue
            status = path.stat()
        except OSError:
            continue
        used = datetime.fromtimestamp(max(status.st_mtime, status.st_atime), UTC).isoformat(timespec="seconds")
        found.append(CacheEntry(str(path.relative_to(folder)), status.st_size, used))
    return found


@cache.command("list")
def list_entries(as_json: AsJson = False) -> None:
    """List what is cached, with sizes."""
    folder = config().cache_dir
    found = entries(folder)
    total = sum(entry.size_bytes for entry in found)
    if as_json:
        files = [{"name": e.name, "size_bytes": e.size_bytes, "used": e.used} for e in found]
        print(json.dumps({"folder": str(folder), "total_bytes": total, "files": files}, indent=2))
        return
    table = Table(title=f"{folder}: {len(found)} files, {total / 2**20:.1f} MiB", title_justify="left")
    table.add_column("file", overflow="fold")
    table.add_column("bytes", justify="right")
    table.add_column("last used")
    for entry in found:
        table.add_row(entry.name, str(entry.size_bytes), entry.used)
    Console().print(table)


@cache.command()
def clear(
    as_json: AsJson = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete everything that is cached. Programs that run keep what they have loaded."""
    folder = config().cache_dir
    here, home = Path.cwd().resolve(), Path.home().resolve()
    if folder.resolve() in (here, home, *here.parents, *home.parents):
        raise ArgumentError(
            f"PEERTILE_CACHE_DIR: expected a folder for the cache alone, got {str(folder)!r}, which holds "
            f"the home folder or the current one; delete by hand what should go"
        )
    found = entries(folder)
    total = sum(entry.size_bytes for entry in found)
    if found and not yes and not as_json:
        typer.confirm(f"Delete {len(found)} files, {total / 2**20:.1f} MiB, in {folder}?", abort=True)
    for entry in found:
        (folder / entry.name).unlink(missing_ok=True)
    if as_json:
        print(json.dumps({"folder": str(folder), "deleted": len(found), "deleted_bytes": total}, indent=2))
    else:
        print(f"deleted {len(found)} files, {total / 2**20:.1f} MiB")


@cache.command()
def path(as_json: AsJson = False) -> None:
    """Print the folder of the cache."""
    folder = str(config().cache_dir)
    print(json.dumps({"folder": folder}) if as_json else folder)
