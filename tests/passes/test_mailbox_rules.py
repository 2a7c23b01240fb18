"""The mailbox rules B1 to B7: what keeps them compiles, each way to break one is refused with its line."""

import pytest
from tests.frontend.helpers import build, error, underlined

import peertile.language as T
from peertile.errors import CompileError
from peertile.ir.text import parse_kernel
from peertile.passes.mailbox_rules import check_mailbox_rules


def exchange(box, t):
    box.post(t)
    acc = T.zeros((64,))
    for part in box.collect():
        acc += part
    return acc


def post_only(box, t):
    box.post(t)


def collect_only(box):
    acc = T.zeros((64,))
    for part in box.collect():
        acc += part
    return acc


def use_two(first, second, t):
    first.post(t)
    second.post(t)


def maybe(box, t, n):
    if n > 3:
        return t
    return exchange(box, t)


# ---------------------------------------------------------------- what keeps the rules


def rounds_in_a_loop(z, x, box, n):
    for k in T.range(n):
        box.post(x.load((k,), (64,)))
        for part in box.collect():
            z.store(part)


def two_mailboxes_interleaved(z, x, box, other):
    box.post(x.load((0,), (64,)))
    other.post(x.load((1,), (64,)))
    for part in box.collect():
        z.store(part)
    for part in other.collect():
        z.store(part)


def whole_rounds_under_an_equal_condition(z, x, box, n):
    if n > 3 and x.shape[0] > 100 and T.num_ranks() > 1 and T.program_id(0) < 3:
        z.store(exchange(box, x.load((0,), (64,))))


def post_and_collect_in_helpers(z, x, box):
    post_only(box, x.load((0,), (64,)))
    z.store(collect_only(box))


def helper_with_an_early_return(z, x, box, n):
    z.store(maybe(box, x.load((0,), (64,)), n))


def puts_that_depend_on_the_rank(z, x, box):
    with box.round() as r:
        for k in T.peers():
            if k > T.rank():
                r.put(x.load((k,), (64,)), to=k)
        if T.rank() == 0:
            r.put(x.load((0,), (64,)), to=0)
    for source, part in box.collect(sources=True):
        if source > 1:
            z.store(part)


def collected_values_decide_what_to_store(z, x, box):
    acc = exchange(box, x.load((0,), (64,)))
    if T.max(acc) > 3:
        z.store(acc)
    else:
        z.store(0.0)


def continue_in_collect(z, x, box):
    box.post(x.load((0,), (64,)))
    acc = T.zeros((64,))
    for source, part in box.collect(sources=True):
        if source == T.rank():
            continue
        acc += part
    z.store(acc)


def equal_return_before_a_round(z, x, box, n):
    if n == 0:
        return
    z.store(exchange(box, x.load((0,), (64,))))


def loop_left_by_an_equal_break(z, x, box, n):
    for k in T.range(100):
        if k == n:
            break
        z.store(exchange(box, x.load((k,), (64,))))


def unequal_loop_without_mailbox(z, x, box):
    t = x.load((0,), (64,))
    while T.max(t) > 1:
        t = t * 0.5
    z.store(exchange(box, t))


def persistent_tiles(zp, x, box):
    for tile in zp.tiles():
        tile.store(exchange(box, x.load_like(tile)))


def puts_to_ranks_that_may_differ(z, x, box, n, k):
    t = x.load((0,), (64,))
    with box.round() as r:
        r.put(t, to=n)
        r.put(t, to=k)
        r.put(t, to=n + 1)
        if n > 3:
            r.put(t, to=0)
        else:
            r.put(t, to=1)
        r.put(t, to=0)
    for part in box.collect():
        z.store(part)


def puts_in_rounds_of_their_own(z, x, box, n):
    for k in T.range(n):
        with box.round() as r:
            r.put(x.load((k,), (64,)), to=0)
        for part in box.collect():
            z.store(part)


def only_the_meeting(z, x, box):
    box.post(x.load((0,), (64,)))
    for _ in box.collect():
        pass
    box.post(x.load((0,), (64,)))
    for source, _part in box.collect(sources=True):
        z.store(source.astype(T.f32))


def tiles_of_which_the_name_is_read(z, x, box):
    box.post(x.load((0,), (64,)))
    for part in box.collect():
        part += 1.0
    box.post(x.load((0,), (64,)))
    for pair in box.collect(sources=True):
        z.store(pair[1])


GOOD = [
    puts_to_ranks_that_may_differ,
    puts_in_rounds_of_their_own,
    only_the_meeting,
    tiles_of_which_the_name_is_read,
    rounds_in_a_loop,
    two_mailboxes_interleaved,
    whole_rounds_under_an_equal_condition,
    post_and_collect_in_helpers,
    helper_with_an_early_return,
    puts_that_depend_on_the_rank,
    collected_values_decide_what_to_store,
    continue_in_collect,
    equal_return_before_a_round,
    loop_left_by_an_equal_break,
    unequal_loop_without_mailbox,
    persistent_tiles,
]


@pytest.mark.sentence("B1", "B2", "B3", "B4", "B5", "B6")
@pytest.mark.parametrize("kernel", GOOD, ids=lambda k: k.__name__)
def test_what_keeps_the_rules_compiles(kernel):
    build(kernel)


# ---------------------------------------------------------------- what breaks them


def post_twice(z, x, box):
    box.post(x.load((0,), (64,)))
    box.post(x.load((1,), (64,)))


def round_after_post(z, x, box):
    box.post(x.load((0,), (64,)))
    with box.round():
        pass


def named_round_after_post(z, x, box):
    box.post(x.load((0,), (64,)))
    with box.round() as r:
        r.put(x.load((0,), (64,)), to=0)


def post_in_a_round(z, x, box):
    with box.round() as r:  # noqa: F841
        box.post(x.load((0,), (64,)))


def collect_in_a_round(z, x, box):
    with box.round() as r:  # noqa: F841
        for part in box.collect():
            z.store(part)


def collect_without_post(z, x, box):
    for part in box.collect():
        z.store(part)


def collect_twice(z, x, box):
    z.store(exchange(box, x.load((0,), (64,))))
    for part in box.collect():
        z.store(part)


def post_in_one_arm(z, x, box, n):
    if n > 3:
        box.post(x.load((0,), (64,)))
    z.store(0.0)


def two_ways_out(z, x, box, n):
    while n < 10:
        box.post(x.load((0,), (64,)))
        if n == 5:
            break
        for part in box.collect():
            z.store(part)


def post_in_a_loop(z, x, box, n):
    for k in T.range(n):
        box.post(x.load((k,), (64,)))


def collect_in_a_loop(z, x, box, n):
    box.post(x.load((0,), (64,)))
    for _ in T.range(n):
        for part in box.collect():
            z.store(part)


def end_with_a_post(z, x, box):
    box.post(x.load((0,), (64,)))
    z.store(0.0)


def return_with_a_post(z, x, box, n):
    box.post(x.load((0,), (64,)))
    if n > 3:
        return
    for part in box.collect():
        z.store(part)


def post_in_collect(z, x, box, other):
    box.post(x.load((0,), (64,)))
    for part in box.collect():
        other.post(part)


def break_in_collect(z, x, box, n):
    box.post(x.load((0,), (64,)))
    for part in box.collect():
        if n > 3:
            break
        z.store(part)


def return_in_collect(z, x, box, n):
    box.post(x.load((0,), (64,)))
    for part in box.collect():
        z.store(part)
        return


def collect_in_collect(z, x, box, other):
    box.post(x.load((0,), (64,)))
    other.post(x.load((0,), (64,)))
    for _ in box.collect():
        for part in other.collect():
            z.store(part)


def break_out_of_a_round(z, x, box, n):
    for k in T.range(n):
        with box.round() as r:
            r.put(x.load((k,), (64,)), to=0)
            if k > 3:
                break


def return_out_of_a_round(z, x, box, n):
    with box.round() as r:
        r.put(x.load((0,), (64,)), to=0)
        if n > 3:
            return


def round_that_never_ends(z, x, box):
    with box.round() as r:
        r.put(x.load((0,), (64,)), to=0)
        while True:
            pass


def tile_behind_the_loop(z, x, box):
    box.post(x.load((0,), (64,)))
    for part in box.collect():
        z.store(part)
    z.store(part)


def round_behind_its_with(z, x, box):
    with box.round() as r:
        r.put(x.load((0,), (64,)), to=0)
    r.put(x.load((0,), (64,)), to=0)


def unused_collect(z, x, box):
    box.post(x.load((0,), (64,)))
    box.collect()


def collect_of_tiles_that_nobody_reads(z, x, box):
    box.post(x.load((0,), (64,)))
    for part in box.collect():  # noqa: B007
        pass
    z.store(0.0)


def collect_of_sources_alone(z, x, box):
    box.post(x.load((0,), (64,)))
    for source, part in box.collect(sources=True):  # noqa: B007
        z.store(source.astype(T.f32))


def collect_that_rebinds_its_tile(z, x, box):
    box.post(x.load((0,), (64,)))
    for part in box.collect():
        part = 1.0  # noqa: F841
        z.store(0.0)


def post_by_another_name(z, x, box):
    f = box.post
    f(x.load((0,), (64,)))


def post_in_a_tuple(z, x, box):
    fs = (box.post, box.collect)
    fs[0](x.load((0,), (64,)))


def call_it(f, t):
    f(t)


def post_passed_to_a_helper(z, x, box):
    call_it(box.post, x.load((0,), (64,)))


def post_passed_by_keyword(z, x, box):
    call_it(t=x.load((0,), (64,)), f=box.post)


def the_post_of(box):
    return box.post


def post_returned_by_a_helper(z, x, box):
    the_post_of(box)(x.load((0,), (64,)))


def post_not_called(z, x, box):
    box.post  # noqa: B018


def put_by_another_name(z, x, box):
    with box.round() as r:
        send = r.put
        send(x.load((0,), (64,)), to=0)


def put_twice_to_a_constant(z, x, box):
    with box.round() as r:
        r.put(x.load((0,), (64,)), to=0)
        r.put(x.load((1,), (64,)), to=0)


def put_twice_to_a_value(z, x, box):
    with box.round() as r:
        for k in T.ranks():
            r.put(x.load((k,), (64,)), to=k)
            r.put(x.load((0,), (64,)), to=k)


def put_twice_to_equal_expressions(z, x, box):
    with box.round() as r:
        r.put(x.load((0,), (64,)), to=(T.rank() + 1) % T.num_ranks())
        r.put(x.load((1,), (64,)), to=(T.rank() + 1) % T.num_ranks())


def put_in_both_arms_and_behind(z, x, box, n):
    with box.round() as r:
        if n > 3:
            r.put(x.load((0,), (64,)), to=0)
        else:
            r.put(x.load((1,), (64,)), to=0)
        r.put(x.load((2,), (64,)), to=0)


def put_and_put_again_in_an_arm(z, x, box, n):
    with box.round() as r:
        r.put(x.load((0,), (64,)), to=n)
        if n > 3:
            r.put(x.load((1,), (64,)), to=n)


def unused_round(z, x, box):
    box.round()


def alias(z, x, box):
    mine = box
    mine.post(x.load((0,), (64,)))


def alias_of_collect(z, x, box):
    box.post(x.load((0,), (64,)))
    parts = box.collect()
    for part in parts:
        z.store(part)


def in_a_tuple(z, x, box, other):
    for b in (box, other):
        b.post(x.load((0,), (64,)))


def chosen(z, x, box, other, n):
    (box if n > 3 else other).post(x.load((0,), (64,)))


def same_twice(z, x, box):
    use_two(box, box, x.load((0,), (64,)))


def argument_of_a_word(z, x, box):
    T.print_("box", box)


def wrong_dtype(z, x, box):
    box.post(x.load((0,), (64,)).astype(T.bf16))


def wrong_shape(z, x, box):
    box.post(x.load((0,), (32,)))


def no_tile(z, x, box):
    box.post(1.0)


def put_without_rank(z, x, box):
    with box.round() as r:
        r.put(x.load((0,), (64,)))


UNEQUAL = (
    "which differs between ranks (rule B4): expected every rank to get here equally often, deciding by constants, "
    "scalar arguments, extents, num_ranks, num_programs and program_id alone; do it on every rank, and decide what to "
    "send or to use"
)


def post_under_the_rank(z, x, box):
    if T.rank() == 0:
        z.store(exchange(box, x.load((0,), (64,))))


def post_under_a_loaded_value(z, x, box):
    t = x.load((0,), (64,))
    if T.max(t) > 0:
        z.store(exchange(box, t))


def loop_over_a_loaded_count(z, x, xi, box):
    for k in T.range(T.max(xi.load((0,), (64,)))):
        z.store(exchange(box, x.load((k,), (64,))))


def loop_until_the_collected_is_small(z, x, box):
    t = x.load((0,), (64,))
    while True:
        t = exchange(box, t)
        if T.max(t) < 1:
            break
    z.store(t)


def return_that_can_skip_a_round(z, x, box):
    if T.rank() == 0:
        return
    z.store(exchange(box, x.load((0,), (64,))))


def variable_assigned_under_the_rank(z, x, box):
    rounds = 1
    if T.rank() == 0:
        rounds = 2
    for k in T.range(rounds):
        z.store(exchange(box, x.load((k,), (64,))))


def continue_that_can_skip_a_round(z, x, box, n):
    for k in T.range(n):
        if k == T.rank():
            continue
        z.store(exchange(box, x.load((k,), (64,))))


def loop_from_the_rank(z, x, box, n):
    for k in T.range(T.rank(), n, T.num_ranks()):
        z.store(exchange(box, x.load((k,), (64,))))


def helper_that_returns_by_the_rank(z, x, box):
    z.store(maybe(box, x.load((0,), (64,)), T.rank()))


def word_decides(z, x, words, box):
    if T.ld(words) > 0:
        z.store(exchange(box, x.load((0,), (64,))))


TWICE = (
    "mailbox `box`: put to a rank that has its tile of this round (MB-25): expected one put for each rank and round, got a "
    "second, which would replace the first; choose the tile before the put, or send it in a round of its own"
)
METHOD = "a mailbox is only a receiver (rule B7), got its method"
UNREAD = (
    "`part`: the tiles of `box.collect()` are not used (rule B6): expected the loop to read `part`, as in `acc += part`; "
    "where only the meeting counts, name it `_`"
)

B1 = "mailbox `box`: "
BAD = [
    (post_twice, B1 + "post with 1 round outstanding (rule B1): expected fewer than 1; collect first, with "
     "`for part in box.collect():`", "box.post(x.load((1,), (64,)))"),
    (round_after_post, "with: expected a name for the round, as in `with box.round() as r:`", None),
    (named_round_after_post, B1 + "round with 1 round outstanding (rule B1): expected fewer than 1; collect first, with "
     "`for part in box.collect():`", "with box.round() as r:"),
    (post_in_a_round, B1 + "post inside a round of it (rule B1): expected r.put(tile, to=rank), got post; end the with "
     "statement first", "box.post(x.load((0,), (64,)))"),
    (collect_in_a_round, B1 + "collect with a round not sent yet (rule B1): expected a round that was posted; post a tile "
     "first, with `box.post(tile)`, or end the round", "box.collect()"),
    (collect_without_post, B1 + "collect with nothing outstanding (rule B1): expected a round that was posted; post a tile "
     "first, with `box.post(tile)`, or end the round", "box.collect()"),
    (collect_twice, B1 + "collect with nothing outstanding (rule B1): expected a round that was posted; post a tile "
     "first, with `box.post(tile)`, or end the round", "box.collect()"),
    (post_in_one_arm, B1 + "the arms of this `if` leave it in different states (rule B2): expected the same behind both, "
     "got 1 round outstanding and nothing outstanding; post and collect in one arm, or do both in front of the if",
     "if n > 3:"),
    (two_ways_out, B1 + "this way out of the loop leaves it in another state than the others (rule B2): expected 1 round "
     "outstanding, got nothing outstanding; collect before leaving", "n < 10"),
    (post_in_a_loop, B1 + "a trip of this loop leaves it in another state than it found (rule B3): expected nothing "
     "outstanding, got 1 round outstanding; let each trip collect what it posts, with `for part in box.collect():`",
     "T.range(n)"),
    (collect_in_a_loop, B1 + "a trip of this loop leaves it in another state than it found (rule B3): expected 1 round "
     "outstanding, got nothing outstanding; let each trip collect what it posts, with `for part in box.collect():`",
     "T.range(n)"),
    (end_with_a_post, B1 + "the kernel ends here with 1 round outstanding (rule B5): expected nothing outstanding; "
     "collect it before, with `for part in box.collect():`", None),
    (return_with_a_post, B1 + "the kernel ends here with 1 round outstanding (rule B5): expected nothing outstanding; "
     "collect it before, with `for part in box.collect():`", "return"),
    (post_in_collect, "mailbox `other`: post inside the loop over `box.collect()` (rule B6): expected no mailbox operation "
     "before the loop has ended, got post; move it behind the loop", "other.post(part)"),
    (break_in_collect, "`break` in the loop over `box.collect()`: expected it to run to its end, where the slots go back "
     "(rule B6); use an `if` around what is left to do, or `continue`", "break"),
    (return_in_collect, "`return` in the loop over `box.collect()`: expected it to run to its end, where the slots go "
     "back (rule B6); return behind it", "return"),
    (collect_in_collect, "`other.collect()` inside the loop over another collect() (rule B6): expected no mailbox "
     "operation there; collect behind it", "other.collect()"),
    (break_out_of_a_round, "`break` out of `with box.round()`: expected the round to be sent (rule B3), got a way out; end "
     "the with statement first", "break"),
    (return_out_of_a_round, "`return` out of `with box.round()`: expected the round to be sent (rule B5), got a way out; "
     "end the with statement first", "return"),
    (round_that_never_ends, "with: every path through `with box.round()` must reach its end (rule B3)",
     "with box.round() as r:"),
    (tile_behind_the_loop, "`part` came from the mailbox `box`, whose slots went back when the loop ended; use it inside "
     "the loop, as in `acc += part`", "part"),
    (round_behind_its_with, "`r` is a round of the mailbox `box` that was sent when its with ended", "r"),
    (unused_collect, "unused result: `box.collect()` does nothing by itself (rule B6); write "
     "`for part in box.collect():`", "box.collect()"),
    (collect_of_tiles_that_nobody_reads, UNREAD, "part"),
    (collect_of_sources_alone, UNREAD, "part"),
    (collect_that_rebinds_its_tile, UNREAD, "part"),
    (post_by_another_name, f"`box.post`: {METHOD} post as a value; call it where it is written", "box.post"),
    (post_in_a_tuple, f"`box.post`: {METHOD} post as a value; call it where it is written", "box.post"),
    (post_passed_to_a_helper, f"`box.post`: {METHOD} post as a value; call it where it is written", "box.post"),
    (post_passed_by_keyword, f"`box.post`: {METHOD} post as a value; call it where it is written", "box.post"),
    (post_returned_by_a_helper, f"`box.post`: {METHOD} post as a value; call it where it is written", "box.post"),
    (post_not_called, f"`box.post`: {METHOD} post as a value; call it where it is written", "box.post"),
    (put_by_another_name, "`r.put`: a round of a mailbox is only a receiver (rule B7), got its method put as a value; "
     "call it where it is written", "r.put"),
    (put_twice_to_a_constant, TWICE, "r.put(x.load((1,), (64,)), to=0)"),
    (put_twice_to_a_value, TWICE, "r.put(x.load((0,), (64,)), to=k)"),
    (put_twice_to_equal_expressions, TWICE, "r.put(x.load((1,), (64,)), to=(T.rank() + 1) % T.num_ranks())"),
    (put_in_both_arms_and_behind, TWICE, "r.put(x.load((2,), (64,)), to=0)"),
    (put_and_put_again_in_an_arm, TWICE, "r.put(x.load((1,), (64,)), to=n)"),
    (unused_round, "unused result: `box.round()` does nothing by itself; write `with box.round() as r:`", "box.round()"),
    (alias, "`box`: a mailbox is only a receiver, as in box.post(tile), or an argument of a helper (rule B7), got a use as "
     "a value; write its own name where it is used", "box"),
    (alias_of_collect, "`parts` = the collection of mailbox `box`: expected it in a for loop, got an alias (rule B7)",
     "parts"),
    (in_a_tuple, "`box`: a mailbox is only a receiver, as in box.post(tile), or an argument of a helper (rule B7), got a "
     "use as a value; write its own name where it is used", "box"),
    (chosen, "`box`: a mailbox is only a receiver, as in box.post(tile), or an argument of a helper (rule B7), got a use as "
     "a value; write its own name where it is used", "box"),
    (same_twice, "`use_two`: expected different mailboxes (rule B7), got `box` twice; pass it once, so that one name "
     "stands for one mailbox", "use_two(box, box, x.load((0,), (64,)))"),
    (argument_of_a_word, "`box`: a mailbox is only a receiver, as in box.post(tile), or an argument of a helper (rule B7), "
     "got a use as a value; write its own name where it is used", "box"),
    (wrong_dtype, "`box.post`: expected a tile f32[64], got bf16[64]; convert it with .astype(box.dtype)", None),
    (wrong_shape, "`box.post`: expected a tile f32[64], got f32[32]; reshape it, or make the mailbox with that tile shape",
     "box.post(x.load((0,), (32,)))"),
    (no_tile, "`box.post`: expected a tile f32[64], got the float 1.0", "box.post(1.0)"),
    (put_without_rank, "T.Round.put: missing argument `to`; expected tile, to", "r.put(x.load((0,), (64,)))"),
    (post_under_the_rank, f"mailbox `box`: post depends on the number of this rank, {UNEQUAL}", "box.post(t)"),
    (post_under_a_loaded_value, f"mailbox `box`: post depends on a loaded value, {UNEQUAL}", "box.post(t)"),
    (loop_over_a_loaded_count, f"mailbox `box`: post depends on a loaded value, {UNEQUAL}", "box.post(t)"),
    (loop_until_the_collected_is_small, f"mailbox `box`: post depends on a collected tile, {UNEQUAL}", "box.post(t)"),
    (return_that_can_skip_a_round, f"mailbox `box`: post depends on the number of this rank, {UNEQUAL}", "box.post(t)"),
    (variable_assigned_under_the_rank, f"mailbox `box`: post depends on the number of this rank, {UNEQUAL}",
     "box.post(t)"),
    (continue_that_can_skip_a_round, f"mailbox `box`: post depends on the number of this rank, {UNEQUAL}", "box.post(t)"),
    (loop_from_the_rank, f"mailbox `box`: post depends on the number of this rank, {UNEQUAL}", "box.post(t)"),
    (helper_that_returns_by_the_rank, f"mailbox `box`: post depends on the number of this rank, {UNEQUAL}", "box.post(t)"),
    (word_decides, f"mailbox `box`: post depends on a loaded word, {UNEQUAL}", "box.post(t)"),
]  # fmt: skip


@pytest.mark.sentence("B1", "B2", "B3", "B4", "B5", "B6", "B7", "MB-12")
@pytest.mark.parametrize(("kernel", "message", "under"), BAD, ids=[b[0].__name__ for b in BAD])
def test_what_breaks_a_rule_is_refused(kernel, message, under):
    found = error(kernel)
    assert found.message == message
    if under is not None:
        assert underlined(found) == under


def test_the_whole_text_shows_both_places():
    start = post_twice.__code__.co_firstlineno
    assert str(error(post_twice)) == "\n".join(
        [
            "mailbox `box`: post with 1 round outstanding (rule B1): expected fewer than 1; collect first, with "
            "`for part in box.collect():`",
            f"  {__file__}:{start + 2} in post_twice",
            "    box.post(x.load((1,), (64,)))",
            "    ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
            "the round that is outstanding was posted here",
            f"  {__file__}:{start + 1} in post_twice",
            "    box.post(x.load((0,), (64,)))",
            "    ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
        ]
    )


@pytest.mark.sentence("MB-25")
def test_a_second_put_shows_the_first():
    ((note, loc),) = error(put_twice_to_a_constant).notes
    assert note == "the first was put here"
    assert loc.line == put_twice_to_a_constant.__code__.co_firstlineno + 2


def test_b4_shows_where_the_value_comes_from():
    found = error(post_under_a_loaded_value)
    ((note, loc),) = found.notes
    assert note == "this is where it comes from"
    assert loc.line == post_under_a_loaded_value.__code__.co_firstlineno + 1


# ---------------------------------------------------------------- on IR


BOX = "%box: mailbox<f32[4], depth=4>, %x: view<f32, 1, read>"
POST = "%i = const(value=0) : i64 %t = load(%x, %i) : f32[4]"


def text(body: str):
    return parse_kernel(f"kernel @k({BOX}) {{ {POST} {body} return() }}")


@pytest.mark.sentence("B1")
def test_more_posts_ahead_are_allowed_where_the_caller_says_so():
    two = "box_post(%box, %t) box_post(%box, %t) "
    kernel = text(two + "box_collect(%box) box_release(%box) box_collect(%box) box_release(%box)")
    check_mailbox_rules(kernel, posts_ahead=2)
    with pytest.raises(CompileError, match="rule B1"):
        check_mailbox_rules(kernel)
    with pytest.raises(CompileError, match=r"post with 2 rounds outstanding \(rule B1\): expected fewer than 2"):
        check_mailbox_rules(text(two + "box_post(%box, %t)"), posts_ahead=2)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("box_put(%box, %t, %i)", "put outside a round (rule B1): expected an open round, got nothing outstanding; write "
         "`with box.round() as r:` around it"),
        ("%p, %q = box_take(%box, %i) : f32[4], bool", "take with nothing outstanding (rule B1): expected it inside a "
         "collect, got one outside"),
        ("box_post(%box, %t) box_collect(%box)", "the kernel ends here with tiles held (rule B5): expected nothing "
         "outstanding; collect it before, with `for part in box.collect():`"),
        ("box_round(%box)", "the kernel ends here with a round not sent yet (rule B5): expected nothing outstanding; "
         "collect it before, with `for part in box.collect():`"),
    ],
)  # fmt: skip
def test_ir_from_text_is_held_to_the_rules(body, message):
    with pytest.raises(CompileError) as caught:
        check_mailbox_rules(text(body))
    assert caught.value.message == f"mailbox `box`: {message}"


def test_kernels_without_a_mailbox_are_left_alone():
    def kernel(z, x):
        z.store(x.load_like(z))

    assert "steering" not in build(kernel).facts


STEERING = [
    (rounds_in_a_loop, {"n"}),
    (whole_rounds_under_an_equal_condition, {"n", "x"}),
    (two_mailboxes_interleaved, set()),
    (equal_return_before_a_round, {"n"}),
    (loop_left_by_an_equal_break, {"n"}),
    (persistent_tiles, {"zp"}),
    (puts_that_depend_on_the_rank, set()),
]


@pytest.mark.parametrize(("kernel", "expected"), STEERING, ids=[s[0].__name__ for s in STEERING])
def test_parameters_that_steer_the_rounds_are_found(kernel, expected):
    assert build(kernel).facts["steering"] == expected
