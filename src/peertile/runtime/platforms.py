"""What peertile runs on: CPython on 64-bit Linux and macOS, on x86 and ARM. Loaded first; elsewhere that is an
ImportError with a sentence, in place of whatever would be missing first.
"""

from __future__ import annotations

import os
import sys

__all__ = ["refusal"]

_SYSTEMS = ("linux", "darwin")
_MACHINES = ("x86_64", "amd64", "aarch64", "arm64")


def refusal(system: str, machine: str, bits: int, python: str, version: tuple[int, int]) -> str | None:
    """Why peertile does not run there; None where it does."""
    is_python = python == "cpython" and version >= (3, 11)
    if is_python and system in _SYSTEMS and machine.lower() in _MACHINES and bits == 64:
        return None
    return (
        "peertile: expected CPython 3.11 or newer on Linux or macOS, on a 64-bit x86 or ARM processor, "
        f"got {python} {version[0]}.{version[1]} of {bits} bits on {system}, {machine or 'an unknown processor'}"
    )


def _here() -> str | None:
    # Not by `platform`, which takes a millisecond to import and on some systems starts a process to ask.
    machine = os.uname().machine if hasattr(os, "uname") else os.environ.get("PROCESSOR_ARCHITECTURE", "")
    bits = 64 if sys.maxsize > 1 << 32 else 32
    return refusal(sys.platform, machine, bits, sys.implementation.name, sys.version_info[:2])


if (_why := _here()) is not None:
    raise ImportError(_why)
