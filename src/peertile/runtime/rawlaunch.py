"""Launching a kernel that somebody else compiled: a builder of argument blocks, checked, then final.

BUILDING ──read, write, scalar, grid …──> BUILDING ──finalize──> a template, which makes operations
"""

from __future__ import annotations

import struct
from typing import Any, Self

from peertile.backends.marks import MARK
from peertile.config import config
from peertile.dtypes import DType
from peertile.errors import ArgumentError, UsageError
from peertile.runtime.argument import Use, pack_words
from peertile.runtime.context import ExecutionContext
from peertile.runtime.device import Device
from peertile.runtime.driver import Grid, LaunchOptions, LoadableBinary, ModuleHandle
from peertile.runtime.op import DeviceOp, FunctionOp
from peertile.runtime.tensor import Tensor

__all__ = ["RawLaunch", "RawLaunchTemplate"]

_FLOATS = {"f16": "<e6x", "f32": "<f4x", "f64": "<d"}


class RawLaunch:
    """Collects the arguments of a foreign kernel in the order of its parameters, then `finalize()`.

    A tensor passes its address, extents and strides (in elements), a scalar one 8-byte slot. `binary` is what
    the driver loads: `target`, `entry`, `payload`, `scratch_bytes`, `waits`.

    >>> import numpy as np, peertile as pt
    >>> from peertile.cli.bench_kernels import vector_add
    >>> x, z = pt.ones(8, pt.f32), pt.empty(8, pt.f32)
    >>> binary = vector_add(z.partition(8), x, x).compiled().binary
    >>> launch = pt.op.RawLaunch(binary, "add").write(z).read(x).read(x).grid(1).finalize()
    >>> launch().sync()
    >>> z.numpy().tolist()
    [2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    """

    __slots__ = ("_binary", "_device", "_final", "_grid", "_name", "_uses", "_words")

    def __init__(self, binary: LoadableBinary, name: str | None = None) -> None:
        for attribute in ("target", "entry", "payload", "scratch_bytes", "waits"):
            if not hasattr(binary, attribute):
                raise ArgumentError(f"RawLaunch: expected a binary with {attribute}, got {type(binary).__name__}")
        self._binary = binary
        self._name = name or binary.entry
        self._words: list[bytes] = []
        self._uses: list[Use] = []
        self._grid: Grid | None = None
        self._device: Device | None = None
        self._final = False

    def _open(self) -> None:
        if self._final:
            raise UsageError(f"{self._name}: this launch is final; start a new RawLaunch")

    def _tensor(self, tensor: Tensor, use: Use) -> Self:
        self._open()
        if self._device is None:
            self._device = tensor.device
        elif tensor.device is not self._device:
            raise ArgumentError(
                f"{self._name}: expected tensors of one device, got {self._device.name} and {tensor.device.name}"
            )
        if tensor.device.driver.kind.value != self._binary.target.partition(":")[0]:
            raise ArgumentError(
                f"{self._name}: expected tensors on a {self._binary.target} device, got {tensor.device.name}"
            )
        self._uses.append(use)
        self._words.append(pack_words((tensor.address, *tensor.shape, *tensor.strides)))
        return self

    def read(self, tensor: Tensor) -> Self:
        """The next parameter is a view that the kernel reads."""
        return self._tensor(tensor, tensor.read_use())

    def write(self, tensor: Tensor) -> Self:
        """The next parameter is a view that the kernel may write."""
        return self._tensor(tensor, tensor.write_use())

    def scalar(self, number: float | int | bool, dtype: DType) -> Self:
        """The next parameter is a number."""
        self._open()
        if dtype.name in _FLOATS:
            self._words.append(struct.pack(_FLOATS[dtype.name], float(number)))
        elif dtype.is_int:
            if not isinstance(number, int) or not dtype.min <= number <= dtype.max:
                raise ArgumentError(f"{self._name}: expected {dtype.min} to {dtype.max} for {dtype}, got {number!r}")
            self._words.append(struct.pack("<q" if dtype.is_signed else "<Q", number))
        elif dtype.is_bool:
            self._words.append(struct.pack("<?7x", bool(number)))
        else:
            raise ArgumentError(f"{self._name}: expected a scalar type that fits a slot, got {dtype}; pass its bits")
        return self

    def grid(self, *extents: int) -> Self:
        """Programs along 1 to 3 axes."""
        self._open()
        if not 1 <= len(extents) <= 3 or not all(isinstance(n, int) and n >= 0 for n in extents):
            raise ArgumentError(f"grid: expected 1 to 3 integers >= 0, got {extents!r}")
        self._grid = (*extents, 1, 1)[:3]  # type: ignore[assignment]
        return self

    def finalize(self) -> RawLaunchTemplate:
        """What can be launched, any number of times; nothing of it can change any more."""
        self._open()
        if self._grid is None:
            raise ArgumentError(f"{self._name}: no grid was given; call grid(n) before finalize")
        if self._device is None:
            raise ArgumentError(f"{self._name}: no tensor was given, so no device is known; pass one")
        args = b"".join(self._words)
        is_marked = any(place.kind == MARK for place in getattr(self._binary, "places", ()))
        marks = self._device.marks if is_marked else b""  # what a timeline's kernels get behind their arguments
        expected: Any = getattr(self._binary, "n_slots", None)
        if expected is not None and len(args) + len(marks) != 8 * expected:
            raise ArgumentError(
                f"{self._name}: expected arguments of {expected - len(marks) // 8} slots of 8 bytes, got "
                f"{len(args) // 8}; a tensor of rank r takes 1 + 2r"
            )
        self._final = True
        return RawLaunchTemplate(self._binary, self._name, self._device, tuple(self._uses), args + marks, self._grid)


class RawLaunchTemplate:
    """A final raw launch: calling it makes an operation. Immutable."""

    __slots__ = ("_args", "_binary", "_device", "_grid", "_module", "_options", "_uses")

    def __init__(
        self, binary: LoadableBinary, name: str, device: Device, uses: tuple[Use, ...], args: bytes, grid: Grid
    ) -> None:
        self._binary = binary
        self._device = device
        self._uses = uses
        self._args = args
        self._grid = grid
        self._module: ModuleHandle = device.driver.load_module(binary)
        self._options = LaunchOptions(name, int(config().wait_timeout_s * 1e9), cooperative=binary.waits)

    def __call__(self) -> DeviceOp[None]:
        """A lazy launch."""
        name = self._options.name

        def run(context: ExecutionContext) -> None:
            lease = context.lease(self._uses, name)
            context.retain(self)
            ticket = context.driver.launch(
                context.handle, self._module, self._grid, self._args, self._options, on_caller=context.on_caller
            )
            context.note(ticket, lease)

        return FunctionOp(name, self._device, run, is_unit=True)
