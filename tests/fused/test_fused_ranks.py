"""Fused kernels on ranks as threads: values against numpy, types, shapes that do not divide, empty shares, processes."""

import fused_programs as programs
import numpy as np
import pytest

import peertile as pt
from peertile.library import fused
from peertile.library.experts import Experts
from peertile.library.fused import FusedProducts

pytestmark = pytest.mark.any_device

WORLDS = [1, 2, 3, 4]
THREE = [pytest.param(2, marks=pytest.mark.cuda2), 3]
"""Ranks of a test: three, or on GPUs two, since each needs one of its own."""
CASES = list(programs.PROGRAMS)


def spawned(program, n, *args, model=pt.RankModel.THREADS, **options):
    assert all(pt.spawn(call, n, (program, args, options), model=model, timeout_s=100))


def call(group, program, args, options):
    return program(group, *args, **options)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("name", CASES)
def test_fused_kernels_of_two_ranks_are_right(name):
    spawned(programs.PROGRAMS[name], 2, seed=1)


@pytest.mark.slow
@pytest.mark.gpus("n")
@pytest.mark.parametrize("n", WORLDS)
@pytest.mark.parametrize("name", CASES)
def test_fused_kernels_are_right_with_empty_shares(name, n, seed):
    spawned(programs.PROGRAMS[name], n, seed=seed)


@pytest.mark.slow
@pytest.mark.gpus("n")
@pytest.mark.parametrize("n", THREE)
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("name", CASES)
def test_small_floats_are_summed_in_f32(name, dtype, n, seed):
    spawned(programs.PROGRAMS[name], n, dtype=dtype, seed=seed)


@pytest.mark.slow
@pytest.mark.gpus(2)
@pytest.mark.parametrize("name", CASES)
def test_fused_kernels_over_processes(name):
    spawned(programs.PROGRAMS[name], 2, model=pt.RankModel.PROCESSES)


@pytest.mark.slow
@pytest.mark.gpus(3)
@pytest.mark.feature("A2", "cpu")
@pytest.mark.parametrize(("movers", "workers"), [(1, 1), (2, 3)])
def test_any_number_of_movers_and_workers_is_right(movers, workers, seed):
    options = {"movers": movers, "workers": workers, "seed": seed, "staging_bytes": 1 << 22}
    spawned(programs.gathered_product, 3, (150, 0, 601), 40, 300, **options)
    spawned(programs.scattered_product, 3, (300, 1, 0), (40, 33, 1), 300, **options)
    del options["staging_bytes"]
    spawned(programs.ring, 3, (70, 9, 140), 2, 1, 20, **options)


@pytest.mark.slow
@pytest.mark.gpus(2)
@pytest.mark.feature("A2", "cpu")
@pytest.mark.parametrize(("rows", "columns", "inner"), [(32, 80, 64), (40, 150, 1100), (100, 320, 9000)])
def test_two_ranks_may_gather_into_wide_tiles_by_halves_of_the_inner_axis(rows, columns, inner, seed):
    options = {"tile": (16, 64, 16), "movers": 2, "workers": 5, "seed": seed, "turns": 4, "wide": True}
    options |= {"staging_bytes": 4 * 2 * rows * inner}
    spawned(programs.gathered_product, 2, (rows,) * 2, inner, columns, **options)
    spawned(programs.gathered_product, 2, (rows,) * 2, inner, columns, "bf16", **options)


def factors_that_lie_otherwise(group, wide):
    """By rows on one rank, by columns on the other: both have to launch the same."""
    with FusedProducts(group, staging_bytes=1 << 20, movers=2, workers=5, tile=(16, 64, 16)) as products:
        products._wide = wide
        parts = [programs.numbers((1, r), "f32", 32, 64) for r in range(group.size)]
        b, exact = programs.numbers((2, group.rank), "f32", 64, 80)
        if group.rank:
            b = pt.asarray(np.ascontiguousarray(b.numpy().T)).permute(1, 0)
        got = products.all_gather_matmul(parts[group.rank][0], b).sync().numpy()
        programs.close(got, np.concatenate([p[1] for p in parts]) @ exact, "f32", 20.0)
        return products._first_panel(pt.bf16, (1024, 1024), (8192, 5120), (128, 256))


@pytest.mark.slow
@pytest.mark.gpus(2)
@pytest.mark.parametrize("wide", [False, True])
def test_how_a_factor_lies_does_not_decide_what_is_launched(wide):
    panels = pt.spawn(factors_that_lie_otherwise, 2, (wide,), model=pt.RankModel.THREADS, timeout_s=60)
    assert panels == [4096 if wide else 0] * 2


@pytest.mark.slow
@pytest.mark.gpus(3)
@pytest.mark.feature("A2", "cpu")
@pytest.mark.parametrize("m", [1, 7, 64])
def test_the_sum_of_a_decoding_step_has_the_same_bits_on_every_rank(m, seed):
    spawned(programs.reduced_product, 3, m, (130, 64, 1), 700, "bf16", seed=seed)


@pytest.mark.slow
@pytest.mark.gpus(3)
@pytest.mark.feature("A2", "cpu")
def test_parts_of_a_sum_may_travel_in_bf16(seed):
    options = {"partials": pt.bf16, "seed": seed}
    spawned(programs.reduced_product, 3, 5, (13, 6, 1), 20, "bf16", **options)
    spawned(programs.scattered_product, 3, (5, 1, 0), (13, 6, 1), 20, "bf16", **options)


@pytest.mark.slow
@pytest.mark.feature("A2", "cpu")
@pytest.mark.gpus("n")
@pytest.mark.parametrize("n", WORLDS)
def test_products_without_rows_or_inner_extent_are_empty_or_zero(n):
    spawned(programs.gathered_product, n, (0,) * n, 3, 4)
    spawned(programs.gathered_product, n, (2,) * n, 0, 4)
    spawned(programs.scattered_product, n, (0,) * n, (2,) * n)
    spawned(programs.reduced_product, n, 2, (0,) * n)


@pytest.mark.slow
@pytest.mark.gpus(3)
@pytest.mark.feature("A4", "cpu")
@pytest.mark.parametrize(("heads", "groups", "dim"), [(4, 4, 1), (6, 2, 33), (2, 1, 128)])
@pytest.mark.parametrize("causal", [False, True])
def test_heads_share_keys_and_have_any_width(heads, groups, dim, causal, seed):
    spawned(programs.ring, 3, (65, 1, 30), heads, groups, dim, causal=causal, seed=seed)


@pytest.mark.slow
@pytest.mark.gpus("ranks")
@pytest.mark.feature("A3", "cpu")
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(("count", "top_k"), [(5, 1), (5, 4), (5, 3)])
@pytest.mark.parametrize("partials", [None, pt.f32])
def test_experts_take_any_number_of_choices(partials, count, top_k, ranks, seed):
    spawned(programs.experts, ranks, (40, 0, 133), count, 700, top_k, partials=partials, seed=seed)


def rows_with_choices_of_two_on_a_rank(group):
    """Rank 0 has experts 0 and 1, rank 1 has 2 and 3; what the experts made is wider than what they got, or f32."""
    me = group.rank
    ids = np.array([[2, 0, 3], [1, 0, 2], [3, 2, -1], [0, 1, 2]])
    x = np.arange(8.0, dtype=np.float32).reshape(4, 2) + 10 * me
    weights = np.array([[1, 2, 4], [1, 1, 1], [3, 1, 5], [2, 0, 1]], np.float32)
    with Experts(group, experts=4, rows=4, width=2, top_k=3, dtype=pt.bf16, partials=pt.bf16) as moe:
        sent = moe.dispatch(pt.asarray(x, pt.bf16), pt.asarray(ids)).sync()
        assert sent.counts.numpy().ravel().tolist() == ([6, 4] if me == 0 else [8, 4])
        copied = int(moe._copied.numpy()[1 - me].sum())
        for columns, dtype in ((2, pt.f32), (3, pt.bf16), (1, pt.bf16)):
            y = moe.heap.empty((moe.on_rank * moe.places, columns), dtype)
            y.copy_from(np.ones(y.shape, np.float32))
            got = moe.combine(sent, pt.asarray(weights), y).sync().numpy().astype(np.float32)
            assert np.array_equal(got, np.repeat((weights * (ids >= 0)).sum(1)[:, None], columns, 1))
            moe.heap.free(y)
    return copied


@pytest.mark.slow
@pytest.mark.gpus(2)
@pytest.mark.feature("A3", "cpu")
def test_a_row_goes_to_a_rank_once_and_is_copied_there():
    """Two rows of each rank have a second choice on the other."""
    assert pt.spawn(rows_with_choices_of_two_on_a_rank, 2, model=pt.RankModel.THREADS, timeout_s=100) == [2, 2]


@pytest.mark.slow
@pytest.mark.gpus(3)
@pytest.mark.feature("A3", "cpu")
@pytest.mark.parametrize("places", [1, 3, 50])
def test_what_finds_no_place_is_left_out_in_rank_order(places, seed):
    spawned(programs.experts, 3, (40, 9, 33), 5, 10, 2, places=places, seed=seed)


def gathered_with_a_tail(group, rows, columns):
    """As on a GPU: a part is begun when it is there, and the last one ends in smaller tiles."""
    rows = list(rows)[: group.size]
    with FusedProducts(group, staging_bytes=1 << 20, movers=2, workers=3, tile=(16, 256, 16)) as products:
        products._on_gpu = True
        for turn in range(3):
            parts = [programs.numbers((turn, r), "f32", rows[r], 20) for r in range(group.size)]
            b, exact = programs.numbers((turn, 100 + group.rank), "f32", 20, columns)
            out = programs.poisoned((sum(rows), columns), "f32")
            products.all_gather_matmul(parts[group.rank][0], b, out, rows=rows).sync()
            programs.close(out.numpy(), np.concatenate([p[1] for p in parts]) @ exact, "f32", 10.0)
        return True


@pytest.mark.slow
@pytest.mark.gpus("n")
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("in_pairs", [True, False])
@pytest.mark.parametrize(("rows", "columns", "tile"), [(16, 40, None), (33, 70, (16, 16, 16)), (0, 5, None)])
def test_even_shares_of_a_sum_may_be_computed_in_pairs_or_in_two_parts(rows, columns, tile, in_pairs, n, seed):
    options = {"tile": tile, "in_pairs": in_pairs, "turns": 3, "seed": seed}
    spawned(programs.scattered_product, n, [rows] * n, (40, 23, 7), columns, **options)


@pytest.mark.slow
@pytest.mark.gpus("n")
@pytest.mark.feature("A2", "cpu")
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize(("moved", "workers"), [(1, 2), (2, 5), (3, 5)])
@pytest.mark.parametrize(
    ("rows", "columns", "tile"),
    [((32,) * 4, 40, (16, 16, 16)), ((33, 0, 70, 9), 70, (16, 16, 16)), ((3,) * 4, 5, None)],
)
def test_parts_of_a_sum_may_be_taken_to_their_owners_by_programs_that_only_move(
    rows, columns, tile, moved, workers, n, seed
):
    options = {"tile": tile, "movers": 1, "workers": workers, "moved": moved, "turns": 3, "seed": seed}
    spawned(programs.scattered_product, n, rows, (40, 23, 7, 16), columns, **options)
    spawned(programs.scattered_product, n, rows, (40, 23, 7, 16), columns, "bf16", partials=pt.bf16, **options)


@pytest.mark.slow
@pytest.mark.gpus("n")
@pytest.mark.feature("A2", "cpu")
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("rows", [(256, 256, 256), (130, 0, 257)])
def test_moved_parts_may_lie_in_memory_as_threads_have_them(rows, n, seed):
    options = {"tile": (128, 256, 16), "movers": 1, "workers": 5, "moved": 2, "deals": True, "turns": 3, "seed": seed}
    options |= {"dtype": "bf16", "partials": pt.bf16, "staging_bytes": 4 << 20}
    spawned(programs.scattered_product, n, rows, (40, 23, 7), 300, **options)


def test_programs_only_move_where_they_hide_more_than_they_cost():
    """Tiles of 128 by 256 of two H200, of 132 programs, which take 46 us at an inner extent of 4096."""
    tile_s, nbytes = 46e-6, 1 << 16
    assert fused.choose_movers((256, 256), 132, tile_s, nbytes) == 4  # 512 tiles in four turns, as without movers
    assert fused.choose_movers((1024, 1024), 132, tile_s, nbytes) == 4
    assert fused.choose_movers((256, 256), 132, 3.5 * tile_s, nbytes) == 4
    assert fused.choose_movers((256, 256), 128, tile_s, nbytes) == 0  # five turns instead of four
    assert fused.choose_movers((8, 8), 132, tile_s, nbytes) == 0  # one turn: there is nothing to hide it behind
    assert fused.choose_movers((0, 0), 132, tile_s, nbytes) == 0
    assert fused.choose_movers((1 << 20, 1 << 20), 132, tile_s, nbytes) == 0  # more turns than there are words


@pytest.mark.slow
@pytest.mark.gpus("n")
@pytest.mark.parametrize("rows", [(64, 64, 64), (48, 70, 33), (0, 64, 64)])
@pytest.mark.parametrize("n", [2, 3])
def test_gathered_rows_may_be_multiplied_at_once_and_in_smaller_tiles_at_the_end(monkeypatch, n, rows):
    monkeypatch.setattr(fused, "WORTH_WAITING", 100)
    monkeypatch.setattr(fused, "WORTH_A_TAIL", 1.0)
    found, choose = [], fused.smaller_at_end.__wrapped__
    monkeypatch.setattr(fused, "smaller_at_end", lambda *facts: found.append(choose(*facts)) or found[-1])
    assert all(pt.spawn(gathered_with_a_tail, n, (rows, 700), model=pt.RankModel.THREADS, timeout_s=100))
    assert len(found) == 3 * n
    assert any(found) == ((n, rows) not in [(2, (0, 64, 64)), (3, (48, 70, 33))])


def test_a_gather_ends_in_smaller_tiles_where_its_movers_and_the_others_end_together_then():
    """Of 2048 and 8192 rows by 10240 columns over two ranks of 132 programs: three rows of tiles are halved; none."""
    quick = fused.smaller_at_end((8, 0, 8), (20, 40), 8, 132, 16, 0.66, True)
    assert quick == 3
    assert fused.smaller_at_end((16, 16, 32), (20, 40), 32, 132, 16, 2.63, False) == 0
    assert fused.smaller_at_end((8, 0, 8), (20, 40), 2, 132, 16, 0.66, True) == 0  # no more than every rank has


def flagged_sums(group, dtype, partials):
    options = {"dtype": dtype, "flagged": True, "partials": getattr(pt, partials), "turns": 3}
    programs.reduced_product(group, m=5, columns=10, staging_bytes=1 << 16, **options)
    programs.reduced_product(group, m=70, inner=(33, 64, 5), columns=130, staging_bytes=1 << 20, **options)
    return True


@pytest.mark.slow
@pytest.mark.gpus("n")
@pytest.mark.parametrize(("dtype", "partials"), [("f32", "f32"), ("bf16", "bf16"), ("f16", "f32")])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_parts_whose_words_carry_flags_are_summed_alike_on_all_ranks(n, dtype, partials):
    assert all(pt.spawn(flagged_sums, n, (dtype, partials), model=pt.RankModel.THREADS, timeout_s=100))


def changing_shapes(group):
    """Calls of one communicator whose staging lies elsewhere each time, the ranks not in step."""
    rng = np.random.default_rng(3)
    with FusedProducts(group, staging_bytes=1 << 15, workers=2, tile=(8, 8, 8), flagged=False) as products:
        for turn in range(12):
            m, k, columns, kind = (int(v) for v in (*rng.integers(1, 30, 3), rng.integers(4)))
            products._part_movers = int(kind == 3)
            products._wide = turn % 2 == 0
            m *= group.size
            parts = [programs.numbers((turn, r), "f32", m, k) for r in range(group.size)]
            factors = [programs.numbers((turn, 100 + r), "f32", k, columns) for r in range(group.size)]
            a, b = parts[group.rank][0], factors[group.rank][0]
            total = sum(p[1] @ f[1] for p, f in zip(parts, factors, strict=True))
            rows = slice(group.rank * m // group.size, (group.rank + 1) * m // group.size)
            if kind in (0, 3):
                got, want = products.matmul_reduce_scatter(a, b), total[rows]
            elif kind == 1:
                got, want = products.matmul_all_reduce(a, b), total
            else:
                own = [p[1][: m // group.size] for p in parts]
                got = products.all_gather_matmul(a[: m // group.size], b)
                want = np.concatenate(own) @ factors[group.rank][1]
            programs.close(got.sync().numpy(), want, "f32", 40.0)
    return True


@pytest.mark.slow
@pytest.mark.gpus("n")
@pytest.mark.parametrize("n", [2, 3])
def test_calls_of_different_shapes_and_kinds_may_follow_each_other(n):
    assert all(pt.spawn(changing_shapes, n, (), model=pt.RankModel.THREADS, timeout_s=100))
