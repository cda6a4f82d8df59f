"""Reading the lake from outside a run: SQL, Arrow, Polars, DuckDB, at any branch, run or moment.

Nothing here starts a server or writes to the lake.
"""

from branchlake_dagster.query.connection import LakeReader, QueryResult, connect
from branchlake_dagster.query.reference import LakeState, QueryFailed, TableNotThere

__all__ = ["LakeReader", "LakeState", "QueryFailed", "QueryResult", "TableNotThere", "connect"]
