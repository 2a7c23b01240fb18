"""Litmus tests: the sets of values that relaxed and ordered reads may return, by exhaustive exploration."""

import pytest

from peertile.memory_model import Order, Rmw
from peertile.sim.explore import exhaust
from peertile.sim.scripts import Cell, script_case

RLX, ACQ, REL = Order.RELAXED, Order.ACQUIRE, Order.RELEASE


def outcomes(*programs, stale: bool = True) -> set[tuple[int, ...]]:
    """What the reads of all programs returned, over all schedules."""
    seen: set[tuple[int, ...]] = set()

    def done(actors) -> None:
        seen.add(tuple(value for actor in actors for value in actor.got))

    report = exhaust(script_case(list(programs), stale=stale, done=done))
    assert report.complete, report.verdicts
    return seen


@pytest.mark.sentence("MM-60")
@pytest.mark.feature("C6", "sim")
def test_store_buffering_shows_both_old_values() -> None:
    x, y = Cell("x"), Cell("y")

    def one(p):
        yield from p.put(x, 1, RLX)
        yield from p.get(y, RLX)

    def two(p):
        yield from p.put(y, 1, RLX)
        yield from p.get(x, RLX)

    assert outcomes(one, two) == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert outcomes(one, two, stale=False) == {(0, 1), (1, 0), (1, 1)}


@pytest.mark.parametrize("order", [RLX, ACQ])
@pytest.mark.feature("C6", "sim")
def test_message_passing_returns_the_old_value_only_without_an_acquire(order: Order) -> None:
    x, flag = Cell("x"), Cell("flag")

    def writer(p):
        yield from p.put(x, 1, RLX)
        yield from p.put(flag, 1, REL)

    def reader(p):
        yield from p.wait(flag, 1, order=order)
        yield from p.get(x, RLX)

    assert outcomes(writer, reader) == ({(1,)} if order is ACQ else {(0,), (1,)})


@pytest.mark.sentence("MM-61")
def test_reads_of_one_agent_never_go_back() -> None:
    x = Cell("x")

    def writer(p):
        yield from p.put(x, 1, RLX)
        yield from p.put(x, 2, RLX)

    def reader(p):
        yield from p.get(x, RLX)
        yield from p.get(x, RLX)

    assert outcomes(writer, reader) == {(a, b) for a in range(3) for b in range(a, 3)}


@pytest.mark.sentence("MM-61")
def test_reads_never_go_back_along_happens_before() -> None:
    x, flag = Cell("x"), Cell("flag")

    def writer(p):
        yield from p.put(x, 1, RLX)

    def first(p):
        yield from p.get(x, RLX)
        yield from p.put(flag, 1, REL)

    def second(p):
        yield from p.wait(flag, 1)
        yield from p.get(x, RLX)

    assert outcomes(writer, first, second) == {(0, 0), (0, 1), (1, 1)}


def test_independent_reads_of_independent_writes_may_disagree() -> None:
    x, y = Cell("x"), Cell("y")

    def write(cell):
        def run(p):
            yield from p.put(cell, 1, REL)

        return run

    def read(a, b):
        def run(p):
            yield from p.get(a, ACQ)
            yield from p.get(b, ACQ)

        return run

    assert (1, 0, 1, 0) in outcomes(write(x), write(y), read(x, y), read(y, x))


def test_updates_read_the_newest_value() -> None:
    x = Cell("x")
    seen = set()

    def add(p):
        p.got.append((yield from p.add(x, 1, RLX)))

    def done(actors) -> None:
        seen.add(tuple(sorted(value for actor in actors for value in actor.got)))

    assert exhaust(script_case([add, add, add], done=done)).complete
    assert seen == {(0, 1, 2)}


@pytest.mark.sentence("MM-62")
def test_a_write_becomes_visible_in_finite_time() -> None:
    x = Cell("x")
    trips = []

    def writer(p):
        yield from p.put(x, 1, RLX)

    def poller(p):
        count = 0
        p.program.enter_loop(0)
        while (yield from p.get(x, RLX)) == 0:
            count += 1
            if p.program.back_edge(p.program.site, 0):
                yield True
        trips.append(count)

    case = script_case([writer, poller])
    for seed in range(200):
        assert case.run(seed=seed).verdict is None
    assert max(trips) <= 8


def test_exchanges_are_atomic() -> None:
    lock = Cell("lock")
    seen = set()

    def take(p):
        p.got.append((yield from p.add(lock, 1, Order.ACQ_REL, rmw=Rmw.XCHG)))

    def done(actors) -> None:
        seen.add(tuple(value for actor in actors for value in actor.got))

    assert exhaust(script_case([take, take], done=done)).complete
    assert seen == {(0, 1), (1, 0)}
