"""Sentences of docs/concepts/numerics.md that no other test shows: common types, and sums with the same bits."""

import itertools

import numpy as np
import pytest

import peertile as pt
import peertile.language as T
from peertile.dtypes import ALL_DTYPES, promote

# ---------------------------------------------------------------- types


@pytest.mark.sentence("NU-1", "NU-2")
@pytest.mark.parametrize("a", ALL_DTYPES, ids=str)
def test_the_common_type_is_the_smallest_that_the_page_allows(a):
    """The rules of the page written down again, from the names and widths alone."""
    for b in ALL_DTYPES:
        families = {d.name.rstrip("0123456789") for d in (a, b)}
        wider = max(a, b, key=lambda d: d.bits)
        if a == b:
            expected = a
        elif a.is_bool or b.is_bool:
            expected = b if a.is_bool else a
        elif any(d.name.startswith("f8") for d in (a, b)) or {a.name, b.name} == {"f16", "bf16"}:
            expected = None
        elif families <= {"f", "bf"}:
            expected = wider
        elif families & {"f", "bf"}:
            expected = a if a.is_float else b
        elif len(families) == 1:
            expected = wider
        else:  # signed with unsigned
            expected = wider if wider.name.startswith("i") and a.bits != b.bits else None
        assert promote(a, b) is expected, (a, b)
        assert promote(b, a) is expected, (b, a)


@pytest.mark.sentence("NU-2")
def test_a_common_type_of_integers_holds_both_without_loss():
    for a, b in itertools.combinations([d for d in ALL_DTYPES if d.is_int], 2):
        joined = promote(a, b)
        holding = [d for d in ALL_DTYPES if d.is_int and d.min <= min(a.min, b.min) and d.max >= max(a.max, b.max)]
        if joined is None:  # a third type may hold both: it is not chosen for them
            assert a not in holding
            assert b not in holding
        else:
            assert joined in holding


# ---------------------------------------------------------------- orders of sums


@pt.kernel
def row_sums(z: T.Exclusive, x: T.Shared, N: T.Const[int]):
    for tile in z.tiles():
        z_row = T.sum(x.load((tile.index[0], 0), (1, N)), axis=1)
        tile.store(z_row)


@pytest.mark.any_device
@pytest.mark.sentence("NU-40")
@pytest.mark.parametrize("dtype", ["f32", "f64", "f16"])
def test_a_sum_has_the_same_bits_in_every_run_program_grid_and_place(dtype, rng):
    n, rows = 256, 10
    kind = getattr(pt, dtype)
    row = (rng.standard_normal(n) * 10.0 ** rng.integers(-3, 4, n)).astype(kind.numpy)
    seen = set()
    for programs, offset in itertools.product((1, 5, rows), (0, 3)):
        x = pt.zeros((rows, n + 8), kind)
        x[:, offset : offset + n].copy_from(np.tile(row, (rows, 1)))
        for _ in range(2):
            z = pt.full((rows,), -1, kind)
            row_sums(z.partition(1).persistent(programs), x[:, offset : offset + n], N=n).sync()
            seen |= {value.tobytes() for value in z.numpy()}
    assert len(seen) == 1
    exact = float(np.sum(row.astype(np.float64)))
    (bits,) = seen
    found = float(np.frombuffer(bits, kind.numpy)[0])
    assert abs(found - exact) <= float(np.abs(row.astype(np.float64)).sum()) * float(np.finfo(kind.numpy).eps) * n


@pt.kernel
def products(z: T.Exclusive, a: T.Shared, b: T.Shared, K: T.Const[int]):
    for tile in z.tiles():
        i, j = tile.index
        acc = T.mma(a.load((i, 0), (16, K)), b.load((0, j), (K, 16)), T.full((16, 16), 0.1, T.f32))
        tile.store(acc)


@pytest.mark.any_device
@pytest.mark.sentence("NU-43")
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_a_product_of_one_shape_has_the_same_bits_in_every_run_and_program(dtype, rng):
    kind, k, tiles = getattr(pt, dtype), 64, 4
    a, b = (rng.standard_normal(shape).astype(kind.numpy) for shape in ((16, k), (k, 16)))
    left, right = pt.asarray(np.tile(a, (tiles, 1)), kind), pt.asarray(np.tile(b, (1, tiles)), kind)
    seen = set()
    for programs in (1, 3, tiles * tiles):
        z = pt.full((16 * tiles, 16 * tiles), float("nan"), pt.f32)
        products(z.partition((16, 16)).persistent(programs), left, right, K=k).sync()
        got = z.numpy().reshape(tiles, 16, tiles, 16)
        seen |= {np.ascontiguousarray(got[i, :, j]).tobytes() for i, j in itertools.product(range(tiles), repeat=2)}
    assert len(seen) == 1
    exact = a.astype(np.float64) @ b.astype(np.float64) + np.float64(np.float32(0.1))
    np.testing.assert_allclose(np.frombuffer(seen.pop(), np.float32).reshape(16, 16), exact, atol=1e-4)


@pt.kernel
def sum_over_ranks(z: T.Exclusive, x: T.Peer[T.read], ready: T.Signal):
    ready.notify()
    ready.wait()
    acc = T.zeros(z.tile_shape, T.f32)
    for r in T.ranks():
        acc += x.at(r).load(z.index, z.tile_shape)
    z.store(acc)
    ready.notify()
    ready.wait()


@pt.kernel
def sum_of_parts(z: T.Exclusive, x: T.Peer[T.read], box: T.Mailbox):
    box.post(x.local.load(z.index, z.tile_shape))
    acc = T.zeros(z.tile_shape, T.f32)
    for part in box.collect():
        acc += part
    z.store(acc)


@pytest.mark.any_device
@pytest.mark.sentence("NU-41")
@pytest.mark.parametrize("ranks", [2, 4])
def test_sums_over_ranks_are_formed_in_rank_order_on_every_rank(ranks, seed):
    """Numbers of very different sizes: another order has other bits."""
    n, tile = 64, 16

    def values(rank):
        rng = np.random.default_rng((seed, rank))
        return (rng.standard_normal(n) * 10.0 ** rng.integers(-4, 5, n)).astype(np.float32)

    def sums(group):
        with pt.SymmetricHeap(group, size_bytes=1 << 18) as heap:
            x, ready = heap.empty((n,), pt.f32).copy_from(values(group.rank)), heap.signal(slots=n // tile)
            box = heap.mailbox(tile=tile, dtype=pt.f32, programs=n // tile)
            z, y = pt.full((n,), float("nan"), pt.f32), pt.full((n,), float("nan"), pt.f32)
            group.barrier("filled")
            sum_over_ranks(z.partition(tile), x, ready).sync()
            sum_of_parts(y.partition(tile), x, box).sync()
            return z.numpy().tobytes(), y.numpy().tobytes()

    expected = np.zeros(n, np.float32)
    for rank in range(ranks):
        expected += values(rank)
    backwards = np.zeros(n, np.float32)
    for rank in reversed(range(ranks)):
        backwards += values(rank)
    assert ranks == 2 or (backwards != expected).any()
    found = pt.spawn(sums, ranks, model=pt.RankModel.THREADS, timeout_s=60)
    assert found == [(expected.tobytes(), expected.tobytes())] * ranks


# ---------------------------------------------------------------- padding


@pt.kernel
def extrema(out: T.Exclusive, x: T.Shared, HIGH: T.Const, LOW: T.Const):
    high = T.max(x.load((0,), (64,), padding=HIGH), axis=0)
    low = T.min(x.load((0,), (64,), padding=LOW), axis=0)
    total = T.sum(x.load((0,), (64,)), axis=0)
    i = T.iota(4)
    out.store(T.where(i == 0, high, T.where(i == 1, low, total)))


@pytest.mark.any_device
@pytest.mark.sentence("NU-50")
def test_padding_takes_part_in_what_is_computed_and_the_one_that_is_ignored_can_be_chosen(rng):
    n = int(rng.integers(1, 64))
    x = -rng.integers(1, 100, n).astype(np.float32)  # all below 0, so that a padding of 0 is seen
    out = pt.zeros((4,), pt.f32)
    extrema(out.partition(4), pt.asarray(x), HIGH=T.Padding.NEG_INF, LOW=T.Padding.INF).sync()
    assert out.numpy().tolist()[:3] == [x.max(), x.min(), x.sum()]
    extrema(out.partition(4), pt.asarray(-x), HIGH=T.Padding.ZERO, LOW=T.Padding.ZERO).sync()
    assert out.numpy().tolist()[:3] == [(-x).max(), 0, -x.sum()]
