"""A rank chooses another path than the others from something that only it sees."""

from peertile.checker.check import check
from peertile.sim.verdicts import VerdictKind


def program(agreed: bool):
    def main(group) -> None:
        fast = group.rank < 3
        if agreed:
            fast = all(part == b"fast" for part in group.exchange(b"fast" if fast else b"slow", "path"))
        group.agree("fast" if fast else "slow", "the algorithm")

    return main


def test_the_ranks_and_their_choices_are_named() -> None:
    (verdict,) = check(program(agreed=False), 4, schedules=1).verdicts
    assert verdict.kind is VerdictKind.COLLECTIVE
    assert "ranks disagree about the algorithm: ranks 0, 1, 2: 'fast'; rank 3: 'slow'" in verdict.headline


def test_a_choice_from_agreed_facts_is_clean() -> None:
    assert check(program(agreed=True), 4, schedules=20).clean
