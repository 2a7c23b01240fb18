"""Recording operations one by one into a graph. What a graph is, and recording a whole operation: `op.py`."""

from __future__ import annotations

from typing import TypeVar

from peertile.errors import UsageError
from peertile.runtime.context import CAPTURING, ExecutionContext, execution, outside_execution
from peertile.runtime.op import DeviceOp, Graph
from peertile.runtime.recording import Recording
from peertile.runtime.stream import Stream

__all__ = ["CaptureScope", "capture"]

U = TypeVar("U")


class CaptureScope:
    """Operations recorded one by one: `with pt.capture(stream) as scope: y = scope.record(op)`, then `scope.graph`.

    The thread's execution lock is held inside: what is not recorded cannot be run. An exception ends the capture.
    """

    __slots__ = ("_before", "_context", "_graph", "_recording")

    def __init__(self, stream: Stream, name: str | None = None) -> None:
        self._recording = Recording(name, stream)
        self._context: ExecutionContext | None = None
        self._graph: Graph[None] | None = None
        self._before: str | None = None

    def record(self, op: DeviceOp[U]) -> U:
        """Add an operation; the result is its handles, unwritten until the first launch."""
        if self._context is None:
            raise UsageError(f"{self._recording.name}: its capture is not open; record inside the with block")
        return op._enter(self._context)

    @property
    def graph(self) -> Graph[None]:
        """The recorded graph, once the scope has ended."""
        if self._graph is None:
            raise UsageError(f"{self._recording.name}: expected a capture that has ended; leave the with block first")
        return self._graph

    def __enter__(self) -> CaptureScope:
        outside_execution("capture")
        self._recording.begin()
        try:
            self._context = ExecutionContext(
                self._recording.name, self._recording.stream, on_caller=False, recording=self._recording
            )
        except BaseException:
            self._recording.drop()
            raise
        self._before, execution.inside = execution.inside, f"{CAPTURING}{self._recording.name}"
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        execution.inside = self._before
        self._context = None
        if kind is not None:
            self._recording.drop()
            return
        self._recording.end()
        self._graph = Graph(self._recording, None)


def capture(stream: Stream, name: str | None = None) -> CaptureScope:
    """Record operations on `stream` into a graph, one by one.

    >>> import peertile as pt
    >>> stream = pt.current_device().stream("recorded")
    >>> x = pt.zeros((2,), pt.f32)
    >>> with pt.capture(stream) as scope:
    ...     scope.record(pt.op.fill(x, 3))
    >>> scope.graph.launch().sync_on(stream)
    >>> x.numpy().tolist()
    [3.0, 3.0]
    """
    return CaptureScope(stream, name)
