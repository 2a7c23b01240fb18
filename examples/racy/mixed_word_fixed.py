"""The repaired twin of mixed_word.py: both ranks add."""

import peertile as pt
import peertile.language as T

CHECK = {"ranks": 3}


@pt.kernel
def count(words: T.Peer):
    if words.rank > 0:
        T.atom_add(words, 1, (0,), rank=0, order=T.release)
    else:
        T.wait_ge(words, 2, (0,))


@pt.program
def main(group):
    with pt.SymmetricHeap(group, size_bytes=1 << 16) as heap:
        words = heap.zeros((1,), pt.i64)
        count.grid(1)(words).sync()
        group.barrier("counted")
        print(int(words.numpy()[0]))


if __name__ == "__main__":
    pt.run(main)
