"""Which stream an operation goes to when none is named. Policies choose; they never wait and enqueue nothing."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Protocol

from peertile.errors import ArgumentError

if TYPE_CHECKING:
    from peertile.runtime.device import Device
    from peertile.runtime.op import DeviceOp
    from peertile.runtime.stream import Stream

__all__ = ["PerDevice", "RoundRobin", "SchedulingPolicy", "SingleStream"]

DEFAULT_STREAMS = 4


class SchedulingPolicy(Protocol):
    """Anything with `stream_for(op)`. Called once for an execution, from the thread that executes."""

    def stream_for(self, op: DeviceOp[Any]) -> Stream:
        """The stream that `op` runs on."""


class RoundRobin:
    """Streams in turn, so that independent operations overlap: what a device does by default, with four.

    An operation that uses a channel goes to the channel's stream, and one that touches what is still in use on
    another stream goes there: it would have to be ordered behind it anyway.

    >>> import peertile as pt
    >>> policy = pt.RoundRobin(pt.current_device(), streams=2)
    >>> pt.op.ones((2,), pt.f32).schedule(policy).wait().numpy().tolist()
    [1.0, 1.0]
    """

    __slots__ = ("_turns", "device", "priority", "streams")

    def __init__(self, device: Device, streams: int = DEFAULT_STREAMS, *, priority: int = 0) -> None:
        if streams < 1:
            raise ArgumentError(f"streams: expected an integer >= 1, got {streams}")
        least, greatest = device.capabilities.stream_priorities
        if not min(least, greatest) <= priority <= max(least, greatest):
            raise ArgumentError(
                f"priority: expected {min(least, greatest)} to {max(least, greatest)} on {device.name}, got {priority}"
            )
        self.device = device
        self.priority = priority
        self.streams = tuple(device.stream(f"round-robin stream {k}", priority) for k in range(streams))
        self._turns = itertools.count()  # next() on it is atomic

    def stream_for(self, op: DeviceOp[Any]) -> Stream:
        """The stream that holds what `op` needs, or else the next in turn."""
        preferred = op.preferred_stream()
        if preferred is not None:
            return preferred
        return self.streams[next(self._turns) % len(self.streams)]


class SingleStream:
    """One stream for everything: a new one, or an existing one.

    >>> import peertile as pt
    >>> policy = pt.SingleStream(pt.current_device().stream("mine"))
    >>> pt.op.ones((2,), pt.f32).schedule(policy).wait().shape
    (2,)
    """

    __slots__ = ("stream",)

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def stream_for(self, op: DeviceOp[Any]) -> Stream:
        """The one stream."""
        return self.stream


class PerDevice:
    """A policy for each device, `default` of a device where none is given.

    >>> import peertile as pt
    >>> device = pt.current_device()
    >>> policy = pt.PerDevice({device: pt.SingleStream(device.stream("mine"))})
    >>> pt.op.ones((2,), pt.f32).schedule(policy).wait().shape
    (2,)
    """

    __slots__ = ("policies",)

    def __init__(self, policies: dict[Device, SchedulingPolicy]) -> None:
        self.policies = dict(policies)

    def stream_for(self, op: DeviceOp[Any]) -> Stream:
        """What the policy of the operation's device says."""
        return self.policies.get(op.device, op.device.policy).stream_for(op)
