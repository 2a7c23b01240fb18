"""Physical memory, addresses and mappings by hand: on cpu, on GPUs, and the order of calls over the driver's stand-in."""

import gc
import os
import re
import socket
import sys
import threading

import numpy as np
import pytest
from tests.runtime.fake_cuda import FakeCuda

import peertile as pt
import peertile.language as T
from peertile import vmm
from peertile.errors import AllocationError, ArgumentError, UnsupportedError, UsageError
from peertile.runtime.device import Device
from peertile.runtime.drivers.cuda import CudaDriver
from peertile.runtime.drivers.cuda_api import CudaError
from peertile.testing import assert_clean

pytestmark = [pytest.mark.any_device, pytest.mark.native_only]  # the simulated machine has no addresses to map


@pt.kernel
def double(out: T.Exclusive, x: T.Shared):
    out.store(x.load_like(out) * 2)


def raises(kind, text):
    return pytest.raises(kind, match="^" + re.escape(text) + "$")


@pytest.fixture
def grain():
    return vmm.granularity()


@pytest.mark.feature("D4", "cpu")
def test_memory_grows_behind_one_range_of_addresses(grain, rng):
    a, b = rng.integers(0, 1000, grain // 4), rng.integers(0, 1000, grain // 4)
    with vmm.Reservation(4 * grain) as window, vmm.PhysicalMemory(1) as one, vmm.PhysicalMemory(grain) as two:
        assert (window.nbytes, one.nbytes, two.nbytes) == (4 * grain, grain, grain)
        with window.map(one) as low:
            assert (low.address, low.nbytes) == (window.address, grain)
            low.tensor(grain // 4, pt.i32).copy_from(a.astype(np.int32))
            with window.map(two, at=grain) as high:
                assert high.address == window.address + grain
                high.tensor(grain // 4, pt.i32).copy_from(b.astype(np.int32))
                out = pt.full(grain // 2, -1, pt.i32)
                both = pt.from_address(window.address, grain // 2, pt.i32, owner=(low, high))
                double(out.partition(256), both).sync()
                np.testing.assert_array_equal(out.numpy(), 2 * np.concatenate([a, b]))
                del both, out
                gc.collect()


@pytest.mark.feature("D4", "cpu")
def test_two_addresses_of_one_memory_and_its_contents_without_any(grain, rng):
    values = rng.integers(0, 1 << 30, 100).astype(np.int32)
    memory, window = vmm.PhysicalMemory(grain), vmm.Reservation(3 * grain)
    low, high = window.map(memory), window.map(memory, at=2 * grain)
    low.tensor(100, pt.i32, offset=64).copy_from(values)
    np.testing.assert_array_equal(high.tensor(100, pt.i32, offset=64).numpy(), values)
    low.unmap()
    high.unmap()
    again = window.map(memory, at=grain)
    np.testing.assert_array_equal(again.tensor(100, pt.i32, offset=64).numpy(), values)
    again.unmap()
    again.unmap()  # once is enough
    window.free()
    memory.release()


@pytest.mark.feature("D4", "cpu")
def test_addresses_are_aligned_as_asked(grain):
    with vmm.Reservation(grain, alignment=64 * grain) as window:
        assert window.address % (64 * grain) == 0


@pytest.mark.feature("D4", "cpu")
def test_a_mapping_ends_after_the_kernels_that_use_it(grain):
    memory, window = vmm.PhysicalMemory(grain), vmm.Reservation(grain)
    mapping = window.map(memory)
    x, out = mapping.tensor(grain // 4, pt.i32), pt.full(grain // 4, -1, pt.i32)
    x.copy_from(np.arange(grain // 4, dtype=np.int32))
    running = double(out.partition(256), x).submit()
    mapping.unmap()
    running.wait()
    np.testing.assert_array_equal(out.numpy(), 2 * np.arange(grain // 4))
    with raises(UsageError, f"Tensor.numpy: a mapping's i32[{grain // 4}] was unmapped; use it before that"):
        x.numpy()
    window.free()
    memory.release()


def test_what_is_dropped_is_given_back_in_the_right_order(grain):
    memory, window = vmm.PhysicalMemory(grain), vmm.Reservation(grain)
    x = window.map(memory).tensor(4, pt.i32)
    with pytest.raises(UsageError, match="got memory with 1 mappings"):
        memory.release()
    x.copy_from([1, 2, 3, 4])  # the tensor keeps the mapping
    del x
    gc.collect()
    memory.release()
    window.free()
    window.free()


@pytest.mark.parametrize("held", ["lock", "capture"])
def test_what_is_collected_waits_for_no_lock_and_for_the_end_of_a_capture(grain, held, monkeypatch):
    """Whoever holds the lock of the mappings may wait for one that the collector was called under."""
    memory, window = vmm.PhysicalMemory(grain), vmm.Reservation(grain)
    mapping = window.map(memory)
    if held == "lock":
        taken, over = threading.Event(), threading.Event()

        def hold():
            with vmm._lock:
                taken.set()
                over.wait(20)

        thread = threading.Thread(target=hold)
        thread.start()
        taken.wait(20)
        del mapping
        gc.collect()
        assert not over.is_set()
        over.set()
        thread.join()
    else:
        monkeypatch.setattr(window.device, "open_captures", 1)
        del mapping
        gc.collect()
        with pytest.raises(UsageError, match="got mappings at 0"):
            window.free()
        monkeypatch.undo()
    assert len(vmm._late) == 1
    memory.release()
    window.free()
    assert not vmm._late


def test_the_wrong_order_is_refused_and_changes_nothing(grain):
    memory, window = vmm.PhysicalMemory(grain), vmm.Reservation(2 * grain)
    mapping = window.map(memory, at=grain)
    with raises(
        UsageError,
        f"Reservation.free: expected addresses with nothing mapped, got mappings at {grain} ({grain} bytes); unmap them "
        "first",
    ):
        window.free()
    with raises(
        UsageError,
        "PhysicalMemory.release: expected memory that is mapped nowhere, got memory with 1 mappings; unmap them first",
    ):
        memory.release()
    mapping.tensor(1, pt.i32).copy_from([5])
    mapping.unmap()
    for call, text in (
        (lambda: mapping.tensor(1, pt.i32), "Mapping.tensor: expected one that is in use, got one that was unmapped"),
        (lambda: mapping.allow(window.device), "Mapping.allow: expected one that is in use, got one that was unmapped"),
    ):
        with raises(UsageError, text):
            call()
    window.free()
    with raises(UsageError, "Reservation.map: reservation: expected one that is in use, got one that was freed"):
        window.map(memory)
    memory.release()
    with vmm.Reservation(grain) as other:
        with raises(UsageError, "Reservation.map: memory: expected one that is in use, got one that was released"):
            other.map(memory)
        with raises(UsageError, "PhysicalMemory.export: expected one that is in use, got one that was released"):
            memory.export()


def test_places_that_do_not_fit_are_refused(grain):
    with vmm.PhysicalMemory(2 * grain) as memory, vmm.Reservation(4 * grain) as window:
        with window.map(memory, at=grain):
            for at, text in (
                (1, f"expected a multiple of {grain} bytes, got 1"),
                (3 * grain, f"expected room for {2 * grain} bytes in {4 * grain}, got {3 * grain}"),
                (
                    2 * grain,
                    f"expected addresses with nothing mapped, got {2 * grain}, where [{grain}, {3 * grain}) is; unmap "
                    "that first",
                ),
            ):
                with raises(ArgumentError, f"Reservation.map: at: {text}"):
                    window.map(memory, at=at)
        mapping = window.map(memory)
        with raises(
            ArgumentError,
            f"Mapping.tensor: i32[4]: expected 16 bytes from {2 * grain - 8} on within {2 * grain}, got 8 beyond",
        ):
            mapping.tensor(4, pt.i32, offset=2 * grain - 8)
        mapping.unmap()
        window.grain = 4 * grain  # as of memory that is shared in another way
        with raises(
            ArgumentError,
            f"Reservation.map: memory: expected a multiple of {4 * grain} bytes, got {2 * grain}; make both for one "
            "device and one way of sharing",
        ):
            window.map(memory)


def test_an_end_that_fails_can_be_tried_again(grain, monkeypatch):
    memory, window = vmm.PhysicalMemory(grain), vmm.Reservation(grain)
    mapping = window.map(memory)
    device = mapping.memory.device
    x = mapping.tensor(4, pt.i32)

    def refuse(*_):
        raise AllocationError("refused")

    with monkeypatch.context() as patch:
        patch.setattr(mapping._pages, "unmap", refuse)
        patch.setattr(mapping._pages, "set_access", refuse)
        for end in (lambda: mapping.forbid(device), mapping.unmap):
            with raises(AllocationError, "refused"):
                end()
    assert mapping.devices == (device,)
    with pytest.raises(UsageError, match="was taken from its device"):
        x.numpy()
    assert mapping.tensor(4, pt.i32).copy_from([1, 2, 3, 4]).numpy().tolist() == [1, 2, 3, 4]
    mapping.unmap()
    window.free()
    memory.release()


def test_bad_arguments_are_refused():
    for call, text in (
        (lambda: vmm.PhysicalMemory(0), "nbytes: expected an integer >= 1, got 0"),
        (lambda: vmm.Reservation(True), "nbytes: expected an integer >= 1, got True"),
        (lambda: vmm.Reservation(1, alignment=3), "alignment: expected a power of two, got 3"),
        (lambda: vmm.granularity("cpu"), "device: expected a Device, got 'cpu'"),
        (
            lambda: vmm.PhysicalMemory(1, share=pt.ShareKind.IPC),
            "share: expected ShareKind.FD or ShareKind.FABRIC, got ShareKind.IPC",
        ),
    ):
        with raises(ArgumentError, text):
            call()


@pytest.mark.cpu_only
def test_more_memory_than_there_is():
    with pytest.raises(AllocationError, match=r"^memory: asked for \d+ bytes, \d+ are free on cpu:0; ask for less$"):
        vmm.PhysicalMemory(1 << 50)


@pytest.mark.cpu_only
@pytest.mark.skipif(sys.platform != "linux", reason="files in memory are of Linux")
def test_memory_is_there_when_it_is_made(grain):
    with vmm.PhysicalMemory(100 * grain) as memory:
        assert os.fstat(memory._handle).st_blocks * 512 >= 100 * grain


@pytest.mark.feature("D4", "cpu")
def test_access_is_given_and_taken(grain):
    memory, window = vmm.PhysicalMemory(grain), vmm.Reservation(grain)
    mapping = window.map(memory, devices=())
    device = mapping.memory.device
    with raises(UsageError, f"Mapping.tensor: expected a device with access, got {device.name}; `allow` it first"):
        mapping.tensor(4, pt.i32)
    mapping.allow(device)
    assert mapping.devices == (device,)
    x = mapping.tensor(4, pt.i32)
    x.copy_from([1, 2, 3, 4])
    mapping.forbid(device)
    with raises(UsageError, "Tensor.numpy: a mapping's i32[4] was taken from its device; use it before that"):
        x.numpy()
    mapping.allow(device)
    assert mapping.tensor(4, pt.i32).numpy().tolist() == [1, 2, 3, 4]
    mapping.unmap()
    window.free()
    memory.release()


@pytest.mark.feature("D4", "cpu")
def test_memory_goes_over_a_socket(grain):
    """As to another process: the descriptor arrives as another one."""
    memory, window = vmm.PhysicalMemory(grain), vmm.Reservation(2 * grain)
    here, there = socket.socketpair(socket.AF_UNIX)
    share = memory.export()
    assert memory.export() is share
    with here, there:
        socket.send_fds(here, [share.payload], list(share.fds))
        payload, fds, _, _ = socket.recv_fds(there, 1000, 1)
    twin = vmm.PhysicalMemory.from_share(share._replace(payload=payload).with_fds(tuple(fds)))
    assert twin.nbytes == memory.nbytes
    one, two = window.map(memory), window.map(twin, at=grain)
    one.tensor(4, pt.i32).copy_from([4, 3, 2, 1])
    assert two.tensor(4, pt.i32).numpy().tolist() == [4, 3, 2, 1]
    one.unmap()
    memory.release()
    assert two.tensor(4, pt.i32).numpy().tolist() == [4, 3, 2, 1]  # the twin keeps it
    two.unmap()
    twin.release()
    window.free()
    with raises(
        ArgumentError,
        "share: expected a handle that `PhysicalMemory.export` gave, with 1 descriptors, got one with 0 and 3 bytes",
    ):
        vmm.PhysicalMemory.from_share(vmm.ShareHandle(pt.ShareKind.FD, b"abc"))


@pytest.mark.cpu_only
def test_the_simulated_machine_has_none():
    def program(group):
        with raises(UnsupportedError, "vmm: sim has no virtual memory to map by hand"):
            vmm.granularity()

    assert_clean(program, ranks=1, schedules=1)


# ------------------------------------------------------------------------------------- over the driver's stand-in


@pytest.fixture
def stand_in():
    api = FakeCuda()
    device = Device(CudaDriver(api=api).open())
    yield api, device
    device.driver.close()


@pytest.mark.cpu_only
def test_the_calls_of_the_driver_come_in_order(stand_in):
    api, device = stand_in
    log = []
    for name in ("create_memory", "reserve", "map", "set_access", "unmap", "free_reservation", "release_memory"):
        real = getattr(api, name)
        setattr(api, name, lambda *a, _name=name, _real=real, **k: (log.append(_name), _real(*a, **k))[1])
    with vmm.PhysicalMemory(1, device=device) as memory, vmm.Reservation(1, device=device) as window:
        mapping = window.map(memory)
        mapping.forbid(device)
        mapping.allow(device)
        x = mapping.tensor(4, pt.i32)
        del mapping, x
        gc.collect()
    steps = ["create_memory", "reserve", "map", *["set_access"] * 3, "unmap", "free_reservation", "release_memory"]
    assert log == steps


@pytest.mark.cpu_only
def test_a_mapping_that_the_driver_refuses_leaves_nothing(stand_in):
    api, device = stand_in
    memory, window = vmm.PhysicalMemory(1, device=device), vmm.Reservation(1, device=device)
    real = api.set_access

    def refuse(*args, **kwargs):
        raise fake_error("cuMemSetAccess")

    api.set_access = refuse
    with pytest.raises(pt.PeertileError, match="cuMemSetAccess"):
        window.map(memory)
    api.set_access = real
    with window.map(memory):
        pass
    window.free()
    memory.release()


@pytest.mark.cpu_only
def test_more_than_a_gpu_has_is_told_as_on_cpu(stand_in, monkeypatch):
    api, device = stand_in
    grain = vmm.granularity(device)

    def refuse(*_):
        raise CudaError("a call", "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")

    monkeypatch.setattr(api, "reserve", refuse)
    with raises(
        AllocationError, f"addresses: asked for {grain} bytes, and {device.name} has no range of so many; ask for less"
    ):
        vmm.Reservation(1, device=device)
    monkeypatch.setattr(api, "create_memory", refuse)
    with pytest.raises(AllocationError, match=rf"^memory: asked for {grain} bytes, \d+ are free on {device.name}; "):
        vmm.PhysicalMemory(1, device=device)


def fake_error(call):
    return CudaError(call, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal")


@pytest.mark.cuda2
@pytest.mark.feature("D4", "cuda")
def test_memory_of_another_gpu_is_mapped_beside_ones_own(rng):
    devices = [pt.open_device(pt.DriverKind.CUDA, k) for k in range(2)]
    grain = max(vmm.granularity(d) for d in devices)
    values = rng.integers(0, 1 << 30, 1000).astype(np.int32)
    memories = [vmm.PhysicalMemory(grain, device=d) for d in devices]
    window = vmm.Reservation(2 * grain, device=devices[0])
    maps = [window.map(m, at=k * grain, devices=devices) for k, m in enumerate(memories)]
    for mapping in maps:
        mapping.tensor(1000, pt.i32, device=devices[0]).copy_from(values)
        np.testing.assert_array_equal(mapping.tensor(1000, pt.i32, device=devices[1]).numpy(), values)
        mapping.unmap()
    window.free()
    for memory in memories:
        memory.release()


@pytest.mark.cpu_only
def test_a_forked_child_leaves_the_memory_to_its_parent(grain):
    memory, window = vmm.PhysicalMemory(grain), vmm.Reservation(grain)
    mapping = window.map(memory)
    x = mapping.tensor(4, pt.i32)
    x.copy_from([1, 2, 3, 4])
    child = os.fork()
    if child == 0:
        del x, mapping, window, memory
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert x.numpy().tolist() == [1, 2, 3, 4]
