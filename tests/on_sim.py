"""`pytest --device sim`: a test about any device as the host program of a simulated machine.

A test, with its fixtures, is the host of one simulated rank, and what it spawns are the hosts of a machine of their
own. Each runs one schedule, drawn from the seed of the run. What the checker reports fails the test, and so does what
it cannot follow: a test about threads, processes or addresses is marked `native_only`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from _pytest.runner import call_and_report
from greenlet import GreenletExit

import peertile as pt
from peertile.checker.program import CannotCheck, ProgramCase
from peertile.errors import PeerFailed
from peertile.sim.choices import Chooser, RandomChooser
from peertile.sim.runs import Case, Outcome

MAX_STEPS = 20_000_000


class OpenCase(ProgramCase):
    """A program that prints where the test looks for it, and hears of faults as from any device."""

    def __init__(self, program: Callable[..., Any], ranks: int) -> None:
        super().__init__(program, ranks, max_steps=MAX_STEPS, follow_faults=True)

    def _once(self, chooser: Chooser, rule: Any, park: Any, foresight: Any) -> Outcome:
        return Case._once(self, chooser, rule, park, foresight)


class OnSim:
    """The plugin."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def pytest_runtest_protocol(self, item: pytest.Function, nextitem: pytest.Item | None) -> bool:
        seed = zlib.crc32(f"{self._seed}:{item.nodeid}".encode())
        reports: list[pytest.TestReport] = []

        def program(group: Any) -> None:
            reports.clear()
            item._initrequest()  # a schedule may be run again, with what the first run has shown
            reports.append(call_and_report(item, "setup", log=False))
            if reports[0].passed:
                reports.append(call_and_report(item, "call", log=False))
            reports.append(call_and_report(item, "teardown", log=False, nextitem=nextitem))

        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pt, "spawn", _spawn(seed))
            said = _verdict(OpenCase(program, 1), seed)
        if not reports or reports[-1].when != "teardown":  # cut off: what is left of its fixtures ends outside
            reports.append(call_and_report(item, "teardown", log=False, nextitem=nextitem))
        if said is not None:
            told = reports[min(1, len(reports) - 1)]
            if not told.failed or "GreenletExit" in str(told.longrepr):
                told.outcome, told.longrepr = "failed", f"seed {seed}: {said}"
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True


def _verdict(case: OpenCase, seed: int) -> str | None:
    """What the checker says of one schedule."""
    try:
        outcome = case.run(RandomChooser(seed))
    except CannotCheck as error:
        return str(error)
    return None if outcome.verdict is None else str(outcome.verdict)


def _spawn(seed: int) -> Callable[..., list[Any]]:
    """`peertile.spawn` on a machine of as many ranks."""

    def spawn(
        function: Callable[..., Any], ranks: int, args: Sequence[Any] = (), *, model: Any = None,
        timeout_s: float | None = None,
    ) -> list[Any]:  # fmt: skip
        results: list[Any] = [None] * ranks
        raised: dict[int, BaseException] = {}

        def program(group: Any) -> None:
            try:
                results[group.rank] = function(group, *args)
            except GreenletExit:
                raise
            except BaseException as error:
                raised.setdefault(group.rank, error)
                raise

        outcome = OpenCase(program, ranks).run(RandomChooser(seed))
        first = {rank: error for rank, error in raised.items() if not isinstance(error, PeerFailed)} or raised
        for rank, error in sorted(first.items()):
            raise PeerFailed(rank, f"{type(error).__name__}: {error}") from error
        if outcome.verdict is not None:
            pytest.fail(f"seed {seed}: {outcome.verdict}", pytrace=False)
        return results

    return spawn
