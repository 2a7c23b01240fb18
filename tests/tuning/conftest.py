"""A clock that only candidates move: figures are exact, and no test waits for time to pass."""

from contextvars import ContextVar

import pytest


class FakeClock:
    """Seconds of the calling rank, which has a context of its own, as a thread or on a simulated machine: `advance`
    moves them on."""

    def __init__(self):
        self._now = ContextVar("now", default=0.0)

    def __call__(self):
        return self._now.get()

    def advance(self, seconds):
        self._now.set(self() + seconds)


@pytest.fixture
def clock():
    return FakeClock()
