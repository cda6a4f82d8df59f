"""Commits as Spark makes them, without Spark: they name an application, but neither run nor step."""

from __future__ import annotations

import dagster as dg
from pyiceberg.expressions import AlwaysTrue, BooleanExpression

from branchlake_dagster import LakehouseResource, NessieCatalog
from branchlake_dagster.catalog.options import COMMIT_PROPERTY
from branchlake_dagster.runs.provenance import find_running_step

APPLICATION = "local-1"


def open_session(lakehouse: LakehouseResource) -> None:
    """Record the application for the running step, as the run's Spark session does for the step's code."""
    branch = lakehouse.run_branch
    assert branch is not None
    step = find_running_step(branch.run_id)
    branch.note_use_by_code()
    branch.record_application(APPLICATION, step.key, step.attempt)


def spark_like(lakehouse: LakehouseResource) -> NessieCatalog:
    """A catalog on the run's branch whose commits name neither run nor step, as those of Spark."""
    entries = {"application-type": "iceberg", "app-id": APPLICATION}
    properties = {f"{COMMIT_PROPERTY}{name}": value for name, value in entries.items()}
    return lakehouse.lakehouse.catalog(lakehouse.open_branch(), properties=properties)


def delete_files(
    lakehouse: LakehouseResource, key: dg.AssetKey, rows: BooleanExpression | None = None
) -> None:
    """Delete all rows, or `rows` that are whole files; the application is not recorded by that."""
    table = spark_like(lakehouse).load_table(tuple(key.path))
    table.delete(AlwaysTrue() if rows is None else rows, snapshot_properties={"spark.app.id": APPLICATION})
