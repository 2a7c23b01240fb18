"""Which calls on the host wait for a running kernel: `PYTHONPATH=src python3 benchmarks/device/check_cuda_blocking.py`.

While a kernel polls a word that nobody writes, within a bound of one second, each call is made and timed. What takes
about as long as the kernel has waited for it: ranks that share a GPU must have done it before one of them launches a
kernel that waits for another. Prints a line for each call. Needs nvcc.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from peertile.runtime.driver import ShareKind  # noqa: E402
from peertile.runtime.drivers.cuda import CudaDriver  # noqa: E402
from peertile.testing.cuda_kernels import compile_cubin, suite_kernels  # noqa: E402
from peertile.testing.driver_suite import args, options, words  # noqa: E402

BOUND_S = 1.0


def main() -> None:
    driver = CudaDriver()
    device: Any = driver.open()
    api = device.api
    cubin = compile_cubin("sm_90")
    kernels = suite_kernels(cubin, "cuda:sm_90")
    waits, add, barrier = (device.load_module(k) for k in (kernels.await_word, kernels.add, kernels.barrier))
    spinning, other = device.create_stream(), device.create_stream()
    word, out, x = words(device, spinning, [0]), words(device, spinning, [0] * 4224), words(device, spinning, [1])
    page = ctypes.create_string_buffer(1 << 13)
    aligned = (ctypes.addressof(page) + 4095) & -4096
    kept: dict[str, Any] = {}

    def keep(name: str, value: Any) -> None:
        kept[name] = value

    def shared_segment() -> None:
        segment, _ = device.create_segment(1 << 22, ShareKind.FD)
        keep("segment", segment)

    def inside(call: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            api.push_context(device.context)
            try:
                return call()
            finally:
                api.pop_context()

        return run

    calls: dict[str, Callable[[], Any]] = {
        "nothing": lambda: None,
        "load a module": inside(lambda: keep("module", api.load_module(cubin))),
        "find a function": inside(lambda: keep("function", api.function(kept["module"], "suite_add"))),
        "occupancy of a function": inside(lambda: api.occupancy(kept["function"], 32, 0)),
        "more shared memory for a function": inside(lambda: api.allow_shared_memory(kept["function"], 100_000)),
        "unload a module": inside(lambda: api.unload_module(kept["module"])),
        "create a stream": lambda: keep("stream", device.create_stream()),
        "destroy a stream": lambda: device.destroy_stream(kept["stream"]),
        "create an event": lambda: keep("event", device.create_event()),
        "record an event": lambda: device.wait(device.record_event(other, kept["event"]), 3),
        "allocate 64 bytes": lambda: keep("small", device.allocate(64)),
        "allocate 1 GiB": lambda: keep("large", device.allocate(1 << 30)),
        "free 64 bytes": lambda: device.free(kept["small"]),
        "free 1 GiB": lambda: device.free(kept["large"]),
        "allocate 1 MiB of the host": lambda: keep("host", device.allocate_host(1 << 20)),
        "allocate 64 MiB of the host": lambda: keep("more", device.allocate_host(1 << 26)),
        "free 64 MiB of the host": lambda: device.free_host(kept["more"]),
        "register a page of the host": inside(lambda: api.register_host(aligned, 4096)),
        "unregister a page of the host": inside(lambda: api.unregister_host(aligned)),
        "create and map a segment": shared_segment,
        "free a segment": lambda: device.free_segment(kept["segment"]),
        "allocate for IPC": inside(lambda: keep("ipc", api.allocate_ipc(1 << 21))),
        "free what was for IPC": inside(lambda: api.free_ipc(kept["ipc"])),
        "fill": lambda: device.wait(device.fill(other, out, 0, 8, 16), 3),
        "copy from the host": lambda: words(device, other, [0] * 1000),
        "launch": lambda: device.launch_sync(other, add, (1, 1, 1), args(x, x, x), options("add", timeout_s=3)),
        "launch a grid with a barrier": lambda: device.launch_sync(
            other, barrier, (4, 1, 1), args(out), options("barrier", timeout_s=3)
        ),
        "first use of another stream": lambda: device.launch_sync(
            device.create_stream(), add, (1, 1, 1), args(x, x, x), options("add", timeout_s=3)
        ),
    }
    found: dict[str, Any] = {}
    for name, call in calls.items():
        launched = device.launch(spinning, waits, (4, 1, 1), args(word, 1, out), options("spin", timeout_s=BOUND_S))
        time.sleep(0.05)  # it is running now
        begin = time.perf_counter()
        try:
            call()
            took = round(time.perf_counter() - begin, 4)
            outcome = "waits for the kernel" if took > BOUND_S / 2 else "does not wait"
        except Exception as error:
            took, outcome = round(time.perf_counter() - begin, 4), f"{type(error).__name__}: {str(error)[:200]}"
        found[name] = (took, outcome)
        print(f"{name:36} {1e3 * took:9.2f} ms  {outcome}", flush=True)
        device.wait(launched, 5)
        device.take_fault(spinning)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
