"""All-reduce and 1 KiB rounds over two processes, in turns with Open MPI and torch gloo. Asserts no time.

Both peers are optional. Open MPI: `apt-get install openmpi-bin libopenmpi-dev`, and `pip install mpi4py` in this
interpreter's environment or in one that the variable MPI_PYTHON names; torch likewise, with TORCH_PYTHON. Without
them figures come without a peer.

Own and peers run in turns, PAIRS times each, and each figure is the median over the runs: cores of a virtual machine
can be moved apart and together again while a benchmark runs. `allreduce.round_trip` says how far apart they were.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import peertile.language as T
from peertile.comm.group import Group, RankModel
from peertile.comm.launcher import spawn
from peertile.comm.symmetric import SymmetricHeap
from peertile.creation import asarray, empty, full
from peertile.dtypes import f32
from peertile.kernel import kernel
from peertile.library.collectives import AnyTensor, Collectives
from peertile.testing.measure import Figure

__all__ = ["BATCH_S", "SIZES", "bench_allreduce", "bind", "mpi_python", "per_call"]

SIZES = tuple(1 << k for k in (10, 12, 14, 16, 18, 20, 22, 24, 26))
"""Bytes of a message."""
USER_LIMITS = {1 << 18: 1.2, 1 << 20: 1.2, 1 << 22: 1.0, 1 << 24: 2.0, 1 << 26: 4.0}
SYMMETRIC_LIMIT, SYMMETRIC_FROM = 1.3, 1 << 14
ROUNDS, ROUND_BATCHES = 20_000, 7
PAIRS, BATCHES = 3, 7
BATCH_S = 0.004
TIMEOUT_S = 300.0
GLOO_FROM, GLOO_BATCHES = 1 << 18, 3
"""Below, gloo takes a millisecond whatever the size is."""


@kernel
def rounds(out: T.Exclusive, x: T.Shared, box: T.Mailbox, count: T.i32) -> None:
    """`count` all-reduces of one tile, inside one launch."""
    acc = x.load_like(out)
    for _ in T.range(count):
        box.post(acc)
        acc = T.zeros(out.tile_shape, T.f32)
        for part in box.collect():
            acc += part
        acc = acc * 0.5
    out.store(acc)


def per_call(call: Callable[[], object], agree: Callable[[float], float], batches: int) -> float:
    """Median seconds of a call, over batches of as many calls as fill a few milliseconds.

    `agree` makes ranks take the same number: all of them call equally often.
    """
    for _ in range(3):
        call()
    start = time.perf_counter()
    call()
    calls = max(1, int(BATCH_S / max(agree(time.perf_counter() - start), 1e-7)))
    times = []
    for _ in range(batches):
        agree(0.0)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)


def _call(comm: Collectives, x: AnyTensor, out: AnyTensor) -> Callable[[], object]:
    return lambda: comm.all_reduce(x, out).sync()


def bind(group: Group) -> None:
    """This thread to a core of its own, as mpirun does with its ranks: where processors are virtual, the system may
    leave two of them on one while the other has nothing to do."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) >= group.size:
            os.sched_setaffinity(0, {cores[group.rank]})


def _rank(group: Group) -> dict[str, float]:
    """What one rank measures."""

    def agree(value: float) -> float:
        return max(float(v) for v in group.exchange(repr(value).encode(), "bench"))

    found: dict[str, float] = {}
    with Collectives(group) as comm, SymmetricHeap(group, size_bytes=4 * max(SIZES)) as heap:
        bind(group)
        for size in SIZES:
            count = size // 4
            x, out = asarray(np.full(count, 1.0 + group.rank, np.float32)), empty((count,), f32)
            sx, sout = heap.empty((count,), f32), heap.empty((count,), f32)
            sx.copy_from(x.numpy())
            found[f"user {size}"] = per_call(_call(comm, x, out), agree, BATCHES)
            found[f"symmetric {size}"] = per_call(_call(comm, sx, sout), agree, BATCHES)
            for result in (out, sout):
                assert (result.numpy() == group.size * (group.size + 1) / 2).all(), "sums differ"
            heap.free(sx)
            heap.free(sout)
        box = heap.mailbox(tile=256, dtype=f32, programs=1)
        small = heap.mailbox(tile=1, dtype=f32, programs=1)
        for name, count, channel in (("round", 256, box), ("round trip", 1, small)):
            x, out = full((count,), 1.0, f32), empty((count,), f32)
            times = []
            for _ in range(ROUND_BATCHES):
                agree(0.0)
                start = time.perf_counter()
                rounds(out.partition(count), x, channel, ROUNDS).sync()
                times.append((time.perf_counter() - start) / ROUNDS)
            found[name] = statistics.median(times)
    return found


_MPI = """
import json, statistics, sys, time
import numpy as np
from mpi4py import MPI
comm = MPI.COMM_WORLD
BATCH_S = {batch_s}
def agree(value):
    return comm.allreduce(value, MPI.MAX)
{source}
found = {{}}
for size in {sizes}:
    x, out = np.full(size // 4, 1.0 + comm.rank, np.float32), np.empty(size // 4, np.float32)
    found[size] = per_call(lambda: comm.Allreduce(x, out), agree, {batches})
if comm.rank == 0:
    print(json.dumps(found))
"""

_GLOO = """
import json, os, statistics, sys, time
import torch, torch.distributed as dist
torch.set_num_threads(1)
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
BATCH_S = {batch_s}
def agree(value):
    t = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(t, dist.ReduceOp.MAX)
    return float(t)
{source}
found = {{}}
for size in {sizes}:
    x = torch.zeros(size // 4)
    found[size] = per_call(lambda: dist.all_reduce(x), agree, {batches})
if rank == 0:
    print(json.dumps(found))
dist.destroy_process_group()
"""


def mpi_python() -> str | None:
    """An interpreter with mpi4py, if mpirun is there too."""
    if shutil.which("mpirun") is None:
        return None
    for python in (os.environ.get("MPI_PYTHON"), sys.executable):
        if python and subprocess.run([python, "-c", "import mpi4py"], capture_output=True, check=False).returncode == 0:
            return python
    return None


def torch_python() -> str | None:
    """An interpreter with torch and gloo."""
    check = "import torch.distributed as d; assert d.is_gloo_available()"
    for python in (os.environ.get("TORCH_PYTHON"), sys.executable):
        if python and subprocess.run([python, "-c", check], capture_output=True, check=False).returncode == 0:
            return python
    return None


def _code(template: str, sizes: tuple[int, ...], batches: int) -> str:
    source = inspect.getsource(per_call).replace("Callable", "tuple")  # annotations, which nobody there looks at
    return template.format(batch_s=BATCH_S, source=source, sizes=sizes, batches=batches)


def _sizes(text: str) -> dict[int, float]:
    found: dict[str, Any] = json.loads(text.splitlines()[-1])
    return {int(size): value for size, value in found.items()}


def _mpi(python: str) -> dict[int, float]:
    """Seconds of Open MPI's Allreduce over two processes."""
    code = _code(_MPI, SIZES, BATCHES)
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", python, "-c", code]
    return _sizes(subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stdout)


def _gloo(python: str) -> dict[int, float]:
    """Seconds of torch's all_reduce over two processes."""
    code = _code(_GLOO, tuple(s for s in SIZES if s >= GLOO_FROM), GLOO_BATCHES)
    with tempfile.TemporaryDirectory(prefix="peertile-bench-") as folder:
        command = [python, "-c", code]
        ranks = [
            subprocess.Popen([*command, str(rank), f"{folder}/meet"], stdout=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        try:
            texts = [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    if any(rank.returncode for rank in ranks):
        raise subprocess.CalledProcessError(1, "torch gloo")
    return _sizes(texts[0])


def bench_allreduce() -> list[Figure]:
    """All-reduce of f32 over two processes: user tensors and symmetric ones, beside Open MPI; rounds in a kernel."""
    mpi, torch = mpi_python(), torch_python()
    own, peer, gloo = [], [], []
    for _ in range(PAIRS):
        if mpi is not None:
            peer.append(_mpi(mpi))
        own.append(spawn(_rank, 2, (), model=RankModel.PROCESSES, timeout_s=TIMEOUT_S)[0])
        if torch is not None:
            gloo.append(_gloo(torch))

    def us(runs: list[Any], key: object) -> float:
        return statistics.median(float(run[key]) for run in runs) * 1e6

    figures = []
    for kind in ("user", "symmetric"):
        for size in SIZES:
            other = us(peer, size) if peer else None
            wanted = USER_LIMITS.get(size) if kind == "user" else SYMMETRIC_LIMIT if size >= SYMMETRIC_FROM else None
            figures.append(
                Figure(
                    f"allreduce.{kind}.{size >> 10}KiB",
                    us(own, f"{kind} {size}"),
                    "us",
                    PAIRS * BATCHES,
                    limit=other / wanted if other is not None and wanted is not None else None,
                    baseline=None if other is None else "Open MPI Allreduce",
                    baseline_median=other,
                )
            )
    for size in sorted(gloo[0]) if gloo else ():
        figures.append(
            Figure(
                f"allreduce.user_and_gloo.{size >> 10}KiB",
                us(own, f"user {size}"),
                "us",
                PAIRS * BATCHES,
                baseline="torch gloo all_reduce",
                baseline_median=us(gloo, size),
            )
        )
    repetitions = PAIRS * ROUND_BATCHES
    figures.append(Figure("allreduce.round_in_kernel.1KiB", us(own, "round"), "us", repetitions, limit=0.5))
    # Each run's own: they tell whether the cores were near each other or far apart.
    for k, run in enumerate(own):
        figures.append(Figure(f"allreduce.round_trip.run{k}", run["round trip"] * 1e6, "us", ROUND_BATCHES))
    return figures
