"""In the unsafe tier only tokens order: the load has none of the store in front of it."""

import numpy as np

import peertile as pt
import peertile.language as T

CHECK = {"ranks": 1}


@pt.kernel(unsafe=True)
def twice(p: T.Pointer, N: T.Const[int]):
    i = T.iota(N)
    token = T.unsafe.store_ptr(p + i, i.astype(T.f32), order=T.weak)
    value, token = T.unsafe.load_ptr(p + i, order=T.weak)
    T.unsafe.store_ptr(p + i, value * 2.0, order=T.weak, token=token)


@pt.program
def main(group):
    x = pt.zeros((64,), pt.f32)
    twice.grid(1)(x.pointer(), N=64).sync()
    print(float(np.sum(x.numpy())))


if __name__ == "__main__":
    pt.run(main)
