"""Words that order: the writes of one element that is accessed with an order, and what a read of it acquires.

A `Word` keeps every write of its run in modification order with the clock that the write released. Which clock a
reader acquires is decided here, by the rules of docs/concepts/memory-model.md: what a read returned (MM-24 to
MM-26), and for waits what they could not have passed without (MM-27, MM-28). No values of tiles, no schedule.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from peertile.dtypes import DType, i8, i16, i32, i64, u8, u16, u32, u64
from peertile.meaning.numbers import satisfies
from peertile.memory_model import Cmp, Scope
from peertile.sim.agents import Denied
from peertile.sim.clocks import Adds, Clock, join, necessary, seen_too

if TYPE_CHECKING:
    from peertile.sim.agents import Agent
    from peertile.sim.cells import Box
    from peertile.sim.memory import Loose
    from peertile.sim.sites import Site

__all__ = ["SIGNED", "History", "Rule", "Word", "Write"]


SIGNED: Final[dict[DType, DType]] = {u8: i8, u16: i16, u32: i32, u64: i64}


class Rule(Enum):
    """What a wait is ordered after."""

    EVENT = "event"
    """Every event without which it could not have passed: the verdict does not depend on who was ahead."""
    READS_FROM = "reads_from"
    """The write that it read: what is certain of this run. Directed runs confirm a race under it."""


class History(Enum):
    """How a word has been written in this run, which decides what can be said of its waits."""

    NONE = "none"
    CHAIN = "chain"
    """Stores, each ordered after the one before it, upwards: one writer."""
    ADDS = "adds"
    OTHER = "other"
    """Several writers, resets, exchanges: judged by what was read."""


class Write:
    """One write: its value, who made it in which epoch, and what it released (None: nothing).

    `released` includes what the writes that it continues have released; `own` does not."""

    __slots__ = ("agent", "entry", "epoch", "event", "own", "released", "scope", "site", "value")

    def __init__(
        self, value: Any, agent: Agent | None, site: Site | None, own: Clock | None, released: Clock | None,
        scope: Scope | None,
    ) -> None:  # fmt: skip
        self.value = value
        self.agent = agent
        self.site = site
        self.own = own
        self.released = released
        self.scope = scope
        self.entry = -1 if agent is None else agent.entry
        self.event = -1
        self.epoch = 0 if agent is None else agent.clock[agent.entry]


class Word:
    """One element that ordered accesses reach, with its writes in modification order; the first is what it held."""

    __slots__ = (
        "box", "dtype", "floors", "future", "has_relaxed", "history", "home", "index", "log", "mask", "name", "offset",
        "passed", "rank", "scopes", "start", "waiters", "writes",
    )  # fmt: skip

    def __init__(self, name: str, rank: int, offset: int, dtype: DType, box: Box, start: Any) -> None:
        self.name = name
        self.rank = rank
        self.offset = offset
        self.dtype = dtype
        self.box = box
        self.start = start
        self.mask = (1 << dtype.bits) - 1
        self.index: tuple[int, ...] = ()
        self.writes: list[Write] = [Write(start, None, None, None, None, None)]
        self.floors: dict[int, list[tuple[int, int]]] = {}
        self.history = History.NONE
        self.has_relaxed = False
        """Whether a store to it released nothing by itself."""
        self.log = Adds()
        self.scopes: set[tuple[Scope | None, int]] = set()
        """Scopes of the adds, each with the rank it is about."""
        self.waiters: list[Any] = []
        self.future: list[tuple[int, Clock]] = []
        """Adds that an earlier pass over the same run saw: (weight, released)."""
        self.passed: list[tuple[int, int, int, Clock]] = []
        """Waits on adds: adds posted by then, entry and epoch of the waiter, what it acquired."""
        self.home: Any = None
        """The object that it lies in."""

    @property
    def value(self) -> Any:
        """The newest value."""
        return self.writes[-1].value

    def spelled(self) -> str:
        """The word for people: "ready.arrived[0, 1] on rank 1"."""
        index = f"[{', '.join(map(str, self.index))}]" if self.index else f" at byte {self.offset}"
        return f"{self.name}{index} on rank {self.rank}"

    def satisfies(self, cmp: Cmp, expected: Any, signed: int = 0) -> bool:
        """Whether the newest value compares so; `signed` is the bits of a signed number, 0 for others."""
        value = self.writes[-1].value
        if not signed:
            return satisfies(cmp, value, expected, self.dtype)
        return satisfies(cmp, value - (1 << signed) if value >> signed - 1 else value, expected, SIGNED[self.dtype])

    # ---------------------------------------------------------------- writes

    def reset(self, value: Any) -> None:
        """A weak write that everything before is ordered before: the word starts anew."""
        self.start = value
        self.writes = [Write(value, None, None, None, None, None)]
        self.floors = {}
        self.history = History.NONE
        self.has_relaxed = False
        self.log = Adds()
        self.scopes = set()

    def recall(self, loose: Sequence[tuple[Any, Loose]]) -> None:
        """Puts writes that came before this was a word in front of its history: what each replaced, and the write."""
        if not loose:
            return
        newest, self.start = self.writes[-1].value, loose[0][0]
        self.writes = [Write(self.start, None, None, None, None, None)]
        goes_up = True
        for k, (_, made) in enumerate(loose):
            last = self.writes[-1]
            record = made.record
            value = loose[k + 1][0] if k + 1 < len(loose) else newest
            write = Write(value, record.agent, record.site, None, None, None)
            write.entry, write.epoch = record.entry, record.epoch
            write.scope = None if record.site is None else record.site.scope
            self.writes.append(write)
            if made.adds and self.dtype.is_int:
                self.log.append((int(write.value) - int(last.value)) & self.mask, {})
                owner = -1 if write.scope is Scope.SYSTEM or record.agent is None else record.agent.rank
                self.scopes.add((write.scope, owner))
            follows = last.agent is None or last.entry == write.entry
            goes_up = goes_up and follows and satisfies(Cmp.AT_LEAST, write.value, last.value, self.dtype)
        if self.dtype.is_int and all(made.adds for _, made in loose):
            self.history = History.ADDS
        elif goes_up and not any(made.adds for _, made in loose):
            self.history = History.CHAIN
            self.has_relaxed = True
        else:
            self.history = History.OTHER

    def refresh(self) -> None:
        """Another word over the same bytes may have changed: take the number as it lies in memory."""
        value = self.home.get(self.dtype, self.offset)
        if value != self.writes[-1].value:
            self.reset(value)

    def disturb(self, value: Any, agent: Agent, site: Site) -> None:
        """A weak write that meets ordered ones: it releases nothing."""
        self.writes.append(Write(value, agent, site, None, None, None))
        self.history = History.OTHER

    def _release(self, agent: Agent, site: Site) -> tuple[Clock | None, Scope | None]:
        if site.order.releases:
            return agent.release(site), site.scope
        return agent.fenced, agent.fenced_scope if agent.fenced is not None else site.scope

    def store(self, value: Any, agent: Agent, site: Site) -> None:
        last = self.writes[-1]
        if self.history is History.NONE:
            self.history = History.CHAIN
        if self.history is not History.CHAIN or not (
            agent.clock.get(last.entry, 0) >= last.epoch and satisfies(Cmp.AT_LEAST, value, last.value, self.dtype)
        ):
            self.history = History.OTHER
        write = Write(value, agent, site, None, None, None)
        write.own, write.scope = self._release(agent, site)
        write.released = write.own
        self.has_relaxed = self.has_relaxed or not site.order.releases
        self.writes.append(write)

    def update(self, value: Any, agent: Agent, site: Site, adds: bool) -> None:
        """A read-modify-write: continues the release sequence of the write that it read, the last one."""
        last = self.writes[-1]
        if self.history is History.NONE and adds:
            self.history = History.ADDS
        elif self.history is not History.ADDS or not adds:
            self.history = History.OTHER
        write = Write(value, agent, site, None, None, None)
        own, write.scope = self._release(agent, site)
        write.own = own
        if self.history is History.ADDS:
            self.log.append((int(value) - int(last.value)) & self.mask, own if own is not None else {})
            self.scopes.add((write.scope, agent.rank if write.scope is not Scope.SYSTEM else -1))
        if last.released is None or last.released is own:
            write.released = own
        else:
            write.released = dict(last.released)
            if own is not None:
                join(write.released, own)
            if write.scope is not Scope.SYSTEM and last.scope is Scope.SYSTEM and own is None:
                write.scope = last.scope
        self.writes.append(write)

    # ---------------------------------------------------------------- reads

    def floor(self, agent: Agent) -> int:
        """The oldest write that the agent may still read: never behind what it has read, nor behind a write or a
        read that happens before it."""
        writes, clock = self.writes, agent.clock
        last = len(writes) - 1
        get = clock.get
        low = 0
        for k in range(last, 0, -1):
            write = writes[k]
            if get(write.entry, 0) >= write.epoch or get(-4 * write.entry - 4, 0) >= write.epoch:
                low = k
                break
        if low < last:
            for entry, seen in self.floors.items():
                known = max(get(entry, 0), get(-4 * entry - 4, 0))
                at = bisect_right(seen, (known, last + 1)) - 1
                if at >= 0 and seen[at][1] > low:
                    low = seen[at][1]
        return low

    def note(self, agent: Agent, k: int) -> None:
        """The agent has read write `k`."""
        entry = agent.entry
        epoch = agent.clock[entry]
        seen = self.floors.get(entry)
        if seen is None:
            self.floors[entry] = [(epoch, k)]
        elif seen[-1][0] == epoch:
            seen[-1] = (epoch, k)
        else:
            seen.append((epoch, k))

    def take(self, write: Write, agent: Agent, site: Site) -> None:
        """What a read of `write` from `site` acquires, now or at the agent's next fence."""
        released = write.released
        if released is None:
            if write.agent is not None and write.agent is not agent and write.site is not None:
                agent.denied = Denied(
                    site, f"{write.site.verb_kind.value} it {write.site.order.value}: it releases nothing"
                )
            return
        writer = write.agent
        assert writer is not None
        if writer is not agent:
            reader_site = site
            if site.scope is not Scope.SYSTEM and not site.reaches(agent, writer):
                agent.denied = Denied(reader_site, f"its {_scope(site.scope)} scope does not include {writer.where()}")
                return
            if write.scope is not Scope.SYSTEM and not _reaches(write.scope, writer, agent):
                why = f"the {_scope(write.scope)} scope of the write by {writer.where()} leaves {agent.where()} out"
                agent.denied = Denied(site, why)
                return
        if site.order.acquires:
            join(agent.clock, released)
            return
        if agent.pending is None:
            agent.pending = dict(released)
        else:
            join(agent.pending, released)
        if writer is not agent:
            agent.denied = Denied(site, "it is relaxed and no fence follows before the access")

    def satisfying(self, cmp: Cmp, expected: Any, agent: Agent, site: Site) -> list[int]:
        """The writes that a wait of `agent`, which the newest satisfies, may have read; the newest first."""
        last = len(self.writes) - 1
        earlier = range(last - 1, self.floor(agent) - 1, -1) if last else ()
        return [last, *(k for k in earlier if self._satisfied_by(k, cmp, expected, site))]

    def _satisfied_by(self, k: int, cmp: Cmp, expected: Any, site: Site) -> bool:
        """Whether the value of write `k`, as `site` sees it, is what a wait is for."""
        dtype = self.dtype if not site.signed else SIGNED[self.dtype]
        return satisfies(cmp, site.seen(self.writes[k].value), expected, dtype)

    def read(self, k: int, agent: Agent, site: Site) -> Any:
        """A wait that has read write `k`: acquires, and gives the value."""
        if k:
            self.take(self.writes[k], agent, site)
        self.note(agent, k)
        return site.seen(self.writes[k].value)

    def pass_wait(self, cmp: Cmp, expected: Any, agent: Agent, site: Site, rule: Rule) -> Any:
        """A wait that the newest value satisfies, and whose value nobody uses: acquires, and gives the value."""
        writes = self.writes
        last = len(writes) - 1
        k = last
        if rule is Rule.EVENT and cmp is not Cmp.NE and cmp is not Cmp.LE and cmp is not Cmp.LT:
            if self.history is History.CHAIN:
                while k > 0 and self._satisfied_by(k - 1, cmp, expected, site):
                    k -= 1
                if 0 < k < last and self.floors:
                    k = max(k, self.floor(agent))  # it has read a later one before, and does not go back
                if self.has_relaxed and 0 < k < last:
                    # It may have read any of them: the one that says least.
                    k = min(range(k, last + 1), key=lambda at: sum((writes[at].released or {}).values()))
            elif self.history is History.ADDS and cmp is not Cmp.EQ:
                self._take_necessary(cmp, expected, agent, site)
                self.note(agent, last)
                return site.seen(writes[last].value)
        if k:
            self.take(writes[k], agent, site)
        self.note(agent, k)
        return site.seen(writes[last].value)

    def _take_necessary(self, cmp: Cmp, expected: Any, agent: Agent, site: Site) -> None:
        """On a word of adds: acquires what no choice of sufficient adds could have left out."""
        need = int(expected) - int(site.seen(self.start)) + (cmp is Cmp.GT)
        if cmp is Cmp.AT_LEAST:
            need = (need & self.mask) - ((need & (self.mask + 1 >> 1)) << 1)
        log = self.log
        count = len(log.weights)
        if not count or need <= 0:
            return
        epoch = agent.clock[agent.entry]
        plain = (Scope.SYSTEM, -1) if site.scope is Scope.SYSTEM else (site.scope, agent.rank)
        if self.scopes != {plain} or self.future:
            adds = self.adds(agent, site)
            # Adds that were still to come when this wait passed could have let it pass too, unless they follow it.
            adds += [add for add in self.future[count:] if add[1].get(agent.entry, 0) < epoch]
            found = necessary(adds, need)
        else:
            found = log.needed(need)
        self.passed.append((count, agent.entry, epoch, found))
        last = self.writes[-1]
        taken = dict(found)
        if last.released is not None and last.agent is not None and self._pairs(last.agent, last.scope, agent, site):
            taken = seen_too(found, last.released)
        if site.order.acquires:
            join(agent.clock, taken)
        elif agent.pending is None:
            agent.pending = taken
        else:
            join(agent.pending, taken)

    @staticmethod
    def _pairs(writer: Agent, scope: Scope | None, reader: Agent, site: Site) -> bool:
        """Whether the scopes of a write and of a read from `site` each include the other agent."""
        return writer is reader or (_reaches(scope, writer, reader) and site.reaches(reader, writer))

    def adds(self, reader: Agent | None = None, site: Site | None = None) -> list[tuple[int, Clock]]:
        """Weight and released clock of each add so far; no clock where scopes leave `reader` out."""
        found: list[tuple[int, Clock]] = []
        before = int(self.start)
        for write in self.writes[1:]:
            weight = (int(write.value) - before) & self.mask
            before = int(write.value)
            released = write.own
            if released is not None and reader is not None and write.agent is not None:
                assert site is not None
                if not self._pairs(write.agent, write.scope, reader, site):
                    released = None
            found.append((weight, released if released is not None else {}))
        return found

    def is_settled(self) -> bool:
        """Whether no add that came after a wait passed could have let it pass: else look again, knowing all adds."""
        if not self.passed:
            return True
        for count, entry, epoch, acquired in self.passed:
            for released in self.log.rivals(count):
                if released.get(entry, 0) >= epoch:
                    continue
                if any(released.get(e, 0) < c for e, c in acquired.items()):
                    return False
        return True


def _reaches(scope: Scope | None, writer: Agent | None, reader: Agent) -> bool:
    if scope is Scope.SYSTEM:
        return True
    return (
        scope is Scope.DEVICE
        and writer is not None
        and writer.rank == reader.rank
        and not (writer.is_host or reader.is_host)
    ) or (scope is Scope.PROGRAM and writer is reader)


def _scope(scope: Scope | None) -> str:
    return scope.value if scope is not None else "missing"
