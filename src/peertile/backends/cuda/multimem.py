"""PTX of multicast operations: functions of Triton source around one inline-assembly block each. Knows no ops.

Every group of consecutive elements is acted on by one thread, with the widest instruction that the assembler has for
the type: four 32-bit registers of floats (`.v4`), one register otherwise. PTX ISA, `multimem.ld_reduce`,
`multimem.st`, `multimem.red` (PTX 8.1, sm_90), `multimem.cp.async.bulk` and `multimem.cp.reduce.async.bulk` (PTX 9.1).
"""

from __future__ import annotations

from typing import Final

from peertile.backends.cuda.ptx import SCOPE
from peertile.dtypes import DType
from peertile.memory_model import Order, Rmw, Scope

__all__ = [
    "BULK_PTX", "bulk_buffer", "bulk_copy", "bulk_fill", "load_reduce", "reduce", "signal", "store", "width",
]  # fmt: skip

BULK_PTX: Final = 91
"""The PTX version that has bulk copies to a multicast address."""

Function = tuple[str, str]

_BITWISE: Final = (Rmw.AND, Rmw.OR, Rmw.XOR)
_NAME: Final = {
    Rmw.ADD: "add", Rmw.ADDF: "add", Rmw.MIN: "min", Rmw.MAX: "max", Rmw.UMIN: "min", Rmw.UMAX: "max",
    Rmw.AND: "and", Rmw.OR: "or", Rmw.XOR: "xor",
}  # fmt: skip


def width(dtype: DType, run: int) -> int:
    """Registers of a group: how many 32-bit registers one instruction takes, of a run of `run` bytes at least."""
    if not dtype.is_float or dtype.bits == 64:
        return 1
    return next(w for w in (4, 2, 1) if run % (4 * w) == 0)


def _type(dtype: DType, rmw: Rmw | None) -> str:
    """The instruction type: signs and bit patterns go by the reduction, halves in pairs."""
    if dtype.is_float:
        return {"f16": ".f16x2", "bf16": ".bf16x2"}.get(dtype.name, f".f{dtype.bits}")
    if rmw in _BITWISE:
        return f".b{dtype.bits}"
    return f".{'s' if rmw in (Rmw.MIN, Rmw.MAX) else 'u'}{dtype.bits}"


def _order(order: Order, scope: Scope | None) -> str:
    return f".{order.value}" + ("" if scope is None else f".{SCOPE[scope]}")


def _tag(order: Order, scope: Scope | None) -> str:
    return _order(order, scope).replace(".", "_")


def _registers(first: int, count: int) -> str:
    names = ", ".join(f"${first + k}" for k in range(count))
    return f"{{{names}}}" if count > 1 else names


def _vector(count: int) -> str:
    return f".v{count}" if count > 1 else ""


def _asm(
    name: str, params: str, doc: str, body: list[str], constraints: str, args: str, dtype: str, result: str, tail: str
) -> Function:
    lines = "\n".join(f"        {line}" for line in body)
    text = (
        f"@triton.jit\ndef {name}({params}):\n    # {doc}\n"
        f'    {result} = tl.inline_asm_elementwise("""{{\n{lines}\n    }}""", "{constraints}", [{args}], '
        f"dtype={dtype}, is_pure=False, pack=1)\n    {tail}\n"
    )
    return name, text


def load_reduce(rmw: Rmw, dtype: DType, order: Order, scope: Scope | None, count: int) -> Function:
    """f(addresses, acts) -> `count` integers a group, in order along new last axes of 2; 0 where it does not act."""
    letter, bits = ("l", 64) if dtype.bits == 64 else ("r", 32)
    wide = ".acc::f32" if dtype.bits == 16 and rmw is Rmw.ADDF else ""
    instruction = (
        f"multimem.ld_reduce{_order(order, scope)}.global.{_NAME[rmw]}{wide}{_vector(count)}{_type(dtype, rmw)}"
    )
    name = f"_mm_load_{rmw.value}_{dtype.name}{_tag(order, scope)}_v{count}"
    body = [
        ".reg .pred act;",
        f"setp.ne.u32 act, ${count + 1}, 0;",
        *(f"mov.b{bits} ${k}, 0;" for k in range(count)),
        f"@act {instruction} {_registers(0, count)}, [${count}];",
    ]
    out = [f"r{k}" for k in range(count)]
    folded = [f"tl.reduce({r}, 0, _or)" for r in out]
    if count == 4:
        joined = f"tl.join(tl.join({folded[0]}, {folded[2]}), tl.join({folded[1]}, {folded[3]}))"
    else:
        joined = f"tl.join({folded[0]}, {folded[1]})" if count == 2 else folded[0]
    integer = f"tl.int{bits}"
    return _asm(
        name, "addresses, acts", "the combination over all ranks, by the thread that owns the group", body,
        ",".join([*(f"=&{letter}" for _ in out), "l", "r"]), "addresses, acts",
        integer if count == 1 else f"({', '.join([integer] * count)})", ", ".join(out), f"return {joined}",
    )  # fmt: skip


def _write(name: str, doc: str, instruction: str, dtype: DType, count: int) -> Function:
    letter = "l" if dtype.bits == 64 else "r"
    values = [f"v{k}" for k in range(count)]
    body = [
        ".reg .pred act;",
        f"setp.ne.u32 act, ${count + 2}, 0;",
        f"@act {instruction} [$1], {_registers(2, count)};",
        "mov.b32 $0, 0;",
    ]
    arguments = ", ".join(["addresses", *values, "acts"])
    constraints = ",".join(["=r", "l", *(letter for _ in values), "r"])
    return _asm(name, arguments, doc, body, constraints, arguments, "tl.int32", "r", "return r")


def reduce(rmw: Rmw, dtype: DType, order: Order, scope: Scope | None, count: int) -> Function:
    """f(addresses, values…, acts): combines `count` integers a group into every rank's memory."""
    instruction = f"multimem.red{_order(order, scope)}.global.{_NAME[rmw]}{_vector(count)}{_type(dtype, rmw)}"
    name = f"_mm_red_{rmw.value}_{dtype.name}{_tag(order, scope)}_v{count}"
    return _write(name, "into every rank's memory, by the thread that owns the group", instruction, dtype, count)


def store(dtype: DType, order: Order, scope: Scope | None, count: int) -> Function:
    """f(addresses, values…, acts): stores `count` integers a group at every rank. Bits are what they are: vectors go
    as f32, which nothing converts."""
    if count > 1:
        kind = ".f32"
    else:
        kind = f".b{64 if dtype.bits == 64 else 32}"
    instruction = f"multimem.st{_order(order, scope)}.global{_vector(count)}{kind}"
    name = f"_mm_st_b{64 if dtype.bits == 64 else 32}{_tag(order, scope)}_v{count}"
    return _write(name, "at every rank, by the thread that owns the group", instruction, dtype, count)


def signal(dtype: DType, add: bool) -> Function:
    """f(address, value): one thread stores, or adds, a word at every rank: release, system scope."""
    bits = dtype.bits
    if add:
        instruction = f"multimem.red.release.sys.global.add.u{bits}"
    else:
        instruction = f"multimem.st.release.sys.global.b{bits}"
    body = [
        ".reg .pred first;",
        ".reg .b32 thread;",
        "mov.u32 thread, %tid.x;",
        "setp.eq.u32 first, thread, 0;",
        f"@first {instruction} [$1], $2;",
        "mov.b32 $0, 0;",
    ]
    return _asm(
        f"_mm_signal{'_add' if add else ''}_b{bits}", "address, value", "one thread, at every rank", body,
        f"=r,l,{'l' if bits == 64 else 'r'}", "address, value", "tl.int32", "r", "return r",
    )  # fmt: skip


# ---------------------------------------------------------------- bulk copies


def bulk_buffer(number: int, nbytes: int) -> Function:
    """f() -> the address of `nbytes` of shared memory, 128-byte aligned: a place of its own for each call in the
    source. Shared memory is a variable of the module to the assembler, so its address outlives the block."""
    body = [f".shared .align 128 .b8 staged_{number}[{nbytes}];", f"mov.u32 $0, staged_{number};"]
    return _asm(
        f"_mm_staged_{number}_{nbytes}",
        "",
        "shared memory for one bulk copy",
        body,
        "=r",
        "",
        "tl.int32",
        "r",
        "return r",
    )


def bulk_fill(bits: int) -> Function:
    """f(addresses, values): every thread puts its elements into shared memory, for the bulk copy to see."""
    body = [f"st.shared.b{bits} [$1], $2;", "fence.proxy.async.shared::cta;", "mov.b32 $0, 0;"]
    return _asm(
        f"_mm_fill_b{bits}", "addresses, values", "what is copied, in shared memory, ahead of the asynchronous proxy",
        body, f"=r,r,{'l' if bits == 64 else 'r'}", "addresses, values", "tl.int32", "r", "return r",
    )  # fmt: skip


def bulk_copy(rmw: Rmw | None, dtype: DType, nbytes: int) -> Function:
    """f(address, buffer): one thread copies the buffer to every rank, or combines it, and waits for the writes."""
    if rmw is None:
        name, copy = "store", "multimem.cp.async.bulk.global.shared::cta.bulk_group"
    else:
        name = f"{rmw.value}_{dtype.name}"
        flush = ".noftz" if dtype.bits == 16 and rmw is Rmw.ADDF else ""
        kind = dtype.name if dtype.bits == 16 else f"f{dtype.bits}"
        copy = f"multimem.cp.reduce.async.bulk.global.shared::cta.bulk_group.{_NAME[rmw]}{flush}.{kind}"
    body = [
        ".reg .pred first;",
        ".reg .b32 thread;",
        "mov.u32 thread, %tid.x;",
        "setp.eq.u32 first, thread, 0;",
        f"@first {copy} [$1], [$2], {nbytes};",
        "@first cp.async.bulk.commit_group;",
        "@first cp.async.bulk.wait_group 0;",
        "fence.proxy.async.global;",
        "mov.b32 $0, 0;",
    ]
    return _asm(
        f"_mm_bulk_{name}_{nbytes}", "address, buffer", "one thread copies, and waits until all is written", body,
        "=r,l,r", "address, buffer", "tl.int32", "r", "return r",
    )  # fmt: skip
