"""The words of the memory model: order, scope, proxy, comparison and read-modify-write kinds.

An access has an *order* (weak < relaxed < acquire / release < acq_rel), a *scope* (which agents
take part) and a *proxy* (the path it takes to memory). A release whose write is read by an acquire
makes a happens-before edge if both scopes include both agents. See docs/concepts/memory-model.md.
"""

from __future__ import annotations

from enum import Enum

__all__ = ["Cmp", "Order", "Proxy", "Rmw", "Scope"]


class Order(Enum):
    """How an access orders what surrounds it."""

    WEAK = "weak"
    RELAXED = "relaxed"
    ACQUIRE = "acquire"
    RELEASE = "release"
    ACQ_REL = "acq_rel"

    @property
    def acquires(self) -> bool:
        """Whether what follows is ordered after the access."""
        return self in (Order.ACQUIRE, Order.ACQ_REL)

    @property
    def releases(self) -> bool:
        """Whether what precedes is ordered before the access."""
        return self in (Order.RELEASE, Order.ACQ_REL)


class Scope(Enum):
    """Who takes part in an ordered access: this program, one device, or everything."""

    PROGRAM = "program"
    DEVICE = "device"
    SYSTEM = "system"

    @property
    def width(self) -> int:
        """0, 1, 2 from narrow to wide."""
        return ("program", "device", "system").index(self.value)


class Proxy(Enum):
    """The path an access takes to memory; crossing from one to another needs a proxy fence."""

    GENERIC = "generic"
    ALIAS = "alias"
    MULTICAST = "multicast"
    BULK = "bulk"


class Cmp(Enum):
    """What a wait compares: `AT_LEAST` is wrap-safe (signed difference >= 0), the others are plain."""

    AT_LEAST = "at_least"
    EQ = "eq"
    NE = "ne"
    GE = "ge"
    LE = "le"
    GT = "gt"
    LT = "lt"


class Rmw(Enum):
    """Kinds of atomic read-modify-write. `UMIN`/`UMAX` compare as unsigned, `MIN`/`MAX` as signed."""

    ADD = "add"
    ADDF = "addf"
    AND = "and"
    OR = "or"
    XOR = "xor"
    MIN = "min"
    MAX = "max"
    UMIN = "umin"
    UMAX = "umax"
    XCHG = "xchg"
