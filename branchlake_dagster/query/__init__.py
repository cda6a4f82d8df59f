"""Reads of the lake outside a run: SQL, Arrow, Polars and DuckDB, at any branch, run or time.

Nothing in this package starts a server or writes to the lake.
"""

from branchlake_dagster.query.connection import LakeReader, QueryResult, connect
from branchlake_dagster.query.reference import LakeState, QueryFailed, TableNotThere

__all__ = ["LakeReader", "LakeState", "QueryFailed", "QueryResult", "TableNotThere", "connect"]
