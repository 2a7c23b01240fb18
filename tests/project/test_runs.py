"""Records of the suite on other devices: what counts as passed, and what the feature table makes of it."""

import json
from pathlib import Path

import pytest
from tools import features, marks, runs

HERE = "tests/project/test_runs.py"


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def lines(*tests: tuple[str, str, str]) -> str:
    return "".join(json.dumps({"test": f"{HERE}::{t}", "when": w, "outcome": o, "s": 0.1}) + "\n" for t, w, o in tests)


def test_a_test_counts_as_passed_when_each_of_its_cases_passed_in_every_run(tmp_path) -> None:
    fine = [("test_good[a]", "call", "passed"), ("test_good[b-[c::d]]", "call", "passed")]
    one = written(
        tmp_path,
        "one",
        lines(
            *fine,
            ("TestClass::test_in_a_class", "call", "passed"),
            ("test_half[a]", "call", "passed"),
            ("test_torn_down", "call", "passed"),
            ("test_torn_down", "teardown", "failed"),
            ("test_skipped", "setup", "skipped"),
        ),
    )
    two = written(tmp_path, "two", lines(*fine, ("test_half[a]", "call", "failed")))
    made = runs.record("cuda", [one, two], {"date": "2026-11-30T01:00:00+00:00"})
    assert made["suite"] == {"device": "cuda", "passed": {HERE: ["test_good", "test_in_a_class"]}}
    counted = {figure["name"]: figure["median"] for figure in made["figures"]}
    assert counted["suite.one.passed"] == 5
    assert [counted[f"suite.one.{outcome}"] for outcome in ("failed", "error", "skipped")] == [0, 1, 1]
    assert counted["suite.two.failed"] == 1


def test_what_the_run_wrote_of_itself_goes_into_the_record(tmp_path, monkeypatch, capsys) -> None:
    facts = {
        "date": "2026-11-30T08:20:00+00:00", "command": "all.py", "machine": {"cpu": "a cpu", "cores": 16, "gpus": ["a gpu"]},
        "versions": {"python": "3.12.3"},
    }  # fmt: skip
    given = written(tmp_path, "facts.json", json.dumps(facts))
    outcomes = written(tmp_path, "suite.outcomes", lines(("test_good", "call", "passed")))
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    monkeypatch.setattr(runs, "RECORDS", tmp_path)
    options = [
        "--device",
        "cuda",
        "--name",
        "suite",
        "--notes",
        "alone",
        "--version",
        "peertile=1",
        "--figure",
        "programs=500",
    ]
    monkeypatch.setattr("sys.argv", ["runs.py", *options, "--facts", str(given), str(outcomes)])
    assert runs.main() == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 tests of 2026-11-30-suite.json"
    made = json.loads((tmp_path / "2026-11-30-suite.json").read_text())
    assert made["machine"] == {"cpu": "a cpu", "os": "Linux", "cores": 16, "gpus": ["a gpu"]}
    assert made["versions"] == {"python": "3.12.3", "peertile": "1"}
    assert (made["command"], made["notes"]) == ("all.py", "alone")
    counted = {figure["name"]: figure["median"] for figure in made["figures"]}
    assert (counted["suite.suite.passed"], counted["programs"]) == (1, 500)


def test_a_record_needs_its_date_and_its_command(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["runs.py", "--device", "cuda", "--name", "suite", str(tmp_path / "outcomes")])
    with pytest.raises(SystemExit):
        runs.main()
    assert capsys.readouterr().err.endswith("expected command and date, given or among the facts\n")


def test_the_newest_record_of_a_device_counts(tmp_path) -> None:
    for day, test in (("29", "test_old"), ("30", "test_new")):
        suite = {"device": "cuda", "passed": {HERE: [test]}}
        written(tmp_path, f"2026-11-{day}-suite.json", json.dumps({"schema": 1, "suite": suite}))
    written(tmp_path, "2026-11-30-zzz.json", '{"schema": 1, "figures": [{"name": "suite"}]}')
    assert runs.recorded(tmp_path) == {"cuda": ("2026-11-30-suite.json", {(HERE, "test_new")})}
    for name, hour, test in (("a", "09", "test_newer"), ("b", "08", "test_older")):
        made = {"date": f"2026-11-30T{hour}:00:00+00:00", "suite": {"device": "sim", "passed": {HERE: [test]}}}
        written(tmp_path, f"2026-11-30-{name}.json", json.dumps(made))
    assert runs.recorded(tmp_path)["sim"] == ("2026-11-30-a.json", {(HERE, "test_newer")})


def test_what_passed_elsewhere_unchanged_is_claimed_there(monkeypatch) -> None:
    def claim(row: str, target: str, test: str) -> marks.Mark:
        return marks.Mark("feature", (row, target), HERE, test, 1)

    found = [
        claim("K1", "cpu", "test_ran"), claim("K2", "cpu", "test_did_not"), claim("K3", "sim", "test_ran"),
        claim("K4", "cuda", "test_on_gpus"), claim("K5", "cuda", "test_elsewhere"), claim("K6", "cuda", "test_compiles"),
    ]  # fmt: skip
    monkeypatch.setattr(features, "marks", lambda name: found)
    monkeypatch.setattr(features, "marked", lambda name: {(HERE, "test_on_gpus"), (HERE, "test_elsewhere")})
    monkeypatch.setattr(
        features, "recorded", lambda: {"cuda": ("a.json", {(HERE, "test_ran"), (HERE, "test_on_gpus")})}
    )
    assert features.claims_of_runs() == [claim("K1", "cuda", "test_ran")]
    assert features.claims_here() == [mark for mark in found if mark.test != "test_elsewhere"]
