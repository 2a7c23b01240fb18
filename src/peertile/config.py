"""Every environment variable that peertile reads, read once into a frozen dataclass.

Precedence everywhere: an explicit argument, then the environment, then the default here. The table
in docs/reference/environment.md is generated from `VARIABLES`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from peertile.errors import ArgumentError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["VARIABLES", "Config", "Variable", "config", "read_config", "warn_of_cache"]


class Variable(NamedTuple):
    """One environment variable: its name, the values it takes, its default, what it does."""

    name: str
    values: str
    default: str
    meaning: str


VARIABLES: Final = (
    Variable("PEERTILE_WAIT_TIMEOUT_S", "seconds > 0", "30", "bound of every wait on a device and between hosts"),
    Variable("PEERTILE_CACHE_DIR", "a folder", "~/.cache/peertile", "where compiled kernels are kept"),
    Variable("PEERTILE_CACHE_MAX_MB", "MiB >= 0", "512", "size bound of the disk cache; 0 turns it off"),
    Variable("PEERTILE_DEVICE", "cpu, cuda", "cpu", "what a thread works on that names none (peertile run sets it)"),
    Variable(
        "PEERTILE_REHEARSE",
        "sm_90, sm_90:132",
        "unset",
        "runs a program for GPUs without one: kernels are compiled for that architecture (and number of"
        " multiprocessors), and run on cpu",
    ),
    Variable("PEERTILE_CPU_THREADS", "integer, 1-1024", "cores / local ranks", "threads that run programs on cpu"),
    Variable("PEERTILE_CPU_TARGET", "an LLVM cpu name", "host", "processor to compile for"),
    Variable("PEERTILE_MASTER_PORT", "1-65535", "MASTER_PORT, then 8361", "rendezvous port of a job"),
    Variable("PEERTILE_JOB", "text", "set by peertile run", "tells two jobs on one host and port apart"),
    Variable("PEERTILE_LIFELINE", "a descriptor", "set by the launcher", "how a rank sees its launcher end"),
    Variable("PEERTILE_SPIN_BUDGET_US", "microseconds >= 0", "20", "how long await polls before it sleeps; 0 disables"),
    Variable("PEERTILE_HOST_SYNC", "spin, block", "unset", "forces host callbacks as the completion path"),
    Variable("PEERTILE_USE_VMM", "1, other", "unset", "shares GPU memory by VMM (1) or CUDA IPC (other), no fall-back"),
    Variable(
        "PEERTILE_MULTICAST", "1, other", "unset", "1: multicast tensors use the fabric's multicast where there is one"
    ),
    Variable("NCCL_NVLS_ENABLE", "0, other", "unset", "0: never, whatever PEERTILE_MULTICAST says"),
    Variable("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1, other", "unset", "1: never, likewise"),
    Variable("NVSHMEM_DISABLE_NVLS", "1, other", "unset", "1: never, likewise"),
    Variable(
        "PEERTILE_TIMELINE", "a file", "unset", "records a timeline of the program there (peertile run --timeline)"
    ),
    Variable("PEERTILE_DEBUG_VERIFY", "0, 1", "1", "run the IR verifier after every pass that changed the kernel"),
)


_MULTICAST_VETOES: Final = (
    ("NCCL_NVLS_ENABLE", "0"), ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"), ("NVSHMEM_DISABLE_NVLS", "1"),
)  # fmt: skip
"""What switches multicast off for other libraries of a job does so for this one: the reason is the system."""


class Config(NamedTuple):
    """Settings of this process. Times are in seconds unless the name says otherwise."""

    wait_timeout_s: float
    cache_folder: str
    cache_max_bytes: int
    cpu_threads: int | None
    cpu_target: str | None
    master_port: int | None
    spin_budget_us: int
    host_sync: str | None
    verify_passes: bool
    device: str = "cpu"
    use_vmm: bool | None = None
    """Whether GPU memory is shared by VMM; None leaves the choice to what the device can."""
    multicast: bool = False
    """Whether the user opted in to multicast objects of the fabric."""
    multicast_veto: str | None = None
    """A setting that forbids them, as NAME=value; it goes before the opt-in."""
    rehearse: str | None = None
    """The architecture of GPUs that are not there, and how many multiprocessors they have: sm_90, or sm_90:132."""
    timeline: str | None = None
    """Where a timeline of the whole program is written."""

    @property
    def cache_dir(self) -> Path:
        """Where compiled kernels are kept."""
        from pathlib import Path  # takes 3 ms, which `import peertile` does not pay

        return Path(self.cache_folder)


def _number(
    env: Mapping[str, str],
    name: str,
    default: Any,
    convert: Callable[[str], Any],
    ok: Callable[[Any], bool],
    expected: str,
) -> Any:
    text = env.get(name)
    if text is None:
        return default
    try:
        value = convert(text)
    except ValueError:
        value = None
    if value is None or not ok(value):
        raise ArgumentError(f"{name}: expected {expected}, got {text!r}")
    return value


def _home(env: Mapping[str, str]) -> str:
    """The user's own folder. Never one that others may write, such as /tmp: native code is loaded from it."""
    home = env.get("HOME")
    if not home:
        try:
            import pwd

            home = pwd.getpwuid(os.getuid()).pw_dir
        except (ImportError, KeyError):  # no Unix, or a user without an entry, as in some containers
            home = "/nonexistent"
    return home


def read_config(env: Mapping[str, str]) -> Config:
    """Settings from `env`; ArgumentError naming the variable, what it takes and what it was."""
    host_sync = env.get("PEERTILE_HOST_SYNC")
    if host_sync not in (None, "spin", "block"):
        raise ArgumentError(f"PEERTILE_HOST_SYNC: expected spin or block, got {host_sync!r}")
    device = env.get("PEERTILE_DEVICE", "cpu")
    if device not in ("cpu", "cuda"):
        raise ArgumentError(f"PEERTILE_DEVICE: expected cpu or cuda, got {device!r}")
    rehearse = env.get("PEERTILE_REHEARSE") or None
    arch, _, number = (rehearse or "sm_0").partition(":")
    is_arch = arch.startswith("sm_") and arch.removeprefix("sm_").isdecimal()
    if not is_arch or (number and not 0 < int(number if number.isdecimal() else 0) < 1024):
        raise ArgumentError(
            f"PEERTILE_REHEARSE: expected an architecture as sm_90, or with the number of multiprocessors as "
            f"sm_90:132, got {rehearse!r}"
        )
    use_vmm = env.get("PEERTILE_USE_VMM")
    cache_dir = env.get("PEERTILE_CACHE_DIR")
    return Config(
        wait_timeout_s=_number(
            env, "PEERTILE_WAIT_TIMEOUT_S", 30.0, float, lambda v: 0 < v < 1e9, "seconds > 0 and < 1e9"
        ),
        cache_folder=os.path.expanduser(cache_dir) if cache_dir else f"{_home(env)}/.cache/peertile",
        cache_max_bytes=_number(env, "PEERTILE_CACHE_MAX_MB", 512, int, lambda v: v >= 0, "MiB >= 0") << 20,
        cpu_threads=_number(
            env, "PEERTILE_CPU_THREADS", None, int, lambda v: 1 <= v <= 1024, "an integer from 1 to 1024"
        ),
        cpu_target=env.get("PEERTILE_CPU_TARGET"),
        master_port=_number(env, "PEERTILE_MASTER_PORT", None, int, lambda v: 0 < v < 65536, "a port, 1-65535"),
        spin_budget_us=_number(env, "PEERTILE_SPIN_BUDGET_US", 20, int, lambda v: v >= 0, "microseconds >= 0"),
        host_sync=host_sync,
        verify_passes=_number(env, "PEERTILE_DEBUG_VERIFY", 1, int, lambda v: v in (0, 1), "0 or 1") == 1,
        device=device,
        use_vmm=None if use_vmm is None else use_vmm == "1",
        multicast=env.get("PEERTILE_MULTICAST") == "1",
        multicast_veto=next((f"{n}={v}" for n, v in _MULTICAST_VETOES if env.get(n) == v), None),
        rehearse=rehearse,
        timeline=env.get("PEERTILE_TIMELINE") or None,
    )


def warn_of_cache(folder: str | Path, error: str | None) -> None:
    """Says once, on the logger "peertile", that nothing can be kept in `folder`. No failure: it costs time alone."""
    _warn_of_cache(os.fspath(folder), error)


@cache
def _warn_of_cache(folder: str, error: str | None) -> None:
    import logging  # takes 5 ms, which `import peertile` does not pay

    logging.getLogger("peertile").warning(
        "PEERTILE_CACHE_DIR: expected a folder that can be written, got %s (%s); "
        "every process compiles its kernels again",
        *(folder, error),
    )


_current: Config | None = None


def config() -> Config:
    """The settings of this process, read from its environment at the first call."""
    global _current
    if _current is None:
        _current = read_config(os.environ)
    return _current
