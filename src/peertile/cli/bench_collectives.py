"""All-reduce and 1 KiB rounds over two processes, beside Open MPI in the same run. Asserts no time.

Open MPI is optional: `apt-get install openmpi-bin libopenmpi-dev`, and `pip install mpi4py` in this interpreter's
environment or in one that the variable MPI_PYTHON names. Without it figures come without a peer.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
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

__all__ = ["BATCH_S", "SIZES", "bench_allreduce", "mpi_python", "per_call"]

SIZES = tuple(1 << k for k in (10, 12, 14, 16, 18, 20, 22, 24, 26))
"""Bytes of a message."""
USER_LIMITS = {1 << 18: 1.2, 1 << 20: 1.2, 1 << 22: 1.0, 1 << 24: 2.0, 1 << 26: 4.0}
SYMMETRIC_LIMIT, SYMMETRIC_FROM = 1.3, 1 << 14
ROUNDS, ROUND_BATCHES = 20_000, 7
BATCHES = 15
BATCH_S = 0.004
TIMEOUT_S = 300.0


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


def per_call(call: Callable[[], object], agree: Callable[[float], float], batches: int = 15) -> float:
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


def _rank(group: Group) -> dict[str, float]:
    """What one rank measures."""

    def agree(value: float) -> float:
        return max(float(v) for v in group.exchange(repr(value).encode(), "bench"))

    found: dict[str, float] = {}
    with Collectives(group) as comm, SymmetricHeap(group, size_bytes=4 * max(SIZES)) as heap:
        for size in SIZES:
            count = size // 4
            x, out = asarray(np.full(count, 1.0 + group.rank, np.float32)), empty((count,), f32)
            sx, sout = heap.empty((count,), f32), heap.empty((count,), f32)
            sx.copy_from(x.numpy())
            found[f"user {size}"] = per_call(_call(comm, x, out), agree)
            found[f"symmetric {size}"] = per_call(_call(comm, sx, sout), agree)
            for result in (out, sout):
                assert (result.numpy() == group.size * (group.size + 1) / 2).all(), "sums differ"
            heap.free(sx)
            heap.free(sout)
        box = heap.mailbox(tile=256, dtype=f32, programs=1)
        x, out = full((256,), 1.0, f32), empty((256,), f32)
        times = []
        for _ in range(ROUND_BATCHES):
            agree(0.0)
            start = time.perf_counter()
            rounds(out.partition(256), x, box, ROUNDS).sync()
            times.append((time.perf_counter() - start) / ROUNDS)
        found["round"] = statistics.median(times)
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
    found[size] = per_call(lambda: comm.Allreduce(x, out), agree)
if comm.rank == 0:
    print(json.dumps(found))
"""


def mpi_python() -> str | None:
    """An interpreter with mpi4py, if mpirun is there too."""
    if shutil.which("mpirun") is None:
        return None
    for python in (os.environ.get("MPI_PYTHON"), sys.executable):
        if python and subprocess.run([python, "-c", "import mpi4py"], capture_output=True, check=False).returncode == 0:
            return python
    return None


def _mpi(sizes: tuple[int, ...]) -> dict[int, float]:
    """Seconds of Open MPI's Allreduce over two processes; empty without it."""
    python = mpi_python()
    if python is None:
        return {}
    import inspect

    source = inspect.getsource(per_call).replace("Callable", "tuple")  # annotations, which nobody there looks at
    code = _MPI.format(batch_s=BATCH_S, source=source, sizes=sizes)
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", python, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {int(size): value for size, value in found.items()}


def bench_allreduce() -> list[Figure]:
    """All-reduce of f32 over two processes: user tensors and symmetric ones, beside Open MPI; rounds in a kernel."""
    before = _mpi(SIZES)
    own = spawn(_rank, 2, (), model=RankModel.PROCESSES, timeout_s=TIMEOUT_S)[0]
    after = _mpi(SIZES)
    figures = []
    for kind in ("user", "symmetric"):
        for size in SIZES:
            # Both sides of the own run, so that a machine that slows down favours nobody.
            peer = statistics.mean([before[size], after[size]]) * 1e6 if before else None
            wanted = USER_LIMITS.get(size) if kind == "user" else SYMMETRIC_LIMIT if size >= SYMMETRIC_FROM else None
            figures.append(
                Figure(
                    f"allreduce.{kind}.{size >> 10}KiB",
                    own[f"{kind} {size}"] * 1e6,
                    "us",
                    BATCHES,
                    limit=peer / wanted if peer is not None and wanted is not None else None,
                    baseline=None if peer is None else "Open MPI Allreduce",
                    baseline_median=peer,
                )
            )
    figures.append(Figure("allreduce.round_in_kernel.1KiB", own["round"] * 1e6, "us", ROUND_BATCHES, limit=0.5))
    return figures
