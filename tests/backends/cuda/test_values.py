"""Emitted source, run by Triton's interpreter, gives what the numpy meaning gives."""

import numpy as np
import pytest
from tests.backends.cuda.interpreted import run_interpreted
from tests.backends.cuda.util import MODES, K, N, casts, elementwise, numbers, parsed, same, view

from peertile.dtypes import ALL_DTYPES, b1, bf16, f16, f32, f64, i8, i32, i64, u8, u64
from peertile.ir import ops
from peertile.ir.core import Block
from peertile.ir.ops import Binary, Compare, Padding
from peertile.ir.types import INDEX, Partition, TileType, ViewType
from peertile.meaning.grid import run_grid

pytestmark = pytest.mark.usefixtures("triton_needed")

# The interpreter computes with the bits of bf16 as integers: only what goes through f32 means anything there.
THROUGH_F32 = [d for d in ALL_DTYPES if d != bf16]


def agree(kernel, args, outputs, grid=1, **options):
    """Both runs, compared on the parameters named in `outputs`; gives the outcomes."""
    ours = [a.copy() if isinstance(a, np.ndarray) else a for a in args]
    theirs = [a.copy() if isinstance(a, np.ndarray) else a for a in args]
    outcome = run_interpreted(kernel, grid, ours, **options)
    expected = run_grid(kernel, grid, theirs)
    for name in outputs:
        k = kernel.param_names.index(name)
        d = kernel.params[k].type.dtype
        wrong = ~same(ours[k], theirs[k], d)
        at = [tuple(int(i) for i in ij) for ij in np.argwhere(wrong)[:4]]
        assert not wrong.any(), f"{kernel.name}: {name} at {at}: {[(ours[k][i], theirs[k][i]) for i in at]}"
    return outcome, expected


@pytest.mark.slow
@pytest.mark.parametrize("d", THROUGH_F32, ids=str)
def test_every_elementwise_function_and_reduction_means_what_the_ir_says(d, rng):
    kernel, size = elementwise(d), 64 * N
    args = [numbers(rng, d), numbers(rng, d), np.zeros(size, d.numpy), np.zeros(size, bool)]
    agree(kernel, args, ["z", "c"])


@pytest.mark.slow
@pytest.mark.parametrize("d", ALL_DTYPES, ids=str)
def test_every_cast_rounds_and_saturates_as_the_ir_says(d, rng):
    args = [numbers(rng, d), *(np.zeros(MODES * N, o.numpy) for o in ALL_DTYPES)]
    agree(casts(d, ALL_DTYPES), args, [f"to_{o}" for o in ALL_DTYPES])


@pytest.mark.parametrize("b", [1, 2, 3, 8, 10, -1, -3, 0])
def test_division_by_a_constant_is_division(b, rng):
    t = TileType(i32, (N,))
    k = K("divide", x=view(i32), z=view(i32))
    x = k.load(k.x, k.const(0), t=t)
    scalar = k.v(ops.ProgramId, t=INDEX)
    for n, fn in enumerate((Binary.FLOORDIV, Binary.MOD, Binary.QUOT, Binary.REM)):
        tile = k.v(ops.BinaryOp, x, k.full(b, t), t=t, fn=fn)
        k.store(k.z, tile, k.const(n))
        # A scalar divided by a literal takes shortcuts that a tile does not.
        shifted = k.v(ops.BinaryOp, scalar, k.const(-7), t=INDEX, fn=Binary.ADD)
        q = k.v(ops.BinaryOp, shifted, k.const(b), t=INDEX, fn=fn)
        wide = k.v(ops.Broadcast, k.v(ops.Cast, q, t=TileType(i32)), t=t)
        k.store(k.z, wide, k.const(4 + n))
    agree(k.done(), [numbers(rng, i32), np.zeros(8 * N, np.int32)], ["z"])


@pytest.mark.slow
@pytest.mark.parametrize("d", [f32, *(pytest.param(d, marks=pytest.mark.slow) for d in (f16, i8, b1, u64))], ids=str)
@pytest.mark.parametrize("shape", [(256,), (37, 200), (5, 9, 33)], ids=str)
def test_partial_tiles_pad_and_clip(d, shape, rng):
    tile = {1: (64,), 2: (16, 64), 3: (2, 4, 16)}[len(shape)]
    grid = int(np.prod([-(-n // t) for n, t in zip(shape, tile, strict=True)]))
    for padding in (Padding.ZERO, Padding.NEG_ZERO, Padding.NAN, Padding.INF) if d.is_float else (Padding.ZERO,):
        out = ViewType(d, len(shape), view(d).access, partition=Partition(tile))
        k = K("copy", z=out, x=view(d, len(shape)), sums=view(d))
        p = k.v(ops.ProgramId, t=INDEX)
        index = k.op(ops.TileIndex, k.z, p, results=(INDEX,) * len(shape)).results
        x = k.load(k.x, *index, t=TileType(d, tile), padding=padding)
        k.store(k.z, x, *index)
        flat = k.v(ops.Reshape, x, t=TileType(d, (int(np.prod(tile)),)))
        k.store(k.sums, flat, p)
        args = [np.zeros(shape, d.numpy), numbers(rng, d, int(np.prod(shape))).reshape(shape)]
        agree(k.done(), [*args, np.zeros(grid * int(np.prod(tile)), d.numpy)], ["z", "sums"], grid)


def test_strided_views_and_negative_strides_are_followed(rng):
    x = numbers(rng, f32, 64 * 96).reshape(64, 96)
    t = TileType(f32, (16, 32))
    k = K("strided", z=view(f32, 2, unit_stride=(False, False), align=0), x=view(f32, 2, unit_stride=(False, False)))
    index = [k.const(1), k.const(0)]
    k.store(k.z, k.load(k.x, *index, t=t), *index)
    kernel = k.done()
    outcome = run_interpreted(kernel, 1, [out := np.zeros((48, 40), np.float32)[::-1, ::2], x.T[::2, ::-1]])
    assert outcome.fault[0] == 0
    want = np.zeros((48, 20), np.float32)
    want[16:32, :20] = x.T[::2, ::-1][16:32, :20]
    assert same(out, want, f32).all()


@pytest.mark.parametrize("swizzle", [1, 2, 8])
def test_tile_indices_visit_each_tile_once_in_the_order_of_the_meaning(swizzle):
    out = ViewType(i64, 2, view(i64).access, partition=Partition((2, 2), True, swizzle), unit_stride=(False, True))
    k = K("order", z=out, n=INDEX)
    p, step = k.v(ops.ProgramId, t=INDEX), k.v(ops.NumPrograms, t=INDEX)
    total = k.n
    body = Block([INDEX], ["lin"])
    with k.b.at(body):
        index = k.op(ops.TileIndex, k.z, body.args[0], results=(INDEX, INDEX)).results
        k.store(k.z, k.v(ops.Broadcast, body.args[0], t=TileType(i64, (2, 2))), *index)
        k.op(ops.Continue)
    k.b.emit(ops.For, (p, total, step), blocks=(body,))
    agree(k.done(), [np.full((13, 9), -1), 7 * 5], ["z"], grid=3)


@pytest.mark.parametrize("d", [f32, f64, f16, i8, u8], ids=str)
@pytest.mark.parametrize("m", [(16, 32, 32), (4, 8, 2)], ids=str)
def test_products_and_transposes(d, m, rng):
    rows, inner, columns = m
    acc = {"i8": i32, "u8": i32, "f16": f32}.get(d.name, d)
    k = K("product", x=view(d, 2), y=view(d, 2), c=view(acc, 2))
    zero = k.const(0)
    a = k.load(k.x, zero, zero, t=TileType(d, (inner, rows)))
    a = k.v(ops.Permute, a, t=TileType(d, (rows, inner)), axes=(1, 0))
    b = k.load(k.y, zero, zero, t=TileType(d, (inner, columns)))
    c = k.load(k.c, zero, zero, t=TileType(acc, (rows, columns)))
    k.store(k.c, k.v(ops.Mma, a, b, c, t=TileType(acc, (rows, columns))), zero, zero)

    def random(shape, d):
        if d.is_int:
            return rng.integers(d.min if d.bits < 16 else -99, d.max if d.bits < 16 else 99, shape).astype(d.numpy)
        return rng.standard_normal(shape).astype(d.numpy)

    kernel = k.done()
    args = [random((inner, rows), d), random((inner, columns), d), random((rows, columns), acc)]
    got = args[2].copy()
    run_interpreted(kernel, 1, [args[0], args[1], got])
    wide = np.int64 if d.is_int else np.float64
    want = args[0].T.astype(wide) @ args[1].astype(wide) + args[2]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4 if d.is_float else 0)


FLOW = """
kernel @flow(%z: view<f32, 1, read_write, unit=[1], align=64>, %n: i64, %m: u32, %mode: i64,
             %q: view<i64, 1, read_write, unit=[1]>) {
  %p = program_id() : i64
  %zero = const(value=0) : i64
  %one = const(value=1) : i64
  %two = const(value=2) : i64
  %five = const(value=5) : i64
  %fz = const(value=1.0) : f32
  %acc0 = broadcast(%fz) : f32[16]
  %acc, %cnt = for(%zero, %n, %one, %acc0, %p) : f32[16], i64 (%k: i64, %a: f32[16], %c: i64) {
    %rem = binary(%k, %two, fn=Binary.mod) : i64
    %odd = compare(%rem, %one, fn=Compare.eq) : bool
    if(%odd) {
      continue(%a, %c)
    } else {
      yield()
    }
    %big = compare(%k, %mode, fn=Compare.gt) : bool
    %r = if(%big) : f32[16] {
      break(%a, %k)
    } else {
      %a2 = binary(%a, %a, fn=Binary.add) : f32[16]
      yield(%a2)
    }
    %c2 = binary(%c, %one, fn=Binary.add) : i64
    %b, %out = loop(%r, %c2) : f32[16], i64 (%x: f32[16], %y: i64) {
      %stop = compare(%y, %five, fn=Compare.ge) : bool
      if(%stop) {
        break(%x, %y)
      } else {
        yield()
      }
      %bad = compare(%y, %mode, fn=Compare.eq) : bool
      if(%bad) {
        store(%q, %two_tile, %p, bounds=Bounds.proven)
        return()
      } else {
        yield()
      }
      %x2 = binary(%x, %x, fn=Binary.mul) : f32[16]
      %y2 = binary(%y, %two, fn=Binary.add) : i64
      continue(%x2, %y2)
    }
    %back = binary(%out, %five, fn=Binary.sub) : i64
    continue(%b, %back)
  }
  store(%z, %acc, %p, bounds=Bounds.proven)
  %s0 = const(value=0) : u32
  %s1 = const(value=3) : u32
  %s, %t = for(%s0, %m, %s1, %acc, %acc0) : f32[16], f32[16] (%i: u32, %u: f32[16], %v: f32[16]) {
    %f = cast(%i) : f32
    %ft = broadcast(%f) : f32[16]
    %w = binary(%u, %ft, fn=Binary.add) : f32[16]
    continue(%v, %w)
  }
  %d = binary(%s, %t, fn=Binary.sub) : f32[16]
  %p8 = const(value=8) : i64
  %at = binary(%p, %p8, fn=Binary.add) : i64
  store(%z, %d, %at, bounds=Bounds.proven)
  %ct = broadcast(%cnt) : i64[4]
  store(%q, %ct, %p, bounds=Bounds.proven)
  return()
}
""".replace("%acc, %cnt = for(%zero", "%two_tile = broadcast(%two) : i64[4]\n  %acc, %cnt = for(%zero")


@pytest.mark.parametrize("n", [0, 1, 2, 7, 40])
@pytest.mark.parametrize("mode", [-1, 1, 4, *(pytest.param(m, marks=pytest.mark.slow) for m in (0, 3, 100))])
def test_nested_break_continue_and_return_leave_what_they_should(n, mode):
    args = [np.zeros(16 * 16, np.float32), n, 10, mode, np.zeros(32, np.int64)]
    agree(parsed(FLOW), args, ["z", "q"], grid=4)


@pytest.mark.parametrize(
    ("lo", "hi", "step"), [(0, 127, 50), (-128, 127, 100), (-128, -127, 1), (100, 127, 26), (5, 5, 3), (6, 5, 1)]
)
def test_ranges_at_the_ends_of_their_type_do_not_wrap(lo, hi, step):
    t = TileType(i8)
    k = K("ends", z=view(i64), lo=t, hi=t, step=t, never=TileType(b1))
    body = Block([t, INDEX, INDEX])
    i, count, total = body.args
    with k.b.at(body):
        arms = Block(), Block()
        with k.b.at(arms[0]):
            k.op(ops.Break, count, total)
        with k.b.at(arms[1]):
            k.op(ops.Yield)
        k.b.emit(ops.If, (k.never,), blocks=arms)
        more = k.v(ops.BinaryOp, count, k.const(1), t=INDEX, fn=Binary.ADD)
        sums = k.v(ops.BinaryOp, total, k.v(ops.Cast, i, t=INDEX), t=INDEX, fn=Binary.ADD)
        k.op(ops.Continue, more, sums)
    loop = k.b.emit(ops.For, (k.lo, k.hi, k.step, k.const(0), k.const(0)), (INDEX, INDEX), (body,))
    for n, v in enumerate(loop.results):
        k.store(k.z, k.v(ops.Broadcast, v, t=TileType(i64, (1,))), k.const(n))
    z = np.zeros(2, np.int64)
    run_interpreted(k.done(), 1, [z, lo, hi, step, False])
    assert z.tolist() == [len(range(lo, hi, step)), sum(range(lo, hi, step))]


def test_a_failed_check_ends_the_program_and_records_the_first_fault():
    kernel = parsed("""
kernel @checked(%z: view<f32, 1, read_write, unit=[1]>, %limit: i64) {
  %p = program_id() : i64
  %ok = compare(%p, %limit, fn=Compare.lt) : bool
  check(%ok, %p, %limit, kind=CheckKind.bounds, message="program is out of bounds")
  %one = const(value=1.0) : f32
  %t = broadcast(%one) : f32[4]
  store(%z, %t, %p, bounds=Bounds.proven)
  return()
}
""")
    z = np.zeros(32, np.float32)
    outcome = run_interpreted(kernel, 8, [z, 5])
    assert z.tolist() == [1.0] * 20 + [0.0] * 12
    assert outcome.fault[:6].tolist() == [2, 2, 5, 0, 5, 5]
    assert outcome.emitted.places[0].message == "program is out of bounds"


def test_a_wait_that_is_not_satisfied_leaves_and_says_what_it_saw():
    kernel = parsed("""
kernel @waits(%w: view<u64, 2, read_write, device, unit=[0, 1]>, %z: view<f32, 1, read_write, unit=[1]>) {
  %p = program_id() : i64
  %one = const(value=1) : i64
  %want = const(value=3) : u64
  %seen = wait(%w, %want, %p, %one, cmp=Cmp.at_least, scope=Scope.device, what="ready") : u64
  %f = cast(%seen) : f32
  %t = broadcast(%f) : f32[1]
  store(%z, %t, %p, bounds=Bounds.proven)
  return()
}
""")
    words = np.array([[0, 5], [0, 3], [0, 2]], np.uint64)
    z = np.zeros(3, np.float32)
    outcome = run_interpreted(kernel, 3, [words, z])
    assert z.tolist() == [5.0, 3.0, 0.0]
    kind, program, place, seen, expected, address, slot = outcome.fault[1:8].tolist()
    assert (kind, program, place, seen, expected, slot) == (4, 2, 0, 2, 3, 2)
    assert address == words.ctypes.data + 8 * 5
    assert (outcome.emitted.places[0].kind, outcome.emitted.places[0].what) == ("wait", "ready")


def test_a_print_is_a_record_of_its_operands():
    k = K("prints", x=view(f32))
    tile = k.load(k.x, k.const(0), t=TileType(f32, (8,)))
    k.op(
        ops.Print,
        k.v(ops.ProgramId, t=INDEX),
        k.v(ops.CompareOp, tile, tile, t=TileType(b1, (8,)), fn=Compare.EQ),
        tile,
        prefix="x is",
    )
    outcome = run_interpreted(k.done(), 2, [np.arange(8, dtype=np.float32)])
    raw = outcome.print.tobytes()
    record = 16 + 8 + 8 + 32
    assert outcome.print[1] == 2 * record
    for program in range(2):
        at = raw[16 + program * record :][:record]
        assert np.frombuffer(at, np.uint64, 1)[0] == program
        assert np.frombuffer(at, np.uint32, 2, 8).tolist() == [0, record - 16]
        assert np.frombuffer(at, np.int64, 1, 16)[0] == program
        assert np.frombuffer(at, np.bool_, 8, 24).all()
        assert np.frombuffer(at, np.float32, 8, 32).tolist() == list(range(8))


def test_scalars_come_out_of_the_low_bytes_of_their_slots(rng):
    params = {f"s_{d}": TileType(d) for d in ALL_DTYPES}
    k = K("scalars", **params, **{f"z_{d}": view(d) for d in ALL_DTYPES})
    for d in ALL_DTYPES:
        k.store(k.params[f"z_{d}"], k.v(ops.Broadcast, k.params[f"s_{d}"], t=TileType(d, (2,))), k.const(0))
    values = [numbers(rng, d)[3] for d in ALL_DTYPES]
    args = [*values, *(np.zeros(2, d.numpy) for d in ALL_DTYPES)]
    agree(k.done(), args, [f"z_{d}" for d in ALL_DTYPES])


@pytest.mark.slow
def test_the_grid_is_flat_and_coordinates_come_from_it():
    k = K("grid", grid_rank=3, z=view(i64, 4, unit_stride=(False, False, False, True)))
    ids = [k.v(ops.ProgramId, t=INDEX, axis=a) for a in range(3)]
    for n, value in enumerate([*ids, *(k.v(ops.NumPrograms, t=INDEX, axis=a) for a in range(3))]):
        k.store(k.z, k.v(ops.Broadcast, value, t=TileType(i64, (1, 1, 1, 1))), *ids, k.const(n))
    z = np.zeros((3, 2, 5, 6), np.int64)
    run_interpreted(k.done(), (3, 2, 5), [z])
    for at in np.ndindex(3, 2, 5):
        assert z[at].tolist() == [*at, 3, 2, 5]


def test_bounds_of_the_helper_cover_extents_beyond_32_bits():
    """The corner is computed in 64 bits; what is left of the tile is clamped before it becomes 32."""
    kernel = parsed("""
kernel @far(%z: view<u8, 1, read_write, unit=[1]>, %i: i64) {
  %c = const(value=7) : u8
  %t = broadcast(%c) : u8[16]
  store(%z, %t, %i, bounds=Bounds.proven)
  return()
}
""")
    z = np.zeros(16, np.uint8)
    far = 1 << 33
    # A view that is said to begin 16 · 2^33 bytes before the array: the tile at index 2^33 is the array itself.
    shifted = np.lib.stride_tricks.as_strided(z, (16,))
    words = [z.ctypes.data - 16 * far, 16 * far + 5, 1]

    class Said:
        ctypes = type("C", (), {"data": words[0]})
        shape, strides, itemsize = (words[1],), (1,), 1

    run_interpreted(kernel, 1, [Said, far])
    assert shifted.tolist() == [7] * 5 + [0] * 11
