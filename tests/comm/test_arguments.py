"""Wrong arguments of group calls and launchers are refused here, before a message can harm the job."""

import math
import os

import comm_ranks
import pytest

import peertile as pt
from peertile.comm.group import RankModel
from peertile.comm.launcher import program, run, spawn
from peertile.errors import ArgumentError, InternalError


def message(call):
    with pytest.raises(ArgumentError) as caught:
        call()
    return str(caught.value)


@pytest.fixture
def group():
    found = pt.init()
    yield found
    found.barrier("still sound")


@pytest.mark.parametrize("timeout_s", ["5", math.nan, math.inf, -1, 0, True, 1e10], ids=repr)
@pytest.mark.parametrize("call", ["exchange(x)", "barrier(x)", "agree(x)", "broadcast(x, root=0)", "recover()"])
def test_a_timeout_is_seconds(group, call, timeout_s):
    calls = {
        "exchange(x)": lambda: group.exchange(b"", "x", timeout_s=timeout_s),
        "barrier(x)": lambda: group.barrier("x", timeout_s=timeout_s),
        "agree(x)": lambda: group.agree(1, "x", timeout_s=timeout_s),
        "broadcast(x, root=0)": lambda: group.broadcast(b"", "x", timeout_s=timeout_s),
        "recover()": lambda: group.recover(timeout_s=timeout_s),
    }
    text = f"{call}: timeout_s: expected seconds, a number > 0 and < 1e9, got {timeout_s!r}"
    assert message(calls[call]) == text


def test_group_calls_say_what_they_take(group):
    read, write = os.pipe()
    os.close(read), os.close(write)
    cases = [
        (lambda: group.exchange("a", "x"), "exchange(x): payload: expected bytes, got 'a'"),
        (
            lambda: group.exchange(b"", "x", fds=3),
            "exchange(x): fds: expected a sequence of file descriptors, got 3",
        ),
        (
            lambda: group.exchange(b"", "x", fds=["a"]),
            "exchange(x, fds): fds: expected an integer >= 0, got 'a'",
        ),
        (
            lambda: group.exchange(b"", "x", fds=[write]),
            f"exchange(x, fds): fds: expected open file descriptors, got {write}, which is closed",
        ),
        (lambda: group.broadcast(3, "x"), "broadcast(x): payload: expected bytes, got 3"),
        (lambda: group.broadcast(b"", "x", root="a"), "broadcast(x): root: expected an integer from 0 to 0, got 'a'"),
        (lambda: group.fail(3), "fail(cause): expected a string, got 3"),
        (lambda: group.dying(None), "dying(cause): expected a string, got None"),
        (lambda: group.all_or_none("x", 3), "all_or_none(x): action: expected a function, got 3"),
        (lambda: group.on_recover(3), "on_recover(callback): expected a function, got 3"),
        (lambda: group.subgroup(3), "subgroup(ranks): expected a sequence of integers, got 3"),
        (lambda: group.subgroup("0"), "subgroup(ranks): expected a sequence of integers, got '0'"),
        (lambda: group.subgroup([0.0]), "subgroup(ranks): expected a sequence of integers, got [0.0]"),
        (lambda: group.subgroup([True]), "subgroup(ranks): expected a sequence of integers, got [True]"),
    ]
    for call, text in cases:
        assert message(call) == text


def test_launchers_say_what_they_take():
    models = "expected RankModel.PROCESSES or RankModel.THREADS, got 'threads'"
    nothing = len
    cases = [
        (lambda: run(3), "run(main): expected a function, got 3"),
        (lambda: run(nothing, "2"), "run(ranks): expected an integer >= 1, got '2'"),
        (lambda: run(nothing, True), "run(ranks): expected an integer >= 1, got True"),
        (lambda: run(nothing, 2, model="threads"), f"run(model): {models}"),
        (lambda: run(nothing, 1, args=3), "run(args): expected a sequence of arguments, got 3; write (3,)"),
        (lambda: spawn(3, 2), "spawn(function): expected a function, got 3"),
        (lambda: spawn(nothing, 2, model="threads"), f"spawn(model): {models}"),
        (lambda: spawn(nothing, 1, "ab"), "spawn(args): expected a sequence of arguments, got 'ab'; write ('ab',)"),
        (
            lambda: spawn(nothing, 2, timeout_s="5"),
            "spawn(timeout_s): expected seconds, a number > 0 and < 1e9, got '5'",
        ),
        (lambda: program(3), "program(function): expected a function, got 3"),
    ]
    for call, text in cases:
        assert message(call) == text


@pytest.mark.slow
@pytest.mark.parametrize("model", list(RankModel), ids=lambda model: model.value)
def test_a_message_that_cannot_be_handled_concerns_its_sender_alone(model):
    with pytest.raises(TypeError) as caught:  # in the words of this Python
        {}.get([])
    text = f"odd: the rendezvous could not handle this call: TypeError: {caught.value}"
    assert spawn(comm_ranks.odd_message, 2, model=model, timeout_s=60) == [
        (InternalError.__name__, text, [b"0", b"1"]),
        (None, None, [b"0", b"1"]),
    ]
