"""Shared operations and the reactor's slots under many random schedules of their threads.

The schedules are forced, not hoped for: threads run one at a time, each may stop before every bytecode of the module
under test, and a seeded generator says whether, and who goes on. The locks of that module are stood in for by ones that stop the
same way, so that a schedule never hangs in a real lock, and a failing seed gives the same schedule again.
"""

import random
import sys
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

import peertile as pt
from peertile.errors import LeaseError, UsageError
from peertile.runtime import once, reactor
from peertile.runtime.driver import Status, Ticket
from peertile.runtime.drivers.cpu import CpuDriver

SCHEDULES = [300, pytest.param(5000, marks=pytest.mark.long)]
MOST_STEPS = 100_000


class Schedule:
    """Threads that take turns: `run(*functions)` runs them all to their ends, in an order that the seed gives."""

    def __init__(self, seed, module):
        self.random = random.Random(seed)
        self.rate = self.random.choice([0.02, 0.1, 0.4])  # few switches find what many hide
        self.file = module.__file__
        self.turns = {}
        self.errors = []
        self.steps = 0
        self.local = threading.local()

    def run(self, *functions):
        threads = [threading.Thread(target=self._thread, args=(k, f)) for k, f in enumerate(functions)]
        self.turns = {k: threading.Semaphore(0) for k in range(len(functions))}
        for thread in threads:
            thread.start()
        self.turns[self.random.choice(list(self.turns))].release()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive(), "a schedule did not end"
        if self.errors:
            raise self.errors[0]

    def _thread(self, number, function):
        self.local.number = number
        self.turns[number].acquire()
        try:
            sys.settrace(self._trace)
            function()
        except BaseException as error:
            self.errors.append(error)
        finally:
            sys.settrace(None)
            del self.turns[number]
            if self.turns:
                self.turns[self.random.choice(list(self.turns))].release()

    def _trace(self, frame, event, argument):
        if frame.f_code.co_filename != self.file:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and self.random.random() < self.rate:
            self.switch()
        return self._trace

    def switch(self):
        """Let somebody go on, perhaps the caller. Outside of a schedule's threads it does nothing."""
        number = getattr(self.local, "number", None)
        if number is None:
            return
        self.steps += 1
        assert self.steps < MOST_STEPS, "a schedule went round in a circle"
        following = self.random.choice(list(self.turns))
        if following != number:
            self.turns[following].release()
            self.turns[number].acquire()


class Lock:
    """A re-entrant lock, and a condition, that waits by letting others go on."""

    def __init__(self, schedule):
        self.schedule = schedule
        self.owner = None
        self.depth = 0
        self.notified = 0

    def __enter__(self):
        me = threading.get_ident()
        while self.owner not in (None, me):
            self.schedule.switch()
        self.owner = me
        self.depth += 1

    def __exit__(self, *error):
        self.depth -= 1
        if not self.depth:
            self.owner = None
        self.schedule.switch()

    def wait(self, timeout=None):
        before, depth = self.notified, self.depth
        self.owner, self.depth = None, 0
        while self.notified == before:
            self.schedule.switch()
        while self.owner is not None:
            self.schedule.switch()
        self.owner, self.depth = threading.get_ident(), depth

    def notify_all(self):
        self.notified += 1


@pytest.fixture(scope="module")
def device():
    device = pt.Device(CpuDriver(threads=1, poison=True).open(6))
    yield device
    device.close()


class Counted(pt.DeviceOp):
    """An operation that counts its executions, and may fail."""

    def __init__(self, device, tensor, *, fails):
        super().__init__()
        self.on, self.tensor, self.fails, self.runs = device, tensor, fails, 0

    @property
    def device(self):
        return self.on

    def execute(self, context):
        self.runs += 1
        if self.fails:
            raise UsageError("refused by hand")
        return context.run(pt.op.fill(self.tensor, self.runs))


def shared_once(device, streams, seed):
    schedule = Schedule(seed, once)
    x = device.empty((16,), pt.f32)
    counted = Counted(device, x, fails=seed % 4 == 3)
    shared = counted.shared()
    shared._shared.changed = Lock(schedule)
    told = []

    def use(stream, clone):
        def thread():
            try:
                clone.submit(stream).wait(20)
            except UsageError as error:
                told.append(str(error))

        return thread

    schedule.run(*(use(stream, shared.clone()) for stream in streams))
    assert counted.runs == 1
    if counted.fails:
        assert told == ["refused by hand"] * len(streams)
    else:
        assert told == []
        assert (x.numpy() == 1).all()


@pytest.mark.slow
@pytest.mark.parametrize("schedules", SCHEDULES)
@pytest.mark.feature("H4", "cpu")
def test_a_shared_operation_runs_once_in_every_schedule(device, schedules):
    streams = [device.stream(f"user {k}") for k in range(3)]
    for seed in range(schedules):
        shared_once(device, streams, seed)


class Words:
    """A driver whose stream writes words when it is told to, one after the other."""

    def __init__(self):
        self.memory = (reactor.ctypes.c_uint32 * 64)()
        self.queue = []
        self.done = 0

    def allocate(self, nbytes):
        return reactor.ctypes.addressof(self.memory)

    def write_value(self, stream, address, value, width, *, name):
        self.queue.append((address, value))
        return Ticket(stream, len(self.queue), name)

    def callback(self, stream, function, *, name):
        self.queue.append((None, function))
        return Ticket(stream, len(self.queue), name)

    def query(self, ticket):
        return Status.DONE if ticket.sequence <= self.done else Status.PENDING

    def step(self):
        if self.done == len(self.queue):
            return
        address, value = self.queue[self.done]
        self.done += 1
        if address is None:
            value()
        else:
            reactor.ctypes.c_uint32.from_address(address).value = value


def slots_kept_apart(seed):
    """Watches of two threads on one stream each, a device that completes them, and the reactor's look: in any order,
    every waiter is woken once, no two live watches have one slot, and in the end all slots are free."""
    schedule = Schedule(seed, reactor)
    found = reactor.Reactor(slots=2)
    found._lock = Lock(schedule)
    found._thread = threading.current_thread()  # the looks below are its
    drivers = [Words(), Words()]
    table = reactor._Slots(SimpleNamespace(driver=drivers[0]), 2)
    capabilities = SimpleNamespace(value_widths={32}, host_addressable=True)
    device = SimpleNamespace(capabilities=capabilities)
    found._tables[id(device)] = table
    count, woken, live = 5, [], {}
    wanted = [(who, k) for who in range(2) for k in range(count)]

    def watcher(who):
        stream = SimpleNamespace(id=who, handle=who)

        def thread():
            for k in range(count):
                context = SimpleNamespace(
                    driver=drivers[who], stream=stream, device=device, last=Ticket(who, len(drivers[who].queue), "work")
                )
                watch = found.watch(context, lambda key=(who, k): woken.append(key), force_callback=k == 4)
                if watch.slots is not None:
                    others = [w for w in live.values() if w.slots is not None and w.slot == watch.slot]
                    armed = [w for queue in list(found._armed.values()) for w in queue]
                    if watch in armed:  # it may be over by now, and its slot another's
                        assert not any(w in armed for w in others), "one slot for two watches"
                    live[who, k] = watch
                if k == 2:
                    watch.cancel()
                    woken.append((who, k))

        return thread

    def device_runs():
        for k in range(30):
            drivers[k % 2].step()
            schedule.switch()

    def looks():
        for k in range(25):
            due, _ = found._look(probe=k % 3 == 0)
            for watch in due:
                watch.fire()
            schedule.switch()

    schedule.run(watcher(0), watcher(1), device_runs, looks)
    for driver in drivers:
        while driver.done < len(driver.queue):
            driver.step()
    for _ in range(3):
        for watch in found._look(probe=True)[0]:
            watch.fire()
    assert sorted(set(woken)) == wanted
    assert len(woken) <= len(wanted) + 2  # one that was due before it was cancelled was woken, and says so itself
    assert sorted(table.free) == [0, 1]
    assert found.armed == 0


@pytest.mark.slow
@pytest.mark.parametrize("schedules", SCHEDULES)
@pytest.mark.feature("H8", "cpu")
def test_slots_are_kept_apart_in_every_schedule(schedules):
    for seed in range(schedules):
        slots_kept_apart(seed)


@contextmanager
def one_word_too_early(monkeypatch):
    """The reactor as it must not be: a slot is free as soon as its watch is made."""
    taken = reactor.Reactor._take_slot

    def take(self, device, watch):
        table = taken(self, device, watch)
        if table is not None:
            table.free.append(watch.slot)
        return table

    monkeypatch.setattr(reactor.Reactor, "_take_slot", take)
    yield


def test_the_schedules_find_a_slot_that_is_given_out_twice(monkeypatch):
    def search():
        for seed in range(60):
            slots_kept_apart(seed)

    with one_word_too_early(monkeypatch), pytest.raises(AssertionError):
        search()


def test_the_schedules_find_a_shared_operation_without_its_lock(device, monkeypatch):
    streams = [device.stream(f"user {k}") for k in range(3)]

    def search():
        for seed in range(60):
            shared_once(device, streams, seed)

    monkeypatch.setattr(Lock, "__enter__", lambda self: None)
    monkeypatch.setattr(Lock, "__exit__", lambda self, *error: None)
    with pytest.raises((AssertionError, LeaseError)):  # it ran twice, on two streams, which leases see too
        search()
