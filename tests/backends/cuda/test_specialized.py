"""Loops that are divided among groups of warps: what has to be true of the source, and that Triton divides them."""

import re

import pytest
from tests.backends.cuda.test_fused_products import lowered

import peertile as pt
from peertile.backends.cuda.compile import compile_kernel, lower_to_text
from peertile.backends.cuda.target import CudaOptions
from peertile.library import attention_kernels, gemm

DIVIDED = CudaOptions(num_warps=4, specialize=True)


def attention(keys=64, causal=True):
    q, k, v, o = (pt.zeros((2, 256, 128), pt.bf16) for _ in range(4))
    part = o.permute(1, 0, 2).partition((128, 1, None))
    return lowered(attention_kernels.attend_flat, part, q, k, v, 0.1, BK=keys, CAUSAL=causal)


def product():
    a, b, c = (pt.zeros((256, 256), pt.bf16) for _ in range(3))
    return lowered(gemm.gemm, c.partition((128, 256)), a, b, BK=64, STAGES=3)


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


@pytest.mark.slow
@pytest.mark.usefixtures("triton_needed")
@pytest.mark.parametrize("make", [attention, product])
def test_of_four_warps_become_twelve_where_triton_divides_a_loop(make):
    whole, divided = (compile_kernel(make(), options=o) for o in (CudaOptions(num_warps=4), DIVIDED))
    assert (whole.num_warps, divided.num_warps) == (4, 12)
    assert "ttg.warp_specialize(" in divided.text["ttgir"]
