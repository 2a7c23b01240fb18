"""peertile: tile programs that compute and communicate across devices.

Host names are here; the words of kernels are in `peertile.language` (import it as `T`).
"""

import peertile.runtime.platforms as _platforms  # first: where this cannot run it says so  # noqa: F401
from peertile import op
from peertile.cli.console import progress, report
from peertile.comm.group import Group, RankModel
from peertile.comm.launcher import init, program, run, spawn
from peertile.comm.links import Links
from peertile.comm.symmetric import Barrier, Counter, Mailbox, MulticastTensor, Signal, SymmetricHeap, SymmetricTensor
from peertile.creation import (
    arange,
    asarray,
    convert,
    dup,
    empty,
    eye,
    from_address,
    from_dlpack,
    full,
    linspace,
    ones,
    pointer,
    rand,
    randn,
    tensor_spec,
    zeros,
)
from peertile.dtypes import (
    DType,
    bf16,
    f8e4m3,
    f8e5m2,
    f16,
    f32,
    f64,
    i8,
    i16,
    i32,
    i64,
    u8,
    u16,
    u32,
    u64,
)
from peertile.dtypes import b1 as bool_
from peertile.errors import (
    AllocationError,
    ArgumentError,
    CompileError,
    DeviceFault,
    InternalError,
    KernelAssert,
    LaunchError,
    LeaseError,
    OutOfBounds,
    PeerFailed,
    PeertileError,
    SignatureMismatch,
    SymmetryError,
    UnsupportedError,
    UsageError,
    VerifyError,
    WaitTimeout,
)
from peertile.kernel import KernelFunction, KernelInput, KernelOutput, LaunchOp, kernel
from peertile.runtime.capture import CaptureScope, capture
from peertile.runtime.context import ExecutionContext
from peertile.runtime.device import Device
from peertile.runtime.driver import DriverKind, ShareKind
from peertile.runtime.future import DeviceFuture
from peertile.runtime.op import DeviceOp, Graph, SharedOp, zip
from peertile.runtime.pool import MemoryPool, PoolStats
from peertile.runtime.registry import current_device, open_device, use_device
from peertile.runtime.schedule import PerDevice, RoundRobin, SchedulingPolicy, SingleStream
from peertile.runtime.stream import Event, Stream, leaked_submissions, live_submissions
from peertile.runtime.tensor import FrozenTensor, Partition, Tensor, TensorView
from peertile.timelines.start import Timeline, timeline
from peertile.tuning.autotune import Autotuned, autotune

__version__ = "0.1.0.dev0"

__all__ = [
    "AllocationError",
    "ArgumentError",
    "Autotuned",
    "Barrier",
    "CaptureScope",
    "CompileError",
    "Counter",
    "DType",
    "Device",
    "DeviceFault",
    "DeviceFuture",
    "DeviceOp",
    "DriverKind",
    "Event",
    "ExecutionContext",
    "FrozenTensor",
    "Graph",
    "Group",
    "InternalError",
    "KernelAssert",
    "KernelFunction",
    "KernelInput",
    "KernelOutput",
    "LaunchError",
    "LaunchOp",
    "LeaseError",
    "Links",
    "Mailbox",
    "MemoryPool",
    "MulticastTensor",
    "OutOfBounds",
    "Partition",
    "PeerFailed",
    "PeertileError",
    "PerDevice",
    "PoolStats",
    "RankModel",
    "RoundRobin",
    "SchedulingPolicy",
    "ShareKind",
    "SharedOp",
    "Signal",
    "SignatureMismatch",
    "SingleStream",
    "Stream",
    "SymmetricHeap",
    "SymmetricTensor",
    "SymmetryError",
    "Tensor",
    "TensorView",
    "Timeline",
    "UnsupportedError",
    "UsageError",
    "VerifyError",
    "WaitTimeout",
    "arange",
    "asarray",
    "autotune",
    "bf16",
    "bool_",
    "capture",
    "convert",
    "current_device",
    "dup",
    "empty",
    "eye",
    "f8e4m3",
    "f8e5m2",
    "f16",
    "f32",
    "f64",
    "from_address",
    "from_dlpack",
    "full",
    "i8",
    "i16",
    "i32",
    "i64",
    "init",
    "kernel",
    "leaked_submissions",
    "linspace",
    "live_submissions",
    "ones",
    "op",
    "open_device",
    "pointer",
    "program",
    "progress",
    "rand",
    "randn",
    "report",
    "run",
    "spawn",
    "tensor_spec",
    "timeline",
    "u8",
    "u16",
    "u32",
    "u64",
    "use_device",
    "zeros",
    "zip",
]
