"""First kernel: z = x + y, one tile of 256 elements per program. Every rank does its own."""

import numpy as np

import peertile as pt
import peertile.language as T

CHECK = {"n": 3_003}


@pt.kernel
def vector_add(z: T.Exclusive, x: T.Shared, y: T.Shared):
    z.store(x.load_like(z) + y.load_like(z))


@pt.program
def main(group, n=1_000_003):  # no multiple of the tile: the tail is padded on load and clipped on store
    rng = np.random.default_rng(group.rank)
    a, b = rng.standard_normal((2, n)).astype(np.float32)
    x, y = pt.asarray(a), pt.asarray(b)
    z = pt.full(x.shape, float("nan"), x.dtype)
    vector_add(z.partition(256), x, y).sync()
    np.testing.assert_array_equal(z.numpy(), a + b)
    if group.rank == 0:
        print(f"vector_add: {n} elements are right")


if __name__ == "__main__":
    pt.run(main)
