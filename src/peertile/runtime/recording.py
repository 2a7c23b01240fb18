"""What a capture collects, and what a graph is made of: nodes, storages, checks. No lazy operations here.

A recording takes no leases, since nothing runs: it notes what each node uses, and every replay leases that on
the stream it is launched on. It owns all of it: storages, modules, host buffers; a graph can be replayed when
every handle the user had is gone.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from peertile.errors import UsageError
from peertile.runtime.argument import Use
from peertile.runtime.driver import FaultRecord, GraphExecHandle, StreamHandle
from peertile.runtime.standing import Standing

if TYPE_CHECKING:
    from peertile.runtime.context import Maker
    from peertile.runtime.stream import Stream

__all__ = ["Recording", "merge_uses"]

_numbers = itertools.count(1)


class Recording:
    """One capture, and after `end` the graph that it made. Collected when no handle and no launch holds it.

    OPEN ──end──> READY ──collected──> destroyed, once no capture is open
      └────drop──> DROPPED
    """

    __slots__ = (
        "__weakref__",
        "checks",
        "handle",
        "keep",
        "makers",
        "name",
        "nodes",
        "replays",
        "standing",
        "stream",
        "uses",
    )

    def __init__(self, name: str | None, stream: Stream) -> None:
        self.name = name or f"graph {next(_numbers)}"
        self.stream = stream
        self.uses: list[Use] = []
        self.keep: list[Any] = []
        self.checks: list[Callable[[], object]] = []
        """What has to hold before each replay: that groups are whole."""
        self.makers: dict[int, Maker] = {}
        self.nodes = 0
        self.replays = 0
        self.handle: GraphExecHandle | None = None
        self.standing: Standing | None = None
        """The lease of its replays, on the stream of the last one."""

    def begin(self) -> None:
        """Record what `stream` gets from now on."""
        device = self.stream.device
        if self.stream.recording is not None:
            raise UsageError(
                f"capture: {self.stream.name} is being captured for {self.stream.recording.name}; "
                "end that capture first, or capture on another stream"
            )
        device.driver.begin_capture(self.stream.handle)
        self.stream.recording = self
        device.open_captures += 1

    def end(self) -> None:
        """Stop recording and make the graph."""
        driver = self.stream.device.driver
        self.handle = driver.instantiate(self._stop())
        self.uses = merge_uses(self.uses)

    def drop(self) -> None:
        """Stop recording after an error; nothing was run and nothing stays."""
        self._stop()

    def _stop(self) -> Any:
        device = self.stream.device
        self.stream.recording = None
        device.open_captures -= 1
        try:
            return device.driver.end_capture(self.stream.handle)
        finally:
            device.drain()

    def standing_on(self, stream: Stream) -> Standing:
        """The lease that replays on `stream` share: a graph uses hundreds of ranges, and entering and leaving the
        claims of each would take longer than many a replay."""
        standing = self.standing
        if standing is None or standing.lease.stream is not stream:
            # Uses of its own: those of tensors would be taken over by any launch that names the same tensor.
            uses = [use.again() for use in self.uses]
            standing = self.standing = Standing(self.name, stream, uses)
        return standing

    def enqueue(self, stream: StreamHandle, handle: GraphExecHandle, name: str) -> int:
        """A replay of its graph; its number in the stream."""
        return self.stream.device.driver.launch_graph(stream, handle, name=name).sequence

    def explain(self, record: FaultRecord) -> Any:
        """The error of the node that failed; None where the node has nothing to say."""
        maker = self.makers.get(record.node)
        return None if maker is None else maker[0](record, *maker[1:])

    def __del__(self) -> None:
        # A collection may happen inside another capture, whose driver must not see this call: it is put off.
        with contextlib.suppress(AttributeError, TypeError):
            if self.handle is not None:
                self.stream.device.discard("destroy_graph", self.handle)


def merge_uses(uses: list[Use]) -> list[Use]:
    """The same bytes used in the same way once: a replay takes as few leases as it can."""
    merged: dict[tuple[int, int, int, bool, bool], Use] = {}
    for use in uses:
        key = (id(use.storage), use.start, use.end, use.lifetime_only, use.channel)
        old = merged.get(key)
        if old is None:
            merged[key] = use
        elif (use.writes and not old.writes) or (use.exclusive and not old.exclusive):
            merged[key] = Use(
                use.storage,
                use.start,
                use.end,
                use.writes or old.writes,
                use.exclusive or old.exclusive,
                use.lifetime_only,
                use.channel,
                use.devices,
                (*use.exempt, *old.exempt),
            )
    return list(merged.values())
