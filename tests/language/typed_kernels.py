"""Kernels as a user writes them, for the type checker."""

import peertile as pt
import peertile.language as T


def gated(a0: T.Tile, b0: T.Tile, a1: T.Tile, b1: T.Tile) -> tuple[T.Tile, T.Tile]:
    return a0 * a1, b0 * a1 + b1


def relu(t: T.Tile) -> T.Tile:
    return T.where(t > 0, t, 0.0)


@pt.kernel
def softmax(z: T.Exclusive, x: T.Shared, scale: float, n: int, N: T.Const[int] = 3) -> None:
    t = x.load_like(z, padding=T.Padding.NEG_INF) * scale
    m = T.max(t, axis=-1, keepdims=True)
    e = T.exp(t - m)
    acc = T.zeros(z.tile_shape, T.f32)
    for k in T.range(n):
        if k == 2:
            continue
        acc += x.load((k, 0), (16, 64)) / (k + 1)
    for j in T.static_range(N):
        acc = acc + j
    total = 1.0 - (-acc) ** 2 + 3 // T.iota(64)[None, :] + relu(e)
    mask = (T.iota(64) < n) & ~(T.iota(64) == 3) | (T.iota(64) != 1)
    _, state = T.scan((t, t), gated, axis=1)
    if T.any(t > 100.0):
        T.print_("large", T.sum(t))
    T.assert_(T.all(mask), "mask")
    i, j2 = z.index
    z.store((e / T.sum(e, axis=-1, keepdims=True) + total + state).astype(z.dtype) + i + j2)


@pt.kernel
def talk(
    z: T.Exclusive, p: T.Peer, s: T.Signal, box: T.Mailbox, h: T.Accumulate, n: T.i32, f: T.f32, q: T.Peer[T.read]
) -> None:
    p.local.store((0,), z.load())
    s.notify()
    s.wait()
    total = z.load()
    for r in T.ranks():
        total += p.at(r).load_like(z)
    box.post(total)
    for part in box.collect():
        total = total + part
    h.atomic_add((0,), total)
    start = T.f32(3)
    start += total
    z.store(total + n + start + f + q.local.load((0,), (64,)))
