"""Collectives over 2, 4, 8 and odd numbers of ranks on cpu: time of a call and what a rank moves, by size.

    python benchmarks/scale_collectives.py --ranks 2 3 4 8 --record benchmarks/records/DATE-scaling-MACHINE.json

Every rank is a process. Results are compared with what they have to be. `GB/s` is the bytes that each rank has to get
and give in the best case (all-reduce: 2 (n - 1) / n of the message) over the time of the call.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

import peertile as pt
from peertile.cli.bench import record
from peertile.cli.bench_collectives import bind, per_call
from peertile.library.collectives import Collectives
from peertile.testing.measure import Figure

SIZES = tuple(1 << k for k in (10, 14, 16, 18, 20, 22, 24, 26))
BATCHES = 5


def rank(group: pt.Group, largest: int) -> dict[str, float]:
    """Seconds of each call, as this rank sees them."""
    n, me = group.size, group.rank
    sizes = [size for size in SIZES if size <= largest]

    def agree(value: float) -> float:
        return max(float(v) for v in group.exchange(repr(value).encode(), "scale"))

    found: dict[str, float] = {}
    total = n * (n + 1) / 2
    with Collectives(group) as comm, pt.SymmetricHeap(group, size_bytes=3 * largest) as heap:
        bind(group)
        for size in sizes:
            count = size // 4 // n * n
            each = count // n
            x, out = pt.asarray(np.full(count, 1.0 + me, np.float32)), pt.empty((count,), pt.f32)
            part, whole = pt.asarray(np.full(each, 1.0 + me, np.float32)), pt.empty((each,), pt.f32)
            sx, so = heap.empty((count,), pt.f32), heap.empty((count,), pt.f32)
            sx.copy_from(x.numpy())
            calls: dict[str, tuple[Callable[[], object], pt.Tensor, object]] = {
                "all_reduce": (lambda x=x, out=out: comm.all_reduce(x, out).sync(), out, total),
                "all_reduce.symmetric": (lambda sx=sx, so=so: comm.all_reduce(sx, so).sync(), so, total),
                "reduce_scatter": (lambda x=x, whole=whole: comm.reduce_scatter(x, whole).sync(), whole, total),
                "all_gather": (
                    lambda part=part, out=out: comm.all_gather(part, out).sync(),
                    out,
                    np.repeat(np.arange(1.0, n + 1), each),
                ),
                "all_to_all": (
                    lambda x=x, out=out: comm.all_to_all(x, out).sync(),
                    out,
                    np.repeat(np.arange(1.0, n + 1), each),
                ),
                "broadcast": (lambda x=x, out=out: comm.broadcast(x, out, root=n - 1).sync(), out, float(n)),
            }
            for name, (call, result, expected) in calls.items():
                found[f"{name}.{size >> 10}KiB"] = per_call(call, agree, BATCHES)
                assert (result.numpy() == expected).all(), f"{name} of {size} bytes over {n} ranks"
            heap.free(sx)
            heap.free(so)
    return found


def moved(name: str, size: int, n: int) -> float:
    """Bytes that a rank has to get or give, whichever is more, in the best case."""
    if name.startswith("all_reduce"):
        return 2 * (n - 1) / n * size
    return size if name == "broadcast" else (n - 1) / n * size


def main() -> int:
    parser = argparse.ArgumentParser(description="Collectives on cpu over several numbers of ranks.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 8])
    parser.add_argument("--largest", type=int, default=max(SIZES), help="bytes of the largest message")
    parser.add_argument("--timeout-s", type=float, default=200.0)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    figures = []
    for n in options.ranks:
        found = pt.spawn(rank, n, (options.largest,), model=pt.RankModel.PROCESSES, timeout_s=options.timeout_s)
        for key in found[0]:
            name, _, size = key.rpartition(".")
            seconds = max(f[key] for f in found)
            rate = moved(name, int(size.removesuffix("KiB")) << 10, n) / seconds / 1e9
            figures.append(Figure(f"{key}.{n}_ranks", seconds * 1e6, "us", BATCHES))
            figures.append(Figure(f"{key}.{n}_ranks.moved", rate, "GB/s", BATCHES))
            print(f"{n} ranks {key}: {seconds * 1e6:.1f} us, {rate:.2f} GB/s", flush=True)
    if options.record is not None:
        options.record.write_text(json.dumps(record(figures, " ".join(["python", *sys.argv])), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
