"""The benchmark helper: events of the device, runs in turns, the slowest rank, caches that hold nothing."""

import sys
from pathlib import Path

import pytest

import peertile as pt
from peertile.errors import ArgumentError
from peertile.testing import Timing, time_on_device

sys.path.insert(0, str(Path(__file__).parent))
import timing_ranks

pytestmark = [pytest.mark.any_device, pytest.mark.native_only, pytest.mark.feature("D7", "cpu")]


def test_candidates_take_turns_and_warm_up_rounds_do_not_count():
    out, order = pt.empty((1,), pt.f32), []

    def named(name):
        def make():
            order.append(name)
            return timing_ranks.spin(out.partition(1), 10)

        return make

    found = time_on_device({"a": named("a"), "b": named("b")}, runs=3, warmup=2, calls=2)
    assert order == ["a", "a", "b", "b"] * 5
    assert {name: len(timing.seconds) for name, timing in found.items()} == {"a": 3, "b": 3}


@pytest.mark.slow
def test_a_thousand_times_the_work_takes_longer_and_a_call_is_what_is_told():
    """On a GPU ten milliseconds: between the events of a run that does nothing there is what its host needs."""
    out = pt.empty((1,), pt.f32)
    found = time_on_device(
        {"short": timing_ranks.spinning(out, 2_000), "long": timing_ranks.spinning(out, 2_000_000)}, runs=5
    )
    assert 0 < found["short"].best <= found["short"].median <= found["short"].worst
    assert found["short"].speedup_over(found["long"]) > 5
    with timing_ranks.noting() as said:
        ten = time_on_device({"ten": timing_ranks.spinning(out, 200)}, runs=3, calls=10)["ten"]
    assert ten.seconds == tuple(ns / 10 / 1e9 for ns in said)


def test_memory_is_written_in_front_of_each_run_and_given_back():
    device = pt.current_device()
    x = pt.zeros((1024,), pt.f32)
    before = device.driver.memory_stats().in_use
    found = time_on_device({"fill": lambda: pt.op.fill(x, 1)}, runs=3, flush_bytes=1 << 20)
    assert len(found["fill"].seconds) == 3
    assert device.driver.memory_stats().in_use == before


def test_it_runs_on_the_stream_that_is_named():
    stream = pt.current_device().stream("mine")
    seen = []

    class Noting(pt.DeviceOp):
        device = pt.current_device()
        name = "noting"

        def execute(self, context):
            seen.append(context.stream)

    time_on_device({"noting": Noting}, stream=stream, runs=2, warmup=0)
    assert seen == [stream, stream]


@pytest.mark.parametrize(
    "model",
    [
        pt.RankModel.THREADS,
        pytest.param(pt.RankModel.PROCESSES, marks=[pytest.mark.slow, pytest.mark.gpus(2)]),
    ],
)
def test_over_a_group_a_run_takes_what_it_takes_the_slowest_rank(model):
    (found, said), (also_found, also_said) = pt.spawn(timing_ranks.unequal, 2, (), model=model, timeout_s=60)
    assert len(said) == len(also_said) == 10  # runs of the two candidates in turns
    slowest = [max(pair) / 1e9 for pair in zip(said, also_said, strict=True)]
    assert found == also_found == {"rank 0": tuple(slowest[0::2]), "rank 1": tuple(slowest[1::2])}


def test_ranks_that_time_different_candidates_are_told():
    said = pt.spawn(timing_ranks.different, 2, (), model=pt.RankModel.THREADS, timeout_s=60)
    assert (
        said
        == [
            "ranks disagree about the candidates of time_on_device: rank 0: (('rank 0', 2),); rank 1: (('rank 1', 2),). "
            "It must be the same on every rank"
        ]
        * 2
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"runs": 0}, "time_on_device: runs: expected an integer >= 1, got 0"),
        ({"warmup": -1}, "time_on_device: warmup: expected an integer >= 0, got -1"),
        ({"calls": 1.5}, "time_on_device: calls: expected an integer >= 1, got 1.5"),
        ({"flush_bytes": -8}, "time_on_device: flush_bytes: expected an integer >= 0, got -8"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ArgumentError) as caught:
        time_on_device({}, **options)
    assert str(caught.value) == message


def test_a_candidate_that_makes_no_operation_is_named():
    with pytest.raises(ArgumentError) as caught:
        time_on_device({"done": lambda: 3})
    assert str(caught.value) == (
        "time_on_device: candidate 'done': expected it to make an operation, got int; leave sync() to the timing"
    )


def test_runs_are_compared_in_pairs():
    with pytest.raises(ArgumentError) as caught:
        Timing((1.0, 2.0)).speedup_over(Timing((1.0,)))
    assert str(caught.value) == ("speedup_over: other: expected 2 runs, as here, got 1; time both in one call")
