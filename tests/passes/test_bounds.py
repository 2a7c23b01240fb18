"""Bounds of accesses: proven, left to the launch, checked in the kernel, or refused."""

import numpy as np
import pytest

from peertile.errors import CompileError
from peertile.ir import ops
from peertile.ir.core import Kernel, walk
from peertile.ir.ops import Bounds
from peertile.ir.text import parse_kernel, print_kernel
from peertile.ir.verify import verify
from peertile.meaning import FaultKind, PerRank, run_grid
from peertile.passes.bounds import LaunchCheck, decide_bounds
from peertile.passes.simplify import simplify

PARAMS = (
    "%x: view<f32, 1, read>, %y: view<f32, 1, read>, %m: view<f32, 2, read>, %z: view<f32, 1, read_write, tile=[4]>, "
    "%s: symmetric<f32, 1, read_write>, %u: symmetric<f32, 1, read_write>, %i: i64, %n: i64, %c: bool"
)
HEAD = "%c0 = const(value=0) : i64 %c1 = const(value=1) : i64 %c2 = const(value=2) : i64 %p = program_id() : i64\n"


def decided(body: str, **options) -> Kernel:
    kernel = parse_kernel(f"kernel @k({PARAMS}) {{ {HEAD} {body} return() }}")
    decide_bounds(kernel, **options)
    verify(kernel, bounds_known=True)
    return kernel


def bounds(body: str) -> list[Bounds]:
    kernel = decided(body)
    found = [op.attrs["bounds"] for op in walk(kernel.body) if "bounds" in op.attrs]
    counts = {b.value: found.count(b) for b in (Bounds.PROVEN, Bounds.LAUNCH, Bounds.KERNEL)}
    assert kernel.facts["bounds"] == counts
    assert (Bounds.LAUNCH in found) == bool(kernel.facts["launch_checks"])
    checks = sum(isinstance(op, ops.Check) for op in walk(kernel.body))
    assert bool(checks) == (Bounds.KERNEL in found)
    return found


LOAD = "%t = load(%x, INDEX) : f32[4]"
AT_K = "%t = load(%x, %k) : f32[4]"
MAYBE = "if(%c) { ACCESS yield() } else { yield() }"
TILES = "%h = num_tiles(%x, axis=0, size=4) : i64 "


def loop(hi: str, access: str, lo: str = "%c0", step: str = "%c1") -> str:
    return f"for({lo}, {hi}, {step}) (%k: i64) {{ {access} continue() }}"


PROVEN = {
    "no further than the last tile": TILES
    + """%l = binary(%h, %c1, fn=Binary.sub) : i64
      %last = binary(%l, %c0, fn=Binary.max) : i64 %np = num_programs() : i64 %g = binary(%p, %np, fn=Binary.mul) : i64
      %j = binary(%g, %last, fn=Binary.min) : i64 %t = load(%x, %j) : f32[4]""",
    "anything between the first tile and the last one": TILES
    + """%l = binary(%h, %c1, fn=Binary.sub) : i64 %last = binary(%l, %c0, fn=Binary.max) : i64
      %g = binary(%i, %c0, fn=Binary.max) : i64 %j = binary(%g, %last, fn=Binary.min) : i64 %t = load(%x, %j) : f32[4]""",
    "constant 0": LOAD.replace("INDEX", "%c0"),
    "own tile": "%j = tile_index(%z, %p) : i64 %t = load(%z, %j) : f32[4] store(%z, %t, %j)",
    "loop over the view's own tiles": "%h = num_tiles(%x, axis=0, size=4) : i64 " + loop("%h", AT_K),
    "larger tiles are fewer": "%h = num_tiles(%x, axis=0, size=8) : i64 " + loop("%h", AT_K),
    "from a program on": "%h = num_tiles(%x, axis=0, size=4) : i64 %np = num_programs() : i64 "
    + loop("%h", AT_K, "%p", "%np"),
    "from a program and rank on": """%h = num_tiles(%s, axis=0, size=4) : i64 %np = num_programs() : i64
      %me = rank(%s) : i64 %nr = num_ranks(%s) : i64
      %a = binary(%p, %nr, fn=Binary.mul) : i64 %b = binary(%a, %me, fn=Binary.add) : i64
      %st = binary(%np, %nr, fn=Binary.mul) : i64
      """
    + loop("%h", "%v = peer_view(%s, %i) : view<f32, 1, read_write, peer> %t = load(%v, %k) : f32[4]", "%b", "%st"),
    "tiles of another rank's part": "%w = peer_view(%s, %i) : view<f32, 1, read_write, peer> "
    "%h = num_tiles(%w, axis=0, size=4) : i64 "
    + loop("%h", "%v = peer_view(%s, %n) : view<f32, 1, read_write, peer> %t = load(%v, %k) : f32[4]"),
    "minimum": "%h0 = num_tiles(%x, axis=0, size=4) : i64 %h = binary(%h0, %n, fn=Binary.min) : i64 "
    + loop("%h", AT_K),
}


@pytest.mark.parametrize("name", PROVEN)
def test_proven(name: str) -> None:
    assert set(bounds(PROVEN[name])) == {Bounds.PROVEN}


def test_load_like_is_left_to_the_launch() -> None:
    kernel = decided("%j = tile_index(%z, %p) : i64 %t = load(%x, %j) : f32[4] %t1 = load(%x, %j) : f32[4]")
    text = "tiles of 4 along axis 0 of z must be no more than tiles of 4 along axis 0 of x"
    assert kernel.facts["launch_checks"] == [LaunchCheck(text, "z", 0, 4, "x", 0, 4)]
    assert kernel.facts["bounds"] == {"proven": 0, "launch": 2, "kernel": 0}


def test_loop_over_the_tiles_of_another_view_is_left_to_the_launch() -> None:
    body = "%h = num_tiles(%m, axis=1, size=8) : i64 " + loop("%h", AT_K)
    kernel = decided(body)
    text = "tiles of 8 along axis 1 of m must be no more than tiles of 4 along axis 0 of x"
    assert kernel.facts["launch_checks"] == [LaunchCheck(text, "m", 1, 8, "x", 0, 4)]


def test_symmetric_objects_are_compared_by_name() -> None:
    access = "%v = peer_view(%u, %i) : view<f32, 1, read_write, peer> %t = load(%v, %k) : f32[4]"
    kernel = decided("%h = num_tiles(%s, axis=0, size=4) : i64 " + loop("%h", access))
    assert [(c.lhs, c.rhs) for c in kernel.facts["launch_checks"]] == [("s", "u")]


KERNEL = {
    "unknown index": LOAD.replace("INDEX", "%i"),
    "constant above 0": LOAD.replace("INDEX", "%c1"),
    "program index": LOAD.replace("INDEX", "%p"),
    "loop to an unknown end": loop("%n", AT_K),
    "loop from an unknown start": TILES + loop("%h", AT_K, "%i"),
    "smaller tiles are more": "%h = num_tiles(%x, axis=0, size=2) : i64 " + loop("%h", MAYBE.replace("ACCESS", AT_K)),
    "one more than the tiles": TILES.replace("%h", "%h0")
    + "%h = binary(%h0, %c1, fn=Binary.add) : i64 "
    + loop("%h", AT_K),
    "behind the variable of a proven loop": TILES
    + loop("%h", "%k1 = binary(%k, %c1, fn=Binary.add) : i64 %t = load(%x, %k1) : f32[4]"),
    "carried value": TILES
    + "%r = for(%c0, %h, %c1, %c0) : i64 (%k: i64, %a: i64) { %t = load(%x, %a) : f32[4] continue(%k) }",
    "join of two": "%j = if(%c) : i64 { yield(%c0) } else { yield(%i) } %t = load(%x, %j) : f32[4]",
    "another axis of the tile": "%j = tile_index(%z, %p) : i64 %t = load(%m, %c0, %j) : f32[4, 4]",
    "access that may not run": "%j = tile_index(%z, %p) : i64 " + MAYBE.replace("ACCESS", "%t = load(%x, %j) : f32[4]"),
    "access behind a return": "%j = tile_index(%z, %p) : i64 if(%c) { return() } else { yield() } "
    "%t = load(%x, %j) : f32[4]",
}


@pytest.mark.parametrize("name", [n for n in KERNEL if n != "another axis of the tile"])
def test_checked_in_the_kernel(name: str) -> None:
    assert set(bounds(KERNEL[name])) == {Bounds.KERNEL}


def test_axes_are_told_apart() -> None:
    kernel = decided(KERNEL["another axis of the tile"])
    assert [(c.rhs, c.rhs_axis) for c in kernel.facts["launch_checks"]] == [("m", 1)]


@pytest.mark.sentence("BD-24")
@pytest.mark.feature("S4", "cpu")
def test_sum_that_may_wrap_proves_nothing() -> None:
    # Products of extents may pass 2^63: then they are negative.
    body = """%e = extent(%x, axis=0) : i64 %e2 = binary(%e, %e, fn=Binary.mul) : i64
      %h = num_tiles(%x, axis=0, size=4) : i64 """ + loop("%h", AT_K, "%e2")
    assert bounds(body) == [Bounds.KERNEL]


def test_minimum_of_two_views_is_checked_in_the_kernel() -> None:
    body = """%h0 = num_tiles(%y, axis=0, size=4) : i64 %h1 = num_tiles(%z, axis=0, size=4) : i64
      %h = binary(%h0, %h1, fn=Binary.min) : i64 """ + loop("%h", AT_K)
    assert bounds(body) == [Bounds.KERNEL]


@pytest.mark.sentence("BD-20")
def test_negative_constant_is_refused() -> None:
    with pytest.raises(CompileError) as caught:
        decided(
            "%neg = const(value=-1) : i64 store(%z, %t0, %neg)".replace("store(%z, %t0", "%t = load(%x").replace(
                "%neg)", "%neg) : f32[4]"
            )
        )
    assert str(caught.value) == (
        "load: tile index of axis 0 of x: expected 0 or more, got -1; tile indices count from the beginning of the view"
    )


def test_residual_checks_can_be_refused() -> None:
    decided(PROVEN["own tile"], residual=False)
    with pytest.raises(CompileError) as caught:
        decided(KERNEL["unknown index"], residual=False)
    assert str(caught.value) == (
        "load: tile index of axis 0 of x cannot be proven to be in bounds, and checks in the kernel are off; "
        "loop over num_tiles, or use the index of a tile"
    )


def test_accesses_that_are_decided_stay_as_they_are() -> None:
    kernel = decided("%t = load(%x, %i, bounds=Bounds.proven) : f32[4]")
    assert kernel.facts["bounds"] == {"proven": 0, "launch": 0, "kernel": 0}


# ---------------------------------------------------------------- checks in the kernel


def text_of(body: str) -> str:
    return print_kernel(simplify(decided(body))).split("{\n", 1)[1]


def test_check_stands_in_front_of_the_access() -> None:
    assert (
        text_of("%t = load(%x, %i) : f32[4]")
        == """\
  %c0 = const(value=0) : i64
  %c1 = const(value=1) : i64
  %0 = num_tiles(%x, axis=0, size=4) : i64
  %1 = binary(%0, %c1, fn=Binary.max) : i64
  %2 = compare(%i, %c0, fn=Compare.ge) : bool
  %3 = compare(%i, %1, fn=Compare.lt) : bool
  %4 = binary(%2, %3, fn=Binary.and) : bool
  check(%4, %i, %1, kind=CheckKind.bounds, message="tile index of axis 0 of x is out of bounds")
  %t = load(%x, %i, bounds=Bounds.kernel) : f32[4]
  return()
}
"""
    )


def depth_of_checks(body: str) -> list[int]:
    def depth(op) -> int:
        owner = op.parent.parent
        return 0 if owner is None else 1 + depth(owner)

    return [depth(op) for op in walk(decided(body).body) if isinstance(op, ops.Check)]


def test_one_check_serves_later_accesses() -> None:
    twice = "%t = load(%x, %i) : f32[4] %t1 = load(%x, %i) : f32[4]"
    assert depth_of_checks(twice) == [0]
    assert depth_of_checks(twice + loop("%n", "%t2 = load(%x, %i) : f32[4]")) == [0]
    assert depth_of_checks(
        "if(%c) { %t = load(%x, %i) : f32[4] yield() } else { %q = load(%x, %i) : f32[4] yield() }"
    ) == [1, 1]


def test_checks_leave_loops_that_always_run_to_their_end() -> None:
    invariant, variable = "%t = load(%x, %i) : f32[4]", AT_K
    assert depth_of_checks(loop("%n", invariant)) == [0]
    assert depth_of_checks(loop("%n", variable)) == [0]
    assert depth_of_checks(loop("%n", variable, step="%c2")) == [1]
    leaves = "if(%c) { break() } else { yield() }"
    assert depth_of_checks(loop("%n", invariant + leaves)) == [1]
    assert depth_of_checks(loop("%n", f"if(%c) {{ {invariant} yield() }} else {{ yield() }}")) == [2]
    wait = "wait_signal(%sig, %c0)"
    kernel = f"kernel @k(%sig: signal, {PARAMS}) {{ {HEAD} {loop('%n', wait + invariant)} return() }}"
    found = decide_bounds(parse_kernel(kernel))
    assert [op.parent.parent is None for op in walk(found.body) if isinstance(op, ops.Check)] == [False]


def test_check_of_an_inner_loop_leaves_both() -> None:
    inner = "for(%c0, HI, %c1) (%q: i64) { %t = load(%x, %q) : f32[4] continue() }"
    assert depth_of_checks(loop("%n", inner.replace("HI", "%n"))) == [0]
    assert depth_of_checks(loop("%n", inner.replace("HI", "%k"))) == [1]


def test_hoisted_check_means_what_it_meant() -> None:
    """Against the check in front of the access, for all small loops."""
    x = np.zeros(10, np.float32)  # three tiles of 4
    kernel = decided(loop("%n", "for(%c0, %i, %c1) (%q: i64) { %t = load(%x, %q) : f32[4] continue() }"))
    other = decided(loop("%n", "%t = load(%x, %i) : f32[4]"))
    s = PerRank([x])
    for n in range(3):
        for i in range(-1, 6):
            args = [x, x, np.zeros((4, 4), np.float32), x.copy(), s, s, i, n, False]
            for k, wrong in ((kernel, n > 0 and i > 3), (other, n > 0 and not 0 <= i < 3)):
                faults = run_grid(k, 1, args).faults
                assert [f.kind for f in faults] == ([FaultKind.BOUNDS] if wrong else [])
