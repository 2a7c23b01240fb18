"""T.mma of every dtype, batched or not, in every precision: it runs, or is refused, as the table says."""

import numpy as np
import pytest
from tests.frontend.helpers import refuses, shared
from tests.kernel.values import run_both
from tools.products import LEVELS

import peertile as pt
import peertile.language as T
from peertile.backends.cpu.microkernel import plan_matmul
from peertile.backends.cpu.products import Support, product
from peertile.backends.cpu.target import host_target
from peertile.backends.cuda.products import gpu_product
from peertile.dtypes import ALL_DTYPES, dtype_named
from peertile.errors import CompileError
from peertile.ir.ops import MMA_TYPES, Precision

pytestmark = pytest.mark.any_device

RNG = np.random.default_rng(3)
HERE = host_target().features


def multiply(a, b, c, z, P):
    z.store(T.mma(a.load(), b.load(), c.load(), precision=P))


def plain(a, b, z):
    z.store(T.mma(a.load(), b.load()))


@pytest.mark.sentence("NU-43")
@pytest.mark.feature("K5", "cpu")
@pytest.mark.sentence("NU-42")
@pytest.mark.parametrize("precision", Precision, ids=lambda p: p.value)
@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
@pytest.mark.parametrize("d", ALL_DTYPES, ids=str)
def test_every_product_runs_or_is_refused_as_the_table_says(d, batch, precision):
    support = product(d, precision, HERE).support
    rank = 2 + len(batch)
    if support is Support.REFUSED:
        given = {"a": shared(d, rank), "b": shared(d, rank)}

        def refused(a, b, P):
            T.mma(a.load((0,) * a.ndim, (16,) * a.ndim), b.load((0,) * b.ndim, (16,) * b.ndim), precision=P)

        taken = ", ".join(MMA_TYPES)
        message = (
            f"T.mma: no mma of {d.name}; it takes {taken}"
            if d.name not in MMA_TYPES
            else f"T.mma: precision: T.Precision.TF32 is for f32, got {d.name}; leave it out"
        )
        refuses(refused, message, constants={"P": precision}, **given)
        return
    acc = dtype_named(MMA_TYPES[d.name][0])
    # Small whole numbers: every product and sum is exact, so that any order of adding gives these bits.
    low = -2 if d.is_signed else 0
    a, b = (RNG.integers(low, 3, (*batch, *s)).astype(d.numpy) for s in ((16, 32), (32, 8)))
    c = RNG.integers(low, 3, (*batch, 16, 8)).astype(acc.numpy)
    target = pt.current_device().target
    if batch and target is not None and gpu_product(d, precision, target).batched is None:
        with pytest.raises(CompileError, match=f"batched {d} is not available on {target}"):
            run_both(multiply, a, b, c, np.zeros_like(c), P=precision)
        return
    *_, z = run_both(multiply, a, b, c, np.zeros_like(c), P=precision)
    wide = (x.astype(np.float64) for x in (a, b, c))
    x, y, w = wide
    assert (z.astype(np.float64) == x @ y + w).all()


@pytest.mark.feature("K5", "cpu")
def test_the_accumulator_starts_at_0():
    a, b = (RNG.integers(-2, 3, s).astype(np.int8) for s in ((8, 16), (16, 8)))
    *_, z = run_both(plain, a, b, np.ones((8, 8), np.int32))
    assert (z == a.astype(np.int32) @ b.astype(np.int32)).all()


@pytest.mark.cpu_only
@pytest.mark.parametrize("level", LEVELS, ids=str)
def test_what_is_called_native_is_an_instruction_of_the_type(level):
    features = LEVELS[level]
    for name in MMA_TYPES:
        found = product(dtype_named(name), Precision.IEEE, features)
        text = plan_matmul(name, 16, 16, 64, features).text
        assert (found.support is Support.NATIVE) == (name in ("f32", "f64") or "dpbf16ps" in text), name
