"""Timing helpers of the benchmarks: interleaved candidates, medians, and the machine's description.

A figure is never quoted alone: it comes with a peer timed in the same run, or with a limit. Candidates
are interleaved call by call, so that a change of clock speed or a noisy neighbour hits all alike.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Figure", "interleaved", "machine"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number, as a record keeps it (benchmarks/records/README.md).

    `limit` is what it must not exceed; `baseline` names what it was interleaved with. `ratio` is the
    baseline's time over ours where there is one (above 1: faster), else the limit over ours (above 1: kept).
    """

    name: str
    median: float
    unit: str
    repetitions: int
    limit: float | None = None
    baseline: str | None = None
    baseline_median: float | None = None

    @property
    def ratio(self) -> float | None:
        """How much better than the baseline or the limit; None without either."""
        other = self.limit if self.baseline_median is None else self.baseline_median
        return None if other is None or not self.median else other / self.median

    @property
    def holds(self) -> bool | None:
        """Whether the limit is kept; None without one."""
        return None if self.limit is None else self.median <= self.limit

    def as_dict(self) -> dict[str, Any]:
        """The figure of a record."""
        found: dict[str, Any] = {
            "name": self.name,
            "unit": self.unit,
            "median": round(self.median, 4),
            "repetitions": self.repetitions,
        }
        if self.baseline is not None and self.baseline_median is not None:
            found["baseline"] = {"name": self.baseline, "median": round(self.baseline_median, 4)}
        if self.limit is not None:
            found["limit"] = round(self.limit, 4)
            found["met"] = self.holds
        if self.ratio is not None:
            found["ratio"] = round(self.ratio, 3)
        return found


def interleaved(
    candidates: Mapping[str, Callable[[], object]], *, repeats: int, warmup: int = 3, settle_s: float = 0.0
) -> dict[str, float]:
    """Median seconds of each candidate over `repeats` rounds, one timed call of each per round.

    `settle_s` > 0 for candidates with threads of their own: pools of other libraries spin for a while after
    a call (libgomp about 10 ms, OpenBLAS 100 ms) and take the cores from whoever comes next, so each timed call
    waits that long and follows an untimed one.
    """
    for call in candidates.values():
        for _ in range(warmup):
            call()
    times: dict[str, list[float]] = {name: [] for name in candidates}
    clock = time.perf_counter
    for _ in range(repeats):
        for name, call in candidates.items():
            if settle_s:
                time.sleep(settle_s)
                call()
            start = clock()
            call()
            times[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def machine() -> dict[str, Any]:
    """What a record says about the machine."""
    cpu = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
        cpu = names[0] if names else cpu
    except OSError:
        pass
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": [],
        "os": platform.system(),
        "kernel": platform.release(),
        "load": round(os.getloadavg()[0], 2),
    }
