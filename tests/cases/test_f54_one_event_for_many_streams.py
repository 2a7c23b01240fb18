"""One event is recorded on several streams in turn and waited for once: only the last record counts."""

import pytest

import peertile as pt
import peertile.language as T
from peertile.checker.check import check
from peertile.sim.verdicts import VerdictKind


@pt.kernel
def fill(z: T.Exclusive, value: T.f32):
    z.store(T.full((16,), 1.0, T.f32) * value)


@pytest.mark.sentence("MM-21")
@pytest.mark.parametrize("events", [1, 2])
def test_only_the_last_record_is_waited_for(events: int) -> None:
    def main(group) -> None:
        device = pt.current_device()
        driver = device.driver
        made = [driver.create_event() for _ in range(events)]
        parts = [pt.zeros((16,), pt.f32) for _ in range(2)]
        streams = [device.stream() for _ in range(3)]
        total = pt.zeros((32,), pt.f32)
        keep = []
        for k in range(2):
            keep.append(fill(parts[k].partition(16), float(k + 1)).submit(streams[k]))
            driver.record_event(streams[k].handle, made[k % events])
        for event in made:
            driver.wait_event(streams[2].handle, event)
        for k in range(2):
            driver.copy(streams[2].handle, total.address + 64 * k, parts[k].address, 64, name="gather")
        driver.wait(driver.last_ticket(streams[2].handle))
        for submission in keep:
            submission.wait()
        if events == 2:
            assert total.numpy().tolist() == [1.0] * 16 + [2.0] * 16

    report = check(main, 1, schedules=20)
    assert report.clean == (events == 2), str(report)
    if events == 1:
        assert report.verdicts[0].kind is VerdictKind.RACE
        assert "gather" in str(report.verdicts[0])
