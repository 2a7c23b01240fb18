"""Every example runs through the command line on 1, 2, 3 and 4 ranks, and on 8 with two cores."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SAYS = {
    "vector_add": "vector_add: 1000003 elements are right",
    "matmul": "matmul: 515x700x300 is right in f32 and bf16",
    "allreduce": "bf16 sums over {n} ranks are right, to the bit on every rank",
    "two_shot": "f32 sums over {n} ranks are right, to the bit",
    "handshake": "handshake: 256 rounds between {n} ranks are right in both launch orders",
    "multicast_handshake": "multicast handshake: 256 rounds between {n} ranks are right in both launch orders (software)",
    "digits_data_parallel": "weights equal on all ranks",
    "pipelines": "pipelines: 6 inputs agree, chained, awaited, shared and replayed",
    "graph_loop": "graph_loop: 20 replays of 4 nodes are right",
    "serve_digits": "serve_digits: every client was answered",
    "decode_loop": " nodes on {n} ranks are right",
}
ELSEWHERE = {"embed"}  # needs published weights: tests/layers/test_embed.py


def run(name, ranks, *, timeout=110, device="cpu"):
    return subprocess.run(
        [sys.executable, "-m", "peertile", "run", f"{EXAMPLES / name}.py", "--ranks", str(ranks), "--device", device],
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def test_every_example_has_its_line_here():
    assert {p.stem for p in EXAMPLES.glob("*.py")} == set(SAYS) | ELSEWHERE


@pytest.mark.slow
@pytest.mark.feature("U2", "cpu")
@pytest.mark.any_device
@pytest.mark.native_only
@pytest.mark.gpus("ranks")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", sorted(SAYS))
def test_example_runs(name, ranks, device):
    done = run(name, ranks, device=device)
    assert done.returncode == 0, done.stderr + done.stdout
    assert SAYS[name].format(n=ranks) in done.stdout
    assert done.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["allreduce", "two_shot"])
def test_example_runs_with_more_ranks_than_cores(name):
    done = run(name, 8)
    assert done.returncode == 0, done.stderr + done.stdout
    assert SAYS[name].format(n=8) in done.stdout


@pytest.mark.slow
def test_an_example_says_how_many_ranks_it_takes():
    done = run("decode_loop", 5)
    assert done.returncode == 1
    assert "decode_loop: expected at most 4 ranks, a group of heads for each, got 5" in done.stderr.splitlines()


@pytest.mark.slow
def test_digits_reports_accuracy_agreement_times_and_bytes():
    done = run("digits_data_parallel", 4)
    assert done.returncode == 0, done.stderr + done.stdout
    cells = [line.split("│") for line in done.stdout.splitlines() if line.startswith("│")]
    rows = {name.strip(): text.strip() for _, name, text, _ in cells if name.strip()}
    assert float(rows["test accuracy"]) >= 0.95
    assert rows["weights equal on all ranks"] == "to the bit"
    assert rows["one rank alone"].startswith("accuracy 0.9")
    for row in ("time per step", "compute", "communication and update"):
        assert rows[row].endswith("µs"), row
    assert int(rows["bytes sent per rank and step"]) == 3 * 11 * 1024 * 4
