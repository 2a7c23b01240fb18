"""How the benchmarks of this folder time two sides in one run: graphs that are replayed between two events of the
device, candidates that take turns on all ranks, and lines of JSON. Chooses nothing that is measured."""

from __future__ import annotations

import json
import statistics
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import peertile as pt

Json = dict[str, Any]
Run = Callable[[int], float]
"""f(repeats) -> microseconds."""


class Late(Exception):
    """A part has used its time; what guards a part lets it through."""


def say(**found: Any) -> None:
    print(json.dumps(found, default=str), flush=True)


def guarded(function: Callable[[], Any]) -> Any:
    """What a part gives, or what it raised."""
    try:
        return function()
    except Late:
        raise
    except Exception as error:
        last = [line.strip() for line in traceback.format_exc().splitlines() if line.startswith("  File ")]
        return {"error": f"{type(error).__name__}: {str(error)[:700]}", "at": last[-5:]}


def replayed(device: Any, stream: Any, graph: Any) -> Run:
    """f(repeats) -> microseconds of a replay of one of our graphs, behind one that is not timed."""
    driver = device.driver

    def run(repeats: int) -> float:
        start, end = driver.create_event(), driver.create_event()
        futures = [graph.launch().submit(stream)]
        driver.record_event(stream.handle, start)
        futures += [graph.launch().submit(stream) for _ in range(repeats)]
        ticket = driver.record_event(stream.handle, end)
        for future in futures:
            future.wait(30)
        driver.wait(ticket, 10)
        return float(driver.elapsed_ns(start, end)) / repeats / 1000

    return run


def torch_graph(
    torch: Any, functions: Sequence[Callable[[], Any]], calls: int, kept: list[Any] | None = None
) -> Any:  # fmt: skip
    """A CUDA graph of `calls` calls, through `functions` in turn. What they give goes into `kept`, if that is there;
    else the next call of the graph may use its memory."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for k in range(3):
            functions[k % len(functions)]()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for k in range(calls):
            given = functions[k % len(functions)]()
            if kept is not None:
                kept.append(given)
            del given
    return graph


def torch_replayed(torch: Any, graph: Any, *keep: Any) -> Run:
    """The same of a graph of torch. `keep` is what the graph uses: it stays as long as the result."""

    def run(repeats: int, _keep: Any = keep) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) * 1000 / repeats

    return run


def per_call(replay: Run, calls: int) -> Run:
    """Microseconds of a call, of `calls` calls in a graph."""
    return lambda repeats: replay(repeats) / calls


def compare(group: pt.Group, candidates: dict[str, Callable[[], Run]], rounds: int, repeats: int) -> Json:
    """Medians in microseconds, of the slower rank, the candidates taking turns; or why one cannot be made."""
    made: dict[str, Run] = {}
    found: Json = {}
    for name, make in candidates.items():
        ready = guarded(make)
        said = group.exchange(b"" if callable(ready) else json.dumps(ready).encode(), f"made {name}")
        if callable(ready) and not any(said):
            made[name] = ready
        else:
            found[name] = next(json.loads(e) for e in said if e)
    times: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(rounds):
        for name, run in made.items():
            group.barrier("turn")
            times[name].append(run(repeats))
    for name, values in times.items():
        mine = statistics.median(values)
        found[name] = round(max(float(v) for v in group.exchange(repr(mine).encode(), "times")), 2)
    return found
