"""Puts this folder on the path: what the cases share is in `case_ranks`, which imports no pytest. `--schedules 1000`
tries so many schedules of whatever a case explores and finds clean."""

import sys
from pathlib import Path
from typing import Any

import pytest

from peertile.sim.explore import Report, explore
from peertile.sim.runs import Case

sys.path.insert(0, str(Path(__file__).parent))

ONE_RUN = 1
"""Schedules of an exploration that a test makes for one seed, or of one long run: not to be made more."""


@pytest.fixture(autouse=True)
def many(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = request.config.option.schedules

    def longer(case: Case, schedules: int = 100, seed: int = 0, **options: Any) -> Report:
        report = explore(case, schedules, seed, **options)
        if not report.clean or schedules == ONE_RUN or schedules >= wanted:
            return report
        more = explore(case, wanted - schedules, seed + schedules, **options)
        more.unconfirmed += report.unconfirmed
        more.schedules += report.schedules
        return more

    if wanted and getattr(request.module, "explore", None) is explore:
        monkeypatch.setattr(request.module, "explore", longer)
