"""`peertile timeline FILE`: what a recorded timeline comes to, as tables, a picture, or one file of several parts. The
work is in peertile.timelines.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from peertile.cli.console import plain
from peertile.errors import ArgumentError
from peertile.timelines.clocks import HOSTS_CLOCK
from peertile.timelines.events import Part
from peertile.timelines.picture import page
from peertile.timelines.start import checked_path
from peertile.timelines.summary import Summary, spelled_ns, summary_of
from peertile.timelines.trace import aligned, read_timeline, write_timeline

__all__ = ["timeline"]


def timeline(
    files: Annotated[list[Path], typer.Argument(help="What was recorded: one file, or the parts that ranks left.")],
    html: Annotated[Path | None, typer.Option(help="Write a picture, as a page of its own.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write all of it as one trace file.")] = None,
    begin_ms: Annotated[float, typer.Option("--begin", min=0.0, help="Where the picture begins, in ms.")] = 0.0,
    end_ms: Annotated[float | None, typer.Option("--end", min=0.0, help="Where the picture ends, in ms.")] = None,
    longest: Annotated[int, typer.Option(min=0, help="How many of the longest waits are shown.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="The summary as JSON.")] = False,
) -> None:
    """Show what each rank did in a timeline that peertile run --timeline, or pt.timeline, recorded."""
    for option, path in (("--html", html), ("--trace", trace)):
        if path is not None:
            checked_path(f"timeline: {option}", path, is_replaced=path is trace)
    for option, ms in (("--begin", begin_ms), ("--end", end_ms)):
        if ms is not None and not math.isfinite(ms):
            raise ArgumentError(f"timeline: {option}: expected a number of ms, got {ms}")
    if end_ms is not None and end_ms <= begin_ms:
        raise ArgumentError(f"timeline: --end: expected more than --begin, which is {begin_ms:g} ms, got {end_ms:g} ms")
    parts: dict[int, Part] = {}
    for file in files:
        for part in read_timeline(str(file)):
            if part.rank in parts:
                raise ArgumentError(f"timeline: expected each rank once, got rank {part.rank} again in {str(file)!r}")
            parts[part.rank] = part
    ranks = aligned(list(parts.values()))
    if trace is not None:
        write_timeline(str(trace), ranks)
    if html is not None:
        end_ns = None if end_ms is None else int(end_ms * 1e6)
        picture = page(files[0].name, ranks, int(begin_ms * 1e6), end_ns)
        html.write_text(picture, encoding="utf-8", errors="replace")  # a file's name may be no text
    found = summary_of(ranks, longest)
    if as_json:
        print(json.dumps(found.as_dict(), indent=2))
        return
    console = plain()
    console.print(_ranks(found))
    for times in found.ranks:
        if times.clock != HOSTS_CLOCK:
            console.print(f"rank {times.rank}: its times are {times.clock}")
    if found.waits:
        console.print(_waits(found))


def _ranks(found: Summary) -> Table:
    table = Table(title=f"{spelled_ns(found.ns)} in all", title_justify="left", padding=(0, 0), collapse_padding=True)
    for name in ("rank", "kernels", "copies", "host", "idle", "waited", "launches", "programs", "dropped"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in found.ranks:
        times = [spelled_ns(ns) for ns in (r.kernel_ns, r.copy_ns, r.host_ns, r.idle_ns)]
        counts = [str(n) for n in (r.launches, r.programs, r.dropped)]
        table.add_row(str(r.rank), *times, f"{r.waiting:.0%}", *counts)
    return table


def _waits(found: Summary) -> Table:
    table = Table(title="longest waits", title_justify="left")
    for name in ("time", "rank", "program"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("wait", overflow="fold")
    table.add_column("ended by rank", justify="right")
    table.add_column("at", overflow="fold")
    for wait in found.waits:
        info = wait.event.info
        table.add_row(
            spelled_ns(wait.event.ns), str(wait.rank), str(info.get("program", "")), wait.event.name,
            "" if wait.by is None else str(wait.by), str(info.get("at", "")),
        )  # fmt: skip
    return table
