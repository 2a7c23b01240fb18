"""A rank that torch.distributed brings together, started as `torch_ranks.py RANK SIZE FOLDER CASE`. No pytest here."""

import sys

import torch
import torch.distributed as dist
from where import place

import peertile as pt
import peertile.torch as ptt
from peertile.errors import PeertileError


def told(call):
    try:
        call()
    except PeertileError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def world(rank, size):
    """Torch's world is the group, with no variables of a launcher."""
    group = ptt.init()
    assert (group.rank, group.size, group.model) == (rank, size, pt.RankModel.PROCESSES)
    assert ptt.init(dist.group.WORLD) is group
    x = torch.arange(1000.0) * (rank + 1)
    theirs = x.cpu().clone()  # gloo gathers on the host alone
    dist.all_reduce(theirs)
    assert torch.equal(ptt.all_reduce(x, dist.group.WORLD).cpu(), theirs)
    assert torch.equal(ptt.all_reduce(torch.ones(3)), torch.full((3,), float(size)))
    gathered = [torch.empty(4, device="cpu") for _ in range(size)]
    dist.all_gather(gathered, x[:4].cpu().clone())
    assert torch.equal(ptt.all_gather(x[:4], group).cpu(), torch.cat(gathered))
    w = torch.ones(2, 1000, requires_grad=True)
    ptt.linear_reduce(x.view(1, 1000), w).sum().backward()
    assert torch.equal(w.grad, x.expand(2, 1000))
    pair = group.subgroup([size - 1, 0]) if size > 1 else None
    if pair is not None:
        assert ptt.all_reduce(torch.tensor([rank]), pair).tolist() == [size - 1]
        ptt.close(pair)
    ptt.close()
    return "done"


def part(rank, size):
    """A process group of the last ranks, in another order than torch's world."""
    members = dist.new_group(list(range(1, size)))
    if rank == 0:
        return told(lambda: ptt.init(members))
    group = ptt.init(members)
    assert (group.rank, group.size) == (rank - 1, size - 1)
    x = ptt.all_reduce(torch.tensor([float(rank)]), members)
    assert x.item() == sum(range(1, size))
    return told(lambda: ptt.init(dist.group.WORLD))


def main():
    rank, size, folder, case = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    if case == "uninitialised":
        print(told(ptt.init))
        return
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    with place():
        print(globals()[case](rank, size))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
