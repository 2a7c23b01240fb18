"""On the simulated machine: zeros, NaN and infinities, order of sums, narrow types; values are those of the targets."""

import itertools

import numpy as np
import pytest
from sim_cases import faulty, silent

import peertile as pt
import peertile.language as T
from peertile.library.collectives import Collectives
from peertile.library.reductions import ReduceOp
from peertile.library.selection import Algorithm
from peertile.sim.verdicts import VerdictKind

ALGORITHMS = (Algorithm.ONE_SHOT, Algorithm.FLAGGED)


def reduced(group, rows, op=ReduceOp.SUM, algorithms=ALGORITHMS, dtype=pt.f32):
    """`rows[rank]` all-reduced by each algorithm; the results are equal bit by bit, and are given."""
    found = []
    with Collectives(group, programs=1, slot_bytes=4096) as c:
        for algorithm in algorithms:
            x = pt.asarray(np.array(rows[group.rank], np.float32), dtype)
            found.append(c.all_reduce(x, op=op, algorithm=algorithm).sync().numpy())
    assert len({part.tobytes() for part in found}) == 1
    return found[0]


@silent()
def test_f103_negative_zero_arrives_and_is_kept(group):
    got = reduced(group, [[0.0, -0.0, -0.0, 1.0], [-0.0, -0.0, 0.0, -1.0]])
    assert [bool(b) for b in np.signbit(got)] == [False, True, False, False]
    assert not got.any()


@pytest.mark.slow
@silent()
def test_f104_zero_is_data_and_never_a_mark_of_what_is_missing(group):
    assert not reduced(group, [[0.0] * 3] * 2).any()


@silent()
def test_f105_nan_and_inf_stay_where_they_are_on_every_path(group):
    got = reduced(group, [[1.0, np.nan, 3.0, np.inf], [1.0, 2.0, 3.0, 4.0]])
    assert np.array_equal(got, [2.0, np.nan, 6.0, np.inf], equal_nan=True)


@pytest.mark.slow
@silent(ranks=4)
def test_f106_min_is_nan_in_every_order(group):
    rows = [list(row) for row in zip(*itertools.permutations([1.0, np.nan, 3.0, 4.0]), strict=True)]
    assert np.isnan(reduced(group, rows, ReduceOp.MIN, (Algorithm.ONE_SHOT,))).all()


@silent()
def test_f107_no_identity_leaks_into_min_and_max(group):
    got = reduced(group, [[np.inf, -np.inf, np.nan]] * 2, ReduceOp.MAX, (Algorithm.ONE_SHOT,))
    assert np.array_equal(got, [np.inf, -np.inf, np.nan], equal_nan=True)


@pytest.mark.slow
@silent(ranks=4)
def test_f108_bf16_is_summed_in_f32_and_rounded_once(group):
    rows = [[256.0]] + [[1.0]] * 3
    assert float(reduced(group, rows, algorithms=(Algorithm.ONE_SHOT,), dtype=pt.bf16)[0]) == 260.0


@faulty(VerdictKind.HOST, "ArgumentError: all_reduce: op: SUM is not defined for f8e4m3")
def test_f110_fp8_is_never_summed_as_bytes(group):
    with Collectives(group, programs=1, slot_bytes=4096) as c:
        c.all_reduce(pt.asarray(np.array([1.0]), pt.f8e4m3)).sync()


@silent()
def test_f110_fp8_is_moved_bit_by_bit(group):
    with Collectives(group, programs=1, slot_bytes=4096) as c:
        x = pt.asarray(np.array([1.0, -2.0]), pt.f8e4m3)
        assert c.all_gather(x).sync().numpy().tobytes() == x.numpy().tobytes() * 2


@pt.kernel
def narrow(z: T.Exclusive, x: T.Shared):
    z.store(x.load_like(z).astype(T.f8e4m3).astype(T.f32))


@silent(ranks=1)
def test_f111_fp8_rounds_to_nearest_even_and_subnormals_too(group):
    x = np.array([1.0625, 448.0, 2.0**-10, 3 * 2.0**-10, -(2.0**-9), 0.0, 1.1875, 449.0], np.float32)
    z = pt.zeros((8,), pt.f32)
    narrow(z.partition(8), pt.asarray(x)).sync()
    assert z.numpy().tolist() == [1.0, 448.0, 0.0, 2.0**-8, -(2.0**-9), 0.0, 1.25, 448.0]


@pt.kernel
def padded(z: T.Exclusive, x: T.Shared):
    z.store(T.full((1,), T.max(x.load((0,), (8,), padding=T.Padding.NEG_INF).astype(T.f32), axis=0), T.f32))


@faulty(VerdictKind.HOST, "CompileError", "f8e4m3", ranks=1)
def test_f112_infinite_padding_of_a_type_without_infinity(group):
    z = pt.zeros((1,), pt.f32)
    padded(z.partition(1), pt.asarray(np.array([-3.0] * 5), pt.f8e4m3)).sync()


@silent(ranks=1)
def test_f112_infinite_padding_of_a_type_that_has_it(group):
    z = pt.zeros((1,), pt.f32)
    padded(z.partition(1), pt.asarray(np.array([-3.0] * 5, np.float32))).sync()
    assert z.numpy().tolist() == [-3.0]


@pytest.mark.slow
@silent()
def test_f114_every_reduction_of_every_type_is_right_or_refused_alike(group):
    with Collectives(group, programs=1, slot_bytes=4096) as c:
        for dtype in (pt.f64, pt.u8):
            for op, expected in ((ReduceOp.SUM, 5), (ReduceOp.MIN, 2), (ReduceOp.MAX, 3), (ReduceOp.PROD, 6)):
                got = c.all_reduce(pt.full((3,), 2 + group.rank, dtype), op=op, algorithm=Algorithm.ONE_SHOT).sync()
                assert got.numpy().tolist() == [expected] * 3
