"""Timelines as files of the Trace Event Format, which Perfetto and chrome://tracing open: one file for all ranks.

A rank is a process of the file, its host threads and streams are threads, and the programs of a stream lie in as many
lanes as ran at once, each a thread of its own. An arrow leads from a store that released a word to the wait that it
ended. What we read back is in the arguments of the events, so a file can be added to, rank by rank.
"""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from peertile.errors import ArgumentError
from peertile.timelines.events import HOST, PROGRAMS, UNREADABLE, Event, Kind, Part, parts_of, read_part

__all__ = [
    "Arrow", "Row", "add_to", "aligned", "arrows_of", "gather", "read_timeline", "rows_of", "to_trace", "warn",
    "write_timeline",
]  # fmt: skip

_INSTANTS: Final = frozenset({Kind.NOTIFY, Kind.TRANSFER})
_COLOURS: Final = {
    Kind.LAUNCH: "thread_state_running", Kind.GRAPH: "thread_state_running", Kind.PROGRAM: "good",
    Kind.WAIT: "terrible", Kind.COPY: "rail_load", Kind.FILL: "rail_load", Kind.EVENT: "bad",
}  # fmt: skip


class Row(NamedTuple):
    """A line of a picture, or a thread of a trace: events of one rank and track that do not overlap but by nesting."""

    rank: int
    name: str
    track: str
    events: list[Event]


class Arrow(NamedTuple):
    """From a release of a word to the wait that it ended: ranks and events."""

    source: int
    notify: Event
    target: int
    wait: Event


def rows_of(part: Part) -> list[Row]:
    """Rows of a rank: host threads first, then streams, each before its programs."""
    by_track: dict[str, list[Event]] = {}
    for event in part.events:
        by_track.setdefault(event.track, []).append(event)
    rows = []
    for track in sorted(by_track, key=lambda t: (not t.startswith(HOST), t)):
        events = sorted(by_track[track], key=lambda e: (e.begin_ns, -e.end_ns))
        if not track.endswith(PROGRAMS):
            rows.append(Row(part.rank, track, track, events))
            continue
        lanes = _lanes(events)
        names = [track if len(lanes) == 1 else f"{track} {k}" for k in range(len(lanes))]
        rows += [Row(part.rank, name, track, lane) for name, lane in zip(names, lanes, strict=True)]
    return rows


def _lanes(events: list[Event]) -> list[list[Event]]:
    """Programs to as few lanes as ran at once; what a program did goes where it is."""
    lanes: list[list[Event]] = []
    ends: list[int] = []
    where: dict[tuple[Any, Any], int] = {}
    for event in events:
        key = event.info.get("launch"), event.info.get("program")
        if event.kind is Kind.PROGRAM:
            k = next((k for k, end in enumerate(ends) if end <= event.begin_ns), len(lanes))
            if k == len(lanes):
                lanes.append([])
                ends.append(0)
            where[key] = k
            ends[k] = event.end_ns
        else:
            k = where.get(key, 0)
            if not lanes:
                lanes.append([])
                ends.append(0)
        lanes[k].append(event)
    return lanes


def arrows_of(parts: Sequence[Part]) -> list[Arrow]:
    """For each wait that ended, the release that ended it, where it was recorded.

    A wait for a value that somebody stores ends by that store; a wait for a count by the last one that was added.
    """
    releases: dict[tuple[str, ...], list[tuple[Part, Event]]] = {}
    for part in parts:
        for event in part.events:
            if event.kind is Kind.NOTIFY and "word" in event.info:
                for key in _words(event):
                    releases.setdefault(key, []).append((part, event))
    for found in releases.values():
        found.sort(key=lambda pair: pair[1].begin_ns)
    most_ns = 2 * max((part.error_ns for part in parts), default=0)
    arrows = []
    for part in parts:
        for wait in part.events:
            if wait.kind is not Kind.WAIT or wait.info.get("unfinished"):
                continue
            for key in _words(wait):
                last = _last_before(wait, part, releases.get(key, []), most_ns)
                if last is not None:
                    arrows.append(Arrow(last[0].rank, last[1], part.rank, wait))
                    break
    return sorted(arrows, key=lambda a: (a.wait.end_ns, a.wait.begin_ns, a.target, str(a.wait.info.get("program"))))


def _words(event: Event) -> tuple[tuple[str, ...], ...]:
    """What to look for a release by: of this value, or else of any."""
    word = str(event.info.get("word", ""))
    return (word, str(event.info.get("value"))), (word,)


def _last_before(wait: Event, part: Part, found: list[tuple[Part, Event]], most_ns: int) -> tuple[Part, Event] | None:
    """The last of the releases that was there when the wait ended. Clocks of two devices may disagree by what both may
    be off, no two by more than `most_ns`."""
    at = bisect_right(found, wait.end_ns + most_ns, key=lambda pair: pair[1].begin_ns)
    for k in range(at - 1, -1, -1):
        source, notify = found[k]
        if notify.begin_ns <= wait.end_ns + (0 if source is part else source.error_ns + part.error_ns):
            return found[k]
    return None


def aligned(parts: Sequence[Part]) -> list[Part]:
    """The same, where no wait ends before the release that ended it, as far as the clocks may be off."""
    parts = [_moved(part, 0) for part in parts]
    slack: dict[tuple[int, int], int] = {}
    for arrow in arrows_of(parts):
        ends = arrow.source, arrow.target
        if ends[0] != ends[1] and arrow.notify.info.get("value") == arrow.wait.info.get("value"):
            ns = arrow.wait.end_ns - arrow.notify.begin_ns
            slack[ends] = min(slack.get(ends, ns), ns)
    error = {part.rank: part.error_ns for part in parts}
    moved = dict.fromkeys(error, 0)
    for _ in parts:
        for (source, target), ns in slack.items():
            lacks = moved[source] - moved[target] - ns
            if lacks > 0:  # each its half, and what the other cannot
                later, earlier = error[target] - moved[target], error[source] + moved[source]
                forward = min(max((lacks + 1) // 2, lacks - earlier), later)
                moved[target] += forward
                moved[source] -= min(lacks - forward, earlier)
    return [_moved(part, moved[part.rank]) for part in parts]


def _moved(part: Part, ns: int) -> Part:
    by = ns - part.moved_ns
    if not by:
        return part
    events = [
        e if e.track.startswith(HOST) else e._replace(begin_ns=e.begin_ns + by, end_ns=e.end_ns + by)
        for e in part.events
    ]
    return replace(part, moved_ns=ns, events=events)


# -------------------------------------------------------------------- Trace Event Format


def to_trace(parts: Sequence[Part]) -> dict[str, Any]:
    """The file's content. Times are in microseconds, as the format wants them."""
    parts = sorted(parts, key=lambda part: part.rank)
    events: list[dict[str, Any]] = []
    threads: dict[tuple[int, int], int] = {}
    for part in parts:
        name = f"rank {part.rank}" + (f" ({part.device})" if part.device else "")
        events.append(_meta("process_name", part.rank, 0, name=name))
        events.append(_meta("process_sort_index", part.rank, 0, sort_index=part.rank))
        for tid, row in enumerate(rows_of(part), 1):
            events.append(_meta("thread_name", part.rank, tid, name=row.name, track=row.track))
            events.append(_meta("thread_sort_index", part.rank, tid, sort_index=tid))
            for event in row.events:
                threads[part.rank, id(event)] = tid
                events.append(_spelled(event, part.rank, tid))
    for number, arrow in enumerate(arrows_of(parts), 1):
        common = {"cat": "signal", "name": arrow.notify.name, "id": number}
        source = threads[arrow.source, id(arrow.notify)]
        target = threads[arrow.target, id(arrow.wait)]
        begin, wait = arrow.notify.begin_ns, arrow.wait
        # Viewers bind it to what is under way at that time, which the wait is no more at its end.
        end = max(begin, wait.begin_ns, wait.end_ns - 1)
        events.append({"ph": "s", "pid": arrow.source, "tid": source, "ts": _us(begin), **common})
        events.append({"ph": "f", "bp": "e", "pid": arrow.target, "tid": target, "ts": _us(end), **common})
    heads = {str(part.rank): part.head() for part in parts}
    return {"displayTimeUnit": "ns", "traceEvents": events, "otherData": {"peertile": heads}}


def _meta(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _us(ns: int) -> float:
    return round(ns / 1000, 3)


def _spelled(event: Event, pid: int, tid: int) -> dict[str, Any]:
    made: dict[str, Any] = {
        "ph": "i" if event.kind in _INSTANTS else "X", "cat": event.kind.value, "name": event.name, "pid": pid,
        "tid": tid, "ts": _us(event.begin_ns),
    }  # fmt: skip
    if event.kind in _INSTANTS:
        made["s"] = "t"
    else:
        made["dur"] = _us(event.ns)
    if event.kind in _COLOURS:
        made["cname"] = _COLOURS[event.kind]
    if event.info:
        made["args"] = event.info
    return made


def from_trace(trace: Any) -> list[Part]:
    """The parts of a file's content; one of `UNREADABLE` where it is not one of ours."""
    parts = {int(rank): Part.of(head) for rank, head in trace["otherData"]["peertile"].items()}
    tracks: dict[tuple[int, int], str] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "M" and event["name"] == "thread_name":
            tracks[event["pid"], event["tid"]] = str(event["args"]["track"])
        elif event["ph"] in ("X", "i"):
            begin = round(event["ts"] * 1000)
            end = begin + round(event.get("dur", 0) * 1000)
            track = tracks[event["pid"], event["tid"]]
            kind = Kind(event["cat"])
            name, info = str(event["name"]), dict(event.get("args", {}))
            parts[event["pid"]].events.append(Event(kind, track, name, begin, end, info))
    return list(parts.values())


# -------------------------------------------------------------------- files


def read_timeline(path: str) -> list[Part]:
    """The ranks of a timeline's file, or the one rank of a part. ArgumentError if it is neither."""
    import json  # takes 3 ms, which `import peertile` does not pay

    try:
        with open(path, encoding="utf-8") as file:
            return from_trace(json.load(file))
    except UNREADABLE:
        return [read_part(path)]


def write_timeline(path: str, parts: Sequence[Part]) -> None:
    """Write the file anew, in one step: whoever opens it meanwhile finds all of the old one."""
    import json

    fresh = f"{path}.new"
    with open(fresh, "w", encoding="utf-8") as file:
        file.write(json.dumps(to_trace(aligned(parts))))
    os.replace(fresh, path)


@contextlib.contextmanager
def _alone(path: str) -> Iterator[None]:
    """Ranks of one host add to a file one after the other."""
    import fcntl  # where there is none, there are no processes as ranks either

    lock = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def add_to(path: str, fresh: Iterable[Part]) -> None:
    """Put parts into the file at `path`: with the other ranks of their job if it holds those, else in its place."""
    added = {part.rank: part for part in fresh}
    if not added:
        return
    job = next(iter(added.values())).job
    with _alone(path):
        kept: list[Part] = []
        if job:
            with contextlib.suppress(ArgumentError):
                kept = [part for part in read_timeline(path) if part.job == job and part.rank not in added]
        write_timeline(path, [*kept, *added.values()])


def gather(path: str, job: str) -> list[int]:
    """Put the parts that ranks of a job have left beside a file into it: which ranks those are. What cannot be written
    is told of."""
    left: dict[str, Part] = {}
    try:
        for file in parts_of(path):
            with contextlib.suppress(ArgumentError):
                part = read_part(file)
                if part.job == job:
                    left[file] = part
        add_to(path, left.values())
        for file in left:
            os.unlink(file)
    except OSError as error:
        warn(path, error)
    return [part.rank for part in left.values()]


def warn(path: str, error: Exception) -> None:
    """A timeline of a whole program cannot be written, which is no reason for the program to fail."""
    import logging  # takes 5 ms, which a program that writes its timeline does not pay

    logging.getLogger("peertile").warning(
        "PEERTILE_TIMELINE: expected a file that can be written, got %s (%s); no more of the timeline is kept",
        path,
        error,
    )
