"""`check`: a program on many schedules of the simulated machine, and what came of it.

    report = check(main, ranks=2, schedules=100)
    assert report.clean, str(report)

What was covered, and what was left out, is part of every verdict: see `CheckReport.statement`.
"""

from __future__ import annotations

import ast
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from peertile.checker.page import page
from peertile.checker.program import CannotCheck, ProgramCase, compiled
from peertile.checker.watch import HOST_SECONDS
from peertile.comm.launcher import Program
from peertile.errors import ArgumentError
from peertile.sim.choices import ReplayChooser
from peertile.sim.conditions import USUAL, Conditions
from peertile.sim.explore import Report, exhaust, explore, settle
from peertile.sim.trace import Trace
from peertile.sim.verdicts import HostError, Verdict, spell_choices

__all__ = ["ABSTRACTIONS", "CheckReport", "check", "declared"]

ABSTRACTIONS: Final = (
    "memory is judged by element, order, scope and happens-before, not by caches, timing or numerics of a device",
    "copies to the host of partly written memory are not reads of what was never written",
    "asynchronous stores happen when they start; the engine of bulk copies inside one device is not modelled",
)


FOLLOWED: Final = "a kernel that fails, or waits in vain, is reported only where its host lets the error pass"
PRINTED_LINES: Final = 10
"""Of what a program printed before it raised: the last lines say why."""


@dataclass
class CheckReport:
    """What a check found. `clean`: nothing, neither by running nor without."""

    program: str
    ranks: int
    exploration: Report
    order_faults: dict[str, str] = field(default_factory=dict)
    """Rules of memory order that the compiler refuses without running anything, by place: shown first. Here the
    program runs all the same, so that the race itself can be seen."""
    output: str = ""
    """What the last schedule printed."""
    command: str = ""
    """What repeats the schedule of the first fault in a shell, if the program is a file."""
    trace: Trace | None = field(default=None, repr=False)
    """The run of the first fault, or the first run, where `traced` was asked for."""

    @property
    def verdicts(self) -> list[Verdict]:
        return self.exploration.verdicts

    @property
    def clean(self) -> bool:
        return not self.verdicts and not self.order_faults

    def statement(self) -> str:
        """What was covered."""
        return self.exploration.statement()

    def __str__(self) -> str:
        parts = [
            f"{message}\n  {place}\n  the compiler refuses this without running it"
            for place, message in self.order_faults.items()
        ]
        parts += [str(verdict) for verdict in self.verdicts]
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        if self.clean:
            parts.append(f"{self.program}: no fault found on {ranks}")
        elif not self.verdicts:
            parts.append(f"{self.program}: no schedule showed a fault on {ranks}")
        if self.output and any(isinstance(verdict, HostError) for verdict in self.verdicts):
            parts.append("printed: " + "\n         ".join(self.output.rstrip().split("\n")[-PRINTED_LINES:]))
        if self.command:
            parts.append("again: " + self.command)
        parts.append("covered: " + self.statement().replace("\n", "\n         "))
        return "\n\n".join(parts)

    def page(self) -> str:
        """The report as an HTML page of its own."""
        return page(self.program, self.verdicts[0] if self.verdicts else None, self.trace, self.statement())

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "program": self.program,
            "ranks": self.ranks,
            "clean": self.clean,
            "verdicts": [verdict.as_dict() for verdict in self.verdicts],
            "order_faults": self.order_faults,
            "again": self.command or None,
            "schedules": self.exploration.schedules,
            "complete": self.exploration.complete,
            "steps": self.exploration.steps,
            "covered": self.statement().split("\n"),
        }


def declared(path: Path) -> dict[str, Any] | None:
    """What a file declares as `CHECK`; None without one. A value that is not written out there is found by executing
    the top level of the file, on a simulated rank as well."""
    code = compiled(path)
    if "CHECK" not in code.co_names:
        return None
    found: Any = None
    for node in ast.parse(path.read_bytes()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "CHECK" for target in targets):
            try:
                found = ast.literal_eval(node.value)  # type: ignore[attr-defined]
            except (ValueError, AttributeError):
                found = None
                break
    if found is None:
        found = ProgramCase(path, 1, only_top=True).top("CHECK")
        if found is None:
            return None
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ArgumentError(f"{path}: CHECK: expected a dict from argument names to values, got {found!r}")
    return dict(found)


def check(
    program: str | Path | Callable[..., Any],
    ranks: int | None = None,
    *,
    schedules: int = 50,
    seed: int = 0,
    choices: tuple[int, ...] | None = None,
    exhaustive: bool = False,
    limit: int = 20_000,
    stop_at: int = 1,
    arguments: dict[str, Any] | None = None,
    argv: list[str] | None = None,
    resident: int | None = None,
    traced: bool = False,
    conditions: Conditions = USUAL,
    host_seconds: float = HOST_SECONDS,
    follow_faults: bool = False,
) -> CheckReport:
    """Runs `program`, a file or a function of the group, on `ranks` simulated ranks under `schedules` schedules.

    `choices` replays one schedule; `exhaustive` runs all that differ, at most `limit`. `resident` bounds the
    programs of a rank that run at once, `conditions` say how its devices behave where the model leaves it open.
    `traced` keeps the run of the fault, for `CheckReport.page`. `host_seconds` bound, in real time, what a host does
    without letting others go on. With `follow_faults` a kernel that fails, or waits in vain, is no verdict by itself:
    its host gets the error, as from a device. A file's `CHECK` gives arguments and ranks that are not given here.
    """
    target: Path | Callable[..., Any]
    if callable(program):
        target, name = program, getattr(program, "__name__", repr(program))
        count, is_small = 2 if ranks is None else ranks, False
    else:
        target = Path(program)
        if not target.is_file():
            raise ArgumentError(f"check: program: expected a Python file, got {str(program)!r}, which is not a file")
        name = str(program)
        small = declared(target)
        wanted = None if small is None else small.pop("ranks", None)
        is_small = arguments is None
        if arguments is None:
            arguments = small
        count = (wanted or 2) if ranks is None else ranks
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ArgumentError(f"check: ranks: expected an integer of at least 1, got {count!r}")
    case = ProgramCase(
        target, count, arguments=arguments, argv=argv, resident=resident, conditions=conditions,
        host_seconds=host_seconds, follow_faults=follow_faults,
    )  # fmt: skip
    if choices is not None:
        outcome = case.run(ReplayChooser(choices))
        report = Report(schedules=1, steps=outcome.steps, choices=choices)
        taken = [*outcome.choices, *[0] * len(choices)]
        report.misfit = next((k for k, choice in enumerate(choices) if taken[k] != choice), None)
        if outcome.verdict is not None:
            report.verdicts.append(settle(case, outcome, None, 0))
    elif exhaustive:
        report = exhaust(case, limit)
    else:
        report = explore(case, schedules, seed, stop_at=stop_at)
    if report.clean and not case.did_anything:
        raise CannotCheck(_nothing_done(name, case))
    report.abstractions = (conditions.described(), *ABSTRACTIONS, *([FOLLOWED] if follow_faults else []))
    result = CheckReport(name, count, report, dict(case.compiler.order_faults), case.output)
    if report.verdicts and isinstance(target, Path) and is_small:  # the command line cannot give arguments
        result.command = _command(name, count, report.verdicts[0], case)
    if traced:
        case.traced = True
        shown = report.verdicts[0].replay.choices if report.verdicts else ()
        result.trace = case.run(ReplayChooser(shown or ())).machine.trace
    return result


def _nothing_done(name: str, case: ProgramCase) -> str:
    """Why there is nothing to say about a program that has run to its end."""
    why = "it neither joined the group of its ranks, by pt.init() or pt.run(main), nor used a device"
    marked = [key for key, value in vars(case.module).items() if isinstance(value, Program)] if case.module else []
    if marked:
        why = (
            f'it marks {", ".join(marked)} with @pt.program, but nothing calls it; add `if __name__ == "__main__": '
            f"pt.run({marked[0]})`, or arguments for it as CHECK = {{...}}"
        )
    return f"{name}: nothing was checked, as {why}"


def _command(name: str, ranks: int, verdict: Verdict, case: ProgramCase) -> str:
    """The command that repeats the schedule of a fault, with all that it depends on."""
    conditions, words = case.conditions, ["peertile", "check", name, "--ranks", str(ranks)]
    if case.resident is not None:
        words += ["--resident", str(case.resident)]
    if conditions.overlap is not USUAL.overlap:
        words += ["--overlap", conditions.overlap.value]
    if conditions.queue is not None:
        words += ["--queue", str(conditions.queue)]
    if conditions.blocking_launches:
        words.append("--blocking-launches")
    if conditions.syncing_allocations:
        words.append("--syncing-allocations")
    if case.follow_faults:
        words.append("--follow-faults")
    seed, choices = verdict.replay.seed, verdict.replay.choices
    if choices is None and seed is not None:
        words += ["--seed", str(seed), "--schedules", "1"]
    else:
        words += ["--choices", spell_choices(choices or ())]
    return shlex.join([*words, *(["--", *case.argv] if case.argv else [])])
