"""Checks of what a host function was given: one wording for the wrong kinds of values. No defaults, no conversions
beyond numpy integers to int. What needs the object itself (shapes, ranks of a group) is checked where that is."""

from __future__ import annotations

import math
from typing import Any, NoReturn, SupportsIndex

import numpy as np

from peertile.dtypes import DType
from peertile.errors import ArgumentError, UsageError

__all__ = [
    "check_callable",
    "check_dtype",
    "check_finite",
    "check_integer",
    "check_text",
    "check_timeout",
    "not_pickled",
]


def check_integer(role: str, value: Any, least: int | None = 0, most: int | None = None) -> int:
    """`value` as an int from `least` to `most`, where they are given. A truth value is none."""
    wrong_kind = isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer)
    if wrong_kind or (least is not None and value < least) or (most is not None and value > most):
        expected = "an integer"
        if least is not None:
            expected += f" >= {least}" if most is None else f" from {least} to {most}"
        raise ArgumentError(f"{role}: expected {expected}, got {value!r}")
    return int(value)


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float | np.integer | np.floating)


def check_finite(role: str, value: Any) -> Any:
    """`value`, a number that is neither infinite nor NaN."""
    if not _is_number(value) or (isinstance(value, float | np.floating) and not math.isfinite(value)):
        raise ArgumentError(f"{role}: expected a finite number, got {value!r}")
    return value


def check_timeout(role: str, value: Any) -> float:
    """`value` as seconds: a number above 0 and below 1e9, about thirty years."""
    if not _is_number(value) or not 0 < value < 1e9:
        raise ArgumentError(f"{role}: expected seconds, a number > 0 and < 1e9, got {value!r}")
    return float(value)


def check_callable(role: str, value: Any) -> None:
    """`value` can be called."""
    if not callable(value):
        raise ArgumentError(f"{role}: expected a function, got {value!r}")


def check_text(role: str, value: Any) -> str:
    """`value`, a string."""
    if not isinstance(value, str):
        raise ArgumentError(f"{role}: expected a string, got {value!r}")
    return value


def check_dtype(value: Any, role: str = "dtype") -> DType:
    """`value`, an element type of ours."""
    if not isinstance(value, DType):
        raise ArgumentError(f"{role}: expected a peertile dtype such as pt.f32, got {value!r}")
    return value


def not_pickled(thing: object, protocol: SupportsIndex) -> NoReturn:
    """The `__reduce_ex__` of what this process alone has. All that holds it is refused with it."""
    raise UsageError(
        f"pickle, copy: expected a value, got what this process alone has ({type(thing).__name__}); pass on values, as "
        "Tensor.numpy() gives them, and make tensors, groups and streams where they are used"
    )
