"""What peertile runs on, and what it does where something of Linux is missing. There is no Mac here: what a system
lacks is taken away, and what the code does then runs on this one. What that leaves untried is in docs/guides/platforms.md.
"""

import mmap
import os
import re
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import types
from pathlib import Path

import pytest

import peertile as pt
from peertile.backends.cpu import jit, target
from peertile.comm import frames, rendezvous
from peertile.comm.frames import Reader, frame, send_some
from peertile.errors import UnsupportedError, UsageError
from peertile.memory_model import Cmp
from peertile.runtime import registry
from peertile.runtime.driver import LaunchOptions, Status
from peertile.runtime.drivers import cpu, cpu_native_polling
from peertile.runtime.drivers.cpu_library import Native
from peertile.runtime.drivers.cpu_native import native_module
from peertile.runtime.platforms import refusal
from peertile.runtime.unnamed import unnamed_file
from peertile.testing.cpu_kernels import cpu_kernels
from peertile.testing.driver_suite import args, read_words, words

ROOT = Path(__file__).parents[2]
SHARED = Path("/dev/shm")
MAC = types.SimpleNamespace(platform="darwin")


@pytest.fixture
def short_path(monkeypatch):
    """A folder for temporary files whose path leaves room for the name of a socket."""
    with tempfile.TemporaryDirectory(prefix="pt", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


# ---------------------------------------------------------------- elsewhere


@pytest.mark.parametrize(
    "here", [("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"), ("darwin", "x86_64")], ids=" ".join
)
def test_where_it_runs(here):
    assert refusal(*here, 64, "cpython", (3, 11)) is None
    assert refusal(*here, 64, "cpython", (3, 14)) is None


@pytest.mark.parametrize(
    ("here", "got"),
    [
        (("win32", "AMD64", 64, "cpython", (3, 14)), "cpython 3.14 of 64 bits on win32, AMD64"),
        (("linux", "x86_64", 32, "cpython", (3, 14)), "cpython 3.14 of 32 bits on linux, x86_64"),
        (("linux", "armv7l", 32, "cpython", (3, 14)), "cpython 3.14 of 32 bits on linux, armv7l"),
        (("linux", "riscv64", 64, "cpython", (3, 14)), "cpython 3.14 of 64 bits on linux, riscv64"),
        (("freebsd14", "amd64", 64, "cpython", (3, 14)), "cpython 3.14 of 64 bits on freebsd14, amd64"),
        (("linux", "x86_64", 64, "pypy", (3, 11)), "pypy 3.11 of 64 bits on linux, x86_64"),
        (("linux", "x86_64", 64, "cpython", (3, 10)), "cpython 3.10 of 64 bits on linux, x86_64"),
        (("wasi", "", 32, "cpython", (3, 14)), "cpython 3.14 of 32 bits on wasi, an unknown processor"),
    ],
)
def test_where_it_does_not_run(here, got):
    assert refusal(*here) == (
        f"peertile: expected CPython 3.11 or newer on Linux or macOS, on a 64-bit x86 or ARM processor, got {got}"
    )


@pytest.mark.feature("U6", "cpu")
@pytest.mark.feature("U6", "sim")
def test_an_import_elsewhere_ends_in_one_sentence():
    script = "import os, sys; sys.platform = 'win32'; del os.uname; import peertile"
    env = {"PYTHONPATH": str(ROOT / "src"), "PROCESSOR_ARCHITECTURE": "AMD64"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60)
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert done.stderr.splitlines()[-1] == (
        "ImportError: peertile: expected CPython 3.11 or newer on Linux or macOS, on a 64-bit x86 or ARM processor, "
        f"got cpython {version} of 64 bits on win32, AMD64"
    )


def test_gpus_elsewhere_are_refused_with_what_is_possible(monkeypatch):
    monkeypatch.setattr(registry, "sys", MAC)
    registry._cuda.cache_clear()
    with pytest.raises(UnsupportedError) as caught:
        pt.open_device(pt.DriverKind.CUDA)
    assert str(caught.value) == (
        "cuda: expected Linux, as NVIDIA's driver runs on no other system that peertile does, got darwin; "
        "programs for GPUs can be checked here (peertile check)"
    )


# ---------------------------------------------------------------- shared memory


def shares(fd):
    os.ftruncate(fd, mmap.PAGESIZE)
    with mmap.mmap(fd, mmap.PAGESIZE) as one, mmap.mmap(fd, mmap.PAGESIZE) as other:
        one[0] = 7
        return other[0] == 7


def test_without_files_in_memory_shared_memory_loses_its_name_at_once(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    fd = unnamed_file("label")
    assert not list(SHARED.glob("pt-*"))
    assert shares(fd)
    assert not os.get_inheritable(fd)
    os.close(fd)


def test_without_shared_memory_a_file_loses_its_name_at_once(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setitem(sys.modules, "_posixshmem", None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    fd = unnamed_file("label")
    assert list(tmp_path.iterdir()) == []
    assert shares(fd)
    os.close(fd)


# ---------------------------------------------------------------- sockets


def test_where_sockets_are_files_their_paths_are_short_and_tell_jobs_apart(monkeypatch):
    monkeypatch.setattr(rendezvous, "sys", MAC)
    monkeypatch.setattr(tempfile, "tempdir", "/var/folders/zz/zyxvpxvq6csfxvn_n0000000000000/T")
    paths = [rendezvous._address(port, job) for port in (8361, 8362) for job in ("1-2", "x" * 99)]
    assert len(set(paths)) == 4
    assert {len(path) for path in paths} == {90}
    monkeypatch.setattr(tempfile, "tempdir", "/" + "long" * 20)
    with pytest.raises(UnsupportedError) as caught:
        rendezvous._address(8361, "1-2")
    assert str(caught.value).startswith(
        "rendezvous: expected a path of at most 103 bytes for its socket, as this system bounds them, got /longlong"
    )
    assert str(caught.value).endswith("; let TMPDIR name a folder with a shorter one")


def test_a_rendezvous_leaves_no_socket_behind(monkeypatch, short_path):
    monkeypatch.setattr(rendezvous, "sys", MAC)
    monkeypatch.setattr(rendezvous, "_LOCAL_PEERCRED", (socket.SOL_SOCKET, socket.SO_PEERCRED, 8))  # process, user
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as killed:  # of a job whose rank 0 was
        killed.bind(rendezvous._address(1, "job"))
    server = rendezvous.serve(1, "job", 1, 5.0)
    link = rendezvous.connect(1, "job", 0, 1, 5.0)
    link.server = server
    assert len(list(short_path.iterdir())) == 1
    link.close()
    server.join(5.0)
    assert server.finished
    assert list(short_path.iterdir()) == []


def test_a_rendezvous_of_another_user_is_refused(monkeypatch):
    server = rendezvous.serve(1, "theirs", 1, 5.0)
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    monkeypatch.setattr(rendezvous, "_address", lambda port, job: f"\0peertile-{own}-{port}-{job}".encode())
    with pytest.raises(UsageError) as caught:
        rendezvous.connect(1, "theirs", 0, 1, 5.0)
    assert str(caught.value) == (
        "rank 0: the rendezvous on port 1 is another user's; pass another port= to init, or set PEERTILE_MASTER_PORT"
    )
    server.linger(0)


def test_who_calls_is_asked_of_macos(monkeypatch):
    monkeypatch.setattr(rendezvous, "sys", MAC)

    class Called:
        def __init__(self, user):
            self.user = user

        def getsockopt(self, *asked):
            assert asked == (0, 1, 76)
            return struct.pack("2i", 0, self.user).ljust(76, b"\0")

    assert rendezvous._same_user(Called(os.geteuid()))
    assert not rendezvous._same_user(Called(os.geteuid() + 1))


def test_descriptors_go_with_the_head_of_a_message_and_are_not_inherited(monkeypatch):
    monkeypatch.setattr(frames, "sys", MAC)
    monkeypatch.delattr(socket, "MSG_CMSG_CLOEXEC")
    ours, theirs = socket.socketpair()
    with ours, theirs, tempfile.TemporaryFile() as file:
        data = frame("x" * 1000, (file.fileno(),))
        assert send_some(ours, data, (file.fileno(),)) == 8
        assert send_some(ours, data[8:]) == len(data) - 8
        ((message, fds),) = Reader(theirs).read()
        assert message == "x" * 1000
        assert not os.get_inheritable(fds[0])
        os.close(fds[0])


# ---------------------------------------------------------------- waiting


@pytest.mark.slow
def test_streams_and_workers_sleep_and_wake_without_a_futex(monkeypatch):
    monkeypatch.setattr(cpu_native_polling, "_SYS_FUTEX", {})
    module = native_module()
    assert "syscall" not in module.text()
    monkeypatch.setattr(cpu, "native", lambda: Native(jit.load_object(jit.compile_text(module.text()), module.exports)))
    device = cpu.CpuDriver(threads=2).open()
    one, two, kernels = device.create_stream(), device.create_stream(), cpu_kernels()
    work = device.load_module(kernels.work)
    word, out = words(device, one, [0]), device.allocate(80_000)
    called = threading.Event()
    device.wait_value(two, word, 1, 64, Cmp.EQ, timeout_ns=20 * 10**9)
    last = device.callback(two, called.set)
    assert device.wait(last, 0.02) is Status.PENDING  # both sleep by now
    device.launch(one, work, (1000, 1, 1), args(out, 10), LaunchOptions("work", 10**9))
    assert device.wait(device.write_value(one, word, 1, 64)) is Status.DONE
    assert called.wait(20)
    assert device.wait(last) is Status.DONE
    assert read_words(device, one, word, 1) == [1]
    device.close()


# ---------------------------------------------------------------- code


def test_code_for_macos_is_of_its_own_form(monkeypatch):
    jit.host_cpu()  # LLVM is loaded as of this system
    monkeypatch.setattr(sys, "platform", "darwin")
    m1 = target.named_target("apple-m1")
    assert m1.triple == "arm64-apple-macosx11.0.0"
    assert m1.key.startswith("arm64-apple-macosx11.0.0/apple-m1/")
    code = jit.compile_for("define void @E_range(ptr %p) {\n  store i64 1, ptr %p\n  ret void\n}", m1)
    assert code[:4] == bytes.fromhex("cffaedfe")
    assert b"\0_E_range\0" in code
    assert "syscall" not in native_module().text()
    assert "sched_setaffinity" not in native_module().text()


def test_the_processor_of_a_mac_is_what_its_system_says(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    said = {
        "machdep.cpu.brand_string": "Intel(R) Core(TM) i7",
        "machdep.cpu.features": "FPU SSE4.1 SSE4.2 FMA F16C AVX1.0",
        "machdep.cpu.leaf7_features": "AVX2 BMI1",
    }
    monkeypatch.setattr(target, "_sysctl", said.get)
    monkeypatch.setattr(target, "host_arch", lambda: "x86_64")
    intel = target._detect.__wrapped__()
    assert intel.features == {"sse4.1", "sse4.2", "fma", "f16c", "avx", "avx2"}
    assert intel.vector_bits == 256
    monkeypatch.setattr(target, "host_arch", lambda: "aarch64")
    monkeypatch.setattr(target, "_sysctl", lambda name: "Apple M3" if "brand" in name else "")
    m3 = target._detect.__wrapped__()
    assert m3.features == {"neon", "fullfp16"}
    assert m3.identity != intel.identity


@pytest.mark.slow
@pytest.mark.feature("U6", "cpu")
def test_the_native_runtime_keeps_its_orders_on_aarch64(monkeypatch):
    monkeypatch.setattr(cpu_native_polling, "host_arch", lambda: "aarch64")
    text = native_module().text()
    stages = jit.stages(text, target.AARCH64)
    ordered = {
        r"load atomic [^\n]* (?:acquire|seq_cst)": r"\bldar\b",
        r"store atomic [^\n]* (?:release|seq_cst)": r"\bstlr\b",
        r"(?:atomicrmw|cmpxchg) ": r"\bldaxr\b",
    }
    for pattern, instruction in ordered.items():
        emitted, optimised = (len(re.findall(pattern, llvm)) for llvm in (text, stages["optimised"]))
        # Functions are put in where they are called, and equal ends of branches are made one.
        assert 3 < emitted <= len(re.findall(instruction, stages["asm"])) <= optimised
    bodies = dict(re.findall(r"(?ms)^(\w+):[^\n]*\n(.*?)^\.Lfunc_end", stages["asm"]))
    assert "ldar\t" in bodies["python_acquired"]  # what Python asks whether work is over by
    assert "stlr\t" in bodies["python_release"]


def function(name):
    return re.search(rf"(?ms)^define [^\n]*@{name}\(.*?^}}", native_module().text())[0]


def test_who_goes_to_sleep_looks_again_behind_what_it_has_announced():
    """Loads that only acquire may be done before a store that is in front of them, where `ldapr` is used for them."""
    leaves, works = function("leave"), function("worker_loop")
    assert re.findall(r"(?:load|store) atomic i32.* (\w+), align", leaves) == ["seq_cst", "seq_cst"]
    assert re.findall(r"load atomic i32, .* (\w+), align", works)[:2] == ["seq_cst", "monotonic"]  # epoch, then stop


# ---------------------------------------------------------------- ranks as processes

LACKING = """
import os, socket, types
for owner, names in (
    (os, ("memfd_create", "waitid", "sched_getaffinity", "sched_setaffinity")),
    (socket, ("MSG_CMSG_CLOEXEC", "MSG_NOSIGNAL")),
):
    for name in names:
        delattr(owner, name)
from peertile.comm import frames, rendezvous
from peertile.runtime.drivers import cpu_native_polling
frames.sys = rendezvous.sys = types.SimpleNamespace(platform="darwin")
rendezvous._LOCAL_PEERCRED = socket.SOL_SOCKET, socket.SO_PEERCRED, 8
cpu_native_polling._SYS_FUTEX.clear()
"""


@pytest.mark.slow
@pytest.mark.feature("U6", "cpu")
def test_ranks_are_processes_without_what_only_linux_has(tmp_path, short_path):
    (tmp_path / "sitecustomize.py").write_text(LACKING)
    before = set(SHARED.iterdir())
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}", "TMPDIR": str(short_path)}
    command = [sys.executable, "-m", "peertile", "run", "-n", "3", str(ROOT / "examples" / "allreduce.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(short_path.iterdir()) == []
    assert set(SHARED.iterdir()) <= before


@pytest.mark.slow
@pytest.mark.feature("U6", "sim")
def test_programs_are_checked_without_what_only_linux_has(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(LACKING)
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}"}
    for program, expected in (("missing_wait_fixed.py", 0), ("missing_wait.py", 1)):
        path = ROOT / "examples" / "racy" / program
        command = [sys.executable, "-m", "peertile", "check", str(path), "--schedules", "5"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
        assert done.returncode == expected, done.stdout + done.stderr
