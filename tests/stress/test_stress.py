"""Protocols over many rounds with random stalls: no wrong word, no hang. The long tier has 100,000 rounds."""

import pytest
import stress_ranks

import peertile as pt


def spawn(function, ranks, *args, model):
    assert pt.spawn(function, ranks, args, model=model, timeout_s=1500) == [0] * ranks


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("ranks", [2, 3])
def test_mailbox_over_a_thousand_rounds(ranks, depth):
    spawn(stress_ranks.mailbox, ranks, depth, 2, 1000, 4, model=pt.RankModel.THREADS)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("kind", sorted(stress_ranks.LINKS))
def test_links_over_a_thousand_rounds(kind, ahead):
    spawn(stress_ranks.links, 3, kind, 2, ahead, 1000, 4, model=pt.RankModel.PROCESSES)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("depth", "ahead"), [(1, 1), (2, 1), (2, 2), (4, 2), (8, 3)])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("kind", sorted(stress_ranks.LINKS))
def test_links_over_many_rounds(kind, ranks, depth, ahead):
    spawn(stress_ranks.links, ranks, kind, depth, min(ahead, 2), 20_000, 10, model=pt.RankModel.PROCESSES)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", ["signals", "barriers", "flags"])
def test_signals_and_barriers_over_a_thousand_rounds(kind, ranks):
    spawn(getattr(stress_ranks, kind), ranks, 3, 1000, 4, model=pt.RankModel.PROCESSES)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_mailbox_over_a_hundred_thousand_rounds(ranks, depth):
    spawn(stress_ranks.mailbox, ranks, depth, 2, 100_000, 10, model=pt.RankModel.PROCESSES)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", ["signals", "barriers", "flags"])
def test_signals_and_barriers_over_many_rounds(kind, ranks):
    spawn(getattr(stress_ranks, kind), ranks, 3, 20_000, 10, model=pt.RankModel.PROCESSES)
