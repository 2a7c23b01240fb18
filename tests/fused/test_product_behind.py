"""Products of few rows that are followed by a collective: which are, their values, and what is refused."""

from functools import partial

import fused_programs as programs
import numpy as np
import pytest

import peertile as pt
from peertile.errors import ArgumentError, UsageError
from peertile.library import fused_kernels
from peertile.library.collectives import Collectives
from peertile.library.fused import FusedProducts


def launches_of(group, dtype, partials, rows, behind):
    """As on a GPU: what one launch would do is not called where two are better, and is where they are not."""
    told = []
    with (
        Collectives(group) as comm,
        FusedProducts(
            group, staging_bytes=1 << 20, partials=partials, collectives=comm if behind else None
        ) as products,
    ):
        products._on_gpu = True
        met = products._met
        products._met = lambda launch: told.append(launch.name) or met(launch)
        inner, columns = (4, 3), 17
        parts = [
            (programs.numbers((r, rows), dtype, rows, inner[r]), programs.numbers((100 + r, rows), dtype, inner[r], 17))
            for r in range(2)
        ]
        (a, _), (b, _) = parts[group.rank]
        out = programs.poisoned((rows, columns), dtype)
        assert products.matmul_all_reduce(a, b, out, inner=inner).sync() is out
        programs.close(out.numpy(), sum(x[1] @ y[1] for x, y in parts), dtype, 12.0)
        assert len(set(group.exchange(np.ascontiguousarray(out.numpy()).tobytes(), "bits"))) == 1
    return told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "partials", "rows", "behind", "one_launch"),
    [
        ("f32", pt.f32, 3, True, False),
        ("bf16", pt.bf16, 64, True, False),
        ("bf16", pt.f32, 3, True, True),  # its parts would be rounded
        ("bf16", pt.bf16, 65, True, True),
        ("f32", pt.f32, 3, False, True),
    ],
)
def test_a_product_of_few_rows_is_followed_by_the_collective_that_was_given(dtype, partials, rows, behind, one_launch):
    program = partial(launches_of, dtype=dtype, partials=partials, rows=rows, behind=behind)
    told = pt.spawn(program, 2, model=pt.RankModel.THREADS, timeout_s=60)
    name = fused_kernels.gemm_reduce.name
    assert told == [[name]] * 2 if one_launch else [[]] * 2


def sums(group):
    with Collectives(group) as comm:
        options = {"dtype": "bf16", "partials": pt.bf16, "staging_bytes": 1 << 20, "collectives": comm}
        for m, inner, columns in ((1, (64, 40), 200), (17, (128, 0), 72), (64, (32, 48), 136), (65, (32, 48), 136)):
            programs.reduced_product(group, m, inner, columns, seed=m, **options)
    return True


@pytest.mark.slow
@pytest.mark.any_device
@pytest.mark.gpus(2)
def test_sums_behind_products_and_in_them_are_right_and_alike_on_both_ranks():
    assert all(pt.spawn(sums, 2, model=pt.RankModel.THREADS, timeout_s=100))


def test_an_output_may_lie_as_it_likes_and_a_communicator_that_is_closed_is_told_of_at_the_call():
    group = pt.init()
    a, b, out = pt.ones((2, 4), pt.f32), pt.ones((4, 8), pt.f32), pt.zeros((8, 2), pt.f32).permute(1, 0)
    with Collectives(group) as comm, FusedProducts(group, staging_bytes=1 << 12, collectives=comm) as products:
        products._is_better_behind = lambda c: True  # as on two GPUs
        assert products.matmul_all_reduce(a, b, out).sync() is out
        assert out.numpy().tolist() == [[4.0] * 8] * 2
        comm.close()
        with pytest.raises(UsageError) as caught:
            products.matmul_all_reduce(a, b)
    assert str(caught.value) == "all_reduce(f32[16], SUM, one_shot): the communicator was closed; use it before that"


def refusal(group, given):
    with Collectives(group) as comm, pytest.raises(ArgumentError) as wrong:
        FusedProducts(pt.init(), staging_bytes=1 << 12, collectives=given(comm))
    return str(wrong.value)


def test_something_else_than_collectives_of_the_group_is_refused():
    expected = "FusedProducts: collectives: expected a Collectives of the same group, got "
    assert refusal(pt.init(), lambda comm: comm._hello) == expected + "Mailbox"
    assert refusal(pt.init().subgroup((0,)), lambda comm: comm) == expected + "one of another group"
