"""The ranks make different collective calls: every rank is told who called what."""

import peertile as pt

CHECK = {"ranks": 2}


@pt.program
def main(group):
    with pt.SymmetricHeap(group, size_bytes=1 << 16) as heap:
        x = heap.zeros((64 + group.rank,), pt.f32)
        print(x.shape)


if __name__ == "__main__":
    pt.run(main)
