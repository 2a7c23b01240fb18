"""Random programs, native code against the numpy meaning, over many processes, with the table of what was drawn.

    python benchmarks/long_differential.py --first 210000 --count 10000 --jobs 12 --budget-s 300 --state seeds.jsonl
    python benchmarks/long_differential.py --state seeds.jsonl --record benchmarks/records/DATE-differential-CPU.json

The comparison and the table are those of `tests/differential/test_native.py`. A run may be cut anywhere: pieces that
are over stand in the state file and are not run again. Ends with status 1 if a program differed or something that a
program may hold was never drawn.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

PIECE = 20


def piece(first: int, count: int, ends: float) -> dict[str, Any]:
    """Compare `count` programs from seed `first` on; fewer if the time is up."""
    from tests.differential.test_native import compare, draw

    table: Counter[str] = Counter()
    wrong: list[str] = []
    done = 0
    for seed in range(first, first + count):
        if time.time() > ends:
            break
        try:
            draw(compare(seed), table)
        except Exception as error:  # every way in which a program can differ is one line of the result
            wrong.append(f"seed {seed}: {type(error).__name__}: {str(error)[:2000]}")
        done += 1
    return {"first": first, "done": done, "wrong": wrong, "drawn": dict(table)}


def main() -> int:
    parser = argparse.ArgumentParser(description="Random programs against their meaning, over many processes.")
    parser.add_argument("--first", type=int, default=210_000, help="seed of the first program")
    parser.add_argument("--count", type=int, default=0, help="programs in all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--budget-s", type=float, default=300.0, help="seconds after which nothing new begins")
    parser.add_argument("--state", type=Path, required=True, help="pieces that are over, a line each")
    parser.add_argument("--record", type=Path, help="write a record of all pieces")
    options = parser.parse_args()
    lines = options.state.read_text().splitlines() if options.state.exists() else []
    pieces = [json.loads(line) for line in lines]
    over = {p["first"] for p in pieces if p["done"] == PIECE}
    starts = [k for k in range(options.first, options.first + options.count, PIECE) if k not in over]
    # So that programs of one kernel overlap; beyond that, another process is worth more than another thread.
    os.environ["PEERTILE_CPU_THREADS"] = "2"
    ends = time.time() + options.budget_s
    if starts:
        with (
            options.state.open("a") as state,
            ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool,
        ):
            for future in as_completed([pool.submit(piece, k, PIECE, ends) for k in starts]):
                found = future.result()
                if found["done"]:
                    pieces.append(found)
                    state.write(json.dumps(found) + "\n")
                    state.flush()
    return report(pieces, options.record)


def report(pieces: list[dict[str, Any]], path: Path | None) -> int:
    """Print what agreed and what was drawn, and write the record."""
    from tests.differential.test_native import WANTED

    from peertile.cli.bench import record
    from peertile.testing.measure import Figure

    done: dict[int, dict[str, Any]] = {}
    for p in pieces:  # of a piece that was cut and run again, the longer run
        if p["done"] >= done.get(p["first"], {"done": 0})["done"]:
            done[p["first"]] = p
    table: Counter[str] = Counter()
    wrong: list[str] = []
    for p in done.values():
        table.update(p["drawn"])
        wrong += p["wrong"]
    programs = sum(p["done"] for p in done.values())
    for name, count in sorted(table.items()):
        print(f"{name}: {count}")
    print(*wrong, sep="\n")
    never = sorted(name for name in WANTED if not table[name])
    print(f"{programs} programs, {len(wrong)} differed; {len(table)} rows of the table, at zero: {never or 'none'}")
    if path is not None:
        figures = [
            Figure("differential.random_kernels.agreed", programs - len(wrong), "count", 1),
            Figure("differential.random_kernels.differed", len(wrong), "count", 1),
            Figure("differential.rows_drawn", len(table), "count", 1),
            Figure("differential.rows_never_drawn", len(never), "count", 1),
            *(Figure(f"drawn.{name.replace(' ', '_')}", count, "count", 1) for name, count in sorted(table.items())),
        ]
        path.write_text(json.dumps(record(figures, " ".join(["python", *sys.argv])), indent=2) + "\n")
    return int(bool(wrong or never))


if __name__ == "__main__":
    sys.exit(main())
