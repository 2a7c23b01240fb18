"""Five thousand rounds between barriers: clocks do not saturate, and nothing is reported."""

import pytest

from peertile.memory_model import Order
from peertile.sim.explore import explore
from peertile.sim.scripts import Cell, script_case
from peertile.sim.verdicts import VerdictKind


def rounds(count: int, skip: int | None = None):
    cells = [Cell(f"cell {k}") for k in range(2)]
    arrived = Cell("arrived")

    def program(k):
        def run(p):
            target = 0
            for i in range(count):
                p.write(cells[k], i)
                for half in range(2):
                    target += 2
                    yield from p.add(arrived, 1, Order.ACQ_REL)
                    if not (i == skip and half == 0 and k == 1):
                        yield from p.wait(arrived, target)
                    if half == 0:
                        p.read(cells[1 - k])

        return run

    return script_case([program(0), program(1)], max_steps=1_000_000)


@pytest.mark.slow
def test_barrier_separated_accesses_stay_ordered() -> None:
    assert explore(rounds(1500), 1, shrinks=0).clean


@pytest.mark.slow
def test_a_late_race_is_still_found() -> None:
    assert [v.kind for v in explore(rounds(700, skip=690), 3, shrinks=0).verdicts] == [VerdictKind.RACE]
