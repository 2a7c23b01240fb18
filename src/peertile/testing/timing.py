"""How long operations take on their device, several candidates beside each other, on one rank or on all of a group.

Times are those of the device's own events around the work, so that building and enqueueing it count only where the
device waits for them. Nothing is asserted about a time here, and nothing is kept: figures of records are in
`measure.py`.
"""

from __future__ import annotations

import statistics
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from peertile import op
from peertile.comm.group import Group
from peertile.dtypes import u8
from peertile.errors import ArgumentError
from peertile.runtime.checks import check_integer
from peertile.runtime.op import DeviceOp
from peertile.runtime.registry import current_device
from peertile.runtime.stream import Stream

__all__ = ["Timing", "time_on_device"]

Candidate = Callable[[], DeviceOp[Any]]


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of a call in each run, in the order of the runs; over a group those of the slowest rank.

    >>> ours, theirs = Timing((1.0, 2.0, 1.5)), Timing((2.0, 3.0, 3.0))
    >>> ours.median, ours.best, ours.worst
    (1.5, 1.0, 2.0)
    >>> ours.speedup_over(theirs)
    2.0
    """

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Of the runs."""
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        """The shortest run."""
        return min(self.seconds)

    @property
    def worst(self) -> float:
        """The longest run."""
        return max(self.seconds)

    def speedup_over(self, other: Timing) -> float:
        """Median over the pairs of runs of other / own: above 1, this one is faster. Runs of one number lie side by
        side in time, so that what disturbs one mostly disturbs its pair, too."""
        if len(self.seconds) != len(other.seconds):
            raise ArgumentError(
                f"speedup_over: other: expected {len(self.seconds)} runs, as here, got {len(other.seconds)}; "
                "time both in one call"
            )
        return statistics.median(b / a for a, b in zip(self.seconds, other.seconds, strict=True))


def time_on_device(
    candidates: Mapping[str, Candidate],
    *,
    stream: Stream | None = None,
    group: Group | None = None,
    runs: int = 21,
    warmup: int = 3,
    calls: int = 1,
    flush_bytes: int = 0,
) -> dict[str, Timing]:
    """Time each candidate: a function that makes the operation to be timed, a new one at each call.

    A round runs every candidate once, in turns; there are `warmup` rounds that do not count and `runs` that do. A run
    enqueues `calls` operations on `stream` (a new one by default) between two events. `flush_bytes`: so many bytes are
    written on the device in front of each run, so that caches of up to that size hold nothing of the candidate's.
    With a `group`, collective: ranks begin each run together, and a run took what it took on the slowest of them.

    >>> import peertile as pt
    >>> x = pt.zeros((1 << 16,), pt.f32)
    >>> found = time_on_device({"fill": lambda: pt.op.fill(x, 1)}, runs=5)
    >>> 0 < found["fill"].best <= found["fill"].median
    True
    """
    for role, value, least in (("runs", runs, 1), ("warmup", warmup, 0), ("calls", calls, 1)):
        check_integer(f"time_on_device: {role}", value, least)
    check_integer("time_on_device: flush_bytes", flush_bytes, 0)
    device = current_device() if stream is None else stream.device
    where = device.stream("timing") if stream is None else stream
    spoilt = op.empty((flush_bytes,), u8, device=device).sync_on(where) if flush_bytes else None
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(warmup + runs):
        for name, candidate in candidates.items():
            if spoilt is not None:
                op.fill(spoilt, turn % 256).submit(where)
            made = [_made(name, candidate) for _ in range(calls)]
            where.sync()
            if group is not None:
                group.barrier("time_on_device")
            start = where.record()
            for each in made:
                each.submit(where)
            end = where.record()
            where.sync()
            if turn >= warmup:
                seconds[name].append(device.driver.elapsed_ns(start.handle, end.handle) / calls / 1e9)
    if group is not None:
        seconds = _of_the_slowest(seconds, group)
    return {name: Timing(tuple(found)) for name, found in seconds.items()}


def _made(name: str, candidate: Candidate) -> DeviceOp[Any]:
    made = candidate()
    if not isinstance(made, DeviceOp):
        raise ArgumentError(
            f"time_on_device: candidate {name!r}: expected it to make an operation, got {type(made).__name__}; leave "
            "sync() to the timing"
        )
    return made


def _of_the_slowest(seconds: dict[str, list[float]], group: Group) -> dict[str, list[float]]:
    """Each run as the slowest rank saw it; ranks that timed something else are told."""
    group.agree(tuple((name, len(found)) for name, found in seconds.items()), "the candidates of time_on_device")
    flat = [s for found in seconds.values() for s in found]
    form = f"<{len(flat)}d"
    said = [struct.unpack(form, payload) for payload in group.exchange(struct.pack(form, *flat), "time_on_device")]
    slowest = iter([max(each) for each in zip(*said, strict=True)])
    return {name: [next(slowest) for _ in found] for name, found in seconds.items()}
