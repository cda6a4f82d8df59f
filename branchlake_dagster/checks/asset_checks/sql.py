"""Checks written in SQL: the rows a query returns are the failures."""

# No `from __future__ import annotations`: Dagster reads the annotations of the compute function.
import re
from typing import Literal

import dagster as dg
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster.checks.asset_checks.report import asset_check_result, branch_of, words_of
from branchlake_dagster.checks.asset_checks.specs import (
    CheckedAsset,
    asset_key,
    check_specs,
    checked_partitions,
)
from branchlake_dagster.checks.constraints.model import (
    CheckFailedToRun,
    ContractError,
    Outcome,
    RowConstraint,
    require_examples,
)
from branchlake_dagster.checks.evaluation.evaluate import Collect, collect_rows, evaluate

THIS = "{this}"
"""Stands for the checked rows in the text of a SQL check."""

_QUERY = re.compile(
    r"(?:\s|\(|--[^\n]*\n|/\*.*?\*/)*(select|with|from|values|table)\b", re.IGNORECASE | re.DOTALL
)

_RETURNED = RowConstraint(name="returned", columns=(), text="", holds=lambda _: F.lit(False), typed=False)


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
    """An asset check that passes when a query returns no row.

    In the query, `{this}` is the asset's rows (on the run's branch, of the run's partitions), and any other
    table is `nessie.<namespace>.<table>`, read on the same branch. It must be one query; a statement that
    changes something does not parse here. A query Spark refuses leaves no verdict: the step fails and the
    run is not published. To check the whole table, address it by name.

    Args:
        asset (AssetKey | str | Sequence[str] | AssetsDefinition): The asset; a definition brings its
            partitioning.
        name (str): The check's name: letters, digits and `_`.
        sql (str): A query in Spark's SQL; the rows that it returns are the failures.
        severity (Literal["error", "warn"]): `error` blocks the publication, `warn` publishes with a
            warning. (default: `error`)
        partitions_def (Optional[PartitionsDefinition]): The asset's, when `asset` is a key.
        description (Optional[str]): For the UI. (default: the query)
        examples (int): Failing rows that are shown, 1 to 100. (default: 5)

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
        raise ContractError(f"SQL check name {name!r} may have letters, digits and _ only.")
    if severity not in ("error", "warn"):
        raise ContractError(f"SQL check {name} has severity {severity!r}.", hint="Say 'error' or 'warn'.")
    key = asset_key(asset)
    what = f"SQL check {name} on {key.to_user_string()}"
    if not _QUERY.match(sql):
        begins = " ".join(sql.split())[:40]
        raise ContractError(
            f"{what} is no query: it begins with {begins!r}.",
            hint="The rows that a SELECT returns are failures.",
        )
    if THIS not in sql and "nessie." not in sql.lower():
        raise ContractError(
            f"{what} does not say which rows it checks.",
            hint="Write {this} for the rows of the run, or nessie.<namespace>.<table> for a whole table.",
        )
    text = description or " ".join(sql.split())
    specs = check_specs(asset, {name: text}, checked_partitions(asset, partitions_def, whole_table=False))

    @dg.multi_asset_check(
        name=f"{key.to_python_identifier()}__sql_{name}",
        description=f"SQL check {name} on {key.to_user_string()}: rows returned are failures.",
        specs=specs,
        ins={"rows": dg.AssetIn(key)},
        compute_kind="sql",
    )
    def failures(context: dg.AssetCheckExecutionContext, rows: DataFrame) -> dg.AssetCheckResult:
        # Two checks of a run may share a session, so the view is named after both asset and check.
        view = f"branchlake_this_{key.to_python_identifier()}_{name}"  # letters, digits and _ only
        try:
            outcome = returned_rows(rows, sql, view=view, examples=examples)
            branch = branch_of(rows)
        except PySparkException as error:
            raise CheckFailedToRun(
                f"SQL check {name} on {key.to_user_string()} could not be evaluated: {words_of(error)}",
                run_id=context.run.run_id,
                hint="Correct the query; until then there is no verdict and the run is not published.",
            ) from error
        return asset_check_result(
            name, text, outcome, warn=severity == "warn", evaluation=sql.strip(), branch=branch
        )

    return failures


def returned_rows(
    rows: DataFrame, sql: str, *, view: str, examples: int, collect: Collect = collect_rows
) -> Outcome:
    """How many rows `sql` returns, and `examples` of them, with one call of `collect`.

    `view` is the name under which `rows` is visible meanwhile. Raises Spark's own errors.
    """
    rows.createOrReplaceTempView(view)
    try:
        # As a subquery the text can only be a query: Spark's grammar has no INSERT or DROP there.
        query = f"SELECT * FROM (\n{sql.strip().rstrip(';').replace(THIS, view)}\n) AS failures"  # noqa: S608
        frame = rows.sparkSession.sql(query)
        names = _apart(frame.columns)
        found = evaluate(frame.toDF(*names), [_RETURNED], examples=examples, collect=collect)["returned"]
    finally:
        rows.sparkSession.catalog.dropTempView(view)
    return Outcome(passed=found.passed, failing=found.failing, examples=found.examples)


def _apart(columns: list[str]) -> list[str]:
    """The column names, numbered where one repeats: `a.*, b.*` is a natural way to show a failure."""
    names: list[str] = []
    taken: set[str] = set()
    for column in columns:
        name, count = column, 1
        while name.lower() in taken:  # Spark resolves names without regard to case
            count += 1
            name = f"{column}_{count}"
        taken.add(name.lower())
        names.append(name)
    return names
