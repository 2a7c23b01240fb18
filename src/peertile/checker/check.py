"""`check`: a program on many schedules of the simulated machine, and what came of it.

    report = check(main, ranks=2, schedules=100)
    assert report.clean, str(report)

What was covered, and what was left out, is part of every verdict: see `CheckReport.statement`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from peertile.checker.page import page
from peertile.checker.program import CHECKED, ProgramCase, compiled
from peertile.errors import ArgumentError
from peertile.sim.choices import ReplayChooser
from peertile.sim.conditions import USUAL, Conditions
from peertile.sim.explore import Report, exhaust, explore, settle
from peertile.sim.trace import Trace
from peertile.sim.verdicts import Verdict

__all__ = ["ABSTRACTIONS", "CheckReport", "check", "declared"]

ABSTRACTIONS: Final = (
    "memory is judged by element, order, scope and happens-before, not by caches, timing or numerics of a device",
    "copies to the host of partly written memory are not reads of what was never written",
    "asynchronous stores happen when they start; the engine of bulk copies inside one device is not modelled",
)


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
        if self.clean:
            parts.append(f"{self.program}: no fault found on {self.ranks} ranks")
        elif not self.verdicts:
            parts.append(f"{self.program}: no schedule showed a fault on {self.ranks} ranks")
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
            "schedules": self.exploration.schedules,
            "complete": self.exploration.complete,
            "steps": self.exploration.steps,
            "covered": self.statement().split("\n"),
        }


def declared(path: Path) -> dict[str, Any]:
    """What a file declares as `CHECK`; empty without one. Executes the file's top level, not its main."""
    if "CHECK" not in path.read_text():
        return {}
    module = ModuleType(CHECKED)
    module.__file__ = str(path.resolve())
    sys.modules[CHECKED] = module  # where dataclasses look their annotations up
    try:
        exec(compiled(path), module.__dict__)
    finally:
        del sys.modules[CHECKED]
    found = module.__dict__.get("CHECK", {})
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
) -> CheckReport:
    """Runs `program`, a file or a function of the group, on `ranks` simulated ranks under `schedules` schedules.

    `choices` replays one schedule; `exhaustive` runs all that differ, at most `limit`. `resident` bounds the
    programs of a rank that run at once, `conditions` say how its devices behave where the model leaves it open.
    `traced` keeps the run of the fault, for `CheckReport.page`.
    A file's `CHECK` gives arguments and ranks that are not given here.
    """
    target: Path | Callable[..., Any]
    if callable(program):
        target, name = program, getattr(program, "__name__", repr(program))
        count = ranks or 2
    else:
        target = Path(program)
        if not target.is_file():
            raise ArgumentError(f"check: program: expected a Python file, got {str(program)!r}, which is not a file")
        name = str(program)
        small = declared(target)
        wanted = small.pop("ranks", None)
        if arguments is None and "CHECK" in target.read_text():
            arguments = small
        count = ranks or wanted or 2
    if count < 1:
        raise ArgumentError(f"check: ranks: expected at least 1, got {count}")
    case = ProgramCase(target, count, arguments=arguments, argv=argv, resident=resident, conditions=conditions)
    if choices is not None:
        outcome = case.run(ReplayChooser(choices))
        report = Report(schedules=1, steps=outcome.steps, seed=None)
        if outcome.verdict is not None:
            report.verdicts.append(settle(case, outcome, None, 0))
    elif exhaustive:
        report = exhaust(case, limit)
    else:
        report = explore(case, schedules, seed, stop_at=stop_at)
    report.abstractions = (conditions.described(), *ABSTRACTIONS)
    result = CheckReport(name, count, report, dict(case.compiler.order_faults), case.output)
    if traced:
        case.traced = True
        shown = report.verdicts[0].replay.choices if report.verdicts else ()
        result.trace = case.run(ReplayChooser(shown or ())).machine.trace
    return result
