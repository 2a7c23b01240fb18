"""Two waves share the word that holds the phase: one flips it while the other has not read it yet."""

import pytest

from peertile.memory_model import Order
from peertile.sim.explore import explore
from peertile.sim.scripts import Cell, script_case
from peertile.sim.verdicts import Race


@pytest.mark.parametrize("own", [True, False])
def test_a_shared_phase_races_and_an_own_one_does_not(own: bool) -> None:
    phases = [Cell(f"phase {k}") for k in range(2)] if own else [Cell("phase")] * 2
    arrived = Cell("arrived")

    def wave(k):
        def run(p):
            phase = p.read(phases[k])
            yield from p.add(arrived, 1, Order.ACQ_REL)
            yield from p.wait(arrived, 2)
            p.write(phases[k], phase ^ 1)

        return run

    report = explore(script_case([wave(0), wave(1)]), 50)
    assert report.clean == own
    if not own:
        assert isinstance(report.verdicts[0], Race)
        assert report.verdicts[0].later.object == "phase of rank 0"
