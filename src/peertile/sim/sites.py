"""Places in programs from which memory is accessed: what a report says about an access beside who and where."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from peertile.memory_model import Order, Proxy, Scope
from peertile.source import Loc

if TYPE_CHECKING:
    from peertile.sim.agents import Agent

__all__ = ["Site", "Verb"]


class Verb(Enum):
    """What an access does, as a report says it."""

    READS = "reads"
    WRITES = "writes"
    UPDATES = "updates"
    WAITS = "waits for"
    FILLS = "fills"
    COPIES_FROM = "copies from"
    COPIES_TO = "copies to"


@dataclass(eq=False, slots=True)
class Site:
    """One place: made once, shared by all accesses from it. `size` is bytes per element, `name` the object in
    the words of the program, `unit` the bytes that one index of it counts."""

    verb_kind: Verb
    name: str
    size: int
    order: Order = Order.WEAK
    scope: Scope | None = None
    loc: Loc | None = None
    proxy: Proxy = Proxy.GENERIC
    code: str = ""
    signed: int = 0
    """Bits of a signed integer that the access sees: words hold unsigned numbers. 0: it sees them as they are."""
    tells: bool = False
    """Of a wait: what it saw is used."""
    kind: tuple[int, Scope | None, int] = field(init=False)

    def __post_init__(self) -> None:
        path = 0 if self.proxy is Proxy.GENERIC else (1 + tuple(Proxy).index(self.proxy)) << 16
        self.kind = (self.size + path, self.scope, -1)

    def seen(self, value: Any) -> Any:
        """A word's number as this place sees it."""
        bits = self.signed
        return value - (1 << bits) if bits and value >> bits - 1 else value

    def kept(self, value: Any) -> Any:
        """A number of this place as a word keeps it."""
        return value & ((1 << self.signed) - 1) if self.signed else value

    @property
    def verb(self) -> str:
        """The access with its order and scope: "writes (release, system)"."""
        scope = f", {self.scope.value}" if self.scope is not None else ""
        proxy = f", {self.proxy.value} proxy" if self.proxy is not Proxy.GENERIC else ""
        return f"{self.verb_kind.value} ({self.order.value}{scope}{proxy})"

    def reaches(self, one: Agent, two: Agent) -> bool:
        """Whether the scope includes both agents."""
        if self.scope is Scope.SYSTEM:
            return True
        if self.scope is Scope.DEVICE:
            return one.rank == two.rank and not one.is_host and not two.is_host
        return self.scope is Scope.PROGRAM and one is two
