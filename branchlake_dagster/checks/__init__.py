"""Checks: contracts and SQL as Dagster asset checks, evaluated on the run's branch in one Spark job."""

from branchlake_dagster.branching.table.spec import CHECK_SCOPE
from branchlake_dagster.checks.asset_checks.contract import pandera_checks
from branchlake_dagster.checks.asset_checks.join import join_checks
from branchlake_dagster.checks.asset_checks.sql import sql_check
from branchlake_dagster.checks.constraints.model import CheckFailedToRun, ContractError
from branchlake_dagster.checks.constraints.predicate import row_predicate

__all__ = [
    "CHECK_SCOPE",
    "CheckFailedToRun",
    "ContractError",
    "join_checks",
    "pandera_checks",
    "row_predicate",
    "sql_check",
]
