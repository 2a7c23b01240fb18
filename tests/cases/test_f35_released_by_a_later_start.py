"""No barrier at the end of a call, but inputs stay unwritten until the next call's start barrier: that proves that
the peers are done with them, and must not be reported."""

from peertile.sim.explore import explore
from peertile.sim.scripts import Cell, script_case
from peertile.sim.verdicts import Race


def calls(early: bool):
    x = [[Cell(f"x{k} of {r}", rank=r) for k in range(2)] for r in range(2)]
    ready = [Cell(f"ready at {r}", rank=r) for r in range(2)]

    def rank(r):
        def run(p):
            for call in range(1, 5):
                if early and call > 1:
                    p.write(x[r][(call - 1) % 2], call)  # still leased by the call before
                p.write(x[r][call % 2], call)
                yield from p.put(ready[1 - r], call)
                yield from p.wait(ready[r], call)
                p.read(x[1 - r][call % 2])

        return run

    return script_case([(0, rank(0)), (1, rank(1))])


def test_a_later_start_barrier_gives_the_inputs_back() -> None:
    assert explore(calls(early=False), 100).clean


def test_writing_before_that_is_a_race() -> None:
    assert isinstance(explore(calls(early=True), 5).verdicts[0], Race)
