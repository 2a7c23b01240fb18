"""Runs emitted Triton source on numpy, through Triton's interpreter: what the source means, without a GPU.

It proves the arithmetic, the indexing and the flags of control flow; layouts, barriers and PTX it cannot see. The
library functions are numpy's (f64, rounded once); checks and polls are played in Python on the words they name.
"""

from __future__ import annotations

import ctypes
import math
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from peertile.backends.cuda.emit import Emitted, emit_kernel
from peertile.backends.cuda.layout import LaunchContext, LaunchLayout
from peertile.backends.cuda.target import CudaOptions
from peertile.backends.cuda.triton_compile import written
from peertile.dtypes import dtype_named, f32, f64
from peertile.ir.core import Kernel
from peertile.ir.types import ObjectType, PointerType, SymmetricType, TileType, Type, ViewType
from peertile.meaning.numbers import apply_rmw, fma
from peertile.memory_model import Rmw

_erf = np.frompyfunc(math.erf, 1, 1)
LIBRARY = {
    name: getattr(np, name)
    for name in (
        "exp",
        "exp2",
        "log",
        "log2",
        "sin",
        "cos",
        "tan",
        "sinh",
        "cosh",
        "tanh",
        "floor",
        "ceil",
        "rint",
        "sqrt",
    )
}
LIBRARY |= {
    "rsqrt": lambda x: 1 / np.sqrt(x), "pow": np.power, "atan2": np.arctan2,
    "erf": lambda x: np.asarray(_erf(x), np.float64),
}  # fmt: skip


class Outcome:
    """Fault record, launch words and print buffer after a run."""

    def __init__(self, emitted: Emitted) -> None:
        self.emitted = emitted
        self.fault = np.zeros(16, np.int64)
        self.abort = np.zeros(1, np.int32)
        self.launch = np.zeros(8, np.uint64)
        self.print = np.zeros(1 << 13, np.uint64)
        self.print[0] = self.print.nbytes - 16


def run_interpreted(kernel: Kernel, grid: int | tuple[int, ...], args: Sequence[Any], **options: Any) -> Outcome:
    """Runs every program, one after the other; arrays among `args` are written in place."""
    triton, tl, interpreter = _modules()
    # One launch at a time: there is nothing in front to follow.
    plain = replace(options.pop("options", None) or CudaOptions(), overlap=False)
    emitted = emit_kernel(kernel, "sm_90", plain, **options)
    outcome = Outcome(emitted)
    extents = (*((grid,) if isinstance(grid, int) else grid), 1, 1)[:3]
    block = [w for v, a in zip(kernel.params, args, strict=True) for w in slots(v.type, a)]
    context = LaunchContext(
        extents, outcome.abort.ctypes.data, outcome.fault.ctypes.data, 1_000, outcome.launch.ctypes.data,
        outcome.print.ctypes.data,
    )  # fmt: skip
    packed = LaunchLayout(emitted.n_slots).pack(struct.pack(f"<{len(block)}q", *block), context)
    words = struct.unpack(f"<{len(packed) // 8}q", packed)
    builder = interpreter.interpreter_builder
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        module = _module(emitted)
    if hasattr(module, "libdevice"):
        module.libdevice = _library(tl, interpreter)
    for name in [name for name in vars(module) if name.startswith("_rmw_")]:
        setattr(module, name, _rmw(tl, interpreter, name))
    function = getattr(module, emitted.entry).rewrite()
    params = [_param(tl, interpreter, p.type, w) for p, w in zip(emitted.parameters, words, strict=False)]
    scope = interpreter._patch_lang(function)
    assert scope is not None, (
        f"expected triton 3.6 or newer, whose interpreter can be left again, got {triton.__version__}"
    )
    try:
        # Each call of a helper would patch everything again, our range included.
        scope.set_attr(interpreter, "_patch_lang", lambda function: None)
        scope.set_attr(tl, "range", _range(tl, interpreter))
        scope.set_attr(tl, "sort", _sort(tl, interpreter))
        scope.set_attr(type(builder), "create_inline_asm", _asm(tl, interpreter))
        scope.set_attr(type(builder), "create_fp_to_fp", _fp_to_fp(tl, interpreter, builder))
        scope.set_attr(type(builder), "create_fma", _fma(interpreter))
        scope.set_attr(interpreter, "_interpreter", _contiguously(interpreter._interpreter))
        scope.set_attr(type(builder), "create_atomic_rmw", _atomic_rmw(interpreter, builder))
        builder.set_grid_dim(context.programs, 1, 1)
        with np.errstate(all="ignore"):
            for program in range(context.programs):
                builder.set_grid_idx(program, 0, 0)
                function(*params)
    finally:
        scope.restore()
    return outcome


def slots(t: Type, arg: Any) -> list[int]:
    """The words that pass `arg`, as signed 64-bit integers."""
    if isinstance(t, ObjectType):
        return [w for name, ft in t.fields.items() for w in slots(ft, arg[name])]
    if isinstance(t, ViewType):
        return [arg.ctypes.data, *arg.shape, *(s // arg.itemsize for s in arg.strides)]
    if isinstance(t, SymmetricType):
        table, shape, strides = arg
        return [table.ctypes.data, 0, *shape, *strides]
    if isinstance(t, PointerType):
        return [arg.ctypes.data]
    assert isinstance(t, TileType)
    raw = np.asarray(arg).astype(t.dtype.numpy).tobytes()
    if t.dtype.is_float:
        return [int.from_bytes(raw.ljust(8, b"\0"), "little", signed=True)]
    return [struct.unpack("<q", struct.pack("<Q", int(arg) % (1 << 64)))[0]]


def _modules() -> tuple[Any, Any, Any]:
    import triton
    import triton.language as tl
    from triton.runtime import interpreter

    return triton, tl, interpreter


def _module(emitted: Emitted) -> Any:
    from peertile.backends.cuda.triton_compile import loaded

    return loaded(written(emitted.source, emitted.entry))


def _param(tl: Any, interpreter: Any, type: str, word: int) -> Any:
    if not type.startswith("*"):
        return _scalar(tl, interpreter, word, tl.int64)
    names = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64", "fp8e4nv": "float8e4nv",
             "fp8e5": "float8e5"}  # fmt: skip
    name = type[1:]
    element = getattr(tl, names.get(name) or name.replace("i", "int").replace("u", "uint"))
    pointer = tl.pointer_type(element)
    return tl.tensor(interpreter.TensorHandle(np.array([word], np.int64).view(np.uint64), pointer), pointer)


def _scalar(tl: Any, interpreter: Any, value: int, type: Any) -> Any:
    numpy = {"int64": np.int64, "int32": np.int32}[type.name]
    return tl.tensor(interpreter.TensorHandle(np.array([value], numpy), type), type)


def _range(tl: Any, interpreter: Any) -> Any:
    """Loop variables are tensors on the GPU, and are used as such."""

    def numbers(start: Any, end: Any, step: Any = 1, **_: Any) -> Iterator[Any]:
        given = (start, end, step)
        type = next((x.dtype for x in given if isinstance(x, tl.tensor)), tl.int32)
        lo, hi, by = (int(x.handle.data.reshape(-1)[0]) if isinstance(x, tl.tensor) else int(x) for x in given)
        for k in range(lo, hi, by):
            yield _scalar(tl, interpreter, k, type)

    return numbers


def _sort(tl: Any, interpreter: Any) -> Any:
    """Triton's own is a function that was compiled for the GPU when it was imported."""

    def sort(x: Any) -> Any:
        return tl.tensor(interpreter.TensorHandle(np.sort(x.handle.data, axis=-1), x.dtype), x.type)

    return sort


def _library(tl: Any, interpreter: Any) -> SimpleNamespace:
    def function(name: str) -> Any:
        def call(*args: Any) -> Any:
            data = [a.handle.data.astype(np.float64) for a in args]
            with np.errstate(all="ignore"):
                out = np.asarray(LIBRARY[name](*data)).astype(args[0].handle.data.dtype)
            return tl.tensor(interpreter.TensorHandle(out, args[0].dtype), args[0].type)

        return call

    return SimpleNamespace(**{name: function(name) for name in LIBRARY})


def _fp_to_fp(tl: Any, interpreter: Any, builder: Any) -> Any:
    """The interpreter rounds fp8 its own way; ml_dtypes rounds as the hardware does."""
    import ml_dtypes

    own = type(builder).create_fp_to_fp
    small = {tl.float8e4nv: ml_dtypes.float8_e4m3fn, tl.float8e5: ml_dtypes.float8_e5m2}

    def convert(self: Any, src: Any, to: Any, rounding: Any) -> Any:
        source, target = src.dtype.scalar, to.scalar
        if source in small and target == tl.float32:
            return interpreter.TensorHandle(src.data.view(small[source]).astype(np.float32), target)
        if target in small:
            return interpreter.TensorHandle(src.data.astype(small[target]).view(np.uint8), target)
        return own(self, src, to, rounding)

    return convert


def _fma(interpreter: Any) -> Any:
    """The interpreter rounds the product; the hardware does not."""

    def fused(self: Any, x: Any, y: Any, z: Any) -> Any:
        d = f64 if x.data.dtype == np.float64 else f32
        return interpreter.TensorHandle(np.asarray(fma(x.data, y.data, z.data, d)), x.dtype.scalar)

    return fused


def _contiguously(native: Any) -> SimpleNamespace:
    """The native part of the interpreter, which takes every array for contiguous: what a reversed scan gives is not."""

    def taking(name: str) -> Any:
        def call(*args: Any) -> Any:
            return getattr(native, name)(*(np.ascontiguousarray(a) if isinstance(a, np.ndarray) else a for a in args))

        return call

    return SimpleNamespace(**{name: taking(name) for name in ("load", "store", "atomic_cas", "atomic_rmw")})


def _atomic_rmw(interpreter: Any, builder: Any) -> Any:
    """The interpreter exchanges no floats."""
    own = type(builder).create_atomic_rmw

    def rmw(self: Any, kind: Any, pointer: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
        if kind.name != "XCHG" or value.data.dtype.kind != "f":
            return own(self, kind, pointer, value, mask, sem, scope)
        old = np.zeros_like(value.data)
        for k in np.argwhere(mask.data):
            at = _element(int(pointer.data[tuple(k)]), old.dtype)
            old[tuple(k)], at[()] = at[()], value.data[tuple(k)]
        return interpreter.TensorHandle(old, value.dtype.scalar)

    return rmw


def _element(address: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """The element at an address, as an array of rank 0 that can be written."""
    return np.frombuffer((ctypes.c_char * dtype.itemsize).from_address(address), dtype).reshape(())


# ---------------------------------------------------------------- PTX that is played


def _rmw(tl: Any, interpreter: Any, name: str) -> Any:
    """An atomic of a tile by compare and swap, by its name: element after element, as `ops` says what is left."""
    kind, dtype = Rmw(name.split("_")[2]), dtype_named(name.split("_")[3])

    def play(pointers: Any, values: Any, active: Any) -> Any:
        bits = values.handle.data.astype(f"i{max(dtype.itemsize, 4)}")
        given = np.ascontiguousarray(bits.astype(f"i{dtype.itemsize}")).view(dtype.numpy)
        old = np.zeros(bits.shape, dtype.numpy)
        for k in map(tuple, np.argwhere(active.handle.data)):
            at = _element(int(pointers.handle.data[k]), np.dtype(dtype.numpy))
            old[k] = at[()]
            at[()] = apply_rmw(kind, np.asarray(old[k]), np.asarray(given[k]), dtype)
        seen = old.view(f"u{dtype.itemsize}").astype(bits.dtype)
        return tl.tensor(interpreter.TensorHandle(seen, values.dtype), values.type)

    return play


class _Result:
    def __init__(self, *handles: Any) -> None:
        self.handles = handles

    def get_result(self, k: int) -> Any:
        return self.handles[k]


_WORD = {32: ctypes.c_int32, 64: ctypes.c_int64}


def _asm(tl: Any, interpreter: Any) -> Any:
    failed: list[int] = []  # what registers hold between the checks of a program and its report

    def play(self: Any, text: str, constraints: str, values: list[Any], types: Any, pure: bool, pack: int) -> Any:
        handle = interpreter.TensorHandle
        if text.strip().startswith("ex2.approx.ftz.f32"):
            with np.errstate(over="ignore", under="ignore"):
                power = np.exp2(values[0].data.astype(np.float32))
            return _Result(handle(np.where(power < np.float32(2.0**-126), np.float32(0), power), tl.float32))
        numbers = [int(v.data.reshape(-1)[0]) for v in values]
        nothing = _Result(handle(np.array([0], np.int32), tl.int32))
        if ".reg .b32 peertile_fault" in text:
            failed.clear()
            return nothing
        if "@bad mov.b32 peertile_fault" in text:
            held, tag, got, limit = numbers
            if not held:
                failed[:] = [tag, got, limit]
            return nothing
        if "REPORT_DONE" in text:
            fault, program = numbers
            if failed:
                tag, got, limit = failed
                _record(fault, tag >> 24, program, tag & 0xFFFFFF, got, limit)
            return nothing
        if "WAIT_DONE" in text:
            pointer, expected, abort, fault, _timeout, program, place, slot = numbers[:8]
            bits = int(re.search(r"global\.b(\d+) word", text)[1])
            word = _WORD[bits].from_address(pointer).value
            good = word == expected if ".eq.b" in text else ((word - expected) & ((1 << bits) - 1)) >> (bits - 1) == 0
            if not good:
                aborted = ctypes.c_int32.from_address(abort).value != 0
                _record(fault, 5 if aborted else 4, program, place, word, expected, pointer, slot)
            shape = values[0].data.shape
            return _Result(handle(np.full(shape, good, np.int32), tl.int32), handle(np.full(shape, word), tl.int64))
        if "ld.relaxed.cta.global.b64 $0" in text:  # of a table
            return _Result(handle(np.array([_WORD[64].from_address(numbers[0]).value], np.int64), tl.int64))
        if "[record + 64], one" in text:  # the launch has begun
            fault, program = numbers
            if program == 0:
                _WORD[64].from_address(fault + 64).value = 1
            return nothing
        stored = re.search(r"@first st\.\w+\.\w+\.global\.b(\d+)", text)
        if stored is not None:
            _WORD[int(stored[1])].from_address(numbers[0]).value = numbers[1]
            return _Result(handle(np.array([0], np.int32), tl.int32))
        raise NotImplementedError(text)

    return play


def _record(fault: int, *words: int) -> None:
    record = (ctypes.c_int64 * 16).from_address(fault)
    if record[0] == 0:
        for k, word in enumerate(words):
            record[k + 1] = word
        record[0] = 2
