"""The repaired twin of freed_too_early.py: the tensor is dropped, and the submission holds its memory to its end."""

import numpy as np

import peertile as pt
import peertile.language as T

CHECK = {"ranks": 1}


@pt.kernel
def twice(out: T.Exclusive, x: T.Shared):
    out.store(x.load_like(out) * 2.0)


@pt.program
def main(group):
    x, out = pt.ones((64,), pt.f32), pt.zeros((64,), pt.f32)
    running = twice(out.partition(64), x).submit()
    del x
    running.wait()
    print(float(np.sum(out.numpy())))


if __name__ == "__main__":
    pt.run(main)
