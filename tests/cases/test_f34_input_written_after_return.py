"""An all-gather reads the peers' inputs directly; the owner writes its input again as soon as its own call is over.
"Ready" says produced, not consumed."""

import pytest

from peertile.sim.explore import explore
from peertile.sim.scripts import Cell, script_case
from peertile.sim.verdicts import Race


@pytest.mark.parametrize("done_flags", [True, False])
def test_the_owner_must_know_that_its_input_was_read(done_flags: bool) -> None:
    x = [Cell(f"x of {r}", rank=r) for r in range(2)]
    ready = [Cell(f"ready at {r}", rank=r) for r in range(2)]

    def rank(r):
        def run(p):
            p.write(x[r])
            yield from p.put(ready[1 - r], 1)
            yield from p.wait(ready[r], 1)
            p.read(x[1 - r])
            if done_flags:
                yield from p.put(ready[1 - r], 2)
                yield from p.wait(ready[r], 2)
            p.write(x[r], 99)

        return run

    for seed in range(20):
        report = explore(script_case([(0, rank(0)), (1, rank(1))]), 1, seed=seed)
        assert report.clean == done_flags
        if not done_flags:
            assert isinstance(report.verdicts[0], Race)
