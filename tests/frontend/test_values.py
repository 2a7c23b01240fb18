"""Arithmetic: promotion, weak numbers, broadcasting, casts, shapes, reductions, mma, and their refusals."""

import numpy as np
import pytest
from tests.frontend.helpers import all_of, build, error, names, only, refuses, run, scalar, shared, value_of

import peertile.language as T
from peertile.dtypes import ALL_DTYPES, b1, bf16, f8e4m3, f16, f32, f64, i8, i32, i64, promote, u8, u32
from peertile.ir import ops
from peertile.ir.ops import Binary, Compare, Fold, Rounding, Unary
from peertile.ir.types import TileType
from peertile.language.word import word_of


def result_type(expression: str, **given):
    """The type of an expression of parameters."""
    from tests.frontend.test_syntax import compiled

    kernel = compiled(f"T.print_({expression})", ", ".join(["z", *given]))
    return only(build(kernel, **given), ops.Print).operands[0].type


def message(expression: str, **given) -> str:
    from tests.frontend.test_syntax import compiled

    return error(compiled(f"T.print_({expression})", ", ".join(["z", *given])), **given).message


# ---------------------------------------------------------------- dtypes


@pytest.mark.parametrize("a", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("b", ALL_DTYPES, ids=str)
def test_two_tiles_promote_by_the_table_or_are_refused_naming_both(a, b):
    joined = promote(a, b)
    given = {"a": scalar(a), "c": scalar(b)}
    if joined is None:
        expected = f"`==`: no common type of {a} and {b}; convert one side, as in .astype(T.{b})"
        assert message("a == c", **given) == expected
    else:
        kernel_type = result_type("T.where(a == c, a, c)", **given)
        assert kernel_type == TileType(joined)


WEAK = [
    ("n + 1", i8, i8),
    ("1 - n", u32, u32),
    ("n * 2", f16, f16),
    ("n * 2.5", bf16, bf16),
    ("n + 1", f64, f64),
    ("n + True", i32, i32),
    ("n | True", b1, b1),
    ("n + 1", b1, i64),
    ("n * 0.5", b1, f32),
    ("T.maximum(n, 0)", u8, u8),
    ("-n", i32, i32),
    ("~n", b1, b1),
    ("n ** 3", i32, i32),
    ("n ** 2", f32, f32),
    ("n // 3", i32, i32),
    ("n << 3", u8, u8),
]


@pytest.mark.sentence("NU-3")
@pytest.mark.parametrize(("expression", "dtype", "expected"), WEAK)
def test_a_python_number_takes_the_dtype_of_the_tile(expression, dtype, expected):
    assert result_type(expression, n=scalar(dtype)) == TileType(expected)


def test_a_number_alone_has_its_own_dtype():
    assert result_type("T.full((4,), 1)") == TileType(i64, (4,))
    assert result_type("T.full((4,), 1.0)") == TileType(f32, (4,))
    assert result_type("T.full((4,), True)") == TileType(b1, (4,))
    assert result_type("T.full((4,), 1, T.u8)") == TileType(u8, (4,))


def test_arithmetic_of_constants_is_pythons():
    def kernel(out, n):
        out.store(n + (7 // 2) + (-7 % 3) + 2**5 + (6 ^ 3) + len((1, 2)) + max(3, 4) + int(7 / 2) + (1 << 4))

    assert value_of(kernel, 0) == 3 + 2 + 32 + 5 + 2 + 4 + 3 + 16


REFUSED = [
    ("n + 1.5", i32, "the float 1.5 meets i32; cast the tile first, with .astype(T.f32), or write an int"),
    ("n + 300", i8, "300 does not fit i8 (-128 to 127); cast the tile to a wider dtype with .astype(...)"),
    ("n - -1", u8, "-1 does not fit u8 (0 to 255); cast the tile to a wider dtype with .astype(...)"),
    ("n * 1e10", f16, "10000000000.0 does not fit f16; cast the tile to a wider dtype with .astype(...)"),
    ("n / 2", i32, "`/`: expected floats, got i32; use // to round down, or convert with .astype(T.f32)"),
    ("n // 2.0", f32, "`//`: expected integers, got f32; use T.floor(a / b)"),
    ("n % 2.0", f32,
     "`%`: expected integers, got f32; write a - T.floor(a / b) * b for the remainder of a rounding down"),
    ("(n + 1) is None", f32, "`is`: a tile is never None, got f32; only a name may be tested, as in "
     "`bias is None` of a parameter that may be None"),
    ("None is not (n + 1)", f32, "`is not`: a tile is never None, got f32; only a name may be tested, as in "
     "`bias is None` of a parameter that may be None"),
    ("n & 1", f32, "`&`: expected integers or bool, got f32; bitcast first if the bits are meant"),
    ("n + n", b1, "`+`: expected numbers, got bool; convert with .astype(T.i32)"),
    ("-n", b1, "`-`: expected numbers, got bool; convert with .astype(T.i32), or use ~ for not"),
    ("~n", f32, "`~`: expected integers or bool, got f32; bitcast first if the bits are meant"),
    ("n * n", f8e4m3, "`*`: f8e4m3 has no arithmetic; convert with .astype(T.f32) and back"),
    ("-n", f8e4m3, "`-`: f8e4m3 has no arithmetic; convert with .astype(T.f32) and back"),
    ("n @ n", f32, "`@`: expected an elementwise operator; use T.mma(a, b, acc)"),
    ("n ** -1", i32, "`**`: an integer tile takes a constant exponent from 0 to 64, got the int -1"),
    ("n + 'a'", i32, "`+`: expected tiles or numbers, got the str 'a'"),
    ("n + (1, 2)", i32, "`+`: expected tiles or numbers, got a tuple of 2; a tuple is no tile: index it first"),
    ("n + z", f32, "`+`: expected tiles or numbers, got the exclusive parameter `z`; load from it first, as in "
     "z.load(...)"),
    ("1 / 0", i32, "`/`: the int 1 and the int 0: division by zero"),
    ("1 << 100000", i32, "`<<`: the constant 1 << 100000 has more than 4096 bits"),
    ("n == None", i32, "`==`: i32 and None; test for None with `is`"),
    ("n is n", i32, "`is`: expected None or a dtype on one side, got i32 and i32; use =="),
    ("n in (1, 2)", i32, "`in`: expected compile-time values, got i32 and a tuple of 2; write comparisons"),
    ("T.exp(n)", i32, "T.exp: expected f16, bf16, f32 or f64, got i32; convert with .astype(T.f32)"),
    ("T.exp(n)", f8e4m3, "T.exp: expected f16, bf16, f32 or f64, got f8e4m3; convert with .astype(T.f32)"),
    ("T.abs(n)", b1, "T.abs: expected numbers, got bool; convert with .astype(T.i32)"),
    ("T.fma(n, n, n)", i32, "T.fma: expected f16, bf16, f32 or f64, got i32; write a * b + c for integers"),
    ("T.at_least(n, n)", f32, "T.at_least: expected integers, got f32"),
    ("T.pow(n, n)", i32, "T.pow: expected floats, got i32; use .astype(T.f32)"),
    ("T.where(n, 1, 2)", i32, "T.where: condition: expected bool, got i32; compare it, as in `x != 0`"),
    ("n.astype(3)", i32, "astype: dtype: expected a dtype such as T.f32, got the int 3"),
    ("n.astype(T.f32, rounding=1)", i32,
     "astype: rounding: expected a T.Rounding, such as T.Rounding.NEAREST, got the int 1"),
    ("n.bitcast(T.f64)", i32, "bitcast: expected a dtype of 32 bits for i32, got f64 of 64 bits"),
    ("T.u8(256)", i32, "256 does not fit u8 (0 to 255); cast the tile to a wider dtype with .astype(...)"),
    ("T.iota(12)", i32, "T.iota: n: extent 0: expected a power of two, got 12; use the next one, 16: partial tiles are "
     "padded on load and clipped on store"),
    ("T.iota(512, T.i8)", i32, "T.iota: 512 elements do not fit i8, whose largest number is 127"),
    ("T.iota(8, T.f32)", i32,
     "T.iota: dtype: expected an integer dtype, got f32; convert with .astype(T.f32)"),
    ("T.zeros((n,))", i64,
     "T.zeros: shape[0]: expected an int known at compile time, got the run-time value i64; make it T.Const[int]"),
    ("T.zeros((0,))", i32, "T.zeros: shape: extent 0: expected a positive power of two, got 0"),
    ("T.zeros((1, 1, 1, 1, 1, 1, 1))", i32, "T.zeros: shape: expected at most 6 axes, got 7"),
    ("T.zeros((2**70,))", i32, "T.zeros: shape: expected at most 1048576 elements in a tile, got 1180591620717411303424 in "
     "(1180591620717411303424,); use smaller tiles, and more of them"),
    ("T.zeros((2048, 1024))", i32, "T.zeros: shape: expected at most 1048576 elements in a tile, got 2097152 in "
     "(2048, 1024); use smaller tiles, and more of them"),
    ("T.zeros((2048, 1)) + T.zeros((1, 1024))", i32, "`+`: shapes (2048, 1) and (1, 1024) broadcast to (2048, 1024): "
     "expected at most 1048576 elements in a tile, got 2097152; use smaller tiles, and more of them"),
    ("T.iota(2**21)", i32, "T.iota: n: expected at most 1048576 elements in a tile, got 2097152 in (2097152,); use smaller "
     "tiles, and more of them"),
    ("T.full((4,), T.iota(4))", i32, "T.full: value: expected a scalar, got i64[4]; use T.broadcast"),
]  # fmt: skip


@pytest.mark.sentence("NU-3")
@pytest.mark.parametrize(("expression", "dtype", "expected"), REFUSED, ids=[f"{r[0]} {r[1]}" for r in REFUSED])
def test_arithmetic_that_is_refused(expression, dtype, expected):
    assert message(expression, n=scalar(dtype)) == expected


# ---------------------------------------------------------------- shapes


def shaped(expression: str):
    body = f"""
    a = x.load((0, 0), (4, 8))
    r = v.load((0,), (8,))
    T.print_({expression})
    """
    from tests.frontend.test_syntax import compiled

    kernel = build(compiled(body, "z, x, v"), x=shared(f32, 2), v=shared(f32, 1))
    return only(kernel, ops.Print).operands[0].type.shape


def shape_message(expression: str) -> str:
    body = f"""
    a = x.load((0, 0), (4, 8))
    r = v.load((0,), (8,))
    T.print_({expression})
    """
    from tests.frontend.test_syntax import compiled

    return error(compiled(body, "z, x, v"), x=shared(f32, 2), v=shared(f32, 1)).message


SHAPES = [
    ("a + r", (4, 8)),
    ("r + a", (4, 8)),
    ("a + 1", (4, 8)),
    ("r[:, None] * r", (8, 8)),
    ("r[None]", (1, 8)),
    ("a[:, None, :]", (4, 1, 8)),
    ("a[None, :, :, None]", (1, 4, 8, 1)),
    ("a[:]", (4, 8)),
    ("a.T", (8, 4)),
    ("T.transpose(a, 0, 1)", (8, 4)),
    ("T.permute(a[None], (2, 0, 1))", (8, 1, 4)),
    ("a.reshape(8, 4)", (8, 4)),
    ("a.reshape((2, 2, 8))", (2, 2, 8)),
    ("T.reshape(a, 32)", (32,)),
    ("T.broadcast(r, (2, 4, 8))", (2, 4, 8)),
    ("T.broadcast(1.0, (2,))", (2,)),
    ("T.expand_dims(a, 0)", (1, 4, 8)),
    ("T.expand_dims(a, -1)", (4, 8, 1)),
    ("T.sum(a)", ()),
    ("T.sum(a, axis=1)", (4,)),
    ("T.sum(a, axis=-2)", (8,)),
    ("T.sum(a, axis=(0, 1), keepdims=True)", (1, 1)),
    ("T.max(a, 0, keepdims=True)", (1, 8)),
    ("T.where(a > r, a, 0.0)", (4, 8)),
    ("T.where(r > 0, a, r)", (4, 8)),
    ("T.fma(a, r, 1.0)", (4, 8)),
    ("T.mma(a, a.T)", (4, 4)),
    ("T.zeros(a.shape[1:])", (8,)),
]


@pytest.mark.parametrize(("expression", "expected"), SHAPES)
def test_shapes(expression, expected):
    assert shaped(expression) == expected


SHAPE_ERRORS = [
    ("a + T.zeros(4)", "`+`: shapes (4, 8) and (4,) do not broadcast (aligned on the right, 8 meets 4); reshape one of "
     "them, or insert an axis with T.expand_dims"),
    ("a.reshape(4, 4)", "reshape: expected a shape of 32 elements for f32[4, 8], got (4, 4)"),
    ("T.transpose(r)", "T.transpose: expected a tile of at least 2 axes, got f32[8]"),
    ("T.permute(a, (0, 0))", "T.permute: axes: expected each of 0 to 1 once for f32[4, 8], got (0, 0)"),
    ("T.sum(a, axis=2)", "T.sum: axis: expected an axis from -2 to 1, got 2"),
    ("T.sum(a, axis=(0, -2))", "T.sum: axis: expected each axis once, got (0, 0)"),
    ("T.sum(1.0)", "T.sum: expected a tile, got the float 1.0"),
    ("T.sum(a > 0)", "T.sum: expected numbers, got bool[4, 8]; convert with .astype(T.i32), or use T.any or T.all"),
    ("T.any(a)", "T.any: expected a bool tile, got f32[4, 8]; compare it first, as in `x != 0`"),
    ("T.broadcast(a, (8,))",
     "T.broadcast: f32[4, 8] has axes that the shape (8,) lacks; reduce or index them first"),
    ("a[0]", "`[...]` of a tile f32[4, 8]: expected `:` for its axes and None for new ones; elements are not indexed: "
     "select with T.where and reduce, or load what is needed"),
    ("T.mma(a, a)", "T.mma: inner extents differ: a is f32[4, 8], b is f32[4, 8], 8 meets 4"),
    ("T.mma(a, r)", "T.mma: b: expected a tile of 2 or 3 axes, got f32[8]"),
    ("T.mma(a, a.T.astype(T.f16))",
     "T.mma: expected a and b of one dtype, got f32[4, 8] and f16[8, 4]; convert one with .astype(...)"),
    ("T.mma(a, a.T, T.zeros((4, 4), T.f64))",
     "T.mma: acc: expected f32[4, 4] for f32[4, 8] @ f32[8, 4], got f64[4, 4]"),
    ("T.mma((a > 0).astype(T.i32), (a > 0).astype(T.i32).T)",
     "T.mma: no mma of i32; it takes f32, f64, f16, bf16, f8e4m3, f8e5m2, i8, u8"),
]  # fmt: skip


@pytest.mark.parametrize(("expression", "expected"), SHAPE_ERRORS, ids=[s[0] for s in SHAPE_ERRORS])
def test_shapes_that_are_refused(expression, expected):
    assert shape_message(expression) == expected


# ---------------------------------------------------------------- families


@pytest.mark.parametrize("fn", list(Unary), ids=lambda fn: fn.value)
def test_every_unary_function_has_a_spelling(fn):
    spelled = {Unary.NEG: "-t", Unary.NOT: "~(t > 0)"}.get(fn, f"T.{fn.value}(t)")
    kernel = tile_kernel(spelled)
    assert fn in [op.fn for op in all_of(kernel, ops.UnaryOp)]


SPELLINGS = {
    Binary.ADD: "t + t", Binary.SUB: "t - t", Binary.MUL: "t * t", Binary.DIV: "t / t", Binary.FLOORDIV: "i // i",
    Binary.MOD: "i % i", Binary.QUOT: "T.quot(i, i)", Binary.REM: "T.rem(i, i)", Binary.MIN: "T.minimum(t, t)",
    Binary.MAX: "T.maximum(t, t)", Binary.AND: "i & i", Binary.OR: "i | i", Binary.XOR: "i ^ i", Binary.SHL: "i << i",
    Binary.SHR: "i >> i", Binary.MULHI: "T.mulhi(i, i)", Binary.POW: "t ** t", Binary.ATAN2: "T.atan2(t, t)",
}  # fmt: skip


@pytest.mark.parametrize("fn", list(Binary), ids=lambda fn: fn.value)
def test_every_binary_function_has_a_spelling(fn):
    assert [op.fn for op in all_of(tile_kernel(SPELLINGS[fn]), ops.BinaryOp)] == [fn]


@pytest.mark.parametrize("fn", list(Compare), ids=lambda fn: fn.value)
def test_every_comparison_has_a_spelling(fn):
    symbol = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}.get(fn.value)
    kernel = tile_kernel(f"i {symbol} i" if symbol else "T.at_least(i, i)")
    assert [op.fn for op in all_of(kernel, ops.CompareOp)] == [fn]


@pytest.mark.parametrize("fn", [f for f in Fold if f is not Fold.XOR], ids=lambda fn: fn.value)
def test_every_fold_of_the_language_has_a_spelling(fn):
    spelled = {
        Fold.ADD: "T.sum(t)", Fold.MUL: "T.prod(t)", Fold.MAX: "T.max(t)", Fold.MIN: "T.min(t)",
        Fold.AND: "T.all(t > 0)", Fold.OR: "T.any(t > 0)",
    }  # fmt: skip
    assert [op.fn for op in all_of(tile_kernel(spelled[fn]), ops.Reduce)] == [fn]


@pytest.mark.parametrize("mode", list(Rounding), ids=lambda mode: mode.value)
def test_every_rounding_mode_reaches_the_cast(mode):
    kernel = tile_kernel(f"t.astype(T.i8, rounding=T.Rounding.{mode.name}, saturate=True)")
    cast = only(kernel, ops.Cast)
    assert (cast.rounding, cast.saturate) == (mode, True)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_every_dtype_makes_a_typed_constant(dtype):
    spelled = "True" if dtype is b1 else "1"
    name = "b1" if dtype is b1 else dtype.name
    assert only(tile_kernel(f"T.{name}({spelled})"), ops.Print).operands[0].type == TileType(dtype)


@pytest.mark.parametrize(("dtype", "acc"), [(d, a[0]) for d, a in ops.MMA_TYPES.items()])
def test_mma_starts_at_zero_in_its_accumulators_dtype(dtype, acc):
    kernel = tile_kernel(f"T.mma(t.astype(T.{dtype}).reshape(2, 4), t.astype(T.{dtype}).reshape(4, 2))")
    assert only(kernel, ops.Mma).result.type.dtype.name == acc


def tile_kernel(expression: str):
    from tests.frontend.test_syntax import compiled

    body = f"""
    t = x.load((0,), (8,))
    i = T.iota(8)
    T.print_({expression})
    """
    return build(compiled(body, "z, x"))


def test_same_dtype_needs_no_cast():
    assert "cast" not in names(tile_kernel("t.astype(T.f32)"))


def test_cdiv_does_not_wrap():
    def kernel(out, n, k):
        out.store(T.cdiv(n, k) + T.cdiv(7, 2))

    big = np.iinfo(np.int64).max
    cases = [(7, 2), (8, 2), (0, 5), (-7, 2), (big, big - 1)]
    assert [value_of(kernel, *case) for case in cases] == [-(-a // b) + 4 for a, b in cases]


def test_integer_powers_multiply():
    def kernel(out, n):
        out.store(n**5 + n**0)

    assert value_of(kernel, 3) == 244


def test_constants_are_rounded_to_their_dtype():
    kernel = tile_kernel("t.astype(T.bf16) + 1.00390625")
    assert 1.0 in [op.value for op in all_of(kernel, ops.Const)]


def test_softmax_of_rows():
    def kernel(zz, m):
        t = m.load_like(zz)
        e = T.exp(t - T.max(t, axis=1, keepdims=True))
        zz.store(e / T.sum(e, axis=1)[:, None])

    rng = np.random.default_rng(0)
    a, out = rng.standard_normal((16, 64)).astype(np.float32), np.zeros((16, 64), np.float32)
    run(kernel, [out, a])
    e = np.exp(a - a.max(axis=1, keepdims=True))
    np.testing.assert_allclose(out, e / e.sum(axis=1, keepdims=True), rtol=1e-5)


def test_print_puts_text_in_front():
    op = only(tile_kernel("'sum', f'of {8:>3}', t, 3"), ops.Print)
    assert op.prefix == "sum of   8"
    assert [str(v.type) for v in op.operands] == ["f32[8]", "i64"]


def test_store_of_a_number_fills_the_tile():
    def kernel(z):
        z.store(1)

    assert only(build(kernel), ops.Store).operands[1].type == TileType(f32, (64,))


def test_words_and_implementations_agree():
    from peertile.frontend.registry import implementation

    assert implementation(word_of(T.zeros)) is not None


def test_a_word_outside_a_kernel_is_refused_at_its_line():
    def kernel(z, x):
        z.store(x.load((0,), (48,)))

    refuses(
        kernel,
        "load from `x`: shape: extent 0: expected a power of two, got 48; use the next one, 64: partial tiles are "
        "padded on load and clipped on store",
        "x.load((0,), (48,))",
    )
