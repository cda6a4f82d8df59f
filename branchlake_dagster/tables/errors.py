"""What can go wrong when a run reads or writes its branch."""

from __future__ import annotations

from typing import Any

from branchlake_dagster.errors import BranchlakeError, Terminal, Transient

# ruff: noqa: N818 - outcomes, named as in lakehouse/errors.py


class RunBranchGone(BranchlakeError, Terminal):
    """The run's branch was deleted under it: the run was fenced, nothing of it will be published."""


class OneLakeOnly(BranchlakeError, Terminal):
    """A run uses tables of two lakes; it could not be published to both in one step."""


class RetryNeedsFullRun(BranchlakeError, Terminal):
    """A retry of some steps cannot continue on its parent's state: it is gone, published or in use."""


class InvalidCheckRun(BranchlakeError, Terminal):
    """A run's tags say that it repeats checks for the publisher, but do not name a prepared state."""


class SchemaMismatch(BranchlakeError, Terminal):
    """The written frame does not fit the table, and no change that loses nothing makes it fit."""


class ColumnsFrozen(SchemaMismatch):
    """The written frame would change the columns of a table that `table_metadata(columns="freeze")` keeps.

    `columns` are the columns that the frame would add or widen, by dotted path.
    """

    def __init__(self, message: str, *, columns: tuple[str, ...], **where: Any) -> None:
        super().__init__(message, **where)
        self.columns = columns


class InputColumnGone(BranchlakeError, Terminal):
    """An input has no longer the column by which an asset consumes its changes.

    `column` is its name, `renamed_to` its present name; None: it was removed, or never there.
    """

    def __init__(self, message: str, *, column: str, renamed_to: str | None = None, **where: Any) -> None:
        super().__init__(message, **where)
        self.column = column
        self.renamed_to = renamed_to


class ColumnUnsupported(BranchlakeError, Terminal):
    """A column's type, or some of its values, cannot be stored as they are."""


class PartitionMismatch(BranchlakeError, Terminal):
    """The written frame holds rows outside the partitions of the run."""


class UpsertKeyInvalid(BranchlakeError, Terminal):
    """An upsert's keys are missing from the frame, or rows of one write share a key."""


class TableMissing(BranchlakeError, Terminal):
    """An asset is loaded that has no table on the run's branch."""


class UnsupportedType(BranchlakeError, Terminal):
    """The IO manager does not know how to write or load this Python type."""


class ForeignSession(BranchlakeError, Terminal):
    """A Spark frame belongs to a session that does not stand on the run's branch."""


class ReadsUnknown(BranchlakeError, Terminal):
    """A serializable asset reads in a way that cannot be seen, so that its isolation could not be kept."""


class PositionUnreadable(BranchlakeError, Terminal):
    """What a table says it has consumed of its inputs cannot be read."""


class RowsRemoved(BranchlakeError, Terminal):
    """Rows of an input have gone, and the asset takes only rows that come."""


class NotApproved(BranchlakeError, Terminal):
    """A run consumed a result that waits for approval, and was published after the run was launched."""


class LeaseHeld(BranchlakeError, Transient):
    """Another run is the one that may write what is exclusive, and did not end while this one waited."""


class LeaseLost(BranchlakeError, Terminal):
    """Another run has taken over what is exclusive; nothing of this one will be published."""
