"""The repaired twin of collective_mismatch.py: the call does not depend on the rank."""

import peertile as pt

CHECK = {"ranks": 2}


@pt.program
def main(group):
    with pt.SymmetricHeap(group, size_bytes=1 << 16) as heap:
        x = heap.zeros((64,), pt.f32)
        print(x.shape)


if __name__ == "__main__":
    pt.run(main)
