"""Words that make, reshape, cut and join tiles, and multiply them. Signatures and formulas; no bodies.

A *tile* is an immutable value of up to 6 axes, each extent a power of two; a scalar is a tile of shape ().
Two tiles meet as in numpy: shapes are aligned on the right and axes of extent 1 repeat. A Python number
takes the dtype of the tile it meets; alone, an int becomes i64 and a float f32.
"""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, TypeAlias

from peertile.dtypes import DType, f32, i64
from peertile.ir.ops import Precision, Rounding
from peertile.language.word import KernelOnly, word

__all__ = [
    "Operand",
    "Tile",
    "bitcast",
    "broadcast",
    "cat",
    "expand_dims",
    "extract",
    "flip",
    "full",
    "insert",
    "iota",
    "mma",
    "ones",
    "permute",
    "reshape",
    "take",
    "transpose",
    "where",
    "zeros",
]

if TYPE_CHECKING:

    class _ClassThatIsADType(DType, type):  # type: ignore[misc]  # layouts do not matter: none is ever made
        """To a type checker `T.f32` is the class of tiles, for it has to be three things: the type of a parameter
        (`n: T.i32`), a function that makes a tile (`T.f32(0)`), and a dtype (`T.zeros(shape, T.f32)`), which is why
        the metaclass is one. At run time it is the dtype."""
else:
    _ClassThatIsADType = type

Operand: TypeAlias = "Tile | int | float | bool"
"""What an operator of a tile takes on its other side."""


class Tile(KernelOnly, metaclass=_ClassThatIsADType):
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

    if TYPE_CHECKING:
        # The compiler reads operators in the source; these are for type checkers of kernels alone, and so are
        # no words: each would need a text of its own that says no more than the class.
        def __new__(cls, value: Operand) -> Self: ...
        def __add__(self, other: Operand) -> Tile: ...
        def __radd__(self, other: Operand) -> Tile: ...
        def __sub__(self, other: Operand) -> Tile: ...
        def __rsub__(self, other: Operand) -> Tile: ...
        def __mul__(self, other: Operand) -> Tile: ...
        def __rmul__(self, other: Operand) -> Tile: ...
        def __truediv__(self, other: Operand) -> Tile: ...
        def __rtruediv__(self, other: Operand) -> Tile: ...
        def __floordiv__(self, other: Operand) -> Tile: ...
        def __rfloordiv__(self, other: Operand) -> Tile: ...
        def __mod__(self, other: Operand) -> Tile: ...
        def __rmod__(self, other: Operand) -> Tile: ...
        def __pow__(self, other: Operand) -> Tile: ...
        def __rpow__(self, other: Operand) -> Tile: ...
        def __and__(self, other: Operand) -> Tile: ...
        def __rand__(self, other: Operand) -> Tile: ...
        def __or__(self, other: Operand) -> Tile: ...
        def __ror__(self, other: Operand) -> Tile: ...
        def __xor__(self, other: Operand) -> Tile: ...
        def __rxor__(self, other: Operand) -> Tile: ...
        def __lshift__(self, other: Operand) -> Tile: ...
        def __rlshift__(self, other: Operand) -> Tile: ...
        def __rshift__(self, other: Operand) -> Tile: ...
        def __rrshift__(self, other: Operand) -> Tile: ...
        def __neg__(self) -> Tile: ...
        def __pos__(self) -> Tile: ...
        def __invert__(self) -> Tile: ...
        def __lt__(self, other: Operand) -> Tile: ...
        def __le__(self, other: Operand) -> Tile: ...
        def __gt__(self, other: Operand) -> Tile: ...
        def __ge__(self, other: Operand) -> Tile: ...
        # Python's own comparison gives a bool for any object; a tile's gives a tile.
        def __eq__(self, other: object) -> Tile: ...  # type: ignore[override]
        def __ne__(self, other: object) -> Tile: ...  # type: ignore[override]
        def __getitem__(self, axes: Any) -> Tile: ...


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
def cat(tiles: Any, axis: int = 0) -> Tile:
    """Tiles of one shape, one behind the other along `axis`; their number is a power of two.

    result[k · n + i, …] = tiles[k][i, …] for n = the extent of one.

    Example::

        T.cat((t, -t), axis=0)
    """


@word
def extract(x: Tile, index: Any, shape: Any) -> Tile:
    """A piece of a tile: result[i, …] = x[index0 · shape0 + i, …].

    `index` counts pieces of `shape`, one per axis, as `x.load` does on memory. It may be a run-time number; one
    that is out of range ends the program with an `OutOfBounds` fault.

    Example::

        T.extract(a, (0, 3), (16, 8))
        T.extract(t, T.program_id(0) % 4, (16,))
    """


@word
def insert(x: Tile, piece: Tile, index: Any) -> Tile:
    """`x` with a piece replaced: result[index0 · shape0 + i, …] = piece[i, …], x elsewhere. Index as of `extract`.

    Example::

        T.insert(t, T.zeros((16,)), 3)
    """


@word
def take(x: Tile, index: Tile, axis: int = 0) -> Tile:
    """Gathers along an axis: result[…, k, …] = x[…, index[…, k, …], …].

    `index` is an integer tile with the extents of `x` but for the axis. An index out of range ends the program
    with an `OutOfBounds` fault; none is tested for an index that is in range by construction, as of `T.iota`.

    Example::

        T.take(t, T.iota(64) // 2, axis=0)
    """


@word
def flip(x: Tile, axis: int = 0) -> Tile:
    """result[…, k, …] = x[…, n - 1 - k, …] along `axis`.

    Example::

        T.flip(t)
    """


@word
def mma(a: Tile, b: Tile, acc: Tile | None = None, *, precision: Precision = Precision.IEEE) -> Tile:
    """result[m, n] = acc[m, n] + Σ_k a[m, k] · b[k, n], with one equal leading batch axis if there are three.

    f16, bf16, fp8 and f32 accumulate in f32, f64 in f64, i8 and u8 in i32. Without `acc` it starts at 0.
    `T.Precision.TF32` lets the target round factors of f32 to 10 bits of mantissa, where that is faster.

    Example::

        T.mma(a, a.T, T.zeros((16, 16), T.f32))
        T.mma(a, a.T, precision=T.Precision.TF32)
    """
