"""The discrete Fourier transform of rows: `fft(real, imag)` and `inverse_fft(real, imag)`, each one launch.

Complex numbers are two f32 tensors. The factors of a length are computed once, on the host, in f64. No communication.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from peertile.dtypes import f32
from peertile.errors import ArgumentError
from peertile.library import fft_kernels
from peertile.op import value
from peertile.runtime.device import Device
from peertile.runtime.op import DeviceOp
from peertile.runtime.registry import current_device
from peertile.runtime.tensor import Tensor

__all__ = ["LONGEST", "Fourier", "fft", "inverse_fft"]

LONGEST = 1 << 14
"""Elements of the longest row: a program holds all of it."""


class Fourier:
    """Transforms of rows of `length` (a power of two up to 16384) on `device` (default: the current one): the
    factors, computed once.

    >>> import numpy as np, peertile as pt
    >>> from peertile.library.fft import Fourier
    >>> fourier = Fourier(4)
    >>> one = pt.asarray(np.array([[1.0, 0, 0, 0]], np.float32))
    >>> real, imag = fourier.forward(one, pt.zeros((1, 4), pt.f32)).sync()
    >>> real.numpy().tolist(), imag.numpy().tolist()
    ([[1.0, 1.0, 1.0, 1.0]], [[0.0, 0.0, 0.0, 0.0]])
    """

    def __init__(self, length: int, device: Device | None = None) -> None:
        if isinstance(length, bool) or not isinstance(length, int) or not 1 <= length <= LONGEST or length & length - 1:
            raise ArgumentError(f"fft: rows: expected a power of two up to {LONGEST} for their length, got {length!r}")
        self.length = length
        self.device = device = current_device() if device is None else device
        angles = np.zeros(length)
        m = 1
        while m < length:
            angles[m : 2 * m] = np.pi * np.arange(m) / m
            m *= 2
        self._cosine = device.asarray(np.cos(angles), f32)
        self._sine = device.asarray(np.sin(angles), f32)

    def forward(
        self, real: Tensor, imag: Tensor, out: tuple[Tensor, Tensor] | None = None
    ) -> DeviceOp[tuple[Tensor, Tensor]]:
        """out[j] = Σ_k in[k] e^(-2πi j k / length), for each row: see `fft`."""
        return self._op("fft", real, imag, out, is_inverse=False)

    def inverse(
        self, real: Tensor, imag: Tensor, out: tuple[Tensor, Tensor] | None = None
    ) -> DeviceOp[tuple[Tensor, Tensor]]:
        """out[k] = 1/length Σ_j in[j] e^(2πi j k / length), for each row: see `inverse_fft`."""
        return self._op("inverse_fft", real, imag, out, is_inverse=True)

    def _op(self, name: str, real: Any, imag: Any, out: Any, *, is_inverse: bool) -> DeviceOp[tuple[Tensor, Tensor]]:
        _check_rows(f"{name}: real", real, self.device, None)
        _check_rows(f"{name}: imag", imag, self.device, real.shape)
        if real.shape[1] != self.length:
            raise ArgumentError(f"{name}: real: expected rows of {self.length}, got {list(real.shape)}")
        if out is None:
            a, b = self.device.empty(real.shape, f32), self.device.empty(real.shape, f32)
        else:
            if not isinstance(out, tuple) or len(out) != 2:
                raise ArgumentError(f"{name}: out: expected a pair of tensors, got {type(out).__name__}")
            a, b = out
            _check_rows(f"{name}: out: real", a, self.device, real.shape)
            _check_rows(f"{name}: out: imag", b, self.device, real.shape)
        if not a.size:
            return value((a, b), device=self.device)
        tile = (1, self.length)
        launch: DeviceOp[Any] = fft_kernels.fft_rows(
            a.partition(tile), b.partition(tile), real, imag, self._cosine, self._sine,
            N=self.length, STAGES=self.length.bit_length() - 1, IS_INVERSE=is_inverse,
        )  # fmt: skip
        return launch.map(lambda *_: (a, b))


def _check_rows(what: str, t: Any, device: Device | None, shape: tuple[int, ...] | None) -> Tensor:
    if not isinstance(t, Tensor):
        raise ArgumentError(f"{what}: expected a Tensor, got {type(t).__name__}; pt.asarray makes one")
    if t.dtype != f32:
        raise ArgumentError(f"{what}: expected f32, got {t.dtype}; complex numbers are two f32 tensors")
    if len(t.shape) != 2 or shape not in (None, t.shape):
        wanted = "rows, length" if shape is None else ", ".join(map(str, shape))
        raise ArgumentError(f"{what}: expected [{wanted}], got {list(t.shape)}")
    if device is not None and t.device is not device:
        raise ArgumentError(f"{what}: expected a tensor of {device.name}, got one of {t.device.name}")
    return t


def fft(real: Tensor, imag: Tensor, out: tuple[Tensor, Tensor] | None = None) -> DeviceOp[tuple[Tensor, Tensor]]:
    """out[r, j] = Σ_k (real + i imag)[r, k] e^(-2πi j k / n), as a pair of tensors.

    real, imag and both of out [rows, n] f32, any strides; n a power of two up to 16384. A row for each program.
    `Fourier` keeps the factors from call to call. ArgumentError for what does not fit together.

    >>> import numpy as np, peertile as pt
    >>> from peertile.library.fft import fft
    >>> ones = pt.ones((1, 2), pt.f32)
    >>> fft(ones, ones).sync()[0].numpy().tolist()
    [[2.0, 0.0]]
    """
    t = _check_rows("fft: real", real, None, None)
    return Fourier(t.shape[1], t.device).forward(real, imag, out)


def inverse_fft(
    real: Tensor, imag: Tensor, out: tuple[Tensor, Tensor] | None = None
) -> DeviceOp[tuple[Tensor, Tensor]]:
    """out[r, k] = 1/n Σ_j (real + i imag)[r, j] e^(2πi j k / n), as a pair of tensors: what undoes `fft`.

    >>> import numpy as np, peertile as pt
    >>> from peertile.library.fft import fft, inverse_fft
    >>> x, zero = pt.asarray(np.array([[1.0, 2.0]], np.float32)), pt.zeros((1, 2), pt.f32)
    >>> inverse_fft(*fft(x, zero).sync()).sync()[0].numpy().tolist()
    [[1.0, 2.0]]
    """
    t = _check_rows("inverse_fft: real", real, None, None)
    return Fourier(t.shape[1], t.device).inverse(real, imag, out)
