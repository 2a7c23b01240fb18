"""The end of a process waits for threads that compile, and lets no other begin: Triton's settings are gone then."""

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, threading, time

told, begun = threading.Event(), threading.Event()
atexit.register(lambda: told.wait(10))  # runs behind what is registered from here on

from peertile.backends.cuda import kept
from peertile.errors import InternalError

def compiles():
    with kept._compilers.one():
        begun.set()
        time.sleep(1)  # longer than the main thread lives
        print("compiled", flush=True)
    try:
        with kept._compilers.one():
            print("compiled more", flush=True)
    except InternalError as error:
        print(error, flush=True)
    told.set()

threading.Thread(target=compiles, daemon=True).start()
begun.wait(10)
print("ends", flush=True)
"""


@pytest.mark.slow
def test_the_end_of_a_process_waits_for_who_compiles_and_refuses_others():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "ends",
        "compiled",
        "cuda: the process is ending, and compiles nothing any more",
    ]
