"""Every exception that peertile raises, and nothing else: no logic beyond the text of a message.

The tree (each line is a subclass of the line it hangs from)::

    PeertileError
    ├── CompileError            a kernel cannot be compiled; carries the source line and a caret
    │   └── VerifyError         tile IR breaks a rule of the verifier
    ├── ArgumentError           a host call got a wrong argument (also a ValueError)
    ├── LaunchError             a launch was refused before anything ran
    ├── LeaseError              storage is in use by another operation
    ├── SymmetryError           ranks disagree about a collective call
    ├── UnsupportedError        this target or platform cannot do it
    ├── AllocationError         memory cannot be had (also a MemoryError)
    ├── UsageError              an object was used in a state that forbids it (used twice, closed)
    ├── DeviceFault             an operation failed on a device
    │   ├── WaitTimeout         a bounded wait ended (also a TimeoutError)
    │   ├── KernelAssert        `T.assert_` failed
    │   ├── OutOfBounds         an index left its view
    │   ├── PeerFailed          another rank died or failed
    │   └── SignatureMismatch   two ranks ran different kernels on one mailbox
    └── InternalError           a bug in peertile, never the caller's fault

Every message states: the role, what was expected, what was got, where, and what to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from peertile.source import Loc

__all__ = [
    "AllocationError",
    "ArgumentError",
    "CompileError",
    "DeviceFault",
    "InternalError",
    "KernelAssert",
    "LaunchError",
    "LeaseError",
    "OutOfBounds",
    "PeerFailed",
    "PeertileError",
    "SignatureMismatch",
    "SymmetryError",
    "UnsupportedError",
    "UsageError",
    "VerifyError",
    "WaitTimeout",
]


class PeertileError(Exception):
    """Base of every exception that peertile raises on purpose."""


class CompileError(PeertileError):
    """A kernel cannot be compiled.

    `message` is the sentence without the source excerpt; `loc` the place it speaks of; `notes` are
    further places, each with its own sentence.
    """

    def __init__(self, message: str, loc: Loc | None = None, notes: tuple[tuple[str, Loc | None], ...] = ()) -> None:
        self.message = message
        self.loc = loc
        self.notes = notes
        super().__init__(message)

    def __str__(self) -> str:
        parts = [self.message if self.loc is None else self.loc.render(self.message)]
        parts += [text if loc is None else loc.render(text) for text, loc in self.notes]
        return "\n".join(parts)


class VerifyError(CompileError):
    """Tile IR breaks a rule: after a pass this is our bug, after parsing text it is the text's."""


class ArgumentError(PeertileError, ValueError):
    """A host function got a wrong argument; nothing was changed."""


class LaunchError(PeertileError):
    """A launch was refused before anything ran."""


class LeaseError(PeertileError):
    """Storage is leased to another operation; the message names both."""


class SymmetryError(PeertileError):
    """Ranks disagree about a collective call; raised on every rank."""


class UnsupportedError(PeertileError):
    """This target, platform or version cannot do what was asked; the message names the capability."""


class AllocationError(PeertileError, MemoryError):
    """Memory cannot be had; the message says how much was asked, used and free."""


class UsageError(PeertileError):
    """An object was used in a state that forbids it: a spent op, a closed heap."""


class InternalError(PeertileError):
    """A bug in peertile. Please report it with the text."""


@dataclass(frozen=True, slots=True)
class FaultPlace:
    """Where on a device something went wrong; unknown parts are None."""

    rank: int | None = None
    program: int | None = None
    loc: Loc | None = None

    def __str__(self) -> str:
        parts = []
        if self.rank is not None:
            parts.append(f"rank {self.rank}")
        if self.program is not None:
            parts.append(f"program {self.program}")
        if self.loc is not None:
            parts.append(str(self.loc))
        return ", ".join(parts) or "unknown place"


class DeviceFault(PeertileError):
    """An operation failed on a device. `op` names it; `place` says where."""

    def __init__(self, message: str, *, op: str | None = None, place: FaultPlace | None = None) -> None:
        self.message = message
        self.op = op
        self.place = place
        super().__init__(message)

    def __str__(self) -> str:
        head = self.message
        if self.place is not None:
            head += f" ({self.place})"
        if self.op is not None:
            head += f" in {self.op}"
        if self.place is not None and self.place.loc is not None:
            head += "\n" + self.place.loc.excerpt()
        return head


class WaitTimeout(DeviceFault, TimeoutError):
    """A wait on the device reached its bound. `slot`, `expected`, `seen` describe the word waited for."""

    def __init__(
        self,
        message: str,
        *,
        op: str | None = None,
        place: FaultPlace | None = None,
        slot: int | None = None,
        expected: int | None = None,
        seen: int | None = None,
    ) -> None:
        super().__init__(message, op=op, place=place)
        self.slot = slot
        self.expected = expected
        self.seen = seen


class KernelAssert(DeviceFault):
    """`T.assert_` failed on the device."""


class OutOfBounds(DeviceFault):
    """An index left its view on the device."""

    GOT: ClassVar = "{got}"
    """In the message of a check: the place of what it got. Such a message is whole."""

    @classmethod
    def text(cls, message: str, got: int, limit: int) -> str:
        """What a failed check of bounds says."""
        return message.replace(cls.GOT, str(got)) if cls.GOT in message else f"{message}: got {got}, limit {limit}"


class SignatureMismatch(DeviceFault):
    """Two ranks posted to one mailbox from kernels that do not match."""


class PeerFailed(DeviceFault):
    """Another rank died or failed: `rank` is who, `cause` is what it said (or how it ended)."""

    def __init__(self, rank: int, cause: str, *, op: str | None = None, place: FaultPlace | None = None) -> None:
        super().__init__(f"rank {rank} failed: {cause}", op=op, place=place)
        self.rank = rank
        self.cause = cause

    def __reduce__(self) -> tuple[object, ...]:
        return (PeerFailed, (self.rank, self.cause))
