"""Groups whose ranks torch.distributed has brought together."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

pytestmark = [pytest.mark.any_device, pytest.mark.native_only, pytest.mark.gpu_only]

RANKS = Path(__file__).with_name("torch_ranks.py")
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PEERTILE_JOB")


def run(case, size, folder):
    env = {k: v for k, v in os.environ.items() if k not in LAUNCHERS} | {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANKS), str(rank), str(size), str(folder), case],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=100) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(err for _, err in said)
    return [out.strip() for out, _ in said]


@pytest.mark.gpus("size")
@pytest.mark.feature("A6", "cpu")
@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_ranks_of_torch_are_a_group_without_a_launcher(size, tmp_path):
    assert run("world", size, tmp_path) == ["done"] * size


@pytest.mark.gpus(3)
@pytest.mark.feature("A6", "cpu")
@pytest.mark.slow
def test_a_process_group_of_some_ranks_is_a_group_of_those(tmp_path):
    assert run("part", 3, tmp_path) == [
        "ArgumentError: peertile.torch.init: expected a process group with this process in it, got one without rank 0 of "
        "torch's world",
        *(
            f"ArgumentError: peertile.torch.init: expected the process group that this process has joined, rank {k} of 2, "
            f"got rank {k + 1} of 3; join the larger one first and take group.subgroup(ranks)"
            for k in range(2)
        ),
    ]


def test_without_torch_distributed_there_is_nothing_to_join(tmp_path):
    assert run("uninitialised", 1, tmp_path) == [
        "UsageError: peertile.torch.init: expected torch.distributed to be initialised, as its ranks become ours, got "
        "nothing; call torch.distributed.init_process_group first, or peertile.init for a group without torch"
    ]
