"""A log of alerts that a test publishes entry by entry, in the pipeline's own table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import dagster as dg
import polars as pl

from branchlake_dagster import table_metadata
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.sda.alerts.entry_names import ALERT_TABLE
from branchlake_dagster_tests.harness import Project, project

NOON = datetime(2026, 8, 11, 12, tzinfo=UTC)
KEY = tuple(ALERT_TABLE.split("."))
TIME = pl.Datetime("us", "UTC")
SCHEMA: dict[str, Any] = {
    "alert_id": pl.String,
    "sequence": pl.Int64,
    "kind": pl.String,
    "reason": pl.String,
    "window_start": TIME,
    "sat1_object_designator": pl.Int64,
    "sat2_object_designator": pl.Int64,
    "priority": pl.String,
    "tca": TIME,
    "miss_distance_km": pl.Float64,
    "relative_speed_km_s": pl.Float64,
    "collision_probability": pl.Float64,
    "max_collision_probability": pl.Float64,
    "hard_body_radius_m": pl.Float64,
    "sat1_state_source": pl.String,
    "sat2_state_source": pl.String,
    "reported_at": TIME,
    "sat1_observation_ids": pl.List(pl.String),
    "sat2_observation_ids": pl.List(pl.String),
}


def alert_id(number: int) -> str:
    """The id of the test's alert of that number. Ids are ordered as the numbers are."""
    return f"00000000-0000-5000-8000-{number:012d}"


def entry(number: int, sequence: int = 0, kind: str = "insert", **fields: Any) -> dict[str, Any]:
    """An entry of the test's alert of that number; alert N is of the pair N and N + 100."""
    facts: dict[str, Any] = {
        "alert_id": alert_id(number),
        "sequence": sequence,
        "kind": kind,
        "reason": "canceled" if kind == "retract" else "corrected" if sequence else "new",
        "sat1_object_designator": number,
        "sat2_object_designator": number + 100,
        "priority": "medium",
        "tca": NOON + timedelta(minutes=number),
        "miss_distance_km": 0.5,
        "relative_speed_km_s": 11.0,
        "collision_probability": 2e-5,
        "max_collision_probability": None,
        "hard_body_radius_m": 4.0,
        "sat1_state_source": "track",
        "sat2_state_source": "elements",
        "sat1_observation_ids": ["o1"] if kind == "insert" else [],
        "sat2_observation_ids": [],
        **fields,
    }
    return {"window_start": facts["tca"].replace(minute=0), **facts}


class AlertLog:
    """The log, and the runs that publish to it."""

    def __init__(self, lake: Lakehouse) -> None:
        self.lake = lake
        self.project: Project
        self._entries: list[dict[str, Any]] = []
        self._reported_at = NOON - timedelta(hours=6)

        def define(write_mode: str) -> dg.AssetsDefinition:
            @dg.asset(
                key=dg.AssetKey(KEY),
                metadata=table_metadata(
                    write_mode=write_mode,
                    layout=["day(tca)"],
                    require_checks=False,
                ),
            )
            def conjunction_alerts() -> pl.DataFrame:
                rows = [{"reported_at": self._reported_at, **one} for one in self._entries]
                return pl.DataFrame(rows, schema=SCHEMA)

            return conjunction_alerts

        self._append, self._replace = define("append"), define("replace_table")

    def publish(self, *entries: dict[str, Any], replace: bool = False) -> None:
        """Publish entries in one run; with `replace` they become the whole table, as in a rebuild."""
        self._entries, self._reported_at = list(entries), self._reported_at + timedelta(minutes=1)
        asset = self._replace if replace else self._append
        with project(self.lake, asset, instance=None) as p:
            p.settle(p.run(asset.key))

    def table(self) -> Any:
        """The table on `main`."""
        return self.lake.catalog().load_table(KEY)

    def drop(self) -> None:
        """Drop the table on `main`, if there is one."""
        if self.lake.catalog().table_exists(KEY):
            self.lake.catalog().drop_table(KEY)


@contextmanager
def alert_log(lake: Lakehouse) -> Iterator[AlertLog]:
    """A log without a table, which is dropped afterwards: the lake is shared with other tests."""
    log = AlertLog(lake)
    log.drop()
    try:
        yield log
    finally:
        log.drop()
