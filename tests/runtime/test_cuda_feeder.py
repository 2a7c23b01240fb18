"""Launches posted to the feeder of a cuda device, at the speed of native code: each is made once, in order.

The NVIDIA driver is stood in for by native functions that check the order themselves, so that nothing but the feeder and
its posters takes time, and neither needs the interpreter lock.
"""

import ctypes
import random
import threading
import time

import pytest
from tests.runtime.fake_cuda import SUITE, FakeCuda

from peertile.backends.cpu import jit
from peertile.runtime.driver import Status
from peertile.runtime.drivers import cuda_feeder, cuda_stream
from peertile.runtime.drivers.cuda import CudaDriver
from peertile.runtime.drivers.cuda_native import Lane
from peertile.testing.driver_suite import args, options

TEXT = """
@wrong = global i64 0
; The first parameter is the address of a counter, the second what it holds before this launch.
define i32 @counted(i64 %f, i32 %a, i32 %b, i32 %c, i32 %d, i32 %e, i32 %g, i32 %h, i64 %s, ptr %params, i64 %x) {
  %first = load ptr, ptr %params
  %second.p = getelementptr ptr, ptr %params, i64 1
  %second = load ptr, ptr %second.p
  %counter = load ptr, ptr %first
  %want = load i64, ptr %second
  %have = load i64, ptr %counter
  %same = icmp eq i64 %have, %want
  br i1 %same, label %ok, label %no
no:
  %before = atomicrmw add ptr @wrong, i64 1 seq_cst
  br label %ok
ok:
  %next = add i64 %have, 1
  store i64 %next, ptr %counter
  ret i32 0
}
define i64 @how_many_wrong() {
  %wrong = load atomic i64, ptr @wrong seq_cst, align 8
  ret i64 %wrong
}
define i32 @written(i64 %s, ptr %at, i64 %value, i32 %flags) {
  store atomic i64 %value, ptr %at release, align 8
  ret i32 0
}
define i32 @current(ptr %found) {
  store i64 100, ptr %found
  ret i32 0
}
define i32 @nothing(ptr %p) {
  ret i32 0
}
"""


class Counted(FakeCuda):
    """Launches count, markers arrive at once."""

    def __init__(self):
        super().__init__()
        names = ("counted", "written", "current", "nothing", "how_many_wrong")
        self._made = jit.load_object(jit.compile_text(TEXT, level=2), names)
        self._call = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_int64] * 11)(self._made["counted"])
        self._wrong = ctypes.CFUNCTYPE(ctypes.c_int64)(self._made["how_many_wrong"])

    def entries(self):
        m = self._made
        return m["counted"], m["counted"], m["written"], m["current"], m["nothing"], m["nothing"], m["nothing"]

    def current_context(self):
        return 100

    def write_value(self, stream, address, value, width):
        ctypes.c_uint64.from_address(address).value = value

    def launch(self, function, blocks, threads, shared_bytes, stream, params, *rest):
        self._call(*[0] * 9, params, 0)


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(cuda_feeder, "LEAST_CORES", 1)
    monkeypatch.setattr(cuda_stream, "AFTER", 1)
    device = CudaDriver(api=Counted()).open()
    yield device
    device.close()


def use(device, launch, seed, seconds, posted):
    """Launch in every way there is, on a stream of its own."""
    rng, s = random.Random(seed), device.create_stream()
    counter = ctypes.c_int64(0)
    at, made, begin = ctypes.addressof(counter), 0, time.monotonic()
    # Longer on a busy machine, where the feeder's thread starts late.
    while time.monotonic() < begin + (seconds if s.lane[Lane.HEAD] else 20):
        way = rng.random()
        if way < 0.6:
            for _ in range(rng.randrange(1, 60)):
                device.enqueue(s, launch, args(at, made, 0))
                made += 1
        elif way < 0.75:
            count = rng.randrange(1, 40)
            device.launch_many(s, [(launch, args(at, made + k, 0)) for k in range(count)])
            made += count
        elif way < 0.85:
            assert device.run_prepared(s, launch, args(at, made, 0)) is None
            made += 1
        elif way < 0.95:
            assert device.wait(device.last_ticket(s), 20) is Status.DONE
            assert counter.value == made
        else:
            time.sleep(rng.choice([0, 0.0005]))  # the feeder may go to sleep
    assert device.wait(device.last_ticket(s), 20) is Status.DONE
    assert counter.value == made
    posted.append(s.lane[Lane.HEAD])


@pytest.mark.parametrize("seconds", [0.4, pytest.param(10, marks=pytest.mark.long)])
def test_every_launch_is_made_once_and_in_order(device, seconds):
    launch = device.prepare_launch(device.load_module(SUITE.add), (1, 1, 1), options("add"))
    posted, errors = [], []

    def run(seed):
        try:
            use(device, launch, seed, seconds, posted)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not errors
    assert len(posted) == 4
    assert sum(posted) > 0
    assert device.api._wrong() == 0


def test_a_device_whose_feeder_sleeps_closes_at_once(device):
    s = device.create_stream()
    launch = device.prepare_launch(device.load_module(SUITE.add), (1, 1, 1), options("add"))
    counter = ctypes.c_int64(0)
    for k in range(50):
        device.enqueue(s, launch, args(ctypes.addressof(counter), k, 0))
    assert device.wait(device.last_ticket(s), 20) is Status.DONE
    assert counter.value == 50
    begin = time.monotonic()
    device.close()
    assert time.monotonic() - begin < 0.9
    device.close = lambda: None
