"""Memory is given back on whatever thread its last reference dies; host arrays need no device for it."""

import gc
import subprocess
import sys
import threading

import pytest
from host_cases import device

import peertile as pt

pytestmark = pytest.mark.any_device


@pytest.mark.slow
@pytest.mark.native_only
def test_bytes_in_use_return_when_another_thread_drops_the_last_reference():
    gc.collect()
    before = device().memory().in_use
    box = [pt.zeros(1000, pt.f32)]
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join(20)
    assert device().memory().in_use == before


@pytest.mark.native_only
def test_a_process_that_opens_no_device_ends_quietly():
    code = "import peertile as pt; print(pt.f32, pt.live_submissions())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "f32 0\n", "")
