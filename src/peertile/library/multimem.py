"""Collectives over multicast tensors: one address reaches every rank's part. In the public language only.

Where the fabric has multicast (`heap.window`), a switch does the sums and the copies; elsewhere the same kernels are
loops over the ranks' parts, with the same results. All ranks make the same calls in the same order. Counts are whole
tiles of 4 bytes and more: nothing is clipped. The kernels wait for peers, the host code never does.
"""

from __future__ import annotations

from math import prod
from typing import Any, Final

import peertile.language as T
from peertile.comm.symmetric import MulticastTensor, Signal, SymmetricHeap
from peertile.dtypes import DType
from peertile.errors import ArgumentError, UsageError
from peertile.ir.ops import LOAD_REDUCTIONS, MULTICAST_DTYPES
from peertile.kernel import LaunchOp, kernel
from peertile.library.reductions import ReduceOp
from peertile.memory_model import Rmw
from peertile.runtime.tensor import Tensor

__all__ = ["MulticastCollectives", "can_reduce"]

TILE_BYTES: Final = 1 << 12
"""Bytes of a tile: 16 for every thread of a program."""
PROGRAMS: Final = 16
"""Programs of a launch at most: few of them saturate a link, and all have to be resident."""


@kernel
def _all_reduce(x: T.Multicast, ready: T.Signal, R: T.Const, B: T.Const[int]) -> None:
    """Every rank reduces its turn of the tiles and shows the result to all."""
    ready.notify()
    ready.wait()
    share = x.partition((B,))
    first, step = T.program_id(0) * x.num_ranks + x.rank, T.num_programs(0) * x.num_ranks
    for i in T.range(first, x.num_tiles((B,))[0], step):
        share.multimem_store((i,), share.multimem_load_reduce((i,), R))
    ready.notify()
    ready.wait()


@kernel
def _reduce_scatter(out: T.Exclusive, x: T.Multicast, ready: T.Signal, R: T.Const, B: T.Const[int]) -> None:
    """Every rank reduces its own share."""
    ready.notify()
    ready.wait()
    share = x.partition((B,))
    first = x.rank * out.num_tiles()[0]
    for z in out.tiles():
        z.store(share.multimem_load_reduce((first + z.index[0],), R))
    # Nobody writes its part anew before all have read it.
    ready.notify()
    ready.wait()


@kernel
def _all_gather(x: T.Multicast, mine: T.Shared, ready: T.Signal, B: T.Const[int]) -> None:
    """Every rank writes its share into all parts."""
    ready.notify()
    ready.wait()
    share = x.partition((B,))
    tiles = mine.num_tiles((B,))[0]
    for i in T.range(T.program_id(0), tiles, T.num_programs(0)):
        share.multimem_store((x.rank * tiles + i,), mine.load((i,), (B,)))
    ready.notify()
    ready.wait()


@kernel
def _signal(words: T.Multicast, value: T.i64, index: T.i64, ADD: T.Const[bool]) -> None:
    if ADD:
        words.multimem_signal_add(value.astype(words.dtype), index=index)
    else:
        words.multimem_signal(value.astype(words.dtype), index=index)


_REDUCTIONS: Final = {ReduceOp.SUM: Rmw.ADD, ReduceOp.MIN: Rmw.MIN, ReduceOp.MAX: Rmw.MAX}


def can_reduce(op: ReduceOp, dtype: DType, count: int) -> bool:
    """Whether multicast has the reduction for this element type, and the elements are whole 4-byte units."""
    rmw = _REDUCTIONS.get(op)
    if rmw is None or dtype.name not in MULTICAST_DTYPES or count * dtype.itemsize % 4:
        return False
    if rmw is Rmw.ADD:
        return True
    return dtype.name in LOAD_REDUCTIONS[rmw] and dtype.name != "u32"  # which would be compared as signed


class MulticastCollectives:
    """Collectives over the multicast tensors of `heap`; made by all ranks in the same order.

    SUM of every element type; MIN and MAX of i32, i64, f16, bf16 (`ArgumentError` otherwise: what the fabric has no
    instruction for is not done in another way here). The order in which ranks are added up is unspecified, and the
    same bits reach every rank.

    >>> import peertile as pt
    >>> from peertile.library.multimem import MulticastCollectives
    >>> with pt.SymmetricHeap(pt.init(), 1 << 20) as heap:
    ...     x = heap.multicast((1024,), pt.f32)
    ...     _ = x.local.fill(2.0).sync()
    ...     _ = MulticastCollectives(heap).all_reduce(x).sync()
    ...     float(x.numpy().sum())
    2048.0
    """

    def __init__(self, heap: SymmetricHeap, *, programs: int = PROGRAMS) -> None:
        if not isinstance(heap, SymmetricHeap):
            raise ArgumentError(f"MulticastCollectives(heap): expected a SymmetricHeap, got {heap!r}")
        if not isinstance(programs, int) or programs < 1:
            raise ArgumentError(f"MulticastCollectives: programs: expected an integer > 0, got {programs!r}")
        self.heap = heap
        self.programs = programs
        self.ready: Signal = heap.signal(slots=programs)
        """All that it has in the heap."""

    # ---------------------------------------------------------------- checks

    def _multicast(self, name: str, x: Any) -> MulticastTensor:
        if not isinstance(x, MulticastTensor):
            raise ArgumentError(
                f"{name}: x: expected a MulticastTensor, as heap.multicast gives, got {type(x).__name__}"
            )
        if x.heap is not self.heap:
            raise ArgumentError(f"{name}: x: expected a tensor of the heap of these collectives, got another heap's")
        if len(x.shape) != 1:
            raise ArgumentError(
                f"{name}: x: expected one axis, got shape {x.shape}; make it with heap.multicast((n,), …)"
            )
        return x

    def _reduction(self, name: str, op: ReduceOp, x: MulticastTensor) -> Rmw:
        rmw = _REDUCTIONS.get(op)
        if rmw is None or not can_reduce(op, x.dtype, 4):
            raise ArgumentError(
                f"{name}: op: expected SUM, or MIN or MAX of i32, i64, f16 or bf16, got {op.name} of {x.dtype}; "
                "Collectives.all_reduce does the others"
            )
        return rmw

    def _tile(self, name: str, role: str, count: int, itemsize: int) -> int:
        """Elements of a tile: the largest power of two that divides `count` and is no more than TILE_BYTES."""
        tile = min(count & -count, TILE_BYTES // itemsize) if count else TILE_BYTES // itemsize
        if tile * itemsize % 4:
            raise ArgumentError(
                f"{name}: {role}: expected a number of elements of whole 4-byte units, got {count} of {itemsize} "
                "bytes; pad it"
            )
        return tile

    def _grid(self, tiles: int) -> int:
        return min(self.programs, max(tiles, 1))

    # ---------------------------------------------------------------- collectives

    def all_reduce(self, x: MulticastTensor, op: ReduceOp = ReduceOp.SUM) -> LaunchOp:
        """x_r = x_0 op x_1 op … on every rank r, in place."""
        x = self._multicast("all_reduce", x)
        rmw = self._reduction("all_reduce", op, x)
        count = prod(x.shape)
        tile = self._tile("all_reduce", "x", count, x.dtype.itemsize)
        grid = self._grid(-(-count // (tile * self.heap.group.size)))
        return _all_reduce.grid(grid)(x, self.ready, R=rmw, B=tile)

    def reduce_scatter(self, out: Tensor, x: MulticastTensor, op: ReduceOp = ReduceOp.SUM) -> LaunchOp:
        """out = this rank's share of x_0 op x_1 op …: elements [rank · n, (rank + 1) · n) where out has n."""
        x = self._multicast("reduce_scatter", x)
        rmw = self._reduction("reduce_scatter", op, x)
        self._share("reduce_scatter", "out", out, x)
        tile = self._tile("reduce_scatter", "out", out.size, x.dtype.itemsize)
        part = out.reshape(out.size).partition(tile).persistent(self._grid(out.size // tile))
        return _reduce_scatter(part, x, self.ready, R=rmw, B=tile)

    def all_gather(self, x: MulticastTensor, mine: Tensor) -> LaunchOp:
        """x_r = the `mine` of all ranks in their order, on every rank r."""
        x = self._multicast("all_gather", x)
        self._share("all_gather", "mine", mine, x)
        tile = self._tile("all_gather", "mine", mine.size, x.dtype.itemsize)
        grid = self._grid(mine.size // tile)
        return _all_gather.grid(grid)(x, mine.reshape(mine.size), self.ready, B=tile)

    def signal(self, words: MulticastTensor, value: int, index: int = 0, *, add: bool = False) -> LaunchOp:
        """words_r[index] = value, or += value with `add`, on every rank r: release, system scope. Waits for nobody."""
        words = self._multicast("signal", words)
        if not words.dtype.is_int:
            raise ArgumentError(f"signal: words: expected i32, u32, i64 or u64, got {words.dtype}")
        if not 0 <= index < words.shape[0]:
            raise ArgumentError(f"signal: index: expected 0 to {words.shape[0] - 1}, got {index}")
        return _signal.grid(1)(words, value=value, index=index, ADD=add)

    def _share(self, name: str, role: str, part: Any, x: MulticastTensor) -> None:
        n = self.heap.group.size
        if not isinstance(part, Tensor):
            raise ArgumentError(f"{name}: {role}: expected a Tensor, got {type(part).__name__}")
        if part.dtype != x.dtype or part.size * n != prod(x.shape):
            raise ArgumentError(
                f"{name}: {role}: expected {prod(x.shape) // n} elements of {x.dtype}, a share of x for each of {n} "
                f"ranks, got {part.size} of {part.dtype}"
            )
        if not part.is_contiguous:
            raise UsageError(f"{name}: {role}: expected a contiguous tensor, got strides {part.strides}; copy it first")
