"""GPU architectures that can be compiled for, compile options, and what each architecture lacks. No compiling here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from peertile.dtypes import DType
from peertile.errors import ArgumentError, CompileError
from peertile.ir import ops
from peertile.ir.core import Block, Kernel, Op, walk
from peertile.ir.types import SignalType, TileType, Type, ViewType
from peertile.memory_model import Rmw
from peertile.source import Loc

__all__ = [
    "ARCHES", "CudaOptions", "capability", "check_dtype", "check_rmw", "emulated_rmw", "has_one_trip",
    "most_registers", "reread", "tuned",
]  # fmt: skip

ARCHES: Final = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
"""Architectures that are compiled for. From sm_90 on the code is for exactly that architecture ("a" features)."""


@dataclass(frozen=True, slots=True)
class CudaOptions:
    """How a kernel is compiled; None lets the compiler choose.

    `num_stages` is the most buffers of a pipelined loop; without it, as many as the loop asks for and the shared
    memory has room for.
    `descriptors=False` keeps bulk copies (TMA) out: for views whose extents do not fit 32 bits, see
    `LaunchLayout.fits`. `flatten` (None: where it is faster, on sm_90) merges a persistent loop with the loop inside
    it, so that the next tile's loads overlap this one's end. `f32_mma` is how f32 products are made: "ieee" exactly,
    "tf32x3" nearly so on tensor cores, "tf32" with 10 bits. `line_info` keeps source lines in the cubin for profilers.
    `overlap` lets a kernel start before the one in front of it in its stream has ended, and wait for that before it
    touches memory, which hides what a launch costs (sm_90 and newer). `specialize` divides a loop that multiplies among
    groups of warps, of which one loads while two compute: for the four that are asked for, twelve are launched. The
    loop has to be the last one, and free of checks; Triton does it on sm_90. None: what was found right and faster,
    see `divided.py`. True is for measurements: of Triton 3.6 one product of three came out wrong.
    """

    num_warps: int | None = None
    num_stages: int | None = None
    max_registers: int | None = None
    descriptors: bool = True
    flatten: bool | None = None
    f32_mma: str = "ieee"
    line_info: bool = True
    overlap: bool = True
    specialize: bool | None = None

    def __post_init__(self) -> None:
        if self.num_warps is not None and self.num_warps not in (1, 2, 4, 8, 16, 32):
            raise ArgumentError(f"num_warps: expected a power of two up to 32, got {self.num_warps}")
        if self.num_stages is not None and not 1 <= self.num_stages <= 8:
            raise ArgumentError(f"num_stages: expected 1 to 8, got {self.num_stages}")
        if self.f32_mma not in ("ieee", "tf32x3", "tf32"):
            raise ArgumentError(f"f32_mma: expected ieee, tf32x3 or tf32, got {self.f32_mma!r}")


def capability(arch: str) -> int:
    """90 for "sm_90"; ArgumentError for an architecture that is not supported."""
    match = re.fullmatch(r"sm_(\d+)a?", arch)
    if match is None or f"sm_{match[1]}" not in ARCHES:
        raise ArgumentError(f"arch: expected one of {', '.join(ARCHES)}, got {arch!r}")
    return int(match[1])


def tuned(kernel: Kernel, options: CudaOptions) -> tuple[int, int]:
    """(warps, stages) of a kernel: as asked, or by the largest tile that it computes with."""
    warps, stages = options.num_warps, options.num_stages
    tiles = [op for op in walk(kernel.body) if isinstance(op, ops.Mma)]
    if tiles:
        most = max(_numel(op.result.type) for op in tiles)
        # The results of products in one trip of a loop are in registers together.
        held: dict[Block | None, int] = {}
        for op in tiles:
            held[op.parent] = held.get(op.parent, 0) + _numel(op.result.type)
        wide = max(held.values()) > 128 * 128 or any(_inner(op) >= 256 for op in tiles)
        warps = warps or (8 if most >= 128 * 128 and wide else 4)
        loops = [op.attrs["stages"] for op in walk(kernel.body) if isinstance(op, ops.For)]
        # A divided loop has as many barriers as the kernel has stages, and as many buffers as it asks for itself.
        return warps, stages or max([2 if options.specialize else 3, *(s for s in loops if s > 1)])
    if warps is None:
        row = _ordered(kernel)
        if row:
            # Such an element is one access of one thread, and somebody waits for it: as many threads as elements, but
            # for long rows, of which so many programs would not be resident together with those of the next launch.
            at_most = FILLED_WARPS if _fills(kernel) else min(16, max(FILLED_WARPS, row // 128))
            return max(1, min(row // 32, at_most)), stages or 3
    if warps is None:
        nbytes = _largest(kernel)
        # Two 16-byte vectors for each thread, eight warps at most; the longest rows get sixteen.
        folds = _folds_rows(kernel)
        warps = 16 if nbytes >= (LONG_FOLDED_ROW if folds else LONG_ROW) else 8
        if folds and reread(kernel):
            if _is_widened_again(kernel):
                warps = max(1, min(nbytes // 2048, 16))  # two vectors of what is loaded for each thread
            else:
                warps = max(1, min(nbytes // 1024, 16 if nbytes < LONG_REREAD_ROW else 32))
        elif folds and _loaded(kernel) == nbytes:
            warps = next((w for least, w in FOLDED_WARPS if nbytes >= least), warps)
        while warps > 1 and nbytes < warps * 1024:
            warps //= 2
        if nbytes >= warps * 2048 and warps >= 8 and _takes_turns(kernel):
            warps //= 2  # see WAITING_REGISTERS
        # A warp folds short rows by itself, where several of them are a tile; more than one would have to meet.
        folded = [op.operands[0].type for op in walk(kernel.body) if isinstance(op, ops.Reduce)]
        rows = [t.shape[0] for t in folded if isinstance(t, TileType) and t.rank == 2 and t.shape[1] <= 1024]
        if rows and max(rows) > 1:
            warps = min(warps, max(rows))
        elif rows and folds and _loaded(kernel) == nbytes == SHORT_FOLDED_ROW:
            warps = min(warps, 2)
    return warps, stages or 3


FILLED_WARPS: Final = 4
"""Most warps where places are polled that fill: many threads that look at one word each keep the words from coming."""
LONG_ROW: Final = 1 << 15
"""Bytes of a tile that is worth more warps than eight."""
LONG_FOLDED_ROW: Final = 1 << 17
"""So of one that is folded: its warps meet. RMSNorm of 16384 rows of half as much takes an H200 261.7 us with eight
warps and 268.1 with sixteen."""
FOLDED_WARPS: Final = ((1 << 17, 16), (1 << 16, 32), (1 << 15, 16), (1 << 14, 16))
"""Bytes of a row that is folded in the type that it is loaded in, f32 mostly, and its warps: 129.3 us for RMSNorm of
16384 rows of 4096 with sixteen and 131.7 with eight, 515.6 and 520.8 for rows of 16384 with 32 and eight. What is
widened in between, bf16, is faster with eight: 66.2 us of 83.6 for rows of 4096."""
SHORT_FOLDED_ROW: Final = 1 << 12
"""Bytes of a lone row of that kind for two warps, of which more programs are under way: 32.7 us for RMSNorm of 16384
rows of 1024 and 32.5 for softmax, and 32.9 and 32.8 with four; of 4096 rows 9.34 and 9.33, and 9.64 and 9.42."""
LONG_REREAD_ROW: Final = 1 << 16
"""Bytes of a row that is loaded twice and worth more warps than sixteen: an H200 takes 250.8 us for RMSNorm of 16384
rows of 8192 f32 with sixteen and 264.6 with 32, 499.2 and 498.7 for rows of 16384."""
REREAD_REGISTERS: Final = {(True, 1 << 11): 32, (True, 1 << 12): 40, (False, 1 << 11): 48}
"""Most registers of a thread, by whether such a row is widened in between and how many bytes of it a warp has. What is
fastest has some 64 KiB of rows on their way to a multiprocessor: 16384 rows of 8192 bf16 take an H200 126.2 us with 32
and 133.8 with 40, of 8192 f32 250.8 with 48 and 252.2 with the 40 that the assembler would take, of 16384 bf16 255.1
with 40, and 275.7 with 64 for half as many threads."""
REGISTERS: Final = 1 << 16
"""Of a multiprocessor."""
WAITING_REGISTERS: Final = 64
"""Of a thread, where programs of eight warps and more wait for a signal: so many programs are resident, four of eight
warps on a multiprocessor, as grids that wait for each other program by program count on. A program that takes turns
with others at tiles of 16 KiB and more has half of the warps and twice the registers: as many are resident, and what it
knows beside its tile (addresses, bounds, turns), which every thread holds, stays in registers. With 64 some forty of
those were stored and fetched again in each turn."""


def _ordered(kernel: Kernel) -> int:
    """Elements of the largest tile whose elements are accessed one by one, in an order; 0: there is none."""
    accesses = [op for op in walk(kernel.body) if isinstance(op, ops.TileLoad | ops.TileStore)]
    tiles = [(op.result if isinstance(op, ops.TileLoad) else op.operands[1]).type for op in accesses]
    return max(map(_numel, tiles), default=0)


def _fills(kernel: Kernel) -> bool:
    """Whether the kernel waits for tiles of words to differ from something."""
    compares = (op for op in walk(kernel.body) if isinstance(op, ops.CompareOp) and op.attrs["fn"] is ops.Compare.NE)
    return any(isinstance(op.operands[0].op, ops.TileLoad) for op in compares)


def most_registers(kernel: Kernel, warps: int) -> int | None:
    """A bound on the registers of a thread, None for the assembler's own choice."""
    if not _signals(kernel):
        # Left alone, the assembler spills what it has room for: an all-reduce of 256 KiB between two H200 took 3.44 us
        # for 3.37 with 48 bytes spilt of a thread, and 4.50 for 3.24 with 58.
        few = warps == 4 and kernel.waits and 0 < _ordered(kernel) <= 512 and not _multiplies(kernel)
        # And on two of eight warps, where rows are looked up: the assembler would take 232, which leaves one.
        if warps in (4, 8) and kernel.waits and _looks_rows_up(kernel) and not _multiplies(kernel):
            return 2 * WAITING_REGISTERS
        # Grids count on four programs of four warps here, too; the assembler would take 154, which leaves three.
        if warps == 4 and kernel.waits and not few and _fills(kernel) and not _multiplies(kernel):
            return 2 * WAITING_REGISTERS
        if 8 <= warps <= 16 and _is_again(kernel):
            bound = REREAD_REGISTERS.get((_is_widened_again(kernel), _largest(kernel) // warps))
            return bound or _of_two_programs(kernel, warps)
        return WAITING_REGISTERS if few else _of_two_programs(kernel, warps)
    long_turns = _largest(kernel) >= warps * 4096 and _takes_turns(kernel)
    if warps in (4, 8) and (long_turns or _looks_rows_up(kernel)):
        return 2 * WAITING_REGISTERS
    return WAITING_REGISTERS if warps >= 8 else None


def _looks_rows_up(kernel: Kernel) -> bool:
    """Whether the kernel goes to rows by number: what it knows of those under way (ranks, addresses, bounds) takes more
    than half of WAITING_REGISTERS. 4096 rows of 7168 to eight experts each, by two H200: 708 us, and 738 with those."""
    return any(isinstance(op, ops.Gather | ops.Scatter) for op in walk(kernel.body))


def _is_again(kernel: Kernel) -> bool:
    """Whether rows of one tile are folded that are loaded twice: with a second tile, so few registers have no room."""
    return len(reread(kernel)) == 1 and _folds_rows(kernel)


def _is_widened_again(kernel: Kernel) -> bool:
    """Whether all that such a kernel loads is narrower than what it is computed in: not so with a gain as wide as the
    sums."""
    return _is_again(kernel) and _loaded(kernel) < _largest(kernel)


def _of_two_programs(kernel: Kernel, warps: int) -> int | None:
    """A bound that leaves room for two programs on a multiprocessor, of which one loads a row while the other folds or
    stores; None where that holds anyway, or a program has no room for its row then."""
    most = REGISTERS // (2 * 32 * warps)
    held = _largest(kernel) // (4 * 32 * warps)
    is_tight = most // 4 < held <= most // 2
    return most if warps >= 8 and is_tight and _folds_rows(kernel) and not _multiplies(kernel) else None


def _folds_rows(kernel: Kernel) -> bool:
    """Whether the largest tiles, or the like, are folded along their rows."""
    least = _largest(kernel) // 2
    folded = [op for op in walk(kernel.body) if isinstance(op, ops.Reduce) and _bytes(op.operands[0].type) >= least]
    return any(isinstance(t := op.operands[0].type, TileType) and op.attrs["axis"] == t.rank - 1 for op in folded)


def _multiplies(kernel: Kernel) -> bool:
    return any(isinstance(op, ops.Mma) for op in walk(kernel.body))


def _signals(kernel: Kernel) -> bool:
    """Whether the kernel waits for signals, and multiplies no matrices."""
    signals = any(isinstance(p.type, SignalType) for p in kernel.params)
    return kernel.waits and signals and not _multiplies(kernel)


def _takes_turns(kernel: Kernel) -> bool:
    """Whether such a kernel waits for others between the tiles of a loop, not only before or behind it. What is a few
    words, as in a mailbox where ranks meet, is no tile here."""
    if not _signals(kernel):
        return False
    for op in walk(kernel.body):
        if isinstance(op, ops.For | ops.Loop):
            inside = [inner for block in op.blocks for inner in walk(block)]
            tiles = any(isinstance(inner, ops.Store) and _bytes(inner.operands[1].type) >= 4096 for inner in inside)
            if tiles and any(isinstance(inner, ops.Wait | ops.WaitAny) for inner in inside):
                return True
    return False


def _bytes(t: Type) -> int:
    return t.numel * t.dtype.itemsize if isinstance(t, TileType) else 0


def _largest(kernel: Kernel) -> int:
    """Bytes of the largest tile that the kernel computes with."""
    return max((_bytes(v.type) for op in walk(kernel.body) for v in op.results), default=0)


def reread(kernel: Kernel) -> list[list[Op]]:
    """Loads of one tile of what is only read, so that it is not held in between: from memory, then from a cache."""
    tiles: dict[tuple[object, ...], list[Op]] = {}
    for op in walk(kernel.body):
        if isinstance(op, ops.Load) and isinstance(t := op.operands[0].type, ViewType) and not t.writable:
            tiles.setdefault((op.parent, op.result.type, *op.operands), []).append(op)
    return [] if kernel.waits else [loads for loads in tiles.values() if len(loads) > 1]


def _loaded(kernel: Kernel) -> int:
    """Bytes of the largest tile that is loaded."""
    return max((_bytes(op.result.type) for op in walk(kernel.body) if isinstance(op, ops.Load)), default=0)


def _numel(t: Type) -> int:
    return t.numel if isinstance(t, TileType) else 0


def _inner(op: Op) -> int:
    t = op.result.type
    assert isinstance(t, TileType)
    return t.shape[-1]


def has_one_trip(loop: ops.For) -> bool:
    """Whether a loop is one over [x, x + 1)."""
    lo, hi, step = loop.operands[:3]
    by = hi.op
    return (
        isinstance(by, ops.BinaryOp)
        and by.attrs["fn"] is ops.Binary.ADD
        and by.operands[0] is lo
        and all(isinstance(v.op, ops.Const) and v.op.attrs["value"] == 1 for v in (by.operands[1], step))
    )


# ---------------------------------------------------------------- what an architecture lacks


def check_dtype(dtype: DType, arch: str, loc: Loc | None, role: str) -> None:
    """CompileError if values of `dtype` cannot be handled on `arch`."""
    if dtype.name == "f8e4m3" and capability(arch) < 89:
        raise CompileError(f"{role}: f8e4m3 needs sm_89 or newer, and the target is {arch}; use f8e5m2 or f16", loc)


def emulated_rmw(kind: Rmw, dtype: DType) -> bool:
    """Whether an atomic is made of compare-and-swap: narrow integers, and minimum or maximum of floats."""
    if dtype.is_float:
        return kind in (Rmw.MIN, Rmw.MAX) or (kind is Rmw.XCHG and dtype.bits < 32)
    return dtype.bits < 32


def check_rmw(kind: Rmw, dtype: DType, arch: str, loc: Loc | None) -> None:
    """CompileError for an atomic that no architecture, or not this one, can do."""
    if dtype.is_float and dtype.bits == 8 and kind is not Rmw.XCHG:
        raise CompileError(f"atomic {kind.value}: {dtype} has no atomic arithmetic on a GPU; use f16 or f32", loc)
    if dtype.name == "bf16" and kind is Rmw.ADDF and capability(arch) < 90:
        raise CompileError(f"atomic addf: bf16 needs sm_90 or newer, and the target is {arch}; use f32", loc)
    if dtype.is_bool and kind not in (Rmw.AND, Rmw.OR, Rmw.XOR, Rmw.XCHG):
        raise CompileError(f"atomic {kind.value}: bool takes and, or, xor and xchg", loc)
