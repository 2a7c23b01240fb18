"""Lowering of `sort`: keys as unsigned numbers, one stable permutation for each row, then every tile taken by it."""

from __future__ import annotations

from peertile.backends.cpu.convert import Batch, cast, constant, each, widen
from peertile.backends.cpu.evaluate import counted_loop, element_type
from peertile.backends.cpu.lower import Lowering, lowers
from peertile.backends.cpu.memory import in_registers_or_scratch
from peertile.backends.cpu.nodes import BufferNode, Node, TakeNode
from peertile.backends.cpu.text import vector
from peertile.dtypes import DType, f32, i32, i64, u32, u64
from peertile.ir import ops


def _sort_key(lo: Lowering, dtype: DType, descending: bool, lanes: int, x: Batch) -> Batch:
    """u64 numbers that compare as the elements do: NaN above all, the two zeros equal."""
    f = lo.f
    if dtype.is_float:
        if dtype.bits < 32:
            x, dtype = widen(f, x, dtype, lanes), f32
        t, v1 = element_type(dtype, lanes), vector("i1", lanes)
        bits_type = u32 if dtype.bits == 32 else u64
        vb = element_type(bits_type, lanes)
        plus = each(f, f"fadd {t} {{}}, {constant(0.0, dtype, lanes)}", x)  # -0 + 0 is 0
        bits = each(f, f"bitcast {t} {{}} to {vb}", plus)
        negative = each(f, f"icmp slt {vb} {{}}, {constant(0, bits_type, lanes)}", bits)
        flipped = each(f, f"xor {vb} {{}}, {constant(bits_type.max, bits_type, lanes)}", bits)
        raised = each(f, f"or {vb} {{}}, {constant(1 << (dtype.bits - 1), bits_type, lanes)}", bits)
        key = each(f, f"select {v1} {{}}, {vb} {{}}, {vb} {{}}", negative, flipped, raised)
        is_nan = each(f, f"fcmp uno {t} {{}}, {{}}", x, x)
        key = each(f, f"select {v1} {{}}, {vb} {constant(bits_type.max, bits_type, lanes)}, {vb} {{}}", is_nan, key)
        key = cast(f, key, bits_type, u64, lanes)
    elif dtype.is_bool:
        key = cast(f, x, dtype, u64, lanes)
    else:
        key = cast(f, x, dtype, i64 if dtype.is_signed else u64, lanes)
        if dtype.is_signed:
            key = each(f, f"xor {vector('i64', lanes)} {{}}, {constant(1 << 63, u64, lanes)}", key)
    if descending:
        key = each(f, f"xor {vector('i64', lanes)} {{}}, {constant(u64.max, u64, lanes)}", key)
    return key


@lowers(ops.Sort)
def _sort(lo: Lowering, op: ops.Sort) -> None:
    f, axis = lo.f, op.attrs["axis"]
    nodes = [in_registers_or_scratch(lo, lo.node(v)) for v in op.operands]
    shape = nodes[0].shape
    n = shape[axis]
    source = nodes[0].dtype

    def emit(lanes: int, x: list[Batch]) -> Batch:
        return _sort_key(lo, source, op.attrs["descending"], lanes, x[0])

    first = nodes[0]
    if not isinstance(first, BufferNode) or n == 1:
        # All keys are equal: everything stays where it is.
        for r, node in zip(op.results, nodes, strict=True):
            lo.define(r, node)
        return
    order = [k for k in range(len(shape)) if k != axis] + [axis]
    moved = tuple(shape[k] for k in order)
    strides = tuple(first.strides[k] for k in order)
    rows_last = BufferNode(first.buffer, source, moved, strides, first.address)
    keys = lo.keep_now(lo.element(u64, (rows_last,), 4, emit))
    found = lo.tile_buffer(i32, moved)
    work = lo.allocate(4 * 8 * n)
    lo.helpers["sort_row"] = _SORT_ROW
    rows = keys.numel // n

    def row(index: str, _: list[str]) -> list[str]:
        at = f.value(f"mul i64 {index}, {n}")
        key = f.value(f"getelementptr inbounds i64, ptr {keys.address}, i64 {at}")
        out = f.value(f"getelementptr inbounds i32, ptr {found.address}, i64 {at}")
        f.emit(f"call void @sort_row(ptr {key}, ptr {out}, ptr {work.pointer}, i64 {n})")
        return []

    counted_loop(f, rows, 1, [], row)
    back = [0] * len(shape)
    for k, a in enumerate(order):
        back[a] = k
    index = BufferNode(found.buffer, i32, shape, tuple(found.strides[back[a]] for a in range(len(shape))))
    for r, node in zip(op.results, nodes, strict=True):
        taken: Node = TakeNode(node, index, axis) if isinstance(node, BufferNode) else node
        lo.define(r, lo.new(taken))


# Stable merge sort from the bottom of (key, place) pairs, which lie in two halves of the work space in turn.
_SORT_ROW = """
define internal void @sort_row(ptr %keys, ptr %out, ptr %work, i64 %n) noinline nounwind {
entry:
  %half = shl i64 %n, 4
  %other = getelementptr i8, ptr %work, i64 %half
  br label %fill
fill:
  %i = phi i64 [ 0, %entry ], [ %i1, %fill ]
  %kp = getelementptr i64, ptr %keys, i64 %i
  %k = load i64, ptr %kp, align 8
  %pair = getelementptr {i64, i64}, ptr %work, i64 %i
  store i64 %k, ptr %pair, align 8
  %place = getelementptr i8, ptr %pair, i64 8
  store i64 %i, ptr %place, align 8
  %i1 = add i64 %i, 1
  %more = icmp ult i64 %i1, %n
  br i1 %more, label %fill, label %pass
pass:
  %w = phi i64 [ 1, %fill ], [ %w2, %passed ]
  %from = phi ptr [ %work, %fill ], [ %to, %passed ]
  %to = phi ptr [ %other, %fill ], [ %from, %passed ]
  %go = icmp ult i64 %w, %n
  br i1 %go, label %run, label %give
run:
  %start = phi i64 [ 0, %pass ], [ %end, %merged ]
  %mid = add i64 %start, %w
  %end = add i64 %mid, %w
  br label %merge
merge:
  %a = phi i64 [ %start, %run ], [ %an, %merge ]
  %b = phi i64 [ %mid, %run ], [ %bn, %merge ]
  %d = phi i64 [ %start, %run ], [ %dn, %merge ]
  %aleft = icmp ult i64 %a, %mid
  %bleft = icmp ult i64 %b, %end
  %as = select i1 %aleft, i64 %a, i64 %start
  %bs = select i1 %bleft, i64 %b, i64 %start
  %ap = getelementptr {i64, i64}, ptr %from, i64 %as
  %bp = getelementptr {i64, i64}, ptr %from, i64 %bs
  %ak = load i64, ptr %ap, align 8
  %bk = load i64, ptr %bp, align 8
  %less = icmp ult i64 %bk, %ak
  %adone = xor i1 %aleft, true
  %want = or i1 %adone, %less
  %useb = and i1 %bleft, %want
  %sp = select i1 %useb, ptr %bp, ptr %ap
  %v = load <2 x i64>, ptr %sp, align 8
  %dp = getelementptr {i64, i64}, ptr %to, i64 %d
  store <2 x i64> %v, ptr %dp, align 8
  %usebi = zext i1 %useb to i64
  %useai = xor i64 %usebi, 1
  %an = add i64 %a, %useai
  %bn = add i64 %b, %usebi
  %dn = add i64 %d, 1
  %again = icmp ult i64 %dn, %end
  br i1 %again, label %merge, label %merged
merged:
  %next = icmp ult i64 %end, %n
  br i1 %next, label %run, label %passed
passed:
  %w2 = shl i64 %w, 1
  br label %pass
give:
  %j = phi i64 [ 0, %pass ], [ %j1, %give ]
  %pp = getelementptr {i64, i64}, ptr %from, i64 %j
  %pl = getelementptr i8, ptr %pp, i64 8
  %p = load i64, ptr %pl, align 8
  %p32 = trunc i64 %p to i32
  %op = getelementptr i32, ptr %out, i64 %j
  store i32 %p32, ptr %op, align 4
  %j1 = add i64 %j, 1
  %rest = icmp ult i64 %j1, %n
  br i1 %rest, label %give, label %done
done:
  ret void
}
"""
