"""Each stage of a backfill compared with what it replaces, on the real Nessie."""

import time
from dataclasses import replace
from typing import Any

import pytest

from branchlake_dagster.cli.incremental import backfill
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.incremental.backfill.compare import EarlierStateLost, compare_stage, hash_before
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.library_internals.dagster import backfill_of
from branchlake_dagster_tests.harness import Project
from branchlake_dagster_tests.incremental.backfill.stages import Pipeline, follow, place, requested

DAYS = ("2026-08-01", "2026-08-02")


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


def test_the_state_before_is_found_without_the_command_or_is_lost(p: Project, pipeline: Pipeline) -> None:
    number, _ = requested(p, pipeline, *DAYS)
    state = backfill_of(p.instance, number, p.graph)
    assert state is not None
    head = p.lake.nessie.reference(MAIN).hash
    assert hash_before(p.lake, state) == head
    in_dagster = replace(state, tags={}, requested_at=time.time())
    assert hash_before(p.lake, in_dagster) == head
    p.settle(p.run(pipeline.events.key, partition=DAYS[0]))
    assert hash_before(p.lake, in_dagster) == head
    assert hash_before(p.lake, replace(in_dagster, requested_at=0.0)) is None
    stage, *_ = backfill.stages(place(p), backfill.Asked(pipeline.events.key, DAYS, ""))
    new = compare_stage(p.graph, p.lake, stage, None).total
    assert (new.before.rows, new.after.rows, new.share) == (0, 4, 1.0)
    with pytest.raises(EarlierStateLost):
        compare_stage(p.graph, p.lake, stage, "0123456789abcdef" * 4)
