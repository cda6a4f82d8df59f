"""Checks: contracts and SQL as Dagster asset checks, evaluated on the run's branch in one Spark job."""

from branchlake_dagster.branching.tables import CHECK_SCOPE
from branchlake_dagster.checks.contract import pandera_checks
from branchlake_dagster.checks.model import CheckFailedToRun, ContractError
from branchlake_dagster.checks.predicate import row_predicate
from branchlake_dagster.checks.sql import sql_check

__all__ = ["CHECK_SCOPE", "CheckFailedToRun", "ContractError", "pandera_checks", "row_predicate", "sql_check"]
