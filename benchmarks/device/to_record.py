"""Records of runs on GPUs from what the benchmarks of this folder print: limits are those that the project promises.

    python3 benchmarks/device/to_record.py collectives LINES --facts FOLDER/facts.json --command TEXT --out FILE
    python3 benchmarks/device/to_record.py library LINES …
    python3 benchmarks/device/to_record.py one-gpu RECORD … LINES …

`LINES` are the lines of JSON of bench_cuda_collectives.py or bench_cuda_library.py; `one-gpu` joins records of
`peertile bench --json` and lines of the section `checked`. `--facts` names a file with machine and versions (all.py
writes one); of records the first one's are taken. Measures nothing. Prints what missed its limit; status 0 even then.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Json = dict[str, Any]
KIB, MIB = 1 << 10, 1 << 20
SLOWEST_US = {KIB: 2.6, 64 * KIB: 3.4}
"""An all-reduce of so many bytes, at most."""
COPY_RATE = 360.0
"""GB/s that two H200s copy each way, of which dispatch and combination reach 0.9."""


def figure(name: str, unit: str, median: float, limit: float | None = None, *, at_least: bool = False,
           baseline: tuple[str, float] | None = None, times: int = 1, notes: str = "") -> Json:  # fmt: skip
    made: Json = {"name": name, "unit": unit, "median": median, "repetitions": times}
    if baseline is not None:
        made["baseline"] = {"name": baseline[0], "median": baseline[1]}
    if limit is not None:
        made["limit"] = round(limit, 4)
        made["met"] = median >= limit if at_least else median <= limit
    if notes:
        made["notes"] = notes
    return made


def wanted(part: str, nbytes: int, peer: str) -> float:
    """How many times as fast as a peer a collective has to be."""
    if part != "all_reduce":
        return 1.1
    if nbytes >= 4 * MIB:
        return 1.05
    if nbytes >= MIB:
        return 1.8 if peer == "nccl" else 1.4
    if nbytes >= 256 * KIB:
        return 2.0
    return 3.0 if peer == "nccl" else 2.5


def collectives(lines: Iterable[Json]) -> Iterator[Json]:
    for line in lines:
        part = line.get("part")
        found = line.get("us") or line.get("found") or {}
        if part == "eager":
            yield figure(
                "all_reduce.eager.65536", "us", found["peertile us"], 9, baseline=("nccl", found["nccl us"]), times=7
            )
            yield figure("all_reduce.eager.65536.submit", "us", found["peertile submit us"], times=7)
        elif part == "signal":
            yield figure("signal.released.one_way", "us", found["released_one_way_us"], 1.4, times=5)
            yield figure("signal.relaxed.one_way", "us", found["relaxed_one_way_us"], 0.8, times=5)
        elif part == "copy":
            for way, least in (("put", 350), ("get", 325)):
                best = max(rate for name, rate in found.items() if name.startswith(way))
                yield figure(f"{way}.both_directions", "GB/s", best, least, at_least=True, times=5)
        elif "bytes" in line:
            nbytes, ours = line["bytes"], found["peertile"]
            name = f"{part}.bf16.{nbytes}"
            for peer, us in found.items():
                if peer != "peertile" and isinstance(us, float):
                    yield figure(name, "us", ours, us / wanted(part, nbytes, peer), baseline=(peer, us), times=5)
            if part == "all_reduce" and nbytes in SLOWEST_US:
                yield figure(f"{name}.absolute", "us", ours, SLOWEST_US[nbytes], times=5)
            if part == "all_reduce" and nbytes == 256 * MIB:
                yield figure(f"{name}.rate", "GB/s", round(nbytes / ours / 1000, 1), 345, at_least=True, times=5)


def library(lines: Iterable[Json]) -> Iterator[Json]:
    for line in lines:
        section, case, us = line.get("section"), line.get("case"), line.get("us")
        if case is None or us is None or (section != "experts" and "peertile" not in us):
            continue
        name = f"{section}.{case}".strip()
        notes = f"relative error {line['relative_error']:.1e}" if "relative_error" in line else ""
        if section == "experts":
            moved = [line[k] / 1e6 for k in ("bytes_to_peer", "bytes_on_the_link")]
            notes = f"choices of the other rank's experts: {moved[0]:.0f} MB, {moved[1]:.0f} MB of them sent"
            for what, took in us.items():
                rate = line[f"{what} GB/s"]
                yield figure(f"{name}.{what}", "GB/s", rate, 0.9 * COPY_RATE, at_least=True, times=7, notes=notes)
                yield figure(f"{name}.{what}.time", "us", took, times=7)
            continue
        ours = us["peertile"]
        peers = {peer: took for peer, took in us.items() if peer != "peertile" and isinstance(took, float)}
        limits: dict[str, float] = {}
        if section in ("gather", "scatter"):
            longest = max(("GEMM", "NCCL"), key=lambda p: peers[p])
            limits = {"sequence": peers["sequence"], longest: 1.08 * peers[longest]}
        elif section == "reduce":
            is_long = peers["NCCL"] >= 0.3 * peers["sequence"]
            limits = {"sequence": peers["sequence"] / 1.3} if is_long else {"GEMM": 1.05 * peers["GEMM"]}
        elif section == "attention":
            fastest = min(peers, key=lambda p: peers[p])
            limits = {fastest: peers[fastest] / 0.9}
        elif section in ("softmax", "rms_norm"):
            limits = peers
        for peer, took in peers.items():
            yield figure(name, "us", ours, limits.get(peer), baseline=(peer, took), times=7, notes=notes)


def checked(lines: Iterable[Json]) -> Iterator[Json]:
    for line in lines:
        us = line.get("us") if line.get("section") == "checked" else None
        for case in line.get("checked_of_unchecked", ()) if us else ():
            bare = us[f"{case}, unchecked"]
            yield figure(
                f"checked.{case.replace(' ', '_')}",
                "us",
                us[case],
                1.01 * bare,
                baseline=("without checks", bare),
                times=11,
            )


def read(path: Path) -> list[Json]:
    """The lines of JSON of a log, or the one object that a file is."""
    text = path.read_text(encoding="utf-8")
    try:
        return [json.loads(text)]
    except json.JSONDecodeError:
        return [json.loads(line) for line in text.splitlines() if line.startswith("{") and line.endswith("}")]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("collectives", "library", "one-gpu"))
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--facts", type=Path, help="a file with date, machine and versions")
    parser.add_argument("--command", default="", help="what was typed to measure")
    parser.add_argument("--commit", default="", help="beside the version of peertile")
    parser.add_argument("--notes", default="")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    read_all = [item for path in options.files for item in read(path)]
    records = [item for item in read_all if "figures" in item]
    lines = [item for item in read_all if "figures" not in item]
    facts = json.loads(options.facts.read_text(encoding="utf-8")) if options.facts else records[0]
    figures = [f for record in records for f in record["figures"]]
    figures += {"collectives": collectives, "library": library, "one-gpu": checked}[options.kind](lines)
    versions = dict(facts["versions"])
    if options.commit:
        versions["peertile"] = f"{versions.get('peertile', '').split(' ')[0]} ({options.commit})".strip()
    made: Json = {
        "schema": 1, "date": facts.get("date") or datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": options.command or facts["command"], "machine": facts["machine"], "versions": versions,
        "figures": figures,
    }  # fmt: skip
    if options.notes:
        made["notes"] = options.notes
    options.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    held = [f for f in figures if "met" in f]
    for f in held:
        if not f["met"]:
            print(f"{f['name']}: {f['median']} {f['unit']}, limit {f['limit']}, {f.get('baseline')}")
    print(f"{sum(f['met'] for f in held)} of {len(held)} limits are met, {len(figures)} figures")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
