"""No false report: every kernel of the library, mailbox, example and repaired case on many schedules, 2 to 4 ranks.

    python benchmarks/many_schedules.py --state soak.jsonl --budget-s 60     # again, until it says that all is done
    python benchmarks/many_schedules.py --state soak.jsonl --budget-s 600 --jobs 32
    python benchmarks/many_schedules.py --state soak.jsonl --record benchmarks/records/DATE-schedules-MACHINE.json

Each program is run in pieces of schedules with seeds of their own, so a run can be cut anywhere and spread over
processes. A report ends a program, and is kept with its seed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

# One thread for products: with a process on each core, the threads of a BLAS wait for each other 40 times as long as
# they work. Before numpy is loaded.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "cases"), str(ROOT / "tests" / "fused")]

from fused_programs import SMALL  # noqa: E402 - found only now
from tests.checker.library_programs import MORE  # noqa: E402
from tests.checker.test_library import NAMES, collective  # noqa: E402
from tests.sim.kernels import all_reduce_kernel, box_type, floats  # noqa: E402

from peertile.checker.check import declared  # noqa: E402
from peertile.checker.program import ProgramCase  # noqa: E402
from peertile.cli.bench import record  # noqa: E402
from peertile.meaning import new_mailbox  # noqa: E402
from peertile.sim.explore import explore  # noqa: E402
from peertile.sim.runs import Case, kernel_case  # noqa: E402
from peertile.testing.measure import Figure  # noqa: E402

PIECE, WANTED = 100, 1000
FEW = 4
"""Schedules between two looks at the time."""
RANKS = (2, 3, 4)


def _mailbox(ranks: int, depth: int, acknowledged: bool) -> Case:
    kernel, box = all_reduce_kernel(16, depth, acknowledged), box_type(16, depth, acknowledged)
    return kernel_case(
        kernel, 2, lambda: [floats(ranks, 96), floats(ranks, 96), new_mailbox(box, ranks, 2)], ranks=ranks, launches=2
    )


def programs() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Name and maker of each program."""
    for name in NAMES:
        n = 4 if "flagged" in name else 100
        for ranks in RANKS:
            yield (
                f"collective {name}, {ranks} ranks",
                lambda name=name, n=n, ranks=ranks: ProgramCase(collective(name, n), ranks),
            )
    for name, fused in SMALL.items():
        for ranks in RANKS:
            yield f"fused {name}, {ranks} ranks", lambda fused=fused, ranks=ranks: ProgramCase(fused, ranks)
    for name, more in MORE.items():
        for ranks in RANKS:
            yield f"library {name}, {ranks} ranks", lambda more=more, ranks=ranks: ProgramCase(more, ranks)
    for depth, acknowledged in ((2, False), (4, False), (1, True), (2, True)):
        for ranks in RANKS:
            how = "acknowledged" if acknowledged else "not acknowledged"
            yield (
                f"mailbox of depth {depth}, {how}, {ranks} ranks",
                lambda d=depth, a=acknowledged, r=ranks: _mailbox(r, d, a),
            )
    for path in sorted((ROOT / "tests" / "cases").glob("test_sim_*.py")):
        for key, value in vars(importlib.import_module(path.stem)).items():
            form = getattr(value, "form", None)
            if form is not None and form.kind is None:
                yield (
                    f"case {key}, {form.ranks} ranks",
                    lambda form=form: ProgramCase(form.main, form.ranks, **form.options),
                )
    for path in sorted((ROOT / "examples" / "racy").glob("*_fixed.py")):
        yield f"racy/{path.name}", lambda path=path: _file(path, None)
    for path in sorted((ROOT / "examples").glob("*.py")):
        for ranks in RANKS:
            yield f"{path.name}, {ranks} ranks", lambda path=path, ranks=ranks: _file(path, ranks)


def _file(path: Path, ranks: int | None) -> Case:
    small = declared(path) or {}
    count = small.pop("ranks", None)
    return ProgramCase(path, ranks or count or 2, arguments=small if "CHECK" in path.read_text() else None)


def lines(state: Path) -> list[dict]:
    return [json.loads(line) for line in state.read_text().splitlines()] if state.exists() else []


@dataclass(frozen=True)
class Piece:
    """Some schedules of a program, by their seeds."""

    program: str
    first: int
    count: int
    end: float
    """No schedule begins after this time, in seconds since the epoch."""


_made: dict[str, Case] = {}


def examine(piece: Piece) -> dict:
    """Runs a piece in this process, as far as its time goes, and the line for the state."""
    start, count, unconfirmed, report = time.process_time(), 0, 0, None
    try:
        case = _made.get(piece.program)
        if case is None:
            _made.clear()  # compiled kernels of one program at a time
            case = _made[piece.program] = dict(programs())[piece.program]()
        while count < piece.count and report is None and time.time() < piece.end:
            found = explore(case, min(FEW, piece.count - count), seed=1_000_000 + piece.first + count, shrinks=0)
            count, unconfirmed = count + found.schedules, unconfirmed + found.unconfirmed
            if found.verdicts:
                report = str(found.verdicts[0])
    except Exception as error:
        report = f"{type(error).__name__}: {error}"
    return {
        "program": piece.program, "first": piece.first, "schedules": count, "unconfirmed": unconfirmed,
        "report": report, "cpu_s": round(time.process_time() - start, 3),
    }  # fmt: skip


def left(state: Path, wanted: int, only: str, end: float) -> list[Piece]:
    """The pieces that a state lacks, those that take longest first."""
    ran: dict[str, set[int]] = {}
    seconds: dict[str, tuple[float, int]] = {}
    over: set[str] = set()
    for line in lines(state):
        name, count = line["program"], line["schedules"]
        ran.setdefault(name, set()).update(range(line["first"], line["first"] + count))
        before = seconds.get(name, (0.0, 0))
        seconds[name] = before[0] + line["cpu_s"], before[1] + count
        if line["report"]:
            over.add(name)
    result: list[tuple[float, Piece]] = []
    for name, _ in programs():
        if only not in name or name in over:
            continue
        spent, schedules = seconds.get(name, (0.0, 0))
        each = spent / schedules if schedules else float("inf")
        for base in range(0, wanted, PIECE):
            lacking = [k for k in range(base, min(base + PIECE, wanted)) if k not in ran.get(name, ())]
            while lacking:  # runs without a gap
                count = 1
                while count < len(lacking) and lacking[count] == lacking[0] + count:
                    count += 1
                result.append((each * count, Piece(name, lacking[0], count, end)))
                lacking = lacking[count:]
    return [piece for _, piece in sorted(result, key=lambda entry: -entry[0])]


def run(state: Path, budget_s: float, only: str, jobs: int, wanted: int) -> bool:
    """Pieces until the time is over, in `jobs` processes; whether nothing is left."""
    end = time.time() + budget_s
    pieces = left(state, wanted, only, end)
    over: set[str] = set()
    with state.open("a") as out:

        def keep(line: dict) -> None:
            if line["schedules"] or line["report"]:
                out.write(json.dumps(line) + "\n")
                out.flush()
            if line["report"]:
                over.add(line["program"])

        if jobs == 1:
            for piece in pieces:
                if time.time() < end and piece.program not in over:
                    keep(examine(piece))
        else:
            with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
                for done in as_completed([pool.submit(examine, piece) for piece in pieces]):
                    keep(done.result())
    return not left(state, wanted, only, end)


def summary(found: list[dict]) -> dict[str, dict]:
    """For each program: schedules, predicted races that were left out, a report if there was one, CPU seconds."""
    result: dict[str, dict] = {}
    for line in found:
        entry = result.setdefault(line["program"], {"schedules": 0, "unconfirmed": 0, "report": None, "cpu_s": 0.0})
        for key in ("schedules", "unconfirmed"):
            entry[key] += line[key]
        entry["cpu_s"] = round(entry["cpu_s"] + line["cpu_s"], 2)
        entry["report"] = entry["report"] or line["report"]
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=600.0)
    parser.add_argument("--only", default="", help="programs with this in their name")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--schedules", type=int, default=WANTED, help="of each program")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    if options.record is None:
        complete = run(options.state, options.budget_s, options.only, options.jobs, options.schedules)
        found = summary(lines(options.state))
        reported = {name: entry["report"] for name, entry in found.items() if entry["report"]}
        print(
            json.dumps(
                {"programs": len(found), "schedules": sum(e["schedules"] for e in found.values()), **reported}, indent=2
            )
        )
        return 0 if complete else 3
    found = summary(lines(options.state))
    figures = [
        Figure("schedules.programs", len(found), "count", 1),
        Figure("schedules.programs_with_1000", sum(e["schedules"] >= WANTED for e in found.values()), "count", 1),
        Figure("schedules.run", sum(e["schedules"] for e in found.values()), "count", 1),
        Figure("schedules.reports", sum(e["report"] is not None for e in found.values()), "count", 1),
        Figure("schedules.predicted_and_left_out", sum(e["unconfirmed"] for e in found.values()), "count", 1),
    ]
    data = record(figures, "python benchmarks/many_schedules.py --state soak.jsonl")
    options.record.write_text(json.dumps({**data, "programs": found}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
