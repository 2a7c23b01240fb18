"""Exhaustive exploration of relaxed tiles, fences, waits and polls against ground truth: the values of every run, the
races and the deadlocks."""

from random import Random

import pytest
from tests.sim.tile_truth import as_case, outcomes, random_programs

from peertile.memory_model import Order
from peertile.sim.explore import exhaust
from peertile.sim.verdicts import VerdictKind


def agrees(programs) -> None:
    """Without a fault: exactly the values that some interleaving gives. With one: a report."""
    expected, is_racy, is_stuck = outcomes(programs)
    got: set = set()
    report = exhaust(as_case(programs, got), 200_000)
    if is_racy or is_stuck:
        kinds = {VerdictKind.RACE} if is_racy else set()
        kinds |= {VerdictKind.DEADLOCK} if is_stuck else set()
        assert [verdict.kind in kinds for verdict in report.verdicts] == [True], (programs, report.verdicts)
        return
    assert report.clean, (programs, str(report.verdicts[0]))
    assert report.complete, programs
    assert got == expected, (programs, "missed", expected - got, "wrong", got - expected)


def check(count: int, seed: int, *, agents: int, length: int, waits: bool) -> None:
    random = Random(seed)
    for _ in range(count):
        agrees(random_programs(random, agents=agents, length=length, waits=waits))


@pytest.mark.parametrize("waits", [False, True])
def test_every_value_and_fault_of_two_programs_is_found(waits: bool, seed: int) -> None:
    check(60, seed, agents=2, length=5, waits=waits)


@pytest.mark.slow
@pytest.mark.parametrize("waits", [False, True])
def test_every_value_and_fault_of_three_programs_is_found(waits: bool, seed: int) -> None:
    check(60, seed, agents=3, length=3, waits=waits)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("waits", [False, True])
def test_every_value_and_fault_of_many_programs_is_found(waits: bool, seed: int) -> None:
    check(3000, seed, agents=2, length=6, waits=waits)
    check(3000, seed, agents=3, length=3, waits=waits)


def test_what_is_asleep_does_not_lead_to_what_comes_behind_the_step_of_another() -> None:
    """The read of the second program comes behind the store of the first, which has read what the third stored."""
    programs = [[("see", Order.ACQUIRE), ("put_tile", 1)], [("get", 1)], [("set", 3, Order.RELEASE)]]
    expected, _, _ = outcomes(programs)
    assert ((3,), (1,), ()) in expected
    agrees(programs)


def test_who_waits_for_any_of_two_adds_sees_what_came_before_one_of_them() -> None:
    """It is ordered after neither, but there is no run in which it sees nothing of both."""
    add, wait = ("add", 1, Order.RELEASE), ("wait", 1, Order.ACQUIRE)
    programs = [[("add_tile", 1), add], [("add_tile", 3), add], [wait, ("get", 0)]]
    expected, _, _ = outcomes(programs)
    assert {got[0] for *_, got in expected} == {1, 3, 4}
    agrees(programs)


def test_a_wait_may_read_a_relaxed_store_behind_the_release_that_satisfied_it() -> None:
    wait, release, relaxed = ("wait", 1, Order.ACQUIRE), ("set", 1, Order.RELEASE), ("set", 2, Order.RELAXED)
    agrees([[wait, ("get", 0)], [("put_tile", 1), release, relaxed]])
    agrees([[wait, ("read",)], [("write",), release, relaxed]])
    agrees([[wait, ("read",)], [("write",), release, ("fence",), relaxed]])
    assert not outcomes([[wait, ("read",)], [("write",), release, ("fence",), relaxed]])[1]
    assert outcomes([[wait, ("read",)], [("write",), release, relaxed]])[1]


@pytest.mark.parametrize(
    "look", [("see", Order.RELAXED), ("poll", 1, Order.RELAXED), ("told", 1, Order.RELAXED), ("wait", 2, Order.RELAXED)]
)
@pytest.mark.parametrize("first", [Order.RELAXED, Order.RELEASE])
def test_a_wait_reads_nothing_older_than_what_its_agent_has_read_before(look, first: Order) -> None:
    """Who has seen the second store knows by the wait all that came before it, though the first one would have done."""
    stores = [("set", 1, first), ("put_tile", 1), ("set", 2, Order.RELEASE)]
    agrees([[look, ("wait", 1, Order.ACQUIRE), ("get_tile",)], stores])
