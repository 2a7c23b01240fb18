"""Collectives over the ranks of a group: `Collectives(group).all_reduce(x)` and its like, as lazy operations.

A communicator owns its channels and its staging memory in a symmetric heap; it is made, used and closed by
all ranks in the same order. All communication is in kernels.py, in the public language; this file checks
arguments, chooses, and builds launches. It never waits for a peer, but for `checked=True`.
"""

from __future__ import annotations

import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeVar

import numpy as np

from peertile.backends.cpu.target import host_target
from peertile.comm.group import Group
from peertile.comm.symmetric import MulticastTensor, SymmetricHeap, SymmetricTensor
from peertile.dtypes import DType, i64, u8, u16, u32, u64
from peertile.errors import ArgumentError, SignatureMismatch
from peertile.kept_launch import KeptLaunch
from peertile.kernel import KernelFunction, LaunchOp
from peertile.library import kernels
from peertile.library.communicator import Communicator, meet
from peertile.library.cuda_collectives import PROGRAMS_PER_EXECUTOR, Family, GpuPlans, Shape, heap_bytes
from peertile.library.kernels import FEW_RANKS, SLOTS
from peertile.library.multimem import MulticastCollectives, can_reduce
from peertile.library.reductions import ReduceOp, accumulator, check_reduction
from peertile.library.selection import GPU_ONLY, Algorithm, by_fabric, choose
from peertile.library.staging import Staging
from peertile.runtime.context import execution, outside_execution
from peertile.runtime.device import Device, Stream
from peertile.runtime.driver import DriverKind
from peertile.runtime.future import DeviceFuture
from peertile.runtime.launched import Launched
from peertile.runtime.op import DeviceOp, ExecutionContext
from peertile.runtime.registry import current_device
from peertile.runtime.site import call_site
from peertile.runtime.tensor import Tensor

__all__ = ["AnyTensor", "CollectiveOp", "Collectives"]

T = TypeVar("T")
AnyTensor = Tensor | SymmetricTensor

SLOT_BYTES = 1 << 18
"""Bytes of one staging slot. The caches of a core hold a few of them."""
GPU_SLOT_BYTES = 1 << 14
"""The same on GPUs, where a program keeps a tile in registers."""
FLAGGED_COUNT = 256
"""Elements that a flagged all-reduce takes at most."""
LEAST_TILE = 64
"""Elements of the smallest tile: rows of staging stay aligned to vectors."""
KEPT_CALLS = 32
"""Calls whose bound arguments are kept, so that repeating one costs a launch and nothing else."""

_BITS = {2: u16, 4: u32}
_new: Any = object.__new__


class CollectiveOp(DeviceOp[T]):
    """A lazy collective: one or several launches on one stream. Its result is the output.

    Ranks that made different calls get SignatureMismatch (or PeerFailed, where another rank noticed first).
    """

    __slots__ = ("_call", "_communicator", "_result")

    def __init__(self, communicator: Collectives, call: _Call, result: T) -> None:
        # As DeviceOp.__init__ does, without the call: repeating a small collective is counted in nanoseconds.
        self._spent = False
        self._site = call_site(3)
        self._communicator = communicator
        self._call = call
        self._result = result

    @property
    def name(self) -> str:
        return self._call.text

    @property
    def device(self) -> Device:
        return self._communicator.device

    def preferred_stream(self) -> Stream | None:
        """Where the communicator's channels were used last."""
        communicator = self._communicator
        if communicator._gpu is None and (stream := communicator._channel.channel_stream) is not None:
            return stream
        return next((s for s in (launch.preferred_stream() for launch in self._call.launches) if s is not None), None)

    @property
    def launches(self) -> tuple[LaunchOp, ...]:
        """The kernel launches that this op will run, for inspection and warm-up."""
        return self._call.launches

    def _execute(self, context: ExecutionContext) -> T:
        communicator, call = self._communicator, self._call
        communicator._check_open(call.text)
        if communicator.checked:
            communicator.group.agree(call.text, "a collective")
        for launch in call.launches:
            launch._execute(context)  # not spent by it: a kept launch is executed again by the next op
        return self._result

    def _submitted(self, stream: Stream) -> tuple[ExecutionContext | Launched, T]:
        communicator, kept = self._communicator, self._call.alone
        if kept is None or communicator._closed or stream.device is not communicator.device:
            return super()._submitted(stream)
        # The shortest way: one launch, which is its own submission.
        return kept.submitted(stream, self._site), self._result

    def _run_to_end(self, stream: Stream) -> T:
        communicator, call = self._communicator, self._call
        kept, staging = call.only, call.staging
        if (
            kept is None
            or communicator.checked
            or communicator._closed
            or stream.recording is not None
            or stream.device is not communicator.device
        ):
            return super()._run_to_end(stream)
        # The shortest way: one launch on the thread of the caller.
        if staging is None:
            kept.run(stream, self._site)
            return self._result
        kept = call.way(staging.begin())
        start = time.perf_counter_ns()
        kept.run(stream, self._site)
        staging.took(time.perf_counter_ns() - start)
        return self._result

    def submit(self, stream: Stream | None = None) -> DeviceFuture[T]:
        """Enqueue on `stream` (default: the device's policy says which) and return at once."""
        communicator, kept = self._communicator, self._call.alone
        if (
            kept is None
            or type(stream) is not Stream
            or stream.device is not communicator.device
            or stream.recording is not None
            or communicator._closed
            or self._spent
            or execution.inside is not None
        ):
            return super().submit(stream)
        # As any operation does, without its calls.
        self._spent = True
        return kept.submit(stream, self._site, self._result)

    def sync(self) -> T:
        """Run on a stream of the device's scheduling policy and wait for the end."""
        return self.sync_on(self._communicator.device.policy.stream_for(self))

    def sync_on(self, stream: Stream) -> T:
        """Run on `stream` and wait for the end."""
        if execution.inside is not None:
            outside_execution(self.name)
        if self._spent:
            self._spend()
        self._spent = True
        try:
            return self._run_to_end(stream)
        except SignatureMismatch as error:
            rank = self._communicator.group.rank
            raise SignatureMismatch(
                f"ranks called different collectives: rank {rank} is in {self.name}. {error.message}. "
                "Collectives(checked=True) compares every call first and names what each rank called",
                op=error.op,
                place=error.place,
            ) from error


class _Call:
    """A collective of certain tensors, bound: what repeating it needs.

    It holds memory, but no tensor of the caller: when one of those is dropped, so is the call. With `staging` there
    are two ways to do it, one launch each, bound by `bind` when they are first taken.
    """

    __slots__ = ("_bind", "_launches", "_ways", "alone", "only", "staging", "text", "tied")

    def __init__(
        self,
        text: str,
        launches: Sequence[LaunchOp],
        staging: Staging | None = None,
        bind: Callable[[bool], LaunchOp] | None = None,
        *,
        checked: bool,
    ) -> None:
        self.text = text
        self.tied: list[object] = []
        """What says when the call cannot be repeated any more."""
        self.staging = staging
        self._bind = bind
        self._ways: list[KeptLaunch | None] = [None, None]
        self._launches = tuple(launches)
        self.only = KeptLaunch(launches[0]) if len(launches) == 1 else None
        """The launch, where there is just one."""
        self.alone = self.only if staging is None and not checked else None
        """The same, where nothing has to be done but to enqueue it."""
        if staging is not None:
            self.only = self.way(staging.begin())

    @property
    def launches(self) -> tuple[LaunchOp, ...]:
        return self._launches if self.staging is None else (self.way(self.staging.around).launch,)

    def way(self, around: bool) -> KeptLaunch:
        """The launch that stages through the caches, or around them."""
        kept = self._ways[around]
        if kept is None:
            assert self._bind is not None
            kept = self._ways[around] = KeptLaunch(self._bind(around))
        return kept


class Collectives(Communicator):
    """Collectives over the ranks of `where`: a group, or a symmetric heap whose group and memory are used.

    Collective: every rank makes it, calls its methods and closes it in the same order. It is a context
    manager. `programs`: programs of a launch (default: what the cores give each rank). `checked`: compare every
    call across ranks on the host first (slow, names what each rank called). Operations of one communicator run
    in order on one stream; several communicators are independent of each other.

    Tensors are contiguous, on the current device, and need no placement; symmetric tensors are read where they
    lie. Inputs may be overwritten as soon as an operation has completed.

    >>> import numpy as np, peertile as pt
    >>> from peertile.library.collectives import Collectives
    >>> with Collectives(pt.init()) as comm:
    ...     comm.all_reduce(pt.asarray(np.arange(3.0, dtype=np.float32))).sync().numpy().tolist()
    [0.0, 1.0, 2.0]
    """

    def __init__(
        self,
        where: Group | SymmetricHeap,
        *,
        programs: int | None = None,
        checked: bool = False,
        slot_bytes: int | None = None,
    ) -> None:
        group = where if isinstance(where, Group) else where.group
        device = current_device() if isinstance(where, Group) else where.device
        on_gpu = device.driver.kind is DriverKind.CUDA
        if slot_bytes is None:
            slot_bytes = GPU_SLOT_BYTES if on_gpu else SLOT_BYTES
        if programs is not None and (not isinstance(programs, int) or programs < 1):
            raise ArgumentError(f"programs: expected an integer >= 1, got {programs!r}")
        least = _power_of_two(max(4096, group.size * LEAST_TILE * 8))
        if not isinstance(slot_bytes, int) or slot_bytes & (slot_bytes - 1) or slot_bytes < least:
            raise ArgumentError(f"slot_bytes: expected a power of two >= {least}, got {slot_bytes!r}")
        self.group = group
        self.checked = checked
        # Agreed once, so that no later choice depends on what one rank sees.
        executors, arches = meet(group, device, "Collectives", (device.target or "any") if on_gpu else _arch())
        self.programs = executors if programs is None else programs
        self.arch = arches[0] if len(set(arches)) == 1 else "any"
        group.agree((self.programs, checked, slot_bytes), "Collectives(programs, checked, slot_bytes)")
        self.slot_bytes = slot_bytes
        self._few = min(group.size, FEW_RANKS + 1)
        n, p = group.size, self.programs
        stage, inbox, shelf = (p * slots * slot_bytes for slots in (2, SLOTS * n, SLOTS))
        self._owns_heap = isinstance(where, Group)
        if isinstance(where, Group):
            words = 8 * n * (2 * FLAGGED_COUNT + 64 * p) + (1 << 17)
            more = heap_bytes(n, PROGRAMS_PER_EXECUTOR * executors) if on_gpu else 0
            self.heap = SymmetricHeap(group, size_bytes=stage + inbox + shelf + words + more)
        else:
            self.heap = where
        heap = self.heap
        self.device = heap.device
        own = self._own
        self._objects: list[Any] = []
        # Bound launches of recent calls, by the ids of their tensors.
        self._kept: dict[tuple[Any, ...], _Call] = {}
        self._closed = False
        with self._making():
            self._stage, self._inbox, self._shelf = (own(heap.empty((size,), u8)) for size in (stage, inbox, shelf))
            self._words = own(heap.zeros((2 * n, FLAGGED_COUNT), u64))
            self._turn = own(heap.zeros((2, p), i64))
            self._hello = own(heap.mailbox(tile=1, dtype=u64, programs=p))
            self._counts = own(heap.mailbox(tile=1, dtype=i64, programs=1))
            self._go, self._ready, self._done, self._lead, self._ack = (own(heap.signal(slots=p)) for _ in range(5))
            self._gpu = GpuPlans(heap, PROGRAMS_PER_EXECUTOR * executors, self.arch, own) if on_gpu else None
        self._views: dict[tuple[int, DType, int], SymmetricTensor] = {}
        self._channel = self._hello.channel_argument().uses[0].storage
        # The two ways of staging as arguments, and what was faster by size.
        self._ways = tuple(self.device.asarray([k], i64) for k in range(2))
        self._staging: dict[int, Staging] = {}
        # By heap, which they keep alive: its id stays its own.
        self._over_multicast: dict[int, MulticastCollectives] = {}
        group.on_recover(self._recover)

    # ---------------------------------------------------------------- life

    def _restart(self) -> None:
        self._turn.copy_from(np.zeros(self._turn.shape, np.int64))
        self._words.copy_from(np.zeros(self._words.shape, np.uint64))
        if self._gpu is not None:
            self._gpu.recover()

    def close(self) -> None:
        """Collective: give the memory back. Closing twice is fine. Where the group has failed, the memory of a heap
        that is not the communicator's own comes back when the group recovers."""
        self._kept.clear()
        super().close()

    # ---------------------------------------------------------------- arguments

    def _view(self, base: SymmetricTensor, dtype: DType, tile: int) -> tuple[SymmetricTensor, int]:
        """Staging as rows of `tile` elements, and the rows of one program."""
        key = (base.offset, dtype, tile)
        rows = base.storage.nbytes // (tile * dtype.itemsize)
        if key not in self._views:
            self._views[key] = SymmetricTensor(self.heap, base.storage, dtype, (rows, tile), base.offset)
        return self._views[key], rows // self.programs

    def _matrix(self, x: SymmetricTensor, rows: int) -> SymmetricTensor:
        return SymmetricTensor(x.heap, x.storage, x.dtype, (rows, prod(x.shape) // max(rows, 1)), x.offset)

    def _tensor(self, name: str, role: str, x: AnyTensor) -> Tensor:
        """This rank's part as a contiguous tensor of this device."""
        if isinstance(x, SymmetricTensor):
            if x.heap.group is not self.group:
                raise ArgumentError(f"{name}: {role}: the symmetric tensor is another group's; pass its .local part")
            x = x.local
        if not isinstance(x, Tensor):
            raise ArgumentError(f"{name}: {role}: expected a Tensor or SymmetricTensor, got {type(x).__name__}")
        if x.device is not self.device:
            raise ArgumentError(
                f"{name}: {role} is on {x.device.name}, the communicator on {self.device.name}; copy it there"
            )
        if not x.is_contiguous:
            raise ArgumentError(
                f"{name}: {role}: expected a contiguous tensor, got strides {x.strides} for shape {x.shape}; "
                "copy it first"
            )
        return x

    @staticmethod
    def _size(name: str, x: AnyTensor) -> int:
        if not isinstance(x, Tensor | SymmetricTensor):
            raise ArgumentError(f"{name}: x: expected a Tensor or SymmetricTensor, got {type(x).__name__}")
        return prod(x.shape)

    def _pair(self, name: str, x: AnyTensor, out: AnyTensor, count: int) -> tuple[Tensor, Tensor, bool]:
        """Own parts of input and output, and whether they are the same bytes; `count` is what out has to have."""
        a, b = self._tensor(name, "x", x), self._tensor(name, "out", out)
        if a.dtype != b.dtype:
            raise ArgumentError(f"{name}: out: expected dtype {a.dtype} as x has, got {b.dtype}")
        if b.size != count:
            raise ArgumentError(f"{name}: out: expected {count} elements, got {b.size} in {b.shape}")
        same = a.address == b.address and a.nbytes == b.nbytes
        if not same and a.address < b.address + b.nbytes and b.address < a.address + a.nbytes:
            raise ArgumentError(f"{name}: x and out overlap in part; pass the same tensor, or separate ones")
        return a, b, same

    def _shares(self, name: str, role: str, counts: Sequence[int]) -> list[int]:
        n = self.group.size
        given = list(counts) if isinstance(counts, Sequence | np.ndarray) else counts
        if not (
            isinstance(given, list)
            and len(given) == n
            and all(isinstance(c, int | np.integer) and c >= 0 for c in given)
        ):
            raise ArgumentError(f"{name}: {role}: expected {n} integers >= 0, one for each rank, got {given!r}")
        return [int(c) for c in given]

    def _even(self, name: str, size: int) -> int:
        n = self.group.size
        if size % n:
            raise ArgumentError(
                f"{name}: x: expected a number of elements that {n} ranks divide, got {size}; "
                f"use {name}_v for uneven shares"
            )
        return size // n

    def _root(self, name: str, root: int) -> int:
        if not isinstance(root, int | np.integer) or not 0 <= root < self.group.size:
            raise ArgumentError(f"{name}: root: expected 0 to {self.group.size - 1}, got {root!r}")
        return int(root)

    def _tile(self, count: int, itemsize: int, tile_bytes: int, pieces: int) -> int:
        """Elements of a tile: a power of two, so that there are about `pieces` of them, at most `tile_bytes`."""
        most = min(tile_bytes, self.slot_bytes) // itemsize
        return min(max(_power_of_two(-(-count // pieces)), LEAST_TILE), most)

    # ---------------------------------------------------------------- building

    def _op(self, text: str, launches: Sequence[LaunchOp], result: T) -> CollectiveOp[T]:
        self._check_open(text)
        return CollectiveOp(self, _Call(text, launches, checked=self.checked), result)

    def _kept_op(self, key: tuple[Any, ...] | None, out: Any) -> CollectiveOp[Any] | None:
        """The op of a recent call with the same tensors and options, ready to run."""
        call = self._kept.get(key) if key is not None else None
        if call is None or self._closed:
            return None
        # As the constructor does, without its call.
        op: CollectiveOp[Any] = _new(CollectiveOp)
        op._spent = False
        op._site = call_site(3)
        op._communicator = self
        op._call = call
        op._result = out
        return op

    def _keep(
        self,
        text: str,
        key: tuple[Any, ...] | None,
        launches: Sequence[LaunchOp],
        x: AnyTensor | None,
        out: Any,
        bind: Callable[[bool], LaunchOp] | None = None,
    ) -> CollectiveOp[Any]:
        """An op whose bound launches are kept until one of its tensors is dropped: binding costs more than reducing
        a megabyte. No key: a new tensor, which nobody can pass again before it is known. `bind`: see _Call."""
        self._check_open(text)
        staging = None
        if bind is not None:
            size = (prod(out.shape) * out.dtype.itemsize).bit_length()
            staging = self._staging.setdefault(size, Staging())
        call = _Call(text, launches, staging, bind, checked=self.checked)
        if key is not None:
            kept = self._kept
            if len(kept) >= KEPT_CALLS:
                kept.pop(next(iter(kept)), None)
            for tensor in (x, out):
                # The key is made of ids, which are free for others once a tensor is gone. Symmetric tensors live with
                # their heap, as the communicator does.
                is_own = isinstance(tensor, Tensor)
                call.tied.append(weakref.ref(tensor, lambda _: kept.pop(key, None)) if is_own else tensor)
            kept[key] = call
        return CollectiveOp(self, call, out)

    def _line(self, t: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements [start, stop) as a matrix of one row."""
        stop = t.size if stop is None else stop
        flat = t.reshape(t.size)
        return (flat if (start, stop) == (0, t.size) else flat[start:stop]).reshape(1, stop - start)

    def forget(self) -> None:
        """Let go of the tensors and launches of recent calls."""
        self._kept.clear()

    def barrier(self) -> CollectiveOp[None]:
        """Completes once every rank's barrier has begun."""
        key = ("barrier",)
        return self._kept_op(key, None) or self._keep(
            "barrier()", key, [kernels.barrier.grid(1)(self._hello)], None, None
        )

    # ---------------------------------------------------------------- all-reduce

    def all_reduce(
        self,
        x: AnyTensor,
        out: AnyTensor | None = None,
        op: ReduceOp = ReduceOp.SUM,
        *,
        algorithm: Algorithm | None = None,
    ) -> CollectiveOp[Any]:
        """out = the values of all ranks folded by `op`, the same bits on every rank; `out=x` is in place.

        Folded in rank order (RING: in the order of the ring); f16 and bf16 in f32, rounded once. Without `out`
        a new tensor. `algorithm` overrides the table, and must be the same on every rank.
        """
        key = None if out is None else ("all_reduce", id(x), id(out), id(op), id(algorithm))
        kept = self._kept_op(key, out)
        if kept is not None:
            return kept
        count = self._size("all_reduce", x)
        if out is None:
            out = self.device.empty(x.shape, x.dtype)
        a, b, same = self._pair("all_reduce", x, out, count)
        check_reduction("all_reduce", op, a.dtype)
        if algorithm is not None and not isinstance(algorithm, Algorithm):
            raise ArgumentError(f"all_reduce: algorithm: expected an Algorithm or None, got {algorithm!r}")
        if algorithm is Algorithm.MULTIMEM or (algorithm is None and same and self._by_fabric(x, op, a)):
            if not same:
                raise ArgumentError("all_reduce: MULTIMEM: expected out=x, got another tensor; it works in place")
            return self._keep(
                f"all_reduce({a.dtype}[{a.size}], {op.name}, multimem)",
                key,
                [self._multimem(x, op)],
                x,
                out,
            )
        symmetric = isinstance(x, SymmetricTensor) and isinstance(out, SymmetricTensor)
        nbytes = a.nbytes
        family = "all_reduce_symmetric" if symmetric else "all_reduce"
        shape = self._shape(Family.ALL_REDUCE, nbytes, a.dtype) if algorithm is None else None
        if self._gpu is not None and shape is not None:
            text = f"all_reduce({a.dtype}[{a.size}], {op.name}, {shape.algorithm.value})"
            word = 8 if shape.algorithm is Algorithm.FILLED else 4
            source, into = self._in_words(a, word), self._in_words(b, word)
            launch = self._gpu.all_reduce(shape, None if same else source, into, op)
            before = self._move(a, source) if not same else self._move(a, into) if into is not b else []
            return self._keep(text, key, [*before, launch, *self._move(into, b)], x, out)
        choice = choose(family, self.device.driver.kind.value, self.arch, self.group.size, nbytes)
        chosen, tile_bytes = (choice.algorithm, choice.tile_bytes) if algorithm is None else (algorithm, 1 << 14)
        if algorithm in (Algorithm.TWO_SHOT, Algorithm.PIPELINED):
            tile_bytes = 1 << 16
        plan = self._plan(chosen, a.dtype, a.size, algorithm is not None)
        text = f"all_reduce({a.dtype}[{a.size}], {op.name}, {plan.value}{', symmetric' if symmetric else ''})"
        if plan is Algorithm.PIPELINED:
            ends = (self._line(b),) if same else (self._line(b), self._line(a))

            def bind(around: bool) -> LaunchOp:
                return self._pipelined(ends, op, tile_bytes, around)

            return self._keep(text, key, (), x, out, bind)
        return self._keep(text, key, self._all_reduce(plan, x, out, a, b, same, op, tile_bytes), x, out)

    def _by_fabric(self, x: AnyTensor, op: ReduceOp, a: Tensor) -> bool:
        """Whether the table says that the fabric is faster, where it has a mapping of `x` and can do `op`."""
        if not isinstance(x, MulticastTensor) or x.heap.window is None or not can_reduce(op, a.dtype, a.size):
            return False
        return by_fabric("all_reduce", self.device.driver.kind.value, self.arch, self.group.size, a.nbytes)

    def _multimem(self, x: AnyTensor, op: ReduceOp) -> LaunchOp:
        """By one address; the first call with a heap makes the signal for it."""
        if not isinstance(x, MulticastTensor):
            raise ArgumentError(
                f"all_reduce: MULTIMEM: expected a MulticastTensor, as heap.multicast gives, got {type(x).__name__}"
            )
        found = self._over_multicast.get(id(x.heap))
        if found is None:
            found = self._over_multicast[id(x.heap)] = MulticastCollectives(x.heap)
            self._own(found.ready)
        return found.all_reduce(x, op)

    def _in_words(self, t: Tensor, word: int = 4) -> Tensor:
        """`t`, or a tensor to copy to where it does not begin at a word (of so many bytes): what one rank's view begins
        at must not change what it does with the others."""
        return self.device.empty(t.shape, t.dtype) if t.address % word else t

    def _shape(self, family: Family, nbytes: int, dtype: DType) -> Shape | None:
        """How the kernels for GPUs cut a message, where there are any that take it."""
        return None if self._gpu is None else self._gpu.shape(family, nbytes, dtype)

    def _plan(self, algorithm: Algorithm, dtype: DType, count: int, forced: bool) -> Algorithm:
        """The algorithm that can do it: a function of what is equal on all ranks."""
        if algorithm in GPU_ONLY:
            if forced:
                raise ArgumentError(f"all_reduce: {algorithm.name} is for GPUs; use PIPELINED, or leave algorithm out")
            return Algorithm.PIPELINED
        if algorithm is Algorithm.FLAGGED and (dtype.itemsize not in _BITS or count > FLAGGED_COUNT):
            if forced:
                raise ArgumentError(
                    f"all_reduce: FLAGGED: expected up to {FLAGGED_COUNT} elements of 2 or 4 bytes, "
                    f"got {count} of {dtype}; leave algorithm out"
                )
            return Algorithm.ONE_SHOT
        if algorithm is Algorithm.FLAGGED and count == 0:
            # Nothing would be exchanged, yet a turn taken: the next call could overwrite words that nobody has read.
            return Algorithm.ONE_SHOT
        if algorithm is Algorithm.RING and accumulator(dtype) != dtype:
            if forced:
                raise ArgumentError(
                    f"all_reduce: RING would round {dtype} at every rank; leave algorithm out, or convert to f32"
                )
            return Algorithm.TWO_SHOT
        if algorithm is Algorithm.ONE_SHOT and count * dtype.itemsize > self.slot_bytes // 2:
            if forced:
                raise ArgumentError(
                    f"all_reduce: ONE_SHOT: expected up to {self.slot_bytes // 2} bytes, got {count * dtype.itemsize}; "
                    "leave algorithm out, or make the communicator with larger slot_bytes"
                )
            return Algorithm.TWO_SHOT
        return algorithm

    def _all_reduce(
        self,
        algorithm: Algorithm,
        x: AnyTensor,
        out: AnyTensor,
        a: Tensor,
        b: Tensor,
        same: bool,
        op: ReduceOp,
        tile_bytes: int,
    ) -> list[LaunchOp]:
        n, dtype, count, acc = self.group.size, a.dtype, a.size, accumulator(a.dtype)
        hello, done = self._hello, self._done
        if isinstance(x, SymmetricTensor) and isinstance(out, SymmetricTensor) and algorithm is Algorithm.TWO_SHOT:
            tile = self._tile(count, dtype.itemsize, tile_bytes, 4 * n * self.programs)
            grid = min(self.programs, max(1, -(-count // (tile * n))))
            call = kernels.all_reduce_symmetric_two_shot.grid(grid)
            ends = self._matrix(out, 1), self._matrix(x, 1)
            return [call(*ends, hello, done, B=tile, N=self._few, OP=op, ACC=acc, DT=dtype)]
        if isinstance(x, SymmetricTensor) and not same and algorithm is Algorithm.ONE_SHOT:
            tile = self._tile(count, dtype.itemsize, tile_bytes, self.programs)
            return [
                kernels.all_reduce_symmetric_one_shot(
                    self._cut(b, tile), self._matrix(x, 1), hello, done, N=self._few, OP=op, ACC=acc, DT=dtype
                )
            ]
        source: tuple[Tensor, ...] = () if same else (self._line(a),)
        if algorithm is Algorithm.ONE_SHOT:
            tile = self._tile(count, dtype.itemsize, tile_bytes, self.programs)
            stage, rows = self._view(self._stage, dtype, tile)
            kernel = kernels.all_reduce_one_shot_in_place if same else kernels.all_reduce_one_shot
            return [
                kernel(
                    self._cut(b, tile), *source, hello, stage, self._turn, rows, N=self._few, OP=op, ACC=acc, DT=dtype
                )
            ]
        if algorithm is Algorithm.FLAGGED:
            mark = 1 << 63 | zlib.crc32(f"{dtype} {count} {op}".encode()) >> 8 << 32
            kernel = kernels.all_reduce_flagged_in_place if same else kernels.all_reduce_flagged
            cut = self._line(b).partition((1, 1)).persistent(programs=1)
            bits = _BITS[dtype.itemsize]
            return [kernel(cut, *source, self._words, self._turn, mark, OP=op, ACC=acc, DT=dtype, BITS=bits)]
        if algorithm is Algorithm.TWO_SHOT and not same:
            tile = self._tile(count, dtype.itemsize, tile_bytes, 4 * n * self.programs)
            return [self._two_shot(b, source[0], tile, op)]
        return self._in_parts(algorithm, a, b, same, op, tile_bytes)

    def _pipelined(self, ends: tuple[Tensor, ...], op: ReduceOp, tile_bytes: int, around: bool) -> LaunchOp:
        """`ends`: out, and x unless it is the same."""
        b, dtype = ends[0], ends[0].dtype
        tile = self._tile(b.size, dtype.itemsize, tile_bytes, 4 * self.programs)
        shelf, rows = self._view(self._shelf, dtype, tile)
        kernel = kernels.all_reduce_pipelined if len(ends) > 1 else kernels.all_reduce_pipelined_in_place
        return kernel(
            *(self._cut(b, tile), *ends[1:], self._hello, self._ready, shelf, rows, self._ways[around]),
            N=self._few, OP=op, ACC=accumulator(dtype), DT=dtype,
        )  # fmt: skip

    def _two_shot(self, b: Tensor, x: Tensor, tile: int, op: ReduceOp) -> LaunchOp:
        inbox, inbox_rows = self._view(self._inbox, b.dtype, tile)
        shelf, shelf_rows = self._view(self._shelf, b.dtype, tile)
        return kernels.all_reduce_two_shot(
            *(self._cut(b, tile), x, self._hello, self._ready, self._done, inbox, shelf, inbox_rows, shelf_rows),
            N=self._few, OP=op, ACC=accumulator(b.dtype), DT=b.dtype,
        )  # fmt: skip

    def _in_parts(
        self, algorithm: Algorithm, a: Tensor, b: Tensor, same: bool, op: ReduceOp, tile_bytes: int
    ) -> list[LaunchOp]:
        """Algorithms that hold a whole message in staging: as many launches as it takes."""
        n, dtype, count = self.group.size, a.dtype, a.size
        programs, rows = (1, 1) if algorithm is Algorithm.RING else (self.programs, n)
        part = rows * SLOTS * self.slot_bytes * programs // dtype.itemsize
        launches = []
        for start in range(0, max(count, 1), part):
            stop = min(start + part, count)
            piece = self._line(b, start, stop)
            tile = self._tile(stop - start, dtype.itemsize, tile_bytes, 4 * n * programs)
            inbox, inbox_rows = self._view(self._inbox, dtype, tile)
            shelf, shelf_rows = self._view(self._shelf, dtype, tile)
            if algorithm is Algorithm.TWO_SHOT:
                launches.append(
                    kernels.all_reduce_two_shot_in_place(
                        *(self._cut(piece, tile), self._hello, self._done, inbox, shelf, inbox_rows, shelf_rows),
                        N=self._few, OP=op, ACC=accumulator(dtype), DT=dtype,
                    )
                )  # fmt: skip
                continue
            kernel = kernels.all_reduce_ring_in_place if same else kernels.all_reduce_ring
            source = () if same else (self._line(a, start, stop),)
            cut = piece.partition((1, tile)).persistent(programs=1)
            launches.append(kernel(cut, *source, self._hello, self._lead, shelf, OP=op, DT=dtype))
        return launches

    def _cut(self, t: Tensor, tile: int, programs: int | None = None) -> Any:
        """A matrix of one row in tiles, over as many programs as have something to do."""
        line = self._line(t)  # never `t` itself: what is kept holds no tensor of the caller
        most = max(1, -(-line.shape[1] // tile))
        return line.partition((1, tile)).persistent(programs=min(programs or self.programs, most))

    # ---------------------------------------------------------------- reduce-scatter, gather, all-to-all

    def reduce_scatter(
        self, x: AnyTensor, out: AnyTensor | None = None, op: ReduceOp = ReduceOp.SUM
    ) -> CollectiveOp[Any]:
        """out = the share of this rank of the folded x: elements [rank · c, (rank + 1) · c), c = count / ranks.

        `out` may be that part of `x`.
        """
        name, n = "reduce_scatter", self.group.size
        key = None if out is None else (name, id(x), id(out), id(op))
        kept = self._kept_op(key, out)
        if kept is not None:
            return kept
        each = self._even(name, self._size(name, x))
        if out is None:
            shape = (x.shape[0] // n, *x.shape[1:]) if x.shape[0] % n == 0 else (each,)
            out = self.device.empty(shape, x.dtype)
        a = self._tensor(name, "x", x)
        check_reduction(name, op, a.dtype)
        target = out
        if self._is_part(a, self._tensor(name, "out", out), self.group.rank * each):
            target = self.device.empty((each,), x.dtype)
        a, b, _ = self._pair(name, x, target, each)
        cut_for_gpu = self._shape(Family.REDUCE_SCATTER, b.nbytes, a.dtype)
        if self._gpu is not None and cut_for_gpu is not None:
            text = f"reduce_scatter({a.dtype}[{a.size}], {op.name}, {cut_for_gpu.algorithm.value})"
            source, into = self._in_words(a), self._in_words(b)
            launches = [*self._move(a, source), self._gpu.reduce_scatter(cut_for_gpu, source, into, op)]
            return self._keep(text, key, [*launches, *self._move(into, b), *self._move(target, out)], x, out)
        options = {"N": self._few, "OP": op, "ACC": accumulator(a.dtype), "DT": a.dtype}
        tile = self._tile(each, a.dtype.itemsize, self._copy_tile(a.nbytes, n), self.programs)
        cut = self._cut(b, tile)
        if isinstance(x, SymmetricTensor):
            launch = kernels.reduce_scatter_symmetric(cut, self._matrix(x, n), self._hello, self._done, **options)
        else:
            stage, rows = self._view(self._stage, a.dtype, tile)
            channels = self._hello, self._go, stage, self._turn, rows
            launch = kernels.reduce_scatter_staged(cut, a.reshape(n, each), *channels, **options)
        text = f"reduce_scatter({a.dtype}[{a.size}], {op.name})"
        return self._keep(text, key, [launch, *self._move(target, out)], x, out)

    def all_gather(self, x: AnyTensor, out: AnyTensor | None = None) -> CollectiveOp[Any]:
        """out = x of rank 0, x of rank 1, …; `x` may be this rank's part of `out`."""
        name, n = "all_gather", self.group.size
        key = None if out is None else (name, id(x), id(out))
        kept = self._kept_op(key, out)
        if kept is not None:
            return kept
        each = self._size(name, x)
        if out is None:
            out = self.device.empty((n, *x.shape) if len(x.shape) < 4 else (n * x.shape[0], *x.shape[1:]), x.dtype)
        a, b = self._tensor(name, "x", x), self._tensor(name, "out", out)
        source = x
        if self._is_part(b, a, self.group.rank * each):
            source = self.device.empty((each,), a.dtype)
        a, b, _ = self._pair(name, source, out, n * each)
        launches = [*self._move(x, source), *self._gather(source, a, b, each, False)]
        return self._keep(f"all_gather({a.dtype}[{each}])", key, launches, x, out)

    def all_to_all(self, x: AnyTensor, out: AnyTensor | None = None) -> CollectiveOp[Any]:
        """out = for each rank r, the part of its x that is for this rank. `out` may not be `x`."""
        name = "all_to_all"
        key = None if out is None else (name, id(x), id(out))
        kept = self._kept_op(key, out)
        if kept is not None:
            return kept
        each = self._even(name, self._size(name, x))
        if out is None:
            out = self.device.empty(x.shape, x.dtype)
        a, b, same = self._pair(name, x, out, prod(x.shape))
        if same and a.size:
            raise ArgumentError(f"{name}: out: expected another tensor than x, got the same; pass a separate one")
        return self._keep(f"all_to_all({a.dtype}[{a.size}])", key, self._gather(x, a, b, each, True), x, out)

    def _gather(self, x: AnyTensor, a: Tensor, b: Tensor, each: int, to_each: bool) -> list[LaunchOp]:
        n, dtype = self.group.size, a.dtype
        family = Family.ALL_TO_ALL if to_each else Family.ALL_GATHER
        shape = self._shape(family, each * dtype.itemsize, dtype)
        if self._gpu is not None and shape is not None:
            source, into = self._in_words(a), self._in_words(b)
            launch = self._gpu.gather(shape, source, into, each=to_each)
            return [*self._move(a, source), launch, *self._move(into, b)]
        tile = self._tile(each, dtype.itemsize, self._copy_tile(b.nbytes, n), self.programs)
        tiles = n * -(-each // tile)
        programs = min(self.programs, max(1, tiles))
        cut = b.reshape(n, each).partition((1, tile)).persistent(programs=programs, swizzle=n)
        rows = n if to_each else 1
        if isinstance(x, SymmetricTensor):
            ends = cut, self._matrix(x, rows)
            return [kernels.gather_symmetric(*ends, self._hello, self._done, EACH=to_each, DT=dtype)]
        stage, stage_rows = self._view(self._stage, dtype, tile)
        channels = self._hello, self._go, stage, self._turn, stage_rows
        return [kernels.gather_staged(cut, a.reshape(rows, each), *channels, EACH=to_each, DT=dtype)]

    def _copy_tile(self, nbytes: int, rows: int) -> int:
        """Bytes of a tile; a slot holds at least two groups of one for each rank."""
        choice = choose("copy", self.device.driver.kind.value, self.arch, self.group.size, nbytes)
        return min(choice.tile_bytes, self.slot_bytes >> (rows - 1).bit_length())

    def _is_part(self, whole: Tensor, part: Tensor, first: int) -> bool:
        """Whether `part` is the elements of `whole` from `first` on, and not all of it."""
        offset = first * whole.dtype.itemsize
        return part.nbytes < whole.nbytes and part.nbytes > 0 and part.address == whole.address + offset

    def _move(self, source: AnyTensor, to: AnyTensor) -> list[LaunchOp]:
        """A copy, unless the two are one."""
        if source is to:
            return []
        a, b = (t.local if isinstance(t, SymmetricTensor) else t for t in (source, to))
        tile = self._tile(a.size, a.dtype.itemsize, 1 << 16, self.programs)
        return [kernels.copy(self._cut(b, tile), self._line(a))]

    # ---------------------------------------------------------------- broadcast and reduce

    def broadcast(self, x: AnyTensor, out: AnyTensor | None = None, *, root: int = 0) -> CollectiveOp[Any]:
        """out = x of rank `root`, on every rank; in place without `out`. Only the root's x is read."""
        name = "broadcast"
        out = x if out is None else out
        key = (name, id(x), id(out), root)
        kept = self._kept_op(key, out)
        if kept is not None:
            return kept
        a, b, same = self._pair(name, x, out, self._size(name, x))
        root = self._root(name, root)
        launch = self._broadcast(None if same else self._line(a), self._line(b), root)
        return self._keep(f"broadcast({a.dtype}[{a.size}], root={root})", key, [launch], x, out)

    def _broadcast(self, x: Tensor | None, out: Tensor, root: int) -> LaunchOp:
        dtype = out.dtype
        tile = self._tile(out.size, dtype.itemsize, self._copy_tile(out.nbytes, 1), 4 * self.programs)
        shelf, rows = self._view(self._shelf, dtype, tile)
        channels = self._hello, self._lead, self._ack, shelf, rows, root
        if x is None:
            return kernels.broadcast_in_place(self._cut(out, tile), *channels, DT=dtype)
        return kernels.broadcast_from(self._cut(out, tile), x, *channels, DT=dtype)

    def reduce(
        self, x: AnyTensor, out: AnyTensor | None = None, op: ReduceOp = ReduceOp.SUM, *, root: int = 0
    ) -> CollectiveOp[Any]:
        """out of rank `root` = the values of all ranks folded in rank order. The others' `out` is not changed
        and may be left out."""
        name = "reduce"
        a = self._tensor(name, "x", x)
        check_reduction(name, op, a.dtype)
        root = self._root(name, root)
        if out is None:
            out = self.device.empty(x.shape, x.dtype)
        a, b, same = self._pair(name, x, out, prod(x.shape))
        if same and a.size:
            raise ArgumentError(f"{name}: out: expected another tensor than x, got the same; pass a separate one")
        launch = self._reduce_to(self._line(a), self._line(b), op, root)
        return self._op(f"reduce({a.dtype}[{a.size}], {op.name}, root={root})", [launch], out)

    def _reduce_to(self, x: Tensor, out: Tensor, op: ReduceOp, root: int) -> LaunchOp:
        dtype = x.dtype
        tile = self._tile(x.size, dtype.itemsize, self._copy_tile(x.nbytes, 1), 4 * self.programs)
        shelf, rows = self._view(self._shelf, dtype, tile)
        return kernels.reduce_to(
            *(self._cut(out, tile), x, self._hello, self._lead, self._ack, shelf, rows, root),
            N=self._few, OP=op, ACC=accumulator(dtype), DT=dtype,
        )  # fmt: skip

    # ---------------------------------------------------------------- uneven shares

    def all_gather_v(self, x: AnyTensor, counts: Sequence[int], out: AnyTensor | None = None) -> CollectiveOp[Any]:
        """out = x of rank 0 (`counts[0]` elements), x of rank 1, …; `counts` is the same on every rank."""
        name, me = "all_gather_v", self.group.rank
        shares = self._shares(name, "counts", counts)
        if self._size(name, x) != shares[me]:
            raise ArgumentError(
                f"{name}: x: expected {shares[me]} elements, counts[{me}], got {prod(x.shape)} in {x.shape}"
            )
        if out is None:
            out = self.device.empty((sum(shares),), x.dtype)
        a, b, _ = self._pair(name, x, out, sum(shares))
        starts = _starts(shares)
        launches = [
            self._broadcast(self._line(a), self._line(b, starts[r], starts[r] + shares[r]), r)
            for r in range(self.group.size)
        ]
        return self._op(f"all_gather_v({a.dtype}{shares})", launches, out)

    def reduce_scatter_v(
        self, x: AnyTensor, counts: Sequence[int], out: AnyTensor | None = None, op: ReduceOp = ReduceOp.SUM
    ) -> CollectiveOp[Any]:
        """out = the share of this rank of the folded x; rank r gets `counts[r]` elements, in order."""
        name, me = "reduce_scatter_v", self.group.rank
        shares = self._shares(name, "counts", counts)
        if self._size(name, x) != sum(shares):
            raise ArgumentError(
                f"{name}: x: expected {sum(shares)} elements, the sum of counts, got {prod(x.shape)} in {x.shape}"
            )
        if out is None:
            out = self.device.empty((shares[me],), x.dtype)
        a, b, _ = self._pair(name, x, out, shares[me])
        check_reduction(name, op, a.dtype)
        starts = _starts(shares)
        # Where nothing is kept, `out` only says how much there is.
        spare = self.device.empty((max(shares),), a.dtype)
        launches = []
        for r, share in enumerate(shares):
            target = self._line(b) if r == me else self._line(spare, 0, share)
            launches.append(self._reduce_to(self._line(a, starts[r], starts[r] + share), target, op, r))
        return self._op(f"reduce_scatter_v({a.dtype}{shares}, {op.name})", launches, out)

    def all_to_all_v(
        self,
        x: AnyTensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        out: AnyTensor | None = None,
    ) -> CollectiveOp[Any]:
        """x is `send_counts[r]` elements for each rank r in order, out `receive_counts[r]` from each.

        What a rank sends to another must be what that one expects: compared on the device, KernelAssert if not.
        """
        name, n, me = "all_to_all_v", self.group.size, self.group.rank
        sends = self._shares(name, "send_counts", send_counts)
        receives = self._shares(name, "receive_counts", receive_counts)
        if self._size(name, x) != sum(sends):
            raise ArgumentError(
                f"{name}: x: expected {sum(sends)} elements, the sum of send_counts, got {prod(x.shape)} in {x.shape}"
            )
        if out is None:
            out = self.device.empty((sum(receives),), x.dtype)
        a, b, same = self._pair(name, x, out, sum(receives))
        if same and a.size:
            raise ArgumentError(f"{name}: out: expected another tensor than x, got the same; pass a separate one")
        dtype = a.dtype
        send_starts, receive_starts = _starts(sends), _starts(receives)
        tile = self._copy_tile(0, 1) // dtype.itemsize  # not of the counts: they differ between ranks
        shelf, _ = self._view(self._shelf, dtype, tile)
        told = self.device.empty((1,), i64)
        launches = [
            kernels.agree_counts(
                *(told.partition(1), self.device.asarray(sends, i64), self.device.asarray(receives, i64), self._counts),
                DT=dtype,
            )
        ]
        for shift in range(n):
            to, source = (me + shift) % n, (me - shift) % n
            part = self._line(a, send_starts[to], send_starts[to] + sends[to])
            target = self._line(b, receive_starts[source], receive_starts[source] + receives[source])
            if shift == 0:
                launches += self._move(part, target)
            else:
                launches.append(
                    kernels.trade(
                        *(self._cut(target, tile, 1), part, self._hello, self._lead, self._ack, shelf),
                        *(to, source, shift),
                        DT=dtype,
                    )
                )
        return self._op(f"all_to_all_v({dtype})", launches, out)


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def _starts(counts: Sequence[int]) -> list[int]:
    return [sum(counts[:k]) for k in range(len(counts))]


def _arch() -> str:
    target = host_target()
    return f"{target.arch}-{target.vector_bits}"


def _kernels() -> tuple[KernelFunction, ...]:
    """All kernels of the library, for tests and inspection."""
    return tuple(k for k in vars(kernels).values() if isinstance(k, KernelFunction))
