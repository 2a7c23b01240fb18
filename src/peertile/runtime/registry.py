"""The devices of this process, and which one the calling thread works on. The only process-wide state.

Ranks that are threads each have a device of their own (`use_device`); everything else shares one device of the kind
that PEERTILE_DEVICE names (cpu by default), opened at its first use: on GPUs the one that belongs to the process's
rank (`place_rank`), else the first.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from typing import Any

from peertile.config import config
from peertile.errors import ArgumentError, UnsupportedError
from peertile.runtime.checks import check_integer
from peertile.runtime.device import Device
from peertile.runtime.driver import Driver, DriverKind
from peertile.runtime.drivers.cpu import CpuDriver

__all__ = ["current_device", "open_device", "open_rank_device", "place_rank", "use_device"]


class _Registry:
    """`lock` guards the table; opening a device happens under it, so that a device is opened once."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.devices: dict[tuple[DriverKind, int], Device] = {}
        self.local = threading.local()
        self.ordinal = 0
        """Which device of its kind a thread works on that names none."""


_registry = _Registry()


@functools.cache
def _cuda() -> Driver:
    """The cuda driver, loaded at its first use: a program for the cpu must not pay for it, nor need its packages. In a
    rehearsal, what stands in for it."""
    rehearse = config().rehearse
    if rehearse is not None:
        stand_in: Any = importlib.import_module("peertile.runtime.drivers.rehearsal")
        rehearsal: Driver = stand_in.RehearsalDriver(rehearse)
        return rehearsal
    if sys.platform != "linux":  # its packages would not help, and some of them install
        raise UnsupportedError(
            f"cuda: expected Linux, as NVIDIA's driver runs on no other system that peertile does, got {sys.platform}; "
            "programs for GPUs can be checked here (peertile check)"
        )
    module: Any = importlib.import_module("peertile.runtime.drivers.cuda")
    driver: Driver = module.CudaDriver()
    return driver


def open_device(kind: DriverKind = DriverKind.CPU, ordinal: int = 0) -> Device:
    """A new device object of this process; its streams and leases are its own.

    `pt.use_device(pt.open_device(pt.DriverKind.CUDA))` makes the calling thread work on the first GPU.
    UnsupportedError, saying what to install, where there is none.

    >>> import peertile as pt
    >>> pt.open_device(pt.DriverKind.CPU).name
    'cpu:0'
    """
    if not isinstance(kind, DriverKind):
        names = ", ".join(f"DriverKind.{member.name}" for member in (DriverKind.CPU, DriverKind.CUDA))
        raise ArgumentError(f"open_device(kind): expected one of {names}, got {kind!r}")
    check_integer("open_device(ordinal)", ordinal)
    if kind is DriverKind.CUDA:
        return _opened(Device(_cuda().open(ordinal)))
    if kind is not DriverKind.CPU:
        raise UnsupportedError(f"device: {kind.value} has no devices to open; use cpu or cuda")
    return _opened(Device(CpuDriver().open(ordinal)))


def _opened(device: Device) -> Device:
    if config().timeline is not None:
        # By name: recording stands on devices, and a program that is not recorded must not pay for it.
        recording: Any = importlib.import_module("peertile.timelines.timeline")
        recording.record_process(device)
    return device


def _ordinal_of(local_rank: int) -> int:
    """The GPU of a rank: its number on this host among the GPUs that the process may see, which CUDA_VISIBLE_DEVICES
    bounds and orders; around again where there are more ranks than GPUs. Processors are one device."""
    if config().device != DriverKind.CUDA.value:
        return 0
    return local_rank % max(_cuda().device_count(), 1)


def place_rank(local_rank: int) -> None:
    """From now on this process works, where a thread names no device, on the device of that rank of its host."""
    _registry.ordinal = _ordinal_of(local_rank)


def open_rank_device(rank: int) -> Device:
    """A new device object for a rank that is a thread of this process."""
    return open_device(DriverKind(config().device), _ordinal_of(rank))


def current_device() -> Device:
    """The device that the calling thread works on: the one given to `use_device`, else the first of PEERTILE_DEVICE."""
    device: Device | None = getattr(_registry.local, "device", None)
    if device is not None:
        return device
    key = (DriverKind(config().device), _registry.ordinal)
    with _registry.lock:
        if key not in _registry.devices:
            _registry.devices[key] = open_device(*key)
        return _registry.devices[key]


def use_device(device: Device | None) -> None:
    """Make `device` the one that the calling thread works on; None goes back to the process's default."""
    if device is not None and not isinstance(device, Device):
        raise ArgumentError(f"use_device: expected a device or None, got {device!r}; make one with pt.open_device")
    _registry.local.device = device
