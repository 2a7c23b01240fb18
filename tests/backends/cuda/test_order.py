"""Ordered accesses become PTX of at least the order and scope asked for, with barriers where the model wants them."""

import itertools
import re

import pytest
from tests.backends.cuda.util import PROVEN, K, memory_ops

from peertile.backends.cuda.compile import compile_kernel, lower_to_text
from peertile.backends.cuda.target import CudaOptions, check_rmw
from peertile.dtypes import b1, bf16, f16, f32, f64, i8, i32, i64, u8, u16, u32, u64
from peertile.errors import CompileError
from peertile.ir import ops
from peertile.ir.core import Block
from peertile.ir.types import INDEX, Access, PointerType, Space, SymmetricType, TileType, TokenType, ViewType
from peertile.memory_model import Cmp, Order, Rmw, Scope

pytestmark = pytest.mark.usefixtures("triton_needed")

SCOPES = {"cta": 0, "gpu": 1, "sys": 2}
ORDERS = {"relaxed": (False, False), "acquire": (True, False), "release": (False, True), "acq_rel": (True, True)}
PTX_SCOPE = {Scope.PROGRAM: "cta", Scope.DEVICE: "gpu", Scope.SYSTEM: "sys"}


def words(dtype, space=Space.DEVICE):
    return ViewType(dtype, 1, Access.READ_WRITE, space, unit_stride=(True,))


def order_of(instruction):
    """(order, scope) of `ld.acquire.sys.global.b64`, `atom.global.gpu.acq_rel.add.u32`, …"""
    parts = instruction.split(".")
    return next(p for p in parts if p in ORDERS), next(p for p in parts if p in SCOPES)


def at_least(instruction, order, scope):
    got, got_scope = order_of(instruction)
    acquires, releases = ORDERS[got]
    return acquires >= order.acquires and releases >= order.releases and SCOPES[got_scope] >= scope.width


def runs(values):
    """Values without repetitions of the one before."""
    return [key for key, _ in itertools.groupby(values)]


def text_of(kernel, arch="sm_90"):
    return memory_ops(compile_kernel(kernel, arch).text["ptx"])


def without_barriers(found):
    return [op for op in found if not op.startswith("bar")]


@pytest.mark.parametrize(
    "dtype", [u64, *(pytest.param(d, marks=pytest.mark.slow) for d in (u32, u8, f16, f64))], ids=str
)
@pytest.mark.parametrize("scope", list(Scope), ids=lambda s: s.value)
def test_loads_and_stores_of_words(dtype, scope):
    k = K("words", w=words(dtype), z=words(dtype))
    i, t = k.v(ops.ProgramId, t=INDEX), TileType(dtype)
    asked = []
    for order in (Order.RELAXED, Order.ACQUIRE):
        x = k.v(ops.WordLoad, k.w, i, t=t, order=order, scope=scope)
        k.op(ops.WordStore, k.z, x, i, order=Order.WEAK, scope=None)
        asked.append(("ld", order))
    for order in (Order.RELAXED, Order.RELEASE):
        k.op(ops.WordStore, k.w, x, i, order=order, scope=scope)
        asked.append(("st", order))
    found = without_barriers(text_of(k.done()))
    assert len(found) == len(asked)
    for instruction, (kind, order) in zip(found, asked, strict=True):
        assert instruction.startswith(f"{kind}."), found
        assert instruction.endswith(f".b{dtype.itemsize * 8}")
        assert at_least(instruction, order, scope), (instruction, order, scope)
        assert order_of(instruction)[1] == PTX_SCOPE[scope]


def test_peer_memory_is_accessed_at_system_scope_whatever_was_asked():
    k = K("peer", x=SymmetricType(u64, 1, unit_stride=(True,), align=8))
    me = k.v(ops.Rank, k.x, t=INDEX)
    there = k.v(ops.PeerView, k.x, me, t=k.x.type.view)
    zero, t = k.const(0), TileType(u64)
    x = k.v(ops.WordLoad, there, zero, t=t, order=Order.ACQUIRE, scope=Scope.SYSTEM)
    k.op(ops.WordStore, there, x, zero, order=Order.RELEASE, scope=Scope.SYSTEM)
    k.v(ops.WordRmw, there, x, zero, t=t, rmw=Rmw.ADD, order=Order.ACQ_REL, scope=Scope.SYSTEM)
    tile = k.load(there, zero, t=TileType(u64, (64,)))
    k.store(there, tile, k.const(1))
    kernel = k.done()
    # The verifier refuses narrower scopes; the backend widens them even so.
    for op in kernel.body.ops:
        if op.attrs.get("scope") is not None:
            op.attrs["scope"] = Scope.DEVICE
    ptx = compile_kernel(kernel).text["ptx"]
    found = without_barriers(memory_ops(ptx))
    assert len(found) == 3
    assert all(order_of(instruction)[1] == "sys" for instruction in found)
    assert "ld.global.nc" not in ptx
    assert "cp.async" not in ptx


def place(found, prefix):
    return next(n for n, op in enumerate(found) if op.startswith(prefix))


def test_a_barrier_comes_before_a_release_and_after_an_acquire():
    k = K("handshake", w=words(u64), z=words(f32), x=words(f32))
    i = k.v(ops.ProgramId, t=INDEX)
    tile = k.load(k.x, i, t=TileType(f32, (256,)))
    k.store(k.z, tile, i)
    k.op(ops.WordStore, k.w, k.const(1, TileType(u64)), i, order=Order.RELEASE, scope=Scope.SYSTEM)
    seen = k.v(ops.WordLoad, k.w, i, t=TileType(u64), order=Order.ACQUIRE, scope=Scope.SYSTEM)
    k.store(k.x, k.v(ops.Broadcast, k.v(ops.Cast, seen, t=TileType(f32)), t=TileType(f32, (256,))), i)
    ptx = compile_kernel(k.done()).text["ptx"]
    lines = [line for line in ptx.splitlines() if re.search(r"st\.global|bar\.sync|st\.release|ld\.acquire", line)]
    kinds = [re.search(r"st\.global|bar\.sync|st\.release|ld\.acquire", line)[0] for line in lines]
    release, acquire = kinds.index("st.release"), kinds.index("ld.acquire")
    assert "st.global" in kinds[:release]
    assert kinds[release - 1] == "bar.sync"
    after = kinds[acquire + 1 :]
    assert after.index("bar.sync") < after.index("st.global")


@pytest.mark.parametrize(
    "cmp",
    [Cmp.AT_LEAST, Cmp.LT, *(pytest.param(c, marks=pytest.mark.slow) for c in Cmp if c not in (Cmp.AT_LEAST, Cmp.LT))],
    ids=lambda c: c.value,
)
@pytest.mark.parametrize("warps", [1, 4])
def test_a_wait_is_a_bounded_poll_by_one_thread_with_a_barrier_after_it(cmp, warps):
    k = K("waits", w=words(u64), s=words(i32), z=words(u64))
    i = k.v(ops.ProgramId, t=INDEX)
    k.v(ops.Wait, k.w, k.const(3, TileType(u64)), i, t=TileType(u64), cmp=cmp, scope=Scope.SYSTEM, what="w")
    got = k.v(
        ops.Wait, k.s, k.const(-3, TileType(i32)), i, t=TileType(i32), cmp=cmp, scope=Scope.DEVICE, order=Order.RELAXED
    )
    k.op(ops.Fence, scope=Scope.DEVICE)
    k.op(ops.WordStore, k.z, k.v(ops.Cast, got, t=TileType(u64)), i, order=Order.WEAK, scope=None)
    binary = compile_kernel(k.done(), options=CudaOptions(num_warps=warps))
    ptx = binary.text["ptx"]
    found = memory_ops(ptx)
    polls = [op for op in found if op.startswith("ld.") and op.endswith((".b64", ".b32")) and "relaxed.sys" not in op]
    assert [
        at_least(p, o, s)
        for p, o, s in zip(polls, (Order.ACQUIRE, Order.RELAXED), (Scope.SYSTEM, Scope.DEVICE), strict=True)
    ] == [True, True]
    # A single warp meets by a vote, and is ordered by the barrier of a warp.
    assert found.count("barrier.red.and.pred") == (0 if warps == 1 else 2)
    assert ptx.count("vote.sync.all.pred left, ok, 0xffffffff;\n") == (2 if warps == 1 else 0)
    assert re.findall(r"vote\.sync.*;\s+(\S+)", ptx) == ["bar.warp.sync"] * (2 if warps == 1 else 0)
    assert ptx.count("%globaltimer") >= 4
    # The record is claimed by compare-and-swap and completed by a release.
    assert found.count("atom.acquire.sys.global.cas.b64") == 2
    assert found.count("st.release.sys.global.b64") == 2
    fence = place(found, "fence.acq_rel.gpu")
    assert found[fence - 1].startswith("bar")
    assert found[fence + 1].startswith("bar")
    if cmp in (Cmp.GE, Cmp.LE, Cmp.GT, Cmp.LT):
        assert f"setp.{cmp.value}.u64 ok" in ptx
        assert f"setp.{cmp.value}.s32 ok" in ptx
    assert binary.waits


@pytest.mark.parametrize("scope", list(Scope), ids=lambda s: s.value)
def test_fences_order_what_every_thread_did(scope):
    k = K("fences", z=words(f32))
    i = k.v(ops.ProgramId, t=INDEX)
    k.store(k.z, k.full(1.0, TileType(f32, (128,))), i)
    k.op(ops.Fence, scope=scope)
    k.store(k.z, k.full(2.0, TileType(f32, (128,))), i)
    found = text_of(k.done())
    at = place(found, f"fence.acq_rel.{PTX_SCOPE[scope]}")
    assert found[at - 1].startswith("bar.sync")
    assert found[at + 1].startswith("bar.sync")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [i32, u64, i8, u16, f16, bf16, f32, f64], ids=str)
def test_read_modify_writes_of_words_and_tiles(dtype):
    k = K("rmw", w=words(dtype), z=words(dtype), x=words(dtype))
    i, t = k.v(ops.ProgramId, t=INDEX), TileType(dtype)
    x = k.v(ops.WordLoad, k.x, i, t=t, order=Order.WEAK, scope=None)
    tile = k.load(k.x, i, t=TileType(dtype, (64,)))
    asked = []
    for rmw in Rmw:
        for n, order in enumerate((Order.RELAXED, Order.ACQUIRE, Order.RELEASE, Order.ACQ_REL)):
            scope = (Scope.DEVICE, Scope.SYSTEM)[n % 2]
            old = k.try_(ops.WordRmw, k.w, x, i, results=(t,), rmw=rmw, order=order, scope=scope)
            if old is None:
                continue
            k.op(ops.WordStore, k.z, old.result, i, order=Order.WEAK, scope=None)
            k.op(ops.TileAtomic, k.w, tile, i, rmw=rmw, order=order, scope=scope, bounds=PROVEN)
            asked += [(order, scope)] * 2
    found = [op for op in text_of(k.done()) if op.startswith(("atom", "red"))]
    # A tile may take several instructions, all alike; neighbours that were asked for differ in order.
    got, want = runs(map(order_of, found)), runs((o.value, PTX_SCOPE[s]) for o, s in asked)
    assert got == want


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(), (8,), (512,), (4, 32)], ids=str)
@pytest.mark.parametrize("dtype", [u32, i64, u8, f16], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_ordered_accesses_through_pointers(dtype, shape, masked):
    pointer, t, token = PointerType(dtype, shape, Space.PEER), TileType(dtype, shape), TokenType()
    k = K("pointers", unsafe=True, p=PointerType(dtype), q=PointerType(dtype), flag=TileType(b1))
    p = k.v(ops.Unicast, k.p, t=PointerType(dtype, (), Space.PEER))
    p = k.v(ops.PtrBroadcast, p, t=pointer) if shape else p
    fill = k.full(0 if dtype.is_int else 0.0, t)
    mask = (k.v(ops.Broadcast, k.flag, t=TileType(b1, shape)),) if masked else ()
    asked = []
    for order in (Order.RELAXED, Order.ACQUIRE):
        x = k.op(
            ops.PtrLoad, p, fill, *mask, results=(t, token), order=order, scope=Scope.SYSTEM, masked=masked
        ).results[0]
        asked.append(("ld", order))
        k.op(ops.PtrStore, p, x, *mask, results=(token,), order=Order.WEAK, scope=None, masked=masked)
    for order in (Order.RELAXED, Order.RELEASE):
        k.op(ops.PtrStore, p, x, *mask, results=(token,), order=order, scope=Scope.SYSTEM, masked=masked)
        asked.append(("st", order))
    if dtype.itemsize > 1:
        for order in (Order.RELAXED, Order.ACQUIRE, Order.RELEASE, Order.ACQ_REL):
            old = k.op(
                ops.PtrCas, p, x, fill, *mask, results=(t, token), order=order, scope=Scope.SYSTEM, masked=masked
            )
            k.op(ops.PtrStore, p, old.results[0], *mask, results=(token,), order=Order.WEAK, scope=None, masked=masked)
            asked.append(("atom", order))
    found = [op for op in text_of(k.done()) if not op.startswith("bar")]
    kinds = [(op.split(".")[0], order_of(op)) for op in found]
    assert runs(kinds) == [(kind, (order.value, "sys")) for kind, order in asked]


def test_conflicting_accesses_of_one_program_are_ordered_by_a_barrier_and_others_are_not():
    def barriers(build):
        k = K("hazards", x=words(f32, Space.LOCAL), z=words(f32, Space.LOCAL))
        build(k, k.const(0), TileType(f32, (128,)))
        return lower_to_text(k.done()).count("tl.debug_barrier()")

    def independent(k, i, t):
        k.store(k.z, k.load(k.x, i, t=t), i)

    def read_after_write(k, i, t):
        k.store(k.x, k.full(1.0, t), i)
        k.store(k.z, k.load(k.x, i, t=t), i)

    def write_after_read(k, i, t):
        k.store(k.x, k.load(k.x, i, t=t), i)

    def write_after_write(k, i, t):
        k.store(k.x, k.full(1.0, t), i)
        k.store(k.x, k.full(2.0, t), i)

    def atomics(k, i, t):
        for _ in range(3):
            k.op(ops.TileAtomic, k.x, k.full(1.0, t), i, rmw=Rmw.ADDF, scope=Scope.DEVICE, bounds=PROVEN)

    assert [barriers(f) for f in (independent, read_after_write, write_after_read, write_after_write, atomics)] == [
        0,
        1,
        1,
        1,
        0,
    ]


def test_a_loop_orders_its_trips():
    from peertile.backends.cuda.compile import lower_to_text

    k = K("trips", x=words(f32, Space.LOCAL), n=INDEX)
    body = Block([INDEX])
    t = TileType(f32, (128,))
    with k.b.at(body):
        loaded = k.load(k.x, body.args[0], t=t)
        next_ = k.v(ops.BinaryOp, body.args[0], k.const(1), t=INDEX, fn=ops.Binary.ADD)
        k.store(k.x, loaded, next_)
        k.op(ops.Continue)
    k.b.emit(ops.For, (k.const(0), k.n, k.const(1)), (), (body,), stages=4)
    text = lower_to_text(k.done())
    # The load of a trip follows the store of the one before, which may not be overtaken by prefetching either.
    assert text.count("tl.debug_barrier()") == 2
    assert "num_stages=1" in text


@pytest.mark.parametrize("kind", [ops.For, ops.Loop])
def test_a_loop_that_may_have_no_trip_orders_nothing(kind):
    """What was stored in front of it is read behind it: the barriers inside are none where it is left at once."""
    k = K("none", x=words(f32, Space.LOCAL), z=words(f32, Space.LOCAL), n=INDEX)
    t = TileType(f32, (128,))
    k.store(k.x, k.full(1.0, t), k.const(0))
    body = Block([INDEX] if kind is ops.For else [])
    with k.b.at(body):
        if kind is ops.Loop:
            leaves = k.v(ops.CompareOp, k.n, k.const(0), t=TileType(b1), fn=ops.Compare.EQ)
            arms = Block(), Block()
            with k.b.at(arms[0]):
                k.op(ops.Break)
            with k.b.at(arms[1]):
                k.op(ops.Yield)
            k.b.emit(ops.If, (leaves,), blocks=arms)
        k.op(ops.Fence, scope=Scope.SYSTEM)
        k.op(ops.Continue)
    k.b.emit(kind, (k.const(0), k.n, k.const(1)) if kind is ops.For else (), (), (body,))
    k.store(k.z, k.load(k.x, k.const(0), t=t), k.const(0))
    text = lower_to_text(k.done())
    behind = text[text.rindex("_fence_sys") :]
    assert behind.count("tl.debug_barrier()") == 2  # of the fence, and in front of what is read
    assert behind.rindex("tl.debug_barrier()") < behind.index("tl.load(")


def test_what_a_pipelined_loop_loads_is_ordered_in_front_of_it():
    k = K("ahead", x=words(f32, Space.LOCAL), z=words(f32, Space.LOCAL), n=INDEX)
    t = TileType(f32, (128,))
    k.store(k.x, k.full(1.0, t), k.const(0))
    body = Block([INDEX])
    with k.b.at(body):
        k.store(k.z, k.load(k.x, body.args[0], t=t), body.args[0])
        k.op(ops.Continue)
    k.b.emit(ops.For, (k.const(0), k.n, k.const(1)), (), (body,), stages=4)
    text = lower_to_text(k.done())
    loop = text.index("num_stages=")
    assert text.index("tl.debug_barrier()") < loop
    assert "tl.debug_barrier()" not in text[loop : text.index("tl.load(", loop)]


@pytest.mark.parametrize(
    ("rmw", "dtype", "arch", "message"),
    [
        (Rmw.ADDF, bf16, "sm_80", "atomic addf: bf16 needs sm_90 or newer, and the target is sm_80; use f32"),
    ],
)
def test_atomics_that_an_architecture_lacks_are_refused_by_name(rmw, dtype, arch, message):
    with pytest.raises(CompileError) as caught:
        check_rmw(rmw, dtype, arch, None)
    assert str(caught.value) == message
