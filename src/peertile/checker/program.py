"""A program file as a case of the simulator: each rank executes it from its beginning, as a launcher would.

A file may declare `CHECK = {...}`: keyword arguments for its main function, small enough to be checked, and
`"ranks"`, the number of ranks it needs. Its main is the one marked with `pt.program`.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, Final

from peertile.checker.isolation import RankView, Worlds
from peertile.checker.links import SimHub, SimLink
from peertile.checker.loops import Network
from peertile.checker.sources import Sources
from peertile.checker.streams import Printed, printing_to
from peertile.checker.watch import HOST_SECONDS, Watch
from peertile.comm.group import Group, RankModel
from peertile.comm.launcher import Program, join_as
from peertile.direct import fingerprint, written
from peertile.errors import ArgumentError, LaunchError, LeaseError, PeerFailed, SymmetryError, UnsupportedError
from peertile.ir.core import Kernel
from peertile.runtime.device import Device
from peertile.runtime.drivers.sim import SimDevice
from peertile.runtime.stream import abandon
from peertile.sim.binary import compile_function
from peertile.sim.choices import Chooser, ReplayChooser
from peertile.sim.conditions import USUAL, Conditions
from peertile.sim.hosts import Host
from peertile.sim.machine import Found, Machine
from peertile.sim.runs import Case, Outcome
from peertile.sim.verdicts import CollectiveMismatch, Deadlock, HostError, LaunchContract, Verdict
from peertile.sim.words import Rule

__all__ = ["CHECKED", "CannotCheck", "ProgramCase", "SimCompiler", "compiled"]

CHECKED: Final = "__peertile_check__"
"""The name of a file's module where its main is called, and the file is not run as a script."""


_WANTED: Final = re.compile(r"init\(ranks=(\d+)\): this process has joined a group")


class CannotCheck(UnsupportedError):
    """The program does something that the simulated machine does not do, or nothing at all."""


def compiled(path: Path) -> CodeType:
    """The code of a file, under its own future statements and not under those of this module."""
    name = str(path.resolve())
    try:
        return compile(path.read_bytes(), name, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, OSError) as error:  # ValueError: null bytes
        line = getattr(error, "lineno", None)
        text = getattr(error, "msg", None) or getattr(error, "strerror", None) or error
        raise CannotCheck(
            f"check: program: expected a file of Python, got {type(error).__name__}: {text} "
            f"({name}{'' if line is None else f':{line}'})"
        ) from None


class HostStuck(BaseException):
    """Ends a host that goes on and on without letting others go on: not an Exception, as a loop may catch those."""


class _RankGroup(Group):
    """Tells that the program has come to it."""

    asked: Callable[[], None]

    def check(self) -> None:
        self.asked()
        super().check()


_KEPT: Final = 48
_kept: Final[OrderedDict[Any, Any]] = OrderedDict()
"""Kernels made for any case of this process, those used last: what is checked again, with other seeds or on more ranks,
is compiled once. Nothing of a run is in them, and their key is what a kernel means, with the place of each line. What
has a constant that cannot be written down is not among them: another one may look the same in another run."""


def _functions(value: Any) -> Iterator[FunctionType]:
    """Those among constants: their names say nothing of what they do, and may be another's later."""
    if isinstance(value, FunctionType):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _functions(item)


class SimCompiler:
    """Compiles kernels for the machine, each once however often ranks and schedules ask. `change` makes mutants, which
    no other case sees."""

    def __init__(self, change: Callable[[Kernel], Kernel] | None = None) -> None:
        self._change = change
        self._made: dict[Any, Any] = {}
        self.order_faults: dict[str, str] = {}

    def compile_function(
        self, fn: Any, name: str, unsafe: bool, types: dict[str, Any], consts: dict[str, Any], grid_rank: int = 1,
        groups: dict[str, int] | None = None,
    ) -> Any:  # fmt: skip
        parts = [fingerprint(each) for each in (fn, *_functions(tuple(consts.values())))]
        asked = fn, name, unsafe, types, consts, grid_rank, groups, self._change
        if None in parts:
            return self._noted(compile_function(*asked))
        key = (name, unsafe, tuple(types.items()), repr(sorted(consts.items())), grid_rank, repr(groups), *parts)
        found = self._made.get(key)
        if found is not None:
            return found
        is_kept = self._change is None and written(tuple(consts.values())) is not None
        found = _kept.get(key) if is_kept else None
        if found is None:
            found = compile_function(*asked)
        self._made[key] = self._noted(found)
        if is_kept:
            _kept[key] = found
            _kept.move_to_end(key)
            if len(_kept) > _KEPT:
                _kept.popitem(last=False)
        return found

    def _noted(self, made: Any) -> Any:
        for fault in made.binary.order_faults:
            self.order_faults[str(fault.loc)] = fault.message
        return made


class ProgramCase(Case):
    """A file, or a function called with the group, on `ranks` ranks. `arguments` go to its main function; with
    `only_top` that is not called. With `follow_faults` a kernel that fails does not end the run: its host hears of
    it, as of a device's."""

    def __init__(
        self, program: Path | Callable[..., Any], ranks: int, *, arguments: dict[str, Any] | None = None,
        argv: list[str] | None = None, resident: int | None = None, max_steps: int = 2_000_000,
        change: Callable[[Kernel], Kernel] | None = None, conditions: Conditions = USUAL,
        host_seconds: float = HOST_SECONDS, only_top: bool = False, follow_faults: bool = False,
    ) -> None:  # fmt: skip
        self.program = program
        self.arguments = arguments
        self.argv = argv or []
        self.compiler = SimCompiler(change)
        self.output = ""
        self.host_seconds = host_seconds
        self._only_top = only_top
        self.follow_faults = follow_faults
        self.did_anything = False
        """Whether a rank has asked for its group, or used its device."""
        self.module: ModuleType | None = None
        """The file's module on the rank that came to its end last."""
        self._code: CodeType | None = None
        if isinstance(program, Path):
            self._code = compiled(program)
            self.sources = Sources(program.resolve().parent, self._code.co_filename)
        else:
            plain = program.function if isinstance(program, Program) else program
            file = plain.__code__.co_filename if hasattr(plain, "__code__") else ""
            self.sources = Sources(Path(file).parent if os.path.isabs(file) else Path.cwd(), file)
        self._is_stuck: HostStuck | None = None
        """A host has run for too long, and may have caught that."""
        self._never_ends = False
        """In an earlier run a host did not end, whatever it was told: it is not asked in vain a hundred times again."""
        self._machine: Machine
        self._watch = self._new_watch()
        self._printed = Printed()
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

    def top(self, name: str) -> Any:
        """A value of the file once its top level was executed, its main function not; None if there is none."""
        self.run(ReplayChooser(()))
        return getattr(self.module, name, None)

    # ---------------------------------------------------------------- one run

    def _once(self, chooser: Chooser, rule: Rule, park: Any, foresight: Any) -> Outcome:
        self._printed = Printed()
        self._watch = self._new_watch()
        self._is_stuck = None
        own = printing_to(self._printed, "<stdout>")  # of what no rank prints: the machine's own, on their behalf
        try:
            with self._watch.on(), contextlib.redirect_stdout(own), contextlib.redirect_stderr(own):
                self._heard = None
                outcome = super()._once(chooser, rule, park, foresight)
        except HostStuck as stuck:
            raise CannotCheck(str(stuck)) from None
        finally:
            own.flush()
            for view in self._views:
                view.flush()
            self.output = self._printed.text()
        if self._watch.heard is not None:  # though the program may have caught it
            raise self._watch.heard
        if self._is_stuck is not None:
            raise CannotCheck(str(self._is_stuck))
        if self._heard is not None and (outcome.verdict is None or isinstance(outcome.verdict, Deadlock)):
            outcome.verdict = self._heard
        refused = next((view.calls.refused for view in self._views if view.calls.refused is not None), None)
        if refused is not None:  # whatever came of it, it is not what the program does
            raise CannotCheck(str(refused)) from refused
        self.did_anything = self.did_anything or bool(outcome.machine.memory.objects)
        return outcome

    def _new_watch(self) -> Watch:
        return Watch(self.host_seconds, lambda: self._machine.steps, self._stuck, self._end)

    def _stuck(self, frame: FrameType | None) -> None:
        """Raises where the host is that has run for too long, or the kernel."""
        machine = self._machine
        host = machine.host
        why = f"it ran for {self.host_seconds:g} s without letting others go on; --host-seconds N allows more"
        if host is not None:
            error = HostStuck(str(self._views[host.rank].calls.refusal(host.where(), why, frame)[0]))
            if self._is_stuck is None and not machine.stopping:  # of what it does at its end, the run has its verdict
                self._is_stuck = error
            host.tell(error)
            return
        if machine.stopping and self._watch.stands_for < self.host_seconds:
            return  # hosts have less time at their end, the machine itself does not, and the run has its verdict
        agent: Any = machine.ready[machine.current] if machine.current < len(machine.ready) else None
        who, launched = ("the machine", "") if agent is None else (agent.where(), agent.launched())
        raise HostStuck(f"{who}: cannot be checked, as {why}{launched and f' ({launched})'}")

    def _end(self, error: BaseException) -> None:
        """Raises it in the host that runs, if one does."""
        host = self._machine.host if self._hosts else None
        if host is None:
            raise error
        host.tell(error)

    def _build(self, machine: Machine) -> None:
        self._machine = machine
        machine.ends_at_faults = not self.follow_faults
        hub = self._hub = SimHub(machine, self.ranks)
        machine.where, machine.line_of = self._where, self.sources.line_of
        self._hosts, self._views = [], []
        worlds, network = Worlds(), Network()
        self._worlds = worlds
        views = self._views
        machine.show = lambda rank: worlds.show(views[rank])
        for rank in range(self.ranks):
            argv = [str(self.program) if isinstance(self.program, Path) else "program", *self.argv]
            view = RankView(machine, rank, self.ranks, self.sources, argv, network, self._printed)
            views.append(view)
            host = Host(machine, rank, partial(self._main, machine, hub, rank, view))
            view.bind(host)
            host.failed = partial(self._failed, rank)
            self._hosts.append(host)

    def _main(self, machine: Machine, hub: SimHub, rank: int, view: RankView) -> None:
        host = self._hosts[rank]
        group = _RankGroup(SimLink(hub, rank, host), 0, tuple(range(self.ranks)), rank, model=RankModel.THREADS)
        group.asked = self._asked
        device = Device(SimDevice(machine, rank))
        device.compiler = self.compiler
        self._devices.append(device)
        view.work_on(device)
        with join_as(group):
            try:
                self._call(group, view)
            except SystemExit as end:
                if end.code not in (None, 0):
                    raise
            except KeyboardInterrupt as error:
                if error is self._watch.heard:
                    raise
                raise Found(self._host_error(rank, error)) from None
            view.end()
        group.close()

    def _asked(self) -> None:
        self.did_anything = True

    def _call(self, group: Group, view: RankView) -> None:
        if not isinstance(self.program, Path):
            self.did_anything = True
            self.program(group, **(self.arguments or {}))
            return
        assert self._code is not None
        declared = self.arguments is not None or self._only_top
        module = self._execute(CHECKED if declared else "__main__", view)
        if not declared or self._only_top:
            return
        if self.arguments or find_mains(module) or "__main__" not in self._code.co_consts:
            self._call_main(group, module)
        else:  # it declares its ranks alone, and is a script
            self._execute("__main__", view)

    def _call_main(self, group: Group, module: ModuleType) -> None:
        found = find_mains(module)
        if len(found) == 1:
            self.did_anything = True
            main, arguments = found[0].function, self.arguments or {}
            signature = inspect.signature(main)
            try:
                signature.bind(group, **arguments)
            except TypeError as error:
                raise CannotCheck(
                    f"{self.program}: CHECK: expected arguments of {main.__name__}{signature}, got "
                    f"{', '.join(arguments) or 'none'}: {error}"
                ) from None
            main(group, **arguments)
        elif found or self.arguments:
            raise CannotCheck(
                f"{self.program}: CHECK gives arguments for the main function, so expected one function marked with "
                f"@pt.program, got {len(found)}"
            )

    def _execute(self, name: str, view: RankView) -> ModuleType:
        """The file's module, executed under `name`."""
        assert self._code is not None
        module = ModuleType(name)
        module.__file__ = self._code.co_filename
        for known in {"__main__", name}:
            view.adopt(known, module)
        exec(self._code, module.__dict__)
        self.module = module
        return module

    def _where(self) -> str:
        """The line of the program that its host is at."""
        return self.sources.line_of(sys._getframe(1))

    def _failed(self, rank: int, error: BaseException) -> None:
        while isinstance(error, BaseExceptionGroup):  # of tasks: the others were cancelled because of the first
            error = error.exceptions[0]
        if isinstance(error, HostStuck):
            raise error
        if isinstance(error, UnsupportedError):
            raise CannotCheck(str(error)) from error
        if isinstance(error, ImportError | SyntaxError):
            at = _frames(error, self.sources)
            place = f" ({at[-1].split(' in ')[0]})" if at else ""
            raise CannotCheck(f"rank {rank}: cannot be checked, as it got {_described(error)}{place}") from error
        wanted = _WANTED.match(str(error)) if isinstance(error, ArgumentError) else None
        if wanted is not None:
            raise CannotCheck(
                f"rank {rank}: cannot be checked on {self.ranks} ranks, as the program asks for {wanted[1]}; "
                f"check it with --ranks {wanted[1]}"
            ) from error
        text = _described(error)
        message = str(error).split("\n")[0]
        if isinstance(error, SymmetryError):
            raise Found(CollectiveMismatch(message=f"SymmetryError: {message}", calls=self._hub.calls()))
        if isinstance(error, PeerFailed) and error.rank in self._hub.left:
            message = f"rank {error.rank} has ended, and rank {rank} calls {self._hub.last.get(rank, 'it')}"
            raise Found(CollectiveMismatch(message=message, calls=self._hub.calls()))
        if isinstance(error, LaunchError | LeaseError):
            raise Found(_broken_contract(rank, text, tuple(_frames(error, self.sources))))
        if isinstance(error, PeerFailed) and error.rank != rank:
            # This rank only heard of it; the one that failed is on its way out, and knows more.
            heard: Verdict = HostError(rank=error.rank, error=error.cause)
            if error.cause.startswith(("LaunchError", "LeaseError")):  # it may never come to say so itself
                heard = _broken_contract(error.rank, error.cause, ())
            if not self._hosts[error.rank].done:
                self._heard = heard
                return
            raise Found(heard)
        raise Found(self._host_error(rank, error))

    def _host_error(self, rank: int, error: BaseException) -> HostError:
        return HostError(rank=rank, error=_described(error), trace="\n".join(_frames(error, self.sources)))

    def _stop(self, machine: Machine) -> None:
        machine.stopping = True
        try:
            self._watch.hurry()
            for host in self._hosts:
                if self._never_ends:
                    host.leave()
                else:
                    host.stop()
                    self._never_ends = host.is_left
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


def _described(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _frames(error: BaseException, sources: Sources) -> list[str]:
    """The innermost lines of the program that an error came through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if sources.owns(f.filename)]
    return [f"{f.filename}:{f.lineno} in {f.name}: {f.line}" for f in frames[-3:]]


def find_mains(module: ModuleType) -> list[Program]:
    """The functions of a module that are marked with `pt.program`."""
    return [value for value in vars(module).values() if isinstance(value, Program)]
