"""`peertile run PROGRAM --ranks N`: a program as N ranks on this host. The work is in comm/supervisor.py."""

from __future__ import annotations

import json
import os
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from peertile.cli.console import plain
from peertile.comm.supervisor import TIMELINE, JobReport, Output, launch
from peertile.errors import ArgumentError
from peertile.timelines.start import checked_path

__all__ = ["DeviceKind", "run"]


class DeviceKind(Enum):
    """What the ranks run on."""

    CPU = "cpu"
    CUDA = "cuda"


def run(
    program: Annotated[Path, typer.Argument(help="A Python file that calls pt.init() or pt.run(main).")],
    arguments: Annotated[list[str] | None, typer.Argument(help="What the program gets, after --.")] = None,
    ranks: Annotated[int, typer.Option("--ranks", "-n", min=1, help="Number of ranks.")] = 1,
    device: Annotated[DeviceKind, typer.Option(help="What the ranks run on.")] = DeviceKind.CPU,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the rendezvous; by default one that is free.")
    ] = None,
    labels: Annotated[bool, typer.Option("--labels", help="Name the rank at each line of output.")] = False,
    timeline: Annotated[
        Path | None, typer.Option(help="Record what the ranks do, as a trace file for Perfetto or peertile timeline.")
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="How each rank ended, on standard output; the ranks' output on standard error."),
    ] = False,
) -> None:
    """Run PROGRAM as several ranks.

    Exits with 0 only if every rank does; else with the status of the first that failed, or 130 for Ctrl-C.
    """
    if not program.is_file():
        raise ArgumentError(f"run: PROGRAM: expected a Python file, got {str(program)!r}, which is not a file")
    command = [sys.executable, str(program), *(arguments or [])]
    env = {**os.environ, "PEERTILE_DEVICE": device.value}
    if timeline is not None:
        env[TIMELINE] = checked_path("run: --timeline", timeline)
    report = launch(command, ranks, env=env, port=port, output=Output(labels=labels, stdout_to_stderr=as_json))
    if as_json:
        print(json.dumps(_as_dict(report), indent=2))
    elif report.first_failure is not None:
        plain(stderr=True).print(_table(report))
    raise typer.Exit(report.status)


def _as_dict(report: JobReport) -> dict[str, object]:
    first = report.first_failure
    return {
        "status": report.status,
        "first_failure": None if first is None else first.rank,
        "ranks": [
            {"rank": end.rank, "status": end.status, "cause": end.cause}
            for end in sorted(report.ends, key=lambda end: end.rank)
        ],
    }


def _table(report: JobReport) -> Table:
    first = report.first_failure
    table = Table(title="ranks that failed", title_justify="left")
    table.add_column("rank", justify="right", no_wrap=True)
    table.add_column("status", justify="right", no_wrap=True)
    table.add_column("cause", overflow="fold")
    for end in sorted(report.ends, key=lambda end: (end is not first, end.rank)):
        if end.status != 0:
            style = "bold red" if end is first else None
            table.add_row(str(end.rank), str(end.status), end.cause + (" (first)" if end is first else ""), style=style)
    return table
