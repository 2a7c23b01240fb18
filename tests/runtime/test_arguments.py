"""What host functions refuse: devices, shapes, dtypes, values, tiles. Whole messages, and nothing has changed."""

import math

import numpy as np
import pytest

import peertile as pt
from peertile.errors import ArgumentError

DTYPE = "dtype: expected a peertile dtype such as pt.f32, got 'f32'"
POWERS = "; take the next power of two: partial tiles are padded on load and clipped on store"
PROGRAMS = "expected an integer from 1 to 2147483647, got"


def tile(got):
    return f"partition: expected tile extents that are powers of two, got {got} in ({got},){POWERS}"


def cut():
    z = pt.empty(1024, pt.f32)
    z.partition(256).exclusive_argument()  # from here on this cut is found without being checked
    return z


CASES = [
    (lambda: pt.use_device(3), "use_device: expected a device or None, got 3; make one with pt.open_device"),
    (lambda: pt.use_device("cpu"), "use_device: expected a device or None, got 'cpu'; make one with pt.open_device"),
    (
        lambda: pt.open_device("cpu"),
        "open_device(kind): expected one of DriverKind.CPU, DriverKind.CUDA, got 'cpu'",
    ),
    (
        lambda: pt.open_device(pt.DriverKind.CPU, "0"),
        "open_device(ordinal): expected an integer >= 0, got '0'",
    ),
    (lambda: pt.asarray([1, 2], "f32"), DTYPE),
    (
        lambda: pt.asarray([1, 2], np.float32),
        "dtype: expected a peertile dtype such as pt.f32, got <class 'numpy.float32'>",
    ),
    (lambda: pt.asarray(["1"], pt.f32), "source: expected numbers of at most 64 bits, got elements of numpy's <U1"),
    (
        lambda: pt.asarray([10**30], pt.i64),
        "source: expected numbers of at most 64 bits, got elements of numpy's object",
    ),
    (lambda: pt.empty(1.5, pt.f32), "shape: expected integers >= 0, got 1.5"),
    (lambda: pt.empty(None, pt.f32), "shape: expected integers >= 0, got None"),
    (lambda: pt.empty(True, pt.f32), "shape: expected integers >= 0, got True"),
    (lambda: pt.empty("3", pt.f32), "shape: expected integers >= 0, got '3'"),
    (lambda: pt.empty(3, "f32"), DTYPE),
    (lambda: pt.op.empty(3, "f32"), DTYPE),
    (lambda: pt.tensor_spec(3, "f32"), DTYPE),
    (lambda: cut().partition(256.0), tile("256.0")),
    (lambda: cut().partition(True), tile("True")),
    (lambda: cut().partition("a"), tile("'a'")),
    (lambda: cut().partition([[1]]), tile("[1]")),
    (
        lambda: cut().partition(2**40),
        "partition: expected at most 1048576 elements per tile, got 1099511627776 in (1099511627776,); "
        "cut smaller tiles, or go through a part in a loop",
    ),
    (lambda: cut().partition(256).persistent(1.5), f"persistent: programs: {PROGRAMS} 1.5"),
    (lambda: cut().partition(256).persistent(2**80), f"persistent: programs: {PROGRAMS} {2**80}"),
    (lambda: cut().partition(256).persistent(2, swizzle="a"), f"persistent: swizzle: {PROGRAMS} 'a'"),
    (lambda: pt.full(3, "a", pt.f32), "value: expected a number, got 'a'"),
    (lambda: pt.full(3, None, pt.f32), "value: expected a number, got None"),
    (lambda: pt.full(3, 1j, pt.f32), "value: expected a number, got 1j"),
    (
        lambda: pt.full(3, 10**30, pt.i64),
        "value: expected an integer of at most 64 bits, got one of 100 bits",
    ),
    (lambda: pt.full(3, 1, "f32"), DTYPE),
    (lambda: pt.op.full(3, "a", pt.f32), "value: expected a number, got 'a'"),
    (lambda: pt.op.fill(pt.empty(3, pt.f32), "a"), "value: expected a number, got 'a'"),
    (lambda: pt.arange(3, step=0), "arange: step: expected a number other than 0, got 0"),
    (lambda: pt.arange(0, math.inf), "arange: stop: expected a finite number, got inf"),
    (lambda: pt.arange(math.nan), "arange: start: expected a finite number, got nan"),
    (lambda: pt.arange("3"), "arange: start: expected a finite number, got '3'"),
    (lambda: pt.arange(3, dtype="f32"), DTYPE),
    (lambda: pt.linspace(0, 1, -1), "linspace: count: expected an integer >= 0, got -1"),
    (lambda: pt.linspace(0, 1, 2.5), "linspace: count: expected an integer >= 0, got 2.5"),
    (lambda: pt.linspace(0, math.inf, 3), "linspace: stop: expected a finite number, got inf"),
    (lambda: pt.linspace(math.nan, 1, 3), "linspace: start: expected a finite number, got nan"),
    (lambda: pt.eye(-1), "eye: rows: expected an integer >= 0, got -1"),
    (lambda: pt.eye(2, 2.5), "eye: columns: expected an integer >= 0, got 2.5"),
    (lambda: pt.rand(3, seed=-1), "rand: seed: expected an integer >= 0, got -1"),
    (lambda: pt.rand(3, seed="a"), "rand: seed: expected an integer >= 0, got 'a'"),
    (lambda: pt.rand(-3, seed=1), "shape: expected integers >= 0, got -3"),
    (lambda: pt.randn(3, seed=1.5), "randn: seed: expected an integer >= 0, got 1.5"),
    (lambda: pt.rand(3, seed=1, dtype="f32"), DTYPE),
]


@pytest.mark.parametrize(("call", "text"), CASES, ids=range(len(CASES)))
def test_a_wrong_argument_is_refused(call, text):
    before = pt.current_device()
    with pytest.raises(ArgumentError) as caught:
        call()
    assert str(caught.value) == text
    assert pt.current_device() is before


@pytest.mark.parametrize("call", [pt.asarray, lambda rows: pt.empty((2, 2), pt.f32).copy_from(rows)])
def test_rows_of_unequal_lengths_are_refused(call):
    try:
        np.asarray([[1, 2], [3]])
    except ValueError as error:
        reason = str(error)
    with pytest.raises(ArgumentError) as caught:
        call([[1, 2], [3]])
    assert str(caught.value) == f"source: expected an array, or nested lists of equal lengths ({reason})"


NUMBERS = [math.nan, math.inf, -math.inf, 1e30, -1e30, 1e300, 2.9, -2.9, 0.0, 448.5, 1e6, 255.0, 127.0]


@pytest.mark.parametrize("dtype", [pt.i8, pt.u8, pt.i32, pt.u32, pt.i64, pt.u64, pt.f16, pt.bf16, pt.f8e4m3, pt.f8e5m2])
def test_numbers_are_converted_as_kernels_do(dtype):
    want = pt.convert(pt.asarray(np.float64(NUMBERS)), dtype).numpy()
    filled = [pt.full(1, number, dtype).numpy()[0] for number in NUMBERS]
    given = pt.asarray(NUMBERS, dtype).numpy()
    written = pt.empty(len(NUMBERS), dtype).copy_from(NUMBERS).numpy()
    for got in (np.array(filled, dtype.numpy), given, written):
        assert got.tobytes() == want.tobytes(), (got, want)


@pytest.mark.parametrize("dtype", [pt.i8, pt.u8, pt.i64, pt.u64, pt.f32, pt.f64, pt.f16, pt.f8e4m3])
def test_integers_are_converted_as_kernels_do(dtype):
    numbers = [0, 1, -1, 127, 128, 255, 256, -129, 2**40, 2**62 + 1, -(2**63)]
    want = pt.convert(pt.asarray(np.int64(numbers)), dtype).numpy()
    filled = np.array([pt.full(1, number, dtype).numpy()[0] for number in numbers], dtype.numpy)
    assert filled.tobytes() == want.tobytes(), (filled, want)
    assert pt.asarray(np.int64(numbers), dtype).numpy().tobytes() == want.tobytes()
