"""Peers store single bytes of a word that its owner polls whole: accesses of two sizes are not atomic to each other.
With a word for each writer nothing is wrong."""

from peertile.dtypes import u8, u32, u64
from peertile.memory_model import Cmp
from peertile.sim.explore import explore
from peertile.sim.scripts import Cell, script_case
from peertile.sim.verdicts import Race


def test_bytes_and_the_whole_word_race() -> None:
    word = Cell("word", dtype=u64)
    byte = Cell("byte", dtype=u8, at=word)

    def owner(p):
        yield from p.wait(word, 1, Cmp.GE)

    def peer(p):
        yield from p.put(byte, 1)

    verdict = explore(script_case([(0, owner), (1, peer)]), 20).verdicts[0]
    assert isinstance(verdict, Race)
    assert "their sizes differ, 8 and 1 bytes" in verdict.why or "their sizes differ, 1 and 8 bytes" in verdict.why


def test_one_word_for_each_writer_is_clean() -> None:
    data = [Cell(f"data of {r}", rank=r) for r in (1, 2)]
    words = [Cell(f"word of {r}", dtype=u32) for r in (1, 2)]

    def owner(p):
        for word in words:
            yield from p.wait(word, 1)
        for cell in data:
            p.read(cell)

    def peer(k):
        def run(p):
            p.write(data[k])
            yield from p.put(words[k], 1)

        return run

    assert explore(script_case([(0, owner), (1, peer(0)), (2, peer(1))]), 50).clean
