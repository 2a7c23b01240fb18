"""A grid barrier of one counter that the last one to leave resets: who is fast enters the next round first."""

from peertile.memory_model import Cmp, Order, Rmw
from peertile.sim.explore import explore
from peertile.sim.scripts import Cell, script_case
from peertile.sim.verdicts import VerdictKind

N = 2


def counter_form():
    arrive, leave = Cell("arrive"), Cell("leave")

    def program(p):
        for _ in range(2):
            yield from p.add(arrive, 1, Order.ACQ_REL)
            yield from p.wait(arrive, N, Cmp.EQ)
            if (yield from p.add(leave, 1, Order.ACQ_REL)) == N - 1:
                yield from p.add(arrive, 0, Order.ACQ_REL, rmw=Rmw.XCHG)
                yield from p.add(leave, 0, Order.ACQ_REL, rmw=Rmw.XCHG)

    return script_case([program] * N)


def generation_form():
    arrive, generation = Cell("arrive"), Cell("generation")

    def program(p):
        for k in range(1, 4):
            if (yield from p.add(arrive, 1, Order.ACQ_REL)) == k * N - 1:
                yield from p.put(generation, k)
            yield from p.wait(generation, k)

    return script_case([program] * N)


def test_the_counter_form_hangs_on_some_schedule() -> None:
    report = explore(counter_form(), 300)
    assert [v.kind for v in report.verdicts] == [VerdictKind.DEADLOCK]


def test_generations_are_clean() -> None:
    assert explore(generation_form(), 200).clean
