"""Loops that are divided among groups of warps: what has to be true of the source, and that Triton divides them."""

import re
from types import SimpleNamespace

import pytest
from tests.backends.cuda.test_fused_products import lowered

import peertile as pt
from peertile.backends.cuda import divided as choice
from peertile.backends.cuda.compile import compile_kernel, lower_to_text
from peertile.backends.cuda.target import CudaOptions
from peertile.library import attention_kernels, gemm

DIVIDED = CudaOptions(num_warps=4, specialize=True)


def attention(keys=64, causal=True, stages=2):
    q, k, v, o = (pt.zeros((2, 256, 128), pt.bf16) for _ in range(4))
    part = o.permute(1, 0, 2).partition((128, 1, None))
    flat = q.reshape(512, 128)
    return lowered(attention_kernels.attend_flat, part, flat, k, v, 0.1, BK=keys, CAUSAL=causal, STAGES=stages)


def product(stages=3):
    a, b, c = (pt.zeros((256, 256), pt.bf16) for _ in range(3))
    return lowered(gemm.gemm, c.partition((128, 256)), a, b, BK=64, STAGES=stages)


def body(text):
    return text[text.rindex("@triton.jit") :]


@pytest.mark.parametrize("causal", [False, True])
def test_attention_in_one_loop_has_no_check_and_no_loop_around(causal):
    text = body(lower_to_text(attention(causal=causal), options=DIVIDED))
    assert len(re.findall(r"^ *for .*warp_specialize=True", text, re.MULTILINE)) == 1
    assert not re.search(r"_check\(|while |_alive|tl\.load\(|tl\.store\(", text)
    assert re.search(r"= v_\d+\[:, None, :\]", text)  # the groups do not know a reshape


def test_nothing_is_divided_unless_asked_for():
    assert "warp_specialize" not in lower_to_text(attention())
    assert len(re.findall(r"^ *(?:for|while) ", body(lower_to_text(attention())), re.MULTILINE)) == 2


def chosen(kernel, arch="sm_90", **options):
    return choice.divided(kernel, arch, CudaOptions(**options))


def test_attention_is_divided_where_that_was_tried_and_nothing_else_is(monkeypatch):
    monkeypatch.setattr(choice, "can_divide", lambda arch: arch == "sm_90")
    assert chosen(attention(keys=128), max_registers=200) == CudaOptions(
        num_warps=4, max_registers=200, specialize=True
    )
    for other in (attention(keys=64), attention(keys=128, stages=3), product(2)):
        assert chosen(other) == CudaOptions()
    for options in ({"num_warps": 8}, {"specialize": False}):
        assert chosen(attention(keys=128), **options) == CudaOptions(**options)
    assert chosen(attention(keys=128), "sm_100") == CudaOptions()


@pytest.mark.parametrize(
    ("version", "can"), [("3.6.0", True), ("3.6.1+git", True), ("3.5.1", False), ("3.60.0", False), (None, False)]
)
def test_only_the_triton_that_divided_it_right_is_trusted_with_it(monkeypatch, tmp_path, version, can):
    found = None
    if version is not None:
        (tmp_path / "__init__.py").write_text(f"__version__ = '{version}'\n")
        found = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(choice.importlib.util, "find_spec", lambda name: found)
    assert choice.can_divide.__wrapped__("sm_90") is can
    assert choice.can_divide.__wrapped__("sm_100") is choice.can_divide.__wrapped__(None) is False


@pytest.mark.slow
@pytest.mark.usefixtures("triton_needed")
def test_attention_is_divided_without_being_asked(monkeypatch):
    monkeypatch.setattr(choice, "can_divide", lambda arch: True)
    assert compile_kernel(attention(keys=128)).num_warps == 12
    monkeypatch.setattr(choice, "can_divide", lambda arch: False)
    assert compile_kernel(attention(keys=128)).num_warps == 8


def test_more_buffers_than_a_divided_loop_was_right_with_are_refused():
    assert "num_stages=4, warp_specialize=True" in lower_to_text(product(4), options=DIVIDED)
    with pytest.raises(pt.CompileError) as caught:
        lower_to_text(product(5), options=DIVIDED)
    assert str(caught.value).startswith(
        "specialize: a loop that is divided among groups of warps has at most 4 buffers, got 5; ask for fewer "
        "stages, or do not divide it\n"
    ), str(caught.value)
    assert "num_stages=5" in lower_to_text(product(5), options=CudaOptions(num_warps=4))


@pytest.mark.slow
@pytest.mark.usefixtures("triton_needed")
@pytest.mark.parametrize("make", [attention, product])
def test_of_four_warps_become_twelve_where_triton_divides_a_loop(make):
    whole = compile_kernel(make(), options=CudaOptions(num_warps=4))
    divided = compile_kernel(make(), options=DIVIDED)
    assert (whole.num_warps, divided.num_warps) == (4, 12)
    assert "ttg.warp_specialize(" in divided.text["ttgir"]


@pytest.mark.slow
@pytest.mark.usefixtures("triton_needed")
@pytest.mark.parametrize("stages", [2, 3])
def test_each_group_waits_for_as_many_bytes_as_its_half_of_the_queries_has(stages):
    text = compile_kernel(attention(stages=stages), options=DIVIDED).text["ttgir"]
    copies = re.findall(r"async_tma_copy_global_to_local %q_tiles\w*\[.*tensordesc<tensor<(\w+),", text)
    assert copies == ["64x128xbf16"] * 2  # what is divided is the first axis of a descriptor of two
    # What is loaded in the loop has as many barriers as buffers.
    buffers = set(re.findall(r"local_alloc : \(\) -> !ttg.memdesc<(\d)x64x128xbf16", text)) - {"1"}
    barriers = set(re.findall(r"local_alloc : \(\) -> !ttg.memdesc<(\d)x1xi64", text)) - {"1"}
    assert (buffers, barriers) == ({str(stages)}, {str(stages)})
