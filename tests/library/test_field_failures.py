"""Ways in which real collectives have gone wrong, each as a small case; the numbers are the project's own list."""

import itertools

import library_ranks as ranks
import numpy as np
import pytest

import peertile as pt
from peertile.errors import ArgumentError
from peertile.library.collectives import Collectives
from peertile.library.reductions import ReduceOp
from peertile.library.selection import Algorithm

algorithms = pytest.mark.parametrize(
    "algorithm",
    [a if a is Algorithm.ONE_SHOT else pytest.param(a, marks=pytest.mark.slow) for a in ranks.CPU_ALGORITHMS],
    ids=lambda a: a.value,
)


def spawn(function, n, *args, model=pt.RankModel.THREADS):
    return pt.spawn(function, n, args, model=model, timeout_s=100)


def short(monkeypatch, seconds=1.0):
    monkeypatch.setattr("peertile.config._current", ranks.short_waits(seconds))


# ---------------------------------------------------------------- payload lifetime


def single_slot(group):
    with pt.SymmetricHeap(group, size_bytes=1 << 20) as heap:
        box, out = heap.mailbox(tile=1, dtype=pt.i64, programs=1, depth=2), pt.zeros((1,), pt.i64)
        ranks.sum_rounds(out.partition(1), box, 30).sync()
        return int(out.numpy()[0])


def test_f33_rounds_back_to_back_never_mix_their_data():
    """Two ranks sum round after round without a barrier between: a fast rank may not write over what a slow one
    still reads, so staging alternates."""
    expected = 0
    for e in range(30):
        expected = expected * 3 + 20 * e + 1
    assert spawn(single_slot, 2) == [(expected + 2**63) % 2**64 - 2**63] * 2


@pytest.mark.slow
@algorithms
@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_f33_a_rank_that_comes_late_to_every_call_sees_that_calls_data(algorithm, n):
    """As above between calls: in turn each rank enters only when the others have all gone ahead."""
    assert all(spawn(ranks.stalled, n, ranks.Stalls(n), algorithm, 3 * n))


def scribbles(group):
    me, n = group.rank, group.size
    with pt.SymmetricHeap(group, size_bytes=8 << 20) as heap, Collectives(heap) as comm:
        x = heap.empty((5000,), pt.f32)
        for k in range(20):
            x.copy_from(ranks.vector(me, 5000) + k)
            got = comm.all_gather(x).sync()
            x.copy_from(np.full(5000, np.nan, np.float32))
            ranks.same(got.numpy(), np.stack([ranks.vector(r, 5000) + k for r in range(n)]).astype(np.float32))
    return True


@pytest.mark.slow
def test_f34_input_overwritten_as_soon_as_the_call_returns():
    """Peers read a rank's input where it lies; the owner writes NaN over it at once. None may arrive anywhere."""
    assert all(spawn(scribbles, 2))


def aliases(group):
    me, n = group.rank, group.size
    with pt.SymmetricHeap(group, size_bytes=8 << 20) as heap, Collectives(heap) as comm:
        parts = [ranks.vector(r, 100) for r in range(n)]
        x = heap.empty((100,), pt.f32)
        x.copy_from(parts[me])
        comm.all_reduce(x, x, algorithm=Algorithm.ONE_SHOT).sync()
        ranks.same(x.numpy(), ranks.fold(parts, ReduceOp.SUM))
        y = ranks.device_vector(me, 101)
        return [
            ranks.caught(lambda: comm.all_to_all(x, x)),
            ranks.caught(lambda: comm.all_reduce(y[:100], y[1:])),
            ranks.caught(lambda: comm.reduce_scatter(y[:100], y[49:99])),
        ]


def test_f37_one_buffer_for_an_algorithm_that_needs_two():
    """One-shot in place goes through staging; all-to-all in place and partial overlap are refused."""
    overlap = "x and out overlap in part; pass the same tensor, or separate ones"
    assert (
        spawn(aliases, 2)
        == [
            [
                ("ArgumentError", "all_to_all: out: expected another tensor than x, got the same; pass a separate one"),
                ("ArgumentError", f"all_reduce: {overlap}"),
                ("ArgumentError", f"reduce_scatter: {overlap}"),
            ]
        ]
        * 2
    )


def parts_of_one(group):
    me, n = group.rank, group.size
    with Collectives(group) as comm:
        whole = ranks.junk(n * 50, pt.f32)
        mine = whole[me * 50 : (me + 1) * 50]
        mine.copy_from(ranks.vector(me, 50))
        comm.all_gather(mine, whole).sync()
        ranks.same(whole.numpy(), np.concatenate([ranks.vector(r, 50) for r in range(n)]))
        comm.reduce_scatter(whole, mine).sync()
        ranks.same(mine.numpy(), ranks.vector(me, 50) * n)
    return True


@pytest.mark.slow
def test_f37_own_part_of_the_other_tensor_is_in_place():
    assert all(spawn(parts_of_one, 3))


def freed_inputs(group):
    me, n = group.rank, group.size
    with Collectives(group) as comm:
        device = pt.current_device()
        other = device.stream("other")
        for k in range(12):
            a = pt.asarray(ranks.vector(me, 2000) + k)
            running = comm.all_reduce(a).submit()
            del a
            b = pt.full((2000,), -1, pt.f32)
            with_b = ranks_copy(b).submit(other)
            ranks.same(running.wait().numpy(), sum(ranks.vector(r, 2000) + k for r in range(n)).astype(np.float32))
            with_b.wait()
    return True


def ranks_copy(b):
    from peertile.library import kernels

    return kernels.copy(pt.empty((1, b.size), b.dtype).partition((1, 64)).persistent(programs=1), b.reshape(1, b.size))


@pytest.mark.slow
def test_f39_input_dropped_while_the_collective_runs():
    """The caller drops its input once the call is submitted, and new tensors of that size are filled on another
    stream: the collective must still read the old values."""
    assert all(spawn(freed_inputs, 2))


def capacities(group):
    me, n = group.rank, group.size
    with Collectives(group) as comm:
        for count in (5000, 3, 20_000, 3, 700, 20_000, 1):
            got = comm.all_reduce(ranks.device_vector(me, count)).sync().numpy()
            ranks.same(got, ranks.fold([ranks.vector(r, count) for r in range(n)], ReduceOp.SUM))
            got = comm.all_gather(ranks.device_vector(me, count)).sync().numpy()
            ranks.same(got, np.stack([ranks.vector(r, count) for r in range(n)]))
    return True


@pytest.mark.slow
def test_f42_f31_calls_of_different_sizes_share_staging():
    """Large, small, large: where flags and data lie must not depend on the size of a call."""
    assert all(spawn(capacities, 3))


# ---------------------------------------------------------------- symmetry


DISAGREEMENTS = [w for w in ranks.CALLS if w not in ("flagged count", "pairs")]


@pytest.mark.parametrize(
    "what", [w if w in ("count", "dtype") else pytest.param(w, marks=pytest.mark.slow) for w in DISAGREEMENTS]
)
def test_f58_f61_f62_ranks_that_call_differently_fail_with_a_reason_and_recover(what, monkeypatch):
    """One rank has another count (zero too), dtype, reduction, algorithm, root or collective: never wrong values
    and never a hang; the first to notice says so, the others hear of it, and after recovery all is right."""
    short(monkeypatch, 20.0)
    errors = spawn(ranks.disagrees, 2, what, False)
    assert {kind for kind, _ in errors} <= {"SignatureMismatch", "PeerFailed"}
    assert "SignatureMismatch" in {kind for kind, _ in errors}
    for rank, (kind, text) in enumerate(errors):
        if kind == "SignatureMismatch":
            assert text.startswith(f"ranks called different collectives: rank {rank} is in ")
        else:
            assert "SignatureMismatch" in text


@pytest.mark.parametrize(
    "what", [w if w == "count" else pytest.param(w, marks=pytest.mark.slow) for w in DISAGREEMENTS]
)
def test_f61_checked_communicators_name_what_each_rank_called(what):
    errors = spawn(ranks.disagrees, 2, what, True)
    assert len(set(errors)) == 1
    kind, text = errors[0]
    assert kind == "SymmetryError"
    assert text.startswith("ranks disagree about a collective: rank 0: '")
    assert "; rank 1: '" in text
    if what == "count":
        assert text == (
            "ranks disagree about a collective: rank 0: 'all_reduce(f32[8], SUM, one_shot)'; "
            "rank 1: 'all_reduce(f32[6], SUM, one_shot)'. It must be the same on every rank"
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("flagged count", "assertion failed: a peer called all_reduce with another count, dtype or reduction"),
        ("pairs", "assertion failed: all_to_all_v: a rank sends another count than this rank expects from it"),
    ],
)
def test_f61_unequal_counts_where_the_kernel_itself_compares(what, text, monkeypatch):
    short(monkeypatch, 20.0)
    errors = spawn(ranks.disagrees, 2, what, False)
    assert any(kind == "KernelAssert" and message.startswith(text) for kind, message in errors)
    assert {kind for kind, _ in errors} <= {"KernelAssert", "PeerFailed"}


@pytest.mark.slow
def test_f48_one_communicator_on_two_streams_at_once_is_refused():
    """Two operations in flight on one communicator would count the same epochs."""
    errors = spawn(ranks.two_streams, 2)
    assert errors[1] is None
    assert errors[0][0] == "LeaseError"
    assert "still uses it as a channel" in errors[0][1]


def alone(group):
    with Collectives(group) as comm:
        if group.rank == 0:
            return ranks.caught(comm.barrier().sync)
        ranks.wait_until_failed(group)
        return ranks.caught(group.check)


def leaves_after_failure(group):
    try:
        result = alone(group)
    except pt.PeertileError as error:
        return ranks.told(error)
    return result


def test_f64_f26_a_collective_that_a_rank_never_joins_ends_in_time(monkeypatch):
    """A rank stays away from a barrier: nobody gets through, and the wait ends with who, what and where."""
    short(monkeypatch, 0.3)
    errors = spawn(leaves_after_failure, 2)
    assert errors[0][0] == "WaitTimeout"
    assert errors[0][1].startswith("wait for hello, slot 0: nothing came within 0.3 s; ")
    assert errors[1][0] == "PeerFailed"


@pytest.mark.slow
@algorithms
def test_f65_fewer_elements_than_ranks(algorithm):
    """Shares that are empty for some ranks must still be owned by somebody."""
    assert all(spawn(ranks.all_reduces, 4, (1, 2, 3, 8), algorithm))


# ---------------------------------------------------------------- numerics


ZEROS = [[0.0, -0.0, -0.0, 0.0, 1.0], [-0.0, -0.0, 0.0, 0.0, -1.0]]


@pytest.mark.slow
@algorithms
def test_f103_f104_zeros_of_both_signs_arrive(algorithm):
    """Zero is data: no payload may look like a slot that is still empty. -0.0 + -0.0 is -0.0, as IEEE says."""
    for _, op, got in [r for rank in spawn(ranks.specials, 2, algorithm, ZEROS) for r in rank]:
        if op == "SUM":
            assert [np.signbit(v) for v in got] == [False, True, False, False, False]
            assert not any(got)


@pytest.mark.slow
def test_f105_nan_and_inf_stay_where_they_are():
    """One element NaN, one infinite: on every path these elements alone are touched, and the paths agree."""
    rows = [[1.0, np.nan, 3.0, np.inf, 5.0] * 8, [1.0, 2.0, 3.0, 4.0, 5.0] * 8]
    results = [
        spawn(ranks.specials, 2, a, rows)[0] for a in (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT, Algorithm.FLAGGED)
    ]
    sums = [repr(got) for result in results for name, op, got in result if (name, op) == ("f32", "SUM")]
    assert sums == [repr([2.0, float("nan"), 6.0, float("inf"), 10.0] * 8)] * 3


@pytest.mark.slow
@algorithms
def test_f106_min_and_max_give_nan_in_every_order(algorithm):
    """1, NaN, 3, 4 over four ranks in all 24 orders, one order per element."""
    rows = [list(row) for row in zip(*itertools.permutations([1.0, np.nan, 3.0, 4.0]), strict=True)]
    for _, op, got in itertools.chain(*spawn(ranks.specials, 4, algorithm, rows)):
        if op != "SUM":
            assert np.isnan(got).all()


@pytest.mark.slow
@algorithms
def test_f107_no_identity_element_leaks(algorithm):
    """Infinities alone, NaN alone: the result is one of the values, never the largest finite number."""
    rows = [[np.inf, -np.inf, np.nan], [np.inf, -np.inf, np.nan]]
    for _, op, got in itertools.chain(*spawn(ranks.specials, 2, algorithm, rows)):
        if op in ("MIN", "MAX"):
            assert got[:2] == [np.inf, -np.inf]
            assert np.isnan(got[2])


@pytest.mark.parametrize("algorithm", [None, Algorithm.ONE_SHOT, Algorithm.TWO_SHOT, Algorithm.FLAGGED])
@pytest.mark.parametrize("name", ["f32", "bf16"])
@pytest.mark.slow
def test_f108_sums_are_in_rank_order_and_the_same_bits_everywhere_and_every_time(algorithm, name):
    results = spawn(ranks.random_sums, 4, 200, algorithm, name)
    expected = results[0][1]
    for got, _ in results:
        assert got == [expected, expected]


@pytest.mark.slow
def test_f108_the_ring_gives_the_same_bits_everywhere_and_every_time():
    results = spawn(ranks.random_sums, 4, 200, Algorithm.RING, "f32")
    assert len({bits for got, _ in results for bits in got}) == 1


def absorbs(group):
    x = pt.asarray(np.array([256.0 if group.rank == 0 else 1.0]), pt.bf16)
    with Collectives(group) as comm:
        return [
            float(comm.all_reduce(x, algorithm=a).sync().numpy()[0]) for a in (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT)
        ]


@pytest.mark.slow
def test_f108_bf16_is_summed_in_f32_and_rounded_once():
    """256 + 1 + 1 + 1: in bf16 every 1 is lost on the way; in f32 it is 259, rounded to 260 at the end."""
    assert spawn(absorbs, 4) == [[260.0, 260.0]] * 4


def test_f110_fp8_is_moved_but_never_summed_as_bytes():
    with Collectives(pt.init()) as comm:
        x = pt.asarray(np.array([1.0]), pt.f8e4m3)
        for op in ReduceOp:
            with pytest.raises(ArgumentError) as caught:
                comm.all_reduce(x, op=op)
            assert str(caught.value) == (
                f"all_reduce: op: {op.name} is not defined for f8e4m3; convert to bf16 or f32 first "
                "(all_gather, broadcast and all_to_all take fp8)"
            )
        assert comm.all_gather(x).sync().numpy().tobytes() == x.numpy().tobytes()


# ---------------------------------------------------------------- shapes


def misaligned(group):
    me, n = group.rank, group.size
    parts = [ranks.vector(r, 40, pt.f16) for r in range(n)]
    with Collectives(group) as comm:
        base, target = pt.zeros((64,), pt.f16), pt.zeros((64,), pt.f16)
        x, out = base[1 + me : 41 + me], target[3:43]
        for algorithm in (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT):
            x.copy_from(parts[me])
            comm.all_reduce(x, out, algorithm=algorithm).sync()
            ranks.same(out.numpy(), ranks.fold(parts, ReduceOp.SUM))
        edges = target.numpy()
        assert not edges[:3].any()
        assert not edges[43:].any()
    return True


@pytest.mark.slow
def test_f115_aligned_size_at_a_misaligned_address():
    """Views that begin 2 bytes off, by another distance on each rank: right, and nothing beside them is touched."""
    assert all(spawn(misaligned, 2))


def layouts(group):
    with Collectives(group) as comm:
        x = pt.zeros((4, 6), pt.f32)
        columns = x[:, ::2]
        return ranks.caught(lambda: comm.all_reduce(columns, pt.zeros((12,), pt.f32)))


def test_f117_strided_inputs_are_refused_by_their_strides():
    text = "all_reduce: x: expected a contiguous tensor, got strides (6, 2) for shape (4, 3); copy it first"
    assert spawn(layouts, 2) == [("ArgumentError", text)] * 2


def buckets(group):
    me, n = group.rank, group.size
    with Collectives(group) as comm:
        bucket = pt.full((21,), float("nan"), pt.f32)
        a, b = bucket[:3], bucket[16:21]
        a.copy_from(ranks.vector(me, 3))
        b.copy_from(ranks.vector(me, 5))
        comm.all_reduce(bucket, bucket).sync()
        ranks.same(a.numpy(), ranks.fold([ranks.vector(r, 3) for r in range(n)], ReduceOp.SUM))
        ranks.same(b.numpy(), ranks.fold([ranks.vector(r, 5) for r in range(n)], ReduceOp.SUM))
    return True


@pytest.mark.slow
def test_f120_gaps_of_a_bucket_poison_nothing():
    """Two tensors with junk between them reduced as one span, over more ranks than divide it."""
    assert all(spawn(buckets, 5))


@pytest.mark.slow
@pytest.mark.parametrize("shares", [[18, 19, 18, 18], [0, 0, 73, 0]])
def test_f121_uneven_shares_round_trip(shares):
    assert all(spawn(ranks.uneven, 4, shares))


def nothing(group):
    with Collectives(group) as comm:
        for shape in ((0,), (1, 0, 2)):
            x = pt.empty(shape, pt.f32)
            for algorithm in (None, *ranks.CPU_ALGORITHMS):
                assert comm.all_reduce(x, algorithm=algorithm).sync().size == 0
            for call in (comm.all_gather, comm.all_to_all, comm.reduce_scatter, comm.broadcast):
                assert call(x).sync().size == 0
        got = comm.all_reduce(ranks.device_vector(group.rank, 5)).sync()
        ranks.same(got.numpy(), ranks.fold([ranks.vector(r, 5) for r in range(group.size)], ReduceOp.SUM))
    return True


@pytest.mark.slow
def test_f122_zero_elements_are_a_collective_like_any_other():
    assert all(spawn(nothing, 4))


def test_f122_a_flagged_call_of_no_elements_still_meets_its_peers():
    """Flags travel with elements: without any there would be no exchange, but a turn would be used up, and the call
    after it would write over words of the call before it that a slow rank has not read."""
    with Collectives(pt.init()) as comm:
        x = pt.empty((0,), pt.f32)
        assert comm.all_reduce(x, algorithm=Algorithm.FLAGGED).name == "all_reduce(f32[0], SUM, one_shot)"


@pytest.mark.slow
@pytest.mark.parametrize("n", [3, *(pytest.param(k, marks=pytest.mark.slow) for k in (5, 6, 7))])
def test_f124_rank_counts_that_are_no_power_of_two_with_each_rank_stalled(n):
    for algorithm in (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT, Algorithm.RING):
        assert all(spawn(ranks.stalled, n, ranks.Stalls(n), algorithm, n))


# ---------------------------------------------------------------- wrap-around


def near_the_wrap(group, start):
    me, n = group.rank, group.size
    with Collectives(group) as comm:
        # As if that many calls had been made: every rank alike, between two barriers of the host.
        comm._turn.copy_from(np.full(comm._turn.shape, start, np.int64))
        group.barrier("turns are set")
        for k in range(6):
            for algorithm in (Algorithm.ONE_SHOT, Algorithm.FLAGGED):
                got = comm.all_reduce(ranks.device_vector(me + k, 50), algorithm=algorithm).sync().numpy()
                ranks.same(got, ranks.fold([ranks.vector(r + k, 50) for r in range(n)], ReduceOp.SUM))
            ranks.same(
                comm.all_gather(ranks.device_vector(me + k, 5)).sync().numpy(),
                np.stack([ranks.vector(r + k, 5) for r in range(n)]),
            )
    return True


@pytest.mark.slow
@pytest.mark.parametrize("start", [2**31 - 3, 2**32 - 2, 2**63 - 3])
def test_f125_turns_go_on_over_every_power_of_two(start):
    """Counters of calls near 2^31, 2^32 and the end of 64 bits: no hang, no early pass, right values."""
    assert all(spawn(near_the_wrap, 2, start))
