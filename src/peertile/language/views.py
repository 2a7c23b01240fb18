"""The types of kernel parameters that are memory, and what they can do. Signatures and formulas; no bodies.

Each class annotates a parameter (`z: T.Exclusive`) and documents the methods the kernel may call on it.
"""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic

from peertile.dtypes import DType
from peertile.errors import UsageError
from peertile.ir.ops import Padding
from peertile.ir.types import Access
from peertile.language.tiles import Tile
from peertile.language.word import KernelOnly, word
from peertile.memory_model import Order, Rmw, Scope

__all__ = ["Exclusive", "ExclusiveTile", "GatherView", "Peer", "PeerAccess", "Shared", "TileView", "View"]


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
    def tiles(self, dealt: Any = None, down: bool = False, even: bool = False) -> Iterator[ExclusiveTile]:
        """This program's tiles in turn; exactly one when the partition is not persistent.

        Tiles are dealt to the programs one by one, from program 0 on. `dealt` is how many have been dealt before, of
        other partitions of the launch, the same number in every program: the dealing goes on where that ended, so
        that a program which got one tile more of the one partition gets one less of the other.

        `down` deals from the last tile on: where later tiles take longer, the short ones fill what is left at the end.
        `even` deals every other round from the last program on: where tiles take longer and longer, or less and less,
        every program of a persistent partition then has about as much to do.

        `for tile, other in zip(y.tiles(), z.tiles(), strict=False)` walks partitions that are dealt alike side by side,
        as two panels of one matrix whose tiles are made together; the one with the fewest tiles ends the loop.

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
    def load_at(self, offset: Any, shape: Any, padding: Padding = Padding.ZERO) -> Tile:
        """A tile that begins at an element: result[i, …] = x[offset0 + i, …], with `padding` outside the view.

        `offset` counts elements, one run-time number per axis, 0 to the extent - 1 (of an empty axis, 0): a tile that
        begins outside the view is out of bounds. Where the offset is a multiple of the tile, `load` promises more.

        Example::

            x.load_at((x.shape[0] // 3,), (64,))
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

    # ---- views of the same memory

    @word
    def slice(self, start: Any, extent: Any, step: Any = None) -> View:
        """result[i, …] = x[start + i · step, …] for i < extent: a view, nothing is copied. One of each per axis.

        What reaches outside of x is out of bounds.

        Example::

            x.slice((16,), (x.shape[0] - 16,)).load((0,), (64,))
        """

    @word
    def permute(self, axes: Any) -> View:
        """A view whose axis k is axis axes[k] of x.

        Example::

            m.permute((1, 0)).load((0, 0), (64, 16))
        """

    @word
    def reshape(self, shape: Any) -> View:
        """The elements of a view without gaps, in row-major order, with other extents (run-time numbers too).

        Example::

            x.reshape((x.shape[0] // 4, 4)).load((0, 0), (16, 4))
        """

    @word
    def partition(self, shape: Any, step: Any = None) -> TileView:
        """x in tiles of `shape`; tile i begins at element i · step (default: the extent of the tile).

        A step below the extent gives tiles that overlap, as for a stencil; those are only read.

        Example::

            x.partition((64,), step=(32,)).load((1,))
        """

    @word
    def gather(self, indices: Tile, axis: int = 0) -> GatherView:
        """The slices of x along `axis` that a tile of indices names: element k of that axis is x[…, indices[k], …].

        An index outside of x gives padding on load and is left out on store, so -1 stands for no slice.

        Example::

            m.gather(T.iota(16) * 2).load((0, 0), (16, 64))
        """


class TileView(KernelOnly):
    """A view cut into tiles of one shape, all of which this program may read: what `x.partition(shape)` gives.

    Example::

        tiles = x.partition((64,))
        for k in T.range(tiles.num_tiles()[0]):
            tiles.load((k,))
    """

    @property
    @word
    def tile_shape(self) -> tuple[int, ...]:
        """Extents of a tile, known at compile time.

        Example::

            T.zeros(x.partition((64,)).tile_shape)
        """

    @word
    def num_tiles(self) -> tuple[Tile, ...]:
        """Number of tiles on each axis: ⌈extent / step⌉.

        Example::

            x.partition((64,)).num_tiles()[0]
        """

    @word
    def load(self, index: Any, padding: Padding = Padding.ZERO) -> Tile:
        """result[i, …] = x[index0 · step0 + i, …]; `padding` outside of x.

        Example::

            x.partition((64,)).load((0,))
        """

    @word
    def store(self, index: Any, tile: Tile) -> None:
        """x[index0 · step0 + i, …] = tile[i, …], clipped at the edge.

        Example::

            p.local.partition((64,)).store((0,), t)
        """


class GatherView(KernelOnly):
    """Slices of a view chosen by a tile of indices: what `x.gather(indices, axis)` gives.

    Example::

        rows = m.gather(T.iota(16))
        rows.load((0, 0), (16, 64))
    """

    @word
    def load(self, index: Any, shape: Any, padding: Padding = Padding.ZERO) -> Tile:
        """A tile; along the axis of the gather its extent is the number of indices, and its tile index 0.

        Example::

            m.gather(T.iota(16)).load((0, 0), (16, 64))
        """

    @word
    def store(self, index: Any, tile: Tile) -> None:
        """Scatters a tile to the slices that the indices name, in order: of equal indices the last one stays.

        Example::

            p.local.gather(T.iota(64) * 2).store((0,), t)
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
    def store_at(self, offset: Any, tile: Tile) -> None:
        """A tile that begins at an element: x[offset0 + i, …] = tile[i, …], clipped at the edge of the view.

        `offset` counts elements, as of `load_at`. Tiles of different programs may overlap: order them with signals.

        Example::

            p.local.store_at((3,), t)
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


if TYPE_CHECKING:
    from typing_extensions import TypeVar

    _Access = TypeVar("_Access", default=Any)

    class _Symmetric(KernelOnly, Generic[_Access]):
        """To a type checker `T.Peer[T.read]` is a generic class with an argument; `T.Peer` alone is one without."""
else:
    _Access = None

    class _Symmetric(KernelOnly):
        def __class_getitem__(cls, access: object) -> type[_Symmetric]:
            return cls


class Peer(_Symmetric[_Access]):
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
