"""The library on torch tensors: collectives that move them where they lie, linear maps with gradients, and groups that
meet through torch.distributed. Importing this needs torch; nothing else of peertile imports it.

Tensors cross by DLPack, without a copy. Every function waits until its work is done, on host memory and on GPUs, so
that what torch does next sees it; work of torch on a GPU is waited for first. `group` is a peertile `Group`, a torch
process group, or None for the group that this process has joined.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator
from enum import Enum
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from peertile.comm.environment import DEFAULT_PORT, Placement
from peertile.comm.group import Group
from peertile.comm.launcher import current_group, join
from peertile.comm.launcher import init as init_alone
from peertile.creation import from_dlpack
from peertile.errors import ArgumentError, UnsupportedError, UsageError
from peertile.library.collectives import Collectives
from peertile.library.fused import FusedProducts
from peertile.library.gradients import activate, activation_gradient, add_bias, column_sum, product
from peertile.library.layers import Activation, WeightLayout
from peertile.library.layers import linear as fused_linear
from peertile.library.reductions import ReduceOp
from peertile.runtime.device import Device
from peertile.runtime.op import DeviceOp
from peertile.runtime.registry import current_device, use_device
from peertile.runtime.tensor import Tensor

__all__ = [
    "Activation",
    "ReduceOp",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "close",
    "communicator",
    "copy_to_ranks",
    "from_torch",
    "gather_linear",
    "init",
    "linear",
    "linear_reduce",
    "linear_scatter",
    "reduce_scatter",
]

Ranks = Any
"""A Group, a torch process group, or None."""

_HOST_FACTS = ("/proc/sys/kernel/random/boot_id", "/etc/hostname")


# -------------------------------------------------------------------- groups


def init(process_group: Any = None, *, device: Device | None = None) -> Group:
    """The group of the ranks of a torch process group (default: torch's world), which torch.distributed has brought
    together already: no port and no variables of a launcher are needed. Collective over the process group.

    A process joins at most one group; called again, this gives the same one. Of a part of the ranks, take
    `group.subgroup(ranks)`. `device` becomes the calling thread's device. UsageError where torch.distributed is not
    initialised, ArgumentError if this process is no member or has joined another group, UnsupportedError if the ranks
    are on several hosts.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise UsageError(
            "peertile.torch.init: expected torch.distributed to be initialised, as its ranks become ours, got nothing; "
            "call torch.distributed.init_process_group first, or peertile.init for a group without torch"
        )
    members = dist.group.WORLD if process_group is None else process_group
    rank, size = dist.get_rank(members), dist.get_world_size(members)
    if rank < 0:
        raise ArgumentError(
            f"peertile.torch.init: expected a process group with this process in it, got one without rank "
            f"{dist.get_rank()} of torch's world"
        )
    joined = current_group()
    if joined is not None and not joined.closed:
        joined.check()
        if (joined.rank, joined.size) != (rank, size):
            raise ArgumentError(
                f"peertile.torch.init: expected the process group that this process has joined, rank {joined.rank} of "
                f"{joined.size}, got rank {rank} of {size}; join the larger one first and take group.subgroup(ranks)"
            )
        return joined
    said: list[Any] = [None] * size
    dist.all_gather_object(said, (_host(), uuid.uuid4().hex), group=members)
    hosts = [host for host, _ in said]
    if len(set(hosts)) > 1:
        raise UnsupportedError(
            f"peertile.torch.init: expected all {size} ranks on one host, got {len(set(hosts))} hosts: groups over "
            "several hosts are not supported yet"
        )
    # The first rank's number tells this job from every other one on the host.
    return join(Placement(rank, size, rank, size, DEFAULT_PORT, said[0][1], "torch.distributed"), device)


def _host() -> str:
    facts = [str(uuid.getnode())]
    for path in _HOST_FACTS:
        try:
            with open(path, encoding="utf-8") as file:
                facts.append(file.read().strip())
        except OSError:
            facts.append("")
    return " ".join(facts)


class _Communicator:
    """What a group has for torch: its collectives, its fused products once they are used, and the tensors of ours
    that were made for tensors of torch. A tensor that comes again is the same tensor to the library, whose bound
    launches are found again by it."""

    def __init__(self, group: Group) -> None:
        self.collectives = Collectives(group)
        self._fused: FusedProducts | None = None
        self._known = WeakTensorKeyDictionary()

    @property
    def fused(self) -> FusedProducts:
        """Collective the first time."""
        if self._fused is None:
            self._fused = FusedProducts(self.collectives.group)
        return self._fused

    def here(self) -> contextlib.AbstractContextManager[None]:
        """The calling thread works on the device of the collectives."""
        return _on(self.collectives.device)

    def flat(self, role: str, tensor: Any) -> Tensor:
        """The elements of a contiguous tensor as a line, in place."""
        _check(role, tensor)
        if not tensor.is_contiguous():
            raise ArgumentError(
                f"{role}: expected a contiguous tensor, got strides {tuple(tensor.stride())} for shape "
                f"{tuple(tensor.shape)}; pass tensor.contiguous()"
            )
        known: Tensor | None = self._known.get(tensor)
        if known is None or (known.address, known.size) != (tensor.data_ptr(), tensor.numel()):
            known = self._known[tensor] = from_torch(tensor.detach().view(-1))
        else:
            _settle(tensor)
        return known

    def close(self) -> None:
        self._known.clear()
        if self._fused is not None:
            self._fused.close()
        self.collectives.close()


_communicators: weakref.WeakKeyDictionary[Group, _Communicator] = weakref.WeakKeyDictionary()
_lock = threading.Lock()  # protects `_communicators` between ranks that are threads; never held over a collective call


def _group(ranks: Ranks) -> Group:
    if isinstance(ranks, Group):
        return ranks
    if ranks is None:
        joined = current_group()
        if joined is not None and not joined.closed:
            return joined
        return init() if dist.is_available() and dist.is_initialized() else init_alone()
    if dist.is_available() and isinstance(ranks, dist.ProcessGroup):
        return init(ranks)
    raise ArgumentError(f"group: expected a Group, a torch process group or None, got {ranks!r}")


def _communicator(ranks: Ranks) -> _Communicator:
    group = _group(ranks)
    with _lock:
        found = _communicators.get(group)
    if found is None:
        found = _Communicator(group)
        with _lock:
            _communicators[group] = found
    return found


def communicator(group: Ranks = None) -> Collectives:
    """The collectives behind these functions, for what they do not cover. Collective the first time for a group, as is
    the first call of any of these functions; `close` gives its memory back."""
    return _communicator(group).collectives


def close(group: Ranks = None) -> None:
    """Give back what these functions keep for a group. Collective; the next call makes it anew. Without it, it is given
    back when the process ends."""
    owner = _group(group)
    with _lock:
        found = _communicators.pop(owner, None)
    if found is not None:
        found.close()


@contextlib.contextmanager
def _on(device: Device) -> Iterator[None]:
    """`device` is the calling thread's: gradients on GPUs are computed by threads of torch, which have chosen none."""
    before = current_device()
    if before is device:
        yield
        return
    use_device(device)
    try:
        yield
    finally:
        use_device(before)


# -------------------------------------------------------------------- tensors


def from_torch(tensor: Any) -> Tensor:
    """A tensor of ours over a torch tensor's memory, without a copy and outside autograd; both see writes. On a GPU,
    what torch's current stream has to do is waited for. `torch.from_dlpack` goes the other way."""
    _check("from_torch: tensor", tensor)
    _settle(tensor)
    return from_dlpack(tensor.detach())


def _check(role: str, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"{role}: expected a torch tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise ArgumentError(f"{role}: expected a dense tensor, got layout {tensor.layout}; pass tensor.to_dense()")


def _settle(tensor: Any) -> None:
    """Torch's work on a GPU is done: kernels of ours run on streams that torch does not order."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def _reduction(name: str, op: Any) -> ReduceOp:
    """A reduction of ours or of torch's as ours."""
    if isinstance(op, ReduceOp):
        return op
    names = {
        "SUM": ReduceOp.SUM,
        "PRODUCT": ReduceOp.PROD,
        "MIN": ReduceOp.MIN,
        "MAX": ReduceOp.MAX,
        "AVG": ReduceOp.AVG,
    }
    if dist.is_available():
        for theirs, ours in names.items():
            if op == getattr(dist.ReduceOp, theirs):
                return ours
    raise ArgumentError(
        f"{name}: op: expected a ReduceOp of peertile or of torch: SUM, PRODUCT, MIN, MAX or AVG, got {op!r}"
    )


def _output(name: str, out: Any, shape: tuple[int, ...], like: Any) -> Any:
    if out is None:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    _check(f"{name}: out", out)
    if tuple(out.shape) != shape or out.dtype != like.dtype:
        raise ArgumentError(f"{name}: out: expected {like.dtype} {list(shape)}, got {out.dtype} {list(out.shape)}")
    return out


def _no_gradient(name: str, role: str, tensor: Any) -> None:
    if torch.is_grad_enabled() and tensor.requires_grad:
        raise ArgumentError(
            f"{name}: {role}: expected a tensor outside autograd, as it is written in place, got one that requires a "
            "gradient; pass tensor.detach()"
        )


# -------------------------------------------------------------------- collectives


def all_reduce(tensor: Any, group: Ranks = None, *, op: Any = ReduceOp.SUM) -> Any:
    """Fold `tensor` over the ranks, in place, and return it: the same bits on every rank.

    Any dtype that peertile reduces, any shape; contiguous. `op`: a ReduceOp of peertile or of torch. ArgumentError for
    what does not fit. Collective.

    >>> import torch
    >>> import peertile.torch as ptt
    >>> ptt.all_reduce(torch.tensor([1.0, 2.0])).tolist()
    [1.0, 2.0]
    """
    _check("all_reduce: tensor", tensor)
    _no_gradient("all_reduce", "tensor", tensor)
    owner = _communicator(group)
    x = owner.flat("all_reduce: tensor", tensor)
    owner.collectives.all_reduce(x, x, _reduction("all_reduce", op)).sync()
    return tensor


def broadcast(tensor: Any, group: Ranks = None, *, root: int = 0) -> Any:
    """Copy rank `root`'s `tensor` into that of every rank, in place, and return it. `root` counts in the group."""
    _check("broadcast: tensor", tensor)
    _no_gradient("broadcast", "tensor", tensor)
    owner = _communicator(group)
    owner.collectives.broadcast(owner.flat("broadcast: tensor", tensor), root=root).sync()
    return tensor


def all_gather(tensor: Any, group: Ranks = None, *, out: Any = None) -> Any:
    """The tensors of all ranks, one behind the other along the first axis: [n, …] from each gives [ranks · n, …].

    Without `out`, gradients flow: that of the result is reduced and scattered. A tensor without axes counts as [1].

    >>> import torch
    >>> import peertile.torch as ptt
    >>> ptt.all_gather(torch.tensor([1.0, 2.0])).tolist()
    [1.0, 2.0]
    """
    _check("all_gather: tensor", tensor)
    return _moved("all_gather", _AllGather, _gathered, tensor, group, out)


def reduce_scatter(tensor: Any, group: Ranks = None, *, op: Any = ReduceOp.SUM, out: Any = None) -> Any:
    """This rank's share of the folded tensors: [ranks · n, …] on each gives [n, …].

    Without `out` and for SUM, gradients flow: those of the shares are gathered.
    """
    _check("reduce_scatter: tensor", tensor)
    fold = _reduction("reduce_scatter", op)
    if fold is not ReduceOp.SUM:
        _no_gradient("reduce_scatter", "tensor", tensor)
        return _scattered(_communicator(group), tensor, out, fold)
    return _moved("reduce_scatter", _ReduceScatter, _scattered, tensor, group, out)


def all_to_all(tensor: Any, group: Ranks = None, *, out: Any = None) -> Any:
    """For each rank r in order, the part of its tensor that is for this rank; parts are equal shares of the first axis.

    Without `out`, gradients flow back the way that the values came.
    """
    _check("all_to_all: tensor", tensor)
    return _moved("all_to_all", _AllToAll, _exchanged, tensor, group, out)


def _moved(name: str, function: Any, plain: Callable[..., Any], tensor: Any, group: Ranks, out: Any) -> Any:
    owner = _communicator(group)
    if out is None and torch.is_grad_enabled() and tensor.requires_grad:
        return function.apply(tensor, owner)
    if out is not None:
        for role, t in (("tensor", tensor), ("out", out)):
            _no_gradient(name, role, t)
    return plain(owner, tensor, out)


def _rows(name: str, tensor: Any) -> int:
    """Extent of the first axis."""
    return int(tensor.shape[0]) if tensor.dim() else 1


def _gathered(owner: _Communicator, tensor: Any, out: Any = None) -> Any:
    ranks = owner.collectives.group.size
    z = _output("all_gather", out, (ranks * _rows("all_gather", tensor), *tensor.shape[1:]), tensor)
    x = owner.flat("all_gather: tensor", tensor)
    owner.collectives.all_gather(x, owner.flat("all_gather: out", z)).sync()
    return z


def _scattered(owner: _Communicator, tensor: Any, out: Any = None, op: ReduceOp = ReduceOp.SUM) -> Any:
    z = _output("reduce_scatter", out, (_share("reduce_scatter", owner, tensor), *tensor.shape[1:]), tensor)
    x = owner.flat("reduce_scatter: tensor", tensor)
    owner.collectives.reduce_scatter(x, owner.flat("reduce_scatter: out", z), op).sync()
    return z


def _exchanged(owner: _Communicator, tensor: Any, out: Any = None) -> Any:
    _share("all_to_all", owner, tensor)
    z = _output("all_to_all", out, tuple(tensor.shape), tensor)
    x = owner.flat("all_to_all: tensor", tensor)
    owner.collectives.all_to_all(x, owner.flat("all_to_all: out", z)).sync()
    return z


def _share(name: str, owner: _Communicator, tensor: Any) -> int:
    rows, ranks = _rows(name, tensor), owner.collectives.group.size
    if not tensor.dim() or rows % ranks:
        raise ArgumentError(
            f"{name}: tensor: expected a first axis that {ranks} ranks divide, got shape {list(tensor.shape)}"
        )
    return rows // ranks


class _AllGather(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped where types are checked
    @staticmethod
    def forward(ctx: Any, tensor: Any, owner: _Communicator) -> Any:
        ctx.owner, ctx.shape = owner, tensor.shape
        return _gathered(owner, tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        with ctx.owner.here():
            return _ReduceScatter.apply(gradients[0].contiguous(), ctx.owner).view(ctx.shape), None


class _ReduceScatter(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: Any, owner: _Communicator) -> Any:
        ctx.owner = owner
        return _scattered(owner, tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        with ctx.owner.here():
            return _AllGather.apply(gradients[0].contiguous(), ctx.owner), None


class _AllToAll(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: Any, owner: _Communicator) -> Any:
        ctx.owner = owner
        return _exchanged(owner, tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        with ctx.owner.here():
            return _AllToAll.apply(gradients[0].contiguous(), ctx.owner), None


# -------------------------------------------------------------------- linear maps


def linear(x: Any, weight: Any, bias: Any = None, *, activation: Activation = Activation.NONE) -> Any:
    """activation(x @ weight.T + bias) with gradients, as torch.nn.functional.linear lays it out.

    x [..., inputs]; weight [outputs, inputs] of the same dtype: f32, f16, bf16, or f64 (which is for checking
    gradients, and slow); bias [outputs] of it. Sums are f32, of f64 in f64. Where no gradient is asked for it is one
    kernel; else the value before the activation is kept. ArgumentError for what does not fit together.

    >>> import torch
    >>> import peertile.torch as ptt
    >>> x, weight = torch.ones(1, 2), torch.tensor([[1.0, 2.0]], requires_grad=True)
    >>> ptt.linear(x, weight).sum().backward()
    >>> weight.grad.tolist()
    [[1.0, 1.0]]
    """
    _check_linear("linear", x, weight, bias)
    if not isinstance(activation, Activation):
        raise ArgumentError(f"linear: activation: expected an Activation, got {activation!r}")
    return _Linear.apply(x, weight, bias, activation)


def copy_to_ranks(x: Any, group: Ranks = None) -> Any:
    """x itself; its gradient is summed over the ranks. In front of a linear map whose outputs are split over the ranks:
    each rank then gives a part of the gradient of x."""
    _check("copy_to_ranks: x", x)
    return _CopyToRanks.apply(x, _communicator(group))


def linear_reduce(x: Any, weight: Any, bias: Any = None, group: Ranks = None) -> Any:
    """Σ over ranks of x @ weight.T, then + bias: a linear map whose inputs are split over the ranks, one launch.

    x [..., inputs of this rank], weight [outputs, inputs of this rank], bias [outputs], the same on every rank. The
    result is the same on every rank, and so must its gradient be.
    """
    _check_linear("linear_reduce", x, weight, bias)
    return _Fused.apply(x, weight, bias, _communicator(group), _Exchange.ALL_REDUCE)


def gather_linear(x: Any, weight: Any, bias: Any = None, group: Ranks = None) -> Any:
    """(The rows of x of all ranks) @ weight.T + bias: sequence-parallel before outputs that are split, one launch.

    x [rows, inputs], as many rows on every rank; weight [outputs of this rank, inputs]; result [ranks · rows, outputs
    of this rank]. The gradient of x is reduced and scattered in the launch that makes it.
    """
    _check_linear("gather_linear", x, weight, bias, is_matrix=True)
    return _Fused.apply(x, weight, bias, _communicator(group), _Exchange.ALL_GATHER)


def linear_scatter(x: Any, weight: Any, bias: Any = None, group: Ranks = None) -> Any:
    """This rank's rows of Σ over ranks of x @ weight.T, then + bias: back to sequence-parallel, one launch.

    x [ranks · rows, inputs of this rank], weight [outputs, inputs of this rank], bias [outputs] the same on every rank;
    result [rows, outputs]. The gradient of bias is that of this rank's rows: sum it over the ranks.
    """
    _check_linear("linear_scatter", x, weight, bias, is_matrix=True)
    owner = _communicator(group)
    _share("linear_scatter", owner, x)
    return _Fused.apply(x, weight, bias, owner, _Exchange.REDUCE_SCATTER)


def _check_linear(name: str, x: Any, weight: Any, bias: Any, *, is_matrix: bool = False) -> None:
    for role, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if tensor is not None or role != "bias":
            _check(f"{name}: {role}", tensor)
            if tensor.dtype != x.dtype or tensor.device != x.device:
                raise ArgumentError(
                    f"{name}: {role}: expected {x.dtype} on {x.device} as x, got {tensor.dtype} on {tensor.device}"
                )
    if x.dim() < 1 or (is_matrix and x.dim() != 2):
        raise ArgumentError(f"{name}: x: expected [{'rows' if is_matrix else '…'}, inputs], got {list(x.shape)}")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ArgumentError(f"{name}: weight: expected [outputs, {x.shape[-1]}], got {list(weight.shape)}")
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ArgumentError(f"{name}: bias: expected [{weight.shape[0]}], got {list(bias.shape)}")


def _matrix(tensor: Any) -> Any:
    """[..., width] as a matrix without gaps."""
    return tensor.detach().reshape(prod(tensor.shape[:-1]), tensor.shape[-1]).contiguous()


def _made(shape: tuple[int, ...], like: Any, op: Callable[[Tensor], DeviceOp[Any]]) -> Any:
    """A new tensor of torch that `op` writes."""
    out = torch.empty(shape, dtype=like.dtype, device=like.device)
    if out.numel():
        op(from_torch(out)).sync()
    return out


def _product(a: Any, b: Any) -> Any:
    """a @ b of matrices in torch's memory; either may be transposed. Where the inner axis is empty, zeros."""
    if not a.shape[1]:
        return torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    return _made((a.shape[0], b.shape[1]), a, lambda z: product(from_torch(a), from_torch(b), out=z))


def _column_sum(x: Any) -> Any:
    if not x.shape[0]:
        return torch.zeros(x.shape[1], dtype=x.dtype, device=x.device)
    return _made((x.shape[1],), x, lambda z: column_sum(from_torch(x), out=z))


def _plus_bias(y: Any, bias: Any) -> Any:
    """y + bias, into y."""
    if bias is not None and y.numel():
        add_bias(from_torch(y), from_torch(bias.detach().contiguous())).sync()
    return y


class _Linear(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, activation: Activation) -> Any:
        rows, w = _matrix(x), weight.detach().contiguous()
        shape = (rows.shape[0], w.shape[0])
        keeps = activation is not Activation.NONE and any(ctx.needs_input_grad)
        if x.dtype != torch.float64 and not keeps and rows.shape[1]:
            b = None if bias is None else from_torch(bias.detach().contiguous())
            y = _made(
                shape,
                x,
                lambda z: fused_linear(
                    *(from_torch(rows), from_torch(w), b),
                    activation=activation,
                    layout=WeightLayout.OUT_IN,
                    out=z,
                ),
            )
            before = y
        else:
            y = before = _plus_bias(_product(rows, w.t()), bias)
            if activation is not Activation.NONE:
                y = _made(shape, x, lambda z: activate(from_torch(before), activation, out=z))
        ctx.activation, ctx.has_bias, ctx.device = activation, bias is not None, current_device()
        ctx.save_for_backward(x, weight, before if keeps else None)
        return y.view(*x.shape[:-1], w.shape[0])

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator,unused-ignore]
    def backward(ctx: Any, *gradients: Any) -> Any:
        with _on(ctx.device):
            return _linear_gradients(ctx, gradients[0])


def _linear_gradients(ctx: Any, gradient: Any) -> Any:
    x, weight, before = ctx.saved_tensors
    d = _matrix(gradient)
    if before is not None:
        after, d = d, torch.empty_like(d)
        if d.numel():
            activation_gradient(from_torch(after), from_torch(before), ctx.activation, out=from_torch(d)).sync()
    dx = _product(d, weight.detach()).view(x.shape) if ctx.needs_input_grad[0] else None
    dw = _product(d.t(), _matrix(x)) if ctx.needs_input_grad[1] else None
    db = _column_sum(d) if ctx.has_bias and ctx.needs_input_grad[2] else None
    return dx, dw, db, None


class _CopyToRanks(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Any, owner: _Communicator) -> Any:
        ctx.owner = owner
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator,unused-ignore]
    def backward(ctx: Any, *gradients: Any) -> Any:
        d = gradients[0].clone(memory_format=torch.contiguous_format)
        with ctx.owner.here():
            flat = ctx.owner.flat("copy_to_ranks: gradient", d)
            ctx.owner.collectives.all_reduce(flat, flat).sync()
        return d, None


class _Exchange(Enum):
    """What goes with a product. The gradient of x takes the opposite one."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"


class _Fused(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, owner: _Communicator, exchange: _Exchange) -> Any:
        ctx.owner, ctx.exchange, ctx.has_bias = owner, exchange, bias is not None
        ctx.save_for_backward(x, weight)
        y = _exchanged_product(owner, exchange, _matrix(x), weight.detach().t())
        y = _plus_bias(y, bias)
        return y.view(*x.shape[:-1], weight.shape[0]) if exchange is _Exchange.ALL_REDUCE else y

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator,unused-ignore]
    def backward(ctx: Any, *gradients: Any) -> Any:
        with ctx.owner.here():
            return _fused_gradients(ctx, gradients[0])


def _fused_gradients(ctx: Any, gradient: Any) -> Any:
    x, weight = ctx.saved_tensors
    owner, d, rows = ctx.owner, _matrix(gradient), _matrix(x)
    dx = dw = None
    # Every rank takes part in what is exchanged, whether or not it wants this gradient itself.
    if ctx.exchange is _Exchange.ALL_GATHER:
        dx = _exchanged_product(owner, _Exchange.REDUCE_SCATTER, d, weight.detach())
        dw = _product(d.t(), _gathered(owner, rows))
    elif ctx.exchange is _Exchange.REDUCE_SCATTER:
        dx = _exchanged_product(owner, _Exchange.ALL_GATHER, d, weight.detach())
        dw = _product(_gathered(owner, d).t(), rows)
    else:
        dx, dw = _product(d, weight.detach()), _product(d.t(), rows)
    db = _column_sum(d) if ctx.has_bias and ctx.needs_input_grad[2] else None
    return dx.view(x.shape), dw, db, None, None


def _exchanged_product(owner: _Communicator, exchange: _Exchange, a: Any, b: Any) -> Any:
    """a @ b with all-gathered rows, or summed over the ranks, whole or this rank's rows."""
    ranks = owner.collectives.group.size
    call: Callable[..., DeviceOp[Any]]
    if exchange is _Exchange.ALL_GATHER:
        call, rows = owner.fused.all_gather_matmul, a.shape[0] * ranks
    elif exchange is _Exchange.REDUCE_SCATTER:
        call, rows = owner.fused.matmul_reduce_scatter, a.shape[0] // ranks
    else:
        call, rows = owner.fused.matmul_all_reduce, a.shape[0]
    z = torch.empty(rows, b.shape[1], dtype=a.dtype, device=a.device)
    call(from_torch(a), from_torch(b), from_torch(z)).sync()  # by every rank, whatever its own part is
    return z
