"""Views, peers, words, waits, signals, counters and pointers: the ops they give, and what is refused."""

import numpy as np
import pytest
from tests.frontend.helpers import all_of, build, error, names, only, own, peer, refuses, run, shared
from tests.frontend.helpers import box as mailbox
from tests.frontend.test_syntax import compiled

import peertile.language as T
from peertile.dtypes import b1, f8e4m3, f32, i64, u8, u32, u64
from peertile.ir import ops
from peertile.ir.ops import Bounds, CheckKind, Padding
from peertile.ir.types import PointerType, Space, TileType
from peertile.meaning import PerRank, new_counter, new_signal
from peertile.memory_model import Cmp, Order, Rmw, Scope

# ---------------------------------------------------------------- exclusive and shared


def test_a_tile_is_loaded_and_stored_at_its_own_index():
    def kernel(z):
        z.store(z.load(padding=T.Padding.NAN) * 2)

    kernel_ir = build(kernel)
    load, store = only(kernel_ir, ops.Load), only(kernel_ir, ops.Store)
    assert load.operands[1:] == store.operands[2:]
    assert (load.padding, load.bounds, store.bounds) == (Padding.NAN, Bounds.UNKNOWN, Bounds.UNKNOWN)


def test_facts_of_a_partition():
    def kernel(zz, m):
        T.static_assert(zz.tile_shape == (16, 64) and zz.ndim == 2 and zz.dtype is T.f32 and m.ndim == 2)
        i, j = zz.index
        T.print_(i, j, zz.shape[0], zz.num_tiles()[1], m.shape[1])

    text = names(build(kernel))
    assert [text.count(n) for n in ("tile_index", "extent", "num_tiles")] == [1, 2, 1]


def test_an_index_of_a_view_of_one_axis_may_be_a_scalar():
    def kernel(z, x):
        z.store(x.load(3, 64))

    assert only(build(kernel), ops.Load).result.type == TileType(f32, (64,))


@pytest.mark.parametrize("padding", list(Padding), ids=lambda p: p.value)
def test_every_padding_reaches_the_load(padding):
    kernel = compiled(f"z.store(x.load_like(z, padding=T.Padding.{padding.name}))", "z, x")
    assert only(build(kernel), ops.Load).padding is padding


def test_a_persistent_partition_is_stored_through_its_tiles():
    def store(zp):
        zp.store(0.0)

    def load(zp):
        zp.load()

    def index(zp):
        zp.index  # noqa: B018

    def like(zp, x):
        x.load_like(zp)

    for fn, what in ((store, "store(...)"), (load, "load()"), (index, "index"), (like, "index")):
        assert error(fn).message == (
            f"`zp.{what}`: expected a tile, got the whole persistent partition, of which a program has several tiles; "
            f"write `for tile in zp.tiles():` and use `tile.{what}`"
        )


def test_tiles_of_partitions_and_mailboxes_are_powers_of_two():
    def kernel(z, box):
        pass

    for name, given in (("partition", {"z": own(f32, (48,))}), ("mailbox", {"box": mailbox(f32, (48,))})):
        parameter = "z" if name == "partition" else "box"
        assert error(kernel, **given).message == (
            f"parameter `{parameter}`: tile of the {name}: extent 0: expected a power of two, got 48; use the next one, "
            "64: partial tiles are padded on load and clipped on store"
        )


ACCESS = [
    ("x.store(0, z.load())", "z, x",
     "`x.store`: expected T.Exclusive or T.Peer, got T.Shared, which is only read; declare the parameter T.Exclusive "
     "and pass a partition"),
    ("q.local.store((0,), z.load())", "z, q", "store to `q`: expected T.Peer, which reads and writes, got T.Peer[T.read]"),
    ("q.local.atomic_add((0,), z.load())", "z, q",
     "atomic on `q`: expected T.Peer, which reads and writes, got T.Peer[T.read]"),
    ("p.load((0,), (64,))", "z, p",
     "`p.load`: expected one rank's part, got the symmetric parameter; write p.local.load(...) or p.at(rank).load(...)"),
    ("z.load_like(z)", "z", "the exclusive parameter `z` has no `.load_like`; it is owned already: z.load() and "
     "z.store(tile) take no index"),
    ("z.store(x.load((0,), (32,)))", "z, x",
     "store to `z`: expected a tile of shape (64,), got f32[32]; T.reshape or T.broadcast it first"),
    ("z.store(x.load_like(z).astype(T.f64))", "z, x",
     "store to `z`: expected dtype f32, got f64[64]; convert it with .astype(z.dtype)"),
    ("z.store(x)", "z, x", "store to `z`: expected a tile, got the shared parameter `x`"),
    ("z.store('a')", "z", "store to `z`: expected a tile, got the str 'a'"),
    ("p.local.store((0,), 1.0)", "z, p",
     "store to `p`: expected a tile, got the float 1.0; write T.full(shape, 1.0, p.dtype)"),
    ("p.local.store((0,), T.zeros((8, 8)))", "z, p", "store to `p`: expected a tile of 1 axes, got f32[8, 8]"),
    ("x.load((0, 0), (64,))", "z, x", "load from `x`: index: expected a tile index per axis (1 of them), got 2"),
    ("x.load((0,), (8, 8))", "z, x", "load from `x`: shape: expected 1 extents, one per axis, got (8, 8)"),
    ("x.load((0.5,), (8,))", "z, x", "load from `x`: index 0: expected an integer scalar, got the float 0.5"),
    ("x.load((T.iota(8),), (8,))", "z, x",
     "load from `x`: index 0: expected an integer scalar, got i64[8]; a tile of indices needs one access each"),
    ("x.load((0,), (8,), padding=0)", "z, x",
     "load from `x`: padding: expected a T.Padding, such as T.Padding.NEG_INF, got the int 0"),
    ("xi.load((0,), (8,), padding=T.Padding.NAN)", "z, xi",
     "load from `xi`: padding: nan needs a float dtype, got i64; load, then select with T.where"),
    ("x.load_like(x)", "z, x",
     "load from `x`: load_like: expected an exclusive parameter or a tile of one, got the shared parameter `x`; use "
     "x.load(index, shape)"),
    ("m.load_like(z)", "z, m",
     "load from `m`: load_like: expected a view of 2 axes, got `z` of 1; use m.load(index, shape)"),
    ("x.num_tiles(48)", "z, x",
     "`x.num_tiles`: shape: extent 0: expected a power of two, got 48; use the next one, 64: partial tiles are padded "
     "on load and clipped on store"),
]  # fmt: skip


@pytest.mark.sentence("BD-12")
@pytest.mark.parametrize(("body", "params", "message"), ACCESS, ids=[a[0] for a in ACCESS])
def test_accesses_that_are_refused(body, params, message):
    assert error(compiled(body, params)).message == message


def test_infinite_padding_of_a_dtype_without_infinity_is_refused():
    def kernel(z, x):
        x.load((0,), (8,), padding=T.Padding.NEG_INF)

    message = "load from `x`: padding: f8e4m3 has no infinity, got neg_inf; load, cast, then select with T.where"
    refuses(kernel, message, "x.load((0,), (8,), padding=T.Padding.NEG_INF)", x=shared(f8e4m3))


# ---------------------------------------------------------------- peers


def test_a_run_time_rank_is_checked_with_its_value_and_limit():
    def kernel(z, p, n):
        z.store(p.at(n).load((0,), (64,)))

    kernel_ir = build(kernel)
    check = only(kernel_ir, ops.Check)
    limit = only(kernel_ir, ops.NumRanks).result
    assert (check.kind, check.message) == (CheckKind.BOUNDS, "peer rank out of range")
    assert check.operands[1:] == [kernel_ir.params[2], limit]


@pytest.mark.parametrize(
    "body",
    [
        "for r in T.ranks():\n    z.store(p.at(r).load((0,), (64,)))",
        "for r in T.peers():\n    z.store(p.at(r).load((0,), (64,)))",
        "z.store(p.at(p.rank).load((0,), (64,)))",
        "z.store(p.at(T.rank()).load((0,), (64,)))",
        "z.store(p.at(0).load((0,), (64,)))",
        "z.store(p.local.load((0,), (64,)))",
    ],
)
def test_a_rank_by_construction_needs_no_check(body):
    assert "check" not in names(build(compiled(body, "z, p")))


def test_a_negative_rank_is_refused():
    def kernel(z, p):
        p.at(-1)

    refuses(kernel, "peer rank out of range: expected 0 or more, got -1", "p.at(-1)")


def test_a_rank_out_of_range_is_a_fault():
    def kernel(z, p, n):
        z.store(p.at(n).load((0,), (64,)))

    arrays = PerRank([np.zeros(64, np.float32)] * 2)
    (fault, *_) = run(kernel, [PerRank([np.zeros(64, np.float32)] * 2), arrays, 2], ranks=2).faults
    assert fault.kind.name == "BOUNDS"


def test_peers_are_staggered_from_the_next_rank():
    def kernel(out, p):
        k = 0
        order = 0
        for r in T.peers():
            order = order * 10 + r
            k += 1
        out.store(order * 10 + k)

    outs = [np.zeros(1, np.int64) for _ in range(4)]
    run(kernel, [PerRank(outs), PerRank([np.zeros(1, np.float32)] * 4)], ranks=4, out=own(i64, (1,)))
    assert [o[0] for o in outs] == [1233, 2303, 3013, 123]


def test_views_of_peers_are_read_and_written():
    def kernel(z, p, n):
        view = p.at(n)
        view.store((0,), view.load((0,), (64,)))
        view.atomic_add((0,), z.load())
        view.atomic((0,), T.Rmw.MAX, z.load(), order=T.release)
        T.print_(view.shape[0], p.shape[0], view.num_tiles((64,))[0], p.num_ranks)

    kernel_ir = build(kernel)
    assert [op.rmw for op in all_of(kernel_ir, ops.TileAtomic)] == [Rmw.ADDF, Rmw.MAX]
    assert {op.scope for op in all_of(kernel_ir, ops.TileAtomic)} == {Scope.SYSTEM}
    assert only(kernel_ir, ops.PeerView).result.type.space is Space.PEER


def test_put_and_get():
    def kernel(z, p, n):
        T.put(z.load(), p, (n,), rank=0)
        T.put(z.load(), p)
        z.store(T.get(p, (64,), rank=n))

    assert [len(all_of(build(kernel), cls)) for cls in (ops.PeerView, ops.Store, ops.Load)] == [3, 3, 3]


# ---------------------------------------------------------------- words

WAITS = {"eq": Cmp.EQ, "ne": Cmp.NE, "ge": Cmp.GE, "le": Cmp.LE, "gt": Cmp.GT, "lt": Cmp.LT}


@pytest.mark.sentence("MM-91")
@pytest.mark.parametrize(("name", "cmp"), WAITS.items())
def test_waits_are_acquires_at_system_scope_on_peers(name, cmp):
    op = only(build(compiled(f"T.wait_{name}(words, 3)", "z, words")), ops.Wait)
    assert (op.cmp, op.order, op.scope, op.what) == (cmp, Order.ACQUIRE, Scope.SYSTEM, "words")
    assert op.operands[1].type == TileType(u64)


def test_a_wait_takes_an_index_a_rank_and_an_order():
    def kernel(z, words, n):
        T.wait_ge(words.local, n.astype(T.u64), index=(n,))
        T.wait_eq(words, 1, (0,), rank=0, order=T.relaxed)

    kernel_ir = build(kernel)
    assert [op.order for op in all_of(kernel_ir, ops.Wait)] == [Order.ACQUIRE, Order.RELAXED]
    assert [op.message for op in all_of(kernel_ir, ops.Check)] == [
        "T.wait_ge: element index 0 of `words` out of range",
        "T.wait_eq: element index 0 of `words` out of range",
    ]


def test_words_are_loaded_stored_and_added():
    def kernel(z, words):
        v = T.ld(words)
        T.st(words, v + 1, rank=0, order=T.release)
        T.atom_add(words, 1)
        old = T.atom(words, T.Rmw.UMAX, 7, order=T.relaxed)
        if T.test(words, old):
            T.sync_system()
        T.sync_programs()

    kernel_ir = build(kernel)
    loads = [(op.order, op.scope) for op in all_of(kernel_ir, ops.WordLoad)]
    assert loads == [(Order.RELAXED, Scope.SYSTEM), (Order.ACQUIRE, Scope.SYSTEM)]
    assert only(kernel_ir, ops.WordStore).order is Order.RELEASE
    rmws = [(op.rmw, op.order) for op in all_of(kernel_ir, ops.WordRmw)]
    assert rmws == [(Rmw.ADD, Order.ACQ_REL), (Rmw.UMAX, Order.RELAXED)]
    assert only(kernel_ir, ops.Fence).scope is Scope.SYSTEM


def test_words_of_shared_views_have_device_scope():
    def kernel(z, xi):
        z.store(T.ld(xi, (3,)).astype(T.f32))

    assert only(build(kernel), ops.WordLoad).scope is Scope.DEVICE


WORD_ERRORS = [
    ("T.wait_ge(words, 1, scope=T.device)",
     "T.wait_ge: scope: expected T.system on peer memory, got T.device; other ranks would not be bound to see it"),
    ("T.ld(words, scope=T.program)",
     "T.ld: scope: expected T.system on peer memory, got T.program; other ranks would not be bound to see it"),
    ("T.ld(words, order=T.weak, scope=T.system)",
     "T.ld: scope: a weak access takes none, got T.system; drop it, or give an order"),
    ("T.ld(words, order=T.release)", "T.ld: order: expected one of T.weak, T.relaxed, T.acquire, got T.release"),
    ("T.st(words, 1, order=T.acquire)", "T.st: order: expected one of T.weak, T.relaxed, T.release, got T.acquire"),
    ("T.wait_ge(words, 1, order=T.weak)", "T.wait_ge: order: expected one of T.relaxed, T.acquire, got T.weak"),
    ("T.wait_ge(words, 1, order=3)", "T.wait_ge: order: expected a memory order, such as T.acquire, got the int 3"),
    ("T.wait_ge(words, 1, scope=3)", "T.wait_ge: scope: expected T.program, T.device or T.system, got the int 3"),
    ("T.wait_ge(p, 1)", "T.wait_ge: expected words of i32, u32, i64 or u64, got f32 in `p`"),
    ("T.wait_ge(words, -1)",
     "-1 does not fit u64 (0 to 18446744073709551615); cast the tile to a wider dtype with .astype(...)"),
    ("T.wait_ge(words, n)", "T.wait_ge: value: expected u64, got i64; convert it with .astype(T.u64)"),
    ("T.wait_ge(words, T.iota(4).astype(T.u64))", "T.wait_ge: value: expected a scalar u64, got u64[4]"),
    ("T.wait_ge(z, 1)",
     "T.wait_ge: expected a view that other agents see, got the exclusive parameter `z`; use a T.Peer parameter for "
     "words"),
    ("T.wait_ge(n, 1)", "T.wait_ge: word: expected a T.Peer parameter or a view of one, got i64"),
    ("T.ld(words.local, rank=0)",
     "T.ld: rank: expected a T.Peer parameter with it, got a rank's part of `words`; drop rank="),
    ("T.ld(words, (0, 0))", "T.ld: index: expected an element index per axis (1 of them), got 2"),
    ("T.ld(words, (-1,))", "T.ld: element index 0 of `words` out of range: expected 0 or more, got -1"),
    ("T.st(q, 1.0)", "T.st to `q`: expected T.Peer, which reads and writes, got T.Peer[T.read]"),
    ("T.atom(words, T.Rmw.ADDF, 1)", "T.atom: addf takes floats, got u64; integers take add"),
    ("T.atom(p, T.Rmw.XOR, 1.0)", "T.atom: xor takes integers, got f32; floats take add, min, max and xchg"),
    ("T.atom(p, 'add', 1.0)", "T.atom: rmw: expected a T.Rmw, such as T.Rmw.MAX, got the str 'add'"),
    ("T.put(z, p)", "T.put: src: expected a tile or a view, got the exclusive parameter `z`; write z.load()"),
    ("T.put(p.at(1), p, rank=0)",
     "T.put: expected one local side, got a part of another rank on both (`p` and `p`); get it into a local view first"),
    ("T.get(p, to=p.at(1), rank=0)",
     "T.get: expected one local side, got a part of another rank on both (`p` and `p`); get it into a local view first"),
    ("T.put(p.local, p, (0,), rank=0)",
     "T.put: index: expected none with a view, which is put as a whole; slice the view instead"),
    ("T.put(z.load(), p, rank=0, granularity='warp')",
     "T.put: granularity: expected a T.Granularity, such as T.Granularity.WARP, got the str 'warp'"),
    ("T.put(z.load(), p, rank=0, unroll=0)", "T.put: unroll: expected 1 or more, got 0"),
    ("T.put(z.load(), p, rank=0, signal=p)",
     "T.put: signal: expected a T.Signal parameter or a slot of one, got the peer `p`"),
    ("T.get(p, rank=0)", "T.get: expected the shape of a tile, or to=view, got neither"),
    ("T.wait_put(p)", "T.wait_put: handle 0: expected that of a put with wait=False, got the peer `p`"),
    ("T.wait_put()",
     "T.wait_put: expected the handle of a put with wait=False, got none; T.quiet() waits for all"),
    ("T.put_flagged(z.load(), p, epoch=1)",
     "T.put_flagged: words: expected u64, payload and epoch in one, got f32 in `p`"),
    ("T.put_filled(z.load(), p)", "T.put_filled: words: expected u32 or u64, got f32 in `p`"),
    ("T.take_filled(p, (16,))", "T.take_filled: words: expected u32 or u64, got f32 in `p`"),
    ("T.ld(words, (0,), coherent=False, order=T.weak)",
     "T.ld: coherent: expected True on peer memory, which other ranks write, got False for `words`"),
    ("T.ld(x, (0,), coherent=False)",
     "T.ld: coherent: expected True with an order, got False with T.relaxed; say order=T.weak"),
    ("T.wait_any()", "T.wait_any: expected at least one (word, value), got none"),
    ("T.wait_any((p, 1))", "T.wait_any: word 0: expected words of i32, u32, i64 or u64, got f32 in `p`"),
    ("T.wait_any(p)", "T.wait_any: word 0: expected (word, value) or (word, value, index), got the peer `p`"),
    ("T.put(z.load(), z)",
     "T.put: dst: expected a T.Peer parameter or a view of one, got the exclusive parameter `z`"),
]  # fmt: skip


@pytest.mark.sentence("MM-4", "MM-91")
@pytest.mark.parametrize(("body", "message"), WORD_ERRORS, ids=[w[0] for w in WORD_ERRORS])
def test_words_that_are_refused(body, message):
    assert error(compiled(body, "z, x, p, q, words, n")).message == message


def test_an_atomic_on_peer_memory_is_widened_with_a_note():
    def kernel(z, words):
        T.atom_add(words, 1, scope=T.device)

    kernel_ir = build(kernel)
    assert only(kernel_ir, ops.WordRmw).scope is Scope.SYSTEM
    line = kernel.__code__.co_firstlineno + 1
    assert kernel_ir.facts["notes"] == (
        f"{__file__}:{line}: T.atom_add: scope device widened to system, as every atomic on peer memory",
    )


def test_bool_has_no_atomics():
    def kernel(z, p):
        T.atom_add(p, True)

    refuses(kernel, "T.atom_add: bool has no atomics; use i32 or f32", "T.atom_add(p, True)", p=peer(b1))


def test_small_integers_are_no_words_to_wait_on():
    def kernel(z, p):
        T.wait_eq(p, 1)

    message = "T.wait_eq: expected words of i32, u32, i64 or u64, got u8 in `p`"
    refuses(kernel, message, "T.wait_eq(p, 1)", p=peer(u8))


# ---------------------------------------------------------------- signals, counters, barriers


@pytest.mark.sentence("SG-4")
def test_a_signal_slot_is_the_program_index_unless_named():
    def kernel(z, s, n):
        s.notify()
        s.wait()
        s[n].notify(to=0)
        s.wait(0, slot=n)
        s[0].wait(n)

    kernel_ir = build(kernel)
    notifies, waits = all_of(kernel_ir, ops.Notify), all_of(kernel_ir, ops.WaitSignal)
    assert [len(op.operands) for op in notifies] == [2, 3]
    assert [len(op.operands) for op in waits] == [2, 3, 3]
    assert isinstance(notifies[0].operands[1].op, ops.ProgramId)
    assert [op.message for op in all_of(kernel_ir, ops.Check)] == [
        "slot of signal `s` out of range",
        "slot of signal `s` out of range",
        "`s.wait`: rank out of range",
    ]


def test_the_program_index_of_a_grid_of_three_axes_is_linear():
    def kernel(out, s):
        s.notify()
        s.wait()
        out.store(0)

    kernel_ir = build(kernel, grid_rank=3, out=own(i64, (1,)))
    axes = [op.axis for op in all_of(kernel_ir, ops.ProgramId)]
    assert axes.count(2) == 2
    outs = [np.zeros(1, np.int64) for _ in range(2)]
    outcome = run(kernel, [PerRank(outs), new_signal(2, 6)], grid=(1, 1, 1), ranks=2, grid_rank=3, out=own(i64, (1,)))
    assert outcome.faults == []


def test_counters():
    def kernel(out, c):
        c.add(2, to=0)
        c[0].add(to=0)
        if T.rank() == 0:
            c.wait(3 * c.num_ranks)
        out.store(1)

    outs = [np.zeros(1, np.int64) for _ in range(3)]
    outcome = run(kernel, [PerRank(outs), new_counter(3, 1)], ranks=3, out=own(i64, (1,)))
    assert outcome.faults == []


def test_barriers():
    def kernel(z, b):
        b.sync()
        b.sync_all()

    assert [op.all_programs for op in all_of(build(kernel), ops.BarrierSync)] == [False, True]


COMM_ERRORS = [
    ("s.notify(0.5)", "`s.notify`: rank: expected an integer scalar, got the float 0.5"),
    ("s[0.5].notify()", "`s`: slot: expected an integer scalar, got the float 0.5"),
    ("s.notify(to=-1)", "`s.notify`: rank out of range: expected 0 or more, got -1"),
    ("c.add(1)", "T.Counter.add: missing argument `to`; expected n, to, slot"),
    ("c.add(-1, to=0)", "`c.add`: n: expected 0 or more, got -1; a counter only grows"),
    ("c.wait()", "T.Counter.wait: missing argument `n`; expected n, slot"),
    ("s.load()", "the signal `s` has no `.load`"),
    ("s.notfy()", "the signal `s` has no `.notfy`; did you mean `notify`?"),
    ("b.wait()", "barrier_wait: order: expected barrier_arrive in front of it in the same block, got none"),
    ("b.arrive()", "barrier_arrive: order: expected barrier_wait behind it in the same block, got none"),
    ("b.arrive()\nb.sync()\nb.wait()", "barrier_arrive: order: expected barrier_wait behind it, got barrier_sync"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "message"), COMM_ERRORS, ids=[c[0] for c in COMM_ERRORS])
def test_signals_and_counters_that_are_refused(body, message):
    assert error(compiled(body, "z, s, c, b")).message == message


# ---------------------------------------------------------------- pointers


def unsafe(body: str, **given):
    return build(compiled(body, ", ".join(["ptr", "n", *given])), unsafe=True, **given)


def unsafe_error(body: str, **given) -> str:
    return error(compiled(body, ", ".join(["ptr", "n", *given])), unsafe=True, **given).message


def test_pointer_arithmetic_counts_elements_and_broadcasts():
    kernel = unsafe("T.unsafe.store_ptr(2 + ptr - n + T.iota(8), 1.0, order=T.weak)")
    assert only(kernel, ops.PtrStore).operands[0].type == PointerType(f32, (8,))
    assert names(kernel).count("ptr_offset") == 3


def test_unicast_keeps_its_space_through_offsets():
    kernel = unsafe("T.unsafe.store_ptr(T.unsafe.unicast(T.unsafe.unicast(ptr)) + T.iota(8), 1.0, order=T.weak)")
    assert only(kernel, ops.PtrStore).operands[0].type == PointerType(f32, (8,), Space.PEER)
    assert names(kernel).count("unicast") == 1


def test_masks_fills_and_tokens():
    kernel = unsafe("""
    v, t0 = T.unsafe.load_ptr(ptr + T.iota(8), order=T.weak, mask=T.iota(8) < n, fill=7)
    t1 = T.unsafe.store_ptr(ptr, 1.0, order=T.release, scope=T.device, mask=n > 3, token=t0)
    old, t2 = T.unsafe.atomic_rmw(ptr, T.Rmw.ADDF, 1, order=T.acq_rel, scope=T.system, token=T.unsafe.join_tokens(t0, t1))
    was, t3 = T.unsafe.atomic_cas(ptr, 0, old, order=T.relaxed, scope=T.device, token=t2)
    """)
    load, store = only(kernel, ops.PtrLoad), only(kernel, ops.PtrStore)
    assert (load.masked, load.ordered, store.masked, store.ordered) == (True, False, True, True)
    assert (store.order, store.scope) == (Order.RELEASE, Scope.DEVICE)
    assert (only(kernel, ops.PtrRmw).rmw, only(kernel, ops.PtrCas).order) == (Rmw.ADDF, Order.RELAXED)


def test_pointers_to_bool_fill_with_false():
    kernel = unsafe("v, t = T.unsafe.load_ptr(flag, order=T.weak)", flag=PointerType(b1))
    assert only(kernel, ops.PtrLoad).results[0].type == TileType(b1)


def test_an_atomic_through_unicast_is_widened_with_a_note():
    kernel = unsafe("T.unsafe.atomic_rmw(T.unsafe.unicast(ptr), T.Rmw.ADDF, 1.0, order=T.relaxed, scope=T.device)")
    assert only(kernel, ops.PtrRmw).scope is Scope.SYSTEM
    (note,) = kernel.facts["notes"]
    assert note.endswith("T.unsafe.atomic_rmw: scope device widened to system, as every atomic on peer memory")


UNSAFE_ERRORS = [
    ("T.unsafe.load_ptr(ptr, order=T.relaxed)",
     "T.unsafe.load_ptr: scope: order T.relaxed needs one, got none; say scope=T.device or scope=T.system"),
    ("T.unsafe.load_ptr(ptr, order=T.weak, scope=T.device)",
     "T.unsafe.load_ptr: scope: a weak access takes none, got order T.weak with scope T.device"),
    ("T.unsafe.load_ptr(ptr, order=T.release, scope=T.device)",
     "T.unsafe.load_ptr: order: expected one of T.weak, T.relaxed, T.acquire, got T.release"),
    ("T.unsafe.store_ptr(ptr, 1.0, order=T.acquire, scope=T.device)",
     "T.unsafe.store_ptr: order: expected one of T.weak, T.relaxed, T.release, got T.acquire"),
    ("T.unsafe.atomic_rmw(ptr, T.Rmw.ADDF, 1.0, order=T.weak)",
     "T.unsafe.atomic_rmw: order: expected one of T.relaxed, T.acquire, T.release, T.acq_rel, got T.weak"),
    ("T.unsafe.load_ptr(T.unsafe.unicast(ptr), order=T.acquire, scope=T.device)",
     "T.unsafe.load_ptr: scope: expected T.system on a unicast pointer, got T.device; other ranks would not be bound to "
     "see it"),
    ("T.unsafe.atomic_rmw(ptr, T.Rmw.ADD, 1.0, order=T.relaxed, scope=T.device)",
     "T.unsafe.atomic_rmw: rmw: add takes integers, got pointers to f32; use T.Rmw.ADDF"),
    ("T.unsafe.atomic_rmw(ptr, T.Rmw.XOR, 1.0, order=T.relaxed, scope=T.device)",
     "T.unsafe.atomic_rmw: rmw: xor takes integers, got pointers to f32"),
    ("T.unsafe.load_ptr(n, order=T.weak)", "T.unsafe.load_ptr: pointer: expected a T.Pointer, got i64"),
    ("T.unsafe.load_ptr(ptr, order=T.weak, token=3)",
     "T.unsafe.load_ptr: token: expected a token, from T.unsafe.token() or an operation, got the int 3"),
    ("T.unsafe.load_ptr(ptr, order=T.weak, mask=T.iota(4) < 3)",
     "T.unsafe.load_ptr: mask: expected bool as the pointers, or a scalar, got bool[4]"),
    ("T.unsafe.store_ptr(ptr, T.zeros(4), order=T.weak)",
     "T.unsafe.store_ptr: value: expected f32 as the pointers, or a scalar, got f32[4]"),
    ("T.unsafe.store_ptr(ptr, T.f64(1), order=T.weak)",
     "T.unsafe.store_ptr: value: expected f32, got f64; convert it with .astype(T.f32)"),
    ("T.unsafe.join_tokens()", "T.unsafe.join_tokens: expected at least one token, got none"),
    ("v = ptr * 2", "`*`: expected a pointer and an integer offset, got ptr<f32> and the int 2; pointers take + and - of "
     "integers, counted in elements"),
    ("v = ptr + 0.5", "`+`: expected an integer offset, got the float 0.5"),
    ("v = ptr + T.f32(1)", "`+`: expected an integer offset, got f32"),
    ("v = ptr + T.iota(4) + T.iota(8)",
     "`+`: pointers ptr<f32, [4]> and offsets i64[8]: expected one shape, or a scalar on one side"),
    ("v = ptr.load()", "ptr<f32> has no `.load`"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "message"), UNSAFE_ERRORS, ids=[u[0] for u in UNSAFE_ERRORS])
def test_pointers_that_are_refused(body, message):
    assert unsafe_error(body) == message


def test_float_pointers_take_addf_and_integer_pointers_add():
    body = "T.unsafe.atomic_rmw(w, T.Rmw.ADDF, 1, order=T.relaxed, scope=T.device)"
    message = "T.unsafe.atomic_rmw: rmw: addf takes floats, got pointers to u32; use T.Rmw.ADD"
    assert unsafe_error(body, w=PointerType(u32)) == message
