"""Signals, counters, barriers and mailboxes, expanded and run on 1 to 4 ranks under random schedules."""

import inspect
from functools import cache

import numpy as np
import pytest

from peertile.dtypes import f32
from peertile.errors import VerifyError
from peertile.ir import ops
from peertile.ir.core import Kernel, walk
from peertile.ir.text import parse_kernel
from peertile.ir.types import MailboxType
from peertile.meaning import (
    FaultKind,
    PerRank,
    Schedule,
    new_barrier,
    new_counter,
    new_mailbox,
    new_signal,
    run_grid,
)
from peertile.passes.mailbox import expand_mailboxes
from peertile.passes.pipeline import run_pipeline

SCHEDULES = [
    (Schedule.ROUND_ROBIN, 0),
    *((Schedule.RANDOM, s) for s in range(2)),
    *((Schedule.SKEWED, s) for s in range(3)),
]


def under_every_schedule(test):
    """Calls the test once for each schedule, as its argument `schedule`: many more tests would cost more than
    what they run."""

    def run_all(**given) -> None:
        for schedule in SCHEDULES:
            try:
                test(**given, schedule=schedule)
            except BaseException as e:
                e.add_note(f"under {schedule}")
                raise

    run_all.__name__ = test.__name__
    parameters = inspect.signature(test).parameters
    run_all.__signature__ = inspect.Signature([p for name, p in parameters.items() if name != "schedule"])
    return run_all


WRAP = (1 << 64) - 2
"""Epochs that start here pass zero in the third round."""


@cache
def compiled(params: str, body: str, flags: str = "", posts_ahead: int = 1) -> Kernel:
    return run_pipeline(parsed(params, body, flags), posts_ahead=posts_ahead)


def parsed(params: str, body: str, flags: str = "") -> Kernel:
    consts = "".join(f"%c{n} = const(value={n}) : i64\n" for n in range(5))
    return parse_kernel(f"kernel @k({params}){flags} {{ {consts} {body} return() }}")


def per_rank(ranks: int, shape, dtype=np.int64) -> PerRank:
    return PerRank([np.zeros(shape, dtype) for _ in range(ranks)])


def run(kernel: Kernel, grid, args, ranks: int, schedule) -> None:
    outcome = run_grid(kernel, grid, args, ranks=ranks, schedule=schedule[0], seed=schedule[1], max_steps=100_000)
    assert outcome.faults == []


# Every rank writes its number and the round into its part, signals, and sums what all have written.
EXCHANGE = """
%p = program_id() : i64
%me = rank(%x) : i64
%n = num_ranks(%x) : i64
for(%c0, %c4, %c1) (%round: i64) {
  %mine = peer_view(%x, %me) : view<i64, 1, read_write, peer>
  %v0 = binary(%me, %c1, fn=Binary.add) : i64
  %v1 = binary(%v0, %round, fn=Binary.mul) : i64
  word_store(%mine, %v1, %p, order=Order.weak, scope=none)
  SYNC
  %sum = for(%c0, %n, %c1, %c0) : i64 (%r: i64, %a: i64) {
    %there = peer_view(%x, %r) : view<i64, 1, read_write, peer>
    %w = word_load(%there, WHICH, order=Order.weak, scope=none) : i64
    %b = binary(%a, %w, fn=Binary.add) : i64
    continue(%b)
  }
  word_store(%out, %sum, %p, %round, order=Order.weak, scope=none)
  SYNC
  continue()
}
"""
EXCHANGE_PARAMS = "%x: symmetric<i64, 1, read_write>, %out: view<i64, 2, read_write>"


def exchange(object_type: str, sync: str, which: str = "%p") -> Kernel:
    body = EXCHANGE.replace("SYNC", sync).replace("WHICH", which)
    return compiled(f"%o: {object_type}, {EXCHANGE_PARAMS}", body)


def check_exchange(kernel: Kernel, obj, ranks: int, grid: int, schedule) -> None:
    out = per_rank(ranks, (grid, 4))
    run(kernel, grid, [obj, per_rank(ranks, (grid,)), out], ranks, schedule)
    expected = np.arange(4) * sum(r + 1 for r in range(ranks))
    for found in out:
        np.testing.assert_array_equal(found, np.broadcast_to(expected, (grid, 4)))


@pytest.mark.sentence("SG-6")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@under_every_schedule
def test_notify_and_wait_order_every_round(ranks: int, schedule) -> None:
    kernel = exchange("signal", "notify(%o, %p) wait_signal(%o, %p)")
    for start in (0, WRAP):
        check_exchange(kernel, new_signal(ranks, 2, start), ranks, 2, schedule)


@pytest.mark.sentence("SG-5")
def test_epochs_go_on_in_the_next_launch() -> None:
    kernel = exchange("signal", "notify(%o, %p) wait_signal(%o, %p)")
    signal = new_signal(3, 1)
    for seed in range(3):
        check_exchange(kernel, signal, 3, 1, (Schedule.SKEWED, seed))
    assert signal["arrived"][0].tolist() == [[0, 24, 24]]
    assert signal["sent"][0].tolist() == signal["seen"][0].tolist() == [[0, 24, 24]]


@pytest.mark.sentence("SG-21")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@under_every_schedule
def test_barrier_over_one_program_index_of_all_ranks(ranks: int, schedule) -> None:
    for start in (0, WRAP):
        check_exchange(exchange("barrier", "barrier_sync(%o)"), new_barrier(ranks, 2, start), ranks, 2, schedule)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@under_every_schedule
def test_barrier_over_all_programs_of_all_ranks(ranks: int, schedule) -> None:
    # Each program reads what another program of each rank has written.
    other = "%q"
    sync = "barrier_sync(%o, all_programs=true)"
    body = EXCHANGE.replace("SYNC", sync).replace("WHICH", other)
    body = "%np = num_programs() : i64 %p1 = binary(%p, %c1, fn=Binary.add) : i64\n" + (
        "%q = binary(%p1, %np, fn=Binary.mod) : i64\n" + body.replace("%p = program_id() : i64", "")
    )
    kernel = compiled(f"%o: barrier, {EXCHANGE_PARAMS}", "%p = program_id() : i64\n" + body)
    check_exchange(kernel, new_barrier(ranks, 3), ranks, 3, schedule)


@pytest.mark.parametrize("grid", [(1,), (5,), (2, 3), (2, 2, 2)])
@under_every_schedule
def test_programs_of_one_device_meet(grid, schedule) -> None:
    rank = len(grid)
    linear = "".join(f"%i{k} = program_id(axis={k}) : i64 %n{k} = num_programs(axis={k}) : i64\n" for k in range(rank))
    linear += "%l0 = binary(%i0, %c0, fn=Binary.add) : i64 %s0 = binary(%n0, %c1, fn=Binary.mul) : i64\n"
    for k in range(1, rank):
        linear += (
            f"%m{k} = binary(%i{k}, %s{k - 1}, fn=Binary.mul) : i64 "
            f"%l{k} = binary(%l{k - 1}, %m{k}, fn=Binary.add) : i64 "
            f"%s{k} = binary(%n{k}, %s{k - 1}, fn=Binary.mul) : i64\n"
        )
    last = rank - 1
    body = (
        linear
        + f"""
    for(%c0, %c3, %c1) (%round: i64) {{
      %v = binary(%l{last}, %round, fn=Binary.add) : i64
      word_store(%x, %v, %l{last}, order=Order.weak, scope=none)
      sync_programs()
      %sum = for(%c0, %s{last}, %c1, %c0) : i64 (%q: i64, %a: i64) {{
        %w = word_load(%x, %q, order=Order.weak, scope=none) : i64
        %b = binary(%a, %w, fn=Binary.add) : i64
        continue(%b)
      }}
      word_store(%out, %sum, %l{last}, %round, order=Order.weak, scope=none)
      sync_programs()
      continue()
    }}
    """
    )
    params = "%x: view<i64, 1, read_write, device>, %out: view<i64, 2, read_write>"
    n = int(np.prod(grid))
    out = np.zeros((n, 3), np.int64)
    run(compiled(params, body, f" grid={rank}"), grid, [np.zeros(n, np.int64), out], 1, schedule)
    expected = [n * (n - 1) // 2 + n * k for k in range(3)]
    np.testing.assert_array_equal(out, np.broadcast_to(expected, (n, 3)))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@under_every_schedule
def test_signal_to_one_rank_and_from_one_rank(ranks: int, schedule) -> None:
    # A token goes around the ring and grows by one at each rank.
    body = """
    %me = rank(%x) : i64
    %n = num_ranks(%x) : i64
    %up = binary(%me, %c1, fn=Binary.add) : i64
    %right = binary(%up, %n, fn=Binary.mod) : i64
    %down = binary(%me, %n, fn=Binary.add) : i64
    %down1 = binary(%down, %c1, fn=Binary.sub) : i64
    %left = binary(%down1, %n, fn=Binary.mod) : i64
    %mine = peer_view(%x, %me) : view<i64, 1, read_write, peer>
    %theirs = peer_view(%x, %right) : view<i64, 1, read_write, peer>
    %first = compare(%me, %c0, fn=Compare.eq) : bool
    for(%c0, %c3, %c1) (%round: i64) {
      %start = if(%first) : bool { yield(%first) } else {
        wait_signal(%s, %c1, %left)
        yield(%first)
      }
      %t = word_load(%mine, %c0, order=Order.weak, scope=none) : i64
      %t1 = binary(%t, %c1, fn=Binary.add) : i64
      word_store(%theirs, %t1, %c0, order=Order.weak, scope=none)
      notify(%s, %c1, %right)
      if(%first) {
        wait_signal(%s, %c1, %left)
        yield()
      } else { yield() }
      continue()
    }
    """
    kernel = compiled("%s: signal, %x: symmetric<i64, 1, read_write>", body)
    x = per_rank(ranks, (1,))
    run(kernel, 1, [new_signal(ranks, 2), x], ranks, schedule)
    assert x[0].tolist() == [3 * ranks]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@under_every_schedule
def test_counter_counts_adds_of_many(ranks: int, schedule) -> None:
    # Every rank puts a number into rank 0 and adds 2; rank 0 waits for 2n and sums; a barrier ends the round.
    body = """
    %me = rank(%x) : i64
    %n = num_ranks(%x) : i64
    %there = peer_view(%x, %c0) : view<i64, 1, read_write, peer>
    %first = compare(%me, %c0, fn=Compare.eq) : bool
    for(%c0, %c3, %c1) (%round: i64) {
      %v = binary(%me, %round, fn=Binary.add) : i64
      word_store(%there, %v, %me, order=Order.weak, scope=none)
      counter_add(%o, %c1, %c2, %c0)
      if(%first) {
        %adds = binary(%n, %c2, fn=Binary.mul) : i64
        counter_wait(%o, %c1, %adds)
        %sum = for(%c0, %n, %c1, %c0) : i64 (%r: i64, %a: i64) {
          %w = word_load(%there, %r, order=Order.weak, scope=none) : i64
          %b = binary(%a, %w, fn=Binary.add) : i64
          continue(%b)
        }
        word_store(%out, %sum, %round, order=Order.weak, scope=none)
        yield()
      } else { yield() }
      barrier_sync(%bar)
      continue()
    }
    """
    params = "%o: counter, %bar: barrier, %x: symmetric<i64, 1, read_write>, %out: view<i64, 1, read_write>"
    kernel = compiled(params, body)
    for start in (0, WRAP):
        out = per_rank(ranks, (3,))
        args = [new_counter(ranks, 2, start), new_barrier(ranks, 1), per_rank(ranks, (ranks,)), out]
        run(kernel, 1, args, ranks, schedule)
        assert out[0].tolist() == [sum(range(ranks)) + k * ranks for k in range(3)]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("notify(%s, %i)", "slot of s is out of bounds"),
        ("wait_signal(%s, %i, %c0)", "slot of s is out of bounds"),
        ("notify(%s, %c0, %i)", "rank of s is out of bounds"),
        ("counter_add(%o, %c0, %c1, %i)", "rank of o is out of bounds"),
        ("counter_add(%o, %i, %c1, %c0)", "slot of o is out of bounds"),
        ("counter_wait(%o, %i, %c0)", "slot of o is out of bounds"),
    ],
)
def test_slots_and_ranks_of_the_user_are_checked(body: str, message: str) -> None:
    kernel = compiled("%s: signal, %o: counter, %i: i64", body)
    for wrong in (-1, 2):
        outcome = run_grid(kernel, 1, [new_signal(2, 2), new_counter(2, 2), wrong], ranks=2)
        found = outcome.faults[0]
        assert (found.kind, found.message, found.got, found.limit) == (FaultKind.BOUNDS, message, wrong, 2)


def test_program_index_as_slot_needs_no_check() -> None:
    kernel = compiled("%s: signal", "%p = program_id() : i64 notify(%s, %p)")
    assert not any(isinstance(op, ops.Check) for op in walk(kernel.body))


def test_wait_that_nobody_satisfies_is_reported() -> None:
    kernel = compiled("%s: signal", "%p = program_id() : i64 wait_signal(%s, %p)")
    outcome = run_grid(kernel, 1, [new_signal(2, 1)], ranks=2)
    assert [(f.kind, f.rank, f.message, f.got, f.limit, f.slot) for f in outcome.faults] == [
        (FaultKind.DEADLOCK, 0, "waits for s[0, 1] at_least 1, last saw 0", 0, 1, 0),
        (FaultKind.DEADLOCK, 1, "waits for s[0, 0] at_least 1, last saw 0", 0, 1, 0),
    ]


# ---------------------------------------------------------------- mailbox

# Round k: everybody posts (me + 1) · (k + 1); everybody keeps the sum, weighted by source.
ALL_TO_ALL = """
%p = program_id() : i64
for(%c0, %rounds, %c1) (%k: i64) {
  %k1 = binary(%k, %c1, fn=Binary.add) : i64
  %v0 = binary(%me1, %k1, fn=Binary.mul) : i64
  %v1 = cast(%v0) : f32
  %tile = broadcast(%v1) : f32[2, 2]
  box_post(%box, %tile)
  box_collect(%box)
  %zero = const(value=0.0) : f32
  %z = broadcast(%zero) : f32[2, 2]
  %sum = for(%c0, %n, %c1, %z) : f32[2, 2] (%s: i64, %a: f32[2, 2]) {
    %part, %present = box_take(%box, %s) : f32[2, 2], bool
    check(%present)
    %s1 = binary(%s, %c1, fn=Binary.add) : i64
    %weight = cast(%s1) : f32
    %w = broadcast(%weight) : f32[2, 2]
    %scaled = binary(%part, %w, fn=Binary.mul) : f32[2, 2]
    %b = binary(%a, %scaled, fn=Binary.add) : f32[2, 2]
    continue(%b)
  }
  box_release(%box)
  %row = reshape(%sum) : f32[1, 1, 4]
  store(%out, %row, %p, %k, %c0)
  continue()
}
"""


HEAD = "%me = rank(%x) : i64 %n = num_ranks(%x) : i64 %me1 = binary(%me, %c1, fn=Binary.add) : i64\n"
PARAMS = "%x: symmetric<i64, 1, read>, %out: view<f32, 3, read_write>, %rounds: i64"


def mailbox_kernel(t: MailboxType, body: str = ALL_TO_ALL, posts_ahead: int = 1) -> Kernel:
    return compiled(f"%box: {t}, {PARAMS}", HEAD + body, posts_ahead=posts_ahead)


def post_and_sum(t: MailboxType, ranks: int, programs: int, rounds: int, schedule, epoch: int = 0, launches: int = 1):
    """Whether all sums are right, for every launch."""
    kernel = mailbox_kernel(t)
    box = new_mailbox(t, ranks, programs, epoch=epoch)
    right = True
    for _ in range(launches):
        out = per_rank(ranks, (programs, rounds, 4), np.float32)
        run(kernel, programs, [box, per_rank(ranks, (1,)), out, rounds], ranks, schedule)
        expected = [sum((s + 1) ** 2 for s in range(ranks)) * (k + 1) for k in range(rounds)]
        want = np.broadcast_to(np.float32(expected)[None, :, None], out[0].shape)
        right = right and all(np.array_equal(found, want) for found in out)
    return right


DEPTH_2 = MailboxType(f32, (2, 2), 2, False)
ACKNOWLEDGED = MailboxType(f32, (2, 2), 1, True)
TYPES = [DEPTH_2, ACKNOWLEDGED, MailboxType(f32, (2, 2), 2, True), MailboxType(f32, (2, 2), 4, False)]


@pytest.mark.parametrize(
    "t", [DEPTH_2, ACKNOWLEDGED, MailboxType(f32, (2, 2), 2, True), MailboxType(f32, (2, 2), 4, False)], ids=str
)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@under_every_schedule
def test_mailbox_all_to_all(t: MailboxType, ranks: int, schedule) -> None:
    assert post_and_sum(t, ranks, 2 if ranks == 2 else 1, 5, schedule, launches=2)


@pytest.mark.sentence("MB-6")
@pytest.mark.parametrize("t", [DEPTH_2, ACKNOWLEDGED], ids=str)
def test_mailbox_epochs_wrap(t: MailboxType) -> None:
    for schedule in SCHEDULES:
        assert post_and_sum(t, 3, 1, 5, schedule, epoch=(1 << 40) - 2)


def test_depth_1_without_acknowledgement_loses_tiles() -> None:
    """So the tests above would notice: the protocol is needed."""
    broken = MailboxType(f32, (2, 2), 1, False)
    assert not all(post_and_sum(broken, 3, 1, 5, (Schedule.SKEWED, seed)) for seed in range(40))


# Round k: tiles go only to ranks of the parity of k; the sum counts what came, the flag how many.
ROUNDS = """
%p = program_id() : i64
for(%c0, %rounds, %c1) (%k: i64) {
  %v1 = cast(%me1) : f32
  %tile = broadcast(%v1) : f32[2, 2]
  box_round(%box)
  for(%c0, %n, %c1) (%d: i64) {
    %x1 = binary(%d, %k, fn=Binary.add) : i64
    %odd = binary(%x1, %c1, fn=Binary.and) : i64
    %even = compare(%odd, %c0, fn=Compare.eq) : bool
    if(%even) { box_put(%box, %tile, %d) yield() } else { yield() }
    continue()
  }
  box_flush(%box)
  box_collect(%box)
  %zero = const(value=0.0) : f32
  %z = broadcast(%zero) : f32[2, 2]
  %sum = for(%c0, %n, %c1, %z) : f32[2, 2] (%s: i64, %a: f32[2, 2]) {
    %part, %present = box_take(%box, %s) : f32[2, 2], bool
    %one = const(value=1000.0) : f32
    %count = select(%present, %one, %zero) : f32
    %counts = broadcast(%count) : f32[2, 2]
    %b0 = binary(%a, %part, fn=Binary.add) : f32[2, 2]
    %b = binary(%b0, %counts, fn=Binary.add) : f32[2, 2]
    continue(%b)
  }
  box_release(%box)
  %row = reshape(%sum) : f32[1, 1, 4]
  store(%out, %row, %p, %k, %c0)
  continue()
}
"""


@pytest.mark.parametrize("t", [DEPTH_2, ACKNOWLEDGED], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@under_every_schedule
def test_rounds_with_tiles_for_some_ranks(t: MailboxType, ranks: int, schedule) -> None:
    kernel = mailbox_kernel(t, ROUNDS)
    out = per_rank(ranks, (1, 4, 4), np.float32)
    run(kernel, 1, [new_mailbox(t, ranks, 1), per_rank(ranks, (1,)), out, 4], ranks, schedule)
    full = sum(r + 1 for r in range(ranks)) + 1000 * ranks
    for d, found in enumerate(out):
        expected = [full if (d + k) % 2 == 0 else 0 for k in range(4)]
        np.testing.assert_array_equal(found, np.broadcast_to(np.float32(expected)[None, :, None], found.shape))


# Two posts ahead: the round that is collected lies one behind.
AHEAD = """
%p = program_id() : i64
%f = cast(%me1) : f32
%one = broadcast(%f) : f32[2, 2]
%two = binary(%one, %one, fn=Binary.add) : f32[2, 2]
box_post(%box, %one)
box_post(%box, %two)
box_collect(%box)
%a, %ap = box_take(%box, %c0) : f32[2, 2], bool
box_release(%box)
box_collect(%box)
%b, %bp = box_take(%box, %c0) : f32[2, 2], bool
box_release(%box)
%a0 = reshape(%a) : f32[1, 1, 4]
%b0 = reshape(%b) : f32[1, 1, 4]
store(%out, %a0, %p, %c0, %c0)
store(%out, %b0, %p, %c1, %c0)
"""


def test_posts_ahead_are_collected_in_order() -> None:
    t = MailboxType(f32, (2, 2), 4, False)
    kernel = mailbox_kernel(t, AHEAD, posts_ahead=2)
    box = new_mailbox(t, 3, 1)
    for schedule in SCHEDULES:
        out = per_rank(3, (1, 2, 4), np.float32)
        run(kernel, 1, [box, per_rank(3, (1,)), out, 0], 3, schedule)
        assert all(found[0, :, 0].tolist() == [1, 2] for found in out)


def test_another_signature_is_reported_with_both() -> None:
    kernel = mailbox_kernel(DEPTH_2)
    box = new_mailbox(DEPTH_2, 2, 1, signature=PerRank([0x1000005, 7]))
    outcome = run_grid(kernel, 1, [box, per_rank(2, (1,)), per_rank(2, (1, 1, 4), np.float32), 1], ranks=2)
    # The first fault wins; the other rank leaves at its next wait.
    assert [(f.kind, f.rank, f.message, f.got, f.limit) for f in outcome.faults] == [
        (FaultKind.SIGNATURE, 1, "box: two ranks post from kernels or arguments that do not match", 5, 7),
    ]


def test_put_to_a_rank_that_does_not_exist() -> None:
    body = ROUNDS.replace("box_put(%box, %tile, %d)", "box_put(%box, %tile, %n)")
    args = [new_mailbox(DEPTH_2, 2, 1), per_rank(2, (1,)), per_rank(2, (1, 4, 4), np.float32), 4]
    outcome = run_grid(mailbox_kernel(DEPTH_2, body), 1, args, ranks=2)
    assert (outcome.faults[0].kind, outcome.faults[0].message) == (FaultKind.BOUNDS, "rank of box is out of bounds")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("box_collect(%box)", "box_collect: expected a round that was posted and not collected"),
        ("box_flush(%box)", "box_flush: expected an open round"),
        ("box_release(%box)", "box_release: expected a round being collected"),
    ],
)
def test_broken_order_of_mailbox_ops(body: str, message: str) -> None:
    # The mailbox rules find these first; without them the expansion still does not guess.
    with pytest.raises(VerifyError) as caught:
        expand_mailboxes(parsed(f"%box: {DEPTH_2}", body))
    assert str(caught.value) == message


def test_expansion_keeps_the_line_of_the_user() -> None:
    text = 'kernel @k(%s: signal) { %p = program_id() : i64 wait_signal(%s, %p) loc("user.py":7:4) return() }'
    kernel = run_pipeline(parse_kernel(text))
    assert {str(op.loc) for op in walk(kernel.body) if isinstance(op, ops.Wait)} == {"user.py:7"}
