"""Rank functions of the timing tests. No pytest here: every rank imports this."""

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


def unequal(group):
    """The first rank has far more to do than the others: on a GPU five milliseconds, since between the events of a run
    that does nothing there is what its host needs, a quarter of one where ranks are threads of a busy machine."""
    out = pt.empty((1,), pt.f32)
    steps = 1_000_000 if group.rank == 0 else 200
    found = time_on_device({"spin": spinning(out, steps), "short": spinning(out, 200)}, group=group, runs=5)
    return {name: timing.seconds for name, timing in found.items()}


def different(group):
    """Ranks that time something else."""
    out = pt.empty((1,), pt.f32)
    try:
        time_on_device({f"rank {group.rank}": spinning(out, 10)}, group=group, runs=2)
    except pt.errors.SymmetryError as error:
        return str(error)
    return "nothing"
