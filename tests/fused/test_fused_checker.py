"""Fused kernels on the simulated machine: no race, no deadlock, right values on every schedule."""

import fused_programs as programs
import pytest

from peertile.testing import assert_clean

CASES = list(programs.SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_fused_kernels_are_clean_on_a_few_schedules(name, ranks):
    report = assert_clean(programs.SMALL[name], ranks, schedules=8)
    assert report.exploration.unconfirmed == 0


@pytest.mark.slow
@pytest.mark.feature("A2", "sim")
@pytest.mark.feature("A4", "sim")
def test_several_movers_are_clean():
    assert_clean(
        lambda group: programs.gathered_product(group, movers=2, workers=1, tile=(2, 4, 4)) and None, 3, schedules=20
    )
    assert_clean(lambda group: programs.ring(group, movers=2, workers=1, tile=(2, 2)) and None, 4, schedules=20)


@pytest.mark.slow
@pytest.mark.feature("A3", "sim")
def test_experts_are_clean_with_more_workers_than_experts_on_a_rank():
    assert_clean(lambda group: programs.experts(group, (3, 0, 2), width=2, workers=3) and None, 3, schedules=20)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_fused_kernels_are_clean_on_a_thousand_schedules(name, ranks):
    report = assert_clean(programs.SMALL[name], ranks, schedules=1000)
    assert report.exploration.unconfirmed == 0
