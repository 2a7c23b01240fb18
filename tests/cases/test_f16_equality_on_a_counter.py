"""A barrier waits for equality with the round: a fast rank is in the next round before the slow one has looked."""

import pytest

from peertile.memory_model import Cmp
from peertile.sim.explore import explore
from peertile.sim.scripts import Cell, script_case
from peertile.sim.verdicts import Deadlock


def rounds(cmp: Cmp, words: int):
    cells = [[Cell(f"word {k} of {r}", rank=r) for k in range(words)] for r in range(2)]

    def rank(r):
        def run(p):
            for v in (1, 2, 3):
                yield from p.put(cells[1 - r][v % words], v)
                yield from p.wait(cells[r][v % words], v, cmp)

        return run

    return script_case([(0, rank(0)), (1, rank(1))])


def test_equality_misses_a_value_that_came_and_went() -> None:
    verdict = explore(rounds(Cmp.EQ, 1), 200).verdicts[0]
    assert isinstance(verdict, Deadlock)
    assert "eq 1; last saw 2" in str(verdict) or "eq 2; last saw 3" in str(verdict)


@pytest.mark.parametrize(("cmp", "words"), [(Cmp.GE, 1), (Cmp.AT_LEAST, 1), (Cmp.EQ, 2)])
def test_at_least_or_two_words_in_turn_are_clean(cmp: Cmp, words: int) -> None:
    assert explore(rounds(cmp, words), 200).clean
