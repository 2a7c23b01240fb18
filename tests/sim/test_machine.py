"""The scheduler: deadlocks with their reports, residency, replay, shrinking, directed runs, machines side by side."""

import numpy as np
import pytest
from tests.sim.kernels import floats, scale_kernel, two_shot_kernel

from peertile.ir.text import parse_kernel
from peertile.meaning import new_signal
from peertile.memory_model import Cmp, Order, Rmw
from peertile.sim.choices import RandomChooser, ReplayChooser
from peertile.sim.explore import exhaust, explore
from peertile.sim.runs import Step, kernel_case, sequence_case
from peertile.sim.scripts import Cell, script_case
from peertile.sim.verdicts import Deadlock, Race, VerdictKind, read_choices, spell_choices


def two_words():
    f, g = Cell("f"), Cell("g", rank=1)

    def one(p):
        yield from p.wait(f, 1)
        yield from p.put(g, 1)

    def two(p):
        yield from p.wait(g, 2)
        yield from p.put(f, 1)

    return [(0, one), (1, two)]


@pytest.mark.feature("C3", "sim")
def test_a_deadlock_names_who_waits_for_what() -> None:
    report = explore(script_case(two_words()), 1)
    (verdict,) = report.verdicts
    assert isinstance(verdict, Deadlock)
    assert str(verdict) == (
        "deadlock: 2 agents wait and nobody is left who could let them go on\n"
        "  program 0 of the script on rank 0 waits for f[0] on rank 0 at_least 1; last saw 0, nobody has written it\n"
        "  program 0 of the script on rank 1 waits for g[0] on rank 1 at_least 2; last saw 0, nobody has written it\n"
        "  replay: --seed 0 or --choices z0"
    )


def test_a_deadlock_names_the_last_writer() -> None:
    f = Cell("f")

    def writer(p):
        yield from p.put(f, 1)

    def waiter(p):
        yield from p.wait(f, 2)

    verdict = explore(script_case([writer, waiter]), 1).verdicts[0]
    assert isinstance(verdict, Deadlock)
    (found,) = verdict.waiters
    assert (found.seen, found.last_writer) == ("1", "written last by program 0 of the script on rank 0")


@pytest.mark.sentence("MM-74")
def test_a_loop_that_polls_without_effect_waits() -> None:
    f = Cell("f")

    def poller(p):
        p.program.enter_loop(0)
        while (yield from p.get(f)) == 0:
            if p.program.back_edge(p.program.site, 0):
                yield True

    def late(p):
        yield from p.put(f, 1)

    assert explore(script_case([poller, late]), 20).clean
    verdict = explore(script_case([poller]), 1).verdicts[0]
    assert isinstance(verdict, Deadlock)
    assert verdict.waiters[0].what == "f[0] on rank 0 to change: it polls"


def test_a_run_that_makes_no_progress_ends_at_the_step_limit() -> None:
    f = Cell("f")

    def spin(p):
        while True:
            yield from p.add(f, 1, Order.RELAXED)

    verdict = explore(script_case([spin], max_steps=500), 1, shrinks=0).verdicts[0]
    assert isinstance(verdict, Deadlock)
    assert verdict.why == "the run was longer than 500 steps: nobody makes progress"


@pytest.mark.sentence("MM-70")
def test_a_value_that_came_and_went_may_be_missed() -> None:
    f = Cell("f")

    def writer(p):
        yield from p.put(f, 1)
        yield from p.put(f, 2)

    def waiter(p):
        yield from p.wait(f, 1, Cmp.EQ)

    report = exhaust(script_case([writer, waiter]))
    assert [v.kind for v in report.verdicts] == [VerdictKind.DEADLOCK]


BARRIER = """kernel @k() {
  %c0 = const(value=0) : i64
  %one = const(value=1) : u64
  %two = const(value=2) : u64
  %w = launch_words() : view<u64, 1, read_write, device>
  %old = word_rmw(%w, %one, %c0, rmw=Rmw.add, order=Order.acq_rel, scope=Scope.device) : u64
  %seen = wait(%w, %two, %c0, cmp=Cmp.at_least, order=Order.acquire, scope=Scope.device, what="both") : u64
  return() }"""


@pytest.mark.sentence("MM-71")
def test_programs_beyond_the_places_of_a_device_wait_for_one() -> None:
    kernel = parse_kernel(BARRIER)
    assert kernel_case(kernel, 2, []).run().verdict is None
    verdict = kernel_case(kernel, 2, [], resident=1).run().verdict
    assert isinstance(verdict, Deadlock)
    texts = [str(w).split("\n")[0] for w in verdict.waiters]
    assert any("a place to run: as many programs as fit are resident" in text for text in texts)
    assert any("launch words[0] on rank 0 at_least 2; last saw 1" in text for text in texts)


@pytest.mark.sentence("MM-72")
def test_programs_are_admitted_in_any_order() -> None:
    kernel = parse_kernel(
        """kernel @k(%out: view<i64, 1, read_write, device>) {
          %c0 = const(value=0) : i64
          %p = program_id() : i64
          %old = word_rmw(%out, %p, %c0, rmw=Rmw.xchg, order=Order.relaxed, scope=Scope.device) : i64
          return() }"""
    )
    lasts = set()
    for seed in range(60):
        out = np.zeros(1, np.int64)
        assert kernel_case(kernel, 3, [out], resident=1).run(seed=seed).verdict is None
        lasts.add(int(out[0]))
    assert lasts == {0, 1, 2}


def racy_case():
    x, y, f = Cell("x"), Cell("y"), Cell("f")

    def one(p):
        yield from p.add(f, 1, Order.RELAXED)
        p.write(x)
        yield from p.add(f, 1, Order.RELAXED)
        yield from p.put(y, 1)

    def two(p):
        for _ in range(4):
            yield from p.get(y)
        if (yield from p.get(f, Order.RELAXED)) == 1:
            p.read(x)

    return script_case([one, two])


@pytest.mark.feature("C1", "sim")
def test_a_seed_and_its_choices_replay_the_same_run() -> None:
    case = racy_case()
    for seed in range(60):
        first, again = case.run(RandomChooser(seed)), case.run(RandomChooser(seed))
        replayed = case.run(ReplayChooser(first.choices))
        assert first.choices == again.choices == replayed.choices
        assert first.steps == again.steps == replayed.steps
        assert str(first.verdict) == str(again.verdict) == str(replayed.verdict)


def test_a_failing_schedule_is_shrunk_to_few_switches() -> None:
    case = racy_case()
    report = explore(case, 400)
    (verdict,) = report.verdicts
    assert isinstance(verdict, Race)
    assert verdict.replay.choices is not None
    assert sum(1 for c in verdict.replay.choices if c) <= 3
    again = case.run(ReplayChooser(verdict.replay.choices)).verdict
    assert again is not None
    assert again.key == verdict.key


def test_choices_are_spelled_and_read_back() -> None:
    for choices in ((), (0, 0), (1, 0, 0, 2), (0, 0, 3, 1), (12, 0, 7)):
        text = spell_choices(choices)
        read = read_choices(text)
        kept = list(choices)
        while kept and kept[-1] == 0:
            kept.pop()
        assert [*read][: len(kept)] == kept
        assert not any(read[len(kept) :])
    assert spell_choices((0, 0, 3, 1)) == "z2.3.1"


def test_several_machines_run_in_one_process() -> None:
    cases = [racy_case() for _ in range(3)]
    first = [[str(case.run(seed=s).verdict) for s in range(5)] for case in cases]
    second = [[str(cases[k].run(seed=s).verdict) for k in range(3)] for s in range(5)]
    assert first == [list(column) for column in zip(*second, strict=True)]


def test_values_are_those_of_the_evaluator() -> None:
    z, x = np.zeros(40, np.float32), np.arange(40, dtype=np.float32)
    assert kernel_case(scale_kernel(16), 3, [z, x]).run().verdict is None
    assert z.tolist() == (2 * x).tolist()
    arrays = floats(3, 96), floats(3, 96)
    out, x = arrays
    case = kernel_case(two_shot_kernel(16), 2, [out, x, new_signal(3, 2)], ranks=3)
    assert case.run(seed=5).verdict is None
    expected = sum(np.arange(96, dtype=np.float32) + r for r in range(3))
    assert all(o.tolist() == expected.tolist() for o in out)


@pytest.mark.sentence("MM-20")
def test_two_streams_without_an_edge_race_and_one_stream_does_not() -> None:
    kernel = scale_kernel(16)

    def steps(second: int):
        def make():
            x, y, z = (np.ones(16, np.float32) for _ in range(3))
            return [Step(kernel, 1, [y, x]), Step(kernel, 1, [z, y], stream=second)]

        return make

    assert explore(sequence_case(steps(0)), 5).clean
    verdict = explore(sequence_case(steps(1)), 1).verdicts[0]
    assert isinstance(verdict, Race)


def test_a_wait_for_any_of_the_adds_is_ordered_after_none() -> None:
    x, f = Cell("x"), Cell("f")

    def producer(p):
        p.write(x)
        yield from p.add(f)

    def other(p):
        yield from p.add(f)

    def reader(p):
        yield from p.wait(f, 1)
        p.read(x)

    case = script_case([producer, other, reader])
    assert all(explore(case, 1, seed=s).verdicts for s in range(40))


@pytest.mark.sentence("MM-42")
def test_stores_and_adds_on_one_word_are_reported() -> None:
    f = Cell("f")

    def adds(p):
        yield from p.add(f)

    def stores(p):
        yield from p.put(f, 8)

    verdict = explore(script_case([adds, stores]), 1).verdicts[0]
    assert verdict.kind is VerdictKind.WORD
    assert verdict.headline == "word: f[0] on rank 0: it is written by stores and by adds"


def test_exchanges_that_change_nothing_are_no_progress() -> None:
    lock = Cell("lock")

    def probe(p):
        p.program.enter_loop(0)
        while (yield from p.add(lock, 3, Order.ACQ_REL, rmw=Rmw.XCHG)) != 2:
            if p.program.back_edge(p.program.site, 0):
                yield True

    verdict = explore(script_case([probe]), 1, shrinks=0).verdicts[0]
    assert isinstance(verdict, Deadlock)
    assert verdict.why == ""
