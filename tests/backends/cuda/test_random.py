"""Random kernels: Triton's interpreter gives what their meaning gives, and Triton compiles all of them."""

import pytest
from tests.backends.cuda.interpreted import run_interpreted

from peertile.backends.cuda.compile import compile_kernel
from peertile.ir.text import parse_kernel, print_kernel
from peertile.meaning.grid import run_grid
from peertile.passes.pipeline import run_pipeline
from peertile.testing.programs import differences, random_kernel

pytestmark = pytest.mark.usefixtures("triton_needed")


def lowered(seed):
    """A random program, its text, and its kernel as a backend gets it."""
    program = random_kernel(seed, alone=True)  # the interpreter runs programs one after another
    text = print_kernel(program.kernel)
    return program, text, run_pipeline(parse_kernel(text))


def compare(seed):
    program, text, kernel = lowered(seed)
    # The interpreter computes with the bits of bf16 as if they were integers.
    if "bf16" in print_kernel(kernel):
        return False
    expected, found = program.make_args(), program.make_args()
    outcome = run_grid(kernel, program.grid, expected)
    fault = run_interpreted(kernel, program.grid, found).fault[0]
    assert bool(fault) == bool(outcome.faults), f"seed {seed}: {fault}, meaning {outcome.faults}\n{text}"
    wrong = [] if fault else differences(program, found, expected)
    assert not wrong, f"seed {seed}: {wrong}\n{text}"
    return True


def test_a_few_random_kernels_mean_what_the_ir_says(request):
    first = request.config.option.seed % 100_000 + 10_000
    assert sum(compare(seed) for seed in range(first, first + 8)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(4))
def test_random_kernels_mean_what_the_ir_says(chunk):
    assert sum(compare(seed) for seed in range(chunk * 50, chunk * 50 + 50)) > 20


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_random_kernels_compile(arch):
    for seed in range(10):
        assert compile_kernel(lowered(seed)[2], arch).payload


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chunk", range(10))
def test_many_random_kernels_compile_and_mean_what_the_ir_says(chunk):
    for seed in range(20_000 + chunk * 100, 20_100 + chunk * 100):
        compare(seed)
        assert compile_kernel(lowered(seed)[2]).payload
