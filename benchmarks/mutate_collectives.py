"""The mutation run of the library's collectives, as a record: which mutants are wrong, and which of those are reported.

    python benchmarks/mutate_collectives.py --state run.jsonl --budget-s 60    # again, until it says that all is done
    python benchmarks/mutate_collectives.py --state run.jsonl --record benchmarks/records/DATE-mutation-MACHINE.json

A run can be cut into pieces, and spread with `--jobs`: the state file has a line for each mutant that was judged.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.checker.configurations import families  # noqa: E402 - found only now

from peertile.cli.bench import record  # noqa: E402
from peertile.testing.measure import Figure  # noqa: E402
from peertile.testing.mutation import Configuration, Mutation, judge, mutations  # noqa: E402

SCHEDULES = 50


def lines(state: Path) -> dict[str, dict]:
    if not state.exists():
        return {}
    return {line["mutant"]: line for line in map(json.loads, state.read_text().splitlines())}


def judged(state: Path) -> list[dict]:
    """The mutants of a state that there are as the kernels are now."""
    now = {name for family in families() for name in mutants(family)}
    return [line for name, line in lines(state).items() if name in now]


@dataclass(frozen=True)
class Task:
    """A mutant, by its family and name."""

    family: str
    mutant: str
    limit: int
    end: float
    """It is not begun after this time, in seconds since the epoch."""


@lru_cache(maxsize=1)
def mutants(family: str) -> dict[str, tuple[Mutation, list[Configuration]]]:
    """The mutants of a family by name, with the configurations that come to what they change."""
    return {str(mutation): (mutation, reaching) for mutation, reaching in mutations(families()[family])}


def examine(task: Task) -> dict | None:
    """Judges a mutant in this process, and the line for the state; None where there is no time left."""
    if time.time() > task.end:
        return None
    mutation, reaching = mutants(task.family)[task.mutant]
    start = time.process_time()
    found = judge(mutation, reaching, SCHEDULES, task.limit)
    return {
        "mutant": task.mutant, "kernel": mutation.kernel, "change": mutation.change.value,
        "wrong": found.wrong, "reported": found.reported, "complete": found.complete,
        "reached": found.reached, "cpu_s": round(time.process_time() - start, 3),
    }  # fmt: skip


def run(state: Path, budget_s: float, limit: int, kernel: str | None, jobs: int) -> bool:
    """Judges mutants in `jobs` processes until the time is over; whether all are judged."""
    done, end = lines(state), time.time() + budget_s
    tasks = [
        Task(family, name, limit, end)
        for family in families()
        for name, (mutation, _) in mutants(family).items()
        if name not in done and kernel in (None, mutation.kernel)
    ]
    with state.open("a") as out:

        def keep(line: dict | None) -> bool:
            if line is not None:
                out.write(json.dumps(line) + "\n")
                out.flush()
            return line is not None

        if jobs == 1:
            kept = [keep(examine(task)) for task in tasks]
            return all(kept)
        with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
            kept = [keep(each.result()) for each in as_completed([pool.submit(examine, task) for task in tasks])]
    return all(kept)


def summary(found: list[dict]) -> tuple[list[Figure], dict]:
    """Figures, and the mutants that matter by name."""
    wrong = [line for line in found if line["wrong"]]
    reported = [line for line in wrong if line["reported"]]
    named = {
        "missed": [line["mutant"] for line in wrong if not line["reported"]],
        "false_reports": [
            line["mutant"] for line in found if line["reported"] and not line["wrong"] and line["complete"]
        ],
        "reported_and_ground_truth_did_not_end": [
            line["mutant"] for line in found if line["reported"] and not line["wrong"] and not line["complete"]
        ],
        "right_in_all_interleavings": [
            line["mutant"] for line in found if not line["wrong"] and line["complete"] and line["reached"]
        ],
        "right_as_far_as_looked": [
            line["mutant"]
            for line in found
            if not line["wrong"] and not line["reported"] and not line["complete"] and line["reached"]
        ],
        "not_reached": [line["mutant"] for line in found if not line["reached"]],
    }
    figures = [
        Figure("mutation.collectives.mutants", len(found), "count", 1),
        Figure("mutation.collectives.wrong", len(wrong), "count", 1),
        Figure("mutation.collectives.wrong_and_reported", len(reported), "count", 1),
        Figure("mutation.collectives.reported_percent", 100 * len(reported) / max(len(wrong), 1), "percent", 1),
    ]
    return figures, named


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=600.0)
    parser.add_argument("--limit", type=int, default=1000, help="interleavings that ground truth looks at")
    parser.add_argument("--kernel", help="mutants of this kernel alone")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    if options.record is None:
        complete = run(options.state, options.budget_s, options.limit, options.kernel, options.jobs)
        figures, named = summary(judged(options.state))
        print(json.dumps({**{f.name: f.median for f in figures}, **named, "complete": complete}, indent=2))
        return 0 if complete else 3
    figures, named = summary(judged(options.state))
    data = record(figures, "python benchmarks/mutate_collectives.py --state run.jsonl")
    data["notes"] = (
        f"Each mutant: {SCHEDULES} random schedules of each configuration in tests/checker/configurations.py, beside "
        f"all interleavings of its programs, at most {options.limit} of each configuration."
    )
    options.record.write_text(json.dumps({**data, **named}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
