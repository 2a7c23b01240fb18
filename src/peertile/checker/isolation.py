"""What belongs to one rank alone while its host runs: modules, environment, arguments, standard streams, working
directory, clock, event loop, signal handlers, loggers, filters of warnings, random numbers. Put in by `enter`, taken
out by `leave`; `Worlds` does both as the machine goes from one rank to another, and only then, as most stretches of a
host follow one of the same rank.

What calls of the host do instead of the real thing is in `host_calls.py` and `loops.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import random
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Final, NoReturn

import numpy as np

from peertile.checker.host_calls import REAL_WORLD, HostCalls, Patch
from peertile.checker.loops import Network, RankPolicy, RankReactor
from peertile.checker.sources import Sources
from peertile.checker.streams import Printed, no_input, printing_to
from peertile.config import Config, config
from peertile.runtime import future, reactor
from peertile.runtime.context import execution
from peertile.runtime.device import Device
from peertile.runtime.registry import current_device, use_device
from peertile.sim.hosts import Host
from peertile.sim.machine import Machine

__all__ = ["RankView", "Worlds"]


_STDERR: Final = "backslashreplace"
_SHOWING: Final = ("showwarning", "_showwarnmsg_impl")


def _environments(**more: int) -> list[Patch]:
    """The environment of a rank, as text and as bytes: what it changes, no other rank sees."""
    found: list[Patch] = []
    data: Any = None
    for name in ("environ", "environb"):
        real = getattr(os, name, None)
        if real is not None:
            if data is None:
                data = dict(real._data)
                data.update({real.encodekey(key): real.encodevalue(str(value)) for key, value in more.items()})
            found.append(
                (os, name, type(real)(data, real.encodekey, real.decodekey, real.encodevalue, real.decodevalue))
            )
    return found


def _not_put(*names: Any) -> None:
    """In the place of os.putenv and os.unsetenv: the process keeps its environment."""


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
        self, machine: Machine, rank: int, ranks: int, sources: Sources, argv: list[str], network: Network,
        printed: Printed,
    ) -> None:  # fmt: skip
        self.machine = machine
        self.sources = sources
        self.calls = HostCalls(sources, rank)
        self.device: Device | None = None
        self.modules: dict[str, ModuleType] = {}
        self.policy = RankPolicy(self.calls, network)
        self._outside: dict[str, Any] = {}
        self._inside: str | None = None
        self._loop: Any = None
        self._folder: str | None = None
        self._patches: list[Patch] = [
            *self.calls.patches,
            (logging, "shutdown", _shut_down_logging),
            (os, "putenv", _not_put),
            (os, "unsetenv", _not_put),
            (asyncio.events, "_event_loop_policy", self.policy),  # what every way to a new loop asks
            (reactor._shared, "reactor", RankReactor()),
            (future, "config", _settings),
            *_own_numbers(random, random.Random(rank), self.calls.seed),
            *_own_numbers(np.random, np.random.RandomState(rank), self.calls.seed),
        ]
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in self._patches]
        self._inner, self._outer = _Attributes(self._patches), _Attributes(before)
        self._theirs = {id(ours): theirs for (_, _, ours), (_, _, theirs) in zip(self._patches, before, strict=True)}
        self._paths = [sources.folder, *sys.path]
        self._settings = gc.isenabled(), sys.getrecursionlimit()
        self._own = _OwnValues()
        for owner, name, value in (
            *_environments(RANK=rank, WORLD_SIZE=ranks, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=ranks),
            (sys, "argv", argv),
            (sys, "path", list(self._paths)),
            (sys, "excepthook", sys.__excepthook__),
            (threading, "excepthook", threading.__excepthook__),
            (warnings, "filters", list(warnings.filters)),
            *((warnings, name, getattr(warnings, name)) for name in _SHOWING if hasattr(warnings, name)),
            *_own_loggers(),
        ):
            self._own.add(owner, name, value)
        streams = no_input(self._no_input), printing_to(printed, "<stdout>"), printing_to(printed, "<stderr>", _STDERR)
        self.outputs = streams[1:]
        for name, stream in zip(("stdin", "stdout", "stderr"), streams, strict=True):
            self._own.add(sys, name, stream)
            self._own.add(sys, f"__{name}__", stream)

    def _no_input(self) -> NoReturn:
        self.calls.refuse("reading from standard input", REAL_WORLD)

    def flush(self) -> None:
        """What the rank has printed is part of the output, whole lines or not."""
        for stream in self.outputs:
            if not stream.closed:
                stream.flush()

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

    def end(self) -> None:
        """The rank has ended, and is in place: what is done at the end of a process."""
        self.calls.exit()
        _shut_down_logging()

    # ---------------------------------------------------------------- in and out

    def enter(self) -> None:
        self._outside = {
            "modules": {name: sys.modules.get(name) for name in self.modules},
            "inside": execution.inside,
        }
        self._own.exchange()
        self._switch_settings()
        sys.modules.update(self.modules)
        self._inner.put()
        use_device(self.device)
        # What is kept for each thread is kept for each rank here.
        execution.inside = self._inside
        if self._folder is not None:
            self.calls.chdir(self._folder)
        if self._loop is not None:
            loop, task, hooks = self._loop
            asyncio._set_running_loop(loop)
            _swap_task(loop, task)
            sys.set_asyncgen_hooks(*hooks)

    def _switch_settings(self) -> None:
        """What the interpreter keeps of the rank instead of what it keeps of the process, or the other way round."""
        other, self._settings = self._settings, (gc.isenabled(), sys.getrecursionlimit())
        if other != self._settings:
            (gc.enable if other[0] else gc.disable)()
            with contextlib.suppress(RecursionError):  # less than it takes to be here
                sys.setrecursionlimit(other[1])

    def leave(self, known: set[str]) -> None:
        outside = self._outside
        loop = asyncio._get_running_loop()
        self._loop = None
        if loop is not None:
            self._loop = (loop, _swap_task(loop, None), sys.get_asyncgen_hooks())
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(None, None)
        self._inside, execution.inside = execution.inside, outside["inside"]
        self._inner.take()
        self._outer.put()
        if self.device is not None:  # the program may have chosen another one
            self.device = current_device()
        use_device(None)
        paths = sys.path
        self._own.exchange()
        self._switch_settings()
        if paths != self._paths:
            for folder in paths:
                if folder not in self._paths:
                    self.sources.add(str(folder))
            self._paths = list(paths)
        before, self.calls.left_folder = self.calls.left_folder, None
        if before is not None:
            with contextlib.suppress(FileNotFoundError):  # it has removed the folder that it was in
                self._folder = os.getcwd()
            os.chdir(before)
        for name in self.modules:
            before = outside["modules"].get(name)
            if before is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = before
        if len(sys.modules) != len(known):
            for name in set(sys.modules) - known:
                module = sys.modules[name]
                if self.sources.owns(_file_of(module)):
                    self.modules[name] = module
                    del sys.modules[name]
                else:
                    known.add(name)
                    self._give_back(module)

    def _give_back(self, module: ModuleType) -> None:
        """A module that all ranks share, and the process after them, keeps no call of this rank, which it may have
        got by `from time import monotonic`."""
        for key, value in list(vars(module).items()):
            if id(value) in self._theirs:
                setattr(module, key, self._theirs[id(value)])


def _file_of(module: ModuleType) -> str:
    """Its file, or the folder of a package that has none."""
    file = getattr(module, "__file__", None)
    return str(file if file is not None else next(iter(getattr(module, "__path__", ())), ""))


class _Attributes:
    """Values of attributes, put in place together: those of a module by one update."""

    def __init__(self, patches: Sequence[Patch]) -> None:
        modules: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._single: list[Patch] = []
        for owner, name, value in patches:
            if isinstance(owner, ModuleType):
                modules.setdefault(owner.__name__, (vars(owner), {}))[1][name] = value
            else:
                self._single.append((owner, name, value))
        self._modules = list(modules.values())

    def put(self) -> None:
        for space, values in self._modules:
            space.update(values)
        for owner, name, value in self._single:
            setattr(owner, name, value)

    def take(self) -> None:
        """What is in place now is what is put there next: a program may have set some of it to its own."""
        for space, values in self._modules:
            for name, value in values.items():
                found = space.get(name, value)
                if found is not value:
                    values[name] = found
        self._single = [(owner, name, getattr(owner, name)) for owner, name, _ in self._single]


class _OwnValues:
    """Attributes whose values are those of one rank, whatever it makes of them, while it runs."""

    def __init__(self) -> None:
        self._other: list[list[Any]] = []

    def add(self, owner: Any, name: str, value: Any) -> None:
        self._other.append([owner, name, value])

    def exchange(self) -> None:
        """The values that are in place, and those that are not."""
        for entry in self._other:
            owner, name, value = entry
            entry[2] = getattr(owner, name)
            setattr(owner, name, value)


def _own_loggers() -> list[Patch]:
    """What is set up of logging, as at the start of a process: handlers that a rank adds are its own."""
    manager = logging.Logger.manager
    return [
        (logging.root, "handlers", []),
        (logging.root, "filters", []),
        (logging.root, "level", logging.WARNING),
        (logging.root, "_cache", {}),
        (manager, "loggerDict", dict(manager.loggerDict)),
        (manager, "disable", 0),
        (logging, "_handlerList", []),
        (logging, "_handlers", weakref.WeakValueDictionary()),
    ]


def _shut_down_logging(handlers: Any = None) -> None:
    """As `logging.shutdown`, of the handlers that are in place: the real one has a list of its own in mind."""
    _shutdown(logging._handlerList if handlers is None else handlers)  # type: ignore[attr-defined]


_shutdown = logging.shutdown


def _own_numbers(module: Any, source: Any, fresh: Callable[[], int]) -> list[Patch]:
    """The functions of a module that are methods of one hidden generator, as methods of `source`: cheaper to put in
    place than the generator's state, and what a rank seeds is its own; seeded with nothing it is seeded by `fresh`."""
    hidden = module.random.__self__
    names = [name for name in module.__all__ if getattr(getattr(module, name), "__self__", None) is hidden]
    names += [name for name in ("seed",) if name not in names]  # of numpy: a function that reaches the hidden one

    def seed(a: Any = None, *options: Any) -> None:
        source.seed(fresh() if a is None else a, *options)

    return [(module, name, seed if name == "seed" else getattr(source, name)) for name in names]


def _swap_task(loop: Any, task: Any) -> Any:
    """The task that the loop runs, with another one in its place. Python 3.14 keeps it for each thread, not loop; 3.12
    takes out a task that is there, and nothing else."""
    swap = getattr(asyncio.tasks, "_swap_current_task", None)
    if swap is None or (task is None and asyncio.current_task(loop) is None):
        return None
    return swap(loop, task)
