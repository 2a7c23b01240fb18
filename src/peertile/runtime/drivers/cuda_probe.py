"""What a GPU can do, asked once when it is opened. Makes and changes nothing that stays."""

from __future__ import annotations

from typing import Any, Final

from peertile.errors import UnsupportedError
from peertile.runtime.driver import Capabilities, ShareKind
from peertile.runtime.drivers.cuda_api import CudaApi, CudaError

__all__ = ["MIN_CAPABILITY", "MIN_DRIVER", "capabilities_of", "fabric_refusal", "identity_of"]

MIN_DRIVER: Final = 12040
MIN_CAPABILITY: Final = (8, 0)


def capabilities_of(api: CudaApi, device: Any) -> Capabilities:
    """UnsupportedError, with what to install, for a GPU or a driver that is too old. Its context is current."""
    name = api.device_name(device)
    _check_versions(api, device, name)
    multiprocessors = api.attribute(device, "MULTIPROCESSOR_COUNT")
    count = api.device_count()
    peers = [p for p in (api.device(k) for k in range(count)) if int(p) != int(device)]
    unreachable = frozenset(identity_of(api, p) for p in peers if not api.can_access_peer(device, p))
    peers = [p for p in peers if identity_of(api, p) not in unreachable]
    return Capabilities(
        name=name,
        memory_bytes=api.total_memory(device),
        executors=multiprocessors,
        resident_programs=multiprocessors * api.attribute(device, "MAX_BLOCKS_PER_MULTIPROCESSOR"),
        stream_priorities=api.priority_range(),
        peer_atomics=all(api.native_peer_atomics(device, p) for p in peers),
        value_widths=frozenset({32, 64}),
        host_addressable=False,
        shares=_shares(api, device),
        # The device may be able to; this driver never makes a multicast object.
        multicast=False,
        unreachable=unreachable,
    )


def identity_of(api: CudaApi, device: Any) -> str:
    """The same text for the same hardware, in every process."""
    return f"cuda:{api.device_uuid(device).hex()}"


def _check_versions(api: CudaApi, device: Any, name: str) -> None:
    version = api.driver_version()
    if version < MIN_DRIVER:
        raise UnsupportedError(
            f"cuda: the NVIDIA driver supports CUDA {version // 1000}.{version % 1000 // 10}, peertile needs "
            f"{MIN_DRIVER // 1000}.{MIN_DRIVER % 1000 // 10}; install a newer NVIDIA driver"
        )
    major = api.attribute(device, "COMPUTE_CAPABILITY_MAJOR")
    minor = api.attribute(device, "COMPUTE_CAPABILITY_MINOR")
    if (major, minor) < MIN_CAPABILITY:
        raise UnsupportedError(f"cuda: {name} is an sm_{major}{minor}, peertile needs sm_80 or newer")
    for needed, what in (
        ("CAN_USE_64_BIT_STREAM_MEM_OPS", "64-bit stream memory operations"),
        ("MEMORY_POOLS_SUPPORTED", "memory pools"),
        ("UNIFIED_ADDRESSING", "unified addressing"),
    ):
        # The first has two names: the newer one is for drivers that know only the second version of the calls.
        names = (needed, f"{needed}_V1") if needed.startswith("CAN_USE") else (needed,)
        if not any(api.attribute(device, n) for n in names):
            raise UnsupportedError(f"cuda: {name} with this NVIDIA driver has no {what}; install a newer driver")


def _shares(api: CudaApi, device: Any) -> tuple[ShareKind, ...]:
    """Best first."""
    kinds = []
    if fabric_refusal(api, device) is None:
        kinds.append(ShareKind.FABRIC)
    if api.attribute(device, "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED") and api.attribute(
        device, "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"
    ):
        kinds.append(ShareKind.FD)
    kinds.append(ShareKind.IPC)
    return tuple(kinds)


def fabric_refusal(api: CudaApi, device: Any) -> str | None:
    """Why fabric handles do not work here, found by making and releasing one; None if they do."""
    if not api.attribute(device, "HANDLE_TYPE_FABRIC_SUPPORTED"):
        return "the device has no fabric handles"
    try:
        handle = api.create_memory(device, api.granularity(device, ShareKind.FABRIC), ShareKind.FABRIC)
    except CudaError as error:
        return str(error)
    try:
        api.export_memory(handle, ShareKind.FABRIC)
    except CudaError as error:
        return str(error)
    finally:
        api.release_memory(handle)
    return None
