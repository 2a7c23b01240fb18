"""What `peertile info` says about GPUs: which there are, how they are linked, and what works between them and why not.

Every probe is a function of what it asks, so that its failure can be shown without the hardware. Opens the GPUs and
closes them again; makes and changes nothing that stays, and never makes a multicast object.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

from peertile.errors import PeertileError, UnsupportedError
from peertile.runtime.driver import ShareKind
from peertile.runtime.drivers.cuda import CudaDevice, CudaDriver
from peertile.runtime.drivers.cuda_probe import fabric_refusal

__all__ = [
    "Finding",
    "Gpu",
    "Links",
    "full_mesh",
    "gpu_findings",
    "gpu_report",
    "links_by_nvml",
    "links_by_smi",
    "nvlinks",
    "open_gpus",
]

MULTICAST_VETOES = ("NCCL_NVLS_ENABLE=0", "TORCH_SYMM_MEM_DISABLE_MULTICAST=1", "NVSHMEM_DISABLE_NVLS=1")
_SMI_TIMEOUT_S = 10.0
_MAX_LINKS = 18


@dataclass(frozen=True, slots=True)
class Finding:
    """Whether something works between the GPUs, and why (not)."""

    name: str
    works: bool
    why: str


@dataclass(frozen=True, slots=True)
class Gpu:
    """One visible GPU."""

    ordinal: int
    name: str
    arch: str
    memory_bytes: int
    uuid: str
    numa: int
    priorities: tuple[int, int]
    shares: tuple[ShareKind, ...]
    fabric: str | None
    """Why there are no fabric handles; None if there are."""
    multicast: bool
    """Whether the device says it could; nothing here tries."""


@dataclass(frozen=True, slots=True)
class Links:
    """NVLinks from GPU to GPU, `count[i][j]`, and who said so; no counts where nobody could."""

    count: tuple[tuple[int, ...], ...] | None
    source: str


def open_gpus() -> tuple[list[CudaDevice], int]:
    """The visible GPUs, which the caller closes, and the CUDA version of the driver; UnsupportedError without any."""
    driver = CudaDriver()
    count = driver.device_count()
    if count == 0:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "" if seen is None else f" (CUDA_VISIBLE_DEVICES={seen!r} hides those that it does not name)"
        raise UnsupportedError(f"cuda: expected at least one GPU, the NVIDIA driver shows none{why}")
    devices = [driver.open(k) for k in range(count)]
    opened = [d for d in devices if isinstance(d, CudaDevice)]
    return opened, opened[0].api.driver_version()


def describe(device: CudaDevice) -> Gpu:
    """What one GPU is."""
    api = device.api
    api.push_context(device.context)
    try:
        fabric = fabric_refusal(api, device.handle)
    finally:
        api.pop_context()
    facts = device.capabilities
    uuid = api.device_uuid(device.handle).hex()
    parts = (uuid[:8], uuid[8:12], uuid[12:16], uuid[16:20], uuid[20:])
    return Gpu(
        device.ordinal, facts.name, device.arch, facts.memory_bytes, "GPU-" + "-".join(parts),
        api.attribute(device.handle, "HOST_NUMA_ID"), facts.stream_priorities, facts.shares, fabric,
        bool(api.attribute(device.handle, "MULTICAST_SUPPORTED")),
    )  # fmt: skip


# ---------------------------------------------------------------- links


def links_by_nvml(uuids: Sequence[str], nvml: Any) -> tuple[tuple[int, ...], ...]:
    """By the NVML library (package nvidia-ml-py). A pair has the links of its first GPU, if they reach the second:
    behind a switch every link reaches every GPU."""
    nvml.nvmlInit()
    try:
        handles = [nvml.nvmlDeviceGetHandleByUUID(u) for u in uuids]
        active = [sum(_is_active(nvml, h, k) for k in range(_MAX_LINKS)) for h in handles]

        def count(i: int, j: int) -> int:
            if i == j:
                return 0
            status = nvml.nvmlDeviceGetP2PStatus(handles[i], handles[j], nvml.NVML_P2P_CAPS_INDEX_NVLINK)
            return active[i] if status == nvml.NVML_P2P_STATUS_OK else 0

        return tuple(tuple(count(i, j) for j in range(len(uuids))) for i in range(len(uuids)))
    finally:
        nvml.nvmlShutdown()


def _is_active(nvml: Any, handle: Any, link: int) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetNvLinkState(handle, link))
    except nvml.NVMLError:  # no such link
        return False


def links_by_smi(uuids: Sequence[str], run: Callable[[list[str]], str]) -> tuple[tuple[int, ...], ...]:
    """By `nvidia-smi topo -m`, whose rows are in the order of the machine, not of CUDA_VISIBLE_DEVICES."""
    listed = run(["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"])
    index = {uuid.strip(): int(number) for number, uuid in (line.split(",") for line in listed.splitlines() if line)}
    rows: dict[int, list[str]] = {}
    for line in re.sub(r"\x1b\[[0-9;]*m", "", run(["nvidia-smi", "topo", "-m"])).splitlines():
        match = re.match(r"\s*GPU(\d+)\s+(.*)", line)
        if match and not match[2].lstrip().startswith("GPU"):
            rows[int(match[1])] = match[2].split()

    def count(i: int, j: int) -> int:
        match = re.fullmatch(r"NV(\d+)", rows[index[uuids[i]]][index[uuids[j]]])
        return int(match[1]) if match else 0

    return tuple(tuple(count(i, j) for j in range(len(uuids))) for i in range(len(uuids)))


def _run(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SMI_TIMEOUT_S).stdout


def nvlinks(
    uuids: Sequence[str], nvml: Callable[[], Any] | None = None, run: Callable[[list[str]], str] | None = None
) -> Links:
    """NVML first, then nvidia-smi; neither is an answer too."""
    reasons = []
    try:
        return Links(links_by_nvml(uuids, (nvml or _nvml)()), "NVML")
    except Exception as error:  # whatever a foreign library raises
        reasons.append(f"NVML: {type(error).__name__}: {error}")
    try:
        return Links(links_by_smi(uuids, run or _run), "nvidia-smi")
    except (OSError, subprocess.SubprocessError, KeyError, IndexError, ValueError) as error:
        reasons.append(f"nvidia-smi: {type(error).__name__}: {error}")
    return Links(None, "; ".join(reasons))


def _nvml() -> Any:
    import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]

    return pynvml


def full_mesh(links: Links, count: int) -> bool | None:
    """Whether every GPU has links to every other one: true for none or one; None where nobody could say."""
    if count < 2:
        return True
    if links.count is None:
        return None
    return all(links.count[i][j] > 0 for i, j in permutations(range(count), 2))


# ---------------------------------------------------------------- findings


def gpu_findings(devices: Sequence[CudaDevice], version: int, links: Links, env: dict[str, str]) -> list[Finding]:
    """What works on these GPUs and between them."""
    gpus = [describe(d) for d in devices]
    names = ", ".join(f"{g.name} ({g.arch}, {g.memory_bytes / 2**30:.0f} GiB, NUMA {g.numa})" for g in gpus)
    least, greatest = gpus[0].priorities
    found = [
        Finding("cuda", True, f"{names}; CUDA {version // 1000}.{version % 1000 // 10}"),
        Finding("stream priorities", least != greatest, f"{least} (least) to {greatest}"),
    ]
    pairs = list(permutations(range(len(devices)), 2))
    found.append(_pairs("gpu peer access", pairs, lambda i, j: _access(devices[i], devices[j])))
    found.append(_pairs("gpu peer atomics", pairs, lambda i, j: _atomics(devices[i], devices[j])))
    mesh = full_mesh(links, len(devices))
    if links.count is None:
        found.append(Finding("nvlink mesh", bool(mesh), links.source if len(devices) > 1 else "one GPU needs none"))
    else:
        rows = "; ".join(f"cuda:{i} {' '.join(map(str, row))}" for i, row in enumerate(links.count))
        found.append(Finding("nvlink mesh", bool(mesh), f"links from each GPU to each, by {links.source}: {rows}"))
    for kind in (ShareKind.FD, ShareKind.IPC):
        lacking = [f"cuda:{g.ordinal}" for g in gpus if kind not in g.shares]
        why = f"not on {', '.join(lacking)}" if lacking else "between processes, on every visible GPU"
        found.append(Finding(f"gpu memory by {kind.value}", not lacking, why))
    refused = {f"cuda:{g.ordinal}": g.fabric for g in gpus if g.fabric is not None}
    why = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
    found.append(Finding("gpu memory by fabric", not refused, why or "on every visible GPU"))
    vetoes = [v for v in MULTICAST_VETOES if env.get(v.partition("=")[0]) == v.partition("=")[2]]
    if vetoes:
        found.append(Finding("gpu multicast", False, f"forbidden here by {', '.join(vetoes)}"))
    else:
        able = all(g.multicast for g in gpus)
        said = "the devices say that they can; made only where it is asked for" if able else "not by these devices"
        found.append(Finding("gpu multicast", able, said))
    if env.get("CUDA_LAUNCH_BLOCKING") == "1":
        found.append(Finding("kernels that wait", False, "CUDA_LAUNCH_BLOCKING=1: their launches would not return"))
    return found


def _pairs(name: str, pairs: Sequence[tuple[int, int]], works: Callable[[int, int], bool]) -> Finding:
    if not pairs:
        return Finding(name, True, "one GPU")
    lacking = [f"cuda:{i} to cuda:{j}" for i, j in pairs if not works(i, j)]
    return Finding(name, not lacking, f"not from {', '.join(lacking)}" if lacking else "every GPU, every other one")


def _access(a: CudaDevice, b: CudaDevice) -> bool:
    return a.api.can_access_peer(a.handle, b.handle)


def _atomics(a: CudaDevice, b: CudaDevice) -> bool:
    return a.api.native_peer_atomics(a.handle, b.handle)


def gpu_report() -> list[Finding]:
    """All of it, for this process; one line that says why where there is no GPU."""
    try:
        devices, version = open_gpus()
    except PeertileError as error:
        return [Finding("cuda", False, f"{type(error).__name__}: {error}")]
    try:
        links = nvlinks([describe(d).uuid for d in devices])
        return gpu_findings(devices, version, links, dict(os.environ))
    except PeertileError as error:
        return [Finding("cuda", False, f"{type(error).__name__}: {error}")]
    finally:
        for device in devices:
            device.close()
