"""Code for a processor with a weaker memory order than the one that tests run on: each order as its instructions.

No such machine is needed: LLVM compiles for it anywhere. There a plain load or store orders nothing, so whatever
carries an order in the memory model (docs/concepts/memory-model.md) has to show.
"""

import re

import pytest
from tests.backends.cpu.util import K, device_view

from peertile.backends.cpu import jit
from peertile.backends.cpu.compile import lower_to_text
from peertile.backends.cpu.target import AARCH64, named_target
from peertile.dtypes import f32, u64
from peertile.ir import ops
from peertile.ir.types import INDEX, PointerType, TileType, TokenType
from peertile.memory_model import Cmp, Order, Rmw, Scope

LATER = named_target("neoverse-n1")
"""With atomics of one instruction each, and loads that acquire without waiting for earlier releases."""

_FOUND = re.compile(r"\b(ldap?u?r|ldax?r|ldxr|stlu?r|stl?xr|dmb|cas\w*|swp\w*|ld(?:add|set|clr|eor|smax)\w*)\b")


def instructions(k, target):
    """Those of a kernel's code that carry an order, or are atomic."""
    text = lower_to_text(k.done(), target)
    assert "asm " not in text  # llvmlite has no parser for it: LLVM would end the process
    return set(_FOUND.findall(jit.stages(text, target)["asm"]))


def access(kind, order, scope=Scope.SYSTEM):
    """A kernel with one access, and nothing else that has an order."""
    k = K(w=device_view(u64, 1), f=device_view(f32, 1), at=PointerType(u64), unsafe=True)
    attrs = {"order": order, "scope": None if order is Order.WEAK else scope}
    one, zero, token, loose = k.const(1, u64), k.const(0), TokenType(), {"bounds": ops.Bounds.PROVEN}
    tile, word, add = k.full(1, u64, (8,)), TileType(u64), {"rmw": Rmw.ADD}
    if kind == "load":
        k.value(ops.WordLoad, (k.w, zero), word, **attrs)
    if kind == "load of a tile":
        k.store(k.w, k.value(ops.TileLoad, (k.w, zero), TileType(u64, (8,)), **attrs, **loose), [1])
    if kind == "load by a pointer":
        k.b.emit(ops.PtrLoad, (k.at, one), (word, token), **attrs)
    if kind == "store":
        k.b.emit(ops.WordStore, (k.w, one, zero), **attrs)
    if kind == "store of a tile":
        k.b.emit(ops.TileStore, (k.w, tile, zero), **attrs, **loose)
    if kind == "store by a pointer":
        k.b.emit(ops.PtrStore, (k.at, one), (token,), **attrs)
    if kind == "add":
        k.value(ops.WordRmw, (k.w, one, zero), word, **add, **attrs)
    if kind == "add of a tile":
        k.b.emit(ops.TileAtomic, (k.w, tile, zero), **add, **attrs, **loose)
    if kind == "add by a pointer":
        k.b.emit(ops.PtrRmw, (k.at, one), (word, token), **add, **attrs)
    if kind == "add of a float":
        k.value(ops.WordRmw, (k.f, k.const(1.0, f32), zero), TileType(f32), rmw=Rmw.ADDF, **attrs)
    if kind == "swap":
        k.b.emit(ops.PtrCas, (k.at, one, one), (word, token), **attrs)
    if kind == "wait":
        k.value(ops.Wait, (k.w, one, zero), word, cmp=Cmp.GE, what="", **attrs)
    if kind == "wait for any":
        k.value(ops.WaitAny, (k.w, one, zero, k.w, one, k.const(1)), INDEX, cmp=Cmp.GE, what="", **attrs)
    if kind == "fence":
        k.b.emit(ops.Fence, (), scope=scope)
    return k


LOADS = ["load", "load of a tile", "load by a pointer", "wait", "wait for any"]
STORES = ["store", "store of a tile", "store by a pointer"]
CHANGES = ["add", "add of a tile", "add by a pointer"]


@pytest.mark.feature("U6", "cpu")
@pytest.mark.parametrize("kind", LOADS)
def test_a_load_that_acquires_says_so(kind):
    assert instructions(access(kind, Order.RELAXED), AARCH64) == set()
    assert instructions(access(kind, Order.ACQUIRE), AARCH64) == {"ldar"}
    assert instructions(access(kind, Order.ACQUIRE), LATER) == {"ldapr"}


@pytest.mark.feature("U6", "cpu")
@pytest.mark.parametrize("kind", STORES)
def test_a_store_that_releases_says_so(kind):
    assert instructions(access(kind, Order.RELAXED), AARCH64) == set()
    assert instructions(access(kind, Order.RELEASE), AARCH64) == {"stlr"}
    assert instructions(access(kind, Order.RELEASE), LATER) == {"stlr"}


@pytest.mark.feature("U6", "cpu")
@pytest.mark.parametrize("kind", [*CHANGES, "add of a float", "swap"])
@pytest.mark.parametrize("order", [Order.RELAXED, Order.ACQUIRE, Order.RELEASE, Order.ACQ_REL], ids=lambda o: o.value)
def test_a_change_in_one_step_has_the_order_of_both_its_parts(kind, order):
    loads, stores = "ldaxr" if order.acquires else "ldxr", "stlxr" if order.releases else "stxr"
    assert instructions(access(kind, order), AARCH64) == {loads, stores}
    suffix = "a" * order.acquires + "l" * order.releases
    assert instructions(access(kind, order), LATER) == {("ldadd" if kind in CHANGES else "cas") + suffix}


@pytest.mark.feature("U6", "cpu")
def test_a_fence_is_a_barrier_whatever_its_scope():
    assert [instructions(access("fence", Order.ACQ_REL, scope), AARCH64) for scope in Scope] == [{"dmb"}] * 3


@pytest.mark.feature("U6", "cpu")
def test_no_scope_weakens_an_order():
    for scope in Scope:
        assert instructions(access("load", Order.ACQUIRE, scope), AARCH64) == {"ldar"}
        assert instructions(access("store", Order.RELEASE, scope), AARCH64) == {"stlr"}
        assert instructions(access("add", Order.ACQ_REL, scope), AARCH64) == {"ldaxr", "stlxr"}


def test_plain_accesses_have_no_order():
    for kind in ("load", "load by a pointer", "store", "store by a pointer"):
        assert instructions(access(kind, Order.WEAK), AARCH64) == set()
