"""Control flow, memory, waits and schedules of the evaluator."""

import operator as o

import numpy as np
import pytest

from peertile.errors import ArgumentError, InternalError, LaunchError
from peertile.ir.text import parse_kernel
from peertile.meaning import Fault, FaultKind, PerRank, Schedule, new_signal, run_grid
from peertile.meaning.tiles import delinearize
from peertile.passes.bounds import LaunchCheck


def run(params: str, body: str, args, grid=1, flags: str = "", **options):
    consts = "".join(f"%c{n} = const(value={n}) : i64\n" for n in range(5))
    kernel = parse_kernel(f"kernel @k({params}){flags} {{ {consts} {body} return() }}")
    return run_grid(kernel, grid, args, **options)


def numbers(body: str, size: int, /, **scalars: int) -> list[int]:
    """What `body` stores into %out, an i64 vector, with i64 scalars as further parameters."""
    out = np.full(size, -1, np.int64)
    params = ", ".join(["%out: view<i64, 1, read_write>", *(f"%{s}: i64" for s in scalars)])
    assert run(params, body, [out, *scalars.values()]).faults == []
    return out.tolist()


def store(value: str, index: str) -> str:
    return f"word_store(%out, {value}, {index}, order=Order.weak, scope=none)"


# ---------------------------------------------------------------- control flow


def test_for_carries_values() -> None:
    body = f"""%s, %t = for(%lo, %hi, %c2, %c0, %c1) : i64, i64 (%k: i64, %a: i64, %b: i64) {{
      %x = binary(%a, %k, fn=Binary.add) : i64
      %y = binary(%b, %c2, fn=Binary.mul) : i64
      continue(%x, %y) }}
    {store("%s", "%c0")} {store("%t", "%c1")}"""
    for lo, hi in ((0, 7), (1, 6), (3, 3), (5, 2), (-4, 0)):
        expected = [sum(range(lo, hi, 2)), 2 ** len(range(lo, hi, 2))]
        assert numbers(body, 2, lo=lo, hi=hi) == expected


def test_for_counts_like_a_mathematical_range_up_to_the_end_of_its_type() -> None:
    body = f"""%lo = const(value=120) : i8 %hi = const(value=127) : i8 %step = const(value=5) : i8
    %n = for(%lo, %hi, %step, %c0) : i64 (%k: i8, %a: i64) {{
      %b = binary(%a, %c1, fn=Binary.add) : i64
      continue(%b) }}
    {store("%n", "%c0")}"""
    assert numbers(body, 1) == [2]  # 120, 125


def test_break_and_continue_inside_if() -> None:
    body = f"""%s = for(%c0, %n, %c1, %c0) : i64 (%k: i64, %a: i64) {{
      %two = compare(%k, %c2, fn=Compare.eq) : bool
      if(%two) {{ continue(%a) }} else {{ yield() }}
      %last = compare(%a, %c4, fn=Compare.gt) : bool
      %z = if(%last) : i64 {{ break(%a) }} else {{ yield(%k) }}
      %b = binary(%a, %z, fn=Binary.add) : i64
      continue(%b) }}
    {store("%s", "%c0")}"""

    def naive(n: int) -> int:
        a = 0
        for k in range(n):
            if k == 2:
                continue
            if a > 4:
                break
            a += k
        return a

    for n in range(8):
        assert numbers(body, 1, n=n) == [naive(n)]


def test_loop_ends_with_other_types_than_it_carries() -> None:
    body = f"""%r = loop(%c1) : i64 (%a: i64) {{
      %b = binary(%a, %c3, fn=Binary.mul) : i64
      %big = compare(%b, %n, fn=Compare.ge) : bool
      if(%big) {{ break(%b) }} else {{ continue(%b) }}
      break(%c0) }}
    {store("%r", "%c0")}"""
    assert numbers(body, 1, n=100) == [243]


def test_return_ends_the_program_from_any_depth() -> None:
    body = f"""{store("%c1", "%c0")}
    for(%c0, %c4, %c1) (%k: i64) {{
      loop() {{
        %stop = compare(%k, %c2, fn=Compare.eq) : bool
        if(%stop) {{ return() }} else {{ yield() }}
        {store("%k", "%c1")}
        break() }}
      continue() }}
    {store("%c2", "%c0")}"""
    assert numbers(body, 2) == [1, 1]


def test_if_takes_one_arm() -> None:
    body = f"""%y = compare(%n, %c1, fn=Compare.ge) : bool
    %r = if(%y) : i64 {{ {store("%c1", "%c1")} yield(%c3) }} else {{ yield(%c4) }}
    {store("%r", "%c0")}"""
    assert numbers(body, 2, n=1) == [3, 1]
    assert numbers(body, 2, n=0) == [4, -1]


# ---------------------------------------------------------------- views


def test_loads_pad_and_stores_clip_on_strided_views() -> None:
    x = np.arange(60, dtype=np.float32).reshape(6, 10).T[1:8, ::2]  # 7 by 3, strided
    z = np.full((7, 3), -1, np.float32)
    body = """%n0 = num_tiles(%x, axis=0, size=4) : i64 %n1 = num_tiles(%x, axis=1, size=2) : i64
    for(%c0, %n0, %c1) (%i: i64) {
      for(%c0, %n1, %c1) (%j: i64) {
        %t = load(%x, %i, %j) : f32[4, 2]
        %u = binary(%t, %t, fn=Binary.add) : f32[4, 2]
        store(%z, %u, %i, %j)
        continue() }
      continue() }"""
    assert run("%x: view<f32, 2, read>, %z: view<f32, 2, write>", body, [x, z]).faults == []
    np.testing.assert_array_equal(z, 2 * x)


def test_extents_of_views_and_symmetric_objects() -> None:
    body = f"""%a = extent(%x, axis=0) : i64 %b = num_tiles(%x, axis=1, size=4) : i64 %c = extent(%s, axis=0) : i64
    {store("%a", "%c0")} {store("%b", "%c1")} {store("%c", "%c2")}"""
    out = np.zeros(3, np.int64)
    params = "%x: view<f32, 2, read>, %s: symmetric<f32, 1, read>, %out: view<i64, 1, write>"
    run(params, body, [np.zeros((3, 9), np.float32), np.zeros(5, np.float32), out])
    assert out.tolist() == [3, 3, 5]


def test_tile_0_of_an_empty_axis_is_padding() -> None:
    z = np.full(4, -1, np.float32)
    body = "%t = load(%x, %c0, padding=Padding.inf) : f32[4] store(%z, %t, %c0) store(%x, %t, %c0)"
    params = "%x: view<f32, 1, read_write>, %z: view<f32, 1, write>"
    assert run(params, body, [np.zeros(0, np.float32), z]).faults == []
    assert z.tolist() == [np.inf] * 4


@pytest.mark.parametrize("index", [-1, 2])
def test_index_outside_its_view_is_a_fault(index: int) -> None:
    outcome = run("%x: view<f32, 1, read>, %i: i64", "%t = load(%x, %i) : f32[4]", [np.zeros(8, np.float32), index])
    message = f"load: tile index of axis 0: expected 0 to 1, got {index}"
    assert outcome.faults == [Fault(FaultKind.BOUNDS, message, 0, 0, None, index, 2)]


def test_index_outside_its_view_that_was_proven_is_our_bug() -> None:
    body = "%t = load(%x, %c2, bounds=Bounds.proven) : f32[4]"
    with pytest.raises(InternalError, match=r"^load: tile index of axis 0: expected 0 to 1, got 2, though its bounds"):
        run("%x: view<f32, 1, read>", body, [np.zeros(8, np.float32)])


@pytest.mark.parametrize(("tiles", "swizzle"), [((3, 5), 1), ((5, 3), 2), ((4, 4), 8), ((7, 2, 3), 3), ((5,), 4)])
def test_tile_order(tiles: tuple[int, ...], swizzle: int) -> None:
    total = int(np.prod(tiles))
    found = [tuple(delinearize(k, list(tiles), swizzle)) for k in range(total)]
    if swizzle == 1 or len(tiles) == 1:
        expected = list(np.ndindex(*tiles))
    else:
        expected = [
            (m, n, *rest)
            for first in range(0, tiles[0], swizzle)
            for n in range(tiles[1])
            for m in range(first, min(first + swizzle, tiles[0]))
            for rest in np.ndindex(*tiles[2:])
        ]
    assert found == expected


def test_exclusive_partition_covers_its_view_once() -> None:
    z = np.zeros((10, 7), np.int32)
    body = """%p = program_id() : i64 %i, %j = tile_index(%z, %p) : i64, i64
    %t = load(%z, %i, %j) : i32[4, 2]
    %one = const(value=1) : i32 %ones = broadcast(%one) : i32[4, 2]
    %u = binary(%t, %ones, fn=Binary.add) : i32[4, 2]
    store(%z, %u, %i, %j)"""
    run("%z: view<i32, 2, read_write, tile=[4, 2], swizzle=2>", body, [z], grid=3 * 4)
    assert (z == 1).all()


def test_program_ids_of_a_grid_with_three_axes() -> None:
    out = np.zeros((2, 3, 4), np.int64)
    body = """%i = program_id(axis=0) : i64 %j = program_id(axis=1) : i64 %k = program_id(axis=2) : i64
    %n = num_programs(axis=1) : i64 %v = binary(%n, %k, fn=Binary.add) : i64
    word_store(%out, %v, %i, %j, %k, order=Order.weak, scope=none)"""
    run("%out: view<i64, 3, write>", body, [out], grid=(2, 3, 4), flags=" grid=3")
    assert all(out[i] == 3 + i[2] for i in np.ndindex(2, 3, 4))


# ---------------------------------------------------------------- words, atomics, pointers


RMW = {
    "add": lambda a, b: (a + b) % 2**32, "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
    "umin": min, "umax": max, "xchg": lambda a, b: b,
    "min": lambda a, b: a if a - (a >> 31 << 32) <= b - (b >> 31 << 32) else b,
    "max": lambda a, b: a if a - (a >> 31 << 32) >= b - (b >> 31 << 32) else b,
}  # fmt: skip


@pytest.mark.parametrize("name", RMW)
def test_read_modify_write_of_a_word_a_tile_and_through_a_pointer(name: str) -> None:
    old = np.array([5, 2**31 + 3, 2**32 - 1, 0], np.uint32)
    value = np.array([2**32 - 2, 7, 3, 2**31], np.uint32)
    expected = [RMW[name](int(a), int(b)) for a, b in zip(old, value, strict=True)]

    word, was = old.copy(), np.zeros(4, np.uint32)
    body = f"""for(%c0, %c4, %c1) (%i: i64) {{
      %v = word_load(%value, %i, order=Order.weak, scope=none) : u32
      %o = word_rmw(%x, %v, %i, rmw=Rmw.{name}, order=Order.acq_rel, scope=Scope.device) : u32
      word_store(%was, %o, %i, order=Order.weak, scope=none)
      continue() }}"""
    params = "%x: view<u32, 1, read_write>, %value: view<u32, 1, read>, %was: view<u32, 1, write>"
    run(params, body, [word, value, was])
    assert (word.tolist(), was.tolist()) == (expected, old.tolist())

    tile = old[:3].copy()  # the fourth element is clipped
    body = f"%v = load(%value, %c0) : u32[4] tile_atomic(%x, %v, %c0, rmw=Rmw.{name}, scope=Scope.device)"
    run("%x: view<u32, 1, read_write>, %value: view<u32, 1, read>", body, [tile, value])
    assert tile.tolist() == expected[:3]

    behind, was = old.copy(), np.zeros(4, np.uint32)
    body = f"""%n = iota() : i32[4] %all = ptr_broadcast(%p) : ptr<u32, [4]> %at = ptr_offset(%all, %n) : ptr<u32, [4]>
    %two = const(value=2) : i32 %twos = broadcast(%two) : i32[4] %mask = compare(%n, %twos, fn=Compare.ne) : bool[4]
    %v = load(%value, %c0) : u32[4]
    %o, %t = ptr_rmw(%at, %v, %mask, rmw=Rmw.{name}, order=Order.relaxed, scope=Scope.device, masked=true)
      : u32[4], token
    store(%was, %o, %c0)"""
    run(
        "%p: ptr<u32>, %value: view<u32, 1, read>, %was: view<u32, 1, write>",
        body,
        [behind, value, was],
        flags=" unsafe",
    )
    assert behind.tolist() == [*expected[:2], int(old[2]), expected[3]]
    assert [was[k] for k in (0, 1, 3)] == [old[k] for k in (0, 1, 3)]


def test_atomic_adds_of_floats_from_many_programs_all_count() -> None:
    x = np.zeros(4, np.float32)
    body = """%one = const(value=1.0) : f32 %t = broadcast(%one) : f32[4]
    tile_atomic(%x, %t, %c0, rmw=Rmw.addf, scope=Scope.device)"""
    run("%x: view<f32, 1, read_write, device>", body, [x], grid=50, schedule=Schedule.RANDOM, seed=1)
    assert x.tolist() == [50] * 4


def test_pointers_load_store_and_fill() -> None:
    x, y = np.arange(8, dtype=np.float32), np.full(8, -1, np.float32)
    body = """%n = iota() : i64[4] %a = ptr_broadcast(%p) : ptr<f32, [4]> %b = ptr_offset(%a, %n) : ptr<f32, [4]>
    %c = unicast(%q) : ptr<f32, peer> %d = ptr_broadcast(%c) : ptr<f32, [4], peer>
    %e = ptr_offset(%d, %n) : ptr<f32, [4], peer>
    %twos = broadcast(%c2) : i64[4] %mask = compare(%n, %twos, fn=Compare.lt) : bool[4]
    %seven = const(value=7.0) : f32 %fill = broadcast(%seven) : f32[4]
    %t0 = new_token() : token %t1 = join_tokens(%t0, %t0) : token
    %v, %t2 = ptr_load(%b, %fill, %mask, %t1, order=Order.acquire, scope=Scope.system, masked=true, ordered=true)
      : f32[4], token
    %t3 = ptr_store(%e, %v, %t2, order=Order.release, scope=Scope.system, ordered=true) : token"""
    assert run("%p: ptr<f32>, %q: ptr<f32>", body, [x, y], flags=" unsafe").faults == []
    assert y.tolist() == [0, 1, 7, 7, -1, -1, -1, -1]


def test_compare_and_swap_compares_bits() -> None:
    x = np.array([-0.0, 1.0], np.float32)
    body = """%zero = const(value=0.0) : f32 %neg = const(value=-0.0) : f32 %new = const(value=9.0) : f32
    %a, %t0 = ptr_cas(%p, %zero, %new, order=Order.acq_rel, scope=Scope.device) : f32, token
    %w0, %u0 = ptr_load(%p, %zero, order=Order.weak, scope=none) : f32, token
    word_store(%out, %w0, %c0, order=Order.weak, scope=none)
    %b, %t1 = ptr_cas(%p, %neg, %new, order=Order.acq_rel, scope=Scope.device) : f32, token
    word_store(%out, %b, %c1, order=Order.weak, scope=none)"""
    out = np.ones(2, np.float32)
    run("%p: ptr<f32>, %out: view<f32, 1, write>", body, [x, out], flags=" unsafe")
    assert [repr(v) for v in out.tolist()] == ["-0.0", "-0.0"]
    assert x.tolist() == [9, 1]


def test_pointer_outside_all_storage_is_a_fault() -> None:
    body = """%a = ptr_offset(%p, %c4) : ptr<f32> %z = const(value=0.0) : f32
    %v, %t = ptr_load(%a, %z, order=Order.weak, scope=none) : f32, token"""
    x = np.zeros(4, np.float32)
    outcome = run("%p: ptr<f32>", body, [x], flags=" unsafe")
    assert [(f.kind, f.message) for f in outcome.faults] == [
        (FaultKind.BOUNDS, f"ptr_load: address {x.ctypes.data + 16:#x} lies in no storage of the launch")
    ]


# ---------------------------------------------------------------- waiting and ending


PING_PONG = """%me = rank(%x) : i64 %you = binary(%c1, %me, fn=Binary.sub) : i64
%mine = peer_view(%x, %me) : view<u64, 1, read_write, peer>
%yours = peer_view(%x, %you) : view<u64, 1, read_write, peer>
%one = const(value=1) : u64
for(%c0, %c3, %c1) (%k: i64) {
  %k1 = binary(%k, %c1, fn=Binary.add) : i64 %e = bitcast(%k1) : u64
  word_store(%yours, %e, %c0, order=Order.release, scope=Scope.system)
  %v = wait(%mine, %e, %c0, cmp=Cmp.at_least, scope=Scope.system) : u64
  fence(scope=Scope.system)
  suspend()
  continue() }"""


@pytest.mark.parametrize("schedule", Schedule)
def test_ranks_wait_for_each_other(schedule: Schedule) -> None:
    x = PerRank([np.zeros(1, np.uint64), np.zeros(1, np.uint64)])
    outcome = run("%x: symmetric<u64, 1, read_write>", PING_PONG, [x], ranks=2, schedule=schedule, seed=3)
    assert outcome.faults == []
    assert [int(a[0]) for a in x] == [3, 3]


def test_same_seed_gives_the_same_run() -> None:
    def steps(seed: int) -> int:
        x = PerRank([np.zeros(1, np.uint64), np.zeros(1, np.uint64)])
        return run(
            "%x: symmetric<u64, 1, read_write>", PING_PONG, [x], ranks=2, schedule=Schedule.RANDOM, seed=seed
        ).steps

    assert steps(5) == steps(5)


@pytest.mark.parametrize("cmp", ["at_least", "eq", "ne", "ge", "le", "gt", "lt"])
def test_wait_compares(cmp: str) -> None:

    naive = {"at_least": o.ge, "eq": o.eq, "ne": o.ne, "ge": o.ge, "le": o.le, "gt": o.gt, "lt": o.lt}[cmp]
    for seen in (1, 2, 3):
        word = np.array([seen], np.uint64)
        body = f'%e = const(value=2) : u64 %v = wait(%w, %e, %c0, cmp=Cmp.{cmp}, scope=Scope.device, what="w") : u64'
        outcome = run("%w: view<u64, 1, read_write, device>", body, [word])
        stuck = [Fault(FaultKind.DEADLOCK, f"waits for w[0] {cmp} 2, last saw {seen}", 0, 0, None, seen, 2, 0)]
        assert outcome.faults == ([] if naive(seen, 2) else stuck)


def test_poll_without_end_reaches_the_step_limit() -> None:
    outcome = run("", "loop() { suspend() continue() }", [], max_steps=100)
    assert (outcome.steps, outcome.faults) == (
        100,
        [Fault(FaultKind.STEP_LIMIT, "did not end: stopped at suspend", 0, 0)],
    )


def test_failed_check_ends_its_program_and_releases_the_waiting_ones() -> None:
    body = """%p = program_id() : i64 %zero = compare(%p, %c0, fn=Compare.eq) : bool
    if(%zero) { check(%zero) %bad = compare(%p, %c1, fn=Compare.eq) : bool
      check(%bad, %p, %c1, message="expected one") yield() } else { yield() }
    %e = const(value=1) : u64 %v = wait(%w, %e, %c0, cmp=Cmp.ge, scope=Scope.device) : u64
    word_store(%w, %e, %c1, order=Order.weak, scope=none)"""
    w = np.zeros(2, np.uint64)
    for seed in range(4):
        outcome = run("%w: view<u64, 1, read_write, device>", body, [w], grid=3, schedule=Schedule.RANDOM, seed=seed)
        assert outcome.faults == [Fault(FaultKind.ASSERT, "expected one", 0, 0, None, 0, 1)]
    assert w.tolist() == [0, 0]


def test_prints_say_who_printed() -> None:
    body = '%p = program_id() : i64 %n = iota() : i32[2] print(%p, %n, prefix="at")'
    outcome = run("", body, [], grid=2, ranks=2)
    assert [(p.rank, p.program, p.prefix, [v.tolist() for v in p.values]) for p in outcome.printed] == [
        (r, k, "at", [k, [0, 1]]) for r in range(2) for k in range(2)
    ]


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("params", "args", "message"),
    [
        ("%x: view<f32, 1, read>", [], "args: expected 1 for k, got 0"),
        ("%x: view<f32, 1, read>", [np.zeros(2)], "x: expected an array of f32 of rank 1, got float64 of rank 1"),
        ("%x: view<f32, 1, read>", [[1, 2]], "x: expected an array of f32 of rank 1, got list"),
        ("%x: symmetric<f32, 1, read>", [PerRank([])], "x: expected one array for each of 1 ranks, got 0"),
        ("%p: ptr<f32>", [np.zeros(4, np.float32)[::2]], "pointer: expected a contiguous array, got strides (8,)"),
        ("%s: signal", [3], "s: expected a mapping from field to arrays for signal, got int"),
    ],
)
def test_wrong_arguments(params: str, args, message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        run(params, "", args, flags=" unsafe")
    assert str(caught.value) == message


def test_scalars_are_converted_to_their_type() -> None:
    out = np.zeros(1, np.float32)
    body = "%y = binary(%x, %x, fn=Binary.add) : f32 word_store(%out, %y, %c0, order=Order.weak, scope=none)"
    run("%x: f32, %out: view<f32, 1, write>", body, [0.1, out])
    assert out[0] == np.float32(0.1) * 2


def test_facts_left_to_the_launch_are_checked() -> None:
    kernel = parse_kernel("kernel @k(%x: view<f32, 1, read>, %y: symmetric<f32, 1, read>) { return() }")
    kernel.facts["launch_checks"] = [LaunchCheck("x must fit y", "x", 0, 4, "y", 0, 4)]
    run_grid(kernel, 1, [np.zeros(4, np.float32), np.zeros(4, np.float32)])
    with pytest.raises(LaunchError) as caught:
        run_grid(kernel, 1, [np.zeros(5, np.float32), np.zeros(4, np.float32)])
    assert str(caught.value) == "x must fit y: got 2 and 1 tiles"


def test_ops_of_protocols_have_no_meaning_of_their_own() -> None:
    with pytest.raises(InternalError) as caught:
        run("%s: signal", "notify(%s, %c0)", [new_signal(1, 1)])
    assert str(caught.value) == "notify has no meaning of its own: expand protocols first"
