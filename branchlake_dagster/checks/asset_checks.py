"""Builds asset checks from pandera models and from SQL, and joins several of them into one step.

`column_metadata` describes the columns of a contract for the asset's page in Dagster: text, unit, type and
constraints.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import dagster as dg
from pandera.pyspark import DataFrameModel
from pyspark.errors import PySparkException
from pyspark.sql.pandas.types import to_arrow_type

from branchlake_dagster.checks.check_step import CheckDeclaration, build_check_step, declarations_in
from branchlake_dagster.checks.compiler import compile_schema
from branchlake_dagster.checks.constraints import (
    Constraint,
    ContractError,
    SchemaConstraint,
    SqlConstraint,
    UniqueConstraint,
    require_examples,
)
from branchlake_dagster.checks.counting import ROWS_PLACEHOLDER
from branchlake_dagster.checks.judge import ConstraintGroup
from branchlake_dagster.stored_names import AssetMetadata
from branchlake_dagster.tables.errors import ColumnUnsupported
from branchlake_dagster.tables.schemas import format_type, stored_type

if TYPE_CHECKING:
    from pandera.api.pyspark.components import Column
    from pyspark.sql.types import DataType


COLUMN_SCHEMA = "dagster/column_schema"
UNIT = "unit"


def column_metadata(model: type[DataFrameModel[Any]]) -> dict[str, Any]:
    """Return metadata for `@dg.asset(metadata=…)` that describes the columns of a pandera model.

    Each column shows the field's `description` (or its `title`) with the unit in brackets, the type that the
    lake stores, and its constraints. Constraints on several columns belong to the table. The unit
    is `"unit"` in the field's `metadata`; it also becomes a tag of the column. After a materialization,
    Dagster shows the columns and types of the stored table, and the descriptions and tags from here.

    Args:
        model (type[DataFrameModel]): A model of `pandera.pyspark`. Fields with `regex=True` do not name a
            column and are omitted.

    Returns:
        Dict[str, Any]: Metadata. Combine it with the result of `table_metadata`.

    Raises:
        ContractError: The object is not such a model, or the model cannot be compiled to checks.

    Examples:
        .. code-block:: python

            import dagster as dg
            import pandera.pyspark as pa
            import polars as pl
            import pyspark.sql.types as T

            from branchlake_dagster import column_metadata, table_metadata

            class Weather(pa.DataFrameModel):
                station: T.StringType = pa.Field(description="Call sign of the station.")
                wind: T.DoubleType = pa.Field(
                    ge=0, description="Mean wind speed at 10 m.", metadata={"unit": "m/s"}
                )

            @dg.asset(metadata=table_metadata() | column_metadata(Weather))
            def weather() -> pl.DataFrame:
                return pl.DataFrame({"station": ["EDDF"], "wind": [3.2]})
    """
    if not (isinstance(model, type) and issubclass(model, DataFrameModel)):
        raise ContractError(
            f"{model!r} does not describe columns: it is not a pandera model for Spark.",
            hint="Derive the model from pandera.pyspark.DataFrameModel.",
            reason="not_a_spark_model",
        )
    schema = model.to_schema()
    columns = {name: column for name, column in schema.columns.items() if not column.regex}
    column_constraints: dict[str, list[Constraint]] = {name: [] for name in columns}
    table_promises: list[str] = []
    for constraint in compile_schema(schema):
        if len(constraint.columns) == 1 and constraint.columns[0] in column_constraints:
            column_constraints[constraint.columns[0]].append(constraint)
        elif not isinstance(constraint, SchemaConstraint):
            table_promises.append(constraint.description)
    return {
        COLUMN_SCHEMA: dg.TableSchema(
            columns=[
                _build_table_column(name, column, schema.dtype or column.dtype, column_constraints[name])
                for name, column in columns.items()
            ],
            constraints=dg.TableConstraints(other=table_promises),
        )
    }


def _build_table_column(
    name: str, column: Column, dtype: Any, constraints: list[Constraint]
) -> dg.TableColumn:
    unit = str((column.metadata or {}).get(UNIT, ""))
    description = " ".join((column.description or column.title or "").split())
    return dg.TableColumn(
        name,
        type=_column_type(name, dtype.type) if dtype else "any",
        description=_add_unit(description, unit) or None,
        constraints=dg.TableColumnConstraints(
            nullable=column.nullable,
            unique=any(isinstance(constraint, UniqueConstraint) for constraint in constraints),
            other=_other_promises(name, constraints),
        ),
        tags={UNIT: unit} if unit else None,
    )


def _add_unit(description: str, unit: str) -> str:
    """Add a unit to a description: `Inclination.` with `deg` gives `Inclination [deg].` as in CCSDS."""
    if not unit:
        return description
    stop = "." if description.endswith(".") else ""
    return f"{description.removesuffix('.')} [{unit}]{stop}".lstrip()


def _other_promises(name: str, constraints: list[Constraint]) -> list[str]:
    """Return the descriptions of a column's constraints other than nullable and unique.

    The leading column name is removed from each.
    """
    descriptions = [
        constraint.description for constraint in constraints if not isinstance(constraint, UniqueConstraint)
    ]
    promises = [promise.removeprefix(name).removeprefix(":").strip() for promise in descriptions]
    return [promise for promise in promises if promise != "is not null"]


def _column_type(name: str, dtype: DataType) -> str:
    """Return Iceberg's name of the type with which a Spark column of type `dtype` is stored.

    If the lake cannot store the type, returns Spark's name of it.
    """
    try:
        return format_type(stored_type(to_arrow_type(dtype), name, name), table_name=name)
    except (PySparkException, ColumnUnsupported):
        return dtype.simpleString()


CheckedAsset = dg.AssetKey | str | Sequence[str] | dg.AssetsDefinition
"""The asset of a check: its key in any form that Dagster accepts, or its definition."""


def asset_key(asset: CheckedAsset) -> dg.AssetKey:
    """Return the key of `asset`. Text like `shop/prices` is divided at the slashes.

    An asset definition must have exactly one key.
    """
    if isinstance(asset, dg.AssetsDefinition):
        return asset.key
    if isinstance(asset, str):
        return dg.AssetKey.from_user_string(asset)
    return asset if isinstance(asset, dg.AssetKey) else dg.AssetKey(asset)


def check_partitions_def(
    asset: CheckedAsset, partitions_def: dg.PartitionsDefinition[str] | None, *, whole_table: bool
) -> dg.PartitionsDefinition[str] | None:
    """Return the partitions definition of a check on `asset`; None for a check of the whole table.

    An asset definition has its own partitions definition. For a bare key, pass `partitions_def`. Without
    either, Dagster loads all partitions of the asset for the check, whichever the run wrote. Raises
    ContractError if both `whole_table` and `partitions_def` are given.
    """
    if whole_table and partitions_def is not None:
        raise ContractError(
            "A check has both whole_table=True and a partitions_def.",
            hint="Pass either whole_table or partitions_def.",
            reason="whole_table_with_partitions",
        )
    if whole_table:
        return None
    if partitions_def is None and isinstance(asset, dg.AssetsDefinition):
        return asset.partitions_def
    return partitions_def


_CONSEQUENCES = {
    False: "Blocks the publication when it fails; non-blocking means that the run's other steps continue.",
    True: "A failure is published with a warning.",
}
"""The start of a check's description, by whether the check only warns.

Dagster's page shows "This is a non-blocking asset check" just above it.
"""


def build_check_specs(
    asset: CheckedAsset,
    promises: Mapping[str, str],
    partitions_def: dg.PartitionsDefinition[str] | None,
    *,
    warn_names: Collection[str],
) -> list[dg.AssetCheckSpec]:
    """Return one non-blocking check spec for each constraint: `promises` maps check names to descriptions.

    The description of a spec also says what happens if the check fails. `partitions_def` is the partitions
    definition of a check that covers one partition; None for a check of the whole table. Checks in
    `warn_names` have the severity WARN.

    The specs are never `blocking`: the gate is at publication, and a failed check must not stop the other
    steps of the run, whose results the gate needs. Dagster's page calls such a check non-blocking, which
    refers to the steps.
    """
    with warnings.catch_warnings():
        # Partitioned checks are a preview in Dagster 1.13. The tests cover the behavior that is used here.
        warnings.simplefilter("ignore", dg.PreviewWarning)
        return [
            dg.AssetCheckSpec(
                name,
                asset=asset_key(asset),
                description=f"{_CONSEQUENCES[name in warn_names]} Promise: {promise.rstrip('.')}.",
                partitions_def=partitions_def,
                metadata={AssetMetadata.CHECK_SCOPE: "table" if partitions_def is None else "rows"},
            )
            for name, promise in promises.items()
        ]


@dataclass
class _CheckGroup:
    key: dg.AssetKey | None = None
    partitions: dg.PartitionsDefinition[str] | None = None
    members: list[dg.AssetChecksDefinition] = field(default_factory=list)


def join_checks(checks: Iterable[dg.AssetChecksDefinition]) -> list[dg.AssetChecksDefinition]:
    """Put the contracts and SQL checks of each asset into one step: read once, counted in one Spark job.

    Each check keeps its name, severity, scope and verdict, and can still be run alone. A check that fails or
    cannot be evaluated does not change the verdicts of the others. Only checks of `pandera_checks` and
    `sql_check` on the same asset and the same rows are joined: the rows of the run's partitions, or of the
    whole table. Other checks stay as they are.

    Args:
        checks (Iterable[AssetChecksDefinition]): Checks of any kind, on any assets.

    Returns:
        List[AssetChecksDefinition]: The same checks in fewer steps, for `Definitions(asset_checks=…)`.

    Raises:
        ContractError: Two checks on the same rows have the same name.

    Examples:
        .. code-block:: python

            import dagster as dg

            from branchlake_dagster import join_checks, pandera_checks, sql_check

            defs = dg.Definitions(
                assets=[prices],
                asset_checks=join_checks(
                    [
                        pandera_checks(prices, Prices),
                        sql_check(prices, "known_shops", "SELECT * FROM {this} WHERE shop IS NULL"),
                    ]
                ),
            )
    """
    groups: list[_CheckGroup] = []
    for definition in checks:
        if not declarations_in(definition):
            groups.append(_CheckGroup(members=[definition]))
            continue
        spec = next(iter(definition.check_specs))
        key, partitions = spec.asset_key, spec.partitions_def
        matches = (group for group in groups if group.key == key and group.partitions == partitions)
        group = next(matches, None)
        if group is None:
            groups.append(group := _CheckGroup(key, partitions))
        group.members.append(definition)
    return [_join_group(group) for group in groups]


def _join_group(group: _CheckGroup) -> dg.AssetChecksDefinition:
    first = group.members[0]
    if len(group.members) == 1 or group.key is None:
        return first
    specs = [spec for definition in group.members for spec in definition.check_specs]
    duplicates = sorted(name for name, times in Counter(spec.name for spec in specs).items() if times > 1)
    if duplicates:
        raise ContractError(
            f"Asset {group.key.to_user_string()} has several checks with the name {', '.join(duplicates)}.",
            hint="Give each check its own name. For a second contract, pass name_prefix.",
            reason="same_name",
            subject=", ".join(duplicates),
        )
    scope_prefix = "" if group.partitions is not None else "table_"
    declarations = [part for definition in group.members for part in declarations_in(definition)]
    labels = ", ".join(part.label for part in declarations)
    return build_check_step(
        f"{group.key.to_python_identifier()}__{scope_prefix}checks",
        group.key,
        specs,
        declarations,
        description=f"{labels} on {group.key.to_user_string()}, in one Spark job.",
        kind="spark",
    )


def pandera_checks(
    asset: CheckedAsset,
    model: type[DataFrameModel[Any]],
    *,
    partitions_def: dg.PartitionsDefinition[str] | None = None,
    warn: Collection[str] = (),
    examples: int = 5,
    name_prefix: str | None = None,
    whole_table: bool = False,
) -> dg.AssetChecksDefinition:
    """Build asset checks for all constraints of a pandera model, evaluated in one Spark job.

    The asset's IO manager loads the rows: those of the run's branch and, for a partitioned asset, of the
    run's partitions. A failure has severity ERROR and blocks the publication.

    Args:
        asset (AssetKey | str | Sequence[str] | AssetsDefinition): The asset. A definition includes its
            partitions.
        model (type[DataFrameModel]): A model of `pandera.pyspark`.
        partitions_def (Optional[PartitionsDefinition]): The partitions of the asset, if `asset` is a key.
        warn (Collection[str]): Names of Dagster checks whose failure has severity WARN and is published.
            Checks of pandera fields with `raise_warning=True` warn as well. (default: none)
        examples (int): The number of failing rows that each check shows, 1 to 100. (default: 5)
        name_prefix (Optional[str]): A prefix for the check names, for a second model on the same asset.
        whole_table (bool): Check the whole table instead of the run's partitions. (default: False)

    Returns:
        AssetChecksDefinition: One step with a check for each constraint.

    Raises:
        ContractError: The model cannot be compiled to checks, or `warn` names a check that it does not have.
        CheckFailedToRun: In the run: Spark could not evaluate a check, so there is no verdict.

    Examples:
        .. code-block:: python

            import pandera.pyspark as pa
            import pyspark.sql.types as T

            from branchlake_dagster import pandera_checks

            class Prices(pa.DataFrameModel):
                price: T.DoubleType() = pa.Field(gt=0)

            prices_contract = pandera_checks(prices, Prices)
    """
    require_examples(examples)
    if not (isinstance(model, type) and issubclass(model, DataFrameModel)):
        raise ContractError(
            f"The contract of asset {asset_key(asset).to_user_string()} is {model!r},"
            " which is not a pandera model for Spark.",
            hint="Derive the model from pandera.pyspark.DataFrameModel.",
            reason="not_a_spark_model",
            subject=asset_key(asset).to_user_string(),
        )
    schema = model.to_schema()
    prefix = f"{name_prefix}_" if name_prefix else ""
    constraints = [
        replace(constraint, name=f"{prefix}{constraint.name}") for constraint in compile_schema(schema)
    ]
    names = [constraint.name for constraint in constraints]
    unknown_names = sorted(set(warn) - set(names))
    if unknown_names:
        raise ContractError(
            f"warn names checks that contract {model.__name__} does not have: {', '.join(unknown_names)}.",
            hint=f"The contract has {', '.join(names)}.",
            reason="unknown_constraint",
            subject=", ".join(unknown_names),
        )
    warn_names = {constraint.name for constraint in constraints if constraint.warn} | set(warn)
    key = asset_key(asset)
    specs = build_check_specs(
        asset,
        {constraint.name: constraint.description for constraint in constraints},
        check_partitions_def(asset, partitions_def, whole_table=whole_table),
        warn_names=warn_names,
    )

    declaration = CheckDeclaration(
        f"contract {model.__name__}", ConstraintGroup(schema, constraints, examples), frozenset(warn_names)
    )
    return build_check_step(
        f"{key.to_python_identifier()}__{prefix}contract",
        key,
        specs,
        [declaration],
        description=f"Contract {model.__name__} on {key.to_user_string()}, in one Spark job.",
        kind="pandera",
    )


_QUERY = re.compile(
    r"(?:\s|\(|--[^\n]*\n|/\*.*?\*/)*(select|with|from|values|table)\b", re.IGNORECASE | re.DOTALL
)


def sql_check(
    asset: CheckedAsset,
    name: str,
    sql: str,
    *,
    severity: Literal["error", "warn"] = "error",
    partitions_def: dg.PartitionsDefinition[str] | None = None,
    description: str | None = None,
    examples: int = 5,
) -> dg.AssetChecksDefinition:
    """Build an asset check that passes if a query returns no row.

    In the query, `{this}` stands for the asset's rows on the run's branch, in the run's partitions. Any other
    table is `nessie.<namespace>.<table>`, read on the same branch. To check the whole table, use its name.
    The text must be one query; a statement that changes data does not parse here. If Spark refuses the query,
    there is no verdict: the step fails and the run is not published.

    Args:
        asset (AssetKey | str | Sequence[str] | AssetsDefinition): The asset. A definition includes its
            partitions.
        name (str): The check's name: letters, digits and `_`.
        sql (str): A query in Spark SQL. The rows that it returns are the failures.
        severity (Literal["error", "warn"]): `error` blocks the publication, `warn` publishes with a
            warning. (default: `error`)
        partitions_def (Optional[PartitionsDefinition]): The partitions of the asset, if `asset` is a key.
        description (Optional[str]): The constraint in Dagster's UI. (default: the query)
        examples (int): The number of failing rows to show, 1 to 100. (default: 5)

    Returns:
        AssetChecksDefinition: One step with one check.

    Raises:
        ContractError: The name, the severity or the number of examples is not allowed.
        CheckFailedToRun: In the run: Spark could not evaluate the query.

    Examples:
        .. code-block:: python

            from branchlake_dagster import sql_check

            known_shops = sql_check(
                prices,
                "known_shops",
                "SELECT * FROM {this} WHERE shop NOT IN (SELECT name FROM nessie.shop.shops)",
            )
    """
    require_examples(examples)
    if not re.fullmatch(r"\w+", name, flags=re.ASCII):
        raise ContractError(
            f"The SQL check name {name!r} contains other characters than letters, digits and _.",
            reason="check_name",
            subject=name,
        )
    if severity not in ("error", "warn"):
        raise ContractError(
            f"SQL check {name} has the unknown severity {severity!r}.",
            hint="Use 'error' or 'warn'.",
            reason="severity",
            subject=name,
        )
    key = asset_key(asset)
    label = f"SQL check {name} on {key.to_user_string()}"
    if not _QUERY.match(sql):
        beginning = " ".join(sql.split())[:40]
        raise ContractError(
            f"{label} is not a query: it begins with {beginning!r}.",
            hint="Write a SELECT; the rows that it returns are the failures.",
            reason="not_a_query",
            subject=name,
        )
    if ROWS_PLACEHOLDER not in sql and "nessie." not in sql.lower():
        raise ContractError(
            f"{label} does not name the rows that it checks.",
            hint="Write {this} for the rows of the run, or nessie.<namespace>.<table> for a whole table.",
            reason="no_rows_named",
            subject=name,
        )
    check_description = description or " ".join(sql.split())
    warn_names = frozenset({name} if severity == "warn" else ())
    partitions = check_partitions_def(asset, partitions_def, whole_table=False)
    specs = build_check_specs(asset, {name: check_description}, partitions, warn_names=warn_names)
    check = SqlConstraint(name=name, columns=(), description=check_description, sql=sql)
    return build_check_step(
        f"{key.to_python_identifier()}__sql_{name}",
        key,
        specs,
        [CheckDeclaration(f"SQL check {name}", ConstraintGroup(None, [check], examples), warn_names)],
        description=f"SQL check {name} on {key.to_user_string()}: rows returned are failures.",
        kind="sql",
    )
