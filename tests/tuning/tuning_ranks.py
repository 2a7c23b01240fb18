"""Rank functions of the tuning tests. No pytest here: every rank imports this."""

import os
import signal

import numpy as np

import peertile as pt
from peertile.library.collectives import Collectives
from peertile.library.selection import Algorithm
from peertile.tuning import Rules

QUICK = Rules(screen=1, rounds=3, batch_s=1e-4)


def way_of(algorithm, comm, x, out):
    return comm.all_reduce(x, out, algorithm=algorithm)


def all_reduces(group, folder, algorithms):
    """An all-reduce whose algorithm is tuned: what every rank decided, and the value of the sum."""
    op = pt.autotune(
        candidates=algorithms, key=lambda comm, x, out: (x.shape, x.dtype), group=lambda comm, x, out: comm.group,
        rules=QUICK, folder=folder, name="all_reduce",
    )(way_of)  # fmt: skip
    with Collectives(group) as comm:
        x, out = pt.full(1000, group.rank + 1, pt.f32), pt.full(1000, -1, pt.f32)
        found = op.decide(comm, x, out)
        assert x.numpy().tolist() == [group.rank + 1] * 1000
        op(comm, x, out).sync()
        value = float(out.numpy().max())
        again = op.decide(comm, x, out)
    assert again is found
    return found.index, found.dropped, found.is_new, value


def killed(group, folder, victim, after):
    """Rank `victim` is killed in its run `after`; the others say what they saw."""
    runs = [0]

    def way(algorithm, comm, x, out):
        runs[0] += 1
        if group.rank == victim and runs[0] == after:
            os.kill(os.getpid(), signal.SIGKILL)
        return comm.all_reduce(x, out, algorithm=algorithm)

    op = pt.autotune(
        candidates=[Algorithm.PIPELINED, Algorithm.TWO_SHOT], key=lambda *_: 0, group=group, rules=QUICK,
        folder=folder, name="all_reduce",
    )(way)  # fmt: skip
    comm = Collectives(group)
    x, out = pt.full(1000, group.rank + 1, pt.f32), pt.full(1000, -1, pt.f32)
    return op.decide(comm, x, out).index


def sums(size):
    return float(np.arange(1, size + 1).sum())
