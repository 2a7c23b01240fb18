"""Linear maps and what their gradients need, as lazy operations on tensors of any float type, f64 too.

Kernels are in `gradient_kernels.py`. f32, f16 and bf16 products go through `layers.linear`, which knows the fast tiles;
f64 is for checking gradients and takes one way. No autograd: who differentiates is `peertile.torch`.
"""

from __future__ import annotations

from typing import Any

from peertile.dtypes import DType, bf16, f16, f32, f64
from peertile.errors import ArgumentError
from peertile.library import gradient_kernels as kernels
from peertile.library.layers import Activation, check_tensor, linear, output, power_of_two
from peertile.op import value
from peertile.runtime.op import DeviceOp
from peertile.runtime.tensor import Tensor

__all__ = ["activate", "activation_gradient", "add_bias", "column_sum", "product"]

FLOATS = (f32, f16, bf16, f64)
_ELEMENTS = 4096
"""Elements of a tile of an elementwise kernel."""


def _accumulator(dtype: DType) -> DType:
    return f64 if dtype == f64 else f32


def product(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> DeviceOp[Tensor]:
    """out = a @ b; a [m, k], b [k, n], out [m, n] of one float type; views of any strides. Sums are f64 for f64, else
    f32. ArgumentError for what does not fit together.

    >>> import numpy as np, peertile as pt
    >>> from peertile.library.gradients import product
    >>> x = pt.asarray(np.array([[1.0, 2.0], [3.0, 4.0]]))
    >>> product(x.permute(1, 0), x).sync().numpy().tolist()
    [[10.0, 14.0], [14.0, 20.0]]
    """
    check_tensor("product", "a", a, FLOATS, ("m", "k"))
    check_tensor("product", "b", b, (a.dtype,), (a.shape[1], "n"), a.device)
    z = output("product", out, (a.shape[0], b.shape[1]), a.dtype, a.device)
    if a.dtype != f64:
        return linear(a, b, out=z)
    if not z.size:
        return value(z, device=z.device)
    op = kernels.product(z.partition((32, 32)).persistent(), a, b, BK=32, ACC=f64)
    return op.map(lambda *_: z)


def _cut(z: Tensor) -> Any:
    """A matrix in tiles of about as many elements, whole rows where they are short."""
    columns = min(power_of_two(z.shape[1]), 1024)
    return z.partition((min(power_of_two(z.shape[0]), _ELEMENTS // columns), columns))


def add_bias(x: Tensor, bias: Tensor) -> DeviceOp[Tensor]:
    """x = x + bias, in place; x [rows, width] and bias [width] of any float types.

    >>> import numpy as np, peertile as pt
    >>> from peertile.library.gradients import add_bias
    >>> add_bias(pt.ones((1, 2), pt.f32), pt.asarray(np.array([1.0, 2.0]))).sync().numpy().tolist()
    [[2.0, 3.0]]
    """
    check_tensor("add_bias", "x", x, FLOATS, ("rows", "width"))
    check_tensor("add_bias", "bias", bias, FLOATS, x.shape[1:], x.device)
    if not x.size:
        return value(x, device=x.device)
    return kernels.add_bias(_cut(x), bias, ACC=_accumulator(x.dtype)).map(lambda *_: x)


def activate(x: Tensor, activation: Activation, *, out: Tensor | None = None) -> DeviceOp[Tensor]:
    """out = activation(x); x and out [rows, width] of one float type.

    >>> import numpy as np, peertile as pt
    >>> from peertile.library.gradients import activate
    >>> from peertile.library.layers import Activation
    >>> activate(pt.asarray(np.array([[-1.0, 2.0]])), Activation.RELU).sync().numpy().tolist()
    [[0.0, 2.0]]
    """
    _check_activation("activate", activation)
    check_tensor("activate", "x", x, FLOATS, ("rows", "width"))
    z = output("activate", out, x.shape, x.dtype, x.device)
    if not z.size:
        return value(z, device=z.device)
    op = kernels.activate(_cut(z), x, ACTIVATION=activation.value, ACC=_accumulator(x.dtype))
    return op.map(lambda *_: z)


def activation_gradient(
    dy: Tensor, x: Tensor, activation: Activation, *, out: Tensor | None = None
) -> DeviceOp[Tensor]:
    """out = dy · activation'(x): the gradient of what went in, for that of what came out. All [rows, width] of one
    float type. The derivative of relu at 0 is 0.

    >>> import numpy as np, peertile as pt
    >>> from peertile.library.gradients import activation_gradient
    >>> from peertile.library.layers import Activation
    >>> x = pt.asarray(np.array([[-1.0, 2.0]]))
    >>> activation_gradient(pt.ones((1, 2), pt.f64), x, Activation.RELU).sync().numpy().tolist()
    [[0.0, 1.0]]
    """
    _check_activation("activation_gradient", activation)
    check_tensor("activation_gradient", "x", x, FLOATS, ("rows", "width"))
    check_tensor("activation_gradient", "dy", dy, (x.dtype,), x.shape, x.device)
    z = output("activation_gradient", out, x.shape, x.dtype, x.device)
    if not z.size:
        return value(z, device=z.device)
    op = kernels.activation_gradient(_cut(z), dy, x, ACTIVATION=activation.value, ACC=_accumulator(x.dtype))
    return op.map(lambda *_: z)


def column_sum(x: Tensor, *, out: Tensor | None = None) -> DeviceOp[Tensor]:
    """out[j] = Σ_i x[i, j], in order; x [rows, width], out [width] of one float type.

    >>> import numpy as np, peertile as pt
    >>> from peertile.library.gradients import column_sum
    >>> column_sum(pt.asarray(np.array([[1.0, 2.0], [3.0, 4.0]]))).sync().numpy().tolist()
    [4.0, 6.0]
    """
    check_tensor("column_sum", "x", x, FLOATS, ("rows", "width"))
    z = output("column_sum", out, x.shape[1:], x.dtype, x.device)
    if not z.size:
        return value(z, device=z.device)
    columns = min(power_of_two(x.shape[1]), 256)
    op = kernels.column_sum(z.partition(columns), x, BM=max(1, _ELEMENTS // columns), ACC=_accumulator(x.dtype))
    return op.map(lambda *_: z)


def _check_activation(layer: str, activation: Any) -> None:
    if not isinstance(activation, Activation) or activation is Activation.NONE:
        raise ArgumentError(f"{layer}: activation: expected an Activation that is not NONE, got {activation!r}")
