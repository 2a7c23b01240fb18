"""Half of the symmetric tensor is read, and nobody has written it: what it holds is anybody's guess."""

import peertile as pt
import peertile.language as T

CHECK = {"ranks": 2}


@pt.kernel
def double(out: T.Exclusive, x: T.Shared):
    out.store(x.load_like(out) * 2.0)


@pt.program
def main(group):
    x = pt.empty((128,), pt.f32)
    x[0:64].copy_from([1.0] * 64)
    out = pt.empty((128,), pt.f32)
    double(out.partition(64), x).sync()
    print(out.numpy()[0])


if __name__ == "__main__":
    pt.run(main)
