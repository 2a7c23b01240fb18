"""Every fence of every protocol on and off: a fault is reported exactly when a formula of one line says so.

The formula stands in each test as `right`. A fence that is off is relaxed, not gone.
"""

from itertools import product

import pytest
from tests.sim.kernels import (
    BARRIER,
    PEER,
    SIGNAL,
    all_reduce_kernel,
    box_type,
    build,
    exclusive,
    floats,
)

import peertile.language as T
from peertile.checker.program import ProgramCase
from peertile.cli.bench_checker import handshake_rounds
from peertile.ir.core import Kernel
from peertile.meaning import new_barrier, new_mailbox, new_signal
from peertile.sim.explore import explore
from peertile.sim.runs import Case, kernel_case
from peertile.sim.verdicts import VerdictKind
from peertile.testing.fences import Change, changed, ordering_ops

ON_OFF = (False, True)
SCHEDULES = 4


def without(kernel: Kernel, setting: tuple[bool, ...]) -> Kernel:
    assert len(ordering_ops(kernel)) == len(setting)
    return changed(kernel, [(k, Change.WEAKEN) for k, on in enumerate(setting) if not on])


def agrees(case: Case, right: bool) -> None:
    report = explore(case, SCHEDULES, shrinks=0)
    assert report.clean == right, str(report.verdicts[:1])
    assert report.unconfirmed == 0
    assert right or report.verdicts[0].kind is VerdictKind.RACE


# ---------------------------------------------------------------- signals


def hand_over(out: T.Exclusive, x: T.Peer, ready: T.Signal, done: T.Signal):
    for _ in T.range(2):
        x.at(1 - x.rank).store((0,), T.full((16,), 1.0, T.f32))
        ready.notify()
        ready.wait()
        out.store(x.local.load((0,), (16,)))
        done.notify()
        done.wait()


HAND_OVER = build(hand_over, {"out": exclusive(16), "x": PEER, "ready": SIGNAL, "done": SIGNAL})


@pytest.mark.sentence("MM-8")
@pytest.mark.parametrize("setting", list(product(ON_OFF, repeat=4)))
@pytest.mark.feature("P6", "sim")
def test_signals(setting: tuple[bool, ...]) -> None:
    """Data goes to the peer and its place comes back: two fences for each way."""
    told, heard, answered, known = setting
    right = (told and heard) and (answered and known)
    kernel = without(HAND_OVER, setting)
    agrees(
        kernel_case(kernel, 1, lambda: [floats(2, 16), floats(2, 16), new_signal(2, 1), new_signal(2, 1)], ranks=2),
        right,
    )


# ---------------------------------------------------------------- barriers


def across_ranks(out: T.Exclusive, x: T.Peer, b: T.Barrier):
    x.local.store((0,), T.full((16,), 1.0, T.f32))
    b.sync()
    out.store(x.at(1 - x.rank).load((0,), (16,)))
    b.sync()
    x.local.store((0,), T.full((16,), 2.0, T.f32))


def in_two_halves(out: T.Exclusive, x: T.Peer, b: T.Barrier):
    x.local.store((0,), T.full((16,), 1.0, T.f32))
    b.arrive()
    b.wait()
    out.store(x.at(1 - x.rank).load((0,), (16,)))
    b.arrive()
    b.wait()
    x.local.store((0,), T.full((16,), 2.0, T.f32))


@pytest.mark.parametrize("setting", list(product(ON_OFF, repeat=4)))
@pytest.mark.parametrize("fn", [across_ranks, in_two_halves])
@pytest.mark.feature("P7", "sim")
def test_barriers_of_ranks(fn, setting: tuple[bool, ...]) -> None:
    """Everybody writes, reads the other's, writes again: arrival and departure of both barriers."""
    arrived, left, arrived_again, left_again = setting
    right = (arrived and left) and (arrived_again and left_again)
    kernel = without(build(fn, {"out": exclusive(16), "x": PEER, "b": BARRIER}), setting)
    agrees(kernel_case(kernel, 1, lambda: [floats(2, 16), floats(2, 16), new_barrier(2, 1)], ranks=2), right)


def across_programs(out: T.Exclusive, x: T.Peer):
    p = T.program_id(0)
    x.local.store((p,), T.full((16,), 1.0, T.f32))
    T.sync_programs()
    out.store(x.local.load((1 - p,), (16,)))


@pytest.mark.parametrize("setting", list(product(ON_OFF, repeat=2)))
@pytest.mark.feature("P7", "sim")
def test_barriers_of_programs(setting: tuple[bool, ...]) -> None:
    """The last add continues the release sequence, so the wait is what has to acquire."""
    arrived, left = setting
    right = arrived and left
    kernel = without(build(across_programs, {"out": exclusive(16), "x": PEER}), setting)
    agrees(kernel_case(kernel, 2, lambda: [floats(1, 32), floats(1, 32)]), right)


# ---------------------------------------------------------------- mailboxes


def _mailbox(kernel: Kernel, depth: int, acknowledged: bool) -> Case:
    box = box_type(16, depth, acknowledged)
    return kernel_case(kernel, 1, lambda: [floats(2, 64), floats(2, 64), new_mailbox(box, 2, 1)], ranks=2)


@pytest.mark.sentence("MB-1", "MB-2")
@pytest.mark.parametrize("setting", list(product(ON_OFF, repeat=2)))
@pytest.mark.feature("P9", "sim")
def test_mailboxes_of_depth_two(setting: tuple[bool, ...]) -> None:
    """The next arrival but one says that a slot is free: no fence beyond those of the data."""
    posted, collected = setting
    right = posted and collected
    agrees(_mailbox(without(all_reduce_kernel(16, 2, False), setting), 2, False), right)


@pytest.mark.sentence("MB-1", "MB-2", "MB-3")
@pytest.mark.parametrize("setting", list(product(ON_OFF, repeat=4)))
@pytest.mark.feature("P9", "sim")
def test_mailboxes_with_acknowledgement(setting: tuple[bool, ...]) -> None:
    """Depth one: the slot is free when its reader has said so."""
    free, posted, collected, given_back = setting
    right = (posted and collected) and (given_back and free)
    agrees(_mailbox(without(all_reduce_kernel(16, 1, True), setting), 1, True), right)


# ---------------------------------------------------------------- handshake


@pytest.mark.parametrize("setting", list(product(ON_OFF, repeat=4)))
@pytest.mark.feature("C2", "sim")
def test_the_handshake(setting: tuple[bool, ...]) -> None:
    """Raw pointers: "it has arrived" and "it has been read", each released and acquired, over two rounds."""
    arrived, seen, read, free = setting
    right = (arrived and seen) and (read and free)
    case = ProgramCase(handshake_rounds(2), 2, change=lambda kernel: without(kernel, setting))
    agrees(case, right)
