"""Launches: the programs of one kernel on one rank, their admission, and how they end.

Only as many programs of a rank run as the machine has places; which of those that wait for one is admitted next
is a choice. A program's clock entry is that of its stream and index, so the next launch of the stream goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Final

import numpy as np

from peertile.dtypes import u64
from peertile.errors import ArgumentError
from peertile.ir.types import Access, ObjectType, PointerType, Space, SymmetricType, TileType, Type, ViewType
from peertile.meaning.grid import PerRank
from peertile.memory_model import Cmp
from peertile.sim.clocks import join
from peertile.sim.conditions import Overlap
from peertile.sim.machine import Found, Machine
from peertile.sim.memory import Object, Symmetric, View, scalar
from peertile.sim.program import Program, ProgramFault, fault_verdict
from peertile.sim.proxies import ALIASES, cross
from peertile.sim.sites import Site
from peertile.sim.strands import UnsafeProgram
from peertile.sim.streams import Operation, Stream
from peertile.sim.trace import Deed, Work
from peertile.sim.translate import Translation
from peertile.sim.verdicts import Waiter
from peertile.sim.words import Word

__all__ = ["Launch", "Setup", "full_grid"]

_WORDS: Final = ViewType(u64, 1, Access.READ_WRITE, Space.DEVICE)


def full_grid(grid: int | Sequence[int]) -> tuple[int, int, int]:
    """A grid with all three axes."""
    n0, n1, n2 = (*((grid,) if isinstance(grid, int) else tuple(grid)), 1, 1)[:3]
    return n0, n1, n2


class Launch(Operation):
    """One launch. Ends when all of its programs have."""

    __slots__ = (
        "args", "failure", "grid", "left", "machine", "output", "pending", "place", "rank", "stream", "translation",
        "words_view",
    )  # fmt: skip

    def __init__(
        self, machine: Machine, rank: int, translation: Translation, grid: tuple[int, int, int], args: Sequence[Any],
        name: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(name or translation.kernel.name)
        self.reach = ()
        self.work = Work.LAUNCH
        self.machine = machine
        self.rank = rank
        self.translation = translation
        self.grid = grid
        self.args = args
        self.left = prod(grid)
        self.pending: list[Program] = []
        self.stream: Stream | None = None
        self.words_view: View | None = None
        self.failure: ProgramFault | None = None
        self.output: list[tuple[int, int, str, tuple[Any, ...]]] = []
        self.place = ""
        """The line of the host program that launched it, where one did."""

    def launched(self) -> str:
        """Where it was launched, for people."""
        return f"launched at {self.place}" if self.place else ""

    # ---------------------------------------------------------------- running

    def start(self, stream: Stream) -> bool:
        self.stream = stream
        if self.left == 0:
            return True
        machine, rank = self.machine, self.rank
        overlap = machine.conditions.overlap
        if (
            machine.active.get(rank)
            and overlap is not Overlap.ALWAYS
            and (overlap is Overlap.NEVER or machine.chooser.value(2))
        ):
            machine.held.setdefault(rank, []).append(self)
            return False
        self._begin(stream)
        return False

    def waits(self, stream: Stream) -> Waiter | None:
        if self in self.machine.held.get(self.rank, ()):
            return Waiter(stream.where(), f"the device to be free for {self.name}: another kernel runs on it")
        return None

    def _begin(self, stream: Stream) -> None:
        machine = self.machine
        machine.active[self.rank] = machine.active.get(self.rank, 0) + 1
        n0, n1, _ = self.grid
        cls = UnsafeProgram if self.translation.unsafe else Program
        self.before = stream.release(None)
        for index in range(self.left):
            entry = machine.entry("program", self.rank, stream.number, index)
            ids = (index % n0, index // n0 % n1, index // (n0 * n1))
            program = cls(machine, self, entry, index, ids, self.grid)
            machine.begin(program, self.before)
            if self.translation.proxies:  # a launch is behind a fence of every proxy
                cross(program, ALIASES)
            program.code = self.translation.start(program, *self.args)
            if machine.resident is not None:
                program.ready = False
                self.pending.append(program)
            machine.add(program)
            if machine.trace is not None:
                number = len(machine.trace.events) - 1
                machine.trace.add(program, "starts", None, number, deed=Deed.BEGIN, stream=stream.label)
        if machine.resident is not None:
            machine.waiting.setdefault(self.rank, []).extend(self.pending)
            self.pending = []
            _admit(machine, self.rank)

    def words(self) -> View:
        """The words of this launch: zero when it starts."""
        if self.words_view is None:
            target = self.machine.memory.make(64, self.rank, f"launch words of {self.name}", zeroed=True)
            self.words_view = View(_WORDS, target, 0, (8,), (8,), "launch words")
        return self.words_view

    def ended(self, program: Program) -> None:
        """A program has ended, whatever way."""
        stream = self.stream
        assert stream is not None
        program.settle()
        join(stream.clock, program.clock)
        self.left -= 1
        if self.machine.resident is not None:
            self.machine.residents[self.rank] -= 1
            _admit(self.machine, self.rank)
        if self.left == 0:
            machine = self.machine
            machine.active[self.rank] -= 1
            held = machine.held.get(self.rank)
            if held and not machine.active[self.rank]:
                following = held.pop(machine.chooser.value(len(held)) if len(held) > 1 else 0)
                following._begin(following.stream)
            self.completed()
            self.finished(stream)

    def finished(self, stream: Stream) -> None:
        stream.finish(self)

    def completed(self) -> None:
        """All programs have ended; for drivers."""

    def fault(self, fault: ProgramFault) -> None:
        """A check of a program failed."""
        if self.machine.ends_at_faults:
            raise Found(fault_verdict(fault))
        if self.failure is None:
            self.failure = fault

    def parked(self, program: Program, site: Site, word: Word, cmp: Cmp, expected: Any) -> None:
        """A program waits; for drivers, which bound it."""

    def printed(self, program: Program, place: int, prefix: str, values: tuple[Any, ...]) -> None:
        self.output.append((program.index, place, prefix, values))


def _admit(machine: Machine, rank: int) -> None:
    """Gives free places of a rank to programs that wait for one."""
    waiting = machine.waiting.get(rank, [])
    assert machine.resident is not None
    while waiting and machine.residents.get(rank, 0) < machine.resident:
        k = machine.chooser.value(len(waiting)) if len(waiting) > 1 else 0
        machine.residents[rank] = machine.residents.get(rank, 0) + 1
        machine.wake(waiting.pop(k))


def _address(array: np.ndarray[Any, Any]) -> int:
    """Where its first element lies; half the cost of `ctypes.data`."""
    return int(array.__array_interface__["data"][0])


class Setup:
    """Arguments of kernels on a machine: arrays, per rank where they are `PerRank`, given memory once.

    The same array is the same object in every launch; after a run the arrays hold what it left.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._objects: dict[tuple[int, int], Object] = {}
        self._keep: list[Any] = []

    def object(self, array: np.ndarray[Any, Any], rank: int, name: str, *, written: bool = True) -> Object:
        """The object whose bytes are those of `array`."""
        base = array
        while isinstance(base.base, np.ndarray):
            base = base.base
        key = (id(base), rank)
        found = self._objects.get(key)
        if found is None:
            raw = base.reshape(-1).view(np.uint8)
            found = self.machine.memory.make(raw.nbytes, rank, name, zeroed=written, backing=raw)
            self._objects[key] = found
            self._keep.append(base)
        return found

    def bind(self, t: Type, arg: Any, name: str, rank: int) -> Any:
        """The run-time value of a parameter of type `t` on `rank`."""
        ranks = self.machine.ranks
        if isinstance(t, SymmetricType):
            arrays = arg if isinstance(arg, PerRank) else (arg,)
            if len(arrays) != ranks:
                raise ArgumentError(f"{name}: expected one array for each of {ranks} ranks, got {len(arrays)}")
            return Symmetric(t, tuple(self.view(t.view, a, name, r) for r, a in enumerate(arrays)), rank)
        if isinstance(t, ObjectType):
            if not isinstance(arg, Mapping):
                raise ArgumentError(
                    f"{name}: expected a mapping from field to arrays for {t}, got {type(arg).__name__}"
                )
            return {f: self.bind(ft, arg[f], f"{name}.{f}", rank) for f, ft in t.fields.items()}
        own = arg[rank] if isinstance(arg, PerRank) else arg
        if isinstance(t, ViewType):
            return self.view(t, own, name, rank)
        if isinstance(t, PointerType):
            target, offset = self._place(own, name, rank)
            return target.base + offset
        assert isinstance(t, TileType)
        value = np.asarray(own).astype(t.dtype.numpy)[()]
        return scalar(value, t.dtype)

    def _place(self, own: Any, name: str, rank: int) -> tuple[Object, int]:
        """Object and byte of an argument of a pointer: an array, or (array, rank of its memory)."""
        array, owner = own if isinstance(own, tuple) else (own, rank)
        target = self.object(array, owner, name)
        if array.base is None:
            return target, 0
        return target, _address(array) - _address(target.data)

    def view(self, t: ViewType, array: Any, name: str, rank: int) -> View:
        if not isinstance(array, np.ndarray) or array.dtype != t.dtype.numpy or array.ndim != t.rank:
            got = f"{array.dtype} of rank {array.ndim}" if isinstance(array, np.ndarray) else type(array).__name__
            raise ArgumentError(f"{name}: expected an array of {t.dtype} of rank {t.rank}, got {got}")
        target, offset = self._place(array, name, rank)
        view = View(t, target, offset, array.shape, array.strides, name)
        target.views[len(target.views)] = view
        return view
