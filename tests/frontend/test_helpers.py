"""Helper functions: inlined where they are called, with their own names, returns and places."""

from tests.frontend.helpers import build, error, names, refuses, value_of

import peertile.language as T
from peertile.ir import ops
from peertile.ir.core import walk


def double(v):
    return v * 2


def bump(v, by=1, *, scale=1):
    return (v + by) * scale


def sign(v):
    if v > 0:
        return 1
    if v < 0:
        return -1
    return 0


def find(limit, square):
    for k in T.range(100):
        if k * k >= square:
            return k
        if k == limit:
            return -1
    return -2


def find_nested(n):
    for i in T.range(10):
        for j in T.range(10):
            if i * j == n:
                return i, j
    return 0, 0


def collatz(n):
    v = n
    steps = 0
    while True:
        if v == 1:
            return steps
        if v % 2 == 0:
            v = v // 2
        else:
            v = 3 * v + 1
        steps += 1


def store_if(out, v, flag):
    if flag:
        out.store(v)
        return
    out.store(-v)


def sometimes(v):
    if v > 0:
        return v


def mixed(v):
    if v > 0:
        return T.f32(1)
    return T.f64(1)


def forever(v):
    while True:
        pass


def calls_itself(v):
    return calls_itself(v)


def ping(v):
    return pong(v)


def pong(v):
    return ping(v)


def star(*values):
    return values


def broken(v):
    return v + missing  # noqa: F821


def outer(v):
    return broken(v)


def constant_switch(v, mode):
    if mode == "double":
        return v * 2
    elif mode == "square":
        return v * v
    return v


def first_below(n):
    for k in T.static_range(4):
        if k >= n:
            return k
    return 9


def test_a_helper_is_inlined():
    def kernel(out, n):
        out.store(double(double(n)))

    assert value_of(kernel, 3) == 12


def test_defaults_and_keywords_bind_as_in_python():
    def kernel(out, n):
        out.store(bump(n) * 10000 + bump(n, 2) * 100 + bump(v=n, scale=3))

    assert value_of(kernel, 1) == 2 * 10000 + 3 * 100 + 6


def test_early_returns_of_a_helper():
    def kernel(out, n):
        out.store(sign(n) + n * 0)

    assert [value_of(kernel, n) for n in (5, -5, 0)] == [1, -1, 0]


def test_early_returns_become_a_loop_of_one_trip():
    def kernel(out, n):
        out.store(sign(n) + n)

    assert names(build(kernel, out=build_types())).count("loop") == 1


def build_types():
    from tests.frontend.helpers import own

    return own(T.i64, (1,))


def test_return_from_a_loop_of_a_helper():
    def kernel(out, n, k):
        out.store(find(k, n))

    assert [value_of(kernel, *a) for a in ((10, 50), (1000, 3), (999999, 1000))] == [4, -1, -2]


def test_return_of_a_tuple_from_nested_loops():
    def kernel(out, n):
        i, j = find_nested(n)
        out.store(i * 10 + j)

    assert [value_of(kernel, n) for n in (35, 97)] == [57, 0]


def test_return_from_an_endless_loop():
    def kernel(out, n):
        out.store(collatz(n))

    assert [value_of(kernel, n) for n in (1, 27)] == [0, 111]


def test_a_helper_may_return_nothing_early():
    def kernel(out, n):
        store_if(out, n, n > 3)

    assert [value_of(kernel, n) for n in (3, 4)] == [-3, 4]


def test_constants_choose_a_return_while_compiling():
    def kernel(out, n):
        out.store(constant_switch(n, "square") + constant_switch(n, "none"))

    assert value_of(kernel, 5) == 30
    kernel_ir = build(kernel, out=build_types())
    assert "loop" not in names(kernel_ir)
    assert "if" not in names(kernel_ir)


def test_return_from_an_unrolled_loop_under_a_run_time_condition():
    def kernel(out, n):
        out.store(first_below(n))

    assert [value_of(kernel, n) for n in (0, 2, 7)] == [0, 2, 9]


def test_a_helper_is_inlined_inside_a_loop_of_the_caller():
    def kernel(out, n):
        total = 0
        for k in T.range(n):
            total += sign(k - 2) + 1
        out.store(total)

    assert value_of(kernel, 6) == 0 + 0 + 1 + 2 + 2 + 2


def test_ops_of_a_helper_know_where_they_were_inlined():
    def kernel(z, n):
        z.store(double(n).astype(T.f32))

    op = next(op for op in walk(build(kernel).body) if isinstance(op, ops.BinaryOp))
    assert (op.loc.function, op.loc.inlined_at.function) == ("double", "kernel")
    assert op.loc.user.line == kernel.__code__.co_firstlineno + 1


def test_an_error_in_a_helper_shows_the_calls():
    def kernel(z, n):
        z.store(outer(n))

    file, start = __file__, kernel.__code__.co_firstlineno
    assert str(error(kernel)) == "\n".join(
        [
            "`missing` is not defined",
            f"  {file}:{broken.__code__.co_firstlineno + 1} in broken",
            "    return v + missing  # noqa: F821",
            "               ^^^^^^^",
            "  called from",
            f"  {file}:{outer.__code__.co_firstlineno + 1} in outer",
            "    return broken(v)",
            "           ^^^^^^^^^",
            "  called from",
            f"  {file}:{start + 1} in kernel",
            "    z.store(outer(n))",
            "            ^^^^^^^^",
        ]
    )


def test_a_value_on_some_paths_only_is_refused():
    def kernel(z, n):
        z.store(sometimes(n))

    refuses(
        kernel,
        "`sometimes` returns a value on some paths only; return one on every path, the end included",
        "sometimes(n)",
    )


def test_results_of_two_types_are_refused():
    def kernel(z, n):
        z.store(mixed(n))

    line = mixed.__code__.co_firstlineno
    message = (
        f"`mixed`: Type of the helper's result depends on path taken: f32 (line {line + 2}) vs. f64 (line {line + 3}); "
        "convert it with .astype(...) on each path"
    )
    refuses(kernel, message, "mixed(n)")


def test_a_helper_that_never_returns_is_refused():
    def kernel(z, n):
        forever(n)
        z.store(0.0)

    refuses(kernel, "`forever` never returns: every path of it loops for ever", "forever(n)")


def test_recursion_is_refused():
    def kernel(z, n):
        z.store(calls_itself(n))

    message = "`calls_itself` calls itself: recursion is not supported in kernels; write a loop"
    refuses(kernel, message, "calls_itself(v)")


def test_mutual_recursion_is_refused():
    def kernel(z, n):
        z.store(ping(n))

    refuses(kernel, "`ping` calls itself: recursion is not supported in kernels; write a loop", "ping(v)")


def test_star_parameters_of_a_helper_are_refused():
    def kernel(z, n):
        z.store(star(n))

    refuses(kernel, "`star`: a helper takes named parameters only, got *args or **kwargs", "star(n)")


def test_wrong_arguments_of_a_helper_are_refused():
    def missing(z, n):
        z.store(double())

    def extra(z, n):
        z.store(double(n, n))

    def unknown(z, n):
        z.store(double(n, w=n))

    def twice(z, n):
        z.store(double(n, v=n))

    refuses(missing, "`double`: missing argument `v`; expected v", "double()")
    refuses(extra, "`double`: expected at most 1 positional arguments (v), got 2", "double(n, n)")
    refuses(unknown, "`double`: expected v, got the keyword `w`", "double(n, w=n)")
    refuses(twice, "`double`: `v` is given twice, by position and by name", "double(n, v=n)")


def test_a_lambda_is_refused():
    square = lambda v: v * v  # noqa: E731

    def kernel(z, n):
        z.store(square(n))

    refuses(kernel, "lambda: expected a function written with def; give it a name", "square(n)")


def test_a_generator_is_refused():
    def numbers():
        yield 1

    def kernel(z, n):
        z.store(numbers())

    message = (
        "`numbers`: expected a plain function, got a generator or a coroutine; a kernel and its helpers neither yield "
        "nor await"
    )
    refuses(kernel, message, "numbers()")


def test_helper_variables_do_not_leak():
    def kernel(z, n):
        collatz(n)
        z.store(steps)  # noqa: F821

    refuses(kernel, "`steps` is not defined", "steps")


def never_reached(n):
    for k in T.range(4):
        for j in T.static_range(0):
            return j
        if k == n:
            break
    while n > 3:
        n = n - 1
        for j in T.static_range(0):
            return j
    if n == 2:
        return 7
    return n


def test_a_return_that_no_path_reaches_is_left_out():
    def kernel(out, n):
        out.store(never_reached(n))

    assert [value_of(kernel, n) for n in (1, 2, 9)] == [1, 7, 3]
