"""Each stage of a backfill compared with what it replaces, on the real Nessie."""

import time
from collections.abc import Mapping
from typing import Any

import pytest

from branchlake_dagster.cli.incremental import backfill
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster_tests.harness import Project
from branchlake_dagster_tests.incremental.backfill.stages import Pipeline, follow, place

DAYS = ("2026-08-01", "2026-08-02")


def requested(p: Project, pipeline: Pipeline, *days: str, **options: Any) -> tuple[str, Mapping[str, str]]:
    """A backfill of the events, with the tags that Dagster's daemon gives its runs."""
    where = place(p)
    what = backfill.asked(where, pipeline.events.key.to_user_string(), days, everything=False)
    assert what is not None
    number = backfill.run(where, what, time.time(), **options)
    found = p.instance.get_backfill(number)
    assert found is not None
    return number, {**found.tags, "dagster/backfill": number}


def totals(p: Project, number: str) -> dict[str, tuple[int, int, float, Any]]:
    """By asset the rows before and now, the share of changed rows, and the sums of the prices."""
    return {
        one.asset.path[-1]: (
            one.total.before.rows,
            one.total.after.rows,
            one.total.share,
            one.total.sums["price"],
        )
        for one in backfill.compare(place(p), number)
    }


def test_each_stage_is_compared_with_what_it_was_before(p: Project, pipeline: Pipeline) -> None:
    number, tags = requested(p, pipeline, *DAYS)
    assert totals(p, number) == {
        "events": (4, 4, 0.0, (22, 22)),
        "daily": (2, 2, 0.0, (22, 22)),
        "total": (2, 2, 0.0, (44, 44)),
    }
    pipeline.factor = 7
    p.settle(p.run(pipeline.events.key, partition=DAYS[1], tags=dict(tags)))
    follow(p)
    assert totals(p, number) == {
        "events": (4, 4, 0.5, (22, 88)),
        "daily": (2, 2, 0.5, (22, 88)),
        "total": (2, 2, 0.5, (44, 176)),
    }
    (events,) = backfill.compare(place(p), number, pipeline.events.key.to_user_string())
    shares = {name: one.share for name, one in events.partitions.items()}
    assert shares == {DAYS[0]: 0.0, DAYS[1]: 1.0}
    (total,) = backfill.compare(place(p), number, pipeline.total.key.to_user_string())
    assert total.keys == ("day",)
    with pytest.raises(ConfigurationError):
        backfill.compare(place(p), number, pipeline.report.key.to_user_string())
