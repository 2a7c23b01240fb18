"""Each way in which memory of a GPU reaches another rank, forced: it carries values, or is refused on every rank."""

import peer_ranks
import pytest

import peertile as pt

pytestmark = pytest.mark.feature("D3", "cuda")
PATHS = [pt.ShareKind.FD, pt.ShareKind.IPC]


@pytest.mark.cuda
@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.value)
def test_memory_travels_between_processes_that_may_share_a_gpu(path):
    """Where they do, their programs run by turns."""
    found = pt.spawn(peer_ranks.gathers_over, 2, (path,), model=pt.RankModel.PROCESSES, timeout_s=50)
    assert found == [path.value] * 2


@pytest.mark.cuda2
@pytest.mark.parametrize("model", list(pt.RankModel), ids=lambda m: m.value)
@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.value)
def test_memory_travels_in_the_way_that_is_forced(path, model):
    found = pt.spawn(peer_ranks.gathers_over, 2, (path,), model=model, timeout_s=50)
    if (path, model) == (pt.ShareKind.IPC, pt.RankModel.THREADS):  # it is between processes
        refusal = (
            "share: an ipc segment is mapped by one device of a process, and cuda:{} has it already; make the segment "
            "with kind fd to map it on cuda:{} as well"
        )
        assert found == [("UnsupportedError", refusal.format(1 - rank, rank)) for rank in range(2)]
    else:
        assert found == [path.value] * 2


@pytest.mark.cuda2
def test_fabric_memory_works_or_is_refused_on_every_rank():
    """It needs a permission that few machines give."""
    found = pt.spawn(peer_ranks.gathers_over, 2, (pt.ShareKind.FABRIC,), timeout_s=50)
    if found != ["fabric"] * 2:
        assert found[0] == found[1]
        name, text = found[0]
        assert name == "UnsupportedError"
        assert text.startswith("SymmetricHeap: memory path: expected fabric, which rank 0 on cuda:")
        assert "`peertile info` says why" in text
