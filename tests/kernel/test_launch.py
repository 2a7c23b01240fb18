"""Calling kernels: binding, grids, single use, leases, faults, compile counts. Bad input changes nothing."""

import gc
import io
import sys
import threading

import numpy as np
import pytest

import peertile as pt
import peertile.language as T
from peertile.errors import ArgumentError, CompileError, KernelAssert, LaunchError, LeaseError, OutOfBounds, UsageError

pytestmark = pytest.mark.any_device


@pt.kernel
def add(z: T.Exclusive, x: T.Shared, y: T.Shared):
    z.store(x.load_like(z) + y.load_like(z))


@pt.kernel
def scale(z: T.Exclusive, x: T.Shared, by: T.f32, plus: T.Const[int] = 0):
    z.store(x.load_like(z) * by + plus)


@pt.kernel
def both(a: T.Exclusive, b: T.Exclusive):
    a.store(b.load())
    b.store(a.load())


@pt.kernel
def fill_one(out: T.Exclusive):
    out.store(T.full((1,), 1, T.i32))


@pt.kernel
def positive(z: T.Exclusive, x: T.Shared):
    value = x.load_like(z)
    T.assert_(T.min(value, axis=0) > 0, "x must be positive")
    z.store(value)


@pt.kernel
def pick(z: T.Exclusive, x: T.Shared, index: T.i64):
    z.store(x.load((index,), (4,)))


@pt.kernel
def wait_for_word(out: T.Exclusive, word: T.Peer[T.read]):
    T.wait_eq(word.local, T.i32(1), index=(0,))
    out.store(T.full((1,), 1, T.i32))


@pt.kernel
def where_am_i(out: T.Peer):
    i, j, k = T.program_id(0), T.program_id(1), T.program_id(2)
    out.local.store((i, j, k), T.full((1, 1, 1), i * 100 + j * 10 + k, T.i64))


def arrays(*shape, count=2):
    rng = np.random.default_rng(3)
    return [rng.standard_normal(shape).astype(np.float32) for _ in range(count)]


@pytest.mark.sentence("BD-1")
@pytest.mark.feature("K1", "cpu")
@pytest.mark.parametrize("n", [1, 255, 256, 257, 5000])
def test_add_over_any_length(n):
    a, b = arrays(n)
    z = pt.full((n,), float("nan"), pt.f32)
    result = add(z.partition(256), pt.asarray(a), pt.asarray(b)).sync()
    np.testing.assert_array_equal(z.numpy(), a + b)
    assert [type(r).__name__ for r in result] == ["Partition", "Tensor", "Tensor"]


def test_empty_tensor_launches_nothing():
    z = pt.empty((0,), pt.f32)
    add(z.partition(256), z, z).sync()
    assert z.numpy().shape == (0,)


def test_views_of_a_tensor_are_arguments():
    (a,) = arrays(10, 12, count=1)
    x = pt.asarray(a)
    z = pt.full((20, 12), float("nan"), pt.f32)
    view = z[4:14:1, 0:12]
    scale(view.partition((4, 4)), x, 2.0).sync()
    np.testing.assert_array_equal(view.numpy(), a * 2)
    rest = np.delete(z.numpy(), np.s_[4:14], axis=0)
    assert np.isnan(rest).all()
    strided = pt.asarray(a)[0:10:3, 1:12:2]
    out = pt.full((4, 6), float("nan"), pt.f32)
    scale(out.partition((2, 4)), strided, 1.0, plus=3).sync()
    np.testing.assert_array_equal(out.numpy(), a[0:10:3, 1:12:2] + 3)


def test_constants_and_types_make_specialisations_and_values_do_not():
    x = pt.asarray(np.arange(8, dtype=np.float32))
    z = pt.zeros((8,), pt.f32)

    @pt.kernel
    def local(z: T.Exclusive, x: T.Shared, by: T.f32, plus: T.Const[int] = 0):
        z.store(x.load_like(z) * by + plus)

    for by in (1.0, 2.0, 3.0):
        local(z.partition(8), x, by).sync()
    assert local.compile_count == 1
    local(z.partition(8), x, 1.0, plus=1).sync()
    local(z.partition(4), x, 1.0).sync()
    assert local.compile_count == 3
    assert z.numpy().tolist() == list(range(8))


@pytest.mark.native_only
def test_threads_compile_a_specialisation_once():
    @pt.kernel
    def local(z: T.Exclusive):
        z.store(z.load() + 1)

    tensors = [pt.zeros((64,), pt.f32) for _ in range(4)]
    streams = [pt.current_device().stream() for _ in range(4)]
    start = threading.Barrier(4)

    def work(k):
        start.wait(10)
        local(tensors[k].partition(64)).sync_on(streams[k])

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert all((t.numpy() == 1).all() for t in tensors)
    assert local.compile_count == 1


def test_grid_of_three_axes():
    with pt.SymmetricHeap(pt.init(), size_bytes=1 << 20) as heap:
        out = heap.zeros((2, 3, 4), pt.i64)
        where_am_i.grid(2, 3, 4)(out).sync()
        want = [[[i * 100 + j * 10 + k for k in range(4)] for j in range(3)] for i in range(2)]
        assert out.numpy().tolist() == want


# ---------------------------------------------------------------- wrong arguments


def case(call, message, error=ArgumentError):
    return pytest.param(call, message, error, id=message[:50])


@pytest.mark.feature("H18", "cpu")
@pt.kernel
def tuned(z: T.Exclusive, width: T.Const):
    z.store(T.zeros(z.tile_shape, z.dtype))


@pt.kernel
def narrow(z: T.Exclusive, by: T.bf16):
    z.store(T.full(z.tile_shape, by.astype(z.dtype)))


@pytest.mark.parametrize(
    ("call", "message", "error"),
    [
        case(lambda z, x: add(z, x, x), "z: expected a partition (T.Exclusive); write tensor.partition(tile_shape), got Tensor"),
        case(lambda z, x: add(z.partition(8), np.ones(8), x), "x: expected a Tensor (T.Shared); make one with pt.asarray, got ndarray"),
        case(lambda z, x: add(z.partition(8), type("Tensor", (), {"__module__": "torch.own"})(), x), "x: expected a Tensor (T.Shared); make one with pt.asarray, got one of torch; pt.from_dlpack(tensor) is that memory as one of ours"),
        case(lambda z, x: add(z.partition(8), x), "add: parameter 'y' (shared) was not given"),
        case(lambda z, x: add(z.partition(8), x, x, x), "add: expected at most 3 arguments, got 4"),
        case(lambda z, x: add(z.partition(8), x, x, w=x), "add: no parameter 'w'; it has z, x, y"),
        case(lambda z, x: add(z.partition(8), x, x, y=x), "add: parameter 'y' was given twice"),
        case(lambda z, x: add.grid(3)(z.partition(8), x, x), "add: the grid (3, 1, 1) disagrees with the partition of z, which gives 2 programs; leave .grid(...) out"),
        case(lambda z, x: add.grid(0, 1, 2, 3), "grid: expected 1 to 3 integers >= 0, got (0, 1, 2, 3)"),
        case(lambda z, x: both(z.partition(8), pt.zeros((16,), pt.f32).partition(4)), "both: partitions disagree about the grid: a has 2 programs, b has 4; cut them into equally many tiles"),
        case(lambda z, x: z.partition(100), "partition: expected tile extents that are powers of two, got 100 in (100,); take the next power of two: partial tiles are padded on load and clipped on store"),
        case(lambda z, x: z.partition((4, 4)), "partition: expected 1 tile extents for shape (16,), got 2 in (4, 4)"),
        case(lambda z, x: scale(z.partition(8), x, "2"), "by: expected a number that fits f32, got '2'"),
        case(lambda z, x: scale(z.partition(8), x, 1e300), "by: expected -3.40282e+38 to 3.40282e+38 for f32, or an infinity, got 1e+300"),
        case(lambda z, x: scale(z.partition(8), x, 10**400), "by: expected -3.40282e+38 to 3.40282e+38 for f32, or an infinity, got an integer of 1329 bits"),
        case(lambda z, x: tuned(z.partition(8), [1, 2]), "width: expected a value that can be hashed, as code is compiled for it (T.Const), got [1, 2]; pass a tuple for a list"),
        case(lambda z, x: scale(z.partition(8), x, 2, plus="4"), "plus: expected a value for T.Const[int], got '4'"),
        case(lambda z, x: scale(z.partition(8), x, 2, 1.5), "plus: expected a value for T.Const[int], got 1.5"),
        case(lambda z, x: narrow(z.partition(8), 1e300), "by: expected -3.40282e+38 to 3.40282e+38 for bf16, or an infinity, got 1e+300"),
        case(lambda z, x: pick(z.partition(4), x, 1 << 70), f"index: expected {-(1 << 63)} to {(1 << 63) - 1} for i64, got {1 << 70}"),
        case(lambda z, x: pt.empty((2,), np.float32), "dtype: expected a peertile dtype such as pt.f32, got <class 'numpy.float32'>"),
        case(lambda z, x: pt.asarray(np.ones(3, np.complex64)), "dtype: expected one of bool, int8, int16, int32, int64, uint8, uint16, uint32, uint64, float16, float32, float64, bfloat16, float8_e4m3fn, float8_e5m2, got complex64"),
        case(lambda z, x: pt.empty((1, 2, 3, 4, 5), pt.f32), "shape: expected 1 to 4 axes, got 5 in (1, 2, 3, 4, 5); reshape it first"),
        case(lambda z, x: x.reshape(5), "reshape: expected 16 elements, got 5 in (5,)"),
        case(lambda z, x: x[::-1], "index: expected a step >= 1 on axis 0, got -1"),
        case(lambda z, x: x[::0], "index: expected a slice of integers with a step >= 1 on axis 0, got slice(None, None, 0)"),
        case(lambda z, x: x["a":], "index: expected a slice of integers with a step >= 1 on axis 0, got slice('a', None, None)"),
        case(lambda z, x: x.copy_from(np.ones(3)), "copy_from: expected shape (16,), got (3,)"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_before_anything_runs(call, message, error):
    z, x = pt.full((16,), 5, pt.f32), pt.ones((16,), pt.f32)
    with pytest.raises(error) as caught:
        call(z, x)
    assert str(caught.value) == message
    assert (z.numpy() == 5).all()
    add(z.partition(8), x, x).sync()  # nothing is left leased


@pytest.mark.feature("H14", "cpu")
def test_kernel_without_a_grid_says_so():
    @pt.kernel
    def free(x: T.Shared):
        T.assert_(T.program_id(0) >= 0)

    with pytest.raises(ArgumentError) as caught:
        free(pt.ones((4,), pt.f32))
    assert str(caught.value) == "free: no partition gives the grid; write free.grid(n)(...)"


@pt.kernel
def panels(y: T.Exclusive, z: T.Exclusive):
    for tile in y.tiles():
        tile.store(T.full(tile.tile_shape, 1.0, T.f32))
    for tile in z.tiles():
        tile.store(T.full(tile.tile_shape, 2.0, T.f32))


@pytest.mark.sentence("BD-13")
@pytest.mark.feature("S2", "cpu")
def test_exclusive_argument_that_overlaps_another_is_refused():
    z = pt.full((16,), 5, pt.f32)
    with pytest.raises(LaunchError) as caught:
        add(z.partition(8), z, pt.ones((16,), pt.f32)).sync()
    assert str(caught.value) == (
        "add: exclusive argument z overlaps x in a tensor f32[16]; pass separate tensors, or disjoint slices"
    )
    assert (z.numpy() == 5).all()
    a, b = z[0:8], z[8:16]
    both(a.partition(8), b.partition(8)).sync()  # disjoint slices are fine
    part = z.partition(8)
    with pytest.raises(LaunchError) as caught:
        both(part, part).sync()  # one partition twice is no more disjoint than two
    first, second = (p.name for p in both.params)
    assert str(caught.value) == (
        f"both: exclusive argument {first} overlaps {second} in a tensor f32[16]; pass separate tensors, or disjoint "
        "slices"
    )


@pytest.mark.sentence("BD-13")
@pytest.mark.feature("S2", "cpu")
@pytest.mark.parametrize(
    ("x", "y", "apart"),
    [
        ((slice(None), slice(0, 4)), (slice(None), slice(4, 6)), True),
        ((slice(None), slice(4, 6)), (slice(None), slice(0, 4)), True),
        ((slice(0, 3), slice(4, 6)), (slice(2, 8), slice(0, 4)), True),
        ((slice(None), slice(0, 4)), (slice(None), slice(3, 6)), False),
        ((slice(0, 3), slice(2, 6)), (slice(2, 8), slice(0, 3)), False),
        ((slice(None), slice(0, 4)), (slice(2, 3), slice(None)), False),
        ((slice(0, 8, 2), slice(0, 4)), (slice(1, 8, 2), slice(None)), True),
        ((slice(0, 8, 2), slice(0, 4)), (slice(0, 8, 4), slice(4, 6)), False),  # strides that differ are not compared
        ((slice(8, 8), slice(4, 6)), (slice(None), slice(None)), True),
    ],
)
def test_columns_that_lie_apart_are_exclusive_though_their_rows_interleave(x, y, apart):
    z = pt.zeros((8, 6), pt.f32)
    parts = [z[part].partition((1, 2)).persistent(programs=2) for part in (x, y)]
    if apart:
        panels(*parts).sync()
        return
    with pytest.raises(LaunchError, match=r"^panels: exclusive argument y overlaps z in a tensor f32\[8, 6\]"):
        panels(*parts).sync()


@pytest.mark.cpu_only
def test_memory_that_was_wrapped_twice_is_still_exclusive():
    words = np.zeros(1025, np.float32)
    z, x = pt.from_dlpack(words[1:]), pt.from_dlpack(words[:1024])
    with pytest.raises(LaunchError, match=r"^scale: exclusive argument z overlaps x in "):
        scale(z.partition(1024), x, 1.0, plus=1).sync()
    a = pt.zeros((1025,), pt.f32)
    again = pt.from_address(a.address, (1024,), pt.f32, owner=a)
    with pytest.raises(LaunchError, match=r"^scale: exclusive argument z overlaps x in "):
        scale(a[1:].partition(1024), again, 1.0, plus=1).sync()
    assert not a.numpy().any()


@pytest.mark.sentence("BD-21")
@pytest.mark.feature("H14", "cpu")
def test_inputs_smaller_than_the_output_are_refused_at_launch():
    z, x = pt.full((64,), 5, pt.f32), pt.ones((16,), pt.f32)
    with pytest.raises(LaunchError) as caught:
        add(z.partition(8), z[0:0], x).sync()
    assert "pass tensors whose extents agree" in str(caught.value)
    with pytest.raises(LaunchError) as caught:
        add(z.partition(8), x, pt.ones((64,), pt.f32)).sync()
    assert str(caught.value).startswith(
        "add: tiles of 8 along axis 0 of z must be no more than tiles of 8 along axis 0 of x"
    )
    assert (z.numpy() == 5).all()


def test_dtype_mismatch_is_a_compile_error_with_a_caret():
    z, x = pt.full((16,), 5, pt.f32), pt.ones((16,), pt.i32)
    with pytest.raises(CompileError) as caught:
        scale(z.partition(8), pt.ones((16,), pt.f64), 1.0).sync()
    text = str(caught.value)
    assert "z.store(" in text
    assert "^" in text
    assert "f64" in text
    assert (z.numpy() == 5).all()
    assert (x.numpy() == 1).all()


# ---------------------------------------------------------------- faults


@pytest.mark.feature("K9", "cpu")
def test_assertion_names_op_program_and_line_and_later_launches_run():
    x = pt.asarray(np.array([1, 1, 1, 1, 1, 1, -1, 1], np.float32))
    z = pt.zeros((8,), pt.f32)
    with pytest.raises(KernelAssert) as caught:
        positive(z.partition(4), x).sync()
    first, *rest = str(caught.value).splitlines()
    assert first.startswith("assertion failed: x must be positive (program 1, ")
    assert first.endswith(" in positive")
    assert "T.assert_(T.min(value, axis=0) > 0" in "\n".join(rest)
    positive(z.partition(4), pt.ones((8,), pt.f32)).sync()
    assert (z.numpy() == 1).all()


@pytest.mark.sentence("BD-4")
@pytest.mark.sentence("BD-22")
@pytest.mark.feature("S1", "cpu")
def test_index_out_of_bounds_is_caught_in_the_kernel():
    x, z = pt.asarray(np.arange(10, dtype=np.float32)), pt.zeros((4,), pt.f32)
    pick(z.partition(4), x, 2).sync()
    assert z.numpy().tolist() == [8, 9, 0, 0]
    for index in (3, -1, 1 << 40):
        with pytest.raises(OutOfBounds) as caught:
            pick(z.partition(4), x, index).sync()
        assert str(caught.value).startswith(
            f"tile index of axis 0 of x is out of bounds: got {index}, limit 3 (program 0, "
        )
    assert z.numpy().tolist() == [8, 9, 0, 0]


# ---------------------------------------------------------------- ops, streams, leases


@pytest.mark.feature("H1", "cpu")
def test_an_op_runs_once_and_only_when_asked():
    x, z = pt.ones((8,), pt.f32), pt.zeros((8,), pt.f32)
    op = add(z.partition(8), x, x)
    assert (z.numpy() == 0).all()
    op.sync()
    assert (z.numpy() == 2).all()
    with pytest.raises(UsageError) as caught:
        op.sync()
    assert str(caught.value) == "add: an op is used once, and this one was; build a new one by calling again"


def blocked_launch(heap, stream, out):
    """A launch that runs until somebody writes 1 to the word."""
    word = heap.zeros((1,), pt.i32)
    return word, wait_for_word(out.partition(1), word).submit(stream)


def test_links_of_a_chain_are_launches_made_before_new_ones_and_those_of_operations():
    x, z = pt.full(8, 2, pt.f32), pt.zeros(8, pt.f32)
    part = z.partition(8)
    chain = add(part, x, x).then(lambda *_: add(part, x, x))  # known from here on
    chain = chain.then(lambda *_: scale(part, x, 3.0))
    chain = chain.then(lambda *_: add(part, x, pt.op.full(8, 5.0, pt.f32)))
    chain.sync()
    assert z.numpy().tolist() == [7.0] * 8


@pytest.mark.native_only
@pytest.mark.feature("H11", "cpu")
def test_conflicting_access_on_another_stream_is_refused_naming_both():
    device = pt.current_device()
    a, b = device.stream("a"), device.stream("b")
    with pt.SymmetricHeap(pt.init(), size_bytes=1 << 20) as heap:
        out = pt.zeros((1,), pt.i32)
        fill_one(out.partition(1)).sync()  # a GPU loads no code while the other runs
        word, submission = blocked_launch(heap, a, out)
        assert not submission.is_done()
        with pytest.raises(LeaseError) as caught:
            fill_one(out.partition(1)).sync_on(b)
        here, line = __file__, caught.tb.tb_lineno
        assert str(caught.value) == (
            f"lease: fill_one on b ({here}:{line}) would write a tensor i32[1], but wait_for_word on a "
            f"({here}:{blocked_launch.__code__.co_firstlineno + 3}) still writes it; wait for that operation, "
            "order the streams with an event, or run both on one stream"
        )
        later = fill_one(out.partition(1)).submit(a)  # one stream: ordered, hence fine
        word.copy_from(np.ones(1, np.int32))
        submission.wait()
        later.wait()
        fill_one(out.partition(1)).sync_on(b)
        assert out.numpy().tolist() == [1]


@pytest.mark.slow
@pytest.mark.native_only
def test_dropped_submission_keeps_its_memory_until_the_work_is_done():
    device = pt.current_device()
    stream = device.stream("dropped")
    with pt.SymmetricHeap(pt.init(), size_bytes=1 << 20) as heap:
        gc.collect()
        out = pt.zeros((1,), pt.i32)
        storage = out.storage
        word, submission = blocked_launch(heap, stream, out)
        in_use = device.memory().in_use
        del submission, out
        gc.collect()
        assert storage.leases
        assert device.memory().in_use == in_use
        word.copy_from(np.ones(1, np.int32))
        stream.sync()
        del storage
        from peertile.runtime.stream import live_submissions

        assert live_submissions() == 0
        gc.collect()
        assert device.memory().in_use < in_use


def test_memory_is_given_back_without_the_garbage_collector():
    device = pt.current_device()
    gc.collect()
    before = device.memory().in_use
    gc.disable()
    try:
        for _ in range(5):
            x, z = pt.ones((1000,), pt.f32), pt.zeros((1000,), pt.f32)
            add(z.partition(256), x, x).sync()
            del x, z
        assert device.memory().in_use == before
    finally:
        gc.enable()


@pt.kernel
def talk(z: T.Exclusive, x: T.Shared):
    T.print_("x is", x.load_like(z), T.program_id(0))
    z.store(x.load_like(z))


def test_print_shows_program_and_values(capsys):
    x, z = pt.asarray(np.arange(8, dtype=np.float32)), pt.zeros((8,), pt.f32)
    talk(z.partition(4), x).sync()
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "[program 0] x is [0., 1., 2., 3.] 0",
        "[program 1] x is [4., 5., 6., 7.] 1",
    ]
    half = pt.asarray(np.arange(4), pt.bf16)
    talk(pt.zeros((4,), pt.bf16).partition(4), half).sync()
    assert capsys.readouterr().out == "[program 0] x is [0., 1., 2., 3.] 0\n"


@pt.kernel
def größe(z: T.Exclusive):
    T.print_("größe", T.program_id(0))
    z.store(z.load())


def test_names_and_texts_beyond_ascii_run_and_are_shown_where_the_terminal_has_none_of_them(monkeypatch):
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", shown)
    größe(pt.zeros((8,), pt.f32).partition(8)).sync()
    assert shown.buffer.getvalue() == b"[program 0] gr\\xf6\\xdfe 0\n"
    monkeypatch.setattr(sys, "stdout", None)  # as of a program without a console
    größe(pt.zeros((8,), pt.f32).partition(8)).sync()


@pt.kernel
def post_once(z: T.Exclusive, box: T.Mailbox):
    box.post(z.load())
    total = T.zeros(z.tile_shape, z.dtype)
    for part in box.collect():
        total += part
    z.store(total)


@pytest.mark.sentence("MB-11")
def test_grid_larger_than_the_mailbox_is_refused():
    with pt.SymmetricHeap(pt.init(), size_bytes=1 << 20) as heap:
        box = heap.mailbox(tile=8, dtype=pt.f32, programs=1)
        z = pt.ones((32,), pt.f32)
        with pytest.raises(LaunchError) as caught:
            post_once(z.partition(8), box).sync()
        assert str(caught.value) == (
            "post_once: the grid has 4 programs, but the mailbox box was made for 1; "
            "make it with programs=4, or launch fewer programs"
        )


@pt.kernel
def transpose_in_a_loop(z: T.Exclusive, x: T.Shared, trips: T.i64):
    b = x.load_like(z)
    for _ in T.range(trips):
        b = T.permute(b, (1, 0))
    z.store(b)


@pt.kernel
def symmetrise_in_a_loop(z: T.Exclusive, x: T.Shared, trips: T.i64):
    b = x.load_like(z)
    for k in T.range(trips):
        b = b + T.permute(b, (1, 0)) if k < 5 else b
    z.store(b)


@pt.kernel
def product_of_a_symmetric_sum(z: T.Exclusive, x: T.Shared):
    b = T.zeros((16, 16), T.f32)
    for _ in T.range(2):
        b = b + x.load_like(z)
    y = b + T.permute(b, (1, 0))
    z.store(T.mma(y, y, T.zeros((16, 16), T.f32)))


@pytest.mark.parametrize("n", [2, 8, 16, 64])
def test_transposed_square_tile_is_not_written_while_it_is_read(n):
    a = np.arange(n * n, dtype=np.float32).reshape(n, n)
    for trips in (0, 1, 2, 3):
        z = pt.full((n, n), float("nan"), pt.f32)
        transpose_in_a_loop(z.partition((n, n)), pt.asarray(a), trips).sync()
        np.testing.assert_array_equal(z.numpy(), a.T if trips % 2 else a)
        symmetrise_in_a_loop(z.partition((n, n)), pt.asarray(a), trips).sync()
        expected = a
        for _ in range(trips):
            expected = expected + expected.T
        np.testing.assert_array_equal(z.numpy(), expected)


def test_product_of_a_tile_with_its_own_transpose_added():
    a = np.arange(256, dtype=np.float32).reshape(16, 16) % 13
    z = pt.zeros((16, 16), pt.f32)
    product_of_a_symmetric_sum(z.partition((16, 16)), pt.asarray(a)).sync()
    y = 2 * a + 2 * a.T
    np.testing.assert_array_equal(z.numpy(), y @ y)


@pytest.mark.feature("H5", "cpu")
def test_arguments_that_were_left_out_come_back_as_their_defaults():
    @pt.kernel
    def affine(z: T.Exclusive, by: T.f32 = 2.0, plus: T.Const[int] = 4):
        z.store(z.load() * by + plus)

    part = pt.zeros((8,), pt.f32).partition(8)
    assert affine(part).sync() == (part, 2.0, 4)
    assert affine(part, plus=5).submit().wait() == (part, 2.0, 5)
