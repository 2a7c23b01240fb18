"""Ground truth for tiny programs of relaxed tiles, fences and words: every interleaving, every value a read may give.

Happens-before is kept as sets of events, with none of the machine's clocks, words or histories. A program is a list of
ops over a tile X of two elements, a flag F and a cell A:

    ("put_tile", n) ("add_tile", n) ("get_tile",) ("get", k)     relaxed, on X; `get` reads element k alone
    ("set", n, order) ("add", n, order) ("see", order)           on F
    ("wait", n, order) ("told", n, order) ("poll", n, order)     on F, until it is at least n; all but `wait` say what
                                                                 they read, a poll in a loop of its own
    ("fence",) ("read",) ("write",)                              the last two on A, without an order

A tile is written at one moment, as the machine does it; it is read element by element.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

from peertile.dtypes import u32
from peertile.memory_model import Order
from peertile.sim.runs import Case
from peertile.sim.scripts import Cell, script_case

Op = tuple
Programs = Sequence[Sequence[Op]]
NOTHING: frozenset[Any] = frozenset()


class Write(NamedTuple):
    value: int
    event: Any
    released: frozenset[Any] | None
    """What whoever acquires it knows; None: it releases nothing."""


class Agent(NamedTuple):
    pc: int
    seen: frozenset[Any]
    """Events before what it does next."""
    fenced: frozenset[Any] | None
    pending: frozenset[Any]
    got: tuple[Any, ...]


class State(NamedTuple):
    agents: tuple[Agent, ...]
    history: tuple[tuple[Write, ...], ...]
    """Of X[0], X[1] and F, in modification order."""
    reads: frozenset[tuple[Any, int, int]]
    """Event, element, and which write it gave."""
    weak: tuple[tuple[Any, bool], ...]
    """Accesses of A so far: event, and whether it writes."""


def _replace(state: State, k: int, agent: Agent, **more: Any) -> State:
    agents = (*state.agents[:k], agent, *state.agents[k + 1 :])
    return state._replace(agents=agents, **more)


def _wrote(state: State, k: int, elements: Sequence[int], change: Any, order: Order) -> State:
    agent = state.agents[k]
    event = (k, agent.pc)
    history = list(state.history)
    for e in elements:
        last = history[e][-1]
        value, is_update = change(last.value)
        own = agent.seen if order.releases else agent.fenced
        released = own
        if is_update and last.released is not None:  # goes on with what it read released
            released = last.released | (own or NOTHING)
        history[e] = (*history[e], Write(value, event, released))
        if is_update and last.released is not None:
            agent = agent._replace(pending=agent.pending | last.released)
    agent = agent._replace(pc=agent.pc + 1, seen=agent.seen | {event})
    return _replace(state, k, agent, history=tuple(history))


def _given(
    state: State, k: int, elements: Sequence[int], order: Order, least: int = 0, tells: bool = True
) -> list[State]:
    """Every way in which these elements may be read, one behind the other, as at least `least`. Polls in vain are left
    out: whoever comes to nothing knows no more than before, or has less to choose from."""
    found: list[tuple[State, tuple[int, ...]]] = [(state, ())]
    for e in elements:
        following = []
        for before, values in found:
            agent = before.agents[k]
            writes = before.history[e]
            low = max((i for i, w in enumerate(writes) if w.event is None or w.event in agent.seen), default=0)
            low = max([low, *(i for event, at, i in before.reads if at == e and event in agent.seen)])
            for i in range(low, len(writes)):
                if writes[i].value < least:
                    continue
                event = (k, agent.pc, e)
                after = agent._replace(seen=agent.seen | {event})
                released = writes[i].released
                if released is not None and order.acquires:
                    after = after._replace(seen=after.seen | released)
                elif released is not None:
                    after = after._replace(pending=after.pending | released)
                state_ = _replace(before, k, after, reads=before.reads | {(event, e, i)})
                following.append((state_, (*values, writes[i].value)))
        found = following
    states = []
    for after, values in found:
        agent = after.agents[k]
        got = (values if len(elements) > 1 else values[0],) if tells else ()
        states.append(_replace(after, k, agent._replace(pc=agent.pc + 1, got=agent.got + got)))
    return states


def step(state: State, k: int, op: Op) -> tuple[list[State], bool]:
    """What may come of the next op of agent `k`, and whether it is half of a race."""
    agent = state.agents[k]
    kind = op[0]
    if kind == "put_tile":
        return [_wrote(state, k, (0, 1), lambda old: (op[1], False), Order.RELAXED)], False
    if kind == "add_tile":
        return [_wrote(state, k, (0, 1), lambda old: (old + op[1], True), Order.RELAXED)], False
    if kind == "set":
        return [_wrote(state, k, (2,), lambda old: (op[1], False), op[2])], False
    if kind == "add":
        return [_wrote(state, k, (2,), lambda old: (old + op[1], True), op[2])], False
    if kind == "get_tile":
        return _given(state, k, (0, 1), Order.RELAXED), False
    if kind == "get":
        return _given(state, k, (op[1],), Order.RELAXED), False
    if kind == "see":
        return _given(state, k, (2,), op[1]), False
    if kind in ("wait", "told", "poll"):
        return _given(state, k, (2,), op[2], op[1], kind != "wait"), False
    if kind == "fence":
        seen = agent.seen | agent.pending
        return [_replace(state, k, agent._replace(pc=agent.pc + 1, seen=seen, fenced=seen, pending=NOTHING))], False
    writes = kind == "write"
    races = any(event not in agent.seen for event, wrote in state.weak if wrote or writes)
    event = (k, agent.pc)
    after = agent._replace(pc=agent.pc + 1, seen=agent.seen | {event})
    return [_replace(state, k, after, weak=(*state.weak, (event, writes)))], races


def outcomes(programs: Programs) -> tuple[set[Any], bool, bool]:
    """What the agents may have read at the end, and whether some interleaving has a race, or does not end."""
    nobody = Agent(0, NOTHING, None, NOTHING, ())
    zero = (Write(0, None, None),)
    start = State((nobody,) * len(programs), (zero, zero, zero), frozenset(), ())
    todo, known = [start], {start}
    ends: set[Any] = set()
    is_racy = is_stuck = False
    while todo:
        state = todo.pop()
        able = [k for k, agent in enumerate(state.agents) if agent.pc < len(programs[k])]
        if not able:
            ends.add(tuple(agent.got for agent in state.agents))
        goes_on = not able
        for k in able:
            following, races = step(state, k, programs[k][state.agents[k].pc])
            is_racy = is_racy or races
            goes_on = goes_on or bool(following)
            for after in following:
                if after not in known:
                    known.add(after)
                    todo.append(after)
        is_stuck = is_stuck or not goes_on
    return ends, is_racy, is_stuck


def as_case(programs: Programs, ends: set[Any]) -> Case:
    """The same programs on the machine; what a clean run read is added to `ends`."""
    x, f, a = Cell("x", dtype=u32, count=2), Cell("f"), Cell("a")

    def body(program: Sequence[Op]):
        def run(p):
            for op in program:
                if op[0] == "put_tile":
                    yield from p.put_tile(x, op[1])
                elif op[0] == "add_tile":
                    yield from p.add_tile(x, op[1])
                elif op[0] == "get_tile":
                    yield from p.get_tile(x)
                elif op[0] == "get":
                    yield from p.get(x, Order.RELAXED, index=op[1])
                elif op[0] == "set":
                    yield from p.put(f, op[1], op[2])
                elif op[0] == "see":
                    yield from p.get(f, op[1])
                elif op[0] == "add":
                    yield from p.add(f, op[1], op[2])
                elif op[0] == "wait":
                    yield from p.wait(f, op[1], order=op[2])
                elif op[0] == "told":
                    p.got.append((yield from p.wait(f, op[1], order=op[2], tells=True)))
                elif op[0] == "poll":
                    p.got.append((yield from p.poll(f, op[1], op[2])))
                elif op[0] == "fence":
                    p.fence()
                elif op[0] == "read":
                    p.read(a)
                else:
                    p.write(a)

        return run

    def done(actors) -> None:
        ends.add(tuple(tuple(p.got) for p in actors))

    return script_case([body(program) for program in programs], done=done)


READS = (Order.RELAXED, Order.ACQUIRE)
WRITES = (Order.RELAXED, Order.RELEASE)


def random_programs(random: Random, *, agents: int, length: int, waits: bool = False) -> list[list[Op]]:
    """X and F are stored by one agent each, or added to by all, X three times at most; an agent reads an element twice
    at most, with `waits` waits and polls of F counted. A is accessed by one program in two."""
    adds_x, adds_f = random.random() < 0.5, random.random() < 0.5
    store_x, store_f = random.randrange(agents), random.randrange(agents)
    weak = random.random() < 0.5
    put = {"x": 0, "f": 0}
    programs: list[list[Op]] = []
    for k in range(agents):
        program: list[Op] = []
        left = [2, 2, 2]
        for _ in range(random.randint(2, length)):
            kind = random.choice(["x", "x", "tile", "element", "f", "f", "fence", "weak" if weak else "f"])
            if kind == "x" and put["x"] < 3 and (adds_x or k == store_x):
                put["x"] += 1
                program.append(("add_tile", random.choice([1, 3])) if adds_x else ("put_tile", put["x"]))
            elif kind == "tile" and left[0] and left[1]:
                left[0] -= 1
                left[1] -= 1
                program.append(("get_tile",))
            elif kind == "element":
                e = random.randrange(2)
                if left[e]:
                    left[e] -= 1
                    program.append(("get", e))
            elif kind == "f":
                if adds_f and random.random() < 0.5:
                    put["f"] += 1
                    program.append(("add", 1, random.choice(WRITES)))
                elif not adds_f and k == store_f:
                    put["f"] += 1
                    program.append(("set", put["f"], random.choice(WRITES)))
                elif left[2]:
                    left[2] -= 1
                    how = random.choice(["wait", "told", "poll", "see"]) if waits else "see"
                    least = () if how == "see" else (random.choice([1, 1, 2]),)
                    program.append((how, *least, random.choice(READS)))
            elif kind == "fence":
                program.append(("fence",))
            elif kind == "weak":
                program.append((random.choice(["read", "write"]),))
        programs.append(program)
    return programs
