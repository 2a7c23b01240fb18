"""Random programs on a GPU against their meaning: `PYTHONPATH=src:. python3 benchmarks/device/check_cuda_programs.py`.

Takes the programs of one rank from a range of seeds until it has `--count`, in pieces of a few programs. Each piece is
a process of its own with a bound, several at a time, so that a program that hangs or takes the context down costs its
piece and no more; what is left of a piece is run again one program at a time. Prints what differed, with what was
refused by name, and a table; status 1 if anything differed, faulted otherwise than its meaning, or hung.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

SAME, REFUSED, WRONG, HUNG = "agree", "refused by name", "DIFFER", "HANG OR DIE"


def run_piece(seeds: list[int], device: str) -> None:
    """The child: a line of JSON for each seed, as it ends."""
    os.environ["PEERTILE_DEVICE"] = device
    from tests.differential.test_native import compare

    from peertile.errors import CompileError, UnsupportedError

    for seed in seeds:
        begin = time.perf_counter()
        outcome, text = SAME, ""
        try:
            compare(seed)
        except (CompileError, UnsupportedError) as error:
            # A refusal names what the architecture lacks; anything that a tool failed on is a fault of ours.
            outcome = WRONG if error.__cause__ is not None else REFUSED
            text = str(error)
        except BaseException as error:
            outcome, text = WRONG, f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-3)}"
        line = {"seed": seed, "outcome": outcome, "text": text[:6000], "s": round(time.perf_counter() - begin, 2)}
        print(json.dumps(line), flush=True)


def ask(seeds: list[int], device: str, timeout_s: float) -> list[dict[str, Any]]:
    """What a child says of its seeds; those that it did not come to have no line."""
    command = [sys.executable, __file__, "--device", device, "--piece", ",".join(map(str, seeds))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        out, err = done.stdout, done.stderr
    except subprocess.TimeoutExpired as expired:
        out, err = ((x or b"").decode() if isinstance(x, bytes) else x or "" for x in (expired.stdout, expired.stderr))
        err = f"no end within {timeout_s:g} s; {err}"
    lines = [json.loads(line) for line in out.splitlines() if line.startswith('{"seed"')]
    if len(lines) < len(seeds):
        lines.append({"seed": seeds[len(lines)], "outcome": HUNG, "text": err[-2000:], "s": timeout_s})
    return lines


def piece(seeds: list[int], device: str, end: float) -> list[dict[str, Any]]:
    """All seeds of a piece, around those that take a process with them."""
    found: list[dict[str, Any]] = []
    while len(found) < len(seeds) and time.monotonic() < end:
        found += ask(seeds[len(found) :], device, min(60.0, max(5.0, end - time.monotonic())))
    return found


def chosen(first: int, count: int) -> list[int]:
    """The seeds from `first` on whose programs have one rank."""
    from peertile.testing.programs import random_kernel

    seeds: list[int] = []
    while len(seeds) < count:
        if random_kernel(first).ranks == 1:
            seeds.append(first)
        first += 1
    return seeds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--size", type=int, default=10, help="programs of a process")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=300.0, help="bound of the whole")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--piece", default="", help="seeds of a child")
    options = parser.parse_args()
    if options.piece:
        run_piece([int(s) for s in options.piece.split(",")], options.device)
        return 0
    begin = time.monotonic()
    seeds = chosen(options.first, options.count)
    table: collections.Counter[str] = collections.Counter()
    pieces = [seeds[i : i + options.size] for i in range(0, len(seeds), options.size)]
    with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
        asked = [pool.submit(piece, p, options.device, begin + options.seconds) for p in pieces]
        for done in concurrent.futures.as_completed(asked):
            for line in done.result():
                table[line["outcome"]] += 1
                if line["outcome"] != SAME:
                    print(f"seed {line['seed']}: {line['outcome']} after {line['s']} s: {line['text']}", flush=True)
    total = sum(table.values())
    print(f"programs of one rank, seeds {seeds[0]} to {seeds[-1]}, on {options.device}: {total} of {len(seeds)} run")
    for outcome in (SAME, REFUSED, WRONG, HUNG):
        print(f"  {outcome:16} {table[outcome]:6}")
    print(f"  {time.monotonic() - begin:.0f} s with {options.workers} workers", flush=True)
    return 1 if table[WRONG] or table[HUNG] or total < len(seeds) else 0


if __name__ == "__main__":
    sys.exit(main())
