"""Shadow memory: boxes are exact sets of elements, cells split no more than they must, and cost stays flat."""

import time
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peertile.sim.agents import Agent, Kind
from peertile.sim.cells import INITIAL, Record, Shadow, normal_box, read_weak, runs_of, write_weak
from peertile.sim.memory import AddressSpace, Partitions
from peertile.sim.sites import Site, Verb

SITE = Site(Verb.READS, "x", 4)


def bytes_of(offset: int, shape, strides, size: int) -> set[int]:
    starts = {offset}
    for n, stride in zip(shape, strides, strict=True):
        starts = {s + k * stride for s in starts for k in range(n)}
    return {s + k for s in starts for k in range(size)}


@given(
    st.integers(0, 64),
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from([4, 8, 16, 20, 64, 256, 1024])), max_size=3),
)
def test_a_box_is_exactly_its_bytes(offset: int, axes) -> None:
    shape, strides = [n for n, _ in axes], [s for _, s in axes]
    box = normal_box(offset, shape, strides, 4)
    expected = bytes_of(offset, shape, strides, 4)
    if box is None:
        assert 0 in shape
        return
    got = {b for start, end in Shadow(1 << 16, zeroed=True).box(box).runs for b in range(start, end)}
    assert got == expected


def test_one_set_of_bytes_is_one_box() -> None:
    shadow = Shadow(4096, zeroed=True)
    a = shadow.box(normal_box(0, (4, 16), (64, 4), 4))
    assert a is shadow.box(normal_box(0, (64,), (4,), 4))
    assert a is shadow.box(normal_box(0, (16, 4), (4, 64), 4))
    assert a is shadow.box(normal_box(252, (64,), (-4,), 4))
    assert runs_of(normal_box(0, (2, 3), (64, 4), 4)) == [(0, 12), (64, 76)]


def test_boxes_stay_unions_of_whole_cells() -> None:
    random = Random(3)
    shadow = Shadow(512, zeroed=True)
    made = []
    for _ in range(200):
        start = random.randrange(0, 500)
        end = random.randrange(start + 1, 513)
        made.append(((start, end), shadow.box((start, (), end - start))))
        for (a, b), box in made:
            assert sum(cell.size for cell in box.cells) == b - a
            assert len(set(map(id, box.cells))) == len(box.cells)
    for cell in {id(c): c for _, box in made for c in box.cells}.values():
        assert sum(b - a for a, b in shadow.extent(cell)) == cell.size


def agent(entry: int) -> Agent:
    return Agent(Kind.PROGRAM, 0, entry, "k", entry)


def record(a: Agent) -> Record:
    return Record(a.entry, a.clock[a.entry], SITE, a, 0)


def test_a_split_keeps_the_history_of_both_parts() -> None:
    shadow = Shadow(64, zeroed=True)
    one, two = agent(1), agent(2)
    assert write_weak(shadow.box((0, (), 64)), one.clock, record(one)) is None
    found = read_weak(shadow.box((8, (), 8)), two.clock, record(two))
    assert found is not None
    assert found.earlier is not None
    assert (found.earlier.entry, shadow.extent(found.cell)) == (1, [(8, 16)])
    two.acquire(one.release(None))
    assert read_weak(shadow.box((8, (), 8)), two.clock, record(two)) is None
    found = write_weak(shadow.box((0, (), 64)), one.clock, record(one))
    assert found is not None
    assert shadow.extent(found.cell) == [(8, 16)]


@pytest.mark.sentence("MM-63")
def test_memory_never_written_is_a_fact_of_the_shadow() -> None:
    shadow = Shadow(64, zeroed=False)
    one = agent(1)
    assert write_weak(shadow.box((0, (), 32)), one.clock, record(one)) is None
    assert read_weak(shadow.box((0, (), 32)), one.clock, record(one)) is None
    found = read_weak(shadow.box((0, (), 40)), one.clock, record(one))
    assert found is not None
    assert found.earlier is None
    assert shadow.extent(found.cell) == [(32, 40)] or shadow.extent(found.cell) == [(32, 64)]
    shadow.clear()
    assert read_weak(shadow.box((0, (), 8)), one.clock, record(one)) is not None
    assert Shadow(8, zeroed=True).box((0, (), 8)).cells[0].write is INITIAL


def test_large_objects_need_no_backing() -> None:
    shadow = Shadow(1 << 40, zeroed=True)
    one = agent(1)
    for k in range(16):
        box = shadow.box(normal_box((1 << 33) * k, (1 << 20,), (4,), 4))
        assert write_weak(box, one.clock, record(one)) is None
    assert shadow.count <= 33


@pytest.mark.parametrize(("start", "count"), [(5, (1 << 24) + 5000), (4096, (1 << 24) + 4096), (3, 100)])
def test_bytes_of_a_large_object_become_zero_and_no_others(start: int, count: int) -> None:
    made = AddressSpace(Partitions()).make((1 << 24) + 10_077, 0, "x", zeroed=True)
    made.data[:] = 1
    made.clear(start, count)
    assert not made.data[start : start + count].any()
    assert made.data[:start].all()
    assert made.data[start + count :].all()


@pytest.mark.slow
def test_the_cost_of_an_access_does_not_grow() -> None:
    shadow = Shadow(1 << 20, zeroed=True)
    agents = [agent(k) for k in range(1, 9)]
    boxes = [shadow.box((1024 * k, (), 1024)) for k in range(1024)]

    def run(count: int) -> float:
        start = time.perf_counter()
        for k in range(count):
            a = agents[k % 8]
            box = boxes[(k * 7) % 1024 // 8 * 8 + k % 8]
            read_weak(box, a.clock, record(a))
            write_weak(box, a.clock, record(a))
        return (time.perf_counter() - start) / count

    run(2000)
    early = min(run(500) for _ in range(5))
    run(20_000)
    late = min(run(500) for _ in range(5))
    assert late < 3 * early
