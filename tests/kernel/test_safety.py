"""What the verifier refuses of orders, scopes and words, and that a fact about an index ends where it stops being true."""

import numpy as np
import pytest

import peertile as pt
import peertile.language as T
from peertile.errors import CompileError, OutOfBounds

pytestmark = pytest.mark.any_device


# ---------------------------------------------------------------- orders, scopes, words


@pt.kernel
def relaxed_wait(out: T.Exclusive, words: T.Peer):
    T.wait_ge(words.local, 1, (0,), order=T.relaxed)
    out.store(words.local.load((1,), (1,)))


@pt.kernel
def acquiring_wait(out: T.Exclusive, words: T.Peer):
    T.wait_ge(words.local, 0, (0,))
    out.store(words.local.load((1,), (1,)))


@pt.kernel
def empty_release(out: T.Exclusive, words: T.Peer):
    out.store(T.full((1,), 1, T.i32))
    T.st(words.local, 1, (0,), order=T.release)
    T.st(words.local, 1, (0,), order=T.release)


@pt.kernel
def narrow_store(out: T.Exclusive, words: T.Peer):
    T.st(words, 1, (0,), rank=0, order=T.release, scope=T.device)
    out.store(T.full((1,), 1, T.i32))


@pt.kernel
def unmarked(out: T.Exclusive, words: T.Peer):
    T.unsafe.token()
    out.store(T.full((1,), 1, T.i32))


REFUSED = {
    relaxed_wait: "wait: order: a relaxed wait orders nothing unless a fence follows before the next access",
    empty_release: "word_store: order: this release publishes nothing: the one before it is the same",
    narrow_store: "T.st: scope: expected T.system on peer memory, got T.device; other ranks would not be bound to see it",
    unmarked: "T.unsafe.token in the kernel `unmarked`, which is not unsafe; mark it @pt.kernel(unsafe=True), or use "
    "T.Peer, signals or a mailbox",
}


@pytest.mark.native_only  # a check records what breaks a rule of order, and runs it
@pytest.mark.feature("S3", "cpu")
@pytest.mark.parametrize("kernel", REFUSED, ids=lambda k: k.name)
def test_what_orders_nothing_reaches_too_few_or_is_unsafe_unmarked_is_refused_before_it_runs(kernel):
    with pt.SymmetricHeap(pt.init(), size_bytes=1 << 14) as heap:
        out, words = pt.zeros((1,), pt.i32), heap.zeros((8,), pt.i32)
        with pytest.raises(CompileError) as caught:
            kernel(out.partition(1), words).sync()
        assert caught.value.message == REFUSED[kernel]
        assert out.numpy().tolist() == [0]
        acquiring_wait(out.partition(1), words).sync()


# ---------------------------------------------------------------- facts about an index


@pt.kernel
def one_branch(z: T.Exclusive, x: T.Shared, index: T.i64):
    at = index
    if index > 1:
        at = T.i64(1)
    z.store(x.load((at,), (4,)))


@pt.kernel
def both_branches(z: T.Exclusive, x: T.Shared, index: T.i64):
    at = index
    if (index > 1) | (index < 0):
        at = T.i64(1)
    z.store(x.load((at,), (4,)))


@pt.kernel
def carried(z: T.Exclusive, x: T.Shared, index: T.i64):
    at = T.i64(0)
    for _ in T.range(index):
        at = at + 1
    z.store(x.load((at,), (4,)))


@pt.kernel
def given_anew(z: T.Exclusive, x: T.Shared, index: T.i64):
    at = T.minimum(index, T.i64(2))
    at = at + index
    z.store(x.load((at,), (4,)))


@pt.kernel
def wraps(z: T.Exclusive, x: T.Shared, index: T.i64):
    # The sum of two positive numbers is positive, unless it passes 2^63.
    large = T.maximum(index, T.i64(0))
    z.store(x.load((large + large,), (4,)))


CAUGHT = [
    (one_branch, 1, -5, -5), (both_branches, 1, None, None), (carried, 2, 3, 3), (given_anew, 1, 2, 4),
    (wraps, 1, 1 << 62, -(1 << 63)),
]  # fmt: skip


@pytest.mark.feature("S4", "cpu")
@pytest.mark.parametrize(("kernel", "good", "bad", "got"), CAUGHT, ids=lambda v: getattr(v, "name", None))
def test_a_fact_that_a_join_a_loop_a_new_value_or_a_wrap_ended_proves_nothing(kernel, good, bad, got):
    x, z = pt.asarray(np.arange(10, dtype=np.float32)), pt.zeros((4,), pt.f32)
    kernel(z.partition(4), x, good).sync()
    before = z.numpy().tolist()
    assert before != [0] * 4
    if bad is None:
        for index in (-5, 7, 1 << 40):
            kernel(z.partition(4), x, index).sync()
            assert z.numpy().tolist() == [4, 5, 6, 7]
        return
    with pytest.raises(OutOfBounds) as caught:
        kernel(z.partition(4), x, bad).sync()
    assert str(caught.value).startswith(f"tile index of axis 0 of x is out of bounds: got {got}, limit 3 (program 0, ")
    assert z.numpy().tolist() == before
