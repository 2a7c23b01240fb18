"""The table of all ops: every one has a rule of its own, a case, a rejection, and a meaning or an expansion."""

from tests.ir.cases import CASES
from tests.ir.rejected import REJECTED

from peertile.ir import ops
from peertile.ir.core import Op
from peertile.meaning import MEANINGS

# Without operands, attributes and results of their own, there is nothing to check beyond the counts.
NO_RULE = {ops.Suspend, ops.SyncPrograms}


def test_no_op_is_a_kind_of_another() -> None:
    # So that isinstance and match mean one op.
    assert [cls.NAME for cls in ops.ALL_OPS if cls.__bases__ != (Op,)] == []


def test_names_are_unique_and_every_class_is_listed() -> None:
    def leaves(cls: type[Op]) -> set[type[Op]]:
        return {cls, *(c for sub in cls.__subclasses__() for c in leaves(sub))}

    ours = {cls for cls in leaves(Op) - {Op} if cls.__module__ == ops.__name__}
    assert set(ops.ALL_OPS) == ours
    assert len(ops.BY_NAME) == len(ops.ALL_OPS)


def test_every_op_has_a_verify_rule() -> None:
    assert {cls for cls in ops.ALL_OPS if cls.verify is Op.verify} == NO_RULE


def test_every_op_has_a_case_and_a_rejection() -> None:
    assert set(CASES) == set(ops.BY_NAME)
    assert {name for name, _, _ in REJECTED} == set(ops.BY_NAME)


def test_every_primitive_op_has_a_meaning_and_no_other() -> None:
    assert set(MEANINGS) == set(ops.PRIMITIVE)


def test_every_attribute_has_a_type() -> None:
    assert {name for cls in ops.ALL_OPS for name in cls.ATTRS} == set(ops.ATTR_TYPES)


def test_every_class_has_a_docstring() -> None:
    assert [cls.NAME for cls in ops.ALL_OPS if not cls.__doc__] == []
