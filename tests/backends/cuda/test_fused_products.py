"""What the library's products fused with communication become for GPUs: main loops without waits and checks, bulk
copies of peers' memory, and the fences between those and everything else."""

import re

import pytest

import peertile as pt
import peertile.language as T
from peertile.backends.cuda.compile import compile_kernel, lower_to_text
from peertile.backends.cuda.emit import emit_kernel
from peertile.backends.cuda.target import CudaOptions
from peertile.frontend.build import build_kernel
from peertile.language.annotations import Role
from peertile.library import experts, experts_kernels, fused_kernels
from peertile.library.experts import Experts
from peertile.library.fused import FusedProducts
from peertile.passes.pipeline import run_pipeline

TILE = (128, 256, 64)


def lowered(kernel, *arguments, **consts):
    """The IR of a kernel for arguments, which are tensors of this processor: types are what counts."""
    _, bound = kernel.bind(arguments, consts, None)
    names = [p.name for p in kernel.params if p.role is not Role.CONST]
    types = {name: a.type for name, a in zip(names, bound.arguments, strict=True)}
    return run_pipeline(build_kernel(kernel.fn, types, bound.consts, unsafe=kernel.unsafe, name=kernel.name))


def taken(monkeypatch, name, call, flagged=False, **changes):
    """The IR of kernel `name` as `call(products)` launches it, with `changes` of its constants."""
    kernel, found = getattr(fused_kernels, name), []

    def record(*arguments, **consts):
        found.append(lowered(kernel, *arguments, **(consts | changes)))
        return kernel(*arguments, **consts)

    with monkeypatch.context() as patched:
        patched.setattr(fused_kernels, name, record)
        options = {
            "staging_bytes": 8 << 20,
            "movers": 2,
            "workers": 4,
            "partials": pt.bf16,
            "tile": TILE,
            "flagged": flagged,
        }
        with FusedProducts(pt.init(), **options) as products:
            call(products)
    return found[0]


def factors(rows=512, inner=256, columns=512):
    return pt.zeros((rows, inner), pt.bf16), pt.zeros((inner, columns), pt.bf16)


def scattered(monkeypatch):
    return taken(monkeypatch, "gemm_scatter", lambda p: p.matmul_reduce_scatter(*factors()), STAGES=4)


def moved(monkeypatch, **changes):
    """With programs that only move, of two ranks."""

    def call(products):
        products._part_movers = 2
        products.matmul_reduce_scatter(*factors())

    return taken(monkeypatch, "gemm_scatter_moved", call, STAGES=4, N=2, **changes)


def gathered(monkeypatch, at_once=True, tail=False, quick=False):
    changes = {"STAGES": 4, "AT_ONCE": at_once, "REST": not quick, "TAIL": tail, "MR": 8, "MC": 512, "QUICK": quick}
    return taken(monkeypatch, "gather_gemm", lambda p: p.all_gather_matmul(*factors()), **changes)


def tailed(monkeypatch):
    return gathered(monkeypatch, tail=True)


def blocks(body, head):
    """The text of each loop whose first line has `head`."""
    lines = body.splitlines()
    found = []
    for k, line in enumerate(lines):
        if head in line:
            depth = len(line) - len(line.lstrip())
            end = next(
                (j for j in range(k + 1, len(lines)) if lines[j].strip() and _depth(lines[j]) <= depth), len(lines)
            )
            found.append("\n".join(lines[k:end]))
    return found


def _depth(line):
    return len(line) - len(line.lstrip())


def test_parts_of_a_sum_leave_in_bulk_from_a_loop_that_waits_for_nothing(monkeypatch):
    text = lower_to_text(scattered(monkeypatch))
    (loop,) = blocks(text, "flatten=True")
    assert len(re.findall(r"_tiles\.store\(", loop)) == 1
    assert not re.search(r"_check|debug_barrier|_wait|tl\.store|tl\.load", loop)
    after = text[text.index(loop) + len(loop) :]
    assert after.index("_await_bulk()") < after.index("_st_release_sys_b64(")


def test_a_tile_is_told_while_the_next_ones_factors_are_on_their_way(monkeypatch):
    """The loop goes on into the next tile: Triton makes no loads ahead around a barrier of its own."""
    (loop,) = blocks(lower_to_text(moved(monkeypatch)), "flatten=True")
    assert loop.index("_tiles.store(") < loop.index("_await_bulk()") < loop.index("tl.atomic_add(")
    assert 'sem="release"' in loop
    assert not re.search(r"_check|debug_barrier|_wait|if |tl\.store|tl\.load", loop)


def test_programs_that_only_move_send_pieces_with_nothing_in_between(monkeypatch):
    text = lower_to_text(moved(monkeypatch))
    (loop,) = (part for part in blocks(text, "for t") if part.count("tl.store(") == 4)
    assert loop.count("tl.load(") == 4
    assert not re.search(r"_check|barrier|_fence|_await|_wait|if ", loop)


@pytest.mark.slow
@pytest.mark.usefixtures("triton_needed")
def test_a_loop_that_says_has_as_many_buffers_as_it_asks_for(monkeypatch):
    binary = compile_kernel(moved(monkeypatch))
    buffers = re.findall(r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d)x128x64xbf16", binary.text["ttgir"])
    assert buffers == ["4", "4"]


def widened():
    a, b = factors(256, 8192, 640)
    c = pt.zeros((512, 640), pt.bf16)
    with FusedProducts(pt.init(), staging_bytes=16 << 20, movers=2, workers=6, partials=pt.bf16, tile=TILE) as products:
        cut = [
            c[top : top + 256, left:right].partition((128, width)).persistent(programs=8, swizzle=16, spare=4)
            for top in (0, 256)
            for left, right, width in ((0, 512, 256), (512, 640, 64))
        ]
        return lowered(
            fused_kernels.gather_gemm_wide, *cut, a, b[:, :512], b[:, 512:], products._begun,
            products._seen_as(products._staging, pt.bf16, (1024, 8192)), products._halves, products._calls, 1, BK=32,
            STAGES=7, MR=8, MC=1024, MOVERS=4,
        )  # fmt: skip


def test_wide_tiles_are_multiplied_by_loops_with_nothing_in_between():
    text = lower_to_text(widened())
    loops = blocks(text, "num_stages=7")
    assert [loop.count("tl.dot(") for loop in loops] == [2, 2, 2]  # one's own rows; the others' by halves
    assert not any(re.search(r"_check|debug_barrier|_wait|tl\.store|tl\.load", loop) for loop in loops)
    (moves,) = (part for part in blocks(text, "for t") if part.count("tl.store(") == 4)
    assert moves.count("tl.load(") == 4
    assert not re.search(r"_check|barrier|_fence|_await|_wait|if ", moves)
    waits = [m.end() for m in re.finditer(r"satisfied\w* = _wait", text)]
    assert all("_fence_bulk()" in text[at : at + 900] for at in waits)


@pytest.mark.slow
@pytest.mark.usefixtures("triton_needed")
def test_a_part_as_threads_have_it_passes_through_no_shared_memory(monkeypatch):
    """So the loop over products has room for its four buffers, and what stores and adds a part has no other."""
    binary = compile_kernel(moved(monkeypatch, PR=16, PC=2048))
    text = binary.text["ttgir"]
    assert "tt.gather" not in text
    assert re.findall(r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d)x128x64xbf16", text) == ["4", "4"]
    assert not re.search(r"local_alloc .*memdesc<128x256xbf16", text)
    assert re.search(r"tt\.store .*16x2048x", text)
    assert re.search(r"tt\.load .*16x2048x", text)


def paired():
    a, b = factors()
    c = pt.zeros((256, 512), pt.bf16)
    with FusedProducts(pt.init(), staging_bytes=8 << 20, movers=2, workers=4, partials=pt.bf16, tile=TILE) as products:
        inbox = products._inbox("paired", 512, 512, *TILE[:2])
        return lowered(
            fused_kernels.gemm_scatter_pairs, c.partition(TILE[:2]).persistent(programs=6, swizzle=8), a, b,
            products._begun, inbox, products._paired, products._calls, 1, BK=TILE[2], STAGES=4,
        )  # fmt: skip


def test_a_part_is_on_its_way_while_the_next_tile_is_computed():
    """Triton lets a bulk store of a `for` loop go on until the next one, and no other: so a loop that waits is one, and
    its trips do nothing once a wait has failed."""
    text = lower_to_text(paired())
    lines = text[text.index("def gemm_scatter_pairs") :].splitlines()
    (sent,) = (k for k, line in enumerate(lines) if re.search(r"_tiles\.store\(", line))
    heads = [k for k, line in enumerate(lines[:sent]) if re.fullmatch(r" *for k\w* in tl\.range\(.*_grid0\):", line)]
    around = lines[heads[-1]]
    assert lines[heads[-1] + 1].strip() == "if _alive:"
    inside = "\n".join(blocks("\n".join(lines), around.strip())[0].splitlines()[1:])
    assert len(re.findall(r"tl\.dot\(", inside)) == 2
    assert inside.index("_tiles.store(") < inside.index("_await_bulk()") < inside.index("_st_release_sys_b64(")
    assert inside.index("_st_release_sys_b64(") < inside.index("satisfied") < inside.index("tl.store(")
    assert "while " not in inside


@pytest.mark.slow
@pytest.mark.usefixtures("triton_needed")
def test_nothing_waits_for_a_part_before_the_next_one_is_sent():
    text = compile_kernel(paired()).text["ttgir"]
    (loop,) = (part for part in blocks(text, "scf.for") if part.count("warp_group_dot ") == 2)
    sends = [
        line.strip().split(" ")[0]
        for line in loop.splitlines()
        if re.search(r"async_tma_(store_wait|copy_local)", line)
    ]
    assert sends == ["ttng.async_tma_store_wait", "ttng.async_tma_copy_local_to_global"]


def test_what_peers_stored_is_fetched_in_bulk_behind_a_fence(monkeypatch):
    text = lower_to_text(scattered(monkeypatch))
    waits = [m.end() for m in re.finditer(r"satisfied\w*(?:, found\w*)? = _wait", text)]
    assert waits
    assert all("_fence_bulk()" in text[at : at + 900] for at in waits)


def test_rows_are_sent_without_waiting_until_they_have_arrived(monkeypatch):
    """The fence in front of bulk copies waits for all that was stored; a mover fetches nothing of it."""
    text = lower_to_text(gathered(monkeypatch))
    sends = min((loop for loop in blocks(text, "while _run") if "tl.store(part_at" in loop), key=len)
    assert "tl.debug_barrier()" in sends
    assert "_fence_bulk()" not in sends
    told = text[text.index(sends) + len(sends) :]
    assert told.index("_fence_bulk()") < told.index("tl.atomic_add(")


@pt.kernel
def stored_and_fetched(z: T.Exclusive, x: T.Shared, p: T.Peer, TWICE: T.Const[bool]):
    """Writes twice to memory that peers see, with a barrier between, and fetches from there in bulk."""
    here = p.local.slice((0, 0), (128, 128))
    for _ in T.range(x.shape[0]):
        here.store((0, 0), x.load((0, 0), (128, 128)))
        if TWICE:
            here.store((0, 0), x.load((0, 0), (128, 128)))
        acc = T.zeros(z.tile_shape, T.f32)
        for i in T.range(here.num_tiles((128, 64))[1], stages=3):
            acc = T.mma(here.load((0, i), (128, 64)), x.load((i, 0), (64, 128)), acc)
        z.store(acc.astype(z.dtype))


@pytest.mark.parametrize("twice", [False, True])
def test_what_a_program_stored_itself_is_fetched_in_bulk_behind_a_fence(twice):
    with pt.SymmetricHeap(pt.init(), size_bytes=1 << 20) as heap:
        p = heap.zeros((256, 256), pt.bf16)
        x, z = (pt.zeros((128, 128), pt.bf16) for _ in range(2))
        text = lower_to_text(lowered(stored_and_fetched, z.partition((128, 128)), x, p, TWICE=twice))
    body = text[text.index("def stored_and_fetched") :]
    last, load = body.rindex("tl.store(at_at"), body.index("at_tiles.load(")
    assert "_fence_bulk()" in body[last:load]
    barriers = re.findall(r"tl\.debug_barrier\(\)\n( *_fence_bulk\(\))?", body[:last])
    assert [bool(fence) for fence in barriers] == [False] * (1 + twice)


def test_gathered_rows_are_multiplied_by_loops_that_wait_for_nothing(monkeypatch):
    loops = blocks(lower_to_text(gathered(monkeypatch)), "flatten=True")
    assert len(loops) == 4  # one's own rows (all but the movers, then all), those of later ranks, those of earlier ones
    loops += blocks(lower_to_text(tailed(monkeypatch)), "flatten=True")
    assert len(loops) == 9
    loops += blocks(lower_to_text(gathered(monkeypatch, quick=True, tail=True)), "flatten=True")
    assert len(loops) == 13  # one's own rows in one loop
    assert not any(re.search(r"_check|debug_barrier|_wait|tl\.store|tl\.load", loop) for loop in loops)


def test_neighbours_of_a_product_are_packed_by_the_thread_that_has_them(monkeypatch):
    """And what says which call it is comes while the product is under way."""
    reduced = taken(monkeypatch, "gemm_reduce_flagged", lambda p: p.matmul_all_reduce(*factors(16)), flagged=True)
    text = lower_to_text(reduced)
    assert text.count("tl.split(") == 2
    assert "tl.gather(" not in text
    lines = text[text.index("def gemm_reduce_flagged") :].splitlines()
    (first,) = (k for k, line in enumerate(lines) if "tl.dot(" in line)
    read = [k for k, line in enumerate(lines) if re.search(r"\blast(_sign)? = tl\.load", line)]
    used = [k for k, line in enumerate(lines) if re.search(r"= last \+ 1|last_sign [!=]=", line)]
    assert len(read) == 2
    assert max(read) < first < min(used)


@pytest.mark.parametrize(("top_k", "together"), [(8, [4, 4]), (7, [4, 2, 1]), (2, [2])])
def test_rows_of_up_to_four_choices_are_fetched_with_nothing_in_between(monkeypatch, top_k, together):
    """Not so much as a check, which what it guards would wait for; and no division says where they lie."""
    kernel, found = experts_kernels.combine, []

    def record(*arguments, **consts):
        found.append(lowered(kernel, *arguments, **consts))
        return kernel(*arguments, **consts)

    with Experts(pt.init(), experts=16, rows=4, width=64, top_k=top_k, dtype=pt.bf16) as moe:
        moe.dispatch(pt.zeros((4, 64), pt.bf16), pt.zeros((4, top_k), pt.i64))  # neither of the two is run
        monkeypatch.setattr(experts_kernels, "combine", record)
        moe.combine(moe._last, pt.zeros((4, top_k), pt.f32))
    text = lower_to_text(found[0])
    lines = text[text.index("for tile in out.tiles():") :].splitlines()
    ends = [k for k, line in enumerate(lines) if "if _alive:" in line]
    rows = [k for k, line in enumerate(lines) if re.search(r"\btl\.load\(y\w*_at|\btl\.load\(.*_index", line)]
    assert len(rows) == top_k
    groups = [sum(first < k < last for k in rows) for first, last in zip(ends, [*ends[1:], len(lines)], strict=True)]
    assert [n for n in groups if n] == together
    fetched = "\n".join(lines[ends[0] : rows[-1]])
    assert "_floordiv" not in fetched
    assert "_mod(" not in fetched


def test_two_programs_that_add_what_experts_made_fit_on_a_multiprocessor(monkeypatch):
    kernel, found = experts_kernels.combine_summed, []

    def record(*arguments, **consts):
        found.append(lowered(kernel, *arguments, **consts))
        return kernel(*arguments, **consts)

    monkeypatch.setattr(experts, "ADDED", {False: experts.ADDED[True]})
    with Experts(pt.init(), experts=16, rows=4, width=7168, top_k=8, dtype=pt.bf16, partials=pt.bf16) as moe:
        moe.dispatch(pt.zeros((4, 7168), pt.bf16), pt.zeros((4, 8), pt.i64))  # neither of the two is run
        monkeypatch.setattr(experts_kernels, "combine_summed", record)
        moe.combine(moe._last, pt.zeros((4, 8), pt.f32))
    made = emit_kernel(found[0], "sm_90", CudaOptions())
    assert 2 * 32 * made.num_warps * made.max_registers <= 1 << 16


def test_rows_that_are_waited_for_tile_by_tile_are_fetched_in_bulk_too(monkeypatch):
    text = lower_to_text(gathered(monkeypatch, at_once=False))
    assert len(blocks(text, "flatten=True")) == 2
    products = [line for line in text.splitlines() if "tl.dot(" in line]
    loads = [line for line in text.splitlines() if "_tiles.load(" in line]
    assert len(loads) == 2 * len(products) == 8


@pytest.mark.slow
@pytest.mark.usefixtures("triton_needed")
@pytest.mark.parametrize("make", [scattered, moved, gathered, tailed])
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_fused_products_compile(monkeypatch, make, arch):
    text = compile_kernel(make(monkeypatch), arch).text["ptx"]
    assert "fence.proxy.async;" in text
    assert ("cp.async.bulk.wait_group 0;" in text) == (make in (scattered, moved))
