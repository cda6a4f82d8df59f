"""Which partitions a position speaks of: of others nothing has been consumed."""

from __future__ import annotations

import dagster as dg
import pytest

from branchlake_dagster.incremental.affected_partitions import is_covered_partition, partition_coverage

AUGUST = dg.DailyPartitionsDefinition("2026-08-01", end_date="2026-08-04")


@pytest.mark.parametrize(
    ("start", "end", "key", "covered"),
    [
        ("2026-08-01", "2026-08-04", "2026-08-03", True),
        ("2026-08-01", "2026-08-05", "2026-08-04", False),
        ("2026-07-01", "2026-08-04", "2026-08-01", True),
        ("2026-07-01", "2026-08-04", "2026-07-31", False),
    ],
)
def test_windows_that_came_later_at_either_end_are_not_covered(
    start: str, end: str, key: str, covered: bool
) -> None:
    later = dg.DailyPartitionsDefinition(start, end_date=end)
    assert is_covered_partition(partition_coverage(AUGUST), later, key) is covered


def test_keys_that_came_later_are_not_covered() -> None:
    both = dg.MultiPartitionsDefinition({"day": AUGUST, "kind": dg.StaticPartitionsDefinition(["a"])})
    later = dg.MultiPartitionsDefinition({"day": AUGUST, "kind": dg.StaticPartitionsDefinition(["a", "b"])})
    told = partition_coverage(both)
    assert is_covered_partition(told, later, "2026-08-01|a")
    assert not is_covered_partition(told, later, "2026-08-01|b")


def test_no_window_yet_covers_nothing() -> None:
    none = dg.DailyPartitionsDefinition("2099-01-01")
    assert not is_covered_partition(partition_coverage(none), AUGUST, "2026-08-01")


def test_a_window_whose_exclusion_was_removed_is_not_covered() -> None:
    """Nothing was consumed for it while it did not exist."""
    weekdays = dg.TimeWindowPartitionsDefinition(
        start="2026-08-01",
        end="2026-08-15",
        fmt="%Y-%m-%d",
        cron_schedule="0 0 * * *",
        exclusions=["0 0 * * 0,6"],
    )
    all_days = dg.DailyPartitionsDefinition("2026-08-01", end_date="2026-08-15")
    recorded = partition_coverage(weekdays)
    assert is_covered_partition(recorded, weekdays, "2026-08-04")
    assert not is_covered_partition(recorded, all_days, "2026-08-08")
    assert is_covered_partition(partition_coverage(all_days), weekdays, "2026-08-04")
