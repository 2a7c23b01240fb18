"""Mailboxes with links of their own: ring, broadcast, subsets; rounds for some ranks; posts ahead; signatures."""

import itertools

import link_ranks
import pytest

import peertile as pt
from peertile.errors import ArgumentError
from peertile.ir.types import Link

pytestmark = pytest.mark.any_device

KINDS = ("all", "ring", "other way", "broadcast", "pair", "chain", "none")


def spawn(function, ranks, *args, model=pt.RankModel.THREADS):
    return pt.spawn(function, ranks, args, model=model, timeout_s=100)


@pytest.mark.sentence("MB-21")
@pytest.mark.feature("P9", "cpu")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_every_graph_carries_its_tiles_at_every_depth(kind, ranks):
    spawn(link_ranks.links_carry, ranks, (kind,), (1, 2, 4), 1, 5, 2)


@pytest.mark.slow
@pytest.mark.sentence("MB-23")
@pytest.mark.feature("P9", "cpu")
@pytest.mark.parametrize("ranks", [2, 3])
def test_posts_ahead_on_every_graph(ranks):
    spawn(link_ranks.links_carry, ranks, KINDS, (2, 4), 2, 7, 2)


@pytest.mark.slow
@pytest.mark.gpus("ranks")
@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("ranks", [2, 4, 5])
def test_every_graph_over_processes(ranks, ahead, device):
    depths = (1, 2, 4, 8) if ahead == 1 else (2, 4, 8)
    rounds = 50 if device == "cpu" else 12  # beside other tests the GPUs of a pair are rarely theirs at the same time
    spawn(link_ranks.links_carry, ranks, KINDS, depths, ahead, rounds, 4, model=pt.RankModel.PROCESSES)


@pytest.mark.slow
@pytest.mark.sentence("MB-25")
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_last_of_several_puts_to_a_rank_wins(ranks):
    spawn(link_ranks.last_put_wins, ranks, 5)


@pytest.mark.feature("P9", "cpu")
@pytest.mark.parametrize(("kind", "step"), [("all", 1), ("all", 2), ("ring", 1), ("all", 0)])
def test_a_round_with_a_tile_for_one_rank(kind, step):
    spawn(link_ranks.some_get_tiles, 3, kind, step)


@pytest.mark.sentence("MB-22")
def test_a_put_to_a_rank_that_does_not_receive_is_out_of_bounds():
    found = spawn(link_ranks.puts_astray, 3)
    told = [
        f"mailbox box: put: expected a rank that receives from this one, got rank {(rank - 1) % 3}; make the mailbox with "
        "that link (links=), or put to a rank that it has a link to"
        for rank in range(3)
    ]
    line = f"{link_ranks.__file__}:57"
    for rank, (name, text) in enumerate(found):  # who hears of another first says so
        if name == "OutOfBounds":
            assert text == f"{told[rank]} (rank {rank}, program 0, {line}) in astray"
        else:
            assert (name, text) in [("PeerFailed", f"rank {r} failed: OutOfBounds: {told[r]}") for r in range(3)]
    assert "OutOfBounds" in dict(found)


WORDS = {
    "kernel": ("sums_ahead over 3 programs", "sums over 3 programs"),
    "grid": ("sums over 2 programs", "sums over 3 programs"),
    "scalar": (
        "sums over 3 programs with other scalars, constants or extents",
        "sums over 3 programs",
    ),
}


@pytest.mark.native_only
@pytest.mark.gpus(2)
@pytest.mark.sentence("MB-5")
@pytest.mark.feature("P9", "cpu")
@pytest.mark.parametrize("how", WORDS)
def test_a_mismatch_names_both_kernels_and_the_rank(how):
    found = spawn(link_ranks.mismatch, 2, how)
    theirs, mine = WORDS[how]
    other = theirs if how == "scalar" else mine
    expected = {
        0: f"mailbox: rank 1 posted from {other}, this rank runs {mine if how == 'scalar' else theirs}; ",
        1: f"mailbox: rank 0 posted from {theirs}, this rank runs {mine}; ",
    }
    names = [name for name, _ in found]
    assert "SignatureMismatch" in names
    for rank, (name, text) in enumerate(found):
        if name == "SignatureMismatch":
            assert text.startswith(expected[rank])
        else:  # it heard of the other's failure before it looked itself
            assert expected[1 - rank] in text


@pytest.mark.sentence("MB-20")
def test_links_are_equal_on_all_ranks():
    found = spawn(link_ranks.different_links, 3)
    assert [name for name, _ in found] == ["SymmetryError"] * 3
    assert "links and posts_ahead" in found[0][1]


# ---------------------------------------------------------------- graphs on the host


def slow_hops(pairs, size, start, goal):
    """Shortest way by trying every number of steps."""
    reached = {start}
    for steps in range(size + 1):
        if goal in reached:
            return steps
        reached = {d for s, d in pairs if s in reached}
    return float("inf")


@pytest.mark.slow
@pytest.mark.sentence("MB-8")
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_acknowledgement_follows_the_way_back(size):
    everything = [(s, d) for s in range(size) for d in range(size)]
    graphs = itertools.combinations(everything, min(len(everything), 4))
    for pairs in graphs:
        links = pt.Links.of(size, pairs)
        for depth, ahead in ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (8, 3)):
            needed = {(s, d) for s, d in pairs if s != d and depth < ahead * (1 + slow_hops(pairs, size, d, s))}
            assert links.acknowledged(depth, ahead) == needed
            for rank in range(size):
                for other, word in enumerate(links.words(rank, depth, ahead)):
                    assert bool(word & Link.SENDS) == ((rank, other) in pairs)
                    assert bool(word & Link.RECEIVES) == ((other, rank) in pairs)
                    assert bool(word & Link.SENDS_ACKNOWLEDGED) == ((rank, other) in needed)
                    assert bool(word & Link.RECEIVES_ACKNOWLEDGED) == ((other, rank) in needed)


@pytest.mark.sentence("MB-24")
def test_links_between_ranks_that_do_not_exist_are_refused():
    for make in (
        lambda: pt.Links.broadcast(3, 3),
        lambda: pt.Links.among(3, {1, 3}),
        lambda: pt.Links.of(2, [(0, 2)]),
    ):
        with pytest.raises(ArgumentError):
            make()
    with pt.SymmetricHeap(pt.init(), size_bytes=1 << 20) as heap:
        with pytest.raises(ArgumentError) as caught:
            heap.mailbox(tile=4, dtype=pt.f32, programs=1, links=pt.Links.ring(2))
        assert str(caught.value) == "links: expected links between 1 ranks, as the group has, got 2"
        with pytest.raises(ArgumentError) as caught:
            heap.mailbox(tile=4, dtype=pt.f32, programs=1, depth=2, posts_ahead=3)
        assert str(caught.value) == "posts_ahead: expected 1 to depth = 2, got 3; a round needs a slot of its own"
