"""The types of kernel parameters that communicate, and raw pointers. Signatures and formulas; no bodies.

Each class annotates a parameter (`box: T.Mailbox`) and documents the methods the kernel may call on it.
"""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal

from peertile.dtypes import DType
from peertile.language.tiles import Tile
from peertile.language.word import KernelOnly, word

__all__ = [
    "Barrier",
    "Counter",
    "CounterSlot",
    "Mailbox",
    "Pointer",
    "Round",
    "Signal",
    "SignalSlot",
]


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

    @property
    @word
    def rank(self) -> Tile:
        """This rank in the signal's group.

        Example::

            s.rank
        """

    @property
    @word
    def num_ranks(self) -> Tile:
        """Number of ranks of the signal's group.

        Example::

            s.num_ranks
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

    @property
    @word
    def rank(self) -> Tile:
        """This rank in the counter's group.

        Example::

            c.rank
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

    @property
    @word
    def rank(self) -> Tile:
        """This rank in the barrier's group.

        Example::

            b.rank
        """

    @property
    @word
    def num_ranks(self) -> Tile:
        """Number of ranks of the barrier's group.

        Example::

            b.num_ranks
        """

    @word
    def sync(self) -> None:
        """The same program index of all ranks arrives, then leaves: release, acquire, system scope.

        Example::

            b.sync()
        """

    @word
    def arrive(self) -> None:
        """The first half of `sync`: says that this program is here, and goes on. Release, system scope.

        `wait` follows in the same block. The barrier is ready when the host has made it; nothing is initialised here.

        Example::

            b.arrive()
            t = t * 2
            b.wait()
        """

    @word
    def wait(self) -> None:
        """The second half of `sync`: the same program of every rank has arrived. Acquire, system scope, bounded.

        Example::

            b.arrive()
            b.wait()
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
