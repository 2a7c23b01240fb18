"""Folding, canonical forms, sharing and dead code, by the text that is left."""

import itertools

import numpy as np
import pytest

from peertile.dtypes import ALL_DTYPES, b1
from peertile.ir.ops import Binary, Compare
from peertile.ir.text import parse_kernel, print_kernel
from peertile.ir.verify import verify
from peertile.meaning import numbers
from peertile.passes.simplify import fold_binary, fold_compare, simplify

PARAMS = "%i: i64, %j: i64, %c: bool, %f: f32, %x: view<f32, 1, read>, %z: view<f32, 1, write>"
HEAD = "kernel @k(" + PARAMS + ") {\n"


def simplified(body: str) -> str:
    """The body that is left, without the return."""
    kernel = simplify(parse_kernel(f"{HEAD}{body}\nreturn() }}"))
    verify(kernel)
    lines = print_kernel(kernel).splitlines()[1:-2]
    return "\n".join(line[2:] for line in lines)


INTS = [d for d in ALL_DTYPES if d.is_int]


@pytest.mark.parametrize("d", INTS, ids=str)
def test_folding_agrees_with_the_meaning(d) -> None:
    values = sorted({d.min, d.min + 1, 0, 1, 3, d.bits, d.max - 1, d.max, *([-1, -3] if d.min else [])})
    for a, b in itertools.product(values, values):
        x, y = d.numpy.type(a), d.numpy.type(b)
        with np.errstate(all="ignore"):
            for fn in Binary:
                if fn not in (Binary.DIV, Binary.POW, Binary.ATAN2):
                    assert fold_binary(fn, a, b, d) == int(numbers.binary(fn, x, y, d)), (fn, a, b)
            for compare in Compare:
                assert fold_compare(compare, a, b, d) == bool(numbers.compare(compare, x, y, d)), (compare, a, b)


def test_folding_of_bools_agrees_with_the_meaning() -> None:
    for a, b in itertools.product((False, True), repeat=2):
        for fn in (Binary.AND, Binary.OR, Binary.XOR):
            assert fold_binary(fn, a, b, b1) == bool(numbers.binary(fn, np.bool_(a), np.bool_(b), b1))


USE = "\nprint(%r)"
CONST = "%a = const(value=6) : i64 %b = const(value=4) : i64 %one = const(value=1) : i64 %zero = const(value=0) : i64\n"
TRUE = "%t = const(value=true) : bool %n = const(value=false) : bool\n"

TO_CONST = {
    "%r = binary(%a, %b, fn=Binary.sub) : i64": "2",
    "%r = binary(%j, %j, fn=Binary.sub) : i64": "0",
    "%r = binary(%i, %zero, fn=Binary.mul) : i64": "0",
    "%r = unary(%a, fn=Unary.neg) : i64": "-6",
    "%r = unary(%a, fn=Unary.not) : i64": "-7",
    "%r = bitcast(%a) : u64": "6",
    "%r = cast(%a) : i8": "6",
    "%r = cast(%a) : f32": "6.0",
    "%r = cast(%a) : bool": "true",
    "%r = compare(%a, %b, fn=Compare.gt) : bool": "true",
    "%r = unary(%t, fn=Unary.not) : bool": "false",
}


@pytest.mark.parametrize("op", TO_CONST)
def test_becomes_a_constant(op: str) -> None:
    found = simplified(CONST + TRUE + op + USE).splitlines()
    assert len(found) == 2
    assert f"const(value={TO_CONST[op]})" in found[0]


TO_VALUE = {
    "%r = binary(%i, %zero, fn=Binary.add) : i64": "%i",
    "%r = binary(%zero, %i, fn=Binary.add) : i64": "%i",
    "%r = binary(%i, %one, fn=Binary.mul) : i64": "%i",
    "%r = binary(%i, %one, fn=Binary.floordiv) : i64": "%i",
    "%r = binary(%i, %i, fn=Binary.min) : i64": "%i",
    "%r = binary(%c, %t, fn=Binary.and) : bool": "%c",
    "%r = binary(%c, %n, fn=Binary.or) : bool": "%c",
    "%r = select(%t, %i, %j) : i64": "%i",
    "%r = select(%n, %i, %j) : i64": "%j",
    "%r = select(%c, %i, %i) : i64": "%i",
    "%r = cast(%i) : i64": "%i",
    "%u = bitcast(%i) : u64 %r = bitcast(%u) : i64": "%i",
    "%u = unary(%f, fn=Unary.neg) : f32 %r = unary(%u, fn=Unary.neg) : f32": "%f",
    "%w = const(value=1.0) : f32 %r = binary(%f, %w, fn=Binary.mul) : f32": "%f",
    "%r = if(%t) : i64 { yield(%i) } else { yield(%j) }": "%i",
    "%r = if(%n) : i64 { return() } else { yield(%j) }": "%j",
}


@pytest.mark.parametrize("op", TO_VALUE)
def test_becomes_a_value_that_is_there(op: str) -> None:
    assert simplified(CONST + TRUE + op + USE) == f"print({TO_VALUE[op]})"


KEPT = [
    "%z0 = const(value=0.0) : f32\n%r = binary(%f, %z0, fn=Binary.add) : f32",  # -0 + 0 is 0
    "%r = binary(%f, %f, fn=Binary.sub) : f32",  # inf - inf is nan
    "%r = compare(%f, %f, fn=Compare.eq) : bool",
    "%big = const(value=16777217) : i64\n%r = cast(%big) : f32",  # no number of f32
    "%r = if(%c) : i64 {\n  yield(%i)\n} else {\n  return()\n}",
    "%r = loop() : i64 {\n  break(%i)\n}",
]


@pytest.mark.parametrize("op", KEPT)
def test_stays(op: str) -> None:
    assert simplified(op + USE) == op + USE


def test_constants_go_to_the_right() -> None:
    assert simplified("%a = const(value=6) : i64 %r = binary(%a, %i, fn=Binary.mul) : i64" + USE) == (
        "%a = const(value=6) : i64\n%r = binary(%i, %a, fn=Binary.mul) : i64\nprint(%r)"
    )


def test_shapes_are_joined() -> None:
    body = """%t = broadcast(%f) : f32[4, 8] %a = reshape(%t) : f32[32] %b = reshape(%a) : f32[2, 16]
    %p = permute(%t, axes=[1, 0]) : f32[8, 4] %q = permute(%p, axes=[1, 0]) : f32[4, 8]
    %s = reshape(%q) : f32[4, 8] print(%b, %s)"""
    assert simplified(body) == ("%t = broadcast(%f) : f32[4, 8]\n%b = reshape(%t) : f32[2, 16]\nprint(%b, %t)")


def test_permutations_compose() -> None:
    body = """%t = broadcast(%f) : f32[2, 4, 8] %p = permute(%t, axes=[1, 2, 0]) : f32[4, 8, 2]
    %q = permute(%p, axes=[2, 1, 0]) : f32[2, 8, 4] print(%q)"""
    assert simplified(body) == (
        "%t = broadcast(%f) : f32[2, 4, 8]\n%q = permute(%t, axes=[0, 2, 1]) : f32[2, 8, 4]\nprint(%q)"
    )


def test_equal_scalars_are_shared_where_the_first_is_visible() -> None:
    body = """if(%c) { %a = binary(%i, %j, fn=Binary.add) : i64 print(%a) yield() } else { yield() }
    %b = binary(%i, %j, fn=Binary.add) : i64 %d = binary(%i, %j, fn=Binary.add) : i64
    if(%c) { %e = binary(%i, %j, fn=Binary.add) : i64 print(%e) yield() } else { yield() }
    print(%b, %d)"""
    assert (
        simplified(body)
        == """\
if(%c) {
  %a = binary(%i, %j, fn=Binary.add) : i64
  print(%a)
  yield()
} else {
  yield()
}
%b = binary(%i, %j, fn=Binary.add) : i64
if(%c) {
  print(%b)
  yield()
} else {
  yield()
}
print(%b, %b)"""
    )


def test_zeros_of_both_signs_are_not_shared() -> None:
    body = "%a = const(value=0.0) : f32\n%b = const(value=-0.0) : f32\nprint(%a, %b)"
    assert simplified(body) == body


def test_a_condition_is_checked_once() -> None:
    body = 'check(%c, message="a") check(%c, message="b") for(%i, %j, %i) (%k: i64) { check(%c) print(%k) continue() }'
    assert simplified(body) == 'check(%c, message="a")\nfor(%i, %j, %i) (%k: i64) {\n  print(%k)\n  continue()\n}'


def test_check_of_true_goes_and_of_false_stays() -> None:
    assert simplified("%t = const(value=true) : bool check(%t)") == ""
    body = "%n = const(value=false) : bool\ncheck(%n)"
    assert simplified(body) == body


def test_dead_code_goes_inner_first() -> None:
    body = """%a = binary(%i, %j, fn=Binary.add) : i64 %b = binary(%a, %i, fn=Binary.mul) : i64
    %r = for(%i, %j, %i, %a) : i64 (%k: i64, %x1: i64) { %y = binary(%x1, %k, fn=Binary.add) : i64 continue(%y) }
    %s = if(%c) : i64 { %q = unary(%i, fn=Unary.neg) : i64 yield(%q) } else { yield(%b) }"""
    assert simplified(body) == ""


EFFECTS = [
    "%t = load(%x, %i) : f32[4]",
    "for(%i, %j, %i) (%k: i64) {\n  check(%c)\n  continue()\n}",
    "if(%c) {\n  return()\n} else {\n  yield()\n}",
    "loop() {\n  suspend()\n  continue()\n}",
    "fence(scope=Scope.system)",
]


@pytest.mark.parametrize("body", EFFECTS)
def test_effects_stay(body: str) -> None:
    assert simplified(body) == body
