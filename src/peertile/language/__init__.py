"""The words a kernel is written in: `import peertile.language as T`. Re-exports only; no meaning here.

Every word has a docstring with a formula and an example; none has a body. The compiler reads them in the
source of functions marked `@pt.kernel`.
"""

import typing as _typing
from typing import Final as _Final

from peertile.dtypes import DType
from peertile.ir.ops import Padding, Precision, Rounding
from peertile.ir.types import Access as _Access
from peertile.language import unsafe
from peertile.language.accumulate import Accumulate
from peertile.language.annotations import Const
from peertile.language.control import (
    assert_,
    num_programs,
    num_ranks,
    peers,
    print_,
    program_id,
    range,
    rank,
    ranks,
    static_assert,
    static_range,
)
from peertile.language.elementwise import (
    abs,
    at_least,
    atan2,
    cdiv,
    ceil,
    clamp,
    cos,
    cosh,
    erf,
    exp,
    exp2,
    floor,
    fma,
    log,
    log2,
    maximum,
    minimum,
    mod,
    mulhi,
    pow,
    quot,
    rem,
    round,
    rsqrt,
    sigmoid,
    sin,
    sinh,
    sqrt,
    tan,
    tanh,
)
from peertile.language.folds import (
    NanRule,
    all,
    any,
    argmax,
    argmin,
    argsort,
    cummax,
    cummin,
    cumprod,
    cumsum,
    max,
    min,
    prod,
    reduce,
    scan,
    sort,
    sum,
    top_k,
)
from peertile.language.memory import (
    Granularity,
    atom,
    atom_add,
    get,
    ld,
    put,
    put_filled,
    put_flagged,
    quiet,
    st,
    sync_programs,
    sync_system,
    take_filled,
    take_flagged,
    test,
    wait_any,
    wait_at_least,
    wait_eq,
    wait_ge,
    wait_gt,
    wait_le,
    wait_lt,
    wait_ne,
    wait_put,
)
from peertile.language.multicast import Multicast, MulticastTiles
from peertile.language.objects import (
    Barrier,
    Counter,
    CounterSlot,
    Mailbox,
    Pointer,
    Round,
    Signal,
    SignalSlot,
)
from peertile.language.random import rand, rand_bits, rand_bits4, randn
from peertile.language.tiles import (
    Tile,
    bitcast,
    broadcast,
    cat,
    expand_dims,
    extract,
    flip,
    full,
    insert,
    iota,
    mma,
    ones,
    permute,
    reshape,
    take,
    transpose,
    where,
    zeros,
)
from peertile.language.views import Exclusive, ExclusiveTile, GatherView, Peer, Shared, TileView, View
from peertile.memory_model import Cmp, Order, Rmw, Scope

if _typing.TYPE_CHECKING:

    class read:
        """An argument of `T.Peer[...]`."""

    # One class for all of them; see its metaclass.
    b1 = Tile
    bf16 = Tile
    f8e4m3 = Tile
    f8e5m2 = Tile
    f16 = Tile
    f32 = Tile
    f64 = Tile
    i8 = Tile
    i16 = Tile
    i32 = Tile
    i64 = Tile
    u8 = Tile
    u16 = Tile
    u32 = Tile
    u64 = Tile
else:
    from peertile.dtypes import b1, bf16, f8e4m3, f8e5m2, f16, f32, f64, i8, i16, i32, i64, u8, u16, u32, u64

    read = _Access.READ

weak: _Final = Order.WEAK
relaxed: _Final = Order.RELAXED
acquire: _Final = Order.ACQUIRE
release: _Final = Order.RELEASE
acq_rel: _Final = Order.ACQ_REL

program: _Final = Scope.PROGRAM
device: _Final = Scope.DEVICE
system: _Final = Scope.SYSTEM

add: _Final = Rmw.ADD

__all__ = [
    "Accumulate",
    "Barrier",
    "Cmp",
    "Const",
    "Counter",
    "CounterSlot",
    "DType",
    "Exclusive",
    "ExclusiveTile",
    "GatherView",
    "Granularity",
    "Mailbox",
    "Multicast",
    "MulticastTiles",
    "NanRule",
    "Order",
    "Padding",
    "Peer",
    "Pointer",
    "Precision",
    "Rmw",
    "Round",
    "Rounding",
    "Scope",
    "Shared",
    "Signal",
    "SignalSlot",
    "Tile",
    "TileView",
    "View",
    "abs",
    "acq_rel",
    "acquire",
    "add",
    "all",
    "any",
    "argmax",
    "argmin",
    "argsort",
    "assert_",
    "at_least",
    "atan2",
    "atom",
    "atom_add",
    "b1",
    "bf16",
    "bitcast",
    "broadcast",
    "cat",
    "cdiv",
    "ceil",
    "clamp",
    "cos",
    "cosh",
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    "device",
    "erf",
    "exp",
    "exp2",
    "expand_dims",
    "extract",
    "f8e4m3",
    "f8e5m2",
    "f16",
    "f32",
    "f64",
    "flip",
    "floor",
    "fma",
    "full",
    "get",
    "i8",
    "i16",
    "i32",
    "i64",
    "insert",
    "iota",
    "ld",
    "log",
    "log2",
    "max",
    "maximum",
    "min",
    "minimum",
    "mma",
    "mod",
    "mulhi",
    "num_programs",
    "num_ranks",
    "ones",
    "peers",
    "permute",
    "pow",
    "print_",
    "prod",
    "program",
    "program_id",
    "put",
    "put_filled",
    "put_flagged",
    "quiet",
    "quot",
    "rand",
    "rand_bits",
    "rand_bits4",
    "randn",
    "range",
    "rank",
    "ranks",
    "read",
    "reduce",
    "relaxed",
    "release",
    "rem",
    "reshape",
    "round",
    "rsqrt",
    "scan",
    "sigmoid",
    "sin",
    "sinh",
    "sort",
    "sqrt",
    "st",
    "static_assert",
    "static_range",
    "sum",
    "sync_programs",
    "sync_system",
    "system",
    "take",
    "take_filled",
    "take_flagged",
    "tan",
    "tanh",
    "test",
    "top_k",
    "transpose",
    "u8",
    "u16",
    "u32",
    "u64",
    "unsafe",
    "wait_any",
    "wait_at_least",
    "wait_eq",
    "wait_ge",
    "wait_gt",
    "wait_le",
    "wait_lt",
    "wait_ne",
    "wait_put",
    "weak",
    "where",
    "zeros",
]
