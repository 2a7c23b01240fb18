"""Matrix products of the library: the table that chooses, and the same result however the product is cut."""

import json
from pathlib import Path

import numpy as np
import pytest

import peertile as pt
import peertile.language as T
from peertile.errors import ArgumentError
from peertile.library import gemm, products
from peertile.library.products import choose_product, matmul, rows_together, tail_rows, wide_columns

pytestmark = pytest.mark.any_device

TABLE = json.loads(Path(products.__file__).with_name("products.json").read_text())
BOUND = {"f32": 2e-6, "f16": 2e-3, "bf16": 1e-2}


def factors(rng, m, n, k, dtype):
    return tuple(pt.asarray(rng.standard_normal(s).astype(np.float32), dtype) for s in ((m, k), (k, n)))


def right(got, a, b, bound):
    want = a.numpy().astype(np.float64) @ b.numpy().astype(np.float64)
    error = np.linalg.norm(got.numpy().astype(np.float64) - want) / np.linalg.norm(want)
    assert error < bound, error


@pytest.mark.parametrize("shape", [(1, 8, 8), (16, 100, 40), (64, 70, 300), (257, 130, 65)], ids=str)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_products_of_any_shape_are_right(rng, dtype, shape):
    a, b = factors(rng, *shape, getattr(pt, dtype))
    out = pt.full((shape[0], shape[1]), float("nan"), a.dtype)
    assert matmul(a, b, out).sync() is out
    right(out, a, b, BOUND[dtype])


@pytest.mark.parametrize(("programs", "rows"), [(1, 16), (3, 32), (7, 0), (7, 112)])
def test_a_product_that_ends_in_smaller_tiles_is_right(rng, programs, rows):
    a, b = factors(rng, 112, 70, 40, pt.f32)
    c = pt.full((112, 70), float("nan"), pt.f32)
    cut = [
        part.partition(tile).persistent(programs=programs, swizzle=8)
        for part, tile in ((c[: 112 - rows], (16, 32)), (c[112 - rows :], (16, 16)))
    ]
    gemm.gemm_tailed(*cut, a[: 112 - rows], a[112 - rows :], b, BK=16).sync()
    right(c, a, b, BOUND["f32"])


@pytest.mark.parametrize(("programs", "columns"), [(1, 80), (3, 78), (7, 57), (7, 20)])
def test_a_product_in_wide_tiles_is_right(rng, programs, columns):
    """Tiles of 16 + 4 columns, in two panels."""
    a, b = factors(rng, 50, columns, 40, pt.f32)
    c = pt.full((50, columns), float("nan"), pt.f32)
    wide = -(-columns // 20) * 16
    cut = [
        part.partition(tile).persistent(programs=programs, swizzle=2)
        for part, tile in ((c[:, :wide], (16, 16)), (c[:, wide:], (16, 4)))
    ]
    gemm.gemm_wide(*cut, a, b[:, :wide], b[:, wide:], BK=16, STAGES=2).sync()
    right(c, a, b, BOUND["f32"])


def test_a_product_may_be_made_in_wide_tiles(monkeypatch, rng):
    way = choose_product(pt.current_device().target or "cpu", "bf16", 520)
    wide = way.tile[1]
    a, b = factors(rng, 520, wide + 50, 48, pt.bf16)
    assert way.is_persistent
    monkeypatch.setattr(products, "_may_be_wide", lambda *_: True)
    monkeypatch.setattr(products, "wide_columns", lambda *_: wide)
    out = pt.full((520, wide + 50), float("nan"), pt.bf16)
    right(matmul(a, b, out).sync(), a, b, BOUND["bf16"])


def test_tiles_are_wide_where_fewer_of_them_fill_the_turns_of_the_programs():
    """And where the second panel has as many as the first one, and what is added up is long."""
    tile, programs = (128, 256), 132
    shapes = {(m, n): wide_columns(m, n, 8192, tile, programs) for m in (1024, 2048, 8192) for n in (2560, 5120, 8192)}
    found = {shape: columns for shape, columns in shapes.items() if columns}
    assert found == {(1024, 5120): 4096, (2048, 2560): 2048, (2048, 5120): 4096}
    assert [wide_columns(2048, 5120, k, tile, programs) for k in (5120, 4096, 1024, 0)] == [0] * 4
    assert wide_columns(4096, 5120, 5120, tile, programs) == 0
    for n in range(4900, 5200):
        assert wide_columns(1024, n, 8192, tile, programs) == (4096 if 5056 < n <= 5120 else 0)


def test_rows_are_cut_smaller_where_the_last_turn_of_the_programs_is_not_full():
    tile, programs = (128, 256), 132
    found = {n: tail_rows(2048, n, tile, programs) for n in (5120, 8192, 8448, 57344)}
    assert found == {5120: 384, 8192: 0, 8448: 0, 57344: 0}
    assert all(rows % 128 == 0 for rows in found.values())
    assert tail_rows(100, 5120, tile, 13) <= 100


def test_the_programs_of_a_gpu_read_the_least_of_both_factors():
    """Of all powers of two: so many rows of tiles, and the columns that are left for each of them."""
    for tile, programs in (((128, 256), 132), ((256, 128), 132), ((64, 128), 132), ((128, 128), 108)):
        read = {2**k: 2**k * tile[0] + programs / 2**k * tile[1] for k in range(8)}
        assert rows_together(tile, programs) == min(read, key=read.__getitem__)


@pytest.mark.sentence("NU-43")
def test_a_split_product_is_the_sum_of_its_shares_and_the_same_on_every_run(rng):
    a, b = factors(rng, 30, 50, 333, pt.f32)
    results = []
    for _ in range(2):
        shares, c = pt.full((3, 30, 50), float("nan"), pt.f32), pt.full((30, 50), float("nan"), pt.f32)
        gemm.gemm_part(shares.partition((1, 16, 32)), a, b, BK=16).sync()
        gemm.gemm_fold(c.partition((16, 32)), shares, S=3).sync()
        right(c, a, b, 2e-6)
        results.append(c.numpy())
    assert (results[0] == results[1]).all()


def test_a_factor_by_columns_and_one_turned_give_the_same(rng):
    a, b = factors(rng, 64, 64, 64, pt.f32)
    turned = pt.full((64, 64), float("nan"), pt.f32)
    gemm.turn(turned.partition((16, 32)), b).sync()
    assert (turned.numpy() == b.numpy().T).all()
    right(matmul(a, turned.permute(1, 0)).sync(), a, b, 2e-6)


def test_every_row_of_the_table_can_be_chosen():
    for arch, types in TABLE.items():
        for dtype, rows in types.items():
            assert rows[-1]["rows"] is None
            for row in rows:
                way = choose_product("sm_80" if arch == "gpu" else arch, dtype, row["rows"] or 1 << 20)
                assert (way.tile, way.inner, way.stages) == (tuple(row["tile"]), row["inner"], row["stages"])


@pytest.mark.parametrize(
    ("shapes", "dtypes", "message"),
    [
        (((4, 5), (4, 5)), (pt.f32, pt.f32), "matmul: expected a [m, k] and b [k, n], got [4, 5] and [4, 5]"),
        (((4, 5), (5,)), (pt.f32, pt.f32), "matmul: expected a [m, k] and b [k, n], got [4, 5] and [5]"),
        (
            ((4, 5), (5, 4)), (pt.f32, pt.f16),
            "matmul: expected factors of one float type up to f32, got f32 and f16",
        ),
        (
            ((4, 5), (5, 4)), (pt.i32, pt.i32),
            "matmul: expected factors of one float type up to f32, got i32 and i32",
        ),
    ],
)  # fmt: skip
def test_factors_that_do_not_fit_together_are_refused(shapes, dtypes, message):
    a, b = (pt.zeros(s, d) for s, d in zip(shapes, dtypes, strict=True))
    with pytest.raises(ArgumentError) as caught:
        matmul(a, b)
    assert str(caught.value) == message


def test_a_result_of_another_shape_is_refused():
    with pytest.raises(ArgumentError, match=r"matmul: expected out \[4, 4\], got \[4, 5\]"):
        matmul(pt.zeros((4, 5), pt.f32), pt.zeros((5, 4), pt.f32), pt.zeros((4, 5), pt.f32))


def test_tf32_is_for_f32_alone_and_exact_where_there_is_none(rng):
    a, b = factors(rng, 32, 32, 32, pt.f32)
    right(matmul(a, b, precision=T.Precision.TF32).sync(), a, b, 2e-3)
