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


@pytest.fixture(scope="module")
def divided():
    """A causal loop as Triton leaves it, without its places in the source."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_compile, "ORDERED_BY", None)
        text = compile_kernel(attention(keys=128), options=DIVIDED).text["ttgir"]
    return re.sub(r" loc\(.*", "", text)


def edited(text, old, new):
    found, count = re.subn(old, new, text, flags=re.MULTILINE)
    assert count > 1, old  # in both groups that multiply
    return found


OTHERS = {
    "its weights look at the sum": (r"(math\.fma %\S+, )%\w+,", r"\1%arg59,"),
    "another value is made of the sum": (r"(scf\.yield .*%norm\w*, %acc\w*, )%peak", r"\1%arg59"),
    "the sum is handed on twice": (r"(scf\.yield .*%norm\w*, )(%acc\w*), %peak", r"\1\2, \2"),
    "the sum is read behind its product": (r"^( *)(%best\w* = arith\.addi )%best\w*", r"\1\2%acc_2"),
    "keys after a query are seen": (r"cmpi sle, ", "cmpi sge, "),
    "two comparisons are joined": (r"= arith\.cmpi sle, (.*?) \{.*", r"= arith.andi \1"),
    "the number of a key is not clamped": (r"arith\.minsi (%v_\d+, %c128)", r"arith.addi \1"),
    "it is clamped too far away to be added in 32 bits": (r"(%c128_i64\w* = .*) 128 :", r"\1 2147483647 :"),
    "weights are other powers": (r"ex2\.approx", "tanh.approx"),
    "groups are larger": (r"(arrive_barrier %\d+, )128", r"\g<1>256"),
    "there is one buffer of values": (r"(memdesc_index %arg46.* : !ttg\.memdesc<)2x", r"\g<1>1x"),
    "buffers are found before what is waited for": (
        r"^( *ttng\.wait_barrier .*\n)( *%\w+ = ttg\.memdesc_index %arg46.*\n)", r"\2\1",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("triton_needed")
def test_a_loop_that_differs_is_left_as_it_is(divided):
    assert put_in_order(divided) != divided
    for what, (old, new) in OTHERS.items():
        other = edited(divided, old, new)
        assert put_in_order(other) is other, what


@pytest.mark.slow
@pytest.mark.usefixtures("triton_needed")
def test_names_that_begin_like_others_are_told_apart(divided):
    wanted = put_in_order(divided)
    for name in ("%c", "%arg59.x", "%score-1"):
        other = put_in_order(re.sub(r"%peak(?!\w)", name, divided))
        back = re.sub(rf"%(pt_a_)?{re.escape(name[1:])}(?![\w.$-])", r"%\1peak", other)
        assert back == wanted


def test_each_way_of_putting_in_order_has_a_cache_of_its_own(monkeypatch, tmp_path):
    (tmp_path / "ahead.py").write_text("another")
    ours = triton_compile._way()
    monkeypatch.setattr(triton_compile, "__file__", str(tmp_path / "triton_compile.py"))
    assert triton_compile._way.__wrapped__() != ours


@pytest.mark.long
@pytest.mark.usefixtures("triton_needed")
def test_a_loop_with_one_product_is_divided_and_left_as_it_is(monkeypatch):
    seen = []
    monkeypatch.setattr(triton_compile, "put_in_order", lambda text: seen.append(put_in_order(text) is text) or text)
    compile_kernel(product(), options=DIVIDED)
    assert seen in ([True], [])  # nothing, where it was compiled before
