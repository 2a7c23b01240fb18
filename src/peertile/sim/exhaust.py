"""All schedules of a small case, one per class: dynamic partial-order reduction with sleep sets.

Two steps are dependent if their operations reach one word and one of them writes it; steps that are not may
change places without anybody telling. After each run, for every two dependent steps that nothing else orders,
the other order is put down as work: one of the tasks that a run in that order may begin with (source sets). A wait
and the write that lets it pass are never tried in the other order. Values (which replaced value a read returns, who is
admitted) are all tried.

A loop that polls is a wait whose condition is learned: what a trip of one read makes of a number depends on nothing but
that number and the values that the trip uses, so once it came to nothing (MM-74), a poll that would read the same
number with the same values is put off until the word has another one, and a run in which it reads a replaced number
in vain is one of those in which it comes later.

What hosts and streams do is told by `Host.next_call` and `Operation.reach`: that a collective call was arrived at,
or a launch begun, tells nobody; that work of a rank is over tells a host that asks for it. Two steps that happen in
one order only, by the clocks of the machine (a barrier of hosts, a launch behind a copy), are not tried in the other
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from peertile.meaning.numbers import satisfies
from peertile.sim.clocks import join
from peertile.sim.conditions import Overlap
from peertile.sim.hosts import Call, Host
from peertile.sim.launches import Launch
from peertile.sim.loops import Trip
from peertile.sim.memory import Object
from peertile.sim.program import Program
from peertile.sim.runs import Case, Outcome
from peertile.sim.sites import Site, Verb
from peertile.sim.streams import Stream
from peertile.sim.words import SIGNED, Word

__all__ = ["Exhaustive"]

MAX_ASKS: Final = 3
"""How often in a row a host asks whether work is over, while none is, before others go on."""


class _Pruned(Exception):
    """Everything that could go on here was covered by other runs."""


@dataclass(frozen=True, slots=True)
class _Next:
    """What a task does next: on which word, whether it writes, and for a wait its condition. `place` None with
    `alone`: it touches no word; without: it may touch anything."""

    place: tuple[int, int] | None
    writes: bool
    alone: bool = False
    wait: tuple[Any, Any, Any, Any] | None = None
    others: tuple[tuple[int, int], ...] = ()
    """Further places."""
    rank: int = -1
    is_host: bool = False
    poll: Any = None
    """What a read of a polling loop would learn, as `_poll` has it."""

    def depends(self, other: _Next) -> bool:
        if self.others or other.others:
            return any(a.depends(b) for a in self._single() for b in other._single())
        if self.alone or other.alone:
            return False
        if self.place is None or other.place is None:
            return True
        same = self.place[0] == other.place[0] and (
            self.place[1] == other.place[1] or self.place[1] < 0 or other.place[1] < 0
        )
        return same and (self.writes or other.writes)

    def _single(self) -> list[_Next]:
        return [_Next(place, self.writes, self.alone) for place in (self.place, *self.others)]


_ANY = _Next(None, True)


def _poll(program: Program, site: Site, word: Word, value: Any) -> Any:
    """That `program` reads `value` in this trip of a loop: what comes of it is the same in all runs. None where more
    than that decides. Reads behind a loop that was left have places of their own."""
    key = program.trips[-1].key if program.trips else None
    return None if key is None else (program.entry, site, key, word.home.base, word.offset, value)


def _next_of(task: Any, vain: set[Any]) -> tuple[_Next, bool]:
    """The next operation of a ready task, and whether it can do it."""
    if task.machine.is_wild:
        return _ANY, True
    if isinstance(task, Host):
        return _Next(None, False, True, rank=task.rank, is_host=True), True
    if isinstance(task, Stream):
        return _next_of_stream(task), True
    if not isinstance(task, Program):
        return _ANY, True
    at, rank = task.at, task.rank
    if task.machine.resident is not None and at is None:
        return _ANY, True
    if at is None or task.site is None:
        return _Next(None, False, True, rank=rank), True
    reads = task.site.verb_kind in (Verb.READS, Verb.WAITS)
    if isinstance(at, Word):
        place = (at.home.base, at.offset)
        if task.site.verb_kind is Verb.WAITS and task.expected is not None:
            cmp, expected = task.expected
            dtype = SIGNED[at.dtype] if task.site.signed else at.dtype
            able = satisfies(cmp, task.site.seen(at.value), expected, dtype)
            return _Next(place, False, wait=(cmp, expected, dtype, task.site), rank=rank), able
        poll = _poll(task, task.site, at, at.value) if reads else None
        return _Next(place, not reads, poll=poll, rank=rank), poll is None or poll not in vain
    if isinstance(at, Object):
        return _Next((at.base, -1), not reads, rank=rank), True
    return _ANY, True


def _next_of_stream(stream: Stream) -> _Next:
    operation = stream.busy if stream.busy is not None else stream.queue[0] if stream.queue else None
    machine = stream.machine
    if stream.ending is not None or operation is None:
        return _Next(None, False, True, rank=stream.rank)
    if operation.reach is None or machine.resident is not None:
        return _ANY
    if isinstance(operation, Launch) and machine.conditions.overlap is not Overlap.ALWAYS:
        return _ANY
    if not operation.reach:
        return _Next(None, False, True, rank=stream.rank)
    first, *others = ((base, -1) for base in operation.reach)
    return _Next(first, True, others=tuple(others), rank=stream.rank)


@dataclass(slots=True)
class _Node:
    """One choice of the current path: of a task, or of a value below `n`."""

    n: int = 0
    polls: list[Any] = field(default_factory=list)
    """What each of the values would be in a loop that polls, as `_poll` has it."""
    chosen: int = 0
    able: dict[int, _Next] = field(default_factory=dict)
    blocked: frozenset[int] = frozenset()
    """Tasks whose poll would come to nothing here, or that are parked as theirs did."""
    sleep: dict[int, _Next] = field(default_factory=dict)
    todo: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    before: Any = None
    known: dict[int, int] = field(default_factory=dict)
    """What the chosen task knew, by the clocks of the machine, when it was chosen."""
    epoch: int = 0
    asked: list[tuple[int, dict[int, int]]] = field(default_factory=list)
    """Ranks of whose work a host learned in this step whether it is over, and what it knew then."""
    over: set[int] = field(default_factory=set)
    """Ranks of which some work was over in this step."""

    @property
    def is_task(self) -> bool:
        return self.n == 0

    def meets(self, what: _Next) -> bool:
        """Whether this step, as it was, may depend on that one, which a task is about to make."""
        if what.depends(self.able[self.chosen]):
            return True
        if what.is_host:
            return what.rank in self.over
        return any(what.rank in (rank, -1) for rank, _ in self.asked)

    def asks_of(self, other: _Node) -> bool:
        """Whether this step asked for work that was over in the other one."""
        return any(rank in other.over for rank, _ in self.asked)


class _Path:
    """The chooser of one run: repeats the nodes of the path, then extends it."""

    every = True

    def __init__(self, nodes: list[_Node], vain: set[Any]) -> None:
        self.nodes = nodes
        self.vain = vain
        self.taken: list[int] = []
        self.at = 0
        self.pruned = False
        self._polls: list[Any] = []
        """What the next choice of a value is among, where it is that of a poll."""
        self._step: _Node | None = None
        self._asks: dict[int, int] = {}
        """How often each host has asked in a row, while no work of its rank was over."""

    def run(self, case: Case) -> Outcome:
        """One run of `case` along this path."""
        try:
            return case.run(self)
        except _Pruned:
            self.pruned = True
            return Outcome(None, tuple(self.taken), 0, None)  # type: ignore[arg-type]

    def spins(self, program: Program, trip: Trip, word: Word, k: int, site: Site) -> None:
        """A trip of a polling loop came to nothing."""
        if trip.key is None:
            return
        self.vain.add(_poll(program, site, word, word.writes[k].value))
        if k < len(word.writes) - 1:
            raise _Pruned

    def among(self, agent: Any, site: Site, word: Word, writes: Sequence[int]) -> None:
        """What `agent` reads is chosen next, among `writes`."""
        if isinstance(agent, Program):
            self._polls = [_poll(agent, site, word, word.writes[k].value) for k in writes]

    def over(self, rank: int) -> None:
        """Work of the rank is over."""
        self._asks = {}
        if self._step is not None:
            self._step.over.add(rank)

    def asked(self, rank: int, host: Any) -> None:
        """The host has learned whether work of the rank is over."""
        if self._step is not None:
            self._step.asked.append((rank, dict(host.clock)))

    def _next(self, task: Any) -> tuple[_Next, bool]:
        what, able = _next_of(task, self.vain)
        if what.is_host and task.next_call is Call.ASKS and self._asks.get(task.entry, 0) >= MAX_ASKS:
            return what, False
        return what, able

    def task(self, ready: Sequence[Any], current: int) -> int:
        self._polls = []
        self._step = None
        found = [(task.entry, *self._next(task)) for task in ready]
        able = {entry: what for entry, what, can in found if can}
        if not able:  # waits that will park: their order tells nobody
            return self._take(0, ready, current)
        if self.at < len(self.nodes):
            node = self.nodes[self.at]
        else:
            blocked = frozenset(entry for entry, what, can in found if not can and what.wait is None)
            blocked |= {t.entry for t in ready[0].machine.tasks if isinstance(t, Program) and t.parked is not None}
            node = _Node(able=able, blocked=blocked)
            previous = next((m for m in reversed(self.nodes) if m.is_task), None)
            if previous is not None:
                asleep = {**previous.sleep, **{e: previous.able[e] for e in previous.done if e in previous.able}}
                node.sleep = {
                    e: what for e, what in asleep.items() if e != previous.chosen and not previous.meets(what)
                }
            awake = [e for e in able if e not in node.sleep]
            if not awake:
                raise _Pruned
            node.chosen = awake[0]
            self.nodes.append(node)
        self.at += 1
        k = next(k for k, task in enumerate(ready) if task.entry == node.chosen)
        task = ready[k]
        node.before = task.at.value if isinstance(getattr(task, "at", None), Word) else None
        node.known = dict(task.clock)
        if isinstance(task, Stream) and task.queue:
            join(node.known, task.queue[0].clock)
        node.epoch = task.clock[task.entry]
        node.asked, node.over, self._step = [], set(), node
        if isinstance(task, Host):
            self._asks[task.entry] = self._asks.get(task.entry, 0) + 1 if task.next_call is Call.ASKS else 0
        return self._take(k, ready, current)

    def _take(self, k: int, ready: Sequence[Any], current: int) -> int:
        """Who repeats the run is not asked where only one is ready."""
        if len(ready) > 1:
            self.taken.append((k - current) % len(ready))
        return k

    def value(self, n: int) -> int:
        if self.at < len(self.nodes):
            node = self.nodes[self.at]
        else:
            node = _Node(n=n, polls=self._polls if len(self._polls) == n else [None] * n)
            self.nodes.append(node)
        self.at += 1
        self.taken.append(node.chosen)
        return node.chosen


class Exhaustive:
    """The search: `next()` gives a chooser for one more run, None when nothing is left."""

    def __init__(self) -> None:
        self._nodes: list[_Node] = []
        self._vain: set[Any] = set()
        self._started = False

    def next(self) -> _Path | None:
        if self._started:
            self._find_work()
            if not self._backtrack():
                return None
        self._started = True
        return _Path(self._nodes, self._vain)

    def _in_vain(self, what: _Next) -> bool:
        return what.poll is not None and what.poll in self._vain

    def _backtrack(self) -> bool:
        """Shortens the path to its last choice with work left, and takes that up."""
        nodes = self._nodes
        while nodes:
            node = nodes[-1]
            if not node.is_task:
                later = range(node.chosen + 1, node.n)
                value = next((k for k in later if node.polls[k] is None or node.polls[k] not in self._vain), None)
                if value is not None:
                    node.chosen = value
                    return True
            else:
                node.done.add(node.chosen)
                left = sorted(
                    e for e in node.todo - node.done if e not in node.sleep and node.able[e].poll not in self._vain
                )
                if left:
                    node.chosen = left[0]
                    return True
            nodes.pop()
        return False

    def _find_work(self) -> None:
        """Puts down the other order of every two dependent steps of the path that nothing else orders."""
        steps = [node for node in self._nodes if node.is_task]
        clocks: dict[int, dict[int, int]] = {}
        afters: list[dict[int, int]] = []
        # For each place, the steps on it so far that a later one can depend on.
        history: dict[Any, list[int]] = {}
        wild: list[int] = []
        # Of each rank, the steps in which work of it was over, or a host asked for that.
        over: dict[int, list[int]] = {}
        asked: dict[int, list[int]] = {}
        for i, node in enumerate(steps):
            p, what = node.chosen, node.able[node.chosen]
            clock = clocks.setdefault(p, {})
            earlier = {j for rank, _ in node.asked for j in over.get(rank, ())}
            earlier.update(j for rank in node.over for j in asked.get(rank, ()))
            if not what.alone:
                anywhere = what.place is None or bool(what.others)
                for (base, _), found in history.items():
                    if anywhere or (what.place is not None and base == what.place[0]):
                        earlier.update(found)
                earlier.update(wild)
            for j in sorted(earlier, reverse=True):
                other = steps[j]
                q, did = other.chosen, other.able[other.chosen]
                on_words = did.depends(what)
                if q == p or not (on_words or node.asks_of(other) or other.asks_of(node)):
                    continue
                ordered = clock.get(q, 0) > j or node.known.get(q, 0) >= other.epoch > 0
                if not ordered and not on_words and not other.asks_of(node):
                    # It knew already, by a wait as a rule.
                    ordered = all(known.get(q, 0) >= other.epoch for rank, known in node.asked if rank in other.over)
                if not ordered and not _lets_pass(other, did, what):
                    self._reverse(steps, afters, clock, j, i)
                for e, c in afters[j].items():
                    if clock.get(e, 0) < c:
                        clock[e] = c
            clock[p] = i + 1
            afters.append(dict(clock))
            for rank, _ in node.asked:
                asked.setdefault(rank, []).append(i)
            for rank in node.over:
                over.setdefault(rank, []).append(i)
            if what.alone:
                continue
            if what.place is None or what.others:
                wild.append(i)
            else:
                history.setdefault(what.place, []).append(i)

    def _reverse(self, steps: list[_Node], afters: list[dict[int, int]], clock: dict[int, int], j: int, i: int) -> None:
        """Puts down, in front of step `j`, the beginning of a run in which step `i` comes before it.

        That run goes on with the steps between the two that do not come after `j`, and then `i`. It may begin with any
        task whose first step among them comes after none of the others. One of those that is explored there, or asleep
        there, leads to it; the task of `i` itself need not: what it does there may be asleep, as it was covered, while
        what it does later, behind a step of somebody else, was not."""
        other, p = steps[j], steps[i].chosen
        q = other.chosen
        first: dict[int, tuple[int, dict[int, int]]] = {}
        for k in range(j + 1, i):
            task = steps[k].chosen
            # A poll in vain is the same run without it.
            if task not in first and afters[k].get(q, 0) <= j and not self._in_vain(steps[k].able[task]):
                first[task] = k, afters[k]
        if p not in first:
            if p in other.blocked:
                return
            first[p] = i, clock
        begin = [
            e
            for e, (k, after) in first.items()
            if e in other.able
            and not self._in_vain(other.able[e])
            and not any(at < k and after.get(task, 0) > at for task, (at, _) in first.items())
        ]
        if any(e in other.todo or e in other.done or e in other.sleep for e in begin):
            return
        if begin:
            other.todo.add(p if p in begin else begin[0])
        else:  # what makes them able is no step that is known here
            other.todo.update(other.able)


def _lets_pass(node: _Node, did: _Next, what: _Next) -> bool:
    """Whether `what` is a wait that could not have passed before the write `did`."""
    if what.wait is None or not did.writes or node.before is None:
        return False
    cmp, expected, dtype, site = what.wait
    return not satisfies(cmp, site.seen(node.before), expected, dtype)
