"""Raw pointers on native ranks: every order, scope and atomic; launch checks; loops that poll; the handshake."""

import importlib.util
import itertools
import mmap
from pathlib import Path

import numpy as np
import pointer_ranks
import pytest
from tests.frontend.helpers import build
from tests.frontend.test_syntax import compiled

import peertile as pt
import peertile.language as T
from peertile.config import config
from peertile.errors import ArgumentError, KernelAssert, WaitTimeout
from peertile.ir import ops
from peertile.ir.core import walk
from peertile.ir.types import PointerType
from peertile.memory_model import Order, Scope
from peertile.passes.pipeline import run_pipeline

pytestmark = pytest.mark.any_device

EXAMPLE = Path(__file__).parents[2] / "examples" / "handshake.py"


@pytest.mark.slow
@pytest.mark.feature("K11", "cpu")
@pytest.mark.parametrize(
    "dtype",
    [
        "i32",
        "bf16",
        *(pytest.param(d, marks=pytest.mark.slow) for d in ("i64", "u32", "u64", "f32", "f64", "i8", "u16", "f16")),
    ],
)
def test_pointer_atomics_of_every_kind_order_and_scope(dtype):
    assert pointer_ranks.atomics([dtype]) >= 12


@pytest.mark.feature("K11", "cpu")
@pytest.mark.parametrize("scope", list(Scope), ids=lambda s: s.value)
@pytest.mark.parametrize("order", [o for o in Order if o is not Order.WEAK], ids=lambda o: o.value)
def test_compare_and_swap_of_every_order(order, scope):
    for dtype in ("i32", "u64", "f32"):
        pointer_ranks.swaps(dtype, order, scope)


ORDERS = list(itertools.product((Order.WEAK, Order.RELAXED, Order.ACQUIRE), (Order.WEAK, Order.RELAXED, Order.RELEASE)))


@pytest.mark.feature("K12", "cpu")
@pytest.mark.parametrize(("load", "store"), ORDERS, ids=lambda o: o.value)
def test_loads_and_stores_of_every_order_with_masks_fill_and_tokens(load, store):
    for scope in Scope:
        pointer_ranks.relays(load, store, scope)


# ---------------------------------------------------------------- arguments


@pt.kernel(unsafe=True)
def bump(p: T.Pointer):
    T.unsafe.atomic_rmw(p, T.Rmw.ADD, T.i64(1), order=T.relaxed, scope=T.device)


@pytest.mark.cpu_only  # of the host
@pytest.mark.feature("K13", "cpu")
def test_a_pointer_to_foreign_memory_keeps_its_owner():
    array = np.zeros(8, np.int64)
    pointer = pt.pointer(array.ctypes.data, pt.i64, array.nbytes, owner=array)
    bump.grid(3)(pointer).sync()
    assert array[0] == 3


@pytest.mark.native_only
@pytest.mark.feature("K13", "cpu")
def test_a_pointer_to_foreign_memory_is_checked_at_launch():
    nowhere = pt.pointer(1 << 40, pt.i64, 8)
    with pytest.raises(ArgumentError) as caught:
        bump.grid(1)(nowhere).sync()
    assert str(caught.value) == (
        f"bump: pointer {1 << 40:#x}: expected 8 bytes that {pt.current_device().name} may load and store, got an address range that is not "
        "mapped so; keep its owner alive, or copy the data"
    )


@pytest.mark.cpu_only  # of the host
def test_memory_that_may_only_be_read_is_refused():
    with open(pt.__file__, "rb") as file:
        view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    array = np.frombuffer(view, np.uint8)  # keeps the mapping
    with pytest.raises(ArgumentError, match="expected 8 bytes that cpu:0 may load and store"):
        bump.grid(1)(pt.pointer(array.ctypes.data, pt.i64, 8, owner=array)).sync()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((0, pt.i64, 8), "address: expected a positive integer, got 0"),
        ((4, pt.i64, 8), "address: expected a multiple of 8, the size of i64, got 0x4; atomic accesses need it"),
        ((8, pt.i64, 4), "nbytes: expected at least one element of i64 (8), got 4"),
        ((8, "i64", 8), "dtype: expected a peertile dtype such as pt.f32, got 'i64'"),
    ],
)
def test_pointers_that_are_refused(args, message):
    with pytest.raises(ArgumentError) as caught:
        pt.pointer(*args)
    assert str(caught.value) == message


def test_a_pointer_parameter_takes_no_tensor():
    with pytest.raises(ArgumentError) as caught:
        bump.grid(1)(pt.zeros((1,), pt.i64))
    assert str(caught.value) == "p: expected a pointer (T.Pointer); write tensor.pointer(), got Tensor"


def test_a_launch_leases_what_its_pointers_reach():
    storage = pt.zeros((4,), pt.i64)
    (use,) = storage[1:].pointer().pointer_argument().uses
    assert (use.start, use.end, use.storage, use.lifetime_only) == (8, 32, storage.storage, True)


# ---------------------------------------------------------------- loops that poll


POLLS = {
    "bounded": "got = T.u32(0)\nfor _ in T.range(99):\n    got, t = T.unsafe.load_ptr(w, order=T.acquire, scope=T.system)\n"
    "    if got == 1:\n        break",
    "while": "got = T.u32(0)\nwhile got == 0:\n    got, t = T.unsafe.load_ptr(w, order=T.relaxed, scope=T.system)",
    "word": "while not T.test(words, 1, (0,)):\n    pass",
    "counts its trips": "tries = 0\nwhile not T.test(words, 1, (0,)):\n    tries += 1",
}
NO_POLLS = {
    "weak": "got = T.u32(0)\nfor _ in T.range(99):\n    got, t = T.unsafe.load_ptr(w, order=T.weak)",
    "walks": "for k in T.range(99):\n    got, t = T.unsafe.load_ptr(w + k, order=T.acquire, scope=T.system)",
    "writes": "for k in T.range(99):\n    got = T.ld(words, (0,))\n    T.st(words, got, (1,))",
    "reads nothing": "acc = 0\nfor k in T.range(99):\n    acc += k",
    "waits already": "for k in T.range(99):\n    T.wait_ge(words, 1, (0,))",
}


def suspensions(body):
    kernel = run_pipeline(build(compiled(body, "w, words"), unsafe=True, w=PointerType(pt.u32)))
    return [op.attrs["continues"] for op in walk(kernel.body) if isinstance(op, ops.Suspend)]


@pytest.mark.sentence("MM-74")
@pytest.mark.parametrize("name", POLLS)
def test_a_loop_that_polls_is_a_suspension_point(name):
    found = suspensions(POLLS[name])
    assert found[0] is False
    assert set(found[1:]) == {True}


@pytest.mark.parametrize("name", NO_POLLS)
def test_other_loops_are_none(name):
    assert suspensions(NO_POLLS[name]) == []


@pt.kernel(unsafe=True)
def relay_race(words: T.Pointer, LIMIT: T.Const[int]):
    """Program p waits for p + 1, the last one for nobody: each polls by hand, and there are more than executors."""
    p, n = T.program_id(0), T.num_programs(0)
    token = T.unsafe.token()
    if p < n - 1:
        got = T.u32(0)
        for _ in T.range(LIMIT):
            got, token = T.unsafe.load_ptr(words + (p + 1), order=T.acquire, scope=T.device, token=token)
            if got == 1:
                break
        T.assert_(got == 1, "the next program did not come")
    T.unsafe.store_ptr(words + p, T.u32(1), order=T.release, scope=T.device, token=token)


@pytest.mark.sentence("MM-92")
def test_programs_that_poll_by_hand_let_each_other_run():
    n = 500
    words = pt.zeros((n,), pt.u32)
    relay_race.grid(n)(words.pointer(), LIMIT=1 << 24).sync()
    assert words.numpy().tolist() == [1] * n


@pt.kernel(unsafe=True)
def alone(word: T.Pointer, LIMIT: T.Const[int]):
    got = T.u32(0)
    for _ in T.range(LIMIT):
        got, _t = T.unsafe.load_ptr(word, order=T.acquire, scope=T.system)
        if got == 1:
            break
    T.assert_(got == 1, "nobody came")


@pytest.mark.native_only
def test_a_poll_ends_at_its_own_bound_or_at_that_of_waits(monkeypatch):
    word = pt.zeros((1,), pt.u32)
    with pytest.raises(KernelAssert, match="assertion failed: nobody came"):
        alone.grid(1)(word.pointer(), LIMIT=1000).sync()
    monkeypatch.setattr("peertile.config._current", config()._replace(wait_timeout_s=0.2))
    with pytest.raises(WaitTimeout, match="wait for a loop that polls"):
        alone.grid(1)(word.pointer(), LIMIT=1 << 62).sync()


# ---------------------------------------------------------------- the handshake


def handshake_ranks(group, rounds):
    spec = importlib.util.spec_from_file_location("handshake_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.handshakes(group, rounds)
    return module.ROUNDS


@pytest.mark.feature("K13", "cpu")
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_handshake_in_threads(ranks):
    assert pt.spawn(handshake_ranks, ranks, (20,), model=pt.RankModel.THREADS, timeout_s=100) == [256] * ranks


@pytest.mark.slow
@pytest.mark.gpus("ranks")
@pytest.mark.parametrize("ranks", [2, 5])
def test_the_handshake_in_processes_over_all_its_rounds(ranks):
    assert pt.spawn(handshake_ranks, ranks, (256,), model=pt.RankModel.PROCESSES, timeout_s=100) == [256] * ranks
