"""Who wins, from figures alone: properties that hold for any figures."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peertile.errors import ArgumentError
from peertile.tuning.rules import Rules, batch_calls, finalists, group_bests, group_medians, order, winner

seconds = st.floats(1e-7, 10.0)
medians = st.lists(seconds, min_size=1, max_size=8).map(lambda values: dict(enumerate(values)))
bands = st.floats(0.0, 0.5)


@pytest.mark.feature("A7", "cpu")
@given(medians, bands)
def test_the_winner_is_within_the_tie_band_and_nothing_listed_before_it_is(found, tie):
    best = winner(found, tie)
    least = min(found.values())
    assert found[best] <= least * (1 + tie)
    assert all(found[k] > least * (1 + tie) for k in found if k < best)


@given(medians, bands, st.integers(-20, 20))
def test_units_do_not_matter(found, tie, exponent):
    assert winner({k: v * 2.0**exponent for k, v in found.items()}, tie) == winner(found, tie)


@given(medians, bands, seconds)
def test_a_slower_candidate_at_the_end_changes_nothing(found, tie, more):
    slower = found | {len(found): max(found.values()) * (1 + more)}
    assert winner(slower, tie) == winner(found, tie)


@given(medians, bands)
def test_whoever_wins_was_in_the_final(found, tie):
    assert winner(found, tie) in finalists(found, 1.0 + tie)
    assert finalists(found, 1e9) == list(found)


@given(st.lists(st.lists(seconds, min_size=3, max_size=3), min_size=1, max_size=9))
def test_a_median_of_the_group_is_that_of_its_slowest_rank(rounds):
    ranks = list(zip(*rounds, strict=True))
    got = group_medians({4: rounds, 5: []})
    assert list(got) == [4]
    assert got[4] in list(map(_middle, ranks))
    assert all(got[4] >= _middle(rank) for rank in ranks)
    assert group_bests({4: rounds})[4] == max(min(rank) for rank in ranks)


def _middle(values):
    ordered = sorted(values)
    return 0.5 * (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2])


def test_one_disturbed_round_keeps_nobody_out_of_the_final():
    figures = {0: [[1.0], [90.0]], 1: [[1.1], [1.1]], 2: [[1.5], [1.5]]}
    assert finalists(group_bests(figures), 1.3) == [0, 1]


def test_every_other_round_goes_backwards():
    assert [order([0, 2, 5], turn) for turn in range(3)] == [[0, 2, 5], [5, 2, 0], [0, 2, 5]]


@given(st.floats(0.0, 1e3), st.floats(1e-6, 1.0))
def test_a_batch_has_between_one_and_a_thousand_calls(call_s, batch_s):
    calls = batch_calls(call_s, batch_s)
    assert 1 <= calls <= 1000
    assert calls == 1 or calls * call_s <= batch_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rounds": 0}, "Rules(rounds): expected an integer >= 1, got 0"),
        ({"screen": 1.5}, "Rules(screen): expected an integer >= 1, got 1.5"),
        ({"close": 0.9}, "Rules(close): expected a number >= 1, got 0.9"),
        ({"tie": -0.1}, "Rules(tie): expected a number >= 0, got -0.1"),
        ({"batch_s": 0}, "Rules(batch_s): expected a number > 0, got 0"),
        ({"budget_s": float("inf")}, "Rules(budget_s): expected a number > 0, got inf"),
        ({"tolerance": "loose"}, "Rules(tolerance): expected a number >= 0, got 'loose'"),
        ({"budget_s": True}, "Rules(budget_s): expected a number > 0, got True"),
    ],
)
def test_wrong_rules_are_named(wrong, message):
    with pytest.raises(ArgumentError) as caught:
        Rules(**wrong)
    assert str(caught.value) == message
