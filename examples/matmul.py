"""Persistent matrix product: c = a @ b, each program walking its share of the tiles of c."""

import time

import numpy as np

import peertile as pt
import peertile.language as T

CHECK = {"m": 130, "n": 300, "k": 70}


@pt.kernel
def matmul(c: T.Exclusive, a: T.Shared, b: T.Shared, BK: T.Const[int] = 64):
    for tile in c.tiles():
        m, n = tile.index
        BM, BN = tile.tile_shape
        acc = T.zeros((BM, BN), T.f32)
        for k in T.range(a.num_tiles((BM, BK))[1], stages=3):
            acc = T.mma(a.load((m, k), (BM, BK)), b.load((k, n), (BK, BN)), acc)
        tile.store(acc.astype(c.dtype))


@pt.program
def main(group, m=515, n=700, k=300):  # nothing divides: edges of all three axes are partial
    rng = np.random.default_rng(group.rank)
    a = rng.standard_normal((m, k)).astype(np.float32)
    b = rng.standard_normal((k, n)).astype(np.float32)
    c = pt.full((m, n), float("nan"), pt.f32)
    matmul(c.partition((128, 256)).persistent(swizzle=8), pt.asarray(a), pt.asarray(b)).sync()
    exact = a.astype(np.float64) @ b
    error = np.linalg.norm(c.numpy() - exact) / np.linalg.norm(exact)
    assert error < 1e-6, error

    half = pt.asarray(a, pt.bf16), pt.asarray(b, pt.bf16)
    start = time.perf_counter()
    matmul(c.partition((128, 256)).persistent(swizzle=8), *half).sync()
    seconds = time.perf_counter() - start
    error = np.linalg.norm(c.numpy() - exact) / np.linalg.norm(exact)
    assert error < 1e-2, error
    if group.rank == 0:
        print(f"matmul: {m}x{n}x{k} is right in f32 and bf16 (first bf16 call {seconds * 1e3:.0f} ms)")


if __name__ == "__main__":
    pt.run(main)
