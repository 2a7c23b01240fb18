"""`peertile cache list|clear|path|fill`: what the disk cache of compiled kernels holds, and filling it ahead of time.

`fill` runs a program as a rehearsal (runtime/drivers/rehearsal.py); nothing else here writes more than deletions.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from peertile.cli.console import plain
from peertile.config import config, read_config
from peertile.errors import ArgumentError

__all__ = ["CacheEntry", "cache", "entries", "used_since"]

CUBINS = "cubins"
"""The folder inside the cache that serves other machines, too (backends/cuda/kept.py)."""
SHOWN = 50
"""Files that a list shows unless asked for all: what many runs have left is tens of thousands."""

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
def list_entries(
    as_json: AsJson = False,
    everything: Annotated[bool, typer.Option("--all", help=f"Not only the {SHOWN} that were used last.")] = False,
) -> None:
    """List what is cached, with sizes, what was used last first."""
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
    found.sort(key=lambda entry: entry.used, reverse=True)
    shown = found if everything else found[:SHOWN]
    for entry in shown:
        table.add_row(entry.name, str(entry.size_bytes), entry.used)
    if len(shown) < len(found):
        table.caption = f"{len(found) - len(shown)} others; --all lists them"
    plain().print(table)


@cache.command()
def clear(
    as_json: AsJson = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete everything that is cached. Programs that run keep what they have loaded."""
    folder = config().cache_dir
    here, home = Path.cwd().resolve(), Path(os.path.expanduser("~")).resolve()
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


def used_since(folder: Path, ns: int) -> list[Path]:
    """Machine code that was made or found since then, by name."""
    found = []
    for path in sorted((folder / CUBINS).glob("*.kernel")):
        try:
            if path.stat().st_mtime_ns >= ns:
                found.append(path)
        except OSError:  # another process removed it meanwhile
            continue
    return found


@cache.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def fill(
    context: typer.Context,
    arch: Annotated[str, typer.Option(help="Compile for GPUs of this architecture, sm_90 for instance.")],
    multiprocessors: Annotated[
        int | None, typer.Option(help="Of the GPU, where it is not the largest of its architecture.", min=1, max=1023)
    ] = None,
    into: Annotated[Path | None, typer.Option(help="Also copy what was needed to this folder.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a program without a GPU and keep its kernels compiled for one: `peertile cache fill --arch sm_90 train.py`.

    The program thinks that it has a GPU; its kernels are compiled for that, and run on this processor. What was made
    is found by any machine: put the folder where the program runs, as PEERTILE_CACHE_DIR.
    """
    command = context.args
    if not command:
        raise ArgumentError("peertile cache fill: expected a program, as a .py file or a command, got none")
    if command[0].endswith(".py"):
        command = [sys.executable, *command]
    rehearse = arch if multiprocessors is None else f"{arch}:{multiprocessors}"
    env = {**os.environ, "PEERTILE_DEVICE": "cuda", "PEERTILE_REHEARSE": rehearse}
    read_config(env)  # says what is wrong before a program starts
    start_ns = time.time_ns() - 10_000_000  # clocks of file systems are coarse
    kept = config().cache_dir / CUBINS
    kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as fresh:
        # A cache of its own but for the machine code: what is found by function would not say what it is made of.
        (Path(fresh) / CUBINS).symlink_to(kept.resolve(), target_is_directory=True)
        try:
            status = subprocess.run(command, env={**env, "PEERTILE_CACHE_DIR": fresh}, check=False).returncode
        except OSError as error:
            raise ArgumentError(f"peertile cache fill: {command[0]!r} cannot be started: {error.strerror}") from None
    found = used_since(config().cache_dir, start_ns)
    if into is not None:
        (into / CUBINS).mkdir(parents=True, exist_ok=True)
        for path in found:
            shutil.copy2(path, into / CUBINS / path.name)
    total = sum(path.stat().st_size for path in found)
    folder = str(config().cache_dir if into is None else into)
    if as_json:
        said = {"folder": folder, "arch": arch, "kernels": len(found), "bytes": total, "status": status}
        print(json.dumps(said, indent=2))
    else:
        print(f"{len(found)} kernels for {arch}, {total / 2**20:.1f} MiB, in {folder}")
    if status != 0:
        print(f"the program ended with status {status}: kernels that it did not reach are missing", file=sys.stderr)
        raise typer.Exit(status if 0 < status < 256 else 1)
