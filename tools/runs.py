"""Runs of the suite on a device that CI does not have: which tests passed there, kept beside the benchmarks' records.

    python tools/runs.py --device cuda --name cuda-suite-h200 --facts FOLDER/facts.json FOLDER/suite.outcomes …
    python tools/runs.py --device cuda --name cuda-suite-h200x2 --gpu "NVIDIA H200" --gpu "NVIDIA H200" one two …

takes what `pytest --outcomes FILE` wrote, of one tree, to `benchmarks/records/<date>-<name>.json`. Such a record has,
beside what every record has (`--facts` names a file of it: benchmarks/device/all.py writes one), the object `suite`:
`device`, and `passed`, by file the tests of which every case that ran passed in every run. docs/features.md reads it: a
test that claims a row on cpu and passed on another device unchanged claims the row there too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "benchmarks" / "records"


@dataclass(frozen=True)
class Case:
    """One test case of one run."""

    file: str
    test: str
    outcome: str


def cases(path: Path) -> list[Case]:
    """The cases of a file of outcomes; what went wrong around a test counts as one of its own."""
    found = []
    for line in path.read_text().split("\n")[:-1]:  # what is behind the last end of a line was cut off
        said = json.loads(line)
        file, *names = said["test"].partition("[")[0].split("::")
        outcome = said["outcome"] if said["when"] == "call" or said["outcome"] != "failed" else "error"
        found.append(Case(file, names[-1], outcome))
    return found


def passed(found: Iterable[Case]) -> dict[str, list[str]]:
    """By file, the tests that ran and of which no case failed, had an error around it, or was skipped."""
    outcomes: dict[tuple[str, str], set[str]] = {}
    for case in found:
        outcomes.setdefault((case.file, case.test), set()).add(case.outcome)
    table: dict[str, list[str]] = {}
    for (file, test), seen in sorted(outcomes.items()):
        if seen == {"passed"}:
            table.setdefault(file, []).append(test)
    return table


def passed_cases(paths: Iterable[Path]) -> set[str]:
    """The test cases, by their whole names, that passed in the last of these runs in which they ran."""
    last: dict[str, bool] = {}
    for path in paths:
        of_run: dict[str, bool] = {}
        for line in path.read_text().split("\n")[:-1]:
            said = json.loads(line)
            of_run[said["test"]] = of_run.get(said["test"], True) and said["outcome"] == "passed"
        last |= of_run
    return {name for name, good in last.items() if good}


def record(device: str, files: Sequence[Path], facts: dict[str, Any]) -> dict[str, Any]:
    """The record of runs of one tree: `facts` are the keys that every record has, but for the figures."""
    runs = [cases(path) for path in files]
    figures = []
    for path, run in zip(files, runs, strict=True):
        counts = Counter(case.outcome for case in run)
        figures += [
            {"name": f"suite.{path.stem}.{outcome}", "unit": "count", "median": counts[outcome], "repetitions": 1}
            for outcome in ("passed", "failed", "error", "skipped")
        ]
    suite = {"device": device, "passed": passed(case for run in runs for case in run)}
    return {"schema": 1, **facts, "figures": figures, "suite": suite}


def recorded(folder: Path = RECORDS) -> dict[str, tuple[str, set[tuple[str, str]]]]:
    """By device, the newest record of its suite, and the tests that passed in it as (file, test)."""
    found = []
    for path in folder.glob("*.json"):
        if '"suite"' in (text := path.read_text()) and (made := json.loads(text)).get("suite") is not None:
            found.append((made.get("date", path.name), path.name, made["suite"]))
    newest: dict[str, tuple[str, set[tuple[str, str]]]] = {}
    for _, name, suite in sorted(found, key=lambda record: record[:2]):
        tests = {(file, test) for file, names in suite["passed"].items() for test in names}
        newest[suite["device"]] = (name, tests)
    return newest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("outcomes", type=Path, nargs="+", help="what pytest --outcomes wrote")
    parser.add_argument("--device", required=True)
    parser.add_argument("--name", required=True, help="of the record, without the date")
    parser.add_argument("--facts", type=Path, help="date, command, machine and versions, as JSON; options win")
    parser.add_argument("--date", help="start of the run, ISO 8601 with time zone")
    parser.add_argument("--command", help="what was typed, for each of the files")
    parser.add_argument("--gpu", action="append", default=[], help="of the machine, once for each")
    parser.add_argument("--cpu", default="")
    parser.add_argument("--cores", type=int, default=0)
    parser.add_argument("--version", action="append", default=[], metavar="NAME=VERSION")
    parser.add_argument("--figure", action="append", default=[], metavar="NAME=COUNT", help="counted beside the suite")
    parser.add_argument("--notes", default="")
    given = parser.parse_args()
    told = {"cpu": given.cpu, "cores": given.cores, "gpus": given.gpu}
    versions = dict(text.split("=", 1) for text in given.version)
    facts: dict[str, Any] = json.loads(given.facts.read_text()) if given.facts is not None else {}
    facts |= {name: value for name in ("date", "command", "notes") if (value := getattr(given, name))}
    known = {"cpu": "x86-64", "os": "Linux"} | facts.get("machine", {})
    facts["machine"] = known | {name: value for name, value in told.items() if value}
    facts["versions"] = facts.get("versions", {}) | versions
    if missing := {"date", "command"} - facts.keys():
        parser.error(f"expected {' and '.join(sorted(missing))}, given or among the facts")
    path = RECORDS / f"{facts['date'][:10]}-{given.name}.json"
    made = record(given.device, given.outcomes, facts)
    counted = (text.rsplit("=", 1) for text in given.figure)
    made["figures"] += [{"name": n, "unit": "count", "median": int(count), "repetitions": 1} for n, count in counted]
    path.write_text(json.dumps(made, indent=1) + "\n")
    for figure in made["figures"]:
        print(f"{figure['name']}: {figure['median']}")
    print(f"{sum(map(len, made['suite']['passed'].values()))} tests of {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
