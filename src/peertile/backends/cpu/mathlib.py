"""Elementwise math as LLVM IR text: our own polynomials over vectors, no libm, never a call per lane.

Every routine is correct for ±0, ±inf, NaN, denormal operands and results (but for targets that flush them), and is
the same function at every width. It never imports llvmlite, never allocates, never touches memory its caller
can see. Intrinsics need no `declare` lines: LLVM declares them by itself.

Largest errors found, in ULP of the result, against references of higher precision over the whole domain:

            exp  exp2 log  log2 sin  cos  tan  sinh cosh tanh erf  sigmoid rsqrt pow  atan2
    f32     1.0  1.1  1.1  1.1  1.5  1.5  2.8  1.6  1.4  1.3  1.1  2.3     1.5   0.6  1.9
    f64     1.1  1.2  1.1  1.0  1.5  1.5  2.9  1.6  1.5  1.4  1.2  2.3     1.5   1.2  2.4

Without a fused multiply-add in the target the bound is about one ULP more. sin, cos and tan keep theirs for
every finite operand: beyond the range of the reduction by parts of π/2, lanes go one by one through a product with
1200 bits of 2/π.

How the coefficients were made: weighted Remez exchange in 200-bit arithmetic, the weight being that of the
relative error of the whole function, then coefficients rounded one at a time from the lowest with a refit of
the rest. `2^-k` beside a table is the relative error of the fit after rounding.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from peertile.errors import InternalError
from peertile.ir.ops import Binary, Unary

__all__ = ["Library", "Routine", "require"]

MAX_WIDTH: Final = 64


@dataclass(frozen=True, slots=True)
class Routine:
    """One internal LLVM function. `name` has no `@`; call it as

        %y = call <W x float> @NAME(<W x float> %x)                  (Unary)
        %z = call <W x float> @NAME(<W x float> %x, <W x float> %y)  (Binary: POW is x^y; ATAN2 is (y, x); MIN, MAX)

    with `float` or `double` instead of a vector when the width is 1. Pure: no memory, no effects.
    `dependencies` are the routines that `text` calls, and their own are theirs to name.
    """

    name: str
    text: str
    dependencies: tuple[Routine, ...] = ()


def require(fn: Unary | Binary, dtype_name: str, width: int, features: frozenset[str]) -> Routine:
    """The routine of `fn` for `width` lanes of "f32" or "f64".

    The width is a power of two from 1 to 64: beyond a native vector LLVM splits every op into several, which is
    unrolling breadth-first. `features` are LLVM feature names ("fma", "avx512f", ...). f16 and bf16 are for
    the caller to widen. Covered: every Unary but NOT, and Binary POW, ATAN2, MIN, MAX; else InternalError.
    """
    if dtype_name not in _SPECS:
        raise InternalError(f"mathlib: dtype: expected f32 or f64, got {dtype_name!r}")
    if not 1 <= width <= MAX_WIDTH or width & (width - 1):
        raise InternalError(f"mathlib: width: expected a power of two from 1 to {MAX_WIDTH}, got {width}")
    if fn not in _ROUTINES:
        raise InternalError(f"mathlib: fn: no routine for {fn}; lower it to instructions")
    return _routine(fn, dtype_name, width, features & _RELEVANT)


class Library:
    """Collects the routines that one module needs; each is emitted once."""

    def __init__(self, features: frozenset[str]) -> None:
        self.features = features
        self._routines: dict[str, Routine] = {}

    def require(self, fn: Unary | Binary, dtype_name: str, width: int) -> str:
        """Name (without `@`) of the routine; its text and that of all it calls will be in `text()`."""
        routine = require(fn, dtype_name, width, self.features)
        self._add(routine)
        return routine.name

    def _add(self, routine: Routine) -> None:
        if routine.name not in self._routines:
            self._routines[routine.name] = routine
            for dependency in routine.dependencies:
                self._add(dependency)

    def text(self) -> str:
        """Definitions of everything required so far, each once. Append it to the module."""
        return "\n".join(r.text for r in self._routines.values())


# ---------------------------------------------------------------- coefficients, lowest power first

# exp(r) = 1 + r + r² P(r), |r| <= ln2/2
_EXP_F32: Final = (0.49999994, 0.16666518, 0.041668136, 0.008368902, 0.0013831302)  # 2^-28.2
_EXP_F64: Final = (  # 2^-55.8
    0.500000000000001, 0.16666666666665478, 0.04166666666653006, 0.008333333333703962, 0.0013888888946451065,
    0.00019841269692588224, 2.4801487478982682e-05, 2.7556971397553264e-06, 2.763304082349924e-07,
    2.53089978982463e-08,
)  # fmt: skip
# log(1+f) = f + f² P(f), 1+f from √½ to √2
_LOG_F32: Final = (  # 2^-25.7
    -0.49999988, 0.33333603, -0.25001898, 0.19984351, -0.16585545, 0.14504261, -0.1376928, 0.11089231, -0.041283373,
)  # fmt: skip
_LOG_F64: Final = (  # 2^-54.8
    -0.5000000000000003, 0.3333333333333201, -0.2499999999997614, 0.20000000000427479, -0.16666666671410552,
    0.1428571424018741, -0.12499999571373747, 0.11111113275535907, -0.10000020936710846, 0.0909086173585111,
    -0.08332740870024831, 0.07692566140249381, -0.07152652456823451, 0.06675134455957217, -0.06161184230693093,
    0.05705903442474945, -0.05890514778223837, 0.06530707407780101, -0.05449389011721745, 0.021358348310018326,
)  # fmt: skip
# log2(1+f) = f/ln2 + f² P(f), same range
_LOG2_F32: Final = (  # 2^-26.3
    -0.72134733, 0.48089966, -0.36070094, 0.28847617, -0.23941867, 0.20623958, -0.19447367, 0.17727153, -0.090716034,
)  # fmt: skip
_LOG2_F64: Final = (  # 2^-56.5
    -0.7213475204444817, 0.4808983469629925, -0.3606737602222531, 0.2885390081760148, -0.24044917347743405,
    0.20609929178663178, -0.18033688067885625, 0.16029943439831595, -0.14426946352439032, 0.1311546055591066,
    -0.12022622864268923, 0.11096618692177716, -0.10301003382818735, 0.09629664920334378, -0.09074381420934471,
    0.08429016474931252, -0.07530843961598833, 0.07470911177065974, -0.0926544164402969, 0.0931810546059236,
    -0.04296846369223497,
)  # fmt: skip
# sin(r) = r + r³ P(r²) and cos(r) = 1 - r²/2 + r⁴ P(r²), |r| <= π/4
_SIN_F32: Final = (-0.16666655, 0.008332189, -0.0001951829)  # 2^-27.9
_COS_F32: Final = (0.041666646, -0.001388731, 2.4432324e-05)  # 2^-33.0
_SIN_F64: Final = (  # 2^-57.9
    -0.1666666666666663, 0.00833333333332184, -0.00019841269829358764, 2.7557313538639857e-06,
    -2.5050734427192185e-08, 1.58954370527597e-10,
)  # fmt: skip
_COS_F64: Final = (  # 2^-63.9
    0.041666666666666595, -0.0013888888888873344, 2.4801587289003936e-05, -2.755731421761198e-07,
    2.087570547291773e-09, -1.1358753052710303e-11,
)  # fmt: skip
# tanh(x) = x + x³ P(x²), |x| <= 0.625
_TANH_F32: Final = (-0.33333293, 0.13331647, -0.053752962, 0.020674234, -0.005737915)  # 2^-27.6
_TANH_F64: Final = (  # 2^-59.5
    -0.33333333333333315, 0.13333333333329925, -0.053968253966100076, 0.021869488468370644, -0.008863234283981794,
    0.0035921135025638565, -0.0014557215305959763, 0.0005894286549294997, -0.00023693736127929557,
    9.141419994284242e-05, -3.003216239405192e-05, 5.971429229281564e-06,
)  # fmt: skip
# sinh(x) = x + x³ P(x²), |x| <= 1
_SINH_F32: Final = (0.16666667, 0.008333307, 0.00019843873, 2.7760552e-06)  # 2^-31.2
_SINH_F64: Final = (  # 2^-61.6
    0.16666666666666669, 0.00833333333333291, 0.00019841269841595457, 2.755731910611761e-06, 2.505213106595347e-08,
    1.6056658304427365e-10, 7.776462125407346e-13,
)  # fmt: skip
# atan(q) = q + q³ P(q²): f32 for q <= 1, f64 for |q| <= √2 - 1
_ATAN_F32: Final = (  # 2^-25.7
    -0.33333153, 0.19993767, -0.14211003, 0.10665793, -0.0755177, 0.04320684, -0.016365012, 0.0029200048,
)  # fmt: skip
_ATAN_F64: Final = (  # 2^-59.2
    -0.3333333333333327, 0.19999999999969204, -0.14285714281462564, 0.11111110836921356, -0.09090899097154567,
    0.07692081422234326, -0.06663321958986407, 0.058493393079299655, -0.05045333960676506, 0.038206959453926964,
    -0.01805304802416513,
)  # fmt: skip
# erf(x) = x + x P(x²): f32 for |x| <= 0.96, f64 for |x| <= 1
_ERF_F32: Final = (0.12837917, -0.3761263, 0.11283626, -0.02685574, 0.005192461, -0.00080508174, 8.00287e-05)  # 2^-30.0
_ERF_F64: Final = (  # 2^-56.0
    0.12837916709551256, -0.37612638903183343, 0.11283791670936955, -0.026866170641962207, 0.005223977596788416,
    -0.0008548325489046713, 0.00012055280667167743, -1.4924469904787604e-05, 1.6444215501655036e-06,
    -1.6184581705667347e-07, 1.3619646629093244e-08, -7.61401981177451e-10,
)  # fmt: skip
# erf(x) = 1 - exp(-P(x)) beyond: f32 to 4, f64 to 6, where it rounds to 1. The weight is the error of erf.
_ERFC_F32: Final = (  # 2^-34.8
    -0.00018245392, 1.129552, 0.63327247, 0.10836154, -0.025171863, 0.0041909125, -0.00043855235, 2.144877e-05,
)  # fmt: skip
_ERFC_F64: Final = (  # 2^-55.2
    5.028557792070397e-07, 1.1283740904545048, 0.6366436177780176, 0.10270348829642367, -0.018990318621230278,
    -0.00041035570795730557, 0.0019155610614100859, -0.0007702426309229492, 0.00013473086586547825,
    2.0462708744897947e-05, -2.291536418301443e-05, 8.701010991514509e-06, -2.145073247598778e-06,
    3.752511194482439e-07, -4.671478079069511e-08, 3.964087338809593e-09, -2.0635567306491967e-10,
    4.98196428054013e-12,
)  # fmt: skip
# pow of f32, in f64: log2(1+f) = f P(f), and 2^r = 1 + r P(r), |r| <= ½
_POW_LOG2: Final = (  # 2^-38.1
    1.442695040886558, -0.721347520337044, 0.48089834874824516, -0.3606737923566825, 0.28853880137183424,
    -0.24044644867776174, 0.20610688453241074, -0.18043678060969862, 0.16022204614074917, -0.14249749799792044,
    0.13021354368850493, -0.13459775345989186, 0.132794095941517, -0.07009252102690769,
)  # fmt: skip
_POW_EXP2: Final = (  # 2^-34.3
    0.693147180706176, 0.24022651067424483, 0.05550410359622588, 0.00961803801617783, 0.0013333940088979149,
    0.00015466793504481216, 1.5195082783999171e-05,
)  # fmt: skip
# pow of f64: atanh(s)/s = 1 + w/3 + w²/5 + w³ P(w), w = s², |s| <= (√2-1)/(√2+1)
_POW_ATANH: Final = (  # 2^-80.0
    0.1428571428571426, 0.1111111111112644, 0.09090909087222895, 0.07692308167104121, 0.0666663047165937,
    0.05884037104487993, 0.052162708983788816, 0.05473882697723419,
)  # fmt: skip

# Constants as pairs: the double next to it, and the double next to what is left.
_LN2_PAIR: Final = (0.6931471805599453, 2.3190468138462996e-17)
_LOG2E_PAIR: Final = (1.4426950408889634, 2.0355273740931033e-17)
_THIRD_PAIR: Final = (0.3333333333333333, 1.850371707708594e-17)
_FIFTH_PAIR: Final = (0.2, -1.1102230246251566e-17)
_TWO_LOG2E_PAIR: Final = (2.8853900817779268, 4.0710547481862066e-17)
_HALF_PI_64: Final = 0xC90FDAA22168C235  # π/2 · 2^63
_PI: Final = 3.141592653589793
_INF: Final = float("inf")
_NAN: Final = float("nan")

# The first 1216 bits of 2/π behind a word of zeros: a reduction reads four words from any bit on.
_TWO_OVER_PI: Final = (
    0, 0xA2F9836E4E441529, 0xFC2757D1F534DDC0, 0xDB6295993C439041, 0xFE5163ABDEBBC561, 0xB7246E3A424DD2E0,
    0x06492EEA09D1921C, 0xFE1DEB1CB129A73E, 0xE88235F52EBB4484, 0xE99C7026B45F7E41, 0x3991D639835339F4,
    0x9C845F8BBDF9283B, 0x1FF897FFDE05980F, 0xEF2F118B5A0A6D1F, 0x6D367ECF27CB09B7, 0x4F463F669E5FEA2D,
    0x7527BAC7EBE5F17B, 0x3D0739F78A5292EA, 0x6BFB5FB11F8D5D08, 0x56033046FC7B6BAB,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Spec:
    """What the functions need to know of an element type."""

    name: str
    element: str
    integer: str
    mantissa: int  # stored bits
    bias: int
    sqrt_half: int  # bits of √½, rounded down so that 1+f stays inside the fits
    magic: float  # 1.5 · 2^mantissa: adding it rounds to an integer, whose bits are then the low ones
    ln2: tuple[float, float]  # the first part times any exponent is exact
    log2e: tuple[float, float]
    exp_range: tuple[float, float]  # beyond, exp is 0 and inf
    exp2_range: tuple[float, float]
    half_pi: tuple[float, ...]  # π/2 in full parts, for a fused multiply-add
    half_pi_short: tuple[float, ...]  # π/2 in parts whose products with a quotient are exact
    near: float  # up to here the parts reduce with full accuracy
    exp: tuple[float, ...]
    log: tuple[float, ...]
    log2: tuple[float, ...]
    sin: tuple[float, ...]
    cos: tuple[float, ...]
    tanh: tuple[float, ...]
    sinh: tuple[float, ...]
    erf: tuple[float, ...]
    erfc: tuple[float, ...]
    erf_split: float
    erf_end: float

    @property
    def bits(self) -> int:
        return 32 if self.integer == "i32" else 64


_hex: Final = float.fromhex

_F32: Final = _Spec(
    name="f32", element="float", integer="i32", mantissa=23, bias=127, sqrt_half=0x3F3504F3, magic=1.5 * 2.0**23,
    ln2=(_hex("0x1.62e4p-1"), _hex("0x1.7f7d1cp-20")), log2e=(_hex("0x1.715476p+0"), _hex("0x1.4ae0cp-26")),
    exp_range=(-104.0, 89.0), exp2_range=(-151.0, 129.0),
    half_pi=(_hex("0x1.921fb6p+0"), _hex("-0x1.777a5cp-25"), _hex("-0x1.ee59dap-50")),
    half_pi_short=(
        _hex("0x1.92p+0"), _hex("0x1.fb4p-12"), _hex("0x1.444p-24"), _hex("0x1.68cp-39"), _hex("0x1.1a6262p-54"),
    ),
    near=12800.0, exp=_EXP_F32, log=_LOG_F32, log2=_LOG2_F32, sin=_SIN_F32, cos=_COS_F32, tanh=_TANH_F32,
    sinh=_SINH_F32, erf=_ERF_F32, erfc=_ERFC_F32, erf_split=0.96, erf_end=4.0,
)  # fmt: skip
_F64: Final = _Spec(
    name="f64", element="double", integer="i64", mantissa=52, bias=1023, sqrt_half=0x3FE6A09E667F3BCC,
    magic=1.5 * 2.0**52, ln2=(_hex("0x1.62e42fefa3p-1"), _hex("0x1.3de6af278ece6p-42")), log2e=_LOG2E_PAIR,
    exp_range=(-746.0, 710.0), exp2_range=(-1076.0, 1025.0),
    half_pi=(_hex("0x1.921fb54442d18p+0"), _hex("0x1.1a62633145c07p-54"), _hex("-0x1.f1976b7ed8fbcp-110")),
    half_pi_short=(
        _hex("0x1.921fb544p+0"), _hex("0x1.0b4611a6p-34"), _hex("0x1.3198a2ep-69"), _hex("0x1.b839a252049c1p-104"),
    ),
    near=1.6e6, exp=_EXP_F64, log=_LOG_F64, log2=_LOG2_F64, sin=_SIN_F64, cos=_COS_F64, tanh=_TANH_F64,
    sinh=_SINH_F64, erf=_ERF_F64, erfc=_ERFC_F64, erf_split=1.0, erf_end=6.0,
)  # fmt: skip
_SPECS: Final = {"f32": _F32, "f64": _F64}
_OF_ELEMENT: Final = {"float": _F32, "double": _F64}

# The features that change the text; the others must not split the cache.
_RELEVANT: Final = frozenset({"fma", "avx", "avx512f", "avx512vl", "sse4.1", "neon"})


# ---------------------------------------------------------------- writing instructions


class _Val:
    """An SSA value or constant of `element` in every lane; operators write the instruction."""

    __slots__ = ("code", "element", "ref")

    def __init__(self, code: _Code, ref: str, element: str) -> None:
        self.code, self.ref, self.element = code, ref, element

    def _op(self, name: str, other: _Val | float, swap: bool = False) -> _Val:
        b = self.code.like(self, other)
        left, right = (b, self) if swap else (self, b)
        return self.code.emit(f"{name} {self.code.type(self.element)} {left.ref}, {right.ref}", self.element)

    @property
    def _is_float(self) -> bool:
        return self.element in _OF_ELEMENT

    def __add__(self, other: _Val | float) -> _Val:
        return self._op("fadd" if self._is_float else "add", other)

    def __radd__(self, other: float) -> _Val:
        return self._op("fadd" if self._is_float else "add", other, swap=True)

    def __sub__(self, other: _Val | float) -> _Val:
        return self._op("fsub" if self._is_float else "sub", other)

    def __rsub__(self, other: float) -> _Val:
        return self._op("fsub" if self._is_float else "sub", other, swap=True)

    def __mul__(self, other: _Val | float) -> _Val:
        return self._op("fmul", other)

    def __rmul__(self, other: float) -> _Val:
        return self._op("fmul", other, swap=True)

    def __truediv__(self, other: _Val | float) -> _Val:
        return self._op("fdiv", other)

    def __rtruediv__(self, other: float) -> _Val:
        return self._op("fdiv", other, swap=True)

    def __neg__(self) -> _Val:
        return self.code.emit(f"fneg {self.code.type(self.element)} {self.ref}", self.element)

    def __and__(self, other: _Val | int) -> _Val:
        return self._op("and", other)

    def __or__(self, other: _Val | int) -> _Val:
        return self._op("or", other)

    def __xor__(self, other: _Val | int) -> _Val:
        return self._op("xor", other)

    def __lshift__(self, other: int) -> _Val:
        return self._op("shl", other)

    def __rshift__(self, other: int) -> _Val:
        return self._op("lshr", other)


class _Code:
    """The body of one routine being written."""

    def __init__(self, spec: _Spec, width: int, features: frozenset[str]) -> None:
        self.spec = spec
        self.width = width
        self.features = features
        self.fused = bool(features & {"fma", "avx512f", "neon"})
        self.lines: list[str] = []
        self.block = "entry"
        self.dependencies: list[Routine] = []

    # -- types and constants

    def type(self, element: str) -> str:
        return element if self.width == 1 else f"<{self.width} x {element}>"

    def mangled(self, element: str) -> str:
        short = {"float": "f32", "double": "f64"}.get(element, element)
        return short if self.width == 1 else f"v{self.width}{short}"

    def const(self, element: str, value: float) -> _Val:
        if element == "float":
            value = struct.unpack("<f", struct.pack("<f", value))[0]
        text = f"0x{struct.pack('>d', value).hex().upper()}" if element in _OF_ELEMENT else str(int(value))
        return _Val(self, text if self.width == 1 else f"splat ({element} {text})", element)

    def like(self, v: _Val, other: _Val | float) -> _Val:
        if isinstance(other, _Val):
            assert other.element == v.element, (other.element, v.element)
            return other
        return self.const(v.element, other)

    # -- instructions

    def emit(self, instruction: str, element: str) -> _Val:
        ref = f"%t{len(self.lines)}"
        self.lines.append(f"  {ref} = {instruction}")
        return _Val(self, ref, element)

    def raw(self, line: str) -> None:
        self.lines.append(line)

    def intrinsic(self, name: str, *args: _Val) -> _Val:
        t = self.type(args[0].element)
        joined = ", ".join(f"{t} {a.ref}" for a in args)
        return self.emit(f"call {t} @llvm.{name}.{self.mangled(args[0].element)}({joined})", args[0].element)

    def call(self, routine: Routine, *args: _Val) -> _Val:
        self.dependencies.append(routine)
        t = self.type(args[0].element)
        joined = ", ".join(f"{t} {a.ref}" for a in args)
        return self.emit(f"call {t} @{routine.name}({joined})", args[0].element)

    def fma(self, a: _Val, b: _Val | float, c: _Val | float) -> _Val:
        """a · b + c: rounded once where the target has that instruction, else twice (never a libm call)."""
        if not self.fused:
            return a * b + c
        return self.intrinsic("fma", a, self.like(a, b), self.like(a, c))

    def compare(self, condition: str, a: _Val, b: _Val | float) -> _Val:
        op = "fcmp" if a.element in _OF_ELEMENT else "icmp"
        return self.emit(f"{op} {condition} {self.type(a.element)} {a.ref}, {self.like(a, b).ref}", "i1")

    def where(self, condition: _Val, a: _Val | float, b: _Val | float) -> _Val:
        model = a if isinstance(a, _Val) else b
        assert isinstance(model, _Val)
        a, b = self.like(model, a), self.like(model, b)
        t = self.type(model.element)
        return self.emit(f"select {self.type('i1')} {condition.ref}, {t} {a.ref}, {t} {b.ref}", model.element)

    def convert(self, op: str, v: _Val, element: str) -> _Val:
        return self.emit(f"{op} {self.type(v.element)} {v.ref} to {self.type(element)}", element)

    def bits(self, v: _Val) -> _Val:
        return self.convert("bitcast", v, _OF_ELEMENT[v.element].integer)

    def unbits(self, v: _Val) -> _Val:
        return self.convert("bitcast", v, {"i32": "float", "i64": "double"}[v.element])

    def at_most(self, v: _Val, bound: float) -> _Val:
        """min(v, bound), NaN staying NaN: in this operand order x86 has one instruction for it."""
        return self.where(self.compare("olt", self.const(v.element, bound), v), bound, v)

    def at_least(self, v: _Val, bound: float) -> _Val:
        return self.where(self.compare("ogt", self.const(v.element, bound), v), bound, v)

    def abs(self, v: _Val) -> _Val:
        return self.intrinsic("fabs", v)

    def copysign(self, v: _Val, sign: _Val) -> _Val:
        return self.intrinsic("copysign", v, sign)

    # -- pieces

    def horner(self, x: _Val, coefficients: Sequence[float]) -> _Val:
        value = self.const(x.element, coefficients[-1])
        for c in reversed(coefficients[:-1]):
            value = self.fma(value, x, c)
        return value

    def poly(self, x: _Val, coefficients: Sequence[float]) -> _Val:
        """Horner; long ones as two interleaved chains in x², since one chain would wait for itself."""
        if len(coefficients) <= 8:
            return self.horner(x, coefficients)
        z = x * x
        return self.fma(self.horner(z, coefficients[1::2]), x, self.horner(z, coefficients[0::2]))

    def round_even(self, v: _Val) -> _Val:
        if self.features & {"sse4.1", "avx", "avx512f", "neon"}:
            return self.intrinsic("roundeven", v)
        # Adding and taking away 2^mantissa of the same sign; without the instruction LLVM would call libm per lane.
        limit = 2.0 ** _OF_ELEMENT[v.element].mantissa
        signed = self.copysign(self.const(v.element, limit), v)
        rounded = self.copysign((v + signed) - signed, v)
        return self.where(self.compare("olt", self.abs(v), limit), rounded, v)

    def power_of_two(self, biased: _Val) -> _Val:
        """2^(biased - bias) from an integer in the normal range."""
        return self.unbits(biased << _OF_ELEMENT["float" if biased.element == "i32" else "double"].mantissa)

    def scale(self, v: _Val, exponent: _Val) -> _Val:
        """v · 2^exponent for v near 1, rounded once, to denormals and infinity as well."""
        spec = _OF_ELEMENT[v.element]
        if "avx512vl" in self.features:  # vscalef
            if exponent.element == "i64":
                exponent = self.convert("trunc", exponent, "i32")
            t, i = self.type(v.element), self.type("i32")
            name = f"llvm.ldexp.{self.mangled(v.element)}.{self.mangled('i32')}"
            return self.emit(f"call {t} @{name}({t} {v.ref}, {i} {exponent.ref})", v.element)
        # Two normal factors; twice the bias makes the sum positive, so that a logical shift halves it.
        doubled = exponent + 2 * spec.bias
        half = doubled >> 1
        return v * self.power_of_two(half) * self.power_of_two(doubled - half)

    def round_magic(self, v: _Val, factor: float | None = None) -> tuple[_Val, _Val]:
        """The integer next to v · factor, |it| < 2^(mantissa-1), as a float and as an integer."""
        magic = _OF_ELEMENT[v.element].magic
        shifted = v + magic if factor is None else self.fma(v, factor, magic)
        offset = self.const(v.element, magic)
        return shifted - offset, self.bits(shifted) - self._magic_bits(v.element)

    @staticmethod
    def _magic_bits(element: str) -> int:
        spec = _OF_ELEMENT[element]
        return ((spec.bias + spec.mantissa) << spec.mantissa) | (1 << (spec.mantissa - 1))

    def exp_poly(self, r: _Val) -> _Val:
        """e^r, |r| <= ln2/2."""
        p = self.poly(r, _OF_ELEMENT[r.element].exp)
        return self.fma(r * r, p, r) + 1.0

    def exp_parts(self, x: _Val) -> tuple[_Val, _Val]:
        """e^x as (value near 1, exponent of two) for x inside `exp_range`."""
        spec = _OF_ELEMENT[x.element]
        n, exponent = self.round_magic(x, spec.log2e[0])
        r = self.fma(n, -spec.ln2[1], self.fma(n, -spec.ln2[0], x))
        return self.exp_poly(r), exponent

    def exp_normal(self, x: _Val) -> _Val:
        """e^x where neither x nor the result is extreme."""
        value, exponent = self.exp_parts(x)
        return value * self.power_of_two(exponent + _OF_ELEMENT[x.element].bias)

    def log_parts(self, x: _Val) -> tuple[_Val, _Val]:
        """Positive finite x as (exponent of two as a float, f) with 1+f from √½ to √2."""
        spec = _OF_ELEMENT[x.element]
        lift = spec.mantissa + 2
        tiny = self.compare("olt", x, 2.0 ** (1 - spec.bias))
        bits = self.bits(self.where(tiny, x * 2.0**lift, x))
        shifted = bits + ((spec.bias << spec.mantissa) - spec.sqrt_half)
        biased = shifted >> spec.mantissa
        f = self.unbits((shifted & ((1 << spec.mantissa) - 1)) + spec.sqrt_half) - 1.0
        # The small positive integer becomes a float as the low bits of 2^mantissa: no i64 conversion is needed.
        two = (spec.bias + spec.mantissa) << spec.mantissa
        whole = 2.0**spec.mantissa + spec.bias
        zero = self.where(tiny, whole + lift, self.const(x.element, whole))
        return self.unbits(biased | two) - zero, f

    def log_specials(self, x: _Val, value: _Val) -> _Val:
        special = self.where(self.compare("olt", x, 0.0), _NAN, x)
        special = self.where(self.compare("oeq", x, 0.0), -_INF, special)
        ordinary = self.compare("ogt", x, 0.0) & self.compare("olt", x, _INF)
        return self.where(ordinary, value, special)

    def two_sum(self, a: _Val, b: _Val) -> tuple[_Val, _Val]:
        """a + b as a pair, for |a| >= |b|."""
        s = a + b
        return s, b - (s - a)

    def two_product(self, a: _Val, b: _Val | float) -> tuple[_Val, _Val]:
        """a · b as a pair; without a fused multiply-add by halves of 26 bits."""
        b = self.like(a, b)
        p = a * b
        if self.fused:
            return p, self.fma(a, b, -p)
        a_high, a_low = self._halves(a)
        b_high, b_low = self._halves(b)
        return p, ((a_high * b_high - p) + a_high * b_low + a_low * b_high) + a_low * b_low

    def _halves(self, v: _Val) -> tuple[_Val, _Val]:
        t = v * 134217729.0
        high = t - (t - v)
        return high, v - high

    def pair_product(self, a: tuple[_Val, _Val], b: tuple[_Val | float, _Val | float]) -> tuple[_Val, _Val]:
        high, low = self.two_product(a[0], b[0])
        low = self.fma(a[1], b[0], self.fma(a[0], b[1], low))
        return self.two_sum(high, low)


# ---------------------------------------------------------------- functions


def _neg(c: _Code, x: _Val) -> _Val:
    return -x


def _abs(c: _Code, x: _Val) -> _Val:
    return c.abs(x)


def _sqrt(c: _Code, x: _Val) -> _Val:
    return c.intrinsic("sqrt", x)


def _rsqrt(c: _Code, x: _Val) -> _Val:
    return 1.0 / c.intrinsic("sqrt", x)


def _round(c: _Code, x: _Val) -> _Val:
    return c.round_even(x)


def _floor(c: _Code, x: _Val) -> _Val:
    if c.features & {"sse4.1", "avx", "avx512f", "neon"}:
        return c.intrinsic("floor", x)
    r = c.round_even(x)
    return c.copysign(c.where(c.compare("ogt", r, x), r - 1.0, r), x)


def _ceil(c: _Code, x: _Val) -> _Val:
    if c.features & {"sse4.1", "avx", "avx512f", "neon"}:
        return c.intrinsic("ceil", x)
    r = c.round_even(x)
    return c.copysign(c.where(c.compare("olt", r, x), r + 1.0, r), x)


def _exp(c: _Code, x: _Val) -> _Val:
    low, high = c.spec.exp_range
    return c.scale(*c.exp_parts(c.at_most(c.at_least(x, low), high)))


def _exp2(c: _Code, x: _Val) -> _Val:
    low, high = c.spec.exp2_range
    x = c.at_most(c.at_least(x, low), high)
    n, exponent = c.round_magic(x)
    # r · ln2 instead of a polynomial of its own: |r| <= ½, so its rounding is a quarter ULP of the result.
    return c.scale(c.exp_poly((x - n) * _LN2_PAIR[0]), exponent)


def _log(c: _Code, x: _Val) -> _Val:
    e, f = c.log_parts(x)
    p = c.poly(f, c.spec.log)
    tail = c.fma(e, c.spec.ln2[1], f * f * p)
    return c.log_specials(x, c.fma(e, c.spec.ln2[0], f + tail))


def _log2(c: _Code, x: _Val) -> _Val:
    e, f = c.log_parts(x)
    high, low = c.spec.log2e
    tail = c.fma(c.poly(f, c.spec.log2), f, low) * f
    return c.log_specials(x, c.fma(f, high, tail) + e)


def _sigmoid(c: _Code, x: _Val) -> _Val:
    # e^-|x| cannot overflow, and for negative x carries the result down to denormals.
    e = c.scale(*c.exp_parts(c.at_least(-c.abs(x), c.spec.exp_range[0])))
    return c.where(c.compare("olt", x, 0.0), e, 1.0) / (e + 1.0)


def _tanh(c: _Code, x: _Val) -> _Val:
    a = c.abs(x)
    z = a * a
    small = c.fma(z * a, c.poly(z, c.spec.tanh), a)
    # At the end of the range tanh has long rounded to 1.
    large = 1.0 - 2.0 / (c.exp_normal(c.at_most(a + a, 24.0 if c.spec is _F32 else 44.0)) + 1.0)
    return c.copysign(c.where(c.compare("ogt", a, 0.625), large, small), x)


def _half_exp(c: _Code, a: _Val) -> _Val:
    """e^a / 2 for a >= 0, without overflow before its time."""
    value, exponent = c.exp_parts(c.at_most(a, c.spec.exp_range[1] + 1.0))
    return c.scale(value, exponent - 1)


def _sinh(c: _Code, x: _Val) -> _Val:
    a = c.abs(x)
    z = a * a
    small = c.fma(z * a, c.poly(z, c.spec.sinh), a)
    h = _half_exp(c, a)
    return c.copysign(c.where(c.compare("ogt", a, 1.0), h - 0.25 / h, small), x)


def _cosh(c: _Code, x: _Val) -> _Val:
    h = _half_exp(c, c.abs(x))
    return h + 0.25 / h


def _erf(c: _Code, x: _Val) -> _Val:
    a = c.abs(x)
    small = c.fma(c.poly(a * a, c.spec.erf), a, a)
    large = 1.0 - c.exp_normal(-c.poly(c.at_most(a, c.spec.erf_end), c.spec.erfc))
    return c.copysign(c.where(c.compare("ogt", a, c.spec.erf_split), large, small), x)


# -- sine, cosine, tangent


def _quarter_turns(c: _Code, x: _Val) -> tuple[_Val, _Val]:
    """x >= 0 as r + q · π/2, |r| <= π/4 or a little more; of q (integer) the two low bits count."""
    n, q = c.round_magic(x, 2.0 / _PI)
    r = x
    for part in c.spec.half_pi if c.fused else c.spec.half_pi_short:
        r = c.fma(n, -part, r)
    far = _far_reduction(c.spec.name, c.width, c.features)
    c.dependencies.append(far)
    t, i, b = c.type(x.element), c.type(q.element), c.type("i1")
    big = c.compare("ogt", x, c.spec.near)
    any_big = big
    if c.width > 1:
        any_big = c.emit(f"call i1 @llvm.vector.reduce.or.v{c.width}i1({b} {big.ref})", "i1")
    c.raw(f'  br i1 {any_big.ref}, label %far, label %near, !prof !{{!"branch_weights", i32 1, i32 2000}}')
    c.raw("far:")
    both = c.emit(f"call {{ {t}, {i} }} @{far.name}({t} {x.ref}, {t} {r.ref}, {i} {q.ref})", x.element)
    r_far = c.emit(f"extractvalue {{ {t}, {i} }} {both.ref}, 0", x.element)
    q_far = c.emit(f"extractvalue {{ {t}, {i} }} {both.ref}, 1", q.element)
    c.raw("  br label %near")
    c.raw("near:")
    r = c.emit(f"phi {t} [ {r.ref}, %entry ], [ {r_far.ref}, %far ]", r.element)
    q = c.emit(f"phi {i} [ {q.ref}, %entry ], [ {q_far.ref}, %far ]", q.element)
    return r, q


def _sin_cos(c: _Code, r: _Val) -> tuple[_Val, _Val]:
    z = r * r
    sin = c.fma(z * r, c.poly(z, c.spec.sin), r)
    # 1 - z/2 is rounded; what that loses goes into the small rest.
    half = z * 0.5
    w = 1.0 - half
    cos = w + c.fma(z * z, c.poly(z, c.spec.cos), (1.0 - w) - half)
    return sin, cos


def _sin(c: _Code, x: _Val) -> _Val:
    # The sign is taken off and put back, not left to the arithmetic, which would lose that of -0.
    r, q = _quarter_turns(c, c.abs(x))
    sin, cos = _sin_cos(c, r)
    value = c.bits(c.where(c.compare("eq", q & 1, 0), sin, cos))
    return c.unbits(value ^ ((q & 2) << (c.spec.bits - 2)) ^ (c.bits(x) & _sign_bit(c.spec)))


def _cos(c: _Code, x: _Val) -> _Val:
    r, q = _quarter_turns(c, c.abs(x))
    sin, cos = _sin_cos(c, r)
    value = c.bits(c.where(c.compare("eq", q & 1, 0), cos, sin))
    return c.unbits(value ^ (((q + 1) & 2) << (c.spec.bits - 2)))


def _tan(c: _Code, x: _Val) -> _Val:
    r, q = _quarter_turns(c, c.abs(x))
    sin, cos = _sin_cos(c, r)
    even = c.compare("eq", q & 1, 0)
    value = c.where(even, sin, -cos) / c.where(even, cos, sin)
    return c.unbits(c.bits(value) ^ (c.bits(x) & _sign_bit(c.spec)))


@cache
def _far_scalar() -> Routine:
    """x >= 2^13 as r + q · π/2 in f64: x is an integer m times 2^e, and of m · 2^e · 2/π modulo 4 the first
    128 bits are computed from the 192 bits of 2/π that matter. r is rounded once."""
    words = ", ".join(f"i64 {w}" for w in _TWO_OVER_PI)
    text = f"""\
@pt.two_over_pi = internal unnamed_addr constant [{len(_TWO_OVER_PI)} x i64] [{words}], align 64
define internal {{ double, i64 }} @pt.far(double %x) noinline nounwind willreturn memory(none) {{
entry:
  %bits = bitcast double %x to i64
  %be = lshr i64 %bits, 52
  %s = sub i64 %be, {1023 + 52 + 2 - 64}
  %fraction = and i64 %bits, {(1 << 52) - 1}
  %m = or i64 %fraction, {1 << 52}
  %word = lshr i64 %s, 6
  %shift = and i64 %s, 63
  %p0 = getelementptr inbounds [{len(_TWO_OVER_PI)} x i64], ptr @pt.two_over_pi, i64 0, i64 %word
  %p1 = getelementptr inbounds i64, ptr %p0, i64 1
  %p2 = getelementptr inbounds i64, ptr %p0, i64 2
  %p3 = getelementptr inbounds i64, ptr %p0, i64 3
  %t0 = load i64, ptr %p0, align 8
  %t1 = load i64, ptr %p1, align 8
  %t2 = load i64, ptr %p2, align 8
  %t3 = load i64, ptr %p3, align 8
  %w0 = call i64 @llvm.fshl.i64(i64 %t0, i64 %t1, i64 %shift)
  %w1 = call i64 @llvm.fshl.i64(i64 %t1, i64 %t2, i64 %shift)
  %w2 = call i64 @llvm.fshl.i64(i64 %t2, i64 %t3, i64 %shift)
  %m128 = zext i64 %m to i128
  %w1x = zext i64 %w1 to i128
  %w2x = zext i64 %w2 to i128
  %a0 = mul i64 %m, %w0
  %a0x = zext i64 %a0 to i128
  %a0s = shl i128 %a0x, 64
  %a1 = mul i128 %m128, %w1x
  %a2 = mul i128 %m128, %w2x
  %a2s = lshr i128 %a2, 64
  %a01 = add i128 %a0s, %a1
  %turns = add i128 %a01, %a2s
  %qx = lshr i128 %turns, 126
  %f = shl i128 %turns, 2
  %negative = icmp slt i128 %f, 0
  %up = zext i1 %negative to i64
  %q0 = trunc i128 %qx to i64
  %q = add i64 %q0, %up
  %fn = sub i128 0, %f
  %fa = select i1 %negative, i128 %fn, i128 %f
  %lead = call i128 @llvm.ctlz.i128(i128 %fa, i1 false)
  %leadm = and i128 %lead, 127
  %norm = shl i128 %fa, %leadm
  %topx = lshr i128 %norm, 64
  %top = trunc i128 %topx to i64
  %topw = zext i64 %top to i128
  %prod = mul i128 %topw, {_HALF_PI_64}
  %prodx = lshr i128 %prod, 64
  %size = trunc i128 %prodx to i64
  %rounded = uitofp i64 %size to double
  %lead64 = trunc i128 %leadm to i64
  %e = sub i64 {1023 - 63}, %lead64
  %ebits = shl i64 %e, 52
  %unit = bitcast i64 %ebits to double
  %r0 = fmul double %rounded, %unit
  %rn = fneg double %r0
  %r = select i1 %negative, double %rn, double %r0
  %out0 = insertvalue {{ double, i64 }} poison, double %r, 0
  %out = insertvalue {{ double, i64 }} %out0, i64 %q, 1
  ret {{ double, i64 }} %out
}}
"""
    return Routine("pt.far", text)


def _double(value: float) -> str:
    return f"0x{struct.pack('>d', value).hex().upper()}"


@cache
def _far_reduction(dtype: str, width: int, features: frozenset[str]) -> Routine:
    """(x, r, q) -> (r, q) with the lanes of x > near reduced again; infinite lanes become NaN."""
    spec = _SPECS[dtype]
    scalar = _far_scalar()
    name = f"pt.far.{dtype}x{width}"
    c = _Code(spec, width, features)
    t, i = c.type(spec.element), c.type(spec.integer)
    e, n = spec.element, spec.integer
    widen = "%wide = fpext float %xk to double" if e == "float" else "%wide = fadd double %xk, -0.0"
    narrow = "%rr = fptrunc double %r1 to float" if e == "float" else "%rr = fadd double %r1, -0.0"
    cut = "%qq = trunc i64 %q0 to i32" if n == "i32" else "%qq = add i64 %q0, 0"
    # Arrays in the frame instead of extractelement with a variable index: the same code, and it is valid for width 1.
    text = f"""\
define internal {{ {t}, {i} }} @{name}({t} %x, {t} %r, {i} %q) noinline nounwind willreturn {{
entry:
  %xs = alloca {t}, align 64
  %rs = alloca {t}, align 64
  %qs = alloca {i}, align 64
  store {t} %x, ptr %xs, align 64
  store {t} %r, ptr %rs, align 64
  store {i} %q, ptr %qs, align 64
  br label %lane
lane:
  %k = phi i64 [ 0, %entry ], [ %k1, %next ]
  %xp = getelementptr inbounds {e}, ptr %xs, i64 %k
  %xk = load {e}, ptr %xp, align 4
  %big = fcmp ogt {e} %xk, {_double(spec.near)}
  br i1 %big, label %reduce, label %next
reduce:
  %finite = fcmp one {e} %xk, 0x7FF0000000000000
  {widen}
  %both = call {{ double, i64 }} @{scalar.name}(double %wide)
  %r0 = extractvalue {{ double, i64 }} %both, 0
  %q0 = extractvalue {{ double, i64 }} %both, 1
  %r1 = select i1 %finite, double %r0, double 0x7FF8000000000000
  {narrow}
  {cut}
  %rp = getelementptr inbounds {e}, ptr %rs, i64 %k
  %qp = getelementptr inbounds {n}, ptr %qs, i64 %k
  store {e} %rr, ptr %rp, align 4
  store {n} %qq, ptr %qp, align 4
  br label %next
next:
  %k1 = add nuw nsw i64 %k, 1
  %more = icmp ult i64 %k1, {width}
  br i1 %more, label %lane, label %done
done:
  %ro = load {t}, ptr %rs, align 64
  %qo = load {i}, ptr %qs, align 64
  %out0 = insertvalue {{ {t}, {i} }} poison, {t} %ro, 0
  %out = insertvalue {{ {t}, {i} }} %out0, {i} %qo, 1
  ret {{ {t}, {i} }} %out
}}
"""
    return Routine(name, text, (scalar,))


# -- two operands


def _min(c: _Code, a: _Val, b: _Val) -> _Val:
    # Not a compare and select: -0 is below +0, so that no order of a reduction shows.
    return c.intrinsic("minimum", a, b)


def _max(c: _Code, a: _Val, b: _Val) -> _Val:
    return c.intrinsic("maximum", a, b)


def _atan2(c: _Code, y: _Val, x: _Val) -> _Val:
    ax, ay = c.abs(x), c.abs(y)
    steep = c.compare("ogt", ay, ax)
    large, small = c.where(steep, ay, ax), c.where(steep, ax, ay)
    # Equal sides (infinite ones included) are an eighth turn; 0/0 is 0/1.
    equal = c.compare("oeq", small, large)
    zero = c.compare("oeq", large, 0.0)
    small, large = c.where(equal, 1.0, small), c.where(equal, 1.0, large)
    small = c.where(zero, 0.0, small)
    left = c.compare("slt", c.bits(x), 0)
    base = c.where(steep, _PI / 2, c.where(left, _PI, c.const(x.element, 0.0)))
    turn = (c.convert("sext", steep, c.spec.integer) ^ c.convert("sext", left, c.spec.integer)) & _sign_bit(c.spec)
    if c.spec is _F64:
        # atan(q) = π/4 + atan((q-1)/(q+1)) halves the range of the fit. Halves, since the sum may overflow;
        # what underflows by that is far below the other side.
        upper = c.compare("ogt", small, large * 0.41421356237309503)
        shrink = c.where(c.compare("ogt", large, 2.0**1000), 2.0**-100, c.const(x.element, 1.0))
        small, large = small * shrink, large * shrink
        small, large = c.where(upper, small - large, small), c.where(upper, small + large, large)
        eighth = c.where(upper, _PI / 4, c.const(x.element, 0.0))
        base = base + c.unbits(c.bits(eighth) ^ turn)
    q = small / large
    z = q * q
    coefficients = _ATAN_F32 if c.spec is _F32 else _ATAN_F64
    angle = c.fma(z * q, c.poly(z, coefficients), q)
    return c.copysign(base + c.unbits(c.bits(angle) ^ turn), y)


def _sign_bit(spec: _Spec) -> int:
    return -(1 << (spec.bits - 1))


def _pow(c: _Code, x: _Val, y: _Val) -> _Val:
    value = (_pow_f32 if c.spec is _F32 else _pow_f64)(c, c.abs(x), y)
    # Now the sign and the cases that C names: x^0 = 1^y = (-1)^±inf = 1, negative to a non-integer is NaN.
    whole = c.compare("oeq", c.round_even(y), y)
    half = y * 0.5
    odd = whole & c.compare("one", c.round_even(half), half)
    sign = c.bits(x) & c.convert("sext", odd, c.spec.integer) & _sign_bit(c.spec)
    value = c.unbits(c.bits(value) | sign)
    negative = c.compare("olt", x, 0.0) & c.compare("one", x, -_INF)
    broken = negative & c.emit(f"xor {c.type('i1')} {whole.ref}, {'true' if c.width == 1 else 'splat (i1 true)'}", "i1")
    value = c.where(broken, _NAN, value)
    unit = c.compare("oeq", c.abs(x), 1.0) & c.compare("oeq", c.abs(y), _INF)
    one = c.compare("oeq", y, 0.0) | c.compare("oeq", x, 1.0) | unit
    return c.where(one, 1.0, value)


def _pow_f32(c: _Code, ax: _Val, y: _Val) -> _Val:
    """|x|^y in f64, where denormals, overflow and the product with y are no question."""
    wide = c.convert("fpext", ax, "double")
    e, f = c.log_parts(wide)
    log = c.fma(f, c.poly(f, _POW_LOG2), e)
    log = c.where(c.compare("oeq", wide, 0.0), -_INF, log)
    log = c.where(c.compare("olt", wide, _INF), log, wide)
    z = c.at_most(c.at_least(log * c.convert("fpext", y, "double"), -160.0), 130.0)
    n, exponent = c.round_magic(z)
    r = z - n
    value = c.fma(r, c.poly(r, _POW_EXP2), 1.0) * c.power_of_two(exponent + _F64.bias)
    return c.convert("fptrunc", value, "float")


def _pow_f64(c: _Code, ax: _Val, y: _Val) -> _Val:
    """|x|^y with log2(x) as a pair of doubles: the exponent y · log2(x) reaches 2^10, so it needs 64 bits."""
    e, f = c.log_parts(ax)
    # s = f / (2 + f), and log2(1+f) = 2/ln2 · atanh(s)
    den = f + 2.0
    den_low = f - (den - 2.0)
    s = f / den
    p, p_low = c.two_product(s, den)
    s_pair = c.two_sum(s, ((f - p) - p_low - s * den_low) / den)
    s = s_pair[0]
    w, w_low = c.two_product(s, s)
    w_pair = (w, c.fma(s + s, s_pair[1], w_low))
    tail = c.poly(w, _POW_ATANH) * w
    fifth = c.const(ax.element, _FIFTH_PAIR[0])
    inner = c.two_sum(fifth, tail + _FIFTH_PAIR[1])
    inner = c.pair_product(w_pair, inner)
    third = c.const(ax.element, _THIRD_PAIR[0])
    high, low = c.two_sum(third, inner[0])
    inner = c.pair_product(w_pair, (high, low + (inner[1] + _THIRD_PAIR[1])))
    scaled = c.pair_product(s_pair, _TWO_LOG2E_PAIR)
    rest = c.pair_product(scaled, inner)
    high, low = c.two_sum(scaled[0], rest[0])
    low = low + (rest[1] + scaled[1])
    top, top_low = c.two_sum(e, high)  # e is 0, or at least as large as the rest
    log, log_low = c.two_sum(top, top_low + low)
    log = c.where(c.compare("oeq", ax, 0.0), -_INF, log)
    log = c.where(c.compare("olt", ax, _INF), log, ax)
    # log2 of a double is 0 or over 2^-54: a larger y than this changes nothing, and may overflow in the product.
    y = c.at_most(c.at_least(y, -(2.0**80)), 2.0**80)
    z, z_low = c.two_product(log, y)
    z_low = c.fma(log_low, y, z_low)
    # Also drops the NaN that infinities leave in the low part.
    z_low = c.where(c.compare("olt", c.abs(z), 1100.0), z_low, 0.0)
    z = c.at_most(c.at_least(z, -1100.0), 1100.0)
    n, exponent = c.round_magic(z)
    t, t_low = c.two_product(z - n, _LN2_PAIR[0])
    t_low = t_low + c.fma(z_low, _LN2_PAIR[0], (z - n) * _LN2_PAIR[1])
    # e^t + e^t · t_low, joined to the large terms last: 1 + (t + (t² P + t_low e^t)).
    small = c.fma(t * t, c.poly(t, _EXP_F64), t)
    value = c.fma(small + 1.0, t_low, small) + 1.0
    return c.scale(value, exponent)


# ---------------------------------------------------------------- assembling

# `alwaysinline` where the call would cost as much as the body; the others are inlined when they are called once.
_ROUTINES: Final[dict[Unary | Binary, tuple[Callable[..., _Val], bool]]] = {
    Unary.NEG: (_neg, True), Unary.ABS: (_abs, True), Unary.SQRT: (_sqrt, True), Unary.RSQRT: (_rsqrt, True),
    Unary.FLOOR: (_floor, True), Unary.CEIL: (_ceil, True), Unary.ROUND: (_round, True),
    Unary.EXP: (_exp, True), Unary.EXP2: (_exp2, True), Unary.LOG: (_log, False), Unary.LOG2: (_log2, False),
    Unary.SIN: (_sin, False), Unary.COS: (_cos, False), Unary.TAN: (_tan, False), Unary.SINH: (_sinh, False),
    Unary.COSH: (_cosh, False), Unary.TANH: (_tanh, False), Unary.ERF: (_erf, False),
    Unary.SIGMOID: (_sigmoid, True), Binary.POW: (_pow, False), Binary.ATAN2: (_atan2, False),
    Binary.MIN: (_min, True), Binary.MAX: (_max, True),
}  # fmt: skip


@cache
def _routine(fn: Unary | Binary, dtype: str, width: int, features: frozenset[str]) -> Routine:
    spec = _SPECS[dtype]
    write, small = _ROUTINES[fn]
    code = _Code(spec, width, features)
    name = f"pt.{fn.value}.{dtype}x{width}"
    t = code.type(spec.element)
    refs = ["%x", "%y"][: 2 if isinstance(fn, Binary) else 1]
    result = write(code, *(_Val(code, ref, spec.element) for ref in refs))
    inline = "alwaysinline " if small else ""
    lines = [
        f"define internal {t} @{name}({', '.join(f'{t} {ref}' for ref in refs)}) {inline}nounwind willreturn {{",
        "entry:",
        *code.lines,
        f"  ret {t} {result.ref}",
        "}",
        "",
    ]
    return Routine(name, "\n".join(lines), tuple(dict.fromkeys(code.dependencies)))
