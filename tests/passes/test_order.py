"""Which operations on memory may change places."""

import itertools

import pytest

from peertile.ir.core import Op
from peertile.ir.text import parse_kernel
from peertile.passes.order import conflicts, order_memory, predecessors

PARAMS = (
    "%x: view<f32, 1, read>, %z: view<f32, 1, read_write, tile=[4]>, %w: view<u64, 1, read_write, device>, "
    "%s: symmetric<f32, 1, read_write>, %s2: symmetric<f32, 1, read_write>, %p: ptr<f32>, %i: i64, %c: bool, %f: f32"
)
OPS = {
    "load x": "%a = load(%x, %i) : f32[4]",
    "load z": "%b = load(%z, %i) : f32[4]",
    "store z": "store(%z, %t, %i)",
    "store z 0": "store(%z, %t, %c0)",
    "load z 1": "%b1 = load(%z, %c1) : f32[4]",
    "word of z 1": "%b2 = word_load(%z, %c1, order=Order.weak, scope=none) : f32",
    "load s": "%d = load(%v, %i) : f32[4]",
    "store s": "store(%v, %t, %i)",
    "store s2": "store(%v2, %t, %i)",
    "word": "word_store(%w, %e, %i, order=Order.relaxed, scope=Scope.device)",
    "release": "word_store(%w, %e, %i, order=Order.release, scope=Scope.device)",
    "wait": "%g = wait(%w, %e, %i, cmp=Cmp.ge, scope=Scope.device) : u64",
    "fence": "fence(scope=Scope.system)",
    "pointer": "%k = ptr_store(%p, %f, order=Order.weak, scope=none) : token",
    "check": "check(%c)",
    "print": "print(%f)",
    "add": "%h = binary(%i, %i, fn=Binary.add) : i64",
    "loop with a store": "for(%i, %i, %i) (%q: i64) { store(%z, %t, %q) continue() }",
    "if with a load": "if(%c) { %m = load(%z, %i) : f32[4] yield() } else { yield() }",
}
HEAD = """%c0 = const(value=0) : i64 %c1 = const(value=1) : i64 %e = const(value=1) : u64 %t = broadcast(%f) : f32[4]
%v = peer_view(%s, %i) : view<f32, 1, read_write, peer> %v2 = peer_view(%s2, %i) : view<f32, 1, read_write, peer>
"""


def kernel():
    return parse_kernel(f"kernel @k({PARAMS}) unsafe {{ {HEAD} {' '.join(OPS.values())} return() }}")


def named() -> dict[str, Op]:
    return dict(zip(OPS, kernel().body.ops[6:-1], strict=True))


Z = ("load z", "store z", "store z 0", "load z 1", "word of z 1")
S = ("load s", "store s", "store s2")
ORDERED = {
    ("load z", "store z"), ("load z", "store z 0"), ("store z", "store z 0"), ("store z", "load z 1"),
    ("store z", "word of z 1"), ("store z 0", "word of z 1"),
    *itertools.combinations((*S, "word"), 2),
    *(("pointer", n) for n in ("load x", "word", *Z, *S)),
    *((n, "loop with a store") for n in ("pointer", *Z)),
    *((n, "if with a load") for n in ("store z", "store z 0", "pointer", "loop with a store")),
    *((n, m) for n in ("release", "wait", "fence", "check") for m in OPS if m not in ("add", n)),
}  # fmt: skip


@pytest.mark.sentence("MM-10")
@pytest.mark.parametrize("pair", list(itertools.combinations(OPS, 2)), ids="-".join)
def test_pairs(pair: tuple[str, str]) -> None:
    a, b = pick(pair)
    expected = pair in ORDERED or pair[::-1] in ORDERED
    assert conflicts(a, b) is expected
    assert conflicts(b, a) is expected


def pick(pair: tuple[str, str]) -> tuple[Op, Op]:
    found = named()
    return found[pair[0]], found[pair[1]]


def test_predecessors_are_the_earlier_conflicting_ops() -> None:
    found = named()
    block = found["load x"].parent
    before = {op: name for name, op in found.items()}
    order = predecessors(block)
    assert [before[op] for op in order[found["store z"]]] == ["load z"]
    assert [before[op] for op in order[found["load s"]]] == []
    assert found["add"] not in order
    assert found["print"] not in order


def test_the_pass_covers_nested_blocks() -> None:
    k = order_memory(kernel())
    nested = [op.NAME for op in k.facts["order"] if op.parent.parent is not None]
    assert nested == ["store", "load"]
