"""What belongs to one rank alone while its host runs: modules, environment, arguments, clock, event loop, signal
handlers, random numbers. Put in by `enter`, taken out by `leave`; `Worlds` does both as the machine goes from one
rank to another, and only then, as most stretches of a host follow one of the same rank.

What calls of the host do instead of the real thing is in `host_calls.py` and `loops.py`.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from peertile.checker.host_calls import HostCalls, Patch
from peertile.checker.loops import Network, RankPolicy, RankReactor
from peertile.config import Config, config
from peertile.runtime import future, reactor
from peertile.runtime.context import execution
from peertile.runtime.device import Device
from peertile.runtime.registry import current_device, use_device
from peertile.sim.hosts import Host
from peertile.sim.machine import Machine

__all__ = ["RankView", "Worlds"]


class _Environment(dict[str, str]):
    """The environment of a rank: what it changes, no other rank sees."""

    def copy(self) -> dict[str, str]:
        return dict(self)


def _settings() -> Config:
    """As the process's, but an await never polls first: it goes through the event loop, where the schedule decides."""
    return _process_config()._replace(spin_budget_us=0)


_process_config = config


class Worlds:
    """Which rank's world is in place. `known` are the modules that all ranks share."""

    def __init__(self) -> None:
        self.shown: RankView | None = None
        self.known = set(sys.modules)

    def show(self, view: RankView | None) -> None:
        """From now on the process looks as `view` has it; None: as it is."""
        if view is self.shown:
            return
        if self.shown is not None:
            self.shown.leave(self.known)
        self.shown = view
        if view is not None:
            view.enter()


class RankView:
    """The world as one rank sees it."""

    def __init__(
        self, machine: Machine, rank: int, ranks: int, folder: Path, argv: list[str], network: Network
    ) -> None:
        self.machine = machine
        self.folder = str(folder)
        self.argv = argv
        self.calls = HostCalls(self.folder)
        self.device: Device | None = None
        self.environment = _Environment(os.environ)
        self.environment.update(
            RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks)
        )
        self.modules: dict[str, ModuleType] = {}
        self.policy = RankPolicy(self.calls, network)
        self._outside: dict[str, Any] = {}
        self._inside: str | None = None
        self._loop: Any = None
        self._patches: list[Patch] = [
            *self.calls.patches,
            (asyncio.events, "_event_loop_policy", self.policy),  # what every way to a new loop asks
            (reactor._shared, "reactor", RankReactor()),
            (future, "config", _settings),
            *_own_numbers(random, random.Random(rank)),
            *_own_numbers(np.random, np.random.RandomState(rank)),
        ]

    def bind(self, host: Host) -> None:
        """The host thread that lives in this world."""
        self.calls.host = host

    # ---------------------------------------------------------------- what the host starts with

    def adopt(self, name: str, module: ModuleType) -> None:
        """A module of this rank alone, from now on."""
        self.modules[name] = module
        self._outside["modules"].setdefault(name, sys.modules.get(name))
        sys.modules[name] = module

    def work_on(self, device: Device) -> None:
        """The device that the rank's host works on."""
        self.device = device
        use_device(device)

    # ---------------------------------------------------------------- in and out

    def enter(self) -> None:
        self._outside = {
            "environ": os.environ,
            "argv": sys.argv,
            "path": sys.path,
            "modules": {name: sys.modules.get(name) for name in self.modules},
            "patched": [(owner, name, getattr(owner, name)) for owner, name, _ in self._patches],
            "inside": execution.inside,
        }
        os.environ = self.environment  # type: ignore[assignment]  # noqa: B003 (what it hides comes back in leave)
        sys.argv = self.argv
        sys.path = [self.folder, *sys.path]
        sys.modules.update(self.modules)
        for owner, name, value in self._patches:
            setattr(owner, name, value)
        use_device(self.device)
        # What is kept for each thread is kept for each rank here.
        execution.inside = self._inside
        if self._loop is not None:
            loop, task, hooks = self._loop
            asyncio._set_running_loop(loop)
            _swap_task(loop, task)
            sys.set_asyncgen_hooks(*hooks)

    def leave(self, known: set[str]) -> None:
        outside = self._outside
        loop = asyncio._get_running_loop()
        self._loop = None
        if loop is not None:
            self._loop = (loop, _swap_task(loop, None), sys.get_asyncgen_hooks())
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(None, None)
        self._inside, execution.inside = execution.inside, outside["inside"]
        for owner, name, value in outside["patched"]:
            setattr(owner, name, value)
        if self.device is not None:  # the program may have chosen another one
            self.device = current_device()
        use_device(None)
        os.environ = outside["environ"]  # noqa: B003
        sys.argv = outside["argv"]
        sys.path = outside["path"]
        for name in self.modules:
            before = outside["modules"].get(name)
            if before is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = before
        if len(sys.modules) != len(known):
            for name in set(sys.modules) - known:
                module = sys.modules[name]
                if str(getattr(module, "__file__", None)).startswith(self.folder + os.sep):
                    self.modules[name] = module
                    del sys.modules[name]
                else:
                    known.add(name)
                    self._give_back(module)

    def _give_back(self, module: ModuleType) -> None:
        """A module that all ranks share, and the process after them, keeps no call of this rank, which it may have
        got by `from time import monotonic`."""
        theirs = {
            id(ours): before[2] for (_, _, ours), before in zip(self._patches, self._outside["patched"], strict=True)
        }
        for key, value in list(vars(module).items()):
            if id(value) in theirs:
                setattr(module, key, theirs[id(value)])


def _own_numbers(module: Any, source: Any) -> list[Patch]:
    """The functions of a module that are methods of one hidden generator, as methods of `source`: cheaper to put in
    place than the generator's state, and what a rank seeds is its own."""
    hidden = module.random.__self__
    names = [name for name in module.__all__ if getattr(getattr(module, name), "__self__", None) is hidden]
    names += [name for name in ("seed",) if name not in names]  # of numpy: a function that reaches the hidden one
    return [(module, name, getattr(source, name)) for name in names]


def _swap_task(loop: Any, task: Any) -> Any:
    """The task that the loop runs, with another one in its place. Python 3.14 keeps it for each thread, not loop; 3.12
    takes out a task that is there, and nothing else."""
    swap = getattr(asyncio.tasks, "_swap_current_task", None)
    if swap is None or (task is None and asyncio.current_task(loop) is None):
        return None
    return swap(loop, task)
