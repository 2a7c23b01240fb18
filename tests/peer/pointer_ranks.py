"""Kernels and rank functions of the tests of raw pointers. No pytest here."""

import numpy as np

import peertile as pt
import peertile.language as T
from peertile.meaning.numbers import apply_rmw
from peertile.memory_model import Order, Rmw, Scope


@pt.kernel(unsafe=True)
def touch(p: T.Pointer, out: T.Pointer, n: T.i64, KIND: T.Const, ORDER: T.Const, SCOPE: T.Const):
    """old = rmw(p[i], i) under a mask, and the old values to `out`."""
    i = T.iota(64)
    token = T.unsafe.token()
    value = i.astype(p.dtype)
    old, token = T.unsafe.atomic_rmw(p + i, KIND, value, order=ORDER, scope=SCOPE, mask=i < n, token=token)
    T.unsafe.store_ptr(out + i, old, order=T.weak, mask=i < n, token=token)


@pt.kernel(unsafe=True)
def swap(p: T.Pointer, out: T.Pointer, ORDER: T.Const, SCOPE: T.Const):
    i = T.iota(16)
    old, token = T.unsafe.atomic_cas(p + i, T.full((16,), 3, p.dtype), i.astype(p.dtype), order=ORDER, scope=SCOPE)
    T.unsafe.store_ptr(out + i, old, order=T.weak, token=token)


@pt.kernel(unsafe=True)
def relay(p: T.Pointer, out: T.Pointer, LOAD: T.Const, STORE: T.Const, SCOPE: T.Const):
    """Loads and stores of every order."""
    i = T.iota(16)
    a = T.unsafe.token()
    if LOAD is T.weak:
        value, a = T.unsafe.load_ptr(p + i, order=LOAD, token=a, mask=i < 10, fill=7)
    else:
        value, a = T.unsafe.load_ptr(p + i, order=LOAD, scope=SCOPE, token=a, mask=i < 10, fill=7)
    b = T.unsafe.join_tokens(a, T.unsafe.token())
    if STORE is T.weak:
        T.unsafe.store_ptr(out + i, value, order=STORE, token=b)
    else:
        T.unsafe.store_ptr(out + i, value, order=STORE, scope=SCOPE, token=b)


def atomics(dtypes):
    """Every kind, order and scope of a pointer atomic, for every dtype that has it."""
    count = 0
    for name in dtypes:
        dtype = getattr(pt, name)
        kinds = [Rmw.ADDF, Rmw.MIN, Rmw.MAX, Rmw.XCHG] if dtype.is_float else [k for k in Rmw if k is not Rmw.ADDF]
        orders = [(o, s) for o in (Order.RELAXED, Order.ACQUIRE, Order.RELEASE, Order.ACQ_REL) for s in Scope]
        for k, kind in enumerate(kinds):
            # Every (order, scope) pair is met over the kinds of a dtype.
            for order, scope in orders[k :: len(kinds)] or orders[:1]:
                start = np.random.default_rng(3).integers(0, 100, 64).astype(np.float32).astype(dtype.numpy)
                p, out = pt.asarray(start, dtype), pt.zeros((64,), dtype)
                touch.grid(1)(p.pointer(), out.pointer(), 50, KIND=kind, ORDER=order, SCOPE=scope).sync()
                expected = start.copy()
                expected[:50] = apply_rmw(kind, start, np.arange(64).astype(dtype.numpy), dtype)[:50]
                np.testing.assert_array_equal(p.numpy(), expected, err_msg=f"{name} {kind} {order} {scope}")
                np.testing.assert_array_equal(out.numpy()[:50], start[:50])
                assert not out.numpy()[50:].any()
                count += 1
    return count


def swaps(name, order, scope):
    dtype = getattr(pt, name)
    start = (np.arange(16) % 5).astype(dtype.numpy)
    p, out = pt.asarray(start, dtype), pt.zeros((16,), dtype)
    swap.grid(1)(p.pointer(), out.pointer(), ORDER=order, SCOPE=scope).sync()
    np.testing.assert_array_equal(out.numpy(), start)
    np.testing.assert_array_equal(p.numpy(), np.where(start == 3, np.arange(16).astype(dtype.numpy), start))


def relays(load, store, scope):
    p, out = pt.asarray(np.arange(16, dtype=np.int32)), pt.zeros((16,), pt.i32)
    relay.grid(1)(p.pointer(), out.pointer(), LOAD=load, STORE=store, SCOPE=scope).sync()
    np.testing.assert_array_equal(out.numpy(), [*range(10), *[7] * 6])
