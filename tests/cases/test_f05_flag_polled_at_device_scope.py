"""A flag that a peer writes is polled with device scope, or with plain loads."""

from peertile.memory_model import Scope
from peertile.sim.explore import explore
from peertile.sim.scripts import Cell, script_case
from peertile.sim.verdicts import Race


def message(reader):
    x, flag = Cell("x", rank=1), Cell("flag", rank=1)

    def writer(p):
        p.write(x)
        yield from p.put(flag, 1)

    return script_case([(0, writer), (1, reader(x, flag))])


def waiting(scope: Scope):
    def make(x, flag):
        def run(p):
            yield from p.wait(flag, 1, scope=scope)
            p.read(x)

        return run

    return make


def plain(x, flag):
    def run(p):
        for _ in range(3):
            if p.read(flag):
                p.read(x)
            yield

    return run


def test_the_scope_of_the_poll_is_blamed() -> None:
    verdict = explore(message(waiting(Scope.DEVICE)), 20).verdicts[0]
    assert isinstance(verdict, Race)
    assert "device scope" in str(verdict)


def test_a_plain_load_of_a_word_that_a_peer_writes_races() -> None:
    verdict = explore(message(plain), 20).verdicts[0]
    assert isinstance(verdict, Race)
    assert verdict.later.object == "flag of rank 1"


def test_system_scope_on_both_sides_is_clean() -> None:
    assert explore(message(waiting(Scope.SYSTEM)), 50).clean
