"""`peertile bench NAME …`: measured figures with a peer or a limit in the same run. Asserts no time."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from peertile.cli import bench_kernels
from peertile.cli.bench_checker import bench_checker
from peertile.cli.bench_collectives import bench_allreduce
from peertile.cli.bench_compute import COMPUTE
from peertile.cli.bench_cuda import CUDA
from peertile.cli.bench_examples import bench_examples
from peertile.cli.bench_pipeline import bench_pipeline
from peertile.cli.console import plain
from peertile.cli.run import DeviceKind
from peertile.creation import asarray, empty
from peertile.dtypes import f32
from peertile.runtime.driver import DriverKind
from peertile.runtime.registry import current_device, open_device, use_device
from peertile.testing.measure import Figure, interleaved, machine

__all__ = ["BENCHMARKS", "bench"]


def _child(code: str, **env: str) -> float:
    """The number that a fresh interpreter prints for `code`."""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, timeout=120, check=True
    )
    return float(done.stdout.split()[-1])


_IMPORT = """
import time; t0 = time.perf_counter()
import numpy; t1 = time.perf_counter()
import peertile; print((time.perf_counter() - t1) * 1e3)
"""

_COMPILE = """
import time, numpy as np
import peertile as pt
from peertile.cli.bench_kernels import vector_add
x = pt.asarray(np.ones(256, np.float32))
z = pt.empty((256,), pt.f32)
op = vector_add(z.partition(256), x, x)
start = time.perf_counter(); op.compiled(); print((time.perf_counter() - start) * 1e3)
"""


def bench_import() -> list[Figure]:
    """Milliseconds of `import peertile` over `import numpy`, in a fresh interpreter with byte code cached."""
    with tempfile.TemporaryDirectory(prefix="peertile-bench-") as folder:
        # An installed package has its byte code beside it; a source tree may not be allowed to.
        cached = {"PYTHONPYCACHEPREFIX": folder, "PYTHONDONTWRITEBYTECODE": ""}
        _child(_IMPORT, **cached)
        times = [_child(_IMPORT, **cached) for _ in range(15)]
    return [Figure("import.over_numpy", statistics.median(times), "ms", len(times), limit=40.0)]


def bench_compile() -> list[Figure]:
    """Milliseconds to compile vector_add in a fresh process with an open device, cold and from the disk cache; and
    the kernels of each example."""
    with tempfile.TemporaryDirectory(prefix="peertile-bench-") as folder:
        cached = {"PYTHONPYCACHEPREFIX": f"{folder}/code", "PYTHONDONTWRITEBYTECODE": "", "PEERTILE_CACHE_DIR": folder}
        _child(_COMPILE, **cached)  # byte code and the native runtime are in place from here on
        warm = [_child(_COMPILE, **cached) for _ in range(9)]
        cold = [_child(_COMPILE, **cached, PEERTILE_CACHE_MAX_MB="0") for _ in range(9)]
    return [
        Figure("compile.vector_add.cold", statistics.median(cold), "ms", len(cold), limit=150.0),
        Figure("compile.vector_add.from_disk", statistics.median(warm), "ms", len(warm), limit=10.0),
        *bench_examples(),
    ]


def bench_launch() -> list[Figure]:
    """Microseconds of a small kernel, lazily built and synchronised, beside numpy's add of the same size."""
    a = np.ones(256, np.float32)
    x, z, out = asarray(a), empty((256,), f32), np.empty_like(a)
    calls: dict[str, Callable[[], object]] = {
        "peertile": lambda: bench_kernels.vector_add(z.partition(256), x, x).sync(),
        "numpy": lambda: np.add(a, a, out=out),
    }
    repeats = 5000
    median = interleaved(calls, repeats=repeats, warmup=200)
    return [
        Figure(
            "launch.vector_add.sync",
            median["peertile"] * 1e6,
            "us",
            repeats,
            limit=12.0,
            baseline="numpy.add(out=)",
            baseline_median=median["numpy"] * 1e6,
        )
    ]


BENCHMARKS: dict[str, Callable[[], list[Figure]]] = {
    "import": bench_import,
    "compile": bench_compile,
    "launch": bench_launch,
    **COMPUTE,
    "allreduce": bench_allreduce,
    "checker": bench_checker,
    "pipeline": bench_pipeline,
}


def commit() -> str:
    """The commit of the source tree that runs, where it is one; "-dirty" with changes."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
        return done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "installed"


def _version(name: str) -> str:
    """Of a package; "source" for one that runs without being installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "source"


def record(figures: list[Figure], command: str, device: DeviceKind = DeviceKind.CPU) -> dict[str, Any]:
    """Figures with what is needed to compare them later: see benchmarks/records/README.md."""
    gpu = ("triton", "cuda-bindings") if device is DeviceKind.CUDA else ()
    peers = ("torch",) if importlib.util.find_spec("torch") else ()
    packages = {name: _version(name) for name in ("numpy", "llvmlite", *peers, *gpu)}
    gpus = [current_device().capabilities.name] if device is DeviceKind.CUDA else []
    return {
        "schema": 1,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "machine": machine() | {"gpus": gpus},
        "versions": {"peertile": f"{_version('peertile')} {commit()}", "python": platform.python_version(), **packages},
        "figures": [figure.as_dict() for figure in figures],
    }


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(help=f"Of {', '.join(BENCHMARKS)}; with --device cuda of {', '.join(CUDA)}; all by default."),
    ] = None,
    device: Annotated[DeviceKind, typer.Option(help="What the kernels run on.")] = DeviceKind.CPU,
    as_json: Annotated[bool, typer.Option("--json", help="Print a record as JSON.")] = False,
) -> None:
    """Measure, with a peer or a limit in the same run."""
    table_of = CUDA if device is DeviceKind.CUDA else BENCHMARKS
    chosen = names or list(table_of)
    for name in chosen:
        if name not in table_of:
            raise typer.BadParameter(f"expected one of {', '.join(table_of)}, got {name!r}")
    if device is DeviceKind.CUDA:
        use_device(open_device(DriverKind.CUDA))
    console = Console(stderr=True)
    figures = [f for name in track(chosen, "measuring", console=console) for f in table_of[name]()]
    if as_json:
        command = f"peertile bench {' '.join(chosen)} --device {device.value} --json"
        print(json.dumps(record(figures, command, device), indent=2))
        return
    table = Table()
    for column in ("figure", "median", "limit", "met", "baseline", "ratio"):
        table.add_column(column, overflow="fold")
    for f in figures:
        table.add_row(
            f.name,
            f"{f.median:.4g} {f.unit}",
            "" if f.limit is None else f"{f.limit:.4g} {f.unit}",
            "" if f.holds is None else "yes" if f.holds else "NO",
            "" if f.baseline is None else f"{f.baseline}: {f.baseline_median:.4g} {f.unit}",
            "" if f.ratio is None else f"{f.ratio:.2f}",
        )
    plain().print(table)
