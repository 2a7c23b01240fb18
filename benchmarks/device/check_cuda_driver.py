"""Check the cuda driver on a machine with GPUs: `PYTHONPATH=src python3 benchmarks/device/check_cuda_driver.py`.

Runs the conformance suite, times the driver's paths and tries memory between processes and devices. Every step is a
process of its own with a bound, so that one that fails or hangs hides no other. Prints one JSON object; under 2
minutes. Needs cuda-bindings and nvcc. No multicast object is made and no setting of a GPU is changed.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import platform
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from peertile.memory_model import Cmp  # noqa: E402
from peertile.runtime.driver import LaunchOptions, ShareHandle, ShareKind, Status  # noqa: E402
from peertile.runtime.drivers.cuda import CudaDevice, CudaDriver  # noqa: E402
from peertile.testing.cuda_kernels import compile_cubin, extra_kernel, suite_kernels  # noqa: E402
from peertile.testing.driver_suite import args, options, read_words, words  # noqa: E402

TOTAL_S = 112.0
CUBIN = "PEERTILE_CHECK_CUBIN"
Json = dict[str, Any]


def cubin() -> bytes:
    return Path(os.environ[CUBIN]).read_bytes()


def open_device(ordinal: int = 0) -> CudaDevice:
    device = CudaDriver().open(ordinal)
    assert isinstance(device, CudaDevice)
    return device


def attempt(function: Callable[[], Any]) -> Any:
    """What a part of a step gives, or what it raised."""
    try:
        return function()
    except BaseException as error:
        last = [line.strip() for line in traceback.format_exc().splitlines() if line.startswith("  File ")]
        return {"error": f"{type(error).__name__}: {str(error)[:600]}", "at": last[:3] + last[-2:]}


def per_call_us(function: Callable[[], Any], count: int, rounds: int = 7) -> Json:
    times = []
    for _ in range(rounds):
        begin = time.perf_counter_ns()
        for _ in range(count):
            function()
        times.append((time.perf_counter_ns() - begin) / count / 1000)
    return {"median_us": round(statistics.median(times), 3), "best_us": round(min(times), 3)}


# ---------------------------------------------------------------- steps


def step_info() -> Json:
    from peertile.runtime.drivers.cuda_probe import fabric_refusal

    driver = CudaDriver()
    api = driver._api
    found: Json = {"python": platform.python_version(), "cuda": api.driver_version(), "devices": api.device_count()}
    for name in ("cuda-bindings", "cuda-core", "torch", "triton", "numpy"):
        found[name] = attempt(partial(importlib.metadata.version, name))
    begin = time.perf_counter()
    device = open_device()
    found["open_s"] = round(time.perf_counter() - begin, 3)
    found["capabilities"] = {k: str(v) for k, v in device.capabilities._asdict().items()}
    found["attributes"] = {
        name: api.attribute(device.handle, name)
        for name in (
            "HOST_NATIVE_ATOMIC_SUPPORTED", "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM", "COOPERATIVE_LAUNCH",
            "CAN_USE_64_BIT_STREAM_MEM_OPS", "MULTICAST_SUPPORTED", "HANDLE_TYPE_FABRIC_SUPPORTED",
            "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", "PAGEABLE_MEMORY_ACCESS",
        )
    }  # fmt: skip
    with_context = attempt(lambda: api.set_context(device.context))
    found["fabric"] = with_context or attempt(lambda: fabric_refusal(api, device.handle)) or "works"
    found["granularity"] = attempt(lambda: api.granularity(device.handle, ShareKind.FD))
    device.close()
    return found


def step_suite(first: int) -> None:
    """One line of JSON for each test, from test number `first` on."""
    from tests.runtime.cuda_suite import CudaSuite

    names = sorted(n for n in dir(CudaSuite) if n.startswith("test_"))
    payload = cubin()
    kernels = suite_kernels(payload)
    available = {"device": open_device(), "kernels": kernels, "extra": lambda entry: extra_kernel(payload, entry)}
    for k, name in enumerate(names[first:], first):
        print(json.dumps({"begin": k, "name": name, "of": len(names)}), flush=True)
        test = getattr(CudaSuite(), name)
        wanted = test.__code__.co_varnames[1 : test.__code__.co_argcount]
        begin = time.perf_counter()
        result = attempt(partial(test, **{w: available[w] for w in wanted}))
        print(json.dumps({"end": k, "result": result, "s": round(time.perf_counter() - begin, 3)}), flush=True)
    device = available["device"]
    assert isinstance(device, CudaDevice)
    print(json.dumps({"closed": attempt(device.close)}), flush=True)


def step_times() -> Json:
    device = open_device()
    s = device.create_stream()
    payload = cubin()
    nothing = device.load_module(extra_kernel(payload, "extra_nothing"))
    add = device.load_module(suite_kernels(payload).add)
    x = words(device, s, [1])
    block = args(x, x, x)
    o = LaunchOptions("t", 10**9)
    found: Json = {}

    def drained(function: Callable[[], Any], count: int = 200) -> Json:
        def batch() -> None:
            for _ in range(count):
                function()

        device.wait(device.last_ticket(s))
        times = []
        for _ in range(9):
            begin = time.perf_counter_ns()
            batch()
            times.append((time.perf_counter_ns() - begin) / count / 1000)
            device.wait(device.last_ticket(s))
        return {"host_median_us": round(statistics.median(times), 3), "best_us": round(min(times), 3)}

    found["launch_enqueue"] = drained(lambda: device.launch(s, nothing, (1, 1, 1), b"", o))
    found["launch_enqueue_3_slots"] = drained(lambda: device.launch(s, add, (1, 1, 1), block, o))
    found["launch_sync"] = per_call_us(lambda: device.launch_sync(s, nothing, (1, 1, 1), b"", o), 500)
    found["fill"] = drained(lambda: device.fill(s, x, 0, 8, 1), 100)
    found["allocate_free_64KiB"] = per_call_us(lambda: device.free(device.allocate(1 << 16)), 500)
    found["current_context"] = per_call_us(lambda: device.api.current_context(), 2000)
    found["pointer_kind"] = per_call_us(lambda: device.api.pointer_kind(x), 2000)
    d = device.api._d
    own: Any = s
    function = nothing.function  # type: ignore[attr-defined]
    values = (ctypes.c_uint64 * 10)()
    size = ctypes.c_size_t(80)
    extra = (ctypes.c_uint64 * 5)(1, ctypes.addressof(values), 2, ctypes.addressof(size), 0)
    device.api.set_context(device.context)

    def raw_pointers() -> None:
        d.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, own.cu, own.params.address, 0)

    def raw_buffer() -> None:
        result = d.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, own.cu, 0, ctypes.addressof(extra))
        assert result[0] == 0, result

    def mark() -> None:
        d.cuStreamWriteValue64(own.cu, own.word_address + 8, 0, 0)

    own.params.pack(0, 0, 0, device.zero_word, device.zero_word, 0, device.zero_word, 0, 0, 0)
    found["raw_launch_pointers"] = attempt(lambda: drained(raw_pointers))
    found["raw_launch_buffer"] = attempt(lambda: drained(raw_buffer))
    found["raw_write_value"] = attempt(lambda: drained(mark))

    def graph_of(count: int) -> Any:
        device.begin_capture(s)
        for _ in range(count):
            device.launch(s, nothing, (1, 1, 1), b"", o)
        return device.instantiate(device.end_capture(s))

    def graph_times() -> Json:
        graph = graph_of(200)
        device.wait(device.launch_graph(s, graph))
        start, end = device.create_event(), device.create_event()
        device.record_event(s, start)
        for _ in range(20):
            device.launch_graph(s, graph)
        device.wait(device.record_event(s, end))
        one = graph_of(1)
        return {
            "node_us": round(device.elapsed_ns(start, end) / 20 / 200 / 1000, 4),
            "launch_sync_1_node": per_call_us(lambda: device.wait(device.launch_graph(s, one, on_caller=True)), 300),
            "launch_enqueue": drained(lambda: device.launch_graph(s, one), 100),
        }

    found["graph"] = attempt(graph_times)

    def stream_kernel_us() -> float:
        start, end = device.create_event(), device.create_event()
        device.record_event(s, start)
        for _ in range(200):
            device.launch(s, nothing, (1, 1, 1), b"", o)
        device.wait(device.record_event(s, end))
        return round(device.elapsed_ns(start, end) / 200 / 1000, 3)

    found["kernel_in_stream_us"] = attempt(stream_kernel_us)

    def copies() -> Json:
        n = 256 << 20
        a = device.allocate(n)
        host = ctypes.create_string_buffer(n)
        pinned = device.pinned.take(n)
        result: Json = {}
        for name, dst, src in (
            ("in_pageable", a, ctypes.addressof(host)), ("out_pageable", ctypes.addressof(host), a),
            ("in_pinned", a, pinned), ("out_pinned", pinned, a),
        ):  # fmt: skip
            times = []
            for _ in range(3):
                begin = time.perf_counter()
                assert device.wait(device.copy(s, dst, src, n)) is Status.DONE
                times.append(time.perf_counter() - begin)
            result[f"{name}_GBps"] = round(n / min(times) / 1e9, 2)
        small = ctypes.create_string_buffer(8)
        at = ctypes.addressof(small)
        result["in_8_bytes"] = per_call_us(lambda: device.wait(device.copy(s, a, at, 8)), 200)
        result["out_8_bytes"] = per_call_us(lambda: device.wait(device.copy(s, at, a, 8)), 200)
        return result

    found["copies"] = attempt(copies)
    found["callback"] = attempt(lambda: per_call_us(lambda: device.wait(device.callback(s, lambda: None)), 200))

    def signals(w: int) -> Json:
        other = device.create_stream()
        value = [0]

        def once() -> None:
            value[0] += 1
            ticket = device.wait_value(s, w, value[0], 64, Cmp.AT_LEAST, timeout_ns=10**10)
            device.write_value(other, w, value[0], 64)
            assert device.wait(ticket) is Status.DONE

        return per_call_us(once, 100)

    found["wait_and_write_of_a_pool"] = attempt(lambda: signals(words(device, s, [0])))
    found["wait_and_write_of_a_segment"] = attempt(lambda: signals(device.create_segment(64)[1]))
    found["in_pool"] = per_call_us(lambda: device.api.in_pool(x), 2000)
    device.close()
    return found


def step_blocking() -> Json:
    """How long each call takes while a kernel spins that only a later call lets go: none may wait for it (F50)."""
    device = open_device()
    s, late = device.create_stream(), device.create_stream()
    payload = cubin()
    kernels = suite_kernels(payload)
    spin = device.load_module(kernels.await_word)
    add = device.load_module(kernels.add)
    w, out = words(device, late, [0]), words(device, late, [0])
    ticket = device.launch(s, spin, (1, 1, 1), args(w, 1, out), options("spin", timeout_s=6))
    found: Json = {}

    def timed(name: str, function: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        value = attempt(function)
        found[name + "_ms"] = round(1000 * (time.perf_counter() - begin), 3)
        if isinstance(value, dict):
            found[name] = value
        if device.query(ticket) is not Status.PENDING:
            found[name + "_let_it_end"] = True
        return value

    timed("allocate_256MiB", lambda: device.allocate(256 << 20))
    timed("free", lambda: device.free(device.allocate(1 << 20)))
    timed("pinned_32MiB", lambda: device.pinned.take(32 << 20))
    timed("create_stream", device.create_stream)
    fd = timed("create_segment_fd", lambda: device.create_segment(4 << 20, ShareKind.FD))
    timed("export_fd", lambda: device.export_segment(fd[0]))
    timed("free_segment_fd", lambda: device.free_segment(fd[0]))
    timed("create_segment_ipc", lambda: device.create_segment(4 << 20, ShareKind.IPC))
    timed("event", lambda: device.wait(device.record_event(late, device.create_event())))
    timed("callback", lambda: device.wait(device.callback(late, lambda: None)))
    x = words(device, late, [1])
    timed("launch", lambda: device.launch_sync(late, add, (1, 1, 1), args(x, x, x), options("add")))

    def graph() -> Any:
        device.begin_capture(late)
        device.launch(late, add, (1, 1, 1), args(x, x, x), options("add"))
        return device.wait(device.launch_graph(late, device.instantiate(device.end_capture(late)))) and None

    timed("graph", graph)
    device.write_value(late, w, 1, 64)
    found["spin_ended"] = device.wait(ticket, 10).value
    device.close()
    return found


def step_loading() -> Json:
    """Which calls wait for a kernel that spins: each is made beside one that ends by itself after 0.7 s."""
    device = open_device()
    api, d = device.api, device.api._d
    s, late = device.create_stream(), device.create_stream()
    payload = cubin()
    kernels = suite_kernels(payload)
    spin = device.load_module(kernels.await_word)
    _, w = device.create_segment(64)
    out = words(device, late, [0])
    found: Json = {"module_loading": os.environ.get("CUDA_MODULE_LOADING", "default")}
    made: Json = {}

    def get_function() -> None:
        made["function"] = api._ok("get", d.cuModuleGetFunction(made["module"], b"suite_add"))

    def get_library() -> None:
        made["library"] = api._ok("library", d.cuLibraryLoadData(payload, None, None, 0, None, None, 0))

    def get_kernel() -> None:
        made["kernel"] = api._ok("kernel", d.cuLibraryGetKernel(made["library"], b"suite_work"))

    def kernel_function() -> None:
        made["kernel_function"] = api._ok("function", d.cuKernelGetFunction(made["kernel"]))

    calls: dict[str, Callable[[], Any]] = {
        "module_load": lambda: made.update(module=api.load_module(payload)),
        "module_get_function": get_function,
        "func_load": lambda: api._ok("load", d.cuFuncLoad(made["function"])),
        "occupancy": lambda: api.occupancy(made["function"], 32, 0),
        "library_load": get_library, "library_get_kernel": get_kernel, "kernel_get_function": kernel_function,
        "host_alloc_32MiB": lambda: api.allocate_host(32 << 20),
        "mem_alloc_4MiB": lambda: made.update(ipc=api.allocate_ipc(4 << 20)),
        "mem_free": lambda: api.free_ipc(made["ipc"]),
        "module_unload": lambda: api.unload_module(made["module"]),
    }  # fmt: skip
    api.set_context(device.context)
    for name, call in calls.items():
        device.wait(device.fill(late, w, 0, 8, 1))
        ticket = device.launch(s, spin, (1, 1, 1), args(w, 1, out), options("spin", timeout_s=0.7))
        begin = time.perf_counter()
        answer = attempt(call)
        took = 1000 * (time.perf_counter() - begin)
        found[name] = {"ms": round(took, 2), "waited": took > 300}
        if isinstance(answer, dict):
            found[name]["error"] = answer
        device.write_value(late, w, 1, 64)
        device.wait(ticket, 5)
        device.take_fault(s)
    device.close()
    return found


def step_cooperative() -> Json:
    """Two grids that wait, of two streams: do they run at the same time?"""
    device = open_device()
    kernels = suite_kernels(cubin())
    a, b = device.create_stream(), device.create_stream()
    w, first, second = (words(device, a, v) for v in ([0], [0] * 4, [0] * 4))
    spin, barrier = device.load_module(kernels.await_word), device.load_module(kernels.barrier)
    waiting = device.launch(a, spin, (4, 1, 1), args(w, 1, first), options("first", timeout_s=5))
    record = device.launch_sync(b, barrier, (4, 1, 1), args(second), options("second", timeout_s=3))
    device.write_value(b, w, 1, 64)
    found: Json = {"second": str(record), "first": device.wait(waiting, 10).value}
    n = device.max_resident(barrier)
    out = words(device, b, [0] * n)
    _, word = device.create_segment(64)
    held = device.wait_value(a, word, 1, 64, Cmp.EQ, timeout_ns=8 * 10**9)
    record = device.launch_sync(b, barrier, (n, 1, 1), args(out), options("full", timeout_s=3))
    found["full_grid_beside_a_stream_wait"] = str(record)
    device.write_value(b, word, 1, 64)
    found["held"] = device.wait(held, 10).value
    found["barrier_full_grid_sync"] = per_call_us(
        lambda: device.launch_sync(b, barrier, (n, 1, 1), args(out), options("barrier")), 20
    )
    found["resident"] = n
    device.close()
    return found


def step_lost() -> Json:
    """An illegal address: what the operation and later calls say."""
    device = open_device()
    s = device.create_stream()
    kernel = device.load_module(extra_kernel(cubin(), "extra_illegal"))
    a = device.allocate(64)
    bad = device.launch(s, kernel, (1, 1, 1), args(64), options("bad"))
    behind = device.fill(s, a, 0, 8, 1)
    found: Json = {"bad": device.wait(bad, 20).value, "fault": str(device.fault(bad))}
    found["behind"] = device.wait(behind, 5).value
    found["later"] = attempt(lambda: device.allocate(8))
    found["close"] = attempt(device.close)
    return found


def step_peers_in_process() -> Json:
    """Two devices of one process: segments at one address, kernels and value operations across."""
    driver = CudaDriver()
    if driver.device_count() < 2:
        return {"skipped": "one GPU"}
    a, b = driver.open(0), driver.open(1)
    assert isinstance(a, CudaDevice)
    found: Json = {"peer_atomics": a.capabilities.peer_atomics}
    a.api.set_context(a.context)
    free = a.api.memory_info()
    segment, address = a.create_segment(1 << 20)
    again = b.import_segment(a.export_segment(segment))
    found["same_address"] = b.map_segment(again) == address
    sa, sb = a.create_stream(), b.create_stream()
    b.wait(b.fill(sb, address, 7, 8, 100))
    found["written_by_b"] = read_words(a, sa, address, 100) == [7] * 100
    ticket = a.wait_value(sa, address, 8, 64, Cmp.AT_LEAST, timeout_ns=5 * 10**9)
    b.write_value(sb, address, 8, 64)
    found["value_across"] = a.wait(ticket).value
    kernels = suite_kernels(cubin())
    pa, pb = a.load_module(kernels.ping), b.load_module(kernels.ping)
    local, local_address = b.create_segment(1 << 20)
    a.map_segment(a.import_segment(b.export_segment(local)))
    rounds = 2000
    a.wait(a.fill(sa, address, 0, 8, 16))
    b.wait(b.fill(sb, local_address, 0, 8, 16))
    start, end = a.create_event(), a.create_event()
    a.record_event(sa, start)
    first = a.launch(sa, pa, (1, 1, 1), args(address, local_address, rounds), options("ping", timeout_s=5))
    record = b.launch_sync(sb, pb, (1, 1, 1), args(local_address, address, rounds), options("pong", timeout_s=5))
    found["ping"] = a.wait(first).value
    found["pong"] = str(record)
    a.wait(a.record_event(sa, end))
    found["signal_one_way_us"] = round(a.elapsed_ns(start, end) / rounds / 2 / 1000, 3)
    big = 256 << 20
    x, y = a.allocate(big), b.allocate(big)
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        a.wait(a.copy(sa, y, x, big))
        times.append(time.perf_counter() - begin)
    found["copy_GBps"] = round(big / min(times) / 1e9, 1)
    b.free_segment(again)
    a.free_segment(segment)
    found["free_before"] = free
    a.close()
    b.close()
    return found


def send(peer: socket.socket, share: ShareHandle) -> None:
    message = json.dumps([share.kind.value, share.payload.hex()]).encode()
    socket.send_fds(peer, [message], list(share.fds))


def receive(peer: socket.socket) -> ShareHandle:
    message, fds, _, _ = socket.recv_fds(peer, 4096, 4)
    kind, payload = json.loads(message)
    return ShareHandle(ShareKind(kind), bytes.fromhex(payload), tuple(fds))


def step_exporter(kind: ShareKind, ordinal: int) -> Json:
    """A process on device 0 shares memory with one on device `ordinal`."""
    here, there = socket.socketpair()
    child = subprocess.Popen(
        [sys.executable, __file__, "--step", "importer", str(there.fileno()), str(ordinal)],
        pass_fds=[there.fileno()], stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    there.close()
    here.settimeout(25)
    device = open_device()
    s = device.create_stream()
    device.api.set_context(device.context)
    before = device.api.memory_info()[0]
    segment, address = device.create_segment(64 << 20, kind)
    send(here, device.export_segment(segment))
    ticket = device.wait_value(s, address, 5, 64, Cmp.AT_LEAST, timeout_ns=20 * 10**9, name="wait for the child")
    found: Json = {"signal": device.wait(ticket, 25).value, "fault": str(device.fault(ticket))}
    found["data"] = read_words(device, s, address + 256, 1000) == [77] * 1000
    device.wait(device.write_value(s, address + 8, 6, 64))
    found["child"] = json.loads(child.communicate(timeout=25)[0].splitlines()[-1])
    device.free_segment(segment)
    found["bytes_not_given_back"] = before - device.api.memory_info()[0]
    device.close()
    return found


def step_importer(descriptor: int, ordinal: int) -> Json:
    peer = socket.socket(fileno=descriptor)
    peer.settimeout(25)
    device = open_device(ordinal)
    s = device.create_stream()
    segment = device.import_segment(receive(peer))
    address = device.map_segment(segment)
    device.fill(s, address + 256, 77, 8, 1000)
    device.write_value(s, address, 5, 64)
    ticket = device.wait_value(s, address + 8, 6, 64, Cmp.AT_LEAST, timeout_ns=15 * 10**9)
    found: Json = {"device": ordinal, "answer": device.wait(ticket, 20).value, "address": hex(address)}
    device.unmap_segment(segment)
    device.free_segment(segment)
    device.close()
    return found


def step_registered() -> Json:
    """An abort word in shared memory of the host, as a group has it."""
    import mmap

    device = open_device()
    s = device.create_stream()
    fd = os.memfd_create("peertile-check")
    os.ftruncate(fd, 8192)
    memory = mmap.mmap(fd, 8192)
    word = ctypes.c_int32.from_buffer(memory, 4096)
    kernel = device.load_module(suite_kernels(cubin()).await_word)
    w, out = words(device, s, [0]), words(device, s, [0] * 4)
    o = options("doomed", timeout_s=6, abort=ctypes.addressof(word))
    ticket = device.launch(s, kernel, (4, 1, 1), args(w, 3, out), o)
    word.value = 1
    found: Json = {"launch": device.wait(ticket, 10).value, "fault": str(device.take_fault(s))}
    word.value = 0
    begin = time.perf_counter()
    ticket = device.wait_value(s, w, 3, 64, Cmp.EQ, timeout_ns=6 * 10**9, abort_address=ctypes.addressof(word))
    word.value = 1
    found["wait_value"] = device.wait(ticket, 10).value
    found["wait_value_ms"] = round(1000 * (time.perf_counter() - begin), 2)
    found["word_after"] = device.take_fault(s) and read_words(device, s, w, 1)
    word.value = 0
    _, w = device.create_segment(64)
    begin = time.perf_counter()
    ticket = device.wait_value(s, w, 3, 64, Cmp.EQ, timeout_ns=6 * 10**9, abort_address=ctypes.addressof(word))
    word.value = 1
    found["wait_value_of_a_segment"] = device.wait(ticket, 10).value
    found["wait_value_of_a_segment_ms"] = round(1000 * (time.perf_counter() - begin), 2)
    found["word_of_a_segment_after"] = device.take_fault(s) and read_words(device, s, w, 1)
    device.close()
    del word
    return found


# ---------------------------------------------------------------- running them


def environment(path: str) -> dict[str, str]:
    return os.environ | {CUBIN: path, "PYTHONUNBUFFERED": "1"}


def run_step(name: list[str], env: dict[str, str], bound_s: float) -> Any:
    command = [sys.executable, __file__, "--step", *name]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    try:
        out, err = process.communicate(timeout=max(bound_s, 1))
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        return {"error": f"no end within {bound_s:.0f} s", "out": out[-1000:], "err": err[-1500:]}
    try:
        return json.loads(out.splitlines()[-1])
    except (ValueError, IndexError):
        return {"error": f"exit {process.returncode}", "out": out[-500:], "err": err[-2000:]}


def run_suite(env: dict[str, str], bound_s: float) -> Json:
    """A test without an end within 12 s is hung: its process is killed and the next one goes on behind it."""
    end = time.monotonic() + bound_s
    failed: Json = {}
    times: dict[str, float] = {}
    passed, first, total = 0, 0, 1
    while first < total and time.monotonic() < end:
        command = [sys.executable, __file__, "--step", "suite", str(first)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
        assert process.stdout is not None
        assert process.stderr is not None
        name, current, buffer, restart = "start", first, b"", False
        while True:
            left = min(12.0, end - time.monotonic())
            ready = left > 0 and select.select([process.stdout], [], [], left)[0]
            data = os.read(process.stdout.fileno(), 65536) if ready else b""
            buffer += data
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                message = json.loads(line)
                if "begin" in message:
                    current, name, total = message["begin"], message["name"], message["of"]
                elif "end" in message:
                    times[name] = message["s"]
                    first = message["end"] + 1
                    if message["result"] is None:
                        passed += 1
                    else:
                        failed[name] = message["result"]
                        restart = True  # what it left running is no business of the next one
                elif message["closed"] is not None:
                    failed["close"] = message["closed"]
            if not data or restart:
                break
        if restart:
            process.kill()
        elif first < total:
            process.kill()
            stderr = process.stderr.read().decode(errors="replace")[-1500:]
            failed[name] = {"error": "hung or died", "err": stderr}
            first = current + 1
        process.wait()
        process.stdout.close()
        process.stderr.close()
    slowest = dict(sorted(times.items(), key=lambda item: -item[1])[:8])
    return {"passed": passed, "of": total, "failed": failed, "slowest_s": slowest}


def main() -> None:
    begin = time.monotonic()

    def left(most: float) -> float:
        return min(most, TOTAL_S - (time.monotonic() - begin))

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "suite.cubin"
        arch = sys.argv[1] if len(sys.argv) > 1 else "sm_90"
        path.write_bytes(compile_cubin(arch))
        env = environment(str(path))
        found: Json = {"info": run_step(["info"], env, left(40))}
        found["suite"] = run_suite(env, left(50))
        for name in ("times", "cooperative", "registered", "lost", "peers", "blocking", "loading"):
            found[name] = run_step([name], env, left(20))
        found["loading_eager"] = run_step(["loading"], env | {"CUDA_MODULE_LOADING": "EAGER"}, left(20))
        last = max(int(found["info"].get("devices", 1)), 1) - 1
        for kind in ("fd", "ipc"):
            for ordinal in sorted({0, last}):
                key = f"process_{kind}_0_to_{ordinal}"
                found[key] = run_step(["exporter", kind, str(ordinal)], env, left(20))
    found["total_s"] = round(time.monotonic() - begin, 1)
    text = json.dumps(found, indent=1)
    if os.environ.get("OUT"):
        (Path(os.environ["OUT"]) / "check_cuda_driver.json").write_text(text)
    print(text)


def step(name: str, rest: list[str]) -> None:
    if name == "suite":
        step_suite(int(rest[0]))
        return
    steps: dict[str, Callable[[], Json]] = {
        "info": step_info, "times": step_times, "blocking": step_blocking, "cooperative": step_cooperative,
        "lost": step_lost, "loading": step_loading, "peers": step_peers_in_process, "registered": step_registered,
        "exporter": lambda: step_exporter(ShareKind(rest[0]), int(rest[1])),
        "importer": lambda: step_importer(int(rest[0]), int(rest[1])),
    }  # fmt: skip
    print(json.dumps(attempt(steps[name]), default=str), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--step"]:
        step(sys.argv[2], sys.argv[3:])
    else:
        main()
