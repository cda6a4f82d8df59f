"""What can be wrong with a query."""

# Named like the other outcomes of the package.
# ruff: noqa: N818

from __future__ import annotations

from branchlake_dagster.errors import BranchlakeError, Terminal


class QueryFailed(BranchlakeError, Terminal):
    """The SQL cannot be run; the text quotes DuckDB."""


class TableNotThere(QueryFailed):
    """The SQL names a table that the lake does not have at that reference."""


class NoSuchState(BranchlakeError, Terminal):
    """No branch, run or moment of that name is in the lake."""
