"""A program at run time: an agent, a generator made by `translate`, and what its code calls to reach memory.

Names are short where translated code uses them. Weak accesses are checked and done at once; an access with an
order is a synchronising operation: the code yields before it, so that the machine may let others go first.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from peertile.dtypes import DType
from peertile.errors import OutOfBounds
from peertile.meaning.numbers import apply_rmw
from peertile.memory_model import Cmp, Proxy, Rmw
from peertile.sim.agents import Agent, Kind
from peertile.sim.cells import Record, read_strong, read_weak, write_strong, write_weak
from peertile.sim.clocks import Clock, join
from peertile.sim.loops import TRIES, Trip, same
from peertile.sim.machine import MAX_STALE, Found, Machine
from peertile.sim.memory import Object, Symmetric, Tile, View, scalar
from peertile.sim.proxies import ALIASES, Lens, cross
from peertile.sim.report import access_of
from peertile.sim.sites import Site, Verb
from peertile.sim.trace import Deed
from peertile.sim.verdicts import Bounds, KernelFault, Lifetime, Waiter, WordMisuse
from peertile.sim.words import SIGNED, History, Word, Write

if TYPE_CHECKING:
    from peertile.sim.launches import Launch

__all__ = ["Program", "ProgramFault"]

Code = Generator[Any, None, None]
_LIVE: Final = object()


class ProgramFault(Exception):
    """A check of a program failed; the launch decides what becomes of it. `kind` is the name of an ops.CheckKind."""

    def __init__(self, kind: str, message: str, program: Program, place: int, got: int, limit: int, loc: Any) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.program = program
        self.place = place
        self.got = got
        self.limit = limit
        self.loc = loc


class Program(Agent):
    """One program instance: agent and task in one."""

    __slots__ = (
        "at", "code", "done", "ending", "expected", "grid", "ids", "index", "launch", "machine", "parked", "polls",
        "ready", "site", "slot", "stale", "transfers", "trips", "wait_place", "writes",
    )  # fmt: skip

    def __init__(
        self, machine: Machine, launch: Launch, entry: int, index: int, ids: tuple[int, ...], grid: tuple[int, ...]
    ) -> None:
        super().__init__(Kind.PROGRAM, launch.rank, entry, launch.name, index)
        self.index = index
        self.machine = machine
        self.launch = launch
        self.ids = ids
        self.grid = grid
        self.ready = True
        self.done = False
        self.ending = False
        self.code: Code
        self.at: Any = None
        """The word that the next synchronising operation is on, for exploration: None for none."""
        self.site: Site | None = None
        self.expected: Any = None
        self.polls: dict[Word, int] = {}
        """The words that a parked loop waits for, and which of their writes it read."""
        self.stale: dict[Word, int] = {}
        """How many of its last reads of a word gave replaced values."""
        self.trips: list[Trip] = []
        """Of the loops that poll and are open, from the outermost; those that were left lie above, until one below
        them goes round."""
        self.parked: Trip | None = None
        """The trip at whose end it is parked."""
        self.writes = 0
        self.transfers: list[Agent] = []
        """Asynchronous stores that nobody has waited for yet."""
        self.wait_place = -1
        self.slot = 0

    def launched(self) -> str:
        return self.launch.launched()

    # ---------------------------------------------------------------- as a task

    def run(self) -> None:
        self.steps += 1
        self.parked = None
        if self.ending:
            self.finish()
            return
        try:
            if next(self.code):
                self.ready = False
        except StopIteration:
            park = self.machine.park
            if park is not None and park.holds(self):  # the end is a synchronising operation, too
                self.ending = True
                self.at = None
            else:
                self.finish()
        except ProgramFault as fault:
            self.ready = False
            self.launch.fault(fault)  # which ends programs that were parked, and this one may still be among them
            if not self.done:
                self.finish()

    def finish(self) -> None:
        self.ready = False
        self.done = True
        if self.machine.trace is not None:
            self.machine.trace.add(self, "ends", deed=Deed.END)
        self.machine.end(self)
        self.launch.ended(self)

    def condition(self, word: Word) -> tuple[Any, Any, int] | None:
        if self.at is word and self.expected is not None and self.site is not None:
            return (*self.expected, self.site.signed)
        return None

    def settle(self) -> None:
        """At its end everything that the program did is in its clock, through whatever proxy."""
        for entry in self.lenses.values():
            self.clock[entry] = self.clock[self.entry]
        for engine in self.transfers:
            join(self.clock, engine.clock)
            self.machine.end(engine)

    def waits(self) -> Waiter | None:
        if self.ready or self.site is None:
            return Waiter(
                self.where(), "its turn" if self.ready else "a place to run: as many programs as fit are resident"
            )
        word = self.at
        if isinstance(word, Word):
            cmp = self.expected[0]
            what = f"{word.spelled()} {cmp.value} {self.expected[1]}"
            return Waiter(self.where(), what, str(word.value), _last_writer(word), self.site.loc, self.launched())
        words = list(self.polls)
        what = " or ".join(word.spelled() for word in words) or "a word that it polls"
        seen = ", ".join(str(word.value) for word in words)
        last = "; ".join(_last_writer(word) for word in words)
        what = f"{what} to change: it polls"
        return Waiter(self.where(), what, seen, last, self.site.loc, self.launched())

    # ---------------------------------------------------------------- faults

    def fail(self, site: Site, kind: str, message: str, place: int, got: int = 0, limit: int = 0) -> None:
        raise ProgramFault(kind, message, self, place, int(got), int(limit), site.loc)

    def record(self, site: Site) -> Record:
        return Record(self.entry, self.clock[self.entry], site, self, self.steps)

    def outside(self, site: Site, view: View, role: str, index: int, limit: int) -> None:
        """An index left its view."""
        message = f"{role} of {site.name}: expected 0 to {limit - 1}, got {index}"
        if self.machine.ends_at_faults:
            raise Found(Bounds(access=access_of(view.object, self.record(site), ()), message=message))
        self.fail(site, "bounds", message, -1, index, limit)

    def reach(self, site: Site, target: Object, low: int, high: int) -> None:
        """Bytes [low, high) of an object are about to be accessed: they must exist, and not have been freed."""
        if target.freed_by is not None and self.machine.judge:
            raise Found(Lifetime(access=access_of(target, self.record(site), ()), freed_by=target.freed_by))
        if low < 0 or high > target.nbytes:
            message = f"{site.name} reaches bytes {low} to {high} of {target.name}, which has {target.nbytes}"
            raise Found(Bounds(access=access_of(target, self.record(site), ()), message=message))

    def gone(self, site: Site, view: View) -> None:
        """The memory of a view was given back; somebody else may have it by now."""
        if not self.machine.judge:
            return
        assert view.stale is not None
        low, high = view.ends()
        raise Found(Lifetime(access=access_of(view.object, self.record(site), ((low, high),)), freed_by=view.stale))

    # ---------------------------------------------------------------- views

    def peer(self, site: Site, x: Symmetric, rank: int) -> View:
        if not 0 <= rank < len(x.views):
            self.outside(site, x.views[x.rank], "rank", rank, len(x.views))
        return x.views[rank]

    def _tile(self, site: Site, view: View, index: tuple[int, ...], shape: tuple[int, ...]) -> Any:
        if view.stale is not None:
            self.gone(site, view)
        for axis, (k, n, size) in enumerate(zip(index, view.extents, shape, strict=True)):
            tiles = max(-(-n // size), 1)
            if not 0 <= k < tiles:
                self.outside(site, view, f"tile index of axis {axis}", k, tiles)
        tile = view.tile([k * size for k, size in zip(index, shape, strict=True)], shape)
        if tile.box is not None:
            self.reach(site, view.object, tile.box.runs[0][0], tile.box.runs[-1][1])
        view.tiles[index, shape] = tile
        return tile

    def tile(self, site: Site, view: View, index: tuple[int, ...], shape: tuple[int, ...]) -> Tile:
        """Where the tile of `shape` at tile index `index` lies, for an access that is about to happen."""
        found = view.tiles.get((index, shape))
        if found is None:
            found = self._tile(site, view, index, shape)
        if view.object.freed_by is not None:
            self.reach(site, view.object, 0, 0)
        return found

    def disturbs(self, target: Object, runs: Any, site: Site, agent: Agent | None = None) -> None:
        """A weak write of the program, or of an agent of it, over bytes that are words too."""
        disturb(self if agent is None else agent, target, runs, site)

    def load(self, site: Site, view: View, index: tuple[int, ...], shape: tuple[int, ...], padding: Any) -> Any:
        tile = view.tiles.get((index, shape))
        if tile is None:
            tile = self._tile(site, view, index, shape)
        box, inside, part = tile
        if box is not None:
            target = view.object
            if target.freed_by is not None:
                self.reach(site, target, 0, 0)
            record = Record(self.entry, self.clock[self.entry], site, self, self.steps)
            conflict = read_weak(box, self.clock, record)
            if conflict is not None:
                self.machine.conflict(conflict, record, target)
        if part is None:
            return view.array[inside].copy()
        found = np.full(shape, padding, view.array.dtype)
        found[part] = view.array[inside]
        return found

    def store(self, site: Site, view: View, index: tuple[int, ...], values: Any, shape: tuple[int, ...]) -> None:
        tile = view.tiles.get((index, shape))
        if tile is None:
            tile = self._tile(site, view, index, shape)
        box, inside, part = tile
        if box is None:
            return
        self.writes += 1
        target = view.object
        if target.freed_by is not None:
            self.reach(site, target, 0, 0)
        record = Record(self.entry, self.clock[self.entry], site, self, self.steps)
        conflict = write_weak(box, self.clock, record)
        if conflict is not None:
            self.machine.conflict(conflict, record, target)
        view.array[inside] = values if part is None else values[part]
        if target.words or target.loose:
            disturb(self, target, box.runs, site)

    def tile_atomic(
        self, site: Site, view: View, index: tuple[int, ...], values: Any, shape: tuple[int, ...], rmw: Rmw
    ) -> None:
        """Element by element, each a read-modify-write of its own."""
        tile = view.tiles.get((index, shape))
        if tile is None:
            tile = self._tile(site, view, index, shape)
        box, inside, part = tile
        if box is None:
            return
        self.writes += 1
        target = view.object
        own = values if part is None else values[part]
        if not target.words and not (site.order.acquires or site.order.releases) and self.fenced is None:
            clock: Any = self.clock
            entry = self.entry
            if site.proxy is not Proxy.GENERIC:
                clock = self.lens(site.proxy)
                entry = clock.entry
            record = Record(entry, clock[entry], site, self, self.steps)
            conflict = read_strong(box, clock, record, site.kind) or write_strong(box, clock, record, site.kind)
            if conflict is not None:
                self.machine.conflict(conflict, record, target)
            if self.machine.stale:
                target.write_loosely(box.runs, record, adds=rmw is Rmw.ADD)
            view.array[inside] = apply_rmw(rmw, view.array[inside], own, view.type.dtype)
            return
        origin = [s.start for s in inside]
        for k in np.ndindex(*own.shape):
            at = tuple(a + b for a, b in zip(origin, k, strict=True))
            word = self.word(site, view, at)
            self.rmw_word(site, word, scalar(own[k], view.type.dtype), rmw)

    # ---------------------------------------------------------------- proxies

    def lens(self, proxy: Proxy) -> Lens:
        """The program's clock as an access through `proxy` sees it."""
        entry = self.lenses.get(proxy)
        if entry is None:
            entry = self.machine.entry("proxy", self.entry, proxy)
            self.lenses = {**self.lenses, proxy: entry}
        return Lens(self.clock, self.entry, entry, proxy)

    def through(self, access: Callable[..., Any], site: Site, *arguments: Any) -> Any:
        """An access without order through the proxy of its place."""
        lens = self.lens(site.proxy)
        mine = (self.entry, self.clock)
        self.entry, self.clock = lens.entry, cast("Clock", lens)
        try:
            return access(site, *arguments)
        finally:
            self.entry, self.clock = mine

    def cross(self) -> None:
        """A fence between the generic proxy and those of aliases and multicast."""
        cross(self, ALIASES)

    # ---------------------------------------------------------------- words

    def _offset(self, site: Site, view: View, index: tuple[int, ...]) -> int:
        if view.stale is not None:
            self.gone(site, view)
        offset = view.offset
        for axis, (k, n, stride) in enumerate(zip(index, view.extents, view.strides, strict=True)):
            if not 0 <= k < n:
                self.outside(site, view, f"element index of axis {axis}", k, n)
            offset += k * stride
        return offset

    def word_load(self, site: Site, view: View, index: tuple[int, ...]) -> Any:
        """A weak read of one element."""
        tile = view.tiles.get(index)
        if tile is None:
            offset = self._offset(site, view, index)
            self.reach(site, view.object, offset, offset + site.size)
            tile = view.tiles[index] = (view.object.shadow.box((offset, (), site.size)), offset)  # type: ignore[assignment]
        box, offset = tile  # type: ignore[misc]
        self.check_read(site, view.object, box)
        return view.object.get(view.type.dtype, offset)

    def word_store(self, site: Site, view: View, index: tuple[int, ...], value: Any) -> None:
        """A weak write of one element."""
        tile = view.tiles.get(index)
        if tile is None:
            offset = self._offset(site, view, index)
            self.reach(site, view.object, offset, offset + site.size)
            tile = view.tiles[index] = (view.object.shadow.box((offset, (), site.size)), offset)  # type: ignore[assignment]
        box, offset = tile  # type: ignore[misc]
        self.check_write(site, view.object, box)
        view.object.set(view.type.dtype, offset, value)
        if view.object.words or view.object.loose:
            disturb(self, view.object, box.runs, site)

    def check_read(self, site: Site, target: Object, box: Any) -> None:
        if target.freed_by is not None:
            self.reach(site, target, 0, 0)
        record = Record(self.entry, self.clock[self.entry], site, self, self.steps)
        conflict = read_weak(box, self.clock, record)
        if conflict is not None:
            self.machine.conflict(conflict, record, target)

    def check_write(self, site: Site, target: Object, box: Any) -> None:
        self.writes += 1
        if target.freed_by is not None:
            self.reach(site, target, 0, 0)
        record = Record(self.entry, self.clock[self.entry], site, self, self.steps)
        conflict = write_weak(box, self.clock, record)
        if conflict is not None:
            self.machine.conflict(conflict, record, target)

    def word(self, site: Site, view: View, index: tuple[int, ...]) -> Word:
        """The word that a synchronising operation is about to reach."""
        offset = self._offset(site, view, index)
        target = view.object
        word = target.words.get((offset, view.type.dtype))
        if word is None or len(target.sizes) > 1:
            self.reach(site, target, offset, offset + site.size)
            word = target.word(view.type.dtype, offset, view.name)
            word.index = index
            if self.machine.foresight:
                word.future = self.machine.foresight.get((target.base, offset), [])
        self.at = word
        self.site = site
        return word

    def load_word(self, site: Site, word: Word) -> Any:
        self.check_strong(site, word, read_strong)
        k = self.machine.stale_read(word, self, site)
        if k < len(word.writes) - 1:
            # Finite time: who has read replaced values of this word again and again reads the newest.
            seen = self.stale.get(word, 0) + 1
            if seen > MAX_STALE:
                k, seen = len(word.writes) - 1, 0
            self.stale[word] = seen
        elif self.stale:
            self.stale.pop(word, None)
        write = word.writes[k]
        word.take(write, self, site)
        word.note(self, k)
        self.read(word, k, site)
        if self.machine.trace is not None:
            what = f"{word.spelled()} is {write.value} ({site.order.value})"
            self.machine.trace.add(self, what, site.loc, write.event if site.order.acquires else -1)
        return site.seen(write.value)

    def store_word(self, site: Site, word: Word, value: Any) -> None:
        self.writes += 1
        self.check_strong(site, word, write_strong)
        history, last = word.history, word.writes[-1]
        # Behind a store that this agent has read, whatever its order, comes what it writes there itself.
        follows = self.clock.get(last.entry, 0) >= last.epoch or word.floor(self) == len(word.writes) - 1
        value = site.kept(value)
        word.store(value, self, site)
        if self.machine.trace is not None:
            what = f"{word.spelled()} = {value} ({site.order.value})"
            word.writes[-1].event = self.machine.trace.add(self, what, site.loc, deed=_deed_of(site))
        if history is History.ADDS and word.history is History.OTHER:
            self._mixed(site, word)
        if last.site is not None and last.site.verb_kind is Verb.WRITES and not follows:
            repair = "give each writer a word of its own, or use an atomic read-modify-write"
            self.machine.suspect(self._misuse(site, word, last, "two stores to it are not ordered", repair))
        word.home.set(word.dtype, word.offset, value)
        word.note(self, len(word.writes) - 1)
        self.machine.wake_word(word)
        if len(word.home.sizes) > 1:
            self._wake_overlapping(word)

    def rmw_word(self, site: Site, word: Word, value: Any, rmw: Rmw) -> Any:
        self.check_strong(site, word, read_strong)
        self.check_strong(site, word, write_strong)
        last = word.writes[-1]
        old = last.value
        word.take(last, self, site)
        new = site.kept(_combine(rmw, site.seen(old), value, SIGNED[word.dtype] if site.signed else word.dtype))
        history = word.history
        word.update(new, self, site, rmw is Rmw.ADD)
        if self.machine.trace is not None:
            what = f"{word.spelled()} {rmw.value} {value} ({site.order.value})"
            word.writes[-1].event = self.machine.trace.add(self, what, site.loc, last.event, _deed_of(site))
        if history is History.CHAIN and rmw is Rmw.ADD:
            self._mixed(site, word)
        word.home.set(word.dtype, word.offset, new)
        if new != old:
            self.writes += 1
            self.machine.wake_word(word)
        elif word.history is History.OTHER and len(word.writes) > 1:
            # A value that came and stayed is one write for whoever polls: the loop makes no progress.
            del word.writes[-2]
        k = len(word.writes) - 1
        word.note(self, k)
        self.read(word, k, site)
        return site.seen(old)

    def _wake_overlapping(self, word: Word) -> None:
        """The same bytes are words of other sizes, too: whoever waits for those looks again."""
        end = word.offset + word.dtype.itemsize
        for (offset, dtype), other in list(word.home.words.items()):
            if other is not word and offset < end and word.offset < offset + dtype.itemsize:
                other.refresh()
                self.machine.wake_all(other.waiters)

    def cas_word(self, site: Site, word: Word, compare: Any, value: Any) -> Any:
        self.check_strong(site, word, read_strong)
        last = word.writes[-1]
        old = last.value
        word.take(last, self, site)
        if _bits(old, word.dtype) == _bits(site.kept(compare), word.dtype):
            self.check_strong(site, word, write_strong)
            self.writes += 1
            value = site.kept(value)
            word.update(value, self, site, False)
            word.home.set(word.dtype, word.offset, value)
            self.machine.wake_word(word)
        k = len(word.writes) - 1
        word.note(self, k)
        self.read(word, k, site)
        return site.seen(old)

    def check_strong(self, site: Site, word: Word, check: Any) -> None:
        target = word.home
        if target.freed_by is not None:
            self.reach(site, target, 0, 0)
        clock: Any = self.clock
        entry = self.entry
        if site.proxy is not Proxy.GENERIC:
            clock = self.lens(site.proxy)
            entry = clock.entry
        record = Record(entry, clock[entry], site, self, self.steps)
        conflict = check(word.box, clock, record, site.kind)
        if conflict is not None:
            self.machine.conflict(conflict, record, target)

    def _mixed(self, site: Site, word: Word) -> None:
        other = next((w for w in reversed(word.writes[:-1]) if w.site is not None and w.agent is not None), None)
        if self.machine.judge:
            message = "it is written by stores and by adds"
            raise Found(self._misuse(site, word, other, message, "use one kind of write per word"))

    def _misuse(self, site: Site, word: Word, other: Write | None, message: str, repair: str) -> WordMisuse:
        sides = [access_of(word.home, Record(self.entry, 0, site, self, 0), ())]
        if other is not None:
            sides.insert(0, access_of(word.home, Record(other.entry, 0, other.site, other.agent, 0), ()))
        return WordMisuse(word=word.spelled(), message=message, accesses_=tuple(sides), repair=repair)

    # ---------------------------------------------------------------- waiting

    def blocked(self, site: Site, word: Word, cmp: Cmp, expected: Any) -> bool:
        """Whether a wait has to go on waiting; if so it is parked at the word."""
        if len(word.home.sizes) > 1:
            word.refresh()
        if word.satisfies(cmp, expected, site.signed):
            return False
        if self.machine.trace is not None:
            what = f"waits for {word.spelled()} {cmp.value} {expected}"
            self.machine.trace.add(self, what, site.loc, deed=Deed.WAIT)
        self.check_strong(site, word, read_strong)  # a poll in vain is a read all the same
        self.expected = (cmp, expected)
        self.site = site
        self.at = word
        word.waiters.append(self)
        self.launch.parked(self, site, word, cmp, expected)
        return True

    def pass_wait(self, site: Site, word: Word, cmp: Cmp, expected: Any) -> Any:
        self.check_strong(site, word, read_strong)
        if self.machine.trace is not None:
            what = f"{word.spelled()} {cmp.value} {expected}: {word.value} ({site.order.value})"
            self.machine.trace.add(self, f"waited for {what}", site.loc, word.writes[-1].event, Deed.WAITED)
        if site.tells:  # what it saw decides, so it has read the write that it tells, and knows no less
            return word.read(self.machine.one_of(word.satisfying(cmp, expected, self, site)), self, site)
        return word.pass_wait(cmp, expected, self, site, self.machine.rule)

    def read(self, word: Word, k: int, site: Site) -> None:
        """A read of write `k`, for the loop that it may be in."""
        if self.trips:
            self.trips[-1].reads.append((word, k, site))

    def enter_loop(
        self, loop: int, carried: tuple[Any, ...] = (), free: tuple[Any, ...] | None = None, counted: bool = False
    ) -> None:
        """A loop that polls begins. `counted`: it makes few trips, and counts them."""
        trips = self.trips
        at = next((k for k, trip in enumerate(trips) if trip.loop == loop), len(trips))
        del trips[at:]  # left before
        trips.append(Trip(loop, self.writes, carried, free, counted))

    def back_edge(self, site: Site, loop: int, carried: tuple[Any, ...] = ()) -> bool:
        """The end of a trip of a loop that polls: True, and parked, if it came to nothing, as the next one will, and no
        word that it read has a newer value."""
        trips = self.trips
        while trips[-1].loop != loop:  # loops inside it, which were left
            inner = trips.pop()
            trips[-1].reads += inner.reads
        trip = trips[-1]
        reads = trip.reads
        if trip.counted or not reads or trip.writes != self.writes or not same(trip.carried, carried):
            if len(trips) > 1:
                trips[-2].reads += reads
            trip.next(self.writes, carried)
            return False
        spins = self.machine.spins
        if spins is not None and len(reads) == 1:
            spins(self, trip, *reads[0])
        trip.reads, before, trip.before = [], trip.before, [read[:2] for read in reads]
        if trip.free is None and trip.before != before:  # the next one may read something else
            return False
        if any(k < len(word.writes) - 1 for word, k, _ in reads):
            return False
        self.polls = {word: k for word, k, _ in reads}
        for word in self.polls:
            word.waiters.append(self)
        self.site = site
        self.at = None
        self.parked = trip
        if self.machine.trace is not None:
            words = " or ".join(word.spelled() for word in self.polls)
            self.machine.trace.add(self, f"waits for {words} to change", site.loc, deed=Deed.WAIT)
        return True

    def try_again(self) -> bool:
        """Nobody else can go on: whether this loop goes round once more, as it may have a bound of its own."""
        trip = self.parked
        if trip is None or trip.tries >= TRIES:
            return False
        trip.tries += 1
        for word in self.polls:
            if self in word.waiters:
                word.waiters.remove(self)
        self.machine.wake(self)
        return True

    # ---------------------------------------------------------------- output

    def print(self, place: int, prefix: str, values: tuple[Any, ...]) -> None:
        self.launch.printed(self, place, prefix, tuple(np.array(v) for v in values))


def disturb(agent: Agent, target: Object, runs: Any, site: Site) -> None:
    """A weak write over bytes that are words too, or were written with an order."""
    if target.loose:
        target.renew(runs)
    low, high = runs[0][0], runs[-1][1]  # in ascending order; most words of a heap lie elsewhere
    for (offset, dtype), word in list(target.words.items()):
        end = offset + dtype.itemsize
        if low < end and offset < high and any(start < end and offset < stop for start, stop in runs):
            value = target.get(dtype, offset)
            if all(agent.clock.get(w.entry, 0) >= w.epoch for w in word.writes):
                word.reset(value)
            else:
                word.disturb(value, agent, site)
            if word.waiters:
                machine: Machine = word.waiters[0].machine
                machine.wake_word(word)


def _deed_of(site: Site) -> Deed:
    return Deed.RELEASE if site.order.releases else Deed.OTHER


def _bits(value: Any, dtype: DType) -> bytes:
    return np.asarray(value).astype(dtype.numpy).tobytes()


def _combine(rmw: Rmw, old: Any, value: Any, dtype: DType) -> Any:
    """What a read-modify-write leaves behind."""
    if rmw is Rmw.XCHG:
        return value
    if rmw is Rmw.ADD and dtype.is_int:
        total = (old + value) & ((1 << dtype.bits) - 1)
        return total - (1 << dtype.bits) if total > dtype.max else total
    kind = dtype.numpy.type
    return scalar(apply_rmw(rmw, np.asarray(old).astype(kind), np.asarray(value).astype(kind), dtype)[()], dtype)


def _last_writer(word: Word) -> str:
    last = word.writes[-1]
    if last.agent is None:
        return "nobody has written it"
    at = f" at {last.site.loc.user}" if last.site is not None and last.site.loc is not None else ""
    return f"written last by {last.agent.where()}{at}"


def merge_clock(agent: Agent, other: dict[int, int]) -> None:
    """Everything that `other` knows is known to the agent."""
    join(agent.clock, other)


def fault_verdict(fault: ProgramFault) -> KernelFault:
    """The verdict on a failed check."""
    message, program = fault.message, fault.program
    if fault.kind == "bounds":
        message = OutOfBounds.text(message, fault.got, fault.limit)
    return KernelFault(message=message, agent=program.where(), loc=fault.loc, launched=program.launched())
