"""Words that make and reshape tiles, reduce them and multiply them. Signatures and formulas; no bodies.

A *tile* is an immutable value of up to 6 axes, each extent a power of two; a scalar is a tile of shape ().
Two tiles meet as in numpy: shapes are aligned on the right and axes of extent 1 repeat. A Python number
takes the dtype of the tile it meets; alone, an int becomes i64 and a float f32.
"""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

from typing import Any

from peertile.dtypes import DType, f32, i64
from peertile.ir.ops import Rounding
from peertile.language.word import KernelOnly, word

__all__ = [
    "Tile",
    "all",
    "any",
    "bitcast",
    "broadcast",
    "expand_dims",
    "full",
    "iota",
    "max",
    "min",
    "mma",
    "ones",
    "permute",
    "prod",
    "reshape",
    "sum",
    "transpose",
    "where",
    "zeros",
]


class Tile(KernelOnly):
    """An immutable tile of numbers; what loads and arithmetic give.

    Operators are elementwise: `+ - * / // % ** & | ^ ~ << >>` and comparisons. `//` and `%` round towards
    minus infinity as in Python; `/` takes floats. `t[:, None]` inserts an axis of extent 1.

    Example::

        u = (t * 2.0 + 1.0).astype(T.bf16)
        v = T.where(t > 0, t, 0.0)
    """

    @property
    @word
    def shape(self) -> tuple[int, ...]:
        """Extents, known at compile time.

        Example::

            T.zeros(t.shape, T.f32)
        """

    @property
    @word
    def dtype(self) -> DType:
        """Element type.

        Example::

            T.zeros((16,), t.dtype)
        """

    @property
    @word
    def ndim(self) -> int:
        """Number of axes.

        Example::

            T.static_assert(t.ndim == 1)
        """

    @property
    @word
    def T(self) -> Tile:
        """The last two axes exchanged: result[…, i, j] = t[…, j, i].

        Example::

            a.T
        """

    @word
    def astype(self, dtype: DType, rounding: Rounding = Rounding.DEFAULT, saturate: bool = False) -> Tile:
        """Converts the elements: result[i] = dtype(t[i]).

        Float to float rounds to nearest even, float to integer towards zero (saturating; NaN gives 0),
        unless `rounding` says otherwise. Integer to integer wraps unless `saturate`. fp8 saturates.

        Example::

            t.astype(T.bf16)
            t.astype(T.i8, rounding=T.Rounding.NEAREST)
        """

    @word
    def bitcast(self, dtype: DType) -> Tile:
        """The same bits as another dtype of the same width.

        Example::

            t.bitcast(T.u32)
        """

    @word
    def reshape(self, *shape: Any) -> Tile:
        """The same elements, row-major, with another shape of as many elements.

        Example::

            t.reshape(8, 8)
            t.reshape((4, 16))
        """


@word
def zeros(shape: Any, dtype: DType = f32) -> Tile:
    """result[i, …] = 0. Extents are compile-time powers of two.

    Example::

        acc = T.zeros((16, 64), T.f32)
    """


@word
def ones(shape: Any, dtype: DType = f32) -> Tile:
    """result[i, …] = 1.

    Example::

        T.ones((64,), T.i32)
    """


@word
def full(shape: Any, value: Any, dtype: DType | None = None) -> Tile:
    """result[i, …] = value; the dtype of `value` (i64 or f32 for a Python number) unless given.

    Example::

        T.full((64,), float("-inf"), T.f32)
        T.full((64,), n)
    """


@word
def iota(n: int, dtype: DType = i64) -> Tile:
    """result[i] = i for 0 <= i < n, an integer tile of shape (n,).

    Example::

        T.iota(64) < n
    """


@word
def where(condition: Tile, a: Any, b: Any) -> Tile:
    """result[i] = a[i] if condition[i] else b[i]. Both sides are evaluated.

    Example::

        T.where(t > 0, t, 0.0)
    """


@word
def bitcast(x: Tile, dtype: DType) -> Tile:
    """The same bits as another dtype of the same width.

    Example::

        T.bitcast(t, T.i32)
    """


@word
def reshape(x: Tile, shape: Any) -> Tile:
    """The same elements, row-major, with another shape of as many elements.

    Example::

        T.reshape(t, (8, 8))
    """


@word
def permute(x: Tile, axes: Any) -> Tile:
    """Axis k of the result is axis axes[k] of `x`.

    Example::

        T.permute(a, (1, 0))
    """


@word
def transpose(x: Tile, axis0: int = -2, axis1: int = -1) -> Tile:
    """Two axes exchanged, the last two by default.

    Example::

        T.transpose(a)
    """


@word
def broadcast(x: Any, shape: Any) -> Tile:
    """`x` repeated to `shape`: shapes are aligned on the right, axes of extent 1 repeat.

    Example::

        T.broadcast(t, (16, 64))
    """


@word
def expand_dims(x: Tile, axis: int) -> Tile:
    """Inserts an axis of extent 1 in front of `axis` (negative: counted from the end of the result).

    Example::

        T.expand_dims(t, 0)
    """


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
def max(x: Tile, axis: Any = None, keepdims: bool = False) -> Tile:
    """result[…] = max x[…] along `axis`; NaN if there is one.

    Example::

        a - T.max(a, axis=1, keepdims=True)
    """


@word
def min(x: Tile, axis: Any = None, keepdims: bool = False) -> Tile:
    """result[…] = min x[…] along `axis`; NaN if there is one.

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
def mma(a: Tile, b: Tile, acc: Tile | None = None) -> Tile:
    """result[m, n] = acc[m, n] + Σ_k a[m, k] · b[k, n], with one equal leading batch axis if there are three.

    f16, bf16, fp8 and f32 accumulate in f32, f64 in f64, i8 and u8 in i32. Without `acc` it starts at 0.

    Example::

        T.mma(a, a.T, T.zeros((16, 16), T.f32))
    """
