"""The repaired twin of more_than_fits.py."""

import peertile as pt
import peertile.language as T

CHECK = {"ranks": 1}


@pt.kernel
def phases(out: T.Exclusive):
    out.store(T.full((1,), 1, T.i64))
    T.sync_programs()


@pt.program
def main(group):
    programs = 16
    out = pt.zeros((programs,), pt.i64)
    phases(out.partition(1)).sync()
    print(out.numpy().sum())


if __name__ == "__main__":
    pt.run(main)
