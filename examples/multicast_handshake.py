"""The two-rank handshake through one address that reaches both: all rounds inside one launch, no host in between.

Ranks work in pairs (0, 1), (2, 3), …; an odd last rank is its own partner. In every round both write their
contribution by the ordinary address of their part, load-reduce both contributions and add theirs to the totals of
both by the multicast address, and one of them, in turns, broadcasts a tile, which each reads by its ordinary address.
Between the two addresses of some memory stands an alias fence, and between the ranks a sequence number, stored with
release and polled with acquire. Where the fabric has no multicast the operations are loops over both parts, with the
same results. Run it with `peertile run examples/multicast_handshake.py --ranks 2`, the number of rounds behind it.
"""

import sys

import numpy as np

import peertile as pt
import peertile.language as T

N = 64
ROUNDS = 256
POISON = -1.0
CHECK = {"rounds": 3}
"""What the checker runs: every phase of the procedure, and both launch orders, in few rounds."""


def meet(inbox, seq, partner, LIMIT):
    """The partner has done all that comes before, by whichever address, and what comes next sees it."""
    T.unsafe.fence_alias()
    T.st(inbox, seq, rank=partner, order=T.release)
    got = T.u32(0)
    for _ in T.range(LIMIT):
        got = T.ld(inbox, order=T.acquire)
        if T.at_least(got, seq):  # wrap-safe
            break
    T.assert_(T.at_least(got, seq), "the partner did not signal")
    T.unsafe.fence_alias()


@pt.kernel(unsafe=True)
def exchange(
    given: T.Multicast, own_given: T.Peer, totals: T.Multicast, news: T.Multicast, own_news: T.Peer, inbox: T.Peer,
    mine: T.Shared, sums: T.Peer, heard: T.Peer, rounds: T.i32, first: T.u32, N: T.Const[int],
    LIMIT: T.Const[int] = 1 << 24,
):  # fmt: skip
    me = given.rank
    partner = given.num_ranks - 1 - me
    value = mine.load((0,), (N,))
    for r in T.range(rounds):
        step = r.astype(T.f32)
        seq = first + (2 * r).astype(T.u32)
        own_given.local.store((0,), value + step)
        meet(inbox, seq + T.u32(1), partner, LIMIT)
        # Both contributions, and both totals.
        both = given.partition((N,)).multimem_load_reduce((0,), T.add)
        totals.partition((N,)).multimem_reduce((0,), T.add, value, order=T.relaxed)
        if r % given.num_ranks == me:
            news.partition((N,)).multimem_store((0,), value - step)
        meet(inbox, seq + T.u32(2), partner, LIMIT)
        sums.local.store((r, 0), T.reshape(both, (1, N)))
        heard.local.store((r, 0), T.reshape(own_news.local.load((0,), (N,)), (1, N)))


def inputs(rank):
    return np.arange(N, dtype=np.float32) + 1000.0 * (rank + 1)


class Buffers:
    """What one rank of a pair needs."""

    def __init__(self, heap, rounds):
        self.given, self.totals, self.news = (heap.multicast((N,), pt.f32) for _ in range(3))
        self.inbox = heap.zeros((1,), pt.u32)
        self.sums, self.heard = heap.empty((rounds, N), pt.f32), heap.empty((rounds, N), pt.f32)
        self.mine = pt.empty((N,), pt.f32)

    def prepare(self, pair, rank, first):
        """Fresh inputs, poisoned outputs, the inbox and the totals at their start; on both before either goes on."""
        self.mine.copy_from(inputs(rank))
        for x in (self.given, self.news):
            x.copy_from(np.full(N, POISON, np.float32))
        self.totals.copy_from(np.zeros(N, np.float32))
        self.inbox.copy_from(np.array([first], np.uint32))
        for x in (self.sums, self.heard):
            x.copy_from(np.full(x.shape, POISON, np.float32))
        pair.barrier("buffers are ready")

    def launch(self, rounds, first):
        return exchange.grid(1)(
            self.given, self.given, self.totals, self.news, self.news, self.inbox, self.mine, self.sums, self.heard,
            rounds, first, N=N,
        )  # fmt: skip

    def check(self, ranks, rounds, first):
        """Every phase of every round, and what the memory of this rank holds at the end."""
        step = np.arange(rounds, dtype=np.float32)[:, None]
        values = [inputs(rank) for rank in ranks]
        np.testing.assert_array_equal(self.sums.numpy(), sum(values) + len(ranks) * step)
        heard = [values[r % len(ranks)] - r for r in range(rounds)]
        np.testing.assert_array_equal(self.heard.numpy(), np.stack(heard))
        np.testing.assert_array_equal(self.totals.numpy(), rounds * sum(values))
        np.testing.assert_array_equal(self.news.numpy(), heard[-1])
        assert int(self.inbox.numpy()[0]) == (first + 2 * rounds) % 2**32


def handshakes(group, rounds=ROUNDS):
    """Both launch orders, each from a sequence number at the beginning and from one that wraps on the way. Gives how
    the multicast was done."""
    pairs = [tuple(r for r in (k, k + 1) if r < group.size) for k in range(0, group.size, 2)]
    made = [group.subgroup(ranks) for ranks in pairs]  # collective over the whole group, each in turn
    ranks, pair = next((ranks, sub) for ranks, sub in zip(pairs, made, strict=True) if group.rank in ranks)
    stream = pt.current_device().stream("handshake")
    with pt.SymmetricHeap(pair, size_bytes=1 << 20) as heap:
        buffers = Buffers(heap, rounds)
        buffers.launch(rounds, 0).compiled()  # before anybody waits for anybody
        for first in (0, 2**32 - rounds):
            for leader in (0, 1):
                buffers.prepare(pair, group.rank, first)
                running = None
                for turn in (leader, 1 - leader):
                    if group.rank % 2 == turn:
                        running = buffers.launch(rounds, first).submit(stream)
                    pair.barrier("this turn is in flight")
                running.wait()  # both kernels are in flight by now
                buffers.check(ranks, rounds, first)
                pair.barrier("checked")
        return heap.multicast_path


@pt.program
def main(group, rounds=None):
    if rounds is None:
        rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    path = handshakes(group, rounds)
    group.print(
        f"multicast handshake: {rounds} rounds between {group.size} ranks are right in both launch orders "
        f"({'fabric' if path.hardware else 'software'})"
    )


if __name__ == "__main__":
    pt.run(main)
