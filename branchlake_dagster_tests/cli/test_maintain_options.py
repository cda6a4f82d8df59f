"""How the options of `branchlake maintain` are read."""

import pytest

from branchlake_dagster.cli.maintain import _build_options


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        (None, ()),
        ("day, id", ("day", "id")),
        ("bucket(8, id), days(at) DESC,", ("bucket(8, id)", "days(at) DESC")),
    ],
)
def test_columns_are_separated_by_commas_outside_of_parentheses(
    text: str | None, columns: tuple[str, ...]
) -> None:
    assert _build_options("sort", text, False, None).compaction.sort_columns == columns
