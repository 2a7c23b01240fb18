"""Types of tile IR values. Read before `core.py`. No behaviour beyond shape and layout facts.

Every run-time number is a tile; a scalar is a tile of shape (). Views, symmetric objects and
communication objects describe memory; their *slots* are the 64-bit words that a launch passes for
them, in the order `slots` gives (the argument block of every backend is the concatenation).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntFlag
from functools import cached_property
from math import prod

from peertile.dtypes import DType, b1, i64, u64

__all__ = [
    "BOOL",
    "INDEX",
    "MAX_TENSOR_RANK",
    "MAX_TILE_ELEMENTS",
    "MAX_TILE_RANK",
    "Access",
    "BarrierType",
    "CounterType",
    "Link",
    "MailboxType",
    "MulticastType",
    "ObjectType",
    "Partition",
    "PointerType",
    "SignalType",
    "Space",
    "SymmetricType",
    "TileType",
    "TokenType",
    "TransferType",
    "Type",
    "ViewType",
]

MAX_TENSOR_RANK = 4
MAX_TILE_RANK = 6
MAX_TILE_ELEMENTS = 1 << 20
"""Elements of one tile: code for larger ones takes minutes to compile and runs out of stack."""


class Access(Enum):
    """What a kernel may do with a view."""

    READ = "read"
    WRITE = "write"
    READ_WRITE = "read_write"


class Space(Enum):
    """Who else can see the memory while the kernel runs.

    LOCAL: only this launch, and nobody writes what it reads unless it does so itself.
    DEVICE: other programs of the launch read and write it too (words of counters and barriers).
    PEER: other ranks read and write it; a read is never cached, ordered accesses are system scope.
    """

    LOCAL = "local"
    DEVICE = "device"
    PEER = "peer"


class Type:
    """Base of all IR types."""

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the 64-bit words that pass a value of this type to a kernel."""
        raise NotImplementedError(type(self).__name__)


@dataclass(frozen=True)
class TileType(Type):
    """A tile of `shape` (each extent a power of two) with elements of `dtype`; () is a scalar."""

    dtype: DType
    shape: tuple[int, ...] = ()

    @property
    def rank(self) -> int:
        return len(self.shape)

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_scalar(self) -> bool:
        return not self.shape

    @property
    def slots(self) -> tuple[str, ...]:
        return ("value",)

    def with_dtype(self, dtype: DType) -> TileType:
        return TileType(dtype, self.shape)

    def with_shape(self, shape: tuple[int, ...]) -> TileType:
        return TileType(self.dtype, shape)

    def __str__(self) -> str:
        return self.dtype.name if not self.shape else f"{self.dtype.name}[{', '.join(map(str, self.shape))}]"


INDEX = TileType(i64)
BOOL = TileType(b1)


@dataclass(frozen=True)
class Partition:
    """How an exclusive view is cut into tiles and given to programs.

    Not persistent: program p owns tile p (row-major over the tile grid, swizzled). Persistent:
    program p owns tiles p, p + programs, p + 2·programs, … of the same order. `swizzle` > 1 walks
    the first two axes in column groups of that many rows of tiles, for locality. With `spare`, which is
    for persistent ones, the first so many programs own none, and the others share as if they were all.
    `single[k]` promises that axis k has one tile at most, whatever its extent is.
    """

    tile_shape: tuple[int, ...]
    persistent: bool = False
    swizzle: int = 1
    spare: int = 0
    single: tuple[bool, ...] = ()

    def __str__(self) -> str:
        text = f"tile=[{', '.join(map(str, self.tile_shape))}]"
        if self.persistent:
            text += ", persistent"
        text += f", swizzle={self.swizzle}" if self.swizzle != 1 else ""
        text += f", spare={self.spare}" if self.spare else ""
        return text + (f", single=[{', '.join(str(int(s)) for s in self.single)}]" if self.single else "")


@dataclass(frozen=True)
class ViewType(Type):
    """A view of memory: address, `rank` extents and strides (in elements, run-time values).

    `unit_stride[k]` promises stride 1 on axis k at compile time; `align` is a promise in bytes about
    the address; `divisible[k]` promises that extent k, and every stride but the unit one, is a
    multiple of it. `partition` is set on exclusive parameters.
    """

    dtype: DType
    rank: int
    access: Access = Access.READ
    space: Space = Space.LOCAL
    partition: Partition | None = None
    unit_stride: tuple[bool, ...] = ()
    align: int = 0
    divisible: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # One spelling per fact: no promise is written out, so that equal types compare equal.
        object.__setattr__(self, "unit_stride", self.unit_stride or (False,) * self.rank)
        object.__setattr__(self, "divisible", self.divisible or (1,) * self.rank)

    @property
    def slots(self) -> tuple[str, ...]:
        return ("pointer", *(f"extent{k}" for k in range(self.rank)), *(f"stride{k}" for k in range(self.rank)))

    @property
    def readable(self) -> bool:
        return self.access is not Access.WRITE

    @property
    def writable(self) -> bool:
        return self.access is not Access.READ

    def __str__(self) -> str:
        parts = [self.dtype.name, str(self.rank), self.access.value]
        if self.space is not Space.LOCAL:
            parts.append(self.space.value)
        if self.partition is not None:
            parts.append(str(self.partition))
        if any(self.unit_stride):
            parts.append(f"unit=[{', '.join(str(int(u)) for u in self.unit_stride)}]")
        if self.align:
            parts.append(f"align={self.align}")
        if any(d > 1 for d in self.divisible):
            parts.append(f"divisible=[{', '.join(map(str, self.divisible))}]")
        return f"view<{', '.join(parts)}>"


@dataclass(frozen=True)
class SymmetricType(Type):
    """A symmetric object: the same view in every rank's heap.

    Slots: the address of the table `[rank, n, base_0 … base_{n-1}]`, the byte offset in each heap,
    then extents and strides as of a view.
    """

    dtype: DType
    rank: int
    access: Access = Access.READ_WRITE
    unit_stride: tuple[bool, ...] = ()
    align: int = 0
    divisible: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # One spelling per fact: no promise is written out, so that equal types compare equal.
        object.__setattr__(self, "unit_stride", self.unit_stride or (False,) * self.rank)
        object.__setattr__(self, "divisible", self.divisible or (1,) * self.rank)

    @property
    def slots(self) -> tuple[str, ...]:
        return (
            "table", "offset",
            *(f"extent{k}" for k in range(self.rank)), *(f"stride{k}" for k in range(self.rank)),
        )  # fmt: skip

    @property
    def view(self) -> ViewType:
        """The type of one rank's part."""
        return ViewType(
            self.dtype, self.rank, self.access, Space.PEER, None, self.unit_stride, self.align, self.divisible
        )

    def __str__(self) -> str:
        parts = [self.dtype.name, str(self.rank), self.access.value]
        if any(self.unit_stride):
            parts.append(f"unit=[{', '.join(str(int(u)) for u in self.unit_stride)}]")
        if self.align:
            parts.append(f"align={self.align}")
        if any(d > 1 for d in self.divisible):
            parts.append(f"divisible=[{', '.join(map(str, self.divisible))}]")
        return f"symmetric<{', '.join(parts)}>"


@dataclass(frozen=True)
class PointerType(Type):
    """A tile of raw addresses of `dtype` elements; only in unsafe kernels."""

    dtype: DType
    shape: tuple[int, ...] = ()
    space: Space = Space.DEVICE

    @property
    def slots(self) -> tuple[str, ...]:
        return ("pointer",)

    def __str__(self) -> str:
        shape = f", [{', '.join(map(str, self.shape))}]" if self.shape else ""
        space = f", {self.space.value}" if self.space is not Space.DEVICE else ""
        return f"ptr<{self.dtype.name}{shape}{space}>"


@dataclass(frozen=True)
class TokenType(Type):
    """Orders two memory operations of one program; has no run-time form."""

    @property
    def slots(self) -> tuple[str, ...]:
        return ()

    def __str__(self) -> str:
        return "token"


@dataclass(frozen=True)
class TransferType(Type):
    """An asynchronous copy that may still be under way; has no run-time form on targets that copy at once."""

    @property
    def slots(self) -> tuple[str, ...]:
        return ()

    def __str__(self) -> str:
        return "transfer"


_WORDS = SymmetricType(u64, 2, unit_stride=(False, True), align=8)
_OWN_WORDS = ViewType(u64, 2, Access.READ_WRITE, Space.DEVICE, unit_stride=(False, True), align=8)


_LINKS = ViewType(u64, 1, Access.READ, unit_stride=(True,), align=8)


class Link(IntFlag):
    """What there is between a rank and another, in the `links` of a mailbox."""

    RECEIVES = 1
    """This rank collects what the other one posts."""
    SENDS = 2
    SENDS_ACKNOWLEDGED = 4
    """What it sends there is acknowledged: it waits for the slot to come back."""
    RECEIVES_ACKNOWLEDGED = 8


class ObjectType(Type):
    """Base of communication objects: a record of named fields, each a view, symmetric or scalar."""

    @property
    def fields(self) -> dict[str, Type]:
        raise NotImplementedError(type(self).__name__)

    @property
    def slots(self) -> tuple[str, ...]:
        return tuple(f"{name}.{slot}" for name, t in self.fields.items() for slot in t.slots)


@dataclass(frozen=True)
class SignalType(ObjectType):
    """Monotonic words, one per (slot, source, destination); see docs/concepts/signals.md.

    `arrived[slot, source]` at each rank is written by that source alone; `sent[slot, destination]`
    and `seen[slot, source]` are this rank's own epochs, in device memory so that replay advances them.
    """

    @property
    def fields(self) -> dict[str, Type]:
        return {"arrived": _WORDS, "sent": _OWN_WORDS, "seen": _OWN_WORDS}

    def __str__(self) -> str:
        return "signal"


@dataclass(frozen=True)
class CounterType(ObjectType):
    """`count[slot, 0]` at each rank, written by adds alone; `base[slot, 0]` what own waits consumed."""

    @property
    def fields(self) -> dict[str, Type]:
        return {"count": _WORDS, "base": _OWN_WORDS}

    def __str__(self) -> str:
        return "counter"


@dataclass(frozen=True)
class BarrierType(ObjectType):
    """`arrived[program, source]` epochs as of a signal, `passed[program, 0]` this rank's own epoch."""

    @property
    def fields(self) -> dict[str, Type]:
        return {"arrived": _WORDS, "passed": _OWN_WORDS}

    def __str__(self) -> str:
        return "barrier"


@dataclass(frozen=True)
class MailboxType(ObjectType):
    """The safe tier's slots; protocol and proof in docs/concepts/mailbox.md.

    `data[channel·depth·n + k·n + source, …tile flattened]` at each rank; `arrived[channel, source]`
    epoch words; `signatures[channel·depth + k, source]`; `freed[channel, destination]` where
    acknowledged; `signature` is this launch's own. `linked`: not every rank sends to every other;
    then `links[r]` says what there is between this rank and r, as a sum of `Link`. `posts_ahead`
    rounds may be posted and not collected.
    """

    dtype: DType
    tile_shape: tuple[int, ...]
    depth: int
    acknowledged: bool
    linked: bool = False
    posts_ahead: int = 1

    @property
    def fields(self) -> dict[str, Type]:
        fields: dict[str, Type] = {
            "data": SymmetricType(self.dtype, 2, unit_stride=(False, True), align=64),
            "arrived": _WORDS,
            "signatures": _WORDS,
        }
        if self.acknowledged:
            fields["freed"] = _WORDS
        if self.linked:
            fields["links"] = _LINKS
        return fields | {"signature": INDEX}

    def __str__(self) -> str:
        shape = ", ".join(map(str, self.tile_shape))
        acknowledged = ", acknowledged" if self.acknowledged else ""
        linked = ", linked" if self.linked else ""
        ahead = f", ahead={self.posts_ahead}" if self.posts_ahead != 1 else ""
        return f"mailbox<{self.dtype.name}[{shape}], depth={self.depth}{acknowledged}{linked}{ahead}>"


@dataclass(frozen=True)
class MulticastType(ObjectType):
    """A symmetric tensor with one address that reaches every rank's part.

    `data` are the parts as peers see them, `window` the address of the multicast mapping: 0 where there is none and
    its operations are loops over the parts (`passes.multicast`). `hardware`: the mapping is one of the fabric, and a
    backend emits its own instructions for it. `pointer`: unsafe kernels take it as an address, which changes nothing
    but the words that apply to it.
    """

    dtype: DType
    rank: int
    unit_stride: tuple[bool, ...] = ()
    align: int = 0
    divisible: tuple[int, ...] = ()
    hardware: bool = False
    pointer: bool = False

    def __post_init__(self) -> None:
        # One spelling per fact: no promise is written out, so that equal types compare equal.
        object.__setattr__(self, "unit_stride", self.unit_stride or (False,) * self.rank)
        object.__setattr__(self, "divisible", self.divisible or (1,) * self.rank)

    @property
    def fields(self) -> dict[str, Type]:
        data = SymmetricType(self.dtype, self.rank, Access.READ_WRITE, self.unit_stride, self.align, self.divisible)
        return {"data": data, "window": INDEX}

    def __str__(self) -> str:
        parts = [self.dtype.name, str(self.rank)]
        if any(self.unit_stride):
            parts.append(f"unit=[{', '.join(str(int(u)) for u in self.unit_stride)}]")
        if self.align:
            parts.append(f"align={self.align}")
        if any(d > 1 for d in self.divisible):
            parts.append(f"divisible=[{', '.join(map(str, self.divisible))}]")
        parts += [name for name in ("hardware", "pointer") if getattr(self, name)]
        return f"multicast<{', '.join(parts)}>"
