"""`T.Multicast`: one address that reaches every rank's part of a symmetric tensor. Signatures and formulas; no bodies.

An operation acts on the corresponding elements of every rank, each element by itself: a tile, or all ranks together,
are never one transaction. Where the fabric has no multicast the same operations are loops over the ranks.
"""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

from typing import Any

from peertile.dtypes import DType
from peertile.language.tiles import Tile
from peertile.language.word import KernelOnly, word
from peertile.memory_model import Order, Rmw, Scope

__all__ = ["Multicast", "MulticastTiles"]


class MulticastTiles(KernelOnly):
    """A multicast tensor cut into tiles of one shape: what `x.partition(shape)` gives.

    Every tile lies inside as a whole: extents are multiples of the tile's, which the launch checks. Element types:
    i32, u32 (as i32 bits), i64, u64, f16, bf16, f32, f64.

    Example::

        share = v.partition((64,))
        share.multimem_store((0,), share.multimem_load_reduce((0,), T.add))
    """

    @word
    def multimem_load_reduce(
        self, index: Any, reduction: Rmw, *, order: Order = Order.WEAK, scope: Scope | None = None
    ) -> Tile:
        """result[i] = reduction over all ranks r of x_r[index · shape + i], in an unspecified order of ranks.

        Add: every element type; of f16 and bf16 the sum is kept in f32 and rounded once. MIN, MAX: i32, i64 (signed),
        f16, bf16. UMIN, UMAX, AND, OR, XOR: i32, i64, u64 (unsigned). Weak, relaxed or acquire. PTX ISA,
        `multimem.ld_reduce`.

        Example::

            v.partition((64,)).multimem_load_reduce((0,), T.add, order=T.relaxed)
        """

    @word
    def multimem_reduce(
        self, index: Any, reduction: Rmw, tile: Any, *, order: Order = Order.RELAXED, scope: Scope | None = None
    ) -> None:
        """x_r[index · shape + i] = reduction(x_r[…], tile[i]) for every rank r: one atomic update each.

        Add: every element type. MIN, MAX: i32, i64 (signed). UMIN, UMAX, AND, OR, XOR: i32, i64, u64. Relaxed or
        release. PTX ISA, `multimem.red`.

        Example::

            v.partition((64,)).multimem_reduce((0,), T.add, T.ones((64,), v.dtype))
        """

    @word
    def multimem_store(self, index: Any, tile: Any, *, order: Order = Order.WEAK, scope: Scope | None = None) -> None:
        """x_r[index · shape + i] = tile[i] for every rank r. Weak, relaxed or release. PTX ISA, `multimem.st`.

        Example::

            v.partition((64,)).multimem_store((0,), T.ones((64,), v.dtype))
        """

    @word
    def multimem_bulk_store(self, index: Any, tile: Any, reduction: Any = None) -> None:
        """As `multimem_store`, or with a reduction as `multimem_reduce` (relaxed), by one asynchronous bulk copy, which
        is waited for: what this program does next comes after the writes.

        The tile is one contiguous range of x: a multiple of 16 bytes, 16-byte aligned, below 2^32 bytes. Reductions:
        add of f32, f16, bf16; MIN and MAX of f16, bf16. PTX ISA, `multimem.cp.async.bulk` and
        `multimem.cp.reduce.async.bulk` (PTX 9.1).

        Example::

            v.partition((64,)).multimem_bulk_store((0,), T.ones((64,), v.dtype))
        """


class Multicast(KernelOnly):
    """A symmetric tensor with one address that reaches every rank's part. Ordinary loads, stores and atomics do not
    take it: pass `x.local` as well, as T.Shared, T.Exclusive or T.Peer, to reach one's own part.

    The multicast mapping and the ordinary ones are two ways to the same memory: what one program did through the one
    and does through the other needs `T.unsafe.fence_alias` between them. In a kernel with a multicast parameter
    `notify` and `wait` of signals, counters and barriers contain it.

    Example::

        share = v.partition((64,))
        for i in T.range(v.rank, v.num_tiles((64,))[0], v.num_ranks):
            share.multimem_store((i,), share.multimem_load_reduce((i,), T.add))
    """

    @property
    @word
    def rank(self) -> Tile:
        """This rank in the tensor's group.

        Example::

            v.rank
        """

    @property
    @word
    def num_ranks(self) -> Tile:
        """Number of ranks of the tensor's group.

        Example::

            v.num_ranks
        """

    @property
    @word
    def shape(self) -> tuple[Tile, ...]:
        """Extents of one rank's part, in elements.

        Example::

            v.shape[0]
        """

    @property
    @word
    def dtype(self) -> DType:
        """Element type.

        Example::

            T.zeros((64,), v.dtype)
        """

    @property
    @word
    def ndim(self) -> int:
        """Number of axes.

        Example::

            T.static_assert(v.ndim == 1)
        """

    @word
    def num_tiles(self, shape: Any) -> tuple[Tile, ...]:
        """Number of tiles of `shape` along each axis.

        Example::

            v.num_tiles((64,))[0]
        """

    @word
    def partition(self, shape: Any, in_bounds: Any = False) -> MulticastTiles:
        """x in tiles of `shape`, of which every one lies inside as a whole.

        A tile index that is not known to be inside is checked in the kernel. `in_bounds` (a bool, or one per axis)
        is the caller's promise that it is, for every program: nothing is checked there. f16 and bf16 need exactly
        one axis of stride 1, along which the tile has an even extent.

        Example::

            v.partition((64,), in_bounds=True)
        """

    @word
    def multimem_signal(self, value: Any, index: Any = None) -> None:
        """x_r[index] = value for every rank r: release, system scope. Words of i32, u32, i64 or u64; `index` counts
        elements, the first by default.

        Example::

            vw.multimem_signal(1)
        """

    @word
    def multimem_signal_add(self, value: Any, index: Any = None) -> None:
        """x_r[index] += value for every rank r, atomically each: release, system scope. As `multimem_signal`.

        Example::

            vw.multimem_signal_add(1, index=2)
        """
