"""What the devices of one process share, over a stand-in for the NVIDIA driver: pages of the host, loaded kernels."""

import threading
import time

import pytest

from peertile.errors import UnsupportedError
from peertile.runtime.drivers.cuda_api import CudaError, PointerKind
from peertile.runtime.drivers.cuda_peers import PAGE_BYTES, HostPages, SharedModules
from peertile.runtime.drivers.cuda_waits import StreamWaits


class Api:
    """Counts what is asked of it."""

    def __init__(self):
        self.registered, self.calls, self.modules = set(), [], set()
        self.refuse = None

    def pointer_kind(self, address):
        return PointerKind.PINNED if address & -PAGE_BYTES in self.registered else PointerKind.PAGEABLE

    def register_host(self, page, nbytes):
        if self.refuse is not None:
            raise self.refuse
        self.registered.add(page)

    def unregister_host(self, page):
        self.registered.remove(page)

    def host_device_pointer(self, page):
        return page + (1 << 40)

    def retain_context(self, handle):
        self.calls.append(("retain", handle))
        return f"context of {handle}"

    def release_context(self, handle):
        self.calls.append(("release", handle))

    def push_context(self, context):
        self.calls.append(("push", context))

    def pop_context(self):
        self.calls.append(("pop",))

    def load_module(self, payload):
        module = len(self.calls) + 100
        self.calls.append(("load", payload))
        self.modules.add(module)
        return module

    def function(self, module, entry):
        return module, entry

    def unload_module(self, module):
        self.modules.remove(module)


class Gpu:
    def __init__(self, api, number):
        self.api, self.handle, self.name, self.context_number = api, number, f"cuda:{number}", 1000 + number


@pytest.fixture
def api():
    return Api()


def test_a_page_is_registered_once_and_stays_until_its_last_user_is_closed(api):
    pages, a, b = HostPages(), Gpu(api, 0), Gpu(api, 1)
    word = 7 * PAGE_BYTES + 64
    there = 7 * PAGE_BYTES + (1 << 40) + 64
    assert (pages.take(a, word), pages.take(b, word), pages.take(a, word)) == (there,) * 3
    assert api.registered == {7 * PAGE_BYTES}
    pages.leave(a)
    assert api.registered == {7 * PAGE_BYTES}
    assert ("release", 0) not in api.calls  # the context that it was registered in
    pages.leave(b)
    assert not api.registered
    assert api.calls[-3:] == [("push", "context of 0"), ("pop",), ("release", 0)]


def test_memory_that_devices_know_is_left_alone(api):
    api.registered.add(3 * PAGE_BYTES)
    assert HostPages().take(Gpu(api, 0), 3 * PAGE_BYTES + 8) == 3 * PAGE_BYTES + 8


def test_a_page_that_cannot_be_pinned_is_an_error_of_ours(api):
    api.refuse = CudaError("cuMemHostRegister", "CUDA_ERROR_NOT_SUPPORTED", "operation not supported")
    with pytest.raises(UnsupportedError) as caught:
        HostPages().take(Gpu(api, 0), 5 * PAGE_BYTES)
    assert str(caught.value) == (
        "abort word: expected an address that cuda:0 can read, got 0x5000 in memory of the host that cannot be pinned "
        "(cuMemHostRegister: operation not supported (CUDA_ERROR_NOT_SUPPORTED))"
    )


def test_a_kernel_is_loaded_once_for_two_ranks_on_one_gpu(api):
    modules, a, b, other = SharedModules(), Gpu(api, 0), Gpu(api, 0), Gpu(api, 1)
    first, again, third = (modules.load(g, b"cubin", "add") for g in (a, b, other))
    assert first == again != third
    modules.unload(a, first[0])
    assert first[0] in api.modules
    modules.unload(b, first[0])
    assert api.modules == {third[0]}


def test_a_device_that_is_closed_leaves_what_others_use(api):
    modules, a, b = SharedModules(), Gpu(api, 0), Gpu(api, 0)
    shared, _ = modules.load(a, b"one", "add")
    modules.load(b, b"one", "add")
    alone, _ = modules.load(a, b"two", "add")
    modules.leave(a)
    assert api.modules == {shared}
    assert alone not in api.modules
    modules.leave(b)
    assert not api.modules
    assert modules.load(a, b"one", "add")[0] in api.modules


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_a_wait_that_a_load_kept_from_ending_says_so(api):
    clock = Clock()
    modules, load, said = SharedModules(clock), api.load_module, []

    def takes(seconds):
        def loads(payload):
            clock.now += seconds
            said.append(modules.held_up())
            return load(payload)

        api.load_module = loads

    takes(0.9)
    modules.load(Gpu(api, 0), b"quick", "quick")
    assert modules.held_up() == ""
    takes(30)
    modules.load(Gpu(api, 1), b"slow", "all_reduce")
    told = (
        "meanwhile all_reduce was being loaded for a rank on cuda:1, which cannot end while another kernel runs on that "
        "GPU; give each rank a GPU of its own, or load kernels before, with KernelFunction.warm_up"
    )
    assert said == ["", told]
    clock.now += 0.9  # the wait has ended, and so the load has
    assert modules.held_up() == told
    clock.now += 0.2
    assert modules.held_up() == ""


def test_a_load_that_fails_is_no_load_any_more(api):
    clock = Clock()
    modules = SharedModules(clock)

    def refuses(payload):
        raise CudaError("cuModuleLoadData", "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid")

    api.load_module = refuses
    with pytest.raises(CudaError):
        modules.load(Gpu(api, 0), b"bad", "bad")
    clock.now += 60
    assert modules.held_up() == ""


def test_a_load_that_waits_holds_up_no_other_gpu(api):
    modules, slow, quick = SharedModules(), Gpu(api, 0), Gpu(api, 1)
    begun, go = threading.Event(), threading.Event()
    load = api.load_module

    def waits(payload):
        if payload == b"slow":
            begun.set()
            assert go.wait(10)
        return load(payload)

    api.load_module = waits
    thread = threading.Thread(target=modules.load, args=(slow, b"slow", "add"))
    thread.start()
    assert begun.wait(10)
    modules.load(quick, b"quick", "add")
    go.set()
    thread.join(10)
    assert len(api.modules) == 2


def test_who_wants_a_context_alone_gets_it_though_streams_begin_to_wait_all_the_time():
    """Each wait comes to its bound of 0.2 s, but there is always another, as long as any may begin."""
    waits, last, got_it = StreamWaits(patience_s=0.02), [time.monotonic()], threading.Event()
    waits.add(7, lambda: time.monotonic() - last[0] < 0.2)

    def one_after_the_other():
        end = time.monotonic() + 20
        while not got_it.wait(0.001) and time.monotonic() < end:
            if waits.may_begin(7):
                waits.begin(7, lambda: last.append(time.monotonic()) or last.pop(0))

    def alone():
        with waits.alone(7):
            got_it.set()

    threads = [threading.Thread(target=target, daemon=True) for target in (one_after_the_other, alone)]
    for thread in threads:
        thread.start()
    assert got_it.wait(5)
    for thread in threads:
        thread.join(5)
    assert not any(thread.is_alive() for thread in threads)
    assert waits.may_begin(7)
    begun = []
    waits.begin(7, lambda: begun.append(True))
    assert begun == [True]  # others may begin again
