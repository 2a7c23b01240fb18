"""Check peers on GPUs: `PYTHONPATH=src python3 benchmarks/device/check_cuda_peers.py [STEP ...]`.

Symmetric heaps over every memory path and process model, the package's own tests of peers, the examples, and what goes
wrong: killed ranks, memory that lacks, paths that are not permitted, launches in opposite orders. Every step is a
process of its own with a bound, so that one that fails or hangs hides no other; each prints what it found as it goes.
Needs cuda-bindings, triton, numpy, ml_dtypes; pytest for the tests. Two GPUs, or one with two ranks on it. No multicast
object is made and no setting of a GPU is changed.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
os.environ.setdefault("PEERTILE_DEVICE", "cuda")
os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}

import peertile as pt  # noqa: E402
import peertile.language as T  # noqa: E402

Json = dict[str, Any]
MIB = 1 << 20


def attempt(function: Callable[[], Any]) -> Any:
    """What a part of a step gives, or what it raised."""
    try:
        return function()
    except BaseException as error:
        last = [line.strip() for line in traceback.format_exc().splitlines() if line.startswith("  File ")]
        return {"error": f"{type(error).__name__}: {str(error)[:600]}", "at": last[-4:]}


def parts(table: dict[str, Callable[[], Any]]) -> None:
    """Each part of a step, told as it ends."""
    for name, function in table.items():
        begin = time.perf_counter()
        found = attempt(function)
        print(json.dumps({name: found, "s": round(time.perf_counter() - begin, 2)}, default=str), flush=True)


def free_bytes() -> int | None:
    """Free memory of this rank's device."""
    driver: Any = pt.current_device().driver
    if not hasattr(driver, "api"):
        return None
    driver.api.push_context(driver.context)
    try:
        return int(driver.api.memory_info()[0])
    finally:
        driver.api.pop_context()


# ---------------------------------------------------------------- kernels


@pt.kernel
def swap(out: T.Exclusive, x: T.Peer, ready: T.Signal, B: T.Const[int]) -> None:
    """Everybody's first element, pushed by each."""
    for r in T.ranks():
        x.at(r).store((x.rank, 0), T.full((1, B), (x.rank + 1).astype(T.i32), T.i32))
    ready.notify()
    ready.wait()
    total = T.zeros((1, B), T.i32)
    for r in T.ranks():
        total += x.local.load((r, 0), (1, B))
    out.store(T.reshape(total, (B,)))


@pt.kernel
def wait_alone(out: T.Exclusive, ready: T.Signal) -> None:
    """Waits for every peer, and tells nobody."""
    ready.wait()
    out.store(T.full((1,), 1, T.i32))


@pt.kernel
def meet(out: T.Exclusive, b: T.Barrier) -> None:
    b.sync_all()
    out.store(T.full((1,), 1, T.i32))


@pt.kernel
def asserts(out: T.Exclusive, ready: T.Signal, bad: T.i64) -> None:
    """Rank `bad` finds something wrong; the others wait for it."""
    if ready.rank == bad:
        T.assert_(ready.rank != bad, "on purpose")  # noqa: PT009 - of the kernel language
    ready.notify()
    ready.wait()
    out.store(T.full((1,), 1, T.i32))


@pt.kernel
def counts(c: T.Counter, each: T.i32) -> None:
    """Everybody adds to everybody's word."""
    for _ in T.range(each):
        for r in T.ranks():
            c[0].add(1, to=r)


@pt.kernel
def counted(out: T.Exclusive, c: T.Counter, n: T.i64) -> None:
    """Waits for so many adds: fewer, if any was lost."""
    c[0].wait(n)
    out.store(T.full((1,), n, T.i64))


# ---------------------------------------------------------------- rank functions


def uses_heap(group: pt.Group, path: str | None, rounds: int) -> Json:
    """A heap, data in both directions, and the same free memory before and after."""
    device = pt.current_device()
    found: Json = {"device": device.name, "name": device.capabilities.name}
    pt.zeros(16, pt.i32).numpy()
    before = None
    for turn in range(rounds):
        kind = None if path is None else pt.ShareKind(path)
        with pt.SymmetricHeap(group, size_bytes=256 * MIB, path=kind) as heap:
            x, ready = heap.zeros((group.size, 64), pt.i32), heap.signal(slots=4)
            out = pt.full((64,), -1, pt.i32)
            for _ in range(3):
                swap(out.partition(64), x, ready, B=64).sync()
                assert out.numpy().tolist() == [group.size * (group.size + 1) // 2] * 64, out.numpy()
            found["path"], found["atomics"] = heap._memory.path.value, heap._memory.peer_atomics
            other = (group.rank + 1) % group.size
            assert x.at(other).numpy()[:, 0].tolist() == [r + 1 for r in range(group.size)]
            group.barrier("read")
        group.barrier("closed")
        if turn == 0:  # what the first use of the driver takes stays
            before = free_bytes()
    after = free_bytes()
    found["bytes_not_given_back"] = None if before is None or after is None else before - after
    return found


def sums_are_right(group: pt.Group) -> None:
    """A new heap, and data in both directions."""
    with pt.SymmetricHeap(group, size_bytes=8 * MIB) as heap:
        x, ready = heap.zeros((group.size, 64), pt.i32), heap.signal(slots=4)
        out = pt.full((64,), -1, pt.i32)
        swap(out.partition(64), x, ready, B=64).sync()
        assert out.numpy().tolist() == [group.size * (group.size + 1) // 2] * 64
        group.barrier("sums")


def failing(group: pt.Group, what: str) -> Json:
    """Something goes wrong on one rank, or on all; how every rank hears of it, how soon, and that after recover() the
    group computes and no memory is kept."""
    sums_are_right(group)
    pt.zeros(16, pt.i32).numpy()
    before = free_bytes()
    heap = pt.SymmetricHeap(group, size_bytes=64 * MIB)
    ready, out = heap.signal(slots=4), pt.zeros((1,), pt.i32)
    waits = wait_alone(out.partition(1), ready)
    waits.compiled()
    group.barrier("all here")
    begin = time.monotonic()
    error: Any = None
    try:
        if what == "a wait that is never met":
            waits.sync()
        elif what == "an assertion in one rank":
            asserts(out.partition(1), ready, 1).sync()
        elif what == "an exception before the second launch":
            if group.rank == 1:
                group.fail("RuntimeError: on purpose, before the second launch")
                raise RuntimeError("on purpose")
            waits.sync()
        elif what == "memory that cannot be exported":
            if group.rank == 1:
                unexportable()
            pt.SymmetricHeap(group, size_bytes=MIB, path=pt.ShareKind.IPC)
    except Exception as caught:
        error = f"{type(caught).__name__}: {str(caught)[:200]}"
    took = round(time.monotonic() - begin, 2)
    if group.failure() is not None:
        group.recover()
    heap.close()
    sums_are_right(group)
    after = free_bytes()
    kept = None if before is None or after is None else before - after
    return {"error": error, "after_s": took, "kept": kept, "right sums since": True}


def unexportable() -> None:
    """From now on this rank takes what is to be exported from a pool, which legacy IPC refuses."""
    driver: Any = pt.current_device().driver
    if hasattr(driver, "api"):
        api = driver.api
        taken: list[int] = []

        def take(nbytes: int) -> int:
            taken.append(int(driver.heap.take(nbytes)))
            return taken[-1]

        plain = api.free_ipc
        api.allocate_ipc = take
        api.free_ipc = lambda address: driver.heap.give(address) if address in taken else plain(address)


def atomics(group: pt.Group, each: int) -> Json:
    """Adds of all ranks to one word of each: none is lost, or counters are refused on every rank."""
    with pt.SymmetricHeap(group, size_bytes=8 * MIB) as heap:
        found: Json = {"native": heap.peer_atomics}
        counter = attempt(lambda: heap.counter(slots=1))
        if isinstance(counter, dict):
            return found | counter
        programs = 64
        counts.grid(programs)(counter, each).sync()
        group.barrier("added")
        out = pt.zeros((1,), pt.i64)
        counted(out.partition(1), counter, programs * each * group.size).sync()
        found["adds kept"] = int(out.numpy()[0])
        group.barrier("read")
    return found


def differently(group: pt.Group) -> Json:
    """Collectives with another count, or another operation, on one rank."""
    sys.path.insert(0, str(ROOT / "tests" / "library"))
    ranks: Any = importlib.import_module("gpu_plan_ranks")
    return {
        f"{way} {'count' if count else 'op'}": attempt(lambda: ranks.called_differently(group, way, count))  # noqa: B023
        for way in ("flagged", "filled", "pushed") for count in (True, False)
    }  # fmt: skip


def too_large(group: pt.Group) -> Json:
    """A heap that no GPU has room for: an error on every rank, nothing kept."""
    pt.zeros(16, pt.i32).numpy()
    free = free_bytes() or 0
    error = attempt(lambda: pt.SymmetricHeap(group, size_bytes=400 << 30))
    return {"error": error, "kept": free - (free_bytes() or 0), "group": str(group.failure())}


def forced(group: pt.Group, path: str) -> Any:
    return attempt(lambda: pt.SymmetricHeap(group, size_bytes=MIB, path=pt.ShareKind(path)).close())


def killed(group: pt.Group) -> None:
    with pt.SymmetricHeap(group, size_bytes=MIB) as heap:
        ready = heap.signal(slots=4)
        out = pt.zeros((1,), pt.i32)
        op = wait_alone(out.partition(1), ready)
        op.compiled()
        group.barrier("all here")
        if group.rank == 1:
            time.sleep(0.3)  # the others are in the kernel by then
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        try:
            op.sync()
        finally:
            print(json.dumps({"rank": group.rank, "left_after_s": round(time.monotonic() - begin, 2)}), flush=True)


def opposite(group: pt.Group) -> bool:
    """Two collectives on two streams, launched by one rank in one order and by the other in the other."""
    with pt.SymmetricHeap(group, size_bytes=8 * MIB) as heap:
        channels = [(heap.zeros((group.size, 64), pt.i32), heap.signal(slots=4)) for _ in range(2)]
        outs = [pt.full((64,), -1, pt.i32) for _ in range(2)]
        streams = [pt.current_device().stream(f"s{k}") for k in range(2)]
        ops = [lambda k=k: swap(outs[k].partition(64), *channels[k], B=64) for k in range(2)]
        ops[0]().compiled()
        for _ in range(5):
            group.barrier("together")
            order = (0, 1) if group.rank % 2 == 0 else (1, 0)
            futures = [ops[k]().submit(streams[k]) for k in order]
            for future in futures:
                future.wait(20)
            for out in outs:
                assert out.numpy().tolist() == [group.size * (group.size + 1) // 2] * 64
    return True


def many_programs(group: pt.Group) -> Any:
    """All programs of all ranks meet; one more than fits is refused before anything runs."""
    found: Json = {}
    with pt.SymmetricHeap(group, size_bytes=64 * MIB) as heap:
        b = heap.barrier(programs=1 << 17)
        for n in (1, 2, 64, 132, 528):
            out = pt.zeros((n,), pt.i32)
            begin = time.perf_counter()
            found[str(n)] = attempt(lambda: meet(out.partition(1), b).sync() and None)  # noqa: B023
            found[f"{n} ms"] = round(1000 * (time.perf_counter() - begin), 2)
            group.barrier("next")
        out = pt.zeros((1 << 17,), pt.i32)
        found["refused"] = attempt(lambda: meet(out.partition(1), b).sync())
        group.barrier("refused")
    return found


def traced(group: pt.Group) -> Json:
    """The test of puts of views, size by size, with the stacks of a rank that takes long."""
    sys.path.insert(0, str(ROOT / "tests" / "peer"))
    ranks: Any = importlib.import_module("transfer_ranks")
    faulthandler.dump_traceback_later(12, exit=False)
    found: Json = {}
    for n in ranks.SIZES:
        begin = time.perf_counter()
        ranks.views_are_put(group, (n,))
        found[str(n)] = round(time.perf_counter() - begin, 3)
        if group.rank == 0:
            print(json.dumps({"n": n, "s": found[str(n)]}), flush=True)
    faulthandler.cancel_dump_traceback_later()
    return found


def spawned(function: Callable[..., Any], ranks: int, *args: Any, model: pt.RankModel, s: float = 60) -> Any:
    return pt.spawn(function, ranks, args, model=model, timeout_s=s)


PROCESSES, THREADS = pt.RankModel.PROCESSES, pt.RankModel.THREADS

# ---------------------------------------------------------------- steps


def step_heaps() -> None:
    table: dict[str, Callable[[], Any]] = {}
    for model in (PROCESSES, THREADS):
        for path in (None, "fd", "ipc"):
            table[f"{model.value} {path or 'automatic'}"] = lambda model=model, path=path: spawned(
                uses_heap, 2, path, 3, model=model
            )
    table["threads 4"] = lambda: spawned(uses_heap, 4, None, 2, model=THREADS)
    table["processes 3"] = lambda: spawned(uses_heap, 3, None, 2, model=PROCESSES)
    table["forced fabric"] = lambda: spawned(forced, 2, "fabric", model=PROCESSES)
    parts(table)


def step_traced() -> None:
    parts({"puts, processes": lambda: spawned(traced, 2, model=PROCESSES, s=25)})


def step_faults() -> None:
    parts(
        {
            "too large, processes": lambda: spawned(too_large, 2, model=PROCESSES),
            "too large, threads": lambda: spawned(too_large, 2, model=THREADS),
            "killed": lambda: spawned(killed, 2, model=PROCESSES, s=30),
            "opposite, processes": lambda: spawned(opposite, 2, model=PROCESSES),
            "opposite, threads": lambda: spawned(opposite, 2, model=THREADS),
            "programs, processes": lambda: spawned(many_programs, 2, model=PROCESSES),
            "programs, threads": lambda: spawned(many_programs, 2, model=THREADS),
            "programs, threads on one GPU": lambda: spawned(many_programs, 3, model=THREADS),
        }
    )


def step_luck() -> None:
    """What goes wrong for one rank or all, in both process models, with a short bound on waits."""
    os.environ["PEERTILE_WAIT_TIMEOUT_S"] = "1.5"
    table: dict[str, Callable[[], Any]] = {}
    for model in (PROCESSES, THREADS):
        for what in WRONG:
            table[f"{what}, {model.value}"] = lambda w=what, model=model: spawned(failing, 2, w, model=model, s=30)
        table[f"called differently, {model.value}"] = lambda model=model: spawned(differently, 2, model=model, s=60)
        table[f"atomics, {model.value}"] = lambda model=model: spawned(atomics, 2, 800, model=model, s=30)
    before = device_memory()
    table["killed"] = lambda: spawned(killed, 2, model=PROCESSES, s=30)
    parts(table)
    print(json.dumps({"used MiB before and after": [before, device_memory()]}), flush=True)


WRONG = (
    "a wait that is never met", "an assertion in one rank", "an exception before the second launch",
    "memory that cannot be exported",
)  # fmt: skip


def device_memory() -> Any:
    """MiB in use on every GPU, as its driver says to anybody."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return attempt(lambda: [int(x) for x in subprocess.run(command, capture_output=True, text=True, timeout=20,
                                                           check=True).stdout.split()])  # fmt: skip


def step_examples() -> None:
    def run(name: str, ranks: int, *arguments: str) -> Callable[[], Any]:
        def go() -> Any:
            command = [sys.executable, "-c", "from peertile.cli.main import main; main()", "run"]
            command += [str(ROOT / "examples" / f"{name}.py"), "--ranks", str(ranks), "--device", "cuda", "--json"]
            command += ["--", *arguments] if arguments else []
            done = subprocess.run(command, capture_output=True, text=True, timeout=40, check=False)
            return {"status": done.returncode, "said": done.stderr[-700:]}

        return go

    parts({f"{n} {r}": run(n, r) for n, r in (("allreduce", 2), ("two_shot", 2), ("handshake", 2), ("allreduce", 1))})


PLUGIN = """
import os
import sys
import pytest
import peertile as pt
import peertile.config

kept = []

@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    # One cache for all runs of this script, not one for each.
    os.environ["PEERTILE_CACHE_DIR"] = os.environ["PEERTILE_CHECK_CACHE"]
    peertile.config._current = None
    if config.option.device == "cuda":  # contexts stay, however often a test opens and closes its devices
        kept.extend(pt.open_device(pt.DriverKind.CUDA, k) for k in range(int(os.environ["PEERTILE_CHECK_GPUS"])))
    else:
        also_for_gpus()

def also_for_gpus():
    import peertile.direct as direct
    from peertile.kernel import KernelFunction
    original = KernelFunction.compile_types
    def compile_types(self, types, consts, grid_rank=1, groups=None, compiler=None):
        made = original(self, types, consts, grid_rank, groups, compiler)
        if compiler is None:
            arguments = self.fn, self.name, self.unsafe, types, consts, grid_rank, groups
            try:
                direct.for_arch(os.environ["PEERTILE_CHECK_ARCH"]).compile_function(*arguments)
            except Exception as error:
                print("NOT COMPILED", self.name, type(error).__name__, str(error)[:300], flush=True)
        return made
    KernelFunction.compile_types = compile_types

def pytest_runtest_logreport(report):
    if report.failed:
        text = getattr(getattr(report.longrepr, "reprcrash", None), "message", str(report.longrepr)[-300:])
        print("\\nFAILED", report.nodeid, " ".join(str(text).split())[:330], flush=True)
"""


def run_tests(
    files: list[str], select: str, bound_s: float, *, device: str = "cuda", extra: tuple[str, ...] = ()
) -> Any:
    """The tests of the package on GPUs; or on the cpu, every kernel being compiled for GPUs too: what failed."""
    gpus = 0 if device == "cpu" else int(pt.current_device().driver.api.device_count())  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "peers_on_gpu.py").write_text(PLUGIN)
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", ""), str(ROOT / "src"), str(ROOT)]),
            "PEERTILE_CHECK_GPUS": str(gpus), "PEERTILE_CHECK_ARCH": os.environ.get("PEERTILE_CHECK_ARCH", "sm_90"),
            "PEERTILE_CHECK_CACHE": os.environ.get("PEERTILE_CACHE_DIR", tempfile.gettempdir() + "/peertile-check"),
            "PEERTILE_DEVICE": device,
        }  # fmt: skip
        command = [
            sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider",
            "-p", "peers_on_gpu", "-W", "ignore", "--device", device, "--timeout", "60", "-k", select,
            *extra, *files,
        ]  # fmt: skip
        process = subprocess.Popen(command, cwd=ROOT, env=env)
        try:
            process.wait(bound_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return "no end within the bound"
    return process.returncode


PEER_TESTS = [f"tests/peer/test_{name}.py" for name in ("peer", "transfers", "links", "pointers")]


def step_warm() -> None:
    """Compiles what the tests need, on the cores of the host: runs beside other steps."""
    files = [*PEER_TESTS, "tests/library/test_cuda_collectives.py"]
    run_tests(files, "not processes and not killed", 80, device="cpu", extra=("-n", "20"))


def step_tests() -> None:
    parts(
        {
            "threads": lambda: run_tests(PEER_TESTS, "not processes and not killed", 100, extra=("-s",)),
            "processes": lambda: run_tests(PEER_TESTS, "processes or killed", 60, extra=("-s",)),
        }
    )


def step_plans() -> None:
    """The collectives' kernels on one, two and four ranks."""
    files = ["tests/library/test_cuda_collectives.py"]
    parts({"collectives": lambda: run_tests(files, "test", 100, extra=("-s",))})


def step_info() -> None:
    parts({"info": lambda: __import__("peertile.cli.info").cli.info.collect()["probes"]})


STEPS: dict[str, tuple[Callable[[], None], float]] = {
    "heaps": (step_heaps, 60), "examples": (step_examples, 90), "faults": (step_faults, 90), "tests": (step_tests, 175),
    "plans": (step_plans, 105), "info": (step_info, 20), "warm": (step_warm, 85),
    "traced": (step_traced, 30), "luck": (step_luck, 120),
}  # fmt: skip


def main(names: list[str]) -> None:
    for name in names or list(STEPS):
        begin = time.monotonic()
        print(f"== {name}", flush=True)
        process = subprocess.Popen([sys.executable, "-X", "faulthandler", __file__, "--step", name])
        try:
            process.wait(STEPS[name][1])
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            print(f"no end within {STEPS[name][1]} s", flush=True)
        print(f"== {name}: {time.monotonic() - begin:.1f} s, exit {process.returncode}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--step"]:
        STEPS[sys.argv[2]][0]()
        sys.stdout.flush()
        os._exit(0)
    else:
        main(sys.argv[1:])
