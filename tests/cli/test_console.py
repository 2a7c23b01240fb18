"""Progress bars and tables refuse what they cannot show."""

import pytest

import peertile as pt
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
