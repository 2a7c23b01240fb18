"""What this process alone has is refused when it is pickled or copied; kernels and programs go by name."""

import copy
import pickle

import pytest

import peertile as pt
import peertile.language as T
from peertile.errors import ArgumentError, PeerFailed, UsageError


@pt.kernel
def ones(z: T.Exclusive):
    z.store(T.ones(z.tile_shape, z.dtype))


@pt.program
def main(group):
    return group.rank


def launches(group, kernel):
    z = pt.zeros((4,), pt.f32)
    kernel(z.partition(4)).sync()
    return z.numpy().tolist()


def gives_a_tensor(group):
    return pt.zeros((4,), pt.f32)


def told(name):
    return (
        f"pickle, copy: expected a value, got what this process alone has ({name}); pass on values, as Tensor.numpy() "
        "gives them, and make tensors, groups and streams where they are used"
    )


HOW = pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy], ids=["pickle", "copy", "deepcopy"])


@pytest.mark.parametrize("how", [pickle.dumps, copy.deepcopy], ids=["pickle", "deepcopy"])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda heap: pt.zeros((4,), pt.f32), "Storage"),
        (lambda heap: pt.zeros((4,), pt.f32).partition(4), "Storage"),
        (lambda heap: pt.current_device(), "Device"),
        (lambda heap: pt.current_device().stream("a"), "Stream"),
        (lambda heap: heap.group, "Group"),
        (lambda heap: heap, "Group"),
        (lambda heap: heap.signal(slots=1), "Group"),
    ],
)
def test_what_belongs_to_this_process_is_refused(make, name, how):
    with pt.SymmetricHeap(pt.init(), 1 << 16) as heap, pytest.raises(UsageError) as caught:
        how(make(heap))
    assert str(caught.value) == told(name)


@HOW
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda z: ones(z.partition(4)), "LaunchOp"),
        (lambda z: pt.op.fill(z, 1).map(lambda _: 1), "Chain"),
        (lambda z: pt.op.fill(z, 1).shared(), "SharedOp"),
        (lambda z: pt.op.fill(z, 1).schedule(), "DeviceFuture"),
    ],
    ids=["launch", "chain", "shared", "future"],
)
def test_an_operation_is_refused_too_since_it_is_used_once(make, name, how):
    z = pt.zeros((4,), pt.f32)
    made = make(z)
    with pytest.raises(UsageError) as caught:
        how(made)
    assert str(caught.value) == told(name)
    assert z.numpy().tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("thing", [ones, main], ids=["kernel", "program"])
def test_kernels_and_programs_go_by_name(thing):
    assert pickle.loads(pickle.dumps(thing)) is thing
    assert copy.copy(thing) is copy.deepcopy(thing) is thing


@pytest.mark.slow
@pytest.mark.feature("D1", "cpu")
def test_a_kernel_is_passed_to_spawned_ranks():
    assert pt.spawn(launches, 2, (ones,)) == [[1.0] * 4] * 2


@pytest.mark.slow
def test_tensors_as_arguments_and_results_of_ranks_are_refused():
    x = pt.zeros((4,), pt.f32)
    with pytest.raises(ArgumentError) as caught:
        pt.spawn(launches, 1, (x,))
    assert str(caught.value) == (
        f"spawn(launches): args: expected values that can be pickled, got ({x!r},) ({told('Storage')}); "
        "make them in the function, or pass model=RankModel.THREADS"
    )
    with pytest.raises(PeerFailed) as failed:
        pt.spawn(gives_a_tensor, 1)
    assert str(failed.value) == (
        "rank 0 failed: ArgumentError: spawn(gives_a_tensor): result: expected a value that can be pickled, got Tensor "
        f"({told('Storage')})"
    )
