"""Atomics on memory of peers: which kernels ask for them, and what is said where a pair of devices has none."""

import numpy as np
import pytest

import peertile as pt
import peertile.language as T
from peertile.errors import UnsupportedError


@pt.kernel
def tile_add(x: T.Peer):
    for r in T.ranks():
        x.at(r).atomic_add((0,), T.ones((8,), T.i32))


@pt.kernel
def word_add(x: T.Peer):
    T.atom_add(x, 1, index=(0,), rank=0)


@pt.kernel
def sliced_add(x: T.Peer, how: T.i32):
    part = x.local.slice((8,), (8,))
    if how > 0:
        part.atomic((0,), T.Rmw.MAX, T.full((8,), 5, T.i32))


@pt.kernel(unsafe=True)
def pointer_add(p: T.Pointer):
    T.unsafe.atomic_rmw(p, T.Rmw.ADD, 1, order=T.Order.RELAXED, scope=T.Scope.SYSTEM)


@pt.kernel
def plain(x: T.Peer, s: T.Signal):
    for r in T.ranks():
        x.at(r).store((0,), T.ones((8,), T.i32))
    s.notify()
    s.wait()


@pt.kernel
def own_atomics(h: T.Accumulate, x: T.Peer):
    h.atomic_add((0,), x.local.load((0,), (8,)))


SENTENCE = (
    "{kernel}: the {role} {param} is updated by atomics: expected devices whose atomics reach each other's memory, got a "
    "pair that has no native peer atomics (`peertile info` shows which); let each rank store to words of its own and "
    "signal, or fold in a collective"
)
ATOMIC = {
    "tile_add": lambda x: tile_add.grid(1)(x),
    "word_add": lambda x: word_add.grid(1)(x),
    "sliced_add": lambda x: sliced_add.grid(1)(x, 1),
    "pointer_add": lambda x: pointer_add.grid(1)(x.at(0).pointer()),
}


@pytest.fixture
def heap():
    with pt.SymmetricHeap(pt.init(), 1 << 16) as made:
        yield made


def without_native_atomics(heap):
    """As if the ranks were two GPUs one of which cannot update the memory of the other."""
    first = heap._memory.facts[0]
    heap._memory.facts = [first._replace(device="cuda:aa"), first._replace(device="cuda:bb", peer_atomics=False)]


@pytest.mark.feature("P2", "cpu")
@pytest.mark.parametrize("name", ATOMIC)
def test_a_pair_without_native_atomics_is_told_before_the_launch(heap, name):
    x = heap.zeros((16,), pt.i32)
    without_native_atomics(heap)
    with pytest.raises(UnsupportedError) as caught:
        ATOMIC[name](x).sync()
    role, param = ("pointer", "p") if name == "pointer_add" else ("peer", "x")
    assert str(caught.value) == SENTENCE.format(kernel=name, role=role, param=param)
    assert not x.numpy().any()


@pytest.mark.parametrize("name", ATOMIC)
def test_one_device_has_them_always(heap, name):
    x = heap.zeros((16,), pt.i32)
    ATOMIC[name](x).sync()
    assert x.numpy().any()


def test_kernels_without_atomics_on_peers_are_not_asked(heap):
    x, s, h = heap.zeros((16,), pt.i32), heap.signal(slots=1), pt.zeros(8, pt.i32)
    without_native_atomics(heap)
    plain.grid(1)(x, s).sync()
    own_atomics.grid(1)(h, x).sync()
    np.testing.assert_array_equal(h.numpy(), np.ones(8, np.int32))


def test_a_shared_tensor_asks_the_devices_that_share_it(monkeypatch):
    x = pt.zeros(16, pt.i32)
    shared = x.share_with([])
    assert shared.peer_atomics
    monkeypatch.setattr(type(shared), "peer_atomics", False)
    with pytest.raises(UnsupportedError, match=r"tile_add: the peer x is updated by atomics"):
        tile_add.grid(1)(shared).sync()
