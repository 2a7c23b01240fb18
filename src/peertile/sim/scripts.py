"""Tiny programs written by hand, one generator per program: what the model's own tests and litmus tests are made of.

    def first(p):                     def second(p):
        p.write(x)                        yield from p.wait(f, 1)
        yield from p.put(f, 1)            p.read(x)

    case = script_case([first, second])

A cell is one element of 8 bytes, or a tile of several. Every access may name its order, scope and proxy.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from peertile.dtypes import DType, u64
from peertile.ir.types import Access, Space, ViewType
from peertile.memory_model import Cmp, Order, Proxy, Rmw, Scope
from peertile.sim.agents import Agent, Kind
from peertile.sim.cells import Record, read_weak, write_weak
from peertile.sim.clocks import Clock
from peertile.sim.launches import Launch
from peertile.sim.machine import Machine
from peertile.sim.memory import View
from peertile.sim.moves import tile_load, tile_store
from peertile.sim.program import Program
from peertile.sim.runs import Case
from peertile.sim.sites import Site, Verb
from peertile.sim.streams import Stream
from peertile.sim.translate import Translation

__all__ = ["Actor", "Body", "Cell", "script_case"]


class Cell:
    """One element that a script accesses, or a tile of `count`: `name`, the rank whose memory it is, what it starts
    with (None: never written)."""

    def __init__(
        self, name: str, rank: int = 0, start: int | None = 0, dtype: DType = u64, at: Cell | None = None,
        count: int = 1,
    ) -> None:  # fmt: skip
        self.name = name
        self.rank = rank
        self.start = start
        self.dtype = dtype
        self.count = count
        self.at = at
        """A cell whose first bytes this one shares."""
        self.polled: dict[Any, Site] = {}
        """Places of reads in loops, which are the same ones in every run."""


class Actor:
    """What a script's program does, by name. Methods that order are generators."""

    def __init__(self, program: Program, views: Callable[[Cell], View]) -> None:
        self.program = program
        self.rank = program.rank
        self.got: list[Any] = []
        self._bulk_base: Clock | None = None
        self._bulks = 0
        self._views = views

    def _site(
        self, verb: Verb, cell: Cell, order: Order = Order.WEAK, scope: Scope | None = None,
        proxy: Proxy = Proxy.GENERIC, tells: bool = False,
    ) -> Site:  # fmt: skip
        code = f"{verb.value} {cell.name}"
        signed = cell.dtype.bits if cell.dtype.min < 0 else 0
        return Site(
            verb, cell.name, cell.dtype.itemsize, order, scope, None, proxy, code=code, signed=signed, tells=tells
        )

    def read(self, cell: Cell, proxy: Proxy = Proxy.GENERIC) -> Any:
        site, view = self._site(Verb.READS, cell, proxy=proxy), self._views(cell)
        load = self.program.word_load
        return load(site, view, (0,)) if proxy is Proxy.GENERIC else self.program.through(load, site, view, (0,))

    def write(self, cell: Cell, value: int = 1, proxy: Proxy = Proxy.GENERIC) -> None:
        site, view = self._site(Verb.WRITES, cell, proxy=proxy), self._views(cell)
        store = self.program.word_store
        if proxy is Proxy.GENERIC:
            store(site, view, (0,), value)
        else:
            self.program.through(store, site, view, (0,), value)

    def alias_fence(self) -> None:
        """Between the generic proxy and those of aliases and multicast, both ways."""
        self.program.cross()

    def get(
        self, cell: Cell, order: Order = Order.ACQUIRE, scope: Scope = Scope.SYSTEM, index: int = 0
    ) -> Generator[Any, None, Any]:
        site = self._site(Verb.READS, cell, order, scope)
        word = self.program.word(site, self._views(cell), (index,))
        yield
        value = self.program.load_word(site, word)
        self.got.append(value)
        return value

    def poll(
        self, cell: Cell, value: int, order: Order = Order.ACQUIRE, scope: Scope = Scope.SYSTEM
    ) -> Generator[Any, None, Any]:
        """A loop of reads, until one gives at least `value`: what it gave."""
        site = cell.polled.setdefault((order, scope), self._site(Verb.READS, cell, order, scope))
        word, loop = self.program.word(site, self._views(cell), (0,)), id(cell)
        self.program.enter_loop(loop, free=(value,))
        while True:
            self.program.at, self.program.site = word, site
            yield
            found = self.program.load_word(site, word)
            if found >= value:
                return found
            if self.program.back_edge(site, loop):
                yield True

    def put(
        self, cell: Cell, value: int, order: Order = Order.RELEASE, scope: Scope = Scope.SYSTEM
    ) -> Generator[Any, None, None]:
        site = self._site(Verb.WRITES, cell, order, scope)
        word = self.program.word(site, self._views(cell), (0,))
        yield
        self.program.store_word(site, word, value)

    def add(
        self, cell: Cell, value: int = 1, order: Order = Order.RELEASE, scope: Scope = Scope.SYSTEM,
        rmw: Rmw = Rmw.ADD, proxy: Proxy = Proxy.GENERIC,
    ) -> Generator[Any, None, Any]:  # fmt: skip
        site = self._site(Verb.UPDATES, cell, order, scope, proxy)
        word = self.program.word(site, self._views(cell), (0,))
        yield
        return self.program.rmw_word(site, word, value, rmw)

    def swap(
        self, cell: Cell, compare: int, value: int, order: Order = Order.ACQ_REL, scope: Scope = Scope.SYSTEM
    ) -> Generator[Any, None, Any]:
        site = self._site(Verb.UPDATES, cell, order, scope)
        word = self.program.word(site, self._views(cell), (0,))
        yield
        return self.program.cas_word(site, word, compare, value)

    def wait(
        self, cell: Cell, value: int, cmp: Cmp = Cmp.AT_LEAST, order: Order = Order.ACQUIRE,
        scope: Scope = Scope.SYSTEM, tells: bool = False,
    ) -> Generator[Any, None, Any]:  # fmt: skip
        """Until a value satisfies; with `tells` for what that is."""
        site = self._site(Verb.WAITS, cell, order, scope, tells=tells)
        program = self.program
        word = program.word(site, self._views(cell), (0,))
        program.expected = (cmp, value)
        yield
        while program.blocked(site, word, cmp, value):
            yield True
        return program.pass_wait(site, word, cmp, value)

    def _tile(self, verb: Verb, cell: Cell, order: Order) -> tuple[Site, View]:
        """Before an access of a whole tile with an order."""
        site, view = self._site(verb, cell, order, Scope.SYSTEM), self._views(cell)
        self.program.at, self.program.site = view.object, site
        return site, view

    def get_tile(self, cell: Cell, order: Order = Order.RELAXED) -> Generator[Any, None, Any]:
        """Reads every element."""
        site, view = self._tile(Verb.READS, cell, order)
        yield
        values = tile_load(self.program, site, view, (0,), (cell.count,)).tolist()
        self.got.append(tuple(values))
        return values

    def put_tile(self, cell: Cell, value: int, order: Order = Order.RELAXED) -> Generator[Any, None, None]:
        """Writes `value` to every element."""
        site, view = self._tile(Verb.WRITES, cell, order)
        yield
        values = np.full(cell.count, value, cell.dtype.numpy)
        tile_store(self.program, site, view, (0,), values, (cell.count,))

    def add_tile(self, cell: Cell, value: int = 1, order: Order = Order.RELAXED) -> Generator[Any, None, None]:
        """Adds `value` to every element."""
        site, view = self._tile(Verb.UPDATES, cell, order)
        yield
        values = np.full(cell.count, value, cell.dtype.numpy)
        self.program.tile_atomic(site, view, (0,), values, (cell.count,), Rmw.ADD)

    def proxy_fence(self) -> None:
        """What this program did and knows so far is before the bulk copies that it starts from now on."""
        self._bulk_base = self.program.release(None)

    def bulk(self, cell: Cell, writes: bool) -> Agent:
        """Starts an asynchronous bulk copy that reads or writes a cell: an agent of its own, which knows what its
        issuer knew at its last proxy fence."""
        program, machine = self.program, self.program.machine
        entry = machine.entry("bulk", program.entry, self._bulks)
        self._bulks += 1
        engine = Agent(Kind.STRAND, program.rank, entry, "a bulk copy of the script", program.index)
        machine.begin(engine, self._bulk_base if self._bulk_base is not None else program.launch.before)
        site = self._site(Verb.WRITES if writes else Verb.READS, cell, proxy=Proxy.BULK)
        view = self._views(cell)
        record = Record(entry, engine.clock[entry], site, engine, program.steps)
        box = view.object.shadow.box((0, (), cell.dtype.itemsize))
        found = (write_weak if writes else read_weak)(box, engine.clock, record)
        if found is not None:
            machine.conflict(found, record, view.object)
        if writes:
            view.object.set(cell.dtype, 0, 1)
        return engine

    def bulk_wait(self, *copies: Agent) -> None:
        """What these copies did is before what follows."""
        for copy in copies:
            self.program.acquire(copy.clock)

    def fence(self, scope: Scope = Scope.SYSTEM) -> None:
        self.program.fence(scope, Site(Verb.UPDATES, "fence", 1, Order.ACQ_REL, scope))


Body = Callable[[Actor], Any]


def script_case(
    programs: Sequence[Body | tuple[int, Body]],
    *,
    ranks: int | None = None,
    resident: int | None = None,
    stale: bool = True,
    max_steps: int = 20_000,
    done: Callable[[list[Actor]], None] | None = None,
) -> Case:
    """A case of `programs`, each a body or (rank, body); those of one rank are the programs of one launch.
    `done(actors)` is called at the end of a clean run."""
    placed = [p if isinstance(p, tuple) else (0, p) for p in programs]
    count = max(rank for rank, _ in placed) + 1 if ranks is None else ranks
    kept: dict[int, list[Actor]] = {}

    def build(machine: Machine) -> None:
        views: dict[int, View] = {}
        actors = kept[0] = []

        def view(cell: Cell) -> View:
            found = views.get(id(cell))
            if found is None:
                t = ViewType(cell.dtype, 1, Access.READ_WRITE, Space.PEER)
                if cell.at is not None:
                    target = view(cell.at).object
                else:
                    size = cell.dtype.itemsize
                    start = np.zeros(max(8, cell.count * size), np.uint8)
                    target = machine.memory.make(
                        start.size, cell.rank, cell.name, zeroed=cell.start is not None, backing=start
                    )
                    for k in range(cell.count if cell.start is not None else 0):
                        target.set(cell.dtype, k * size, cell.start)
                found = views[id(cell)] = View(t, target, 0, (cell.count,), (cell.dtype.itemsize,), cell.name)
                target.views[len(target.views)] = found
            return found

        for rank in range(count):
            bodies = [body for r, body in placed if r == rank]
            if not bodies:
                continue

            def start(program: Program, bodies: Sequence[Body] = bodies) -> Generator[Any, None, None]:
                actor = Actor(program, view)
                actors.append(actor)
                result = bodies[program.index](actor)
                if result is not None:
                    yield from result

            translation = Translation(None, start, (), "", False, True)  # type: ignore[arg-type]
            launch = Launch(machine, rank, translation, (len(bodies), 1, 1), (), name="the script")
            Stream(machine, rank, 0, "stream 0").enqueue(launch)

    def after(machine: Machine) -> None:
        if done is not None:
            done(sorted(kept[0], key=lambda a: (a.rank, a.program.index)))

    return Case(build, ranks=count, resident=resident, stale=stale, max_steps=max_steps, after=after)
