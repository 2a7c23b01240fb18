"""Memory is given back while a queued reader still needs it."""

import numpy as np

import peertile as pt
import peertile.language as T
from peertile.checker.check import check
from peertile.sim.verdicts import VerdictKind


@pt.kernel
def twice(z: T.Exclusive, x: T.Shared):
    z.store(x.load_like(z) * 2.0)


def test_a_raw_free_under_a_queued_reader_is_reported() -> None:
    def main(group) -> None:
        driver = pt.current_device().driver
        x, z = pt.asarray(np.ones(16, np.float32)), pt.zeros((16,), pt.f32)
        running = twice(z.partition(16), x).submit()
        driver.free(x.address)
        running.wait()

    (verdict,) = check(main, 1, schedules=20).verdicts
    assert verdict.kind is VerdictKind.LIFETIME
    assert "twice on rank 0" in str(verdict)


def test_dropping_the_tensor_is_fine_as_the_submission_holds_it() -> None:
    def main(group) -> None:
        z = pt.zeros((16,), pt.f32)
        for k in range(4):
            x = pt.asarray(np.full(16, k, np.float32))
            running = twice(z.partition(16), x).submit()
            del x
            other = pt.asarray(np.full(16, -1, np.float32))
            running.wait()
            assert z.numpy().tolist() == [2.0 * k] * 16
            del other

    assert check(main, 1, schedules=20).clean
