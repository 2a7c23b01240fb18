"""Benchmarks of compute on one device, beside numpy, and torch where it is installed. Asserts no time.

Each benchmark runs once per number of threads, in a process of its own: every library takes its number of threads
from the environment when it starts. Candidates alternate call by call. Variables that choose OpenBLAS's kernels
are left out of the environment, so that numpy has its best ones.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from peertile.cli import bench_kernels as k
from peertile.creation import asarray, empty
from peertile.dtypes import bf16, f32
from peertile.testing.measure import Figure, interleaved

__all__ = ["COMPUTE", "measured_in_child"]

Calls = dict[str, Callable[[], object]]

_SETTLE_S: Final = 0.03
_BLAS_SETTLE_S: Final = 0.15
"""OpenBLAS's second thread spins for 2^28 ticks of the clock after a product (100 ms at 2.6 GHz) and takes half of one
core from whoever comes next: ours was 0.80 of numpy's speed right after it, and 1.04 where it had gone to sleep."""
_TIMEOUT_S: Final = 300.0
_PEER_KERNELS: Final = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "OPENBLAS_VERBOSE")
_PEER_THREADS: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def _torch() -> Any:
    """torch where it is installed, else None; a benchmark never asks for it."""
    return importlib.import_module("torch") if importlib.util.find_spec("torch") else None


def _against(
    name: str,
    calls: Calls,
    repeats: int,
    wanted: Mapping[str, float],
    *,
    settle_s: float = _SETTLE_S,
) -> list[Figure]:
    """One figure per baseline: ours and theirs, medians of one run, and what ours may take to be `wanted` times
    as fast."""
    median = interleaved(calls, repeats=repeats, warmup=2, settle_s=settle_s)
    ours = median.pop("peertile") * 1e3
    if not median:
        return [Figure(name, ours, "ms", repeats)]
    return [
        Figure(
            f"{name}.{other}",
            ours,
            "ms",
            repeats,
            limit=seconds * 1e3 / wanted[other] if other in wanted else None,
            baseline=other,
            baseline_median=seconds * 1e3,
        )
        for other, seconds in median.items()
    ]


def _random(*shape: int) -> np.ndarray[Any, np.dtype[Any]]:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def _like(torch: Any, a: np.ndarray[Any, np.dtype[Any]]) -> Any:
    """An output for torch on pages as large as numpy's and ours, already touched."""
    return torch.from_numpy(np.zeros_like(a))


def add(name: str) -> list[Figure]:
    """z = x + y over 64 MiB of f32 each."""
    n = 16 << 20
    a, b = _random(n), _random(n)
    out = np.zeros_like(a)
    x, y, z = asarray(a), asarray(b), empty((n,), f32)
    calls: Calls = {
        "peertile": lambda: k.vector_add(z.partition(16384), x, y).sync(),
        "numpy": lambda: np.add(a, b, out=out),
    }
    torch = _torch()
    if torch is not None:
        ta, tb, to = torch.from_numpy(a), torch.from_numpy(b), _like(torch, a)
        calls["torch"] = lambda: torch.add(ta, tb, out=to)
    figures = _against(name, calls, 21, {"numpy": 1.2, "torch": 1.2})
    assert np.array_equal(z.numpy(), a + b)
    return figures


def chain(name: str) -> list[Figure]:
    """Five operations with an exp over 64 MiB of f32 each: fused by us and by torch.compile, one by one into prepared
    outputs by the others."""
    n = 16 << 20
    a, b = _random(n), _random(n)
    t, out = np.zeros_like(a), np.zeros_like(a)
    x, y, z = asarray(a), asarray(b), empty((n,), f32)

    def numpy() -> None:
        np.multiply(a, b, out=t)
        np.subtract(t, a, out=t)
        np.exp(t, out=t)
        np.multiply(t, np.float32(0.5), out=t)
        np.add(t, b, out=out)

    calls: Calls = {"peertile": lambda: k.chain(z.partition(8192), x, y).sync(), "numpy": numpy}
    torch = _torch()
    if torch is not None:
        ta, tb, tt, to = torch.from_numpy(a), torch.from_numpy(b), _like(torch, a), _like(torch, a)

        def eager() -> None:
            torch.mul(ta, tb, out=tt)
            torch.sub(tt, ta, out=tt)
            torch.exp(tt, out=tt)
            torch.mul(tt, 0.5, out=tt)
            torch.add(tt, tb, out=to)

        def into(u: Any, v: Any, to: Any) -> None:
            to.copy_(torch.exp(u * v - u) * 0.5 + v)

        fused = torch.compile(into)
        calls["torch"] = eager
        calls["torch.compile"] = lambda: fused(ta, tb, to)
    figures = _against(name, calls, 15, {"torch": 3.0, "torch.compile": 1.1})
    numpy()
    np.testing.assert_allclose(z.numpy(), out, rtol=1e-5, atol=1e-5)
    return figures


def matmul(name: str) -> list[Figure]:
    """2048 cubed, f32 against numpy's BLAS and torch's, bf16 against torch."""
    n = 2048
    a, b = _random(n, n), _random(n, n)
    out = np.zeros_like(a)
    x, y, z = asarray(a), asarray(b), empty((n, n), f32)
    calls: Calls = {
        "peertile": lambda: k.matmul(z.partition((256, 256)).persistent(), x, y).sync(),
        "numpy": lambda: np.matmul(a, b, out=out),
    }
    figures = _against(f"{name}.f32", calls, 11, {"numpy": 0.95}, settle_s=_BLAS_SETTLE_S)
    np.testing.assert_allclose(z.numpy(), out, rtol=1e-3, atol=1e-3)
    xb, yb, zb = asarray(a, bf16), asarray(b, bf16), empty((n, n), bf16)
    calls = {"peertile": lambda: k.matmul(zb.partition((256, 128)).persistent(), xb, yb).sync()}
    torch = _torch()
    if torch is not None:
        ta, tb = torch.from_numpy(a).bfloat16(), torch.from_numpy(b).bfloat16()
        to = torch.zeros((n, n), dtype=torch.bfloat16)
        calls["torch"] = lambda: torch.mm(ta, tb, out=to)
    figures += _against(f"{name}.bf16", calls, 15, {"torch": 0.95})
    np.testing.assert_allclose(zb.numpy().astype(np.float32), out, rtol=0.1, atol=2.0)
    return figures


def softmax(name: str) -> list[Figure]:
    """Softmax of the rows of 4096 x 4096 f32."""
    a = _random(4096, 4096)
    x, z = asarray(a), empty(a.shape, f32)
    top, out = np.zeros((4096, 1), np.float32), np.zeros_like(a)

    def numpy() -> None:
        np.max(a, axis=1, keepdims=True, out=top)
        np.subtract(a, top, out=out)
        np.exp(out, out=out)
        np.sum(out, axis=1, keepdims=True, out=top)
        np.divide(out, top, out=out)

    calls: Calls = {"peertile": lambda: k.softmax(z.partition((1, 4096)), x).sync(), "numpy": numpy}
    torch = _torch()
    if torch is not None:
        ta, to = torch.from_numpy(a), _like(torch, a)
        calls["torch"] = lambda: torch.softmax(ta, 1, out=to)
    figures = _against(name, calls, 15, {"numpy": 2.0, "torch": 1.1})
    np.testing.assert_allclose(z.numpy(), out, rtol=1e-4, atol=1e-7)
    return figures


def rmsnorm(name: str) -> list[Figure]:
    """RMSNorm of the rows of 4096 x 4096 f32. torch has it without a prepared output only, so it also pays for fresh
    pages; its own steps into prepared outputs are a second baseline."""
    a, g = _random(4096, 4096), _random(1, 4096)
    x, gain, z = asarray(a), asarray(g), empty(a.shape, f32)
    mean, out = np.zeros((4096, 1), np.float32), np.zeros_like(a)

    def numpy() -> None:
        np.multiply(a, a, out=out)
        np.mean(out, axis=1, keepdims=True, out=mean)
        np.sqrt(mean + np.float32(1e-6), out=mean)
        np.divide(a, mean, out=out)
        np.multiply(out, g, out=out)

    calls: Calls = {"peertile": lambda: k.rmsnorm(z.partition((1, 4096)), x, gain, 1 / 4096).sync(), "numpy": numpy}
    torch = _torch()
    if torch is not None:
        ta, tg, to = torch.from_numpy(a), torch.from_numpy(g[0]), _like(torch, a)

        def steps() -> None:
            torch.mul(ta, ta, out=to)
            scale = torch.rsqrt(to.mean(dim=1, keepdim=True) + 1e-6)
            torch.mul(ta, scale, out=to)
            torch.mul(to, tg, out=to)

        calls["torch"] = lambda: torch.nn.functional.rms_norm(ta, (4096,), tg, 1e-6)
        calls["torch_out"] = steps
    figures = _against(name, calls, 15, {"numpy": 2.0, "torch": 1.1, "torch_out": 1.1})
    numpy()
    np.testing.assert_allclose(z.numpy(), out, rtol=1e-4, atol=1e-5)
    return figures


_BODIES: Final[dict[str, tuple[Callable[[str], list[Figure]], str]]] = {
    "add": (add, "add.64MiB"),
    "chain": (chain, "chain.64MiB"),
    "matmul": (matmul, "matmul.2048"),
    "softmax": (softmax, "softmax.4096x4096"),
    "rmsnorm": (rmsnorm, "rmsnorm.4096x4096"),
}


def child_environment(threads: int) -> dict[str, str]:
    """The environment of a benchmark with `threads` threads for everybody."""
    kept = {name: value for name, value in os.environ.items() if name not in _PEER_KERNELS}
    return {**kept, "PEERTILE_CPU_THREADS": str(threads), **dict.fromkeys(_PEER_THREADS, str(threads))}


def measured_in_child(name: str, threads: int) -> list[Figure]:
    """The figures of benchmark `name`, measured in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-m", "peertile.cli.bench_compute", name, str(threads)],
        env=child_environment(threads),
        stdout=subprocess.PIPE,
        text=True,
        timeout=_TIMEOUT_S,
        check=True,
    )
    return [Figure(**figure) for figure in json.loads(done.stdout.splitlines()[-1])]


def _with_each(name: str) -> Callable[[], list[Figure]]:
    """The benchmark, with 1 thread and with 2 where there are 2 cores."""
    counts = (1, 2) if (os.cpu_count() or 1) > 1 else (1,)
    return lambda: [figure for threads in counts for figure in measured_in_child(name, threads)]


_MEMORY = """
import peertile as pt
from peertile.cli.bench_kernels import vector_add
def peak():  # ru_maxrss would start at the parent's
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) * 1024
def add(n):
    x, y, z = pt.ones((n,), pt.f32), pt.ones((n,), pt.f32), pt.empty((n,), pt.f32)
    vector_add(z.partition(16384), x, y).sync()
add(1 << 16)  # what a first launch loads is not the data's
before = peak()
add(64 << 20)
print((peak() - before) / (3 * (64 << 20) * 4))
"""


def memory() -> list[Figure]:
    """Peak memory of an add over 256 MiB arrays, over the data itself: no tile-sized temporaries. In a process of
    its own, since the peak of a process only goes up."""
    done = subprocess.run([sys.executable, "-c", _MEMORY], capture_output=True, text=True, timeout=120, check=True)
    return [Figure("memory.add.peak_over_data", float(done.stdout), "ratio", 1, limit=1.1)]


COMPUTE: dict[str, Callable[[], list[Figure]]] = {**{name: _with_each(name) for name in _BODIES}, "memory": memory}


def _main(name: str, threads: str) -> None:
    """What a child does: one line of JSON, figures as keywords."""
    torch = _torch()
    if torch is not None:
        torch.set_num_threads(int(threads))
    body, title = _BODIES[name]
    figures = body(f"{title}.{threads}t")
    print(json.dumps([{field: getattr(f, field) for field in Figure.__dataclass_fields__} for f in figures]))


if __name__ == "__main__":
    _main(*sys.argv[1:])
