"""Which of some partitions a file's rows may belong to: the same as for the change as a whole."""

from __future__ import annotations

import random
from datetime import UTC, date, datetime, timedelta
from typing import Any

import dagster as dg
import pytest

from branchlake_dagster.history.ranges import Range, Ranges
from branchlake_dagster.incremental.affected_partitions import PartitionFinder, Reach, affected_partition_keys

DAYS = dg.DailyPartitionsDefinition("2026-08-01", end_date="2026-08-20", timezone="Europe/Berlin")
HOURS = dg.HourlyPartitionsDefinition("2026-08-01-00:00", end_date="2026-08-03-00:00")
KINDS = dg.StaticPartitionsDefinition(["a", "b", "c", "d"])
BOTH = dg.MultiPartitionsDefinition({"day": DAYS, "kind": KINDS})

_START = datetime(2026, 7, 30, tzinfo=UTC)


def moments(chance: random.Random) -> Ranges:
    low = _START + timedelta(minutes=chance.randrange(30 * 24 * 60))
    high = low + timedelta(minutes=chance.choice([0, 1, 600, 5000]))
    kind = chance.choice(["aware", "naive", "date", "anything", "nulls", "two"])
    if kind == "anything":
        return Ranges(anything=True)
    if kind == "nulls":
        return Ranges(nulls=True)
    if kind == "date":
        return Ranges((Range(low.date(), high.date()),))
    if kind == "naive":
        return Ranges((Range(low.replace(tzinfo=None), high.replace(tzinfo=None)),))
    later = timedelta(days=chance.randrange(4, 8))
    return Ranges((Range(low, high), *([Range(low + later, high + later)] if kind == "two" else [])))


def texts(chance: random.Random) -> Ranges:
    low, high = sorted(chance.choices("abcdeA", k=2))
    return chance.choice([Ranges((Range(low, high),)), Ranges(anything=True), Ranges()])


@pytest.mark.parametrize("reach", [Reach(), Reach(timedelta(hours=30), timedelta(hours=5), -1, 1)])
@pytest.mark.parametrize("definition", [DAYS, HOURS, KINDS, BOTH])
def test_it_finds_what_the_whole_change_affects(
    definition: dg.PartitionsDefinition[str], reach: Reach
) -> None:
    chance = random.Random(7)
    every = definition.get_partition_keys()
    some = chance.sample(list(every), k=len(every) // 2)
    finder = PartitionFinder(definition, some, reach=reach)
    for _ in range(300):
        changed: dict[str, Any] = {"": moments(chance)}
        if definition is KINDS:
            changed = {"": texts(chance)}
        if definition is BOTH:
            changed = {"day": moments(chance), "kind": texts(chance)}
            changed.pop(chance.choice(["day", "kind", "neither"]), None)
        assert finder.affected_keys(changed) == affected_partition_keys(definition, changed, reach=reach) & {
            *some
        }, changed


def test_without_partitions_nothing_is_found() -> None:
    assert (
        PartitionFinder(DAYS, []).affected_keys({"": Ranges((Range(date(2026, 8, 1), date(2026, 8, 2)),))})
        == set()
    )


@pytest.mark.parametrize("reach", [Reach(), Reach(timedelta(hours=30), timedelta(hours=5), -1, 1)])
@pytest.mark.parametrize("last", [date.max, datetime.max, datetime.max.replace(tzinfo=UTC)])
def test_the_end_of_the_calendar_marks_an_open_end(last: date, reach: Reach) -> None:
    first = datetime(2026, 8, 18, 12, tzinfo=UTC) if isinstance(last, datetime) else date(2026, 8, 18)
    if isinstance(last, datetime) and last.tzinfo is None:
        first = datetime(2026, 8, 18, 12)
    for low, expected in ((first, {"2026-08-18", "2026-08-19"}), (last, set())):
        changed = {"": Ranges((Range(low, last),))}
        keys = affected_partition_keys(DAYS, changed, reach=reach)
        assert expected <= keys
        assert bool(keys) is bool(expected)
        assert PartitionFinder(DAYS, DAYS.get_partition_keys(), reach=reach).affected_keys(changed) == keys
