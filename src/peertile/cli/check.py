"""`peertile check PROGRAM --ranks N`: a program on the simulated machine. The work is in peertile.checker."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from peertile.checker.check import check as check_program
from peertile.checker.program import CannotCheck
from peertile.checker.watch import HOST_SECONDS
from peertile.errors import ArgumentError, PeertileError
from peertile.sim.conditions import Conditions, Overlap
from peertile.sim.verdicts import read_choices
from peertile.timelines.simulated import parts_of_run
from peertile.timelines.start import checked_path
from peertile.timelines.trace import write_timeline

__all__ = ["check"]

FOUND_STATUS, UNWRITTEN_STATUS = 1, 2


def check(
    program: Annotated[Path, typer.Argument(help="A Python file, as for peertile run.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="What the program gets, after --.")] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", "-n", min=1, help="Number of ranks; by default what the file declares.")
    ] = None,
    schedules: Annotated[int, typer.Option(min=1, help="Number of random schedules.")] = 50,
    seed: Annotated[int, typer.Option(help="Seed of the first schedule.")] = 0,
    choices: Annotated[str | None, typer.Option(help="Replay one schedule, as printed with a fault.")] = None,
    exhaustive: Annotated[bool, typer.Option("--exhaustive", help="All schedules that differ.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Most schedules of an exhaustive check.")] = 20_000,
    resident: Annotated[int | None, typer.Option(min=1, help="Programs of a rank that run at once.")] = None,
    overlap: Annotated[
        Overlap, typer.Option(help="Whether kernels of one device on different streams run at the same time.")
    ] = Overlap.ALWAYS,
    queue: Annotated[
        int | None, typer.Option(min=1, help="Operations that a stream takes before its host waits.")
    ] = None,
    blocking_launches: Annotated[
        bool, typer.Option("--blocking-launches", help="A launch returns when its kernel has ended.")
    ] = False,
    syncing_allocations: Annotated[
        bool, typer.Option("--syncing-allocations", help="Allocating and freeing wait for the device to be idle.")
    ] = False,
    host_seconds: Annotated[
        float, typer.Option(min=0.1, help="How long a host may run or wait without letting others go on.")
    ] = HOST_SECONDS,
    follow_faults: Annotated[
        bool, typer.Option("--follow-faults", help="A kernel that fails raises on its host, which may go on.")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Write the report as a page of its own, too.")] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="Write the timeline of the first fault, or of the first schedule, as a trace.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The report as JSON.")] = False,
) -> None:
    """Check PROGRAM for races, deadlocks and misuse of memory.

    Exits with 0 if nothing was found, 1 if a fault was, 2 if the program could not be checked.
    """
    try:
        replay = None if choices is None else read_choices(choices)
    except ValueError:
        raise ArgumentError(
            f"check: --choices: expected numbers and z followed by a number, joined by dots, got {choices!r}"
        ) from None
    for option, path in (("--html", html), ("--timeline", timeline)):
        if path is not None:
            checked_path(f"check: {option}", path, is_replaced=path is timeline)
    with _apart():
        report = check_program(
            program,
            ranks,
            schedules=schedules,
            seed=seed,
            choices=replay,
            exhaustive=exhaustive,
            limit=limit,
            argv=arguments,
            resident=resident,
            traced=html is not None or timeline is not None,
            conditions=Conditions(overlap, queue, blocking_launches, syncing_allocations),
            host_seconds=host_seconds,
            follow_faults=follow_faults,
        )
    print(json.dumps(report.as_dict(), indent=2) if as_json else report, flush=True)
    status = 0 if report.clean else FOUND_STATUS
    # The verdict stands whatever becomes of its files: it is out before them, and so is its status if it is a fault.
    try:
        if html is not None:
            html.write_text(report.page(), encoding="utf-8")
        if timeline is not None:
            assert report.trace is not None
            write_timeline(str(timeline), parts_of_run(report.trace, report.ranks))
    except OSError as error:
        print(f"peertile: check: --html, --timeline: cannot be written ({error})", file=sys.stderr)
        status = status or UNWRITTEN_STATUS
    raise typer.Exit(status)


@contextmanager
def _apart() -> Iterator[None]:
    """What goes past the streams of the ranks, as from a library in C, does not mix with the report; and an error of
    the checker itself is not taken for a fault of the program."""
    sys.stdout.flush()
    with _standard_output_on_error():
        try:
            yield
        except (PeertileError, KeyboardInterrupt):
            raise
        except BaseException as error:
            traceback.print_exc()
            raise CannotCheck(
                f"check: {type(error).__name__} in the checker, which is no fault of the program: see above"
            ) from None


@contextmanager
def _standard_output_on_error() -> Iterator[None]:
    try:
        kept = os.dup(1)
    except OSError:  # closed
        yield
        return
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
