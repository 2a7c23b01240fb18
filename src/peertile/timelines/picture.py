"""A timeline as one HTML page that needs nothing else: time runs to the right, a row is a host thread, a stream, or a
lane of programs, and arrows lead from a release of a word to the wait that it ended. No scripts, nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import pairwise
from typing import Final

from peertile.timelines.events import PROGRAMS, Event, Kind, Part
from peertile.timelines.summary import Summary, joined, spelled_ns, summary_of
from peertile.timelines.trace import Row, arrows_of, rows_of

__all__ = ["MOST_ARROWS", "MOST_LANES", "page"]

MOST_LANES: Final = 16
"""Of the programs of a stream so many lanes are drawn, and the page says how many there are."""
MOST_ARROWS: Final = 200
"""The arrows to the longest waits are drawn, of several that would cover each other one."""
_LEFT, _WIDTH, _ROW, _TOP = 250, 1250, 17, 34
_TICKS: Final = 10
_CUT: Final = 12
"""Nothing that lasts longer than such a part of what happens is cut out."""
_MOST_CUTS: Final = 20
"""Of more the longest."""
_GAP: Final = 14

_CLASSES: Final = {
    Kind.LAUNCH: "kernel", Kind.GRAPH: "kernel", Kind.PROGRAM: "program", Kind.WAIT: "wait", Kind.EVENT: "wait",
    Kind.COPY: "copying", Kind.FILL: "copying", Kind.HOST: "function", Kind.WRITE: "copying", Kind.SUBMIT: "submit",
    Kind.SYNC: "sync", Kind.NOTIFY: "notify", Kind.TRANSFER: "transfer",
}  # fmt: skip
_LEGEND: Final = (
    ("kernel", "kernel or graph"), ("program", "program"), ("wait", "wait"), ("copying", "copy, fill or store"),
    ("function", "host function"), ("submit", "host enqueues"), ("sync", "host waits"), ("notify", "release of a word"),
)  # fmt: skip

_STYLE: Final = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em; color: #222; background: #fff; }
svg { font: 11px ui-monospace, monospace; } svg text { fill: #222; }
table { border-collapse: collapse; margin: 1em 0; } th, td { padding: 2px 12px 2px 0; text-align: right; }
th:first-child, td:first-child, td.text, th.text { text-align: left; }
.grid { stroke: #ddd; } .band { fill: #f4f4f4; } .rank { font-weight: bold; }
.kernel { fill: #3b6ea5; } .program { fill: #8fb3d9; } .wait { fill: #c0392b; } .copying { fill: #d9a441; }
.function { fill: #8e6bbf; } .submit { fill: #9a9a9a; } .sync { fill: #cfcfcf; } .notify { fill: #1e8449; }
.transfer { fill: #b9770e; } .arrow { stroke: #1e8449; fill: none; stroke-width: 0.8; opacity: 0.75; }
.unfinished { stroke: #c0392b; stroke-dasharray: 3 2; }
.cut { fill: #bbb; opacity: 0.5; } .key { display: inline-block; width: 12px; height: 12px; margin: 0 4px 0 14px; }
@media (prefers-color-scheme: dark) {
  body { color: #ddd; background: #1b1b1b; } svg text { fill: #ddd; } .band { fill: #242424; }
  .grid { stroke: #3a3a3a; } .sync { fill: #4a4a4a; } .submit { fill: #777; }
}
"""


class _Scale:
    """Times to places. Where nothing happens on any rank for long, time is cut out."""

    def __init__(self, begin: int, end: int, events: Iterable[Event]) -> None:
        self.begin, self.end = begin, max(end, begin + 1)
        spans = joined((max(e.begin_ns, begin), min(e.end_ns, self.end)) for e in events if self.shows(e))
        spans = spans or [(self.begin, self.end)]
        least = max(sum(high - low for low, high in spans) // _CUT, 1)
        gaps = sorted((after[0] - before[1] for before, after in pairwise(spans)), reverse=True)
        least = max([least, *gaps[_MOST_CUTS : _MOST_CUTS + 1]])
        self.spans: list[tuple[int, int]] = []
        """What is drawn."""
        for low, high in spans:
            if self.spans and low - self.spans[-1][1] <= least:
                self.spans[-1] = self.spans[-1][0], high
            else:
                self.spans.append((low, high))
        self.drawn = max(sum(high - low for low, high in self.spans), 1)
        self._per_ns = (_WIDTH - _GAP * (len(self.spans) - 1)) / self.drawn

    def shows(self, event: Event) -> bool:
        return event.end_ns >= self.begin and event.begin_ns <= self.end

    def x(self, ns: int) -> float:
        at = float(_LEFT)
        for low, high in self.spans:
            if ns <= high:
                return round(at + max(ns - low, 0) * self._per_ns, 2)
            at += (high - low) * self._per_ns + _GAP
        return round(at - _GAP, 2)

    def cuts(self) -> list[tuple[float, int]]:
        """Where time is cut out, and how much."""
        pairs = pairwise(self.spans)
        return [(self.x(before[1]) + _GAP / 2, after[0] - before[1]) for before, after in pairs]


def page(title: str, parts: Sequence[Part], begin_ns: int = 0, end_ns: int | None = None) -> str:
    """The page. Times from `begin_ns` to `end_ns`, counted from the first event, are drawn."""
    events = [event for part in parts for event in part.events]
    first = min((event.begin_ns for event in events), default=0)
    last = max((event.end_ns for event in events), default=0)
    scale = _Scale(first + begin_ns, last if end_ns is None else min(last, first + end_ns), events)
    found = summary_of(parts)
    legend = "".join(f'<span class="key" style="{_key(name)}"></span>{escape(text)}' for name, text in _LEGEND)
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f"<title>{escape(title)}: timeline</title><style>{_STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1><p>{spelled_ns(found.ns)} on {len(parts)} rank{'s' if len(parts) != 1 else ''}"
            f" {legend}</p>",
            _picture(parts, scale, first),
            *_tables(found),
            "</body></html>",
        ]
    )


def _key(name: str) -> str:
    line = next(part for part in _STYLE.replace("}", "}\n").splitlines() if part.strip().startswith(f".{name} {{"))
    return "background: " + line.split("fill:")[1].split(";")[0].strip()


def _picture(parts: Sequence[Part], scale: _Scale, first: int) -> str:
    out: list[str] = []
    places: dict[int, float] = {}
    y: float = _TOP
    for part in sorted(parts, key=lambda part: part.rank):
        out.append(f'<text class="rank" x="4" y="{y + 13}">rank {part.rank} {escape(part.device)}</text>')
        y += _ROW + 4
        lanes: dict[str, int] = {}
        for row in rows_of(part):
            lanes[row.track] = lanes.get(row.track, 0) + 1
            if lanes[row.track] > MOST_LANES:
                continue
            out += _row(row, scale, y, lanes[row.track] % 2 == 0)
            for event in row.events:
                places[id(event)] = y + _ROW / 2
            y += _ROW
        for track, count in lanes.items():
            if count > MOST_LANES:
                text = f"{count - MOST_LANES} more lanes of {track} are not drawn"
                out.append(f'<text class="left-out" x="{_LEFT}" y="{y + 12}">{escape(text)}</text>')
                y += _ROW
        y += 8
    arrows = [arrow for arrow in arrows_of(parts) if id(arrow.notify) in places and id(arrow.wait) in places]
    arrows = [arrow for arrow in arrows if scale.shows(arrow.wait) and scale.begin <= arrow.notify.begin_ns]
    drawn: set[tuple[int, ...]] = set()
    for arrow in sorted(arrows, key=lambda arrow: -arrow.wait.ns):
        x1, x2 = scale.x(arrow.notify.begin_ns), scale.x(arrow.wait.end_ns)
        y1, y2 = places[id(arrow.notify)], places[id(arrow.wait)]
        near = int(x1 // 8), int(x2 // 8), int(y1 // 50), int(y2 // 50)
        if near in drawn or len(drawn) >= MOST_ARROWS:
            continue
        drawn.add(near)
        out.append(f'<path class="arrow" marker-end="url(#head)" d="M{x1},{y1} L{x2},{y2}"/>')
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{_LEFT + _WIDTH + 60}" height="{y + 10}">',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" class="notify"/></marker></defs>',
        *_axis(scale, first, y),
    ]
    return "\n".join([*head, *out, "</svg>"])


def _axis(scale: _Scale, first: int, height: float) -> Iterator[str]:
    step = 1
    while scale.drawn / step > _TICKS:
        step = step * 2 if str(step)[0] == "1" else step * 5 // 2 if str(step)[0] == "2" else step * 2
    end = 0.0
    for low, high in scale.spans:
        at = (low - first + step - 1) // step * step
        while first + at <= high:
            x = scale.x(first + at)
            yield f'<line class="grid" x1="{x}" y1="{_TOP - 10}" x2="{x}" y2="{height}"/>'
            if x >= end:
                yield f'<text x="{x + 3}" y="{_TOP - 12}">{spelled_ns(at)}</text>'
                end = x + 60
            at += step
    for x, ns in scale.cuts():
        yield f"<g><title>{spelled_ns(ns)} in which nothing happened are cut out</title>"
        yield f'<rect class="cut" x="{x - 3}" y="{_TOP - 10}" width="6" height="{height - _TOP + 10}"/></g>'


def _row(row: Row, scale: _Scale, y: float, is_even: bool) -> list[str]:
    name = row.name.replace(PROGRAMS, ", programs") if row.name == row.track else f"… {row.name.rpartition(' ')[2]}"
    out = []
    if not is_even:
        out.append(f'<rect class="band" x="{_LEFT}" y="{y}" width="{_WIDTH}" height="{_ROW}"/>')
    out.append(f'<text x="12" y="{y + 12}">{escape(_short(name, 34))}</text>')
    drawn: dict[str, float] = {}
    for event in row.events:
        if not scale.shows(event):
            continue
        kind = _CLASSES[event.kind]
        x1, x2 = scale.x(event.begin_ns), scale.x(event.end_ns)
        if x2 < drawn.get(kind, 0.0) + 0.4 and x2 - x1 < 0.4:  # it would cover what is there
            continue
        drawn[kind] = x2
        out.append(_shape(event, kind, x1, x2, y))
    return out


def _shape(event: Event, kind: str, x1: float, x2: float, y: float) -> str:
    tip = f"<title>{escape(_told(event))}</title>"
    if kind in ("notify", "transfer"):
        return f'<g>{tip}<path class="{kind}" d="M{x1},{y + 2} l2.5,4 h-5 z"/></g>'
    inset = 4 if kind == "wait" else 1
    width = max(round(x2 - x1, 2), 0.4)
    more = " unfinished" if event.info.get("unfinished") else ""
    box = f'<rect class="{kind}{more}" x="{x1}" y="{y + inset}" width="{width}" height="{_ROW - 2 * inset}"/>'
    return f"<g>{tip}{box}{_label(event, kind, x1, width, y)}</g>"


def _label(event: Event, kind: str, x: float, width: float, y: float) -> str:
    room = int(width / 6.7)
    if room < 4 or kind == "wait":
        return ""
    return f'<text x="{x + 3}" y="{y + 12}">{escape(_short(event.name, room))}</text>'


def _told(event: Event) -> str:
    lines = [f"{event.name}: {spelled_ns(event.ns)}" if event.ns else event.name]
    lines += [f"{name}: {value}" for name, value in event.info.items()]
    return "\n".join(lines)


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _tables(found: Summary) -> Iterator[str]:
    yield '<table id="ranks"><tr><th>rank</th><th>kernels</th><th>copies</th><th>host functions</th><th>idle</th>'
    yield "<th>programs waited</th><th>launches</th><th>programs</th><th>dropped</th><th class='text'>clock</th></tr>"
    for r in found.ranks:
        cells = [spelled_ns(ns) for ns in (r.kernel_ns, r.copy_ns, r.host_ns, r.idle_ns)]
        cells += [f"{r.waiting:.0%}", str(r.launches), str(r.programs), str(r.dropped)]
        row = "".join(f"<td>{cell}</td>" for cell in [str(r.rank), *cells])
        yield f"<tr>{row}<td class='text'>{escape(r.clock)}</td></tr>"
    yield "</table>"
    if found.waits:
        yield '<table id="waits"><tr><th>longest waits</th><th>rank</th><th class="text">of</th><th>program</th>'
        yield "<th>ended by rank</th><th class='text'>at</th></tr>"
        for wait in found.waits:
            event = wait.event
            by = "" if wait.by is None else str(wait.by)
            yield (
                f"<tr><td>{spelled_ns(event.ns)}</td><td>{wait.rank}</td><td class='text'>{escape(event.name)}</td>"
                f"<td>{escape(str(event.info.get('program', '')))}</td><td>{by}</td>"
                f"<td class='text'>{escape(str(event.info.get('at', '')))}</td></tr>"
            )
        yield "</table>"
