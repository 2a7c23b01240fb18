"""Progress bars and tables refuse what they cannot show."""

import pytest
from typer.testing import CliRunner

import peertile as pt
from peertile.cli.main import app_of
from peertile.errors import ArgumentError


def shown(*args):
    with pt.progress(*args):
        pass


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: shown(None, "a", 3), "progress(group): expected a group, as pt.init() gives, got None"),
        (lambda: shown(pt.init(), 3, 3), "progress(label): expected a string, got 3"),
        (lambda: shown(pt.init(), "a", "3"), "progress(total): expected an integer >= 0, got '3'"),
        (lambda: pt.report(3, {}), "report(title): expected a string, got 3"),
        (lambda: pt.report("a", 3), "report(rows): expected a mapping of strings to strings, got 3"),
        (lambda: pt.report("a", {1: "b"}), "report(rows): expected a mapping of strings to strings, got {1: 'b'}"),
    ],
)
def test_a_wrong_argument_is_refused(call, text):
    with pytest.raises(ArgumentError) as caught:
        call()
    assert str(caught.value) == text


def test_version():
    found = CliRunner().invoke(app_of(["cache"]), ["--version"])
    assert (found.exit_code, found.stdout) == (0, f"peertile {pt.__version__}\n")


def test_texts_are_shown_as_they_are(capsys):
    pt.report("a [/b]", {"x [1, 2]": "[red] :x: [/y]"})
    title, _, row, _ = capsys.readouterr().out.splitlines()
    assert (title.strip(), row) == ("a [/b]", "│ x [1, 2] │ [red] :x: [/y] │")


def test_a_bar_shows_texts_as_they_are(capsys, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    with pt.progress(pt.init(), "a [/b]", 1) as bar:
        bar(1, "[/c]")
    assert "1/1 [/c]" in capsys.readouterr().out
