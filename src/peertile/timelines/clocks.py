"""Times of a device by the host's clock. A GPU has clocks of its own: each is compared with the host's by pairs of
readings, and how far off the answer may be is known.
"""

from __future__ import annotations

import time
from typing import Any, Final

from peertile.runtime.driver import DriverDevice, Status

__all__ = ["HOSTS_CLOCK", "Clock"]

HOSTS_CLOCK: Final = "the host's"
_RENEW_NS: Final = 1_000_000_000
"""Events are compared with a base that is at most so old: the distance is a float of milliseconds."""
_READINGS: Final = 32


class Clock:
    """The clocks of one device."""

    def __init__(self, driver: DriverDevice) -> None:
        self._driver = driver
        self._pairs: list[tuple[int, int]] = []
        """(device, host) in ns: the first comparison and the last."""
        self.error_ns = 0
        self._base: tuple[Any, int] | None = None
        self._stream: Any = None
        self._is_hosts = driver.capabilities.host_addressable

    def describe(self) -> str:
        """For people."""
        if self._is_hosts:
            return HOSTS_CLOCK
        if not self._pairs:
            return "the device's, which was too busy to be compared with the host's"
        return f"the device's, within {self.error_ns / 1000:.1f} us of the host's"

    def _between(self, readings: list[tuple[int, int, int]]) -> int:
        """How far the host's clock is ahead of the device's, from readings of the one between two of the other: what
        all of them allow, and how far off that may be goes to `error_ns`."""
        least = max(before - device for before, device, _ in readings)
        most = min(after - device for _, device, after in readings)
        self.error_ns = max(self.error_ns, abs(most - least) // 2 + 1)
        return (least + most) // 2

    # ---------------------------------------------------------------- marks

    def compare(self) -> None:
        """Read both clocks."""
        readings: list[tuple[int, int, int]] = []
        for _ in range(_READINGS):
            read = self._driver.read_clock()
            if read is None:
                break
            readings.append(read)
        if readings:
            device = readings[0][1]
            pair = device, device + self._between(readings)
            self._pairs = [pair] if not self._pairs else [self._pairs[0], pair]

    def to_host(self, ns: int) -> int:
        """A time of the device, by the host's clock."""
        if not self._pairs:
            return ns
        (d0, h0), (d1, h1) = self._pairs[0], self._pairs[-1]
        if d1 - d0 < _RENEW_NS:  # too close for how fast one goes
            return ns - d0 + h0
        return h0 + (ns - d0) * (h1 - h0) // (d1 - d0)

    # ---------------------------------------------------------------- events of the driver

    def renew(self) -> None:
        """A base for events to come, where there is need of one."""
        if self._is_hosts:
            return
        if self._base is None or time.monotonic_ns() - self._base[1] > _RENEW_NS:
            self._new_base()

    def _new_base(self) -> None:
        driver = self._driver
        if self._stream is None:
            self._stream = driver.create_stream()
        events, times = [], []
        for _ in range(1 if self._base is not None else _READINGS):
            event = driver.create_event()
            before = time.monotonic_ns()
            driver.record_event(self._stream, event)
            driver.wait(driver.event_ticket(event))
            events.append(event)
            times.append((before, time.monotonic_ns()))
        base, *others = events
        if self._base is None:
            readings = [
                (before, driver.elapsed_ns(base, event) if event is not base else 0, after)
                for event, (before, after) in zip(events, times, strict=True)
            ]
            self._base = base, self._between(readings)
        else:
            old, at = self._base
            self._base = base, at + driver.elapsed_ns(old, base)
            others = [old]
        for event in others:
            driver.destroy_event(event)

    def close(self) -> None:
        """Give back what the comparisons took of the driver."""
        if self._base is not None:
            self._driver.destroy_event(self._base[0])
        if self._stream is not None:
            self._driver.destroy_stream(self._stream)
        self._base = self._stream = None

    def event_ns(self, event: Any) -> int | None:
        """When its last record ran; None if it has not."""
        driver = self._driver
        if self._is_hosts:
            return driver.event_ns(event)
        if driver.query(driver.event_ticket(event)) is Status.PENDING:
            return None
        if self._base is None:
            self._new_base()
        assert self._base is not None
        base, at = self._base
        return at + driver.elapsed_ns(base, event)
