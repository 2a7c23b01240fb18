"""Cases as programs of the simulated machine: a decorator makes a test of a function of the group. No test here.

    @faulty(VerdictKind.RACE, "x of rank 1", "edge of rank 0")
    def test_f00_the_fault(group): ...          # reported, with these words in the report

    @silent(ranks=3)
    def test_f00_the_repaired_form(group): ...  # nothing is reported, and its own assertions hold

`SCHEDULES` of them are tried in the suite, `QUICK_SCHEDULES` of what is to be silent in the quick tier; the long tier
calls `test.form.run(schedules)` with more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from peertile.checker.check import check
from peertile.sim.verdicts import VerdictKind

__all__ = ["SCHEDULES", "Form", "faulty", "silent"]

SCHEDULES = 50
QUICK_SCHEDULES = 8
FAULT_SCHEDULES = 50


class Form:
    """One form of a case: what it runs, on how many ranks, and what is to come of it (`kind` None: nothing)."""

    def __init__(
        self, main: Callable[..., Any], kind: VerdictKind | None, words: tuple[str, ...], ranks: int,
        options: dict[str, Any],
    ) -> None:  # fmt: skip
        self.main = main
        self.kind = kind
        self.words = words
        self.ranks = ranks
        self.options = options

    def run(self, schedules: int | None = None) -> None:
        """Fails unless the checker says what it should."""
        count = schedules or (SCHEDULES if self.kind is None else FAULT_SCHEDULES)
        report = check(self.main, self.ranks, schedules=count, **self.options)
        if self.kind is None:
            assert report.clean, str(report)
            assert report.exploration.unconfirmed == 0
            assert report.exploration.schedules == count
            return
        assert [v.kind for v in report.verdicts] == [self.kind], str(report)
        text = str(report.verdicts[0])
        for word in self.words:
            assert word in text, f"{word!r} is not in\n{text}"


def _test(form: Form) -> Any:
    marks = [pytest.mark.feature("C1", "sim")]
    if form.kind is None:
        many = pytest.param(SCHEDULES, marks=pytest.mark.slow)
        marks.append(pytest.mark.parametrize("schedules", [QUICK_SCHEDULES, many]))

        def test(schedules: int) -> None:
            form.run(schedules)
    else:

        def test() -> None:  # type: ignore[misc]
            form.run()

    # Not functools.wraps: pytest would take the program's parameter for a fixture.
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(test, name, getattr(form.main, name))
    test.form = form  # type: ignore[attr-defined]
    for mark in marks:
        test = mark(test)
    return test


def faulty(kind: VerdictKind, *words: str, ranks: int = 2, **options: Any) -> Callable[[Any], Any]:
    """The program below is reported: a fault of `kind`, with `words` in its text."""
    return lambda main: _test(Form(main, kind, words, ranks, options))


def silent(ranks: int = 2, **options: Any) -> Callable[[Any], Any]:
    """Nothing is reported of the program below."""
    return lambda main: _test(Form(main, None, (), ranks, options))
