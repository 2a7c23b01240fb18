"""What the fused communicators refuse, in whole messages; nothing reaches a peer before arguments are checked."""

import fused_programs as programs
import numpy as np
import pytest

import peertile as pt
from peertile.errors import ArgumentError, KernelAssert, SignatureMismatch, UsageError
from peertile.library.experts import Experts
from peertile.library.fused import FusedProducts
from peertile.library.ring_attention import RingAttention

F32 = pt.f32


def zeros(*shape, dtype=F32):
    return pt.zeros(shape, dtype)


def refused(call, error=ArgumentError):
    with pytest.raises(error) as found:
        call()
    return str(found.value)


@pytest.fixture
def products():
    with FusedProducts(pt.init(), staging_bytes=1 << 12) as made:
        yield made


@pytest.fixture
def ring():
    with RingAttention(pt.init(), staging_bytes=1 << 12) as made:
        yield made


@pytest.fixture
def experts():
    with Experts(pt.init(), experts=3, rows=4, width=2, top_k=2, dtype=F32) as made:
        yield made


def test_products_name_what_does_not_fit(products):
    a, b = zeros(4, 3), zeros(3, 5)
    gather, scatter, reduce = products.all_gather_matmul, products.matmul_reduce_scatter, products.matmul_all_reduce
    cases = [
        (lambda: gather(3, b), "all_gather_matmul: a: expected a Tensor, got int; pt.asarray makes one"),
        (lambda: gather(a, a), "all_gather_matmul: b: expected [3, columns], got [4, 3]"),
        (
            lambda: reduce(zeros(4, 3, dtype=pt.i32), b),
            "matmul_all_reduce: a: expected f32 or f16 or bf16, got i32",
        ),
        (lambda: reduce(a, zeros(3, 5, dtype=pt.f16)), "matmul_all_reduce: b: expected f32, got f16"),
        (lambda: reduce(a, b, zeros(4, 4)), "matmul_all_reduce: out: expected [4, 5], got [4, 4]"),
        (
            lambda: gather(a, b, rows=[1, 2]),
            "all_gather_matmul: rows: expected 1 integers >= 0, one for each rank, got [1, 2]",
        ),
        (
            lambda: gather(a, b, rows=[-1]),
            "all_gather_matmul: rows: expected 1 integers >= 0, one for each rank, got [-1]",
        ),
        (lambda: gather(a, b, rows=[3]), "all_gather_matmul: rows: expected 4 for rank 0, which has so many, got 3"),
        (lambda: scatter(a, b, rows=[3]), "matmul_reduce_scatter: rows: expected a sum of 4, the rows of a, got 3"),
        (
            lambda: scatter(a, b, inner=[2]),
            "matmul_reduce_scatter: inner: expected 3 for rank 0, which has so many, got 2",
        ),
        (
            lambda: gather(zeros(512, 3), b),
            "all_gather_matmul: expected the gathered rows to fit into 4096 bytes of staging, got 6144; "
            "make the communicator with staging_bytes=6144",
        ),
        (
            lambda: reduce(zeros(64, 3), zeros(3, 64)),
            "matmul_all_reduce: expected the parts of the sum to fit into 4096 bytes of staging, got 16384; "
            "make the communicator with staging_bytes=16384",
        ),
    ]
    for call, message in cases:
        assert refused(call) == message


def test_communicators_name_bad_options():
    group = pt.init()
    cases = [
        (lambda: FusedProducts(group, movers=0), "FusedProducts: movers: expected an integer >= 1, got 0"),
        (lambda: FusedProducts(group, workers=1000), "FusedProducts: workers: expected at most 256, got 1000"),
        (
            lambda: FusedProducts(group, staging_bytes=True),
            "FusedProducts: staging_bytes: expected an integer >= 1, got True",
        ),
        (
            lambda: FusedProducts(group, partials=pt.i32),
            "FusedProducts: partials: expected f32, f16 or bf16, got i32",
        ),
        (
            lambda: FusedProducts(group, tile=(2, 3, 4)),
            "FusedProducts: tile: expected 3 powers of two, got (2, 3, 4)",
        ),
        (lambda: RingAttention(group, tile=4), "RingAttention: tile: expected 2 powers of two, got 4"),
        (lambda: RingAttention(group, movers="a"), "RingAttention: movers: expected an integer >= 1, got 'a'"),
        (
            lambda: Experts(group, experts=2, rows=1, width=1, top_k=3, dtype=F32),
            "Experts: top_k: expected at most 2, the number of experts, got 3",
        ),
        (
            lambda: Experts(group, experts=2, rows=1, width=1, top_k=1, dtype=pt.f64),
            "Experts: dtype: expected f32, f16 or bf16, got f64",
        ),
        (
            lambda: Experts(group, experts=2, rows=1, width=1, top_k=1, dtype=F32, places=0),
            "Experts: places: expected an integer >= 1, got 0",
        ),
        (
            lambda: Experts(group, experts=2, rows=1, width=1, top_k=1, dtype=F32, partials=pt.i32),
            "Experts: partials: expected f32, f16, bf16 or None, got i32",
        ),
        (
            lambda: Experts(group, experts=2, rows=1, width=1, top_k=1, dtype=F32, places=1 << 30),
            "Experts: places: expected fewer than 2147483648 on a rank, got 2147483648: 1073741824 for each of its 2 "
            "experts; make the communicator with fewer",
        ),
    ]
    for call, message in cases:
        assert refused(call) == message


def test_attention_names_what_does_not_fit(ring):
    q, k = zeros(2, 4, 8), zeros(1, 4, 8)
    cases = [
        (lambda: ring.attention(zeros(4, 8), k, k), "attention: q: expected [heads, tokens, dim], got [4, 8]"),
        (lambda: ring.attention(q, zeros(1, 5, 8), k), "attention: k: expected [groups, 4, 8], got [1, 5, 8]"),
        (lambda: ring.attention(q, k, zeros(2, 4, 8)), "attention: v: expected [1, 4, 8], got [2, 4, 8]"),
        (
            lambda: ring.attention(k, zeros(2, 4, 8), zeros(2, 4, 8)),
            "attention: k: expected a number of heads that divides the 1 of q, got 2; "
            "heads of q share those of k and v in order",
        ),
        (lambda: ring.attention(q, k, k, scale="x"), "attention: scale: expected a number, got 'x'"),
        (
            lambda: ring.attention(zeros(1, 2, 600), zeros(1, 2, 600), zeros(1, 2, 600)),
            "attention: q: expected heads of 1 to 512 elements, got 600",
        ),
        (
            lambda: ring.attention(zeros(2, 64, 8), zeros(2, 64, 8), zeros(2, 64, 8)),
            "attention: expected two blocks of keys and values to fit into 4096 bytes of staging, got 16384; "
            "make the communicator with staging_bytes=16384",
        ),
    ]
    for call, message in cases:
        assert refused(call) == message


@pytest.mark.slow
def test_experts_name_what_does_not_fit(experts):
    x, ids, weights = zeros(4, 2), pt.asarray(np.array([[0, 1]] * 4)), pt.ones((4, 2), F32)
    sent = experts.dispatch(x, ids).sync()
    cases = [
        (
            lambda: experts.dispatch(zeros(5, 2), ids),
            "dispatch: x: expected at most 4 rows, got 5; make the communicator with more rows",
        ),
        (lambda: experts.dispatch(zeros(4, 3), ids), "dispatch: x: expected [rows, 2], got [4, 3]"),
        (lambda: experts.dispatch(x, ids[:, :1]), "dispatch: ids: expected [4, 2], got [4, 1]"),
        (
            lambda: experts.dispatch(x, pt.asarray(np.zeros((2, 4), np.int64)).permute(1, 0)),
            "dispatch: ids: expected a tensor without gaps, got strides (1, 4); copy it first",
        ),
        (lambda: experts.dispatch(x, weights), "dispatch: ids: expected i32 or i64, got f32"),
        (lambda: experts.combine(sent, ids), "combine: weights: expected f32, got i64"),
        (
            lambda: experts.combine(sent, weights, x),
            "combine: y: expected a symmetric tensor of the group, got Tensor; heap.empty makes one",
        ),
        (lambda: experts.combine(sent, weights, out=x[:2]), "combine: out: expected [4, 2], got [2, 2]"),
    ]
    for call, message in cases:
        assert refused(call) == message
    experts.dispatch(x, ids).sync()
    assert refused(lambda: experts.combine(sent, weights), UsageError) == (
        "combine: sent: expected what the last dispatch gave; another dispatch has overwritten it"
    )


def dispatched(group, ids):
    with Experts(group, experts=3, rows=1, width=2, top_k=2, dtype=F32) as experts:
        return programs.caught(lambda: experts.dispatch(zeros(1, 2), pt.asarray(np.array(ids))).sync(), KernelAssert)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[0, 4]], "dispatch: ids: expected numbers of experts, or -1 for none"),
        ([[1, 1]], "dispatch: ids: expected different experts for the choices of a row"),
    ],
)
def test_a_choice_that_is_none_ends_the_launch(ids, message):
    # A group of its own: what a kernel asserts fails the group that it runs in.
    (found,) = pt.spawn(dispatched, 1, (ids,), model=pt.RankModel.THREADS, timeout_s=60)
    assert message in found


def test_a_closed_communicator_is_named():
    products = FusedProducts(pt.init(), staging_bytes=1 << 12)
    products.close()
    products.close()
    message = refused(lambda: products.all_gather_matmul(zeros(1, 1), zeros(1, 1)), UsageError)
    assert message == "all_gather_matmul: the communicator was closed; use it before that"


def different_shapes(group):
    with FusedProducts(group, staging_bytes=1 << 12) as products:
        x = zeros(2, 2 + group.rank)
        return programs.caught(lambda: products.matmul_all_reduce(x, zeros(2 + group.rank, 3)).sync(), pt.PeertileError)


@pytest.mark.slow
def test_ranks_that_call_differently_fail_at_once():
    with pytest.raises((SignatureMismatch, pt.PeerFailed)):
        raise_what_ranks_met(pt.spawn(different_shapes, 2, (), model=pt.RankModel.THREADS, timeout_s=60))


def other_columns(group, columns):
    """Rank 0 alone changes the number of columns from the second call on."""
    with FusedProducts(group, staging_bytes=1 << 14, tile=(16, 16, 8), movers=1, workers=1, flagged=False) as products:
        products.matmul_all_reduce(zeros(2, 8), zeros(8, columns)).sync()
        other = zeros(8, columns - (group.rank == 0))
        return programs.caught(lambda: products.matmul_all_reduce(zeros(2, 8), other).sync(), pt.PeertileError)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [9, 25, 41])
def test_a_rank_that_changes_what_it_calls_fails_at_once_with_fewer_tiles_than_programs_as_many_and_more(columns):
    with pytest.raises((SignatureMismatch, pt.PeerFailed)):
        raise_what_ranks_met(pt.spawn(other_columns, 2, (columns,), model=pt.RankModel.THREADS, timeout_s=25))


def raise_what_ranks_met(found):
    """Ranks tell the text of what they met: at least one saw that the other's call does not match."""
    assert any("launch the same kernel" in text for text in found if text is not None), found
    raise SignatureMismatch("seen")
