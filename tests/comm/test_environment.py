"""Whom a process believes about its rank, and what it refuses."""

import os
import socket

import pytest

from peertile.comm.environment import Placement, read_placement, started_by_launcher
from peertile.errors import ArgumentError, UnsupportedError

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
}


def without(env, *names):
    return {name: value for name, value in env.items() if name not in names}


def test_without_variables_it_is_a_group_of_one():
    assert read_placement({}) == Placement(0, 1, 0, 1, 8361, "", "")
    assert not started_by_launcher({})


@pytest.mark.feature("D1", "cpu")
def test_torchrun_variables():
    expected = Placement(1, 2, 1, 2, 29500, "none-0", "peertile run or torchrun")
    assert read_placement(TORCHRUN) == expected
    assert started_by_launcher(TORCHRUN)


def test_open_mpi_variables():
    env = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}
    env |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "3", "PMIX_NAMESPACE": "prterun-77@1"}
    assert read_placement(env) == Placement(2, 3, 2, 3, 8361, "prterun-77@1", "Open MPI")


def test_mpich_variables():
    env = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2", "PMI_PORT": "h:1"}
    assert read_placement(env) == Placement(0, 2, 0, 2, 8361, "h:1", "MPICH")


def test_slurm_step_variables():
    env = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1", "SLURM_NNODES": "1"}
    env |= {"SLURM_JOB_ID": "9", "SLURM_STEP_ID": "0"}
    assert read_placement(env) == Placement(1, 2, 1, 2, 8361, "9-0", "Slurm")


@pytest.mark.parametrize("step", [{}, {"SLURM_STEP_ID": "4294967290"}])
def test_a_slurm_batch_script_is_no_rank(step):
    env = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"} | step
    assert read_placement(env).size == 1
    assert not started_by_launcher(env)


@pytest.mark.sentence("PR-4")
@pytest.mark.parametrize(
    ("env", "port", "expected"),
    [
        ({}, None, 8361),
        ({"MASTER_PORT": "1000"}, None, 1000),
        ({"MASTER_PORT": "1000", "PEERTILE_MASTER_PORT": "2000"}, None, 2000),
        ({"MASTER_PORT": "1000", "PEERTILE_MASTER_PORT": "2000"}, 3000, 3000),
    ],
)
def test_port_precedence_is_argument_own_variable_common_variable_default(env, port, expected):
    assert read_placement(env, port=port).port == expected


def test_arguments_alone_place_a_rank():
    assert read_placement({}, rank=1, ranks=3) == Placement(1, 3, 1, 3, 8361, "", "")


def test_rank_and_size_without_local_size_are_fine_as_0_of_1():
    assert read_placement({"RANK": "0", "WORLD_SIZE": "1"}).size == 1


@pytest.mark.parametrize("address", ["127.0.0.1", "127.3.2.1", "localhost", "::1", socket.gethostname()])
def test_this_host_may_have_any_of_its_names(address):
    assert read_placement(TORCHRUN | {"MASTER_ADDR": address}).rank == 1


HOSTS = "groups over several hosts are not supported yet"
REFUSED = [
    (
        without(TORCHRUN, "LOCAL_WORLD_SIZE"),
        {},
        ArgumentError,
        "LOCAL_WORLD_SIZE: expected the number of ranks on this host, as rank 1 of 2 was started by peertile run or "
        "torchrun, got nothing; start the program with peertile run, torchrun or mpirun",
    ),
    (
        {"RANK": "0"},
        {},
        ArgumentError,
        "WORLD_SIZE: expected an integer, as RANK is set, got nothing; start the program with peertile run or torchrun"
        ", or unset RANK",
    ),
    (
        {"WORLD_SIZE": "2"},
        {},
        ArgumentError,
        "RANK: expected an integer, as WORLD_SIZE is set, got nothing; start the program with peertile run or torchrun"
        ", or unset WORLD_SIZE",
    ),
    (TORCHRUN | {"RANK": "one"}, {}, ArgumentError, "RANK: expected an integer, got 'one'"),
    (TORCHRUN | {"RANK": "2"}, {}, ArgumentError, "rank: expected 0 to 1, got 2"),
    (TORCHRUN | {"LOCAL_RANK": "-1"}, {}, ArgumentError, "local_rank: expected 0 to 1, got -1"),
    (TORCHRUN | {"WORLD_SIZE": "0"}, {}, ArgumentError, "number of ranks: expected at least 1, got 0"),
    (
        TORCHRUN,
        {"ranks": 4},
        ArgumentError,
        "init(ranks=4): expected WORLD_SIZE (2), got 4; leave the argument out, or start the program with that number",
    ),
    (
        TORCHRUN,
        {"rank": 0},
        ArgumentError,
        "init(rank=0): expected RANK (1), got 0; leave the argument out, or start the program with that number",
    ),
    (
        TORCHRUN,
        {"local_rank": 0},
        ArgumentError,
        "init(local_rank=0): expected LOCAL_RANK (1), got 0; "
        "leave the argument out, or start the program with that number",
    ),
    (
        TORCHRUN,
        {"local_ranks": 1},
        ArgumentError,
        "init(local_ranks=1): expected LOCAL_WORLD_SIZE (2), got 1; "
        "leave the argument out, or start the program with that number",
    ),
    ({}, {"rank": 1}, ArgumentError, "init(rank=1): expected ranks= as well, got none"),
    (
        {},
        {"ranks": 4},
        ArgumentError,
        "init(ranks=4): expected a launcher or rank=, got neither; start the program with "
        "`peertile run PROGRAM --ranks 4`, or call pt.run(main, ranks=4)",
    ),
    (
        TORCHRUN | {"LOCAL_WORLD_SIZE": "4"},
        {},
        ArgumentError,
        "number of ranks on this host: expected at most 2, all ranks, got 4",
    ),
    (
        TORCHRUN | {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"},
        {},
        UnsupportedError,
        f"number of ranks on this host: expected 2, all ranks, got 1: {HOSTS}",
    ),
    (TORCHRUN | {"NNODES": "2"}, {}, UnsupportedError, f"NNODES: expected 1, got 2: {HOSTS}"),
    (TORCHRUN | {"GROUP_WORLD_SIZE": "2"}, {}, UnsupportedError, f"GROUP_WORLD_SIZE: expected 1, got 2: {HOSTS}"),
    (TORCHRUN | {"NODE_RANK": "1"}, {}, UnsupportedError, f"NODE_RANK: expected 0, got 1: {HOSTS}"),
    (TORCHRUN | {"GROUP_RANK": "1"}, {}, UnsupportedError, f"GROUP_RANK: expected 0, got 1: {HOSTS}"),
    (
        TORCHRUN | {"MASTER_ADDR": "192.0.2.1"},
        {},
        UnsupportedError,
        f"MASTER_ADDR: expected an address of this host, got '192.0.2.1': {HOSTS}",
    ),
    ({}, {"port": 0}, ArgumentError, "init(port=0): expected a port, 1-65535, got 0"),
    ({"MASTER_PORT": "70000"}, {}, ArgumentError, "MASTER_PORT: expected a port, 1-65535, got '70000'"),
    ({"PEERTILE_MASTER_PORT": "x"}, {}, ArgumentError, "PEERTILE_MASTER_PORT: expected a port, 1-65535, got 'x'"),
]


@pytest.mark.sentence("PR-3")
@pytest.mark.sentence("PR-2")
@pytest.mark.feature("D1", "cpu")
@pytest.mark.parametrize(("env", "arguments", "kind", "message"), REFUSED, ids=[case[3][:40] for case in REFUSED])
def test_refusals(env, arguments, kind, message):
    with pytest.raises(kind) as caught:
        read_placement(env, **arguments)
    assert str(caught.value) == message


def test_the_own_environment_is_not_looked_at():
    assert "RANK" not in os.environ
    assert read_placement(TORCHRUN).rank == 1
