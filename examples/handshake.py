"""The two-rank handshake with raw pointers: all rounds inside one launch, no host in between.

Ranks work in pairs (0, 1), (2, 3), …; an odd last rank is its own partner. In every round a rank reads its
partner's input, writes its partner's buffer and adds atomically to its own and its partner's tally; a sequence
number in the partner's inbox, stored with release and polled with acquire, says that the data has arrived, a
second one that it has been read. Run it with `peertile run examples/handshake.py --ranks 2`, the number of rounds
as an argument behind it (256 by default).
"""

import sys

import numpy as np

import peertile as pt
import peertile.language as T

N = 64
ROUNDS = 256
CHECK = {"ranks": 2, "rounds": 3}
POISON = -1.0


@pt.kernel(unsafe=True)
def exchange(
    mine: T.Pointer, theirs: T.Pointer, their_input: T.Pointer, my_input: T.Pointer,
    my_inbox: T.Pointer, their_inbox: T.Pointer, my_tally: T.Pointer, their_tally: T.Pointer,
    log: T.Pointer, sums: T.Pointer, rounds: T.i32, first: T.u32, N: T.Const[int], LIMIT: T.Const[int] = 1 << 24,
):  # fmt: skip
    i = T.iota(N)
    token = T.unsafe.token()
    own, token = T.unsafe.load_ptr(my_input + i, order=T.weak, token=token)
    for r in T.range(rounds):
        other, token = T.unsafe.load_ptr(T.unsafe.unicast(their_input) + i, order=T.weak, token=token)
        value = own + other + r.astype(T.f32)
        token = T.unsafe.store_ptr(T.unsafe.unicast(theirs) + i, value, order=T.weak, token=token)
        _, token = T.unsafe.atomic_rmw(my_tally, T.Rmw.ADD, T.i32(1), order=T.relaxed, scope=T.system, token=token)
        _, token = T.unsafe.atomic_rmw(
            T.unsafe.unicast(their_tally), T.Rmw.ADD, T.i32(2), order=T.relaxed, scope=T.system, token=token
        )
        for phase in T.static_range(2):  # 0: the data has arrived; 1: it has been read
            seq = first + (2 * r + phase + 1).astype(T.u32)
            token = T.unsafe.store_ptr(T.unsafe.unicast(their_inbox), seq, order=T.release, scope=T.system, token=token)
            got = T.u32(0)
            for _ in T.range(LIMIT):
                got, token = T.unsafe.load_ptr(my_inbox, order=T.acquire, scope=T.system, token=token)
                if T.at_least(got, seq):  # wrap-safe
                    break
            T.assert_(T.at_least(got, seq), "the partner did not signal")
            if phase == 0:
                tile, token = T.unsafe.load_ptr(mine + i, order=T.weak, token=token)
                token = T.unsafe.store_ptr(log + r * N + i, tile, order=T.weak, token=token)
                count, token = T.unsafe.load_ptr(my_tally, order=T.relaxed, scope=T.system, token=token)
                token = T.unsafe.store_ptr(sums + r, count, order=T.weak, token=token)


def partner_of(rank, size):
    """The other one of (2k, 2k + 1), or the rank itself where there is none."""
    other = rank ^ 1
    return other if other < size else rank


def inputs(rank):
    return np.arange(N, dtype=np.float32) + 1000.0 * (rank + 1)


class Buffers:
    """What one rank needs, and the same of its partner."""

    def __init__(self, group, heap, rounds):
        self.rank, self.partner = group.rank, partner_of(group.rank, group.size)
        self.input, self.data = heap.empty((N,), pt.f32), heap.empty((N,), pt.f32)
        self.inbox, self.tally = heap.zeros((1,), pt.u32), heap.zeros((1,), pt.i32)
        self.log, self.sums = pt.empty((rounds, N), pt.f32), pt.empty((rounds,), pt.i32)

    def prepare(self, group, first):
        """Fresh inputs, poisoned outputs, inboxes and tallies at their start; on every rank before any goes on."""
        self.input.copy_from(inputs(self.rank))
        self.data.copy_from(np.full(N, POISON, np.float32))
        self.inbox.copy_from(np.array([first], np.uint32))
        self.tally.copy_from(np.zeros(1, np.int32))
        self.log.copy_from(np.full(self.log.shape, POISON, np.float32))
        self.sums.copy_from(np.full(self.sums.shape, -1, np.int32))
        group.barrier("buffers are ready")

    def launch(self, rounds, first):
        def pair(x):
            return x.local.pointer(), x.at(self.partner).pointer()

        (mine, theirs), (my_input, their_input) = pair(self.data), pair(self.input)
        (my_inbox, their_inbox), (my_tally, their_tally) = pair(self.inbox), pair(self.tally)
        return exchange.grid(1)(
            mine, theirs, their_input, my_input, my_inbox, their_inbox, my_tally, their_tally,
            self.log.pointer(), self.sums.pointer(), rounds, first, N=N,
        )  # fmt: skip

    def check(self, rounds, first):
        """Every phase of every round, on this rank."""
        step = np.arange(rounds, dtype=np.float32)[:, None]
        np.testing.assert_array_equal(self.log.numpy(), inputs(self.rank) + inputs(self.partner) + step)
        np.testing.assert_array_equal(self.sums.numpy(), 3 * np.arange(1, rounds + 1))
        assert int(self.tally.numpy()[0]) == 3 * rounds
        assert int(self.inbox.numpy()[0]) == (first + 2 * rounds) % 2**32
        np.testing.assert_array_equal(self.data.numpy(), inputs(self.rank) + inputs(self.partner) + rounds - 1)


def handshakes(group, rounds=ROUNDS):
    """Both launch orders, each from a sequence number at the beginning and from one that wraps on the way."""
    stream = pt.current_device().stream("handshake")
    with pt.SymmetricHeap(group, size_bytes=1 << 20) as heap:
        buffers = Buffers(group, heap, rounds)
        buffers.launch(rounds, 0).compiled()  # before anybody waits for anybody
        for first in (0, 2**32 - rounds):
            for leader in (0, 1):
                buffers.prepare(group, first)
                running = None
                for turn in (leader, 1 - leader):
                    if group.rank % 2 == turn:
                        running = buffers.launch(rounds, first).submit(stream)
                    group.barrier("this turn is in flight")
                running.wait()  # every kernel is in flight by now
                buffers.check(rounds, first)
                group.barrier("checked")


@pt.program
def main(group, rounds=None):
    rounds = rounds or (int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS)
    handshakes(group, rounds)
    group.print(f"handshake: {rounds} rounds between {group.size} ranks are right in both launch orders")


if __name__ == "__main__":
    pt.run(main)
