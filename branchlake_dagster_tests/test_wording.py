"""Numbers and names in sentences."""

from __future__ import annotations

import pytest

from branchlake_dagster.wording import format_count, format_names, pluralize


@pytest.mark.parametrize(
    ("number", "told"), [(0, "0 runs"), (1, "1 run"), (2, "2 runs"), (1200, "1,200 runs")]
)
def test_a_number_has_the_noun_that_goes_with_it(number: int, told: str) -> None:
    assert format_count(number, "run") == told


def test_plurals_of_their_own() -> None:
    assert [format_count(number, "branch", "branches") for number in (1, 2)] == ["1 branch", "2 branches"]
    assert [pluralize(number, "it", "them") for number in (0, 1, 2)] == ["them", "it", "them"]


def test_names_have_the_noun_that_goes_with_them() -> None:
    assert format_names("column", ["a"]) == "column a"
    assert format_names("column", ["a", "b"]) == "columns a, b"
