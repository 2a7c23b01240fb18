"""What the engine of a stream does to memory: copies, fills, value writes and waits, as accesses of the stream."""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy as np

from peertile.dtypes import DType, i32, i64, u32, u64
from peertile.memory_model import Cmp, Order, Scope
from peertile.sim.agents import Agent
from peertile.sim.cells import Box, Conflict, Record, read_strong, read_weak, write_strong, write_weak
from peertile.sim.machine import Found, Machine
from peertile.sim.memory import FIRST_ADDRESS, Object
from peertile.sim.program import disturb
from peertile.sim.report import access_of, outside_part
from peertile.sim.sites import Site, Verb
from peertile.sim.trace import Deed
from peertile.sim.verdicts import Bounds, Lifetime
from peertile.sim.words import Word

__all__ = ["copy", "fill", "read_bytes", "value_word", "write_value"]

_WORD: Final[dict[int, tuple[DType, DType]]] = {32: (u32, i32), 64: (u64, i64)}


def place(machine: Machine, agent: Agent, site: Site, address: int, nbytes: int) -> tuple[Object, int]:
    """Object and byte of a range that is about to be accessed: it must exist, and not have been freed."""
    target, offset = machine.memory.at(address)
    end = offset + nbytes
    by = target.given_back(offset, end) if target.gone and machine.judge else None
    if by is not None:
        record = Record(agent.entry, agent.clock[agent.entry], site, agent, agent.steps)
        raise Found(Lifetime(access=access_of(target, record, ((offset, end),)), freed_by=by))
    if target.parts is not None and machine.judge and not target.part_around(offset, end) and end <= target.nbytes:
        record = Record(agent.entry, agent.clock[agent.entry], site, agent, agent.steps)
        raise Found(outside_part(target, record, offset, end))
    if target.freed_by is not None or offset + nbytes > target.nbytes:
        record = Record(agent.entry, agent.clock[agent.entry], site, agent, agent.steps)
        access = access_of(target, record, ())
        if target.freed_by is not None:
            raise Found(Lifetime(access=access, freed_by=target.freed_by))
        raise Found(
            Bounds(
                access=access,
                message=f"bytes {offset} to {offset + nbytes} of {target.name}, which has {target.nbytes}",
            )
        )
    return target, offset


def _box(target: Object, offset: int, nbytes: int) -> Box:
    return target.shadow.box((offset, (), nbytes))


def _check(machine: Machine, agent: Agent, site: Site, target: Object, box: Box, writes: bool) -> None:
    record = Record(agent.entry, agent.clock[agent.entry], site, agent, agent.steps)
    conflict: Conflict | None
    if writes:
        conflict = write_weak(box, agent.clock, record)
    else:
        # A copy may take along bytes that nobody wrote, as the gaps of a strided tensor: only a copy of nothing
        # but such bytes is a read of what was never written.
        written = [cell for cell in box.cells if cell.write is not None or cell.strong_writes]
        part = box
        if written and len(written) < len(box.cells):
            part = Box(box.runs)
            part.cells = written
        conflict = read_weak(part, agent.clock, record)
    if conflict is not None:
        machine.conflict(conflict, record, target)


def copy(machine: Machine, agent: Agent, name: str, dst: int, src: int, nbytes: int) -> None:
    """Copy bytes between any two addresses, of the host or of a device."""
    if nbytes == 0:
        return
    data: Any
    if src >= FIRST_ADDRESS:
        site = Site(Verb.COPIES_FROM, "memory", 1, code=name)
        source, at = place(machine, agent, site, src, nbytes)
        site.name = source.name
        _check(machine, agent, site, source, _box(source, at, nbytes), False)
        data = source.data[at : at + nbytes]
    else:
        data = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(src))
    if dst >= FIRST_ADDRESS:
        site = Site(Verb.COPIES_TO, "memory", 1, code=name)
        target, to = place(machine, agent, site, dst, nbytes)
        site.name = target.name
        box = _box(target, to, nbytes)
        _check(machine, agent, site, target, box, True)
        target.data[to : to + nbytes] = data
        if target.words or target.loose:
            disturb(agent, target, box.runs, site)
    else:
        np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(dst))[:] = data


def fill(machine: Machine, agent: Agent, name: str, dst: int, pattern: bytes, count: int) -> None:
    """Repeat `pattern` `count` times."""
    nbytes = len(pattern) * count
    if nbytes == 0:
        return
    if dst < FIRST_ADDRESS:
        ctypes.memmove(dst, pattern * count, nbytes)
        return
    site = Site(Verb.FILLS, "memory", len(pattern), code=name)
    target, to = place(machine, agent, site, dst, nbytes)
    site.name = target.name
    box = _box(target, to, nbytes)
    _check(machine, agent, site, target, box, True)
    if any(pattern):
        target.data[to : to + nbytes].reshape(count, len(pattern))[:] = np.frombuffer(pattern, np.uint8)
    else:
        target.clear(to, nbytes)
    if target.words or target.loose:
        disturb(agent, target, box.runs, site)


def value_word(machine: Machine, agent: Agent, site: Site, address: int, width: int) -> Word:
    """The word that a value operation reaches."""
    target, offset = place(machine, agent, site, address, width // 8)
    return target.word(_WORD[width][0], offset, target.name)


def write_value(machine: Machine, agent: Agent, name: str, address: int, value: int, width: int) -> None:
    """A release store at system scope."""
    site = Site(Verb.WRITES, "a word", width // 8, Order.RELEASE, Scope.SYSTEM, code=name)
    word = value_word(machine, agent, site, address, width)
    site.name = word.name
    strong(machine, agent, site, word, True)
    value &= (1 << width) - 1
    word.store(value, agent, site)
    if machine.trace is not None:
        word.writes[-1].event = machine.trace.add(agent, f"{word.spelled()} = {value} (release)", deed=Deed.RELEASE)
    word.home.set(word.dtype, word.offset, value)
    word.note(agent, len(word.writes) - 1)
    machine.wake_word(word)


def strong(machine: Machine, agent: Agent, site: Site, word: Word, writes: bool) -> None:
    """Checks an ordered access of a word."""
    record = Record(agent.entry, agent.clock[agent.entry], site, agent, agent.steps)
    check = write_strong if writes else read_strong
    conflict = check(word.box, agent.clock, record, site.kind)
    if conflict is not None:
        machine.conflict(conflict, record, word.home)


def holds(word: Word, cmp: Cmp, value: int, width: int, signed: bool) -> bool:
    """Whether `word cmp value`."""
    return word.satisfies(cmp, seen_value(value, width, signed), width if signed else 0)


def seen_value(value: int, width: int, signed: bool) -> int:
    """The low `width` bits of a number, as signed or as unsigned."""
    value &= (1 << width) - 1
    return value - (1 << width) if signed and value >> width - 1 else value


def read_bytes(machine: Machine, address: int, nbytes: int) -> bytes:
    """Bytes as they are, for the driver itself: no access of the program."""
    target, offset = machine.memory.at(address)
    return target.data[offset : offset + nbytes].tobytes()
