"""Settings that cannot work are refused by their variable's name, before LLVM or the machine meets them."""

import os
import pwd
import subprocess
import sys

import pytest

from peertile.backends.cpu import jit, target
from peertile.config import read_config
from peertile.errors import ArgumentError

PROGRAM = "import peertile as pt; x = pt.zeros(4, pt.f32); pt.op.fill(x[::2], 3).sync(); print(x.numpy().tolist())"


def run(**env):
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize("name", ["bogus", "pentium", ""])
def test_a_processor_that_llvm_would_end_the_process_for_is_refused(name, monkeypatch):
    monkeypatch.setattr(target, "config", lambda: read_config({"PEERTILE_CPU_TARGET": name}))
    with pytest.raises(ArgumentError) as caught:
        target.host_target()
    assert str(caught.value) == (
        "PEERTILE_CPU_TARGET: expected host or the LLVM name of a 64-bit processor, such as x86-64-v3, znver4, "
        f"neoverse-n1, got {name!r}"
    )


def test_a_processor_of_another_architecture_cannot_be_the_host(monkeypatch):
    name, arch = ("neoverse-n1", "aarch64") if target.host_arch() == "x86_64" else ("znver4", "x86_64")
    monkeypatch.setattr(target, "config", lambda: read_config({"PEERTILE_CPU_TARGET": name}))
    with pytest.raises(ArgumentError) as caught:
        target.host_target()
    assert str(caught.value) == (
        f"PEERTILE_CPU_TARGET: expected a processor of this machine's architecture, {target.host_arch()}, "
        f"got {name!r}, which is {arch}"
    )


def test_llvm_knows_every_processor_that_we_take():
    names = [*target._NAMED, *(name for names in target._OTHERS.values() for name in names)]
    for name in names:
        assert jit.compile_for("define i64 @f(i64 %x) {\n ret i64 %x\n}\n", target.named_target(name))


@pytest.mark.parametrize("threads", ["0", "1025", "many"])
def test_threads_are_bounded(threads):
    with pytest.raises(ArgumentError) as caught:
        read_config({"PEERTILE_CPU_THREADS": threads})
    assert str(caught.value) == f"PEERTILE_CPU_THREADS: expected an integer from 1 to 1024, got {threads!r}"


@pytest.mark.parametrize("env", [{}, {"HOME": ""}], ids=["unset", "empty"])
def test_without_home_kernels_lie_in_the_users_own_folder_or_nowhere(env, monkeypatch):
    entry = pwd.getpwuid(os.getuid())
    assert read_config(env).cache_folder == f"{entry.pw_dir}/.cache/peertile"
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    assert read_config(env).cache_folder == "/nonexistent/.cache/peertile"


def test_a_tilde_in_the_cache_folder_is_the_users_own():
    folder = read_config({"PEERTILE_CACHE_DIR": "~/kernels"}).cache_folder
    assert folder == os.path.expanduser("~/kernels")
    assert "~" not in folder


@pytest.mark.slow
def test_a_cache_folder_that_cannot_be_used_is_said_once_and_costs_only_time(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    done = run(PEERTILE_CACHE_DIR=str(file))
    assert done.stdout == "[3.0, 0.0, 3.0, 0.0]\n"
    assert done.stderr == (
        f"PEERTILE_CACHE_DIR: expected a folder that can be written, got {file} (File exists); "
        "every process compiles its kernels again\n"
    )
