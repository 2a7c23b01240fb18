"""Kernels of the simulator's tests, compiled for it, and the arguments of communication objects."""

from __future__ import annotations

from math import prod

import numpy as np

import peertile.language as T
from peertile.dtypes import bf16, f32
from peertile.frontend.build import build_kernel
from peertile.ir.core import Kernel
from peertile.ir.types import (
    Access,
    BarrierType,
    CounterType,
    MailboxType,
    Partition,
    SignalType,
    SymmetricType,
    ViewType,
)
from peertile.meaning import PerRank
from peertile.passes.pipeline import run_pipeline

PEER = SymmetricType(f32, 1, unit_stride=(True,))
PEER_READ = SymmetricType(f32, 1, Access.READ, unit_stride=(True,))
SHARED = ViewType(f32, 1, unit_stride=(True,))
SIGNAL, COUNTER, BARRIER = SignalType(), CounterType(), BarrierType()


def exclusive(tile: int, persistent: bool = False) -> ViewType:
    return ViewType(f32, 1, Access.READ_WRITE, partition=Partition((tile,), persistent), unit_stride=(True,))


def build(fn, types, consts=None, *, unsafe: bool = False) -> Kernel:
    kernel = build_kernel(fn, types, consts or {}, unsafe=unsafe, name=fn.__name__)
    return run_pipeline(kernel, broken=[])


def two_shot(out: T.Peer, x: T.Peer[T.read], ready: T.Signal, B: T.Const[int]):
    me, n = x.rank, x.num_ranks
    tiles = x.local.num_tiles((B,))[0]
    ready.notify()
    ready.wait()
    for t in T.range(T.program_id(0) * n + me, tiles, T.num_programs(0) * n):
        acc = T.zeros((B,), T.f32)
        for r in T.ranks():
            acc += x.at(r).load((t,), (B,))
        for r in T.ranks():
            out.at(r).store((t,), acc.astype(out.dtype))
    ready.notify()
    ready.wait()


def all_reduce(out: T.Exclusive, x: T.Shared, box: T.Mailbox):
    for tile in out.tiles():
        box.post(x.load_like(tile))
        acc = T.zeros(tile.tile_shape, T.f32)
        for part in box.collect():
            acc += part
        tile.store(acc.astype(out.dtype))


def scale(z: T.Exclusive, x: T.Shared):
    z.store(x.load_like(z) * 2.0)


def two_shot_kernel(tile: int = 16) -> Kernel:
    return build(two_shot, {"out": PEER, "x": PEER_READ, "ready": SIGNAL}, {"B": tile})


def box_type(tile: int = 16, depth: int = 2, acknowledged: bool = False) -> MailboxType:
    return MailboxType(f32, (tile,), depth, acknowledged)


def all_reduce_kernel(tile: int = 16, depth: int = 2, acknowledged: bool = False) -> Kernel:
    types = {"out": exclusive(tile, True), "x": SHARED, "box": box_type(tile, depth, acknowledged)}
    return build(all_reduce, types)


def scale_kernel(tile: int = 16) -> Kernel:
    return build(scale, {"z": exclusive(tile), "x": SHARED})


def floats(ranks: int, n: int, start: float | None = 0.0) -> PerRank:
    return PerRank([np.arange(n, dtype=np.float32) + (start or 0.0) + rank for rank in range(ranks)])


__all__ = [
    "BARRIER", "COUNTER", "PEER", "PEER_READ", "SHARED", "SIGNAL", "all_reduce_kernel", "bf16", "box_type", "build",
    "exclusive", "floats", "prod", "scale_kernel", "two_shot_kernel",
]  # fmt: skip
