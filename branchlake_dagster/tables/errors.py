"""Errors that a run can meet when it reads or writes its branch."""

from __future__ import annotations

from typing import Any, Self

from branchlake_dagster.errors import BranchlakeError, ConfigurationError, Terminal, Transient

# ruff: noqa: N818 - outcomes, named as in lakehouse/errors.py


class RunBranchGone(BranchlakeError, Terminal):
    """The run's branch was deleted during the run. None of the run's changes will be published."""


class OneLakeOnly(BranchlakeError, Terminal):
    """A run uses tables of two lakes, which cannot be published in one step."""


class RetryNeedsFullRun(BranchlakeError, Terminal):
    """A retry of some steps cannot continue earlier work: launch a run of all steps instead.

    The branch of the parent run was deleted or published, another run uses it, or other writes have changed
    the rows that an earlier attempt of the step wrote.
    """


class InvalidCheckRun(BranchlakeError, Terminal):
    """A run has the tags of a check run of the publisher, but they do not name a valid prepared state."""


class SchemaMismatch(BranchlakeError, Terminal):
    """The written frame does not fit the table, and no lossless change of the table would make it fit."""


class ColumnsFrozen(SchemaMismatch):
    """The written frame would change the columns of a table with `table_metadata(columns="freeze")`.

    `columns` are the columns that the frame would add or widen, by dotted path.
    """

    def __init__(self, message: str, *, columns: tuple[str, ...], **where: Any) -> None:
        super().__init__(message, **where)
        self.columns = columns


class InputColumnGone(BranchlakeError, Terminal):
    """An input no longer has the column by which an asset consumes its changes.

    `column` is the name of that column. `renamed_to` is its present name, or None if the column was removed
    or never existed.
    """

    def __init__(self, message: str, *, column: str, renamed_to: str | None = None, **where: Any) -> None:
        super().__init__(message, **where)
        self.column = column
        self.renamed_to = renamed_to


class ColumnUnsupported(BranchlakeError, Terminal):
    """The lake cannot store a column's type, or some of its values, without loss."""


class PartitionMismatch(BranchlakeError, Terminal):
    """The written frame has rows outside the partitions of the run, or the run has no partitions.

    The `reason` is `no_partitions` if a run without partitions writes a partitioned asset.
    """

    @classmethod
    def of_run_without_partitions(cls, asset: str, table: str) -> Self:
        """Return the error for a run without partitions that writes a partitioned asset."""
        return cls(
            f"Asset {asset} has partitions, but the run has none. It could replace rows of every partition.",
            table=table,
            hint="Launch the asset for a partition, or for a range of partitions.",
            reason="no_partitions",
        )


class UpsertKeyInvalid(BranchlakeError, Terminal):
    """The keys of an upsert are missing from the frame, are null, or occur twice in one write."""


class TableMissing(BranchlakeError, Terminal):
    """An asset is loaded, but it has no table on the run's branch."""

    @classmethod
    def of_asset(cls, asset: str, table: str, branch: str) -> Self:
        """Return the error for an asset, with the dotted name of its table."""
        return cls(
            f"Asset {asset} has no table on branch {branch}.",
            table=table,
            branch=branch,
            hint="Materialize and publish it first, or include it in this run's selection. An asset that"
            " returns None creates no table: return a frame without rows, or skip the output.",
        )


class UnsupportedType(BranchlakeError, Terminal):
    """The IO manager cannot write or load this Python type."""


class ForeignSession(BranchlakeError, Terminal):
    """A Spark frame belongs to a session that does not use the run's branch."""


class ReadsUnknown(BranchlakeError, Terminal):
    """A serializable asset reads in a way that cannot be recorded, so its isolation cannot be guaranteed."""


class PositionUnreadable(BranchlakeError, Terminal):
    """The record in a table's properties of what it has consumed of its inputs cannot be parsed."""


class RowsRemoved(BranchlakeError, Terminal):
    """Rows of an input were updated or deleted, but the asset's table only takes new rows."""


class NotApproved(BranchlakeError, Terminal):
    """A run consumed an unapproved result that was published after the launch of the run."""


class LeaseHeld(BranchlakeError, Transient):
    """Another run held the lease of `table_metadata(exclusive=…)` for longer than this run waited."""


class LeaseLost(BranchlakeError, Terminal):
    """Another run has taken over the exclusive lease. None of this run's changes will be published."""


def name_in_use_error(table: str) -> ConfigurationError:
    """Return the error for a table whose dotted name belongs to a namespace, view or function."""
    return ConfigurationError(
        "The table cannot be created, because its name is that of a namespace, view or function.",
        table=table,
        hint="Change the key of the asset, or of the assets whose tables are in a namespace of this name."
        f" Drop an empty namespace in an asset with lakehouse.catalog().drop_namespace({table!r}).",
        reason="name_in_use",
    )


def no_namespace_error(table: str) -> ConfigurationError:
    """Return the error for a table whose namespace cannot be created, because its name is in use."""
    return ConfigurationError(
        "The table cannot be created, because its namespace, or a parent of the namespace, has the name of a"
        " table, view or function.",
        table=table,
        hint="Change the key of the asset, or of the asset that has the table of this name.",
        reason="no_namespace",
    )
