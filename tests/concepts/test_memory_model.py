"""Sentences of docs/concepts/memory-model.md that no other test shows, on the simulated machine where orders matter."""

import itertools

import numpy as np
import pytest
from tests.frontend.helpers import build, peer

import peertile as pt
import peertile.language as T
from peertile.dtypes import u32, u64
from peertile.meaning import PerRank, new_counter, new_signal, run_grid
from peertile.memory_model import Order, Scope
from peertile.passes.pipeline import run_pipeline
from peertile.sim.agents import Agent, Kind
from peertile.sim.explore import explore
from peertile.sim.scripts import Cell, script_case
from peertile.sim.sites import Site, Verb
from peertile.sim.verdicts import VerdictKind
from peertile.testing.check import assert_clean, assert_reports

HEAP = 1 << 14


# ---------------------------------------------------------------- accesses


@pt.kernel
def shifted(x: T.Peer, STEP: T.Const[int]):
    x.local.store_at((T.program_id(0) * STEP,), T.full((8,), 1.0, T.f32))


@pytest.mark.sentence("MM-3", "MM-51")
def test_a_tile_is_its_elements_and_two_that_share_one_race_about_that_one():
    """Both write what is there already: no value could tell."""

    def main(step):
        def program(group):
            with pt.SymmetricHeap(group, HEAP) as heap:
                x = heap.empty((32,), pt.f32).copy_from(np.ones(32, np.float32))
                shifted.grid(2)(x, STEP=step).sync()

        return program

    assert_clean(main(8), 1, schedules=5)
    for step in (7, 3, 0):
        verdict = assert_reports(VerdictKind.RACE, main(step), 1, schedules=1)
        assert f"elements [{step}:8]".replace("[7:8]", "[7]") in verdict.headline


@pytest.mark.sentence("MM-6")
@pytest.mark.parametrize("scope", list(Scope), ids=lambda s: s.value)
def test_a_host_thread_takes_part_in_system_scope_alone(scope):
    host, program = Agent(Kind.HOST, 0, 1, "host"), Agent(Kind.PROGRAM, 0, 2, "k", 0)
    site = Site(Verb.WRITES, "x", 4, Order.RELEASE, scope)
    assert site.reaches(program, host) is site.reaches(host, program) is (scope is Scope.SYSTEM)
    engine, other = Agent(Kind.STREAM, 0, 3, "stream"), Agent(Kind.PROGRAM, 1, 4, "k", 0)
    assert site.reaches(program, engine) is (scope is not Scope.PROGRAM)
    assert site.reaches(program, other) is (scope is Scope.SYSTEM)


# ---------------------------------------------------------------- the unsafe tier


@pt.kernel(unsafe=True)
def with_tokens(p: T.Pointer, WAY: T.Const[str]):
    """A store and a load of one place, and what may order them."""
    token = T.unsafe.store_ptr(p, T.f32(1.0), order=T.weak)
    if WAY == "token":
        _, token = T.unsafe.load_ptr(p, order=T.weak, token=token)
    elif WAY == "joined":
        other = T.unsafe.store_ptr(p + 1, T.f32(1.0), order=T.weak)
        _, token = T.unsafe.load_ptr(p, order=T.weak, token=T.unsafe.join_tokens(token, other))
    elif WAY == "another":
        other = T.unsafe.store_ptr(p + 1, T.f32(1.0), order=T.weak)
        _, token = T.unsafe.load_ptr(p, order=T.weak, token=other)
    else:
        _, token = T.unsafe.load_ptr(p, order=T.weak)


@pt.kernel(unsafe=True)
def with_values(p: T.Pointer, ORDERED: T.Const[bool]):
    """Stores what it has loaded, to where it has loaded it from."""
    value, token = T.unsafe.load_ptr(p, order=T.weak)
    if ORDERED:
        T.unsafe.store_ptr(p, value + 1.0, order=T.weak, token=token)
    else:
        T.unsafe.store_ptr(p, value + 1.0, order=T.weak)


def on_a_pointer(kernel, **constants):
    def main(group):
        x = pt.zeros((4,), pt.f32)
        kernel.grid(1)(x.pointer(), **constants).sync()

    return main


@pytest.mark.sentence("MM-13")
def test_a_path_of_tokens_orders_two_accesses_of_one_place_and_nothing_else_does():
    for way in ("token", "joined"):
        assert_clean(on_a_pointer(with_tokens, WAY=way), 1, schedules=3)
    for way in ("another", "none"):
        verdict = assert_reports(VerdictKind.RACE, on_a_pointer(with_tokens, WAY=way), 1, schedules=1)
        assert "no path of tokens leads" in str(verdict)


@pytest.mark.sentence("MM-14")
def test_a_value_that_was_loaded_does_not_order_the_store_that_it_goes_into():
    assert_clean(on_a_pointer(with_values, ORDERED=True), 1, schedules=3)
    verdict = assert_reports(VerdictKind.RACE, on_a_pointer(with_values, ORDERED=False), 1, schedules=1)
    assert "no path of tokens leads" in str(verdict)


# ---------------------------------------------------------------- kernels, streams and hosts


@pt.kernel
def writes_all(x: T.Multicast, N: T.Const[int]):
    x.partition((N,)).multimem_store((0,), T.full((N,), 3.0, T.f32))


@pt.kernel
def writes_next(x: T.Peer, N: T.Const[int]):
    x.at(1).store((0,), T.full((N,), 3.0, T.f32))


@pt.kernel
def hands_over(out: T.Exclusive, x: T.Peer, ready: T.Signal):
    """Has no multicast parameter, so nothing in it fences between proxies."""
    if x.rank == 0:
        ready.notify(to=1)
    else:
        ready.wait(0)
        out.store(x.local.load((0,), out.tile_shape))


@pytest.mark.sentence("MM-23")
@pytest.mark.parametrize("multicast", [False, True])
@pytest.mark.parametrize("between", [0, 1])
def test_a_later_notify_publishes_what_earlier_kernels_did_through_whatever_proxy(multicast, between):
    n = 8

    def main(group):
        with pt.SymmetricHeap(group, HEAP) as heap:
            x, ready, out = heap.multicast((n,), pt.f32), heap.signal(slots=1), pt.zeros((n,), pt.f32)
            group.barrier("made")
            if group.rank == 0:
                (writes_all if multicast else writes_next).grid(1)(x, N=n).sync_on(pt.current_device().stream())
                for _ in range(between):
                    pt.op.fill(pt.empty((4,), pt.f32), 1.0).sync()
            hands_over(out.partition(n), x, ready).sync()
            if group.rank == 1:
                assert out.numpy().tolist() == [3.0] * n

    assert_clean(main, 2, schedules=8)


@pt.kernel
def reads_when_told(out: T.Exclusive, x: T.Peer[T.read], flag: T.Peer[T.read]):
    T.wait_ge(flag, 1, (0,), rank=0)
    out.store(x.at(0).load((0,), (8,)))


@pytest.mark.sentence("MM-44")
@pytest.mark.parametrize("how", ["fill", "set_signal"])
def test_a_fill_of_a_word_publishes_nothing_and_a_signal_of_a_stream_does(how):
    def main(group):
        with pt.SymmetricHeap(group, HEAP) as heap:
            x, flag, out = heap.zeros((8,), pt.f32), heap.zeros((1,), pt.u32), pt.zeros((8,), pt.f32)
            if group.rank == 0:
                stream = pt.current_device().stream("tells")
                pt.op.fill(x.local, 5.0).submit(stream)
                getattr(pt.op, how)(flag.local, 1).sync_on(stream)
            else:
                reads_when_told(out.partition(8), x, flag).sync()
            group.barrier("over")

    if how == "set_signal":
        assert_clean(main, 2, schedules=10)
    else:
        assert_reports(VerdictKind.RACE, main, 2, schedules=1)


# ---------------------------------------------------------------- words


def every_wait(words, s, c, out):
    T.wait_eq(words, 5, (0,))
    T.wait_ne(words, 6, (0,))
    T.wait_ge(words, 5, (0,))
    T.wait_at_least(words, 5, (0,))
    T.wait_any((words, 9, (0,)), (words, 7, (1,)))
    s.wait()
    c.wait(3)
    out.local.store((0,), T.take_flagged(words, (1,), (2,), epoch=4, dtype=T.u32).astype(T.u64))


@pytest.mark.sentence("MM-45")
def test_no_wait_changes_the_word_that_it_waits_for():
    kernel = run_pipeline(build(every_wait, words=peer(u64), out=peer(u64)))
    words = PerRank([np.array([5, 7, 4 << 32 | 77], np.uint64) for _ in range(2)])
    out = PerRank([np.zeros(1, np.uint64) for _ in range(2)])
    signal, counter = new_signal(2, 1), new_counter(2, 1)
    for found in signal["arrived"]:
        found[...] = 1
    for found in counter["count"]:
        found[...] = 3
    assert run_grid(kernel, 1, [words, signal, counter, out], ranks=2).faults == []
    assert all(found.tolist() == [5, 7, 4 << 32 | 77] for found in words)
    assert all((found == 1).all() for found in signal["arrived"])
    assert all((found == 3).all() for found in counter["count"])


# ---------------------------------------------------------------- races

ACCESSES = ("read", "write", "get", "put", "add")
WRITES = {"write", "put", "add"}
SCOPES = (Scope.DEVICE, Scope.SYSTEM)


def access(kind, cell, scope):
    def run(p):
        if kind in ("read", "write"):
            getattr(p, kind)(cell)
            return
        arguments = () if kind == "get" else (1,)
        yield from getattr(p, kind)(cell, *arguments, order=Order.RELAXED, scope=scope)

    return run


PAIRS = list(itertools.combinations_with_replacement(ACCESSES, 2))


@pytest.mark.sentence("MM-50")
@pytest.mark.parametrize(("one", "two"), PAIRS)
def test_two_accesses_race_unless_both_are_relaxed_with_scopes_sizes_and_proxies_that_fit(one, two):
    for peers, wide_one, wide_two, narrow in itertools.product((False, True), repeat=4):
        x = Cell("x")
        y = Cell("x, its first half", dtype=u32, at=x) if narrow else x
        first, second = access(one, x, SCOPES[wide_one]), access(two, y, SCOPES[wide_two])
        words = {one, two} <= {"get", "put", "add"} and not narrow and (not peers or (wide_one and wide_two))
        races = bool(WRITES & {one, two}) and not words
        kinds = [v.kind for v in explore(script_case([(0, first), (int(peers), second)]), 3, shrinks=0).verdicts]
        if races:
            assert kinds == [VerdictKind.RACE], (peers, wide_one, wide_two, narrow)
        else:  # what is no race may still be a word with two kinds of writers, or two stores in no order (MM-42, MM-43)
            assert kinds == ([VerdictKind.WORD] if "put" in (one, two) and {one, two} <= WRITES else [])


# ---------------------------------------------------------------- multicast


@pt.kernel
def adds_everywhere(x: T.Multicast, ready: T.Signal):
    x.partition((4,)).multimem_reduce((0,), T.add, T.full((4,), (x.rank + 1).astype(T.i32)), order=T.relaxed)


@pytest.mark.sentence("MM-81")
def test_reductions_of_all_ranks_at_once_lose_nothing_on_any_member():
    def main(group):
        with pt.SymmetricHeap(group, HEAP) as heap:
            x, ready = heap.multicast((4,), pt.i32), heap.signal(slots=1)
            x.copy_from(np.zeros(4, np.int32))
            group.barrier("made")
            adds_everywhere.grid(1)(x, ready).sync()
            group.barrier("over")
            assert x.numpy().tolist() == [3] * 4

    assert_clean(main, 2, schedules=30)


@pt.kernel
def stores_and_sums(out: T.Exclusive, x: T.Multicast):
    share = x.partition((1,))
    if x.rank == 0:
        share.multimem_store((0,), T.full((1,), 1, T.i32), order=T.relaxed)
    else:
        out.store(share.multimem_load_reduce((0,), T.add, order=T.relaxed))


@pytest.mark.sentence("MM-82", "MM-80")
def test_a_store_reaches_the_members_one_by_one():
    seen = set()

    def main(group):
        with pt.SymmetricHeap(group, HEAP) as heap:
            x, out = heap.multicast((1,), pt.i32), pt.zeros((1,), pt.i32)
            x.copy_from(np.zeros(1, np.int32))
            group.barrier("made")
            stores_and_sums(out.partition(1), x).sync()
            group.barrier("over")
            if group.rank == 1:
                seen.add(int(out.numpy()[0]))

    assert_clean(main, 2, schedules=60)
    assert seen == {0, 1, 2}
