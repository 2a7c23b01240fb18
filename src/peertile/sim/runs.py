"""One run of kernels on a machine: what tests of kernels and exploration start. No host program, no driver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from peertile.ir.core import Kernel
from peertile.meaning.grid import check_launch
from peertile.sim.choices import Chooser, RandomChooser, ReplayChooser
from peertile.sim.launches import Launch, Setup, full_grid
from peertile.sim.machine import Found, Machine
from peertile.sim.memory import Partitions
from peertile.sim.streams import Stream
from peertile.sim.translate import Translation, translate
from peertile.sim.verdicts import Race, Verdict
from peertile.sim.words import Rule

__all__ = ["Case", "Outcome", "kernel_case"]

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
    ) -> None:
        self.build = build
        self.ranks = ranks
        self.resident = resident
        self.max_steps = max_steps
        self.stale = stale
        self.after = after
        self.cleanup = cleanup
        self.partitions = Partitions()

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
        )
        machine.park = park
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


def kernel_case(
    kernels: Kernel | Sequence[Kernel],
    grid: int | Sequence[int],
    args: Callable[[], Sequence[Any]] | Sequence[Any],
    *,
    ranks: int = 1,
    resident: int | None = None,
    stale: bool = True,
    max_steps: int = 200_000,
    streams: Sequence[int] | None = None,
) -> Case:
    """Launches of `kernels`, one after another on each rank (or on the streams named by number), with the same
    arguments: what `run_grid` takes, or a function that makes them anew for every run."""
    several = [kernels] if isinstance(kernels, Kernel) else list(kernels)
    translations: list[Translation] = [translate(kernel) for kernel in several]
    extents = full_grid(grid)

    def build(machine: Machine) -> None:
        setup = Setup(machine)
        given = args() if callable(args) else args
        for rank in range(ranks):
            made: dict[int, Stream] = {}
            for k, translation in enumerate(translations):
                number = 0 if streams is None else streams[k]
                if number not in made:
                    made[number] = Stream(machine, rank, number, f"stream {number}")
                kernel = translation.kernel
                bound = [
                    setup.bind(value.type, arg, name, rank)
                    for name, value, arg in zip(kernel.param_names, kernel.params, given, strict=True)
                ]
                check_launch(kernel, [b for b in bound])
                made[number].enqueue(Launch(machine, rank, translation, extents, bound))

    return Case(build, ranks=ranks, resident=resident, stale=stale, max_steps=max_steps)
