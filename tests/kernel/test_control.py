"""Control flow in native code: the same trips and values as by the meaning and as in Python."""

import numpy as np
import pytest
from tests.frontend.helpers import refuses
from tests.kernel.values import Faulted, run_both

import peertile.language as T

pytestmark = pytest.mark.any_device


def gcd(a, b):
    while b != 0:
        a, b = b, a % b
    return a


def collatz(n, limit):
    for k in T.range(limit):
        if n == 1:
            return k
        n = T.where(n % 2 == 0, n // 2, 3 * n + 1)
    return limit


def flow(out, n, m, LIMIT):
    total, pair = n * 0, (n, T.zeros((4,), T.i64))
    for k in T.range(n):
        if k == 2:
            continue
        if k > LIMIT:
            break
        total += k
        pair = (pair[0] + k, pair[1] + T.iota(4) * k)
    for k in T.range(n, -1, -2):
        total = total * 3 + k
    for k in T.static_range(4):
        if m == k:
            continue
        if total % 7 == 5:
            break
        total += k * 10
    i = 0
    while i < m and total < 10_000:
        i += 1
        total += i * i
        if total % 11 == 0:
            break
    else_ = T.where(m > 3, 1, 2) if n > 2 else m + 100
    if n == 5:
        out.store(T.full((4,), -1, T.i64))
        return
    elif (n == 6 and m == 1) or n == 7:
        total = -total
    else:
        total += gcd(n + 12, m + 18) * 1000 + collatz(m + 1, 50)
    out.store(pair[1] + T.full((4,), total + else_ + pair[0]))


def python_flow(n, m, limit):
    total, first, tile = 0, n, np.zeros(4, np.int64)
    for k in range(n):
        if k == 2:
            continue
        if k > limit:
            break
        total += k
        first, tile = first + k, tile + np.arange(4) * k
    for k in range(n, -1, -2):
        total = total * 3 + k
    for k in range(4):
        if m == k:
            continue
        if total % 7 == 5:
            break
        total += k * 10
    i = 0
    while i < m and total < 10_000:
        i += 1
        total += i * i
        if total % 11 == 0:
            break
    else_ = (1 if m > 3 else 2) if n > 2 else m + 100
    if n == 5:
        return np.full(4, -1)
    if (n == 6 and m == 1) or n == 7:
        total = -total
    else:
        total += int(np.gcd(n + 12, m + 18)) * 1000
        v, steps = m + 1, 0
        while v != 1 and steps < 50:
            v, steps = (v // 2 if v % 2 == 0 else 3 * v + 1), steps + 1
        total += steps
    return tile + total + else_ + first


@pytest.mark.feature("K7", "cpu")
@pytest.mark.parametrize("n", range(9))
def test_control_flow_is_that_of_python(n):
    for m in range(0, 9, 2 if n % 2 else 1):
        (out,) = run_both(flow, np.zeros(4, np.int64), n, m, LIMIT=4)
        assert out.tolist() == python_flow(n, m, 4).tolist(), m


@pytest.mark.feature("K7", "cpu")
def test_a_run_time_step_that_is_not_positive_is_a_fault():
    def kernel(out, n):
        total = n * 0
        for k in T.range(0, 10, n):
            total += k
        out.store(T.full((1,), total))

    (out,) = run_both(kernel, np.zeros(1, np.int64), 3)
    assert out[0] == 18
    for step in (0, -1):
        with pytest.raises(Faulted, match=r"^T\.range: a run-time step must be positive$"):
            run_both(kernel, np.zeros(1, np.int64), step)


@pytest.mark.feature("K7", "cpu")
def test_asserts_are_told_apart_and_an_else_of_a_loop_is_refused():
    def static(x, N):
        T.static_assert(N % 16 == 0, "N must be a multiple of 16")

    def python(x, n):
        assert n > 0

    def run_time(x, n):
        T.static_assert(n > 0)

    def with_else(x, n):
        while n > 0:
            n -= 1
        else:
            n = 3

    refuses(static, "T.static_assert: N must be a multiple of 16", constants={"N": 17})
    refuses(
        python,
        "unsupported in a kernel: assert; use T.assert_ at run time, or T.static_assert at compile time",
    )
    refuses(with_else, "unsupported in a kernel: else of a loop; keep a flag and test it behind the loop")
    refuses(run_time, "T.static_assert: expected a compile-time condition, got bool; use T.assert_")


@pytest.mark.feature("K9", "cpu")
@pytest.mark.feature("H18", "cpu")
def test_an_assertion_that_fails_is_a_fault():
    def kernel(x, n):
        T.assert_(n > 3, "n is more than 3")
        x.store(x.load() + 1)

    assert run_both(kernel, np.zeros(4, np.int64), 4)[0].tolist() == [1] * 4
    with pytest.raises(Faulted, match=r"^n is more than 3$"):
        run_both(kernel, np.zeros(4, np.int64), 3)
    assert run_both(kernel, np.zeros(4, np.int64), 5)[0].tolist() == [1] * 4  # the device works on
