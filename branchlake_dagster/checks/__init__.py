"""Contracts and SQL as Dagster asset checks, evaluated on the run's branch in one Spark job."""

from branchlake_dagster.checks.asset_checks import join_checks, pandera_checks, sql_check
from branchlake_dagster.checks.constraints import CheckFailedToRun, ContractError, row_predicate

__all__ = [
    "CheckFailedToRun",
    "ContractError",
    "join_checks",
    "pandera_checks",
    "row_predicate",
    "sql_check",
]
