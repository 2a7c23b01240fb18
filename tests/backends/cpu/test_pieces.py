"""Sorting and pieces of tiles inside larger kernels: expressions, run-time indices, tiles updated in place."""

import math

import numpy as np
import pytest
from tests.backends.cpu.util import K, Loaded, exclusive, run, shared

from peertile.dtypes import f16, f32, f64, i8, i32
from peertile.ir import ops
from peertile.ir.core import Block
from peertile.ir.ops import Binary, Compare
from peertile.ir.types import INDEX, TileType
from peertile.ir.verify import verify
from peertile.meaning import run_grid

SHAPES = [
    ((64,), 0),
    ((8, 16), 0),
    ((8, 16), 1),
    ((2, 4, 32), 1),
    ((4, 4, 8), 2),
    ((16, 1), 0),
    ((1, 16), 0),
    ((2,), 0),
]


def check(k, arrays, outputs, *scalars):
    """Both ways of running the kernel leave the same bits in the outputs."""
    kernel = k.done()
    verify(kernel)
    ours, theirs = [o.copy() for o in outputs], [o.copy() for o in outputs]
    run(kernel, [*arrays, *ours, *scalars])
    assert run_grid(kernel, 1, [*arrays, *theirs, *scalars]).faults == []
    for a, b in zip(ours, theirs, strict=True):
        bits = f"u{a.dtype.itemsize}"
        nan = np.isnan(a.astype(np.float64)) & np.isnan(b.astype(np.float64))
        assert ((a.view(bits) == b.view(bits)) | nan).all()
    return ours


def combining(k, cls, tiles, results, function, **attrs):
    block = Block([t.type.with_shape(()) for t in tiles] * 2)
    with k.b.at(block):
        n = len(tiles)
        k.b.emit(ops.Yield, function(block.args[:n], block.args[n:]))
    return k.b.emit(cls, tiles, results, [block], **attrs).results


def greatest(k, a, b):
    """(value, place): the greater value, the lower place among equals."""
    above = k.compare(Compare.GT, b[0], a[0])
    equal = k.compare(Compare.EQ, a[0], b[0])
    first = k.binary(Binary.AND, equal, k.compare(Compare.LT, b[1], a[1]))
    take = k.binary(Binary.OR, above, first)
    return [k.select(take, b[0], a[0]), k.select(take, b[1], a[1])]


def places(k, shape, axis):
    n = shape[axis]
    iota = k.value(ops.Iota, (), TileType(i32, (n,)))
    return k.broadcast(k.reshape(iota, tuple(n if a == axis else 1 for a in range(len(shape)))), shape)


@pytest.mark.parametrize(("shape", "axis"), SHAPES, ids=str)
def test_argmax_by_a_function(shape, axis):
    rest = shape[:axis] + shape[axis + 1 :]
    out = rest or (1,)
    k = K(x=shared(f32, len(shape)), v=exclusive(f32, out), i=exclusive(i32, out))
    tile = k.load(k.x, [0] * len(shape), shape)
    types = [TileType(f32, rest), TileType(i32, rest)]
    found = combining(
        k, ops.ReduceWith, [tile, places(k, shape, axis)], types, lambda a, b: greatest(k, a, b), axis=axis
    )  # fmt: skip
    for name, t in zip("vi", found, strict=True):
        k.store(k.p[name], k.reshape(t, out), [0] * len(out))
    x = np.random.default_rng(0).integers(0, 9, shape).astype(np.float32)
    v, i = check(k, [x], [np.zeros(out, np.float32), np.zeros(out, np.int32)])
    assert (i == np.argmax(x, axis).reshape(out)).all()
    assert (v == np.max(x, axis).reshape(out)).all()


@pytest.mark.parametrize(("shape", "axis"), SHAPES, ids=str)
def test_sort_along_each_axis_of_an_expression(shape, axis):
    k = K(x=shared(i32, len(shape)), z=exclusive(i32, shape), w=exclusive(i8, shape))
    zero = [0] * len(shape)
    tile = k.load(k.x, zero, shape)
    key, other = k.mul(tile, tile), k.cast(tile, i8)
    found = k.b.emit(ops.Sort, (key, other), (key.type, other.type), axis=axis).results
    k.store(k.z, found[0], zero)
    k.store(k.w, found[1], zero)
    x = np.random.default_rng(2).integers(-20, 20, shape).astype(np.int32)
    check(k, [x], [np.zeros(shape, np.int32), np.zeros(shape, np.int8)])


def test_extract_and_insert_at_run_time_indices():
    k = K(x=shared(f32, 2), z=exclusive(f32, (16, 32)), w=exclusive(f32, (4, 8)), n=INDEX)
    x = k.load(k.x, [0, 0], (16, 32))
    n = k.p["n"]
    piece = k.value(ops.Extract, (k.add(x, x), n, k.const(1)), TileType(f32, (4, 8)))
    column = k.value(ops.Extract, (x, n, n), TileType(f32, (8, 1)))
    y = k.value(ops.Insert, (x, k.mul(piece, piece), k.const(2), n), x.type)
    y = k.value(ops.Insert, (y, k.value(ops.Extract, (y, n, n), TileType(f32, (4, 8))), k.const(0), k.const(3)), y.type)
    y = k.value(ops.Insert, (y, column, k.const(1), n), y.type)
    k.store(k.z, y, [0, 0])
    k.store(k.w, piece, [0, 0])
    data = np.random.default_rng(4).standard_normal((16, 32)).astype(np.float32)
    for index in (0, 3, 5, -1, 1 << 40):
        k2 = check_again(k, [data], [np.zeros((16, 32), np.float32), np.zeros((4, 8), np.float32)], index)
        assert k2


def check_again(k, arrays, outputs, *scalars):
    if k.block.terminator is not None:
        k.block.ops.pop()
    return check(k, arrays, outputs, *scalars)


def test_an_inserted_tile_carried_around_a_loop_is_in_place():
    k = K(x=shared(f32, 1), z=exclusive(f32, (64,)))

    def body(i, carried):
        piece = k.load(k.x, [i], (16,))
        return [k.value(ops.Insert, (carried[0], piece, k.sub(k.const(3), i)), carried[0].type)]

    (t,) = k.loop(0, 4, [k.full(0.0, f32, (64,))], body)
    k.store(k.z, t, [0])
    loaded = Loaded(k.done())
    assert loaded.binary.scratch_bytes == 64 + 256
    x, z = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    loaded.run([x, z], 1)
    assert (z == x.reshape(4, 16)[::-1].ravel()).all()


@pytest.mark.parametrize("dtype", [f16, f32, f64], ids=str)
def test_sort_puts_nan_last_and_first_when_descending(dtype):
    k = K(x=shared(dtype, 1), z=exclusive(dtype, (8,)))
    tile = k.load(k.x, [0], (8,))
    for n, descending in enumerate((False, True)):
        k.store(k.z, k.b.emit(ops.Sort, (tile,), (tile.type,), axis=0, descending=descending).result, [n])
    x = np.array([3, math.nan, -0.0, 0.0, math.inf, -1, -math.inf, 3]).astype(dtype.numpy)
    (z,) = check(k, [x], [np.zeros(16, dtype.numpy)])
    assert np.isnan(z[7])
    assert np.isnan(z[8])
    assert z[:7].tolist() == [-math.inf, -1, 0, 0, 3, 3, math.inf]
