"""Fourier transforms of rows against numpy in f64, there and back, and bad input."""

import numpy as np
import pytest

import peertile as pt
from peertile.errors import ArgumentError
from peertile.library.fft import Fourier, fft, inverse_fft

pytestmark = [pytest.mark.any_device, pytest.mark.feature("A4", "cpu")]


def planes(z):
    return pt.asarray(np.ascontiguousarray(z.real)), pt.asarray(np.ascontiguousarray(z.imag))


def joined(pair):
    return pair[0].numpy() + 1j * pair[1].numpy()


def random_rows(rng, rows, n):
    return (rng.standard_normal((rows, n)) + 1j * rng.standard_normal((rows, n))).astype(np.complex64)


def check_length(rng, n, rows=3):
    z = random_rows(rng, rows, n)
    out = planes(np.full_like(z, np.nan))
    found = joined(fft(*planes(z), out).sync())
    exact = np.fft.fft(z.astype(np.complex128))
    assert np.abs(found - exact).max() <= 1e-6 * np.sqrt(n) * max(1, np.log2(n))
    back = joined(inverse_fft(*planes(exact.astype(np.complex64))).sync())
    assert np.abs(back - z).max() <= 1e-6 * max(1, np.log2(n))


@pytest.mark.slow
def test_transforms_agree_with_numpy(rng):
    check_length(rng, 64)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1 << k for k in range(15)])
def test_transforms_of_every_length_agree_with_numpy(n, rng):
    check_length(rng, n)


@pytest.mark.slow
def test_a_transform_may_be_in_place_and_strided(rng):
    z = random_rows(rng, 16, 16)
    a, b = planes(z)
    fourier = Fourier(16, a.device)
    turned = joined(fourier.forward(a.permute(1, 0), b.permute(1, 0)).sync())
    assert np.abs(turned - np.fft.fft(z.T)).max() < 1e-5
    assert fourier.forward(pt.zeros((0, 16), pt.f32), pt.zeros((0, 16), pt.f32)).sync()[0].shape == (0, 16)


def test_a_transform_of_nothing_is_nothing():
    a, b = fft(pt.zeros((0, 4), pt.f32), pt.zeros((0, 4), pt.f32)).sync()
    assert a.shape == b.shape == (0, 4)


def messages():
    x, odd, wide = pt.zeros((2, 4), pt.f32), pt.zeros((2, 6), pt.f32), pt.zeros((2, 8), pt.f32)
    return [
        (lambda: fft(odd, odd), "fft: rows: expected a power of two up to 16384 for their length, got 6"),
        (lambda: fft(x, wide), "fft: imag: expected [2, 4], got [2, 8]"),
        (lambda: fft(3, x), "fft: real: expected a Tensor, got int; pt.asarray makes one"),
        (
            lambda: inverse_fft(x, pt.zeros((2, 4), pt.f64)),
            "inverse_fft: imag: expected f32, got f64; complex numbers are two f32 tensors",
        ),
        (lambda: fft(pt.zeros((4,), pt.f32), x), "fft: real: expected [rows, length], got [4]"),
        (lambda: fft(x, x, x), "fft: out: expected a pair of tensors, got Tensor"),
        (lambda: fft(x, x, (x, wide)), "fft: out: imag: expected [2, 4], got [2, 8]"),
        (lambda: Fourier(8, x.device).forward(x, x), "fft: real: expected rows of 8, got [2, 4]"),
    ]


@pytest.mark.parametrize("k", range(8))
def test_bad_input_is_named(k):
    call, message = messages()[k]
    with pytest.raises(ArgumentError) as error:
        call()
    assert str(error.value) == message
