"""Multicast objects of the fabric: nothing is asked without the opt-in, every step waits for all ranks, all is undone."""

import ast
import importlib
import itertools
from pathlib import Path
from types import SimpleNamespace

import fabric as fabrics
import object_ranks
import pytest

import peertile as pt
from peertile.comm.multicast import MulticastPath, agree_on_multicast
from peertile.config import read_config
from peertile.errors import ArgumentError, UsageError
from peertile.runtime.driver import ShareKind
from peertile.runtime.drivers.cuda_multicast import MulticastObjects, MulticastState, consent_refusal

pytestmark = [pytest.mark.feature("M7", "cpu"), pytest.mark.feature("M7", "cuda")]
PACKAGE = Path(pt.__file__).parent


def spawn(function, ranks, *args):
    return pt.spawn(function, ranks, args, model=pt.RankModel.THREADS, timeout_s=60)


# ---------------------------------------------------------------- consent


@pytest.mark.parametrize(
    ("environment", "refusal"),
    [
        ({}, "PEERTILE_MULTICAST=1 is not set"),
        ({"PEERTILE_MULTICAST": "0"}, "PEERTILE_MULTICAST=1 is not set"),
        ({"PEERTILE_MULTICAST": "1"}, None),
        ({"PEERTILE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}, "NCCL_NVLS_ENABLE=0 forbids it"),
        ({"PEERTILE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "1"}, None),
        (
            {"PEERTILE_MULTICAST": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"},
            "TORCH_SYMM_MEM_DISABLE_MULTICAST=1 forbids it",
        ),
        ({"PEERTILE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}, "NVSHMEM_DISABLE_NVLS=1 forbids it"),
        ({"NVSHMEM_DISABLE_NVLS": "1"}, "NVSHMEM_DISABLE_NVLS=1 forbids it"),
    ],
)
def test_the_user_opts_in_and_any_veto_goes_first(environment, refusal):
    assert consent_refusal(read_config(environment)) == refusal


@pytest.mark.slow
def test_one_module_alone_names_the_drivers_multicast_functions():
    named = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [getattr(node, "attr", None), getattr(node, "id", None), getattr(node, "name", None)]
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.append(node.value if node.value.startswith("cuMulticast") else None)
            if any(isinstance(n, str) and n.lower().startswith("cumulticast") for n in names):
                named.add(path.relative_to(PACKAGE).as_posix())
    assert named == {"runtime/drivers/cuda_multicast.py"}


class Forbidden:
    """The driver's bindings, of which no multicast function may be touched."""

    def __init__(self, real):
        self.real = real

    def __getattr__(self, name):
        assert "ulticast" not in name, f"{name} was touched without the opt-in"
        return getattr(self.real, name)


def test_without_the_opt_in_no_multicast_function_is_touched(monkeypatch):
    kinds = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1, CU_MEM_HANDLE_TYPE_FABRIC=8)
    bindings = SimpleNamespace(CUmemAllocationHandleType=kinds)
    module = importlib.import_module("peertile.runtime.drivers.cuda_multicast")
    cuda = importlib.import_module("peertile.runtime.drivers.cuda")
    real = importlib.import_module
    monkeypatch.setattr(
        module.importlib, "import_module", lambda name: Forbidden(bindings) if name.startswith("cuda.") else real(name)
    )
    for environment in ({}, {"PEERTILE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}):
        monkeypatch.setattr(cuda, "config", lambda environment=environment: read_config(environment))
        device = object.__new__(cuda.CudaDevice)
        assert isinstance(device.multicast_objects(), str)
    # The stand-in does what it says.
    with pytest.raises(AssertionError, match="was touched without the opt-in"):
        module.MulticastCalls().create(fabrics.GRAIN, 2, ShareKind.FD)


# ---------------------------------------------------------------- what a system can


@pytest.mark.parametrize(
    ("attributes", "refusal"),
    [
        ({}, None),
        ({"COMPUTE_CAPABILITY_MAJOR": 8}, "a GPU is older than sm_90"),
        ({"MULTICAST_SUPPORTED": 0}, "a GPU has no multicast; it needs NVSwitch"),
        ({"driver": 12000}, "the NVIDIA driver supports CUDA 12.0, multicast needs 12.1"),
    ],
)
def test_a_device_says_why_it_has_none(attributes, refusal):
    fabric = fabrics.Fabric()
    api = fabrics.Api(fabric, 0, **attributes)
    assert MulticastObjects(fabrics.Calls(fabric, 0), fabrics.using(api), 0).refusal() == refusal
    assert fabric.log == []


@pytest.mark.parametrize(
    ("reasons", "devices", "kind", "answer"),
    [
        (["", ""], ["a", "b"], ShareKind.FD, ""),
        (["", ""], ["a", "b"], ShareKind.FABRIC, ""),
        (["no", "no"], ["a", "b"], ShareKind.FD, "no"),
        (["", "no"], ["a", "b"], ShareKind.FD, "rank 1: no"),
        ([""], ["a"], ShareKind.FD, "one rank needs none"),
        (["", ""], ["a", "a"], ShareKind.FD, "two ranks share a GPU"),
        (["", ""], ["a", "b"], ShareKind.IPC, "memory shared by ipc cannot be bound to it"),
    ],
)
def test_ranks_agree_from_the_same_facts(reasons, devices, kind, answer):
    assert agree_on_multicast(reasons, list(enumerate(devices)), kind) == answer


def test_a_heap_tells_how_multicast_is_done_and_why():
    with pt.SymmetricHeap(pt.init(), 1 << 16) as heap:
        assert heap.window is None
        assert heap.multicast_path == MulticastPath(False, "cpu has no fabric")
        assert str(heap.multicast_path) == "software: cpu has no fabric"
    assert str(MulticastPath(True, "")) == "fabric"


# ---------------------------------------------------------------- made by all, or by none


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_ranks_make_a_mapping_and_give_it_back(ranks):
    fabric = fabrics.Fabric()
    assert spawn(object_ranks.maps, ranks, fabric) == [4 << 20] * ranks
    calls = [call for call, _ in fabric.log]
    assert calls.count("create") == 1
    assert calls.count("import") == ranks - 1
    for call in ("add_device", "bind", "map", "unmap", "unbind", "release"):
        assert calls.count(call) == ranks, call
    steps = ["add_device", "bind", "map", "unmap"]
    for before, after in itertools.pairwise(steps):
        last = max(k for k, c in enumerate(calls) if c == before)
        assert last < calls.index(after), f"{after} before every {before}"
    # The object goes where it was imported first, and last where it was made.
    assert [d for c, d in fabric.log if c == "release"][-1] == 0
    assert fabric.left() == []


@pytest.mark.parametrize("who", [0, 1, 2])
@pytest.mark.parametrize("call", ["create", "import", "add_device", "bind", "map", "set_access"])
def test_a_step_that_fails_on_one_rank_is_undone_on_all(call, who):
    if (call == "create") != (who == 0) and call in ("create", "import"):
        who = {"create": 0, "import": 1}[call]
    fabric = fabrics.Fabric(fail=(call, who))
    results = spawn(object_ranks.fails, 3, fabric)
    text = f"CudaError: {call}: operation not permitted (CUDA_ERROR_NOT_PERMITTED)"
    for rank, (error, reserved) in enumerate(results):
        assert reserved == []
        assert error == (text if rank == who else f"PeerFailed: rank {who} failed: {text}")
    assert fabric.left() == []


def test_steps_out_of_order_are_refused_by_name():
    fabric = fabrics.Fabric()
    objects = MulticastObjects(fabrics.Calls(fabric, 0), fabrics.using(fabrics.Api(fabric, 0)), 0)
    made = objects.create(fabrics.GRAIN, 1, ShareKind.FD)
    with pytest.raises(UsageError) as caught:
        objects.bind(made, object_ranks.Segment(0, fabrics.GRAIN))
    assert str(caught.value) == (
        "multicast object: bind: expected an object that is added, got one that is new; every device is added before "
        "any memory is bound, and bound before it is mapped"
    )
    with pytest.raises(UsageError):
        objects.map(made)
    objects.add_device(made)
    objects.bind(made, object_ranks.Segment(0, fabrics.GRAIN))
    with pytest.raises(UsageError):
        objects.add_device(made)
    assert objects.map(made) == made.address
    objects.free(made)
    assert made.state is MulticastState.FREED
    objects.free(made)
    assert [c for c, _ in fabric.log].count("release") == 1
    assert fabric.left() == []


def test_sizes_are_rounded_up_to_what_an_object_can_have():
    fabric = fabrics.Fabric()
    objects = MulticastObjects(fabrics.Calls(fabric, 0), fabrics.using(fabrics.Api(fabric, 0)), 0)
    sizes = [objects.aligned_size(n, 2, ShareKind.FD) for n in (1, fabrics.GRAIN, fabrics.GRAIN + 1)]
    assert sizes == [fabrics.GRAIN, fabrics.GRAIN, 2 * fabrics.GRAIN]


def test_a_multicast_setting_is_read_like_the_others():
    assert read_config({"PEERTILE_MULTICAST": "1"}).multicast
    with pytest.raises(ArgumentError):
        read_config({"PEERTILE_CPU_THREADS": "none"})
