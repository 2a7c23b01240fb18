"""Fence toggles: every fence on and off, reported exactly when a formula of one line says so."""

from itertools import product

import numpy as np
import pytest
from tests.sim.kernels import all_reduce_kernel, box_type, floats, scale_kernel, two_shot_kernel

from peertile.meaning import PerRank, new_mailbox, new_signal
from peertile.memory_model import Order, Scope
from peertile.sim.explore import exhaust, explore
from peertile.sim.runs import Step, sequence_case
from peertile.sim.scripts import Cell, script_case
from peertile.sim.verdicts import VerdictKind
from peertile.testing.fences import Change, changed, mutants, ordering_ops

ON_OFF = (False, True)


@pytest.mark.parametrize(("before", "release", "acquire", "after"), list(product(ON_OFF, repeat=4)))
@pytest.mark.sentence("MM-24")
@pytest.mark.sentence("MM-26")
def test_message_passing(before: bool, release: bool, acquire: bool, after: bool) -> None:
    x, flag = Cell("x"), Cell("flag", rank=1)

    def writer(p):
        p.write(x)
        if before:
            p.fence()
        yield from p.put(flag, 1, Order.RELEASE if release else Order.RELAXED)

    def reader(p):
        yield from p.wait(flag, 1, order=Order.ACQUIRE if acquire else Order.RELAXED)
        if after:
            p.fence()
        p.read(x)

    report = exhaust(script_case([(0, writer), (1, reader)]))
    correct = (before or release) and (acquire or after)
    assert report.clean == correct
    assert report.clean == report.complete


@pytest.mark.parametrize(("peer", "wide_store", "wide_wait"), list(product(ON_OFF, repeat=3)))
@pytest.mark.sentence("MM-5")
def test_scopes_must_include_both_agents(peer: bool, wide_store: bool, wide_wait: bool) -> None:
    x, flag = Cell("x"), Cell("flag")
    scopes = (Scope.DEVICE, Scope.SYSTEM)

    def writer(p):
        p.write(x)
        yield from p.put(flag, 1, scope=scopes[wide_store])

    def reader(p):
        yield from p.wait(flag, 1, scope=scopes[wide_wait])
        p.read(x)

    report = exhaust(script_case([(0, writer), (1 if peer else 0, reader)]))
    correct = not peer or (wide_store and wide_wait)
    assert report.clean == correct


@pytest.mark.parametrize(("first", "second", "third"), list(product(ON_OFF, repeat=3)))
@pytest.mark.sentence("MM-25")
def test_updates_continue_a_release_sequence(first: bool, second: bool, third: bool) -> None:
    x, flag = Cell("x"), Cell("flag")

    def writer(p):
        p.write(x)
        yield from p.put(flag, 1, Order.RELEASE if first else Order.RELAXED)

    def middle(p):
        yield from p.wait(flag, 1, order=Order.RELAXED)
        yield from p.add(flag, 1, Order.RELEASE if second else Order.RELAXED)

    def reader(p):
        yield from p.wait(flag, 2, order=Order.ACQUIRE if third else Order.RELAXED)
        p.read(x)

    report = exhaust(script_case([writer, middle, reader]))
    kinds = {verdict.kind for verdict in report.verdicts}
    if not (first and third):
        assert VerdictKind.RACE in kinds or VerdictKind.WORD in kinds


def _two_shot_case(kernel, ranks: int = 2, programs: int = 2):
    prepare, finish = scale_kernel(), scale_kernel()

    def make():
        n = 16 * 2 * ranks
        source, x, out, sink = floats(ranks, n), floats(ranks, n), floats(ranks, n), floats(ranks, n)
        signal = new_signal(ranks, programs)
        tiles = n // 16
        first = Step(prepare, tiles, [x, source])
        again = Step(kernel, programs, [out, x, signal])
        return [first, again, Step(finish, tiles, [sink, out]), first, again, Step(finish, tiles, [sink, out])]

    return sequence_case(make, ranks=ranks)


TWO_SHOT = two_shot_kernel()


@pytest.mark.parametrize("setting", list(product(ON_OFF, repeat=4)))
@pytest.mark.feature("C2", "sim")
def test_two_shot(setting: tuple[bool, bool, bool, bool]) -> None:
    assert [op.NAME for op in ordering_ops(TWO_SHOT)] == ["word_store", "wait", "word_store", "wait"]
    kernel = changed(TWO_SHOT, [(k, Change.WEAKEN) for k, on in enumerate(setting) if not on])
    notify1, wait1, notify2, wait2 = setting
    correct = notify1 and wait1 and notify2 and wait2
    assert explore(_two_shot_case(kernel), 6, shrinks=0).clean == correct


def test_every_mutant_of_two_shot_is_reported() -> None:
    found = list(mutants(TWO_SHOT))
    assert len(found) == 20
    missed = [str(m) for m in found if explore(_two_shot_case(m.kernel), 10, shrinks=0).clean]
    assert missed == []


def _mailbox_case(kernel, ranks: int, depth: int, acknowledged: bool, rounds: int = 4, programs: int = 1):
    t = box_type(16, depth, acknowledged)

    def make():
        n = 16 * rounds * programs
        x, out = floats(ranks, n), PerRank([np.zeros(n, np.float32) for _ in range(ranks)])
        box = new_mailbox(t, ranks, programs)
        return [Step(kernel, programs, [out, x, box])] * 2

    return sequence_case(make, ranks=ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "depth", "acknowledged"), [(2, 2, False), (2, 1, True), (3, 2, False), (2, 4, False)]
)
@pytest.mark.sentence("MB-8")
@pytest.mark.feature("P9", "sim")
def test_mailboxes_are_clean(ranks: int, depth: int, acknowledged: bool) -> None:
    case = _mailbox_case(all_reduce_kernel(16, depth, acknowledged), ranks, depth, acknowledged)
    report = explore(case, 50, shrinks=0)
    assert report.clean, str(report.verdicts[0])
    assert report.schedules == 50


def test_a_mailbox_of_depth_one_without_acknowledgement_races() -> None:
    case = _mailbox_case(all_reduce_kernel(16, 1, False), 2, 1, False)
    report = explore(case, 5, shrinks=0)
    assert [v.kind for v in report.verdicts] == [VerdictKind.RACE]


@pytest.mark.parametrize(("depth", "acknowledged"), [(2, False), (1, True)])
def test_every_mutant_of_the_mailbox_is_reported(depth: int, acknowledged: bool) -> None:
    kernel = all_reduce_kernel(16, depth, acknowledged)
    missed = []
    for mutant in mutants(kernel):
        if explore(_mailbox_case(mutant.kernel, 2, depth, acknowledged), 10, shrinks=0).clean:
            missed.append(str(mutant))
    assert missed == []
