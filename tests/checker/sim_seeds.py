"""Faulty programs by how their verdicts depend on the schedule, and the rate at which single schedules show them."""

from pathlib import Path

from peertile.checker.check import declared
from peertile.checker.program import ProgramCase
from peertile.memory_model import Cmp, Order, Rmw
from peertile.sim.runs import Case
from peertile.sim.scripts import Cell, script_case

__all__ = ["CERTAIN", "STEERED", "finds", "rate"]

RACY = Path(__file__).parents[2] / "examples" / "racy"


def example(name: str) -> Case:
    path = RACY / f"{name}.py"
    small = declared(path) or {}
    return ProgramCase(path, small.pop("ranks", 2), arguments=small)


def rate(case: Case, seeds: int, first: int = 0) -> float:
    """The share of single schedules that end in a fault."""
    return sum(case.run(seed=first + k).verdict is not None for k in range(seeds)) / seeds


def finds(case: Case, seeds: int, first: int) -> bool:
    """Whether one of so many schedules ends in a fault; those behind it are not run."""
    return any(case.run(seed=first + k).verdict is not None for k in range(seeds))


def counter_barrier() -> Case:
    """A barrier of one counter that its last leaver resets, entered twice."""
    arrived, left = Cell("arrived"), Cell("left")

    def program(p):
        for _ in range(2):
            yield from p.add(arrived, 1, Order.ACQ_REL)
            yield from p.wait(arrived, 2, Cmp.EQ)
            if (yield from p.add(left, 1, Order.ACQ_REL)) == 1:
                yield from p.add(arrived, 0, Order.ACQ_REL, rmw=Rmw.XCHG)
                yield from p.add(left, 0, Order.ACQ_REL, rmw=Rmw.XCHG)

    return script_case([program, program])


def probing_exchange() -> Case:
    """A lock whose prober exchanges away the mark of its owner."""
    lock = Cell("lock")

    def program(p):
        if (yield from p.add(lock, 1, Order.ACQ_REL, rmw=Rmw.XCHG)) == 0:
            yield from p.add(lock, 2, Order.ACQ_REL, rmw=Rmw.XCHG)
        else:
            yield from p.wait(lock, 2, Cmp.EQ)

    return script_case([program, program])


def epoch_word() -> Case:
    """One word counts two releases, and the reader waits for the first and reads what the second publishes."""
    a, b, word = Cell("a"), Cell("b"), Cell("word")

    def writer(p):
        p.write(a)
        yield from p.put(word, 1)
        p.write(b)
        yield from p.put(word, 2)

    def reader(p):
        yield from p.wait(word, 1)
        p.read(b)

    return script_case([(0, writer), (1, reader)])


CERTAIN = {
    name: lambda name=name: example(name)
    for name in ("barrier_without_sync", "counting", "early_reuse", "lost_notify", "missing_acquire", "wrong_epoch")
} | {"epoch_word": epoch_word}
STEERED = {
    "equality_wait": lambda: example("equality_wait"),
    "counter_barrier": counter_barrier,
    "probing_exchange": probing_exchange,
}
