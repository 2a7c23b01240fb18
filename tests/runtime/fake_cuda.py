"""A stand-in for `CudaApi`: the same methods over memory of this process, with one thread for each stream.

It checks what the real driver cannot tolerate: a call on the thread of a host function, and more operations pending
than the driver takes before it blocks its caller. Kernels are Python generators that yield where they poll.
"""

import bisect
import ctypes
import itertools
import mmap
import os
import struct
import threading
import time
from collections import deque
from typing import ClassVar

from peertile.memory_model import Cmp
from peertile.runtime.driver import FaultKind, ShareKind
from peertile.runtime.drivers.cuda_api import CudaError, PointerKind
from peertile.runtime.drivers.cuda_ops import holds
from peertile.runtime.drivers.cuda_ptx import NAMES
from peertile.testing.cuda_kernels import EXTRA, suite_kernels

MAX_PENDING = 1000
MAX_CALLS = 56
MASK = (1 << 64) - 1
GRAIN = 2 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Thread:
    """A stream: a thread that runs what it is given, in order."""

    def __init__(self, fake):
        self.fake = fake
        self.queue = deque()
        self.condition = threading.Condition()
        self.running = False
        self.ended = False
        self.capture = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def __int__(self):
        return id(self)

    def put(self, function):
        if self.capture is not None:
            self.capture.append(function)
            return
        assert not self.ended
        with self.condition:
            assert len(self.queue) < MAX_PENDING, "the driver would block here"
            self.queue.append(function)
            self.condition.notify()

    def _run(self):
        while True:
            with self.condition:
                self.running = False
                while not self.queue:
                    if self.ended:
                        return
                    self.condition.wait()
                function = self.queue.popleft()
                self.running = True
            if self.fake.dead is None:
                function()

    @property
    def idle(self):
        with self.condition:
            return not self.queue and not self.running


class Function(str):
    """A kernel by its name, with a number for native code."""

    known: ClassVar = {}

    def __new__(cls, name):
        return cls.known.setdefault(name, super().__new__(cls, name))

    def __int__(self):
        return id(self)


class Image(bytes):
    """A loaded module, with a number."""

    def __int__(self):
        return id(self)


def _object(number):
    """What a handle that went through native code stands for; streams and functions are kept for good."""
    return ctypes.cast(number, ctypes.py_object).value


class Event:
    def __init__(self):
        self.last = None  # (flag, [time])


class FakeCuda:
    def __init__(self, devices=1, multiprocessors=16):
        self.devices = devices
        self.multiprocessors = multiprocessors
        self.host_threads = set()
        self.dead = None  # an error that every call raises
        self.refuse = {}  # call -> error, raised once
        self.calls = []
        self.starts, self.blocks = [], {}  # start -> (size, kind, buffer)
        self.pool_bytes = 0
        self.pooled = {}  # address -> bytes, of what came from a pool
        self.lock = threading.RLock()
        self.keys = itertools.count(1)
        self.functions = {}
        self.contexts = threading.local()
        self.registered = {}
        self.fabric = False
        self.attributes = {"MULTIPROCESSOR_COUNT": multiprocessors, "MAX_BLOCKS_PER_MULTIPROCESSOR": 80,
                           "COMPUTE_CAPABILITY_MAJOR": 9, "COMPUTE_CAPABILITY_MINOR": 0,
                           "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232448}  # fmt: skip
        self.version = 13000
        self.streams = []
        self.sharing = []
        self.pending_calls = 0
        self.native_launches = self.overlapping = 0
        self.keep, self.refusal = [], None

    def __getattribute__(self, name):
        value = object.__getattribute__(self, name)
        if name[0] == "_" or not callable(value) or name in ("forget", "error", "refused"):
            return value
        assert threading.get_ident() not in object.__getattribute__(self, "host_threads"), f"{name} in a host function"
        object.__getattribute__(self, "calls").append(name)
        if self.dead is not None:
            raise self.dead
        if name in self.refuse:
            raise self.refuse.pop(name)
        return value

    @staticmethod
    def error(name, call="call"):
        return CudaError(call, f"CUDA_ERROR_{name}", f"text of {name.lower()}")

    # ---------------------------------------------------------------- devices, contexts

    def driver_version(self):
        return self.version

    def device_count(self):
        return self.devices

    def device(self, ordinal):
        return ordinal

    def device_name(self, device):
        return "Fake GPU"

    def device_uuid(self, device):
        return bytes([device] * 16)

    def attribute(self, device, name):
        return self.attributes.get(name, 1 if name != "HANDLE_TYPE_FABRIC_SUPPORTED" else int(self.fabric))

    def total_memory(self, device):
        return 8 << 30

    def can_access_peer(self, device, peer):
        return True

    def native_peer_atomics(self, device, peer):
        return True

    def retain_context(self, device):
        return 100 + device

    def release_context(self, device):
        pass

    def current_context(self):
        stack = getattr(self.contexts, "stack", [])
        return stack[-1] if stack else 0

    def set_context(self, context):
        self.contexts.stack = [context]

    def push_context(self, context):
        if not hasattr(self.contexts, "stack"):
            self.contexts.stack = []
        self.contexts.stack.append(context)

    def pop_context(self):
        self.contexts.stack.pop()

    def priority_range(self):
        return 0, -5

    # ---------------------------------------------------------------- streams, events

    def create_stream(self, priority):
        self.streams.append(Thread(self))
        return self.streams[-1]

    def destroy_stream(self, stream):
        with stream.condition:
            stream.ended = True
            stream.condition.notify()

    def stream_idle(self, stream):
        return stream.idle

    def create_event(self):
        return Event()

    def destroy_event(self, event):
        pass

    def record_event(self, event, stream):
        record = (threading.Event(), [0])
        event.last = record

        def run():
            record[1][0] = time.monotonic_ns()
            record[0].set()

        stream.put(run)

    def wait_event(self, stream, event):
        record = event.last
        stream.put(lambda: self._until(record[0].is_set))

    def elapsed_ms(self, start, end):
        return (end.last[1][0] - start.last[1][0]) / 1e6

    def _until(self, condition):
        while not condition() and self.dead is None:
            time.sleep(2e-5)

    # ---------------------------------------------------------------- operations

    def copy(self, dst, src, nbytes, stream):
        assert PointerKind.PAGEABLE not in (self._kind(dst), self._kind(src))
        stream.put(lambda: ctypes.memmove(dst, src, nbytes))

    def fill(self, dst, value, width, count, stream):
        assert dst % width == 0
        assert self._kind(dst) is not PointerKind.PAGEABLE
        data = value.to_bytes(width, "little") * count
        stream.put(lambda: ctypes.memmove(dst, data, len(data)))

    def write_value(self, stream, address, value, width):
        assert 0 <= value < 1 << width
        self._check_word(address)
        stream.put(lambda: _word(address, width, value))

    def wait_value(self, stream, address, value, width, *, equal):
        assert 0 <= value < 1 << width
        self._check_word(address)
        cmp = Cmp.EQ if equal else Cmp.AT_LEAST
        stream.put(lambda: self._until(lambda: holds(_word(address, width), value, width, cmp, signed=False)))

    def _check_word(self, address):
        """As on a GPU, a stream cannot read or write words of pools and of pageable memory."""
        if self._kind(address) is PointerKind.PAGEABLE or self._pooled(address):
            raise self.error("INVALID_VALUE", "cuStreamValue")

    def host_function(self, stream, function, *, once=True):
        counted = stream.capture is None

        def run():
            self.host_threads.add(threading.get_ident())
            try:
                function()
            finally:
                self.host_threads.discard(threading.get_ident())
                if counted:
                    with self.lock:
                        self.pending_calls -= 1

        if counted:
            with self.lock:
                assert self.pending_calls < MAX_CALLS, "the driver would block here"
                self.pending_calls += 1
        key = next(self.keys)
        self.functions[key] = once
        stream.put(run)
        return key

    def forget(self, key):
        del self.functions[key]

    # ---------------------------------------------------------------- memory

    def _add(self, address, size, kind, buffer):
        with self.lock:
            bisect.insort(self.starts, address)
            self.blocks[address] = (size, kind, buffer)

    def _drop(self, address):
        with self.lock:
            self.starts.remove(address)
            return self.blocks.pop(address)

    def _kind(self, address):
        with self.lock:
            at = bisect.bisect_right(self.starts, address) - 1
            if at >= 0 and address < self.starts[at] + self.blocks[self.starts[at]][0]:
                return self.blocks[self.starts[at]][1]
        return PointerKind.PAGEABLE

    def _new(self, nbytes, kind):
        buffer = ctypes.create_string_buffer(nbytes + 512)
        ctypes.memset(buffer, 0xDB, nbytes + 512)
        address = -(-ctypes.addressof(buffer) // 512) * 512
        self._add(address, nbytes, kind, buffer)
        return address

    def create_pool(self, device, keep_bytes):
        return ["pool", {}]

    def destroy_pool(self, pool):
        pass

    def pool_reserved(self, pool):
        return -(-self.pool_bytes // GRAIN) * GRAIN + (1 << 30)

    def allocate(self, pool, nbytes, stream):
        if nbytes > 6 << 30:
            raise self.error("OUT_OF_MEMORY", "cuMemAllocFromPoolAsync")
        self.pool_bytes += nbytes
        address = self._new(nbytes, PointerKind.DEVICE)
        self.pooled[address] = nbytes
        return address

    def free(self, address, stream):
        self.pool_bytes -= self._drop(address)[0]
        del self.pooled[address]

    def set_pool_access(self, pool, devices):
        pool[1][tuple(devices)] = True

    def _pooled(self, address):
        with self.lock:
            at = bisect.bisect_right(self.starts, address) - 1
            return at >= 0 and self.starts[at] in self.pooled

    def in_pool(self, address):
        return self._pooled(address)

    def memory_info(self):
        return 6 << 30, 8 << 30

    def allocate_host(self, nbytes):
        return self._new(nbytes, PointerKind.PINNED)

    def free_host(self, address):
        self._drop(address)

    def register_host(self, address, nbytes):
        self._add(address, nbytes, PointerKind.PINNED, None)

    def unregister_host(self, address):
        self._drop(address)

    def host_device_pointer(self, address):
        return address

    def pointer_kind(self, address):
        return self._kind(address)

    def accessible(self, address):
        return self._kind(address) is not PointerKind.PAGEABLE

    # ---------------------------------------------------------------- shared memory: memfd stands for the device's

    def granularity(self, device, kind):
        return GRAIN

    def create_memory(self, device, nbytes, kind):
        if kind is ShareKind.FABRIC and not self.fabric:
            raise self.error("NOT_PERMITTED", "cuMemCreate")
        fd = os.memfd_create("fake")
        os.ftruncate(fd, nbytes)
        return fd

    def release_memory(self, handle):
        os.close(handle)

    def export_memory(self, handle, kind):
        return os.dup(handle) if kind is ShareKind.FD else struct.pack("<64q", handle, *[0] * 63)[:64]

    def import_memory(self, value, kind):
        return os.dup(value if kind is ShareKind.FD else struct.unpack_from("<q", value)[0])

    def reserve(self, nbytes, alignment):
        address = _libc.mmap(None, nbytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        self._add(address, nbytes, PointerKind.PAGEABLE, set())
        return address

    def free_reservation(self, address, nbytes):
        assert self._drop(address)[1] is PointerKind.PAGEABLE, "unmap before the reservation is freed"
        _libc.munmap(address, nbytes)

    def map(self, address, nbytes, handle):
        got = _libc.mmap(address, nbytes, 3, mmap.MAP_SHARED | 0x10, handle, 0)
        assert got == address
        self.blocks[address] = (nbytes, PointerKind.DEVICE, set())

    def unmap(self, address, nbytes):
        assert not any(not s.idle for s in self.streams), "unmapping waits for running work"
        _libc.mmap(address, nbytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10, -1, 0)
        self.blocks[address] = (nbytes, PointerKind.PAGEABLE, set())

    def set_access(self, address, nbytes, devices, *, is_allowed=True):
        allowed = self.blocks[address][2]
        (allowed.update if is_allowed else allowed.difference_update)(devices)

    def allocate_ipc(self, nbytes):
        return self._new(nbytes, PointerKind.DEVICE)

    def free_ipc(self, address):
        self._drop(address)

    def export_ipc(self, address):
        return struct.pack("<8q", address, *[0] * 7)

    def open_ipc(self, data):
        return struct.unpack_from("<q", data)[0]

    def close_ipc(self, address):
        pass

    # ---------------------------------------------------------------- modules, launches

    def load_module(self, image):
        return Image(image)

    def unload_module(self, module):
        pass

    def function(self, module, name):
        return Function(name)

    def allow_shared_memory(self, function, nbytes):
        self.allowed = (function, nbytes)

    def share_multiprocessors(self, function):
        self.sharing.append(function)

    def occupancy(self, function, threads, shared_bytes):
        return 1 if shared_bytes > 100_000 else 80

    def entries(self):
        """What native code calls: functions with the signatures of the NVIDIA driver, which end up in the methods."""

        def launch(function, n0, n1, n2, threads, _1, _2, shared, stream, params, *extra):
            self.native_launches += 1
            f, s = _object(function), _object(stream)
            return self._answer(lambda: self.launch(f, n0, threads, shared, s, params, not extra))

        def overlapping(config, function, params, extra):
            words = struct.unpack("<8IQQI", ctypes.string_at(config, 52))
            self.native_launches += 1
            f, s = _object(function), _object(words[8])
            return self._answer(lambda: self.launch(f, words[0], words[3], words[6], s, params, False, True))

        def write(stream, address, value, flags):
            return self._answer(lambda: self.write_value(_object(stream), address, value, 64))

        def current(found):
            ctypes.c_uint64.from_address(found).value = self.current_context()
            return 0

        u, q = ctypes.c_uint32, ctypes.c_uint64
        shape = [q, u, u, u, u, u, u, u, q, q]
        made = [
            ctypes.CFUNCTYPE(u, *shape, q)(launch), ctypes.CFUNCTYPE(u, *shape)(launch),
            ctypes.CFUNCTYPE(u, q, q, q, u)(write), ctypes.CFUNCTYPE(u, q)(current),
            ctypes.CFUNCTYPE(u, q)(lambda context: self._answer(lambda: self.push_context(context))),
            ctypes.CFUNCTYPE(u, q)(lambda found: self._answer(self.pop_context)),
            ctypes.CFUNCTYPE(u, q, q, q, q)(overlapping),
        ]  # fmt: skip
        self.keep.append(made)
        return tuple(ctypes.cast(f, ctypes.c_void_p).value for f in made)

    def _answer(self, call):
        try:
            call()
        except CudaError as error:
            self.refusal = error
            return 1
        return 0

    def refused(self, code):
        assert code == 1
        return self.refusal

    def launch(self, function, blocks, threads, shared_bytes, stream, params, cooperative, overlap=False):
        self.overlapping += overlap
        count = SLOTS[function]
        pointers = struct.unpack(f"<{count}Q", ctypes.string_at(params, 8 * count))
        words = [ctypes.c_uint64.from_address(p).value for p in pointers]
        stream.put(lambda: self._programs(function, blocks, words))

    def _programs(self, function, blocks, words):
        if function == "extra_illegal":
            self.dead = self.error("ILLEGAL_ADDRESS", "cuStreamQuery")
            return
        kernel = KERNELS[function]
        alive = [g for p in range(blocks) if (g := kernel(p, words)) is not None]
        while alive and self.dead is None:
            alive = [g for g in alive if next(g, StopIteration) is not StopIteration]
            if alive:
                time.sleep(0)

    # ---------------------------------------------------------------- graphs

    def begin_capture(self, stream):
        stream.capture = []

    def end_capture(self, stream):
        nodes, stream.capture = stream.capture, None
        return nodes

    def instantiate(self, graph):
        return graph

    def destroy_graph(self, graph):
        pass

    def destroy_exec(self, graph):
        pass

    def launch_graph(self, graph, stream):
        stream.put(lambda: [node() for node in graph])


# ---------------------------------------------------------------- kernels


def _word(address, width, value=None):
    cls = ctypes.c_uint64 if width == 64 else ctypes.c_uint32
    word = cls.from_address(address)
    if value is not None:
        word.value = value
    return word.value


def _signed(value):
    return value - (1 << 64) if value >> 63 else value


def _put(base, index, value):
    ctypes.c_uint64.from_address(base + 8 * index).value = value & MASK


def _get(base, index=0):
    return ctypes.c_uint64.from_address(base + 8 * index).value


def _record(fault, kind, program, place, got, limit, address, slot):
    if _get(fault) == 0:
        for k, value in enumerate((kind, program, place, got, limit, address, slot)):
            _put(fault, k + 1, value)
        _put(fault, 0, 2)


def _poll(p, test, hidden, place=0, slot=0, expected=0, address=0):
    """Yields until the test gives a value, which is returned; None when the program has to leave."""
    abort, fault, timeout = hidden[3], hidden[4], hidden[5]
    begin = time.monotonic_ns()
    while True:
        value, ok = test()
        if ok:
            return value
        kind = 0
        if _word(abort, 32):
            kind = FaultKind.ABORTED
        elif _get(fault):
            return None
        elif time.monotonic_ns() - begin > timeout:
            kind = FaultKind.WAIT_TIMEOUT
        if kind:
            _record(fault, kind, p, place, value, expected, address, slot)
            return None
        yield


def _at_least(address, expected, width):
    def test():
        value = _word(address, width)
        return value, holds(value, expected, width, Cmp.AT_LEAST, signed=False)

    return test


def _add(p, w):
    _put(w[2], p, _get(w[0], p) + _get(w[1], p))


def _fail(p, w):
    _put(w[0], 0, _get(w[0]) + 1)
    if p == w[1]:
        _record(w[2 + 4], FaultKind.ASSERT, p, 4, 70, 64, 0, 0)


def _work(p, w):
    h = p
    for i in range(w[1]):
        h = ((h * 6364136223846793005 + 1442695040888963407) & MASK) ^ i
    _put(w[0], p, h)


def _scratch(p, w):
    mine = w[1 + 8] + 4096 * p
    _put(mine, 0, p)
    _put(mine, 511, p)
    _put(w[0], p, _get(mine) + _get(mine, 511) + (mine & 63))


def _hello(p, w):
    buffer = w[7]
    if buffer:
        at = _get(buffer, 1)
        _put(buffer, 1, at + 24)
        ctypes.memmove(buffer + 16 + at, struct.pack("<QII5s", p, 3, 5, b"hello"), 21)


def _barrier(p, w):
    hidden = w[1:]
    n, words = hidden[0] * hidden[1] * hidden[2], hidden[6]
    for k in range(2):
        _put(words, k, _get(words, k) + 1)
        if (yield from _poll(p, _at_least(words + 8 * k, n, 64), hidden)) is None:
            return
    _put(w[0], p, _get(words))


def _await(width):
    def kernel(p, w):
        value = yield from _poll(p, _at_least(w[0], w[1], width), w[3:], 2, 9, w[1], w[0])
        if value is not None:
            _put(w[2], p, value)

    return kernel


def _ping(p, w):
    for k in range(1, w[2] + 1):
        _put(w[1], 0, k)
        if (yield from _poll(p, _at_least(w[0], k, 64), w[3:])) is None:
            return


def _suspend(p, w):
    value = yield from _poll(p, lambda: (_get(w[0]), _get(w[0]) != 0), w[2:])
    if value is not None:
        _put(w[1], p, value)


def _long(p, w):
    _put(w[0], p, sum(k * w[k] for k in range(1, 450)))


def _wait(p, w):
    address, expected, cmp, width, flip, timeout, abort, fault = w

    def test():
        value = _word(address, width)
        return value, holds(value, expected, width, list(Cmp)[cmp], signed=flip == 0)

    hidden = [0, 0, 0, abort, fault, timeout]
    yield from _poll(MASK, test, hidden, MASK, 0, expected, address)


def _write(p, w):
    _word(w[0], w[2], w[1] & ((1 << w[2]) - 1))


def _swap(p, w):
    if _word(w[0], w[3]) == w[1]:
        _word(w[0], w[3], w[2])


CLOCK_BEGAN = 10**18
"""What the clock of the device said at the beginning of the host's."""


def _clock(p, w):
    _put(w[0], 0, time.monotonic_ns() + CLOCK_BEGAN)


def _fill64(p, w):
    if p == 0:
        ctypes.memmove(w[0], struct.pack("<Q", w[1]) * w[2], 8 * w[2])


KERNELS = {
    "suite_add": _add, "suite_fail": _fail, "suite_work": _work, "suite_scratch": _scratch, "suite_hello": _hello,
    "suite_barrier": _barrier, "suite_await": _await(64), "suite_await32": _await(32), "suite_ping": _ping,
    "suite_suspend": _suspend, "extra_nothing": lambda p, w: None, "extra_long": _long,
    "peertile_wait": _wait, "peertile_write": _write, "peertile_swap": _swap, "peertile_fill64": _fill64,
    "peertile_clock": _clock,
}  # fmt: skip
SUITE = suite_kernels(b"python")
SLOTS = {b.entry: b.n_slots + 10 for b in vars(SUITE).values()}
SLOTS |= {entry: slots + 10 for entry, (slots, _) in EXTRA.items()}
SLOTS |= dict(zip(NAMES, (8, 3, 4, 3, 1), strict=True))
