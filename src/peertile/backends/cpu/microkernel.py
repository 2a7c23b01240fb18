"""Matrix multiply of static extents as LLVM IR text: register blocks, packing, cache blocks.

One plan is one micro-kernel, since all extents are powers of two and a block divides them or equals them. Two
shapes of kernel exist. The *outer* one keeps MR x NR accumulators, broadcasts elements of A straight from its
rows and reads B by vectors along n, from panels of NR columns (packed) or from its rows (when each is read once
anyway). The *dot* one, for few columns or a transposed B met by few rows, runs along k and sums its vectors at the end.

What is multiplied are *units*: an element, or a pair of 16-bit elements neighbouring in k where the target has an
instruction for it (bf16 with avx512bf16; i8 and u8 widened to 16 bits on avx2 and up).

Numerics. f32, f64: fused multiply-add per element, summed in k order from zero, then added to C (dot: several
partial sums). f16, fp8, bf16 without avx512bf16: converted exactly to f32, then the same. bf16 with avx512bf16:
the processor adds two products per step, rounds to nearest even whatever the mode, and FLUSHES DENORMALS of
operands and results to zero, so it does not agree bit for bit with the f32 way. i8, u8: exact, i32 wraps.

It emits no llvmlite calls and knows nothing of tiles, views or where its operands come from.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Final

from peertile.errors import InternalError

__all__ = ["MatmulPlan", "plan_matmul"]

ALIGN: Final = 64
PANEL_BYTES: Final = 32 * 1024  # a packed panel shares the L1 cache with the rows of A and C
MAX_K_BLOCK: Final = 256  # and 256 rows of A of this many units stay in L2
M_BLOCK: Final = 256


@dataclass(frozen=True, slots=True)
class MatmulPlan:
    """How C[m, n] += A[m, k] @ B[k, n] is done, and the text of its functions (all `internal noinline`).

    The simple way does everything, with `scratch_bytes` of scratch aligned to 64 bytes (null if it is 0):

        call void @RUN(ptr C, i64 ldc, ptr A, i64 lda, ptr B, i64 ldb, ptr scratch)

    The hoisting way, when A or B serves several matmuls or can be packed straight from its view:

        if packs_b:  call void @PACK_B(ptr dst, ptr B, i64 ldb)      dst: pack_b_bytes, aligned to 64
        if packs_a:  call void @PACK_A(ptr dst, ptr A, i64 lda)      dst: pack_a_bytes, aligned to 64
        call void @MATMUL(ptr C, i64 ldc, ptr A, i64 lda, ptr B, i64 ldb)

    where A is the packed A if packs_a (lda is ignored) and B the packed B if packs_b (ldb is ignored). The
    layout of a packed operand belongs to its plan.

    A, B, C are row-major with unit column stride, row strides in elements, aligned to their element. C has the
    accumulator dtype (f32, f64 or i32 as in ir.ops.MMA_TYPES) and overlaps neither A, B nor the scratch. Names carry
    dtype and extents: within one target equal names are equal text, so emit one text per `run_name`.
    """

    dtype: str
    m: int
    n: int
    k: int
    text: str
    run_name: str
    matmul_name: str
    pack_a_name: str | None
    pack_b_name: str | None
    pack_a_bytes: int
    pack_b_bytes: int

    @property
    def packs_a(self) -> bool:
        """Whether `matmul` takes A as `pack_a` writes it."""
        return self.pack_a_name is not None

    @property
    def packs_b(self) -> bool:
        """Whether `matmul` takes B as `pack_b` writes it."""
        return self.pack_b_name is not None

    @property
    def scratch_bytes(self) -> int:
        """What `run` needs."""
        return self.pack_a_bytes + self.pack_b_bytes


def plan_matmul(
    dtype: str, m: int, n: int, k: int, features: frozenset[str], *, b_transposed: bool = False
) -> MatmulPlan:
    """The plan for operands of `dtype` (a key of ir.ops.MMA_TYPES) and power-of-two extents from 1 on.

    With `b_transposed`, B is given as its transpose: row-major [n, k], row stride ldb. So `q @ k.T` needs no
    transposed copy. `features` are LLVM feature names.
    """
    if dtype not in _SOURCES:
        raise InternalError(f"matmul: dtype: expected one of {', '.join(_SOURCES)}, got {dtype!r}")
    for role, extent in (("m", m), ("n", n), ("k", k)):
        if extent < 1 or extent & (extent - 1):
            raise InternalError(f"matmul: {role}: expected a power of two, got {extent}")
    return _plan(dtype, m, n, k, features & _RELEVANT, b_transposed)


_RELEVANT: Final = frozenset(
    {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512bf16", "avx512vnni", "neon"}
)


class _Pair(Enum):
    """The instruction that multiplies a unit of two 16-bit elements and adds both products."""

    BF16 = "dpbf16ps"
    VNNI = "vpdpwssd"
    MADD = "pmaddwd"


@dataclass(frozen=True, slots=True)
class _Source:
    """An element type in memory."""

    llvm: str  # as loaded
    size: int
    compute: str  # of products, when not in pairs


_SOURCES: Final = {
    "f32": _Source("float", 4, "float"),
    "f64": _Source("double", 8, "double"),
    "f16": _Source("half", 2, "float"),
    "bf16": _Source("i16", 2, "float"),
    "f8e4m3": _Source("i8", 1, "float"),
    "f8e5m2": _Source("i8", 1, "float"),
    "i8": _Source("i8", 1, "i32"),
    "u8": _Source("i8", 1, "i32"),
}
_SIZE: Final = {"float": 4, "double": 8, "i32": 4}


def _vector(element: str, lanes: int) -> str:
    return element if lanes == 1 else f"<{lanes} x {element}>"


def _mangled(element: str, lanes: int) -> str:
    short = {"float": "f32", "double": "f64"}.get(element, element)
    return short if lanes == 1 else f"v{lanes}{short}"


def _splat(element: str, lanes: int, text: str) -> str:
    return text if lanes == 1 else f"splat ({element} {text})"


def _mask(indices: list[int]) -> str:
    return f"<{len(indices)} x i32> <{', '.join(f'i32 {i}' for i in indices)}>"


# ---------------------------------------------------------------- writing instructions


class _Function:
    """One function being written: instructions, and loops of constant length."""

    def __init__(self, head: str) -> None:
        self.lines = [head, "entry:"]
        self.block = "entry"

    def new(self, instruction: str) -> str:
        ref = f"%t{len(self.lines)}"
        self.lines.append(f"  {ref} = {instruction}")
        return ref

    def do(self, instruction: str) -> None:
        self.lines.append(f"  {instruction}")

    def label(self, name: str) -> None:
        self.lines.append(f"{name}:")
        self.block = name

    @contextmanager
    def loop(self, count: int, carried: tuple[tuple[str, str, str], ...] = ()) -> Iterator[str]:
        """Runs the body for 0 .. count-1; gives the index. `carried` are (phi, type, first value); the body defines
        `{phi}.n`. A loop of one turn without carried values is no loop."""
        if count == 1 and not carried:
            yield "0"
            return
        name, before = f"l{len(self.lines)}", self.block
        self.do(f"br label %{name}")
        self.label(name)
        index = self.new(f"phi i64 [ 0, %{before} ], [ %{name}.i, %{name}.latch ]")
        for phi, t, first in carried:
            self.do(f"{phi} = phi {t} [ {first}, %{before} ], [ {phi}.n, %{name}.latch ]")
        yield index
        self.do(f"br label %{name}.latch")
        self.label(f"{name}.latch")
        self.do(f"%{name}.i = add nuw nsw i64 {index}, 1")
        self.do(f"%{name}.c = icmp ult i64 %{name}.i, {count}")
        self.do(f"br i1 %{name}.c, label %{name}, label %{name}.end")
        self.label(f"{name}.end")

    def times(self, a: str, b: str | int) -> str:
        if a == "0" or b == 0:
            return "0"
        return a if b == 1 else self.new(f"mul nsw i64 {a}, {b}")

    def plus(self, a: str, b: str | int) -> str:
        if a == "0":
            return str(b)
        return a if str(b) == "0" else self.new(f"add nsw i64 {a}, {b}")

    def at(self, element: str, base: str, offset: str) -> str:
        return base if offset == "0" else self.new(f"getelementptr inbounds {element}, ptr {base}, i64 {offset}")

    def text(self) -> str:
        return "\n".join([*self.lines, "  ret void", "}", ""])


def _convert(f: _Function, dtype: str, pair: _Pair | None, x: str, lanes: int, hardware_f16: bool) -> str:
    """`lanes` elements as loaded -> the compute type (alone), or 16 bits each (for pairs)."""
    i8, i16, i32, half, flt = (_vector(t, lanes) for t in ("i8", "i16", "i32", "half", "float"))
    if dtype in ("f32", "f64") or (dtype == "bf16" and pair):
        return x
    if dtype in ("i8", "u8"):
        return f.new(f"{'sext' if dtype == 'i8' else 'zext'} {i8} {x} to {i16 if pair else i32}")
    if dtype == "bf16":
        wide = f.new(f"zext {i16} {x} to {i32}")
        moved = f.new(f"shl {i32} {wide}, {_splat('i32', lanes, '16')}")
        return f.new(f"bitcast {i32} {moved} to {flt}")
    if dtype == "f8e5m2":  # the upper byte of an f16
        wide = f.new(f"zext {i8} {x} to {i16}")
        x = f.new(f"shl {i16} {wide}, {_splat('i16', lanes, '8')}")
    elif dtype == "f16" and not hardware_f16:
        x = f.new(f"bitcast {half} {x} to {i16}")
    if dtype != "f8e4m3" and hardware_f16:
        return f.new(f"fpext {half} {x if dtype == 'f16' else f.new(f'bitcast {i16} {x} to {half}')} to {flt}")
    # Exponent and mantissa moved to their places in f32 are the value over a power of two, denormals too; what
    # has the largest code of the format is then no ordinary number.
    narrow, bits, shift, factor, special = (
        (i8, 8, 20, 0x4770000000000000, 0x7F) if dtype == "f8e4m3" else (i16, 16, 13, 0x46F0000000000000, 0x7C00)
    )
    wide = f.new(f"zext {narrow} {x} to {i32}")
    size = f.new(f"and {i32} {wide}, {_splat('i32', lanes, str((1 << (bits - 1)) - 1))}")
    moved = f.new(f"shl {i32} {size}, {_splat('i32', lanes, str(shift))}")
    value = f.new(
        f"fmul {flt} {f.new(f'bitcast {i32} {moved} to {flt}')}, {_splat('float', lanes, f'0x{factor:016X}')}"
    )
    plain = f.new(f"bitcast {flt} {value} to {i32}")
    odd = f.new(f"or {i32} {moved}, {_splat('i32', lanes, str(0x7F800000))}")
    test = f.new(f"icmp uge {i32} {size}, {_splat('i32', lanes, str(special))}")
    chosen = f.new(f"select {_vector('i1', lanes)} {test}, {i32} {odd}, {i32} {plain}")
    sign = f.new(f"lshr {i32} {wide}, {_splat('i32', lanes, str(bits - 1))}")
    sign = f.new(f"shl {i32} {sign}, {_splat('i32', lanes, '31')}")
    return f.new(f"bitcast {i32} {f.new(f'or {i32} {chosen}, {sign}')} to {flt}")


# ---------------------------------------------------------------- the plan


@dataclass(frozen=True, slots=True)
class _Layout:
    """Everything decided about one matmul before text is written."""

    dtype: str
    m: int
    n: int
    k: int
    b_transposed: bool
    features: frozenset[str]
    pair: _Pair | None
    lanes: int  # units per vector
    dot: bool
    mr: int
    nr: int
    packs_a: bool
    packs_b: bool

    @property
    def source(self) -> _Source:
        return _SOURCES[self.dtype]

    @property
    def per_unit(self) -> int:
        return 2 if self.pair else 1

    @property
    def ku(self) -> int:
        """k in units."""
        return self.k // self.per_unit

    @property
    def unit(self) -> str:
        """Type of a unit in registers and packed memory."""
        return "i32" if self.pair else self.source.compute

    @property
    def unit_size(self) -> int:
        return _SIZE[self.unit]

    @property
    def acc(self) -> str:
        return "float" if self.pair is _Pair.BF16 else "i32" if self.pair else self.source.compute

    @property
    def kb(self) -> int:
        """Units of k in one block."""
        if self.dot or not self.packs_b:
            return self.ku
        return min(self.ku, MAX_K_BLOCK, max(PANEL_BYTES // (self.nr * self.unit_size), 1))

    @property
    def hardware_f16(self) -> bool:
        return bool(self.features & {"f16c", "avx512f", "neon"})

    @property
    def fused(self) -> bool:
        return bool(self.features & {"fma", "avx512f", "neon"})

    @property
    def converts(self) -> bool:
        """Whether a unit in memory is not what it is in registers."""
        return not (self.dtype in ("f32", "f64") or self.pair is _Pair.BF16)


def _pair_of(dtype: str, k: int, features: frozenset[str]) -> _Pair | None:
    if k < 2:
        return None
    if dtype == "bf16" and features >= {"avx512bf16", "avx512vl"}:
        return _Pair.BF16
    if dtype in ("i8", "u8"):
        if features >= {"avx512vnni", "avx512vl", "avx512bw"}:
            return _Pair.VNNI
        if "avx2" in features and ("avx512f" not in features or "avx512bw" in features):
            return _Pair.MADD
    return None


def _layout(dtype: str, m: int, n: int, k: int, features: frozenset[str], b_transposed: bool) -> _Layout:
    register = 64 if "avx512f" in features else 32 if "avx2" in features else 16
    registers = 32 if register == 64 or "neon" in features else 16
    pair = _pair_of(dtype, k, features)
    unit = 4 if pair else _SIZE[_SOURCES[dtype].compute]
    full = register // unit
    ku = k // (2 if pair else 1)
    accumulators = registers // 2
    dot = ku >= full and (n <= 8 or (b_transposed and m <= 4))
    if pair and not dot and n < 4:  # no instruction that narrow
        pair, ku, unit = None, k, _SIZE[_SOURCES[dtype].compute]
        full = register // unit
        dot = ku >= full
    exact = dtype in ("f32", "f64") or pair is _Pair.BF16
    if dot:
        mr = min(m, 4)
        nr = min(n, accumulators // mr)
        lanes = full
        packs_b = not (b_transposed and exact)
    else:
        lanes = min(full, n)
        # Wide where few rows share a vector of B, so that enough sums are under way to hide the latency; bf16
        # pairs run one a cycle and are bound by loads, which 4x4 vectors have fewer of than 8x2.
        wide = 4 if pair else 2
        vectors = max(min(8, accumulators // min(m, 16)), wide)
        vectors = max(min(vectors, n // lanes), 1)
        mr = min(m, max(accumulators // vectors, 1), 8)
        nr = lanes * vectors
        packs_b = b_transposed or m > mr
    return _Layout(
        dtype=dtype, m=m, n=n, k=k, b_transposed=b_transposed, features=features, pair=pair, lanes=lanes, dot=dot,
        mr=mr, nr=nr, packs_a=not exact, packs_b=packs_b,
    )  # fmt: skip


@cache
def _plan(dtype: str, m: int, n: int, k: int, features: frozenset[str], b_transposed: bool) -> MatmulPlan:
    s = _layout(dtype, m, n, k, features, b_transposed)
    base = f"pt.mm.{dtype}.{m}x{n}x{k}" + (".t" if b_transposed else "")
    texts = [_micro_dot(s, base) if s.dot else _micro_outer(s, base), _matmul(s, base)]
    a_bytes = _round_up(m * s.ku * s.unit_size) if s.packs_a else 0
    b_bytes = _round_up(n * s.ku * s.unit_size) if s.packs_b else 0
    if s.packs_a:
        texts.append(_pack_rows(s, f"{base}.pack_a", m))
    if s.packs_b:
        texts.append(_pack_b(s, f"{base}.pack_b"))
    texts.append(_run(s, base, a_bytes))
    return MatmulPlan(
        dtype=dtype, m=m, n=n, k=k, text="\n".join(texts), run_name=f"{base}.run", matmul_name=base,
        pack_a_name=f"{base}.pack_a" if s.packs_a else None, pack_b_name=f"{base}.pack_b" if s.packs_b else None,
        pack_a_bytes=a_bytes, pack_b_bytes=b_bytes,
    )  # fmt: skip


def _round_up(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


# noinline and internal: each body is compiled once, and not at all when nobody calls it. optsize keeps LLVM from
# unrolling what is blocked already: the same speed, two thirds of the compile time.
_ATTRIBUTES: Final = "noinline optsize nounwind"
_MATRICES: Final = "ptr noalias %c, i64 %ldc, ptr noalias readonly %a, i64 %lda, ptr noalias readonly %b, i64 %ldb"


def _run(s: _Layout, base: str, a_bytes: int) -> str:
    f = _Function(f"define internal void @{base}.run({_MATRICES}, ptr noalias %scratch) {_ATTRIBUTES} {{")
    a, b, lda, ldb = "%a", "%b", "%lda", "%ldb"
    if s.packs_a:
        f.do(f"call void @{base}.pack_a(ptr %scratch, ptr %a, i64 %lda)")
        a, lda = "%scratch", "0"
    if s.packs_b:
        b, ldb = f.at("i8", "%scratch", str(a_bytes)), "0"
        f.do(f"call void @{base}.pack_b(ptr {b}, ptr %b, i64 %ldb)")
    f.do(f"call void @{base}(ptr %c, i64 %ldc, ptr {a}, i64 {lda}, ptr {b}, i64 {ldb})")
    return f.text()


def _memory_a(s: _Layout) -> tuple[str, int]:
    """Element type of A as the kernel finds it, and how many make a unit."""
    return (s.unit, 1) if s.packs_a else (s.source.llvm, s.per_unit)


def _matmul(s: _Layout, base: str) -> str:
    """The loops around the micro-kernel: block of k, block of m, panel of n, rows of m. A panel stays in L1 for all
    rows of its block, and the block of A in L2 for all panels."""
    f = _Function(f"define internal void @{base}({_MATRICES}) {_ATTRIBUTES} {{")
    lda = str(s.ku) if s.packs_a else "%lda"
    element, per_unit = _memory_a(s)
    rows = min(s.m, M_BLOCK)
    with f.loop(s.ku // s.kb) as ik, f.loop(s.m // rows) as ib, f.loop(s.n // s.nr) as j, f.loop(rows // s.mr) as i:
        row = f.plus(f.times(ib, rows), f.times(i, s.mr))
        column = f.times(j, s.nr)
        a = f.at(element, "%a", f.plus(f.times(row, lda), f.times(ik, s.kb * per_unit)))
        c = f.at(s.acc, "%c", f.plus(f.times(row, "%ldc"), column))
        if s.packs_b:
            # Dot: rows of k. Outer: blocks of k, in each the panels, in each the rows of nr columns.
            offset = f.plus(f.times(ik, s.kb * s.n), f.times(j, s.kb * s.nr))
            b = f.at(s.unit, "%b", offset)
        elif s.b_transposed:
            b = f.at(s.source.llvm, "%b", f.times(column, "%ldb"))
        else:
            b = f.at(s.source.llvm, "%b", column)
        f.do(f"call void @{base}.micro(ptr {c}, i64 %ldc, ptr {a}, i64 {lda}, ptr {b}, i64 %ldb)")
    return f.text()


def _multiply_add(f: _Function, s: _Layout, a: str, b: str, acc: str, to: str) -> None:
    """`to` = acc + a · b for vectors of units."""
    t = _vector(s.acc, s.lanes)
    if s.pair is None:
        if s.acc == "i32":
            f.do(f"{to} = add {t} {f.new(f'mul {t} {a}, {b}')}, {acc}")
        elif s.fused:
            f.do(f"{to} = call {t} @llvm.fma.{_mangled(s.acc, s.lanes)}({t} {a}, {t} {b}, {t} {acc})")
        else:
            f.do(f"{to} = fadd {t} {f.new(f'fmul {t} {a}, {b}')}, {acc}")
        return
    part = "bfloat" if s.pair is _Pair.BF16 else "i16"
    parts, units, bits = _vector(part, 2 * s.lanes), _vector("i32", s.lanes), 32 * s.lanes
    a, b = f.new(f"bitcast {units} {a} to {parts}"), f.new(f"bitcast {units} {b} to {parts}")
    if s.pair is _Pair.MADD:
        name = {512: "avx512.pmaddw.d.512", 256: "avx2.pmadd.wd", 128: "sse2.pmadd.wd"}[bits]
        product = f.new(f"call {t} @llvm.x86.{name}({parts} {a}, {parts} {b})")
        f.do(f"{to} = add {t} {product}, {acc}")
    else:
        name = "avx512bf16.dpbf16ps" if s.pair is _Pair.BF16 else "avx512.vpdpwssd"
        f.do(f"{to} = call {t} @llvm.x86.{name}.{bits}({t} {acc}, {parts} {a}, {parts} {b})")


def _zero(s: _Layout) -> str:
    return _splat(s.acc, s.lanes, "0" if s.acc == "i32" else "0.0")


def _micro_outer(s: _Layout, base: str) -> str:
    f = _Function(f"define internal void @{base}.micro({_MATRICES}) {_ATTRIBUTES} {{")
    vectors = s.nr // s.lanes
    t = _vector(s.acc, s.lanes)
    element, per_unit = _memory_a(s)
    rows = [f.at(element, "%a", f.times("%lda", i) if i else "0") for i in range(s.mr)]
    sums = [[f"%s{i}.{j}" for j in range(vectors)] for i in range(s.mr)]
    carried = tuple((name, t, _zero(s)) for row in sums for name in row)
    with f.loop(s.kb, carried) as k:
        bs = _packed_row(f, s, k, vectors) if s.packs_b else _direct_row(f, s, k, vectors)
        at = f.times(k, per_unit)
        for i in range(s.mr):
            a = _broadcast(f, s, f.at(element, rows[i], at))
            for j in range(vectors):
                _multiply_add(f, s, a, bs[j], sums[i][j], f"{sums[i][j]}.n")
    for i in range(s.mr):
        row = f.at(s.acc, "%c", f.times("%ldc", i) if i else "0")
        for j in range(vectors):
            place = f.at(s.acc, row, str(j * s.lanes))
            _add_to(f, s.acc, s.lanes, place, f"{sums[i][j]}.n")
    return f.text()


def _add_to(f: _Function, element: str, lanes: int, place: str, value: str) -> None:
    t, add = _vector(element, lanes), "add" if element == "i32" else "fadd"
    old = f.new(f"load {t}, ptr {place}, align {_SIZE[element]}")
    f.do(f"store {t} {f.new(f'{add} {t} {old}, {value}')}, ptr {place}, align {_SIZE[element]}")


def _broadcast(f: _Function, s: _Layout, place: str) -> str:
    """One unit of A in every lane."""
    align = s.unit_size if s.packs_a or s.pair is None else s.source.size
    one = f.new(f"load {s.unit}, ptr {place}, align {align}")
    if s.lanes == 1:
        return one
    t = _vector(s.unit, s.lanes)
    first = f.new(f"insertelement {t} poison, {s.unit} {one}, i64 0")
    return f.new(f"shufflevector {t} {first}, {t} poison, <{s.lanes} x i32> zeroinitializer")


def _packed_row(f: _Function, s: _Layout, k: str, vectors: int) -> list[str]:
    row = f.at(s.unit, "%b", f.times(k, s.nr))
    t = _vector(s.unit, s.lanes)
    align = min(ALIGN, s.lanes * s.unit_size)
    return [f.new(f"load {t}, ptr {f.at(s.unit, row, str(j * s.lanes))}, align {align}") for j in range(vectors)]


def _direct_row(f: _Function, s: _Layout, k: str, vectors: int) -> list[str]:
    """Units of row k of a row-major B, for every vector of columns."""
    tops = [f.at(s.source.llvm, "%b", f.times(f.plus(f.times(k, s.per_unit), p), "%ldb")) for p in range(s.per_unit)]
    return [_units(f, s, [f.at(s.source.llvm, top, str(j * s.lanes)) for top in tops], s.lanes) for j in range(vectors)]


def _units(f: _Function, s: _Layout, places: list[str], lanes: int) -> str:
    """A vector of units from elements that are neighbours in n: one place, or two rows to be interleaved."""
    t = _vector(s.source.llvm, lanes)
    loaded = [f.new(f"load {t}, ptr {p}, align {s.source.size}") for p in places]
    parts = [_convert(f, s.dtype, s.pair, x, lanes, s.hardware_f16) for x in loaded]
    if s.pair is None:
        return parts[0]
    i16, i32 = _vector("i16", lanes), _vector("i32", lanes)
    if lanes == 1:
        low, high = (f.new(f"zext i16 {p} to i32") for p in parts)
        return f.new(f"or i32 {low}, {f.new(f'shl i32 {high}, 16')}")
    order = [x for i in range(lanes) for x in (i, lanes + i)]
    both = f.new(f"shufflevector {i16} {parts[0]}, {i16} {parts[1]}, {_mask(order)}")
    return f.new(f"bitcast {_vector('i16', 2 * lanes)} {both} to {i32}")


def _units_along(f: _Function, s: _Layout, place: str, lanes: int) -> str:
    """A vector of units from elements that are neighbours in k."""
    count = lanes * s.per_unit
    t = _vector(s.source.llvm, count)
    x = _convert(f, s.dtype, s.pair, f.new(f"load {t}, ptr {place}, align {s.source.size}"), count, s.hardware_f16)
    return x if s.pair is None else f.new(f"bitcast {_vector('i16', count)} {x} to {_vector('i32', lanes)}")


def _micro_dot(s: _Layout, base: str) -> str:
    """mr x nr dot products along k."""
    f = _Function(f"define internal void @{base}.micro({_MATRICES}) {_ATTRIBUTES} {{")
    t = _vector(s.acc, s.lanes)
    units = _vector(s.unit, s.lanes)
    turns = s.ku // s.lanes
    # With few products, several sums of each, or the one would wait for itself.
    split = min(max(8 // (s.mr * s.nr), 1), turns)
    element, per_unit = _memory_a(s)
    b_element, b_per_unit, ldb = (s.unit, 1, str(s.ku)) if s.packs_b else (s.source.llvm, s.per_unit, "%ldb")
    rows = [f.at(element, "%a", f.times("%lda", i) if i else "0") for i in range(s.mr)]
    columns = [f.at(b_element, "%b", f.times(ldb, j) if j else "0") for j in range(s.nr)]
    names = [(i, j, p) for i in range(s.mr) for j in range(s.nr) for p in range(split)]
    carried = tuple((f"%s{i}.{j}.{p}", t, _zero(s)) for i, j, p in names)
    with f.loop(turns // split, carried) as k:
        for p in range(split):
            step = f.plus(f.times(k, split * s.lanes), p * s.lanes)
            at, b_at = f.times(step, per_unit), f.times(step, b_per_unit)
            a = [f.new(f"load {units}, ptr {f.at(element, r, at)}, align {s.source.size}") for r in rows]
            b = [f.new(f"load {units}, ptr {f.at(b_element, c, b_at)}, align {s.source.size}") for c in columns]
            for i in range(s.mr):
                for j in range(s.nr):
                    _multiply_add(f, s, a[i], b[j], f"%s{i}.{j}.{p}", f"%s{i}.{j}.{p}.n")
    add = "add" if s.acc == "i32" else "fadd"
    for i in range(s.mr):
        row = f.at(s.acc, "%c", f.times("%ldc", i) if i else "0")
        for j in range(s.nr):
            total = f"%s{i}.{j}.0.n"
            for p in range(1, split):
                total = f.new(f"{add} {t} {total}, %s{i}.{j}.{p}.n")
            if s.acc == "i32":
                value = f.new(f"call i32 @llvm.vector.reduce.add.{_mangled('i32', s.lanes)}({t} {total})")
            else:
                reduce = f"@llvm.vector.reduce.fadd.{_mangled(s.acc, s.lanes)}"
                value = f.new(f"call reassoc {s.acc} {reduce}({s.acc} -0.0, {t} {total})")
            _add_to(f, s.acc, 1, f.at(s.acc, row, str(j)), value)
    return f.text()


# ---------------------------------------------------------------- packing

_PACK: Final = f"(ptr noalias %dst, ptr noalias readonly %src, i64 %ld) {_ATTRIBUTES} {{"


def _pack_rows(s: _Layout, name: str, rows: int) -> str:
    """[rows, k] of elements -> [rows, ku] of units."""
    f = _Function(f"define internal void @{name}{_PACK}")
    register = 64 if "avx512f" in s.features else 32 if "avx2" in s.features else 16
    lanes = min(register // s.unit_size, s.ku)
    with f.loop(rows) as i, f.loop(s.ku // lanes) as k:
        at = f.plus(f.times(i, "%ld"), f.times(k, lanes * s.per_unit))
        units = _units_along(f, s, f.at(s.source.llvm, "%src", at), lanes)
        to = f.at(s.unit, "%dst", f.plus(f.times(i, s.ku), f.times(k, lanes)))
        f.do(f"store {_vector(s.unit, lanes)} {units}, ptr {to}, align {s.unit_size}")
    return f.text()


def _pack_b(s: _Layout, name: str) -> str:
    if s.dot:
        return _pack_rows(s, name, s.n) if s.b_transposed else _pack_columns(s, name)
    return _pack_transposed(s, name) if s.b_transposed else _pack_panels(s, name)


def _pack_panels(s: _Layout, name: str) -> str:
    """[k, n] of elements -> [block of k][panel][unit of k][nr]. Row by row, since rows of B are far apart."""
    f = _Function(f"define internal void @{name}{_PACK}")
    t = _vector(s.unit, s.lanes)
    with f.loop(s.ku // s.kb) as ik, f.loop(s.kb) as k:
        row = f.times(f.plus(f.times(ik, s.kb), k), s.per_unit)
        tops = [f.at(s.source.llvm, "%src", f.times(f.plus(row, p), "%ld")) for p in range(s.per_unit)]
        line = f.plus(f.times(ik, s.kb * s.n), f.times(k, s.nr))
        with f.loop(s.n // s.nr) as j:
            for v in range(s.nr // s.lanes):
                column = f.plus(f.times(j, s.nr), v * s.lanes)
                units = _units(f, s, [f.at(s.source.llvm, top, column) for top in tops], s.lanes)
                to = f.at(s.unit, "%dst", f.plus(f.plus(line, f.times(j, s.kb * s.nr)), v * s.lanes))
                f.do(f"store {t} {units}, ptr {to}, align {min(ALIGN, s.lanes * s.unit_size)}")
    return f.text()


def _pack_columns(s: _Layout, name: str) -> str:
    """[k, n] of elements, n small -> [n, ku] of units."""
    f = _Function(f"define internal void @{name}{_PACK}")
    with f.loop(s.ku) as k:
        row = f.times(k, s.per_unit)
        tops = [f.at(s.source.llvm, "%src", f.times(f.plus(row, p), "%ld")) for p in range(s.per_unit)]
        for j in range(s.n):
            unit = _units(f, s, [f.at(s.source.llvm, top, str(j)) for top in tops], 1)
            f.do(f"store {s.unit} {unit}, ptr {f.at(s.unit, '%dst', f.plus(k, j * s.ku))}, align {s.unit_size}")
    return f.text()


def _pack_transposed(s: _Layout, name: str) -> str:
    """[n, k] of elements -> [block of k][panel][unit of k][nr], by square blocks transposed in registers."""
    f = _Function(f"define internal void @{name}{_PACK}")
    side = min(s.lanes, s.kb)
    t = _vector(s.unit, side)
    with f.loop(s.ku // s.kb) as ik, f.loop(s.n // s.nr) as j, f.loop(s.nr // side) as v, f.loop(s.kb // side) as k:
        first = f.plus(f.times(j, s.nr), f.times(v, side))
        along = f.times(f.plus(f.times(ik, s.kb), f.times(k, side)), s.per_unit)
        rows = []
        for r in range(side):
            place = f.at(s.source.llvm, "%src", f.plus(f.times(f.plus(first, r), "%ld"), along))
            rows.append(_units_along(f, s, place, side))
        line = f.plus(f.times(ik, s.kb * s.n), f.times(j, s.kb * s.nr))
        line = f.plus(f.plus(line, f.times(k, side * s.nr)), f.times(v, side))
        for r, row in enumerate(_transpose(f, t, rows)):
            to = f.at(s.unit, "%dst", f.plus(line, r * s.nr))
            f.do(f"store {t} {row}, ptr {to}, align {min(ALIGN, side * s.unit_size)}")
    return f.text()


def _transpose(f: _Function, t: str, rows: list[str]) -> list[str]:
    """A square of vectors, transposed: log2(side) times, interleave every row of the upper half with its fellow of the
    lower half. Each turn moves one bit of the row index to the end of the column index."""
    side = len(rows)
    half, turns = side // 2, side.bit_length() - 1
    low = _mask([x for i in range(half) for x in (i, side + i)])
    high = _mask([x for i in range(half, side) for x in (i, side + i)])
    for _ in range(turns):
        rows = [
            f.new(f"shufflevector {t} {rows[r]}, {t} {rows[r + half]}, {mask}")
            for r in range(half)
            for mask in (low, high)
        ]
    return rows
