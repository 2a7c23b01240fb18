"""The types of kernel parameters that are memory, and what they can do. Signatures and formulas; no bodies.

Each class annotates a parameter (`z: T.Exclusive`) and documents the methods the kernel may call on it.
"""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from peertile.dtypes import DType
from peertile.errors import UsageError
from peertile.ir.ops import Padding
from peertile.ir.types import Access
from peertile.language.tiles import Tile
from peertile.language.word import KernelOnly, word
from peertile.memory_model import Order, Rmw, Scope

__all__ = ["Exclusive", "ExclusiveTile", "Peer", "PeerAccess", "Shared", "View"]


class ExclusiveTile(KernelOnly):
    """One tile of an exclusive partition, owned by this program: what `z.tiles()` gives.

    Example::

        for tile in z.tiles():
            tile.store(x.load_like(tile))
    """

    @property
    @word
    def index(self) -> tuple[Tile, ...]:
        """The tile's index on each axis, counted in tiles.

        Example::

            (i,) = z.index
        """

    @property
    @word
    def tile_shape(self) -> tuple[int, ...]:
        """Extents of the tile, known at compile time.

        Example::

            T.zeros(z.tile_shape, T.f32)
        """

    @property
    @word
    def shape(self) -> tuple[Tile, ...]:
        """Extents of the whole view, in elements.

        Example::

            z.shape[0]
        """

    @property
    @word
    def dtype(self) -> DType:
        """Element type.

        Example::

            t.astype(z.dtype)
        """

    @property
    @word
    def ndim(self) -> int:
        """Number of axes.

        Example::

            T.static_assert(z.ndim == 1)
        """

    @word
    def load(self, padding: Padding = Padding.ZERO) -> Tile:
        """This program's tile: result[i, …] = z[index · tile_shape + (i, …)]; `padding` outside the view.

        Example::

            z.store(z.load() * 2.0)
        """

    @word
    def store(self, tile: Tile) -> None:
        """z[index · tile_shape + (i, …)] = tile[i, …], clipped at the edge of the view.

        Takes no index: the tile belongs to this program alone, so two programs cannot write one place.

        Example::

            z.store(t)
        """


class Exclusive(ExclusiveTile):
    """A partition of unique storage: each program owns its tile and nobody else touches it.

    With `.persistent()` on the host, programs take several tiles each, through `tiles()`.

    Example::

        z.store(x.load_like(z) + y.load_like(z))
    """

    @word
    def tiles(self) -> Iterator[ExclusiveTile]:
        """This program's tiles in turn; exactly one when the partition is not persistent.

        Example::

            for tile in z.tiles():
                tile.store(T.zeros(tile.tile_shape, z.dtype))
        """

    @word
    def num_tiles(self) -> tuple[Tile, ...]:
        """Number of tiles of the partition on each axis: ⌈extent / tile extent⌉.

        Example::

            z.num_tiles()[0]
        """


class Shared(KernelOnly):
    """A view that this kernel only reads, and that nobody writes meanwhile.

    Example::

        x.load((T.program_id(0),), (64,))
    """

    @property
    @word
    def shape(self) -> tuple[Tile, ...]:
        """Extents in elements.

        Example::

            T.cdiv(x.shape[0], 64)
        """

    @property
    @word
    def dtype(self) -> DType:
        """Element type.

        Example::

            T.zeros((64,), x.dtype)
        """

    @property
    @word
    def ndim(self) -> int:
        """Number of axes.

        Example::

            T.static_assert(x.ndim == 1)
        """

    @word
    def load(self, index: Any, shape: Any, padding: Padding = Padding.ZERO) -> Tile:
        """A tile: result[i, …] = x[index0 · shape0 + i, …], with `padding` outside the view.

        `index` counts tiles of `shape`, one per axis. A tile that begins outside the view is out of bounds.

        Example::

            x.load((0,), (64,), padding=T.Padding.NEG_INF)
        """

    @word
    def load_like(self, tile: ExclusiveTile, padding: Padding = Padding.ZERO) -> Tile:
        """The tile of this view at the index and of the shape of an exclusive tile.

        Example::

            x.load_like(z)
        """

    @word
    def num_tiles(self, shape: Any) -> tuple[Tile, ...]:
        """Number of tiles of `shape` on each axis: ⌈extent / shape⌉.

        Example::

            for k in T.range(x.num_tiles((64,))[0]):
                x.load((k,), (64,))
        """


class View(Shared):
    """One rank's part of a symmetric tensor: what `p.at(rank)` and `p.local` give.

    Reads are never served from a cache that another rank's write goes around.

    Example::

        v = p.local
        v.store((0,), v.load((0,), (64,)) + 1.0)
    """

    @word
    def store(self, index: Any, tile: Tile) -> None:
        """x[index0 · shape0 + i, …] = tile[i, …], clipped at the edge; shape is that of `tile`.

        Nothing stops another program from writing there: order it with signals.

        Example::

            p.local.store((0,), t)
        """

    @word
    def atomic_add(self, index: Any, tile: Tile, order: Order = Order.RELAXED, scope: Scope | None = None) -> None:
        """x[index0 · shape0 + i, …] += tile[i, …], one atomic addition per element, clipped. System scope on peers.

        Example::

            p.at(0).atomic_add((0,), t)
        """

    @word
    def atomic(
        self, index: Any, rmw: Rmw, tile: Tile, order: Order = Order.RELAXED, scope: Scope | None = None
    ) -> None:
        """As `atomic_add` with another function: min, max, umin, umax, and, or, xor, xchg.

        Example::

            p.at(0).atomic((0,), T.Rmw.MAX, t)
        """


@dataclass(frozen=True, slots=True)
class PeerAccess:
    """`T.Peer[T.read]`: a symmetric tensor with restricted access."""

    access: Access

    def __repr__(self) -> str:
        return f"T.Peer[T.{self.access.value}]"


class Peer(KernelOnly):
    """A symmetric tensor: the same shape in every rank's heap, each part readable and writable by all.

    `T.Peer[T.read]` only reads, and leases know it.

    Example::

        for r in T.ranks():
            p.at(r).load((0,), (64,))
    """

    def __class_getitem__(cls, access: Access) -> PeerAccess:
        if not isinstance(access, Access):
            raise UsageError(f"T.Peer[...]: expected T.read, got {access!r}; T.Peer alone reads and writes")
        return PeerAccess(access)

    @property
    @word
    def local(self) -> View:
        """This rank's own part.

        Example::

            p.local.load((0,), (64,))
        """

    @property
    @word
    def rank(self) -> Tile:
        """This rank in the tensor's group.

        Example::

            p.at((p.rank + 1) % p.num_ranks)
        """

    @property
    @word
    def num_ranks(self) -> Tile:
        """Number of ranks of the tensor's group.

        Example::

            p.num_ranks
        """

    @property
    @word
    def shape(self) -> tuple[Tile, ...]:
        """Extents of one rank's part, in elements.

        Example::

            p.shape[0]
        """

    @property
    @word
    def dtype(self) -> DType:
        """Element type.

        Example::

            t.astype(p.dtype)
        """

    @property
    @word
    def ndim(self) -> int:
        """Number of axes.

        Example::

            T.static_assert(p.ndim == 1)
        """

    @word
    def at(self, rank: Any) -> View:
        """The part of `rank`, any run-time value; out of range is a fault, never a wild access.

        Example::

            p.at(0).load((0,), (64,))
        """
