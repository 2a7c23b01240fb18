"""T.Accumulate: what all programs add to comes out whole, and nothing else can be done with it."""

import numpy as np
import pytest
from tests.frontend.helpers import refuses

import peertile as pt
import peertile.language as T
from peertile.dtypes import ALL_DTYPES
from peertile.errors import ArgumentError, LaunchError

pytestmark = pytest.mark.any_device

ATOMIC = [d for d in ALL_DTYPES if not d.is_bool and (not d.is_float or d.bits > 8)]


@pt.kernel
def histogram(h: T.Accumulate, x: T.Shared):
    for k in T.range(T.program_id(0), x.num_tiles((256,))[0], T.num_programs(0)):
        t = x.load((k,), (256,))
        inside = T.iota(256) < x.shape[0] - k * 256
        hits = (t[:, None] == T.iota(16, x.dtype)) & inside[:, None]
        h.atomic_add((0,), T.sum(T.where(hits, 1, 0), axis=0).astype(h.dtype))


@pytest.mark.feature("K16", "cpu")
@pytest.mark.sentence("NU-47")
def test_a_histogram_counts_every_element_once():
    x = np.random.default_rng(0).integers(0, 16, 100_003).astype(np.int32)
    h = pt.zeros(16, dtype=pt.i64)
    histogram.grid(64)(h, pt.asarray(x)).sync()
    assert (h.numpy() == np.bincount(x, minlength=16)).all()


@pt.kernel
def split_k(c: T.Accumulate, a: T.Shared, b: T.Shared):
    k = T.program_id(0)
    c.atomic_add((0, 0), T.mma(a.load((0, k), (32, 64)), b.load((k, 0), (64, 32))))


@pytest.mark.feature("K16", "cpu")
def test_a_split_product_adds_its_parts():
    g = np.random.default_rng(1)
    a, b = g.standard_normal((32, 1024)).astype(np.float32), g.standard_normal((1024, 32)).astype(np.float32)
    c = pt.zeros((32, 32), dtype=pt.f32)
    split_k.grid(16)(c, pt.asarray(a), pt.asarray(b)).sync()
    np.testing.assert_allclose(c.numpy(), a @ b, rtol=1e-4, atol=1e-3)


@pt.kernel
def update(h: T.Accumulate, rmw: T.Const):
    p = T.program_id(0)
    tile = (T.iota(8) * 3 + p * 5) % 7 + 1
    h.atomic((1,), rmw, tile.astype(h.dtype))


@pytest.mark.slow
@pytest.mark.feature("K16", "cpu")
@pytest.mark.parametrize("d", ATOMIC, ids=str)
def test_every_function_and_dtype(d):
    kinds = [T.Rmw.ADD, T.Rmw.MIN, T.Rmw.MAX]
    if d.is_int:
        kinds += [T.Rmw.UMIN, T.Rmw.UMAX, T.Rmw.AND, T.Rmw.OR, T.Rmw.XOR]
    parts = np.stack([(np.arange(8) * 3 + p * 5) % 7 + 1 for p in range(20)])
    numpy_of = {
        "add": np.add, "min": np.minimum, "max": np.maximum, "umin": np.minimum, "umax": np.maximum,
        "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    }  # fmt: skip
    for kind in kinds:
        h = pt.asarray(np.full(14, 3).astype(d.numpy))
        update.grid(20)(h, kind).sync()
        want = np.full(14, 3)
        # The tile reaches beyond the edge: only what is inside counts.
        want[8:] = numpy_of[kind.value](want[8:], numpy_of[kind.value].reduce(parts)[:6])
        assert (h.numpy() == want.astype(d.numpy)).all(), kind


def test_an_accumulator_is_only_updated():
    def loads(h):
        h.load((0,), (8,))

    def stores(h):
        h.store((0,), T.zeros((8,), T.i64))

    def swaps(h):
        h.atomic((0,), T.Rmw.XCHG, T.zeros((8,), T.i64))

    def adds(h):
        h.add((0,), T.zeros((8,), T.i64))

    def words(h):
        T.ld(h)

    def narrow(h):
        h.atomic_add((0,), T.zeros((8,), T.i32))

    refuses(
        loads,
        "`h.load`: expected an atomic update, got an access that another program's update could meet; "
        "write h.atomic_add(index, tile), and read the tensor in the next launch",
    )
    refuses(
        stores,
        "`h.store`: expected an atomic update, got an access that another program's update could meet; "
        "write h.atomic_add(index, tile), and read the tensor in the next launch",
    )
    refuses(swaps, "atomic on `h`: rmw: expected a function that combines, got xchg, whose last writer is not fixed")
    refuses(
        adds,
        "the accumulator `h` has no `.add`; write h.atomic_add(index, tile) to add to it, or "
        "h.atomic(index, T.Rmw.MAX, tile) for another function",
        "h.add",
    )
    refuses(words, "T.ld: word: expected a T.Peer parameter or a view of one, got the accumulator `h`")
    refuses(narrow, "atomic on `h`: expected dtype i64, got i32[8]; convert it with .astype(h.dtype)")


@pytest.mark.feature("S2", "cpu")
def test_an_accumulator_shares_its_storage_with_nothing():
    h = pt.zeros(64, dtype=pt.i32)
    with pytest.raises(LaunchError) as caught:
        histogram.grid(1)(h, h).sync()
    assert str(caught.value).endswith("pass separate tensors, or disjoint slices")
    with pytest.raises(ArgumentError) as wrong:
        histogram.grid(1)(h.partition((16,)), h).sync()
    assert str(wrong.value) == "h: expected a Tensor (T.Accumulate); make one with pt.zeros, got Partition"
