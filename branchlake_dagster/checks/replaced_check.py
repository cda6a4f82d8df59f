"""Compare the rows of a run with the rows of `main` that they replace, before the publication.

This module has no postponed annotations: Dagster compares the annotation of `context` with the class itself.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import dagster as dg
import pyarrow.compute as pc
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.expressions import AlwaysTrue, BooleanExpression
from pyiceberg.table import Table
from pyiceberg.types import BooleanType, DecimalType, DoubleType, FloatType, IntegerType, LongType

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
"""The number of rows and the sums of columns, by measure name: `rows`, `sum(price)`."""


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
    """Build an asset check that compares a run's rows with those of `main` that they replace.

    The check compares the number of rows and the sums of columns in the run's partitions: on the run's branch
    and on `main` at the start of the run. If `main` has none of these rows, the check passes. Needs no Spark.

    Args:
        asset (AssetKey | str | Sequence[str] | AssetsDefinition): The asset. A definition includes its
            partitions.
        name (str): The check's name. (default: `compared_with_main`)
        sums (Sequence[str]): Numeric columns whose sums are compared.
        most_change (Optional[float]): The largest allowed relative change of a measure, such as 0.1 for 10 %.
            (default: the check only reports)
        severity (Literal["error", "warn"]): `error` blocks the publication if the check fails.
            (default: `warn`)
        partitions_def (Optional[PartitionsDefinition]): The partitions of the asset, if `asset` is a key.
        lakehouse_key (str): The resource key of the lake. (default: `lakehouse`)

    Returns:
        AssetChecksDefinition: One step with one check.

    Raises:
        ContractError: `most_change` is negative, or the severity is not allowed.
        CheckFailedToRun: In the run: a column of `sums` is missing, or another IO manager loaded the rows.

    Examples:
        .. code-block:: python

            from branchlake_dagster import replaced_check

            compared = replaced_check(prices, sums=["eur"], most_change=0.2)
    """
    if most_change is not None and most_change < 0:
        raise ContractError(
            f"Check {name} has most_change={most_change}, which must not be negative.", reason="most_change"
        )
    if severity not in ("error", "warn"):
        raise ContractError(
            f"Check {name} has the unknown severity {severity!r}.",
            hint="Use 'error' or 'warn'.",
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
        description=f"Compares the rows of a run of {key.to_user_string()} with the rows they replace.",
        specs=build_check_specs(asset, {name: promise}, partitions, warn_names=warn_names),
        ins={"rows": dg.AssetIn(key)},
        required_resource_keys={lakehouse_key},
        compute_kind="iceberg",
    )
    def compared(context: dg.AssetCheckExecutionContext, rows: StoredRows) -> Iterator[dg.AssetCheckResult]:
        lake: LakehouseResource = getattr(context.resources, lakehouse_key)
        if not isinstance(rows, StoredRows):
            raise CheckFailedToRun(
                f"Check {name} on {key.to_user_string()} needs the stored table, but got other rows.",
                run_id=context.run.run_id,
                hint="Use NessieBranchIOManager as the IO manager of the asset.",
            )
        before = _measure_rows(_load_replaced_table(lake, rows), rows, sums, context.run.run_id)
        after = _measure_rows(rows.table, rows, sums, context.run.run_id)
        yield _build_result(name, before, after, most_change, warn=severity == "warn")

    return compared


def _load_replaced_table(lake: LakehouseResource, rows: StoredRows) -> Table | None:
    """Return the table on `main` at the start of the run; None if it does not exist there.

    Outside a run, and in an unbranched run without base hash, return the table as it is now.
    """
    branch = lake.run_branch
    base_hash = branch.open().base_hash if branch is not None else ""
    try:
        return lake.lakehouse.catalog(f"{MAIN}@{base_hash}" if base_hash else MAIN).load_table(
            rows.table.name()
        )
    except NoSuchTableError:
        return None


_NUMBER_TYPES = (BooleanType, IntegerType, LongType, FloatType, DoubleType, DecimalType)


def _measure_rows(table: Table | None, rows: StoredRows, sums: Sequence[str], run_id: str) -> MeasureValues:
    if table is None:
        return {}
    schema = table.schema()
    missing_columns = [column for column in sums if column not in {field.name for field in schema.fields}]
    if missing_columns and table is rows.table:
        raise CheckFailedToRun(
            f"Table {'.'.join(table.name())} has no column {missing_columns[0]} to sum up.", run_id=run_id
        )
    text_columns = [
        column
        for column in sums
        if column not in missing_columns and not isinstance(schema.find_type(column), _NUMBER_TYPES)
    ]
    if text_columns:
        raise CheckFailedToRun(
            f"Column {text_columns[0]} of table {'.'.join(table.name())} is"
            f" {schema.find_type(text_columns[0])}, which has no sum.",
            hint="Name columns of numbers in replaced_check(sums=…).",
            run_id=run_id,
        )
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
    changes = {measure: relative_change(before.get(measure), value) for measure, value in after.items()}
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


def relative_change(before: Any, after: Any) -> float | None:
    """Return the change from one number to another, relative to the first; None without a first number.

    Infinity if a number becomes different from zero, or NaN, or infinite, or the reverse.
    """
    if before is None:
        return None
    if not (math.isfinite(before) and math.isfinite(after)):
        # The sum of a column with NaN or infinity is not a finite number.
        return 0.0 if str(before) == str(after) else math.inf
    if not before:
        return 0.0 if not after else math.inf
    return float((after - before) / abs(before))


def _format_value(value: Any) -> str:
    return "" if value is None else f"{value:,}"


def _format_percent(change: float | None) -> str:
    return "" if change is None else f"{change:+.1%}"
