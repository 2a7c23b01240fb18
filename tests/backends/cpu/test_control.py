"""Loops, branches and early exits with carried scalars and tiles; checks and their fault records."""

import numpy as np
import pytest
from tests.backends.cpu.util import INDEX, K, Loaded, exclusive, run, shared

from peertile.backends.cpu.lower import DUMMY_BYTES
from peertile.dtypes import b1, f32, i8, i32, i64, u8
from peertile.ir import ops
from peertile.ir.ops import Binary, CheckKind, Compare, Fold
from peertile.ir.types import TileType

RNG = np.random.default_rng(1)
N = 64


def random(n=N):
    return RNG.standard_normal(n).astype(np.float32)


def test_for_carries_scalars_and_tiles():
    k = K(z=exclusive(f32, (N,)), x=shared(f32, 1), n=INDEX)

    def body(i, carried):
        tile, count = carried
        return [k.add(tile, k.load(k.x, [i], (N,))), k.add(count, k.mul(i, i))]

    tile, count = k.loop(0, k.p["n"], [k.full(1.0, f32, (N,)), k.const(0)], body)
    scale = k.broadcast(k.cast(count, f32), (N,))
    k.store(k.z, k.mul(tile, scale), [0])
    loaded = Loaded(k.done())
    x = random(N * 5)
    for n in (0, 1, 5):
        z = np.zeros(N, np.float32)
        loaded.run([z, x, n], 1)
        want = 1 + x.reshape(5, N)[:n].sum(0)
        np.testing.assert_allclose(z, want * sum(i * i for i in range(n)), rtol=1e-4, atol=1e-5)


def test_a_pointwise_update_of_a_carried_tile_is_in_place():
    k = K(z=exclusive(f32, (N,)), x=shared(f32, 1))

    def body(i, carried):
        (tile,) = carried
        for _ in range(3):
            tile = k.exp(k.mul(tile, k.load(k.x, [0], (N,))))
        return [tile]

    (tile,) = k.loop(0, 2, [k.full(0.5, f32, (N,))], body)
    k.store(k.z, tile, [0])
    loaded = Loaded(k.done())
    assert loaded.binary.scratch_bytes == DUMMY_BYTES + N * 4
    x, z = np.abs(random()) / 8, np.zeros(N, np.float32)
    loaded.run([z, x], 1)
    want = np.full(N, 0.5)
    for _ in range(6):
        want = np.exp(want * x)
    np.testing.assert_allclose(z, want, rtol=1e-5)


def test_carried_tiles_may_be_swapped():
    k = K(z=exclusive(f32, (N,)), x=shared(f32, 1), n=INDEX)
    a, b, c = (k.load(k.x, [i], (N,)) for i in range(3))

    def body(i, carried):
        a, b, c = carried
        return [b, c, k.add(a, b)]

    a, b, c = k.loop(0, k.p["n"], [a, b, c], body)
    for i, t in enumerate((a, b, c)):
        k.store(k.z, t, [i])
    loaded = Loaded(k.done())
    x = random(N * 3)
    for n in range(4):
        z = np.zeros(N * 3, np.float32)
        loaded.run([z, x, n], 1)
        a, b, c = x.reshape(3, N)
        for _ in range(n):
            a, b, c = b, c, a + b
        np.testing.assert_allclose(z, np.concatenate([a, b, c]), rtol=1e-6)


def test_a_carried_tile_may_be_transposed_and_reduced():
    k = K(z=exclusive(f32, (16, 16)), x=shared(f32, 2))

    def body(i, carried):
        t, s = carried
        total = k.reduce(Fold.ADD, t, 0)
        return [k.add(k.permute(t, (1, 0)), k.broadcast(k.reshape(s, (16, 1)), (16, 16))), total]

    t, s = k.loop(0, 3, [k.load(k.x, [0, 0], (16, 16)), k.full(0.0, f32, (16,))], body)
    k.store(k.z, k.add(t, k.broadcast(k.reshape(s, (1, 16)), (16, 16))), [0, 0])
    x, z = random(256).reshape(16, 16), np.zeros((16, 16), np.float32)
    run(k.done(), [z, x])
    t, s = x, np.zeros(16)
    for _ in range(3):
        t, s = t.T + s[:, None], t.sum(0)
    np.testing.assert_allclose(z, t + s, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [i8, u8, i32, i64], ids=str)
def test_trips_of_a_loop(dtype):
    k = K(z=exclusive(i64, (1,)), lo=TileType(dtype), hi=TileType(dtype), step=TileType(dtype))

    def body(i, carried):
        return [k.add(k.mul(carried[0], k.const(31)), k.cast(i, i64))]

    (s,) = k.loop(k.lo, k.hi, [k.const(1)], body, step=k.step)
    k.store(k.z, k.broadcast(s, (1,)), [0])
    loaded = Loaded(k.done())
    for lo, hi, step in [(0, 10, 3), (5, 5, 1), (7, 3, 1), (0, 127, 100), (100, 127, 20)]:
        z = np.zeros(1, np.int64)
        loaded.run([z, lo, hi, step], 1)
        want = 1
        for i in range(lo, hi, step):
            want = want * 31 + i
        assert z[0] == want


def test_break_and_continue_from_branches():
    k = K(z=exclusive(i64, (2,)), x=shared(i64, 1, unit=True), n=INDEX)

    def body(i, carried):
        (s,) = carried
        odd = k.compare(Compare.EQ, k.binary(Binary.MOD, i, k.const(2)), k.const(1))

        def skip():
            k.b.emit(ops.Continue, [s])

        k.when(odd, skip)
        big = k.compare(Compare.GT, i, k.const(7))

        def stop():
            k.b.emit(ops.Break, [k.mul(s, k.const(100))])

        k.when(big, stop)
        return [k.add(s, i)]

    (s,) = k.loop(0, k.p["n"], [k.const(0)], body)
    k.store(k.z, k.broadcast(s, (2,)), [0])
    loaded = Loaded(k.done())
    for n in range(12):
        z = np.zeros(2, np.int64)
        loaded.run([z, np.zeros(1, np.int64), n], 1)
        s = 0
        for i in range(n):
            if i % 2:
                continue
            if i > 7:
                s *= 100
                break
            s += i
        assert (z == s).all()


def test_break_carries_a_tile_computed_from_the_carried_one():
    k = K(z=exclusive(f32, (N,)), x=shared(f32, 1), n=INDEX)

    def body(i, carried):
        (t,) = carried
        at_end = k.compare(Compare.EQ, i, k.p["n"])

        def stop():
            flipped = k.reshape(k.permute(k.reshape(t, (8, 8)), (1, 0)), (N,))
            k.b.emit(ops.Break, [k.sub(flipped, t)])

        k.when(at_end, stop)
        return [k.add(t, k.load(k.x, [0], (N,)))]

    (t,) = k.loop(0, 5, [k.load(k.x, [0], (N,))], body)
    k.store(k.z, t, [0])
    loaded = Loaded(k.done())
    x = random()
    for n in (0, 3, 9):
        z = np.zeros(N, np.float32)
        loaded.run([z, x, n], 1)
        t = x * (1 + min(n, 5))
        want = t.reshape(8, 8).T.ravel() - t if n < 5 else t
        np.testing.assert_allclose(z, want, rtol=1e-5, atol=1e-5)


def test_loop_until_break_gives_other_types_than_it_carries():
    k = K(z=exclusive(f32, (N,)), x=shared(f32, 1), n=INDEX)

    def body(carried):
        i, t = carried

        def stop():
            k.b.emit(ops.Break, [k.reduce(Fold.ADD, t, 0), t, i])

        k.when(k.compare(Compare.GE, i, k.p["n"]), stop)
        return [k.add(i, k.const(1)), k.mul(t, k.full(2.0, f32, (N,)))]

    types = (TileType(f32), TileType(f32, (N,)), INDEX)
    s, t, i = k.forever([k.const(0), k.load(k.x, [0], (N,))], body, types)
    k.store(k.z, k.add(t, k.broadcast(k.add(s, k.cast(i, f32)), (N,))), [0])
    x, z = random(), np.zeros(N, np.float32)
    run(k.done(), [z, x, 3])
    np.testing.assert_allclose(z, x * 8 + (x * 8).sum() + 3, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("flag", [False, True])
def test_if_yields_scalars_and_tiles(flag):
    k = K(z=exclusive(f32, (N,)), x=shared(f32, 1), c=TileType(b1))
    x = k.load(k.x, [0], (N,))
    heavy = k.exp(k.exp(x))

    def yes():
        return [k.add(heavy, x), k.const(2.0)]

    def no():
        return [heavy, k.reduce(Fold.ADD, x, 0)]

    t, s = k.when(k.c, yes, no, (TileType(f32, (N,)), TileType(f32)))
    k.store(k.z, k.add(k.mul(t, k.broadcast(s, (N,))), heavy), [0])
    x, z = random() / 4, np.zeros(N, np.float32)
    run(k.done(), [z, x, flag])
    h = np.exp(np.exp(x))
    want = (h + x) * 2 + h if flag else h * x.sum() + h
    np.testing.assert_allclose(z, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("flag", [False, True])
def test_a_tile_loaded_before_a_branch_that_stores(flag):
    k = K(z=exclusive(f32, (N,)), c=TileType(b1))
    old = k.load(k.z, [0], (N,))
    k.when(k.c, lambda: (k.store(k.z, k.full(9.0, f32, (N,)), [0]), ())[1])
    k.store(k.z, old, [1])
    z = random(2 * N)
    want = z.copy()
    want[N:] = z[:N]
    if flag:
        want[:N] = 9
    run(k.done(), [z, flag])
    assert (z == want).all()


@pytest.mark.parametrize("flag", [False, True])
def test_an_untouched_tile_passes_through_an_if_without_a_copy(flag):
    k = K(z=exclusive(f32, (N,)), x=shared(f32, 1), c=TileType(b1))

    def body(i, carried):
        (t,) = carried
        (t,) = k.when(k.c, lambda: [k.add(t, k.load(k.x, [0], (N,)))], lambda: [t], (t.type,))
        return [t]

    (t,) = k.loop(0, 3, [k.full(1.0, f32, (N,))], body)
    k.store(k.z, t, [0])
    loaded = Loaded(k.done())
    assert loaded.binary.scratch_bytes == DUMMY_BYTES + 4 * N
    x, z = random(), np.zeros(N, np.float32)
    loaded.run([z, x, flag], 1)
    np.testing.assert_allclose(z, 1 + x * 3 if flag else np.ones(N), rtol=1e-6, atol=1e-6)


def test_return_ends_one_program_only():
    k = K(z=exclusive(i64, (1,)))
    p = k.pid()
    odd = k.compare(Compare.EQ, k.binary(Binary.MOD, p, k.const(2)), k.const(1))
    k.when(odd, lambda: k.b.emit(ops.Return) and None)
    k.store(k.z, k.broadcast(k.add(p, k.const(1)), (1,)), [p])
    z = np.zeros(9, np.int64)
    run(k.done(), [z], 9)
    assert z.tolist() == [1, 0, 3, 0, 5, 0, 7, 0, 9]


def test_nested_loops_with_tiles_defined_outside():
    k = K(z=exclusive(f32, (N,)), x=shared(f32, 1))
    heavy = k.exp(k.exp(k.load(k.x, [0], (N,))))

    def outer(i, carried):
        def inner(j, c):
            return [k.add(c[0], k.mul(heavy, k.broadcast(k.cast(k.add(i, j), f32), (N,))))]

        return k.loop(0, 3, carried, inner)

    (t,) = k.loop(0, 4, [heavy], outer)
    k.store(k.z, k.add(t, heavy), [0])
    x, z = random() / 4, np.zeros(N, np.float32)
    run(k.done(), [z, x])
    h = np.exp(np.exp(x))
    np.testing.assert_allclose(z, h * (2 + sum(i + j for i in range(4) for j in range(3))), rtol=1e-4)


def test_persistent_programs_cover_all_tiles():
    k = K(z=exclusive(f32, (N,), persistent=True), x=shared(f32, 1))
    total = k.value(ops.NumTiles, (k.z,), INDEX, axis=0, size=N)
    n = k.value(ops.NumPrograms, (), INDEX, axis=0)

    def body(linear, carried):
        i = k.tile_index(k.z, linear)
        k.store(k.z, k.exp(k.load(k.x, i, (N,))), i)
        return []

    k.loop(k.pid(), total, [], body, step=n)
    x, z = random(1000), np.zeros(1000, np.float32)
    run(k.done(), [z, x], 3)
    np.testing.assert_allclose(z, np.exp(x), rtol=1e-6)


@pytest.mark.parametrize(("kind", "number"), [(CheckKind.ASSERT, 1), (CheckKind.BOUNDS, 2), (CheckKind.SIGNATURE, 3)])
def test_a_failed_check_is_recorded_and_ends_the_program(kind, number):
    k = K(z=exclusive(i64, (1,)))
    p = k.pid()
    k.store(k.z, k.full(1, i64, (1,)), [p])
    k.b.emit(ops.Check, (k.compare(Compare.LT, p, k.const(3)), p, k.const(3)), kind=kind, message="p is small")
    k.store(k.z, k.full(2, i64, (1,)), [p])
    loaded = Loaded(k.done())
    z = np.zeros(6, np.int64)
    ctx = loaded.run([z], 6)
    assert z.tolist() == [2, 2, 2, 1, 1, 1]
    assert ctx.fault[:6].tolist() == [2, number, 3, 0, 3, 3]
    place = loaded.binary.places[0]
    assert (place.kind, place.message) == (kind.value, "p is small")


def test_a_check_that_holds_records_nothing():
    k = K(z=exclusive(i64, (1,)))
    k.b.emit(ops.Check, (k.compare(Compare.LT, k.pid(), k.const(3)),), kind=CheckKind.ASSERT, message="")
    k.store(k.z, k.full(2, i64, (1,)), [0])
    z = np.zeros(1, np.int64)
    assert run(k.done(), [z]).fault[0] == 0
    assert z[0] == 2
