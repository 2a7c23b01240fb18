"""A program file as a case of the simulator: each rank executes it from its beginning, as a launcher would.

A file may declare `CHECK = {...}`: keyword arguments for its main function, small enough to be checked, and
`"ranks"`, the number of ranks it needs. Its main is the one marked with `pt.program`.
"""

from __future__ import annotations

import contextlib
import io
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, Final

from peertile.checker.isolation import RankView, Worlds
from peertile.checker.links import SimHub, SimLink
from peertile.checker.loops import Network
from peertile.comm.group import Group, RankModel
from peertile.comm.launcher import Program, join_as
from peertile.direct import fingerprint
from peertile.errors import ArgumentError, LaunchError, LeaseError, PeerFailed, SymmetryError, UnsupportedError
from peertile.ir.core import Kernel
from peertile.runtime.device import Device
from peertile.runtime.drivers.sim import SimDevice
from peertile.runtime.stream import abandon
from peertile.sim.binary import compile_function
from peertile.sim.choices import Chooser
from peertile.sim.conditions import USUAL, Conditions
from peertile.sim.hosts import Host
from peertile.sim.machine import Found, Machine
from peertile.sim.runs import Case, Outcome
from peertile.sim.verdicts import CollectiveMismatch, Deadlock, HostError, LaunchContract, Verdict
from peertile.sim.words import Rule

__all__ = ["CHECKED", "CannotCheck", "ProgramCase", "SimCompiler", "compiled"]

CHECKED: Final = "__peertile_check__"
"""The name of a file's module where its main is called, and the file is not run as a script."""


def compiled(path: Path) -> CodeType:
    """The code of a file, under its own future statements and not under those of this module."""
    return compile(path.read_bytes(), str(path.resolve()), "exec", dont_inherit=True)


class CannotCheck(UnsupportedError):
    """The program does something that the simulated machine does not do."""


class SimCompiler:
    """Compiles kernels for the machine, each once however often ranks and schedules ask. `change` makes mutants."""

    def __init__(self, change: Callable[[Kernel], Kernel] | None = None) -> None:
        self._change = change
        self._made: dict[Any, Any] = {}
        self.order_faults: dict[str, str] = {}

    def compile_function(
        self, fn: Any, name: str, unsafe: bool, types: dict[str, Any], consts: dict[str, Any], grid_rank: int = 1,
        groups: dict[str, int] | None = None,
    ) -> Any:  # fmt: skip
        parts = fingerprint(fn)
        if parts is None:
            return self._make(fn, name, unsafe, types, consts, grid_rank, groups)
        key = (name, unsafe, tuple(types.items()), repr(sorted(consts.items())), grid_rank, repr(groups), parts)
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = self._make(fn, name, unsafe, types, consts, grid_rank, groups)
        return found

    def _make(
        self, fn: Any, name: str, unsafe: bool, types: dict[str, Any], consts: dict[str, Any], grid_rank: int,
        groups: dict[str, int] | None,
    ) -> Any:  # fmt: skip
        made = compile_function(fn, name, unsafe, types, consts, grid_rank, groups, self._change)
        for fault in made.binary.order_faults:  # type: ignore[attr-defined]
            self.order_faults[str(fault.loc)] = fault.message
        return made


class ProgramCase(Case):
    """A file, or a function called with the group, on `ranks` ranks. `arguments` go to its main function."""

    def __init__(
        self, program: Path | Callable[..., Any], ranks: int, *, arguments: dict[str, Any] | None = None,
        argv: list[str] | None = None, resident: int | None = None, max_steps: int = 2_000_000,
        change: Callable[[Kernel], Kernel] | None = None, conditions: Conditions = USUAL,
    ) -> None:  # fmt: skip
        self.program = program
        self.arguments = arguments
        self.argv = argv or []
        self.compiler = SimCompiler(change)
        self.output = ""
        self._code: CodeType | None = None
        if isinstance(program, Path):
            self.folder = program.resolve().parent
            self._code = compiled(program)
        else:
            self.folder = Path(program.__code__.co_filename).parent if hasattr(program, "__code__") else Path.cwd()
        self._hosts: list[Host] = []
        self._devices: list[Device] = []
        self._hub: SimHub
        self._heard: Verdict | None = None
        """What a rank heard of another one, until that one has told it itself."""
        self._views: list[RankView] = []
        self._worlds = Worlds()
        super().__init__(
            self._build, ranks=ranks, resident=resident, max_steps=max_steps, cleanup=self._stop, conditions=conditions
        )

    # ---------------------------------------------------------------- one run

    def _once(self, chooser: Chooser, rule: Rule, park: Any, foresight: Any) -> Outcome:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            self._heard = None
            outcome = super()._once(chooser, rule, park, foresight)
        self.output = printed.getvalue()
        if self._heard is not None and (outcome.verdict is None or isinstance(outcome.verdict, Deadlock)):
            outcome.verdict = self._heard
        refused = next((view.calls.refused for view in self._views if view.calls.refused is not None), None)
        if refused is not None:  # whatever came of it, it is not what the program does
            raise CannotCheck(str(refused)) from refused
        return outcome

    def _build(self, machine: Machine) -> None:
        hub = self._hub = SimHub(machine, self.ranks)
        machine.where = self._where
        self._hosts, self._views = [], []
        worlds, network = Worlds(), Network()
        self._worlds = worlds
        views = self._views
        machine.show = lambda rank: worlds.show(views[rank])
        for rank in range(self.ranks):
            name = str(self.program) if isinstance(self.program, Path) else "program"
            view = RankView(machine, rank, self.ranks, self.folder, [name, *self.argv], network)
            views.append(view)
            host = Host(machine, rank, partial(self._main, machine, hub, rank, view))
            view.bind(host)
            host.failed = partial(self._failed, rank)
            self._hosts.append(host)

    def _main(self, machine: Machine, hub: SimHub, rank: int, view: RankView) -> None:
        host = self._hosts[rank]
        group = Group(SimLink(hub, rank, host), 0, tuple(range(self.ranks)), rank, model=RankModel.THREADS)
        device = Device(SimDevice(machine, rank))
        device.compiler = self.compiler
        self._devices.append(device)
        view.work_on(device)
        with join_as(group):
            self._call(group, view)
        group.close()

    def _call(self, group: Group, view: RankView) -> None:
        if not isinstance(self.program, Path):
            self.program(group, **(self.arguments or {}))
            return
        assert self._code is not None
        declared = self.arguments is not None
        module = ModuleType(CHECKED if declared else "__main__")
        module.__file__ = str(self.program.resolve())
        for name in {"__main__", module.__name__}:
            view.adopt(name, module)
        exec(self._code, module.__dict__)
        if declared:
            find_main(module, self.program).function(group, **(self.arguments or {}))

    def _where(self) -> str:
        """The line of the program that its host is at."""
        frame = sys._getframe(2)
        folder = str(self.folder)
        found: FrameType | None = frame
        while found is not None:
            if found.f_code.co_filename.startswith(folder):
                return f"{found.f_code.co_filename}:{found.f_lineno}"
            found = found.f_back
        return ""

    def _failed(self, rank: int, error: BaseException) -> None:
        while isinstance(error, BaseExceptionGroup):  # of tasks: the others were cancelled because of the first
            error = error.exceptions[0]
        if isinstance(error, UnsupportedError):
            raise CannotCheck(str(error)) from error
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return
        text = f"{type(error).__name__}: {error}"
        message = str(error).split("\n")[0]
        if isinstance(error, SymmetryError):
            raise Found(CollectiveMismatch(message=f"SymmetryError: {message}", calls=self._hub.calls()))
        if isinstance(error, PeerFailed) and error.rank in self._hub.left:
            message = f"rank {error.rank} has ended, and rank {rank} calls {self._hub.last.get(rank, 'it')}"
            raise Found(CollectiveMismatch(message=message, calls=self._hub.calls()))
        if isinstance(error, LaunchError | LeaseError):
            text = f"{type(error).__name__}: {error}"
            raise Found(_broken_contract(rank, text, tuple(_frames(error, self.folder))))
        if isinstance(error, PeerFailed) and error.rank != rank:
            # This rank only heard of it; the one that failed is on its way out, and knows more.
            heard: Verdict = HostError(rank=error.rank, error=error.cause)
            if error.cause.startswith(("LaunchError", "LeaseError")):  # it may never come to say so itself
                heard = _broken_contract(error.rank, error.cause, ())
            if not self._hosts[error.rank].done:
                self._heard = heard
                return
            raise Found(heard)
        raise Found(HostError(rank=rank, error=text, trace="\n".join(_frames(error, self.folder))))

    def _stop(self, machine: Machine) -> None:
        machine.stopping = True
        try:
            for host in self._hosts:
                host.stop()
        finally:
            self._worlds.show(None)
            self._hosts = []
            for device in self._devices:
                abandon(device)
            self._devices = []


def _broken_contract(rank: int, text: str, launches: tuple[str, ...]) -> LaunchContract:
    return LaunchContract(
        message=f"rank {rank}: {text}",
        launches=launches,
        repair="launch no more programs that wait for each other than the device holds, and use what an operation "
        "holds on that operation's stream, or behind it",
    )


def _frames(error: BaseException, folder: Path) -> list[str]:
    """The innermost lines of the program that an error came through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(str(folder))]
    return [f"{f.filename}:{f.lineno} in {f.name}: {f.line}" for f in frames[-3:]]


def find_main(module: ModuleType, path: Path) -> Program:
    """The one function of a module that is marked with `pt.program`."""
    found = [value for value in vars(module).values() if isinstance(value, Program)]
    if len(found) != 1:
        raise ArgumentError(
            f"{path}: CHECK gives arguments for the main function, so expected one function marked with @pt.program, "
            f"got {len(found)}"
        )
    return found[0]
