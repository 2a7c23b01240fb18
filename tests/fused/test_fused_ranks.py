"""Fused kernels on ranks as threads: values against numpy, types, shapes that do not divide, empty shares, processes."""

import fused_programs as programs
import pytest

import peertile as pt

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
@pytest.mark.gpus(3)
@pytest.mark.feature("A3", "cpu")
@pytest.mark.parametrize(("count", "top_k"), [(5, 1), (5, 4), (5, 3)])
def test_experts_take_any_number_of_choices(count, top_k, seed):
    spawned(programs.experts, 3, (40, 0, 133), count, 700, top_k, seed=seed)


@pytest.mark.slow
@pytest.mark.gpus(3)
@pytest.mark.feature("A3", "cpu")
@pytest.mark.parametrize("places", [1, 3, 50])
def test_what_finds_no_place_is_left_out_in_rank_order(places, seed):
    spawned(programs.experts, 3, (40, 9, 33), 5, 10, 2, places=places, seed=seed)
