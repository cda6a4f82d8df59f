"""Run Dagster assets on Nessie branches of an Iceberg lake: each run is checked, then published in one step.

A code location imports everything that it needs from this package::

    from branchlake_dagster import branchlake_definitions, pandera_checks, table_metadata

The first use of a name imports its module, so a program that needs only the settings does not load Spark's
client.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from branchlake_dagster.automation.backfill_stages import approve_backfill_job
    from branchlake_dagster.automation.backlog import consumer_backlog, unconsumed_change
    from branchlake_dagster.automation.incremental_sensor import incremental_sensor
    from branchlake_dagster.catalog import NessieCatalog
    from branchlake_dagster.checks.asset_checks import column_metadata, join_checks, pandera_checks, sql_check
    from branchlake_dagster.checks.constraints import row_predicate
    from branchlake_dagster.checks.replaced_check import replaced_check
    from branchlake_dagster.compaction.compaction_plan import CompactionOptions
    from branchlake_dagster.errors import BranchlakeError, OutcomeUnknown, Terminal, Transient
    from branchlake_dagster.expiry.retention import ExpiryPolicy
    from branchlake_dagster.incremental.declaration import consumes, keys, range_, rows
    from branchlake_dagster.incremental.sql_changes import Changes, computes_everything, read_changes
    from branchlake_dagster.ingest.binary_formats import Avro, RegistryAvro, protobuf
    from branchlake_dagster.ingest.declaration import Ingest, IngestTable
    from branchlake_dagster.ingest.definitions import ingest_definitions
    from branchlake_dagster.ingest.formats import Decoded, Json
    from branchlake_dagster.ingest.planning import CommittedOffsets, StartingOffsets
    from branchlake_dagster.ingest.published_through import published_through
    from branchlake_dagster.ingest.published_through_check import published_through_check
    from branchlake_dagster.io_manager.io_manager import NessieBranchIOManager
    from branchlake_dagster.io_manager.worker_files import commit_worker_files
    from branchlake_dagster.lake_definitions import DefinitionsWarning, branchlake_definitions
    from branchlake_dagster.lakehouse.lakehouse import Lakehouse
    from branchlake_dagster.launching.launcher import WarmRunLauncher
    from branchlake_dagster.maintenance.definitions import maintenance_definitions
    from branchlake_dagster.maintenance.health_asset import HealthLimits
    from branchlake_dagster.maintenance.maintenance_run import MaintenanceOptions
    from branchlake_dagster.publication.conditions import (
        awaiting_verdict,
        newly_published,
        on_publication,
        publication_automation_sensor,
    )
    from branchlake_dagster.publication.new_publications import PublishedAssets, published_sensor
    from branchlake_dagster.publication.run_publication import (
        NotPublished,
        RunOutcome,
        publish,
        publish_at_end,
    )
    from branchlake_dagster.publication.unpublished_runs import (
        AlertFailed,
        UnpublishedRun,
        on_blocked,
        webhook_alert,
    )
    from branchlake_dagster.query.connection import connect
    from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
    from branchlake_dagster.runs.spark_resource import BranchSparkResource
    from branchlake_dagster.settings import Settings
    from branchlake_dagster.tables.specification import table_metadata
    from branchlake_dagster.tables.worker_table import WorkerTable

__all__ = [
    "AlertFailed",
    "Avro",
    "BranchSparkResource",
    "BranchlakeError",
    "Changes",
    "CommittedOffsets",
    "CompactionOptions",
    "Decoded",
    "DefinitionsWarning",
    "ExpiryPolicy",
    "HealthLimits",
    "Ingest",
    "IngestTable",
    "Json",
    "Lakehouse",
    "LakehouseResource",
    "MaintenanceOptions",
    "NessieBranchIOManager",
    "NessieCatalog",
    "NotPublished",
    "OutcomeUnknown",
    "PublishedAssets",
    "RegistryAvro",
    "RunOutcome",
    "Settings",
    "StartingOffsets",
    "Terminal",
    "Transient",
    "UnpublishedRun",
    "WarmRunLauncher",
    "WorkerTable",
    "approve_backfill_job",
    "awaiting_verdict",
    "branchlake_definitions",
    "column_metadata",
    "commit_worker_files",
    "computes_everything",
    "connect",
    "consumer_backlog",
    "consumes",
    "incremental_sensor",
    "ingest_definitions",
    "join_checks",
    "keys",
    "maintenance_definitions",
    "newly_published",
    "on_blocked",
    "on_publication",
    "pandera_checks",
    "protobuf",
    "publication_automation_sensor",
    "publish",
    "publish_at_end",
    "published_sensor",
    "published_through",
    "published_through_check",
    "range_",
    "read_changes",
    "replaced_check",
    "row_predicate",
    "rows",
    "sql_check",
    "table_metadata",
    "unconsumed_change",
    "webhook_alert",
]

_HOMES = {
    "automation.backfill_stages": ("approve_backfill_job",),
    "automation.backlog": (
        "consumer_backlog",
        "unconsumed_change",
    ),
    "automation.incremental_sensor": ("incremental_sensor",),
    "catalog": ("NessieCatalog",),
    "checks.asset_checks": (
        "join_checks",
        "pandera_checks",
        "sql_check",
        "column_metadata",
    ),
    "checks.constraints": ("row_predicate",),
    "checks.replaced_check": ("replaced_check",),
    "compaction.compaction_plan": ("CompactionOptions",),
    "errors": (
        "BranchlakeError",
        "OutcomeUnknown",
        "Terminal",
        "Transient",
    ),
    "expiry.retention": ("ExpiryPolicy",),
    "incremental.declaration": (
        "consumes",
        "keys",
        "range_",
        "rows",
    ),
    "incremental.sql_changes": (
        "Changes",
        "computes_everything",
        "read_changes",
    ),
    "ingest.binary_formats": (
        "Avro",
        "RegistryAvro",
        "protobuf",
    ),
    "ingest.declaration": (
        "Ingest",
        "IngestTable",
    ),
    "ingest.definitions": ("ingest_definitions",),
    "ingest.formats": (
        "Decoded",
        "Json",
    ),
    "ingest.planning": (
        "CommittedOffsets",
        "StartingOffsets",
    ),
    "ingest.published_through": ("published_through",),
    "ingest.published_through_check": ("published_through_check",),
    "io_manager.io_manager": ("NessieBranchIOManager",),
    "io_manager.worker_files": ("commit_worker_files",),
    "lake_definitions": (
        "branchlake_definitions",
        "DefinitionsWarning",
    ),
    "lakehouse.lakehouse": ("Lakehouse",),
    "launching.launcher": ("WarmRunLauncher",),
    "maintenance.definitions": ("maintenance_definitions",),
    "maintenance.health_asset": ("HealthLimits",),
    "maintenance.maintenance_run": ("MaintenanceOptions",),
    "publication.conditions": (
        "awaiting_verdict",
        "on_publication",
        "publication_automation_sensor",
        "newly_published",
    ),
    "publication.new_publications": (
        "PublishedAssets",
        "published_sensor",
    ),
    "publication.run_publication": (
        "NotPublished",
        "RunOutcome",
        "publish",
        "publish_at_end",
    ),
    "publication.unpublished_runs": (
        "AlertFailed",
        "UnpublishedRun",
        "on_blocked",
        "webhook_alert",
    ),
    "query.connection": ("connect",),
    "runs.lakehouse_resource": ("LakehouseResource",),
    "runs.spark_resource": ("BranchSparkResource",),
    "settings": ("Settings",),
    "tables.specification": ("table_metadata",),
    "tables.worker_table": ("WorkerTable",),
}
_FORMER_NAMES = {"consume": "read_changes", "published": "newly_published", "unconsumed": "consumer_backlog"}
"""Deprecated names of version 0.1.0 -> their present names. The deprecated names stay until 1.0."""
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    name = _FORMER_NAMES.get(name, name)
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    found = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
