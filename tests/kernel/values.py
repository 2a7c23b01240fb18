"""Runs a kernel of the language natively and by its meaning on the same arrays, and wants the same bits.

On a GPU, whose functions round and whose sums associate in their own way, floats may differ by a few of the last place.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import peertile as pt
from peertile.dtypes import from_numpy
from peertile.frontend.build import build_kernel
from peertile.ir.types import Access, Partition, TileType, ViewType
from peertile.meaning import run_grid
from peertile.passes.pipeline import run_pipeline
from peertile.testing.native import run_native


def compile_for(fn: Callable[..., Any], values: list[Any], constants: dict[str, Any]) -> Any:
    """The kernel after the pipeline: arrays are exclusive, each one tile; numbers are scalars."""
    names = [n for n in fn.__code__.co_varnames[: fn.__code__.co_argcount] if n not in constants]
    types = {}
    for name, value in zip(names, values, strict=True):
        if isinstance(value, np.ndarray):
            types[name] = ViewType(
                from_numpy(value.dtype), value.ndim, Access.READ_WRITE, partition=Partition(value.shape)
            )
        else:
            types[name] = TileType(from_numpy(np.asarray(value).dtype))
    return run_pipeline(build_kernel(fn, types, constants))


def run_both(fn: Callable[..., Any], *values: Any, **constants: Any) -> list[np.ndarray]:
    """The arrays after a native run of one program; the evaluator must have left the same bits (NaN aside)."""
    native, meant = run_pair(fn, *values, **constants)
    for a, b in zip(native, meant, strict=True):
        same_bits(a, b)
    return native


def run_pair(fn: Callable[..., Any], *values: Any, **constants: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The arrays after a native run of one program, and after one by the meaning."""
    kernel = compile_for(fn, list(values), constants)
    native = [np.array(v) if isinstance(v, np.ndarray) else v for v in values]
    meant = [np.array(v) if isinstance(v, np.ndarray) else v for v in values]
    fault = run_native(kernel, 1, native, pt.current_device())
    outcome = run_grid(kernel, 1, meant)
    if fault is not None or outcome.faults:
        assert fault is not None
        assert [f.kind.value for f in outcome.faults] == [{1: "assert", 2: "bounds"}[fault.kind]]
        raise Faulted(outcome.faults[0].message)
    first, second = ([x for x in xs if isinstance(x, np.ndarray)] for xs in (native, meant))
    return first, second


class Faulted(Exception):
    """Both runs ended with this fault."""


NEAR = {"f8e4m3": 0.13, "f8e5m2": 0.26, "f16": 4e-3, "bf16": 3e-2, "f32": 2e-6, "f64": 1e-14}
"""How far a GPU may be from the meaning, relative: four of the last place, one of fp8's."""


def run_cancelling(fn: Callable[..., Any], *values: Any, terms: float) -> list[np.ndarray]:
    """As `run_both`, for sums of which little is left: on a GPU they are as near as `terms`, their largest, allow."""
    native, meant = run_pair(fn, *values)
    for a, b in zip(native, meant, strict=True):
        same_bits(a, b, terms)
    return native


def same_bits(a: np.ndarray, b: np.ndarray, terms: float = 0.0) -> None:
    """Equal to the bit, but for the bits of NaN; on a GPU floats are equal within `NEAR`, of `terms` if that is more."""
    wide_a, wide_b = (x.astype(np.float64) if x.dtype.kind not in "biu" else x for x in (a, b))
    ok = (
        (wide_a == wide_b) & (np.signbit(wide_a) == np.signbit(wide_b))
        if wide_a.dtype.kind == "f"
        else wide_a == wide_b
    )
    if wide_a.dtype.kind == "f":
        ok |= np.isnan(wide_a) & np.isnan(wide_b)
        if pt.current_device().target is not None:
            near = NEAR[from_numpy(a.dtype).name]
            with np.errstate(invalid="ignore"):
                ok |= np.abs(wide_a - wide_b) <= near * np.maximum(np.abs(wide_b), terms or np.finfo(np.float32).tiny)
    if not ok.all():
        at = tuple(int(i) for i in np.argwhere(~ok)[0])
        pytest.fail(f"{at}: native {a[at]}, meaning {b[at]}; {int((~ok).sum())} differ")


QUICK = ("bool", "i32", "u64", "bf16", "f32", "f8e4m3")


def each_dtype(dtypes: Any) -> list[Any]:
    """Parameters of a table over dtypes: some of every family in the quick tier, all of them in the suite."""
    return [d if d.name in QUICK else pytest.param(d, marks=pytest.mark.slow) for d in dtypes]
