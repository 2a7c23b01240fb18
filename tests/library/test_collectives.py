"""Collectives on ranks as threads: values, counts, dtypes, reductions, stalls, errors. Processes in the slow tier."""

import itertools
import re

import library_ranks as ranks
import numpy as np
import pytest

import peertile as pt
from peertile.dtypes import ALL_DTYPES
from peertile.errors import ArgumentError
from peertile.library.collectives import Collectives
from peertile.library.reductions import ReduceOp
from peertile.library.selection import Algorithm, choose, load_table

pytestmark = pytest.mark.any_device

NUMBERS = [d.name for d in ALL_DTYPES if (not d.is_bool and d.bits != 8) or d.is_int]
EVERY = ["bool_" if d.is_bool else d.name for d in ALL_DTYPES]
ONE_OF_A_SIZE = ("bool_", "f8e5m2", "f16", "i64")
WORLDS = [1, 2, 3, 4, 5, 7]


def spawn(function, n, *args, model=pt.RankModel.THREADS):
    return pt.spawn(function, n, args, model=model, timeout_s=100)


# ---------------------------------------------------------------- values


@pytest.mark.feature("A1", "cpu")
def test_all_reduce_quickly():
    assert all(spawn(ranks.all_reduces, 3, (0, 7, 1000), None))


@pytest.mark.slow
@pytest.mark.gpus("n")
@pytest.mark.feature("A1", "cpu")
@pytest.mark.parametrize(
    ("n", "algorithm"),
    [
        *itertools.product((1, 2, 3, 4, 7), ranks.CPU_ALGORITHMS),
        *itertools.product((5, 6, 8, 9), (Algorithm.TWO_SHOT, Algorithm.PIPELINED, Algorithm.RING)),
    ],
)
def test_all_reduce(n, algorithm):
    assert all(spawn(ranks.all_reduces, n, (*ranks.COUNTS, ranks.BIG) if n == 3 else (1, 1000), algorithm))


@pytest.mark.slow
@pytest.mark.gpus(2)
def test_all_reduce_of_what_the_table_chooses_for_gpus():
    """Of f32 on both sides of its sizes, and between the last two of them, where programs take several turns."""
    counts = (23_170, 23_171, 46_341, 92_682, 741_455, 741_456, 1_081_345, 1_600_000, 2_097_152, 2_097_153)
    assert all(spawn(ranks.all_reduces, 2, counts, None))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", list(ranks.CPU_ALGORITHMS), ids=lambda a: a.value)
def test_all_reduce_with_several_programs(algorithm):
    assert all(spawn(ranks.all_reduces, 3, (0, 1, ranks.BIG), algorithm, 3))


@pytest.mark.slow
def test_all_reduce_in_place_of_more_than_the_staging_holds():
    for algorithm in (Algorithm.TWO_SHOT, Algorithm.PIPELINED, Algorithm.RING):
        assert all(spawn(ranks.all_reduces, 2, (1_200_001,), algorithm))


@pytest.mark.feature("A1", "cpu")
@pytest.mark.slow
@pytest.mark.gpus("n")
@pytest.mark.parametrize("algorithm", [Algorithm.ONE_SHOT, Algorithm.TWO_SHOT])
@pytest.mark.parametrize("n", WORLDS)
def test_all_reduce_of_symmetric_tensors(n, algorithm):
    counts = (*ranks.COUNTS, ranks.BIG) if n == 3 else (1, 4097)
    assert all(spawn(ranks.symmetric_all_reduces, n, counts, algorithm))


def test_all_reduce_of_symmetric_tensors_quickly():
    assert all(spawn(ranks.symmetric_all_reduces, 2, (0, 1, 1000), None))


@pytest.mark.feature("A1", "cpu")
@pytest.mark.slow
@pytest.mark.gpus("n")
@pytest.mark.parametrize("n", [1, 2, 3, 9, *(pytest.param(n, marks=pytest.mark.long) for n in (4, 5, 6, 7, 8))])
def test_gather_scatter_all_to_all_broadcast_and_reduce(n):
    assert all(spawn(ranks.moves, n, ranks.COUNTS if n == 3 else (1000,)))


def test_gather_scatter_all_to_all_broadcast_and_reduce_quickly():
    assert all(spawn(ranks.moves, 3, (7,)))


@pytest.mark.slow
def test_moves_with_several_programs():
    assert all(spawn(ranks.moves, 3, (0, 1, 70_001), "f32", 3))


@pytest.mark.slow
@pytest.mark.parametrize("name", NUMBERS)
def test_every_reduction_of_every_number(name):
    assert all(spawn(ranks.reductions, 3, [name], [Algorithm.ONE_SHOT]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["f32", "bf16"])
def test_every_reduction_of_every_algorithm(name):
    assert all(spawn(ranks.reductions, 3, [name], list(ranks.CPU_ALGORITHMS)))


@pytest.mark.long
@pytest.mark.parametrize("name", NUMBERS)
def test_every_reduction_of_every_number_with_every_algorithm(name):
    assert all(spawn(ranks.reductions, 3, [name], list(ranks.CPU_ALGORITHMS)))


@pytest.mark.slow
def test_every_reduction_of_bf16():
    assert all(spawn(ranks.reductions, 3, ["bf16"], [Algorithm.ONE_SHOT]))


@pytest.mark.slow
@pytest.mark.parametrize("name", [n if n in ONE_OF_A_SIZE else pytest.param(n, marks=pytest.mark.long) for n in EVERY])
def test_every_type_is_moved(name):
    assert all(spawn(ranks.moves, 3, (70,), name))


@pytest.mark.slow
@pytest.mark.gpus("n")
@pytest.mark.feature("A1", "cpu")
@pytest.mark.parametrize(("n", "shares"), [(3, [5000, 1, 0]), (1, [9]), (2, [0, 0])])
def test_uneven_shares(n, shares):
    assert all(spawn(ranks.uneven, n, shares))


@pytest.mark.slow
@pytest.mark.gpus(3)
@pytest.mark.parametrize("name", ["bf16", "f8e4m3"])
def test_uneven_shares_of_other_types(name):
    if name == "f8e4m3":
        assert all("not defined" in text for text in spawn(refused_uneven, 2))
    else:
        assert all(spawn(ranks.uneven, 3, [100, 0, 5000], name))


def refused_uneven(group):
    with Collectives(group) as comm:
        x = ranks.device_vector(0, 4, pt.f8e4m3)
        return ranks.caught(lambda: comm.reduce_scatter_v(x, [2, 2]))[1]


@pytest.mark.slow
@pytest.mark.feature("A1", "cpu")
@pytest.mark.gpus("n")
@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.long)])
def test_collectives_over_processes(n):
    assert all(spawn(ranks.everything, n, model=pt.RankModel.PROCESSES))


@pytest.mark.slow
@pytest.mark.gpus(4)
@pytest.mark.feature("D8", "cpu")
def test_overlapping_subgroups_have_staging_of_their_own():
    assert all(spawn(ranks.subgroups, 4))


@pytest.mark.slow
def test_several_communicators_side_by_side():
    assert all(spawn(ranks.side_by_side, 2))


@pytest.mark.slow
@pytest.mark.gpus("n")
@pytest.mark.parametrize("n", [2, 3, pytest.param(5, marks=pytest.mark.long)])
def test_random_collectives_with_random_stalls(n, seed):
    assert all(spawn(ranks.stress, n, seed, 60))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7, 8])
def test_ten_thousand_random_collectives_with_random_stalls(n, seed):
    """Ranks are processes up to 4, where they have about half a core each, and threads above."""
    model = pt.RankModel.PROCESSES if n <= 4 else pt.RankModel.THREADS
    drawn = pt.spawn(ranks.stress, n, (seed, 10_000), model=model, timeout_s=1700)
    assert all(d == drawn[0] for d in drawn)
    assert min(drawn[0].values()) > 100


# ---------------------------------------------------------------- refusals


@pytest.fixture(scope="module")
def comm():
    with Collectives(pt.init()) as comm:
        yield comm


def wide(shape, dtype=pt.f32):
    return pt.zeros(shape, dtype)


REFUSED = {
    "not a tensor": (
        lambda c: c.all_reduce(wide(3), [1, 2, 3]),
        "all_reduce: out: expected a Tensor or SymmetricTensor, got list",
    ),
    "dtype": (
        lambda c: c.all_reduce(wide(3), wide(3, pt.i32)),
        "all_reduce: out: expected dtype f32 as x has, got i32",
    ),
    "count": (lambda c: c.all_reduce(wide(3), wide(4)), "all_reduce: out: expected 3 elements, got 4 in (4,)"),
    "stride": (
        lambda c: c.all_reduce(wide((4, 4))[:, ::2], wide(8)),
        "all_reduce: x: expected a contiguous tensor, got strides (4, 2) for shape (4, 2); copy it first",
    ),
    "op": (
        lambda c: c.all_reduce(wide(3), op="sum"),
        "all_reduce: op: expected a ReduceOp, such as ReduceOp.SUM, got 'sum'",
    ),
    "avg": (
        lambda c: c.all_reduce(wide(3, pt.i32), op=ReduceOp.AVG),
        "all_reduce: op: AVG is not defined for i32; take SUM and divide, or convert to f32",
    ),
    "bool": (
        lambda c: c.all_reduce(wide(3, pt.bool_)),
        "all_reduce: op: SUM is not defined for bool; convert to u8: MIN is and, MAX is or",
    ),
    "flagged": (
        lambda c: c.all_reduce(wide(300), algorithm=Algorithm.FLAGGED),
        "all_reduce: FLAGGED: expected up to 256 elements of 2 or 4 bytes, got 300 of f32; leave algorithm out",
    ),
    "pushed": (
        lambda c: c.all_reduce(wide(3), algorithm=Algorithm.PUSHED),
        "all_reduce: PUSHED is for GPUs; use PIPELINED, or leave algorithm out",
    ),
    "filled": (
        lambda c: c.all_reduce(wide(3), algorithm=Algorithm.FILLED),
        "all_reduce: FILLED is for GPUs; use PIPELINED, or leave algorithm out",
    ),
    "ring": (
        lambda c: c.all_reduce(wide(3, pt.bf16), algorithm=Algorithm.RING),
        "all_reduce: RING would round bf16 at every rank; leave algorithm out, or convert to f32",
    ),
    "one shot": (
        lambda c: c.all_reduce(wide(1 << 17), algorithm=Algorithm.ONE_SHOT),
        "all_reduce: ONE_SHOT: expected up to 131072 bytes, got 524288; leave algorithm out, or make the communicator "
        "with larger slot_bytes",
    ),
    "root": (lambda c: c.broadcast(wide(3), root=1), "broadcast: root: expected 0 to 0, got 1"),
    "shares": (
        lambda c: c.all_gather_v(wide(3), [1, 2]),
        "all_gather_v: counts: expected 1 integers >= 0, one for each rank, got [1, 2]",
    ),
    "own share": (
        lambda c: c.all_gather_v(wide(3), [2]),
        "all_gather_v: x: expected 2 elements, counts[0], got 3 in (3,)",
    ),
    "sum of shares": (
        lambda c: c.reduce_scatter_v(wide(3), [2]),
        "reduce_scatter_v: x: expected 2 elements, the sum of counts, got 3 in (3,)",
    ),
    "sum of sends": (
        lambda c: c.all_to_all_v(wide(3), [2], [3]),
        "all_to_all_v: x: expected 2 elements, the sum of send_counts, got 3 in (3,)",
    ),
}


@pytest.mark.native_only
@pytest.mark.parametrize("case", REFUSED)
def test_bad_arguments_are_refused(comm, case):
    call, message = REFUSED[case]
    with pytest.raises(ArgumentError) as caught:
        call(comm)
    if case == "one shot":  # slots are of the device
        message = message.replace("131072", str(comm.slot_bytes // 2))
    assert str(caught.value) == message


def uneven_x(group):
    with Collectives(group) as comm:
        x = pt.zeros((7,), pt.f32)
        return [ranks.caught(lambda: comm.reduce_scatter(x)), ranks.caught(lambda: comm.all_to_all(x))]


def test_an_even_collective_refuses_uneven_sizes_and_names_the_other():
    text = "{0}: x: expected a number of elements that 2 ranks divide, got 7; use {0}_v for uneven shares"
    expected = [("ArgumentError", text.format(name)) for name in ("reduce_scatter", "all_to_all")]
    assert spawn(uneven_x, 2) == [expected] * 2


@pytest.mark.cpu_only  # the algorithm's name
def test_closed_communicators_are_refused_and_give_their_memory_back():
    assert (
        spawn(ranks.life, 2)
        == [
            [
                ("UsageError", "all_reduce(f32[8], SUM, one_shot): the communicator was closed; use it before that"),
                ("UsageError", "all_reduce(f32[8], SUM, one_shot): the communicator was closed; use it before that"),
                ("UsageError", "barrier(): the communicator was closed; use it before that"),
            ]
        ]
        * 2
    )


def test_communicators_that_differ_are_refused_on_every_rank():
    found = spawn(ranks.unequal_communicators, 2)
    (programs,) = re.findall(r"rank 0: \((\d+),", found[0][1])  # as many as the device has room for
    text = (
        f"ranks disagree about Collectives(programs, checked, slot_bytes): rank 0: ({programs}, False, 65536); "
        f"rank 1: ({programs}, False, 131072). It must be the same on every rank"
    )
    assert found == [("SymmetryError", text)] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"programs": 0}, "programs: expected an integer >= 1, got 0"),
        ({"slot_bytes": 5000}, "slot_bytes: expected a power of two >= 4096, got 5000"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ArgumentError) as caught:
        Collectives(pt.init(), **options)
    assert str(caught.value) == message


# ---------------------------------------------------------------- the table


@pytest.mark.cpu_only
def test_the_table_is_whole_and_every_entry_can_be_chosen():
    table = load_table()["collectives"]
    gpu_alone = {"reduce_scatter", "all_gather", "all_to_all"}
    assert set(table) == {"all_reduce", "all_reduce_symmetric", "copy", *gpu_alone}
    assert {row["target"] for name in gpu_alone for row in table[name]} == {"cuda"}
    for name, rows in table.items():
        for row in rows:
            bounds = [entry[0] for entry in row["entries"]]
            assert bounds[-1] is None
            assert bounds[:-1] == sorted(set(bounds[:-1])), name
            for bound, algorithm, tile in row["entries"]:
                choice = choose(name, row["target"], row["arch"], row["world"], bound or 1 << 40)
                assert (choice.algorithm, choice.tile_bytes) == (Algorithm(algorithm), tile)


@pytest.mark.cpu_only
def test_a_machine_or_a_world_without_measurements_gets_those_of_the_nearest():
    known = choose("all_reduce", "cpu", "x86_64-512", 2, 1024)
    assert choose("all_reduce", "cpu", "riscv64-128", 2, 1024) == known
    assert choose("all_reduce", "cpu", "x86_64-512", 1, 1024) == known


@pytest.mark.slow
def test_first_fold_keeps_the_bits_of_one_rank(comm):
    x = pt.asarray(np.array([-0.0, np.inf, 1.5], np.float32))
    for algorithm in ranks.CPU_ALGORITHMS:
        got = comm.all_reduce(x, algorithm=algorithm).sync().numpy()
        assert got.tobytes() == x.numpy().tobytes(), algorithm
