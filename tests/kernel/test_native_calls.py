"""Kernels called in native code: the same operations, errors and source lines as from the Python method."""

import _thread
import functools
import gc
import itertools
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

import peertile as pt
import peertile.language as T
from peertile.cli import bench_kernels
from peertile.errors import ArgumentError
from peertile.kernel import KernelFunction
from peertile.launch import DeferredLaunchOp, LaunchOp
from peertile.native_calls import native_call
from peertile.runtime import objects, site
from peertile.runtime.site import OUTSIDE, describe, is_outside


@functools.cache
def _method():
    return native_call(KernelFunction, "_called", OUTSIDE)


@pt.kernel
def mixed(z: T.Exclusive, x: T.Shared, by: T.i32, B: T.Const[int] = 4, KIND: T.Const = "plain"):
    z.store(x.load_like(z) * by + B)


@pytest.fixture(params=[True, False], ids=["native", "python"])
def native(request, monkeypatch):
    """Whether kernels are called in native code."""
    monkeypatch.setattr(KernelFunction, "__call__", _method() if request.param else KernelFunction._called)
    return request.param


def things(n=8):
    z, x = pt.zeros(n, pt.i32), pt.asarray(np.arange(n, dtype=np.int32))
    return SimpleNamespace(z=z, x=x, part=z.partition(n))


def parts_of(op):
    return {name: getattr(op, name) for name in ("given", "uses", "kernel", "_spent", "_bound", "_key", "_ready")}


def test_an_operation_is_what_the_method_makes_of_it(native):
    t = things()
    for given in ((t.part, t.x, 3), (t.part, t.x, 3, 8), (t.part, t.x, 3, 8, "other"), (t.part, t.x, 3, 8, (1, 2))):
        mixed(*given).sync()
        op, other = mixed(*given), mixed._called(*given)
        assert type(op) is type(other) is LaunchOp
        assert parts_of(op) == parts_of(other)
        assert op._ready is not None
        assert op.given == (*given, *[4, "plain"][len(given) - 3 :])
        assert op.sync() == op.given
        want = np.arange(8) * 3 + (given[3] if len(given) > 3 else 4)
        assert t.z.numpy().tolist() == want.tolist()


def test_it_knows_the_line_that_made_it(native):
    t = things()
    mixed(t.part, t.x, 1).sync()
    for _ in range(2):
        here = sys._getframe().f_lineno + 1
        op = mixed(t.part, t.x, 1)
        assert describe(op._site) == f"{__file__}:{here}"
        assert describe((lambda: mixed(t.part, t.x, 1))()._site) == f"{__file__}:{here + 2}"


def test_numbers_that_are_equal_but_not_the_same_are_told_apart(native):
    t = things()
    for by in (1, True, np.int32(1), 2, 1):
        for _ in range(2):
            mixed(t.part, t.x, by).sync()
            assert t.z.numpy().tolist() == (np.arange(8) * int(by) + 4).tolist()
    for b in (1, 1.0, True):
        mixed(t.part, t.x, 1, 1, b).sync()
        assert mixed(t.part, t.x, 1, 1, b)._ready.spec.compiled is not None


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda t: mixed(t.part), "mixed: parameter 'x' (shared) was not given"),
        (lambda t: mixed(), "mixed: parameter 'z' (exclusive) was not given"),
        (lambda t: mixed(t.part, t.x, 1, 2, 3, 4), "mixed: expected at most 5 arguments, got 6"),
        (lambda t: mixed(t.part, t.x, 1, B=2, z=3), "mixed: parameter 'z' was given twice"),
        (lambda t: mixed(t.part, t.x, 1, no=2), "mixed: no parameter 'no'; it has z, x, by, B, KIND"),
        (
            lambda t: mixed(t.z, t.x, 1),
            "z: expected a partition (T.Exclusive); write tensor.partition(tile_shape), got Tensor",
        ),
        (lambda t: mixed(t.part, 3, 1), "x: expected a Tensor (T.Shared); make one with pt.asarray, got int"),
        (lambda t: mixed(t.part, t.x, 1 << 40), f"by: expected {-(1 << 31)} to {(1 << 31) - 1} for i32, got {1 << 40}"),
        (
            lambda t: mixed(t.part, t.x, 1, 4, []),
            "KIND: expected a value that can be hashed, as code is compiled for it (T.Const), got []; pass a tuple for "
            "a list",
        ),
    ],
)
def test_errors_are_those_of_the_method(native, call, text):
    t = things()
    mixed(t.part, t.x, 1).sync()
    with pytest.raises(ArgumentError) as caught:
        call(t)
    assert str(caught.value) == text


def test_names_and_operations_as_arguments(native):
    t = things()
    for _ in range(2):
        mixed(t.part, by=2, x=t.x).sync()
        assert t.z.numpy().tolist() == (np.arange(8) * 2 + 4).tolist()
        op = mixed(t.part, pt.op.ones((8,), pt.i32), 2)
        assert type(op) is DeferredLaunchOp
        op.sync()
        assert t.z.numpy().tolist() == [6] * 8
        stream = pt.current_device().stream("deferred")
        mixed(t.part, pt.op.ones((8,), pt.i32), 3).submit(stream).wait(20)
        assert t.z.numpy().tolist() == [7] * 8


def test_a_compiler_of_the_device_is_looked_at(native):
    t = things()
    mixed(t.part, t.x, 1).sync()
    device = pt.current_device()
    before = device.compiler
    device.compiler = object()
    try:
        assert mixed(t.part, t.x, 1)._ready is None
    finally:
        device.compiler = before
    assert mixed(t.part, t.x, 1)._ready is not None


def test_a_hash_of_the_user_that_raises_is_an_error(native):
    class Bad:
        def __hash__(self):
            raise TypeError("no hash")

    t = things()
    mixed(t.part, t.x, 1).sync()
    bad = Bad()
    with pytest.raises(ArgumentError) as caught:
        mixed(t.part, t.x, 1, 4, bad)
    assert str(caught.value) == (
        "KIND: expected a value that can be hashed, as code is compiled for it (T.Const), "
        f"got {bad!r}; pass a tuple for a list"
    )


@pytest.mark.parametrize("error", [KeyboardInterrupt, RecursionError])
def test_other_errors_of_a_hash_are_the_callers(native, error):
    class Bad:
        tries = 0

        def __hash__(self):
            self.tries += 1
            raise error

    t = things()
    mixed(t.part, t.x, 1).sync()
    bad = Bad()
    with pytest.raises(error):
        mixed(t.part, t.x, 1, 4, bad)
    assert bad.tries == 1


def test_what_is_forgotten_during_a_call_is_kept_by_its_operation(native):
    """Before 3.12 a collection starts at an allocation, in native code as well."""
    t = things()
    known = mixed.ready

    def forget(phase, info):
        known.clear()

    thresholds = gc.get_threshold()
    gc.callbacks.append(forget)
    try:
        for _ in range(20):
            mixed(t.part, t.x, 1).sync()
            gc.set_threshold(1, 1, 1)
            op = mixed(t.part, t.x, 1)
            gc.set_threshold(*thresholds)
            assert op._ready is None or op._ready.prepared.grid == (1, 1, 1)
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(forget)


def test_a_caller_that_is_not_python_has_no_line(native):
    t = things()
    mixed(t.part, t.x, 1).sync()
    made, over = [], threading.Lock()
    over.acquire()
    calls = itertools.chain(map(mixed, [t.part], [t.x], [1]), iter(over.release, None))
    _thread.start_new_thread(made.extend, (calls,))
    assert over.acquire(timeout=20)
    assert describe(made[0]._site) == "an unknown line"
    made[0].sync()


def test_calls_keep_no_object_and_lose_none(native):
    t = things()
    mixed(t.part, t.x, 1).sync()
    argument = t.x._shared
    watch = [t.part, t.x, t.z, argument, *argument.uses, mixed, mixed.ready, mixed.letters, mixed.defaults, None, True,
             False, LaunchOp, "plain", sys._getframe().f_code]  # fmt: skip

    def burst():
        for _ in range(100):
            mixed(t.part, t.x, 1)
            mixed(t.part, t.x, 1, 4, "plain")
            mixed(t.part, t.x, 1, KIND="plain")
            mixed(t.part, t.x, 2)  # not known
        gc.collect()
        return [sys.getrefcount(thing) for thing in watch]

    burst()
    before = burst()
    after = burst()
    assert [abs(a - b) < 40 for a, b in zip(before, after, strict=True)] == [True] * len(watch)


def test_kernels_stay_what_they_are(native):
    assert callable(mixed)
    assert mixed.__name__ == "mixed"
    assert mixed.__wrapped__ is mixed.fn
    assert repr(mixed) == "<kernel mixed>"
    with pytest.raises(AttributeError):
        mixed.nothing  # noqa: B018


def test_code_of_the_package_is_no_line_of_the_users_but_for_its_commands(monkeypatch):
    monkeypatch.setattr(site, "_MOST_FILES", 2)
    monkeypatch.setattr(site, "OUTSIDE", {})
    assert is_outside(__file__)
    assert not is_outside(site.__file__)
    assert is_outside(bench_kernels.__file__)
    assert is_outside("<string>")
    assert len(site.OUTSIDE) <= 2


# ---------------------------------------------------------------- other interpreters


def test_where_threads_run_python_at_once_kernels_are_called_in_python(monkeypatch):
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    assert not objects.is_locked_globally()
    assert native_call(KernelFunction, "_called", OUTSIDE) is None


def test_where_objects_look_different_kernels_are_called_in_python(monkeypatch):
    monkeypatch.setattr(objects, "TYPE_WORD", 3)  # as in builds without the global lock
    with pytest.raises(objects.NotFoundError) as caught:
        objects.slot_word(pt.Tensor, "_shared")
    assert str(caught.value) == "Tensor: expected the type in word 3 of an object"
    assert native_call(KernelFunction, "_called", OUTSIDE) is None


def test_where_a_slot_is_nowhere_kernels_are_called_in_python(monkeypatch):
    real = objects._word
    monkeypatch.setattr(objects, "_word", lambda thing, k: real(thing, k) if k == objects.TYPE_WORD else 1)
    with pytest.raises(objects.NotFoundError) as caught:
        objects.slot_word(SlotOfAKind, "one")
    assert str(caught.value) == "SlotOfAKind.one: expected its word among 3, found []"
    with pytest.raises(objects.NotFoundError) as caught:
        objects.held_word()
    assert str(caught.value) == "RLock: expected a word that tells whether it is held, found none"
    assert native_call(KernelFunction, "_called", OUTSIDE) is None


class SlotOfAKind:
    __slots__ = ("one",)
