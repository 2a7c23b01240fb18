"""A stand-in for a fabric with multicast, shared by the ranks of a test: the driver's rules are assertions here.

No pytest: spawned ranks import this. What the real driver would take GPUs out of service for is an AssertionError.
"""

import os
import threading
from contextlib import contextmanager

from peertile.runtime.drivers.cuda_api import CudaError

GRAIN = 1 << 21


class Made:
    """A multicast object: who takes part, whose memory is behind it, where it is mapped."""

    def __init__(self, nbytes, count):
        self.nbytes = nbytes
        self.count = count
        self.added = set()
        self.bound = {}
        self.handles = 0
        self.mappings = set()


class Fabric:
    def __init__(self, fail=None):
        self.lock = threading.Lock()
        self.objects = []
        self.by_file = {}
        self.log = []
        self.fail = fail  # (call, device)

    def note(self, call, device):
        with self.lock:
            self.log.append((call, device))
        if self.fail == (call, device):
            raise CudaError(call, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted")

    def left(self):
        """Handles and mappings that nobody gave back."""
        return [
            (o.handles, sorted(o.mappings), sorted(o.bound)) for o in self.objects if o.handles or o.mappings or o.bound
        ]


class Calls:
    """`MulticastCalls` of one device."""

    def __init__(self, fabric, device):
        self.fabric = fabric
        self.device = device

    def granularity(self, nbytes, count, kind):
        self.fabric.note("granularity", self.device)
        return GRAIN

    def create(self, nbytes, count, kind):
        self.fabric.note("create", self.device)
        assert nbytes > 0
        assert nbytes % GRAIN == 0
        made = Made(nbytes, count)
        made.handles += 1
        self.fabric.objects.append(made)
        return made

    def add_device(self, handle, device):
        self.fabric.note("add_device", device)
        assert not handle.bound, "a device is added after memory was bound"
        handle.added.add(device)

    def bind(self, handle, memory, nbytes):
        self.fabric.note("bind", self.device)
        assert len(handle.added) == handle.count, "memory is bound before every device was added"
        assert nbytes == handle.nbytes
        handle.bound[self.device] = memory

    def unbind(self, handle, device, nbytes):
        self.fabric.note("unbind", device)
        assert device not in {d for d, _ in handle.mappings}, "memory is unbound while it is mapped"
        del handle.bound[device]


class Api:
    """The calls of `CudaApi` that a mapping needs."""

    def __init__(self, fabric, device, **attributes):
        self.fabric = fabric
        self.device = device
        self.attributes = {"COMPUTE_CAPABILITY_MAJOR": 9, "MULTICAST_SUPPORTED": 1} | attributes
        self.reserved = set()

    def attribute(self, device, name):
        return self.attributes[name]

    def device_name(self, device):
        return "a GPU"

    def driver_version(self):
        return self.attributes.get("driver", 13000)

    def export_memory(self, handle, kind):
        fd = os.memfd_create("multicast")
        self.fabric.by_file[os.fstat(fd).st_ino] = handle
        return fd

    def import_memory(self, value, kind):
        self.fabric.note("import", self.device)
        handle = self.fabric.by_file[os.fstat(value).st_ino]
        handle.handles += 1
        return handle

    def reserve(self, nbytes, alignment):
        address = (1 + len(self.reserved)) * (1 << 40) + self.device * (1 << 36)
        self.reserved.add(address)
        return address

    def free_reservation(self, address, nbytes):
        self.reserved.remove(address)

    def map(self, address, nbytes, handle):
        self.fabric.note("map", self.device)
        assert set(handle.bound) == handle.added, "mapped before all memory was bound"
        handle.mappings.add((self.device, address))

    def set_access(self, address, nbytes, devices):
        self.fabric.note("set_access", self.device)

    def unmap(self, address, nbytes):
        self.fabric.note("unmap", self.device)
        for made in self.fabric.objects:
            made.mappings.discard((self.device, address))

    def release_memory(self, handle):
        self.fabric.note("release", self.device)
        handle.handles -= 1


def using(api):
    @contextmanager
    def inside():
        yield api

    return inside
