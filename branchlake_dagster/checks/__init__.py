"""Checks: contracts and SQL as Dagster asset checks, evaluated on the run's branch in one Spark job."""

from branchlake_dagster.checks.asset_checks import join_checks, pandera_checks, sql_check
from branchlake_dagster.checks.constraints import CheckFailedToRun, ContractError, row_predicate
from branchlake_dagster.tables.specification import CHECK_SCOPE

__all__ = [
    "CHECK_SCOPE",
    "CheckFailedToRun",
    "ContractError",
    "join_checks",
    "pandera_checks",
    "row_predicate",
    "sql_check",
]
