"""What a backend hands to a driver: code for one kernel and the facts a launch needs. No compiling here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from peertile.ir.types import MailboxType, Type
from peertile.source import Loc

if TYPE_CHECKING:
    from peertile.ir.core import Kernel

__all__ = ["Binary", "Compiled", "LaunchCheck", "Place", "WholeTiles"]


@dataclass(frozen=True, slots=True)
class Place:
    """One place of a kernel that can end in a fault: index k of `Binary.places` is what the code records.

    `kind` is the name of the fault ("assert", "bounds", "signature", "wait"), "print" or "mark". `what` names the
    word of a wait for people, or the types of what is printed ("f32[4]; i64"); `message` is the text of a check or
    the prefix of a print.
    """

    loc: Loc | None = None
    message: str = ""
    what: str = ""
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Binary:
    """A compiled kernel.

    `payload` is an object file (cpu) whose symbols start with `entry`. `scratch_bytes` are needed per
    executor (plain kernels) or per program (`waits`). `n_slots` is the length of the argument block.
    `text` holds stages for inspection and is neither cached nor compared.
    """

    target: str
    entry: str
    payload: bytes = field(repr=False)
    scratch_bytes: int
    waits: bool
    places: tuple[Place, ...]
    n_slots: int
    text: dict[str, str] = field(default_factory=dict, compare=False, repr=False)

    def fits(self, args: bytes) -> bool:
        """Whether a launch may pass these arguments; where not, the kernel is compiled for them anew."""
        return True

    def to_bytes(self) -> bytes:
        """Everything but `text`, for a cache: one line of JSON, then the payload."""
        head = {
            "target": self.target,
            "entry": self.entry,
            "scratch_bytes": self.scratch_bytes,
            "waits": self.waits,
            "n_slots": self.n_slots,
            "places": [[_loc_to_list(p.loc), p.message, p.what, p.kind] for p in self.places],
        }
        import json

        return json.dumps(head, separators=(",", ":")).encode() + b"\n" + self.payload

    @staticmethod
    def from_bytes(data: bytes) -> Binary:
        """The inverse of `to_bytes`; ValueError or KeyError if it is not one."""
        line, payload = data.split(b"\n", 1)
        import json

        head = json.loads(line)
        places = tuple(Place(_loc_from_list(loc), message, what, kind) for loc, message, what, kind in head["places"])
        return Binary(
            head["target"], head["entry"], payload, head["scratch_bytes"], head["waits"], places, head["n_slots"]
        )


class LaunchCheck(NamedTuple):
    """num_tiles(lhs, lhs_axis, lhs_size) <= num_tiles(rhs, rhs_axis, rhs_size), by index of the run-time
    parameter; the launcher verifies it against the actual extents."""

    description: str
    lhs: int
    lhs_axis: int
    lhs_size: int
    rhs: int
    rhs_axis: int
    rhs_size: int


class WholeTiles(NamedTuple):
    """The extent of `axis` of a run-time parameter is a multiple of `size`, and not 0 if `some`: the launcher verifies
    it, since a multicast access clips nothing."""

    param: int
    axis: int
    size: int
    some: bool


class Compiled(NamedTuple):
    """A binary with what a launch has to know beside it, and how to show its stages."""

    binary: Binary
    has_mailbox: bool
    steering: frozenset[str] | None
    """Parameters that mailbox rounds depend on; None: any may."""
    checks: tuple[LaunchCheck, ...]
    bounds: dict[str, int]
    """Accesses by how they are known to be in bounds: proven, launch, kernel."""
    stages: Callable[[], dict[str, str]]
    program_slots: tuple[int, ...] = ()
    """Run-time parameters that are signals and counters used at the program's own slot, by index: the grid must fit."""
    whole_tiles: tuple[WholeTiles, ...] = ()
    peer_atomics: tuple[int, ...] = ()
    """Run-time parameters whose memory of peers is updated by atomics, by index: the devices must have them."""

    @staticmethod
    def of(kernel: Kernel, types: Mapping[str, Type], binary: Binary, stages: Callable[[], dict[str, str]]) -> Compiled:
        """The binary of a kernel with the facts that the passes left for its launches; `types` are those of its
        run-time parameters, in order."""
        index = {parameter: k for k, parameter in enumerate(types)}

        def numbers(names: Iterable[str]) -> tuple[int, ...]:
            return tuple(sorted(index[name] for name in names))

        facts = kernel.facts
        steering = facts.get("steering")
        return Compiled(
            binary,
            any(isinstance(t, MailboxType) for t in types.values()),
            None if steering is None else frozenset(steering),
            tuple(
                LaunchCheck(c.description, index[c.lhs], c.lhs_axis, c.lhs_size, index[c.rhs], c.rhs_axis, c.rhs_size)
                for c in facts.get("launch_checks", ())
            ),
            dict(facts.get("bounds", {})),
            stages,
            numbers(facts.get("program_slots", ())),
            tuple(WholeTiles(index[w.name], w.axis, w.size, w.some) for w in facts.get("whole_tiles", ())),
            numbers(facts.get("peer_atomics", ())),
        )

    def to_bytes(self) -> bytes:
        """Everything but `stages`, for a cache: one line of JSON, then the binary."""
        steering = None if self.steering is None else sorted(self.steering)
        head = [self.has_mailbox, steering, [list(check) for check in self.checks], self.bounds, self.program_slots]
        tail = [[list(w) for w in self.whole_tiles], self.peer_atomics]
        import json

        return json.dumps([*head, *tail], separators=(",", ":")).encode() + b"\n" + self.binary.to_bytes()

    @staticmethod
    def from_bytes(
        data: bytes, stages: Callable[[], dict[str, str]], read: Callable[[bytes], Binary] = Binary.from_bytes
    ) -> Compiled:
        """The inverse of `to_bytes`; `read` is the one of the target's binaries."""
        line, binary = data.split(b"\n", 1)
        import json

        has_mailbox, steering, checks, bounds, program_slots, whole, peer_atomics = json.loads(line)
        return Compiled(
            read(binary),
            has_mailbox,
            None if steering is None else frozenset(steering),
            tuple(LaunchCheck(*check) for check in checks),
            bounds,
            stages,
            tuple(program_slots),
            tuple(WholeTiles(*w) for w in whole),
            tuple(peer_atomics),
        )


_LocList = list[Any] | None


def _loc_to_list(loc: Loc | None) -> _LocList:
    if loc is None:
        return None
    return [loc.file, loc.line, loc.col, loc.end_col, loc.function, _loc_to_list(loc.inlined_at)]


def _loc_from_list(data: _LocList) -> Loc | None:
    if data is None:
        return None
    file, line, col, end_col, function, inlined_at = data
    return Loc(file, line, col, end_col, function, _loc_from_list(inlined_at))
