"""Hosts that catch whatever ends them and go on, and runs that have no end: a check ends all the same, and says why."""

import asyncio
import gc
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

import peertile as pt
import peertile.language as T
from peertile.checker import watch
from peertile.checker.check import CheckReport, check
from peertile.checker.program import CannotCheck, HostStuck, ProgramCase
from peertile.memory_model import Order
from peertile.sim import explore as exploration
from peertile.sim.explore import explore
from peertile.sim.runs import Case
from peertile.sim.scripts import Cell, script_case
from peertile.sim.verdicts import Deadlock

KILL = os.kill
"""The real one: a rank sees another."""


@pt.kernel
def waits_in_vain(out: T.Exclusive, ready: T.Signal):
    ready.wait()  # wait
    out.store(T.full((16,), 1.0, T.f32))


def at(text: str) -> str:
    """`file:line` of the line here that ends with the mark `text`."""
    lines = Path(__file__).read_text().split("\n")
    (found,) = [k for k, line in enumerate(lines, 1) if line.endswith(f"  # {text}")]
    return f"{__file__}:{found}"


def syncs_again(launch) -> None:
    while True:
        with suppress(BaseException):
            launch().sync()  # sync


def asks_again(launch) -> None:
    future = launch().schedule()
    while True:
        with suppress(BaseException):
            future.wait()  # ask


def computes_then(launch) -> None:
    try:
        launch().sync()  # compute
    except BaseException:
        while True:
            try:
                for _ in range(1000):
                    sum(range(1000))
            except BaseException:
                pass


async def again(launch) -> None:
    while True:
        with suppress(BaseException):
            await launch()  # await


def awaits_again(launch) -> None:
    asyncio.run(again(launch))  # run


def deadlock(host) -> CheckReport:
    def main(group) -> None:
        with pt.SymmetricHeap(group, size_bytes=1 << 14) as heap:
            out, ready = pt.zeros((16,), pt.f32), heap.signal(slots=1)
            host(lambda: waits_in_vain(out.partition(16), ready))

    return check(main, 2, schedules=2)


def waiting(mark: str) -> str:
    """Of the report, the programs: none goes on, since nobody notifies."""
    return (
        "".join(
            f"  program 0 of waits_in_vain on rank {rank} waits for ready.arrived[0, {1 - rank}] on rank {rank} at_least 1; "
            "last saw 0, nobody has written it\n"
            f"      {at('wait')} in waits_in_vain\n"
            "        ready.wait()  # wait\n"
            "        ^^^^^^^^^^^^\n"
            f"    launched at {at(mark)}\n"
            for rank in range(2)
        )
        + "  replay: --seed 0 or --choices z0"
    )


@pytest.mark.feature("C3", "sim")
@pytest.mark.parametrize(("host", "mark"), [(syncs_again, "sync"), (asks_again, "ask"), (computes_then, "compute")])
def test_a_deadlock_is_reported_though_the_host_catches_what_ends_it(host, mark, monkeypatch) -> None:
    monkeypatch.setattr(watch, "STOP_SECONDS", 0.2)
    hosts = "".join(
        f"  the host thread of rank {rank} waits for waits_in_vain on stream 1 of rank {rank}\n    at {at(mark)}\n"
        for rank in range(2)
    )
    assert str(deadlock(host).verdicts[0]) == (
        "deadlock: 4 agents wait and nobody is left who could let them go on\n" + hosts + waiting(mark)
    )


@pytest.mark.feature("C3", "sim")
def test_a_deadlock_is_reported_though_a_task_catches_what_ends_its_loop(monkeypatch) -> None:
    monkeypatch.setattr(watch, "STOP_SECONDS", 0.2)
    hosts = "".join(
        f"  the host thread of rank {rank} waits for its event loop; 1 task waits: again at {at('await')} ({at('run')})\n"
        for rank in range(2)
    )
    assert str(deadlock(awaits_again).verdicts[0]) == (
        "deadlock: 4 agents wait and nobody is left who could let them go on\n" + hosts + waiting("await")
    )


def test_a_host_that_runs_for_too_long_and_catches_that_is_an_error_with_its_line() -> None:
    def main(group) -> None:
        while True:
            try:
                for _ in range(1000):
                    sum(range(1000))  # for ever
            except BaseException:
                pass

    with pytest.raises(CannotCheck) as caught:
        check(main, 1, schedules=2, host_seconds=0.2)
    assert str(caught.value) == (
        "the host thread of rank 0: cannot be checked, as it ran for 0.2 s without letting others go on; "
        f"--host-seconds N allows more ({at('for ever')})"
    )


def test_ctrl_c_ends_a_check_of_a_host_that_catches_it() -> None:
    met = []

    def main(group) -> None:
        while True:
            try:
                met.append(group.rank)
                if len(met) == 3:
                    KILL(os.getpid(), signal.SIGINT)
                pt.zeros((16,), pt.f32).numpy()
            except BaseException:
                pass

    with pytest.raises(KeyboardInterrupt):
        check(main, 1, schedules=1)
    assert len(met) < 3 + 2 * 101


@pytest.mark.feature("C1", "sim")
def test_a_run_without_an_end_is_not_run_a_hundred_times_to_shrink_it(monkeypatch) -> None:
    word = Cell("f")

    def spin(p):
        while True:
            yield from p.add(word, 1, Order.RELAXED)

    ran = []

    class Counted(Case):
        def _once(self, chooser, rule, park, foresight):
            ran.append(type(chooser).__name__)
            return super()._once(chooser, rule, park, foresight)

    plain = script_case([spin, spin], max_steps=500)
    case = Counted(plain.build, ranks=plain.ranks, max_steps=500)
    monkeypatch.setattr(exploration, "SHRINK_STEPS", 1000)
    (verdict,) = explore(case, 1).verdicts
    assert isinstance(verdict, Deadlock)
    assert verdict.why == "the run was longer than 500 steps: nobody makes progress"
    assert 1 < len(ran) <= 4
    monkeypatch.setattr(exploration, "SHRINK_STEPS", 100)
    ran.clear()
    (verdict,) = explore(case, 1, seed=7).verdicts
    assert (len(ran), str(verdict.replay)) == (1, "--seed 7")


def test_at_its_end_the_machine_has_the_time_that_it_always_has() -> None:
    case = ProgramCase(lambda group: None, 1)
    case._machine = SimpleNamespace(host=None, stopping=True, ready=[], current=0)
    case._watch = SimpleNamespace(stands_for=59.0)
    case._stuck(None)  # a host would be told to stop
    case._watch.stands_for = 60.0
    with pytest.raises(HostStuck) as stuck:
        case._stuck(None)
    assert str(stuck.value) == (
        "the machine: cannot be checked, as it ran for 60 s without letting others go on; --host-seconds N allows more"
    )


def test_nothing_is_raised_in_a_finaliser_which_would_drop_it() -> None:
    found = []

    class Owner:
        def __del__(self) -> None:
            found.append(watch.is_dropped(sys._getframe()))

    Owner()
    gc.collect()
    found.append(watch.is_dropped(sys._getframe()))
    assert found == [True, False]


def test_nothing_is_raised_where_the_collector_has_called_which_would_drop_it() -> None:
    found = []

    def inner() -> None:
        found.append(watch.is_dropped(sys._getframe()))

    def called(phase, info) -> None:
        inner()

    gc.callbacks.append(called)
    try:
        gc.collect()
        inner()
    finally:
        gc.callbacks.remove(called)
    assert found[-3:] == [True, True, False]
