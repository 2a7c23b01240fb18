"""Benchmarks of compute on one device: add, chain, matmul, softmax, rmsnorm, memory. Beside numpy, and torch
where it is installed, interleaved call by call in the same run."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from peertile.cli import bench_kernels as k
from peertile.creation import asarray, empty
from peertile.dtypes import bf16, f32
from peertile.testing.measure import Figure, interleaved

__all__ = ["COMPUTE"]

Calls = dict[str, Callable[[], object]]


def _torch() -> Any:
    """torch where it is installed, else None; a benchmark never asks for it."""
    return importlib.import_module("torch") if importlib.util.find_spec("torch") else None


def _against(name: str, calls: Calls, repeats: int, *, scale: float = 1e3, unit: str = "ms") -> list[Figure]:
    """One figure per baseline: ours and theirs, medians of one run."""
    median = interleaved(calls, repeats=repeats, warmup=2, settle_s=0.03)
    ours = median.pop("peertile") * scale
    return [
        Figure(f"{name}.{other}", ours, unit, repeats, baseline=other, baseline_median=seconds * scale)
        for other, seconds in median.items()
    ]


def _random(*shape: int) -> np.ndarray[Any, np.dtype[Any]]:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


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


def add() -> list[Figure]:
    """z = x + y over 64 MiB of f32 each."""
    n = 16 << 20
    a, b = _random(n), _random(n)
    out = np.empty_like(a)
    x, y, z = asarray(a), asarray(b), empty((n,), f32)
    calls: Calls = {
        "peertile": lambda: k.vector_add(z.partition(16384), x, y).sync(),
        "numpy": lambda: np.add(a, b, out=out),
    }
    torch = _torch()
    if torch is not None:
        ta, tb, to = torch.from_numpy(a), torch.from_numpy(b), torch.empty(n)
        calls["torch"] = lambda: torch.add(ta, tb, out=to)
    figures = _against("add.64MiB", calls, 15)
    assert np.array_equal(z.numpy(), a + b)
    return figures


def chain() -> list[Figure]:
    """Five operations with an exp over 64 MiB of f32 each, fused against one by one into prepared outputs."""
    n = 16 << 20
    a, b = _random(n), _random(n)
    t, out = np.empty_like(a), np.empty_like(a)
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
        ta, tb, tt, to = torch.from_numpy(a), torch.from_numpy(b), torch.empty(n), torch.empty(n)

        def eager() -> None:
            torch.mul(ta, tb, out=tt)
            torch.sub(tt, ta, out=tt)
            torch.exp(tt, out=tt)
            torch.mul(tt, 0.5, out=tt)
            torch.add(tt, tb, out=to)

        calls["torch"] = eager
    figures = _against("chain.64MiB", calls, 9)
    numpy()
    np.testing.assert_allclose(z.numpy(), out, rtol=1e-5, atol=1e-5)
    return figures


def matmul() -> list[Figure]:
    """2048 cubed, f32 against numpy's BLAS, bf16 against torch."""
    n = 2048
    a, b = _random(n, n), _random(n, n)
    out = np.empty_like(a)
    x, y, z = asarray(a), asarray(b), empty((n, n), f32)
    figures = _against(
        "matmul.f32.2048",
        {
            "peertile": lambda: k.matmul(z.partition((256, 256)).persistent(), x, y).sync(),
            "numpy": lambda: np.matmul(a, b, out=out),
        },
        9,
    )
    np.testing.assert_allclose(z.numpy(), out, rtol=1e-3, atol=1e-3)
    xb, yb, zb = asarray(a, bf16), asarray(b, bf16), empty((n, n), bf16)
    calls: Calls = {"peertile": lambda: k.matmul(zb.partition((256, 128)).persistent(), xb, yb).sync()}
    torch = _torch()
    if torch is not None:
        ta, tb = torch.from_numpy(a).bfloat16(), torch.from_numpy(b).bfloat16()
        to = torch.empty((n, n), dtype=torch.bfloat16)
        calls["torch"] = lambda: torch.mm(ta, tb, out=to)
        figures += _against("matmul.bf16.2048", calls, 9)
    else:
        seconds = interleaved(calls, repeats=9)["peertile"]
        figures.append(Figure("matmul.bf16.2048", seconds * 1e3, "ms", 9))
    return figures


def softmax() -> list[Figure]:
    """Softmax of the rows of 4096 x 4096 f32."""
    a = _random(4096, 4096)
    x, z = asarray(a), empty(a.shape, f32)

    def numpy() -> Any:
        weight = np.exp(a - a.max(axis=1, keepdims=True))
        weight /= weight.sum(axis=1, keepdims=True)
        return weight

    calls: Calls = {"peertile": lambda: k.softmax(z.partition((1, 4096)), x).sync(), "numpy": numpy}
    torch = _torch()
    if torch is not None:
        ta, to = torch.from_numpy(a), torch.empty(a.shape)
        calls["torch"] = lambda: torch.softmax(ta, 1, out=to)
    figures = _against("softmax.4096x4096", calls, 7)
    np.testing.assert_allclose(z.numpy(), numpy(), rtol=1e-4, atol=1e-7)
    return figures


def rmsnorm() -> list[Figure]:
    """RMSNorm of the rows of 4096 x 4096 f32."""
    a, g = _random(4096, 4096), _random(1, 4096)
    x, gain, z = asarray(a), asarray(g), empty(a.shape, f32)

    def numpy() -> Any:
        return a / np.sqrt((a * a).mean(axis=1, keepdims=True) + 1e-6) * g

    calls: Calls = {"peertile": lambda: k.rmsnorm(z.partition((1, 4096)), x, gain, 1 / 4096).sync(), "numpy": numpy}
    torch = _torch()
    if torch is not None:
        ta, tg = torch.from_numpy(a), torch.from_numpy(g[0])
        calls["torch"] = lambda: torch.nn.functional.rms_norm(ta, (4096,), tg, 1e-6)
    figures = _against("rmsnorm.4096x4096", calls, 7)
    np.testing.assert_allclose(z.numpy(), numpy(), rtol=1e-4, atol=1e-5)
    return figures


def memory() -> list[Figure]:
    """Peak memory of an add over 256 MiB arrays, over the data itself: no tile-sized temporaries. In a process of
    its own, since the peak of a process only goes up."""
    done = subprocess.run([sys.executable, "-c", _MEMORY], capture_output=True, text=True, timeout=120, check=True)
    return [Figure("memory.add.peak_over_data", float(done.stdout), "ratio", 1, limit=1.1)]


COMPUTE: dict[str, Callable[[], list[Figure]]] = {
    "add": add,
    "chain": chain,
    "matmul": matmul,
    "softmax": softmax,
    "rmsnorm": rmsnorm,
    "memory": memory,
}
