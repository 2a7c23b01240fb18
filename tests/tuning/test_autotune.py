"""Autotuning on one rank: what is verified, measured, kept and taken up again."""

import contextlib
import json

import numpy as np
import pytest

import peertile as pt
import peertile.language as T
from peertile.cli.bench_kernels import vector_add
from peertile.errors import ArgumentError, UnsupportedError, UsageError
from peertile.tuning import Rules

pytestmark = [pytest.mark.any_device]

QUICK = Rules(screen=1, rounds=3, batch_s=1.0)


@pt.kernel
def scale(z: T.Exclusive, x: T.Shared, BY: T.Const[int], EXACT: T.Const[bool] = True):
    if EXACT:
        z.store(x.load_like(z) * BY)
    else:
        z.store(x.load_like(z) * BY + 1)


def tuned(clock, folder, costs, *, wrong=(), failing=(), log=None, **options):
    """An operation of `len(costs)` ways: fills its output with 3 (5 where wrong), and takes `costs[k]` seconds."""

    def way(k, out):
        if log is not None:
            log.append(k)
        clock.advance(costs[k])
        if k in failing:
            raise ValueError(f"way {k} does not do that")
        return pt.op.fill(out, 5 if k in wrong else 3).map(lambda: out)

    options = {"rules": QUICK, "key": lambda out: out.shape} | options
    return pt.autotune(candidates=range(len(costs)), folder=folder, clock=clock, name="fill", **options)(way)


@pytest.mark.feature("A7", "cpu")
def test_the_fastest_is_taken_and_figures_are_kept(clock, tmp_path):
    op = tuned(clock, tmp_path, [0.5, 0.125, 0.25])
    out = pt.zeros(4, pt.f32)
    found = op.decide(out)
    assert (found.index, found.name, found.dropped, found.is_new) == (1, "1", {}, True)
    assert found.seconds == {"0": 0.5, "1": 0.125, "2": 0.25}
    assert out.numpy().tolist() == [0] * 4, "measuring puts back what arguments held"
    assert op(out).sync() is out
    assert out.numpy().tolist() == [3] * 4
    record = json.loads(found.path.read_text())
    assert (record["winner"], record["is_cut_short"], record["question"]["key"]) == (1, False, "(4,)")
    assert record["final"] == {"1": [[0.125]] * 3}, "who is far behind is not in the final"
    (run,) = record["measured"]
    assert set(run) == {"machine", "versions", "date", "seconds"}
    assert {"peertile", "numpy", "python"} <= set(run["versions"])


@pytest.mark.feature("A7", "cpu")
def test_within_the_tie_band_the_first_listed_wins(clock, tmp_path):
    out = pt.zeros(4, pt.f32)
    assert tuned(clock, tmp_path / "a", [1.04, 1.0, 1.03]).decide(out).index == 0
    assert tuned(clock, tmp_path / "b", [1.06, 1.0, 0.99]).decide(out).index == 1


@pytest.mark.feature("A7", "cpu")
def test_a_decision_is_found_again_by_another_process_and_measured_once_for_each_key(clock, tmp_path):
    log = []
    a, b = pt.zeros(4, pt.f32), pt.zeros(5, pt.f32)
    first = tuned(clock, tmp_path, [0.5, 0.25], log=log)
    first.decide(a)
    runs = len(log)
    first(a).sync()
    assert log[runs:] == [1], "known here: nothing but the winner runs"
    again = tuned(clock, tmp_path, [0.5, 0.25], log=log).decide(a)
    assert (again.index, again.is_new, len(log)) == (1, False, runs + 1)
    assert first.decide(b).is_new
    assert len(log) > runs + 1
    first.forget(a)
    assert first.decide(a).is_new


@pytest.mark.feature("A7", "cpu")
@pytest.mark.parametrize("change", ["candidates", "rules", "constant", "code"])
def test_what_changes_the_question_measures_anew(clock, tmp_path, change):
    out = pt.zeros(4, pt.f32)
    three = 3

    def way(k, out):
        clock.advance(1.0)
        return pt.op.fill(out, three).map(lambda: out)

    def other(k, out):
        clock.advance(1.0)
        return pt.op.fill(out, 1 + 2).map(lambda: out)

    def decide(function, candidates=(0, 1), rules=QUICK):
        made = pt.autotune(
            candidates=candidates, key=lambda out: 0, rules=rules, name="way", folder=tmp_path, clock=clock
        )
        return made(function).decide(out).is_new

    assert decide(way)
    assert not decide(way)
    if change == "constant":
        three = 4
    assert decide(
        other if change == "code" else way,
        (0, 1, 2) if change == "candidates" else (0, 1),
        Rules(screen=1, rounds=2, batch_s=1.0) if change == "rules" else QUICK,
    )


@pytest.mark.feature("A7", "cpu")
def test_a_candidate_that_is_wrong_or_fails_is_out_however_fast(clock, tmp_path):
    op = tuned(clock, tmp_path, [0.5, 0.01, 0.02, 0.3], wrong=(1,), failing=(2,))
    found = op.decide(pt.zeros((2, 4), pt.f32))
    assert found.index == 3
    assert found.dropped == {
        "1": "expected 3.0 at [0, 0] as the reference gives, got 5.0; 8 of 8 elements differ",
        "2": "ValueError: way 2 does not do that",
    }


@pytest.mark.feature("A7", "cpu")
def test_the_first_candidate_that_works_is_the_reference_unless_one_is_given(clock, tmp_path):
    out = pt.zeros(4, pt.f32)
    found = tuned(clock, tmp_path / "a", [0.1, 0.2, 0.3], failing=(0,), wrong=(1,)).decide(out)
    assert (found.index, list(found.dropped)) == (1, ["0", "2"])
    for k, reference in enumerate((lambda out: np.full(4, 3.0), lambda out: pt.op.full(4, 3, pt.f32))):
        found = tuned(clock, tmp_path / str(k), [0.1, 0.2], wrong=(0,), reference=reference).decide(out)
        assert (found.index, list(found.dropped)) == (1, ["0"])


@pytest.mark.feature("A7", "cpu")
def test_a_candidate_that_writes_nothing_does_not_pass_by_what_another_wrote(clock, tmp_path):
    def way(k, out):
        clock.advance(1.0 - 0.5 * k)
        return (pt.op.fill(out, 3) if k == 0 else pt.op.value(None)).map(lambda *_: out)

    out = pt.full(4, 3, pt.f32)  # right before anything runs
    op = pt.autotune(candidates=[0, 1], key=lambda out: 0, rules=QUICK, folder=tmp_path, clock=clock)(way)
    found = op.decide(out)
    assert (found.index, found.dropped) == (
        0, {"1": "expected 3.0 at [0] as the reference gives, got nan; 4 of 4 elements differ"}
    )  # fmt: skip
    assert out.numpy().tolist() == [3] * 4


@pytest.mark.native_only  # reads what nobody has written
@pytest.mark.feature("A7", "cpu")
def test_memory_of_an_earlier_result_is_spoiled_before_the_next_candidate_may_get_it(clock, tmp_path):
    def way(k, x):
        clock.advance(1.0 - 0.5 * k)
        if k == 0:
            return pt.op.full(x.shape, 3, pt.i32)
        return pt.op.empty(x.shape, pt.i32)

    op = pt.autotune(candidates=[0, 1], key=lambda x: 0, rules=QUICK, folder=tmp_path, clock=clock)(way)
    assert op.decide(pt.zeros(1000, pt.i32)).index == 0


@pytest.mark.feature("A7", "cpu")
def test_an_operation_in_place_is_measured_on_what_it_was_given(clock, tmp_path):
    seen = []

    def way(k, x):
        clock.advance(1.0 - 0.5 * k)
        seen.append(x.numpy()[0])
        return scale(x.partition(4), pt.dup(x), BY=2, EXACT=k < 2).map(lambda *_: x)

    x = pt.full(4, 7, pt.f32)
    op = pt.autotune(candidates=[0, 1, 2], key=lambda x: 0, rules=QUICK, folder=tmp_path, clock=clock)(way)
    found = op.decide(x)
    assert (found.index, list(found.dropped)) == (1, ["2"])
    assert max(v for v in seen if not np.isnan(v)) <= 7 * 2**2, "it does not grow from run to run"
    assert x.numpy().tolist() == [7] * 4
    op(x).sync()
    assert x.numpy().tolist() == [14] * 4


@pytest.mark.feature("A7", "cpu")
def test_a_kernel_takes_mappings_of_its_parameters(tmp_path):
    x = pt.asarray(np.arange(100, dtype=np.float32))
    z = pt.full(100, -1, pt.f32)
    candidates = [{"BY": 2}, {"BY": 2, "EXACT": False}, {"BY": 3}]
    op = pt.autotune(candidates=candidates, key=lambda z, x: x.shape, folder=tmp_path, rules=QUICK)(scale)
    found = op.decide(z.partition(32), x)
    assert (found.name, list(found.dropped)) == (
        "{'BY': 2}", ["{'BY': 2, 'EXACT': False}", "{'BY': 3}"]
    )  # fmt: skip
    op(z.partition(32), x).sync()
    np.testing.assert_array_equal(z.numpy(), 2 * x.numpy())


@pytest.mark.native_only  # reads what nobody has written
@pytest.mark.feature("A7", "cpu")
def test_tiles_of_a_real_kernel_with_a_real_clock(tmp_path):
    @pt.autotune(
        candidates=lambda z, x: [64, min(512, z.size)],
        key=lambda z, x: (z.shape, z.dtype),
        reference=lambda z, x: x.numpy() * 2,
        folder=tmp_path,
    )
    def double(tile, z, x):
        """Twice x."""
        return vector_add(z.partition(tile), x, x).map(lambda *_: z)

    x = pt.rand(5000, seed=3)
    z = pt.empty(5000, pt.f32)
    assert double.__doc__ == "Twice x."
    np.testing.assert_array_equal(double(z, x).sync().numpy(), 2 * x.numpy())
    assert double.decide(z, x).dropped == {}


@pytest.mark.feature("A7", "cpu")
@pytest.mark.parametrize("after", range(1, 48, 3))
def test_an_interrupted_decision_goes_on_where_it_was(clock, tmp_path, after):
    costs = [0.5, 0.25, 0.28125]

    def calls(folder, stops):
        log = []

        def way(k, out):
            log.append(k)
            clock.advance(costs[k])
            if len(log) in stops:
                raise KeyboardInterrupt
            return pt.op.fill(out, 3).map(lambda: out)

        op = pt.autotune(candidates=[0, 1, 2], key=lambda out: 0, rules=QUICK, name="way", folder=folder, clock=clock)
        out = pt.zeros(4, pt.f32)
        found = None
        with contextlib.suppress(KeyboardInterrupt):
            found = op(way).decide(out)
        assert out.numpy().tolist() == [0] * 4
        return len(log), found

    whole, _ = calls(tmp_path / "whole", [])
    first, found = calls(tmp_path, [after])
    assert (found is None) == (after <= whole)
    if found is None:
        rest, found = calls(tmp_path, [])
        # Done again: the candidate or the round that was cut, and one run of the reference.
        assert first + rest <= whole + 20
        assert first < 8 or rest < whole
    record = json.loads(found.path.read_text())
    assert found.index == 1
    assert record["final"] == {"1": [[0.25]] * 3, "2": [[0.28125]] * 3}
    assert len(record["measured"]) in (1, 2)


@pytest.mark.feature("A7", "cpu")
def test_the_budget_ends_measuring_with_what_is_known(clock, tmp_path):
    rules = Rules(screen=1, rounds=1000, batch_s=1.0, budget_s=50.0)
    log = []
    op = tuned(clock, tmp_path, [1.0, 0.95, 0.5], rules=rules, log=log)
    begin = clock()
    found = op.decide(pt.zeros(4, pt.f32))
    assert found.index == 2
    assert clock() - begin < 50 + 4
    tight = tuned(clock, tmp_path, [10.0, 9.0, 1.0], rules=Rules(budget_s=15.0), log=log)
    found = tight.decide(pt.zeros(4, pt.f32))
    assert (found.index, found.dropped) == (
        0, {"1": "not run: the budget of 15 s was over", "2": "not run: the budget of 15 s was over"}
    )  # fmt: skip
    assert json.loads(found.path.read_text())["is_cut_short"]


@pytest.mark.feature("A7", "cpu")
@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"format": 0}', '{"format": 1, "question": {}}'])
def test_a_record_that_cannot_be_read_is_as_good_as_none(clock, tmp_path, content):
    op = tuned(clock, tmp_path, [0.5, 0.25])
    out = pt.zeros(4, pt.f32)
    path = op.decide(out).path
    path.write_text(content)
    found = tuned(clock, tmp_path, [0.5, 0.25]).decide(out)
    assert (found.index, found.is_new) == (1, True)
    assert json.loads(path.read_text())["winner"] == 1


@pytest.mark.feature("A7", "cpu")
def test_a_folder_that_cannot_be_written_costs_time_alone(clock, tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("")
    found = tuned(clock, blocked / "folder", [0.5, 0.25]).decide(pt.zeros(4, pt.f32))
    assert found.index == 1


def test_no_candidate_left_says_why_each_is_out(clock, tmp_path):
    op = tuned(clock, tmp_path, [0.5, 0.25], failing=(0, 1))
    with pytest.raises(UnsupportedError) as caught:
        op.decide(pt.zeros(4, pt.f32))
    assert str(caught.value) == (
        "autotune(fill): no candidate is left: 0: ValueError: way 0 does not do that; "
        "1: ValueError: way 1 does not do that"
    )


def test_a_reference_that_fails_is_no_fact_about_candidates(clock, tmp_path):
    def reference(out):
        raise ZeroDivisionError("by zero")

    with pytest.raises(UnsupportedError) as caught:
        tuned(clock, tmp_path, [0.5], reference=reference).decide(pt.zeros(4, pt.f32))
    assert str(caught.value) == "autotune(fill): the reference failed: ZeroDivisionError: by zero"


def test_inside_a_closure_nothing_is_measured(clock, tmp_path):
    op = tuned(clock, tmp_path, [0.5])
    out = pt.zeros(4, pt.f32)
    with pytest.raises(UsageError) as caught:
        pt.op.fill(out, 1).then(lambda: op(out)).sync()
    assert str(caught.value).startswith("autotune(fill): nested execution inside the closure of then")
    op.decide(out)
    assert pt.op.fill(out, 1).then(lambda: op(out)).sync() is out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"candidates": []}, "autotune(way): candidates: expected at least one, in a list, got []"),
        ({"candidates": "abc"}, "autotune(way): candidates: expected at least one, in a list, got 'abc'"),
        ({"candidates": [1, 1]}, "autotune(way): candidates: expected each one once, got 1 twice"),
        ({"key": 3}, "autotune: key: expected a function, got 3"),
        ({"reference": 3}, "autotune: reference: expected a function, got 3"),
        ({"clock": None}, "autotune: clock: expected a function, got None"),
        ({"group": 2}, "autotune: group: expected a Group, a function that gives one, or None, got 2"),
        ({"group": lambda out: 2}, "autotune(way): group: expected a Group or None, got 2"),
        ({"rules": {}}, "autotune: rules: expected peertile.tuning.Rules, got {}"),
    ],
)
def test_wrong_arguments_are_named(tmp_path, options, message):
    options = {"candidates": [0], "key": lambda out: 0, "name": "way", "folder": tmp_path} | options
    with pytest.raises(ArgumentError) as caught:
        pt.autotune(**options)(lambda k, out: pt.op.value(k)).decide(pt.zeros(4, pt.f32))
    assert str(caught.value) == message


def test_wrong_functions_are_named(tmp_path):
    def messages(function, **options):
        options = {"candidates": [0], "key": lambda out: 0, "name": "way", "folder": tmp_path} | options
        with pytest.raises((ArgumentError, UnsupportedError)) as caught:
            pt.autotune(**options)(function).decide(pt.zeros(4, pt.f32))
        return str(caught.value)

    assert messages(3) == "autotune: function: expected a function, got 3"
    assert messages(lambda k, out: 5) == (
        "autotune(way): no candidate is left: 0: ArgumentError: autotune(way): expected the function to return an "
        "operation, got int for candidate 0"
    )
    assert messages(lambda k, out: pt.op.value(None)) == (
        "autotune(way): no candidate is left: 0: ArgumentError: autotune(way): expected a result with tensors, arrays or "
        "numbers, by which candidates are compared, got none; return the output from the operation"
    )
    found = messages(lambda k, out: pt.op.value(None), candidates=[object()])
    assert found.startswith("autotune(way): candidates: expected a repr that is the same in every process, by which")
    assert messages(scale) == (
        "autotune(way): no candidate is left: 0: ArgumentError: autotune(way): candidates: expected mappings of the "
        "kernel's parameters, as {'BLOCK': 64}, got 0"
    )
