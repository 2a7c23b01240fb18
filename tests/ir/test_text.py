"""The text form: every op and type comes back as it was; errors say line and column."""

import math

import pytest
from tests.ir.cases import CASES, kernel_text

from peertile import dtypes
from peertile.errors import CompileError
from peertile.ir import ops
from peertile.ir import text as text_form
from peertile.ir.core import Block, Builder, Kernel
from peertile.ir.text import parse_kernel, print_kernel
from peertile.ir.types import (
    Access,
    BarrierType,
    CounterType,
    MailboxType,
    Partition,
    PointerType,
    SignalType,
    Space,
    SymmetricType,
    TileType,
    TokenType,
    ViewType,
)
from peertile.source import Loc


@pytest.mark.feature("K15", "cpu")
@pytest.mark.parametrize("name", CASES)
def test_op_comes_back_from_its_text(name: str) -> None:
    text = kernel_text(CASES[name])
    kernel = parse_kernel(text)
    assert print_kernel(kernel) == text
    assert print_kernel(parse_kernel(print_kernel(kernel))) == text


TYPES = [
    *(TileType(d) for d in dtypes.ALL_DTYPES),
    TileType(dtypes.bf16, (2, 4, 8, 1, 1, 2)),
    ViewType(dtypes.f32, 0),
    ViewType(dtypes.f16, 2, Access.WRITE, Space.PEER, unit_stride=(False, True), align=16, divisible=(1, 8)),
    ViewType(dtypes.f8e4m3, 2, Access.READ_WRITE, Space.DEVICE, Partition((16, 32), True, 8, 3)),
    ViewType(dtypes.f32, 2, Access.READ_WRITE, partition=Partition((1, 32), single=(False, True))),
    SymmetricType(dtypes.u64, 2, Access.READ, (True, False), 64, (16, 16)),
    PointerType(dtypes.i32),
    PointerType(dtypes.f64, (2, 2), Space.PEER),
    TokenType(),
    SignalType(),
    CounterType(),
    BarrierType(),
    MailboxType(dtypes.bf16, (), 1, True),
    MailboxType(dtypes.f32, (4, 4), 2, False),
]


@pytest.mark.parametrize("t", TYPES, ids=str)
def test_type_comes_back_from_its_text(t) -> None:
    kernel = Kernel("k", ("a",), Block((t,)), unsafe=True)
    Builder(kernel.body).emit(ops.Return)
    again = parse_kernel(print_kernel(kernel))
    assert again.params[0].type == t
    assert again.unsafe


@pytest.mark.parametrize("value", [0.1, 1e300, 5e-324, -0.0, 2.0**70, math.inf, -math.inf, 3.0])
def test_float_comes_back_exactly(value: float) -> None:
    kernel = Kernel("k", (), Block())
    b = Builder(kernel.body)
    b.value(ops.Const, (), TileType(dtypes.f64), value=value)
    b.emit(ops.Return)
    back = parse_kernel(print_kernel(kernel)).body.ops[0].attrs["value"]
    assert (back, math.copysign(1, back), type(back)) == (value, math.copysign(1, value), float)


def test_hexadecimal_numbers_are_read() -> None:
    kernel = parse_kernel("kernel @k() { %0 = const(value=-0x1.8p+1) : f32 %1 = const(value=0xff) : u8 return() }")
    assert [op.attrs["value"] for op in kernel.body.ops[:2]] == [-3.0, 255]


def test_locations_come_back_and_are_left_out_unless_asked_for() -> None:
    outer = Loc('a "b".py', 3, 4, 9, "main")
    kernel = Kernel("k", (), Block(), loc=Loc("f.py", 1))
    Builder(kernel.body, Loc("g.py", 7, 0, None, "", outer)).emit(ops.Return)
    text = print_kernel(kernel, locations=True)
    assert text == ('kernel @k() loc("f.py":1:0) {\n  return() loc("g.py":7:0 at "a \\"b\\".py":3:4-9 "main")\n}\n')
    again = parse_kernel(text)
    assert (again.loc, again.body.ops[0].loc) == (kernel.loc, kernel.body.ops[0].loc)
    assert print_kernel(kernel) == "kernel @k() {\n  return()\n}\n"


def test_equal_hints_get_numbers_and_come_back_as_hints() -> None:
    kernel = Kernel("k", ("x",), Block((TileType(dtypes.i64),)))
    b = Builder(kernel.body)
    for hint in ("x", "x", "x_1", "not a name", ""):
        b.value(ops.ProgramId, (), TileType(dtypes.i64)).hint = hint
    b.emit(ops.Return)
    text = print_kernel(kernel)
    assert [line.split(" = ")[0].strip() for line in text.splitlines()[1:-2]] == ["%x_1", "%x_2", "%x_1_1", "%0", "%1"]
    assert print_kernel(parse_kernel(text)) == text


def test_grid_rank_and_unsafe_are_part_of_the_text() -> None:
    text = "kernel @k() unsafe grid=3 {\n  return()\n}\n"
    assert print_kernel(parse_kernel(text)) == text


def test_broken_ir_can_be_printed() -> None:
    kernel = parse_kernel("kernel @k(%a: i64) { return() }")
    stray = ops.ProgramId((), (TileType(dtypes.i64),))
    kernel.body.ops.insert(0, ops.UnaryOp([stray.result], [TileType(dtypes.i64)], {"fn": ops.Unary.NEG, "odd": [1]}))
    assert print_kernel(kernel) == (
        "kernel @k(%a: i64) {\n  %0 = unary(%<invisible 0>, fn=Unary.neg, odd=<list [1]>) : i64\n  return()\n}\n"
    )


ERRORS = {
    "kernel @k() { return() } x": (1, 25, "expected the end, got 'x'"),
    "kernel @k() {\n  returm()\n}": (2, 2, "unknown op 'returm'"),
    "kernel @k() {\n  %0 = program_id(axes=1) : i64\n}": (2, 18, "program_id has no attribute 'axes'; it has axis"),
    "kernel @k() {\n  %0 = program_id() : i65\n}": (2, 22, "unknown type 'i65'"),
    "kernel @k() {\n  %0 = program_id()\n}": (3, 0, "program_id: expected 1 result types, got 0"),
    "kernel @k() {\n  print(%a)\n}": (2, 8, "%a is not defined here"),
    "kernel @k(%a: i64, %a: i64) {}": (1, 19, "%a is defined twice"),
    "kernel @k(%a: i64) { %a = program_id() : i64 }": (1, 21, "%a is defined twice"),
    "kernel @k() {\n  fence(scope=Scope.world)\n}": (
        2, 20, "Scope has no member 'world'; it has program, device, system",
    ),
    "kernel @k() {\n  fence(scope=wide)\n}": (2, 14, "expected a value, got 'wide'"),
    "kernel @k() { return(": (1, 21, "expected an operand or an attribute, got 'the end of the text'"),
    "kernel @k() $": (1, 12, "unknown character '$'"),
    "kernel @k() big {}": (1, 12, "expected unsafe, grid=… or '{', got 'big'"),
    "kernel @k(%a: view<f32, 1.5, read>) {}": (1, 24, "expected an integer, got '1.5'"),
    "kernel @k(%a: view<f33, 1, read>) {}": (
        1, 19, f"unknown dtype 'f33'; expected one of {', '.join(d.name for d in dtypes.ALL_DTYPES)}",
    ),
    "kernel @k(%a: view<f32, 1, rw>) {}": (1, 27, "expected read, write or read_write, got 'rw'"),
    "kernel @k(%a: view<f32, 1, read, fast=1>) {}": (1, 33, "unknown property 'fast'"),
    "kernel k() {}": (1, 7, "expected the name of the kernel, got 'k'"),
}  # fmt: skip


@pytest.mark.parametrize("text", ERRORS)
def test_text_error_says_line_and_column(text: str) -> None:
    line, column, message = ERRORS[text]
    with pytest.raises(CompileError) as caught:
        parse_kernel(text)
    source = text.splitlines()[line - 1]
    assert str(caught.value) == f"IR text, line {line}, column {column}: {message}\n  {source}\n  {' ' * column}^"


@pytest.mark.parametrize("e", text_form._ENUMS.values(), ids=lambda e: e.__name__)
def test_every_member_of_an_enum_is_read(e) -> None:
    for member in e:
        kernel = parse_kernel(f"kernel @k() {{ fence(scope={e.__name__}.{member.value}) }}")
        assert kernel.body.ops[0].attrs["scope"] is member
