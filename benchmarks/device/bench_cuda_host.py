"""What a launch costs the host on a GPU, stage by stage, beside what the bare driver and torch take in the same run.

`PYTHONPATH=src python3 benchmarks/device/bench_cuda_host.py [--stand-in] [PART ...]`

Parts: calibrate, right, bare, torch, launch, stages, graph, matmul, compile, eager. `eager` starts two ranks with a GPU
each.
Prints one line of JSON for each part; microseconds, medians of rounds, with the fastest round beside. With `--stand-in`
everything but `torch` and `eager` runs without a GPU, over a driver whose launches do nothing: what is left is ours.
`--feed`, `--no-feed`: whatever the host has, let the device's feeder make launches that come closely, or not.
Every wait is bounded. Changes no setting of a GPU.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(Path(__file__).parent)]
STAND_IN = "--stand-in" in sys.argv
FLAGS = [a for a in sys.argv if a.startswith("--")]
if not STAND_IN:
    os.environ.setdefault("PEERTILE_DEVICE", "cuda")
os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}

import numpy as np  # noqa: E402
from turns import Json, guarded, say  # noqa: E402

import peertile as pt  # noqa: E402
import peertile.language as T  # noqa: E402
from peertile.backends.cpu import jit  # noqa: E402
from peertile.cli.bench_kernels import vector_add  # noqa: E402
from peertile.library.products import matmul  # noqa: E402
from peertile.runtime.context import ExecutionContext  # noqa: E402
from peertile.runtime.device import Device  # noqa: E402
from peertile.runtime.drivers import cuda_feeder  # noqa: E402
from peertile.runtime.drivers.cuda import CudaDriver  # noqa: E402
from peertile.runtime.drivers.cuda_native import Lane, Plan, native  # noqa: E402

if "--feed" in FLAGS or "--no-feed" in FLAGS:
    cuda_feeder.LEAST_CORES = 1 if "--feed" in FLAGS else 1 << 30  # type: ignore[misc]

ROUNDS = 15
KIB = 1 << 10


def us(call: Callable[[], Any], count: int = 100, end: Callable[[], Any] | None = None, per: int = 1) -> list[float]:
    """[median, fastest] microseconds of a call, over rounds of `count`; `end` is not timed."""
    times = []
    clock = time.perf_counter_ns
    for _ in range(ROUNDS + 2):
        begin = clock()
        for _ in range(count):
            call()
        times.append((clock() - begin) / count / per / 1e3)
        if end is not None:
            end()
    return [round(statistics.median(times[2:]), 3), round(min(times[2:]), 3)]


def ready_of(op: Any) -> tuple[Any, bytes]:
    """What the driver is given for a launch."""
    ready = op._prepare()
    return ready.prepared, ready.args


# ---------------------------------------------------------------- the stand-in

INSTANT = """
@mine = global [2 x i64] zeroinitializer
define i32 @instant_launch(i64 %f, i32 %a, i32 %b, i32 %c, i32 %d, i32 %e, i32 %g, i32 %h, i64 %s, i64 %p, i64 %x) {
  ret i32 0
}
define i32 @instant_together(i64 %f, i32 %a, i32 %b, i32 %c, i32 %d, i32 %e, i32 %g, i32 %h, i64 %s, i64 %p) {
  ret i32 0
}
define i32 @instant_ex(i64 %c, i64 %f, i64 %p, i64 %x) {
  ret i32 0
}
define i32 @instant_write(i64 %s, ptr %at, i64 %value, i32 %flags) {
  store atomic i64 %value, ptr %at release, align 8
  ret i32 0
}
define i32 @instant_current(ptr %found) {
  store i64 100, ptr %found
  ret i32 0
}
define i32 @instant_push(i64 %c) {
  ret i32 0
}
define i32 @instant_pop(ptr %c) {
  ret i32 0
}
"""


def stand_in() -> Any:
    """A driver whose native launches do nothing and whose markers arrive at once."""
    from tests.runtime.fake_cuda import FakeCuda

    names = ("launch", "together", "write", "current", "push", "pop", "ex")
    symbols = jit.load_object(jit.compile_text(INSTANT, level=2), [f"instant_{n}" for n in names])

    class Instant(FakeCuda):  # type: ignore[misc]
        def entries(self) -> tuple[int, ...]:
            return tuple(symbols[f"instant_{n}"] for n in names)

        def current_context(self) -> int:
            return 100

        def write_value(self, stream: Any, address: int, value: int, width: int) -> None:
            (ctypes.c_uint64 if width == 64 else ctypes.c_uint32).from_address(address).value = value

        def launch(self, *args: Any) -> None:
            return None

    return Device(CudaDriver(api=Instant(multiprocessors=132)).open())


class Setup:
    """One small kernel over 256 elements, which does nothing worth waiting for."""

    def __init__(self) -> None:
        if STAND_IN:
            pt.use_device(stand_in())
        self.device = pt.current_device()
        self.stream = self.device.stream("bench")
        self.x, self.z = pt.zeros(256, pt.f32), pt.zeros(256, pt.f32)
        self.part = self.z.partition(256)
        self.op().sync_on(self.stream)
        self.op().sync_on(self.stream)

    def op(self) -> Any:
        return vector_add(self.part, self.x, self.x)


# ---------------------------------------------------------------- parts


class _Slots:
    __slots__ = ("a", "b", "c", "d", "e", "f")

    def __init__(self, a: int) -> None:
        self.a = a
        self.b = self.c = self.d = self.e = None
        self.f = 0


def calibrate(s: Setup) -> Json:
    """How fast this host runs Python, to compare figures of two hosts by; empty loops included."""
    lock, table, key = threading.RLock(), {}, object()
    symbols = jit.load_object(jit.compile_text(INSTANT, level=2), ["instant_ex"])
    q = ctypes.c_int64
    free = ctypes.CFUNCTYPE(ctypes.c_int32, q, q, q, q)(symbols["instant_ex"])
    held = ctypes.PYFUNCTYPE(ctypes.c_int32, q, q, q, q)(symbols["instant_ex"])

    def locked() -> None:
        with lock:
            pass

    def stored() -> None:
        table[key] = key
        del table[key]

    return {
        "python": sys.version.split()[0],
        "function": us(lambda: None, 2000),
        "six_slots": us(lambda: _Slots(1), 2000),
        "rlock": us(locked, 2000),
        "dict_put_del": us(stored, 2000),
        "perf_counter_ns": us(time.perf_counter_ns, 2000),
        "get_ident": us(threading.get_ident, 2000),
        "ctypes_4_without_gil": us(lambda: free(1, 2, 3, 4), 2000),
        "ctypes_4_with_gil": us(lambda: held(1, 2, 3, 4), 2000),
        "gc_objects": len(gc.get_objects()),
        "gc_full_us": us(gc.collect, 1)[0],
        "switch_interval": sys.getswitchinterval(),
    }


LOOPS = """
declare i32 @clock_gettime(i32, ptr)
define i64 @loop_launch(i64 %fn, i64 %kernel, i64 %stream, i64 %params, i64 %extra, i64 %n) {
entry:
  %f = inttoptr i64 %fn to ptr
  br label %next
next:
  %k = phi i64 [0, %entry], [%k1, %next]
  %bad0 = phi i64 [0, %entry], [%bad, %next]
  %rc = call i32 %f(i64 %kernel, i32 1, i32 1, i32 1, i32 32, i32 1, i32 1, i32 0, i64 %stream, i64 %params, i64 %extra)
  %rc64 = zext i32 %rc to i64
  %bad = or i64 %bad0, %rc64
  %k1 = add i64 %k, 1
  %go = icmp slt i64 %k1, %n
  br i1 %go, label %next, label %done
done:
  ret i64 %bad
}
define i64 @loop_mixed(i64 %fn, i64 %kernel, i64 %stream, i64 %params, i64 %other, i64 %a, i64 %b, i64 %c, i64 %d,
                       i64 %n) {
entry:
  %f = inttoptr i64 %fn to ptr
  %g = inttoptr i64 %other to ptr
  br label %next
next:
  %k = phi i64 [0, %entry], [%k1, %next]
  %bad0 = phi i64 [0, %entry], [%bad, %next]
  %rc = call i32 %f(i64 %kernel, i32 1, i32 1, i32 1, i32 32, i32 1, i32 1, i32 0, i64 %stream, i64 %params, i64 0)
  %rc2 = call i32 %g(i64 %a, i64 %b, i64 %c, i64 %d)
  %or = or i32 %rc, %rc2
  %rc64 = zext i32 %or to i64
  %bad = or i64 %bad0, %rc64
  %k1 = add i64 %k, 1
  %go = icmp slt i64 %k1, %n
  br i1 %go, label %next, label %done
done:
  ret i64 %bad
}
define i64 @loop_call(i64 %fn, i64 %a, i64 %b, i64 %c, i64 %d, i64 %n) {
entry:
  %f = inttoptr i64 %fn to ptr
  br label %next
next:
  %k = phi i64 [0, %entry], [%k1, %next]
  %bad0 = phi i64 [0, %entry], [%bad, %next]
  %rc = call i32 %f(i64 %a, i64 %b, i64 %c, i64 %d)
  %rc64 = zext i32 %rc to i64
  %bad = or i64 %bad0, %rc64
  %k1 = add i64 %k, 1
  %go = icmp slt i64 %k1, %n
  br i1 %go, label %next, label %done
done:
  ret i64 %bad
}
"""


def bare(s: Setup) -> Json:
    """The NVIDIA driver alone, called in a compiled loop, through ctypes and through the bindings."""
    driver: Any = s.device.driver
    stream = s.stream.handle
    prepared, args = ready_of(s.op())
    lane, api = stream.lane, driver.api
    launch, together, write, current, *_ = api.entries()
    ex = api.entries()[6]
    i = ctypes.c_int64
    loops = jit.load_object(jit.compile_text(LOOPS, level=2), ["loop_launch", "loop_call", "loop_mixed"])
    mixed = ctypes.CFUNCTYPE(i, *[i] * 10)(loops["loop_mixed"])
    launches = ctypes.CFUNCTYPE(i, *[i] * 6)(loops["loop_launch"])
    calls = ctypes.CFUNCTYPE(i, *[i] * 6)(loops["loop_call"])
    s.stream.sync()
    # The parameters that the last launch left: the same launch again.
    kernel, cu, params = prepared.words[Plan.FUNCTION], lane[Lane.STREAM], lane[Lane.POINTERS]
    n = 100
    size = ctypes.c_uint64(len(args) + 80)
    extra = (ctypes.c_uint64 * 5)(1, lane[Lane.PARAMS], 2, ctypes.addressof(size), 0)
    nothing = int(driver.kernels["peertile_write"])
    word = driver.pinned.take(64)
    three = (ctypes.c_uint64 * 3)(word, 1, 64)
    three_at = (ctypes.c_uint64 * 3)(*[ctypes.addressof(three) + 8 * k for k in range(3)])
    found = driver.pinned.take(64)
    config = stream.config
    config.words[0], config.words[3], config.words[6] = 1, 32, 0
    tpb = prepared.words[Plan.THREADS]
    direct = ctypes.CFUNCTYPE(ctypes.c_uint32, i, *[ctypes.c_uint32] * 7, i, i, i)(launch)
    end = s.stream.sync
    made: Json = {}

    def loop(name: str, call: Callable[[], int]) -> None:
        codes: set[int] = set()
        made[name] = us(lambda: codes.add(call()), 1, end, n)
        if codes != {0}:
            made[f"{name}_codes"] = sorted(codes)

    def whole(call: Callable[[], int]) -> list[float]:
        """Host's and whole microseconds of one of n."""
        host, total = [], []
        for _ in range(ROUNDS):
            begin = time.perf_counter_ns()
            codes.add(call())
            host.append((time.perf_counter_ns() - begin) / n / 1e3)
            end()
            total.append((time.perf_counter_ns() - begin) / n / 1e3)
        return [round(statistics.median(host), 3), round(statistics.median(total), 3)]

    codes: set[int] = set()
    chain = [(prepared, args)] * n
    context = driver.context
    if not STAND_IN:
        api.push_context(context)
    try:
        loop("launch_19_params", lambda: launches(launch, kernel, cu, params, 0, n))
        loop("launch_as_a_buffer", lambda: launches(launch, kernel, cu, 0, ctypes.addressof(extra), n))
        loop("launch_3_params", lambda: launches(launch, nothing, cu, ctypes.addressof(three_at), 0, n))
        loop("launch_ex_overlap", lambda: calls(ex, config.address, kernel, params, 0, n))
        config.words[12] = 0
        loop("launch_ex_plain", lambda: calls(ex, config.address, kernel, params, 0, n))
        config.words[12] = 1
        attribute = (ctypes.c_uint32 * 18).from_address((ctypes.c_uint64 * 7).from_address(config.address)[5])
        before = attribute[0]
        attribute[0] = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        loop("launch_ex_cooperative", lambda: calls(ex, config.address, kernel, params, 0, n))
        attribute[0] = before
        loop("launch_ex_overlap_again", lambda: calls(ex, config.address, kernel, params, 0, n))
        loop("launch_cooperative", lambda: launches(together, kernel, cu, params, 0, n))
        # What a marker before each launch costs, the stream's end included: the GPU's part shows there.
        for name, flags in (("write", 0), ("write_without_barrier", 1)):
            made[f"launch_and_{name}"] = whole(
                lambda f=flags: mixed(launch, kernel, cu, params, write, cu, word, 1, f, n)
            )
        made["launch_alone_whole"] = whole(lambda: launches(launch, kernel, cu, params, 0, n))
        made["launch_ex_overlap_whole"] = whole(lambda: calls(ex, config.address, kernel, params, 0, n))
        loop("write_value", lambda: calls(write, cu, word, 1, 0, n))
        loop("current_context", lambda: calls(current, found, 0, 0, 0, n))
        made["ctypes"] = us(lambda: direct(kernel, 1, 1, 1, tpb, 1, 1, 0, cu, params, 0), 100, end)
        if not STAND_IN:
            d = importlib.import_module("cuda.bindings.driver")
            f, st = d.CUfunction(kernel), stream.cu
            made["bindings"] = us(lambda: d.cuLaunchKernel(f, 1, 1, 1, tpb, 1, 1, 0, st, params, 0), 100, end)
            events = [d.cuEventCreate(2)[1] for _ in range(2)]
            record = ctypes.CDLL("libcuda.so.1").cuEventRecord
            at = ctypes.cast(record, ctypes.c_void_p).value
            loop("event_record", lambda: calls(at, int(events[0]), cu, 0, 0, n))
            event = int(events[0])
            made["launch_and_event"] = whole(lambda: mixed(launch, kernel, cu, params, at, event, cu, 0, 0, n))
        # Which part of a launch is waiting for the queue: a burst of a few, and one after a pause.
        for k in (1, 4, 16):
            made[f"launch_burst_of_{k}"] = us(lambda k=k: launches(launch, kernel, cu, params, 0, k), 1, end, k)
    finally:
        if not STAND_IN:
            api.pop_context()
    made["codes"] = sorted(codes)
    made["native_chain"] = us(lambda: driver.launch_many(stream, chain), 1, end, n)
    return made


def theirs(s: Setup) -> Json:
    """torch and Triton on the same small work."""
    torch: Any = importlib.import_module("torch")
    x, z = torch.zeros(256, device="cuda"), torch.zeros(256, device="cuda")
    made: Json = {"add_out": us(lambda: torch.add(x, x, out=z), 100, torch.cuda.synchronize)}

    def whole() -> None:
        torch.add(x, x, out=z)
        torch.cuda.synchronize()

    made["add_and_synchronize"] = us(whole, 100)
    event = torch.cuda.Event()

    def with_event() -> None:
        torch.add(x, x, out=z)
        event.record()
        event.synchronize()

    made["add_and_event"] = us(with_event, 100)
    return made


def launch(s: Setup) -> Json:
    """The figures that count: host time of a small launch, pipelined, in a chain, to its end, awaited."""
    stream = s.stream

    def chain(count: int) -> Any:
        whole: Any = s.op()
        for _ in range(count - 1):
            whole = whole.then(lambda *_: s.op())
        return whole

    async def awaited() -> list[float]:
        times = []
        for _ in range(400):
            begin = time.perf_counter_ns()
            await s.op()
            times.append((time.perf_counter_ns() - begin) / 1e3)
        return [round(statistics.median(times), 3), round(min(times), 3)]

    def zipped(count: int) -> Any:
        return pt.zip(*[s.op() for _ in range(count)])

    def prebuilt(make: Callable[[int], Any], count: int) -> list[float]:
        """Submission alone of ops of `count` launches that were built before."""
        times = []
        for _ in range(ROUNDS + 2):
            ops = [make(count) for _ in range(100 // count)]
            begin = time.perf_counter_ns()
            for op in ops:
                op.submit(stream)
            times.append((time.perf_counter_ns() - begin) / 1e3 / (100 // count) / count)
            stream.sync()
        return [round(statistics.median(times[2:]), 3), round(min(times[2:]), 3)]

    return {
        "build": us(s.op, 200),
        "submit": us(lambda: s.op().submit(stream), 100, stream.sync),
        "submit_prebuilt": prebuilt(lambda _: s.op(), 1),
        "chain_of_50": us(lambda: chain(50).submit(stream), 2, stream.sync, 50),
        "chain_prebuilt": prebuilt(chain, 50),
        "zip_of_50": us(lambda: zipped(50).submit(stream), 2, stream.sync, 50),
        "zip_prebuilt": prebuilt(zipped, 50),
        "sync_on": us(lambda: s.op().sync_on(stream), 200),
        "sync": us(lambda: s.op().sync(), 200),
        "await": asyncio.run(awaited()),
    }


@pt.kernel
def one_more(z: T.Exclusive) -> None:
    z.store(z.load() + 1)


def right(s: Setup) -> Json:
    """Every launch once and in order: counts of thousands, alone, in chains, in zips, beside copies, on two streams."""
    made: Json = {}
    z, y = pt.zeros(256, pt.i32), pt.zeros(256, pt.i32)
    part, other = z.partition(256), s.device.stream("other")
    total = 0

    def check(name: str, count: int) -> None:
        nonlocal total
        total += count
        got = set(z.numpy().tolist())
        assert STAND_IN or got == {total}, f"{name}: expected {total}, got {sorted(got)[:4]}"
        made[name] = total

    for _ in range(5000):
        one_more(part).submit(s.stream)
    s.stream.sync(20)
    check("submitted", 5000)
    for _ in range(40):
        op: Any = one_more(part)
        for _ in range(49):
            op = op.then(lambda *_: one_more(part))
        op.submit(s.stream)
        pt.zip(*[one_more(part) for _ in range(50)]).submit(s.stream)
    s.stream.sync(20)
    check("chains and zips", 4000)
    for n in range(200):
        for _ in range(n % 9):
            one_more(part).submit(s.stream)
        if n % 3 == 0:
            one_more(part).sync_on(s.stream)
        copied = pt.op.copy(z, to=y).submit(s.stream)
        one_more(part).submit(s.stream)
        copied.wait(20)
        total += n % 9 + (n % 3 == 0)
        assert STAND_IN or int(y.numpy()[7]) == total, f"copy {n}: expected {total}, got {int(y.numpy()[7])}"
        total += 1
    s.stream.sync(20)
    check("beside copies", 0)
    threads = [threading.Thread(target=lambda q=q: [vector_add(s.part, s.x, s.x).submit(q) for _ in range(500)])
               for q in (s.stream,)]  # fmt: skip
    w = pt.zeros(256, pt.i32)
    mine = w.partition(256)
    threads.append(threading.Thread(target=lambda: [one_more(mine).submit(other) for _ in range(3000)]))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    other.sync(20)
    s.stream.sync(20)
    assert STAND_IN or set(w.numpy().tolist()) == {3000}, "two threads"
    lane = s.stream.handle.lane  # type: ignore[attr-defined]
    made["posted to the feeder"] = lane[Lane.HEAD]
    return made


def stages(s: Setup) -> Json:
    """The parts of a submission, each alone."""
    driver: Any = s.device.driver
    stream = s.stream
    op = s.op()
    bound = op.bound
    prepared, args = ready_of(op)
    spec = op.compiled()
    leases = s.device.leases
    handle = stream.handle
    launch_native = native()

    def lease() -> None:
        leases.release((leases.acquire("vector_add", stream, None, bound.uses),))

    def admitted() -> None:
        context = ExecutionContext("vector_add", stream, on_caller=False)
        stream.admit(context)
        context.seal()
        with stream.lock:
            stream.inflight.clear()

    made: Json = {
        "bind": us(lambda: vector_add.bind((s.part, s.x, s.x), {}, None), 500),
        "op": us(s.op, 500),
        "prepare_again": us(op._prepare, 500),
        "context": us(lambda: ExecutionContext("vector_add", stream, on_caller=False), 500),
        "context_admitted": us(admitted, 500),
        "lease": us(lease, 500),
        "captures": us(spec.captures.is_current, 500),
    }
    stream.sync()
    lane = handle.lane_address
    made["driver_launch_prepared"] = us(lambda: driver.launch_prepared(handle, prepared, args), 100, stream.sync)
    made["driver_run_prepared"] = us(lambda: driver.run_prepared(handle, prepared, args), 100)
    made["driver_query_done"] = us(lambda: driver.query(driver.last_ticket(handle)), 500)
    made["spin_of_0"] = us(lambda: launch_native.spin(lane, 0, 0), 500)
    return made


def products(s: Setup) -> Json:
    """Skinny products: host time of the public call beside what the GPU takes."""
    made: Json = {}
    for m in (16, 64, 256):
        n = 8192 if not STAND_IN else 256
        a, b, c = pt.zeros((m, n), pt.bf16), pt.zeros((n, n), pt.bf16), pt.zeros((m, n), pt.bf16)
        matmul(a, b, c).sync_on(s.stream)
        matmul(a, b, c).sync_on(s.stream)
        made[f"build {m}"] = us(lambda a=a, b=b, c=c: matmul(a, b, c), 100)
        made[f"host {m}"] = us(lambda a=a, b=b, c=c: matmul(a, b, c).submit(s.stream), 20, s.stream.sync)
        begin = time.perf_counter_ns()
        for _ in range(200):
            matmul(a, b, c).submit(s.stream)
        s.stream.sync()
        made[f"pipelined {m}"] = round((time.perf_counter_ns() - begin) / 200e3, 2)
    return made


def compiling(s: Setup) -> Json:
    """The GEMM from nothing, and from the cache on disk, each in a process of its own."""
    made: Json = {}
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"PEERTILE_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
        arguments = [sys.executable, __file__, "compile-one", *(["--stand-in"] if STAND_IN else [])]
        for turn in ("first", "cached", "cached_again"):
            done = subprocess.run(arguments, env=env, capture_output=True, text=True, timeout=60, check=False)
            lines = done.stdout.strip().splitlines()
            made[turn] = json.loads(lines[-1]) if done.returncode == 0 and lines else done.stderr[-600:]
    return made


def compile_one() -> None:
    if STAND_IN:
        pt.use_device(stand_in())
    device = pt.current_device()
    a, c = pt.tensor_spec((8192, 8192), pt.bf16), pt.tensor_spec((8192, 8192), pt.bf16)
    gemm: Any = importlib.import_module("peertile.library.gemm")
    part = c.partition((128, 256)).persistent(swizzle=8)
    small = pt.tensor_spec((256,), pt.f32)
    begin = time.perf_counter()
    op = gemm.gemm_persistent(part, a, a, BK=64, STAGES=3)
    spec = op.compiled()
    compiled = time.perf_counter()
    loaded: Any = importlib.import_module("peertile.launch").loaded
    loaded(spec, device)
    end = time.perf_counter()
    vector_add(small.partition(256), small, small).compiled()
    second = time.perf_counter()
    gemm.gemm_persistent(part, a, a, BK=32, STAGES=3).compiled()
    third = time.perf_counter()
    say(
        gemm_ms=round((compiled - begin) * 1e3, 2), load_ms=round((end - compiled) * 1e3, 2),
        another_kernel_ms=round((second - end) * 1e3, 2), another_gemm_ms=round((third - second) * 1e3, 2),
    )  # fmt: skip


def graphs(s: Setup) -> Json:
    """Replays of a graph of one small kernel: what a replay costs the host."""
    with pt.capture(s.stream, "one") as scope:
        scope.record(s.op())
    one = scope.graph
    one.launch().sync_on(s.stream)
    return {
        "submit": us(lambda: one.launch().submit(s.stream), 100, s.stream.sync),
        "sync_on": us(lambda: one.launch().sync_on(s.stream), 100),
    }


# ---------------------------------------------------------------- two ranks


def eager_rank(group: pt.Group) -> None:
    from peertile.library.collectives import Collectives

    device = pt.current_device()
    stream = device.stream("bench")
    count = 32 * KIB
    x, out = pt.zeros((count,), pt.bf16), pt.empty((count,), pt.bf16)
    made: Json = {}
    with Collectives(group) as comm:
        comm.all_reduce(x, out).sync_on(stream)
        comm.all_reduce(x, out).sync_on(stream)
        # Right sums first: each call doubles, in place, and every number of calls has its own sum.
        y = pt.full((count,), 1.0, pt.bf16)
        for turn in range(12):
            y.copy_from(np.full(count, 1.0, np.float32))
            futures = [comm.all_reduce(y, y).submit(stream) for _ in range(turn * 10 % 97 + 1)]
            futures[len(futures) // 2].wait(20)
            for future in futures:
                future.wait(20)
            want = float(group.size) ** len(futures)
            assert set(y.numpy().astype(np.float64).tolist()) == {want}, f"{turn}: expected {want}"
        made["right"] = True

        def timed(name: str, body: Callable[[], Any], calls: int) -> None:
            whole, host = [], []
            for _ in range(9):
                group.barrier("turn")
                begin = time.perf_counter_ns()
                held = body()
                host.append((time.perf_counter_ns() - begin) / calls / 1e3)
                stream.sync(20)
                whole.append((time.perf_counter_ns() - begin) / calls / 1e3)
                del held
            made[name] = {"host": round(statistics.median(host), 2), "whole": round(statistics.median(whole), 2)}

        timed("submit", lambda: [comm.all_reduce(x, out).submit(stream) for _ in range(200)], 200)
        made["build"] = us(lambda: comm.all_reduce(x, out), 100)
        driver: Any = device.driver
        op: Any = comm.all_reduce(x, out)
        prepared, args = ready_of(op.launches[0])
        plan = {w.name: prepared.words[w] for w in (Plan.PROGRAMS, Plan.THREADS, Plan.WAITS, Plan.COOPERATIVE,
                                                    Plan.OVERLAP, Plan.SCRATCH_BYTES, Plan.SHARED)}  # fmt: skip
        made["plan"] = plan
        handle = stream.handle
        timed("driver", lambda: [driver.launch_prepared(handle, prepared, args) for _ in range(200)], 200)
        many = [(prepared, args)] * 100
        timed("chain", lambda: driver.launch_many(handle, many), 100)
        # As if it did not have to be resident as a whole, and as if it did not wait: what each rule costs.
        plain = driver.prepare_launch(prepared.module, prepared.grid, prepared.options)
        plain.words[Plan.COOPERATIVE] = 0
        timed("chain_not_cooperative", lambda: driver.launch_many(handle, [(plain, args)] * 100), 100)
        plain.words[Plan.WAITS] = 0
        timed("chain_without_markers", lambda: driver.launch_many(handle, [(plain, args)] * 100), 100)
        alone = driver.prepare_launch(prepared.module, prepared.grid, prepared.options)
        alone.words[Plan.WAITS] = 0
        timed("chain_cooperative_without_markers", lambda: driver.launch_many(handle, [(alone, args)] * 100), 100)
        with pt.capture(stream, "graph") as scope:
            for _ in range(50):
                scope.record(comm.all_reduce(x, out))
        graph = scope.graph
        graph.launch().sync_on(stream)
        timed("graph", lambda: [graph.launch().submit(stream) for _ in range(4)], 200)
        with pt.capture(stream, "graph of one") as scope:
            scope.record(comm.all_reduce(x, out))
        one = scope.graph
        one.launch().sync_on(stream)
        timed("graph_of_one", lambda: [one.launch().submit(stream) for _ in range(200)], 200)
    if group.rank == 0:
        say(part="eager", found=made)
    group.barrier("end")
    group.close()
    sys.stdout.flush()
    os._exit(0)


PARTS: dict[str, Callable[[Setup], Json]] = {
    "calibrate": calibrate, "bare": bare, "launch": launch, "stages": stages, "matmul": products,
    "torch": theirs, "compile": compiling, "graph": graphs, "right": right,
}  # fmt: skip


def main(arguments: list[str]) -> None:
    names = [a for a in arguments if not a.startswith("--")]
    if names == ["compile-one"]:
        compile_one()
        return
    if names == ["eager-ranks"]:
        pt.run(eager_rank, ranks=2)
        return
    names = names or [
        "calibrate", "right", "bare", "launch", "stages", "graph", "matmul", "compile", "torch", "calibrate", "launch",
        "eager",
    ]  # fmt: skip
    begin = time.monotonic()
    setup = Setup()
    for name in names:
        if name == "eager":
            if STAND_IN:
                continue
            env = os.environ | {"PEERTILE_DEVICE": "cuda"}
            try:
                done = subprocess.run([sys.executable, __file__, "eager-ranks", *FLAGS], env=env, text=True,
                                      capture_output=True, timeout=45, check=False)  # fmt: skip
                print(done.stdout, end="", flush=True)
                if done.returncode:
                    say(part="eager", error=done.stderr[-1500:])
            except subprocess.TimeoutExpired as error:
                say(part="eager", error=f"took over 45 s; {str(error.stderr)[-800:]}")
            continue
        if name == "torch" and STAND_IN:
            continue
        say(part=name, found=guarded(lambda name=name: PARTS[name](setup)), s=round(time.monotonic() - begin, 1))
    sys.stdout.flush()
    os._exit(0)  # not through the finalisers of two libraries on one GPU


if __name__ == "__main__":
    main(sys.argv[1:])
