"""Descriptions of arguments on the command line: what they are read as, and what is said of those that cannot be."""

import re

import pytest

import peertile as pt
import peertile.language as T
from peertile.errors import ArgumentError, CompileError
from peertile.inspection import Signature, describe, load_kernel
from peertile.language.annotations import read_signature


@pt.kernel
def convert(z: T.Exclusive, x: T.Shared, DT: T.Const[T.DType], N: T.Const[int] = 1, HOW: T.Const[T.Rounding] = T.Rounding.DEFAULT, MODE: T.Const[str] = "a", ANY: T.Const = 3):  # fmt: skip
    z.store((x.load_like(z) * N).astype(DT, HOW).astype(z.dtype))


def consts(*texts):
    return Signature.parse(convert, ["z=f32[100]/16", "x=f32[100]", *texts]).consts


def test_constants_are_read_by_the_type_that_the_kernel_declares():
    assert consts("DT=bf16", "N=4") == {"DT": pt.bf16, "N": 4, "HOW": T.Rounding.DEFAULT, "MODE": "a", "ANY": 3}
    found = consts("DT=T.f16", "HOW=T.Rounding.ZERO", "MODE=fast", "ANY=(1, 2)")
    assert found == {"DT": pt.f16, "N": 1, "HOW": T.Rounding.ZERO, "MODE": "fast", "ANY": (1, 2)}
    assert [consts("DT=i8", f"ANY={text}")["ANY"] for text in ("u8", "'u8'", "other")] == [pt.u8, "u8", "other"]


@pytest.mark.parametrize("name", ["", ":", ":wrong"])
def test_a_kernel_that_is_not_named_is_told_which_there_are(tmp_path, name):
    path = tmp_path / "two.py"
    path.write_text("import peertile as pt\n@pt.kernel\ndef one(): pass\n@pt.kernel\ndef two(): pass\n")
    with pytest.raises(ArgumentError) as caught:
        load_kernel(f"{path}{name}")
    assert str(caught.value) == f"kernel: expected {path}:KERNEL with one of one, two, got {f'{path}{name}'!r}"


def test_a_kernel_with_a_dtype_as_constant_can_be_inspected():
    assert (
        "bf16" in describe(convert, Signature.parse(convert, ["z=f32[100]/16", "x=f32[100]", "DT=bf16"])).stages["ir"]
    )


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["DT=f33"], "dtype: expected one of bool, i8,"),
        (["DT=f32", "N=x"], "N: expected a value for T.Const[int], got 'x'"),
        (["DT=f32", "N=1.5"], "N: expected a value for T.Const[int], got '1.5'"),
        (["DT=f32", "HOW=SIDEWAYS"], "HOW: expected a value for T.Const[Rounding], got 'SIDEWAYS'"),
        (["N=4"], "DT: expected a constant such as DT=64, got nothing"),
    ],
)
def test_constants_that_do_not_fit_are_refused(texts, message):
    with pytest.raises(ArgumentError, match="^" + re.escape(message)):
        consts(*texts)


def test_a_shape_without_numbers_is_refused():
    with pytest.raises(ArgumentError, match=re.escape("x: expected a tensor such as x=f32[1000,64], got f32[,]")):
        Signature.parse(convert, ["z=f32[100]/16", "x=f32[,]", "DT=f32"])


def test_constants_take_their_types_and_unions_of_them():
    def k(a: T.Const[int | None], b: T.Const[float], c: T.Const[tuple[int, ...]]):
        pass

    annotations = [p.const_type for p in read_signature(k)]
    given = {"a": (3, None), "b": (1.5, 2), "c": ((1, 2),)}
    refused = {"a": ("3", 1.5), "b": ("x", None), "c": ([1], 3)}
    for kind, name in zip(annotations, "abc", strict=True):
        assert all(T.Const[kind].takes(value) for value in given[name])
        assert not any(T.Const[kind].takes(value) for value in refused[name])


def test_a_constant_of_no_type_and_a_default_of_another_one_are_refused():
    def of_a_number(N: T.Const[3]):
        pass

    def of_a_text(N: T.Const[int] = "4"):
        pass

    with pytest.raises(CompileError, match=re.escape("parameter `N`: expected a type in T.Const[...], got 3")):
        pt.kernel(of_a_number)
    with pytest.raises(
        CompileError, match=re.escape("parameter `N`: default: expected a value for T.Const[int], got '4'")
    ):
        pt.kernel(of_a_text)
