"""The type of a kernel parameter that all programs only add to. Signatures and formulas; no bodies."""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

from typing import Any

from peertile.dtypes import DType
from peertile.language.tiles import Tile
from peertile.language.word import KernelOnly, word
from peertile.memory_model import Rmw

__all__ = ["Accumulate"]


class Accumulate(KernelOnly):
    """A tensor that every program may combine tiles into, and that none reads: histograms, split sums.

    All it offers is atomic, so programs cannot race on it, in whatever order they run; what they left is read by
    what comes after the launch. Its storage belongs to this parameter alone, as that of an exclusive one does.
    Integers give the same bits in any order; additions of floats round in the order they happen, so the last bits
    of a sum may differ from run to run.

    Example::

        bins = T.iota(64)[None, :] == T.iota(16)[:, None]
        h.atomic_add((0,), T.sum(T.where(bins, 1, 0), axis=0).astype(h.dtype))
    """

    @property
    @word
    def shape(self) -> tuple[Tile, ...]:
        """Extents in elements.

        Example::

            h.shape[0]
        """

    @property
    @word
    def dtype(self) -> DType:
        """Element type.

        Example::

            T.zeros((64,), h.dtype)
        """

    @property
    @word
    def ndim(self) -> int:
        """Number of axes.

        Example::

            T.static_assert(h.ndim == 1)
        """

    @word
    def num_tiles(self, shape: Any) -> tuple[Tile, ...]:
        """Number of tiles of `shape` on each axis: ⌈extent / shape⌉.

        Example::

            h.num_tiles((64,))[0]
        """

    @word
    def atomic_add(self, index: Any, tile: Tile) -> None:
        """h[index0 · shape0 + i, …] += tile[i, …], one atomic addition per element, clipped at the edge.

        Example::

            h.atomic_add((0,), T.ones((64,), h.dtype))
        """

    @word
    def atomic(self, index: Any, rmw: Rmw, tile: Tile) -> None:
        """As `atomic_add` with another function: min, max, umin, umax, and, or, xor.

        Example::

            h.atomic((0,), T.Rmw.MAX, T.ones((64,), h.dtype))
        """
