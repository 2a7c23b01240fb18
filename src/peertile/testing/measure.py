"""Timing helpers of the benchmarks: interleaved candidates, medians, and the machine's description.

A figure is never quoted alone: it comes with a peer timed in the same run, or with a limit. Candidates
are interleaved call by call, so that a change of clock speed or a noisy neighbour hits all alike.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Figure", "interleaved", "machine"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number. `limit` is what it must not exceed; `peer` what it is compared with.

    `ratio` is peer time over own time (above 1: faster than the peer) where there is a peer, else limit
    over own time (above 1: inside the limit).
    """

    name: str
    value: float
    unit: str
    limit: float | None = None
    peer: str | None = None
    peer_value: float | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        other = self.peer_value if self.peer_value is not None else self.limit
        return None if other is None or not self.value else other / self.value

    @property
    def holds(self) -> bool | None:
        """Whether the limit is kept; None without one."""
        return None if self.limit is None else self.value <= self.limit

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio, "holds": self.holds}


def interleaved(
    candidates: Mapping[str, Callable[[], object]], *, repeats: int, warmup: int = 3
) -> dict[str, float]:
    """Median seconds of each candidate over `repeats` rounds, one call of each per round."""
    for call in candidates.values():
        for _ in range(warmup):
            call()
    times: dict[str, list[float]] = {name: [] for name in candidates}
    clock = time.perf_counter
    for _ in range(repeats):
        for name, call in candidates.items():
            start = clock()
            call()
            times[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def machine() -> dict[str, Any]:
    """What a record says about the machine: processor, cores, system, Python and load."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
        model = names[0] if names else model
    except OSError:
        pass
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": sys.version.split()[0],
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }
