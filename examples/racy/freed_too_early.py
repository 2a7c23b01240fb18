"""Memory is given back through the driver while a kernel that reads it is still queued."""

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
    pt.current_device().driver.free(x.address)
    running.wait()
    print(float(np.sum(out.numpy())))


if __name__ == "__main__":
    pt.run(main)
