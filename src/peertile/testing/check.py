"""`check` for pytest: a program on the simulated machine, asserted clean, or asserted to show one kind of fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from peertile.checker.check import CheckReport, check
from peertile.sim.verdicts import Verdict, VerdictKind

__all__ = ["assert_clean", "assert_reports", "check"]


def assert_clean(
    program: str | Path | Callable[..., Any], ranks: int | None = None, *, schedules: int = 50, **options: Any
) -> CheckReport:
    """The program has no fault on any of `schedules` schedules; AssertionError with the report otherwise."""
    report = check(program, ranks, schedules=schedules, **options)
    if not report.clean:
        raise AssertionError(str(report))
    return report


def assert_reports(
    kind: VerdictKind,
    program: str | Path | Callable[..., Any],
    ranks: int | None = None,
    *,
    schedules: int = 50,
    **options: Any,
) -> Verdict:
    """The program shows a fault of `kind`, which is returned; AssertionError with the report otherwise."""
    report = check(program, ranks, schedules=schedules, **options)
    if report.clean or report.verdicts[0].kind is not kind:
        raise AssertionError(f"expected a fault of kind {kind.value}, got\n{report}")
    return report.verdicts[0]
