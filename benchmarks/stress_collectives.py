"""Random collectives with random stalls, 2 to 8 ranks, thousands of calls: the long tier on a machine with free cores.

    python benchmarks/stress_collectives.py --plan 8,4 7,5 6,3,2 --rounds 10000 --timeout-s 150
    python benchmarks/stress_collectives.py --plan 8,4 7,5 6,3,2 --record benchmarks/records/DATE-stress-MACHINE.json

Numbers of ranks with a comma between them run at the same time, on as many cores as there are ranks; groups run one
after another. What a rank does is `stress` of `tests/library/library_ranks.py`: every sum is compared with the sum in
rank order, to the bit. Ends with status 1 if a run failed, or made fewer calls of one kind than a hundredth of all.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

_RANKS = """
import json, os, sys
os.sched_setaffinity(0, json.loads(sys.argv[3]))
sys.path.insert(0, sys.argv[4])
import library_ranks, peertile as pt
if __name__ == "__main__":
    n, rounds, seed, limit = json.loads(sys.argv[1])
    model = pt.RankModel(sys.argv[2])
    drawn = pt.spawn(library_ranks.stress, n, (seed, rounds), model=model, timeout_s=limit)
    assert all(d == drawn[0] for d in drawn), drawn
    print(json.dumps(drawn[0]))
"""


class Run:
    """One number of ranks on cores of its own."""

    def __init__(self, ranks: int, cores: list[int], options: argparse.Namespace) -> None:
        self.ranks = ranks
        self.began = time.monotonic()
        settings = json.dumps([ranks, options.rounds, options.seed, options.timeout_s])
        script = options.scratch / f"stress_{ranks}.py"
        script.write_text(_RANKS)
        self._process = subprocess.Popen(
            [sys.executable, script, settings, options.model, json.dumps(cores), ROOT / "tests" / "library"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self, limit_s: float) -> dict[str, Any]:
        """How it ended; it is given until `limit_s` after its beginning."""
        try:
            out, error = self._process.communicate(timeout=max(0.0, limit_s - (time.monotonic() - self.began)))
        except subprocess.TimeoutExpired:
            self._process.kill()
            out, error = self._process.communicate()
            error = f"not over after {limit_s:g} s\n{error}"
        seconds = round(time.monotonic() - self.began, 1)
        if self._process.returncode:
            return {"ranks": self.ranks, "s": seconds, "error": error[-3000:]}
        return {"ranks": self.ranks, "s": seconds, "drawn": json.loads(out.splitlines()[-1])}


def main() -> int:
    parser = argparse.ArgumentParser(description="Random collectives with random stalls over 2 to 8 ranks.")
    parser.add_argument("--plan", nargs="+", default=["8", "7", "6,2", "5,3", "4"], help="numbers of ranks")
    parser.add_argument("--rounds", type=int, default=10_000, help="calls of each run")
    parser.add_argument("--seed", type=int, default=31)
    parser.add_argument("--model", default="processes", choices=("processes", "threads"))
    parser.add_argument("--timeout-s", type=float, default=300.0, help="of each run")
    parser.add_argument("--scratch", type=Path, default=Path("/tmp"), help="a folder for small files")
    parser.add_argument("--record", type=Path, help="write a record")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    results = []
    for group in options.plan:
        numbers = [int(n) for n in group.split(",")]
        if sum(numbers) > len(cores):
            print(f"{group}: expected at least {sum(numbers)} cores, got {len(cores)}: ranks will share them")
        runs = []
        at = 0
        for n in numbers:
            mine = [cores[k % len(cores)] for k in range(at, at + n)]
            runs.append(Run(n, mine, options))
            at += n
        for run in runs:
            results.append(run.end(options.timeout_s + 10))
            print(json.dumps(results[-1]), flush=True)
    if options.record is not None:
        _write(results, options)
    failed = [r for r in results if "error" in r or min(r["drawn"].values()) < options.rounds // 100]
    print(f"{len(results)} runs of {options.rounds} calls, {len(failed)} failed")
    return int(bool(failed))


def _write(results: list[dict[str, Any]], options: argparse.Namespace) -> None:
    from peertile.cli.bench import record
    from peertile.testing.measure import Figure

    figures = []
    for r in results:
        name = f"collectives.{options.rounds}_random_calls.{r['ranks']}_ranks.{options.model}"
        if "error" in r:
            figures.append(Figure(f"{name}.failed", r["s"], "s", 1))
            continue
        figures.append(Figure(name, r["s"], "s", 1))
        figures.append(Figure(f"{name}.fewest_of_a_kind", min(r["drawn"].values()), "count", 1))
    options.record.write_text(json.dumps(record(figures, " ".join(["python", *sys.argv])), indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
