"""`peertile info`: what this machine is, and what works here and why not. Imports nothing heavy to find out."""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from peertile.cli.cache import entries
from peertile.cli.console import plain
from peertile.cli.topology import gpu_report
from peertile.comm.control import Segment
from peertile.config import VARIABLES, config
from peertile.errors import PeertileError

__all__ = ["Probe", "collect", "info", "probes"]

PACKAGES = ("peertile", "numpy", "llvmlite", "ml-dtypes", "greenlet", "torch", "triton", "cuda-core", "cuda-bindings")
CPU_FEATURES = ("sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_bf16", "avx512_fp16", "amx_bf16")
ARM_FEATURES = ("asimd", "atomics", "bf16", "i8mm", "sve", "sve2")


@dataclass(frozen=True, slots=True)
class Probe:
    """Whether something works on this machine, and why (not)."""

    name: str
    works: bool
    why: str


def info(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show this machine, the versions, the cache, every environment variable, and what works here and why."""
    found = collect()
    if as_json:
        print(json.dumps(found, indent=2))
        return
    console = plain()
    machine = {"platform": found["platform"], "python": found["python"], **_cpu_rows(found["cpu"])}
    machine |= {f"package {name}": text or "not installed" for name, text in found["packages"].items()}
    cache = found["cache"]
    machine["cache"] = f"{cache['folder']}: {cache['files']} files, {cache['total_bytes'] / 2**20:.1f} MiB"
    console.print(_table("this machine", ("what", "value"), list(machine.items())))
    works = [(p["name"], "yes" if p["works"] else "no", p["why"]) for p in found["probes"]]
    console.print(_table("what works here", ("what", "works", "why"), works))
    variables = [(v["name"], v["value"] or v["default"], v["meaning"]) for v in found["environment"]]
    console.print(_table("environment", ("variable", "value", "meaning"), variables))


def collect() -> dict[str, Any]:
    """Everything that `peertile info` knows, as plain data."""
    folder = config().cache_dir
    files = entries(folder)
    return {
        "platform": platform.platform(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "packages": {name: _version(name) for name in PACKAGES},
        "cpu": _cpu(),
        "cache": {
            "folder": str(folder),
            "files": len(files),
            "total_bytes": sum(file.size_bytes for file in files),
            "max_bytes": config().cache_max_bytes,
        },
        "environment": [variable._asdict() | {"value": os.environ.get(variable.name)} for variable in VARIABLES],
        "probes": [asdict(probe) for probe in probes()],
    }


def probes() -> list[Probe]:
    """What will and will not work here."""
    return [
        _probe("cpu", _probe_cpu),
        _probe("ranks as processes", _probe_processes),
        Probe("ranks as threads", True, "needs nothing of the platform"),
        Probe("sim", True, "peertile check runs unchanged programs on it"),
        *(Probe(f.name, f.works, f.why) for f in gpu_report()),
        Probe("several hosts", False, "not part of this version"),
    ]


def _probe(name: str, check: Callable[[], str]) -> Probe:
    try:
        return Probe(name, True, check())
    except (OSError, ImportError, PeertileError) as error:
        return Probe(name, False, f"{type(error).__name__}: {error}")


def _probe_cpu() -> str:
    if find_spec("llvmlite") is None:
        raise ImportError("llvmlite is not installed")
    if platform.machine() not in ("x86_64", "AMD64", "aarch64", "arm64"):
        raise ImportError(f"no code for {platform.machine()}; x86-64 and aarch64 are supported")
    return f"native code for {platform.machine()} through llvmlite {_version('llvmlite')}"


def _probe_processes() -> str:
    segment = Segment.create(2, shared=True)
    segment.close_fd()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        if sys.platform == "linux":
            listener.bind(f"\0peertile-probe-{os.getpid()}")
            return "anonymous shared memory and abstract unix sockets: nothing can be left behind"
    return "shared memory and unix sockets"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, Any]:
    """Name, features and cores; from the kernel's table where there is one."""
    fields: dict[str, str] = {}
    try:
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    except OSError:
        pass
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "name": fields.get("model name") or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "features": [name for name in (*CPU_FEATURES, *ARM_FEATURES) if name in flags],
        "cores": os.cpu_count() or 1,
        "usable_cores": usable,
    }


def _cpu_rows(cpu: dict[str, Any]) -> dict[str, str]:
    return {
        "cpu": f"{cpu['name']} ({cpu['architecture']})",
        "cpu features": " ".join(cpu["features"]) or "unknown",
        "cores": f"{cpu['cores']}, {cpu['usable_cores']} of them for this process",
    }


def _table(title: str, columns: tuple[str, ...], rows: list[Any]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column == "variable")
    for row in rows:
        table.add_row(*row)
    return table
