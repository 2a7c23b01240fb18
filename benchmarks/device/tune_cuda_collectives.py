"""Which kernels the collectives of N GPUs should use: every way at every size, beside NCCL and torch, within a time.

    PYTHONPATH=src python3 benchmarks/device/tune_cuda_collectives.py --ranks 2 --budget 300 [--write] [--roomy]

Every rank is a process with a GPU. At each size every way of `collective_cases.variants` is captured in a graph and
has to give the exact bits on all ranks; those that do take turns with NCCL and torch's symmetric memory. A way that
is wrong, fails, or waits for what never comes is dropped and named, and the run goes on: waits are bounded by
PEERTILE_WAIT_TIMEOUT_S (here 5 s), and a run that says nothing for `--silence` seconds is ended and begun again behind
the way that it was at. Sizes are taken in order of doubt, all collectives at each, so that a short budget leaves out
what is known best. `--roomy` tries other numbers of programs beside, and more staging memory, for long all-reduces:
what wins there is a constant of the library, not a row. Prints the rows for `library/table.json` (`--write` puts them
there) and writes a record to `--out`.
Needs torch with NCCL for the other side (`--plain` goes without). Makes no multicast object, changes no setting.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(HERE), str(HERE.parent)]
os.environ.setdefault("PEERTILE_DEVICE", "cuda")
os.environ.setdefault("PEERTILE_WAIT_TIMEOUT_S", "5")
os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}

import device_records  # noqa: E402
import tune_collectives  # noqa: E402
from collective_cases import (  # noqa: E402
    KIB,
    MIB,
    PROGRAMS,
    ROOMS,
    Bench,
    Case,
    Roomy,
    least_us,
    roomy_variants,
    variants,
)
from turns import Json, Run, guarded, say  # noqa: E402

import peertile as pt  # noqa: E402
from peertile.errors import PeerFailed  # noqa: E402
from peertile.library.cuda_collectives import Family, GpuPlans, Shape, heap_bytes  # noqa: E402
from peertile.library.selection import load_table, set_table  # noqa: E402

DOUBT = (256 * KIB, 4 * MIB, 16 * MIB, 64 * MIB, MIB, 256 * MIB, 64 * KIB, 16 * KIB, 4 * KIB, KIB)
ROUNDS = 5
MEETING_S = 90.0
"""Hosts of ranks meet within this: longer than kernels wait for each other, and than compiling takes."""
STATE = "PEERTILE_TUNE_STATE"
"""What a run that is begun again has to leave out, as JSON: `done`, [family, bytes], and `dropped`, with a way each."""
SELF = [sys.executable, str(Path(__file__).resolve())]

Found = dict[str, dict[int, Json]]
"""By family and bytes: `sent`, `us` (median by way), `table` (ways that a table can say), `dropped` (why, by way)."""


# ---------------------------------------------------------------- ranks


class Together:
    """Steps that all ranks take, and that fail for all of them or for none."""

    def __init__(self, b: Bench) -> None:
        self.b = b

    def step(self, name: str, function: Callable[[], Any]) -> tuple[Any, str]:
        """(what `function` gave here, "") or (None, why it failed on some rank); then the group is as new."""
        value = guarded(function)
        failed = isinstance(value, dict) and "error" in value
        why = f"rank {self.b.group.rank}: {value['error']}" if failed else ""
        try:
            everybody = self.b.group.exchange(why.encode(), f"tune {name}", timeout_s=MEETING_S)
        except PeerFailed:
            # A wait timed out, or a rank saw another call: nobody goes on before all words count from zero again.
            guarded(lambda: self.b.stream.sync(10))
            self.b.group.recover(timeout_s=MEETING_S)
            everybody = self.b.group.exchange(why.encode(), f"tune {name} again", timeout_s=MEETING_S)
        reasons = [text.decode() for text in everybody if text]
        # Who was only told of it says less than who saw it.
        reasons.sort(key=lambda text: "PeerFailed" in text)
        return (None, reasons[0]) if reasons else (value, "")


def measure(
    b: Bench, case: Case, ways: dict[str, Shape], trying: Callable[[str], None], rounds: int = ROUNDS
) -> tuple[Json, Json]:
    """Medians of the slower rank, in microseconds, by way; and why the others were dropped. `trying` hears of each way
    before it is taken."""
    together, dropped = Together(b), {}
    made: dict[str, Run] = {}
    names = list(ways)
    for k, name in enumerate(names):
        if k % b.group.size == b.group.rank:  # each rank compiles some; all find them on the disk then
            guarded(lambda: case.launch(ways[name]).compiled())  # noqa: B023
    candidates = {name: case.ours(shape) for name, shape in ways.items()} | case.theirs()
    for name, make in candidates.items():
        trying(name)
        run, why = together.step(name, make)
        if why:
            dropped[name] = why
        else:
            made[name] = run
    times: dict[str, list[float]] = {name: [] for name in made}
    repeats = 2 if case.nbytes >= 64 * MIB else 5
    for _ in range(rounds):
        for name in list(made):
            trying(name)
            took, why = together.step(name, lambda: made[name](repeats))  # noqa: B023
            if why:
                dropped[name] = why
                del made[name]
            else:
                times[name].append(took)
    medians = {}
    for name in made:
        mine = sorted(times[name])[rounds // 2]
        medians[name] = round(
            max(float(v) for v in b.group.exchange(repr(mine).encode(), "times", timeout_s=MEETING_S)), 2
        )
    return medians, dropped


def sayable(plans: GpuPlans, family: Family, sent: int, shape: Shape) -> bool:
    """Whether a row of the table leads to these very programs."""
    if isinstance(shape, Roomy):
        return False
    unit = {"flagged": 4, "filled": 8}.get(shape.algorithm.value, 2 if family.reduces else 4)
    entry = [None, shape.algorithm.value, shape.tile * unit]
    row = {"target": "cuda", "arch": plans.arch, "world": plans.heap.group.size, "entries": [entry]}
    set_table({"collectives": {f.value: [row] for f in Family}})
    try:
        said = plans.shape(family, sent, pt.bf16)
    finally:
        set_table(None)
    tiles = -(-sent // (shape.tile * unit))
    return (
        said is not None
        and (said.algorithm, said.tile) == (shape.algorithm, shape.tile)
        and min(said.programs, tiles) == min(shape.programs, tiles)
    )


def rank_main(
    group: pt.Group, families: list[str], sizes: list[int], plain: bool, limit_s: float, roomy: bool, rounds: int
) -> None:
    begin = time.monotonic()
    state = json.loads(os.environ.get(STATE, "{}"))
    done = {tuple(x) for x in state.get("done", [])}
    out = {tuple(x) for x in state.get("dropped", [])}
    b = Bench(group, plain)

    def tell(**found: Any) -> None:
        if group.rank == 0:
            say(**found)

    def tell_of(family: str, nbytes: int, name: str) -> None:
        tell(trying=[family, nbytes, name])

    def late() -> bool:
        said = b"1" if time.monotonic() - begin > limit_s else b""
        return any(group.exchange(said, "late", timeout_s=MEETING_S))

    group.barrier("begin", timeout_s=MEETING_S)
    rooms = ROOMS if roomy else ()
    room_bytes = sum(heap_bytes(group.size, PROGRAMS, room) for room in rooms)
    with pt.SymmetricHeap(group, size_bytes=heap_bytes(group.size, PROGRAMS) + room_bytes + MIB) as heap:
        plans = GpuPlans(heap, PROGRAMS)
        of_rooms = {room: GpuPlans(heap, PROGRAMS, room=room) for room in rooms}
        all_plans = (plans, *of_rooms.values())
        for some in all_plans:
            group.on_recover(some.recover)
        tell(ready=b.device.capabilities.name, arch=b.device.target or plans.arch)
        for nbytes in sizes:
            for family in map(Family, families):
                if (family.value, nbytes) in done:
                    continue
                if late():
                    tell(left=[family.value, nbytes])
                    continue
                uneven = 0 if family is Family.ALL_REDUCE else nbytes % (8 * group.size)
                case = Case(b, plans, family, nbytes - uneven, of_rooms)
                possible = variants(family, case.sent, 2) | (roomy_variants(family, case.sent, 2) if roomy else {})
                ways = {name: shape for name, shape in possible.items() if (family.value, nbytes, name) not in out}
                trying = partial(tell_of, family.value, nbytes)
                medians, dropped = measure(b, case, ways, trying, rounds)
                table = [name for name, shape in ways.items() if sayable(plans, family, case.sent, shape)]
                least = {s.algorithm.value: least_us(s.algorithm, case.sent, group.size) for s in ways.values()}
                tell(
                    family=family.value, bytes=nbytes, sent=case.sent, us=medians, least_us=least, table=table,
                    dropped=dropped,
                )  # fmt: skip
        for some in all_plans:
            group.forget_recover(some.recover)
    tell(end=True)
    group.barrier("end")
    group.close()  # rank 0 hosts the rendezvous: the others hear of the end
    sys.stdout.flush()
    os._exit(0)  # not through the finalisers of two libraries on one GPU


# ---------------------------------------------------------------- one run, begun again where it stops


def lines_of(process: subprocess.Popen[str], silence_s: float, until: float) -> Iterator[Json | None]:
    """What a run says; None at the end if it was silent, or late, and had to be ended."""
    said: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                said.put(line)
        said.put(None)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    while True:
        try:
            line = said.get(timeout=max(0.1, min(silence_s, until - time.monotonic())))
        except queue.Empty:
            os.killpg(process.pid, signal.SIGKILL)  # the ranks, too, of a session of their own
            reader.join(10)
            yield None
            return
        if line is None:
            return
        if line.startswith("{"):
            yield json.loads(line)


def supervise(command: list[str], budget_s: float, silence_s: float) -> tuple[Found, Json]:
    """Runs `command` until all is measured or the time is over; what was found, and what is to be known of the run."""
    end = time.monotonic() + budget_s
    found: Found = {}
    about: Json = {"begun": 0, "left": [], "device": "", "arch": "any"}
    dropped: list[list[Any]] = []
    while time.monotonic() < end - 1:
        done = [[family, nbytes] for family, sizes in found.items() for nbytes in sizes]
        state = json.dumps({"done": done, "dropped": dropped})
        left_s = end - time.monotonic()
        process = subprocess.Popen(
            [*command, "--limit", str(round(max(left_s - silence_s / 4, left_s / 2), 1))], cwd=ROOT,
            stdout=subprocess.PIPE, text=True, env=os.environ | {STATE: state}, start_new_session=True,
        )  # fmt: skip
        about["begun"] += 1
        ended, trying = False, None
        for line in lines_of(process, silence_s, end + silence_s):
            if line is None:
                break
            trying = line.get("trying", trying)
            ended |= "end" in line
            about["device"], about["arch"] = line.get("ready", about["device"]), line.get("arch", about["arch"])
            if "left" in line:
                about["left"].append(line["left"])
            if "us" in line:
                family, nbytes = line.pop("family"), line.pop("bytes")
                for name in [x for x in dropped if x[:2] == [family, nbytes]]:
                    line["dropped"][name[2]] = "the run ended there, or said nothing more"
                found.setdefault(family, {})[nbytes] = line
                say(family=family, bytes=nbytes, **line)
        status = process.wait()
        if ended:
            break
        if trying is None or trying in dropped:
            about["failed"] = f"status {status}"
            break
        dropped.append(trying)
        say(dropped=trying, status=status)
    return found, about


# ---------------------------------------------------------------- rows and records


def rows_of(found: Found, arch: str, ranks: int) -> dict[str, Json]:
    """The rows to commit, of what a table can say: a bound lies in the middle, by ratio, between two sizes."""
    rows = {}
    for family, sizes in found.items():
        by_sent: dict[int, dict[str, float]] = {}
        for line in sizes.values():
            for name in line["table"]:
                if name in line["us"]:
                    way = " ".join(name.split()[:2])  # without its programs, which follow
                    best = by_sent.setdefault(line["sent"], {})
                    best[way] = min(line["us"][name], best.get(way, math.inf))
        if not by_sent:
            continue
        sent = sorted(by_sent)
        middle = {a: math.isqrt(a * b) for a, b in itertools.pairwise(sent)}
        entries = tune_collectives.winners({n: by_sent[n] for n in sent})
        entries = [[middle.get(bound, bound), *rest] for bound, *rest in entries]
        rows[family] = {"target": "cuda", "arch": arch, "world": ranks, "entries": entries}
    return rows


def chosen_way(row: Json, line: Json) -> str | None:
    """The way of a measured size that a row leads to."""
    for bound, algorithm, tile in row["entries"]:
        if bound is None or line["sent"] <= bound:
            names = [n for n in line["table"] if n.split()[:2] == [algorithm, str(tile)] and n in line["us"]]
            return min(names, key=lambda n: line["us"][n], default=None)
    return None


def asked(family: str, nbytes: int, other: str) -> float:
    """How many times as fast as `other` the project wants to be between two GPUs."""
    if family != Family.ALL_REDUCE.value:
        return 1.1
    nccl = other == "nccl"
    if nbytes <= 64 * KIB:
        return 3.0 if nccl else 2.5
    if nbytes <= 256 * KIB:
        return 2.0
    return (1.8 if nccl else 1.4) if nbytes <= MIB else 1.05


def figures_of(found: Found, rows: dict[str, Json], ranks: int, rounds: int = ROUNDS) -> list[Json]:
    """A figure for each size and other library; with what is asked where that is known, between two ranks."""
    figures = []
    for family, sizes in found.items():
        for nbytes, line in sorted(sizes.items()):
            way = chosen_way(rows[family], line) if family in rows else None
            if way is None:
                continue
            ours = line["us"][way]
            figure = {"name": f"{family}.bf16.{nbytes}", "unit": "us", "median": ours, "repetitions": rounds}
            others = [name for name in line["us"] if name == "nccl" or name.startswith("torch")]
            for other in others:
                median = line["us"][other]
                more: Json = {"baseline": {"name": other, "median": median}}
                if ranks == 2:
                    limit = round(median / asked(family, nbytes, other), 2)
                    more |= {"limit": limit, "met": ours <= limit}
                figures.append(figure | more)
            if not others:
                figures.append(figure)
    return figures


def machine_name(device: str, ranks: int) -> str:
    """h200x2 of NVIDIA H200, two of them."""
    word = re.sub(r"[^a-z0-9]", "", device.lower().split()[-1]) if device.startswith("NVIDIA") else "cpu"
    return f"{word or 'gpu'}x{ranks}"


def arguments_of(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--budget", type=float, default=300.0, help="seconds for everything")
    parser.add_argument("--silence", type=float, default=60.0, help="seconds without a word that end a run")
    parser.add_argument(
        "--collectives", nargs="+", default=[f.value for f in Family], choices=[f.value for f in Family]
    )
    parser.add_argument("--sizes", nargs="+", type=int, default=list(DOUBT), help="bytes of the longer side of a rank")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "records")
    parser.add_argument("--plain", action="store_true", help="without torch and NCCL")
    parser.add_argument("--roomy", action="store_true", help="more ways of long all-reduces, with more staging memory")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns of each way, of which the median counts")
    parser.add_argument("--write", action="store_true", help="put the rows into the library's table")
    parser.add_argument("--limit", type=float, default=0.0, help=argparse.SUPPRESS)  # this is a run of ranks
    return parser.parse_args(given)


def main(given: list[str]) -> None:
    options = arguments_of(given)
    if options.limit:
        os.environ.setdefault("PEERTILE_BENCH_PORT", "29763")
        work = (
            options.collectives, options.sizes, options.plain, options.limit, options.roomy, options.rounds,
        )  # fmt: skip
        pt.run(lambda group: rank_main(group, *work), ranks=options.ranks)
        return
    start = datetime.datetime.now(datetime.UTC)
    found, about = supervise([*SELF, *given], options.budget, options.silence)
    rows = rows_of(found, about["arch"], options.ranks)
    for family, row in rows.items():
        print(json.dumps({"row": family} | row), flush=True)
    if options.write:
        table = load_table()
        for family, row in rows.items():
            tune_collectives.put_row(table, family, row)
        tune_collectives.TABLE.write_text(tune_collectives.spelled(table), encoding="utf-8")
    notes = {"about": about, "rows": rows, "times": found}
    command = f"PYTHONPATH=src python3 benchmarks/device/tune_cuda_collectives.py {' '.join(given)}".rstrip()
    made = device_records.record(
        command, start, figures_of(found, rows, options.ranks, options.rounds), json.dumps(notes)
    )
    name = f"{start.date()}-cuda-collectives-tuning-{machine_name(about['device'], options.ranks)}.json"
    device_records.write(options.out / name, made)


if __name__ == "__main__":
    main(sys.argv[1:])
