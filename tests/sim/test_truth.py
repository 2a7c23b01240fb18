"""The rules of happens-before against ground truth by all interleavings, on random tiny programs."""

from random import Random

import pytest
from tests.sim.truth import as_case, deadlocks, is_racy, random_programs

from peertile.sim.explore import exhaust, explore
from peertile.sim.verdicts import VerdictKind


def agrees(programs, case, report) -> None:
    """The verdict is a race exactly where some interleaving has two conflicting accesses side by side."""
    kinds = [verdict.kind for verdict in report.verdicts]
    if is_racy(programs):
        assert kinds == [VerdictKind.RACE], programs
    elif deadlocks(programs):
        assert kinds == [VerdictKind.DEADLOCK], programs
    else:
        assert kinds == [], (programs, str(report.verdicts[0]))


def check(words: str, count: int, seed: int, schedules: int = 1) -> None:
    random = Random(seed)
    for k in range(count):
        programs = random_programs(random, words=words, agents=random.choice([2, 3, 3, 4]))
        case = as_case(programs)
        agrees(programs, case, explore(case, schedules, seed=k, shrinks=0))


@pytest.mark.slow
@pytest.mark.parametrize("words", ["chain", "adds"])
@pytest.mark.sentence("MM-27")
@pytest.mark.sentence("MM-28")
def test_one_schedule_finds_exactly_the_races_of_all_interleavings(words: str, seed: int) -> None:
    check(words, 700, seed)


@pytest.mark.parametrize("words", ["chain", "adds"])
def test_every_schedule_gives_the_same_verdict(words: str, seed: int) -> None:
    random = Random(seed)
    for _ in range(40):
        programs = random_programs(random, words=words)
        case = as_case(programs)
        for k in range(8):
            agrees(programs, case, explore(case, 1, seed=1000 * k, shrinks=0))


@pytest.mark.parametrize("words", ["chain", "adds"])
def test_exhaustive_exploration_agrees_with_ground_truth(words: str, seed: int) -> None:
    random = Random(seed)
    for _ in range(60):
        programs = random_programs(random, words=words, agents=2, length=5)
        case = as_case(programs)
        report = exhaust(case, 3000)
        assert report.complete or report.verdicts
        agrees(programs, case, report)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("words", ["chain", "adds"])
def test_one_schedule_is_exact_on_many_programs(words: str, seed: int) -> None:
    check(words, 100_000, seed)


def counter_programs():
    """The counting programs of the field: producers post to one word, a consumer waits and reads."""
    a, b = [("write", "a"), ("add", "F", 1)], [("write", "b"), ("add", "F", 1)]
    long = [("write", "a"), ("add", "F", 1), ("write", "c"), ("add", "F", 1)]
    read_a, read_b, read_c = ("read", "a"), ("read", "b"), ("read", "c")
    yield "wait 1, read both", [a, b, [("wait", "F", 1), read_a, read_b]], True
    yield "wait 2, read both", [a, b, [("wait", "F", 2), read_a, read_b]], False
    yield "wait 1 then 2, read both", [a, b, [("wait", "F", 1), ("wait", "F", 2), read_a, read_b]], False
    yield "wait 1, read a, wait 2, read b", [a, b, [("wait", "F", 1), read_a, ("wait", "F", 2), read_b]], True
    yield (
        "one producer, two rounds",
        [
            [("write", "a"), ("add", "F", 1), ("write", "b"), ("add", "F", 1)],
            [("wait", "F", 1), read_a, ("wait", "F", 2), read_b],
        ],
        False,
    )
    yield "two producers, wait 3, read all", [long, b, [("wait", "F", 3), read_a, read_b, read_c]], False
    yield "two producers, wait 2 of 3, read b", [long, b, [("wait", "F", 2), read_a, read_b]], True
    yield "two producers, wait 2 of 3, read a", [long, b, [("wait", "F", 2), read_a]], False


@pytest.mark.parametrize(
    ("programs", "racy"), [(p, r) for _, p, r in counter_programs()], ids=[n for n, _, _ in counter_programs()]
)
def test_counting_waits_are_ordered_after_what_they_need(programs, racy: bool) -> None:
    assert is_racy(programs) == racy
    for k in range(30):
        report = explore(as_case(programs), 1, seed=k)
        assert bool(report.verdicts) == racy
        assert report.unconfirmed == 0
