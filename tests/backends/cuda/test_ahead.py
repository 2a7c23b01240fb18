"""Divided loops put in order: what of Triton's text is changed and how, and that all else is left as it is."""

import re

import pytest
from tests.backends.cuda.test_specialized import DIVIDED, attention, product

from peertile.backends.cuda import triton_compile
from peertile.backends.cuda.ahead import put_in_order
from peertile.backends.cuda.compile import compile_kernel


def groups(text):
    """The parts of a divided kernel that multiply."""
    parts = re.split(r"^    (?=partition\d+\()", text, flags=re.MULTILINE)
    return [part for part in parts if "ttng.warp_group_dot " in part]


STEPS = re.compile(
    r"warp_group_dot_wait .*pendings = (\d)|ttng\.(warp_group_dot) .*(isAsync)|ttng\.(warp_group_dot )"
    r"|(tt\.reduce)\"|(bar\.sync)"
)
"""What a group asks for and what it waits for."""


def steps(group):
    return ["".join(filter(None, step)).strip() for step in STEPS.findall(group)]


@pytest.mark.parametrize("text", ["", "module {\n}\n", "    partition0() {\n  %a = ttng.warp_group_dot %b, %c, %d\n"])
def test_a_text_that_is_not_known_is_left_as_it_is(text):
    assert put_in_order(text) is text


@pytest.mark.slow
@pytest.mark.usefixtures("triton_needed")
@pytest.mark.parametrize("causal", [pytest.param(False, marks=pytest.mark.long), True])
def test_scores_come_a_block_ahead_of_what_they_weigh(causal):
    text = compile_kernel(attention(keys=128, causal=causal), options=DIVIDED).text
    assert len(groups(text["ttgir"])) == 2
    for group in groups(text["ttgir"]):
        first, last = ["warp_group_dot", "tt.reduce", "tt.reduce"], ["warp_group_dot"]
        trip = ["warp_group_dotisAsync"] * 2 + ["1", "tt.reduce", "tt.reduce", "bar.sync", "0"]
        assert steps(group) == [*first, *trip, *last]
        # Nothing is done where there are no blocks, and nothing compared where all keys are seen.
        assert group.count("scf.if ") == (3 if causal else 1)
    assert "st.local" not in text["ptx"]


@pytest.mark.long
@pytest.mark.usefixtures("triton_needed")
def test_a_loop_with_one_product_is_divided_and_left_as_it_is(monkeypatch):
    seen = []
    monkeypatch.setattr(triton_compile, "put_in_order", lambda text: seen.append(put_in_order(text) is text) or text)
    compile_kernel(product(), options=DIVIDED)
    assert seen in ([True], [])  # nothing, where it was compiled before
