"""Inputs and comparisons of the tests of layers: fresh numbers, poisoned outputs, the rounding of each type."""

import numpy as np

import peertile as pt

DTYPES = [pt.f32, pt.f16, pt.bf16]
ROUNDING = {pt.f32: 2e-6, pt.f16: 1e-3, pt.bf16: 8e-3}
"""One unit in the last place of the result, and what sums of f32 add to it."""


def cases(*shapes):
    """Every shape in f32, and the last one in the other types: a kernel is compiled for each of them."""
    return [(shape, pt.f32) for shape in shapes] + [(shapes[-1], dtype) for dtype in DTYPES[1:]]


def made(rng, shape, dtype, scale=1.0):
    """A tensor of normal numbers, and the f64 values that it holds."""
    tensor = pt.asarray(rng.standard_normal(shape) * scale, dtype)
    return tensor, tensor.numpy().astype(np.float64)


def poisoned(shape, dtype):
    """An output in which what is not written shows."""
    return pt.full(shape, float("nan"), dtype)


def close(got, want, dtype, factor=1.0):
    """`got` is `want` to the rounding of dtype, relative to the largest element."""
    assert got.dtype == dtype
    bound = ROUNDING[dtype] * factor * max(1.0, float(np.abs(want).max(initial=0.0)))
    np.testing.assert_allclose(got.numpy().astype(np.float64), want, rtol=ROUNDING[dtype], atol=bound)
