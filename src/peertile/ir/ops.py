"""Every op of tile IR: operands, attributes, effects, verify rule. No backend, no numpy, no meaning.

Meaning registers in `peertile.meaning`, lowering in a backend, each from outside; a table test fails
when an op lacks one. Ops marked *expanded* are rewritten by `passes.protocols` into the primitive ops
of this file before any backend or evaluator sees them.

Index operands are scalars of i64. A *tile index* counts tiles of the access's shape; an *element
index* counts elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Final

from peertile.dtypes import i64
from peertile.ir.core import Block, Effect, Op, Value
from peertile.ir.types import (
    MAX_TILE_RANK,
    BarrierType,
    CounterType,
    MailboxType,
    MulticastType,
    ObjectType,
    PointerType,
    SignalType,
    Space,
    SymmetricType,
    TileType,
    TokenType,
    TransferType,
    ViewType,
)
from peertile.memory_model import Cmp, Order, Proxy, Rmw, Scope

NO_EFFECT: Final[frozenset[Effect]] = frozenset()


class Bounds(Enum):
    """How the tile index of an access is known to be inside its view.

    UNKNOWN must not reach a backend: the bounds pass replaces it. PROVEN follows from provenance,
    LAUNCH is checked by the launcher, KERNEL has a `check` op in front of the access.
    """

    UNKNOWN = "unknown"
    PROVEN = "proven"
    LAUNCH = "launch"
    KERNEL = "kernel"


class Padding(Enum):
    """What a load gives for elements of a partial tile that lie outside its view."""

    ZERO = "zero"
    NEG_ZERO = "neg_zero"
    NAN = "nan"
    INF = "inf"
    NEG_INF = "neg_inf"


class Unary(Enum):
    """Functions of one operand. `NOT` inverts bits (of bool: the truth); `ROUND` takes ties to even."""

    NEG = "neg"
    NOT = "not"
    ABS = "abs"
    EXP = "exp"
    EXP2 = "exp2"
    LOG = "log"
    LOG2 = "log2"
    SQRT = "sqrt"
    RSQRT = "rsqrt"
    SIN = "sin"
    COS = "cos"
    TAN = "tan"
    SINH = "sinh"
    COSH = "cosh"
    TANH = "tanh"
    ERF = "erf"
    SIGMOID = "sigmoid"
    FLOOR = "floor"
    CEIL = "ceil"
    ROUND = "round"


FLOAT_UNARY: Final = frozenset(Unary) - {Unary.NEG, Unary.NOT, Unary.ABS}


class Binary(Enum):
    """`DIV` is true division of floats; `FLOORDIV`/`MOD` round towards minus infinity (as Python),
    `QUOT`/`REM` towards zero (as C), integers only. Integer arithmetic wraps. A shift by the width or
    more gives 0 (or the sign). Integer division by zero gives 0 quotient and the dividend as remainder,
    so that all targets agree. MIN/MAX of floats give NaN if either is NaN."""

    ADD = "add"
    SUB = "sub"
    MUL = "mul"
    DIV = "div"
    FLOORDIV = "floordiv"
    MOD = "mod"
    QUOT = "quot"
    REM = "rem"
    MIN = "min"
    MAX = "max"
    AND = "and"
    OR = "or"
    XOR = "xor"
    SHL = "shl"
    SHR = "shr"
    MULHI = "mulhi"
    POW = "pow"
    ATAN2 = "atan2"


class Compare(Enum):
    """Comparison; of floats, ordered (false with NaN) but for NE. `AT_LEAST` is the wrap-safe `>=` of
    unsigned or signed integers: the difference, as signed, is >= 0."""

    EQ = "eq"
    NE = "ne"
    LT = "lt"
    LE = "le"
    GT = "gt"
    GE = "ge"
    AT_LEAST = "at_least"


class Fold(Enum):
    """Associative functions of a reduction. MIN/MAX propagate NaN. Identity: 0, 1, -inf/min, inf/max,
    all ones, 0, 0."""

    ADD = "add"
    MUL = "mul"
    MAX = "max"
    MIN = "min"
    AND = "and"
    OR = "or"
    XOR = "xor"


class Rounding(Enum):
    """How a cast rounds: float to float to nearest even unless said otherwise, float to integer to zero."""

    DEFAULT = "default"
    NEAREST = "nearest"
    ZERO = "zero"
    UP = "up"
    DOWN = "down"


class Precision(Enum):
    """How a matrix product of f32 may round its factors. TF32 lets the target keep 10 bits of mantissa (where
    that is faster); IEEE does not."""

    IEEE = "ieee"
    TF32 = "tf32"


class CheckKind(Enum):
    """What a failed `check` is reported as."""

    ASSERT = "assert"
    BOUNDS = "bounds"
    SIGNATURE = "signature"


class Moment(Enum):
    """What a program does where it makes a mark."""

    BEGIN = "begin"
    END = "end"
    WAIT = "wait"
    """Begins to wait for a word, or for a transfer."""
    WAITED = "waited"
    NOTIFY = "notify"
    """Is about to release a word that others wait for."""
    COPY = "copy"
    """Is about to begin a transfer."""


def _tile(op: Op, value: Value, role: str) -> TileType:
    if not isinstance(value.type, TileType):
        op.fail(f"{role}: expected a tile, got {value.type}")
    assert isinstance(value.type, TileType)
    return value.type


def _index(op: Op, value: Value, role: str) -> None:
    t = _tile(op, value, role)
    if t.shape or t.dtype != i64:
        op.fail(f"{role}: expected an i64 scalar, got {t}")


def _show(x: object) -> str:
    """Shapes as [4, 8], lists of types as (i64, f32)."""
    if isinstance(x, list):
        return f"({', '.join(map(str, x))})"
    return f"[{', '.join(map(str, x))}]" if isinstance(x, tuple) else str(x)


def _same(op: Op, a: object, b: object, role: str) -> None:
    if a != b:
        op.fail(f"{role}: expected {_show(a)}, got {_show(b)}")


def _scope_order(op: Op, allowed: tuple[Order, ...]) -> None:
    order, scope = op.attrs["order"], op.attrs["scope"]
    op.require(order in allowed, f"order: expected one of {', '.join(o.value for o in allowed)}, got {order.value}")
    if order is Order.WEAK:
        op.require(scope is None, f"scope: a weak access takes none, got {scope.value if scope is not None else scope}")
    else:
        op.require(isinstance(scope, Scope), f"scope: required with order {order.value}, got none")


def _ordered_effects(op: Op) -> frozenset[Effect]:
    """Effects of an access, with FENCE where its order is more than relaxed."""
    order = op.attrs["order"]
    return op.EFFECTS | ({Effect.FENCE} if order.acquires or order.releases else frozenset())


def _peer_scope(op: Op, space: Space) -> None:
    if space is Space.PEER and op.attrs["scope"] is not None:
        op.require(
            op.attrs["scope"] is Scope.SYSTEM,
            f"scope: peer memory needs system, got {op.attrs['scope'].value}",
        )


# ---------------------------------------------------------------- values


class Const(Op):
    """A scalar constant. `value` is int, float (nan and ±inf included) or bool, of the result's dtype."""

    NAME = "const"
    RESULTS = (1, 1)
    ATTRS = {"value": ...}

    def verify(self) -> None:
        t = _tile(self, self.result, "result")
        self.require(t.is_scalar, f"result: expected a scalar, got {t}")
        v = self.attrs["value"]
        if t.dtype.is_bool:
            self.require(isinstance(v, bool), f"value: expected bool for {t}, got {v!r}")
        elif t.dtype.is_int:
            self.require(isinstance(v, int) and not isinstance(v, bool), f"value: expected int for {t}, got {v!r}")
            assert isinstance(v, int)
            self.require(t.dtype.min <= v <= t.dtype.max, f"value: {v} does not fit {t}")
        else:
            self.require(isinstance(v, float), f"value: expected float for {t}, got {v!r}")


class ProgramId(Op):
    """Index of this program on a grid axis (i64)."""

    NAME = "program_id"
    RESULTS = (1, 1)
    ATTRS = {"axis": 0}

    def verify(self) -> None:
        _index(self, self.result, "result")
        self.require(self.attrs["axis"] in (0, 1, 2), f"axis: expected 0, 1 or 2, got {self.attrs['axis']}")


class NumPrograms(Op):
    """Number of programs on a grid axis (i64)."""

    NAME = "num_programs"
    RESULTS = (1, 1)
    ATTRS = {"axis": 0}

    def verify(self) -> None:
        ProgramId.verify(self)  # type: ignore[arg-type]


class Rank(Op):
    """This rank in the group of a symmetric object or field (i64). Operand: the object."""

    NAME = "rank"
    OPERANDS = (1, 1)
    RESULTS = (1, 1)

    def verify(self) -> None:
        t = self.operands[0].type
        self.require(isinstance(t, SymmetricType), f"object: expected symmetric, got {t}")
        _index(self, self.result, "result")


class NumRanks(Op):
    """Number of ranks of the group of a symmetric object (i64)."""

    NAME = "num_ranks"
    OPERANDS = (1, 1)
    RESULTS = (1, 1)

    def verify(self) -> None:
        Rank.verify(self)  # type: ignore[arg-type]


class Extent(Op):
    """Extent of a view or symmetric object along `axis`, in elements (i64)."""

    NAME = "extent"
    OPERANDS = (1, 1)
    RESULTS = (1, 1)
    ATTRS = {"axis": ...}

    def verify(self) -> None:
        t = self.operands[0].type
        self.require(isinstance(t, ViewType | SymmetricType | MulticastType), f"view: expected a view, got {t}")
        assert isinstance(t, ViewType | SymmetricType | MulticastType)
        axis = self.attrs["axis"]
        self.require(isinstance(axis, int) and 0 <= axis < t.rank, f"axis: expected 0 to {t.rank - 1}, got {axis}")
        _index(self, self.result, "result")


class NumTiles(Op):
    """Number of tiles of `size` elements along `axis`: ceil(extent / size) (i64)."""

    NAME = "num_tiles"
    OPERANDS = (1, 1)
    RESULTS = (1, 1)
    ATTRS = {"axis": ..., "size": ...}

    def verify(self) -> None:
        Extent.verify(self)  # type: ignore[arg-type]
        size = self.attrs["size"]
        self.require(isinstance(size, int) and size > 0, f"size: expected a positive int, got {size}")


class TileIndex(Op):
    """Tile index (one i64 per axis) of the `linear`-th tile of an exclusive view's partition.

    Operands: view, linear. Defined for 0 <= linear < product of num_tiles; the order is row-major,
    swizzled as the partition says. Its results are in bounds by construction.
    """

    NAME = "tile_index"
    OPERANDS = (2, 2)
    RESULTS = (1, None)

    def verify(self) -> None:
        t = self.operands[0].type
        self.require(
            isinstance(t, ViewType) and t.partition is not None, f"view: expected an exclusive partition, got {t}"
        )
        assert isinstance(t, ViewType)
        _index(self, self.operands[1], "linear")
        self.require(len(self.results) == t.rank, f"results: expected {t.rank}, got {len(self.results)}")
        for v in self.results:
            _index(self, v, "result")


class Iota(Op):
    """0, 1, …, n-1 as a tile of shape [n] of an integer dtype."""

    NAME = "iota"
    RESULTS = (1, 1)

    def verify(self) -> None:
        t = _tile(self, self.result, "result")
        self.require(t.rank == 1 and t.dtype.is_int, f"result: expected a 1-d integer tile, got {t}")


class UnaryOp(Op):
    """Elementwise `fn`. Float functions take floats; `not` bool or integer; `neg`, `abs` any number.
    Integers wrap; `round` is to nearest, ties to even."""

    NAME = "unary"
    OPERANDS = (1, 1)
    RESULTS = (1, 1)
    ATTRS = {"fn": ...}

    def verify(self) -> None:
        t = _tile(self, self.operands[0], "operand")
        fn = self.attrs["fn"]
        self.require(isinstance(fn, Unary), f"fn: expected a Unary, got {fn!r}")
        assert isinstance(fn, Unary)
        _same(self, t, self.result.type, "result")
        if fn in FLOAT_UNARY:
            self.require(
                t.dtype.is_float and t.dtype.bits > 8, f"operand of {fn.value}: expected f16, bf16, f32 or f64, got {t}"
            )
        elif fn is Unary.NOT:
            self.require(not t.dtype.is_float, f"operand of not: expected bool or integer, got {t}")
        else:
            self.require(not t.dtype.is_bool, f"operand of {fn.value}: expected a number, got {t}")


_FLOAT_ONLY: Final = frozenset({Binary.DIV, Binary.POW, Binary.ATAN2})
_INT_ONLY: Final = frozenset(
    {Binary.FLOORDIV, Binary.MOD, Binary.QUOT, Binary.REM, Binary.SHL, Binary.SHR, Binary.MULHI}
)
_BITS: Final = frozenset({Binary.AND, Binary.OR, Binary.XOR})


class BinaryOp(Op):
    """Elementwise `fn` of two tiles of one type."""

    NAME = "binary"
    OPERANDS = (2, 2)
    RESULTS = (1, 1)
    ATTRS = {"fn": ...}

    def verify(self) -> None:
        a = _tile(self, self.operands[0], "left")
        _same(self, a, self.operands[1].type, "right")
        _same(self, a, self.result.type, "result")
        fn = self.attrs["fn"]
        self.require(isinstance(fn, Binary), f"fn: expected a Binary, got {fn!r}")
        assert isinstance(fn, Binary)
        d = a.dtype
        if fn in _FLOAT_ONLY:
            right, kinds = d.is_float and d.bits > 8, "floats"
        elif fn in _INT_ONLY:
            right, kinds = d.is_int, "integers"
        elif fn in _BITS:
            right, kinds = not d.is_float, "bool or integers"
        else:
            right, kinds = not d.is_bool and (not d.is_float or d.bits > 8), "numbers"
        if not right:
            self.fail(f"operands of {fn.value}: expected {kinds}, got {a}")


class CompareOp(Op):
    """Elementwise comparison; the result is a bool tile of the same shape."""

    NAME = "compare"
    OPERANDS = (2, 2)
    RESULTS = (1, 1)
    ATTRS = {"fn": ...}

    def verify(self) -> None:
        a = _tile(self, self.operands[0], "left")
        _same(self, a, self.operands[1].type, "right")
        fn = self.attrs["fn"]
        self.require(isinstance(fn, Compare), f"fn: expected a Compare, got {fn!r}")
        self.require(fn is not Compare.AT_LEAST or a.dtype.is_int, f"operands of at_least: expected integers, got {a}")
        r = _tile(self, self.result, "result")
        if not r.dtype.is_bool or r.shape != a.shape:
            self.fail(f"result: expected bool of shape {_show(a.shape)}, got {r}")


class Select(Op):
    """Elementwise `condition ? a : b`. Operands: condition (bool), a, b of one type."""

    NAME = "select"
    OPERANDS = (3, 3)
    RESULTS = (1, 1)

    def verify(self) -> None:
        c = _tile(self, self.operands[0], "condition")
        a = _tile(self, self.operands[1], "a")
        _same(self, a, self.operands[2].type, "b")
        _same(self, a, self.result.type, "result")
        if not c.dtype.is_bool or c.shape != a.shape:
            self.fail(f"condition: expected bool of shape {_show(a.shape)}, got {c}")


class Fma(Op):
    """a · b + c, rounded once. Floats of one type."""

    NAME = "fma"
    OPERANDS = (3, 3)
    RESULTS = (1, 1)

    def verify(self) -> None:
        a = _tile(self, self.operands[0], "a")
        for role, v in zip(("b", "c"), self.operands[1:], strict=True):
            _same(self, a, v.type, role)
        _same(self, a, self.result.type, "result")
        self.require(a.dtype.is_float and a.dtype.bits > 8, f"operands: expected floats, got {a}")


class Cast(Op):
    """Value conversion. Float to integer truncates (or rounds as asked) and saturates; NaN gives 0.
    Integer to integer wraps unless `saturate`. Float to float rounds to nearest even unless said
    otherwise; f64 to a type narrower than f32 goes through f32 first, and an integer to such a type
    too. To fp8 saturates to the largest finite number (NaN stays NaN), and to other floats with
    `saturate`. To bool: whether it is not 0 (NaN is not). From bool: 0 or 1."""

    NAME = "cast"
    OPERANDS = (1, 1)
    RESULTS = (1, 1)
    ATTRS = {"rounding": Rounding.DEFAULT, "saturate": False}

    def verify(self) -> None:
        a, r = _tile(self, self.operands[0], "operand"), _tile(self, self.result, "result")
        _same(self, a.shape, r.shape, "shape of result")
        self.require(
            isinstance(self.attrs["rounding"], Rounding),
            f"rounding: expected a Rounding, got {self.attrs['rounding']!r}",
        )
        self.require(
            a.dtype.is_float or self.attrs["rounding"] is Rounding.DEFAULT,
            f"rounding: only a float operand rounds as asked, got {a}",
        )


class Bitcast(Op):
    """The same bits as another dtype of the same width."""

    NAME = "bitcast"
    OPERANDS = (1, 1)
    RESULTS = (1, 1)

    def verify(self) -> None:
        a, r = _tile(self, self.operands[0], "operand"), _tile(self, self.result, "result")
        _same(self, a.shape, r.shape, "shape of result")
        _same(self, a.dtype.bits, r.dtype.bits, "bits of result")


# ---------------------------------------------------------------- shape


class Broadcast(Op):
    """Repeats along axes of extent 1; a scalar becomes any shape. Otherwise ranks are equal."""

    NAME = "broadcast"
    OPERANDS = (1, 1)
    RESULTS = (1, 1)

    def verify(self) -> None:
        a, r = _tile(self, self.operands[0], "operand"), _tile(self, self.result, "result")
        _same(self, a.dtype, r.dtype, "dtype of result")
        self.require(r.rank <= MAX_TILE_RANK, f"result: expected rank <= {MAX_TILE_RANK}, got {r}")
        if a.shape:
            ok = a.rank == r.rank and all(x in (y, 1) for x, y in zip(a.shape, r.shape, strict=True))
            self.require(ok, f"shape: cannot broadcast {a} to {r}")


class Reshape(Op):
    """The same elements in row-major order with another shape."""

    NAME = "reshape"
    OPERANDS = (1, 1)
    RESULTS = (1, 1)

    def verify(self) -> None:
        a, r = _tile(self, self.operands[0], "operand"), _tile(self, self.result, "result")
        _same(self, a.dtype, r.dtype, "dtype of result")
        _same(self, a.numel, r.numel, "number of elements of result")
        self.require(r.rank <= MAX_TILE_RANK, f"result: expected rank <= {MAX_TILE_RANK}, got {r}")


class Permute(Op):
    """Axis k of the result is axis `axes[k]` of the operand."""

    NAME = "permute"
    OPERANDS = (1, 1)
    RESULTS = (1, 1)
    ATTRS = {"axes": ...}

    def verify(self) -> None:
        a, r = _tile(self, self.operands[0], "operand"), _tile(self, self.result, "result")
        axes = self.attrs["axes"]
        self.require(
            isinstance(axes, tuple) and sorted(axes) == list(range(a.rank)),
            f"axes: expected a permutation of {a.rank} axes, got {_show(axes)}",
        )
        assert isinstance(axes, tuple)
        _same(self, TileType(a.dtype, tuple(a.shape[k] for k in axes)), r, "result")


class Reduce(Op):
    """Folds one axis away: shape loses `axis`. The order of folding is the target's own, but fixed for
    a given shape, so a run gives the same bits as the one before."""

    NAME = "reduce"
    OPERANDS = (1, 1)
    RESULTS = (1, 1)
    ATTRS = {"fn": ..., "axis": ...}

    def verify(self) -> None:
        a, r = _tile(self, self.operands[0], "operand"), _tile(self, self.result, "result")
        axis, fn = self.attrs["axis"], self.attrs["fn"]
        self.require(isinstance(fn, Fold), f"fn: expected a Fold, got {fn!r}")
        self.require(isinstance(axis, int) and 0 <= axis < a.rank, f"axis: expected 0 to {a.rank - 1}, got {axis}")
        assert isinstance(axis, int)
        _same(self, TileType(a.dtype, a.shape[:axis] + a.shape[axis + 1 :]), r, "result")
        if fn in (Fold.AND, Fold.OR, Fold.XOR):
            self.require(not a.dtype.is_float, f"operand of {fn.value}: expected bool or integers, got {a}")
        else:
            self.require(
                not a.dtype.is_bool and (not a.dtype.is_float or a.dtype.bits > 8),
                f"operand: expected numbers, got {a}",
            )


def _axis_of(op: Op, t: TileType) -> int:
    axis = op.attrs["axis"]
    op.require(0 <= axis < t.rank, f"axis: expected 0 to {t.rank - 1}, got {axis}")
    return int(axis)


def _combiner(op: Op) -> list[TileType]:
    """Checks tiles of one shape and the block that combines two elements of each; gives the tiles' types."""
    tiles = [_tile(op, v, f"tile {k}") for k, v in enumerate(op.operands)]
    for k, t in enumerate(tiles[1:], 1):
        _same(op, tiles[0].shape, t.shape, f"shape of tile {k}")
    elements = [t.with_shape(()) for t in tiles]
    (block,) = op.blocks
    _same(op, elements * 2, [v.type for v in block.args], "block arguments")
    for inner in block.ops:
        op.require(isinstance(inner, COMBINER), f"block: expected elementwise ops of scalars, got {inner.NAME}")
        for v in inner.operands:
            home = v.owner if isinstance(v.owner, Block) else v.owner.parent
            op.require(home is block, f"block: {inner.NAME} uses a value from outside")
    return tiles


class ReduceWith(Op):
    """Folds one axis of tiles of one shape away by the function in its block, which takes an element of each
    tile, then another of each, and ends in `yield` of the combined ones. The function is associative and
    commutative; in which order it is applied is the target's own, fixed for a shape. The block holds
    elementwise ops of scalars and uses nothing from outside."""

    NAME = "reduce_with"
    OPERANDS = (1, None)
    RESULTS = (1, None)
    ATTRS = {"axis": ...}
    N_BLOCKS = 1

    def verify(self) -> None:
        tiles = _combiner(self)
        axis = _axis_of(self, tiles[0])
        want = [t.with_shape(t.shape[:axis] + t.shape[axis + 1 :]) for t in tiles]
        _same(self, want, [r.type for r in self.results], "results")


class ScanWith(Op):
    """Inclusive scan along an axis by the function in its block, as of `reduce_with`: result[k] combines
    elements 0 to k, in this order, or with `reverse` elements n-1 down to k. The function is associative."""

    NAME = "scan_with"
    OPERANDS = (1, None)
    RESULTS = (1, None)
    ATTRS = {"axis": ..., "reverse": False}
    N_BLOCKS = 1

    def verify(self) -> None:
        tiles = _combiner(self)
        _axis_of(self, tiles[0])
        _same(self, tiles, [r.type for r in self.results], "results")


class Sort(Op):
    """Sorts along an axis by the first operand and moves the others alike. Stable, `descending` too: equal keys
    keep their order. NaN counts as the greatest; the two zeros are equal."""

    NAME = "sort"
    OPERANDS = (1, None)
    RESULTS = (1, None)
    ATTRS = {"axis": ..., "descending": False}

    def verify(self) -> None:
        tiles = [_tile(self, v, f"tile {k}") for k, v in enumerate(self.operands)]
        for k, t in enumerate(tiles[1:], 1):
            _same(self, tiles[0].shape, t.shape, f"shape of tile {k}")
        _axis_of(self, tiles[0])
        _same(self, tiles, [r.type for r in self.results], "results")


# ---------------------------------------------------------------- pieces of tiles


class Take(Op):
    """result[…, k, …] = x[…, index[…, k, …], …] along `axis`. Operands: x, index (integers), of equal extents but
    for the axis. An index counts modulo the extent of x, so that every index means something; a `check` in
    front says where one must not wrap."""

    NAME = "take"
    OPERANDS = (2, 2)
    RESULTS = (1, 1)
    ATTRS = {"axis": ...}

    def verify(self) -> None:
        x, index = _tile(self, self.operands[0], "x"), _tile(self, self.operands[1], "index")
        axis = _axis_of(self, x)
        self.require(index.dtype.is_int, f"index: expected integers, got {index}")
        self.require(index.rank == x.rank, f"index: expected rank {x.rank} for {x}, got {index}")
        want = (*x.shape[:axis], index.shape[axis], *x.shape[axis + 1 :])
        _same(self, want, index.shape, "shape of index")
        _same(self, index.with_dtype(x.dtype), self.result.type, "result")


def _piece(op: Op, x: TileType, piece: TileType, indices: Sequence[Value]) -> None:
    op.require(piece.rank == x.rank, f"piece: expected rank {x.rank} for {x}, got {piece}")
    _same(op, x.dtype, piece.dtype, "dtype of piece")
    op.require(
        all(m <= n for m, n in zip(piece.shape, x.shape, strict=True)), f"piece: expected a part of {x}, got {piece}"
    )
    op.require(len(indices) == x.rank, f"index: expected {x.rank} for {x}, got {len(indices)}")
    for k, v in enumerate(indices):
        _index(op, v, f"index {k}")


class Extract(Op):
    """A piece of a tile: result[i, …] = x[index0 · shape0 + i, …]. Operands: x, then one tile index per axis,
    which counts modulo the number of pieces (as of `take`)."""

    NAME = "extract"
    OPERANDS = (1, None)
    RESULTS = (1, 1)

    def verify(self) -> None:
        x = _tile(self, self.operands[0], "x")
        _piece(self, x, _tile(self, self.result, "result"), self.operands[1:])


class Insert(Op):
    """x with the piece at a tile index replaced. Operands: x, piece, then one tile index per axis as of
    `extract`."""

    NAME = "insert"
    OPERANDS = (2, None)
    RESULTS = (1, 1)

    def verify(self) -> None:
        x = _tile(self, self.operands[0], "x")
        _piece(self, x, _tile(self, self.operands[1], "piece"), self.operands[2:])
        _same(self, x, self.result.type, "result")


MMA_TYPES: Final = {
    "f32": ("f32",), "f64": ("f64",), "f16": ("f32",), "bf16": ("f32",),
    "f8e4m3": ("f32",), "f8e5m2": ("f32",), "i8": ("i32",), "u8": ("i32",),
}  # fmt: skip


class Mma(Op):
    """acc + a @ b for a [M, K], b [K, N], acc [M, N] (or with one equal leading batch axis). `precision` is for
    f32 alone."""

    NAME = "mma"
    OPERANDS = (3, 3)
    RESULTS = (1, 1)
    ATTRS = {"precision": Precision.IEEE}

    def verify(self) -> None:
        a, b, acc = (_tile(self, v, r) for v, r in zip(self.operands, ("a", "b", "acc"), strict=True))
        self.require(
            a.rank in (2, 3) and b.rank == a.rank and acc.rank == a.rank,
            f"rank: expected 2 or 3 for all, got {a}, {b}, {acc}",
        )
        _same(self, a.dtype, b.dtype, "dtype of b")
        _same(self, a.shape[:-2], b.shape[:-2], "batch axis of b")
        _same(self, a.shape[-1], b.shape[-2], "inner extent of b")
        want = (*a.shape[:-2], a.shape[-2], b.shape[-1])
        _same(self, want, acc.shape, "shape of acc")
        allowed = MMA_TYPES.get(a.dtype.name, ())
        self.require(
            acc.dtype.name in allowed,
            f"dtypes: no mma of {a.dtype} with accumulator {acc.dtype}; it takes {' or '.join(allowed) or 'none'}",
        )
        precision = self.attrs["precision"]
        self.require(
            precision is Precision.IEEE or a.dtype.name == "f32",
            f"precision: {precision.value} is for f32, got {a.dtype}",
        )
        _same(self, acc, self.result.type, "result")


# ---------------------------------------------------------------- views and tiles of memory


class PeerView(Op):
    """The part of a symmetric object that lies on `rank`. Operands: object, rank. The rank is checked
    (by a `check` op that the frontend puts in front unless it is proven)."""

    NAME = "peer_view"
    OPERANDS = (2, 2)
    RESULTS = (1, 1)

    def verify(self) -> None:
        t = self.operands[0].type
        self.require(isinstance(t, SymmetricType), f"object: expected symmetric, got {t}")
        assert isinstance(t, SymmetricType)
        _index(self, self.operands[1], "rank")
        _same(self, t.view, self.result.type, "result")


class Field(Op):
    """A named field of a communication object (see its type)."""

    NAME = "field"
    OPERANDS = (1, 1)
    RESULTS = (1, 1)
    ATTRS = {"field": ...}

    def verify(self) -> None:
        t = self.operands[0].type
        self.require(isinstance(t, ObjectType), f"object: expected a communication object, got {t}")
        assert isinstance(t, ObjectType)
        name = self.attrs["field"]
        self.require(name in t.fields, f"field: expected one of {', '.join(t.fields)}, got {name}")
        _same(self, t.fields[str(name)], self.result.type, "result")


def _access(op: Op, view: ViewType, indices: list[Value], tile: TileType) -> None:
    op.require(len(indices) == view.rank, f"index: expected {view.rank} for {view}, got {len(indices)}")
    for k, v in enumerate(indices):
        _index(op, v, f"index {k}")
    op.require(tile.rank == view.rank, f"tile: expected rank {view.rank} for {view}, got {tile}")
    _same(op, view.dtype, tile.dtype, "dtype of tile")


def _view(op: Op) -> ViewType:
    t = op.operands[0].type
    op.require(isinstance(t, ViewType), f"view: expected a view, got {t}")
    assert isinstance(t, ViewType)
    return t


def _derived(op: Op, view: ViewType, rank: int) -> None:
    """The result is a view of the same memory; promises are its own, and it owns no partition."""
    t = op.result.type
    op.require(isinstance(t, ViewType), f"result: expected a view, got {t}")
    assert isinstance(t, ViewType)
    same = (view.dtype, rank, view.access, view.space, None)
    op.require(
        (t.dtype, t.rank, t.access, t.space, t.partition) == same,
        f"result: expected a view of rank {rank} with dtype, access and space of {view}, got {t}",
    )


class ViewStride(Op):
    """Distance in elements between neighbours along `axis` of a view or symmetric object (i64)."""

    NAME = "view_stride"
    OPERANDS = (1, 1)
    RESULTS = (1, 1)
    ATTRS = {"axis": ...}

    def verify(self) -> None:
        Extent.verify(self)  # type: ignore[arg-type]


class ViewSlice(Op):
    """Every step-th element from `start` along each axis, `extent` of them. Operands: view, then the starts,
    the extents and the steps, one i64 per axis each. Whoever makes it has checked that it lies inside."""

    NAME = "view_slice"
    OPERANDS = (1, None)
    RESULTS = (1, 1)

    def verify(self) -> None:
        view = _view(self)
        expected = 1 + 3 * view.rank
        self.require(len(self.operands) == expected, f"operands: expected {expected}, got {len(self.operands)}")
        for k, v in enumerate(self.operands[1:]):
            _index(self, v, ("start", "extent", "step")[k // view.rank] + f" {k % view.rank}")
        _derived(self, view, view.rank)


class ViewPermute(Op):
    """Axis k of the result is axis `axes[k]` of the view."""

    NAME = "view_permute"
    OPERANDS = (1, 1)
    RESULTS = (1, 1)
    ATTRS = {"axes": ...}

    def verify(self) -> None:
        view, axes = _view(self), self.attrs["axes"]
        self.require(
            sorted(axes) == list(range(view.rank)),
            f"axes: expected a permutation of {view.rank} axes, got {_show(axes)}",
        )
        _derived(self, view, view.rank)


class ViewReshape(Op):
    """The elements of a view without gaps, in row-major order, with other extents. Operands: view, then one i64
    per axis of the result. Whoever makes it has checked that the view has no gaps and that the numbers agree."""

    NAME = "view_reshape"
    OPERANDS = (1, None)
    RESULTS = (1, 1)

    def verify(self) -> None:
        view = _view(self)
        for k, v in enumerate(self.operands[1:]):
            _index(self, v, f"extent {k}")
        _derived(self, view, len(self.operands) - 1)


class Gather(Op):
    """A tile whose slices along `axis` are chosen by a tile of indices. Operands: view, indices (an integer tile
    of one axis), then one tile index per axis but `axis`.

    result[…, k, …] = view[…, indices[k], …]; `padding` where an index, or the rest of the tile, lies outside.
    """

    NAME = "gather"
    OPERANDS = (2, None)
    RESULTS = (1, 1)
    ATTRS = {"axis": ..., "padding": Padding.ZERO, "bounds": Bounds.UNKNOWN}
    EFFECTS = frozenset({Effect.READ})

    def verify(self) -> None:
        view = _view(self)
        self.require(view.readable, f"view: expected a readable view, got {view}")
        _gathered(self, view, self.operands[1], self.operands[2:], _tile(self, self.result, "result"))


class Scatter(Op):
    """Writes the slices of a tile to the places along `axis` that a tile of indices names, in order: of equal
    indices the last one stays. Operands: view, tile, indices, then one tile index per axis but `axis`. What lies
    outside of the view is not written."""

    NAME = "scatter"
    OPERANDS = (3, None)
    ATTRS = {"axis": ..., "bounds": Bounds.UNKNOWN}
    EFFECTS = frozenset({Effect.WRITE})

    def verify(self) -> None:
        view = _view(self)
        self.require(view.writable, f"view: expected a writable view, got {view}")
        _gathered(self, view, self.operands[2], self.operands[3:], _tile(self, self.operands[1], "tile"))


def _gathered(op: Op, view: ViewType, chosen: Value, indices: list[Value], tile: TileType) -> None:
    axis = op.attrs["axis"]
    op.require(0 <= axis < view.rank, f"axis: expected 0 to {view.rank - 1}, got {axis}")
    op.require(tile.rank == view.rank, f"tile: expected rank {view.rank} for {view}, got {tile}")
    _same(op, view.dtype, tile.dtype, "dtype of tile")
    t = _tile(op, chosen, "indices")
    op.require(
        t.dtype.is_int and t.shape == (tile.shape[axis],),
        f"indices: expected integers of shape [{tile.shape[axis]}], got {t}",
    )
    op.require(len(indices) == view.rank - 1, f"index: expected {view.rank - 1} beside axis {axis}, got {len(indices)}")
    for k, v in enumerate(indices):
        _index(op, v, f"index {k}")


class Load(Op):
    """A tile of a view. Operands: view, then one tile index per axis.

    result[i, …] = view[index0 · shape0 + i, …]; elements outside the view are `padding`. An index is
    in bounds if 0 <= index < max(num_tiles, 1): tile 0 of an empty axis is all padding, so that a
    constant 0 needs no check.
    """

    NAME = "load"
    OPERANDS = (1, None)
    RESULTS = (1, 1)
    ATTRS = {"padding": Padding.ZERO, "bounds": Bounds.UNKNOWN, "proxy": Proxy.GENERIC}
    EFFECTS = frozenset({Effect.READ})

    def verify(self) -> None:
        t = self.operands[0].type
        self.require(isinstance(t, ViewType) and t.readable, f"view: expected a readable view, got {t}")
        assert isinstance(t, ViewType)
        tile = _tile(self, self.result, "result")
        _access(self, t, self.operands[1:], tile)
        padding = self.attrs["padding"]
        self.require(isinstance(padding, Padding), f"padding: expected a Padding, got {padding!r}")
        if padding in (Padding.INF, Padding.NEG_INF, Padding.NAN, Padding.NEG_ZERO):
            self.require(tile.dtype.is_float, f"padding: {padding.value} needs a float dtype, got {tile}")
        if padding in (Padding.INF, Padding.NEG_INF):
            self.require(
                tile.dtype.name != "f8e4m3",
                f"padding: f8e4m3 has no infinity, got {padding.value}; load, cast, then select",
            )


class Store(Op):
    """Writes a tile to a view, clipped at its edge. Operands: view, tile, then one tile index per axis."""

    NAME = "store"
    OPERANDS = (2, None)
    ATTRS = {"bounds": Bounds.UNKNOWN, "proxy": Proxy.GENERIC}
    EFFECTS = frozenset({Effect.WRITE})

    def verify(self) -> None:
        t = self.operands[0].type
        self.require(isinstance(t, ViewType) and t.writable, f"view: expected a writable view, got {t}")
        assert isinstance(t, ViewType)
        _access(self, t, self.operands[2:], _tile(self, self.operands[1], "tile"))


class TileLoad(Op):
    """As `load`, one ordered access per element (relaxed or acquire): what other agents write meanwhile. Elements
    outside the view are 0. Operands as of `load`."""

    NAME = "tile_load"
    OPERANDS = (1, None)
    RESULTS = (1, 1)
    ATTRS = {"bounds": Bounds.UNKNOWN, "order": Order.RELAXED, "scope": ..., "proxy": Proxy.GENERIC}
    EFFECTS = frozenset({Effect.READ})

    def verify(self) -> None:
        view = _view(self)
        self.require(view.readable, f"view: expected a readable view, got {view}")
        _access(self, view, self.operands[1:], _tile(self, self.result, "result"))
        _scope_order(self, (Order.RELAXED, Order.ACQUIRE))
        _peer_scope(self, view.space)

    @property
    def effects(self) -> frozenset[Effect]:
        return _ordered_effects(self)


class TileStore(Op):
    """As `store`, one ordered access per element (relaxed or release). Operands as of `store`."""

    NAME = "tile_store"
    OPERANDS = (2, None)
    ATTRS = {"bounds": Bounds.UNKNOWN, "order": Order.RELAXED, "scope": ..., "proxy": Proxy.GENERIC}
    EFFECTS = frozenset({Effect.WRITE})

    def verify(self) -> None:
        Store.verify(self)  # type: ignore[arg-type]
        _scope_order(self, (Order.RELAXED, Order.RELEASE))
        _peer_scope(self, _view(self).space)

    @property
    def effects(self) -> frozenset[Effect]:
        return _ordered_effects(self)


class AsyncStore(Op):
    """As `store`, by an agent of its own: it starts with what this program has done, may end at any time before
    the transfer is waited for, and what it wrote is ordered before what follows that wait. A kernel's end waits
    for all. `copies`: the tile was loaded for it, and that agent may read the place it was loaded from until it ends.
    Result: the transfer. Operands as of `store`."""

    NAME = "async_store"
    OPERANDS = (2, None)
    RESULTS = (1, 1)
    ATTRS = {"bounds": Bounds.UNKNOWN, "copies": False}
    EFFECTS = frozenset({Effect.WRITE})

    def verify(self) -> None:
        Store.verify(self)  # type: ignore[arg-type]
        self.require(isinstance(self.result.type, TransferType), f"result: expected a transfer, got {self.result.type}")


class WaitTransfer(Op):
    """What follows comes after everything that the transfers did. Operands: transfers; none: all of this program."""

    NAME = "wait_transfer"
    OPERANDS = (0, None)
    EFFECTS = frozenset({Effect.FENCE})

    def verify(self) -> None:
        for k, v in enumerate(self.operands):
            self.require(isinstance(v.type, TransferType), f"operand {k}: expected a transfer, got {v.type}")


class TileAtomic(Op):
    """Combines a tile into a view, one atomic read-modify-write per element, clipped; no old values.
    Operands as of `store`."""

    NAME = "tile_atomic"
    OPERANDS = (2, None)
    ATTRS = {"rmw": ..., "bounds": Bounds.UNKNOWN, "order": Order.RELAXED, "scope": ..., "proxy": Proxy.GENERIC}
    EFFECTS = frozenset({Effect.READ, Effect.WRITE})

    def verify(self) -> None:
        Store.verify(self)  # type: ignore[arg-type]
        _scope_order(self, (Order.RELAXED, Order.RELEASE, Order.ACQUIRE, Order.ACQ_REL))
        t = self.operands[0].type
        assert isinstance(t, ViewType)
        _peer_scope(self, t.space)
        _rmw_dtype(self, t.dtype.is_float, t)

    @property
    def effects(self) -> frozenset[Effect]:
        return _ordered_effects(self)


def _rmw_dtype(op: Op, is_float: bool, t: object) -> None:
    rmw = op.attrs["rmw"]
    op.require(isinstance(rmw, Rmw), f"rmw: expected an Rmw, got {rmw!r}")
    assert isinstance(rmw, Rmw)
    if is_float:
        op.require(rmw in (Rmw.ADDF, Rmw.MIN, Rmw.MAX, Rmw.XCHG), f"rmw: {rmw.value} takes integers, got {t}")
    else:
        op.require(rmw is not Rmw.ADDF, f"rmw: addf takes floats, got {t}")


# ---------------------------------------------------------------- words: single elements with an order


def _word(op: Op, first_index: int, value: Value | None) -> ViewType:
    t = op.operands[0].type
    op.require(isinstance(t, ViewType), f"view: expected a view, got {t}")
    assert isinstance(t, ViewType)
    indices = op.operands[first_index:]
    op.require(len(indices) == t.rank, f"index: expected {t.rank} for {t}, got {len(indices)}")
    for k, v in enumerate(indices):
        _index(op, v, f"index {k}")
    if value is not None:
        _same(op, TileType(t.dtype), value.type, "value")
    if op.attrs["order"] is not Order.WEAK:
        op.require(t.dtype.bits in (8, 16, 32, 64) or t.dtype.is_bool, f"dtype: cannot be accessed atomically: {t}")
    _peer_scope(op, t.space)
    return t


class WordLoad(Op):
    """One element. Operands: view, element indices. Order weak, relaxed or acquire."""

    NAME = "word_load"
    OPERANDS = (1, None)
    RESULTS = (1, 1)
    ATTRS = {"order": ..., "scope": ...}
    EFFECTS = frozenset({Effect.READ})

    def verify(self) -> None:
        _scope_order(self, (Order.WEAK, Order.RELAXED, Order.ACQUIRE))
        t = _word(self, 1, None)
        self.require(t.readable, f"view: expected a readable view, got {t}")
        _same(self, TileType(t.dtype), self.result.type, "result")

    @property
    def effects(self) -> frozenset[Effect]:
        return _ordered_effects(self)


class WordStore(Op):
    """Writes one element. Operands: view, value, element indices. Order weak, relaxed or release."""

    NAME = "word_store"
    OPERANDS = (2, None)
    ATTRS = {"order": ..., "scope": ..., "proxy": Proxy.GENERIC}
    EFFECTS = frozenset({Effect.WRITE})

    def verify(self) -> None:
        _scope_order(self, (Order.WEAK, Order.RELAXED, Order.RELEASE))
        t = _word(self, 2, self.operands[1])
        self.require(t.writable, f"view: expected a writable view, got {t}")

    @property
    def effects(self) -> frozenset[Effect]:
        return _ordered_effects(self)


class WordRmw(Op):
    """Atomic read-modify-write of one element; the result is the old value.
    Operands: view, value, element indices."""

    NAME = "word_rmw"
    OPERANDS = (2, None)
    RESULTS = (1, 1)
    ATTRS = {"rmw": ..., "order": ..., "scope": ..., "proxy": Proxy.GENERIC}
    EFFECTS = frozenset({Effect.READ, Effect.WRITE, Effect.FENCE})

    def verify(self) -> None:
        _scope_order(self, (Order.RELAXED, Order.ACQUIRE, Order.RELEASE, Order.ACQ_REL))
        t = _word(self, 2, self.operands[1])
        self.require(t.readable and t.writable, f"view: expected a view to read and write, got {t}")
        _rmw_dtype(self, t.dtype.is_float, t)
        _same(self, TileType(t.dtype), self.result.type, "result")


class Wait(Op):
    """Bounded wait until `element cmp expected`; the result is the value that satisfied it.

    Operands: view, expected, element indices. Order acquire, or relaxed where a fence follows. At its
    bound the program leaves the kernel with a fault of kind WaitTimeout. `what` names the word for
    people ("ready[slot 3] from rank 1" is built from it, the indices and the view).
    """

    NAME = "wait"
    OPERANDS = (2, None)
    RESULTS = (1, 1)
    ATTRS = {"cmp": ..., "order": Order.ACQUIRE, "scope": ..., "what": ""}
    EFFECTS = frozenset({Effect.READ, Effect.WAIT, Effect.FENCE, Effect.CONTROL})

    def verify(self) -> None:
        _scope_order(self, (Order.RELAXED, Order.ACQUIRE))
        t = _word(self, 2, self.operands[1])
        self.require(t.readable, f"view: expected a readable view, got {t}")
        self.require(isinstance(self.attrs["cmp"], Cmp), f"cmp: expected a Cmp, got {self.attrs['cmp']!r}")
        self.require(t.dtype.is_int and t.dtype.bits >= 32, f"dtype: expected a 32- or 64-bit integer, got {t.dtype}")
        _same(self, TileType(t.dtype), self.result.type, "result")


class WaitAny(Op):
    """Bounded wait until one of several words satisfies `cmp`; the result (i64) is the position of the first that
    does, in the order given. Operands, for each word: view, expected, element indices. What follows is ordered
    after the word that satisfied it, and no other."""

    NAME = "wait_any"
    OPERANDS = (2, None)
    RESULTS = (1, 1)
    ATTRS = {"cmp": ..., "order": Order.ACQUIRE, "scope": ..., "what": ""}
    EFFECTS = frozenset({Effect.READ, Effect.WAIT, Effect.FENCE, Effect.CONTROL})

    def verify(self) -> None:
        _scope_order(self, (Order.RELAXED, Order.ACQUIRE))
        _index(self, self.result, "result")
        at = 0
        while at < len(self.operands):
            t = self.operands[at].type
            self.require(isinstance(t, ViewType) and t.readable, f"operand {at}: expected a readable view, got {t}")
            assert isinstance(t, ViewType)
            self.require(
                t.dtype.is_int and t.dtype.bits >= 32, f"dtype: expected a 32- or 64-bit integer, got {t.dtype}"
            )
            _peer_scope(self, t.space)
            end = at + 2 + t.rank
            self.require(end <= len(self.operands), f"operands: expected {end}, got {len(self.operands)}")
            _same(self, TileType(t.dtype), self.operands[at + 1].type, "expected value")
            for k, v in enumerate(self.operands[at + 2 : end]):
                _index(self, v, f"index {k}")
            at = end

    def words(self) -> list[tuple[Value, Value, list[Value]]]:
        """(view, expected, indices) of each word."""
        found, at = [], 0
        while at < len(self.operands):
            t = self.operands[at].type
            assert isinstance(t, ViewType)
            end = at + 2 + t.rank
            found.append((self.operands[at], self.operands[at + 1], self.operands[at + 2 : end]))
            at = end
        return found


class Fence(Op):
    """Orders every access before it with every access after it (acq_rel), at `scope`."""

    NAME = "fence"
    ATTRS = {"scope": ...}
    EFFECTS = frozenset({Effect.FENCE})

    def verify(self) -> None:
        self.require(isinstance(self.attrs["scope"], Scope), f"scope: expected a Scope, got {self.attrs['scope']!r}")


class FenceAlias(Op):
    """Orders what this program did through one address of some memory with what it does through another one: crosses
    the alias and the multicast proxy, both ways. Orders no agents by itself. Operand and result: a token, or none."""

    NAME = "fence_alias"
    OPERANDS = (0, 1)
    RESULTS = (0, 1)
    EFFECTS = frozenset({Effect.FENCE})

    def verify(self) -> None:
        for v in [*self.operands, *self.results]:
            self.require(isinstance(v.type, TokenType), f"token: expected a token, got {v.type}")


class LaunchWords(Op):
    """Words of this launch on this device, u64 [8], zero when the launch starts; for barriers over the
    programs of one device."""

    NAME = "launch_words"
    RESULTS = (1, 1)

    def verify(self) -> None:
        t = self.result.type
        self.require(
            isinstance(t, ViewType) and t.rank == 1 and t.dtype.name == "u64" and t.space is Space.DEVICE,
            f"result: expected view of u64, rank 1, device, got {t}",
        )


class Suspend(Op):
    """Lets other programs run; has no other meaning. Put in front of loops that poll, and with `continues` at their
    back edges: there the time that a wait may take counts on from the suspension before."""

    NAME = "suspend"
    ATTRS = {"continues": False}
    EFFECTS = frozenset({Effect.WAIT})


# ---------------------------------------------------------------- checks and output


class Check(Op):
    """Leaves the kernel with a fault of `kind` unless `condition`. `message` is for people. Up to two
    further i64 operands are recorded as (got, limit) and shown in the report."""

    NAME = "check"
    OPERANDS = (1, 3)
    ATTRS = {"kind": CheckKind.ASSERT, "message": ""}
    EFFECTS = frozenset({Effect.CONTROL})

    def verify(self) -> None:
        c = _tile(self, self.operands[0], "condition")
        self.require(c.is_scalar and c.dtype.is_bool, f"condition: expected a bool scalar, got {c}")
        self.require(len(self.operands) <= 3, f"operands: expected at most 3, got {len(self.operands)}")
        for k, v in enumerate(self.operands[1:]):
            _index(self, v, ("got", "limit")[k])
        self.require(
            isinstance(self.attrs["kind"], CheckKind), f"kind: expected a CheckKind, got {self.attrs['kind']!r}"
        )


class Print(Op):
    """Prints `prefix`, rank, program and the operands (tiles), one line per op."""

    NAME = "print"
    OPERANDS = (0, None)
    ATTRS = {"prefix": ""}
    EFFECTS = frozenset({Effect.OUTPUT})

    def verify(self) -> None:
        for k, v in enumerate(self.operands):
            _tile(self, v, f"operand {k}")


class Mark(Op):
    """Writes down that the program has come here, with the device's time: for timelines of a run, and of no other
    meaning. Operands: the address of the buffer, the number of the launch, and for a word its view, the value that it
    gets or is waited for, and indices; or a pointer to it and the value. `what` names the word for people."""

    NAME = "mark"
    OPERANDS = (2, None)
    ATTRS = {"moment": ..., "what": ""}
    EFFECTS = frozenset({Effect.OUTPUT})

    def verify(self) -> None:
        _index(self, self.operands[0], "buffer")
        _index(self, self.operands[1], "number")
        self.require(
            isinstance(self.attrs["moment"], Moment), f"moment: expected a Moment, got {self.attrs['moment']!r}"
        )
        if len(self.operands) == 2:
            return
        self.require(len(self.operands) > 3, "word: expected a value beside it, got none")
        word, value = self.operands[2].type, self.operands[3]
        _index(self, value, "value")
        rank = word.rank if isinstance(word, ViewType) else 0
        self.require(
            isinstance(word, ViewType) or (isinstance(word, PointerType) and not word.shape),
            f"word: expected a view or one pointer, got {word}",
        )
        self.require(
            len(self.operands) == 4 + rank, f"indices: expected {rank} for {word}, got {len(self.operands) - 4}"
        )
        for k, index in enumerate(self.operands[4:]):
            _index(self, index, f"index {k}")


# ---------------------------------------------------------------- control flow


def _carried(op: Op, values: Sequence[Value]) -> None:
    """Control flow carries what lives in registers; a view or an object is a name of memory."""
    for v in values:
        op.require(
            isinstance(v.type, TileType | PointerType | TokenType),
            f"carried value: expected a tile, pointer or token, got {v.type}",
        )


class For(Op):
    """for iv in range(lo, hi, step) with carried values.

    Operands: lo, hi, step (integer scalars of one type; step > 0), then the initial values. The block
    takes iv and the carried values and ends in `continue`, `break` or `return`. Results are the values
    carried out. Zero trips give the initial values.
    """

    NAME = "for"
    OPERANDS = (3, None)
    RESULTS = (0, None)
    ATTRS = {"stages": 1}
    N_BLOCKS = 1

    def verify(self) -> None:
        lo = _tile(self, self.operands[0], "lo")
        self.require(lo.is_scalar and lo.dtype.is_int, f"lo: expected an integer scalar, got {lo}")
        for role, v in zip(("hi", "step"), self.operands[1:3], strict=True):
            _same(self, lo, v.type, role)
        carried = [v.type for v in self.operands[3:]]
        _same(self, [lo, *carried], [a.type for a in self.blocks[0].args], "block arguments")
        _same(self, carried, [r.type for r in self.results], "results")
        _carried(self, self.results)
        self.require(self.attrs["stages"] >= 1, f"stages: expected at least 1, got {self.attrs['stages']}")


class Loop(Op):
    """Repeats its block until `break`. Operands: initial values; the block takes the carried values.
    The types of the results are those of `break`'s operands, which may differ in number and type from
    the carried ones."""

    NAME = "loop"
    OPERANDS = (0, None)
    RESULTS = (0, None)
    N_BLOCKS = 1

    def verify(self) -> None:
        _same(self, [v.type for v in self.operands], [a.type for a in self.blocks[0].args], "block arguments")
        _carried(self, [*self.operands, *self.results])


class If(Op):
    """Operand: bool scalar. Two blocks without arguments; an arm that falls through ends in `yield`."""

    NAME = "if"
    OPERANDS = (1, 1)
    RESULTS = (0, None)
    N_BLOCKS = 2

    def verify(self) -> None:
        c = _tile(self, self.operands[0], "condition")
        self.require(c.is_scalar and c.dtype.is_bool, f"condition: expected a bool scalar, got {c}")
        for block in self.blocks:
            self.require(not block.args, "blocks: expected no arguments")
        _carried(self, self.results)


class Yield(Op):
    """Ends an arm of `if` with its results, and the block of `reduce_with` and `scan_with` with what it combined."""

    NAME = "yield"
    OPERANDS = (0, None)
    TERMINATOR = True

    def verify(self) -> None:
        owner = self.parent.parent if self.parent is not None else None
        if isinstance(owner, ReduceWith | ScanWith):
            elements: list[Any] = [TileType(v.type.dtype) for v in owner.operands if isinstance(v.type, TileType)]
            _same(self, elements, [v.type for v in self.operands], "operands")
            return
        self.require(
            isinstance(owner, If),
            f"place: expected an arm of if, got {owner.NAME if owner is not None else 'the kernel'}",
        )
        assert owner is not None
        _same(self, [r.type for r in owner.results], [v.type for v in self.operands], "operands")


COMBINER: Final = (Const, UnaryOp, BinaryOp, CompareOp, Select, Fma, Cast, Bitcast, Yield)
"""What the block of `reduce_with` and `scan_with` may hold."""


def enclosing_loop(op: Op) -> For | Loop | None:
    """The innermost loop around `op`."""
    block = op.parent
    while block is not None and block.parent is not None:
        if isinstance(block.parent, For | Loop):
            return block.parent
        block = block.parent.parent
    return None


class Continue(Op):
    """Next trip of the innermost loop with these carried values."""

    NAME = "continue"
    OPERANDS = (0, None)
    TERMINATOR = True
    EFFECTS = frozenset({Effect.CONTROL})

    def verify(self) -> None:
        loop = enclosing_loop(self)
        self.require(loop is not None, "place: expected inside a loop")
        assert loop is not None
        carried = loop.operands[3:] if isinstance(loop, For) else loop.operands
        _same(self, [v.type for v in carried], [v.type for v in self.operands], "operands")


class Break(Op):
    """Leaves the innermost loop with these results."""

    NAME = "break"
    OPERANDS = (0, None)
    TERMINATOR = True
    EFFECTS = frozenset({Effect.CONTROL})

    def verify(self) -> None:
        loop = enclosing_loop(self)
        self.require(loop is not None, "place: expected inside a loop")
        assert loop is not None
        _same(self, [r.type for r in loop.results], [v.type for v in self.operands], "operands")


class Return(Op):
    """Ends the program."""

    NAME = "return"
    TERMINATOR = True
    EFFECTS = frozenset({Effect.CONTROL})

    def verify(self) -> None:
        self.require(not self.operands, f"operands: expected none, got {len(self.operands)}")


# ---------------------------------------------------------------- unsafe: raw pointers and tokens


class NewToken(Op):
    """A token that orders nothing yet."""

    NAME = "new_token"
    RESULTS = (1, 1)

    def verify(self) -> None:
        self.require(isinstance(self.result.type, TokenType), f"result: expected a token, got {self.result.type}")


class JoinTokens(Op):
    """A token after all of the operands."""

    NAME = "join_tokens"
    OPERANDS = (0, None)
    RESULTS = (1, 1)

    def verify(self) -> None:
        for v in [*self.operands, self.result]:
            self.require(isinstance(v.type, TokenType), f"operand: expected a token, got {v.type}")


class PtrOffset(Op):
    """pointer + offset, in elements. Operands: pointer tile, integer tile of the same shape."""

    NAME = "ptr_offset"
    OPERANDS = (2, 2)
    RESULTS = (1, 1)

    def verify(self) -> None:
        p, o = self.operands[0].type, _tile(self, self.operands[1], "offset")
        self.require(isinstance(p, PointerType), f"pointer: expected a pointer, got {p}")
        assert isinstance(p, PointerType)
        self.require(
            o.dtype.is_int and o.shape == p.shape, f"offset: expected integers of shape {_show(p.shape)}, got {o}"
        )
        _same(self, p, self.result.type, "result")


class PtrBroadcast(Op):
    """Broadcast of a pointer tile, as `broadcast`."""

    NAME = "ptr_broadcast"
    OPERANDS = (1, 1)
    RESULTS = (1, 1)

    def verify(self) -> None:
        p, r = self.operands[0].type, self.result.type
        self.require(
            isinstance(p, PointerType) and isinstance(r, PointerType), f"pointer: expected pointers, got {p}, {r}"
        )
        assert isinstance(p, PointerType)
        assert isinstance(r, PointerType)
        self.require(p.dtype == r.dtype and p.space is r.space, f"result: expected the dtype and space of {p}, got {r}")
        ok = not p.shape or (
            len(p.shape) == len(r.shape) and all(x in (y, 1) for x, y in zip(p.shape, r.shape, strict=True))
        )
        self.require(ok, f"shape: cannot broadcast {p} to {r}")


class Unicast(Op):
    """Classifies a pointer as peer memory: the same address, space PEER. Grants nothing."""

    NAME = "unicast"
    OPERANDS = (1, 1)
    RESULTS = (1, 1)

    def verify(self) -> None:
        p, r = self.operands[0].type, self.result.type
        self.require(isinstance(p, PointerType), f"pointer: expected a pointer, got {p}")
        assert isinstance(p, PointerType)
        _same(self, PointerType(p.dtype, p.shape, Space.PEER), r, "result")


def _pointer_access(op: Op, tail: int) -> PointerType:
    """Checks pointer, optional mask (attr `masked`) and optional token (attr `ordered`) operands."""
    p = op.operands[0].type
    op.require(isinstance(p, PointerType), f"pointer: expected a pointer, got {p}")
    assert isinstance(p, PointerType)
    expected = tail + int(bool(op.attrs["masked"])) + int(bool(op.attrs["ordered"]))
    op.require(len(op.operands) == expected, f"operands: expected {expected}, got {len(op.operands)}")
    if op.attrs["masked"]:
        m = _tile(op, op.operands[tail], "mask")
        op.require(m.dtype.is_bool and m.shape == p.shape, f"mask: expected bool of shape {_show(p.shape)}, got {m}")
    if op.attrs["ordered"]:
        t = op.operands[-1].type
        op.require(isinstance(t, TokenType), f"token: expected a token, got {t}")
    op.require(isinstance(op.results[-1].type, TokenType), "result: the last one is a token")
    _peer_scope(op, p.space)
    return p


class PtrLoad(Op):
    """Loads through a pointer tile. Operands: pointers, fill (a tile), [mask], [token].
    Results: tile, token. Masked-off elements are `fill`."""

    NAME = "ptr_load"
    OPERANDS = (2, 4)
    RESULTS = (2, 2)
    ATTRS = {"order": ..., "scope": ..., "masked": False, "ordered": False}
    EFFECTS = frozenset({Effect.READ})

    def verify(self) -> None:
        _scope_order(self, (Order.WEAK, Order.RELAXED, Order.ACQUIRE))
        p = _pointer_access(self, 2)
        _same(self, TileType(p.dtype, p.shape), self.operands[1].type, "fill")
        _same(self, TileType(p.dtype, p.shape), self.results[0].type, "result")

    @property
    def effects(self) -> frozenset[Effect]:
        return _ordered_effects(self)


class PtrStore(Op):
    """Stores through a pointer tile. Operands: pointers, tile, [mask], [token]. Result: token."""

    NAME = "ptr_store"
    OPERANDS = (2, 4)
    RESULTS = (1, 1)
    ATTRS = {"order": ..., "scope": ..., "masked": False, "ordered": False}
    EFFECTS = frozenset({Effect.WRITE})

    def verify(self) -> None:
        _scope_order(self, (Order.WEAK, Order.RELAXED, Order.RELEASE))
        p = _pointer_access(self, 2)
        _same(self, TileType(p.dtype, p.shape), self.operands[1].type, "tile")

    @property
    def effects(self) -> frozenset[Effect]:
        return _ordered_effects(self)


class PtrRmw(Op):
    """Atomic read-modify-write through a pointer tile. Operands: pointers, tile, [mask], [token].
    Results: old values (undefined where masked off), token."""

    NAME = "ptr_rmw"
    OPERANDS = (2, 4)
    RESULTS = (2, 2)
    ATTRS = {"rmw": ..., "order": ..., "scope": ..., "masked": False, "ordered": False}
    EFFECTS = frozenset({Effect.READ, Effect.WRITE})

    def verify(self) -> None:
        _scope_order(self, (Order.RELAXED, Order.ACQUIRE, Order.RELEASE, Order.ACQ_REL))
        p = _pointer_access(self, 2)
        _same(self, TileType(p.dtype, p.shape), self.operands[1].type, "tile")
        _same(self, TileType(p.dtype, p.shape), self.results[0].type, "result")
        _rmw_dtype(self, p.dtype.is_float, p)

    @property
    def effects(self) -> frozenset[Effect]:
        return _ordered_effects(self)


class PtrCas(Op):
    """Atomic compare-and-swap (bitwise compare). Operands: pointers, compare, value, [mask], [token].
    Results: old values, token."""

    NAME = "ptr_cas"
    OPERANDS = (3, 5)
    RESULTS = (2, 2)
    ATTRS = {"order": ..., "scope": ..., "masked": False, "ordered": False}
    EFFECTS = frozenset({Effect.READ, Effect.WRITE})

    def verify(self) -> None:
        _scope_order(self, (Order.RELAXED, Order.ACQUIRE, Order.RELEASE, Order.ACQ_REL))
        p = _pointer_access(self, 3)
        for role, v in (("compare", self.operands[1]), ("value", self.operands[2]), ("result", self.results[0])):
            _same(self, TileType(p.dtype, p.shape), v.type, role)

    @property
    def effects(self) -> frozenset[Effect]:
        return _ordered_effects(self)


# ---------------------------------------------------------------- communication (expanded)


class Notify(Op):
    """Stores the next epoch of `slot` at every peer (or at one), release, system. *Expanded.*
    Operands: signal, slot, [rank]."""

    NAME = "notify"
    OPERANDS = (2, 3)
    EFFECTS = frozenset({Effect.WRITE, Effect.FENCE})

    def verify(self) -> None:
        t = self.operands[0].type
        self.require(isinstance(t, SignalType), f"signal: expected a signal, got {t}")
        self.require(len(self.operands) in (2, 3), f"operands: expected 2 or 3, got {len(self.operands)}")
        for role, v in zip(("slot", "rank"), self.operands[1:], strict=False):
            _index(self, v, role)


class WaitSignal(Op):
    """Waits for the next epoch of `slot` from every other rank (or from one). *Expanded.*
    Operands: signal, slot, [rank]."""

    NAME = "wait_signal"
    OPERANDS = (2, 3)
    EFFECTS = frozenset({Effect.READ, Effect.WAIT, Effect.FENCE, Effect.CONTROL})

    def verify(self) -> None:
        Notify.verify(self)  # type: ignore[arg-type]


class CounterAdd(Op):
    """Adds to the counter word `slot` of `rank`, release, system. *Expanded.*
    Operands: counter, slot, amount, rank."""

    NAME = "counter_add"
    OPERANDS = (4, 4)
    EFFECTS = frozenset({Effect.WRITE, Effect.FENCE})

    def verify(self) -> None:
        t = self.operands[0].type
        self.require(isinstance(t, CounterType), f"counter: expected a counter, got {t}")
        for role, v in zip(("slot", "amount", "rank"), self.operands[1:], strict=True):
            _index(self, v, role)


class CounterWait(Op):
    """Waits for n adds beyond this rank's last completed wait on `slot`. *Expanded.*
    Operands: counter, slot, n."""

    NAME = "counter_wait"
    OPERANDS = (3, 3)
    EFFECTS = frozenset({Effect.READ, Effect.WAIT, Effect.FENCE, Effect.CONTROL})

    def verify(self) -> None:
        t = self.operands[0].type
        self.require(isinstance(t, CounterType), f"counter: expected a counter, got {t}")
        for role, v in zip(("slot", "n"), self.operands[1:], strict=True):
            _index(self, v, role)


class BarrierSync(Op):
    """Same program index of all ranks arrive and leave; with `all_programs`, all programs of all ranks.
    *Expanded.* Operand: barrier."""

    NAME = "barrier_sync"
    OPERANDS = (1, 1)
    ATTRS = {"all_programs": False}
    EFFECTS = frozenset({Effect.READ, Effect.WRITE, Effect.WAIT, Effect.FENCE, Effect.CONTROL})

    def verify(self) -> None:
        t = self.operands[0].type
        self.require(isinstance(t, BarrierType), f"barrier: expected a barrier, got {t}")


class BarrierArrive(Op):
    """The first half of a `barrier_sync` over the same program of all ranks: says that this one is here, and goes
    on. A `barrier_wait` follows in the same block, before the next arrival. *Expanded.* Operand: barrier."""

    NAME = "barrier_arrive"
    OPERANDS = (1, 1)
    EFFECTS = frozenset({Effect.READ, Effect.WRITE, Effect.FENCE})

    def verify(self) -> None:
        BarrierSync.verify(self)  # type: ignore[arg-type]
        _partner(self, (BarrierWait,), 1, "barrier_wait behind it")


class BarrierWait(Op):
    """The second half: all ranks have arrived. *Expanded.* Operand: barrier."""

    NAME = "barrier_wait"
    OPERANDS = (1, 1)
    EFFECTS = BarrierSync.EFFECTS

    def verify(self) -> None:
        BarrierSync.verify(self)  # type: ignore[arg-type]
        _partner(self, (BarrierArrive,), -1, "barrier_arrive in front of it")


def _partner(op: Op, wanted: tuple[type[Op], ...], step: int, what: str) -> None:
    """The other half of a split barrier is the next op on the barrier in this block. An arrival that nobody waits
    for, or a wait without one, would leave ranks a round apart for ever."""
    assert op.parent is not None
    block = op.parent.ops
    barriers = (BarrierSync, BarrierArrive, BarrierWait)
    at = block.index(op) + step
    while 0 <= at < len(block):
        other = block[at]
        if isinstance(other, barriers) and other.operands[0] is op.operands[0]:
            op.require(isinstance(other, wanted), f"order: expected {what}, got {other.NAME}")
            return
        for inner in other.blocks:
            for deep in _all_ops(inner):
                op.require(
                    not (isinstance(deep, barriers) and deep.operands[0] is op.operands[0])
                    and not isinstance(deep, Return),
                    f"order: expected {what}, got {deep.NAME} inside control flow between the halves",
                )
        at += step
    op.fail(f"order: expected {what} in the same block, got none")


def _all_ops(block: Any) -> Any:
    for op in block.ops:
        yield op
        for inner in op.blocks:
            yield from _all_ops(inner)


class SyncPrograms(Op):
    """All programs of this launch on this device arrive and leave. *Expanded.*"""

    NAME = "sync_programs"
    EFFECTS = frozenset({Effect.READ, Effect.WRITE, Effect.WAIT, Effect.FENCE, Effect.CONTROL})


def _mailbox(op: Op) -> MailboxType:
    t = op.operands[0].type
    op.require(isinstance(t, MailboxType), f"mailbox: expected a mailbox, got {t}")
    assert isinstance(t, MailboxType)
    return t


class BoxPost(Op):
    """Posts one tile to every receiver and opens a round. *Expanded.* Operands: mailbox, tile."""

    NAME = "box_post"
    OPERANDS = (2, 2)
    EFFECTS = frozenset({Effect.READ, Effect.WRITE, Effect.WAIT, Effect.FENCE, Effect.CONTROL})

    def verify(self) -> None:
        t = _mailbox(self)
        _same(self, TileType(t.dtype, t.tile_shape), self.operands[1].type, "tile")


class BoxRound(Op):
    """Opens a round with different tiles for some ranks; `box_put` follows, then `box_flush`. *Expanded.*"""

    NAME = "box_round"
    OPERANDS = (1, 1)
    EFFECTS = BoxPost.EFFECTS

    def verify(self) -> None:
        _mailbox(self)


class BoxPut(Op):
    """Puts a tile for one rank into the open round. *Expanded.* Operands: mailbox, tile, rank."""

    NAME = "box_put"
    OPERANDS = (3, 3)
    EFFECTS = frozenset({Effect.WRITE})

    def verify(self) -> None:
        t = _mailbox(self)
        _same(self, TileType(t.dtype, t.tile_shape), self.operands[1].type, "tile")
        _index(self, self.operands[2], "rank")


class BoxFlush(Op):
    """Releases the round on every out-link; links without a tile are marked empty. *Expanded.*"""

    NAME = "box_flush"
    OPERANDS = (1, 1)
    EFFECTS = BoxPost.EFFECTS

    def verify(self) -> None:
        _mailbox(self)


class BoxCollect(Op):
    """Begins collecting the oldest outstanding round. *Expanded.* Operand: mailbox. The tiles follow by
    `box_take`, and `box_release` gives the slots back."""

    NAME = "box_collect"
    OPERANDS = (1, 1)
    EFFECTS = frozenset({Effect.READ})

    def verify(self) -> None:
        _mailbox(self)


class BoxTake(Op):
    """Waits for the tile of `source` in the round being collected and loads it. *Expanded.*
    Operands: mailbox, source. Results: tile, present (bool: false for a link without a tile)."""

    NAME = "box_take"
    OPERANDS = (2, 2)
    RESULTS = (2, 2)
    EFFECTS = frozenset({Effect.READ, Effect.WAIT, Effect.FENCE, Effect.CONTROL})

    def verify(self) -> None:
        t = _mailbox(self)
        _index(self, self.operands[1], "source")
        _same(self, TileType(t.dtype, t.tile_shape), self.results[0].type, "tile")
        r = _tile(self, self.results[1], "present")
        self.require(r.is_scalar and r.dtype.is_bool, f"present: expected a bool scalar, got {r}")


class BoxRelease(Op):
    """Gives the slots of the collected round back. *Expanded.*"""

    NAME = "box_release"
    OPERANDS = (1, 1)
    EFFECTS = BoxPost.EFFECTS

    def verify(self) -> None:
        _mailbox(self)


# ---------------------------------------------------------------- multicast (expanded where no fabric does it)

MULTICAST_DTYPES: Final = ("i32", "u32", "i64", "u64", "f16", "bf16", "f32", "f64")
"""Element types of a multicast object. u32 is i32 bits, so MIN and MAX compare it as signed."""

_ALL: Final = frozenset(MULTICAST_DTYPES)
_INTEGERS: Final = frozenset(("i32", "u32", "i64", "u64"))
_SIGNED: Final = frozenset(("i32", "u32", "i64"))
_HALVES: Final = frozenset(("f16", "bf16"))

LOAD_REDUCTIONS: Final[dict[Rmw, frozenset[str]]] = {
    Rmw.ADD: _INTEGERS, Rmw.ADDF: _ALL - _INTEGERS,
    Rmw.MIN: _SIGNED | _HALVES, Rmw.MAX: _SIGNED | _HALVES,
    Rmw.UMIN: _INTEGERS, Rmw.UMAX: _INTEGERS,
    Rmw.AND: _INTEGERS, Rmw.OR: _INTEGERS, Rmw.XOR: _INTEGERS,
}  # fmt: skip
"""Element types of each reduction of a load-reduce (PTX ISA, `multimem.ld_reduce`)."""

REDUCTIONS: Final[dict[Rmw, frozenset[str]]] = LOAD_REDUCTIONS | {Rmw.MIN: _SIGNED, Rmw.MAX: _SIGNED}
"""Element types of each reduction into the members (PTX ISA, `multimem.red`)."""

BULK_REDUCTIONS: Final[dict[Rmw, frozenset[str]]] = {
    Rmw.ADDF: frozenset(("f32", "f16", "bf16")), Rmw.MIN: _HALVES, Rmw.MAX: _HALVES,
}  # fmt: skip
"""Element types of each reduction of a bulk store (PTX ISA, `multimem.cp.reduce.async.bulk`)."""

BULK_ALIGN: Final = 16
"""Bytes: alignment of a bulk store's address, and what its size is a multiple of."""


def _multicast(op: Op) -> MulticastType:
    t = op.operands[0].type
    op.require(isinstance(t, MulticastType), f"object: expected a multicast object, got {t}")
    assert isinstance(t, MulticastType)
    op.require(
        t.dtype.name in MULTICAST_DTYPES, f"dtype: expected one of {', '.join(MULTICAST_DTYPES)}, got {t.dtype.name}"
    )
    return t


def _multicast_tile(op: Op, indices: list[Value], tile: TileType) -> MulticastType:
    t = _multicast(op)
    op.require(len(indices) == t.rank, f"index: expected {t.rank} for {t}, got {len(indices)}")
    for k, v in enumerate(indices):
        _index(op, v, f"index {k}")
    op.require(tile.rank == t.rank, f"tile: expected rank {t.rank} for {t}, got {tile}")
    _same(op, t.dtype, tile.dtype, "dtype of tile")
    op.require(
        tile.numel * t.dtype.itemsize % 4 == 0,
        f"tile: expected a multiple of 4 bytes, got {tile}, of {t.dtype.itemsize}",
    )
    return t


def _reduction(op: Op, t: MulticastType, table: dict[Rmw, frozenset[str]]) -> None:
    rmw = op.attrs["rmw"]
    allowed = table.get(rmw, frozenset())
    names = ", ".join(n for n in MULTICAST_DTYPES if n in allowed) or "no dtype"
    op.require(t.dtype.name in allowed, f"rmw: {rmw.value} takes {names}, got {t.dtype.name}")


class MulticastLoad(Op):
    """The combination of a tile over all ranks' parts, element by element, in an unspecified order (load-reduce).
    Operands: object, tile indices. f16 and bf16 are added up in f32. *Expanded.*"""

    NAME = "multicast_load"
    OPERANDS = (1, None)
    RESULTS = (1, 1)
    ATTRS = {"rmw": ..., "order": Order.WEAK, "scope": None, "bounds": Bounds.UNKNOWN}
    EFFECTS = frozenset({Effect.READ})

    def verify(self) -> None:
        t = _multicast_tile(self, self.operands[1:], _tile(self, self.result, "result"))
        _scope_order(self, (Order.WEAK, Order.RELAXED, Order.ACQUIRE))
        _peer_scope(self, Space.PEER)
        _reduction(self, t, LOAD_REDUCTIONS)

    @property
    def effects(self) -> frozenset[Effect]:
        return _ordered_effects(self)


class MulticastReduce(Op):
    """Combines a tile into every rank's part: for each of them one atomic read-modify-write an element. Operands:
    object, tile, tile indices. *Expanded.*"""

    NAME = "multicast_reduce"
    OPERANDS = (2, None)
    ATTRS = {"rmw": ..., "order": Order.RELAXED, "scope": ..., "bounds": Bounds.UNKNOWN}
    EFFECTS = frozenset({Effect.READ, Effect.WRITE})

    def verify(self) -> None:
        t = _multicast_tile(self, self.operands[2:], _tile(self, self.operands[1], "tile"))
        _scope_order(self, (Order.RELAXED, Order.RELEASE))
        _peer_scope(self, Space.PEER)
        _reduction(self, t, REDUCTIONS)

    @property
    def effects(self) -> frozenset[Effect]:
        return _ordered_effects(self)


class MulticastStore(Op):
    """Writes a tile to every rank's part. Operands: object, tile, tile indices. *Expanded.*"""

    NAME = "multicast_store"
    OPERANDS = (2, None)
    ATTRS = {"order": Order.WEAK, "scope": None, "bounds": Bounds.UNKNOWN}
    EFFECTS = frozenset({Effect.WRITE})

    def verify(self) -> None:
        _multicast_tile(self, self.operands[2:], _tile(self, self.operands[1], "tile"))
        _scope_order(self, (Order.WEAK, Order.RELAXED, Order.RELEASE))
        _peer_scope(self, Space.PEER)

    @property
    def effects(self) -> frozenset[Effect]:
        return _ordered_effects(self)


class MulticastBulk(Op):
    """As `multicast_store`, or with a reduction as `multicast_reduce`, relaxed, by an asynchronous bulk copy that the
    program waits for: what follows comes after the writes. The tile is one contiguous range of the object. Operands:
    object, tile, tile indices. Attribute `rmw`: None stores. *Expanded.*"""

    NAME = "multicast_bulk"
    OPERANDS = (2, None)
    ATTRS = {"rmw": None, "bounds": Bounds.UNKNOWN}
    EFFECTS = frozenset({Effect.READ, Effect.WRITE, Effect.FENCE})

    def verify(self) -> None:
        tile = _tile(self, self.operands[1], "tile")
        t = _multicast_tile(self, self.operands[2:], tile)
        nbytes = tile.numel * t.dtype.itemsize
        self.require(
            nbytes % BULK_ALIGN == 0 and nbytes < 1 << 32,
            f"tile: expected a multiple of {BULK_ALIGN} bytes below 2^32, got {nbytes}",
        )
        if self.attrs["rmw"] is not None:
            _reduction(self, t, BULK_REDUCTIONS)


class MulticastSignal(Op):
    """Stores a word at every rank, or with `add` adds to it: release, system scope. Operands: object, value, element
    indices. *Expanded.*"""

    NAME = "multicast_signal"
    OPERANDS = (2, None)
    ATTRS = {"add": False}
    EFFECTS = frozenset({Effect.READ, Effect.WRITE, Effect.FENCE})

    def verify(self) -> None:
        t = _multicast(self)
        self.require(t.dtype.is_int, f"dtype: expected words of i32, u32, i64 or u64, got {t.dtype.name}")
        _same(self, TileType(t.dtype), self.operands[1].type, "value")
        self.require(
            len(self.operands) == 2 + t.rank, f"index: expected {t.rank} for {t}, got {len(self.operands) - 2}"
        )
        for k, v in enumerate(self.operands[2:]):
            _index(self, v, f"index {k}")


MULTICAST: Final = (MulticastLoad, MulticastReduce, MulticastStore, MulticastBulk, MulticastSignal)
"""Expanded into loops over the ranks' parts, but for an object with a mapping of the fabric."""

EXPANDED: Final = (
    Notify, WaitSignal, CounterAdd, CounterWait, BarrierSync, BarrierArrive, BarrierWait, SyncPrograms,
    BoxPost, BoxRound, BoxPut, BoxFlush, BoxCollect, BoxTake, BoxRelease,
)  # fmt: skip

PRIMITIVE: Final = (
    Const, ProgramId, NumPrograms, Rank, NumRanks, Extent, NumTiles, TileIndex, Iota,
    UnaryOp, BinaryOp, CompareOp, Select, Fma, Cast, Bitcast,
    Broadcast, Reshape, Permute, Reduce, ReduceWith, ScanWith, Sort, Take, Extract, Insert, Mma,
    PeerView, Field, ViewStride, ViewSlice, ViewPermute, ViewReshape,
    Load, Store, Gather, Scatter, TileLoad, TileStore, AsyncStore, WaitTransfer, TileAtomic,
    WordLoad, WordStore, WordRmw, Wait, WaitAny, Fence, FenceAlias, LaunchWords, Suspend,
    Check, Print, Mark,
    For, Loop, If, Yield, Continue, Break, Return,
    NewToken, JoinTokens, PtrOffset, PtrBroadcast, Unicast, PtrLoad, PtrStore, PtrRmw, PtrCas,
)  # fmt: skip

ALL_OPS: Final = PRIMITIVE + EXPANDED + MULTICAST
BY_NAME: Final = {cls.NAME: cls for cls in ALL_OPS}

ATTR_TYPES: Final[dict[str, tuple[type[Any], ...]]] = {
    "value": (int, float, bool), "axis": (int,), "size": (int,), "axes": (tuple,), "field": (str,),
    "fn": (Unary, Binary, Compare, Fold), "rounding": (Rounding,), "saturate": (bool,),
    "padding": (Padding,), "bounds": (Bounds,), "rmw": (Rmw, type(None)), "cmp": (Cmp,),
    "proxy": (Proxy,), "add": (bool,), "copies": (bool,),
    "order": (Order,), "scope": (Scope, type(None)), "what": (str,), "kind": (CheckKind,), "message": (str,),
    "prefix": (str,), "stages": (int,), "reverse": (bool,), "descending": (bool,), "precision": (Precision,),
    "masked": (bool,), "ordered": (bool,), "continues": (bool,), "all_programs": (bool,),
    "moment": (Moment,),
}  # fmt: skip
"""What an attribute of each name may be; the verifier checks it before the op's own rule."""
