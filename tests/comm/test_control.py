"""The control segment: words, causes, blocks, and that processes share it."""

import ctypes
import os

import pytest

from peertile.comm.control import BLOCKS, CAUSE_BYTES, RankState, Segment
from peertile.errors import AllocationError


@pytest.fixture
def block():
    block = Segment.create(3, shared=False).block(0)
    block.reset(0)
    return block


def test_a_fresh_block_is_sound(block):
    assert (block.aborted, block.failure(), block.generation) == (False, None, 0)


def test_a_failure_sets_the_word_that_kernels_poll(block):
    word = ctypes.c_int32.from_address(block.abort_address)
    assert word.value == 0
    block.fail(2, "it fell over")
    assert word.value == 1
    failure = block.failure()
    assert (failure.rank, failure.cause, str(failure)) == (2, "it fell over", "rank 2 failed: it fell over")


def test_the_first_failure_wins(block):
    block.fail(1, "first")
    block.fail(2, "second")
    assert str(block.failure()) == "rank 1 failed: first"


def test_reset_clears_the_failure_and_sets_the_generation(block):
    block.fail(1, "first")
    block.reset(5)
    assert (block.failure(), block.generation) == (None, 5)


def test_a_long_cause_is_cut_between_characters(block):
    block.fail(0, "€" * CAUSE_BYTES)
    assert block.failure().cause == "€" * (CAUSE_BYTES // 3)


def test_rank_states_are_apart(block):
    for rank in range(3):
        block.set_rank(rank, 100 + rank, RankState.ALIVE, rank)
    block.set_rank(1, 101, RankState.DEAD, 7)
    assert [block.rank(r) for r in range(3)] == [
        (100, RankState.ALIVE, 0),
        (101, RankState.DEAD, 7),
        (102, RankState.ALIVE, 2),
    ]


@pytest.mark.parametrize("ranks", [1, 48, 49, 500])
def test_blocks_do_not_overlap(ranks):
    segment = Segment.create(ranks, shared=False)
    first, second = segment.block(0), segment.block(1)
    first.set_rank(ranks - 1, -1, RankState.DEAD, -1)
    second.reset(0)
    assert not second.aborted
    second.fail(0, "x")
    assert first.rank(ranks - 1) == (-1, RankState.DEAD, -1)
    assert first.abort_address % 4096 == 0


def test_another_mapping_of_the_segment_sees_the_failure():
    mine = Segment.create(2, shared=True)
    theirs = Segment.attach(os.dup(mine.fd))
    mine.close_fd()
    mine.block(3).fail(1, "over there")
    assert str(theirs.block(3).failure()) == "rank 1 failed: over there"
    assert mine.block(3).abort_address != theirs.block(3).abort_address


def test_blocks_end():
    with pytest.raises(AllocationError) as caught:
        Segment.create(1, shared=False).block(BLOCKS)
    assert str(caught.value) == "control segment: all 1024 blocks are in use"
