"""Programs of the unsafe tier: only tokens order, so each chain of tokens is a strand, an agent of its own.

A token stands for all that its operation is ordered after. An operation goes on in the strand of its token if
nothing has used that token yet, and starts a strand of its own otherwise; without a token it is ordered after the
start of the kernel alone. Views and waits of such a kernel stay in program order, on the program's own strand.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from peertile.dtypes import DType
from peertile.memory_model import Order, Rmw, Scope
from peertile.sim.agents import Agent, Kind
from peertile.sim.cells import Box, Record, read_weak, write_weak
from peertile.sim.clocks import Clock, join
from peertile.sim.machine import Found
from peertile.sim.memory import Object, scalar
from peertile.sim.program import Program, disturb
from peertile.sim.proxies import ALIASES, cross
from peertile.sim.report import access_of, outside_part
from peertile.sim.sites import Site
from peertile.sim.verdicts import Bounds, Lifetime
from peertile.sim.words import Word

__all__ = ["Strand", "Token", "UnsafeProgram"]


class Strand(Agent):
    """A chain of operations that tokens order."""

    __slots__ = ("parent", "tip")

    def __init__(self, parent: UnsafeProgram, entry: int) -> None:
        super().__init__(Kind.STRAND, parent.rank, entry, parent.label, parent.program)
        self.parent = parent

    def launched(self) -> str:
        return self.parent.launched()
        self.tip: Token | None = None


class Token:
    """What an operation is ordered after: a strand up to a point, or a clock of several."""

    __slots__ = ("clock", "strand")

    def __init__(self, clock: Clock, strand: Strand | None) -> None:
        self.clock = clock
        self.strand = strand


class UnsafeProgram(Program):
    """A program whose pointer operations are ordered by tokens alone."""

    __slots__ = ("base", "strands", "target")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.strands: list[Strand] = []
        self.base: Clock | None = None
        self.target: Any = None

    # ---------------------------------------------------------------- tokens

    def new_token(self) -> Token:
        return Token(self._start(), None)

    def _start(self) -> Clock:
        if self.base is None:
            self.base = dict(self.launch.before)
        return self.base

    def join_tokens(self, tokens: Sequence[Token]) -> Token:
        clock: Clock = {}
        for token in tokens:
            join(clock, token.clock)
        return Token(clock, None)

    def _strand(self, token: Token | None) -> Strand:
        """The strand that the next operation with `token` belongs to."""
        if token is not None and token.strand is not None and token.strand.tip is token:
            return token.strand
        machine = self.machine
        strand = Strand(self, machine.entry("strand", self.entry, len(self.strands)))
        machine.begin(strand, self._start() if token is None else token.clock)
        strand.released = self.released
        self.strands.append(strand)
        return strand

    def _token(self, strand: Strand) -> Token:
        strand.tip = token = Token(dict(strand.clock), strand)
        return token

    def settle(self) -> None:
        super().settle()
        for strand in self.strands:
            self.machine.end(strand)
            join(self.clock, strand.clock)

    def fence(self, scope: Scope, site: Site | None) -> None:
        """Orders all operations before it, whatever their tokens, with all after it."""
        for strand in self.strands:
            if strand.pending is not None:
                join(strand.clock, strand.pending)
            join(self.clock, strand.clock)
        super().fence(scope, site)
        self.base = dict(self.clock)
        for strand in self.strands:
            join(strand.clock, self.base)
            strand.fenced, strand.fenced_scope = self.fenced, scope

    def cross(self) -> None:
        """On every strand, and for what starts from here on."""
        super().cross()
        self.base = {**self._start(), **{entry: known for entry, known in self.clock.items() if entry < 0}}
        for strand in self.strands:
            cross(strand, ALIASES)

    # ---------------------------------------------------------------- addresses

    def aim(self, site: Site, dtype: DType, pointer: Any) -> None:
        """The next synchronising operation is on this word, or on these."""
        self.site = site
        flat = np.atleast_1d(np.asarray(pointer)).reshape(-1)
        found = self.machine.memory.find(int(flat[0])) if flat.size == 1 else None
        if found is None:
            self.at = None
            return
        target, offset = found
        is_there = target.freed_by is None and target.part_around(offset, offset + dtype.itemsize)
        self.at = target.word(dtype, offset, site.name) if is_there else target

    def _find(self, site: Site, address: int, size: int) -> tuple[Object, int]:
        found = self.machine.memory.find(address)
        if found is None or found[1] + size > found[0].nbytes or found[0].freed_by is not None:
            if found is not None:
                self.reach(site, found[0], found[1], found[1] + size)
            target = self.machine.memory.make(0, self.rank, "no object")
            record = Record(self.entry, self.clock[self.entry], site, self, self.steps)
            raise Found(Bounds(access=access_of(target, record, ()), message=f"address {address:#x} lies in no object"))
        self._inside(site, found[0], ((found[1], found[1] + size),))
        return found

    def _box(self, site: Site, size: int, addresses: Any) -> tuple[Object, Box, Any]:
        """Object, exact box and byte offsets of the elements at `addresses`."""
        flat = addresses.reshape(-1)
        target, first = self._find(site, int(flat.min()), size)
        self._find(site, int(flat.max()), size)
        offsets = flat - target.base
        last = int(offsets.max())
        if last + size > target.nbytes:
            self.reach(site, target, first, last + size)
        n = flat.size
        if last - first == (n - 1) * size and (n == 1 or bool((np.diff(offsets) == size).all())):
            self._inside(site, target, ((first, last + size),))
            return target, target.shadow.box((first, (), n * size)), offsets
        starts = np.unique(offsets)
        runs: list[tuple[int, int]] = []
        for start in starts.tolist():
            if runs and runs[-1][1] == start:
                runs[-1] = (runs[-1][0], start + size)
            else:
                runs.append((start, start + size))
        self._inside(site, target, runs)
        return target, target.shadow.box_of_runs(tuple(runs)), offsets

    def _inside(self, site: Site, target: Object, runs: Sequence[tuple[int, int]]) -> None:
        """Runs of bytes each lie in one object of those that a heap has lent out, and in none that was given back."""
        if target.gone:
            self._given_back(site, target, runs)
        if target.parts is None:
            return
        for start, end in runs:
            if not target.part_around(start, end):
                record = Record(self.entry, self.clock[self.entry], site, self, self.steps)
                raise Found(outside_part(target, record, start, end))

    def _given_back(self, site: Site, target: Object, runs: Sequence[tuple[int, int]]) -> None:
        for start, end in runs:
            by = target.given_back(start, end)
            if by is not None and self.machine.judge:
                raise Found(Lifetime(access=access_of(target, self.record(site), ((start, end),)), freed_by=by))

    def _words(self, site: Site, dtype: DType, pointer: Any, mask: Any) -> list[tuple[tuple[int, ...], Word]]:
        addresses = np.asarray(pointer)
        found = []
        for k in np.ndindex(*addresses.shape):
            if mask is not None and not np.asarray(mask)[k]:
                continue
            target, offset = self._find(site, int(addresses[k]), dtype.itemsize)
            word = target.word(dtype, offset, site.name)
            if self.machine.foresight:
                word.future = self.machine.foresight.get((target.base, offset), [])
            if not word.index:
                word.index = (offset // dtype.itemsize,)
            found.append((k, word))
        return found

    # ---------------------------------------------------------------- accesses

    def ptr_load(
        self, site: Site, dtype: DType, shape: tuple[int, ...], pointer: Any, fill: Any, mask: Any, token: Any
    ) -> tuple[Any, Token]:
        strand = self._strand(token)
        result = np.array(np.broadcast_to(np.asarray(fill).astype(dtype.numpy), shape))
        if site.order is not Order.WEAK:
            for k, word in self._words(site, dtype, pointer, mask):
                result[k] = self._as(strand, partial(self.load_word, site), word)
        else:
            addresses = np.asarray(pointer)
            chosen = addresses if mask is None else addresses[np.asarray(mask)]
            if chosen.size:
                target, box, offsets = self._box(site, dtype.itemsize, np.atleast_1d(chosen))
                record = Record(strand.entry, strand.clock[strand.entry], site, strand, self.steps)
                conflict = read_weak(box, strand.clock, record)
                if conflict is not None:
                    self.machine.conflict(conflict, record, target)
                values = target.typed(dtype)[offsets // dtype.itemsize]
                if mask is None:
                    result[...] = values.reshape(shape)
                else:
                    result[np.asarray(mask)] = values
        value: Any = scalar(result[()], dtype) if not shape else result
        return value, self._token(strand)

    def ptr_store(
        self, site: Site, dtype: DType, shape: tuple[int, ...], pointer: Any, tile: Any, mask: Any, token: Any
    ) -> Token:
        strand = self._strand(token)
        self.writes += 1
        values = np.broadcast_to(np.asarray(tile).astype(dtype.numpy), shape)
        if site.order is not Order.WEAK:
            for k, word in self._words(site, dtype, pointer, mask):
                value = scalar(values[k], dtype)
                self._as(strand, partial(self.store_word, site, value=value), word)
            return self._token(strand)
        addresses = np.asarray(pointer)
        chosen = addresses if mask is None else addresses[np.asarray(mask)]
        if chosen.size:
            target, box, offsets = self._box(site, dtype.itemsize, np.atleast_1d(chosen))
            record = Record(strand.entry, strand.clock[strand.entry], site, strand, self.steps)
            conflict = write_weak(box, strand.clock, record)
            if conflict is not None:
                self.machine.conflict(conflict, record, target)
            own = values.reshape(-1) if mask is None else values[np.asarray(mask)]
            target.typed(dtype)[offsets // dtype.itemsize] = own
            if target.words or target.loose:
                disturb(strand, target, box.runs, site)
        return self._token(strand)

    def ptr_rmw(
        self, site: Site, dtype: DType, shape: tuple[int, ...], pointer: Any, tile: Any, mask: Any, token: Any, rmw: Rmw
    ) -> tuple[Any, Token]:
        strand = self._strand(token)
        values = np.broadcast_to(np.asarray(tile).astype(dtype.numpy), shape)
        old = np.zeros(shape, dtype.numpy)
        for k, word in self._words(site, dtype, pointer, mask):
            addend = scalar(values[k], dtype)
            old[k] = self._as(strand, partial(self.rmw_word, site, value=addend, rmw=rmw), word)
        value: Any = scalar(old[()], dtype) if not shape else old
        return value, self._token(strand)

    def ptr_cas(
        self, site: Site, dtype: DType, shape: tuple[int, ...], pointer: Any, compare: Any, value: Any, mask: Any,
        token: Any,
    ) -> tuple[Any, Token]:  # fmt: skip
        strand = self._strand(token)
        compares = np.broadcast_to(np.asarray(compare).astype(dtype.numpy), shape)
        values = np.broadcast_to(np.asarray(value).astype(dtype.numpy), shape)
        old = np.zeros(shape, dtype.numpy)
        for k, word in self._words(site, dtype, pointer, mask):
            one, other = scalar(compares[k], dtype), scalar(values[k], dtype)
            old[k] = self._as(strand, partial(self.cas_word, site, compare=one, value=other), word)
        result: Any = scalar(old[()], dtype) if not shape else old
        return result, self._token(strand)

    def _as(self, strand: Strand, access: Any, word: Word) -> Any:
        """Does `access` in the place of the strand: with its clock, epochs and fences."""
        mine = (self.entry, self.clock, self.fenced, self.fenced_scope, self.pending)
        self.entry, self.clock = strand.entry, strand.clock
        self.fenced, self.fenced_scope, self.pending = strand.fenced, strand.fenced_scope, strand.pending
        try:
            return access(word)
        finally:
            strand.fenced, strand.fenced_scope, strand.pending = self.fenced, self.fenced_scope, self.pending
            strand.released, strand.denied = self.released, self.denied
            self.entry, self.clock, self.fenced, self.fenced_scope, self.pending = mine
