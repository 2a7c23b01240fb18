"""The cpu driver and the process around it: fork, exit, signals, shared memory, the code cache, helper threads."""

import ctypes
import gc
import os
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from peertile.errors import AllocationError, ArgumentError, UsageError
from peertile.runtime.driver import FaultKind, LaunchOptions, ShareHandle, ShareKind, Status
from peertile.runtime.drivers.cpu import CpuDriver
from peertile.testing.cpu_kernels import cpu_kernels, plain_kernel, waiting_kernel
from peertile.testing.driver_suite import args, read_words, words

HEAD = """
import ctypes, os, signal, struct, sys
from peertile.errors import UsageError
from peertile.memory_model import Cmp
from peertile.runtime.driver import LaunchOptions, ShareHandle, ShareKind, Status
from peertile.runtime.drivers.cpu import CpuDriver
from peertile.testing.cpu_kernels import cpu_kernels
from peertile.testing.driver_suite import args, read_words, words
"""


def python(body, *argv, fds=(), env=None):
    """Run a script in a fresh process; its output, once it has ended well."""
    script = HEAD + textwrap.dedent(body)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, *argv],
        pass_fds=fds,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.fixture(scope="module")
def kernels():
    return cpu_kernels()


@pytest.fixture
def device():
    device = CpuDriver(threads=2).open()
    yield device
    device.close()


# ------------------------------------------------------------------------------------------------- fork, exit


@pytest.mark.slow
def test_a_forked_child_is_refused_and_the_parent_goes_on():
    out = python("""
        device = CpuDriver(threads=2).open()
        s, kernels = device.create_stream(), cpu_kernels()
        count = device.load_module(kernels.fail)
        c = words(device, s, [0])
        options = LaunchOptions("count", 10**9)
        assert device.wait(device.launch(s, count, (100, 1, 1), args(c, -1), options)) is Status.DONE
        pid = os.fork()
        if pid == 0:
            said = set()
            for call in (
                lambda: device.launch_sync(s, count, (1, 1, 1), args(c, -1), options),
                lambda: device.allocate(1),
                lambda: device.close(),
                lambda: device.wait(None),
                lambda: CpuDriver().open(),
            ):
                try:
                    call()
                except UsageError as error:
                    said.add(str(error))
            device.free(c)
            os._exit(0 if said == {"runtime was initialised before fork; use spawn"} else 1)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        device.launch_sync(s, count, (100, 1, 1), args(c, -1), options)
        print(read_words(device, s, c, 1))
    """)
    assert out == "0\n[200]\n"


@pytest.mark.slow
def test_a_process_may_exit_with_threads_inside_native_code():
    for ending in ("", "sys.exit(0)", "import threading; threading.Thread(target=lambda: None).start()"):
        out = python(f"""
            device = CpuDriver(threads=3).open()
            streams, kernels = [device.create_stream() for _ in range(3)], cpu_kernels()
            wait = device.load_module(kernels.await_word)
            work = device.load_module(kernels.work)
            w, out = words(device, streams[0], [0]), device.allocate(80_000)
            options = LaunchOptions("for ever", 10**12)
            device.launch(streams[0], wait, (50, 1, 1), args(w, 1, out), options)
            device.wait_value(streams[1], w, 1, 64, Cmp.EQ, timeout_ns=10**12)
            device.launch(streams[2], work, (10_000, 1, 1), args(out, 100_000), options)
            print("end", flush=True)
            {ending}
        """)
        assert out == "end\n"


# -------------------------------------------------------------------------------------------------- signals


class Interrupted(Exception):
    """What the alarm of these tests raises."""


@pytest.fixture
def alarm():
    """An exception in the main thread soon, as Ctrl-C would raise one."""

    def ring(number, frame):
        raise Interrupted

    before = signal.signal(signal.SIGALRM, ring)
    yield lambda: signal.setitimer(signal.ITIMER_REAL, 0.02)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_an_interrupted_launch_goes_on_in_its_stream(device, kernels, alarm):
    s, other = device.create_stream(), device.create_stream()
    kernel = device.load_module(kernels.await_word)
    for n in (1, 20):
        w, out = words(device, other, [0]), words(device, other, [0] * n)
        alarm()
        with pytest.raises(Interrupted):
            device.launch_sync(s, kernel, (n, 1, 1), args(w, 3, out), LaunchOptions("slow", 10**11))
        ticket = device.last_ticket(s)
        assert (ticket.name, device.query(ticket)) == ("slow", Status.PENDING)
        behind = device.fill(s, out, 8, 8, 1)
        assert device.launch_sync(other, kernel, (1, 1, 1), args(out, 0, out), LaunchOptions("other", 10**9)) is None
        device.write_value(other, w, 3, 64)
        assert device.wait(ticket) is Status.DONE
        assert device.wait(behind) is Status.DONE
        assert read_words(device, s, out, n) == [8] + [3] * (n - 1)
        for _ in range(3):
            assert device.launch_sync(s, kernel, (n, 1, 1), args(w, 3, out), LaunchOptions("slow", 10**9)) is None


def test_an_interrupted_wait_leaves_the_operation_running(device, kernels, alarm):
    s, other = device.create_stream(), device.create_stream()
    kernel = device.load_module(kernels.await_word)
    w, out = words(device, other, [0]), words(device, other, [0])
    ticket = device.launch(s, kernel, (1, 1, 1), args(w, 3, out), LaunchOptions("slow", 10**11))
    alarm()
    with pytest.raises(Interrupted):
        device.wait(ticket)
    alarm()
    with pytest.raises(Interrupted):
        device.wait(ticket, timeout_s=20)
    device.write_value(other, w, 3, 64)
    assert device.wait(ticket) is Status.DONE


def test_a_wait_with_a_timeout_hands_back_what_it_began(device, kernels):
    s, other = device.create_stream(), device.create_stream()
    kernel = device.load_module(kernels.await_word)
    w, out = words(device, other, [0]), words(device, other, [0])
    ticket = device.launch(s, kernel, (1, 1, 1), args(w, 3, out), LaunchOptions("slow", 10**11))
    for timeout in (0, 0.001, 0.06):
        assert device.wait(ticket, timeout_s=timeout) is Status.PENDING
    done = threading.Event()
    device.callback(s, done.set)
    device.write_value(other, w, 3, 64)
    assert done.wait(20)  # nobody waits for the stream through the driver: its own thread must have gone on
    assert device.wait(device.last_ticket(s)) is Status.DONE


# -------------------------------------------------------------------------------------------- shared memory


PEER = """
    link = __import__("socket").socket(fileno=int(sys.argv[1]))
    payload, fds, _, _ = __import__("socket").recv_fds(link, 100, 1)
    device = CpuDriver(threads=1).open()
    segment = device.import_segment(ShareHandle(ShareKind.FD, payload, tuple(fds)))
    base = device.map_segment(segment)
    ping, s = device.load_module(cpu_kernels().ping), device.create_stream()
    fault = device.launch_sync(s, ping, (1, 1, 1), args(base + 2048, base, 300), LaunchOptions("pong", 20 * 10**9))
    print(fault, read_words(device, s, base + 4096 - 8, 1))
    device.free_segment(segment)
"""


@pytest.mark.slow
def test_two_processes_signal_each_other_through_a_segment(device, kernels):
    s = device.create_stream()
    segment, base = device.create_segment(4096)
    device.wait(device.fill(s, base + 4088, 31, 8, 1))
    share = device.export_segment(segment)
    mine, theirs = socket.socketpair()
    with mine, theirs:
        script = HEAD + textwrap.dedent(PEER)
        with subprocess.Popen(
            [sys.executable, "-W", "error", "-c", script, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdout=subprocess.PIPE,
            text=True,
        ) as peer:
            socket.send_fds(mine, [share.payload], list(share.fds))
            ping = device.load_module(kernels.ping)
            block = args(base, base + 2048, 300)
            fault = device.launch_sync(s, ping, (1, 1, 1), block, LaunchOptions("ping", 20 * 10**9))
            out, _ = peer.communicate(timeout=30)
    assert (fault, out, peer.returncode) == (None, "None [31]\n", 0)
    device.free_segment(segment)


def test_segments_have_no_name(device):
    before = set(os.listdir("/dev/shm"))
    segment, address = device.create_segment(1 << 16)
    line = next(x for x in Path("/proc/self/maps").read_text().splitlines() if x.startswith(f"{address:x}-"))
    assert line.endswith("/memfd:peertile (deleted)")
    assert set(os.listdir("/dev/shm")) == before
    device.free_segment(segment)
    assert f"{address:x}-" not in Path("/proc/self/maps").read_text()


def test_importing_a_handle_of_this_process_takes_nothing_over(device):
    second = CpuDriver(threads=1).open(1)
    segment, address = device.create_segment(4096)
    share = device.export_segment(segment)
    again = second.import_segment(share)
    received = second.import_segment(share.with_fds((os.dup(share.fds[0]),)))
    assert second.map_segment(again) == second.map_segment(received) == address
    for handle in (again, received):
        second.free_segment(handle)
    assert os.fstat(share.fds[0]).st_size == 4096
    device.free_segment(segment)
    with pytest.raises(UsageError) as caught:
        second.import_segment(share)
    assert str(caught.value) == "share: expected the handle of a live segment, got one of a segment that was freed"
    second.close()


def test_bad_handles_are_refused(device):
    with pytest.raises(ArgumentError) as caught:
        device.import_segment(ShareHandle(ShareKind.IPC, b"x"))
    assert str(caught.value) == (
        "share: expected a handle of kind fd with 32 bytes and one descriptor, got kind ipc with 1 bytes and "
        "0 descriptors"
    )
    fd = os.memfd_create("small")
    with pytest.raises(ArgumentError) as caught:
        device.import_segment(ShareHandle(ShareKind.FD, struct.pack("<16sQQ", b"other process", 1, 4096), (fd,)))
    assert str(caught.value) == "share: expected a descriptor of at least 4096 bytes, got one of 0"
    os.close(fd)


def test_a_segment_larger_than_the_machine_is_refused(device):
    with pytest.raises(AllocationError, match=r"^segment: asked for 1125899906842624 bytes of shared memory, \d+ are "):
        device.create_segment(1 << 50)


# --------------------------------------------------------------------------------------------- device memory


def test_memory_beyond_the_limit_is_refused():
    device = CpuDriver(threads=1, memory_limit=1 << 20).open()
    device.allocate(1 << 19)
    with pytest.raises(AllocationError) as caught:
        device.allocate((1 << 19) + 1)
    assert str(caught.value) == (
        "memory of cpu:0: asked for 524289 bytes, 524288 of 1048576 are in use, 524288 are free; free some tensors or "
        "use smaller ones"
    )
    device.close()


def test_memory_is_poisoned_on_request():
    device = CpuDriver(threads=1, poison=True).open()
    address = device.allocate(64)
    word = ctypes.c_uint64.from_address(address)
    assert word.value == 0xDBDBDBDBDBDBDBDB
    word.value = 1
    device.free(address)
    assert word.value == 0xDBDBDBDBDBDBDBDB
    with pytest.raises(UsageError) as caught:
        device.free(address)
    assert str(caught.value) == (f"free: expected an address that allocate gave and that is not free, got {address:#x}")
    device.close()
    device.free(address)  # without effect: garbage collection may come late


# ------------------------------------------------------------------------------------------ devices, modules


def test_a_closed_device_is_refused(kernels):
    device = CpuDriver(threads=2).open(3)
    stream = device.create_stream()
    device.load_module(kernels.add)
    device.wait(device.fill(stream, 0, 0, 1, 0))
    device.close()
    with pytest.raises(UsageError) as caught:
        device.create_stream()
    assert str(caught.value) == "driver: expected an open device, got cpu:3, which was closed"


def test_a_device_that_does_not_exist_is_refused():
    with pytest.raises(ArgumentError) as caught:
        CpuDriver(devices=2).open(2)
    assert str(caught.value) == "ordinal: expected 0 to 1, got 2"


def test_threads_are_shared_out_to_the_ranks_of_a_machine(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    executors = [CpuDriver(local_ranks=n).open().capabilities.executors for n in (1, 2, 3, 8, 20)]
    assert executors == [8, 4, 2, 1, 1]


@pytest.mark.slow
def test_the_native_runtime_is_compiled_once_and_a_damaged_copy_is_not_used(tmp_path):
    env = {**os.environ, "PEERTILE_CACHE_DIR": str(tmp_path)}
    body = """
        from peertile.backends.cpu import jit
        from peertile.runtime.drivers import cpu_library
        compiled = []
        original = jit.compile_text
        jit.compile_text = lambda *a, **k: compiled.append(1) or original(*a, **k)
        CpuDriver(threads=1).open()
        print(len(compiled))
    """
    assert python(body, env=env) == "1\n"
    assert python(body, env=env) == "0\n"
    (file,) = tmp_path.glob("cpu-runtime-*.o")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert python(body, env=env) == "1\n"
    assert python(body, env=env) == "0\n"
    assert python(body, env={**env, "PEERTILE_CACHE_MAX_MB": "0"}) == "1\n"


# ------------------------------------------------------------------------------------------------- helpers

# Two programs that wait for each other without a suspension point: they need two threads. Bounded, about a second.
MEET = """
  %Met = load ptr, ptr %args
  %old = atomicrmw add ptr %Met, i64 1 seq_cst
  br label %spin
spin:
  %i = phi i64 [ 0, %body ], [ %i1, %again ]
  %n = load atomic i64, ptr %Met seq_cst, align 8
  %both = icmp sge i64 %n, 2
  br i1 %both, label %met, label %again
again:
  %i1 = add i64 %i, 1
  %stop = icmp sgt i64 %i1, 2000000000
  br i1 %stop, label %next, label %spin
met:
  %out = getelementptr i64, ptr %Met, i64 1
  %o = atomicrmw add ptr %out, i64 1 seq_cst
  br label %next
"""


@pytest.mark.sentence("PR-10")
def test_workers_take_part_in_a_launch(device):
    s = device.create_stream()
    binary = plain_kernel("test_meet", MEET)
    for _ in range(5):
        meet = device.load_module(binary)  # anew: once it is known to be short it is not worth a second thread
        met = words(device, s, [0, 0])
        assert device.launch_sync(s, meet, (2, 1, 1), args(met), LaunchOptions("meet", 10**9)) is None
        assert read_words(device, s, met, 2) == [2, 2]


@pytest.mark.slow
def test_workers_keep_off_the_processor_of_their_caller():
    allowed = os.sched_getaffinity(0)
    device = CpuDriver(threads=2).open()
    s = device.create_stream()
    binary = plain_kernel("test_meet", MEET)
    device.load_module(binary)  # starts the worker, which may use what this thread may use now
    try:
        for cpu in sorted(allowed)[:2] * 2:
            os.sched_setaffinity(0, {cpu})
            for _ in range(2000):  # a worker is moved when it is woken: not while it has not gone to sleep yet
                meet = device.load_module(binary)
                (worker,) = device._workers
                met = words(device, s, [0, 0])
                assert device.launch_sync(s, meet, (2, 1, 1), args(met), LaunchOptions("meet", 10**9)) is None
                others = allowed - {cpu} or allowed  # with one processor there is no choice
                if os.sched_getaffinity(worker.native_id) == others:
                    break
                threading.Event().wait(0.001)
            assert os.sched_getaffinity(worker.native_id) == others
    finally:
        os.sched_setaffinity(0, allowed)
        device.close()


def test_more_launches_than_job_slots_run_at_the_same_time(device, kernels):
    streams = [device.create_stream() for _ in range(12)]
    kernel = device.load_module(kernels.await_word)
    other = device.create_stream()
    w, out = words(device, other, [0]), words(device, other, [0] * 240)
    tickets = [
        device.launch(s, kernel, (20, 1, 1), args(w, 1, out + 160 * k), LaunchOptions("await", 10**11))
        for k, s in enumerate(streams)
    ]
    device.write_value(other, w, 1, 64)
    assert {device.wait(t) for t in tickets} == {Status.DONE}
    assert read_words(device, other, out, 240) == [1] * 240


def test_a_coroutine_that_never_suspends_ends(device):
    s = device.create_stream()
    body = """
  %Out = load ptr, ptr %args
  %at = getelementptr i64, ptr %Out, i64 %p
  store i64 %p, ptr %at
  br label %finish
"""
    kernel = device.load_module(waiting_kernel("test_no_wait", body))
    out = words(device, s, [-1] * 600)
    for _ in range(2):
        assert device.launch_sync(s, kernel, (600, 1, 1), args(out), LaunchOptions("none", 10**9)) is None
        assert read_words(device, s, out, 600) == list(range(600))


def test_big_frames_bound_the_grid(device, kernels):
    s = device.create_stream()
    kernel = device.load_module(waiting_kernel("test_big", "  br label %finish", scratch_bytes=1 << 30))
    assert 1 <= device.max_resident(kernel) <= 4
    assert device.launch_sync(s, kernel, (1, 1, 1), b"", LaunchOptions("big", 10**9)) is None


def test_what_a_callback_holds_is_let_go_of(device):
    class Thing:
        alive = 0

        def __init__(self):
            Thing.alive += 1

        def __call__(self):
            pass

        def __del__(self):
            Thing.alive -= 1

    s = device.create_stream()
    assert device.wait(device.callback(s, Thing())) is Status.DONE
    gc.collect()
    assert Thing.alive == 0


def test_two_threads_may_use_one_stream(device, kernels):
    s = device.create_stream()
    count = device.load_module(kernels.fail)
    c = words(device, s, [0])
    faults = []

    def use():
        for _ in range(300):
            faults.append(device.launch_sync(s, count, (3, 1, 1), args(c, -1), LaunchOptions("count", 10**10)))

    threads = [threading.Thread(target=use) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert faults == [None] * 1200
    assert read_words(device, s, c, 1) == [3600]


def test_lost_output_is_reported(device, kernels):
    s = device.create_stream()
    hello = device.load_module(kernels.hello)
    got = []
    options = LaunchOptions("hello", 10**10, on_print=lambda *record: got.append(record))
    assert device.launch_sync(s, hello, (50_000, 1, 1), b"", options) is None
    assert len(got) == (1 << 20) // 24 + 1
    assert got[-1] == (-1, -1, b"... output beyond the print buffer was lost")


def test_a_fault_without_memory_for_scratch_names_it(device):
    s = device.create_stream()
    kernel = device.load_module(plain_kernel("test_huge", "  br label %next", scratch_bytes=1 << 60))
    fault = device.launch_sync(s, kernel, (1, 1, 1), b"", LaunchOptions("huge", 10**9))
    assert fault is not None
    assert (fault.kind, fault.op) == (FaultKind.DEVICE, "huge")
    assert str(fault.error) == (
        "scratch memory: the system has no 1152921504606846976 bytes for huge; use smaller tiles"
    )
