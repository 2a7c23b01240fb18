"""What a driver adds to the record of a wait is at the end of its message, whoever explains it."""

import pytest

import peertile as pt
import peertile.language as T
from peertile.launch import _explain_alone
from peertile.runtime.context import explain
from peertile.runtime.driver import FaultKind, FaultRecord


@pt.kernel
def plain(z: T.Exclusive):
    z.store(T.zeros(z.tile_shape, z.dtype))


@pytest.mark.parametrize("note", ["", "meanwhile the cat was fed"])
def test_a_note_ends_the_message(note):
    record = FaultRecord(FaultKind.WAIT_TIMEOUT, "plain", 3, got=1, limit=2, slot=5, note=note)
    more = f"; {note}" if note else ""
    op = plain(pt.zeros((4,), pt.f32).partition(4))
    assert (
        str(_explain_alone(record, op.compiled(), None, "plain", None))
        == f"wait for a word, slot 5: nothing came within 30 s; expected 2, last seen 1{more} (unknown place) in plain"
    )
    assert str(explain(record, None)) == f"a wait reached its bound: expected 2, last seen 1{more} in plain"
