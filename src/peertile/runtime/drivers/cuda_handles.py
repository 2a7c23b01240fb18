"""Checks of handles and arguments that several functions of the cuda driver share."""

from __future__ import annotations

from typing import TypeVar

from peertile.errors import ArgumentError, UsageError
from peertile.runtime.driver import Ticket
from peertile.runtime.drivers.cuda_stream import CudaStream

__all__ = ["as_own", "check_word", "ran"]

_T = TypeVar("_T")


def as_own(handle: object, cls: type[_T], role: str) -> _T:
    if not isinstance(handle, cls):
        raise ArgumentError(f"{role}: expected a handle of the cuda driver, got {type(handle).__name__}")
    return handle


def check_word(address: int, width: int) -> None:
    if width not in (32, 64):
        raise ArgumentError(f"width: expected 32 or 64 bits, got {width}")
    if address % (width // 8):
        raise ArgumentError(f"address: expected one aligned to {width // 8} bytes, got {address:#x}")


def ran(ticket: Ticket) -> CudaStream:
    """The stream of a ticket that is not a captured operation's."""
    stream = as_own(ticket.stream, CudaStream, "ticket")
    if ticket.sequence < 0:
        raise UsageError(f"ticket: {ticket.name} was captured and does not run by itself; launch the graph")
    return stream
