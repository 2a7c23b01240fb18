"""F16: a wait for equality misses a value that has been overwritten, and says so at its bound; `>=` does not."""

import pytest
from case_ranks import alone

import peertile as pt
import peertile.language as T
from peertile.config import config
from peertile.errors import WaitTimeout

pytestmark = pytest.mark.any_device


@pt.kernel
def runs_ahead(word: T.Peer):
    T.st(word, 1, (0,), order=T.release)
    T.st(word, 2, (0,), order=T.release)


@pt.kernel
def equal(word: T.Peer):
    T.wait_eq(word, 1, (0,))


@pt.kernel
def at_least(word: T.Peer):
    T.wait_ge(word, 1, (0,))


@pytest.mark.sentence("MM-70")
def test_the_stalled_side_misses_the_first_value(monkeypatch):
    monkeypatch.setattr("peertile.config._current", config()._replace(wait_timeout_s=0.2))
    with alone() as heap:
        word = heap.zeros((1,), pt.i32)
        runs_ahead.grid(1)(word).sync()
        at_least.grid(1)(word).sync()
        with pytest.raises(WaitTimeout, match=r"wait for word, slot 0: .* expected 1, last seen 2"):
            equal.grid(1)(word).sync()
