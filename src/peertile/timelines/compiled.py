"""Which compiler a device's kernels come from while it is recorded: one that puts marks into them. Compiles nothing."""

from __future__ import annotations

import importlib
from typing import Any, Final

from peertile.runtime.device import Device
from peertile.timelines.upper import renew

__all__ = ["compile_with_marks", "compile_without_marks"]

_NOT_OURS: Final = "timeline_keeps_compiler"


def compile_with_marks(device: Device) -> None:
    """From here on. A device that has a compiler of its own keeps it: its kernels make no marks."""
    if device.compiler is None:
        direct: Any = importlib.import_module("peertile.direct")
        device.compiler = direct.marking(device.target)
        _renewed(device)
    else:
        device.driver.__dict__[_NOT_OURS] = True


def compile_without_marks(device: Device) -> None:
    """As before."""
    if not device.driver.__dict__.pop(_NOT_OURS, False):
        device.compiler = None
        _renewed(device)


def _renewed(device: Device) -> None:
    if device.is_closed:
        return
    for tell in renew:
        tell(device)
