"""Control flow, compiled and then run by the evaluator: it must do what the same Python function does."""

import pytest
from tests.frontend.helpers import build, names, only, refuses, value_of

import peertile.language as T
from peertile.dtypes import f32, f64, i32, i64, u32
from peertile.ir import ops
from peertile.ir.types import TileType

FLAG = True


def test_if_joins_the_values_of_both_arms():
    def kernel(out, n):
        if n > 3:
            v = n * 2
        else:
            v = n - 1
        out.store(v)

    assert [value_of(kernel, n) for n in (3, 4)] == [2, 8]


def test_an_arm_may_leave_a_variable_as_it_was():
    def kernel(out, n):
        v = n
        if n > 3:
            v = n * 2
        out.store(v)

    assert [value_of(kernel, n) for n in (3, 4)] == [3, 8]


def test_elif_chains():
    def kernel(out, n):
        if n == 0:
            v = 10
        elif n == 1:
            v = 20
        else:
            v = 30
        out.store(v)

    assert [value_of(kernel, n) for n in (0, 1, 2)] == [10, 20, 30]


def test_two_python_numbers_chosen_at_run_time_become_a_tile():
    def kernel(out, n):
        if n > 0:
            v = 1
        else:
            v = 2
        out.store(v + n)

    assert [value_of(kernel, n) for n in (5, -5)] == [6, -3]


def test_a_constant_condition_compiles_one_branch_only():
    def kernel(z, x):
        if FLAG:
            z.store(x.load_like(z))
        else:
            z.store(nonsense)  # noqa: F821

    assert names(build(kernel)) == ["program_id", "tile_index", "load", "store", "return"]


def test_conditional_expression_at_run_time_evaluates_one_side():
    def kernel(out, n):
        out.store(n // 2 if n % 2 == 0 else 3 * n + 1)

    assert [value_of(kernel, n) for n in (6, 7)] == [3, 22]


def test_conditional_expression_of_a_constant_takes_one_side():
    def kernel(z, x):
        z.store(x.load_like(z) if FLAG else nonsense)  # noqa: F821

    assert "if" not in names(build(kernel))


def test_a_conditional_expression_gives_a_tuple():
    def kernel(out, n):
        a, b = (n, 1) if n > 2 else (2, n)
        out.store(10 * a + b)

    assert [value_of(kernel, n) for n in (5, 1)] == [51, 21]


def test_a_loop_carries_what_its_body_assigns():
    def kernel(out, n):
        total = 0
        for k in T.range(n):
            total += k
        out.store(total)

    assert [value_of(kernel, n) for n in (0, 1, 5)] == [0, 0, 10]


def test_a_loop_counts_from_lo_by_step():
    def kernel(out, n):
        total = 0
        for k in T.range(1, n, 3):
            total = total * 10 + k
        out.store(total)

    assert value_of(kernel, 10) == 147


def test_break_and_continue_carry_values_out():
    def kernel(out, n):
        total = 0
        for k in T.range(100):
            if k == n:
                break
            if k % 2 == 0:
                continue
            total += k
        out.store(total)

    assert [value_of(kernel, n) for n in (0, 6)] == [0, 9]


def test_while_runs_until_its_condition_fails():
    def kernel(out, n):
        steps = 0
        v = n
        while v != 1:
            if v % 2 == 0:
                v = v // 2
            else:
                v = 3 * v + 1
            steps += 1
        out.store(steps)

    assert [value_of(kernel, n) for n in (1, 6, 27)] == [0, 8, 111]


def test_while_true_leaves_by_break_with_what_it_assigned():
    def kernel(out, n):
        k = 0
        while True:
            square = k * k
            if square >= n:
                break
            k += 1
        out.store(square)

    assert [value_of(kernel, n) for n in (0, 10)] == [0, 16]


def test_while_continue():
    def kernel(out, n):
        k = 0
        total = 0
        while k < n:
            k += 1
            if k % 3 == 0:
                continue
            total += k
        out.store(total)

    assert value_of(kernel, 7) == 1 + 2 + 4 + 5 + 7


def test_nested_loops_with_break_in_the_inner_one():
    def kernel(out, n):
        total = 0
        for i in T.range(n):
            for j in T.range(n):
                if j > i:
                    break
                total += 1
        out.store(total)

    assert value_of(kernel, 4) == 10


def test_break_in_both_arms_ends_the_trip():
    def kernel(out, n):
        v = 0
        for k in T.range(10):
            v = k
            if n > 0:
                break
            else:
                v = v + 100
                break
        out.store(v)

    assert [value_of(kernel, n) for n in (1, -1)] == [0, 100]


def test_early_return_ends_the_program():
    def kernel(out, n):
        out.store(1)
        if n > 3:
            return
        out.store(2)

    assert [value_of(kernel, n) for n in (3, 4)] == [2, 1]


def test_return_from_inside_a_loop_ends_the_program():
    def kernel(out, n):
        for k in T.range(10):
            out.store(k)
            if k == n:
                return
        out.store(-1)

    assert [value_of(kernel, n) for n in (4, 20)] == [4, -1]


def test_both_arms_may_return():
    def kernel(out, n):
        if n > 3:
            out.store(1)
            return
        else:
            out.store(2)
            return

    assert [value_of(kernel, n) for n in (3, 4)] == [2, 1]


def test_what_follows_a_return_is_not_compiled():
    def kernel(z):
        return
        nonsense()  # noqa: F821

    assert names(build(kernel)) == ["return"]


def test_static_range_is_unrolled_with_constants():
    def kernel(out, n):
        total = 0
        for k in T.static_range(3):
            total = total * 10 + k * n
        out.store(total)

    assert value_of(kernel, 2) == 24


def test_python_range_of_constants_is_unrolled():
    def kernel(z, x):
        acc = T.zeros(z.tile_shape)
        for k in range(0, 6, 2):
            acc += x.load((k,), (64,))
        z.store(acc)

    kernel = build(kernel)
    assert "for" not in names(kernel)
    assert names(kernel).count("load") == 3


def test_a_tuple_is_unrolled():
    def kernel(out, n):
        total = 0
        for a, b in ((1, 2), (3, 4)):
            total += a * b * n
        out.store(total)

    assert value_of(kernel, 10) == 140


def test_break_and_continue_of_an_unrolled_loop_are_decided_at_compile_time():
    def kernel(out, n):
        total = n
        for k in T.static_range(10):
            if k == 1:
                continue
            if k == 4:
                break
            total = total * 10 + k
        out.store(total)

    assert value_of(kernel, 0) == 23


def test_short_circuit_of_pure_conditions_needs_no_branch():
    def kernel(z, x, n):
        if (n > 0 and n < 10) or n == 77:
            z.store(x.load_like(z))

    assert names(build(kernel)).count("if") == 1


def test_short_circuit_does_not_evaluate_what_it_skips():
    def kernel(out, n):
        hit = 0
        if n < 2 and T.all(out.load()[None, :].reshape(1).astype(T.i64).bitcast(T.u64) >= 0):
            hit = 1
        out.store(hit)

    assert [value_of(kernel, n) for n in (1, 2)] == [1, 0]


def test_a_load_in_the_right_side_of_and_is_inside_a_branch():
    def kernel(z, words, n):
        if n > 0 and T.ld(words) > 0:
            z.store(1.0)

    text = names(build(kernel))
    assert text.count("if") == 2
    assert text.index("if") < text.index("word_load")


def test_constants_short_circuit_as_in_python():
    def kernel(z, x, n):
        if FLAG or nonsense:  # noqa: F821
            z.store(x.load_like(z))
        if not FLAG and nonsense:  # noqa: F821
            z.store(0.0)

    assert names(build(kernel)).count("store") == 1


def test_chained_comparison():
    def kernel(out, n):
        out.store(1 if 2 < n <= 5 else 0)

    assert [value_of(kernel, n) for n in (2, 3, 5, 6)] == [0, 1, 1, 0]


def test_not_of_a_run_time_condition():
    def kernel(out, n):
        out.store(1 if not n > 2 else 0)

    assert [value_of(kernel, n) for n in (2, 3)] == [1, 0]


# ---------------------------------------------------------------- types of what a loop carries


def carried_type(fn, **given):
    loop = next(op for op in only(build(fn, **given), ops.For).results)
    return loop.type


def test_an_int_before_a_loop_takes_the_type_of_the_body():
    def kernel(z, xu):
        best = 0
        for k in T.range(4):
            best = T.maximum(best, T.max(xu.load((k,), (64,))))
        z.store(best.astype(T.f32))

    from tests.frontend.helpers import shared

    assert carried_type(kernel, xu=shared(u32)) == TileType(u32)


def test_a_float_before_a_loop_takes_the_shape_of_the_body():
    def kernel(z, x):
        acc = 0.0
        for k in T.range(4):
            acc += x.load((k,), (64,))
        z.store(acc)

    assert carried_type(kernel) == TileType(f32, (64,))


def test_an_int_becomes_a_float_where_the_body_says_so():
    def kernel(z, n):
        acc = 0
        for _ in T.range(n):
            acc = acc + 0.5
        z.store(acc)

    assert carried_type(kernel) == TileType(f32)


def test_a_number_alone_is_i64_in_a_loop():
    def kernel(z, n):
        count = 0
        for _ in T.range(n):
            count += 1
        z.store(count.astype(T.f32))

    assert carried_type(kernel) == TileType(i64)


def test_types_of_nested_loops_are_found_together():
    def kernel(z, xd):
        acc = 0
        for i in T.range(3):
            row = 0
            for j in T.range(3):
                row += T.sum(xd.load((i + j,), (64,)))
            acc += row
        z.store(acc.astype(T.f32))

    from tests.frontend.helpers import all_of, shared

    loops = all_of(build(kernel, xd=shared(f64)), ops.For)
    assert [loop.results[0].type for loop in loops] == [TileType(f64), TileType(f64)]


def test_a_typed_scalar_keeps_its_type_in_a_loop():
    def kernel(z, n):
        got = T.u32(0)
        for _ in T.range(n):
            got = got + 1
        z.store(got.astype(T.f32))

    assert carried_type(kernel) == TileType(u32)


def test_a_tuple_is_carried_by_its_parts():
    def kernel(out, n):
        pair = (0, 1)
        for _ in T.range(n):
            a, b = pair
            pair = (b, a + b)
        out.store(pair[0])

    assert value_of(kernel, 10) == 55


def test_a_view_that_the_body_does_not_change_is_not_carried():
    def kernel(z, p):
        view = p.local
        for k in T.range(4):
            z.store(view.load((k,), (64,)))

    assert only(build(kernel), ops.For).results == []


def test_loop_variable_takes_the_type_of_its_bounds():
    def kernel(z, n):
        for k in T.range(n):
            z.store(k.astype(T.f32))

    loop = only(build(kernel, n=TileType(i32)), ops.For)
    assert loop.blocks[0].args[0].type == TileType(i32)


def test_a_name_may_be_reused_with_another_type_when_nobody_reads_across():
    def kernel(z, x, n):
        t = x.load((0,), (32,))
        for k in T.range(n):
            t = x.load((k,), (64,))
            z.store(t)

    assert only(build(kernel), ops.For).results == []


# ---------------------------------------------------------------- what is refused


def test_types_that_depend_on_the_path_are_refused_where_read():
    def kernel(z, x, n):
        if n > 0:
            v = T.f32(1)
        else:
            v = T.f64(1)
        z.store(v)

    line = kernel.__code__.co_firstlineno
    message = f"Type of `v` depends on path taken: f32 (line {line + 2}) vs. f64 (line {line + 4})"
    refuses(kernel, message, "v")


def test_a_variable_of_one_path_is_refused_where_read():
    def kernel(z, n):
        if n > 0:
            v = T.f32(1)
        z.store(v)

    line = kernel.__code__.co_firstlineno
    refuses(kernel, f"`v` has a value on some paths only (line {line + 2}); assign it on every path", "v")


def test_a_variable_of_the_body_is_refused_behind_the_loop():
    def kernel(z, n):
        for k in T.range(n):
            v = k
        z.store(v)

    line = kernel.__code__.co_firstlineno + 2
    message = f"`v` is assigned only inside the loop at line {line}, which may run no times; assign it before the loop"
    refuses(kernel, message, "v")


def test_the_variable_of_a_loop_is_refused_behind_it():
    def kernel(z, n):
        for k in T.range(n):
            z.store(k.astype(T.f32))
        z.store(k)

    message = (
        "`k` is the variable of a loop that has ended; assign it to another name inside the loop, with a value before"
    )
    refuses(kernel, message, "k")


def test_a_carried_type_that_changes_is_refused_where_read():
    def kernel(z, x, n):
        t = x.load((0,), (32,))
        for _ in T.range(n):
            z.store(T.sum(t))
            t = x.load((0,), (64,))

    line = kernel.__code__.co_firstlineno
    message = f"Type of `t` depends on path taken: f32[32] (line {line + 1}) vs. f32[64] (line {line + 4})"
    refuses(kernel, message, "t")


def test_a_view_cannot_be_chosen_at_run_time():
    def kernel(z, p, n):
        view = p.local
        if n > 0:
            view = p.at(0)
        z.store(view.load((0,), (64,)))

    message = (
        "`view` is a rank's part of `p` made on one path and another on the other; "
        "only tiles and numbers can be chosen at run time: choose the index or the rank instead"
    )
    refuses(kernel, message, "view")


def test_a_conditional_expression_of_two_types_is_refused():
    def kernel(z, n):
        z.store(T.f32(1) if n > 0 else T.f64(1))

    refuses(
        kernel,
        "Type of the conditional expression depends on path taken: f32 vs. f64; convert one side with .astype(...)",
        "T.f32(1) if n > 0 else T.f64(1)",
    )


def test_a_tile_is_no_condition():
    def kernel(z, x):
        t = x.load_like(z)
        if t > 0:
            z.store(t)

    message = (
        "condition: expected a bool scalar, got a tile bool[64]; choose per element with T.where, "
        "or reduce with T.any or T.all"
    )
    refuses(kernel, message, "t > 0")


def test_a_number_is_no_condition():
    def kernel(z, n):
        while n:
            pass

    refuses(kernel, "condition: expected a bool scalar, got i64; compare it, as in `x != 0`", "n")


def test_not_of_a_tile_is_refused():
    def kernel(z, x):
        z.store(T.where(not (x.load_like(z) > 0), 1.0, 0.0))

    refuses(kernel, "`not`: expected a bool scalar, got a tile bool[64]; use ~ for each element")


@pytest.mark.feature("K7", "cpu")
@pytest.mark.parametrize("n", range(-1, 7))
def test_an_unrolled_loop_is_left_under_run_time_conditions(n):
    def kernel(out, n):
        total, last = 0, -1
        for k in T.static_range(5):
            if n == k + 1:
                continue
            if n == k:
                total += 100
                break
            for j in T.static_range(3):
                if j == 1 and n > 2:
                    break
                total += 1
            total += 10
            last = k
        out.store(T.full((1,), total * 10 + last))

    total, last = 0, -1
    for k in range(5):
        if n == k + 1:
            continue
        if n == k:
            total += 100
            break
        total += (1 if n > 2 else 3) + 10
        last = k
    assert value_of(kernel, n) == total * 10 + last


def first_at_least(n, *, limits):
    for limit in limits:
        if limit >= n:
            return limit
    return -1


@pytest.mark.parametrize("n", [0, 3, 4, 9, 10])
def test_a_helper_returns_from_an_unrolled_loop(n):
    def kernel(out, n):
        out.store(T.full((1,), first_at_least(n, limits=(3, 5, 9))))

    assert value_of(kernel, n) == next((x for x in (3, 5, 9) if x >= n), -1)


def test_a_kernel_returns_from_an_unrolled_loop_and_carries_tiles():
    def kernel(out, n):
        t = T.zeros((1,), T.i64)
        for k in T.static_range(4):
            if n == k:
                continue
            t = t + (1 << k)
            if n + 10 == k:
                out.store(t * 0 - 1)
                return
        out.store(t)

    assert [value_of(kernel, n) for n in (0, 3, 9, -8)] == [14, 7, 15, -1]


def test_ways_out_of_an_unrolled_loop_have_a_limit():
    def kernel(z, n):
        for k in T.static_range(65):
            if n > k:
                break

    message = "unrolled loop left under a run-time condition: expected at most 64 trips, got 65; use T.range"
    refuses(kernel, message)


def test_unrolling_has_a_limit():
    def kernel(z):
        for _ in T.static_range(100000):
            pass

    refuses(kernel, "unrolled loop: expected at most 1024 trips, got more; use T.range", "T.static_range(100000)")


def test_a_step_is_not_0():
    def kernel(z, n):
        for _ in T.range(0, n, 0):
            pass

    refuses(kernel, "T.range: step: expected an integer other than 0, got 0", "T.range(0, n, 0)")


@pytest.mark.feature("K7", "cpu")
@pytest.mark.parametrize("bounds", [(7, -1), (7, 0), (0, 7), (3, 3), (-(2**63) + 5, -(2**63)), (2**63 - 1, 2**63 - 9)])
@pytest.mark.parametrize("step", [-1, -2, -3])
def test_a_negative_step_counts_down(bounds, step):
    def kernel(out, lo, hi):
        count, code = 0, 0
        for k in T.range(lo, hi, step):
            count += 1
            code = code * 31 + k
        out.store(T.full((1,), code * 100 + count))

    code = 0
    trips = range(*bounds, step)
    for k in trips:
        code = code * 31 + k
    want = (code * 100 + len(trips)) % 2**64
    assert value_of(kernel, *bounds) == want - (2**64 if want >> 63 else 0)


def test_counting_down_takes_unsigned_numbers():
    def kernel(out, n):
        total = T.u8(0)
        for k in T.range(n.astype(T.u8), T.u8(0), -1):
            total = total * 3 + k
        out.store(T.full((1,), total.astype(T.i64)))

    total = 0
    for k in range(5, 0, -1):
        total = (total * 3 + k) % 256
    assert value_of(kernel, 5) == total


@pytest.mark.feature("K7", "cpu")
def test_a_loop_carries_tuples():
    def kernel(out, n):
        pair, count = (T.zeros((1,), T.i64), (1, 2)), 0
        for k in T.range(n):
            tile, (a, c) = pair
            pair = (tile + a, (c, a + c))
            count = count + k
        out.store(pair[0] * 1000 + pair[1][0] * 10 + count)

    tile, a, c = 0, 1, 2
    for _ in range(6):
        tile, a, c = tile + a, c, a + c
    assert value_of(kernel, 6) == tile * 1000 + a * 10 + 15


def test_a_run_time_step_is_checked():
    def kernel(z, n, k):
        for _ in T.range(0, 10, n):
            pass

    check = only(build(kernel), ops.Check)
    assert check.message == "T.range: a run-time step must be positive"


def test_a_step_of_counts_needs_no_check():
    def kernel(z, p):
        for _ in T.range(0, 10, T.num_programs(0) * p.num_ranks * 2):
            pass

    assert "check" not in names(build(kernel))


def test_for_needs_an_iterable():
    def kernel(z, n):
        for _ in n:
            pass

    message = (
        "for: expected T.range, T.static_range, range, z.tiles(), box.collect(), T.ranks(), T.peers() or a tuple, "
        "got i64; use T.range(n)"
    )
    refuses(kernel, message, "n")
