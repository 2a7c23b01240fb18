"""One run of kernels on a machine: what tests of kernels and exploration start. No host program, no driver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from peertile.errors import LaunchError
from peertile.ir.core import Kernel
from peertile.sim.choices import Chooser, RandomChooser, ReplayChooser
from peertile.sim.conditions import USUAL, Conditions
from peertile.sim.launches import Launch, Setup, full_grid
from peertile.sim.machine import Found, Machine
from peertile.sim.memory import Partitions
from peertile.sim.streams import Stream
from peertile.sim.trace import Trace
from peertile.sim.translate import Translation, translate
from peertile.sim.verdicts import Race, Verdict
from peertile.sim.words import Rule

__all__ = ["Case", "Outcome", "Step", "kernel_case", "sequence_case"]

Body = Callable[[Machine], None]
PASSES: Final = 4
"""Passes over one run at most, to judge waits on adds by all adds of the run."""


@dataclass
class Outcome:
    """How one run ended: its verdict, or None for a clean one, and the choices that it took."""

    verdict: Verdict | None
    choices: tuple[int, ...]
    steps: int
    machine: Machine = field(repr=False)


class Case:
    """Something that can be run again and again under different choosers: `build(machine)` adds its tasks."""

    def __init__(
        self,
        build: Body,
        *,
        ranks: int = 1,
        resident: int | None = None,
        max_steps: int = 200_000,
        stale: bool = True,
        after: Callable[[Machine], None] | None = None,
        cleanup: Callable[[Machine], None] | None = None,
        conditions: Conditions = USUAL,
    ) -> None:
        self.build = build
        self.ranks = ranks
        self.resident = resident
        self.max_steps = max_steps
        self.stale = stale
        self.after = after
        self.cleanup = cleanup
        self.conditions = conditions
        self.partitions = Partitions()
        self.traced = False
        """Whether runs keep a trace, for pictures: `Outcome.machine.trace`."""

    def run(
        self, chooser: Chooser | None = None, *, seed: int = 0, rule: Rule = Rule.EVENT, park: Any = None
    ) -> Outcome:
        """One run, to its end or its first fault."""
        chooser = RandomChooser(seed) if chooser is None else chooser
        outcome = self._once(chooser, rule, park, {})
        for _ in range(PASSES):
            if isinstance(outcome.verdict, Race) or rule is not Rule.EVENT:
                break
            foresight = outcome.machine.unsettled()
            if not foresight:
                break
            # The same run again, knowing the adds that were still to come at each wait. What is known of the
            # adds themselves gets less from pass to pass, never more, so this ends.
            again = self._once(ReplayChooser(outcome.choices), rule, park, foresight)
            outcome = Outcome(again.verdict, outcome.choices, outcome.steps, again.machine)
            if foresight == outcome.machine.unsettled():
                break
        return outcome

    def _once(self, chooser: Chooser, rule: Rule, park: Any, foresight: Any) -> Outcome:
        machine = Machine(
            chooser,
            ranks=self.ranks,
            rule=rule,
            resident=self.resident,
            partitions=self.partitions,
            max_steps=self.max_steps,
            stale=self.stale,
            conditions=self.conditions,
        )
        machine.park = park
        machine.spins, machine.among = getattr(chooser, "spins", None), getattr(chooser, "among", None)
        machine.over, machine.asked_of = getattr(chooser, "over", None), getattr(chooser, "asked", None)
        machine.trace = Trace() if self.traced else None
        machine.foresight = foresight
        verdict: Verdict | None = None
        with np.errstate(all="ignore"):
            try:
                self.build(machine)
                machine.run()
                if self.after is not None:
                    self.after(machine)
            except Found as found:
                verdict = found.verdict
            finally:
                if self.cleanup is not None:
                    self.cleanup(machine)
        return Outcome(verdict, tuple(chooser.taken), machine.steps, machine)


class Step(NamedTuple):
    """One launch on every rank, or on `ranks` alone: `args` are what `run_grid` takes; `stream` is its number."""

    kernel: Kernel
    grid: int | Sequence[int]
    args: Sequence[Any]
    stream: int = 0
    ranks: Sequence[int] | None = None


def sequence_case(
    make: Callable[[], Sequence[Step]],
    *,
    ranks: int = 1,
    resident: int | None = None,
    stale: bool = True,
    max_steps: int = 200_000,
    conditions: Conditions = USUAL,
) -> Case:
    """The launches that `make` gives anew for each run, in order on their streams. One array is one object."""
    translations: dict[int, Translation] = {}

    def build(machine: Machine) -> None:
        setup = Setup(machine)
        made: dict[tuple[int, int], Stream] = {}
        for kernel, grid, args, number, only in make():
            translation = translations.get(id(kernel))
            if translation is None:
                translation = translations[id(kernel)] = translate(kernel)
            for rank in range(ranks) if only is None else only:
                stream = made.get((rank, number))
                if stream is None:
                    stream = made[rank, number] = Stream(machine, rank, number, f"stream {number}")
                bound = [
                    setup.bind(value.type, arg, name, rank)
                    for name, value, arg in zip(kernel.param_names, kernel.params, args, strict=True)
                ]
                _check_launch(kernel, bound)
                stream.enqueue(Launch(machine, rank, translation, full_grid(grid), bound))

    return Case(build, ranks=ranks, resident=resident, stale=stale, max_steps=max_steps, conditions=conditions)


def _check_launch(kernel: Kernel, bound: Sequence[Any]) -> None:
    """The facts that the bounds pass left to the launch."""
    by_name = dict(zip(kernel.param_names, bound, strict=True))
    for check in kernel.facts.get("launch_checks", ()):
        lhs = -(-by_name[check.lhs].extents[check.lhs_axis] // check.lhs_size)
        rhs = -(-by_name[check.rhs].extents[check.rhs_axis] // check.rhs_size)
        if lhs > rhs:
            raise LaunchError(f"{check.description}: got {lhs} and {rhs} tiles")


def kernel_case(
    kernel: Kernel,
    grid: int | Sequence[int],
    args: Callable[[], Sequence[Any]] | Sequence[Any],
    *,
    ranks: int = 1,
    resident: int | None = None,
    stale: bool = True,
    max_steps: int = 200_000,
    launches: int = 1,
) -> Case:
    """`launches` launches of one kernel on every rank, with the same arguments: a function makes them anew for
    every run."""

    def make() -> Sequence[Step]:
        given = args() if callable(args) else args
        return [Step(kernel, grid, given)] * launches

    return sequence_case(make, ranks=ranks, resident=resident, stale=stale, max_steps=max_steps)
