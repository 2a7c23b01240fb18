"""Pieces of tiles, sorting, folds by a function, derived views, gathers, ordered tiles: by Triton's interpreter
against the numpy meaning, and through the compiler."""

import numpy as np
import pytest
from tests.backends.cuda.test_values import agree
from tests.backends.cuda.util import PROVEN, K, memory_ops, numbers, view

from peertile.backends.cuda.compile import compile_kernel, lower_to_text
from peertile.dtypes import b1, f8e4m3, f16, f32, f64, i8, i32, i64, u8, u32, u64
from peertile.ir import ops
from peertile.ir.core import Block
from peertile.ir.ops import Binary, Compare, Padding
from peertile.ir.types import INDEX, Access, Space, TileType, TransferType, ViewType
from peertile.memory_model import Cmp, Order, Scope

pytestmark = pytest.mark.usefixtures("triton_needed")

KINDS = [f32, *(pytest.param(d, marks=pytest.mark.slow) for d in (b1, i8, u8, u32, i64, u64, f16, f64, f8e4m3))]


def lines(k, value, out, at):
    """Stores a tile as a flat one of 64 elements at tile `at`."""
    k.store(out, k.v(ops.Reshape, value, t=TileType(value.type.dtype, (value.type.numel,))), at)


@pytest.mark.slow
@pytest.mark.parametrize("d", KINDS, ids=str)
def test_take_extract_and_insert(d, rng):
    t = TileType(d, (8, 8))
    k = K("pieces", x=view(d), i=view(i32), z=view(d), n=INDEX)
    x = k.v(ops.Reshape, k.load(k.x, k.const(0), t=TileType(d, (64,))), t=t)
    index = k.v(ops.Reshape, k.load(k.i, k.const(0), t=TileType(i32, (64,))), t=TileType(i32, (8, 8)))
    for n, axis in enumerate((0, 1)):
        lines(k, k.v(ops.Take, x, index, t=t, axis=axis), k.z, k.const(n))
    piece = k.v(ops.Extract, x, k.n, k.const(1), t=TileType(d, (2, 4)))
    k.store(k.z, k.v(ops.Reshape, piece, t=TileType(d, (8,))), k.const(16))
    whole = k.v(ops.Insert, x, piece, k.const(2), k.n, t=t)
    lines(k, whole, k.z, k.const(3))
    kernel = k.done()
    for n in (0, 1, 3, -1, 6):
        args = [numbers(rng, d, 64), rng.integers(-20, 20, 64).astype(np.int32), np.zeros(256, d.numpy), n]
        agree(kernel, args, ["z"])
    assert compile_kernel(kernel).payload


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(8, 8), (4, 16), (2, 4, 8)], ids=str)
@pytest.mark.parametrize("d", KINDS, ids=str)
def test_a_tile_that_a_loop_carries_is_turned_in_each_trip(d, shape, rng):
    """By a gather: with a permutation Triton 3.6 chooses layouts for ever."""
    t = TileType(d, shape)
    k = K("turns", x=view(d), z=view(d), n=INDEX)
    x = k.v(ops.Reshape, k.load(k.x, k.const(0), t=TileType(d, (64,))), t=t)
    body = Block([INDEX, t])
    axes = (*range(1, len(shape)), 0)
    with k.b.at(body):
        turned = k.v(ops.Permute, body.args[1], t=TileType(d, tuple(shape[a] for a in axes)), axes=axes)
        k.op(ops.Continue, k.v(ops.Reshape, turned, t=t))
    loop = k.b.emit(ops.For, (k.const(0), k.n, k.const(1), x), (t,), (body,))
    lines(k, loop.results[0], k.z, k.const(0))
    kernel = k.done()
    for n in range(4):
        agree(kernel, [numbers(rng, d, 64), np.zeros(64, d.numpy), n], ["z"])
    source = lower_to_text(kernel)
    assert "tl.gather" in source
    assert "tl.permute" not in source
    assert compile_kernel(kernel).payload


@pytest.mark.slow
@pytest.mark.parametrize("d", KINDS, ids=str)
@pytest.mark.parametrize("descending", [False, True], ids=["up", "down"])
def test_sorting_is_stable_and_moves_the_others(d, descending, rng):
    k = K("sorts", x=view(d), y=view(i32), z=view(d), w=view(i32))
    for n, axis in enumerate((0, 1)):
        x = k.v(ops.Reshape, k.load(k.x, k.const(0), t=TileType(d, (64,))), t=TileType(d, (4, 16)))
        y = k.v(ops.Reshape, k.load(k.y, k.const(0), t=TileType(i32, (64,))), t=TileType(i32, (4, 16)))
        op = k.op(ops.Sort, x, y, results=(x.type, y.type), axis=axis, descending=descending)
        lines(k, op.results[0], k.z, k.const(n))
        lines(k, op.results[1], k.w, k.const(n))
    kernel = k.done()
    keys = np.where(rng.integers(0, 2, 64) == 0, numbers(rng, d, 64), numbers(rng, d, 64)[rng.integers(0, 8)]).astype(
        d.numpy
    )
    args = [keys, np.arange(64, dtype=np.int32), np.zeros(128, d.numpy), np.zeros(128, np.int32)]
    agree(kernel, args, ["z", "w"])
    assert compile_kernel(kernel).payload


def argmax_block(d):
    """(value, place) of the greater, the first of equals."""
    block = Block([TileType(d), TileType(i32)] * 2, ["a", "i", "b", "j"])
    a, i, b, j = block.args
    return block, (a, i, b, j)


@pytest.mark.slow
@pytest.mark.parametrize(
    "d", [f32, i64, pytest.param(u8, marks=pytest.mark.slow), pytest.param(b1, marks=pytest.mark.slow)], ids=str
)
def test_reductions_and_scans_by_a_function(d, rng):
    k = K("folds", x=view(d), z=view(d), w=view(i32))
    x = k.v(ops.Reshape, k.load(k.x, k.const(0), t=TileType(d, (64,))), t=TileType(d, (4, 16)))
    place = k.v(ops.Reshape, k.v(ops.Iota, t=TileType(i32, (64,))), t=TileType(i32, (4, 16)))

    def combine():
        block, (a, i, b, j) = argmax_block(d)
        with k.b.at(block):
            first = k.v(ops.CompareOp, i, j, t=TileType(b1), fn=Compare.LT)
            less = k.v(ops.CompareOp, a, b, t=TileType(b1), fn=Compare.LT)
            more = k.v(ops.CompareOp, b, a, t=TileType(b1), fn=Compare.LT)
            equal = k.v(
                ops.UnaryOp,
                k.v(ops.BinaryOp, less, more, t=TileType(b1), fn=Binary.OR),
                t=TileType(b1),
                fn=ops.Unary.NOT,
            )
            take = k.v(
                ops.BinaryOp,
                more,
                k.v(ops.BinaryOp, equal, first, t=TileType(b1), fn=Binary.AND),
                t=TileType(b1),
                fn=Binary.OR,
            )
            k.op(ops.Yield, k.v(ops.Select, take, a, b, t=TileType(d)), k.v(ops.Select, take, i, j, t=TileType(i32)))
        return block

    for n, axis in enumerate((0, 1)):
        shape = tuple(s for a, s in enumerate((4, 16)) if a != axis)
        op = k.b.emit(ops.ReduceWith, (x, place), (TileType(d, shape), TileType(i32, shape)), (combine(),), axis=axis)
        at = k.const((0, 16)[n] // shape[0])
        k.store(k.z, op.results[0], at)
        k.store(k.w, op.results[1], at)
    for n, (axis, reverse) in enumerate([(0, False), (1, False), (0, True), (1, True)]):
        op = k.b.emit(ops.ScanWith, (x, place), (x.type, place.type), (combine(),), axis=axis, reverse=reverse)
        lines(k, op.results[0], k.z, k.const(1 + n))
        lines(k, op.results[1], k.w, k.const(1 + n))
    kernel = k.done()
    values = numbers(rng, d, 64)
    values = np.nan_to_num(values) if d.is_float else values
    agree(kernel, [values, np.zeros(320, d.numpy), np.zeros(320, np.int32)], ["z", "w"])
    assert compile_kernel(kernel).payload
    assert lower_to_text(kernel).count("def _combine") == 6


def test_views_of_views(rng):
    out = view(f32, 2)
    k = K("views", x=view(f32, 2), z=out, n=INDEX)
    loose = ViewType(f32, 2, Access.READ_WRITE, unit_stride=(False, False))
    two, three, one, zero = (k.const(n) for n in (2, 3, 1, 0))
    part = k.v(ops.ViewSlice, k.x, k.n, three, k.const(7), k.const(10), two, three, t=loose)
    turned = k.v(ops.ViewPermute, part, t=loose, axes=(1, 0))
    tile = k.load(turned, zero, zero, t=TileType(f32, (8, 8)), padding=Padding.NAN)
    k.store(k.z, tile, zero, zero)
    flat = k.v(
        ops.ViewReshape, k.x, k.const(40), k.const(30), t=ViewType(f32, 2, Access.READ_WRITE, unit_stride=(False, True))
    )
    k.store(k.z, k.load(flat, one, zero, t=TileType(f32, (8, 8))), one, one)
    stride = k.v(ops.ViewStride, turned, t=INDEX, axis=0)
    wide = k.v(ops.Broadcast, k.v(ops.Cast, stride, t=TileType(f32)), t=TileType(f32, (8, 8)))
    k.store(k.z, wide, zero, two)
    x = rng.standard_normal((30, 40)).astype(np.float32)
    for n in (0, 5):
        agree(k.done() if n == 0 else k.kernel, [x, np.zeros((16, 24), np.float32), n], ["z"])
    assert compile_kernel(k.kernel).payload


@pytest.mark.parametrize("axis", [0, 1])
def test_gather_and_scatter(axis, rng):
    d, shape = f32, (8, 16)
    k = K("gathers", x=view(d, 2), z=view(d, 2), i=view(i32))
    index = k.load(k.i, k.const(0), t=TileType(i32, (shape[axis],)))
    tile = k.v(ops.Gather, k.x, index, k.const(1), t=TileType(d, shape), axis=axis, padding=Padding.NAN, bounds=PROVEN)
    k.op(ops.Scatter, k.z, tile, index, k.const(0), axis=axis, bounds=PROVEN)
    kernel = k.done()
    x = rng.standard_normal((21, 27)).astype(np.float32)
    places = rng.integers(-3, 12, shape[axis]).astype(np.int32)
    agree(kernel, [x, np.zeros((13, 11), np.float32), places], ["z"])
    assert compile_kernel(kernel).payload


@pytest.mark.parametrize(
    "d", [u32, f16, pytest.param(u8, marks=pytest.mark.slow), pytest.param(u64, marks=pytest.mark.slow)], ids=str
)
def test_ordered_tiles_are_one_access_for_each_element(d):
    words = ViewType(d, 1, Access.READ_WRITE, Space.PEER, unit_stride=(True,))
    k = K("tiles", w=words, z=words)
    for n in (16, 512):
        t = TileType(d, (n,))
        for order in (Order.RELAXED, Order.ACQUIRE):
            x = k.v(ops.TileLoad, k.w, k.const(0), t=t, order=order, scope=Scope.SYSTEM, bounds=PROVEN)
            k.store(k.z, x, k.const(0))
        for order in (Order.RELAXED, Order.RELEASE):
            k.op(ops.TileStore, k.w, x, k.const(0), order=order, scope=Scope.SYSTEM, bounds=PROVEN)
    found = [op for op in memory_ops(compile_kernel(k.done()).text["ptx"]) if not op.startswith("bar")]
    assert {".".join(op.split(".")[:3]) for op in found} == {
        "ld.relaxed.sys", "ld.acquire.sys", "st.relaxed.sys", "st.release.sys"
    }  # fmt: skip


def test_a_transfer_is_done_at_once_and_waiting_for_it_orders_it():
    k = K("transfers", x=view(f32), z=view(f32))
    t = TileType(f32, (64,))
    transfer = k.op(
        ops.AsyncStore, k.z, k.load(k.x, k.const(0), t=t), k.const(0), results=(TransferType(),), bounds=PROVEN
    )
    k.op(ops.WaitTransfer, transfer.result)
    kernel = k.done()
    agree(kernel, [np.arange(64, dtype=np.float32), np.zeros(64, np.float32)], ["z"])
    assert lower_to_text(kernel).count("tl.debug_barrier()") == 1


@pytest.mark.parametrize("cmp", [Cmp.AT_LEAST, Cmp.EQ, Cmp.LT], ids=lambda c: c.value)
def test_a_wait_for_any_of_several_words_polls_all_of_them(cmp):
    words = ViewType(u64, 1, Access.READ_WRITE, Space.DEVICE, unit_stride=(True,))
    small = ViewType(i32, 1, Access.READ_WRITE, Space.DEVICE, unit_stride=(True,))
    k = K("any", w=words, s=small, z=view(i64))
    i, seven, three = k.const(2), k.const(7, TileType(u64)), k.const(-3, TileType(i32))
    which = k.v(ops.WaitAny, k.w, seven, i, k.s, three, i, t=INDEX, cmp=cmp, scope=Scope.DEVICE, what="any")
    k.store(k.z, k.v(ops.Broadcast, which, t=TileType(i64, (4,))), k.const(0))
    binary = compile_kernel(k.done())
    polls = [op for op in memory_ops(binary.text["ptx"]) if op.startswith("ld.acquire.gpu")]
    assert polls == ["ld.acquire.gpu.global.b64", "ld.acquire.gpu.global.b32"]
    assert [place.kind for place in binary.places] == ["wait"]


def test_a_product_may_round_its_factors():
    k = K("product", x=view(f32, 2), z=view(f32, 2))
    t, zero = TileType(f32, (32, 32)), k.const(0)
    x = k.load(k.x, zero, zero, t=t)
    k.store(k.z, k.v(ops.Mma, x, x, k.full(0.0, t), t=t, precision=ops.Precision.TF32), zero, zero)
    assert 'input_precision="tf32"' in lower_to_text(k.done())
