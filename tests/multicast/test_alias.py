"""Two addresses of one memory in one address space, and the fence between them."""

import ctypes
import mmap
import os

import numpy as np
import pytest
from tests.frontend.helpers import error

import peertile as pt
import peertile.language as T
from peertile.runtime.driver import ShareKind
from peertile.runtime.registry import current_device

N, ROUNDS = 128, 50


@pt.kernel(unsafe=True)
def ping(a: T.Pointer, b: T.Pointer, log: T.Pointer, rounds: T.i32, N: T.Const[int]):
    """What is written through one address is read through the other, and the other way round."""
    i = T.iota(N)
    token = T.unsafe.token()
    for r in T.range(rounds):
        token = T.unsafe.store_ptr(a + i, (i + r).astype(T.f32), order=T.weak, token=token)
        token = T.unsafe.fence_alias(token)
        seen, token = T.unsafe.load_ptr(b + i, order=T.weak, token=token)
        token = T.unsafe.store_ptr(b + i, seen * 2.0, order=T.weak, token=token)
        token = T.unsafe.fence_alias(token)
        back, token = T.unsafe.load_ptr(a + i, order=T.weak, token=token)
        token = T.unsafe.store_ptr(log + r * N + i, back, order=T.weak, token=token)


def check(a, b):
    log = pt.empty((ROUNDS, N), pt.f32)
    log.copy_from(np.full((ROUNDS, N), -1, np.float32))
    ping.grid(1)(a.pointer(), b.pointer(), log.pointer(), ROUNDS, N=N).sync()
    expected = 2.0 * (np.arange(N)[None, :] + np.arange(ROUNDS)[:, None])
    np.testing.assert_array_equal(log.numpy(), expected)
    np.testing.assert_array_equal(a.numpy(), b.numpy())


@pytest.mark.feature("K14", "cpu")
def test_two_mappings_of_a_file_are_one_memory():
    fd = os.memfd_create("alias")
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        maps = [mmap.mmap(fd, mmap.PAGESIZE) for _ in range(2)]
    finally:
        os.close(fd)
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(m)) for m in maps]
    assert addresses[0] != addresses[1]
    check(*(pt.from_address(p, (N,), pt.f32, owner=m) for p, m in zip(addresses, maps, strict=True)))


@pytest.mark.cuda
@pytest.mark.feature("K14", "cuda")
def test_two_mappings_of_device_memory_are_one_memory():
    driver = current_device().driver
    segment, first = driver.create_segment(N * 4, ShareKind.FD)
    api, size = driver.api, segment.size
    api.push_context(driver.context)
    try:
        second = api.reserve(size, size)
        api.map(second, size, segment.handle)
        api.set_access(second, size, [driver.handle])
        try:
            check(*(pt.from_address(p, (N,), pt.f32, is_unowned=True) for p in (first, second)))
        finally:
            api.unmap(second, size)
            api.free_reservation(second, size)
    finally:
        api.pop_context()
        driver.free_segment(segment)


def test_a_fence_takes_a_token_or_nothing():
    def kernel(x):
        T.unsafe.fence_alias(3)

    assert str(error(kernel, unsafe=True)).split("\n")[0] == (
        "T.unsafe.fence_alias: token: expected a token, from T.unsafe.token() or an operation, got the int 3"
    )


def test_a_fence_belongs_to_unsafe_kernels():
    def kernel(x):
        T.unsafe.fence_alias()

    assert (
        str(error(kernel)).split("\n")[0].startswith("T.unsafe.fence_alias in the kernel `kernel`, which is not unsafe")
    )
