"""Programs of ranks: `init` joins a group, `run` and `spawn` start ranks, `program` marks a main function.

Three ways to become a rank: a launcher set this process's variables; `run` executes this program again
as several processes; threads of this process. Sockets and supervision are elsewhere: rendezvous.py,
supervisor.py. The one piece of state is `_this_process`: a process joins at most one job.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import functools
import io
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

from peertile.comm.coordinator import Dying
from peertile.comm.environment import Placement, read_placement, started_by_launcher
from peertile.comm.group import Group, RankModel, describe
from peertile.comm.lifeline import FunctionTask, Lifeline, Raised, Report, Returned
from peertile.comm.rendezvous import Link, LocalHub, LocalLink, SocketLink, connect, serve
from peertile.comm.supervisor import launch
from peertile.config import config
from peertile.errors import ArgumentError, LaunchError, PeerFailed, PeertileError, UsageError, WaitTimeout
from peertile.runtime.checks import check_callable, check_integer, check_timeout
from peertile.runtime.device import Device
from peertile.runtime.registry import open_rank_device, place_rank, use_device
from peertile.timelines.upper import ranks as ranks_of_timelines

__all__ = [
    "Program", "current_group", "init", "join", "join_as", "lifeline", "loading", "program", "report_failure",
    "run", "spawn",
]  # fmt: skip

_THREAD_GRACE_S = 5.0
_ORPHAN_GRACE_S = 2.0
_LINGER_S = 1.0
_HOST_LINGER_S = 10.0  # rank 0 has ended well and waits for those that meet at its rendezvous


class _ThisProcess:
    """What belongs to the process as a whole: its world group and its launcher."""

    def __init__(self) -> None:
        self.group: Group | None = None
        self.links: list[SocketLink] = []  # of the jobs that it has joined, while anything of them is open
        self.joined: dict[tuple[int, str], int] = {}  # how often it has met others at a port for a job
        self.lifeline: Lifeline | None = None
        self.hooked = False
        self.loading = False  # this rank imports the program of who has spawned it
        self.failed = False  # this rank ends with an error that its peers have been told


_this_process = _ThisProcess()
# The group of a rank that is a thread; threads that a rank starts itself use `_this_process` or get the group passed.
_thread_group: contextvars.ContextVar[Group | None] = contextvars.ContextVar("peertile_group", default=None)


def current_group() -> Group | None:
    """The group that this rank has joined, if it has."""
    return _thread_group.get() or _this_process.group


def _place() -> tuple[int, int, bool] | None:
    """This rank, for timelines: its number, how many there are, and whether it is a thread."""
    own = _thread_group.get()
    group = own or _this_process.group
    return None if group is None else (group.rank, group.size, own is not None)


ranks_of_timelines.place = _place
ranks_of_timelines.has_launcher = lambda: _this_process.lifeline is not None


@contextlib.contextmanager
def join_as(group: Group) -> Iterator[None]:
    """Inside the block, the calling context is the rank of `group`: `init` gives it. For ranks that somebody else
    runs, as the checker does."""
    token = _thread_group.set(group)
    try:
        yield
    finally:
        _thread_group.reset(token)


def init(
    ranks: int | None = None,
    rank: int | None = None,
    local_rank: int | None = None,
    local_ranks: int | None = None,
    port: int | None = None,
    device: Device | None = None,
) -> Group:
    """Joins the group of the launcher that started this process; without a launcher, a group of one.

    Arguments that are given must agree with the launcher's variables. Waits, bounded, until every rank has joined.
    `device` becomes the calling thread's device. By default a process works on the processors; with
    PEERTILE_DEVICE=cuda, as `peertile run --device cuda` sets it, on the GPU whose number is its rank on this host,
    among those that CUDA_VISIBLE_DEVICES leaves it. A second call returns the same group.

    >>> import peertile as pt
    >>> group = pt.init()
    >>> (group.rank, group.size)
    (0, 1)
    """
    group = current_group()
    if group is not None and not group.closed:
        group.check()
        for name, given, there in (("ranks", ranks, group.size), ("rank", rank, group.rank)):
            if given is not None and given != there:
                raise ArgumentError(
                    f"init({name}={given}): this process has joined a group already, with {name}={there}"
                )
        if device is not None:
            use_device(device)
        return group
    place = read_placement(
        os.environ, ranks=ranks, rank=rank, local_rank=local_rank, local_ranks=local_ranks, port=port
    )
    return join(place, device)


def join(place: Placement, device: Device | None = None) -> Group:
    """Joins the job that `place` says, as this process's world group. For those who know their place from elsewhere
    than a launcher's variables, as a process group of another library; others call `init`."""
    place_rank(place.local_rank)
    _hook()
    link: Link = LocalLink(LocalHub(1), 0) if place.size == 1 else _meet(place)
    group = Group(
        *(link, 0, tuple(range(place.size)), place.rank),
        model=RankModel.PROCESSES,
        local_rank=place.local_rank,
        local_size=place.local_size,
    )
    _this_process.group, _this_process.failed = group, False
    if device is not None:
        use_device(device)
    return group


def _meet(place: Placement) -> SocketLink:
    """Joins the other ranks at the rendezvous, which rank 0 opens here.

    A job that these processes join again, once they have left it, is another one, at another place: who is quick is
    not to knock where a slower rank still is in the job before. All ranks have met equally often, so they agree.
    """
    known = (place.port, place.job)
    again = _this_process.joined.get(known, 0)
    job = f"{place.job}+{again}" if again else place.job
    bound = config().wait_timeout_s
    server = serve(place.port, job, place.size, bound) if place.rank == 0 else None
    try:
        link = connect(place.port, job, place.rank, place.size, bound)
    except PeertileError:
        if server is not None:
            server.join(_LINGER_S)  # the others are to hear why, too
        raise
    link.server = server
    _this_process.joined[known] = again + 1
    _this_process.links = [other for other in _this_process.links if not other.finished] + [link]
    return link


class Program:
    """A main function of ranks, called with the group first. Made by `program`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        functools.update_wrapper(self, function)

    def __call__(self, group: Group, *args: Any) -> Any:
        return self.function(group, *args)

    def __reduce__(self) -> str:
        """By name, as functions are pickled and copied."""
        return str(self.function.__qualname__)


def program(function: Callable[..., Any]) -> Program:
    """Marks `function(group, *args)` as what each rank runs: `run`, `spawn` and `peertile check` take it."""
    check_callable("program(function)", function)
    return Program(function)


def run(
    main: Callable[..., Any],
    ranks: int | None = None,
    *,
    args: Sequence[Any] = (),
    model: RankModel = RankModel.PROCESSES,
    port: int | None = None,
) -> Any:
    """Runs `main(group, *args)` on every rank and returns its result on this one.

    Started by a launcher, this process is one rank. Otherwise it starts `ranks` (default 1): as processes, which
    execute this program again from its beginning, and then this process only waits for them, returns None, or
    exits with their status; or as threads, and then the result is rank 0's.
    """
    check_callable("run(main)", main)
    count = 1 if ranks is None else check_integer("run(ranks)", ranks, 1)
    _check_model("run", model)
    _check_args("run", args)
    if started_by_launcher(os.environ):
        return _run_here(main, args, ranks, port)
    if count == 1:
        return _run_here(main, args, None, port)
    if model is RankModel.THREADS:
        return _run_threads(main, count, args)[0]
    report = launch(_own_command(count), count, port=port)
    if report.status != 0:
        print(report.summary(), file=sys.stderr, flush=True)
        raise SystemExit(report.status)
    return None


def spawn(
    function: Callable[..., Any],
    ranks: int,
    args: Sequence[Any] = (),
    *,
    model: RankModel = RankModel.PROCESSES,
    timeout_s: float | None = None,
) -> list[Any]:
    """Runs `function(group, *args)` on `ranks` new ranks and returns their results in rank order.

    This process is none of them. Processes need a function at the top level of a module, and arguments and results
    that can be pickled; each rank imports that module, so at its top level call this under
    `if __name__ == "__main__":` (else UsageError). If a rank fails: PeerFailed naming the first, from its own exception
    where that is known.
    """
    check_callable("spawn(function)", function)
    check_integer("spawn(ranks)", ranks, 1)
    _check_model("spawn", model)
    _check_args("spawn", args)
    if timeout_s is not None:
        check_timeout("spawn(timeout_s)", timeout_s)
    if model is RankModel.THREADS:
        return _run_threads(function, ranks, args, timeout_s)
    if _this_process.loading:  # each rank would start ranks of its own, and those too, without an end
        raise UsageError(
            "spawn: called while a rank imports the program that has spawned it; call it under "
            '`if __name__ == "__main__":`'
        )
    results: list[Any] = [None] * ranks
    raised: dict[int, Raised] = {}

    def take(rank: int, message: Returned | Raised) -> None:
        if isinstance(message, Returned):
            results[rank] = message.value
        else:
            raised[rank] = message

    command = [sys.executable, *_flags(), "-c", "from peertile.comm.child import main; main()"]
    report = launch(command, ranks, task=_task(function, args), timeout_s=timeout_s, on_message=take)
    if report.timed_out:
        raise _time_limit(function, timeout_s)
    if report.signal is signal.SIGINT:
        raise KeyboardInterrupt
    if report.signal is not None:
        signal.raise_signal(report.signal)  # it was meant for this process: by default that ends by it
    failure = report.first_failure
    if failure is not None:
        raise PeerFailed(failure.rank, failure.cause) from _original(raised.get(failure.rank))
    for rank, result in enumerate(results):
        if result is None:
            raise PeerFailed(rank, f"its process ended with status 0 before {_task_name(function)} returned")
    return [pickle.loads(result) for result in results]


def _check_model(function: str, model: Any) -> None:
    if not isinstance(model, RankModel):
        names = " or ".join(f"RankModel.{member.name}" for member in RankModel)
        raise ArgumentError(f"{function}(model): expected {names}, got {model!r}")


def _check_args(function: str, args: Any) -> None:
    if isinstance(args, str | bytes) or not isinstance(args, Sequence):
        raise ArgumentError(f"{function}(args): expected a sequence of arguments, got {args!r}; write ({args!r},)")


def lifeline() -> Lifeline | None:
    """This rank's connection to its launcher, if that is one of ours. Its end ends this process."""
    if _this_process.lifeline is None:
        _this_process.lifeline = Lifeline.inherited(os.environ)
    return _this_process.lifeline


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """While this rank imports the program of who has spawned it."""
    _this_process.loading = True
    try:
        yield
    finally:
        _this_process.loading = False


def report_failure(error: BaseException) -> None:
    """Tells the group and the launcher that this rank ends with `error`. Never waits."""
    cause = describe(error)
    _this_process.failed = True
    group = current_group()
    if group is not None:
        group.dying(cause)
    if _this_process.lifeline is not None:
        _this_process.lifeline.send(Report(cause, error.rank if isinstance(error, PeerFailed) else None))


def _run_here(main: Callable[..., Any], args: Sequence[Any], ranks: int | None, port: int | None) -> Any:
    group = init(ranks=ranks, port=port)
    try:
        return main(group, *args)
    except BaseException as error:
        if not (isinstance(error, SystemExit) and error.code in (None, 0)):
            report_failure(error)
        raise


def _run_threads(
    main: Callable[..., Any], ranks: int, args: Sequence[Any], timeout_s: float | None = None
) -> list[Any]:
    """All ranks as threads of this process."""
    hub = LocalHub(ranks)
    results: list[Any] = [None] * ranks
    failures: list[tuple[int, BaseException]] = []

    def rank_thread(rank: int) -> None:
        group = Group(LocalLink(hub, rank), 0, tuple(range(ranks)), rank, model=RankModel.THREADS)
        _thread_group.set(group)  # a thread has a context of its own
        device: Device | None = None
        try:
            device = open_rank_device(rank)  # and each rank a device
            use_device(device)
            results[rank] = main(group, *args)
        except BaseException as error:
            failures.append((rank, error))
            group.dying(describe(error))
        finally:
            group.close()
            use_device(None)
            if device is not None:
                with contextlib.suppress(LaunchError):  # what a failure left pending ends by the abort word
                    device.close()

    # Daemons: a rank that is deep in other code when Ctrl-C comes cannot keep the process alive.
    threads = [
        threading.Thread(target=rank_thread, args=(rank,), name=f"peertile-rank-{rank}", daemon=True)
        for rank in range(ranks)
    ]
    for thread in threads:
        thread.start()
    try:
        end = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in threads:
            thread.join(None if end is None else max(end - time.monotonic(), 0.0))
        if any(thread.is_alive() for thread in threads):
            raise _time_limit(main, timeout_s)
    except BaseException as error:
        for rank in range(ranks):
            hub.tell(rank, Dying(describe(error)))
        for thread in threads:
            thread.join(_THREAD_GRACE_S / ranks)
        raise
    if failures:
        blamed = [(rank, error) for rank, error in failures if not isinstance(error, PeerFailed) or error.rank == rank]
        rank, first = (blamed or failures)[0]
        raise PeerFailed(rank, describe(first)) from first
    return results


def _task_name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", repr(function)))


def _time_limit(function: Callable[..., Any], timeout_s: float | None) -> WaitTimeout:
    return WaitTimeout(f"spawn({_task_name(function)}): expected its ranks to end within {timeout_s} s; they did not")


def _own_command(ranks: int) -> list[str]:
    """What started this process, to start it again."""
    arguments = sys.orig_argv[1:]
    main = sys.modules.get("__main__")
    if not arguments or sys.flags.interactive or not (hasattr(main, "__file__") or "-c" in arguments):
        raise UsageError(
            f"run(ranks={ranks}): expected a program in a file, which each rank executes again, got an interactive "
            f"session; pass model=RankModel.THREADS, or save the program and start it with peertile run"
        )
    return [sys.executable, *arguments]


def _flags() -> list[str]:
    """Interpreter options that a spawned rank shares with this process."""
    options = [option for warning in sys.warnoptions for option in ("-W", warning)]
    return options + [option for name, value in sys._xoptions.items() for option in ("-X", _xoption(name, value))]


def _xoption(name: str, value: str | bool) -> str:
    return name if value is True else f"{name}={value}"


def _task(function: Callable[..., Any], args: Sequence[Any]) -> FunctionTask:
    plain = function.function if isinstance(function, Program) else function
    module, name = getattr(plain, "__module__", None), getattr(plain, "__qualname__", None)
    owner = sys.modules.get(module or "")
    found: Any = owner
    for part in (name or "").split("."):
        found = getattr(found, part, None)
    if found is None or (found is not function and found is not plain):
        raise ArgumentError(
            f"spawn(function): expected a function at the top level of a module, got {name or function!r}; "
            f"move it there, or pass model=RankModel.THREADS"
        )
    try:
        arguments = pickle.dumps(tuple(args))
    except Exception as error:  # a class of the user may do anything when it is pickled
        raise ArgumentError(
            f"spawn({name}): args: expected values that can be pickled, got {args!r} ({error}); "
            f"make them in the function, or pass model=RankModel.THREADS"
        ) from None
    sys.modules.setdefault("__peertile_main__", sys.modules["__main__"])  # what ranks call it, in pickled results
    file = getattr(owner, "__file__", None)
    return FunctionTask(
        *(str(module), None if file is None else os.path.abspath(file), str(name)),
        *(tuple(sys.path), tuple(sys.argv), arguments),
    )


def _original(raised: Raised | None) -> BaseException | None:
    """The exception of another process, with its traceback as a note."""
    if raised is None:
        return None
    error: BaseException
    try:
        error = pickle.loads(raised.error) if raised.error is not None else RuntimeError("it cannot be pickled")
    except Exception as problem:  # whatever its class does when it is rebuilt
        error = RuntimeError(f"it cannot be unpickled: {describe(problem)}")
    error.add_note(raised.traceback)
    return error


def _hook() -> None:
    """Once in a process: what happens at an uncaught exception, at the end, at a fork, and without a launcher."""
    if _this_process.hooked:
        return
    _this_process.hooked = True
    previous = sys.excepthook

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        report_failure(error)
        stream = sys.stderr
        if previous is not sys.__excepthook__ or stream is None:
            previous(kind, error, trace)
            return
        # In one write: ranks share the launcher's standard error, and it comes in pieces that would mix with theirs.
        with contextlib.redirect_stderr(io.StringIO()) as text:
            previous(kind, error, trace)
        stream.write(text.getvalue())
        stream.flush()

    sys.excepthook = uncaught
    atexit.register(_leave)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_after_fork)
    line = lifeline()
    if line is not None:
        line.watch(_orphaned)


def _leave() -> None:
    """The process ends. Who hosts the rendezvous stays a while for ranks that are still at work: they may have to meet
    each other. Not after a failure, which has ended their work, and which the launcher is to see."""
    if _this_process.group is not None:
        _this_process.group.close()
    if not _this_process.failed:
        end = time.monotonic() + _HOST_LINGER_S
        for link in _this_process.links:
            link.linger(max(end - time.monotonic(), 0.0))


def _after_fork() -> None:
    """A forked child is no rank: it keeps nothing open that would hide the end of its parent from the peers."""
    for link in _this_process.links:
        link.abandon()
    if _this_process.lifeline is not None:
        _this_process.lifeline.abandon()


def _orphaned() -> None:
    """The launcher is gone. The main thread gets a chance to clean up, then the process ends."""
    main = threading.main_thread()
    if not main.is_alive():
        return  # this process is ending by itself
    print("peertile: the launcher of this rank is gone, so the rank ends", file=sys.stderr, flush=True)
    if _this_process.group is not None:
        _this_process.group.dying("its launcher is gone")
    if main.ident is not None:
        signal.pthread_kill(main.ident, signal.SIGINT)
    main.join(_ORPHAN_GRACE_S)
    os._exit(1)
