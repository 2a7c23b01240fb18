"""Words, waits, fences, peer views, raw pointers: values, programs that suspend, and the orders in the text."""

import re

import numpy as np
import pytest
from tests.backends.cpu.util import (
    Context,
    Executor,
    K,
    Loaded,
    Symmetric,
    device_view,
    exclusive,
    run,
    shared,
)

from peertile.backends.cpu import jit
from peertile.backends.cpu.compile import lower_to_text
from peertile.backends.cpu.lower import LOWERINGS
from peertile.backends.cpu.target import AARCH64, named_target
from peertile.dtypes import b1, bf16, f16, f32, f64, i8, i32, i64, u16, u32, u64
from peertile.ir import ops
from peertile.ir.core import Effect
from peertile.ir.ops import Binary, Compare, Fold
from peertile.ir.types import (
    INDEX,
    Access,
    BarrierType,
    PointerType,
    SignalType,
    Space,
    SymmetricType,
    TileType,
    TokenType,
    TransferType,
    ViewType,
)
from peertile.memory_model import Cmp, Order, Rmw, Scope

TOKEN = TokenType()
X86 = named_target("x86-64-v4")  # whichever processor the tests run on


def test_every_primitive_op_has_a_lowering():
    assert sorted(c.NAME for c in ops.PRIMITIVE if c not in LOWERINGS) == []
    assert sorted(c.NAME for c in LOWERINGS if c not in ops.PRIMITIVE) == []


def word_load(k, view, *index, order=Order.ACQUIRE, scope=Scope.SYSTEM):
    scope = None if order is Order.WEAK else scope
    return k.value(ops.WordLoad, (view, *index), TileType(view.type.dtype), order=order, scope=scope)


def word_store(k, view, value, *index, order=Order.RELEASE, scope=Scope.SYSTEM):
    scope = None if order is Order.WEAK else scope
    k.b.emit(ops.WordStore, (view, value, *index), order=order, scope=scope)


def word_rmw(k, rmw, view, value, *index, order=Order.ACQ_REL, scope=Scope.SYSTEM):
    return k.value(
        ops.WordRmw, (view, value, *index), TileType(view.type.dtype), rmw=rmw, order=order, scope=scope
    )  # fmt: skip


def wait(k, view, expected, *index, cmp=Cmp.AT_LEAST, order=Order.ACQUIRE):
    return k.value(
        ops.Wait,
        (view, expected, *index),
        TileType(view.type.dtype),
        cmp=cmp,
        order=order,
        scope=Scope.SYSTEM,
        what="w",
    )


@pytest.mark.parametrize("dtype", [b1, i8, u16, i32, u32, i64, u64, f16, bf16, f32, f64], ids=str)
def test_words_move_values_of_every_dtype(dtype):
    k = K(w=device_view(dtype, 2))
    for n, order in enumerate([Order.WEAK, Order.RELAXED, None]):
        v = word_load(k, k.w, k.const(n), k.const(2), order=order or Order.ACQUIRE)
        word_store(k, k.w, v, k.const(2 - n), k.const(1), order=order or Order.RELEASE)
    w = np.arange(12).reshape(3, 4).astype(dtype.numpy)
    want = w.copy()
    for n in range(3):
        want[2 - n, 1] = want[n, 2]
    run(k.done(), [w])
    assert (w == want).all()


INT_RMW = [r for r in Rmw if r is not Rmw.ADDF]


@pytest.mark.parametrize("dtype", [i32, u32, i64, u64, u16], ids=str)
def test_integer_read_modify_write(dtype):
    k = K(w=device_view(dtype, 1), old=exclusive(dtype, (1,)), v=TileType(dtype))
    for n, rmw in enumerate(INT_RMW):
        old = word_rmw(k, rmw, k.w, k.v, k.const(n))
        k.store(k.p["old"], k.broadcast(old, (1,)), [n])
    loaded = Loaded(k.done())
    bits = dtype.bits

    def unsigned(x):
        return x & (1 << bits) - 1

    def signed(x):
        return unsigned(x) - (1 << bits) * (unsigned(x) >> (bits - 1))

    for a, b in [(5, 3), (dtype.max, 1), (dtype.min, dtype.max), (12, 10)]:
        w, old = np.full(len(INT_RMW), a, dtype.numpy), np.zeros(len(INT_RMW), dtype.numpy)
        loaded.run([w, old, b], 1)
        want = {
            Rmw.ADD: a + b, Rmw.AND: a & b, Rmw.OR: a | b, Rmw.XOR: a ^ b, Rmw.XCHG: b,
            Rmw.MIN: min(a, b, key=signed), Rmw.MAX: max(a, b, key=signed),
            Rmw.UMIN: min(a, b, key=unsigned), Rmw.UMAX: max(a, b, key=unsigned),
        }  # fmt: skip
        assert (old == a).all()
        assert [unsigned(int(x)) for x in w] == [unsigned(want[r]) for r in INT_RMW]


@pytest.mark.parametrize("dtype", [f16, bf16, f32, f64], ids=str)
def test_float_read_modify_write(dtype):
    kinds = {Rmw.ADDF: np.add, Rmw.MIN: np.minimum, Rmw.MAX: np.maximum, Rmw.XCHG: lambda x, y: y}
    k = K(w=device_view(dtype, 1), old=exclusive(dtype, (1,)), v=TileType(dtype))
    for n, rmw in enumerate(kinds):
        old = word_rmw(k, rmw, k.w, k.v, k.const(n))
        k.store(k.p["old"], k.broadcast(old, (1,)), [n])
    loaded = Loaded(k.done())
    for a, b in [(1.5, 2.25), (-1.0, -3.0), (float("nan"), 1.0), (1.0, float("nan"))]:
        w, old = np.full(4, a).astype(dtype.numpy), np.zeros(4, dtype.numpy)
        loaded.run([w, old, b], 1)
        want = [fn(a, b) for fn in kinds.values()]
        assert np.array_equal(w.astype(np.float64), want, equal_nan=True)
        assert np.array_equal(old.astype(np.float64), [a] * 4, equal_nan=True)


# ---------------------------------------------------------------- peers


def test_peer_views_ranks_and_extents():
    t = SymmetricType(f32, 1, unit_stride=(True,))
    k = K(s=t, z=exclusive(i64, (4,)))
    me, n = k.value(ops.Rank, (k.s,), INDEX), k.value(ops.NumRanks, (k.s,), INDEX)

    def body(i, _):
        view = k.value(ops.PeerView, (k.s, i), t.view)
        old = k.load(view, [0], (16,))
        k.store(view, k.add(old, k.broadcast(k.cast(k.add(i, me), f32), (16,))), [0])
        return []

    k.loop(0, n, [], body)
    e = k.value(ops.Extent, (k.s,), INDEX, axis=0)
    for j, v in enumerate((me, n, e)):
        k.store(k.z, k.broadcast(v, (4,)), [j])
    arrays, z = [np.full(20, 1, np.float32) for _ in range(3)], np.zeros(12, np.int64)
    run(k.done(), [Symmetric(arrays, rank=1), z])
    for i, a in enumerate(arrays):
        assert (a[:16] == 2 + i).all()
        assert (a[16:] == 1).all()
    assert z[::4].tolist() == [1, 3, 20]


def part(k, rank):
    """The part of symmetric `k.s` on the rank that an IR value says."""
    return k.value(ops.PeerView, (k.s, rank), k.p["s"].type.view)


def test_parts_on_ranks_that_may_be_equal_are_not_taken_to_be_apart():
    t = SymmetricType(f32, 1, unit_stride=(True,))
    for ranks in ((0, 0), (1, 1), (0, 1)):
        k = K(s=t, p=TileType(i64), q=TileType(i64))
        a, b = part(k, k.p["p"]), part(k, k.p["q"])
        old = k.load(a, [0], (16,))
        k.store(b, k.full(9.0, f32, (16,)), [0])
        k.store(a, old, [1])
        arrays = [np.arange(32, dtype=np.float32) for _ in range(2)]
        run(k.done(), [Symmetric(arrays), *ranks])
        assert (arrays[ranks[1]][:16] == 9).all()
        assert (arrays[ranks[0]][16:] == np.arange(16)).all()


RANKS = {
    "this and the other of two": (lambda k, me: me, lambda k, me: k.sub(k.const(1), me), True),
    "this and the next": (lambda k, me: k.add(me, k.const(1)), lambda k, me: me, True),
    "two numbers": (lambda k, me: k.const(0), lambda k, me: k.const(1), True),
    "twice this one, and an odd number": (lambda k, me: k.mul(k.const(2), me), lambda k, me: k.const(3), True),
    "this and itself": (lambda k, me: me, lambda k, me: k.sub(k.add(me, k.const(2)), k.const(2)), False),
    "this and a number": (lambda k, me: me, lambda k, me: k.const(1), False),
    "this and its mirror of an even number": (lambda k, me: me, lambda k, me: k.sub(k.const(2), me), False),
    "this and any": (lambda k, me: me, lambda k, me: k.p["n"], False),
    "any and the next": (lambda k, me: k.p["n"], lambda k, me: k.add(k.p["n"], k.const(1)), True),
}


@pytest.mark.parametrize("case", RANKS)
def test_a_store_and_loads_of_parts_that_are_apart_share_a_loop(case):
    one, two, apart = RANKS[case]
    t = SymmetricType(f32, 1, unit_stride=(True,))
    k = K(s=t, z=exclusive(f32, (64,)), x=shared(f32, 1), n=TileType(i64))
    me = k.value(ops.Rank, (k.s,), INDEX)
    a, b = part(k, one(k, me)), part(k, two(k, me))
    theirs = k.load(b, [0], (64,))
    k.store(a, k.load(k.x, [0], (64,)), [0])
    k.store(k.z, theirs, [0])
    text = lower_to_text(k.done())
    kept = any("alias.scope" in line and re.search("store <.*ptr %v", line) for line in _scratch_stores(text))
    assert kept is not apart


def _scratch_stores(text):
    """Stores to scratch: it has a scope of its own, the last that is defined."""
    names = dict(re.findall(r'^!(\d+) = distinct !{!\d+, !3, !"(\w+)"}$', text, re.MULTILINE))
    scratch = [number for number, name in names.items() if name == "scratch"]
    lists = [f"!alias.scope !{int(number) + 1}," for number in scratch]
    return [line for line in text.splitlines() if line.lstrip().startswith("store") and any(x in line for x in lists)]


@pytest.mark.sentence("MM-93")
def test_of_two_stores_in_a_loop_one_may_go_around_the_caches():
    t = SymmetricType(f32, 1, unit_stride=(True,))
    k = K(s=t, z=exclusive(f32, (64,)), x=shared(f32, 1))
    me = k.value(ops.Rank, (k.s,), INDEX)
    theirs = k.load(part(k, k.sub(k.const(1), me)), [0], (64,))
    k.store(part(k, me), k.load(k.x, [0], (64,)), [0])
    k.store(k.z, theirs, [0])
    stores = [line for line in lower_to_text(k.done()).splitlines() if re.match(r"\s*store <\d+ x float>", line)]
    around = [line for line in stores if "!nontemporal" in line]
    assert around
    assert all("!alias.scope" in line for line in around)  # `z`, which has a promise; the peer's part has none
    assert any("!alias.scope" not in line for line in stores)


@pytest.mark.sentence("MM-93")
def test_parts_of_two_objects_are_not_taken_to_be_apart():
    t = SymmetricType(f32, 1, unit_stride=(True,))
    k = K(s=t, u=t)
    me = k.value(ops.Rank, (k.s,), INDEX)
    a = part(k, me)
    b = k.value(ops.PeerView, (k.p["u"], k.sub(k.const(1), me)), t.view)
    old = k.load(b, [0], (16,))
    k.store(a, k.full(9.0, f32, (16,)), [0])
    k.store(a, old, [1])
    same, other = np.arange(32, dtype=np.float32), np.zeros(32, np.float32)
    run(k.done(), [Symmetric([same, other]), Symmetric([other, same])])
    assert (same[:16] == 9).all()
    assert (same[16:] == np.arange(16)).all()


def test_a_peer_load_is_done_before_a_fence_that_follows_it():
    t = SymmetricType(f32, 1, unit_stride=(True,))
    k = K(s=t, z=exclusive(f32, (16,)))
    v = k.load(k.value(ops.PeerView, (k.s, k.const(0)), t.view), [0], (16,))
    k.b.emit(ops.Fence, (), scope=Scope.SYSTEM)
    k.store(k.z, v, [0])
    text = lower_to_text(k.done())
    lines = text.splitlines()
    fence = next(i for i, line in enumerate(lines) if "fence acq_rel" in line)
    loads = [i for i, line in enumerate(lines) if re.search(r"load <\d+ x float>", line) and "alias.scope" not in line]
    assert loads
    assert max(loads) < fence


# ---------------------------------------------------------------- waiting programs


def own_words(n):
    return np.zeros((n, 1), np.uint64)


def test_a_grid_barrier_of_many_programs_on_one_thread():
    n = 200
    k = K(z=exclusive(f32, (16,)), out=exclusive(f32, (16,)))
    p = k.pid()
    words = k.value(ops.LaunchWords, (), ViewType(u64, 1, Access.READ_WRITE, Space.DEVICE))
    t = k.exp(k.broadcast(k.cast(k.binary(Binary.MOD, p, k.const(7)), f32), (16,)))
    k.store(k.z, t, [p])
    word_rmw(k, Rmw.ADD, words, k.const(1, u64), k.const(0))
    total = k.cast(k.value(ops.NumPrograms, (), INDEX, axis=0), u64)
    wait(k, words, total, k.const(0))
    last = k.sub(k.sub(k.value(ops.NumPrograms, (), INDEX, axis=0), p), k.const(1))
    k.store(k.p["out"], k.add(t, k.load(k.z, [last], (16,))), [p])
    loaded = Loaded(k.done())
    assert loaded.binary.waits
    z, out = np.zeros(16 * n, np.float32), np.zeros(16 * n, np.float32)
    args, ctx = loaded.block([z, out]), Context((n,))
    e = Executor(loaded, [(args, ctx)])
    e.run()
    v = np.exp((np.arange(n) % 7).astype(np.float32))
    np.testing.assert_allclose(out, np.repeat(v + v[::-1], 16), rtol=1e-6)
    assert e.suspensions >= n - 1
    assert e.promise == 64
    assert e.frame_size % 64 == 0


@pytest.mark.parametrize("dtype", [i32, u64], ids=str)
@pytest.mark.parametrize("cmp", list(Cmp), ids=str)
def test_a_wait_passes_just_when_its_comparison_holds(dtype, cmp):
    k = K(w=device_view(dtype, 1), z=exclusive(dtype, (1,)), e=TileType(dtype))
    got = wait(k, k.w, k.e, k.const(0), cmp=cmp)
    k.store(k.z, k.broadcast(got, (1,)), [0])
    loaded = Loaded(k.done())
    big = dtype.max
    for seen, expected in [(5, 5), (4, 5), (6, 5), (0, big), (big, 0), (dtype.min, big), (big, dtype.min)]:
        half = 1 << (dtype.bits - 1)
        want = {
            Cmp.AT_LEAST: (seen - expected) % (2 * half) < half, Cmp.EQ: seen == expected, Cmp.NE: seen != expected,
            Cmp.GE: seen >= expected, Cmp.LE: seen <= expected, Cmp.GT: seen > expected, Cmp.LT: seen < expected,
        }[cmp]  # fmt: skip
        w, z = np.array([seen], dtype.numpy), np.zeros(1, dtype.numpy)
        ctx = Context((1,))
        e = Executor(loaded, [(loaded.block([w, z, expected]), ctx)])

        def give_up(rounds, ctx=ctx):
            if rounds == 3:
                ctx.abort[0] = 1

        e.run(on_round=give_up)
        assert e.suspensions == (0 if want else 1)
        assert z[0] == (seen if want else 0)


def test_a_wait_describes_its_word():
    k = K(w=device_view(i32, 2), e=TileType(i32))
    wait(k, k.w, k.e, k.const(2), k.const(1), cmp=Cmp.GE)
    loaded = Loaded(k.done())
    w = np.zeros((3, 4), np.int32)
    ctx = Context((1,))
    e = Executor(loaded, [(loaded.block([w, -7 + 10]), ctx)])
    seen = []
    step = e._step

    def spy(frame, scratch, ctx, program):
        words = frame.view(np.int64)
        if words[0]:
            seen.append(words[e.promise // 8 : e.promise // 8 + 8].tolist())
        w[2, 1] = 3
        return step(frame, scratch, ctx, program)

    e._step = spy
    e.run()
    assert seen[0] == [w[2:, 1:].ctypes.data, 3, list(Cmp).index(Cmp.GE), 32 | 256, 0, 0, 0, 2]
    assert loaded.binary.places[0].what == "w"
    assert loaded.binary.places[0].kind == "wait"


def test_two_ranks_pass_a_token_through_signals_of_each_other():
    """Each rank adds what the other wrote in the round before; the tile lives across the waits."""
    data, word = SymmetricType(f32, 1, unit_stride=(True,)), SymmetricType(u64, 2, unit_stride=(False, True))
    k = K(d=data, s=word, z=exclusive(f32, (32,)))
    me = k.value(ops.Rank, (k.s,), INDEX)
    other = k.sub(k.const(1), me)
    mine, theirs = (k.value(ops.PeerView, (k.d, r), data.view) for r in (me, other))
    arrived = k.value(ops.PeerView, (k.s, me), word.view)
    at_peer = k.value(ops.PeerView, (k.s, other), word.view)
    start = k.broadcast(k.cast(k.add(me, k.const(1)), f32), (32,))

    def body(i, carried):
        (t,) = carried
        epoch = k.cast(k.add(i, k.const(1)), u64)
        k.store(theirs, t, [k.binary(Binary.MOD, i, k.const(2))])
        word_store(k, at_peer, epoch, k.const(0), me)
        wait(k, arrived, epoch, k.const(0), other)
        return [k.add(t, k.load(mine, [k.binary(Binary.MOD, i, k.const(2))], (32,)))]

    (t,) = k.loop(0, 5, [start], body)
    k.store(k.z, t, [0])
    loaded = Loaded(k.done())
    arrays, words = [np.zeros(64, np.float32) for _ in range(2)], [np.zeros((1, 2), np.uint64) for _ in range(2)]
    z = [np.zeros(32, np.float32) for _ in range(2)]
    launches, keep = [], []
    for r in range(2):
        values = [Symmetric(arrays, r), Symmetric(words, r), z[r]]
        keep.append(values)
        launches.append((loaded.block(values), Context((1,))))
    Executor(loaded, launches).run()
    a, b = 1.0, 2.0
    for _ in range(5):
        a, b = a + b, b + a
    assert (z[0] == a).all()
    assert (z[1] == b).all()


def test_suspend_lets_other_programs_run():
    k = K(w=device_view(i64, 1))
    p = k.pid()
    first = k.compare(Compare.EQ, p, k.const(0))

    def spin():
        def body(_):
            v = word_load(k, k.w, k.const(0), order=Order.RELAXED)
            k.when(k.compare(Compare.NE, v, k.const(0)), lambda: k.b.emit(ops.Break, ()) and None)
            k.b.emit(ops.Suspend, ())
            return []

        k.forever([], body)
        return []

    k.when(first, spin, lambda: (word_store(k, k.w, k.const(5), k.const(0)), [])[1])
    w = np.zeros(1, np.int64)
    loaded = Loaded(k.done())
    e = Executor(loaded, [(loaded.block([w]), Context((2,)))])
    e.run()
    assert w[0] == 5
    assert e.suspensions >= 1


def test_a_signal_object_gives_its_fields():
    k = K(s=SignalType(), b=BarrierType(), z=exclusive(u64, (4,)))
    arrived = k.value(ops.Field, (k.p["s"],), SignalType().fields["arrived"], field="arrived")
    sent = k.value(ops.Field, (k.p["s"],), SignalType().fields["sent"], field="sent")
    passed = k.value(ops.Field, (k.p["b"],), BarrierType().fields["passed"], field="passed")
    me = k.value(ops.Rank, (arrived,), INDEX)
    view = k.value(ops.PeerView, (arrived, me), arrived.type.view)
    v = k.add(word_load(k, view, k.const(0), k.const(1)), word_load(k, sent, k.const(0), k.const(0)))
    v = k.add(v, word_load(k, passed, k.const(1), k.const(0)))
    k.store(k.z, k.broadcast(v, (4,)), [0])
    words = [np.array([[1, 20]], np.uint64), np.array([[3, 4]], np.uint64)]
    z = np.zeros(4, np.uint64)
    own = np.array([[300]], np.uint64)
    signal = {"arrived": Symmetric(words, 0), "sent": own, "seen": own}
    barrier = {"arrived": Symmetric(words, 0), "passed": np.array([[0], [7000]], np.uint64)}
    run(k.done(), [signal, barrier, z])
    assert (z == 7320).all()


# ---------------------------------------------------------------- orders in the text

RANK = {"unordered": 0, "monotonic": 1, "acquire": 2, "release": 2, "acq_rel": 3, "seq_cst": 4}


def at_least(found, order):
    want = {Order.RELAXED: "monotonic", Order.ACQUIRE: "acquire", Order.RELEASE: "release", Order.ACQ_REL: "acq_rel"}
    want = want[order]
    return found == want or RANK[found] > RANK[want]


@pytest.mark.sentence("MM-92")
@pytest.mark.parametrize("scope", list(Scope), ids=str)
@pytest.mark.parametrize("order", [Order.RELAXED, Order.ACQUIRE], ids=str)
def test_orders_of_loads_and_waits(order, scope):
    for target in (None, AARCH64):
        k = K(w=device_view(u64, 1))
        word_load(k, k.w, k.const(0), order=order, scope=scope)
        k.value(
            ops.Wait, (k.w, k.const(0, u64), k.const(1)), TileType(u64), cmp=Cmp.GE, order=order, scope=scope, what=""
        )
        found = re.findall(r"load atomic i64, ptr \S+ (\w+), align 8", lower_to_text(k.done(), target))
        assert len(found) == 2
        assert all(at_least(o, order) for o in found)


@pytest.mark.parametrize("order", [Order.RELAXED, Order.RELEASE], ids=str)
def test_orders_of_stores(order):
    for target in (None, AARCH64):
        k = K(w=device_view(u64, 1))
        word_store(k, k.w, k.const(1, u64), k.const(0), order=order)
        (found,) = re.findall(r"store atomic i64 \S+ ptr \S+ (\w+), align 8", lower_to_text(k.done(), target))
        assert at_least(found, order)


@pytest.mark.parametrize("order", [Order.RELAXED, Order.ACQUIRE, Order.RELEASE, Order.ACQ_REL], ids=str)
@pytest.mark.parametrize("dtype", [u64, f32, bf16], ids=str)
@pytest.mark.parametrize("shape", [(), (8,)], ids=str)
def test_orders_of_read_modify_writes_of_words_and_tiles(order, dtype, shape):
    rmw = Rmw.ADDF if dtype.is_float else Rmw.ADD
    for target in (None, AARCH64):
        k = K(w=device_view(dtype, 1))
        one = k.const(1.0 if dtype.is_float else 1, dtype)
        if shape:
            k.b.emit(
                ops.TileAtomic, (k.w, k.broadcast(one, shape), k.const(0)),
                rmw=rmw, bounds=ops.Bounds.PROVEN, order=order, scope=Scope.DEVICE,
            )  # fmt: skip
        else:
            word_rmw(k, rmw, k.w, one, k.const(0), order=order)
        text = lower_to_text(k.done(), target)
        pattern = (
            r"cmpxchg ptr \S+ i\d+ \S+ i\d+ \S+ (\w+) \w+," if dtype.is_float else r"atomicrmw add .* (\w+), align"
        )
        (found,) = re.findall(pattern, text)
        assert at_least(found, order)


def test_aarch64_code_has_the_instructions_of_the_orders():
    k = K(w=device_view(u64, 1), x=shared(f32, 1), z=exclusive(f32, (64,)))
    k.store(k.z, k.exp(k.load(k.x, [0], (64,))), [0])
    word_store(k, k.w, k.const(1, u64), k.const(0))
    word_load(k, k.w, k.const(1))
    k.b.emit(ops.Fence, (), scope=Scope.SYSTEM)
    word_rmw(k, Rmw.ADD, k.w, k.const(1, u64), k.const(2))
    asm = jit.stages(lower_to_text(k.done(), AARCH64), AARCH64)["asm"]
    assert "stlr" in asm
    assert "dmb\tish" in asm
    assert re.search(r"ldap?r", asm)
    assert re.search(r"ldaxr|ldadd\w*al|__aarch64_ldadd8_acq_rel", asm)


def test_stores_around_the_caches_are_fenced_before_a_release():
    k = K(z=exclusive(f32, (64,)), w=device_view(u64, 1))
    i = k.tile_index(k.z)
    k.store(k.z, k.full(1.0, f32, (64,)), i)
    word_store(k, k.w, k.const(1, u64), k.const(0))
    lines = lower_to_text(k.done(), X86).splitlines()
    release = next(n for n, line in enumerate(lines) if "store atomic" in line)
    assert any("!nontemporal" in line for line in lines[:release])
    assert "sfence" in lines[release - 1]


def test_a_release_that_a_loop_brings_behind_a_store_around_the_caches_is_fenced():
    """The store stands behind the release in the text, and runs before it in the next trip."""
    k = K(z=exclusive(f32, (64,), persistent=True), w=device_view(u64, 1))

    def body(i, _):
        word_store(k, k.w, k.const(1, u64), k.const(0))
        k.store(k.z, k.full(1.0, f32, (64,)), [i])
        return []

    k.loop(k.const(0), k.const(4), [], body)
    lines = lower_to_text(k.done(), X86).splitlines()
    release = next(n for n, line in enumerate(lines) if "store atomic" in line)
    assert not any("!nontemporal" in line for line in lines[:release])
    assert any("!nontemporal" in line for line in lines[release:])
    assert "sfence" in lines[release - 1]


def test_an_async_store_goes_around_the_caches_and_its_wait_fences():
    k = K(x=shared(f32, 1), w=device_view(f32, 1))
    tile = k.load(k.x, [0], (64,))
    k.value(ops.AsyncStore, (k.w, tile, k.const(0)), TransferType())
    k.b.emit(ops.WaitTransfer, ())
    kernel = k.done()
    text = lower_to_text(kernel, X86)
    assert text.index("!nontemporal") < text.index("sfence")
    for n in (64, 37):  # all of a tile, and a tile that sticks out
        x, w = np.arange(n, dtype=np.float32), np.full(n, 7, np.float32)
        run(kernel, [x, w])
        np.testing.assert_array_equal(w, x)


# ---------------------------------------------------------------- raw pointers


def ptr(k, dtype, base, offsets):
    t = PointerType(dtype, offsets.type.shape)
    p = k.value(ops.PtrBroadcast, (base,), t)
    return k.value(ops.PtrOffset, (p, offsets), t)


@pytest.mark.parametrize("order", [Order.WEAK, Order.RELAXED, Order.ACQUIRE], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_pointer_loads_gather(order, masked):
    k = K(unsafe=True, p=PointerType(f32), z=exclusive(f32, (16,)))
    i = k.value(ops.Iota, (), TileType(i32, (16,)))
    at = ptr(k, f32, k.p["p"], k.mul(i, k.full(3, i32, (16,))))
    mask = k.compare(Compare.LT, i, k.full(9, i32, (16,)))
    token = k.value(ops.NewToken, (), TOKEN)
    scope = None if order is Order.WEAK else Scope.DEVICE
    op = k.b.emit(
        ops.PtrLoad, (at, k.full(-1.0, f32, (16,)), *([mask] if masked else []), token),
        (TileType(f32, (16,)), TOKEN), order=order, scope=scope, masked=masked, ordered=True,
    )  # fmt: skip
    k.store(k.z, op.results[0], [0])
    x, z = np.arange(48, dtype=np.float32), np.zeros(16, np.float32)
    run(k.done(), [x, z])
    want = x[::3].copy()
    if masked:
        want[9:] = -1
    assert (z == want).all()


@pytest.mark.parametrize("order", [Order.WEAK, Order.RELAXED, Order.RELEASE], ids=str)
def test_pointer_stores_scatter_and_are_seen_by_views(order):
    k = K(unsafe=True, p=PointerType(f32), z=exclusive(f32, (16,)), x=shared(f32, 1))
    i = k.value(ops.Iota, (), TileType(i32, (16,)))
    before = k.load(k.x, [0], (16,))
    at = ptr(k, f32, k.p["p"], k.sub(k.full(15, i32, (16,)), i))
    scope = None if order is Order.WEAK else Scope.DEVICE
    k.b.emit(ops.PtrStore, (at, k.cast(i, f32)), (TOKEN,), order=order, scope=scope)
    k.store(k.z, k.add(before, k.load(k.x, [0], (16,))), [0])
    x, z = np.full(16, 100, np.float32), np.zeros(16, np.float32)
    run(k.done(), [x, z, x])
    assert (x == np.arange(16)[::-1]).all()
    assert (z == 100 + x).all()


def test_pointer_rmw_and_cas_of_scalars_and_tiles():
    k = K(unsafe=True, p=PointerType(i32), z=exclusive(i32, (8,)))
    i = k.value(ops.Iota, (), TileType(i32, (8,)))
    at = ptr(k, i32, k.p["p"], k.binary(Binary.QUOT, i, k.full(2, i32, (8,))))
    attrs = {"order": Order.ACQ_REL, "scope": Scope.DEVICE}
    op = k.b.emit(ops.PtrRmw, (at, k.full(1, i32, (8,))), (TileType(i32, (8,)), TOKEN), rmw=Rmw.ADD, **attrs)
    k.store(k.z, op.results[0], [0])
    cas = k.b.emit(
        ops.PtrCas, (k.p["p"], k.const(2, i32), k.const(50, i32)), (TileType(i32), TOKEN), **attrs
    )  # fmt: skip
    k.store(k.z, k.broadcast(cas.results[0], (8,)), [1])
    x, z = np.zeros(4, np.int32), np.zeros(16, np.int32)
    run(k.done(), [x, z])
    assert x.tolist() == [50, 2, 2, 2]
    assert z[:8].tolist() == [0, 1] * 4
    assert (z[8:] == 2).all()


def test_pointers_are_carried_around_loops():
    k = K(unsafe=True, p=PointerType(f32), z=exclusive(f32, (4,)))
    zeros = k.full(0.0, f32, (4,))
    at = ptr(k, f32, k.p["p"], k.value(ops.Iota, (), TileType(i64, (4,))))

    def body(i, carried):
        q, t, token = carried
        op = k.b.emit(
            ops.PtrLoad, (q, zeros, token), (TileType(f32, (4,)), TOKEN), order=Order.WEAK, scope=None, ordered=True
        )
        q = k.value(ops.PtrOffset, (q, k.full(4, i64, (4,))), q.type)
        return [q, k.add(t, op.results[0]), op.results[1]]

    _, t, _ = k.loop(0, 3, [at, zeros, k.value(ops.NewToken, (), TOKEN)], body)
    k.store(k.z, t, [0])
    x, z = np.arange(12, dtype=np.float32), np.zeros(4, np.float32)
    run(k.done(), [x, z])
    assert (z == x.reshape(3, 4).sum(0)).all()


# ---------------------------------------------------------------- print


def test_print_records_hold_the_operands():
    k = K(x=shared(f32, 1))
    p = k.pid()
    t = k.load(k.x, [0], (4,))
    k.b.emit(ops.Print, (p, k.reduce(Fold.ADD, t, 0), k.compare(Compare.GT, t, k.full(1.0, f32, (4,)))), prefix="here")
    loaded = Loaded(k.done())
    x = np.array([0.5, 1.5, 2.5, -1], np.float32)
    ctx = loaded.run([x], 2)
    data = ctx.print.tobytes()
    size = 16 + 24
    assert ctx.print[1] == 2 * size
    for program in range(2):
        record = data[16 + program * size : 16 + (program + 1) * size]
        assert int.from_bytes(record[:8], "little") == program
        assert np.frombuffer(record[8:16], np.int32).tolist() == [0, 24]
        assert int.from_bytes(record[16:24], "little") == program
        assert np.frombuffer(record[24:28], np.float32)[0] == 3.5
        assert list(record[32:36]) == [0, 1, 1, 0]
    place = loaded.binary.places[0]
    assert (place.kind, place.message, place.what) == ("print", "here", "i64; f32; bool[4]")


def test_prints_that_do_not_fit_are_counted_and_not_written():
    k = K(x=shared(f32, 1))
    k.b.emit(ops.Print, (k.load(k.x, [0], (64,)),), prefix="")
    loaded = Loaded(k.done())
    args, ctx = loaded.block([np.ones(64, np.float32)]), Context((3,))
    ctx.print[0] = 600
    loaded.range(
        args.ctypes.data, ctx.raw.ctypes.data, 0, 3, np.zeros(loaded.binary.scratch_bytes, np.uint8).ctypes.data
    )
    assert ctx.print[1] == 3 * (16 + 256)
    assert (ctx.print[2 + 2 * 34 :] == 0).all()
    assert (ctx.print[2 : 2 + 2 * 34] != 0).any()


@pytest.mark.sentence("PR-10")
def test_only_kernels_with_waits_are_coroutines():
    k = K(w=device_view(u64, 1))
    word_load(k, k.w, k.const(0))
    assert not Loaded(k.done()).binary.waits
    assert Effect.WAIT in ops.Wait.EFFECTS
