"""Shadow memory: who accessed which element last, exactly, at a cost that does not grow with the history.

Elements that always had the same history share one `Cell`. A `Box` is an exact set of bytes of one object; it
maps to the cells it is made of, found once and cached. A box that cuts a cell splits it, and every cached box
that held the cell gets both halves, so that a box is always a union of whole cells.

Nothing here knows values, agents or schedules. The partition outlives a run: `Shadow.clear` forgets only what
happened.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from peertile.memory_model import Scope

if TYPE_CHECKING:
    from peertile.sim.agents import Agent
    from peertile.sim.sites import Site

__all__ = [
    "INITIAL",
    "Box",
    "Cell",
    "Conflict",
    "Record",
    "Shadow",
    "normal_box",
    "open_access",
    "read_strong",
    "read_weak",
    "write_strong",
    "write_weak",
]


class Record(NamedTuple):
    """One access: the entry and epoch of its agent's clock, the place in the program, the agent, and how many
    synchronising operations the agent had passed (to find the access again in another run)."""

    entry: int
    epoch: int
    site: Site | None
    agent: Agent | None
    step: int


INITIAL: Final = Record(-1, 0, None, None, 0)
"""The write that memory which starts as zeros begins with: ordered before everything."""

Run = tuple[int, int]
"""Bytes [start, end) of an object."""
Geometry = tuple[int, tuple[tuple[int, int], ...], int]
"""Byte offset, (count, stride in bytes) of the outer axes, bytes of the contiguous innermost run."""


class Cell:
    """Elements with one history. Weak accesses must be ordered with every other access of the element; strong
    ones (relaxed or more) only with the weak ones, and with strong ones of another size or too narrow a scope.

    `write` is the last weak write: every access since is ordered after it. The others hold, for each entry, its
    last access of that kind since then."""

    __slots__ = ("boxes", "kind", "reads", "size", "strong_reads", "strong_writes", "write")

    def __init__(self, size: int, write: Record | None) -> None:
        self.size = size
        self.boxes: list[Box] = []
        self.write = write
        self.reads: dict[int, Record] = {}
        self.strong_writes: dict[int, Record] = {}
        self.strong_reads: dict[int, Record] = {}
        self.kind: tuple[int, Scope | None, int] | None = None

    def clear(self, write: Record | None) -> None:
        self.write = write
        if self.reads:
            self.reads = {}
        if self.strong_writes or self.strong_reads:
            self.strong_writes, self.strong_reads, self.kind = {}, {}, None

    def reborn(self) -> None:
        """The elements belong to something new: never written, but what came before has to be over."""
        before = [self.write] if self.write is not None and self.write.entry >= 0 else []
        for record in (*before, *self.strong_writes.values(), *self.strong_reads.values()):
            other = self.reads.get(record.entry)
            if other is None or other.epoch < record.epoch:
                self.reads[record.entry] = record
        self.write = None
        self.strong_writes, self.strong_reads, self.kind = {}, {}, None

    def twin(self, size: int) -> Cell:
        """A cell of the same history with other elements."""
        other = Cell(size, self.write)
        other.reads, other.kind = dict(self.reads), self.kind
        other.strong_writes, other.strong_reads = dict(self.strong_writes), dict(self.strong_reads)
        return other


class Box:
    """An exact set of bytes: `runs` in ascending order, `cells` that it is the union of."""

    __slots__ = ("cells", "runs")

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        self.cells: list[Cell] = []


def normal_box(offset: int, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> Geometry | None:
    """One spelling per set of bytes (of views without overlap); None for an empty one. Strides are in bytes."""
    axes = []
    for count, stride in zip(shape, strides, strict=True):
        if count == 0:
            return None
        if count > 1:
            if stride < 0:
                offset += (count - 1) * stride
                stride = -stride
            axes.append((stride, count))
    axes.sort()
    run = itemsize
    rest: list[tuple[int, int]] = []
    for stride, count in axes:
        if not rest and stride == run:
            run *= count
        elif rest and stride == rest[-1][0] * rest[-1][1]:
            rest[-1] = (rest[-1][0] * count, rest[-1][1])
        elif stride:
            rest.append((count, stride))
    return offset, tuple(rest), run


def runs_of(geometry: Geometry) -> list[Run]:
    """The bytes of a box as ascending runs that do not touch."""
    offset, axes, length = geometry
    starts = [offset]
    for count, stride in axes:
        starts = [start + k * stride for k in range(count) for start in starts]
    starts.sort()
    return [(start, start + length) for start in starts]


def merged(runs: Sequence[Run]) -> list[Run]:
    """Runs in any order as ascending ones that neither touch nor overlap."""
    found: list[Run] = []
    for start, end in sorted(runs):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


class Shadow:
    """The partition of one object of `nbytes` bytes into cells, as intervals in ascending order."""

    __slots__ = ("_boxes", "_cells", "_runs", "_starts", "initial", "nbytes", "tiles")

    def __init__(self, nbytes: int, *, zeroed: bool) -> None:
        self.nbytes = nbytes
        self.initial = INITIAL if zeroed else None
        first = Cell(nbytes, self.initial)
        self._starts: list[int] = [0]
        self._cells: list[Cell] = [first]
        self._boxes: dict[Geometry, Box] = {}
        self._runs: dict[Sequence[Run], Box] = {}
        self.tiles: dict[Any, dict[Any, Any]] = {}
        """Tiles of views of the object, by the geometry of the view: kept here because they hold boxes."""

    @property
    def count(self) -> int:
        """Number of intervals."""
        return len(self._starts)

    def clear(self) -> None:
        """Forget every access; keep the partition."""
        for cell in self._cells:
            cell.clear(self.initial)

    def cells(self) -> Iterable[Cell]:
        """All cells, each once."""
        return dict.fromkeys(self._cells)

    def box(self, geometry: Geometry) -> Box:
        """The box of these bytes; of the same ones, always the same object."""
        box = self._boxes.get(geometry)
        if box is None:
            box = self._boxes[geometry] = self._make(runs_of(geometry))
        return box

    def box_of_runs(self, runs: tuple[Run, ...]) -> Box:
        """The box of these ascending runs, as gathers and scatters touch them."""
        box = self._runs.get(runs)
        if box is None:
            box = self._runs[runs] = self._make(runs)
        return box

    def _cut(self, at: int) -> int:
        """The interval that starts at byte `at`, made so if need be."""
        k = bisect_right(self._starts, at) - 1
        if self._starts[k] == at:
            return k
        self._starts.insert(k + 1, at)
        self._cells.insert(k + 1, self._cells[k])
        return k + 1

    def _make(self, runs: Sequence[Run]) -> Box:
        covered: dict[Cell, list[int]] = {}
        sizes: dict[Cell, int] = {}
        for start, end in runs:
            self._cut(start)
            if end < self.nbytes:
                self._cut(end)
        for start, end in runs:
            k = bisect_right(self._starts, start) - 1
            while k < len(self._starts) and self._starts[k] < end:
                stop = self._starts[k + 1] if k + 1 < len(self._starts) else self.nbytes
                cell = self._cells[k]
                covered.setdefault(cell, []).append(k)
                sizes[cell] = sizes.get(cell, 0) + stop - self._starts[k]
                k += 1
        box = Box(runs)
        for cell, intervals in covered.items():
            if sizes[cell] < cell.size:
                part = cell.twin(sizes[cell])
                cell.size -= part.size
                for k in intervals:
                    self._cells[k] = part
                # A box is a union of whole cells, so whoever held the cell holds both halves.
                part.boxes = list(cell.boxes)
                for other in part.boxes:
                    other.cells.append(part)
                cell = part
            cell.boxes.append(box)
            box.cells.append(cell)
        return box

    def extent(self, cell: Cell) -> list[Run]:
        """Bytes of `cell`, for a report."""
        ends = [*self._starts[1:], self.nbytes]
        return merged([(a, b) for a, b, c in zip(self._starts, ends, self._cells, strict=True) if c is cell])


class Conflict(NamedTuple):
    """Two accesses of `cell` that are not ordered; `earlier` is None where the cell was never written."""

    cell: Cell
    earlier: Record | None
    why: str = ""


def open_access(cells: Iterable[Cell], clock: Mapping[int, int]) -> tuple[Cell, Record] | None:
    """An access that is not ordered before whoever has `clock`, if there is one."""
    get = clock.get
    for cell in cells:
        write = cell.write
        if write is not None and get(write.entry, 0) < write.epoch:
            return cell, write
        for records in (cell.reads, cell.strong_writes, cell.strong_reads):
            for other in records.values():
                if get(other.entry, 0) < other.epoch:
                    return cell, other
    return None


# The four checks below are the inner loop of the simulator: each returns the first conflict, or records the access.


def read_weak(box: Box, clock: Mapping[int, int], record: Record) -> Conflict | None:
    get = clock.get
    entry = record[0]
    for cell in box.cells:
        write = cell.write
        if write is None:
            if not cell.strong_writes:
                return Conflict(cell, None)
        elif get(write[0], 0) < write[1]:
            return Conflict(cell, write)
        if cell.strong_writes:
            for other in cell.strong_writes.values():
                if get(other[0], 0) < other[1]:
                    return Conflict(cell, other)
        cell.reads[entry] = record
    return None


def write_weak(box: Box, clock: Mapping[int, int], record: Record) -> Conflict | None:
    get = clock.get
    for cell in box.cells:
        write = cell.write
        if write is not None and get(write[0], 0) < write[1]:
            return Conflict(cell, write)
        if cell.reads:
            for other in cell.reads.values():
                if get(other[0], 0) < other[1]:
                    return Conflict(cell, other)
            cell.reads = {}
        if cell.kind is not None:
            for other in (*cell.strong_writes.values(), *cell.strong_reads.values()):
                if get(other[0], 0) < other[1]:
                    return Conflict(cell, other)
            cell.strong_writes, cell.strong_reads, cell.kind = {}, {}, None
        cell.write = record
    return None


def read_strong(
    box: Box, clock: Mapping[int, int], record: Record, kind: tuple[int, Scope | None, int]
) -> Conflict | None:
    get = clock.get
    if kind[1] is not Scope.SYSTEM:
        kind = _narrow(kind, record)
    for cell in box.cells:
        write = cell.write
        if write is None:
            if not cell.strong_writes:
                return Conflict(cell, None)
        elif get(write[0], 0) < write[1]:
            return Conflict(cell, write)
        if cell.kind is None:
            cell.kind = kind
        elif cell.kind != kind:
            found = _not_mutual(cell, cell.strong_writes, clock, record)
            if found is not None:
                return found
        cell.strong_reads[record[0]] = record
    return None


def write_strong(
    box: Box, clock: Mapping[int, int], record: Record, kind: tuple[int, Scope | None, int]
) -> Conflict | None:
    get = clock.get
    if kind[1] is not Scope.SYSTEM:
        kind = _narrow(kind, record)
    for cell in box.cells:
        write = cell.write
        if write is not None and get(write[0], 0) < write[1]:
            return Conflict(cell, write)
        for other in cell.reads.values():
            if get(other[0], 0) < other[1]:
                return Conflict(cell, other)
        if cell.kind is None:
            cell.kind = kind
        elif cell.kind != kind:
            found = _not_mutual(cell, cell.strong_writes, clock, record)
            if found is None:
                found = _not_mutual(cell, cell.strong_reads, clock, record)
            if found is not None:
                return found
        cell.strong_writes[record[0]] = record
    return None


def _not_mutual(cell: Cell, others: Mapping[int, Record], clock: Mapping[int, int], record: Record) -> Conflict | None:
    """The first unordered access that `record` does not pair with: other size, or a scope that leaves one out."""
    for other in others.values():
        if clock.get(other.entry, 0) >= other.epoch:
            continue
        a, b = record.site, other.site
        assert a is not None and b is not None and record.agent is not None and other.agent is not None  # noqa: PT018
        if a.proxy is not b.proxy:
            return Conflict(
                cell,
                other,
                f"one goes through the {a.proxy.value} and one through the {b.proxy.value} proxy, so "
                "neither is atomic to the other",
            )
        if a.size != b.size:
            return Conflict(
                cell, other, f"their sizes differ, {a.size} and {b.size} bytes, so neither is atomic to the other"
            )
        for site, one, two in ((a, record.agent, other.agent), (b, other.agent, record.agent)):
            if not site.reaches(one, two):
                scope = site.scope.value if site.scope is not None else "no"
                return Conflict(cell, other, f"the {scope} scope of {site.verb} does not include {two.where()}")
    # Only what is mixed needs this loop again: remember that the cell is.
    cell.kind = _MIXED
    return None


_MIXED: Final = (-1, None, -1)


def _narrow(kind: tuple[int, Scope | None, int], record: Record) -> tuple[int, Scope | None, int]:
    """The kind of an access whose scope leaves some out: alike are those of one rank's device alone."""
    agent = record.agent
    assert agent is not None
    if kind[1] is Scope.DEVICE and not agent.is_host:
        return (kind[0], kind[1], agent.rank)
    return (kind[0], kind[1], -2 - record.entry)
