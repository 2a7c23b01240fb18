"""How a program of the evaluator ends early: a fault, with what the report needs. No behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from peertile.ir.core import Op
from peertile.source import Loc

__all__ = ["Fault", "FaultKind", "ProgramFault"]


class FaultKind(Enum):
    """The kinds of the native fault record, but for `aborted`, and what only an evaluator can tell."""

    ASSERT = "assert"
    BOUNDS = "bounds"
    SIGNATURE = "signature"
    DEADLOCK = "deadlock"
    """Nobody is left who could satisfy the wait."""
    STEP_LIMIT = "step_limit"
    """The run was longer than its bound: the evaluator's WaitTimeout."""


class ProgramFault(Exception):
    """Raised inside a program; the scheduler turns it into a `Fault`."""

    def __init__(self, kind: FaultKind, message: str, op: Op, got: int | None = None, limit: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.op = op
        self.got = got
        self.limit = limit


@dataclass(frozen=True, slots=True)
class Fault:
    """What went wrong, where. `got` and `limit` are what a wait saw and expected, or a check recorded."""

    kind: FaultKind
    message: str
    rank: int
    program: int
    loc: Loc | None = None
    got: int | None = None
    limit: int | None = None
    slot: int | None = None
