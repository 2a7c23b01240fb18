"""Mutation runs: how much of what goes wrong in a program does the checker report?

Every synchronising operation of every kernel of a program is deleted or weakened, one at a time. Whether that mutant
is wrong is decided by ground truth: all interleavings of the programs of all ranks, judged by what was read alone.
Beside it stands what a few random schedules report, which is what a user sees. A run says, for each mutant, both.
No mutant is ever executed outside of the simulated machine.
"""

from __future__ import annotations

import linecache
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from peertile.checker.program import ProgramCase
from peertile.ir.core import Kernel, Op
from peertile.sim.choices import Chooser
from peertile.sim.exhaust import Exhaustive
from peertile.sim.explore import explore
from peertile.sim.program import Program
from peertile.sim.runs import Case, Outcome
from peertile.sim.verdicts import Verdict
from peertile.sim.words import Rule
from peertile.source import Loc
from peertile.testing.fences import Change, apply, changes_of, copy_kernel, synchronising_ops, used_values

__all__ = ["Configuration", "Judgement", "Mutation", "Truth", "judge", "mutations", "truth"]

TRUTH_LIMIT: Final = 4000
"""Interleavings that ground truth looks at before it gives up."""

Main = Callable[[Any], None]


@dataclass(frozen=True)
class Configuration:
    """A program small enough for ground truth: a function of the group, and the ranks that it runs on.

    Its hosts must not look whether something has finished, only wait for it, and its streams run launches and
    copies alone: then no interleaving of hosts and streams can be told from another, and only programs are
    interleaved."""

    name: str
    main: Main
    ranks: int = 2

    def case(self, change: Callable[[Kernel], Kernel] | None = None) -> ProgramCase:
        """The configuration as a case, with every kernel behind the passes replaced by `change(kernel)`."""
        return ProgramCase(self.main, self.ranks, change=change)


@dataclass(frozen=True)
class Mutation:
    """One change to one operation of the kernel named `kernel`."""

    kernel: str
    index: int
    change: Change
    what: str
    loc: Loc | None = None

    def __str__(self) -> str:
        return f"{self.kernel}: {self.change.value} {self.what}"

    def __call__(self, kernel: Kernel) -> Kernel:
        if kernel.name != self.kernel:
            return kernel
        copy = copy_kernel(kernel)
        found = synchronising_ops(copy)
        # Another specialisation of the same kernel may have other operations.
        if self.index < len(found) and found[self.index].loc == self.loc:
            apply(found[self.index], self.change, used_values(copy))
        return copy


@dataclass(frozen=True)
class Truth:
    """What all interleavings say: the first fault among them, or none in `runs` of them, all if `complete`."""

    verdict: Verdict | None
    runs: int
    complete: bool


@dataclass(frozen=True)
class Judgement:
    """A mutation under several configurations. `wrong` and `reported` name the first configuration in which ground
    truth and the checker find a fault, with its headline; None: in none."""

    mutation: Mutation
    wrong: tuple[str, str] | None
    reported: tuple[str, str] | None
    complete: bool
    """Ground truth came to its end in every configuration in which it found nothing."""
    reached: bool
    """Some configuration comes to the operation."""

    @property
    def missed(self) -> bool:
        """Wrong, and not reported."""
        return self.wrong is not None and self.reported is None

    @property
    def false_report(self) -> bool:
        """Reported, though every interleaving is right."""
        return self.reported is not None and self.wrong is None and self.complete


class _ProgramsOnly:
    """A chooser that lets hosts and streams go first, always in the same order, and asks `path` for the rest."""

    every = True

    def __init__(self, path: Any) -> None:
        self.path = path
        self.taken: list[int] = path.taken  # the same list: what is taken here is taken there

    def task(self, ready: Sequence[Any], current: int) -> int:
        for k, task in enumerate(ready):
            if not isinstance(task, Program):
                self.taken.append((k - current) % len(ready))
                return k
        chosen: int = self.path.task(ready, current)
        return chosen

    def value(self, n: int) -> int:
        chosen: int = self.path.value(n)
        return chosen


class _Judged(Case):
    """A case whose runs are judged by what was read alone, and interleave programs only."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def run(
        self, chooser: Chooser | None = None, *, seed: int = 0, rule: Rule = Rule.READS_FROM, park: Any = None
    ) -> Outcome:
        return self._case.run(_ProgramsOnly(chooser), rule=Rule.READS_FROM)


def truth(case: Case, limit: int = TRUTH_LIMIT, time_s: float = math.inf) -> Truth:
    """All interleavings of the programs of `case` that differ, at most `limit` and for at most `time_s`, until one
    shows a fault."""
    search, judged, runs = Exhaustive(), _Judged(case), 0
    end = time.monotonic() + time_s
    while runs < limit and time.monotonic() < end:
        path = search.next()
        if path is None:
            return Truth(None, runs, True)
        outcome = path.run(judged)
        if path.pruned:
            continue
        runs += 1
        if outcome.verdict is not None:
            return Truth(outcome.verdict, runs, False)
    return Truth(None, runs, False)


def mutations(configurations: Sequence[Configuration]) -> Iterator[tuple[Mutation, list[Configuration]]]:
    """Every mutation of every kernel of the configurations, each with those that come to its operation. Raises
    AssertionError if one of them is at fault as it is."""
    kernels: dict[str, Kernel] = {}
    reaching: dict[str, list[tuple[Configuration, frozenset[Any]]]] = {}
    for configuration in configurations:
        seen: dict[str, Kernel] = {}

        def look(kernel: Kernel, seen: dict[str, Kernel] = seen) -> Kernel:
            seen[kernel.name] = kernel
            return kernel

        case = configuration.case(look)
        case.traced = True
        outcome = case.run()
        assert outcome.verdict is None, f"{configuration.name}: {outcome.verdict}"
        assert outcome.machine.trace is not None
        reached = frozenset(event.loc for event in outcome.machine.trace.events)
        for name, kernel in seen.items():
            kernels.setdefault(name, kernel)
            reaching.setdefault(name, []).append((configuration, reached))
    for name, kernel in kernels.items():
        used = used_values(kernel)
        for index, op in enumerate(synchronising_ops(kernel)):
            for change in changes_of(op, used):
                what = f"{op.NAME} {index}{_at(op)}"
                yield (
                    Mutation(name, index, change, what, op.loc),
                    [c for c, reached in reaching[name] if op.loc in reached],
                )


def _at(op: Op) -> str:
    if op.loc is None:
        return ""
    user = op.loc.user
    return f": {linecache.getline(user.file, user.line).strip()}"


def judge(
    mutation: Mutation, configurations: Sequence[Configuration], schedules: int = 10, limit: int = TRUTH_LIMIT
) -> Judgement:
    """Ground truth, and what `schedules` random schedules report, over the configurations, until each has found
    something. Where nothing is reported, `limit` interleavings of each configuration are looked at."""
    cases = [(configuration.name, configuration.case(mutation)) for configuration in configurations]
    reported: tuple[str, str] | None = None
    for name, case in cases:
        report = explore(case, schedules, shrinks=0)
        if report.verdicts:
            reported = name, report.verdicts[0].headline
            break
    if reported is not None:  # what is reported there is most likely wrong there
        first = reported[0]
        cases.sort(key=lambda c: c[0] != first)
    complete = True
    for name, case in cases:
        found = truth(case, limit)
        complete &= found.complete
        if found.verdict is not None:
            return Judgement(mutation, (name, found.verdict.headline), reported, True, bool(cases))
    return Judgement(mutation, None, reported, complete, bool(cases))
