"""The pipeline: what it takes, what it leaves, what it refuses."""

import pytest

from peertile.errors import CompileError, VerifyError
from peertile.ir import ops
from peertile.ir.core import walk
from peertile.ir.text import parse_kernel, print_kernel
from peertile.ir.verify import verify
from peertile.passes import pipeline
from peertile.passes.pipeline import run_pipeline

ALL = """kernel @k(%s: signal, %b: barrier, %o: counter, %box: mailbox<f32[4], depth=2>, %x: view<f32, 1, read>,
                 %z: view<f32, 1, read_write, tile=[4]>) {
  %p = program_id() : i64 %c0 = const(value=0) : i64
  %i = tile_index(%z, %p) : i64
  %t = load(%x, %i) : f32[4]
  notify(%s, %p) wait_signal(%s, %p)
  counter_add(%o, %p, %p, %c0) counter_wait(%o, %p, %p)
  barrier_sync(%b) barrier_sync(%b, all_programs=true) sync_programs()
  box_post(%box, %t) box_collect(%box)
  %u, %there = box_take(%box, %c0) : f32[4], bool
  box_release(%box)
  store(%z, %u, %i)
  return() }"""


def test_pipeline_leaves_primitive_ops_with_known_bounds_and_facts() -> None:
    kernel = run_pipeline(parse_kernel(ALL))
    verify(kernel, expanded=True, bounds_known=True)
    assert not any(isinstance(op, ops.EXPANDED) for op in walk(kernel.body))
    assert kernel.facts["bounds"] == {"proven": 1, "launch": 1, "kernel": 0}
    assert {"launch_checks", "order", "steering"} <= set(kernel.facts)


def test_pipeline_leaves_a_simplified_kernel_as_it_is() -> None:
    once = print_kernel(run_pipeline(parse_kernel(ALL)))
    assert print_kernel(run_pipeline(parse_kernel(once))) == once


@pytest.mark.parametrize(
    ("text", "looks"),
    [
        # In the beginning, with bounds, simplified: what expands and what only writes facts down leaves it as it is.
        ("kernel @k(%x: view<f32, 1, read>, %i: i64) { %t = load(%x, %i) : f32[4] return() }", 3),
        ("kernel @k(%s: signal, %i: i64) { notify(%s, %i) return() }", 4),
    ],
)
def test_a_kernel_is_verified_again_when_a_pass_has_changed_it(text: str, looks: int, monkeypatch) -> None:
    calls = []
    monkeypatch.setattr(pipeline, "verify_kernel", lambda kernel, **options: calls.append(verify(kernel, **options)))
    run_pipeline(parse_kernel(text))
    assert len(calls) == looks


def test_wrong_ir_is_refused_at_the_start() -> None:
    with pytest.raises(VerifyError) as caught:
        run_pipeline(parse_kernel("kernel @k(%i: i64) { break() }"))
    assert str(caught.value) == "break: place: expected inside a loop"


RELAXED = """kernel @k(%w: view<u64, 1, read_write, device>, %i: i64) { %e = const(value=1) : u64
  %v = wait(%w, %e, %i, cmp=Cmp.ge, order=Order.relaxed, scope=Scope.device) : u64 return() }"""


def test_rules_of_order_can_be_left_to_the_checker() -> None:
    with pytest.raises(VerifyError):
        run_pipeline(parse_kernel(RELAXED))
    broken = []
    run_pipeline(parse_kernel(RELAXED), broken=broken)
    nothing = "order: a relaxed wait orders nothing unless a fence follows before the next access"
    assert [fault.message for fault in broken] == [nothing], "each once, though every pass is looked at"


def test_residual_checks_can_be_refused() -> None:
    text = "kernel @k(%x: view<f32, 1, read>, %i: i64) { %t = load(%x, %i) : f32[4] return() }"
    run_pipeline(parse_kernel(text))
    with pytest.raises(CompileError):
        run_pipeline(parse_kernel(text), residual_checks=False)
