"""Whether a fault is found does not depend on the seed where happens-before decides; where values or the order of
admission steer a program, some schedules show it, at a rate that is stated."""

import pytest
from tests.checker.sim_seeds import CERTAIN, STEERED, finds, rate


@pytest.mark.parametrize("name", CERTAIN)
@pytest.mark.feature("C8", "sim")
def test_every_seed_reports_what_happens_before_decides(name: str) -> None:
    assert rate(CERTAIN[name](), 12) == 1.0


@pytest.mark.parametrize("name", STEERED)
@pytest.mark.feature("C8", "sim")
def test_some_seeds_report_what_values_steer(name: str) -> None:
    """The record in benchmarks/records has the rate over 200 seeds; at 5 % fifty schedules miss one time in thirteen."""
    assert 0.05 < rate(STEERED[name](), 60) < 1.0


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CERTAIN, *STEERED])
def test_any_seed_with_fifty_schedules_finds_it(name: str) -> None:
    make = CERTAIN.get(name) or STEERED[name]
    for seed in (0, 10_000, 20_000):
        assert finds(make(), 50, seed)
