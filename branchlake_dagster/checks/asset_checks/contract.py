"""A pandera PySpark model attached to an asset, as Dagster asset checks."""

# No `from __future__ import annotations`: Dagster reads the annotations of the compute function.
from collections.abc import Collection, Iterator
from typing import Any

import dagster as dg
from pandera.pyspark import DataFrameModel
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from branchlake_dagster.checks.asset_checks.report import asset_check_result, branch_of, words_of
from branchlake_dagster.checks.asset_checks.specs import (
    CheckedAsset,
    asset_key,
    check_specs,
    checked_partitions,
)
from branchlake_dagster.checks.constraints.compiler import compile_schema
from branchlake_dagster.checks.constraints.model import (
    CheckFailedToRun,
    Constraint,
    ContractError,
    PanderaConstraint,
    SchemaConstraint,
    require_examples,
)
from branchlake_dagster.checks.evaluation.judge import judge


def pandera_checks(
    asset: CheckedAsset,
    model: "type[DataFrameModel[Any]]",
    *,
    partitions_def: dg.PartitionsDefinition[str] | None = None,
    warn: Collection[str] = (),
    examples: int = 5,
    name_prefix: str | None = None,
    whole_table: bool = False,
) -> dg.AssetChecksDefinition:
    """Asset checks for every promise of a pandera model, evaluated in one Spark job on the asset's rows.

    The rows come through the asset's IO manager, so they are those of the run's branch and, for a
    partitioned asset, of the run's partitions. A breach has severity ERROR and blocks the publication.

    Args:
        asset (AssetKey | str | Sequence[str] | AssetsDefinition): The asset; a definition brings its
            partitioning.
        model (type[DataFrameModel]): A model of `pandera.pyspark`.
        partitions_def (Optional[PartitionsDefinition]): The asset's, when `asset` is a key.
        warn (Collection[str]): Checks (by their name in Dagster) whose breach has severity WARN and is
            published; those of pandera fields with `raise_warning=True` are as well. (default: none)
        examples (int): Failing rows that are shown per check, 1 to 100. (default: 5)
        name_prefix (Optional[str]): Tells the checks of two models on one asset apart.
        whole_table (bool): Check all of the table, not the run's partitions alone. (default: False)

    Returns:
        AssetChecksDefinition: One step with a check for each promise.

    Raises:
        ContractError: The model cannot be a check, or has no check that `warn` names.
        CheckFailedToRun: In the run: Spark could not evaluate it, so there is no verdict.

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
            f"The contract of {asset_key(asset).to_user_string()} is {model!r}: no pandera model for Spark.",
            hint="Derive it from pandera.pyspark.DataFrameModel; rows are checked where they are, in Spark.",
        )
    schema = model.to_schema()
    prefix = f"{name_prefix}_" if name_prefix else ""
    constraints = {f"{prefix}{constraint.name}": constraint for constraint in compile_schema(schema)}
    unknown = sorted(set(warn) - set(constraints))
    if unknown:
        raise ContractError(
            f"warn names {', '.join(unknown)}, which {model.__name__} does not have.",
            hint=f"It has {', '.join(constraints)}.",
        )
    warned = {name for name, constraint in constraints.items() if constraint.warn} | set(warn)
    key = asset_key(asset)
    specs = check_specs(
        asset,
        {name: constraint.text for name, constraint in constraints.items()},
        checked_partitions(asset, partitions_def, whole_table=whole_table),
    )

    @dg.multi_asset_check(
        name=f"{key.to_python_identifier()}__{prefix}contract",
        description=f"Contract {model.__name__} on {key.to_user_string()}, in one Spark job.",
        specs=specs,
        ins={"rows": dg.AssetIn(key)},
        compute_kind="pandera",
        can_subset=True,
    )
    def contract(context: dg.AssetCheckExecutionContext, rows: DataFrame) -> Iterator[dg.AssetCheckResult]:
        selected = {check.name for check in context.selected_asset_check_keys}
        wanted = {name: constraint for name, constraint in constraints.items() if name in selected}
        try:
            branch = branch_of(rows)
            outcomes = judge(rows, schema, list(wanted.values()), examples=examples)
        except PySparkException as error:
            raise CheckFailedToRun(
                f"Contract {model.__name__} on {key.to_user_string()} could not be evaluated: "
                f"{words_of(error)}",
                hint="Nothing is known about these rows, so the run will not be published.",
            ) from error
        for name, constraint in wanted.items():
            yield asset_check_result(
                name,
                constraint.text,
                outcomes[constraint.name],
                warn=name in warned,
                evaluation=_evaluation(constraint),
                branch=branch,
            )

    return contract


def _evaluation(constraint: Constraint) -> str:
    if isinstance(constraint, SchemaConstraint):
        return "from the schema, no rows read"
    if isinstance(constraint, PanderaConstraint):
        return "by pandera itself, a query of its own, no counts"
    return "in the contract's one Spark job"
