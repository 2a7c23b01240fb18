"""Rank functions of the timing tests. No pytest here: every rank imports this."""

import contextlib
from unittest import mock

import peertile as pt
import peertile.language as T
from peertile.testing import time_on_device


@pt.kernel
def spin(out: T.Exclusive, n: T.i64):
    """n dependent steps."""
    x = T.f32(0)
    for _ in T.range(n):
        x = x * 0.5 + 1.0
    out.store(T.full((1,), x, T.f32))


def spinning(out, n):
    return lambda: spin(out.partition(1), n)


@contextlib.contextmanager
def noting():
    """The list of what the device says in the block: nanoseconds between two events."""
    driver, said = pt.current_device().driver, []
    elapsed_ns = driver.elapsed_ns

    def noted(start, end):
        said.append(elapsed_ns(start, end))
        return said[-1]

    with mock.patch.object(driver, "elapsed_ns", noted):
        yield said


def unequal(group):
    """Each of two ranks has more to do than the other once. What was found, and what the rank's own device said."""
    out = pt.empty((1,), pt.f32)
    candidates = {f"rank {k}": spinning(out, 200_000 if k == group.rank else 200) for k in range(2)}
    with noting() as said:
        found = time_on_device(candidates, group=group, runs=5)
    return {name: timing.seconds for name, timing in found.items()}, said


def different(group):
    """Ranks that time something else."""
    out = pt.empty((1,), pt.f32)
    try:
        time_on_device({f"rank {group.rank}": spinning(out, 10)}, group=group, runs=2)
    except pt.errors.SymmetryError as error:
        return str(error)
    return "nothing"
