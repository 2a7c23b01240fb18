"""Atomic loads, stores and read-modify-writes as LLVM IR, with the order asked for or a stronger one.

Alignment is always written: without it LLVM calls a library function. Scopes narrower than the system never
weaken anything here, since a cpu has no cheaper instruction for them. A poll must be at least monotonic: LLVM
hoists a plain or unordered load out of its loop.
"""

from __future__ import annotations

from peertile.backends.cpu import arith
from peertile.backends.cpu.lower import Lowering
from peertile.backends.cpu.text import LLVM, MEMORY
from peertile.dtypes import DType
from peertile.ir.ops import Binary
from peertile.memory_model import Order, Rmw

__all__ = ["ORDERING", "atomic_cas", "atomic_load", "atomic_rmw", "atomic_store"]

ORDERING = {
    Order.RELAXED: "monotonic", Order.ACQUIRE: "acquire", Order.RELEASE: "release", Order.ACQ_REL: "acq_rel",
}  # fmt: skip
_FAILURE = {"monotonic": "monotonic", "acquire": "acquire", "release": "monotonic", "acq_rel": "acquire"}


def _bits(dtype: DType) -> str:
    """The integer type that the element is accessed as: atomics of floats are their bits."""
    return f"i{dtype.itemsize * 8}"


def to_bits(lo: Lowering, dtype: DType, value: str) -> str:
    """A register value as the integer that memory holds."""
    if dtype.is_bool:
        return lo.f.value(f"zext i1 {value} to i8")
    if LLVM[dtype.name] == _bits(dtype):
        return value
    return lo.f.value(f"bitcast {LLVM[dtype.name]} {value} to {_bits(dtype)}")


def from_bits(lo: Lowering, dtype: DType, bits: str) -> str:
    if dtype.is_bool:
        return lo.f.value(f"icmp ne i8 {bits}, 0")
    if LLVM[dtype.name] == _bits(dtype):
        return bits
    return lo.f.value(f"bitcast {_bits(dtype)} {bits} to {LLVM[dtype.name]}")


def atomic_load(lo: Lowering, dtype: DType, address: str, order: Order) -> str:
    """Load one element; WEAK is a plain load."""
    if order is Order.WEAK:
        raw = lo.f.value(f"load {MEMORY[dtype.name]}, ptr {address}, align {dtype.itemsize}")
        return lo.f.value(f"icmp ne i8 {raw}, 0") if dtype.is_bool else raw
    raw = lo.f.value(f"load atomic {_bits(dtype)}, ptr {address} {ORDERING[order]}, align {dtype.itemsize}")
    return from_bits(lo, dtype, raw)


def atomic_store(lo: Lowering, dtype: DType, address: str, value: str, order: Order) -> None:
    """Store one element; WEAK is a plain store."""
    raw = to_bits(lo, dtype, value)
    if order is Order.WEAK:
        lo.f.emit(f"store {_bits(dtype)} {raw}, ptr {address}, align {dtype.itemsize}")
        return
    if order.releases:
        lo.stream_fence()
    lo.f.emit(f"store atomic {_bits(dtype)} {raw}, ptr {address} {ORDERING[order]}, align {dtype.itemsize}")


_INT = {
    Rmw.ADD: "add", Rmw.AND: "and", Rmw.OR: "or", Rmw.XOR: "xor", Rmw.MIN: "min", Rmw.MAX: "max",
    Rmw.UMIN: "umin", Rmw.UMAX: "umax", Rmw.XCHG: "xchg",
}  # fmt: skip
_FLOAT = {Rmw.ADDF: Binary.ADD, Rmw.MIN: Binary.MIN, Rmw.MAX: Binary.MAX}


def atomic_rmw(lo: Lowering, rmw: Rmw, dtype: DType, address: str, value: str, order: Order) -> str:
    """Read-modify-write of one element; gives the old value."""
    if order.releases:
        lo.stream_fence()
    ordering = ORDERING[order]
    t = _bits(dtype)
    if dtype.is_float and rmw is not Rmw.XCHG:
        return _float_loop(lo, rmw, dtype, address, value, ordering)
    raw = to_bits(lo, dtype, value)
    old = lo.f.value(f"atomicrmw {_INT[rmw]} ptr {address}, {t} {raw} {ordering}, align {dtype.itemsize}")
    return from_bits(lo, dtype, old)


def _float_loop(lo: Lowering, rmw: Rmw, dtype: DType, address: str, value: str, ordering: str) -> str:
    """A compare-and-swap loop: atomicrmw has no bf16 or fp8, and its fmin does not propagate NaN. Nobody holds
    a lock in it, so it needs no bound: it repeats only when another agent succeeded."""
    f, t = lo.f, _bits(dtype)
    first = f.value(f"load atomic {t}, ptr {address} monotonic, align {dtype.itemsize}")
    loop, done = f.block("rmw"), f.block("done")
    source = f.br(loop)
    f.place(loop)
    old = f.phi(loop, t)
    old.add(first, source)
    now = from_bits(lo, dtype, old.name)
    (new,) = arith.binary(f, lo.library, _FLOAT[rmw], dtype, 1, [now], [value])
    raw = to_bits(lo, dtype, new)
    pair = f.value(
        f"cmpxchg ptr {address}, {t} {old.name}, {t} {raw} {ordering} {_FAILURE[ordering]}, align {dtype.itemsize}"
    )
    seen = f.value(f"extractvalue {{ {t}, i1 }} {pair}, 0")
    ok = f.value(f"extractvalue {{ {t}, i1 }} {pair}, 1")
    latch = f.cond_br(ok, done, loop, likely=True)
    old.add(seen, latch)
    f.place(done)
    return now


def atomic_cas(lo: Lowering, dtype: DType, address: str, compare: str, value: str, order: Order) -> str:
    """Compare-and-swap by bits; gives the old value."""
    if order.releases:
        lo.stream_fence()
    t, ordering = _bits(dtype), ORDERING[order]
    a, b = to_bits(lo, dtype, compare), to_bits(lo, dtype, value)
    pair = lo.f.value(
        f"cmpxchg ptr {address}, {t} {a}, {t} {b} {ordering} {_FAILURE[ordering]}, align {dtype.itemsize}"
    )
    return from_bits(lo, dtype, lo.f.value(f"extractvalue {{ {t}, i1 }} {pair}, 0"))
