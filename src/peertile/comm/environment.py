"""What a launcher says about this process: its rank, how many there are, and where they meet.

Read from a mapping, never from the process itself, so that tests and the checker can pass their own.
Understood: `peertile run` and torchrun (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE), Open MPI,
MPICH and its kin (hydra), Slurm's srun. One host only; several are refused by name.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import NamedTuple

from peertile.config import read_config
from peertile.errors import ArgumentError, UnsupportedError

__all__ = ["DEFAULT_PORT", "Placement", "read_placement", "started_by_launcher"]

DEFAULT_PORT = 8361
_ONE_HOST = ": groups over several hosts are not supported yet"


class Placement(NamedTuple):
    """Where this process stands in its job."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    port: int
    job: str
    launcher: str  # whose variables were read; empty without a launcher


class _Family(NamedTuple):
    """The variables of one launcher. `job` names what tells two jobs on one host apart."""

    launcher: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    job: tuple[str, ...]
    hosts: tuple[str, ...] = ()  # number of hosts; more than 1 is refused
    host_rank: tuple[str, ...] = ()  # number of this host; not 0 is refused


_FAMILIES = (
    _Family(
        "peertile run or torchrun",
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        job=("PEERTILE_JOB", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
        hosts=("NNODES", "GROUP_WORLD_SIZE"),
        host_rank=("NODE_RANK", "GROUP_RANK"),
    ),
    _Family(
        "Open MPI",
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    _Family(
        "MPICH",
        *("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        job=("PMI_JOBID", "PMI_PORT"),
    ),
    _Family(
        "Slurm",
        *("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", ""),
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        hosts=("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
        host_rank=("SLURM_NODEID",),
    ),
)


def started_by_launcher(env: Mapping[str, str]) -> bool:
    """Whether a launcher's variables are present."""
    return _family(env) is not None


def read_placement(
    env: Mapping[str, str],
    *,
    ranks: int | None = None,
    rank: int | None = None,
    local_rank: int | None = None,
    local_ranks: int | None = None,
    port: int | None = None,
) -> Placement:
    """This process's place, from the launcher's variables and `init`'s arguments, which must agree."""
    family = _family(env)
    if family is None:
        found: dict[str, int | None] = dict.fromkeys(("rank", "size", "local_rank", "local_size"))
        job, launcher, names = "", "", {}
    else:
        values = (family.rank, family.size, family.local_rank, family.local_size)
        names = dict(zip(("rank", "size", "local_rank", "local_size"), values, strict=True))
        found = {key: _integer(env, name) for key, name in names.items()}
        job = "-".join(env[name] for name in family.job if env.get(name))
        launcher = family.launcher
        _one_host(env, family)
    given = {"rank": rank, "size": ranks, "local_rank": local_rank, "local_size": local_ranks}
    rank, ranks, local_rank, local_ranks = (_agree(key, given[key], found[key], names.get(key, "")) for key in given)
    size = _size(ranks, rank)
    rank = rank or 0
    _in_range("rank", rank, size)
    local_size = _local_size(local_ranks, rank, size, launcher)
    local_rank = rank if local_rank is None else local_rank
    _in_range("local_rank", local_rank, local_size)
    if size > 1:
        _this_host(env.get("MASTER_ADDR", "127.0.0.1"))
    return Placement(rank, size, local_rank, local_size, _port(env, port), job, launcher)


def _family(env: Mapping[str, str]) -> _Family | None:
    for family in _FAMILIES:
        if family.rank not in env and family.size not in env:
            continue
        # sbatch and salloc set Slurm's task variables for the script too; only srun's steps are ranks.
        if family.launcher == "Slurm" and not 0 <= (_integer(env, "SLURM_STEP_ID") or 0) < 0xFFFF_FF00:
            continue
        if family.launcher == "Slurm" and "SLURM_STEP_ID" not in env:
            continue
        missing = [name for name in (family.rank, family.size) if name not in env]
        if missing:
            present = family.rank if missing[0] == family.size else family.size
            raise ArgumentError(
                f"{missing[0]}: expected an integer, as {present} is set, got nothing; "
                f"start the program with peertile run or torchrun, or unset {present}"
            )
        return family
    return None


def _integer(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise ArgumentError(f"{name}: expected an integer, got {text!r}") from None


def _one_host(env: Mapping[str, str], family: _Family) -> None:
    for name in family.hosts:
        if (_integer(env, name) or 1) > 1:
            raise UnsupportedError(f"{name}: expected 1, got {env[name]}{_ONE_HOST}")
    for name in family.host_rank:
        if (_integer(env, name) or 0) != 0:
            raise UnsupportedError(f"{name}: expected 0, got {env[name]}{_ONE_HOST}")


_WORDS = {"rank": "rank", "size": "ranks", "local_rank": "local_rank", "local_size": "local_ranks"}


def _agree(key: str, given: int | None, found: int | None, variable: str) -> int | None:
    if given is not None and found is not None and given != found:
        raise ArgumentError(
            f"init({_WORDS[key]}={given}): expected {variable} ({found}), got {given}; "
            f"leave the argument out, or start the program with that number"
        )
    return given if given is not None else found


def _size(ranks: int | None, rank: int | None) -> int:
    if ranks is None:
        if rank is not None:
            raise ArgumentError(f"init(rank={rank}): expected ranks= as well, got none")
        return 1
    if ranks < 1:
        raise ArgumentError(f"number of ranks: expected at least 1, got {ranks}")
    if rank is None and ranks > 1:
        raise ArgumentError(
            f"init(ranks={ranks}): expected a launcher or rank=, got neither; "
            f"start the program with `peertile run PROGRAM --ranks {ranks}`, or call pt.run(main, ranks={ranks})"
        )
    return ranks


def _local_size(local: int | None, rank: int, size: int, launcher: str) -> int:
    """The number of ranks on this host, which must be all."""
    if local is None:
        # Slurm has no such variable; it says how many hosts there are instead. Arguments mean this host.
        if launcher and launcher != "Slurm" and size > 1:
            raise ArgumentError(
                f"LOCAL_WORLD_SIZE: expected the number of ranks on this host, as rank {rank} of {size} was started "
                f"by {launcher}, got nothing; start the program with peertile run, torchrun or mpirun"
            )
        return size
    if local > size:
        raise ArgumentError(f"number of ranks on this host: expected at most {size}, all ranks, got {local}")
    if local < size:
        raise UnsupportedError(f"number of ranks on this host: expected {size}, all ranks, got {local}{_ONE_HOST}")
    return local


def _in_range(role: str, value: int, bound: int) -> None:
    if not 0 <= value < bound:
        raise ArgumentError(f"{role}: expected 0 to {bound - 1}, got {value}")


def _port(env: Mapping[str, str], port: int | None) -> int:
    """The argument, PEERTILE_MASTER_PORT, MASTER_PORT, then the default."""
    if port is not None:
        if not 0 < port < 65536:
            raise ArgumentError(f"init(port={port}): expected a port, 1-65535, got {port}")
        return port
    own = read_config(env).master_port
    if own is not None:
        return own
    common = _integer(env, "MASTER_PORT")
    if common is not None and not 0 < common < 65536:
        raise ArgumentError(f"MASTER_PORT: expected a port, 1-65535, got '{common}'")
    return DEFAULT_PORT if common is None else common


def _this_host(address: str) -> None:
    """An address of this host can be bound; every other one cannot."""
    if address in ("localhost", "::1") or address.startswith("127.") or address == socket.gethostname():
        return
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM)
    except OSError:
        found = []
    for family, kind, protocol, _, target in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(target)
                return
        except OSError:
            continue
    raise UnsupportedError(f"MASTER_ADDR: expected an address of this host, got {address!r}{_ONE_HOST}")
