"""What belongs to one rank alone while its host runs: modules, environment, arguments, clock. Put in by `enter`,
taken out by `leave`, around every stretch that the host runs.

Calls that the machine cannot carry out (threads, processes) raise UnsupportedError with the line of the program.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from peertile.errors import UnsupportedError
from peertile.runtime.context import execution
from peertile.runtime.device import Device
from peertile.runtime.registry import current_device, use_device
from peertile.sim.hosts import Host
from peertile.sim.machine import Machine

__all__ = ["RankView"]


class _Environment(dict[str, str]):
    """The environment of a rank: what it changes, no other rank sees."""

    def copy(self) -> dict[str, str]:
        return dict(self)


class RankView:
    """The world as one rank sees it."""

    def __init__(self, machine: Machine, rank: int, ranks: int, folder: Path, argv: list[str]) -> None:
        self.machine = machine
        self.folder = str(folder)
        self.argv = argv
        self.host: Host
        self.device: Device | None = None
        self.environment = _Environment(os.environ)
        self.environment.update(
            RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks)
        )
        self.modules: dict[str, ModuleType] = {}
        self._outside: dict[str, Any] = {}
        self._inside: str | None = None
        self._patches: list[tuple[Any, str, Any]] = [
            (time, "time", self._seconds),
            (time, "monotonic", self._seconds),
            (time, "perf_counter", self._seconds),
            (time, "time_ns", self._now),
            (time, "monotonic_ns", self._now),
            (time, "perf_counter_ns", self._now),
            (time, "sleep", self._sleep),
            (threading.Thread, "start", _refuse("threading.Thread.start", self)),
            (subprocess.Popen, "__init__", _refuse("subprocess.Popen", self)),
        ]
        if hasattr(os, "fork"):
            self._patches.append((os, "fork", _refuse("os.fork", self)))

    # ---------------------------------------------------------------- the clock of the machine

    def _now(self) -> int:
        return self.machine.now_ns + 1000 * self.machine.steps

    def _seconds(self) -> float:
        return self._now() / 1e9

    def _sleep(self, seconds: float) -> None:
        self.machine.now_ns += int(seconds * 1e9)
        self.host.step()

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
            "patched": [(owner, name, vars(owner)[name]) for owner, name, _ in self._patches],
            "known": set(sys.modules),
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

    def leave(self) -> None:
        outside = self._outside
        self._inside, execution.inside = execution.inside, outside["inside"]
        for owner, name, value in outside["patched"]:
            setattr(owner, name, value)
        if self.device is not None:  # the program may have chosen another one
            self.device = current_device()
        use_device(None)
        os.environ = outside["environ"]  # noqa: B003
        sys.argv = outside["argv"]
        sys.path = outside["path"]
        if len(sys.modules) != len(outside["known"]):
            for name in set(sys.modules) - outside["known"]:
                module = sys.modules[name]
                file = getattr(module, "__file__", None)
                if file is not None and str(file).startswith(self.folder + os.sep):
                    self.modules.setdefault(name, module)
        for name in self.modules:
            before = outside["modules"].get(name)
            if before is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = before


def _refuse(what: str, view: RankView) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        frame = sys._getframe(1)
        while frame.f_back is not None and not frame.f_code.co_filename.startswith(view.folder):
            frame = frame.f_back
        raise UnsupportedError(
            f"{what}: cannot be checked, as the simulated machine has one thread for each rank "
            f"({frame.f_code.co_filename}:{frame.f_lineno})"
        )

    return refuse
