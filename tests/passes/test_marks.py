"""Marks: where the pass puts them, and that a kernel with them means what it did."""

import numpy as np

from peertile.backends.cuda.emit import emit_kernel
from peertile.ir import ops
from peertile.ir.core import walk
from peertile.ir.ops import Moment
from peertile.ir.text import parse_kernel, print_kernel
from peertile.ir.verify import verify
from peertile.meaning import run_grid
from peertile.passes.marks import MARK_PARAMS, mark_moments
from peertile.passes.pipeline import run_pipeline

PARAMS = "%w: view<u64, 1, read_write, device>, %sig: signal, %cnt: counter, %p: ptr<u32>, %i: i64, %c: bool"


def marked(body, params=PARAMS):
    lines = "".join(f"  {line}\n" for line in body.strip().splitlines())
    kernel = run_pipeline(parse_kernel(f"kernel @k({params}) unsafe {{\n{lines}}}\n"))
    mark_moments(kernel)
    verify(kernel, expanded=True, bounds_known=True)
    return kernel


def moments(kernel):
    return [(op.attrs["moment"], op.attrs["what"]) for op in walk(kernel.body) if isinstance(op, ops.Mark)]


def test_a_program_is_marked_where_it_begins_and_at_every_end():
    kernel = marked("if(%c) {\n  return()\n} else {\n  yield()\n}\nreturn()")
    assert moments(kernel) == [(Moment.BEGIN, ""), (Moment.END, ""), (Moment.END, "")]
    assert kernel.param_names[-2:] == MARK_PARAMS
    assert parse_kernel(print_kernel(kernel)).param_names == kernel.param_names


def test_the_names_of_its_parameters_are_free():
    kernel = marked("return()", "%timeline_buffer: i64, %timeline_number_: i64")
    assert kernel.param_names == ("timeline_buffer", "timeline_number_", "timeline_buffer_", "timeline_number")


def test_a_signal_is_marked_before_the_release_and_around_the_wait():
    kernel = marked("%o = const(value=1) : i64\nnotify(%sig, %i, %o)\nwait_signal(%sig, %i, %o)\nreturn()")
    inner = moments(kernel)[1:-1]
    assert inner == [(Moment.NOTIFY, "sig"), (Moment.WAIT, "sig"), (Moment.WAITED, "sig")]
    text = print_kernel(kernel).splitlines()
    release = next(k for k, line in enumerate(text) if "Order.release" in line)
    assert "Moment.notify" in text[release - 1]


def test_words_and_pointers_that_are_released_are_marked_and_others_are_not():
    kernel = marked(
        "%v = const(value=3) : u64\n%u = const(value=3) : u32\n"
        "word_store(%w, %v, %i, order=Order.release, scope=Scope.device)\n"
        "word_store(%w, %v, %i, order=Order.relaxed, scope=Scope.device)\n"
        "%r = word_rmw(%w, %v, %i, rmw=Rmw.add, order=Order.acq_rel, scope=Scope.device) : u64\n"
        "%k = ptr_store(%p, %u, order=Order.release, scope=Scope.system) : token\nreturn()"
    )
    assert moments(kernel)[1:-1] == [(Moment.NOTIFY, "w"), (Moment.NOTIFY, "w"), (Moment.NOTIFY, "p")]


def test_a_loop_that_polls_is_a_wait_for_the_word_that_it_reads():
    kernel = marked(
        "%z = const(value=0) : u32\nloop() {\n"
        "  %v, %k = ptr_load(%p, %z, order=Order.acquire, scope=Scope.system) : u32, token\n"
        "  %ok = compare(%v, %z, fn=Compare.ne) : bool\n"
        "  if(%ok) {\n    break()\n  } else {\n    yield()\n  }\n  continue()\n}\nreturn()"
    )
    assert moments(kernel)[1:-1] == [(Moment.WAIT, "p"), (Moment.WAITED, "p")]


def test_a_wait_for_any_of_several_words_ends_by_the_one_that_it_saw():
    kernel = marked(
        "%v = const(value=1) : u64\n%o = const(value=1) : i64\n"
        '%k = wait_any(%w, %v, %i, %w, %v, %o, cmp=Cmp.ge, scope=Scope.device, what="either") : i64\nreturn()'
    )
    assert moments(kernel)[1:-1] == [(Moment.WAIT, "either"), (Moment.WAITED, "either"), (Moment.WAITED, "either")]


def test_marks_change_no_result():
    text = (
        "kernel @k(%z: view<f32, 1, read_write>, %i: i64) {\n  %v = const(value=2.5) : f32\n"
        "  %t = broadcast(%v) : f32[4]\n  %p = program_id() : i64\n  store(%z, %t, %p)\n  return()\n}\n"
    )
    kernel = run_pipeline(parse_kernel(text), residual_checks=True)
    mark_moments(kernel)
    z = np.zeros(8, np.float32)
    run_grid(kernel, 2, [z, 1, 0, 0])
    assert z.tolist() == [2.5] * 8


def test_code_for_gpus_passes_the_buffer_and_the_number():
    emitted = emit_kernel(marked("return()"))
    assert [p.name for p in emitted.parameters][-10:-8] == list(MARK_PARAMS)
    assert emitted.source.count("    _mark(timeline_buffer, ") == 2
    assert [place.kind for place in emitted.places] == ["mark", "mark"]
