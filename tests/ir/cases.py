"""One small body per op, valid, for the tests that walk all ops; and the parameters they share.

`%i` is an index, `%c` a bool, `%t` a f32[4] tile, `%n` an i32[4] tile, `%m` a f32[4, 8] tile.
"""

from __future__ import annotations

PARAMS = (
    "%x: view<f32, 2, read>, %z: view<f32, 2, read_write, tile=[4, 8], swizzle=2>, %y: view<f32, 1, read_write>, "
    "%w: view<u64, 1, read_write, device>, %s: symmetric<f32, 1, read_write>, %u: symmetric<u64, 2, read_write>, "
    "%sig: signal, %cnt: counter, %bar: barrier, %box: mailbox<f32[4], depth=2>, %p: ptr<f32>, %q: ptr<u32>, "
    "%i: i64, %c: bool, %f: f32, %mv: multicast<f32, 1, unit=[1], align=64>, %mw: multicast<u32, 1, hardware>"
)
PRELUDE = """\
  %t = broadcast(%f) : f32[4]
  %m = broadcast(%f) : f32[4, 8]
  %n = iota() : i32[4]
  %one = const(value=1) : i64
"""


def kernel_text(body: str, flags: str = " unsafe") -> str:
    """A kernel of `body` (without the final return)."""
    lines = "".join(f"  {line}\n" for line in body.strip().splitlines())
    return f"kernel @k({PARAMS}){flags} {{\n{PRELUDE}{lines}  return()\n}}\n"


CASES: dict[str, str] = {
    "const": "%r = const(value=-3) : i8\n%r1 = const(value=nan) : f32\n%r2 = const(value=true) : bool\n"
    "%r3 = const(value=-0.0) : f64\n%r4 = const(value=-inf) : bf16\n%r5 = const(value=18446744073709551615) : u64\n"
    "%r6 = const(value=1e-45) : f64",
    "program_id": "%r = program_id(axis=1) : i64",
    "num_programs": "%r = num_programs(axis=2) : i64",
    "rank": "%r = rank(%s) : i64",
    "num_ranks": "%r = num_ranks(%s) : i64",
    "extent": "%r = extent(%x, axis=1) : i64",
    "num_tiles": "%r = num_tiles(%x, axis=1, size=8) : i64",
    "tile_index": "%a, %b = tile_index(%z, %i) : i64, i64",
    "iota": "%r = iota() : u8[16]",
    "unary": "%r = unary(%t, fn=Unary.exp) : f32[4]",
    "binary": "%r = binary(%t, %t, fn=Binary.atan2) : f32[4]",
    "compare": "%r = compare(%n, %n, fn=Compare.at_least) : bool[4]",
    "select": "%r = select(%c, %i, %one) : i64",
    "fma": "%r = fma(%t, %t, %t) : f32[4]",
    "cast": "%r = cast(%t) : i8[4]\n%r1 = cast(%n, saturate=true) : u8[4]\n%r2 = cast(%t, rounding=Rounding.up) : f16[4]",
    "bitcast": "%r = bitcast(%t) : u32[4]",
    "broadcast": "%r = broadcast(%f) : f32[2, 2]\n%a = reshape(%t) : f32[4, 1]\n%b = broadcast(%a) : f32[4, 8]",
    "reshape": "%r = reshape(%m) : f32[2, 16]",
    "permute": "%r = permute(%m, axes=[1, 0]) : f32[8, 4]",
    "reduce": "%r = reduce(%m, fn=Fold.add, axis=1) : f32[4]",
    "reduce_with": "%r, %r1 = reduce_with(%m, %m, axis=1) : f32[4], f32[4] (%a: f32, %b: f32, %a1: f32, %b1: f32) {\n  %s_ = binary(%a, %a1, fn=Binary.add) : f32\n  yield(%s_, %b)\n}",
    "scan_with": "%r = scan_with(%n, axis=0, reverse=true) : i32[4] (%a: i32, %b: i32) {\n  %k = binary(%a, %b, fn=Binary.max) : i32\n  yield(%k)\n}",
    "sort": "%r, %r1 = sort(%t, %n, axis=0, descending=true) : f32[4], i32[4]",
    "take": "%k = iota() : i8[16]\n%r = take(%t, %k, axis=0) : f32[16]",
    "extract": "%r = extract(%m, %i, %one) : f32[2, 4]",
    "insert": "%a = broadcast(%f) : f32[2, 4]\n%r = insert(%m, %a, %i, %one) : f32[4, 8]",
    "mma": "%a = reshape(%m) : f32[8, 4]\n%acc = broadcast(%f) : f32[4, 4]\n%r = mma(%m, %a, %acc) : f32[4, 4]\n%r1 = mma(%m, %a, %acc, precision=Precision.tf32) : f32[4, 4]",
    "peer_view": "%r = peer_view(%s, %i) : view<f32, 1, read_write, peer>",
    "field": '%r = field(%sig, field="sent") : view<u64, 2, read_write, device, unit=[0, 1], align=8>',
    "view_stride": "%r = view_stride(%x, axis=1) : i64",
    "view_slice": "%r = view_slice(%y, %i, %one, %i) : view<f32, 1, read_write>",
    "view_permute": "%r = view_permute(%x, axes=[1, 0]) : view<f32, 2, read>",
    "view_reshape": "%r = view_reshape(%y, %i, %one) : view<f32, 2, read_write>",
    "gather": "%r = gather(%x, %n, %i, axis=0, padding=Padding.nan) : f32[4, 8]",
    "scatter": "scatter(%y, %t, %n, axis=0)",
    "tile_load": "%r = tile_load(%y, %i, order=Order.acquire, scope=Scope.device) : f32[4]",
    "tile_store": "tile_store(%y, %t, %i, scope=Scope.system)",
    "async_store": "%r = async_store(%y, %t, %i, copies=true) : transfer",
    "wait_transfer": "%r = async_store(%y, %t, %i) : transfer\nwait_transfer(%r)\nwait_transfer()",
    "wait_any": "%v = const(value=3) : u64\n"
    '%r = wait_any(%w, %v, %i, %w, %v, %one, cmp=Cmp.at_least, scope=Scope.device, what="w") : i64',
    "load": "%r = load(%x, %i, %one, padding=Padding.neg_inf) : f32[4, 8]",
    "store": "store(%z, %m, %i, %one, bounds=Bounds.proven)",
    "tile_atomic": "tile_atomic(%y, %t, %i, rmw=Rmw.addf, scope=Scope.device)",
    "word_load": "%r = word_load(%w, %i, order=Order.acquire, scope=Scope.device) : u64",
    "word_store": "%v = const(value=3) : u64\nword_store(%w, %v, %i, order=Order.weak, scope=none)",
    "word_rmw": "%v = const(value=3) : u64\n"
    "%r = word_rmw(%w, %v, %i, rmw=Rmw.xchg, order=Order.acq_rel, scope=Scope.device) : u64",
    "wait": '%v = const(value=3) : u64\n%r = wait(%w, %v, %i, cmp=Cmp.ge, scope=Scope.device, what="w \\"0\\"") : u64',
    "fence": "fence(scope=Scope.system)",
    "fence_alias": "fence_alias()\n%a = new_token() : token\n%r = fence_alias(%a) : token",
    "launch_words": "%r = launch_words() : view<u64, 1, read_write, device>",
    "suspend": "suspend()\nsuspend(continues=true)",
    "check": 'check(%c, %i, %one, kind=CheckKind.bounds, message="too\\nfar")',
    "print": 'print(%t, %i, prefix="t")',
    "mark": 'mark(%i, %one, moment=Moment.begin)\nmark(%i, %one, %w, %one, %i, moment=Moment.wait, what="w")\n'
    "mark(%i, %one, %p, %one, moment=Moment.notify)",
    "for": "%r = for(%one, %i, %one, %t, stages=3) : f32[4] (%k: i64, %a: f32[4]) {\n  continue(%a)\n}",
    "loop": "%r = loop(%i) : f32 (%k: i64) {\n  break(%f)\n}",
    "if": "%r, %r1 = if(%c) : i64, f32 {\n  yield(%i, %f)\n} else {\n  return()\n}",
    "yield": "if(%c) {\n  yield()\n} else {\n  yield()\n}",
    "continue": "for(%one, %i, %one) (%k: i64) {\n  if(%c) {\n    continue()\n  } else {\n    yield()\n  }\n  continue()\n}",
    "break": "loop() {\n  break()\n}",
    "return": "if(%c) {\n  return()\n} else {\n  yield()\n}",
    "new_token": "%r = new_token() : token",
    "join_tokens": "%a = new_token() : token\n%r = join_tokens(%a, %a) : token",
    "ptr_offset": "%a = ptr_broadcast(%p) : ptr<f32, [4]>\n%r = ptr_offset(%a, %n) : ptr<f32, [4]>",
    "ptr_broadcast": "%r = ptr_broadcast(%p) : ptr<f32, [2, 2]>",
    "unicast": "%r = unicast(%p) : ptr<f32, peer>",
    "ptr_load": "%r, %k = ptr_load(%p, %f, %c, order=Order.acquire, scope=Scope.system, masked=true) : f32, token",
    "ptr_store": "%a = new_token() : token\n%k = ptr_store(%p, %f, %a, order=Order.weak, scope=none, ordered=true) : token",
    "ptr_rmw": "%r, %k = ptr_rmw(%p, %f, rmw=Rmw.addf, order=Order.relaxed, scope=Scope.system) : f32, token",
    "ptr_cas": "%v = const(value=1) : u32\n%r, %k = ptr_cas(%q, %v, %v, order=Order.acq_rel, scope=Scope.device) : u32, token",
    "notify": "notify(%sig, %i)\nnotify(%sig, %i, %one)",
    "wait_signal": "wait_signal(%sig, %i, %one)",
    "counter_add": "counter_add(%cnt, %i, %one, %i)",
    "counter_wait": "counter_wait(%cnt, %i, %one)",
    "barrier_sync": "barrier_sync(%bar, all_programs=true)",
    "barrier_arrive": "barrier_arrive(%bar)\nbarrier_wait(%bar)",
    "barrier_wait": "barrier_arrive(%bar)\nnotify(%sig, %i)\nbarrier_wait(%bar)",
    "sync_programs": "sync_programs()",
    "box_post": "box_post(%box, %t)",
    "box_round": "box_round(%box)",
    "box_put": "box_put(%box, %t, %i)",
    "box_flush": "box_flush(%box)",
    "box_collect": "box_collect(%box)",
    "box_take": "%r, %b = box_take(%box, %i) : f32[4], bool",
    "box_release": "box_release(%box)",
    "multicast_load": "%r = multicast_load(%mv, %i, rmw=Rmw.addf, order=Order.acquire, scope=Scope.system) : f32[4]\n"
    "%r1 = multicast_load(%mv, %i, rmw=Rmw.addf) : f32[4]",
    "multicast_reduce": "multicast_reduce(%mv, %t, %i, rmw=Rmw.addf, scope=Scope.system)",
    "multicast_store": "multicast_store(%mv, %t, %i, order=Order.release, scope=Scope.system, bounds=Bounds.proven)",
    "multicast_bulk": "multicast_bulk(%mv, %t, %i)\nmulticast_bulk(%mv, %t, %i, rmw=Rmw.addf)",
    "multicast_signal": "%e = const(value=1) : u32\nmulticast_signal(%mw, %e, %i)\nmulticast_signal(%mw, %e, %i, add=true)",
}
