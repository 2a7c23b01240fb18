"""Puts this folder on the path: the functions that spawned ranks run are in `multicast_ranks`, which imports no pytest."""

import secrets
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def seed(record_property):
    """Fresh in every run, and shown with it."""
    found = secrets.randbits(30)
    record_property("seed", found)
    return found
