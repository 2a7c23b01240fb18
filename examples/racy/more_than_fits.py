"""More programs wait for each other than can run at once, so the launch is refused with the number that fits."""

import peertile as pt
import peertile.language as T

CHECK = {"ranks": 1}


@pt.kernel
def phases(out: T.Exclusive):
    out.store(T.full((1,), 1, T.i64))
    T.sync_programs()


@pt.program
def main(group):
    programs = 100_000
    out = pt.zeros((programs,), pt.i64)
    phases(out.partition(1)).sync()
    print(out.numpy().sum())


if __name__ == "__main__":
    pt.run(main)
