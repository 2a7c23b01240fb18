"""Memory of other libraries, pools, warm-up, partitions: what a launch needs besides operations."""

import ctypes
import gc
import threading
import weakref

import numpy as np
import pytest

import peertile as pt
import peertile.language as T
from peertile.errors import AllocationError, ArgumentError, LeaseError, UnsupportedError, UsageError
from peertile.runtime.drivers.cpu import CpuDriver

pytestmark = pytest.mark.any_device

BITS = {"f16": 10, "bf16": 7, "f8e4m3": 3, "f8e5m2": 2}
"""Of the mantissa."""
DTYPES = [
    pt.bool_, pt.i8, pt.i16, pt.i32, pt.i64, pt.u8, pt.u16, pt.u32, pt.u64, pt.f16, pt.bf16, pt.f32, pt.f64,
    pt.f8e4m3, pt.f8e5m2,
]  # fmt: skip


@pt.kernel
def double(z: T.Exclusive):
    z.store(z.load() + z.load())


def load_kernels():
    double(pt.zeros(1000, pt.f32).partition(1024)).sync()


def values(tensor):
    return tensor.numpy().tolist()


@pytest.mark.sentence("NU-30")
@pytest.mark.parametrize("dtype", [pt.f16, pt.bf16, pt.f8e4m3, pt.f8e5m2], ids=str)
def test_f64_becomes_a_narrow_type_on_the_host_as_in_a_kernel(dtype):
    """Through f32: just above the middle between two neighbours it is the middle there."""
    above = np.array([1.0, 1024.0, 0.25]) * (1 + 0.5 * np.array([[1], [3]]) * 2.0 ** -BITS[dtype.name] + 2.0**-40)
    x = pt.asarray(above)
    assert pt.asarray(above, dtype).numpy().tobytes() == pt.op.convert(x, dtype).sync().numpy().tobytes()


# ---------------------------------------------------------------- DLPack and addresses


@pytest.mark.feature("H15", "cpu")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dlpack_carries_every_dtype_through_and_back(dtype):
    x = pt.asarray(np.arange(6).reshape(2, 3) % 2, dtype)
    y = pt.from_dlpack(Capsules(x))
    assert (y.dtype, y.shape, y.strides, y.address) == (x.dtype, (2, 3), (3, 1), x.address)
    np.testing.assert_array_equal(y.numpy(), x.numpy())


class Capsules:
    """Another library, as far as DLPack tells: capsules and a device."""

    def __init__(self, tensor, device=None):
        self.tensor = tensor
        self.device = device

    def __dlpack__(self, **_):
        return self.tensor.__dlpack__()

    def __dlpack_device__(self):
        return self.device or self.tensor.__dlpack_device__()


@pytest.mark.cpu_only
@pytest.mark.feature("H15", "cpu")
def test_numpy_and_peertile_see_the_same_memory():
    x = pt.asarray(np.arange(8, dtype=np.float32))
    array = np.from_dlpack(x)
    pt.op.fill(x, 3).sync()
    assert array.tolist() == [3] * 8
    view = np.from_dlpack(x[0:8:2])
    assert (view.shape, view.strides) == ((4,), (8,))
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    y = pt.from_dlpack(a[:, ::2])
    double(y.partition((4, 2))).sync()
    assert a.tolist() == [[0, 1, 4, 3], [8, 5, 12, 7], [16, 9, 20, 11]]
    import ml_dtypes

    b = np.ones(4, ml_dtypes.bfloat16)
    double(pt.from_dlpack(b).partition(4)).sync()
    assert b.tolist() == [2] * 4
    np.testing.assert_array_equal(np.asarray(x), x.numpy())
    assert np.asarray(x, np.int64).dtype == np.int64


class Unread(Capsules):
    """As torch's tensors of bf16 and fp8: numpy is refused."""

    def __array__(self, dtype=None, copy=None):
        raise TypeError("Got unsupported ScalarType BFloat16")


@pytest.mark.cpu_only
@pytest.mark.parametrize("kind", [Capsules, Unread])
@pytest.mark.parametrize("dtype", [pt.bf16, pt.f8e4m3, pt.f32], ids=str)
def test_what_numpy_does_not_read_is_copied_through_dlpack(kind, dtype):
    x = pt.asarray(np.arange(24).reshape(4, 6) % 7, dtype)
    for view in (x, x.permute(1, 0)[1:4, ::2], x[2:2]):
        found = pt.asarray(kind(view))
        assert (found.dtype, found.is_contiguous) == (dtype, True)
        np.testing.assert_array_equal(found.numpy(), view.numpy())
    found = pt.asarray(kind(x), pt.i32)
    pt.op.fill(x, 0).sync()
    assert found.numpy().tolist() == (np.arange(24).reshape(4, 6) % 7).tolist()


@pytest.mark.slow
@pytest.mark.cpu_only
@pytest.mark.feature("H15", "cpu")
def test_memory_stays_alive_on_both_sides(hold):
    device = pt.current_device()
    gc.collect()
    before = device.memory().in_use
    x = pt.full(1000, 4, pt.f32)
    array = np.from_dlpack(x)
    del x
    gc.collect()
    assert array.sum() == 4000
    assert device.memory().in_use > before
    del array
    gc.collect()
    assert device.memory().in_use == before
    pt.zeros(4, pt.f32).__dlpack__()  # a capsule that nobody consumes
    gc.collect()
    assert device.memory().in_use == before

    class Owner(np.ndarray):
        pass

    a = np.ones(1000, np.float32).view(Owner)
    gone = weakref.ref(a)
    stream = device.stream()
    with hold(stream):
        double(pt.from_dlpack(a).partition(1024)).submit(stream)
        del a
        gc.collect()
        assert gone() is not None
    stream.sync()
    pt.live_submissions()
    gc.collect()
    assert gone() is None


@pytest.mark.cpu_only
@pytest.mark.feature("H15", "cpu")
def test_an_export_waits_for_what_is_enqueued():
    device = pt.current_device()
    stream = device.stream()
    x, word = pt.zeros(4, pt.f32), pt.zeros(1, pt.u32)
    pt.op.wait_eq(word, 1).then(lambda: pt.op.fill(x, 2)).submit(stream)
    got = []
    reader = threading.Thread(target=lambda: got.append(np.from_dlpack(x).tolist()))
    reader.start()
    pt.op.set_signal(word, 1).sync_on(device.default_stream)
    reader.join(20)
    assert got == [[2] * 4]


@pytest.mark.feature("H15", "cpu")
def test_memory_at_an_address_says_who_owns_it():
    a = np.arange(4, dtype=np.int32)
    at = a.ctypes.data
    if not pt.current_device().capabilities.host_addressable:  # memory of the device, then
        a = pt.asarray(a)
        at = a.address
    x = pt.from_address(at, 4, pt.i32, owner=a)
    assert values(x) == [0, 1, 2, 3]
    assert values(pt.from_address(at, (2,), pt.i32, strides=(2,), is_unowned=True)) == [0, 2]
    freed = []
    y = pt.from_address(at, 4, pt.i32, release=freed.append)
    assert values(y) == [0, 1, 2, 3]
    assert freed == []
    del y
    gc.collect()
    assert freed == [at]


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("call", "message", "error"),
    [
        (lambda a: pt.from_address(a.ctypes.data, 4, pt.i32), "from_address: expected exactly one of owner, release and is_unowned=True", ArgumentError),
        (lambda a: pt.from_address(a.ctypes.data, 4, pt.i32, owner=a, is_unowned=True), "from_address: expected exactly one of owner, release and is_unowned=True", ArgumentError),
        (lambda a: pt.from_address(4097, 4, pt.i32, owner=a), "address: expected one aligned to 4 bytes for i32, got 0x1001 (1 bytes off)", ArgumentError),
        (lambda a: pt.from_address(0, 4, pt.i32, owner=a), "address: expected the address of 4 elements, got 0", ArgumentError),
        (lambda a: pt.from_address(a.ctypes.data, (2, 2), pt.i32, owner=a, strides=(1,)), "strides: expected 2 for shape (2, 2), got (1,)", ArgumentError),
        (lambda a: pt.from_dlpack(a[::-1]), "strides: expected elements >= 0, got (-1,); copy the array first", ArgumentError),
        (lambda a: pt.from_dlpack([1, 2]), "from_dlpack: expected an object with __dlpack__, got list", ArgumentError),
        (lambda a: pt.from_dlpack(np.ones(2, np.complex64)), "dtype: expected one of", ArgumentError),
        (lambda a: pt.from_dlpack(Capsules(pt.zeros(4, pt.f32), (2, 0))), "from_dlpack: cpu:0 is DLPack device (1, 0), the array is on (2, 0); move it there first", UnsupportedError),
    ],
)  # fmt: skip
def test_wrong_memory_is_refused(call, message, error):
    with pytest.raises(error) as caught:
        call(np.arange(4, dtype=np.int32))
    assert str(caught.value).startswith(message)


@pytest.mark.cpu_only
def test_a_read_only_array_and_a_used_capsule_are_refused():
    a = np.ones(4, np.float32)
    a.flags.writeable = False
    with pytest.raises(ArgumentError) as caught:
        pt.from_dlpack(a)
    assert str(caught.value) == "from_dlpack: expected an array that can be written, got a read-only one; copy it"
    x = pt.zeros(4, pt.f32)

    class Once(Capsules):
        kept = x.__dlpack__()

        def __dlpack__(self, **_):
            return self.kept

    pt.from_dlpack(Once(x))
    with pytest.raises(ArgumentError) as caught:
        pt.from_dlpack(Once(x))
    assert str(caught.value) == "dlpack: expected a capsule that nobody has consumed, got a used one; make a new one"
    assert not hasattr(x, "__cuda_array_interface__")


# ---------------------------------------------------------------- one memory, several tensors


def refused(call, what):
    with pytest.raises(LeaseError) as caught:
        call()
    assert what in str(caught.value)


@pytest.mark.cpu_only
@pytest.mark.feature("H11", "cpu")
@pytest.mark.feature("H15", "cpu")
def test_wrappings_of_one_memory_are_leased_as_one(hold):
    device = pt.current_device()
    a, b = device.stream("a"), device.stream("b")
    array = np.zeros(64, np.float32)
    whole, end = pt.from_dlpack(array), pt.from_dlpack(array[48:])
    with hold(a):
        pt.op.fill(whole, 1).submit(a)
        refused(lambda: pt.op.fill(end, 2).submit(b), "fill on b")
        refused(lambda: pt.op.copy(end).sync_on(b), "would read numpy array f32[16], but fill on a")
        late = pt.from_address(array.ctypes.data, 4, pt.f32, owner=array)
        refused(lambda: pt.op.fill(late, 2).submit(b), "would write memory")
    a.sync()
    pt.op.fill(end, 2).sync_on(b)
    assert array.tolist() == [1] * 48 + [2] * 16


@pytest.mark.cpu_only
@pytest.mark.feature("H11", "cpu")
def test_a_wrapping_that_joins_two_others_joins_their_leases(hold):
    device = pt.current_device()
    a, b, c = device.stream("a"), device.stream("b"), device.stream("c")
    array = np.zeros(64, np.float32)
    left, right = pt.from_dlpack(array[:32]), pt.from_dlpack(array[32:])
    with hold(a, b):
        pt.op.fill(left, 1).submit(a)
        pt.op.fill(right, 2).submit(b)  # apart, hence side by side
        both = pt.from_dlpack(array)
        refused(lambda: pt.op.fill(both, 3).submit(c), "fill on c")
        refused(lambda: pt.op.fill(left, 3).submit(c), "but fill on a")
        refused(lambda: pt.op.fill(right, 3).submit(c), "but fill on b")
    a.sync(), b.sync()
    assert left.storage.claims is right.storage.claims is both.storage.claims


@pytest.mark.slow
@pytest.mark.feature("H11", "cpu")
def test_our_own_memory_that_comes_back_is_leased_as_itself(hold):
    device = pt.current_device()
    a, b = device.stream("a"), device.stream("b")
    x = pt.zeros(64, pt.f32)
    back = pt.from_dlpack(Modern(x))
    with hold(a):
        pt.op.fill(x, 1).submit(a)
        refused(lambda: pt.op.fill(back, 2).submit(b), "fill on b")
    a.sync()
    y = pt.zeros(64, pt.f32)
    same = pt.from_address(y.address, 64, pt.f32, owner=y)
    with hold(a):
        pt.op.fill(y, 1).submit(a)
        refused(lambda: pt.op.fill(same, 2).submit(b), "fill on b")
    frozen = x.share()
    refused(lambda: pt.op.fill(back, 2).sync_on(b), "a frozen share of it")
    del frozen
    pt.op.fill(back, 2).sync_on(b)
    assert values(x) == [2] * 64


class Modern(Capsules):
    """A library that knows DLPack 1.0."""

    def __dlpack__(self, *, max_version=None, **_):
        return self.tensor.__dlpack__(max_version=max_version)


@pytest.mark.slow
@pytest.mark.cpu_only
@pytest.mark.feature("H15", "cpu")
def test_a_frozen_share_goes_out_as_read_only_and_stays_frozen_while_it_is_out():
    x = pt.ones(4, pt.f32)
    frozen = x.share()
    with pytest.raises(BufferError) as caught:
        frozen.__dlpack__()
    assert str(caught.value) == (
        "dlpack: expected a consumer of DLPack 1.0 for a frozen share, which nobody may write; export a copy"
    )
    with pytest.raises(ArgumentError) as refusal:
        pt.from_dlpack(Modern(frozen))
    assert str(refusal.value) == "from_dlpack: expected an array that can be written, got a read-only one; copy it"
    array = np.from_dlpack(frozen)
    assert not array.flags.writeable
    del frozen, caught, refusal  # errors hold the frames that they came through
    gc.collect()
    refused(lambda: pt.op.fill(x, 2).sync(), "a frozen share of it")
    del array
    gc.collect()
    pt.op.fill(x, 2).sync()
    assert values(x) == [2] * 4


@pytest.mark.cpu_only
@pytest.mark.feature("H15", "cpu")
def test_numpy_may_write_what_dlpack_1_0_gives_it():
    x = pt.zeros(4, pt.f32)
    array = np.from_dlpack(x)
    array += 3
    assert values(x) == [3] * 4


# ---------------------------------------------------------------- memory


@pytest.mark.feature("H16", "cpu")
def test_a_pool_keeps_up_to_its_threshold():
    device = pt.open_device(ordinal=3)
    device.pool.release_threshold = 1 << 20
    a, b = device.empty(1000, pt.f32), device.empty(1000, pt.f32)
    first = a.address
    del a
    assert device.pool.stats()[:4] == (4096, 1, 0, 2)
    a = device.empty(1001, pt.f32)  # the same class of sizes
    assert (a.address, device.pool.stats()[:4]) == (first, (0, 0, 1, 2))
    big = device.empty(1 << 19, pt.f32)
    del a, b, big  # the last one does not fit
    assert device.pool.stats().cached_bytes == 8192
    device.pool.release_threshold = 5000
    assert device.pool.stats().cached_bytes == 4096
    device.pool.trim()
    assert device.memory().in_use == 0
    with pytest.raises(ArgumentError) as caught:
        device.pool.release_threshold = -1
    assert str(caught.value) == "release_threshold: expected bytes >= 0, got -1"


@pytest.mark.feature("H16", "cpu")
def test_out_of_memory_says_what_was_asked_used_and_free_and_lets_go_first():
    device = pt.Device(CpuDriver(memory_limit=1 << 20).open(4))
    device.pool.release_threshold = 1 << 20
    x = device.empty(1 << 19, pt.u8)
    with pytest.raises(AllocationError) as caught:
        device.empty(1 << 20, pt.u8)
    for part in ("1048576", "524288"):
        assert part in str(caught.value)
    del x
    device.empty((1 << 20) - 256, pt.u8)  # what the pool kept was given back for it
    stats = device.memory()
    assert stats.limit == 1 << 20
    device.pool.trim()
    assert (device.memory().in_use, device.memory().free, device.memory().peak >= 1 << 19) == (0, 1 << 20, True)


@pytest.mark.slow
@pytest.mark.native_only
def test_the_last_reference_may_go_on_any_thread():
    device = pt.current_device()
    gc.collect()
    before = device.memory().in_use
    box = [pt.zeros(1000, pt.f32)]
    worker = threading.Thread(target=box.clear)
    worker.start()
    worker.join(10)
    assert device.memory().in_use == before


@pytest.mark.cpu_only
@pytest.mark.slow
@pytest.mark.feature("H10", "cpu")
def test_a_hundred_thousand_operations_leave_nothing():
    device = pt.current_device()
    x, z = pt.ones(256, pt.f32), pt.zeros(256, pt.f32)
    stream = device.stream()
    gc.collect()
    before = device.memory().in_use
    objects = None
    for k in range(100_000):
        if k % 3:
            double(z.partition(256)).sync()
        elif k % 2:
            pt.op.dup(x).submit(stream)
        else:
            pt.op.dup(x).map(lambda t: t).sync_on(stream)
        if k == 1000:
            gc.collect()
            objects = len(gc.get_objects())
    stream.sync()
    gc.collect()
    assert device.memory().in_use == before
    assert len(gc.get_objects()) < objects + 500


# ---------------------------------------------------------------- warm-up


@pytest.mark.feature("H17", "cpu")
def test_warm_up_compiles_from_descriptions_and_launches_find_it():
    @pt.kernel
    def local(z: T.Exclusive, x: T.Shared, by: T.f32, n: T.Const[int] = 1):
        z.store(x.load_like(z) * by + n)

    spec = pt.tensor_spec((1000, 8), pt.f32)
    local.warm_up(spec.partition((16, 8)), spec, 1.0)
    local.warm_up(spec.partition((16, 8)), spec, by=2.0, n=2)
    assert local.compile_count == 2
    x, z = pt.ones((50, 8), pt.f32), pt.zeros((50, 8), pt.f32)
    with pytest.raises(UsageError) as caught:
        local(spec.partition((16, 8)), pt.tensor_spec((1000, 8), pt.f32), 1.0).sync()
    assert str(caught.value) == "local: expected a tensor, got a description made by tensor_spec; it holds no data"
    same = pt.tensor_spec((50, 8), pt.f32)
    local.warm_up(same.partition((16, 8)), same, 1.0)
    count = local.compile_count
    local(z.partition((16, 8)), x, 1.0).sync()
    assert local.compile_count == count
    assert (z.numpy() == 2).all()


def test_warm_up_of_a_kernel_without_a_partition_takes_a_grid():
    @pt.kernel
    def free(x: T.Shared):
        T.assert_(T.program_id(0) >= 0)

    free.warm_up(pt.tensor_spec(4, pt.f32), grid=3)
    free.grid(3)(pt.ones(4, pt.f32)).sync()
    assert free.compile_count == 1


# ---------------------------------------------------------------- partitions


@pytest.mark.feature("H14", "cpu")
def test_a_prefix_of_a_partition_writes_no_more_and_gives_the_whole_back():
    z = pt.ones((10, 8), pt.f32)
    part = z.partition((4, 8)).prefix(6)
    (back,) = double(part).sync()
    assert back.unpartition() is z
    assert z.numpy()[:, 0].tolist() == [2] * 6 + [1] * 4
    assert part.num_tiles == (2, 1)
    assert part.prefix(3, 2).unpartition() is z
    with pytest.raises(ArgumentError) as caught:
        part.prefix(11)
    assert str(caught.value) == "prefix: expected up to 2 extents within (6, 8), got (11,)"


@pytest.mark.sentence("BD-10")
@pytest.mark.sentence("BD-11")
@pytest.mark.feature("H14", "cpu")
def test_a_mapped_partition_visits_every_tile_once():
    @pt.kernel
    def mapped(z: T.Exclusive):
        for tile in z.tiles():
            tile.store(tile.load() + 1)

    z = pt.zeros((100, 70), pt.f32)
    for programs, swizzle in ((1, 1), (3, 1), (7, 4), (None, 2)):
        mapped(z.partition((16, 16)).persistent(programs=programs, swizzle=swizzle)).sync()
    assert (z.numpy() == 4).all()


@pytest.mark.native_only
@pytest.mark.cpu_only
def test_raw_addresses_are_ordered_by_waiting():
    x = pt.zeros(4, pt.f32)
    pt.op.fill(x, 2).submit()
    assert ctypes.c_float.from_address(np.from_dlpack(x).ctypes.data).value == 2.0
