"""The coordinator of a job: which rank has arrived at which collective call of which group.

A state machine without sockets, threads or clocks of its own: it is told of arrivals, failures and
departures, and answers through `deliver`. Rank 0's rendezvous thread drives it for processes,
every rank under one lock for threads (rendezvous.py). It alone writes the control blocks.

A collective call is (group, generation, sequence number). Ranks must make the same calls in the same
order: the first arrival that differs ends that call on every rank with SymmetryError, at once, and
the group goes on. A rank that dies, leaves while it is waited for, or does not arrive in time fails
the group until `recover`::

    sound --fail, death, timeout--> failed --every member in recover()--> sound, generation + 1
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from peertile.comm.control import ControlBlock, RankState, Segment
from peertile.errors import AllocationError, InternalError, PeerFailed, PeertileError, SymmetryError, WaitTimeout

__all__ = [
    "Arrive", "Close", "Coordinator", "Deliver", "Dying", "Fail", "Leave", "Outcome", "Reply", "Request",
    "name_ranks",
]  # fmt: skip

RECOVER = "recover()"
_CLOSED = "closed the group"


class Arrive(NamedTuple):
    """A rank has arrived at a collective call and waits for the reply with this ticket."""

    ticket: int
    group: int
    generation: int
    sequence: int
    call: str
    timeout_s: float
    payload: bytes = b""
    members: tuple[int, ...] = ()  # world ranks of a subgroup to make; empty for every other call


class Fail(NamedTuple):
    """A rank marks a group broken; ignored when the group has moved on to another generation."""

    group: int
    generation: int
    cause: str


class Dying(NamedTuple):
    """A rank will not go on: every group it is in has failed."""

    cause: str


class Leave(NamedTuple):
    """A rank ends normally: no failure unless somebody waits for it."""


class Close(NamedTuple):
    """A rank no longer uses a group."""

    group: int


Request = Arrive | Fail | Dying | Leave | Close


class Outcome(Enum):
    """How a collective call ended for a rank."""

    DONE = "done"
    DISAGREED = "disagreed"
    TIMED_OUT = "timed out"
    PEER_FAILED = "peer failed"
    EXHAUSTED = "exhausted"
    LACKING = "lacking"
    BROKEN = "broken"


class Reply(NamedTuple):
    """The end of a collective call: all payloads in rank order, or what went wrong."""

    ticket: int
    outcome: Outcome
    payloads: tuple[bytes, ...] = ()
    fd_counts: tuple[int, ...] = ()
    created: int = -1
    generation: int = 0
    rank: int = -1
    text: str = ""

    def error(self) -> PeertileError | None:
        """The exception that this reply stands for."""
        match self.outcome:
            case Outcome.DONE:
                return None
            case Outcome.DISAGREED:
                return SymmetryError(self.text)
            case Outcome.TIMED_OUT:
                return WaitTimeout(self.text)
            case Outcome.PEER_FAILED:
                return PeerFailed(self.rank, self.text)
            case Outcome.EXHAUSTED | Outcome.LACKING:
                return AllocationError(self.text)
            case Outcome.BROKEN:
                return InternalError(self.text)


Deliver = Callable[[int, Reply, tuple[int, ...]], None]


@dataclass(slots=True)
class _Call:
    """One collective call in progress; keys are group ranks."""

    deadline: float
    owner: int
    timeout_s: float
    arrived: dict[int, Arrive] = field(default_factory=dict)
    fds: dict[int, tuple[int, ...]] = field(default_factory=dict)
    disagreed: bool = False


@dataclass(slots=True)
class _Group:
    key: int
    members: tuple[int, ...]
    block: ControlBlock
    generation: int = 0
    failure: tuple[int, str] | None = None
    calls: dict[int, _Call] = field(default_factory=dict)
    recovery: _Call | None = None
    closed: set[int] = field(default_factory=set)

    def open_calls(self) -> list[_Call]:
        return [*self.calls.values()] if self.recovery is None else [*self.calls.values(), self.recovery]


class Coordinator:
    """Matches the collective calls of a job's ranks. Not thread-safe: one caller at a time."""

    def __init__(
        self, pids: Iterable[int], segment: Segment, deliver: Deliver, close_fd: Callable[[int], None]
    ) -> None:
        self.segment = segment
        self._deliver = deliver
        self._close_fd = close_fd  # ends a descriptor that nobody will receive
        self._pids = tuple(pids)
        self._gone: dict[int, str] = {}  # world rank -> why it cannot arrive any more
        self._groups: dict[int, _Group] = {}
        self._free: list[int] = []
        self._next = 0
        self._create(tuple(range(len(self._pids))))

    # What can happen

    def handle(self, rank: int, request: Request, fds: tuple[int, ...], now: float) -> None:
        """One request of a world rank."""
        match request:
            case Arrive():
                self._arrive(rank, request, fds, now)
            case Fail(group, generation, cause):
                state = self._groups.get(group)
                if state is not None and state.generation == generation:
                    self._fail(state, state.members.index(rank), cause)
            case Dying(cause):
                self.lose(rank, cause)
            case Leave():
                self.leave(rank)
            case Close(group):
                self._close(rank, group)

    def lose(self, rank: int, cause: str) -> None:
        """A rank has died, or will: every group it is in fails. The first cause stands."""
        if rank in self._gone:
            return
        self._gone[rank] = cause
        for group in list(self._groups.values()):
            if rank in group.members:
                me = group.members.index(rank)
                self._mark(group, rank, RankState.DEAD)
                self._fail(group, me, cause)
                self._absent(group, me, cause)

    def leave(self, rank: int) -> None:
        """A rank has ended normally. Only groups in which somebody waits for it fail."""
        if rank in self._gone:
            return
        self._gone[rank] = "left the group: its program ended normally"
        for group in list(self._groups.values()):
            if rank in group.members:
                self._mark(group, rank, RankState.LEFT)
                self._absent(group, group.members.index(rank), self._gone[rank])

    def expire(self, now: float) -> None:
        """Ends every call whose bound has passed."""
        for group in list(self._groups.values()):
            for call in group.open_calls():
                if call.deadline <= now and not call.disagreed:
                    self._time_out(group, call)

    def next_deadline(self) -> float | None:
        calls = [call for group in self._groups.values() for call in group.open_calls()]
        return min((call.deadline for call in calls if not call.disagreed), default=None)

    def name_of(self, group: int) -> str:
        """A group, for people: "the world group", "the group of world ranks 0, 2"."""
        found = self._groups.get(group)
        return "a group that was closed" if found is None else _group_name(found)

    # Collective calls

    def _arrive(self, rank: int, request: Arrive, fds: tuple[int, ...], now: float) -> None:
        group = self._groups.get(request.group)
        if group is None or request.generation != group.generation:
            text = f"{request.call}: the group was recovered or closed while this call was being made"
            self._reply(rank, Reply(request.ticket, Outcome.DISAGREED, text=text), drop=fds)
            return
        me = group.members.index(rank)
        pid, state, epoch = group.block.rank(me)
        group.block.set_rank(me, pid, state, epoch + 1)
        if group.failure is not None and request.call == RECOVER:
            self._recover(group, me, request, now)
        elif group.failure is not None:
            self._reply(rank, _failed(request.ticket, *group.failure), drop=fds)
        elif (gone := self._first_gone(group)) is not None:
            self._reply(rank, _failed(request.ticket, *gone), drop=fds)
            self._fail(group, *gone)
        else:
            self._join(group, me, request, fds, now)

    def _join(self, group: _Group, me: int, request: Arrive, fds: tuple[int, ...], now: float) -> None:
        call = group.calls.get(request.sequence)
        deadline = now + request.timeout_s
        if call is None:
            call = group.calls[request.sequence] = _Call(deadline, me, request.timeout_s)
        elif deadline < call.deadline:
            call.deadline, call.owner, call.timeout_s = deadline, me, request.timeout_s
        call.arrived[me] = request
        call.fds[me] = fds
        everybody = len(call.arrived) == len(group.members)
        if everybody:
            del group.calls[request.sequence]
        if call.disagreed:
            self._disagree(group, call, request.sequence, [me])
        elif len({arrived.call for arrived in call.arrived.values()}) > 1:
            call.disagreed = True
            self._disagree(group, call, request.sequence, list(call.arrived))
        elif everybody:
            self._complete(group, call)

    def _complete(self, group: _Group, call: _Call) -> None:
        order = range(len(group.members))
        first = call.arrived[0]
        created = -1
        if first.call == RECOVER:
            self._sound(group)
        elif first.members:
            if not self._free and self._next == self.segment.blocks:
                text = f"{first.call}: all {self.segment.blocks} groups of this job are in use; close() some of them"
                for me in order:
                    reply = Reply(call.arrived[me].ticket, Outcome.EXHAUSTED, text=text)
                    self._reply(group.members[me], reply, drop=call.fds[me])
                return
            created = self._create(first.members)
        payloads = tuple(call.arrived[me].payload for me in order)
        fds = tuple(fd for me in order for fd in call.fds[me])
        counts = tuple(len(call.fds[me]) for me in order)
        for me in order:
            reply = Reply(call.arrived[me].ticket, Outcome.DONE, payloads, counts, created, group.generation)
            self._deliver(group.members[me], reply, fds)
        for fd in fds:
            self._close_fd(fd)

    def _disagree(self, group: _Group, call: _Call, sequence: int, recipients: list[int]) -> None:
        by_call: dict[str, list[int]] = {}
        for me in sorted(call.arrived):
            by_call.setdefault(call.arrived[me].call, []).append(me)
        seen = "; ".join(f"{name_ranks(ranks)}: {text}" for text, ranks in by_call.items())
        text = (
            f"ranks disagree about collective call {sequence + 1} of {_group_name(group)}: {seen}. "
            f"Every rank must make the same calls with the same arguments in the same order"
        )
        for me in recipients:
            reply = Reply(call.arrived[me].ticket, Outcome.DISAGREED, text=text)
            self._reply(group.members[me], reply, drop=call.fds[me])

    def _time_out(self, group: _Group, call: _Call) -> None:
        what = call.arrived[call.owner].call
        missing = [me for me in range(len(group.members)) if me not in call.arrived]
        text = (
            f"{what}: {name_ranks(missing)} of {_group_name(group)} did not arrive within {call.timeout_s:g} s "
            f"(PEERTILE_WAIT_TIMEOUT_S); {name_ranks(sorted(call.arrived))} waited"
        )
        for me, request in call.arrived.items():
            reply = Reply(request.ticket, Outcome.TIMED_OUT, text=text)
            self._reply(group.members[me], reply, drop=call.fds[me])
        if call is group.recovery:
            group.recovery = None
        else:
            group.calls = {sequence: other for sequence, other in group.calls.items() if other is not call}
            self._fail(group, call.owner, f"WaitTimeout: {text}")

    # Failure and recovery

    def _fail(self, group: _Group, me: int, cause: str) -> None:
        if group.failure is not None:
            return
        group.failure = (me, cause)
        group.block.fail(me, cause)
        calls, group.calls = group.calls, {}
        for call in calls.values():
            if call.disagreed:
                continue
            if call.arrived[call.owner].call == RECOVER:
                group.recovery = call  # who is in recover() already stays there
                continue
            for other, request in call.arrived.items():
                self._reply(group.members[other], _failed(request.ticket, me, cause), drop=call.fds[other])

    def _recover(self, group: _Group, me: int, request: Arrive, now: float) -> None:
        if group.recovery is None:
            group.recovery = _Call(now + request.timeout_s, me, request.timeout_s)
        group.recovery.arrived[me] = request
        group.recovery.fds[me] = ()
        self._refuse_recovery(group)
        if group.recovery is not None and len(group.recovery.arrived) == len(group.members):
            call, group.recovery = group.recovery, None
            self._complete(group, call)

    def _refuse_recovery(self, group: _Group) -> None:
        gone = self._first_gone(group)
        if group.recovery is None or gone is None:
            return
        call, group.recovery = group.recovery, None
        for me, request in call.arrived.items():
            self._reply(group.members[me], _failed(request.ticket, *gone))

    def _sound(self, group: _Group) -> None:
        group.generation += 1
        group.failure = None
        group.calls = {}
        group.block.reset(group.generation)

    # Groups

    def _create(self, members: tuple[int, ...]) -> int:
        if self._free:
            key = self._free.pop()
        else:
            key = self._next
            self._next += 1
        block = self.segment.block(key)
        block.reset(0)
        for me, rank in enumerate(members):
            block.set_rank(me, self._pids[rank], RankState.ALIVE, 0)
        self._groups[key] = _Group(key, members, block)
        return key

    def _close(self, rank: int, key: int) -> None:
        group = self._groups.get(key)
        if group is None or key == 0:
            return
        group.closed.add(rank)
        self._absent(group, group.members.index(rank), _CLOSED)

    def _absent(self, group: _Group, me: int, why: str) -> None:
        """A rank is done with the group: who waits for it hears so, who does not goes on."""
        if any(me not in call.arrived and not call.disagreed for call in group.calls.values()):
            self._fail(group, me, why)
        self._refuse_recovery(group)
        if group.key != 0 and group.closed.issuperset(set(group.members) - set(self._gone)):
            del self._groups[group.key]
            self._free.append(group.key)

    def _first_gone(self, group: _Group) -> tuple[int, str] | None:
        for me, rank in enumerate(group.members):
            if rank in self._gone:
                return me, self._gone[rank]
            if rank in group.closed:
                return me, _CLOSED
        return None

    def _mark(self, group: _Group, rank: int, state: RankState) -> None:
        me = group.members.index(rank)
        pid, _, epoch = group.block.rank(me)
        group.block.set_rank(me, pid, state, epoch)

    def _reply(self, rank: int, reply: Reply, drop: tuple[int, ...] = ()) -> None:
        for fd in drop:
            self._close_fd(fd)
        self._deliver(rank, reply, ())  # also to one that is gone: a thread that was given up may still wait


def broken(request: Arrive, error: Exception) -> Reply:
    """The answer to a call that the coordinator could not work with: it concerns its caller, not the job."""
    if isinstance(error, AllocationError):
        return Reply(
            request.ticket, Outcome.LACKING, text=f"{request.call}: rank 0, which hosts the rendezvous: {error}"
        )
    text = f"{request.call}: the rendezvous could not handle this call: {type(error).__name__}: {error}"
    return Reply(request.ticket, Outcome.BROKEN, text=text)


def _failed(ticket: int, rank: int, cause: str) -> Reply:
    return Reply(ticket, Outcome.PEER_FAILED, rank=rank, text=cause)


def _group_name(group: _Group) -> str:
    return "the world group" if group.key == 0 else f"the group of world {name_ranks(group.members)}"


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 2`, `ranks 0, 2`, `no rank`."""
    listed = list(ranks)
    if not listed:
        return "no rank"
    return ("rank " if len(listed) == 1 else "ranks ") + ", ".join(map(str, listed))
