"""What a run puts in the place of rows of `main`, compared with them before it is published.

No postponed annotations here: Dagster compares those of `context` with the class itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import dagster as dg
import pyarrow.compute as pc
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.expressions import AlwaysTrue, BooleanExpression
from pyiceberg.table import Table

from branchlake_dagster.checks.asset_checks import (
    CheckedAsset,
    asset_key,
    build_check_specs,
    check_partitions_def,
)
from branchlake_dagster.checks.constraints import CheckFailedToRun, ContractError
from branchlake_dagster.io_manager.loading import StoredRows
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.tables.selection import to_iceberg_filter

_ROWS = "rows"

MeasureValues = Mapping[str, Any]
"""Rows and sums, by name."""


def replaced_check(
    asset: CheckedAsset,
    *,
    name: str = "compared_with_main",
    sums: Sequence[str] = (),
    most_change: float | None = None,
    severity: Literal["error", "warn"] = "warn",
    partitions_def: dg.PartitionsDefinition[str] | None = None,
    lakehouse_key: str = "lakehouse",
) -> dg.AssetChecksDefinition:
    """An asset check that compares a run's rows with those of `main` that they replace.

    Compared are the rows of the run's partitions, their number and the sums of some columns, as the run's
    branch has them and as `main` had them where it began. Partitions that are new have nothing to be
    compared with. Needs no Spark.

    Args:
        asset (AssetKey | str | Sequence[str] | AssetsDefinition): The asset; a definition brings its
            partitioning.
        name (str): The check's name. (default: `compared_with_main`)
        sums (Sequence[str]): Columns of numbers whose sums are compared.
        most_change (Optional[float]): The check fails when a measure has changed by a larger part than this,
            0.1 for a tenth. (default: it only reports)
        severity (Literal["error", "warn"]): Whether a failure blocks the publication. (default: `warn`)
        partitions_def (Optional[PartitionsDefinition]): The asset's, when `asset` is a key.
        lakehouse_key (str): The resource key of the lake. (default: `lakehouse`)

    Returns:
        AssetChecksDefinition: One step with one check.

    Raises:
        ContractError: `most_change` is negative, or the severity is not allowed.
        CheckFailedToRun: In the run: a column to sum up is missing.

    Examples:
        .. code-block:: python

            from branchlake_dagster import replaced_check

            compared = replaced_check(prices, sums=["eur"], most_change=0.2)
    """
    if most_change is not None and most_change < 0:
        raise ContractError(
            f"most_change is {most_change}, and a change has no sign here.", reason="most_change"
        )
    if severity not in ("error", "warn"):
        raise ContractError(
            f"Check {name} has severity {severity!r}.",
            hint="Say 'error' or 'warn'.",
            reason="severity",
            subject=name,
        )
    key = asset_key(asset)
    limit = "" if most_change is None else f" and change by at most {most_change:.0%}"
    promise = f"{', '.join([_ROWS, *(f'sum({column})' for column in sums)])} are compared with main's{limit}"
    warn_names = frozenset({name} if severity == "warn" else ())
    partitions = check_partitions_def(asset, partitions_def, whole_table=False)

    @dg.multi_asset_check(
        name=f"{key.to_python_identifier()}__{name}",
        description=f"What a run replaces in {key.to_user_string()}, before and after.",
        specs=build_check_specs(asset, {name: promise}, partitions, warn_names=warn_names),
        ins={"rows": dg.AssetIn(key)},
        required_resource_keys={lakehouse_key},
        compute_kind="iceberg",
    )
    def compared(context: dg.AssetCheckExecutionContext, rows: StoredRows) -> Iterator[dg.AssetCheckResult]:
        lake: LakehouseResource = getattr(context.resources, lakehouse_key)
        if not isinstance(rows, StoredRows):
            raise CheckFailedToRun(
                f"{name} on {key.to_user_string()} needs the table itself.",
                run_id=context.run.run_id,
                hint="Let the asset use NessieBranchIOManager.",
            )
        before = _measure_rows(_load_replaced_table(lake, rows), rows, sums, context.run.run_id)
        after = _measure_rows(rows.table, rows, sums, context.run.run_id)
        yield _build_result(name, before, after, most_change, warn=severity == "warn")

    return compared


def _load_replaced_table(lake: LakehouseResource, rows: StoredRows) -> Table | None:
    """The table as `main` had it where the run began."""
    branch = lake.run_branch
    base_hash = branch.open().base_hash if branch is not None else ""
    try:
        return lake.lakehouse.catalog(f"{MAIN}@{base_hash}" if base_hash else MAIN).load_table(
            rows.table.name()
        )
    except NoSuchTableError:
        return None


def _measure_rows(table: Table | None, rows: StoredRows, sums: Sequence[str], run_id: str) -> MeasureValues:
    if table is None:
        return {}
    schema = table.schema()
    missing_columns = [column for column in sums if column not in {field.name for field in schema.fields}]
    if missing_columns and table is rows.table:
        raise CheckFailedToRun(f"There is no column {missing_columns[0]} to sum up.", run_id=run_id)
    row_filter: BooleanExpression = (
        AlwaysTrue() if rows.selection is None else to_iceberg_filter(rows.selection, schema)
    )
    measures: dict[str, Any] = {_ROWS: table.scan(row_filter=row_filter).count()}
    if columns := [column for column in sums if column not in missing_columns]:
        column_values = table.scan(row_filter=row_filter, selected_fields=tuple(columns)).to_arrow()
        measures |= {f"sum({column})": pc.sum(column_values[column]).as_py() or 0 for column in columns}
    return measures


def _build_result(
    name: str, before: MeasureValues, after: MeasureValues, max_change: float | None, *, warn: bool
) -> dg.AssetCheckResult:
    is_new = not before.get(_ROWS)
    changes = {measure: _relative_change(before.get(measure), value) for measure, value in after.items()}
    largest_change = max((abs(change) for change in changes.values() if change is not None), default=0.0)
    passed = is_new or max_change is None or largest_change <= max_change
    lines = ["| measure | main | run | change |", "| --- | ---: | ---: | ---: |"]
    lines += [
        f"| {measure} | {_format_value(before.get(measure))} | {_format_value(value)} |"
        f" {_format_percent(changes[measure])} |"
        for measure, value in after.items()
    ]
    message = "main has none of these rows yet" if is_new else f"the largest change is {largest_change:.1%}"
    metadata: dict[str, Any] = {"comparison": dg.MetadataValue.md("\n".join(lines))}
    metadata |= {"rows_before": dg.MetadataValue.int(before.get(_ROWS) or 0)}
    metadata |= {"rows_after": dg.MetadataValue.int(after[_ROWS])}
    return dg.AssetCheckResult(
        check_name=name,
        passed=passed,
        severity=dg.AssetCheckSeverity.WARN if warn else dg.AssetCheckSeverity.ERROR,
        metadata=metadata,
        description=f"{'Compared' if passed else 'Changed too much'}: {message}.",
    )


def _relative_change(before: Any, after: Any) -> float | None:
    if before is None:
        return None
    if not before:
        return 0.0 if not after else float("inf")
    return float((after - before) / abs(before))


def _format_value(value: Any) -> str:
    return "" if value is None else f"{value:,}"


def _format_percent(change: float | None) -> str:
    return "" if change is None else f"{change:+.1%}"
