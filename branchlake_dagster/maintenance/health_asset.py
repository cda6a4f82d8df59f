"""One asset per namespace that shows the health of its tables, with checks that warn.

This module does not postpone annotations: Dagster compares the annotation of `context` with the class itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from dagster import (
    AssetCheckResult,
    AssetCheckSeverity,
    AssetCheckSpec,
    AssetExecutionContext,
    AssetKey,
    AssetsDefinition,
    MaterializeResult,
    MetadataValue,
    asset,
)

from branchlake_dagster.errors import BranchlakeError
from branchlake_dagster.garbage_collection.collector import FileCollector
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.maintenance.table_health import (
    AGES,
    TableHealth,
    UnreadableHealth,
    measure_tables,
    sum_health,
)
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.wording import format_count

_HEADERS = (
    "table",
    "data files",
    "small",
    "most small in a partition",
    "delete files",
    "MB",
    *(f"MB, {age}" for age in AGES),
    "snapshots",
    "manifests",
    "metadata KB",
    "unreachable MB",
)


@dataclass(frozen=True)
class HealthLimits:
    """Limits above which a check of a namespace's health warns.

    Args:
        small_files (int): Files below 32 MiB in one partition. (default: 50)
        snapshots (int): Snapshots of one table. (default: 5,000)
        metadata_mb (float): Size of one table's metadata file in MB. Each commit writes it. (default: 10)
        delete_files (int): Delete files of one table that readers must apply. (default: 100)

    Examples:
        .. code-block:: python

            from branchlake_dagster import HealthLimits, maintenance_definitions

            maintenance = maintenance_definitions(["shop"], limits=HealthLimits(small_files=200))
    """

    small_files: int = 50
    snapshots: int = 5_000
    metadata_mb: float = 10.0
    delete_files: int = 100


def health_key(namespace: Sequence[str], prefix: str = "") -> AssetKey:
    """Return the key of the asset that shows the health of a namespace. `prefix` names a second lake."""
    return AssetKey([f"{prefix}table_health", *namespace])


def health_asset(
    namespace: Sequence[str],
    limits: HealthLimits | None = None,
    *,
    lakehouse_key: str = "lakehouse",
    group_name: str = "maintenance",
    prefix: str = "",
) -> AssetsDefinition:
    """Return the asset that shows the health of the tables in one namespace of `main`.

    The metadata of its materializations are sums over all tables, which Dagster plots over time, and a
    Markdown table with a row for each table. Its checks warn; they never block. It writes no table.
    `lakehouse_key` is the resource key of the lake. `prefix` comes before the asset's key, for a second lake.
    """
    key, limits = health_key(namespace, prefix), limits or HealthLimits()
    name = ".".join(namespace)

    @asset(
        key=key,
        group_name=group_name,
        kinds={"iceberg"},
        description=f"The health of the tables in {name}: files, sizes by age, snapshots and manifests.",
        required_resource_keys={lakehouse_key},
        check_specs=[
            AssetCheckSpec(check_name, asset=key, description=description)
            for check_name, description in _CHECKS.items()
        ],
    )
    def table_health(context: AssetExecutionContext) -> MaterializeResult:  # type: ignore[type-arg]
        resource: LakehouseResource = getattr(context.resources, lakehouse_key)
        planned_bytes = _load_planned_bytes(context, resource.lakehouse)
        measured = list(
            measure_tables(
                resource.lakehouse, namespace, now=datetime.now(UTC), unreachable_bytes=planned_bytes
            )
        )
        tables = [table for table in measured if isinstance(table, TableHealth)]
        unreadable = [table for table in measured if isinstance(table, UnreadableHealth)]
        for table in unreadable:
            context.log.warning(f"The table {table.table} cannot be read: {table.error}")
        return MaterializeResult(
            metadata=_health_metadata(tables, unreadable, knows_unreachable=planned_bytes is not None),
            check_results=evaluate_health(tables, unreadable, limits),
        )

    return table_health


def _load_planned_bytes(context: AssetExecutionContext, lake: Lakehouse) -> dict[str, int] | None:
    """Return the bytes that are planned for deletion, by table name; None if the journal cannot be read."""
    journal = FileCollector.of_lake(lake).journal
    try:
        journal.verify(journal.read_marker())
        return journal.load_planned_bytes()
    except (BranchlakeError, OSError, ValueError, EOFError) as error:  # also of a damaged file
        context.log.warning(f"The journal of the collection cannot be read: {error}")
        return None


_CHECKS = {
    "readable": "The metadata and manifests of every table can be read.",
    "small_files": "No partition has many small files.",
    "snapshots": "No table has many snapshots.",
    "metadata_size": "No table has a large metadata file, which each commit writes anew.",
    "delete_files": "No table has many delete files, which each reader must apply.",
}


def _health_metadata(
    tables: Sequence[TableHealth], unreadable: Sequence[UnreadableHealth], *, knows_unreachable: bool
) -> dict[str, MetadataValue]:
    total = sum_health(tables)
    unreachable = {"unreachable bytes": MetadataValue.int(total.unreachable_bytes)}
    return {
        "tables": MetadataValue.int(len(tables)),
        "unreadable tables": MetadataValue.int(len(unreadable)),
        "data files": MetadataValue.int(total.data_files),
        "small files": MetadataValue.int(total.small_files),
        "delete files": MetadataValue.int(total.delete_files),
        "dangling delete files": MetadataValue.int(total.dangling_deletes),
        "data bytes": MetadataValue.int(total.data_bytes),
        "snapshots": MetadataValue.int(total.snapshots),
        "manifests": MetadataValue.int(total.manifests),
        "metadata bytes": MetadataValue.int(total.metadata_bytes),
        **(unreachable if knows_unreachable else {}),
        "health": MetadataValue.md(format_health(tables, knows_unreachable=knows_unreachable)),
    }


def format_health(tables: Sequence[TableHealth], *, knows_unreachable: bool = True) -> str:
    """Return a Markdown table with a row per table, the tables with the most small files first."""
    lines = ["| " + " | ".join(_HEADERS) + " |", "|---" + "|---:" * (len(_HEADERS) - 1) + "|"]
    for table in sorted(tables, key=lambda table: (-table.small_files, table.table)):
        cells = [
            table.table.replace("|", "\\|"),
            f"{table.data_files:,}",
            f"{table.small_files:,}",
            f"{table.most_small_files:,}",
            f"{table.delete_files:,}",
            _format_mb(table.data_bytes),
            *(_format_mb(table.bytes_by_age.get(age, 0)) for age in AGES),
            f"{table.snapshots:,}",
            f"{table.manifests:,}",
            f"{table.metadata_bytes / 1e3:,.0f}",
            _format_mb(table.unreachable_bytes) if knows_unreachable else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _format_mb(size: int) -> str:
    return f"{size / 1e6:,.1f}"


def evaluate_health(
    tables: Sequence[TableHealth], unreadable: Sequence[UnreadableHealth], limits: HealthLimits
) -> list[AssetCheckResult]:
    """Return the results of the five checks of a namespace.

    A failed check has severity WARN and names tables.
    """
    crowded = {
        table.table: f"{table.most_small_files:,} in {table.crowded_partition or 'the table'}"
        for table in tables
        if table.most_small_files > limits.small_files
    }
    many_snapshots = {
        table.table: format_count(table.snapshots, "snapshot")
        for table in tables
        if table.snapshots > limits.snapshots
    }
    large_metadata = {
        table.table: f"{table.metadata_bytes / 1e6:,.1f} MB"
        for table in tables
        if table.metadata_bytes > limits.metadata_mb * 1e6
    }
    many_deletes = {
        table.table: format_count(table.delete_files - table.dangling_deletes, "delete file")
        for table in tables
        if table.delete_files - table.dangling_deletes > limits.delete_files
    }
    return [
        _check_result("readable", {table.table: table.error for table in unreadable}),
        _check_result("small_files", crowded),
        _check_result("snapshots", many_snapshots),
        _check_result("metadata_size", large_metadata),
        _check_result("delete_files", many_deletes),
    ]


def _check_result(name: str, findings: dict[str, str]) -> AssetCheckResult:
    return AssetCheckResult(
        check_name=name,
        passed=not findings,
        severity=AssetCheckSeverity.WARN,
        metadata={
            "tables": MetadataValue.md(
                "\n".join(f"- {table}: {finding}" for table, finding in findings.items()) or "none"
            )
        },
    )
