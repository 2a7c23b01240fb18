"""Group: a set of ranks, what they agree on, and how a failure of one reaches all. No device work.

Every method that says *collective* must be called by every rank of the group, in the same order and
with the same description; ranks that disagree all get SymmetryError. Every wait is bounded by
PEERTILE_WAIT_TIMEOUT_S. A failed group raises PeerFailed from every call, and its abort word makes
waiting kernels leave, until `recover`. Read coordinator.py for who decides, control.py for the words.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import Any, TypeVar, overload

import numpy as np

from peertile.comm.control import RankState
from peertile.comm.coordinator import RECOVER, Arrive, Close, Dying, Fail, Outcome, Reply, name_ranks
from peertile.comm.frames import MAX_FDS
from peertile.comm.rendezvous import Link
from peertile.config import config
from peertile.errors import ArgumentError, PeerFailed, SymmetryError, UsageError
from peertile.runtime.checks import check_callable, check_integer, check_text, check_timeout, not_pickled

__all__ = ["Group", "RankModel", "describe"]

T = TypeVar("T")
_serials = itertools.count(1)


class _Here:
    """The process: asking the system costs more than all the rest of `Group.check`."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        self.pid = os.getpid()


_here = _Here()


class RankModel(Enum):
    """What a rank is: a process of its own, or a thread of one process."""

    PROCESSES = "processes"
    THREADS = "threads"


class Group:
    """A set of ranks that work together. `init` makes the world group, `subgroup` the others."""

    __reduce_ex__ = not_pickled

    def __init__(
        self,
        link: Link,
        key: int,
        members: tuple[int, ...],
        world_rank: int,
        *,
        model: RankModel,
        local_rank: int | None = None,
        local_size: int | None = None,
    ) -> None:
        self.model = model
        self.serial = next(_serials)
        self.rank = members.index(world_rank)
        self.size = len(members)
        self.world_ranks = members
        self.world_rank = world_rank
        self.local_rank = world_rank if local_rank is None else local_rank
        self.local_size = len(link.pids) if local_size is None else local_size
        self._link = link
        self._key = key
        self._block = link.segment.block(key)
        self._pid = _here.pid
        self._abort_word = ctypes.c_int32.from_address(self._block.abort_address)
        link.watch(self._block, members.index(0) if 0 in members else 0)
        self._closed = False
        self._sequence = 0
        self._generation = 0
        # The last error that every rank got from one call, if somebody still has it.
        self._told_all: Callable[[], Exception | None] = lambda: None
        self._own_failure: PeerFailed | None = None  # said here, and perhaps not yet heard by the coordinator
        self._callbacks: list[Callable[[], object]] = []
        # Held over each collective call: sequence numbers go out in the order of the calls. Reentrant, because
        # a recovery makes collective calls of its own. No lock of another object is taken while it is held.
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"Group(rank={self.rank}, size={self.size}, world_ranks={list(self.world_ranks)}, {self.model.value})"

    # What kernels and the heap need to know

    @property
    def abort_address(self) -> int:
        """Address, in this process, of the i32 that is not 0 once the group has failed. Valid while the group lives."""
        return self._block.abort_address

    @property
    def generation(self) -> int:
        """Number of recoveries so far."""
        return self._generation

    @property
    def stamp(self) -> str:
        """Equal on every rank between two collective calls, and never again: names what such a call made."""
        return f"{self._key}.{self._generation}.{self._sequence}"

    @property
    def pids(self) -> tuple[int, ...]:
        """Process of each rank; all the same for threads."""
        return tuple(self._link.pids[rank] for rank in self.world_ranks)

    def states(self) -> tuple[RankState, ...]:
        """Where each rank stands: alive, left, dead."""
        return tuple(self._block.rank(rank)[1] for rank in range(self.size))

    # Collective calls

    @overload
    def exchange(self, payload: bytes, what: str, *, timeout_s: float | None = None) -> list[bytes]: ...
    @overload
    def exchange(
        self, payload: bytes, what: str, *, fds: Sequence[int], timeout_s: float | None = None
    ) -> list[tuple[bytes, tuple[int, ...]]]: ...
    def exchange(
        self, payload: bytes, what: str, *, fds: Sequence[int] | None = None, timeout_s: float | None = None
    ) -> list[bytes] | list[tuple[bytes, tuple[int, ...]]]:
        """Collective. Every rank's `payload`, in rank order.

        With `fds`, on every rank: each payload with its rank's file descriptors, which are duplicates, this rank's
        own too, and now belong to the caller. At most 250 over all ranks.
        """
        if fds is not None and not isinstance(fds, Sequence):
            raise ArgumentError(f"exchange({what}): fds: expected a sequence of file descriptors, got {fds!r}")
        if fds is None:
            return list(self._call(f"exchange({what})", payload, timeout_s=timeout_s)[0].payloads)
        reply, received = self._call(f"exchange({what}, fds)", payload, fds=fds, timeout_s=timeout_s)
        parts: list[tuple[bytes, tuple[int, ...]]] = []
        for part, count in zip(reply.payloads, reply.fd_counts, strict=True):
            parts.append((part, tuple(received[:count])))
            received = received[count:]
        return parts

    def barrier(self, what: str = "", *, timeout_s: float | None = None) -> None:
        """Collective. Returns once every rank has arrived."""
        self._call(f"barrier({what})", timeout_s=timeout_s)

    def broadcast(self, payload: bytes | None, what: str, *, root: int = 0, timeout_s: float | None = None) -> bytes:
        """Collective. The payload of rank `root`, on every rank; the others' are not looked at."""
        check_integer(f"broadcast({what}): root", root, 0, self.size - 1)
        if self.rank == root:
            _check_payload(f"broadcast({what})", payload)
        mine = payload if self.rank == root and payload is not None else b""
        return self._call(f"broadcast({what}, root={root})", mine, timeout_s=timeout_s)[0].payloads[root]

    def agree(self, value: T, what: str, *, timeout_s: float | None = None) -> T:
        """Collective. `value`, if it is the same on every rank by its repr; else SymmetryError everywhere."""
        reply, _ = self._call(f"agree({what})", repr(value).encode(), timeout_s=timeout_s)
        seen = [text.decode() for text in reply.payloads]
        if len(set(seen)) > 1:
            by_value: dict[str, list[int]] = {}
            for rank, text in enumerate(seen):
                by_value.setdefault(text, []).append(rank)
            values = "; ".join(f"{name_ranks(ranks)}: {text}" for text, ranks in by_value.items())
            error = SymmetryError(f"ranks disagree about {what}: {values}. It must be the same on every rank")
            self._told_all = weakref.ref(error)
            raise error
        return value

    def all_or_none(self, what: str, action: Callable[[], T]) -> T:
        """Collective. Runs `action` here; unless it succeeds on every rank, every rank raises: its own error where it
        failed, PeerFailed elsewhere. The group stays sound."""
        check_callable(f"all_or_none({what}): action", action)
        with self.collective(what):
            return action()

    @contextlib.contextmanager
    def collective(self, what: str) -> Iterator[None]:
        """Collective. `all_or_none` as a with statement; its end waits for every rank's."""
        try:
            yield
        except Exception as error:
            # What every rank got already is not told again: a rank that is somewhere else would not be there to hear,
            # and the ranks would be out of step from here on. Its own error matters more than whatever else happens
            # on the way to tell the others.
            if error is not self._told_all():
                with contextlib.suppress(PeerFailed, SymmetryError, TimeoutError):
                    self._call(f"{what}", b"!" + describe(error).encode())
            raise
        payloads = self._call(f"{what}", b"")[0].payloads
        for rank, payload in enumerate(payloads):
            if payload:
                raise PeerFailed(rank, payload[1:].decode())

    def subgroup(self, ranks: Sequence[int]) -> Group | None:
        """Collective over this group, with the same `ranks` everywhere. The group of those ranks, numbered in the
        given order, on its members; None on the others. Groups may overlap; each has its own numbering and words."""
        wrong_kind = isinstance(ranks, str | bytes) or not isinstance(ranks, Iterable)
        chosen = () if wrong_kind else tuple(ranks)
        if wrong_kind or not all(isinstance(rank, int | np.integer) and not isinstance(rank, bool) for rank in chosen):
            raise ArgumentError(f"subgroup(ranks): expected a sequence of integers, got {ranks!r}")
        chosen = tuple(int(rank) for rank in chosen)
        if not chosen or len(set(chosen)) != len(chosen) or not all(0 <= rank < self.size for rank in chosen):
            raise ArgumentError(
                f"subgroup({list(chosen)}): expected at least one rank, each of 0 to {self.size - 1} and once"
            )
        members = tuple(self.world_ranks[rank] for rank in chosen)
        reply, _ = self._call(f"subgroup({list(chosen)})", members=members)
        if self.world_rank not in members:
            return None
        return Group(
            *(self._link, reply.created, members, self.world_rank),
            model=self.model,
            local_rank=self.local_rank,
            local_size=self.local_size,
        )

    def print(self, *values: object) -> None:
        """Prints on rank 0 alone, at once."""
        if self.rank == 0:
            print(*values, flush=True)

    # Failure

    def failure(self) -> PeerFailed | None:
        """Who failed first and why; None while the group is sound. Costs one load."""
        return self._block.failure() or self._own_failure

    def check(self) -> None:
        """Raises if the group has failed, is closed, or belongs to the process before a fork."""
        # Asked by every launch: five loads while all is well.
        if not (
            self._abort_word.value
            or self._closed
            or self._link.closed
            or self._own_failure is not None
            or self._pid != _here.pid
        ):
            return
        self._usable("check")
        failure = self.failure()
        if failure is not None:
            raise failure

    def fail(self, cause: str) -> None:
        """Marks the group broken on every rank, with this rank and `cause`. Never waits; the first failure wins."""
        self._usable("fail")
        check_text("fail(cause)", cause)
        self._own_failure = PeerFailed(self.rank, cause)
        self._link.tell(Fail(self._key, self._generation, cause))

    def recover(self, *, timeout_s: float | None = None) -> None:
        """Collective over the living. Clears the failure, starts a new generation and runs the `on_recover` callbacks
        in order; returns once they have run on every rank. Expects that no operation of the group is in flight.
        PeerFailed if a rank is gone for good."""
        with self._lock:
            reply, _ = self._call(RECOVER, timeout_s=timeout_s)
            self._generation = reply.generation
            self._own_failure = None
            self._sequence = 0
            with self.collective("recover callbacks"):
                for callback in list(self._callbacks):
                    callback()

    def on_recover(self, callback: Callable[[], object]) -> None:
        """Registers a callback for `recover`. Register the same ones in the same order on every rank."""
        check_callable("on_recover(callback)", callback)
        self._callbacks.append(callback)

    def forget_recover(self, callback: Callable[[], object]) -> None:
        """Takes a callback of `on_recover` out again."""
        if callback in self._callbacks:
            self._callbacks.remove(callback)

    def dying(self, cause: str) -> None:
        """This rank will not go on: every group it is in fails with `cause`. Never waits."""
        check_text("dying(cause)", cause)
        if self._pid == os.getpid():
            self._link.tell(Dying(cause))

    # The end

    @property
    def closed(self) -> bool:
        """Whether this rank is done with the group."""
        return self._closed or self._link.closed

    def close(self) -> None:
        """This rank is done with the group. Not collective and never waits; closing twice is fine."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        if self._key == 0:
            self._link.close()
        else:
            self._link.tell(Close(self._key))

    def _usable(self, what: str) -> None:
        if self._pid != os.getpid():
            raise UsageError(f"{what}: the runtime was initialised before fork; use spawn")
        if self.closed:
            raise UsageError(f"{what}: this group is closed")

    def _call(
        self,
        call: str,
        payload: bytes = b"",
        *,
        fds: Sequence[int] = (),
        members: tuple[int, ...] = (),
        timeout_s: float | None = None,
    ) -> tuple[Reply, list[int]]:
        self._usable(call)
        # Before anything is sent: the coordinator, which serves all ranks, sees arguments that it can work with.
        bound = config().wait_timeout_s if timeout_s is None else check_timeout(f"{call}: timeout_s", timeout_s)
        payload = _check_payload(call, payload)
        if fds:
            _check_descriptors(call, fds)
        if len(fds) * self.size > MAX_FDS:
            raise ArgumentError(f"{call}: expected at most {MAX_FDS // self.size} descriptors per rank, got {len(fds)}")
        with self._lock:
            if call != RECOVER:
                self.check()
            request = Arrive(
                next(self._link.tickets), self._key, self._generation, self._sequence, call, bound, payload, members
            )
            self._sequence += 1
            try:
                reply, received = self._link.call(request, fds)
            except PeerFailed as error:
                raise self.failure() or error from None
        refusal = reply.error()
        if refusal is not None:
            if reply.outcome in (Outcome.DISAGREED, Outcome.EXHAUSTED):
                self._told_all = weakref.ref(refusal)
            raise refusal
        return reply, received


def _check_payload(call: str, payload: Any) -> bytes:
    if not isinstance(payload, bytes | bytearray | memoryview):
        raise ArgumentError(f"{call}: payload: expected bytes, got {payload!r}")
    return bytes(payload)


def _check_descriptors(call: str, fds: Any) -> None:
    """Every one is open: sending a closed one would end this rank's connection."""
    for fd in fds:
        try:
            check_integer(f"{call}: fds", fd)
            os.fstat(fd)
        except OSError:
            raise ArgumentError(f"{call}: fds: expected open file descriptors, got {fd!r}, which is closed") from None


def describe(error: BaseException) -> str:
    """An exception as the cause of a failure: its type and message."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
