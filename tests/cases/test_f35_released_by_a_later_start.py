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


def test_either_order_of_the_two_accesses_is_offered_as_the_repair() -> None:
    """A write that comes too early is mended where it is made, not by its reader: a report cannot know which is meant."""
    found = {explore(calls(early=True), 1, seed=seed, shrinks=0).verdicts[0].repair for seed in range(20)}
    assert {text.split()[0] for text in found} == {"let", "notify"}
    one, other = "program 0 of the script on rank 0", "program 0 of the script on rank 1"
    assert found <= {
        text
        for first, second in ((one, other), (other, one))
        for text in (
            f"let {second} wait for that release before its access; or the other way round, if that is the order that "
            f"is meant: notify after its access, and let {first} wait for that",
            f"notify after the access of {first}, and wait for it before the access of {second}; or the other way "
            "round, if that is the order that is meant",
        )
    }
