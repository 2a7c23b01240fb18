"""Collectives on GPUs against NCCL and torch's symmetric memory, captured in graphs, in one run.

`PYTHONPATH=src python3 benchmarks/device/bench_cuda_collectives.py [--ranks 2] [--sweep] [--table FILE] [NAME ...]`

Every rank is a process with a GPU. Each size is checked against a sum in float64 first, on fresh random bf16; then the
candidates take turns, and the medians of the slower rank are printed as JSON. `--sweep` times every way of cutting a
message instead of the committed one, `--table` chooses by another table. Names: all_reduce, all_gather,
reduce_scatter, all_to_all, eager, signal, copy.
Needs torch with NCCL for the other side. Makes no multicast object and changes no setting of a GPU.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
os.environ.setdefault("PEERTILE_DEVICE", "cuda")
os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}

import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402

import peertile as pt  # noqa: E402
import peertile.language as T  # noqa: E402
from peertile.library.collectives import Collectives  # noqa: E402
from peertile.library.cuda_collectives import Family, GpuPlans, Shape, heap_bytes  # noqa: E402
from peertile.library.reductions import ReduceOp  # noqa: E402
from peertile.library.selection import Algorithm, set_table  # noqa: E402

Json = dict[str, Any]
KIB, MIB = 1 << 10, 1 << 20
SIZES = [1 * KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB]
PROGRAMS = 528
FLAGGED, PUSHED = Algorithm.FLAGGED, Algorithm.PUSHED


def say(**found: Any) -> None:
    print(json.dumps(found, default=str), flush=True)


def guarded(function: Callable[[], Any]) -> Any:
    """What a part gives, or what it raised."""
    try:
        return function()
    except Exception as error:
        last = [line.strip() for line in traceback.format_exc().splitlines() if line.startswith("  File ")]
        return {"error": f"{type(error).__name__}: {str(error)[:500]}", "at": last[-3:]}


class Bench:
    """One rank's side: what both libraries need, and turns of timing that all ranks take together."""

    def __init__(self, group: pt.Group, plain: bool) -> None:
        self.group = group
        self.device = pt.current_device()
        self.stream = self.device.stream("bench")
        self.rng = np.random.default_rng(1 + group.rank)
        self.torch: Any = None if plain else self._torch()

    def _torch(self) -> Any:
        torch: Any = importlib.import_module("torch")
        ordinal = self.device.driver.ordinal
        torch.cuda.set_device(ordinal)
        torch.distributed.init_process_group(
            "nccl", init_method=f"tcp://127.0.0.1:{os.environ['PEERTILE_BENCH_PORT']}", rank=self.group.rank,
            world_size=self.group.size, device_id=torch.device("cuda", ordinal),
        )  # fmt: skip
        return torch

    def random(self, count: int, rank: int | None = None, seed: int = 0) -> Any:
        """Rank's bf16 input of so many elements: every rank can make everybody's. Long ones repeat, at an odd distance,
        so that nothing that went to the wrong tile looks right."""
        rng = np.random.default_rng((seed, self.group.rank if rank is None else rank))
        block = rng.standard_normal(min(count, 3_000_017), np.float32).astype(ml_dtypes.bfloat16)
        return np.resize(block, count)

    # ---------------------------------------------------------------- timing

    def ours(self, make: Callable[[], Any], calls: int) -> Callable[[int], float]:
        """f(repeats) -> microseconds of a call of what `make` builds, captured `calls` times in a graph."""
        driver, handle = self.device.driver, self.stream.handle
        ops = make()
        with pt.capture(self.stream, "bench") as scope:
            for _ in range(calls):
                for op in ops() if callable(ops) else ops:
                    scope.record(op)
        graph = scope.graph
        graph.launch().sync_on(self.stream)

        def run(repeats: int) -> float:
            start, end = driver.create_event(), driver.create_event()
            futures = [graph.launch().submit(self.stream)]
            driver.record_event(handle, start)
            futures += [graph.launch().submit(self.stream) for _ in range(repeats)]
            ticket = driver.record_event(handle, end)
            for future in futures:
                future.wait(30)
            driver.wait(ticket, 10)
            return driver.elapsed_ns(start, end) / repeats / calls / 1000

        return run

    def theirs(self, call: Callable[[], Any], calls: int, *keep: Any) -> Callable[[int], float]:
        """The same of a call of torch. `keep` is what the graph uses: it stays as long as the result."""
        torch = self.torch
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            for _ in range(calls):
                call()
        graph.replay()
        torch.cuda.synchronize()

        def run(repeats: int, _keep: Any = keep) -> float:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            start.record()
            for _ in range(repeats):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            return float(start.elapsed_time(end)) * 1000 / repeats / calls

        return run

    def compare(self, candidates: dict[str, Callable[[], Callable[[int], float]]], nbytes: int) -> Json:
        """Medians in microseconds, of the slower rank, the candidates taking turns."""
        made: dict[str, Callable[[int], float]] = {}
        found: Json = {}
        for name, make in candidates.items():
            ready = guarded(make)
            everybody = self.group.exchange(b"" if callable(ready) else json.dumps(ready).encode(), f"made {name}")
            if callable(ready) and not any(everybody):
                made[name] = ready
            else:
                found[name] = next(json.loads(e) for e in everybody if e)
        times: dict[str, list[float]] = {name: [] for name in made}
        repeats = 2 if nbytes >= 64 * MIB else 5
        for _ in range(5):
            for name, run in made.items():
                self.group.barrier("turn")
                times[name].append(run(repeats))
        for name, values in times.items():
            mine = statistics.median(values)
            found[name] = round(max(float(v) for v in self.group.exchange(repr(mine).encode(), "times")), 2)
        return found


def calls_of(nbytes: int) -> int:
    return 50 if nbytes <= MIB else 20 if nbytes <= 16 * MIB else 4


def shapes(nbytes: int, itemsize: int) -> dict[str, Shape]:
    """Ways to cut a message of so many bytes for each rank."""
    found = {}
    words = nbytes // 4
    if nbytes <= MIB:
        for tile in (32, 64, 128) if nbytes <= 64 * KIB else (128, 256, 512):
            programs = -(-words // tile)
            if programs <= PROGRAMS:
                found[f"flagged {tile} x {programs}"] = Shape(FLAGGED, programs, tile)
    for size, programs in ((4 * KIB, 256), (8 * KIB, 128), (8 * KIB, 512), (16 * KIB, 64), (16 * KIB, 256)):
        tile, tiles = size // itemsize, -(-nbytes // size)
        if programs <= tiles <= (1 << 20 if size > 4 * KIB and programs > 200 else programs) and nbytes > 128 * KIB:
            found[f"pushed {tile} x {programs}"] = Shape(PUSHED, programs, tile)
    if nbytes >= 16 * MIB:
        for programs in (264, 384):
            found[f"pushed {16 * KIB // itemsize} x {programs}"] = Shape(PUSHED, programs, 16 * KIB // itemsize)
    return found


def verify(b: Bench, got: Any, want: Any) -> None:
    np.testing.assert_array_equal(got.view(np.uint16), want.view(np.uint16))


def all_reduce(b: Bench, plans: GpuPlans, nbytes: int, sweep: bool) -> Json:
    count = nbytes // 2
    everybody = [b.random(count, r, nbytes) for r in range(b.group.size)]
    want = sum(e.astype(np.float32) for e in everybody).astype(ml_dtypes.bfloat16)
    x, out = pt.asarray(everybody[b.group.rank], pt.bf16), pt.empty((count,), pt.bf16)
    candidates: dict[str, Callable[[], Callable[[int], float]]] = {}
    calls = calls_of(nbytes)

    def ours(shape: Shape) -> Callable[[], Callable[[int], float]]:
        def make() -> Callable[[int], float]:
            pt.op.fill(out, float("nan")).sync()
            run = b.ours(lambda: lambda: [plans.all_reduce(shape, x, out, ReduceOp.SUM)], calls)
            verify(b, out.numpy(), want)
            return run

        return make

    for name, shape in chosen(Family.ALL_REDUCE, nbytes, 2, sweep, plans).items():
        candidates[name] = ours(shape)
    if b.torch is not None:
        torch = b.torch
        values = torch.from_numpy(everybody[b.group.rank].astype(np.float32)).cuda().bfloat16()
        candidates["nccl"] = lambda: b.theirs(lambda: torch.distributed.all_reduce(values), calls)
        symm = importlib.import_module("torch.distributed._symmetric_memory")
        name = torch.distributed.group.WORLD.group_name

        def symmetric(function: str) -> Callable[[], Callable[[int], float]]:
            def make() -> Callable[[int], float]:
                shared = symm.empty(count, dtype=torch.bfloat16, device=values.device)
                symm.rendezvous(shared, torch.distributed.group.WORLD)
                shared.copy_(values)
                torch.cuda.synchronize()
                return b.theirs(lambda: getattr(torch.ops.symm_mem, function)(shared, "sum", name), calls, shared)

            return make

        candidates["torch one-shot"] = symmetric("one_shot_all_reduce")
        candidates["torch two-shot"] = symmetric("two_shot_all_reduce_")
    return b.compare(candidates, nbytes)


def chosen(family: Family, nbytes: int, itemsize: int, sweep: bool, plans: GpuPlans) -> dict[str, Shape]:
    """What to time: every way, or the one that the committed table says for a message of `nbytes` to each rank."""
    shape = None if sweep else plans.shape(family, nbytes, pt.bf16)
    return shapes(nbytes, itemsize) if shape is None else {"peertile": shape}


def moves(b: Bench, plans: GpuPlans, family: str, nbytes: int, sweep: bool) -> Json:
    """all_gather, reduce_scatter, all_to_all: `nbytes` are those of the longer side of a rank."""
    n, me = b.group.size, b.group.rank
    count = nbytes // 2
    each = count // n
    everybody = [b.random(count, r, nbytes) for r in range(n)]
    rows = [e.reshape(n, each) for e in everybody]
    gather = family == "all_gather"
    if family == "reduce_scatter":
        want = sum(r[me].astype(np.float32) for r in rows).astype(ml_dtypes.bfloat16)
    else:
        want = np.concatenate([r[0 if gather else me] for r in rows])
    source = rows[me][0] if gather else everybody[me]
    x, out = pt.asarray(source, pt.bf16), pt.empty((want.size,), pt.bf16)
    calls = calls_of(nbytes)

    def launch(shape: Shape) -> Any:
        if family == "reduce_scatter":
            return plans.reduce_scatter(shape, x, out, ReduceOp.SUM)
        return plans.gather(shape, x, out, each=not gather)

    def ours(shape: Shape) -> Callable[[], Callable[[int], float]]:
        def make() -> Callable[[int], float]:
            pt.op.fill(out, float("nan")).sync()
            run = b.ours(lambda: lambda: [launch(shape)], calls)
            verify(b, out.numpy(), want)
            return run

        return make

    per_rank = nbytes // n
    itemsize = 2 if family == "reduce_scatter" else 4
    options = chosen(Family(family), per_rank, itemsize, sweep, plans)
    candidates: dict[str, Callable[[], Callable[[int], float]]] = {k: ours(s) for k, s in options.items()}
    if b.torch is not None:
        torch = b.torch
        inputs = torch.from_numpy(source.astype(np.float32)).cuda().bfloat16()
        outputs = torch.empty(want.size, dtype=torch.bfloat16, device=inputs.device)
        functions = {
            "all_gather": lambda: torch.distributed.all_gather_into_tensor(outputs, inputs),
            "reduce_scatter": lambda: torch.distributed.reduce_scatter_tensor(outputs, inputs),
            "all_to_all": lambda: torch.distributed.all_to_all_single(outputs, inputs),
        }
        candidates["nccl"] = lambda: b.theirs(functions[family], calls)
    return b.compare(candidates, nbytes)


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
    rounds = 2000
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
        times = []
        for _ in range(7):
            b.group.barrier("turn")
            begin = time.perf_counter()
            futures = [comm.all_reduce(x, out).submit(b.stream) for _ in range(200)]
            for future in futures:
                future.wait(20)
            times.append((time.perf_counter() - begin) / 200 * 1e6)
        found["peertile us"] = round(statistics.median(times), 2)
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
                if name == "all_reduce":
                    found = guarded(lambda: all_reduce(b, plans, nbytes, sweep))  # noqa: B023
                else:
                    found = guarded(lambda: moves(b, plans, name, nbytes, sweep))  # noqa: B023
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
