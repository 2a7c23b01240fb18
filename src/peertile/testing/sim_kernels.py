"""The kernels of the driver conformance suite for the sim target, as the generators that translations are."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from peertile.dtypes import DType, i32, i64
from peertile.ir.types import Access, Space, ViewType
from peertile.memory_model import Cmp, Order, Rmw, Scope
from peertile.sim.binary import SimBinary
from peertile.sim.memory import View
from peertile.sim.program import Program
from peertile.sim.sites import Site, Verb
from peertile.sim.translate import Translation
from peertile.sim.words import Word
from peertile.testing.driver_suite import SuiteKernels

__all__ = ["sim_kernels"]

_READ = Site(Verb.READS, "words", 8)
_WRITE = Site(Verb.WRITES, "words", 8)
_ADD = Site(Verb.UPDATES, "words", 8, Order.ACQ_REL, Scope.SYSTEM, signed=64)
_PUT = Site(Verb.WRITES, "words", 8, Order.RELEASE, Scope.SYSTEM, signed=64)
_GET = Site(Verb.READS, "words", 8, Order.ACQUIRE, Scope.SYSTEM, signed=64)
_WAITS = {d: Site(Verb.WAITS, "words", d.itemsize, Order.ACQUIRE, Scope.SYSTEM, signed=d.bits) for d in (i32, i64)}

Code = Generator[Any, None, None]


def _view(p: Program, address: int, dtype: DType = i64) -> View:
    target, offset = p.machine.memory.at(address)
    key = (offset, dtype)
    found = target.views.get(key)
    if found is None:
        t = ViewType(dtype, 1, Access.READ_WRITE, Space.PEER)
        n = (target.nbytes - offset) // dtype.itemsize
        found = target.views[key] = View(t, target, offset, (n,), (dtype.itemsize,), "words")
    return found


def _add(p: Program, x: int, y: int, z: int, *rest: int) -> Code:
    k = (p.index,)
    total = p.word_load(_READ, _view(p, x), k) + p.word_load(_READ, _view(p, y), k)
    p.word_store(_WRITE, _view(p, z), k, total)
    return
    yield


def _fail(p: Program, count: int, which: int) -> Code:
    word = p.word(_ADD, _view(p, count), (0,))
    yield
    p.rmw_word(_ADD, word, 1, Rmw.ADD)
    if p.index == which:
        p.fail(_READ, "assert", "", 4, 70, 64)


def _work(p: Program, out: int, count: int) -> Code:
    x = p.index + 1
    for _ in range(count):
        x = (x * 6364136223846793005 + 1442695040888963407) & ((1 << 63) - 1)
    p.word_store(_WRITE, _view(p, out), (p.index,), x)
    return
    yield


def _scratch(p: Program, out: int) -> Code:
    scratch = np.zeros(512, np.int64)
    scratch[0] = scratch[-1] = p.index
    p.word_store(_WRITE, _view(p, out), (p.index,), int(scratch[0] + scratch[-1]))
    return
    yield


def _hello(p: Program) -> Code:
    p.launch.output.append((p.index, 3, "", (b"hello",)))
    return
    yield


def _sync(p: Program) -> Generator[Any, None, int]:
    view, n = p.launch.words(), p.grid[0] * p.grid[1] * p.grid[2]
    site = Site(Verb.UPDATES, "launch words", 8, Order.ACQ_REL, Scope.DEVICE)
    word = p.word(site, view, (0,))
    yield
    ticket = p.rmw_word(site, word, 1, Rmw.ADD)
    wait = Site(Verb.WAITS, "launch words", 8, Order.ACQUIRE, Scope.DEVICE)
    target = (ticket // n + 1) * n
    while p.blocked(wait, word, Cmp.AT_LEAST, target):
        yield True
    seen: int = p.pass_wait(wait, word, Cmp.AT_LEAST, target)
    return seen


def _barrier(p: Program, out: int) -> Code:
    n = p.grid[0] * p.grid[1] * p.grid[2]
    first = yield from _sync(p)
    yield from _sync(p)
    p.word_store(_WRITE, _view(p, out), (p.index,), min(first, n))


def _wait(p: Program, word: Word, dtype: DType, expected: int) -> Generator[Any, None, int]:
    site = _WAITS[dtype]
    p.wait_place, p.slot = 2, 9
    while p.blocked(site, word, Cmp.AT_LEAST, expected):
        yield True
    seen: int = p.pass_wait(site, word, Cmp.AT_LEAST, expected)
    return seen


def _await(dtype: DType) -> Callable[..., Code]:
    def code(p: Program, address: int, expected: int, out: int) -> Code:
        word = p.word(_WAITS[dtype], _view(p, address, dtype), (0,))
        yield
        half = 1 << dtype.bits - 1
        wrapped = (expected + half) % (2 * half) - half
        seen = yield from _wait(p, word, dtype, wrapped)
        p.word_store(_WRITE, _view(p, out), (p.index,), seen)

    return code


def _ping(p: Program, mine: int, theirs: int, rounds: int) -> Code:
    for k in range(1, rounds + 1):
        word = p.word(_PUT, _view(p, theirs), (0,))
        yield
        p.store_word(_PUT, word, k)
        word = p.word(_WAITS[i64], _view(p, mine), (0,))
        yield from _wait(p, word, i64, k)


def _suspend(p: Program, address: int, out: int) -> Code:
    word = p.word(_GET, _view(p, address), (0,))
    p.enter_loop(0)
    while True:
        yield
        seen = p.load_word(_GET, word)
        if seen != 0:
            break
        p.launch.parked(p, _GET, word, Cmp.NE, 0)
        if p.back_edge(_GET, 0):
            yield True
    p.word_store(_WRITE, _view(p, out), (p.index,), seen)


def _binary(name: str, code: Callable[..., Code], waits: bool = False) -> SimBinary:
    translation = Translation(None, code, (), "", False)  # type: ignore[arg-type]
    return SimBinary(name, translation, waits)


def sim_kernels() -> SuiteKernels:
    """The kernels of the suite."""
    return SuiteKernels(
        add=_binary("add", _add),
        fail=_binary("fail", _fail),
        work=_binary("work", _work),
        scratch=_binary("scratch", _scratch),
        hello=_binary("hello", _hello),
        barrier=_binary("barrier", _barrier, waits=True),
        await_word=_binary("await_word", _await(i64), waits=True),
        await_word32=_binary("await_word32", _await(i32), waits=True),
        ping=_binary("ping", _ping, waits=True),
        suspend=_binary("suspend", _suspend, waits=True),
    )
