"""Words for single elements with an order, waits, fences, put and get. Signatures and formulas; no bodies.

`word` is a view (`p.at(r)`, `p.local`) or a symmetric parameter with `rank=` (None: this rank's own part);
`index` counts elements, one per axis, (0, …) by default. On peer memory the scope is system, always.
"""

# mypy: disable-error-code="empty-body"
# ruff: noqa: PT028 (the word `test` is no test)

from __future__ import annotations

from typing import Any

from peertile.ir.ops import Padding
from peertile.language.tiles import Tile
from peertile.language.word import word as _word
from peertile.memory_model import Cmp, Order, Rmw, Scope

__all__ = [
    "atom",
    "atom_add",
    "get",
    "ld",
    "put",
    "st",
    "sync_programs",
    "sync_system",
    "test",
    "wait_eq",
    "wait_ge",
    "wait_gt",
    "wait_le",
    "wait_lt",
    "wait_ne",
]


@_word
def put(src: Tile, dst: Any, index: Any = None, *, rank: Any = None) -> None:
    """Writes a tile into rank `rank`'s part of `dst` (None: one's own) at tile `index`. Complete when it returns.

    Example::

        T.put(t, p, (0,), rank=0)
    """


@_word
def get(src: Any, shape: Any, index: Any = None, *, rank: Any = None, padding: Padding = Padding.ZERO) -> Tile:
    """Reads the tile `index` of `shape` from rank `rank`'s part of `src` (None: one's own).

    Example::

        T.get(p, (64,), (0,), rank=0)
    """


@_word
def ld(
    word: Any, index: Any = None, *, rank: Any = None, order: Order = Order.RELAXED, scope: Scope | None = None
) -> Tile:
    """One element: weak, relaxed (default) or acquire. The scope is system on peers, device elsewhere.

    Example::

        T.ld(words, (0,), rank=0, order=T.acquire)
    """


@_word
def st(
    word: Any,
    value: Any,
    index: Any = None,
    *,
    rank: Any = None,
    order: Order = Order.RELAXED,
    scope: Scope | None = None,
) -> None:
    """Writes one element: weak, relaxed (default) or release.

    Example::

        T.st(words, 1, (0,), rank=0, order=T.release)
    """


@_word
def atom_add(
    word: Any,
    value: Any,
    index: Any = None,
    *,
    rank: Any = None,
    order: Order = Order.ACQ_REL,
    scope: Scope | None = None,
) -> Tile:
    """Adds to one element atomically; the result is the old value.

    Example::

        old = T.atom_add(words, 1, (0,), rank=0)
    """


@_word
def atom(
    word: Any,
    rmw: Rmw,
    value: Any,
    index: Any = None,
    *,
    rank: Any = None,
    order: Order = Order.ACQ_REL,
    scope: Scope | None = None,
) -> Tile:
    """An atomic read-modify-write of one element; the result is the old value.

    Example::

        old = T.atom(words, T.Rmw.UMAX, 7, (0,), rank=0)
    """


@_word
def wait_eq(
    word: Any,
    value: Any,
    index: Any = None,
    *,
    rank: Any = None,
    order: Order = Order.ACQUIRE,
    scope: Scope | None = None,
) -> Tile:
    """Waits until element == value; the result is the element. Bounded; acquire, or relaxed before a fence.

    On a word that only grows use `wait_ge`: an equality may come and go unseen.

    Example::

        T.wait_eq(words, 1, (0,))
    """


@_word
def wait_ne(
    word: Any,
    value: Any,
    index: Any = None,
    *,
    rank: Any = None,
    order: Order = Order.ACQUIRE,
    scope: Scope | None = None,
) -> Tile:
    """Waits until element != value; the result is the element. Bounded.

    Example::

        T.wait_ne(words, 0, (0,))
    """


@_word
def wait_ge(
    word: Any,
    value: Any,
    index: Any = None,
    *,
    rank: Any = None,
    order: Order = Order.ACQUIRE,
    scope: Scope | None = None,
) -> Tile:
    """Waits until element >= value; the result is the element. Bounded.

    Example::

        T.wait_ge(words, 1, index=(0,))
    """


@_word
def wait_le(
    word: Any,
    value: Any,
    index: Any = None,
    *,
    rank: Any = None,
    order: Order = Order.ACQUIRE,
    scope: Scope | None = None,
) -> Tile:
    """Waits until element <= value; the result is the element. Bounded.

    Example::

        T.wait_le(words, 1, (0,))
    """


@_word
def wait_gt(
    word: Any,
    value: Any,
    index: Any = None,
    *,
    rank: Any = None,
    order: Order = Order.ACQUIRE,
    scope: Scope | None = None,
) -> Tile:
    """Waits until element > value; the result is the element. Bounded.

    Example::

        T.wait_gt(words, 0, (0,))
    """


@_word
def wait_lt(
    word: Any,
    value: Any,
    index: Any = None,
    *,
    rank: Any = None,
    order: Order = Order.ACQUIRE,
    scope: Scope | None = None,
) -> Tile:
    """Waits until element < value; the result is the element. Bounded.

    Example::

        T.wait_lt(words, 9, (0,))
    """


@_word
def test(
    word: Any,
    value: Any,
    index: Any = None,
    *,
    cmp: Cmp = Cmp.GE,
    rank: Any = None,
    order: Order = Order.ACQUIRE,
    scope: Scope | None = None,
) -> Tile:
    """Whether element `cmp` value holds now (>= by default), without blocking.

    Example::

        if T.test(words, 1, (0,)):
            T.print_("arrived")
    """


@_word
def sync_programs() -> None:
    """All programs of this launch on this device arrive, then leave.

    Example::

        T.sync_programs()
    """


@_word
def sync_system() -> None:
    """Orders every access before it with every access after it, system scope: a fence for relaxed words.

    Example::

        T.sync_system()
        T.st(words, 1, (0,), rank=0)
    """
