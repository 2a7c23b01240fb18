"""The phase to wait for is taken from the loop index although every trip has a barrier of its own: the odd ones
seem complete before the copy has come."""

import pytest

from peertile.memory_model import Cmp
from peertile.sim.explore import explore
from peertile.sim.scripts import Cell, script_case
from peertile.sim.verdicts import Race


@pytest.mark.parametrize("by_index", [True, False])
def test_a_fresh_barrier_is_waited_for_in_its_first_phase(by_index: bool) -> None:
    tiles = [Cell(f"tile {k}") for k in range(4)]
    bars = [Cell(f"bar {k}") for k in range(4)]

    def engine(p):
        for tile, bar in zip(tiles, bars, strict=True):
            p.write(tile)
            yield from p.put(bar, 1)

    def user(p):
        for k, (tile, bar) in enumerate(zip(tiles, bars, strict=True)):
            phase = k & 1 if by_index else 0
            # The phase with parity `phase` is complete once the barrier is not in it any more.
            yield from p.wait(bar, phase, Cmp.NE)
            p.read(tile)

    # Where the copy was faster, the wrong phase is waited for in vain: the other fault of the same mistake.
    report = explore(script_case([engine, user]), 50, stop_at=2)
    assert report.clean == (not by_index)
    if by_index:
        races = [v for v in report.verdicts if isinstance(v, Race)]
        assert races
        assert races[0].later.object.startswith(("tile 1", "tile 3"))
