"""F05: a word that another rank writes, polled at device scope or without an order, is refused or orders nothing."""

import numpy as np
import pytest
from case_ranks import spawn
from tests.frontend.helpers import error
from tests.frontend.test_syntax import compiled

import peertile as pt
import peertile.language as T

pytestmark = pytest.mark.any_device


def test_a_narrow_scope_on_a_peer_is_a_compile_error():
    for word in ("T.ld(words, (0,), order=T.acquire, scope=T.device)", "T.wait_ge(words, 1, (0,), scope=T.device)"):
        name = word.partition("(")[0]
        assert error(compiled(word, "words")).message == (
            f"{name}: scope: expected T.system on peer memory, got T.device; other ranks would not be bound to see it"
        )


def test_a_wait_without_an_order_is_a_compile_error():
    assert error(compiled("T.wait_ge(words, 1, (0,), order=T.weak)", "words")).message == (
        "T.wait_ge: order: expected one of T.relaxed, T.acquire, got T.weak"
    )


@pt.kernel
def repaired(x: T.Peer, flag: T.Peer, out: T.Exclusive):
    if x.rank == 0:
        x.at(1).store((0,), T.full((64,), 7, T.i64))
        T.st(flag, 1, (0,), rank=1, order=T.release)
    else:
        T.wait_ge(flag, 1, (0,))
    out.store(x.local.load((0,), (64,)))


def ranks(group):
    with pt.SymmetricHeap(group, 1 << 20) as heap:
        x, flag, out = heap.zeros((64,), pt.i64), heap.zeros((1,), pt.i32), pt.zeros((64,), pt.i64)
        repaired(x, flag, out.partition(64)).sync()
        group.barrier("done")
    return out.numpy()


@pytest.mark.parametrize("repeat", range(3))
def test_the_repaired_form_reads_the_payload(repeat):
    assert np.all(spawn(ranks, 2)[1] == 7)
