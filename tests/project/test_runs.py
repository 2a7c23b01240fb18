"""Records of the suite on other devices: what of pytest's XML counts as passed, and what the feature table makes of it."""

import json
from pathlib import Path

from tools import features, marks, runs

XML = """<?xml version="1.0"?><testsuites><testsuite name="pytest">
<testcase classname="tests.project.test_runs" name="test_good[a]" time="0.1" />
<testcase classname="tests.project.test_runs" name="test_good[b-[c]]" time="0.1"></testcase>
<testcase classname="tests.project.test_runs.TestClass" name="test_in_a_class" time="0.1" />
<testcase classname="tests.project.test_runs" name="test_half[a]" time="0.1" />
<testcase classname="tests.project.test_runs" name="test_half[b]" time="0.1"><failure message="no" /></testcase>
<testcase classname="tests.project.test_runs" name="test_torn_down" time="0.1" />
<testcase classname="tests.project.test_runs" name="test_torn_down" time="0.1"><error message="no" /></testcase>
<testcase classname="tests.project.test_runs" name="test_skipped" time="0.1"><skipped message="no" /></testcase>
<testcase classname="" name="pytest" time="0.1"><error message="no" /></testcase>
</testsuite></testsuites>
"""
HERE = "tests/project/test_runs.py"


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_test_counts_as_passed_when_each_of_its_cases_passed_in_every_run(tmp_path) -> None:
    one = written(tmp_path, "one.xml", XML)
    two = written(
        tmp_path,
        "two.xml",
        XML.replace("test_in_a_class", "test_good[c]").replace('name="test_half[b]"', 'name="test_half[c]"'),
    )
    made = runs.record("cuda", [one, two], {"date": "2026-11-30T01:00:00+00:00"})
    assert made["suite"] == {"device": "cuda", "passed": {HERE: ["test_good", "test_in_a_class"]}}
    counted = {figure["name"]: figure["median"] for figure in made["figures"]}
    assert counted["suite.one.passed"] == 5
    assert [counted[f"suite.two.{outcome}"] for outcome in ("failure", "error", "skipped")] == [1, 1, 1]


def test_the_newest_record_of_a_device_counts(tmp_path) -> None:
    for day, test in (("29", "test_old"), ("30", "test_new")):
        suite = {"device": "cuda", "passed": {HERE: [test]}}
        written(tmp_path, f"2026-11-{day}-suite.json", json.dumps({"schema": 1, "suite": suite}))
    written(tmp_path, "2026-11-30-zzz.json", '{"schema": 1, "figures": [{"name": "suite"}]}')
    assert runs.recorded(tmp_path) == {"cuda": ("2026-11-30-suite.json", {(HERE, "test_new")})}


def test_what_passed_elsewhere_unchanged_is_claimed_there(monkeypatch) -> None:
    def claim(row: str, target: str, test: str) -> marks.Mark:
        return marks.Mark("feature", (row, target), HERE, test, 1)

    found = [claim("K1", "cpu", "test_ran"), claim("K2", "cpu", "test_did_not"), claim("K3", "sim", "test_ran")]
    monkeypatch.setattr(features, "marks", lambda name: found)
    monkeypatch.setattr(features, "recorded", lambda: {"cuda": ("a.json", {(HERE, "test_ran")})})
    assert features.claims_of_runs() == [claim("K1", "cuda", "test_ran")]
