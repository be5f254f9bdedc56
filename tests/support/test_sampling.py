"""Which cases of costly tests run by default."""

from dataclasses import dataclass

import pytest

from support.sampling import by_default, cases_by_default, left_out


@dataclass(frozen=True)
class Item:
    """The part of an item of pytest that sampling uses."""

    nodeid: str
    number: int | None = None

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        assert name == "sampled"
        return None if self.number is None else pytest.mark.sampled(self.number).mark


CASES = [Item(f"test_a.py::test_costly[{letter}-{digit}]", 4) for letter in "abcd" for digit in range(4)]


def test_the_number_of_cases() -> None:
    others = [Item("test_a.py::test_cheap[a]"), Item("test_b.py::test_costly[a]", 1)]
    assert len(left_out([*CASES, *others])) == len(CASES) - 4
    assert not left_out([*CASES, *others]) & set(others)


def test_the_same_cases_in_any_order() -> None:
    assert left_out(CASES) == left_out(CASES[::-1])


def test_cases_that_are_marked_alone_are_counted_alone() -> None:
    largest = Item("test_a.py::test_costly[e-0]", 0)
    assert left_out([*CASES, largest]) == left_out(CASES) | {largest}


def test_a_case_that_runs_is_not_always_the_first_one() -> None:
    assert set(CASES[:4]) & left_out(CASES)


def test_a_value_that_is_not_there_cannot_be_chosen() -> None:
    assert by_default([1, 2], [2])[1] == 2
    with pytest.raises(ValueError, match=r"^chosen must be among the values, got \[3\]$"):
        by_default([1, 2], [2, 3])


def test_a_case_has_a_value_for_each_parameter() -> None:
    left, chosen = cases_by_default([(1, "a"), (2, "b")], [(2, "b")])
    assert chosen == (2, "b") and left.values == (1, "a") and left.marks == (pytest.mark.slow,)
