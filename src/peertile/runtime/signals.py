"""Host signals on a stream: a stream writes a word, or waits for one. All checks come before the driver.

The word is ordered by itself (release and acquire at system scope), so other streams may use it meanwhile: it is
kept alive, and not leased against other accesses. Every wait has a deadline; at its end the driver lets the
stream go on as failed.
"""

from __future__ import annotations

from dataclasses import replace

from peertile.config import config
from peertile.errors import ArgumentError, PeertileError, WaitTimeout
from peertile.memory_model import Cmp
from peertile.runtime.argument import Use
from peertile.runtime.context import ExecutionContext, explain
from peertile.runtime.driver import FaultKind, FaultRecord
from peertile.runtime.op import DeviceOp, FunctionOp
from peertile.runtime.tensor import Tensor

__all__ = ["set_signal_op", "wait_eq_op"]

_WORDS = {32: ("i32", "u32"), 64: ("i64", "u64")}


def _word_of(name: str, tensor: Tensor, width: int) -> Use:
    """How the word is used; ArgumentError unless the tensor has one that a stream can use."""
    if not isinstance(tensor, Tensor):
        raise ArgumentError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if width not in _WORDS:
        raise ArgumentError(f"{name}: expected a width of 32 or 64 bits, got {width}")
    if tensor.dtype.name not in _WORDS[width]:
        raise ArgumentError(f"{name}: expected a tensor of {' or '.join(_WORDS[width])}, got {tensor.dtype}")
    if tensor.size == 0:
        raise ArgumentError(f"{name}: expected a tensor with at least one element, got shape {tensor.shape}")
    if not tensor.is_contiguous:
        raise ArgumentError(f"{name}: expected a contiguous tensor, got strides {tensor.strides}")
    if width not in tensor.device.capabilities.value_widths:
        raise ArgumentError(f"{name}: {tensor.device.name} has no {width}-bit words on streams")
    return Use(tensor.storage, tensor.offset, tensor.offset + width // 8, writes=True, lifetime_only=True)


def _check_value(name: str, number: int, width: int) -> None:
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 1 << width:
        raise ArgumentError(f"{name}: expected an unsigned {width}-bit value, got {number!r}")


def set_signal_op(tensor: Tensor, number: int) -> DeviceOp[None]:
    """A stream stores a 32-bit word."""
    use = _word_of("set_signal", tensor, 32)
    _check_value("set_signal", number, 32)

    def run(context: ExecutionContext) -> None:
        lease = context.lease((use,), "set_signal")
        ticket = context.driver.write_value(context.handle, tensor.address, number, 32, name="set_signal")
        context.note(ticket, lease)

    return FunctionOp("set_signal", tensor.device, run, is_unit=True)


def wait_eq_op(tensor: Tensor, number: int, *, width: int, timeout_s: float | None, cmp: Cmp) -> DeviceOp[None]:
    """A stream waits for a word."""
    use = _word_of("wait_eq", tensor, width)
    _check_value("wait_eq", number, width)
    bound_s = config().wait_timeout_s if timeout_s is None else timeout_s
    if not bound_s > 0:
        raise ArgumentError(f"wait_eq: expected a timeout_s > 0, got {timeout_s!r}")

    def run(context: ExecutionContext) -> None:
        lease = context.lease((use,), "wait_eq")
        ticket = context.driver.wait_value(
            context.handle, tensor.address, number, width, cmp, timeout_ns=int(bound_s * 1e9), name="wait_eq"
        )
        context.note(ticket, lease, (_explain, bound_s, width))

    return FunctionOp("wait_eq", tensor.device, run, is_unit=True)


def _explain(record: FaultRecord, bound_s: float, width: int) -> PeertileError:
    if record.kind is not FaultKind.WAIT_TIMEOUT:
        return explain(record)
    mask = (1 << width) - 1
    record = replace(record, limit=record.limit & mask, got=record.got & mask)
    return WaitTimeout(
        f"wait_eq: nothing came within {bound_s:g} s; {record.waited}",
        op="wait_eq",
        expected=record.limit,
        seen=record.got,
    )
