"""Views of views, gathers and scatters, tiles with an order, asynchronous stores: what translated code calls for
them, with the exact elements that each touches. Functions of a program; nothing is kept here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from peertile.errors import InternalError
from peertile.ir.types import ViewType
from peertile.memory_model import Cmp, Proxy
from peertile.sim.agents import Agent, Kind
from peertile.sim.cells import Record, merged, read_strong, read_weak, write_strong, write_weak
from peertile.sim.clocks import join
from peertile.sim.memory import View, scalar
from peertile.sim.sites import Site

if TYPE_CHECKING:
    from peertile.sim.program import Program

__all__ = [
    "async_store", "gather", "permuted", "reshaped", "scatter", "sliced", "tile_load", "tile_store", "view_stride",
    "wait_any", "wait_transfers",
]  # fmt: skip


# ---------------------------------------------------------------- views of views


def _derived(view: View, t: ViewType, offset: int, extents: tuple[int, ...], strides: tuple[int, ...]) -> View:
    key = (t, offset, extents, strides)
    found = view.derived.get(key)
    if found is None:
        found = view.derived[key] = View(t, view.object, offset, extents, strides, view.name)
        if view.stale is not None:
            found.retire(view.stale)
    return found


def view_stride(view: Any, axis: int) -> int:
    """Elements from one index to the next."""
    ref = view if isinstance(view, View) else view.views[view.rank]
    return int(ref.strides[axis]) // max(ref.type.dtype.itemsize, 1)


def sliced(view: View, t: ViewType, numbers: Sequence[int]) -> View:
    """Part of a view: starts, extents and steps, of every axis each."""
    n = len(view.extents)
    starts, extents, steps = numbers[:n], tuple(numbers[n : 2 * n]), numbers[2 * n :]
    for start, count, step, extent in zip(starts, extents, steps, view.extents, strict=True):
        if count and not (0 <= start < extent and 0 <= start + (count - 1) * step < extent):
            raise InternalError(f"view_slice: {list(extents)} elements from {list(starts)} are not in {view.extents}")
    offset = view.offset + sum(a * s for a, s in zip(starts, view.strides, strict=True))
    return _derived(view, t, offset, extents, tuple(s * k for s, k in zip(view.strides, steps, strict=True)))


def permuted(view: View, t: ViewType, axes: Sequence[int]) -> View:
    """The axes in another order."""
    return _derived(view, t, view.offset, tuple(view.extents[a] for a in axes), tuple(view.strides[a] for a in axes))


def reshaped(view: View, t: ViewType, extents: Sequence[int]) -> View:
    """The same elements under other extents; the compiler saw to it that there are no gaps."""
    array = view.array.reshape(extents)
    if array.size and not np.shares_memory(array, view.array):
        raise InternalError("view_reshape: the view has gaps, though it was checked to have none")
    return _derived(view, t, view.offset, tuple(array.shape), tuple(array.strides))


# ---------------------------------------------------------------- gather and scatter


def _chosen(
    program: Program, site: Site, view: View, chosen: Any, indices: Sequence[int], axis: int, shape: tuple[int, ...]
) -> tuple[Any, Any, Any]:
    """The box of exactly the elements that a gather or scatter touches (None: of none), where they lie in the view,
    and in the tile."""
    rest = iter(indices)
    origin = []
    for k, (n, size) in enumerate(zip(view.extents, shape, strict=True)):
        index = 0 if k == axis else next(rest)
        tiles = max(-(-n // size), 1)
        if k != axis and not 0 <= index < tiles:
            program.outside(site, view, f"tile index of axis {k}", index, tiles)
        origin.append(index * size)
    flat = np.asarray(chosen).astype(np.int64)
    inside = np.nonzero((flat >= 0) & (flat < view.extents[axis]))[0]
    counts = [max(0, min(n, extent - at)) for at, n, extent in zip(origin, shape, view.extents, strict=True)]
    if not inside.size or any(not count for k, count in enumerate(counts) if k != axis):
        return None, None, None
    places = [np.arange(at, at + count) for at, count in zip(origin, counts, strict=True)]
    places[axis] = flat[inside]
    parts = [np.arange(count) for count in counts]
    parts[axis] = inside
    offsets = view.offset + sum(
        p.reshape([-1 if k == a else 1 for k in range(len(places))]) * stride
        for a, (p, stride) in enumerate(zip(places, view.strides, strict=True))
    )
    size = view.type.dtype.itemsize
    starts = np.unique(offsets)
    program.reach(site, view.object, int(starts[0]), int(starts[-1]) + size)
    breaks = np.nonzero(np.diff(starts) != size)[0]
    first = starts[np.concatenate(([0], breaks + 1))].tolist()
    last = (starts[np.concatenate((breaks, [len(starts) - 1]))] + size).tolist()
    box = view.object.shadow.box_of_runs(tuple(merged(list(zip(first, last, strict=True)))))
    return box, np.ix_(*places), np.ix_(*parts)


def gather(
    program: Program, site: Site, view: View, chosen: Any, indices: Sequence[int], axis: int, shape: tuple[int, ...],
    padding: Any,
) -> Any:  # fmt: skip
    """result[…, k, …] = view[…, chosen[k], …]; `padding` outside."""
    box, places, parts = _chosen(program, site, view, chosen, indices, axis, shape)
    found = np.full(shape, padding, view.array.dtype)
    if box is not None:
        program.check_read(site, view.object, box)
        found[parts] = view.array[places]
    return found


def scatter(
    program: Program, site: Site, view: View, values: Any, chosen: Any, indices: Sequence[int], axis: int
) -> None:
    """view[…, chosen[k], …] = values[…, k, …], in order; nothing outside."""
    box, places, parts = _chosen(program, site, view, chosen, indices, axis, values.shape)
    if box is None:
        return
    program.check_write(site, view.object, box)
    view.array[places] = values[parts]
    if view.object.words or view.object.loose:
        program.disturbs(view.object, box.runs, site)


# ---------------------------------------------------------------- tiles with an order


def tile_load(program: Program, site: Site, view: View, index: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    """One ordered read per element; zeros outside."""
    box, inside, part = program.tile(site, view, index, shape)
    found = np.zeros(shape, view.array.dtype)
    if box is None:
        return found
    if view.object.words or view.object.loose:
        own = np.empty_like(view.array[inside])
        for k, word in _words(program, site, view, inside, own.shape):
            own[k] = program.load_word(site, word)
    else:  # nobody has released anything here: numbers are those of memory
        _strong(program, site, view, box, read_strong)
        own = view.array[inside].copy()
    found[part if part is not None else ...] = own
    return found


def tile_store(
    program: Program, site: Site, view: View, index: tuple[int, ...], values: Any, shape: tuple[int, ...]
) -> None:
    """One ordered write per element."""
    box, inside, part = program.tile(site, view, index, shape)
    if box is None:
        return
    program.writes += 1
    own = values if part is None else values[part]
    if not view.object.words and not site.order.releases and program.fenced is None:
        # It releases nothing: what it replaces is all there is.
        record = _strong(program, site, view, box, write_strong)
        if program.machine.stale:
            view.object.write_loosely(box.runs, record, adds=False)
        view.array[inside] = own
        return
    for k, word in _words(program, site, view, inside, own.shape):
        program.store_word(site, word, scalar(own[k], view.type.dtype))


def _words(program: Program, site: Site, view: View, inside: Any, shape: tuple[int, ...]) -> Any:
    origin = [s.start for s in inside]
    for k in np.ndindex(*shape):
        yield k, program.word(site, view, tuple(a + b for a, b in zip(origin, k, strict=True)))


def _strong(program: Program, site: Site, view: View, box: Any, check: Any) -> Record:
    clock: Any = program.clock if site.proxy is Proxy.GENERIC else program.lens(site.proxy)
    entry = program.entry if site.proxy is Proxy.GENERIC else clock.entry
    record = Record(entry, clock[entry], site, program, program.steps)
    conflict = check(box, clock, record, site.kind)
    if conflict is not None:
        program.machine.conflict(conflict, record, view.object)
    return record


# ---------------------------------------------------------------- asynchronous stores


class Transfer(Agent):
    """An asynchronous store of a program."""

    __slots__ = ("owner",)

    def __init__(self, owner: Program) -> None:
        entry = owner.machine.entry("transfer", owner.entry, len(owner.transfers))
        super().__init__(Kind.TRANSFER, owner.rank, entry, owner.label, owner.index)
        self.owner = owner

    def launched(self) -> str:
        return self.owner.launched()


def async_store(
    program: Program, site: Site, view: View, index: tuple[int, ...], values: Any, shape: tuple[int, ...],
    source: tuple[Site, View, tuple[int, ...]] | None = None,
) -> Agent:  # fmt: skip
    """A store by an agent of its own, which starts with what the program has done. It happens at once, which is one
    of the moments that it may; who does not wait for it is not ordered behind it. `source`: where the agent has the
    values from, if that is not the program's affair alone."""
    box, inside, part = program.tile(site, view, index, shape)
    machine = program.machine
    engine = Transfer(program)
    machine.begin(engine, program.release(None))
    engine.steps = program.steps
    program.transfers.append(engine)
    if source is not None:
        place, read, at = source
        taken = program.tile(place, read, at, shape).box
        if taken is not None:
            record = Record(engine.entry, engine.clock[engine.entry], place, engine, engine.steps)
            conflict = read_weak(taken, engine.clock, record)
            if conflict is not None:
                machine.conflict(conflict, record, read.object)
    if box is not None:
        program.writes += 1
        target = view.object
        record = Record(engine.entry, engine.clock[engine.entry], site, engine, engine.steps)
        conflict = write_weak(box, engine.clock, record)
        if conflict is not None:
            machine.conflict(conflict, record, target)
        view.array[inside] = values if part is None else values[part]
        if target.words or target.loose:
            program.disturbs(target, box.runs, site, engine)
    return engine


def wait_transfers(program: Program, transfers: Sequence[Agent]) -> None:
    """What these transfers did, or without any all of the program, is before what follows."""
    for engine in transfers or program.transfers:
        join(program.clock, engine.clock)
    if not transfers:
        for engine in program.transfers:
            program.machine.end(engine)
        program.transfers = []


# ---------------------------------------------------------------- waiting for one of several words


def wait_any(program: Program, site: Site, cmp: Cmp, words: Sequence[tuple[View, Any, tuple[int, ...]]]) -> int | None:
    """The position of the first word that satisfies its comparison, acquired; None: the program is parked at all."""
    found = [(program.word(site, view, index), expected) for view, expected, index in words]
    for k, (word, expected) in enumerate(found):
        if len(word.home.sizes) > 1:
            word.refresh()
        if word.satisfies(cmp, expected, site.signed):
            program.pass_wait(site, word, cmp, expected)
            return k
    for word, _ in found:
        program.check_strong(site, word, read_strong)
        word.waiters.append(program)
    program.site, program.at, program.expected = site, None, None
    program.polls = {word: len(word.writes) - 1 for word, _ in found}
    program.launch.parked(program, site, found[0][0], cmp, found[0][1])
    return None
