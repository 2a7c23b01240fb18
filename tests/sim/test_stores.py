"""Two stores to one word have to be ordered (MM-43), even where nobody minds which of them was the last."""

import pytest

from peertile.memory_model import Order
from peertile.sim.explore import explore
from peertile.sim.scripts import Cell, script_case
from peertile.sim.verdicts import VerdictKind, WordMisuse


def two_writers(told: bool):
    word, flag = Cell("word"), Cell("flag")

    def first(p):
        yield from p.put(word, 1)
        yield from p.put(flag, 1)

    def second(p):
        if told:
            yield from p.wait(flag, 1)
        yield from p.put(word, 2)

    return script_case([first, second])


@pytest.mark.sentence("MM-43")
@pytest.mark.feature("C4", "sim")
def test_two_stores_that_nothing_orders_are_reported_on_every_schedule() -> None:
    for seed in range(20):
        (verdict,) = explore(two_writers(told=False), 1, seed=seed, shrinks=0).verdicts
        assert isinstance(verdict, WordMisuse)
        assert verdict.headline == "word: word[0] on rank 0: two stores to it are not ordered"
        assert {access.program for access in verdict.accesses()} == {0, 1}
        assert "repair: give each writer a word of its own, or use an atomic read-modify-write" in str(verdict)


@pytest.mark.sentence("MM-43")
def test_two_writers_of_whom_one_waits_for_the_other_are_silent() -> None:
    report = explore(two_writers(told=True), 50)
    assert report.clean
    assert report.unconfirmed == 0


def test_a_lock_that_is_given_back_by_a_store_is_silent() -> None:
    lock = Cell("lock")

    def program(p):
        p.program.enter_loop(0)
        while (yield from p.swap(lock, 0, 1)) != 0:
            if p.program.back_edge(p.program.site, 0):
                yield True
        yield from p.put(lock, 0)

    report = explore(script_case([program] * 3), 50)
    assert report.clean, str(report.verdicts[0])


def test_a_race_that_comes_of_it_is_told_first() -> None:
    x, word = Cell("x", start=None), Cell("word")

    def writer(p):
        p.write(x)
        yield from p.put(word, 1)

    def other(p):
        yield from p.put(word, 1)

    def reader(p):
        yield from p.wait(word, 1)
        p.read(x)

    kinds = {v.kind for seed in range(20) for v in explore(script_case([writer, other, reader]), 1, seed=seed).verdicts}
    assert VerdictKind.RACE in kinds or VerdictKind.NEVER_WRITTEN in kinds


@pytest.mark.sentence("MM-43")
def test_who_has_read_a_store_may_store_behind_it_whatever_its_order() -> None:
    word = Cell("word")

    def fills(p):
        yield from p.put(word, 1, order=Order.RELAXED)

    def empties(p):
        while (yield from p.get(word, order=Order.RELAXED)) == 0:
            pass
        yield from p.put(word, 0, order=Order.RELAXED)

    report = explore(script_case([fills, empties]), 20)
    assert report.clean
