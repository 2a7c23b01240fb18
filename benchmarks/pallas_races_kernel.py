"""The peertile side of pallas_races.py: the push all-reduce as a kernel, with one of its waits left out."""

# ruff: noqa: PT009
# Kernels: T.assert_ is a word of the kernel language.

from __future__ import annotations

import numpy as np

import peertile.language as T
from peertile.dtypes import f32, i64
from peertile.frontend.build import build_kernel
from peertile.ir.types import Access, SignalType, SymmetricType, TileType, ViewType
from peertile.meaning import PerRank, new_signal
from peertile.passes.pipeline import run_pipeline
from peertile.sim.runs import Case, kernel_case

__all__ = ["case"]


def push_all_reduce(
    out: T.Peer, x: T.Shared, inbox: T.Peer, part: T.Signal, result: T.Signal, read: T.Signal, rounds: T.i64,
    B: T.Const[int], WITHOUT: T.Const[int],
) -> None:  # fmt: skip
    """`WITHOUT`: 1 the wait for the parts, 2 the wait for the results."""
    me = out.rank
    for _ in T.range(rounds):
        read.notify()
        read.wait()
        for r in T.ranks():
            inbox.at(r).store((me,), x.load((r,), (B,)))
        part.notify()
        if WITHOUT != 1:
            part.wait()
        acc = T.zeros((B,), T.f32)
        for r in T.ranks():
            acc += inbox.local.load((r,), (B,))
        for r in T.ranks():
            out.at(r).store((me,), acc)
        result.notify()
        if WITHOUT != 2:
            result.wait()
        whole = T.zeros((B,), T.f32)
        for r in T.ranks():
            whole += out.local.load((r,), (B,))
        T.assert_(T.sum(whole, axis=0) >= 0.0, "no number of the input is negative")


def case(without: int, rounds: int, ranks: int, tile: int) -> Case:
    """`rounds` rounds in one launch, as a case of the simulated machine."""
    peer = SymmetricType(f32, 1, Access.READ_WRITE, unit_stride=(True,))
    types = {
        "out": peer, "x": ViewType(f32, 1, unit_stride=(True,)), "inbox": peer, "part": SignalType(),
        "result": SignalType(), "read": SignalType(), "rounds": TileType(i64),
    }  # fmt: skip
    built = build_kernel(push_all_reduce, types, {"B": tile, "WITHOUT": without}, unsafe=False, name="push_all_reduce")
    kernel = run_pipeline(built, broken=[])

    def ones() -> PerRank:
        return PerRank([np.ones(ranks * tile, np.float32) for _ in range(ranks)])

    def arguments() -> list:
        signals = [new_signal(ranks, 1) for _ in range(3)]
        return [ones(), ones(), ones(), *signals, rounds]

    return kernel_case(kernel, 1, arguments, ranks=ranks, max_steps=1_000_000)
