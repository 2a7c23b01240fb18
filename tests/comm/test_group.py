"""Groups, with ranks as processes and as threads: the same calls, the same answers."""

import functools
import os
import sys

import comm_ranks
import pytest

from peertile.comm.group import RankModel
from peertile.comm.launcher import Program, init, program, run, spawn
from peertile.errors import ArgumentError, PeerFailed, UsageError, WaitTimeout

MODELS = pytest.mark.parametrize("model", list(RankModel), ids=lambda model: model.value)
# For tests with a job of their own: starting processes is what takes long.
OWN_JOB = pytest.mark.parametrize(
    "model", [RankModel.THREADS, pytest.param(RankModel.PROCESSES, marks=pytest.mark.slow)]
)
SLOW = pytest.mark.slow
SIZES = pytest.mark.parametrize(
    ("size", "model"),
    [
        *((size, RankModel.THREADS) for size in (1, 2, 3, 4)),
        *((size, RankModel.PROCESSES) for size in (2, 3)),
        *(pytest.param(size, RankModel.PROCESSES, marks=SLOW) for size in (1, 4)),
    ],
)
TIMEOUT_S = 60


# What runs together in one job of a size, in this order. The last ones change the group's generation.
BATCH = {
    1: [("collectives", ()), ("descriptors", ())],
    2: [
        ("disagree", ()),  # first: its message numbers the call
        *(("facts", ()), ("is_current", ()), ("joined_twice", ()), ("add", (10, 20)), ("collectives", ())),
        *(("descriptors", ()), ("too_many_descriptors", ()), ("wrong_subgroups", ()), ("pairs", ())),
        ("fail_and_recover", ()),
    ],
    3: [
        *(("collectives", ()), ("descriptors", ()), ("open_descriptors", ()), ("large_exchange", (3_000_000,))),
        *(("one_fails", (0,)), ("one_fails", (2,)), ("pairs", ()), ("outsiders", ()), ("subgroup_fails_alone", ())),
        ("recover_callback_fails", ()),
    ],
    4: [("collectives", ()), ("descriptors", ()), ("pairs", ()), ("fail_and_recover", ())],
}


@functools.cache
def job(size, model):
    return spawn(comm_ranks.batch, size, (BATCH[size],), model=model, timeout_s=TIMEOUT_S)


def ranks(name, size, *args, model):
    """What `comm_ranks.<name>` returned on each rank."""
    return [results[name, args] for results in job(size, model)]


@SIZES
@pytest.mark.feature("D1", "cpu")
def test_collectives(model, size):
    numbers = [b"%d" % rank for rank in range(size)]
    expected = [(numbers, numbers[-1], ("shape", 3), 2 * rank) for rank in range(size)]
    assert ranks("collectives", size, model=model) == expected


@MODELS
def test_facts_and_arguments(model):
    assert ranks("facts", 2, model=model) == [(r, 2, (0, 1), r, 2, 0) for r in range(2)]
    assert ranks("add", 2, 10, 20, model=model) == [30, 31]


@MODELS
def test_init_in_a_rank_returns_its_group(model):
    assert ranks("is_current", 2, model=model) == [True, True]
    text = "this process has joined a group already, with"
    (first, _) = ranks("joined_twice", 2, model=model)
    assert first == (
        ("ArgumentError", f"init(ranks=3): {text} ranks=2"),
        ("ArgumentError", f"init(rank=2): {text} rank=0"),
    )


@pytest.mark.slow
@MODELS
def test_an_exchange_may_be_larger_than_a_socket_buffer(model):
    expected = [(3_000_000, {rank}) for rank in range(3)]
    assert ranks("large_exchange", 3, 3_000_000, model=model) == [expected] * 3


@pytest.mark.slow
@SIZES
def test_descriptors_travel(model, size):
    expected = []
    for rank in range(size):
        source = (rank + 1) % size
        expected.append(([b"p%d" % r for r in range(size)], [f"{source}.0", f"{source}.1"]))
    assert ranks("descriptors", size, model=model) == expected


@pytest.mark.slow
def test_no_descriptor_leaks():
    for before, after in ranks("open_descriptors", 3, model=RankModel.PROCESSES):
        assert after == before


@pytest.mark.slow
@MODELS
def test_too_many_descriptors_are_refused(model):
    text = "exchange(many, fds): expected at most 125 descriptors per rank, got 200"
    assert ranks("too_many_descriptors", 2, model=model) == [("ArgumentError", text)] * 2


@pytest.mark.slow
@MODELS
@pytest.mark.feature("D2", "cpu")
def test_f61_disagreements_raise_on_every_rank_and_the_group_goes_on(model):
    call = (
        "ranks disagree about collective call 1 of the world group: rank 0: barrier(here); rank 1: exchange(alloc 1). "
        "Every rank must make the same calls with the same arguments in the same order"
    )
    value = "ranks disagree about count: rank 0: 8; rank 1: 6. It must be the same on every rank"
    expected = (("SymmetryError", call), ("SymmetryError", value), [b"x", b"x"])
    assert ranks("disagree", 2, model=model) == [expected] * 2


@MODELS
@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.feature("D2", "cpu")
def test_every_rank_raises_when_one_fails(model, failing):
    expected = [(None, ("PeerFailed", f"rank {failing} failed: MemoryError: no room"))] * 3
    expected[failing] = (None, ("MemoryError", "no room"))
    assert ranks("one_fails", 3, failing, model=model) == expected


@MODELS
@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=SLOW)])
@pytest.mark.feature("D8", "cpu")
def test_overlapping_groups(model, size):
    for rank, (pairs, reverse_rank, members, inner) in enumerate(ranks("pairs", size, model=model)):
        mine = [k for k in range(size) if rank in (k, (k + 1) % size)]
        assert pairs == [(k, [b"%d" % k, b"%d" % ((k + 1) % size)]) for k in mine]
        assert (reverse_rank, members) == (size - 1 - rank, tuple(reversed(range(size))))
        assert inner == ((size - 1,) if rank == size - 1 else None)


@pytest.mark.slow
@MODELS
@pytest.mark.feature("D8", "cpu")
def test_f59_calls_of_a_subgroup_do_not_shift_those_of_others(model):
    assert ranks("outsiders", 3, model=model) == [[b"0", b"1", b"2"]] * 3


@pytest.mark.slow
@MODELS
@pytest.mark.feature("D8", "cpu")
def test_a_subgroup_fails_alone(model):
    failed = ("PeerFailed", "rank 1 failed: my reason")
    assert ranks("subgroup_fails_alone", 3, model=model) == [(failed, True), (failed, True), (None, True)]


@pytest.mark.slow
@MODELS
def test_wrong_subgroups(model):
    texts = [f"subgroup({c}): expected at least one rank, each of 0 to 1 and once" for c in ("[]", "[0, 0]", "[2]")]
    assert ranks("wrong_subgroups", 2, model=model) == [[("ArgumentError", t) for t in texts]] * 2


@pytest.mark.slow
@MODELS
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=SLOW)])
@pytest.mark.feature("S5", "cpu")
def test_a_failed_group_recovers(model, size):
    seen = []
    for turn in range(2):
        text = f"rank 1 failed: WaitTimeout: slot {turn}"
        seen.append((("PeerFailed", text), 1, text))
        seen.append(([b"%d" % rank for rank in range(size)], 0, None, turn + 1))
    expected = (seen, ["first", "second"] * 2)
    assert ranks("fail_and_recover", size, model=model) == [expected] * size


@pytest.mark.slow
@MODELS
def test_a_recovery_whose_callback_fails_raises_everywhere(model):
    own, others = ("RuntimeError", "cannot reset"), ("PeerFailed", "rank 0 failed: RuntimeError: cannot reset")
    assert ranks("recover_callback_fails", 3, model=model) == [own, others, others]


@pytest.mark.sentence("PR-30")
@OWN_JOB
@pytest.mark.feature("S5", "cpu")
def test_f64_a_wait_for_a_rank_that_does_not_come_is_bounded(model):
    timeout = (
        "barrier(x): rank 2 of the world group did not arrive within 0.2 s (PEERTILE_WAIT_TIMEOUT_S); ranks 0, 1 waited"
    )
    expected = [("WaitTimeout", timeout)] * 2 + [("PeerFailed", f"rank {{}} failed: WaitTimeout: {timeout}")]
    got = spawn(comm_ranks.late, 3, (), model=model, timeout_s=TIMEOUT_S)
    first = int(got[2][1].split()[1])  # whichever of the two arrived first has the earlier bound
    assert first in (0, 1)
    assert got == [*expected[:2], ("PeerFailed", expected[2][1].format(first))]


# Spawning


@pytest.mark.parametrize("size", [0, -1])
def test_spawn_needs_a_rank(size):
    with pytest.raises(ArgumentError) as caught:
        spawn(comm_ranks.facts, size)
    assert str(caught.value) == f"spawn(ranks): expected an integer >= 1, got {size}"


def test_spawn_refuses_a_function_that_processes_cannot_find():
    def local(group):
        return group.rank

    with pytest.raises(ArgumentError) as caught:
        spawn(local, 2)
    assert str(caught.value) == (
        "spawn(function): expected a function at the top level of a module, got "
        "'test_spawn_refuses_a_function_that_processes_cannot_find.<locals>.local'; "
        "move it there, or pass model=RankModel.THREADS"
    )
    assert spawn(local, 2, model=RankModel.THREADS) == [0, 1]
    with pytest.raises(ArgumentError, match="expected a function at the top level"):
        spawn(functools.partial(comm_ranks.add), 2)


@SLOW
def test_spawned_ranks_see_the_arguments_of_the_program():
    assert spawn(comm_ranks.argv, 2) == [(tuple(sys.argv), tuple(sys.argv))] * 2


def test_spawn_refuses_arguments_that_cannot_be_pickled():
    with pytest.raises(ArgumentError) as caught:
        spawn(comm_ranks.add, 1, (lambda: 0,))
    assert str(caught.value).startswith("spawn(add): args: expected values that can be pickled, got (<function")
    assert str(caught.value).endswith("make them in the function, or pass model=RankModel.THREADS")


@SLOW
def test_a_result_that_cannot_be_pickled_is_an_error_of_the_rank():
    with pytest.raises(
        PeerFailed, match=r"^rank 0 failed: ArgumentError: spawn\(unpicklable\): result: expected a value"
    ):
        spawn(comm_ranks.unpicklable, 1, (), model=RankModel.PROCESSES, timeout_s=TIMEOUT_S)


@OWN_JOB
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.feature("S5", "cpu")
def test_f130_an_exception_of_one_rank_ends_the_waits_of_the_others(model, victim):
    with pytest.raises(PeerFailed) as caught:
        spawn(comm_ranks.raises, 3, (victim,), model=model, timeout_s=TIMEOUT_S)
    assert str(caught.value) == f"rank {victim} failed: ValueError: bad input"
    assert repr(caught.value.__cause__) == "ValueError('bad input')"


@SLOW
@pytest.mark.parametrize("how", ["exit", "at once"])
def test_a_rank_that_ends_well_without_a_result_is_a_rank_that_failed(how):
    with pytest.raises(PeerFailed) as caught:
        spawn(comm_ranks.ends_early, 2, (how,), timeout_s=TIMEOUT_S)
    assert str(caught.value) == "rank 1 failed: its process ended with status 0 before ends_early returned"


@SLOW
def test_an_exception_that_cannot_be_pickled_comes_as_text():
    with pytest.raises(PeerFailed, match=r"^rank 0 failed: Odd: 1 and 2$") as caught:
        spawn(comm_ranks.raises_odd, 1, (), model=RankModel.PROCESSES, timeout_s=TIMEOUT_S)
    assert "raise Odd(1, 2)" in caught.value.__cause__.__notes__[0]


@OWN_JOB
def test_spawn_is_bounded_when_asked(model):
    with pytest.raises(WaitTimeout) as caught:
        spawn(comm_ranks.waits_for_itself, 2, model=model, timeout_s=0.3)
    assert str(caught.value) == "spawn(waits_for_itself): expected its ranks to end within 0.3 s; they did not"


# Joining


@program
def marked(group, number):
    """What it does."""
    return group.rank + number


def test_a_program_is_still_a_function():
    assert isinstance(marked, Program)
    assert (marked.__name__, marked.__doc__) == ("marked", "What it does.")
    assert spawn(marked, 2, (5,), model=RankModel.THREADS) == [5, 6]


@SLOW
def test_a_program_of_a_test_module_can_be_spawned():
    assert spawn(marked, 2, (5,), timeout_s=TIMEOUT_S) == [5, 6]


def test_run_without_a_launcher_runs_one_rank_here():
    assert run(marked, args=(1,)) == 1
    assert init().size == 1
    assert run(lambda group: (group.size, os.getpid())) == (1, os.getpid())


def test_run_as_threads_returns_the_result_of_rank_0():
    assert run(lambda group: (group.rank, group.size), ranks=3, model=RankModel.THREADS) == (0, 3)


def test_run_needs_a_rank():
    with pytest.raises(ArgumentError) as caught:
        run(marked, ranks=0)
    assert str(caught.value) == "run(ranks): expected an integer >= 1, got 0"


def test_a_closed_group_refuses_calls():
    def main(group):
        part = group.subgroup([0])
        group.close()
        group.close()
        calls = (group.barrier, part.barrier, lambda: group.fail("x"))
        return tuple(comm_ranks.raised(call) for call in calls)

    calls = ("barrier()", "barrier()", "fail")
    expected = [("UsageError", f"{call}: this group is closed") for call in calls]
    assert spawn(main, 1, model=RankModel.THREADS) == [tuple(expected)]


@SLOW
def test_f100_a_forked_child_is_told_to_use_spawn():
    text = "the runtime was initialised before fork; use spawn"
    expected = [("UsageError", f"{call}: {text}") for call in ("barrier()", "check", "check")]
    got = spawn(comm_ranks.forked, 2, (), model=RankModel.PROCESSES, timeout_s=TIMEOUT_S)
    assert got == [repr(expected)] * 2


def test_broadcast_needs_a_root_of_the_group():
    def main(group):
        with pytest.raises(ArgumentError) as caught:
            group.broadcast(b"", "x", root=2)
        return str(caught.value)

    text = "broadcast(x): root: expected an integer from 0 to 1, got 2"
    assert spawn(main, 2, model=RankModel.THREADS) == [text, text]


def test_print_is_for_rank_0(capsys):
    spawn(lambda group: group.print("hello from", group.size), 3, model=RankModel.THREADS)
    assert capsys.readouterr().out == "hello from 3\n"


def test_interactive_sessions_have_nothing_to_execute_again(monkeypatch):
    monkeypatch.setattr("sys.orig_argv", ["python"])
    with pytest.raises(UsageError) as caught:
        run(marked, ranks=2)
    assert str(caught.value) == (
        "run(ranks=2): expected a program in a file, which each rank executes again, got an interactive session; "
        "pass model=RankModel.THREADS, or save the program and start it with peertile run"
    )
