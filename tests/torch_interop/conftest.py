"""Puts this folder on the path: the functions that started ranks run are in `torch_ranks`, which imports no pytest. What
the tests and their ranks make of torch lies on the GPU where they run there."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def tensors_lie_where_the_run_is_for(request):
    if request.config.option.device != "cuda":
        yield
        return
    from where import place

    with place():
        yield
