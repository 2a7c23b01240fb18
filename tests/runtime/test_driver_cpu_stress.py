"""Random operations from several host threads on several streams of the cpu driver, against a model in Python."""

import random
import threading

import pytest

from peertile.memory_model import Cmp
from peertile.runtime.driver import FaultKind, LaunchOptions, Status
from peertile.runtime.drivers.cpu import CpuDriver
from peertile.testing.cpu_kernels import cpu_kernels
from peertile.testing.driver_suite import args, read_words, words

WORDS = 40
OPTIONS = LaunchOptions("stress", 30 * 10**9)


class Queue:
    """One stream, its memory, and what that memory must hold in the end."""

    def __init__(self, device, modules, rng):
        self.device, self.modules, self.rng = device, modules, rng
        self.stream = device.create_stream()
        self.model = [0] * (2 * WORDS)
        self.base = words(device, self.stream, self.model)
        self.arrivals = words(device, self.stream, [0] * 64)
        self.calls = []

    def step(self):
        rng, device, model = self.rng, self.device, self.model
        kind = rng.choice(["fill", "copy", "add", "add", "barrier", "call", "value", "sync", "graph", "fault", "wait"])
        at, n, value = rng.randrange(WORDS), rng.randrange(1, WORDS), rng.randrange(1 << 40)
        n = min(n, WORDS - at)
        here = self.base + 8 * at
        caller = rng.random() < 0.3
        if kind == "fill":
            device.fill(self.stream, here, value, 8, n, on_caller=caller)
            model[at : at + n] = [value] * n
        elif kind == "copy":
            device.copy(self.stream, here + 8 * WORDS, here, 8 * n, on_caller=caller)
            model[WORDS + at : WORDS + at + n] = model[at : at + n]
        elif kind in ("add", "sync"):
            block = args(here, here + 8 * WORDS, here)
            if kind == "sync":
                assert device.launch_sync(self.stream, self.modules["add"], (n, 1, 1), block, OPTIONS) is None
            else:
                device.launch(self.stream, self.modules["add"], (n, 1, 1), block, OPTIONS, on_caller=caller)
            for k in range(at, at + n):
                model[k] = (model[k] + model[k + WORDS] + (1 << 63)) % (1 << 64) - (1 << 63)
        elif kind == "barrier":
            block = args(here)
            device.launch(self.stream, self.modules["barrier"], (n, 1, 1), block, OPTIONS, on_caller=caller)
            model[at : at + n] = [n] * n
        elif kind == "call":
            self.calls.append(0)
            k = len(self.calls) - 1
            device.callback(self.stream, lambda: self.calls.__setitem__(k, 1))
        elif kind == "value":
            device.write_value(self.stream, here, value, 64)
            device.wait_value(self.stream, here, value, 64, Cmp.EQ, timeout_ns=10**10)
            model[at] = value
        elif kind == "graph":
            device.begin_capture(self.stream)
            for _ in range(5):
                self.device.launch(
                    self.stream, self.modules["add"], (n, 1, 1), args(here, here + 8 * WORDS, here), OPTIONS
                )
            graph = device.instantiate(device.end_capture(self.stream))
            device.launch_graph(self.stream, graph, on_caller=caller)
            for _ in range(5):
                for k in range(at, at + n):
                    model[k] = (model[k] + model[k + WORDS] + (1 << 63)) % (1 << 64) - (1 << 63)
        elif kind == "fault":
            ticket = device.launch(self.stream, self.modules["fail"], (n, 1, 1), args(self.arrivals, n - 1), OPTIONS)
            skipped = device.fill(self.stream, here, 77, 8, 1, on_caller=caller)
            assert device.wait(skipped) is Status.SKIPPED
            fault = device.take_fault(self.stream)
            assert (fault.kind, fault.program, fault.sequence) == (FaultKind.ASSERT, n - 1, ticket.sequence)
        else:
            assert device.wait(device.last_ticket(self.stream), rng.choice([None, 5, 0])) is not Status.FAULTED

    def check(self):
        assert read_words(self.device, self.stream, self.base, 2 * WORDS) == self.model
        assert all(self.calls)


@pytest.mark.parametrize(
    ("threads", "steps"),
    [(1, 60), (3, 60), pytest.param(1, 3000, marks=pytest.mark.long), pytest.param(3, 3000, marks=pytest.mark.long)],
)
def test_random_operations_end_as_the_model_says(threads, steps, seed):
    device = CpuDriver(threads=threads).open()
    kernels = cpu_kernels()
    modules = {name: device.load_module(getattr(kernels, name)) for name in ("add", "barrier", "fail")}
    problems = []

    def use(k):
        try:
            queue = Queue(device, modules, random.Random(seed + k))
            for step in range(steps):
                queue.step()
                if step % 20 == 19:
                    queue.check()
            queue.check()
        except BaseException as error:
            problems.append(error)

    hosts = [threading.Thread(target=use, args=(k,)) for k in range(3)]
    for host in hosts:
        host.start()
    for host in hosts:
        host.join(100)
    assert problems == []
    device.close()
