"""The machine: tasks on one thread under a chooser, memory, and verdicts. One object, no globals.

A task runs from one synchronising operation to the next; between them nobody else can tell what it does, so
only there the chooser is asked. A task that cannot go on is parked where what it waits for happens, and costs
nothing meanwhile. When nobody is ready and somebody is parked, that is a deadlock.

    READY ──run──> READY | PARKED | DONE        PARKED ──wake──> READY
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from enum import Enum
from types import FrameType
from typing import Any, Final, Protocol

from peertile.sim.agents import Agent
from peertile.sim.cells import Conflict, Record
from peertile.sim.choices import Chooser
from peertile.sim.clocks import Clock
from peertile.sim.conditions import USUAL, Conditions
from peertile.sim.memory import AddressSpace, Object, Partitions
from peertile.sim.report import race_between, unwritten
from peertile.sim.sites import Site
from peertile.sim.trace import Trace
from peertile.sim.verdicts import Deadlock, Verdict, Waiter
from peertile.sim.words import Rule, Word

__all__ = ["Call", "Found", "Machine", "Park", "Task"]

MAX_STALE: Final = 2
"""How often in a row an agent may read replaced values of a word: a write becomes visible in finite time."""

FREE_ASKS: Final = 16
"""How often in a row a host may ask for what has not happened before time passes for it."""


class Call(Enum):
    """What a host thread does when it goes on: what exploration needs to know of its next step."""

    START = "start"
    RESUMES = "resumes"
    """Goes on behind a wait that is over."""
    MEETS = "meets"
    """Arrives at a collective call: the order of arrivals tells nobody."""
    WAITS = "waits"
    """Waits for work of its device: the same whether it is over yet or not."""
    ASKS = "asks"
    """Looks whether work of its device is over, or enqueues: the answer depends on how far that has come."""


class Found(Exception):
    """Ends a run at its first fault."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.headline)
        self.verdict = verdict


class Task(Protocol):
    """Something that the machine runs: a program, the engine of a stream, a host thread. Also an `Agent`."""

    entry: int
    rank: int
    ready: bool
    done: bool

    def run(self) -> None:
        """Up to the next synchronising operation. Parked afterwards where `ready` was cleared."""
        ...

    def condition(self, word: Word) -> tuple[Any, Any, int] | None:
        """What it waits for `word` to satisfy: comparison, value, bits of a signed number; None: any change."""
        ...

    def waits(self) -> Waiter | None:
        """Why it is parked, for a deadlock; None where it is idle and nobody minds."""
        ...

    def try_again(self) -> bool:
        """Nobody can go on: whether it does, which only a loop that polls may."""
        ...


class Park:
    """The order to hold a task at its first synchronising operation after an access, which it made in epoch
    `epoch` of its entry after `step` operations of the kind: what a directed run does."""

    __slots__ = ("active", "entry", "epoch", "step")

    def __init__(self, entry: int, epoch: int, step: int) -> None:
        self.entry = entry
        self.epoch = epoch
        self.step = step
        self.active = False

    def holds(self, task: Any) -> bool:
        return bool(task.entry == self.entry and task.steps >= self.step and task.clock[task.entry] >= self.epoch)


class Machine:
    """See the module docstring. `rule` is what waits are ordered after; `resident` bounds the programs of a rank
    that run at once; `judge` tells whether races and such are reported at all."""

    def __init__(
        self,
        chooser: Chooser,
        *,
        ranks: int = 1,
        rule: Rule = Rule.EVENT,
        resident: int | None = None,
        partitions: Partitions | None = None,
        max_steps: int = 1_000_000,
        judge: bool = True,
        stale: bool = True,
        conditions: Conditions = USUAL,
    ) -> None:
        self.chooser = chooser
        self.ranks = ranks
        self.rule = rule
        self.resident = resident
        self.memory = AddressSpace(partitions if partitions is not None else Partitions())
        self.max_steps = max_steps
        self.judge = judge
        self.ends_at_faults = judge
        """Whether a check of a program that fails, and a wait that is never met, end the run with a verdict. Else the
        host hears of them as it would of a device's: a fault, a timeout."""
        self.stale = stale
        self.conditions = conditions
        self.active: dict[int, int] = {}
        """Launches of each rank that have programs left."""
        self.held: dict[int, list[Any]] = {}
        """Launches of each rank that wait until no other runs."""
        self.channels: dict[tuple[int, int], dict[int, list[Any]]] = {}
        """Launches on each channel whose slots are program indices, by rank, in order."""
        self.where: Callable[[], str] | None = None
        """The place in the program of what its host does now."""
        self.line_of: Callable[[FrameType | None], str] | None = None
        """The same of a stack that is parked."""
        self.ready: list[Task] = []
        self.tasks: list[Task] = []
        self.steps = 0
        self.now_ns = 0
        self.park: Park | None = None
        self.current = 0
        self.host: Any = None
        """The host thread that runs now, if one does."""
        self._entries: dict[tuple[object, ...], int] = {}
        self._epochs: dict[int, int] = {}
        self.foresight: dict[tuple[int, int], list[tuple[int, Clock]]] = {}
        """Adds on each word, (base, offset), that an earlier pass over the same run saw."""
        self.waiting: dict[int, list[Task]] = {}
        """Programs of each rank that wait for a place to run."""
        self.residents: dict[int, int] = {}
        self.trace: Trace | None = None
        self.stopping = False
        """The run is over; host threads are being ended and may not wait."""
        self.outside: Any = None
        """The host thread that calls from outside of `loop`, where the host is no task."""
        self.abortable: list[Any] = []
        """Operations that leave when their abort word is set: looked at when nobody is ready."""
        self.is_wild = False
        """Hosts have event loops, or the like: any step may depend on any other."""
        self.spins: Callable[[Any, Any, Word, int, Site], None] | None = None
        """Told of trips of polling loops that came to nothing: program, trip, word, which write it read, and where."""
        self.among: Callable[[Any, Site, Word, Sequence[int]], None] | None = None
        """Told which writes of a word a read may return, before one of them is chosen by its place."""
        self.over: Callable[[int], None] | None = None
        """Told of each rank of which an operation of a stream is over."""
        self.asked_of: Callable[[int, Any], None] | None = None
        """Told that a host has learned whether work of a rank is over."""
        self.show: Callable[[int], None] | None = None
        """Puts in place what belongs to one rank alone, before code of the program runs for it."""
        self._suspected: Verdict | None = None
        self._timers: list[tuple[int, int]] = []
        self._due: dict[int, Callable[[], None]] = {}
        self._timer_count = 0
        self.asks = 0
        """How often hosts have asked in a row, while all that were ready did nothing else."""

    # ---------------------------------------------------------------- entries and tasks

    def entry(self, *key: object) -> int:
        """The clock entry of what `key` names; the same one at every call."""
        found = self._entries.get(key)
        if found is None:
            found = self._entries[key] = len(self._entries)
        return found

    def begin(self, agent: Agent, clock: Clock | None = None) -> None:
        """A new life of the agent's entry, after what `clock` knows."""
        epoch = self._epochs.get(agent.entry, 0) + 1
        if clock is not None:
            agent.clock = dict(clock)
        agent.clock[agent.entry] = epoch
        self._epochs[agent.entry] = epoch

    def end(self, agent: Agent) -> None:
        """The agent is done; its entry may be taken up by the next program of the same place."""
        self._epochs[agent.entry] = agent.clock[agent.entry]

    def add(self, task: Task) -> None:
        self.tasks.append(task)
        if task.ready:
            self.ready.append(task)

    def wake(self, task: Task) -> None:
        if not task.ready and not task.done:
            task.ready = True
            self.ready.append(task)

    def wake_all(self, waiters: list[Task]) -> None:
        if waiters:
            for task in waiters:
                self.wake(task)
            waiters.clear()

    def wake_word(self, word: Word) -> None:
        """The word has a new value: whoever waits for one like it goes on, and whoever polls it."""
        waiters = word.waiters
        if not waiters:
            return
        left: list[Task] = []
        known: dict[Any, bool] = {}
        for task in waiters:
            condition = task.condition(word)
            if condition is not None:
                holds = known.get(condition)
                if holds is None:
                    holds = known[condition] = word.satisfies(*condition)
                if not holds:
                    left.append(task)
                    continue
            self.wake(task)
        word.waiters = left

    # ---------------------------------------------------------------- running

    def loop(self, until: Callable[[], bool] | None = None) -> None:
        """Runs until nobody is ready, or until `until()`. Raises `Found` at the first fault."""
        ready = self.ready
        choose = self.chooser.task
        every = self.chooser.every
        while True:
            if until is not None and until():
                return
            if not ready:
                if self._idle():
                    continue
                return
            n = len(ready)
            if n == 1 and not every:
                k = 0
            elif self.park is None:
                k = choose(ready, self.current if self.current < n else 0)
            else:
                k = self._choose_around(self.park)
            self.current = k
            task = ready[k]
            self.steps += 1
            if self.steps > self.max_steps:
                raise Found(self.deadlock(f"the run was longer than {self.max_steps} steps: nobody makes progress"))
            task.run()
            if not task.ready:
                ready.pop(k)
                self.current = k if k < len(ready) else 0
                if task.done and task in self.tasks:  # what its own fault or an abort ended is out already
                    self.tasks.remove(task)

    def _choose_around(self, park: Park) -> int:
        """A choice that leaves the held task alone as long as anybody else can go on."""
        ready = self.ready
        held = [k for k, task in enumerate(ready) if park.holds(task)]
        if not held or len(held) == len(ready):
            return self.chooser.task(ready, self.current if self.current < len(ready) else 0)
        park.active = True
        others = [k for k in range(len(ready)) if k not in held]
        if len(others) == 1:
            return others[0]
        return others[self.chooser.task([ready[k] for k in others], 0)]

    def timer(self, delay_ns: int, action: Callable[[], None]) -> int:
        """Calls `action` once nobody is ready and the clock of the machine has come to it; a number to cancel it by."""
        self._timer_count += 1
        heapq.heappush(self._timers, (self.now_ns + delay_ns, self._timer_count))
        self._due[self._timer_count] = action
        return self._timer_count

    def cancel(self, timer: int) -> None:
        """The timer is not wanted any more; one that has acted is left alone."""
        self._due.pop(timer, None)

    def asked(self) -> None:
        """A host has asked whether something has happened. Where all that are ready do nothing else, again and again,
        they wait for time to pass: it does, faster and faster, and timers act as they come due."""
        if not all(getattr(task, "next_call", None) is Call.ASKS for task in self.ready):
            self.asks = 0
            return
        self.asks += 1
        if self.asks <= FREE_ASKS * len(self.ready):
            return
        self.now_ns += 1000 << min(self.asks // FREE_ASKS, 40)
        while self._timers and self._timers[0][0] <= self.now_ns:
            action = self._due.pop(heapq.heappop(self._timers)[1], None)
            if action is not None:
                action()

    def _idle(self) -> bool:
        """Nobody is ready: lets aborts and then the next timer act. False if nothing is left to act."""
        left = [operation for operation in list(self.abortable) if operation.aborted()]
        if left:
            return True
        while self._timers:
            deadline, number = heapq.heappop(self._timers)
            action = self._due.pop(number, None)
            if action is not None:
                self.now_ns = max(self.now_ns, deadline)
                action()
                return True
        again = [task for task in self.tasks if task.try_again()]
        return bool(again)

    def run(self) -> None:
        """Runs to the end. Raises `Found` for a fault or a deadlock."""
        self.loop()
        if self.tasks:
            waiters = [w for w in (task.waits() for task in self.tasks) if w is not None]
            if waiters:
                why = ""
                if any(self.held.values()):
                    why = "no program may rely on two kernels of one device running at the same time"
                raise Found(Deadlock(waiters=tuple(waiters), why=why))
        if self._suspected is not None:
            raise Found(self._suspected)

    def suspect(self, verdict: Verdict) -> None:
        """A fault that may lead to a worse one, which then says more: the verdict of a run that ends without."""
        if self.judge and self._suspected is None:
            self._suspected = verdict

    def unsettled(self) -> dict[tuple[int, int], list[tuple[int, Clock]]]:
        """What the same run has to know beforehand for its waits on adds to be judged rightly; empty if nothing."""
        words = [w for target in self.memory.objects for w in target.words.values() if w.passed]
        if all(word.is_settled() for word in words):
            return {}
        return {(word.home.base, word.offset): word.adds() for word in words}

    def deadlock(self, why: str = "") -> Deadlock:
        """A report of whoever has not ended."""
        waiters = []
        for task in self.tasks:
            waiter = task.waits()
            if waiter is not None:
                waiters.append(waiter)
        return Deadlock(waiters=tuple(waiters), why=why)

    # ---------------------------------------------------------------- what memory reports

    def conflict(self, found: Conflict, record: Record, target: Object) -> None:
        """Two accesses were not ordered, or a read came before every write."""
        if not self.judge:
            return
        assert record.site is not None
        assert record.agent is not None
        if found.earlier is None:
            raise Found(unwritten(target, found, record))
        raise Found(race_between(target, found, record))

    def stale_read(self, word: Word, agent: Agent, site: Site) -> int:
        """Which write a read returns: the newest, or any older one that the model allows."""
        last = len(word.writes) - 1
        if last == 0 or not self.stale:
            return last
        low = word.floor(agent)
        if low >= last:
            return last
        if self.among is not None:
            self.among(agent, site, word, range(last, low - 1, -1))
        return last - self.chooser.value(last - low + 1)

    def one_of(self, satisfying: Sequence[int]) -> int:
        """Which write a wait has read of those that it may have: the newest, or an older one."""
        if len(satisfying) == 1 or not self.stale:
            return satisfying[0]
        return satisfying[self.chooser.value(len(satisfying))]
