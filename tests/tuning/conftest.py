"""A clock that only candidates move: figures are exact, and no test waits for time to pass."""

import threading

import pytest


class FakeClock:
    """Seconds of the calling thread, which is a rank: `advance` moves them on."""

    def __init__(self):
        self._of = threading.local()

    def __call__(self):
        return getattr(self._of, "now", 0.0)

    def advance(self, seconds):
        self._of.now = self() + seconds


@pytest.fixture
def clock():
    return FakeClock()
