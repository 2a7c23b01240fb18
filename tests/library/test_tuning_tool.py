"""The tool that tunes collectives for GPUs: what it drops, how it goes on, and the rows that it prints."""

import os
import sys
from pathlib import Path

import pytest
import tuning_tool_ranks

import peertile as pt
from peertile.config import config
from peertile.library.selection import Algorithm

DEVICE = Path(__file__).parents[2] / "benchmarks" / "device"


@pytest.fixture(scope="module", autouse=True)
def tool():
    """The tool sets defaults for its own process; this one's stay as they are."""
    environment, path = dict(os.environ), list(sys.path)
    sys.path[:0] = [str(DEVICE)]
    os.environ["PEERTILE_DEVICE"] = "cpu"
    made = tuning_tool_ranks.tool()
    sys.path[:] = path
    os.environ.clear()
    os.environ.update(environment)
    return made


@pytest.mark.slow
def test_a_way_that_is_wrong_or_never_ends_is_dropped_and_the_run_goes_on(monkeypatch):
    monkeypatch.setattr("peertile.config._current", config()._replace(wait_timeout_s=4.0))
    results = pt.spawn(tuning_tool_ranks.measured, 2, model=pt.RankModel.THREADS, timeout_s=100)
    for found, dropped, said, _ in results:
        assert set(found) == {"filled 512 x 4", "pushed 256 x 4", "filled 512 x 2, 64 slots"}
        assert all(us > 0 for us in found.values())
        assert set(dropped) == {"wrong", "alone"}
        assert "AssertionError" in dropped["wrong"]
        assert any(kind in dropped["alone"] for kind in ("WaitTimeout", "AssertionError"))
        assert said[:4] == ["filled 512 x 4", "wrong", "alone", "pushed 256 x 4"]
    # All ranks agree on every figure and every reason.
    assert results[0][:2] == results[1][:2]


def test_ways_that_a_row_of_the_table_leads_to():
    found = pt.spawn(tuning_tool_ranks.sayable, 2, model=pt.RankModel.THREADS, timeout_s=60)
    assert found == [[True, False, True, True, False]] * 2


def test_more_ways_of_a_long_message_have_programs_with_as_many_turns(tool):
    cases = sys.modules["collective_cases"]
    family, sent = cases.Family.ALL_REDUCE, 1 << 24
    ways = cases.roomy_variants(family, sent, 2)
    assert {
        "pushed 8192 x 512", "pushed 8192 x 528", "pushed 16384 x 256", "pushed 16384 x 342", "pushed 16384 x 396",
        "filled 8192 x 512", "filled 8192 x 256, 32 slots", "filled 8192 x 528, 64 slots", "filled 16384 x 264, 16 slots",
        "filled 16384 x 512, 32 slots",
    } <= set(ways)  # fmt: skip
    assert cases.roomy_variants(family, 1 << 20, 2) == {}
    assert cases.roomy_variants(cases.Family.ALL_GATHER, sent, 4) == {}


CHILD = """
import json, os, sys, threading
state = json.loads(os.environ["PEERTILE_TUNE_STATE"])
def say(**line): print(json.dumps(line), flush=True)
say(ready="NVIDIA H200", arch="sm_90")
for nbytes in (1024, 4096):
    if ["all_reduce", nbytes] in state["done"]:
        continue
    us = {}
    for way in ("pushed 512 x 2", "filled 512 x 2", "flagged 512 x 2"):
        if ["all_reduce", nbytes, way] in state["dropped"]:
            continue
        say(trying=["all_reduce", nbytes, way])
        if nbytes == 4096 and way.startswith(HANGS):
            threading.Event().wait(60)
        if nbytes == 1024 and way.startswith(DIES):
            os._exit(3)
        us[way] = 1.0
    say(family="all_reduce", bytes=nbytes, sent=nbytes, us=us, table=list(us), dropped={})
say(end=True)
"""


def supervised(tool, hangs="none", dies="none", silence=60.0, budget=60.0):
    text = f"HANGS, DIES = {hangs!r}, {dies!r}\n{CHILD}"
    return tool.supervise([sys.executable, "-c", text], budget, silence)


@pytest.mark.slow
def test_a_run_that_ends_or_says_nothing_more_is_begun_again_behind_the_way_that_it_was_at(tool):
    found, about = supervised(tool, hangs="filled", dies="pushed", silence=2.0)
    sizes = found["all_reduce"]
    assert about["begun"] == 3
    assert (about["device"], about["arch"]) == ("NVIDIA H200", "sm_90")
    gone = "the run ended there, or said nothing more"
    assert sizes[1024]["dropped"] == {"pushed 512 x 2": gone}
    assert sizes[4096]["dropped"] == {"filled 512 x 2": gone}
    assert set(sizes[1024]["us"]) == {"filled 512 x 2", "flagged 512 x 2"}
    assert set(sizes[4096]["us"]) == {"pushed 512 x 2", "flagged 512 x 2"}


def test_a_run_that_fails_before_any_way_is_not_begun_again(tool):
    found, about = tool.supervise([sys.executable, "-c", "raise SystemExit(7)"], 60.0, 30.0)
    assert (found, about["begun"], about["failed"]) == ({}, 1, "status 7")


def line(sent, us, table=None, dropped=None):
    return {"sent": sent, "us": us, "table": list(us) if table is None else table, "dropped": dropped or {}}


FOUND = {
    "all_reduce": {
        4096: line(4096, {"filled 512 x 8": 2.0, "pushed 4096 x 1": 4.0, "nccl": 8.0}, ["filled 512 x 8", "pushed 4096 x 1"]),
        1024: line(1024, {"flagged 128 x 8": 2.0, "flagged 256 x 4": 1.95, "nccl": 8.0}, ["flagged 128 x 8", "flagged 256 x 4"]),
        1 << 24: line(1 << 24, {"pushed 4096 x 264": 50.0, "pushed 4096 x 132": 40.0, "nccl": 60.0}, ["pushed 4096 x 264"]),
    }
}  # fmt: skip


def test_rows_name_the_fastest_of_what_the_table_can_say(tool):
    rows = tool.rows_of(FOUND, "sm_90", 2)
    # A tie goes to the first; a bound is in the middle, by ratio; other numbers of programs cannot be said.
    assert rows == {
        "all_reduce": {
            "target": "cuda", "arch": "sm_90", "world": 2,
            "entries": [[2048, "flagged", 128], [262144, "filled", 512], [None, "pushed", 4096]],
        }
    }  # fmt: skip


def test_figures_have_the_limit_that_is_asked_between_two_ranks(tool):
    rows = tool.rows_of(FOUND, "sm_90", 2)
    figures = tool.figures_of(FOUND, rows, 2)
    assert [(f["name"], f["median"], f["limit"], f["met"]) for f in figures] == [
        ("all_reduce.bf16.1024", 2.0, 2.67, True),
        ("all_reduce.bf16.4096", 2.0, 2.67, True),
        ("all_reduce.bf16.16777216", 50.0, 57.14, True),
    ]
    assert all("limit" not in f for f in tool.figures_of(FOUND, rows, 4))


@pytest.mark.parametrize(
    ("algorithm", "sent", "ranks", "us"),
    [
        ("filled", 370_000, 2, 2.59),
        ("flagged", 370_000, 2, 3.59),
        ("pushed", 370_000, 2, 3.92),
        ("pushed", 370_000, 3, 4.92),
    ],
)
def test_a_call_takes_its_bytes_on_the_link_and_its_hops_at_least(tool, algorithm, sent, ranks, us):
    assert tool.least_us(Algorithm(algorithm), sent, ranks) == us


@pytest.mark.parametrize(
    ("device", "ranks", "name"),
    [("NVIDIA H200", 2, "h200x2"), ("NVIDIA GB200 NVL-4", 4, "nvl4x4"), ("x86_64, 2 threads", 3, "cpux3")],
)
def test_records_are_named_by_the_machine(tool, device, ranks, name):
    assert tool.machine_name(device, ranks) == name


def test_a_run_of_ranks_has_a_limit_and_all_else_as_given(tool):
    options = tool.arguments_of(["--ranks", "4", "--budget", "90", "--limit", "80"])
    assert (options.ranks, options.budget, options.limit, options.silence) == (4, 90.0, 80.0, 60.0)
