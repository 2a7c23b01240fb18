"""What multicast operations become for a mapping of the fabric: the instruction of every legal row, accepted by ptxas.

Bulk forms are PTX 9.1: the assembler of CUDA 13.1 or newer takes them. Where the one at hand is older, the refusal
says what to install.
"""

import importlib.util
import re
from pathlib import Path

import pytest

import peertile as pt
import peertile.language as T
from peertile.backends.cuda.compile import lower_to_text
from peertile.compiler import compile_function
from peertile.errors import CompileError
from peertile.frontend.build import build_kernel
from peertile.inspection import Signature, describe
from peertile.ir.ops import BULK_REDUCTIONS, LOAD_REDUCTIONS, MULTICAST_DTYPES, REDUCTIONS
from peertile.ir.types import Access, PointerType, SignalType, ViewType
from peertile.passes.pipeline import run_pipeline
from peertile.runtime.argument import multicast_type, symmetric_type

TILE = 256
LOADS = (T.weak, T.relaxed, T.acquire)
UPDATES = (T.relaxed, T.release)
STORES = (T.weak, T.relaxed, T.release)
NAMES = {
    T.Rmw.ADD: "add", T.Rmw.ADDF: "add", T.Rmw.MIN: "min", T.Rmw.MAX: "max", T.Rmw.UMIN: "min", T.Rmw.UMAX: "max",
    T.Rmw.AND: "and", T.Rmw.OR: "or", T.Rmw.XOR: "xor",
}  # fmt: skip


@pt.kernel
def loads(out: T.Peer, x: T.Multicast, RS: T.Const, ORDERS: T.Const, B: T.Const[int]):
    share = x.partition((B,))
    for k in T.static_range(len(RS)):
        for m in T.static_range(len(ORDERS)):
            tile = share.multimem_load_reduce((T.program_id(0),), RS[k], order=ORDERS[m])
            out.local.store((T.program_id(0),), tile)


@pt.kernel
def updates(x: T.Multicast, mine: T.Shared, RS: T.Const, ORDERS: T.Const, B: T.Const[int]):
    share = x.partition((B,))
    tile = mine.load((T.program_id(0),), (B,))
    for k in T.static_range(len(RS)):
        for m in T.static_range(len(ORDERS)):
            share.multimem_reduce((T.program_id(0),), RS[k], tile, order=ORDERS[m])


@pt.kernel
def stores(x: T.Multicast, mine: T.Shared, ORDERS: T.Const, B: T.Const[int]):
    share = x.partition((B,))
    tile = mine.load((T.program_id(0),), (B,))
    for m in T.static_range(len(ORDERS)):
        share.multimem_store((T.program_id(0),), tile, order=ORDERS[m])


@pt.kernel
def bulk(x: T.Multicast, mine: T.Shared, RS: T.Const, B: T.Const[int]):
    share = x.partition((B,))
    tile = mine.load((T.program_id(0),), (B,))
    share.multimem_bulk_store((T.program_id(0),), tile)
    for k in T.static_range(len(RS)):
        share.multimem_bulk_store((T.program_id(0),), tile, RS[k])


@pt.kernel
def words(w: T.Multicast, ready: T.Signal):
    ready.notify()
    ready.wait()
    w.multimem_signal(1)
    w.multimem_signal_add(1, index=1)


@pt.kernel(unsafe=True)
def aliases(x: T.Pointer):
    token = T.unsafe.store_ptr(x, 1.0, order=T.weak)
    token = T.unsafe.fence_alias(token)
    T.unsafe.store_ptr(x, 2.0, order=T.weak, token=token)


def reductions(table, name):
    return tuple(r for r in T.Rmw if name in table.get(r, ()))


def suffix(dtype, rmw):
    if dtype.is_float:
        return {"f16": ".f16x2", "bf16": ".bf16x2"}.get(dtype.name, f".f{dtype.bits}")
    if rmw in (T.Rmw.AND, T.Rmw.OR, T.Rmw.XOR):
        return f".b{dtype.bits}"
    return f".{'s' if rmw in (T.Rmw.MIN, T.Rmw.MAX) else 'u'}{dtype.bits}"


def vector(dtype):
    """Halves and f32 go four registers at a time: 16 bytes, the widest form there is."""
    return ".v4" if dtype.is_float and dtype.bits < 64 else ""


def sem(order):
    return f".{order.value}" + ("" if order is T.weak else ".sys")


def ptx_of(kernel, types, consts, arch):
    compiled = compile_function(kernel.fn, kernel.name, kernel.unsafe, types, consts, arch=arch)
    return compiled.binary.text["ptx"]


def instructions(ptx):
    return {m[0] for m in re.finditer(r"(?:multimem\.|fence\.proxy)[\w.:]*", ptx)}


def types_of(dtype):
    shared = ViewType(dtype, 1, unit_stride=(True,), align=64)
    return multicast_type(dtype, (1 << 12,), (1,), 64, hardware=True), shared


def expected_loads(dtype):
    return {
        f"multimem.ld_reduce{sem(o)}.global.{NAMES[r]}"
        f"{'.acc::f32' if dtype.bits == 16 and r is T.Rmw.ADDF else ''}{vector(dtype)}{suffix(dtype, r)}"
        for r in reductions(LOAD_REDUCTIONS, dtype.name)
        for o in LOADS
    }


def expected_updates(dtype):
    return {
        f"multimem.red{sem(o)}.global.{NAMES[r]}{vector(dtype)}{suffix(dtype, r)}"
        for r in reductions(REDUCTIONS, dtype.name)
        for o in UPDATES
    }


def expected_stores(dtype):
    kind = ".v4.f32" if vector(dtype) else f".b{dtype.bits}"
    return {f"multimem.st{sem(o)}.global{kind}" for o in STORES}


@pytest.mark.slow
@pytest.mark.usefixtures("triton_needed")
@pytest.mark.feature("M2", "cuda")
@pytest.mark.feature("M3", "cuda")
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("name", MULTICAST_DTYPES)
def test_every_legal_row_is_its_instruction_and_assembles(name, arch):
    dtype = getattr(pt, name)
    x, mine = types_of(dtype)
    out = symmetric_type(dtype, (1 << 12,), (1,), Access.READ_WRITE, 64)
    consts = {"RS": reductions(LOAD_REDUCTIONS, name), "ORDERS": LOADS, "B": TILE}
    assert instructions(ptx_of(loads, {"out": out, "x": x}, consts, arch)) == expected_loads(dtype)
    consts = {"RS": reductions(REDUCTIONS, name), "ORDERS": UPDATES, "B": TILE}
    assert instructions(ptx_of(updates, {"x": x, "mine": mine}, consts, arch)) == expected_updates(dtype)
    consts = {"ORDERS": STORES, "B": TILE}
    assert instructions(ptx_of(stores, {"x": x, "mine": mine}, consts, arch)) == expected_stores(dtype)


@pytest.mark.usefixtures("triton_needed")
@pytest.mark.feature("M5", "cuda")
@pytest.mark.parametrize("name", ["i32", "u32", "i64", "u64"])
def test_signals_are_released_and_the_protocol_crosses_the_proxy(name):
    dtype = getattr(pt, name)
    x, _ = types_of(dtype)
    ptx = ptx_of(words, {"w": x, "ready": SignalType()}, {}, "sm_90")
    assert instructions(ptx) == {
        "fence.proxy.alias",
        f"multimem.st.release.sys.global.b{dtype.bits}",
        f"multimem.red.release.sys.global.add.u{dtype.bits}",
    }
    # Fence, release, acquire, fence: what was done by either address is published, and what comes next sees it.
    order = [m[0] for m in re.finditer(r"fence\.proxy\.alias|st\.release\.sys|ld\.acquire\.sys", ptx)]
    first = order.index("st.release.sys")
    assert order[:first].count("fence.proxy.alias") == 1
    assert order.index("fence.proxy.alias", first) > order.index("ld.acquire.sys")


@pytest.mark.usefixtures("triton_needed")
@pytest.mark.feature("K14", "cuda")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_an_alias_fence_is_its_instruction(arch):
    ptx = ptx_of(aliases, {"x": PointerType(pt.f32)}, {}, arch)
    assert instructions(ptx) == {"fence.proxy.alias"}


@pytest.mark.usefixtures("triton_needed")
@pytest.mark.feature("M1", "cuda")
def test_an_architecture_without_multicast_is_refused_by_name():
    x, mine = types_of(pt.f32)
    with pytest.raises(CompileError) as caught:
        ptx_of(stores, {"x": x, "mine": mine}, {"ORDERS": (T.weak,), "B": TILE}, "sm_80")
    assert caught.value.message == (
        "multicast_store: multicast instructions need sm_90 or newer, and the target is sm_80"
    )


@pytest.mark.usefixtures("triton_needed")
@pytest.mark.feature("M1", "cuda")
def test_without_the_fabric_it_is_loops_over_peers():
    x = multicast_type(pt.f32, (1 << 12,), (1,), 64)
    ptx = ptx_of(stores, {"x": x, "mine": types_of(pt.f32)[1]}, {"ORDERS": STORES, "B": TILE}, "sm_90")
    assert instructions(ptx) == set()


# ---------------------------------------------------------------- bulk copies


def newer_ptxas():
    """The assembler of the package nvidia-cuda-nvcc, if it is there."""
    found = importlib.util.find_spec("nvidia")
    for folder in found.submodule_search_locations if found is not None else ():
        for path in Path(folder).glob("cu13/bin/ptxas"):
            return path
    return None


def expected_bulk(dtype):
    copy = "bulk.global.shared::cta.bulk_group"
    kind = dtype.name if dtype.bits == 16 else f"f{dtype.bits}"
    found = {f"multimem.cp.async.{copy}"}
    for r in reductions(BULK_REDUCTIONS, dtype.name):
        flush = ".noftz" if dtype.bits == 16 and r is T.Rmw.ADDF else ""
        found.add(f"multimem.cp.reduce.async.{copy}.{NAMES[r]}{flush}.{kind}")
    return found


@pytest.mark.long
@pytest.mark.usefixtures("triton_needed")
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("name", MULTICAST_DTYPES)
def test_every_bulk_row_assembles(name, arch, monkeypatch):
    path = newer_ptxas()
    assert path is not None, "bulk copies need the assembler of CUDA 13.1: pip install 'nvidia-cuda-nvcc>=13.1'"
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(path))
    monkeypatch.setenv("TRITON_PTXAS_BLACKWELL_PATH", str(path))
    dtype = getattr(pt, name)
    x, mine = types_of(dtype)
    consts = {"RS": reductions(BULK_REDUCTIONS, name), "B": TILE}
    ptx = ptx_of(bulk, {"x": x, "mine": mine}, consts, arch)
    assert {i for i in instructions(ptx) if "multimem" in i} == expected_bulk(dtype)
    # Filled ahead of the asynchronous proxy, committed, and its writes waited for.
    steps = [
        "fence.proxy.async.shared::cta",
        "multimem.cp",
        "cp.async.bulk.commit_group",
        "cp.async.bulk.wait_group 0",
        "fence.proxy.async.global",
    ]
    at = [ptx.index(s) for s in steps]
    assert at == sorted(at)


@pytest.mark.feature("M4", "cuda")
@pytest.mark.parametrize("name", MULTICAST_DTYPES)
def test_every_bulk_row_is_its_instruction(name):
    dtype = getattr(pt, name)
    rs = reductions(BULK_REDUCTIONS, name)
    source = triton_source(bulk, dtype, {"RS": rs, "B": TILE})
    assert {i for i in instructions(source) if "multimem" in i} == expected_bulk(dtype)


def triton_source(kernel, dtype, consts):
    x, mine = types_of(dtype)
    return lower_to_text(run_pipeline(build_kernel(kernel.fn, {"x": x, "mine": mine}, consts)), "sm_90")


@pytest.mark.usefixtures("triton_needed")
def test_an_older_assembler_says_what_to_install(monkeypatch):
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    x, mine = types_of(pt.f32)
    said = "bulk copies to a multicast address need PTX 9.1, which ptxas of CUDA 13.1 and newer takes: install "
    try:
        text = ptx_of(bulk, {"x": x, "mine": mine}, {"RS": (), "B": 128}, "sm_90")
    except CompileError as error:
        text = error.message
    assert said in text or "multimem" in text  # the assembler of triton 3.9 is new enough


@pytest.mark.slow
@pytest.mark.feature("K15", "cuda")
@pytest.mark.usefixtures("triton_needed")
def test_inspect_shows_the_instructions():
    texts = ["x=f32[4096]@fabric", "mine=f32[4096]", f"B={TILE}"]
    found = describe(one_store, Signature.parse(one_store, texts), arch="sm_90")
    assert "multimem.st.release.sys.global.v4.f32" in found.stages["ptx"]


@pt.kernel
def one_store(x: T.Multicast, mine: T.Shared, B: T.Const[int]):
    i = T.program_id(0)
    x.partition((B,)).multimem_store((i,), mine.load((i,), (B,)), order=T.release)
