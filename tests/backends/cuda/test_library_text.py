"""What details of the library's kernels become in Triton source: exponentials, folds that keep their axis, warps."""

import re

import pytest

import peertile as pt
import peertile.language as T
from peertile.backends.cuda.emit import emit_kernel
from peertile.frontend.build import build_kernel
from peertile.language.annotations import Role
from peertile.library import attention_kernels, gemm, layer_kernels
from peertile.passes.pipeline import run_pipeline


def emitted(kernel, *arguments, **consts):
    """A kernel for arguments of this processor: types are what counts."""
    _, bound = kernel.bind(arguments, consts, None)
    names = [p.name for p in kernel.params if p.role is not Role.CONST]
    types = {name: a.type for name, a in zip(names, bound.arguments, strict=True)}
    return emit_kernel(run_pipeline(build_kernel(kernel.fn, types, bound.consts, name=kernel.name)))


@pt.kernel
def powers(z: T.Exclusive, x: T.Shared, LEAST: T.Const[float]):
    z.store(T.exp2(T.maximum(x.load_like(z), LEAST)))


@pytest.mark.parametrize(
    ("least", "word"), [(-126.0, "_exp2_normal("), (0.0, "_exp2_normal("), (-127.0, "libdevice.exp2(")]
)
def test_powers_of_two_that_cannot_be_small_are_one_instruction(least, word):
    x = pt.zeros((64,), pt.f32)
    text = emitted(powers, x.partition(64), x, LEAST=least).source
    body = text[text.index("def powers(") :]
    assert word in body
    assert ("ex2.approx.ftz.f32" in text) == word.startswith("_exp2_normal")


@pt.kernel
def flushed(z: T.Exclusive, x: T.Shared, LEAST: T.Const[float], LESS: T.Const[float], OTHER: T.Const[bool]):
    t = x.load_like(z)
    z.store(T.where((t + 1.0 if OTHER else t) < LEAST, LESS, T.exp2(t)))


@pytest.mark.parametrize(
    ("least", "less", "other", "dtype", "is_one"),
    [
        (-126.0, 0.0, False, pt.f32, True), (-125.0, 0.0, False, pt.f32, False), (-126.0, 1.0, False, pt.f32, False),
        (-126.0, 0.0, True, pt.f32, False), (-126.0, 0.0, False, pt.f64, False),
    ],
)  # fmt: skip
def test_powers_of_two_that_are_zero_where_they_are_small_are_one_instruction(least, less, other, dtype, is_one):
    x = pt.zeros((64,), dtype)
    text = emitted(flushed, x.partition(64), x, LEAST=least, LESS=less, OTHER=other).source
    assert ("_exp2_flushed(" in text) == is_one
    assert ("tl.where(" in text[text.index("def flushed(") :]) != is_one


@pt.kernel
def flushed_by_columns(z: T.Exclusive, x: T.Shared):
    t = x.load((0,), (16,))
    z.store(T.where((t < -126.0)[None, :], 0.0, T.exp2(t)[:, None]))


def test_a_power_of_another_element_than_the_one_compared_is_not_replaced():
    text = emitted(flushed_by_columns, pt.zeros((16, 16), pt.f32).partition((16, 16)), pt.zeros((16,), pt.f32)).source
    assert "_exp2_flushed(" not in text
    assert "tl.where(" in text[text.index("def flushed_by_columns(") :]


def test_a_fold_that_keeps_its_axis_stays_where_it_is():
    x = pt.zeros((8, 256), pt.f32)
    text = emitted(layer_kernels.softmax, x.partition((4, None)), x).source
    assert "[:, None]" in text
    assert "tl.reshape" not in text[text.index("def softmax(") :]


@pytest.mark.parametrize(
    ("rows", "width", "warps"),
    [(4, 1024, 4), (8, 512, 8), (1, 512, 2), (1, 1024, 2), (1, 2048, 8), (1, 4096, 16), (1, 16384, 32), (1, 32768, 16)],
)
def test_a_warp_folds_a_short_row_by_itself_and_many_a_long_one(rows, width, warps):
    x = pt.zeros((8, width), pt.f32)
    assert emitted(layer_kernels.softmax, x.partition((rows, None)), x).num_warps == warps


@pytest.mark.parametrize(("width", "warps"), [(4096, 8), (16384, 8), (32768, 16)])
def test_a_row_that_is_widened_before_it_is_folded_has_fewer(width, warps):
    x = pt.zeros((8, width), pt.bf16)
    assert emitted(layer_kernels.softmax, x.partition((1, None)), x).num_warps == warps


@pytest.mark.parametrize(
    ("dtype", "width", "warps"),
    [("f32", 2048, 8), ("f32", 4096, 16), ("f32", 8192, 16), ("f32", 16384, 32), ("bf16", 16384, 32)],
)
def test_a_tile_that_is_loaded_twice_stays_in_the_cache_until_then_and_no_longer(dtype, width, warps):
    x, gain = pt.zeros((8, width), getattr(pt, dtype)), pt.zeros((width,), pt.f32)
    made = emitted(layer_kernels.rms_norm, x.partition((1, None)), x, x, gain, 1e-6, ADDED=False, AGAIN=True)
    assert re.findall(r'eviction_policy="(\w+)"', made.source) == ["evict_last", "evict_first"]
    assert made.num_warps == warps
    once = emitted(layer_kernels.rms_norm, x.partition((1, None)), x, x, gain, 1e-6, ADDED=False)
    assert "eviction_policy" not in once.source


@pytest.mark.parametrize("is_added", [False, True])
@pytest.mark.parametrize("gain", [pt.bf16, pt.f32], ids=str)
@pytest.mark.parametrize(("width", "warps", "registers"), [(4096, 8, 32), (8192, 16, 32), (16384, 16, 40)])
def test_a_narrow_row_that_is_loaded_twice_leaves_room_for_others(width, warps, registers, gain, is_added):
    x, g = pt.zeros((8, width), pt.bf16), pt.zeros((width,), gain)
    made = emitted(layer_kernels.rms_norm, x.partition((1, None)), x, x, g, 1e-6, ADDED=is_added, AGAIN=True)
    is_lean = gain is pt.bf16 and not is_added
    assert ((made.num_warps, made.max_registers) == (warps, registers)) is is_lean


@pytest.mark.parametrize(("width", "registers"), [(2048, None), (4096, None), (8192, 48), (16384, 32)])
def test_of_wide_rows_that_are_loaded_twice_two_programs_are_enough(width, registers):
    x, g = pt.zeros((8, width), pt.f32), pt.zeros((width,), pt.f32)
    made = emitted(layer_kernels.rms_norm, x.partition((1, None)), x, x, g, 1e-6, ADDED=False, AGAIN=True)
    assert made.max_registers == registers


@pytest.mark.parametrize("early", [False, True])
def test_a_gain_is_on_its_way_before_the_row_is_folded_or_after(early):
    x, g = pt.zeros((8, 2048), pt.f32), pt.zeros((2048,), pt.f32)
    text = emitted(layer_kernels.rms_norm, x.partition((1, None)), x, x, g, 1e-6, ADDED=False, EARLY=early).source
    assert (text.index("tl.load(gain_at") < text.index("tl.reduce(")) is early


def test_the_index_of_a_tile_of_whole_rows_takes_no_division():
    x = pt.zeros((8, 1000), pt.f32)
    for part, divides in ((x.partition((1, None)), False), (x.partition((1, 1024)), True)):
        text = emitted(layer_kernels.softmax, part, x).source
        assert ("% _tiles" in text) is divides


@pytest.mark.parametrize(("in_turn", "described"), [(False, "ab"), (True, "abc")])
def test_a_result_that_a_program_stores_once_is_not_worth_a_descriptor(in_turn, described):
    a, b, c = (pt.zeros((256, 256), pt.bf16) for _ in range(3))
    part = c.partition((128, 128))
    chosen = (gemm.gemm_persistent, part.persistent()) if in_turn else (gemm.gemm, part)
    text = emitted(*chosen, a, b, BK=64, STAGES=3).source
    assert "".join(k for k in "abc" if f"{k}_tiles = tl.make_tensor_descriptor(" in text) == described


@pytest.mark.parametrize(("width", "most"), [(4096, None), (16384, 32), (32768, None)])
def test_of_long_rows_two_programs_have_room_on_a_multiprocessor(width, most):
    x = pt.zeros((2, width), pt.f32)
    assert emitted(layer_kernels.softmax, x.partition((1, None)), x).max_registers == most


@pt.kernel
def folded_columns(z: T.Exclusive, x: T.Shared):
    z.store(T.sum(x.load((0, 0), (128, 128)), axis=0))


def test_what_is_folded_along_columns_has_the_warps_of_any_long_tile():
    x = pt.zeros((128, 128), pt.f32)
    made = emitted(folded_columns, pt.zeros((128,), pt.f32).partition(128), x)
    assert (made.num_warps, made.max_registers) == (16, None)


@pytest.mark.parametrize(("rows", "keys", "warps"), [(128, 128, 8), (128, 64, 8), (64, 64, 4)])
def test_products_of_one_trip_share_the_registers_of_enough_warps(rows, keys, warps):
    q = pt.zeros((1, 2, 256, 128), pt.bf16)
    made = emitted(
        attention_kernels.attend, q.permute(2, 0, 1, 3).partition((rows, 1, 1, None)), q, q, q, q, 1.0, BK=keys,
        CAUSAL=True, BOUNDED=False, NEGATED=False, STAGES=2,
    )  # fmt: skip
    assert made.num_warps == warps
    # Weights too small to count are none, at the diagonal and beside it.
    assert made.source.count(" = _exp2_flushed(") == 2
