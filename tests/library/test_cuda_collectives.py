"""The collectives' kernels for GPUs, which are in the public language and so run on any device."""

import gpu_plan_ranks
import pytest

import peertile as pt
from peertile.config import config
from peertile.library.cuda_collectives import Shape, as_words
from peertile.library.selection import Algorithm

pytestmark = pytest.mark.any_device


def spawn(function, ranks, *args):
    return pt.spawn(function, ranks, args, model=pt.RankModel.THREADS, timeout_s=100)


def dealt(dtypes):
    """Pairs of ranks and dtype: in the suite each dtype once, the first one on one rank, which combines nothing, and the
    others on 2, 3 and 2; in the long tier the others. Some hundred kernels are compiled for each pair, and what a dtype
    changes in them does not depend on how many ranks there are beside this one."""
    quick = dict(zip(dtypes, (1, 2, 3, 2), strict=False))
    pairs = [(ranks, dtype) for ranks in (1, 2, 3) for dtype in dtypes]
    return [pytest.param(*pair, marks=[pytest.mark.long] * (quick[pair[1]] != pair[0])) for pair in pairs]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "dtype"), dealt(["bf16", "f32", "f16", "i32"]))
def test_every_collective_in_every_shape(ranks, dtype, seed):
    assert all(spawn(gpu_plan_ranks.everything, ranks, dtype, (2, 64, 1000, 5002, 5008), seed))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["flagged", "filled", "pushed"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_replays_and_launches_take_turns(ranks, algorithm):
    assert all(spawn(gpu_plan_ranks.replays, ranks, algorithm, 4))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["flagged", "filled", "pushed"])
def test_sums_of_bf16_are_rounded_once_and_the_same_on_every_rank(algorithm, seed):
    results = spawn(gpu_plan_ranks.rounded_once, 2, algorithm, seed)
    assert results[0] == results[1]


def test_plans_that_do_not_fit_leave_the_heap_as_it_was():
    failed = spawn(gpu_plan_ranks.too_small, 2)
    assert failed[0] == failed[1] > 1


def test_words_are_the_bytes_of_a_tensor():
    x = pt.asarray([1.0, 2.0, 3.0, 4.0], pt.bf16)
    words = as_words(x, 2)
    assert (words.shape, words.dtype, words.address) == ((2, 1), pt.u32, x.address)
    assert words.numpy().tolist() == [[0x4000_3F80], [0x4080_4040]]
    assert Shape(Algorithm.FLAGGED, 1, 64) == Shape(Algorithm.FLAGGED, 1, 64)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "dtype"), dealt(["f32", "f64", "bf16"]))
def test_a_communicator_takes_any_count_place_and_type(ranks, dtype, seed):
    assert all(spawn(gpu_plan_ranks.through_the_communicator, ranks, dtype, seed))


def test_shapes_follow_from_bytes_type_and_ranks_alone():
    flagged, pushed = Algorithm.FLAGGED, Algorithm.PUSHED
    two = [
        None, Shape(flagged, 8, 128), Shape(pushed, 4, 512), Shape(pushed, 4, 2048), Shape(pushed, 4, 8192),
        Shape(flagged, 8, 32), None, Shape(pushed, 4, 4096),
    ]  # fmt: skip
    assert spawn(gpu_plan_ranks.shapes, 2) == [two, two]
    assert spawn(gpu_plan_ranks.shapes, 3)[0][4] is None  # shares are better than everything to everybody


@pytest.mark.slow
@pytest.mark.native_only
@pytest.mark.parametrize("same_op", [True, False], ids=["count", "op"])
@pytest.mark.parametrize("algorithm", ["flagged", "filled", "pushed"])
def test_ranks_that_called_differently_fail_and_recover(algorithm, same_op, monkeypatch):
    monkeypatch.setattr("peertile.config._current", config()._replace(wait_timeout_s=1.0))
    found = spawn(gpu_plan_ranks.called_differently, 2, algorithm, same_op)
    # Of two ranks one sees it, at once or when nothing comes; the other is told.
    assert set(found) <= {"KernelAssert", "WaitTimeout", "PeerFailed: KernelAssert", "PeerFailed: WaitTimeout"}
    assert set(found) & {"KernelAssert", "WaitTimeout"}
