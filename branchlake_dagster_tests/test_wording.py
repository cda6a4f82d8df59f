"""Numbers and names in sentences."""

from __future__ import annotations

import pytest

from branchlake_dagster.wording import format_count, format_names, format_printable, pluralize


@pytest.mark.parametrize(
    ("number", "told"), [(0, "0 runs"), (1, "1 run"), (2, "2 runs"), (1200, "1,200 runs")]
)
def test_a_number_has_the_noun_that_goes_with_it(number: int, told: str) -> None:
    assert format_count(number, "run") == told


def test_plurals_of_their_own() -> None:
    assert [format_count(number, "branch", "branches") for number in (1, 2)] == ["1 branch", "2 branches"]
    assert [pluralize(number, "it", "them") for number in (0, 1, 2)] == ["them", "it", "them"]


def test_control_characters_are_shown_and_not_sent() -> None:
    assert format_printable("a\x1b[2J\r\n\x9bé\ud800") == r"a\x1b[2J\r\n\x9bé\ud800"


def test_names_have_the_noun_that_goes_with_them() -> None:
    assert format_names("column", ["a"]) == "column a"
    assert format_names("column", ["a", "b"]) == "columns a, b"
