"""The programs that peertile is for, as written: they compile, and the evaluator runs them to the right values."""

import numpy as np
import pytest
from tests.frontend.helpers import all_of, box, build, names, only, own, peer, run, shared

import peertile.language as T
from peertile.dtypes import bf16, f32, i32, u32
from peertile.ir import ops
from peertile.ir.text import parse_kernel, print_kernel
from peertile.ir.types import Access, MailboxType, Partition, PointerType, SignalType, TileType, ViewType
from peertile.meaning import PerRank, new_mailbox, new_signal, run_grid
from peertile.passes.pipeline import run_pipeline


def vector_add(z: T.Exclusive, x: T.Shared, y: T.Shared):
    z.store(x.load_like(z) + y.load_like(z))


def matmul(c: T.Exclusive, a: T.Shared, b: T.Shared, BK: T.Const[int] = 64):
    for tile in c.tiles():  # this program's share of c, swizzled
        m, n = tile.index
        BM, BN = tile.tile_shape
        acc = T.zeros((BM, BN), T.f32)
        for k in T.range(a.num_tiles((BM, BK))[1], stages=3):
            acc = T.mma(a.load((m, k), (BM, BK)), b.load((k, n), (BK, BN)), acc)
        tile.store(acc.astype(c.dtype))


def all_reduce(out: T.Exclusive, x: T.Shared, box: T.Mailbox):
    for tile in out.tiles():
        box.post(x.load_like(tile))  # to every rank; I may not write it again
        acc = T.zeros(tile.tile_shape, T.f32)
        for part in box.collect():  # rank 0 … n-1, mine included, each once it has arrived: same sum everywhere
            acc += part
        tile.store(acc.astype(out.dtype))  # the slots go back at their last use


def scatter(out: T.Exclusive, x: T.Shared, box: T.Mailbox, B: T.Const[int]):
    with box.round() as r:  # different tiles to some ranks: scatter, all-to-all, dispatch
        for k in T.ranks():
            r.put(x.load((k,), (B,)), to=k)
    acc = T.zeros((B,), T.f32)
    for source, part in box.collect(sources=True):
        acc += part * (source + 1)
    out.store(acc)


def two_shot(out: T.Peer, x: T.Peer[T.read], ready: T.Signal, B: T.Const[int]):
    me, n = x.rank, x.num_ranks
    tiles = x.local.num_tiles((B,))[0]
    ready.notify()  # this program, to its counterpart on every peer: release, system scope
    ready.wait()  # every source: acquire; epochs count by themselves, one word per source
    for t in T.range(T.program_id(0) * n + me, tiles, T.num_programs(0) * n):  # my share of the tiles
        acc = T.zeros((B,), T.f32)
        for r in T.ranks():  # same order on every rank
            acc += x.at(r).load((t,), (B,))
        for r in T.ranks():
            out.at(r).store((t,), acc.astype(out.dtype))
    ready.notify()  # nobody reuses x or reads out before everybody is here
    ready.wait()


def exchange(
    mine: T.Pointer,
    theirs: T.Pointer,
    my_inbox: T.Pointer,
    their_inbox: T.Pointer,
    log: T.Pointer,
    rounds: T.i32,
    N: T.Const[int],
    LIMIT: T.Const[int] = 1 << 24,
):
    i = T.iota(N)
    token = T.unsafe.token()
    for r in T.range(rounds):
        value = (i + r).astype(T.f32)
        token = T.unsafe.store_ptr(T.unsafe.unicast(theirs) + i, value, order=T.weak, token=token)
        for phase in T.static_range(2):  # 0: data has arrived; 1: it has been read
            seq = (2 * r + phase + 1).astype(T.u32)
            token = T.unsafe.store_ptr(T.unsafe.unicast(their_inbox), seq, order=T.release, scope=T.system, token=token)
            got = T.u32(0)
            for _ in T.range(LIMIT):
                got, token = T.unsafe.load_ptr(my_inbox, order=T.acquire, scope=T.system, token=token)
                if T.at_least(got, seq):  # wrap-safe
                    break
            T.assert_(T.at_least(got, seq), "peer did not signal")
            if phase == 0:
                tile, token = T.unsafe.load_ptr(mine + i, order=T.weak, token=token)
                token = T.unsafe.store_ptr(log + r * N + i, tile, order=T.weak, token=token)


def test_vector_add_clips_its_tail():
    a, b, z = np.arange(100, dtype=np.float32), np.ones(100, np.float32), np.zeros(100, np.float32)
    run(vector_add, [z, a, b], grid=2, z=own(f32, (64,)))
    assert np.array_equal(z, a + b)


def test_vector_add_is_three_accesses_and_a_sum():
    assert names(build(vector_add)) == [
        "program_id", "tile_index", "load", "load", "binary", "store", "return",
    ]  # fmt: skip


@pytest.mark.parametrize("programs", [1, 3, 6])
def test_matmul_of_a_persistent_partition(programs):
    rng = np.random.default_rng(1)
    a, b = rng.integers(-4, 5, (20, 24)).astype(np.float32), rng.integers(-4, 5, (24, 40)).astype(np.float32)
    c = np.zeros((20, 40), np.float32)
    given = {"c": own(f32, (8, 16), persistent=True), "a": shared(f32, 2), "b": shared(f32, 2)}
    kernel = run_pipeline(build(matmul, {"BK": 8}, **given))
    assert run_grid(kernel, programs, [c, a, b]).faults == []
    assert np.array_equal(c, a @ b)


def test_matmul_asks_for_three_stages():
    given = {"c": own(bf16, (16, 16), persistent=True), "a": shared(bf16, 2), "b": shared(bf16, 2)}
    kernel = build(matmul, **given)
    assert [op.stages for op in all_of(kernel, ops.For)] == [1, 3]
    assert only(kernel, ops.Mma).result.type == TileType(f32, (16, 16))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_reduce_through_a_mailbox(ranks):
    programs, tile = 2, 8
    kernel = run_pipeline(build(all_reduce, out=own(f32, (tile,), persistent=True), x=shared(), box=box(f32, (tile,))))
    xs = [np.arange(40, dtype=np.float32) + 100 * r for r in range(ranks)]
    outs = [np.zeros(40, np.float32) for _ in range(ranks)]
    mailbox = new_mailbox(MailboxType(f32, (tile,), 2, False), ranks, programs)
    outcome = run_grid(kernel, programs, [PerRank(outs), PerRank(xs), mailbox], ranks=ranks)
    assert outcome.faults == []
    assert all(np.array_equal(out, sum(xs)) for out in outs)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_scatter_through_a_round(ranks):
    t = MailboxType(f32, (4,), 2, False)
    kernel = run_pipeline(build(scatter, {"B": 4}, out=own(f32, (4,)), x=shared(), box=t))
    xs = [np.arange(4 * ranks, dtype=np.float32) + 1000 * r for r in range(ranks)]
    outs = [np.zeros(4, np.float32) for _ in range(ranks)]
    outcome = run_grid(kernel, 1, [PerRank(outs), PerRank(xs), new_mailbox(t, ranks, 1)], ranks=ranks)
    assert outcome.faults == []
    for r, out in enumerate(outs):
        expected = sum(x[4 * r : 4 * r + 4] * (source + 1) for source, x in enumerate(xs))
        assert np.array_equal(out, expected)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_two_shot_over_peers(ranks):
    programs = 2
    given = {"out": peer(), "x": peer(f32, 1, Access.READ)}
    kernel = run_pipeline(build(two_shot, {"B": 8}, ready=SignalType(), **given))
    xs = [np.arange(60, dtype=np.float32) * (r + 1) for r in range(ranks)]
    outs = [np.zeros(60, np.float32) for _ in range(ranks)]
    outcome = run_grid(kernel, programs, [PerRank(outs), PerRank(xs), new_signal(ranks, programs)], ranks=ranks)
    assert outcome.faults == []
    assert all(np.array_equal(out, sum(xs)) for out in outs)


def test_two_shot_needs_no_check_of_ranks():
    kernel = build(two_shot, {"B": 8}, out=peer(), x=peer(f32, 1, Access.READ), ready=SignalType())
    assert "check" not in names(kernel)


POINTERS = {
    "mine": PointerType(f32),
    "theirs": PointerType(f32),
    "my_inbox": PointerType(u32),
    "their_inbox": PointerType(u32),
    "log": PointerType(f32),
    "rounds": TileType(i32),
}


def test_exchange_runs_with_itself_as_the_peer():
    kernel = run_pipeline(build(exchange, {"N": 8, "LIMIT": 100}, unsafe=True, **POINTERS))
    buffer, inbox, log = np.zeros(8, np.float32), np.zeros(1, np.uint32), np.zeros(24, np.float32)
    assert run_grid(kernel, 1, [buffer, buffer, inbox, inbox, log, 3]).faults == []
    assert np.array_equal(log.reshape(3, 8), np.arange(8) + np.arange(3)[:, None])


def test_exchange_carries_the_token_through_every_loop():
    kernel = build(exchange, {"N": 8}, unsafe=True, **POINTERS)
    assert [[str(r.type) for r in op.results] for op in all_of(kernel, ops.For)] == [
        ["token"], ["u32", "token"], ["u32", "token"],
    ]  # fmt: skip


PROGRAMS = [
    (vector_add, {}, {}),
    (matmul, {}, {"c": own(bf16, (16, 16), persistent=True), "a": shared(bf16, 2), "b": shared(bf16, 2)}),
    (all_reduce, {}, {"out": own(f32, (64,), persistent=True)}),
    (scatter, {"B": 64}, {"out": own(f32, (64,))}),
    (two_shot, {"B": 64}, {"out": peer(), "x": peer(f32, 1, Access.READ), "ready": SignalType()}),
    (exchange, {"N": 8}, {"unsafe": True, **POINTERS}),
]


@pytest.mark.parametrize(("fn", "constants", "given"), PROGRAMS, ids=[p[0].__name__ for p in PROGRAMS])
def test_their_text_form_comes_back_as_it_was(fn, constants, given):
    text = print_kernel(build(fn, constants, **given))
    assert print_kernel(parse_kernel(text)) == text


def test_values_are_shown_under_the_names_of_variables():
    text = print_kernel(build(all_reduce, out=own(f32, (64,), persistent=True)))
    assert "%acc = " in text
    assert "%tile = " not in text


def test_a_partition_that_is_not_persistent_has_one_tile():
    def kernel(z, x):
        for tile in z.tiles():
            tile.store(x.load_like(tile))

    x, z = np.arange(100, dtype=np.float32), np.zeros(100, np.float32)
    run(kernel, [z, x], grid=2, z=own(f32, (64,)))
    assert np.array_equal(z, x)


def test_swizzle_is_the_partitions():
    t = ViewType(f32, 2, Access.READ_WRITE, partition=Partition((16, 16), True, 4))
    assert build(matmul, c=t, a=shared(f32, 2), b=shared(f32, 2)).params[0].type is t
