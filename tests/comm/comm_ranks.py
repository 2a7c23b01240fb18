"""Functions that spawned ranks run. No pytest here: every rank imports this."""

import ctypes
import os
import signal
import sys
import time

from peertile.comm.coordinator import Arrive
from peertile.comm.launcher import current_group, init
from peertile.errors import PeerFailed, PeertileError


def raised(action):
    """(type, message) of what `action` raises; None if nothing."""
    try:
        action()
    except PeertileError as error:
        return type(error).__name__, str(error)
    return None


def facts(group):
    return group.rank, group.size, group.world_ranks, group.local_rank, group.local_size, group.generation


ARGV = tuple(sys.argv)  # while this module is imported


def argv(group):
    return ARGV, tuple(sys.argv)


def add(group, *numbers):
    return sum(numbers) + group.rank


def is_current(group):
    return current_group() is group and init() is group and init(ranks=group.size) is group


def joined_twice(group):
    return raised(lambda: init(ranks=group.size + 1)), raised(lambda: init(rank=group.size))


def collectives(group):
    mine = b"%d" % group.rank
    group.barrier("start")
    return (
        group.exchange(mine, "numbers"),
        group.broadcast(mine, "last", root=group.size - 1),
        group.agree(("shape", 3), "shape"),
        group.all_or_none("double", lambda: 2 * group.rank),
    )


def large_exchange(group, nbytes):
    got = group.exchange(bytes([group.rank]) * nbytes, "large")
    return [(len(part), set(part)) for part in got]


def descriptors(group):
    """Each rank offers two pipes; the next rank reads them."""
    ends = [os.pipe() for _ in range(2)]
    for k, (_, write) in enumerate(ends):
        os.write(write, b"%d.%d" % (group.rank, k))
    parts = group.exchange(b"p%d" % group.rank, "pipes", fds=[read for read, _ in ends])
    source = (group.rank + 1) % group.size
    texts = [os.read(fd, 8).decode() for fd in parts[source][1]]
    group.barrier("read")
    for fd in [fd for _, fds in parts for fd in fds] + [fd for end in ends for fd in end]:
        os.close(fd)
    return [payload for payload, _ in parts], texts


def open_descriptors(group):
    """Number of descriptors before and after ten exchanges of one."""
    group.barrier()  # the coordinator has sent the control segment everywhere, and closed it
    before = len(os.listdir("/proc/self/fd"))
    group.barrier()  # nobody's pipe is under way while another rank counts
    read, write = os.pipe()
    for _ in range(10):
        for _, fds in group.exchange(b"", "pipe", fds=[read]):
            for fd in fds:
                os.close(fd)
    os.close(read)
    os.close(write)
    group.barrier()
    return before, len(os.listdir("/proc/self/fd"))


def too_many_descriptors(group):
    return raised(lambda: group.exchange(b"", "many", fds=[0] * 200))


def disagree(group):
    """Every rank names another call; then another value; then the group still works."""
    call = raised(lambda: group.exchange(b"", f"alloc {group.rank}") if group.rank else group.barrier("here"))
    value = raised(lambda: group.agree(8 if group.rank == 0 else 6, "count"))
    return call, value, group.exchange(b"x", "after")


def one_fails(group, failing):
    def action():
        if group.rank == failing:
            raise MemoryError("no room")
        return "fine"

    try:
        return group.all_or_none("allocate", action), None
    except (MemoryError, PeerFailed) as error:
        got = type(error).__name__, str(error)
    group.barrier("still sound")
    return None, got


def pairs(group):
    """Overlapping groups: neighbours in a ring, each with its own numbering; and one in reverse order."""
    sizes = []
    for k in range(group.size):
        chosen = [k, (k + 1) % group.size]
        pair = group.subgroup(chosen)
        assert (pair is not None) == (group.rank in chosen)
        if pair is not None:
            assert pair.rank == chosen.index(group.rank)
            sizes.append((k, pair.exchange(b"%d" % group.rank, "pair")))
            pair.close()
    reverse = group.subgroup(list(reversed(range(group.size))))
    assert reverse is not None
    inner = reverse.subgroup([0])
    return sizes, reverse.rank, reverse.world_ranks, None if inner is None else inner.world_ranks


def outsiders(group):
    """F59: calls of a subgroup do not shift those of the others."""
    sub = group.subgroup([0, 1])
    if sub is not None:
        sub.exchange(b"", "a")
        sub.exchange(b"", "b")
    return group.exchange(b"%d" % group.rank, "world")


def subgroup_fails_alone(group):
    sub = group.subgroup([0, 1])
    if sub is not None:
        if sub.rank == 1:
            sub.fail("my reason")
        got = raised(lambda: sub.barrier("never"))
    else:
        got = None
    group.barrier("the world is sound")
    return got, group.failure() is None


def wrong_subgroups(group):
    return [raised(lambda ranks=ranks: group.subgroup(ranks)) for ranks in ([], [0, 0], [group.size])]


def fail_and_recover(group):
    """Rank 1 fails the group; all see it, also as the word that kernels poll; then twice a recovery."""
    word = ctypes.c_int32.from_address(group.abort_address)
    order = []
    group.on_recover(lambda: order.append("first"))
    group.on_recover(lambda: order.append("second"))
    forgotten = order.append
    group.on_recover(forgotten)
    group.forget_recover(forgotten)
    seen = []
    for turn in range(2):
        if group.rank == 1:
            group.fail(f"WaitTimeout: slot {turn}")
        error = raised(lambda: group.barrier("never"))
        seen.append((error, awaited(word), str(group.failure())))
        group.recover()
        seen.append((group.exchange(b"%d" % group.rank, "after"), word.value, group.failure(), group.generation))
        group.barrier("everybody has looked")
    return seen, order


def recover_callback_fails(group):
    def callback():
        if group.rank == 0:
            raise RuntimeError("cannot reset")

    group.on_recover(callback)
    try:
        group.recover()
    except (RuntimeError, PeerFailed) as error:
        return type(error).__name__, str(error)


def killed(group, victim):
    """`victim` is killed while the others are in a barrier, or about to be."""
    states = group.exchange(b"%d" % os.getpid(), "pids")
    if group.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    group.barrier("never")
    return states


def raises(group, victim):
    if group.rank == victim:
        raise ValueError("bad input")
    group.barrier("never")


def exits(group, victim, status):
    if group.rank == victim:
        sys.exit(status)
    group.barrier("never")


def awaited(word):
    """The word's value once it is not 0, which takes rank 0 a moment; bounded."""
    end = time.monotonic() + 10
    while word.value == 0 and time.monotonic() < end:
        os.sched_yield()
    return word.value


def late(group):
    """The last rank comes once the group has failed for want of it, which it learns from the word that kernels poll."""
    word = ctypes.c_int32.from_address(group.abort_address)
    if group.rank == group.size - 1:
        awaited(word)
        return raised(lambda: group.barrier("x"))
    return raised(lambda: group.barrier("x", timeout_s=0.2))


def unpicklable(group):
    return lambda: None


class Odd(Exception):
    """Cannot be rebuilt from its pickle."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def ends_early(group, how):
    group.barrier("all are here")
    if group.rank == 1:
        sys.exit(0) if how == "exit" else os._exit(0)
    return "a result"


def raises_odd(group):
    raise Odd(1, 2)


def forked(group):
    """A child of os.fork: what it may do, and that the parent's group survives it."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        got = [raised(lambda: group.barrier()), raised(lambda: group.check()), raised(init)]
        os.write(write, repr(got).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        got = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0
    group.barrier("after the fork")
    return got


def waits_for_itself(group):
    """Until the group fails: a barrier that rank 0 alone is in."""
    if group.rank == 0:
        group.barrier("never")
    end = time.monotonic() + 20
    while group.failure() is None and time.monotonic() < end:
        os.sched_yield()


def batch(group, names):
    """Several of these functions in one job: starting ranks takes longer than what most of them do."""
    results = {}
    for name, args in names:
        results[name, args] = globals()[name](group, *args)
        group.barrier(f"after {name}")
    return results


def odd_message(group):
    """Rank 0 sends a call that no group method makes; then all of them go on."""
    kind, text = None, None
    if group.rank == 0:
        request = Arrive(next(group._link.tickets), [], 0, 0, "odd", 20.0, b"", ())
        reply, _ = group._link.call(request, ())
        error = reply.error()
        kind, text = type(error).__name__, str(error)
    return kind, text, group.exchange(b"%d" % group.rank, "after", timeout_s=20)
