"""Paths to memory beside the generic one: what an access through an alias, a multicast mapping or the engine of
asynchronous copies may rely on.

An order between two agents holds for accesses through the generic proxy alone. A fence between the generic and
another proxy makes what is known of the one known to the other, at the agent that executes it, and from there on it
travels with releases as everything does: so one fence anywhere on the path from one access to the other is enough.
Clocks hold this as entries of their own:

    e                     accesses of entry e through the generic proxy, known to generic ones
    entry("proxy", e, p)  accesses of entry e through p, known to generic ones: from the fence of e on
    crossed(x, p)         accesses of entry x, known to accesses through p: from a fence of whoever knows them
    clocks.seen(x)        accesses of entry x that happened before in this run: replaced values, no order

The same program through the same proxy is in program order without any fence. Kernel boundaries cross everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from peertile.memory_model import Proxy
from peertile.sim.clocks import Clock

if TYPE_CHECKING:
    from peertile.sim.agents import Agent

__all__ = ["ALIASES", "Lens", "cross", "crossed", "is_ordered"]

ALIASES: Final = (Proxy.ALIAS, Proxy.MULTICAST)
"""What an alias fence crosses."""
_NUMBER: Final = {Proxy.ALIAS: 1, Proxy.MULTICAST: 2, Proxy.BULK: 3}


def crossed(entry: int, proxy: Proxy) -> int:
    """The entry that says what accesses through `proxy` know of `entry`."""
    return -(4 * entry + _NUMBER[proxy])


class Lens:
    """A clock as an access through a proxy sees it; reads like one. `entry` is the agent's own for that proxy."""

    __slots__ = ("_base", "_entry", "_number", "clock", "entry")

    def __init__(self, clock: Clock, base: int, entry: int, proxy: Proxy) -> None:
        self.clock = clock
        self.entry = entry
        self._base = base
        self._number = _NUMBER[proxy]

    def get(self, entry: int, default: int = 0) -> int:
        """The epoch known of `entry`."""
        if entry == self.entry:
            return self.clock[self._base]
        return self.clock.get(-(4 * entry + self._number), default)

    def __getitem__(self, entry: int) -> int:
        return self.get(entry)


def cross(agent: Agent, proxies: Sequence[Proxy]) -> None:
    """A fence between the generic proxy and `proxies`, both ways: what the agent has done, and what it knows."""
    clock = agent.clock
    epoch = clock[agent.entry]
    for proxy in proxies:
        own = agent.lenses.get(proxy)
        if own is not None:
            clock[own] = epoch
    numbers = [_NUMBER[proxy] for proxy in proxies]
    for entry, known in list(clock.items()):
        if entry >= 0:
            for number in numbers:
                key = -(4 * entry + number)
                if clock.get(key, 0) < known:
                    clock[key] = known
    # What comes later is not covered: a new epoch.
    clock[agent.entry] = epoch + 1


def is_ordered(clock: Mapping[int, int] | Lens, agent: Agent, epoch: int) -> bool:
    """Whether the agent's access in `epoch` is ordered before whoever has `clock`, proxies aside."""
    plain = clock.clock if isinstance(clock, Lens) else clock
    return plain.get(agent.entry, 0) >= epoch
