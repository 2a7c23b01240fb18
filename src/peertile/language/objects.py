"""The types of kernel parameters and what they can do inside a kernel. Signatures and formulas; no bodies.

Each class annotates a parameter (`z: T.Exclusive`) and documents the methods the kernel may call on it.
"""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

from peertile.dtypes import DType
from peertile.errors import UsageError
from peertile.ir.ops import Padding
from peertile.ir.types import Access
from peertile.language.tiles import Tile
from peertile.language.word import KernelOnly, word
from peertile.memory_model import Order, Rmw, Scope

__all__ = [
    "Barrier",
    "Counter",
    "CounterSlot",
    "Exclusive",
    "ExclusiveTile",
    "Mailbox",
    "Multicast",
    "Peer",
    "PeerAccess",
    "Pointer",
    "Round",
    "Shared",
    "Signal",
    "SignalSlot",
    "View",
]


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


class SignalSlot(KernelOnly):
    """One slot of a signal: `s[k]`.

    Example::

        s[0].notify()
        s[0].wait()
    """

    @word
    def notify(self, to: Any = None) -> None:
        """Stores the next epoch at every peer, or at rank `to`: release, system scope.

        Example::

            s[0].notify(to=0)
        """

    @word
    def wait(self, rank: Any = None) -> None:
        """Waits for the next epoch of every peer, or of `rank`: acquire, system scope, bounded.

        Example::

            s[0].wait(0)
        """


class Signal(KernelOnly):
    """Monotonic words, one per (slot, source, destination), each with one writer. The slot is the program
    index unless named; epochs count by themselves and are never reset.

    Example::

        s.notify()
        s.wait()
    """

    @word
    def __getitem__(self, slot: Any) -> SignalSlot:
        """Slot `slot` instead of the program index.

        Example::

            s[1].notify()
        """

    @word
    def notify(self, to: Any = None, slot: Any = None) -> None:
        """Stores the next epoch at every peer, or at rank `to`: release, system scope.

        Everything this program did before is visible to whoever waits for it.

        Example::

            s.notify()
        """

    @word
    def wait(self, rank: Any = None, slot: Any = None) -> None:
        """Waits for the next epoch of every peer, or of `rank`: acquire, system scope, bounded.

        Example::

            s.wait()
        """


class CounterSlot(KernelOnly):
    """One slot of a counter: `c[k]`.

    Example::

        c[0].add(1, to=0)
    """

    @word
    def add(self, n: Any = 1, *, to: Any) -> None:
        """Adds `n` to the word of rank `to`: release, system scope.

        Example::

            c[0].add(2, to=0)
        """

    @word
    def wait(self, n: Any) -> None:
        """Waits for `n` adds beyond this program's last completed wait: acquire, system scope, bounded.

        Example::

            c[0].wait(2)
        """


class Counter(KernelOnly):
    """Words that many ranks add to and one waits on. The slot is the program index unless named.

    Example::

        c.add(1, to=0)
        c.wait(c.num_ranks)
    """

    @word
    def __getitem__(self, slot: Any) -> CounterSlot:
        """Slot `slot` instead of the program index.

        Example::

            c[1].add(1, to=0)
        """

    @property
    @word
    def num_ranks(self) -> Tile:
        """Number of ranks of the counter's group.

        Example::

            c.num_ranks
        """

    @word
    def add(self, n: Any = 1, *, to: Any, slot: Any = None) -> None:
        """Adds `n` to the word of rank `to`: release, system scope.

        Example::

            c.add(1, to=0)
        """

    @word
    def wait(self, n: Any, slot: Any = None) -> None:
        """Waits for `n` adds beyond this program's last completed wait: acquire, system scope, bounded.

        Example::

            c.wait(1)
        """


class Barrier(KernelOnly):
    """A meeting of ranks inside a kernel, reusable back to back.

    Example::

        b.sync()
    """

    @word
    def sync(self) -> None:
        """The same program index of all ranks arrives, then leaves: release, acquire, system scope.

        Example::

            b.sync()
        """

    @word
    def sync_all(self) -> None:
        """All programs of all ranks arrive, then leave.

        Example::

            b.sync_all()
        """


class Round(KernelOnly):
    """An open round of a mailbox: different tiles to some ranks. Leaving the `with` sends it.

    Example::

        with box.round() as r:
            r.put(t, to=0)
        for part in box.collect():
            T.print_("part", part)
    """

    @word
    def put(self, tile: Tile, *, to: Any) -> None:
        """The tile for rank `to` in this round, at most one for each rank.

        Example::

            with box.round() as r:
                for k in T.ranks():
                    r.put(t, to=k)
            for part in box.collect():
                T.print_("part", part)
        """


class Mailbox(KernelOnly):
    """Safe communication: post a tile, collect everybody's. Carries order and reuse of the slots by itself.

    A kernel whose communication goes through mailboxes has no data race and no early reuse. Misuse is a
    compile error; the rules are in docs/concepts/mailbox.md.

    Example::

        box.post(t)
        acc = T.zeros((64,), T.f32)
        for part in box.collect():
            acc += part
    """

    @property
    @word
    def tile_shape(self) -> tuple[int, ...]:
        """Shape of the tiles it carries, known at compile time.

        Example::

            T.zeros(box.tile_shape, T.f32)
        """

    @property
    @word
    def dtype(self) -> DType:
        """Element type of the tiles it carries.

        Example::

            T.zeros(box.tile_shape, box.dtype)
        """

    @property
    @word
    def rank(self) -> Tile:
        """This rank in the mailbox's group.

        Example::

            box.rank
        """

    @property
    @word
    def num_ranks(self) -> Tile:
        """Number of ranks of the mailbox's group.

        Example::

            box.num_ranks
        """

    @word
    def post(self, tile: Tile) -> None:
        """Sends one tile to every receiver and opens a round; collect it before the next post.

        Example::

            box.post(t)
            for part in box.collect():
                T.print_("part", part)
        """

    @word
    def round(self) -> AbstractContextManager[Round]:
        """Opens a round with different tiles to some ranks; leaving the `with` sends it, to all.

        Example::

            with box.round() as r:
                r.put(t, to=0)
            for source, part in box.collect(sources=True):
                T.print_("from", source, part)
        """

    @word
    def collect(self, sources: Literal[False, True] = False) -> Iterator[Any]:
        """The tiles of the oldest open round in rank order, each once it has arrived, own included.

        Links without a tile are skipped. With `sources` it gives (rank, tile). The slots go back when the
        loop ends: `break` and `return` have no place in it.

        Example::

            box.post(t)
            for source, part in box.collect(sources=True):
                T.print_("from", source, part)
        """


class Pointer(KernelOnly):
    """A raw address, or a tile of them, in kernels marked `unsafe=True`; `pointer + i` counts elements.

    Example::

        value, token = T.unsafe.load_ptr(ptr + T.iota(64), order=T.weak)
    """

    @property
    @word
    def dtype(self) -> DType:
        """Element type.

        Example::

            ptr.dtype
        """

    @property
    @word
    def shape(self) -> tuple[int, ...]:
        """Shape of the tile of pointers, () for one address.

        Example::

            (ptr + T.iota(64)).shape
        """


class Multicast(KernelOnly):
    """One address that reaches every rank. Not supported by this version: a kernel that names it is refused."""
