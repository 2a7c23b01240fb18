"""What the library compiles to where the memory order is weaker than here: no order is lost on the way."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.feature("U6", "cpu")
def test_every_order_of_the_library_is_in_its_code_for_aarch64():
    script = Path(__file__).with_name("aarch64_orders.py")
    here, root = script.parent, script.parents[2]
    env = os.environ | {"PYTHONPATH": f"{root / 'src'}:{here}:{here.parent / 'peer'}", "PEERTILE_CACHE_MAX_MB": "0"}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    names = {name for name, *_ in kernels}
    assert {"all_reduce_one_shot", "all_reduce_ring", "gather_staged", "barrier", "box_sum", "count", "meet"} <= names
    for name, emitted, optimised, code in kernels:
        # LLVM writes some of them several times, and makes equal ends of branches one.
        assert all(emitted[order] <= code[order] <= optimised[order] for order in emitted), name
        # Each of them waits for somebody, and tells somebody.
        assert code["loads that acquire"], name
        assert code["stores that release"] or code["changes that release"], name
