"""A child that was forked from a process with a live device: using it is an error that says so; dropping and
leaving are silent, and the parent's memory stays as it was."""

import subprocess
import sys
import textwrap

import pytest

HEAD = "import os, sys, gc, peertile as pt\n"


def run(code):
    return subprocess.run(
        [sys.executable, "-c", HEAD + textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.slow
def test_a_forked_child_is_told_and_frees_nothing():
    done = run(
        """
        b = pt.full(4, 3, pt.f32)
        stream = pt.current_device().stream()
        graph = pt.op.dup(b).graph_on(stream)
        for mode in ("launch", "drop", "leave"):
            pid = os.fork()
            if pid == 0:
                if mode == "launch":
                    try:
                        pt.op.fill(b, 1).sync()
                    except pt.UsageError as error:
                        print(error, flush=True)
                elif mode == "drop":
                    del b, graph, stream
                    gc.collect()
                sys.exit(0)
            print(mode, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), b.numpy().tolist(), flush=True)
        """
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "runtime was initialised before fork; use spawn",
        "launch 0 [3.0, 3.0, 3.0, 3.0]",
        "drop 0 [3.0, 3.0, 3.0, 3.0]",
        "leave 0 [3.0, 3.0, 3.0, 3.0]",
    ]


def test_a_failure_without_a_fork_does_not_speak_of_one():
    done = run("try: pt.open_device(ordinal=99)\nexcept pt.ArgumentError as error: print(error)")
    assert done.stdout == "ordinal: expected 0 to 7, got 99\n"
