"""Lazy operations: constructors, combinators, single use, the execution lock, forms of arguments."""

import gc
import threading

import numpy as np
import pytest

import peertile as pt
import peertile.language as T
from peertile.errors import AllocationError, ArgumentError, DeviceFault, KernelAssert, UsageError

pytestmark = pytest.mark.any_device


@pt.kernel
def add(z: T.Exclusive, x: T.Shared, y: T.Shared):
    z.store(x.load_like(z) + y.load_like(z))


@pt.kernel
def scale(z: T.Exclusive, x: T.Shared, by: T.f32):
    z.store(x.load_like(z) * by)


@pt.kernel
def positive(z: T.Exclusive, x: T.Shared):
    T.assert_(T.min(x.load_like(z), axis=0) > 0, "x must be positive")
    z.store(x.load_like(z))


def load_kernels():
    x = pt.ones(4, pt.f32)
    z = [pt.zeros(4, pt.f32).partition(4) for _ in range(3)]
    pt.zip(add(z[0], x, x), scale(z[1], x, 2.0), positive(z[2], x)).sync()


def doubled(x):
    z = pt.empty(x.shape, x.dtype)
    return add(z.partition(4), x, x).map(lambda z, *_: z.unpartition())


def values(tensor):
    return tensor.numpy().tolist()


# ---------------------------------------------------------------- constructors


@pytest.mark.feature("H2", "cpu")
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: pt.op.zeros((2, 2), pt.f32), np.zeros((2, 2))),
        (lambda: pt.op.ones(3, pt.i16), np.ones(3)),
        (lambda: pt.op.full(3, 2.5, pt.f64), np.full(3, 2.5)),
        (lambda: pt.op.full(3, 1.5, pt.bf16), np.full(3, 1.5)),
        (lambda: pt.op.full(2, True, pt.bool_), np.full(2, True)),
        (lambda: pt.op.full(5, -1, pt.i8), np.full(5, -1)),
        (lambda: pt.op.zeros(0, pt.f32), np.zeros(0)),
        (lambda: pt.op.arange(2, 10, 3, dtype=pt.i64), np.arange(2, 10, 3)),
        (lambda: pt.op.linspace(0, 1, 5), np.linspace(0, 1, 5)),
        (lambda: pt.op.eye(2, 3), np.eye(2, 3)),
        (lambda: pt.op.copy([1, 2, 3]), np.array([1, 2, 3])),
        (lambda: pt.op.copy(7, dtype=pt.f32), np.array([7])),
        (lambda: pt.op.dup(pt.arange(6).reshape(2, 3)[0:2, 0:3:2]), np.array([[0, 2], [3, 5]])),
        (lambda: pt.op.convert(pt.linspace(0, 3, 4), pt.i32), np.arange(4)),
    ],
)
def test_constructors_give_what_numpy_gives(make, expected):
    np.testing.assert_array_equal(np.asarray(make().sync().numpy(), expected.dtype), expected)


@pytest.mark.parametrize(
    ("name", "make", "why"),
    [
        ("arange", lambda: pt.arange(1e18), "Unable to allocate 6.94 EiB for an array with shape (10"),
        ("arange", lambda: pt.arange(0, 1, 1e-300), "Maximum allowed size exceeded)"),
        ("linspace", lambda: pt.linspace(0, 1, 10**18), "Unable to allocate 6.94 EiB for an array with shape (10"),
        ("eye", lambda: pt.eye(10**9), "Unable to allocate 6.94 EiB for an array with shape (10"),
        ("rand", lambda: pt.rand(10**18, seed=1), "Unable to allocate 6.94 EiB for an array with shape (10"),
    ],
)
def test_more_numbers_than_there_is_memory_are_refused(name, make, why):
    with pytest.raises(AllocationError) as caught:
        make()
    head = f"{name}: numbers: expected as many as fit the memory of this machine, where they are computed, got more ("
    assert str(caught.value).startswith(head + why)
    assert str(caught.value).endswith("); ask for fewer, or compute them in a kernel")


def test_random_numbers_follow_from_the_seed():
    a, b = pt.op.rand((4, 5), seed=3).sync(), pt.rand((4, 5), seed=3)
    np.testing.assert_array_equal(a.numpy(), b.numpy())
    assert values(pt.randn(4, seed=1)) != values(pt.randn(4, seed=2))
    assert 0 <= a.numpy().min() < a.numpy().max() < 1


@pytest.mark.feature("H2", "cpu")
def test_copies_go_every_way_and_strided_ones_too():
    host = np.arange(12, dtype=np.float32).reshape(3, 4)
    x, y = pt.empty((3, 4), pt.f32), pt.zeros((3, 8), pt.f32)
    pt.op.copy(host, to=x).sync()
    pt.op.copy(x, to=y[0:3, 0:8:2]).sync()
    np.testing.assert_array_equal(y.numpy()[:, ::2], host)
    np.testing.assert_array_equal(pt.op.copy(y[0:3, 0:8:2]).sync(), host)
    out = np.zeros((3, 4), np.float32)
    pt.op.copy(x, to=out).sync()
    np.testing.assert_array_equal(out, host)
    pt.op.fill(y[0:3, 1:8:2], 9).sync()
    assert (y.numpy()[:, 1::2] == 9).all()
    np.testing.assert_array_equal(y.numpy()[:, ::2], host)


@pytest.mark.slow
def test_a_source_is_snapped_when_the_op_is_made_or_closed_to_writing():
    source = np.ones(4, np.float32)
    snapped = pt.op.copy(source)
    leased = pt.op.copy(source, snapshot=False)
    with pytest.raises(ValueError, match="read-only"):
        source[0] = 5
    assert values(leased.sync()) == [1, 1, 1, 1]
    del leased
    gc.collect()
    source[0] = 5
    assert values(snapped.sync()) == [1, 1, 1, 1]


def test_host_functions_run_in_the_order_of_the_stream(hold):
    seen = []
    stream = pt.current_device().stream()
    with hold(stream):
        first, second = pt.op.host(seen.append, 1).submit(stream), pt.op.host(seen.append, 2).submit(stream)
        assert seen == []
    first.wait(), second.wait()
    assert seen == [1, 2]


def test_a_host_function_that_raises_is_a_fault_that_names_it():
    def breaks():
        raise ValueError("no")

    with pytest.raises(DeviceFault) as caught:
        pt.op.host(breaks).sync()
    assert str(caught.value) == "ValueError: no in host function breaks"
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.native_only
def test_a_runtime_call_inside_a_completion_callback_is_refused_and_a_hand_over_is_fine():
    x = pt.zeros(4, pt.f32)
    with pytest.raises(UsageError) as caught:
        pt.op.host(lambda: pt.op.fill(x, 1).sync()).sync()
    assert str(caught.value) == (
        "driver: expected a call from outside host callbacks, got a runtime call inside a completion callback; "
        "hand the work to another thread"
    )
    done = threading.Event()
    worker = threading.Thread(target=lambda: (done.wait(10), pt.op.fill(x, 2).sync()))
    worker.start()
    pt.op.host(done.set).sync()
    worker.join(20)
    assert values(x) == [2, 2, 2, 2]


@pytest.mark.native_only
@pytest.mark.gpu_only
@pytest.mark.feature("H2", "cpu")
def test_a_foreign_module_is_launched_by_a_builder_that_checks_and_freezes():
    x, z = pt.full(8, 3, pt.f32), pt.zeros(8, pt.f32)
    binary = scale(z.partition(8), x, 2.0).compiled().binary
    build = pt.op.RawLaunch(binary, "foreign scale").write(z).read(x)
    with pytest.raises(ArgumentError) as caught:
        pt.op.RawLaunch(binary, "foreign scale").write(z).grid(1).finalize()
    assert str(caught.value) == (
        "foreign scale: expected arguments of 7 slots of 8 bytes, got 3; a tensor of rank r takes 1 + 2r"
    )
    launch = build.scalar(2.0, pt.f32).grid(1).finalize()
    launch().sync()
    assert values(z) == [6] * 8
    pt.op.copy(z, to=x).sync()
    launch().sync()
    assert values(z) == [12] * 8
    with pytest.raises(UsageError) as caught:
        build.grid(2)
    assert str(caught.value) == "foreign scale: this launch is final; start a new RawLaunch"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: pt.op.copy(np.ones(3), to=x), "copy: expected a source of shape (4,), got (3,)"),
        (lambda x: pt.op.copy(x, to=pt.zeros(3, pt.f32)), "copy: expected a destination f32[4], got f32[3]; convert changes element types"),
        (lambda x: pt.op.copy(x, to=np.zeros(4)), "copy: expected a destination f32[4], got float64[4]"),
        (lambda x: pt.op.copy(x[0:3], to=x[1:4]), "copy: source and destination overlap in a tensor f32[4]; copy through another tensor"),
        (lambda x: pt.op.copy(np.ones(3), to=np.ones(3)), "copy: expected a tensor on one side, got ndarray and ndarray"),
        (lambda x: pt.op.fill(3, 3), "fill: expected a tensor, got int; make one with pt.asarray"),
        (lambda x: pt.op.host(3), "host: expected a function, got int"),
        (lambda x: pt.op.value(1).then(3), "then: expected a function, got int"),
        (lambda x: pt.op.value(1).unzip(), "unzip: value does not know its number of results; write unzip(n)"),
        (lambda x: pt.zip(), "zip: expected at least one operation, got none"),
        (lambda x: pt.op.value(1).then(lambda n: n).sync(), "then: expected the closure to return an operation, got int; use map for a plain value"),
    ],
)  # fmt: skip
def test_wrong_arguments_of_operations_are_refused(call, message):
    x = pt.zeros(4, pt.f32)
    with pytest.raises(ArgumentError) as caught:
        call(x)
    assert str(caught.value) == message
    assert values(x) == [0, 0, 0, 0]


# ---------------------------------------------------------------- combinators


@pytest.mark.feature("H3", "cpu")
def test_a_chain_runs_in_order_on_one_stream_and_unpacks_results():
    x = pt.ones(8, pt.f32)
    seen = []
    op = (
        doubled(x)
        .then(doubled)
        .inspect(lambda t: seen.append(t.shape))
        .then(lambda t: pt.zip(doubled(t), pt.op.value("note")))
        .map(lambda t, note: (t, note, 1))
    )
    assert seen == []
    t, note, one = op.sync()
    assert (values(t), note, one, seen) == ([8] * 8, "note", 1, [(8,)])


def test_none_is_no_argument_and_unit_operations_chain():
    x = pt.zeros(2, pt.f32)
    assert pt.op.fill(x, 1).then(lambda: pt.op.copy(x)).map(lambda a: a.sum()).sync() == 2


def test_long_chains_need_no_recursion():
    op = pt.op.value(0)
    for _ in range(5000):
        op = op.map(lambda n: n + 1)
    assert op.sync() == 5000


@pytest.mark.feature("H3", "cpu")
def test_host_copies_are_complete_before_a_closure_sees_them(hold):
    stream = pt.current_device().stream()
    x = pt.full(1000, 3, pt.f32)
    seen = []
    future = pt.op.copy(x).map(lambda a: seen.append(float(a.sum()))).submit(stream)
    assert seen == [3000.0]  # the closure ran at submission, and the copy before it
    future.wait()


@pytest.mark.feature("H3", "cpu")
def test_unzip_gives_an_operation_for_each_result_and_runs_once():
    runs = []
    a, b = pt.zip(pt.op.value(1).inspect(runs.append), pt.op.value(2)).unzip()
    assert (b.sync(), a.sync(), runs) == (2, 1, [1])
    x, y, z = doubled(pt.ones(4, pt.f32)).map(lambda t: (t, 1, 2)).unzip(3)
    assert values(x.sync()) == [2] * 4
    assert (y.sync(), z.sync()) == (1, 2)


@pytest.mark.feature("H1", "cpu")
def test_an_op_is_used_once_also_when_it_was_composed():
    op = pt.op.value(1)
    op.map(lambda n: n)
    for use in (op.sync, op.schedule, op.shared, lambda: op.map(str), lambda: pt.zip(op), op.submit):
        with pytest.raises(UsageError) as caught:
            use()
        assert str(caught.value) == "value: an op is used once, and this one was; build a new one by calling again"


@pytest.mark.feature("H5", "cpu")
def test_arguments_come_back_in_the_form_they_were_given():
    x, z = pt.ones(4, pt.f32), pt.zeros(8, pt.f32)
    view, frozen = z[0:4].view(), x.share()
    cut, borrowed = pt.zeros(4, pt.f32).partition(4), view.partition(4)
    assert add(cut, x, frozen).sync() == (cut, x, frozen)
    back = scale(borrowed, x, 2.0).sync()
    assert back == (borrowed, x, 2.0)
    assert type(back[0].unpartition()) is pt.TensorView
    assert type(frozen) is pt.FrozenTensor
    assert values(z) == [2, 2, 2, 2, 0, 0, 0, 0]


@pytest.mark.feature("H5", "cpu")
def test_operations_are_arguments_of_kernels():
    z = pt.empty(4, pt.f32)
    cut, x, y = add(z.partition(4), pt.op.full(4, 2, pt.f32), y=doubled(pt.ones(4, pt.f32))).sync()
    assert (values(cut.unpartition()), values(x), values(y)) == ([4] * 4, [2] * 4, [2] * 4)
    out = pt.op.zeros(4, pt.f32).map(lambda t: t.partition(4))
    cut, _, by = scale(out, x, pt.op.value(3.0)).sync()
    assert (values(cut.unpartition()), by) == ([6] * 4, 3.0)


def test_lazy_arguments_are_spent_and_their_errors_name_the_kernel():
    zeros = pt.op.zeros(4, pt.f32)
    add(zeros.map(lambda t: t.partition(4)), pt.op.value(3), pt.op.value(4))
    with pytest.raises(UsageError):
        zeros.sync()
    with pytest.raises(ArgumentError) as caught:
        add(pt.zeros(4, pt.f32).partition(4), pt.op.value(3), pt.zeros(4, pt.f32)).sync()
    assert str(caught.value) == "x: expected a Tensor (T.Shared); make one with pt.asarray, got int"


# ---------------------------------------------------------------- execution lock


@pytest.mark.feature("H6", "cpu")
@pytest.mark.parametrize(
    "nested",
    [
        lambda: pt.op.value(1).sync(),
        lambda: pt.op.value(1).submit(),
        lambda: pt.op.value(1).schedule().poll(),
        lambda: pt.op.value(1).graph_on(pt.current_device().default_stream),
        lambda: doubled(pt.op.empty(4, pt.f32).sync()),
    ],
)
def test_nested_execution_in_a_closure_is_refused_and_the_lock_is_given_back(nested):
    with pytest.raises(UsageError, match="nested execution inside the closure of then") as caught:
        pt.op.value(1).then(lambda n: nested()).sync()
    assert str(caught.value).endswith(
        "nested execution inside the closure of then; return the operation from the closure instead, or use "
        "then_unchecked, whose closure is yours to order"
    )
    assert pt.op.value(2).sync() == 2


def test_eager_access_inside_a_closure_is_refused():
    x = pt.ones(4, pt.f32)
    for eager in (x.numpy, lambda: x.copy_from([1] * 4), lambda: pt.asarray([1.0]), lambda: pt.zeros(4, pt.f32)):
        with pytest.raises(UsageError, match="nested execution inside the closure of map"):
            pt.op.value(1).map(lambda n, eager=eager: eager()).sync()


@pytest.mark.native_only
@pytest.mark.feature("H6", "cpu")
def test_then_unchecked_may_execute_and_other_threads_are_not_concerned():
    assert pt.op.value(1).then_unchecked(lambda n: pt.op.value(pt.op.value(n + 1).sync() + 1)).sync() == 3
    got = []

    def elsewhere(n):
        worker = threading.Thread(target=lambda: got.append(pt.op.value(n).sync()))
        worker.start()
        worker.join(10)
        return n

    assert pt.op.value(5).map(elsewhere).sync() == 5
    assert got == [5]


def test_an_exception_in_a_closure_releases_lock_leases_and_memory(hold):
    x = pt.ones(4, pt.f32)
    stream, other = pt.current_device().stream(), pt.current_device().stream()

    def breaks(_):
        raise KeyError("closure")

    with hold(stream):
        with pytest.raises(KeyError):
            doubled(x).then(breaks).submit(stream)
        assert x.storage.leases  # what was enqueued is still owned
    stream.sync()
    assert pt.live_submissions(pt.current_device()) == 0
    assert not x.storage.leases
    pt.op.fill(x, 2).sync_on(other)


# ---------------------------------------------------------------- shared


@pytest.mark.native_only
@pytest.mark.feature("H4", "cpu")
def test_shared_runs_once_from_many_threads():
    for _ in range(50):
        runs = []
        shared = doubled(pt.ones(64, pt.f32)).inspect(runs.append).shared()
        start = threading.Barrier(4)
        got = []

        def use(shared=shared, start=start, got=got):
            start.wait(10)
            got.append(values(shared.clone().then(doubled).sync())[0])

        threads = [threading.Thread(target=use) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(20)
        assert (len(runs), got) == (1, [4] * 4)


@pytest.mark.feature("H4", "cpu")
def test_a_shared_result_on_another_stream_is_ordered_behind_the_producer(hold):
    a, b = pt.current_device().stream("a"), pt.current_device().stream("b")
    x = pt.ones(4, pt.f32)
    with hold(a):
        shared = doubled(x).shared()
        first = shared.submit(a)
        second = shared.clone().then(doubled).submit(b)
        assert not second.is_done()
    assert values(second.wait()) == [4] * 4
    assert values(first.wait()) == [2] * 4


@pytest.mark.feature("H4", "cpu")
def test_a_failure_reaches_every_use_of_a_shared_operation(hold):
    a, b = pt.current_device().stream("a"), pt.current_device().stream("b")
    x = pt.full(4, -1, pt.f32)
    with hold(a):
        shared = positive(pt.zeros(4, pt.f32).partition(4), x).shared()
        one, two = shared.submit(a), shared.clone().map(lambda *r: 1).submit(a)
        other = shared.clone().then(lambda z, _: doubled(z.unpartition())).submit(b)
    for future in (other, two, one, one):
        with pytest.raises(KernelAssert, match="x must be positive"):
            future.wait()
    with pytest.raises(KernelAssert):
        shared.sync()
    assert values(doubled(pt.ones(4, pt.f32)).sync_on(a)) == [2] * 4
    assert values(doubled(pt.ones(4, pt.f32)).sync_on(b)) == [2] * 4

    def breaks():
        raise KeyError("host")

    broken = pt.op.fill(x, 1).map(breaks).shared()
    for _ in range(2):
        with pytest.raises(KeyError):
            broken.sync()


def test_a_shared_operation_that_uses_itself_is_refused():
    box = []
    shared = pt.op.value(1).then(lambda n: box[0]).shared()
    box.append(shared)
    with pytest.raises(UsageError) as caught:
        shared.sync()
    assert str(caught.value) == "value: a shared operation cannot use itself"


# ---------------------------------------------------------------- one's own


class Triple(pt.DeviceOp):
    """A custom operation: three times the tensor, through a temporary that only the submission owns."""

    def __init__(self, x):
        super().__init__()
        self.x = x

    @property
    def name(self):
        return "triple"

    @property
    def device(self):
        return self.x.device

    def execute(self, context):
        temporary = pt.empty(self.x.shape, self.x.dtype)
        context.run(add(temporary.partition(4), self.x, self.x))
        out = pt.empty(self.x.shape, self.x.dtype)
        context.run(add(out.partition(4), temporary, self.x))
        return out


class Buffered:
    """A custom argument: a tensor inside an object that has to outlive the launch."""

    def __init__(self, tensor):
        self.tensor = tensor

    def kernel_input(self, retain):
        retain(self)
        return self.tensor

    def kernel_output(self, retain):
        retain(self)
        return self.tensor.partition(4)


@pytest.mark.slow
@pytest.mark.feature("H13", "cpu")
def test_custom_operations_combine_like_others_and_own_their_temporaries(hold):
    stream = pt.current_device().stream()
    with hold(stream):
        future = Triple(pt.ones(4, pt.f32)).then(doubled).submit(stream)
        gc.collect()
        pt.full(4, 77, pt.f32)
    assert values(future.wait()) == [6] * 4
    graph = Triple(pt.ones(4, pt.f32)).graph_on(stream)
    out = graph.take_output()
    graph.launch().sync_on(stream)
    assert values(out) == [3] * 4


@pytest.mark.slow
@pytest.mark.feature("H13", "cpu")
def test_custom_arguments_register_what_they_keep_alive(hold):
    import weakref

    stream = pt.current_device().stream()
    source, target = Buffered(pt.full(4, 2, pt.f32)), Buffered(pt.zeros(4, pt.f32))
    result, gone = target.tensor, weakref.ref(source)
    with hold(stream):
        future = scale(target, source, 3.0).submit(stream)
        del source, target
        future = None
        gc.collect()
        assert gone() is not None
    stream.sync()
    assert values(result) == [6] * 4
    gc.collect()
    assert gone() is None
    assert future is None


def test_async_on_gives_protection_up_on_return():
    stream = pt.current_device().stream()
    x = pt.ones(4, pt.f32)
    out = doubled(x).async_on(stream)
    assert not x.storage.leases
    assert pt.live_submissions(pt.current_device()) == 0
    stream.sync()
    assert values(out) == [2] * 4


def test_an_op_on_a_stream_of_another_device_is_refused():
    device = pt.open_device(ordinal=1)
    stream = device.stream()
    with pytest.raises(ArgumentError) as caught:
        doubled(pt.ones(4, pt.f32)).sync_on(stream)
    here = pt.current_device().name
    assert str(caught.value) == f"add: expected a stream of {here}, got stream 1 of cpu:1; run it on its own device"
    del stream
    device.close()
