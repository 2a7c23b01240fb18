"""What the benchmarks of GPUs print becomes a record with the limits that are promised."""

import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "device" / "to_record.py"


@pytest.fixture
def to_record():
    spec = importlib.util.spec_from_file_location("to_record", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made(to_record, tmp_path, kind, *lines):
    log, facts, out = (tmp_path / name for name in ("log", "facts.json", "out.json"))
    log.write_text("not JSON\n" + "".join(json.dumps(line) + "\n" for line in lines))
    facts.write_text(
        json.dumps({"date": "2027-01-15T00:00:00", "machine": {"gpus": []}, "versions": {"peertile": "1"}})
    )
    arguments = [kind, str(log), "--facts", str(facts), "--command", "typed", "--commit", "abc", "--out", str(out)]
    assert to_record.main(arguments) == 0
    return json.loads(out.read_text())


def test_an_all_reduce_is_held_to_each_peer_and_to_its_own_bound(to_record, tmp_path, capsys):
    us = {"peertile": 2.0, "nccl": 18.0, "torch one-shot": 4.0, "torch two-shot": {"error": "none"}}
    record = made(to_record, tmp_path, "collectives", {"part": "all_reduce", "bytes": 1024, "us": us})
    assert [(f["baseline"]["name"] if "baseline" in f else None, f["limit"], f["met"]) for f in record["figures"]] == [
        ("nccl", 6.0, True), ("torch one-shot", 1.6, False), (None, 2.6, True),
    ]  # fmt: skip
    assert record["versions"] == {"peertile": "1 (abc)"}
    assert capsys.readouterr().out == (
        "all_reduce.bf16.1024: 2.0 us, limit 1.6, {'name': 'torch one-shot', 'median': 4.0}\n"
        "2 of 3 limits are met, 3 figures\n"
    )


@pytest.mark.parametrize(
    ("nccl", "limits"),
    [(30.0, {"sequence": 100.0 / 1.3}), (29.0, {"GEMM": 73.5})],
    ids=["the all-reduce is long", "the product is long"],
)
def test_a_product_and_all_reduce_is_held_to_what_matters_there(to_record, tmp_path, nccl, limits):
    us = {"peertile": 70.0, "sequence": 100.0, "GEMM": 70.0, "NCCL": nccl}
    record = made(to_record, tmp_path, "library", {"section": "reduce", "case": "a", "us": us, "relative_error": 1e-3})
    found = {f["baseline"]["name"]: f["limit"] for f in record["figures"] if "limit" in f}
    assert found == {name: round(limit, 4) for name, limit in limits.items()}
    assert {f["notes"] for f in record["figures"]} == {"relative error 1.0e-03"}


def test_records_are_joined_and_checks_are_held_to_one_percent(to_record, tmp_path):
    one = {"date": "d", "machine": {}, "versions": {"peertile": "1"}, "figures": [{"name": "x", "met": True}]}
    line = {
        "section": "checked",
        "case": "c",
        "us": {"a b": 1.0, "a b, unchecked": 1.0},
        "checked_of_unchecked": {"a b": 1},
    }
    record = made(to_record, tmp_path, "one-gpu", one, line)
    assert [(f["name"], f["met"]) for f in record["figures"]] == [("x", True), ("checked.a_b", True)]
