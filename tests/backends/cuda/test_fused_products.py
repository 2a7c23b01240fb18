"""What the library's products fused with communication become for GPUs: main loops without waits and checks, bulk
copies of peers' memory, and the fences between those and everything else."""

import re

import pytest

import peertile as pt
from peertile.backends.cuda.compile import compile_kernel, lower_to_text
from peertile.frontend.build import build_kernel
from peertile.language.annotations import Role
from peertile.library import fused_kernels
from peertile.library.fused import FusedProducts
from peertile.passes.pipeline import run_pipeline

TILE = (128, 256, 64)


def lowered(kernel, *arguments, **consts):
    """The IR of a kernel for arguments, which are tensors of this processor: types are what counts."""
    _, bound = kernel.bind(arguments, consts, None)
    names = [p.name for p in kernel.params if p.role is not Role.CONST]
    types = {name: a.type for name, a in zip(names, bound.arguments, strict=True)}
    return run_pipeline(build_kernel(kernel.fn, types, bound.consts, unsafe=kernel.unsafe, name=kernel.name))


def taken(monkeypatch, name, call, **changes):
    """The IR of kernel `name` as `call(products)` launches it, with `changes` of its constants."""
    kernel, found = getattr(fused_kernels, name), []

    def record(*arguments, **consts):
        found.append(lowered(kernel, *arguments, **(consts | changes)))
        return kernel(*arguments, **consts)

    with monkeypatch.context() as patched:
        patched.setattr(fused_kernels, name, record)
        options = {"staging_bytes": 8 << 20, "movers": 2, "workers": 4, "partials": pt.bf16, "tile": TILE}
        with FusedProducts(pt.init(), **options) as products:
            call(products)
    return found[0]


def factors(rows=512, inner=256, columns=512):
    return pt.zeros((rows, inner), pt.bf16), pt.zeros((inner, columns), pt.bf16)


def scattered(monkeypatch):
    return taken(monkeypatch, "gemm_scatter", lambda p: p.matmul_reduce_scatter(*factors()), STAGES=4)


def gathered(monkeypatch, at_once=True, tail=False):
    changes = {"STAGES": 4, "AT_ONCE": at_once, "REST": True, "TAIL": tail, "MR": 8, "MC": 512}
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


def test_what_peers_stored_is_fetched_in_bulk_behind_a_fence(monkeypatch):
    text = lower_to_text(scattered(monkeypatch))
    waits = [m.end() for m in re.finditer(r"satisfied\w*(?:, found\w*)? = _wait", text)]
    assert waits
    assert all("_fence_bulk()" in text[at : at + 900] for at in waits)


def test_gathered_rows_are_multiplied_by_loops_that_wait_for_nothing(monkeypatch):
    loops = blocks(lower_to_text(gathered(monkeypatch)), "flatten=True")
    assert len(loops) == 4  # one's own rows (all but the movers, then all), those of later ranks, those of earlier ones
    loops += blocks(lower_to_text(tailed(monkeypatch)), "flatten=True")
    assert len(loops) == 9
    assert not any(re.search(r"_check|debug_barrier|_wait|tl\.store|tl\.load", loop) for loop in loops)


def test_rows_that_are_waited_for_tile_by_tile_are_fetched_in_bulk_too(monkeypatch):
    text = lower_to_text(gathered(monkeypatch, at_once=False))
    assert len(blocks(text, "flatten=True")) == 2
    products = [line for line in text.splitlines() if "tl.dot(" in line]
    loads = [line for line in text.splitlines() if "_tiles.load(" in line]
    assert len(loads) == 2 * len(products) == 8


@pytest.mark.slow
@pytest.mark.usefixtures("triton_needed")
@pytest.mark.parametrize("make", [scattered, gathered, tailed])
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_fused_products_compile(monkeypatch, make, arch):
    text = compile_kernel(make(monkeypatch), arch).text["ptx"]
    assert "fence.proxy.async;" in text
    assert ("cp.async.bulk.wait_group 0;" in text) == (make is scattered)
