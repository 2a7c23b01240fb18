"""`peertile info` about GPUs, every probe and its failure over stand-ins: NVML, nvidia-smi, the NVIDIA driver."""

from types import SimpleNamespace

import pytest

from peertile.cli import topology
from peertile.cli.topology import Links, full_mesh, gpu_findings, gpu_report, links_by_nvml, links_by_smi, nvlinks
from peertile.errors import UnsupportedError
from peertile.runtime.driver import ShareKind
from peertile.runtime.drivers.cuda_api import CudaError

UUIDS = ["GPU-aa", "GPU-bb"]


class NVMLError(Exception):
    pass


class Nvml:
    """Two GPUs with `active` links each; the pairs in `linked` reach each other by them."""

    NVMLError = NVMLError
    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 2, 0

    def __init__(self, active=18, linked=True):
        self.active, self.linked, self.open = active, linked, 0

    def nvmlInit(self):
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return UUIDS.index(uuid)

    def nvmlDeviceGetNvLinkState(self, handle, link):
        if link >= 12 and self.active <= 12:
            raise NVMLError("no such link")
        return int(link < self.active)

    def nvmlDeviceGetP2PStatus(self, a, b, what):
        return 0 if self.linked else 1


def smi(command):
    if "topo" in command:
        return (
            "\t\x1b[4mGPU0\tGPU1\tGPU2\tCPU Affinity\x1b[0m\n"
            "GPU0\t X \tNV18\tSYS\t0-31\nGPU1\tNV18\t X \tNV4\t0-31\nGPU2\tSYS\tNV4\t X \t0-31\n\nLegend:\n  X = Self\n"
        )
    return "0, GPU-cc\n1, GPU-aa\n2, GPU-bb\n"


def test_links_by_nvml():
    nvml = Nvml()
    assert links_by_nvml(UUIDS, nvml) == ((0, 18), (18, 0))
    assert links_by_nvml(UUIDS, Nvml(active=4)) == ((0, 4), (4, 0))
    assert links_by_nvml(UUIDS, Nvml(linked=False)) == ((0, 0), (0, 0))
    assert nvml.open == 0


def test_links_by_smi_are_in_the_order_of_the_visible_gpus():
    assert links_by_smi(UUIDS, smi) == ((0, 4), (4, 0))
    assert links_by_smi(["GPU-bb", "GPU-cc"], smi) == ((0, 0), (0, 0))


def test_nvml_is_asked_first_then_nvidia_smi_then_nobody():
    def missing():
        raise ImportError("No module named 'pynvml'")

    def absent(command):
        raise FileNotFoundError("nvidia-smi")

    assert nvlinks(UUIDS, Nvml, smi) == Links(((0, 18), (18, 0)), "NVML")
    assert nvlinks(UUIDS, missing, smi) == Links(((0, 4), (4, 0)), "nvidia-smi")
    nobody = "NVML: ImportError: No module named 'pynvml'; nvidia-smi: FileNotFoundError: nvidia-smi"
    assert nvlinks(UUIDS, missing, absent) == Links(None, nobody)


@pytest.mark.parametrize(
    ("count", "links", "mesh"),
    [
        (0, None, True), (1, None, True), (2, None, None), (2, ((0, 18), (18, 0)), True),
        (3, ((0, 4, 4), (4, 0, 0), (4, 0, 0)), False),
    ],
)  # fmt: skip
def test_a_mesh_is_full_where_all_have_links_to_all(count, links, mesh):
    assert full_mesh(Links(links, "NVML"), count) is mesh


def gpu(ordinal, *, access=True, atomics=True, shares=(ShareKind.FD, ShareKind.IPC), fabric="no channel"):
    def create_memory(device, nbytes, kind):
        raise CudaError("cuMemCreate", "CUDA_ERROR_NOT_PERMITTED", fabric)

    api = SimpleNamespace(
        push_context=lambda context: None, pop_context=lambda: None, granularity=lambda device, kind: 1 << 21,
        attribute=lambda device, name: {"HOST_NUMA_ID": 1, "HANDLE_TYPE_FABRIC_SUPPORTED": 1}.get(name, 1),
        create_memory=create_memory, device_uuid=lambda device: bytes([ordinal]) * 16,
        can_access_peer=lambda a, b: access, native_peer_atomics=lambda a, b: atomics,
    )  # fmt: skip
    facts = SimpleNamespace(name="NVIDIA H200", memory_bytes=141 << 30, stream_priorities=(0, -5), shares=shares)
    return SimpleNamespace(api=api, ordinal=ordinal, handle=ordinal, context=None, arch="sm_90", capabilities=facts)


MESH = Links(((0, 18), (18, 0)), "NVML")


def test_findings_of_two_gpus():
    found = {f.name: (f.works, f.why) for f in gpu_findings([gpu(0), gpu(1)], 13000, MESH, {})}
    name = "NVIDIA H200 (sm_90, 141 GiB, NUMA 1)"
    fabric = "cuMemCreate: no channel (CUDA_ERROR_NOT_PERMITTED)"
    assert found == {
        "cuda": (True, f"{name}, {name}; CUDA 13.0"),
        "stream priorities": (True, "0 (least) to -5"),
        "gpu peer access": (True, "every GPU, every other one"),
        "gpu peer atomics": (True, "every GPU, every other one"),
        "nvlink mesh": (True, "links from each GPU to each, by NVML: cuda:0 0 18; cuda:1 18 0"),
        "gpu memory by fd": (True, "between processes, on every visible GPU"),
        "gpu memory by ipc": (True, "between processes, on every visible GPU"),
        "gpu memory by fabric": (False, f"cuda:0: {fabric}; cuda:1: {fabric}"),
        "gpu multicast": (True, "the devices say that they can; made only where it is asked for"),
    }


def test_findings_say_what_lacks():
    devices = [gpu(0), gpu(1, access=False, atomics=False, shares=(ShareKind.IPC,))]
    env = {"NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1", "CUDA_LAUNCH_BLOCKING": "1"}
    found = {f.name: (f.works, f.why) for f in gpu_findings(devices, 12080, Links(None, "NVML: gone"), env)}
    assert found["gpu peer access"] == found["gpu peer atomics"] == (False, "not from cuda:1 to cuda:0")
    assert found["nvlink mesh"] == (False, "NVML: gone")
    assert found["gpu memory by fd"] == (False, "not on cuda:1")
    assert found["gpu multicast"] == (False, "forbidden here by NCCL_NVLS_ENABLE=0, NVSHMEM_DISABLE_NVLS=1")
    assert found["kernels that wait"] == (False, "CUDA_LAUNCH_BLOCKING=1: their launches would not return")


def test_one_gpu_needs_no_links():
    found = {f.name: (f.works, f.why) for f in gpu_findings([gpu(0)], 13000, Links(None, "nobody"), {})}
    assert found["nvlink mesh"] == (True, "one GPU needs none")
    assert found["gpu peer access"] == (True, "one GPU")


def test_no_gpu_is_one_line_that_says_why(monkeypatch):
    def none():
        raise UnsupportedError("cuda: expected at least one GPU, the NVIDIA driver shows none")

    monkeypatch.setattr(topology, "open_gpus", none)
    (only,) = gpu_report()
    why = "UnsupportedError: cuda: expected at least one GPU, the NVIDIA driver shows none"
    assert (only.name, only.works, only.why) == ("cuda", False, why)
