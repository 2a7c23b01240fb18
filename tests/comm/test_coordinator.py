"""The coordinator as a state machine: no sockets, no threads, a clock that the test sets."""

import itertools

import pytest

from peertile.comm.control import RankState, Segment
from peertile.comm.coordinator import RECOVER, Arrive, Close, Coordinator, Dying, Fail, Leave, name_ranks
from peertile.errors import PeerFailed, SymmetryError, WaitTimeout


class Job:
    """A coordinator, and a mailbag for each rank."""

    def __init__(self, size):
        self.segment = Segment.create(size, shared=False)
        self.mail = {rank: [] for rank in range(size)}
        self.closed = []
        self.now = 0.0
        self.tickets = itertools.count()
        pids = [1000 + rank for rank in range(size)]
        self.coordinator = Coordinator(pids, self.segment, self.deliver, self.closed.append)

    def deliver(self, rank, reply, fds):
        self.mail[rank].append((reply, fds))

    def arrive(self, rank, call, *, sequence=0, group=0, generation=0, payload=b"", timeout_s=10, members=(), fds=()):
        request = Arrive(next(self.tickets), group, generation, sequence, call, timeout_s, payload, members)
        self.coordinator.handle(rank, request, fds, self.now)

    def tell(self, rank, request):
        self.coordinator.handle(rank, request, (), self.now)

    def at(self, now):
        self.now = now
        self.coordinator.expire(now)

    def take(self, rank):
        """The one reply of a rank."""
        ((reply, _),) = self.mail[rank]
        self.mail[rank].clear()
        return reply

    def error(self, rank, kind):
        error = self.take(rank).error()
        assert type(error) is kind
        return str(error)

    def block(self, key=0):
        return self.segment.block(key)


def test_a_call_ends_when_all_have_arrived():
    job = Job(3)
    for rank in (2, 0):
        job.arrive(rank, "exchange(x)", payload=b"%d" % rank)
    assert job.mail == {0: [], 1: [], 2: []}
    job.arrive(1, "exchange(x)", payload=b"1")
    assert [job.take(rank).payloads for rank in range(3)] == [(b"0", b"1", b"2")] * 3


def test_descriptors_reach_everybody_and_are_closed_here():
    job = Job(2)
    job.arrive(0, "exchange(x, fds)", fds=(70, 71))
    job.arrive(1, "exchange(x, fds)", fds=(72,))
    for rank in range(2):
        ((reply, fds),) = job.mail[rank]
        assert (reply.fd_counts, fds) == ((2, 1), (70, 71, 72))
    assert job.closed == [70, 71, 72]


def test_descriptors_of_a_call_that_fails_are_closed():
    job = Job(3)
    job.arrive(0, "exchange(x, fds)", fds=(70,))
    job.arrive(1, "barrier()", fds=(71,))
    job.tell(2, Dying("gone"))
    assert sorted(job.closed) == [70, 71]


DISAGREE = "Every rank must make the same calls with the same arguments in the same order"


@pytest.mark.feature("D2", "cpu")
def test_f55_different_calls_are_an_error_at_once():
    job = Job(2)
    job.arrive(0, "agree(alloc)")
    job.arrive(1, "barrier()")
    seen = "rank 0: agree(alloc); rank 1: barrier()"
    text = f"ranks disagree about collective call 1 of the world group: {seen}. {DISAGREE}"
    assert [job.error(rank, SymmetryError) for rank in range(2)] == [text, text]


def test_f58_a_rank_that_comes_late_to_a_disagreement_hears_of_it_too():
    job = Job(4)
    for rank, call in enumerate(["reduce(fast)", "reduce(fast)", "reduce(slow)"]):
        job.arrive(rank, call)
    for rank in range(3):
        job.error(rank, SymmetryError)
    job.arrive(3, "reduce(fast)")
    assert job.error(3, SymmetryError) == (
        "ranks disagree about collective call 1 of the world group: ranks 0, 1, 3: reduce(fast); rank 2: reduce(slow). "
        + DISAGREE
    )


def test_the_group_goes_on_after_a_disagreement():
    job = Job(2)
    job.arrive(0, "a()")
    job.arrive(1, "b()")
    job.mail = {0: [], 1: []}
    job.arrive(0, "c()", sequence=1)
    job.arrive(1, "c()", sequence=1)
    assert [job.take(rank).error() for rank in range(2)] == [None, None]
    assert not job.block().aborted


@pytest.mark.feature("D8", "cpu")
def test_f59_groups_count_their_calls_apart():
    job = Job(3)
    for rank in range(3):
        job.arrive(rank, "subgroup([0, 1])", members=(0, 1))
    keys = {job.take(rank).created for rank in range(3)}
    (key,) = keys
    job.arrive(0, "a()", group=key)
    for rank in range(3):
        job.arrive(rank, "b()", sequence=1)
    job.arrive(1, "a()", group=key)
    assert [len(job.mail[rank]) for rank in range(3)] == [2, 2, 1]
    assert all(reply.error() is None for rank in range(3) for reply, _ in job.mail[rank])


def test_f64_a_missing_rank_ends_the_call_at_its_bound_and_fails_the_group():
    job = Job(4)
    job.arrive(1, "barrier(x)", timeout_s=10)
    job.now = 4.0
    job.arrive(2, "barrier(x)", timeout_s=10)
    assert job.coordinator.next_deadline() == 10.0
    job.at(9.9)
    assert job.mail[1] == []
    job.at(10.0)
    bound = "10 s (PEERTILE_WAIT_TIMEOUT_S)"
    text = f"barrier(x): ranks 0, 3 of the world group did not arrive within {bound}; ranks 1, 2 waited"
    assert [job.error(rank, WaitTimeout) for rank in (1, 2)] == [text, text]
    job.arrive(0, "barrier(x)")
    assert job.error(0, PeerFailed) == f"rank 1 failed: WaitTimeout: {text}"
    assert str(job.block().failure()) == f"rank 1 failed: WaitTimeout: {text}"
    assert job.coordinator.next_deadline() is None


def test_the_shortest_bound_of_those_who_wait_counts():
    job = Job(3)
    job.arrive(0, "barrier()", timeout_s=100)
    job.arrive(1, "barrier()", timeout_s=2)
    job.at(2.0)
    assert "rank 2 of the world group did not arrive within 2 s" in job.error(0, WaitTimeout)


@pytest.mark.feature("S5", "cpu")
def test_a_death_fails_every_group_of_the_rank_and_no_other():
    job = Job(4)
    for members in ((0, 1), (2, 3)):
        for rank in range(4):
            job.arrive(rank, f"subgroup({members})", members=members, sequence=members[0])
    job.mail = {rank: [] for rank in range(4)}
    job.arrive(2, "wait()", group=2)
    job.arrive(0, "wait()", sequence=5)
    job.coordinator.lose(3, "its process 1003 ended without leaving the group")
    assert job.error(0, PeerFailed) == "rank 3 failed: its process 1003 ended without leaving the group"
    assert job.error(2, PeerFailed) == "rank 1 failed: its process 1003 ended without leaving the group"
    assert [job.block(key).aborted for key in range(3)] == [True, False, True]
    assert job.block(0).rank(3)[1] is RankState.DEAD
    assert job.block(2).rank(1)[1] is RankState.DEAD


def test_the_cause_that_a_rank_gives_comes_before_its_end():
    job = Job(2)
    job.tell(1, Dying("ValueError: no"))
    job.coordinator.lose(1, "its process ended")
    assert str(job.block().failure()) == "rank 1 failed: ValueError: no"


def test_a_normal_end_is_no_failure_until_somebody_waits():
    job = Job(3)
    job.tell(1, Leave())
    assert not job.block().aborted
    assert job.block().rank(1)[1] is RankState.LEFT
    job.arrive(0, "barrier()")
    assert job.error(0, PeerFailed) == "rank 1 failed: left the group: its program ended normally"
    assert job.block().aborted


def test_a_normal_end_fails_those_who_wait_already():
    job = Job(2)
    job.arrive(0, "barrier()")
    job.tell(1, Leave())
    assert job.error(0, PeerFailed) == "rank 1 failed: left the group: its program ended normally"


def test_recovery_needs_all_and_starts_a_generation():
    job = Job(2)
    job.tell(0, Fail(0, 0, "WaitTimeout: slot 3"))
    job.arrive(1, "barrier()", sequence=4)
    assert job.error(1, PeerFailed) == "rank 0 failed: WaitTimeout: slot 3"
    job.arrive(1, RECOVER, sequence=5)
    assert job.mail[1] == []
    job.arrive(0, RECOVER, sequence=9)
    assert [job.take(rank).generation for rank in range(2)] == [1, 1]
    assert (job.block().failure(), job.block().generation) == (None, 1)
    for rank in range(2):
        job.arrive(rank, "barrier()", generation=1)
    assert [job.take(rank).error() for rank in range(2)] == [None, None]


def test_a_failure_of_the_generation_before_is_ignored():
    job = Job(1)
    job.tell(0, Fail(0, 0, "a"))
    job.arrive(0, RECOVER)
    job.tell(0, Fail(0, 0, "late"))
    assert job.block().failure() is None


def test_recovery_of_a_sound_group_works_and_survives_a_failure_meanwhile():
    job = Job(2)
    job.arrive(0, RECOVER, sequence=3)
    job.tell(1, Fail(0, 0, "meanwhile"))
    job.arrive(1, RECOVER, sequence=3)
    assert [job.take(rank).error() for rank in range(2)] == [None, None]
    assert job.block().failure() is None


def test_recovery_of_a_sound_group_is_a_collective_call():
    job = Job(2)
    for rank in range(2):
        job.arrive(rank, RECOVER)
    assert [job.take(rank).generation for rank in range(2)] == [1, 1]
    job.arrive(0, RECOVER, generation=1)
    job.arrive(1, "barrier()", generation=1)
    assert "rank 0: recover(); rank 1: barrier()" in job.error(0, SymmetryError)


def test_there_is_no_recovery_without_a_rank_that_is_gone():
    job = Job(3)
    job.tell(0, Fail(0, 0, "a"))
    job.arrive(0, RECOVER)
    job.coordinator.lose(2, "killed")
    assert job.error(0, PeerFailed) == "rank 2 failed: killed"
    job.arrive(1, RECOVER)
    assert job.error(1, PeerFailed) == "rank 2 failed: killed"


def test_recovery_is_bounded():
    job = Job(2)
    job.tell(0, Fail(0, 0, "a"))
    job.arrive(0, RECOVER, timeout_s=3)
    assert job.coordinator.next_deadline() == 3.0
    job.at(3.0)
    assert job.error(0, WaitTimeout) == (
        "recover(): rank 1 of the world group did not arrive within 3 s (PEERTILE_WAIT_TIMEOUT_S); rank 0 waited"
    )
    assert str(job.block().failure()) == "rank 0 failed: a"


def test_blocks_of_closed_groups_are_used_again():
    job = Job(2)
    keys = set()
    for turn in range(3000):
        for rank in range(2):
            job.arrive(rank, "subgroup([0, 1])", members=(0, 1), sequence=turn)
        key = job.take(0).created
        assert job.take(1).created == key
        keys.add(key)
        for rank in range(2):
            job.tell(rank, Close(key))
    assert keys == {1}


def subgroup(job, members, *, sequence=0):
    for rank in job.mail:
        job.arrive(rank, f"subgroup({list(members)})", members=members, sequence=sequence)
    return {job.take(rank).created for rank in job.mail}.pop()


def test_who_waits_for_a_rank_that_closed_the_group_is_told_at_once():
    job = Job(3)
    pair = subgroup(job, (1, 2))
    job.arrive(1, "barrier(x)", group=pair)
    job.tell(2, Close(pair))
    assert job.error(1, PeerFailed) == "rank 1 failed: closed the group"  # rank 1 of the pair
    other = subgroup(job, (0, 1, 2), sequence=1)
    job.tell(0, Close(other))
    assert not job.block(other).aborted  # nobody needs it yet
    for rank in (1, 2):
        job.arrive(rank, "barrier(y)", group=other)
        assert job.error(rank, PeerFailed) == "rank 0 failed: closed the group"
    assert str(job.block(other).failure()) == "rank 0 failed: closed the group"
    job.arrive(1, RECOVER, group=other, sequence=1)
    assert job.error(1, PeerFailed) == "rank 0 failed: closed the group"
    assert not job.block().aborted


@pytest.mark.parametrize("end", [Leave(), Dying("a")])
def test_the_block_of_a_group_is_free_once_its_last_rank_is_gone_or_has_closed_it(end):
    job = Job(3)
    key = subgroup(job, (0, 1))
    job.tell(0, Close(key))
    job.tell(1, end)
    job.arrive(0, "barrier(late)", group=key)
    assert job.error(0, SymmetryError) == (
        "barrier(late): the group was recovered or closed while this call was being made"
    )


def test_too_many_groups_are_refused_on_every_rank():
    job = Job(2)
    for turn in range(1024):
        for rank in range(2):
            job.arrive(rank, "subgroup([0])", members=(0,), sequence=turn)
    texts = {str(job.mail[rank][-1][0].error()) for rank in range(2)}
    assert texts == {"subgroup([0]): all 1024 groups of this job are in use; close() some of them"}
    assert not job.block().aborted


def test_names_of_ranks():
    assert [name_ranks([]), name_ranks([3]), name_ranks((0, 2))] == ["no rank", "rank 3", "ranks 0, 2"]
