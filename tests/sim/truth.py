"""Ground truth for tiny programs, independent of every clock: all reachable states, by program counters.

A program is a list of ops: ("read" | "write", cell), ("add", word, n), ("put", word, value), ("wait", word, value).
Words only go up, so a state is its program counters. A race is a reachable state in which two programs stand in
front of conflicting accesses of one cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from peertile.sim.runs import Case
from peertile.sim.scripts import Cell, script_case

Op = tuple
Programs = Sequence[Sequence[Op]]


def values(programs: Programs, pcs: tuple[int, ...]) -> dict[str, int]:
    found: dict[str, int] = {}
    for program, pc in zip(programs, pcs, strict=True):
        for op in program[:pc]:
            if op[0] == "add":
                found[op[1]] = found.get(op[1], 0) + op[2]
            elif op[0] == "put":
                found[op[1]] = max(found.get(op[1], 0), op[2])
    return found


def states(programs: Programs):
    """Every reachable state, and the programs that can go on there."""
    start = (0,) * len(programs)
    todo, seen = [start], {start}
    while todo:
        pcs = todo.pop()
        now = values(programs, pcs)
        able = [
            k
            for k, pc in enumerate(pcs)
            if pc < len(programs[k])
            and (programs[k][pc][0] != "wait" or now.get(programs[k][pc][1], 0) >= programs[k][pc][2])
        ]
        yield pcs, able
        for k in able:
            after = (*pcs[:k], pcs[k] + 1, *pcs[k + 1 :])
            if after not in seen:
                seen.add(after)
                todo.append(after)


def is_racy(programs: Programs) -> bool:
    for pcs, able in states(programs):
        here = [programs[k][pcs[k]] for k in able if programs[k][pcs[k]][0] in ("read", "write")]
        for i, a in enumerate(here):
            for b in here[i + 1 :]:
                if a[1] == b[1] and "write" in (a[0], b[0]):
                    return True
    return False


def deadlocks(programs: Programs) -> bool:
    return any(
        not able and any(pc < len(p) for pc, p in zip(pcs, programs, strict=True)) for pcs, able in states(programs)
    )


def as_case(programs: Programs, *, polls: bool = False, **options) -> Case:
    """The same programs on the machine; with `polls` their waits are loops of reads."""
    names = {op[1] for program in programs for op in program}
    cells = {name: Cell(name) for name in sorted(names)}

    def body(program: Sequence[Op]):
        def run(p):
            for op in program:
                cell = cells[op[1]]
                if op[0] == "read":
                    p.read(cell)
                elif op[0] == "write":
                    p.write(cell)
                elif op[0] == "add":
                    yield from p.add(cell, op[2])
                elif op[0] == "put":
                    yield from p.put(cell, op[2])
                elif polls:
                    yield from p.poll(cell, op[2])
                else:
                    yield from p.wait(cell, op[2])

        return run

    return script_case([body(program) for program in programs], **options)


def random_programs(random: Random, *, words: str, agents: int = 3, length: int = 6) -> list[list[Op]]:
    """Programs over cells a, b and words F, G: "chain" words have one writer, "adds" are added to by all."""
    programs: list[list[Op]] = []
    put = {"F": 0, "G": 0}
    owner = {"F": random.randrange(agents), "G": random.randrange(agents)}
    for k in range(agents):
        program: list[Op] = []
        for _ in range(random.randint(1, length)):
            kind = random.choice(["read", "write", "word", "word", "wait"])
            if kind in ("read", "write"):
                program.append((kind, random.choice("ab")))
                continue
            word = random.choice("FG")
            if kind == "wait":
                program.append(("wait", word, random.randint(1, 3)))
            elif words == "adds":
                program.append(("add", word, random.choice([1, 1, 2])))
            elif owner[word] == k:
                put[word] += 1
                program.append(("put", word, put[word]))
        programs.append(program)
    return programs
