"""What a comparison of rows counts, from frames alone."""

from __future__ import annotations

import io
from datetime import date
from decimal import Decimal
from typing import Any

import dagster as dg
import polars as pl
from rich.console import Console

from branchlake_dagster.automation.backfill_comparison import (
    Comparison,
    Measures,
    StageComparison,
    add_sums,
    column_sums,
    count_changes,
    fingerprint_rows,
)
from branchlake_dagster.cli.backfill import comparison_to_dict, format_total, show_comparisons

COLUMNS = ["key", "value"]


def frame(*rows: tuple[Any, ...]) -> pl.DataFrame:
    return pl.DataFrame(list(rows), schema=COLUMNS, orient="row")


def changed(before: pl.DataFrame, after: pl.DataFrame, *keys: str) -> tuple[int, int]:
    return count_changes(fingerprint_rows(before, COLUMNS, keys), fingerprint_rows(after, COLUMNS, keys))


def test_an_updated_row_without_a_key_counts_once() -> None:
    before = frame(("a", 1), ("b", 2), ("c", 3))
    assert changed(before, before.reverse()) == (0, 3)
    assert changed(before, frame(("a", 1), ("b", 9), ("c", 3))) == (1, 3)
    assert changed(before, frame(("a", 1), ("b", 9), ("c", 3), ("d", 4))) == (2, 4)
    assert changed(before, frame(("a", 1))) == (2, 3)


def test_equal_rows_are_counted_as_often_as_they_occur() -> None:
    before = frame(("a", 1), ("a", 1), ("b", None))
    assert changed(before, frame(("a", 1), ("b", None))) == (1, 3)
    assert changed(before, before.vstack(before)) == (3, 6)


def test_with_keys_those_that_came_went_or_have_other_rows_count() -> None:
    before = frame(("a", 1), ("b", 2), ("c", 3))
    after = frame(("a", 1), ("b", 9), ("d", 4))
    assert changed(before, after, "key") == (3, 4)
    assert changed(before, frame(("a", 1), ("a", 1), ("b", 2), ("c", 3)), "key") == (1, 3)
    assert changed(frame((None, 1)), frame((None, 2)), "key") == (1, 1)


def test_lists_and_structures_are_compared_by_their_values() -> None:
    before = pl.DataFrame({"key": ["a", "b"], "value": [[{"x": [1]}], [{"x": [2]}]]})
    after = pl.DataFrame({"key": ["a", "b"], "value": [[{"x": [1]}], [{"x": [3]}]]})
    assert changed(before, before, "key") == (0, 2)
    assert changed(before, after, "key") == (1, 2)


def test_nothing_can_be_compared_with_nothing() -> None:
    empty = pl.DataFrame(schema={"row": pl.UInt64})
    assert count_changes(empty, empty) == (0, 0)
    assert Comparison().share == 0.0


def test_sums_are_those_of_numeric_columns_and_do_not_overflow() -> None:
    large = 2**63 - 1
    found = column_sums(
        pl.DataFrame(
            {
                "n": [large, large],
                "f": [0.5, float("nan")],
                "d": [Decimal("1.10"), None],
                "nothing": pl.Series([None, None], dtype=pl.Int64),
                "s": ["a", "b"],
                "t": [date(2026, 8, 1)] * 2,
            }
        )
    )
    assert found == {"n": 2 * large, "f": 0.5, "d": Decimal("1.10"), "nothing": None}
    assert column_sums(pl.DataFrame({"s": ["a"]})) == {}
    assert add_sums({"a": 1, "b": None}, {"b": 2, "c": 1.5}) == {"a": 1, "b": 2, "c": 1.5}
    assert add_sums({"a": Decimal("1.5")}, {"a": 0.5}) == {"a": 2.0}


STAGE = StageComparison(
    1,
    dg.AssetKey(["shop", "daily"]),
    (),
    {
        "2026-08-01": Comparison(Measures(1, {"price": 11}), Measures(1, {"price": 77}), 1, 1),
        "2026-08-02": Comparison(Measures(3, {"price": 5}), Measures(4, {"price": 5, "d": Decimal(2)}), 1, 4),
    },
)


def test_the_total_adds_up_the_partitions() -> None:
    whole = STAGE.total
    assert (whole.before.rows, whole.after.rows, whole.row_difference) == (4, 5, 1)
    assert (whole.changed_count, whole.compared_count, whole.share) == (2, 5, 0.4)
    assert whole.sums == {"price": (16, 82), "d": (None, 2)}


def test_the_comparison_is_shown_by_partition_and_in_total() -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    show_comparisons([STAGE], console)
    lines = console.export_text().splitlines()
    assert len(lines) == 2 + 3
    for part in ("2026-08-02", "+1", "25.0% (1 of 4 rows)", "d none → 2"):
        assert part in lines[3]
    assert "price 16 → 82" in lines[4]
    assert "price 16 → 82" in format_total(STAGE)


def test_the_comparison_for_programs() -> None:
    found = comparison_to_dict(STAGE)
    assert found["total"]["sums"]["d"] == {"before": None, "after": "2"}
    assert [one["partition"] for one in found["partitions"]] == ["2026-08-01", "2026-08-02"]
    assert found["partitions"][0]["share"] == 1.0
