"""What an expression of a kernel means while it is compiled: abstract values. No op is emitted here.

A `Known` is an ordinary Python value at compile time; a `Tile`, `Pointer` or `Token` holds a value of the
IR; the rest are handles of parameters, which hold the IR value of the object they speak of. All are
immutable, so the environments of two paths can share them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, ClassVar

import peertile.language as language
from peertile.dtypes import DType
from peertile.ir import ops
from peertile.ir.core import Value
from peertile.ir.types import MailboxType, MulticastType, Partition, PointerType, SymmetricType, TileType, ViewType
from peertile.language.word import KernelOnly, Word, word_of
from peertile.source import Loc

__all__ = [
    "NONE",
    "Abstract",
    "Accumulate",
    "Barrier",
    "CollectIterator",
    "Counter",
    "CounterSlot",
    "Exclusive",
    "ExclusiveTile",
    "GatherView",
    "Known",
    "Mailbox",
    "Method",
    "Multicast",
    "MulticastPointer",
    "MulticastTiles",
    "Peer",
    "Pointer",
    "Poison",
    "RangeIterator",
    "RanksIterator",
    "Round",
    "RoundContext",
    "Signal",
    "SignalSlot",
    "StaticIterator",
    "Tile",
    "TileView",
    "TilesIterator",
    "Token",
    "Transfer",
    "Tup",
    "View",
    "ZippedTiles",
    "describe",
    "ir_values",
    "is_number",
]


class Abstract:
    """Base of abstract values. `WORDS` is the class of `peertile.language` that documents its methods."""

    WORDS: ClassVar[type[KernelOnly] | None] = None


@dataclass(frozen=True, eq=False)
class Known(Abstract):
    """A Python value known at compile time: number, str, None, dtype, enum member, module, function."""

    value: Any

    def __eq__(self, other: object) -> bool:
        # 1, 1.0 and True are equal in Python and different constants here.
        if not isinstance(other, Known) or type(self.value) is not type(other.value):
            return False
        return self.value is other.value or bool(self.value == other.value)

    def __hash__(self) -> int:
        return hash(type(self.value))


NONE = Known(None)


@dataclass(frozen=True)
class Tup(Abstract):
    """A tuple of abstract values."""

    items: tuple[Abstract, ...]


@dataclass(frozen=True)
class Tile(Abstract):
    """A run-time tile. `weak` marks a loop-carried Python number while its dtype is still being found:
    it adapts to what it meets. No weak tile is left in a finished kernel."""

    WORDS = language.Tile
    value: Value
    weak: bool = False

    @property
    def type(self) -> TileType:
        assert isinstance(self.value.type, TileType)
        return self.value.type


@dataclass(frozen=True)
class Pointer(Abstract):
    """A raw pointer or a tile of them."""

    WORDS = language.Pointer
    value: Value

    @property
    def type(self) -> PointerType:
        assert isinstance(self.value.type, PointerType)
        return self.value.type


@dataclass(frozen=True)
class Token(Abstract):
    """An order token of the unsafe tier."""

    value: Value


@dataclass(frozen=True)
class ExclusiveTile(Abstract):
    """A tile of an exclusive partition, with its index."""

    WORDS = language.ExclusiveTile
    name: str
    view: Value
    index: tuple[Value, ...]

    @property
    def type(self) -> ViewType:
        assert isinstance(self.view.type, ViewType)
        return self.view.type

    @property
    def partition(self) -> Partition:
        assert self.type.partition is not None
        return self.type.partition


@dataclass(frozen=True)
class Exclusive(ExclusiveTile):
    """A T.Exclusive parameter; `index` is empty when the partition is persistent."""

    WORDS = language.Exclusive


@dataclass(frozen=True)
class View(Abstract):
    """A view of memory: a T.Shared parameter, or a rank's part of a T.Peer one (`peer` set, on `rank`)."""

    name: str
    value: Value
    peer: bool = False
    rank: Value | None = None

    @property
    def is_remote(self) -> bool:
        """Whether it may be another rank's: not one's own by construction."""
        return self.rank is not None and not isinstance(self.rank.op, ops.Rank)

    @property
    def type(self) -> ViewType:
        assert isinstance(self.value.type, ViewType)
        return self.value.type


@dataclass(frozen=True)
class TileView(Abstract):
    """A view in tiles of one shape, each beginning `step` elements after the one before it."""

    WORDS = language.TileView
    view: View
    shape: tuple[int, ...]
    step: tuple[int, ...]


@dataclass(frozen=True)
class GatherView(Abstract):
    """Slices of a view along `axis`, chosen by a tile of indices."""

    WORDS = language.GatherView
    view: View
    indices: Value
    axis: int


@dataclass(frozen=True)
class Transfer(Abstract):
    """A put that was not waited for; without a value, one of several copies."""

    value: Value | None


@dataclass(frozen=True)
class Accumulate(Abstract):
    """A T.Accumulate parameter."""

    WORDS = language.Accumulate
    name: str
    value: Value

    @property
    def type(self) -> ViewType:
        assert isinstance(self.value.type, ViewType)
        return self.value.type


@dataclass(frozen=True)
class Peer(Abstract):
    """A T.Peer parameter."""

    WORDS = language.Peer
    name: str
    value: Value

    @property
    def type(self) -> SymmetricType:
        assert isinstance(self.value.type, SymmetricType)
        return self.value.type


@dataclass(frozen=True)
class Multicast(Abstract):
    """A T.Multicast parameter, or the `extent` elements of a multicast address from element `offset` on."""

    WORDS = language.Multicast
    name: str
    value: Value
    offset: Value | None = None
    extent: Value | None = None

    @property
    def type(self) -> MulticastType:
        assert isinstance(self.value.type, MulticastType)
        return self.value.type


@dataclass(frozen=True)
class MulticastPointer(Abstract):
    """A T.Pointer parameter that is a multicast address, `offset` elements on. No ordinary access takes it."""

    WORDS = language.Pointer
    name: str
    value: Value
    offset: Value | None = None
    classified: bool = False

    @property
    def type(self) -> MulticastType:
        assert isinstance(self.value.type, MulticastType)
        return self.value.type


@dataclass(frozen=True)
class MulticastTiles(Abstract):
    """A multicast parameter in tiles of one shape; `in_bounds` are promises about tile indices, one per axis. `base` is
    the tile of the parameter at which tile 0 lies, `count` how many there are, where that is not all of it."""

    WORDS = language.MulticastTiles
    tensor: Multicast
    shape: tuple[int, ...]
    in_bounds: tuple[bool, ...]
    base: Value | None = None
    count: Value | None = None


@dataclass(frozen=True)
class Signal(Abstract):
    WORDS = language.Signal
    name: str
    value: Value


@dataclass(frozen=True)
class SignalSlot(Abstract):
    WORDS = language.SignalSlot
    signal: Signal
    slot: Value


@dataclass(frozen=True)
class Counter(Abstract):
    WORDS = language.Counter
    name: str
    value: Value


@dataclass(frozen=True)
class CounterSlot(Abstract):
    WORDS = language.CounterSlot
    counter: Counter
    slot: Value


@dataclass(frozen=True)
class Barrier(Abstract):
    WORDS = language.Barrier
    name: str
    value: Value


@dataclass(frozen=True)
class Mailbox(Abstract):
    WORDS = language.Mailbox
    name: str
    value: Value

    @property
    def type(self) -> MailboxType:
        assert isinstance(self.value.type, MailboxType)
        return self.value.type


@dataclass(frozen=True)
class Round(Abstract):
    """The open round of a mailbox, inside its `with`."""

    WORDS = language.Round
    box: Mailbox


@dataclass(frozen=True)
class RoundContext(Abstract):
    """What `box.round()` gives: only a `with` takes it."""

    box: Mailbox


@dataclass(frozen=True)
class RangeIterator(Abstract):
    """`T.range`: lower bound, upper bound, positive step of one integer type. With `is_down` the loop's variable is
    the complement of what counts up, so that nothing wraps: ~ turns the order of all numbers of a type round."""

    lo: Value
    hi: Value
    step: Value
    stages: int
    is_down: bool = False


@dataclass(frozen=True)
class StaticIterator(Abstract):
    """`T.static_range` and Python's range: unrolled."""

    items: range


@dataclass(frozen=True)
class TilesIterator(Abstract):
    """`z.tiles(dealt)`; None where nothing has been dealt before. `is_down`: from the last tile on. `is_even`: every
    other round of the dealing goes the other way round."""

    exclusive: Exclusive
    dealt: Value | None = None
    is_down: bool = False
    is_even: bool = False


@dataclass(frozen=True)
class ZippedTiles(Abstract):
    """`zip(y.tiles(), z.tiles())`: tiles of several partitions that are dealt alike, side by side."""

    parts: tuple[TilesIterator, ...]


@dataclass(frozen=True)
class RanksIterator(Abstract):
    """`T.ranks()`, or with `peers` `T.peers()`."""

    peers: bool


@dataclass(frozen=True)
class CollectIterator(Abstract):
    box: Mailbox
    sources: bool


@dataclass(frozen=True)
class Method(Abstract):
    """A method bound to its receiver."""

    receiver: Abstract
    word: Word


@dataclass(frozen=True, eq=False)
class Poison(Abstract):
    """A variable that has no value here; reading it is the error `message`, with further places in `notes`."""

    message: str
    notes: tuple[tuple[str, Loc | None], ...] = ()


def is_number(value: Abstract) -> bool:
    """Whether `value` is a Python number (bool included) known at compile time."""
    return isinstance(value, Known) and isinstance(value.value, bool | int | float)


def ir_values(value: Abstract) -> Iterator[Value]:
    """Every IR value that `value` holds."""
    if isinstance(value, Tup):
        for item in value.items:
            yield from ir_values(item)
        return
    fields = getattr(value, "__dataclass_fields__", {})
    if isinstance(value, Known | Poison):
        return
    for name in fields:
        part = getattr(value, name)
        if isinstance(part, Value):
            yield part
        elif isinstance(part, Abstract):
            yield from ir_values(part)
        elif isinstance(part, tuple):
            yield from (p for p in part if isinstance(p, Value))


def _describe_known(v: Any) -> str:
    word = word_of(v)
    if word is not None:
        return f"the word T.{word.name}"
    if v is None:
        return "None"
    if isinstance(v, DType):
        return f"the dtype {v.name}"
    if isinstance(v, Enum):
        return str(v)
    if isinstance(v, ModuleType):
        return f"the module {v.__name__}"
    if isinstance(v, FunctionType | BuiltinFunctionType):
        return f"the function {v.__name__}"
    if isinstance(v, type):
        return f"the class {v.__name__}"
    return f"the {type(v).__name__} {v!r}"


def describe(value: Abstract) -> str:
    """`value` in the words of an error message."""
    match value:
        case Known():
            return _describe_known(value.value)
        case Tup():
            return f"a tuple of {len(value.items)}"
        case Tile() | Pointer():
            return str(value.type)
        case Token():
            return "a token"
        case Exclusive():
            return f"the exclusive parameter `{value.name}`"
        case ExclusiveTile():
            return f"a tile of `{value.name}` (not loaded)"
        case View(peer=True):
            return f"a rank's part of `{value.name}`"
        case View():
            return f"the shared parameter `{value.name}`"
        case Accumulate():
            return f"the accumulator `{value.name}`"
        case Peer() | Multicast() | Signal() | Counter() | Barrier() | Mailbox():
            return f"the {type(value).__name__.lower()} `{value.name}`"
        case Method():
            return f"the method {value.word.name} (not called)"
        case Round() | RoundContext():
            return f"a round of the mailbox `{value.box.name}`"
        case TileView() | GatherView():
            return f"a {'partition' if isinstance(value, TileView) else 'gather'} of `{value.view.name}`"
        case MulticastPointer():
            return f"the multicast address `{value.name}`"
        case MulticastTiles():
            return f"a partition of the multicast `{value.tensor.name}`"
        case Transfer():
            return "the handle of a put"
        case CollectIterator():
            return f"the collection of mailbox `{value.box.name}`"
        case SignalSlot():
            return f"a slot of the signal `{value.signal.name}`"
        case CounterSlot():
            return f"a slot of the counter `{value.counter.name}`"
        case _:
            return "a loop range"
