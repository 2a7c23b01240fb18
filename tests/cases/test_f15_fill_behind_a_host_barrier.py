"""A flag is cleared by a fill on a stream and the hosts meet: the fill may still be to come when a peer's notify
arrives, and then wipes it out."""

import pytest

import peertile as pt
import peertile.language as T
from peertile.checker.check import check
from peertile.sim.verdicts import VerdictKind


@pt.kernel
def signal(flag: T.Peer):
    if flag.rank == 1:
        T.st(flag, 1, (0,), rank=0, order=T.release)
    else:
        T.wait_ge(flag, 1, (0,))


def program(sync: bool):
    def main(group) -> None:
        with pt.SymmetricHeap(group, size_bytes=1 << 14) as heap:
            flag = heap.empty((1,), pt.u64)
            device, stream = pt.current_device(), pt.current_device().stream()
            ticket = device.driver.fill(stream.handle, flag.local.address, 0, 8, 1, name="clear the flag")
            if sync:
                device.wait_ticket(ticket)
            group.barrier("cleared")
            signal.grid(1)(flag).sync_on(stream)

    return main


@pytest.mark.sentence("MM-29")
@pytest.mark.slow
def test_a_fill_that_the_hosts_did_not_wait_for_races_with_the_notify() -> None:
    for seed in range(0, 2000, 200):
        report = check(program(False), 2, schedules=1, seed=seed)
        (verdict,) = report.verdicts
        assert verdict.kind is VerdictKind.RACE
        assert "clear the flag" in str(verdict)
        assert "signal on rank 1" in str(verdict)


@pytest.mark.sentence("MM-22")
def test_waiting_for_the_fill_first_is_clean() -> None:
    assert check(program(True), 2, schedules=50).clean


def test_a_signal_of_the_heap_is_zero_on_all_ranks_before_first_use() -> None:
    @pt.kernel
    def meet(ready: T.Signal):
        ready.notify()
        ready.wait()

    def main(group) -> None:
        with pt.SymmetricHeap(group, size_bytes=1 << 14) as heap:
            meet.grid(2)(heap.signal(slots=2)).sync()

    assert check(main, 3, schedules=30).clean
