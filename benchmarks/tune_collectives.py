"""Measures every candidate of every collective and writes the winners into the library's table.

    python benchmarks/tune_collectives.py --world 2 --write

Candidates of one size are interleaved batch by batch in one run, on ranks that are processes, so that a
machine that changes its mind hits all alike. A tie within 4 % goes to the winner of the size below, and of
the smallest size to the first candidate, so that noise does not cut the table into pieces. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

import peertile as pt
from peertile.cli.bench_collectives import bind
from peertile.library import selection
from peertile.library.collectives import Collectives
from peertile.library.selection import Algorithm

TABLE = Path(selection.__file__).with_name("table.json")
SIZES = tuple(1 << k for k in range(10, 27, 2))
TILES = {
    Algorithm.ONE_SHOT: (1 << 14,),
    Algorithm.TWO_SHOT: (1 << 18, 1 << 16, 1 << 14),
    Algorithm.PIPELINED: (1 << 16, 1 << 17, 1 << 18),
    Algorithm.RING: (1 << 14,),
}
FLAGGED_MOST, ONE_SHOT_MOST = 1 << 10, 1 << 17
BATCHES, BATCH_S, SLOWER = 7, 0.003, 1.04
RING_MOST = 1 << 16
"""Between cores that share memory the ring is never near the best; it is measured where that costs little."""
FAMILIES = ("all_reduce", "all_reduce_symmetric", "copy")

Candidate = tuple[Algorithm, int]


def candidates(family: str, size: int) -> list[Candidate]:
    if family == "copy":
        return [(Algorithm.ONE_SHOT, 1 << k) for k in (16, 14, 12)]
    most = {Algorithm.ONE_SHOT: ONE_SHOT_MOST, Algorithm.RING: RING_MOST}
    found = [(a, t) for a, tiles in TILES.items() for t in tiles if size <= most.get(a, size)]
    if family == "all_reduce_symmetric":
        return [c for c in found if c[0] in (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT)]
    return found + ([(Algorithm.FLAGGED, 1 << 14)] if size <= FLAGGED_MOST else [])


def table_of(family: str, candidate: Candidate) -> dict[str, Any]:
    row = {"target": "cpu", "arch": "", "world": 1, "entries": [[None, candidate[0].value, candidate[1]]]}
    return {"collectives": {name: [row] for name in FAMILIES}}


def measure(group: pt.Group) -> tuple[str, dict[str, dict[int, dict[str, float]]]]:
    """Median microseconds by family, size and candidate, as rank 0 sees them."""

    def agree(value: float) -> float:
        return max(float(v) for v in group.exchange(repr(value).encode(), "tune"))

    found: dict[str, dict[int, dict[str, float]]] = {family: {} for family in FAMILIES}
    with Collectives(group) as comm, pt.SymmetricHeap(group, size_bytes=3 * max(SIZES)) as heap:
        bind(group)
        for family in FAMILIES:
            for size in SIZES:
                count = size // 4
                data = np.ones(count, np.float32)
                if family == "all_reduce_symmetric":
                    x, out = heap.empty((count,), pt.f32), heap.empty((count,), pt.f32)
                else:
                    x, out = pt.asarray(data), pt.empty((count * (group.size if family == "copy" else 1),), pt.f32)
                x.copy_from(data)
                found[family][size] = batches(comm, family, x, out, size, agree)
                if family == "all_reduce_symmetric":
                    heap.free(x)
                    heap.free(out)
        arch = comm.arch
    selection.set_table(None)
    return arch, found


def batches(comm: Collectives, family: str, x: Any, out: Any, size: int, agree: Any) -> dict[str, float]:
    times: dict[str, list[float]] = {}
    calls = 0
    for _ in range(BATCHES):
        for candidate in candidates(family, size):
            selection.set_table(table_of(family, candidate))
            comm.forget()
            call = comm.all_gather if family == "copy" else comm.all_reduce
            call(x, out).sync()
            if not calls:
                start = time.perf_counter()
                call(x, out).sync()
                calls = max(2, int(BATCH_S / agree(time.perf_counter() - start)))
            agree(0.0)
            start = time.perf_counter()
            for _ in range(calls):
                call(x, out).sync()
            name = f"{candidate[0].value} {candidate[1]}"
            times.setdefault(name, []).append((time.perf_counter() - start) / calls * 1e6)
    return {name: round(statistics.median(values), 2) for name, values in times.items()}


def winners(medians: dict[int, dict[str, float]]) -> list[list[Any]]:
    """Entries of a row: neighbouring sizes with one winner become one; the last has no bound."""
    entries: list[list[Any]] = []
    name = next(iter(next(iter(medians.values()))))
    for size, found in medians.items():
        fastest = min(found, key=lambda candidate: found[candidate])
        if found.get(name, float("inf")) > found[fastest] * SLOWER:
            name = fastest
        algorithm, tile = name.split()
        if entries and entries[-1][1:] == [algorithm, int(tile)]:
            entries[-1][0] = size
        else:
            entries.append([size, algorithm, int(tile)])
    entries[-1][0] = None
    return entries


def put_row(table: dict[str, Any], family: str, row: dict[str, Any]) -> None:
    """In place of the row for the same machine, if there is one."""
    rows = [r for r in table["collectives"].get(family, []) if any(r[k] != row[k] for k in ("target", "arch", "world"))]
    table["collectives"][family] = sorted([*rows, row], key=lambda r: (r["target"], r["arch"], r["world"]))


def spelled(table: dict[str, Any]) -> str:
    """A table as it is committed: a line for each row."""
    lines = ",\n".join(
        f'    "{family}": [\n' + ",\n".join(f"      {json.dumps(row)}" for row in rows) + "\n    ]"
        for family, rows in table["collectives"].items()
    )
    return f'{{\n  "collectives": {{\n{lines}\n  }}\n}}\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="put the winners into the library's table")
    options = parser.parse_args()
    arch, found = pt.spawn(measure, options.world, (), model=pt.RankModel.PROCESSES, timeout_s=900)[0]
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    for family, medians in found.items():
        for size, values in medians.items():
            print(
                f"{family} {size >> 10} KiB: "
                + ", ".join(f"{k}: {v}" for k, v in sorted(values.items(), key=lambda i: i[1]))
            )
        row = {"target": "cpu", "arch": arch, "world": options.world, "entries": winners(medians)}
        print(json.dumps(row))
        put_row(table, family, row)
    if options.write:
        TABLE.write_text(spelled(table), encoding="utf-8")


if __name__ == "__main__":
    main()
