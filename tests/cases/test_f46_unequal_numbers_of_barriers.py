"""Programs go through a grid barrier as often as they have steps, and they have unequally many."""

import pytest

from peertile.memory_model import Order
from peertile.sim.explore import explore
from peertile.sim.scripts import Cell, script_case
from peertile.sim.verdicts import Deadlock


@pytest.mark.parametrize("padded", [True, False])
def test_all_programs_must_arrive_equally_often(padded: bool) -> None:
    arrived = Cell("arrived")

    def program(steps):
        def run(p):
            for k in range(1, steps + 1):
                yield from p.add(arrived, 1, Order.ACQ_REL)
                yield from p.wait(arrived, 2 * k)

        return run

    report = explore(script_case([program(3 if padded else 2), program(3)]), 50)
    assert report.clean == padded
    if not padded:
        verdict = report.verdicts[0]
        assert isinstance(verdict, Deadlock)
        assert "program 1 of the script on rank 0 waits for arrived[0] on rank 0 at_least 6; last saw 5" in str(verdict)
