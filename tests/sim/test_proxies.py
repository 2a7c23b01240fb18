"""Alias and multicast proxies: an order between agents is not one between proxies without a fence on the way."""

import itertools

import pytest

from peertile.memory_model import Order, Proxy
from peertile.sim.explore import explore
from peertile.sim.scripts import Cell, script_case
from peertile.sim.verdicts import Race

GENERIC, ALIAS, MULTICAST = Proxy.GENERIC, Proxy.ALIAS, Proxy.MULTICAST
SETTINGS = list(itertools.product([False, True], repeat=3))


def message(one: Proxy, two: Proxy, before: bool, behind: bool, early: bool = False):
    """x written through `one`, released; acquired, read through `two`; a fence at either side or at neither."""
    x, f = Cell("x"), Cell("f", rank=1)

    def writer(p):
        if early:
            p.alias_fence()
        p.write(x, proxy=one)
        if before:
            p.alias_fence()
        yield from p.put(f, 1)

    def reader(p):
        yield from p.wait(f, 1)
        if behind:
            p.alias_fence()
        p.read(x, proxy=two)

    return script_case([(0, writer), (1, reader)])


@pytest.mark.sentence("MM-30")
@pytest.mark.feature("C2", "sim")
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize(
    ("one", "two"), [(GENERIC, MULTICAST), (GENERIC, ALIAS), (MULTICAST, MULTICAST), (ALIAS, MULTICAST)]
)
def test_a_fence_on_the_way_orders_two_proxies(one, two, setting) -> None:
    before, behind, early = setting
    # What was done through a proxy becomes known by a fence behind it, at the one who did it; what was done through
    # the generic proxy is known to others by a fence anywhere on the way.
    ordered = before or (behind and one is GENERIC)
    report = explore(message(one, two, before, behind, early), 5)
    assert report.clean is ordered


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_what_a_proxy_wrote_is_known_by_the_writers_fence(setting) -> None:
    before, behind, early = setting
    assert explore(message(MULTICAST, GENERIC, before, behind, early), 5).clean is before


def test_a_race_between_proxies_names_the_missing_fence() -> None:
    (verdict,) = explore(message(GENERIC, MULTICAST, False, False), 5).verdicts
    assert isinstance(verdict, Race)
    assert str(verdict) == (
        "race: two accesses of x of rank 0, elements [0], are not ordered\n"
        "  program 0 of the script on rank 0 writes (weak) x of rank 0 [0]\n"
        "      writes x\n"
        "  program 0 of the script on rank 1 reads (weak, multicast proxy) x of rank 0 [0]\n"
        "      reads x\n"
        "  missing: no fence between the generic and the multicast proxy lies on the way from the first access to the "
        "second, which are ordered otherwise\n"
        "  repair: let the notify or the wait between them belong to a kernel with a multicast parameter, which "
        "fences, or put T.unsafe.fence_alias() before the release or behind the acquire\n"
        "  replay: --seed 0 or --choices z0"
    )


@pytest.mark.parametrize("fence", [False, True])
def test_one_program_needs_the_fence_too(fence) -> None:
    x = Cell("x")

    def alone(p):
        p.write(x)
        if fence:
            p.alias_fence()
        p.read(x, proxy=ALIAS)

    assert explore(script_case([alone]), 1).clean is fence


def test_one_proxy_of_one_program_is_in_program_order() -> None:
    x = Cell("x")

    def alone(p):
        p.write(x, proxy=MULTICAST)
        p.read(x, proxy=MULTICAST)
        p.write(x, proxy=MULTICAST)

    assert explore(script_case([alone]), 1).clean


def test_a_fence_covers_nothing_that_comes_later() -> None:
    x = Cell("x")

    def alone(p):
        p.alias_fence()
        p.write(x)
        p.read(x, proxy=ALIAS)

    assert not explore(script_case([alone]), 1).clean


@pytest.mark.sentence("MM-50")
@pytest.mark.parametrize("proxy", [GENERIC, MULTICAST])
def test_atomics_through_two_proxies_are_no_pair(proxy) -> None:
    f = Cell("f")

    def one(p):
        yield from p.add(f, order=Order.RELAXED)

    def two(p):
        yield from p.add(f, order=Order.RELAXED, proxy=proxy)

    report = explore(script_case([one, two]), 20)
    assert report.clean is (proxy is GENERIC)
    if not report.clean:
        (verdict,) = report.verdicts
        assert isinstance(verdict, Race)
        assert "proxy, so neither is atomic to the other" in verdict.why
