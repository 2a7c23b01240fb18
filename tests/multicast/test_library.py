"""Collectives over multicast tensors: right values, the same bits, refusals; and on the simulated machine no fault."""

import multimem_ranks
import numpy as np
import pytest

import peertile as pt
from peertile.errors import ArgumentError
from peertile.library.collectives import Collectives
from peertile.library.multimem import MulticastCollectives
from peertile.library.reductions import ReduceOp
from peertile.library.selection import Algorithm, load_table, set_table
from peertile.testing import assert_clean

pytestmark = [pytest.mark.feature("A1", "cpu")]


def spawn(function, ranks, *args):
    return pt.spawn(function, ranks, args, model=pt.RankModel.THREADS, timeout_s=60)


@pytest.mark.slow
@pytest.mark.any_device
@pytest.mark.parametrize("count", [0, 2, 48, 4096, 6144])
@pytest.mark.parametrize(("ranks", "name"), [(1, "f32"), (2, "bf16"), (3, "f32"), (3, "i64")])
def test_collectives_give_the_values_and_the_same_bits(ranks, name, count, seed):
    results = spawn(multimem_ranks.everything, ranks, name, count, seed)
    assert len(set(results)) == 1


@pytest.mark.slow
@pytest.mark.any_device
@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
@pytest.mark.parametrize("name", ["i32", "i64", "f16", "bf16"])
def test_extrema(name, op, seed):
    assert all(spawn(multimem_ranks.extrema, 3, name, op, seed))


@pytest.mark.any_device
@pytest.mark.slow
@pytest.mark.gpus(2)
def test_over_processes(seed):
    found = pt.spawn(multimem_ranks.everything, 2, ("f32", 4096, seed), model=pt.RankModel.PROCESSES, timeout_s=60)
    assert len(set(found)) == 1


@pytest.mark.any_device
def test_a_closed_communicator_leaves_nothing_in_the_heap_of_the_tensor():
    assert spawn(multimem_ranks.closed_communicators, 2) == [[0, 0, 0]] * 2


@pytest.fixture
def heap():
    with pt.SymmetricHeap(pt.init(), 1 << 24) as found:
        yield found


def test_what_no_fabric_has_is_refused(heap):
    c = MulticastCollectives(heap)
    cases = [
        (
            lambda: c.all_reduce(heap.multicast((64,), pt.f32), ReduceOp.MAX),
            "all_reduce: op: expected SUM, or MIN or MAX of i32, i64, f16 or bf16, got MAX of f32; "
            "Collectives.all_reduce does the others",
        ),
        (
            lambda: c.all_reduce(heap.empty((64,), pt.f32)),
            "all_reduce: x: expected a MulticastTensor, as heap.multicast gives, got SymmetricTensor",
        ),
        (
            lambda: c.all_reduce(heap.multicast((3,), pt.f16)),
            "all_reduce: x: expected a number of elements of whole 4-byte units, got 3 of 2 bytes; pad it",
        ),
        (
            lambda: c.all_gather(heap.multicast((64,), pt.f32), pt.zeros((32,), pt.f32)),
            "all_gather: mine: expected 64 elements of f32, a share of x for each of 1 ranks, got 32 of f32",
        ),
        (
            lambda: c.signal(heap.multicast((4,), pt.f32), 1),
            "signal: words: expected i32, u32, i64 or u64, got f32",
        ),
        (
            lambda: c.signal(heap.multicast((4,), pt.u32), 1, index=4),
            "signal: index: expected 0 to 3, got 4",
        ),
    ]
    for call, message in cases:
        with pytest.raises(ArgumentError) as caught:
            call()
        assert str(caught.value) == message


ROW = {"target": "cpu", "arch": "any", "world": 1, "entries": [[1024, "multimem", 4096], [None, "two_shot", 4096]]}


def test_the_table_names_the_fabric_only_where_there_is_one(heap, monkeypatch):
    table = load_table()
    monkeypatch.setitem(table["collectives"], "all_reduce_multicast", [ROW])
    x, large, plain = heap.multicast((64,), pt.f32), heap.multicast((4096,), pt.f32), heap.empty((64,), pt.f32)
    set_table(table)
    try:
        with Collectives(heap) as c:
            monkeypatch.setattr(c, "arch", "any")
            assert "multimem" not in c.all_reduce(x, x).name  # no mapping
            c.forget()
            monkeypatch.setattr(type(heap), "window", property(lambda self: 1 << 40))
            assert c.all_reduce(x, x, ReduceOp.SUM).name == "all_reduce(f32[64], SUM, multimem)"
            for other in (
                c.all_reduce(large, large),  # another entry of the row
                c.all_reduce(x, x, ReduceOp.PROD),  # which no fabric has
                c.all_reduce(x, plain),  # not in place
                c.all_reduce(plain, plain),
            ):
                assert "multimem" not in other.name
    finally:
        set_table(None)


def test_it_may_be_asked_for_by_name(heap):
    x = heap.multicast((64,), pt.f32)
    x.copy_from(np.arange(64, dtype=np.float32))
    with Collectives(heap) as c:
        c.all_reduce(x, x, algorithm=Algorithm.MULTIMEM).sync()
        assert x.numpy().tolist() == list(range(64))
        with pytest.raises(ArgumentError) as caught:
            c.all_reduce(x, pt.zeros((64,), pt.f32), algorithm=Algorithm.MULTIMEM)
        assert str(caught.value) == "all_reduce: MULTIMEM: expected out=x, got another tensor; it works in place"
        y = heap.zeros((64,), pt.f32)
        with pytest.raises(ArgumentError) as caught:
            c.all_reduce(y, y, algorithm=Algorithm.MULTIMEM)
        assert str(caught.value) == (
            "all_reduce: MULTIMEM: expected a MulticastTensor, as heap.multicast gives, got SymmetricTensor"
        )


def program(group):
    """All collectives twice, the inputs written anew in between by the host."""
    with pt.SymmetricHeap(group, 1 << 16) as heap:
        c = MulticastCollectives(heap, programs=2)
        x, n = heap.multicast((24,), pt.f32), group.size
        for turn in range(2):
            x.copy_from(np.full(24, group.rank + turn, np.float32))
            group.barrier()
            c.all_reduce(x).sync()
            assert x.numpy().tolist() == [float(sum(range(n)) + n * turn)] * 24
            mine = pt.asarray(np.full(24 // n, group.rank + 1.0, np.float32))
            c.all_gather(x, mine).sync()
            assert x.numpy().tolist() == np.repeat(np.arange(1.0, n + 1), 24 // n).tolist()
            out = pt.zeros((24 // n,), pt.f32)
            c.reduce_scatter(out, x).sync()
            assert out.numpy().tolist() == [n * (group.rank + 1.0)] * (24 // n)
            group.barrier()


@pytest.mark.slow
@pytest.mark.feature("M6", "sim")
@pytest.mark.feature("M2", "sim")
@pytest.mark.feature("A1", "sim")
@pytest.mark.parametrize("ranks", [2, 3])
def test_no_schedule_shows_a_fault(ranks):
    assert_clean(program, ranks, schedules=20)
