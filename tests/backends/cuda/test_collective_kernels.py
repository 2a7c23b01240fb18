"""The kernels of the collectives as a GPU gets them: what is ordered before what, what stays in registers, what fits."""

import re

import pytest
from tests.backends.cuda.util import body_of

import peertile as pt
from peertile.backends.cuda.compile import compile_kernel
from peertile.backends.cuda.emit import emit_kernel
from peertile.frontend.build import build_kernel
from peertile.language.annotations import Role
from peertile.library.cuda_collectives import PROGRAMS_PER_EXECUTOR, GpuPlans, Shape, heap_bytes
from peertile.library.reductions import ReduceOp
from peertile.library.selection import Algorithm
from peertile.passes.pipeline import run_pipeline

MULTIPROCESSOR = 65536
"""Registers that the programs of a multiprocessor share."""
FENCE = "fence.acq_rel.sys"


@pytest.fixture(scope="module")
def plans():
    """Plans for two ranks, of which one is there: the kernels are what counts."""
    with pt.SymmetricHeap(pt.init(), heap_bytes(1, 8) + (1 << 20)) as heap:
        made = GpuPlans(heap, 8)
        made.few = 2
        yield made


def all_reduce(plans, algorithm, programs, tile, count=1 << 16, *, in_place=False):
    x, out = pt.zeros((count,), pt.bf16), pt.zeros((count,), pt.bf16)
    return plans.all_reduce(Shape(algorithm, programs, tile), None if in_place else x, out, ReduceOp.SUM)


def gather(plans, tile, *, each):
    x, out = pt.zeros((1 << 16,), pt.bf16), pt.zeros((1 << 16 if each else 1 << 17,), pt.bf16)
    # One rank is there, so a matrix of one row; two rows are what two ranks have.
    plans.heap.group, saved = type("Two", (), {"size": 2, "rank": 0})(), plans.heap.group
    try:
        return plans.gather(Shape(Algorithm.PUSHED, 8, tile), x, out, each=each)
    finally:
        plans.heap.group = saved


def kernel_of(op):
    kernel, bound = op.kernel, op.bound
    names = [p.name for p in kernel.params if p.role is not Role.CONST]
    types = {name: argument.type for name, argument in zip(names, bound.arguments, strict=True)}
    return run_pipeline(build_kernel(kernel.fn, types, bound.consts, name=kernel.name))


def order_of(ptx, *words):
    """Which of `words` come in the kernel, in order, without repetitions."""
    found = [m[0] for line in ptx.splitlines() for m in [re.search("|".join(map(re.escape, words)), line)] if m]
    return [word for k, word in enumerate(found) if k == 0 or found[k - 1] != word]


@pytest.mark.parametrize("in_place", [False, True])
def test_what_was_emptied_is_ordered_before_others_are_told(plans, in_place):
    """In a launch of one turn before anything is sent; of several behind the first tile, which travels meanwhile."""
    for programs, count in ((8, 8192), (4, 1 << 16)):
        op = all_reduce(plans, Algorithm.FILLED, programs, 256, count, in_place=in_place)
        body = body_of(emit_kernel(kernel_of(op)).source, op.kernel.name)
        words = ("_fence_sys_all()", "_st_relaxed_sys_b64(", "_st_tile_relaxed_sys_b64(")
        fence, told, sent = map(body.index, words)
        # What is told first is there before the tile is.
        assert (fence < told < sent) if op.kernel.name.startswith("filled_once") else (sent < fence < told)
        # By every thread, for the places that it emptied itself, between two meetings of them.
        lines = [line.strip() for line in body.splitlines() if not line.strip().startswith("#")]
        at = lines.index("_fence_sys_all()")
        assert lines[at - 1] == lines[at + 1] == "tl.debug_barrier()"


@pytest.mark.parametrize(("tile", "mask"), [(256, 15), (1024, 1)], ids=["short", "long"])
def test_a_program_that_goes_on_orders_what_it_emptied_once_in_a_quarter_of_its_slots(plans, tile, mask):
    """Two ranks have 64 of them, or 8, and one alone as many. While the fence waits, what is taken next travels."""
    body = body_of(emit_kernel(kernel_of(all_reduce(plans, Algorithm.FILLED, 4, tile))).source, "filled_all_reduce")
    loop = body[body.index("while ") :]
    sent, fence = loop.index("_st_tile_relaxed_sys_b64("), loop.index("_fence_sys_all()")
    assert sent < fence < loop.index("_ld_patient_ne_relaxed_sys_b64")
    assert re.search(rf"= e_\d+ & {mask}\b", loop[sent:fence])
    assert body.count("_fence_sys_all()") == 1


@pytest.mark.slow
@pytest.mark.usefixtures("triton_needed")
@pytest.mark.parametrize(("programs", "count"), [(8, 8192), (4, 1 << 16)], ids=["once", "turns"])
def test_the_assembly_of_filled_places_keeps_that_order(plans, programs, count):
    ptx = compile_kernel(kernel_of(all_reduce(plans, Algorithm.FILLED, programs, 256, count))).text["ptx"]
    words = (FENCE, "st.relaxed.sys.global.b64", "PATIENT_DONE", "griddepcontrol.wait", "ld.volatile", "ld.relaxed.cta")
    found = order_of(ptx, *words)
    # Tables before the launch in front has ended, all else behind it; a fence; what is sent; what is taken; emptied.
    assert found[:3] == ["ld.relaxed.cta", "griddepcontrol.wait", "st.relaxed.sys.global.b64"]  # that it has begun
    assert found[3:7] == [FENCE, "st.relaxed.sys.global.b64", "PATIENT_DONE", "st.relaxed.sys.global.b64"]
    assert "ld.volatile" not in found
    first, last = ptx.index(FENCE), ptx.rindex(FENCE)
    assert all("bar.sync" in ptx[at - 400 : at] and "bar.sync" in ptx[at : at + 400] for at in (first, last))
    # Every wait looks at the clock: as many bounds as loops of one thread that polls.
    assert ptx.count("mov.u64 now, %globaltimer") == 2 * ptx.count("ld.acquire.sys.global.b64 word0")


PUSHED = {
    "all_reduce": (lambda p: all_reduce(p, Algorithm.PUSHED, 4, 8192), "pushed_all_reduce"),
    "all_gather": (lambda p: gather(p, 4096, each=False), "pushed_gather"),
    "all_to_all": (lambda p: gather(p, 4096, each=True), "pushed_gather"),
}


@pytest.mark.parametrize("name", PUSHED)
def test_between_two_ranks_the_turns_of_a_signal_stay_in_a_register(plans, name):
    make, kernel = PUSHED[name]
    body = body_of(emit_kernel(kernel_of(make(plans))).source, kernel)
    turns = body[body.index("while ") :]
    assert "tl.load(ready_sent" not in turns
    assert "tl.load(ready_seen" not in turns
    # No loop over ranks, whose remainders are divisions.
    assert body.count("while ") == 1
    assert "_mod(" not in turns
    assert "tl.range(" not in turns


@pytest.mark.parametrize("name", PUSHED)
def test_long_rows_taken_in_turns_have_half_of_the_warps_and_twice_the_registers(plans, name):
    made = emit_kernel(kernel_of(PUSHED[name][0](plans)))
    assert (made.num_warps, made.max_registers) == (8, 128)
    # Two programs on a multiprocessor, as with 16 warps of 64.
    assert 2 * 32 * made.num_warps * made.max_registers == MULTIPROCESSOR


def test_shorter_rows_keep_what_they_had(plans):
    made = emit_kernel(kernel_of(all_reduce(plans, Algorithm.PUSHED, 4, 4096)))
    assert (made.num_warps, made.max_registers) == (4, 128)  # four of them on a multiprocessor, as of 8 warps with 64
    made = emit_kernel(kernel_of(all_reduce(plans, Algorithm.PUSHED, 4, 2048)))
    assert (made.num_warps, made.max_registers) == (8, 64)


def test_as_many_programs_of_long_filled_tiles_are_resident_as_grids_count_on(plans):
    for count in (1 << 14, 1 << 16):  # one turn, and several
        filled = emit_kernel(kernel_of(all_reduce(plans, Algorithm.FILLED, 4, 1024, count)))
        assert (filled.num_warps, filled.max_registers) == (4, 128)
        resident = MULTIPROCESSOR // (32 * filled.num_warps * filled.max_registers)
        assert resident == PROGRAMS_PER_EXECUTOR


@pytest.mark.parametrize(
    ("algorithm", "tile"),
    [(Algorithm.FLAGGED, 256), (Algorithm.FLAGGED, 512), (Algorithm.FILLED, 128), (Algorithm.FILLED, 512)],
)
def test_programs_that_look_at_places_are_small_enough_for_two_launches_and_spill_nothing_for_more(
    plans, algorithm, tile
):
    """Four times 256 of them fit on 132 multiprocessors: so the next launch of a graph may begin early."""
    made = emit_kernel(kernel_of(all_reduce(plans, algorithm, 4, tile)))
    assert (made.num_warps, made.max_registers) == (4, 64)
    assert MULTIPROCESSOR // (32 * made.num_warps * made.max_registers) * 132 >= 4 * 256


@pytest.mark.slow
@pytest.mark.usefixtures("triton_needed")
@pytest.mark.parametrize("name", PUSHED)
def test_what_a_program_knows_beside_a_long_row_stays_in_registers(plans, name):
    binary = compile_kernel(kernel_of(PUSHED[name][0](plans)))
    assert ".maxnreg 128" in binary.text["ptx"]
    assert stack_bytes(binary.payload) <= 32


@pytest.mark.parametrize("name", PUSHED)
def test_pushed_collectives_let_the_next_in_before_their_last_fold(plans, name):
    make, kernel = PUSHED[name]
    body = body_of(emit_kernel(kernel_of(make(plans))).source, kernel)
    assert body.count("_let_in(") == 1
    loop = body.index("while ")
    assert (
        loop < body.rindex("_wait_") < body.index("_let_in(") < body.rindex("tl.load(at") < body.rindex("tl.store(out")
    )
    assert re.search(r"_let_in\(.*_end.* <= _step", body)


@pytest.mark.slow
@pytest.mark.usefixtures("triton_needed")
@pytest.mark.parametrize("algorithm", [Algorithm.FLAGGED, Algorithm.FILLED, Algorithm.PUSHED])
def test_the_assembly_lets_in_behind_all_waits_and_waits_for_the_launch_in_front_before_it_stores(plans, algorithm):
    ptx = compile_kernel(kernel_of(all_reduce(plans, algorithm, 4, 512, 1 << 14))).text["ptx"]
    assert ptx.count("@last griddepcontrol.launch_dependents") == 1
    at = ptx.index("@last griddepcontrol.launch_dependents")
    assert max(ptx.rindex(word) for word in ("globaltimer", "ld.acquire.sys")) < at
    assert ptx.index("griddepcontrol.wait") < re.search(r"\bst\.(global|relaxed|release)", ptx).start()


def stack_bytes(cubin):
    """What every thread has of local memory, by the cubin: the section of the function's attributes says the frame."""
    # EIATTR_FRAME_SIZE (0x11), format 4 (sized), 8 bytes: symbol, size.
    sizes = [int.from_bytes(m[2], "little") for m in re.finditer(rb"\x04\x11\x08\x00(.{4})(.{4})", cubin, re.DOTALL)]
    assert sizes, "the cubin names no frame"
    return max(sizes)
