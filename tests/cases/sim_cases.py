"""Cases as programs of the simulated machine: a decorator makes a test of a function of the group. No test here.

    @faulty(VerdictKind.RACE, "x of rank 1", "edge of rank 0")
    def test_f00_the_fault(group): ...          # reported, with these words in the report

    @silent(ranks=3)
    def test_f00_the_repaired_form(group): ...  # nothing is reported, and its own assertions hold

`QUICK_SCHEDULES` of what is to be silent are tried in the quick tier and `MORE_SCHEDULES` others beside them in the
suite; benchmarks/many_schedules.py tries 1,000 of each. What is faulty ends at its first fault.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from peertile.checker.check import check
from peertile.sim.verdicts import VerdictKind

__all__ = ["Form", "faulty", "silent"]

QUICK_SCHEDULES = 8
MORE_SCHEDULES = 12
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

    def run(self, count: int, seed: int = 0) -> None:
        """Fails unless the checker says what it should of so many schedules from `seed`."""
        report = check(self.main, self.ranks, schedules=count, seed=seed, **self.options)
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
        more = pytest.param(QUICK_SCHEDULES, MORE_SCHEDULES, marks=pytest.mark.slow)
        marks.append(pytest.mark.parametrize(("first", "schedules"), [(0, QUICK_SCHEDULES), more]))

        def test(first: int, schedules: int) -> None:
            form.run(schedules, first)
    else:

        def test() -> None:  # type: ignore[misc]
            form.run(FAULT_SCHEDULES)

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
