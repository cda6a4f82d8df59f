"""Reports of an hour on the lake: they follow the tables that they draw."""

from datetime import UTC, datetime, timedelta
from io import BytesIO

import dagster as dg
import polars as pl
import pytest
from matplotlib.image import imread

from branchlake_dagster import table_metadata
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.sda.assets.alerts import CONJUNCTION_ALERTS
from branchlake_dagster.sda.assets.associations import ASSOCIATIONS
from branchlake_dagster.sda.assets.hour_reports import HOUR_REPORTS, hour_reports
from branchlake_dagster.sda.assets.tracks import FUSED_TRACKS
from branchlake_dagster.sda.graph.quality import fusion_checks
from branchlake_dagster.sda.partitions import windows
from branchlake_dagster_tests.harness import Project, project
from branchlake_dagster_tests.sda.test_registry_lake import empty_lake

__all__ = ["empty_lake"]

pytestmark = pytest.mark.spark

HOUR = datetime(2026, 8, 8, 3, tzinfo=UTC)
PARTITION = HOUR.strftime(windows.fmt)
CHECKS = [check for check in fusion_checks if {key.asset_key for key in check.check_keys} == {HOUR_REPORTS}]


class Table:
    """An input whose rows a test sets."""

    def __init__(self, key: dg.AssetKey, *, by_hour: bool) -> None:
        self.key, self.rows = key, pl.DataFrame()

        @dg.asset(
            key=key,
            partitions_def=windows if by_hour else None,
            metadata=table_metadata(partition_by="window_start" if by_hour else None, require_checks=False),
        )
        def table() -> pl.DataFrame:
            return self.rows

        self.asset = table
        self.partition = PARTITION if by_hour else None

    def publish(self, p: Project, rows: list[dict[str, object]]) -> None:
        self.rows = pl.DataFrame(rows, infer_schema_length=None)
        assert p.settle(p.run(self.key, partition=self.partition)).publication


def association(source: str, number: int, result: str, distance: float | None) -> dict[str, object]:
    return {
        "window_start": HOUR,
        "source_kind": source.partition("-")[0],
        "source_id": source,
        "observation_id": f"{source}/{number}",
        "result": result,
        "normalized_distance": distance,
        "degrees_of_freedom": 4,
    }


def track(sat_no: int, *, is_preferred: bool) -> dict[str, object]:
    return {
        "window_start": HOUR,
        "sat_no": sat_no,
        "epoch": HOUR + timedelta(minutes=30),
        "x_km": 7000.0,
        "y_km": 10.0 * sat_no,
        "z_km": 100.0,
        "is_preferred": is_preferred,
        "catalogue_miss_km": 0.3,
        "position_sigma_km": 0.1,
        "prior_sigma_km": 1.0,
        "catalogue_epoch": HOUR - timedelta(days=2),
    }


def alert(alert_id: str, sequence: int, kind: str, priority: str = "high") -> dict[str, object]:
    return {
        "window_start": HOUR,
        "alert_id": alert_id,
        "sequence": sequence,
        "kind": kind,
        "tca": HOUR + timedelta(minutes=5),
        "miss_distance_km": 0.4,
        "priority": priority,
    }


def reports(p: Project) -> dict[str, dict[str, object]]:
    rows = p.lake.catalog(MAIN).load_table(tuple(HOUR_REPORTS.path)).scan().to_arrow().to_pylist()
    return {row["name"]: row for row in rows}


def draw(p: Project) -> set[str]:
    """Draw the hour, and return the names of the pictures on the asset's page."""
    run_id = p.run(HOUR_REPORTS, partition=PARTITION)
    assert p.settle(run_id).publication
    (event,) = p.instance.fetch_materializations(
        dg.AssetRecordsFilter(asset_key=HOUR_REPORTS, asset_partitions=[PARTITION]), limit=1
    ).records
    shown = event.asset_materialization.metadata
    return {
        name
        for name, value in shown.items()
        if isinstance(value, dg.MarkdownMetadataValue) and "data:image/png;base64," in (value.md_str or "")
    }


def test_an_hour_is_drawn_again_when_its_tables_change(empty_lake):
    associations, tracks = Table(ASSOCIATIONS, by_hour=True), Table(FUSED_TRACKS, by_hour=True)
    alerts = Table(CONJUNCTION_ALERTS, by_hour=False)
    assets = (associations.asset, tracks.asset, alerts.asset, hour_reports)
    with project(empty_lake, *assets, *CHECKS) as p:
        associations.publish(
            p,
            [
                *(association("radar-1", k, "confirmed", 2.0 + k) for k in range(9)),
                association("radar-2", 0, "reassigned", 2.0),
                association("optical-1", 0, "uncorrelated", None),
            ],
        )
        # There are no tracks and no alerts yet.
        assert draw(p) == {"outcomes", "residuals"}
        found = reports(p)
        assert {name: row["drawn_rows"] for name, row in found.items()} == {"outcomes": 3, "residuals": 2}
        assert {row["window_start"] for row in found.values()} == {HOUR}
        for row in found.values():
            assert row["media_type"] == "image/png"
            assert imread(BytesIO(row["image"])).shape == (403, 720, 4)

        tracks.publish(p, [track(k, is_preferred=k % 2 == 0) for k in range(1, 6)])
        alerts.publish(
            p,
            [
                alert("a", 0, "insert"),
                alert("a", 0, "retract"),
                alert("a", 1, "insert", "low"),
                alert("b", 0, "insert"),
                alert("b", 0, "retract"),
            ],
        )
        every = {"outcomes", "residuals", "track_quality", "ground_tracks", "alerts"}
        assert draw(p) == every
        found = reports(p)
        assert {name: row["drawn_rows"] for name, row in found.items()} == {
            "outcomes": 3,
            "residuals": 2,
            "track_quality": 5,
            "ground_tracks": 5,
            "alerts": 1,
        }
