"""A meeting of some ranks must not shift the count of meetings of all."""

from peertile.checker.check import check


def test_a_subgroup_meets_without_the_others() -> None:
    def main(group) -> None:
        part = group.subgroup((0, 1))
        if part is not None:
            for k in range(3):
                assert part.exchange(bytes([part.rank, k]), "part") == [bytes([0, k]), bytes([1, k])]
        assert group.exchange(bytes([group.rank]), "all") == [b"\0", b"\1", b"\2"]

    assert check(main, 3, schedules=50).clean
