"""Compiled kernels are found on disk without compiling, and exactly when nothing they depend on changed."""

import os
import subprocess
import sys
import textwrap
from enum import Enum
from types import FunctionType, ModuleType

import numpy as np
import pytest

import peertile as pt
import peertile.language as T
from peertile.captures import chains, snapshot
from peertile.direct import fingerprint


class Mode(Enum):
    FAST = 1
    SLOW = 2


N = 4
MODE = Mode.FAST


def helper(x):
    return x * N


def kernel(z: T.Exclusive, x: T.Shared):
    if MODE is Mode.FAST:
        z.store(helper(x.load_like(z)))


def with_globals(fn, **changed):
    """`fn` with other globals; helpers see them too."""
    scope = dict(fn.__globals__) | changed
    if "helper" in scope:
        scope["helper"] = FunctionType(scope["helper"].__code__, scope)
    return FunctionType(fn.__code__, scope, fn.__name__)


@pytest.mark.feature("H17", "cpu")
def test_fingerprint_changes_with_what_the_kernel_reaches_and_nothing_else():
    same = fingerprint(with_globals(kernel))
    assert same == fingerprint(with_globals(kernel))
    assert same == fingerprint(with_globals(kernel, unrelated=object()))
    assert same != fingerprint(with_globals(kernel, N=5))  # through the helper
    assert same != fingerprint(with_globals(kernel, N=4.0))
    assert same != fingerprint(with_globals(kernel, MODE=Mode.SLOW))

    def other(x):
        return x + N

    assert same != fingerprint(with_globals(kernel, helper=other))


@pytest.mark.parametrize(
    ("module", "is_covered"),
    [("peertile.library.gemm", True), ("peertile.language.tiles", False), ("peertile.frontend.build", False)],
)
def test_helpers_of_the_library_count_as_a_users_do(module, is_covered):
    """Those of the compiler do not: all of it is in the key by itself."""

    def placed(function):
        function.__module__ = module
        return function

    def one(x):
        return x + 1

    def two(x):
        return x + 2

    one.__qualname__ = two.__qualname__ = "helper"
    prints = [
        fingerprint(FunctionType(kernel.__code__, {**kernel.__globals__, "helper": placed(f)})) for f in (one, two)
    ]
    assert None not in prints
    assert (prints[0] != prints[1]) is is_covered


load, SIZE = object(), np.float32(3)


def through_numpy(z, x):
    z.store(x.load((0,), (4,)) * np.pi + SIZE)


def test_names_of_attributes_are_not_taken_for_globals_or_for_parts_of_modules():
    """numpy has a `load`, as this module has; neither is what the kernel names."""
    found = fingerprint(through_numpy)
    assert found is not None
    assert not any("np.load" in part for part in found)
    assert snapshot(through_numpy).helpers == ()
    names = [name for _, name, _ in snapshot(through_numpy).globals]
    assert sorted(names) == ["SIZE", "np", "pi"]
    assert found != fingerprint(with_globals(through_numpy, SIZE=np.float32(4)))
    many = {f"n{k}": k for k in range(300)}
    scope = {}
    exec(f"def long(z):\n    z.store({' + '.join(f'np.{name}' for name in many)} + last)", scope)
    assert {("np", name) for name in many} | {("last",)} == set(chains(scope["long"].__code__))


@pytest.mark.parametrize("is_lazy", [False, True])
def test_a_helper_in_a_module_of_a_package_counts(is_lazy):
    def through(z, x):
        z.store(package.module.helper(x.load_like(z)))  # noqa: F821

    def one(x):
        return x + 1

    def two(x):
        return x + 2

    prints = []
    one.__qualname__ = two.__qualname__ = "helper"
    for helper in (one, two):
        outer, inner = ModuleType("package"), ModuleType("package.module")
        if is_lazy:
            outer.__getattr__ = {"module": inner}.__getitem__
        else:
            outer.module = inner
        inner.package, inner.helper = outer, helper
        prints.append(fingerprint(FunctionType(through.__code__, {"package": outer})))
    assert None not in prints
    assert prints[0] != prints[1]


def test_kernel_that_reaches_an_object_without_a_text_is_compiled_the_longer_way():
    assert fingerprint(with_globals(kernel, N=object())) is None


PROGRAM = """
import sys
import numpy as np
import peertile as pt
import peertile.language as T

@pt.kernel
def double(z: T.Exclusive, x: T.Shared):
    z.store(x.load_like(z) * 2)

x, z = pt.ones((64,), pt.f32), pt.zeros((64,), pt.f32)
double(z.partition(32), x).sync()
assert (z.numpy() == 2).all()
op = double(z.partition(32), x)
assert "peertile.backends.rehearsed" not in sys.modules
print("peertile.frontend.build" in sys.modules, len(op.compiled().compiled.stages()["llvm"]) > 0)
"""


@pytest.mark.slow
def test_second_process_compiles_nothing(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    env = {**os.environ, "PEERTILE_CACHE_DIR": str(tmp_path / "cache")}

    def run():
        return subprocess.run(
            [sys.executable, program], env=env, capture_output=True, text=True, timeout=60, check=True
        )

    assert run().stdout == "True True\n"
    assert run().stdout == "False True\n"
    for entry in (tmp_path / "cache").rglob("*.kernel"):
        entry.write_bytes(entry.read_bytes()[:-7] + b"garbage")
    assert run().stdout == "True True\n"  # a corrupted entry is made again
    assert run().stdout == "False True\n"


@pytest.mark.slow
def test_cache_can_be_turned_off(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    env = {**os.environ, "PEERTILE_CACHE_DIR": str(tmp_path / "cache"), "PEERTILE_CACHE_MAX_MB": "0"}
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, program], env=env, capture_output=True, text=True, timeout=60, check=True
        )
        assert done.stdout == "True True\n"
    assert not list((tmp_path / "cache").rglob("*.kernel"))
    assert pt is not None
