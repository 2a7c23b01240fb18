"""The discrete Fourier transform in the public language: a row for each program, which keeps it whole.

Stockham's form, which sorts as it goes: at every stage the row is seen as (2, m, s); the sums and the turned
differences of its halves become (m, 2, s). Complex numbers are two planes. Nothing here checks shapes: `fft.py` does.

Stockham, "High-speed convolution and correlation", 1966; Van Loan, "Computational Frameworks for the FFT", 1992.
"""

# Kernels: tiles have operators in the kernel language, not in Python.

from __future__ import annotations

import peertile.language as T
from peertile.kernel import kernel

__all__ = ["fft_rows"]


@kernel
def fft_rows(
    real: T.Exclusive, imag: T.Exclusive, x: T.Shared, y: T.Shared, cosine: T.Shared, sine: T.Shared,
    N: T.Const[int], STAGES: T.Const[int], IS_INVERSE: T.Const[bool],
) -> None:  # fmt: skip
    """real + i imag = the transform of x + i y, rows of N; inverse: with the other sign, and divided by N.

    cosine and sine [N] hold at m + j, for m = 1, 2, 4 … N/2 and j < m, those of π j / m.
    """
    a = T.reshape(x.load_like(real), (N,))
    b = T.reshape(y.load_like(imag), (N,))
    for stage in T.static_range(STAGES):
        m, s = N >> (stage + 1), 1 << stage
        halves, others = T.reshape(a, (2, m, s)), T.reshape(b, (2, m, s))
        a0, a1 = T.extract(halves, (0, 0, 0), (1, m, s)), T.extract(halves, (1, 0, 0), (1, m, s))
        b0, b1 = T.extract(others, (0, 0, 0), (1, m, s)), T.extract(others, (1, 0, 0), (1, m, s))
        c = T.reshape(cosine.load((1,), (m,)), (1, m, 1))
        d = T.reshape(sine.load((1,), (m,)), (1, m, 1))
        if not IS_INVERSE:
            d = -d
        u, v = a0 - a1, b0 - b1
        a = T.reshape(T.permute(T.cat((a0 + a1, u * c - v * d), axis=0), (1, 0, 2)), (N,))
        b = T.reshape(T.permute(T.cat((b0 + b1, u * d + v * c), axis=0), (1, 0, 2)), (N,))
    if IS_INVERSE:
        a, b = a * (1.0 / N), b * (1.0 / N)
    real.store(T.reshape(a, (1, N)))
    imag.store(T.reshape(b, (1, N)))
