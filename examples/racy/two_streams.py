"""Two launches that use one signal on two streams: their epochs would mix, so the second launch is refused."""

import peertile as pt
import peertile.language as T

CHECK = {"ranks": 2}


@pt.kernel
def meet(ready: T.Signal):
    ready.notify()
    ready.wait()


@pt.program
def main(group):
    device = pt.current_device()
    with pt.SymmetricHeap(group, size_bytes=1 << 16) as heap:
        one, two = heap.signal(slots=1), heap.signal(slots=1)
        first = meet.grid(1)(one).submit(device.stream("first"))
        second = meet.grid(1)(one).submit(device.stream("second"))
        first.wait()
        second.wait()
        print("met", two is not one)


if __name__ == "__main__":
    pt.run(main)
