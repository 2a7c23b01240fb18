"""How ranks find out what each may use at once: processors that they share, apart or in part."""

import pytest

import peertile as pt
from peertile.library import communicator


class Met:
    """A group of ranks that may run on the processors of `masks`; asked as the last of them."""

    def __init__(self, masks):
        self.size, self.rank, self.masks = len(masks), len(masks) - 1, masks

    def exchange(self, payload, what):
        assert what == "a test"
        number, word, place = payload.decode().split("|")
        assert (int(number, 16), word, place) == (self.masks[-1], "x86", str(self.rank))
        return [f"{mask:x}|x86|{rank}".encode() for rank, mask in enumerate(self.masks)]


@pytest.mark.feature("A1", "cpu")
@pytest.mark.parametrize(
    ("masks", "each"),
    [
        ([0b1111], 4),
        ([0b1111, 0b1111], 2),
        ([0b0011, 0b1100], 2),  # each on its own: together they have four
        ([0b0111, 0b1110], 2),
        ([0b1, 0b1, 0b1], 1),  # more ranks than processors
        ([0b11, 0b11, 0b11], 1),
        ([(1 << 200) - 1] * 8, 25),
    ],
)
def test_processors_of_all_ranks_are_shared_evenly(monkeypatch, masks, each):
    monkeypatch.setattr(communicator, "_cores", lambda: masks[-1])
    assert communicator.meet(Met(masks), pt.current_device(), "a test", "x86") == (each, ["x86"] * len(masks))
