"""The scaling run: everything that has ranks, on N GPUs, in one command, and one record of it.

`PYTHONPATH=src python3 benchmarks/device/scaling.py --ranks N [--out FOLDER] [STEP ...]`

Steps, each a process of its own with a bound, so that one that fails hides no other:

- `collectives`: every collective, 1 KiB to 256 MiB, against NCCL and torch (bench_cuda_collectives.py);
- `library`: fused products, dispatch and combine against what one writes without them (bench_cuda_library.py);
- `stalls`: every collective 1,000 times, with ranks that stall at random, every result checked;
- `mapping`: heaps of all ranks by every path, with the memory that is free before and after;
- `killed`: one rank is killed while the others wait for it.

Without GPUs (PEERTILE_DEVICE=cpu) the steps that need torch and NCCL are left out. Writes
`FOLDER/<date>-scaling-<target>-x<N>.json` as benchmarks/records/README.md says. Makes no multicast object and changes
no setting of a GPU.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(HERE)]
os.environ.setdefault("PEERTILE_DEVICE", "cuda")
os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
os.environ.pop("PEERTILE_MULTICAST", None)

import device_records  # noqa: E402
import numpy as np  # noqa: E402

import peertile as pt  # noqa: E402
import peertile.language as T  # noqa: E402
from peertile.library.collectives import Collectives  # noqa: E402

Json = dict[str, Any]
REPETITIONS = 1000
LONGEST_STALL = 1 << 17
"""Trips of the loop that stalls a device; a host sleeps 2 ms at most."""
BOUNDS_S = {"collectives": 240.0, "library": 150.0, "stalls": 150.0, "mapping": 60.0, "killed": 40.0}


@pt.kernel
def stall(out: T.Exclusive, trips: T.i64) -> None:
    """Keeps the stream busy: each trip needs the one before."""
    x = T.i64(1)
    for _ in T.range(trips):
        x = (x * 6364136223846793005 + 1442695040888963407) ^ (x >> 7)
    out.store(T.full((1,), x, T.i64))


def stalled(group: pt.Group, repetitions: int) -> Json:
    """Every collective, `repetitions` times, of random counts that all ranks agree on, while each rank stalls its host,
    its device or neither. The elements are small integers, exact in bf16: every result is compared whole."""
    n, me = group.size, group.rank
    same, own = np.random.default_rng(7), np.random.default_rng((11, me))
    spin, found = pt.zeros((1,), pt.i64), {}
    with Collectives(group) as comm:
        for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
            begin = time.monotonic()
            for k in range(repetitions):
                count = int(same.integers(1, 2 ** int(same.integers(3, 18))))
                seed = int(same.integers(1 << 30))
                random = [np.random.default_rng((seed, r)) for r in range(n)]
                rows = [r.integers(-7, 8, (n, count)).astype(np.float32) for r in random]
                kind = int(own.integers(4))
                if kind == 0:
                    time.sleep(float(own.random()) * 0.002)
                elif kind == 1:
                    stall(spin.partition(1), int(own.integers(LONGEST_STALL))).sync()
                if name == "all_reduce":
                    got, want = comm.all_reduce(pt.asarray(rows[me][0], pt.bf16)), sum(r[0] for r in rows)
                elif name == "all_gather":
                    got, want = comm.all_gather(pt.asarray(rows[me][0], pt.bf16)), np.stack([r[0] for r in rows])
                elif name == "reduce_scatter":
                    got, want = comm.reduce_scatter(pt.asarray(rows[me].reshape(-1), pt.bf16)), sum(r[me] for r in rows)
                else:
                    got = comm.all_to_all(pt.asarray(rows[me].reshape(-1), pt.bf16))
                    want = np.concatenate([r[me] for r in rows])
                values = got.sync().numpy().astype(np.float32)
                if not np.array_equal(values.reshape(-1), np.asarray(want).reshape(-1)):
                    raise AssertionError(f"{name}: repetition {k} of {count} elements: rank {me} has another result")
            found[name] = {"repetitions": repetitions, "s": round(time.monotonic() - begin, 1)}
    return found


def stall_main(ranks: int) -> None:
    repetitions = int(os.environ.get("PEERTILE_BENCH_REPETITIONS", str(REPETITIONS)))
    print(json.dumps({"stalls": pt.spawn(stalled, ranks, (repetitions,), timeout_s=BOUNDS_S["stalls"])}), flush=True)


def mapping_main(ranks: int) -> None:
    import check_cuda_peers as peers

    paths = (None, "fd", "ipc") if os.environ["PEERTILE_DEVICE"] == "cuda" else (None, "fd")
    for path in paths:
        begin = time.monotonic()
        model = pt.RankModel.PROCESSES
        found = peers.attempt(lambda: peers.spawned(peers.uses_heap, ranks, path, 3, model=model))  # noqa: B023
        took = round(time.monotonic() - begin, 1)
        print(json.dumps({"mapping": path or "chosen", "ranks": found, "s": took}), flush=True)


def killed_main(ranks: int) -> None:
    import check_cuda_peers as peers

    before = peers.device_memory()
    begin = time.monotonic()
    found = peers.attempt(lambda: peers.spawned(peers.killed, ranks, model=pt.RankModel.PROCESSES, s=30))
    took, used = round(time.monotonic() - begin, 1), [before, peers.device_memory()]
    print(json.dumps({"killed": found, "s": took, "used MiB": used}), flush=True)


def commands(ranks: int) -> dict[str, list[str]]:
    this = [sys.executable, str(Path(__file__).resolve())]
    found = {name: [*this, f"--{name}", str(ranks)] for name in ("stalls", "mapping", "killed")}
    if os.environ["PEERTILE_DEVICE"] == "cuda":
        bench = [sys.executable, str(HERE / "bench_cuda_collectives.py"), "--ranks", str(ranks)]
        found = {"collectives": [*bench, "all_reduce", "all_gather", "reduce_scatter", "all_to_all"]} | found
        library = HERE / "bench_cuda_library.py"
        if library.exists():
            found["library"] = [sys.executable, str(library), "--ranks", str(ranks)]
    return found


def figures(step: str, lines: list[Json]) -> list[Json]:
    """The figures of a record in what a step printed."""
    found = []
    for line in lines:
        if step == "collectives" and isinstance(line.get("us"), dict):
            ours = line["us"].get("peertile")
            for other, value in line["us"].items():
                if other != "peertile" and isinstance(value, int | float) and isinstance(ours, int | float):
                    name = f"{line['part']}.bf16.{line['bytes']}"
                    found.append({"name": name, "unit": "us", "median": ours, "repetitions": 5,
                                  "baseline": {"name": other, "median": value}})  # fmt: skip
        elif step == "stalls" and "stalls" in line:
            for name in line["stalls"][0]:
                done = min(rank[name]["repetitions"] for rank in line["stalls"])
                found.append({"name": f"stalls.{name}", "unit": "count", "median": done, "repetitions": done})
    return found


def main(arguments: list[str]) -> None:
    ranks = int(arguments[arguments.index("--ranks") + 1]) if "--ranks" in arguments else 2
    out = Path(arguments[arguments.index("--out") + 1]) if "--out" in arguments else ROOT / "benchmarks" / "records"
    names = [a for a in arguments if a in BOUNDS_S]
    start = datetime.datetime.now(datetime.UTC)
    said: dict[str, Any] = {}
    found: list[Json] = []
    for name, command in commands(ranks).items():
        if names and name not in names:
            continue
        begin = time.monotonic()
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        try:
            text, _ = process.communicate(timeout=BOUNDS_S[name])
            status: int | str = process.returncode
        except subprocess.TimeoutExpired:
            process.kill()
            text, _ = process.communicate()
            status = "no end within the bound"
        print(text, end="", flush=True)
        lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        found += figures(name, lines)
        said[name] = {"status": status, "s": round(time.monotonic() - begin, 1)}
        if name in ("mapping", "killed", "library"):
            said[name]["said"] = lines
        print(json.dumps({"step": name} | {k: v for k, v in said[name].items() if k != "said"}), flush=True)
    _write(out, ranks, start, found, said)


def _write(out: Path, ranks: int, start: datetime.datetime, found: list[Json], said: Json) -> None:
    target = os.environ["PEERTILE_DEVICE"]
    given = {k: os.environ[k] for k in ("PEERTILE_DEVICE", "PEERTILE_BENCH_REPETITIONS") if k in os.environ}
    words = " ".join(f"{name}={value}" for name, value in given.items())
    command = f"{words} PYTHONPATH=src python3 benchmarks/device/scaling.py --ranks {ranks}"
    made = device_records.record(command, start, found, json.dumps(said))
    device_records.write(out / f"{start.date()}-scaling-{target}-x{ranks}.json", made)


if __name__ == "__main__":
    steps = {"--stalls": stall_main, "--mapping": mapping_main, "--killed": killed_main}
    if len(sys.argv) == 3 and sys.argv[1] in steps:
        steps[sys.argv[1]](int(sys.argv[2]))
        sys.stdout.flush()
        os._exit(0)
    main(sys.argv[1:])
