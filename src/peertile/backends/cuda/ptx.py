"""PTX of ordered accesses: functions of Triton source around one inline-assembly block each. Knows no ops.

Scalar accesses are made by one elected thread (`%tid.x` = 0) and their value is handed to all through an
or-reduction: every other thread contributes 0, so the result is the same in each thread whatever layout the
compiler picks. Two threads that each read a word for themselves could see two values and part ways.

The caller puts block barriers before releases and after acquires: a barrier orders the threads of a program, and
release and acquire are cumulative over it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from peertile.dtypes import DType
from peertile.memory_model import Cmp, Order, Rmw, Scope

__all__ = [
    "FAULT_ABORTED",
    "FAULT_ASSERT",
    "FAULT_WAIT",
    "POLLS",
    "SCOPE",
    "Poll",
    "agree",
    "await_bulk",
    "begun",
    "cas_tile",
    "check",
    "clock",
    "faults",
    "fence",
    "fence_alias",
    "fence_bulk",
    "follow",
    "follow_waiting",
    "judge",
    "let_in",
    "load_elected",
    "load_table",
    "load_tile",
    "mark",
    "meet",
    "patience",
    "patient_load_tile",
    "report",
    "rmw_tile",
    "store_elected",
    "store_tile",
    "verdict",
    "wait",
]

SCOPE: Final = {Scope.PROGRAM: "cta", Scope.DEVICE: "gpu", Scope.SYSTEM: "sys"}
FAULT_ASSERT: Final = 1
FAULT_WAIT: Final = 4
FAULT_ABORTED: Final = 5
POLLS: Final = 64
"""Looks at the word between two looks at the clock."""
FAR_NS: Final = 200_000
"""Time between two looks of a wait at the abort word and the fault record, which lie in memory of the host: for as long
as such a look takes (tens of microseconds where all multiprocessors look) the word is not looked at. Looking after
every few polls lets two ranks fall into step, each late because the other was."""

LOOKS: Final = 256
"""Looks of a patient load: some 100 us in the memory of the device, after which who waits does so by one thread."""

MOST_LOOKED_AT: Final = 4
"""Elements of a thread that a patient load looks at all at once, in vain as often as not."""

Function = tuple[str, str]
"""Name and text of a function."""

ROLLED: Final = '.pragma "nounroll";'
"""At the head of a loop in which all threads poll. The assembler unrolls a loop with a known bound whole: hundreds of
looks are then tens of KiB of instructions, and every look fetches a line of them from memory, late by as much as the
word is. (A wait, where one thread looks with acquire, was no faster rolled: each look empties the cache for all.)"""

_LETTER: Final = {8: "r", 16: "r", 32: "r", 64: "l"}


def _lines(*lines: str) -> str:
    return "\n".join(f"        {line}" for line in lines)


def _asm(
    name: str, params: str, doc: str, body: str, constraints: str, args: str, result: str, tail: str, pack: int = 1
) -> Function:
    text = (
        f"@triton.jit\ndef {name}({params}):\n    # {doc}\n"
        f'    r = tl.inline_asm_elementwise("""{{\n{body}\n    }}""", "{constraints}", [{args}], '
        f"dtype={result}, is_pure=False, pack={pack})\n    {tail}\n"
    )
    return name, text


def _register_bits(bits: int) -> int:
    return max(bits, 32)


def _b(bits: int) -> str:
    return f"b{bits}"


def _int(bits: int) -> str:
    return f"tl.int{_register_bits(bits)}"


# ---------------------------------------------------------------- words: one elected thread


def load_elected(order: Order, scope: Scope, bits: int) -> Function:
    """f(pointer, lanes) -> the word as an integer of at least 32 bits, the same in every thread."""
    instruction = f"ld.{order.value}.{SCOPE[scope]}.global.{_b(bits)}"
    name = f"_ld_{order.value}_{SCOPE[scope]}_b{bits}"
    width, letter = _register_bits(bits), _LETTER[bits]
    body = _lines(
        ".reg .pred first;",
        ".reg .b32 thread;",
        "mov.u32 thread, %tid.x;",
        "setp.eq.u32 first, thread, 0;",
        f"mov.b{width} $0, 0;",
        *_narrow_load(bits, f"@first {instruction}", "$0", "$1"),
    )
    return _asm(
        name, "pointer, lanes: tl.constexpr", "one thread loads, all get the value", body,
        f"=&{letter},l,r", "pointer, tl.arange(0, lanes)", _int(bits), "return tl.reduce(r, 0, _or)",
    )  # fmt: skip


def load_table() -> Function:
    """f(pointer) -> a word that nobody writes while kernels run, to every thread, here and not where it is used.

    Relaxed at the scope of the program, which the nearest cache answers. A volatile load is one at system scope: every
    warp of every program then asks the same place of the second cache, which answers one after the other. 264 programs
    of 16 warps with three tables are 50,000 requests for one sector, some 18 us.
    """
    body = _lines("ld.relaxed.cta.global.b64 $0, [$1];")
    return _asm("_table", "pointer", "a word of a table", body, "=l,l", "pointer", "tl.int64", "return r")


def _narrow_load(bits: int, instruction: str, register: str, address: str) -> list[str]:
    """A load into a 32- or 64-bit register; bytes and halves go through a register of their width."""
    if bits >= 32:
        return [f"{instruction} {register}, [{address}];"]
    # Bytes have no register type of their own: 16 bits hold them.
    return [
        ".reg .b16 narrow;",
        "mov.b16 narrow, 0;",
        f"{instruction} narrow, [{address}];",
        f"cvt.u32.u16 {register}, narrow;",
    ]


def _narrow_store(bits: int, instruction: str, address: str, register: str) -> list[str]:
    if bits >= 32:
        return [f"{instruction} [{address}], {register};"]
    return [".reg .b16 narrow;", f"cvt.u16.u32 narrow, {register};", f"{instruction} [{address}], narrow;"]


def store_elected(order: Order, scope: Scope, bits: int) -> Function:
    """f(pointer, value): one thread stores the integer `value` (32 or 64 bits wide)."""
    name = f"_st_{order.value}_{SCOPE[scope]}_b{bits}"
    instruction = f"@first st.{order.value}.{SCOPE[scope]}.global.{_b(bits)}"
    body = _lines(
        ".reg .pred first;",
        ".reg .b32 thread;",
        "mov.u32 thread, %tid.x;",
        "setp.eq.u32 first, thread, 0;",
        *_narrow_store(bits, instruction, "$1", "$2"),
        "mov.b32 $0, 0;",
    )
    return _asm(
        name, "pointer, value", "one thread stores", body, f"=r,l,{_LETTER[bits]}", "pointer, value", "tl.int32",
        "return r",
    )  # fmt: skip


def fence(scope: Scope, elected: bool) -> Function:
    """f(): an acq_rel fence, by one thread or by every thread."""
    instruction = f"fence.acq_rel.{SCOPE[scope]};"
    name = f"_fence_{SCOPE[scope]}" + ("" if elected else "_all")
    head = (
        [
            ".reg .pred first;",
            ".reg .b32 thread;",
            "mov.u32 thread, %tid.x;",
            "setp.eq.u32 first, thread, 0;",
        ]
        if elected
        else []
    )
    body = _lines(*head, f"{'@first ' if elected else ''}{instruction}", "mov.b32 $0, 0;")
    who = "one thread" if elected else "every thread"
    return _asm(name, "", f"{who} orders what is before with what is after", body, "=r", "", "tl.int32", "return r")


def fence_alias() -> Function:
    """f(): what every thread did through one address of some memory comes before what it does through another."""
    body = _lines("fence.proxy.alias;", "mov.b32 $0, 0;")
    return _asm("_fence_alias", "", "between two addresses of some memory", body, "=r", "", "tl.int32", "return r")


def fence_bulk() -> Function:
    """f(): what this thread knows of memory comes before what its bulk copies fetch: they go through another proxy."""
    body = _lines("fence.proxy.async;", "mov.b32 $0, 0;")
    return _asm("_fence_bulk", "", "before bulk copies", body, "=r", "", "tl.int32", "return r")


def await_bulk() -> Function:
    """f(): the bulk copies of this thread have ended, and what they stored is visible to it."""
    body = _lines("cp.async.bulk.wait_group 0;", "mov.b32 $0, 0;")
    return _asm("_await_bulk", "", "behind bulk copies", body, "=r", "", "tl.int32", "return r")


def meet() -> Function:
    """f(): all threads of the program meet, as at Triton's own barrier; around that one it makes no loads ahead."""
    body = _lines("bar.sync 0;", "mov.b32 $0, 0;")
    return _asm("_meet", "", "all threads meet", body, "=r", "", "tl.int32", "return r")


def follow() -> Function:
    """f(): the launches in front have ended and what they wrote is visible; from here on the next one may start.

    The next but one starts after that, so at most two launches of a stream are under way at a time.
    """
    body = _lines("griddepcontrol.wait;", "griddepcontrol.launch_dependents;", "mov.b32 $0, 0;")
    doc = "wait for the launch in front, then let the next one begin"
    return _asm("_follow", "", doc, body, "=r", "", "tl.int32", "return r")


def begun() -> Function:
    """f(fault, program), at the head of a kernel that waits: what was in front of it in its stream has ended.

    One thread of the first program stores a word behind the fault record, so that the host learns of it without an
    operation of the stream between the two kernels, which would take as long as the kernel. Nobody waits for the store,
    but the kernel's end and its first release do, for as long as host memory takes: a launch that wants to be told sets
    the lowest bit of the fault record's address, others (graphs) pay nothing.
    It is relaxed: what the launches in front wrote was on its way before this one began.
    """
    body = _lines(
        ".reg .pred first;",
        ".reg .b32 thread;",
        ".reg .b64 one;",
        "mov.u32 thread, %tid.x;",
        "setp.eq.u32 first, thread, 0;",
        "setp.eq.and.s64 first, $2, 0, first;",
        ".reg .b64 record;",
        "and.b64 one, $1, 1;",
        "setp.eq.and.u64 first, one, 1, first;",
        "and.b64 record, $1, -8;",
        "@first st.relaxed.sys.global.b64 [record + 64], one;",
        "mov.b32 $0, 0;",
    )
    return _asm(
        "_begun", "fault, program", "tell the host that this launch has begun", body, "=r,l,l",
        "fault.to(tl.int64), program", "tl.int32", "return r",
    )  # fmt: skip


def follow_waiting() -> Function:
    """f(fault): as `follow` for a kernel that waits, which lets the next launch begin only where bit 1 of the fault
    record's address says that it may: one that is resident early takes places that others may be waiting for. Else it
    does so behind its last wait (`last_wait.py`)."""
    body = _lines(
        ".reg .pred early;",
        ".reg .b64 bits;",
        "griddepcontrol.wait;",
        "and.b64 bits, $1, 2;",
        "setp.ne.u64 early, bits, 0;",
        "@early griddepcontrol.launch_dependents;",
        "mov.b32 $0, 0;",
    )
    doc = "wait for the launch in front; let the next one begin where it may"
    return _asm("_follow_waiting", "fault", doc, body, "=r,l", "fault.to(tl.int64)", "tl.int32", "return r")


def let_in() -> Function:
    """f(last, fault): the next launch may begin, as soon as all programs were here with `last`, or have ended; where
    bit 2 of the fault record's address says that it gains by that. It waits itself until this one has ended, so this
    orders nothing."""
    body = _lines(
        ".reg .pred last;",
        ".reg .b64 bits;",
        "setp.ne.u32 last, $1, 0;",
        "and.b64 bits, $2, 4;",
        "setp.ne.and.u64 last, bits, 0, last;",
        "@last griddepcontrol.launch_dependents;",
        "mov.b32 $0, 0;",
    )
    return _asm(
        "_let_in", "last, fault", "let the next launch begin where no wait is left", body, "=r,r,l",
        "last.to(tl.int32), fault.to(tl.int64)", "tl.int32", "return r",
    )  # fmt: skip


# ---------------------------------------------------------------- tiles of words: every element by one thread


def load_tile(order: Order, scope: Scope, bits: int) -> Function:
    """f(pointers, active) -> the elements as integers of at least 32 bits, 0 where not `active`."""
    name = f"_ld_tile_{order.value}_{SCOPE[scope]}_b{bits}"
    instruction = f"@active ld.{order.value}.{SCOPE[scope]}.global.{_b(bits)}"
    body = _lines(
        ".reg .pred active;",
        "setp.ne.u32 active, $2, 0;",
        f"mov.b{_register_bits(bits)} $0, 0;",
        *_narrow_load(bits, instruction, "$0", "$1"),
    )
    return _asm(
        name, "pointers, active", "each element by the thread that owns it", body, f"=&{_LETTER[bits]},l,r",
        "pointers, active", _int(bits), "return r",
    )  # fmt: skip


def patient_load_tile(order: Order, scope: Scope, bits: int, pack: int, until: Cmp = Cmp.AT_LEAST) -> Function:
    """f(pointers, expected, active) -> as `load_tile`, of words of 32 or 64 bits, but each thread looks again, a
    bounded number of times, until all of its elements have reached `expected` (wrap-safe), or differ from it (NE). What
    is not there by then comes back as it is: the caller looks again, in a way that can end. A thread has `pack`
    elements in flight; of many places that fill (NE) it looks at its last alone until that has come, since what is sent
    in order comes so, and looks at megabytes at a time take the second cache from what comes."""
    kind = "" if until is Cmp.AT_LEAST else f"_{until.value}"
    name = f"_ld_patient{kind}_{order.value}_{SCOPE[scope]}_b{bits}_x{pack}"
    value = [f"${k}" for k in range(pack)]
    pointer, expected, active = ([f"${pack * part + k}" for k in range(pack)] for part in (1, 2, 3))
    again, done, last = (f"PATIENT_{word}_${{:uid}}" for word in ("AGAIN", "DONE", "LAST"))
    missing = [f"missing{k}" for k in range(pack)]

    def load(k: int) -> str:
        return f"@{missing[k]} ld.{order.value}.{SCOPE[scope]}.global.b{bits} {value[k]}, [{pointer[k]}];"

    def judge(k: int) -> list[str]:
        if until is Cmp.NE:
            return [f"setp.eq.and.b{bits} {missing[k]}, {value[k]}, {expected[k]}, {missing[k]};"]
        return [
            f"sub.s{bits} gap, {value[k]}, {expected[k]};",
            f"setp.lt.and.s{bits} {missing[k]}, gap, 0, {missing[k]};",
        ]

    # What has come is not looked at again: looks are in the way of what comes.
    looks = [*map(load, range(pack)), *(line for k in range(pack) for line in judge(k))]
    first = [
        f"mov.b32 count, {LOOKS};",
        f"{last}:",
        ROLLED,
        load(pack - 1),
        *judge(pack - 1),
        "sub.u32 count, count, 1;",
        f"setp.ne.and.u32 more, count, 0, {missing[pack - 1]};",
        f"@more bra {last};",
    ]
    looks.append(f"mov.pred left, {missing[0]};")
    looks += [f"or.pred left, left, {m};" for m in missing[1:]]
    body = _lines(
        f".reg .pred more, left, {', '.join(missing)};",
        f".reg .b{bits} gap;",
        ".reg .b32 count;",
        *(f"setp.ne.u32 {missing[k]}, {active[k]}, 0;" for k in range(pack)),
        *(f"mov.b{bits} {value[k]}, 0;" for k in range(pack)),
        *(first if pack > MOST_LOOKED_AT and until is Cmp.NE else []),
        f"mov.b32 count, {LOOKS};",
        f"{again}:",
        ROLLED,
        *looks,
        f"@!left bra {done};",
        "sub.u32 count, count, 1;",
        "setp.ne.u32 more, count, 0;",
        f"@more bra {again};",
        f"{done}:",
    )
    letter = _LETTER[bits]
    constraints = [f"=&{letter}"] * pack + ["l"] * pack + [letter] * pack + ["r"] * pack
    return _asm(
        name, "pointers, expected, active", "each element by the thread that owns it, once it has come", body,
        ",".join(constraints), "pointers, expected, active", _int(bits), "return r", pack,
    )  # fmt: skip


def store_tile(order: Order, scope: Scope, bits: int) -> Function:
    """f(pointers, values, active): stores the active elements."""
    name = f"_st_tile_{order.value}_{SCOPE[scope]}_b{bits}"
    instruction = f"@active st.{order.value}.{SCOPE[scope]}.global.{_b(bits)}"
    body = _lines(
        ".reg .pred active;",
        "setp.ne.u32 active, $3, 0;",
        *_narrow_store(bits, instruction, "$1", "$2"),
        "mov.b32 $0, 0;",
    )
    return _asm(
        name, "pointers, values, active", "each element by the thread that owns it", body,
        f"=r,l,{_LETTER[bits]},r", "pointers, values, active", "tl.int32", "return r",
    )  # fmt: skip


def cas_tile(order: Order, scope: Scope, bits: int) -> Function:
    """f(pointers, compare, values, active) -> old elements, 0 where not active. Bytes are refused by the caller."""
    name = f"_cas_{order.value}_{SCOPE[scope]}_b{bits}"
    instruction = f"@active atom.{order.value}.{SCOPE[scope]}.global.cas.{_b(bits)}"
    if bits >= 32:
        act = [f"{instruction} $0, [$1], $2, $3;"]
    else:
        act = [
            ".reg .b16 old, expected, value;",
            "mov.b16 old, 0;",
            "cvt.u16.u32 expected, $2;",
            "cvt.u16.u32 value, $3;",
            f"{instruction} old, [$1], expected, value;",
            "cvt.u32.u16 $0, old;",
        ]
    body = _lines(
        ".reg .pred active;",
        "setp.ne.u32 active, $4, 0;",
        f"mov.b{_register_bits(bits)} $0, 0;",
        *act,
    )
    letter = _LETTER[bits]
    return _asm(
        name, "pointers, compare, values, active", "compare and swap, bit by bit", body,
        f"=&{letter},l,{letter},{letter},r", "pointers, compare, values, active", _int(bits), "return r",
    )  # fmt: skip


_INT_STEP: Final = {
    Rmw.ADD: "add.u32 new, old, {value};", Rmw.AND: "and.b32 new, old, {value};", Rmw.OR: "or.b32 new, old, {value};",
    Rmw.XOR: "xor.b32 new, old, {value};", Rmw.MIN: "min.s32 new, old, {value};", Rmw.MAX: "max.s32 new, old, {value};",
    Rmw.UMIN: "min.u32 new, old, {value};", Rmw.UMAX: "max.u32 new, old, {value};", Rmw.XCHG: "mov.b32 new, {value};",
}  # fmt: skip


def rmw_tile(kind: Rmw, dtype: DType, order: Order, scope: Scope) -> Function:
    """f(pointers, values, active) -> old elements: a loop of compare-and-swap, for what has no instruction.

    Integers of 8 and 16 bits act on the aligned 32-bit word around them; floats take min and max with NaN.
    """
    bits = dtype.itemsize * 8
    name = f"_rmw_{kind.value}_{dtype.name}_{order.value}_{SCOPE[scope]}"
    swap = f"atom.{order.value}.{SCOPE[scope]}.global.cas"
    if bits >= 32:
        body = _wide_loop(kind, dtype, scope, swap)
    else:
        body = _narrow_loop(kind, dtype, scope, swap)
    letter = _LETTER[bits]
    return _asm(
        name, "pointers, values, active", f"atomic {kind.value} of {dtype.name} by compare and swap", body,
        f"=&{letter},l,{letter},r", "pointers, values, active", _int(bits), "return r",
    )  # fmt: skip


def _wide_loop(kind: Rmw, dtype: DType, scope: Scope, swap: str) -> str:
    bits = dtype.bits
    best = "min" if kind in (Rmw.MIN, Rmw.UMIN) else "max"
    if bits == 32:
        step = [f"{best}.NaN.f32 new, old, value;"]
    else:
        # There is no NaN form in f64: a NaN on either side is kept by the two tests.
        step = [
            f"{best}.f64 new, old, value;",
            "setp.nan.f64 same, old, old;",
            "@same mov.f64 new, old;",
            "setp.nan.f64 same, value, value;",
            "@same mov.f64 new, value;",
        ]
    b, f = f"b{bits}", f"f{bits}"
    return _lines(
        ".reg .pred active, same;",
        f".reg .{f} old, new, value;",
        f".reg .{b} seen, wanted, found;",
        f"mov.{b} $0, 0;",
        "setp.eq.u32 active, $3, 0;",
        "@active bra RMW_DONE_${:uid};",
        f"mov.{b} value, $2;",
        f"ld.relaxed.{SCOPE[scope]}.global.{b} seen, [$1];",
        "RMW_AGAIN_${:uid}:",
        f"mov.{b} old, seen;",
        *step,
        f"mov.{b} wanted, new;",
        f"{swap}.{b} found, [$1], seen, wanted;",
        f"setp.eq.{b} same, found, seen;",
        f"mov.{b} seen, found;",
        "@!same bra RMW_AGAIN_${:uid};",
        f"mov.{b} $0, seen;",
        "RMW_DONE_${:uid}:",
    )


def _narrow_loop(kind: Rmw, dtype: DType, scope: Scope, swap: str) -> str:
    bits = dtype.itemsize * 8
    extract = "bfe.s32" if kind in (Rmw.MIN, Rmw.MAX) else "bfe.u32"
    if dtype.is_float and kind in (Rmw.MIN, Rmw.MAX):
        step = [
            "cvt.u16.u32 half_a, old;",
            "cvt.u16.u32 half_b, value;",
            f"{kind.value}.NaN.{dtype.name} half_a, half_a, half_b;",
            "cvt.u32.u16 new, half_a;",
        ]
        extract = "bfe.u32"
    else:
        step = [_INT_STEP[kind].format(value="value")]
    return _lines(
        ".reg .pred active, same;",
        ".reg .b64 word;",
        ".reg .b32 shift, seen, old, new, value, wanted, found;",
        ".reg .b16 half_a, half_b;",
        "mov.b32 $0, 0;",
        "setp.eq.u32 active, $3, 0;",
        "@active bra RMW_DONE_${:uid};",
        "and.b64 word, $1, -4;",
        "cvt.u32.u64 shift, $1;",
        "and.b32 shift, shift, 3;",
        "shl.b32 shift, shift, 3;",
        f"{extract} value, $2, 0, {bits};",
        f"ld.relaxed.{SCOPE[scope]}.global.b32 seen, [word];",
        "RMW_AGAIN_${:uid}:",
        f"{extract} old, seen, shift, {bits};",
        *step,
        f"bfi.b32 wanted, new, seen, shift, {bits};",
        f"{swap}.b32 found, [word], seen, wanted;",
        "setp.eq.b32 same, found, seen;",
        "mov.b32 seen, found;",
        "@!same bra RMW_AGAIN_${:uid};",
        "mov.b32 $0, old;",
        "RMW_DONE_${:uid}:",
    )


# ---------------------------------------------------------------- what all threads agree on

VERDICT: Final = "peertile_verdict"
"""A register of the whole kernel: 1 until an element of the tile at hand is false in this thread. A value of assembly
over a tile is a tile again; this carries what the program's threads agreed on to where one scalar is wanted, without
the shuffles and the shared memory of a reduction."""


def verdict() -> Function:
    """f(), once at the head of a kernel: the register."""
    lines = (f".reg .b32 {VERDICT};", f"mov.b32 {VERDICT}, 1;", "mov.b32 $0, 0;")
    return _open_asm("_verdict", "", "\n        ".join(lines), "=r", "", "return r")


def judge(pack: int) -> Function:
    """f(tile of 0 and 1, as 32 bits): takes the thread's elements into the register, `pack` at a time."""
    lines = [f"and.b32 {VERDICT}, {VERDICT}, ${pack + k};\n        mov.b32 ${k}, 0;" for k in range(pack)]
    constraints = ",".join(["=&r"] * pack + ["r"] * pack)
    return _open_asm(f"_judge_x{pack}", "x", "\n        ".join(lines), constraints, "x", "return r", pack)


def agree() -> Function:
    """f() -> whether all elements of all threads were true: one barrier, and the register is as at the head again."""
    body = (
        f"{{\n        .reg .pred ok;\n        setp.ne.u32 ok, {VERDICT}, 0;\n        barrier.red.and.pred ok, 0, ok;\n"
        f"        selp.b32 $0, 1, 0, ok;\n        mov.b32 {VERDICT}, 1;\n    }}"
    )
    return _open_asm("_agree", "", body, "=r", "", "return r != 0")


def _open_asm(name: str, params: str, body: str, constraints: str, args: str, tail: str, pack: int = 1) -> Function:
    """Not in braces: a register is to be seen by others."""
    text = (
        f"@triton.jit\ndef {name}({params}):\n"
        f'    r = tl.inline_asm_elementwise("""{body}""", "{constraints}", [{args}], '
        f"dtype=tl.int32, is_pure=False, pack={pack})\n    {tail}\n"
    )
    return name, text


# ---------------------------------------------------------------- waits and faults


def _record(
    kind: str, got: str, limit: str, address: str, slot: str, program: str, place: str, fault: str
) -> list[str]:
    """Claim the fault record (0 -> 1), fill it, complete it (2). The first fault of a launch wins."""
    return [
        f"atom.acquire.sys.global.cas.b64 claim, [{fault}], 0, 1;",
        "setp.ne.u64 lost, claim, 0;",
        "@lost bra {done};",
        f"st.global.b64 [{fault} + 8], {kind};",
        f"st.global.b64 [{fault} + 16], {program};",
        f"st.global.b64 [{fault} + 24], {place};",
        f"st.global.b64 [{fault} + 32], {got};",
        f"st.global.b64 [{fault} + 40], {limit};",
        f"st.global.b64 [{fault} + 48], {address};",
        f"st.global.b64 [{fault} + 56], {slot};",
        "mov.b64 claim, 2;",
        f"st.release.sys.global.b64 [{fault}], claim;",
    ]


FAULT: Final = "peertile_fault"
"""A register of the whole kernel: what failed first in this program, as kind << 24 | place; 0: nothing has. `_got` and
`_limit` are the numbers of that check. A check only sets them, and one report at the end tells the host: twenty
instructions in the way of what is waited for, at each check, are fetched even if they never run."""


def faults() -> Function:
    """f(), once at the head of a kernel: the registers of its checks."""
    lines = (f".reg .b32 {FAULT};", f".reg .b64 {FAULT}_got, {FAULT}_limit;", f"mov.b32 {FAULT}, 0;",
             f"mov.b64 {FAULT}_got, 0;", f"mov.b64 {FAULT}_limit, 0;", "mov.b32 $0, 0;")  # fmt: skip
    return _open_asm("_faults", "", "\n        ".join(lines), "=r", "", "return r")


def check() -> Function:
    """f(alive, condition, tag, got, limit) -> alive and condition; the first failure of a program is kept."""
    lines = ("{", "    .reg .pred bad;", "    setp.eq.u32 bad, $1, 0;", f"    @bad mov.b32 {FAULT}, $2;",
             f"    @bad mov.b64 {FAULT}_got, $3;", f"    @bad mov.b64 {FAULT}_limit, $4;", "    mov.b32 $0, 0;",
             "}")  # fmt: skip
    return _open_asm(
        "_check", "alive, condition, tag, got, limit", "\n        ".join(lines), "=r,r,r,l,l",
        "(condition | (alive == 0)).to(tl.int32), tag, got, limit", "return alive & condition",
    )  # fmt: skip


def report() -> Function:
    """f(fault, program), at the end of a kernel: one thread records the check that failed, if any did."""
    done = "REPORT_DONE_${:uid}"
    body = _lines(
        ".reg .pred skip, lost;",
        ".reg .b32 thread, bits;",
        ".reg .b64 claim, kind, place;",
        "mov.b32 $0, 0;",
        f"setp.eq.u32 skip, {FAULT}, 0;",
        f"@skip bra {done};",
        "mov.u32 thread, %tid.x;",
        "setp.ne.u32 skip, thread, 0;",
        f"@skip bra {done};",
        f"shr.u32 bits, {FAULT}, 24;",
        "cvt.u64.u32 kind, bits;",
        f"and.b32 bits, {FAULT}, 0xffffff;",
        "cvt.u64.u32 place, bits;",
        *(
            line.replace("{done}", done)
            for line in _record("kind", f"{FAULT}_got", f"{FAULT}_limit", "0", "0", "$2", "place", "$1")
        ),
        f"{done}:",
    )
    return _asm(
        "_report", "fault, program", "one thread records the check that failed", body, "=&r,l,l",
        "fault.to(tl.int64), program", "tl.int32", "return r",
    )  # fmt: skip


def clock() -> Function:
    """f() -> the device's clock in ns."""
    body = _lines("mov.u64 $0, %globaltimer;")
    return _asm("_clock", "", "now, in ns", body, "=l", "", "tl.int64", "return r")


def mark() -> Function:
    """f(buffer, tag, number, program, address, value): one thread writes down when the program comes here, in the
    buffer's next record, and which multiprocessor it is on. The record's first word comes last: its number from 1.
    The layout is that of `backends/marks.py`."""
    done = "MARK_DONE_${:uid}"
    body = _lines(
        ".reg .pred skip;",
        ".reg .b32 thread, sm;",
        ".reg .b64 open, mask, count, at, now, wide;",
        "mov.b32 $0, 0;",
        "mov.u32 thread, %tid.x;",
        "setp.ne.u32 skip, thread, 0;",
        f"@skip bra {done};",
        "ld.relaxed.gpu.global.b64 open, [$1 + 16];",
        "setp.eq.u64 skip, open, 0;",
        f"@skip bra {done};",
        "ld.relaxed.gpu.global.b64 mask, [$1 + 8];",
        "atom.relaxed.gpu.global.add.u64 count, [$1], 1;",
        "and.b64 at, count, mask;",
        "shl.b64 at, at, 6;",
        "add.u64 at, at, $1;",
        "mov.u64 now, %globaltimer;",
        "mov.u32 sm, %smid;",
        "cvt.u64.u32 wide, sm;",
        "st.relaxed.gpu.global.b64 [at + 72], now;",
        "st.relaxed.gpu.global.b64 [at + 80], $2;",
        "st.relaxed.gpu.global.b64 [at + 88], $3;",
        "st.relaxed.gpu.global.b64 [at + 96], $4;",
        "st.relaxed.gpu.global.b64 [at + 104], $5;",
        "st.relaxed.gpu.global.b64 [at + 112], $6;",
        "st.relaxed.gpu.global.b64 [at + 120], wide;",
        "add.u64 count, count, 1;",
        "st.release.gpu.global.b64 [at + 64], count;",
        f"{done}:",
    )
    return _asm(
        "_mark", "buffer, tag, number, program, address, value", "one thread writes a mark", body,
        "=r,l,l,l,l,l,l", "buffer, tag, number, program, address, value", "tl.int32", "return r",
    )  # fmt: skip


def patience() -> Function:
    """f(since, abort, fault, timeout, program, place) -> whether a loop that polls by hand may go on.

    One thread looks at the clock; in one of eight windows of 131 us also at the abort word and the fault record, which
    are far away (see FAR_NS). `barrier.red` tells every thread.
    """
    done, fail, aborted = (f"PATIENCE_{k}_${{:uid}}" for k in ("DONE", "FAIL", "ABORTED"))
    record = _record("kind", "0", "0", "0", "0", "$6", "$7", "$4")
    body = _lines(
        ".reg .pred ok, skip, lost, left;",
        ".reg .b32 thread, stop, window;",
        ".reg .b64 now, passed, claim, kind;",
        "mov.b32 $0, 1;",
        "mov.b32 $1, 0;",
        "mov.u32 thread, %tid.x;",
        "setp.ne.u32 skip, thread, 0;",
        f"@skip bra {done};",
        "mov.u64 now, %globaltimer;",
        "sub.u64 passed, now, $2;",
        "mov.b32 $0, 0;",
        f"mov.b64 kind, {FAULT_WAIT};",
        "setp.ge.u64 skip, passed, $5;",
        f"@skip bra {fail};",
        "mov.b32 $0, 1;",
        "shr.u64 now, now, 17;",
        "cvt.u32.u64 window, now;",
        "and.b32 window, window, 7;",
        "setp.ne.u32 skip, window, 0;",
        f"@skip bra {done};",
        "mov.b32 $0, 0;",
        "ld.relaxed.sys.global.b32 stop, [$3];",
        "setp.ne.u32 skip, stop, 0;",
        f"@skip bra {aborted};",
        "ld.relaxed.sys.global.b64 claim, [$4];",
        "setp.ne.u64 skip, claim, 0;",
        f"@skip bra {done};",
        "mov.b32 $0, 1;",
        f"bra {done};",
        f"{aborted}:",
        f"mov.b64 kind, {FAULT_ABORTED};",
        f"{fail}:",
        *(line.replace("{done}", done) for line in record),
        f"{done}:",
        "setp.ne.u32 ok, $0, 0;",
        "barrier.red.and.pred left, 0, ok;",
        "selp.b32 $0, 1, 0, left;",
    )
    return _asm(
        "_patience", "since, abort, fault, timeout, program, place",
        "whether a loop that polls may go on: it has the bound of a wait", body, "=&r,=&r,l,l,l,l,l,l",
        "since, abort.to(tl.int64), fault.to(tl.int64), timeout, program, place", "(tl.int32, tl.int32)",
        "return r[0] != 0",
    )  # fmt: skip


_COMPARE: Final = {Cmp.EQ: "eq", Cmp.NE: "ne", Cmp.GE: "ge", Cmp.LE: "le", Cmp.GT: "gt", Cmp.LT: "lt"}


@dataclass(frozen=True, slots=True)
class Poll:
    """What a wait looks at: words of these dtypes, compared in one way; `result` is "", "value" (of the one word) or
    "index" (of the word that was satisfied). `exact`: the one word, once satisfied, has to be equal to something, or
    the wait fails as an assertion does. `one_warp`: the program is no more than that, and needs no barrier to meet."""

    dtypes: tuple[DType, ...]
    cmp: Cmp
    order: Order
    scope: Scope
    result: str = ""
    exact: bool = False
    one_warp: bool = False

    @property
    def name(self) -> str:
        kind = "_any" if len(self.dtypes) > 1 or self.result == "index" else ""
        words = "_".join(d.name for d in self.dtypes)
        tail = f"_{self.result}" if self.result else "_exact" if self.exact else ""
        tail += "_warp" if self.one_warp else ""
        return f"_wait{kind}_{self.cmp.value}_{self.order.value}_{SCOPE[self.scope]}_{words}{tail}"


def wait(poll: Poll) -> Function:
    """f(pointer0, expected0, …, abort, fault, timeout, program, place, slot[, exact, claim][, lanes]) -> whether it was
    satisfied [, the value or the index]. `claim`: the place of the assertion that the word is equal to `exact`.

    One thread polls, for `timeout` ns at most, and leaves early if the abort word or the fault record is set. The
    clock is read after the first looks, not before: what is there soon costs a look and nothing else.
    `barrier.red` (a vote, in a single warp) then tells every thread how it ended, and is the block barrier after the
    acquire. A record names the first word.
    """
    n = len(poll.dtypes)
    abort, fault, timeout, program, place, slot = (f"${2 + 2 * n + k}" for k in range(6))
    done, again, look, fail, aborted, came = (
        f"WAIT_{k}_${{:uid}}" for k in ("DONE", "AGAIN", "LOOK", "FAIL", "ABORTED", "CAME")
    )
    looks = [line for k in range(n) for line in _look(poll, k, came if poll.exact else done)]
    first, expected = poll.dtypes[0], "$3"
    sign = "s" if first.is_signed else "u"
    widen = ["mov.b64 got, first;", f"mov.b64 limit, {expected};"]
    if first.bits < 64:
        widen[1] = f"cvt.{sign}64.{sign}{first.bits} limit, {expected};"
    record = _record("kind", "got", "limit", "$2", slot, program, "where" if poll.exact else place, fault)
    exact: list[str] = []
    if poll.exact:
        bits = first.bits
        exact = [
            f"{came}:",
            f"setp.eq.b{bits} ok, word0, ${8 + 2 * n};",
            f"@ok bra {done};",
            "mov.b32 $0, 0;",
            f"mov.b64 kind, {FAULT_ASSERT};",
            f"mov.b64 where, ${9 + 2 * n};",
            "mov.b64 got, 0;",
            "mov.b64 limit, 0;",
            f"bra {fail};",
        ]
    body = _lines(
        ".reg .pred ok, skip, lost, left;",
        ".reg .b32 thread, count, stop;",
        ".reg .b64 first;",
        *([".reg .b64 where;", f"mov.b64 where, {place};"] if poll.exact else []),
        *(f".reg .b{d.bits} word{k}, seen{k};" for k, d in enumerate(poll.dtypes)),
        ".reg .b64 begin, now, due, passed, claim, got, limit, kind;",
        "mov.b32 $0, 1;",
        "mov.b64 $1, 0;",
        "mov.u32 thread, %tid.x;",
        "setp.ne.u32 skip, thread, 0;",
        f"@skip bra {done};",
        "mov.b64 begin, 0;",
        f"{look}:",
        f"mov.b32 count, {POLLS};",
        f"{again}:",
        *looks,
        "sub.u32 count, count, 1;",
        "setp.ne.u32 skip, count, 0;",
        f"@skip bra {again};",
        *widen,
        "mov.b32 $0, 0;",
        "mov.u64 now, %globaltimer;",
        "setp.eq.u64 skip, begin, 0;",
        "@skip mov.b64 begin, now;",
        f"@skip add.u64 due, now, {FAR_NS};",
        "sub.u64 passed, now, begin;",
        f"mov.b64 kind, {FAULT_WAIT};",
        f"setp.ge.u64 skip, passed, {timeout};",
        f"@skip bra {fail};",
        "mov.b32 $0, 1;",
        "setp.lt.u64 skip, now, due;",
        f"@skip bra {look};",
        "mov.b32 $0, 0;",
        f"ld.relaxed.sys.global.b32 stop, [{abort}];",
        "setp.ne.u32 skip, stop, 0;",
        f"@skip bra {aborted};",
        f"ld.relaxed.sys.global.b64 claim, [{fault}];",
        "setp.ne.u64 skip, claim, 0;",
        f"@skip bra {done};",
        "mov.b32 $0, 1;",
        "mov.u64 now, %globaltimer;",
        f"add.u64 due, now, {FAR_NS};",
        f"bra {look};",
        *exact,
        f"{aborted}:",
        f"mov.b64 kind, {FAULT_ABORTED};",
        f"{fail}:",
        *(line.replace("{done}", done) for line in record),
        f"{done}:",
        "setp.ne.u32 ok, $0, 0;",
        *(_MEETS if poll.one_warp else ("barrier.red.and.pred left, 0, ok;",)),
        "selp.b32 $0, 1, 0, left;",
    )
    lanes = bool(poll.result)
    words = [x for k in range(n) for x in (f"pointer{k}", f"expected{k}")]
    rest = ["abort", "fault", "timeout", "program", "place", "slot", *(["exact", "claim"] if poll.exact else [])]
    given = [f"pointer{k // 2}.to(tl.int64)" if k % 2 == 0 else words[k] for k in range(2 * n)]
    given += ["abort.to(tl.int64)", "fault.to(tl.int64)", *rest[2:], *(["tl.arange(0, lanes)"] if lanes else [])]
    letters = ",".join(f"l,{_LETTER[d.bits]}" for d in poll.dtypes)
    both = "return tl.reduce(r[0], 0, _and) != 0, tl.reduce(r[1], 0, _or)"
    more = (f",{_LETTER[first.bits]},l" if poll.exact else "") + (",r" if lanes else "")
    return _asm(
        poll.name, ", ".join([*words, *rest, *(["lanes: tl.constexpr"] if lanes else [])]),
        "one thread polls within a bound, all learn how it ended", body,
        f"=&r,=&l,{letters},l,l,l,l,l,l{more}", ", ".join(given), "(tl.int32, tl.int64)",
        both if lanes else "return r[0] != 0",
    )  # fmt: skip


_MEETS: Final = ("vote.sync.all.pred left, ok, 0xffffffff;", "bar.warp.sync 0xffffffff;")
"""What all threads of a warp agree on; then what one of them knows of memory, they all do."""


def _look(poll: Poll, k: int, done: str) -> list[str]:
    """One look at word k: on success `$1` is the result and the poll is done."""
    d, word, expected = poll.dtypes[k], f"word{k}", f"${3 + 2 * k}"
    sign = "s" if d.is_signed else "u"
    lines = [f"ld.{poll.order.value}.{SCOPE[poll.scope]}.global.b{d.bits} {word}, [${2 + 2 * k}];"]
    if poll.cmp is Cmp.AT_LEAST:
        lines += [f"sub.s{d.bits} seen{k}, {word}, {expected};", f"setp.ge.s{d.bits} ok, seen{k}, 0;"]
    elif poll.cmp in (Cmp.EQ, Cmp.NE):
        lines.append(f"setp.{_COMPARE[poll.cmp]}.b{d.bits} ok, {word}, {expected};")
    else:
        lines.append(f"setp.{_COMPARE[poll.cmp]}.{sign}{d.bits} ok, {word}, {expected};")
    if k == 0:
        lines.append(f"mov.b64 first, {word};" if d.bits == 64 else f"cvt.{sign}64.{sign}{d.bits} first, {word};")
    lines.append(f"mov.b64 $1, {k};" if poll.result == "index" else "mov.b64 $1, first;")
    return [*lines, f"@ok bra {done};"]
