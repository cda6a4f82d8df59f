"""A pandera PySpark model attached to an asset, as Dagster asset checks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import dagster as dg
from pandera.pyspark import DataFrameModel

from branchlake_dagster.checks.asset_checks.specs import (
    CheckedAsset,
    asset_key,
    check_specs,
    checked_partitions,
)
from branchlake_dagster.checks.asset_checks.step import Declared, check_step
from branchlake_dagster.checks.constraints.compiler import compile_schema
from branchlake_dagster.checks.constraints.model import ContractError, require_examples
from branchlake_dagster.checks.evaluation.judge import Asked


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
            reason="not_a_spark_model",
            subject=asset_key(asset).to_user_string(),
        )
    schema = model.to_schema()
    prefix = f"{name_prefix}_" if name_prefix else ""
    constraints = [replace(one, name=f"{prefix}{one.name}") for one in compile_schema(schema)]
    names = [one.name for one in constraints]
    unknown = sorted(set(warn) - set(names))
    if unknown:
        raise ContractError(
            f"warn names {', '.join(unknown)}, which {model.__name__} does not have.",
            hint=f"It has {', '.join(names)}.",
            reason="unknown_constraint",
            subject=", ".join(unknown),
        )
    warned = {one.name for one in constraints if one.warn} | set(warn)
    key = asset_key(asset)
    specs = check_specs(
        asset,
        {one.name: one.text for one in constraints},
        checked_partitions(asset, partitions_def, whole_table=whole_table),
        warned=warned,
    )

    part = Declared(f"contract {model.__name__}", Asked(schema, constraints, examples), frozenset(warned))
    return check_step(
        f"{key.to_python_identifier()}__{prefix}contract",
        key,
        specs,
        [part],
        description=f"Contract {model.__name__} on {key.to_user_string()}, in one Spark job.",
        kind="pandera",
    )
