"""Cutting, joining and gathering inside tiles, and random numbers: natively and by their meaning, against numpy."""

import math

import numpy as np
import pytest
from tests.frontend.helpers import refuses
from tests.kernel.values import Faulted, each_dtype, run_both

import peertile as pt
import peertile.language as T
from peertile.dtypes import ALL_DTYPES
from peertile.errors import OutOfBounds

pytestmark = pytest.mark.any_device

RNG = np.random.default_rng(12)


def some(d, shape=(4, 16)):
    x = RNG.integers(0, 2, shape) if d.is_bool else RNG.integers(0, 100 if d.bits > 8 else 16, shape)
    return x.astype(d.numpy)


def pieces(x, n, whole, part, put, turned, picked, four):
    t = x.load()
    whole.store(T.cat((t, T.flip(t, axis=1)), axis=1))
    p = T.extract(t, (n, n * 3), (2, 4))
    part.store(p)
    put.store(T.insert(t, p, (1 - n, 0)))
    turned.store(T.flip(t))
    picked.store(T.take(t, T.broadcast(T.iota(8, T.u8) // 2, (4, 8)), axis=1))
    half = T.extract(t, (0, 0), (1, 4))
    four.store(T.cat((half, half, half, half)))


@pytest.mark.feature("K6", "cpu")
@pytest.mark.parametrize("d", each_dtype(ALL_DTYPES), ids=str)
def test_pieces_of_every_dtype(d):
    x = some(d)
    out = [np.zeros(s, d.numpy) for s in ((4, 32), (2, 4), (4, 16), (4, 16), (4, 8), (4, 4))]
    for n in (0, 1):
        _, whole, part, put, turned, picked, four = run_both(pieces, x, n, *out)
        assert (whole == np.concatenate([x, x[:, ::-1]], 1)).all()
        assert (part == x[2 * n : 2 * n + 2, 12 * n : 12 * n + 4]).all()
        want = x.copy()
        want[2 - 2 * n : 4 - 2 * n, :4] = part
        assert (put == want).all()
        assert (turned == x[::-1]).all()
        assert (picked == x[:, np.arange(8) // 2]).all()
        assert (four == x[0, :4]).all()


def shapes(x, turned, flat, wide, cube, column, chosen):
    t = x.load()
    turned.store(t.T)
    flat.store(T.reshape(t, (64,)))
    wide.store(T.broadcast(T.expand_dims(t, 1), (4, 2, 16)))
    cube.store(T.permute(t.reshape(4, 4, 4), (2, 0, 1)))
    column.store(T.transpose(T.extract(t, (1, 0), (1, 16))[:, :, None], 0, 1))
    chosen.store(T.where(T.iota(16)[None, :] < 5, t, T.ones((4, 16), t.dtype)))


@pytest.mark.feature("K6", "cpu")
@pytest.mark.parametrize("d", each_dtype(ALL_DTYPES), ids=str)
def test_shape_words_of_every_dtype(d):
    x = some(d)
    out = [np.zeros(s, d.numpy) for s in ((16, 4), (64,), (4, 2, 16), (4, 4, 4), (16, 1, 1), (4, 16))]
    _, turned, flat, wide, cube, column, chosen = run_both(shapes, x, *out)
    assert (turned == x.T).all()
    assert (flat == x.reshape(-1)).all()
    assert (wide == x[:, None, :]).all()
    assert (cube == x.reshape(4, 4, 4).transpose(2, 0, 1)).all()
    assert (column[:, 0, 0] == x[1]).all()
    assert (chosen == np.where(np.arange(16) < 5, x, d.numpy.type(1))).all()


def test_an_index_of_a_piece_out_of_range_is_a_fault():
    def cut(x, n, z):
        z.store(T.extract(x.load(), n, (4,)))

    def gathered(x, n, z):
        z.store(T.take(x.load(), T.iota(4) + n))

    x, z = some(T.f32, (16,)), np.zeros(4, np.float32)
    for fn, good, bad, message in (
        (cut, 3, 4, "T.extract: index 0 out of range"),
        (cut, 0, -1, "T.extract: index 0 out of range"),
        (gathered, 12, 13, "T.take: index out of range"),
        (gathered, 0, -1, "T.take: index out of range"),
    ):
        run_both(fn, x, good, z)
        with pytest.raises(Faulted) as caught:
            run_both(fn, x, bad, z)
        assert str(caught.value) == message


@pt.kernel
def gathers_wide(z: T.Exclusive, x: T.Shared, places: T.Shared):
    z.store(T.take(x.load((0,), (512,)), places.load_like(z)))


@pytest.mark.feature("U3", "cpu")
@pytest.mark.feature("K6", "cpu")
@pytest.mark.parametrize(
    ("d", "bad", "got"),
    [
        *[(d, d.max, d.max) for d in (T.i16, T.u16, T.i32, T.u32, T.i64)],
        *[(d, -2, -2) for d in (T.i8, T.i16, T.i32, T.i64)],
        (T.u64, 512, 512),
        (T.i64, 1 << 32, 1 << 32),
    ],
    ids=str,
)
def test_a_place_of_take_out_of_range_is_told_with_the_extent(d, bad, got):
    x, z, places = pt.asarray(np.arange(512, dtype=np.float32)), pt.empty((8,), pt.f32), np.arange(8).astype(d.numpy)
    places[3] = bad
    with pytest.raises(OutOfBounds) as caught:
        gathers_wide(z.partition(8), x, pt.asarray(places)).sync()
    line = gathers_wide.fn.__code__.co_firstlineno + 2
    head, _, source = str(caught.value).partition("\n")
    assert head == f"T.take: index out of range: got {got}, limit 512 (program 0, {__file__}:{line}) in gathers_wide"
    assert source == (
        f"  {__file__}:{line} in gathers_wide\n"
        "    z.store(T.take(x.load((0,), (512,)), places.load_like(z)))\n"
        "            ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^"
    )


def test_pieces_that_do_not_fit_are_refused():
    def beyond(x):
        T.extract(x.load((0,), (16,)), 4, (4,))

    def larger(x):
        T.extract(x.load((0,), (16,)), 0, (32,))

    def three(x):
        t = x.load((0,), (16,))
        T.cat((t, t, t))

    def unequal(x):
        T.cat((x.load((0,), (16,)), x.load((0,), (8,))))

    def other(x):
        T.insert(x.load((0,), (16,)), T.zeros((4,), T.i32), 0)

    def floats(x):
        t = x.load((0,), (16,))
        T.take(t, t)

    def short(m):
        T.take(m.load((0, 0), (4, 8)), T.iota(4), axis=1)

    refuses(beyond, "T.extract: index 0: expected 0 to 3, got 4")
    refuses(larger, "T.extract: expected a piece no larger than f32[16], of as many axes, got (32,)")
    refuses(three, "T.cat: tiles: expected a number that is a power of two, got 3; add tiles of padding")
    refuses(unequal, "T.cat: tiles: expected one type, got f32[16] and f32[8]; convert or reshape one of them")
    refuses(other, "T.insert: piece: expected dtype f32, got i32[4]; convert it with .astype(...)")
    refuses(floats, "T.take: index: expected integers, got f32[16]; convert with .astype(T.i32)")
    refuses(short, "T.take: index: expected the extents of f32[4, 8] but for axis 1, got i64[4]; T.broadcast it")


# ---------------------------------------------------------------- random numbers


def philox(seed: int, counter: int) -> list[int]:
    """Philox 4x32-10 in Python numbers, from the paper."""
    mask = (1 << 32) - 1
    k = [seed & mask, seed >> 32 & mask]
    c = [counter & mask, counter >> 32 & mask, 0, 0]
    for _ in range(10):
        p, q = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [q >> 32 ^ c[1] ^ k[0], q & mask, p >> 32 ^ c[3] ^ k[1], p & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return c


def bits(seed, start, z0, z1, z2, z3, one):
    at = start + T.iota(16)
    a, b, c, d = T.rand_bits4(seed, at)
    z0.store(a)
    z1.store(b)
    z2.store(c)
    z3.store(d)
    one.store(T.rand_bits(seed, at))


@pytest.mark.slow
@pytest.mark.feature("K6", "cpu")
@pytest.mark.sentence("NU-60")
@pytest.mark.parametrize("seed", [0, 42, -1, 2**62 + 12345])
def test_random_bits_are_those_of_the_paper(seed):
    for start in (0, 2**32 - 8, -8):
        *words, one = run_both(bits, seed, start, *[np.zeros(16, np.uint32) for _ in range(5)])
        want = [philox(seed & (1 << 64) - 1, start + k & (1 << 64) - 1) for k in range(16)]
        assert np.stack(words, 1).tolist() == want
        assert (one == words[0]).all()


def test_the_known_answer_of_philox():
    # The first test vector of Random123: key 0, counter 0.
    assert philox(0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_a_seed_known_when_compiling_gives_the_same_bits():
    def kernel(z, y, n):
        z.store(T.rand_bits(123, T.iota(32)))
        y.store(T.rand_bits(n, T.iota(32)))

    z, y = run_both(kernel, np.zeros(32, np.uint32), np.zeros(32, np.uint32), 123)
    assert (z == y).all()


@pytest.mark.feature("K6", "cpu")
@pytest.mark.sentence("NU-61")
def test_uniform_and_normal_numbers_have_the_same_bits_everywhere_and_the_right_moments():
    def kernel(n, u, z):
        at = n + T.iota(16384)
        u.store(T.rand(7, at))
        z.store(T.randn(7, at))

    u, z = run_both(kernel, 1 << 40, np.zeros(16384, np.float32), np.zeros(16384, np.float32))
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(u.mean() - 0.5) < 0.01
    assert abs(u.var() - 1 / 12) < 0.002
    assert abs(z.mean()) < 0.03
    assert abs(z.std() - 1) < 0.02
    # One bit of the draw decides the side, and the distribution follows the normal one.
    for at in (-2, -1, -0.3, 0, 1, 2):
        assert abs((z < at).mean() - 0.5 * (1 + math.erf(at / math.sqrt(2)))) < 0.015
    exact = np.array([_inverse_normal((k + 0.5) * 2.0**-24) for k in (u[:200] * 2**24).astype(int)])
    np.testing.assert_allclose(z[:200], exact, rtol=3e-6, atol=1e-6)


def _inverse_normal(p: float) -> float:
    low, high = -6.0, 6.0
    for _ in range(80):
        mid = (low + high) / 2
        low, high = (mid, high) if 0.5 * math.erfc(-mid / math.sqrt(2)) < p else (low, mid)
    return low


def test_what_random_numbers_do_not_take_is_refused():
    def of_floats(x):
        T.rand(1, x.load((0,), (8,)))

    def of_seeds(x):
        T.randn(T.iota(8), T.iota(8))

    refuses(of_floats, "T.rand: offset: expected integers, got f32[8]; convert with .astype(T.i64)")
    refuses(
        of_seeds, "T.randn: seed: expected an integer scalar, got a tile of shape (8,); give tiles their own offsets"
    )
