"""What emitted Triton source looks like, without triton: names, comments, parameters, loops, descriptors."""

import pytest
from tests.backends.cuda.util import K, body_of, parsed, view

from peertile.backends.cuda.compile import lower_to_text
from peertile.backends.cuda.emit import HIDDEN, emit_kernel
from peertile.backends.cuda.layout import HIDDEN_WORDS, LaunchContext, LaunchLayout
from peertile.backends.cuda.state import LOWERINGS
from peertile.backends.cuda.target import CudaOptions, capability
from peertile.dtypes import b1, bf16, f8e4m3, f16, f32, f64, i32, u8
from peertile.errors import ArgumentError, CompileError
from peertile.ir import ops
from peertile.ir.core import Block
from peertile.ir.types import INDEX, Access, BarrierType, Partition, SignalType, TileType, ViewType
from peertile.source import Loc

ADD = """
kernel @vector_add(%z: view<f32, 1, read_write, tile=[256], unit=[1], align=64>,
                   %x: view<f32, 1, read, unit=[1], align=64, divisible=[16]>) {
  %p = program_id() : i64
  %i = tile_index(%z, %p) : i64
  %a = load(%x, %i, bounds=Bounds.launch) : f32[256]
  %half = const(value=0.5) : f32
  %h = broadcast(%half) : f32[256]
  %c = binary(%a, %h, fn=Binary.mul) : f32[256]
  store(%z, %c, %i, bounds=Bounds.proven)
  return()
}
"""


def test_every_primitive_op_has_a_lowering_and_no_other_op():
    assert set(LOWERINGS) == {*ops.PRIMITIVE, *ops.MULTICAST}


def test_the_source_of_a_small_kernel():
    source = lower_to_text(parsed(ADD))
    assert (
        body_of(source, "vector_add")
        == """\
    _program = tl.program_id(0).to(tl.int64)
    _follow()
    _room = _left(x_n0, _program * 256, 256)
    x_at = x + _program * 256 + tl.arange(0, 256)
    a = tl.load(x_at, mask=(tl.arange(0, 256) < _room), other=0.0)
    h = tl.full((256,), 0.5, tl.float32)
    c = a * h
    _room_1 = _left(z_n0, _program * 256, 256)
    z_at = z + _program * 256 + tl.arange(0, 256)
    tl.store(z_at, c, mask=(tl.arange(0, 256) < _room_1))
"""
    )
    assert source.count("@triton.jit") == 3  # _left, _follow and the kernel: only what is used
    assert "libdevice" not in source


def test_parameters_are_the_slots_of_the_argument_block_then_the_hidden_ones():
    emitted = emit_kernel(parsed(ADD))
    assert [(p.name, p.type, p.divisibility) for p in emitted.parameters[:6]] == [
        ("z", "*fp32", 64), ("z_n0", "i64", 1), ("z_s0", "i64", 1),
        ("x", "*fp32", 64), ("x_n0", "i64", 16), ("x_s0", "i64", 1),
    ]  # fmt: skip
    assert tuple((p.name, p.type) for p in emitted.parameters[6:]) == HIDDEN
    assert emitted.n_slots == 6
    assert len(HIDDEN) + 2 == HIDDEN_WORDS  # triton adds the addresses of its scratch


@pytest.mark.parametrize("t", [SignalType(), BarrierType(), view(f32, 3), TileType(u8)], ids=str)
def test_each_slot_of_a_type_is_one_parameter(t):
    k = K("slots", x=t)
    assert emit_kernel(k.done()).n_slots == len(t.slots)


def test_each_line_knows_the_user_line_and_is_commented_with_it(tmp_path):
    file = tmp_path / "kernels.py"
    file.write_text("@pt.kernel\ndef twice(z, x):\n    y = x.load((0,), (64,))\n    z.store((0,), y + y)\n")
    k = K("twice", z=view(f32), x=view(f32))
    t = TileType(f32, (64,))
    k.b.loc = Loc(str(file), 3, 8)
    y = k.load(k.x, k.const(0), t=t)
    k.b.loc = Loc("/library/helper.py", 90, inlined_at=Loc(str(file), 4, 4))
    k.store(k.z, k.v(ops.BinaryOp, y, y, t=t, fn=ops.Binary.ADD), k.const(0))
    emitted = emit_kernel(k.done())
    lines = emitted.source.splitlines()
    assert "    # kernels.py:3  y = x.load((0,), (64,))" in lines
    assert "    # kernels.py:4  z.store((0,), y + y)" in lines
    assert len(lines) == len(emitted.lines)
    for text, loc in zip(lines, emitted.lines, strict=True):
        if "tl.load" in text:
            assert loc.line == 3
        if "tl.store" in text:
            assert (loc.line, loc.user.line) == (90, 4)


def test_names_of_users_never_meet_words_of_python_or_ours():
    k = K("for", **{"lambda": view(f32), "tl": INDEX, "_left": INDEX, "x": INDEX, "x_n0": view(f32)})
    t = TileType(f32, (64,))
    k.store(k.params["lambda"], k.load(k.x_n0, k.tl, t=t), k.params["_left"])
    source = lower_to_text(k.done())
    compile(source, "emitted", "exec")
    names = [line.strip(" ,") for line in source.split("def for_1(\n")[1].split("):")[0].splitlines()]
    assert names[:4] == ["lambda_1", "lambda_1_n0", "lambda_1_s0", "tl_1"]
    assert len(names) == len(set(names))


GEMM = """
kernel @matmul(%c: view<bf16, 2, read_write, tile=[128, 256], persistent, swizzle=8, unit=[0, 1], align=64,
                        divisible=[16, 16]>,
               %a: view<bf16, 2, read, unit=[0, 1], align=64, divisible=[16, 16]>,
               %b: view<bf16, 2, read, unit=[B], align=64, divisible=[16, 16]>) {
  %p = program_id() : i64
  %np = num_programs() : i64
  %tm = num_tiles(%c, axis=0, size=128) : i64
  %tn = num_tiles(%c, axis=1, size=256) : i64
  %total = binary(%tm, %tn, fn=Binary.mul) : i64
  %nk = num_tiles(%a, axis=1, size=64) : i64
  %zero = const(value=0) : i64
  %one = const(value=1) : i64
  %fz = const(value=0.0) : f32
  for(%p, %total, %np) (%lin: i64) {
    %m, %n = tile_index(%c, %lin) : i64, i64
    %acc0 = broadcast(%fz) : f32[128, 256]
    %acc = for(%zero, %nk, %one, %acc0, stages=4) : f32[128, 256] (%k: i64, %acc1: f32[128, 256]) {
      %ta = load(%a, %m, %k, bounds=Bounds.proven) : bf16[128, 64]
      %tb = load(%b, %k, %n, bounds=Bounds.launch) : bf16[64, 256]
      %acc2 = mma(%ta, %tb, %acc1) : f32[128, 256]
      continue(%acc2)
    }
    %out = cast(%acc) : bf16[128, 256]
    store(%c, %out, %m, %n, bounds=Bounds.proven)
    continue()
  }
  return()
}
"""


def gemm(unit="0, 1", **changes):
    text = GEMM.replace("unit=[B]", f"unit=[{unit}]")
    for old, new in changes.values():
        text = text.replace(old, new)
    return parsed(text)


def test_a_matrix_product_goes_through_descriptors_made_once():
    emitted = emit_kernel(gemm())
    body = body_of(emitted.source, "matmul")
    head, loop = body.split("for lin in", 1)
    assert head.count("tl.make_tensor_descriptor") == 3
    assert "tl.make_tensor_descriptor" not in loop
    assert "num_stages=4" in loop
    assert "a_tiles.load([(m * 128).to(tl.int32), (k * 64).to(tl.int32)])" in loop
    # In two halves, so that the buffer which a store goes through leaves room for a fourth stage.
    assert "_half, _half_1 = tl.split(tl.permute(tl.reshape(out, (128, 2, 128)), (0, 2, 1)))" in loop
    assert "c_tiles.store([(m * 128).to(tl.int32), _column], _half)" in loop
    assert "c_tiles.store([(m * 128).to(tl.int32), _column + 128], _half_1)" in loop
    assert head.count("_follow()") == 1  # after the descriptors, which nobody else looks at
    assert head.index("_follow()") > head.index("b_tiles = ")
    assert "tl.debug_barrier" not in body
    assert sorted((n.slot, n.is_stride) for n in emitted.narrow) == [
        (1, False), (2, False), (3, True), (6, False), (7, False), (8, True), (11, False), (12, False), (13, True),
    ]  # fmt: skip
    assert emitted.num_warps == 8


def test_a_column_major_factor_is_described_transposed():
    body = body_of(lower_to_text(gemm(unit="1, 0")), "matmul")
    assert (
        "shape=[tl.maximum(b_n1, 1).to(tl.int32), tl.maximum(b_n0, 1).to(tl.int32)], strides=[b_s1, 1], "
        "block_shape=[256, 64])"
    ) in body
    assert "tl.permute(b_tiles.load([(n * 256).to(tl.int32), (k * 64).to(tl.int32)]), (1, 0))" in body


@pytest.mark.parametrize(
    ("change", "left"),
    [
        (("align=64", "align=8"), 0),  # the address
        (("divisible=[16, 16]", "divisible=[4, 1]"), 0),  # the strides
        (("unit=[0, 1]", "unit=[0, 0]"), 0),
        (("unit=[0, 1]", "unit=[1, 1]"), 0),  # a second unit stride is no multiple of 16 bytes
        (("%b, %k, %n, bounds", "%b, %k, %n, padding=Padding.nan, bounds"), 2),
        (("  return()", "  %again = load(%c, %zero, %zero, bounds=Bounds.proven) : bf16[128, 64]\n  return()"), 2),
        (("  return()", "  store(%c, %big, %zero, %zero, bounds=Bounds.proven)\n  return()"), 2),
    ],
)
def test_no_descriptor_where_the_facts_or_the_accesses_forbid_it(change, left):
    big = ("%fz = const", "%bz = const(value=0.0) : bf16\n  %big = broadcast(%bz) : bf16[128, 256]\n  %fz = const")
    assert lower_to_text(gemm(big=big, change=change)).count("make_tensor_descriptor") == left


def test_descriptors_can_be_turned_off_for_extents_beyond_32_bits():
    emitted = emit_kernel(gemm(), options=CudaOptions(descriptors=False))
    assert "make_tensor_descriptor" not in emitted.source
    assert emitted.narrow == ()
    body = body_of(emitted.source, "matmul")
    assert (
        "a + m * 128 * a_s0 + k * 64 + tl.arange(0, 128)[:, None].to(tl.int64) * a_s0 + tl.arange(0, 64)[None, :]"
        in body
    )


def test_a_store_inside_a_loop_over_something_else_is_no_bulk_copy():
    out = ViewType(
        bf16,
        2,
        Access.READ_WRITE,
        partition=Partition((128, 128)),
        unit_stride=(False, True),
        align=64,
        divisible=(16, 16),
    )
    k = K("repeats", z=out, x=view(bf16, 2, divisible=(16, 16)), n=INDEX)
    index = k.op(ops.TileIndex, k.z, k.v(ops.ProgramId, t=INDEX), results=(INDEX, INDEX)).results
    x = k.load(k.x, *index, t=TileType(bf16, (128, 128)))
    acc = k.v(ops.Mma, x, x, k.full(0.0, TileType(f32, (128, 128))), t=TileType(f32, (128, 128)))
    wide = k.v(ops.Cast, acc, t=TileType(bf16, (128, 128)))
    body = Block([INDEX])
    with k.b.at(body):
        k.store(k.z, wide, *index)
        k.op(ops.Continue)
    k.b.emit(ops.For, (k.const(0), k.n, k.const(1)), (), (body,))
    source = lower_to_text(k.done())
    assert "z_tiles" not in source
    assert "x_tiles" in source
    assert source.count("tl.debug_barrier()") == 1


def test_a_row_of_checks_nests_one_level():
    k = K("checks", z=view(f32), n=INDEX)
    t = TileType(f32, (64,))
    for n in range(30):
        i = k.v(ops.BinaryOp, k.n, k.const(n), t=INDEX, fn=ops.Binary.ADD)
        ok = k.v(ops.CompareOp, i, k.const(99), t=TileType(b1), fn=ops.Compare.LT)
        k.op(ops.Check, ok)
    k.store(k.z, k.full(1.0, t), k.n)
    body = body_of(lower_to_text(k.done()), "checks")
    assert body.count("if _alive:") == 1
    assert body.count("_alive = _check(") == 30
    # What failed is kept in registers and recorded once, behind everything.
    assert body.count("_faults()") == body.count("_report(_fault, _program)") == 1
    assert body.rstrip().endswith("_report(_fault, _program)")


# ---------------------------------------------------------------- options, refusals, launch layout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_warps": 3}, "num_warps: expected a power of two up to 32, got 3"),
        ({"num_stages": 0}, "num_stages: expected 1 to 8, got 0"),
        ({"f32_mma": "fast"}, "f32_mma: expected ieee, tf32x3 or tf32, got 'fast'"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ArgumentError) as caught:
        CudaOptions(**options)
    assert str(caught.value) == message


def test_architectures_are_named():
    assert [capability(a) for a in ("sm_80", "sm_90", "sm_90a", "sm_103")] == [80, 90, 90, 103]
    with pytest.raises(ArgumentError) as caught:
        capability("sm_70")
    expected = "sm_80, sm_86, sm_89, sm_90, sm_100, sm_103, sm_120"
    assert str(caught.value) == f"arch: expected one of {expected}, got 'sm_70'"


def product(dtype, acc, shape, arch="sm_90"):
    rows, inner, columns = shape
    k = K("product", x=view(dtype, 2), y=view(dtype, 2), z=view(acc, 2))
    zero = k.const(0)
    x, y = (
        k.load(k.x, zero, zero, t=TileType(dtype, (rows, inner))),
        k.load(k.y, zero, zero, t=TileType(dtype, (inner, columns))),
    )
    t = TileType(acc, (rows, columns))
    k.store(k.z, k.v(ops.Mma, x, y, k.load(k.z, zero, zero, t=t), t=t), zero, zero)
    return lower_to_text(k.done(), arch)


def test_what_an_architecture_lacks_is_refused_by_name():
    with pytest.raises(CompileError) as caught:
        product(f8e4m3, f32, (16, 32, 16), "sm_80")
    assert str(caught.value) == "parameter x: f8e4m3 needs sm_89 or newer, and the target is sm_80; use f8e5m2 or f16"


def test_small_inner_extents_are_summed_and_large_products_of_them_refused():
    assert "_dot_by_sum(" in product(f16, f32, (64, 8, 64))
    assert "tl.dot(" in product(f64, f64, (64, 16, 64))
    assert "_dot_u8(" in product(u8, i32, (16, 32, 16))
    with pytest.raises(CompileError) as caught:
        product(f16, f32, (128, 8, 128))
    assert str(caught.value) == (
        "mma: an inner extent of 8 is below the 16 that f16 takes on sm_90, and f16[128, 8] with f16[8, 128] has "
        "131072 products, more than the 65536 that are summed instead; use an inner extent of at least 16"
    )


def test_the_parameter_buffer_is_the_argument_block_and_ten_words():
    layout = LaunchLayout(2, extents=(1,), strides=(), scratch_per_program=384, scratch_align=128)
    context = LaunchContext((3, 2, 1), abort=0x10, fault=0x20, timeout_ns=5, launch=0x30, print=0x40, scratch=0x50)
    args = (7).to_bytes(8, "little") + (1 << 31).to_bytes(8, "little")
    packed = layout.pack(args, context)
    assert packed[:16] == args
    words = [int.from_bytes(packed[k : k + 8], "little") for k in range(16, len(packed), 8)]
    assert words == [3, 2, 1, 0x10, 0x20, 5, 0x30, 0x40, 0x50, 0]
    assert len(packed) == 8 * layout.n_words
    assert (context.programs, layout.scratch_bytes(6)) == (6, 2304)
    assert not layout.fits(args)
    assert layout.fits(args[:8] + ((1 << 31) - 1).to_bytes(8, "little"))
    assert layout.fits(args[:8] + bytes(8))
    assert not LaunchLayout(2, extents=(0,), strides=(1,)).fits(args[:8] + bytes(8))
    assert LaunchLayout.from_json(layout.to_json()) == layout
    with pytest.raises(ValueError, match="args: expected 16 bytes for 2 slots, got 8"):
        layout.pack(args[:8], context)
