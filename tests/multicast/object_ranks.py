"""What each rank of the tests of multicast mappings runs, over the stand-in fabric. No pytest."""

import fabric as fabrics

import peertile as pt
from peertile.comm.multicast import MulticastMapping
from peertile.errors import PeertileError
from peertile.runtime.driver import ShareKind
from peertile.runtime.drivers.cuda_multicast import MulticastObjects


class Segment:
    def __init__(self, rank, nbytes):
        self.handle = f"memory of rank {rank}"
        self.size = nbytes


def parts(fabric, rank):
    api = fabrics.Api(fabric, rank)
    return MulticastObjects(fabrics.Calls(fabric, rank), fabrics.using(api), rank), api


def maps(rank, fabric):
    """Makes a mapping and gives it back; the fabric asserts the order."""
    group = pt.init()
    objects, api = parts(fabric, group.rank)
    nbytes = objects.aligned_size(3 << 20, group.size, ShareKind.FD)
    mapping = MulticastMapping(group, objects, Segment(group.rank, nbytes), nbytes, ShareKind.FD)
    (made,) = fabric.objects
    assert mapping.address in {address for _, address in made.mappings}
    # Everybody has mapped when anybody goes on.
    assert len(made.mappings) == group.size
    assert made.bound == {r: f"memory of rank {r}" for r in range(group.size)}
    mapping.release()
    assert not api.reserved
    return nbytes


def fails(rank, fabric):
    """The error of this rank when one step fails on one of them."""
    group = pt.init()
    objects, api = parts(fabric, group.rank)
    nbytes = objects.aligned_size(1, group.size, ShareKind.FD)
    try:
        MulticastMapping(group, objects, Segment(group.rank, nbytes), nbytes, ShareKind.FD)
    except PeertileError as error:
        return f"{type(error).__name__}: {error}", sorted(api.reserved)
    except Exception as error:  # the stand-in does not translate
        return f"{type(error).__name__}: {error}", sorted(api.reserved)
    return "mapped", sorted(api.reserved)
