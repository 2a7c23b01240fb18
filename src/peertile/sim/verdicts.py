"""What the simulator says about a program: one frozen dataclass per kind of fault, each with a text for people.

A text names both sides, the object and elements, ranks and programs, source lines, what is missing and how to
repair it, and the schedule that shows it. Nothing here decides anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from peertile.source import Loc

__all__ = [
    "Access",
    "Bounds",
    "CollectiveMismatch",
    "Deadlock",
    "HostError",
    "KernelFault",
    "LaunchContract",
    "Lifetime",
    "NeverWritten",
    "Race",
    "Replay",
    "StaleArgument",
    "Verdict",
    "VerdictKind",
    "Waiter",
    "WordMisuse",
]


class VerdictKind(Enum):
    """The kinds of faults."""

    RACE = "race"
    DEADLOCK = "deadlock"
    NEVER_WRITTEN = "never_written"
    BOUNDS = "bounds"
    LIFETIME = "lifetime"
    WORD = "word"
    KERNEL = "kernel"
    COLLECTIVE = "collective"
    LAUNCH = "launch"
    GRAPH = "graph"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class Replay:
    """How to see it again: the seed of the schedule, and once shrunk the choices that it takes."""

    seed: int | None = None
    choices: tuple[int, ...] | None = None

    def __str__(self) -> str:
        parts = []
        if self.seed is not None:
            parts.append(f"--seed {self.seed}")
        if self.choices is not None:
            parts.append(f"--choices {spell_choices(self.choices)}")
        return " or ".join(parts) or "any schedule"


def spell_choices(choices: tuple[int, ...]) -> str:
    """Choices as a short string: numbers joined by dots, runs of zero as z and their length; trailing zeros fall."""
    kept = list(choices)
    while kept and kept[-1] == 0:
        kept.pop()
    parts: list[str] = []
    zeros = 0
    for choice in [*kept, -1]:
        if choice == 0:
            zeros += 1
            continue
        if zeros:
            parts.append(f"z{zeros}")
            zeros = 0
        if choice >= 0:
            parts.append(str(choice))
    return ".".join(parts) or "z0"


def read_choices(text: str) -> tuple[int, ...]:
    """The inverse of `spell_choices`; ValueError for what is none."""
    found: list[int] = []
    for part in text.split("."):
        number = part.removeprefix("z")
        if not (number.isascii() and number.isdigit()) or len(number) > 9:
            raise ValueError(text)
        found += [int(number)] if part == number else [0] * int(number)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Access:
    """One side: who did what to which elements of which object, where in the source."""

    verb: str
    object: str
    elements: str
    agent: str
    rank: int
    program: int | None
    loc: Loc | None = None
    code: str = ""
    launched: str = ""
    """Where the host launched the kernel: "launched at file:line"."""

    def __str__(self) -> str:
        parts = [f"{self.agent} {self.verb} {self.object}{' ' if self.elements else ''}{self.elements}"]
        if self.loc is not None:
            parts.append(_indent(self.loc.user.excerpt()))
        elif self.code:
            parts.append(f"    {self.code}")
        return "\n".join([*parts, *_indented(self.launched)])

    def as_dict(self) -> dict[str, Any]:
        return {
            "verb": self.verb, "object": self.object, "elements": self.elements, "agent": self.agent,
            "rank": self.rank, "program": self.program, "at": _at(self.loc), "launched": self.launched or None,
        }  # fmt: skip


def _indent(text: str) -> str:
    return "\n".join("  " + line for line in text.split("\n"))


def _indented(text: str) -> list[str]:
    return [f"  {text}"] if text else []


def _at(loc: Loc | None) -> str | None:
    return None if loc is None else str(loc.user)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Base: `kind`, and how to see it again. Two verdicts with the same `key` are the same fault."""

    kind: VerdictKind = field(init=False)
    replay: Replay = Replay()

    @property
    def headline(self) -> str:
        raise NotImplementedError

    @property
    def body(self) -> list[str]:
        raise NotImplementedError

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.kind, self.headline)

    def accesses(self) -> tuple[Access, ...]:
        """The accesses it speaks of, earlier first."""
        return ()

    def __str__(self) -> str:
        return "\n".join([self.headline, *(_indent(part) for part in self.body), f"  replay: {self.replay}"])

    def as_dict(self) -> dict[str, Any]:
        """The verdict as plain data."""
        return {
            "kind": self.kind.value,
            "headline": self.headline,
            "details": self.body,
            "accesses": [access.as_dict() for access in self.accesses()],
            "seed": self.replay.seed,
            "choices": None if self.replay.choices is None else spell_choices(self.replay.choices),
        }


@dataclass(frozen=True, kw_only=True)
class Race(Verdict):
    """Two accesses of a common element, one a write, that nothing orders. `missing` is the edge, `repair` what
    would make it."""

    earlier: Access
    later: Access
    missing: str
    repair: str
    why: str = ""
    origin: tuple[int, int, int] | None = field(default=None, compare=False, repr=False)
    """Entry, epoch and step of the earlier access, for a directed run."""
    last: tuple[int, int, int] | None = field(default=None, compare=False, repr=False)
    """The same of the later one."""
    kind: VerdictKind = field(init=False, default=VerdictKind.RACE)

    @property
    def headline(self) -> str:
        same = self.later.object == self.earlier.object
        names = self.later.object if same else f"{self.earlier.object} ({self.later.object})"
        elements = self.later.elements
        what = elements if elements.startswith("bytes") else f"elements {elements}"
        return f"race: two accesses of {names}, {what}, are not ordered"

    @property
    def body(self) -> list[str]:
        because = [f"because {self.why}"] if self.why else []
        return [str(self.earlier), str(self.later), *because, f"missing: {self.missing}", f"repair: {self.repair}"]

    @property
    def key(self) -> tuple[Any, ...]:
        sides = sorted(f"{a.verb} {a.object} {_at(a.loc)} {a.code}" for a in (self.earlier, self.later))
        return (self.kind, *sides)

    def accesses(self) -> tuple[Access, ...]:
        return (self.earlier, self.later)


@dataclass(frozen=True, kw_only=True)
class NeverWritten(Verdict):
    """A read of memory that nobody has written."""

    access: Access
    kind: VerdictKind = field(init=False, default=VerdictKind.NEVER_WRITTEN)

    @property
    def headline(self) -> str:
        return f"never written: {self.access.object} {self.access.elements} is read before anybody wrote it"

    @property
    def body(self) -> list[str]:
        return [str(self.access), "repair: write it first, or make it with pt.zeros"]

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.kind, self.access.object, _at(self.access.loc))

    def accesses(self) -> tuple[Access, ...]:
        return (self.access,)


@dataclass(frozen=True, kw_only=True)
class Bounds(Verdict):
    """An access outside its view or object."""

    access: Access
    message: str
    kind: VerdictKind = field(init=False, default=VerdictKind.BOUNDS)

    @property
    def headline(self) -> str:
        return f"out of bounds: {self.message}"

    @property
    def body(self) -> list[str]:
        return [str(self.access)]

    def accesses(self) -> tuple[Access, ...]:
        return (self.access,)


@dataclass(frozen=True, kw_only=True)
class Lifetime(Verdict):
    """An access of memory that was given back. `early`: it came first, but nothing orders it before that."""

    access: Access
    freed_by: str
    early: bool = False
    origin: tuple[int, int, int] | None = field(default=None, compare=False, repr=False)
    """Entry, epoch and step of an access that came first, for a directed run."""
    kind: VerdictKind = field(init=False, default=VerdictKind.LIFETIME)

    @property
    def headline(self) -> str:
        if self.early:
            return f"use after free: {self.access.object} is freed by {self.freed_by} while it may still be in use"
        return f"use after free: {self.access.object} was freed by {self.freed_by}"

    @property
    def body(self) -> list[str]:
        return [str(self.access), "repair: free it after the last use has completed"]

    def accesses(self) -> tuple[Access, ...]:
        return (self.access,)


@dataclass(frozen=True, kw_only=True)
class WordMisuse(Verdict):
    """A word that is written in ways that do not go together: by stores and by adds, or by two stores in any order."""

    word: str
    message: str
    accesses_: tuple[Access, ...]
    repair: str
    kind: VerdictKind = field(init=False, default=VerdictKind.WORD)

    @property
    def headline(self) -> str:
        return f"word: {self.word}: {self.message}"

    @property
    def body(self) -> list[str]:
        return [*(str(access) for access in self.accesses_), f"repair: {self.repair}"]

    def accesses(self) -> tuple[Access, ...]:
        return self.accesses_


@dataclass(frozen=True, slots=True)
class Waiter:
    """One agent that cannot go on: what it waits for, what it saw, and who wrote that last."""

    agent: str
    what: str
    seen: str = ""
    last_writer: str = ""
    loc: Loc | None = None
    launched: str = ""

    def __str__(self) -> str:
        text = f"{self.agent} waits for {self.what}"
        if self.seen:
            text += f"; last saw {self.seen}"
        if self.last_writer:
            text += f", {self.last_writer}"
        parts = [text] if self.loc is None else [text, _indent(self.loc.user.excerpt())]
        return "\n".join([*parts, *_indented(self.launched)])


@dataclass(frozen=True, kw_only=True)
class Deadlock(Verdict):
    """Nobody can go on, and work is left."""

    waiters: tuple[Waiter, ...]
    why: str = ""
    kind: VerdictKind = field(init=False, default=VerdictKind.DEADLOCK)

    @property
    def headline(self) -> str:
        n = len(self.waiters)
        if n == 1:
            return "deadlock: 1 agent waits and nobody is left who could let it go on"
        return f"deadlock: {n} agents wait and nobody is left who could let them go on"

    @property
    def body(self) -> list[str]:
        return [*(str(waiter) for waiter in self.waiters), *([self.why] if self.why else [])]

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.kind,)


@dataclass(frozen=True, kw_only=True)
class KernelFault(Verdict):
    """A check inside a kernel failed, or a launch was refused."""

    message: str
    agent: str
    loc: Loc | None = None
    launched: str = ""
    kind: VerdictKind = field(init=False, default=VerdictKind.KERNEL)

    @property
    def headline(self) -> str:
        return f"fault: {self.message}"

    @property
    def body(self) -> list[str]:
        excerpt = [self.loc.user.excerpt()] if self.loc is not None else []
        return [self.agent, *excerpt, *([self.launched] if self.launched else [])]


@dataclass(frozen=True, kw_only=True)
class CollectiveMismatch(Verdict):
    """The ranks of a group did not make the same calls in the same order: another call, other sizes, or a rank that
    never came. `calls` says for each rank what it did last, and where."""

    message: str
    calls: tuple[str, ...]
    kind: VerdictKind = field(init=False, default=VerdictKind.COLLECTIVE)

    @property
    def headline(self) -> str:
        return f"collective: {self.message}"

    @property
    def body(self) -> list[str]:
        return [
            *self.calls,
            "repair: let every rank of the group make the same collective calls, in one order and with equal sizes, "
            "dtypes and grids; what selects a path must be known to be equal on all ranks",
        ]

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.kind, *sorted(self.calls))


@dataclass(frozen=True, kw_only=True)
class LaunchContract(Verdict):
    """A launch that breaks what launches have to keep: places, one stream for a channel, one grid on all ranks."""

    message: str
    launches: tuple[str, ...]
    repair: str
    kind: VerdictKind = field(init=False, default=VerdictKind.LAUNCH)

    @property
    def headline(self) -> str:
        return f"launch: {self.message}"

    @property
    def body(self) -> list[str]:
        return [*self.launches, f"repair: {self.repair}"]


@dataclass(frozen=True, kw_only=True)
class StaleArgument(Verdict):
    """A replay of a graph whose argument is no longer what was captured."""

    graph: str
    node: str
    argument: str
    message: str
    kind: VerdictKind = field(init=False, default=VerdictKind.GRAPH)

    @property
    def headline(self) -> str:
        return f"stale graph argument: {self.argument} of {self.node} in {self.graph}: {self.message}"

    @property
    def body(self) -> list[str]:
        return ["repair: keep what a graph uses as long as the graph, or capture it anew; addresses are baked in"]


@dataclass(frozen=True, kw_only=True)
class HostError(Verdict):
    """The host program of a rank raised."""

    rank: int
    error: str
    trace: str = ""
    kind: VerdictKind = field(init=False, default=VerdictKind.HOST)

    @property
    def headline(self) -> str:
        return f"host: rank {self.rank} raised {self.error}"

    @property
    def body(self) -> list[str]:
        return self.trace.splitlines()
