"""Collectives on GPUs against NCCL and torch's symmetric memory, captured in graphs, in one run.

`PYTHONPATH=src python3 benchmarks/device/bench_cuda_collectives.py [--ranks 2] [--sweep] [--table FILE] [NAME ...]`

Every rank is a process with a GPU. Each size is checked against a sum in float64 first, on fresh random bf16; then the
candidates take turns, and the medians of the slower rank are printed as JSON. `--sweep` times every way of cutting a
message instead of the committed one, `--table` chooses by another table. Names: all_reduce, all_gather,
reduce_scatter, all_to_all, eager, signal, copy.
Needs torch with NCCL for the other side. Makes no multicast object and changes no setting of a GPU.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(Path(__file__).resolve().parent)]
os.environ.setdefault("PEERTILE_DEVICE", "cuda")
os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}

from collective_cases import (  # noqa: E402
    KIB,
    MIB,
    PROGRAMS,
    SIZES,
    Bench,
    Case,
    calls_of,
    variants,
    verify,
)
from turns import Json, guarded, say  # noqa: E402

import peertile as pt  # noqa: E402
import peertile.language as T  # noqa: E402
from peertile.library.collectives import Collectives  # noqa: E402
from peertile.library.cuda_collectives import Family, GpuPlans, heap_bytes  # noqa: E402
from peertile.library.selection import set_table  # noqa: E402

__all__ = ["Bench", "calls_of", "verify"]


def compared(b: Bench, plans: GpuPlans, family: Family, nbytes: int, sweep: bool) -> Json:
    """Times of ours, by the committed table or every way of `variants`, and of the others."""
    case = Case(b, plans, family, nbytes)
    shape = None if sweep else plans.shape(family, case.sent, pt.bf16)
    ours = variants(family, case.sent, 2) if shape is None else {"peertile": shape}
    return b.compare({name: case.ours(s) for name, s in ours.items()} | case.theirs(), nbytes)


# ---------------------------------------------------------------- signals and copies


@pt.kernel
def ping(out: T.Exclusive, ready: T.Signal, rounds: T.i32, first: T.i64) -> None:
    """A released signal to and fro."""
    other = 1 - ready.rank
    for _ in T.range(rounds):
        if ready.rank == first:
            ready.notify(to=other)
            ready.wait(other)
        else:
            ready.wait(other)
            ready.notify(to=other)
    out.store(T.full((1,), rounds, T.i64))


@pt.kernel
def ping_relaxed(out: T.Exclusive, words: T.Peer, rounds: T.i64, first: T.i64, start: T.i64) -> None:
    """A relaxed word to and fro, polled with acquire."""
    me = words.rank
    for k in T.range(rounds):
        e = start + k + 1
        if me == first:
            T.st(words, e, (0,), rank=1 - me)
            T.wait_ge(words, e, (0,))
        else:
            T.wait_ge(words, e, (0,))
            T.st(words, e, (0,), rank=1 - me)
    out.store(T.full((1,), rounds, T.i64))


@pt.kernel
def put_part(p: T.Peer, x: T.Shared, B: T.Const[int]) -> None:
    """x into the other rank's part, tile by tile."""
    to = 1 - p.rank
    for k in T.range(T.program_id(0), x.num_tiles((B,))[0], T.num_programs(0)):
        T.put(x.load((k,), (B,)), p, (k,), rank=to)


@pt.kernel
def get_part(out: T.Exclusive, p: T.Peer[T.read]) -> None:
    """The other rank's part into out, tile by tile."""
    for tile in out.tiles():
        tile.store(T.get(p, out.tile_shape, tile.index, rank=1 - p.rank))


def signals(b: Bench) -> Json:
    rounds = 20_000  # one rank launches some 0.3 ms behind the other, and waits that much less
    found: Json = {}
    with pt.SymmetricHeap(b.group, size_bytes=MIB) as heap:
        ready, words, out = heap.signal(slots=1), heap.zeros((2,), pt.i64), pt.zeros((1,), pt.i64)
        driver, handle = b.device.driver, b.stream.handle
        for name in ("released", "relaxed"):
            times = []
            for turn in range(5):
                op = (
                    ping(out.partition(1), ready, rounds, 0)
                    if name == "released"
                    else ping_relaxed(out.partition(1), words, rounds, 0, turn * rounds)
                )
                op.compiled()
                b.group.barrier("ready")
                start, end = driver.create_event(), driver.create_event()
                driver.record_event(handle, start)
                op.sync_on(b.stream)
                driver.wait(driver.record_event(handle, end), 10)
                times.append(driver.elapsed_ns(start, end) / rounds / 2 / 1000)
            found[f"{name}_one_way_us"] = round(min(times), 3)
    return found


def copies(b: Bench) -> Json:
    found: Json = {}
    nbytes = 256 * MIB
    with pt.SymmetricHeap(b.group, size_bytes=nbytes + MIB) as heap:
        p, x = heap.empty((nbytes // 4,), pt.f32), pt.rand(nbytes // 4, seed=b.group.rank)
        for tile in (1024, 4096):
            for programs in (132, 264, 528):
                put = put_part.grid(programs)(p, x, B=tile)
                cut = x.partition(tile).persistent(programs=programs)
                for name, op in (("put", lambda put=put: put_part.grid(programs)(p, x, B=tile)),  # noqa: B023
                                 ("get", lambda cut=cut: get_part(cut, p))):  # fmt: skip
                    run = b.ours(lambda op=op: lambda: [op()], 4)
                    times = []
                    for _ in range(3):
                        b.group.barrier("turn")
                        times.append(run(2))
                    slow = max(float(v) for v in b.group.exchange(repr(min(times)).encode(), "times"))
                    found[f"{name} {tile} x {programs} GB/s"] = round(nbytes / slow / 1000, 1)
    return found


def eager(b: Bench) -> Json:
    """64 KiB through a communicator, no graph, calls pipelined."""
    count = 32 * KIB
    x, out = pt.asarray(b.random(count), pt.bf16), pt.empty((count,), pt.bf16)
    found: Json = {}
    with Collectives(b.group) as comm:
        comm.all_reduce(x, out).sync_on(b.stream)
        times, host = [], []
        for _ in range(7):
            b.group.barrier("turn")
            begin = time.perf_counter()
            futures = [comm.all_reduce(x, out).submit(b.stream) for _ in range(200)]
            host.append((time.perf_counter() - begin) / 200 * 1e6)
            for future in futures:
                future.wait(20)
            times.append((time.perf_counter() - begin) / 200 * 1e6)
        found["peertile us"] = round(statistics.median(times), 2)
        found["peertile submit us"] = round(statistics.median(host), 2)
    if b.torch is not None:
        torch = b.torch
        values = torch.ones(count, dtype=torch.bfloat16, device="cuda")
        times = []
        for _ in range(7):
            b.group.barrier("turn")
            begin = time.perf_counter()
            for _ in range(200):
                torch.distributed.all_reduce(values)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) / 200 * 1e6)
        found["nccl us"] = round(statistics.median(times), 2)
    return found


# ---------------------------------------------------------------- running


def rank_main(group: pt.Group, names: list[str], sweep: bool, plain: bool, limit_s: float) -> None:
    begin = time.monotonic()
    b = Bench(group, plain)
    first = group.rank == 0

    def tell(**found: Any) -> None:
        if first:
            say(**found, s=round(time.monotonic() - begin, 1))

    def late() -> bool:
        return any(group.exchange(b"1" if time.monotonic() - begin > limit_s else b"", "late"))

    with pt.SymmetricHeap(group, size_bytes=heap_bytes(group.size, PROGRAMS) + MIB) as heap:
        plans = GpuPlans(heap, PROGRAMS)
        tell(part="ready", device=b.device.capabilities.name)
        for name in names:
            if late():
                break
            if name in ("signal", "copy", "eager"):
                function = {"signal": lambda: signals(b), "copy": lambda: copies(b), "eager": lambda: eager(b)}
                tell(part=name, found=guarded(function[name]))
                continue
            sizes = SIZES if name == "all_reduce" else [s for s in SIZES if s not in (4 * KIB, 4 * MIB)]
            for nbytes in sizes:
                if late():
                    break
                found = guarded(lambda: compared(b, plans, Family(name), nbytes, sweep))  # noqa: B023
                tell(part=name, bytes=nbytes, us=found)
    if b.torch is not None:
        b.torch.cuda.synchronize()
    group.barrier("end")
    group.close()  # rank 0 hosts the rendezvous: the others hear of the end
    sys.stdout.flush()
    os._exit(0)  # not through the finalisers of two libraries on one GPU


def main(arguments: list[str]) -> None:
    ranks = int(arguments[arguments.index("--ranks") + 1]) if "--ranks" in arguments else 2
    limit = float(arguments[arguments.index("--limit") + 1]) if "--limit" in arguments else 1e9
    table = arguments[arguments.index("--table") + 1] if "--table" in arguments else ""
    if table:
        set_table(json.loads(Path(table).read_text(encoding="utf-8")))
    values = {str(ranks), str(int(limit)) if limit < 1e9 else "", table}
    names = [a for a in arguments if not a.startswith("--") and a not in values]
    names = names or ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "eager", "signal", "copy"]
    os.environ.setdefault("PEERTILE_BENCH_PORT", "29761")
    pt.run(rank_entry(names, "--sweep" in arguments, "--plain" in arguments, limit), ranks=ranks)


def rank_entry(names: list[str], sweep: bool, plain: bool, limit: float) -> Callable[[pt.Group], None]:
    def entry(group: pt.Group) -> None:
        rank_main(group, names, sweep, plain, limit)

    return entry


if __name__ == "__main__":
    main(sys.argv[1:])
