"""What a host object becomes when it is passed to a kernel. No packing of whole launches here.

An `Argument` is made once per host object and cached there: a launch only joins the packed bytes and
compares type identities, so that binding costs well under a microsecond per argument. Types are
canonical (`canonical`), hence equal exactly when identical.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from peertile.ir.types import Access, MulticastType, Partition, Space, SymmetricType, Type, ViewType

if TYPE_CHECKING:
    from peertile.runtime.storage import Storage

__all__ = ["Argument", "Use", "canonical", "facts_of", "pack_words"]

# Facts are two-valued on purpose: every further value would multiply the binaries of a kernel.
VECTOR_ALIGN = 64
DIVISOR = 16

_serials = itertools.count(1)


@cache
def canonical(t: Type) -> Type:
    """The one instance that stands for `t`; lives as long as the process, as compiled kernels do."""
    return t


class Use:
    """Bytes [start, end) of a storage that an operation reads or writes. Immutable; two are equal when they are one
    object, since leases count by it.

    `exclusive`: nobody else may reach the bytes. `lifetime_only`, of peer-visible objects: kept alive, access
    conflicts are the program's own business (signals). `channel`: words of a signal, counter, barrier or mailbox, for
    one launch and one stream at a time. `devices`: those that the storage was shared with, its own included; a launch
    on any of them may use it. `exempt`: the borrows (keys of `Storage.borrows`) through which the bytes were reached.
    `low` and `high` are the same range as addresses: storages of foreign memory may overlap.
    """

    __slots__ = (
        "channel", "devices", "end", "exclusive", "exempt", "high", "lifetime_only", "low", "start", "storage",
        "writes",
    )  # fmt: skip

    def __init__(
        self,
        storage: Storage,
        start: int,
        end: int,
        writes: bool,
        exclusive: bool = False,
        lifetime_only: bool = False,
        channel: bool = False,
        devices: tuple[Any, ...] = (),
        exempt: tuple[int, ...] = (),
    ) -> None:
        self.storage = storage
        self.start = start
        self.end = end
        self.writes = writes
        self.exclusive = exclusive
        self.lifetime_only = lifetime_only
        self.channel = channel
        self.devices = devices
        self.exempt = exempt
        self.low = storage.address + start
        self.high = storage.address + end

    def again(self) -> Use:
        """Another use of the same bytes in the same way."""
        return Use(
            self.storage,
            self.start,
            self.end,
            self.writes,
            self.exclusive,
            self.lifetime_only,
            self.channel,
            self.devices,
            self.exempt,
        )


@dataclass(slots=True, eq=False)
class Argument:
    """A bound argument: its IR type, the 64-bit words it passes, the storage it uses."""

    type: Type
    words: bytes
    uses: tuple[Use, ...]
    keep: Any
    """What has to outlive the launch beyond the storages."""
    extents: tuple[int, ...] = ()
    group: Any = None
    """The group whose ranks a kernel with this argument talks to; its abort word is polled."""
    max_programs: int | None = None
    """Largest grid that the object has rows for; None where the kernel checks its slots itself."""
    slots: int | None = None
    """Slots of a signal or counter: how large a grid may be whose programs use the slot of their index."""
    programs: int | None = None
    """The grid that an exclusive partition gives, where it has one program for each tile."""
    serial: int = field(default_factory=_serials.__next__)
    """Its own for ever: what is known of launches is kept by it, without keeping the argument and its storages."""


def pack_words(values: tuple[int, ...]) -> bytes:
    """`values` as little-endian 64-bit words; negative strides keep their sign."""
    return struct.pack(f"<{len(values)}q", *values)


def facts_of(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[tuple[bool, ...], int, tuple[int, ...]]:
    """(unit_stride, align, divisible): what may be promised to the compiler about a view."""
    unit = tuple(s == 1 for s in strides)
    align = VECTOR_ALIGN if address % VECTOR_ALIGN == 0 else 0
    divisible = tuple(
        DIVISOR if n % DIVISOR == 0 and all(u or s % DIVISOR == 0 for u, s in zip(unit, strides, strict=True)) else 1
        for n in shape
    )
    return unit, align, divisible


def view_type(
    dtype: Any,
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    access: Access,
    partition: Partition | None = None,
    space: Space = Space.LOCAL,
) -> Type:
    """The canonical type of a local view with these run-time facts."""
    unit, align, divisible = facts_of(address, shape, strides)
    return canonical(ViewType(dtype, len(shape), access, space, partition, unit, align, divisible))


def symmetric_type(dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...], access: Access, align: int) -> Type:
    """The canonical type of a symmetric object; `align` must hold on every rank (heaps are page aligned)."""
    unit, _, divisible = facts_of(0, shape, strides)
    return canonical(SymmetricType(dtype, len(shape), access, unit_stride=unit, align=align, divisible=divisible))


def multicast_type(
    dtype: Any,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    align: int,
    *,
    hardware: bool = False,
    pointer: bool = False,
) -> Type:
    """The canonical type of a multicast object; `hardware`: the fabric has a mapping of it; `pointer`: passed as an
    address."""
    unit, _, divisible = facts_of(0, shape, strides)
    return canonical(MulticastType(dtype, len(shape), unit, align, divisible, hardware, pointer))
