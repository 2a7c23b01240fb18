"""More programs wait for each other than a device can hold at once."""

import peertile as pt
import peertile.language as T
from peertile.checker.check import check
from peertile.sim.explore import explore
from peertile.sim.scripts import Cell, script_case
from peertile.sim.verdicts import Deadlock


def arrivals(programs: int, places: int):
    arrived = Cell("arrived")

    def program(p):
        yield from p.add(arrived)
        yield from p.wait(arrived, programs)

    return script_case([program] * programs, resident=places)


def test_three_programs_on_two_places_hang_and_two_do_not() -> None:
    verdict = explore(arrivals(3, 2), 20).verdicts[0]
    assert isinstance(verdict, Deadlock)
    assert sum("a place to run" in w.what for w in verdict.waiters) == 1
    assert explore(arrivals(2, 2), 50).clean


def test_the_launch_is_refused_with_the_number_that_fits() -> None:
    @pt.kernel
    def meet(z: T.Exclusive):
        z.store(T.full((1,), 1, T.i64))
        T.sync_programs()

    def main(group) -> None:
        z = pt.zeros((3,), pt.i64)
        meet(z.partition(1)).sync()

    (verdict,) = check(main, 1, schedules=1, resident=2).verdicts
    assert verdict.headline == (
        "launch: rank 0: LaunchError: meet: its 3 programs wait for each other and must be resident at once, "
        "sim:0 holds 2 of them; use a grid of at most 2 programs"
    )
    assert check(main, 1, schedules=5, resident=3).clean
