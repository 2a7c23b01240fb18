"""Collectives on torch tensors, where they lie. Runs where torch is installed; peertile never needs it.

On GPUs ranks have one each: torch loads its kernels as it needs them, which CUDA does not do while one of ours waits.
"""

import pytest

import peertile as pt
from peertile.errors import ArgumentError
from peertile.library.reductions import ReduceOp

torch = pytest.importorskip("torch")

from where import place  # noqa: E402

import peertile.torch as ptt  # noqa: E402 - needs torch

pytestmark = [pytest.mark.any_device, pytest.mark.native_only, pytest.mark.gpu_only]

THREADS = pt.RankModel.THREADS
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8")


def on_ranks(function, ranks):
    def main(group):
        try:
            with place():  # of this thread alone
                return function(group)
        finally:
            if group.failure() is None:
                ptt.close(group)

    return pt.spawn(main, ranks, model=THREADS, timeout_s=60)


def parts(ranks, shape, dtype="float32"):
    """On the host: what is expected is computed there."""
    return [torch.randint(0, 5, shape, device="cpu").to(getattr(torch, dtype)) for _ in range(ranks)]


SHAPES = ((), (1,), (7,), (3, 5, 2), (0, 4), (1000, 33))


@pytest.mark.gpus("ranks")
@pytest.mark.feature("A6", "cpu")
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_all_reduce_sums_in_place_whatever_the_shape(ranks):
    x = [parts(ranks, shape) for shape in SHAPES]

    def main(group):
        for shape, values in zip(SHAPES, x, strict=True):
            mine = values[group.rank].to(place(), copy=True)
            address = mine.data_ptr()
            for times in (1, ranks):
                assert ptt.all_reduce(mine, group) is mine
                assert (mine.data_ptr(), tuple(mine.shape)) == (address, shape)
                assert torch.equal(mine.cpu(), sum(values) * times)
        return True

    assert on_ranks(main, ranks) == [True] * ranks


@pytest.mark.gpus(3)
@pytest.mark.feature("A6", "cpu")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_reduction(dtype):
    x = parts(3, (50,), dtype)
    folded = {
        ReduceOp.SUM: x[0] + x[1] + x[2],
        ReduceOp.MAX: torch.maximum(torch.maximum(x[0], x[1]), x[2]),
        torch.distributed.ReduceOp.MIN: torch.minimum(torch.minimum(x[0], x[1]), x[2]),
        torch.distributed.ReduceOp.PRODUCT: x[0] * x[1] * x[2],
    }
    if x[0].is_floating_point():
        folded[ReduceOp.AVG] = ((x[0].double() + x[1].double() + x[2].double()) / 3).to(x[0].dtype)

    def main(group):
        for op, expected in folded.items():
            got = ptt.all_reduce(x[group.rank].to(place(), copy=True), group, op=op)
            torch.testing.assert_close(got.cpu(), expected)
        return True

    assert all(on_ranks(main, 3))


@pytest.mark.gpus("ranks")
@pytest.mark.feature("A6", "cpu")
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "dtype"), [(1, "float32"), (2, "bfloat16"), (3, "int64"), (3, "float32")])
def test_the_others_move_what_torch_s_would(ranks, dtype):
    x = parts(ranks, (ranks * 2, 5), dtype)
    whole = torch.cat(x)

    def main(group):
        me = group.rank
        mine = x[me].to(place())
        share = slice(2 * me, 2 * me + 2)
        turned = torch.cat([t[share] for t in x])
        for out in (False, True):

            def like(*shape, out=out):
                return torch.full(shape, 77).to(x[0].dtype) if out else None

            got = ptt.all_gather(mine, group, out=like(2 * ranks * ranks, 5))
            assert torch.equal(got.cpu(), whole)
            assert torch.equal(ptt.reduce_scatter(mine, group, out=like(2, 5)).cpu(), sum(x)[share])
            assert torch.equal(ptt.all_to_all(mine, group, out=like(2 * ranks, 5)).cpu(), turned)
        last = mine.clone()
        assert ptt.broadcast(last, group, root=ranks - 1) is last
        assert torch.equal(last.cpu(), x[-1])
        assert torch.equal(ptt.all_gather(mine[0, 0], group).cpu(), torch.stack([t[0, 0] for t in x]))
        return True

    assert on_ranks(main, ranks) == [True] * ranks


@pytest.mark.gpus(2)
@pytest.mark.feature("A6", "cpu")
def test_results_lie_in_the_tensors_that_were_given_and_a_view_is_only_its_part():
    x = torch.arange(12.0)

    def main(group):
        mine = x.to(place(), copy=True)
        out = torch.full((20,), -1.0)
        ptt.all_reduce(mine[3:7], group)
        ptt.all_gather(mine[:4], group, out=out[6:14])
        return mine.tolist(), out.tolist()

    mine = [v * 2 if 3 <= v < 7 else v for v in x.tolist()]
    assert on_ranks(main, 2) == [(mine, [-1.0] * 6 + mine[:4] * 2 + [-1.0] * 6)] * 2


@pytest.mark.gpus(2)
@pytest.mark.feature("A6", "cpu")
def test_memory_of_a_tensor_that_was_used_is_not_held():
    def main(group):
        for k in range(40):  # one after the other takes the place of the one before, also for the library
            mine = torch.full((1000,), float(k + group.rank))
            assert torch.equal(ptt.all_reduce(mine, group), torch.full((1000,), 2.0 * k + 1))
        known = ptt._communicators[group]._known
        del mine
        return len(known)

    assert on_ranks(main, 2) == [0, 0]


@pytest.mark.gpus(3)
@pytest.mark.feature("A6", "cpu")
@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_to_all"])
def test_gradients_flow_through_what_moves(name):
    ranks = 3
    rows = {"all_gather": 18, "reduce_scatter": 2, "all_to_all": 6}[name]
    x, weights = ([torch.randn(n, 2, dtype=torch.float64, device="cpu") for _ in range(ranks)] for n in (6, rows))

    def reference(tensors):
        whole = torch.stack(tensors)
        if name == "all_gather":
            return [whole.reshape(18, 2)] * ranks
        if name == "reduce_scatter":
            return list(whole.sum(0).reshape(ranks, 2, 2))
        return list(whole.reshape(ranks, ranks, 2, 2).transpose(0, 1).reshape(ranks, 6, 2))

    leaves = [t.clone().requires_grad_() for t in x]
    loss = sum((y * w).pow(2).sum() for y, w in zip(reference(leaves), weights, strict=True))
    expected = torch.autograd.grad(loss, leaves)

    def main(group):
        mine = x[group.rank].to(place(), copy=True).requires_grad_()
        got = getattr(ptt, name)(mine, group)
        (got * weights[group.rank].to(place())).pow(2).sum().backward()
        torch.testing.assert_close(mine.grad.cpu(), expected[group.rank])
        with torch.no_grad():
            assert not getattr(ptt, name)(mine, group).requires_grad
        return True

    assert all(on_ranks(main, ranks))


@pytest.mark.feature("A6", "cpu")
def test_one_process_is_a_group_of_one():
    x = torch.arange(4.0)
    assert torch.equal(ptt.all_gather(x), x)
    assert isinstance(ptt.communicator(), pt.library.collectives.Collectives)
    first = ptt.communicator()
    assert ptt.communicator() is first
    ptt.close()
    ptt.close()
    assert ptt.communicator() is not first
    ptt.close()


def test_what_does_not_fit_is_named():
    def message(call, *args, **options):
        with pytest.raises(ArgumentError) as caught:
            call(*args, **options)
        return str(caught.value)

    x = torch.zeros(4, 6)
    assert message(ptt.all_reduce, [1.0]) == "all_reduce: tensor: expected a torch tensor, got list"
    assert message(ptt.all_reduce, x.t()) == (
        "all_reduce: tensor: expected a contiguous tensor, got strides (1, 6) for shape (6, 4); pass tensor.contiguous()"
    )
    assert message(ptt.all_reduce, x.to_sparse()) == (
        "all_reduce: tensor: expected a dense tensor, got layout torch.sparse_coo; pass tensor.to_dense()"
    )
    assert message(ptt.all_reduce, x, 3) == "group: expected a Group, a torch process group or None, got 3"
    assert message(ptt.all_reduce, x, op="sum") == (
        "all_reduce: op: expected a ReduceOp of peertile or of torch: SUM, PRODUCT, MIN, MAX or AVG, got 'sum'"
    )
    assert message(ptt.all_reduce, torch.ones(2, requires_grad=True)) == (
        "all_reduce: tensor: expected a tensor outside autograd, as it is written in place, got one that requires a "
        "gradient; pass tensor.detach()"
    )
    assert message(ptt.all_gather, x, out=torch.zeros(4, 6, dtype=torch.int32)) == (
        "all_gather: out: expected torch.float32 [4, 6], got torch.int32 [4, 6]"
    )
    assert message(ptt.all_gather, x, out=torch.zeros(5, 6)) == (
        "all_gather: out: expected torch.float32 [4, 6], got torch.float32 [5, 6]"
    )
    assert message(ptt.all_to_all, torch.tensor(1.0)) == (
        "all_to_all: tensor: expected a first axis that 1 ranks divide, got shape []"
    )
    ptt.close()


@pytest.mark.gpus(2)
def test_a_share_that_does_not_divide_is_named():
    def main(group):
        with pytest.raises(ArgumentError) as caught:
            ptt.reduce_scatter(torch.zeros(5, 2), group)
        return str(caught.value)

    assert (
        on_ranks(main, 2) == ["reduce_scatter: tensor: expected a first axis that 2 ranks divide, got shape [5, 2]"] * 2
    )
