"""Words for single elements with an order, waits, fences, put and get. Signatures and formulas; no bodies.

`word` is a view (`p.at(r)`, `p.local`) or a symmetric parameter with `rank=` (None: this rank's own part);
`index` counts elements, one per axis, (0, …) by default. On peer memory the scope is system, always.
"""

# mypy: disable-error-code="empty-body"
# ruff: noqa: PT028 (the word `test` is no test)

from __future__ import annotations

from enum import Enum
from typing import Any

from peertile.ir.ops import Padding
from peertile.language.tiles import Tile
from peertile.language.word import word as _word
from peertile.memory_model import Cmp, Order, Rmw, Scope

__all__ = [
    "Granularity",
    "atom",
    "atom_add",
    "get",
    "ld",
    "put",
    "put_filled",
    "put_flagged",
    "quiet",
    "st",
    "sync_programs",
    "sync_system",
    "take_filled",
    "take_flagged",
    "test",
    "wait_any",
    "wait_at_least",
    "wait_eq",
    "wait_ge",
    "wait_gt",
    "wait_le",
    "wait_lt",
    "wait_ne",
    "wait_put",
]


class Granularity(Enum):
    """Who moves the elements of a put or get, a hint: the threads of one warp, or the whole block. Targets without
    such a choice ignore it.

    Example::

        T.put(t, p, (0,), rank=0, granularity=T.Granularity.WARP)
    """

    WARP = "warp"
    BLOCK = "block"


@_word
def put(
    src: Any,
    dst: Any,
    index: Any = None,
    *,
    rank: Any = None,
    signal: Any = None,
    wait: bool = True,
    granularity: Granularity = Granularity.BLOCK,
    unroll: int = 4,
    vectorize: bool = True,
) -> Any:
    """Writes a tile, or a whole view, into rank `rank`'s part of `dst` (None: one's own).

    A tile goes to tile `index`; a view to a place of the same extents, any number and alignment of elements. One
    side must be local. It has ended when it returns; with `wait=False` it gives a handle for `T.wait_put`, and a view
    that is put may be read meanwhile, not written.
    With `signal` (`ready` or `ready[k]`) the receiver is notified behind it: what was put is visible before the
    signal, and nothing at all still signals. `granularity`, `unroll` and `vectorize` are hints.

    Example::

        T.put(t, p, (0,), rank=0, signal=s)
        T.put(x, p, rank=1)
    """


@_word
def get(
    src: Any,
    shape: Any = None,
    index: Any = None,
    *,
    to: Any = None,
    rank: Any = None,
    padding: Padding = Padding.ZERO,
    granularity: Granularity = Granularity.BLOCK,
    unroll: int = 4,
    vectorize: bool = True,
) -> Any:
    """Reads the tile `index` of `shape` from rank `rank`'s part of `src` (None: one's own); or, with `to`, copies the
    whole part into a local view of the same extents. It has ended when it returns.

    Example::

        T.get(p, (64,), (0,), rank=0)
        T.get(p, to=p.local.slice((0,), p.shape), rank=0)
    """


@_word
def wait_put(*transfers: Any) -> None:
    """What follows comes after everything that these puts (`wait=False`) did; their sources may be written again.

    Example::

        handle = T.put(t, p, (0,), rank=0, wait=False)
        T.wait_put(handle)
    """


@_word
def quiet() -> None:
    """As `T.wait_put` of every put of this program so far.

    Example::

        T.put(t, p, (0,), rank=0, wait=False)
        T.quiet()
    """


@_word
def put_flagged(src: Tile, words: Any, index: Any = None, *, epoch: Any, rank: Any = None) -> None:
    """Writes a tile with a flag on each element: payload and epoch travel in one indivisible store, so that a small
    message needs no signal. `words` holds u64: bits of the payload (32 at most) low, the epoch (u32) high.

    Before a place is written again its reader must have taken it: alternate between two places, for instance.

    Example::

        T.put_flagged(t, words, (0,), epoch=1, rank=0)
    """


@_word
def take_flagged(words: Any, shape: Any, index: Any = None, *, epoch: Any, dtype: Any, rank: Any = None) -> Tile:
    """Waits until every element of a flagged tile has come with `epoch`, and gives the payload. Bounded.

    Orders nothing but its own payload. Epochs go upwards, any number of them; a later one than asked for was
    written too early, and is a failed assertion.

    Example::

        T.take_flagged(words, (64,), (0,), epoch=1, dtype=T.f32)
    """


@_word
def put_filled(src: Tile, words: Any, index: Any = None, *, rank: Any = None) -> None:
    """Writes a tile of u32 or u64 words into empty places, each word in one indivisible store: what is there is the
    flag. A place is empty while all of its bits are one; such a word is sent with its lowest bit off.

    So nothing but the payload travels, for payloads that mean the same either way: floats of 16, 32 or 64 bits, of
    which such a word is one NaN or several. Before a place is written again its reader must have taken it.

    Example::

        T.put_filled(t.astype(T.u64), words, (0,), rank=0)
    """


@_word
def take_filled(words: Any, shape: Any, index: Any = None, *, rank: Any = None) -> Tile:
    """Waits until no word of a tile is empty, empties the places, and gives the words. Bounded.

    Orders nothing but its own payload. The places are empty before first use: fill them with ones.

    Example::

        T.take_filled(words, (64,), (0,))
    """


@_word
def wait_any(
    *words: Any,
    cmp: Cmp = Cmp.GE,
    order: Order = Order.ACQUIRE,
    scope: Scope | None = None,
) -> Tile:
    """Waits until one of several words satisfies `cmp`; the result is its position, the first where several do.

    Each is (word, value) or (word, value, index). What follows is ordered after that word's writer alone. Bounded.

    Example::

        which = T.wait_any((words, 1, (0,)), (words.at(0), 1, (1,)))
    """


@_word
def ld(
    word: Any,
    index: Any = None,
    *,
    rank: Any = None,
    order: Order = Order.RELAXED,
    scope: Scope | None = None,
    no_allocate: bool = False,
    coherent: bool = True,
) -> Tile:
    """One element: weak, relaxed (default) or acquire. The scope is system on peers, device elsewhere.

    `no_allocate` is a hint that it will not be read again soon. `coherent=False` lets a weak load of memory that
    nobody writes meanwhile be served from a read-only cache; on peer memory it is refused.

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
    no_allocate: bool = False,
) -> None:
    """Writes one element: weak, relaxed (default) or release. `no_allocate` is a hint, as of `T.ld`.

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
def wait_at_least(
    word: Any,
    value: Any,
    index: Any = None,
    *,
    rank: Any = None,
    order: Order = Order.ACQUIRE,
    scope: Scope | None = None,
) -> Tile:
    """Waits until the element is not behind value, modulo the width of the word; the result is the element. Bounded.

    Formula: element - value, as a signed number, >= 0: right for epochs that wrap, as `at_least` is.

    Example::

        T.wait_at_least(words, 1, index=(0,))
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
