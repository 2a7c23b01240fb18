"""One rank adds to a word, another stores into it."""

from peertile.memory_model import Cmp
from peertile.sim.explore import explore
from peertile.sim.scripts import Cell, script_case
from peertile.sim.verdicts import WordMisuse


def test_mixing_the_two_is_reported() -> None:
    word = Cell("word")

    def adds(p):
        yield from p.add(word, 1)

    def stores(p):
        yield from p.put(word, 8)

    def waits(p):
        yield from p.wait(word, 9, Cmp.EQ)

    for seed in range(20):
        (verdict,) = explore(script_case([(1, adds), (2, stores), (0, waits)]), 1, seed=seed).verdicts
        assert isinstance(verdict, WordMisuse)
        assert verdict.headline == "word: word[0] on rank 0: it is written by stores and by adds"
        assert len(verdict.accesses()) == 2


def test_adds_alone_are_clean() -> None:
    word = Cell("word")

    def adds(p):
        yield from p.add(word, 1)

    def waits(p):
        assert (yield from p.wait(word, 2)) == 2

    assert explore(script_case([(1, adds), (2, adds), (0, waits)]), 50).clean
