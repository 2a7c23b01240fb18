"""Words that reduce, scan and sort along an axis. Signatures and formulas; no bodies.

A negative axis counts from the last. No identity is ever asked for: the extents of a tile are never 0.
"""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

from enum import Enum
from typing import Any

from peertile.language.tiles import Tile
from peertile.language.word import word

__all__ = [
    "NanRule",
    "all",
    "any",
    "argmax",
    "argmin",
    "argsort",
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    "max",
    "min",
    "prod",
    "reduce",
    "scan",
    "sort",
    "sum",
    "top_k",
]


class NanRule(Enum):
    """What minima and maxima make of NaN: PROPAGATE gives NaN if there is one, IGNORE passes over it (and gives
    NaN where there is nothing else)."""

    PROPAGATE = "propagate"
    IGNORE = "ignore"


@word
def sum(x: Tile, axis: Any = None, keepdims: bool = False) -> Tile:
    """result[…] = Σ x[…] along `axis` (an int, a tuple, or None for all), in the dtype of `x`.

    The order of addition is fixed for a shape, so the same input gives the same bits.

    Example::

        T.sum(a, axis=1)
        T.sum(t)
    """


@word
def prod(x: Tile, axis: Any = None, keepdims: bool = False) -> Tile:
    """result[…] = Π x[…] along `axis` (an int, a tuple, or None for all).

    Example::

        T.prod(t)
    """


@word
def max(x: Tile, axis: Any = None, keepdims: bool = False, nan: NanRule = NanRule.PROPAGATE) -> Tile:
    """result[…] = max x[…] along `axis`; NaN if there is one, or with `T.NanRule.IGNORE` if there is nothing else.

    Example::

        a - T.max(a, axis=1, keepdims=True)
    """


@word
def min(x: Tile, axis: Any = None, keepdims: bool = False, nan: NanRule = NanRule.PROPAGATE) -> Tile:
    """result[…] = min x[…] along `axis`; NaN if there is one, or with `T.NanRule.IGNORE` if there is nothing else.

    Example::

        T.min(t)
    """


@word
def any(x: Tile, axis: Any = None, keepdims: bool = False) -> Tile:
    """Whether some element of a bool tile along `axis` is true.

    Example::

        if T.any(t > 100.0):
            T.print_("large")
    """


@word
def all(x: Tile, axis: Any = None, keepdims: bool = False) -> Tile:
    """Whether every element of a bool tile along `axis` is true.

    Example::

        T.assert_(T.all(t == t), "NaN in the input")
    """


@word
def argmax(x: Tile, axis: int = 0, keepdims: bool = False, nan: NanRule = NanRule.PROPAGATE) -> Tile:
    """The index (i64) of the greatest element along `axis`, the first one among equals.

    The first NaN is the greatest; with `T.NanRule.IGNORE` it is passed over (index 0 if there is nothing else).

    Example::

        T.argmax(a, axis=1)
    """


@word
def argmin(x: Tile, axis: int = 0, keepdims: bool = False, nan: NanRule = NanRule.PROPAGATE) -> Tile:
    """The index (i64) of the least element along `axis`, the first one among equals.

    The first NaN is the least; with `T.NanRule.IGNORE` it is passed over (index 0 if there is nothing else).

    Example::

        T.argmin(t)
    """


@word
def reduce(tiles: Any, fn: Any, axis: int = 0, keepdims: bool = False) -> Any:
    """Folds `axis` of a tile, or of several at once, with a function of the kernel's own.

    result[…] = fn(… fn(fn(x[0], x[1]), x[2]) …). With n tiles, `fn` takes an element of each, then another of
    each, and returns a tuple of n; the result is a tuple. `fn` is a word of two operands, or a plain function of
    elementwise words on scalars. It must be associative and commutative: a target chooses the order.

    Example::

        T.reduce(t, T.maximum)
    """


@word
def scan(tiles: Any, fn: Any, axis: int = 0, reverse: bool = False) -> Any:
    """Inclusive scan along `axis` with a function of the kernel's own, which is associative; as `T.reduce`.

    result[k] = fn(result[k - 1], x[k]); with `reverse`, from the last element: result[k] = fn(result[k + 1], x[k]).

    Example::

        T.scan(t, T.maximum)
        T.scan(t, T.minimum, reverse=True)
    """


@word
def cumsum(x: Tile, axis: int = 0, reverse: bool = False) -> Tile:
    """result[k] = x[0] + … + x[k] along `axis`, or with `reverse` x[k] + … + x[n - 1].

    f16 and bf16 are added in f32 and rounded at each element; integers wrap.

    Example::

        T.cumsum(a, axis=1)
    """


@word
def cumprod(x: Tile, axis: int = 0, reverse: bool = False) -> Tile:
    """result[k] = x[0] · … · x[k] along `axis`, or with `reverse` x[k] · … · x[n - 1]; rounds as `T.cumsum`.

    Example::

        T.cumprod(t)
    """


@word
def cummax(x: Tile, axis: int = 0, reverse: bool = False, nan: NanRule = NanRule.PROPAGATE) -> Tile:
    """result[k] = max(x[0], …, x[k]) along `axis`, or with `reverse` of x[k] … x[n - 1]; NaN as of `T.max`.

    Example::

        T.cummax(t)
    """


@word
def cummin(x: Tile, axis: int = 0, reverse: bool = False, nan: NanRule = NanRule.PROPAGATE) -> Tile:
    """result[k] = min(x[0], …, x[k]) along `axis`, or with `reverse` of x[k] … x[n - 1]; NaN as of `T.min`.

    Example::

        T.cummin(t)
    """


@word
def sort(x: Tile, axis: int = -1, descending: bool = False) -> Tile:
    """The elements in ascending (or descending) order along `axis`, stable. NaN counts as the greatest.

    Example::

        T.sort(a, axis=1)
    """


@word
def argsort(x: Tile, axis: int = -1, descending: bool = False) -> Tile:
    """Indices (i64) that sort along `axis`: T.take(x, T.argsort(x, axis), axis) is sorted. Order as of `T.sort`.

    Example::

        T.argsort(t, descending=True)
    """


@word
def top_k(x: Tile, k: int, axis: int = -1) -> tuple[Tile, Tile]:
    """The k greatest elements along `axis`, the greatest first, and their indices (i64).

    k is a power of two. Among equals the first ones come first; NaN counts as the greatest.

    Example::

        values, indices = T.top_k(t, 8)
    """
