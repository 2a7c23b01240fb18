"""A one-shot all-reduce with one staging slot, call after call: the next store comes before a slow peer has summed.
Two slots in turn need nothing else."""

from peertile.sim.explore import explore
from peertile.sim.scripts import Cell, script_case
from peertile.sim.verdicts import Race


def calls(slots: int):
    stage = [[Cell(f"slot {k} of {r}", rank=r) for k in range(slots)] for r in range(2)]
    ready = [Cell(f"ready at {r}", rank=r) for r in range(2)]
    out: list[tuple[int, int, int]] = []

    def rank(r):
        def run(p):
            for e in (1, 2, 3):
                p.write(stage[r][e % slots], 10 * e + r)
                yield from p.put(ready[1 - r], e)
                yield from p.wait(ready[r], e)
                out.append((r, e, p.read(stage[0][e % slots]) + p.read(stage[1][e % slots])))

        return run

    return script_case([(0, rank(0)), (1, rank(1))]), out


def test_one_slot_races_on_every_schedule() -> None:
    for seed in range(20):
        (verdict,) = explore(calls(1)[0], 1, seed=seed).verdicts
        assert isinstance(verdict, Race)
        assert verdict.later.object.startswith("slot 0 of")


def test_two_slots_are_clean_and_give_the_sums() -> None:
    case, out = calls(2)
    assert explore(case, 50).clean
    assert all(value == 20 * e + 1 for _, e, value in out)
