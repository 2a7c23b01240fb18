"""Whether a candidate is right: what an operation made, read on the host and compared with the reference.

Memory that an operation writes is spoiled before it runs again, so that results of an earlier run never pass for its
own. Runs nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from peertile.comm.symmetric import SymmetricTensor
from peertile.runtime.tensor import FrozenTensor, Partition, Tensor

__all__ = ["Arrays", "Saved", "arrays_of", "difference", "kernel_outputs", "outputs_among", "spoil", "tensors_of"]

Array = np.ndarray[Any, np.dtype[Any]]
Arrays = list[Array]

_TOLERANCES = {"float64": 1e-9, "float32": 2e-4, "float16": 1e-2, "bfloat16": 4e-2, "complex64": 2e-4}
_COARSEST = 0.25
"""Of eight-bit floats, whose neighbours are that far apart."""


def _leaves(value: Any) -> Iterator[Tensor | Array | float | int]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, SymmetricTensor):
        yield value.local
    elif isinstance(value, Partition):
        yield value.unpartition()
    elif isinstance(value, np.ndarray | np.generic | bool | int | float):
        yield np.asarray(value)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _leaves(item)


def tensors_of(*values: Any) -> list[Tensor]:
    """The tensors in arguments or results: of partitions the tensor that was cut, of symmetric ones the own part."""
    return [leaf for leaf in _leaves(values) if isinstance(leaf, Tensor)]


def arrays_of(result: Any) -> Arrays:
    """What an operation made, as host copies. Objects that are neither tensors, arrays nor numbers are left out."""
    return [leaf.numpy() if isinstance(leaf, Tensor) else np.asarray(leaf) for leaf in _leaves(result)]


def kernel_outputs(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """Of the arguments that a launch hands back, those that it may write: partitions, or else all tensors."""
    parts = tuple(item for item in result if isinstance(item, Partition))
    return parts or result


def outputs_among(result: Any, arguments: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of a result that lie in memory of the arguments: the operation was told where to write."""

    def meets(a: Tensor, b: Tensor) -> bool:
        a_bytes, b_bytes = (t.byte_range()[1] - t.byte_range()[0] for t in (a, b))
        return a.device is b.device and a.address < b.address + b_bytes and b.address < a.address + a_bytes

    return [t for t in tensors_of(result) if any(meets(t, a) for a in arguments)]


def spoil(tensors: Iterable[Tensor]) -> None:
    """Every element becomes another: NaN for floats that are none, what is not x for integers and truth values."""
    for tensor in tensors:
        if isinstance(tensor, FrozenTensor) or not tensor.size:
            continue
        array = tensor.numpy()
        if tensor.dtype.is_float:
            was_nan = np.isnan(array.astype(np.float64))
            tensor.copy_from(np.where(was_nan, 0.0, np.nan).astype(array.dtype))
        else:
            tensor.copy_from(~array)


class Saved:
    """The contents of tensors, to be put back. Frozen ones cannot change and are left out."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._contents = [(t, t.numpy()) for t in tensors if t.size and not isinstance(t, FrozenTensor)]

    def put_back(self) -> None:
        for tensor, content in self._contents:
            tensor.copy_from(content)


def difference(got: Arrays, expected: Arrays, tolerance: float | None) -> str | None:
    """What is wrong with `got`, in words; None where it equals `expected`, floats within the tolerance."""
    if len(got) != len(expected):
        return f"expected {len(expected)} arrays as the reference gives, got {len(got)}"
    for number, (a, b) in enumerate(zip(got, expected, strict=True)):
        where = f"result {number}: " if len(got) > 1 else ""
        if a.shape != b.shape:
            return f"{where}expected shape {b.shape}, got {a.shape}"
        if a.dtype.kind in "biu" and b.dtype.kind in "biu":
            wrong = np.asarray(a != b)
        else:
            wide = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
            x, y = a.astype(wide), b.astype(wide)
            finite = np.isfinite(y)
            with np.errstate(all="ignore"):
                typical = np.sqrt(np.mean(np.abs(y[finite]) ** 2)) if finite.any() else 0.0
                limit = _tolerance(a, tolerance) * (np.abs(y) + typical)
                close = np.where(finite, np.abs(x - y) <= limit, (x == y) | (np.isnan(x) & np.isnan(y)))
            wrong = ~close
        if wrong.any():
            first = np.unravel_index(int(np.argmax(wrong)), a.shape)
            place = [int(i) for i in first]
            return (
                f"{where}expected {b[first]!s} at {place} as the reference gives, got {a[first]!s}; "
                f"{int(wrong.sum())} of {a.size} elements differ"
            )
    return None


def _tolerance(array: Array, tolerance: float | None) -> float:
    return _TOLERANCES.get(array.dtype.name, _COARSEST) if tolerance is None else tolerance
