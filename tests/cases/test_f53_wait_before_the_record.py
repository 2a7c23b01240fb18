"""A stream waits for an event that is recorded only later: never a silent no-op."""

import pytest

import peertile as pt
from peertile.checker.check import check
from peertile.errors import UsageError


@pytest.mark.sentence("MM-32")
def test_waiting_for_an_event_never_recorded_is_an_error() -> None:
    def main(group) -> None:
        driver = pt.current_device().driver
        event, stream = driver.create_event(), driver.create_stream()
        with pytest.raises(UsageError, match="expected an event that was recorded, got one never recorded"):
            driver.wait_event(stream, event)

    assert check(main, 1, schedules=1).clean
