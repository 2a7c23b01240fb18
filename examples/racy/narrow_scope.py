"""The reader polls with device scope a flag that another rank writes: the scope does not include the writer."""

import numpy as np

import peertile as pt
import peertile.language as T

CHECK = {"ranks": 2}


@pt.kernel(unsafe=True)
def send(x: T.Pointer, flag: T.Pointer, N: T.Const[int]):
    i = T.iota(N)
    token = T.unsafe.store_ptr(T.unsafe.unicast(x) + i, i.astype(T.f32), order=T.weak)
    T.unsafe.store_ptr(T.unsafe.unicast(flag), T.u64(1), order=T.release, scope=T.system, token=token)


@pt.kernel(unsafe=True)
def receive(x: T.Pointer, flag: T.Pointer, out: T.Pointer, N: T.Const[int], LIMIT: T.Const[int] = 1 << 20):
    i = T.iota(N)
    token, got = T.unsafe.token(), T.u64(0)
    for _ in T.range(LIMIT):
        got, token = T.unsafe.load_ptr(flag, order=T.acquire, scope=T.device, token=token)
        if got == 1:
            break
    value, token = T.unsafe.load_ptr(x + i, order=T.weak, token=token)
    T.unsafe.store_ptr(out + i, value, order=T.weak, token=token)


@pt.program
def main(group):
    with pt.SymmetricHeap(group, size_bytes=1 << 16) as heap:
        x, flag, out = heap.zeros((64,), pt.f32), heap.zeros((1,), pt.u64), pt.zeros((64,), pt.f32)
        if group.rank == 0:
            send.grid(1)(x.at(1).pointer(), flag.at(1).pointer(), N=64).sync()
        else:
            receive.grid(1)(x.local.pointer(), flag.local.pointer(), out.pointer(), N=64).sync()
            print(float(np.sum(out.numpy())))


if __name__ == "__main__":
    pt.run(main)
