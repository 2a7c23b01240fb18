"""Storages whose bytes somebody else sees too, and which of them overlap. Owns no memory and decides no conflict.

Memory of others can be wrapped any number of times, and memory of ours can come back through another library. Each
wrapping is a storage of its own, with its own owner; those whose bytes overlap share one dict of claims and one of
borrows, so that leases take them for what they are: the same memory. What was never exported or wrapped is reached
through one storage alone, and is not known here.

Ranges are found through buckets of addresses; a storage is in all that it touches.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Final

from peertile.runtime.lease import claims_lock
from peertile.runtime.storage import Storage, changes

__all__ = ["join"]

_BUCKET_BITS: Final = 24

_buckets: Final[dict[int, dict[int, weakref.ref[Storage]]]] = {}
"""Storages by what of their address is above the bits of a bucket, then by identity. Guarded by `claims_lock`, but
for the callbacks of collection, which pop from a dict and do no more."""


def join(storage: Storage) -> None:
    """Make `storage` known, and let it share claims and borrows with every known one that it overlaps."""
    if not storage.nbytes:
        return
    low, high = storage.address, storage.address + storage.nbytes
    own = [_buckets.setdefault(k, {}) for k in range(low >> _BUCKET_BITS, (high - 1 >> _BUCKET_BITS) + 1)]
    with claims_lock:
        for bucket in own:
            for other in _alive(bucket):
                if other is not storage and other.address < high and low < other.address + other.nbytes:
                    _unite(storage, other)
            if id(storage) not in bucket:
                bucket[id(storage)] = weakref.ref(storage, partial(_forget, bucket, id(storage)))


def _alive(bucket: dict[int, weakref.ref[Storage]]) -> list[Storage]:
    return [found for found in (ref() for ref in list(bucket.values())) if found is not None]


def _unite(storage: Storage, other: Storage) -> None:
    """One set of claims and borrows for all that share either's; `claims_lock` is held."""
    claims, gone = other.claims, storage.claims
    if claims is gone:
        return
    for stream, held in gone.items():
        claims.setdefault(stream, {}).update(held)
    other.borrows.update(storage.borrows)
    borrows = other.borrows
    for member in {id(s): s for bucket in list(_buckets.values()) for s in _alive(bucket)}.values():
        if member.claims is gone:
            member.claims, member.borrows = claims, borrows
    storage.claims, storage.borrows = claims, borrows
    changes.note()


def _forget(bucket: dict[int, weakref.ref[Storage]], key: int, ref: weakref.ref[Storage]) -> None:
    if bucket.get(key) is ref:
        bucket.pop(key, None)
