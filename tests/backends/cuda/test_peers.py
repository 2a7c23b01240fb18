"""What kernels with peers become on a GPU, as Triton source without triton: tables read at once, patient looks at
flagged words, waits that rarely look far away, loops that poll by hand with a bound."""

import re

import pytest
from tests.backends.cuda.util import body_of

import peertile as pt
import peertile.language as T
from peertile.backends.cuda import ptx
from peertile.backends.cuda.compile import lower_to_text
from peertile.backends.cuda.state import Ranks
from peertile.dtypes import u64
from peertile.errors import KernelAssert
from peertile.frontend.build import build_kernel
from peertile.language.annotations import Role
from peertile.memory_model import Cmp, Order, Scope
from peertile.passes.pipeline import run_pipeline


@pt.kernel
def pushes(p: T.Peer, q: T.Peer, ready: T.Signal):
    to = 1 - p.rank
    p.at(to).store((0,), q.at(0).load((1,), (64,)))
    ready.notify(to=to)
    ready.wait(to)


@pt.kernel
def flagged(out: T.Exclusive, words: T.Peer):
    out.store(T.take_flagged(words, out.tile_shape, (0,), epoch=1, dtype=T.f32))


@pt.kernel(unsafe=True)
def polls(word: T.Pointer):
    for _ in T.range(1 << 40):
        got, _token = T.unsafe.load_ptr(word, order=T.acquire, scope=T.system)
        if got == 1:
            break


def source_of(op):
    """The Triton source of a launch's kernel."""
    kernel, bound = op.kernel, op.bound
    names = [p.name for p in kernel.params if p.role is not Role.CONST]
    types = {name: argument.type for name, argument in zip(names, bound.arguments, strict=True)}
    made = build_kernel(kernel.fn, types, bound.consts, unsafe=kernel.unsafe, name=kernel.name, grid_rank=1)
    return lower_to_text(run_pipeline(made))


@pytest.fixture
def heap():
    with pt.SymmetricHeap(pt.init(), 1 << 20) as made:
        yield made


def test_tables_of_ranks_are_read_at_the_head_once_for_each_object(heap):
    p, q = heap.zeros((256,), pt.f32), heap.zeros((256,), pt.f32)
    body = body_of(source_of(pushes.grid(1)(p, q, heap.signal(slots=1))), "pushes")
    reads = re.findall(r" _table\((\w+_table) \+ (\d)\)", body)
    one = [("0", "1", "2", "3")]
    assert [tuple(n for table, n in reads if table == name) for name in ("p_table", "q_table")] == one * 2
    assert {table for table, _ in reads} == {"p_table", "q_table", "ready_arrived_table"}
    head = body.split("_check(")[0]
    assert all(f" _table({table}" in head for table, _ in reads)


def test_a_table_is_read_where_it_is_written_and_from_the_nearest_cache():
    # At system scope every warp of every program would ask one place of the second cache.
    _, text = ptx.load_table()
    assert "ld.relaxed.cta.global.b64 $0, [$1];" in text
    assert "is_pure=False" in text


def test_the_first_two_bases_need_no_other_look_at_memory():
    ranks = Ranks("t", "rank", "ranks", "a", "b")
    assert (ranks.base("0", literal=True), ranks.base("1", literal=True)) == ("a", "b")
    later = "tl.load(t + 2 + r, mask=r > 1, other=0)"
    assert ranks.base("r", literal=False) == f"tl.where(r == 0, a, tl.where(r == 1, b, {later}))"
    assert ranks.base("5", literal=True).count("tl.load(t + 2 + 5") == 1


def test_a_table_has_room_for_two_bases(heap):
    assert heap._table.shape == (4,)


@pytest.mark.parametrize(("n", "each"), [(32, 1), (128, 1), (256, 2), (512, 4), (1024, 4), (2048, 4)])
def test_flagged_words_are_looked_at_again_by_the_thread_that_owns_them(heap, n, each):
    words, out = heap.zeros((n,), pt.u64), pt.zeros((n,), pt.f32)
    source = source_of(flagged(out.partition(n), words))
    body = body_of(source, "flagged")
    # As many threads as words, up to 128: of such programs there is room for the next launch's, too.
    assert body.count(f"_ld_patient_relaxed_sys_b64_x{each}(") == 1
    assert "_ld_tile_relaxed" not in source
    assert "_wait_at_least_acquire_sys_u64" in body  # what has not come by then is waited for within the bound


@pytest.mark.parametrize("pack", [1, 4])
def test_a_patient_load_is_bounded_and_looks_at_all_its_elements_in_each_turn(pack):
    name, text = ptx.patient_load_tile(Order.RELAXED, Scope.SYSTEM, 64, pack)
    assert name == f"_ld_patient_relaxed_sys_b64_x{pack}"
    again = text.split("PATIENT_AGAIN_${:uid}:")[1]
    assert again.count("ld.relaxed.sys.global.b64") == pack
    assert f"mov.b32 count, {ptx.LOOKS};" in text
    assert f"pack={pack}" in text
    assert again.lstrip().startswith(ptx.ROLLED)  # unrolled whole, each look would fetch instructions of its own


def test_a_patient_load_of_places_that_fill_ends_when_none_is_empty():
    name, text = ptx.patient_load_tile(Order.RELAXED, Scope.SYSTEM, 64, 2, Cmp.NE)
    assert name == "_ld_patient_ne_relaxed_sys_b64_x2"
    assert text.count("setp.eq.and.b64 missing0, $0, $4, missing0;") == 1  # and is not looked at again
    assert text.count("setp.eq.and.b64 missing1, $1, $5, missing1;") == 1


@pytest.mark.parametrize(("until", "pack", "apart"), [(Cmp.NE, 8, 1), (Cmp.NE, 4, 0), (Cmp.AT_LEAST, 8, 0)])
def test_of_many_places_that_fill_a_thread_looks_at_the_last_until_it_has_come(until, pack, apart):
    _, text = ptx.patient_load_tile(Order.RELAXED, Scope.SYSTEM, 64, pack, until)
    first, all_of_them = text.split("PATIENT_AGAIN_${:uid}:")
    assert first.count("ld.relaxed.sys.global.b64") == apart
    # What was not looked at yet is zero, which is not empty: every element is loaded once at least.
    assert all_of_them.count("ld.relaxed.sys.global.b64") == pack
    assert text.count(f"mov.b32 count, {ptx.LOOKS};") == 1 + apart  # each loop has its bound


@pt.kernel
def expects(words: T.Peer, e: T.u64):
    word = T.wait_at_least(words, e, (0,))
    T.assert_(word == e, "another")


@pt.kernel
def expects_and_tells(words: T.Peer, e: T.u64):
    word = T.wait_at_least(words, e, (0,))
    T.assert_(word == e, "another")
    T.print_("word", word)


def test_a_word_that_is_only_asserted_is_compared_by_the_thread_that_polls(heap):
    words = heap.zeros((1,), pt.u64)
    body = body_of(source_of(expects.grid(1)(words, 3)), "expects")
    assert "_wait_at_least_acquire_sys_u64_exact_warp(" in body
    assert "tl.reduce" not in body
    assert "_check(" not in body.split("_exact_warp(")[1]
    other = body_of(source_of(expects_and_tells.grid(1)(words, 3)), "expects_and_tells")
    assert "_wait_at_least_acquire_sys_u64_value_warp(" in other
    assert "_check(" in other.split("_value_warp(")[1]


def test_a_word_that_is_only_asserted_fails_as_an_assertion(heap):
    words = heap.zeros((1,), pt.u64)
    words.copy_from([4])
    expects.grid(1)(words, 4).sync()
    with pytest.raises(KernelAssert, match="another"):
        expects.grid(1)(words, 3).sync()
    heap.group.recover()


def test_whether_all_has_come_is_asked_by_one_barrier(heap):
    words, out = heap.zeros((256,), pt.u64), pt.zeros((256,), pt.f32)
    body = body_of(source_of(flagged(out.partition(256), words)), "flagged")
    assert body.index("_verdict()") < body.index("while ") < body.index("_judge_x2(") < body.index("= _agree()")
    fast = body.split("= _agree()")[0].split("while ")[1]
    assert "tl.reduce" not in fast.replace("tl.reduce(_ld_patient", "")  # but for the copies of small tiles


def test_a_wait_reads_neither_clock_nor_host_memory_before_its_first_looks():
    _, text = ptx.wait(ptx.Poll((u64,), Cmp.AT_LEAST, Order.ACQUIRE, Scope.SYSTEM))
    looks = text.split("ld.acquire.sys.global.b64 word0")[0]
    assert "globaltimer" not in looks
    far = text.split("setp.ne.u32 skip, count, 0;")[1]
    clock, abort = far.index("%globaltimer"), far.index("ld.relaxed.sys.global.b32 stop")
    assert far.index("setp.lt.u64 skip, now, due;") < abort
    assert clock < abort
    assert far.count(str(ptx.FAR_NS)) == 2


def test_a_loop_that_polls_by_hand_has_the_bound_of_a_wait():
    source = source_of(polls.grid(1)(pt.zeros((1,), pt.u32).pointer()))
    body = body_of(source, "polls")
    assert body.index("_since = _clock()") < body.index("while ")
    assert "_alive = _alive & _patience(_since, _abort, _fault, _timeout, _program, " in body.split("while ")[1]
    assert "barrier.red.and.pred" in source.split("def _patience")[1].split("def ")[0]


@pt.kernel
def to_and_fro(ready: T.Signal, rounds: T.i32, to: T.i64):
    for _ in T.range(rounds):
        ready.notify(to=to)
        ready.wait(to)


@pt.kernel
def to_two(ready: T.Signal, a: T.i64, b: T.i64):
    ready.notify(to=a)
    ready.notify(to=b)


def test_the_count_of_a_signal_to_one_peer_is_read_once_and_stored_each_time(heap):
    body = body_of(source_of(to_and_fro.grid(1)(heap.signal(slots=1), 9, 0)), "to_and_fro")
    head, loop = body.split("while ", 1)
    inside = "mask=(_program >= 0) & (_program < ready_sent_n0) & (to >= 0) & (to < ready_sent_n1), other=0)"
    assert inside in head  # an index that is out of bounds is found later
    assert "tl.load(ready_" not in loop.replace("tl.load(ready_arrived_table", "")
    assert loop.count("tl.store(ready_sent + ") == loop.count("tl.store(ready_seen + ") == 1


def test_counts_of_signals_to_several_peers_stay_in_memory(heap):
    body = body_of(source_of(to_two.grid(1)(heap.signal(slots=1), 0, 0)), "to_two")
    assert body.count("tl.load(ready_sent + ") == 2
