"""The loser of a race for a word probes it with exchanges, and so overwrites the mark that it waits for."""

from peertile.memory_model import Order, Rmw
from peertile.sim.explore import explore
from peertile.sim.scripts import Cell, script_case
from peertile.sim.verdicts import VerdictKind


def case(compare: bool):
    lock = Cell("lock")

    def take(p, value):
        return (yield from p.add(lock, value, Order.ACQ_REL, rmw=Rmw.XCHG))

    def program(p):
        if compare:
            old = yield from p.swap(lock, 0, 1)
        else:
            old = yield from take(p, 1)
        if old == 0:
            if compare:
                yield from p.add(lock, 1, Order.ACQ_REL)
            else:
                yield from take(p, 2)
        elif compare:
            p.program.enter_loop(0)
            while (yield from p.get(lock)) != 2:
                if p.program.back_edge(p.program.site, 0):
                    yield True
        else:
            p.program.enter_loop(0)
            while (yield from take(p, 3)) != 2:
                if p.program.back_edge(p.program.site, 0):
                    yield True

    return script_case([program, program], max_steps=2000)


def test_exchanges_hang_on_some_schedule() -> None:
    report = explore(case(False), 200, shrinks=0)
    assert [v.kind for v in report.verdicts] == [VerdictKind.DEADLOCK]
    assert "lock" in str(report.verdicts[0])


def test_compare_and_swap_is_clean() -> None:
    assert explore(case(True), 200).clean
