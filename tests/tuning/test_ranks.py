"""Autotuning on several ranks: one winner, one opinion about every candidate, and nobody waits for ever."""

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import peertile as pt
from peertile.errors import PeerFailed, SymmetryError, UnsupportedError
from peertile.library.collectives import Collectives
from peertile.library.selection import Algorithm
from peertile.tuning import Rules
from peertile.tuning.rules import winner

sys.path.insert(0, str(Path(__file__).parent))

import tuning_ranks

pytestmark = [pytest.mark.any_device]

QUICK = Rules(screen=1, rounds=3, batch_s=1.0)
THREADS = pt.RankModel.THREADS


def deciding(clock, folder, costs, *, fails=lambda rank, k: False, wrong=lambda rank, k: False, names=None, **options):
    """A rank function: tunes a fill whose way k takes `costs[rank][k]` seconds on the rank."""

    def way(group, k, out):
        clock.advance(costs[group.rank][k])
        if fails(group.rank, k):
            raise ValueError(f"rank {group.rank} cannot do {k}")
        return pt.op.fill(out, 5 if wrong(group.rank, k) else 3).map(lambda: out)

    def main(group):
        op = pt.autotune(
            candidates=range(len(costs[0])),
            key=lambda group, out: 0,
            group=lambda group, out: group,
            rules=QUICK,
            folder=folder / str(group.rank),
            clock=clock,
            name="fill",
            **options,
        )(lambda k, group, out: way(group, k, out))
        found = op.decide(group, pt.zeros(4, pt.f32))
        return found.index, found.seconds, found.dropped, found.is_new

    return main


@pytest.mark.feature("A7", "cpu")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_one_winner_for_all_by_the_slowest_rank(clock, tmp_path, ranks):
    # Way 0 is the fastest on rank 0 and the slowest on the last one; way 1 is never bad.
    costs = [[0.125, 0.25, 0.5] for _ in range(ranks)]
    costs[-1] = [1.0, 0.25, 0.5]
    said = pt.spawn(deciding(clock, tmp_path, costs), ranks, model=THREADS, timeout_s=60)
    assert said == [said[0]] * ranks
    index, seconds, dropped, is_new = said[0]
    assert (index, dropped, is_new) == (1, {}, True)
    assert seconds == {"0": 1.0, "1": 0.25, "2": 0.5}
    again = pt.spawn(deciding(clock, tmp_path, costs), ranks, model=THREADS, timeout_s=60)
    assert again == [(1, seconds, {}, False)] * ranks
    assert [len(list((tmp_path / str(r)).glob("*.json"))) for r in range(ranks)] == [1] + [0] * (
        ranks - 1
    ) or ranks == 1


@pytest.mark.feature("A7", "cpu")
@settings(max_examples=12)
@given(st.integers(1, 4).flatmap(
    lambda ranks: st.lists(
        st.lists(st.integers(1, 64), min_size=3, max_size=3), min_size=ranks, max_size=ranks
    )
))  # fmt: skip
@pytest.mark.slow
def test_ranks_decide_alike_and_by_the_rule_whatever_they_measure(tmp_path_factory, costs):
    clock = _clock()
    costs = [[c / 64 for c in rank] for rank in costs]
    main = deciding(clock, tmp_path_factory.mktemp("tuning"), costs)
    said = pt.spawn(main, len(costs), model=THREADS, timeout_s=60)
    assert said == [said[0]] * len(costs)
    slowest = {k: max(rank[k] for rank in costs) for k in range(3)}
    assert said[0][0] == winner(slowest, QUICK.tie)


def _clock():
    from tests.tuning.conftest import FakeClock

    return FakeClock()


@pytest.mark.feature("A7", "cpu")
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_candidate_that_fails_or_is_wrong_on_one_rank_is_out_on_all(clock, tmp_path, ranks):
    last = ranks - 1
    main = deciding(
        clock, tmp_path, [[0.25, 0.5, 0.125, 1.0]] * ranks,
        fails=lambda rank, k: (rank, k) == (last, 0), wrong=lambda rank, k: (rank, k) == (0, 2),
    )  # fmt: skip
    said = pt.spawn(main, ranks, model=THREADS, timeout_s=60)
    assert said == [said[0]] * ranks
    assert said[0][0] == 1
    assert said[0][2] == {
        "0": f"rank {last}: ValueError: rank {last} cannot do 0",
        "2": "rank 0: expected 3.0 at [0] as the reference gives, got 5.0; 4 of 4 elements differ",
    }


@pytest.mark.native_only  # goes on after a failure
@pytest.mark.slow
@pytest.mark.feature("A7", "cpu")
def test_a_rank_that_fails_releases_those_that_wait_for_it_in_a_kernel(tmp_path):
    def main(group):
        def way(k, comm, x, out):
            if (group.rank, k) == (1, 1):
                raise ValueError("not here")
            return comm.all_reduce(x, out, algorithm=[Algorithm.PIPELINED, Algorithm.TWO_SHOT, Algorithm.RING][k])

        op = pt.autotune(
            candidates=[0, 1, 2], key=lambda *_: 0, group=group, rules=tuning_ranks.QUICK, folder=tmp_path, name="way"
        )(way)
        with Collectives(group) as comm:
            x, out = pt.full(1000, group.rank + 1, pt.f32), pt.full(1000, -1, pt.f32)
            found = op.decide(comm, x, out)
            return found.dropped, float(op(comm, x, out).sync().numpy().max()), group.generation

    said = pt.spawn(main, 3, model=THREADS, timeout_s=60)
    assert said == [({"1": "rank 1: ValueError: not here"}, 6.0, 1)] * 3


@pytest.mark.native_only  # a machine that is interrupted is gone
@pytest.mark.feature("A7", "cpu")
def test_an_interrupted_rank_releases_the_others_and_a_new_run_goes_on(clock, tmp_path):
    costs = [[0.25, 0.5]] * 2
    runs = []

    def stop(rank, k):
        runs.append(rank)
        if rank == 1 and runs.count(1) == 8:
            raise KeyboardInterrupt
        return False

    with pytest.raises(PeerFailed) as caught:
        pt.spawn(deciding(clock, tmp_path, costs, fails=stop), 2, model=THREADS, timeout_s=60)
    assert (caught.value.rank, caught.value.cause) == (1, "KeyboardInterrupt")
    (path,) = (tmp_path / "0").glob("*.json")
    record = json.loads(path.read_text())
    assert (record["winner"], record["verdicts"]["0"]) == (None, None)
    (path,) = (tmp_path / "0").glob("*.json")
    # The same question: what hides behind `fails` is no plain value.
    said = pt.spawn(deciding(clock, tmp_path, costs, fails=stop), 2, model=THREADS, timeout_s=60)
    assert said == [said[0]] * 2
    assert said[0][0] == 0
    assert len(json.loads(path.read_text())["measured"]) == 2


def test_ranks_that_ask_different_questions_are_told(clock, tmp_path):
    def main(group):
        op = pt.autotune(
            candidates=[0, 1][: 2 - group.rank],
            key=lambda out: 0,
            group=group,
            folder=tmp_path,
            clock=clock,
            name="way",
        )(lambda k, out: pt.op.fill(out, 3).map(lambda: out))
        with pytest.raises(SymmetryError) as caught:
            op.decide(pt.zeros(4, pt.f32))
        return str(caught.value)

    for text in pt.spawn(main, 2, model=THREADS, timeout_s=60):
        assert text.startswith("ranks disagree about what autotune(way) is asked: rank 0: (('candidates', ['0', '1'])")


def test_no_candidate_left_is_said_on_every_rank(clock, tmp_path):
    def main(group):
        with pytest.raises(UnsupportedError) as caught:
            deciding(clock, tmp_path, [[1.0]] * 2, fails=lambda rank, k: True)(group)
        return str(caught.value)

    texts = pt.spawn(main, 2, model=THREADS, timeout_s=60)
    assert texts[0] == texts[1]
    assert texts[0] == "autotune(fill): no candidate is left: 0: rank 0: ValueError: rank 0 cannot do 0"


@pytest.mark.gpus(2)
@pytest.mark.feature("A7", "cpu")
@pytest.mark.slow
def test_processes_take_one_winner_and_find_it_again(tmp_path):
    algorithms = [Algorithm.PIPELINED, Algorithm.TWO_SHOT, Algorithm.FLAGGED]
    said = [pt.spawn(tuning_ranks.all_reduces, 2, (str(tmp_path), algorithms), timeout_s=100) for _ in range(2)]
    for run, is_new in zip(said, (True, False), strict=True):
        assert run == [run[0]] * 2
        index, dropped, new, value = run[0]
        assert (index in (0, 1), list(dropped), new, value) == (True, ["<Algorithm.FLAGGED: 'flagged'>"], is_new, 3.0)
    assert said[0][0][0] == said[1][0][0]


@pytest.mark.feature("A7", "cpu")
@pytest.mark.slow
@pytest.mark.native_only  # kills a process
@pytest.mark.parametrize("after", [1, 4, 9])
def test_a_rank_that_is_killed_releases_the_others(tmp_path, after):
    with pytest.raises(PeerFailed) as caught:
        pt.spawn(tuning_ranks.killed, 3, (str(tmp_path), 1, after), timeout_s=60)
    assert caught.value.rank == 1
    assert "SIGKILL" in caught.value.cause
