"""peertile: tile programs that compute and communicate across devices.

Host names are here; the words of kernels are in `peertile.language` (import it as `T`).
"""

from peertile.cli.console import progress, report
from peertile.comm.group import Group, RankModel
from peertile.comm.launcher import init, program, run, spawn
from peertile.comm.links import Links
from peertile.comm.symmetric import Barrier, Counter, Mailbox, Signal, SymmetricHeap, SymmetricTensor
from peertile.creation import asarray, empty, full, ones, pointer, zeros
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
from peertile.kernel import KernelFunction, LaunchOp, kernel
from peertile.runtime.device import Device, Stream
from peertile.runtime.future import DeviceFuture
from peertile.runtime.op import DeviceOp
from peertile.runtime.registry import current_device, open_device, use_device
from peertile.runtime.tensor import Partition, Tensor

__version__ = "0.1.0.dev0"

__all__ = [
    "AllocationError",
    "ArgumentError",
    "Barrier",
    "CompileError",
    "Counter",
    "DType",
    "Device",
    "DeviceFault",
    "DeviceFuture",
    "DeviceOp",
    "Group",
    "InternalError",
    "KernelAssert",
    "KernelFunction",
    "LaunchError",
    "LaunchOp",
    "LeaseError",
    "Links",
    "Mailbox",
    "OutOfBounds",
    "Partition",
    "PeerFailed",
    "PeertileError",
    "RankModel",
    "Signal",
    "SignatureMismatch",
    "Stream",
    "SymmetricHeap",
    "SymmetricTensor",
    "SymmetryError",
    "Tensor",
    "UnsupportedError",
    "UsageError",
    "VerifyError",
    "WaitTimeout",
    "asarray",
    "bf16",
    "bool_",
    "current_device",
    "empty",
    "f8e4m3",
    "f8e5m2",
    "f16",
    "f32",
    "f64",
    "full",
    "i8",
    "i16",
    "i32",
    "i64",
    "init",
    "kernel",
    "ones",
    "open_device",
    "pointer",
    "program",
    "progress",
    "report",
    "run",
    "spawn",
    "u8",
    "u16",
    "u32",
    "u64",
    "use_device",
    "zeros",
]
