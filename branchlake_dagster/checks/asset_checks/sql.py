"""Checks written in SQL: the rows a query returns are the failures."""

from __future__ import annotations

import re
from typing import Literal

import dagster as dg

from branchlake_dagster.checks.asset_checks.specs import (
    CheckedAsset,
    asset_key,
    check_specs,
    checked_partitions,
)
from branchlake_dagster.checks.asset_checks.step import Declared, check_step
from branchlake_dagster.checks.constraints.model import ContractError, SqlConstraint, require_examples
from branchlake_dagster.checks.evaluation.judge import Asked
from branchlake_dagster.checks.evaluation.returned import THIS

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
        raise ContractError(
            f"SQL check name {name!r} may have letters, digits and _ only.", reason="check_name", subject=name
        )
    if severity not in ("error", "warn"):
        raise ContractError(
            f"SQL check {name} has severity {severity!r}.",
            hint="Say 'error' or 'warn'.",
            reason="severity",
            subject=name,
        )
    key = asset_key(asset)
    what = f"SQL check {name} on {key.to_user_string()}"
    if not _QUERY.match(sql):
        begins = " ".join(sql.split())[:40]
        raise ContractError(
            f"{what} is no query: it begins with {begins!r}.",
            hint="The rows that a SELECT returns are failures.",
            reason="not_a_query",
            subject=name,
        )
    if THIS not in sql and "nessie." not in sql.lower():
        raise ContractError(
            f"{what} does not say which rows it checks.",
            hint="Write {this} for the rows of the run, or nessie.<namespace>.<table> for a whole table.",
            reason="no_rows_named",
            subject=name,
        )
    text = description or " ".join(sql.split())
    warned = frozenset({name} if severity == "warn" else ())
    partitions = checked_partitions(asset, partitions_def, whole_table=False)
    specs = check_specs(asset, {name: text}, partitions, warned=warned)
    check = SqlConstraint(name=name, columns=(), text=text, sql=sql)
    return check_step(
        f"{key.to_python_identifier()}__sql_{name}",
        key,
        specs,
        [Declared(f"SQL check {name}", Asked(None, [check], examples), warned)],
        description=f"SQL check {name} on {key.to_user_string()}: rows returned are failures.",
        kind="sql",
    )
