"""A report as one HTML page that needs nothing else: the text, and the shrunk schedule drawn in time.

Lanes are agents, grouped by rank; events run downwards in the order of the run; arrows are the waits that were
let pass; the two accesses of a race, or the waits of a deadlock, are marked. No scripts, nothing is loaded.
"""

from __future__ import annotations

from html import escape
from typing import Final

from peertile.sim.trace import Event, Trace
from peertile.sim.verdicts import Deadlock, Race, Verdict

__all__ = ["MAX_EVENTS", "page"]

MAX_EVENTS: Final = 600
"""Of longer runs the last events are drawn, and the page says so."""
BEFORE: Final = 8
"""Events that are drawn before the first one that a verdict speaks of: what set the program up would hide it."""
_LANE, _ROW, _TOP, _LEFT = 262, 22, 70, 20

_STYLE: Final = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em; color: #222; background: #fff; }
pre { background: #f6f6f6; padding: 1em; white-space: pre-wrap; }
svg { font: 11px ui-monospace, monospace; }
.lane { stroke: #ccc; } .event { fill: #3b6ea5; } .edge { stroke: #3b6ea5; fill: none; marker-end: url(#arrow); }
.marked { fill: #c0392b; } .mark { fill: #fbe3e0; stroke: #c0392b; } .rank { font-weight: bold; }
@media (prefers-color-scheme: dark) {
  body { color: #ddd; background: #1b1b1b; } pre { background: #262626; } svg text { fill: #ddd; }
  .mark { fill: #4a2320; }
}
"""


def page(title: str, verdict: Verdict | None, trace: Trace | None, covered: str) -> str:
    """The page: `title` names the program, `covered` is the statement of what was covered."""
    headline = verdict.headline if verdict is not None else "no fault found"
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f"<title>{escape(title)}: {escape(headline)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1><p>{escape(headline)}</p>",
    ]
    if verdict is not None:
        parts.append(f'<pre id="verdict">{escape(str(verdict))}</pre>')
    if trace is not None and trace.events:
        parts.append(_picture(trace, verdict))
    parts.append(f'<h2>What was covered</h2><pre id="covered">{escape(covered)}</pre></body></html>')
    return "\n".join(parts)


def _marked(trace: Trace, verdict: Verdict | None) -> dict[int, str]:
    """Events that the verdict speaks of, with the words to put beside them."""
    found: dict[int, str] = {}
    if isinstance(verdict, Race):
        for origin, access in ((verdict.origin, verdict.earlier), (verdict.last, verdict.later)):
            if origin is None:
                continue
            # The access lies behind the last event of its agent up to that step.
            at = [k for k, e in enumerate(trace.events) if e.lane == origin[0] and e.step <= origin[2]]
            if at:
                found[at[-1]] = f"then {access.verb} {access.object} {access.elements}"
    elif isinstance(verdict, Deadlock):
        for lane in trace.lanes:
            at = [k for k, e in enumerate(trace.events) if e.lane == lane]
            if at and trace.events[at[-1]].what.startswith(("waits for", "calls ")):
                found[at[-1]] = "waits for ever"
    return found


def _picture(trace: Trace, verdict: Verdict | None) -> str:
    marked = _marked(trace, verdict)
    first = max(len(trace.events) - MAX_EVENTS, min(marked, default=0) - BEFORE, 0)
    drawn = {event.lane for event in trace.events[first:]}
    lanes = sorted(drawn, key=lambda lane: (trace.lanes[lane][0], lane))
    column = {lane: _LEFT + k * _LANE for k, lane in enumerate(lanes)}
    height = _TOP + _ROW * (len(trace.events) - first + 1)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{_LEFT + _LANE * len(lanes)}" height="{height}">',
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" class="event"/></marker></defs>',
    ]
    seen: set[int] = set()
    for lane in lanes:
        rank, name = trace.lanes[lane]
        x = column[lane]
        if rank not in seen:
            seen.add(rank)
            out.append(f'<text class="rank" x="{x}" y="20">rank {rank}</text>')
        short = name.replace(f" on rank {rank}", "").replace(f" of rank {rank}", "")
        out.append(f'<text x="{x}" y="42">{escape(short)}</text>')
        out.append(f'<line class="lane" x1="{x}" y1="{_TOP - 15}" x2="{x}" y2="{height}"/>')

    def y(number: int) -> int:
        return _TOP + _ROW * (number - first)

    for a, b in trace.edges:
        if a >= first:
            x1, x2 = column[trace.events[a].lane], column[trace.events[b].lane]
            out.append(f'<path class="edge" d="M{x1},{y(a)} L{x2},{y(b)}"/>')
    for number in range(first, len(trace.events)):
        out.append(_event(trace.events[number], column[trace.events[number].lane], y(number), marked.get(number)))
    out.append("</svg>")
    if first:
        out.append(f'<p id="left-out">The first {first} events are left out.</p>')
    return "\n".join(out)


def _event(event: Event, x: int, y: int, mark: str | None) -> str:
    where = f" at {event.loc.user}" if event.loc is not None else ""
    title = f"<title>{escape(event.what + where)}</title>"
    text = f'<text x="{x + 8}" y="{y + 4}">{escape(_short(event.what if mark is None else mark))}</text>'
    if mark is None:
        return f'<g>{title}<circle class="event" cx="{x}" cy="{y}" r="4"/>{text}</g>'
    box = f'<rect class="mark" x="{x - 8}" y="{y - 9}" width="{_LANE - 12}" height="19" rx="3"/>'
    return f'<g class="fault">{title}{box}<circle class="marked" cx="{x}" cy="{y}" r="4"/>{text}</g>'


def _short(text: str) -> str:
    return text if len(text) <= 36 else text[:35] + "…"
