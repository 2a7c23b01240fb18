"""The colour of a round is a scalar that the host passes; replayed, the wait is satisfied by the round before."""

from peertile.memory_model import Cmp
from peertile.sim.explore import explore
from peertile.sim.scripts import Cell, script_case
from peertile.sim.verdicts import Race


def replays(counted: bool):
    slots = [[Cell(f"slot {k} of {r}", rank=r) for k in range(2)] for r in range(2)]
    flags = [Cell(f"flag at {r}", rank=r) for r in range(2)]

    def rank(r):
        def run(p):
            for replay in (1, 2):
                slot = replay % 2 if counted else 0
                colour = replay if counted else 1
                p.write(slots[r][slot], 100 * replay + r)
                yield from p.put(flags[1 - r], colour)
                yield from p.wait(flags[r], colour, Cmp.AT_LEAST if counted else Cmp.EQ)
                value = p.read(slots[1 - r][slot])
                assert not counted or value == 100 * replay + 1 - r

        return run

    return script_case([(0, rank(0)), (1, rank(1))])


def test_a_frozen_colour_races_in_the_second_replay() -> None:
    assert isinstance(explore(replays(counted=False), 50).verdicts[0], Race)


def test_epochs_in_device_memory_and_two_slots_are_clean() -> None:
    assert explore(replays(counted=True), 100).clean
