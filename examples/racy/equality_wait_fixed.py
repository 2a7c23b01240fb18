"""The repaired twin of equality_wait.py: at least is enough, as the number only goes up."""

import peertile as pt
import peertile.language as T

CHECK = {"ranks": 2}


@pt.kernel
def rounds(words: T.Peer, count: T.i64):
    for k in T.range(count):
        T.st(words, k + 1, (0,), rank=1 - words.rank, order=T.release)
        T.wait_ge(words, k + 1, (0,))


@pt.program
def main(group):
    with pt.SymmetricHeap(group, size_bytes=1 << 16) as heap:
        words = heap.zeros((1,), pt.i64)
        rounds.grid(1)(words, 3).sync()
        print(int(words.numpy()[0]))


if __name__ == "__main__":
    pt.run(main)
