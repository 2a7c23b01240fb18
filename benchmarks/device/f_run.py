"""One device run for the collectives: sweep, choose, and compare the choice with NCCL and torch. `f_run.py OUT`."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OUT = Path(sys.argv[1])
BEGIN = time.monotonic()
SIZES = [1 << k for k in (10, 16, 18, 20, 22, 24, 12, 14, 26, 28)]
log = (OUT / "F-3.log").open("a")


def say(text: str) -> None:
    log.write(text.rstrip() + "\n")
    log.flush()


def run(name: str, command: list[str], bound: float, **env: str) -> list[dict[str, Any]]:
    begin = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        text, errors = process.communicate(timeout=bound)
    except subprocess.TimeoutExpired:
        process.kill()
        text, errors = process.communicate()
        errors += "\nno end within the bound"
    say(f"== {name}: {time.monotonic() - begin:.1f} s, exit {process.returncode}, at {time.monotonic() - BEGIN:.0f}")
    say(text)
    if process.returncode != 0:
        say(errors[-2500:])
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def sweep(cap: str, sizes: list[int], bound: float, **env: str) -> dict[int, dict[str, float]]:
    lines = run(f"sweep {cap} {env}", ["benchmarks/device/f_sweep.py", *map(str, sizes)], bound, F_CAP=cap,
                F_LIMIT=str(bound - 6), **env)  # fmt: skip
    return {x["bytes"]: {k: v for k, v in x["us"].items() if isinstance(v, float)} for x in lines if "us" in x}


def main() -> None:
    caps = ["4", "2"]
    warm = [
        subprocess.Popen(
            [sys.executable, "benchmarks/device/f_sweep.py", *map(str, SIZES)], cwd=ROOT,
            env=os.environ | {"F_CAP": cap, "F_WARM": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for cap in caps
    ]  # fmt: skip
    for process in warm:
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
    say(f"== warm at {time.monotonic() - BEGIN:.0f}")
    found = {"4": sweep("4", SIZES, 34)}
    extra: dict[str, str] = {}
    if len([1 for times in found["4"].values() if times]) < len(SIZES):
        extra = {"F_EARLY": "0"}
        found["4"] = sweep("4", SIZES, 40, **extra)
    found["2"] = sweep("2", SIZES, 30, **extra)
    scores: dict[str, float] = {}
    for cap, sizes in found.items():
        best = [min(sizes[n].values()) for n in SIZES if sizes.get(n)]
        scores[cap] = sum(map(math.log, best)) / len(best) if len(best) == len(SIZES) else 99.0
    cap = min(scores, key=lambda c: scores[c])
    say(f"scores {scores} chosen {cap}")
    entries: list[list[Any]] = []
    for nbytes in sorted(found[cap]):
        odd = ("x 132",)  # what a table cannot say
        times = {k: v for k, v in found[cap][nbytes].items() if not any(o in k for o in odd)}
        if times:
            name = min(times, key=lambda k: times[k])
            algorithm, tile = name.split()[:2]
            entries.append([2 * nbytes, algorithm, int(tile)])
    entries.append([None, "pushed", 16384])
    table = json.loads((ROOT / "src" / "peertile" / "library" / "table.json").read_text())
    for row in table["collectives"]["all_reduce"]:
        if row["target"] == "cuda":
            row["entries"] = entries
    say("entries " + json.dumps(entries))
    (OUT / "F-3-table.json").write_text(json.dumps(table))
    run("final", ["benchmarks/device/f_final.py", "--table", str(OUT / "F-3-table.json"), "--limit", "60",
                  "all_reduce", "all_to_all", "all_gather", "reduce_scatter", "eager", "signal", "copy"], 75, F_CAP=cap, **extra)  # fmt: skip
    say(f"== end at {time.monotonic() - BEGIN:.0f}")


main()
