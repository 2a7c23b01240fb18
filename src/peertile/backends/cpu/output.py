"""Lowering of checks, prints and marks: what a kernel tells its launcher about itself.

A print record in the launch's buffer is `u64 program, u32 place, u32 nbytes`, then the operands one after
another, each as its elements in row-major order, padded to 8 bytes. Space is reserved by one atomic add; what
does not fit is counted by it and not written.

A mark is a call of the function (buffer, tag, number, program, address, value) whose address is in the head of the
buffer of marks: whoever gives the buffer knows the clock and how a record is written.
"""

from __future__ import annotations

from peertile.backends.cpu.evaluate import Evaluator, Mode, Position
from peertile.backends.cpu.lower import Lowering, lowers
from peertile.backends.cpu.memory import element_loop, in_registers_or_scratch
from peertile.backends.cpu.nodes import Buffer, BufferNode, Node
from peertile.backends.cpu.text import MEMORY
from peertile.backends.cpu.words import address_of
from peertile.backends.marks import MARK, PLACE_BIT, MarkHead
from peertile.ir import ops
from peertile.ir.ops import CheckKind, Moment
from peertile.ir.types import PointerType

FAULT_KINDS = {CheckKind.ASSERT: 1, CheckKind.BOUNDS: 2, CheckKind.SIGNATURE: 3}
RECORD_HEAD_BYTES = 16
PRINT_WORD = 9
"""Word of the launch context with the address of the print buffer."""
BUFFER_HEAD_BYTES = 16


@lowers(ops.Check)
def _check(lo: Lowering, op: ops.Check) -> None:
    f = lo.f
    lo.emit_stores()
    condition = lo.scalar(op.operands[0])
    extra = [lo.scalar(v) for v in op.operands[1:]] + ["0", "0"]
    kind = op.attrs["kind"]
    place = lo.place(op, kind.value, op.attrs["message"])
    good, bad = f.block("checked"), f.block("fault")
    f.cond_br(condition, good, bad, likely=True)
    f.place(bad)
    name = lo.helper_fault()
    f.emit(
        f"call void @{name}(ptr %ctx, i64 {FAULT_KINDS[kind]}, i64 {lo.program}, i64 {place}, i64 {extra[0]}, "
        f"i64 {extra[1]})"
    )
    f.br(lo.leave)
    f.place(good)


@lowers(ops.Print)
def _print(lo: Lowering, op: ops.Print) -> None:
    f = lo.f
    lo.order_point()
    nodes = [in_registers_or_scratch(lo, lo.node(v)) for v in op.operands]
    lo.flush()
    place = lo.place(op, "print", op.attrs["prefix"], "; ".join(str(v.type) for v in op.operands))
    sizes = [(n.numel * n.dtype.itemsize + 7) & ~7 for n in nodes]
    total = RECORD_HEAD_BYTES + sum(sizes)
    buffer = f.value(f"inttoptr i64 {lo.context_word(PRINT_WORD)} to ptr")
    wanted = f.value(f"icmp ne ptr {buffer}, null")
    reserve, write, done = f.block("reserve"), f.block("write"), f.block("printed")
    f.cond_br(wanted, reserve, done)
    f.place(reserve)
    capacity = f.value(f"load i64, ptr {buffer}, align 8")
    next_record = f.value(f"getelementptr inbounds i64, ptr {buffer}, i64 1")
    start = f.value(f"atomicrmw add ptr {next_record}, i64 {total} monotonic, align 8")
    end = f.value(f"add i64 {start}, {total}")
    fits = f.value(f"icmp ule i64 {end}, {capacity}")
    f.cond_br(fits, write, done, likely=True)
    f.place(write)
    first = f.value(f"add i64 {start}, {BUFFER_HEAD_BYTES}")
    record = f.value(f"getelementptr i8, ptr {buffer}, i64 {first}")
    f.emit(f"store i64 {lo.program}, ptr {record}, align 8")
    second = f.value(f"getelementptr i8, ptr {record}, i64 8")
    f.emit(f"store i64 {place | (total - RECORD_HEAD_BYTES) << 32}, ptr {second}, align 8")
    offset = RECORD_HEAD_BYTES
    for node, size in zip(nodes, sizes, strict=True):
        address = f.value(f"getelementptr i8, ptr {record}, i64 {offset}")
        _write(lo, node, address)
        offset += size
    f.br(done)
    f.place(done)


def _write(lo: Lowering, node: Node, address: str) -> None:
    """Elements of `node` to memory at `address`, dense."""
    to = BufferNode(Buffer(0, 0, address), node.dtype, node.shape)

    def one(p: Position) -> None:
        evaluator = Evaluator(lo, 1, Mode(True), {})
        (value,) = evaluator.values(node, [p])
        target, _ = evaluator.scratch_address(to, p)
        raw = evaluator.to_memory(node.dtype, value, 1)
        lo.f.emit(f"store {MEMORY[node.dtype.name]} {raw}, ptr {target}, align {node.dtype.itemsize}")

    element_loop(lo, node.shape, one)


@lowers(ops.Mark)
def _mark(lo: Lowering, op: ops.Mark) -> None:
    f = lo.f
    buffer, number = (lo.scalar(v) for v in op.operands[:2])
    address, value = "0", "0"
    if len(op.operands) > 2:
        word = op.operands[2]
        value = lo.scalar(op.operands[3])
        if isinstance(word.type, PointerType):
            address = lo.scalar(word)
        else:
            address = f.value(f"ptrtoint ptr {address_of(lo, lo.values[word], op.operands[4:])} to i64")
    lo.flush()
    tag = list(Moment).index(op.attrs["moment"]) | lo.place(op, MARK, what=op.attrs["what"]) << PLACE_BIT
    head = f.value(f"inttoptr i64 {buffer} to ptr")
    at = f.value(f"getelementptr inbounds i64, ptr {head}, i64 {MarkHead.FUNCTION}")
    function = f.value(f"load ptr, ptr {at}, align 8")
    f.emit(f"call void {function}(ptr {head}, i64 {tag}, i64 {number}, i64 {lo.program}, i64 {address}, i64 {value})")
