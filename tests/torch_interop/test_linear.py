"""Linear maps with gradients: against torch, and against differences in f64. On GPUs ranks have one each, as torch loads
its kernels as it needs them."""

import pytest

import peertile as pt
from peertile.errors import ArgumentError

torch = pytest.importorskip("torch")

from where import place  # noqa: E402

import peertile.torch as ptt  # noqa: E402 - needs torch
from peertile.torch import Activation  # noqa: E402

pytestmark = [pytest.mark.any_device, pytest.mark.native_only, pytest.mark.gpu_only]

F = torch.nn.functional
THEIRS = {
    Activation.NONE: lambda x: x, Activation.RELU: torch.relu, Activation.GELU: F.gelu, Activation.SILU: F.silu,
}  # fmt: skip


def leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_()


@pytest.mark.feature("A6", "cpu")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("activation", "shape"),
    [*((a, (5, 7)) for a in Activation), (Activation.GELU, (2, 3, 33)), (Activation.SILU, (4,))],
)
def test_gradients_agree_with_differences(activation, shape):
    x, weight, bias = (leaf(*s, dtype=torch.float64) for s in (shape, (6, shape[-1]), (6,)))
    assert torch.autograd.gradcheck(lambda *a: ptt.linear(*a, activation=activation), (x, weight, bias))


@pytest.mark.feature("A6", "cpu")
@pytest.mark.slow
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize(
    ("dtype", "has_bias"), [("float32", True), ("float32", False), ("float16", True), ("bfloat16", True)]
)
def test_values_and_gradients_are_torch_s(activation, dtype, has_bias):
    dtype = getattr(torch, dtype)
    leaves = [leaf(2, 37, 70, dtype=dtype), leaf(19, 70, dtype=dtype)] + [leaf(19, dtype=dtype)] * has_bias
    with torch.no_grad():
        for t in leaves:
            t /= 4
    y = ptt.linear(*leaves, activation=activation)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    inner = F.linear(*wide)
    # Rounding takes some elements over the kink of RELU: the gradient is that of the side they came out on.
    exact = inner * (y.detach() > 0) if activation is Activation.RELU else THEIRS[activation](inner)
    d = torch.randn_like(exact)
    got = torch.autograd.grad(y, leaves, d.to(dtype))
    expected = torch.autograd.grad(exact, wide, d.to(dtype).double())
    limit = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for a, b in zip((y, *got), (exact, *expected), strict=True):
        assert a.dtype == dtype
        assert (a.double() - b).abs().max() <= limit * b.abs().max()
    with torch.no_grad():  # one kernel, with the activation in it
        assert (ptt.linear(*leaves, activation=activation).double() - exact).abs().max() <= limit * exact.abs().max()


@pytest.mark.feature("A6", "cpu")
def test_only_the_gradients_that_are_asked_for_are_made():
    x, weight, bias = torch.randn(3, 8), leaf(4, 8), torch.randn(4)
    ptt.linear(x, weight, bias, activation=Activation.GELU).sum().backward()
    reference = weight.detach().clone().requires_grad_()
    F.gelu(F.linear(x, reference, bias)).sum().backward()
    torch.testing.assert_close(weight.grad, reference.grad)
    assert (x.grad, bias.grad) == (None, None)


@pytest.mark.feature("A6", "cpu")
@pytest.mark.parametrize("shapes", [((0, 8), (4, 8)), ((3, 0), (4, 0)), ((3, 8), (0, 8)), ((2, 0, 8), (4, 8))])
def test_empty_extents_give_what_torch_gives(shapes):
    leaves = [leaf(*shape) for shape in shapes] + [leaf(shapes[1][0])]
    y = ptt.linear(*leaves)
    expected = F.linear(*leaves)
    torch.testing.assert_close(y, expected)
    got = torch.autograd.grad(y.sum(), leaves)
    for a, b in zip(got, torch.autograd.grad(expected.sum(), leaves), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.feature("A6", "cpu")
def test_strided_inputs_and_a_module_of_torch():
    layer = torch.nn.Linear(12, 5)
    x = torch.randn(12, 9).t().requires_grad_()
    weight = torch.randn(12, 5).t().requires_grad_()
    torch.testing.assert_close(ptt.linear(x, layer.weight, layer.bias), layer(x))
    got = torch.autograd.grad(ptt.linear(x, weight).pow(2).sum(), (x, weight))
    for a, b in zip(got, torch.autograd.grad(F.linear(x, weight).pow(2).sum(), (x, weight)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.feature("A6", "cpu")
@pytest.mark.slow
def test_training_with_it_goes_as_with_torch():
    torch.manual_seed(3)
    x, target = torch.randn(64, 10), torch.randn(64, 1)
    start = [torch.randn(16, 10) / 3, torch.zeros(16), torch.randn(1, 16) / 4, torch.zeros(1)]

    def losses(layer):
        weights = [t.clone().requires_grad_() for t in start]
        optimizer = torch.optim.SGD(weights, lr=0.05)
        found = []
        for _ in range(20):
            optimizer.zero_grad()
            loss = (layer(layer(x, *weights[:2], True), *weights[2:], False) - target).pow(2).mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    ours = losses(lambda x, w, b, on: ptt.linear(x, w, b, activation=Activation.SILU if on else Activation.NONE))
    theirs = losses(lambda x, w, b, on: F.silu(F.linear(x, w, b)) if on else F.linear(x, w, b))
    assert ours[-1] < ours[0]
    assert ours == pytest.approx(theirs, rel=1e-4)


# -------------------------------------------------------------------- several ranks


def on_ranks(function, ranks):
    def main(group):
        try:
            with place():  # of this thread alone
                return function(group)
        finally:
            if group.failure() is None:
                ptt.close(group)

    return pt.spawn(main, ranks, model=pt.RankModel.THREADS, timeout_s=90)


@pytest.mark.gpus("ranks")
@pytest.mark.feature("A6", "cpu")
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("is_sequence_parallel", [False, True])
def test_two_layers_split_over_ranks_are_one_network(ranks, is_sequence_parallel):
    rows, inputs, hidden, outputs = 4 * ranks, 20, 6 * ranks, 9
    leaves = [leaf(rows, inputs), leaf(hidden, inputs), leaf(hidden), leaf(outputs, hidden), leaf(outputs)]
    d = torch.randn(rows, outputs)
    y = F.linear(F.gelu(F.linear(*leaves[:3])), *leaves[3:])
    expected = torch.autograd.grad(y, leaves, d)

    def main(group):
        me = group.rank
        units, share = slice(6 * me, 6 * me + 6), slice(4 * me, 4 * me + 4)
        x, w1, b1, w2, b2 = (t.detach().to(place(), copy=True) for t in leaves)
        w1, b1, w2 = w1[units].clone(), b1[units].clone(), w2[:, units].clone()
        x = x[share].clone() if is_sequence_parallel else x
        mine = [t.requires_grad_() for t in (x, w1, b1, w2, b2)]
        if is_sequence_parallel:
            got = ptt.linear_scatter(F.gelu(ptt.gather_linear(x, w1, b1, group)), w2, b2, group)
        else:
            first = ptt.linear(ptt.copy_to_ranks(x, group), w1, b1, activation=Activation.GELU)
            got = ptt.linear_reduce(first, w2, b2, group)
        part = share if is_sequence_parallel else slice(None)
        gradients = list(torch.autograd.grad(got, mine, d[part].to(place())))
        if is_sequence_parallel:
            ptt.all_reduce(gradients[4], group)
        wanted = [
            y[part],
            expected[0][part],
            expected[1][units],
            expected[2][units],
            expected[3][:, units],
            expected[4],
        ]
        for a, b in zip([got, *gradients], wanted, strict=True):
            torch.testing.assert_close(a.detach().cpu(), b.detach().cpu(), rtol=1e-4, atol=1e-4)
        return got.detach().cpu()

    said = on_ranks(main, ranks)
    if not is_sequence_parallel:
        assert all(torch.equal(t, said[0]) for t in said), "the same bits on every rank"


def split_maps(ranks):
    """For each function over ranks: shapes of x, weight and bias of one rank, and what all of them together give from
    the tensors of every rank, as one tensor for each rank."""

    def total(xs, ws, bias):
        return sum(x @ w.T for x, w in zip(xs, ws, strict=True)) + bias

    return {
        "linear_reduce": (
            ((5, 18), (7, 18), (7,)),
            lambda xs, ws, bs: [total(xs, ws, bs[0])] * ranks,
        ),
        "gather_linear": (
            ((4, 18), (7, 18), (7,)),
            lambda xs, ws, bs: [torch.cat(xs) @ w.T + b for w, b in zip(ws, bs, strict=True)],
        ),
        "linear_scatter": (
            ((4 * ranks, 18), (7, 18), (7,)),
            lambda xs, ws, bs: list(total(xs, ws, bs[0]).split(4)),
        ),
    }


@pytest.mark.gpus("ranks")
@pytest.mark.feature("A6", "cpu")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("name", "ranks"), [("linear_reduce", 2), ("gather_linear", 3), ("linear_scatter", 3)])
def test_each_map_over_ranks_has_the_gradients_of_the_whole(name, ranks, dtype):
    dtype = getattr(torch, dtype)
    shapes, whole = split_maps(ranks)[name]
    tensors = [[torch.randn(shape, device="cpu").div(4).to(dtype) for shape in shapes] for _ in range(ranks)]
    if name != "gather_linear":  # one bias for all
        for mine in tensors:
            mine[2] = tensors[0][2].clone()
    exact = [[t.double().requires_grad_() for t in mine] for mine in tensors]
    y = whole(*zip(*exact, strict=True))
    d = [torch.randn(part.shape, device="cpu").to(dtype) for part in y]
    if name == "linear_reduce":  # the same result on every rank, and so the same gradient
        d = [d[0]] * ranks
    pairs = list(zip(y, d, strict=True))[: 1 if name == "linear_reduce" else None]
    loss = sum((a * b.double()).sum() for a, b in pairs)
    expected = torch.autograd.grad(loss, [t for mine in exact for t in mine], allow_unused=True)
    expected = [expected[3 * rank : 3 * rank + 3] for rank in range(ranks)]
    limit = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]

    def main(group):
        me = group.rank
        mine = [t.to(place(), copy=True).requires_grad_() for t in tensors[me]]
        got = getattr(ptt, name)(*mine, group)
        gradients = torch.autograd.grad(got, mine, d[me].to(place()))
        wanted = [y[me], *expected[me][:2]]
        for a, b in zip([got, *gradients[:2]], wanted, strict=True):
            assert a.dtype == dtype
            assert (a.detach().cpu().double() - b.detach()).abs().max() <= limit * b.detach().abs().max()
        # Who wants no gradient of x takes part in what the others need for it.
        x, weight, bias = (t.detach() for t in mine)
        alone = getattr(ptt, name)(x.requires_grad_(me > 0), weight.requires_grad_(), bias, group)
        (only,) = torch.autograd.grad(alone, [weight], d[me].to(place()))
        assert torch.equal(only, gradients[1])
        return gradients[2].detach().cpu().double()

    biases = on_ranks(main, ranks)
    sums = [sum(biases)] * ranks if name == "linear_scatter" else biases
    of_bias = expected[0][2] if name != "gather_linear" else None
    for rank, got in enumerate(sums):
        want = expected[rank][2] if of_bias is None else of_bias
        assert (got - want).abs().max() <= limit * want.abs().max()


def test_what_does_not_fit_is_named():
    x, weight = torch.zeros(3, 4), torch.zeros(5, 4)

    def message(call, *args, **options):
        with pytest.raises(ArgumentError) as caught:
            call(*args, **options)
        return str(caught.value)

    assert message(ptt.linear, x, torch.zeros(4, 5)) == "linear: weight: expected [outputs, 4], got [4, 5]"
    assert message(ptt.linear, x, weight, torch.zeros(4)) == "linear: bias: expected [5], got [4]"
    assert message(ptt.linear, x, weight.double()) == (
        f"linear: weight: expected torch.float32 on {x.device} as x, got torch.float64 on {x.device}"
    )
    assert message(ptt.linear, x, 3) == "linear: weight: expected a torch tensor, got int"
    assert message(ptt.linear, torch.tensor(1.0), weight) == "linear: x: expected […, inputs], got []"
    assert message(ptt.linear, x, weight, activation="relu") == "linear: activation: expected an Activation, got 'relu'"
    assert message(ptt.gather_linear, x.view(1, 3, 4), weight) == (
        "gather_linear: x: expected [rows, inputs], got [1, 3, 4]"
    )
