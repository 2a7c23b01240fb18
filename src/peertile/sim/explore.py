"""Exploration of a case: many random schedules, or all that differ, with confirmation and shrinking of what is found.

A race that the event rule predicts is reported once a run shows it under what was read alone: the same run, one in
which the earlier agent is held right after its access, or a free one. A failing schedule is shrunk to few switches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from peertile.sim.choices import RandomChooser, ReplayChooser
from peertile.sim.exhaust import Exhaustive
from peertile.sim.machine import Park
from peertile.sim.runs import Case, Outcome
from peertile.sim.verdicts import Lifetime, Race, Replay, Verdict, WordMisuse, spell_choices
from peertile.sim.words import Rule

__all__ = ["Report", "exhaust", "explore"]

CONFIRMATIONS: Final = 8  # schedules in which one predicted fault is tried to be shown
DIRECTED_RUNS: Final = 6
SHRINKS: Final = 120
SHRINK_STEPS: Final = 1_000_000
"""Of the machine, after which shrinking ends. A longer run, which hardly ends by itself, is told by its seed alone."""


@dataclass
class Report:
    """What an exploration found, and what it covered."""

    verdicts: list[Verdict] = field(default_factory=list)
    schedules: int = 0
    complete: bool = False
    """Every schedule that differs was run."""
    steps: int = 0
    seed: int | None = None
    choices: tuple[int, ...] | None = None
    """Of the one schedule that was repeated, where that is all."""
    misfit: int | None = None
    """The first of `choices` that the run did not ask for."""
    limit: int | None = None
    """Of an exhaustive search: the schedules at which it gives up."""
    unconfirmed: int = 0
    """Races that the event rule predicted and no directed run showed."""
    abstractions: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        return not self.verdicts

    def statement(self) -> str:
        """What a clean verdict means, and what it does not."""
        runs = "1 schedule" if self.schedules == 1 else f"{self.schedules} schedules"
        if self.complete:
            covers = "1 run covers" if self.schedules == 1 else f"{self.schedules} runs cover"
            text = f"all schedules: {covers} every order of synchronising operations"
        elif self.choices is not None:
            text = f"the one schedule of --choices {spell_choices(self.choices)}, of an unknown total"
            if self.misfit is not None:
                text += f"; from choice {self.misfit} on they are not those of this program under these options"
        elif self.limit is not None:
            end = f"gave up at its limit of {self.limit}" if self.clean else "ended at the first fault"
            text = f"{runs} of an exhaustive search, which {end}, of an unknown total"
        else:
            text = f"{runs.replace(' ', ' random ')} from seed {self.seed} of an unknown total"
        if self.unconfirmed:
            text += f"; {self.unconfirmed} predicted races could not be shown and were left out"
        parts = [
            text,
            "races on words that only go up do not depend on the schedule, unless values or admission steer it",
            *self.abstractions,
        ]
        return "\n".join(parts)


class _Directed(ReplayChooser):
    """Repeats a run until the held agent is held, then goes on at random."""

    def __init__(self, choices: Sequence[int], park: Park, seed: str) -> None:
        super().__init__(choices)
        self.park = park
        self.random = RandomChooser(seed)

    def task(self, ready: Sequence[Any], current: int) -> int:
        if self.park.active:
            return self.random.task(ready, current)
        return super().task(ready, current)

    def value(self, n: int) -> int:
        return self.random.value(n) if self.park.active else super().value(n)


def confirm(case: Case, outcome: Outcome) -> bool:
    """Whether a race, memory freed too early, or stores in any order can be shown under what was read alone."""
    verdict = outcome.verdict
    if isinstance(verdict, WordMisuse):
        return isinstance(case.run(ReplayChooser(outcome.choices), rule=Rule.READS_FROM).verdict, WordMisuse)
    if not isinstance(verdict, Race | Lifetime) or (isinstance(verdict, Lifetime) and not verdict.early):
        return True
    again = case.run(ReplayChooser(outcome.choices), rule=Rule.READS_FROM)
    if _shows(again.verdict, verdict):
        return True
    if verdict.origin is None:
        return False
    for k in range(DIRECTED_RUNS):
        park = Park(*verdict.origin)
        directed = case.run(_Directed(outcome.choices, park, f"directed {k}"), rule=Rule.READS_FROM, park=park)
        if _shows(directed.verdict, verdict):
            return True
    # Held right after its access, the earlier agent may keep back what the later one waits for: a release that comes
    # between, where one further on would hide that it is not enough.
    for k in range(DIRECTED_RUNS):
        found = case.run(RandomChooser(f"free {k}"), rule=Rule.READS_FROM).verdict
        if found is not None and found.key == verdict.key:
            return True
    return False


def _shows(found: Verdict | None, predicted: Race | Lifetime) -> bool:
    """Memory that is freed too early is told at the end of a run: it may not stand for a race that did not come."""
    if isinstance(found, Lifetime):
        return isinstance(predicted, Lifetime) or not found.early
    return isinstance(found, Race)


def shrink(case: Case, outcome: Outcome, limit: int = SHRINKS) -> tuple[int, ...]:
    """Choices with as few switches as can be found that show the same fault."""
    assert outcome.verdict is not None
    key = outcome.verdict.key
    best = list(outcome.choices)
    tried = steps = 0

    def holds(choices: list[int]) -> bool:
        nonlocal tried, steps
        tried += 1
        again = case.run(ReplayChooser(choices))
        steps += again.steps
        return again.verdict is not None and again.verdict.key == key

    while best and best[-1] == 0:
        best.pop()
    size = max(len(best) // 2, 1)
    while size >= 1 and tried < limit and steps < SHRINK_STEPS:
        at = 0
        while at < len(best) and tried < limit and steps < SHRINK_STEPS:
            if any(best[at : at + size]):
                trial = [*best[:at], *[0] * len(best[at : at + size]), *best[at + size :]]
                if holds(trial):
                    best = trial
            at += size
        size //= 2
    while best and best[-1] == 0:
        best.pop()
    return tuple(best)


def explore(
    case: Case, schedules: int = 100, seed: int = 0, *, stop_at: int = 1, shrinks: int = SHRINKS, confirms: bool = True
) -> Report:
    """Runs `schedules` random schedules; stops after `stop_at` different faults."""
    report = Report(seed=seed)
    seen: set[Any] = set()
    tried: Counter[Any] = Counter()
    for k in range(schedules):
        outcome = case.run(RandomChooser(seed + k))
        report.schedules += 1
        report.steps += outcome.steps
        verdict = outcome.verdict
        if verdict is None or verdict.key in seen or tried[verdict.key] == CONFIRMATIONS:
            continue
        if confirms and not confirm(case, outcome):
            tried[verdict.key] += 1  # another schedule may lead there
            continue
        seen.add(verdict.key)
        report.verdicts.append(settle(case, outcome, seed + k, shrinks))
        if len(report.verdicts) >= stop_at:
            break
    report.unconfirmed = len(tried.keys() - seen)
    return report


def settle(case: Case, outcome: Outcome, seed: int | None, shrinks: int = SHRINKS) -> Verdict:
    """The verdict of the shrunk schedule, with its replay."""
    verdict = outcome.verdict
    assert verdict is not None
    if not shrinks:
        return replace(verdict, replay=Replay(seed, tuple(outcome.choices)))
    if outcome.steps > SHRINK_STEPS and seed is not None:
        return replace(verdict, replay=Replay(seed))
    choices = shrink(case, outcome, shrinks)
    again = case.run(ReplayChooser(choices)).verdict
    shown = again if again is not None and again.key == verdict.key else verdict
    return replace(shown, replay=Replay(seed, choices))


def exhaust(case: Case, limit: int = 100_000, *, confirms: bool = True) -> Report:
    """Runs every schedule that differs in the order of operations on a common word, up to `limit` runs."""
    report = Report(limit=limit)
    search = Exhaustive()
    while report.schedules < limit:
        chooser = search.next()
        if chooser is None:
            report.complete = True
            break
        outcome = chooser.run(case)
        report.schedules += not chooser.pruned
        report.steps += outcome.steps
        if outcome.verdict is not None and not chooser.pruned:
            if confirms and not confirm(case, outcome):
                report.unconfirmed += 1
                continue
            report.verdicts.append(settle(case, outcome, None, 0))
            break
    return report
