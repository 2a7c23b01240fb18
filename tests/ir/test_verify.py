"""The verifier: structure, tiers, stages, every op's own rule, memory order; with the whole message."""

import pytest
from tests.ir.cases import CASES, kernel_text
from tests.ir.rejected import REJECTED

from peertile.dtypes import f32, i64
from peertile.errors import VerifyError
from peertile.ir import ops
from peertile.ir.core import Block, Builder, Kernel, Op
from peertile.ir.text import parse_kernel
from peertile.ir.types import MailboxType, Partition, PointerType, TileType, ViewType
from peertile.ir.verify import order_faults, verify
from peertile.source import Loc

INDEX = TileType(i64)


@pytest.mark.parametrize("name", CASES)
def test_right_use_of_an_op_passes(name: str) -> None:
    verify(parse_kernel(kernel_text(CASES[name])))


@pytest.mark.parametrize(("name", "body", "message"), REJECTED)
def test_wrong_use_of_an_op_is_rejected(name: str, body: str, message: str) -> None:
    assert message.startswith(name + ": ")
    with pytest.raises(VerifyError) as caught:
        verify(parse_kernel(kernel_text(body)))
    assert str(caught.value) == message


def rejected(kernel: Kernel, **options: bool) -> str:
    with pytest.raises(VerifyError) as caught:
        verify(kernel, **options)
    return str(caught.value)


def kernel(*ops_: Op, params=(), names=None, **options) -> Kernel:
    body = Block(params)
    for op in ops_:
        body.append(op)
    return Kernel("k", names if names is not None else tuple(f"p{i}" for i in range(len(params))), body, **options)


def test_block_without_terminator() -> None:
    assert rejected(kernel(ops.Suspend())) == "kernel k: block: expected a terminator at its end, got suspend"
    assert rejected(kernel()) == "kernel k: block: expected a terminator at its end, got nothing"
    loop = ops.Loop(blocks=(Block(),))
    assert rejected(kernel(loop, ops.Return())) == "loop: block: expected a terminator at its end, got nothing"


def test_terminator_before_the_end() -> None:
    assert rejected(kernel(ops.Return(), ops.Return())) == ("return: a terminator must be the last op of its block")


def test_value_used_before_its_definition() -> None:
    late = ops.ProgramId((), (INDEX,))
    early = ops.Print([late.result])
    assert rejected(kernel(early, late, ops.Return())) == "print: operand 0 (<Value %0: i64>) is not visible here"


def test_value_of_a_nested_block_is_not_visible_outside() -> None:
    inner = Block()
    b = Builder(inner)
    value = b.value(ops.ProgramId, (), INDEX)
    b.emit(ops.Break)
    assert rejected(kernel(ops.Loop(blocks=(inner,)), ops.Print([value]), ops.Return())) == (
        "print: operand 0 (<Value %0: i64>) is not visible here"
    )


def test_op_in_two_places() -> None:
    op = ops.Suspend()
    assert rejected(kernel(op, op, ops.Return())) == "suspend: the op hangs in two places"


def test_wrong_links() -> None:
    op = ops.Suspend()
    k = kernel(op, ops.Return())
    op.parent = None
    assert rejected(k) == "suspend: its parent is another block"
    block = Block()
    block.append(ops.Break())
    loop = ops.Loop(blocks=(block,))
    block.parent = None
    assert rejected(kernel(loop, ops.Return())) == "loop: a block has another parent"


def test_counts_of_operands_results_and_blocks() -> None:
    assert rejected(kernel(ops.Suspend(result_types=(INDEX,)), ops.Return())) == "suspend: results: expected 0, got 1"
    assert rejected(kernel(ops.Loop(), ops.Return())) == "loop: blocks: expected 1, got 0"
    assert rejected(kernel(ops.Store(), ops.Return())) == "store: operands: expected at least 2, got 0"
    assert rejected(kernel(ops.Notify(), ops.Return())) == "notify: operands: expected 2 to 3, got 0"


def test_attributes() -> None:
    t = TileType(f32)
    assert rejected(kernel(ops.Fence(), ops.Return())) == "fence: attribute scope: required, got none"
    assert rejected(kernel(ops.Suspend(attrs={"x": 1}), ops.Return())) == (
        "suspend: attribute x: there is none of this name"
    )
    assert rejected(kernel(ops.ProgramId((), (INDEX,), {"axis": True}), ops.Return())) == (
        "program_id: attribute axis: expected int, got True"
    )
    assert rejected(kernel(ops.Fence(attrs={"scope": "system"}), ops.Return())) == (
        "fence: attribute scope: expected Scope or none, got 'system'"
    )
    assert rejected(kernel(ops.Const((), (t,), {"value": "1"}), ops.Return())) == (
        "const: attribute value: expected int or float or bool, got '1'"
    )


def test_foreign_op() -> None:
    class Strange(Op):
        NAME = "strange"

    assert rejected(kernel(Strange(), ops.Return())) == "strange: not an op of tile IR"


@pytest.mark.parametrize(
    ("t", "message"),
    [
        (TileType(f32, (3,)), "expected extents that are powers of two"),
        (TileType(f32, (2048, 1024)), "expected at most 1048576 elements in a tile"),
        (ViewType(f32, 2, partition=Partition((2048, 1024))), "expected at most 1048576 elements in a tile"),
        (MailboxType(f32, (2048, 1024), 2, False), "expected at most 1048576 elements in a tile"),
        (TileType(f32, (1,) * 7), "expected a tile rank of at most 6"),
        (ViewType(f32, 5), "expected a rank of at most 4"),
        (ViewType(f32, 2, unit_stride=(True,)), "expected one unit-stride promise per axis"),
        (ViewType(f32, 1, divisible=(2, 2)), "expected one divisibility promise per axis"),
        (ViewType(f32, 1, align=3), "expected an alignment that is a power of two"),
        (ViewType(f32, 1, partition=Partition((4, 4))), "expected a partition with one extent per axis"),
        (ViewType(f32, 1, partition=Partition((6,))), "expected a tile shape of powers of two"),
        (ViewType(f32, 1, partition=Partition((4,), False, 0)), "expected a swizzle of at least 1"),
        (ViewType(f32, 1, partition=Partition((4,), False, 1, 2)), "expected spare programs of persistent ones"),
        (
            ViewType(f32, 2, partition=Partition((4, 4), single=(True,))),
            "expected one promise of a single tile per axis, or none",
        ),
        (MailboxType(f32, (3,), 2, False), "expected a tile shape of powers of two"),
        (MailboxType(f32, (4,), 3, False), "expected a depth that is a power of two"),
    ],
    ids=str,
)  # fmt: skip
def test_types(t, message: str) -> None:
    assert rejected(kernel(ops.Return(), params=(t,), names=("x",))) == f"kernel k: parameter x: {message}, got {t}"


def test_pointers_need_an_unsafe_kernel() -> None:
    assert rejected(kernel(ops.Return(), params=(PointerType(f32),), names=("x",))) == (
        "kernel k: parameter x: ptr<f32> belongs to kernels marked unsafe=True"
    )


def test_parameters() -> None:
    assert rejected(kernel(ops.Return(), params=(INDEX,), names=())) == (
        "kernel k: expected one name for each of 1 parameters, got 0"
    )
    assert rejected(kernel(ops.Return(), params=(INDEX, INDEX), names=("a", "a"))) == (
        "kernel k: two parameters have one name"
    )
    assert rejected(kernel(ops.Return(), grid_rank=4)) == "kernel k: grid rank: expected 1, 2 or 3, got 4"


@pytest.mark.feature("S3", "cpu")
def test_unsafe_ops_need_an_unsafe_kernel() -> None:
    assert rejected(kernel(ops.JoinTokens((), (INDEX,)), ops.Return())) == (
        "join_tokens: belongs to T.unsafe, and kernel k is not marked unsafe=True"
    )


def test_expanded_kernel_has_no_op_of_a_protocol() -> None:
    k = kernel(ops.SyncPrograms(), ops.Return())
    verify(k)
    assert rejected(k, expanded=True) == "sync_programs: must have been expanded into primitive ops"


def test_bounds_must_be_known_where_that_is_asked() -> None:
    k = parse_kernel(kernel_text(CASES["load"]))
    verify(k)
    assert rejected(k, bounds_known=True) == "load: bounds: must have been decided"


def test_error_shows_the_line_and_the_caret(tmp_path) -> None:
    source = tmp_path / "user.py"
    source.write_text("def k():\n    T.sync_programs(1)\n")
    loc = Loc(str(source), 2, 4, 20, "k")
    assert rejected(kernel(ops.Suspend(attrs={"x": 1}, loc=loc), ops.Return())) == (
        f"suspend: attribute x: there is none of this name\n  {source}:2 in k\n    T.sync_programs(1)\n    {'^' * 16}"
    )


# ---------------------------------------------------------------- memory order (S3)

RELAXED_WAIT = """
%v = const(value=3) : u64
%r = wait(%w, %v, %i, cmp=Cmp.ge, order=Order.relaxed, scope=Scope.device) : u64
"""
NOTHING = "wait: order: a relaxed wait orders nothing unless a fence follows before the next access"


@pytest.mark.feature("S3", "cpu")
@pytest.mark.parametrize(
    "rest",
    [
        "",
        "%l = load(%x, %i, %i) : f32[4, 8]\nfence(scope=Scope.system)",
        "if(%c) {\n  fence(scope=Scope.system)\n  yield()\n} else {\n  store(%y, %t, %i)\n  yield()\n}",
        "return()",
    ],
)
def test_relaxed_wait_that_no_fence_follows(rest: str) -> None:
    body = RELAXED_WAIT + rest
    text = kernel_text(body) if rest != "return()" else kernel_text(RELAXED_WAIT)
    assert rejected(parse_kernel(text)) == NOTHING


@pytest.mark.parametrize(
    "rest",
    [
        "fence(scope=Scope.system)",
        "%a = binary(%i, %one, fn=Binary.add) : i64\nfence(scope=Scope.device)\nstore(%y, %t, %i)",
        "%b = wait(%w, %v, %one, cmp=Cmp.ge, order=Order.relaxed, scope=Scope.device) : u64\nfence(scope=Scope.device)",
    ],
)
def test_relaxed_wait_with_a_fence_passes(rest: str) -> None:
    verify(parse_kernel(kernel_text(RELAXED_WAIT + rest)))


def test_fence_after_the_loop_of_relaxed_waits_counts() -> None:
    body = "%v = const(value=3) : u64\nfor(%one, %i, %one) (%k: i64) {\n"
    body += "  %r = wait(%w, %v, %k, cmp=Cmp.ge, order=Order.relaxed, scope=Scope.device) : u64\n  continue()\n}\n"
    assert rejected(parse_kernel(kernel_text(body))) == NOTHING
    verify(parse_kernel(kernel_text(body + "fence(scope=Scope.device)")))


RELEASE = "word_store(%w, %v, %i, order=Order.release, scope=Scope.device)\n"


@pytest.mark.feature("S3", "cpu")
def test_release_that_repeats_the_one_before_publishes_nothing() -> None:
    start = "%v = const(value=3) : u64\n"
    message = "word_store: order: this release publishes nothing: the one before it is the same"
    assert rejected(parse_kernel(kernel_text(start + RELEASE + RELEASE))) == message
    verify(parse_kernel(kernel_text(start + RELEASE)))
    verify(parse_kernel(kernel_text(start + RELEASE + "store(%y, %t, %i)\n" + RELEASE)))
    verify(parse_kernel(kernel_text(start + RELEASE + RELEASE.replace("%i", "%one"))))


def test_rules_of_order_can_be_listed_without_rejection() -> None:
    k = parse_kernel(kernel_text(RELAXED_WAIT))
    verify(k, order_rules=False)
    assert [f"{fault.op.NAME}: {fault.message}" for fault in order_faults(k)] == [NOTHING]
