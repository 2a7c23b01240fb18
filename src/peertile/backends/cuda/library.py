"""Functions that emitted kernels call: Triton source text, put into a file only where a kernel uses them.

Each is written for any dtype: constants take the type of the tile beside them. The functions hold the exact rules
of `ir.ops` where Triton's own operators differ (division, shifts, casts, NaN). PTX is in `ptx.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Final

__all__ = ["FUNCTIONS", "closure"]

FUNCTIONS: Final[dict[str, str]] = {}

_SOURCE = '''
def _left(extent, start, size: tl.constexpr):
    """Elements of a tile that lie inside the view, at most `size`: fits 32 bits whatever the extent."""
    left = extent - start
    return tl.where(left < size, left, size).to(tl.int32)

def _cdiv(n, size: tl.constexpr):
    return (n + (size - 1)) // size

def _or(a, b):
    return a | b

def _and(a, b):
    return a & b

def _xor(a, b):
    return a ^ b

def _mul(a, b):
    return a * b

def _add(a, b):
    return a + b

def _max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)

def _min(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)

def _quot(a, b):
    """Towards zero; x / 0 is 0, and the smallest number / -1 wraps."""
    q = a // tl.where((b == 0) | (b == -1), 1, b)
    return tl.where(b == 0, 0, tl.where(b == -1, 0 - a, q))

def _rem(a, b):
    """Sign of the dividend; x rem 0 is x."""
    return tl.where(b == 0, a, a % tl.where((b == 0) | (b == -1), 1, b))

def _floordiv(a, b):
    """Towards minus infinity; x // 0 is 0."""
    safe = tl.where((b == 0) | (b == -1), 1, b)
    q = a // safe
    down = (q * safe != a) & ((a < 0) != (b < 0))
    q = tl.where(down, q - 1, q)
    return tl.where(b == 0, 0, tl.where(b == -1, 0 - a, q))

def _mod(a, b):
    """Sign of the divisor; x mod 0 is x."""
    r = a % tl.where((b == 0) | (b == -1), 1, b)
    r = tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)
    return tl.where(b == 0, a, tl.where(b == -1, 0, r))

def _uquot(a, b):
    return tl.where(b == 0, 0, a // tl.where(b == 0, 1, b))

def _urem(a, b):
    return tl.where(b == 0, a, a % tl.where(b == 0, 1, b))

def _shl(a, b, unsigned: tl.constexpr, bits: tl.constexpr):
    """A shift by the width or more gives 0."""
    inside = b.to(unsigned, bitcast=True) < bits
    return tl.where(inside, a << tl.where(inside, b, 0), 0)

def _shr(a, b, unsigned: tl.constexpr, bits: tl.constexpr):
    """A shift by the width or more gives 0."""
    inside = b.to(unsigned, bitcast=True) < bits
    return tl.where(inside, a >> tl.where(inside, b, 0), 0)

def _sar(a, b, unsigned: tl.constexpr, bits: tl.constexpr):
    """A shift by the width or more gives the sign."""
    inside = b.to(unsigned, bitcast=True) < bits
    return a >> tl.where(inside, b, bits - 1)

def _mulhi_narrow(a, b, wide: tl.constexpr, bits: tl.constexpr):
    return ((a.to(wide) * b.to(wide)) >> bits).to(a.dtype)

def _mulhi64(a, b):
    """Of signed numbers, from the unsigned one."""
    u = tl.umulhi(a.to(tl.uint64, bitcast=True), b.to(tl.uint64, bitcast=True)).to(tl.int64, bitcast=True)
    return u - tl.where(a < 0, b, 0) - tl.where(b < 0, a, 0)

def _flip_sign(x, bits: tl.constexpr, sign: tl.constexpr):
    return (x.to(bits, bitcast=True) ^ sign).to(x.dtype, bitcast=True)

def _drop_sign(x, bits: tl.constexpr, rest: tl.constexpr):
    return (x.to(bits, bitcast=True) & rest).to(x.dtype, bitcast=True)

def _sigmoid(x):
    """By the exponential of -|x|, which cannot overflow: exact to the end of the small numbers."""
    e = libdevice.exp(0.0 - tl.abs(x))
    return tl.where(x < 0, e, 1.0) / (1.0 + e)

def _sigmoid_f32(x):
    """By the exponential of -|x|, which cannot overflow: exact to the end of the small numbers."""
    e = libdevice.exp(0.0 - tl.abs(x))
    return tl.div_rn(tl.where(x < 0, e, 1.0), 1.0 + e)

def _exp2_normal(x):
    """Of -126 and more: no result is small, so nothing is lost where small numbers become zero."""
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )

def _exp2_flushed(x):
    """Zero below -126, where results are small: the instruction itself replaces those by zero."""
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )

def _float_to_int(x, to: tl.constexpr, low: tl.constexpr, high: tl.constexpr, beyond: tl.constexpr):
    """x, already rounded, saturated; NaN is 0. `beyond` = high + 1 is exact in every float type, `high` need not be."""
    too_big = x >= beyond
    too_small = x <= low
    inside = (x < beyond) & (x > low)
    r = tl.where(inside, x, 0.0).to(to)
    return tl.where(too_big, high, tl.where(too_small, low, r))

def _clamp_keep_nan(x, limit: tl.constexpr):
    x = tl.where(x > limit, limit, x)
    return tl.where(x < -limit, -limit, x)

def _neighbour(x, bits: tl.constexpr, sign: tl.constexpr, up):
    """The next number above (or below) each element, through its bit pattern."""
    pattern = x.to(bits, bitcast=True).to(tl.int64)
    key = tl.where(pattern < 0, -(pattern + sign), pattern) + tl.where(up, 1, -1)
    return tl.where(key < 0, -key - sign, key).to(bits).to(x.dtype, bitcast=True)

def _directed(wide, nearest, back, bits: tl.constexpr, sign: tl.constexpr, mode: tl.constexpr):
    """`wide` rounded up (1), down (-1) or to zero (0), from its nearest narrow number and that as wide."""
    if mode == 1:
        up = wide == wide
        wrong = back < wide
    elif mode == -1:
        up = wide != wide
        wrong = back > wide
    else:
        up = wide < 0
        wrong = tl.abs(back) > tl.abs(wide)
    return tl.where(wrong, _neighbour(nearest, bits, sign, up), nearest)

def _float_order32(x):
    """Bits that compare, as unsigned numbers, as the floats do; NaN is the greatest, both zeros are one."""
    bits = tl.where(x == 0, 0.0, x).to(tl.uint32, bitcast=True)
    bits = tl.where(bits >= 2147483648, bits ^ 4294967295, bits ^ 2147483648)
    return tl.where(x == x, bits, 4294967295)

def _float_order64(x):
    """Bits that compare, as unsigned numbers, as the floats do; NaN is the greatest, both zeros are one."""
    bits = tl.where(x == 0, 0.0, x).to(tl.uint64, bitcast=True)
    bits = tl.where(bits >= 9223372036854775808, bits ^ 18446744073709551615, bits ^ 9223372036854775808)
    return tl.where(x == x, bits, 18446744073709551615)

def _is_last(index, n: tl.constexpr):
    """Whether no later element of a 1-d tile is equal."""
    place = tl.arange(0, n)
    again = (index[:, None] == index[None, :]) & (place[None, :] > place[:, None])
    return tl.reduce(again.to(tl.int32), 1, _or) == 0

def _dot_by_sum(a, b, acc):
    """For extents below those of the tensor cores. The row in front: the other way around, Triton takes this for a
    product of matrices and makes one of it, with factors of 10 bits and eight times the value where K is 1."""
    return acc + tl.reduce(b.to(acc.dtype)[None, :, :] * a.to(acc.dtype)[:, :, None], 1, _add)

def _dot_by_sum_batched(a, b, acc):
    return acc + tl.reduce(a.to(acc.dtype)[:, :, :, None] * b.to(acc.dtype)[:, None, :, :], 2, _add)

def _dot_u8(a, b, acc, K: tl.constexpr):
    """Through signed bytes: (a - 128)(b - 128) is what the tensor cores multiply."""
    sa = (a ^ 128).to(tl.int8, bitcast=True)
    sb = (b ^ 128).to(tl.int8, bitcast=True)
    acc = tl.dot(sa, sb, acc, out_dtype=tl.int32)
    rows = tl.reduce(sa.to(tl.int32), 1, _add)
    columns = tl.reduce(sb.to(tl.int32), 0, _add)
    return acc + 128 * rows[:, None] + 128 * columns[None, :] + 16384 * K

def _swizzled(inside, m, n, start, rows: tl.constexpr):
    """Row and column of a tile in a group of `rows` rows that is walked column by column."""
    left = m - start
    high = tl.where(left < rows, left, rows)
    return start + inside % high, inside // high

def _lanes(x, rows: tl.constexpr, n: tl.constexpr):
    """`rows` copies of a flat tile: one element for each thread at least."""
    return tl.broadcast_to(tl.reshape(x, (1, n)), (rows, n))

def _first_row(rows: tl.constexpr, n: tl.constexpr):
    """1 in row 0: which of the copies acts."""
    return tl.broadcast_to((tl.arange(0, rows) == 0)[:, None], (rows, n)).to(tl.int32)
'''

_HEAD = re.compile(r"^def (_\w+)\(", re.MULTILINE)
_CALL = re.compile(r"(?<![\w.])(_\w+)\b")


def _register(source: str) -> None:
    starts = [m.start() for m in _HEAD.finditer(source)] + [len(source)]
    for begin, end in pairwise(starts):
        text = source[begin:end].rstrip() + "\n"
        match = _HEAD.match(text)
        assert match is not None
        FUNCTIONS[match[1]] = f"@triton.jit\n{text}"


_register(_SOURCE)


def closure(called: Mapping[str, str]) -> dict[str, str]:
    """The functions named in `called` (name to text, "" for one of ours) and all that they call, callees first."""
    done: dict[str, str] = {}

    def visit(name: str, text: str) -> None:
        if name in done:
            return
        text = text or FUNCTIONS[name]
        for callee in _CALL.findall(text):
            if callee != name and callee in FUNCTIONS:
                visit(callee, "")
        done[name] = text

    for name, text in called.items():
        visit(name, text)
    return done
