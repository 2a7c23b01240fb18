"""Makes verdicts of what the shadow found: names elements, tells the missing edge and the repair. Decides nothing."""

from __future__ import annotations

from collections.abc import Sequence

from peertile.memory_model import Scope
from peertile.sim.agents import Agent, Kind
from peertile.sim.cells import Cell, Conflict, Record, Run
from peertile.sim.memory import Object
from peertile.sim.proxies import is_ordered
from peertile.sim.sites import Site
from peertile.sim.verdicts import Access, Bounds, Lifetime, NeverWritten, Race

__all__ = ["access_of", "freed_in_use", "out_of_bounds", "outside_part", "race_between", "spell_elements", "unwritten"]


def spell_elements(runs: Sequence[Run], size: int) -> str:
    """Bytes as elements of `size`: [0:64], [3], [0:16, 64:80, …]."""
    parts = []
    for start, end in runs[:4]:
        low, high = start // size, -(-end // size)
        parts.append(str(low) if high == low + 1 else f"{low}:{high}")
    if len(runs) > 4:
        parts.append("…")
    return f"[{', '.join(parts)}]"


def _located(target: Object, site: Site, runs: Sequence[Run]) -> tuple[str, int]:
    """The object in the words of the program, and the byte of `target` that its elements count from: those of the
    smallest view that holds all of `runs`."""
    if not runs:
        return site.name, 0
    best: tuple[int, str, int] | None = None
    for view in target.views.values():
        low, high = view.ends()
        if low <= runs[0][0] and runs[-1][1] <= high:
            # A view of the access's own name says best what it is about.
            size = high - low + (0 if view.name == site.name else 1 << 60)
            if best is None or size < best[0]:
                best = (size, view.name, low)
    if best is None:  # seen through pointers alone: elements count from the object of the heap that they lie in
        part = target.nearest_part(runs[0][0])
        return site.name, part[0] if part is not None and part[0] <= runs[0][0] < part[1] else 0
    named = site.name if site.name != target.name else best[1]
    return named, best[2]


def access_of(target: Object, record: Record, runs: Sequence[Run]) -> Access:
    """One access as a report shows it."""
    site, agent = record.site, record.agent
    assert site is not None
    assert agent is not None
    name, base = _located(target, site, runs)
    size = site.size if site.size > 1 else _element(target, runs)
    return Access(
        verb=site.verb,
        object=f"{name} of rank {target.rank}",
        elements=_spelled([(a - base, b - base) for a, b in runs], size),
        agent=agent.where(),
        rank=agent.rank,
        program=agent.program if agent.program >= 0 else None,
        loc=site.loc,
        code=site.code,
        launched=agent.launched(),
    )


def _spelled(runs: Sequence[Run], size: int | None) -> str:
    if not runs:
        return ""
    return f"bytes {spell_elements(runs, 1)}" if size is None else spell_elements(runs, size)


def _element(target: Object, runs: Sequence[Run]) -> int | None:
    """Bytes of an element, by a view that holds `runs`; None if there is none: only copies have been there."""
    for view in target.views.values():
        low, high = view.ends()
        if runs and low <= runs[0][0] and runs[-1][1] <= high:
            return view.type.dtype.itemsize
    return None


def unwritten(target: Object, found: Conflict, record: Record) -> NeverWritten:
    runs = target.shadow.extent(found.cell)
    return NeverWritten(access=access_of(target, record, runs))


def freed_in_use(target: Object, cell: Cell, record: Record, by: str) -> Lifetime:
    """The verdict on memory that is given back while nothing orders an access before that."""
    access = access_of(target, record, target.shadow.extent(cell))
    return Lifetime(access=access, freed_by=by, early=True, origin=_origin(record))


def out_of_bounds(target: Object, record: Record, message: str) -> Bounds:
    return Bounds(access=access_of(target, record, ()), message=message)


def outside_part(target: Object, record: Record, start: int, end: int) -> Bounds:
    """Bytes [start, end) of a heap that are not all of one object of it."""
    part = target.nearest_part(start)
    if part is None:
        message = f"bytes {start} to {end} of {target.name}, of which nothing is in use"
    else:
        low, high = part
        where = f"{start - high} bytes behind" if start >= high else f"and reaches {end - high} bytes behind"
        message = f"bytes {start} to {end} of {target.name}, {where} the object at bytes {low} to {high}"
    return Bounds(access=access_of(target, record, ()), message=message)


def race_between(target: Object, found: Conflict, record: Record) -> Race:
    """The verdict on two accesses that nothing orders."""
    earlier = found.earlier
    assert earlier is not None
    runs = target.shadow.extent(found.cell)
    missing, repair = _missing(earlier, record, found.why)
    first, second = access_of(target, earlier, runs), access_of(target, record, runs)
    return Race(
        earlier=first,
        later=second,
        missing=missing,
        repair=repair,
        why=found.why,
        origin=_origin(earlier),
        last=_origin(record),
    )


def _origin(record: Record) -> tuple[int, int, int]:
    agent = record.agent
    parent = getattr(agent, "parent", None)
    if parent is not None:  # a strand runs as part of its program
        return parent.entry, 0, record.step
    return record.entry, record.epoch, record.step


def _missing(earlier: Record, later: Record, why: str) -> tuple[str, str]:
    """What would have ordered the two, and how to get it."""
    first, second = earlier.agent, later.agent
    assert first is not None
    assert second is not None
    one, two = earlier.site, later.site
    assert one is not None
    assert two is not None
    if one.proxy is not two.proxy and is_ordered(second.clock, first, earlier.epoch):
        return (
            f"no fence between the {one.proxy.value} and the {two.proxy.value} proxy lies on the way from the first "
            "access to the second, which are ordered otherwise",
            "let the notify or the wait between them belong to a kernel with a multicast parameter, which fences, or "
            "put T.unsafe.fence_alias() before the release or behind the acquire",
        )
    if why:
        return (
            "nothing makes the two accesses a pair",
            "use one element size, and system scope where other ranks take part",
        )
    same = first.program == second.program and first.rank == second.rank and first.label == second.label
    if same and Kind.STRAND in (first.kind, second.kind):
        return (
            "no path of tokens leads from the first access to the second",
            "pass the token of the first operation to the second, or join their tokens",
        )
    if Kind.TRANSFER in (first.kind, second.kind):
        return (
            "nothing waits for the asynchronous store before the other access",
            "put T.wait_put(...) of its handle, or T.quiet(), in front of what comes after it",
        )
    released = first.released
    if released is None or released[0] < earlier.epoch:
        text = f"{first.where()} releases nothing after its access"
        if first.fenced is None and released is None:
            text = f"{first.where()} has released nothing"
        if second.denied is not None:
            place, why = _place(second.denied.site), second.denied.why
            return f"{text}; what {second.where()} waited for gives no order: {place}: {why}", _for_denied(second)
        return text, _pair(first, second)
    by = f" at {released[1].loc.user}" if released[1] is not None and released[1].loc is not None else ""
    text = f"{first.where()} released after its access{by}, but {second.where()} acquired nothing that includes it"
    if second.denied is not None:
        return f"{text}; {_place(second.denied.site)}: {second.denied.why}", _for_denied(second)
    return text, (
        f"let {second.where()} wait for that release before its access; or the other way round, if that is the order "
        f"that is meant: notify after its access, and let {first.where()} wait for that"
    )


def _place(site: Site) -> str:
    return f"{site.name}{f' at {site.loc.user}' if site.loc is not None else ''}"


def _for_denied(agent: Agent) -> str:
    assert agent.denied is not None
    why = agent.denied.why
    if "relaxed and no fence" in why:
        return "wait with order acquire, or put T.sync_system() between the wait and the access"
    if "scope" in why:
        return f"use scope {Scope.SYSTEM.value}"
    return "release after the access: notify, a store with order release, or T.sync_system() before a relaxed store"


def _pair(first: Agent, second: Agent) -> str:
    if first.kind is Kind.HOST or second.kind is Kind.HOST or first.kind is Kind.STREAM or second.kind is Kind.STREAM:
        return (
            f"order the two operations: run both on one stream, let one stream wait for an event of the other, or "
            f"synchronise before {second.where()} is given its work"
        )
    return (
        f"notify after the access of {first.where()}, and wait for it before the access of {second.where()}; "
        "or the other way round, if that is the order that is meant"
    )
