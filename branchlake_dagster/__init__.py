"""Every Dagster run on its own Nessie branch of an Iceberg lake: checked, then published in one step.

Everything that a code location needs is imported from here::

    from branchlake_dagster import branchlake_definitions, pandera_checks, table_metadata

Names are loaded when they are asked for: what needs only the settings does not wait for Spark's client.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from branchlake_dagster.branching.consuming.declaration import consumes, keys, range_, rows
    from branchlake_dagster.branching.delivering.sql_changes import Changes, consume
    from branchlake_dagster.branching.io.io_manager import NessieBranchIOManager
    from branchlake_dagster.branching.resources.lakehouse_resource import LakehouseResource
    from branchlake_dagster.branching.resources.spark_resource import BranchSparkResource
    from branchlake_dagster.branching.table.spec import table_metadata
    from branchlake_dagster.catalog import NessieCatalog
    from branchlake_dagster.checks.asset_checks.columns import column_metadata
    from branchlake_dagster.checks.asset_checks.contract import pandera_checks
    from branchlake_dagster.checks.asset_checks.join import join_checks
    from branchlake_dagster.checks.asset_checks.replaced import replaced_check
    from branchlake_dagster.checks.asset_checks.sql import sql_check
    from branchlake_dagster.checks.constraints.predicate import row_predicate
    from branchlake_dagster.errors import BranchlakeError, OutcomeUnknown, Terminal, Transient
    from branchlake_dagster.incremental.backfill.approve import approve_backfill_job
    from branchlake_dagster.incremental.backlog import unconsumed
    from branchlake_dagster.incremental.condition import unconsumed_change
    from branchlake_dagster.incremental.sensor import incremental_sensor
    from branchlake_dagster.ingest.converting.avro import Avro, RegistryAvro
    from branchlake_dagster.ingest.converting.formats import Decoded, Json
    from branchlake_dagster.ingest.converting.protobuf import protobuf
    from branchlake_dagster.ingest.declaring.declaration import Ingest, IngestTable
    from branchlake_dagster.ingest.positions.start import CommittedOffsets, StartingOffsets
    from branchlake_dagster.ingest.running.definitions import ingest_definitions
    from branchlake_dagster.ingest.valid_through.check import published_through_check
    from branchlake_dagster.ingest.valid_through.condition import published_through
    from branchlake_dagster.lakehouse.lakehouse import Lakehouse
    from branchlake_dagster.launching.launcher import WarmRunLauncher
    from branchlake_dagster.publication.automation.conditions import (
        awaiting_verdict,
        on_publication,
        publication_automation_sensor,
        published,
    )
    from branchlake_dagster.publication.automation.published_sensor import PublishedAssets, published_sensor
    from branchlake_dagster.publication.automation.unpublished_runs import (
        AlertFailed,
        UnpublishedRun,
        on_blocked,
        webhook_alert,
    )
    from branchlake_dagster.publication.runtime.definitions import branchlake_definitions
    from branchlake_dagster.publication.runtime.publish import RunOutcome, publish
    from branchlake_dagster.publication.runtime.publish_at_end import NotPublished, publish_at_end
    from branchlake_dagster.publication.runtime.validation import DefinitionsWarning
    from branchlake_dagster.query.connection import connect
    from branchlake_dagster.settings import Settings

__all__ = [
    "AlertFailed",
    "Avro",
    "BranchSparkResource",
    "BranchlakeError",
    "Changes",
    "CommittedOffsets",
    "Decoded",
    "DefinitionsWarning",
    "Ingest",
    "IngestTable",
    "Json",
    "Lakehouse",
    "LakehouseResource",
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
    "approve_backfill_job",
    "awaiting_verdict",
    "branchlake_definitions",
    "column_metadata",
    "connect",
    "consume",
    "consumes",
    "incremental_sensor",
    "ingest_definitions",
    "join_checks",
    "keys",
    "on_blocked",
    "on_publication",
    "pandera_checks",
    "protobuf",
    "publication_automation_sensor",
    "publish",
    "publish_at_end",
    "published",
    "published_sensor",
    "published_through",
    "published_through_check",
    "range_",
    "replaced_check",
    "row_predicate",
    "rows",
    "sql_check",
    "table_metadata",
    "unconsumed",
    "unconsumed_change",
    "webhook_alert",
]

_HOMES = {
    "branching.consuming.declaration": ("consumes", "keys", "range_", "rows"),
    "branching.delivering.sql_changes": ("Changes", "consume"),
    "branching.io.io_manager": ("NessieBranchIOManager",),
    "branching.resources.lakehouse_resource": ("LakehouseResource",),
    "branching.resources.spark_resource": ("BranchSparkResource",),
    "branching.table.spec": ("table_metadata",),
    "checks.asset_checks.columns": ("column_metadata",),
    "checks.asset_checks.contract": ("pandera_checks",),
    "checks.asset_checks.join": ("join_checks",),
    "checks.asset_checks.replaced": ("replaced_check",),
    "checks.asset_checks.sql": ("sql_check",),
    "checks.constraints.predicate": ("row_predicate",),
    "errors": ("BranchlakeError", "OutcomeUnknown", "Terminal", "Transient"),
    "incremental.backfill.approve": ("approve_backfill_job",),
    "incremental.backlog": ("unconsumed",),
    "incremental.condition": ("unconsumed_change",),
    "incremental.sensor": ("incremental_sensor",),
    "ingest.converting.avro": ("Avro", "RegistryAvro"),
    "ingest.converting.formats": ("Decoded", "Json"),
    "ingest.converting.protobuf": ("protobuf",),
    "ingest.declaring.declaration": ("Ingest", "IngestTable"),
    "ingest.positions.start": ("CommittedOffsets", "StartingOffsets"),
    "ingest.running.definitions": ("ingest_definitions",),
    "ingest.valid_through.check": ("published_through_check",),
    "ingest.valid_through.condition": ("published_through",),
    "catalog": ("NessieCatalog",),
    "lakehouse.lakehouse": ("Lakehouse",),
    "launching.launcher": ("WarmRunLauncher",),
    "publication.automation.conditions": (
        "awaiting_verdict",
        "on_publication",
        "publication_automation_sensor",
        "published",
    ),
    "publication.automation.published_sensor": ("PublishedAssets", "published_sensor"),
    "publication.automation.unpublished_runs": (
        "AlertFailed",
        "UnpublishedRun",
        "on_blocked",
        "webhook_alert",
    ),
    "publication.runtime.definitions": ("branchlake_definitions",),
    "publication.runtime.publish": ("RunOutcome", "publish"),
    "publication.runtime.publish_at_end": ("NotPublished", "publish_at_end"),
    "publication.runtime.validation": ("DefinitionsWarning",),
    "query.connection": ("connect",),
    "settings": ("Settings",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    found = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
